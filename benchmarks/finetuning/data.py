"""The images, points and splits of a cell; images are decoded once, for all processes."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from features import MEAN, STD, read_images, read_table
from position import split_images
from torch import Tensor

SETS = ("wings", "faces")
CHUNK = 128


@dataclass(frozen=True, order=True)
class Group:
    """A set, a number of training images and a split: all methods of a group share their images."""

    set: str
    n: int
    split: int

    def __str__(self) -> str:
        return f"{self.set} n = {self.n} split {self.split}"


@dataclass(frozen=True)
class Part:
    """Images (n, 3, side, side) uint8, targets (n, 2 · points) in fractions of the side, and groups."""

    images: Tensor
    y: Tensor
    groups: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def take(self, rows: np.ndarray) -> Part:
        """Some of them."""
        index = torch.from_numpy(rows).to(self.y.device)
        return Part(self.images[index], self.y[index], self.groups[rows])


def find_rows(groups: np.ndarray, n: int, split: int, n_test: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The rows to train on and those to test on, as benchmarks/estimators/position.py has them."""
    train, test = split_images(groups, split)
    return train[:n], test[:n_test]


def decode(data: Path, folder: Path, groups: Sequence[Group], side: int, n_test: int | None, jobs: int) -> None:
    """Decode what the groups need into ``folder``: a file for each set, whose other rows stay empty."""
    folder.mkdir(parents=True, exist_ok=True)
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        for name in sorted({group.set for group in groups}):
            names, owners, _ = read_table(data / name / "points.csv")
            wanted = [find_rows(owners, group.n, group.split, n_test) for group in groups if group.set == name]
            rows = np.unique(np.concatenate([row for pair in wanted for row in pair]))
            shape = (len(names), 3, side, side)
            store = np.lib.format.open_memmap(folder / f"{name}.npy", mode="w+", dtype=np.uint8, shape=shape)
            chunks = [rows[start : start + CHUNK] for start in range(0, len(rows), CHUNK)]
            tasks = [
                pool.submit(read_images, data / name / "images.tar", [names[row] for row in chunk], side)
                for chunk in chunks
            ]
            for chunk, task in zip(chunks, tasks, strict=True):
                store[chunk] = task.result()
            store.flush()


def load_group(data: Path, folder: Path, group: Group, n_test: int | None, device: torch.device) -> tuple[Part, Part]:
    """The training and the test part, on the device."""
    _, owners, targets = read_table(data / group.set / "points.csv")
    store = np.load(folder / f"{group.set}.npy", mmap_mode="r")
    return tuple(
        Part(torch.from_numpy(store[rows]).to(device), torch.from_numpy(targets[rows]).to(device), owners[rows])
        for rows in find_rows(owners, group.n, group.split, n_test)
    )  # type: ignore[return-value]


def prepare(images: Tensor) -> Tensor:
    """Bytes as EfficientNet-Lite takes them."""
    return (images.float() - MEAN) / STD


def points_of(y: Tensor) -> list[tuple[int, int]]:
    """The columns of every point."""
    return [(k, k + 1) for k in range(0, y.shape[1], 2)]
