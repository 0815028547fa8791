"""Error over rank, θ and α of CP, and what θ does to the components: what tensor dropout adds to a low rank."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from position import append, write_interval, write_table

from position_heads.data import SETS, Fold, Group, Images, held_out_error, load_images, test_error
from position_heads.second_order import Head, Problem, Tuned, fit_problems
from position_heads.tables import compare
from tensor_dropout.atomic_files import replacing
from tensor_dropout.layers.cp import CPRegression
from tensor_dropout_lab.figures import draw_figure
from tensor_dropout_lab.run_records import describe_environment

RECORD = Path("results/position-surface.jsonl")
PICTURE = Path("docs/images/position-surface.png")
RANKS = (4, 8, 16, 32, 64, 128, 256)
THETAS = (1.0, 0.9, 0.7, 0.5, 0.3)
SHARES = (0.25, 1.0, 4.0, 16.0, 64.0, 256.0)
N, N_FOLDS, GENEROUS = 100, 5, 128


@dataclass(frozen=True)
class Strategy:
    """A way to choose settings, and which of them it looks at."""

    name: str
    looks_at: Callable[[int, float, float], bool]


STRATEGIES = (
    Strategy("rank and α, θ = 1", lambda rank, theta, share: theta == 1),
    Strategy("α, θ = 1, rank 128", lambda rank, theta, share: theta == 1 and rank == GENEROUS),
    Strategy("θ and α, rank 128", lambda rank, theta, share: theta < 1 and rank == GENEROUS),
    Strategy("nothing: θ = 0.5, the usual α, rank 128", lambda *setting: setting == (GENEROUS, 0.5, 1.0)),
    Strategy("rank, θ and α", lambda *setting: True),
)


def component_norms(layer: CPRegression) -> np.ndarray:
    """The norm of each rank-one term of the weight, the largest first."""
    norms = torch.stack([factor.detach().double().norm(dim=0) for factor in layer.factors]).prod(0)
    return norms.sort(descending=True).values.cpu().numpy()


def effective_rank(sizes: np.ndarray) -> float:
    """How many equal terms would be as concentrated: ``(Σ s)² / Σ s²``.

    Example:
        >>> effective_rank(np.array([2.0, 2.0, 0.0]))
        2.0
    """
    return float(sizes.sum() ** 2 / np.square(sizes).sum())


def run_rank(images: Images, folds: Sequence[Fold], rank: int, device: str) -> list[dict[str, Any]]:
    """For each fold: every θ and α, its error on held-out and on test images, and its effective rank.

    A rank above the full rank, 196 for two points, is that.
    """
    largest = CPRegression.largest_ranks((*images.x.shape[1:], images.y.shape[1]))[0]
    head = Head("cp", (), rank=min(rank, largest))
    x, y = torch.from_numpy(images.x).to(device), torch.from_numpy(images.y).to(device)
    grid = [Tuned(theta, share) for theta, share in product(THETAS, SHARES)]
    pairs = [(fold, tuned) for fold in folds for tuned in grid]
    inner = fit_problems(head, x, y, [Problem(fold.inner, fold.held, tuned) for fold, tuned in pairs], 0)
    full = fit_problems(head, x, y, [Problem(fold.train, fold.test, tuned) for fold, tuned in pairs], 0)
    rows: list[dict[str, Any]] = [{"cells": []} for _ in folds]
    for k, ((fold, tuned), (held, _), (tested, layer)) in enumerate(zip(pairs, inner, full, strict=True)):
        norms = component_norms(layer)
        cell = {
            "theta": tuned.theta, "share": tuned.share, "held_out": held_out_error(held, images.y, fold),
            "error": test_error(tested, images.y[fold.test]), "effective_rank": effective_rank(norms),
        }  # fmt: skip
        if k < len(grid) and tuned.share == 1:
            cell["components"] = (norms / norms[0]).tolist()
        rows[k // len(grid)]["cells"].append(cell)
    return rows


def run(
    sets: Sequence[str], features: Path, record: Path, *, device: str, ranks: Sequence[int] = RANKS, n: int = N,
    n_folds: int = N_FOLDS,
) -> None:  # fmt: skip
    """What the record does not have, a line for each set, rank and fold."""
    done = {(row["set"], row["rank"]) for row in read_record(record)}
    for name in sets:
        images = load_images(features, Group(name, "efficientnet", n))
        assert images is not None
        for rank in ranks:
            if (name, rank) in done:
                continue
            rows = run_rank(images, images.folds[:n_folds], rank, device)
            environment = describe_environment("scikit-learn", "numpy") | {"device": device}
            for fold, row in enumerate(rows):
                append(record, {"set": name, "rank": rank, "fold": fold, "n": n, **row, "environment": environment})


def read_record(path: Path) -> list[dict[str, Any]]:
    """Its lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def list_cells(rows: Sequence[dict[str, Any]], name: str) -> dict[int, list[tuple[int, dict[str, Any]]]]:
    """Of a set: for each fold the ranks and their cells."""
    folds: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for row in rows:
        if row["set"] == name:
            folds.setdefault(row["fold"], []).extend((row["rank"], cell) for cell in row["cells"])
    return dict(sorted(folds.items()))


def choose(strategy: Strategy, cells: Sequence[tuple[int, dict[str, Any]]]) -> tuple[dict[str, Any], int]:
    """The cell with the lowest held-out error among those that the strategy looks at, and how many these are."""
    seen = [cell for rank, cell in cells if strategy.looks_at(rank, cell["theta"], cell["share"])]
    return min(seen, key=lambda cell: float("inf") if cell["held_out"] is None else cell["held_out"]), len(seen)


def write_strategies(rows: Sequence[dict[str, Any]]) -> str:
    """What each way to choose needs and reaches; differences to the first, paired by fold."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        folds = list_cells(rows, name)
        first = [choose(STRATEGIES[0], cells)[0] for cells in folds.values()]
        for strategy in STRATEGIES:
            chosen = [choose(strategy, cells) for cells in folds.values()]
            own = [cell for cell, _ in chosen]
            error = np.mean([cell["error"] for cell in own])
            difference = "" if strategy is STRATEGIES[0] else write_interval(compare(own, first))
            lines.append([name, strategy.name, str(chosen[0][1]), f"{error:.3f}", difference])
    return write_table(["set", "what is tuned", "fits", "error", "to the first, % [95 %]"], lines, 2)


def write_effective_ranks(rows: Sequence[dict[str, Any]]) -> str:
    """Of rank 128 at the usual α: effective ranks over θ, mean over folds."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        folds = list_cells(rows, name)
        own = [
            np.mean([
                cell["effective_rank"] for cells in folds.values() for rank, cell in cells
                if (rank, cell["theta"], cell["share"]) == (GENEROUS, theta, 1.0)
            ])
            for theta in THETAS
        ]  # fmt: skip
        lines.append([name, *(f"{value:.0f}" for value in own)])
    return write_table(["effective rank of 128", *(f"θ = {theta:g}" for theta in THETAS)], lines, 1)


def render(part: str, rows: Sequence[dict[str, Any]]) -> str:
    """For the docs."""
    return {"strategies": write_strategies, "effective ranks": write_effective_ranks}[part](rows)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Above the error over the rank for each θ, at its best α of the test; below the components of rank 128."""
    names = [name for name in SETS if any(row["set"] == name for row in rows)]
    with draw_figure(10.5, 6.4) as figure:
        panels = figure.subplots(2, len(names), squeeze=False)
        for column, name in enumerate(names):
            cells = [pair for own in list_cells(rows, name).values() for pair in own]
            for k, theta in enumerate(THETAS):
                shown = {rank: _best_mean(cells, rank, theta) for rank in sorted({rank for rank, _ in cells})}
                panels[0, column].plot(list(shown), list(shown.values()), f"C{k}o-", ms=3, label=f"θ = {theta:g}")
                norms = next(
                    (cell["components"] for rank, cell in cells
                     if rank == GENEROUS and cell["theta"] == theta and "components" in cell), None,
                )  # fmt: skip
                if norms is not None:
                    panels[1, column].plot(range(1, len(norms) + 1), norms, f"C{k}-")
            panels[0, column].set(title=name, xlabel="rank", xscale="log", xticks=list(RANKS))
            panels[0, column].set_xticklabels(list(RANKS))
            panels[0, column].minorticks_off()
            panels[1, column].set(xlabel="component", ylim=(0, 1))
        panels[0, 0].set_ylabel("error, % of the image side")
        panels[1, 0].set_ylabel("norm of a component, over the largest")
        figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside upper left", ncols=len(THETAS))
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")


def _best_mean(cells: Sequence[tuple[int, dict[str, Any]]], rank: int, theta: float) -> float:
    """The lowest mean error over the folds at any α."""
    by_share = [
        np.mean([cell["error"] for r, cell in cells if (r, cell["theta"], cell["share"]) == (rank, theta, share)])
        for share in SHARES
    ]
    return float(min(by_share))
