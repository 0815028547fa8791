"""Settings one at a time, and where else it could win: few images, wrong labels, unknown classes, small heads."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from tensor_dropout.metrics.detection import SIGNALS
from tensor_dropout.metrics.registry import find_metric
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.runs import (
    Part,
    Runs,
    name_key,
    name_value,
    show_difference,
    show_number,
    show_score,
)

_SEEDS = "Mean ± half of the 95 % interval over seeds (Student's t), their number in brackets; of two seeds both."


def build_conditions(part: Part) -> Section:
    """A table for each metric on the test images: heads down, the points of the grid across."""
    tables = []
    for metric in part.description["metrics"]:
        title = find_metric(metric).describe()
        tables.append(_tabulate(part.runs(), metric, f"{title[0].upper()}{title[1:]}"))
    return part.section(tables=tables)


def _tabulate(own: list[Runs], metric: str, caption: str) -> Table:
    conditions = list(dict.fromkeys(_name(point) for runs in own for point in _points(runs)))
    rows = []
    for runs in own:
        found = {_name(point): each for point, each in zip(_points(runs), runs.points().values(), strict=True)}
        scores = [show_score(found[name], metric) if name in found else Cell("") for name in conditions]
        rows.append([Cell(runs.recipe.row), *scores])
    return Table(caption, ["", *conditions], rows, _SEEDS)


def _points(runs: Runs) -> list[dict[str, Any]]:
    """The points of the grid, each once."""
    return list({repr(cell.point): cell.point for cell, _ in runs.records}.values())


def _name(point: dict[str, Any]) -> str:
    """Its first key: the others follow from it."""
    key, value = next(iter(point.items()))
    return f"{name_key(key)} = {name_value(value)}"


# One setting at a time.


def build_settings(part: Part) -> Section:
    """A table for each head: held-out accuracy with each setting, and how much that changes on equal seeds."""
    tables = []
    for runs in part.runs():
        points = runs.points()
        baseline = next(iter(points.values()))
        rows = [
            [
                Cell(name.removeprefix("variant = ")),
                show_score(own, "accuracy", "validation"),
                _show_change(own, baseline),
            ]
            for name, own in points.items()
        ]
        columns = ["", "held-out accuracy, %", "change"]
        tables.append(Table(f"{runs.recipe.row}: one setting changed", columns, rows, _SEEDS + _CHANGE))
    return part.section(tables=tables)


_CHANGE = (
    " Change: points to the first row on the same seeds and images, with its 95 % interval over the seeds; of two both."
)


def _show_change(own: Runs, baseline: Runs) -> Cell:
    if any(show_score(each, "accuracy", "validation").state != "ours" for each in (own, baseline)):
        return Cell("")
    found, plain = (
        {
            cell.seed: run.result["validation"]["accuracy"]
            for cell, run in each.records
            if run.state == "done" and run.result
        }
        for each in (own, baseline)
    )
    changes = [found[seed] - plain[seed] for seed in sorted(found.keys() & plain.keys())]
    if own.records == baseline.records or len(changes) < 2:
        return Cell("")
    listed = ", ".join(f"{change:+.2f}" for change in changes).replace("-", "−")
    if len(changes) == 2:  # as scores of two seeds are shown: their interval is too wide to be of use
        return Cell(f"{fmean(changes):+.2f} ({listed})".replace("-", "−"), "ours")
    return show_difference(fmean(changes), seed_interval(changes), listed)


# Unknown classes.

_DETECTION = (
    "AUROC: the probability that an image of an unknown class has the larger value; 50 is a coin, below 50 the signal "
    "points the wrong way. "
)


def build_unknown(part: Part) -> Section:
    """How well each signal of each head tells unknown classes from known ones."""
    columns = ["", "accuracy, %", "NLL", *(f"AUROC of {words}, %" for words in SIGNALS.values())]
    rows = []
    for runs in part.runs():
        broken = runs.broken()
        if broken is not None:
            rows.append([Cell(runs.recipe.row), *([broken] * (len(columns) - 1))])
            continue
        clean = [summary["clean"] for summary in runs.summaries()]
        signals = [summary.get("unknown", {}).get("signals", {}) for summary in runs.summaries()]
        scores = [_show([row[key] for row in clean], key) for key in ("accuracy", "nll")]
        areas = [_show([row[name]["auroc"] for row in signals if name in row], "auroc") for name in SIGNALS]
        rows.append([Cell(runs.recipe.row), *scores, *areas])
    caption = "Unknown classes told from known ones"
    return part.section(tables=[Table(caption, columns, rows, _DETECTION + _SEEDS)])


def _show(values: Sequence[float], metric: str) -> Cell:
    return show_number(values, metric, None) if values else Cell("")


# The size of a head.


def build_sizes(part: Part) -> Section:
    """Accuracy over the parameters of the head: trained at each size, or cut to it after training."""
    caption, recipes, pictures = "Accuracy over the parameters of the head", part.runs(), []
    lines = _collect(recipes)
    rows = [
        [Cell(name), Cell(f"{parameters:,}", "ours"), Cell(f"{accuracy:.2f}", "ours")]
        for name, line in lines.items()
        for parameters, accuracy in line
    ]
    rows += [[Cell(runs.recipe.row), broken, broken] for runs in recipes if (broken := runs.broken()) is not None]
    if lines:
        drawings.draw_sizes(lines, part.stem(), part.title)
        alt = "Accuracy by the parameters of the head: " + drawings.describe_curves({"": lines})
        pictures.append(Figure(part.stem().with_suffix(".svg"), alt, caption))
    notes = [
        "A pruned head counts its weights that are not 0, and not where they are. A tensor head keeps its first ranks; "
        "only the nested law trains for that."
    ]
    table = Table(caption, ["", "parameters", "accuracy, %"], rows)
    return part.section(tables=[table], figures=pictures, notes=notes)


_CUTS = {"low-rank": "two matrices", "pruned": "pruned", "rank": "leading ranks"}


def _collect(recipes: list[Runs]) -> dict[str, list[tuple[int, float]]]:
    """By name, (parameters, accuracy) from small to large; means over seeds."""
    found: dict[str, dict[int, list[float]]] = {}
    for runs in recipes:
        for each in runs.done():
            name = runs.recipe.row
            if each.evaluation is None:
                assert each.result is not None
                place = found.setdefault(name, {}).setdefault(each.result["head_parameters"], [])
                place.append(each.result["test"]["accuracy"])
                continue
            heads = each.evaluation["summary"]["heads"]
            for kind in sorted({row["kind"] for row in heads} - {"whole"}):
                line = found.setdefault(f"{name}: {_CUTS[kind]}", {})
                for row in heads:
                    if row["kind"] in (kind, "whole"):
                        line.setdefault(row["parameters"], []).append(row["accuracy"])
    means = {name: {size: sum(own) / len(own) for size, own in line.items()} for name, line in found.items()}
    return {name: sorted(line.items()) for name, line in means.items()}
