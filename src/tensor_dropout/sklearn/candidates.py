"""What a search tries: the fits of all candidates in all folds, and what they predict for samples they had not seen."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.fitting.fit import Prepared, Setting, first_width, fit, fit_many
from tensor_dropout.fitting.threads import one_thread_if_small
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.progress import Advance
from tensor_dropout.sklearn.defaults import build_layer
from tensor_dropout.sklearn.held_out import hold_out, leverage_of
from tensor_dropout.sklearn.ridge import ALPHAS as RIDGE_ALPHAS
from tensor_dropout.sklearn.ridge import Kind, ridge_path

RIDGES: tuple[Kind, ...] = ("flattened ridge", "pooled ridge")


@dataclass
class Candidate:
    """One row of ``cv_results_``: what was tried, and what it predicted for samples it had not seen."""

    params: dict[str, Any]
    held_out: dict[int, tuple[Tensor, Tensor | None]] = field(default_factory=dict)
    """By fold the predictions and the leverages of its test rows."""
    seconds: list[float] = field(default_factory=list)

    @property
    def method(self) -> str:
        """The format, or which ridge."""
        return str(self.params["method"])


@dataclass(frozen=True)
class Search:
    """What every fit of a search shares: settings that travel to other processes."""

    task: Any
    seed: int
    max_iter: int
    tol: float
    eliminate: bool
    modes: Any
    law: Any
    batch_size: int | None


def masks_ranks(layer: TensorRegression) -> bool:
    """Whether a layer has a dropout with something to drop."""
    return layer.dropout is not None and len(layer.dropped_axes) > 0


def grouped(candidates: list[Candidate]) -> list[list[int]]:
    """The numbers of candidates that share format, rank and θ."""
    groups: dict[Any, list[int]] = {}
    for k, candidate in enumerate(candidates):
        key = (candidate.method, str(candidate.params["rank"]), candidate.params["theta"])
        groups.setdefault(key, []).append(k)
    return list(groups.values())


def fit_fold(
    x: Tensor,
    y: Tensor,
    weights: Tensor | None,
    split: tuple[np.ndarray, np.ndarray],
    group: list[dict[str, Any]],
    shared: Search,
    *,
    one_thread: bool,
) -> list[tuple[Tensor, Tensor | None, float]]:
    """Fit one fold at several α; returns predictions, leverages and seconds of each on the held-out rows."""
    if one_thread:
        torch.set_num_threads(1)
    layers = [
        build_layer(
            params["method"], tuple(x.shape[1:]), tuple(y.shape[1:]), params["rank"], params["theta"], shared.modes,
            shared.law, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32, device=x.device,
        )
        for params in group
    ]  # fmt: skip
    with one_thread_if_small(x, first_width(layers[0])):
        return fit_layers(layers, [params["alpha"] for params in group], x, y, weights, split, shared)


def fit_layers(
    layers: list[TensorRegression],
    alphas: list[float],
    x: Tensor,
    y: Tensor,
    weights: Tensor | None,
    split: tuple[np.ndarray, np.ndarray],
    shared: Search,
) -> list[tuple[Tensor, Tensor | None, float]]:
    """The same for layers of one format and rank, each at its α."""
    train, test = split
    if shared.batch_size is None:
        seen, targets, own = x[train], y[train], None if weights is None else weights[train]
        prepared = Prepared(seen, targets, own, shared.task)
    else:  # rows of weight 0 do not count, and nothing is copied
        seen, targets, own = x, y, torch.zeros(len(x), dtype=torch.float64, device=x.device)
        own[train] = 1 if weights is None else weights[train]
        prepared = Prepared(x, y, own, shared.task, shared.batch_size)
    answers = []
    for layer, alpha in zip(layers, alphas, strict=True):
        began = time.perf_counter()
        ended, _ = fit(
            layer, prepared, alpha=alpha, max_iter=shared.max_iter, tol=shared.tol, seed=shared.seed,
            eliminate=shared.eliminate,
        )  # fmt: skip
        if ended.interrupted:
            raise KeyboardInterrupt
        layer.eval()
        leverage = leverage_of(layer, seen, targets, own, alpha) if shared.task == "regression" else None
        rows = torch.from_numpy(test).split(shared.batch_size or len(test))
        parts = [hold_out(layer, leverage, x[part]) for part in rows]
        mean = torch.cat([mean for mean, _ in parts])
        h = None if leverage is None else torch.cat([h for _, h in parts if h is not None])
        answers.append((mean, h, time.perf_counter() - began))
    return answers


def search_in_one_program(
    candidates: list[Candidate],
    x: Tensor,
    y: Tensor,
    weights: Tensor | None,
    splits: list[tuple[np.ndarray, np.ndarray]],
    shared: Search,
    advance: Advance,
) -> None:
    """On a GPU: all settings and folds of one format and rank side by side."""
    by_shape: dict[Any, list[int]] = {}
    for k, candidate in enumerate(candidates):
        by_shape.setdefault((candidate.method, str(candidate.params["rank"])), []).append(k)
    base = x.new_ones(len(x), dtype=torch.float64) if weights is None else weights.double()
    seen = []
    for train, _ in splits:
        own = torch.zeros_like(base)
        own[train] = base[train]
        seen.append(own / own.sum())
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    for group in by_shape.values():
        params = candidates[group[0]].params
        layer = build_layer(
            params["method"], tuple(x.shape[1:]), tuple(y.shape[1:]), params["rank"], 1.0, shared.modes, shared.law,
            keep_mask=True, device=x.device, dtype=dtype,
        )  # fmt: skip
        problems = [(k, fold) for fold in range(len(splits)) for k in group]
        settings = [
            Setting(seen[fold], candidates[k].params["theta"], candidates[k].params["alpha"], shared.seed)
            for k, fold in problems
        ]
        began = time.perf_counter()
        fits = fit_many(
            layer, x, y, settings, shared.task, max_iter=shared.max_iter, tol=shared.tol, eliminate=shared.eliminate,
            report=advance,
        )  # fmt: skip
        seconds = (time.perf_counter() - began) / len(problems)
        for (k, fold), (filled, _) in zip(problems, fits, strict=True):
            test = torch.from_numpy(splits[fold][1]).to(x.device)
            filled.eval()
            leverage = None
            if shared.task == "regression":
                leverage = leverage_of(filled, x, y, seen[fold], candidates[k].params["alpha"])
            mean, h = hold_out(filled, leverage, x[test])
            candidates[k].held_out[fold] = mean.to(y.dtype), h
            candidates[k].seconds.append(seconds)


def ridge_features(x: Tensor, batch_size: int | None) -> tuple[Tensor, tuple[Kind, ...]]:
    """What ridge is fitted to, and which ridges; of features that are too large for memory only the pooled ones."""
    if x.shape[2:].numel() == 1:
        return x, RIDGES[:1]
    if batch_size is None:
        return x, RIDGES
    means = [part.float().flatten(2).mean(-1, keepdim=True) for part in x.split(batch_size)]
    return torch.cat(means), RIDGES[1:]


def search_ridges(
    x: Tensor,
    y: Tensor,
    weights: Tensor | None,
    splits: list[tuple[np.ndarray, np.ndarray]],
    batch_size: int | None,
) -> list[Candidate]:
    """Held-out predictions of each ridge at all weights, from one decomposition a fold."""
    x, kinds = ridge_features(x, batch_size)
    found: dict[tuple[str, float], Candidate] = {}
    for (fold, (train, test)), kind in product(enumerate(splits), kinds):
        began = time.perf_counter()
        path = ridge_path(x[train], y[train], None if weights is None else weights[train], kind)
        held_out = x[test].to(path.rows)
        for alpha in RIDGE_ALPHAS:
            params = {"method": kind, "rank": None, "theta": None, "alpha": alpha}
            candidate = found.setdefault((kind, alpha), Candidate(params))
            mean = path.predict(held_out, alpha).view(-1, *y.shape[1:]).to(y.dtype)
            candidate.held_out[fold] = mean, None
            candidate.seconds.append((time.perf_counter() - began) / len(RIDGE_ALPHAS))
    return list(found.values())


def fit_ridge(x: Tensor, y: Tensor, weights: Tensor | None, chosen: Candidate, batch_size: int | None) -> nn.Module:
    """The ridge that won, on all samples."""
    x, kinds = ridge_features(x, batch_size)
    path = ridge_path(x, y, weights, next(kind for kind in kinds if kind == chosen.method))
    return path.module(chosen.params["alpha"], tuple(y.shape[1:]))
