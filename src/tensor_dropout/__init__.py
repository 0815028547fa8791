"""Tensor regression layers with tensor dropout for PyTorch.

``import tensor_dropout as td``. θ (``theta``) is the KEEP probability everywhere. A name is imported when it is first
used: ``import tensor_dropout`` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.version import __version__ as __version__

if TYPE_CHECKING:
    from tensor_dropout.calibration.files import load_calibration as load_calibration
    from tensor_dropout.calibration.files import save_calibration as save_calibration
    from tensor_dropout.calibration.model import ModelCalibration as ModelCalibration
    from tensor_dropout.calibration.model import calibrate as calibrate
    from tensor_dropout.errors import TensorDropoutError as TensorDropoutError
    from tensor_dropout.features.attach import attach_head as attach_head
    from tensor_dropout.files import load as load
    from tensor_dropout.files import save as save
    from tensor_dropout.kernels.dispatch import without_kernels as without_kernels
    from tensor_dropout.layers.dropout import TensorDropout as TensorDropout
    from tensor_dropout.layers.formats import *  # noqa: F403 - the layers, under their names there
    from tensor_dropout.layers.laws import ExchangeableLaw as ExchangeableLaw
    from tensor_dropout.layers.laws import Law as Law
    from tensor_dropout.layers.laws import register_law as register_law
    from tensor_dropout.layers.moments import Moments as Moments
    from tensor_dropout.layers.moments import SampledMoments as SampledMoments
    from tensor_dropout.layers.randomized import fixed_masks as fixed_masks
    from tensor_dropout.layers.regression import TensorRegression as TensorRegression
    from tensor_dropout.layers.theta_schedule import ThetaSchedule as ThetaSchedule
    from tensor_dropout.losses import expected_cross_entropy as expected_cross_entropy
    from tensor_dropout.losses import expected_mse as expected_mse
    from tensor_dropout.optimizer_groups import param_groups as param_groups
    from tensor_dropout.prediction import Prediction as Prediction
    from tensor_dropout.prediction import predict as predict
    from tensor_dropout.surgery.merge import merge_ as merge_
    from tensor_dropout.surgery.merge import truncate_ as truncate_
    from tensor_dropout.surgery.report import ConversionReport as ConversionReport
    from tensor_dropout.surgery.tensorize import tensorize_ as tensorize_

_MODULES = {
    "calibration.files": ("load_calibration", "save_calibration"),
    "calibration.model": ("ModelCalibration", "calibrate"),
    "errors": ("TensorDropoutError",),
    "features.attach": ("attach_head",),
    "files": ("load", "save"),
    "kernels.dispatch": ("without_kernels",),
    "layers.dropout": ("TensorDropout",),
    "layers.laws": ("ExchangeableLaw", "Law", "register_law"),
    "layers.moments": ("Moments", "SampledMoments"),
    "layers.randomized": ("fixed_masks",),
    "layers.regression": ("TensorRegression",),
    "layers.theta_schedule": ("ThetaSchedule",),
    "losses": ("expected_cross_entropy", "expected_mse"),
    "optimizer_groups": ("param_groups",),
    "prediction": ("Prediction", "predict"),
    "surgery.merge": ("merge_", "truncate_"),
    "surgery.report": ("ConversionReport",),
    "surgery.tensorize": ("tensorize_",),
}
_PLACES = {name: f"{__name__}.{module}" for module, names in _MODULES.items() for name in names}
_PLACES |= {format.layer_name: format.module for format in FORMATS.values()}

__all__ = sorted(["__version__", *_PLACES])


_SUBMODULES = {module.partition(".")[0] for module in _MODULES} | {"metrics", "robustness", "sharding"}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
