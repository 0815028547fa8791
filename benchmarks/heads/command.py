"""The command: options, one-sentence errors, and what is written where."""

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from heads import peak
from heads.cases import CASES, SUITE
from heads.contenders import list_names, select_contenders
from heads.drawing import draw
from heads.running import Bench, Settings, describe_failure, run_all, start_record
from heads.tables import write_report
from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.run_records import write_json

DESCRIPTION = """\
Times our heads, pooled linear, flatten + linear, TensorLy-Torch and a hand-written einsum in one interleaved run:
medians with their spread, memory, bytes kept for backward, the ratio to the bytes that must move, and how time grows.
Our heads are compared with their dense weights in float64 first; one that is wrong is not timed. Writes
heads-DEVICE.json (every number and the environment), .md (tables), .png and .svg, after an interruption as well.
"""
EPILOG = """\
examples:
  python benchmarks/heads.py                                        the CPU suite: minutes on two cores
  python benchmarks/heads.py --quick                                half a minute
  python benchmarks/heads.py --cases cifar --batches 64 --modes eager,compiled
  python benchmarks/heads.py --device cuda --modes eager,graph --dtype float32,bfloat16
  python benchmarks/heads.py --redraw out/bench/heads-cpu.json      tables and figure from the record

The training step of whole networks is timed by benchmarks/training.py.
"""
QUICK = {"cases": ["cifar"], "batches": [8, 16, 64], "growth": [], "memory": False, "repeats": 7, "seconds": 0.5}
DTYPES, PASSES, LAYOUTS = ("float32", "bfloat16"), ("forward", "both"), ("first", "last")
MODES = ("eager", "compiled", "graph", "compiled-graph")


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def choices(*allowed: str) -> Any:
    """An argument type: some of these names, separated by commas."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in allowed]
        if unknown or not names:
            raise argparse.ArgumentTypeError(
                f"got {', '.join(unknown) or 'nothing'!r}, choose from {', '.join(allowed)}"
            )
        return list(dict.fromkeys(names))

    return parse


def numbers(text: str) -> list[int]:
    """An argument type: positive whole numbers, separated by commas."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"takes positive whole numbers separated by commas, got {text!r}")
    return sorted({int(part) for part in parts})


def positive(kind: type) -> Any:
    """An argument type: a positive number."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"takes a positive number, got {text!r}")
        return value

    return parse


def make_parser() -> Parser:
    parser = Parser("heads.py", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--cases", type=choices(*CASES), help=f"from {','.join(CASES)} (default: {','.join(SUITE)})")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    add("--dtype", type=choices(*DTYPES), default=["float32"], help="of x and of the parameters: float32,bfloat16")
    add("--batches", type=numbers, help="default: 1,8,64,512; on the CPU up to 64 for the larger heads")
    add(
        "--headline",
        type=numbers,
        default=[64],
        help="batches of R-TRLs, compiled passes and CPU peak memory (default: 64)",
    )
    add(
        "--passes",
        type=choices(*PASSES),
        default=list(PASSES),
        help="forward, and both = forward + backward (default: both of them)",
    )
    add(
        "--modes",
        type=choices(*MODES),
        help="eager, compiled; on CUDA graph, compiled-graph\n(default: eager, compiled for cifar; CUDA: eager,graph)",
    )
    add("--layout", type=choices(*LAYOUTS), default=["first"], help="channels first or last in memory (default: first)")
    add("--contenders", type=choices(*list_names()), help=f"some of {', '.join(list_names())}")
    add(
        "--growth",
        type=choices("rank", "modes", "none"),
        help="what to grow besides the batch: rank,modes or none (default: rank,modes)",
    )
    add("--no-memory", action="store_true", help="do not measure the CPU's peak memory (a process per contender)")
    add("--repeats", type=positive(int), help="rounds per cell at most (default: 15)")
    add("--seconds", type=positive(float), help="seconds per cell, after which no new round begins (default: 2)")
    add("--threads", type=positive(int), help="CPU threads (default: torch's own choice)")
    add("--quick", action="store_true", help="one head, three batches, few rounds: half a minute")
    add("--out", type=Path, default=Path("out/bench"), help="folder of the results (default: out/bench)")
    add("--redraw", type=Path, metavar="JSON", help="measure nothing: tables and figure of this record, beside it")
    add("--peak", help=argparse.SUPPRESS)  # the process that measures one contender's peak memory
    return parser


def choose_settings(parser: Parser, options: argparse.Namespace) -> Settings:
    """The settings of a run: what is asked for, else what --quick says, else the suite."""
    cuda = options.device == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and torch sees none here")
    default = {
        "cases": list(SUITE),
        "batches": None,
        "growth": ["rank", "modes"],
        "memory": True,
        "repeats": 15,
        "seconds": 2.0,
    }
    default |= QUICK if options.quick else {}
    modes = options.modes or (["eager"] if options.quick and not cuda else None)
    graphs = [mode for mode in modes or [] if mode.endswith("graph")]
    if graphs and not cuda:
        parser.error(f"--modes {graphs[0]} needs --device cuda")
    for key in options.cases or default["cases"]:
        if not select_contenders(CASES[key], options.contenders):
            parser.error(f"--contenders {','.join(options.contenders)}: none of them computes --cases {key}")
    growth = default["growth"] if options.growth is None else [name for name in options.growth if name != "none"]
    return Settings(
        cases=options.cases or default["cases"],
        device=options.device,
        dtypes=options.dtype,
        batches=options.batches or default["batches"],
        headline=options.headline,
        passes=options.passes,
        modes=modes,
        layouts=options.layout,
        contenders=options.contenders,
        growth=growth,
        memory=default["memory"] and not options.no_memory,
        repeats=options.repeats or default["repeats"],
        seconds=options.seconds or default["seconds"],
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the exit status: 0 done, 1 a head was refused, 2 bad usage, 130 interrupted."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.peak:
        print(json.dumps(peak.answer(json.loads(options.peak))))
        return 0
    if options.redraw:
        return redraw(parser, options.redraw)
    settings = choose_settings(parser, options)
    if options.threads:
        torch.set_num_threads(options.threads)
    path = options.out / f"heads-{settings.device}.json"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {options.out} cannot be made: {error.strerror}")
    return measure(settings, path)


def measure(settings: Settings, path: Path) -> int:
    """Run the benchmark, and write what there is whatever happens."""
    began = time.perf_counter()

    def tell(line: str) -> None:
        print(f"{time.perf_counter() - began:5.0f} s  {line}", flush=True)

    record = start_record(settings)

    def save() -> None:
        record["seconds"] = time.perf_counter() - began
        write_json(path, record)

    status = 0
    try:
        run_all(Bench(settings, record, tell, save))
    except KeyboardInterrupt:
        tell("interrupted: writing what was measured so far")
        status = 130
    except Exception as error:
        tell(f"failed, writing what was measured so far: {describe_failure(error)}")
        traceback.print_exc()
        status = 1
    save()
    write_results(record, path)
    wrong = sorted({f"{check['case']} {check['contender']}" for check in record["checks"] if check["problem"]})
    if wrong:
        print(f"heads.py: refused to time {', '.join(wrong)}: see checks in {path}", file=sys.stderr)
    return status or int(bool(wrong))


def redraw(parser: Parser, path: Path) -> int:
    """Tables and figure anew, from the record alone."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        complete = {"cells", "checks", "growth", "ceilings", "settings", "environment"} <= set(record)
    except (OSError, ValueError, TypeError):
        complete = False
    if not complete:
        parser.error(f"--redraw {path}: this is no record of the benchmark")
    write_results(record, path)
    return 0


def write_results(record: dict[str, Any], path: Path) -> None:
    """The tables and, where matplotlib is installed, the figure, beside the record."""
    report = path.with_suffix(".md")
    with replacing(report) as temporary:
        temporary.write_text(write_report(record), encoding="utf-8")
    print(path, report, sep="\n")
    try:
        print(*draw(record, path.with_suffix("")), sep="\n")
    except TensorDropoutError as error:
        print(f"no figure ({error}); draw it elsewhere with --redraw {path.name}")
