"""The errors of a regression that held-out samples showed, and the intervals that follow for new ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensor_dropout.calibration.conformal import Quantile, conformal_quantile
from tensor_dropout.calibration.leverage import Leverage
from tensor_dropout.errors import TensorDropoutError

FLATTEST = 1e-5
"""The share of an ellipse's mean squared axis that is added to each: errors on a line have a thin one."""
SAME = 1e-9
"""Leverages within this share of each other are one."""
SHARES = tuple(step / 50 for step in range(50))
"""Shares of the variance that may come from the leverage: the likelihood chooses."""


@dataclass(frozen=True, eq=False)
class Region:
    """Ellipses, or ellipsoids: ``(p - center)ᵀ matrix⁻¹ (p - center) ≤ 1``.

    Attributes:
        center: (n, points, axes).
        matrix: (n, points, axes, axes).
    """

    center: Tensor
    matrix: Tensor


@dataclass(frozen=True, eq=False)
class Calibration:
    """Standard deviations of errors, and how many of them an interval takes.

    ``std² = noise · ((1 - share) + share · h / h̄)`` for each output, with h the leverage of a sample and h̄ its mean
    over the held-out ones. The share and the noise are those of the highest normal likelihood of the held-out errors.

    Attributes:
        noise: (*output_shape), the mean variance of an error.
        share: how much of it grows with the leverage; 0 without one.
        mean_leverage: (*output_shape), h̄.
        scores: (n, *output_shape), errors over their std, with their sign; NaN where a target was missing.
        groups: (n,), numbers of what was held out together.
        leverage: of the model that predicts; None where the format has none.
    """

    noise: Tensor
    share: float
    mean_leverage: Tensor
    scores: Tensor
    groups: Tensor
    leverage: Leverage | None

    def std(self, h: Tensor | None, n: int) -> Tensor:
        """(n, *output_shape) from the leverages of n samples."""
        ratio = variance_ratio(self.share, self.mean_leverage, None if h is None else h.detach().double().cpu())
        return (self.noise * ratio).sqrt().expand(n, *self.noise.shape)

    def quantile(self, coverage: float) -> Quantile:
        """How many standard deviations an interval is wide, each way and for each output."""
        return conformal_quantile(self.scores.abs(), self.groups, coverage)

    def regions(
        self, mean: Tensor, std: Tensor, points: Sequence[Sequence[int]], coverage: float
    ) -> tuple[Region, Quantile]:
        """Ellipses that hold points of the plane or of space, all coordinates at once.

        Args:
            mean: (n, outputs).
            std: (n, outputs).
            points: the outputs that are the coordinates of each point, equally many.
            coverage: of each point.
        """
        pairs = torch.as_tensor([list(pair) for pair in points])  # (P, axes)
        scores = self.scores.flatten(1)[:, pairs]  # (m, P, axes)
        known = ~scores.isnan().any(-1, keepdim=True)
        filled = torch.where(known, scores, 0.0)
        shape = torch.einsum("npi,npj->pij", filled, filled) / known.sum(0).clamp(min=1)[..., None]
        eye = torch.eye(shape.shape[-1]).to(shape)
        shape = shape + FLATTEST * shape.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None].clamp(min=1e-12) * eye
        lengths = torch.einsum("npi,pij,npj->np", filled, torch.linalg.inv(shape), filled).clamp(min=0).sqrt()
        radius = conformal_quantile(torch.where(known[..., 0], lengths, torch.nan), self.groups, coverage)
        deviations = std[:, pairs]  # (n, P, axes)
        endless = radius.value.isinf()[:, None, None]  # coordinates that were never known together
        shape = torch.where(endless, eye, shape)
        reach = shape * torch.where(endless, 1.0, radius.value.square()[:, None, None])
        matrix = deviations[..., :, None] * reach.to(std) * deviations[..., None, :]
        return Region(mean[:, pairs], torch.where((endless & (eye > 0)).to(std.device), torch.inf, matrix)), radius

    def as_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a file."""
        return {
            "noise": self.noise, "share": self.share, "mean_leverage": self.mean_leverage, "scores": self.scores,
            "groups": self.groups, "leverage": None if self.leverage is None else tuple(self.leverage),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Calibration:
        """The inverse of :meth:`as_dict`."""
        leverage = values.pop("leverage")
        return cls(**values, leverage=None if leverage is None else Leverage(*leverage))


def calibrate_errors(errors: Tensor, h: Tensor | None, groups: Tensor | None, leverage: Leverage | None) -> Calibration:
    """From the errors of samples that the model, or models like it, had not seen.

    Args:
        errors: (n, *output_shape), target minus prediction; NaN where the target is missing.
        h: (n, *output_shape), their leverages; None where there is none.
        groups: (n,), what belongs together, such as the images of one person; None where each sample is its own.
        leverage: of the model that will predict.

    Raises:
        TensorDropoutError: if an output has no error.
    """
    errors = errors.detach().double().cpu()
    squares = errors.square()
    counts = (~errors.isnan()).sum(0)
    if not len(errors) or int(counts.min()) == 0:
        raise TensorDropoutError(
            "calibrate: an output has no held-out target; give samples in which each output is known at least once"
        )
    h = None if h is None else h.detach().double().cpu()
    if h is not None and not bool((h.amax(0) > (1 + SAME) * h.amin(0)).any()):
        h = None  # leverages that are alike say nothing
    mean_h = torch.ones(errors.shape[1:], dtype=torch.float64) if h is None else h.mean(0)
    mean_h = torch.where(mean_h > 0, mean_h, 1.0)
    share = min(SHARES, key=lambda share: negative_log_likelihood(squares, variance_ratio(share, mean_h, h)))
    ratio = variance_ratio(share, mean_h, h)
    noise = (squares / ratio).nanmean(0)
    std = (noise * ratio).sqrt()
    numbers = torch.arange(len(errors)) if groups is None else groups.unique(return_inverse=True)[1].cpu()
    return Calibration(noise, share, mean_h, errors / torch.where(std > 0, std, 1.0), numbers, leverage)


def variance_ratio(share: float, mean_h: Tensor, h: Tensor | None) -> Tensor:
    """The variance of an error over that of a sample with mean leverage; ones where nothing depends on it."""
    return torch.ones_like(mean_h) if h is None or share == 0 else (1 - share) + share * h / mean_h


def negative_log_likelihood(squares: Tensor, ratio: Tensor) -> float:
    """Of normal errors with the best noise of each output: twice it, a sample's mean, summed over outputs."""
    noise = (squares / ratio).nanmean(0)
    logs = torch.where(squares.isnan(), torch.nan, ratio.log().expand_as(squares)).nanmean(0)
    return float((noise.log() + logs)[noise > 0].sum())  # an output that is always hit exactly says nothing
