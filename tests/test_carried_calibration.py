"""A calibration goes with the network: from an estimator to its attached head, to a file and back, or it is refused."""

from __future__ import annotations

import copy
import json
import math
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import nn

import tensor_dropout as td
from tensor_dropout.calibration.model import carried_calibration
from tensor_dropout.sklearn import FeatureMaps, TensorClassifier, TensorClassifierCV, TensorRegressor, TensorRegressorCV

QUICK = {"rank": 3, "max_iter": 8, "random_state": 0}
SEARCH = {"ranks": (3,), "thetas": (0.7,), "alphas": (1e-3,), "cv": 3, "max_iter": 8, "random_state": 0}
OTHER = r"predict: this calibration was made for other weights: of another network, or \w+ was trained or conv"
N, SEEN = 60, 40


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@cache
def make_maps():
    """A network, pictures for it, and their maps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(45, 2)).eval()
    x = torch.from_numpy(draw(N, 3, 8, 8))
    maps = FeatureMaps(network, "1", verbose=False)
    return maps, x, maps.fit_transform(x)


def of_rows(features):
    steps = np.diff(features, axis=3)[:, 1, 2].sum(1)
    return np.stack([steps, -steps], 1) + 0.3 * draw(len(features), 2, seed=1)


def of_means(features):
    return features.mean((2, 3)) @ draw(features.shape[1], 2) + 0.01 * draw(len(features), 2, seed=1)


def of_classes(features):
    return np.array(["ant", "bee", "kite"])[(features.mean((2, 3)) + 0.1 * draw(N, 5, seed=2))[:, :3].argmax(1)]


# Estimators, their targets, and the share of the variance that is made to grow with the leverage.
ESTIMATORS = {
    "cp, two outputs": (TensorRegressor(calibrate=4, **QUICK), of_rows, 0.6),
    "alike for all": (TensorRegressor(calibrate=4, **QUICK), of_rows, 0.0),
    "without dropout": (TensorRegressor(calibrate=4, theta=1.0, **QUICK), of_rows, 0.6),
    "y of one axis": (TensorRegressor(calibrate=4, **QUICK), lambda features: of_rows(features)[:, 0], 0.6),
    "y of three axes": (TensorRegressor("tt", calibrate=4, rank=2, max_iter=8, random_state=0), None, 0.6),
    "channels elsewhere": (TensorRegressor("tucker", channel_axis=2, calibrate=4, **QUICK), of_rows, 0.6),
    "a search": (TensorRegressorCV(**SEARCH), of_rows, None),
    "a search that ridge won": (TensorRegressorCV(**SEARCH), of_means, None),
    "classes": (TensorClassifier(calibrate=4, **QUICK), of_classes, None),
    "a search of classes": (TensorClassifierCV(**SEARCH), of_classes, None),
}


@cache
def fit(name):
    estimator, make_targets, share = ESTIMATORS[name]
    features = make_maps()[2]
    y = draw(N, 2, 3) if make_targets is None else make_targets(features)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = estimator.fit(features, y)
    if share is not None:
        model.calibration_ = replace(model.calibration_, share=share)
    return model


def assert_close(found, expected):
    found, expected = (torch.as_tensor(each) for each in (found, expected))
    torch.testing.assert_close(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-5)


def assert_same_statements(headed, model, coverage=0.8, **options):
    """What the network says of pictures is what the estimator says of their maps."""
    _, x, features = make_maps()
    found = td.predict(headed, x[:SEEN], coverage=coverage, **options)
    if hasattr(model, "classes_"):
        assert torch.equal(found.sets, torch.from_numpy(model.predict_set(features[:SEEN], coverage)))
        assert_close(found.probs, model.predict_proba(features[:SEEN]))
    else:
        for end, expected in zip(
            (found.low, found.high), model.predict_interval(features[:SEEN], coverage), strict=True
        ):
            assert_close(end, expected)
    return found


@pytest.mark.parametrize("name", ESTIMATORS)
def test_an_attached_head_says_what_its_estimator_said(name):
    model = fit(name)
    headed = td.attach_head(make_maps()[0], model)
    found = assert_same_statements(headed, model)
    if found.low is not None and ESTIMATORS[name][2]:
        widths = (found.high - found.low).flatten(1)
        assert (widths.amax(0) > 1.01 * widths.amin(0)).all()  # the leverage is used


def test_a_search_was_won_by_ridge_and_one_by_a_tensor():
    assert "ridge" in fit("a search that ridge won").method_
    assert fit("a search").method_ == "cp"


@pytest.mark.parametrize("mode", ["exact", "sample"])
def test_whatever_the_mode(mode):
    model = fit("cp, two outputs")
    headed = td.attach_head(make_maps()[0], model)
    x = make_maps()[1][:SEEN]
    plain = td.predict(headed, x, task="regression")
    found = td.predict(headed, x, mode=mode, coverage=0.8)
    assert found.std is not None
    expected = td.predict(headed, x, coverage=0.8)
    assert_close(found.high - found.low, expected.high - expected.low)
    assert (mode == "sample") or torch.allclose(found.mean, plain.mean, atol=1e-5)


def test_the_network_runs_once():
    headed = td.attach_head(make_maps()[0], fit("cp, two outputs"))
    calls = []
    headed.backbone.register_forward_hook(lambda *_: calls.append(1))
    td.predict(headed, make_maps()[1][:4], mode="exact", coverage=0.8)
    assert calls == [1]
    assert not headed.head._forward_pre_hooks


def test_wrapped_networks_are_looked_through():
    model = fit("cp, two outputs")
    assert_same_statements(torch.compile(td.attach_head(make_maps()[0], model), backend="eager"), model)


def test_several_threads_do_not_mix_their_samples():
    from concurrent.futures import ThreadPoolExecutor

    headed, x = td.attach_head(make_maps()[0], fit("cp, two outputs")), make_maps()[1]
    alone = [td.predict(headed, x[k : k + 5 + k], coverage=0.8).high for k in range(8)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda k: td.predict(headed, x[k : k + 5 + k], coverage=0.8).high, range(8)))
    assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def test_an_estimator_without_calibration_gives_a_head_without():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = TensorRegressor(**QUICK).fit(make_maps()[2], of_rows(make_maps()[2]))
    for estimator in (model, td.CPRegression((5, 3, 3), 2, rank=3)):
        headed = td.attach_head(make_maps()[0], estimator)
        assert headed.calibration is None
        with pytest.raises(
            td.TensorDropoutError, match=r"needs a calibration, and there is none; make one with td\.cal"
        ):
            td.predict(headed, make_maps()[1], coverage=0.9)


# It is kept, or refused by name.


def make_headed(name="cp, two outputs"):
    """An attached head on a network that tests may change."""
    maps = make_maps()[0]
    return td.attach_head(copy.deepcopy(maps.model), fit(name), "1", example_input=make_maps()[1]).eval()


def train(headed):
    optimizer = torch.optim.SGD(headed.parameters(), lr=1e-4)
    x = make_maps()[1]
    td.expected_mse(headed, x, torch.zeros(len(x), 2)).backward()
    optimizer.step()


def cast(headed):
    headed.double().float()  # the same numbers: kept
    headed.half().float()  # rounded


def truncate(headed):
    td.truncate_(headed, 2)


CHANGES = {"trained": train, "merged": td.merge_, "cast": cast, "truncated": truncate}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_of_weights_it_is_refused_until_made_anew(change):
    headed, x = make_headed(), make_maps()[1]
    td.predict(headed, x, coverage=0.8)
    CHANGES[change](headed)
    with pytest.raises(td.TensorDropoutError, match=rf"{OTHER}erted since; calibrate again with td\.calibrate"):
        td.predict(headed, x, coverage=0.8)
    headed.calibration = td.calibrate(headed, x, torch.from_numpy(of_rows(make_maps()[2])))
    found = td.predict(headed, x, coverage=0.8)
    assert (found.low < found.high).all()


def make_converted():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2)).eval()
    x = torch.from_numpy(draw(N, 3, 8, 8))
    return network, x, torch.from_numpy(draw(N, 2, seed=3))


def test_a_network_that_is_converted_needs_a_new_one():
    network, x, y = make_converted()
    network.calibration = td.calibrate(network, x, y)
    td.predict(network, x, coverage=0.9)
    td.tensorize_(network, make_converted()[1], rank=2, dropout=0.8)
    with pytest.raises(td.TensorDropoutError, match=OTHER):
        td.predict(network, x, coverage=0.9)
    network.calibration = td.calibrate(network, x, y)
    td.predict(network, x, coverage=0.9)
    td.merge_(network)  # the predictions stay, the spread over the masks goes
    with pytest.raises(td.TensorDropoutError, match=OTHER):
        td.predict(network, x, coverage=0.9)


def test_a_converted_network_keeps_it_in_its_file(tmp_path):
    network, x, y = make_converted()
    td.tensorize_(network, make_converted()[1], rank=2, dropout=0.8)
    plain, _, _ = make_converted()
    td.save(network, tmp_path / "without.safetensors")
    network.calibration = td.calibrate(network, x, y, about={"data": "noise"})
    td.save(network, tmp_path / "with.safetensors")
    again = td.load(tmp_path / "with.safetensors", plain).eval()
    assert again.calibration.about == {"input_shape": [3, 8, 8], "data": "noise"}
    for mine, its in zip(*(td.predict(each, x, coverage=0.9) for each in (network, again)), strict=True):
        assert (mine is None and its is None) or torch.equal(mine, its)
    assert carried_calibration(td.load(tmp_path / "without.safetensors", make_converted()[0])) is None
    versions = {name: read_header(tmp_path / f"{name}.safetensors")["version"] for name in ("with", "without")}
    assert versions == {"with": 2, "without": 1}  # an older library asks for an upgrade, where it must


def read_header(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["tensor_dropout"])


@pytest.mark.parametrize("name", ["cp, two outputs", "channels elsewhere", "a search that ridge won", "classes"])
def test_an_attached_head_keeps_it_in_its_file(name, tmp_path):
    model, path = fit(name), tmp_path / "headed.safetensors"
    headed = make_headed(name)
    td.save(headed, path)
    again = td.load(path, copy.deepcopy(make_maps()[0].model)).eval()
    assert_same_statements(again, model)
    twice = tmp_path / "twice.safetensors"
    td.save(again, twice)
    assert read_header(twice)["calibration"] == read_header(path)["calibration"]
    assert_same_statements(td.load(twice, copy.deepcopy(make_maps()[0].model)).eval(), model)
    if name == "cp, two outputs":
        train(headed)
        td.save(headed, path)
        with pytest.raises(td.TensorDropoutError, match=OTHER):
            td.predict(td.load(path, copy.deepcopy(make_maps()[0].model)).eval(), make_maps()[1], coverage=0.8)


@pytest.mark.parametrize("name", ["cp, two outputs", "a search of classes"])
def test_an_estimator_keeps_it_in_its_file_and_hands_it_on(name, tmp_path):
    model = fit(name)
    td.save(model, tmp_path / "model.safetensors")
    again = td.load(tmp_path / "model.safetensors")
    assert_same_statements(td.attach_head(make_maps()[0], again), model)


def test_a_layer_alone_keeps_it_and_a_damaged_one_is_said(tmp_path):
    layer, x = td.CPRegression((5, 3, 3), 2, rank=3, dropout=0.7).eval(), torch.randn(30, 5, 3, 3)
    vars(layer)["calibration"] = td.calibrate(layer, x, torch.randn(30, 2))
    path = tmp_path / "layer.safetensors"
    td.save(layer, path)
    again = td.load(path).eval()
    assert torch.equal(td.predict(again, x, coverage=0.9).low, td.predict(layer, x, coverage=0.9).low)
    assert set(again.state_dict()) == set(layer.state_dict())
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"uses_masks\\"', b'"uses_mosks\\"'))
    with pytest.raises(td.TensorDropoutError, match=r"the config in the header of .* is damaged"):
        td.load(path)
    path.write_bytes(whole.replace(b'"calibration\\": {\\"version\\": 1', b'"calibration\\": {\\"version\\": 7'))
    with pytest.raises(td.TensorDropoutError, match=r"the calibration in .* has version 7, this library reads 1; upg"):
        td.load(path)


def test_copies_have_it():
    headed = make_headed()
    assert_same_statements(copy.deepcopy(headed), fit("cp, two outputs"))


def test_a_member_of_that_name_that_is_no_calibration_is_left_alone(tmp_path):
    network, x, _ = make_converted()
    network.calibration = "of my own"
    with pytest.raises(td.TensorDropoutError, match="there is none"):
        td.predict(network, x, coverage=0.9)
    td.tensorize_(network, make_converted()[1], rank=2, dropout=0.8)
    td.save(network, tmp_path / "network.safetensors")


# Made on other data.


def test_inputs_of_another_shape_are_other_data():
    network, x, y = make_converted()
    calibration = td.calibrate(network, x, y)
    wider = torch.zeros(2, 3, 12, 12)
    assert td.predict(network, wider).mean.shape == (2, 2)  # the network itself takes them
    with pytest.raises(
        td.TensorDropoutError, match=r"made on other data, inputs of shape \(3, 8, 8\), and these are \(3, 12, 12\)"
    ):
        td.predict(network, wider, coverage=0.9, calibration=calibration)
    older = replace(calibration, about={})  # a file of before does not say it
    td.predict(network, wider, coverage=0.9, calibration=older)


# Files of before.

SAVED = Path(__file__).with_name("saved_by_0_1_0")


@pytest.mark.parametrize("name", ["cp", "converted"])
def test_files_of_0_1_0_have_no_calibration_and_take_one(name, tmp_path):
    model, shape = None, (20, 4, 3, 3)
    if name == "converted":
        layers = [nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
        model, shape = nn.Sequential(*layers), (20, 1, 5, 5)
    loaded = td.load(SAVED / f"{name}.safetensors", model).eval()
    x = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    with pytest.raises(td.TensorDropoutError, match="needs a calibration, and there is none"):
        td.predict(loaded, x, coverage=0.9)
    y = loaded(x).detach() + torch.linspace(-1, 1, 20)[:, None]
    vars(loaded)["calibration"] = td.calibrate(loaded, x, y)
    found = td.predict(loaded, x, coverage=0.9)
    assert ((found.low <= y) & (y <= found.high)).float().mean() >= 0.9
