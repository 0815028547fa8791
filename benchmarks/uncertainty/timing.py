"""What one pass with its interval costs, in seconds of the processor and in memory, by number of outputs."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from own_process import FailedApartError, measure_peak, run_apart
from torch import Tensor

import tensor_dropout as td
from tensor_dropout.calibration.leverage import Leverage
from tensor_dropout.calibration.regression import Calibration
from tensor_dropout_lab.run_records import describe_environment, write_json

RECORD = Path("results/speed/uncertainty.json")
OUTPUTS = (1, 10, 100, 1000, 10_000)
SHAPE, FEATURES, BATCH, FITTED = (112, 7, 7), 128, 64, 200
TUCKER = (64, 3, 3, 64)
ENOUGH, SECONDS, GIGABYTES = 0.5, 60, 4
DRAWS, MEMBERS = 32, 5
WAIT = 600
"""Seconds by the clock, for a machine that does other work beside."""

Pass = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From maps to the ends of intervals."""


def make_head(kind: str, outputs: int) -> Any:
    dropout = td.TensorDropout(0.5)
    if kind == "CP":
        rank = min(FEATURES, *td.CPRegression.largest_ranks((*SHAPE, outputs)))
        return td.CPRegression(SHAPE, outputs, rank=rank, dropout=dropout).eval()
    rank = (*TUCKER[:3], min(TUCKER[3], outputs))
    return td.TuckerRegression(SHAPE, outputs, rank=rank, dropout=dropout).eval()


def plain(kind: str, outputs: int) -> Pass:
    """The mean network and a constant."""
    head, half = make_head(kind, outputs), torch.ones(outputs)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = head(x)
        return mean - half, mean + half

    return run


def masks(kind: str, outputs: int) -> Pass:
    """Exact moments over the masks, and noise."""
    head, noise = make_head(kind, outputs), torch.ones(outputs)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = head.moments(x)
        half = 1.645 * (variance + noise).sqrt()
        return mean - half, mean + half

    return run


def leverage(kind: str, outputs: int) -> Pass:
    """What ``predict_interval`` does."""
    head = make_head(kind, outputs)
    size = head.output_features(head.project(torch.zeros(2, *SHAPE)), head.mask_moments(torch.zeros(1)))[0].shape[-1]
    known = Leverage(torch.zeros(1, size), 0.1 * torch.eye(size, dtype=torch.float64), torch.ones(1))
    ones = torch.ones(outputs, dtype=torch.float64)
    calibration = Calibration(ones, 0.5, ones, torch.randn(20, outputs), torch.arange(20), known)
    quantile = calibration.quantile(0.9).value

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = head(x)
        half = (quantile * calibration.std(known.measure(head, x), len(x))).to(mean)
        return mean - half, mean + half

    return run


def draws(outputs: int) -> Pass:
    head = make_head("CP", outputs).train()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return spread(torch.stack([head(x) for _ in range(DRAWS)]))

    return run


def members(outputs: int) -> Pass:
    heads = [make_head("CP", outputs) for _ in range(MEMBERS)]

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        return spread(torch.stack([head(x) for head in heads]))

    return run


def spread(stacked: Tensor) -> tuple[Tensor, Tensor]:
    mean, half = stacked.mean(0), 1.645 * stacked.std(0)
    return mean - half, mean + half


def laplace(structure: str, outputs: int) -> Pass:
    """laplace-torch on the features of a CP head, with its noise."""
    from uncertainty.last_layers import linear_model, make_laplace

    head = make_head("CP", FEATURES)
    model = linear_model(0.1 * torch.randn(FEATURES, outputs, dtype=torch.float64)).float()
    known = make_laplace(model, "regression", structure, torch.randn(FITTED, FEATURES), torch.randn(FITTED, outputs))

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        mean, covariance = known(head.project(x))
        variance = covariance.diagonal(dim1=-2, dim2=-1) if covariance.ndim == 3 else covariance
        half = 1.645 * (variance + known.sigma_noise.square()).sqrt()
        return mean - half, mean + half

    return run


def vbll(covariance: str, outputs: int) -> Pass:
    """vbll's regression on the features of a CP head."""
    from vbll.layers.regression import Regression

    head = make_head("CP", FEATURES)
    layer = Regression(FEATURES, outputs, 1 / FITTED, parameterization=covariance)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        found = layer.predictive(head.project(x))
        half = 1.645 * found.var.sqrt()
        return found.mean - half, found.mean + half

    return run


METHODS: dict[str, Callable[[int], Pass]] = {
    "CP, mean network and a constant": partial(plain, "CP"),
    "CP, leverage": partial(leverage, "CP"),
    "CP, exact masks": partial(masks, "CP"),
    "CP, 32 draws": draws,
    "CP, ensemble of five": members,
    "Tucker, mean network and a constant": partial(plain, "Tucker"),
    "Tucker, leverage": partial(leverage, "Tucker"),
    "Tucker, exact masks": partial(masks, "Tucker"),
    "Laplace, full": partial(laplace, "full"),
    "Laplace, Kronecker": partial(laplace, "kron"),
    "Laplace, diagonal": partial(laplace, "diag"),
    "VBLL, dense": partial(vbll, "dense"),
    "VBLL, diagonal": partial(vbll, "diagonal"),
}


def resident() -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS:")).split()[1])


def limit(seconds: float, gigabytes: float) -> None:
    """End this process after so many seconds of the processor; refuse more memory."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    resource.setrlimit(resource.RLIMIT_CPU, (spent + int(seconds), spent + int(seconds) + 5))
    data = int(gigabytes * 2**30) + resident()
    resource.setrlimit(resource.RLIMIT_DATA, (data, data))


def measure(method: str, outputs: int, paths: Sequence[str]) -> dict[str, float]:
    """In a process of its own: seconds of a pass and of what came before it, bytes held and at most."""
    sys.path[:0] = [path for path in paths if path not in sys.path]
    torch.manual_seed(0)
    warm = METHODS[method](3)
    with torch.no_grad():
        warm(torch.randn(2, *SHAPE))
    limit(SECONDS, GIGABYTES)
    before, began = resident(), time.process_time()
    run, x = METHODS[method](outputs), torch.randn(BATCH, *SHAPE)
    ready, held = time.process_time() - began, resident() - before
    with torch.no_grad():
        _, peak = measure_peak(lambda: run(x))
        passes, began = 0, time.process_time()
        while time.process_time() - began < ENOUGH:
            run(x)
            passes += 1
    seconds = (time.process_time() - began) / passes
    return {"seconds": seconds, "ready": ready, "bytes": max(0, held) + peak}


def measure_apart(method: str, outputs: int) -> dict[str, Any]:
    """Or why there is no number."""
    try:
        return run_apart(measure, method, outputs, sys.path, limit=WAIT)
    except TimeoutError:
        return {"stopped": "time"}
    except FailedApartError as error:
        text = str(error)
        kind = "memory" if "alloc" in text.lower() or "memory" in text.lower() else "time" if "status -" in text else ""
        return {"stopped": kind or "failed", "said": text.splitlines()[0][:120]}


def run_timing(record: Path, methods: Sequence[str] = tuple(METHODS), sizes: Sequence[int] = OUTPUTS) -> None:
    """All of them; what is stopped at a size is not tried at a larger one."""
    found: dict[str, dict[str, Any]] = {}
    for method in methods:
        rows = found.setdefault(method, {})
        for outputs in sizes:
            stopped = next((row for row in rows.values() if "stopped" in row), None)
            rows[str(outputs)] = stopped or measure_apart(method, outputs)
            print(f"{method}, {outputs} outputs: {rows[str(outputs)]}", file=sys.stderr, flush=True)
    settings = {"shape": SHAPE, "features": FEATURES, "batch": BATCH, "tucker": TUCKER, "seconds_of_passes": ENOUGH,
                "limit_seconds": SECONDS, "limit_gigabytes": GIGABYTES}  # fmt: skip
    environment = describe_environment("laplace-torch", "vbll")
    write_json(record, {"settings": settings, "methods": found, "environment": environment})
