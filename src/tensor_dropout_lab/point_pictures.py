"""Pictures of predictions: points drawn on images, numbers and classes against the true ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.figures import draw_figure

if TYPE_CHECKING:
    from PIL.Image import Image

TRUE, PREDICTED = "#ffffff", "#56B4E9"
LARGEST = 480
"""The longer side of an image as it is drawn, in pixels."""
IN_A_ROW = 4
MOST_COLUMNS = 6
"""How many targets are drawn against the true ones."""
MOST_CLASSES = 20
"""How many classes are named in a picture."""


@dataclass(frozen=True)
class Panel:
    """An image with points on it, as fractions of width and height, (points, 2).

    Attributes:
        image: (height, width, 3), uint8.
        title: above it.
        predicted: where they are predicted; NaN for none.
        true: where they are; NaN where that is not known.
        ellipses: around the predictions, (points, 2, 2): ``dᵀ M⁻¹ d = 1``.
    """

    image: np.ndarray
    title: str
    predicted: np.ndarray
    true: np.ndarray | None = None
    ellipses: np.ndarray | None = None


def shrink(picture: Image) -> np.ndarray:
    """A picture as it is drawn: (height, width, 3), at most :data:`LARGEST` pixels wide and high."""
    small = picture.copy()
    small.thumbnail((LARGEST, LARGEST))
    return np.asarray(small)


def draw_panels(path: Path, panels: Sequence[Panel], caption: str) -> None:
    """Draw images side by side, in rows.

    Args:
        path: a ``.png`` file.
        panels: the images.
        caption: below them.

    Raises:
        TensorDropoutError: if matplotlib is missing.
    """
    columns = min(IN_A_ROW, len(panels))
    rows = math.ceil(len(panels) / columns)
    shape = np.max([panel.image.shape[:2] for panel in panels], axis=0)
    side = 2.2 if len(panels) > 1 else 5.0
    height = side * min(1.6, shape[0] / shape[1])
    with draw_figure(columns * side, rows * (height + 0.25) + 0.35) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).ravel()
        for axis in axes:
            axis.set_axis_off()
        for axis, panel in zip(axes, panels, strict=False):
            _draw_panel(axis, panel)
        figure.supxlabel(caption, fontsize=8, parse_math=False)
        _save(figure, path)


def _draw_panel(axis: Any, panel: Panel) -> None:
    from matplotlib.patches import Ellipse

    height, width = panel.image.shape[:2]
    axis.imshow(panel.image, extent=(0, width, height, 0))
    places = panel.predicted * (width, height)
    if panel.true is not None:
        true = panel.true * (width, height)
        for start, end in zip(true, places, strict=True):
            axis.plot(*np.transpose([start, end]), color=PREDICTED, linewidth=0.8)
        axis.scatter(*true.T, s=16, facecolors="none", edgecolors="#000000", linewidths=1.8)
        axis.scatter(*true.T, s=16, facecolors="none", edgecolors=TRUE, linewidths=0.9)
    if panel.ellipses is not None:
        for place, matrix in zip(places, panel.ellipses * np.outer((width, height), (width, height)), strict=True):
            lengths, directions = np.linalg.eigh(matrix)
            across, down = 2 * np.sqrt(lengths.clip(min=0))
            angle = math.degrees(math.atan2(directions[1, 0], directions[0, 0]))
            shape = Ellipse(place, across, down, angle=angle, facecolor="none", edgecolor=PREDICTED, linewidth=1.0)
            axis.add_patch(shape)
    axis.scatter(*places.T, s=7, color=PREDICTED, edgecolors="#000000", linewidths=0.4, zorder=3)
    axis.set(xlim=(0, width), ylim=(height, 0))
    axis.set_title(panel.title, fontsize=7, parse_math=False)  # names may have dollar signs


def draw_numbers(path: Path, columns: Sequence[str], predicted: np.ndarray, true: np.ndarray) -> None:
    """Draw predicted over true numbers, a panel for each of the first columns.

    Args:
        path: a ``.png`` file.
        columns: their names.
        predicted: (n, columns).
        true: likewise, NaN where missing.
    """
    shown = list(columns)[:MOST_COLUMNS]
    in_a_row = min(3, len(shown))
    rows = math.ceil(len(shown) / in_a_row)
    with draw_figure(3.2 * in_a_row, 3.0 * rows) as figure:
        axes = figure.subplots(rows, in_a_row, squeeze=False).ravel()
        for number, axis in enumerate(axes):
            if number >= len(shown):
                axis.set_axis_off()
                continue
            ends = [np.nanmin(true[:, number]), np.nanmax(true[:, number])]
            axis.plot(ends, ends, color="0.5", linewidth=1)
            axis.scatter(true[:, number], predicted[:, number], s=10, color=PREDICTED, edgecolors="#000000", lw=0.3)
            axis.set(xlabel="true", ylabel="predicted, held out")
            axis.set_title(shown[number], parse_math=False)
        _save(figure, path)


def draw_classes(path: Path, classes: Sequence[str], predicted: np.ndarray, true: np.ndarray) -> None:
    """Draw how often each class was taken for each.

    Args:
        path: a ``.png`` file.
        classes: their names.
        predicted: (n,) class numbers.
        true: likewise.
    """
    counts = np.zeros((len(classes), len(classes)), dtype=int)
    np.add.at(counts, (true, predicted), 1)
    side = min(8.0, 2.0 + 0.45 * len(classes))
    with draw_figure(side + 0.6, side) as figure:
        axis = figure.subplots()
        axis.imshow(counts, cmap="Blues")
        axis.grid(visible=False)
        if len(classes) <= MOST_CLASSES:
            axis.set_xticks(range(len(classes)), list(classes), rotation=90, parse_math=False)
            axis.set_yticks(range(len(classes)), list(classes), parse_math=False)
            for row, column in np.ndindex(counts.shape):
                dark = counts[row, column] > counts.max() / 2
                axis.text(column, row, str(counts[row, column]), ha="center", va="center", color="w" if dark else "k")
        axis.set(xlabel="predicted, held out", ylabel="true")
        _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    with replacing(path) as temporary:
        figure.savefig(temporary)
