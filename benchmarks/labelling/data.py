"""The images: their maps, points and groups; which are for development, and which for the record."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

SETS = ("wings", "retina", "faces")
SIMULATED = "simulated"
SIDES = {"wings": 160, "retina": 160, "faces": 128, SIMULATED: 160}
"""Of the original pictures, in pixels."""
TOLERANCES = {"wings": 0.01, "retina": 0.02, "faces": 0.03, SIMULATED: 0.02}
"""As shares of the side."""
KEPT_OUT = {"wings": 331 / 1131, "retina": 203 / 603, "faces": 0.25}
"""The share of the groups that development saw, and the record does not."""
SEED = 777
COARSE, FINE = "block10.npy", "block2.npy"


@dataclass(frozen=True)
class Images:
    """Some images of a set.

    Attributes:
        coarse: (n, 112, 14, 14), float16.
        fine: (n, 24, 56, 56), float16.
        truth: (n, P, 2), fractions.
        groups: (n,), persons or eyes.
        rows: (n,), their numbers in the set.
    """

    coarse: np.ndarray
    fine: np.ndarray
    truth: np.ndarray
    groups: np.ndarray
    rows: np.ndarray

    def take(self, rows: np.ndarray) -> Images:
        """Those with these numbers."""
        return Images(*(part[rows] for part in (self.coarse, self.fine, self.truth, self.groups, self.rows)))


@cache
def split_set(features: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows for development, and rows of the record: other groups."""
    groups = np.load(features / name / "groups.npy")
    order = np.random.default_rng(SEED).permutation(np.unique(groups))
    seen = np.isin(groups, order[: round(KEPT_OUT[name] * len(order))])
    return np.flatnonzero(seen), np.flatnonzero(~seen)


def load(features: Path, name: str, rows: np.ndarray) -> Images:
    """Images of a set by their numbers."""
    folder = features / name
    coarse, fine = (np.load(folder / file, mmap_mode="r")[rows] for file in (COARSE, FINE))
    targets, groups = (np.load(folder / f"{file}.npy")[rows] for file in ("targets", "groups"))
    return Images(coarse, fine, targets.reshape(len(rows), -1, 2).astype(float), groups, rows)


def draw_images(features: Path, name: str, n: int, seed: int, *, develop: bool = False) -> Images:
    """n images at random, in random order; of the simulated set too."""
    if name == SIMULATED:
        return simulate(n, seed)
    rows = split_set(features, name)[0 if develop else 1]
    return load(features, name, np.random.default_rng([seed, 27]).permutation(rows)[:n])


def simulate(n: int, seed: int, n_points: int = 4) -> Images:
    """Maps with a bump of its own channel at each point; the points move together and apart."""
    rng = np.random.default_rng([seed, 28])
    base = np.array([[0.3, 0.3], [0.7, 0.3], [0.3, 0.7], [0.7, 0.7]])[:n_points]
    truth = base + rng.normal(0, 0.05, (n, 1, 2)) + rng.normal(0, 0.03, (n, n_points, 2))
    fine = 0.1 * rng.normal(size=(n, n_points + 2, 28, 28))
    cells = (np.arange(28) + 0.5) / 28
    for point in range(n_points):
        x, y = (np.exp(-(((cells - truth[:, point, axis, None]) / 0.05) ** 2)) for axis in (0, 1))
        fine[:, point] += y[:, :, None] * x[:, None, :]
    coarse = F.avg_pool2d(torch.from_numpy(fine), 2).numpy()
    numbers = np.arange(n)
    return Images(coarse.astype(np.float16), fine.astype(np.float16), truth, numbers.astype(str), numbers)


def make_fine_maps(data: Path, features: Path, sets: tuple[str, ...] = SETS) -> None:
    """The map of stride 4 of every image, beside those that features.py has made."""
    from features import MEAN, STD, load_backbone, read_images, read_table

    from tensor_dropout.sklearn import FeatureMaps

    maps = FeatureMaps(load_backbone(), "_blocks.2", dtype="float16", verbose=False)
    for name in sets:
        if (features / name / FINE).exists():
            continue
        names, _, _ = read_table(data / name / "points.csv")
        images = read_images(data / name / "images.tar", names)
        parts = [
            maps.transform((images[k : k + 256].astype(np.float32) - MEAN) / STD) for k in range(0, len(names), 256)
        ]
        np.save(features / name / FINE, np.concatenate(parts))
        print(name, "done", file=sys.stderr)
