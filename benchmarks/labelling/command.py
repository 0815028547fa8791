"""The command: options, and what is run and written."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

from labelling import data, shape_predictor
from labelling.running import DLIB, LOOP, PARTS, STAGE, Cell, list_cells, read_record, run_cells
from labelling.tables import PICTURE, RECORD, TABLES, draw, render
from tensor_dropout_lab.run_records import handing_on_the_command

QUICK = [Cell(LOOP, data.SIMULATED, method, 24, 0) for method in ("two stages", "first stage alone")]
QUICK += [Cell(STAGE, data.SIMULATED, "two stages", 24, 0)]
PICTURES = Path("../shared/data/position")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="labelling.py", description="Runs results/labelling-plan.md, or what is missing of it, and prints tables."
    )
    parser.add_argument("--sets", nargs="+", choices=data.SETS, default=data.SETS)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--features", type=Path, default=Path("out/features"), help="default: out/features")
    parser.add_argument(
        "--pictures", type=Path, default=PICTURES, help="for dlib: the folder that holds wings and faces"
    )
    parser.add_argument("--maps", type=Path, metavar="PICTURES", help="only make the maps of the early layer, and end")
    parser.add_argument("--minutes", type=float, default=600, help="begin no cell after so many (default: 600)")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}")
    parser.add_argument("--picture", type=Path, help=f"default: {PICTURE}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--report", action="store_true", help="only tables and the picture")
    parser.add_argument("--quick", action="store_true", help="24 simulated pictures; into --out")
    return parser


def main(arguments: list[str] | None = None) -> int:
    """0; 2 where something is missing."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.maps:
        data.make_fine_maps(options.maps, options.features)
        return 0
    record = options.record or (options.out / RECORD.name if options.quick else RECORD)
    picture = options.picture or (options.out / PICTURE.name if options.quick else PICTURE)
    cells = QUICK if options.quick else list_cells(options.sets, options.parts)
    missing = sorted(
        str(path) for name in {cell.set for cell in cells} & set(data.SETS) for file in (data.COARSE, data.FINE)
        if not (path := options.features / name / file).exists()
    )  # fmt: skip
    if missing and not options.report:
        parser.error(f"{', '.join(missing)} missing; make them with benchmarks/estimators/features.py, and --maps")
    if not shape_predictor.is_there() and any(cell.part == DLIB for cell in cells) and not options.report:
        print("dlib is not installed: its cells are left out", file=sys.stderr)
        cells = [cell for cell in cells if cell.part != DLIB]
    torch.set_num_threads(1)
    if not options.report:
        warnings.simplefilter("ignore", UserWarning)
        with handing_on_the_command():
            run_cells(cells, record, options.features, options.pictures, options.minutes)
    found = {cell: row for cell, row in read_record(record).items() if cell in cells or options.report}
    if not found:
        parser.error(f"{record} has none of these cells")
    for part in TABLES:
        print(f"## {part}\n\n{render(part, found)}\n")
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(found, picture)
    return 0
