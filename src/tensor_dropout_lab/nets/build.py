"""Networks by name: a backbone of any family, and a head."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.dropout import Modes
from tensor_dropout.layers.initialize import Init
from tensor_dropout.layers.laws import Law, law_name
from tensor_dropout.layers.ranks import Rank
from tensor_dropout.network_builders import FIRST_BUILDER, register_network
from tensor_dropout_lab.nets.families import find_family
from tensor_dropout_lab.nets.feature_map import tap
from tensor_dropout_lab.nets.head_table import HEADS, check_name, leave_out_unused
from tensor_dropout_lab.nets.heads import build_head
from tensor_dropout_lab.nets.network import Backbone, HeadedNetwork, Network
from tensor_dropout_lab.nets.resnet import Stem, check_input_shape
from tensor_dropout_lab.nets.tapped import Place, TappedBackbone


def build_net(
    name: str,
    *,
    outputs: int,
    input_shape: tuple[int, ...],
    head: str = "fc",
    options: Mapping[str, Any] | None = None,
    stem: Stem | None = None,
    rank: Rank | None = None,
    theta: float | None = None,
    law: str | Law = "bernoulli",
    modes: Modes | None = None,
    per_sample: bool = False,
    scaling: Literal["inverted", "paper"] = "inverted",
    min_rank: int = 0,
    drop_rate: float = 0.5,
    init: Init = "pool",
) -> Network:
    """Make a network of that name for inputs of that shape, with a head of that name.

    ``resnet18`` to ``resnet101`` with the large stem and the head ``fc`` have torchvision's parameter names, so that
    its published weights load. ``resnet-mini`` (widths 16, 32, 64, one block each) is for small images and volumes.
    ``torchvision:NAME``, ``timm:NAME``, ``monai:NAME`` and ``package.module:function`` are networks of others: their
    published head is left out, and ours takes their last feature map, which is found by running them once.

    Args:
        name: ``resnet-mini``, ``resnet18``, ``resnet34``, ``resnet50``, ``resnet101``, or one of the forms above.
        outputs: the number of classes or targets.
        input_shape: (channels, height, width), or (channels, depth, height, width) for a 3-D network.
        head: one of ``HEADS``.
        options: arguments of the function that makes a network of others, as JSON types; the number of channels, of
            outputs and of dimensions are filled in by the usual names.
        stem: of our ResNets, "small" (CIFAR) or "large" (ImageNet, MRI); None takes "small" if no size is above 64.
        rank: of a tensor head; None: half the channels. This and what follows: see :func:`build_head`.
        theta: θ, the KEEP probability of a random tensor head; None: 0.9.
        law: of the masks.
        modes: which modes are dropped; None: of Tucker the channels and the outputs.
        per_sample: one mask for each sample.
        scaling: "inverted" or "paper".
        min_rank: how many ranks survive every draw.
        drop_rate: of ``fc+dropout``: the DROP probability.
        init: of a tensor head: "pool", "smooth" or "normal".

    Raises:
        TensorDropoutError: if a name is unknown, or a shape or setting does not fit.

    Example:
        >>> import torch
        >>> net = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="rtrl-tucker", theta=0.9)
        >>> net.feature_shape, net.fc.rank, net(torch.randn(4, 1, 8, 8)).shape
        ((64, 2, 2), (32, 2, 2, 10), torch.Size([4, 10]))
    """
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
    options = dict(options or {}) | ({} if stem is None else {"stem": stem})
    return _build(name, outputs, input_shape, options, head, settings)


def build_plain(
    name: str,
    *,
    outputs: int,
    input_shape: tuple[int, ...],
    options: Mapping[str, Any] | None = None,
    trusted: bool = True,
) -> nn.Module:
    """The network of that name as its package makes it, with its published head: what its published weights fit.

    Args:
        name: as for :func:`build_net`.
        outputs: the number of classes or targets.
        input_shape: (channels, *size).
        options: as for :func:`build_net`.
        trusted: false if the name was read from a file, which must not decide what code is run.

    Raises:
        TensorDropoutError: if the name is unknown, or the network cannot be made so.
    """
    settings = _describe(name, outputs, input_shape, options or {})
    network = _build_plain(settings, trusted)
    if isinstance(network, Network):  # ours have no head of their own
        return build_net(name, outputs=outputs, input_shape=input_shape, options=options)
    network.settings = settings  # type: ignore[assignment]
    network.input_shape = tuple(settings["input_shape"])  # type: ignore[assignment]
    return network


def rebuild_net(settings: dict[str, Any]) -> nn.Module:
    """A fresh network from the settings that a file holds; those of older versions have the settings of all heads."""
    given = {key: value for key, value in settings.items() if key != "builder"}
    name, outputs, input_shape = given.pop("name"), given.pop("outputs"), tuple(given.pop("input_shape"))
    options = given.pop("options", {}) | ({"stem": given.pop("stem")} if "stem" in given else {})  # version 0.1.0
    with torch.random.fork_rng(devices=[]):
        if "head" not in given:
            return build_plain(name, outputs=outputs, input_shape=input_shape, options=options, trusted=False)
        head, place = given.pop("head"), given.pop("place", None)
        kept = leave_out_unused(head, given)
        return _build(name, outputs, input_shape, options, head, kept, place=place, trusted=False)


register_network(FIRST_BUILDER, rebuild_net)


def _build(
    name: str,
    outputs: int,
    input_shape: tuple[int, ...],
    options: Mapping[str, Any],
    head: str,
    head_settings: dict[str, Any],
    *,
    place: dict[str, Any] | None = None,
    trusted: bool = True,
) -> Network:
    """A network with a head of ours; ``place`` is where its features are, if that is known."""
    settings = _describe(name, outputs, input_shape, options)
    net = _build_headless(settings, place, trusted)
    net.attach(build_head(head, net.feature_shape, outputs, **head_settings))
    settings["options"] |= net.resolved_options()
    backbone = getattr(net, "backbone", None)
    if isinstance(backbone, TappedBackbone):
        settings["place"] = backbone.place.as_json()
    kept = {key: _as_json(value) for key, value in leave_out_unused(head, head_settings).items() if value is not None}
    net.settings = {**settings, "head": head, **kept}
    return net


def _build_headless(settings: dict[str, Any], place: dict[str, Any] | None, trusted: bool) -> Network:
    plain = _build_plain(settings, trusted)
    if isinstance(plain, Network):
        return plain
    input_shape = tuple(settings["input_shape"])
    if isinstance(plain, Backbone):
        return HeadedNetwork(plain, input_shape)
    if place is None:
        return HeadedNetwork(tap(plain, input_shape, settings["name"]), input_shape)
    return HeadedNetwork(TappedBackbone(plain, Place.from_json(place)), input_shape)


def _build_plain(settings: dict[str, Any], trusted: bool) -> nn.Module:
    """What the family makes; on the CPU, where its code cannot run without numbers (on the meta device)."""
    family, name = find_family(settings["name"])
    arguments = {key: settings[key] for key in ("outputs", "options")}
    make = partial(family.load(), name, input_shape=tuple(settings["input_shape"]), trusted=trusted, **arguments)
    if torch.get_default_device().type != "meta":
        return make()
    try:
        return make()
    except TensorDropoutError:
        with torch.device("cpu"):
            return make()


def _describe(name: str, outputs: int, input_shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a network without those of its head, checked."""
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise TensorDropoutError(
            f"build_net: options are JSON types (numbers, texts, lists, dicts), so that a file can hold them, got "
            f"{dict(options)!r}: {error}"
        ) from error
    return {
        "builder": FIRST_BUILDER,
        "name": name,
        "options": dict(options),
        "outputs": outputs,
        "input_shape": list(check_input_shape(input_shape)),
    }


def _as_json(value: Any) -> Any:
    """A setting as the header of a file can hold it; a law without a name becomes None and is refused by ``save``."""
    if isinstance(value, str | bool | int | float):
        return value
    return list(value) if isinstance(value, Sequence) else law_name(value)
