"""Draw docs/images/mask-LAW.png: masks of each law, from the library's own draws.

Run ``make pictures``. Each row is one draw, each column one rank; the colour is ``c / E[c]``, what the weight is
multiplied by under the default scaling.
"""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.colors import LinearSegmentedColormap
from shrink_png import shrink_png

import tensor_dropout as td
from tensor_dropout_lab.figures import draw_figure

THETA, RANK, DRAWS = 0.7, 16, 20
LAWS = ("bernoulli", "replacement", "gaussian", "nested")
IMAGES = Path(__file__).parents[1] / "docs" / "images"
COLORS = LinearSegmentedColormap.from_list("mask", ["#D55E00", "#ffffff", "#0072B2"])  # below 0, 0, above 0


def draw_masks(law: str) -> torch.Tensor:
    """Scaled masks of one law, (DRAWS, RANK), as a CP layer draws them in training."""
    torch.manual_seed(0)
    layer = td.CPRegression((RANK, 4, 4), 10, rank=RANK, dropout=td.TensorDropout(THETA, law=law, per_sample=True))
    (masks,) = layer.draw_masks(DRAWS)
    assert masks is not None
    return masks


def draw_picture(law: str, path: Path) -> None:
    """One small picture: draws down, ranks across."""
    with draw_figure(width=2.2, height=2.3) as figure:
        axes = figure.add_subplot()
        axes.pcolormesh(draw_masks(law), cmap=COLORS, vmin=-2.4, vmax=2.4, edgecolors="#d9d9d9", linewidth=0.3)
        axes.set(xlabel=f"rank 1 … {RANK}", ylabel=f"{DRAWS} draws", xticks=[], yticks=[])
        axes.grid(visible=False)
        axes.invert_yaxis()
        axes.set_title(law)
        figure.savefig(path, dpi=110)
    shrink_png(path, path)


if __name__ == "__main__":
    for name in LAWS:
        draw_picture(name, IMAGES / f"mask-{name}.png")
        print(IMAGES / f"mask-{name}.png")
