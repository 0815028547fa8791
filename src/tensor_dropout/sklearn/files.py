"""Fitted estimators in files: :func:`td.save` and :func:`td.load` take them as networks that carry their settings.

The file has the weights and the arrays of the fit as tensors, and the rest as JSON: the class by its name, the
settings, the fitted attributes and the modules of ``layer_``. All of them are looked up in lists; nothing that is
loaded can execute code.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from torch import Tensor, nn

from tensor_dropout.calibration.classification import ClassCalibration
from tensor_dropout.calibration.leverage import Leverage
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.dropout import TensorDropout
from tensor_dropout.layers.formats import find_layer
from tensor_dropout.layers.laws import law_name
from tensor_dropout.layers.regression import TensorRegression, unwarned
from tensor_dropout.sklearn.base import MoveChannels
from tensor_dropout.sklearn.held_out import CrossFit

BUILDER = "sklearn"
"""The name of the entry point that builds such networks."""

ARGUMENTS: dict[type[nn.Module], tuple[str, ...]] = {
    MoveChannels: ("axis",),
    nn.Linear: ("in_features", "out_features"),
    nn.Flatten: ("start_dim", "end_dim"),
    nn.Unflatten: ("dim", "unflattened_size"),
    nn.AdaptiveAvgPool1d: ("output_size",),
    nn.AdaptiveAvgPool2d: ("output_size",),
    nn.AdaptiveAvgPool3d: ("output_size",),
}
"""The plain modules of a ``layer_`` (ridge, or merged), with the arguments that make them anew."""

STRUCTURE = ("input_shape", "output_shape", "rank", "bias", "dropout")


class FittedNetwork(nn.Module):
    """A fitted estimator as a network: its ``layer_``, and its arrays as buffers.

    Args:
        settings: what makes the estimator anew, as JSON types; see :func:`describe`.
        layer: its ``layer_``.
        arrays: its arrays, by the names that the settings use.
        folds: the modules of its ``cross_fits_``.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        layer: nn.Module,
        arrays: Mapping[str, Tensor],
        folds: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__()
        self.settings, self.layer, self.folds = settings, layer, nn.ModuleList(folds)
        for name, array in arrays.items():
            self.register_buffer(name, array)

    def forward(self, x: Tensor) -> Tensor:
        """What ``layer_`` gives."""
        output: Tensor = self.layer(x)
        return output

    def as_estimator(self) -> BaseEstimator:
        """The estimator, fitted."""
        arrays = dict(self.named_buffers(recurse=False))
        estimator = known_classes()[self.settings["class"]](**decode(self.settings["settings"], arrays))
        for name, value in decode(self.settings["fitted"], arrays).items():
            if not is_fitted_name(name):
                raise ValueError(f"{name!r} is no attribute of a fitted estimator")
            setattr(estimator, name, value)
        if hasattr(estimator, "predict_proba") != hasattr(estimator, "classes_"):
            raise ValueError(f"{self.settings['class']} and its fitted attributes do not belong together")
        estimator.layer_ = self.layer
        if len(self.folds):
            fits = [decode(each, arrays) for each in self.settings["folds"]]
            estimator.cross_fits_ = [
                CrossFit(module, None if fit["leverage"] is None else Leverage(*fit["leverage"]), fit["rows"])
                for module, fit in zip(self.folds, fits, strict=True)
            ]
        return estimator


def describe(estimator: Any) -> FittedNetwork:
    """The network of a fitted estimator.

    A setting that is no plain value, such as a splitter as ``cv`` or a ``RandomState``, is left out with a warning:
    what is loaded predicts the same, and has the default there.

    Raises:
        TensorDropoutError: if it is not fitted, or of a class or with modules that :func:`td.load` could not make.
    """
    name = type(estimator).__name__
    if known_classes().get(name) is not type(estimator):
        raise TensorDropoutError(
            f"save: {name} is a class of your own; td.save takes {', '.join(known_classes())} themselves, so save "
            "its layer_"
        )
    if not hasattr(estimator, "layer_"):
        raise TensorDropoutError(f"save: this {name} is not fitted yet; call fit first")
    arrays: dict[str, Tensor] = {}
    settings, defaults = {}, known_classes()[name]().get_params(deep=False)
    for setting, value in estimator.get_params(deep=False).items():
        try:
            settings[setting] = encode(value, arrays)
        except TypeError:
            warnings.warn(
                f"td.save: {name}'s {setting} is a {type(value).__name__}, which a file does not hold; when loaded it "
                f"predicts the same and has the default {setting}={defaults[setting]!r}",
                UserWarning,
                stacklevel=5,
            )
    fitted, fits = {}, getattr(estimator, "cross_fits_", None) or []
    for attribute, value in vars(estimator).items():
        if is_fitted_name(attribute) and attribute != "layer_" and not (attribute == "cross_fits_" and fits):
            try:
                fitted[attribute] = encode(value, arrays)
            except TypeError as error:
                raise TensorDropoutError(f"save: {name}'s {attribute} cannot be written: {error}") from None
    described = {
        "builder": BUILDER,
        "class": name,
        "settings": {"dict": [list(pair) for pair in settings.items()]},
        "fitted": {"dict": [list(pair) for pair in fitted.items()]},
        "layer": describe_module(estimator.layer_),
        "folds": [encode({"leverage": fit.leverage and tuple(fit.leverage), "rows": fit.rows}, arrays) for fit in fits],
        "fold_layers": [describe_module(fit.module) for fit in fits],
        "arrays": {key: [list(array.shape), str(array.dtype)[6:]] for key, array in arrays.items()},
    }
    return FittedNetwork(described, estimator.layer_, arrays, [fit.module for fit in fits])


def build(settings: dict[str, Any]) -> FittedNetwork:
    """The network anew, its numbers not yet filled: the entry point of :func:`td.load`."""
    arrays = {
        name: torch.zeros(shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in settings["arrays"].items()
    }
    folds = [build_module(described) for described in settings.get("fold_layers", [])]
    return FittedNetwork(settings, build_module(settings["layer"]), arrays, folds).eval()


def known_classes() -> dict[str, Any]:
    """The estimators that are saved, by name."""
    from tensor_dropout import sklearn as estimators

    return {name: getattr(estimators, name) for name in estimators.ESTIMATORS}


def is_fitted_name(name: str) -> bool:
    """Whether an attribute is one that ``fit`` sets."""
    return name.isidentifier() and name.endswith("_") and not name.startswith("_")


# Modules.


def describe_module(module: nn.Module) -> dict[str, Any]:
    """What makes a module of a ``layer_`` anew, as JSON types."""
    kind = type(module).__name__
    if type(module) is nn.Sequential:
        return {"type": kind, "modules": [describe_module(part) for part in module]}
    if isinstance(module, TensorRegression):
        config = module.config()
        return {"type": config["type"], **{key: config[key] for key in STRUCTURE}}
    if type(module) not in ARGUMENTS:
        raise TensorDropoutError(f"save: layer_ holds a {kind}, which td.load could not make anew; save layer_ itself")
    arguments = {name: getattr(module, name) for name in ARGUMENTS[type(module)]}
    return {"type": kind, **arguments, **({"bias": module.bias is not None} if isinstance(module, nn.Linear) else {})}


def build_module(described: dict[str, Any]) -> nn.Module:
    """The inverse of :func:`describe_module`, with fresh weights."""
    arguments = dict(described)
    kind = arguments.pop("type")
    if kind == "Sequential":
        return nn.Sequential(*(build_module(part) for part in arguments["modules"]))
    if plain := next((module for module in ARGUMENTS if module.__name__ == kind), None):
        return plain(**{key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()})
    layer = find_layer(kind)
    if layer is None:
        raise TensorDropoutError(
            f"load: the file holds an estimator with a layer of the unknown type {kind!r}; register its format first"
        )
    dropout = None if arguments["dropout"] is None else TensorDropout(**arguments["dropout"])
    with unwarned():
        return layer(*(arguments[key] for key in STRUCTURE[:3]), bias=arguments["bias"], dropout=dropout)


# Values.


def encode(value: Any, arrays: dict[str, Tensor]) -> Any:
    """A value as JSON types; arrays of numbers are put into ``arrays``.

    Raises:
        TypeError: for what is no plain value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        return value.item()
    if isinstance(value, list | tuple):
        items = [encode(each, arrays) for each in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        return {"dict": [[encode(key, arrays), encode(each, arrays)] for key, each in value.items()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "OU":
        items = [encode(each, arrays) for each in value.ravel().tolist()]
        return {"array_of": str(value.dtype), "shape": list(value.shape), "items": items}
    if isinstance(value, np.ndarray | Tensor):
        tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
        name = f"array{len(arrays)}"
        arrays[name] = tensor.reshape(value.shape).clone()
        return {"array" if isinstance(value, np.ndarray) else "tensor": name}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, Calibration | ClassCalibration):
        kind = "calibration" if isinstance(value, Calibration) else "class_calibration"
        return {kind: encode(value.as_dict(), arrays)}
    law = law_name(value)
    if law is not None and not getattr(value, "min_rank", 0):
        return law
    raise TypeError(f"a {type(value).__name__} is no plain value")


def decode(value: Any, arrays: Mapping[str, Tensor]) -> Any:
    """The inverse of :func:`encode`."""
    if isinstance(value, list):
        return [decode(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items()))
    if kind == "tuple":
        return tuple(decode(each, arrays) for each in content)
    if kind == "dict":
        return {decode(key, arrays): decode(each, arrays) for key, each in content}
    if kind == "array_of":
        flat = np.empty(len(value["items"]), dtype=np.dtype(content))
        flat[:] = decode(value["items"], arrays)
        return flat.reshape(value["shape"])
    if kind == "array":
        return arrays[content].numpy()
    if kind == "tensor":
        return arrays[content]
    if kind == "calibration":
        return Calibration.from_dict(decode(content, arrays))
    if kind == "class_calibration":
        return ClassCalibration.from_dict(decode(content, arrays))
    if kind == "device":
        try:
            return torch.device(content)
        except RuntimeError as error:
            raise ValueError(f"{content!r} is no device") from error
    raise ValueError(f"a value of the unknown kind {kind!r}")
