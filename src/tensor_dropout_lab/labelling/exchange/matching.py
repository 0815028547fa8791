"""Which image of a folder a file of labels means, and its points in fractions."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.labelling.exchange.external_labels import FRACTIONS, ExternalLabels
from tensor_dropout_lab.labelling.words import count_of

_MARGIN = 0.25
"""How far outside of its image a point may lie, in widths and heights."""


def match_labels(labels: ExternalLabels, images: Sequence[str], sizes: np.ndarray) -> ExternalLabels:
    """The labels of the images of a folder, as fractions.

    An image is found by its path; else by as much of the end of its path as only one image has, be it only the name of
    the file; else by the same without regard to capitals.

    Args:
        labels: of :func:`read_labels`.
        images: the paths of the images in the folder.
        sizes: (len(images), 2) their width and height, upright; 0 or NaN for those that cannot be read.

    Returns:
        Labels of the images that are in both, named as the folder names them; the notes say what was left out.

    Raises:
        TensorDropoutError: if a file means several images, or several mean one; if none is found; if the file has
            another size for an image; if a point lies far outside.
    """
    rows, notes = _find_images(labels, images)
    sizes = np.nan_to_num(np.asarray(sizes, dtype=np.float64).reshape(-1, 2))
    unread = [images[image] for image in rows.values() if not (sizes[image] > 0).all()]
    if unread:
        notes.append(
            f"{count_of(len(unread), 'image')} cannot be read, and their labels were left out: {name_some(unread)}"
        )
        rows = {row: image for row, image in rows.items() if (sizes[image] > 0).all()}
    if not rows:
        raise TensorDropoutError(
            f"{labels.source}: none of its {count_of(len(labels.files), 'image')} is in the folder: it has "
            f"{name_some(labels.files)}, the "
            f"folder has {name_some(list(images))}; choose the folder that these labels belong to"
        )
    chosen = labels.take(sorted(rows))
    places = [rows[row] for row in sorted(rows)]
    _compare_sizes(chosen, sizes[places])
    points = labels.convention.to_fractions(chosen.points, sizes[places])
    _check_points(chosen, points)
    return replace(
        chosen,
        files=tuple(images[image] for image in places),
        points=points,
        sizes=sizes[places].astype(np.int64),
        convention=FRACTIONS,
        notes=(*labels.notes, *notes),
    )


# Which image is meant.


class _Match(NamedTuple):
    """How well a path fits an image, the best first to be compared, and the image."""

    same_capitals: bool
    contained: bool
    """Whether one of the two paths is the end of the other: no folder differs."""
    parts: int
    image: int


def _find_images(labels: ExternalLabels, images: Sequence[str]) -> tuple[dict[int, int], list[str]]:
    """The image of every row that has one, and notes."""
    indices = [_index_endings(images, fold) for fold in (False, True)]
    matches = {}
    for row, file in enumerate(labels.files):
        match = _find_one(labels, file, images, indices)
        if match is not None:
            matches[row] = match
    matches = _settle(labels, images, matches)
    notes = []
    missing = [file for row, file in enumerate(labels.files) if row not in matches]
    if missing and matches:
        notes.append(
            f"{count_of(len(missing), 'image')} {'is' if len(missing) == 1 else 'are'} not in the folder, and their "
            f"labels were left out: {name_some(missing)}"
        )
    moved = [row for row, match in matches.items() if not match.contained]
    if moved:
        first = moved[0]
        notes.append(
            f"{count_of(len(moved), 'image')} {'was' if len(moved) == 1 else 'were'} found by their names, in other "
            f"folders, such as {labels.files[first]} as "
            f"{images[matches[first].image]}"
        )
    return {row: match.image for row, match in matches.items()}, notes


def _index_endings(images: Sequence[str], fold: bool) -> dict[str, list[int]]:
    """The images of every end of a path: a/b/c.png has a/b/c.png, b/c.png and c.png."""
    index: dict[str, list[int]] = defaultdict(list)
    for number, image in enumerate(images):
        for ending in _list_endings(_normalize(image, fold)):
            index[ending].append(number)
    return index


def _list_endings(path: str) -> Iterator[str]:
    """The ends of a path, the longest first."""
    while path:
        yield path
        path = path.partition("/")[2]


def _normalize(name: str, fold: bool) -> str:
    """One spelling of a path: of Windows and of others, of a Mac and of others, with capitals or without."""
    name = unicodedata.normalize("NFC", name).replace("\\", "/").strip()
    parts = [part for part in name.split("/") if part not in ("", ".")]
    return "/".join(parts).casefold() if fold else "/".join(parts)


def _find_one(
    labels: ExternalLabels, file: str, images: Sequence[str], indices: list[dict[str, list[int]]]
) -> _Match | None:
    """The image that a file means.

    Raises:
        TensorDropoutError: if it may mean several.
    """
    for fold, index in enumerate(indices):
        name = _normalize(file, bool(fold))
        for ending in _list_endings(name):
            found = index.get(ending, [])
            whole = [image for image in found if _normalize(images[image], bool(fold)) == ending]
            found = [image for image in whole if images[image] == file] or whole or found
            if len(found) > 1:
                raise TensorDropoutError(
                    f"{labels.source}: {file} may be several images of the folder: "
                    f"{name_some([images[image] for image in found])}; write the path of one"
                )
            if found:
                return _Match(not fold, ending == name or bool(whole), ending.count("/") + 1, found[0])
    return None


def _settle(labels: ExternalLabels, images: Sequence[str], matches: dict[int, _Match]) -> dict[int, _Match]:
    """Every image for the row that fits best; the others have none.

    Raises:
        TensorDropoutError: if two fit equally.
    """
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, match in matches.items():
        rows_of[match.image].append(row)
    for image, rows in rows_of.items():
        rows.sort(key=lambda row: matches[row], reverse=True)
        if len(rows) > 1 and matches[rows[0]] == matches[rows[1]]:
            raise TensorDropoutError(
                f"{labels.source}: {labels.files[rows[0]]} and {labels.files[rows[1]]} would both be "
                f"{images[image]} of the "
                "folder; keep one of them"
            )
    best = {rows[0] for rows in rows_of.values()}
    return {row: match for row, match in matches.items() if row in best}


# Whether they fit.


def _compare_sizes(labels: ExternalLabels, sizes: np.ndarray) -> None:
    """Refuse labels of pictures of another size."""
    if labels.sizes is None or labels.convention.unit == "fractions":
        return
    other = np.flatnonzero((labels.sizes != sizes).any(axis=1))
    if not other.size:
        return
    row = int(other[0])
    theirs, here = ("{:g} × {:g}".format(*size[row]) for size in (labels.sizes, sizes))
    turned = (labels.sizes[row] == sizes[row][::-1]).all()
    raise TensorDropoutError(
        f"{labels.source}: {labels.files[row]} has {theirs} pixels in this file, and {here} in the folder"
        + (" (as it is shown, upright: by its EXIF data it is turned)" if turned else "")
        + f", as {len(other)} of {len(sizes)} images have another size; use the pictures that were labelled"
    )


def _check_points(labels: ExternalLabels, points: np.ndarray) -> None:
    """Refuse points, as fractions, that lie far outside of their images."""
    far = (points < -_MARGIN) | (points > 1 + _MARGIN)
    if not far.any():
        return
    row, point = (int(place) for place in np.argwhere(far.any(axis=2))[0])
    x, y = labels.points[row, point]
    hint = "are these the pictures that were labelled, in their size?"
    if labels.convention.unit == "fractions" and float(np.nanmax(points)) > 2:
        hint = "these look like pixels, and fractions of width and height are expected; divide them"
    raise TensorDropoutError(
        f"{labels.source}: point {labels.names[point]!r} of {labels.files[row]} is at {x:.6g}, {y:.6g}, far "
        "outside of the "
        f"image, as in {int(far.any(axis=(1, 2)).sum())} of {len(points)} images; {hint}"
    )
