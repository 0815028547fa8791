"""Fits of the labels in folds that never change: one on all of them, and one without each fold.

An image stays in the fold in which it was first held out, with all images of its group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.calibration.leverage import Leverage, fit_leverage
from tensor_dropout.fitting.fit import Prepared, fit
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn.defaults import auto_alpha, auto_rank, build_layer
from tensor_dropout.sklearn.held_out import hold_out

FOLDS = 5
RANK = 64
TOL, MAX_ITER = 5e-2, 40
"""Smaller and looser than those of the estimators: behind the second stage errors are the same, in half the time."""


FittedLayer = tuple[TensorRegression, float]
"""A layer and its α."""


@dataclass(frozen=True)
class Settings:
    """What a fit is tuned by.

    Attributes:
        theta: the keep probability.
        alpha: the weight of the squared norms, in units of ``alpha="auto"``.
    """

    theta: float = 0.5
    alpha: float = 1.0


class Folds:
    """Which fold holds out a group; a new group goes to the fold with the fewest images.

    Args:
        groups: of all images.
    """

    def __init__(self, groups: Sequence[Hashable]) -> None:
        self.groups = list(groups)
        self._fold: dict[Hashable, int] = {}

    def assign(self, rows: np.ndarray) -> np.ndarray:
        """The fold of each of these images, (len(rows),)."""
        groups = [self.groups[row] for row in rows]
        counts = np.bincount([self._fold[group] for group in groups if group in self._fold], minlength=FOLDS)
        for group in dict.fromkeys(groups):
            if group not in self._fold:
                self._fold[group] = int(counts.argmin())
                counts[self._fold[group]] += groups.count(group)
        return np.array([self._fold[group] for group in groups], dtype=int)


@dataclass(frozen=True)
class CrossFits:
    """One fit on all labels, and what the folds' fits say of labels that they had not seen.

    Attributes:
        module: fitted on all; takes maps as they come.
        alpha: as it was fitted with.
        held: (n, outputs), held-out predictions; NaN where nothing could be held out.
        leverage: of ``module``, for as many samples as a fold is fitted on; None where it has none.
        h: (n, outputs), the leverages of the held-out predictions; None where there are none.
    """

    module: nn.Module
    alpha: float
    held: Tensor
    leverage: Leverage | None
    h: Tensor | None


def fit_layer(x: Tensor, y: Tensor, settings: Settings, seed: int = 0) -> FittedLayer:
    """One fit, and its α.

    Args:
        x: (n, C, *space), float32.
        y: (n, outputs), NaN where missing.
        settings: of the fit.
        seed: of the start.
    """
    inputs, outputs = tuple(x.shape[1:]), tuple(y.shape[1:])
    rank = min(RANK, auto_rank("cp", inputs, outputs))
    layer = build_layer("cp", inputs, outputs, rank, settings.theta, "auto", "bernoulli")
    alpha = settings.alpha * auto_alpha(None, len(x))
    fit(layer, Prepared(x, y.float(), None, "regression"), alpha=alpha, max_iter=MAX_ITER, tol=TOL, seed=seed)
    return layer.eval(), alpha


def cross_fit(
    x: Tensor,
    y: Tensor,
    folds: np.ndarray,
    settings: Settings,
    seed: int = 0,
    known: Sequence[FittedLayer] = (),
) -> CrossFits:
    """Fit on all labels, and once without each fold.

    Args:
        x: (n, C, *space), float32.
        y: (n, outputs), NaN where missing.
        folds: (n,), the fold of each.
        settings: of the fits.
        seed: of the starts.
        known: the fits of the first folds, where they have been made.
    """
    held, h, sizes = torch.full_like(y, torch.nan), torch.full_like(y, torch.nan), []
    for number, (train, test) in enumerate(split_folds(y, folds)):
        layer, alpha = known[number] if number < len(known) else fit_layer(x[train], y[train], settings, seed)
        mean, leverages = hold_out(layer, fit_leverage(layer, x[train], None, alpha, y[train]), x[test])
        held[test] = mean.to(held)
        assert leverages is not None  # CP has them
        h[test] = leverages.to(h)
        sizes.append(len(train))
    layer, alpha = fit_layer(x, y, settings, seed)
    leverage = fit_leverage(layer, x, None, alpha, y, float(np.mean(sizes)) if sizes else None)
    return CrossFits(layer, alpha, held, leverage, h)


def split_folds(y: Tensor, folds: np.ndarray) -> list[tuple[Tensor, Tensor]]:
    """Rows to fit on and to hold out, where what is left can be fitted; none for a single fold."""
    parts = [(torch.from_numpy(np.flatnonzero(folds != k)), torch.from_numpy(np.flatnonzero(folds == k)))
             for k in np.unique(folds)]  # fmt: skip
    return [(train, test) for train, test in parts if len(train) > 1 and bool(varies(y[train]).all())]


def varies(y: Tensor) -> Tensor:
    """Whether each output (n, outputs) has two different values."""
    low, high = y.nan_to_num(nan=torch.inf).amin(0), y.nan_to_num(nan=-torch.inf).amax(0)
    return high > low
