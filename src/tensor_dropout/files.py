"""Saving and loading: one safetensors file, with a versioned JSON config in its header.

The header names every tensor regression layer with its settings, the network if it is one of ours, and the surgery
that a converted network went through, so that the same surgery is done on a plain network before it is filled. A
calibration that the network carries is in the same file, its tensors under names that no state dict has.

Nothing that is loaded can execute code: the weights are raw numbers, the config is data, and a law is found by a
name that was registered in this process.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.nn.utils import prune

from tensor_dropout.atomic_files import replacing
from tensor_dropout.calibration.files import describe_carried, load_weights, read_carried
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.file_structure import (
    STRUCTURE,
    attach_recorded,
    build_dropout,
    build_layer,
    describe_attached,
    describe_net,
    describe_surgery,
    layers_by_every_name,
    repeat_surgery,
)
from tensor_dropout.layers.dropout import TensorDropout, check_theta
from tensor_dropout.layers.head_outputs import unwrap
from tensor_dropout.layers.laws import check_same_law, describe_law, registered_laws
from tensor_dropout.layers.randomized import tensor_layers
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.network_builders import build_network, settings_of
from tensor_dropout.surgery.exchange import Exchange, undone_on_failure
from tensor_dropout.version import __version__

FORMAT_VERSION = 1
WITH_CALIBRATION = 2
"""The version of files that hold a calibration, which an older library would take for weights."""
_HEADER = "tensor_dropout"


Model = TypeVar("Model", bound=nn.Module)


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a layer, a network that can be built anew, a model that contains such layers, or an estimator to one file.

    The file appears whole or not at all. DDP, DataParallel and ``torch.compile`` wrappers are looked through. What a
    parametrization (``torch.nn.utils.parametrize``) or pruning (``torch.nn.utils.prune``) adds is saved as it is: load
    it into a model that was prepared in the same way, or make it permanent before saving.

    The calibration that a network carries is in the file too: after :func:`td.attach_head`, or after
    ``model.calibration = td.calibrate(...)``. Where the weights have changed since, it is refused when it is used.

    Args:
        model: a tensor regression layer, a module that contains some (after ``tensorize_``, for instance), or a network
            with ``settings``; if that was changed since it was built, :func:`load` needs a model to fill. Or a fitted
            estimator of ``tensor_dropout.sklearn``: its settings and all that its fit set come back, and it predicts
            the same bit for bit. A setting that is no plain value, such as a splitter as ``cv`` or a ``RandomState``,
            is not written, with a warning; the loaded estimator has the default there.
        path: where to write; ``.safetensors`` is the customary ending.

    Raises:
        TensorDropoutError: if the model has no tensor regression layer, a law without a name, pruned factors or
            weights that share memory in another order, or if an estimator is not fitted.

    Example:
        >>> import tempfile, os, torch, tensor_dropout as td
        >>> head = td.CPRegression((8, 4, 4), 10, rank=6, dropout=0.8)
        >>> path = os.path.join(tempfile.mkdtemp(), "head.safetensors")
        >>> td.save(head, path)
        >>> x = torch.randn(2, 8, 4, 4)
        >>> bool((td.load(path).eval()(x) == head.eval()(x)).all())
        True
    """
    model = _unwrap(_as_network(model))
    _check_pruning(model)
    layers = {name: layer.config() for name, layer in tensor_layers(model).items()}
    net, attached = describe_net(model), describe_attached(model)
    if not layers and net is None and attached is None:
        ours = ", and was changed since build_net made it" if settings_of(model) else ""
        what = f"{type(model).__name__} has no tensor regression layer{ours}"
        raise TensorDropoutError(f"save: {what}; use safetensors itself for plain models")
    calibration, tensors = describe_carried(model)
    version = FORMAT_VERSION if calibration is None else WITH_CALIBRATION
    config = {"version": version, "library": __version__, "layers": layers}
    config |= {"calibration": calibration} if calibration is not None else {}
    config |= {"net": net} if net is not None else {}
    names = {layer["dropout"]["law"] for layer in layers.values() if layer["dropout"] is not None}
    if registered := registered_laws(names):
        config["laws"] = {name: describe_law(law) for name, law in registered.items()}
    config |= {"attached": attached} if attached is not None else {}
    config |= {"surgery": surgery} if (surgery := describe_surgery(model)) else {}
    target = Path(path)
    if not target.parent.is_dir():
        raise TensorDropoutError(f"save: the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise TensorDropoutError(f"save: {target} is a folder; name a file in it")
    with replacing(target) as temporary:
        try:
            save_model(_Stored(model, tensors), str(temporary), metadata={_HEADER: json.dumps(config)})
        except SafetensorError as error:
            raise TensorDropoutError(f"save: {target} could not be written: {error}") from error
        except RuntimeError as error:  # from its search for tensors that share memory
            raise _not_storable(model, target, error) from error


class _Stored(nn.Module):
    """The tensors of a file: those of a model, and those of its calibration."""

    def __init__(self, model: nn.Module, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self.tensors = {**model.state_dict(), **tensors}

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]  # safetensors asks for nothing else
        """The tensors by name."""
        return self.tensors


def _as_network(model: Any) -> nn.Module:
    """The network that an object stands for which is none: fitted estimators have a method of that name."""
    if isinstance(model, nn.Module):
        return model
    make = getattr(model, "as_network", None)
    if make is None or isinstance(model, type):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise TensorDropoutError(
            f"save: takes a torch module or a fitted estimator of tensor_dropout.sklearn, got {what}"
        )
    network: nn.Module = make()
    return network


def _not_storable(model: nn.Module, target: Path, error: RuntimeError) -> TensorDropoutError:
    strided = [name for name, tensor in model.state_dict().items() if not tensor.is_contiguous()]
    if not strided:
        return TensorDropoutError(f"save: {target} could not be written: {' '.join(str(error).split())}")
    return TensorDropoutError(
        f"save: {strided} share memory with other weights in another order, such as a transpose, which a safetensors "
        "file cannot hold; untie them (clone the parameter)"
    )


@overload
def load(path: str | os.PathLike[str], model: None = None) -> Any: ...
@overload
def load(path: str | os.PathLike[str], model: Model) -> Model: ...
def load(path: str | os.PathLike[str], model: nn.Module | None = None) -> Any:
    """Read what :func:`save` wrote.

    Args:
        path: the file.
        model: None if the file holds an estimator, a bare layer or a network that can be built anew; else a model
            of the same structure, which is filled in place, its dropout settings included. A plain model gets the
            recorded surgery first: save after ``tensorize_``, load into the network as it was before. After
            ``attach_head`` too: the headed network is returned, and shares the parameters of the plain one.

    Returns:
        The estimator, or the layer or the model, in the mode (train or eval) that it had. What is built anew has the
        dtypes of the file, a model that is filled keeps its own.

    Raises:
        TensorDropoutError: if the file is not ours, of a newer version, of another structure than ``model``, or
            names a law that is not registered or is another one here; the model is then as it was.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TensorDropoutError(
            f"load: model is a torch module to fill, got a {type(model).__name__}; an estimator is made by load(path)"
        )
    config = _read_config(path)
    layers = config["layers"]
    built = None
    with _blaming(path):
        for name, law in config["laws"].items():
            check_same_law(name, law, f"load: {path}")
        calibration = read_carried(config["calibration"], path)
        if model is None:
            built = model = _build_model(config, path)
        target = _unwrap(model)
        if config["attached"] is not None:
            headed = attach_recorded(target, config, path)
            model, target = model if headed is target else headed, headed
    with undone_on_failure(target, None) as exchange:
        with _blaming(path):
            repeat_surgery(target, config, exchange, path)
            if built is not None:
                _cast(built, path)
            found = tensor_layers(target)
            _match(layers, found, path)
            dropouts = {name: build_dropout(each["dropout"]) for name, each in layers.items()}
            for name, dropout in dropouts.items():
                if dropout is not None:
                    dropout.dropped_axes(found[name]._ranks, found[name].mode_numbers)
            thetas = {name: check_theta(each["theta"]) for name, each in layers.items() if "theta" in each}
        with _centered_alike(layers, found):
            _fill(target, _read_weights(target, dropouts, path), path)
            _set_dropouts(found, dropouts, exchange)
    for name, theta in thetas.items():  # plain dropout on the weight has no module that holds it
        found[name].theta = theta  # type: ignore[assignment]
    if calibration is not None:
        vars(target)["calibration"] = calibration
    as_estimator: Any = getattr(built, "as_estimator", None)
    if as_estimator is None:
        return model
    with _blaming(path):
        return as_estimator()


def builds_itself(path: str | os.PathLike[str]) -> bool:
    """Whether :func:`load` can make what a file of ours holds without being given a model."""
    config = _read_config(path)
    return config["net"] is not None or set(config["layers"]) == {""}


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a file was written by :func:`save`."""
    try:
        with safe_open(path, framework="pt") as file:
            return _HEADER in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


@contextmanager
def _blaming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn whatever a damaged config makes fail into our exception."""
    try:
        yield
    except TensorDropoutError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise TensorDropoutError(f"load: the config in the header of {path} is damaged: {error!r}") from error


def _read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The config in the header: its "layers" by name, and "net" and "surgery" where there are any."""
    if not Path(path).is_file():
        what = f"{path} is a folder, not a file" if Path(path).is_dir() else f"there is no file {path}"
        raise TensorDropoutError(f"load: {what}")
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
        if config["version"] not in (FORMAT_VERSION, WITH_CALIBRATION):
            raise TensorDropoutError(
                f"load: {path} has format version {config['version']}, this library reads version {FORMAT_VERSION} and "
                f"{WITH_CALIBRATION}; upgrade it"
            )
        return (
            {"net": None, "surgery": {}, "laws": {}, "attached": None, "calibration": None}
            | dict(config)
            | {"layers": dict(config["layers"].items())}
        )


def _build_model(config: dict[str, Any], path: str | os.PathLike[str]) -> nn.Module:
    """A bare layer, or a network that can be built anew, as it was before any surgery."""
    layers = config["layers"]
    if config["net"] is not None:
        return build_network(config["net"])
    if config["attached"] is not None:
        raise TensorDropoutError(
            f"load: {path} holds a network with an attached head; pass model=, the network as it was before attach_head"
        )
    if set(layers) != {""}:
        raise TensorDropoutError(f"load: {path} holds a network with the layers {list(layers)}; pass model= to fill it")
    return build_layer(layers[""], path)


def _cast(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give each tensor of a model the dtype that it has in the file: a head may be finer than its backbone."""
    saved = {key: tensor.dtype for key, tensor in load_weights(path).items() if tensor.is_floating_point()}
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key in saved:
            tensor.data = tensor.data.to(saved[key])


def _unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP, DataParallel and ``torch.compile`` wrappers."""
    model = unwrap(model)
    return _unwrap(model.module) if isinstance(model, nn.DataParallel) else model


def _check_pruning(model: nn.Module) -> None:
    """Refuse a pruned list of factors: its mask is applied when the list is called, which never happens."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ParameterList) and prune.is_pruned(module):
            raise TensorDropoutError(
                f"save: {name!r} is pruned, but the masks of a list of factors are not applied again after loading; "
                "make it permanent with torch.nn.utils.prune.remove first"
            )


def _set_dropouts(
    layers: dict[str, TensorRegression], dropouts: dict[str, TensorDropout | None], exchange: Exchange
) -> None:
    """Give each layer its dropout; layers that shared one go on sharing it if the file has equal ones for them."""
    placed: list[TensorDropout] = []
    for name, layer in layers.items():
        dropout, present = dropouts[name], layer.dropout
        if dropout is None:
            del layer.dropout  # else torch keeps a module None under that name
            layer.dropout = None
            continue
        dropout.to(layer.operands()[0].device).train(layer.training)
        if present is None:
            layer.dropout = dropout
        elif present not in placed:
            exchange.put(present, dropout)
            placed.append(dropout)
        elif present.config() != dropout.config():
            layer.dropout = dropout


@contextmanager
def _centered_alike(layers: dict[str, Any], found: dict[str, TensorRegression]) -> Iterator[None]:
    """Give a center to the layers that have one in the file, and take it from the others; undone if the block fails."""
    before = {layer: layer.center for layer in found.values()}
    try:
        for name, layer in found.items():
            if not layers[name].get("center", False):
                layer.set_center(None)
            elif layer.center is None:
                layer.set_center(torch.zeros(layer.input_shape[:1]))
        yield
    except BaseException:
        for layer, center in before.items():
            layer.center = center
        raise


def _describe(layers: Collection[str]) -> str:
    return "a bare layer" if set(layers) == {""} else f"tensor regression layers at {sorted(layers)}"


def _match(layers: dict[str, Any], found: dict[str, TensorRegression], path: str | os.PathLike[str]) -> None:
    """Check that the model has the saved layers."""
    if set(found) != set(layers):
        raise TensorDropoutError(f"load: {path} has {_describe(layers)}, the model {_describe(found)}")
    for name, config in layers.items():
        present = found[name].config()
        for key in STRUCTURE:
            if present[key] != config[key]:
                raise TensorDropoutError(
                    f"load: layer {name!r} of {path} has {key}={config[key]}, the model's has {present[key]}"
                )


def _read_weights(
    model: nn.Module, dropouts: dict[str, TensorDropout | None], path: str | os.PathLike[str]
) -> dict[str, Tensor]:
    """The tensors of the file by name, checked against the model; tensors that share memory are stored once.

    The θ of a tensor dropout goes into ``dropouts``, which has it from the config already where it is not stored.
    """
    saved, state = load_weights(path), model.state_dict()
    stored = [_span(state[key]) for key in saved if key in state]
    for key, name in _theta_keys(model).items():
        state.pop(key, None)
        dropout = dropouts[name]
        if dropout is not None and key in saved:
            dropout.theta = saved.pop(key)
    for problem, names in (
        ("lacks", [key for key in state if key not in saved and not _is_within(state[key], stored)]),
        ("has, beyond the model,", [key for key in saved if key not in state]),
        ("has another shape of", [key for key in saved if key in state and saved[key].shape != state[key].shape]),
    ):
        if names:
            raise TensorDropoutError(f"load: the weights of {path} do not fit the model: the file {problem} {names}")
    return saved


def _theta_keys(model: nn.Module) -> dict[str, str]:
    """The tensor regression layer by each key that a state dict may have for its θ: one for each of its names."""
    names = {layer: name for name, layer in tensor_layers(model).items()}
    layers = layers_by_every_name(model).items()
    return {f"{name}.dropout.theta".removeprefix("."): names[layer] for name, layer in layers}


def _span(tensor: Tensor) -> tuple[torch.device, int, int]:
    """The memory of a tensor: device, first byte, end."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.device, tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _is_within(tensor: Tensor, spans: list[tuple[torch.device, int, int]]) -> bool:
    """Whether a tensor is filled with others: a tied weight, or a view of one."""
    device, first, end = _span(tensor)
    return any(device == where and start <= first and end <= stop for where, start, stop in spans)


def _fill(model: nn.Module, weights: dict[str, Tensor], path: str | os.PathLike[str]) -> None:
    """Copy checked tensors into a model; if a hook of its own fails, it is as it was."""
    state = {key: tensor for key, tensor in model.state_dict().items() if not tensor.is_meta}
    before = {key: tensor.to("cpu", copy=True) for key, tensor in state.items()}
    versioned = OrderedDict(weights)
    versioned._metadata = model.state_dict()._metadata  # type: ignore[attr-defined]  # which version of a module wrote them
    try:
        model.load_state_dict(versioned, strict=False)
    except BaseException as error:
        for key, tensor in state.items():
            tensor.copy_(before[key])
        if isinstance(error, RuntimeError):
            reason = " ".join(str(error).split())
            raise TensorDropoutError(
                f"load: {type(model).__name__} did not take the weights of {path}: {reason}"
            ) from error
        raise
