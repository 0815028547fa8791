"""What a fit says of samples that it had not seen: predictions, and how far they are from its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.calibration.leverage import Leverage, fit_leverage
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout.layers.regression import TensorRegression


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
