"""The pictures of a folder: which there are, how large, in which groups; and their bytes, never those of other files.

Pictures are listed once, at the start. A client names them by number, so no path comes from outside.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some
from tensor_dropout_lab.data.image_files import PICTURES
from tensor_dropout_lab.labelling.pictures import has_further_pages, measure_picture
from tensor_dropout_lab.labelling.words import count_of

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".7z", ".rar")
OTHER_PICTURES = (".gif", ".heic", ".heif", ".avif", ".jp2", ".svg")
"""Pictures that are not read; they are named, for a person would look for them."""
TIFF = (".tif", ".tiff")
OUTSIDE = "a link out of the folder"


@dataclass(frozen=True)
class Picture:
    """A file that may be shown.

    Attributes:
        name: its path in the folder, with slashes.
        width: in pixels, upright; 0 if it cannot be read.
        height: likewise.
        group: what it belongs to, such as a specimen; None without groups.
        problem: why it cannot be read; None if it can.
        more_pages: it has pages behind the first, which are not shown.
    """

    name: str
    width: int = 0
    height: int = 0
    group: str | None = None
    problem: str | None = None
    more_pages: bool = False


@dataclass(frozen=True)
class PictureFolder:
    """Pictures in the order of their names.

    Attributes:
        path: the folder, without links.
        pictures: what is in it.
        passed_over: files that are pictures by their ending, of formats that are not read.
    """

    path: Path
    pictures: list[Picture]
    passed_over: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.pictures)

    @property
    def names(self) -> list[str]:
        """The paths in the folder."""
        return [picture.name for picture in self.pictures]

    def with_groups(self, groups: Sequence[str | None]) -> PictureFolder:
        """The same pictures, each with its group."""
        pictures = [replace(picture, group=group) for picture, group in zip(self.pictures, groups, strict=True)]
        return replace(self, pictures=pictures)

    def find(self, number: int) -> Path:
        """The file of a picture, looked up anew: it may have become a link meanwhile.

        Raises:
            TensorDropoutError: if it is gone, or leads out of the folder.
        """
        name = self.pictures[number].name
        try:
            return find_inside(self.path, name)
        except TensorDropoutError as error:
            raise TensorDropoutError(f"{name} cannot be read: {error}") from error


def list_pictures(folder: Path, out: Path) -> PictureFolder:
    """The pictures of a folder and the folders in it; hidden ones and those in ``out`` are left out.

    Links are followed to files in the folder only. What cannot be read is listed with its problem.

    Raises:
        TensorDropoutError: if there is no such folder, or nothing in it that looks like a picture.
    """
    if not folder.is_dir():
        what = "is a file; name the folder that it is in" if folder.exists() else "does not exist"
        if folder.is_file() and folder.name.lower().endswith(ARCHIVES):
            what = "is an archive; unpack it: label takes a folder"
        raise TensorDropoutError(f"label: the folder {folder} {what}")
    root = folder.resolve()
    found = _find_names(root, out.resolve(), PICTURES + OTHER_PICTURES)
    names = [name for name in found if name.lower().endswith(PICTURES)]
    others = tuple(name for name in found if not name.lower().endswith(PICTURES))
    if not names:
        endings = ", ".join(ending.removeprefix(".") for ending in PICTURES)
        passed = f"; {describe_passed_over(others)}" if others else ""
        raise TensorDropoutError(f"label: there are no pictures in {folder} ({endings}){passed}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return PictureFolder(root, list(pool.map(lambda name: _inspect(root, name), names)), others)


def describe_passed_over(names: Sequence[str]) -> str:
    """A sentence about pictures of formats that are not read."""
    endings = sorted({PurePosixPath(name).suffix.lower() for name in names})
    were = "were" if len(names) != 1 else "was"
    what = f"{count_of(len(names), 'file')} {were} passed over by ending ({', '.join(endings)})"
    return f"{what}: save as PNG, JPEG or TIFF what is to be labelled"


def _find_names(root: Path, out: Path, endings: tuple[str, ...]) -> list[str]:
    names = []
    for place, folders, files in os.walk(root):
        folders[:] = [each for each in folders if not each.startswith(".") and Path(place, each) != out]
        inside = Path(place).relative_to(root)
        wanted = (file for file in files if file.lower().endswith(endings) and not file.startswith("."))
        names += [(inside / file).as_posix() for file in wanted]
    return sorted(names, key=_natural)


def _natural(name: str) -> tuple[list[tuple[int, int, str]], str]:
    """The order in which a person counts: 2.jpg before 10.jpg."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part[0] in "0123456789" else (1, 0, part.lower()) for part in parts], name


def _inspect(root: Path, name: str) -> Picture:
    """Its size, from the header alone."""
    spelled = os.fsencode(name).decode(errors="backslashreplace")
    if spelled != name:  # bytes that are no text can be in no table and on no page
        return Picture(spelled, problem="its name is no text in UTF-8; rename it")
    try:
        path = find_inside(root, name)
        width, height = measure_picture(path)
    except TensorDropoutError as error:
        return Picture(name, problem=str(error).replace(f"{root}{os.sep}", ""))
    more_pages = name.lower().endswith(TIFF) and has_further_pages(path)
    return Picture(name, int(width), int(height), more_pages=more_pages)


def find_inside(root: Path, name: str) -> Path:
    """The real path of a plain file below a folder; links are followed only where they end in the folder.

    Args:
        root: the folder, without links.
        name: the path in it.

    Raises:
        TensorDropoutError: if it is somewhere else, gone, or no plain file.
    """
    real = Path(os.path.realpath(root / name))
    if not real.is_relative_to(root):
        raise TensorDropoutError(OUTSIDE)
    if not real.is_file():
        raise TensorDropoutError("no plain file" if real.exists() else "there is no such file")
    return real


# Groups.


def read_groups(path: Path, names: Sequence[str]) -> list[str | None]:
    """The group of every picture, from a CSV with the columns file and group.

    Raises:
        TensorDropoutError: if it is not such a table, or lacks a picture.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            rows = list(csv.DictReader(stream, skipinitialspace=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise TensorDropoutError(f"--groups {path} is not a CSV in UTF-8 ({error})") from error
    except OSError as error:
        raise TensorDropoutError(f"--groups {path} cannot be read ({error.strerror})") from error
    if not rows or not {"file", "group"} <= rows[0].keys():
        raise TensorDropoutError(f"--groups {path}: a table with the columns file and group is expected")
    groups = {(row["file"] or "").strip(): (row["group"] or "").strip() for row in rows}
    lacking = [name for name in names if not groups.get(name)]
    if lacking:
        raise TensorDropoutError(
            f"--groups {path}: {len(lacking)} of {len(names)} pictures have no group: {name_some(lacking)}; give each "
            "a row"
        )
    return [groups[name] for name in names]


def match_groups(pattern: str, names: Sequence[str]) -> list[str | None]:
    r"""The group of every picture, found in its name by a regular expression: its first bracket, or all of it.

    Raises:
        TensorDropoutError: if it is no regular expression, or does not match all names.

    Example:
        >>> match_groups(r"(.*)_\d+", ["fly1_2.jpg", "fly2_2.jpg"])
        ['fly1', 'fly2']
    """
    try:
        expression = re.compile(pattern)
    except re.error as error:
        raise TensorDropoutError(f"--group-pattern {pattern!r} is no regular expression ({error})") from error
    found = [expression.search(name) for name in names]
    lacking = [name for name, match in zip(names, found, strict=True) if match is None]
    if lacking:
        raise TensorDropoutError(
            f"--group-pattern {pattern!r} does not match {len(lacking)} of {len(names)} names: {name_some(lacking)}"
        )
    groups = [match.group(min(1, expression.groups)) if match else None for match in found]
    empty = [name for name, group in zip(names, groups, strict=True) if not group]
    if empty:
        raise TensorDropoutError(
            f"--group-pattern {pattern!r} names no group in {len(empty)} of {len(names)} names: {name_some(empty)}"
        )
    return groups
