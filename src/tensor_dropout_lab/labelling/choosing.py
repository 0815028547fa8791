"""Which image to label next, which suggestions to doubt, and which labels to check."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

AHEAD = 25
"""How many images are chosen one after another: no two alike."""
LESS_SURE = 1.5
"""A suggestion is doubtful if its std is so many times that of held-out labels in the mean."""
FAR = 4.0
"""A label is to be checked if its held-out error is so many times what is usual for its point and its image."""
SEVERAL = 5
"""Points that an image needs before its own median error counts: two that were swapped are not half of them."""
JUDGED = 10
"""Labels of a point that its median takes."""
SMALLEST = 0.005
"""Errors below this share of the longer side are never checked."""


def expected_gain(z: Tensor, candidates: np.ndarray, ahead: int = AHEAD) -> np.ndarray:
    """How much of the variance of all images would go if an image were labelled, image by image.

    With ``h = ‖z‖²`` the variance of an image's prediction in units of the noise, a label of image i takes
    ``(zⱼ·zᵢ)² / (1 + hᵢ)`` from that of image j. The gain is the sum over j. An outlier has a large variance of its own
    and little to do with others, so it gains little. The first ones are chosen one after another, each as if those
    before had been labelled.

    Args:
        z: (n, K), features of the images whose variance counts, candidates among them.
        candidates: (n,), bool, those that can be labelled.
        ahead: how many are chosen one after another.

    Returns:
        (n,), larger first; -inf for those that are no candidates.
    """
    z = z.double().clone()
    open_ = torch.from_numpy(candidates.copy())
    gain = torch.full((len(z),), -torch.inf, dtype=torch.float64)

    def measure() -> Tensor:
        values = ((z @ (z.mT @ z)) * z).sum(1) / (1 + z.square().sum(1))
        return torch.where(open_, values, -torch.inf)

    ceiling = float("inf")
    for _ in range(min(ahead, int(open_.sum()))):
        values = measure()
        best = int(values.argmax())
        ceiling = min(ceiling, float(values[best]))
        gain[best] = ceiling
        open_[best] = False
        r = z[best].clone()
        h = float(r.square().sum())
        if h > 0:
            z -= (1 - (1 + h) ** -0.5) / h * (z @ r)[:, None] * r
    rest = measure().clamp(max=ceiling * (1 - 1e-9))
    return torch.where(open_, rest, gain).numpy()


def find_doubtful(std: np.ndarray, usual: float) -> np.ndarray:
    """Images (n,) whose mean std (n, P) is :data:`LESS_SURE` times the usual one of held-out labels, or more."""
    mean = np.nan_to_num(std, nan=0.0).mean(axis=1) if std.shape[1] else np.zeros(len(std))
    doubtful: np.ndarray = mean > LESS_SURE * usual
    return doubtful


def find_slips(errors: np.ndarray) -> np.ndarray:
    """Labels (m, P) whose held-out error is far from what is usual for their point and their image.

    The error of a point is divided by the median error of that point. Of an image with several points it is divided by
    their median once more, if that is above 1: where all points are off, the image is hard and no hand has slipped.

    Args:
        errors: (m, P), in shares of the longer side; NaN where unknown.
    """
    judged = (~np.isnan(errors)).sum(axis=0) >= JUDGED
    known = np.where(judged, errors, np.nan)
    if not judged.any():
        return np.zeros(errors.shape, dtype=bool)
    usual = np.full(errors.shape[1], np.nan)
    usual[judged] = np.nanmedian(known[:, judged], axis=0)
    ratio = known / np.maximum(usual, 1e-9)
    several = (~np.isnan(ratio)).sum(axis=1) >= SEVERAL
    ratio[several] /= np.maximum(1.0, np.nanmedian(ratio[several], axis=1))[:, None]
    slips: np.ndarray = (ratio > FAR) & (known > SMALLEST)
    return slips
