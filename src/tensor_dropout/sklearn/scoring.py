"""How a search judges its candidates, and which it would choose where a fold is held out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.sklearn.candidates import Candidate


def weighted_mean(values: Tensor, weights: Tensor | None) -> Tensor:
    """The mean over the samples, where it is known; (n, ...) -> (...)."""
    w = values.new_ones(len(values)) if weights is None else weights.to(values)
    share = w.view(-1, *[1] * (values.ndim - 1)) * ~values.isnan()
    return (share * values.nan_to_num()).sum(0) / share.sum(0).clamp(min=1e-30)


def weighted_variance(values: Tensor, weights: Tensor | None) -> Tensor:
    """The variance over the samples, where known; exactly 0 for what is constant."""
    varies = (values.nan_to_num(nan=float("-inf")).amax(0) - values.nan_to_num(nan=float("inf")).amin(0)) > 0
    return weighted_mean((values - weighted_mean(values, weights)).square(), weights) * varies


def skills(
    y: Tensor, candidates: list[Candidate], splits: list[tuple[np.ndarray, np.ndarray]], weights: Tensor | None
) -> np.ndarray:
    """Scores (candidates, folds) of regressions: ``1 - error / error of the mean target``; -inf where not finite.

    The error of a sample is the root of its mean squared error, over the outputs that vary and that it has, each over
    its std.
    """
    spread = weighted_variance(y, weights).sqrt()
    spread = torch.where(spread > 0, spread, float("nan"))

    def error(predicted: Tensor, rows: Any) -> float:
        errors = ((y[rows] - predicted) / spread).square().flatten(1).nanmean(1).sqrt()  # NaN without a known output
        return float(weighted_mean(errors, None if weights is None else weights[rows]))

    usual = error(weighted_mean(y, weights), slice(None))
    scores = np.full((len(candidates), len(splits)), -np.inf)
    for (k, candidate), (fold, (_, test)) in product(enumerate(candidates), enumerate(splits)):
        mean, _ = candidate.held_out[fold]
        if bool(mean.isfinite().all()):
            scores[k, fold] = 1 - error(mean, test) / usual
    return scores


def choose_by_other_folds(methods: list[str], scores: np.ndarray) -> dict[str, list[int]]:
    """For each method and each fold the candidate with the best mean score in the other folds.

    Args:
        methods: of the candidates.
        scores: (candidates, folds).

    Example:
        >>> choose_by_other_folds(["cp", "cp", "ridge"], np.array([[0.9, 0.1], [0.2, 0.3], [0.0, 0.0]]))
        {'cp': [1, 0], 'ridge': [2, 2]}
    """
    chosen: dict[str, list[int]] = {}
    for method in dict.fromkeys(methods):
        rows = [k for k, each in enumerate(methods) if each == method]
        folds = range(scores.shape[1])
        others = [scores[rows] if len(folds) == 1 else np.delete(scores[rows], fold, axis=1) for fold in folds]
        chosen[method] = [rows[int(each.mean(1).argmax())] for each in others]
    return chosen


def average_folds(
    predicted: Sequence[np.ndarray], splits: Sequence[tuple[np.ndarray, np.ndarray]], n: int
) -> np.ndarray:
    """Predictions for all samples from those of each fold: of a row that several held out the mean, NaN where none did.

    Args:
        predicted: of each fold, for the samples that it held out.
        splits: of the folds.
        n: the number of samples.

    Example:
        >>> splits = [(np.array([2]), np.array([0, 1])), (np.array([2]), np.array([1]))]
        >>> average_folds([np.array([1.0, 2.0]), np.array([4.0])], splits, 3)
        array([ 1.,  3., nan])
    """
    total, times = np.zeros((n, *predicted[0].shape[1:]), predicted[0].dtype), np.zeros(n)
    for values, (_, test) in zip(predicted, splits, strict=True):
        total[test] += values
        times[test] += 1
    times[times == 0] = np.nan
    return total / times.astype(total.dtype).reshape(-1, *[1] * (total.ndim - 1))


def rows_of_other_folds(
    splits: Sequence[tuple[np.ndarray, np.ndarray]], fold: int, weights: Tensor | None
) -> dict[int, np.ndarray]:
    """By each other fold the places, in what it held out, of samples that count and that this one did not hold out.

    Example:
        >>> splits = [(np.array([2]), np.array([0, 1])), (np.array([0]), np.array([1, 2]))]
        >>> rows_of_other_folds(splits, 0, None)
        {1: array([1])}
    """
    own = splits[fold][1]
    places = {}
    for other, (_, test) in enumerate(splits):
        if other != fold:
            counts = np.ones(len(test), bool) if weights is None else (weights[test] > 0).cpu().numpy()
            places[other] = np.flatnonzero(counts & ~np.isin(test, own))
    return places
