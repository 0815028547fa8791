"""Groups and heads, one after another or side by side, and the record: a line for each head of a group."""

from __future__ import annotations

import itertools
import json
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from position import append

from position_heads import closed_form, gradient, second_order
from position_heads.data import FINALIST_SIZES, MAPS, SETS, SIZES, Group, Images, load_images
from tensor_dropout_lab.run_records import describe_environment

HEADS = (*closed_form.HEADS, *gradient.HEADS, *second_order.HEADS)
RANDOMIZED = tuple(name for name in HEADS if name.endswith(", dropout") and "linear" not in name and "two" not in name)
"""The randomized tensor regressions, on the exact loss."""
ABLATIONS = ("two matrices, dropout", "CP, masks per batch", "CP, masks per sample")
PLAIN = tuple(name.replace(", dropout", ", θ = 1") for name in RANDOMIZED)
BASELINES = tuple(name for name in HEADS if name not in (*RANDOMIZED, *ABLATIONS, *PLAIN))
ON_SECOND_BACKBONE = tuple(name for name in HEADS if name.split(",")[0] not in ("Tucker", "TT", "ring"))


@dataclass(frozen=True, order=True)
class Task:
    """A head on a group."""

    group: Group
    head: str


def list_tasks(
    sets: Sequence[str] = SETS,
    backbones: Sequence[str] = tuple(MAPS),
    sizes: Sequence[int] = SIZES,
    heads: Sequence[str] = HEADS,
) -> list[Task]:
    """What the plan asks for, n = 100 first: an unfinished run has all heads of few sizes."""
    return [
        Task(Group(name, backbone, n), head)
        for n in sorted(sizes, key=(100, 400, 50, 200, 800, *FINALIST_SIZES).index)
        for backbone in backbones
        for name in sets
        for head in heads
        if backbone == "efficientnet" or head in ON_SECOND_BACKBONE
    ]


def run_head(head: str, images: Images, device: str, n_folds: int | None = None, steps: int = gradient.STEPS) -> Any:
    """A row for each fold."""
    folds = images.folds[:n_folds]
    if head in closed_form.HEADS:
        return closed_form.run_folds(closed_form.HEADS[head], images, folds, device)
    if head in gradient.HEADS:
        return gradient.run_folds(gradient.HEADS[head], images, folds, device, steps=steps)
    return second_order.run_folds(second_order.HEADS[head], images, folds, device)


def count_fits(head: str, rows: Sequence[dict[str, Any]]) -> int:
    """Trained heads: the stops of one training are no fits of their own; a closed form counts once for each part."""
    if head in closed_form.HEADS:
        return 2 * len(rows)
    stops = gradient.STOPS if head in gradient.HEADS else 1
    return sum(row["tried"] // stops + 1 for row in rows)


def run_task(
    task: Task, features: Path, device: str, n_folds: int | None = None, steps: int = gradient.STEPS
) -> dict[str, Any] | None:
    """The line of the record; None where the set has too few images."""
    torch.set_num_threads(1)
    images = load_images(features, task.group)
    if images is None:
        return None
    began = time.perf_counter()
    rows = run_head(task.head, images, device, n_folds, steps)
    seconds = time.perf_counter() - began
    fold = images.folds[0]
    return {
        **asdict(task.group), "head": task.head, "fits": count_fits(task.head, rows), "seconds": seconds,
        "shape": list(images.x.shape[1:]), "n_inner": len(fold.inner), "folds": rows,
        "environment": describe_environment("scikit-learn", "numpy") | {"device": device},
    }  # fmt: skip


def read_record(path: Path) -> dict[Task, dict[str, Any]]:
    """The finished lines; one that was cut off is left out, and of two for a task the last counts."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            found[Task(Group(row["set"], row["backbone"], row["n"]), row["head"])] = row
        except (ValueError, KeyError, TypeError):
            print(f"{path}: line {number} is not a whole row; left out", file=sys.stderr)
    return found


def run_tasks(
    tasks: Sequence[Task], features: Path, record: Path, *, device: str, jobs: int, minutes: float,
    n_folds: int | None = None, steps: int = gradient.STEPS,
) -> bool:  # fmt: skip
    """Run what the record does not have, and add each line as it ends; whether all was done.

    After ``minutes`` nothing new is begun, and what is under way is ended; what was recorded stays.
    """
    done = read_record(record)
    todo = iter([task for task in tasks if task not in done])
    ends, complete, running = time.monotonic() + 60 * minutes, True, {}
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        while True:
            for task in itertools.islice(todo, jobs - len(running)):
                running[pool.submit(run_task, task, features, device, n_folds, steps)] = task
            if not running:
                return complete
            finished, _ = wait(running, max(0.0, ends - time.monotonic()), FIRST_COMPLETED)
            if not finished:
                print(f"ended after {minutes:g} minutes", file=sys.stderr, flush=True)
                return False
            for future in finished:
                complete &= _record(future, running.pop(future), record)
    finally:
        for process in list((pool._processes or {}).values()):  # the pool has no call of its own for it
            process.kill()
        pool.shutdown(wait=False, cancel_futures=True)


def _record(future: Future[Any], task: Task, record: Path) -> bool:
    try:
        row = future.result()
    except Exception:  # one head that fails does not stop the others
        print(f"{task.group}, {task.head}: failed\n{traceback.format_exc(limit=-3)}", file=sys.stderr, flush=True)
        return False
    if row is not None:
        append(record, row)
        print(f"{task.group}, {task.head}: {row['seconds']:.1f} s", file=sys.stderr, flush=True)
    return True
