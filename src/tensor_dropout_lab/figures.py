"""The shared look of all figures: one style, one colour per head, PNG and SVG side by side.

matplotlib comes with the extra ``lab`` and is imported when a figure is drawn. No global state changes: figures
are made without pyplot, on the Agg canvas, under a local style.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.extras import import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.edgecolor": "#555555",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "savefig.dpi": 160,
    "svg.hashsalt": "tensor-dropout",  # equal figures give equal files
}


def require_matplotlib() -> None:
    """Raise if matplotlib is missing: better before an hour of training than after it.

    Raises:
        TensorDropoutError: if it is missing.
    """
    import_extra("matplotlib", "figures")


@contextmanager
def draw_figure(width: float = 5.0, height: float = 3.4) -> Iterator[Figure]:
    """A new figure in the shared style; draw and save it inside the block.

    Args:
        width: in inches.
        height: in inches.

    Raises:
        TensorDropoutError: if matplotlib is missing.
    """
    require_matplotlib()
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write ``stem.png`` and ``stem.svg``, each whole or not at all, and return their paths."""
    paths = [stem.with_name(f"{stem.name}.{ending}") for ending in ("png", "svg")]
    for path in paths:
        with replacing(path) as temporary:
            figure.savefig(temporary, metadata={"Date": None} if path.suffix == ".svg" else None)
    return paths
