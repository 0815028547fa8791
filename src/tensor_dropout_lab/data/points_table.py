"""Targets in a file, ``points.csv``, and the pictures or volumes they belong to.

The first line names the columns: ``file``, then ``group`` if there are groups, then the targets::

    file,group,x0,y0,x1,y1,age
    0001.jpg,anna,0.31,0.42,0.55,0.47,31
    0002.jpg,anna,0.33,0.40,,,31

The targets are columns of numbers (an empty cell is missing), or one column of class names. Two columns whose names
differ in x and y are a point: ``x0`` and ``y0``, ``nose_x`` and ``nose_y``, ``xmin`` and ``ymin``. Points are fractions
of width and height, from the left and the top edge of the picture; :func:`match_files` turns pixels into fractions.
"""

from __future__ import annotations

import csv
import difflib
import math
import re
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.data.base import choose
from tensor_dropout_lab.data.image_files import PICTURES, VOLUMES, ImageFiles, find_images

Units = Literal["fractions", "pixels"]
Task = Literal["regression", "classification"]

FORMAT = "Expected: a first line such as file,group,x0,y0 (group may be left out), then a line for each image"
_NO_VALUE = ("", "n/a", "na", "nan", "none", "null")
_MARGIN = 0.25
_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars"}
_AXIS = re.compile(r"(?:^|[_.\- ])([xX])(?=\d*$|\d*[_.\- ]|min|max|mid|cent)|(?<=[a-z0-9])(X)(?=\d*$)")
"""The letter x in a column's name, where it stands for an axis: x0, x_0, nose_x, nose.x2, xmin, noseX."""


@dataclass(frozen=True)
class Table:
    """What a ``points.csv`` says.

    Attributes:
        path: the file.
        files: (n) the image of every row, as written.
        groups: (n) the group of every row, or None.
        columns: (k) the names of the targets; of classes, the one column.
        values: (n, k) float64, NaN where missing; None for classes.
        labels: (n) class names, "" where missing; None for numbers.
        axes: how many coordinates a point has at most: in pictures two, and a column z is a number like any other.
        left_out: one line that names what :func:`match_files` skipped, or nothing.
    """

    path: Path
    files: list[str]
    groups: list[str] | None
    columns: list[str]
    values: np.ndarray | None
    labels: list[str] | None
    axes: int = 3
    left_out: str = ""

    def __len__(self) -> int:
        return len(self.files)

    @property
    def task(self) -> Task:
        """Whether it has numbers or classes."""
        return "regression" if self.labels is None else "classification"

    @property
    def classes(self) -> list[str]:
        """The class names, sorted: class 0 is the first."""
        return sorted(set(self.labels or []) - {""})

    @property
    def points(self) -> list[tuple[int, ...]]:
        """The columns of every point, as numbers into ``columns``: (x, y), or (x, y, z) in volumes."""
        return [point[: self.axes] for point in find_points(self.columns)] if self.labels is None else []

    @property
    def has_target(self) -> np.ndarray:
        """(n,) bool: whether any target of the row is there."""
        if self.values is None:
            return np.array([label != "" for label in self.labels or []], dtype=bool)
        return (~np.isnan(self.values)).any(axis=1)

    def take(self, rows: Sequence[int]) -> Table:
        """The table with these rows only, in this order."""
        return replace(
            self,
            files=[self.files[row] for row in rows],
            groups=None if self.groups is None else [self.groups[row] for row in rows],
            values=None if self.values is None else self.values[list(rows)],
            labels=None if self.labels is None else [self.labels[row] for row in rows],
        )


def find_points(columns: Sequence[str]) -> list[tuple[int, ...]]:
    """Which columns are the coordinates of points, by their names.

    Example:
        >>> find_points(["x0", "y0", "age", "nose_x", "nose_y", "xmax", "max"])
        [(0, 1), (3, 4)]
        >>> find_points(["tip.x", "tip.y", "tip.z"])
        [(0, 1, 2)]
    """
    place = {column: number for number, column in enumerate(columns)}
    points = []
    for column in columns:
        found = _AXIS.search(column)
        if found is None:
            continue
        at = found.start(found.lastindex or 0)
        letters = "xyz" if column[at] == "x" else "XYZ"
        names = [column[:at] + letter + column[at + 1 :] for letter in letters]
        if names[1] in place:
            points.append(tuple(place[name] for name in names if name in place))
    return points


def find_halves(columns: Sequence[str]) -> list[tuple[str, str]]:
    """Columns that seem to be x of a point, each with the column y that is not there.

    Example:
        >>> find_halves(["x0", "y0", "tip_x", "age"])
        [('tip_x', 'tip_y')]
    """
    of_points = {columns[column] for point in find_points(columns) for column in point}
    halves = []
    for column in columns:
        found = None if column in of_points else _AXIS.search(column)
        if found is not None:
            at = found.start(found.lastindex or 0)
            halves.append((column, column[:at] + ("y" if column[at] == "x" else "Y") + column[at + 1 :]))
    return halves


def find_lone_columns(columns: Sequence[str]) -> list[str]:
    """Columns that seem to be a coordinate without its partner, or the sides of a box.

    Example:
        >>> find_lone_columns(["x0", "y0", "tip_x", "age"]), find_lone_columns(["x", "y", "w", "h"])
        (['tip_x'], ['w', 'h'])
    """
    lone = [x for x, _ in find_halves(columns)]
    names = {column.lower(): column for column in columns}
    sides = [names[side] for pair in (("w", "h"), ("width", "height")) if set(pair) <= set(names) for side in pair]
    return lone + sides


# Reading.


def read_table(path: str | Path, *, task: Task | None = None, target: str | Sequence[str] | None = None) -> Table:
    """Read a ``points.csv``.

    Args:
        path: the file.
        target: a column, or several; None takes all but file and group. Others may hold anything.
        task: "classification" takes a column of numbers for class names; None decides by what is written.

    Raises:
        TensorDropoutError: if the file is not such a table; it says in which line and column.
    """
    path = Path(path).expanduser()
    header, rows = _read_cells(path)
    place = {column: number for number, column in enumerate(header)}
    files = [cells[place["file"]].removeprefix("./") for _, cells in rows]
    nameless = [line for (line, _), file in zip(rows, files, strict=True) if not file]
    if nameless:
        raise TensorDropoutError(f"{path}: line {nameless[0]} names no file; write one there, or delete the line")
    _refuse_twice(path, files, [line for line, _ in rows])
    groups = [cells[place["group"]] for _, cells in rows] if "group" in place else None
    if groups is not None and "" in groups:
        raise TensorDropoutError(
            f"{path}: line {rows[groups.index('')][0]} has an empty group; name one, or leave the column out"
        )
    columns = _choose_columns(path, header, target)
    texts = [[cells[place[column]] for column in columns] for _, cells in rows]
    if len(columns) == 1 and (task == "classification" or (task is None and not _has_number(texts))):
        labels = ["" if text.lower() in _NO_VALUE else text for (text,) in texts]
        return Table(path, files, groups, columns, None, labels)
    if task == "classification":
        raise TensorDropoutError(
            f"{path}: classes are one column, here there are {len(columns)}: {name_some(columns)}; choose one as target"
        )
    values = [
        [_read_number(path, text, column, line) for text, column in zip(texts_of_row, columns, strict=True)]
        for texts_of_row, (line, _) in zip(texts, rows, strict=True)
    ]
    return Table(path, files, groups, columns, np.array(values, dtype=np.float64), None)


def _choose_columns(path: Path, header: list[str], target: str | Sequence[str] | None) -> list[str]:
    """The targets."""
    there = [column for column in header if column not in ("file", "group")]
    if not there:
        raise TensorDropoutError(f"{path}: there is no column with targets, only {', '.join(header)}. {FORMAT}")
    columns = there if target is None else [target] if isinstance(target, str) else list(target)
    for column in columns:
        if column not in there:
            near = difflib.get_close_matches(column, there, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise TensorDropoutError(f"{path}: there is no target {column!r}; {hint}there are {name_some(there)}")
    if not columns or len(set(columns)) < len(columns):
        raise TensorDropoutError(f"{path}: the targets are {', '.join(columns) or 'none'}; name each column once")
    return columns


def _read_cells(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The header, and every row with its line number; all rows have as many cells as the header."""
    lines: list[tuple[int, list[str]]] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            reader = csv.reader(stream, skipinitialspace=True)
            lines = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except FileNotFoundError:
        raise TensorDropoutError(f"{path}: there is no such file. {FORMAT}") from None
    except IsADirectoryError:
        raise TensorDropoutError(f"{path} is a folder; name the table in it, such as {path / 'points.csv'}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TensorDropoutError(f"{path} is not a text file in UTF-8 ({error}); save it as CSV in UTF-8") from error
    lines = [(line, cells) for line, cells in lines if any(cells)]
    if not lines:
        raise TensorDropoutError(f"{path} is empty. {FORMAT}")
    (_, header), *rows = lines
    _check_header(path, header)
    if not rows:
        raise TensorDropoutError(f"{path} has a header and no rows. {FORMAT}")
    for line, cells in rows:
        if len(cells) != len(header):
            hint = _name_separator(cells)
            raise TensorDropoutError(
                f"{path}: line {line} has {len(cells)} cells, the header has {len(header)}; "
                + (
                    f"it seems to have {hint} in place of commas"
                    if hint
                    else "give every column a cell, or leave it empty"
                )
            )
    return header, rows


def _check_header(path: Path, header: list[str]) -> None:
    separator = _name_separator(header)
    if separator:
        raise TensorDropoutError(f"{path}: the columns are separated by {separator}, commas are expected; save it so")
    if "file" not in header:
        if any(_is_number(cell) for cell in header) or re.search(r"\.\w{2,4}$", header[0]):
            raise TensorDropoutError(
                f"{path}: the first line is {', '.join(header[:3])}: a header is missing. {FORMAT}"
            )
        near = difflib.get_close_matches("file", [cell.lower() for cell in header], n=1, cutoff=0.4)
        hint = f"; rename {near[0]!r}" if near else ""
        raise TensorDropoutError(f"{path}: there is no column 'file', only {', '.join(header[:8])}{hint}. {FORMAT}")
    if "" in header:
        raise TensorDropoutError(
            f"{path}: column {header.index('') + 1} has no name; name it or delete it (pandas: to_csv(index=False))"
        )
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise TensorDropoutError(f"{path}: the column {twice[0]!r} is there twice; give each column a name of its own")


def _name_separator(cells: list[str]) -> str:
    """What stands in place of commas in a line that should have been divided; "" if it was."""
    if len(cells) > 1 and "file" in cells:
        return ""
    counts = {words: sum(cell.count(sign) for cell in cells) for sign, words in _SEPARATORS.items()}
    words = max(counts, key=lambda key: counts[key])
    return words if counts[words] else ""


def _refuse_twice(path: Path, files: list[str], lines: list[int]) -> None:
    twice = [file for file, count in Counter(files).items() if count > 1]
    if twice:
        where = [str(line) for line, file in zip(lines, files, strict=True) if file == twice[0]]
        raise TensorDropoutError(
            f"{path}: files with more than one row: {name_some(twice)} ({twice[0]} in lines {', '.join(where[:5])}); "
            "keep one row for each"
        )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _has_number(texts: list[list[str]]) -> bool:
    """Whether a cell has a number, or no cell has anything."""
    cells = [text for row in texts for text in row if text.lower() not in _NO_VALUE]
    return not cells or any(_is_number(cell) for cell in cells)


def _read_number(path: Path, text: str, column: str, line: int) -> float:
    if text.lower() in _NO_VALUE:
        return math.nan
    value = float(text) if _is_number(text) else math.inf
    if not math.isfinite(value):
        raise TensorDropoutError(
            f"{path}: line {line}, column {column!r}: {text!r} is not a number; correct it, leave the cell empty if it "
            "is missing, or choose other columns as target (classes are one column, chosen alone)"
        )
    return value


# Rows and images.


def match_files(
    table: Table,
    images: str | Path,
    *,
    units: Units = "fractions",
    missing: Literal["error", "skip"] = "error",
) -> tuple[Table, ImageFiles]:
    """Find the image of every row.

    Args:
        table: of :func:`read_table`.
        images: a folder (with folders in it), or a tar file. ``file`` is the path in it; one folder around all files
            of a tar file may be left out.
        units: of the points: "fractions" of width and height, or "pixels", which are divided by the width and height
            of each image as it is shown, upright. Other numbers stay as they are.
        missing: "skip" leaves out rows without an image, images without a row, and rows without any target; "error"
            names them.

    Returns:
        The table and its images, in the same order: row i belongs to image i. Points are fractions.

    Raises:
        TensorDropoutError: if a row or an image is alone, a point lies far outside of its image, or, with pixels, an
            image cannot be read.
    """
    choose("points.csv", "units", units, ("fractions", "pixels"))
    choose("points.csv", "missing", missing, ("error", "skip"))
    found = find_images(images)
    names = found.names if set(found.names) & set(table.files) else found.short_names
    place = {name: number for number, name in enumerate(names)}
    if missing == "error":
        _refuse_alone(table, names, found)
    has_target = table.has_target
    rows = [row for row, file in enumerate(table.files) if file in place and has_target[row]]
    if not rows:
        raise TensorDropoutError(
            f"{table.path}: no row with a target has an image in {found.where}: the table has "
            f"{name_some(table.files)}; there are {name_some(names)}{_advise_on_names(table.files, names)}"
        )
    table = replace(table, left_out=_describe_alone(table, names))
    table, found = table.take(rows), found.take([place[table.files[row]] for row in rows])
    if found.are_volumes:
        _check_volume_points(table, units)
    else:
        table = replace(table, axes=2)
    if units == "pixels":
        table = _divide_by_size(table, found)
    check_points(table, units)
    return table, found


def _find_alone(table: Table, names: list[str]) -> tuple[list[str], list[str], list[str]]:
    """Files of rows without an image, images without a row, and files of rows without a target."""
    empty = [file for file, there in zip(table.files, table.has_target, strict=True) if not there]
    return sorted(set(table.files) - set(names)), sorted(set(names) - set(table.files)), empty


def _describe_alone(table: Table, names: list[str]) -> str:
    """One line, for what is left out; "" for nothing."""
    without_image, without_row, empty = _find_alone(table, names)
    empty = sorted(set(empty) - set(without_image))
    kinds = (
        (without_image, ("row without an image", "rows without an image")),
        (without_row, ("image without a row", "images without a row")),
        (empty, ("row without a target", "rows without a target")),
    )
    said = [f"{len(files)} {words[len(files) > 1]} ({name_some(files)})" for files, words in kinds if files]
    return f"Left out: {', '.join(said)}" if said else ""


def _refuse_alone(table: Table, names: list[str], images: ImageFiles) -> None:
    without_image, without_row, empty = _find_alone(table, names)
    problems = [
        f"{len(files)} {what}: {name_some(files)}"
        for files, what in (
            (without_image, f"of {len(table)} rows have no image in {images.where}"),
            (without_row, f"of {len(names)} images in {images.where} have no row"),
            (empty, "rows have no target, all their cells are empty"),
        )
        if files
    ]
    if problems:
        way_out = ". Complete them, or leave them out with --missing skip (in Python: missing='skip')"
        advice = _advise_on_names(table.files, names) or way_out
        raise TensorDropoutError(f"{table.path}: {'; '.join(problems)}{advice}")


def _advise_on_names(files: Sequence[str], names: Sequence[str]) -> str:
    """What to do if no row has an image, and all would have one but for the extension or the folder; else ""."""
    if set(files) & set(names):
        return ""
    for cut, one, many in ((_cut_extension, "", "their extensions"), (_cut_folder, "the folder ", "their folders")):
        of_files, of_names = dict(map(cut, files)), dict(map(cut, names))
        if len(of_files) == len(files) and len(of_names) == len(names) and of_files.keys() <= of_names.keys():
            parts = {*of_files.values(), *(of_names[file] for file in of_files)} - {""}
            what = one + " and ".join(map(repr, sorted(parts))) if len(parts) <= 2 else many
            return f". The names differ only by {what}: write them in the column file as the images are named"
    return ""


def _cut_extension(name: str) -> tuple[str, str]:
    """The name without the extension of an image, and the extension."""
    length = max(len(end) if name.lower().endswith(end) else 0 for end in (*VOLUMES, *PICTURES))
    return name[: len(name) - length], name[len(name) - length :]


def _cut_folder(name: str) -> tuple[str, str]:
    """The name without its folder, and the folder."""
    folder, slash, file = name.rpartition("/")
    return file, folder + slash


def _divide_by_size(table: Table, images: ImageFiles) -> Table:
    if table.values is None or not table.points:
        raise TensorDropoutError(
            f"{table.path}: units is 'pixels', but no two columns are a point, such as x0 and y0 or nose_x and nose_y; "
            f"there are {', '.join(table.columns[:5])}. Leave units out, or rename them"
        )
    places = table.values[:, [column for point in table.points for column in point]]
    if ((places >= 0) & (places <= 1) | np.isnan(places)).all() and not np.isnan(places).all():
        raise TensorDropoutError(
            f"{table.path}: units is 'pixels', and all points lie within one pixel of the upper left corner; these "
            "look like fractions: leave --units out (in Python: units='fractions')"
        )
    sizes = images.measure()  # (n, 2): width and height
    values = table.values.copy()
    for point in table.points:
        values[:, point] /= sizes
    return replace(table, values=values)


def _check_volume_points(table: Table, units: Units) -> None:
    if units == "pixels":
        raise TensorDropoutError(
            f"{table.path}: points in volumes are fractions of the axes from left to right, back to front and bottom "
            "to top; units 'pixels' is for pictures"
        )
    flat = [point for point in table.points if len(point) == 2]
    if flat:
        x, y = (table.columns[column] for column in flat[0])
        raise TensorDropoutError(
            f"{table.path}: {x} and {y} are a point in a picture, and these are volumes; add its third column, z"
        )


def check_points(table: Table, units: Units = "fractions") -> None:
    """Refuse points that are far outside of their image; warn of those a little outside, as of a face at the edge.

    Raises:
        TensorDropoutError: if one is more than a quarter of the width or height outside, with what may be wrong.
    """
    if table.values is None:
        return
    columns = [column for point in table.points for column in point]
    places = table.values[:, columns]  # (n, number of coordinates)
    far = (places < -_MARGIN) | (places > 1 + _MARGIN)  # False where missing
    outside = (places < 0) | (places > 1)
    if not outside.any():
        return
    row, number = (int(at) for at in np.argwhere(far if far.any() else outside)[0])
    said = f"{table.columns[columns[number]]} = {places[row, number]:.5g}"
    said += " of its width or height" if units == "pixels" else ""
    rows = int((far if far.any() else outside).any(axis=1).sum())
    what = (
        f"{table.path}: {rows} of {len(table)} rows have points outside of the picture; the first is "
        f"{table.files[row]}, {said}, and fractions go from 0 to 1"
    )
    if not far.any():
        warnings.warn(f"{what}; they are kept, being less than a quarter of it away", stacklevel=3)
        return
    hint = "correct them, or leave the cells empty if the point cannot be seen"
    if units == "fractions" and float(np.nanmax(places)) > 2:
        hint = "these look like pixels: set units to 'pixels' (--units pixels)"
    elif units == "pixels":
        hint += "; pixels are counted from the left and the top edge of the upright image"
    raise TensorDropoutError(f"{what}; {hint}")
