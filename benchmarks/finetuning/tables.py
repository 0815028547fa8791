"""The record of the cells, and the tables made from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from position import write_interval, write_table

from tensor_dropout_lab.evaluation.intervals import seed_interval

RECORD = Path("results/finetuning.jsonl")
METHODS = (
    "frozen, pooled ridge", "frozen, flattened ridge", "frozen, TensorRegressor()", "pooled linear", "flattened linear",
    "convolutional head", "tensor head, no dropout", "tensor head, masks per sample", "tensor head, exact loss",
    "random tensor head", "from scratch",
)  # fmt: skip
"""In the order of the tables."""
FROZEN, PLAIN, MASKS, EXACT, RANDOM = METHODS[2], METHODS[6], METHODS[7], METHODS[8], METHODS[9]
PAIRS = {
    "exact loss to frozen": (EXACT, FROZEN),
    "masks to frozen": (MASKS, FROZEN),
    "exact loss to pooled linear": (EXACT, "pooled linear"),
    "exact loss to flattened linear": (EXACT, "flattened linear"),
    "exact loss to convolutional head": (EXACT, "convolutional head"),
    "exact loss to no dropout": (EXACT, PLAIN),
    "exact loss to masks": (EXACT, MASKS),
    "random head to masks": (RANDOM, MASKS),
    "from scratch to masks": ("from scratch", MASKS),
}
"""Whose error is compared with whose."""


@dataclass(frozen=True, order=True)
class Cell:
    """One line of the record."""

    set: str
    n: int
    split: int
    method: str


Record = dict[Cell, dict[str, Any]]
Errors = dict[tuple[str, int], dict[str, dict[int, float]]]
"""By set and n: the error of each method on each split."""


def read_record(path: Path) -> Record:
    """The finished cells; a line that was cut off is left out, and of two lines for a cell the last counts."""
    rows = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            rows[Cell(row["set"], row["n"], row["split"], row["method"])] = row
        except (ValueError, KeyError, TypeError):
            print(f"{path}: line {number} is not a whole cell; left out", file=sys.stderr)
    return rows


def gather_errors(record: Record) -> Errors:
    """The errors; null, of a run that diverged, is NaN."""
    errors: Errors = {}
    for cell, row in sorted(record.items()):
        error = float("nan") if row["error"] is None else row["error"]
        errors.setdefault((cell.set, cell.n), {}).setdefault(cell.method, {})[cell.split] = error
    return errors


def difference(first: dict[int, float], second: dict[int, float]) -> str:
    """Mean of the paired relative differences in % over the splits that both have, with its 95 % t interval."""
    changes = [100 * (first[split] / second[split] - 1) for split in sorted(first.keys() & second.keys())]
    if not changes:
        return ""
    if not np.isfinite(changes).all():
        return "diverged"
    ends = seed_interval(changes) if len(changes) > 1 else (float("nan"), float("nan"))
    return write_interval((float(np.mean(changes)), *ends))


def write_errors(record: Record) -> str:
    """Mean errors over the splits, the best of those with all splits in bold; fewer splits are said beside the mean."""

    def write(splits: dict[int, float] | None, most: int, best: float) -> str:
        if not splits:
            return "missing"
        mean = float(np.mean(list(splits.values())))
        shown = f"{mean:.3f}" if np.isfinite(mean) else "diverged"
        if len(splits) < most:
            return f"{shown} ({len(splits)})"
        return f"**{shown}**" if mean == best else shown

    shown, lines = [method for method in METHODS if any(cell.method == method for cell in record)], []
    for (name, n), errors in gather_errors(record).items():
        most = max(map(len, errors.values()))
        best = float(np.nanmin([np.mean(list(found.values())) for found in errors.values() if len(found) == most]))
        lines.append([name, str(n), str(most), *(write(errors.get(method), most, best) for method in shown)])
    return write_table(["set", "n", "splits", *shown], lines)


def write_differences(record: Record) -> str:
    """Every pair of :data:`PAIRS` that some group has."""
    groups = gather_errors(record)
    pairs = [(a, b) for a, b in PAIRS.values() if any(a in errors and b in errors for errors in groups.values())]
    lines = [
        [name, str(n), *(difference(errors.get(a, {}), errors.get(b, {})) for a, b in pairs)]
        for (name, n), errors in groups.items()
    ]
    return write_table(["set", "n", *(f"{a} to {b}" for a, b in pairs)], [line for line in lines if any(line[2:])], 2)


def write_chosen(record: Record) -> str:
    """Which setting was chosen how often, and what the held-out images said of it."""
    chosen: dict[str, list[dict[str, Any]]] = {}
    for cell, row in sorted(record.items()):
        if "chosen" in row:
            chosen.setdefault(cell.method, []).append(row)

    def row(method: str, rows: list[dict[str, Any]]) -> list[str]:
        names = [f"{each['chosen']['rate']:g}, {each['chosen']['head_step']:g}" for each in rows]
        counts = "; ".join(f"{name}: {names.count(name)}" for name in sorted(set(names)))
        better = sum(min(_held_out(each)) < each["held_out_at_start"] for each in rows)
        seconds = np.mean([each["training_seconds"] for each in rows])
        step = np.mean([1000 * each["training_seconds"] / each["steps"] for each in rows])
        return [method, counts, f"{better} of {len(rows)}", f"{seconds:.1f}", f"{step:.0f}"]

    header = ["method", "rate, head step: cells", "held-out error below the start's", "training, s", "a step, ms"]
    return write_table(header, (row(name, chosen[name]) for name in METHODS if name in chosen), 2)


def _held_out(row: dict[str, Any]) -> Iterable[float]:
    return [float("inf") if each["held_out"] is None else each["held_out"] for each in row["tried"]]


def write_disturbed(record: Record) -> str:
    """Mean errors on noisy and blurred test images, and their growth over those on the images as they are."""
    groups: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    for cell, row in sorted(record.items()):
        if "disturbed" in row:
            groups.setdefault((cell.set, cell.n, cell.method), []).append(row)
    kinds = list(next(iter(groups.values()))[0]["disturbed"]) if groups else []
    lines = []
    for name, n in dict.fromkeys((name, n) for name, n, _ in groups):
        for method in METHODS:
            rows = groups.get((name, n, method), [])
            if not rows:
                continue
            cells = []
            for kind in kinds:
                errors = [float("nan") if row["disturbed"][kind] is None else row["disturbed"][kind] for row in rows]
                growth = np.mean([error / (row["error"] or np.nan) for error, row in zip(errors, rows, strict=True)])
                cells.append(f"{np.mean(errors):.3f} ({growth:.2f}×)")
            lines.append([name, str(n), method, *cells])
    return write_table(["set", "n", "method", *kinds], lines)


PARTS: dict[str, Callable[[Record], str]] = {
    "errors": write_errors,
    "differences": write_differences,
    "chosen": write_chosen,
    "disturbed": write_disturbed,
}


def render(part: str, record: Record) -> str:
    """One of :data:`PARTS`, for the docs."""
    return PARTS[part](record)


def write_report(record: Record) -> str:
    """The tables in Markdown."""
    made = sorted({describe(row["environment"]) for row in record.values()})
    return "\n\n".join(
        [
            "# Fine-tuning",
            "Mean distance between predicted and true points, % of the image side; mean over splits.",
            write_errors(record),
            "## Differences",
            "Paired relative differences of the error in %, negative where the first is better: mean over splits and "
            "95 % t interval. Splits share images, so the intervals are somewhat too narrow.",
            write_differences(record),
            "## What was chosen",
            write_chosen(record),
            "## Noisy and blurred test images",
            write_disturbed(record),
            "## Made by",
            "\n".join(f"- {line}" for line in made),
        ]
    )


def describe(environment: dict[str, Any]) -> str:
    """What a line of the record was made with."""
    commit = f", commit {environment['commit'][:7]}" if "commit" in environment else ""
    changes = " with changes" if environment.get("dirty") else ""
    device = environment.get("gpu", environment["device"])
    versions = f"torch {environment['torch']}, scikit-learn {environment['scikit-learn']}"
    return f"{versions} on {device}, {environment['dtype']}{commit}{changes}: `{environment['command']}`"
