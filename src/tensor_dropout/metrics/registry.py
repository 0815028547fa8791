"""Every metric once: its name in records, its label in tables, which way is better, and how it is computed.

A new metric is one more entry in ``METRICS``: training, evaluation and the report read this list. The first metric of a
task is its main one. Arrays come checked, in float64 (:mod:`tensor_dropout.metrics.outcome_arrays`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.measures import normal_quantile, reliability, risk_coverage
from tensor_dropout.metrics.outcome_arrays import Array, Outcome, Task, find_task, read_classes, read_numbers

Arrays = Mapping[str, Array]
LEVELS = (50, 80, 90, 95)
"""The prediction intervals whose coverage is reported, in percent."""


@dataclass(frozen=True)
class Metric:
    """A number that sums up an outcome.

    Attributes:
        name: its key in records.
        task: "classification" or "regression"; the two may share a name.
        label: its name at the head of a table.
        title: its name in a sentence.
        better: "higher", "lower", or None where neither is.
        compute: from the arrays of an outcome to the number.
        needs: the arrays that it needs besides ``target`` and ``predicted`` or ``output``.
        unit: "%", "target" for the unit of the target, or "".
        decimals: shown in tables.
        is_share: whether it is the share of examples that are right, so that a binomial interval holds.
    """

    name: str
    task: Task
    label: str
    title: str
    better: Literal["higher", "lower"] | None
    compute: Callable[[Arrays], float]
    needs: tuple[str, ...] = ()
    unit: Literal["%", "target", ""] = ""
    decimals: int = 2
    is_share: bool = False

    @property
    def scale(self) -> float:
        """What turns the mean over examples into this metric: 100 for percent."""
        return 100.0 if self.unit == "%" else 1.0

    def head(self, unit: str = "") -> str:
        """The head of a column; ``unit`` is that of the target.

        Example:
            >>> find_metric("mae").head("years"), find_metric("ece").head(), find_metric("nll").head()
            ('MAE, years', 'ECE, %', 'NLL')
        """
        shown = unit if self.unit == "target" else self.unit
        return f"{self.label}, {shown}" if shown else self.label

    def describe(self, unit: str = "") -> str:
        """The metric with its unit, in words.

        Example:
            >>> find_metric("mae").describe("years"), find_metric("accuracy").describe()
            ('mean absolute error in years', 'accuracy in %')
        """
        shown = unit if self.unit == "target" else self.unit
        return f"{self.title} in {shown}" if shown else self.title

    def fits(self, outcome: Outcome) -> bool:
        """Whether an outcome has the arrays that it needs."""
        return all(name in outcome for name in self.needs)


# Classification: arrays (N,).


def _is_right(arrays: Arrays) -> Array:
    return (arrays["predicted"] == arrays["target"]).astype(np.float64)


def _compute_ece(arrays: Arrays) -> float:
    right = _is_right(arrays)
    bins = reliability(arrays["confidence"], right)
    gaps = np.nan_to_num(np.abs(bins.accuracy - bins.confidence)) * bins.examples
    return 100 * float(gaps.sum()) / len(right)


def _compute_error_area(arrays: Arrays) -> float:
    return 100 * float(risk_coverage(arrays["confidence"], 1 - _is_right(arrays)).risk.mean())


# Regression: arrays (N, T). Errors are averaged over examples and targets; rmse, r2 and correlation pool their squares.


def _find_error(arrays: Arrays) -> Array:
    return np.abs(arrays["output"] - arrays["target"])


def _compute_r2(arrays: Arrays) -> float:
    """``1 − Σ(y − f)² / Σ(y − ȳ)²``; NaN if the target is constant."""
    spread = float(np.square(arrays["target"] - arrays["target"].mean(0)).sum())
    return 1 - float(np.square(_find_error(arrays)).sum()) / spread if spread > 0 else math.nan


def _compute_correlation(arrays: Arrays) -> float:
    """Pearson's; NaN if target or output is constant."""
    y, output = (arrays[name] - arrays[name].mean(0) for name in ("target", "output"))
    norms = math.sqrt(float(np.square(y).sum()) * float(np.square(output).sum()))
    return float((output * y).sum()) / norms if norms > 0 else math.nan


def _compute_gaussian_nll(arrays: Arrays) -> float:
    """``mean ½ (log 2πσ² + (y − f)² / σ²)``; NaN if it is not finite, which a std of 0 makes it."""
    std = arrays["std"]
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        terms = np.log(std) + 0.5 * np.square(_find_error(arrays) / std)
        value = float(terms.mean()) + 0.5 * math.log(2 * math.pi)
    return value if math.isfinite(value) else math.nan


def compute_coverage(arrays: Arrays, percent: int) -> float:
    """Percent of the targets in ``f ± z·σ``, ends included: a std of 0 covers exact hits alone."""
    return 100 * float((_find_error(arrays) <= normal_quantile(percent / 100) * arrays["std"]).mean())


def _compute_absolute_area(arrays: Arrays) -> float:
    error, std = _find_error(arrays), arrays["std"]
    areas = [risk_coverage(-std[:, t], error[:, t]).risk.mean() for t in range(std.shape[1])]
    return float(np.mean(areas))


_coverages = (
    Metric(
        f"coverage_{percent}",
        "regression",
        f"coverage at {percent} %",
        f"targets inside the {percent} % interval",
        None,
        partial(compute_coverage, percent=percent),
        ("std",),
        "%",
    )
    for percent in LEVELS
)

METRICS: tuple[Metric, ...] = (
    Metric(
        "accuracy",
        "classification",
        "accuracy",
        "accuracy",
        "higher",
        lambda arrays: 100 * float(_is_right(arrays).mean()),
        unit="%",
        decimals=1,
        is_share=True,
    ),
    Metric(
        "top5",
        "classification",
        "top-5",
        "top-5 accuracy",
        "higher",
        lambda arrays: 100 * float(arrays["top5"].mean()),
        ("top5",),
        "%",
        decimals=1,
        is_share=True,
    ),
    Metric(
        "nll",
        "classification",
        "NLL",
        "negative log-likelihood",
        "lower",
        lambda arrays: float(arrays["nll"].mean()),
        ("nll",),
    ),
    Metric("ece", "classification", "ECE", "expected calibration error", "lower", _compute_ece, ("confidence",), "%"),
    Metric(
        "brier",
        "classification",
        "Brier score",
        "Brier score",
        "lower",
        lambda arrays: float(arrays["brier"].mean()),
        ("brier",),
    ),
    Metric(
        "aurc",
        "classification",
        "AURC",
        "area under the risk-coverage curve",
        "lower",
        _compute_error_area,
        ("confidence",),
        "%",
    ),
    Metric(
        "mae",
        "regression",
        "MAE",
        "mean absolute error",
        "lower",
        lambda arrays: float(_find_error(arrays).mean()),
        unit="target",
    ),
    Metric(
        "rmse",
        "regression",
        "RMSE",
        "root mean squared error",
        "lower",
        lambda arrays: math.sqrt(np.square(_find_error(arrays)).mean()),
        unit="target",
    ),
    Metric("r2", "regression", "R²", "coefficient of determination", "higher", _compute_r2),
    Metric("correlation", "regression", "correlation", "correlation", "higher", _compute_correlation),
    Metric("nll", "regression", "NLL", "negative log-likelihood", "lower", _compute_gaussian_nll, ("std",)),
    *_coverages,
    Metric(
        "width_95",
        "regression",
        "width at 95 %",
        "mean width of the 95 % interval",
        "lower",
        lambda arrays: 2 * normal_quantile(0.95) * float(arrays["std"].mean()),
        ("std",),
        "target",
    ),
    Metric(
        "aurc",
        "regression",
        "AURC",
        "area under the risk-coverage curve",
        "lower",
        _compute_absolute_area,
        ("std",),
        "target",
    ),
    Metric(
        "zero_std",
        "regression",
        "std of 0",
        "standard deviations that are 0",
        "lower",
        lambda arrays: 100 * float((arrays["std"] == 0).mean()),
        ("std",),
        "%",
    ),
)


def list_metrics(task: str) -> list[Metric]:
    """The metrics of a task, the main one first."""
    return [metric for metric in METRICS if metric.task == task]


def main_metric(task: str) -> Metric:
    """What a task is judged by.

    Example:
        >>> main_metric("regression").name
        'mae'
    """
    return list_metrics(task)[0]


def find_metric(name: str, task: str | None = None) -> Metric:
    """The metric of that name; without a task the first.

    Raises:
        TensorDropoutError: if there is none.

    Example:
        >>> find_metric("accuracy").better
        'higher'
    """
    for metric in METRICS:
        if metric.name == name and task in (None, metric.task):
            return metric
    known = dict.fromkeys(metric.name for metric in METRICS if task in (None, metric.task))
    raise TensorDropoutError(f"there is no metric {name!r}; known are {', '.join(known)}")


def find_main(numbers: Mapping[str, object]) -> Metric:
    """The main metric among the numbers of a record, which tells its task.

    Raises:
        TensorDropoutError: if the numbers have none.

    Example:
        >>> find_main({"mae": 3.1, "rmse": 4.0}).name
        'mae'
    """
    mains = [main_metric(task) for task in ("classification", "regression")]
    found = [metric for metric in mains if metric.name in numbers]
    if len(found) != 1:
        names = " or ".join(metric.name for metric in mains)
        raise TensorDropoutError(f"the numbers of a record have {names}, one of them; these have {', '.join(numbers)}")
    return found[0]


def summarize(outcome: Outcome, names: Sequence[str] | None = None) -> dict[str, float]:
    """The metrics of an outcome.

    Classification: ``accuracy`` and ``top5`` in percent, ``nll``, ``ece`` in percent
    (:func:`~tensor_dropout.metrics.measures.reliability`, 15 bins), ``brier``, and ``aurc``, the area under
    :func:`~tensor_dropout.metrics.measures.risk_coverage` in percent: the risk is the share of wrong answers, the
    certainty is the confidence.

    Regression: ``mae``, ``rmse``, ``r2`` and ``correlation``. With ``std`` also

    - ``nll``: ``mean ½ (log 2πσ² + (y − f)² / σ²)``; NaN if it is not a finite number, which a std of 0 makes it;
    - ``coverage_50``, ``_80``, ``_90``, ``_95``: percent of the targets in ``f ± z·σ``, ends included, so that a std of
      0 covers exact hits alone; ``width_95``: the mean width ``2·z·σ`` at 95 %;
    - ``aurc``: the risk is the absolute error and the certainty ``−σ``, per target; the mean over the T targets;
    - ``zero_std``: percent of the standard deviations that are 0. Above 0, read ``nll`` and the coverage with care.

    Several targets are taken together: ``rmse``, ``r2`` and ``correlation`` pool their sums of squares, so that the one
    of the largest scale counts most, and the others are means over the targets. Where units differ, summarize each of
    :func:`~tensor_dropout.metrics.measures.split_targets`.

    Args:
        outcome: a dict of arrays with a row per example (:mod:`tensor_dropout.metrics.outcome_arrays`).
        names: the metrics to compute; None: all that the outcome has arrays for.

    Raises:
        TensorDropoutError: if the outcome is empty, not finite, or lacks an array.

    Example:
        >>> found = summarize({"target": [[1.0], [2.0]], "output": [[1.5], [2.0]], "std": [[0.5], [0.1]]})
        >>> {name: round(value, 3) for name, value in found.items() if name in ("mae", "coverage_50", "aurc")}
        {'mae': 0.25, 'coverage_50': 50.0, 'aurc': 0.125}
    """
    task = find_task("summarize", outcome)
    if names is None:
        chosen = [metric for metric in list_metrics(task) if metric.fits(outcome)]
    else:
        chosen = [find_metric(name, task) for name in names]
        for metric in chosen:
            missing = [array for array in metric.needs if array not in outcome]
            if missing:
                raise TensorDropoutError(
                    f"summarize: {metric.name} needs {', '.join(missing)}; the outcome has {', '.join(outcome)}"
                )
    read = read_classes("summarize", outcome) if task == "classification" else read_numbers("summarize", outcome)
    return {metric.name: metric.compute(read) for metric in chosen}
