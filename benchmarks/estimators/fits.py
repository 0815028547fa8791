"""How long a fit takes, where it ends, and what it must compute: faces, 1024×7×7 maps -> 136 coordinates, CP 128.

    python benchmarks/estimators/fits.py                       half an hour on two cores, most of it references
    python benchmarks/estimators/fits.py --device cuda         the same questions on a GPU, beside the CPU
    python benchmarks/estimators/fits.py --report              the tables, from the records

The maps are 1,024 channels of the last map of EfficientNet-Lite0 (benchmarks/estimators/features.py). Four parts, each
with n = 100 and 800 unless it says otherwise:

- ``ends``: the fit with its stopping rule against 1,000 iterations of L-BFGS on all parameters, at equal θ and α;
- ``search``: TensorRegressorCV with its default grid, n = 100, and TensorLy's CPRegressor;
- ``iteration``: the time of an evaluation and of an iteration beside the matrix products that they need;
- ``agreement``: test errors of separate fits (seeds, float64, devices), and predictions of one fit on two devices.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from position import FEATURES, mean_distance, split_images, write_table
from torch import Tensor

import tensor_dropout as td
from tensor_dropout.fitting.fit import Prepared, draw_start
from tensor_dropout.fitting.lbfgs import minimize
from tensor_dropout.fitting.objective import ExpectedLoss
from tensor_dropout.sklearn import TensorRegressor, TensorRegressorCV
from tensor_dropout.sklearn.defaults import auto_alpha
from tensor_dropout_lab.run_records import describe_environment, write_json

RECORDS = {"cpu": Path("results/speed/fits.json"), "cuda": Path("results/speed/fits-cuda.json")}
SIZES = (100, 800)
CHANNELS = 1024
SETTINGS = ((0.5, 1.0), (0.8, 0.3))
"""θ, and α in units of ``alpha="auto"``."""
REFERENCE = 1000
REPEATS = 7
LARGEST_REFERENCE = 100
"""The reference of 1,000 iterations is run for so many images unless --long."""


def load(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Training maps and targets, and those of other people."""
    folder = FEATURES / "faces"
    if not (folder / "groups.npy").exists():
        raise SystemExit(f"fits.py: {folder} is missing; make it with benchmarks/estimators/features.py")
    train, test = split_images(np.load(folder / "groups.npy"), 0)
    stored, targets = np.load(folder / "last.npy", mmap_mode="r"), np.load(folder / "targets.npy")
    rows = [train[:n], test[:1000]]
    maps = [np.stack([stored[row, :CHANNELS] for row in part]).astype(np.float32) for part in rows]
    return maps[0], targets[rows[0]], maps[1], targets[rows[1]]


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    """The result of a call, and its seconds."""
    if device != "cpu":
        torch.cuda.synchronize()
    began = time.perf_counter()
    result = call()
    if device != "cpu":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def fit(x: Any, y: Any, **settings: Any) -> TensorRegressor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TensorRegressor(random_state=0).set_params(**settings).fit(x, y)


# The parts.


def measure_ends(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The stopping rule against 1,000 iterations."""
    rows = []
    for n in options.n:
        x, y, x_test, y_test = load(n)
        for theta, times in SETTINGS:
            usual = {"theta": theta, "alpha": times * auto_alpha(None, n), "device": options.device}
            fit(x, y, **usual, max_iter=3)
            model, seconds = timed(lambda x=x, y=y, usual=usual: fit(x, y, **usual), options.device)
            row = {"n": n, **usual, "seconds": seconds, "n_iter": model.n_iter_}
            row |= {"error": mean_distance(model.predict(x_test), y_test), "objective": model.loss_curve_[-1]}
            if n <= LARGEST_REFERENCE or options.long:
                settings = {"solver": "lbfgs", "max_iter": REFERENCE, "tol": 0.0}
                long, spent = timed(lambda x=x, y=y, s=usual | settings: fit(x, y, **s), options.device)
                row["reference"] = {"seconds": spent, "n_iter": long.n_iter_, "objective": long.loss_curve_[-1]}
                row["reference"]["error"] = mean_distance(long.predict(x_test), y_test)
            rows.append(row)
            tell("ends", row)
    return rows


def measure_search(options: argparse.Namespace) -> dict[str, Any]:
    """The default grid; and TensorLy at rank 4 with five sweeps, on flattened targets."""
    x, y, x_test, y_test = load(100)
    settings = {"device": options.device, "n_jobs": None if options.device != "cpu" else 2}

    def search() -> TensorRegressorCV:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return TensorRegressorCV(random_state=0, **settings).fit(x, y)

    found, seconds = timed(search, options.device)
    times = [seconds]
    if options.device != "cpu":  # the first call also loads libraries and plans
        times += [timed(search, options.device)[1] for _ in range(2)]
    row: dict[str, Any] = {"seconds": times, "error": mean_distance(found.predict(x_test), y_test)}
    row["chosen"] = found.best_params_
    if options.device == "cpu":
        row["tensorly"] = measure_tensorly(x, y, x_test, y_test)
    tell("search", row)
    return row


def measure_tensorly(x: np.ndarray, y: np.ndarray, x_test: np.ndarray, y_test: np.ndarray) -> dict[str, Any]:
    from tensorly.regression import CPRegressor

    mean, std = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    std = np.maximum(std, 0.01 * np.median(std))
    center, scale = y.mean(0), y.std(0)
    model = CPRegressor(weight_rank=4, reg_W=1.0, n_iter_max=5, random_state=0, verbose=0)
    _, seconds = timed(lambda: model.fit(((x - mean) / std).astype(np.float32), (y - center) / scale), "cpu")
    predicted = model.predict(((x_test - mean) / std).astype(np.float32)) * scale + center
    return {"rank": 4, "sweeps": 5, "seconds": seconds, "error": mean_distance(predicted, y_test)}


def measure_iteration(options: argparse.Namespace) -> list[dict[str, Any]]:
    """An evaluation, and an iteration with its line search and direction, beside the two products of an evaluation."""
    rows = []
    for n in options.n:
        x, y, _, _ = load(n)
        loss, start = prepare(torch.from_numpy(x).to(options.device), torch.from_numpy(y).to(options.device))
        which = torch.arange(1, device=start.device)
        U, _ = loss.unpack(start)
        W = loss.projection.weight(U, slice(None))
        counted = Counted(loss)

        def products(loss: ExpectedLoss = loss, W: Tensor = W) -> None:
            for block in loss.projection.blocks:
                loss.projection.backward(loss.projection.forward(W, block, slice(None)), block, slice(None))

        calls = {
            "products": products,
            "evaluation": lambda loss=loss, start=start, which=which: loss.evaluate(start, which),
            "iterations": lambda counted=counted, start=start: minimize(counted, start, max_iter=20, tol=0.0),
        }
        samples: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(REPEATS + 1):
            for name, call in calls.items():
                seconds = timed(call, options.device)[1]
                if repeat:
                    samples[name].append(seconds)
        medians = {name: statistics.median(values) for name, values in samples.items()}
        K, positions = W.shape[2], x.shape[2] * x.shape[3]
        row = {"n": n, "products": medians["products"], "evaluation": medians["evaluation"]}
        row["iteration"] = medians["iterations"] / 20
        row["evaluations_per_iteration"] = counted.calls / (20 * (REPEATS + 1))
        row["gflops"] = 4e-9 * n * positions * loss.projection.n_channels * K / medians["products"]
        row["channels"] = loss.projection.n_channels
        rows.append(row)
        tell("iteration", row)
    return rows


class Counted:
    """Counts evaluations."""

    def __init__(self, loss: ExpectedLoss) -> None:
        self.loss, self.calls = loss, 0

    def evaluate(self, z: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        return self.loss.evaluate(z, which)


def prepare(x: Tensor, y: Tensor) -> tuple[ExpectedLoss, Tensor]:
    """The objective of ``TensorRegressor()``, as the fit makes it, and a start."""
    prepared = Prepared(x, y, None, "regression")
    dropout = td.TensorDropout(0.5)
    layer = td.CPRegression(tuple(x.shape[1:]), y.shape[1], 128, dropout=dropout, init="normal").to(x.device)
    assert prepared.axes is not None
    loss = ExpectedLoss(
        layer,
        prepared.projection,
        prepared.y.unsqueeze(0),
        prepared.weights.unsqueeze(0),
        torch.tensor([auto_alpha(None, len(x))], dtype=torch.float64, device=x.device),
        dropout.theta.reshape(1).to(x.device),
        prepared.axes.stretch.unsqueeze(0),
        "regression",
    )
    return loss, draw_start(layer, loss, [prepared.axes], [prepared.scale], [0])


def measure_agreement(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Separate fits, and one fit that predicts on both devices."""
    rows = []
    for n in options.n:
        x, y, x_test, y_test = load(n)
        fits: dict[str, dict[str, Any]] = {"usual": {}, "another seed": {"random_state": 1}}
        if n <= LARGEST_REFERENCE or options.long:
            fits["float64"] = {}
        if options.device != "cpu":
            fits["on the GPU"] = {"device": options.device}
        row: dict[str, Any] = {"n": n, "errors": {}}
        for name, settings in fits.items():
            dtype = np.float64 if name == "float64" else np.float32
            model = fit(x.astype(dtype), y, **settings)
            row["errors"][name] = mean_distance(model.predict(x_test.astype(dtype)), y_test)
        if options.device != "cpu":
            here = torch.from_numpy(x_test).to(options.device)
            on_gpu = model.predict(here).cpu().numpy()
            model.layer_.to("cpu")
            apart = np.abs(model.predict(x_test) - on_gpu) / y.std(0)
            row["largest difference of predictions, std"] = float(apart.max())
        rows.append(row)
        tell("agreement", row)
    return rows


PARTS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "ends": measure_ends,
    "search": measure_search,
    "iteration": measure_iteration,
    "agreement": measure_agreement,
}


# What is written.


def write_ends(rows: list[dict[str, Any]]) -> str:
    def line(row: dict[str, Any]) -> list[str]:
        cells = [str(row["n"]), f"{row['theta']:g}", f"{row['seconds']:.2f}", str(row["n_iter"]), f"{row['error']:.3f}"]
        if "reference" not in row:
            return [*cells, "", "", ""]
        long = row["reference"]
        apart = 100 * (row["error"] / long["error"] - 1)
        return [*cells, f"{long['seconds']:.1f}", f"{long['error']:.3f}", f"{apart:+.2f} %".replace("-", "−")]

    header = ["n", "θ", "seconds", "iterations", "test error", "1,000 iterations: s", "test error", "difference"]
    return write_table(header, map(line, rows), 0)


def write_search(row: dict[str, Any]) -> str:
    times = ", ".join(f"{each:.1f}" for each in row["seconds"])
    lines = [f"- `TensorRegressorCV()`, 45 fits, n = 100: {times} s; test error {row['error']:.3f}; {row['chosen']}"]
    if "tensorly" in row:
        other = row["tensorly"]
        lines.append(
            f"- TensorLy's CPRegressor, rank {other['rank']}, {other['sweeps']} sweeps: {other['seconds']:.1f} s; test "
            f"error {other['error']:.3f}"
        )
    return "\n".join(lines)


def write_iteration(rows: list[dict[str, Any]]) -> str:
    def line(row: dict[str, Any]) -> list[str]:
        needed = row["products"] * row["evaluations_per_iteration"]
        return [
            str(row["n"]),
            *(f"{1000 * row[key]:.2f}" for key in ("products", "evaluation", "iteration")),
            f"{row['evaluations_per_iteration']:.2f}",
            f"{row['evaluation'] / row['products']:.2f}",
            f"{row['iteration'] / needed:.2f}",
            f"{row['gflops']:.0f}",
        ]

    header = ["n", "two products, ms", "evaluation, ms", "iteration, ms", "evaluations in it", "evaluation / products"]
    return write_table([*header, "iteration / its products", "GFLOP/s of the products"], map(line, rows), 0)


def write_agreement(rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        errors = ", ".join(f"{name} {error:.3f}" for name, error in row["errors"].items())
        spread = 100 * (max(row["errors"].values()) / min(row["errors"].values()) - 1)
        apart = row.get("largest difference of predictions, std")
        more = "" if apart is None else f"; one fit on CPU and GPU: predictions apart by at most {apart:.1e} std"
        lines.append(f"- n = {row['n']}: {errors}: within {spread:.2f} %{more}")
    return "\n".join(lines)


WRITERS = {"ends": write_ends, "search": write_search, "iteration": write_iteration, "agreement": write_agreement}


def render(part: str, record: dict[str, Any]) -> str:
    """One part, for the docs."""
    return WRITERS[part](record["parts"][part])


def write_report(record: dict[str, Any]) -> str:
    environment = record["environment"]
    where = (
        f"{record['device']}, torch {environment['torch']}, {record['threads']} CPU threads: `{environment['command']}`"
    )
    parts = [f"## {part}\n\n{render(part, record)}" for part in PARTS if part in record["parts"]]
    return "\n\n".join(["# Fits", where, *parts]) + "\n"


def tell(part: str, row: dict[str, Any]) -> None:
    print(part, row, file=sys.stderr, flush=True)


# The command.


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="default: all")
    parser.add_argument("--n", nargs="+", type=int, default=SIZES, help="training images (default: 100 800)")
    parser.add_argument("--device", default="cpu", choices=RECORDS, help="where ours are fitted (default: cpu)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: 2)")
    parser.add_argument("--long", action="store_true", help="1,000 iterations and float64 for n above 100 too")
    parser.add_argument("--report", action="store_true", help="only the tables, from the record")
    parser.add_argument("--record", type=Path, help="default: results/speed/fits.json, fits-cuda.json for a GPU")
    return parser


def main(arguments: list[str] | None = None) -> None:
    import json

    options = make_parser().parse_args(arguments)
    torch.set_num_threads(options.threads)
    path = options.record or RECORDS[options.device]
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"parts": {}}
    if not options.report:
        name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
        for part in options.parts:
            record["parts"][part] = PARTS[part](options)
            record |= {"environment": describe_environment("scikit-learn"), "device": name, "threads": options.threads}
            write_json(path, record)
    print(write_report(record))


if __name__ == "__main__":
    main()
