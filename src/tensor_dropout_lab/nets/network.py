"""What every network of the laboratory is: a backbone that makes a feature map, and a head on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError


@runtime_checkable
class Backbone(Protocol):
    """A module from inputs (B, channels, size) to feature maps (B, C, space), which says their shape.

    Attributes:
        feature_shape: the shape of the map of one input, without the batch.
    """

    feature_shape: tuple[int, ...]

    def __call__(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, *feature_shape)."""


class Network(nn.Module):
    """A backbone and a head: ``fc(avgpool(forward_features(x)))``.

    With a linear head ``avgpool`` averages (or flattens) and ``fc`` is linear, as in torchvision; with a tensor head
    ``avgpool`` is the identity and ``fc`` is the tensor regression layer. Without a head it returns its features.

    Attributes:
        input_shape: (channels, *size) of an input.
        feature_shape: (C, *space) of the features of such an input.
        settings: the arguments of ``build_net`` that made it, as JSON types: what ``td.save`` writes.
        deterministic_features: whether nothing in the backbone is random in ``eval`` mode.
    """

    deterministic_features = True
    backbone_prefix = ""
    """What stands before the names of the backbone's parameters in the state dict."""
    left_out: tuple[str, ...] = ("fc",)
    """Modules of the published network that this backbone does without: their weights are passed over."""
    avgpool: nn.Module
    fc: nn.Module

    def __init__(self, input_shape: tuple[int, ...], feature_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.input_shape, self.feature_shape = input_shape, feature_shape
        self.settings: dict[str, Any] | None = None

    @property
    def head(self) -> nn.Module:
        """The last layer: a tensor regression or a linear layer."""
        return self.fc

    def attach(self, head: nn.Module) -> None:
        """Put a head on the features: pooling and a linear layer in sequence, as of ``build_head``, or one layer."""
        self.avgpool, self.fc = head if isinstance(head, nn.Sequential) else (nn.Identity(), head)

    def replace_head(self, layer: nn.Module) -> None:
        """Exchange the last layer; the pooling before it stays."""
        self.fc = layer

    def resolved_options(self) -> dict[str, Any]:
        """Options of its family that were left open and that it chose itself."""
        return {}

    def stages(self) -> list[nn.Module]:
        """Parts of the backbone that are sharded one by one (FSDP)."""
        return []

    def forward_features(self, x: Tensor) -> Tensor:
        """The features before pooling: (B, *input_shape) -> (B, *feature_shape)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """(B, *input_shape) -> (B, outputs)."""
        y: Tensor = self.fc(self.avgpool(self.forward_features(x)))
        return y


class HeadedNetwork(Network):
    """Any backbone with a head of ours.

    Args:
        backbone: from inputs to feature maps.
        input_shape: (channels, *size) of an input.
    """

    backbone_prefix = "backbone."
    left_out = ()

    def __init__(self, backbone: nn.Module, input_shape: tuple[int, ...]) -> None:
        super().__init__(input_shape, tuple(backbone.feature_shape))  # type: ignore[arg-type]
        self.backbone = backbone
        self.deterministic_features = bool(getattr(backbone, "deterministic_features", False))
        self.backbone_prefix = "backbone." + getattr(backbone, "prefix", "")
        self.left_out = tuple(getattr(backbone, "left_out", ()))
        self.avgpool, self.fc = nn.Identity(), nn.Identity()

    def forward_features(self, x: Tensor) -> Tensor:
        """The features before pooling: (B, *input_shape) -> (B, *feature_shape)."""
        features: Tensor = self.backbone(x)
        return features

    def stages(self) -> list[nn.Module]:
        """The children of the network inside that have parameters and are called as modules."""
        inner = getattr(self.backbone, "network", self.backbone)
        containers = nn.ModuleList | nn.ModuleDict
        children = [child for child in inner.children() if not isinstance(child, containers)]
        return [child for child in children if next(child.parameters(), None) is not None]


@torch.no_grad()
def load_backbone(net: Network, state_dict: Mapping[str, Tensor]) -> None:
    """Fill everything but the head, in place, from the state dict of the published network.

    The published head is passed over. Old files lack ``num_batches_tracked``; that is allowed.

    Args:
        net: the network.
        state_dict: the weights, such as those that torchvision, timm or MONAI publish.

    Raises:
        TensorDropoutError: if keys or shapes do not fit; nothing is loaded then.

    Example:
        >>> from tensor_dropout_lab.nets import build_net
        >>> trained = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8))
        >>> net = build_net("resnet-mini", outputs=3, input_shape=(1, 8, 8), head="rtrl-cp")
        >>> load_backbone(net, trained.state_dict())
        >>> bool((net.conv1.weight == trained.conv1.weight).all())
        True
    """
    prefix = net.backbone_prefix
    ours = {
        key.removeprefix(prefix): value
        for key, value in net.state_dict().items()
        if key.startswith(prefix) and not _is_inside(key.removeprefix(prefix), net.left_out)
    }
    theirs = {key: value for key, value in state_dict.items() if not _is_inside(key, net.left_out)}
    missing = [key for key in ours if key not in theirs and not key.endswith("num_batches_tracked")]
    unknown = [key for key in theirs if key not in ours]
    misfits = [
        f"{key} {tuple(theirs[key].shape)} instead of {tuple(ours[key].shape)}"
        for key in ours
        if key in theirs and theirs[key].shape != ours[key].shape
    ]
    faults = {"missing": missing, "unknown": unknown, "of another shape": misfits}
    if any(faults.values()):
        listed = "; ".join(f"{what}: {_list_some(keys)}" for what, keys in faults.items() if keys)
        name = (net.settings or {}).get("name", type(net).__name__)
        stem = f" with the {net.stem} stem" if hasattr(net, "stem") else ""
        raise TensorDropoutError(
            f"load_backbone: the weights do not fit {name} for inputs {net.input_shape}{stem}; {listed}"
        )
    for key, value in theirs.items():
        ours[key].copy_(value)


def _is_inside(name: str, places: tuple[str, ...]) -> bool:
    return any(name == place or name.startswith(f"{place}.") for place in places)


def _list_some(keys: list[str], most: int = 6) -> str:
    rest = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest
