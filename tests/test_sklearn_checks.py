"""scikit-learn's own checks of estimators; the searches with one setting, on two folds."""

from __future__ import annotations

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from tensor_dropout.sklearn import TensorClassifier, TensorClassifierCV, TensorRegressor, TensorRegressorCV

QUICK = {"max_iter": 20, "tol": 0.05}
ONE_SETTING = {"thetas": (0.7,), "alphas": (1e-3,), "cv": 2}
ESTIMATORS = [
    TensorRegressor(**QUICK),
    TensorClassifier(**QUICK),
    TensorRegressorCV(**ONE_SETTING, **QUICK),
    TensorClassifierCV(**ONE_SETTING, **QUICK),
]


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@parametrize_with_checks(ESTIMATORS)
def test_scikit_learns_check_passes(estimator, check):
    check(estimator)
