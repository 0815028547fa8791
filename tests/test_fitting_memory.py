"""The memory of a fit: the features, one copy of them in working precision, what a rank makes of them, and a history.

What is counted are the storages of all tensors that live at a time, which is the same in every run.
"""

from __future__ import annotations

import gc
import weakref
from math import prod

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from estimators_under_test import fit_quietly
from tensor_dropout.fitting import statistics
from tensor_dropout.fitting.fit import Prepared, first_width, fit
from tensor_dropout.fitting.lbfgs import HISTORY
from tensor_dropout.sklearn import TensorClassifier, TensorRegressor, inputs
from tensor_dropout.sklearn.defaults import build_layer


class Memory(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, while they live; ``peak`` is the most at a time.

    Beyond a limit, what only cycles of references keep is collected first: else it would depend on when Python does.
    """

    def __init__(self, limit=float("inf")):
        super().__init__()
        self.limit, self.sizes, self.now, self.peak = limit, {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if torch.is_tensor(tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if torch.is_tensor(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self.sizes and storage._cdata not in given:
                    self.sizes[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata)
                    self.now += storage.nbytes()
                    if self.now > max(self.limit, self.peak):
                        gc.collect()
                    self.peak = max(self.peak, self.now)
        return made

    def _forget(self, key):
        self.now -= self.sizes.pop(key)


def bound(model, n, shape, outputs, size=4):
    """What a fit may take beside X, in bytes."""
    layer = build_layer(model.factorization, shape, (outputs,), model.rank, model.theta, "auto", model.law)
    positions = prod(shape[1:])
    copy = n * shape[0] * positions
    in_rank_space = n * first_width(layer) * positions
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    return size * (copy + 1.5 * in_rank_space + (2 * HISTORY + 6) * parameters)


def make(model, n, shape, outputs, dtype=np.float32):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, *shape)).astype(dtype)
    if isinstance(model, TensorClassifier):
        return X, np.arange(n) % outputs
    return X, rng.normal(size=(n, outputs)).astype(np.float32)


def measure(model, n, shape, outputs, dtype=np.float32):
    """The peak of a fit beside X, and the bound, in bytes."""
    most = bound(model, n, shape, outputs, max(4, np.dtype(dtype).itemsize))
    data = make(model, n, shape, outputs, dtype)
    with Memory(most) as memory:
        fit_quietly(model, *data)
    return memory.peak, most


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks a hundred times smaller, as the features are: what a block takes does not grow with their number."""
    monkeypatch.setattr(inputs, "BLOCK", 2**14)
    monkeypatch.setattr(statistics, "BLOCK", 2**14)
    monkeypatch.setattr(statistics, "SOLVED_AT_ONCE", 250)


def test_the_measure_counts_what_lives_and_no_more():
    x = torch.zeros(100)
    with Memory() as memory:
        a = x + 1
        b = (a.view(10, 10).T * 2).add_(1)
        assert memory.now == 800
        del a
        c = torch.stack([b, b])
        assert memory.now == 1200
        del b, c
    assert (memory.now, memory.peak) == (0, 1200)


CASES = {
    "cp": (TensorRegressor("cp"), np.float32),
    "cp of half precision": (TensorRegressor("cp"), np.float16),
    "cp, nothing solved for": (TensorRegressor("cp", solver="lbfgs"), np.float32),
    "tucker": (TensorRegressor("tucker"), np.float32),
    "tucker, classes": (TensorClassifier("tucker"), np.float32),
    "tt": (TensorRegressor("tt", rank=(32, 8, 3)), np.float32),
    "ring": (TensorRegressor("ring", rank=(6, 6, 6, 6)), np.float32),
}


@pytest.mark.parametrize("case", CASES)
def test_a_fit_stays_within_its_bound(case, small_blocks):
    model, dtype = CASES[case]
    peak, most = measure(model.set_params(max_iter=1, random_state=0), 240, (96, 7, 7), 3, dtype)
    assert 0.3 * most < peak < most


@pytest.mark.parametrize(
    "case",
    [
        "cp",
        "tt",
        "tucker, classes",
        "ring",
    ],
)
def test_no_cycle_of_references_keeps_what_a_fit_made(case):
    """It would live until Python looks for cycles: on a GPU that may be too late."""
    model = clone(CASES[case][0]).set_params(max_iter=2, rank="auto", random_state=0)
    data = make(model, 20, (16, 5, 5), 3)
    gc.collect()
    gc.disable()
    try:
        with Memory() as memory:
            fit_quietly(model, *data)
            kept = memory.now
            gc.collect()
            assert kept == memory.now > 0
    finally:
        gc.enable()


def test_the_memory_grows_with_the_samples_as_its_bound_does():
    """At the sizes of blocks that everybody gets."""
    settings = {"max_iter": 1, "random_state": 0}
    few, many = (measure(TensorRegressor(rank=16, **settings), n, (128, 7, 7), 2) for n in (400, 800))
    assert many[0] - few[0] < 1.05 * (many[1] - few[1])


def test_samples_in_batches_are_never_copied_all(small_blocks):
    x = torch.randn(300, 96, 7, 7).half()
    layer = build_layer("cp", (96, 7, 7), (2,), 32, 0.5, "auto", "bernoulli")
    with Memory() as memory:
        prepared = Prepared(x, torch.randn(300, 2), None, "regression", batch_size=20)
        fit(layer, prepared, alpha=1e-3, seed=0, max_iter=2)
    assert memory.peak < 0.4 * 4 * x.numel()
