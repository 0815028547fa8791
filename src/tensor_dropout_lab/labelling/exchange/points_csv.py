"""``points.csv``, our own format: the table of ``--data table``, with columns NAME_x and NAME_y in fractions."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.data.points_table import find_points, read_table
from tensor_dropout_lab.labelling.exchange.external_labels import FRACTIONS, ExternalLabels, find_absent
from tensor_dropout_lab.labelling.points_file import name_columns

CONVENTION = FRACTIONS


def read_points_csv(path: Path, text: str) -> ExternalLabels:
    """The points of a table; other columns are left out.

    Raises:
        TensorDropoutError: for what is no such table, and for one without points.
    """
    header = [cell.strip() for cell in next(csv.reader(io.StringIO(text, newline=""), skipinitialspace=True), [])]
    pairs = _find_pairs(header)
    if not pairs and "file" in header:
        raise TensorDropoutError(
            f"{path}: no two columns are a point, such as nose_x and nose_y; there are {name_some(header)}; rename them"
        )
    columns = [column for _, x, y in pairs for column in (x, y)]
    table = read_table(path, target=columns or None, task="regression")  # without pairs: it says what is wrong
    assert table.values is not None  # a table of numbers has them
    points = table.values.reshape(len(table), -1, 2)
    half = np.isnan(points[..., 0]) != np.isnan(points[..., 1])
    if half.any():
        row, point = (int(place) for place in np.argwhere(half)[0])
        raise TensorDropoutError(
            f"{path}: {table.files[row]}, point {pairs[point][0]!r} has only one of x and y; give both, or none"
        )
    other = [column for column in header if column not in ("file", "group", *columns)]
    return ExternalLabels(
        tuple(name for name, _, _ in pairs),
        tuple(table.files),
        points,
        find_absent(points),
        groups=None if table.groups is None else tuple(table.groups),
        notes=(f"Columns that are no points were left out: {name_some(other)}",) if other else (),
        source=str(path),
    )


def _find_pairs(header: list[str]) -> list[tuple[str, str, str]]:
    """Name, column of x and column of y of every point: NAME_x and NAME_y, else as ``--data table`` finds them."""
    ours = [(column[:-2], column, f"{column[:-2]}_y") for column in header if column[:-2] and column.endswith("_x")]
    ours = [pair for pair in ours if pair[2] in header]
    taken = {column for pair in ours for column in pair[1:]}
    rest = [column for column in header if column not in taken]
    found = [(rest[point[0]], rest[point[1]]) for point in find_points(rest)]
    pairs = [*ours, *((_cut_axis(x, y), x, y) for x, y in found)]
    return sorted(pairs, key=lambda pair: header.index(pair[1]))


def _cut_axis(x: str, y: str) -> str:
    """The name of a point from those of its columns.

    Example:
        >>> _cut_axis("x0", "y0"), _cut_axis("tip.x", "tip.y"), _cut_axis("xmin", "ymin"), _cut_axis("x", "y")
        ('0', 'tip', 'min', 'point')
    """
    at = next(place for place, (one, other) in enumerate(zip(x, y, strict=True)) if one != other)
    return (x[:at].rstrip("_.- ") + x[at + 1 :]).strip("_.- ") or "point"


def write_points_csv(labels: ExternalLabels) -> str:
    """Labels in fractions as a table; rows without a point have empty cells."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    group = [] if labels.groups is None else ["group"]
    writer.writerow(["file", *group, *name_columns(labels.names)])
    for row, file in enumerate(labels.files):
        place = [file] if labels.groups is None else [file, labels.groups[row]]
        writer.writerow(
            [*place, *("" if math.isnan(value) else f"{value:.8f}" for value in labels.points[row].ravel())]
        )
    return stream.getvalue()
