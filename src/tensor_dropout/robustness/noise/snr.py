"""Noise of a given signal-to-noise ratio: the paper's Gaussian, and Rician for MRI."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.noise.checks import draw_normal, is_finite, require, require_low, widen


def add_gaussian(x: Tensor, snr: float, generator: torch.Generator) -> Tensor:
    """Add white Gaussian noise of a given signal-to-noise ratio, as the paper does to MRI; not clipped.

    ``y = x + σ n`` with n ~ N(0, 1) and ``SNR = σ²_signal / σ²_noise``, a ratio of variances: ``σ² = Var(x) / SNR``,
    where Var is over all channels and positions of one example. A constant example has no signal and gets no noise.

    Args:
        x: (B, C, *size).
        snr: positive and finite; smaller is noisier.
        generator: of the noise.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``snr`` is not positive and finite, or x is not such a batch.

    Example:
        >>> x = torch.arange(65536.0).view(1, 1, 256, 256)
        >>> noisy = add_gaussian(x, 4.0, torch.Generator().manual_seed(0))
        >>> round(measure_snr(x, noisy), 1)
        4.0
    """
    wide = widen("add_gaussian", x)
    return (wide + _noise_std("add_gaussian", wide, snr) * draw_normal(wide, generator)).to(x.dtype)


def add_rician(x: Tensor, snr: float, generator: torch.Generator, low: float | None = 0.0) -> Tensor:
    """Turn intensities into the magnitudes that an MRI scanner would measure under complex noise; not clipped.

    ``y = low + √((x − low + σ n₁)² + (σ n₂)²)`` with n₁, n₂ ~ N(0, 1): Gaussian noise in the real and the imaginary
    part. With the amplitude ``A = x − low`` and the magnitude ``m = y − low``, ``E[m²] = A² + 2σ²``. Where A ≫ σ the
    noise is nearly Gaussian of variance σ²; where A = 0 it is Rayleigh, of mean ``σ √(π/2)``, so dark regions brighten.
    H. Gudbjartsson and S. Patz, "The Rician distribution of noisy MRI data", Magn. Reson. Med. 34(6), 1995.

    σ follows from the same ratio of variances as in :func:`add_gaussian`, ``σ² = Var(x) / SNR``, so that equal SNRs are
    equally noisy receivers. It is not the ratio A / σ of one voxel that Gudbjartsson and Patz call SNR.

    If a scan was shifted and scaled by ``x = a v + b``, a > 0, e.g. to mean 0 and variance 1, its y is ``a`` times that
    of v plus b: only the place of ``low`` has to be known, and that is where the darkest voxels of a scan are.

    Args:
        x: (B, C, *size), not below ``low``.
        snr: positive and finite; smaller is noisier.
        generator: of the noise.
        low: the intensity of no signal, finite; None: the smallest value of each example.

    Returns:
        (B, C, *size), not below ``low``.

    Raises:
        TensorDropoutError: if ``snr`` is not positive and finite, ``low`` is not finite, or x is not such a batch.

    Example:
        >>> x = torch.tensor([[[0.0, 0.0, 8.0, 8.0]]])
        >>> bool((add_rician(x, 1.0, torch.Generator().manual_seed(0)) >= 0).all())
        True
    """
    wide = widen("add_rician", x)
    if low is not None:
        require_low("add_rician", low)
    floor = wide.amin(dim=tuple(range(1, x.ndim)), keepdim=True) if low is None else low
    std = _noise_std("add_rician", wide, snr)
    real = wide - floor + std * draw_normal(wide, generator)
    imaginary = std * draw_normal(wide, generator)
    return (floor + torch.hypot(real, imaginary)).to(x.dtype)


def measure_snr(clean: Tensor, noisy: Tensor) -> float:
    """The signal-to-noise ratio of a whole batch.

    ``Σ_b Var(clean_b) / Σ_b mean((noisy_b − clean_b)²)``: the variance of an example over its channels and positions,
    averaged over the examples, divided by the average power of the change. It is a ratio of averages, not an average of
    ratios, so constant examples do not break it. The power is about zero: a change of the mean counts as noise.

    Args:
        clean: (B, C, *size).
        noisy: (B, C, *size).

    Returns:
        The ratio; infinite if nothing changed.

    Raises:
        TensorDropoutError: if the shapes differ, or the tensors are not such batches.

    Example:
        >>> clean = torch.tensor([[[-2.0, 2.0]]])
        >>> measure_snr(clean, clean + torch.tensor([1.0, -1.0])), measure_snr(clean, clean)
        (4.0, inf)
    """
    if clean.shape != noisy.shape:
        raise TensorDropoutError(
            f"measure_snr: clean and noisy must have the same shape, not {tuple(clean.shape)} and "
            f"{tuple(noisy.shape)}; pass the batch and what a corruption made of it"
        )
    clean, noisy = widen("measure_snr", clean).double(), widen("measure_snr", noisy).double()
    signal = clean.flatten(1).var(dim=1, correction=0).mean()
    noise = (noisy - clean).square().mean()
    return float(signal / noise) if noise > 0 else math.inf


def _noise_std(what: str, x: Tensor, snr: float) -> Tensor:
    """σ = √(Var(x) / SNR) of every example, (B, 1, ..)."""
    fits = is_finite(snr) and snr > 0
    require(what, "snr", snr, fits, "a positive, finite ratio of variances (signal / noise), e.g. 4")
    return (x.var(dim=tuple(range(1, x.ndim)), correction=0, keepdim=True) / snr).sqrt()
