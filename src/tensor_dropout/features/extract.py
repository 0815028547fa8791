"""Samples go through the network once, in batches; their maps go into an array or into the cache."""

from __future__ import annotations

import hashlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import Item, Source, name_some
from tensor_dropout.features.layers import join, outputs_at
from tensor_dropout.features.probe import Probe
from tensor_dropout.features.store import Store
from tensor_dropout.progress import Advance
from tensor_dropout.surgery.find_head import at_rest

READERS = min(8, os.cpu_count() or 1)


@dataclass
class Reader:
    """Runs batches through a network up to its layers.

    Attributes:
        network: in ``eval`` mode and on its device.
        probe: the layers.
        batch: how many samples at once.
        autocast: a type of numbers for the network, or None for its own.
        dtype: of the maps.
        where: the caller's name, for messages.
        seconds: what was spent waiting for samples, and in the network.
    """

    network: nn.Module
    probe: Probe
    batch: int
    autocast: torch.dtype | None
    dtype: np.dtype
    where: str
    seconds: dict[str, float] = field(default_factory=lambda: {"reading": 0.0, "network": 0.0, "cache": 0.0})

    @torch.inference_mode()
    def maps(self, samples: Sequence[Tensor], names: Sequence[str]) -> np.ndarray:
        """(len(samples), C, *space)."""
        start = time.perf_counter()
        like = next((p for p in self.network.parameters() if p.is_floating_point()), torch.zeros(()))
        x = torch.stack(list(samples)).to(like.device, like.dtype)
        with torch.autocast(like.device.type, self.autocast, enabled=self.autocast is not None):
            outputs = outputs_at(self.network, self.probe.places, x)
            maps = join([p.lay_out(each) for p, each in zip(self.probe.places, outputs, strict=True)], self.probe.pool)
        wide = torch.float64 if self.dtype == np.float64 else torch.float32
        array = maps.to("cpu", wide).contiguous().numpy()
        with np.errstate(over="ignore"):
            array = array.astype(self.dtype, copy=False)
        self._check(array, names)
        self.seconds["network"] += time.perf_counter() - start
        return array

    def _check(self, maps: np.ndarray, names: Sequence[str]) -> None:
        if maps.shape[1:] != self.probe.map_shape:
            raise TensorDropoutError(
                f"{self.where}: the network gave maps of shape {maps.shape[1:]} for {names[0]}, and "
                f"{self.probe.map_shape} on its first input"
            )
        good = np.isfinite(maps).reshape(len(maps), -1).all(1)
        if not good.all():
            wrong = [name for name, fine in zip(names, good, strict=True) if not fine]
            small = " or beyond the range of float16 (set dtype='float32')" if self.dtype == np.float16 else ""
            raise TensorDropoutError(f"{self.where}: the maps of {name_some(wrong)} are NaN or infinite{small}")


@contextmanager
def resting(network: nn.Module, device: Any, where: str) -> Iterator[None]:
    """``eval`` mode on a device inside; modes, buffers, random numbers and the device are put back."""
    here = {parameter.device for parameter in network.parameters()}
    moves = device is not None and here != {torch.device(device)}
    if moves and len(here) > 1:
        raise TensorDropoutError(f"{where}: the network is on {sorted(map(str, here))}; leave out device")
    with at_rest(network, list(here)):
        try:
            if moves:
                network.to(device)
            yield
        except (RuntimeError, AssertionError) as error:
            if moves and not isinstance(error, TensorDropoutError) and "CUDA" in str(error):
                words = str(error).splitlines()[0]
                raise TensorDropoutError(f"{where}: device={device!r} cannot be used here: {words}") from error
            raise
        finally:
            if moves:
                network.to(next(iter(here), "cpu"))


def first_sample(source: Source, where: str) -> Tensor:
    """The first sample that can be read.

    Raises:
        TensorDropoutError: if there is none.
    """
    for number in range(len(source)):
        item = source.read(number, None)
        if item.x is not None:
            return item.x
    raise unreadable(source, {n: source.read(n, None).problem for n in range(len(source))}, where)


def extract(reader: Reader, source: Source, advance: Advance) -> np.ndarray:
    """The maps of all samples, in memory."""
    maps = np.empty((len(source), *reader.probe.map_shape), reader.dtype)
    done = 0
    for batch in _batches(reader, source, None, advance):
        numbers = [number for number, _ in batch]
        maps[numbers] = reader.maps([_tensor(item) for _, item in batch], [source.name(n) for n in numbers])
        advance(len(batch))
        done += len(batch)
    assert done == len(source)
    return maps


def extract_into(store: Store, reader: Reader, source: Source, advance: Advance, limit: float) -> np.ndarray:
    """The maps of all samples from the cache, after those that it lacks were computed."""
    digests: list[str] = [""] * len(source)
    known = store.rows
    first = _batches(reader, source, known.__contains__, advance, digests)
    batch = next(first, None)
    if batch is not None:  # something is to be computed: this process is to be the writer
        with store.writing():
            while batch is not None:
                _compute(store, reader, source, batch)
                advance(len(batch))
                batch = next(first, None)
    start = time.perf_counter()
    maps = store.read(digests, limit)
    reader.seconds["cache"] += time.perf_counter() - start
    return maps


def _compute(store: Store, reader: Reader, source: Source, batch: list[tuple[int, Item]]) -> None:
    """Compute a batch, but for what another process has written in the meantime."""
    new = [(number, item) for number, item in batch if item.digest not in store.rows]
    if new:
        maps = reader.maps([_tensor(item) for _, item in new], [source.name(number) for number, _ in new])
        start = time.perf_counter()
        store.append([item.digest for _, item in new], maps)
        reader.seconds["cache"] += time.perf_counter() - start


def _tensor(item: Item) -> Tensor:
    assert item.x is not None
    return item.x


def _batches(
    reader: Reader,
    source: Source,
    is_known: Callable[[str], bool] | None,
    advance: Advance,
    digests: list[str] | None = None,
) -> Iterator[list[tuple[int, Item]]]:
    """Batches of samples that are to be computed, each content once; the rest is counted as done.

    After the first sample that cannot be read no batch is given any more, and all of them are named.
    """
    pending: list[tuple[int, Item]] = []
    seen: set[str] = set()
    problems: dict[int, str] = {}
    for number, item in _timed(reader, _read(source, is_known, reader.batch)):
        if digests is not None:
            digests[number] = item.digest
        if item.problem:
            problems[number] = item.problem
        elif item.x is None or (item.digest and item.digest in seen):
            advance(1)
        elif not problems:
            _check_shape(reader, source, number, pending, item)
            seen.update([item.digest] if item.digest else [])
            pending.append((number, item))
        if len(pending) == reader.batch and not problems:
            yield pending
            pending = []
    if problems:
        raise unreadable(source, problems, reader.where)
    if pending:
        yield pending


def _check_shape(reader: Reader, source: Source, number: int, pending: list[tuple[int, Item]], item: Item) -> None:
    expected = tuple(_tensor(pending[0][1]).shape) if pending else None
    found = tuple(_tensor(item).shape)
    if expected is not None and found != expected:
        raise TensorDropoutError(
            f"{reader.where}: the samples have several sizes: {source.name(number)} has {found}, others {expected}; "
            "bring them to one size (for volumes: size=(x, y, z))"
        )


def unreadable(source: Source, problems: dict[int, str], where: str) -> TensorDropoutError:
    """The error that names all of them, or the first few and how many there are."""
    named = [f"{source.name(number)} ({problem})" for number, problem in problems.items()]
    return TensorDropoutError(f"{where}: {len(problems)} of {len(source)} samples cannot be read: {name_some(named)}")


def _timed(reader: Reader, items: Iterator[tuple[int, Item]]) -> Iterator[tuple[int, Item]]:
    while True:
        start = time.perf_counter()
        item = next(items, None)
        reader.seconds["reading"] += time.perf_counter() - start
        if item is None:
            return
        yield item


def _read(source: Source, is_known: Callable[[str], bool] | None, batch: int) -> Iterator[tuple[int, Item]]:
    """All samples in their order; files are read ahead by threads, two batches at most."""
    if not source.in_threads:
        yield from ((number, source.read(number, is_known)) for number in range(len(source)))
        return
    waiting: deque[tuple[int, Future[Item]]] = deque()
    with ThreadPoolExecutor(READERS) as pool:
        try:
            for number in range(len(source)):
                waiting.append((number, pool.submit(source.read, number, is_known)))
                if len(waiting) > 2 * batch:
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
    content = hashlib.sha256(repr(network).encode())
    for name, tensor in network.state_dict().items():
        if isinstance(tensor, Tensor):
            content.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            content.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()
