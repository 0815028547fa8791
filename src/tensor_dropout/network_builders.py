"""Networks that a file can build anew, found by the name of their builder: the library itself has no networks.

A network that carries ``settings``, a dict of JSON types, is built again from them by :func:`td.load`. The builder's
name is ``settings["builder"]``. Installed packages announce builders as entry points of the group
``tensor_dropout.networks``; a program may register its own. Where a network has one tensor regression layer,
``settings["rank"]`` is its rank: so a truncated one is built again at the size that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError

Builder = Callable[[dict[str, Any]], nn.Module]
GROUP = "tensor_dropout.networks"
FIRST_BUILDER = "lab"
"""The builder of files that name none, as those of version 0.1.0."""

_FIRST_KEYS = {"name", "outputs", "input_shape", "head"}
"""What the settings of networks without a builder's name have."""
_BUILDERS: dict[str, Builder] = {}


def register_network(name: str, builder: Builder) -> None:
    """Let ``td.load`` build networks whose settings name this builder.

    Args:
        name: what ``settings["builder"]`` says.
        builder: takes the settings, returns the network with fresh weights.

    Example:
        >>> register_network("tiny", lambda settings: nn.Linear(settings["inputs"], 1))
        >>> build_network({"builder": "tiny", "inputs": 3})
        Linear(in_features=3, out_features=1, bias=True)
    """
    _BUILDERS[name] = builder


def build_network(settings: Mapping[str, Any], device: str = "cpu") -> nn.Module:
    """A fresh network from its settings.

    Raises:
        TensorDropoutError: if nothing that is installed or registered builds such networks.
    """
    name = settings.get("builder", FIRST_BUILDER)
    if name not in _BUILDERS:
        for entry in entry_points(group=GROUP, name=name):
            register_network(name, entry.load())
    if name not in _BUILDERS:
        raise TensorDropoutError(
            f"load: the file holds a network of the builder {name!r}, which is not registered here; import the package "
            "that makes it first, or pass model="
        )
    with torch.device(device):
        return _BUILDERS[name](dict(settings))


def settings_of(model: nn.Module) -> dict[str, Any] | None:
    """The settings that build a network anew, if it carries some: a dict of its own under that name is left alone."""
    settings = getattr(model, "settings", None)
    ours = isinstance(settings, dict) and ("builder" in settings or settings.keys() >= _FIRST_KEYS)
    return settings if ours else None
