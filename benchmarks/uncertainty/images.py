"""CIFAR-100 from a frozen network: maps of labelled and of test images, and the draws of the plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

DRAWS, LABELS, HELD, TESTED = 5, 25, 5, 20
CLASSES, KNOWN = 100, 80
SIDE, BATCH = 96, 64
CHANNELS = 128
SEED = 2614


@dataclass(frozen=True)
class Images:
    """What is fitted, held out and tested: maps (n, C, H, W); classes (n,) from 0; test images of unknown classes."""

    x: np.ndarray
    y: np.ndarray
    x_held: np.ndarray
    y_held: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray
    x_unknown: np.ndarray


def deal(labels: np.ndarray, each: int, seed: int) -> np.ndarray:
    """Rows of the images, (draws, classes, each): no image twice."""
    generator = np.random.default_rng([SEED, seed])
    order = [generator.permutation(np.flatnonzero(labels == name))[: DRAWS * each] for name in np.unique(labels)]
    return np.stack(order).reshape(len(order), DRAWS, each).swapaxes(0, 1)


def choose_known(draw: int, classes: int = CLASSES, known: int = KNOWN) -> tuple[np.ndarray, np.ndarray]:
    """The known and the unknown classes of a draw."""
    order = np.random.default_rng([SEED, 2, draw]).permutation(classes)
    return np.sort(order[:known]), np.sort(order[known:])


@torch.no_grad()
def compute_maps(root: Path, out: Path) -> None:
    """Maps of every image that a draw uses, (draws, classes, each, 1280, 3, 3) in float16."""
    from class_labels import Enlarge, load_backbone

    from tensor_dropout.sklearn import FeatureMaps
    from tensor_dropout_lab.data import load_data

    data = load_data("cifar100", root=root, validation=0)
    out.mkdir(parents=True, exist_ok=True)
    network = FeatureMaps(Enlarge(load_backbone(), SIDE), "network._bn1", batch=BATCH, dtype="float16")
    for part, name, each in ((data.train, "labelled", LABELS), (data.test, "tested", TESTED)):
        rows = deal(part.targets.numpy(), each, seed=len(name))
        images = part.inputs[torch.from_numpy(rows.ravel())].numpy().astype(np.float32)
        maps = network.fit_transform(images)
        np.save(out / f"{name}.npy", maps.reshape(*rows.shape, *maps.shape[1:]))


def load_draw(folder: Path, draw: int) -> Images:
    """The maps of a draw, with the channels of its labelled images' principal components."""
    labelled, tested = (np.load(folder / f"{name}.npy", mmap_mode="r")[draw] for name in ("labelled", "tested"))
    return split_draw(np.asarray(labelled, np.float32), np.asarray(tested, np.float32), *choose_known(draw))


def split_draw(labelled: np.ndarray, tested: np.ndarray, known: np.ndarray, unknown: np.ndarray) -> Images:
    """Known classes to fit, hold out and test; unknown ones to test. Maps are (classes, each, C, H, W)."""
    fit, held, test = labelled[known][:, :-HELD], labelled[known][:, -HELD:], tested[known]
    reduce = fit_channels(flatten_classes(fit))
    numbers = [np.repeat(np.arange(len(known)), part.shape[1]) for part in (fit, held, test)]
    x, x_held, x_test, x_unknown = (reduce(flatten_classes(part)) for part in (fit, held, test, tested[unknown]))
    return Images(x, numbers[0], x_held, numbers[1], x_test, numbers[2], x_unknown)


def flatten_classes(maps: np.ndarray) -> np.ndarray:
    return maps.reshape(-1, *maps.shape[2:])


def fit_channels(x: np.ndarray, n: int = CHANNELS) -> Callable[[np.ndarray], np.ndarray]:
    """To the channels' first principal components, over images and positions."""
    rows = x.swapaxes(1, -1).reshape(-1, x.shape[1])
    mean = rows.mean(0)
    spectrum, vectors = np.linalg.eigh(np.cov(rows.T.astype(np.float64)))
    kept = vectors[:, np.argsort(-spectrum)[:n]].astype(np.float32)
    return lambda maps: np.einsum("nchw,ck->nkhw", maps - mean[:, None, None], kept, optimize=True)
