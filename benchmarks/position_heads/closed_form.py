"""Heads with a closed form: any number of settings from one decomposition, so that they may try more than others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from position import rotate, standardize
from sklearn.cross_decomposition import PLSRegression

from position_heads.data import Fold, Images, held_out_error, test_error

WEIGHTS = tuple(float(w) for w in np.logspace(-9, 1, 21))
"""Of ridge, in units of the total squared length of the features."""
FEW_WEIGHTS = WEIGHTS[::4]
GAMMAS = (0.03, 0.1, 0.3, 1.0, 3.0)
"""Of the Gaussian kernel, in units of one over the mean squared distance."""
RANKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 136)
COMPONENTS = (1, 2, 3, 4, 6, 8, 11, 15, 20, 28, 40, 56)

Tried = Iterator[tuple[dict[str, Any], np.ndarray]]
"""Settings and what they predict, for standardized targets."""


@dataclass(frozen=True)
class Part:
    """Features of the samples to fit and of those to predict, in the directions that the first span; targets (n, k).

    ``squares_new``: the squared lengths of the features to predict, in all directions.
    """

    x: np.ndarray
    y: np.ndarray
    x_new: np.ndarray
    squares_new: np.ndarray


def predict_mean(part: Part) -> Tried:
    yield {}, np.zeros((len(part.x_new), part.y.shape[1]))


def solve_ridge(part: Part, weights: tuple[float, ...]) -> Iterator[tuple[float, np.ndarray]]:
    """The coefficients at each weight."""
    u, s, vt = np.linalg.svd(part.x, full_matrices=False)
    size, projected = float(np.square(s).sum()), u.T @ part.y
    for weight in weights:
        yield weight, vt.T @ (projected * (s / (np.square(s) + weight * size))[:, None])


def predict_ridge(part: Part) -> Tried:
    for weight, coefficients in solve_ridge(part, WEIGHTS):
        yield {"alpha": weight}, part.x_new @ coefficients


def predict_reduced_rank(part: Part) -> Tried:
    """Ridge, its outputs projected on their first principal axes over the samples: the best weight of that rank."""
    for weight, coefficients in solve_ridge(part, FEW_WEIGHTS):
        axes = np.linalg.svd(part.x @ coefficients, full_matrices=False)[2]
        outputs = part.x_new @ coefficients
        for rank in [rank for rank in RANKS if rank <= len(axes)]:
            yield {"alpha": weight, "rank": rank}, outputs @ axes[:rank].T @ axes[:rank]


def predict_kernel(part: Part) -> Tried:
    """Kernel ridge with a Gaussian kernel."""
    squares = np.square(part.x).sum(1)
    distances = np.maximum(squares[:, None] + squares - 2 * part.x @ part.x.T, 0)
    to_new = np.maximum(part.squares_new[:, None] + squares - 2 * part.x_new @ part.x.T, 0)
    scale = distances.mean()
    for gamma in GAMMAS:
        spectrum, vectors = np.linalg.eigh(np.exp(-gamma * distances / scale))
        kernel, projected = np.exp(-gamma * to_new / scale) @ vectors, vectors.T @ part.y
        for weight in WEIGHTS[::2]:
            shrunk = projected / (np.maximum(spectrum, 0) + weight * len(spectrum))[:, None]
            yield {"gamma": gamma, "alpha": weight}, kernel @ shrunk


def predict_pls(part: Part) -> Tried:
    most = min(part.x.shape[1], len(part.x) - 1)
    for count in [count for count in COMPONENTS if count <= most]:
        model = PLSRegression(count, scale=False).fit(part.x, part.y)
        yield {"components": count}, model.predict(part.x_new).reshape(len(part.x_new), -1)


@dataclass(frozen=True)
class ClosedForm:
    """A head, and whether it sees pooled maps."""

    predict: Callable[[Part], Tried]
    pooled: bool = False


HEADS = {
    "mean": ClosedForm(predict_mean),
    "pooled ridge": ClosedForm(predict_ridge, pooled=True),
    "flattened ridge": ClosedForm(predict_ridge),
    "kernel ridge": ClosedForm(predict_kernel),
    "PLS": ClosedForm(predict_pls),
    "reduced-rank ridge": ClosedForm(predict_reduced_rank),
}


def run_fold(head: ClosedForm, images: Images, fold: Fold) -> dict[str, Any]:
    """Choose on the held-out training images, fit all training images, measure on the test images."""
    x = images.x.mean((2, 3), keepdims=True) if head.pooled else images.x
    tried = list(_predictions(head, x, images.y, fold.inner, fold.held))
    errors = [held_out_error(predicted, images.y, fold) for _, predicted in tried]
    best = int(np.argmin(errors))
    chosen = tried[best][0]
    # What the inner part allowed, such as a rank, all training images allow as well.
    predicted = next(
        each for settings, each in _predictions(head, x, images.y, fold.train, fold.test) if settings == chosen
    )
    error = test_error(predicted, images.y[fold.test])
    return {"error": error, "held_out": errors[best], "chosen": chosen, "tried": len(tried)}


def run_folds(head: ClosedForm, images: Images, folds: Sequence[Fold], device: str) -> list[dict[str, Any]]:
    """On the CPU, wherever the others run."""
    return [run_fold(head, images, fold) for fold in folds]


def _predictions(head: ClosedForm, x: np.ndarray, y: np.ndarray, rows: np.ndarray, new: np.ndarray) -> Tried:
    """Settings and predictions of the images ``new``."""
    flat, flat_new = standardize(x[rows], x[new], per_position=head.pooled)
    squares_new = np.square(flat_new, dtype=np.float64).sum(1)
    features, features_new = rotate(flat, flat_new)
    mean, std = y[rows].mean(0, dtype=np.float64), y[rows].std(0, dtype=np.float64)
    std = np.where(std > 0, std, 1.0)
    for settings, predicted in head.predict(Part(features, (y[rows] - mean) / std, features_new, squares_new)):
        yield settings, predicted * std + mean
