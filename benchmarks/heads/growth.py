"""How time grows: the slope of log time over log size, by least squares."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any


def fit_slope(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """The slope of a straight line through the logarithms, and the fit's R²; 1 and 1 mean exactly proportional."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    residual = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    total = sum((b - mean_y) ** 2 for b in y)
    return slope, 1.0 if total == 0 else 1 - residual / total


def describe_growth(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A slope per series; a point has a ``series`` (a dict that names it), a ``size`` and a ``median``."""

    def name(point: dict[str, Any]) -> str:
        return str(point["series"])

    slopes = []
    for _, group in groupby(sorted(points, key=name), key=name):
        line = sorted(group, key=lambda point: point["size"])
        if len({point["size"] for point in line}) < 3:
            continue
        sizes, values = [p["size"] for p in line], [p["median"] for p in line]
        slope, r_squared = fit_slope(sizes, values)
        slopes.append({**line[0]["series"], "sizes": sizes, "medians": values, "slope": slope, "r2": r_squared})
    return slopes


def batch_points(cells: list[dict[str, Any]], smallest: int = 8) -> list[dict[str, Any]]:
    """The points of growth with the batch: all forward + backward cells from a batch of 8 on."""
    kept = [c for c in cells if c["pass"] == "both" and c["batch"] >= smallest and "median" in c]
    names = ("case", "dtype", "layout", "mode", "contender", "label")
    return [
        {"series": {"over": "batch", **{k: c[k] for k in names}}, "size": c["batch"], "median": c["median"]}
        for c in kept
    ]
