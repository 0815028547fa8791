"""dlib's shape predictor (Kazemi and Sullivan's regression trees) on the same images, for comparison."""

from __future__ import annotations

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from labelling.data import SIDES, TOLERANCES, Images
from labelling.loop import measure

SETTINGS = {"oversampling_amount": 100, "tree_depth": 3, "nu": 0.1, "num_threads": 1, "random_seed": "0"}
"""The best of four on development images of wings; all others are dlib's own."""


def is_there() -> bool:
    """Whether dlib is installed: ``pip install dlib`` (a compiler and cmake), or ``dlib-bin``."""
    return find_spec("dlib") is not None


def run(images: Images, n: int, name: str, pictures: Path) -> dict[str, Any]:
    """Train on the first n, test on those of other groups; in % of the side."""
    import dlib
    from features import read_images, read_table

    side = SIDES[name]
    names, _, _ = read_table(pictures / name / "points.csv")
    files = [names[row] for row in images.rows]
    arrays = read_images(pictures / name / "images.tar", files, side).transpose(0, 2, 3, 1)
    box = dlib.rectangle(0, 0, side - 1, side - 1)

    def describe(points: np.ndarray) -> Any:
        return dlib.full_object_detection(box, [dlib.point(*(int(v) for v in np.rint(p * side - 0.5))) for p in points])

    options = dlib.shape_predictor_training_options()
    for key, value in SETTINGS.items():
        setattr(options, key, value)
    began = time.perf_counter()
    truths = [[describe(points)] for points in images.truth[:n]]
    predictor = dlib.train_shape_predictor([np.ascontiguousarray(array) for array in arrays[:n]], truths, options)
    seconds = time.perf_counter() - began
    tested = np.arange(n, len(images.truth))
    tested = tested[~np.isin(images.groups[tested], images.groups[:n])]
    found = [[(p.x, p.y) for p in predictor(np.ascontiguousarray(arrays[row]), box).parts()] for row in tested]
    points = (np.array(found) + 0.5) / side
    return {
        "tested": len(tested),
        "seconds": seconds,
        "second": measure(points, images.truth[tested], TOLERANCES[name]),
    }
