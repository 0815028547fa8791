"""Tensor regressions without and with tensor dropout, and products of two matrices, by the product's own solver.

All folds and settings of a head are one program (:func:`tensor_dropout.fitting.fit.fit_many`): it reads the maps once,
and a problem gives weight 0 to the images that it does not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from position_heads.data import Fold, Images, held_out_error, test_error
from tensor_dropout.fitting.fit import Setting, fit_many
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn.defaults import auto_alpha, build_layer

THETAS, SHARES, PLAIN_SHARES = (0.7, 0.5), (0.25, 1.0, 4.0), (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
"""Keep probabilities, and factors of the usual α; without dropout α has the wider range."""
MAX_ITER = 150


@dataclass(frozen=True)
class Tuned:
    """θ, and the factor of the usual α."""

    theta: float
    share: float


RANDOMIZED = tuple(Tuned(theta, share) for theta in THETAS for share in SHARES)
PLAIN = tuple(Tuned(1.0, share) for share in PLAIN_SHARES)


@dataclass(frozen=True)
class Head:
    """A format and what is tried.

    Attributes:
        factorization: a name of the library.
        settings: to choose from.
        flat: whether it sees flattened maps, as a matrix does.
        rank: "auto", or what the layer takes.
    """

    factorization: str
    settings: tuple[Tuned, ...]
    flat: bool = False
    rank: Any = "auto"


HEADS = {
    "two matrices": Head("cp", PLAIN, flat=True),
    "two matrices, dropout": Head("cp", RANDOMIZED, flat=True),
    **{
        f"{name}{end}": Head(factorization, settings)
        for factorization, name in (("cp", "CP"), ("tucker", "Tucker"), ("tt", "TT"), ("ring", "ring"))
        for end, settings in ((", θ = 1", PLAIN), (", dropout", RANDOMIZED))
    },
}


@dataclass(frozen=True)
class Problem:
    """Rows to fit, a setting, and rows to predict."""

    rows: np.ndarray
    new: np.ndarray
    tuned: Tuned


def fit_problems(
    head: Head, x: Tensor, y: Tensor, problems: Sequence[Problem], seed: int
) -> list[tuple[np.ndarray, TensorRegression]]:
    """What each predicts, and the layers.

    On a CPU the problems of other images take turns: side by side they would only read images of no use to them.
    """
    if x.device.type == "cuda":
        return fit_side_by_side(head, x, y, problems, seed)
    by_rows = [list(group) for _, group in groupby(problems, key=lambda problem: id(problem.rows))]
    return [fit for group in by_rows for fit in fit_side_by_side(head, x, y, group, seed)]


def fit_side_by_side(
    head: Head, x: Tensor, y: Tensor, problems: Sequence[Problem], seed: int
) -> list[tuple[np.ndarray, TensorRegression]]:
    """The same in one program; images that no problem fits are not read."""
    x = x.flatten(1) if head.flat else x
    used = np.unique(np.concatenate([problem.rows for problem in problems]))
    layer = build_layer(
        head.factorization, tuple(x.shape[1:]), tuple(y.shape[1:]), head.rank, 1.0, "auto", "bernoulli",
        keep_mask=True, device=x.device, dtype=x.dtype,
    )  # fmt: skip
    weights: dict[int, Tensor] = {}  # one tensor for the problems of equal rows: they share what is made of it
    for problem in problems:
        if id(problem.rows) not in weights:
            seen = np.isin(used, problem.rows) / len(problem.rows)
            weights[id(problem.rows)] = torch.from_numpy(seen).to(x.device)
    settings = [
        Setting(weights[id(p.rows)], p.tuned.theta, p.tuned.share * auto_alpha(None, len(p.rows)), seed)
        for p in problems
    ]
    kept = torch.from_numpy(used).to(x.device)
    fits = fit_many(layer, x[kept], y[kept], settings, "regression", max_iter=MAX_ITER)
    with torch.no_grad():
        return [
            (filled.eval()(x[torch.from_numpy(problem.new).to(x.device)]).double().cpu().numpy(), filled)
            for problem, (filled, _) in zip(problems, fits, strict=True)
        ]


def run_folds(head: Head, images: Images, folds: Sequence[Fold], device: str) -> list[dict[str, Any]]:
    """Of every fold: the setting chosen on held-out training images, then the error on test images."""
    x, y = torch.from_numpy(images.x).to(device), torch.from_numpy(images.y).to(device)
    trials = [Problem(fold.inner, fold.held, tuned) for fold in folds for tuned in head.settings]
    predicted = [each for each, _ in fit_problems(head, x, y, trials, 0)]
    finals, rows = [], []
    for k, fold in enumerate(folds):
        own = predicted[k * len(head.settings) : (k + 1) * len(head.settings)]
        errors = [held_out_error(each, images.y, fold) for each in own]
        best = int(np.argmin(errors))
        finals.append(Problem(fold.train, fold.test, head.settings[best]))
        rows.append({"held_out": errors[best], "chosen": asdict(head.settings[best]), "tried": len(own)})
    for row, fold, (answer, _) in zip(rows, folds, fit_problems(head, x, y, finals, 0), strict=True):
        row["error"] = test_error(answer, images.y[fold.test])
    return rows
