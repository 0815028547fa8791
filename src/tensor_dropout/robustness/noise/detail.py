"""Loss of detail: blur, blocks, a covered box."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.robustness.noise.checks import is_finite, require, require_low, require_share, widen


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
    wide = widen("blur", x)
    require("blur", "sigma", sigma, is_finite(sigma) and sigma > 0, "a positive, finite number of pixels, e.g. 1.5")
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
    coarse = widen("pixelate", x)
    whole = is_finite(block) and block >= 1 and block == int(block)
    require("pixelate", "block", block, whole, "a positive whole number of pixels, e.g. 4")
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
    wide = widen("occlude", x)
    require_share("occlude", "share", share, positive=True)
    require_low("occlude", low)
    inside = torch.ones((), dtype=torch.bool, device=x.device)
    for axis, cells in enumerate(x.shape[2:], start=2):
        edge = max(1, round(cells * share ** (1 / (x.ndim - 2))))
        draws = torch.randint(cells - edge + 1, (x.shape[0],), generator=generator, device=generator.device)
        start = draws.to(x.device)[:, None]
        places = torch.arange(cells, device=x.device)
        covered = (places >= start) & (places < start + edge)  # (B, cells)
        inside = inside & covered.view([-1 if i == 0 else cells if i == axis else 1 for i in range(x.ndim)])
    return torch.where(inside, low, wide).to(x.dtype)
