"""The command: options, and what is run and written."""

from __future__ import annotations

import argparse
from pathlib import Path

from position_heads import surface
from position_heads.data import FINALIST_SIZES, MAPS, SETS, SIZES, map_file
from position_heads.gradient import STEPS
from position_heads.running import HEADS, list_tasks, read_record, run_tasks
from position_heads.tables import PICTURE, RECORD, draw, write_report
from tensor_dropout_lab.run_records import handing_on_the_command

QUICK = {"n_folds": 2, "steps": 12}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="position_heads.py",
        description="Runs results/position-plan.md, or what is missing of it, and prints tables.",
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--backbones", nargs="+", choices=MAPS, default=tuple(MAPS))
    parser.add_argument(
        "--n", nargs="+", type=int, choices=(*SIZES, *FINALIST_SIZES), default=SIZES,
        help=f"{FINALIST_SIZES[1]}: all images that are not tested",
    )  # fmt: skip
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=HEADS, metavar="HEAD", help=", ".join(HEADS))
    parser.add_argument("--device", default="cpu", help="such as cuda (default: cpu); closed forms stay on the CPU")
    parser.add_argument("--jobs", type=int, default=1, help="heads side by side, a process each (default: 1)")
    parser.add_argument("--minutes", type=float, default=600, help="when it ends, done or not (default: 600)")
    parser.add_argument("--features", type=Path, default=Path("out/features"), help="default: out/features")
    parser.add_argument("--record", type=Path, help=f"gets a line for each head of a group (default: {RECORD})")
    parser.add_argument("--picture", type=Path, help=f"default: {PICTURE}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--quick", action="store_true", help="retina, n = 50, two folds, twelve steps; into --out")
    parser.add_argument(
        "--surface", action="store_true", help=f"CP over rank, θ and α at n = {surface.N} instead of heads"
    )
    parser.add_argument("--report", action="store_true", help="only tables and the picture, of what was asked for")
    return parser


def report_surface(options: argparse.Namespace) -> int:
    """Fits over rank, θ and α, then their tables and the picture."""
    folder = options.out if options.quick else Path()
    record, picture = (folder / (path.name if options.quick else path) for path in (surface.RECORD, surface.PICTURE))
    smaller = {"ranks": (4, surface.GENEROUS), "n": 50, "n_folds": 2} if options.quick else {}
    sets = ("retina",) if options.quick else options.sets
    record, picture = options.record or record, options.picture or picture
    if not options.report:
        with handing_on_the_command():
            surface.run(sets, options.features, record, device=options.device, **smaller)
    rows = [row for row in surface.read_record(record) if row["set"] in sets]
    for part in ("strategies", "effective ranks"):
        print(surface.render(part, rows) + "\n")
    picture.parent.mkdir(parents=True, exist_ok=True)
    surface.draw(rows, picture)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 where a head failed or was not reached."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.surface:
        return report_surface(options)
    if options.quick:
        options.sets, options.backbones, options.n = ("retina",), ("efficientnet",), (50,)
    record = options.record or (options.out / RECORD.name if options.quick else RECORD)
    picture = options.picture or (options.out / PICTURE.name if options.quick else PICTURE)
    tasks, good = list_tasks(options.sets, options.backbones, options.n, options.heads), True
    files = sorted({map_file(options.features, task.group) for task in tasks})
    missing = [str(path) for path in files if not path.exists()]
    if missing and not options.report:
        parser.exit(1, f"position_heads.py: {', '.join(missing)} missing; make them with features.py, beside "
                       "benchmarks/estimators/position.py, or leave that backbone out by --backbones\n")  # fmt: skip
    if not options.report:
        smaller = QUICK if options.quick else {"n_folds": None, "steps": STEPS}
        with handing_on_the_command():
            good = run_tasks(
                tasks, options.features, record, device=options.device, jobs=options.jobs, minutes=options.minutes,
                **smaller,
            )  # fmt: skip
    found = read_record(record)
    found = {task: found[task] for task in tasks if task in found}
    if not found:
        parser.exit(1, f"position_heads.py: {record} has none of these\n")
    print(write_report(found))
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(found, picture)
    return 0 if good else 1
