"""What several corruptions share: bounds, the precision they compute in, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.noise import Bounds


def draw_normal(x: Tensor, generator: torch.Generator) -> Tensor:
    """Numbers of the batch's shape, N(0, 1), drawn on the generator's device."""
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=generator.device).to(x.device)


def widen(what: str, x: Tensor) -> Tensor:
    """The batch in at least single precision, in which everything is computed."""
    require_batch(what, x)
    return x if x.dtype == torch.float64 else x.float()


def require_batch(what: str, x: Tensor) -> None:
    """Refuse what is not a float batch (B, C, *size) with 1 to 3 spatial axes."""
    if not x.is_floating_point() or not 3 <= x.ndim <= 5:
        raise TensorDropoutError(
            f"{what}: a float batch (B, C, *size) with 1 to 3 spatial axes is expected, not {x.dtype} of shape "
            f"{tuple(x.shape)}; convert with .float(), and give it its batch and channel axes"
        )


def require_inside(what: str, x: Tensor, bounds: Bounds) -> None:
    """Refuse values that are not finite or not within the bounds."""
    low, high = bounds
    if not low < high:
        raise TensorDropoutError(f"{what}: bounds must be (low, high) with low < high, not {bounds}")
    if not bool((x.isfinite() & (x >= low) & (x <= high)).all()):
        raise TensorDropoutError(
            f"{what}: finite values within the bounds {bounds} are expected, not {float(x.min()):g} to "
            f"{float(x.max()):g}; pass the bounds of the stored images"
        )


def require_bounds(what: str, bounds: Bounds) -> Bounds:
    """The bounds, if they are finite."""
    low, high = bounds
    if not (is_finite(low) and is_finite(high) and low < high):
        raise TensorDropoutError(
            f"{what}: finite bounds (low, high) with low < high are expected, not {bounds}; pass the smallest and "
            f"largest value that a stored image can have, e.g. (0, 255)"
        )
    return bounds


def require_low(what: str, low: float) -> None:
    """Refuse an intensity of no signal that is not finite."""
    require(what, "low, the lower bound,", low, is_finite(low), "finite: pass the intensity of no signal, e.g. 0")


def require_share(what: str, name: str, share: float, positive: bool = False) -> None:
    """Refuse what is no share between 0 and 1."""
    fits = is_finite(share) and 0 <= share <= 1 and (share > 0 or not positive)
    require(what, name, share, fits, f"a share {'above' if positive else 'of at least'} 0 and at most 1, e.g. 0.1")


def require(what: str, name: str, value: Any, fits: bool, expected: str) -> None:
    """Refuse a value that does not fit, in one sentence."""
    if not fits:
        raise TensorDropoutError(f"{what}: {name} must be {expected}, not {value!r}")


def is_finite(value: Any) -> bool:
    """Whether it is a number, and finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
