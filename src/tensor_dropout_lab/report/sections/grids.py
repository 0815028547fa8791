"""One number for each point of a grid: the surface over rank and θ, and what chose what the paper leaves open."""

from __future__ import annotations

from tensor_dropout.metrics.registry import find_metric
from tensor_dropout_lab.experiments.cells import RunRecord
from tensor_dropout_lab.experiments.recipes import Cell as RunCell
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.runs import (
    FOLD,
    Part,
    Runs,
    name_key,
    name_value,
    show_score,
)


def build_surface(part: Part) -> Section:
    """Tables and a figure of the test accuracy; at full size, where they choose, the held-out images' too."""
    tables, pictures = [], []
    panels: dict[str, list[drawings.Point]] = {}
    for runs in part.runs():
        tables.append(_tabulate(runs, "test", "accuracy in %"))
        if part.preset == "paper":
            tables.append(_tabulate(runs, "validation", "accuracy in % on held-out training images"))
        if runs.results():
            panels[runs.recipe.row] = [_point(cell, found) for cell, found in runs.records]
    if panels:
        drawings.draw_surface(panels, part.stem(), part.title)
        alt = "Accuracy by compression ratio and θ: " + drawings.describe_surface(panels)
        pictures.append(Figure(part.stem().with_suffix(".svg"), alt, "Accuracy over compression ratio and θ"))
    return part.section(tables=tables, figures=pictures)


def _point(cell: RunCell, found: RunRecord) -> drawings.Point:
    done = found.result if found.state == "done" else None
    return drawings.Point(
        name_value(cell.point["net.rank"]),
        None if done is None else done["compression_ratio"],
        cell.point["net.theta"],
        None if done is None else done["test"]["accuracy"],
        found.state == "failed",
    )


def build_tuning(part: Part) -> Section:
    """Tables of what the held-out images say."""
    metric = part.description["metrics"][0]
    examples = "images" if metric == "accuracy" else "scans"
    what = f"{find_metric(metric).describe('years')} on held-out training {examples}"
    recipes = part.runs()
    tables = [*(_tabulate(runs, "validation", what, metric) for runs in recipes), _tabulate_budget(recipes)]
    notes = ["Held-out training examples choose; the test examples of these runs choose nothing and are not shown."]
    if FOLD in part.description.get("paper", {}).get("grid", {}):
        notes.append(
            "Each fold must choose for itself, by its own row: the people that test one fold are among those held out "
            "in others."
        )
    return part.section(tables=tables, notes=notes)


def _tabulate_budget(own: list[Runs]) -> Table:
    """The trials of each head, failed ones too, and the seconds of those that ended."""
    rows = []
    for runs in own:
        tried = [found for _, found in runs.records if found.state in ("done", "failed")]
        seconds = sum(result["seconds"] for result in runs.results())
        numbers = [Cell(str(len(tried)), "ours"), Cell(f"{seconds:.0f}", "ours")]
        rows.append([Cell(runs.recipe.row), *(numbers if tried else [Cell("not run", "not run")] * 2)])
    return Table("What the search cost", ["", "trials", "seconds of training"], rows)


def _tabulate(runs: Runs, part: str, caption: str, metric: str = "accuracy") -> Table:
    """The last key of the grid across, the one before it down; a single key down, with the seconds of its runs."""
    *down, across = runs.records[0][0].point
    if not down:
        return _list(runs, part, caption, metric)
    ranked = "net.rank" in down
    values = list(dict.fromkeys(cell.point[across] for cell, _ in runs.records))
    rows: dict[str, list[Cell]] = {}
    for name in dict.fromkeys(_name(cell.point, down) for cell, _ in runs.records):
        own = [(cell, found) for cell, found in runs.records if _name(cell.point, down) == name]
        ratios = [result["compression_ratio"] for result in Runs(runs.recipe, own).results()]
        ratio = [Cell(f"{ratios[0]:.1f}" if ratios and ratios[0] else "")] if ranked else []
        scores = [
            show_score(Runs(runs.recipe, [each for each in own if each[0].point[across] == value]), metric, part)
            for value in values
        ]
        rows[name] = [Cell(name), *ratio, *scores]
    head = [name_key(down[0]), *(["compression ratio"] if ranked else [])]
    columns = [*head, *(f"{name_key(across)} = {name_value(value)}" for value in values)]
    return Table(f"{runs.recipe.row}: {caption}", columns, list(rows.values()))


def _list(runs: Runs, part: str, caption: str, metric: str) -> Table:
    (key,) = runs.records[0][0].point
    rows = []
    for value in dict.fromkeys(cell.point[key] for cell, _ in runs.records):
        own = Runs(runs.recipe, [each for each in runs.records if each[0].point[key] == value])
        seconds = Cell(f"{sum(result['seconds'] for result in own.results()):.0f}" if own.results() else "", "ours")
        rows.append([Cell(name_value(value)), show_score(own, metric, part), seconds])
    columns = [name_key(key), find_metric(metric).describe("years"), "seconds of training"]
    return Table(f"{runs.recipe.row}: {caption}", columns, rows)


def _name(point: dict[str, object], keys: list[str]) -> str:
    return ", ".join(name_value(point[key]) for key in keys)
