"""The structure of a model as JSON types, for the header of a file, and the way back.

A network of ours is named by its settings, a converted one by its heads and where they stand, a headed one by the place
of its head. The way back does the same surgery on a plain network.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from math import prod
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.attach import HeadedNetwork, attach_again
from tensor_dropout.layers.dropout import TensorDropout
from tensor_dropout.layers.formats import FORMATS, find_layer
from tensor_dropout.layers.randomized import tensor_layers
from tensor_dropout.layers.regression import TensorRegression, unwarned
from tensor_dropout.network_builders import build_network, settings_of
from tensor_dropout.surgery.exchange import Exchange, names_of
from tensor_dropout.surgery.find_head import CONVOLUTIONS, KINDS
from tensor_dropout.surgery.head import TensorHead, tensor_heads, widen

STRUCTURE = ("type", "input_shape", "output_shape", "rank", "bias")
"""The entries of a layer's config that must be equal."""


def describe_net(model: nn.Module) -> dict[str, Any] | None:
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
    left_out = {*heads, *(f"{name}.center" for name in layers_by_every_name(model))}
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
        name: (type(module), [layers[name][key] for key in STRUCTURE] if name in layers else module.extra_repr())
        for name, module in modules.items()
        if not _is_inside(name, heads) and (name in layers or not _is_inside(name, layers))
    }


def _is_inside(name: str, places: Collection[str]) -> bool:
    """Whether a name is one of these places, or lies inside one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def describe_surgery(model: nn.Module) -> dict[str, Any]:
    """What it takes to put each head into a plain network again: its place, its kind, its pooling's place."""
    surgery = {}
    for name, head in tensor_heads(model).items():
        places = [] if head.pooled is None else names_of(model, head.pooled.now)
        surgery[name] = {**head.config(), "pooling": places[0] if places else None}
    return surgery


def repeat_surgery(model: nn.Module, config: dict[str, Any], exchange: Exchange, path: str | os.PathLike[str]) -> None:
    """Put the recorded heads into a network that still has its plain layers there."""
    for name, recorded in config["surgery"].items():
        layer = _get_module(model, name, path)
        if isinstance(layer, TensorHead):
            continue
        settings = config["layers"][f"{name}.regression"]
        _check_place(layer, name, recorded, settings, path)
        weight = layer.get_parameter("weight")
        regression = build_layer(settings, path).to(weight.device, weight.dtype)
        pooled = None
        if recorded["pooling"] is not None:
            pooling = _get_module(model, recorded["pooling"], path)
            pooled = widen(pooling, recorded["kind"], regression.input_shape[1:], recorded["flattens"])
            exchange.put(pooling, pooled.now.train(pooling.training))
        head = TensorHead(regression, recorded["kind"], recorded["axes"], pooled)
        exchange.put(layer, head.train(layer.training))


def describe_attached(model: nn.Module) -> dict[str, Any] | None:
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


def attach_recorded(model: nn.Module, config: dict[str, Any], path: str | os.PathLike[str]) -> HeadedNetwork:
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
            head: nn.Module = build_layer(config["layers"]["head"], path)
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


def build_layer(config: dict[str, Any], path: str | os.PathLike[str]) -> TensorRegression:
    """A layer anew, with fresh weights."""
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
            dropout=build_dropout(config["dropout"]),
        )


def build_dropout(config: dict[str, Any] | None) -> TensorDropout | None:
    """The tensor dropout of a layer anew."""
    return None if config is None else TensorDropout(**config)


def layers_by_every_name(model: nn.Module) -> dict[str, TensorRegression]:
    """The tensor regression layers of a model; one that is registered under several names is there under each."""
    modules = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, TensorRegression)}
