"""Labels of other programs: TPS, COCO keypoints, DeepLabCut, and our own table.

A format is a file here that turns text into :class:`ExternalLabels` and back, and an entry of :data:`FORMATS`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.labelling.exchange import coco, deeplabcut, points_csv, tps
from tensor_dropout_lab.labelling.exchange.external_labels import FRACTIONS, Convention, ExternalLabels
from tensor_dropout_lab.labelling.exchange.matching import match_labels

__all__ = [
    "FORMATS", "FRACTIONS", "Convention", "ExternalLabels", "Format", "match_labels", "read_labels", "write_labels",
]  # fmt: skip

_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Format:
    """A format of labels.

    Attributes:
        title: what people call it.
        ending: of its files.
        media_type: of its files.
        convention: how it counts coordinates.
        read: labels of a path (for messages) and the text of the file.
        write: the text of a file of labels that are in the convention.
        knows_absent: whether it tells absent points from those that are not labelled yet.
    """

    title: str
    ending: str
    media_type: str
    convention: Convention
    read: Callable[[Path, str], ExternalLabels]
    write: Callable[[ExternalLabels], str]
    knows_absent: bool = False


FORMATS = {
    "tps": Format("TPS (tpsDig)", ".tps", "text/plain", tps.CONVENTION, tps.read_tps, tps.write_tps, knows_absent=True),
    "coco": Format(
        "COCO keypoints",
        ".json",
        "application/json",
        coco.CONVENTION,
        coco.read_coco,
        coco.write_coco,
        knows_absent=True,
    ),
    "deeplabcut": Format(
        "DeepLabCut", ".csv", "text/csv", deeplabcut.CONVENTION, deeplabcut.read_deeplabcut, deeplabcut.write_deeplabcut
    ),
    "csv": Format("points.csv", ".csv", "text/csv", FRACTIONS, points_csv.read_points_csv, points_csv.write_points_csv),
}


def read_labels(path: str | Path, format: str | None = None) -> ExternalLabels:
    """Read labels of any format.

    Args:
        path: the file.
        format: a key of :data:`FORMATS`; None tells by the ending, and a CSV by its first cell.

    Raises:
        TensorDropoutError: if the file cannot be read, with what is wrong in it.
    """
    path = Path(path).expanduser()
    text = _read_text(path)
    return _find_format(path, format, text).read(path, text)


def write_labels(path: str | Path, labels: ExternalLabels, format: str | None = None) -> None:
    """Write labels in any format; the file appears whole, or not at all.

    Args:
        path: the file.
        labels: with ``sizes``, except for our own table.
        format: a key of :data:`FORMATS`; None tells by the ending, and a CSV is our own table.

    Raises:
        TensorDropoutError: if there is nothing to write, or the format cannot have it.
    """
    path = Path(path).expanduser()
    chosen = _find_format(path, format, "")
    labelled = (labels.there | labels.absent if chosen.knows_absent else labels.there).any(axis=1)
    if not labelled.any():
        raise TensorDropoutError(f"{path}: no image has a label yet; label one, then write them")
    labels = labels.take(np.flatnonzero(labelled).tolist())
    text = chosen.write(convert_labels(labels, chosen.convention))
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise TensorDropoutError(f"{path} cannot be written ({error.strerror or error})") from error
    except UnicodeEncodeError as error:
        raise TensorDropoutError(
            f"{path}: the name {error.object[max(error.start - 20, 0) : error.end]!r} is no text; rename the image"
        ) from error


def convert_labels(labels: ExternalLabels, convention: Convention) -> ExternalLabels:
    """The same labels, counted in another way.

    Raises:
        TensorDropoutError: if that needs the sizes of the images, and they are not known.
    """
    if labels.convention == convention:
        return labels
    if labels.sizes is None:
        raise TensorDropoutError(f"{labels.source}: labels in pixels need the size of every image; give sizes, (n, 2)")
    unread = [file for file, size in zip(labels.files, labels.sizes, strict=True) if not (size > 0).all()]
    if unread:
        raise TensorDropoutError(
            f"labels in pixels need the size of every image, and {name_some(unread)} cannot be read; mend the "
            "file, or clear "
            "its labels"
        )
    points = convention.from_fractions(labels.convention.to_fractions(labels.points, labels.sizes), labels.sizes)
    return replace(labels, points=points, convention=convention)


def _find_format(path: Path, format: str | None, text: str) -> Format:
    if format is not None:
        if format not in FORMATS:
            near = difflib.get_close_matches(format.lower(), FORMATS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TensorDropoutError(f"there is no format {format!r}; {hint}there are {', '.join(FORMATS)}")
        return FORMATS[format]
    ending = path.suffix.lower()
    if ending == ".csv":
        return FORMATS["deeplabcut" if text.lstrip(' \n"').startswith("scorer") else "csv"]
    for known in FORMATS.values():
        if ending == known.ending:
            return known
    endings = ", ".join(dict.fromkeys(known.ending for known in FORMATS.values()))
    raise TensorDropoutError(
        f"{path}: the format cannot be told by its ending; choose one of {endings}, or name it with --format: "
        f"{', '.join(FORMATS)}"
    )


def _read_text(path: Path) -> str:
    """The file as text: UTF-8, or else the alphabet of Western Windows, in which tpsDig writes."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise TensorDropoutError(f"{path} is larger than 1 GB, too large for a file of labels; choose another file")
        data = path.read_bytes()
    except FileNotFoundError:
        raise TensorDropoutError(f"{path}: there is no such file") from None
    except IsADirectoryError:
        raise TensorDropoutError(f"{path} is a folder; name the file of labels in it") from None
    except OSError as error:
        raise TensorDropoutError(f"{path} cannot be read ({error.strerror or error})") from error
    if b"\0" in data:
        raise TensorDropoutError(f"{path} is no text file; choose the file of labels, or export it as UTF-8")
    if not data.strip():
        raise TensorDropoutError(f"{path} is empty; export it anew")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("cp1252", errors="replace")
