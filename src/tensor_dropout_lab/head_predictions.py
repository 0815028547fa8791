"""What a fitted head says about new images: ``tensor-dropout predict`` with the folder of a fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import Files, Item, Preparation
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.data.table_reader import TableReader
from tensor_dropout_lab.fitted_head import FittedHead, open_fitted, scale_points
from tensor_dropout_lab.prediction_table import (
    COVERAGE,
    FilePredictions,
    check_coverage,
    check_drawing,
    format_uncertain,
    is_table_file,
    list_files,
    list_rows,
    name_results,
    refuse_overwriting,
    write_table,
)

AT_ONCE = 32
"""How many images are in memory at once."""
SPELLED_OUT = 6
"""As many numbers are printed one by one."""


def predict_with_head(
    folder: Path,
    given: list[Path],
    out: Path,
    *,
    picture: bool = True,
    backbone: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
    coverage: float = COVERAGE,
) -> FilePredictions:
    """Predict images with a fitted head, and write a table and pictures.

    Args:
        folder: that ``tensor-dropout fit`` left.
        given: images like those it was fitted on, or folders of them.
        out: a folder; or a .csv file, for a table alone.
        picture: whether points are drawn.
        backbone: the network, if the record must not decide, or its place has changed.
        weights: the file of its weights, where that has another place now.
        device: where the network runs.
        coverage: the share of new images whose targets are to lie inside the intervals.

    Raises:
        TensorDropoutError: if the fit or ``out`` does not fit, there are no files, or the only file cannot be read.
    """
    is_table = is_table_file(out)
    check_coverage(coverage)
    head = open_fitted(folder)
    predictor = _Predictor(head, backbone, weights, device, coverage)
    draws = picture and not is_table and predictor.has_points
    if draws:
        check_drawing()
    paths = list_files(given, predictor.reader)
    table = out if is_table else out / "predictions.csv"
    pictures = {path: out / f"{name}.png" for path, name in zip(paths, name_results(paths), strict=True)}
    refuse_overwriting(paths, [table, *(pictures.values() if draws else [])])
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    written: list[Path] = []
    failures: dict[Path, str] = {}
    with show_progress("images", len(paths)) as advance:
        for start in range(0, len(paths), AT_ONCE):
            chunk = paths[start : start + AT_ONCE]
            readable, inputs = predictor.read(chunk, failures)
            if failures and len(paths) == 1:
                raise TensorDropoutError(f"predict: {paths[0]} cannot be read: {failures[paths[0]]}")
            for path, answer in zip(readable, predictor.predict(readable, inputs), strict=True):
                rows.append({"file": str(path), **answer.row})
                lines.append(f"{path}: {answer.text}")
                if draws:
                    written.append(predictor.draw(path, answer, pictures[path]))
            advance(len(chunk))
    write_table(table, list_rows(paths, rows, failures))
    lines.append(predictor.explain())
    return FilePredictions(lines, [table, *written], failures, len(paths))


@dataclass(frozen=True)
class _Answer:
    """What a head says about one image.

    Attributes:
        text: to print.
        row: of the table, but for the file.
        points: those to draw, as fractions, (points, axes), and matrices of ellipses around them, or None; None for
            none.
    """

    text: str
    row: dict[str, Any]
    points: tuple[np.ndarray, np.ndarray | None] | None = None


class _Predictor:
    """A fitted head with its network.

    Args:
        head: it.
        backbone: see :meth:`FittedHead.feature_maps`.
        weights: likewise.
        device: likewise.
        coverage: of intervals and ellipses.
    """

    def __init__(
        self, head: FittedHead, backbone: str | None, weights: Any, device: str | None, coverage: float
    ) -> None:
        self.head, self.coverage = head, coverage
        self.maps = head.feature_maps(backbone, weights, device)
        self.maps.set_params(verbose=False)
        self.input_shape = tuple(head.record["maps"]["input_shape"])
        self.preparation = Preparation(self.maps.size, self.maps.mean, self.maps.std)
        self.reader = TableReader(self.input_shape, {"units": head.record["units"]}, None, {})
        self.drawn = [point for point in head.points if len(point) == len(self.input_shape) - 1]

    @property
    def has_points(self) -> bool:
        """Whether there is something to draw on an image."""
        return bool(self.drawn)

    @property
    def is_calibrated(self) -> bool:
        """Whether held-out images said how far off it is; fits of before intervals do not know."""
        return getattr(self.head.estimator, "calibration_", None) is not None

    def read(self, paths: Sequence[Path], failures: dict[Path, str]) -> tuple[list[Path], list[Tensor]]:
        """The images that can be read, as the network takes them; the others are added to ``failures``."""
        with ThreadPoolExecutor() as pool:
            items = list(pool.map(self._read_file, paths))
        for path, item in zip(paths, items, strict=True):
            if item.x is None:
                failures[path] = item.problem
        pairs = [(path, item.x) for path, item in zip(paths, items, strict=True) if item.x is not None]
        return [path for path, _ in pairs], [x for _, x in pairs]

    def _read_file(self, path: Path) -> Item:
        item = Files([path], self.preparation, "predict").read(0, None)
        if item.x is None or tuple(item.x.shape) == self.input_shape:
            return item
        shapes = ["×".join(map(str, shape)) for shape in (tuple(item.x.shape), self.input_shape)]
        return Item(None, problem=f"it is {shapes[0]}, and the head was fitted on {shapes[1]}")

    def predict(self, paths: Sequence[Path], inputs: list[Tensor]) -> list[_Answer]:
        """An answer for each image."""
        if not inputs:
            return []
        features = self.maps.transform(inputs)
        if self.head.record["task"] == "classification":
            return self._predict_classes(features)
        return self._predict_numbers(features, paths)

    def _predict_classes(self, features: np.ndarray) -> list[_Answer]:
        estimator = self.head.estimator
        sets = [None] * len(features)
        if self.is_calibrated:
            sets = estimator.predict_set(features, self.coverage)
        answers = []
        for probabilities, inside in zip(estimator.predict_proba(features), sets, strict=True):
            name, probability = str(estimator.classes_[probabilities.argmax()]), float(probabilities.max())
            text = f"class {name}, probability {probability:.4g}"
            row: dict[str, Any] = {"class": name, "probability": _round(probability)}
            if inside is not None:
                names = [str(estimator.classes_[k]) for k in np.argsort(-probabilities, kind="stable") if inside[k]]
                text += f"; {100 * self.coverage:g} % set: {', '.join(names) or 'none'}"
                row |= {"set": "; ".join(names)}
            answers.append(_Answer(text, row))
        return answers

    def _predict_numbers(self, features: np.ndarray, paths: Sequence[Path]) -> list[_Answer]:
        head, estimator = self.head, self.head.estimator
        shown = [estimator.predict(features)]
        if self.is_calibrated:
            _, std = estimator.predict(features, return_std=True)
            shown += [std, *estimator.predict_interval(features, self.coverage)]
        if head.in_pixels:
            sizes = np.array([self.reader.measure(path) for path in paths])
            shown = [scale_points(each, head.points, sizes) for each in shown]
        points: list[Any] = [None] * len(paths)
        if self.drawn and self.is_calibrated:
            points = list(zip(*estimator.predict_region(features, self.coverage, points=self.drawn), strict=True))
        elif self.drawn:
            points = [(row[np.array(self.drawn)], None) for row in estimator.predict(features)]
        answers = []
        for number in range(len(paths)):
            named = [dict(zip(head.columns, each[number].tolist(), strict=True)) for each in shown]
            row = {name: _round(value) for name, value in named[0].items()}
            for ending, each in zip(("std", "low", "high"), named[1:], strict=False):
                row |= {f"{name}_{ending}": _round(value) for name, value in each.items()}
            text = self._say(*named) if self.is_calibrated else self._say_plainly(named[0])
            answers.append(_Answer(text, row, points[number]))
        return answers

    def _say_plainly(self, values: dict[str, float]) -> str:
        """Without intervals."""
        if len(values) > SPELLED_OUT:
            return f"{len(values)} numbers, no interval"
        return "; ".join(f"{name} {value:.4g}, no interval" for name, value in values.items())

    def _say(
        self, values: dict[str, float], std: dict[str, float], low: dict[str, float], high: dict[str, float]
    ) -> str:
        head, share = self.head, f"{100 * self.coverage:g} %"
        if len(values) <= SPELLED_OUT:
            told = (
                f"{name} {format_uncertain(value, std[name])}, {share} interval "
                f"{' to '.join(format_uncertain(end[name], std[name]) for end in (low, high))}"
                for name, value in values.items()
            )
            return "; ".join(told)
        average = f"{np.mean([high[name] - low[name] for name in values]):.2g}"
        if sum(map(len, head.points)) < len(values):
            return f"{len(values)} numbers, {share} intervals {average} wide on average"
        unit = "pixels" if head.in_pixels else "of the image side"
        return f"{len(head.points)} points, {share} intervals {average} {unit} wide on average"

    def explain(self) -> str:
        """What an interval or a set says, and what not."""
        if not self.is_calibrated:
            return "No calibration: nobody measured how far off these are, since the fit is an old one; fit again."
        what = "Intervals" if self.head.record["task"] == "regression" else "Sets"
        return (
            f"{what} are those that hold for {100 * self.coverage:g} % of the held-out images of the fit; new images "
            "must be like them."
        )

    def draw(self, path: Path, answer: _Answer, picture: Path) -> Path:
        """Draw the points on an image, or on slices of a volume."""
        from tensor_dropout_lab.point_pictures import draw_panels

        assert answer.points is not None
        held = f" Ellipse: holds the point in {100 * self.coverage:g} % of images like the fit's."
        caption = "Blue: predicted." + (held if self.is_calibrated else " Not calibrated.")
        draw_panels(picture, self.reader.show(path, *answer.points), caption)
        return picture


def _round(value: float) -> float:
    return float(f"{value:.6g}")
