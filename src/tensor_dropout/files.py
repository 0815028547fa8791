"""Saving and loading: one safetensors file, with a versioned JSON config in its header.

The header names every tensor regression layer with its settings, the network if it is one of ours, and the surgery
that a converted network went through, so that the same surgery is done on a plain network before it is filled.

Nothing that is loaded can execute code: the weights are raw numbers, the config is data, and a law is found by a
name that was registered in this process.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_model
from torch import Tensor, nn
from torch.nn.utils import prune

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.attach import HeadedNetwork, attach_again
from tensor_dropout.layers.dropout import TensorDropout, check_theta
from tensor_dropout.layers.formats import FORMATS, find_layer
from tensor_dropout.layers.head_outputs import unwrap
from tensor_dropout.layers.laws import check_same_law, describe_law, registered_laws
from tensor_dropout.layers.randomized import tensor_layers
from tensor_dropout.layers.regression import TensorRegression, unwarned
from tensor_dropout.network_builders import build_network, settings_of
from tensor_dropout.surgery.exchange import Exchange, names_of, undone_on_failure
from tensor_dropout.surgery.find_head import CONVOLUTIONS, KINDS
from tensor_dropout.surgery.head import TensorHead, tensor_heads, widen
from tensor_dropout.version import __version__

FORMAT_VERSION = 1
_HEADER = "tensor_dropout"
_STRUCTURE = ("type", "input_shape", "output_shape", "rank", "bias")


Model = TypeVar("Model", bound=nn.Module)


def save(model: Any, path: str | os.PathLike[str]) -> None:
    """Write a layer, a network that can be built anew, a model that contains such layers, or an estimator to one file.

    The file appears whole or not at all. DDP, DataParallel and ``torch.compile`` wrappers are looked through. What a
    parametrization (``torch.nn.utils.parametrize``) or pruning (``torch.nn.utils.prune``) adds is saved as it is: load
    it into a model that was prepared in the same way, or make it permanent before saving.

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
    net, attached = _describe_net(model), _describe_attached(model)
    if not layers and net is None and attached is None:
        ours = ", and was changed since build_net made it" if settings_of(model) else ""
        what = f"{type(model).__name__} has no tensor regression layer{ours}"
        raise TensorDropoutError(f"save: {what}; use safetensors itself for plain models")
    config = {"version": FORMAT_VERSION, "library": __version__, "layers": layers}
    config |= {"net": net} if net is not None else {}
    names = {layer["dropout"]["law"] for layer in layers.values() if layer["dropout"] is not None}
    if registered := registered_laws(names):
        config["laws"] = {name: describe_law(law) for name, law in registered.items()}
    config |= {"attached": attached} if attached is not None else {}
    config |= {"surgery": surgery} if (surgery := _describe_surgery(model)) else {}
    target = Path(path)
    if not target.parent.is_dir():
        raise TensorDropoutError(f"save: the folder {target.parent} does not exist; make it first")
    if target.is_dir():
        raise TensorDropoutError(f"save: {target} is a folder; name a file in it")
    with replacing(target) as temporary:
        try:
            save_model(model, str(temporary), metadata={_HEADER: json.dumps(config)})
        except SafetensorError as error:
            raise TensorDropoutError(f"save: {target} could not be written: {error}") from error
        except RuntimeError as error:  # from its search for tensors that share memory
            raise _not_storable(model, target, error) from error


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
        if model is None:
            built = model = _build_model(config, path)
        target = _unwrap(model)
        if config["attached"] is not None:
            headed = _attach(target, config, path)
            model, target = model if headed is target else headed, headed
    with undone_on_failure(target, None) as exchange:
        with _blaming(path):
            _repeat_surgery(target, config, exchange, path)
            if built is not None:
                _cast(built, path)
            found = tensor_layers(target)
            _match(layers, found, path)
            dropouts = {name: _build_dropout(each["dropout"]) for name, each in layers.items()}
            for name, dropout in dropouts.items():
                if dropout is not None:
                    dropout.dropped_axes(found[name]._ranks, found[name].mode_numbers)
            thetas = {name: check_theta(each["theta"]) for name, each in layers.items() if "theta" in each}
        with _centered_alike(layers, found):
            _fill(target, _read_weights(target, dropouts, path), path)
            _set_dropouts(found, dropouts, exchange)
    for name, theta in thetas.items():  # plain dropout on the weight has no module that holds it
        found[name].theta = theta  # type: ignore[assignment]
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
        if config["version"] != FORMAT_VERSION:
            raise TensorDropoutError(
                f"load: {path} has format version {config['version']}, this library reads version {FORMAT_VERSION}; "
                "upgrade it"
            )
        return (
            {"net": None, "surgery": {}, "laws": {}, "attached": None}
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
    return _build(layers[""], path)


def _cast(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Give each tensor of a model the dtype that it has in the file: a head may be finer than its backbone."""
    saved = {key: tensor.dtype for key, tensor in load_file(path).items() if tensor.is_floating_point()}
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


def _describe_net(model: nn.Module) -> dict[str, Any] | None:
    """The settings that build a network anew; None if it was changed in a way that they do not say."""
    known = settings_of(model)
    if known is None:
        return None
    heads, layers = tensor_heads(model), list(tensor_layers(model).values())
    candidates = [known]
    if len(layers) == 1:
        rank = layers[0].rank
        rank = list(rank) if isinstance(rank, tuple) else rank
        candidates.append({**known, "rank": rank})  # after truncate_
    for settings in candidates:
        fresh = build_network(settings, "meta")
        if _shapes(model, heads) == _shapes(fresh, heads) and _parts(model, heads) == _parts(fresh, heads):
            return dict(settings)
    return None


def _shapes(model: nn.Module, heads: Collection[str]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor outside the heads; the centers of layers are in their own configs."""
    left_out = {*heads, *(f"{name}.center" for name in _layers_by_every_name(model))}
    state = model.state_dict().items()
    return {name: tuple(tensor.shape) for name, tensor in state if not _is_inside(name, left_out)}


def _parts(model: nn.Module, heads: Collection[str]) -> dict[str, tuple[type, Any]]:
    """The type and the settings of each module outside the heads, with the poolings as they were before surgery.

    Of a tensor regression layer that is its structure; its dropout and θ are in its own config.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for pooled in [head.pooled for head in tensor_heads(model).values() if head.pooled is not None]:
        for place in names_of(model, pooled.now):
            modules = {name: module for name, module in modules.items() if not _is_inside(name, [place])}
            modules |= dict(pooled.before.named_modules(prefix=place, remove_duplicate=False))
    layers = {name: module.config() for name, module in modules.items() if isinstance(module, TensorRegression)}
    return {
        name: (type(module), [layers[name][key] for key in _STRUCTURE] if name in layers else module.extra_repr())
        for name, module in modules.items()
        if not _is_inside(name, heads) and (name in layers or not _is_inside(name, layers))
    }


def _is_inside(name: str, places: Collection[str]) -> bool:
    """Whether a name is one of these places, or lies inside one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _describe_surgery(model: nn.Module) -> dict[str, Any]:
    """What it takes to put each head into a plain network again: its place, its kind, its pooling's place."""
    surgery = {}
    for name, head in tensor_heads(model).items():
        places = [] if head.pooled is None else names_of(model, head.pooled.now)
        surgery[name] = {**head.config(), "pooling": places[0] if places else None}
    return surgery


def _repeat_surgery(model: nn.Module, config: dict[str, Any], exchange: Exchange, path: str | os.PathLike[str]) -> None:
    """Put the recorded heads into a network that still has its plain layers there."""
    for name, recorded in config["surgery"].items():
        layer = _get_module(model, name, path)
        if isinstance(layer, TensorHead):
            continue
        settings = config["layers"][f"{name}.regression"]
        _check_place(layer, name, recorded, settings, path)
        weight = layer.get_parameter("weight")
        regression = _build(settings, path).to(weight.device, weight.dtype)
        pooled = None
        if recorded["pooling"] is not None:
            pooling = _get_module(model, recorded["pooling"], path)
            pooled = widen(pooling, recorded["kind"], regression.input_shape[1:], recorded["flattens"])
            exchange.put(pooling, pooled.now.train(pooling.training))
        head = TensorHead(regression, recorded["kind"], recorded["axes"], pooled)
        exchange.put(layer, head.train(layer.training))


def _describe_attached(model: nn.Module) -> dict[str, Any] | None:
    """Where a head was attached, and what it is; None for other models, and for heads that no file can make anew."""
    if not isinstance(model, HeadedNetwork):
        return None
    dtype = str(next(model.head.parameters()).dtype).removeprefix("torch.")
    attached = {**model.where(), "dtype": dtype, "head": None}
    if isinstance(model.head, TensorRegression):  # it is among the layers
        return attached
    try:
        from tensor_dropout.sklearn.files import describe_module

        return attached | {"head": describe_module(model.head)}
    except (ModuleNotFoundError, TensorDropoutError):
        return None


def _attach(model: nn.Module, config: dict[str, Any], path: str | os.PathLike[str]) -> HeadedNetwork:
    """A plain network with the recorded head, which is not filled yet; or the headed network that it is already."""
    recorded = config["attached"]
    if isinstance(model, HeadedNetwork):
        wrong = {key: value for key, value in model.where().items() if value != recorded[key]}
        if wrong:
            was = {key: recorded[key] for key in wrong}
            raise TensorDropoutError(f"load: {path} has a head attached with {was}, the model has one with {wrong}")
        return model
    dtype = getattr(torch, recorded["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{recorded['dtype']!r} is no dtype")
    try:
        if recorded["head"] is None:
            head: nn.Module = _build(config["layers"]["head"], path)
        else:
            from tensor_dropout.sklearn.files import build_module

            head = build_module(recorded["head"])
        return attach_again(model, recorded, head.to(dtype))
    except (ModuleNotFoundError, TensorDropoutError) as error:
        words = str(error).removeprefix("load: ")
        raise TensorDropoutError(f"load: {path} holds a network with an attached head: {words}") from error


def _check_place(
    layer: nn.Module, name: str, recorded: dict[str, Any], settings: dict[str, Any], path: str | os.PathLike[str]
) -> None:
    """Check that a head can stand where a plain layer is: the same kind of layer, with the same sizes."""
    kind, axes, shape = recorded["kind"], recorded["axes"], tuple(settings["input_shape"])
    if kind not in KINDS or type(axes) is not int or (kind == "conv-pool" and axes == 0):
        raise ValueError(f"the surgery at {name!r} is of the kind {kind!r} with {axes!r} axes")
    expected = CONVOLUTIONS[axes - 1] if 0 < axes <= 3 else nn.Linear if axes == 0 else None
    if expected is None or (kind in ("pool", "conv-pool") and axes and len(shape) != axes + 1):
        raise ValueError(f"the surgery at {name!r} has {axes!r} axes")
    inputs = prod(shape) if kind in ("flatten", "features") else shape[0]
    wanted = (prod(settings["output_shape"]), inputs, *(1 for _ in range(axes)))
    fits = isinstance(layer, expected) and tuple(layer.weight.shape) == wanted
    if not fits or (layer.bias is not None) != settings["bias"]:
        bias = "with" if settings["bias"] else "without"
        raise TensorDropoutError(
            f"load: {path} has a converted head at {name!r}, in the place of a {expected.__name__} of weight {wanted} "
            f"{bias} bias; the model has {layer} there; pass the network as it was before tensorize_"
        )


def _get_module(model: nn.Module, name: str, path: str | os.PathLike[str]) -> nn.Module:
    modules = dict(model.named_modules(remove_duplicate=False))
    if name not in modules:
        raise TensorDropoutError(f"load: {path} has a module {name!r} that {type(model).__name__} has not")
    return modules[name]


def _build(config: dict[str, Any], path: str | os.PathLike[str]) -> TensorRegression:
    layer = find_layer(config["type"])
    if layer is None:
        known = [format.layer_name for format in FORMATS.values()]
        raise TensorDropoutError(
            f"load: {path} holds a layer of the unknown type {config['type']!r}; known are {known}; pass model= "
            "to fill one of your own"
        )
    with unwarned():
        return layer(
            config["input_shape"],
            config["output_shape"],
            config["rank"],
            bias=config["bias"],
            init=config["init"],
            dropout=_build_dropout(config["dropout"]),
        )


def _build_dropout(config: dict[str, Any] | None) -> TensorDropout | None:
    return None if config is None else TensorDropout(**config)


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
        for key in _STRUCTURE:
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
    saved, state = load_file(path), model.state_dict()
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
    layers = _layers_by_every_name(model).items()
    return {f"{name}.dropout.theta".removeprefix("."): names[layer] for name, layer in layers}


def _layers_by_every_name(model: nn.Module) -> dict[str, TensorRegression]:
    """The tensor regression layers of a model; one that is registered under several names is there under each."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, TensorRegression)}


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
