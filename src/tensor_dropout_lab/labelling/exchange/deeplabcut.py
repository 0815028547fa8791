"""DeepLabCut's ``CollectedData_SCORER.csv``, one animal per image.

Such as::

    scorer,,,anna,anna,anna,anna
    bodyparts,,,nose,nose,tail,tail
    coords,,,x,y,x,y
    labeled-data,video,img001.png,120.25,80.5,,

The image is one column, ``labeled-data/video/img001.png``, or three. Coordinates are pixels from the left and the top,
whole numbers the centres of pixels, as napari counts, in which one labels: ours in pixels is theirs plus 0.5. Empty is
missing.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.labelling.exchange.external_labels import Convention, ExternalLabels, find_absent

CONVENTION = Convention("pixels", centres=True)
_HEADER = ("scorer", "bodyparts", "coords")
_FOLDER = "labeled-data"
_SCORER = "tensor-dropout"


def read_deeplabcut(path: Path, text: str) -> ExternalLabels:
    """The labels of a ``CollectedData`` file.

    Raises:
        TensorDropoutError: for what is no such file, for files of several animals, and for predictions.
    """
    rows = _read_rows(path, text)
    header, rows = [[cell.strip() for cell in cells] for _, cells in rows[:3]], rows[3:]
    first = next((column for column, cell in enumerate(header[2][1:], 1) if cell in ("x", "y", "likelihood")), 0)
    _check_header(path, header, first)
    names = header[1][first::2]
    files: list[str] = []
    points = np.full((len(rows), len(names), 2), math.nan)
    for row, (line, cells) in enumerate(rows):
        files.append("/".join(cells[:first]))
        if not all(cell.strip() for cell in cells[:first]):
            raise TensorDropoutError(f"{path}: line {line} names no image; write one there, or delete the line")
        for column, cell in enumerate(cells[first:]):
            points[row, column // 2, column % 2] = _read_number(path, line, cell)
        half = np.flatnonzero(np.isnan(points[row, :, 0]) != np.isnan(points[row, :, 1]))
        if half.size:
            raise TensorDropoutError(
                f"{path}: line {line}, {names[half[0]]!r} has only one of x and y; give both, or none"
            )
    return ExternalLabels(
        tuple(names),
        tuple(files),
        points,
        find_absent(points),
        groups=_find_videos(files),
        convention=CONVENTION,
        source=str(path),
    )


def _read_rows(path: Path, text: str) -> list[tuple[int, list[str]]]:
    """All lines with their numbers; as many cells in each."""
    try:
        reader = csv.reader(io.StringIO(text, newline=""))
        rows = [(reader.line_num, cells) for cells in reader if any(cell.strip() for cell in cells)]
    except csv.Error as error:
        raise TensorDropoutError(f"{path} is no table in CSV ({error}); export it anew") from None
    starts = [cells[0].strip() for _, cells in rows[:4]]
    if "individuals" in starts:
        raise TensorDropoutError(
            f"{path} has several animals per image (its header has a row 'individuals'); one per image is read, "
            "so export a "
            "file of one animal"
        )
    if tuple(starts[:3]) != _HEADER:
        raise TensorDropoutError(
            f"{path}: the first cells of the first three lines are {', '.join(starts[:3]) or 'missing'}; "
            "DeepLabCut writes "
            f"{', '.join(_HEADER)}; choose its CollectedData file, or name the format"
        )
    for line, cells in rows:
        if len(cells) != len(rows[0][1]):
            raise TensorDropoutError(
                f"{path}: line {line} has {len(cells)} cells, the header has {len(rows[0][1])}; the file is "
                "damaged or cut off"
            )
    return rows


def _check_header(path: Path, header: list[list[str]], first: int) -> None:
    coords, scorers = header[2][first:] if first else [], set(header[0][first:])
    if "likelihood" in coords:
        raise TensorDropoutError(
            f"{path} has columns 'likelihood': predictions of a network, which nobody has looked at; choose a "
            "CollectedData file"
        )
    pairs = list(zip(header[1][first::2], header[1][first + 1 :: 2], strict=False))
    if not coords or coords != ["x", "y"] * len(pairs) or any(x != y or not x for x, y in pairs):
        raise TensorDropoutError(
            f"{path}: every body part has a column x and then a column y; the header has {name_some(coords)}"
        )
    if len(scorers) > 1:
        raise TensorDropoutError(
            f"{path} has the labels of several people: {name_some(sorted(scorers))}; export those of one"
        )


def _read_number(path: Path, line: int, cell: str) -> float:
    if cell.strip().lower() in ("", "nan", "na"):
        return math.nan
    try:
        value = float(cell)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise TensorDropoutError(f"{path}: line {line} has {cell[:40]!r}; a number, or an empty cell, is expected")
    return value


def _find_videos(files: list[str]) -> tuple[str, ...] | None:
    """The folder of each image as its group, if there are several: frames of one video are much alike."""
    videos = tuple(file.replace("\\", "/").split("/")[-2] if "/" in file.replace("\\", "/") else "" for file in files)
    return videos if len(set(videos)) > 1 and all(videos) else None


def write_deeplabcut(labels: ExternalLabels) -> str:
    """Labels in pixels of :data:`CONVENTION` as a ``CollectedData`` file.

    Images in a folder are frames of the video of that name. If some lie deeper, all paths are written as they are, in
    one column; DeepLabCut wants them moved then.
    """
    places = _find_places(labels.files)
    deep = len({tuple(place) for place in places if len(place) == 3}) < len(places)
    index = [[file] for file in labels.files] if deep else places
    blank = [""] * (0 if deep else 2)
    columns = 2 * len(labels.names)
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["scorer", *blank, *([_SCORER] * columns)])
    writer.writerow(["bodyparts", *blank, *(name for name in labels.names for _ in "xy")])
    writer.writerow(["coords", *blank, *("xy" * len(labels.names))])
    for place, points in zip(index, labels.points, strict=True):
        writer.writerow([*place, *("" if math.isnan(value) else f"{value:.4f}" for value in points.ravel())])
    return stream.getvalue()


def _find_places(files: Sequence[str]) -> list[list[str]]:
    """Folder, video and name of every image, as DeepLabCut has them; more parts for those that lie deeper."""
    paths = [file.split("/") for file in files]
    paths = [path[1:] if path[0] == _FOLDER and len(path) == 3 else path for path in paths]
    videos = {path[0] for path in paths if len(path) > 1}
    video = next(name for n in itertools.count(1) if (name := f"images{n if n > 1 else ''}") not in videos)
    return [[_FOLDER, *(path if len(path) > 1 else [video, *path])] for path in paths]
