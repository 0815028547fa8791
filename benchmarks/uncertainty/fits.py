"""What the methods of a cell share: the fits of the folds and of all samples, and what a method says with them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from intervals import Data
from torch import Tensor

from tensor_dropout.calibration.leverage import Leverage
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn import TensorRegressor
from uncertainty.last_layers import Predicted

CALIBRATE = 5


@dataclass(frozen=True)
class View:
    """A fit: its layer and leverage, what it was fitted on, and the samples that it predicts; y is (n, O), float64."""

    layer: TensorRegression
    leverage: Leverage
    x: Tensor
    y: Tensor
    x_new: Tensor
    rows: np.ndarray


@dataclass(frozen=True)
class Fits:
    """The folds' fits, whose samples together are all of them, and the fit on all; targets and groups."""

    folds: list[View]
    full: View
    y: Tensor
    groups: Tensor

    def hold_out(self, parts: Sequence[Predicted]) -> Predicted:
        """What the folds said of their own samples, in the order of the samples."""
        order = np.argsort(np.concatenate([view.rows for view in self.folds]))

        def join(name: str) -> Tensor:
            return torch.cat([getattr(part, name) for part in parts])[order]

        known = parts[0].quantiles is not None
        quantiles = torch.cat([part.quantiles for part in parts], 1)[:, order] if known else None
        return Predicted(join("mean"), join("variance"), join("noise"), quantiles)


@dataclass(frozen=True)
class Found:
    """What a method says of held-out and of new samples, and the setting it chose."""

    held: Predicted
    new: Predicted
    setting: Any = None


def fit_tensor(data: Data, seed: int = 0) -> Fits:
    """The fits that all methods share."""
    model = TensorRegressor(calibrate=CALIBRATE, random_state=seed).fit(data.x, data.y, groups=data.groups)
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y).double().view(len(data.y), -1)
    everything = np.arange(len(x))
    folds = []
    for fit in model.cross_fits_:
        rows = np.asarray(fit.rows)
        train = np.setdiff1d(everything, rows)
        folds.append(View(fit.module, fit.leverage, x[train], y[train], x[rows], rows))
    full = View(model.layer_, model.calibration_.leverage, x, y, torch.from_numpy(data.x_test), everything)
    return Fits(folds, full, y, model.calibration_.groups)


class Clock:
    """Seconds of the processor since the last mark, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.process_time()

    def mark(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name], self.last = now - self.last, now
