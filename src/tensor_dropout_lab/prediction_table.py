"""What ``tensor-dropout predict`` does for runs and fits alike: which files, the names of results, and their table."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import FileReader
from tensor_dropout_lab.figures import require_matplotlib
from tensor_dropout_lab.fitted_head import check_folder

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
COVERAGE = 0.9
"""Of intervals, where nothing else is asked for."""


@dataclass(frozen=True)
class FilePredictions:
    """What came of predicting files.

    Attributes:
        lines: to print: an answer for each file that could be predicted.
        written: the files that were written, the table first.
        failures: the files that could not be predicted, with the reason.
        count: how many files were asked for.
    """

    lines: list[str]
    written: list[Path]
    failures: dict[Path, str]
    count: int

    def raise_failures(self) -> None:
        """Raise if a file could not be predicted.

        Raises:
            TensorDropoutError: with the first reason, and where the others are.
        """
        if self.failures:
            raise TensorDropoutError(_describe_failures(self.failures, self.count, self.written[0]))


def format_uncertain(value: float, deviation: float | None) -> str:
    """A number to the second digit of its standard deviation; to four digits without one.

    Example:
        >>> format_uncertain(54.3127, 2.138), format_uncertain(1234.5, 210.0), format_uncertain(54.3127, None)
        ('54.3', '1234', '54.31')
    """
    if deviation is None or not (math.isfinite(deviation) and deviation > 0):
        return f"{value:.4g}"
    return f"{value:.{max(0, 1 - math.floor(math.log10(deviation)))}f}"


def check_coverage(coverage: float) -> None:
    """Refuse what is no share."""
    if not 0 < coverage < 1:
        raise TensorDropoutError(f"predict: --coverage is a share between 0 and 1, such as 0.9, got {coverage:g}")


def is_table_file(out: Path) -> bool:
    """Whether a table alone is asked for, not a folder.

    Raises:
        TensorDropoutError: if it is neither.
    """
    if out.suffix != ".csv" and out.exists() and not out.is_dir():
        raise TensorDropoutError(f"predict: --out is a folder or a .csv file, and {out} is another file")
    check_folder(out.parent if out.suffix == ".csv" else out, "predict")
    return out.suffix == ".csv"


def check_drawing() -> None:
    """Raise if matplotlib is missing.

    Raises:
        TensorDropoutError: with the ways out.
    """
    try:
        require_matplotlib()
    except TensorDropoutError as error:
        raise TensorDropoutError(f"{error}, or predict without pictures: --no-picture") from error


def list_files(given: list[Path], reader: FileReader) -> list[Path]:
    """The files named, and those in the folders named; of a folder of scans, what training would take of it."""
    paths: list[Path] = []
    for path in given:
        if path.is_dir():
            paths += reader.find(path)
        elif path.name.lower().endswith(ARCHIVES):
            raise TensorDropoutError(f"{path} is an archive; unpack it, and name the folder")
        elif path.is_file():
            paths.append(path)
        else:
            raise TensorDropoutError(f"there is no file {path}")
    if not paths:
        kinds = f"no scans or pictures that this network takes ({', '.join(reader.endings)})"
        raise TensorDropoutError(f"there are {kinds} in {', '.join(map(str, given))}")
    return paths


def name_results(paths: list[Path]) -> list[str]:
    """A name for the results of each file: its own without the ending, and a number where two are alike.

    Example:
        >>> name_results([Path("a/sub-01_T1w.nii.gz"), Path("b/cat.png"), Path("c/cat.jpg")])
        ['sub-01_T1w', 'cat', 'cat-2']
    """
    names: dict[str, None] = {}
    for path in paths:
        stem = path.name.removesuffix(".gz").removesuffix(".nii") if ".nii" in path.suffixes else path.stem
        name, number = stem, 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names[name] = None
    return list(names)


def refuse_overwriting(inputs: Sequence[Path], outputs: Sequence[Path]) -> None:
    """Refuse to write over what is to be predicted.

    Raises:
        TensorDropoutError: if a file is among both, under whatever names.
    """

    def identify(path: Path) -> tuple[int, int]:
        about = path.stat()
        return about.st_dev, about.st_ino

    given = {identify(path): path for path in inputs}
    for output in outputs:
        if output.exists() and identify(output) in given:
            raise TensorDropoutError(
                f"predict: {output} would overwrite the image {given[identify(output)]}; name another folder with --out"
            )


def list_rows(paths: list[Path], answers: list[dict[str, Any]], failures: dict[Path, str]) -> list[dict[str, Any]]:
    """A row for each file in its order; if one failed, all have the column ``error``, which is empty for the others."""
    if not failures:
        return answers
    given = iter(answers)
    columns = dict.fromkeys(answers[0] if answers else ["file"], "")
    return [
        {**columns, "file": str(path), "error": failures[path]} if path in failures else {**next(given), "error": ""}
        for path in paths
    ]


def add_records(rows: list[dict[str, Any]], names: list[str]) -> list[dict[str, Any]]:
    """The rows with the column ``record`` behind the file: its JSON, whose name has a number where files are alike."""
    return [
        {"file": row["file"], "record": "" if row.get("error") else f"{name}.json", **row}
        for row, name in zip(rows, names, strict=True)
    ]


def _describe_failures(failures: dict[Path, str], count: int, table: Path) -> str:
    names = ", ".join(str(path) for path in list(failures)[:3]) + (", …" if len(failures) > 3 else "")
    first = next(iter(failures.values()))
    return (
        f"predict: {len(failures)} of {count} files could not be predicted: {names}; the first because {first}; the "
        f"reason of each is in the column error of {table}"
    )


def write_table(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with equal columns as CSV, whole or not at all."""
    with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
