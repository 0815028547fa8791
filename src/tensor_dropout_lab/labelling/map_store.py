"""The maps of all images as the learner needs them, in half precision: pooled ones, and reduced ones for crops."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.statistics import floored
from tensor_dropout_lab.labelling.refinement import principal_axes, read_crops

GRID = 8
"""The first stage sees maps averaged to at most this grid."""
CHANNELS = (48, 32)
"""How many principal channels of the coarse and of the fine maps are kept for crops."""
SEEN = 32
"""Images that decide scales and principal channels."""
POSITIONS = 50_000
"""How many positions of their maps are looked at."""


def pooled_grid(space: tuple[int, ...]) -> tuple[int, ...]:
    """The grid of the first stage.

    Example:
        >>> pooled_grid((14, 14)), pooled_grid((7, 7)), pooled_grid((16, 24))
        ((7, 7), (7, 7), (8, 8))
    """
    return tuple(math.ceil(size / math.ceil(size / GRID)) for size in space)


class _Level:
    """Maps of one layer, standardized and reduced to principal channels, in float16.

    Args:
        n: how many images there are.
        channels: how many to keep at most.
        seed: of what is random.
    """

    def __init__(self, n: int, channels: int, seed: int) -> None:
        self.n, self.channels, self.seed = n, channels, seed
        self.maps: Tensor | None = None
        self._center, self._basis = torch.empty(0), torch.empty(0)

    def learn(self, maps: Tensor) -> None:
        """Scales and axes, from (m, C, H, W)."""
        flat = maps.float().movedim(1, -1).flatten(0, -2)
        flat = flat[:: max(1, len(flat) // POSITIONS)]
        self._center = flat.mean(0)
        std = floored(flat.std(0))
        scaled = (flat - self._center) / std
        rank = min(self.channels, scaled.shape[1])
        axes = torch.eye(rank) if rank == scaled.shape[1] else principal_axes(scaled, rank, self.seed)
        self._basis = axes / std[:, None]
        self.maps = torch.zeros(self.n, *maps.shape[2:], rank, dtype=torch.float16)  # a cell's numbers side by side

    def put(self, rows: Tensor, maps: Tensor) -> None:
        """Keep maps of these images."""
        assert self.maps is not None
        flat = maps.float().flatten(2) - self._center[:, None]
        self.maps[rows] = (self._basis.mT @ flat).mT.reshape(len(maps), *maps.shape[2:], -1).half()


class MapStore:
    """Maps of images, as they come.

    Args:
        n: how many images there are.
        seed: of what is random.
    """

    def __init__(self, n: int, seed: int = 0) -> None:
        self.n, self.known = n, np.zeros(n, dtype=bool)
        self.first: Tensor | None = None
        """(n, C, *pooled grid), float16: what the first stage sees."""
        self.levels: list[_Level] = []
        self._seed, self._waiting, self._shapes = seed, list[tuple[Tensor, list[Tensor]]](), list[tuple[int, ...]]()

    @property
    def rows(self) -> np.ndarray:
        """The images that have maps."""
        return np.flatnonzero(self.known)

    def add(self, rows: np.ndarray, maps: np.ndarray, fine: np.ndarray | None) -> None:
        """See :meth:`tensor_dropout_lab.labelling.learner.Learner.set_maps`."""
        parts = [torch.as_tensor(np.asarray(part)) for part in (maps, fine) if part is not None]
        shapes = [tuple(part.shape[1:]) for part in parts]
        if any(part.ndim != 4 or len(part) != len(rows) for part in parts) or (self._shapes and shapes != self._shapes):
            raise TensorDropoutError(
                f"set_maps: maps of {len(rows)} images are ({len(rows)}, channels, height, width), of one shape, "
                f"got {[tuple(part.shape) for part in parts]}" + (f" after {self._shapes}" if self._shapes else "")
            )
        if not len(rows):
            return
        if self.first is None:
            self._shapes = shapes
            self.first = torch.zeros(self.n, shapes[0][0], *pooled_grid(shapes[0][1:]), dtype=torch.float16)
            self.levels = [_Level(self.n, most, self._seed) for most, _ in zip(CHANNELS, shapes, strict=False)]
        numbers = torch.from_numpy(rows)
        self.first[numbers] = F.adaptive_avg_pool2d(parts[0].float(), (self.first.shape[2], self.first.shape[3])).half()
        self.known[rows] = True
        self._waiting.append((numbers, parts))
        if self.levels[0].maps is not None or sum(len(numbers) for numbers, _ in self._waiting) >= SEEN:
            self.settle()

    def settle(self) -> None:
        """Reduce what has come; the first ones decide how."""
        if not self._waiting:
            return
        for number, level in enumerate(self.levels):
            if level.maps is None:
                level.learn(torch.cat([parts[number] for _, parts in self._waiting]))
            for rows, parts in self._waiting:
                level.put(rows, parts[number])
        self._waiting = []

    def read(self, rows: np.ndarray, points: Tensor) -> Tensor:
        """Crops of all levels around points (m, P, 2) of these images: (m, P, D), float32."""
        numbers = torch.from_numpy(rows)
        found = []
        for level in self.levels:
            assert level.maps is not None
            found.append(read_crops(level.maps, numbers, points))
        return torch.cat(found, dim=-1)

    def take(self, rows: np.ndarray) -> Tensor:
        """What the first stage sees of these images, float32."""
        assert self.first is not None
        return self.first[torch.from_numpy(rows)].float()
