"""TensorClassifier: classes of any kind, probabilities, weights of samples and of classes, bad input."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import scipy.sparse
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.utils.class_weight import compute_sample_weight

import tensor_dropout as td
from estimators_under_test import SMALL, assert_one_sentence, fit_quietly, make_classes, relative
from tensor_dropout.sklearn import TensorClassifier

QUICK = {**SMALL, "rank": "auto", "theta": 0.8, "alpha": 1e-2}
TO_THE_END = {"theta": 0.8, "max_iter": 300, "tol": 1e-7, "random_state": 0}


def fitted(X, y, **settings):
    return fit_quietly(TensorClassifier(**{**QUICK, **settings}), X, y)


# Classes and probabilities.


@pytest.mark.parametrize("factorization", ["cp", "tucker", "tt", "ring"])
def test_every_format_tells_classes_of_new_samples(factorization):
    X, y = make_classes(n=160)
    model = fitted(X[:100], y[:100], factorization=factorization)
    assert model.method_ == factorization
    assert model.score(X[100:], y[100:]) > 0.6  # a third by chance
    assert model.score(X[:100], y[:100]) > 0.9


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(("shape", "axis"), [((9,), 1), ((5, 4), -1), ((5, 3, 4), 2)], ids=str)
def test_probabilities_are_the_softmax_of_the_layer(shape, axis, classes):
    X, y = make_classes(shape, classes, dtype=np.float64)
    model = fitted(X, y, channel_axis=axis)
    with torch.no_grad():
        logits = model.layer_(torch.from_numpy(X))
    probabilities = model.predict_proba(X)
    assert probabilities.shape == (60, classes)
    assert np.allclose(probabilities, logits.softmax(1).numpy(), rtol=1e-10)
    assert np.allclose(model.predict_log_proba(X), np.log(probabilities), rtol=1e-10)
    assert np.array_equal(model.predict(X), model.classes_[probabilities.argmax(1)])
    decision = model.decision_function(X)
    expected = logits[:, 1] - logits[:, 0] if classes == 2 else logits
    assert np.allclose(decision, expected.numpy(), rtol=1e-10)
    assert model.coef_.shape == (*shape, classes)
    assert np.allclose(np.tensordot(X, model.coef_, len(shape)) + model.intercept_, logits.numpy())


NAMES = {
    "words": np.array(["kite", "ant", "bee"]),
    "objects": np.array(["kite", "ant", "bee"], dtype=object),
    "numbers with gaps": np.array([7, -2, 40]),
    "whole floats": np.array([2.0, 0.0, 1.0]),
    "small integers": np.array([2, 0, 200], dtype=np.uint8),
}


@pytest.mark.parametrize("kind", NAMES)
def test_classes_have_any_names_and_are_sorted(kind):
    X, y = make_classes()
    names = NAMES[kind]
    model, plain = fitted(X, names[y]), fitted(X, y)
    assert model.classes_.tolist() == sorted(names.tolist())
    assert model.classes_.dtype == names.dtype
    predicted = model.predict(X)
    assert predicted.dtype == names.dtype
    assert model.score(X, names[y]) > 0.8
    assert np.mean(predicted == names[plain.predict(X)]) >= 0.9  # another order of the outputs, another start


@pytest.mark.parametrize("names", [np.array([False, True]), np.array(["no", "yes"])], ids=["bool", "str"])
def test_two_classes_have_one_decision(names):
    X, y = make_classes(classes=2)
    model = fitted(X, names[y])
    decision = model.decision_function(X)
    assert decision.shape == (60,)
    assert np.array_equal(model.predict(X), names[(decision > 0).astype(int)])
    assert np.allclose(model.predict_proba(X)[:, 1], 1 / (1 + np.exp(-decision)), atol=1e-6)


def test_tensors_give_tensors_and_classes_are_an_array():
    X, y = make_classes()
    model, expected = fitted(torch.from_numpy(X), torch.from_numpy(y)), fitted(X, y)
    given = torch.from_numpy(X)
    for name in ("predict_proba", "predict_log_proba", "decision_function"):
        found = getattr(model, name)(given)
        assert isinstance(found, torch.Tensor)
        assert np.array_equal(found.numpy(), getattr(expected, name)(X))
    assert isinstance(model.predict(given), np.ndarray)
    assert np.array_equal(model.predict(given), expected.predict(X))


def test_a_column_of_classes_is_taken_with_a_warning_as_elsewhere():
    X, y = make_classes()
    with pytest.warns(UserWarning, match="column-vector"):
        model = fitted(X, y[:, None])
    assert np.array_equal(model.predict(X), fitted(X, y).predict(X))


def test_dropout_makes_the_probabilities_less_extreme():
    X, y = make_classes(n=120)
    y[::3] = np.random.default_rng(0).integers(0, 3, 40)  # whatever the features are
    extremes = [np.abs(fitted(X, y, theta=theta).predict_log_proba(X)).mean() for theta in (1.0, 0.7, 0.4)]
    assert extremes[0] > 1.05 * extremes[1] > 1.1 * extremes[2]


def test_logarithms_of_probabilities_are_finite_where_a_probability_is_none():
    X, y = make_classes(dtype=np.float64)
    model = fitted(X, y)
    far = 2000.0 * (X - X.mean(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        logs = model.predict_log_proba(far)
    assert np.isfinite(logs).all()
    assert logs.min() < -800
    assert (model.predict_proba(far) == 0).any()


# Weights.


def test_a_weight_of_two_is_a_row_twice_and_of_zero_none():
    X, y = make_classes((5, 4), n=40, dtype=np.float64)
    weights = np.random.default_rng(1).integers(0, 3, 40)
    weighted = fit_quietly(TensorClassifier(**TO_THE_END), X, y, sample_weight=weights)
    repeated = fit_quietly(TensorClassifier(**TO_THE_END), X.repeat(weights, 0), y.repeat(weights, 0))
    plain = fit_quietly(TensorClassifier(**TO_THE_END), X, y)
    expected = repeated.decision_function(X)
    assert relative(weighted.decision_function(X), expected) < 0.01
    assert relative(plain.decision_function(X), expected) > 0.05
    assert weighted.alpha_ == pytest.approx(repeated.alpha_)


@pytest.mark.parametrize("class_weight", ["balanced", {0: 1.0, 1: 5.0}])
def test_weights_of_classes_are_weights_of_their_samples(class_weight):
    X, y = make_classes((4, 3), classes=2, n=120)
    y = ((y == 1) & (np.arange(120) % 3 == 0)).astype(int)  # a rare class, of which the features tell a part
    by_class = fitted(X, y, class_weight=class_weight)
    by_sample = fit_quietly(TensorClassifier(**QUICK), X, y, sample_weight=compute_sample_weight(class_weight, y))
    assert np.array_equal(by_class.decision_function(X), by_sample.decision_function(X))
    assert by_class.predict(X).sum() > 1.5 * fitted(X, y).predict(X).sum() > 0


def test_weights_of_classes_and_of_samples_are_multiplied():
    X, y = make_classes((4, 3), classes=2)
    weights = np.linspace(0.2, 3, 60)
    both = fit_quietly(TensorClassifier(class_weight={0: 1.0, 1: 5.0}, **QUICK), X, y, sample_weight=weights)
    product = fit_quietly(TensorClassifier(**QUICK), X, y, sample_weight=weights * np.where(y == 1, 5.0, 1.0))
    assert np.array_equal(both.decision_function(X), product.decision_function(X))


# In scikit-learn.


def test_scikit_learns_scores_and_searches_take_it():
    X, y = make_classes(classes=2, n=60)
    names = np.array(["no", "yes"])[y]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        search = GridSearchCV(TensorClassifier(**QUICK), {"theta": [0.5, 1.0]}, cv=2, scoring="neg_log_loss")
        search.fit(X, names)
        areas = cross_val_score(TensorClassifier(**QUICK), X, names, cv=2, scoring="roc_auc")
        held_out = cross_val_predict(TensorClassifier(**QUICK), X, names, cv=2, method="predict_proba")
    assert search.best_params_["theta"] in (0.5, 1.0)
    assert np.isfinite(search.cv_results_["mean_test_score"]).all()
    assert areas.min() > 0.6
    assert held_out.shape == (60, 2)
    assert np.allclose(held_out.sum(1), 1, atol=1e-6)


def test_what_did_not_converge_names_the_remedy_where_it_was_called():
    X, y = make_classes()
    with pytest.warns(ConvergenceWarning, match="TensorClassifier: not converged.*raise max_iter") as caught:
        TensorClassifier(max_iter=2, random_state=0).fit(X, y)
    assert caught[0].filename == __file__


# Bad input: one clear sentence each.

X, Y = make_classes((4, 3), 2, n=12)
MIXED = np.array(["a", 1] * 6, dtype=object)
BAD_CLASSES = {
    "no y": (None, "requires y to be passed"),
    "another n": (Y[:-1], "X has 12 rows, y has 11"),
    "one class": (np.full(12, "a"), "at least 2 classes in y, got one class only: .*'a'"),
    "NaN": (np.where(np.arange(12) == 5, np.nan, Y), "Input y contains NaN or infinity"),
    "a class that is missing": (np.array([None, *"ababababaab"], dtype=object), "y holds None; leave out such rows"),
    "a class of NaN among words": (
        np.array([np.nan, *"ababababaab"], dtype=object),
        "y holds nan; leave out such rows",
    ),
    "NaN among objects": (np.array([np.nan, *[0.0, 1.0] * 5, 1.0], dtype=object), "y holds nan"),
    "a masked class": (np.ma.masked_array(Y, np.eye(12)[2]), "1 entries of y are masked"),
    "amounts": (Y + 0.37, "Unknown label type: continuous"),
    "words and numbers": (MIXED, "y mixes int, str; give all classes names, or all numbers"),
    "two columns": (np.stack([Y, Y], 1), "y should be a 1d array"),
    "sparse": (scipy.sparse.csr_matrix(Y[:, None]), r"sparse targets are not supported.*call y\.toarray\(\)"),
    "sparse in torch": (torch.from_numpy(Y).to_sparse(), r"sparse targets are not supported.*call y\.to_dense\(\)"),
    "ragged": ([[1, 2], [3]] * 6, "its rows of equal shape"),
}
BAD_SETTINGS = {
    "weights of an unknown kind": ({"class_weight": "fair"}, "'balanced'.*'fair'"),
    "theta": ({"theta": 0}, "theta is a number"),
    "alpha": ({"alpha": -1}, "alpha is a number of at least 0, got -1"),
    "factorization": ({"factorization": "svd"}, "factorization is one of .*'svd'"),
    "solver": ({"solver": "sgd"}, "solver is 'auto'.*'sgd'"),
    "channel axis": ({"channel_axis": 3}, "channel_axis=3, but X has the axes 0 to 2"),
}


@pytest.mark.parametrize("case", BAD_CLASSES)
def test_bad_classes_are_refused(case):
    y, message = BAD_CLASSES[case]
    with pytest.raises(ValueError, match=message) as caught:
        TensorClassifier(max_iter=2).fit(X, y)
    if case not in ("amounts", "two columns"):  # scikit-learn's own words, of several lines
        assert_one_sentence(caught)


@pytest.mark.parametrize("class_weight", [None, {0: 1.0, 1: 0.0}])
def test_a_weight_for_one_class_alone_is_refused(class_weight):
    weights = None if class_weight else 1.0 * (Y == 0)
    with pytest.raises(
        td.TensorDropoutError, match=r"at least 2 classes, but only those of class .*0.* have"
    ) as caught:
        TensorClassifier(max_iter=2, class_weight=class_weight).fit(X, Y, weights)
    assert_one_sentence(caught)


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings_are_refused(case):
    settings, message = BAD_SETTINGS[case]
    with pytest.raises(ValueError, match=message) as caught:
        TensorClassifier(**{"max_iter": 2, **settings}).fit(X, Y)
    if case != "weights of an unknown kind":  # scikit-learn's own
        assert isinstance(caught.value, td.TensorDropoutError)
        assert_one_sentence(caught)
