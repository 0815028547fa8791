"""The command: options, and what is run and written."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from finetuning.data import SETS, Group, decode
from finetuning.running import ORDER, SIZES, SPLITS, Plan, list_groups, run_groups, time_steps
from finetuning.tables import RECORD, read_record, write_report
from finetuning.training import Execution
from tensor_dropout_lab.run_records import handing_on_the_command

SIDE, POOL = 224, 7
STEPS = {100: 150, 400: 300}
QUICK = {"side": 56, "pool": 2, "steps": {20: 3}, "n_test": 20}
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="finetuning.py",
        description="Runs results/finetuning-plan.md, or what is missing of it, and prints tables.",
    )
    parser.add_argument("--data", type=Path, help="the folder that holds wings and faces (images.tar, points.csv)")
    parser.add_argument("--sets", nargs="+", choices=(*SETS, "retina"), default=SETS)
    parser.add_argument("--n", nargs="+", type=int, choices=SIZES, default=SIZES)
    parser.add_argument("--splits", nargs="+", type=int, default=SPLITS)
    parser.add_argument("--methods", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--device", default="cpu", help="such as cuda (default: cpu)")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side (default: 1)")
    parser.add_argument("--minutes", type=float, default=60, help="when it ends, done or not (default: 60)")
    parser.add_argument("--steps", type=float, default=1.0, help="a factor for the number of steps (default: 1)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the backbone's arithmetic in training")
    parser.add_argument("--channels-last", action="store_true", help="the layout of images")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--streams", type=int, default=4, help="settings side by side on a GPU (default: 4)")
    parser.add_argument("--record", type=Path, help=f"gets a line for each cell (default: {RECORD})")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--report", action="store_true", help="only tables, of the cells asked for")
    parser.add_argument(
        "--quick", action="store_true", help="20 images of 56 pixels, three steps, one split; into --out"
    )
    parser.add_argument("--time", action="store_true", help="only time a step, computed in several ways")
    parser.add_argument("--fastest", action="store_true", help="time a step first, and run in the fastest way")
    return parser


def make_plan(options: argparse.Namespace, images: Path, record: Path) -> Plan:
    """What all cells share."""
    steps = {n: max(1, round(options.steps * count)) for n, count in STEPS.items()}
    size = QUICK if options.quick else {"side": SIDE, "pool": POOL, "steps": steps, "n_test": None}
    execution = Execution(DTYPES[options.dtype], options.channels_last, not options.eager, options.streams)
    return Plan(options.data, images, record, **size, device=options.device, execution=execution)


def choose_groups(options: argparse.Namespace) -> list[Group]:
    """What was asked for; one small group of each set with --quick."""
    if options.quick:
        return list_groups(options.sets, list(QUICK["steps"]), [0])
    return list_groups(options.sets, options.n, options.splits)


def list_executions() -> list[Execution]:
    """What is timed, the plainest first."""
    return [
        Execution(),
        *(
            Execution(dtype, channels_last, graph=True, streams=4)
            for dtype in DTYPES.values()
            for channels_last in (False, True)
        ),
    ]


def choose_fastest(times: dict[Execution, float]) -> Execution:
    """Of those that worked."""
    if not times:
        raise SystemExit("finetuning.py: no way to compute a step worked; the lines above say why")
    fastest = min(times, key=lambda execution: times[execution])
    print(f"fastest: {fastest}", file=sys.stderr, flush=True)
    return fastest


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where a cell failed or was not reached."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    record = options.record or (options.out / "finetuning.jsonl" if options.quick else RECORD)
    groups, good = choose_groups(options), True
    if not options.report:
        if options.data is None:
            parser.error("--data says where the sets are")
        ends = time.monotonic() + 60 * options.minutes
        with tempfile.TemporaryDirectory(prefix="finetuning-") as folder, handing_on_the_command():
            plan = make_plan(options, Path(folder), record)
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as beside:
                timing = beside.submit(time_steps, plan, list_executions()) if options.time or options.fastest else None
                if not options.time:
                    decode(plan.data, plan.images, groups, plan.side, plan.n_test, options.jobs)
                if timing is not None:
                    plan = replace(plan, execution=choose_fastest(timing.result()))
            if options.time:
                return 0
            good = run_groups(groups, options.methods, plan, options.jobs, ends - time.monotonic())
    rows = {
        cell: row
        for cell, row in read_record(record).items()
        if cell.method in options.methods
        and any((g.set, g.n, g.split) == (cell.set, cell.n, cell.split) for g in groups)
    }
    if not rows:
        parser.exit(1, f"finetuning.py: {record} has none of these cells\n")
    print(write_report(rows))
    return 0 if good else 1
