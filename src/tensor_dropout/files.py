"""Saving and loading: one safetensors file, with a versioned JSON config in its header.

Nothing that is loaded can execute code: the weights are raw numbers, the config is data, and a law is found by a
name that was registered in this process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_model, save_model
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.cp import CPRegression
from tensor_dropout.layers.dropout import TensorDropout
from tensor_dropout.layers.emission import unwrap
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.layers.tt import TTRegression
from tensor_dropout.layers.tucker import TuckerRegression
from tensor_dropout.version import __version__
from tensor_dropout.writing import replacing

FORMAT_VERSION = 1
_HEADER = "tensor_dropout"
_LAYERS = {cls.__name__: cls for cls in (TuckerRegression, CPRegression, TTRegression)}
_STRUCTURE = ("type", "input_shape", "output_shape", "rank", "bias")


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a layer, or a model that contains some, to one safetensors file.

    The file appears whole or not at all. DDP and ``torch.compile`` wrappers are looked through.

    Args:
        model: a tensor regression layer or a module that contains some.
        path: where to write; ``.safetensors`` is the customary ending.

    Raises:
        TensorDropoutError: if the model has no tensor regression layer, or a law without a name.

    Example:
        >>> import tempfile, os, torch, tensor_dropout as td
        >>> head = td.CPRegression((8, 4, 4), 10, rank=6, dropout=0.8)
        >>> path = os.path.join(tempfile.mkdtemp(), "head.safetensors")
        >>> td.save(head, path)
        >>> x = torch.randn(2, 8, 4, 4)
        >>> bool((td.load(path).eval()(x) == head.eval()(x)).all())
        True
    """
    model = unwrap(model)
    layers = {name: layer.config() for name, layer in tensor_layers(model).items()}
    if not layers:
        raise TensorDropoutError(
            f"save: {type(model).__name__} has no tensor regression layer; use safetensors itself for plain models"
        )
    config = {"version": FORMAT_VERSION, "library": __version__, "layers": layers}
    target = Path(path)
    if not target.parent.is_dir():
        raise TensorDropoutError(f"save: the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise TensorDropoutError(f"save: {target} is a folder; name a file in it")
    with replacing(target) as temporary:
        save_model(model, str(temporary), metadata={_HEADER: json.dumps(config)})


def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> nn.Module:
    """Read what :func:`save` wrote.

    Args:
        path: the file.
        model: None if the file holds a bare layer, which is then built anew; else a model of the same structure,
            which is filled in place, its dropout settings included.

    Returns:
        The layer or the model, in the mode (train or eval) that it had.

    Raises:
        TensorDropoutError: if the file is not ours, of a newer version, of another structure than ``model``, or
            names a law that is not registered.
    """
    layers = _read_layers(path)
    with _blaming(path):
        if model is None:
            if set(layers) != {""}:
                raise TensorDropoutError(
                    f"load: {path} holds a network with the layers {list(layers)}; pass model= to fill it"
                )
            model = _build(layers[""], path)
        target = unwrap(model)
        found = tensor_layers(target)
        _match(layers, found, path)
        dropouts = {name: _build_dropout(config["dropout"]) for name, config in layers.items()}
        for name, dropout in dropouts.items():
            if dropout is not None:
                dropout.dropped_axes(found[name]._ranks, found[name].mode_numbers)
    before = {name: layer.dropout for name, layer in found.items()}
    try:
        _set_dropouts(found, dropouts)
        _check_weights(target, path)
        load_model(target, path)
    except BaseException:
        _set_dropouts(found, before)
        raise
    return model


def tensor_layers(model: nn.Module) -> dict[str, TensorRegression]:
    """The tensor regression layers of a model by name; a bare layer has the name ''."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorRegression)}


@contextmanager
def _blaming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a damaged config makes fail into our exception."""
    try:
        yield
    except TensorDropoutError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TensorDropoutError(f"load: the config in the header of {path} is damaged: {error!r}") from error


def _read_layers(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The configs of the saved layers by name."""
    if not Path(path).is_file():
        what = "is a folder, not a file" if Path(path).is_dir() else "does not exist"
        raise TensorDropoutError(f"load: there is no file {path}: it {what}")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
    except SafetensorError as error:
        raise TensorDropoutError(
            f"load: {path} is not a safetensors file ({error}); a file of torch.save goes through load_state_dict"
        ) from error
    if header is None:
        raise TensorDropoutError(f"load: {path} was not written by td.save; load plain weights with load_state_dict")
    with _blaming(path):
        config = json.loads(header)
        if config["version"] != FORMAT_VERSION:
            raise TensorDropoutError(
                f"load: {path} has format version {config['version']}, this library reads version {FORMAT_VERSION}; "
                "upgrade it"
            )
        layers: dict[str, Any] = dict(config["layers"].items())
        return layers


def _build(config: dict[str, Any], path: str | os.PathLike[str]) -> TensorRegression:
    if config["type"] not in _LAYERS:
        raise TensorDropoutError(
            f"load: {path} holds a layer of the unknown type {config['type']!r}; known are {list(_LAYERS)}; pass "
            "model= to fill one of your own"
        )
    with safe_open(path, framework="pt") as file:
        weight = next(key for key in file.keys() if not key.endswith("theta"))  # noqa: SIM118 - not a mapping
        dtype = file.get_tensor(weight).dtype
    rank = config["rank"][0] if config["type"] == "CPRegression" else config["rank"]
    return _LAYERS[config["type"]](
        config["input_shape"],
        config["output_shape"],
        rank,
        bias=config["bias"],
        init=config["init"],
        dropout=_build_dropout(config["dropout"]),
        dtype=dtype,
    )


def _build_dropout(config: dict[str, Any] | None) -> TensorDropout | None:
    return None if config is None else TensorDropout(**config)


def _set_dropouts(layers: dict[str, TensorRegression], dropouts: dict[str, TensorDropout | None]) -> None:
    for name, layer in layers.items():
        dropout = dropouts[name]
        layer.dropout = None if dropout is None else dropout.to(layer.operands()[0].device).train(layer.training)


def _describe(layers: Collection[str]) -> str:
    return "a bare layer" if set(layers) == {""} else f"tensor regression layers at {sorted(layers)}"


def _match(layers: dict[str, Any], found: dict[str, TensorRegression], path: str | os.PathLike[str]) -> None:
    """Check that the model has the saved layers."""
    if set(found) != set(layers):
        raise TensorDropoutError(f"load: {path} has {_describe(layers)}, the model {_describe(found)}")
    for name, config in layers.items():
        present = found[name].config()
        for key in _STRUCTURE:
            if present[key] != config[key]:
                raise TensorDropoutError(
                    f"load: layer {name!r} of {path} has {key}={config[key]}, the model's has {present[key]}"
                )


def _check_weights(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Check names and shapes before anything is overwritten; tied weights are stored once."""
    state = model.state_dict()
    with safe_open(path, framework="pt") as file:
        saved = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - not a mapping
    stored = {state[key].data_ptr() for key in saved if key in state}
    missing = [key for key, tensor in state.items() if key not in saved and tensor.data_ptr() not in stored]
    for problem, names in (
        ("lacks", missing),
        ("has, beyond the model,", [key for key in saved if key not in state]),
        ("has another shape of", [key for key in saved if key in state and saved[key] != tuple(state[key].shape)]),
    ):
        if names:
            raise TensorDropoutError(f"load: the weights of {path} do not fit the model: the file {problem} {names}")
