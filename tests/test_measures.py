"""Numbers, intervals and tests from stored outcomes, against hand-computed cases, scipy, scikit-learn and torch."""

from __future__ import annotations

import ast
import itertools
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from sklearn import metrics

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics import measures
from tensor_dropout.metrics import outcome_arrays as reading
from tensor_dropout.metrics.measures import (
    fit_extra_variance,
    normal_crps,
    reliability,
    risk_coverage,
    score_images,
    split_targets,
    widen,
)
from tensor_dropout.metrics.registry import summarize
from tensor_dropout.robustness.answers import Predicted
from tensor_dropout.robustness.describe import describe_outcome
from tensor_dropout_lab.evaluation import intervals
from tensor_dropout_lab.evaluation.intervals import (
    bootstrap_interval,
    compare,
    difference_interval,
    mcnemar,
    metric_interval,
    proportion_interval,
    seed_interval,
)
from tensor_dropout_lab.training import evaluation


def draw_classes(n=400, classes=5, seed=0, scale=1.5):
    """Probabilities (n, classes) and the outcome that an evaluation would store."""
    random = np.random.default_rng(seed)
    powers = np.exp(scale * random.standard_normal((n, classes)))
    probabilities = powers / powers.sum(1, keepdims=True)
    return probabilities, store_classes(probabilities, random.integers(0, classes, n))


def store_classes(probabilities, target):
    truth = np.eye(probabilities.shape[1])[target]
    return {
        "target": target,
        "predicted": probabilities.argmax(1),
        "confidence": probabilities.max(1),
        "nll": -np.log((probabilities * truth).sum(1)),
        "brier": np.square(probabilities - truth).sum(1),
        "entropy": -(probabilities * np.log(probabilities)).sum(1),
    }


def draw_numbers(n=300, targets=2, seed=0, extra=0.0, low=0.2):
    random = np.random.default_rng(seed)
    output = random.standard_normal((n, targets))
    std = random.uniform(low, 2, (n, targets))
    error = np.sqrt(std**2 + extra) * random.standard_normal((n, targets))
    return {"target": output + error, "output": output, "std": std}


def pick(outcome, rows):
    return {name: np.asarray(values)[rows] for name, values in outcome.items()}


def classes_of(right):
    """An outcome of two classes that is right where ``right`` is 1."""
    return {"target": np.zeros(len(right), int), "predicted": 1 - np.asarray(right)}


# The numbers of an outcome.


@pytest.mark.parametrize("classes", [2, 5])
def test_classification_agrees_with_scikit_learn(classes):
    probabilities, outcome = draw_classes(classes=classes)
    found = summarize(outcome)
    truth = np.eye(classes)[outcome["target"]]
    assert found["accuracy"] == pytest.approx(100 * metrics.accuracy_score(outcome["target"], outcome["predicted"]))
    assert found["nll"] == pytest.approx(metrics.log_loss(outcome["target"], probabilities, labels=range(classes)))
    brier = sum(metrics.brier_score_loss(truth[:, k], probabilities[:, k]) for k in range(classes))
    assert found["brier"] == pytest.approx(brier)


@pytest.mark.parametrize("seed", range(5))
def test_calibration_error_is_the_sum_over_bins(seed):
    confidence = np.r_[np.arange(16) / 15, 1.0, 0.0]  # the edges of the bins
    outcomes = [draw_classes(seed=seed, scale=3 * seed)[1], classes_of(np.arange(18) % 2) | {"confidence": confidence}]
    for outcome in outcomes:
        right, bins = outcome["predicted"] == outcome["target"], np.floor(outcome["confidence"] * 15).clip(max=14)
        gaps = [(bins == b).sum() * abs((right - outcome["confidence"])[bins == b].mean()) for b in np.unique(bins)]
        assert summarize(outcome, ["ece"])["ece"] == pytest.approx(100 * sum(gaps) / len(right), rel=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_a_network_in_training_and_its_evaluation_have_the_same_numbers(seed):
    probabilities, outcome = draw_classes(classes=12, seed=seed, scale=seed + 1)
    logits, target = torch.tensor(np.log(probabilities)), torch.tensor(outcome["target"])
    trained = evaluation.summarize_outputs(evaluation.Outcome(logits, target), "classification")
    predicted = Predicted(logits.softmax(1), None, log_probs=logits.log_softmax(1))
    evaluated = summarize({"target": outcome["target"], **describe_outcome(predicted, target, "classification")})
    assert evaluated == pytest.approx(trained, rel=1e-3)  # Brier scores are stored in 16 bits
    assert (evaluated["accuracy"], evaluated["top5"]) == (trained["accuracy"], trained["top5"])


def test_classification_by_hand():
    outcome = {
        "target": [0, 1, 2, 0],
        "predicted": [0, 1, 1, 1],
        "confidence": [0.95, 0.9, 0.8, 0.5],
        "nll": [0.1, 0.2, 2.0, 1.7],
        "brier": [0.1, 0.2, 1.2, 0.9],
    }
    ece = (abs(0.95 - 1 + 0) + abs(0.9 - 1) + 0.8 + 0.5) / 4  # 0.9 · 15 = 13.5: four bins
    aurc = (0 + 0 + 1 / 3 + 2 / 4) / 4
    expected = {"accuracy": 50, "nll": 1.0, "ece": 100 * ece, "brier": 0.6, "aurc": 100 * aurc}
    assert summarize(outcome) == pytest.approx(expected)


def test_regression_by_hand():
    outcome = {
        "target": [[0.0], [0.0], [0.0], [0.0]],
        "output": [[1.0], [-1.0], [3.0], [0.0]],
        "std": [[1], [2], [1], [1]],
    }
    found = summarize(outcome)
    nll = np.mean([-stats.norm(m, s).logpdf(0) for m, s in ((1, 1), (-1, 2), (3, 1), (0, 1))])
    # z = 0.674, 1.28, 1.64, 1.96; errors in units of the std: 1, 0.5, 3, 0.
    expected = {"mae": 1.25, "rmse": math.sqrt(11 / 4), "nll": nll, "zero_std": 0, "width_95": 2 * 1.959964 * 1.25}
    expected |= {"coverage_50": 50, "coverage_80": 75, "coverage_90": 75, "coverage_95": 75}
    expected |= {"r2": math.nan, "correlation": math.nan}  # the target is constant
    # Three share the smallest std, with the mean error 4/3; then the one with std 2 and error 1.
    expected["aurc"] = (4 / 3 * 3 + 5 / 4) / 4
    assert found == pytest.approx(expected, nan_ok=True)


def test_regression_without_std_and_with_rows_for_columns():
    outcome = {"target": np.array([1.0, 2.0]), "output": np.array([[1.0], [4.0]])}
    expected = {"mae": 1.0, "rmse": math.sqrt(2), "r2": 1 - 4 / 0.5, "correlation": 1.0}
    assert summarize(outcome) == pytest.approx(expected)


def test_coverage_of_a_true_gaussian():
    found = summarize(draw_numbers(n=20000, targets=1))
    for percent in (50, 80, 90, 95):
        assert found[f"coverage_{percent}"] == pytest.approx(percent, abs=1.2)


def test_area_of_several_targets_is_the_mean_of_theirs():
    outcome = draw_numbers(targets=3)
    areas = [summarize({k: v[:, t] for k, v in outcome.items()})["aurc"] for t in range(3)]
    assert summarize(outcome)["aurc"] == pytest.approx(np.mean(areas))


def test_zero_std_is_named_and_never_infinite():
    outcome = {"target": [[0.0], [0.0], [1.0]], "output": [[0.0], [1.0], [2.0]], "std": [[0.0], [0.0], [2.0]]}
    found = summarize(outcome)
    assert math.isnan(found.pop("nll"))
    assert all(math.isfinite(value) for value in found.values())
    assert found["zero_std"] == pytest.approx(200 / 3)
    assert found["coverage_50"] == pytest.approx(200 / 3)  # the exact hit, and 1 < 0.67 · 2
    assert math.isfinite(summarize(widen(outcome, 0.1))["nll"])


def test_std_too_small_for_a_finite_nll():
    assert math.isnan(summarize({"target": [[0.0]], "output": [[1.0]], "std": [[1e-300]]})["nll"])


@pytest.mark.parametrize("draw", [lambda: draw_classes()[1], draw_numbers])
def test_summary_does_not_depend_on_the_order_of_rows(draw):
    outcome = draw()
    coarse = {k: np.round(v, 1) if v.dtype.kind == "f" else v for k, v in outcome.items()}  # with ties
    order = np.random.default_rng(1).permutation(len(outcome["target"]))
    assert summarize(pick(coarse, order)) == pytest.approx(summarize(coarse), rel=1e-12, nan_ok=True)


def test_scores_average_to_the_main_metric():
    _, classes = draw_classes()
    assert score_images(classes).mean() == pytest.approx(summarize(classes)["accuracy"])
    numbers = draw_numbers(targets=3)
    assert score_images(numbers).shape == (300,)
    assert score_images(numbers).mean() == pytest.approx(summarize(numbers)["mae"])


# Calibration and uncertainty.


def test_risk_coverage_without_ties():
    random = np.random.default_rng(0)
    certainty, loss = random.permutation(50) / 50, random.random(50)
    order = np.argsort(-certainty)
    found = risk_coverage(certainty, loss)
    np.testing.assert_allclose(found.coverage, np.arange(1, 51) / 50)
    np.testing.assert_allclose(found.risk, [loss[order[:k]].mean() for k in range(1, 51)])


def test_ties_are_averaged_over_all_orders():
    certainty, loss = np.array([0.9, 0.5, 0.5, 0.5, 0.1, 0.1]), np.array([1.0, 0.0, 1.0, 3.0, 2.0, 5.0])
    curves = []
    for order in itertools.permutations(range(6)):
        order = np.array(order)
        if (np.diff(certainty[order]) <= 0).all():
            curves.append(np.cumsum(loss[order]) / np.arange(1, 7))
    assert len(curves) == math.factorial(3) * math.factorial(2)
    np.testing.assert_allclose(risk_coverage(certainty, loss).risk, np.mean(curves, axis=0))


def test_risk_coverage_is_the_same_to_the_bit_for_every_order_of_rows():
    random = np.random.default_rng(0)
    certainty, loss = random.integers(0, 5, 200) / 7, random.random(200)
    expected = risk_coverage(certainty, loss).risk
    for _ in range(20):
        order = random.permutation(200)
        assert (risk_coverage(certainty[order], loss[order]).risk == expected).all()


def test_risk_of_a_constant_certainty_is_the_mean_loss():
    np.testing.assert_allclose(risk_coverage(np.ones(4), [0, 1, 1, 0]).risk, 0.5)


def test_reliability_against_scikit_learn():
    from sklearn.calibration import calibration_curve

    _, outcome = draw_classes()
    right = outcome["predicted"] == outcome["target"]
    found = reliability(outcome["confidence"], right, bins=10)
    accuracy, confidence = calibration_curve(right, outcome["confidence"], n_bins=10)
    filled = found.examples > 0
    np.testing.assert_allclose(found.accuracy[filled], accuracy)
    np.testing.assert_allclose(found.confidence[filled], confidence)
    assert np.isnan(found.accuracy[~filled]).all()
    assert found.examples.sum() == 400


def test_a_confidence_that_rounded_above_one_is_in_the_last_bin():
    assert reliability([np.float32(1) + np.finfo(np.float32).eps], [1]).examples[-1] == 1


@pytest.mark.parametrize("extra", [0.05, 1.0, 9.0])
def test_extra_variance_is_the_maximum_of_the_likelihood(extra):
    outcome = draw_numbers(extra=extra, targets=1)
    error, variance = outcome["output"] - outcome["target"], outcome["std"] ** 2
    loss = lambda s: -stats.norm.logpdf(error, scale=np.sqrt(variance + s)).sum()  # noqa: E731
    best = optimize.minimize_scalar(loss, bounds=(0, 50), method="bounded", options={"xatol": 1e-10})
    found = fit_extra_variance(outcome)
    assert loss(found) <= best.fun + 1e-9
    assert found == pytest.approx(best.x, rel=1e-4, abs=1e-6)


def test_extra_variance_recovers_what_was_added():
    assert fit_extra_variance(draw_numbers(n=20000, extra=2.0)).tolist() == pytest.approx([2.0, 2.0], rel=0.05)


def test_extra_variance_with_a_constant_std_and_without_one():
    error = np.random.default_rng(0).standard_normal((100, 1))
    mse = np.square(error).mean()
    outcome = {"target": error, "output": np.zeros((100, 1))}
    assert fit_extra_variance(outcome) == pytest.approx(mse, rel=1e-12)
    assert fit_extra_variance(outcome | {"std": np.full((100, 1), 0.3)}) == pytest.approx(mse - 0.09, rel=1e-12)
    assert fit_extra_variance(outcome | {"std": np.full((100, 1), 9.0)}) == 0.0


def test_every_target_has_its_own_extra_variance():
    """Years beside cubic millimetres: one variance for both would be that of the volumes."""
    units = np.array([1.0, 1e5])
    outcome = {name: values * units for name, values in draw_numbers(n=5000, extra=2.0).items()}
    fitted = fit_extra_variance(outcome)
    years, volumes = split_targets(outcome)
    assert fitted.tolist() == [fit_extra_variance(years), fit_extra_variance(volumes)]
    assert fitted == pytest.approx(2.0 * units**2, rel=0.1)
    wide = [summarize(each) for each in split_targets(widen(outcome, fitted))]
    assert [each["coverage_95"] for each in wide] == pytest.approx([95, 95], abs=1.5)
    assert wide[1]["width_95"] / wide[0]["width_95"] == pytest.approx(1e5, rel=0.1)


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e6])
def test_extra_variance_has_the_unit_of_the_target(unit):
    outcome = draw_numbers(extra=1.0)
    scaled = {name: unit * values for name, values in outcome.items()}
    assert fit_extra_variance(scaled) == pytest.approx(unit**2 * fit_extra_variance(outcome), rel=1e-9)


@pytest.mark.parametrize(("many", "expected"), [(3, 1.0), (100, 1e-8)])
def test_the_higher_of_two_maxima_is_found(many, expected):
    # One crowd says s² ≈ 1e-8, the other s² ≈ 1.
    variance = np.r_[np.zeros(many), np.full(10, 1e-2)]
    error = np.sqrt(np.r_[np.full(many, 1e-8), np.ones(10)])
    found = fit_extra_variance({"target": error, "output": 0 * error, "std": np.sqrt(variance)})
    grid = np.geomspace(1e-12, 10, 20001)
    scores = [-(np.log(variance + s) + error**2 / (variance + s)).sum() for s in grid]
    slopes = np.diff(scores)
    assert np.count_nonzero((slopes[:-1] > 0) & (slopes[1:] <= 0)) == 2
    assert found == pytest.approx(grid[np.argmax(scores)], rel=0.01)
    assert found == pytest.approx(expected, rel=0.5)


def test_extra_variance_of_degenerate_outcomes():
    exact = {"target": np.zeros((3, 1)), "output": np.zeros((3, 1)), "std": np.zeros((3, 1))}
    assert fit_extra_variance(exact) == 0.0
    # Hit exactly with σ = 0: s² = 0 would be infinitely likely; the others decide.
    some = {"target": [0.0, 0.0, 0.0], "output": [0.0, 2.0, -2.0], "std": [0.0, 1.0, 1.0]}
    assert fit_extra_variance(some) == pytest.approx(3.0)
    # σ = 0 and a miss: bounded, and the exact hit counts.
    missed = {"target": [0.0, 0.0], "output": [0.0, 2.0], "std": [0.0, 0.0]}
    assert fit_extra_variance(missed) == pytest.approx(2.0)


def test_widened_intervals_cover_new_examples():
    fitted = fit_extra_variance(draw_numbers(n=5000, extra=2.0, seed=1))
    test = draw_numbers(n=5000, extra=2.0, seed=2)
    wide = widen(test, fitted)
    np.testing.assert_allclose(wide["std"], np.sqrt(test["std"] ** 2 + fitted))
    assert summarize(test)["coverage_95"] < 85
    assert summarize(wide)["coverage_95"] == pytest.approx(95, abs=1)
    assert summarize(wide)["nll"] < summarize(test)["nll"]
    assert "std" in test
    assert widen({"target": [1.0], "output": [1.0]}, 4.0)["std"].tolist() == [[2.0]]


@pytest.mark.parametrize(("output", "std", "target"), [(0, 1, 0), (1.5, 0.3, 1), (-2, 4, 3), (70, 0.5, 73), (0, 2, -9)])
def test_crps_is_the_integral_of_its_definition(output, std, target):
    def misfit(t):
        return (stats.norm(output, std).cdf(t) - (t >= target)) ** 2

    low, high = min(output, target) - 12 * std, max(output, target) + 12 * std
    expected = integrate.quad(misfit, low, high, points=[target], limit=200)[0]
    assert normal_crps([output], [std], [target]) == pytest.approx(expected, rel=1e-7)


def test_crps_is_the_distance_to_the_target_less_half_that_of_two_draws():
    """E|Y' − y| − ½ E|Y' − Y''|, averaged over rows and targets."""
    outcome, random = draw_numbers(n=40, targets=3), np.random.default_rng(5)
    draws = outcome["output"] + outcome["std"] * random.standard_normal((20000, 40, 3))
    apart = np.abs(draws[:10000] - draws[10000:]).mean(0)
    expected = (np.abs(draws - outcome["target"]).mean(0) - apart / 2).mean()
    found = normal_crps(outcome["output"], outcome["std"], outcome["target"])
    assert found == pytest.approx(expected, rel=2e-3)
    each = [normal_crps(*(outcome[name][:, t] for name in ("output", "std", "target"))) for t in range(3)]
    assert found == pytest.approx(np.mean(each), rel=1e-12)


@pytest.mark.parametrize("std", [0.0, 5e-324, 1e-200, 1e-12])
def test_crps_of_a_sure_prediction_is_the_absolute_error(std):
    with np.errstate(all="raise", under="ignore"):
        assert normal_crps([1.0, -2.0, 3.0, 1e300], [std] * 4, [4.0, -2.5, 3.0, 1e300]) == pytest.approx(3.5 / 4)
    assert normal_crps([[1.0, 5.0]], [[0.0, 1.0]], [[3.0, 5.0]]) == pytest.approx((2 + normal_crps([0], [1], [0])) / 2)


def test_crps_is_lowest_for_the_true_std_and_has_the_unit_of_the_target():
    outcome = draw_numbers(n=20000, targets=1)
    scores = [normal_crps(outcome["output"], scale * outcome["std"], outcome["target"]) for scale in (0.7, 1.0, 1.4)]
    assert scores[1] == min(scores)
    scaled = normal_crps(*(7 * outcome[name] for name in ("output", "std", "target")))
    assert scaled == pytest.approx(7 * scores[1], rel=1e-12)


# Intervals.


def test_bootstrap_covers_the_mean_of_gaussians():
    random = np.random.default_rng(0)
    hits = 0
    for trial in range(600):
        low, high = bootstrap_interval(random.standard_normal(50), draws=400, seed=trial)
        hits += low <= 0 <= high
    assert 0.91 <= hits / 600 <= 0.98


def test_bootstrap_of_a_mean_agrees_with_scipy():
    values = np.random.default_rng(0).exponential(size=200)
    expected = stats.bootstrap((values,), np.mean, n_resamples=20000, method="percentile", rng=1).confidence_interval
    assert bootstrap_interval(values, draws=20000) == pytest.approx(tuple(expected), abs=0.005)


def test_bootstrap_with_another_statistic_and_level():
    values = np.random.default_rng(0).standard_normal(500)
    narrow = bootstrap_interval(values, statistic=np.median, level=0.5)
    wide = bootstrap_interval(values, statistic=np.median, level=0.99)
    assert wide.low < narrow.low < np.median(values) < narrow.high < wide.high


def test_runs_are_resampled_as_well_as_images():
    random = np.random.default_rng(0)
    runs = random.standard_normal((20, 1)) + 0.1 * random.standard_normal((20, 400))
    low, high = bootstrap_interval(runs)
    expected = bootstrap_interval(runs.mean(1))  # the spread between the runs is all that matters here
    assert (low, high) == pytest.approx(expected, abs=0.03)
    images = np.tile(random.standard_normal(400), (20, 1))
    assert bootstrap_interval(images) == pytest.approx(bootstrap_interval(images[0]), abs=0.01)


def test_both_levels_against_a_plain_loop():
    table = np.random.default_rng(0).standard_normal((3, 30)) + np.array([[0.0], [1.0], [3.0]])
    random = np.random.default_rng(1)
    means = [table[np.ix_(random.integers(3, size=3), random.integers(30, size=30))].mean() for _ in range(20000)]
    assert bootstrap_interval(table, draws=20000) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=0.03)


def test_one_run_is_the_same_as_none_named():
    values = np.random.default_rng(0).random(70)
    assert bootstrap_interval(values) == bootstrap_interval(values[None])


def test_the_chunks_do_not_change_the_interval(monkeypatch):
    values = np.random.default_rng(0).random((2, 33))
    whole = bootstrap_interval(values, draws=200)
    assert bootstrap_interval(values, draws=200, seed=1) != whole
    monkeypatch.setattr(intervals, "_CELLS", 100)
    assert bootstrap_interval(values, draws=200) == pytest.approx(whole, rel=1e-12)


def test_a_large_bootstrap_is_light():
    import time
    import tracemalloc

    values = np.random.default_rng(0).random((5, 10_000)) < 0.7
    tracemalloc.start()
    started = time.perf_counter()
    bootstrap_interval(values)
    spent, peak = time.perf_counter() - started, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200e6
    assert spent < 10


@pytest.mark.parametrize(("successes", "n"), [(0, 1), (0, 10), (10, 10), (3, 17), (9876, 10000)])
@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_the_ends_of_wilsons_interval_are_where_the_score_test_rejects(successes, n, level):
    z, share = stats.norm.isf((1 - level) / 2), successes / n
    ends = np.array(proportion_interval(successes, n, level))
    assert 0 <= ends[0] <= share <= ends[1] <= 1
    assert (share - ends) ** 2 == pytest.approx(z**2 * ends * (1 - ends) / n, abs=1e-12)  # the score test at its limit


@pytest.mark.parametrize("n", [2, 3, 5, 20])
def test_seed_interval_agrees_with_scipy(n):
    values = np.random.default_rng(n).standard_normal(n)
    expected = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert seed_interval(values) == pytest.approx((expected.low, expected.high), abs=1e-6)


@pytest.mark.parametrize(("n", "m"), [(3, 3), (2, 5), (4, 2)])
def test_difference_interval_agrees_with_scipy(n, m):
    random = np.random.default_rng(n)
    a, b = random.standard_normal(n) + 1, random.standard_normal(m)
    expected = stats.ttest_ind(a, b).confidence_interval(0.95)
    assert difference_interval(a, b) == pytest.approx((expected.low, expected.high), abs=1e-6)


def test_a_single_run_is_compared_by_the_spread_of_the_others():
    a, b = [71.3], [71.6, 72.0, 71.9]
    half = stats.t.ppf(0.975, 2) * np.std(b, ddof=1) * np.sqrt(1 + 1 / 3)
    middle = a[0] - np.mean(b)
    assert difference_interval(a, b) == pytest.approx((middle - half, middle + half), abs=1e-6)
    with pytest.raises(TensorDropoutError, match="needs three of them in all; there are two"):
        difference_interval([1.0], [2.0])


def test_equal_seeds_have_no_spread():
    assert seed_interval([90.0, 90.0, 90.0]) == (90.0, 90.0)


def test_accuracy_of_one_run_is_wilsons():
    right = np.r_[np.ones(70, int), np.zeros(30, int)]
    expected = [100 * end for end in proportion_interval(70, 100)]
    assert metric_interval(classes_of(right)) == pytest.approx(expected)


def test_several_runs_are_bootstrapped_unless_nothing_varies():
    random = np.random.default_rng(0)
    rights = (random.random((3, 100)) < 0.8).astype(int)
    runs = [classes_of(right) for right in rights]
    assert metric_interval(*runs) == bootstrap_interval(100.0 * rights)
    perfect = classes_of(np.ones(100, int))
    assert metric_interval(perfect, perfect) == metric_interval(perfect)
    assert metric_interval(perfect).low < 97


def test_interval_of_a_regression():
    outcome = draw_numbers()
    assert metric_interval(outcome) == bootstrap_interval(score_images(outcome))


def test_one_image_of_a_regression_has_no_interval():
    one = draw_numbers(n=1)
    for interval in (
        metric_interval(one),
        metric_interval(one, one),
        compare(one, one)[1:3],
        bootstrap_interval([3.0]),
    ):
        assert all(math.isnan(end) for end in interval)
    assert metric_interval(classes_of([1])).low > 0  # Wilson's needs no more than one


# Two models on the same images.


@pytest.mark.parametrize(
    ("only_a", "only_b"), [(0, 0), (1, 0), (0, 7), (5, 5), (6, 5), (30, 12), (1000, 900), (40000, 0)]
)
def test_mcnemar_counts_coin_tosses(only_a, only_b):
    a = np.r_[np.ones(only_a), np.zeros(only_b), np.ones(20), np.zeros(10)]
    b = np.r_[np.zeros(only_a), np.ones(only_b), np.ones(20), np.zeros(10)]
    found = mcnemar(a, b)
    assert found[:2] == (only_a, only_b)
    tosses = only_a + only_b
    as_extreme = 2 * sum(math.comb(tosses, heads) for heads in range(min(only_a, only_b) + 1))
    assert found.p_value == pytest.approx(min(1.0, as_extreme / 2**tosses), rel=1e-9)
    assert mcnemar(b, a) == (only_b, only_a, found.p_value)


def test_comparison_of_two_classifications():
    random = np.random.default_rng(0)
    a = (random.random(2000) < 0.8).astype(int)
    b = np.where(random.random(2000) < 0.9, a, 1 - a)
    found = compare(classes_of(a), classes_of(b))
    assert found.difference == pytest.approx(100 * (a.mean() - b.mean()))
    assert found.low < found.difference < found.high
    assert (found.only_a, found.only_b, found.p_value) == mcnemar(a, b)
    half = 1.96 * 100 * (a - b).std() / math.sqrt(2000)
    assert (found.low, found.high) == pytest.approx((found.difference - half, found.difference + half), abs=0.15)
    unpaired = 1.96 * 100 * math.sqrt((a.var() + b.var()) / 2000)
    assert half < 0.7 * unpaired  # what pairing is for
    swapped = compare(classes_of(b), classes_of(a))
    assert (swapped.difference, swapped.low, swapped.high) == pytest.approx(
        (-found.difference, -found.high, -found.low)
    )


def test_two_equal_classifications_are_not_known_to_be_equal_elsewhere():
    right = np.r_[np.ones(90, int), np.zeros(10, int)]
    found = compare(classes_of(right), classes_of(right))
    margin = 100 * proportion_interval(0, 100).high
    assert found == (0.0, -margin, margin, 1.0, 0, 0)
    opposite = compare(classes_of(np.ones(20, int)), classes_of(np.zeros(20, int)))
    assert opposite.difference == opposite.high == 100
    assert 70 < opposite.low < 100


def test_comparison_of_two_regressions():
    a = draw_numbers(n=200, targets=1)
    random = np.random.default_rng(3)
    b = a | {"output": a["output"] + 0.3 * random.standard_normal((200, 1))}
    found = compare(a, b)
    assert found.difference == pytest.approx(summarize(a)["mae"] - summarize(b)["mae"])
    assert found.low < found.difference < found.high
    assert found.only_a is found.only_b is None
    expected = stats.permutation_test(
        (score_images(a), score_images(b)),
        lambda x, y, axis: (x - y).mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=20000,
        rng=0,
    )
    assert compare(a, b, draws=20000).p_value == pytest.approx(expected.pvalue, abs=0.015)
    assert compare(a, a) == (0.0, 0.0, 0.0, 1.0, None, None)
    better = compare(a, a | {"output": a["output"] + 50})
    assert better.difference < better.high < 0
    assert better.p_value == pytest.approx(1 / 2001)


def test_sign_flips_against_all_of_them():
    differences = np.array([0.5, 1.0, -0.2, 2.0, 0.7, 0.1])
    totals = [np.dot(signs, differences) for signs in itertools.product((-1, 1), repeat=6)]
    expected = np.mean(np.abs(totals) >= differences.sum() - 1e-9)
    assert intervals._flip_signs(differences, 40000, 0) == pytest.approx(expected, abs=0.01)


def test_p_values_are_small_as_often_as_they_should_be():
    random = np.random.default_rng(0)
    found = [intervals._flip_signs(random.standard_normal(30), 199, seed) for seed in range(1000)]
    assert np.mean(np.array(found) <= 0.05) == pytest.approx(0.05, abs=0.02)


def test_results_depend_on_the_seed_alone():
    a, b = draw_numbers(n=50), draw_numbers(n=50)
    b["output"] = b["output"] + 0.1
    assert compare(a, b, seed=4) == compare(a, b, seed=4)
    state = np.random.get_state()[1].copy()
    compare(a, b)
    assert (np.random.get_state()[1] == state).all()


# Bad input.

CLASSES = draw_classes(n=6)[1]
NUMBERS = draw_numbers(n=6)


def spoil(outcome, name, value):
    spoiled = {key: np.array(values, dtype=float) for key, values in outcome.items()}
    spoiled[name].flat[2] = value
    return spoiled


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["target", "predicted", "confidence", "nll", "brier", "entropy"])
def test_no_number_from_a_classification_that_is_not_finite(name, value):
    bad = spoil(CLASSES, name, value)
    for function in (summarize, score_images, metric_interval, lambda o: compare(o, o)):
        with pytest.raises(TensorDropoutError, match=f"{name} has NaN or infinity in 1 of 6 places"):
            function(bad)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["target", "output", "std"])
def test_no_number_from_a_regression_that_is_not_finite(name, value):
    bad = spoil(NUMBERS, name, value)
    for function in (summarize, score_images, metric_interval, fit_extra_variance, lambda o: widen(o, 1.0)):
        with pytest.raises(TensorDropoutError, match=f"{name} has NaN or infinity in 1 of 12 places"):
            function(bad)


@pytest.mark.parametrize("outcome", [CLASSES, NUMBERS])
def test_empty_outcomes_are_refused(outcome):
    empty = pick(outcome, slice(0))
    for function in (summarize, score_images, metric_interval, lambda o: compare(o, o)):
        with pytest.raises(TensorDropoutError, match="target is empty"):
            function(empty)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summarize({}), "not neither; it has nothing"),
        (lambda: summarize(CLASSES | NUMBERS), "not both"),
        (lambda: summarize({"target": [0], "predicted": [0]}, ["ece"]), "ece needs confidence; the outcome has target"),
        (lambda: summarize({"target": [0], "predicted": [0]}, ["mae"]), "no metric 'mae'; known are accuracy, top5"),
        (lambda: summarize({"output": [0.0]}), "lacks target"),
        (lambda: summarize(CLASSES | {"nll": np.zeros(5)}), r"one number per row.*nll \(5,\)"),
        (lambda: summarize(CLASSES | {"confidence": np.full(6, 1.2)}), "confidence must be a probability"),
        (lambda: summarize(CLASSES | {"predicted": np.full(6, 0.5)}), "predicted must be numbers of classes"),
        (lambda: summarize(NUMBERS | {"target": np.zeros((6, 3))}), r"one shape \(N, T\).*target \(6, 3\)"),
        (lambda: summarize(NUMBERS | {"target": np.zeros(6)}), r"one shape \(N, T\).*target \(6, 1\)"),
        (lambda: summarize(spoil(NUMBERS, "std", -1.0)), "std must be 0 or more"),
        (lambda: summarize(CLASSES | {"nll": ["a"] * 6}), "nll must be an array of numbers"),
        (lambda: fit_extra_variance(CLASSES), "of a regression is expected"),
        (lambda: widen(CLASSES, 1.0), "of a regression is expected"),
        (lambda: widen(NUMBERS, -1.0), "extra is a variance"),
        (lambda: widen(NUMBERS, math.nan), "extra is a variance"),
        (lambda: widen(NUMBERS, np.ones(7)), "one for each of the"),
        (lambda: normal_crps([0.0], [-1.0], [0.0]), "normal_crps: std must be 0 or more"),
        (lambda: normal_crps([0.0], [1.0, 1.0], [0.0]), r"normal_crps: .*one shape \(N, T\).*std \(2, 1\)"),
        (lambda: normal_crps([0.0], [1.0], [math.nan]), "normal_crps: target has NaN"),
        (lambda: normal_crps([], [], []), "normal_crps: target is empty"),
        (lambda: risk_coverage([], []), "certainty is empty"),
        (lambda: risk_coverage([1.0], [1.0, 2.0]), "one number per row"),
        (lambda: risk_coverage([math.nan], [1.0]), "certainty has NaN"),
        (lambda: reliability([0.5], [0.5]), "1 or 0"),
        (lambda: reliability([0.5], [1], bins=0), "bins must be a positive whole number"),
        (lambda: bootstrap_interval([]), "values is empty"),
        (lambda: bootstrap_interval(np.zeros((2, 2, 2))), r"\(images,\) or \(runs, images\)"),
        (lambda: bootstrap_interval([1.0, math.nan]), "values has NaN"),
        (lambda: bootstrap_interval([1.0], draws=0), "draws must be a positive"),
        (lambda: bootstrap_interval([1.0], level=95), "level is a probability"),
        (lambda: bootstrap_interval([1.0, 2.0], statistic=lambda v, axis: v), "must turn"),
        (lambda: proportion_interval(3, 2), "between 0 and n=2"),
        (lambda: proportion_interval(0, 0), "n must be a positive"),
        (lambda: seed_interval([1.0]), "needs two of them"),
        (lambda: seed_interval([1.0, 2.0], level=1.0), "level is a probability"),
        (lambda: metric_interval(), "there is none"),
        (lambda: mcnemar([1, 0], [1]), "one number per row"),
        (lambda: mcnemar([2], [1]), "1 or 0"),
        (lambda: compare(CLASSES, NUMBERS), "one outcome is of a classification, another of a regression"),
        (lambda: compare(CLASSES, pick(CLASSES, slice(5))), "not of the same images"),
        (lambda: compare(NUMBERS, pick(NUMBERS, slice(None, None, -1))), "not of the same images"),
        (lambda: metric_interval(CLASSES, CLASSES | {"target": 1 + CLASSES["target"]}), "not of the same images"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(TensorDropoutError, match=message):
        call()


@pytest.mark.parametrize(("module", "left"), [(reading, []), (measures, [reading]), (intervals, [reading, measures])])
def test_they_import_numpy_scipy_and_the_standard_library_only(module, left):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    named = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    named |= {str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    foreign = {name for name in named if name.split(".")[0] not in {*sys.stdlib_module_names, "numpy"}}
    if module is intervals:  # of the laboratory
        foreign.remove("scipy.stats")
    assert foreign == {"tensor_dropout.errors", *(other.__name__ for other in left)}
