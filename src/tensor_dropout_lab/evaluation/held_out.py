"""Held-out errors of several methods on the same images, with intervals over groups, and the sentence they allow.

No torch. An error is one number for each image, so that methods are compared in pairs.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tensor_dropout_lab.evaluation.intervals import Interval, group_interval, proportion_interval

RIDGES = ("flattened ridge", "pooled ridge")
BASELINE = "baseline"
"""What uses no image: the mean target, or the most frequent class."""
LEVEL = 0.95


@dataclass(frozen=True)
class Measure:
    """An error, or the accuracy, of every method on every image.

    Attributes:
        name: such as "mean distance".
        unit: such as "% of the image side".
        values: by method, (images,); NaN where an image has no such target.
        higher_is_better: of an accuracy.
    """

    name: str
    unit: str
    values: dict[str, np.ndarray]
    higher_is_better: bool = False

    def mean(self, method: str) -> float:
        """Over the images that have such a target."""
        values = self.values[method]
        return float(np.nanmean(values)) if not np.isnan(values).all() else math.nan

    def interval(self, method: str, groups: np.ndarray, seed: int) -> Interval:
        """Of the mean, over groups; of an accuracy of 0 or 100 % it is Wilson's."""
        values = self.values[method]
        if self.higher_is_better and len(set(values.tolist())) == 1:
            n = len(np.unique(groups))
            low, high = proportion_interval(n if values[0] else 0, n, LEVEL)
            return Interval(100 * low, 100 * high)
        return group_interval(values, groups, level=LEVEL, seed=seed)

    def order(self, methods: Sequence[str]) -> list[str]:
        """The methods from the best to the worst."""
        return sorted(methods, key=self.mean, reverse=self.higher_is_better)


def predict_by_fold(targets: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """For every sample the mean target of the other folds, (n, ...); NaN is missing."""
    predicted = np.empty(targets.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without a target in these folds
        for fold in np.unique(folds):
            predicted[folds == fold] = np.nanmean(targets[folds != fold], axis=0)
    return predicted


def mean_distances(
    predicted: np.ndarray, true: np.ndarray, points: Sequence[Sequence[int]], scale: np.ndarray | None = None
) -> np.ndarray:
    """The mean distance of the points of each image that are known: (n,), NaN where none is.

    Args:
        predicted: (n, columns) fractions of width and height.
        true: likewise, NaN where missing.
        points: the columns of each point.
        scale: (n, 2), what a width and a height are.

    Example:
        >>> float(mean_distances(np.array([[0.3, 0.4]]), np.zeros((1, 2)), [(0, 1)])[0])
        0.5
    """
    distances = np.empty((len(true), len(points)))
    for number, point in enumerate(points):
        difference = predicted[:, point] - true[:, point]
        distances[:, number] = np.linalg.norm(difference if scale is None else difference * scale, axis=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # an image without points
        return np.nanmean(distances, axis=1)


def measure_numbers(
    predictions: Mapping[str, np.ndarray],
    true: np.ndarray,
    columns: Sequence[str],
    points: Sequence[Sequence[int]],
    sizes: np.ndarray | None = None,
) -> list[Measure]:
    """Mean distance of points, then the absolute error of each other column.

    Args:
        predictions: by method, (n, columns).
        true: (n, columns), NaN where missing.
        columns: their names.
        points: the columns of each point, as fractions of width and height.
        sizes: (n, 2), width and height of the images in pixels; None for volumes.
    """
    measures = []
    if points:
        sides = {name: 100 * mean_distances(values, true, points) for name, values in predictions.items()}
        measures.append(Measure("mean distance", "% of the image side", sides))
    if points and sizes is not None:
        pixels = {name: mean_distances(values, true, points, sizes) for name, values in predictions.items()}
        measures.append(Measure("mean distance", "pixels of the image", pixels))
    of_points = {column for point in points for column in point}
    for number, column in enumerate(columns):
        if number not in of_points:
            errors = {name: np.abs(values[:, number] - true[:, number]) for name, values in predictions.items()}
            measures.append(Measure("mean absolute error", column, errors))
    return measures


def measure_classes(probabilities: Mapping[str, np.ndarray], true: np.ndarray) -> list[Measure]:
    """The accuracy.

    Args:
        probabilities: by method, (n, classes).
        true: (n,) class numbers.
    """
    right = {name: 100.0 * (values.argmax(1) == true) for name, values in probabilities.items()}
    return [Measure("accuracy", "%", right, higher_is_better=True)]


# What they say.


@dataclass(frozen=True)
class Verdict:
    """Two methods on the same images.

    Attributes:
        text: one line.
        best: a method.
        other: what it is compared with.
        difference: best − other, paired.
        low: the lower end of its interval.
        high: the upper end.
    """

    text: str
    best: str
    other: str
    difference: float
    low: float
    high: float

    @property
    def beyond_chance(self) -> bool:
        """Whether the interval leaves out 0."""
        return self.low > 0 or self.high < 0


def name_method(method: str, *, classes: bool = False) -> str:
    """How a method is called in tables."""
    if method == BASELINE:
        return "the most frequent class" if classes else "predicting the mean"
    return method if method in RIDGES else f"tensor regression ({method.upper()})"


def judge(measure: Measure, groups: np.ndarray, *, seed: int = 0) -> Verdict:
    """Which method won, and whether that is beyond chance: tensor regression against the better ridge."""
    ridges = [method for method in measure.values if method in RIDGES]
    tensors = [method for method in measure.values if method not in RIDGES and method != BASELINE]
    rivals = [measure.order(kind)[0] for kind in (tensors, ridges) if kind]
    best, other = measure.order(rivals if len(rivals) == 2 else [*rivals, BASELINE])
    verdict = _compare(measure, best, other, groups, seed)
    text = _say_who_won(measure, verdict)
    if not ridges:
        text += " Ridge is left out: it takes no missing targets."
    if other != BASELINE and not _is_better(measure, _compare(measure, best, BASELINE, groups, seed)):
        name = name_method(BASELINE, classes=measure.higher_is_better)
        text += f" Neither is shown to be better than {name}: these features do not tell the target."
    return replace(verdict, text=text)


def _compare(measure: Measure, a: str, b: str, groups: np.ndarray, seed: int) -> Verdict:
    """The mean of a − b over the images, and its interval."""
    differences = measure.values[a] - measure.values[b]
    mean = float(np.nanmean(differences)) if not np.isnan(differences).all() else math.nan
    return Verdict("", a, b, mean, *group_interval(differences, groups, level=LEVEL, seed=seed))


def _is_better(measure: Measure, verdict: Verdict) -> bool:
    """Whether the first of the two is better beyond chance."""
    return verdict.beyond_chance and (verdict.difference > 0) == measure.higher_is_better


def _say_who_won(measure: Measure, verdict: Verdict) -> str:
    means = [measure.mean(method) for method in (verdict.best, verdict.other)]
    names = [name_method(method, classes=measure.higher_is_better) for method in (verdict.best, verdict.other)]
    numbers = (
        f"{means[0]:.3g} against {means[1]:.3g} {measure.unit}; paired difference {verdict.difference:+.2g}, "
        f"95 % interval {verdict.low:+.2g} to {verdict.high:+.2g}"
    ).replace("-", "−")
    if not verdict.beyond_chance:
        return f"No winner: {names[0]} is level with {names[1]} ({numbers}, which includes 0)."
    return f"{names[0][0].upper()}{names[0][1:]} won against {names[1]} ({numbers}, which leaves out 0)."


def summarize(measures: Sequence[Measure], groups: np.ndarray, *, seed: int = 0) -> list[dict[str, Any]]:
    """Mean and interval of all measures and methods, as JSON types."""
    return [
        {
            "measure": measure.name,
            "unit": measure.unit,
            "methods": {
                method: {"mean": measure.mean(method), "interval": list(measure.interval(method, groups, seed))}
                for method in measure.values
            },
        }
        for measure in measures
    ]


def write_table(summary: Sequence[dict[str, Any]], *, classes: bool = False) -> list[str]:
    """The lines of a Markdown table: a row for each method, a column for each measure."""
    header = ["method", *(f"{entry['measure']}, {entry['unit']} [95 %]" for entry in summary)]
    rows = [
        [name_method(method, classes=classes), *(_format(entry["methods"][method]) for entry in summary)]
        for method in summary[0]["methods"]
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in [header, *rows]]
    lines.insert(1, ["-" * width for width in widths])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _format(entry: Mapping[str, Any]) -> str:
    low, high = entry["interval"]
    return f"{entry['mean']:.3g} [{low:.3g}, {high:.3g}]"
