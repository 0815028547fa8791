"""Results on disk that survive a kill and can be read while they are written.

A folder holds three files. ``rows.bin`` has the results, one row of fixed size after another. ``index.txt`` has one
line for each row: the hash of the content that it was computed from. ``about.json`` says what the rows are. A line is
written only after its row is on disk, so what both files have is whole; a torn end of either is cut off by the next
writer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError

LINE = 65
"""A hash of 64 digits and the end of the line."""
COMMIT_EVERY = 2.0
"""Seconds after which rows are forced to the disk and their lines follow: what a killed process may lose."""
BLOCK = 2**26
"""How many bytes are copied at once."""
MAPPED_FROM = 2**28
"""From how many bytes on rows that lie one after another are memory-mapped, not loaded."""


class Store:
    """Rows of one shape by the hash of their content.

    Args:
        folder: where the files are.
        shape: of a row.
        dtype: of a row.
        about: what the rows are, as JSON types.
    """

    def __init__(self, folder: Path, shape: Sequence[int], dtype: Any, about: dict[str, Any]) -> None:
        self.folder, self.shape, self.dtype = folder, tuple(shape), np.dtype(dtype)
        self.about = {**about, "shape": list(self.shape), "dtype": self.dtype.str}
        self.row_bytes = int(np.prod(self.shape)) * self.dtype.itemsize
        self.rows: dict[str, int] = {}
        """The row of each content."""
        self._n = 0
        self._waiting: list[str] = []
        self._files: tuple[BinaryIO, BinaryIO] | None = None
        self._committed = 0.0
        self.refresh()

    @property
    def rows_path(self) -> Path:
        """The file of the rows."""
        return self.folder / "rows.bin"

    @property
    def index_path(self) -> Path:
        """The file of the hashes."""
        return self.folder / "index.txt"

    def refresh(self) -> None:
        """Take note of what other processes have written."""
        lines = self._whole_lines()
        if len(lines) < self._n:  # somebody has damaged or removed them
            self.rows.clear()
            self._n = 0
        for number in range(self._n, len(lines)):
            self.rows.setdefault(lines[number], number)
        self._n = len(lines)

    def _whole_lines(self) -> list[str]:
        """The hashes whose rows are there, up to the first damage."""
        if not os.path.exists(self.index_path) or not os.path.exists(self.rows_path):
            return []  # also where the folder cannot be looked into: `writing` says so
        index = self.index_path.read_bytes()
        n = min(len(index) // LINE, self.rows_path.stat().st_size // self.row_bytes)
        lines = []
        for start in range(0, n * LINE, LINE):
            if re.fullmatch(rb"[0-9a-f]{64}\n", index[start : start + LINE]) is None:
                break
            lines.append(index[start : start + LINE - 1].decode())
        return lines

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Inside, this process is the one that may append; what it appended is whole, however the block ends.

        Raises:
            TensorDropoutError: if the folder cannot be written to.
        """
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / "lock")
        with self._refusing():
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=0)
            except Timeout:
                warnings.warn(f"waiting for another process that writes to the cache {self.folder}", stacklevel=3)
                lock.acquire()
        try:
            with self._refusing():
                self._open()
            try:
                yield
            finally:
                self._close()
        finally:
            lock.release()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """A full disk, or a folder that may not be written to, as our error."""
        try:
            yield
        except OSError as error:
            raise TensorDropoutError(f"the cache {self.folder} cannot be written to: {error}") from error

    def _open(self) -> None:
        self.refresh()
        if not (self.folder / "about.json").exists():
            with replacing(self.folder / "about.json") as temporary:
                temporary.write_text(json.dumps(self.about, indent=1), encoding="utf-8")
        rows, index = open(self.rows_path, "ab"), open(self.index_path, "ab")  # noqa: SIM115 - closed in _close
        rows.truncate(self._n * self.row_bytes)
        index.truncate(self._n * LINE)
        self._files, self._committed = (rows, index), time.monotonic()

    def _close(self) -> None:
        assert self._files is not None
        try:
            self._commit()
        finally:
            for file in self._files:
                with suppress(OSError):  # of a full disk: what is not in the index does not count
                    file.close()
            self._files = None

    def append(self, digests: Sequence[str], rows: np.ndarray) -> None:
        """Add rows (len(digests), *shape); only inside :meth:`writing`."""
        assert self._files is not None
        assert rows.shape == (len(digests), *self.shape)
        with self._refusing():
            self._files[0].write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        self._waiting.extend(digests)
        if time.monotonic() - self._committed > COMMIT_EVERY:
            self._commit()

    def _commit(self) -> None:
        """Rows first, then their lines."""
        assert self._files is not None
        rows, index = self._files
        with self._refusing():
            rows.flush()
            os.fsync(rows.fileno())
            index.write("".join(f"{digest}\n" for digest in self._waiting).encode())
            index.flush()
        for digest in self._waiting:
            self.rows.setdefault(digest, self._n)
            self._n += 1
        self._waiting, self._committed = [], time.monotonic()

    def read(self, digests: Sequence[str], limit: float) -> np.ndarray:
        """The rows of these contents, in this order.

        A memory map where they lie one after another and are not few, and where they are more than ``limit`` bytes;
        else an array.
        """
        numbers = np.array([self.rows[digest] for digest in digests])
        n, first = len(numbers), int(numbers[0])
        stored = self._map(self.rows_path, 0, self._n)
        size = n * self.row_bytes
        if size > min(MAPPED_FROM, limit) and np.array_equal(numbers, np.arange(first, first + n)):
            return self._map(self.rows_path, first, n)
        if size <= limit:
            return np.asarray(stored)[numbers]
        return self._map(self._ordered(stored, numbers, digests), 0, n)

    def _map(self, path: Path, first: int, n: int) -> np.memmap:
        return np.memmap(path, dtype=self.dtype, mode="r", offset=first * self.row_bytes, shape=(n, *self.shape))

    def _ordered(self, stored: np.ndarray, numbers: np.ndarray, digests: Sequence[str]) -> Path:
        """A file with the rows in another order: what a memory map needs. Its name says the contents, not the rows."""
        name = hashlib.sha256("".join(digests).encode()).hexdigest()[:32]
        path = self.folder / f"order-{name}.bin"
        if path.exists() and path.stat().st_size == len(numbers) * self.row_bytes:
            return path
        step = max(1, BLOCK // self.row_bytes)
        with replacing(path) as temporary, open(temporary, "wb") as file:
            for start in range(0, len(numbers), step):
                file.write(np.asarray(stored)[numbers[start : start + step]].data)
        return path
