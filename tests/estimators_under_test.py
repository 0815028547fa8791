"""Data and settings that the tests of the estimators share: small, and quick to fit."""

from __future__ import annotations

import warnings
from functools import reduce

import numpy as np
from sklearn.exceptions import ConvergenceWarning

SMALL = {"rank": 3, "max_iter": 40, "tol": 1e-2, "random_state": 0}


def make_data(shape=(6, 4, 3), outputs=(2,), n=40, dtype=np.float32, noise=0.1, seed=0):
    """Features with an offset and a scale, and targets of a weight of rank two, with a spread of ten."""
    rng = np.random.default_rng(seed)
    X = rng.normal(3.0, 2.0, (n, *shape))
    W = sum(reduce(np.multiply.outer, [rng.normal(size=size) for size in (*shape, *outputs)]) for _ in range(2))
    y = np.tensordot(X, W, len(shape))
    y = y / y.std() * 10 + noise * rng.normal(size=(n, *outputs)) + 5.0
    return X.astype(dtype), y.astype(np.float64 if dtype == np.float64 else np.float32)


def make_classes(shape=(6, 4, 3), classes=3, n=60, dtype=np.float32, seed=0):
    """Features, and for each sample which of some linear maps of rank two is the largest: numbers from 0."""
    X, scores = make_data(shape, (classes,), n, dtype, seed=seed)
    return X, ((scores - scores.mean(0)) / scores.std(0)).argmax(1)


def fit_quietly(model, *data, **arguments):
    """Fit where it does not matter whether it converged."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return model.fit(*data, **arguments)


def relative(a, b):
    """The largest difference, over the spread of b."""
    return np.abs(np.asarray(a) - np.asarray(b)).max() / np.asarray(b).std()


def spoil(X, value):
    """X with a number in row 3 that is none."""
    X = X.copy()
    X[3, 0, 0] = value
    return X


def assert_one_sentence(caught):
    """One line, no chain of errors behind it."""
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__
