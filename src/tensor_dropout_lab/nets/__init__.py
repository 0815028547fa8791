"""Networks by name: a backbone that stops before pooling, and a head.

``families`` lists the networks there are, with one file for each family, and ``head_table`` the heads; ``build`` puts
one on the other. ``network`` is what all networks have in common, ``feature_map`` finds the last feature map of one
that is not ours, ``heads`` makes what goes on it.

Importing this module does not import torch: ``tensor-dropout --help`` lists the names.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tensor_dropout_lab.nets.families import describe_families as describe_families
from tensor_dropout_lab.nets.families import register_family as register_family
from tensor_dropout_lab.nets.families import trust as trust
from tensor_dropout_lab.nets.head_table import HEADS as HEADS

if TYPE_CHECKING:
    from tensor_dropout_lab.nets.build import build_net as build_net
    from tensor_dropout_lab.nets.build import build_plain as build_plain
    from tensor_dropout_lab.nets.build import rebuild_net as rebuild_net
    from tensor_dropout_lab.nets.heads import WeightDropoutTucker as WeightDropoutTucker
    from tensor_dropout_lab.nets.heads import build_head as build_head
    from tensor_dropout_lab.nets.heads import rescale_ as rescale_
    from tensor_dropout_lab.nets.network import Backbone as Backbone
    from tensor_dropout_lab.nets.network import Network as Network
    from tensor_dropout_lab.nets.network import load_backbone as load_backbone
    from tensor_dropout_lab.nets.resnet import ResNet as ResNet

__all__ = [
    "HEADS",
    "Backbone",
    "Network",
    "ResNet",
    "WeightDropoutTucker",
    "build_head",
    "build_net",
    "build_plain",
    "describe_families",
    "load_backbone",
    "rebuild_net",
    "register_family",
    "rescale_",
    "trust",
]

_MODULES = {
    "build": ("build_net", "build_plain", "rebuild_net"),
    "heads": ("WeightDropoutTucker", "build_head", "rescale_"),
    "network": ("Backbone", "Network", "load_backbone"),
    "resnet": ("ResNet",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
