"""What the sections share: the runs of a recipe, and how their numbers are shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.metrics.registry import METRICS, main_metric
from tensor_dropout_lab.evaluation.intervals import proportion_interval, seed_interval
from tensor_dropout_lab.experiments.cells import RunRecord, find_cell
from tensor_dropout_lab.experiments.recipes import Cell as RunCell
from tensor_dropout_lab.experiments.recipes import Recipe, describe_experiment, expand, load_recipes
from tensor_dropout_lab.record_store import LiveRun, RecordStore
from tensor_dropout_lab.report.model import Cell, Section

FOLD = "data.options.fold"


@dataclass(frozen=True)
class Part:
    """One experiment at one size: what a section of the report is made of.

    Attributes:
        experiment: its name.
        preset: "paper", the full size, or "quick", the miniature.
        base: the folder of the results; None if there is none.
        figures: the folder for pictures.
    """

    experiment: str
    preset: str
    base: Path | None
    figures: Path

    @property
    def description(self) -> dict[str, Any]:
        """What the recipes say of the experiment."""
        return describe_experiment(self.experiment)

    @property
    def title(self) -> str:
        """Of pictures, which may be cut out of the report."""
        return self.description["title"] + (", miniature" if self.preset == "quick" else "")

    def stem(self, what: str = "") -> Path:
        """The file of a picture, without its ending."""
        return self.figures / "-".join(filter(None, (self.experiment, what, self.preset)))

    def runs(self) -> list[Runs]:
        """The recipes with what there is of their runs."""
        return find_runs(self.experiment, self.preset, self.base)

    def section(self, **content: Any) -> Section:
        """A section with its title, its reference and what must be said of its data."""
        name = self.experiment if self.preset == "paper" else f"{self.experiment}-miniature"
        label = str(self.description.get(self.preset, {}).get("label", ""))
        return Section(name, self.description["title"], self.description["reference"], label, **content)


@dataclass(frozen=True)
class Runs:
    """All runs of one recipe in one preset, or those of one point of its grid."""

    recipe: Recipe
    records: list[tuple[Any, RunRecord]]

    def done(self) -> list[RunRecord]:
        """Those that may be averaged."""
        return [found for _, found in self.records if found.state == "done"]

    def results(self) -> list[dict[str, Any]]:
        """What came out of the training of those."""
        return [found.result for found in self.done() if found.result is not None]

    def scores(self, part: str = "test") -> list[dict[str, Any]]:
        """The numbers on a part of the data: of training or, of rows that evaluate another's runs, on clean inputs."""
        if any(cell.of is not None for cell, _ in self.records):
            return [summary["clean"] for summary in self.summaries()]
        return [result.get(part, {}) for result in self.results()]

    def summaries(self) -> list[dict[str, Any]]:
        """What came out of the evaluation of those."""
        return [found.evaluation["summary"] for found in self.done() if found.evaluation is not None]

    def broken(self) -> Cell | None:
        """What to show instead of a number, if there is none."""
        states: list[Any] = [found.state for _, found in self.records]
        for state in ("failed", "damaged", "stale"):
            if state in states:
                details = {found.detail for _, found in self.records if found.state == state}
                number = f"{states.count(state)} of {len(states)} runs"
                return Cell(state, state, f"{number}: {'; '.join(sorted(details))}")
        return None if self.done() else Cell("not run", "not run")

    def points(self) -> dict[str, Runs]:
        """The runs of each point of the grid, by its name in words; "" if there is no grid."""
        points: dict[str, Runs] = {}
        for cell, found in self.records:
            points.setdefault(name_point(cell.point), Runs(self.recipe, [])).records.append((cell, found))
        return points


def find_runs(experiment: str, preset: str, base: Path | None) -> list[Runs]:
    """The recipes of an experiment with what there is of their runs; without a folder nothing was run."""
    runs = []
    seeds = _find_seeds(experiment, base) if base is not None else None
    for recipe in load_recipes(experiment, preset):
        together = recipe.settings.get("evaluation", {}).get("ensemble", False)  # its folder names its first seed alone
        cells = expand(recipe, preset, seeds=None if together else seeds)
        missing = RunRecord("missing", "not run", LiveRun(Path()))
        records = [missing if base is None else _find_whole(cell, base) for cell in cells]
        runs.append(Runs(recipe, list(zip(cells, records, strict=True))))
    return runs


def _find_whole(cell: RunCell, base: Path) -> RunRecord:
    """What there is of a cell; damaged, too, if a number that should be in a record of it is none."""
    found = find_cell(cell, base)
    if found.state != "done":
        return found
    result = None if cell.of is not None else found.result
    for name, fault in (("result", find_fault(result)), ("evaluation", _find_evaluation_fault(found.evaluation))):
        if fault is not None:
            advice = f"delete {name}.json, and reproduce it again"
            return replace(found, state="damaged", detail=f"{found.run.folder.name}: {name}.json {fault}; {advice}")
    return found


_METRICS = ("accuracy", "top5", "nll", "ece", "mae")
"""Those that a table shows: a record of a training must have a number for each of them that it has."""
_SHARES = {metric.name for metric in METRICS if metric.is_share}
_ERRORS = {metric.name for metric in METRICS if metric.unit == "target"}
_MAIN = {main_metric(task).name for task in ("classification", "regression")}


def find_fault(result: Mapping[str, Any] | None) -> str | None:
    """What is wrong with the numbers of a training, in words; None if nothing is.

    Example:
        >>> find_fault({"test": {"accuracy": None}}), find_fault({"test": {"accuracy": 75.0}})
        ('has no number for accuracy in test', None)
    """
    if result is None:
        return None
    if "test" not in result:
        return "has no test"
    faults = (_find_row_fault(result[part], _METRICS, part) for part in ("validation", "test") if part in result)
    return next((fault for fault in faults if fault is not None), None)


def _find_evaluation_fault(evaluation: Mapping[str, Any] | None) -> str | None:
    """What is wrong with the numbers of an evaluation."""
    if evaluation is None:
        return None
    summary = evaluation.get("summary")
    if not isinstance(summary, Mapping) or not isinstance(summary.get("clean"), Mapping):
        return "has no summary of clean inputs"
    rows = [("clean", summary["clean"])]
    rows += [(name, row) for name in ("attacks", "noise", "heads") for row in summary.get(name, [])]
    for worst in summary.get("worst_case", []):
        rows += [("worst_case", worst[protocol]) for protocol in ("paper", "adaptive") if protocol in worst]
    if not all(_is_number(signal["auroc"]) for signal in summary.get("unknown", {}).get("signals", {}).values()):
        return "has no number for auroc in unknown"
    metrics = ("accuracy", "mae", "low", "high", *(("nll",) if "accuracy" in summary["clean"] else ()))
    faults = (_find_row_fault(row, metrics, name) for name, row in rows)
    return next((fault for fault in faults if fault is not None), None)


def _find_row_fault(row: Any, metrics: Sequence[str], place: str) -> str | None:
    """The first of these metrics that is there and no finite number; accuracy or MAE must be there."""
    if not isinstance(row, Mapping) or not _MAIN & row.keys():
        return f"has neither accuracy nor mae in {place}"
    bad = [metric for metric in metrics if metric in row and not _is_number(row[metric])]
    return f"has no number for {bad[0]} in {place}" if bad else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _find_seeds(experiment: str, base: Path) -> list[int] | None:
    """The seeds that were run; None if there are none."""
    names = [name.rpartition("-seed") for name in RecordStore(base).list_runs(experiment)]
    return sorted({int(seed) for _, dash, seed in names if dash and seed.isdigit()}) or None


# Numbers.


def show_score(runs: Runs, metric: str, part: str = "test") -> Cell:
    """The mean over seeds of a metric on a part of the data; failed and stale runs are never averaged in."""
    broken = runs.broken()
    if broken is not None:
        return broken
    scores = runs.scores(part)
    if not all(_is_number(score.get(metric)) for score in scores):
        return Cell("damaged", "damaged", f"a record of {runs.recipe.name} has no number for {metric} in {part}")
    values = [score[metric] for score in scores]
    examples = (runs.done()[0].record or {}).get("data", {}).get("examples", {})
    return show_number(values, metric, examples.get(part), part)


def show_number(values: Sequence[float], metric: str, examples: int | None, part: str = "test") -> Cell:
    """A measured number with its interval; of two seeds both, since theirs is too wide to be of use.

    Example:
        >>> show_number([75.0, 76.0, 77.0], "accuracy", None).text, show_number([75.0, 77.0], "accuracy", None).text
        ('76.00 ± 2.48 (3)', '76.00 (75.00, 77.00)')
    """
    mean = float(np.mean(values))
    if len(values) > 1:
        low, high = seed_interval(values)
        listed = ", ".join(f"{value:.2f}" for value in values)
        detail = f"{len(values)} seeds: {listed}; 95 % interval {low:.2f} to {high:.2f}"
        spread = f"({listed})" if len(values) == 2 else f"± {(high - low) / 2:.2f} ({len(values)})"
        return Cell(f"{mean:.2f} {spread}", "ours", detail)
    if metric in _SHARES and examples:
        low, high = proportion_interval(round(mean / 100 * examples), examples)
        detail = f"one seed, {examples} {part} images: 95 % interval {100 * low:.2f} to {100 * high:.2f}"
        return Cell(f"{mean:.2f} [{100 * low:.1f}, {100 * high:.1f}]", "ours", detail)
    return Cell(f"{mean:.2f} (1)", "ours", "one seed")


def show_difference(difference: float, interval: tuple[float, float], detail: str) -> Cell:
    """A difference with its interval.

    Example:
        >>> show_difference(-0.256, (-0.561, 0.041), "3 and 3 seeds").text
        '−0.26 [−0.56, +0.04]'
    """
    low, high = interval
    return Cell(f"{difference:+.2f} [{low:+.2f}, {high:+.2f}]".replace("-", "−"), "ours", detail)


def pool(rows: Sequence[Mapping[str, Any]], metric: str, groups: Sequence[Any] | None = None) -> dict[str, Any]:
    """The mean of a metric over runs with its interval: of one run the recorded one, of several over runs (t).

    Args:
        rows: the numbers of each run.
        metric: one of them.
        groups: of runs that share their test examples, such as the seeds of a fold: the interval is over their means.

    Example:
        >>> pool([{"mae": 3.0, "low": 2.0, "high": 4.0}], "mae")
        {'mae': 3.0, 'low': 2.0, 'high': 4.0, 'runs': 1}
        >>> [round(value, 1) for value in pool([{"mae": 2.0}, {"mae": 3.0}, {"mae": 4.0}], "mae").values()]
        [3.0, 1.3, 7.1, 3]
    """
    names = list(groups) if groups is not None and len(set(groups)) > 1 else list(range(len(rows)))
    grouped: dict[Any, list[float]] = {}
    for name, row in zip(names, rows, strict=True):
        grouped.setdefault(name, []).append(row[metric])
    values = [float(np.mean(own)) for own in grouped.values()]
    mean = float(np.mean(values))
    if len(values) == 1:
        low, high = rows[0]["low"], rows[0]["high"]
    elif metric in _ERRORS and min(values) > 0:
        low, high = _ratio_interval(values)
    else:
        low, high = seed_interval(values)
        low = max(low, 0.0)  # Student's t knows no limits
        high = min(high, 100.0) if metric in _SHARES else high
    return {metric: mean, "low": low, "high": high, "runs": len(rows)}


def _ratio_interval(values: Sequence[float]) -> tuple[float, float]:
    """Student's t interval of errors that differ by factors: over their logarithms, put about the arithmetic mean.

    Example:
        >>> [round(end, 1) for end in _ratio_interval([10.0, 20.0, 90.0])]
        [2.5, 651.5]
    """
    logs = np.log(values)
    low, high = np.exp(np.subtract(seed_interval(logs), logs.mean())) * np.mean(values)
    return float(low), float(high)


# Names.


def name_point(point: Mapping[str, Any]) -> str:
    """A point of a grid in words.

    Example:
        >>> name_point({"net.rank": [64, 2, 2, 48], "net.theta": 0.8})
        'rank = 64×2×2×48, θ = 0.8'
    """
    return ", ".join(f"{name_key(key)} = {name_value(value)}" for key, value in point.items())


def name_key(key: str) -> str:
    """A key of the config in words.

    Example:
        >>> name_key("net.theta"), name_key("net.drop_rate")
        ('θ', 'drop rate')
    """
    name = key.rpartition(".")[2]
    return {"theta": "θ"}.get(name, name.replace("_", " "))


def name_value(value: Any) -> str:
    """A value of the config in words."""
    return "×".join(map(str, value)) if isinstance(value, list) else value if isinstance(value, str) else f"{value:g}"
