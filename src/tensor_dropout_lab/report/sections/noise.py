"""Networks under noise, family by family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensor_dropout.metrics.registry import find_main
from tensor_dropout_lab.experiments.cells import RunRecord
from tensor_dropout_lab.experiments.recipes import VARIANT
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.runs import FOLD, Part, Runs, pool

_NOTE = (
    "SNR = σ²(signal)/σ²(noise). Intervals: one run, over draws and examples (bootstrap); several runs, over runs (t); "
    "in a cross-validation, over folds (t, of the logarithms), whose people differ. Five folds that were trained in "
    "different ways are no sample of one kind: there the interval covers less than it says."
)


def build_noise(part: Part) -> Section:
    """A table for each family of noise, and a figure."""
    networks = {runs.recipe.row: runs for runs in part.runs()}
    tables: list[Table] = []
    panels = {}
    for family in part.description["both"]["evaluation"]["noise"]:
        caption = f"Mean absolute error in years under {NOISES[family]} noise"
        table, panels[NOISES[family]] = tabulate_noise(networks, caption, family)
        tables += [table, *_tabulate_variants(networks, f"{caption}, by training", family)]
    return part.section(tables=tables, figures=draw_levels(part, panels))


NOISES = {"gaussian": "white Gaussian", "rician": "Rician"}


def draw_levels(part: Part, panels: Mapping[str, drawings.Levels]) -> list[Figure]:
    """The main metric over the levels of each noise; nothing if no network was shown any noise."""
    rows = [rows for curves in panels.values() for rows in curves.values()]
    if all(len(levels) < 2 for levels in rows):  # clean alone
        return []
    drawings.draw_noise(panels, part.stem(), part.title)
    heads, title = ", ".join(next(iter(panels.values()))), find_main(rows[0][0]).describe("years")
    alt = f"{title[0].upper()}{title[1:]} over SNR for {heads}, under {' and '.join(panels)} noise, with bands of 95 %."
    return [Figure(part.stem().with_suffix(".svg"), alt, f"{find_main(rows[0][0]).label} over SNR")]


def tabulate_noise(
    networks: Mapping[str, Runs], caption: str, family: str = "gaussian"
) -> tuple[Table, dict[str, list[dict[str, Any]]]]:
    """A row for each network: clean, then level by level. Also the numbers, by network, for a figure."""
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, runs in networks.items():
        if runs.broken() is None and runs.summaries():
            folds = [cell.point.get(FOLD) for cell, found in runs.records if found.state == "done" and found.evaluation]
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
    return Table(caption, columns, rows, _NOTE), curves


_VARIANTS_NOTE = (
    "Each fold chose how it is trained, so that a column has other folds for other heads; empty: no fold of that head "
    "chose it. Means over folds; in brackets: runs."
)


def _tabulate_variants(networks: Mapping[str, Runs], caption: str, family: str) -> list[Table]:
    """Where folds were trained in different ways: a row for each head, a column for each way, at a middle level."""
    variants = list(dict.fromkeys(cell.point.get(VARIANT) for runs in networks.values() for cell, _ in runs.records))
    levels = [read_levels(found, family) for runs in networks.values() for _, found in runs.records]
    shared = [level for level in next(filter(None, levels), {}) if all(level in each for each in levels if each)]
    if len(variants) < 2 or not shared:
        return []
    level = shared[len(shared) // 2]
    rows = [
        [Cell(name), *(_show_variant(runs, variant, family, level) for variant in variants)]
        for name, runs in networks.items()
    ]
    return [Table(f"{caption}, SNR {level:g}", ["head", *map(str, variants)], rows, _VARIANTS_NOTE)]


def _show_variant(runs: Runs, variant: Any, family: str, level: float) -> Cell:
    """The mean over folds of the means over seeds; what is wrong with the runs, if something is."""
    own = Runs(runs.recipe, [(cell, found) for cell, found in runs.records if cell.point.get(VARIANT) == variant])
    if not own.records:
        return Cell("")
    folds: dict[Any, list[float]] = {}
    for cell, found in own.records:
        if level in (levels := read_levels(found, family)):
            folds.setdefault(cell.point.get(FOLD), []).append(levels[level])
    broken = own.broken()
    if broken is not None or not folds:
        return broken or Cell("not run", "not run")
    mean = np.mean([np.mean(seeds) for seeds in folds.values()])
    return Cell(f"{mean:.1f} ({sum(map(len, folds.values()))})", "ours")


def read_levels(found: RunRecord, family: str) -> dict[float, float]:
    """The error at each level of a noise; nothing if the run is not done, or was not shown that noise."""
    if found.state != "done" or not found.evaluation:
        return {}
    rows = found.evaluation["summary"].get("noise", [])
    return {row["level"]: row[find_main(row).name] for row in rows if row["corruption"] == family}


def _pool_levels(summaries: list[dict[str, Any]], family: str, folds: list[Any]) -> list[dict[str, Any]]:
    """Mean and interval of each level that all runs have; the first, None, is clean."""
    per_run = [
        {None: each["clean"], **{row["level"]: row for row in each["noise"] if row["corruption"] == family}}
        for each in summaries
    ]
    metric = find_main(summaries[0]["clean"]).name
    shared = [level for level in per_run[0] if all(level in run for run in per_run)]
    return [{"level": level, **pool([run[level] for run in per_run], metric, folds)} for level in shared]


def _show(row: Mapping[str, Any]) -> Cell:
    detail = f"95 % interval {row['low']:.2f} to {row['high']:.2f}, {row['runs']} run{'s' * (row['runs'] > 1)}"
    metric = find_main(row)
    return Cell(f"{row[metric.name]:.{metric.decimals}f}", "ours", detail)
