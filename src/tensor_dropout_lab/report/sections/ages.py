"""Regressions under cross-validation: errors over all people, the bias with age and its correction, and uncertainty."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensor_dropout.metrics.measures import fit_extra_variance, widen
from tensor_dropout.metrics.registry import summarize
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout_lab.evaluation.intervals import bootstrap_interval
from tensor_dropout_lab.experiments.cells import RunRecord
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.runs import (
    FOLD,
    Part,
    Runs,
    show_score,
)
from tensor_dropout_lab.report.sections.scores import build_scores


@dataclass(frozen=True)
class People:
    """What the networks of one seed said of everybody, each person by the network of the fold that tests them.

    Attributes:
        name: of each scan.
        fold: which fold tested it.
        target: the true age.
        predicted: the network's.
        ridge: of ridge regression on the same people.
    """

    name: np.ndarray
    fold: np.ndarray
    target: np.ndarray
    predicted: np.ndarray
    ridge: np.ndarray | None = None

    @property
    def error(self) -> np.ndarray:
        """Absolute."""
        return np.abs(self.predicted - self.target)


_ERROR_NOTE = (
    "95 % intervals: bootstrap over people and seeds. Miniatures are of other data: compare their rows with each "
    "other, never with the paper's, whose people were others, too."
)


def build_ages(part: Part) -> Section:
    """The table of errors, and what a cross-validation says of all people together."""
    section = build_scores(part, show=show_age_error, note=_ERROR_NOTE)
    rows = {runs.recipe.row: check_predictions(runs) for runs in part.runs()}
    if not any(FOLD in cell.point for runs in rows.values() for cell, _ in runs.records):
        return section
    seeds = {row: people for row, runs in rows.items() if (people := read_seeds(runs))}
    section.tables.append(_tabulate_people(rows, seeds))
    if seeds:
        panels = {row: (people[0].target, people[0].predicted) for row, people in seeds.items()}
        drawings.draw_ages(panels, part.stem(), part.title)
        alt = "Predicted over true age, a panel for each head: " + drawings.describe_ages(panels)
        section.figures.append(Figure(part.stem().with_suffix(".svg"), alt, "Predicted age, first seed"))
    return section


def show_age_error(runs: Runs, metric: str) -> Cell:
    """The mean absolute error over all people, with its interval; without folds, as any other score."""
    runs = check_predictions(runs)
    if runs.broken() is not None or all(FOLD not in cell.point for cell, _ in runs.records):
        return show_score(runs, metric)
    seeds = read_seeds(runs)
    if not seeds:
        return Cell("not run", "not run")
    return _show_interval([people.error for people in seeds], f"{_count(seeds)}; bootstrap over people and seeds")


def read_seeds(runs: Runs) -> list[People]:
    """Everybody's predictions, of each seed whose folds are all done."""
    return [_read_people(folds) for folds in _group_seeds(runs)]


def check_predictions(runs: Runs) -> Runs:
    """The runs, of which those of a fold are damaged whose table of predictions cannot be used."""
    return Runs(
        runs.recipe, [(cell, _check_fold(found) if FOLD in cell.point else found) for cell, found in runs.records]
    )


def _check_fold(found: RunRecord) -> RunRecord:
    if found.state != "done":
        return found
    try:
        people = _read_people([(0, found)])
        if len(people.name) and np.isfinite(people.error).all():
            return found
        fault = "has no rows, or rows without numbers"
    except (OSError, ValueError, TypeError, KeyError) as error:
        fault = f"cannot be used ({error})"
    detail = f"{found.run.folder.name}: predictions.csv {fault}; delete result.json, and reproduce it again"
    return replace(found, state="damaged", detail=detail)


def _group_seeds(runs: Runs) -> list[list[tuple[int, RunRecord]]]:
    """The folds of each seed, if all of them are done."""
    seeds: dict[int, list[tuple[int, RunRecord]]] = {}
    for cell, found in runs.records:
        seeds.setdefault(cell.seed, []).append((cell.point.get(FOLD, 0), found))
    return [folds for folds in seeds.values() if all(found.state == "done" for _, found in folds)]


def _read_people(folds: Sequence[tuple[int, RunRecord]]) -> People:
    rows = [(fold, row) for fold, found in folds for row in found.run.read_predictions()]
    columns = {
        key: np.array([float(row[key]) for _, row in rows])
        for key in ("target", "predicted", "ridge")
        if all(key in row for _, row in rows)
    }
    return People(np.array([row["name"] for _, row in rows]), np.array([fold for fold, _ in rows]), **columns)


# Errors and bias.


def _tabulate_people(own: Mapping[str, Runs], seeds: Mapping[str, list[People]]) -> Table:
    columns = ["", "MAE", "MAE less than FC's by", "r", "R²", "slope of the gap over age", "MAE, bias corrected"]
    rows = []
    first = next(iter(seeds.values()), None)
    if first is not None:
        mean = _describe([_predict_mean(first[0])], seeds.get("FC"))
        rows.append([Cell("the mean of the training ages"), *mean[:2], *([Cell("")] * (len(mean) - 2))])
        if first[0].ridge is not None:
            ridge = People(first[0].name, first[0].fold, first[0].target, first[0].ridge)
            rows.append([Cell("ridge regression on the voxels"), *_describe([ridge], seeds.get("FC"))])
    for row, runs in own.items():
        if row in seeds:
            rows.append([Cell(row), *_describe(seeds[row], seeds.get("FC") if row != "FC" else None)])
        else:
            rows.append([Cell(row), *([runs.broken() or Cell("not run", "not run")] * (len(columns) - 1))])
    return Table("Everybody's age", columns, rows, _PEOPLE_NOTE)


_PEOPLE_NOTE = (
    "Years, over all people, each predicted by networks that have not seen them; mean over seeds, 95 % intervals by "
    "bootstrap over people and seeds. Gap: predicted minus true age. Correction: predicted = a + b·age is fitted to "
    "the people of the other folds, then (predicted − a)/b; a person's own age is not used."
)


def _describe(seeds: list[People], reference: list[People] | None) -> list[Cell]:
    """The cells of one row."""
    count = _count(seeds)
    error = _show_interval([people.error for people in seeds], f"{count}; bootstrap over people and seeds")
    difference = Cell("")
    if reference is not None:
        own = _errors(seeds) * (len(reference) if len(seeds) == 1 else 1)  # what has no seeds meets all of FC's
        gained = [a - b for a, b in zip(_errors(reference), own, strict=False)]
        difference = _show_interval(gained, "paired by person and seed; above 0: better than FC")
    corrected = [correct_bias(people) for people in seeds]
    return [
        error,
        difference,
        _show_mean([np.corrcoef(people.predicted, people.target)[0, 1] for people in seeds], 2),
        _show_mean([1 - np.mean(people.error**2) / np.var(people.target) for people in seeds], 2),
        _show_mean([_slope(people.target, people.predicted - people.target) for people in seeds], 2),
        _show_mean([float(people.error.mean()) for people in corrected if people is not None], 2),
    ]


def _errors(seeds: list[People]) -> list[np.ndarray]:
    """(people,) for each seed, in the order of the names."""
    return [people.error[np.argsort(people.name)] for people in seeds]


def _predict_mean(people: People) -> People:
    """Everybody predicted by the mean of the other folds."""
    guess = np.empty_like(people.target)
    for fold in np.unique(people.fold):
        guess[people.fold == fold] = people.target[people.fold != fold].mean()
    return People(people.name, people.fold, people.target, guess)


def correct_bias(people: People) -> People | None:
    """Predictions with the regression towards the mean taken out, fold by fold; None without several folds.

    Example:
        >>> age = np.arange(20.0, 80.0)
        >>> biased = People(age.astype(str), (age % 2).astype(int), age, 20 + 0.5 * age)
        >>> bool(correct_bias(biased).error.max() < 1e-9)
        True
    """
    folds = np.unique(people.fold)
    if len(folds) < 2:
        return None
    corrected = np.empty_like(people.predicted)
    for fold in folds:
        own, other = people.fold == fold, people.fold != fold
        slope = _slope(people.target[other], people.predicted[other])
        offset = people.predicted[other].mean() - slope * people.target[other].mean()
        corrected[own] = (people.predicted[own] - offset) / slope if slope > 0 else people.predicted[own]
    return People(people.name, people.fold, people.target, corrected)


def _slope(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.cov(x, y, bias=True)[0, 1] / np.var(x))


def _count(seeds: list[People]) -> str:
    folds = len(np.unique(seeds[0].fold))
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)} × {folds} folds, {len(seeds[0].name)} people"


def _show_interval(scores: Sequence[np.ndarray], detail: str) -> Cell:
    low, high = bootstrap_interval(np.stack(scores))
    return Cell(f"{np.mean(scores):.2f} [{low:.2f}, {high:.2f}]", "ours", detail)


def _show_mean(values: Sequence[float], digits: int) -> Cell:
    if not values:
        return Cell("")
    detail = ", ".join(_write(value, digits) for value in values) + " by seed" if len(values) > 1 else ""
    return Cell(_write(float(np.mean(values)), digits), "ours", detail)


def _write(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:.{digits}f}"  # never −0.00


# Uncertainty.


def build_uncertainty(part: Part) -> Section:
    """What each way of asking says of the error, and what it costs."""
    columns = [
        "",
        "MAE",
        "spread, mean std",
        "95 % covers",
        "95 % covers, widened",
        "NLL, widened",
        "AURC",
        "seconds, all people",
    ]
    rows = []
    for runs in part.runs():
        broken = runs.broken()
        cells = [broken] * (len(columns) - 1) if broken else _describe_uncertainty(runs)
        rows.append([Cell(runs.recipe.row), *cells])
    return part.section(tables=[Table("Uncertainty", columns, rows, _UNCERTAINTY_NOTE)])


_UNCERTAINTY_NOTE = (
    "Means over seeds. A standard deviation over masks, dropped units or networks is how far a model disagrees with "
    "itself, not its whole error: “95 % covers” is the share of people within 1.96 of them. Widened: one variance for "
    "everybody is added, fitted to the people of the other folds (with a single split, not at all). AURC: the mean "
    "error of the k surest people, averaged over k; lower is better. Seconds: one evaluation of all people."
)


def _describe_uncertainty(runs: Runs) -> list[Cell]:
    rows = []
    for folds in _group_seeds(runs):
        try:
            read = [(fold, found.run.read_outcomes()) for fold, found in folds]
            rows.append(_measure_folds(read))
        except (OSError, ValueError, KeyError) as error:
            return [Cell("damaged", "damaged", f"the outcomes of {runs.recipe.name} cannot be used: {error}")] * 7
    if not rows:
        return [Cell("not run", "not run", "no seed has all its folds")] * 7

    def mean(key: str) -> float | None:
        values = [row[key] for row in rows if row.get(key) is not None]
        return float(np.mean(values)) if values else None

    shown: list[tuple[str, Callable[[float], str]]] = [
        ("mae", lambda value: f"{value:.2f}"),
        ("std", lambda value: f"{value:.2f}"),
        ("coverage_95", lambda value: f"{value:.0f} %"),
        ("coverage_95_widened", lambda value: f"{value:.0f} %"),
        ("nll_widened", lambda value: f"{value:.2f}"),
        ("aurc", lambda value: f"{value:.2f}"),
        ("seconds", lambda value: f"{value:.2f}"),
    ]
    detail = f"{len(rows)} seed{'s' * (len(rows) > 1)}"
    cells = []
    for key, write in shown:
        value = mean(key)
        cells.append(Cell("") if value is None else Cell(write(value), "ours", detail))
    return cells


def _measure_folds(folds: Sequence[tuple[int, Outcomes]]) -> dict[str, Any]:
    """The numbers of one seed over all its folds."""
    clean = {fold: outcomes["clean"] for fold, outcomes in folds}
    whole = _join(list(clean.values()))
    measured: dict[str, Any] = dict(summarize(whole))
    measured["std"] = float(np.mean(whole["std"])) if "std" in whole else None
    measured["seconds"] = sum(outcomes.settings("clean")["seconds"] for _, outcomes in folds)
    if len(folds) > 1:
        widened = [
            widen(own, fit_extra_variance(_join([other for k, other in clean.items() if k != fold])))
            for fold, own in clean.items()
        ]
        found = summarize(_join(widened))
        measured |= {f"{key}_widened": found[key] for key in ("coverage_95", "nll")}
    return measured


def _join(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {key: np.concatenate([np.asarray(each[key]) for each in outcomes]) for key in outcomes[0]}
