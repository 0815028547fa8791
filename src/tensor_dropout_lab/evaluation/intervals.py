"""How sure a measure is: intervals over images and runs, and comparisons of two models on the same images.

No torch: the report imports this file. Everything is computed in float64. ``scipy.stats`` takes a second to import, so
the functions that need it import it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.measures import score_together
from tensor_dropout.metrics.outcome_arrays import (
    Array,
    Outcome,
    read_array,
    read_row,
    require_binary,
    require_count,
    require_level,
)

Statistic: TypeAlias = Callable[..., Any]

_CELLS = 2**21  # numbers that a resampling holds at once


class Interval(NamedTuple):
    """The two ends of an interval."""

    low: float
    high: float


class McNemar(NamedTuple):
    """Images that only one of two models gets right, and the p-value of "both are right equally often"."""

    only_a: int
    only_b: int
    p_value: float


class Comparison(NamedTuple):
    """``a − b`` in the main metric, its interval, and a p-value; ``only_a``, ``only_b``: see :class:`McNemar`."""

    difference: float
    low: float
    high: float
    p_value: float
    only_a: int | None
    only_b: int | None


# Intervals.


def bootstrap_interval(
    values: ArrayLike,
    *,
    statistic: Statistic = np.mean,
    level: float = 0.95,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """A percentile bootstrap interval (Efron and Tibshirani, "An introduction to the bootstrap", 1993).

    Images are drawn with replacement, the same ones for all runs; where there are several runs, they are drawn with
    replacement as well, independently (Owen, "The pigeonhole bootstrap", 2007). The estimate is the mean over the runs
    of the statistic over the images. With few runs it sees too little of the spread between them: :func:`seed_interval`
    is the honest one for a claim about new runs. Of equal values it knows no spread at all: for a share of right
    answers see :func:`proportion_interval`. One image has no interval: both ends are NaN.

    Not ``scipy.stats.bootstrap``: it resamples one axis, not images and runs.

    Args:
        values: (images,) or (runs, images).
        statistic: called as ``statistic(array, axis=-1)``; reduces the last axis.
        level: the probability of the interval.
        draws: the number of resamples.
        seed: of the resamples: equal seeds draw equal images.

    Example:
        >>> low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0])
        >>> 1 <= low < 2.5 < high <= 4
        True
    """
    table = read_array("bootstrap_interval", "values", values)
    if table.ndim not in (1, 2):
        raise TensorDropoutError(
            f"bootstrap_interval: values of shape (images,) or (runs, images) are expected, not {table.shape}"
        )
    require_level("bootstrap_interval", level)
    require_count("bootstrap_interval", "draws", draws)
    if table.shape[-1] == 1:
        return Interval(math.nan, math.nan)
    statistics = np.concatenate(list(_resample(np.atleast_2d(table), statistic, draws, seed)))
    low, high = np.quantile(statistics, ((1 - level) / 2, (1 + level) / 2))
    return Interval(float(low), float(high))


def _resample(table: Array, statistic: Statistic, draws: int, seed: int) -> Iterator[Array]:
    """The statistic of resampled images and runs, some draws at a time."""
    runs, images = table.shape
    for_images, for_runs = np.random.default_rng(seed).spawn(2)
    for count in _split(draws, images):
        rows = for_images.integers(images, size=(count, images))
        per_run = np.stack([statistic(run[rows], axis=-1) for run in table], axis=-1)  # (count, runs)
        if per_run.shape != (count, runs):
            raise TensorDropoutError(
                f"bootstrap_interval: statistic(values, axis=-1) must turn ({count}, {images}) into ({count},), as "
                f"numpy.mean does; it gave {per_run.shape[:-1]}"
            )
        chosen = for_runs.integers(runs, size=(count, runs))
        yield np.take_along_axis(per_run, chosen, axis=1).mean(axis=1)


def _split(draws: int, images: int) -> Iterator[int]:
    """Numbers of draws that add up to ``draws``, each small enough for the memory."""
    step = max(1, _CELLS // images)
    for start in range(0, draws, step):
        yield min(step, draws - start)


def group_interval(
    values: ArrayLike, groups: ArrayLike, *, level: float = 0.95, draws: int = 2000, seed: int = 0
) -> Interval:
    """A percentile bootstrap interval of the mean over images, where whole groups are drawn with replacement.

    Images of one person are alike: drawing images as if they were independent makes the interval too narrow. One group
    has no interval: both ends are NaN.

    Args:
        values: (images,), NaN for images that do not count.
        groups: (images,) of names or numbers; each image its own for a plain bootstrap.
        level: the probability of the interval.
        draws: the number of resamples.
        seed: of the resamples: equal seeds draw equal groups.

    Example:
        >>> low, high = group_interval([1.0, 1.0, 3.0, 3.0], ["anna", "anna", "ben", "ben"])
        >>> float(low), float(high)
        (1.0, 3.0)
    """
    numbers = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(numbers)
    _, members = np.unique(np.asarray(groups)[known], return_inverse=True)
    if not len(members):
        return Interval(math.nan, math.nan)
    totals, sizes = np.bincount(members, numbers[known]), np.bincount(members)

    def mean_of(drawn: Array, axis: int) -> Any:
        rows = drawn.astype(np.intp)
        return totals[rows].sum(axis) / sizes[rows].sum(axis)

    return bootstrap_interval(np.arange(len(sizes)), statistic=mean_of, level=level, draws=draws, seed=seed)


def proportion_interval(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share, in [0, 1] (Wilson, "Probable inference", 1927).

    Unlike a bootstrap, it has a width when all are right.

    Example:
        >>> [round(end, 3) for end in proportion_interval(10, 10)]
        [0.722, 1.0]
    """
    require_count("proportion_interval", "n", n)
    require_level("proportion_interval", level)
    if not 0 <= successes <= n:
        raise TensorDropoutError(f"proportion_interval: successes must be between 0 and n={n}, not {successes!r}")
    from scipy.stats import binomtest

    low, high = binomtest(successes, n).proportion_ci(level, method="wilson")
    return Interval(float(low), float(high))


def seed_interval(values: ArrayLike, level: float = 0.95) -> Interval:
    """Student's t interval of the mean over runs: ``mean ± t_{n−1} · s / √n``.

    Args:
        values: (n,), one number per run, or per pair of runs with equal seeds for a difference.
        level: the probability of the interval.

    Raises:
        TensorDropoutError: if there are fewer than two runs: one run has no interval.

    Example:
        >>> [round(end, 3) for end in seed_interval([90.0, 92.0, 91.0])]
        [88.516, 93.484]
    """
    (runs,) = read_row("seed_interval", values=values)
    require_level("seed_interval", level)
    n = len(runs)
    if n < 2:
        raise TensorDropoutError("seed_interval: an interval over runs needs two of them; there is one")
    mean, half = float(runs.mean()), _student_quantile(level, n - 1) * float(runs.std(ddof=1)) / math.sqrt(n)
    return Interval(mean - half, mean + half)


def difference_interval(a: ArrayLike, b: ArrayLike, level: float = 0.95) -> Interval:
    """Student's t interval of ``mean(a) − mean(b)`` over runs that are not paired, with one variance for both.

    Args:
        a: (n,), one number per run.
        b: (m,), likewise; one of the two may be a single run, whose spread is then taken to be the other's.
        level: the probability of the interval.

    Raises:
        TensorDropoutError: if both are single runs.

    Example:
        >>> [round(end, 3) for end in difference_interval([92.0, 93.0, 94.0], [90.0, 92.0, 91.0])]
        [-0.267, 4.267]
    """
    require_level("difference_interval", level)
    groups = [read_row("difference_interval", values=values)[0] for values in (a, b)]
    n, m = map(len, groups)
    if n + m < 3:
        raise TensorDropoutError("difference_interval: an interval over runs needs three of them in all; there are two")
    spread = sum(float(((group - group.mean()) ** 2).sum()) for group in groups) / (n + m - 2)
    middle = float(groups[0].mean() - groups[1].mean())
    half = _student_quantile(level, n + m - 2) * math.sqrt(spread * (1 / n + 1 / m))
    return Interval(middle - half, middle + half)


def _student_quantile(level: float, degrees: int) -> float:
    """The t with ``P(|T| ≤ t) = level``."""
    from scipy.stats import t

    return float(t.isf((1 - level) / 2, degrees))


def metric_interval(*runs: Outcome, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Interval:
    """The interval of the main metric (accuracy in percent, or MAE) over the images, and over the runs if several.

    The accuracy of one run has Wilson's interval; everything else is bootstrapped. If all answers of several runs are
    right, or all wrong, Wilson's of one run stands in: further runs add no images. The MAE of one image has no
    interval: both ends are NaN.

    Args:
        runs: outcomes on the same images: of several trainings, or of several draws of the noise.
        level: the probability of the interval.
        draws: the number of resamples.
        seed: of the resamples.

    Example:
        >>> [round(end, 1) for end in metric_interval({"target": [0, 1], "predicted": [0, 1]})]
        [34.2, 100.0]
    """
    if not runs:
        raise TensorDropoutError("metric_interval: an outcome is expected; there is none")
    require_level("metric_interval", level)
    scores = score_together("metric_interval", *runs)
    equal = bool((scores == scores[0, 0]).all())
    if "predicted" in runs[0] and (len(runs) == 1 or equal):
        low, high = proportion_interval(int(np.count_nonzero(scores[0])), scores.shape[1], level)
        return Interval(100 * low, 100 * high)
    return bootstrap_interval(scores, level=level, draws=draws, seed=seed)


# Two models on the same images.


def mcnemar(right_a: ArrayLike, right_b: ArrayLike) -> McNemar:
    """McNemar's exact test: is one of two models right more often on the same images?

    Of the n images that exactly one of them gets right, either is as likely to: ``P = 2 Σ_{k ≤ min} C(n, k) / 2ⁿ``, at
    most 1 (McNemar, "Note on the sampling error of the difference between correlated proportions", 1947).

    Args:
        right_a: (N,) of 0 and 1.
        right_b: (N,), the same images in the same order.

    Example:
        >>> only_a, only_b, p_value = mcnemar([1, 1, 1, 1, 0], [0, 0, 0, 1, 0])
        >>> only_a, only_b, round(p_value, 6)
        (3, 0, 0.25)
    """
    a, b = read_row("mcnemar", right_a=right_a, right_b=right_b)
    require_binary("mcnemar", a)
    require_binary("mcnemar", b)
    from scipy.stats import binomtest

    only_a, only_b = int(np.count_nonzero(a > b)), int(np.count_nonzero(b > a))
    p_value = float(binomtest(only_a, only_a + only_b).pvalue) if only_a + only_b else 1.0
    return McNemar(only_a, only_b, p_value)


def compare(a: Outcome, b: Outcome, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Comparison:
    """Two models on the same images: ``a − b`` in accuracy (points; a is better above 0) or MAE (a is better below 0).

    The interval is a bootstrap over the images of the paired differences. The p-value is McNemar's for a classification
    (:func:`mcnemar`); for a regression it is of a sign-flip test: if neither model is better, each image's difference d
    is as likely to be −d, and ``P = (1 + #{|mean ±d| ≥ |mean d|}) / (1 + draws)`` (Phipson and Smyth, "Permutation
    p-values should never be zero", 2010). This is one run of each model: it says nothing of other seeds.

    If all images of a classification have the same difference, for example none, the bootstrap knows no spread;
    Wilson's bound of a share that was never seen, ``z²/(N + z²)``, is then added on either side. One image of a
    regression has no interval: both ends are NaN.

    Args:
        a: an outcome.
        b: an outcome on the same images in the same order.
        level: the probability of the interval.
        draws: the number of resamples, and of sign flips.
        seed: of both.

    Raises:
        TensorDropoutError: if the targets differ: the images are not the same.

    Example:
        >>> target = [0, 1, 1]
        >>> found = compare({"target": target, "predicted": [0, 1, 1]}, {"target": target, "predicted": [0, 0, 0]})
        >>> round(found.difference, 1), round(found.p_value, 6), found.only_a, found.only_b
        (66.7, 0.5, 2, 0)
    """
    require_level("compare", level)
    require_count("compare", "draws", draws)
    scores_a, scores_b = score_together("compare", a, b)
    differences = scores_a - scores_b
    mean = float(differences.mean())
    low, high = bootstrap_interval(differences, level=level, draws=draws, seed=seed)
    if "predicted" not in a:
        return Comparison(mean, low, high, _flip_signs(differences, draws, seed), None, None)
    test = mcnemar(scores_a > 0, scores_b > 0)
    if (differences == differences[0]).all():
        margin = 100 * proportion_interval(0, len(differences), level).high
        low, high = max(-100.0, mean - margin), min(100.0, mean + margin)
    return Comparison(mean, low, high, test.p_value, test.only_a, test.only_b)


def _flip_signs(differences: Array, draws: int, seed: int) -> float:
    """The sign-flip test of :func:`compare`.

    Not ``scipy.stats.permutation_test``: it would draw other signs than those of the records.
    """
    random = np.random.default_rng(seed)
    total, rounding = differences.sum(), 1e-12 * np.abs(differences).sum()
    extreme = 0
    for count in _split(draws, len(differences)):
        kept = random.integers(2, size=(count, len(differences)), dtype=np.int8).astype(np.float64)
        flipped = 2 * (kept @ differences) - total
        extreme += int(np.count_nonzero(np.abs(flipped) >= abs(total) - rounding))
    return (1 + extreme) / (1 + draws)
