"""Temperature and sets of classes: against a grid, by simulation, and in the estimators."""

from __future__ import annotations

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tensor_dropout as td
from estimators_under_test import fit_quietly
from tensor_dropout.calibration.classification import calibrate_classes, fit_temperature
from tensor_dropout.sklearn import TensorClassifier, TensorClassifierCV
from tensor_dropout.sklearn import search as search_module

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
    assert fit_temperature(logits, torch.tensor([0, 1])) < 0.5  # always right: as cold as numbers tell
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
        (torch.zeros(2, 3), torch.tensor([0, 3]), "targets are classes 0 to 2, one for each of 2 samples"),
        (torch.zeros(2, 3), torch.tensor([-1, 0]), "from -1 to 0"),
        (torch.zeros(2, 3), torch.tensor([1]), "one for each of 2 samples"),
    ],
)
def test_what_cannot_be_is_said(logits, y, said):
    with pytest.raises(td.TensorDropoutError, match=said):
        calibrate_classes(logits, y)


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
