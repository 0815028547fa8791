"""Networks under noise, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.experiments.recipes import describe_experiment
from tensor_dropout.report import drawings
from tensor_dropout.report.model import Cell, Figure, Section, Table
from tensor_dropout.report.sections.runs import FOLD, SIZES, Bases, Runs, find_runs, label_of, open_section, pool

_NOTE = (
    "SNR = σ²(signal)/σ²(noise). Intervals: one run, over draws and examples (bootstrap); several runs, over runs (t); "
    "in a cross-validation, over folds (t), whose people differ; of errors in years, over their logarithms."
)


def build_noise(experiment: str, bases: Bases, figures: Path) -> Section:
    """A table and a figure for each size."""
    tables, pictures = [], []
    for preset, size in SIZES.items():
        networks = {runs.recipe.row: runs for runs in find_runs(experiment, bases, preset)}
        label, panels = label_of(experiment, preset), {}
        for family in describe_experiment(experiment)["both"]["evaluation"]["noise"]:
            caption = f"Mean absolute error in years under {_NAMES[family]} noise, {size}"
            table, panels[_NAMES[family]] = tabulate_noise(networks, caption, label, family)
            tables += [table, *_tabulate_variants(networks, f"{caption}, by training", label, family)]
        if any(panels.values()):
            stem = figures / f"{experiment}-{preset}"
            drawings.draw_noise(panels, stem, f"{describe_experiment(experiment)['title']}, {size}")
            heads = ", ".join(next(iter(panels.values())))
            alt = f"Mean absolute error over SNR for {heads}, under {' and '.join(panels)} noise, with bands of 95 %."
            pictures.append(Figure(stem.with_suffix(".svg"), alt, f"MAE over SNR, {size}", label))
    return open_section(experiment, bases, tables=tables, figures=pictures)


_NAMES = {"gaussian": "white Gaussian", "rician": "Rician"}


def tabulate_noise(
    networks: Mapping[str, Runs], caption: str, label: str, family: str = "gaussian"
) -> tuple[Table, dict[str, list[dict[str, Any]]]]:
    """A row for each network: clean, then level by level. Also the numbers, by network, for a figure."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, runs in networks.items():
        if runs.broken() is None and runs.summaries():
            folds = [cell.point.get(FOLD) for cell, found in runs.found if found.state == "done" and found.evaluation]
            curves[name] = _pool_levels(runs.summaries(), family, folds)
    levels = [row["level"] for row in next(iter(curves.values()), []) if row["level"] is not None]
    columns = (
        ["head", "clean", *(f"SNR {level:g}" for level in levels)] if levels else ["head", "clean and under noise"]
    )
    rows = []
    for name, runs in networks.items():
        missing = runs.broken() or Cell("not run", "not run")
        shown = [_show(row) for row in curves[name]] if name in curves else [missing] * (len(columns) - 1)
        rows.append([Cell(name), *shown])
    return Table(caption, columns, rows, _NOTE, label), curves


_VARIANTS_NOTE = (
    "Each fold chose how it is trained, so that a column has other folds for other heads; empty: no fold of that head "
    "chose it. In brackets: runs."
)


def _tabulate_variants(networks: Mapping[str, Runs], caption: str, label: str, family: str) -> list[Table]:
    """Where folds were trained in different ways: a row for each head, a column for each way, at a middle level."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, runs in networks.items():
        for cell, one in runs.found if runs.broken() is None else []:
            if one.state == "done" and one.evaluation and "variant" in cell.point:
                rows = [row for row in one.evaluation["summary"]["noise"] if row["corruption"] == family]
                ways = found.setdefault(name, {})
                ways.setdefault(cell.point["variant"], []).append(rows[len(rows) // 2]["mae"])
    columns = sorted({way for each in found.values() for way in each})
    if len(columns) < 2:
        return []
    lines = [[Cell(name), *(_show_way(each.get(way, [])) for way in columns)] for name, each in found.items()]
    level = f"SNR {rows[len(rows) // 2]['level']:g}"
    return [Table(f"{caption}, {level}", ["head", *columns], lines, _VARIANTS_NOTE, label)]


def _show_way(values: list[float]) -> Cell:
    return Cell(f"{np.mean(values):.1f} ({len(values)})", "ours") if values else Cell("")


def _pool_levels(summaries: list[dict[str, Any]], family: str, folds: list[Any]) -> list[dict[str, Any]]:
    """Mean and interval of each level; the first, None, is clean."""
    per_run = [
        {None: each["clean"], **{row["level"]: row for row in each["noise"] if row["corruption"] == family}}
        for each in summaries
    ]
    metric = "accuracy" if "accuracy" in summaries[0]["clean"] else "mae"
    return [{"level": level, **pool([run[level] for run in per_run], metric, folds)} for level in per_run[0]]


def _show(row: Mapping[str, Any]) -> Cell:
    detail = f"95 % interval {row['low']:.2f} to {row['high']:.2f}, {row['runs']} run{'s' * (row['runs'] > 1)}"
    return Cell(f"{row['mae']:.2f}" if "mae" in row else f"{row['accuracy']:.1f}", "ours", detail)
