"""TPS, the landmarks of tpsDig, tpsUtil, geomorph and others.

Such as::

    LM=3
    152.00000 310.50000
    -1.00000 -1.00000
    188.00000 295.00000
    IMAGE=wing 01.jpg
    ID=0
    SCALE=0.0031

Coordinates are pixels, x from the left and y from the bottom edge of the image, so that y is its height minus ours; no
program documents a shift by half a pixel. Negative ones (tpsDig) and NA (geomorph) are missing. ``SCALE=`` is the
length of a pixel, and does not change the coordinates in the file. Landmarks have no names, only their order.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.labelling.exchange.external_labels import Convention, ExternalLabels, number_names
from tensor_dropout_lab.labelling.words import count_of

CONVENTION = Convention("pixels", from_bottom=True)
_KEY = re.compile(r"\s*([A-Za-z]\w*)\s*=(.*)")
_OPEN = "not labelled yet:"
"""A comment of ours: which landmarks are open, where tpsDig knows only missing ones."""


@dataclass
class _Specimen:
    """The block of one image; ``line`` is its first."""

    line: int
    count: int
    landmarks: list[tuple[float, float]] = field(default_factory=list)
    image: str = ""
    identity: str = ""
    open: list[int] = field(default_factory=list)
    in_curve: bool = False
    has_curves: bool = False

    def describe(self) -> str:
        """What to call it in messages."""
        called = self.image or (f"ID={self.identity}" if self.identity else "")
        return f"the block of line {self.line}" + (f" ({called})" if called else "")


def read_tps(path: Path, text: str) -> ExternalLabels:
    """The landmarks of a TPS file.

    Raises:
        TensorDropoutError: for what is no such file, with the line.
    """
    specimens = _read_specimens(path, re.split(r"\r\n|\r|\n", text))
    digitized = [specimen for specimen in specimens if specimen.count]
    if not digitized:
        raise TensorDropoutError(f"{path}: no image in it has landmarks (LM=0 everywhere); there is nothing to import")
    count = digitized[0].count
    other = next((specimen for specimen in digitized if specimen.count != count), None)
    if other is not None:
        raise TensorDropoutError(
            f"{path}: {digitized[0].describe()} has {count} landmarks, {other.describe()} {other.count}; give "
            "every image "
            "the same landmarks in the same order, a missing one as -1 -1"
        )
    points = np.full((len(specimens), count, 2), math.nan)
    absent = np.zeros((len(specimens), count), dtype=bool)
    for row, specimen in enumerate(specimens):
        if specimen.count:
            points[row] = specimen.landmarks
            absent[row] = np.isnan(points[row, :, 0])
            absent[row, [number - 1 for number in specimen.open if number <= count]] = False
    curved = [specimen.image for specimen in specimens if specimen.has_curves]
    notes = (
        [f"The curves and outlines of {count_of(len(curved), 'image')} were left out ({name_some(curved)})"]
        if curved
        else []
    )
    return ExternalLabels(
        number_names(count),
        tuple(specimen.image for specimen in specimens),
        points,
        absent,
        convention=CONVENTION,
        named=False,
        notes=tuple(notes),
        source=str(path),
    )


def _read_specimens(path: Path, lines: list[str]) -> list[_Specimen]:
    specimens: list[_Specimen] = []
    for number, line in enumerate(lines, 1):
        found = _KEY.fullmatch(line)
        if found is not None:
            _read_key(path, number, found[1].upper(), found[2], specimens)
        elif line.strip():
            _read_numbers(path, number, line, specimens)
    if not specimens:
        raise TensorDropoutError(
            f"{path} has no line LM=, so it is no TPS file; name its format, or choose another file"
        )
    for specimen in specimens:
        if len(specimen.landmarks) != specimen.count:
            raise TensorDropoutError(
                f"{path}: {specimen.describe()} says LM={specimen.count}, and {len(specimen.landmarks)} landmarks "
                "follow; "
                "the file is damaged or cut off"
            )
        if not specimen.image.strip():
            raise TensorDropoutError(
                f"{path}: {specimen.describe()} has no IMAGE=, so its picture is not known; add a line IMAGE=name.jpg"
            )
    return specimens


def _read_key(path: Path, number: int, key: str, value: str, specimens: list[_Specimen]) -> None:
    """Take in a line KEY=VALUE; those that say nothing of landmarks are passed over."""
    if key == "LM3":
        raise TensorDropoutError(
            f"{path}: line {number} has landmarks in space (LM3=); only those in pictures, LM=, are read"
        )
    if key == "LM":
        if not value.strip().isdecimal():
            raise TensorDropoutError(f"{path}: line {number} is LM={value}; a number of landmarks is expected")
        specimens.append(_Specimen(number, int(value)))
        return
    if not specimens:
        raise TensorDropoutError(f"{path}: line {number}, {key}=, comes before any LM=; a block of TPS begins with LM=")
    specimen = specimens[-1]
    if key == "IMAGE":
        specimen.image = value
    elif key == "ID":
        specimen.identity = value.strip()
    elif key == "POINTS":
        specimen.in_curve = True
    elif key in ("CURVES", "OUTLINES"):
        specimen.has_curves = specimen.has_curves or value.strip() not in ("", "0")
    elif key == "COMMENT" and value.startswith(_OPEN):
        specimen.open = [int(word) for word in value.removeprefix(_OPEN).split() if word.isdecimal() and int(word)]


def _read_numbers(path: Path, number: int, line: str, specimens: list[_Specimen]) -> None:
    """Take in a line of coordinates."""
    if specimens and specimens[-1].in_curve:
        return
    pair = [_read_number(word) for word in line.split()]
    x, y = pair if len(pair) == 2 else (None, None)
    if not specimens or x is None or y is None:
        raise TensorDropoutError(
            f"{path}: line {number} is {line.strip()[:40]!r}; two numbers or KEY=VALUE is expected"
        )
    specimen = specimens[-1]
    if len(specimen.landmarks) == specimen.count:
        raise TensorDropoutError(
            f"{path}: line {number} is one landmark more than LM={specimen.count} of line {specimen.line} says; "
            "correct "
            "the number, or delete the line"
        )
    missing = math.isnan(x) or math.isnan(y) or x < 0 or y < 0
    specimen.landmarks.append((math.nan, math.nan) if missing else (x, y))


def _read_number(word: str) -> float | None:
    """A coordinate, NaN for NA, None for no number; some countries write a comma for the point."""
    if word.upper() in ("NA", "NAN"):
        return math.nan
    try:
        value = float(word.replace(",", ".") if word.count(",") == 1 and "." not in word else word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def write_tps(labels: ExternalLabels) -> str:
    """Labels in pixels of :data:`CONVENTION` as a TPS file.

    Raises:
        TensorDropoutError: for a point left of or below its image, since negative numbers are missing landmarks here.
    """
    blocks = []
    for row, file in enumerate(labels.files):
        if "\n" in file or "\r" in file:
            raise TensorDropoutError(
                f"TPS: the name {file!r} has a line break, which this format cannot have; rename it"
            )
        there, pairs = labels.there[row], np.round(labels.points[row], 5)
        outside = there & (pairs < 0).any(axis=1)
        if outside.any():
            raise TensorDropoutError(
                f"TPS: {file}, point {labels.names[int(outside.argmax())]!r}, lies left of the image or below it, and "
                "negative numbers are missing landmarks in this format; move it into the image, or skip it"
            )
        unknown = [str(number + 1) for number in np.flatnonzero(~there & ~labels.absent[row])]
        blocks += [
            f"LM={len(pairs)}",
            *(f"{x + 0.0:.5f} {y + 0.0:.5f}" if is_there else "-1.00000 -1.00000"
              for (x, y), is_there in zip(pairs, there, strict=True)),
            f"IMAGE={file}",
            f"ID={row}",
            *([f"COMMENT={_OPEN} {' '.join(unknown)}"] if unknown else []),
        ]  # fmt: skip
    return "\n".join(blocks) + "\n"
