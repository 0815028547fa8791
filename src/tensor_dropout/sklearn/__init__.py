"""Estimators in scikit-learn's manner: tensor regression that fits in seconds, without masks or a learning rate.

``from tensor_dropout.sklearn import TensorRegressor``; needs the extra ``sklearn``.
"""

try:
    import sklearn as _sklearn  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "tensor_dropout.sklearn needs scikit-learn: pip install 'tensor-dropout[sklearn]'"
    ) from error

from tensor_dropout.sklearn.classifier import TensorClassifier as TensorClassifier
from tensor_dropout.sklearn.feature_maps import FeatureMaps as FeatureMaps
from tensor_dropout.sklearn.regressor import TensorRegressor as TensorRegressor
from tensor_dropout.sklearn.search import TensorClassifierCV as TensorClassifierCV
from tensor_dropout.sklearn.search import TensorRegressorCV as TensorRegressorCV

ESTIMATORS = ("TensorClassifier", "TensorClassifierCV", "TensorRegressor", "TensorRegressorCV")
__all__ = ["FeatureMaps", "TensorClassifier", "TensorClassifierCV", "TensorRegressor", "TensorRegressorCV"]
