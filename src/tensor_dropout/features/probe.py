"""One forward pass on fixed numbers: which layers give maps, which one to take, and how its tokens lie."""

from __future__ import annotations

import difflib
import hashlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import log2, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout.features.layers import Place, first_tensor, join, outputs_at

STRIDE = 16
"""The stride of the map that is picked, if there is one; a power of two."""
SAMPLES = 2
MOST_EXTRA_TOKENS = 8
"""How many class and register tokens there may be before those of the grid."""


class Event(NamedTuple):
    """A layer that ran: what came in and what went out."""

    name: str
    key: int | str | None
    entered: tuple[int, ...]
    shape: tuple[int, ...]
    module: nn.Module


class Wish(NamedTuple):
    """What is asked of a network's layers; see ``FeatureMaps``."""

    layer: str | Sequence[str] | None = None
    pool: int | Sequence[int] | None = None
    grid: Sequence[int] | None = None
    channel_axis: int = 1


class Probe(NamedTuple):
    """What one forward pass showed."""

    places: tuple[Place, ...]
    pool: tuple[int, ...] | None
    map_shape: tuple[int, ...]
    """(C, *space) after joining and pooling."""
    sketch: tuple[float, ...]
    """The length of the maps, and 16 random projections of them relative to it."""

    @property
    def fingerprint(self) -> str:
        """A hash of the maps, coarse enough for another machine's rounding."""
        length, *projections = self.sketch
        numbers = [f"{length:.2e}", *(f"{round(value, 2) + 0.0:.2f}" for value in projections)]
        return hashlib.sha256(" ".join(numbers).encode()).hexdigest()


def fixed_input(network: nn.Module, shape: Sequence[int]) -> Tensor:
    """The same random numbers every time, as the network takes them."""
    x = torch.randn(SAMPLES, *shape, generator=torch.Generator().manual_seed(0))
    like = next((p for p in network.parameters() if p.is_floating_point()), x)
    return x.to(like.device, like.dtype)


@torch.no_grad()  # not inference mode: what a network keeps from its first pass may be trained through later
def probe(network: nn.Module, x: Tensor, wish: Wish, where: str) -> Probe:
    """Find the layers and what they give, with the network in ``eval`` mode.

    Raises:
        TensorDropoutError: if the network does not run on x, has no such layer, or gives no map there.
    """
    _check_wish(wish, x.ndim, where)
    names = _named_layers(network, wish.layer, where)
    events = _run(network, x, names, where)
    if not names:
        names = [pick(events, x.shape, wish, where)]
    places = tuple(_place(name, events, x.shape, wish, where) for name in names)
    maps = [place.lay_out(each) for place, each in zip(places, outputs_at(network, places, x), strict=True)]
    pool = _check_pool(wish.pool, join(maps), where)
    joined = join(maps, pool)
    return Probe(places, pool, tuple(joined.shape[1:]), _sketch(joined))


def _check_wish(wish: Wish, ndim: int, where: str) -> None:
    axis, sides = wish.channel_axis, wish.grid
    if type(axis) is not int or not (1 <= axis < ndim or -ndim < axis <= -1):
        raise TensorDropoutError(
            f"{where}: channel_axis is the axis of a map's channels, 1 to {ndim - 1}, or -1 to {1 - ndim}; got {axis!r}"
        )
    fits = isinstance(sides, Sequence) and len(sides) == ndim - 2 and all(type(n) is int and n > 0 for n in sides)
    if sides is not None and not fits:
        raise TensorDropoutError(
            f"{where}: grid is the sides of the tokens' grid, {ndim - 2} numbers such as {(14,) * (ndim - 2)}, got "
            f"{sides!r}"
        )


def _named_layers(network: nn.Module, layer: Any, where: str) -> list[str]:
    """The names of the layers, checked; none to pick one."""
    several = isinstance(layer, Sequence) and not isinstance(layer, str)
    names = [] if layer is None else list(layer) if several else [layer]
    if not all(isinstance(name, str) for name in names) or (layer is not None and not names):
        raise TensorDropoutError(f"{where}: layer is the name of a layer, or a list of names, got {layer!r}")
    known = [name for name, _ in network.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
            nearest += [each for each in known if name and each.endswith(f".{name}") and each not in nearest][:3]
            advice = f"the nearest names are {nearest}" if nearest else f"there are {name_some([*filter(None, known)])}"
            raise TensorDropoutError(f"{where}: {type(network).__name__} has no layer {name!r}; {advice}")
    return names


def _run(network: nn.Module, x: Tensor, wanted: Sequence[str], where: str) -> list[Event]:
    with recording(network) as events:
        try:
            network(x)
        except Exception as error:  # the network is the user's: whatever it raises is passed on in our sentence
            ran = {event.name for event in events}
            if not wanted or not ran.issuperset(wanted):  # what fails behind the layers does not matter
                words = (str(error).strip().splitlines() or [""])[0]
                advice = "set size, or pass inputs" if where == "FeatureMaps" else "pass an example_input"
                raise TensorDropoutError(
                    f"{where}: {type(network).__name__} does not run on an input of shape {tuple(x.shape)}: "
                    f"{type(error).__name__}: {words}; {advice} such as the network gets in use"
                ) from error
    return events


@contextmanager
def recording(network: nn.Module) -> Iterator[list[Event]]:
    """Inside, every layer that runs is noted, in the order in which they end; under each of its names."""
    events: list[Event] = []
    names: dict[nn.Module, list[str]] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        found = first_tensor(output)
        if found is not None:
            entered = tuple(inputs[0].shape) if inputs and isinstance(inputs[0], Tensor) else ()
            shape = tuple(found[1].shape)
            events.extend(Event(name, found[0], entered, shape, module) for name in names[module])

    hooks = [module.register_forward_hook(note) for module in names]
    try:
        yield events
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def pick_layer(network: nn.Module, x: Tensor, stride: int, where: str) -> str:
    """The layer with the last map of a stride, found with one forward pass; see :func:`pick`.

    Args:
        network: in ``eval`` mode.
        x: inputs; see :func:`fixed_input`.
        stride: a power of two.
        where: the caller's name, for messages.
    """
    return pick(_run(network, x, [], where), x.shape, Wish(), where, stride)


def pick(events: list[Event], input_shape: Sequence[int], wish: Wish, where: str, stride: int = STRIDE) -> str:
    """The last map of a stride, else of the largest stride below it but 1, else of the smallest above it, else of 1.

    Inside a block that takes a map of that stride and gives a coarser one nothing counts: it is on the way down. The
    network itself is picked only if no layer in it is as good.
    """
    candidates: dict[str, tuple[int, ...]] = {}
    for n, event in enumerate(events):
        candidates.pop(event.name, None)  # of a layer that runs several times the last output counts
        strides = _strides(events, n, input_shape, wish)
        passes = isinstance(event.module, nn.Identity) or _is_passing(event, events, len(input_shape))
        if strides and not passes and not _looks_last(event, input_shape, wish):
            candidates[event.name] = strides
    chosen, best = None, (-1, 0)
    for name, strides in candidates.items():
        here = max(strides)
        rank = (0, 0) if here == 1 else (1, -prod(strides)) if here > stride else (2, prod(strides))
        if rank > best or (rank == best and name):
            chosen, best = name, rank
    if chosen is None:
        raise TensorDropoutError(
            f"{where}: no layer of this network gives a map (n, C, *space) or tokens whose grid can be told; name one "
            "with layer=, and for tokens its grid with grid="
        )
    return chosen


def _looks_last(event: Event, input_shape: Sequence[int], wish: Wish) -> bool:
    """Whether a map is read with its channels first, although only its last axis can be the channels.

    Read so its strides differ between the axes; read with the channels last they are alike.
    """
    if wish.channel_axis != 1 or len(event.shape) != len(input_shape) or event.shape[0] != input_shape[0]:
        return False
    space = input_shape[2:]
    first, last = (
        {before / after for before, after in zip(space, grid, strict=True)}
        for grid in (event.shape[2:], event.shape[1:-1])
    )
    return len(first) > 1 and len(last) == 1


def _is_passing(event: Event, events: list[Event], ndim: int) -> bool:
    """Whether a map or tokens are only on their way: in a block that makes them fewer and has not yet, or has padded.

    What looks like a map in a block of tokens is attention between them.
    """
    for block in events:
        if not event.name.startswith(f"{block.name}."):
            continue
        if len(block.entered) == 3 and not isinstance(block.module, nn.Sequential):
            is_as_entered = event.shape[1:2] == block.entered[1:2]
            if len(event.shape) > 3 or (is_as_entered and block.shape[1:-1] != block.entered[1:-1]):
                return True
        elif len(event.shape) == len(block.shape) == len(block.entered) == ndim:
            positions, before, after = (prod(shape[2:]) for shape in (event.shape, block.entered, block.shape))
            if positions > max(before, after) or after < before == positions:
                return True
    return False


def _strides(events: list[Event], n: int, input_shape: Sequence[int], wish: Wish) -> tuple[int, ...]:
    """The stride on each axis, rounded to a power of two; () for what is no map."""
    shape, space = events[n].shape, tuple(input_shape[2:])
    if not shape or shape[0] != input_shape[0]:
        return ()
    grid: tuple[int, ...] | None
    if len(shape) == 3:
        grid = (_find_grid(events, n, input_shape, wish) or (None, 0))[0]
    elif len(shape) == len(input_shape):
        axis = wish.channel_axis % len(shape)
        grid = tuple(size for k, size in enumerate(shape) if k not in (0, axis))
    else:
        grid = None
    if grid is None or len(grid) != len(space) or prod(grid) <= 1:
        return ()
    return tuple(2 ** max(0, round(log2(before / after))) for before, after in zip(space, grid, strict=True))


def _find_grid(
    events: list[Event], n: int, input_shape: Sequence[int], wish: Wish
) -> tuple[tuple[int, ...], int] | None:
    """The grid of tokens (n, T, C), and how many come before it: from an earlier map with about as many positions."""
    tokens = events[n].shape[1]
    if wish.grid is not None:
        grids = [tuple(wish.grid)]
    else:
        earlier = [event.shape for event in events[:n] if len(event.shape) == len(input_shape)]
        grids = [shape[2:] for shape in reversed(earlier) if shape[0] == input_shape[0]]
    fitting = [(grid, tokens - prod(grid)) for grid in grids if 0 <= tokens - prod(grid) <= MOST_EXTRA_TOKENS]
    return min((each for each in fitting if prod(each[0]) > 1), key=lambda each: each[1], default=None)


def _place(name: str, events: list[Event], input_shape: Sequence[int], wish: Wish, where: str) -> Place:
    """How the output of a layer becomes maps."""
    calls = [n for n, event in enumerate(events) if event.name == name]
    if not calls:
        raise TensorDropoutError(f"{where}: the layer {name!r} does not run in a forward pass, or returns no tensor")
    key, shape = events[calls[-1]].key, events[calls[-1]].shape
    place = Place(name, len(calls), key)
    if shape[0] != input_shape[0]:
        raise _no_map(where, name, shape, "its first axis is not the samples")
    if len(shape) == len(input_shape):
        axis = wish.channel_axis % len(shape)
        if _looks_last(events[calls[-1]], input_shape, wish):
            warnings.warn(
                f"{where}: the layer {name!r} gives {shape}, taken as {shape[1]} channels; if its channels are last, "
                "set channel_axis=-1",
                stacklevel=4,
            )
        return place if axis == 1 else Place(name, len(calls), key, channel_axis=axis)
    if len(shape) != 3:
        raise _no_map(where, name, shape, f"a map of such inputs has {len(input_shape)} axes, tokens have 3")
    found = _find_grid(events, calls[-1], input_shape, wish)
    if found is None and wish.grid is not None:
        raise _no_map(where, name, shape, f"{shape[1]} tokens are not the grid {tuple(wish.grid)} and a few before it")
    if found is None:
        raise _no_map(where, name, shape, f"{shape[1]} tokens fit no earlier map; if they are a grid, say grid=(h, w)")
    return Place(name, len(calls), key, found[0], found[1])


def _no_map(where: str, name: str, shape: tuple[int, ...], reason: str) -> TensorDropoutError:
    return TensorDropoutError(f"{where}: the layer {name!r} gives no map but the shape {shape}: {reason}")


def _check_pool(pool: Any, maps: Tensor, where: str) -> tuple[int, ...] | None:
    space = tuple(maps.shape[2:])
    if pool is None:
        return None
    sizes = (pool,) * len(space) if isinstance(pool, int) else tuple(pool) if isinstance(pool, Sequence) else ()
    whole = len(sizes) == len(space) and all(type(size) is int for size in sizes)
    if not whole or not all(1 <= size <= most for size, most in zip(sizes, space, strict=True)):
        raise TensorDropoutError(
            f"{where}: pool is the grid to average to, one size or one per axis, each at most that of the maps, "
            f"{space}; got {pool!r}"
        )
    return sizes


def _sketch(maps: Tensor) -> tuple[float, ...]:
    """17 numbers, which rounding errors hardly change: their length, and 16 projections relative to it."""
    flat = maps.double().cpu().flatten()
    length = flat.norm().clamp(min=1e-300)
    signs = torch.randint(2, flat.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return float(length), *(float(4 * part.sum() / length) for part in (flat * signs).tensor_split(16))
