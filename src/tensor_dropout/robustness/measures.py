"""What stored outcomes say, without a rerun: numbers, intervals, and comparisons of two models.

An outcome is a dict of arrays with a row per example (N rows), as an evaluation stores it:

- classification: ``target`` (N,), ``predicted`` (N,), ``confidence`` (N,) the probability of the predicted class,
  ``nll`` (N,), ``brier`` (N,) ``Σ_k (p_k − 1[k = y])²``, ``entropy`` (N,);
- regression: ``target`` (N, T), ``output`` (N, T), and the predictive standard deviation ``std`` (N, T), if there is
  one.

Only numpy and the standard library: the report imports this file. Everything is computed in float64. An empty outcome,
and one with a NaN or an infinity anywhere, is refused: no number is better than a wrong one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from statistics import NormalDist
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensor_dropout.errors import TensorDropoutError

Outcome: TypeAlias = Mapping[str, Any]
Array: TypeAlias = NDArray[Any]
Statistic: TypeAlias = Callable[..., Any]

BINS = 15
LEVELS = (50, 80, 90, 95)
"""The prediction intervals whose coverage is reported, in percent."""

_CLASSES = ("target", "predicted", "confidence", "nll", "brier", "entropy")
_NUMBERS = ("target", "output", "std")
_CELLS = 2**21  # numbers that a resampling holds at once


class RiskCoverage(NamedTuple):
    """``risk[k]``: the mean loss of the most certain examples that make up the share ``coverage[k]``."""

    coverage: Array
    risk: Array


class Reliability(NamedTuple):
    """Per bin of the confidence: its mean, the accuracy (both NaN in an empty bin), and the number of examples."""

    confidence: Array
    accuracy: Array
    examples: Array


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


# The numbers of an outcome.


def summarize(outcome: Outcome) -> dict[str, float]:
    """The numbers of an outcome.

    Classification: ``accuracy`` in percent, ``nll``, ``ece`` in percent (:func:`reliability`, 15 bins), ``brier``, and
    ``aurc``, the area under :func:`risk_coverage` in percent: the risk is the share of wrong answers, the certainty is
    the confidence.

    Regression: ``mae`` and ``rmse``. With ``std`` also

    - ``nll``: ``mean ½ (log 2πσ² + (y − f)² / σ²)``; NaN if it is not a finite number, which a std of 0 makes it;
    - ``coverage_50``, ``_80``, ``_90``, ``_95``: percent of the targets in ``f ± z·σ``, ends included, so that a std of
      0 covers exact hits alone; ``width_95``: the mean width ``2·z·σ`` at 95 %;
    - ``aurc``: the risk is the absolute error and the certainty ``−σ``, per target; the mean over the T targets;
    - ``zero_std``: percent of the standard deviations that are 0. Above 0, read ``nll`` and the coverage with care.

    Raises:
        TensorDropoutError: if the outcome is empty, not finite, or lacks an array.

    Example:
        >>> found = summarize({"target": [[1.0], [2.0]], "output": [[1.5], [2.0]], "std": [[0.5], [0.1]]})
        >>> {name: round(value, 3) for name, value in found.items() if name in ("mae", "coverage_50", "aurc")}
        {'mae': 0.25, 'coverage_50': 50.0, 'aurc': 0.125}
    """
    if _find_task("summarize", outcome) == "classification":
        return _summarize_classes(_read_classes("summarize", outcome, _CLASSES[:5]))
    return _summarize_numbers(_read_numbers("summarize", outcome))


def _summarize_classes(found: dict[str, Array]) -> dict[str, float]:
    right = (found["predicted"] == found["target"]).astype(np.float64)
    bins = reliability(found["confidence"], right)
    gaps = np.nan_to_num(np.abs(bins.accuracy - bins.confidence)) * bins.examples
    return {
        "accuracy": 100 * float(right.mean()),
        "nll": float(found["nll"].mean()),
        "ece": 100 * float(gaps.sum()) / len(right),
        "brier": float(found["brier"].mean()),
        "aurc": 100 * float(risk_coverage(found["confidence"], 1 - right).risk.mean()),
    }


def _summarize_numbers(found: dict[str, Array]) -> dict[str, float]:
    error = np.abs(found["output"] - found["target"])  # (N, T)
    summary = {"mae": float(error.mean()), "rmse": math.sqrt(np.square(error).mean())}
    if "std" not in found:
        return summary
    std = found["std"]
    summary["nll"] = _gaussian_nll(error, std)
    for percent in LEVELS:
        summary[f"coverage_{percent}"] = 100 * float((error <= _normal_quantile(percent / 100) * std).mean())
    areas = [risk_coverage(-std[:, t], error[:, t]).risk.mean() for t in range(std.shape[1])]
    summary["width_95"] = 2 * _normal_quantile(0.95) * float(std.mean())
    summary["aurc"] = float(np.mean(areas))
    summary["zero_std"] = 100 * float((std == 0).mean())
    return summary


def _gaussian_nll(error: Array, std: Array) -> float:
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        value = float((np.log(std) + 0.5 * np.square(error / std)).mean()) + 0.5 * math.log(2 * math.pi)
    return value if math.isfinite(value) else math.nan


def score_images(outcome: Outcome) -> Array:
    """The main metric image by image, (N,): 100 or 0 for right or wrong, or the mean absolute error over the T targets.

    Its mean is the accuracy in percent, or the MAE. Differences of two models over several runs, for example, go to
    :func:`bootstrap_interval` as (runs, N).

    Example:
        >>> score_images({"target": [0, 1], "predicted": [0, 0]}).tolist()
        [100.0, 0.0]
    """
    return _score("score_images", outcome)[0]


def _score(what: str, outcome: Outcome) -> tuple[Array, Array]:
    """The main metric of each image, and its target."""
    if _find_task(what, outcome) == "classification":
        found = _read_classes(what, outcome, ("target", "predicted"))
        return 100.0 * (found["predicted"] == found["target"]), found["target"]
    found = _read_numbers(what, outcome)
    return np.abs(found["output"] - found["target"]).mean(axis=1), found["target"]


def _score_together(what: str, *outcomes: Outcome) -> Array:
    """The main metric of each image for outcomes on the same images: (outcomes, N)."""
    if len({_find_task(what, outcome) for outcome in outcomes}) > 1:
        raise TensorDropoutError(f"{what}: one outcome is of a classification, another of a regression")
    scores, targets = zip(*(_score(what, outcome) for outcome in outcomes), strict=True)
    if not all(np.array_equal(targets[0], target) for target in targets):
        raise TensorDropoutError(
            f"{what}: the targets differ, so these outcomes are not of the same images in the same order"
        )
    return np.stack(scores)


# Calibration and uncertainty.


def risk_coverage(certainty: ArrayLike, loss: ArrayLike) -> RiskCoverage:
    """The risk of a model that answers only where it is most certain.

    ``risk(k/N) = 1/k Σ_{i among the k most certain} loss_i``, k = 1 … N (Geifman and El-Yaniv, "Selective
    classification for deep neural networks", 2017). The mean of the risks is the area under the curve, AURC. Among
    equal certainties any order is as good; the curve is the expectation over all of them, so that it does not depend on
    the order of the rows.

    Args:
        certainty: (N,), higher is more certain.
        loss: (N,).

    Example:
        >>> risk_coverage([0.9, 0.8, 0.8], [0, 1, 0]).risk.round(3).tolist()
        [0.0, 0.25, 0.333]
    """
    certainty, loss = _read_row("risk_coverage", certainty=certainty, loss=loss)
    order = np.lexsort((loss, -certainty))  # the loss, too: sums are then rounded alike for every order of the rows
    certainty, loss = certainty[order], loss[order]
    starts = np.flatnonzero(np.r_[True, certainty[1:] != certainty[:-1]])
    sizes = np.diff(np.r_[starts, len(loss)])
    shared = np.repeat(np.add.reduceat(loss, starts) / sizes, sizes)
    count = np.arange(1, len(loss) + 1)
    return RiskCoverage(count / len(loss), np.cumsum(shared) / count)


def reliability(confidence: ArrayLike, right: ArrayLike, bins: int = BINS) -> Reliability:
    """Accuracy against confidence in equally wide bins of the confidence, of which the last includes 1.

    The expected calibration error is ``Σ_b |accuracy_b − confidence_b| · n_b / N`` (Guo et al., "On calibration of
    modern neural networks", 2017), the same as :func:`tensor_dropout.training.evaluation.calibration_error`.

    Args:
        confidence: (N,) in [0, 1].
        right: (N,) of 0 and 1.
        bins: their number.

    Example:
        >>> reliability([0.6, 0.8, 1.0], [0, 1, 1], bins=2).accuracy.round(3).tolist()
        [nan, 0.667]
    """
    confidence, right = _read_row("reliability", confidence=confidence, right=right)
    _require_probabilities("reliability", confidence)
    _require_binary("reliability", right)
    _require_count("reliability", "bins", bins)
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    examples = np.bincount(bin_of, minlength=bins)
    divisor = np.where(examples > 0, examples, np.nan)
    means = [np.bincount(bin_of, weights=values, minlength=bins) / divisor for values in (confidence, right)]
    return Reliability(means[0], means[1], examples)


def fit_extra_variance(outcome: Outcome) -> float:
    """The variance ``s²`` that the standard deviations of a regression leave out, by maximum likelihood.

    ``s² = argmax_{s² ≥ 0} Σ log N(y; f, σ² + s²)``: the masks' σ says how unsure the weights are, and not how far the
    targets scatter around the best answer. Fit it on a validation outcome and :func:`widen` a test outcome by it.
    Without ``std``, σ is 0 and ``s²`` the mean squared error: the same treatment for a model without uncertainty.

    The likelihood may have several maxima; each is bracketed between the points of a logarithmic grid and bisected, and
    the highest wins. Errors and standard deviations below 1e-15 of the largest error count as 0. If every example with
    σ = 0 is hit exactly, ``s² = 0`` would be infinitely likely whatever the others say; such examples are left out.

    Args:
        outcome: of a regression. There is one ``s²`` for all T targets; where their units differ, fit each by itself.

    Example:
        >>> round(fit_extra_variance({"target": [[0.0], [0.0]], "output": [[2.0], [-2.0]], "std": [[1.0], [1.0]]}), 6)
        3.0
    """
    found = _read_numbers("fit_extra_variance", outcome)
    error = np.abs(found["output"] - found["target"]).ravel()
    std = found["std"].ravel() if "std" in found else np.zeros_like(error)
    unit = float(error.max())
    if unit == 0:
        return 0.0
    squares, variances = (np.square(np.where(values / unit < 1e-15, 0.0, values / unit)) for values in (error, std))
    if not squares[variances == 0].any():
        squares, variances = squares[variances > 0], variances[variances > 0]
    return unit * unit * _maximize_likelihood(squares, variances)


def _maximize_likelihood(squares: Array, variances: Array) -> float:
    """The ``s² ≥ 0`` that maximizes ``Σ log N(e; 0, σ² + s²)`` for squared errors e² and variances σ², each (n,)."""

    def measure(extra: float) -> float:
        total = variances + extra
        return -float((np.log(total) + squares / total).mean())

    def measure_slope(extra: float) -> float:
        total = variances + extra
        return float(((squares / total - 1) / total).mean())

    above = 2 * float((squares - variances).max())  # from half of it on, every term falls
    if above <= 0:
        return 0.0
    scales = np.concatenate((squares, variances))
    below = min(float(scales[scales > 0].min()), above) / 10
    grid = np.geomspace(below, above, 2 + math.ceil(10 * math.log10(above / below)))
    points = [0.0, *grid.tolist()]
    bounded = bool((variances > 0).all())  # at s² = 0: if not, the likelihood is 0 there, and rises
    slopes = [measure_slope(0.0) if bounded else math.inf, *map(measure_slope, points[1:])]
    maxima = [0.0] if slopes[0] <= 0 else []
    for k in range(len(grid)):
        if slopes[k] > 0 >= slopes[k + 1]:
            maxima.append(_bisect(measure_slope, points[k], points[k + 1]))
    return max(maxima, key=measure)


def widen(outcome: Outcome, extra: float) -> dict[str, Array]:
    """The outcome of a regression with ``std = √(σ² + s²)``; σ is 0 where the outcome has no ``std``.

    Args:
        outcome: of a regression.
        extra: ``s²``, from :func:`fit_extra_variance` on other examples.

    Example:
        >>> widen({"target": [[0.0]], "output": [[1.0]], "std": [[3.0]]}, 16.0)["std"].tolist()
        [[5.0]]
    """
    found = _read_numbers("widen", outcome)
    if not (math.isfinite(extra) and extra >= 0):
        raise TensorDropoutError(f"widen: extra is a variance, a finite number of 0 or more, not {extra!r}")
    std = found.get("std", np.zeros_like(found["output"]))
    return {**found, "std": np.hypot(std, math.sqrt(extra))}


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
    answers see :func:`proportion_interval`.

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
    table = _read_array("bootstrap_interval", "values", values)
    if table.ndim not in (1, 2):
        raise TensorDropoutError(
            f"bootstrap_interval: values of shape (images,) or (runs, images) are expected, not {table.shape}"
        )
    _require_level("bootstrap_interval", level)
    _require_count("bootstrap_interval", "draws", draws)
    found = np.concatenate(list(_resample(np.atleast_2d(table), statistic, draws, seed)))
    low, high = np.quantile(found, ((1 - level) / 2, (1 + level) / 2))
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


def proportion_interval(successes: int, n: int, level: float = 0.95) -> Interval:
    """Wilson's score interval of a share, in [0, 1] (Wilson, "Probable inference", 1927).

    ``(p + z²/2n ± z √(p(1 − p)/n + z²/4n²)) / (1 + z²/n)``. Unlike a bootstrap, it has a width when all are right.

    Example:
        >>> [round(end, 3) for end in proportion_interval(10, 10)]
        [0.722, 1.0]
    """
    _require_count("proportion_interval", "n", n)
    _require_level("proportion_interval", level)
    if not 0 <= successes <= n:
        raise TensorDropoutError(f"proportion_interval: successes must be between 0 and n={n}, not {successes!r}")
    share, z2 = successes / n, _normal_quantile(level) ** 2 / n
    centre = (share + z2 / 2) / (1 + z2)
    half = math.sqrt(z2 * (share * (1 - share) + z2 / 4)) / (1 + z2)
    return Interval(0.0 if successes == 0 else centre - half, 1.0 if successes == n else centre + half)


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
    (runs,) = _read_row("seed_interval", values=values)
    _require_level("seed_interval", level)
    n = len(runs)
    if n < 2:
        raise TensorDropoutError("seed_interval: an interval over runs needs two of them; there is one")
    mean, half = float(runs.mean()), _student_quantile(level, n - 1) * float(runs.std(ddof=1)) / math.sqrt(n)
    return Interval(mean - half, mean + half)


def metric_interval(*runs: Outcome, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Interval:
    """The interval of the main metric (accuracy in percent, or MAE) over the images, and over the runs if several.

    The accuracy of one run has Wilson's interval; everything else is bootstrapped. If all answers of several runs are
    right, or all wrong, Wilson's of one run stands in: further runs add no images.

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
    _require_level("metric_interval", level)
    scores = _score_together("metric_interval", *runs)
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
    a, b = _read_row("mcnemar", right_a=right_a, right_b=right_b)
    _require_binary("mcnemar", a)
    _require_binary("mcnemar", b)
    only_a, only_b = int(np.count_nonzero(a > b)), int(np.count_nonzero(b > a))
    return McNemar(only_a, only_b, _toss_coins(min(only_a, only_b), only_a + only_b))


def _toss_coins(heads: int, n: int) -> float:
    """``min(1, 2 P(X ≤ heads))`` for X binomial with n trials and probability ½, and heads ≤ n/2."""
    if 2 * heads == n:
        return 1.0
    log_mass = math.lgamma(n + 1) - math.lgamma(heads + 1) - math.lgamma(n - heads + 1) - n * math.log(2)
    k = np.arange(heads, 0, -1)
    smaller = np.cumprod(k / (n - k + 1))  # C(n, k − 1) / C(n, heads)
    return min(1.0, 2 * math.exp(log_mass) * (1 + float(smaller.sum())))


def compare(a: Outcome, b: Outcome, *, level: float = 0.95, draws: int = 2000, seed: int = 0) -> Comparison:
    """Two models on the same images: ``a − b`` in accuracy (points; a is better above 0) or MAE (a is better below 0).

    The interval is a bootstrap over the images of the paired differences. The p-value is McNemar's for a classification
    (:func:`mcnemar`); for a regression it is of a sign-flip test: if neither model is better, each image's difference d
    is as likely to be −d, and ``P = (1 + #{|mean ±d| ≥ |mean d|}) / (1 + draws)`` (Phipson and Smyth, "Permutation
    p-values should never be zero", 2010). This is one run of each model: it says nothing of other seeds.

    If all images of a classification have the same difference, for example none, the bootstrap knows no spread;
    Wilson's bound of a share that was never seen, ``z²/(N + z²)``, is then added on either side.

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
    _require_level("compare", level)
    _require_count("compare", "draws", draws)
    scores_a, scores_b = _score_together("compare", a, b)
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
    random = np.random.default_rng(seed)
    total, rounding = differences.sum(), 1e-12 * np.abs(differences).sum()
    extreme = 0
    for count in _split(draws, len(differences)):
        kept = random.integers(2, size=(count, len(differences)), dtype=np.int8).astype(np.float64)
        flipped = 2 * (kept @ differences) - total
        extreme += int(np.count_nonzero(np.abs(flipped) >= abs(total) - rounding))
    return (1 + extreme) / (1 + draws)


# Quantiles.


def _normal_quantile(level: float) -> float:
    """The z with ``P(|Z| ≤ z) = level``."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _student_quantile(level: float, degrees: int) -> float:
    """The t with ``P(|T| ≤ t) = level``, for a whole number of degrees of freedom.

    With ``φ = atan(t / √ν)`` the probability is a finite sum of positive terms (Abramowitz and Stegun, "Handbook of
    mathematical functions", 26.7.3 and 26.7.4):
    ``sin φ (1 + ½ cos²φ + (1·3)/(2·4) cos⁴φ + …)`` up to ``cos^{ν−2} φ`` for even ν, and
    ``2/π (φ + sin φ cos φ (1 + ⅔ cos²φ + (2·4)/(3·5) cos⁴φ + …))`` up to ``cos^{ν−3} φ`` in the inner sum for odd ν.
    """
    odd, terms = degrees % 2, degrees // 2
    j = np.arange(1, terms)
    ratios = (2 * j - 1 + odd) / (2 * j + odd)
    weights = np.concatenate((np.ones(min(terms, 1)), np.cumprod(ratios)))

    def measure_shortfall(angle: float) -> float:
        series = float(weights @ np.power(math.cos(angle) ** 2, np.arange(terms)))
        if odd:
            return level - 2 / math.pi * (angle + math.sin(angle) * math.cos(angle) * series)
        return level - math.sin(angle) * series

    return math.sqrt(degrees) * math.tan(_bisect(measure_shortfall, 0.0, math.pi / 2))


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is above 0 at ``low`` and not above 0 at ``high`` crosses 0."""
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high


# Checks.


def _find_task(what: str, outcome: Outcome) -> str:
    classes, numbers = "predicted" in outcome, "output" in outcome
    if classes == numbers:
        raise TensorDropoutError(
            f"{what}: an outcome has either 'predicted' (classification) or 'output' (regression), not "
            f"{'both' if classes else 'neither'}; it has {', '.join(map(repr, outcome)) or 'nothing'}"
        )
    return "classification" if classes else "regression"


def _read_classes(what: str, outcome: Outcome, required: tuple[str, ...]) -> dict[str, Array]:
    """The arrays of a classification, (N,) each, checked."""
    found = _read_known(what, outcome, _CLASSES, required)
    rows = _read_row(what, **found)
    found = dict(zip(found, rows, strict=True))
    for name in ("target", "predicted"):
        if (found[name] != np.floor(found[name])).any():
            raise TensorDropoutError(f"{what}: {name} must be numbers of classes; it has fractions")
    if "confidence" in found:
        _require_probabilities(what, found["confidence"])
    return found


def _read_numbers(what: str, outcome: Outcome) -> dict[str, Array]:
    """The arrays of a regression, (N, T) each, checked."""
    if _find_task(what, outcome) != "regression":
        raise TensorDropoutError(f"{what}: the outcome of a regression is expected; this one is of a classification")
    found = _read_known(what, outcome, _NUMBERS, _NUMBERS[:2])
    found = {name: values[:, None] if values.ndim == 1 else values for name, values in found.items()}
    shapes = {name: values.shape for name, values in found.items()}
    if len(set(shapes.values())) > 1 or len(shapes["output"]) != 2:
        raise TensorDropoutError(f"{what}: arrays of one shape (N, T) are expected, not {_list_shapes(shapes)}")
    if "std" in found and (found["std"] < 0).any():
        raise TensorDropoutError(f"{what}: std must be 0 or more; its smallest is {found['std'].min():g}")
    return found


def _read_known(what: str, outcome: Outcome, known: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Array]:
    missing = [name for name in required if name not in outcome]
    if missing:
        raise TensorDropoutError(f"{what}: the outcome lacks {', '.join(missing)}; it has {', '.join(outcome)}")
    return {name: _read_array(what, name, outcome[name]) for name in known if name in outcome}


def _read_row(what: str, **arrays: ArrayLike) -> list[Array]:
    """The arrays, checked: of one shape (N,)."""
    found = {name: _read_array(what, name, values) for name, values in arrays.items()}
    shapes = {name: values.shape for name, values in found.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise TensorDropoutError(f"{what}: one number per row is expected, (N,), not {_list_shapes(shapes)}")
    return list(found.values())


def _read_array(what: str, name: str, values: ArrayLike) -> Array:
    """The values in float64, checked: some, and finite."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TensorDropoutError(f"{what}: {name} must be an array of numbers ({error})") from error
    if array.size == 0:
        raise TensorDropoutError(f"{what}: {name} is empty; nothing was measured")
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise TensorDropoutError(
            f"{what}: {name} has NaN or infinity in {bad} of {array.size} places; no number is given"
        )
    return array


def _require_probabilities(what: str, confidence: Array) -> None:
    if confidence.min() < 0 or confidence.max() > 1 + 1e-6:  # a sum of float32 may round above 1
        raise TensorDropoutError(
            f"{what}: confidence must be a probability; it ranges from {confidence.min():g} to {confidence.max():g}"
        )


def _require_binary(what: str, right: Array) -> None:
    if not np.isin(right, (0, 1)).all():
        raise TensorDropoutError(f"{what}: right or wrong is expected as 1 or 0 for each image")


def _require_level(what: str, level: float) -> None:
    if not 0 < level < 1:
        raise TensorDropoutError(f"{what}: level is a probability between 0 and 1, such as 0.95, not {level!r}")


def _require_count(what: str, name: str, value: int) -> None:
    if not isinstance(value, int | np.integer) or value < 1:
        raise TensorDropoutError(f"{what}: {name} must be a positive whole number, not {value!r}")


def _list_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())
