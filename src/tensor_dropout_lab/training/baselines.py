"""What a regression network must beat: the mean of the training targets, and ridge regression on the voxels.

Both are fitted to the same training examples and scored on the same test examples as the network, so that every result
stands beside them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout_lab.data.base import Data, TensorSplit
from tensor_dropout_lab.data.batches import Batches
from tensor_dropout_lab.training.evaluation import Outcome, summarize_outputs

CUBES = (1, 2, 3, 4, 8)
"""Voxels are averaged over cubes of this edge first; the training examples choose which."""
PENALTIES = tuple(10.0 ** (k / 2) for k in range(-6, 7))
"""Of the ridge, in shares of the mean eigenvalue of the Gram matrix; the training examples choose."""
MOST_EXAMPLES = 2_000
MOST_BYTES = 2**30
_POOLS = {3: F.avg_pool2d, 4: F.avg_pool3d}


@dataclass(frozen=True)
class Ridge:
    """A fitted ridge regression in its dual form.

    Attributes:
        predictions: (n, T): for the test examples.
        error: mean absolute leave-one-out error on the training examples.
        penalty: in shares of the mean eigenvalue.
        cube: edge of the cubes over which voxels were averaged.
    """

    predictions: Tensor
    error: float
    penalty: float
    cube: int = 1


def predict_ridge(data: Data) -> Ridge | None:
    """Ridge regression on the pictures or volumes; None where it does not apply or would be too large.

    Each is scaled by what is not background, as is usual for brains without skull; that it gains from it was seen on
    IXI, where it is also reported. Cubes and penalty are those with the smallest leave-one-out error on the training
    examples, which has a closed form. On the CPU: a GPU may be full of the network that it is compared with.

    Args:
        data: a regression whose inputs are pictures or volumes in memory. Training examples with a missing target are
            left out.
    """
    data = _leave_out_missing(data)
    kind = len(data.input_shape)
    if data.task != "regression" or kind not in _POOLS or not 3 <= len(data.train) <= MOST_EXAMPLES:
        return None
    if not isinstance(data.train, TensorSplit) or not isinstance(data.test, TensorSplit):
        return None
    cubes = [cube for cube in CUBES if _fits(data, len(data.train) + len(data.test), cube)]
    train, test = (_list_features(data, split, cubes) for split in (data.train, data.test))
    targets = _columns(data.train.targets)
    found = [replace(fit_ridge(train[cube], targets, test[cube]), cube=cube) for cube in cubes]
    return min(found, key=lambda ridge: ridge.error, default=None)


def _leave_out_missing(data: Data) -> Data:
    missing = data.train.targets.reshape(len(data.train), -1).isnan().any(1)
    if not isinstance(data.train, TensorSplit) or not missing.any():
        return data
    known = (~missing).nonzero().flatten()
    names = [data.train.names[row] for row in known.tolist()]
    return replace(data, train=TensorSplit(data.train.inputs[known], data.train.targets[known], names))


def fit_ridge(train: Tensor, targets: Tensor, test: Tensor) -> Ridge:
    """Ridge regression with an intercept, its penalty chosen by the exact leave-one-out error.

    Args:
        train: (n, p) features.
        targets: (n, T).
        test: (m, p) features.

    Example:
        >>> x = torch.arange(6.0, dtype=torch.float64)[:, None]
        >>> fit_ridge(x, 2 * x + 1, torch.tensor([[10.0]], dtype=torch.float64)).predictions.round(decimals=1).item()
        21.0
    """
    n, middle, centre = len(train), train.mean(0), targets.mean(0)
    train, test, centred = train - middle, test - middle, targets - centre
    values, vectors = torch.linalg.eigh(train @ train.T)
    values = values.clamp(min=0)
    rotated = vectors.T @ centred
    best: tuple[float, float, Tensor] | None = None
    for penalty in PENALTIES:
        shrunk = values / (values + penalty * values.mean())
        leverage = (vectors.square() @ shrunk) + 1 / n  # the intercept's share is 1/n
        left_out = (centred - vectors @ (shrunk[:, None] * rotated)) / (1 - leverage).clamp(min=1e-9)[:, None]
        error = float(left_out.abs().mean())
        if best is None or error < best[0]:
            best = error, penalty, vectors @ (rotated / (values + penalty * values.mean())[:, None])
    assert best is not None
    error, penalty, weights = best
    return Ridge(test @ (train.T @ weights) + centre, error, penalty)


def _fits(data: Data, examples: int, cube: int) -> bool:
    """Whether there are such cubes, and few enough for memory: features, centred ones, and their parts."""
    cells = math.prod(size // cube for size in data.input_shape[1:]) * data.input_shape[0]
    return 0 < 3 * 8 * cells * examples <= MOST_BYTES


def _list_features(data: Data, split: TensorSplit, cubes: list[int]) -> dict[int, Tensor]:
    """Averages over cubes of each edge, (n, p) in float64; every example is read and scaled once."""
    pool = _POOLS[len(data.input_shape)]
    rows: dict[int, list[Tensor]] = {cube: [] for cube in cubes}
    for x, _ in Batches(data, split, batch=16, device="cpu"):
        scaled = scale_foreground(x.float())
        for cube in cubes:
            rows[cube].append(pool(scaled, cube).flatten(1).double())
    return {cube: torch.cat(parts) for cube, parts in rows.items()}


def scale_foreground(x: Tensor) -> Tensor:
    """Each input with mean 0 and variance 1 over all that is not its darkest value; the rest becomes 0.

    Example:
        >>> scale_foreground(torch.tensor([[[-5.0, -5.0, 1.0, 3.0]]]))
        tensor([[[ 0.,  0., -1.,  1.]]])
    """
    axes = tuple(range(1, x.ndim))
    inside = x > x.amin(axes, keepdim=True)
    count = inside.sum(axes, keepdim=True).clamp(min=1)
    centred = torch.where(inside, x - (x * inside).sum(axes, keepdim=True) / count, 0)
    return centred / (centred.square().sum(axes, keepdim=True) / count).sqrt().clamp(min=1e-6)


def _columns(targets: Tensor) -> Tensor:
    return targets.reshape(len(targets), -1).double()


def score_baselines(data: Data, mean: Tensor) -> tuple[dict[str, Any], Tensor | None]:
    """What a regression must beat on the test part, for its record.

    Args:
        data: a regression with a test part.
        mean: of the training targets, (T,).

    Returns:
        The metrics of each baseline by its name, and the predictions of the ridge, if there is one.
    """
    assert data.test is not None
    y = _columns(data.test.targets).float()
    scores = {"mean": summarize_outputs(Outcome(mean.expand(y.shape), y), "regression", data.target_names, data.points)}
    ridge = predict_ridge(data)
    if ridge is None:
        return scores, None
    predictions = ridge.predictions.float().cpu()
    chosen = {"cube": ridge.cube, "penalty": ridge.penalty, "leave_one_out_mae": ridge.error}
    scores["ridge"] = summarize_outputs(Outcome(predictions, y), "regression", data.target_names, data.points) | chosen
    return scores, predictions
