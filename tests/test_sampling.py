"""Which examples a step sees, and the learning rate of each step."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import StreamSplit, TensorSplit
from tensor_dropout_lab.training.config import ScheduleConfig
from tensor_dropout_lab.training.sampling import Feed, Sampler
from tensor_dropout_lab.training.schedule import rate_at
from training_runs import run_forked

CPU = torch.device("cpu")


class Rows(StreamSplit):
    """Every example is its own number; one can be broken."""

    def __init__(self, n, broken=None):
        super().__init__([str(i) for i in range(n)], torch.arange(n))
        self.broken = broken

    def read(self, index):
        if index == self.broken:
            raise TensorDropoutError(f"rows: number {index} cannot be read, in worker {get_worker_info() is not None}")
        return torch.tensor([float(index)])


# The sampler.


def test_the_order_is_a_function_of_seed_and_epoch():
    sampler = Sampler(100, 10, seed=3)
    assert torch.equal(sampler.order(2), Sampler(100, 10, seed=3).order(2))
    assert not torch.equal(sampler.order(2), sampler.order(3))
    assert not torch.equal(sampler.order(2), Sampler(100, 10, seed=4).order(2))
    assert sampler.order(2).flatten().sort().values.tolist() == list(range(100))


def test_the_order_does_not_touch_the_default_generator():
    before = torch.get_rng_state()
    Sampler(100, 10, seed=0).order(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_processes_share_every_batch_without_overlap(world):
    whole = Sampler(107, 12, seed=1)
    shares = [Sampler(107, 12, seed=1, rank=rank, world=world).share(5) for rank in range(world)]
    assert {tuple(share.shape) for share in shares} == {(8, 12 // world)}
    for step, batch in enumerate(whole.order(5)):
        dealt = torch.cat([share[step] for share in shares])
        assert sorted(dealt.tolist()) == sorted(batch.tolist())  # the total batch is the same for any number of them
        assert len(dealt.unique()) == 12
    assert len(torch.cat(shares).unique()) == 96


def test_other_rows_are_left_out_in_every_epoch():
    sampler = Sampler(107, 12, seed=0)
    left = [frozenset(range(107)) - set(sampler.order(epoch).flatten().tolist()) for epoch in range(20)]
    assert {len(rows) for rows in left} == {11}
    assert len(set(left)) == 20
    assert len(frozenset().union(*left)) > 80


@pytest.mark.parametrize(
    ("rows", "batch", "world", "message"),
    [(10, 11, 1, "run.batch=11 is more than the 10 training examples"), (10, 9, 2, "not a multiple of the 2 proc")],
)
def test_a_batch_that_does_not_fit(rows, batch, world, message):
    with pytest.raises(TensorDropoutError, match=message):
        Sampler(rows, batch, 0, 0, world)


# The feed.


def make_feed(split, workers=0, **options):
    return Feed(split, Sampler(len(split), 6, seed=7, **options), CPU, workers)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["memory", "stream"])
def test_an_epoch_can_be_entered_at_any_step(kind, workers):
    split = TensorSplit(torch.arange(40.0)[:, None], torch.arange(40), ["x"] * 40) if kind == "memory" else Rows(40)
    feed = make_feed(split, workers)
    whole = [feed.fetch(*start) for start in feed.starts(3, 0)]
    order = Sampler(40, 6, seed=7).order(3)
    assert torch.equal(torch.stack([y for _, y in whole]), order)
    assert all(torch.equal(x[:, 0].long(), y) for x, y in whole)
    for step in (1, 4, 6):
        entered = [feed.fetch(*start) for start in feed.starts(3, step)]
        assert [y.tolist() for _, y in entered] == [y.tolist() for _, y in whole[step:]]


def test_a_feed_gives_its_process_share():
    feed = make_feed(Rows(40), rank=1, world=2)
    found = torch.stack([feed.fetch(*start)[1] for start in feed.starts(0, 0)])
    assert torch.equal(found, Sampler(40, 6, seed=7).order(0)[:, 3:])


@pytest.mark.parametrize("workers", [0, 2])
def test_reading_leaves_the_generator_of_the_masks_alone(workers):
    """Else a run that goes on in the middle of an epoch would draw other masks."""
    before = torch.get_rng_state()
    list(make_feed(Rows(40), workers).starts(0, 2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_while_reading_is_one_sentence(workers):
    def read():
        with pytest.raises(TensorDropoutError) as failure:
            list(make_feed(Rows(40, broken=17), workers).starts(0, 0))
        assert str(failure.value) == f"rows: number 17 cannot be read, in worker {workers > 0}"

    assert run_forked(read) == 0  # a process of its own: what is left of a loader that failed ends with it


# The schedule.


def rates(steps=200, per_epoch=10, **settings):
    schedule = ScheduleConfig(**settings)
    return np.array([rate_at(schedule, step, steps, per_epoch) for step in range(steps)])


def test_constant():
    assert set(rates(name="constant")) == {1.0}


def test_step_divides_at_the_milestones():
    found = rates(name="step", milestones=[5, 12], factor=0.2)
    expected = np.repeat([1.0, 0.2, 0.04], [50, 70, 80])
    assert np.allclose(found, expected, rtol=1e-12)


def test_cosine_goes_from_one_to_zero():
    found = rates(name="cosine")
    assert found[0] == 1
    assert found[100] == pytest.approx(0.5)
    assert found[50] == pytest.approx(math.cos(math.pi / 8) ** 2)
    assert 0 < found[-1] < 1e-3
    assert (np.diff(found) < 0).all()


@pytest.mark.parametrize("warmup", [0.0, 0.1, 0.3, 0.9])
def test_one_cycle_rises_and_falls_without_a_jump(warmup):
    steps = 1000
    found = rates(steps=steps, name="one-cycle", warmup=warmup)
    top = max(1, round(warmup * steps))
    assert found[0] == pytest.approx(1 / 25)
    assert found[top] == pytest.approx(1) == found.max()
    assert found.argmax() == top
    assert (np.diff(found[: top + 1]) > 0).all()
    assert (np.diff(found[top:]) < 0).all()
    assert found[-1] < 1e-3
    if warmup:
        assert max(abs(b - a) for a, b in pairwise(found)) < math.pi / 2 / min(top, steps - top) * 1.01
    middle = (top + steps) // 2
    assert found[middle] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("name", ["constant", "step", "cosine", "one-cycle"])
def test_a_run_of_one_step_has_a_rate(name):
    assert 0 < rates(steps=1, per_epoch=1, name=name)[0] <= 1
