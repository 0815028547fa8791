"""Samples go through the network once, in batches; their maps go into an array or into the cache."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import Item, Source, name_some
from tensor_dropout.features.layers import join, outputs_at
from tensor_dropout.features.probe import Probe
from tensor_dropout.features.store import Store
from tensor_dropout.features.transfer import Running, Transfer
from tensor_dropout.progress import Advance
from tensor_dropout.surgery.find_head import at_rest

READERS = min(16, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""How many files are read at once."""
Batch = list[tuple[int, Item]]
"""Samples and their numbers."""


@dataclass
class Reader:
    """Runs batches through a network up to its layers.

    Attributes:
        network: in ``eval`` mode and on its device.
        probe: the layers.
        input_shape: of every sample.
        batch: how many samples at once.
        autocast: a type of numbers for the network, or None for its own.
        dtype: of the maps.
        where: the caller's name, for messages.
        seconds: what was spent waiting for samples, for the network, and reading or writing the cache.
        computed: how many samples went through the network; the others were in the cache.
    """

    network: nn.Module
    probe: Probe
    input_shape: tuple[int, ...]
    batch: int
    autocast: torch.dtype | None
    dtype: np.dtype
    where: str
    seconds: dict[str, float] = field(default_factory=lambda: {"reading": 0.0, "network": 0.0, "cache": 0.0})
    computed: int = 0

    def __post_init__(self) -> None:
        self.transfer = Transfer(self.network)

    def maps(self, batches: Iterator[Batch], source: Source, known: Container[str]) -> Iterator[tuple[Batch, Any]]:
        """Batches and their maps (len(batch), C, *space), without the samples that are known by now."""
        waiting: deque[tuple[Batch, Running]] = deque()
        stacked = self._stacked(batches, known)
        while True:
            with self.timing("reading"):
                batch, x = next(stacked, ([], None))
            if x is None:
                break
            with self.timing("network"):
                waiting.append((batch, self.transfer.start(x, self._forward)))
            if len(waiting) > self.transfer.ahead:
                yield self._finish(*waiting.popleft(), source)
        while waiting:
            yield self._finish(*waiting.popleft(), source)

    def _stacked(self, batches: Iterator[Batch], known: Container[str]) -> Iterator[tuple[Batch, Tensor]]:
        """On a GPU the next batch is put together in a thread while one is computed."""
        new = ([pair for pair in batch if not pair[1].digest or pair[1].digest not in known] for batch in batches)
        stacked = ((batch, self.transfer.stack([_tensor(item) for _, item in batch])) for batch in new if batch)
        return _ahead(stacked) if self.transfer.on_gpu else stacked

    @torch.inference_mode()
    def _forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast(x.device.type, self.autocast, enabled=self.autocast is not None):
            outputs = outputs_at(self.network, self.probe.places, x)
        wide = [each.float() if each.dtype in (torch.float16, torch.bfloat16) else each for each in outputs]
        joined = join([p.lay_out(each) for p, each in zip(self.probe.places, wide, strict=True)], self.probe.pool)
        maps = joined.to(getattr(torch, self.dtype.name)).contiguous()
        return maps, maps.flatten(1).isfinite().all(1)

    def _finish(self, batch: Batch, running: Running, source: Source) -> tuple[Batch, np.ndarray]:
        """Wait for maps and check them."""
        with self.timing("network"):
            maps, finite = running.wait()
        if maps.shape[1:] != self.probe.map_shape:
            raise TensorDropoutError(
                f"{self.where}: the network gave maps of shape {maps.shape[1:]} for {source.name(batch[0][0])}, and "
                f"{self.probe.map_shape} on its first input"
            )
        if not finite.all():
            wrong = [source.name(number) for (number, _), fine in zip(batch, finite, strict=True) if not fine]
            cure = "check these samples and the network's weights"
            if self.dtype == np.float16:
                cure = "numbers above 65504 do not fit into float16: set dtype='float32'"
            raise TensorDropoutError(f"{self.where}: the maps of {name_some(wrong)} are NaN or infinite; {cure}")
        self.computed += len(batch)
        return batch, maps

    @contextmanager
    def timing(self, what: str) -> Iterator[None]:
        """What the block takes is added to ``seconds``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start


def _ahead(items: Iterator[Any]) -> Iterator[Any]:
    """The same items; a thread makes the next one while one is used."""
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(next, items, None)
        while (item := future.result()) is not None:
            future = thread.submit(next, items, None)
            yield item


@contextmanager
def resting(network: nn.Module, device: Any, where: str) -> Iterator[None]:
    """``eval`` mode on a device inside; modes, buffers, random numbers and the device are put back.

    Raises:
        TensorDropoutError: for a device that cannot be used.
    """
    here = {parameter.device for parameter in network.parameters()}
    moves = device is not None and here != {_check_device(device, where)}
    if moves and len(here) > 1:
        raise TensorDropoutError(f"{where}: the network is on {sorted(map(str, here))}; leave out device")
    with at_rest(network, list(here)):
        try:
            if moves:
                network.to(device)
            yield
        finally:
            if moves:
                network.to(next(iter(here), "cpu"))


def _check_device(device: Any, where: str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        words = str(error).splitlines()[0]
        raise TensorDropoutError(f"{where}: device={device!r} cannot be used here ({words})") from None


def first_sample(source: Source, where: str) -> Tensor:
    """The first sample that can be read.

    Raises:
        TensorDropoutError: if there is none.
    """
    problems = {}
    for number in range(len(source)):
        item = source.read(number, None)
        if item.x is not None:
            return item.x
        problems[number] = item.problem
    raise unreadable(source, problems, where)


def extract(reader: Reader, source: Source, advance: Advance) -> np.ndarray:
    """The maps of all samples, in memory."""
    maps = np.empty((len(source), *reader.probe.map_shape), reader.dtype)
    done = 0
    for batch, rows in reader.maps(_batches(reader, source, None, advance), source, ()):
        # Without a cache every sample is computed, in order. torch copies with all threads: these pages are new.
        torch.from_numpy(maps[done : done + len(batch)]).copy_(torch.from_numpy(rows))
        done += len(batch)
        advance(len(batch))
    assert done == len(source)
    return maps


def extract_into(store: Store, reader: Reader, source: Source, advance: Advance, limit: float) -> np.ndarray:
    """The maps of all samples from the cache, after those that it lacks were computed."""
    digests: list[str] = [""] * len(source)
    batches = _batches(reader, source, store.rows.__contains__, advance, digests)
    with reader.timing("reading"):
        first = next(batches, None)
    if first is not None:  # something is to be computed: this process is to be the writer
        with store.writing():  # what others wrote while we waited is known now
            for batch, rows in reader.maps(chain([first], batches), source, store.rows):
                with reader.timing("cache"):
                    store.append([item.digest for _, item in batch], rows)
                advance(len(batch))
    with reader.timing("cache"):
        return store.read(digests, limit)


def _tensor(item: Item) -> Tensor:
    assert item.x is not None
    return item.x


def _batches(
    reader: Reader,
    source: Source,
    is_known: Callable[[str], bool] | None,
    advance: Advance,
    digests: list[str] | None = None,
) -> Iterator[Batch]:
    """Batches of samples that are to be computed, each content once; the rest is counted as done.

    After the first sample that cannot be read no batch is given any more, and all of them are named.
    """
    pending: Batch = []
    seen: set[str] = set()
    problems: dict[int, str] = {}
    for number, item in _read(source, is_known, reader.batch):
        if digests is not None:
            digests[number] = item.digest
        if item.problem:
            problems[number] = item.problem
        elif item.x is None or (item.digest and item.digest in seen):
            advance(1)
        elif not problems:
            _check_shape(reader, source, number, item)
            seen.update([item.digest] if item.digest else [])
            pending.append((number, item))
        if len(pending) == reader.batch and not problems:
            yield pending
            pending = []
    if problems:
        raise unreadable(source, problems, reader.where)
    if pending:
        yield pending


def _check_shape(reader: Reader, source: Source, number: int, item: Item) -> None:
    shape = tuple(_tensor(item).shape)
    if shape != reader.input_shape:
        raise TensorDropoutError(
            f"{reader.where}: the samples have several sizes: {source.name(number)} has {shape}, the first one "
            f"{reader.input_shape}; bring them to one size (for volumes: size=(x, y, z))"
        )


def unreadable(source: Source, problems: dict[int, str], where: str) -> TensorDropoutError:
    """The error that names all of them, or the first few and how many there are."""
    named = [f"{source.name(number)} ({problem})" for number, problem in problems.items()]
    return TensorDropoutError(
        f"{where}: {len(problems)} of {len(source)} samples cannot be read: {name_some(named)}; replace them, or leave "
        "them out"
    )


def _read(source: Source, is_known: Callable[[str], bool] | None, batch: int) -> Iterator[tuple[int, Item]]:
    """All samples in their order; files are read ahead by threads, a batch and a few more at most."""
    if not source.in_threads:
        yield from ((number, source.read(number, is_known)) for number in range(len(source)))
        return
    waiting: deque[tuple[int, Future[Item]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for number in range(len(source)):
                waiting.append((number, pool.submit(source.read, number, is_known)))
                if len(waiting) >= batch + READERS:
                    first, future = waiting.popleft()
                    yield first, future.result()
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()


def hash_network(network: nn.Module) -> str:
    """A hash of the weights, their names and the structure."""
    structure = re.sub(r" at 0x[0-9a-fA-F]+", "", repr(network))  # functions show where they are in memory
    content = hashlib.sha256(structure.encode())
    for name, tensor in network.state_dict().items():
        if isinstance(tensor, Tensor):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
