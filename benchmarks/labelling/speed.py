"""How long a fit takes, and how much memory, where a folder has 1,000 images."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from own_process import measure_peak, run_apart

from labelling.data import SIDES, load
from tensor_dropout_lab.labelling.learner import Learner

IMAGES = 1000
BEFORE = (20, 40, 60, 80)
"""Labels of the fits before: each of them looks at other settings."""
LIMIT = 1800.0


def run(features: Path, name: str, n: int, seed: int) -> dict[str, Any]:
    """Fits of n labels, with and without a look at other settings, in a process of its own."""
    found: dict[str, Any] = run_apart(measure_fits, features, name, n, seed, limit=LIMIT)
    return found


def measure_fits(features: Path, name: str, n: int, seed: int) -> dict[str, Any]:
    """Wall and CPU seconds of each fit; they include the suggestions for all images."""
    rows = np.random.default_rng([seed, 30]).permutation(len(np.load(features / name / "targets.npy")))[:IMAGES]
    images = load(features, name, rows)

    def measure() -> list[list[float]]:
        learner = Learner(np.full((IMAGES, 2), SIDES[name]), seed=seed)
        for start in range(0, IMAGES, 32):
            part = slice(start, start + 32)
            learner.set_maps(np.arange(IMAGES)[part], images.coarse[part], images.fine[part])
        times = []
        for count in (*BEFORE, n, n + 1):
            labels = np.full(images.truth.shape, np.nan)
            labels[:count] = images.truth[:count]
            began, cpu = time.perf_counter(), time.process_time()
            learner.fit(labels)
            times.append([count, round(time.perf_counter() - began, 3), round(time.process_time() - cpu, 3)])
        return times

    times, peak = measure_peak(measure)
    return {"images": IMAGES, "fits": times, "peak_bytes": peak}
