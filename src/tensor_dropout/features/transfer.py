"""Batches to the network's device and maps back; on a GPU both happen while it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Forward = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From a batch on the device to its maps there, and whether each is finite."""


@dataclass
class Running:
    """Maps that are being computed, or on their way to memory."""

    maps: Tensor
    finite: Tensor
    arrived: torch.cuda.Event | None = None

    def wait(self) -> tuple[np.ndarray, np.ndarray]:
        """The maps, and whether each is finite, once they are in memory."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.maps.numpy(), self.finite.numpy()


class Transfer:
    """Takes batches to the device of a network.

    On the CPU all is done at once. On a GPU a batch is copied from pinned memory in a stream of its own, so that the
    next batch arrives and the last maps leave while one is computed.

    Args:
        network: on its device.

    Attributes:
        ahead: how many batches may be under way before the first of them is waited for.
    """

    def __init__(self, network: nn.Module) -> None:
        like = next((p for p in network.parameters() if p.is_floating_point()), torch.zeros(()))
        self.device, self.dtype = like.device, like.dtype
        self.on_gpu = self.device.type == "cuda"
        self.ahead = 2 if self.on_gpu else 0
        self._streams: Any = [torch.cuda.Stream(self.device) for _ in range(2)] if self.on_gpu else None

    def stack(self, samples: Sequence[Tensor]) -> Tensor:
        """One batch in memory, in the network's type of numbers."""
        batch = torch.empty((len(samples), *samples[0].shape), dtype=self.dtype, pin_memory=self.on_gpu)
        block = _view_as_one(samples)
        if block is not None:
            return batch.copy_(block)
        for place, sample in zip(batch, samples, strict=True):
            place.copy_(sample)
        return batch

    def start(self, batch: Tensor, forward: Forward) -> Running:
        """Compute the maps of a batch; on a GPU this returns before they are there."""
        if not self.on_gpu:
            maps, finite = forward(batch.to(self.device))
            return Running(maps.cpu(), finite.cpu())
        arriving, leaving = self._streams
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(arriving):
            x = batch.to(self.device, non_blocking=True)
        computing.wait_stream(arriving)
        x.record_stream(computing)  # its memory is not given away before the network has read it
        maps, finite = forward(x)
        leaving.wait_stream(computing)
        with torch.cuda.stream(leaving):
            maps_here, finite_here = (_copy_out(tensor, leaving) for tensor in (maps, finite))
            arrived = torch.cuda.Event()
            arrived.record(leaving)
        return Running(maps_here, finite_here, arrived)


def _view_as_one(samples: Sequence[Tensor]) -> Tensor | None:
    """Samples that lie one after another in memory as one tensor, which all threads copy at once; None for others."""
    first, size = samples[0], samples[0].numel()
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for number, sample in enumerate(samples):
        follows = sample.untyped_storage().data_ptr() == storage and sample.storage_offset() == start + number * size
        if not follows or not sample.is_contiguous():
            return None
    return first.as_strided((len(samples), *first.shape), (size, *first.stride()))


def _copy_out(tensor: Tensor, stream: Any) -> Tensor:
    tensor.record_stream(stream)
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
