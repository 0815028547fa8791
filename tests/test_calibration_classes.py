"""Temperature and sets of classes: against a grid, by simulation, and in the estimators."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedGroupKFold
from torch.nn import functional as F

import tensor_dropout as td
from estimators_under_test import fit_quietly
from tensor_dropout.calibration.classification import calibrate_classes, fit_temperature
from tensor_dropout.sklearn import TensorClassifier, TensorClassifierCV
from tensor_dropout.sklearn import search_mixin as search_module

NAMES = np.array(["ant", "bee", "kite"])


def draw(n, temperature=1.0, seed=0, classes=4):
    """Logits, and classes drawn from ``softmax(logits / temperature)``."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(n, classes, generator=generator, dtype=torch.float64)
    return logits, torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("true", [0.4, 1.0, 3.0])
def test_the_temperature_is_that_of_a_grid(true):
    logits, y = draw(400, true)
    grid = np.geomspace(0.05, 20, 4001)
    best = min(grid, key=lambda T: float(F.cross_entropy(logits / T, y)))
    found = fit_temperature(logits, y)
    assert found == pytest.approx(best, rel=3e-3)
    assert found == pytest.approx(true, rel=0.3)
    assert fit_temperature(3 * logits, y) == pytest.approx(3 * found, rel=1e-6)


def test_temperatures_stay_within_their_bounds():
    logits = torch.tensor([[5.0, 0.0], [0.0, 5.0]])
    assert fit_temperature(logits, torch.tensor([0, 1])) == 1  # always right: no temperature is the best
    assert fit_temperature(logits, torch.tensor([1, 0])) == pytest.approx(100, rel=0.01)  # always wrong


@pytest.mark.parametrize("coverage", [0.5, 0.9])
def test_sets_hold_the_class_as_often_as_promised(coverage):
    inside = []
    for seed in range(60):
        logits, y = draw(260, 2.0, seed)
        sets, quantile = calibrate_classes(logits[:60], y[:60]).sets(logits[60:], coverage)
        assert bool(quantile.reached.all())
        inside.append(float(sets.gather(1, y[60:, None]).double().mean()))
    error = np.std(inside) / len(inside) ** 0.5
    assert coverage - 3 * error < np.mean(inside) < coverage + 0.03 + 3 * error


def test_more_coverage_never_gives_a_smaller_set():
    logits, y = draw(200, 2.0)
    found = calibrate_classes(logits[:100], y[:100])
    smaller, larger = (found.sets(logits[100:], coverage)[0] for coverage in (0.6, 0.9))
    assert bool((smaller <= larger).all())
    assert bool((smaller != larger).any())


def test_groups_count_alike():
    logits, y = draw(24)
    groups = torch.arange(24) // 4
    found = calibrate_classes(logits, y, groups)
    sets, quantile = found.sets(logits, 0.9)
    assert quantile.groups.tolist() == [6]
    assert bool(sets.all())  # 90 % take nine groups: nothing less than all classes is known to hold
    assert not bool(calibrate_classes(logits, y).sets(logits, 0.9)[0].all())


@pytest.mark.parametrize(
    ("logits", "y", "said"),
    [
        (torch.zeros(0, 3), torch.zeros(0), "there are no samples"),
        (torch.tensor([[0.0, torch.nan]]), torch.tensor([0]), "a logit is not finite"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "targets are classes 0 to 2, got 0 to 3"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), "got -1 to 0"),
        (torch.zeros(2, 3), torch.tensor([1]), "one for each of 2 samples"),
        (torch.zeros(2, 3), torch.tensor([0.5, 1.0]), "got 0.5 to 1"),
        (torch.zeros(2, 3), torch.tensor([torch.nan, 1.0]), "got nan to nan"),
        (torch.zeros(3), torch.zeros(3), r"got \(3,\), \(3,\)"),
        (torch.zeros(2, 0), torch.zeros(2), r"got \(2, 0\), \(2,\)"),
    ],
)
def test_what_cannot_be_is_said(logits, y, said):
    with pytest.raises(td.TensorDropoutError, match=said):
        calibrate_classes(logits, y)


def test_groups_of_others_are_refused():
    with pytest.raises(td.TensorDropoutError, match=r"one for each of 24 samples, got \(24, 4\), \(24,\), \(5,\)"):
        calibrate_classes(*draw(24), torch.arange(5))


def test_a_class_as_probable_as_the_quantile_is_in_the_set():
    for seed in range(20):
        logits, y = draw(21, seed=seed)
        found = calibrate_classes(logits, y)
        sets, quantile = found.sets(logits, 0.9)
        row = int((found.scores == quantile.value).nonzero()[0])
        assert bool(sets[row, y[row]])


def test_groups_that_are_large_do_not_count_more():
    """Hard groups have one sample, easy ones ten: a new group is hard as often as not."""
    n_groups, repeats = 30, 400
    held = {"groups": [], "samples": []}
    for seed in range(repeats):
        rng = np.random.default_rng(seed)
        hard = rng.random(n_groups + 1) < 0.5
        group = np.repeat(np.arange(n_groups + 1), np.where(hard, 1, 10))
        logits = torch.zeros(len(group), 2, dtype=torch.float64)
        logits[:, 0] = torch.from_numpy(np.where(hard[group], -1.0, 3.0) + rng.normal(size=len(group)))
        seen, new = group < n_groups, int(np.flatnonzero(group == n_groups)[0])
        for kind, numbers in (("groups", torch.from_numpy(group[seen])), ("samples", None)):
            found = calibrate_classes(logits[seen], torch.zeros(int(seen.sum())), numbers)
            held[kind].append(bool(found.sets(logits[new : new + 1], 0.8)[0][0, 0]))
    error = (0.8 * 0.2 / repeats) ** 0.5
    assert np.mean(held["groups"]) > 0.8 - 3 * error
    assert np.mean(held["samples"]) < 0.8 - 6 * error


# The estimators.


def simulate(n=90, new=600, seed=0):
    """Maps in which the place of a spot tells the class, with much noise."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n + new)
    X = rng.normal(size=(n + new, 4, 5, 5)).astype(np.float32)
    X[np.arange(n + new), 0, 2, 2 * y] += 1.5
    return X[:n], NAMES[y[:n]], X[n:], NAMES[y[n:]]


@pytest.fixture(scope="module")
def fitted():
    X, y, new, true = simulate()
    options = {"rank": 6, "theta": 1.0, "alpha": 1e-4, "max_iter": 40, "random_state": 0}
    plain = fit_quietly(TensorClassifier(**options), X, y)
    calibrated = fit_quietly(TensorClassifier(calibrate=4, **options), X, y)
    return plain, calibrated, new, true


def loss(model, X, y):
    return -float(np.mean(model.predict_log_proba(X)[np.arange(len(y)), np.searchsorted(NAMES, y)]))


def test_an_overconfident_fit_becomes_honest(fitted):
    plain, calibrated, new, true = fitted
    assert plain.calibration_ is None
    assert calibrated.calibration_.temperature > 1.5
    assert loss(calibrated, new, true) < loss(plain, new, true) - 0.1
    assert np.array_equal(calibrated.predict(new), plain.predict(new))
    assert np.allclose(calibrated.predict_proba(new).sum(1), 1)
    assert np.allclose(np.log(calibrated.predict_proba(new)), calibrated.predict_log_proba(new), atol=1e-4)
    expected = torch.from_numpy(calibrated.decision_function(new)) / calibrated.calibration_.temperature
    assert np.allclose(calibrated.predict_proba(new), expected.softmax(-1).numpy(), atol=1e-5)


def test_its_sets_hold(fitted):
    _, calibrated, new, true = fitted
    sets = calibrated.predict_set(new, 0.9)
    inside = sets[np.arange(len(true)), np.searchsorted(NAMES, true)].mean()
    assert 0.82 < inside < 0.98
    assert isinstance(calibrated.predict_set(torch.from_numpy(new), 0.9), torch.Tensor)


def test_held_out_logits_are_those_of_fits_that_had_not_seen_them(fitted):
    """Without noise in the classes a fit that has seen them would be sure of them."""
    rng = np.random.default_rng(3)
    X = rng.normal(size=(60, 3, 4, 4)).astype(np.float32)
    y = NAMES[rng.integers(0, 3, 60)]  # nothing to learn
    model = fit_quietly(TensorClassifier(rank=4, theta=1.0, alpha=1e-4, max_iter=30, calibrate=3, random_state=0), X, y)
    assert model.score(X, y) > 0.9
    assert float(model.calibration_.scores.mean()) > 0.6  # one minus a third


@pytest.mark.parametrize("ridge", [False, True])
def test_the_search_calibrates_from_its_folds(ridge, monkeypatch):
    if not ridge:
        monkeypatch.setattr(search_module, "search_ridges", lambda *given: [])
    X, y, new, true = simulate(n=75)
    options = {"thetas": (1.0,), "alphas": (1e3,) if ridge else (1e-2,), "cv": 3, "max_iter": 30, "random_state": 0}
    model = fit_quietly(TensorClassifierCV(**options), X, y)
    assert ("ridge" in model.method_) == ridge
    assert len(model.calibration_.scores) == 75
    sets = model.predict_set(new, 0.9)
    assert 0.8 < sets[np.arange(len(true)), np.searchsorted(NAMES, true)].mean() < 0.98
    assert np.allclose(model.predict_proba(new).sum(1), 1)


def test_held_out_probabilities_of_a_search_are_as_sure_as_its_predictions(monkeypatch):
    """Both are tempered: untempered ones would judge what predict does not say."""
    monkeypatch.setattr(search_module, "search_ridges", lambda *given: [])
    X, y, new, _ = simulate(n=75)
    options = {"thetas": (1.0,), "alphas": (1e-4,), "ranks": (4,), "cv": 5, "max_iter": 30, "random_state": 0}
    model = fit_quietly(TensorClassifierCV(**options), X, y)
    assert model.calibration_.temperature > 1.5
    held_out, predicted = model.held_out_["cp"], model.predict_proba(new)
    assert np.allclose(held_out.sum(1), 1, atol=1e-5)
    untempered = model.layer_(torch.from_numpy(new).float()).softmax(-1).detach().numpy()
    sure = {name: float(each.max(1).mean()) for name, each in (("held out", held_out), ("new", predicted))}
    assert abs(sure["held out"] - sure["new"]) < 0.05
    assert untempered.max(1).mean() > sure["new"] + 0.1


def test_there_and_back(fitted, tmp_path):
    _, calibrated, new, _ = fitted
    td.save(calibrated, tmp_path / "c.safetensors")
    for again in (td.load(tmp_path / "c.safetensors"), pickle.loads(pickle.dumps(calibrated))):
        assert np.array_equal(again.predict_proba(new), calibrated.predict_proba(new))
        assert np.array_equal(again.predict_set(new), calibrated.predict_set(new))


def test_rows_of_weight_0_do_not_count():
    X, y, _, _ = simulate(n=60)
    weights = np.r_[np.ones(50), np.zeros(10)]
    model = TensorClassifier(rank=4, max_iter=20, calibrate=2, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y, sample_weight=weights)
    assert len(model.calibration_.scores) == 50


def test_bad_settings_are_said(fitted):
    plain, calibrated, new, _ = fitted
    X, y, _, _ = simulate(n=30)
    with pytest.raises(td.TensorDropoutError, match=r"fit with calibrate=5, or use TensorClassifierCV"):
        plain.predict_set(new)
    for wrong in (0, 1.0, "0.9", True):
        with pytest.raises(td.TensorDropoutError, match="coverage is a number between 0 and 1"):
            calibrated.predict_set(new, wrong)
    with pytest.raises(td.TensorDropoutError, match=r"calibrate=20 folds need as many samples of every class"):
        TensorClassifier(calibrate=20).fit(X, y)
    with pytest.raises(td.TensorDropoutError, match=r"calibrate=3 folds need as many groups, got 2"):
        TensorClassifier(calibrate=3).fit(X, y, groups=np.arange(30) // 15)
    with pytest.warns(UserWarning, match=r"90 held-out samples are too few for coverage=0.99, which needs 99"):
        assert calibrated.predict_set(new[:3], 0.99).all()


def test_what_was_fitted_before_there_was_a_calibration_predicts(fitted):
    plain, calibrated, new, _ = fitted
    old = pickle.loads(pickle.dumps(calibrated))
    del old.calibration_
    assert np.array_equal(old.predict_proba(new), plain.predict_proba(new))
    assert np.array_equal(old.predict_log_proba(new), plain.predict_log_proba(new))
    with pytest.raises(td.TensorDropoutError, match="fit with calibrate=5"):
        old.predict_set(new)


def test_rows_that_several_folds_hold_out_are_one_group():
    X, y, _, _ = simulate(n=30)
    rows = np.arange(30)
    pairs = [(rows[rows % 3 != k], rows[rows % 3 == k]) for k in (0, 1, 2, 0)]
    options = {"thetas": (1.0,), "alphas": (1e-2,), "cv": pairs, "max_iter": 10, "random_state": 0}
    for groups, count in ((None, 30), (rows // 3 % 5, 5)):
        found = fit_quietly(TensorClassifierCV(**options), X, y, groups=groups).calibration_
        assert found.scores.shape == (40,)
        assert found.sets(torch.zeros(1, 3), 0.5)[1].groups.tolist() == [count]


def test_groups_that_cannot_be_dealt_out_are_refused(monkeypatch):
    X, y, _, _ = simulate(n=30)
    one, other = X[y == "ant"], X[y == "bee"]
    pair, names = np.concatenate([one, other]), np.repeat(["ant", "bee"], [len(one), len(other)])
    with pytest.raises(td.TensorDropoutError, match=r"calibrate=2 leaves one class alone to fit on, .*ant"):
        TensorClassifier(calibrate=2, max_iter=2, random_state=0).fit(pair, names, groups=names)
    for model in (TensorClassifier(calibrate=29), TensorClassifierCV(cv=29)):
        with pytest.raises(td.TensorDropoutError, match=r"=29 folds need .* of a class, the largest class has \d"):
            model.fit(X, y, groups=np.arange(30))
    monkeypatch.setattr(StratifiedGroupKFold, "split", lambda *_, **__: [(np.arange(30), np.arange(0))])
    with pytest.raises(td.TensorDropoutError, match="calibrate=2 leaves a fold empty for 30 rows; lower calibrate"):
        TensorClassifier(calibrate=2).fit(X, y, groups=np.arange(30))
