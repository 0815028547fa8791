"""Calibration, uncertainty and scores of single images from a stored outcome.

The metrics themselves: :mod:`tensor_dropout.metrics.registry`. What an outcome is, and when it is refused:
:mod:`tensor_dropout.metrics.outcome_arrays`. Only numpy and the standard library: the report imports this file.
Everything is computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import (
    Array,
    Outcome,
    find_task,
    read_classes,
    read_numbers,
    read_row,
    require_binary,
    require_count,
    require_probabilities,
)

BINS = 15

_erf = np.vectorize(math.erf, otypes=[np.float64])


class RiskCoverage(NamedTuple):
    """``risk[k]``: the mean loss of the most certain examples that make up the share ``coverage[k]``."""

    coverage: Array
    risk: Array


class Reliability(NamedTuple):
    """Per bin of the confidence: its mean, the accuracy (both NaN in an empty bin), and the number of examples."""

    confidence: Array
    accuracy: Array
    examples: Array


# Targets and images one by one.


def split_targets(outcome: Outcome) -> list[dict[str, Array]]:
    """The outcome of a regression target by target: T outcomes of (N, 1).

    Example:
        >>> [each["output"].tolist() for each in split_targets({"target": [[1.0, 9.0]], "output": [[2.0, 8.0]]})]
        [[[2.0]], [[8.0]]]
    """
    return _split(read_numbers("split_targets", outcome))


def _split(found: dict[str, Array]) -> list[dict[str, Array]]:
    return [{name: values[:, t : t + 1] for name, values in found.items()} for t in range(found["output"].shape[1])]


def score_images(outcome: Outcome) -> Array:
    """The main metric image by image, (N,): 100 or 0 for right or wrong, or the mean absolute error over the T targets.

    Its mean is the accuracy in percent, or the MAE. Differences of two models over several runs, for example, go to
    a bootstrap over runs and rows as (runs, N).

    Example:
        >>> score_images({"target": [0, 1], "predicted": [0, 0]}).tolist()
        [100.0, 0.0]
    """
    return _score("score_images", outcome)[0]


def _score(what: str, outcome: Outcome) -> tuple[Array, Array]:
    """The main metric of each image, and its target."""
    if find_task(what, outcome) == "classification":
        found = read_classes(what, outcome)
        return 100.0 * (found["predicted"] == found["target"]), found["target"]
    found = read_numbers(what, outcome)
    return np.abs(found["output"] - found["target"]).mean(axis=1), found["target"]


def score_together(what: str, *outcomes: Outcome) -> Array:
    """The main metric of each image for outcomes on the same images: (outcomes, N)."""
    if len({find_task(what, outcome) for outcome in outcomes}) > 1:
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
    certainty, loss = read_row("risk_coverage", certainty=certainty, loss=loss)
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
    modern neural networks", 2017).

    Args:
        confidence: (N,) in [0, 1].
        right: (N,) of 0 and 1.
        bins: their number.

    Example:
        >>> reliability([0.6, 0.8, 1.0], [0, 1, 1], bins=2).accuracy.round(3).tolist()
        [nan, 0.667]
    """
    confidence, right = read_row("reliability", confidence=confidence, right=right)
    require_probabilities("reliability", confidence)
    require_binary("reliability", right)
    require_count("reliability", "bins", bins)
    bin_of = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    examples = np.bincount(bin_of, minlength=bins)
    divisor = np.where(examples > 0, examples, np.nan)
    means = [np.bincount(bin_of, weights=values, minlength=bins) / divisor for values in (confidence, right)]
    return Reliability(means[0], means[1], examples)


def fit_extra_variance(outcome: Outcome) -> float | Array:
    """The variance ``s²`` that the standard deviations of a regression leave out, by maximum likelihood.

    ``s² = argmax_{s² ≥ 0} Σ log N(y; f, σ² + s²)``: the masks' σ says how unsure the weights are, and not how far the
    targets scatter around the best answer. Fit it on a validation outcome and :func:`widen` a test outcome by it.
    Without ``std``, σ is 0 and ``s²`` the mean squared error: the same treatment for a model without uncertainty.

    The likelihood may have several maxima; each is bracketed between the points of a logarithmic grid and bisected, and
    the highest wins. Errors and standard deviations below 1e-15 of the largest error count as 0. If every example with
    σ = 0 is hit exactly, ``s² = 0`` would be infinitely likely whatever the others say; such examples are left out.

    Args:
        outcome: of a regression.

    Returns:
        ``s²``; of several targets one each, (T,).

    Example:
        >>> round(fit_extra_variance({"target": [[0.0], [0.0]], "output": [[2.0], [-2.0]], "std": [[1.0], [1.0]]}), 6)
        3.0
    """
    fitted = [_fit_extra(found) for found in _split(read_numbers("fit_extra_variance", outcome))]
    return fitted[0] if len(fitted) == 1 else np.array(fitted)


def _fit_extra(found: dict[str, Array]) -> float:
    """Of one target."""
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


def widen(outcome: Outcome, extra: float | Array) -> dict[str, Array]:
    """The outcome of a regression with ``std = √(σ² + s²)``; σ is 0 where the outcome has no ``std``.

    Args:
        outcome: of a regression.
        extra: ``s²``, from :func:`fit_extra_variance` on other examples: one, or one for each target, (T,).

    Example:
        >>> widen({"target": [[0.0]], "output": [[1.0]], "std": [[3.0]]}, 16.0)["std"].tolist()
        [[5.0]]
    """
    found = read_numbers("widen", outcome)
    variance, targets = np.asarray(extra, dtype=np.float64), found["output"].shape[1]
    if not (np.isfinite(variance).all() and (variance >= 0).all()):
        raise TensorDropoutError(f"widen: extra is a variance, a finite number of 0 or more, not {extra!r}")
    if variance.shape not in ((), (targets,)):
        raise TensorDropoutError(
            f"widen: extra is one number, or one for each of the {targets} targets, not an array of {variance.shape}"
        )
    std = found.get("std", np.zeros_like(found["output"]))
    return {**found, "std": np.hypot(std, np.sqrt(variance))}


def normal_crps(output: ArrayLike, std: ArrayLike, target: ArrayLike) -> float:
    """The mean continuous ranked probability score of normal predictions, in the unit of the target; 0 is perfect.

    ``CRPS = ∫ (F(t) − 1[t ≥ y])² dt = σ (z (2Φ(z) − 1) + 2φ(z) − 1/√π)`` with ``z = (y − f)/σ`` and F the distribution
    of N(f, σ²) (Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", 2007). For σ = 0 it
    is the absolute error.

    Args:
        output: (N,) or (N, T), the means f.
        std: of the same shape, σ, 0 or more.
        target: of the same shape, y.

    Raises:
        TensorDropoutError: if the shapes differ, a number is not finite, or a std is negative.

    Example:
        >>> round(normal_crps([0.0, 3.0], [1.0, 0.0], [0.0, 1.0]), 4)
        1.1168
    """
    found = read_numbers("normal_crps", {"target": target, "output": output, "std": std})
    error, std = np.abs(found["target"] - found["output"]), found["std"]
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        z = np.where(std > 0, error / std, math.inf)
        inside = _erf(z / math.sqrt(2))  # 2Φ(z) − 1
        density = np.exp(-np.square(z) / 2) / math.sqrt(2 * math.pi)
    return float((error * inside + std * (2 * density - 1 / math.sqrt(math.pi))).mean())


# Quantiles and roots.


def normal_quantile(level: float) -> float:
    """The z with ``P(|Z| ≤ z) = level``."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _bisect(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function that is above 0 at ``low`` and not above 0 at ``high`` crosses 0.

    Written here because the library does not depend on SciPy.
    """
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if function(middle) > 0 else (low, middle)
    return high
