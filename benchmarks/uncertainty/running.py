"""Cell by cell, and the record: a line for each."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import intervals
from position import append

from tensor_dropout_lab.run_records import describe_environment
from uncertainty.images import DRAWS

RECORD = Path("results/uncertainty.jsonl")
POSITIONS, IXI, CIFAR, SIMULATED = ("wings", "retina", "faces"), "ixi", "cifar100", "simulated"
SETS = (*POSITIONS, IXI, CIFAR)
SIZES = (100, 400)
ENSEMBLES = 5
"""Splits in which ensembles are fitted."""
OTHERS = ("laplace", "vbll")
MODULES = {"scikit-learn": "sklearn", "laplace-torch": "laplace", "curvlinops-for-pytorch": "curvlinops"}
VERSIONS = ("scikit-learn", "numpy", "scipy", "laplace-torch", "vbll", "curvlinops-for-pytorch")


@dataclass(frozen=True, order=True)
class Cell:
    """A set, a number of training samples and a split; of CIFAR-100 the labels of a class that are fitted on."""

    set: str
    n: int
    split: int


QUICK = Cell(SIMULATED, 40, 0)
"""To see that it runs."""


def list_cells(sets: Sequence[str] = SETS, sizes: Sequence[int] = SIZES) -> list[Cell]:
    """What the plan asks for, in the order in which it is dropped last to first."""
    cells = [Cell(name, 100, split) for name in POSITIONS for split in range(ENSEMBLES)]
    cells += [Cell(CIFAR, 20, draw) for draw in range(DRAWS)]
    cells += [Cell(IXI, intervals.PEOPLE, fold) for fold in range(5)]
    cells += [Cell(name, 100, split) for name in POSITIONS for split in range(ENSEMBLES, 10)]
    cells += [Cell(name, 400, split) for name in POSITIONS for split in range(5)]
    return [cell for cell in cells if cell.set in sets and (cell.n in sizes or cell.set not in POSITIONS)]


def have_others() -> bool:
    """Whether laplace-torch and vbll are installed."""
    return all(find_spec(name) is not None for name in OTHERS)


def run_cell(cell: Cell, features: Path, scans: Path | None) -> dict[str, Any]:
    """All methods of a cell."""
    if cell.set == CIFAR:
        from uncertainty.classes import run_classes
        from uncertainty.images import load_draw

        return run_classes(load_draw(features / CIFAR, cell.split), others=have_others())
    from uncertainty.methods import run_regression

    asked = intervals.Cell(cell.set, cell.n, cell.split)
    if cell.set == SIMULATED:
        return run_regression(intervals.simulate(asked, n_test=60), ensemble=False, others=have_others())
    data = intervals.load(asked, features, scans)
    ensemble = cell.n == SIZES[0] and cell.split < ENSEMBLES
    return run_regression(data, ensemble=ensemble, noise=cell.set != IXI, others=have_others())


def list_versions() -> list[str]:
    """What the numbers depend on, as far as it is installed."""
    return [name for name in VERSIONS if find_spec(MODULES.get(name, name)) is not None]


def read_record(path: Path) -> dict[Cell, dict[str, Any]]:
    """The finished cells."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {Cell(row["set"], row["n"], row["split"]): row for row in rows}


def run_cells(cells: Sequence[Cell], record: Path, features: Path, scans: Path | None, minutes: float) -> None:
    """What the record does not have, until the time is over."""
    done, ends = read_record(record), time.monotonic() + 60 * minutes
    for cell in cells:
        if cell in done:
            continue
        if time.monotonic() > ends:
            print(f"ended after {minutes:g} minutes", file=sys.stderr)
            return
        row = run_cell(cell, features, scans)
        append(record, {**asdict(cell), **row, "environment": describe_environment(*list_versions())})
        seconds = {name: round(value, 1) for name, value in row["seconds"].items()}
        print(f"{cell.set}, n = {cell.n}, split {cell.split}: {seconds}", file=sys.stderr, flush=True)
