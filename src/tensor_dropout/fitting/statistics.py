"""Means, scales and principal axes of features: what makes the problem well conditioned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

STD_FLOOR = 0.01
"""A channel's std is at least this share of the median one: near-constant channels would blow up on new samples."""
LARGEST_AXES = 2048
"""Up to so many channels (or values of a channel) the features are turned to their principal axes."""
WHITENING = 1.0
"""How far small axes are scaled up: the share of the mean variance that is added to all of them first."""
NEGLIGIBLE = 1e-6
"""Axes with a smaller share of the largest variance are left out; nothing can be learned along them."""
BLOCK = 2**20
"""How many numbers of the features are copied at once."""
CANCELLED = 1e-8
"""A variance below this share of the squared mean is computed once more about the mean: its digits have cancelled."""
ROUNDED = 1e-4
"""Targets whose rounding would be a larger share of their range keep their own precision."""
SOLVED_AT_ONCE = 2**13
"""How many positions of samples the solver takes at once: what it makes of them is to stay in the cache."""


class Scale(NamedTuple):
    """Means and scales of the channels, (C,)."""

    mean: Tensor
    std: Tensor


class TargetScale(NamedTuple):
    """Means and scales of the targets.

    Attributes:
        mean: (*output_shape).
        modes: a vector for each output mode; their product is the scale of a target, so that factors can hold it.
        left: the std of the scaled targets, 1 where the product is exact; NaN for constant ones.
    """

    mean: Tensor
    modes: tuple[Tensor, ...]
    left: Tensor

    @property
    def std(self) -> Tensor:
        """The scale of every target, (*output_shape)."""
        return reduce(lambda product, scale: product.unsqueeze(-1) * scale, self.modes)


def channel_scale(x: Tensor, weights: Tensor, *, own_units: bool = False) -> Scale:
    """Mean and std of every channel.

    Args:
        x: (n, C, S).
        weights: (n,), that sum to 1.
        own_units: whether channels have units of their own, as the columns of a table: no std is raised then.
    """
    mean, variance = _moments(x, weights)
    cancelled = variance <= CANCELLED * mean.square()
    if bool((cancelled & (mean != 0)).any()):
        variance = torch.where(cancelled, _moments(x, weights, mean)[1], variance)
    std = variance.clamp(min=0).sqrt()
    if own_units:
        rounding = torch.finfo(weights.dtype).eps * mean.abs()
        return Scale(mean.to(weights), torch.where(std > rounding, std, 1.0).to(weights))
    return Scale(mean.to(weights), floored(std).to(weights))


def _moments(x: Tensor, weights: Tensor, about: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel, less a number of its own, in float64."""
    first, second = (weights.new_zeros(x.shape[1], dtype=torch.float64) for _ in range(2))
    for rows, share in zip(_blocks(x, weights), weights.double().split(_rows(x)), strict=True):
        rows = rows if about is None else rows - about.to(rows)[:, None]
        means = rows.mean(-1).double()  # (b, C)
        first += share @ means
        second += share @ rows.var(-1, unbiased=False).double() + share @ means.square()
    return first, second - first.square()


def target_scale(y: Tensor, weights: Tensor) -> TargetScale:
    """Mean of every target, and scales: of each one its std, where there is one output mode.

    Args:
        y: (n, *output_shape); NaN where a target is missing.
        weights: (n,), that sum to 1.
    """
    known = ~y.isnan()
    share = weights.double().view(-1, *[1] * (y.ndim - 1)) * known
    share = share / share.sum(0).clamp(min=1e-300)
    mean = (share * y.nan_to_num().double()).sum(0)
    left = (share * (y.nan_to_num().double() - mean).square()).sum(0)
    varies = left.sqrt() > 1e-10 * mean.abs().clamp(min=1e-30)  # constant targets stay as they are
    left = torch.where(varies, left, float("nan"))
    modes: list[Tensor] = []
    for mode in reversed(range(left.ndim)):  # exact after one turn, if the stds are a product
        variance = left.movedim(mode, -1).reshape(-1, left.shape[mode]).nanmean(0)
        variance = torch.where(variance > 0, variance, 1.0)
        left = left / variance.view(-1, *[1] * (left.ndim - 1 - mode))
        modes.insert(0, variance.sqrt().to(y.dtype))
    return TargetScale(mean.to(y.dtype), tuple(modes), left.sqrt())


def rounded(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Targets in a precision; in their own where too little would be left beside a large mean."""
    coarse = y.to(dtype)
    if coarse.dtype == y.dtype:
        return y
    spread = y.nan_to_num(nan=float("-inf")).amax(0) - y.nan_to_num(nan=float("inf")).amin(0)
    lost = (coarse - y).abs().nan_to_num().amax(0)
    return y if bool((lost > ROUNDED * spread).any()) else coarse


def floored(std: Tensor) -> Tensor:
    """No std below a share of the median one; 1 where all are 0."""
    positive = std[std > 0]
    if positive.numel() == 0:
        return torch.ones_like(std)
    return std.clamp(min=STD_FLOOR * float(positive.median()))


class Axes(NamedTuple):
    """Principal axes of the standardized features.

    Attributes:
        basis: (C, r): standardized channels times this are the coordinates; the std of the channels is folded in.
        stretch: (r,): how much each coordinate was scaled up. A factor in these coordinates is a factor of the
            standardized channels divided by it, so that its squared norm is weighed by its square.
    """

    basis: Tensor
    stretch: Tensor


def principal_axes(x: Tensor, scale: Scale, weights: Tensor) -> Axes | None:
    """The axes of the channels' covariance, the large ones first to matter alike; None where there are too many.

    The turn changes nothing: a factor outside of the span of the features is zero at the minimum.

    Args:
        x: (n, C, S).
        scale: of the channels.
        weights: (n,), that sum to 1; rows of weight 0 do not count.
    """
    n, C, S = x.shape
    if min(C, n * S) > LARGEST_AXES or C == 1:
        return None
    if n * S < C:
        z = ((x.to(weights) - scale.mean[:, None]) / scale.std[:, None]) * weights.sqrt()[:, None, None] * S**-0.5
        z = z.movedim(1, 0).flatten(1)  # (C, n S)
        spectrum, vectors = torch.linalg.eigh(z.mT @ z)
        kept = spectrum > NEGLIGIBLE * spectrum[-1]
        spectrum, axes = spectrum[kept], z @ (vectors[:, kept] * spectrum[kept].rsqrt())
        total = float(spectrum.sum()) / C
    else:
        covariance = weights.new_zeros(C, C)
        for rows, share in zip(_blocks(x, weights), weights.split(_rows(x)), strict=True):
            z = ((rows - scale.mean[:, None]) / scale.std[:, None]) * share.sqrt()[:, None, None]
            z = z.movedim(1, 0).flatten(1)
            covariance.addmm_(z, z.mT, alpha=1 / S)
        spectrum, axes = torch.linalg.eigh(covariance)
        kept = spectrum > NEGLIGIBLE * spectrum[-1]
        spectrum, axes = spectrum[kept], axes[:, kept]
        total = float(spectrum.mean())
    stretch = (spectrum / max(total, 1e-30) + WHITENING).rsqrt()
    return Axes(axes * stretch / scale.std[:, None], stretch)


def identity_axes(scale: Scale) -> Axes:
    """The channels themselves, standardized."""
    return Axes(torch.diag(1 / scale.std), torch.ones_like(scale.std))


def pad_axes(axes: Axes, r: int) -> Axes:
    """The same with r axes, those that were added of length 0."""
    more = r - axes.stretch.numel()
    return Axes(
        torch.nn.functional.pad(axes.basis, (0, more)), torch.nn.functional.pad(axes.stretch, (0, more), value=1.0)
    )


def to_axes(x: Tensor, scale: Scale, axes: Axes | None) -> list[Tensor]:
    """Standardized features in their coordinates, in blocks of samples: (n, C, S) -> (r, b, S) each."""
    n_blocks = -(-len(x) * x.shape[2] // SOLVED_AT_ONCE)
    turned = []
    for rows in x.tensor_split(min(n_blocks, len(x))):
        centred = (rows.to(scale.mean) - scale.mean[:, None]).movedim(1, 0)  # (C, b, S)
        if axes is None:
            turned.append(centred / scale.std[:, None, None])
        else:
            turned.append((axes.basis.mT @ centred.flatten(1)).view(-1, *centred.shape[1:]))
    return turned


class StoredBlocks(Sequence[Tensor]):
    """Features that stay where they are, such as in a memory-mapped file; blocks (C, b, *space) are made on demand.

    Args:
        x: (n, C, *space).
        batch_size: the samples of a block.
        dtype: of the blocks.
    """

    def __init__(self, x: Tensor, batch_size: int, dtype: torch.dtype) -> None:
        self.rows, self.dtype = x.split(batch_size), dtype

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: Any) -> Any:
        return self.rows[k].movedim(1, 0).to(self.dtype, copy=True, memory_format=torch.contiguous_format)


def _rows(x: Tensor) -> int:
    """How many samples are copied at once."""
    return max(1, BLOCK // max(1, x[0].numel()))


def _blocks(x: Tensor, like: Tensor) -> Iterator[Tensor]:
    """The samples, a few at a time, in the dtype of another tensor."""
    return (rows.to(like.dtype) for rows in x.split(_rows(x)))
