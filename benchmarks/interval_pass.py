"""What an interval costs: the pass that gives it beside the plain one, of a whole network and of the head alone.

    OMP_NUM_THREADS=1 python benchmarks/interval_pass.py                   # about ten minutes on one core
    OMP_NUM_THREADS=1 python benchmarks/interval_pass.py --quick           # to see that it runs

- **network**: ``td.predict(net, x, coverage=0.9, calibration=c)`` against ``td.predict(net, x)``, ResNet-18 with random
  weights, 64×64 pixels, batch 16, 200 held-out examples, a calibration that uses the masks. Its features are 8×8
  (small stem) or 2×2 (large stem, a network of one fifteenth of the work).
- **head**: ``head.moments(x)`` against ``head(x)`` on features of 512×8×8, batch 16, up to 10,000 outputs.

Heads are those by name with their default ranks and modes. Both passes of a pair are timed in turn, in seconds of the
processor; a ratio is that of the medians. Multiply-adds are those of products and convolutions by torch's counter.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

import tensor_dropout as td
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout_lab.nets import build_net
from tensor_dropout_lab.nets.heads import build_head
from tensor_dropout_lab.run_records import describe_environment, write_json

BATCH, HELD_OUT = 16, 200
FEATURES = (512, 8, 8)
RECORD = Path(__file__).parents[1] / "results" / "speed" / "interval-pass.json"
Pass = Callable[[], Any]


def compare(plain: Pass, interval: Pass, seconds: float) -> dict[str, Any]:
    """Medians of passes in turn, for so many seconds and at least three rounds, and their multiply-adds."""
    counts = [count(run) for run in (plain, interval)]  # also the first pass of each
    times: list[tuple[float, float]] = []
    began = time.process_time()
    while len(times) < 3 or (time.process_time() - began < seconds and len(times) < 200):
        times.append((clock(plain), clock(interval)))
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return {
        "plain": medians[0], "interval": medians[1], "ratio": medians[1] / medians[0], "rounds": len(times),
        "ratios": [min(b / a for a, b in times), max(b / a for a, b in times)],
        "plain_multiply_adds": counts[0], "interval_multiply_adds": counts[1], "work_ratio": counts[1] / counts[0],
    }  # fmt: skip


def clock(run: Pass) -> float:
    """Seconds of one pass on its one core: what others take of the machine meanwhile does not count."""
    began = time.process_time()
    run()
    return time.process_time() - began


def count(run: Pass) -> int:
    """Multiply-adds of one pass."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops() // 2


def compare_network(format: str, outputs: int, stem: str, seconds: float) -> dict[str, Any]:
    """The whole network, plain and with its interval."""
    torch.manual_seed(0)
    net = build_net("resnet18", outputs=outputs, input_shape=(3, 64, 64), head=f"rtrl-{format}", stem=stem)
    net.eval().requires_grad_(False)
    small = torch.randn(HELD_OUT, 3, 8, 8).repeat_interleave(8, 2).repeat_interleave(8, 3)
    x = torch.randn(BATCH, 3, 64, 64)
    found = td.calibrate(net, small[:16], torch.randn(16, outputs), task="regression")
    scores = torch.randn(HELD_OUT, outputs, dtype=torch.float64)
    errors = dataclasses.replace(found.errors, share=0.5, scores=scores, groups=torch.arange(HELD_OUT))
    calibration = dataclasses.replace(found, errors=errors, uses_masks=True)
    return compare(
        lambda: td.predict(net, x), lambda: td.predict(net, x, coverage=0.9, calibration=calibration), seconds
    )


def compare_head(format: str, outputs: int, seconds: float) -> dict[str, Any]:
    """The head alone, plain and with the moments."""
    torch.manual_seed(0)
    head = build_head(f"rtrl-{format}", FEATURES, outputs).eval().requires_grad_(False)
    x = torch.randn(BATCH, *FEATURES)
    return compare(lambda: head(x), lambda: head.moments(x), seconds)


def show(cell: dict[str, Any]) -> None:
    """One line of the table."""
    low, high = cell["ratios"]
    print(
        f"| {cell['what']} | {cell['format']} | {cell['outputs']} | {cell['plain'] * 1e3:.1f} | "
        f"{cell['interval'] * 1e3:.1f} | {cell['ratio']:.2f} ({low:.2f} to {high:.2f}) | {cell['work_ratio']:.2f} |",
        flush=True,
    )


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few outputs, short, not recorded")
    parser.add_argument("--formats", nargs="+", default=["cp", "tucker", "tt", "ring"], choices=list(FORMATS))
    parser.add_argument("--record", type=Path, default=RECORD)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    seconds = 0.1 if arguments.quick else 8.0
    outputs = [1, 10] if arguments.quick else [1, 10, 100, 1000, 10_000]
    cells = []
    print("| what | head | outputs | plain, ms | with interval, ms | ratio (of single rounds) | of multiply-adds |")
    print("|---|---|---|---|---|---|---|")
    for number in outputs:
        for format in arguments.formats:
            if number <= 1000:
                for stem, what in (("small", "network, 8×8 features"), ("large", "network, 2×2 features")):
                    cells.append({"what": what, **compare_network(format, number, stem, seconds)})
                    cells[-1] |= {"format": format, "outputs": number}
                    show(cells[-1])
            cells.append({"what": "head alone", **compare_head(format, number, seconds / 4)})
            cells[-1] |= {"format": format, "outputs": number}
            show(cells[-1])
    if not arguments.quick:
        write_json(arguments.record, {"cells": cells, "environment": describe_environment()})


if __name__ == "__main__":
    main()
