"""Goes through all cells: makes the contenders of a case, checks ours, times them in turn, counts, and records."""

import gc
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch
from torch import Tensor, nn

from heads.cases import BATCHES, CASES, Case, mode_cases, rank_cases
from heads.checking import TOLERANCES, measure_error
from heads.contenders import Contender, NotInstalledError, select_contenders, tensorly_version
from heads.counting import bytes_floor, count_operations, saved_bytes
from heads.growth import batch_points, describe_growth
from heads.inputs import make_inputs, make_module
from heads.peak import peak_on_cuda, peaks_on_cpu
from heads.tables import milliseconds
from heads.timing import (
    Sample,
    make_capturable_pass,
    make_pass,
    make_sampler,
    measure_bandwidth,
    measure_products,
    sample_in_turn,
    summarize,
)
from tensor_dropout_lab.run_records import describe_environment

GROWTH_BATCH = 64
PACKAGES = ("tensorly", "opt_einsum", "triton")


@dataclass(frozen=True)
class Settings:
    """What is measured: the command's options."""

    cases: list[str]
    device: str
    dtypes: list[str]
    batches: list[int] | None
    headline: list[int]
    passes: list[str]
    modes: list[str] | None
    layouts: list[str]
    contenders: list[str] | None
    growth: list[str]
    memory: bool
    repeats: int
    seconds: float

    def batches_of(self, case: Case) -> list[int]:
        """Those asked for; else the case's own on the CPU, and 1 to 512 on a GPU."""
        return self.batches or list(case.cpu_batches if self.device == "cpu" else BATCHES)

    def modes_of(self, case: Case) -> list[str]:
        """Those asked for; else eager and graph on a GPU, and on the CPU eager, with CIFAR's head compiled as well."""
        if self.modes is not None:
            return self.modes
        if self.device == "cuda":
            return ["eager", "graph"]
        return ["eager", "compiled"] if case.key == "cifar" else ["eager"]

    def headline_of(self, case: Case) -> list[int]:
        """The batches of R-TRLs, compiled passes and peak memory; the largest where none of them is measured."""
        batches = self.batches_of(case)
        return [batch for batch in batches if batch in self.headline] or [max(batches)]


@dataclass
class Bench:
    """A run: its settings, its record so far, how to tell progress and how to save the record."""

    settings: Settings
    record: dict[str, Any]
    tell: Callable[[str], None] = print
    save: Callable[[], None] = lambda: None

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.device)


@dataclass
class Group:
    """All contenders of one case on one batch, with their inputs, and why some of them are not timed.

    ``names`` are the fields that every record of the group begins with.
    """

    names: dict[str, Any]
    case: Case
    contenders: list[Contender]
    modules: dict[str, nn.Module]
    buffers: list[Tensor]
    upstream: Tensor
    failures: dict[str, str] = field(default_factory=dict)
    peaks: dict[str, int | None] = field(default_factory=dict)


def start_record(settings: Settings) -> dict[str, Any]:
    """The record before the first cell: settings and environment."""
    environment = describe_environment(*filter(_is_installed, PACKAGES))
    environment["tensorly-torch"] = tensorly_version() or "not installed"
    environment["float32_products"] = torch.get_float32_matmul_precision()
    environment["load"] = os.getloadavg()[0]
    if settings.device == "cuda":
        environment["l2_bytes"] = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", None)
    else:
        environment["onednn_isa"] = os.environ.get("ONEDNN_MAX_CPU_ISA", "any")
    empty: dict[str, Any] = {"ceilings": {}, "checks": [], "cells": [], "points": [], "growth": [], "finished": False}
    return {"settings": vars(settings), "environment": environment, **empty}


def _is_installed(package: str) -> bool:
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def run_all(bench: Bench) -> None:
    """The ceilings, every cell, then growth; the record is saved after each."""
    measure_ceilings(bench)
    settings = bench.settings
    for case in (CASES[key] for key in settings.cases):
        for dtype in settings.dtypes:
            run_case(bench, case, dtype)
    for over in settings.growth:
        measure_growth(bench, over)
    bench.record["finished"] = True
    bench.save()


def measure_ceilings(bench: Bench) -> None:
    """The bandwidth of a copy and the rate of matrix products of this device, now."""
    cuda, tiny = bench.settings.device == "cuda", bench.settings.cases == ["tiny"]
    n_bytes, size = (2**31, 8192) if cuda else (2**22, 128) if tiny else (2**28, 2048)
    bandwidth = measure_bandwidth(bench.device, n_bytes)
    rates = {dtype: measure_products(bench.device, getattr(torch, dtype), size) for dtype in bench.settings.dtypes}
    bench.record["ceilings"] = {"bytes_per_second": bandwidth, "operations_per_second": rates}
    products = ", ".join(f"{dtype} {rate / 1e12:.3g} TFLOP/s" for dtype, rate in rates.items())
    bench.tell(f"ceilings: copy {bandwidth / 1e9:.4g} GB/s (read + written), products {products}")
    bench.save()
    release(bench.device)


def run_case(bench: Bench, case: Case, dtype: str) -> None:
    """All layouts, batches, modes and passes of one case in one dtype."""
    settings = bench.settings
    contenders = select_contenders(case, settings.contenders)
    modules, failures = make_modules(bench, contenders, case, dtype)
    for layout in settings.layouts:
        for batch in settings.batches_of(case):
            headline = batch in settings.headline_of(case)
            present = [c for c in contenders if headline or c.group != "rtrl"]
            group = make_group(bench, case, present, modules, dtype, layout, batch)
            group.failures |= failures
            if headline:
                measure_peaks(bench, group)
            for mode in settings.modes_of(case):
                if headline or not mode.startswith("compiled"):
                    run_passes(bench, group, mode)
            del group
            release(bench.device)


def make_modules(
    bench: Bench, contenders: list[Contender], case: Case, dtype: str
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """Every contender once, on the device and in the dtype; and why some could not be made."""
    modules, failures = {}, {}
    for contender in contenders:
        try:
            modules[contender.key] = make_module(contender, case, getattr(torch, dtype), bench.device)
        except NotInstalledError as error:
            failures[contender.key] = str(error)
        except Exception as error:
            failures[contender.key] = describe_failure(error)
    return modules, failures


def make_group(
    bench: Bench,
    case: Case,
    contenders: list[Contender],
    modules: dict[str, nn.Module],
    dtype: str,
    layout: str,
    batch: int,
) -> Group:
    """The contenders with inputs; ours are checked, and those that are wrong will not be timed."""
    names = {"case": case.key, "dtype": dtype, "layout": layout, "batch": batch}
    buffers, upstream = make_inputs(case, batch, getattr(torch, dtype), layout, bench.device)
    group = Group(names, case, contenders, modules, buffers, upstream)
    for contender in contenders:
        if contender.group in ("ours", "rtrl") and contender.key in modules:
            check_head(bench, group, contender)
            release(bench.device)
    return group


def check_head(bench: Bench, group: Group, contender: Contender) -> None:
    """Compare a head of ours with its dense weight, record the error, and refuse the head if it is wrong."""
    x, error, problem = group.buffers[0], None, None
    allowed = TOLERANCES[x.dtype]
    try:
        error = measure_error(group.modules[contender.key], contender.format, x, group.upstream)
        if not error <= allowed:  # NaN is not, either
            problem = f"refused: its relative error to the dense weight is {error:.1e}, allowed are {allowed:.0e}"
    except Exception as failure:
        problem = f"could not be checked: {describe_failure(failure)}"
    bench.record["checks"].append({**group.names, "contender": contender.key, "error": error, "problem": problem})
    if problem:
        group.failures[contender.key] = problem


def describe_failure(error: Exception) -> str:
    """One line that says why."""
    first = (str(error).strip() or "no message").splitlines()[0]
    return f"{type(error).__name__}: {first[:200]}"


def measure_peaks(bench: Bench, group: Group) -> None:
    """Peak memory on the CPU; on CUDA it is measured with each cell."""
    settings = bench.settings
    if settings.device == "cuda" or not settings.memory or "both" not in settings.passes:
        return
    keys = [c.key for c in group.contenders if c.key in group.modules]
    bench.tell(f"{write_names(group.names)}: peak memory")
    group.peaks = peaks_on_cpu(keys, group.names)


def run_passes(bench: Bench, group: Group, mode: str) -> None:
    """The cells of one mode: all passes."""
    for kind in bench.settings.passes:
        cells = measure_cell(bench, group, mode, kind)
        bench.record["cells"] += cells
        update_growth(bench)
        bench.tell(f"{write_names(group.names)}, {mode}, {kind}: {write_times(cells)}")
        bench.save()
        if mode.startswith("compiled"):
            torch.compiler.reset()
        release(bench.device)


def measure_cell(bench: Bench, group: Group, mode: str, kind: str) -> list[dict[str, Any]]:
    """Time all contenders in turn; a record for each, with its times or with why there are none."""
    settings, failures = bench.settings, dict(group.failures)
    samplers: dict[str, Sample] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for contender in group.contenders:
        if contender.key in failures:
            continue
        try:
            numbers[contender.key] = count(bench, group, contender.key, kind)
            samplers[contender.key] = prepare(group, contender.key, mode, kind)
        except Exception as error:
            failures[contender.key] = describe_failure(error)
            release(bench.device)
    times, errors = sample_in_turn(samplers, settings.repeats, settings.seconds)
    failures |= {key: describe_failure(error) for key, error in errors.items()}
    return [
        {
            **group.names,
            "mode": mode,
            "pass": kind,
            "contender": c.key,
            "label": c.label,
            "group": c.group,
            "format": c.format,
            **({"failure": failures[c.key]} if c.key in failures else describe(bench, times[c.key], numbers[c.key])),
        }
        for c in group.contenders
    ]


def prepare(group: Group, key: str, mode: str, kind: str) -> Sample:
    """Compile or capture, warm up, and return what takes samples."""
    module = group.modules[key]
    if mode == "graph":
        run = make_capturable_pass(module, kind, group.upstream)
    else:
        call = torch.compile(module, dynamic=False) if mode.startswith("compiled") else module
        run = make_pass(call, list(module.parameters()), kind, group.upstream)
    return make_sampler(run, group.buffers, graph=mode.endswith("graph"))


def count(bench: Bench, group: Group, key: str, kind: str) -> dict[str, Any]:
    """What needs no clock: see ``counting`` and ``peak``."""
    module, x = group.modules[key], group.buffers[0]
    x_floor, parameter_floor = bytes_floor(module, x, kind)
    operations = count_operations(module, x, kind)
    both = kind == "both"
    peak = group.peaks.get(key)
    if both and bench.device.type == "cuda":
        run = make_pass(module, list(module.parameters()), kind, group.upstream)
        run(x)  # workspaces and autotuning of the first call
        peak = peak_on_cuda(run, module, x)
    return {
        "parameters": sum(p.numel() for p in module.parameters()),
        "multiply_adds": None if operations is None else operations // 2,
        "floor_bytes": {"x": x_floor, "parameters": parameter_floor},
        "saved_bytes": saved_bytes(module, x) if both else None,
        "peak_bytes": peak if both else None,
        "input_buffers": len(group.buffers),
    }


def describe(bench: Bench, times: list[float], numbers: dict[str, Any]) -> dict[str, Any]:
    """Times and counts, and the ratio of the median to the time of the bytes floor."""
    summary, bandwidth = summarize(times), bench.record["ceilings"]["bytes_per_second"]
    floors = numbers["floor_bytes"]
    ratios = {
        "over_floor_x": summary["median"] * bandwidth / floors["x"],
        "over_floor": summary["median"] * bandwidth / (floors["x"] + floors["parameters"]),
    }
    return {**summary, **numbers, **ratios}


def release(device: torch.device) -> None:
    """Give memory back before the next cell: captured graphs hold theirs until they are collected."""
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):  # of a capture that failed; the next cell says so if the device is lost
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


def measure_growth(bench: Bench, over: str) -> None:
    """Forward + backward of our plain heads over the rank or the number of modes; slopes are fitted after each."""
    settings, tiny = bench.settings, bench.settings.cases == ["tiny"]
    mode = "graph" if settings.device == "cuda" and "graph" in (settings.modes or ["graph"]) else "eager"
    for size, case in {"rank": rank_cases, "modes": mode_cases}[over](tiny).items():
        contenders = select_contenders(case, ["ours"])
        modules, failures = make_modules(bench, contenders, case, settings.dtypes[0])
        group = make_group(bench, case, contenders, modules, settings.dtypes[0], "first", GROWTH_BATCH)
        group.failures |= failures
        cells = measure_cell(bench, group, mode, "both")
        for cell in cells:
            names = {k: cell[k] for k in ("dtype", "layout", "mode", "contender", "label")}
            point = {"series": {"over": over, **names}, "size": size, "case": case.key, "shape": case.shape}
            keep = ("failure", "median", "iqr", "multiply_adds", "saved_bytes")
            bench.record["points"].append({**point, **{k: cell[k] for k in keep if k in cell}})
        update_growth(bench)
        bench.tell(f"growth with the {over}, {size}: {write_times(cells)}")
        bench.save()
        del group, modules
        release(bench.device)


def update_growth(bench: Bench) -> None:
    """Fit the slopes anew, over what there is so far."""
    points = [point for point in bench.record["points"] if "median" in point]
    bench.record["growth"] = describe_growth(batch_points(bench.record["cells"]) + points)


def write_names(names: dict[str, Any]) -> str:
    """As in ``cifar, batch 8, float32, channels first``."""
    return f"{names['case']}, batch {names['batch']}, {names['dtype']}, channels {names['layout']}"


def write_times(cells: list[dict[str, Any]]) -> str:
    """Milliseconds of all contenders, or why there are none."""
    timed = [f"{c['contender']} {milliseconds(c['median'])}" for c in cells if "median" in c]
    return "; ".join(
        [", ".join(timed) + " ms", *(f"{c['contender']}: {c['failure']}" for c in cells if "failure" in c)]
    )
