"""Where the last feature map of any network is: found by running it once.

A network for classes ends in average pooling (or flattening) and linear layers. What goes into the pooling is a
feature map (C, *space), which a head of ours takes instead. The place is written into the network's settings, so that
the same network is built again without searching.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.surgery.checks import check_model
from tensor_dropout.surgery.find_head import CONVOLUTIONS, Seen, Trace, choose_heads, is_pointwise, run, trace
from tensor_dropout_lab.nets.families import describe_error
from tensor_dropout_lab.nets.tapped import Layout, Place, TappedBackbone

_SEARCHED_SIZE = 96
"""A larger input is cut down to this size for the search, which keeps every map in memory."""


def tap(network: nn.Module, input_shape: tuple[int, ...], what: str) -> TappedBackbone:
    """Cut a network behind its last feature map, in place; only copies of it are run.

    Args:
        network: any classification network, or one that returns its feature map.
        input_shape: (channels, *size) with 2 or 3 sizes.
        what: the name of the network, for messages.

    Raises:
        TensorDropoutError: if it does not run on such an input, or its head is not found.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
        >>> backbone = tap(net, (1, 8, 8), "net")
        >>> backbone.feature_shape, backbone(torch.randn(2, 1, 8, 8)).shape
        ((4, 6, 6), torch.Size([2, 4, 6, 6]))
        >>> backbone.left_out
        ('3',)
    """
    check_model(network, f"net {what}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        place, example, features = _search(network, input_shape, what)
        place = _try(network, place, example, features, what)
        if tuple(example.shape[1:]) != tuple(input_shape):
            place = replace(place, feature_shape=_measure(network, place, input_shape, what))
    if place.layout == "flat" and prod(place.feature_shape[1:]) == 1:
        warnings.warn(
            f"net {what}: its head gets {place.feature_shape[0]} features without positions, since no module of it "
            "makes or takes a map that is then averaged or flattened",
            stacklevel=3,
        )
    return TappedBackbone(network, place)


def _copy(network: nn.Module) -> nn.Module:
    """One to run and to throw away: some networks remember what they computed."""
    copied = copy.deepcopy(network).eval()
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            parameter.requires_grad_(True)  # what gets no gradient does nothing for the features
    return copied


class _Event(NamedTuple):
    """A tensor that went into a module or came out of it."""

    module: str
    side: Literal["output", "input"]
    tensor: Tensor
    mixes_positions: bool
    """Whether the module is a convolution over more than one position."""


class _Run(NamedTuple):
    """What one run of the network showed."""

    example: Tensor
    events: list[_Event]
    traced: Trace


def _search(network: nn.Module, input_shape: tuple[int, ...], what: str) -> tuple[Place, Tensor, Tensor]:
    """The place of the map, an example, and its map; of a smaller example than an input, if the network takes that."""
    channels, *sizes = input_shape
    smaller = (channels, *(min(size, _SEARCHED_SIZE) for size in sizes))
    if smaller != tuple(input_shape):
        try:
            place, example, features = _search_at(network, smaller, what)
            if prod(place.feature_shape[1:]) > 1:  # else the map of a full-size input may have more positions
                return place, example, features
        except TensorDropoutError:
            pass  # it takes inputs of one size
    return _search_at(network, input_shape, what)


def _search_at(network: nn.Module, shape: tuple[int, ...], what: str) -> tuple[Place, Tensor, Tensor]:
    network = _copy(network)
    example = torch.randn(2, *shape).to(next(network.parameters(), torch.zeros(())))
    try:
        with _recording(network) as events:
            traced = trace(network, example)
    except TensorDropoutError as error:
        cause = error.__cause__ or error
        raise TensorDropoutError(
            f"net {what}: it does not run on inputs of shape {tuple(shape)}: {describe_error(cause)}"
        ) from error
    place, features = _find_place(network, _Run(example, events, traced), what)
    return place, example, features


@contextmanager
def _recording(network: nn.Module) -> Iterator[list[_Event]]:
    """The tensors that enter and leave each module inside, in their order."""
    events: list[_Event] = []

    def note(name: str, module: nn.Module) -> list[Any]:
        kernel = getattr(module, "kernel_size", 1)
        mixes = isinstance(module, CONVOLUTIONS) and set(kernel if isinstance(kernel, tuple) else (kernel,)) != {1}

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> None:
            if inputs and isinstance(inputs[0], Tensor):
                events.append(_Event(name, "input", inputs[0], mixes))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor):
                events.append(_Event(name, "output", output, mixes))

        return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]

    hooks = [hook for name, module in network.named_modules() for hook in note(name, module)]
    try:
        yield events
    finally:
        for hook in hooks:
            hook.remove()


def _find_place(network: nn.Module, shown: _Run, what: str) -> tuple[Place, Tensor]:
    """Where the last feature map is, and that of the example as a head takes it."""
    head = _find_head(shown, what)
    target, end = _find_target(network, shown, head, what)
    ndim = shown.example.ndim
    maps = [(k, event.tensor) for k, event in enumerate(shown.events[:end]) if _is_map(event.tensor, ndim)]
    features, layout = target, _describe_layout(target, target, ndim)
    if layout is None and maps:
        last, features = maps[-1]
        after = shown.events[last:end]
        layout = _describe_layout(features, target, ndim)
        if layout is None and not any(event.mixes_positions for event in after):
            layouts = (
                _describe_layout(features, event.tensor, ndim) for event in after if event.tensor is not features
            )
            layout = next((layout for layout in layouts if layout is not None), None)
    if layout is None:
        features, layout = target, "flat"
    module, side = _choose_hook(shown.events, features)
    unused = _find_unused(network, features)
    if layout == "channels-last":
        features = features.movedim(-1, 1)
    elif layout == "flat":
        positions = head.features[1:] if head is not None and head.kind == "flatten" else ()
        positions = positions if len(positions) == ndim - 2 else tuple(1 for _ in range(ndim - 2))
        features = features.reshape(len(features), -1, *positions)
    return Place(module, side, layout, tuple(features.shape[1:]), unused), features.detach()


def _find_head(shown: _Run, what: str) -> Seen | None:
    """The published head's first linear layer, if there is one; of several on the same features, any of them."""
    heads = choose_heads(shown.traced)
    names = [head.name for head in heads]
    inputs = [event.tensor for event in shown.events if event.side == "input" and event.module in names]
    if any(features.shape != inputs[0].shape or not torch.equal(features, inputs[0]) for features in inputs):
        raise TensorDropoutError(
            f"net {what}: it has {len(heads)} heads on different features ({', '.join(names)}), one is expected"
        )
    return heads[0] if heads else None


def _find_target(network: nn.Module, shown: _Run, head: Seen | None, what: str) -> tuple[Tensor, int]:
    """What the published head takes, and how many events came before it; without a head, what the network returns."""
    layer = _find_last_convolution(network, shown) if head is None else head.name
    for k, event in enumerate(shown.events):
        if event.module == layer and event.side == "input":
            return event.tensor, k
    if not shown.events or len(shown.traced.output) != 1 or shown.traced.output[0].ndim < 2:
        raise TensorDropoutError(
            f"net {what}: its head was not found; it should end in average pooling or flattening and a linear layer, "
            "or return a feature map (B, channels, *space)"
        )
    return shown.events[-1].tensor, len(shown.events)


def _find_last_convolution(network: nn.Module, shown: _Run) -> str | None:
    """The 1×1 convolution that makes the classes, if a network ends in one (SqueezeNet)."""
    modules = dict(network.named_modules())
    named = [event.module for event in shown.events if event.side == "output"]
    last = next((name for name in reversed(named) if list(modules[name].parameters(recurse=False))), None)
    ends_in_map = shown.traced.output[0].ndim > 2 if shown.traced.output else False
    return last if last is not None and not ends_in_map and is_pointwise(modules[last]) else None


def _is_map(tensor: Tensor, ndim: int) -> bool:
    return (
        tensor.ndim == ndim
        and tensor.is_floating_point()
        and tensor[0].numel() > max(tensor.shape[1], tensor.shape[-1])
    )


@torch.no_grad()
def _describe_layout(features: Tensor, target: Tensor, ndim: int) -> Layout | None:
    """How a map is laid out, if the target is this map, its average, its maximum or its entries in a row; else None."""
    if not _is_map(features, ndim) or len(features) != len(target):
        return None
    if target is features:
        return "channels-first"
    flat = target.flatten(1)
    space = tuple(range(2, ndim))
    channels_first: list[Tensor] = [features.flatten(1), features.mean(space), features.amax(space)]
    if any(flat.shape == each.shape and torch.allclose(flat, each, rtol=1e-4, atol=1e-6) for each in channels_first):
        return "channels-first"
    mean = features.mean(tuple(range(1, ndim - 1)))
    same = flat.shape == mean.shape and torch.allclose(flat, mean, rtol=1e-4, atol=1e-6)
    return "channels-last" if same else None


def _choose_hook(events: list[_Event], features: Tensor) -> tuple[str, Literal["output", "input"]]:
    """The module nearest to the root that makes this tensor, or else takes it, in its last call."""
    last = {(event.module, event.side): event for event in events}
    known = [event for event in last.values() if event.tensor is features]
    chosen = min(known, key=lambda event: (event.side == "input", event.module.count(".") if event.module else -1))
    return chosen.module, chosen.side


def _find_unused(network: nn.Module, features: Tensor) -> tuple[str, ...]:
    """The smallest modules whose parameters all do nothing for the map: what has none may still change it in place."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(features.sum(), parameters, allow_unused=True)
    unused = {parameter for parameter, slope in zip(parameters, gradients, strict=True) if slope is None}
    owners = [(name, list(module.parameters(recurse=False))) for name, module in network.named_modules()]
    return tuple(name for name, held in owners if name and held and unused.issuperset(held))


def _try(network: nn.Module, place: Place, example: Tensor, features: Tensor, what: str) -> Place:
    """Run the network without what does nothing for the map: can it, is the map the same, is anything random?"""
    try:
        found, again = _run_twice(TappedBackbone(_copy(network), place), example)
    except Exception:  # something behind the map needs the shapes of what was removed
        place = replace(place, removed=False)
        found, again = _run_twice(TappedBackbone(_copy(network), place), example)
    deterministic = torch.equal(found, again)
    if deterministic and not torch.allclose(found, features, rtol=1e-3, atol=1e-5):
        raise TensorDropoutError(
            f"net {what}: without {', '.join(place.left_out)} its features are others; let its forward return "
            "the feature map instead"
        )
    return replace(place, deterministic=deterministic)


@torch.no_grad()
def _run_twice(backbone: TappedBackbone, example: Tensor) -> tuple[Tensor, Tensor]:
    return backbone(example), backbone(example)


@torch.no_grad()
def _measure(network: nn.Module, place: Place, input_shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    """The shape of the features of a full-size input: without computing them, where every operation allows that."""
    backbone = TappedBackbone(_copy(network), place)
    try:
        return tuple(copy.deepcopy(backbone).to("meta")(torch.empty(1, *input_shape, device="meta")).shape[1:])
    except Exception:  # an operation that needs numbers
        (features,) = run(backbone, torch.randn(1, *input_shape).to(next(backbone.parameters())), f"net {what}")
        return tuple(features.shape[1:])
