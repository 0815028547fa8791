"""The searches: which settings they try, on which folds they judge them, and that the best is fitted on everything."""

from __future__ import annotations

import itertools
import re
import warnings

import numpy as np
import pytest
import sklearn
import torch
from scipy.special import log_softmax, softmax
from sklearn.exceptions import ConvergenceWarning, NotFittedError
from sklearn.linear_model import Ridge
from sklearn.model_selection import (
    GridSearchCV,
    GroupKFold,
    KFold,
    LeaveOneGroupOut,
    RepeatedKFold,
    ShuffleSplit,
    cross_val_predict,
    cross_val_score,
    cross_validate,
)
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import tensor_dropout as td
from estimators_under_test import SMALL, assert_one_sentence, fit_quietly, make_classes, make_data, relative
from tensor_dropout.fitting.objective import ExpectedLoss
from tensor_dropout.progress import Advance
from tensor_dropout.sklearn import TensorClassifier, TensorClassifierCV, TensorRegressor, TensorRegressorCV
from tensor_dropout.sklearn.candidates import RIDGE_ALPHAS, Search, fit_layers, search_in_one_program
from tensor_dropout.sklearn.search_mixin import SearchMixin

QUICK = {"max_iter": 25, "tol": 0.02, "random_state": 0}
ONE_SETTING = {"thetas": (0.8,), "alphas": (1e-3,), "cv": 3, **QUICK}
GRID = {"factorization": ("cp", "tt"), "ranks": ("auto", 2), "thetas": (1, 0.8), "alphas": (1e-2, 1e-3)}
FEW_STEPS = {"max_iter": 12, "random_state": 0}
N_RIDGES = 2 * len(RIDGE_ALPHAS)


def search(X, y, *weights, groups=None, **settings):
    kind = TensorClassifierCV if np.asarray(y).ndim == 1 and np.asarray(y).dtype.kind in "iU" else TensorRegressorCV
    return fit_quietly(kind(**{**ONE_SETTING, **settings}), X, y, *weights, groups=groups)


def pairs_of(X, n_splits=3):
    return list(KFold(n_splits).split(X))


def skill(y, predicted, rows):
    """One minus the mean error of some samples over that of the mean target for all, outputs over their std."""

    def error(difference):
        return np.sqrt(np.nanmean((difference / np.nanstd(y, 0)).reshape(len(difference), -1) ** 2, 1)).mean()

    return 1 - error(y[rows] - predicted) / error(y - np.nanmean(y, 0))


def rows_of(found, method):
    """The numbers of the candidates of one kind."""
    return [k for k, params in enumerate(found.cv_results_["params"]) if params["method"] == method]


# The grid and its results.


@pytest.fixture(scope="module")
def data():
    return make_data((6, 4), (2,), n=60, noise=1.0)


@pytest.fixture(scope="module")
def found(data):
    return search(*data, **GRID, **FEW_STEPS)


def test_every_setting_is_tried_and_both_ridges(found):
    params = found.cv_results_["params"]
    tensors = [tuple(each.values()) for each in params if "ridge" not in each["method"]]
    expected = itertools.product(*(GRID[key] for key in ("factorization", "ranks", "thetas", "alphas")))
    assert tensors == [each for each in expected if each[0] == "cp" or each[2] == 1]  # of the train none can be spared
    assert len(params) == len(tensors) + N_RIDGES
    for kind in ("flattened ridge", "pooled ridge"):
        assert [params[k]["alpha"] for k in rows_of(found, kind)] == list(RIDGE_ALPHAS)
        assert all(params[k]["rank"] is params[k]["theta"] is None for k in rows_of(found, kind))


def test_results_are_laid_out_like_those_of_scikit_learn(found, data):
    results, n = found.cv_results_, len(found.cv_results_["params"])
    theirs = GridSearchCV(Ridge(), {"alpha": [1.0, 2.0]}, cv=3).fit(data[0][:, :, 0], data[1]).cv_results_
    shared = {key for key in theirs if not key.startswith("param_") and "score_time" not in key}
    assert shared <= set(results)
    assert {key for key in results if key.startswith("param_")} == {
        "param_method", "param_rank", "param_theta", "param_alpha"
    }  # fmt: skip
    for key, values in results.items():
        assert len(values) == n, key
        if key in shared and key != "params":
            assert values.dtype.kind == theirs[key].dtype.kind, key
    for key in ("method", "rank", "theta", "alpha"):
        assert results[f"param_{key}"].tolist() == [params[key] for params in results["params"]]
    folds = np.stack([results[f"split{k}_test_score"] for k in range(3)])
    assert "split3_test_score" not in results
    assert np.allclose(results["mean_test_score"], folds.mean(0))
    assert np.allclose(results["std_test_score"], folds.std(0))
    assert (results["mean_fit_time"] > 0).all()
    order = np.argsort(results["rank_test_score"], kind="stable")
    assert results["rank_test_score"].min() == 1
    assert (np.diff(results["mean_test_score"][order]) <= 0).all()


def test_the_best_is_the_row_of_the_highest_score(found):
    scores = found.cv_results_["mean_test_score"]
    assert found.best_index_ == scores.argmax()
    assert found.best_score_ == scores.max()
    assert found.best_params_ == found.cv_results_["params"][found.best_index_]
    assert found.cv_results_["rank_test_score"][found.best_index_] == 1


def test_the_best_is_fitted_on_everything(found, data):
    """As the estimator with the same settings is."""
    best = found.best_params_
    alone = TensorRegressor(
        best["method"], **{key: best[key] for key in ("rank", "theta", "alpha")}, **{**QUICK, **FEW_STEPS}
    )
    fit_quietly(alone, *data)
    assert np.array_equal(found.predict(data[0]), alone.predict(data[0]))
    assert found.loss_curve_ == alone.loss_curve_
    for name in ("method_", "rank_", "theta_", "alpha_", "n_iter_", "input_shape_", "output_shape_"):
        assert getattr(found, name) == getattr(alone, name), name
    assert np.array_equal(found.coef_, alone.coef_)
    assert found.score(*data) == alone.score(*data)


def test_scores_are_those_of_fits_by_hand(found, data):
    X, y = data
    folds = KFold(3, shuffle=True, random_state=found._seed() % 2**31).split(X)
    params = found.cv_results_["params"][2]
    settings = {key: params[key] for key in ("rank", "theta", "alpha")}
    for k, (train, test) in enumerate(folds):
        model = TensorRegressor(params["method"], **settings, **{**QUICK, **FEW_STEPS})
        fit_quietly(model, X[train], y[train])
        score = skill(y, model.predict(X[test]), test)
        assert found.cv_results_[f"split{k}_test_score"][2] == pytest.approx(score, rel=1e-4)


def test_held_out_predictions_come_from_what_was_best_in_the_other_folds(found, data):
    X, y = data
    results, fold_of = found.cv_results_, found.held_out_fold_
    assert sorted(set(fold_of)) == [0, 1, 2]
    assert set(found.held_out_) == {*GRID["factorization"], "flattened ridge", "pooled ridge"}
    scores = np.stack([results[f"split{k}_test_score"] for k in range(3)])
    for method in GRID["factorization"]:
        rows = rows_of(found, method)
        for fold in range(3):
            best = rows[np.delete(scores[:, rows], fold, axis=0).mean(0).argmax()]
            settings = {key: results["params"][best][key] for key in ("rank", "theta", "alpha")}
            model = TensorRegressor(method, **settings, **{**QUICK, **FEW_STEPS})
            fit_quietly(model, X[fold_of != fold], y[fold_of != fold])
            held_out = found.held_out_[method][fold_of == fold]
            assert relative(model.predict(X[fold_of == fold]), held_out) < 1e-3


@pytest.mark.parametrize("kind", ["flattened ridge", "pooled ridge"])
def test_scores_of_ridge_are_those_of_scikit_learns(kind, data):
    X, y = (each.astype(np.float64) for each in data)
    model = search(X, y, cv=pairs_of(X))
    train, test = pairs_of(X)[0]
    mean = X[train].mean((0, 2), keepdims=True)
    scaled = (X - mean) / X[train].std((0, 2), keepdims=True)
    features = scaled.reshape(60, -1) if kind == "flattened ridge" else X.mean(2)
    if kind == "pooled ridge":
        features = (features - features[train].mean(0)) / features[train].std(0)
    rows = features[train] - features[train].mean(0)
    for k in rows_of(model, kind)[::4]:
        alpha = model.cv_results_["params"][k]["alpha"] * (rows**2).sum()
        predicted = Ridge(alpha=alpha).fit(features[train], y[train]).predict(features[test])
        score = skill(y, predicted, test)
        assert model.cv_results_["split0_test_score"][k] == pytest.approx(score, rel=1e-6, abs=1e-6)


def test_auto_alphas_surround_that_of_a_single_fit(data):
    alphas = {params["alpha"] for params in search(*data, alphas="auto").cv_results_["params"] if params["theta"]}
    usual = fit_quietly(TensorRegressor(max_iter=1), *data).alpha_
    assert min(alphas) < usual < max(alphas)
    assert any(alpha == pytest.approx(usual) for alpha in alphas)


def test_auto_alphas_of_classes_surround_that_of_a_single_classifier(data):
    X, y = data[0], (data[1].reshape(len(data[1]), -1)[:, 0] > 0).astype(int)
    found = fit_quietly(TensorClassifierCV(thetas=(0.7,), cv=2, max_iter=1), X, y)
    alphas = {params["alpha"] for params in found.cv_results_["params"] if params["theta"]}
    usual = fit_quietly(TensorClassifier(max_iter=1), X, y).alpha_
    assert min(alphas) < usual < max(alphas)
    assert any(alpha == pytest.approx(usual) for alpha in alphas)


# Who wins.


def full_rank(n=300, noise=0.3):
    """Targets of a weight without structure."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 5, 4, 3)).astype(np.float32)
    y = X.reshape(n, -1) @ rng.normal(size=(60, 2))
    return X, (y + noise * rng.normal(size=y.shape)).astype(np.float32)


def mean_of_channels(n=60, noise=1.0):
    """Targets of the mean of each channel alone."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(n, 5, 5, 4)).astype(np.float32)
    y = 5 * X.mean((2, 3)) @ rng.normal(size=(5, 2))
    return X, (y + noise * rng.normal(size=y.shape)).astype(np.float32)


@pytest.mark.parametrize(
    ("make", "settings", "winner"),
    [
        (full_rank, {"ranks": (2, 3)}, "flattened ridge"),
        (mean_of_channels, {}, "pooled ridge"),
        (lambda: make_data((8, 6, 5), n=80), {"max_iter": 60}, "cp"),
    ],
    ids=["flattened ridge", "pooled ridge", "cp"],
)
def test_each_wins_where_it_should(make, settings, winner):
    X, y = make()
    model = search(X, y, **settings)
    assert model.method_ == model.best_params_["method"] == winner
    with torch.no_grad():
        from_layer = model.layer_(torch.from_numpy(X)).numpy()
    assert np.array_equal(model.predict(X), from_layer)
    assert np.allclose(np.tensordot(X, model.coef_, X.ndim - 1) + model.intercept_, from_layer, atol=1e-3 * y.std())
    if "ridge" in winner:
        assert model.rank_ is model.theta_ is None
        assert model.alpha_ == model.best_params_["alpha"]
        assert (model.n_iter_, model.loss_curve_) == (1, [])
        _, std = model.predict(X, return_std=True)
        assert np.allclose(std, model.calibration_.noise.sqrt().numpy())
        assert all(type(module).__module__.startswith("torch.nn.") for module in model.layer_.modules())


@pytest.mark.parametrize("axis", [2, -1])
def test_channels_may_be_anywhere_whoever_wins(axis):
    for X, y in (mean_of_channels(), make_data((8, 6, 5), n=60)):
        first = search(X, y)
        model = search(np.moveaxis(X, 1, axis), y, channel_axis=axis)
        assert model.method_ == first.method_
        assert relative(model.predict(np.moveaxis(X, 1, axis)), first.predict(X)) < 1e-4
        assert np.allclose(np.moveaxis(model.coef_, axis % X.ndim - 1, 0), first.coef_, atol=1e-5)


def test_a_vector_and_a_number_leave_ridge_alone():
    X, y = make_data((7,), (), n=40)
    model = search(X, y)
    assert {params["method"] for params in model.cv_results_["params"]} == {"flattened ridge"}
    assert model.score(X, y) > 0.9
    assert isinstance(model.layer_, torch.nn.Module)
    assert model.predict(X).shape == (40,)


@pytest.mark.parametrize("outputs", [(), (2,), (2, 2)], ids=str)
def test_targets_of_any_shape(outputs):
    X, y = make_data((6, 4), outputs, n=50)
    model = search(X, y)
    assert model.predict(X).shape == y.shape
    assert model.best_score_ > 0.5
    assert model.calibration_.noise.shape == (outputs or (1,))


# Folds.


def of_groups(n_groups=10, size=5, seed=0):
    """Samples that are nearly alike in a group, with a target that has nothing to do with them."""
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_groups), size)
    X = rng.normal(size=(n_groups, 40, 4))[groups] + 0.05 * rng.normal(size=(len(groups), 40, 4))
    y = rng.normal(size=(n_groups, 2))[groups] + 0.05 * rng.normal(size=(len(groups), 2))
    order = rng.permutation(len(groups))
    return X[order], y[order], groups[order]


@pytest.mark.parametrize("cv", [5, GroupKFold(5), LeaveOneGroupOut()], ids=["number", "GroupKFold", "LeaveOneGroupOut"])
def test_no_group_is_on_both_sides(cv):
    """Whoever has seen the group of a sample knows its target; nobody else does."""
    X, y, groups = of_groups()
    kept_together = search(X, y, cv=cv, groups=groups).cv_results_["mean_test_score"]
    assert kept_together.max() < 0.3
    if cv == 5:
        torn_apart = search(X, y, cv=cv)
        assert torn_apart.best_score_ > 0.9


def test_groups_of_a_classification_stay_together_too():
    X, _, groups = of_groups(n_groups=20, size=4)
    y = np.random.default_rng(3).integers(0, 2, 20)[groups]
    assert search(X, y, groups=groups).best_score_ < 0.65  # 0.5 for not knowing
    assert search(X, y).best_score_ > 0.9


def test_groups_reach_the_splitter():
    class Recorder:
        def split(self, X, y=None, groups=None):
            self.seen = len(X), groups
            yield from GroupKFold(2).split(X, y, groups)

    X, y, groups = of_groups()
    recorder = Recorder()
    search(X, y, cv=recorder, groups=[f"person {k}" for k in groups])
    assert recorder.seen[0] == 50
    assert recorder.seen[1].tolist() == [f"person {k}" for k in groups]


def test_classes_are_spread_over_the_folds():
    X, _ = make_classes((5, 4), n=45)
    y = np.r_[np.zeros(21, int), np.ones(20, int), np.full(4, 2)]
    folds = TensorClassifierCV(cv=4)._splits(torch.from_numpy(X), y, None, None)
    assert [np.bincount(y[test]).tolist()[2] for _, test in folds] == [1, 1, 1, 1]
    assert np.isfinite(search(X, y, cv=4).cv_results_["mean_test_score"]).all()


def test_pairs_of_rows_and_splitters_are_folds(data):
    X, y = data
    pairs = pairs_of(X)
    given, split, generated = (search(X, y, cv=cv) for cv in (pairs, KFold(3), KFold(3).split(X)))
    for other in (split, generated):
        assert np.array_equal(given.cv_results_["mean_test_score"], other.cv_results_["mean_test_score"])
    part = search(X, y, cv=ShuffleSplit(1, test_size=0.25, random_state=0))
    assert part.calibration_.scores.shape == (15, 2)  # of the rows that were held out


def overlapping(kind, n=60):
    return {
        "repeated": RepeatedKFold(n_splits=3, n_repeats=2, random_state=0),
        "shuffled": ShuffleSplit(4, test_size=0.4, random_state=0),
    }[kind]


def temper(held_out, y, tests, fold):
    """Probabilities of a fold at the best of many temperatures for what the other folds alone held out."""
    logits = [np.log(np.maximum(each.astype(np.float64), 1e-37)) for each in held_out]
    rows = [np.flatnonzero(~np.isin(test, tests[fold])) for test in tests]
    others = np.concatenate([each[kept] for each, kept in zip(logits, rows, strict=True)])
    right = np.concatenate([y[test[kept]] for test, kept in zip(tests, rows, strict=True)])
    grid = np.geomspace(0.01, 100, 4001)
    losses = [-log_softmax(others / T, 1)[np.arange(len(right)), right].sum() for T in grid]
    return softmax(logits[fold] / grid[np.argmin(losses)], 1)


def spread_over(values, rows, n):
    total = np.zeros((n, *values.shape[1:]))
    total[rows] = values
    return total


@pytest.mark.parametrize("program", [False, True], ids=["processes", "one program"])
@pytest.mark.parametrize("kind", ["repeated", "shuffled"])
@pytest.mark.parametrize("task", ["regression", "classification"])
def test_rows_may_be_held_out_several_times(task, kind, program, monkeypatch):
    """Each fold is judged by its own fit, and what is kept of a row is the mean of all that held it out."""
    X, y = make_data((6, 4), (2,), n=60, noise=1.0) if task == "regression" else make_classes((6, 4), n=60)
    if program:
        monkeypatch.setattr(SearchMixin, "_search_in_processes", in_one_program)
    splitter = overlapping(kind)
    found = search(X, y, cv=splitter, max_iter=10)
    splits = list(splitter.split(X))
    total, times, alone = 0.0, np.zeros(60, int), []
    for fold, (train, test) in enumerate(splits):
        alone.append(search(X, y, cv=[(train, test)], max_iter=10))
        compare_fold = [model.cv_results_[f"split{k}_test_score"] for model, k in ((found, fold), (alone[-1], 0))]
        assert np.allclose(*compare_fold, atol=1e-4)
        times[test] += 1
    held_out = [model.held_out_["cp"][test] for model, (_, test) in zip(alone, splits, strict=True)]
    for fold, (_, test) in enumerate(splits):
        own = held_out[fold] if task == "regression" else temper(held_out, y, [rows for _, rows in splits], fold)
        total = total + spread_over(own, test, 60)
    assert times.max() > 1
    expected = total / np.where(times > 0, times, np.nan).reshape(-1, 1)
    assert np.allclose(found.held_out_["cp"], expected, atol=3e-3 * np.nanstd(expected), equal_nan=True)
    assert ((found.held_out_fold_ >= 0) == (times > 0)).all()
    if task == "regression":
        assert len(found.calibration_.scores) == times.sum()


def test_a_splitter_sees_the_features_and_the_targets():
    class Recorder:
        def split(self, X, y=None, groups=None):
            self.seen = X, y
            yield from KFold(3).split(X)

    X, y = make_data((6, 4), (2,), n=60)
    names = np.where(y[:, 0] > 0, "up", "down")
    for given, targets in (
        (X, y), (torch.from_numpy(X), torch.from_numpy(y)), (X, y[:, 0]), (X, y.reshape(60, 1, 2)), (X, names)
    ):  # fmt: skip
        recorder = Recorder()
        kind = TensorClassifierCV if targets is names else TensorRegressorCV
        fit_quietly(kind(**{**ONE_SETTING, "max_iter": 2, "cv": recorder}), given, targets)
        assert recorder.seen[0] is given
        assert np.array_equal(recorder.seen[1], targets)


def test_a_setting_that_masks_nothing_is_tried_once():
    """Tucker of small ranks: whatever θ is, no rank can be spared."""
    X, y = make_data((6, 4), (2,), n=40)
    found = search(X, y, factorization=("tucker", "cp"), ranks=(2,), thetas=(0.7, 1.0, 0.5), cv=2, max_iter=5)
    settings = [(params["method"], params["theta"]) for params in found.cv_results_["params"] if params["theta"]]
    assert settings == [("tucker", 1.0), ("cp", 0.7), ("cp", 1.0), ("cp", 0.5)]
    alone = search(X, y, factorization="tucker", ranks=(2,), thetas=(0.5,), alphas=(1e-9, 1e-9), cv=2, max_iter=5)
    assert sum(params["theta"] is not None for params in alone.cv_results_["params"]) == 1
    assert alone.theta_ in (None, 1.0)


def test_folds_may_be_masks_of_rows(data):
    X, y = data
    masks = [(np.isin(np.arange(60), train), np.isin(np.arange(60), test)) for train, test in pairs_of(X)]
    compare(search(X, y, cv=masks), search(X, y, cv=pairs_of(X)))


def test_a_grid_of_numpy_is_a_grid_of_numbers(data):
    plain = search(*data, ranks=[1, 2], thetas=[0.5, 1.0], alphas=[0.25], max_iter=3)
    arrays = {"ranks": np.array([1, 2]), "thetas": np.float32([0.5, 1.0]), "alphas": np.float32([0.25])}
    found = search(*data, **arrays, max_iter=3)
    assert repr(found.cv_results_["params"]) == repr(plain.cv_results_["params"])
    compare(found, plain)


def test_equal_seeds_give_equal_searches(data):
    one, same, other = (search(*data, random_state=seed) for seed in (5, 5, 6))
    assert np.array_equal(one.cv_results_["mean_test_score"], same.cv_results_["mean_test_score"])
    assert np.array_equal(one.predict(data[0]), same.predict(data[0]))
    assert not np.array_equal(one.cv_results_["mean_test_score"], other.cv_results_["mean_test_score"])


# Where it runs.


def compare(one, other, tolerance=0.0):
    ours, theirs = one.cv_results_, other.cv_results_
    assert ours["params"] == theirs["params"]
    for key in (key for key in ours if key.endswith("test_score") and not key.startswith("rank")):
        assert np.allclose(ours[key], theirs[key], rtol=tolerance, atol=tolerance), key
    assert one.best_params_ == other.best_params_


def in_one_program(self, candidates, *arguments):
    """As on a GPU."""
    search_in_one_program(candidates, *arguments)


def test_two_processes_find_what_one_does():
    X, y = make_data((6, 4), (2,), n=40)
    weights = np.linspace(0.5, 2, 40)
    one, two = (search(X, y, weights, thetas=(1, 0.8), n_jobs=n_jobs) for n_jobs in (None, 2))
    compare(one, two, 1e-6)
    assert relative(two.predict(X), one.predict(X)) < 1e-6


@pytest.mark.parametrize("kind", ["regression", "missing targets", "several modes", "a table", "classification"])
def test_one_program_finds_what_single_fits_do(kind, monkeypatch):
    """What runs on a GPU, here on a CPU: the same numbers to rounding, which the iterations carry on."""
    X, y = make_data((6, 4), (2,), n=40, dtype=np.float64, noise=1.0)
    settings = {"thetas": (1, 0.7), "alphas": (1e-2, 1e-3), "factorization": ("cp", "tucker"), "max_iter": 8}
    if kind == "classification":
        X, y = make_classes((6, 4), 2, n=40, dtype=np.float64)
    elif kind == "missing targets":
        y[::5, 1] = np.nan
    elif kind == "several modes":
        y = y[:, :, None] * np.array([1.0, 1e3])
    elif kind == "a table":
        X, y = X[:, :, 0] * np.logspace(-3, 3, 6), y + 1e8
    weights = np.linspace(0.5, 2, 40)
    single = search(X, y, weights, **settings)
    programs = []

    def count(self, candidates, *arguments):
        programs.append(len(candidates))
        in_one_program(self, candidates, *arguments)

    monkeypatch.setattr(SearchMixin, "_search_in_processes", count)
    together = search(X, y, weights, **settings)
    assert programs == [6]  # of Tucker's ranks none can be spared: θ is 1
    compare(single, together, 1e-4)
    predict = "predict_proba" if kind == "classification" else "predict"
    ours, theirs = (getattr(model, predict)(X) for model in (together, single))
    assert relative(ours, theirs) < 1e-3


@pytest.mark.parametrize("where", ["between fits", "in a fit"])
def test_an_interruption_stops_the_search(where, monkeypatch, data):
    usual, steps = ExpectedLoss.evaluate, []

    def evaluate(self, *given):
        steps.append(1)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return usual(self, *given)

    def advance(self, count):
        raise KeyboardInterrupt

    if where == "in a fit":  # which keeps its best, unlike a search
        monkeypatch.setattr(ExpectedLoss, "evaluate", evaluate)
    else:
        monkeypatch.setattr(Advance, "__call__", advance)
    model = TensorRegressorCV(**ONE_SETTING)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*data)
    with pytest.raises(NotFittedError):
        model.predict(data[0])


def test_in_batches_it_is_the_same_search_without_flattened_ridge():
    X, y = make_data((8, 6, 5), (2,), n=60, dtype=np.float64, noise=1.0)
    weights = np.linspace(0.5, 2, 60)
    settings = {"thetas": (0.8,), "max_iter": 20}
    whole = search(X, y, weights, **settings)
    parts = search(X, y, weights, batch_size=17, n_jobs=2, **settings)
    assert {params["method"] for params in parts.cv_results_["params"]} == {"cp", "pooled ridge"}
    for method in ("cp", "pooled ridge"):
        ours, theirs = (each.cv_results_["mean_test_score"][rows_of(each, method)] for each in (parts, whole))
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert whole.method_ == parts.method_ == "cp"
    assert relative(parts.predict(X), whole.predict(X)) < 1e-3


def test_rows_in_batches_are_marked_where_the_features_are():
    """As on a GPU: what does not say its device is made elsewhere."""
    x, y = (torch.from_numpy(each) for each in make_data((6, 4), (2,), n=20))
    weights = torch.linspace(0.5, 2, 20, dtype=torch.float64)
    shared = Search("regression", 0, 3, 0.1, True, "auto", "bernoulli", 6)
    for given in (None, weights):
        with torch.device("meta"):
            assert fit_layers([], [], x, y, given, (np.arange(12), np.arange(12, 20)), shared) == []


# Weights and missing targets.


def test_rows_of_weight_zero_are_not_looked_at(data):
    X, y = data
    weights = np.ones(60)
    weights[::4] = 0
    seen = weights > 0
    spoilt, wrong = X.copy(), y.copy()
    spoilt[~seen], wrong[~seen] = 50.0, -900.0
    pairs = pairs_of(X)
    numbers = np.cumsum(seen) - 1
    kept = [(numbers[train[seen[train]]], numbers[test[seen[test]]]) for train, test in pairs]
    weighted = search(spoilt, wrong, weights, cv=pairs)
    absent = search(X[seen], y[seen], cv=kept)
    compare(weighted, absent, 1e-3)
    assert relative(weighted.predict(X), absent.predict(X)) < 1e-3
    assert np.allclose(weighted.calibration_.noise, absent.calibration_.noise, rtol=1e-3)
    assert len(weighted.calibration_.scores) == seen.sum()


def test_a_weight_of_two_is_a_row_twice():
    X, y = make_data((5, 4), (2,), n=30, dtype=np.float64, noise=1.0)
    weights = np.random.default_rng(1).integers(1, 4, 30)
    pairs = pairs_of(X)
    numbers = np.split(np.arange(weights.sum()), np.cumsum(weights)[:-1])
    repeated_pairs = [tuple(np.concatenate([numbers[k] for k in rows]) for rows in pair) for pair in pairs]
    weighted = search(X, y, weights, cv=pairs)
    repeated = search(X.repeat(weights, 0), y.repeat(weights, 0), cv=repeated_pairs)
    plain = search(X, y, cv=pairs)
    compare(weighted, repeated, 1e-3)
    scores = [each.cv_results_["mean_test_score"] for each in (plain, repeated)]
    assert np.abs(scores[0] - scores[1]).max() > 0.01


def test_missing_targets_leave_ridge_out_and_the_rows_in():
    X, y = make_data((6, 4), (3,), n=60, noise=1.0)
    holes = y.copy()
    holes[::2, 0] = np.nan
    model = search(X, holes)
    assert {params["method"] for params in model.cv_results_["params"]} == {"cp"}
    assert np.isfinite(model.cv_results_["mean_test_score"]).all()
    assert model.best_score_ > 0.5
    train, test = next(KFold(3, shuffle=True, random_state=model._seed() % 2**31).split(X))
    alone = fit_quietly(TensorRegressor(theta=0.8, alpha=1e-3, **QUICK), X[train], holes[train])
    expected = skill(holes, alone.predict(X[test]), test)
    assert model.cv_results_["split0_test_score"][0] == pytest.approx(expected, rel=1e-4)
    assert model.calibration_.scores.isnan().sum() == 30
    assert model.calibration_.noise.isfinite().all()
    low, high = model.predict_interval(X)
    assert ((low <= y) & (y <= high)).mean() > 0.8


# Classification.


def test_classes_are_judged_by_the_brier_score():
    X, y = make_classes((6, 4), n=60, dtype=np.float64)
    names = np.array(["kite", "ant", "bee"])[y]
    pairs = pairs_of(X)
    model = search(X, names, cv=pairs)
    assert model.classes_.tolist() == ["ant", "bee", "kite"]
    params = model.cv_results_["params"][0]
    assert params["method"] == "cp"
    train, test = pairs[0]
    alone = TensorClassifier(**{key: params[key] for key in ("rank", "theta", "alpha")}, **QUICK)
    probabilities = fit_quietly(alone, X[train], names[train]).predict_proba(X[test])
    score = 1 - ((probabilities - (names[test, None] == model.classes_)) ** 2).sum(1).mean()
    assert model.cv_results_["split0_test_score"][0] == pytest.approx(score, rel=1e-6)


def test_ridge_on_classes_gives_probabilities():
    rng = np.random.default_rng(1)
    X = rng.normal(size=(90, 5, 5, 4)).astype(np.float32)
    y = (X.mean((2, 3)) @ rng.normal(size=(5, 3)) + 0.3 * rng.normal(size=(90, 3))).argmax(1)
    model = search(X, y, alphas=(1.0,))  # so much that the tensors know nothing
    assert model.method_ == "pooled ridge"
    probabilities = model.predict_proba(X)
    assert np.allclose(probabilities.sum(1), 1, atol=1e-5)
    assert probabilities.min() > 0
    assert np.array_equal(model.predict(X), probabilities.argmax(1))
    assert np.allclose(model.predict_log_proba(X), np.log(probabilities), atol=1e-5)
    assert model.score(X, y) > 0.5
    held_out = model.held_out_["pooled ridge"]
    assert np.allclose(held_out.sum(1), 1, atol=1e-5)
    assert 0.5 < (held_out.argmax(1) == y).mean() <= model.score(X, y)


def test_weights_of_classes_count_in_the_search():
    X, y = make_classes((5, 4), 2, n=60)
    y = ((y == 1) & (np.arange(60) % 3 == 0)).astype(int)
    by_class = search(X, y, class_weight={0: 1, 1: 4})
    by_sample = search(X, y, np.where(y == 1, 4.0, 1.0))
    compare(by_class, by_sample)
    assert not np.allclose(search(X, y).cv_results_["mean_test_score"], by_class.cv_results_["mean_test_score"])


# Intervals.


def test_the_folds_calibrate_the_intervals():
    X, y = make_data((6, 4), (2,), n=240, noise=3.0)
    model = search(X[:120], y[:120], cv=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean, std = model.predict(X[120:], return_std=True)
    low, high = model.predict_interval(X[120:], coverage=0.8)
    assert 0.68 < ((low <= y[120:]) & (y[120:] <= high)).mean() < 0.92
    assert 0.5 < ((mean - y[120:]) ** 2).mean() / (std**2).mean() < 2
    assert model.calibration_.scores.shape == (120, 2)


# The picture.


@pytest.mark.parametrize("several", [False, True])
def test_a_picture_is_drawn_and_written(several, found, data, tmp_path):
    model = found if several else search(*data)
    path = tmp_path / "search.png"
    figure = model.plot(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(figure.axes) == (2 if several else 1)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    assert {"flattened ridge", "pooled ridge"} <= set(lines)
    errors = 1 - model.cv_results_["mean_test_score"]
    assert lines["pooled ridge"].get_ydata()[0] == pytest.approx(errors[rows_of(model, "pooled ridge")].min())
    line = lines["cp θ = 0.8" if several else "θ = 0.8"]
    best = [
        min(errors[k] for k in rows_of(model, "cp") if model.cv_results_["params"][k]["alpha"] == alpha
            and model.cv_results_["params"][k]["theta"] == 0.8)
        for alpha in line.get_xdata()
    ]  # fmt: skip
    assert line.get_ydata() == pytest.approx(best)


def test_a_picture_of_ridge_alone_is_drawn():
    assert len(search(*make_data((7,), (), n=30)).plot().axes) == 1


def test_a_picture_needs_a_fit():
    with pytest.raises(NotFittedError):
        TensorRegressorCV().plot()


# In scikit-learn.


def test_groups_are_routed_through_scikit_learn():
    X, y, groups = of_groups()
    with sklearn.config_context(enable_metadata_routing=True):
        routed = TensorRegressorCV(**ONE_SETTING).set_fit_request(groups=True)
        scores = cross_validate(routed, X, y, cv=GroupKFold(2), params={"groups": groups}, return_estimator=True)
        piped = make_pipeline(FunctionTransformer(), routed).fit(X, y, groups=groups)
    for inner in (*scores["estimator"], piped[-1]):
        assert inner.cv_results_["mean_test_score"].max() < 0.3  # it knew of the groups, or it would be near 1


def test_held_out_predictions_of_a_search():
    X, y = make_data((6, 4), (2,), n=40)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        predicted = cross_val_predict(TensorRegressorCV(**ONE_SETTING), X, y, cv=2)
        scores = cross_val_score(TensorRegressorCV(**ONE_SETTING), X, y, cv=2, scoring="r2")
    assert predicted.shape == y.shape
    assert 1 - ((predicted - y) ** 2).mean() / y.var() > 0.5
    assert scores.min() > 0.3


def test_scikit_learns_search_takes_a_scorer_by_name_for_several_targets():
    X, y = make_data((6, 4), (3,), n=40)
    grid = {"theta": [0.5, 1.0], "rank": [1, 3]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = GridSearchCV(TensorRegressor(**SMALL), grid, cv=2, scoring="neg_mean_absolute_error").fit(X, y)
    scores = model.cv_results_["mean_test_score"]
    assert np.isfinite(scores).all()
    assert (scores < 0).all()
    assert model.best_params_["rank"] == 3  # the targets are of rank two
    assert model.predict(X).shape == y.shape
    assert model.score(X, y) == pytest.approx(-np.abs(model.predict(X) - y).mean(), rel=1e-5)


@pytest.mark.parametrize("kind", [TensorRegressorCV, TensorClassifierCV])
def test_what_did_not_converge_names_the_remedy(kind):
    X, y = make_data((6, 4), (2,)) if kind is TensorRegressorCV else make_classes((6, 4))
    if kind is TensorRegressorCV:
        y[0, 0] = np.nan  # ridge, which would win, takes no missing targets
    with pytest.warns(ConvergenceWarning, match=f"{kind.__name__}: not converged after max_iter=2") as caught:
        kind(**{**ONE_SETTING, "max_iter": 2}).fit(X, y)
    assert len(caught) == 1  # of the last fit, not of every fold


# Bad input: one clear sentence each.

X, Y = make_data((4, 3), (2,), n=12)
CLASSES = np.arange(12) % 2
BAD_SETTINGS = {
    "no thetas": ({"thetas": ()}, "thetas is a sequence of at least one value, got ()"),
    "one theta": ({"thetas": 0.5}, "thetas is a sequence of at least one value, got 0.5"),
    "theta of zero": ({"thetas": (1, 0)}, "each of thetas is a number"),
    "theta in words": ({"thetas": ("much",)}, "each of thetas is a number"),
    "thetas in words": ({"thetas": "many"}, "thetas is a sequence"),
    "no alphas": ({"alphas": []}, "alphas is a sequence of at least one value, got []"),
    "alphas in words": ({"alphas": "many"}, "alphas is a sequence"),
    "negative alpha": ({"alphas": (-1.0,)}, "each of alphas is a number of at least 0, got -1.0"),
    "infinite alpha": ({"alphas": (float("inf"),)}, "each of alphas is a number"),
    "one rank": ({"ranks": 3}, "ranks is a sequence of at least one value, got 3"),
    "rank too large": ({"ranks": (1000,)}, "rank"),
    "rank in words": ({"ranks": ("big",)}, "rank"),
    "factorization": ({"factorization": "svd"}, "factorization is one of"),
    "something among the factorizations": ({"factorization": ("cp", 3)}, "factorization is a name, or several"),
    "one of the factorizations": ({"factorization": ("cp", "svd")}, "factorization is one of"),
    "no factorization": ({"factorization": ()}, "factorization is a sequence"),
    "factorization of another type": ({"factorization": 3}, "factorization is a sequence of at least one value, got 3"),
    "one fold": ({"cv": 1}, "cv is a number of at least 2, got 1"),
    "too many folds": ({"cv": 13}, "cv=13 folds need as many rows, got 12 (n_samples=12); lower cv"),
    "folds in words": ({"cv": "many"}, "cv is a number of folds or a splitter, got 'many'"),
    "half a fold": ({"cv": 2.5}, "cv is a number of folds or a splitter, got 2.5"),
    "no folds": ({"cv": None}, "cv is a number of folds or a splitter, got None"),
    "an empty list of folds": ({"cv": []}, "leaves a fold empty"),
    "a fold without rows": ({"cv": [(np.arange(12), np.arange(0))]}, "leaves a fold empty"),
    "solver": ({"solver": "sgd"}, "solver is 'auto'"),
    "law": ({"law": "coin"}, "unknown law 'coin'"),
    "modes": ({"factorization": "tucker", "modes": (7,)}, "modes=(7,)"),
    "channel axis": ({"channel_axis": 3}, "channel_axis=3, but X has the axes 0 to 2"),
    "no iterations": ({"max_iter": 0}, "max_iter is a number of at least 1"),
    "empty batches": ({"batch_size": 0}, "batch_size is a number of at least 1, got 0"),
    "no device": ({"device": "toaster"}, "device='toaster' cannot be used"),
}
BAD_DATA = {
    "another n": ((X, Y[:-1]), {}, "X has 12 rows, y has 11"),
    "groups of another n": ((X, Y), {"groups": np.arange(11)}, "groups has one entry per row of X, (12,), got (11,)"),
    "groups in two columns": ((X, Y), {"groups": np.ones((12, 2))}, "groups has one entry per row"),
    "a group that is missing": (
        (X, Y),
        {"groups": np.array([None, *"ababcabcabc"], dtype=object)},
        "groups holds None",
    ),
    "a group that is no number": ((X, Y), {"groups": np.r_[np.nan, np.arange(11)]}, "groups holds nan"),
    "groups of several kinds": (
        (X, Y),
        {"groups": np.array([1, *"ababcabcabc"], dtype=object)},
        "groups mixes int, str; give all groups names, or all numbers",
    ),
    "targets that vary where nothing counts": (
        (X, np.r_[np.ones(6), np.arange(6.0)], np.r_[np.ones(6), np.zeros(6)]),
        {},
        "the target is constant in all rows of positive weight",
    ),
    "one row that counts to fit on": (
        (X, Y, np.r_[np.zeros(9), np.ones(3)]),
        {"cv": [(np.arange(10), np.arange(10, 12))]},
        "sample_weight",
    ),
    "too few groups": ((X, Y), {"groups": np.arange(12) % 2}, "cv=3 folds need as many groups, got 2"),
    "constant y": ((X, np.ones(12)), {}, "the target is constant"),
    "weights that leave a fold empty": ((X, Y, np.r_[1.0, 1.0, np.zeros(10)]), {}, "0 in all rows of a fold"),
    "a number with a hole": ((X[:, 0, :1], np.r_[np.nan, np.arange(11.0)]), {}, "no target at all in 1 rows"),
    "rare classes": ((X, np.r_[0, 0, np.ones(10, int)]), {}, "the smallest class has 2; lower cv, or merge classes"),
    "one feature and holes": (
        (X[:, 0, :1], np.where(np.arange(24).reshape(12, 2) == 3, np.nan, Y)),
        {},
        "leave ridge alone, which takes no missing targets; leave those rows out",
    ),
    "one class": ((X, np.ones(12, int)), {}, "at least 2 classes"),
}


def refuse(model, data, arguments, message):
    with pytest.raises(td.TensorDropoutError, match=re.escape(message)) as caught:
        model.fit(*data, **arguments)
    assert_one_sentence(caught)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_refused_in_a_sentence(case):
    settings, message = BAD_SETTINGS[case]
    refuse(TensorRegressorCV(**{**ONE_SETTING, **settings}), (X, Y), {}, message)


ROWS = np.arange(12)
BAD_FOLDS = {
    "no pairs": ([1, 2, 3], "cv holds pairs of row numbers, (train, test), got int as fold 0"),
    "three parts": ([(ROWS, ROWS, ROWS)], "cv holds pairs of row numbers"),
    "ragged rows": ([([[1, 2], [3]], ROWS)], "cv holds pairs of row numbers"),
    "no such row": ([(ROWS[:11], np.array([12]))], "fold 0 of cv names row 12, but X has the rows 0 to 11"),
    "a row from behind": ([(ROWS[:11], np.array([11])), (ROWS[:11], np.array([-1]))], "fold 1 of cv names row -1"),
    "rows in halves": ([(ROWS / 2, ROWS)], "cv holds pairs of row numbers"),
    "a mask of another n": ([(np.ones(11, bool), np.ones(11, bool))], "fold 0 of cv is a mask of (11,)"),
    "one row to fit on": ([(ROWS[:1], ROWS[1:])], "leaves a fold empty"),
}


@pytest.mark.parametrize("case", BAD_FOLDS)
def test_bad_folds_are_refused_in_a_sentence(case):
    cv, message = BAD_FOLDS[case]
    refuse(TensorRegressorCV(**{**ONE_SETTING, "cv": cv}), (X, Y), {}, message)


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused_in_a_sentence(case):
    data, arguments, message = BAD_DATA[case]
    of_classes = np.asarray(data[1]).dtype.kind == "i"
    settings = {**ONE_SETTING, **{key: arguments[key] for key in arguments if key == "cv"}}
    arguments = {key: arguments[key] for key in arguments if key != "cv"}
    refuse((TensorClassifierCV if of_classes else TensorRegressorCV)(**settings), data, arguments, message)


def test_bad_folds_of_classes_are_refused_in_a_sentence():
    refuse(TensorClassifierCV(**{**ONE_SETTING, "cv": 7}), (X, CLASSES), {}, "the smallest class has 6; lower cv")
