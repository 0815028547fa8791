"""td.calibrate and td.predict(coverage=...) on networks, and the files of calibrations."""

from __future__ import annotations

import copy
import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import tensor_dropout as td
from tensor_dropout.calibration import model as calibration_module
from tensor_dropout.calibration.model import fingerprint
from tensor_dropout.calibration.regression import Calibration

N, SHAPE = 120, (4, 3, 3)


def make(outputs=2, dropout=0.8, seed=0):
    """A network behind a layer that draws nothing, inputs, and targets that differ from its answers by noise."""
    torch.manual_seed(seed)
    head = td.CPRegression((6, 3, 3), outputs, rank=5, dropout=dropout)
    network = nn.Sequential(nn.Conv2d(4, 6, 1), head).eval()
    x = torch.randn(N + 2000, *SHAPE)
    with torch.no_grad():
        y = network(x) + torch.tensor([0.5, 2.0])[:outputs] * torch.randn(len(x), outputs)
    return network, x, y


@pytest.fixture(scope="module")
def numbers():
    network, x, y = make()
    return network, x, y, td.calibrate(network, x[:N], y[:N])


@pytest.fixture(scope="module")
def classes():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 3)).eval()
    x = torch.randn(N + 2000, *SHAPE)
    with torch.no_grad():
        network[1].weight.mul_(8)
        y = torch.distributions.Categorical(logits=network(x) / 3).sample()  # three times as unsure as it says
    return network, x[600 - N :], y[600 - N :], td.calibrate(network, x[:600], y[:600])


@pytest.mark.parametrize("coverage", [0.5, 0.9])
@pytest.mark.parametrize("mode", ["mean", "exact"])
def test_intervals_hold_for_new_targets(numbers, coverage, mode):
    network, x, y, calibration = numbers
    found = td.predict(network, x[N:], mode=mode, coverage=coverage, calibration=calibration, task="regression")
    inside = ((found.low <= y[N:]) & (y[N:] <= found.high)).float().mean(0)
    assert ((inside - coverage).abs() < 0.1).all()
    widths = (found.high - found.low).mean(0)
    assert 3 < widths[1] / widths[0] < 5.5  # each output by its own errors: 2.0 to 0.5
    plain = td.predict(network, x[N:], mode=mode, task="regression")
    torch.testing.assert_close(found.mean, plain.mean)
    if mode == "exact":
        torch.testing.assert_close(found.std, plain.std)  # that of the masks, as without a calibration


def test_a_spread_over_masks_that_tells_errors_apart_is_used():
    network, x, _ = make(outputs=1, dropout=0.5)
    masks = td.predict(network, x, mode="exact", task="regression")
    y = masks.mean + 3 * masks.std * torch.randn(len(x), 1)
    calibration = td.calibrate(network, x[:N], y[:N])
    assert calibration.uses_masks
    assert calibration.errors.share > 0.5
    found = td.predict(network, x[N:], coverage=0.9, calibration=calibration, task="regression")
    width = (found.high - found.low)[:, 0]
    assert np.corrcoef(width.numpy(), masks.std[N:, 0].numpy())[0, 1] > 0.9
    assert abs(float(((found.low <= y[N:]) & (y[N:] <= found.high)).float().mean()) - 0.9) < 0.06


def test_classes_get_a_temperature_and_sets_that_hold(classes):
    network, x, y, calibration = classes
    assert calibration.task == "classification"
    assert 1.7 < calibration.errors.temperature < 5
    found = td.predict(network, x[N:], coverage=0.9, calibration=calibration)
    logits = network(x[N:]).detach()
    torch.testing.assert_close(found.probs, (logits / calibration.errors.temperature).softmax(-1))
    inside = found.sets.gather(1, y[N:, None]).float().mean()
    assert abs(float(inside) - 0.9) < 0.06
    plain = td.predict(network, x[N:])
    assert torch.equal(found.probs.argmax(1), plain.probs.argmax(1))
    losses = [nn.functional.nll_loss(each.probs.log(), y[N:]) for each in (found, plain)]
    assert losses[0] < losses[1]
    assert td.predict(network, x[N:], calibration=calibration).sets is None


def test_groups_count_alike():
    network, x, _ = make(outputs=1)
    rng = torch.Generator().manual_seed(0)
    groups = [f"p{number // 6}" for number in range(N)]
    shared = torch.randn(N // 6, 1, generator=rng).repeat_interleave(6, 0)
    y = network(x[:N]).detach() + shared
    by_group = td.calibrate(network, x[:N], y, groups=groups)
    assert by_group.errors.quantile(0.9).groups.tolist() == [20]
    assert float(by_group.errors.quantile(0.9).value) >= float(
        td.calibrate(network, x[:N], y).errors.quantile(0.9).value
    )


@pytest.mark.parametrize("name", ["numbers", "classes"])
def test_there_and_back(name, request, tmp_path):
    network, x, _, calibration = request.getfixturevalue(name)
    td.save_calibration(calibration, tmp_path / "c.safetensors")
    again = td.load_calibration(tmp_path / "c.safetensors")
    mine, its = (td.predict(network, x[:9], coverage=0.8, calibration=each) for each in (calibration, again))
    for a, b in zip(mine, its, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)
    assert again.about == calibration.about


def test_another_network_is_refused(numbers):
    network, x, _, calibration = numbers
    other = copy.deepcopy(network)
    td.predict(other, x[:2], coverage=0.9, calibration=calibration, task="regression")  # equal weights are that network
    with torch.no_grad():
        next(other.parameters()).mul_(1.01)
    with pytest.raises(
        td.TensorDropoutError, match="made for other weights: of another network, or Sequential was trained"
    ):
        td.predict(other, x[:2], coverage=0.9, calibration=calibration, task="regression")


def test_a_fingerprint_is_computed_once(numbers, monkeypatch):
    network = copy.deepcopy(numbers[0])
    before = fingerprint(network)
    monkeypatch.setattr(calibration_module.hashlib, "sha256", None)
    assert fingerprint(network) == before
    with torch.no_grad():
        next(network.parameters()).add_(1)
    with pytest.raises(TypeError):
        fingerprint(network)


def test_what_cannot_be_is_said(numbers, classes):
    network, x, y, calibration = numbers
    with pytest.raises(td.TensorDropoutError, match="8 held-out examples are too few; a 90 % interval takes"):
        td.calibrate(network, x[:8], y[:8])
    with pytest.raises(td.TensorDropoutError, match="2 held-out groups are too few"):
        td.calibrate(network, x[:20], y[:20], groups=[0] * 10 + [1] * 10)
    with pytest.raises(td.TensorDropoutError, match="x has 20 examples, y has 19"):
        td.calibrate(network, x[:20], y[:19])
    with pytest.raises(td.TensorDropoutError, match="groups has one entry per example, 20, got 3"):
        td.calibrate(network, x[:20], y[:20], groups=[1, 2, 3])
    with pytest.raises(td.TensorDropoutError, match=r"y is \(20,\), the network gives \(20, 2\)"):
        td.calibrate(network, x[:20], y[:20, 0])
    with pytest.raises(td.TensorDropoutError, match=r"needs a calibration, and there is none; make one with td.calib"):
        td.predict(network, x[:2], coverage=0.9)
    for wrong in (0.0, 1.0, 90, "0.9", True):
        with pytest.raises(td.TensorDropoutError, match="coverage is a number between 0 and 1"):
            td.predict(network, x[:2], coverage=wrong, calibration=calibration)
    with pytest.raises(
        td.TensorDropoutError, match=r"coverage=0.999 takes 999 held-out groups, the calibration has 120"
    ):
        td.predict(network, x[:2], coverage=0.999, calibration=calibration)
    with pytest.raises(td.TensorDropoutError, match=r"coverage=0.999 takes 999 held-out groups"):
        td.predict(classes[0], x[:2], coverage=0.999, calibration=classes[3])


def test_files_that_are_no_calibration(numbers, tmp_path):
    network, _, _, calibration = numbers
    td.save_calibration(calibration, tmp_path / "c.safetensors")
    whole = (tmp_path / "c.safetensors").read_bytes()
    cases = {
        "cut.safetensors": (whole[: len(whole) // 2], "is damaged"),
        "text.safetensors": (b"no such file", "is damaged"),
    }
    for name, (content, said) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(td.TensorDropoutError, match=said):
            td.load_calibration(tmp_path / name)
    td.save(network[1], tmp_path / "head.safetensors")
    with pytest.raises(td.TensorDropoutError, match=r"is no calibration; td.load reads models"):
        td.load_calibration(tmp_path / "head.safetensors")
    with pytest.raises(td.TensorDropoutError, match="cannot be read"):
        td.load_calibration(tmp_path / "none.safetensors")
    with pytest.raises(td.TensorDropoutError, match=r"the folder .* does not exist"):
        td.save_calibration(calibration, tmp_path / "none" / "c.safetensors")
    tensors = load_file(tmp_path / "c.safetensors")
    newer = {"version": 99, "task": "regression"}
    save_file(tensors, tmp_path / "new.safetensors", metadata={"tensor_dropout_calibration": json.dumps(newer)})
    with pytest.raises(td.TensorDropoutError, match="has version 99, this library reads 1; upgrade it"):
        td.load_calibration(tmp_path / "new.safetensors")


def test_a_network_without_masks_has_constant_intervals(classes):
    network = nn.Sequential(nn.Flatten(), nn.Linear(36, 1)).eval()
    x = torch.randn(40, *SHAPE)
    calibration = td.calibrate(network, x, network(x).detach() + torch.randn(40, 1))
    assert isinstance(calibration.errors, Calibration)
    assert not calibration.uses_masks
    found = td.predict(network, x, coverage=0.9, calibration=calibration, task="regression")
    assert torch.allclose(found.high - found.low, (found.high - found.low)[0])


def test_missing_targets_are_left_out():
    network, x, y = make()
    holes = y[:N].clone()
    holes[::2, 0] = torch.nan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration = td.calibrate(network, x[:N], holes)
    assert calibration.errors.quantile(0.9).groups.tolist() == [60, 120]


BAD = {
    "an array": (
        lambda x, y: (x.numpy(), y),
        {},
        "x is a tensor of all held-out examples, got a ndarray",
    ),
    "a list": (lambda x, y: (x, y.tolist()), {}, "y is a tensor of all held-out examples, got a list"),
    "a loader": (lambda x, y: ([(x, y)], None), {}, r"got a list; use torch.as_tensor for arrays, and torch.cat"),
    "infinity": (lambda x, y: (x, torch.where(y > y.max() - 1e-6, torch.inf, y)), {}, "y has an infinite number"),
    "a NaN input": (
        lambda x, y: (torch.where(x > x.max() - 1e-6, torch.nan, x), y),
        {},
        "NaN or infinity for 1 of",
    ),
    "one-hot": (lambda x, y: (x, (y > 0).long()), {}, r"give classes as \(n,\), or say task='regression'"),
    "a task": (lambda x, y: (x, y), {"task": "bogus"}, "task is 'classification', 'regression' or None, got 'bogus'"),
    "a batch": (lambda x, y: (x, y), {"batch": 0}, "batch is a number of at least 1, got 0"),
    "no group": (lambda x, y: (x, y), {"groups": [float("nan"), *range(119)]}, "a group is missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_examples_are_said_in_a_sentence(numbers, case):
    network, x, y, _ = numbers
    change, options, said = BAD[case]
    with pytest.raises(td.TensorDropoutError, match=said):
        td.calibrate(network, *change(x[:N], y[:N]), **options)


def test_what_is_no_module_or_no_calibration_is_said(numbers):
    network, x, y, _ = numbers
    with pytest.raises(td.TensorDropoutError, match="model is a torch module, got a function"):
        td.calibrate(lambda x: x, x[:N], y[:N])
    with pytest.raises(td.TensorDropoutError, match="calibration is what td"):
        td.predict(network, x[:2], coverage=0.9, calibration="file")


def test_whole_ages_of_one_output_are_numbers():
    network, x, _ = make(outputs=1)
    calibration = td.calibrate(network, x[:N], torch.arange(N))
    assert calibration.task == "regression"
