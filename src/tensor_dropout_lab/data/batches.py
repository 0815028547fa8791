"""Batches in order, prepared: for evaluation, prediction and everything else that does not train."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import Data, Split, TensorSplit


class Batches:
    """``(x, y)`` of a split in its order, on a device; can be gone through again and again.

    Args:
        data: the data set, whose ``prepare`` turns stored batches into network inputs.
        split: one of its splits.
        batch: the number of samples at once.
        device: where they go.
        workers: processes that read a split which is not in memory.

    Example:
        >>> from tensor_dropout_lab.data import load_data
        >>> data = load_data("synthetic", shape=(4, 4), rank=2, n=50)
        >>> [tuple(x.shape) for x, y in Batches(data, data.train, batch=20)]
        [(20, 4, 4), (16, 4, 4)]
    """

    def __init__(
        self, data: Data, split: Split, batch: int = 256, device: torch.device | str = "cpu", workers: int = 0
    ) -> None:
        self.data, self.split, self.batch, self.device = data, split, batch, device
        self.workers = min(workers, os.cpu_count() or 1)
        self.prepare = data.prepare.to(device)

    def __len__(self) -> int:
        return -(-len(self.split) // self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in self._stored():
            yield self.prepare(x.to(self.device, non_blocking=True)), y.to(self.device, non_blocking=True)

    def _stored(self) -> Iterator[tuple[Tensor, Tensor]]:
        if isinstance(self.split, TensorSplit):
            yield from zip(self.split.inputs.split(self.batch), self.split.targets.split(self.batch), strict=True)
        else:
            with naming_the_file():
                yield from DataLoader(self.split, batch_size=self.batch, num_workers=self.workers)


@contextmanager
def naming_the_file() -> Iterator[None]:
    """Only the sentence of an error in a worker process, which comes with that process' traceback."""
    try:
        yield
    except TensorDropoutError as error:
        sentence = str(error).strip().splitlines()[-1]
        raise TensorDropoutError(sentence.removeprefix("tensor_dropout.errors.TensorDropoutError: ")) from error
