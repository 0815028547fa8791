"""Conformal quantiles: how many standard deviations an interval must be wide to hold."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Quantile(NamedTuple):
    """A quantile of scores, column by column.

    Attributes:
        value: the quantile; the largest score where there are too few; infinite where there are none.
        reached: whether there were enough groups.
        groups: how many had a score.
    """

    value: Tensor
    reached: Tensor
    groups: Tensor


def conformal_quantile(scores: Tensor, groups: Tensor, coverage: float) -> Quantile:
    """The smallest score that a new sample stays within with probability ``coverage``.

    Groups count alike, each sample of a group of m as ``1/m``, and one more group, the unseen one, counts as infinite.
    If the groups and the new one are exchangeable, the guarantee is at least ``coverage``. Where each sample is its own
    group, this is the score of rank ``⌈(n + 1) coverage⌉``.

    Args:
        scores: (n, ...), NaN where there is none.
        groups: (n,), the number of the group of each sample.
        coverage: in (0, 1).

    Example:
        >>> found = conformal_quantile(torch.arange(1.0, 20.0)[:, None], torch.arange(19), 0.9)
        >>> found.value.tolist(), found.reached.tolist()
        ([18.0], [True])
    """
    shape = scores.shape[1:]
    if not len(scores):
        nothing = torch.zeros(shape, dtype=torch.long)
        return Quantile(torch.full(shape, math.inf, dtype=torch.float64), nothing.bool(), nothing)
    flat = scores.double().reshape(len(scores), -1)
    known = ~flat.isnan()
    _, number = groups.unique(return_inverse=True)
    sizes = torch.zeros(int(number.max()) + 1, flat.shape[1], dtype=torch.float64)
    sizes.index_add_(0, number, known.double())
    count = (sizes > 0).sum(0)
    weight = torch.where(known, 1 / sizes[number].clamp(min=1), 0.0)
    ordered, order = flat.nan_to_num(nan=math.inf).sort(dim=0)
    reached_share = weight.gather(0, order).cumsum(0)
    needed = coverage * (count + 1).double() * (1 - 1e-9)  # rounding must not ask for one more
    enough = reached_share >= needed
    first = torch.where(enough.any(0), enough.double().argmax(0), (known.sum(0) - 1).clamp(min=0))
    value = ordered.gather(0, first[None])[0]
    return Quantile(value.view(shape), enough.any(0).view(shape), count.view(shape))


def groups_needed(coverage: float) -> int:
    """How many groups a quantile at this coverage takes.

    Example:
        >>> groups_needed(0.9), groups_needed(0.95)
        (9, 19)
    """
    return math.ceil(coverage / (1 - coverage) * (1 - 1e-12))
