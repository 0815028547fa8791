"""The cells of the plan, and the record: a line for each."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from position import append

from labelling import shape_predictor, speed
from labelling.data import SETS, draw_images
from labelling.loop import METHODS, OURS, RIDGE, run_loop, run_slips, run_stage
from tensor_dropout_lab.run_records import describe_environment

LOOP, STAGE, DLIB, SLIP, SPEED = "loop", "stage", "dlib", "slips", "speed"
PARTS = (LOOP, STAGE, DLIB, SLIP, SPEED)
RUNS, IMAGES = 5, 300
SIZES = (50, 100, 200)
LABELLED = 100
"""Of the cells with slips, and of those that are timed."""
DLIB_SETS, DLIB_RUNS = ("wings", "faces"), 3
TIMED = "wings"


@dataclass(frozen=True, order=True)
class Cell:
    """One line of the record.

    Attributes:
        part: one of :data:`PARTS`.
        set: of images.
        method: what is measured.
        n: how many images are labelled.
        run: which draw.
    """

    part: str
    set: str
    method: str
    n: int
    run: int


def list_cells(sets: Sequence[str] = SETS, parts: Sequence[str] = PARTS, runs: int = RUNS) -> list[Cell]:
    """What the plan asks for, first runs first: an unfinished record has all methods of few runs."""
    cells = []
    for run, name in product(range(runs), sets):
        cells += [Cell(LOOP, name, method, IMAGES, run) for method in METHODS]
        cells += [Cell(STAGE, name, method, n, run) for n in SIZES for method in (OURS, RIDGE)]
        cells += [Cell(SLIP, name, OURS, LABELLED, run)]
        if name == TIMED and run < DLIB_RUNS:
            cells.append(Cell(SPEED, name, OURS, LABELLED, run))
        if name in DLIB_SETS and run < DLIB_RUNS:
            cells += [Cell(DLIB, name, DLIB, n, run) for n in SIZES]
    return sorted((cell for cell in cells if cell.part in parts), key=lambda cell: PARTS.index(cell.part))


def run_cell(cell: Cell, features: Path, pictures: Path) -> dict[str, Any]:
    """What one cell measures."""
    if cell.part == SPEED:
        return speed.run(features, cell.set, cell.n, cell.run)
    size = {LOOP: cell.n, SLIP: cell.n}.get(cell.part, cell.n + IMAGES)
    images = draw_images(features, cell.set, size, cell.run)
    if cell.part == LOOP:
        return run_loop(images, cell.set, cell.method, cell.run)
    if cell.part == STAGE:
        return run_stage(images, cell.n, cell.set, cell.method, cell.run)
    if cell.part == SLIP:
        return run_slips(images, cell.n, cell.set, cell.run)
    return shape_predictor.run(images, cell.n, cell.set, pictures)


def read_record(path: Path) -> dict[Cell, dict[str, Any]]:
    """The finished cells."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return {Cell(row["part"], row["set"], row["method"], row["n"], row["run"]): row for row in rows}


def run_cells(cells: Sequence[Cell], record: Path, features: Path, pictures: Path, minutes: float) -> None:
    """What the record does not have, until the time is over."""
    done, ends = read_record(record), time.monotonic() + 60 * minutes
    waiting = [cell for cell in cells if cell not in done]
    for number, cell in enumerate(waiting, 1):
        if time.monotonic() > ends:
            print(f"ended after {minutes:g} minutes, {len(waiting) - number + 1} cells are left", file=sys.stderr)
            return
        began, cpu = time.perf_counter(), time.process_time()
        row = run_cell(cell, features, pictures)
        times = {"wall_seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        environment = describe_environment("scikit-learn", "numpy", "torch")
        append(record, {**asdict(cell), **row, **times, "environment": environment})
        print(f"{number} of {len(waiting)}: {cell}, {times['wall_seconds']:.0f} s", file=sys.stderr, flush=True)
