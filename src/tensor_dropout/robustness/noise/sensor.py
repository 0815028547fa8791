"""Noise of a sensor: dead pixels, counted photons, random gains."""

from __future__ import annotations

import torch
from torch import Tensor

from tensor_dropout.robustness.noise.checks import (
    Bounds,
    draw_normal,
    is_finite,
    require,
    require_bounds,
    require_inside,
    require_low,
    require_share,
    widen,
)


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
    wide = widen("salt_and_pepper", x)
    require_share("salt_and_pepper", "amount", amount)
    low, high = require_bounds("salt_and_pepper", bounds)
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
    wide = widen("add_shot", x)
    require("add_shot", "photons", photons, is_finite(photons) and photons > 0, "a positive, finite number, e.g. 64")
    low, high = require_bounds("add_shot", bounds)
    require_inside("add_shot", x, bounds)
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
    wide = widen("add_speckle", x)
    require("add_speckle", "std", std, is_finite(std) and std >= 0, "a finite number of at least 0, e.g. 0.2")
    require_low("add_speckle", low)
    return (low + (wide - low) * (1 + std * draw_normal(wide, generator))).to(x.dtype)
