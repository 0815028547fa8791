"""What learns while somebody labels: suggestions, what it says of errors, the next image, slips."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from simulated_maps import simulate

pytest.importorskip("sklearn")

import tensor_dropout as td
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling import cross_fit as cross_fit_module
from tensor_dropout_lab.labelling import learner as learner_module
from tensor_dropout_lab.labelling.choosing import expected_gain, find_doubtful, find_slips
from tensor_dropout_lab.labelling.cross_fit import Folds
from tensor_dropout_lab.labelling.learner import Learner

N, LABELLED = 120, 40
SIZES = np.tile([[200.0, 100.0]], (N, 1))


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def maps():
    return simulate(N)


def label(points: np.ndarray, rows: slice | np.ndarray) -> np.ndarray:
    targets = np.full(points.shape, np.nan)
    targets[rows] = points[rows]
    return targets


def make(maps, **settings) -> Learner:
    coarse, fine, _ = maps
    learner = Learner(SIZES, search=False, **settings)
    for start in range(0, N, 64):
        learner.set_maps(range(start, min(N, start + 64)), coarse[start : start + 64], fine[start : start + 64])
    return learner


@pytest.fixture(scope="module")
def alone(maps):
    """The first stage alone."""
    return make(maps, rounds=0).fit(label(maps[2], slice(LABELLED)))


@pytest.fixture(scope="module")
def fitted(maps):
    learner = make(maps)
    return learner, learner.fit(label(maps[2], slice(LABELLED)))


def distance(fitted_round, points: np.ndarray, rows: slice = slice(LABELLED, None)) -> float:
    return 100 * float(np.linalg.norm(fitted_round.points[rows] - points[rows], axis=-1).mean())


def test_suggestions_are_near_the_points_and_the_second_stage_brings_them_nearer(maps, fitted, alone):
    _, found = fitted
    points = maps[2]
    by_mean = 100 * float(np.linalg.norm(points[:LABELLED].mean(0) - points[LABELLED:], axis=-1).mean())
    assert alone.settings["refined"] == 0
    assert found.settings["refined"] >= 1
    assert distance(found, points) < 0.6 * distance(alone, points) < 0.4 * by_mean


def test_held_out_errors_are_those_of_new_images_in_pixels_of_the_original(maps, fitted):
    _, found = fitted
    pixels = np.linalg.norm((found.points - maps[2])[LABELLED:] * SIZES[0], axis=-1).mean()
    assert found.error_pixels == pytest.approx(pixels, rel=0.35)
    assert found.error_percent == pytest.approx(found.error_pixels / 2)  # 100 % of 200 pixels


def test_nothing_is_learned_from_labels_by_chance(maps):
    """Held-out errors of labels that have nothing to do with the maps: no better than the mean, in neither stage."""
    rng = np.random.default_rng(3)
    points = maps[2][rng.permutation(N)]
    found = make(maps).fit(label(points, slice(LABELLED)))
    off = (points[:LABELLED] - points[:LABELLED].mean(0)) * SIZES[0]
    assert found.error_pixels > 0.97 * np.linalg.norm(off, axis=-1).mean()


def test_ellipses_hold_nine_points_of_ten(maps, fitted):
    _, found = fitted
    off = (found.points - maps[2])[LABELLED:]
    inside = np.einsum("npi,npij,npj->np", off, np.linalg.inv(found.ellipses[LABELLED:]), off) <= 1
    assert 0.84 <= inside.mean() <= 0.97
    assert (found.std > 0).all()
    axes = found.std[0, 0] * 200  # root mean square of both axes, in pixels; an ellipse is about 2.1 of them
    lengths = np.sqrt(np.linalg.eigvalsh(found.ellipses[0, 0] * np.outer(SIZES[0], SIZES[0])))
    assert 1.2 * axes < lengths.mean() < 4 * axes


def test_ellipses_need_nine_groups(maps):
    groups = [str(k // 5) if k < LABELLED else str(k) for k in range(N)]  # eight groups are labelled
    found = make(maps, groups=groups).fit(label(maps[2], slice(LABELLED)))
    assert np.isnan(found.ellipses).all()
    assert np.isfinite(found.std).all()
    assert np.isfinite(found.error_pixels)


def test_one_group_holds_nothing_out(maps):
    found = make(maps, groups=["a"] * N).fit(label(maps[2], slice(20)))
    assert np.isnan(found.error_pixels)
    assert np.isnan(found.std).all()
    assert np.isfinite(found.points).all()
    assert found.settings["refined"] == 0
    assert not found.doubtful.any()
    assert not found.suspect.any()


def test_a_group_is_never_on_both_sides_and_folds_never_change():
    rng = np.random.default_rng(0)
    groups = rng.integers(0, 12, 80)
    folds, order = Folds(groups.tolist()), rng.permutation(80)
    known: dict[int, int] = {}
    for end in (5, 6, 20, 80):
        rows = order[:end]
        for group, fold in zip(groups[rows], folds.assign(rows), strict=True):
            assert known.setdefault(int(group), int(fold)) == fold
    assert set(known.values()) == set(range(5))


def test_images_alone_are_dealt_out_evenly():
    folds = Folds(range(50))
    for end in range(1, 51):
        counts = np.bincount(folds.assign(np.arange(end)), minlength=5)
        assert counts.max() - counts.min() <= 1


def test_absent_points_and_a_point_with_one_label(maps):
    targets = label(maps[2], slice(LABELLED))
    targets[3, 1] = targets[10, 0] = np.nan
    targets[1:, 3] = np.nan
    found = make(maps).fit(targets)
    assert found.fitted.tolist() == [True, True, True, False]
    assert np.isnan(found.points[:, 3]).all()
    assert np.isfinite(found.points[:, :3]).all()
    assert found.estimator.output_shape_ == (6,)
    assert 100 * np.linalg.norm((found.points - maps[2])[LABELLED:, :3], axis=-1).mean() < 2
    assert np.isneginf(found.gain[:LABELLED]).all()


def test_a_new_point_with_three_labels_spoils_nothing(maps):
    """Two of them are in one fold: where that is held out, one label of the point is left."""
    groups = [{0: "a", 5: "a"}.get(k, str(k)) for k in range(N)]
    targets = label(maps[2], slice(LABELLED))
    targets[:, 3] = np.nan
    targets[[0, 5, 7], 3] = maps[2][[0, 5, 7], 3]
    found = make(maps, groups=groups).fit(targets)
    assert found.fitted.all()
    assert np.isfinite(found.points).all()
    assert np.isnan(found.ellipses[:, 3]).all()  # three groups do not tell 90 %
    assert np.isfinite(found.ellipses[:, :3]).all()
    assert 100 * np.linalg.norm((found.points - maps[2])[LABELLED:, :3], axis=-1).mean() < 2


def test_images_without_maps_have_no_suggestions(maps):
    coarse, fine, points = maps
    learner = Learner(SIZES, search=False)
    learner.set_maps(range(40), coarse[:40], fine[:40])
    found = learner.fit(label(points, slice(45)))  # five of them have no maps yet
    assert np.isfinite(found.points[:40]).all()
    assert np.isnan(found.points[40:]).all()
    assert np.isneginf(found.gain[30:]).all()
    learner.set_maps(range(40, N), coarse[40:], fine[40:])
    assert np.isfinite(learner.fit(label(points, slice(45))).points).all()


def test_without_fine_maps_the_coarse_ones_are_looked_at_again(maps, alone):
    learner = Learner(SIZES, search=False)
    learner.set_maps(range(N), maps[0])
    found = learner.fit(label(maps[2], slice(LABELLED)))
    assert found.settings["refined"] >= 1
    assert distance(found, maps[2]) < distance(alone, maps[2])


def test_equal_seeds_give_equal_rounds(maps, fitted):
    again = make(maps).fit(label(maps[2], slice(LABELLED)))
    for name in ("points", "ellipses", "std", "gain", "doubtful", "suspect"):
        assert np.array_equal(getattr(fitted[1], name), getattr(again, name), equal_nan=True)


def test_the_estimator_is_the_first_stage_and_can_be_kept(fitted, alone, tmp_path):
    learner, found = fitted
    x = learner.maps.take(np.arange(N)).numpy()
    assert list(x.shape[2:]) == found.settings["pool"] == [6, 6]
    td.save(found.estimator, tmp_path / "head.safetensors")
    again = td.load(tmp_path / "head.safetensors")
    assert np.allclose(again.predict(x), found.estimator.predict(x))
    assert np.allclose(again.predict(x).reshape(N, -1, 2), alone.points, atol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert again.predict_region(x)[1].shape == (N, 4, 2, 2)


def test_a_slip_is_found(maps, fitted):
    assert fitted[1].suspect.sum() <= 5
    targets = label(maps[2], slice(LABELLED))
    targets[7, [0, 1]] = targets[7, [1, 0]]
    targets[20, 2] += 0.15
    assert make(maps).fit(targets).suspect[[7, 20]].all()


def test_a_search_takes_what_is_clearly_better(maps, monkeypatch):
    learner = Learner(SIZES)
    learner.set_maps(range(N), maps[0], maps[1])
    tried = []

    def try_settings(self, labels, splits, settings):
        tried.append(settings)
        return (1.0 if settings.alpha < 1 else 1.5), []

    monkeypatch.setattr(learner_module.Learner, "_try", try_settings)

    def search(count):
        learner._search(learner._labels(label(maps[2], slice(count))))

    search(19)
    assert not tried
    search(20)
    assert learner.settings.alpha == 0.25
    assert len(tried) == 3
    search(39)
    assert len(tried) == 3
    search(40)
    assert {settings.theta for settings in tried} == {0.3, 0.5, 0.7}
    assert learner.settings == learner_module.Settings(0.5, 0.25)  # as good as the others: it stays


def test_fits_of_a_search_are_not_made_again(maps, monkeypatch):
    """With them and without them, the round is the same."""
    targets = label(maps[2], slice(20))
    learner = Learner(SIZES, rounds=0)
    learner.set_maps(range(N), maps[0], maps[1])
    made = []
    fit_layer = cross_fit_module.fit_layer
    monkeypatch.setattr(cross_fit_module, "fit_layer", lambda *given: made.append(given) or fit_layer(*given))
    searched = learner.fit(targets)
    assert len(made) == 3 + 1  # of the five folds two were known
    again = make(maps, rounds=0)
    again.settings = learner.settings
    assert np.array_equal(again.fit(targets).points, searched.points)
    assert again.fit(targets).error_pixels == searched.error_pixels


def test_what_cannot_be_fitted_is_said(maps):
    learner = make(maps)
    with pytest.raises(TensorDropoutError, match=r"2 labelled images with features.* there are 1;"):
        learner.fit(label(maps[2], slice(1)))
    with pytest.raises(TensorDropoutError, match=r"targets are \(120, points, 2\), got \(120, 8\)"):
        learner.fit(maps[2].reshape(N, -1))
    with pytest.raises(TensorDropoutError, match="maps of 3 images"):
        learner.set_maps(range(3), maps[0][:3])
    with pytest.raises(TensorDropoutError, match=r"groups \(n,\)"):
        Learner(SIZES, ["a"])


# Which image is next.


def test_the_gain_is_the_variance_that_a_label_takes_from_all_images():
    """Against the posterior with and without the label, written out."""
    rng = np.random.default_rng(0)
    z = rng.normal(size=(12, 5))
    candidates = np.ones(12, dtype=bool)
    candidates[4] = False
    gain = expected_gain(torch.from_numpy(z), candidates, ahead=0)
    before = np.square(z).sum()
    for image in np.flatnonzero(candidates):
        covariance = np.linalg.inv(np.eye(5) + np.outer(z[image], z[image]))
        assert gain[image] == pytest.approx(before - np.einsum("ni,ij,nj->", z, covariance, z))
    assert gain[4] == -np.inf


def test_images_are_chosen_one_after_another():
    rng = np.random.default_rng(1)
    z = rng.normal(size=(30, 6))
    gain = expected_gain(torch.from_numpy(z), np.ones(30, dtype=bool), ahead=4)
    order, covariance, chosen = np.argsort(-gain)[:4], np.eye(6), []
    for image in order:
        gains = np.square(z @ covariance @ z.T).sum(0) / (1 + np.einsum("ni,ij,nj->n", z, covariance, z))
        gains[chosen] = 0
        assert gains[image] >= gains.max() - 1e-9
        chosen.append(image)
        covariance = np.linalg.inv(np.linalg.inv(covariance) + np.outer(z[image], z[image]))


def test_neither_an_outlier_nor_a_twin_is_next():
    z = np.zeros((21, 3))
    z[:10, 0] = z[10:20, 1] = 1.0  # two kinds
    z[20, 2] = 2.0  # the largest leverage, and nothing like it
    gain = expected_gain(torch.from_numpy(z), np.ones(21, dtype=bool))
    first, second = np.argsort(-gain)[:2]
    assert {first < 10, second < 10} == {True, False}
    assert 20 not in (first, second)


def test_doubt_is_a_std_far_above_the_usual():
    std = np.array([[1.0, 1.0], [2.0, 2.0], [np.nan, np.nan]])
    assert find_doubtful(std, 1.0).tolist() == [False, True, False]
    assert not find_doubtful(std, np.nan).any()


def test_a_hard_image_is_not_a_slip():
    rng = np.random.default_rng(0)
    errors = 0.01 * rng.rayleigh(size=(60, 12))
    errors[5] *= 6  # all points are off
    errors[9, 3] = 0.1  # one is
    assert np.argwhere(find_slips(errors)).tolist() == [[9, 3]]
    assert not find_slips(errors[:8]).any()  # too few to judge
    few = np.where(rng.random(errors.shape) < 0.1, np.nan, errors)
    few[9, 3] = 0.1
    assert np.argwhere(find_slips(few)).tolist() == [[9, 3]]
