"""Labels of a session as ``exchange`` writes them, and as actions of a file that it has read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.exchange import (
    FRACTIONS,
    Convention,
    ExternalLabels,
    match_labels,
    read_labels,
    write_labels,
)
from tensor_dropout_lab.labelling.folder import PictureFolder
from tensor_dropout_lab.labelling.session import COMMAND, Session

PIXELS = Convention("pixels")


def collect_labels(session: Session) -> ExternalLabels:
    """All labels of the pictures in the folder.

    Raises:
        TensorDropoutError: if there are none.
    """
    with session.lock:
        there = set(session.labels.images())
        pictures = [picture for picture in session.folder.pictures if picture.name in there]
        if not pictures:
            raise TensorDropoutError("there are no labels yet; place a point first")
        files = [picture.name for picture in pictures]
        groups = [picture.group for picture in pictures]
        return ExternalLabels(
            names=tuple(session.labels.names),
            files=tuple(files),
            points=session.labels.positions(files),
            absent=session.labels.absent(files),
            sizes=np.array([(picture.width, picture.height) for picture in pictures], dtype=np.float64),
            groups=None if None in groups else tuple(map(str, groups)),
        )


def write_out(session: Session, path: Path, format: str | None) -> str:
    """Write all labels to a file; returns a sentence about it."""
    labels = collect_labels(session)
    write_labels(path, labels, format)
    return f"Wrote the labels of {len(labels.files)} images: {path}"


def take_over(session: Session, path: Path, format: str | None, units: str) -> list[str]:
    """Make the labels of a file actions of the session; returns sentences about it.

    Args:
        session: whose labels are changed.
        path: the file.
        format: a key of ``exchange.FORMATS``; None tells by the file.
        units: of a points.csv: "fractions", or "pixels" from the left and upper edge.

    Raises:
        TensorDropoutError: if it cannot be read, or does not belong to these pictures and points. Nothing is changed.
    """
    folder = session.folder
    labels = read_labels(path, format)
    if units == "pixels" and labels.convention == FRACTIONS:
        labels = replace(labels, convention=PIXELS)
    labels = match_labels(labels, folder.names, measure(folder))
    names = list(labels.names)
    known = session.labels.names
    if known and not labels.named and len(names) == len(known):
        names = known
    if names[: len(known)] != known:
        raise TensorDropoutError(
            f"{path} names the points {', '.join(names[:5])}, and the project {', '.join(known[:5])}; rename them in "
            "one of the two, or choose another --out"
        )
    session.rename(COMMAND, names)
    numbers = {name: number for number, name in enumerate(folder.names)}
    actions = []
    for row, file in enumerate(labels.files):
        actions += _as_actions(numbers[file], labels.points[row], labels.absent[row])
    for start in range(0, len(actions), 1000):
        session.act(COMMAND, actions[start : start + 1000])
    return [*labels.notes, f"Took over the labels of {len(labels.files)} images from {path}"]


def measure(folder: PictureFolder) -> np.ndarray:
    """(n, 2): width and height of all pictures; 0 for those that cannot be read."""
    return np.array([(picture.width, picture.height) for picture in folder.pictures], dtype=np.float64)


def _as_actions(number: int, points: np.ndarray, absent: np.ndarray) -> list[dict[str, Any]]:
    placed = [
        {"point": point, "x": float(x), "y": float(y), "by": "hand"}
        for point, (x, y) in enumerate(points)
        if not np.isnan((x, y)).any()
    ]
    hidden = [int(point) for point in np.flatnonzero(absent)]
    actions = [{"image": number, "kind": "place", "points": placed}] if placed else []
    return actions + ([{"image": number, "kind": "absent", "points": hidden}] if hidden else [])
