"""Small fits take one thread, and leave the number of threads as it was."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tensor_dropout.fitting import fit, threads
from tensor_dropout.sklearn import TensorRegressor, TensorRegressorCV


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seen(monkeypatch):
    """How many threads each minimization had."""
    counts = []
    minimize = fit.minimize

    def spy(*arguments, **settings):
        counts.append(torch.get_num_threads())
        return minimize(*arguments, **settings)

    monkeypatch.setattr(fit, "minimize", spy)
    return counts


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(30, 5, 4)).astype(np.float32), rng.normal(size=(30, 2)).astype(np.float32)


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("kind", [TensorRegressor, TensorRegressorCV])
def test_small_fits_take_one_thread(seen, data, monkeypatch, kind, small):
    if not small:
        monkeypatch.setattr(threads, "SMALL", 30 * 5 * 4 - 1)
    settings = {"thetas": (0.5,), "cv": 2} if kind is TensorRegressorCV else {}
    kind(max_iter=100, tol=0.1, random_state=0, **settings).fit(*data)
    assert set(seen) == {1 if small else 2}
    assert torch.get_num_threads() == 2


def test_the_number_comes_back_after_a_failure(data, monkeypatch):
    monkeypatch.setattr(fit, "minimize", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        TensorRegressor().fit(*data)
    assert torch.get_num_threads() == 2
