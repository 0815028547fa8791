"""Corruptions of inputs, for measuring robustness to noise: the paper's Gaussian, Rician for MRI, and common families.

Every function takes a float batch (B, C, *size) with one to three spatial axes and returns a new one of the same shape,
dtype and device. Randomness comes from the generator that is passed and from nowhere else: equal states give equal
noise. The numbers are drawn on the generator's device, so a CPU generator gives the same noise to any device.

The functions do not clip. :data:`CORRUPTIONS` does, for corruptions of stored images; see :class:`Corruption`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError

Bounds = tuple[float, float]
"""The smallest and largest value of a stored image; either may be infinite."""

UNBOUNDED: Bounds = (-math.inf, math.inf)


# Noise of a given signal-to-noise ratio.


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
    wide = _widen("add_gaussian", x)
    return (wide + _noise_std("add_gaussian", wide, snr) * _draw_normal(wide, generator)).to(x.dtype)


def add_rician(x: Tensor, snr: float, generator: torch.Generator, low: float = 0.0) -> Tensor:
    """Turn intensities into the magnitudes that an MRI scanner would measure under complex noise; not clipped.

    ``y = low + √((x − low + σ n₁)² + (σ n₂)²)`` with n₁, n₂ ~ N(0, 1): Gaussian noise in the real and the imaginary
    part. With the amplitude ``A = x − low`` and the magnitude ``m = y − low``, ``E[m²] = A² + 2σ²``. Where A ≫ σ the
    noise is nearly Gaussian of variance σ²; where A = 0 it is Rayleigh, of mean ``σ √(π/2)``, so dark regions brighten.
    H. Gudbjartsson and S. Patz, "The Rician distribution of noisy MRI data", Magn. Reson. Med. 34(6), 1995.

    σ follows from the same ratio of variances as in :func:`add_gaussian`, ``σ² = Var(x) / SNR``, so that equal SNRs are
    equally noisy receivers. It is not the ratio A / σ of one voxel that Gudbjartsson and Patz call SNR.

    Args:
        x: (B, C, *size), not below ``low``.
        snr: positive and finite; smaller is noisier.
        generator: of the noise.
        low: the intensity of no signal, finite.

    Returns:
        (B, C, *size), not below ``low``.

    Raises:
        TensorDropoutError: if ``snr`` is not positive and finite, ``low`` is not finite, or x is not such a batch.

    Example:
        >>> x = torch.tensor([[[0.0, 0.0, 8.0, 8.0]]])
        >>> bool((add_rician(x, 1.0, torch.Generator().manual_seed(0)) >= 0).all())
        True
    """
    wide = _widen("add_rician", x)
    _require_low("add_rician", low)
    std = _noise_std("add_rician", wide, snr)
    real = wide - low + std * _draw_normal(wide, generator)
    imaginary = std * _draw_normal(wide, generator)
    return (low + torch.hypot(real, imaginary)).to(x.dtype)


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
    clean, noisy = _widen("measure_snr", clean).double(), _widen("measure_snr", noisy).double()
    signal = clean.flatten(1).var(dim=1, correction=0).mean()
    noise = (noisy - clean).square().mean()
    return float(signal / noise) if noise > 0 else math.inf


# Noise of a sensor.


def salt_and_pepper(x: Tensor, amount: float, generator: torch.Generator, bounds: Bounds) -> Tensor:
    """Set positions to the lowest or the highest value.

    Each position, independently and with all its channels together, becomes ``low`` with probability ``amount / 2``,
    ``high`` with probability ``amount / 2``, and stays as it is otherwise.

    Args:
        x: (B, C, *size).
        amount: the expected share of the positions, between 0 and 1.
        generator: of the choice.
        bounds: (low, high), finite.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``amount`` is not a share, the bounds are not finite, or x is not such a batch.

    Example:
        >>> salt_and_pepper(torch.full((1, 1, 8), 5.0), 0.5, torch.Generator().manual_seed(0), (0.0, 9.0))
        tensor([[[5., 9., 0., 0., 5., 5., 5., 9.]]])
    """
    wide = _widen("salt_and_pepper", x)
    _require_share("salt_and_pepper", "amount", amount)
    low, high = _require_bounds("salt_and_pepper", bounds)
    shape = (x.shape[0], 1, *x.shape[2:])
    draws = torch.rand(shape, generator=generator, dtype=wide.dtype, device=generator.device).to(x.device)
    peppered = torch.where(draws < amount / 2, low, wide)
    return torch.where(draws >= 1 - amount / 2, high, peppered).to(x.dtype)


def add_shot(x: Tensor, photons: float, generator: torch.Generator, bounds: Bounds) -> Tensor:
    """Count photons: Poisson noise, whose variance grows with the intensity.

    ``y = low + (high − low) k / photons`` with ``k ~ Poisson(photons · (x − low) / (high − low))``, so ``E[y] = x``.

    Args:
        x: (B, C, *size) within the bounds.
        photons: how many are expected at ``high``, positive and finite; fewer are noisier.
        generator: of the counts.
        bounds: (low, high), finite.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``photons`` is not positive and finite, the bounds are not finite, or x is not a batch
            within them.

    Example:
        >>> add_shot(torch.full((1, 1, 4), 0.5), 10, torch.Generator().manual_seed(0), (0.0, 1.0)).shape
        torch.Size([1, 1, 4])
    """
    wide = _widen("add_shot", x)
    _require("add_shot", "photons", photons, _is_finite(photons) and photons > 0, "a positive, finite number, e.g. 64")
    low, high = _require_bounds("add_shot", bounds)
    _require_inside("add_shot", x, bounds)
    rates = (wide - low) * (photons / (high - low))
    counts = torch.poisson(rates.to(generator.device), generator=generator).to(x.device)
    return (low + counts * ((high - low) / photons)).to(x.dtype)


def add_speckle(x: Tensor, std: float, generator: torch.Generator, low: float = 0.0) -> Tensor:
    """Multiply every intensity by its own random factor: ``y = low + (x − low)(1 + std · n)`` with n ~ N(0, 1).

    Args:
        x: (B, C, *size).
        std: of the factor, not negative and finite.
        generator: of the factors.
        low: the intensity of no signal, finite; it stays as it is.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``std`` is negative or not finite, ``low`` is not finite, or x is not such a batch.

    Example:
        >>> add_speckle(torch.zeros(1, 1, 3), 0.5, torch.Generator().manual_seed(0))
        tensor([[[0., 0., 0.]]])
    """
    wide = _widen("add_speckle", x)
    _require("add_speckle", "std", std, _is_finite(std) and std >= 0, "a finite number of at least 0, e.g. 0.2")
    _require_low("add_speckle", low)
    return (low + (wide - low) * (1 + std * _draw_normal(wide, generator))).to(x.dtype)


# Loss of detail.


def blur(x: Tensor, sigma: float) -> Tensor:
    """Blur along every spatial axis with a Gaussian of standard deviation ``sigma`` pixels.

    One axis after the other, with weights ``∝ exp(−k² / 2σ²)`` of sum 1 for ``|k| ≤ 4σ + ½``; beyond the border the
    outermost pixel goes on. A constant channel stays exactly as it is.

    Args:
        x: (B, C, *size).
        sigma: in pixels, positive and finite.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``sigma`` is not positive and finite, or x is not such a batch.

    Example:
        >>> blur(torch.tensor([[[0.0, 0.0, 1.0, 0.0, 0.0]]]), 0.5).round(decimals=2)
        tensor([[[0.0000, 0.1100, 0.7900, 0.1100, 0.0000]]])
    """
    wide = _widen("blur", x)
    _require("blur", "sigma", sigma, _is_finite(sigma) and sigma > 0, "a positive, finite number of pixels, e.g. 1.5")
    radius = int(4 * sigma + 0.5)
    weights = [math.exp(-0.5 * (offset / sigma) ** 2) for offset in range(-radius, radius + 1)]
    total = math.fsum(weights)
    level = wide.flatten(2)[:, :, :1].view(*wide.shape[:2], *[1] * (wide.ndim - 2))
    blurred = wide - level  # constant channels become 0, on which no rounding occurs
    for axis, cells in enumerate(x.shape[2:], start=2):
        # Shifts and sums: on CPU several times as fast as conv1d, and on GPU never rounded to TF32.
        places = torch.arange(-radius, cells + radius, device=x.device).clamp(0, cells - 1)
        padded = blurred.index_select(axis, places)
        blurred = torch.zeros_like(wide)
        for start, weight in enumerate(weights):
            blurred.add_(padded.narrow(axis, start, cells), alpha=weight / total)
    return (level + blurred).to(x.dtype)


def pixelate(x: Tensor, block: float) -> Tensor:
    """Replace every block of pixels by its mean: down to a coarse grid and up again.

    Blocks start at the first pixel; those at the end may be smaller.

    Args:
        x: (B, C, *size).
        block: the edge of a block in pixels, a whole number of at least 1.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``block`` is not a positive whole number, or x is not such a batch.

    Example:
        >>> pixelate(torch.tensor([[[0.0, 2.0, 4.0, 6.0, 9.0]]]), 2)
        tensor([[[1., 1., 5., 5., 9.]]])
    """
    coarse = _widen("pixelate", x)
    whole = _is_finite(block) and block >= 1 and block == int(block)
    _require("pixelate", "block", block, whole, "a positive whole number of pixels, e.g. 4")
    edges = [min(int(block), cells) for cells in x.shape[2:]]
    pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[x.ndim - 3]
    coarse = pool(coarse, edges, edges, ceil_mode=True)
    for axis, edge in enumerate(edges, start=2):
        coarse = coarse.repeat_interleave(edge, axis).narrow(axis, 0, x.shape[axis])
    return coarse.to(x.dtype)


def occlude(x: Tensor, share: float, generator: torch.Generator, low: float = 0.0) -> Tensor:
    """Cover one box of each example with ``low``.

    The box has the proportions of the image, edges ``round(cells · share^(1/axes))`` of at least one pixel, and lies
    anywhere inside with equal probability. It covers all channels.

    Args:
        x: (B, C, *size).
        share: of the positions that are covered, above 0 and at most 1.
        generator: of the places.
        low: the value of the box, finite.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``share`` is not such a share, ``low`` is not finite, or x is not such a batch.

    Example:
        >>> occlude(torch.ones(1, 1, 3, 6), 1 / 9, torch.Generator().manual_seed(0))
        tensor([[[[1., 1., 1., 1., 1., 1.],
                  [1., 1., 1., 1., 1., 1.],
                  [1., 1., 1., 1., 0., 0.]]]])
    """
    wide = _widen("occlude", x)
    _require_share("occlude", "share", share, positive=True)
    _require_low("occlude", low)
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for axis, cells in enumerate(x.shape[2:], start=2):
        edge = max(1, round(cells * share ** (1 / (x.ndim - 2))))
        draws = torch.randint(cells - edge + 1, (x.shape[0],), generator=generator, device=generator.device)
        start = draws.to(x.device)[:, None]
        places = torch.arange(cells, device=x.device)
        covered = (places >= start) & (places < start + edge)  # (B, cells)
        inside = inside & covered.view([-1 if i == 0 else cells if i == axis else 1 for i in range(x.ndim)])
    return torch.where(inside, low, wide).to(x.dtype)


# Changes of gain.


def change_brightness(x: Tensor, shift: float, bounds: Bounds) -> Tensor:
    """Add the same number everywhere: ``y = x + shift · (high − low)``.

    A network that standardizes every image undoes the shift; what is left of it is what clipping takes.

    Args:
        x: (B, C, *size).
        shift: as a share of the range, between −1 and 1; negative is darker.
        bounds: (low, high), finite.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``shift`` is out of range, the bounds are not finite, or x is not such a batch.

    Example:
        >>> change_brightness(torch.tensor([[[0.0, 100.0]]]), 0.1, (0.0, 200.0))
        tensor([[[ 20., 120.]]])
    """
    wide = _widen("change_brightness", x)
    fits = _is_finite(shift) and abs(shift) <= 1
    _require("change_brightness", "shift", shift, fits, "a share of the range between -1 and 1, e.g. 0.2")
    low, high = _require_bounds("change_brightness", bounds)
    return (wide + shift * (high - low)).to(x.dtype)


def change_contrast(x: Tensor, factor: float) -> Tensor:
    """Scale the distance from the mean of the example: ``y = mean(x) + factor · (x − mean(x))``.

    The mean is over all channels and positions. A network that standardizes every image undoes it but for clipping,
    so factors below 1 are a check of the pipeline there rather than of the network.

    Args:
        x: (B, C, *size).
        factor: not negative and finite; below 1 is flatter.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``factor`` is negative or not finite, or x is not such a batch.

    Example:
        >>> change_contrast(torch.tensor([[[0.0, 4.0]]]), 0.5)
        tensor([[[1., 3.]]])
    """
    wide = _widen("change_contrast", x)
    fits = _is_finite(factor) and factor >= 0
    _require("change_contrast", "factor", factor, fits, "a finite number of at least 0, e.g. 0.5")
    mean = wide.mean(dim=tuple(range(1, x.ndim)), keepdim=True)
    return (mean + factor * (wide - mean)).to(x.dtype)


def add_bias_field(x: Tensor, strength: float, generator: torch.Generator, low: float = 0.0) -> Tensor:
    """Multiply every example by a smooth random gain, as the uneven sensitivity of MRI coils does.

    ``y = low + (x − low) exp(strength · f)`` with ``f(u) = Σ_k c_k Π_i cos(π k_i u_i)`` over frequencies
    k_i ∈ {0, 1, 2} and u ∈ [0, 1]^axes, c_k ~ N(0, 1) without the constant term, scaled to ``max |f| = 1``. So the gain
    lies between ``exp(−strength)`` and ``exp(strength)`` and reaches one of them.

    Args:
        x: (B, C, *size).
        strength: the largest logarithm of the gain, not negative and finite; 0.3 means up to 35 % brighter.
        generator: of the coefficients.
        low: the intensity of no signal, finite; it stays as it is.

    Returns:
        (B, C, *size).

    Raises:
        TensorDropoutError: if ``strength`` is negative or not finite, ``low`` is not finite, or x is not such a batch.

    Example:
        >>> gain = add_bias_field(torch.ones(1, 1, 8, 8, 8), 0.3, torch.Generator().manual_seed(0))
        >>> round(float(gain.log().abs().max()), 4)
        0.3
    """
    wide = _widen("add_bias_field", x)
    fits = _is_finite(strength) and strength >= 0
    _require("add_bias_field", "strength", strength, fits, "a finite number of at least 0, e.g. 0.3")
    _require_low("add_bias_field", low)
    smooth = _draw_smooth(wide, generator)[:, None]
    return (low + (wide - low) * (strength * smooth).exp()).to(x.dtype)


def _draw_smooth(x: Tensor, generator: torch.Generator) -> Tensor:
    """A sum of low cosines per example, (B, *size), of mean 0 and largest magnitude 1; 0 for a single position."""
    batch, size = x.shape[0], x.shape[2:]
    shape = (batch, *[3] * len(size))
    drawn = torch.randn(shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)
    frequencies = torch.arange(3, dtype=x.dtype, device=x.device)
    for cells in size:
        places = (torch.arange(cells, dtype=x.dtype, device=x.device) + 0.5) / cells
        waves = (math.pi * frequencies[:, None] * places).cos()
        waves = waves.view(3, *[1] * (drawn.ndim - 2), cells)
        drawn = (drawn[..., None] * waves).sum(1)  # (B, 3, ..) -> (B, .., cells)
    drawn = drawn - drawn.flatten(1).mean(1).view(-1, *[1] * len(size))
    largest = drawn.flatten(1).abs().amax(1).view(-1, *[1] * len(size))
    return drawn / largest.clamp_min(torch.finfo(x.dtype).tiny)


# The registry.


@dataclass(frozen=True)
class Corruption:
    """One family of corruptions, with five levels from mild to severe.

    Attributes:
        name: its key in :data:`CORRUPTIONS`.
        summary: one line for ``--help``.
        levels: five parameters from mild to severe. :meth:`apply` takes any other value that the family allows, e.g.
            every SNR of a curve.
        unit: of the levels, e.g. "SNR".
        space: "input": it changes the network's prepared input, as the paper's Gaussian noise, and is not clipped.
            "stored": it changes the stored image and is clipped to its bounds.
        axes: the numbers of spatial axes for which :func:`suitable` proposes it; :meth:`apply` takes 1 to 3.
        needs_bounds: whether it has no meaning without a finite lower bound or a finite range.
        random: whether it draws from the generator; if not, one evaluation says it all.
        change: the function behind :meth:`apply`, with the same arguments.

    Example:
        >>> gaussian = CORRUPTIONS["gaussian"]
        >>> gaussian.levels, gaussian.unit, gaussian.space
        ((16.0, 8.0, 4.0, 2.0, 1.0), 'SNR', 'input')
    """

    name: str
    summary: str
    levels: tuple[float, ...]
    unit: str
    space: Literal["input", "stored"]
    axes: tuple[int, ...]
    needs_bounds: bool
    random: bool
    change: Callable[[Tensor, float, torch.Generator, Bounds], Tensor] = field(repr=False)

    def apply(self, x: Tensor, level: float, generator: torch.Generator, bounds: Bounds = UNBOUNDED) -> Tensor:
        """Corrupt a batch.

        Args:
            x: (B, C, *size), finite: prepared inputs if ``space`` is "input", else stored images within the bounds.
            level: one of ``levels``, or any other parameter of the family.
            generator: of the noise; left alone if the corruption is not random.
            bounds: (low, high) of stored images; not used if ``space`` is "input".

        Returns:
            (B, C, *size); within the bounds if ``space`` is "stored".

        Raises:
            TensorDropoutError: if the level is not allowed, x is not such a batch or not within the bounds, or the
                corruption needs finite bounds and they are not.

        Example:
            >>> x, generator = torch.full((1, 1, 4), 200.0), torch.Generator()
            >>> CORRUPTIONS["brightness"].apply(x, 0.5, generator, (0.0, 255.0))
            tensor([[[255., 255., 255., 255.]]])
        """
        stored = self.space == "stored"
        _require_batch(self.name, x)
        _require_inside(self.name, x, bounds if stored else UNBOUNDED)
        changed = self.change(x, level, generator, bounds)
        return changed.clamp(*bounds) if stored else changed


CORRUPTIONS: dict[str, Corruption] = {
    corruption.name: corruption
    for corruption in (
        Corruption(
            name="gaussian",
            summary="white Gaussian noise on the prepared input, by the paper's ratio of variances",
            levels=(16.0, 8.0, 4.0, 2.0, 1.0),
            unit="SNR",
            space="input",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=True,
            change=lambda x, level, generator, bounds: add_gaussian(x, level, generator),
        ),
        Corruption(
            name="rician",
            summary="complex Gaussian noise behind magnitudes, as in MRI, by the same ratio of variances",
            levels=(16.0, 8.0, 4.0, 2.0, 1.0),
            unit="SNR",
            space="stored",
            axes=(3,),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: add_rician(x, level, generator, bounds[0]),
        ),
        Corruption(
            name="salt_and_pepper",
            summary="random positions become the lowest or the highest value",
            levels=(0.01, 0.02, 0.05, 0.1, 0.2),
            unit="share",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=salt_and_pepper,
        ),
        Corruption(
            name="shot",
            summary="Poisson noise of a sensor that counts so many photons at the highest value",
            levels=(128.0, 64.0, 32.0, 16.0, 8.0),
            unit="photons",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=add_shot,
        ),
        Corruption(
            name="speckle",
            summary="every intensity times its own random factor of this standard deviation around 1",
            levels=(0.1, 0.2, 0.3, 0.45, 0.6),
            unit="std",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: add_speckle(x, level, generator, bounds[0]),
        ),
        Corruption(
            name="blur",
            summary="Gaussian blur of this standard deviation",
            levels=(0.5, 0.75, 1.0, 1.5, 2.5),
            unit="pixels",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=False,
            change=lambda x, level, generator, bounds: blur(x, level),
        ),
        Corruption(
            name="pixelate",
            summary="blocks of this edge become their mean",
            levels=(2, 3, 4, 6, 8),
            unit="pixels",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=False,
            change=lambda x, level, generator, bounds: pixelate(x, level),
        ),
        Corruption(
            name="occlusion",
            summary="one box over this share of the image becomes the lowest value",
            levels=(0.02, 0.05, 0.1, 0.2, 0.4),
            unit="share",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: occlude(x, level, generator, bounds[0]),
        ),
        Corruption(
            name="brightness",
            summary="brighter everywhere by this share of the range, clipped at the highest value",
            levels=(0.1, 0.2, 0.3, 0.4, 0.5),
            unit="share",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=True,
            random=False,
            change=lambda x, level, generator, bounds: change_brightness(x, level, bounds),
        ),
        Corruption(
            name="contrast",
            summary="distances from the image's mean times this factor",
            levels=(0.8, 0.6, 0.45, 0.3, 0.15),
            unit="factor",
            space="stored",
            axes=(1, 2, 3),
            needs_bounds=False,
            random=False,
            change=lambda x, level, generator, bounds: change_contrast(x, level),
        ),
        Corruption(
            name="bias_field",
            summary="a smooth gain as of MRI coils, up to e to this power, brighter or darker",
            levels=(0.1, 0.2, 0.3, 0.5, 0.8),
            unit="log gain",
            space="stored",
            axes=(3,),
            needs_bounds=True,
            random=True,
            change=lambda x, level, generator, bounds: add_bias_field(x, level, generator, bounds[0]),
        ),
    )
}
"""Name -> corruption. ``contrast``, and ``brightness`` but for its clipping, are undone by ``StandardizeImages``."""


def suitable(spatial_rank: int, bounded: bool) -> list[str]:
    """The names of the corruptions that make sense for the data, in the order of :data:`CORRUPTIONS`.

    Args:
        spatial_rank: the number of spatial axes, 1 to 3.
        bounded: whether stored values have finite bounds.

    Raises:
        TensorDropoutError: if ``spatial_rank`` is not 1, 2 or 3.

    Example:
        >>> suitable(2, bounded=False)
        ['gaussian', 'blur', 'pixelate', 'contrast']
    """
    _require("suitable", "spatial_rank", spatial_rank, spatial_rank in (1, 2, 3), "1, 2 or 3, as in (B, C, *size)")
    return [
        name
        for name, corruption in CORRUPTIONS.items()
        if spatial_rank in corruption.axes and (bounded or not corruption.needs_bounds)
    ]


# What several corruptions share.


def _noise_std(what: str, x: Tensor, snr: float) -> Tensor:
    """σ = √(Var(x) / SNR) of every example, (B, 1, ..)."""
    fits = _is_finite(snr) and snr > 0
    _require(what, "snr", snr, fits, "a positive, finite ratio of variances (signal / noise), e.g. 4")
    return (x.var(dim=tuple(range(1, x.ndim)), correction=0, keepdim=True) / snr).sqrt()


def _draw_normal(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)


def _widen(what: str, x: Tensor) -> Tensor:
    """The batch in at least single precision, in which everything is computed."""
    _require_batch(what, x)
    return x if x.dtype == torch.float64 else x.float()


def _require_batch(what: str, x: Tensor) -> None:
    if not x.is_floating_point() or not 3 <= x.ndim <= 5:
        raise TensorDropoutError(
            f"{what}: a float batch (B, C, *size) with 1 to 3 spatial axes is expected, not {x.dtype} of shape "
            f"{tuple(x.shape)}; convert with .float(), and give it its batch and channel axes"
        )


def _require_inside(what: str, x: Tensor, bounds: Bounds) -> None:
    low, high = bounds
    if not low < high:
        raise TensorDropoutError(f"{what}: bounds must be (low, high) with low < high, not {bounds}")
    if not bool((x.isfinite() & (x >= low) & (x <= high)).all()):
        raise TensorDropoutError(
            f"{what}: finite values within the bounds {bounds} are expected, not {float(x.min()):g} to "
            f"{float(x.max()):g}; pass the bounds of the stored images"
        )


def _require_bounds(what: str, bounds: Bounds) -> Bounds:
    low, high = bounds
    if not (_is_finite(low) and _is_finite(high) and low < high):
        raise TensorDropoutError(
            f"{what}: finite bounds (low, high) with low < high are expected, not {bounds}; pass the smallest and "
            f"largest value that a stored image can have, e.g. (0, 255)"
        )
    return bounds


def _require_low(what: str, low: float) -> None:
    _require(what, "low, the lower bound,", low, _is_finite(low), "finite: pass the intensity of no signal, e.g. 0")


def _require_share(what: str, name: str, share: float, positive: bool = False) -> None:
    fits = _is_finite(share) and 0 <= share <= 1 and (share > 0 or not positive)
    _require(what, name, share, fits, f"a share {'above' if positive else 'of at least'} 0 and at most 1, e.g. 0.1")


def _require(what: str, name: str, value: Any, fits: bool, expected: str) -> None:
    if not fits:
        raise TensorDropoutError(f"{what}: {name} must be {expected}, not {value!r}")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
