"""Many cells at once: handed to submitit, which runs them as local processes or on SLURM."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.experiments.cells import RunContext, find_cell, run_cell
from tensor_dropout_lab.experiments.recipes import Cell
from tensor_dropout_lab.extras import import_extra
from tensor_dropout_lab.run_records import handing_on_the_command
from tensor_dropout_lab.signals import interrupt_on_sigterm
from tensor_dropout_lab.training.processes import choose_device

Unit = list[Cell]
"""Cells that must follow each other: a run, then evaluations of it."""


def group_cells(cells: list[Cell]) -> list[Unit]:
    """Cells that evaluate a run come after it, in one unit.

    Example:
        >>> run = Cell("imagenet", "fc", "ResNet", 0)
        >>> other, evaluation = Cell("imagenet", "trl", "TRL", 0), Cell("imagenet-attacks", "fc", "FC", 0, of=run)
        >>> [len(unit) for unit in group_cells([run, other, evaluation])]
        [2, 1]
    """
    units: dict[str, Unit] = {}
    for cell in cells:
        source = cell.of or cell
        unit = units.setdefault(f"{source.experiment}/{source.slug}", [])
        if cell.of is not None and not any(each.experiment == source.experiment for each in unit):
            unit.insert(0, source)
        if all((cell.experiment, cell.slug) != (each.experiment, each.slug) for each in unit):
            unit.append(cell)
    return list(units.values())


def run_units(units: list[Unit], context: RunContext, gpu: str | None = None) -> None:
    """Run units one after another in this process; it sees this GPU alone (submitit shows the first to all)."""
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        context = replace(context, device="auto")
    with interrupt_on_sigterm():
        for unit in units:
            for cell in unit:
                run_cell(cell, context)


def run_sweep(
    units: list[Unit], context: RunContext, *, workers: int = 1, cluster: str = "local", **resources: Any
) -> None:
    """Run what is missing of all units.

    Args:
        units: from :func:`group_cells`.
        context: where results go.
        workers: processes, or SLURM jobs; every one takes its share of the units, and processes take turns on the GPUs.
        cluster: "local" or "slurm".
        **resources: parameters of submitit's executor, such as ``slurm_partition``.

    Raises:
        TensorDropoutError: if submitit is missing.
    """
    cells = [cell for unit in units for cell in unit]
    with show_progress("runs", len(cells)) as advance:
        if cluster == "local" and min(workers, len(units)) <= 1:
            for unit in units:
                for cell in unit:
                    advance.describe(f"{cell.experiment}/{cell.slug}")
                    run_cell(cell, context)
                    advance(1)
                    _tell([cell], context)
            return
        submitit = import_extra("submitit", "reproduce")
        executor = submitit.AutoExecutor(folder=context.base / ".jobs", cluster=cluster)
        executor.update_parameters(name="tensor-dropout", **(_choose_resources(cluster) | resources))
        gpus = list_gpus(context.device) if cluster == "local" else []
        with handing_on_the_command():
            jobs = [
                executor.submit(run_units, share, context, gpus[number % len(gpus)] if gpus else None)
                for number, share in enumerate(deal(units, workers))
            ]
        try:
            _wait(jobs, cells, context, advance)
        except KeyboardInterrupt:
            for job in jobs:
                _stop(job, cluster)
            raise
        died = [job for job in jobs if job.exception() is not None]
        if died:
            raise TensorDropoutError(
                f"reproduce: {len(died)} of {len(jobs)} jobs died; what they printed is in {context.base / '.jobs'}; "
                "what is done is kept, and the same command goes on"
            )


def _wait(jobs: list[Any], cells: list[Cell], context: RunContext, advance: Any) -> None:
    pending = cells
    while True:
        finished = all(job.done() for job in jobs)
        ended = [cell for cell in pending if find_cell(cell, context.base).state in ("done", "failed")]
        pending = [cell for cell in pending if cell not in ended]
        advance(len(ended))
        _tell(ended, context)
        if finished:
            return
        time.sleep(0.5)


def _tell(ended: list[Cell], context: RunContext) -> None:
    """A line for each run that ended, where no bar can be shown: in the file of a batch job, say."""
    if not sys.stderr.isatty():
        for cell in ended:
            state = find_cell(cell, context.base).state
            print(f"{state}: {cell.experiment}/{cell.slug}", file=sys.stderr, flush=True)


def _stop(job: Any, cluster: str) -> None:
    """End a job, whose run is saved first. A local ``cancel`` is a SIGINT, which all that a script starts ignores."""
    if cluster == "slurm":
        job.cancel()
        return
    with suppress(ProcessLookupError):
        os.kill(int(job.job_id), signal.SIGTERM)


def _choose_resources(cluster: str) -> dict[str, Any]:
    """A day and a GPU for a SLURM job (submitit's own limit is 5 minutes); local jobs: as long as it takes."""
    if cluster == "slurm":
        return {"timeout_min": 24 * 60, "gpus_per_node": 1, "cpus_per_task": 8}
    return {"timeout_min": 7 * 24 * 60, "gpus_per_node": 1 if torch.cuda.is_available() else 0}


def list_gpus(device: str) -> list[str]:
    """The GPUs that local jobs may use, as CUDA_VISIBLE_DEVICES names them: the one that was asked for, or all."""
    if choose_device(device).type == "cpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    index = None if device == "auto" else torch.device(device).index
    return gpus if index is None else gpus[index : index + 1]


def deal(units: list[Unit], workers: int) -> list[list[Unit]]:
    """Shares of about equal cost: the dearest first, each to the share that has the least.

    Example:
        >>> unit = [Cell("a", "b", "c", 0, config={"run.epochs": 4})]
        >>> [len(share) for share in deal([unit] * 5, 2)]
        [3, 2]
    """
    shares: list[list[Unit]] = [[] for _ in range(min(workers, len(units)))]
    loads = [0.0] * len(shares)
    for unit in sorted(units, key=_cost, reverse=True):
        lightest = loads.index(min(loads))
        shares[lightest].append(unit)
        loads[lightest] += _cost(unit)
    return shares


def _cost(unit: Unit) -> float:
    """A rough number of network passes: epochs, more for volumes, and evaluations."""
    cost = 0.0
    for cell in unit:
        weight = 4.0 if cell.config.get("data.name") in ("phantom", "nifti") else 1.0
        cost += weight * cell.config.get("run.epochs", 0) + (20.0 if cell.evaluation is not None else 0.0)
    return cost
