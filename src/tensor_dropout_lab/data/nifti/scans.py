"""Which scans there are, whose they are, and what the table says of them."""

from __future__ import annotations

import csv
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tensor_dropout.errors import TensorDropoutError

LAYOUT = (
    "Expected: ROOT/participants.tsv (columns participant_id and the target) with ROOT/sub-01_T1w.nii.gz, ... "
    "or ROOT/sub-01/anat/sub-01_T1w.nii.gz, ...; set table, subject, target and images if yours differ"
)
_NO_VALUE = ("", "n/a", "na", "nan", "none", "null")


@dataclass(frozen=True)
class Image:
    """A file, whose it is, and its targets."""

    path: Path
    name: str
    subject: str
    targets: tuple[float, ...]


# The table.

Row = tuple[str, str]
"""Subject and session; the session is empty if the table has no column for it."""


def find_root(root: str | Path | None) -> Path:
    """The folder, if it is one.

    Raises:
        TensorDropoutError: if it is not, with the layout that is expected.
    """
    if root is None:
        raise TensorDropoutError(f"nifti: no folder given; set root. {LAYOUT}")
    base = Path(root).expanduser()
    if not base.is_dir():
        raise TensorDropoutError(f"nifti: there is no folder {base}. {LAYOUT}")
    return base


def find_table(root: Path, table: str | Path | None) -> Path:
    """The given table, or ROOT/participants.tsv, or the only table in ROOT.

    Raises:
        TensorDropoutError: if there is none, or more than one.
    """
    if table is not None:
        given = Path(table).expanduser()
        for path in (given, root / given):
            if path.is_file():
                return path
        raise TensorDropoutError(f"nifti: there is no table {given}, nor {root / given}")
    if (root / "participants.tsv").is_file():
        return root / "participants.tsv"
    tables = sorted(path for path in root.iterdir() if path.suffix in (".tsv", ".csv"))
    if len(tables) != 1:
        raise TensorDropoutError(f"nifti: {root} has {len(tables) or 'no'} tables; set table. {LAYOUT}")
    return tables[0]


def read_table(
    root: Path, table: str | Path | None, subject: str, targets: list[str]
) -> dict[Row, tuple[float, ...] | None]:
    """The targets of every row: (subject, session) -> numbers, or None where one is missing.

    Raises:
        TensorDropoutError: if a column is missing, a row is there twice, or a target is not a number.
    """
    path = find_table(root, table)
    columns, lines = _read_lines(path)
    for column in (subject, *targets):
        if column not in columns:
            raise TensorDropoutError(
                f"nifti: {path} has no {column!r} column, only {', '.join(columns)}; set target or subject"
            )
    rows: dict[Row, tuple[float, ...] | None] = {}
    for line in lines:
        key = _strip("sub-", line[subject]), _strip("ses-", line.get("session_id"))
        if key in rows:
            raise TensorDropoutError(f"nifti: {path} has two rows of subject {key[0]!r} {key[1]}; keep one")
        values = [_read_number(line[column], column, key[0], path) for column in targets]
        rows[key] = None if None in values else tuple(value for value in values if value is not None)
    return rows


def _read_lines(path: Path) -> tuple[list[str], list[dict[str, str | None]]]:
    """The columns of a table, and what each line has in them.

    A quote in a .tsv file is a character like others, as BIDS has it, so that a single one swallows no lines; those
    around a whole cell, as R writes them, are taken off.
    """
    with path.open(encoding="utf-8-sig", newline="") as stream:
        if path.suffix != ".tsv":
            lines = csv.DictReader(stream)
            return list(lines.fieldnames or []), list(lines)
        cells = [[_unquote(cell) for cell in line] for line in csv.reader(stream, "excel-tab", quoting=csv.QUOTE_NONE)]
    columns, *rest = [line for line in cells if line] or [[]]
    return columns, [dict(zip_longest(columns, line[: len(columns)])) for line in rest]


def _unquote(cell: str) -> str:
    return cell[1:-1] if len(cell) > 1 and cell[0] == cell[-1] == '"' else cell


def _strip(prefix: str, text: str | None) -> str:
    return (text or "").strip().removeprefix(prefix)


def _read_number(text: str | None, column: str, subject: str, path: Path) -> float | None:
    text = (text or "").strip()
    if text.lower() in _NO_VALUE:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise TensorDropoutError(
            f"nifti: {path}: {column} of subject {subject!r} is {text!r}, not a number, and only numbers can be "
            "predicted; correct it, name another column, or write n/a there and set missing='skip'"
        )
    return value


# Files and rows.


def list_files(root: Path, pattern: str) -> list[Path]:
    """The NIfTI files that match, as :func:`find_files` finds them.

    Raises:
        TensorDropoutError: if there are none, or of several kinds.
    """
    files = find_files(root, pattern)
    if not files:
        raise TensorDropoutError(f"nifti: {root} has no file that matches {pattern!r}. {LAYOUT}")
    kinds = list_kinds(files)
    if len(kinds) > 1:
        raise TensorDropoutError(
            f"nifti: {root} has several kinds of image ({', '.join(kinds[:5])}); choose one, e.g. "
            f"images='**/*_{kinds[0]}.nii*'"
        )
    return files


def find_files(root: Path, pattern: str) -> list[Path]:
    """The NIfTI files that match, without hidden folders, and without ``derivatives`` unless the pattern names it."""
    files = []
    for path in sorted(root.glob(pattern)):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts) or (
            "derivatives" in parts and "derivatives" not in pattern
        )
        if path.name.endswith((".nii", ".nii.gz")) and path.is_file() and not hidden:
            files.append(path)
    return files


def list_kinds(files: Sequence[Path]) -> list[str]:
    """What BIDS names say the images are: "T1w", "T2w", ..."""
    return sorted(
        {_stem(path).rpartition("_")[2] for path in files if path.name.startswith("sub-") and "_" in path.name}
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


def match_images(root: Path, rows: dict[Row, tuple[float, ...] | None], pattern: str, missing: str) -> list[Image]:
    """Every image with its subject and targets.

    Raises:
        TensorDropoutError: if an image has no row, a row has no image or a subject has no target, unless skipped.
    """
    images, strangers, valueless, seen = [], [], [], set()
    files = list_files(root, pattern)
    place = find_place([path.relative_to(root) for path in files], rows)
    for path in files:
        row = find_row(path.relative_to(root), rows, place)
        if row is None:
            strangers.append(path.relative_to(root).as_posix())
            continue
        seen.add(row)
        targets = rows[row]
        if targets is None:
            valueless.append(" ".join(row).strip())
        else:
            name = path.relative_to(root).with_name(_stem(path)).as_posix()
            images.append(Image(path, name, row[0], targets))
    alone = [" ".join(row).strip() for row in rows if row not in seen and rows[row] is not None]
    if missing == "error":
        _refuse("images without a row in the table", strangers)
        _refuse("subjects without an image", alone)
        _refuse("subjects without a target", valueless)
    if not images:
        raise TensorDropoutError(f"nifti: no image in {root} has a row with a target in the table. {LAYOUT}")
    return images


def find_place(paths: Sequence[Path], rows: dict[Row, Any]) -> int:
    """Where paths without "sub-" name the subject: -1 is the file's name, 0 the outermost folder, 1 the next, ...

    The place that names the most people: a visit or a site that is called as one of them names few.

    Example:
        >>> find_place([Path("7/1/T1.nii"), Path("8/1/T1.nii"), Path("1/1/T1.nii")], {("7", ""): 60.0, ("1", ""): 30.0})
        0
    """
    places = range(-1, max(len(path.parts) for path in paths) - 1)
    rows_of = {place: {find_row(path, rows, place) for path in paths} - {None} for place in places}
    return max(places, key=lambda place: len(rows_of[place]))


def find_row(path: Path, rows: dict[Row, Any], place: int = -1) -> Row | None:
    """The row that a file belongs to: by the word that names its subject, and by no other.

    That is the word with "sub-" in the file's name or, if there is none, in a folder's. Without "sub-" it is what is
    at the place of :func:`find_place`: a folder, or the file's name, of which it is all or the first word.

    Example:
        >>> find_row(Path("sub-07/ses-2/anat/sub-07_ses-2_T1w.nii.gz"), {("07", "1"): 60.0, ("07", "2"): 61.0})
        ('07', '2')
        >>> find_row(Path("99_1_T1.nii.gz"), {("1", ""): 60.0}) is None  # visit 1 of person 99
        True
    """
    stem, folders = _stem(path), path.parts[:-1]
    words = [*stem.split("_"), *folders]
    sessions = [_strip("ses-", word) for word in words if word.startswith("ses-")]
    named = [word for word in words if word.startswith("sub-")]
    words_of_file = [stem, (named or words)[0]] if named or place < 0 else list(folders[place : place + 1])
    for word in words_of_file:
        for session in (*sessions[:1], ""):
            row = (_strip("sub-", word), session)
            if row in rows:
                return row
    return None


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise TensorDropoutError(
            f"nifti: {len(names)} {what}: {', '.join(names[:5])}{more}; complete the folder or the table, or set "
            "missing='skip'"
        )


def describe_source(root: Path, images: list[Image]) -> str:
    """One sentence; name and licence are read from BIDS' ``dataset_description.json`` where there is one."""
    name, licence = root.resolve().name, "licence as stated by its owner"
    description = root / "dataset_description.json"
    if description.is_file():
        try:
            stated = json.loads(description.read_text(encoding="utf-8"))
            name, licence = str(stated.get("Name", name)), str(stated.get("License", licence))
        except (ValueError, AttributeError, OSError):
            warnings.warn(f"nifti: {description} is no readable JSON object; not used", stacklevel=2)
    people = len({image.subject for image in images})
    return f"{name}: {len(images)} NIfTI volumes of {people} people; {licence}."
