"""The images of a group, its folds, and the errors that are measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import position
from position import load_map, mean_distance, split_images
from sklearn.model_selection import GroupKFold

SETS = ("wings", "retina", "faces")
MAPS = {"efficientnet": "block10-7", "resnet": "resnet-8"}
"""Of each backbone: a name of ``MAPS`` in benchmarks/estimators/position.py."""
SIZES = (50, 100, 200, 400, 800)
FINALIST_SIZES = (25, 10**6)
"""The second is all images that are not tested."""
FOLDS = 10
SEED = 2611


@dataclass(frozen=True, order=True)
class Group:
    """A set, a backbone and a number of training images; ten folds."""

    set: str
    backbone: str
    n: int

    def __str__(self) -> str:
        return f"{self.set}, {self.backbone}, n = {'all' if self.n == FINALIST_SIZES[1] else self.n}"


@dataclass(frozen=True)
class Fold:
    """Rows of the images: to train on, the part of these that settings are chosen on, and to test on.

    Attributes:
        train: all training images.
        inner: those that heads are fitted on while settings are chosen.
        held: the others of ``train``, of other groups.
        test: images of groups that ``train`` does not have.
    """

    train: np.ndarray
    inner: np.ndarray
    held: np.ndarray
    test: np.ndarray


@dataclass(frozen=True)
class Images:
    """The maps (N, C, H, W) and targets (N, 2 · points) of a set, and the folds of a group."""

    x: np.ndarray
    y: np.ndarray
    folds: list[Fold]


def make_folds(groups: np.ndarray, n: int) -> list[Fold]:
    """Ten folds, in which every image is tested once; the training images of a smaller n are among those of a larger.

    Training and inner parts of all folds are cut to one size, so that heads of all folds can be trained side by side.

    Raises:
        ValueError: if there are fewer than n images to train on.
    """
    split = list(GroupKFold(FOLDS, shuffle=True, random_state=SEED).split(groups, groups=groups))
    most = min(len(rest) for rest, _ in split)
    if n > most and n != FINALIST_SIZES[1]:
        raise ValueError(f"a fold has {most} images to train on, {n} were asked for")
    trains = [np.random.default_rng([SEED, k]).permutation(rest)[: min(n, most)] for k, (rest, _) in enumerate(split)]
    inners = [split_images(groups[train], k) for k, train in enumerate(trains)]
    size = min(len(inner) for inner, _ in inners)
    return [
        Fold(train, train[inner[:size]], train[held], test)
        for train, (inner, held), (_, test) in zip(trains, inners, split, strict=True)
    ]


def map_file(features: Path, group: Group) -> Path:
    """Where the maps of all images are."""
    return features / group.set / f"{position.MAPS[MAPS[group.backbone]][0]}.npy"


def load_images(features: Path, group: Group) -> Images | None:
    """The images of a group; None where a fold has fewer than n."""
    groups, y = (np.load(features / group.set / f"{file}.npy") for file in ("groups", "targets"))
    try:
        folds = make_folds(groups, group.n)
    except ValueError:
        return None
    used = np.unique(np.concatenate([np.concatenate([fold.train, fold.test]) for fold in folds]))
    place = np.full(len(y), -1)
    place[used] = np.arange(len(used))
    moved = [Fold(*(place[rows] for rows in (f.train, f.inner, f.held, f.test))) for f in folds]
    return Images(load_map(features, group.set, MAPS[group.backbone], used), y[used], moved)


def held_out_error(predicted: np.ndarray, y: np.ndarray, fold: Fold) -> float:
    """What settings are chosen by: the root of the mean squared error over the std, averaged over held-out images.

    It is the criterion of ``TensorRegressorCV``; infinite where a prediction is not finite.
    """
    std = y[fold.inner].std(0, dtype=np.float64)
    errors = (np.asarray(predicted, dtype=np.float64) - y[fold.held]) / np.where(std > 0, std, 1)
    error = float(np.sqrt(np.square(errors).mean(1)).mean())
    return error if np.isfinite(error) else float("inf")


def test_error(predicted: np.ndarray, true: np.ndarray) -> float:
    """Mean distance between predicted and true points in % of the image side."""
    return mean_distance(predicted, true)
