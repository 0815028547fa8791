"""Pictures of :mod:`tensor_dropout_lab.explanation`: an input, and over it where the network looks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.explanation import enlarge, find_peak
from tensor_dropout_lab.figures import draw_figure

_COLORS = "RdBu_r"  # blue below 0, red above; told apart without red and green
_CROSS = "#E69F00"
_OPACITY = 0.75  # of the largest contribution; smaller ones let more of the input through


@dataclass(frozen=True)
class View:
    """A picture, or one slice of a volume, as it is drawn: rows from top to bottom.

    Attributes:
        name: the title.
        image: (rows, columns), or (rows, columns, 3) in 0 to 1.
        overlay: (rows, columns) contributions.
        pixel: height and width of a pixel.
        edges: letters at the left, right, top and bottom.
        cross: row and column of the point that all slices share.
    """

    name: str
    image: np.ndarray
    overlay: np.ndarray
    pixel: tuple[float, float] = (1.0, 1.0)
    edges: str = ""
    cross: tuple[int, int] | None = None

    @property
    def size(self) -> tuple[float, float]:
        """Height and width."""
        return self.image.shape[0] * self.pixel[0], self.image.shape[1] * self.pixel[1]

    @property
    def grey(self) -> np.ndarray:
        """The image without its colours, which would mix with those of the overlay."""
        return self.image if self.image.ndim == 2 else self.image.mean(2)


def slice_volume(volume: Tensor, grid: Tensor, voxel: Sequence[float] = (1.0, 1.0, 1.0)) -> list[View]:
    """The axial, coronal and sagittal slice through the position that contributes most, weighted by its brightness.

    Without that weight the slices often run through an empty corner of the scan.

    Args:
        volume: (X, Y, Z) in RAS order: left to right, back to front, bottom to top.
        grid: (x, y, z) contributions of the positions of a feature map.
        voxel: edges of a voxel.

    Example:
        >>> import torch
        >>> grid = torch.zeros(2, 2, 2)
        >>> grid[1, 0, 1] = -3.0
        >>> [view.name for view in slice_volume(torch.rand(8, 12, 8), grid)]
        ['axial, z = 6 of 8', 'coronal, y = 3 of 12', 'sagittal, x = 6 of 8']
    """
    low, high = np.quantile(volume.numpy(), (0.01, 0.995))
    shades = ((volume - low) / max(high - low, 1e-12)).clamp(0, 1)
    brightness = F.interpolate(shades[None, None], size=tuple(grid.shape), mode="area")[0, 0]
    overlay, point = enlarge(grid, volume.shape), find_peak(grid * brightness, volume.shape)
    views = []
    for name, fixed, across, up, edges in (
        ("axial", 2, 0, 1, "LRAP"),
        ("coronal", 1, 0, 2, "LRSI"),
        ("sagittal", 0, 1, 2, "PASI"),
    ):
        # (across, up) -> rows from the top, columns from the left
        image, colours = (part.select(fixed, point[fixed]).T.flip(0).contiguous().numpy() for part in (shades, overlay))
        title = f"{name}, {'xyz'[fixed]} = {point[fixed]} of {volume.shape[fixed]}"
        cross = (volume.shape[up] - 1 - point[up], point[across])
        views.append(View(title, image, colours, (voxel[up], voxel[across]), edges, cross))
    return views


def view_picture(pixels: Tensor, grid: Tensor) -> list[View]:
    """One view of a picture (3, H, W) in uint8, with the contributions (h, w) of the positions of a feature map."""
    image = pixels.permute(1, 2, 0).contiguous().numpy() / 255
    return [View("as the network sees it", image, enlarge(grid, pixels.shape[1:]).numpy())]


def draw_explanation(
    path: Path, views: list[View], grid: Tensor, *, title: str, quantity: str, bias: float, output: float
) -> None:
    """Draw the views without and with their contributions, and say what they are; the file is whole or not there.

    Args:
        path: a ``.png`` file.
        views: one of a picture, three of a volume.
        grid: (*space) contributions of the positions of the last feature map.
        title: what was predicted.
        quantity: what is contributed to, with its unit.
        bias: of that output.
        output: the sum of both.

    Raises:
        TensorDropoutError: if matplotlib is missing.
    """
    limit = float(grid.abs().max()) or 1.0
    caption = describe_map(grid, quantity, bias, output)
    n = len(views)
    rows, columns = (1, 2) if n == 1 else (2, n)  # without and with: side by side, or one above the other
    widths = [view.size[1] for view in views] * (columns // n)
    inches = 6.2 * max(view.size[0] for view in views) / sum(widths)
    with draw_figure(7.4, 1.0 + rows * (inches + 0.25)) as figure:
        axes = figure.subplots(rows, columns, squeeze=False, gridspec_kw={"width_ratios": widths})
        for view, plain, covered in zip(views, *axes.reshape(2, n), strict=True):
            _show(plain, view.image, view.pixel)
            plain.set_title(view.name, fontsize=9)
            _mark(plain, view)
            _show(covered, view.grey, view.pixel)
            _cover(covered, view, limit)
        axes[-1, -n].set_title("where it looks", fontsize=9)
        _add_scale(figure, axes, limit, quantity)
        figure.suptitle(textwrap.fill(title, 80), fontsize=12, x=0.01, ha="left", parse_math=False)
        look = {"fontsize": 7.5, "x": 0.01, "ha": "left", "color": "#333333", "parse_math": False}
        figure.supxlabel(textwrap.fill(caption, 118), **look)
        with replacing(path) as temporary:
            figure.savefig(temporary, metadata={"Title": title, "Description": caption})


def describe_map(grid: Tensor, quantity: str, bias: float, output: float) -> str:
    """What is shown, in words: the caption, and the text for those who cannot see the picture.

    Example:
        >>> import torch
        >>> print(describe_map(torch.ones(2, 2), "age (years)", 50.0, 54.0))
        Colours: contribution to age (years) of each of the 2×2 positions of the last feature map (features times the
        merged weight of the last layer), interpolated linearly between them; red raises, blue lowers. They sum to +4;
        with the bias 50 that is the output, 54.
    """
    positions = "×".join(map(str, grid.shape))
    return (
        f"Colours: contribution to {quantity} of each of the {positions} positions of the last feature map (features "
        "times the merged weight of the last layer), interpolated linearly between them; red raises, blue lowers. They "
        f"sum to {float(grid.sum()):+.4g}; with the bias {bias:.4g} that is the output, {output:.4g}."
    )


def _show(axes: Any, image: np.ndarray, pixel: tuple[float, float]) -> None:
    """The input alone."""
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, aspect=pixel[0] / pixel[1])
    axes.set_axis_off()
    axes.set_anchor("N")


def _mark(axes: Any, view: View) -> None:
    """Letters at the edges, and thin lines where the other slices cut this one."""
    places = [(0.02, 0.5, "left", "center"), (0.98, 0.5, "right", "center")]
    places += [(0.5, 0.98, "center", "top"), (0.5, 0.02, "center", "bottom")]
    for letter, (x, y, horizontal, vertical) in zip(view.edges, places, strict=False):
        box = {"facecolor": "black", "alpha": 0.5, "pad": 1, "linewidth": 0}
        look = {"ha": horizontal, "va": vertical, "fontsize": 7, "color": "white", "bbox": box}
        axes.text(x, y, letter, transform=axes.transAxes, **look)
    if view.cross is not None:
        axes.axhline(view.cross[0], color=_CROSS, linewidth=0.7)
        axes.axvline(view.cross[1], color=_CROSS, linewidth=0.7)


def _cover(axes: Any, view: View, limit: float) -> None:
    """The contributions, the more opaque the larger they are."""
    strength = (np.abs(view.overlay) / limit).clip(0, 1)
    colours = {"cmap": _COLORS, "vmin": -limit, "vmax": limit, "alpha": _OPACITY * strength}
    axes.imshow(view.overlay, aspect=view.pixel[0] / view.pixel[1], **colours)


def _add_scale(figure: Any, axes: np.ndarray, limit: float, quantity: str) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    scale = ScalarMappable(Normalize(-limit, limit), _COLORS)
    bar = figure.colorbar(scale, ax=axes.ravel().tolist(), shrink=0.8, aspect=30, pad=0.02, panchor=False)
    bar.set_label(textwrap.fill(f"contribution to {quantity}", 40), fontsize=8, parse_math=False)
    bar.ax.tick_params(labelsize=7)
    bar.outline.set_visible(False)
    bar.ax.grid(visible=False)
