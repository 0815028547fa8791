"""A place in a network where a feature map is, and what comes out there as maps (n, C, *space)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DataParallel, DistributedDataParallel

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.head_outputs import unwrap
from tensor_dropout.surgery.checks import check_model

_POOL: dict[int, Any] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@dataclass(frozen=True)
class Place:
    """The output of one layer, and how it is laid out.

    Attributes:
        name: the layer's name in the network; "" is the network itself.
        calls: how many times it runs in a forward pass; the last output counts.
        key: where the tensor is if the layer returns a tuple or a dict.
        grid: for tokens (n, T, C): the grid that they make.
        skipped: how many tokens come before those of the grid (class and register tokens).
        channel_axis: where the channels of a map are.
    """

    name: str
    calls: int = 1
    key: int | str | None = None
    grid: tuple[int, ...] | None = None
    skipped: int = 0
    channel_axis: int = 1

    def lay_out(self, x: Tensor) -> Tensor:
        """What the layer gave, as maps.

        Example:
            >>> Place("blocks.3", grid=(7, 7), skipped=1).lay_out(torch.zeros(2, 50, 16)).shape
            torch.Size([2, 16, 7, 7])
        """
        if self.grid is not None:
            return x[:, self.skipped :].mT.unflatten(2, self.grid)  # (n, T, C) -> (n, C, h, w)
        return x if self.channel_axis == 1 else x.movedim(self.channel_axis, 1)

    def as_json(self) -> dict[str, Any]:
        """As JSON types."""
        return {**asdict(self), "grid": None if self.grid is None else list(self.grid)}

    @classmethod
    def from_json(cls, settings: dict[str, Any]) -> Place:
        """From what ``as_json`` gave."""
        grid = settings["grid"]
        return cls(**{**settings, "grid": None if grid is None else tuple(grid)})


def plain_network(model: Any, where: str) -> nn.Module:
    """The network inside DDP, DataParallel and ``torch.compile``; names of layers are names in it.

    Raises:
        TensorDropoutError: for what is no network, or one whose layers cannot be reached (FSDP, TorchScript).
    """
    while isinstance(model, DataParallel | DistributedDataParallel) or hasattr(model, "_orig_mod"):
        model = unwrap(model)
        model = model.module if isinstance(model, DataParallel) else model
    check_model(model, where)
    network: nn.Module = model
    return network


def first_tensor(output: Any) -> tuple[int | str | None, Tensor] | None:
    """The tensor in what a layer returned, and its key: itself, or the first of a tuple, a list or a dict."""
    if isinstance(output, Tensor):
        return None, output
    pairs: list[tuple[Any, Any]] = []
    if isinstance(output, Mapping):
        pairs = list(output.items())
    elif isinstance(output, tuple | list):
        pairs = list(enumerate(output))
    return next(((key, value) for key, value in pairs if isinstance(value, Tensor)), None)


class Enough(BaseException):
    """All outputs that are wanted have been seen."""


@contextmanager
def keeping(network: nn.Module, places: Sequence[Place]) -> Iterator[list[Tensor]]:
    """Inside, the first forward pass ends behind the last of these layers; then the list has their outputs."""
    kept: list[Tensor] = []
    calls = [0] * len(places)
    outputs: dict[int, Tensor] = {}

    def keep(number: int) -> Any:
        place = places[number]

        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            calls[number] += 1
            if calls[number] < place.calls:
                return
            outputs[number] = output if place.key is None else output[place.key]
            if len(outputs) == len(places):
                raise Enough
            outputs[number] = outputs[number].clone()  # an in-place operation may follow

        return hook

    hooks = [network.get_submodule(place.name).register_forward_hook(keep(n)) for n, place in enumerate(places)]
    try:
        yield kept
    except Enough:
        kept.extend(outputs[number] for number in range(len(places)))
    finally:
        for hook in hooks:
            hook.remove()


def outputs_at(network: nn.Module, places: Sequence[Place], x: Tensor) -> list[Tensor]:
    """What these layers give for x; nothing behind the last of them is computed."""
    with keeping(network, places) as kept:
        network(x)
    if not kept:
        names = ", ".join(repr(place.name) for place in places)
        raise TensorDropoutError(f"the network did not run its layer {names} as often as it did on its first input")
    return kept


def join(maps: Sequence[Tensor], pool: tuple[int, ...] | None = None) -> Tensor:
    """Maps of several layers along their channels, averaged to the smallest of their grids, or to ``pool``.

    Example:
        >>> join([torch.zeros(2, 8, 14, 14), torch.zeros(2, 16, 7, 7)]).shape
        torch.Size([2, 24, 7, 7])
    """
    grid = pool or tuple(min(sizes) for sizes in zip(*(x.shape[2:] for x in maps), strict=True))
    averaged = [x if tuple(x.shape[2:]) == grid else _POOL[len(grid)](x, grid) for x in maps]
    return averaged[0] if len(averaged) == 1 else torch.cat(averaged, dim=1)
