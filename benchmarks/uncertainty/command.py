"""The command line of benchmarks/uncertainty.py."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

import torch

from tensor_dropout_lab.run_records import handing_on_the_command
from uncertainty import running
from uncertainty.images import compute_maps


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="uncertainty.py", description="Runs results/uncertainty-plan.md.")
    parser.add_argument("--sets", nargs="+", choices=running.SETS, default=running.SETS)
    parser.add_argument("--n", nargs="+", type=int, choices=running.SIZES, default=running.SIZES[:1])
    parser.add_argument("--features", type=Path, default=Path("out/features"), help="default: out/features")
    parser.add_argument("--scans", type=Path, help="IXI's scans and participants.tsv, for ixi")
    parser.add_argument("--root", type=Path, help="the folder that holds cifar-100-python; makes its maps, and ends")
    parser.add_argument("--minutes", type=float, default=600, help="begin no cell after so many (default: 600)")
    parser.add_argument("--record", type=Path, default=running.RECORD, help=f"default: {running.RECORD}")
    return parser


def main(arguments: list[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.root is not None:
        compute_maps(options.root, options.features / running.CIFAR)
        return 0
    if running.IXI in options.sets and options.scans is None:
        print("no --scans: ixi is left out", file=sys.stderr)
        options.sets = [name for name in options.sets if name != running.IXI]
    cells = running.list_cells(options.sets, options.n)
    with handing_on_the_command():
        running.run_cells(cells, options.record, options.features, options.scans, options.minutes)
    return 0
