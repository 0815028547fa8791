"""Tensor regression layers with tensor dropout for PyTorch.

``import tensor_dropout as td``. θ (``theta``) is the KEEP probability everywhere.
"""

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load, save
from tensor_dropout.kernels.dispatch import without_kernels
from tensor_dropout.layers.cp import CPRegression
from tensor_dropout.layers.dropout import TensorDropout
from tensor_dropout.layers.laws import ExchangeableLaw, Law, register_law
from tensor_dropout.layers.moments import Moments, SampledMoments
from tensor_dropout.layers.regression import TensorRegression, fixed_masks
from tensor_dropout.layers.schedule import ThetaSchedule
from tensor_dropout.layers.tt import TTRegression
from tensor_dropout.layers.tucker import TuckerRegression
from tensor_dropout.losses import expected_cross_entropy, expected_mse
from tensor_dropout.prediction import Prediction, predict
from tensor_dropout.surgery.merge import merge_, truncate_
from tensor_dropout.surgery.report import ConversionReport
from tensor_dropout.surgery.tensorize import tensorize_
from tensor_dropout.training.groups import param_groups
from tensor_dropout.version import __version__

__all__ = [
    "CPRegression",
    "ConversionReport",
    "ExchangeableLaw",
    "Law",
    "Moments",
    "Prediction",
    "SampledMoments",
    "TTRegression",
    "TensorDropout",
    "TensorDropoutError",
    "TensorRegression",
    "ThetaSchedule",
    "TuckerRegression",
    "__version__",
    "expected_cross_entropy",
    "expected_mse",
    "fixed_masks",
    "load",
    "merge_",
    "param_groups",
    "predict",
    "register_law",
    "save",
    "tensorize_",
    "truncate_",
    "without_kernels",
]
