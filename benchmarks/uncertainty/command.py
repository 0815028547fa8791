"""The command line of benchmarks/uncertainty.py."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

from tensor_dropout_lab.run_records import handing_on_the_command
from uncertainty import running, tables, timing
from uncertainty.images import compute_maps


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="uncertainty.py", description="Runs results/uncertainty-plan.md.")
    parser.add_argument("--sets", nargs="+", choices=running.SETS, default=running.SETS)
    parser.add_argument("--n", nargs="+", type=int, choices=running.SIZES, default=running.SIZES[:1])
    parser.add_argument("--features", type=Path, default=Path("out/features"), help="default: out/features")
    parser.add_argument("--scans", type=Path, help="IXI's scans and participants.tsv, for ixi")
    parser.add_argument("--root", type=Path, help="the folder that holds cifar-100-python; makes its maps, and ends")
    parser.add_argument("--minutes", type=float, default=600, help="begin no cell after so many (default: 600)")
    parser.add_argument("--time", action="store_true", help=f"only times and memory, into {timing.RECORD}")
    parser.add_argument("--report", action="store_true", help="only the tables")
    parser.add_argument("--quick", action="store_true", help="one cell of simulated data, into --out")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--record", type=Path, help=f"default: {running.RECORD}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.root is not None:
        compute_maps(options.root, options.features / running.CIFAR)
        return 0
    record = options.record or (options.out / running.RECORD.name if options.quick else running.RECORD)
    with handing_on_the_command():
        if options.time:
            timing.run_timing(options.record or timing.RECORD)
            return 0
        if not options.report:
            run(options, record)
    print_tables(record)
    return 0


def run(options: argparse.Namespace, record: Path) -> None:
    """What the record does not have."""
    if not running.have_others():
        print("laplace-torch or vbll is not installed: see benchmarks/uncertainty-requirements.txt", file=sys.stderr)
    if running.IXI in options.sets and options.scans is None and not options.quick:
        print("no --scans: ixi is left out", file=sys.stderr)
        options.sets = [name for name in options.sets if name != running.IXI]
    cells = [running.QUICK] if options.quick else running.list_cells(options.sets, options.n)
    running.run_cells(cells, record, options.features, options.scans, options.minutes)


def print_tables(record: Path) -> None:
    rows = running.read_record(record)
    groups, draws = tables.group_rows(rows), tables.draws_of(rows)
    for part in (*(tables.PARTS if groups else ()), *(tables.CLASS_PARTS if draws else ())):
        print(f"## {part}\n\n{tables.render_rows(part, rows)}\n")
