"""Ridge regression on flattened and on pooled features: what a tensor regression must beat to be worth its name."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.fitting.statistics import Scale, channel_scale, rounded, target_scale

Kind = Literal["flattened ridge", "pooled ridge"]
ALPHAS = tuple(float(a) for a in np.logspace(-9, 1, 21))
"""Weights of the squared norm, in units of the mean squared error and of the mean squared length of the features."""


def reduce(x: Tensor, kind: Kind) -> Tensor:
    """(n, features): all values, or the mean of each channel."""
    return x.flatten(1) if kind == "flattened ridge" else x.flatten(2).mean(-1)


class RidgePath:
    """Ridge on standardized features for any number of weights, from one decomposition (of the smaller side).

    Args:
        x: (n, C, *space).
        y: (n, outputs), no NaN.
        weights: (n,), that sum to 1.
        kind: which features.
        n: how many samples the weights stand for; None is the number of those that count.
    """

    def __init__(self, x: Tensor, y: Tensor, weights: Tensor, kind: Kind, n: float | None = None) -> None:
        self.kind: Kind = kind
        self.n = int((weights > 0).sum()) if n is None else n
        self.input_shape = tuple(x.shape[1:])
        x = x.unsqueeze(-1) if x.ndim == 2 else x
        z = reduce(x, kind)
        self.n_positions = z.shape[1] // x.shape[1]
        flat = z.unflatten(1, (x.shape[1], -1))
        channels: Scale = channel_scale(flat, weights, own_units=len(self.input_shape) == 1)
        self.scale = Scale(*(each.repeat_interleave(self.n_positions) for each in channels))
        self.target = target_scale(y, weights)
        z = (z - self.scale.mean) / self.scale.std
        w = weights.double()
        self.mean = (w @ z.double()).to(z.dtype)  # of each position: the intercept takes it
        self.y_mean = w @ ((y - self.target.mean) / self.target.std).double()
        root = w.sqrt()[:, None]
        self.rows = (z - self.mean) * root.to(z.dtype)
        targets = (((y - self.target.mean) / self.target.std).double() - self.y_mean) * root
        gram = (self.rows @ self.rows.mT if len(z) <= z.shape[1] else self.rows.mT @ self.rows).double()
        self.spectrum, self.vectors = torch.linalg.eigh(gram)
        right = targets if len(z) <= z.shape[1] else self.rows.mT.double() @ targets
        self.right = self.vectors.mT @ right
        self.size, self.total = float(gram.diagonal().sum()), float(targets.square().sum())

    def best_alpha(self) -> float:
        """The weight of :data:`ALPHAS` with the lowest error by generalized cross-validation."""
        dual = len(self.rows) <= self.rows.shape[1]
        spectrum, right = self.spectrum.clamp(min=0), self.right.square().sum(1)

        def score(alpha: float) -> float:
            shrunk = spectrum + alpha * self.size
            free = self.n - 1 - float((spectrum / shrunk).sum())
            if dual:
                error = float(((alpha * self.size / shrunk).square() * right).sum())
            else:
                error = self.total - float((right * (spectrum + 2 * alpha * self.size) / shrunk.square()).sum())
            return error / max(free, 1e-9) ** 2

        return min(ALPHAS, key=score)

    def weight(self, alpha: float) -> tuple[Tensor, Tensor]:
        """Weight (features, outputs) and bias (outputs,) for features and targets as they came."""
        shrunk = self.vectors @ (self.right / (self.spectrum.clamp(min=0) + max(alpha, 1e-12) * self.size)[:, None])
        W = self.rows.mT.double() @ shrunk if len(self.rows) <= self.rows.shape[1] else shrunk
        bias = self.y_mean - self.mean.double() @ W
        std, target_std = self.scale.std.double(), self.target.std.double()
        W = W / std[:, None] * target_std
        bias = bias * target_std + self.target.mean.double() - self.scale.mean.double() @ W
        return W.to(self.rows.dtype), bias.to(self.rows.dtype)

    def predict(self, x: Tensor, alpha: float) -> Tensor:
        """Predictions (n, outputs) for features as they came."""
        W, bias = self.weight(alpha)
        return reduce(x, self.kind) @ W + bias

    def module(self, alpha: float, output_shape: tuple[int, ...]) -> nn.Module:
        """The fit as plain torch layers on features as they came."""
        W, bias = self.weight(alpha)
        linear = nn.Linear(W.shape[0], W.shape[1], device=W.device, dtype=W.dtype)
        with torch.no_grad():
            linear.weight.copy_(W.mT)
            linear.bias.copy_(bias)
        before: list[nn.Module] = [] if len(self.input_shape) == 1 else [nn.Flatten(1)]
        if self.kind == "pooled ridge":
            before = [nn.Flatten(2), nn.AdaptiveAvgPool1d(1), nn.Flatten(1)]
        after = [nn.Unflatten(1, output_shape)] if len(output_shape) > 1 else []
        return nn.Sequential(*before, linear, *after) if before or after else linear


def ridge_path(x: Tensor, y: Tensor, weights: Tensor | None, kind: Kind) -> RidgePath:
    """Ridge at any weight of the norm, for samples of any weights: whole ones are repeated rows.

    Args:
        x: (n, C, *space).
        y: (n, *output_shape), no NaN.
        weights: (n,), not negative; None for equal ones.
        kind: which features.
    """
    x = x if x.dtype == torch.float64 else x.float()
    y = rounded(y.flatten(1), x.dtype)
    if weights is None:
        return RidgePath(x, y, x.new_full((len(x),), 1 / len(x)), kind)
    n = max(float(weights.sum()), float((weights > 0).sum()))  # no fewer than rows, where weights are shares
    return RidgePath(x, y, (weights / weights.sum()).to(x), kind, n)
