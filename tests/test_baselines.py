"""What a regression must beat: the mean and the ridge."""

from __future__ import annotations

import csv

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge as SklearnRidge
from torch import nn

from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.base import Data, StandardizeImages, TensorSplit
from tensor_dropout_lab.training import baselines
from tensor_dropout_lab.training.baselines import PENALTIES, fit_ridge, predict_ridge
from training_runs import run


@pytest.fixture
def problem():
    torch.manual_seed(0)
    x = torch.randn(30, 50, dtype=torch.float64) + 3
    y = x[:, :2] @ torch.tensor([[1.0, 0.5], [-2.0, 0.0]], dtype=torch.float64) + torch.randn(30, 2).double() / 2 + 40
    return x[:24], y[:24], x[24:], y[24:]


def test_the_ridge_is_sklearns_with_the_penalty_that_leave_one_out_prefers(problem):
    train, y, test, _ = problem
    scale = float(torch.linalg.eigvalsh((train - train.mean(0)) @ (train - train.mean(0)).T).mean())

    def left_out_error(penalty, scale=scale):
        errors = []
        for k in range(len(train)):
            kept = [i for i in range(len(train)) if i != k]
            model = SklearnRidge(penalty * scale).fit(train[kept].numpy(), y[kept].numpy())
            errors.append(np.abs(model.predict(train[[k]].numpy()) - y[[k]].numpy()).mean())
        return float(np.mean(errors))

    errors = {penalty: left_out_error(penalty) for penalty in PENALTIES}
    found = fit_ridge(train, y, test)
    assert found.penalty == min(errors, key=errors.get)
    assert found.error == pytest.approx(errors[found.penalty], rel=1e-6)
    expected = SklearnRidge(found.penalty * scale).fit(train.numpy(), y.numpy()).predict(test.numpy())
    np.testing.assert_allclose(found.predictions.numpy(), expected, rtol=1e-8)


def test_a_constant_target_is_predicted_by_itself(problem):
    train, _, test, _ = problem
    found = fit_ridge(train, torch.full((24, 1), 7.0, dtype=torch.float64), test)
    torch.testing.assert_close(found.predictions, torch.full((6, 1), 7.0, dtype=torch.float64))


def make_volumes():
    """Volumes whose target is a contrast of two halves, under noise that averages over cubes remove."""
    torch.manual_seed(1)
    x = torch.randn(60, 1, 8, 8, 8)
    y = torch.randn(60)
    x[:, :, :4] += 0.5 * y[:, None, None, None, None]
    parts = [
        TensorSplit(x[rows], 50 + 10 * y[rows], [str(k) for k in range(60)][rows])
        for rows in (slice(40), slice(40, 60))
    ]
    return Data(
        name="halves",
        task="regression",
        train=parts[0],
        validation=None,
        test=parts[1],
        input_shape=(1, 8, 8, 8),
        outputs=1,
        classes=None,
        target="contrast",
        prepare=StandardizeImages(),
        augment=nn.Identity(),
        simulated=True,
        provenance="made here",
    )


def hide_outside(data):
    """The same under gains of each volume's own, in heads of different sizes: only the inside says how bright it is."""
    torch.manual_seed(2)
    for split in (data.train, data.test):
        for volume in split.inputs:
            margin = int(torch.randint(0, 3, ()))
            inside = torch.zeros_like(volume, dtype=torch.bool)
            inside[:, :, margin : 8 - margin] = True
            volume.copy_(torch.where(inside, (volume + 10) * (0.5 + torch.rand(())), 0))
    return data


@pytest.mark.parametrize("change", [lambda data: data, hide_outside])
def test_the_training_examples_choose_the_cubes(change, monkeypatch):
    data = change(make_volumes())
    each = {}
    for cube in baselines.CUBES:
        monkeypatch.setattr(baselines, "CUBES", (cube,))
        each[cube] = predict_ridge(data)
    monkeypatch.undo()
    chosen = predict_ridge(data)
    assert chosen.cube == min(each, key=lambda cube: each[cube].error)
    torch.testing.assert_close(chosen.predictions, each[chosen.cube].predictions)
    error = (chosen.predictions[:, 0] - data.test.targets).abs().mean()
    assert error < 0.5 * (data.test.targets - data.train.targets.mean()).abs().mean()


def test_brightness_is_scaled_by_what_is_not_background():
    volumes = hide_outside(make_volumes()).train.inputs
    inside = volumes > volumes.amin((1, 2, 3, 4), keepdim=True)
    assert 0.4 < inside.float().mean() < 0.9
    for volume, own in zip(baselines.scale_foreground(volumes), inside, strict=True):
        assert not volume[~own].any()
        assert volume[own].mean().abs() < 1e-5
        assert volume[own].std(correction=0) == pytest.approx(1, abs=1e-5)


def test_where_it_does_not_apply_there_is_none(monkeypatch):
    assert predict_ridge(load_data("digits")) is None
    data = make_volumes()
    monkeypatch.setattr(baselines, "MOST_EXAMPLES", 39)
    assert predict_ridge(data) is None
    monkeypatch.undo()
    monkeypatch.setattr(baselines, "MOST_BYTES", 100)
    assert predict_ridge(data) is None


def test_a_regression_run_says_what_it_must_beat(tmp_path):
    options = {"data.name": "phantom", "data.options": {"n": 24, "size": [16, 16, 16]}, "run.epochs": 1, "run.batch": 8}
    result = run(tmp_path, **options)
    with (tmp_path / "predictions.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    y, ridge = (np.array([float(row[key]) for row in rows]) for key in ("target", "ridge"))
    assert result["baselines"]["ridge"]["mae"] == pytest.approx(np.abs(ridge - y).mean(), rel=1e-4)
    assert result["baselines"]["ridge"]["cube"] in baselines.CUBES
    mean = float(load_data("phantom", n=24, size=[16, 16, 16]).train.targets.mean())
    assert result["baselines"]["mean"]["mae"] == pytest.approx(np.abs(y - mean).mean(), rel=1e-4)
