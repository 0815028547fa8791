"""Simulated heads: repeatable, labelled, plausible, and not to be read off two volumes."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.phantom import draw_ages, simulate_heads


@pytest.fixture(scope="module")
def heads():
    return simulate_heads(draw_ages(300, (20, 80), seed=0), seed=0)


def test_phantoms_say_that_they_are_simulated():
    data = load_data("phantom", n=8, size=(8, 10, 8))
    assert data.simulated
    assert data.provenance.startswith("SIMULATED")
    assert (data.task, data.target, data.outputs, data.classes) == ("regression", "age", 1, None)


def test_phantoms_are_split_disjointly_and_prepared():
    data = load_data("phantom", n=40, size=(16, 20, 16))
    parts = (data.train, data.validation, data.test)
    assert [len(part) for part in parts] == [24, 8, 8]
    assert len({name for part in parts for name in part.names}) == 40
    assert data.train.inputs.dtype == torch.uint8
    prepared = data.prepare(data.train.inputs)
    assert prepared.shape == (24, *data.input_shape)
    assert data.augment(prepared).shape == prepared.shape
    assert load_data("phantom", n=8, size=(8, 10, 8), augment=False, validation=0).validation is None


def test_phantoms_depend_on_the_seed_only():
    first = load_data("phantom", n=12, size=(16, 20, 16), seed=3)
    torch.manual_seed(99)
    again = load_data("phantom", n=12, size=(16, 20, 16), seed=3)
    other = load_data("phantom", n=12, size=(16, 20, 16), seed=4)
    assert torch.equal(first.train.inputs, again.train.inputs)
    assert torch.equal(first.train.targets, again.train.targets)
    assert not torch.equal(first.train.inputs, other.train.inputs)


def test_drawing_phantoms_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    load_data("phantom", n=8, size=(8, 10, 8))
    assert torch.equal(before, torch.get_rng_state())


def test_ages_are_uniform_in_the_given_range(heads):
    assert 20 <= heads.ages.min() < 22
    assert 78 < heads.ages.max() <= 80
    assert abs(float((heads.ages - heads.ages.mean()).abs().mean()) - 15) < 1.5
    narrow = load_data("phantom", n=20, size=(8, 10, 8), ages=(40, 45))
    assert narrow.train.targets.min() >= 40
    assert narrow.train.targets.max() <= 45


def test_heads_are_plausible(heads):
    """Volumes like those of adults (brain 1.0 to 1.5 l, ventricles 10 to 100 ml), inside the picture, not clipped."""
    assert heads.volumes.shape == (300, 1, 32, 40, 32)
    assert 950 < heads.brain_ml.mean() < 1400
    assert 25 < heads.ventricle_ml.mean() < 60
    edges = torch.cat([heads.volumes[:, 0, 0].flatten(), heads.volumes[:, 0, :, 0].flatten()])
    assert edges.float().mean() < 4
    assert (heads.volumes == 255).float().mean() < 1e-4


def test_with_age_ventricles_grow_and_the_brain_shrinks(heads):
    correlation = np.corrcoef(np.stack([heads.ages, heads.brain_ml, heads.ventricle_ml]))[0]
    assert correlation[1] < -0.1
    assert correlation[2] > 0.2


def test_the_cortex_thins_with_age_in_one_and_the_same_head():
    """Equal seed and different age: the same head, older. More fluid outside the ventricles, less tissue."""
    ages = torch.full((6,), 25.0)
    young, old = simulate_heads(ages, seed=5), simulate_heads(ages + 50, seed=5)
    assert (old.brain_ml < young.brain_ml).all()
    assert (old.ventricle_ml > young.ventricle_ml).all()


def test_two_volumes_do_not_give_the_age_away(heads):
    """Ridge regression on total and ventricle volume stays above half the error of predicting the mean."""
    features = torch.stack([heads.brain_ml, heads.ventricle_ml], 1).double()
    features = torch.cat(
        [features, features.log(), features[:, :1] / features[:, 1:]], 1
    )  # kindly: also logs and ratio
    ages = heads.ages.double()
    fitted, tested = slice(0, 200), slice(200, 300)
    mean, std = features[fitted].mean(0), features[fitted].std(0)
    x = torch.cat([(features - mean) / std, torch.ones(300, 1).double()], 1)
    weight = torch.linalg.solve(x[fitted].mT @ x[fitted] + 0.1 * torch.eye(6), x[fitted].mT @ ages[fitted])
    ridge = (x[tested] @ weight - ages[tested]).abs().mean()
    constant = (ages[fitted].mean() - ages[tested]).abs().mean()
    assert ridge > 0.5 * constant


def test_a_hundred_phantoms_take_a_few_seconds():
    start = time.process_time()
    load_data("phantom", n=100)
    assert time.process_time() - start < 20


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n must be a positive"),
        ({"size": (32, 40)}, "a size of 3 numbers"),
        ({"size": (32, 40, 0)}, "positive whole numbers"),
        ({"ages": (80, 20)}, "ages must be two years"),
        ({"ages": (20,)}, "ages must be two years"),
        ({"n": 10, "size": (4, 4, 4), "test": 10}, "phantom: test"),
        ({"n": 10, "size": (4, 4, 4), "validation": -1}, "phantom: validation"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(TensorDropoutError, match=message):
        load_data("phantom", **options)
