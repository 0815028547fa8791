"""θ over training."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
import torch
from torch import nn

import tensor_dropout as td
from layers_under_test import make_layer


def thetas(schedule, dropout, n):
    seen = []
    for _ in range(n):
        seen.append(float(dropout.theta))
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({"start": 1.0, "end": 0.6, "steps": 4}, [1, 0.9, 0.8, 0.7, 0.6, 0.6, 0.6], id="down"),
        pytest.param({"start": 0.2, "end": 1.0, "steps": 2}, [0.2, 0.6, 1.0, 1.0], id="up"),
        pytest.param({"start": 1.0, "end": 0.5, "steps": 1}, [1, 0.5, 0.5], id="at once"),
        pytest.param({"start": 1.0, "end": 0.6, "steps": 2, "delay": 3}, [1, 1, 1, 1, 0.8, 0.6, 0.6], id="delay"),
        pytest.param({"start": 0.7, "end": 0.7, "steps": 5}, [0.7, 0.7, 0.7], id="constant"),
        pytest.param(
            {"start": 1.0, "end": 0.6, "steps": 4, "shape": "cosine"},
            [1 - 0.2 * (1 - math.cos(math.pi * k / 4)) for k in range(5)] + [0.6],
            id="cosine",
        ),
        pytest.param(
            {"start": 1.0, "end": 0.6, "steps": 2, "delay": 1, "shape": "cosine"}, [1, 1, 0.8, 0.6], id="cosine, delay"
        ),
    ],
)
def test_theta_at_every_step(options, expected):
    layer = make_layer("cp", theta=0.33)
    schedule = td.ThetaSchedule(layer, **options)
    assert thetas(schedule, layer.dropout, len(expected)) == pytest.approx(expected)


def test_cosine_is_flat_at_both_ends():
    layer = make_layer("cp")
    seen = thetas(td.ThetaSchedule(layer, start=1, end=0.5, steps=100, shape="cosine"), layer.dropout, 101)
    steps = [before - after for before, after in pairwise(seen)]
    assert min(steps) >= 0
    assert steps[0] < 0.1 * steps[50] > steps[-1]


def test_every_dropout_of_a_model_is_steered_and_keeps_its_buffer():
    model = nn.ModuleList([make_layer("cp"), nn.Linear(2, 2), make_layer("tt"), make_layer("tucker", theta=None)])
    buffers = [model[0].dropout.theta, model[2].dropout.theta]
    schedule = td.ThetaSchedule(model, start=0.9, end=0.3, steps=2)
    schedule.step()
    assert model[0].dropout.theta is buffers[0]
    assert model[2].dropout.theta is buffers[1]
    assert [buffer.item() for buffer in buffers] == pytest.approx([0.6, 0.6])
    assert schedule.theta == pytest.approx(0.6)


def test_state_dict_is_plain_data_and_goes_on_where_it_was():
    options = {"start": 1.0, "end": 0.4, "steps": 6, "delay": 1, "shape": "cosine"}
    layer = make_layer("cp")
    schedule = td.ThetaSchedule(layer, **options)
    for _ in range(3):
        schedule.step()
    state = json.loads(json.dumps(schedule.state_dict()))
    assert state == {**options, "last_step": 3}

    other = make_layer("cp", theta=0.9)
    resumed = td.ThetaSchedule(other, start=0.8, end=0.8, steps=1)
    resumed.load_state_dict(state)
    assert torch.equal(other.dropout.theta, layer.dropout.theta)
    assert thetas(resumed, other.dropout, 6) == thetas(schedule, layer.dropout, 6)


GOOD = {"start": 1.0, "end": 0.6, "steps": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": 0.0}, "theta is the KEEP probability"),
        ({"start": True}, "theta is the KEEP probability"),
        ({"end": 1.2}, "theta is the KEEP probability"),
        ({"end": math.nan}, "theta is the KEEP probability"),
        ({"steps": 0}, "steps is at least 1 and delay 0, got 0 and 0"),
        ({"steps": 2.5}, "steps is at least 1 and delay 0, got 2.5"),
        ({"steps": True}, "steps is at least 1 and delay 0, got True"),
        ({"delay": -1}, "steps is at least 1 and delay 0, got 4 and -1"),
        ({"delay": 0.5}, "steps is at least 1 and delay 0, got 4 and 0.5"),
        ({"shape": "step"}, "shape is 'linear' or 'cosine', got 'step'"),
    ],
    ids=str,
)
def test_bad_schedules_are_refused_and_leave_theta_alone(change, message):
    layer = make_layer("cp", theta=0.9)
    with pytest.raises(td.TensorDropoutError, match=message):
        td.ThetaSchedule(layer, **{**GOOD, **change})
    assert layer.dropout.theta.item() == pytest.approx(0.9)
    td.ThetaSchedule(layer, **GOOD)
    assert layer.dropout.theta == 1


@pytest.mark.parametrize("model", [nn.Linear(2, 2), make_layer("cp", theta=None)], ids=["plain model", "plain layer"])
def test_a_model_without_tensor_dropout_is_refused(model):
    with pytest.raises(td.TensorDropoutError, match=f"{type(model).__name__} has no TensorDropout to steer"):
        td.ThetaSchedule(model, **GOOD)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"end": 1.5}, "theta is the KEEP probability"),
        ({"steps": 0}, "steps is at least 1"),
        ({"shape": "step"}, "shape is 'linear' or 'cosine'"),
        ({"last_step": None}, "last_step"),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(damage, message):
    layer = make_layer("cp")
    schedule = td.ThetaSchedule(layer, **GOOD)
    with pytest.raises(td.TensorDropoutError, match=message):
        schedule.load_state_dict({**schedule.state_dict(), **damage})


def test_a_state_that_lacks_an_entry_is_refused_and_changes_nothing():
    layer = make_layer("cp")
    schedule = td.ThetaSchedule(layer, **GOOD)
    incomplete = {"start": 0.5, "end": 0.5, "steps": 1}
    with pytest.raises(td.TensorDropoutError, match="lacks"):
        schedule.load_state_dict(incomplete)
    assert schedule.start == 1.0


def test_a_schedule_steers_the_dropout_that_load_puts_into_the_model(tmp_path):
    layer = td.CPRegression((4, 3), 2, rank=3, dropout=1.0)
    schedule = td.ThetaSchedule(layer, start=1.0, end=0.5, steps=2)
    td.save(layer, tmp_path / "layer.safetensors")
    td.load(tmp_path / "layer.safetensors", layer)
    schedule.step()
    assert float(layer.dropout.theta) == 0.75
