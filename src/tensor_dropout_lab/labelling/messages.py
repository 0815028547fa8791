"""What the loop and the worker say to each other over their pipe; None ends the worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Task:
    """What a worker works on.

    Attributes:
        folder: of the pictures, without links.
        names: of all pictures.
        sizes: (n, 2) width and height; 0 for those that cannot be read.
        groups: of all pictures, or None.
        settings: of the project: backbone, weights, arguments, layer, size.
        cache: where features are kept.
        seed: of folds and starts.
        modules: imported first.
    """

    folder: Path
    names: Sequence[str]
    sizes: np.ndarray
    groups: Sequence[str] | None
    settings: dict[str, Any]
    cache: Path
    seed: int = 0
    modules: Sequence[str] = ()


# What it is asked.


@dataclass(frozen=True)
class FitRequest:
    """Fit these labels.

    Attributes:
        seq: the last action in them.
        targets: (n, P, 2) fractions, NaN where open or absent.
    """

    seq: int
    targets: np.ndarray


@dataclass(frozen=True)
class HeadRequest:
    """Write the head of the last fit to a folder; ``names`` are those of the points."""

    folder: Path
    names: Sequence[str]


# What it answers.


@dataclass(frozen=True)
class FeaturesDone:
    """So many pictures have features, or cannot have any."""

    count: int


@dataclass(frozen=True)
class BadPicture:
    """A picture that cannot be read."""

    number: int
    problem: str


@dataclass(frozen=True)
class Fitted:
    """What a fit found: the numbers of a ``Round``, without its estimator.

    Attributes:
        seq: of its request.
        arrays: points, ellipses, std, gain, doubtful, far.
        record: one line for the statistics, as JSON types.
    """

    seq: int
    arrays: dict[str, np.ndarray]
    record: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """A fit was not possible; or nothing is, if ``for_good``."""

    message: str
    for_good: bool = False


@dataclass(frozen=True)
class HeadWritten:
    """Where the head is, or why it is not."""

    folder: Path
    problem: str | None = None


# What the loop makes of it, for the session.


@dataclass(frozen=True)
class Suggestions:
    """What a fit says of all pictures, without its estimator; see ``learner.Round``.

    Attributes:
        number: counts the fits of a session from 1.
        seq: the last action that the fit knew.
    """

    number: int
    seq: int
    points: np.ndarray
    ellipses: np.ndarray
    std: np.ndarray
    gain: np.ndarray
    doubtful: np.ndarray
    far: np.ndarray
