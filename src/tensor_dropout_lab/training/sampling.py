"""Which examples a step sees: a fresh order every epoch, dealt to the processes without overlap.

The order is a function of (seed, epoch), so that a run can go on from any step, with any number of processes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import Split, TensorSplit
from tensor_dropout_lab.data.batches import naming_the_file


class Sampler:
    """Batches of row numbers.

    Every process gets its equal share of every batch of ``batch`` rows; the rows that do not fill a last batch are
    left out, others in every epoch.

    Args:
        rows: how many examples there are.
        batch: rows in one step, over all processes.
        seed: of the order.
        rank: which process this is.
        world: how many there are.

    Raises:
        TensorDropoutError: if a batch is larger than the data, or cannot be dealt evenly.

    Example:
        >>> sampler = Sampler(rows=10, batch=4, seed=0)
        >>> sampler.steps_per_epoch, len(sampler.share(epoch=0).unique())
        (2, 8)
    """

    def __init__(self, rows: int, batch: int, seed: int, rank: int = 0, world: int = 1) -> None:
        if batch > rows:
            raise TensorDropoutError(f"train: run.batch={batch} is more than the {rows} training examples; lower it")
        if batch % world:
            raise TensorDropoutError(f"train: run.batch={batch} is not a multiple of the {world} processes")
        self.rows, self.batch, self.seed, self.rank, self.world = rows, batch, seed, rank, world
        self.steps_per_epoch = rows // batch

    def order(self, epoch: int) -> Tensor:
        """All rows in the order of this epoch, cut into whole batches: (steps, batch)."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        rows = torch.randperm(self.rows, generator=generator)
        return rows[: self.steps_per_epoch * self.batch].view(self.steps_per_epoch, self.batch)

    def share(self, epoch: int) -> Tensor:
        """This process' rows of every batch: (steps, batch / world)."""
        share = self.batch // self.world
        return self.order(epoch)[:, self.rank * share : (self.rank + 1) * share]


class Feed:
    """What each step starts from, in the order of a sampler, and how it becomes a stored batch ``(x, y)``.

    A split in memory is moved to the device once: a step starts from row numbers, and the rows are taken there, inside
    the step. Any other split is read by worker processes: a step starts from the batch itself.

    Args:
        split: the training examples.
        sampler: their order.
        device: where batches go.
        workers: processes that read.
    """

    def __init__(self, split: Split, sampler: Sampler, device: torch.device, workers: int) -> None:
        self.sampler, self.device, self.workers = sampler, device, min(workers, os.cpu_count() or 1)
        self.split = split.to(device) if isinstance(split, TensorSplit) else split

    def fetch(self, *start: Tensor) -> tuple[Tensor, Tensor]:
        """The stored batch that a step starts from."""
        if isinstance(self.split, TensorSplit):
            (rows,) = start
            return self.split.inputs[rows], self.split.targets[rows]
        x, y = start
        return x, y

    def starts(self, epoch: int, step: int) -> Iterator[tuple[Tensor, ...]]:
        """What the steps of an epoch start from, from its step ``step`` on."""
        if isinstance(self.split, TensorSplit):
            order = self.sampler.share(epoch).to(self.device)
            yield from ((rows,) for rows in order[step:])
            return
        self.split.set_epoch(epoch, self.sampler.seed)
        loader: DataLoader[tuple[Tensor, Tensor]] = DataLoader(
            self.split,
            batch_sampler=self.sampler.share(epoch)[step:].tolist(),
            num_workers=self.workers,
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if self.workers else None,
            generator=torch.Generator().manual_seed(epoch),  # the default generator belongs to masks and augmentation
        )
        with naming_the_file():
            for x, y in loader:
                yield x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
