"""Randomized tensor regression against flattened ridge on frozen maps: results/estimators-plan.md, cell by cell.

    python benchmarks/estimators/position.py --jobs 2                     every cell of the plan
    python benchmarks/estimators/position.py --sets retina --n 100        some of them
    python benchmarks/estimators/position.py --report                     tables and the picture, from the record
    python benchmarks/estimators/position.py --quick                      one small cell of each set, into --out

A cell is a set, a map, a number of training images and a split. All methods of a cell share images, folds and one
thread; with --jobs, cells run side by side in processes. A finished cell is one JSON line at the end of the record.
Cells that the record has are not run again, so an interrupted run goes on where it was. The maps are those of
benchmarks/estimators/features.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from joblib import Parallel, delayed
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold

from tensor_dropout.atomic_files import replacing
from tensor_dropout.sklearn import TensorRegressor, TensorRegressorCV
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.figures import draw_figure
from tensor_dropout_lab.run_records import describe_environment

FEATURES = Path("out/features")
RECORD = Path("results/estimators-position.jsonl")
PICTURE = Path("docs/images/estimators-position.png")
SETS = ("wings", "retina", "faces")
MAPS = {
    "block10-7": ("block10", 2),
    "block10-14": ("block10", 1),
    "last": ("last", 1),
    "resnet-8": ("resnet", 2),  # for benchmarks/position_heads.py
}
"""A file of the set, and how many positions in each direction are averaged into one."""
SIZES = {"block10-7": (50, 100, 200, 400, 800), "block10-14": (100, 400), "last": (100, 400)}
SPLITS = (0, 1, 2, 3, 4)
FOLDS = 5
TEST_SHARE = 0.25
COVERAGE = 0.9
RIDGE_ALPHAS = np.logspace(-9, 1, 21)
"""In units of the total squared length of the training features: the span and step of the product's own ridge."""
STD_FLOOR = 0.01
"""Of the median channel that varies; the same floor as the product's."""

MEAN, RIDGE, RIDGE_PER_POSITION, POOLED = "mean", "flattened ridge", "flattened ridge, per position", "pooled ridge"
DEFAULT, SEARCH, PLAIN, DROPOUT = "TensorRegressor()", "TensorRegressorCV()", "best with θ = 1", "best with θ < 1"
METHODS = (MEAN, POOLED, RIDGE, RIDGE_PER_POSITION, PLAIN, DROPOUT, DEFAULT, SEARCH)


# The data.


@dataclass(frozen=True, order=True)
class Cell:
    """One line of the record."""

    set: str
    map: str
    n: int
    split: int

    def __str__(self) -> str:
        return f"{self.set} {self.map} n = {self.n} split {self.split}"


def list_cells() -> list[Cell]:
    """The cells of the plan, splits last: an unfinished run has few splits of everything."""
    return [Cell(name, key, n, split) for split in SPLITS for name in SETS for key in SIZES for n in SIZES[key]]


def split_images(groups: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on, in a random order, and rows to test on, a quarter of the images, of other groups.

    The first n of the rows to train on are the training images of size n, so that sizes are nested.
    """
    generator = np.random.default_rng(seed)
    names, sizes = np.unique(groups, return_counts=True)
    order = generator.permutation(len(names))
    n_held = 1 + int(np.searchsorted(np.cumsum(sizes[order]), TEST_SHARE * len(groups)))
    held = np.isin(groups, names[order[:n_held]])
    return generator.permutation(np.flatnonzero(~held)), np.flatnonzero(held)


def load_map(features: Path, name: str, key: str, rows: np.ndarray) -> np.ndarray:
    """(len(rows), C, H, W) in float32; nothing else is read from the file."""
    file, side = MAPS[key]
    stored = np.load(features / name / f"{file}.npy", mmap_mode="r")
    maps = np.empty((len(rows), stored.shape[1], stored.shape[2] // side, stored.shape[3] // side), dtype=np.float32)
    for k, row in enumerate(rows):
        image = stored[row].astype(np.float32)
        n_channels, height, width = image.shape
        maps[k] = image.reshape(n_channels, height // side, side, width // side, side).mean((2, 4))
    return maps


def make_folds(groups: np.ndarray, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The folds that every method of a cell is tuned by."""
    folds = GroupKFold(FOLDS, shuffle=True, random_state=seed)
    return list(folds.split(np.empty(len(groups)), groups=groups))


def mean_distance(predicted: np.ndarray, true: np.ndarray) -> float:
    """Mean distance between predicted and true points in % of the image side; (n, 2k) are k pairs of x and y."""
    difference = (np.asarray(predicted, dtype=np.float64) - true).reshape(len(true), -1, 2)
    return float(100 * np.linalg.norm(difference, axis=-1).mean())


# The methods.


@dataclass(frozen=True)
class Data:
    """What the methods of a cell share."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    folds: list[tuple[np.ndarray, np.ndarray]]
    seed: int


def standardize(x: np.ndarray, x_test: np.ndarray, *, per_position: bool) -> tuple[np.ndarray, np.ndarray]:
    """Flattened maps over the std of their channel, or of their own, and centred at each position, by training maps."""
    axes = 0 if per_position else (0, 2, 3)
    std = x.std(axes, keepdims=True, dtype=np.float64)
    std = np.maximum(std, STD_FLOOR * np.median(std[std > 0])).astype(np.float32)
    mean = x.mean(0, keepdims=True, dtype=np.float64).astype(np.float32)
    return ((x - mean) / std).reshape(len(x), -1), ((x_test - mean) / std).reshape(len(x_test), -1)


def rotate(x: np.ndarray, x_test: np.ndarray, columns: int = 4096) -> tuple[np.ndarray, np.ndarray]:
    """The same samples in the at most n directions that the training samples span, in float64.

    Ridge gives the same predictions after a rotation, and what is outside the span it never sees: with n features in
    place of 5,000 to 60,000 scikit-learn's own RidgeCV takes seconds.
    """
    gram, cross = np.zeros((len(x), len(x))), np.zeros((len(x_test), len(x)))
    for start in range(0, x.shape[1], columns):
        part = x[:, start : start + columns].astype(np.float64)
        gram += part @ part.T
        cross += x_test[:, start : start + columns].astype(np.float64) @ part.T
    spectrum, vectors = np.linalg.eigh(gram)
    kept = spectrum > 1e-10 * spectrum[-1]
    root, vectors = np.sqrt(spectrum[kept]), vectors[:, kept]
    return vectors * root, cross @ vectors / root


def score_samples(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    """The criterion of TensorRegressorCV, for standardized targets (n, k): minus the error of a sample, averaged."""
    errors = model.predict(x).reshape(y.shape) - y  # of one target some models give (n,)
    return -float(np.sqrt(np.square(errors).mean(1)).mean())


def fit_ridge(
    data: Data, features: tuple[np.ndarray, np.ndarray], score: Callable[[Any, Any, Any], float] = score_samples
) -> dict[str, Any]:
    """scikit-learn's RidgeCV on these features; the folds are judged by the criterion of TensorRegressorCV."""
    x, x_test = rotate(*features)
    mean, std = data.y.mean(0, dtype=np.float64), data.y.std(0, dtype=np.float64)
    size = float(np.square(x).sum())
    ridge = RidgeCV(RIDGE_ALPHAS * size, cv=data.folds, scoring=score)
    ridge.fit(x, (data.y - mean) / std)
    return {"predicted": ridge.predict(x_test) * std + mean, "alpha": float(ridge.alpha_ / size)}


def fit_mean(data: Data) -> dict[str, Any]:
    return {"predicted": np.broadcast_to(data.y.mean(0), data.y_test.shape)}


def fit_pooled(data: Data) -> dict[str, Any]:
    pooled = (maps.mean((2, 3), keepdims=True) for maps in (data.x, data.x_test))
    return fit_ridge(data, standardize(*pooled, per_position=True))


def fit_flattened(data: Data) -> dict[str, Any]:
    return fit_ridge(data, standardize(data.x, data.x_test, per_position=False))


def fit_flattened_per_position(data: Data) -> dict[str, Any]:
    return fit_ridge(data, standardize(data.x, data.x_test, per_position=True))


BASELINES: dict[str, Callable[[Data], dict[str, Any]]] = {
    MEAN: fit_mean,
    POOLED: fit_pooled,
    RIDGE: fit_flattened,
    RIDGE_PER_POSITION: fit_flattened_per_position,
}


def run_baseline(data: Data, fit: Callable[[Data], dict[str, Any]]) -> dict[str, Any]:
    """Error and seconds; these include predicting the test images, which is little beside the search."""
    began = time.perf_counter()
    found = fit(data)
    seconds = time.perf_counter() - began
    return {"error": mean_distance(found.pop("predicted"), data.y_test), "seconds": seconds, **found}


def run_estimator(data: Data, model: Any) -> dict[str, Any]:
    """Fit one of ours; error, seconds of the fit, and what was used."""
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(data.x, data.y)
    seconds = time.perf_counter() - began
    return {
        "error": mean_distance(model.predict(data.x_test), data.y_test),
        "seconds": seconds,
        "method": model.method_,
        "rank": model.rank_,
        "theta": model.theta_,
        "alpha": model.alpha_,
        "n_iter": model.n_iter_,
        "converged": not any(issubclass(each.category, ConvergenceWarning) for each in caught),
    }


def best_params(search: Any, wanted: Callable[[float], bool]) -> dict[str, Any]:
    """The tensor candidate with the best held-out score among those with a wanted θ."""
    results = search.cv_results_
    scores = zip(results["params"], results["mean_test_score"], strict=True)
    return max(((p, s) for p, s in scores if p["theta"] is not None and wanted(p["theta"])), key=lambda each: each[1])[
        0
    ]


def summarize_search(search: Any) -> list[dict[str, Any]]:
    """Held-out score and seconds per fit of all tensor candidates, and of the best of either ridge."""
    results = search.cv_results_
    rows = [
        {"method": p["method"], "theta": p["theta"], "alpha": p["alpha"], "score": float(s), "seconds": float(t)}
        for p, s, t in zip(results["params"], results["mean_test_score"], results["mean_fit_time"], strict=True)
    ]
    ridges = [[row for row in rows if row["method"] == kind] for kind in ("flattened ridge", "pooled ridge")]
    return [row for row in rows if row["theta"] is not None] + [
        max(kind, key=lambda row: row["score"]) for kind in ridges
    ]


def measure_interval(search: Any, data: Data) -> dict[str, float]:
    """How many of the true coordinates fall into the intervals, and how wide these are in % of the image side."""
    low, high = search.predict_interval(data.x_test, COVERAGE)
    inside = (low <= data.y_test) & (data.y_test <= high)
    return {"coverage": float(inside.mean()), "width": float(100 * (high - low).mean(dtype=np.float64))}


def run_cell(cell: Cell, features: Path, device: str | None) -> dict[str, Any] | None:
    """All methods of a cell, on one thread or a GPU; None where the training part has fewer images."""
    torch.set_num_threads(1)
    groups, targets = (np.load(features / cell.set / f"{file}.npy") for file in ("groups", "targets"))
    train, test = split_images(groups, cell.split)
    if cell.n > len(train):
        return None
    rows = train[: cell.n]
    x, x_test = (load_map(features, cell.set, cell.map, part) for part in (rows, test))
    data = Data(x, targets[rows], x_test, targets[test], make_folds(groups[rows], cell.split), cell.split)
    ours = {"random_state": cell.split, "device": device}
    search = TensorRegressorCV(cv=data.folds, **ours)
    methods = {name: run_baseline(data, fit) for name, fit in BASELINES.items()}
    methods[DEFAULT] = run_estimator(data, TensorRegressor(**ours))
    methods[SEARCH] = run_estimator(data, search)
    for name, wanted in ((PLAIN, lambda theta: theta == 1), (DROPOUT, lambda theta: theta < 1)):
        params = best_params(search, wanted)
        settings = {key: params[key] for key in ("rank", "theta", "alpha")}
        if search.best_params_ == params:
            methods[name] = methods[SEARCH]
        else:
            methods[name] = run_estimator(data, TensorRegressor(params["method"], **settings, **ours))
    return {
        **asdict(cell),
        "n_test": len(test),
        "n_groups": len(np.unique(groups[rows])),
        "shape": list(x.shape[1:]),
        "methods": methods,
        "interval": measure_interval(search, data),
        "search": summarize_search(search),
    }


# The record.


def read_record(path: Path) -> dict[Cell, dict[str, Any]]:
    """The finished cells; a line that was cut off is left out, and of two lines for a cell the last counts."""
    found = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines() if path.exists() else [], 1):
        try:
            row = json.loads(line)
            cell = Cell(row["set"], row["map"], row["n"], row["split"])
        except (ValueError, KeyError, TypeError):
            print(f"{path}: line {number} is not a whole cell; left out", file=sys.stderr)
            continue
        found[cell] = row
    return found


def append(path: Path, row: dict[str, Any]) -> None:
    """Add one line; after half a line it begins on a new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write((json.dumps(shorten(row), ensure_ascii=False) + "\n").encode())


def shorten(value: Any) -> Any:
    """Six digits of every float, which is more than any of them means; NaN and infinity become null."""
    if isinstance(value, dict):
        return {key: shorten(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shorten(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if np.isfinite(value) else None
    return value


def run_cells(cells: Sequence[Cell], features: Path, record: Path, jobs: int, device: str | None) -> None:
    """Run what the record does not have, and add each cell as it ends."""
    done = read_record(record)
    todo = [cell for cell in cells if cell not in done and exists(cell, features)]
    began = time.perf_counter()
    environment = describe_environment("scikit-learn", "numpy") | {"threads": 1, "jobs": jobs}
    environment |= {"device": torch.cuda.get_device_name() if device == "cuda" else device or "cpu"}
    results = Parallel(n_jobs=jobs, return_as="generator_unordered")(
        delayed(run_timed)(cell, features, device) for cell in todo
    )
    for k, row in enumerate(results, 1):
        append(record, {**row, "environment": environment})
        print(
            f"{time.perf_counter() - began:6.0f} s  {k}/{len(todo)}  {describe_row(row)}", file=sys.stderr, flush=True
        )


def exists(cell: Cell, features: Path) -> bool:
    """Whether the training part has as many images."""
    groups = features / cell.set / "groups.npy"
    if not groups.exists():
        raise SystemExit(f"position.py: {groups} is missing; make it with benchmarks/estimators/features.py")
    return cell.n <= len(split_images(np.load(groups), cell.split)[0])


def run_timed(cell: Cell, features: Path, device: str | None) -> dict[str, Any]:
    """The cell, and how long all of it took."""
    began = time.perf_counter()
    row = run_cell(cell, features, device)
    assert row is not None
    return {**row, "seconds": time.perf_counter() - began}


def describe_row(row: dict[str, Any]) -> str:
    """A line of progress."""
    cell = Cell(row["set"], row["map"], row["n"], row["split"])
    errors = {name: row["methods"][name]["error"] for name in (RIDGE, PLAIN, DEFAULT, SEARCH)}
    won = row["methods"][SEARCH]
    listed = ", ".join(f"{name} {error:.3f}" for name, error in errors.items())
    return f"{cell}: {listed} ({won['method']}, θ = {won['theta']}); {row['seconds']:.0f} s"


# The report.

PAIRS = ((SEARCH, RIDGE), (SEARCH, RIDGE_PER_POSITION), (DEFAULT, RIDGE), (PLAIN, RIDGE), (DROPOUT, PLAIN))
"""Whose error is compared with whose."""
Key = tuple[str, str, int]


def relative_difference(rows: Iterable[dict[str, Any]], method: str, other: str) -> tuple[float, float, float]:
    """Mean of the paired relative differences of the errors in %, and the ends of its 95 % t interval over splits."""
    changes = [100 * (row["methods"][method]["error"] / row["methods"][other]["error"] - 1) for row in rows]
    if len(changes) < 2:
        return changes[0], float("nan"), float("nan")
    return float(np.mean(changes)), *seed_interval(changes)


def group_rows(record: dict[Cell, dict[str, Any]]) -> dict[Key, list[dict[str, Any]]]:
    """The splits of each set, map and size, in the plan's order."""
    order = {key: k for k, key in enumerate((name, each, n) for name in SETS for each in SIZES for n in SIZES[each])}
    groups: dict[Key, list[dict[str, Any]]] = {}
    for cell in sorted(record):
        groups.setdefault((cell.set, cell.map, cell.n), []).append(record[cell])
    return dict(sorted(groups.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def average(rows: list[dict[str, Any]], method: str, what: str) -> float:
    return float(np.mean([row["methods"][method][what] for row in rows]))


def write_interval(difference: tuple[float, float, float]) -> str:
    mean, low, high = difference
    ends = "" if np.isnan(low) else f" [{low:+.1f}, {high:+.1f}]"
    return f"{mean:+.1f}{ends}".replace("-", "−")


def write_table(header: Sequence[str], rows: Iterable[Sequence[str]], n_left: int = 3) -> str:
    """A Markdown table whose first columns are text."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * n_left + " ---: |" * (len(header) - n_left)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def name_key(key: Key) -> list[str]:
    return [key[0], key[1], str(key[2])]


def write_errors(groups: dict[Key, list[dict[str, Any]]]) -> str:
    def row(key: Key, rows: list[dict[str, Any]]) -> list[str]:
        errors = {method: average(rows, method, "error") for method in METHODS}
        cells = [f"{error:.3f}" if error > min(errors.values()) else f"**{error:.3f}**" for error in errors.values()]
        return [*name_key(key), str(len(rows)), *cells]

    return write_table(["set", "map", "n", "splits", *METHODS], (row(*item) for item in groups.items()))


def write_differences(groups: dict[Key, list[dict[str, Any]]]) -> str:
    header = ["set", "map", "n", *(f"{a} to {b}" for a, b in PAIRS)]
    return write_table(
        header,
        ([*name_key(key), *(write_interval(relative_difference(rows, *pair)) for pair in PAIRS)]
         for key, rows in groups.items()),
    )  # fmt: skip


def write_winners(groups: dict[Key, list[dict[str, Any]]]) -> str:
    def row(key: Key, rows: list[dict[str, Any]]) -> list[str]:
        won = [each["methods"][SEARCH] for each in rows]
        names = [each["method"] if each["theta"] is None else f"{each['method']} θ = {each['theta']:g}" for each in won]
        counts = ", ".join(f"{name}: {names.count(name)}" for name in sorted(set(names)))
        coverage = np.mean([each["interval"]["coverage"] for each in rows])
        width = np.mean([each["interval"]["width"] for each in rows])
        return [*name_key(key), counts, f"{100 * coverage:.1f} %", f"{width:.2f}"]

    header = ["set", "map", "n", "chosen (splits)", f"inside {100 * COVERAGE:.0f} % intervals", "their width"]
    return write_table(header, (row(*item) for item in groups.items()), 4)


def write_times(groups: dict[Key, list[dict[str, Any]]]) -> str:
    shown = (RIDGE, DEFAULT, SEARCH)
    return write_table(
        ["set", "map", "n", *(f"{name}, s" for name in shown), "iterations", "not converged"],
        ([*name_key(key), *(f"{average(rows, name, 'seconds'):.1f}" for name in shown),
          f"{average(rows, DEFAULT, 'n_iter'):.0f}",
          str(sum(not row["methods"][name]["converged"] for row in rows for name in (DEFAULT, SEARCH)))]
         for key, rows in groups.items()),
    )  # fmt: skip


def judge(groups: dict[Key, list[dict[str, Any]]]) -> list[str]:
    """The plan's bars: what was asked, what was found. Differences are means over splits, in %."""
    against = {
        name: {key: relative_difference(rows, method, RIDGE)[0] for key, rows in groups.items()}
        for name, method in (("search", SEARCH), ("default", DEFAULT))
    }
    suited = [suited_map(groups, name, 100) for name in SETS]
    if None in suited or not all((name, "last", n) in groups for name in SETS for n in (100, 400)):
        return ["The bars are judged when the cells with n = 100 and 400 of all sets are there."]
    at_100 = sorted(against["search"][name, key, 100] for name, key in zip(SETS, suited, strict=True))
    default = {name: against["default"][name, key, 100] for name, key in zip(SETS, suited, strict=True)}
    last = {key: d for key, d in against["search"].items() if key[1] == "last"}
    worst_key, worst = max(against["search"].items(), key=lambda item: item[1])
    where = ", ".join(f"{name} {key}" for name, key in zip(SETS, suited, strict=True))
    listed = ", ".join(write_interval((each, float("nan"), float("nan"))) for each in at_100)
    defaults = ", ".join(f"{name} {each:+.1f}" for name, each in default.items()).replace("-", "−")
    lasts = ", ".join(f"{name} {n}: {d:+.1f}" for (name, _, n), d in last.items()).replace("-", "−")
    return [
        f"{met(at_100[1] <= -10 and at_100[2] <= -5)}: n = 100, two sets −10 and the third −5 ({where}): {listed}",
        f"{met(max(last.values()) <= 0)}: level or better on the last map: {lasts}",
        f"{met(worst <= 2)}: never worse by more than 2: the worst is {worst:+.1f} ({' '.join(map(str, worst_key))})",
        f"{met(max(default.values()) < 0)}: TensorRegressor() better than ridge at n = 100 on all three: {defaults}",
    ]


def met(good: bool) -> str:
    return "met" if good else "**missed**"


def suited_map(groups: dict[Key, list[dict[str, Any]]], name: str, n: int) -> str | None:
    """The map of block 10 with the lower error of flattened ridge; None where one of them is missing."""
    keys = [key for key in ("block10-7", "block10-14") if (name, key, n) in groups]
    return min(keys, key=lambda key: average(groups[name, key, n], RIDGE, "error")) if len(keys) == 2 else None


PARTS: dict[str, Callable[[dict[Key, list[dict[str, Any]]]], str]] = {
    "errors": write_errors,
    "differences": write_differences,
    "bars": lambda groups: "\n".join(f"- {line}" for line in judge(groups)),
    "chosen": write_winners,
    "times": write_times,
}


def render(part: str, record: dict[Cell, dict[str, Any]]) -> str:
    """One of :data:`PARTS`, for the docs."""
    return PARTS[part](group_rows(record))


def write_report(record: dict[Cell, dict[str, Any]]) -> str:
    """The tables in Markdown."""
    groups = group_rows(record)
    made = {json.dumps(row["environment"], sort_keys=True): row["environment"] for row in record.values()}
    where = [
        f"- torch {each['torch']}, scikit-learn {each['scikit-learn']}, commit {str(each.get('commit'))[:7]}"
        f"{' with changes' if each.get('dirty') else ''}, ours on {each['device']}, --jobs {each['jobs']}, one thread "
        f"each: `{each['command']}`"
        for each in made.values()
    ]
    return "\n\n".join(
        [
            "# Estimators on three position sets",
            "Mean distance between predicted and true points, % of the image side; mean over splits.",
            write_errors(groups),
            "## Differences",
            "Paired relative differences of the error in %, negative where the first is better: mean over splits and "
            "95 % t interval. Splits share images, so the intervals are somewhat too narrow.",
            write_differences(groups),
            "## The bars",
            "\n".join(f"- {line}" for line in judge(groups)),
            "## What the search chose, and its intervals",
            write_winners(groups),
            "## Times",
            "Seconds on one thread, other cells beside it; iterations of `TensorRegressor()`; how many of the fits on "
            "all images, of it and of what the search chose, say that they did not converge.",
            write_times(groups),
            "## Made by",
            "\n".join(where),
        ]
    )


DRAWN = {
    MEAN: ("predict the mean", "#999999", ":"),
    POOLED: ("ridge, pooled maps", "#8c564b", ":"),
    RIDGE: ("ridge, flattened maps", "black", "-"),
    PLAIN: ("tensor regression without dropout", "C0", "--"),
    DEFAULT: ("TensorRegressor(), untuned", "C1", "-"),
    SEARCH: ("TensorRegressorCV()", "C3", "-"),
}
TITLES = {"wings": "fly wings, 15 points", "retina": "optic disc, 2 points", "faces": "faces, 68 points"}


def draw(record: dict[Cell, dict[str, Any]], path: Path, key: str = "block10-7") -> None:
    """The error over n: a panel for each set, a line for each method, 95 % t intervals over splits."""
    groups = group_rows(record)
    with draw_figure(10.5, 3.8) as figure:
        panels = figure.subplots(1, len(SETS), squeeze=False)[0]
        for panel, name in zip(panels, SETS, strict=True):
            draw_set({n: rows for (each, map_, n), rows in groups.items() if (each, map_) == (name, key)}, panel)
            panel.set(title=TITLES[name], xlabel="labelled images")
        panels[0].set_ylabel("error: mean distance, % of the image side")
        handles, labels = next((p.get_legend_handles_labels() for p in panels if p.has_data()), ([], []))
        figure.legend(handles, labels, loc="outside upper left", ncols=3, fontsize=9)
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")


def draw_set(sizes: dict[int, list[dict[str, Any]]], panel: Any) -> None:
    """One panel."""
    if not sizes:
        return
    ns = sorted(sizes)
    ticks: list[float] = []
    for shift, (method, (label, color, style)) in enumerate(DRAWN.items()):
        errors = [[row["methods"][method]["error"] for row in sizes[n]] for n in ns]
        means = [float(np.mean(each)) for each in errors]
        half = [mean - seed_interval(each)[0] if len(each) > 1 else 0 for mean, each in zip(means, errors, strict=True)]
        at = [n * 1.012 ** (shift - len(DRAWN) / 2) for n in ns]
        panel.errorbar(at, means, half, color=color, linestyle=style, marker="o", markersize=3, capsize=2, label=label)
        ticks += means
    panel.set(xscale="log", yscale="log", xticks=ns, xticklabels=ns)
    panel.minorticks_off()
    levels = [
        t for t in (0.5, 0.7, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 15, 20, 25, 30) if min(ticks) * 0.8 < t < max(ticks)
    ]
    panel.set(yticks=levels, yticklabels=[f"{level:g}" for level in levels])


# The command.


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--maps", nargs="+", choices=SIZES, default=tuple(SIZES))
    parser.add_argument("--n", nargs="+", type=int, choices=SIZES["block10-7"], default=SIZES["block10-7"])
    parser.add_argument("--splits", nargs="+", type=int, choices=SPLITS, default=SPLITS)
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side, one thread each (default: 1)")
    parser.add_argument(
        "--device", help="where ours are fitted, such as cuda (default: the CPU); ridge stays on the CPU"
    )
    parser.add_argument("--report", action="store_true", help="only tables and the picture, of the cells asked for")
    parser.add_argument("--quick", action="store_true", help="n = 50, one split, one map; into --out")
    parser.add_argument("--features", type=Path, default=FEATURES, help=f"default: {FEATURES}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}")
    parser.add_argument("--picture", type=Path, help=f"default: {PICTURE}")
    return parser


def choose_cells(options: argparse.Namespace) -> list[Cell]:
    """The cells that were asked for."""
    cells = [cell for cell in list_cells() if cell.set in options.sets and cell.map in options.maps]
    cells = [cell for cell in cells if cell.n in options.n and cell.split in options.splits]
    return (
        [cell for cell in cells if (cell.map, cell.n, cell.split) == ("block10-7", 50, 0)] if options.quick else cells
    )


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    record = options.record or (options.out / "estimators-position.jsonl" if options.quick else RECORD)
    picture = options.picture or (options.out / "estimators-position.png" if options.quick else PICTURE)
    cells = choose_cells(options)
    if not options.report:
        run_cells(cells, options.features, record, options.jobs, options.device)
    found = read_record(record)
    found = {cell: found[cell] for cell in cells if cell in found}
    if not found:
        raise SystemExit(f"position.py: {record} has none of these cells")
    print(write_report(found))
    picture.parent.mkdir(parents=True, exist_ok=True)
    draw(found, picture)


if __name__ == "__main__":
    main()
