"""Fitted estimators in files and in pickles: they come back as they were, and nothing else can come out of a file."""

from __future__ import annotations

import json
import pickle
import warnings
from functools import cache

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.base import clone
from sklearn.model_selection import KFold

import tensor_dropout as td
from estimators_under_test import SMALL, fit_quietly, make_classes, make_data
from tensor_dropout.calibration.classification import ClassCalibration
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout.sklearn import TensorClassifier, TensorClassifierCV, TensorRegressor, TensorRegressorCV
from tensor_dropout.sklearn.held_out import CrossFit

QUICK = {"max_iter": 5, "random_state": 0}
SEARCH = {"thetas": (0.8,), "alphas": (1e-3,), "cv": 2, **QUICK}
NAMES = np.array(["kite", "ant", "bee"])


def of_channels(outputs=(2,), n=50):
    """Targets of the mean of each channel alone, which pooled ridge finds."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(n, 5, 5, 4)).astype(np.float32)
    y = np.tensordot(X.mean((2, 3)), rng.normal(size=(5, *outputs)), 1)
    return X, (y + 0.1 * rng.normal(size=y.shape)).astype(np.float32)


def of_numbers(outputs=(2, 2), n=150):
    """Targets of a weight without structure, which flattened ridge finds."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 4, 3, 2))
    return X, np.tensordot(X, rng.normal(size=(4, 3, 2, *outputs)), 3)


def classes_of(X, y):
    return X, NAMES[((y - y.mean(0)) / y.std(0)).argmax(1)]


def of_layer():
    X, _ = make_data((3, 4, 5))
    with torch.random.fork_rng():
        layer = td.CPRegression((5, 3, 4), 2, rank=4, dropout=0.8)
    return TensorRegressor.from_layer(layer, channel_axis=-1), X


def merged():
    X, y = make_data((3, 4, 5))
    model = fit_quietly(TensorRegressor(channel_axis=-1, **SMALL), X, y)
    model.layer_ = torch.nn.Sequential(model.layer_)
    td.merge_(model.layer_)
    model.layer_.eval()
    return model, X


def fit(model, X, y):
    return fit_quietly(model, X, y), X


MADE = {
    "regressor, calibrated, channels last, y of two modes": lambda: fit(
        TensorRegressor(channel_axis=-1, calibrate=2, **SMALL), *make_data((3, 4, 5), (2, 2))
    ),
    "regressor, tucker of float64, one number": lambda: fit(
        TensorRegressor("tucker", device=torch.device("cpu"), **QUICK), *make_data((9, 4), (), dtype=np.float64)
    ),
    "regressor, tt, gaussian": lambda: fit(TensorRegressor("tt", law="gaussian", modes=(1,), **QUICK), *make_data()),
    "regressor, ring without dropout": lambda: fit(TensorRegressor("ring", theta=1, **QUICK), *make_data()),
    "regressor, ridge": lambda: fit(TensorRegressor(calibrate=2), *make_data((7,), ())),
    "regressor, of a layer": of_layer,
    "regressor, merged": merged,
    "classifier, words": lambda: fit(
        TensorClassifier(channel_axis=2, class_weight="balanced", **QUICK), *classes_of(*make_data((4, 5, 3), (3,)))
    ),
    "classifier, weights by class": lambda: fit(
        TensorClassifier(class_weight={0: 1.0, 1: 2.0}, **QUICK), *make_classes((6,), 2)
    ),
    "regressor search, cp": lambda: fit(
        TensorRegressorCV(("cp", "tt"), ranks=("auto", 2), **{**SEARCH, "max_iter": 40}), *make_data((8, 6, 5), n=80)
    ),
    "regressor search, pooled ridge, channels last": lambda: fit(
        TensorRegressorCV(channel_axis=-1, **SEARCH), np.moveaxis(of_channels()[0], 1, -1), of_channels()[1]
    ),
    "regressor search, flattened ridge, y of two modes": lambda: fit(
        TensorRegressorCV(ranks=[2], **SEARCH), *of_numbers()
    ),
    "classifier search, cp": lambda: fit(
        TensorClassifierCV(**{**SEARCH, "alphas": (1e-2,), "max_iter": 40}),
        *classes_of(*make_data((8, 6, 5), (3,), n=80)),
    ),
    "classifier search, pooled ridge": lambda: fit(
        TensorClassifierCV(**{**SEARCH, "alphas": (1.0,)}), *classes_of(*of_channels((3,)))
    ),
}
make = cache(lambda name: MADE[name]())
every_estimator = pytest.mark.parametrize("name", MADE)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "estimator.safetensors"


def alike(a, b):
    """Whether two values are the same, types and all."""
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, np.ndarray):
        same = type(b) is np.ndarray and a.dtype == b.dtype and a.shape == b.shape
        return same and all(x == y or (x != x and y != y) for x, y in zip(a.ravel(), b.ravel(), strict=True))
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and alike(a.numpy(), b.numpy())
    if isinstance(a, torch.nn.Module):
        return str(a) == str(b) and all(map(alike, a.state_dict().values(), b.state_dict().values()))
    if isinstance(a, Calibration | ClassCalibration | CrossFit):
        return type(a) is type(b) and alike(vars(a), vars(b))
    return type(a) is type(b) and a == b


def check_same(model, other, X):
    """Settings, everything that the fit set, and every prediction."""
    assert type(other) is type(model)
    assert alike(other.get_params(), model.get_params())
    ours, theirs = vars(model), vars(other)
    assert set(ours) == set(theirs)
    for name in set(ours) - {"layer_"}:
        assert alike(theirs[name], ours[name]), name
    assert str(other.layer_) == str(model.layer_)
    assert not any(module.training for each in (model, other) for module in each.layer_.modules())
    assert np.array_equal(other.predict(X), model.predict(X))
    assert other.predict(X).dtype == model.predict(X).dtype
    assert np.array_equal(other.coef_, model.coef_)
    assert np.array_equal(other.intercept_, model.intercept_)
    if hasattr(model, "predict_proba"):
        assert np.array_equal(other.predict_proba(X), model.predict_proba(X))
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not calibrated
        for mine, its in zip(model.predict(X, return_std=True), other.predict(X, return_std=True), strict=True):
            assert np.array_equal(its, mine)
    if model.calibration_ is not None:
        for method in ("held-out", *(["cross"] if model.cross_fits_ else [])):
            ours, theirs = (each.predict_interval(X, method=method) for each in (model, other))
            for mine, its in zip(ours, theirs, strict=True):
                assert np.array_equal(its, mine)


# There and back.


@every_estimator
def test_what_is_loaded_is_what_was_saved(name, path):
    model, X = make(name)
    td.save(model, path)
    loaded = td.load(path)
    check_same(model, loaded, X)
    td.save(loaded, path)
    check_same(model, td.load(path), X)


@every_estimator
def test_what_is_unpickled_is_what_was_pickled(name):
    model, X = make(name)
    check_same(model, pickle.loads(pickle.dumps(model)), X)


@pytest.mark.parametrize("name", [name for name in MADE if "search" in name])
def test_the_winner_is_the_one_that_the_case_is_named_after(name):
    assert make(name)[0].method_ in name


@every_estimator
def test_a_clone_of_what_was_loaded_has_its_settings_alone(name, path):
    model, _ = make(name)
    td.save(model, path)
    fresh = clone(td.load(path))
    assert alike(fresh.get_params(), model.get_params())
    assert not hasattr(fresh, "layer_")
    assert not hasattr(fresh, "n_features_in_")


def test_what_was_loaded_is_fitted_again_alike(path):
    X, y = make_data((6, 4))
    model = fit_quietly(TensorRegressor(**SMALL), X, y)
    td.save(model, path)
    check_same(model, fit_quietly(td.load(path), X, y), X)


def test_numbers_of_numpy_and_laws_are_loaded_as_plain_values(path):
    X, y = make_data((6, 4))
    law = td.TensorDropout(0.7, law="gaussian").law
    model = fit_quietly(TensorRegressor(theta=np.float64(0.7), law=law, **SMALL), X, y)
    td.save(model, path)
    loaded = td.load(path)
    assert (loaded.theta, loaded.law) == (0.7, "gaussian")
    assert np.array_equal(loaded.predict(X), model.predict(X))
    again = fit_quietly(loaded, X, y)
    assert np.array_equal(again.predict(X), model.predict(X))


@pytest.mark.parametrize("name", ["regressor, tt, gaussian", "regressor search, flattened ridge, y of two modes"])
def test_the_network_of_an_estimator_predicts_as_it_does(name):
    model, X = make(name)
    with torch.no_grad():
        found = model.as_network()(torch.from_numpy(X))
    assert np.array_equal(found.numpy(), model.predict(X))


def test_a_search_that_was_loaded_draws_its_picture(path):
    model, _ = make("regressor search, cp")
    td.save(model, path)
    figure = td.load(path).plot()
    lines = [[list(line.get_ydata()) for line in each.axes[0].get_lines()] for each in (figure, model.plot())]
    assert lines[0] == lines[1]


def test_names_of_features_are_kept(path):
    X, y = make_data((4,), (2,))
    model = fit_quietly(TensorRegressor(**QUICK), X, y)
    model.feature_names_in_ = np.array(["a", "ä", "c c", "d"], dtype=object)  # as a data frame leaves them
    td.save(model, path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that X has no names
        check_same(model, td.load(path), X)


@pytest.mark.parametrize(
    ("settings", "name", "default"),
    [({"cv": KFold(2)}, "cv", 5), ({"random_state": np.random.RandomState(0)}, "random_state", None)],
    ids=["splitter", "RandomState"],
)
def test_a_setting_that_is_no_plain_value_is_left_out_with_a_warning(settings, name, default, path):
    X, y = make_data((6, 4))
    model = fit_quietly(TensorRegressorCV(**{**SEARCH, **settings}), X, y)
    with pytest.warns(UserWarning, match=f"TensorRegressorCV's {name} is a .*the default {name}={default}") as caught:
        td.save(model, path)
    assert caught[0].filename == __file__
    loaded = td.load(path)
    assert getattr(loaded, name) == default
    assert np.array_equal(loaded.predict(X), model.predict(X))


# What is refused.


class Own(TensorRegressor):
    pass


class OwnModule(torch.nn.Flatten):
    pass


def with_module(module):
    model = fit_quietly(TensorRegressor(**SMALL), *make_data((6, 4)))
    model.layer_ = torch.nn.Sequential(module, model.layer_)
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (TensorRegressor, "this TensorRegressor is not fitted yet; call fit first"),
        (lambda: fit_quietly(Own(**SMALL), *make_data((6, 4))), "Own is a class of your own"),
        (lambda: with_module(OwnModule()), "layer_ holds a OwnModule, which td.load could not make anew"),
        (lambda: TensorRegressor, "got the class TensorRegressor"),
    ],
    ids=["not fitted", "a subclass", "a module of one's own", "the class itself"],
)
def test_what_could_not_be_loaded_is_not_saved(make, message, path):
    with pytest.raises(td.TensorDropoutError, match=message):
        td.save(make(), path)
    assert not path.exists()


def test_an_attribute_that_is_no_plain_value_is_not_saved(path):
    model = fit_quietly(TensorRegressor(**SMALL), *make_data((6, 4)))
    model.notes_ = object()
    with pytest.raises(td.TensorDropoutError, match="TensorRegressor's notes_ cannot be written: a object is no plain"):
        td.save(model, path)


def test_an_estimator_is_not_a_model_to_fill(path):
    model, _ = make("regressor, tt, gaussian")
    td.save(model, path)
    with pytest.raises(td.TensorDropoutError, match="an estimator is made by load"):
        td.load(path, model)


def tamper(path, change):
    """Rewrite a file with other settings of its network."""
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["tensor_dropout"])
    change(config["net"])
    save_file(load_file(path), path, {"tensor_dropout": json.dumps(config)})


def put(kind, name, value):
    """A change that adds or replaces a setting or a fitted attribute."""

    def change(net):
        pairs = [pair for pair in net[kind]["dict"] if pair[0] != name]
        net[kind]["dict"] = [*pairs, [name, value]]

    return change


def setting(*keys_and_value):
    """A change of one entry of the network's settings."""
    *keys, last, value = keys_and_value

    def change(net):
        for key in keys:
            net = net[key]
        net[last] = value

    return change


CHANGES = {
    "a class that is no estimator": setting("class", "Popen"),
    "a class by its module": setting("class", "subprocess.Popen"),
    "scikit-learn's own": setting("class", "Ridge"),
    "another estimator": setting("class", "TensorClassifier"),
    "the search of it": setting("class", "TensorRegressorCV"),
    "no class": setting("class", None),
    "a list as class": setting("class", ["TensorRegressor"]),
    "another builder": setting("builder", "os"),
    "a setting that there is not": put("settings", "run", "rm"),
    "a method": put("fitted", "predict", "mine"),
    "the class of the object": put("fitted", "__class__", "mine"),
    "its dictionary": put("fitted", "__dict__", {"dict": []}),
    "what is private": put("fitted", "_moments_", 1),
    "a setting among what was fitted": put("fitted", "theta", 0.1),
    "a property": put("fitted", "coef_", 1.0),
    "a name that is none": put("fitted", "a b_", 1.0),
    "a name that is a number": put("fitted", 3, 1.0),
    "a value of an unknown kind": put("fitted", "alpha_", {"pickle": "gASVAAAA"}),
    "an array that is not there": put("fitted", "alpha_", {"array": "array99"}),
    "a device that there is not": put("settings", "device", {"device": "toaster"}),
    "a module that is none": setting("layer", "type", "Popen"),
    "a module of torch that is not listed": setting("layer", "type", "LSTM"),
    "a module without a type": setting("layer", {}),
    "another shape of the layer": setting("layer", "input_shape", [6, 5]),
    "another dropout": setting("layer", "dropout", {"theta": 5}),
    "a dropout that is none": setting("layer", "dropout", "half"),
    "a shape in words": setting("layer", "input_shape", "all"),
    "arrays of no number type": setting("arrays", {"array0": [[2], "nn"]}),
    "arrays of no shape": setting("arrays", {"array0": ["many", "float32"]}),
    "no arrays": setting("arrays", {}),
    "settings that are a list": setting("settings", [1, 2]),
    "nothing fitted": setting("fitted", None),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_file_that_was_tampered_with_is_refused(case, path):
    model, _ = make("regressor, tt, gaussian")
    calibrated = fit_quietly(TensorRegressor(calibrate=2, max_iter=2), *make_data((6, 4)))
    td.save(calibrated if "array" in case else model, path)
    td.load(path)
    tamper(path, CHANGES[case])
    with pytest.raises(td.TensorDropoutError) as caught:
        td.load(path)
    assert "\n" not in str(caught.value)


def test_nothing_is_unpickled_or_imported(path, monkeypatch):
    model, X = make("regressor search, cp")
    td.save(model, path)

    def forbid(*_, **__):
        raise AssertionError("a file was unpickled")

    for place, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(place, name, forbid)
    assert np.array_equal(td.load(path).predict(X), model.predict(X))
