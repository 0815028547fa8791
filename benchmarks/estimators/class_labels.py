"""CIFAR-100 from frozen maps, with 5 to 50 labelled images of each class: where position hardly counts.

    python benchmarks/estimators/class_labels.py --root FOLDER --device cuda      FOLDER holds cifar-100-python
    python benchmarks/estimators/class_labels.py --root FOLDER --quick            ten classes, into --out
    python benchmarks/estimators/class_labels.py --report                         the table, from the record

Maps are those of EfficientNet-Lite0 (features.py says where its weights come from) at 224×224: block 10 averaged to
112×7×7, and the last map averaged to 1280×4×4. All settings are chosen by three stratified folds of the labelled
images; the test images choose nothing. Three draws of labelled images; all 10,000 test images.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from features import MEAN, STD, load_backbone
from position import append, write_interval, write_table
from sklearn.linear_model import LogisticRegressionCV, RidgeClassifierCV
from sklearn.model_selection import StratifiedKFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from tensor_dropout.sklearn import FeatureMaps, TensorClassifier, TensorClassifierCV
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.run_records import describe_environment

RECORD = Path("results/estimators-classes.jsonl")
LAYERS = {"block10": ("_blocks.10", 7), "last": ("_bn1", 4)}
LABELS, DRAWS, FOLDS, SIDE = (5, 10, 20, 50), (0, 1, 2), 3, 224
WEIGHTS = np.logspace(-2, 7, 19)

Maps = dict[str, tuple[np.ndarray, np.ndarray]]
"""Of the labelled and of the test images, by layer."""


class Enlarge(nn.Module):
    """Images of 32×32 in [0, 255] as EfficientNet-Lite takes them."""

    def __init__(self, network: nn.Module, side: int) -> None:
        super().__init__()
        self.network, self.side = network, side

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, 32, 32) -> what the network gives."""
        x = nn.functional.interpolate(x, self.side, mode="bilinear", align_corners=False)
        return self.network((x - MEAN) / STD)


def make_maps(images: np.ndarray, device: str, side: int = SIDE) -> dict[str, np.ndarray]:
    """The maps of all images, in float16."""
    network = Enlarge(load_backbone(), side)
    return {
        name: FeatureMaps(
            network, f"network.{layer}", pool=pool, device=device, dtype="float16", batch=256 if device != "cpu" else 32
        ).fit_transform(images)
        for name, (layer, pool) in LAYERS.items()
    }


def draw_labels(labels: np.ndarray, per_class: int, draw: int) -> np.ndarray:
    """Rows of the labelled images: equally many of each class; fewer are among more."""
    generator = np.random.default_rng(draw)
    rows = [generator.permutation(np.flatnonzero(labels == each))[:per_class] for each in np.unique(labels)]
    return np.concatenate(rows)


# The methods: (maps, labels, maps to predict, folds, device) -> predicted classes.

Fit = Callable[[np.ndarray, np.ndarray, np.ndarray, Any, str], np.ndarray]


def pool(x: np.ndarray) -> np.ndarray:
    return x.mean((2, 3), dtype=np.float32)


def flatten(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1).astype(np.float32)


def logistic(reduce: Callable[[np.ndarray], np.ndarray]) -> Fit:
    """scikit-learn's LogisticRegressionCV, ten weights."""

    def fit(x: np.ndarray, y: np.ndarray, new: np.ndarray, folds: Any, device: str) -> np.ndarray:
        model = make_pipeline(
            StandardScaler(), LogisticRegressionCV(Cs=np.logspace(-5, 1, 10), cv=folds, max_iter=300, tol=1e-3)
        )
        return model.fit(reduce(x), y).predict(reduce(new))

    return fit


def ridge(reduce: Callable[[np.ndarray], np.ndarray]) -> Fit:
    """scikit-learn's RidgeClassifierCV, in the directions that the labelled images span."""

    def fit(x: np.ndarray, y: np.ndarray, new: np.ndarray, folds: Any, device: str) -> np.ndarray:
        scaler = StandardScaler().fit(reduce(x))
        flat, flat_new = scaler.transform(reduce(x)), scaler.transform(reduce(new))
        u, s, vt = np.linalg.svd(flat, full_matrices=False)
        kept = s > 1e-5 * s[0]
        return RidgeClassifierCV(WEIGHTS).fit(u[:, kept] * s[kept], y).predict(flat_new @ vt[kept].T)

    return fit


def tensor(search: bool, **settings: Any) -> Fit:
    def fit(x: np.ndarray, y: np.ndarray, new: np.ndarray, folds: Any, device: str) -> np.ndarray:
        own = {"random_state": 0, "device": device, **settings}
        model = TensorClassifierCV(cv=folds, **own) if search else TensorClassifier(**own)
        return model.fit(x.astype(np.float32), y).predict(new.astype(np.float32))

    return fit


METHODS: dict[str, Fit] = {
    "logistic, pooled": logistic(pool),
    "ridge, pooled": ridge(pool),
    "ridge, flattened": ridge(flatten),
    "TensorClassifier(theta=1)": tensor(False, theta=1.0),
    "TensorClassifier()": tensor(False),
    "TensorClassifierCV()": tensor(True),
}


def run(
    images: tuple[np.ndarray, np.ndarray], labels: tuple[np.ndarray, np.ndarray], options: argparse.Namespace,
    record: Path,
) -> None:  # fmt: skip
    """What the record does not have: a line for each layer, number of labels, draw and method."""
    done = {(row["layer"], row["labels"], row["draw"], row["method"]) for row in read_record(record)}
    environment = describe_environment("scikit-learn", "numpy") | {"device": options.device}
    rows = np.unique(np.concatenate([draw_labels(labels[0], max(options.labels), draw) for draw in options.draws]))
    place = {row: k for k, row in enumerate(rows)}
    maps, test_maps = (make_maps(each, options.device, options.side) for each in (images[0][rows], images[1]))
    for per_class in options.labels:
        for draw in options.draws:
            chosen = draw_labels(labels[0], per_class, draw)
            y = labels[0][chosen]
            folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=draw).split(y, y))
            for layer in LAYERS:
                x = maps[layer][[place[row] for row in chosen]]
                for name in options.methods:
                    if (layer, per_class, draw, name) in done:
                        continue
                    began = time.perf_counter()
                    predicted = METHODS[name](x, y, test_maps[layer], folds, options.device)
                    accuracy = 100 * float((predicted == labels[1]).mean())
                    append(record, {
                        "layer": layer, "labels": per_class, "draw": draw, "method": name, "accuracy": accuracy,
                        "seconds": time.perf_counter() - began, "n_test": len(labels[1]), "environment": environment,
                    })  # fmt: skip
                    print(f"{layer} {per_class} draw {draw} {name}: {accuracy:.2f} %", file=sys.stderr, flush=True)


def read_record(path: Path) -> list[dict[str, Any]]:
    """Its lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def render(part: str, rows: Sequence[dict[str, Any]]) -> str:
    """Mean accuracies, and the difference of ours to the best other of that layer and number, in points."""
    assert part == "accuracy"
    lines = []
    for layer, per_class in dict.fromkeys((row["layer"], row["labels"]) for row in rows):
        own = [row for row in rows if (row["layer"], row["labels"]) == (layer, per_class)]
        by_draw = {
            name: {row["draw"]: row["accuracy"] for row in own if row["method"] == name}
            for name in METHODS if any(row["method"] == name for row in own)
        }  # fmt: skip
        means = {name: float(np.mean(list(found.values()))) for name, found in by_draw.items()}
        others = [name for name in means if not name.startswith("Tensor")]
        difference = ""
        if others and "TensorClassifier()" in means:
            best = by_draw[max(others, key=lambda name: means[name])]
            ours = by_draw["TensorClassifier()"]
            changes = [ours[draw] - best[draw] for draw in sorted(ours.keys() & best.keys())]
            ends = seed_interval(changes) if len(changes) > 1 else (float("nan"), float("nan"))
            difference = write_interval((float(np.mean(changes)), *ends))
        texts = {
            name: f"**{mean:.1f}**" if mean == max(means.values()) else f"{mean:.1f}" for name, mean in means.items()
        }
        shown = [texts.get(name, "") for name in METHODS]
        lines.append([layer, str(per_class), str(max(map(len, by_draw.values()))), *shown, difference])
    header = ["layer", "labels a class", "draws", *METHODS, "TensorClassifier() to the best other"]
    return write_table(header, lines, 3)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, help="the folder that holds cifar-100-python")
    parser.add_argument("--device", default="cpu", help="of the network and of our fits (default: cpu)")
    parser.add_argument("--labels", nargs="+", type=int, default=LABELS)
    parser.add_argument("--draws", nargs="+", type=int, default=DRAWS)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    parser.add_argument("--record", type=Path, help=f"default: {RECORD}")
    parser.add_argument("--out", type=Path, default=Path("out/bench"), help="where --quick writes (default: out/bench)")
    parser.add_argument("--quick", action="store_true", help="ten classes, five labels, one draw, images of 128 pixels")
    parser.add_argument("--report", action="store_true", help="only the table")
    options = parser.parse_args(arguments)
    options.side = 128 if options.quick else SIDE
    record = options.record or (options.out / RECORD.name if options.quick else RECORD)
    if not options.report:
        if options.root is None:
            parser.error("--root says where cifar-100-python is")
        data = load_data("cifar100", root=options.root, validation=0)
        images = tuple(part.inputs.numpy().astype(np.float32) for part in (data.train, data.test))
        labels = tuple(part.targets.numpy() for part in (data.train, data.test))
        if options.quick:
            options.labels, options.draws = (5,), (0,)
            kept = [np.flatnonzero(each < 10)[:300] for each in labels]
            images = tuple(each[rows] for each, rows in zip(images, kept, strict=True))
            labels = tuple(each[rows] for each, rows in zip(labels, kept, strict=True))
        run(images, labels, options, record)
    rows = read_record(record)
    if not rows:
        raise SystemExit(f"class_labels.py: {record} has no lines")
    print(render("accuracy", rows))


if __name__ == "__main__":
    main()
