"""Labels of a session as ``exchange`` writes them, and as actions of a file that it has read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
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
from tensor_dropout_lab.labelling.session import COMMAND, JOURNAL, MOST_POINTS, POINTS, Session
from tensor_dropout_lab.labelling.words import count_of

PIXELS = Convention("pixels")
SAME_PIXELS = 1e-3
"""Up to here a point of a file is the one that is known: formats round."""
COPY = "points.before.csv"


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
    return f"Wrote the labels of {count_of(len(labels.files), 'image')}: {path}"


def take_over(session: Session, path: Path, format: str | None, units: str) -> list[str]:
    """Make the labels of a file actions of the session; returns sentences about it.

    Only points that are open are taken over: the same command may be typed again after some were corrected. A point
    that the file lacks is absent, unless it is known here.

    Args:
        session: whose labels are changed.
        path: the file.
        format: a key of ``exchange.FORMATS``; None tells by the file.
        units: of a points.csv: "fractions", or "pixels" from the left and upper edge.

    Raises:
        TensorDropoutError: if it cannot be read, or does not belong to these pictures and points. Nothing is changed.
    """
    return add_labels(session, read_foreign(session.folder, path, format, units))


def read_foreign(folder: PictureFolder, path: Path, format: str | None, units: str) -> ExternalLabels:
    """The labels of a file that pictures of a folder have; see :func:`take_over`.

    Raises:
        TensorDropoutError: if it cannot be read, or does not belong to these pictures.
    """
    labels = read_labels(path, format)
    in_fractions = labels.convention == FRACTIONS
    if units == "pixels" and in_fractions:
        labels = replace(labels, convention=PIXELS)
    try:
        return match_labels(labels, folder.names, measure(folder))
    except TensorDropoutError as error:
        advice = "these look like pixels, and fractions of width and height are expected; "
        if in_fractions and advice in str(error):
            raise TensorDropoutError(f"{str(error).partition(advice)[0]}{advice}add --units pixels") from error
        raise


def add_labels(session: Session, labels: ExternalLabels) -> list[str]:
    """Make labels of pictures of the folder actions of the session; returns sentences about it.

    Raises:
        TensorDropoutError: if they do not belong to its points. Nothing is changed.
    """
    names = list(labels.names)
    known = session.labels.names
    if known and not labels.named and len(names) == len(known):
        names = known
    if names[: len(known)] != known:
        raise TensorDropoutError(
            f"{labels.source} names the points {', '.join(names[:5])}, and the project {', '.join(known[:5])}; rename "
            "them in one of the two, or choose another --out"
        )
    session.rename(COMMAND, names)
    stay = count_other_places(session, labels)
    actions = list(_list_actions(session, labels))
    for start in range(0, len(actions), MOST_POINTS):
        session.act(COMMAND, actions[start : start + MOST_POINTS])
    count = len({action["image"] for action in actions})
    was, stays = ("was", "stays") if stay == 1 else ("were", "stay")
    elsewhere = f"{count_of(stay, 'point')} {was} placed elsewhere in the project before, and {stays} there"
    notes = [elsewhere] if stay else []
    return [*labels.notes, *notes, f"Took over the labels of {count_of(count, 'image')} from {labels.source}"]


def count_other_places(session: Session, labels: ExternalLabels) -> int:
    """How many points are elsewhere in the session, or are said not to be visible there."""
    places = session.labels.positions(labels.files)[:, : len(labels.names)]  # (n, P, 2)
    numbers = {name: number for number, name in enumerate(session.folder.names)}
    sizes = measure(session.folder)[[numbers[file] for file in labels.files]]
    apart = (np.abs(places - labels.points) * sizes[:, None] > SAME_PIXELS).any(axis=2)
    hidden = session.labels.absent(labels.files)[:, : len(labels.names)]
    return int((apart | (labels.there & hidden)).sum())


def measure(folder: PictureFolder) -> np.ndarray:
    """(n, 2): width and height of all pictures; 0 for those that cannot be read."""
    return np.array([(picture.width, picture.height) for picture in folder.pictures], dtype=np.float64)


def _list_actions(session: Session, labels: ExternalLabels) -> Iterator[dict[str, Any]]:
    """What is to be done so that the session has these labels."""
    numbers = {name: number for number, name in enumerate(session.folder.names)}
    count = len(labels.names)
    placed = ~np.isnan(session.labels.positions(labels.files)[:, :count, 0])  # (n, P)
    is_open = ~placed & ~session.labels.absent(labels.files)[:, :count]
    new, hidden = labels.there & is_open, labels.absent & is_open
    for row, file in enumerate(labels.files):
        if new[row].any():
            points = [
                {"point": int(point), "x": float(x), "y": float(y), "by": "hand"}
                for point, (x, y) in zip(np.flatnonzero(new[row]), labels.points[row, new[row]], strict=True)
            ]
            yield {"image": numbers[file], "kind": "place", "points": points}
        if hidden[row].any():
            yield {"image": numbers[file], "kind": "absent", "points": np.flatnonzero(hidden[row]).tolist()}


def read_lone_table(out: Path, folder: PictureFolder) -> ExternalLabels | None:
    """The labels of a table without a journal, as in a clone of a repository that keeps the table alone; None without.

    A copy is kept: the table is written anew from the journal.

    Raises:
        TensorDropoutError: if it is not understood. Nothing is changed.
    """
    path = out / POINTS
    if (out / JOURNAL).exists() or not path.exists() or _is_empty(path):
        return None
    try:
        labels = match_labels(read_labels(path, "csv"), folder.names, measure(folder))
    except TensorDropoutError as error:
        raise TensorDropoutError(
            f"{error} (there is no {JOURNAL} beside it; move {POINTS} away to start anew)"
        ) from error
    shutil.copy2(path, out / COPY)
    return replace(labels, notes=(*labels.notes, f"{path} had no {JOURNAL} beside it; a copy is {out / COPY}"))


def _is_empty(path: Path) -> bool:
    """Whether a table has a header, and nothing below."""
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    return not lines or (len(lines) == 1 and lines[0].split(b",")[0] == b"file")
