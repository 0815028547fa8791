"""Changes of gain: brightness, contrast, the uneven gain of MRI coils."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensor_dropout.robustness.noise.checks import Bounds, is_finite, require, require_bounds, require_low, widen


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
    wide = widen("change_brightness", x)
    fits = is_finite(shift) and abs(shift) <= 1
    require("change_brightness", "shift", shift, fits, "a share of the range between -1 and 1, e.g. 0.2")
    low, high = require_bounds("change_brightness", bounds)
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
    wide = widen("change_contrast", x)
    fits = is_finite(factor) and factor >= 0
    require("change_contrast", "factor", factor, fits, "a finite number of at least 0, e.g. 0.5")
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
    wide = widen("add_bias_field", x)
    fits = is_finite(strength) and strength >= 0
    require("add_bias_field", "strength", strength, fits, "a finite number of at least 0, e.g. 0.3")
    require_low("add_bias_field", low)
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
