"""A trained network from a file of ours, or from plain weights and the name of the network that they are of."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import builds_itself, is_ours, load
from tensor_dropout_lab.nets import build_plain
from tensor_dropout_lab.nets.families import describe_families, find_family
from tensor_dropout_lab.nets.from_function import call, import_function


def read_network(
    path: str | os.PathLike[str],
    *,
    arch: str | None = None,
    factory: str | None = None,
    factory_arguments: str = "{}",
    input_shape: tuple[int, ...] | None = None,
) -> nn.Module:
    """A network with its weights.

    Args:
        path: a file of ``td.save``, or a state dict (``.safetensors``, or of ``torch.save``, read without unpickling
            anything but tensors).
        arch: the name of a network as ``build_net`` takes it; the number of outputs is read from the weights.
        factory: ``package.module:function``, which makes the network; the current folder is searched as well.
        factory_arguments: keyword arguments of the function, or options of ``arch``, as a JSON object.
        input_shape: (channels, *size), for ``arch``.

    Raises:
        TensorDropoutError: if the file cannot be read, or its weights do not fit.
    """
    if arch is not None and factory is not None:
        raise TensorDropoutError("pass --arch or --model, not both")
    if not Path(path).is_file():
        raise TensorDropoutError(f"there is no file {path}")
    if factory is None and arch is None and factory_arguments != "{}":
        raise TensorDropoutError("--model-arguments are those of --model or --arch, which were not given")
    if is_ours(path):
        if factory is None and not builds_itself(path):
            raise TensorDropoutError(
                f"{path} holds a converted network of yours; say how to make the plain one with --model "
                "package.module:function, and its input with --input"
            )
        return load(path, None if factory is None else call_factory(factory, factory_arguments))
    state = read_state(path)
    if factory is not None:
        network = call_factory(factory, factory_arguments)
    elif arch is not None:
        network = _build_for(arch, state, input_shape, factory_arguments, path)
    else:
        raise TensorDropoutError(
            f"{path} holds plain weights; say what network they are of: --arch with one of {describe_families()}; or "
            "--model package.module:function with its --model-arguments"
        )
    _fill(network, state, path)
    return network


def _build_for(
    arch: str, state: Mapping[str, Tensor], input_shape: tuple[int, ...] | None, arguments: str, path: Any
) -> nn.Module:
    """The plain network of that name, with as many outputs as the last matrix of the weights has rows."""
    find_family(arch)
    matrices = [weight for name, weight in state.items() if name.endswith("weight") and weight.ndim == 2]
    if not matrices:
        raise TensorDropoutError(
            f"{path} has no matrix such as 'fc.weight', which {arch} ends in; use --model for your own"
        )
    if input_shape is None:
        raise TensorDropoutError("--arch needs --input, the shape of one input: 3,224,224")
    options = _read_arguments(arguments)
    stem = state.get("conv1.weight")
    if find_family(arch)[0].names and stem is not None:
        options = {"stem": "large" if stem.shape[-1] == 7 else "small", **options}
    return build_plain(arch, outputs=len(matrices[-1]), input_shape=input_shape, options=options)


def read_state(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """A state dict from a file; nothing in it can execute code.

    A dict that holds one under "state_dict", "model" or "model_state_dict" is looked into, and the prefixes that DDP
    and ``torch.compile`` leave are taken off.

    Raises:
        TensorDropoutError: if the file is neither safetensors nor a state dict of ``torch.save``.
    """
    try:
        state: Any = load_file(path)
    except SafetensorError:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of bytes that are no pickle, anything may come
            raise TensorDropoutError(
                f"{path} is neither a safetensors file nor a state dict of torch.save; nothing else is read, since it "
                "could execute code: save model.state_dict(), not the model"
            ) from error
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise TensorDropoutError(f"{path} holds no state dict (names with tensors)")
    for prefix in ("module.", "_orig_mod."):
        if state and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


def call_factory(factory: str, arguments: str = "{}") -> nn.Module:
    """Import ``package.module:function`` and call it with these arguments alone.

    Raises:
        TensorDropoutError: if it cannot be imported, does not take the arguments or makes no module.
    """
    keywords = _read_arguments(arguments)
    return call(import_function(factory), factory, keywords)


def _read_arguments(arguments: str) -> dict[str, Any]:
    try:
        keywords = json.loads(arguments)
    except json.JSONDecodeError as error:
        raise TensorDropoutError(f"--model-arguments is a JSON object, got {arguments!r}: {error}") from error
    if not isinstance(keywords, dict):
        raise TensorDropoutError(f"--model-arguments is a JSON object, got {arguments!r}")
    return keywords


def _fill(network: nn.Module, state: Mapping[str, Tensor], path: Any) -> None:
    """Load a state dict, or name what does not fit."""
    own = network.state_dict()
    faults = {
        "lacks": [key for key in own if key not in state],
        "has, beyond the network,": [key for key in state if key not in own],
        "has another shape of": [key for key in own if key in state and state[key].shape != own[key].shape],
    }
    for what, keys in faults.items():
        if keys:
            raise TensorDropoutError(
                f"{path} does not fit {type(network).__name__}: the file {what} {keys[:5]}"
                + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
            )
    network.load_state_dict(state)
