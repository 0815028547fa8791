"""``tensor-dropout demo``: where is the digit? The error of four heads over the number of labels, and one picture.

Real digits at **simulated** places, the maps of a small frozen network with random weights, and heads that learn the
place from 25 to 400 labelled pictures: :mod:`tensor_dropout_lab.data.placed_digits`. It is one case where the method
helps, made to be seen in a minute; real images are in docs/explanation/position.md, with the cases where it does not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.progress import show_progress
from tensor_dropout.sklearn import FeatureMaps, TensorRegressor
from tensor_dropout.sklearn.ridge import Kind, RidgePath
from tensor_dropout_lab.data.placed_digits import DIGIT, SIDE, build_network, place_digits
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.figures import draw_figure, require_matplotlib
from tensor_dropout_lab.run_records import describe_environment, write_json

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAME = "where-is-the-digit"
LABELS = (25, 50, 100, 200, 400)
SEEDS = 5
SHOWN = 100
"""The pictures on the left are by heads from about as many labels."""
N_TEST = 500
N_PIECES = 3
"""Pieces of other digits in each picture."""
DRAWN = 8
"""How many test pictures are drawn: the first ones, so that nobody chose them."""
RANK = 32
"""Below the default of 128, for speed."""
POOLED, FLATTENED, PLAIN, DROPOUT = "pooled ridge", "flattened ridge", "tensor head", "tensor head, dropout"
COMPARED = FLATTENED, DROPOUT
"""The heads of the pictures on the left."""


@dataclass(frozen=True)
class Pictures:
    """Test pictures, their true places, and where each head sees the digit; places are (n, 2), row and column."""

    images: np.ndarray
    places: np.ndarray
    predicted: dict[str, np.ndarray]

    def measure(self, name: str) -> np.ndarray:
        """(n,) how far a head is off, in pixels."""
        return np.asarray(np.linalg.norm(self.predicted[name] - self.places, axis=1))

    def describe(self) -> str:
        """Two lines: which pictures are drawn, and the mean error of all."""
        means = "; ".join(f"{name} {self.measure(name).mean():.1f}" for name in COMPARED)
        return (
            f"The first {DRAWN} test pictures of the first draw, with their errors in pixels.\n"
            f"Mean of all {len(self.images)} test pictures: {means}."
        )


@dataclass(frozen=True)
class Outcome:
    """Mean distance in pixels, (seeds, sizes) for each head, and some test pictures of the first seed."""

    labels: tuple[int, ...]
    errors: dict[str, np.ndarray]
    pictures: Pictures

    @property
    def shown(self) -> int:
        """The number of labels of the pictures and the sentence."""
        return nearest(self.labels)

    def describe(self) -> str:
        """One sentence."""
        k = self.labels.index(self.shown)
        off = {name: errors[:, k].mean() for name, errors in self.errors.items()}
        gain = seed_interval(self.errors[FLATTENED][:, k] - self.errors[DROPOUT][:, k])
        return (
            f"From {self.shown} labelled pictures (real digits, simulated places) a tensor head with tensor dropout "
            f"places the digit {off[DROPOUT]:.1f} pixels off; without the dropout {off[PLAIN]:.1f}, ridge on the same "
            f"maps {off[FLATTENED]:.1f}, on pooled maps {off[POOLED]:.1f}. Gain over ridge: "
            f"{gain.low:.1f} to {gain.high:.1f} pixels (95 %, {len(self.errors[DROPOUT])} draws)."
        )


def nearest(labels: Sequence[int]) -> int:
    """The size that is nearest to :data:`SHOWN`."""
    return min(labels, key=lambda n: abs(n - SHOWN))


# The heads.

Predict = Callable[[np.ndarray], np.ndarray]


def fit_ridge(x: np.ndarray, y: np.ndarray, kind: Kind) -> Predict:
    """Ridge whose weight is chosen by generalized cross-validation."""
    path = RidgePath(torch.from_numpy(x), torch.from_numpy(y), torch.full((len(x),), 1 / len(x)), kind)
    alpha = path.best_alpha()
    return lambda maps: path.predict(torch.from_numpy(maps), alpha).numpy()


def fit_tensor(x: np.ndarray, y: np.ndarray, theta: float, seed: int) -> Predict:
    """A CP head with its default settings, but for the rank.

    Raises:
        KeyboardInterrupt: the estimator alone would keep what it has, and the demo would go on.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without dropout, 150 iterations are not enough for the last of the loss
        warnings.filterwarnings("error", message=".*interrupted after")
        try:
            model = TensorRegressor(rank=RANK, theta=theta, random_state=seed).fit(x, y)
        except ConvergenceWarning:
            raise KeyboardInterrupt from None
    predict: Predict = model.predict
    return predict


HEADS: dict[str, Callable[[np.ndarray, np.ndarray, int], Predict]] = {
    POOLED: lambda x, y, seed: fit_ridge(x, y, "pooled ridge"),
    FLATTENED: lambda x, y, seed: fit_ridge(x, y, "flattened ridge"),
    PLAIN: lambda x, y, seed: fit_tensor(x, y, 1.0, seed),
    DROPOUT: lambda x, y, seed: fit_tensor(x, y, 0.5, seed),
}


def compare_heads(labels: Sequence[int] = LABELS, seeds: int = SEEDS) -> Outcome:
    """Fit all heads on the first n of each seed's pictures, and test them on others.

    Raises:
        TensorDropoutError: for fewer than two seeds, or fewer than five labels.
    """
    sizes = tuple(sorted(set(labels)))
    if seeds < 2 or not sizes or sizes[0] < 5:
        raise TensorDropoutError(f"demo: at least 2 seeds and 5 labels are needed, got {seeds} and {sizes}")
    errors = {name: np.empty((seeds, len(sizes))) for name in HEADS}
    features = FeatureMaps(build_network(), "4", verbose=False)
    pictures = None
    with show_progress("where is the digit?", seeds * len(sizes) * len(HEADS)) as advance:
        for seed in range(seeds):
            images, places = place_digits(sizes[-1] + N_TEST, seed, N_PIECES)
            maps = features.transform(images)
            test, true = maps[-N_TEST:], places[-N_TEST:]
            for k, n in enumerate(sizes):
                predicted = {}
                for name, fit in HEADS.items():
                    predicted[name] = fit(maps[:n], places[:n], seed)(test)
                    errors[name][seed, k] = np.linalg.norm(predicted[name] - true, axis=1).mean()
                    advance(1)
                if seed == 0 and n == nearest(sizes):
                    pictures = Pictures(images[-N_TEST:, 0], true, predicted)
    assert pictures is not None
    return Outcome(sizes, errors, pictures)


# The picture.

STYLES: dict[str, dict[str, Any]] = {
    POOLED: {"color": "#999999"},
    FLATTENED: {"color": "#D55E00"},
    PLAIN: {"color": "#56B4E9"},
    DROPOUT: {"color": "#0072B2", "linewidth": 2.6},
}
TRUE = "#009E73"


def draw(outcome: Outcome, path: Path) -> None:
    """Left: the first test pictures, with true and predicted places. Right: the error over the labels."""
    with draw_figure(10.6, 4.1) as figure:
        left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=(1.2, 1))[0]
        panels = left.subplots(2, DRAWN // 2)
        for k, panel in enumerate(panels.flat):
            draw_picture(outcome.pictures, k, panel)
        left.suptitle(f"Where is the whole digit? Learned from {outcome.shown} labels", fontsize=10)
        handles, names = panels.flat[0].get_legend_handles_labels()
        title = outcome.pictures.describe()
        left.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, title=title, title_fontsize=8)
        draw_curves(outcome, right.subplots())
        with replacing(path) as temporary:
            figure.savefig(temporary, dpi=110, format="png")


def draw_picture(pictures: Pictures, k: int, panel: Axes) -> None:
    """One test picture with a box at the true place, a dot at each predicted one, and the errors below."""
    from matplotlib.patches import Rectangle

    panel.imshow(pictures.images[k], cmap="gray_r")
    panel.set(xticks=[], yticks=[])
    panel.grid(visible=False)
    panel.spines[:].set_visible(True)
    top, left = pictures.places[k]
    box = Rectangle((left - 0.5, top - 0.5), DIGIT, DIGIT, fill=False, color=TRUE, linewidth=2, label="true place")
    panel.add_patch(box)
    for place, name in zip((0.3, 0.7), COMPARED, strict=True):
        color = STYLES[name]["color"]
        ends = np.stack([pictures.places[k], pictures.predicted[name][k]]) + (DIGIT - 1) / 2  # the digit's middle
        panel.plot(ends[:, 1], ends[:, 0], color=color, linewidth=1)
        panel.plot(*ends[1, ::-1], "o", color=color, markersize=6, markeredgecolor="white", label=name)
        error = f"{pictures.measure(name)[k]:.1f}"
        panel.text(place, -0.04, error, color=color, transform=panel.transAxes, fontsize=8, ha="center", va="top")


def draw_curves(outcome: Outcome, panel: Axes) -> None:
    """Mean over the seeds with its 95 % t interval."""
    for name, errors in outcome.errors.items():
        mean = errors.mean(0)
        half = [mean[k] - seed_interval(errors[:, k]).low for k in range(len(mean))]
        panel.errorbar(outcome.labels, mean, half, marker="o", capsize=2, label=name, **STYLES[name])
    highest = max(errors.mean(0).max() for errors in outcome.errors.values())
    panel.set(xscale="log", xticks=outcome.labels, xticklabels=outcome.labels, ylim=(0, 1.25 * highest))
    panel.set(xlabel="labelled pictures", title=f"Mean error in pixels, of {SIDE} (lower is better)")
    panel.minorticks_off()
    panel.legend(fontsize=8, loc="lower left")


# The files.


def write_demo(folder: Path, labels: Sequence[int] = LABELS, seeds: int = SEEDS) -> tuple[str, Path]:
    """Run the demo, and write its picture and its numbers.

    Args:
        folder: where ``where-is-the-digit.png`` and ``.json`` go.
        labels: the numbers of labelled pictures.
        seeds: how often pictures are drawn anew.

    Returns:
        The result in one sentence, and the path of the picture.
    """
    require_matplotlib()
    outcome = compare_heads(labels, seeds)
    folder.mkdir(parents=True, exist_ok=True)
    picture = folder / f"{NAME}.png"
    draw(outcome, picture)
    record = {
        "simulated": "the places and the clutter; the digits are scikit-learn's",
        "network": "two convolutions with random weights, frozen",
        "labels": list(outcome.labels),
        "errors": {name: errors.round(4).tolist() for name, errors in outcome.errors.items()},
        "environment": describe_environment("scikit-learn", "numpy"),
    }
    write_json(folder / f"{NAME}.json", record)
    return outcome.describe(), picture
