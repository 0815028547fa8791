"""Networks by name: a residual backbone that stops before pooling, and a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from tensor_dropout.layers.dropout import Modes
from tensor_dropout.layers.laws import Law, law_name
from tensor_dropout.layers.ranks import Rank
from tensor_dropout.networks import FIRST_BUILDER, register_network
from tensor_dropout_lab.nets.heads import HEADS, WeightDropoutTucker, build_head, check_name, leave_out_unused, rescale_
from tensor_dropout_lab.nets.resnet import DESIGNS, ResNet, Stem, load_backbone

__all__ = [
    "HEADS",
    "NETS",
    "ResNet",
    "WeightDropoutTucker",
    "build_head",
    "build_net",
    "load_backbone",
    "rebuild_resnet",
    "rescale_",
]

NETS: tuple[str, ...] = tuple(DESIGNS)
"""The names that ``build_net`` knows."""


def build_net(
    name: str,
    *,
    outputs: int,
    input_shape: tuple[int, ...],
    head: str = "fc",
    stem: Stem | None = None,
    rank: Rank | None = None,
    theta: float | None = None,
    law: str | Law = "bernoulli",
    modes: Modes | None = None,
    per_sample: bool = False,
    scaling: Literal["inverted", "paper"] = "inverted",
    min_rank: int = 0,
    drop_rate: float = 0.5,
    init: Literal["pool", "normal"] = "pool",
) -> ResNet:
    """Make a network of that name for inputs of that shape.

    ``resnet18`` to ``resnet101`` with the large stem and the head ``fc`` have torchvision's parameter names, so that
    its published weights load. ``resnet-mini`` (widths 16, 32, 64, one block each) is for small images and volumes.

    Args:
        name: one of ``NETS``.
        outputs: the number of classes or targets.
        input_shape: (channels, height, width), or (channels, depth, height, width) for a 3-D network.
        head: one of ``HEADS``.
        stem: "small" (CIFAR) or "large" (ImageNet, MRI); None takes "small" if no size is above 64.
        rank: of a tensor head; None: half the channels. This and what follows: see :func:`build_head`.
        theta: θ, the KEEP probability of a random tensor head; None: 0.9.
        law: of the masks.
        modes: which modes are dropped; None: of Tucker the channels and the outputs.
        per_sample: one mask for each sample.
        scaling: "inverted" or "paper".
        min_rank: how many ranks survive every draw.
        drop_rate: of ``fc+dropout``: the DROP probability.
        init: of a tensor head: "pool" or "normal".

    Raises:
        TensorDropoutError: if a name is unknown, or a shape or setting does not fit.

    Example:
        >>> import torch
        >>> net = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="rtrl-tucker", theta=0.9)
        >>> net.feature_shape, net.fc.rank, net(torch.randn(4, 1, 8, 8)).shape
        ((64, 2, 2), (32, 2, 2, 10), torch.Size([4, 10]))
    """
    check_name("net", name, NETS)
    check_name("head", head, HEADS)
    settings = {
        "rank": rank,
        "theta": theta,
        "law": law,
        "modes": modes,
        "per_sample": per_sample,
        "scaling": scaling,
        "min_rank": min_rank,
        "drop_rate": drop_rate,
        "init": init,
    }
    net = ResNet(DESIGNS[name], input_shape, stem)
    net.attach(build_head(head, net.feature_shape, outputs, **settings))  # type: ignore[arg-type]
    net.settings = {
        "name": name,
        "outputs": outputs,
        "input_shape": list(net.input_shape),
        "head": head,
        "stem": net.stem,
        **{key: _as_json(value) for key, value in leave_out_unused(head, settings).items() if value is not None},
    }
    return net


def rebuild_resnet(settings: dict[str, Any]) -> ResNet:
    """A fresh network from the settings that a file holds; those of older versions have the settings of all heads."""
    settings = leave_out_unused(settings["head"], settings)
    return build_net(**{**settings, "input_shape": tuple(settings["input_shape"])})


register_network(FIRST_BUILDER, rebuild_resnet)


def _as_json(value: Any) -> Any:
    """A setting as the header of a file can hold it; a law without a name becomes None and is refused by ``save``."""
    if isinstance(value, str | bool | int | float):
        return value
    return list(value) if isinstance(value, Sequence) else law_name(value)
