"""The cells of the plan: settings chosen on held-out training images, then all training images, then the test."""

from __future__ import annotations

import copy
import math
import sys
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from position import append, split_images

import tensor_dropout as td
from finetuning.data import SETS, Group, Part, load_group
from finetuning.methods import FROZEN, METHODS, Method, Starts, build_network, settle
from finetuning.tables import EXACT, MASKS, PLAIN, RANDOM, Cell, read_record
from finetuning.training import Execution, Setting, Training, measure, measure_disturbed, predict
from tensor_dropout_lab.run_records import describe_environment

N_POINTS = 68
"""Of the random images that are timed; as many as faces have."""
SIZES, SPLITS = (100, 400), (0, 1, 2)
ORDER = (
    *FROZEN.values(), EXACT, "flattened linear", PLAIN, MASKS, "convolutional head", "pooled linear", RANDOM,
    "from scratch",
)  # fmt: skip
"""In which the methods of a group are run: what the plan compares first comes first."""


@dataclass(frozen=True)
class Plan:
    """What all cells share.

    Attributes:
        data: the folder of the sets.
        images: the folder of the decoded images.
        record: the file that gets a line for each cell.
        side: of the images.
        pool: the grid of the maps.
        steps: of a run, for each number of training images.
        n_test: how many test images; None is all.
        device: where everything is computed.
        execution: how.
    """

    data: Path
    images: Path
    record: Path
    side: int
    pool: int
    steps: dict[int, int]
    n_test: int | None
    device: str
    execution: Execution


def list_groups(
    sets: Sequence[str] = SETS, sizes: Sequence[int] = SIZES, splits: Sequence[int] = SPLITS
) -> list[Group]:
    """Few images first: an unfinished run has all splits of them."""
    return [Group(name, n, split) for n in sorted(sizes) for split in splits for name in sets]


def run_group(group: Group, plan: Plan, methods: Sequence[str]) -> None:
    """All methods of a group, in one process; a method that fails says so, and the others go on."""
    torch.set_num_threads(1)
    device = torch.device(plan.device)
    train, test = load_group(plan.data, plan.images, group, plan.n_test, device)
    rows, held = split_images(train.groups, group.split)
    torch.manual_seed(group.split)
    networks = {pretrained: build_network(pretrained, plan.side, plan.pool, device) for pretrained in (True, False)}
    settle(networks[False], train)
    began = time.perf_counter()
    inner, full = (Starts(part, networks, group.split) for part in (train.take(rows), train))
    fitting = time.perf_counter() - began
    print(f"{group}: heads fitted in {fitting:.1f} s", file=sys.stderr, flush=True)
    failed = []
    for name in methods:
        began = time.perf_counter()
        try:
            if name in METHODS:
                row = run_method(METHODS[name], inner, full, train.take(held), test, group, plan)
            else:
                head = next(head for head, shown in FROZEN.items() if shown == name)
                network = full.begin(head)
                row = {"error": measure(network, test), "disturbed": measure_disturbed(network, test)}
        except Exception:
            print(f"{group}, {name}: failed\n{traceback.format_exc(limit=-4)}", file=sys.stderr, flush=True)
            failed.append(name)
            continue
        row |= {"seconds": time.perf_counter() - began, "n_test": len(test)}
        append(plan.record, {**asdict(group), "method": name, **row, "environment": describe(plan)})
        print(f"{group}, {name}: {row['error']:.3f} ({row['seconds']:.1f} s)", file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(1)


def run_method(
    method: Method, inner: Starts, full: Starts, held: Part, test: Part, group: Group, plan: Plan
) -> dict[str, Any]:
    """Choose the setting on held-out training images, train on all of them, measure on the test part."""
    steps = plan.steps[group.n]

    def train(starts: Starts, settings: Sequence[Setting]) -> tuple[list[Any], float]:
        networks = [starts.begin(method.head, method.pretrained) for _ in settings]
        training = Training(
            networks,
            settings,
            starts.part,
            expected=method.expected,
            train_statistics=not method.pretrained,
            steps=steps,
            seed=group.split,
            execution=plan.execution,
        )
        began = time.perf_counter()
        training.run()
        return networks, time.perf_counter() - began

    at_start = measure(inner.begin(method.head, method.pretrained), held)
    networks, tuning = train(inner, method.grid)
    errors = [measure(network, held) for network in networks]
    best = method.grid[min(range(len(errors)), key=lambda k: (errors[k] != errors[k], errors[k]))]
    del networks
    (network,), training = train(full, [best])
    return {
        "error": measure(network, test),
        "disturbed": measure_disturbed(network, test),
        "error_at_start": measure(full.begin(method.head, method.pretrained), test),
        "chosen": asdict(best),
        "tried": [{**asdict(setting), "held_out": e} for setting, e in zip(method.grid, errors, strict=True)],
        "held_out_at_start": at_start,
        "n_held_out": len(held),
        "steps": steps,
        "tuning_seconds": tuning,
        "training_seconds": training,
    }


def describe(plan: Plan) -> dict[str, Any]:
    """The environment of a line."""
    execution = plan.execution
    return describe_environment("scikit-learn", "numpy") | {
        "device": plan.device,
        "side": plan.side,
        "pool": plan.pool,
        "dtype": str(execution.dtype).removeprefix("torch."),
        "channels_last": execution.channels_last,
        "graph": execution.graph,
        "streams": execution.streams,
    }


def run_groups(groups: Sequence[Group], methods: Sequence[str], plan: Plan, jobs: int, seconds: float) -> bool:
    """Run what the record does not have, each group in a process of its own; whether all of it was done.

    Args:
        groups: in this order.
        methods: of each.
        plan: what they share.
        jobs: how many processes side by side.
        seconds: when they are ended; what has been recorded stays.
    """
    done, ends = read_record(plan.record), time.monotonic() + seconds
    todo = [(group, [name for name in methods if Cell(*asdict(group).values(), name) not in done]) for group in groups]
    context = get_context("spawn")

    def run(task: tuple[Group, list[str]]) -> bool:
        group, names = task
        if time.monotonic() > ends:
            return False
        process = context.Process(target=run_group, args=(group, plan, names))
        process.start()
        process.join(max(0.0, ends - time.monotonic()))
        if process.is_alive():
            print(f"{group}: ended at the limit of {seconds:.0f} s", file=sys.stderr, flush=True)
            process.kill()
            process.join()
        return process.exitcode == 0

    with ThreadPoolExecutor(jobs) as pool:
        return all(list(pool.map(run, [task for task in todo if task[1]])))


def time_steps(plan: Plan, choices: Sequence[Execution]) -> dict[Execution, float]:
    """Milliseconds of a step of one setting, computed in several ways; what fails says why and is left out.

    On random images and points, so that it waits for no data and says no error. Both losses must work.
    """
    torch.set_num_threads(1)
    device = torch.device(plan.device)
    torch.manual_seed(0)
    images = torch.randint(256, (128, 3, plan.side, plan.side), dtype=torch.uint8, device=device)
    part = Part(images, torch.rand(len(images), N_POINTS * 2, device=device), np.arange(len(images)))
    network = build_network(True, plan.side, plan.pool, device)
    shape = predict(network, images[:1]).shape[1:]
    masks = td.TensorDropout(0.5, per_sample=True)
    network.head = td.CPRegression(tuple(shape), part.y.shape[1], rank=128, dropout=masks).to(device)
    times = {}
    for execution in choices:
        settings = METHODS[EXACT].grid[: execution.streams]
        try:
            seconds = []
            for expected, steps in ((True, 10), (False, 10), (False, 30)):
                training = Training(
                    [copy.deepcopy(network) for _ in settings], settings, part, expected=expected,
                    train_statistics=False, steps=steps, seed=0, execution=execution,
                )  # fmt: skip
                began = time.perf_counter()
                training.run()
                seconds.append(time.perf_counter() - began)
                if not math.isfinite(measure(training.networks[0], part)):
                    raise FloatingPointError("the network does not predict numbers")
            times[execution] = 1000 * (seconds[2] - seconds[1]) / 20 / len(settings)
            result = f"{times[execution]:.2f} ms"
        except Exception as problem:
            result = f"failed: {problem}"
        print(f"{execution}: {result}", file=sys.stderr, flush=True)
    return times
