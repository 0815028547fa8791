"""Held-out errors: distances, intervals over groups, and which sentence they allow."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tensor_dropout_lab.evaluation.held_out import (
    BASELINE,
    Measure,
    judge,
    mean_distances,
    measure_classes,
    measure_numbers,
    predict_by_fold,
    summarize,
    write_table,
)
from tensor_dropout_lab.evaluation.intervals import group_interval

RANDOM = np.random.default_rng(0)
GROUPS = np.repeat(np.arange(20), 3)
NOISE = RANDOM.normal(size=60)


def make_measure(tensor: float, flattened: float, baseline: float = 9.0) -> Measure:
    """Errors that vary from image to image alike, and a little by method."""
    means = {"cp": tensor, "flattened ridge": flattened, "pooled ridge": 5.0, BASELINE: baseline}
    return Measure("mean distance", "% of the image side", {
        method: mean + NOISE + 0.1 * RANDOM.normal(size=60) for method, mean in means.items()
    })  # fmt: skip


@pytest.mark.parametrize(
    ("tensor", "flattened", "parts", "beyond"),
    [
        (2.0, 3.0, ("Tensor regression (CP) won against flattened ridge", "leaves out 0"), True),
        (3.0, 2.0, ("Flattened ridge won against tensor regression (CP)", "leaves out 0"), True),
        (6.0, 7.0, ("Pooled ridge won against tensor regression (CP)",), True),
        (2.0, 2.0, ("No winner", "includes 0"), False),
        (9.0, 9.0, ("Pooled ridge won",), True),
    ],
)
def test_the_verdict_names_who_won(tensor, flattened, parts, beyond):
    verdict = judge(make_measure(tensor, flattened), GROUPS)
    assert all(part in verdict.text for part in parts), verdict.text
    assert verdict.beyond_chance == beyond
    assert verdict.low <= verdict.difference <= verdict.high
    assert "predicting the mean" not in verdict.text
    assert "\n" not in verdict.text


def test_the_verdict_says_where_nothing_is_better_than_the_mean():
    verdict = judge(make_measure(5.0, 6.0, baseline=4.8), GROUPS)
    assert "Neither is shown to be better than predicting the mean" in verdict.text


def test_without_ridge_the_mean_is_the_rival():
    measure = make_measure(2.0, 3.0)
    del measure.values["flattened ridge"], measure.values["pooled ridge"]
    assert "won against predicting the mean" in judge(measure, GROUPS).text


def test_the_interval_of_a_difference_is_of_pairs():
    """All methods share the noise of an image: the difference is far surer than the means are."""
    measure = make_measure(2.0, 2.2)
    verdict = judge(measure, GROUPS)
    low, high = measure.interval("cp", GROUPS, 0)
    assert verdict.high - verdict.low < (high - low) / 3
    differences = measure.values["cp"] - measure.values["flattened ridge"]
    assert verdict.difference == pytest.approx(differences.mean())


def test_groups_widen_an_interval():
    values = np.repeat(RANDOM.normal(size=20), 3)  # three images of a group are equal
    alone, together = (group_interval(values, groups) for groups in (np.arange(60), GROUPS))
    assert together.high - together.low > 1.4 * (alone.high - alone.low)


def test_an_interval_over_groups_counts_images_not_groups():
    values, groups = np.array([0.0, 0.0, 0.0, 4.0, math.nan]), np.array([0, 0, 0, 1, 1])
    low, high = group_interval(values, groups)
    assert (low, high) == (0.0, 4.0)
    drawn = np.random.default_rng(0).integers(2, size=(4000, 2))
    means = [np.concatenate([values[:4][groups[:4] == g] for g in row]).mean() for row in drawn]
    assert group_interval(values, groups, level=0.6) == pytest.approx(tuple(np.quantile(means, (0.2, 0.8))))
    assert all(map(math.isnan, group_interval([math.nan], [0])))


def test_distances_leave_out_what_is_missing():
    true = np.array([[0.0, 0.0, 0.5, 0.5], [0.0, 0.0, math.nan, math.nan], [math.nan] * 4])
    predicted = np.tile([0.3, 0.4, 0.5, 0.6], (3, 1))
    np.testing.assert_allclose(mean_distances(predicted, true, [(0, 1), (2, 3)]), [0.3, 0.5, math.nan])
    sizes = np.array([[10, 100]] * 3)
    expected = [(np.hypot(3, 40) + 10) / 2, np.hypot(3, 40), math.nan]
    np.testing.assert_allclose(mean_distances(predicted, true, [(0, 1), (2, 3)], sizes), expected)


def test_points_and_numbers_have_their_measures():
    true = np.array([[0.0, 0.0, 30.0], [0.5, 0.5, math.nan]])
    predictions = {"cp": np.array([[0.3, 0.4, 31.0], [0.5, 0.5, 4.0]]), BASELINE: np.tile([0.25, 0.25, 30.0], (2, 1))}
    sizes = np.array([[100, 50]] * 2)
    measures = measure_numbers(predictions, true, ["x", "y", "age"], [(0, 1)], sizes)
    assert [measure.unit for measure in measures] == ["% of the image side", "pixels of the image", "age"]
    assert [measure.mean("cp") for measure in measures] == pytest.approx([25.0, np.hypot(30, 20) / 2, 1.0])
    lines = write_table(summarize(measures, np.arange(2)))
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert lines[3].startswith("| predicting the mean")


def test_the_accuracy_of_all_right_answers_has_an_interval():
    probabilities = {"cp": np.eye(2)[[0, 1, 0, 1]], BASELINE: np.full((4, 2), 0.5)}
    (measure,) = measure_classes(probabilities, np.array([0, 1, 0, 1]))
    assert measure.mean("cp") == 100
    low, high = measure.interval("cp", np.arange(4), 0)
    assert 40 < low < 60
    assert high == 100


def test_the_mean_is_that_of_the_other_folds():
    targets = np.array([[1.0], [3.0], [5.0], [math.nan]])
    folds = np.array([0, 1, 1, 0])
    np.testing.assert_array_equal(predict_by_fold(targets, folds), [[4.0], [1.0], [1.0], [4.0]])
