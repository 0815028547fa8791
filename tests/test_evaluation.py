"""The numbers that are reported, against numpy written from their definitions; and what a network is run over."""

from __future__ import annotations

import csv
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

import tensor_dropout as td
from tensor_dropout.metrics.registry import summarize
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.nets import build_net
from tensor_dropout_lab.training.evaluation import Outcome, evaluate, summarize_outputs
from tensor_dropout_lab.training.runs import RunFolder


def draw_logits(n, classes, seed=0, scale=2.0):
    random = np.random.default_rng(seed)
    return scale * random.standard_normal((n, classes)), random.integers(0, classes, n)


def softmax(logits):
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def bin_by_bin(confidence, right, bins=15):
    """The calibration error as Guo et al. (2017) write it, bin by bin."""
    error = 0.0
    for b in range(bins):
        inside = (confidence >= b / bins) & (confidence < (b + 1) / bins)
        if b == bins - 1:
            inside |= confidence == 1
        if inside.any():
            error += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    return error


@pytest.mark.parametrize("classes", [2, 4, 10])
def test_the_numbers_of_a_classification(classes):
    logits, y = draw_logits(500, classes)
    found = summarize_outputs(Outcome(torch.tensor(logits), torch.tensor(y)), "classification")
    probabilities = softmax(logits)
    guess = probabilities.argmax(1)
    order = np.argsort(-logits, axis=1)[:, :5]
    assert found["accuracy"] == pytest.approx(100 * (guess == y).mean())
    assert found["top5"] == pytest.approx(100 * np.mean([t in row for t, row in zip(y, order, strict=True)]))
    assert found["nll"] == pytest.approx(-np.log(probabilities[np.arange(500), y]).mean())
    expected = bin_by_bin(probabilities.max(1), (guess == y).astype(float))
    assert found["ece"] == pytest.approx(100 * expected)


def calibrate(confidence, right):
    """The calibration error of an outcome of two classes that is right where ``right`` is 1."""
    outcome = {"target": np.zeros(len(right)), "predicted": 1 - np.asarray(right), "confidence": confidence}
    return summarize(outcome, ["ece"])["ece"] / 100


def test_confidence_of_one_falls_into_the_last_bin():
    confidence, right = np.array([1.0, 1.0, 0.0, 0.5]), np.array([1, 0, 0, 1])
    expected = (abs(1 - 2) + 0 + abs(1 - 0.5)) / 4
    assert calibrate(confidence, right) == pytest.approx(expected)


def test_calibration_of_a_network_that_knows_itself():
    random = np.random.default_rng(0)
    confidence = random.random(200_000)
    right = (random.random(200_000) < confidence).astype(int)
    assert calibrate(confidence, right) < 0.01
    assert calibrate(confidence, np.zeros_like(right)) == pytest.approx(0.5, abs=0.01)


def test_huge_logits_have_finite_numbers():
    logits = torch.tensor([[1e4, -1e4], [-1e4, 1e4]])
    found = summarize_outputs(Outcome(logits, torch.tensor([0, 0])), "classification")
    assert found["accuracy"] == 50
    assert found["nll"] == pytest.approx(1e4)
    assert found["ece"] == pytest.approx(50)


@pytest.mark.parametrize("columns", [1, 3])
def test_the_numbers_of_a_regression(columns):
    random = np.random.default_rng(1)
    y = 50 + 10 * random.standard_normal((300, columns))
    outputs = y + 3 * random.standard_normal((300, columns)) + 1
    targets = torch.tensor(y[:, 0] if columns == 1 else y)
    found = summarize_outputs(Outcome(torch.tensor(outputs), targets), "regression")
    centred, guess = y - y.mean(0), outputs - outputs.mean(0)
    assert found["mae"] == pytest.approx(np.abs(outputs - y).mean())
    assert found["rmse"] == pytest.approx(math.sqrt(((outputs - y) ** 2).mean()))
    assert found["r2"] == pytest.approx(1 - ((outputs - y) ** 2).sum() / (centred**2).sum())
    if columns == 1:
        assert found["correlation"] == pytest.approx(np.corrcoef(outputs[:, 0], y[:, 0])[0, 1])
    else:
        expected = (guess * centred).sum() / math.sqrt((guess**2).sum() * (centred**2).sum())
        assert found["correlation"] == pytest.approx(expected)


def test_each_of_several_targets_has_its_numbers():
    outputs, y = torch.tensor([[1.0, 1000.0], [3.0, 3000.0]]), torch.tensor([[2.0, 1500.0], [4.0, 2500.0]])
    found = summarize_outputs(Outcome(outputs, y), "regression", ["age", "volume"])
    assert found["targets"].keys() == {"age", "volume"}
    assert {name: numbers["mae"] for name, numbers in found["targets"].items()} == {"age": 1, "volume": 500}
    assert found["targets"]["volume"] == summarize_outputs(Outcome(outputs[:, 1:], y[:, 1]), "regression")
    assert "targets" not in summarize_outputs(Outcome(outputs[:, :1], y[:, 0]), "regression", ["age"])


def test_constant_targets_and_outputs_have_no_correlation():
    found = summarize_outputs(Outcome(torch.zeros(4, 1), torch.ones(4)), "regression")
    assert found["mae"] == found["rmse"] == 1
    assert math.isnan(found["r2"])
    assert math.isnan(found["correlation"])


@pytest.fixture(scope="module")
def phantom():
    return load_data("phantom", n=20, size=(8, 8, 8))


def make_net(data, head):
    return build_net("resnet-mini", outputs=data.outputs, input_shape=data.input_shape, head=head)


def test_evaluation_uses_the_mean_weight_and_puts_the_mode_back(phantom):
    net = make_net(phantom, "rtrl-cp").train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    outcomes = [evaluate(net, phantom, phantom.train, batch=batch) for batch in (3, 100)]
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())  # and batch norm's
    with torch.no_grad():
        expected = net.eval()(phantom.prepare(phantom.train.inputs))
    for outcome in outcomes:
        torch.testing.assert_close(outcome.outputs, expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(outcome.targets, phantom.train.targets)
        assert outcome.std is None


def test_evaluation_leaves_frozen_modules_frozen(phantom):
    net = make_net(phantom, "fc").train()
    frozen = [module for module in net.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    for module in frozen:
        module.eval()
    evaluate(net, phantom, phantom.test)
    assert net.training
    assert not any(module.training for module in frozen)


def test_mean_and_std_put_the_unit_back(phantom):
    net = make_net(phantom, "rtrl-tucker")
    plain = evaluate(net, phantom, phantom.test, uncertainty=True)
    scaled = evaluate(net, phantom, phantom.test, uncertainty=True, mean=torch.tensor([50.0]), std=torch.tensor([12.0]))
    torch.testing.assert_close(scaled.outputs, 12 * plain.outputs + 50)
    torch.testing.assert_close(scaled.std, 12 * plain.std)
    exact = td.predict(net.eval(), phantom.prepare(phantom.test.inputs), mode="exact", task="regression")
    torch.testing.assert_close(plain.std, exact.std)


@pytest.mark.parametrize("head", ["fc", "trl-cp", "trl-tucker+weight-dropout"])
def test_a_head_without_masks_has_no_std(phantom, head):
    outcome = evaluate(make_net(phantom, head), phantom, phantom.test, uncertainty=True)
    assert outcome.std is None
    assert outcome.outputs.shape == (len(phantom.test), 1)


def test_predictions_of_several_targets_are_columns(tmp_path, phantom):
    n = len(phantom.test)
    outcome = Outcome(torch.arange(2.0 * n).view(n, 2), torch.ones(n, 2), torch.full((n, 2), 0.5))
    data = replace(phantom, outputs=2, target="age, volume")
    path = RunFolder(tmp_path).write_predictions(outcome, phantom.test, data)
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert [row.pop("name") for row in rows] == phantom.test.names
    kinds = ("target", "predicted", "masks")
    assert list(rows[0]) == [f"{kind}_{name}" for kind in kinds for name in ("age", "volume")]
    assert [float(row["predicted_volume"]) for row in rows] == [2 * k + 1 for k in range(n)]
    assert {row["masks_age"] for row in rows} == {"0.5"}
