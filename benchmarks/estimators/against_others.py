"""The estimators against scikit-learn and TensorLy: error, time, memory and what was chosen, on nine data sets.

    python benchmarks/estimators/against_others.py --data ../shared/data         every cell, an hour or more
    python benchmarks/estimators/against_others.py --sets simulated wings        some of them
    python benchmarks/estimators/against_others.py --report                      tables, from the record
    python benchmarks/estimators/against_others.py --quick --sets simulated      tiny settings, into --out

A cell is a data set and a method. The methods of a data set run in turn, each in a process of its own with one thread;
a finished cell is one JSON line at the end of the record, and cells that the record has are not run again. All methods
see the same samples. What is tuned is tuned by the same five folds of the training part, never by test data.
The maps are those of benchmarks/estimators/features.py; --data names the folder with multiway/adrenal28.npz and
multiway/olive_eem.mat. TensorLy: pip install "tensor-dropout[bench]".
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from own_process import FailedApartError, measure_peak, run_apart
from position import (
    FEATURES,
    FOLDS,
    Data,
    append,
    fit_ridge,
    load_map,
    make_folds,
    mean_distance,
    score_samples,
    split_images,
    standardize,
    write_table,
)
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.cross_decomposition import PLSRegression
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import MultiTaskLassoCV, Ridge
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import GridSearchCV, KFold, StratifiedKFold

from tensor_dropout.sklearn import TensorClassifier, TensorClassifierCV, TensorRegressor, TensorRegressorCV
from tensor_dropout_lab.run_records import describe_environment

RECORD = Path("results/estimators-others.jsonl")
MAP, SPLIT = "block10-7", 0
LIMIT = 3600.0
FLOPS, BYTES = 3e10, 2**30
"""What one sweep of CPRegressor may take at the largest rank that is tried."""


@dataclass(frozen=True)
class Effort:
    """How large the data are, and what each method may try: not fewer candidates than the search of ours, nine."""

    n: int = 100
    n_test: int = 10**9
    n_classified: int = 10**9
    components: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 11, 15, 20, 28, 40)
    gammas: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0, 3.0)
    weights: tuple[float, ...] = tuple(10.0**k for k in range(-6, 3))
    n_lasso: int = 21
    norms: tuple[float, ...] = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    largest_rank: int = 128
    tucker_ranks: tuple[int, ...] = (2, 4, 8)
    sweeps: int = 10
    single: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)


FULL = Effort()
QUICK = Effort(
    n=40,
    n_test=60,
    n_classified=80,
    components=(1, 4),
    gammas=(1.0,),
    weights=(0.01, 1.0),
    n_lasso=3,
    norms=(10.0,),
    largest_rank=2,
    tucker_ranks=(2,),
    sweeps=2,
    single={"max_iter": 10},
    search={"max_iter": 5, "thetas": (1.0, 0.5), "alphas": (1e-3,)},
)


# The data sets.


@dataclass(frozen=True)
class Sources:
    """Where the data are, and how much of them is used."""

    features: Path
    data: Path | None
    effort: Effort


@dataclass(frozen=True)
class DataSet:
    """A row of the table.

    Attributes:
        about: what it is, for the report.
        measure: what the figures are.
        load: the parts; each has training and test samples, and what is predicted for their tests is judged together.
        error: of predictions and targets, each (n, k).
        files: what it needs.
        classes: whether the target is a class, 0 or 1, and the figure an AUC, where more is better.
    """

    about: str
    measure: str
    load: Callable[[Sources], list[Data]]
    error: Callable[[np.ndarray, np.ndarray], float]
    files: Callable[[Sources], list[Path | None]] = lambda sources: []
    classes: bool = False


def simulate(sources: Sources, n_outputs: int) -> list[Data]:
    """Normal features 16×8×8, a weight of CP rank 3, and noise of a third of the signal's std."""
    rng, shape, n = np.random.default_rng(0), (16, 8, 8), 2 * sources.effort.n
    n_test = min(1000, sources.effort.n_test)
    x = rng.normal(size=(n + n_test, *shape)).astype(np.float32)
    modes = (*shape, n_outputs)
    weight = sum(reduce(np.multiply.outer, [rng.normal(size=size) for size in modes]) for _ in range(3))
    signal = np.tensordot(x, weight, 3)
    signal /= signal.std(0)
    y = (signal + rng.normal(size=signal.shape) / 3).astype(np.float32)
    return [Data(x[:n], y[:n], x[n:], y[n:], make_folds(np.arange(n), 0), 0)]


def load_position(sources: Sources, name: str, n_targets: int | None = None) -> list[Data]:
    """Training images and test images of other groups; with ``n_targets`` only the first coordinates."""
    folder = sources.features / name
    groups, targets = (np.load(folder / f"{file}.npy") for file in ("groups", "targets"))
    train, test = split_images(groups, SPLIT)
    rows, test = train[: sources.effort.n], test[: sources.effort.n_test]
    x, x_test = (load_map(sources.features, name, MAP, part) for part in (rows, test))
    y = targets[:, :n_targets]
    return [Data(x, y[rows], x_test, y[test], make_folds(groups[rows], SPLIT), SPLIT)]


def load_adrenal(sources: Sources, side: int) -> list[Data]:
    """Volumes averaged to side³; the official training and validation parts to train on, and the test part."""
    stored = np.load(adrenal_file(sources))

    def part(*names: str) -> tuple[np.ndarray, np.ndarray]:
        labels = np.concatenate([stored[f"{name}_labels"].ravel() for name in names]).astype(np.int64)
        return np.concatenate([average_voxels(stored[f"{name}_images"], side) for name in names]), labels[:, None]

    most, most_tested = sources.effort.n_classified, sources.effort.n_test
    (x, y), (x_test, y_test) = part("train", "val"), part("test")
    x, y, x_test, y_test = x[:most], y[:most], x_test[:most_tested], y_test[:most_tested]
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y[:, 0])
    return [Data(x, y, x_test, y_test, list(folds), 0)]


def average_voxels(volumes: np.ndarray, side: int) -> np.ndarray:
    """(n, 28, 28, 28) in bytes -> (n, side, side, side) in float32."""
    k = volumes.shape[1] // side
    return np.stack([each.astype(np.float32).reshape(side, k, side, k, side, k).mean((1, 3, 5)) for each in volumes])


def load_olive(sources: Sources) -> list[Data]:
    """Five folds; each is tested once, and those who tune have five folds of the other four."""
    path = olive_file(sources)
    assert path is not None
    x, y = read_mat(path, "cube").astype(np.float32), read_mat(path, "concentrations").astype(np.float32).ravel()
    parts = []
    for train, test in KFold(FOLDS, shuffle=True, random_state=0).split(x):
        folds = list(KFold(FOLDS, shuffle=True, random_state=0).split(train))
        parts.append(Data(x[train], y[train, None], x[test], y[test, None], folds, 0))
    return parts


def read_mat(path: Path, name: str) -> np.ndarray:
    """An array of a MATLAB file."""
    from scipy.io import loadmat

    return np.asarray(loadmat(path, variable_names=[name])[name])


def adrenal_file(sources: Sources) -> Path | None:
    return sources.data and sources.data / "multiway" / "adrenal28.npz"


def olive_file(sources: Sources) -> Path | None:
    return sources.data and sources.data / "multiway" / "olive_eem.mat"


def relative_error(predicted: np.ndarray, true: np.ndarray) -> float:
    """In % of the targets' std."""
    return float(100 * np.sqrt(np.square(predicted - true).mean() / np.var(true, axis=0).mean()))


def absolute_error(predicted: np.ndarray, true: np.ndarray) -> float:
    return float(np.abs(predicted - true).mean())


def area_under_curve(predicted: np.ndarray, true: np.ndarray) -> float:
    return float(roc_auc_score(true[:, 0], predicted[:, 0]))


def position_set(name: str) -> DataSet:
    return DataSet(
        f"{name}: frozen EfficientNet-Lite0 maps 112×7×7, n = {FULL.n}, split {SPLIT}, test images of other groups",
        "mean distance, % of the image side",
        lambda sources: load_position(sources, name),
        mean_distance,
        lambda sources: [sources.features / name / "groups.npy"],
    )


def position_target(name: str) -> DataSet:
    return DataSet(
        f"{name}, one target: the same, the first coordinate alone",
        "mean absolute error, % of the image side",
        lambda sources: load_position(sources, name, 1),
        lambda predicted, true: 100 * absolute_error(predicted, true),
        lambda sources: [sources.features / name / "groups.npy"],
    )


def adrenal_set(side: int) -> DataSet:
    return DataSet(
        f"adrenal {side}³: AdrenalMNIST3D (MedMNIST v2, CC BY 4.0), 28³ voxels averaged to {side}³, 1,286 volumes of "
        "two classes, 298 to test",
        "AUC (more is better)",
        lambda sources: load_adrenal(sources, side),
        area_under_curve,
        lambda sources: [adrenal_file(sources)],
        classes=True,
    )


SETS: dict[str, DataSet] = {
    "simulated": DataSet(
        "simulated: normal features 16×8×8, five targets of a weight of CP rank 3, noise 1/3 of the signal; n = 200",
        "root mean squared error, % of the targets' std; noise alone 32",
        lambda sources: simulate(sources, 5),
        relative_error,
    ),
    "simulated, one target": DataSet(
        "simulated, one target: the same with one target",
        "root mean squared error, % of the target's std; noise alone 32",
        lambda sources: simulate(sources, 1),
        relative_error,
    ),
    "wings": position_set("wings"),
    "retina": position_set("retina"),
    "faces": position_set("faces"),
    "wings, one target": position_target("wings"),
    "retina, one target": position_target("retina"),
    "faces, one target": position_target("faces"),
    "olive": DataSet(
        "olive: fluorescence 501×13 of 80 olive-oil samples of four series -> concentration of 0 to 91 %; five-fold "
        "cross-validation, all series in every fold; times are of all five",
        "mean absolute error, percentage points",
        load_olive,
        absolute_error,
        lambda sources: [olive_file(sources)],
    ),
    "adrenal 7": adrenal_set(7),
    "adrenal 14": adrenal_set(14),
}


def describe_missing(name: str, sources: Sources) -> str | None:
    """One sentence for a data set that is not there."""
    for path in SETS[name].files(sources):
        if path is None:
            return f"{name} needs --data FOLDER, the folder that holds multiway"
        if not path.exists():
            cure = "name its folder by --data"
            cure = "make it with benchmarks/estimators/features.py" if path.suffix == ".npy" else cure
            return f"{name} needs {path}, which is missing; {cure}, or leave it out by --sets"
    return None


# The methods. Each gets training data and test features, and says what it predicts and what it chose.


@dataclass(frozen=True)
class Answer:
    """Predictions (n, k) for the test samples; what was chosen, and from how many candidates."""

    predicted: np.ndarray
    chosen: str
    candidates: int = 1


def fit_ours(data: Data, effort: Effort, *, classes: bool, search: bool) -> Answer:
    """On raw features and targets."""
    model: Any
    if search:
        model = (TensorClassifierCV if classes else TensorRegressorCV)(cv=data.folds, **effort.search)
    else:
        model = (TensorClassifier if classes else TensorRegressor)(**effort.single)
    model.set_params(random_state=data.seed)
    model.fit(data.x, data.y[:, 0] if classes or data.y.shape[1] == 1 else data.y)
    predicted = model.decision_function(data.x_test) if classes else model.predict(data.x_test)
    n_candidates = len(model.cv_results_["params"]) if search else 1
    return Answer(as_columns(predicted), describe_ours(model), n_candidates)


def describe_ours(model: Any) -> str:
    if model.theta_ is None:
        return f"{model.method_}, α = {model.alpha_:.2g}"
    return f"{model.method_} {model.rank_}, θ = {model.theta_:g}, α = {model.alpha_:.2g}, {model.n_iter_} iterations"


def as_columns(values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype=np.float64)
    return values[:, None] if values.ndim == 1 else values


def prepare(data: Data) -> tuple[np.ndarray, np.ndarray]:
    """Flattened features as those of position.py: over the std of their channel, centred at each position."""
    x, x_test = (x.reshape(*x.shape[:2], -1, 1) for x in (data.x, data.x_test))
    return standardize(x, x_test, per_position=False)


def score_classes(model: Any, x: np.ndarray, y: np.ndarray) -> float:
    """AUC where the class is the larger of two values."""
    predicted = model.predict(x)
    return float(roc_auc_score(y > y.mean(), predicted)) if np.isfinite(predicted).all() else 0.0


def tune(model: Any, grid: Any, data: Data, x: np.ndarray, x_test: np.ndarray, *, classes: bool) -> tuple[Any, Answer]:
    """scikit-learn's GridSearchCV by the folds of the data, on standardized targets."""
    mean, std = data.y.mean(0, dtype=np.float64), data.y.std(0, dtype=np.float64)
    score = score_classes if classes else score_samples
    search = GridSearchCV(model, grid, scoring=score, cv=data.folds, error_score=-np.inf)
    search.fit(x, (data.y - mean) / std)
    predicted = as_columns(search.predict(x_test)) * std + mean
    return search.best_params_, Answer(predicted, "", len(search.cv_results_["params"]))


def fit_default_ridge(data: Data, effort: Effort, *, classes: bool) -> Answer:
    x, x_test = prepare(data)
    return Answer(as_columns(Ridge().fit(x, data.y).predict(x_test)), "α = 1")


def fit_ridge_cv(data: Data, effort: Effort, *, classes: bool) -> Answer:
    found = fit_ridge(data, prepare(data), score_classes if classes else score_samples)
    return Answer(as_columns(found["predicted"]), f"α = {found['alpha']:.1g} of the squared length", 21)


def fit_kernel_ridge(data: Data, effort: Effort, *, classes: bool) -> Answer:
    """Gaussian kernel; γ in units of one over the mean squared length of a sample."""
    x, x_test = prepare(data)
    unit = 1 / float(np.square(x).sum(1).mean())
    grid = {"gamma": [unit * gamma for gamma in effort.gammas], "alpha": list(effort.weights)}
    chosen, answer = tune(KernelRidge(kernel="rbf"), grid, data, x, x_test, classes=classes)
    return replace(answer, chosen=f"γ = {chosen['gamma'] / unit:g} / mean ‖x‖², α = {chosen['alpha']:g}")


def fit_pls(data: Data, effort: Effort, *, classes: bool) -> Answer:
    x, x_test = prepare(data)
    grid = {"n_components": usable_components(data, effort), "scale": [True, False]}
    chosen, answer = tune(PLSRegression(), grid, data, x, x_test, classes=classes)
    scaled = "each feature scaled" if chosen["scale"] else "each channel scaled"
    return replace(answer, chosen=f"{chosen['n_components']} components, {scaled}")


def usable_components(data: Data, effort: Effort) -> list[int]:
    """Fewer than the samples of the smallest fold."""
    most = min(len(train) for train, _ in data.folds) - 1
    return [k for k in effort.components if k <= most]


def fit_lasso(data: Data, effort: Effort, *, classes: bool) -> Answer:
    """It chooses by squared errors, as it does; there is no other criterion."""
    x, x_test = prepare(data)
    mean, std = data.y.mean(0, dtype=np.float64), data.y.std(0, dtype=np.float64)
    model = MultiTaskLassoCV(alphas=effort.n_lasso, eps=3e-3, tol=1e-3, cv=data.folds)
    model.fit(x.astype(np.float64), (data.y - mean) / std)
    used = int((model.coef_ != 0).any(0).sum())
    chosen = f"α = {model.alpha_ / np.max(model.alphas_):.2g} of the largest, {used} features"
    return Answer(as_columns(model.predict(x_test.astype(np.float64))) * std + mean, chosen, effort.n_lasso)


class MultiwayRegressor(RegressorMixin, BaseEstimator):
    """One of TensorLy's regressors as scikit-learn wants it; ``size`` is the rank, or a cap of Tucker's ranks."""

    def __init__(self, kind: str = "CPRegressor", size: int = 1, norm: float = 1.0, sweeps: int = 10) -> None:
        self.kind, self.size, self.norm, self.sweeps = kind, size, norm, sweeps

    def fit(self, X: np.ndarray, y: np.ndarray) -> MultiwayRegressor:
        from tensorly import regression

        y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 and self.kind != "CP_PLSR" else y
        size = [min(self.size, each) for each in X.shape[1:]] if self.kind == "TuckerRegressor" else self.size
        settings = {} if self.kind == "CP_PLSR" else {"reg_W": self.norm, "n_iter_max": self.sweeps}
        self.model_ = getattr(regression, self.kind)(size, random_state=0, verbose=0, **settings)
        with np.errstate(all="ignore"):  # a weight of zero has no relative change
            self.model_.fit(X, y)
        return self

    def predict(self, X: np.ndarray) -> np.ndarray:
        return as_columns(self.model_.predict(X))


def fit_multiway(data: Data, grid: dict[str, Any], effort: Effort, *, classes: bool) -> tuple[Any, Answer]:
    x, x_test = (flat.reshape(like.shape) for flat, like in zip(prepare(data), (data.x, data.x_test), strict=True))
    if grid["kind"] == ["CP_PLSR"]:
        x, x_test = x.astype(np.float64), x_test.astype(np.float64)
    return tune(MultiwayRegressor(sweeps=effort.sweeps), grid, data, x, x_test, classes=classes)


def fit_cp(data: Data, effort: Effort, *, classes: bool) -> Answer:
    """At the largest rank that fits, and at a quarter of it."""
    most = largest_rank(len(data.x), data.x.shape[1:], data.y.shape[1], effort.largest_rank)
    grid = {"kind": ["CPRegressor"], "size": sorted({max(1, most // 4), most}), "norm": list(effort.norms)}
    chosen, answer = fit_multiway(data, grid, effort, classes=classes)
    return replace(answer, chosen=f"rank {chosen['size']} of at most {most}, reg_W = {chosen['norm']:g}")


def largest_rank(n: int, shape: Sequence[int], n_outputs: int, most: int) -> int:
    """The largest power of two whose sweep stays below :data:`FLOPS` and :data:`BYTES`."""
    rank = 1
    while 2 * rank <= most:
        flops, size = cost_of_sweep(n, shape, n_outputs, 2 * rank)
        if flops > FLOPS or size > BYTES:
            break
        rank *= 2
    return rank


def cost_of_sweep(n: int, shape: Sequence[int], n_outputs: int, rank: int) -> tuple[float, float]:
    """Multiply-adds twice, and bytes, of what CPRegressor does for one factor after the other, in float32.

    For a mode of size I it makes a matrix of n·outputs rows and I·rank columns, and solves a system of (I·rank)².
    """
    flops, size = 0.0, 0.0
    for each in shape:
        columns, rows = each * rank, n * n_outputs
        others = prod(shape) // each
        flops += 2 * n * each * others * n_outputs * rank + 2 * rows * columns**2 + 2 / 3 * columns**3
        size = max(size, 4 * (2 * rows * columns + 2 * columns**2))
    return flops, size


def fit_tucker(data: Data, effort: Effort, *, classes: bool) -> Answer | None:
    """One target only: it has no more."""
    if data.y.shape[1] > 1:
        return None
    grid = {"kind": ["TuckerRegressor"], "size": list(effort.tucker_ranks), "norm": list(effort.norms)}
    chosen, answer = fit_multiway(data, grid, effort, classes=classes)
    ranks = ", ".join(str(min(chosen["size"], each)) for each in data.x.shape[1:])
    return replace(answer, chosen=f"ranks ({ranks}), reg_W = {chosen['norm']:g}")


def fit_cp_pls(data: Data, effort: Effort, *, classes: bool) -> Answer:
    grid = {"kind": ["CP_PLSR"], "size": usable_components(data, effort)}
    chosen, answer = fit_multiway(data, grid, effort, classes=classes)
    return replace(answer, chosen=f"{chosen['size']} components")


def fit_single(data: Data, effort: Effort, *, classes: bool) -> Answer:
    return fit_ours(data, effort, classes=classes, search=False)


def fit_search(data: Data, effort: Effort, *, classes: bool) -> Answer:
    return fit_ours(data, effort, classes=classes, search=True)


METHODS: dict[str, Callable[..., Answer | None]] = {
    "ours": fit_single,
    "ours, CV": fit_search,
    "Ridge": fit_default_ridge,
    "RidgeCV": fit_ridge_cv,
    "KernelRidge": fit_kernel_ridge,
    "PLSRegression": fit_pls,
    "MultiTaskLassoCV": fit_lasso,
    "CPRegressor": fit_cp,
    "TuckerRegressor": fit_tucker,
    "CP_PLSR": fit_cp_pls,
}
ABOUT = f"""\
*ours* is `TensorRegressor()` (for classes `TensorClassifier()`), untuned; *ours, CV* is `TensorRegressorCV()`
(`TensorClassifierCV()`) with its default grid. `Ridge` has its default α = 1. `KernelRidge` has a Gaussian kernel.
`PLSRegression` is tried with each feature scaled and with each channel scaled. CPRegressor, TuckerRegressor and
CP_PLSR are TensorLy's; CPRegressor and TuckerRegressor make {FULL.sweeps} sweeps (its default: 100).
CPRegressor solves a (channels·R)² system and builds a matrix of n·targets rows and channels·R columns, so its rank is
the largest power of two whose sweep stays below {FLOPS:.0e} floating-point operations and {BYTES >> 20} MiB, and a
quarter of it.
TuckerRegressor takes one target only.
All but ours get features divided by their channel's std and centred at each position, and standardized targets.
What is tuned is tuned by the same {FOLDS} folds of the training part (no group on both sides), by the criterion of
TensorRegressorCV, the error of a sample averaged over samples; for classes by the AUC, where ours has the Brier score;
MultiTaskLassoCV by squared errors. Test data take no part.
Seconds are of one run on one thread, tuning and prediction included. Memory is the most that the process had beyond the
loaded data, in MiB. Bold is the best of a row, and where it is not ours we lose."""


# One cell, in a process of its own.


def run_cell(name: str, method: str, sources: Sources) -> dict[str, Any]:
    """Error, seconds, peak memory and what was chosen."""
    data_set, fit = SETS[name], METHODS[method]
    parts = data_set.load(sources)
    warm_up(fit, classes=data_set.classes)
    began = time.perf_counter()
    answers, peak = measure_peak(lambda: fit_parts(fit, parts, sources.effort, classes=data_set.classes))
    seconds = time.perf_counter() - began
    if answers is None:
        return {"skipped": "one target only"}
    predicted, true = np.concatenate([each.predicted for each in answers]), np.concatenate([p.y_test for p in parts])
    return {
        "error": data_set.error(predicted, true),
        "seconds": seconds,
        "peak_bytes": peak,
        "candidates": answers[0].candidates,
        "chosen": [each.chosen for each in answers],
        "n": len(parts[0].x),
        "n_test": len(true),
        "shape": list(parts[0].x.shape[1:]),
    }


def fit_parts(
    fit: Callable[..., Answer | None], parts: list[Data], effort: Effort, *, classes: bool
) -> list[Answer] | None:
    """The answers for all parts; None where the method does not take such data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of convergence: the figures speak
        answers = [fit(data, effort, classes=classes) for data in parts]
    return None if None in answers else [answer for answer in answers if answer is not None]


def warm_up(fit: Callable[..., Answer | None], *, classes: bool) -> None:
    """Fit a few small samples: what is imported or planned on first use is not measured."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 3, 2, 2)).astype(np.float32)
    y = np.arange(20)[:, None] % 2 if classes else x[:, :1, 0, 0]
    effort = replace(QUICK, components=(1,), search={**QUICK.search, "max_iter": 2})
    fit_parts(fit, [Data(x, y, x, y, list(StratifiedKFold(2).split(x, y[:, 0] > 0)), 0)], effort, classes=classes)


# The record.


def read_record(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The cells by data set and method; of two lines for a cell the last counts."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            row = json.loads(line)
            found[row["set"], row["method"]] = row
        except (ValueError, KeyError, TypeError):
            print(f"{path}: a line is not a whole cell; left out", file=sys.stderr)
    return found


def run_cells(cells: Sequence[tuple[str, str]], sources: Sources, record: Path, limit: float) -> None:
    """Run what the record does not have, or has as failed, and add each cell as it ends."""
    done = read_record(record)
    todo = [cell for cell in cells if "failure" in done.get(cell, {"failure": ""})]
    environment = describe_environment("scikit-learn", "numpy", "tensorly") | {"threads": 1}
    for k, (name, method) in enumerate(todo, 1):
        began = time.perf_counter()
        try:
            row = run_apart(run_cell, name, method, sources, limit=limit)
        except TimeoutError:
            row = {"skipped": f"more than {limit:g} s"}
        except FailedApartError as error:
            row = {"failure": str(error)}
        append(record, {"set": name, "method": method, **row, "environment": environment})
        told = f"{row['error']:.3f}; {row['chosen'][0]}" if "error" in row else row.get("skipped", row.get("failure"))
        print(f"{k}/{len(todo)}  {name}, {method}: {told}; {time.perf_counter() - began:.0f} s", file=sys.stderr)


# The report.

Rows = dict[tuple[str, str], dict[str, Any]]


def write_report(rows: Rows) -> str:
    """The tables in Markdown."""
    names = [name for name in SETS if any(key[0] == name for key in rows)]
    made = {json.dumps(row["environment"], sort_keys=True): row["environment"] for row in rows.values()}
    where = [
        f"- torch {each['torch']}, scikit-learn {each['scikit-learn']}, TensorLy {each['tensorly']}, commit "
        f"{str(each.get('commit'))[:7]}{' with changes' if each.get('dirty') else ''}: `{each['command']}`"
        for each in made.values()
    ]
    parts = ["# The estimators against scikit-learn and TensorLy", ABOUT, "## Errors", write_errors(rows, names)]
    parts += [f"- {SETS[name].about}. {SETS[name].measure}." for name in names]
    parts += [text for name in names for text in (f"## {name}", SETS[name].about + ".", write_set(rows, name))]
    return "\n\n".join([*parts, "## Made by", "\n".join(where)])


def render(part: str, rows: Rows) -> str:
    """For the docs: "errors", or the table of a data set."""
    return (
        write_errors(rows, [name for name in SETS if any(key[0] == name for key in rows)])
        if part == "errors"
        else write_set(rows, part)
    )


def write_errors(rows: Rows, names: list[str]) -> str:
    """A row for each data set, a column for each method."""

    def row(name: str) -> list[str]:
        return [name, SETS[name].measure, *(write_error(rows, name, method) for method in METHODS)]

    return write_table(["data", "figure", *METHODS], (row(name) for name in names), 2)


def write_error(rows: Rows, name: str, method: str) -> str:
    """Bold if it is the best of its data set."""
    row = rows.get((name, method))
    if row is None:
        return ""
    if "error" not in row:
        return row.get("skipped", "failed")
    best = (max if SETS[name].classes else min)(
        each["error"] for key, each in rows.items() if key[0] == name and "error" in each
    )
    text = f"{row['error']:.3f}"
    return f"**{text}**" if row["error"] == best else text


def write_set(rows: Rows, name: str) -> str:
    """A row for each method."""

    def line(method: str) -> list[str]:
        row, error = rows[name, method], write_error(rows, name, method)
        if "error" not in row:
            return [method, row.get("failure", ""), error, "", "", ""]
        chosen = list(dict.fromkeys(row["chosen"]))
        numbers = [f"{row['seconds']:.1f}", f"{row['peak_bytes'] / 2**20:.0f}", str(row["candidates"])]
        return [method, "; ".join(chosen), error, *numbers]

    header = ["method", "chosen", SETS[name].measure, "seconds", "memory, MiB", "candidates"]
    return write_table(header, (line(method) for method in METHODS if (name, method) in rows), 2)


# The command.


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=tuple(SETS), help="default: all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS), help="default: all")
    parser.add_argument("--data", type=Path, help="the folder that holds multiway, for olive and adrenal")
    parser.add_argument("--features", type=Path, default=FEATURES, help=f"default: {FEATURES}")
    parser.add_argument("--limit", type=float, default=LIMIT, help=f"seconds for a cell (default: {LIMIT:g})")
    parser.add_argument("--report", action="store_true", help="only the tables, of the cells asked for")
    parser.add_argument("--quick", action="store_true", help="tiny settings; into --out")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}")
    return parser


def main(arguments: list[str] | None = None) -> None:
    options = make_parser().parse_args(arguments)
    record = options.record or (options.out / "estimators-others.jsonl" if options.quick else RECORD)
    sources = Sources(options.features, options.data, QUICK if options.quick else FULL)
    cells = [(name, method) for name in SETS if name in options.sets for method in METHODS if method in options.methods]
    if not options.report:
        check(options.sets, sources)
        run_cells(cells, sources, record, options.limit)
    found = read_record(record)
    found = {cell: found[cell] for cell in cells if cell in found}
    if not found:
        raise SystemExit(f"against_others.py: {record} has none of these cells")
    print(write_report(found))


def check(names: Sequence[str], sources: Sources) -> None:
    """Stop before the first run if something is missing."""
    for name in names:
        missing = describe_missing(name, sources)
        if missing is not None:
            raise SystemExit(f"against_others.py: {missing}")
    try:
        import tensorly  # noqa: F401
    except ImportError:
        raise SystemExit('against_others.py: TensorLy is missing; pip install "tensor-dropout[bench]"') from None


if __name__ == "__main__":
    main()
