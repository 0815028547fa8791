"""The table of all points, ``points.csv``, which ``tensor-dropout fit`` and ``--data table`` read.

It is replaced as a whole after every action. Rows are kept as bytes, so that one action formats one row.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.data.points_table import find_points
from tensor_dropout_lab.labelling.folder import PictureFolder
from tensor_dropout_lab.labelling.labels import Value


class PointsFile:
    """The table on disk.

    Args:
        path: where it is written.
        folder: the pictures; a row for each with a placed point, in their order.
    """

    def __init__(self, path: Path, folder: PictureFolder) -> None:
        self.path = path
        self._has_groups = any(picture.group is not None for picture in folder.pictures)
        self._starts = {
            picture.name: [picture.name, *([picture.group or ""] if self._has_groups else [])]
            for picture in folder.pictures
        }
        self._rows: dict[str, bytes] = dict.fromkeys(self._starts, b"")
        self._names: list[str] = []

    def rename(self, names: Sequence[str]) -> None:
        """Other names of points, or more of them; all rows are to be set anew if their number changes."""
        self._names = list(names)

    def set(self, image: str, values: Mapping[int, Value]) -> None:
        """The row of an image; those that are not in the folder have none."""
        if image not in self._starts:
            return
        cells = [""] * (2 * len(self._names))
        placed = {point: value for point, value in values.items() if value.by != "absent"}
        for point, value in placed.items():
            cells[2 * point : 2 * point + 2] = f"{value.x:.7g}", f"{value.y:.7g}"
        self._rows[image] = _format([*self._starts[image], *cells]) if placed else b""

    def write(self) -> None:
        """Replace the file.

        Raises:
            OSError: if it cannot be written.
        """
        header = ["file", *(["group"] if self._has_groups else []), *name_columns(self._names)]
        with replacing(self.path) as temporary:
            temporary.write_bytes(_format(header) + b"".join(self._rows.values()))


def _format(cells: Sequence[str]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()


def name_columns(names: Sequence[str]) -> list[str]:
    """The columns of points.

    Example:
        >>> name_columns(["nose", "tail"])
        ['nose_x', 'nose_y', 'tail_x', 'tail_y']
    """
    return [f"{name}_{axis}" for name in names for axis in "xy"]


def find_unclear_name(names: Sequence[str]) -> str | None:
    """The first name whose columns would not be read as one point; None if all are clear.

    Example:
        >>> find_unclear_name(["nose", "apex 2"]), find_unclear_name(["nose", "x_tip"])
        (None, 'x_tip')
    """
    found = set(find_points(name_columns(names)))
    for number, name in enumerate(names):
        if (2 * number, 2 * number + 1) not in found:
            return name
    return None
