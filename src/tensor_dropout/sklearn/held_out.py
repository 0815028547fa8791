"""What a fit says of samples that it had not seen: predictions, and how far they are from its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from torch import Tensor, nn

from tensor_dropout.calibration.leverage import Leverage, fit_leverage
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn.defaults import check_number
from tensor_dropout.sklearn.inputs import check_classes, check_counts, check_folds


@dataclass
class CrossFit:
    """The fit of a fold.

    Attributes:
        module: takes samples as they come.
        leverage: of the module; None where it has none.
        rows: which of the held-out errors are its own.
    """

    module: nn.Module
    leverage: Leverage | None
    rows: Tensor | np.ndarray

    @torch.no_grad()
    def predict(self, calibration: Calibration, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and std of the error, (n, *output_shape)."""
        mean, h = hold_out(self.module, self.leverage, x)
        return mean, calibration.std(h, len(x))


@torch.no_grad()
def hold_out(module: nn.Module, leverage: Leverage | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Predictions of a fitted module, and the leverages of the samples."""
    mean = module(x.to(next(module.parameters())))
    return mean, None if leverage is None else measure_leverage(module, leverage, x)


def leverage_of(
    module: nn.Module, x: Tensor, y: Tensor, weights: Tensor | None, alpha: float, n: float | None = None
) -> Leverage | None:
    """The leverage of a fitted layer; None where ridge won, or the format has none."""
    return fit_leverage(module, x, weights, alpha, y, n) if isinstance(module, TensorRegression) else None


def calibration_folds(
    name: str,
    calibrate: Any,
    seed: int,
    groups: np.ndarray | None,
    weights: Tensor | None,
    y: np.ndarray,
    *,
    classes: bool,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The folds of ``calibrate``: rows to fit on and rows to hold out.

    Args:
        name: of the estimator, for errors.
        calibrate: how many.
        seed: of the shuffle.
        groups: what stays together, or None.
        weights: of the samples, or None.
        y: (n, ...), targets or class numbers.
        classes: whether every fold is to have all classes.
    """
    check_number(name, "calibrate", calibrate, 2, float("inf"), kind="int")
    n_folds, n = int(calibrate), len(y)
    check_folds(name, "calibrate", n_folds, n, groups)
    if classes:
        check_classes(name, "calibrate", n_folds, y, groups)
        kind: Any = StratifiedKFold if groups is None else StratifiedGroupKFold
    else:
        kind = KFold if groups is None else GroupKFold
    splitter = kind(n_folds, shuffle=True, random_state=seed % 2**31)
    folds = list(splitter.split(np.empty(n), y if classes else None, groups=groups))
    if any(len(test) == 0 for _, test in folds):  # groups may be too unlike to be dealt out
        raise TensorDropoutError(f"{name}: calibrate={n_folds} leaves a fold empty for {n} rows; lower calibrate")
    check_counts(name, "calibrate", weights, [(train, train) for train, _ in folds])
    return folds


def mean_count(trains: Sequence[np.ndarray], weights: Tensor | None) -> float:
    """How many samples that count a fold is fitted on.

    The fit on all samples measures leverages for as many: it is better than the folds' fits, whose errors are known,
    but how much better is not, so it takes no credit for it.
    """
    return float(np.mean([len(rows) if weights is None else float((weights[rows] > 0).sum()) for rows in trains]))


def measure_leverage(module: nn.Module, leverage: Leverage, x: Tensor) -> Tensor:
    """The leverages of samples as they come, for a layer alone or behind what moves the channels."""
    layers = list(module) if isinstance(module, nn.Sequential) else [module]
    for layer in layers[:-1]:
        x = layer(x)
    assert isinstance(layers[-1], TensorRegression)
    return leverage.measure(layers[-1], x)
