"""What held-out predictions of labels say of errors: their std, and ellipses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.calibration.regression import Calibration, calibrate_errors
from tensor_dropout_lab.labelling.cross_fit import CrossFits

COVERAGE = 0.9


@dataclass(frozen=True)
class KnownErrors:
    """The std of errors, from held-out predictions.

    Attributes:
        calibration: of the coordinates of the points that have held-out errors.
        points: (Q,), which they are.
    """

    calibration: Calibration
    points: np.ndarray

    def std(self, h: Tensor | None, m: int) -> Tensor:
        """(m, coordinates), from the leverages (m, 1) of m images."""
        noise = self.calibration.noise
        return self.calibration.std(None if h is None else h.expand(-1, len(noise)), m)

    def ellipses(self, points: Tensor, std: Tensor) -> np.ndarray:
        """(m, points, 2, 2); NaN where too few groups are known."""
        pairs = [(2 * point, 2 * point + 1) for point in range(points.shape[1])]
        region, radius = self.calibration.regions(points.flatten(1).double(), std, pairs, COVERAGE)
        return torch.where(radius.reached[:, None, None], region.matrix, torch.nan).numpy()


def know_errors(truth: Tensor, groups: Tensor, fits: CrossFits, held: Tensor) -> KnownErrors | None:
    """From held-out predictions (m, Q, 2); None where nothing was held out."""
    errors = truth - held
    points = ~errors.isnan().any(-1).all(0)
    there = ~held_out_nothing(fits)
    if not bool(points.any()):
        return None
    columns = points.repeat_interleave(2)
    h = None if fits.h is None else fits.h[there][:, columns]
    calibration = calibrate_errors(errors.flatten(1)[there][:, columns], h, groups[there], fits.leverage)
    return KnownErrors(calibration, points.numpy())


def held_out_nothing(fits: CrossFits) -> np.ndarray:
    """Which labelled images were in no fold that could be held out."""
    nothing: np.ndarray = fits.held.isnan().any(1).numpy()
    return nothing
