"""Calibrations in files: the plain values as JSON in the header, the rest as tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tensor_dropout.atomic_files import replacing
from tensor_dropout.calibration.classification import ClassCalibration
from tensor_dropout.calibration.model import ModelCalibration, carried_calibration
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout.errors import TensorDropoutError

FORMAT_VERSION = 1
_HEADER = "tensor_dropout_calibration"
_PREFIX = "..calibration."
"""How its tensors begin among the weights of a network; no name in a state dict has two dots."""


def save_calibration(calibration: ModelCalibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration to a file of its own, beside the weights. It appears whole or not at all.

    Args:
        calibration: it.
        path: where; ``calibration.safetensors`` is the customary name.
    """
    config, tensors = describe_calibration(calibration)
    target = Path(path)
    if not target.parent.is_dir():
        raise TensorDropoutError(f"save_calibration: the folder {target.parent} does not exist; make it first")
    with replacing(target) as temporary:
        save_file(tensors, str(temporary), metadata={_HEADER: json.dumps(config)})


def load_calibration(path: str | os.PathLike[str]) -> ModelCalibration:
    """Read what :func:`save_calibration` wrote; nothing in it can execute code.

    Raises:
        TensorDropoutError: if the file is not such a one, is damaged, or of a newer version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
        if header is None:
            raise TensorDropoutError(f"load_calibration: {path} is no calibration; td.load reads models")
        return restore_calibration(json.loads(header), load_file(path), f"load_calibration: {path}")
    except OSError as error:
        raise TensorDropoutError(f"load_calibration: {path} cannot be read: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, TensorDropoutError):
            raise
        raise TensorDropoutError(f"load_calibration: {path} is damaged: {error}") from error


def describe_calibration(calibration: ModelCalibration) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The plain values, as JSON takes them, and the tensors."""
    tensors: dict[str, Tensor] = {}
    plain = {}
    for name, value in calibration.errors.as_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value.contiguous()
        elif isinstance(value, tuple):
            tensors |= {f"{name}.{number}": part.contiguous() for number, part in enumerate(value)}
        else:
            plain[name] = value
    config = {
        "version": FORMAT_VERSION, "task": calibration.task, "model": calibration.model,
        "uses_masks": calibration.uses_masks, "about": calibration.about, "errors": plain,
    }  # fmt: skip
    return config, tensors


def restore_calibration(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str) -> ModelCalibration:
    """The inverse of :func:`describe_calibration`.

    Args:
        config: the plain values.
        tensors: the others.
        where: the operation and the file, to begin messages.

    Raises:
        TensorDropoutError: if it is of a newer version.
    """
    if config["version"] != FORMAT_VERSION:
        raise TensorDropoutError(
            f"{where} has version {config['version']}, this library reads {FORMAT_VERSION}; upgrade it"
        )
    values: dict[str, Any] = dict(config["errors"])
    for name, tensor in sorted(tensors.items()):
        whole, dot, _ = name.partition(".")
        values[whole] = (*values.get(whole, ()), tensor) if dot else tensor
    kind = ClassCalibration if config["task"] == "classification" else Calibration
    errors = kind.from_dict(values)
    return ModelCalibration(config["task"], errors, config["model"], config["uses_masks"], config["about"])


# Among the weights of a network.


def describe_carried(model: nn.Module) -> tuple[dict[str, Any] | None, dict[str, Tensor]]:
    """The calibration that a network carries, if it does, as JSON types and as tensors for the file of its weights."""
    calibration = carried_calibration(model)
    if calibration is None:
        return None, {}
    config, tensors = describe_calibration(calibration)
    return config, {f"{_PREFIX}{name}": tensor for name, tensor in tensors.items()}


def read_carried(config: Mapping[str, Any] | None, path: str | os.PathLike[str]) -> ModelCalibration | None:
    """The inverse of :func:`describe_carried`, from the file of the weights."""
    if config is None:
        return None
    stored = load_file(path).items()
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in stored if name.startswith(_PREFIX)}
    return restore_calibration(config, tensors, f"load: the calibration in {path}")


def load_weights(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The weights in a file, without the calibration."""
    return {name: tensor for name, tensor in load_file(path).items() if not name.startswith(_PREFIX)}
