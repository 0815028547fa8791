"""The paper's figures, in its arrangement, from records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.metrics.registry import find_main
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.experiments.synthetic.report import curves_of, formula_error, gap
from tensor_dropout_lab.experiments.synthetic.report import draw_curves as draw_losses
from tensor_dropout_lab.figures import draw_figure, save_figure
from tensor_dropout_lab.report.model import Claim, Figure

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#666666")
MARKERS = "osD^vP*"
Curve = Sequence[tuple[float, float]]


def draw_claim(claim: Claim, stem: Path) -> Figure:
    """The measures of a claim with their intervals, and on which side they must lie for it to hold."""
    with draw_figure(5.2, 0.24 * len(claim.measures) + 0.6) as figure:
        axes = figure.subplots()
        places = np.arange(len(claim.measures))[::-1]
        for place, measure in zip(places, claim.measures, strict=True):
            ends = (measure.low, measure.high)
            right = {
                "above": ends[0] > claim.reference,
                "below": ends[1] < claim.reference,
                "within": -claim.reference < ends[0] and ends[1] < claim.reference,
            }[claim.side]
            color = COLORS[2] if right else COLORS[1]
            axes.plot(ends, [place, place], color=color, linewidth=2)
            axes.plot([measure.value], [place], "o" if right else "s", color=color)
            if measure.printed is not None:
                axes.plot([measure.printed], [place], "o", markerfacecolor="none", color=COLORS[6])
        for line in (claim.reference, -claim.reference) if claim.side == "within" else (claim.reference,):
            axes.axvline(line, color="#333333", linewidth=1)
        axes.set_yticks(places, [measure.label for measure in claim.measures])
        axes.set_ylim(-0.6, len(places) - 0.4)
        axes.margins(x=0.12)
        axes.tick_params(labelsize=7)
        save_figure(figure, stem)
    printed = " Hollow: the paper's." if any(measure.printed is not None for measure in claim.measures) else ""
    sides = {"above": "to the right of the line", "below": "to the left of the line", "within": "between the lines"}
    unit = claim.unit[0].upper() + claim.unit[1:]
    caption = f"{unit}. The claim holds where an interval lies {sides[claim.side]}.{printed}"
    return Figure(stem.with_suffix(".svg"), "; ".join(claim.show_measures()), caption)


@dataclass(frozen=True)
class Head:
    """One row of a table of networks that were attacked.

    Attributes:
        name: the row.
        printed: the paper's accuracy, in %.
        accuracies: ours, of each seed.
        attacked: what was done to them -> the accuracy that it left, the mean over seeds.
    """

    name: str
    printed: float | None
    accuracies: Sequence[float]
    attacked: Mapping[str, float]


def draw_heads(heads: Sequence[Head], stem: Path, title: str) -> list[Path]:
    """Accuracy beside the paper's, and what attacks leave of it."""
    with draw_figure(8.0, 0.42 * len(heads) + 1.9) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        places = np.arange(len(heads))[::-1]
        for place, head in zip(places, heads, strict=True):
            mean = float(np.mean(head.accuracies))
            if len(head.accuracies) > 1:
                low, high = seed_interval(head.accuracies)
                left.plot([low, high], [place, place], color=COLORS[0], linewidth=2)
                left.plot(head.accuracies, [place] * len(head.accuracies), ".", color=COLORS[0], markersize=3)
            left.plot([mean], [place], "o", color=COLORS[0], label="ours" if place == places[0] else None)
            if head.printed is not None:
                left.plot(
                    [head.printed],
                    [place],
                    "o",
                    markerfacecolor="none",
                    color=COLORS[6],
                    label="paper" if place == places[0] else None,
                )
        kinds = list(heads[0].attacked)
        height = 0.8 / len(kinds)
        for k, kind in enumerate(kinds):
            values = [head.attacked[kind] for head in heads]
            at = places + (len(kinds) / 2 - k - 0.5) * height
            right.barh(at, values, height, color=COLORS[k], label=kind)
            for y, value in zip(at, values, strict=True):
                right.text(value, y, f" {value:.1f}", va="center", fontsize=6)
        left.set_yticks(places, [head.name for head in heads])
        left.set(xlabel="test accuracy, %")
        right.set(xlabel="accuracy left, %")
        right.margins(x=0.12)
        for axis in (left, right):
            axis.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)
        figure.suptitle(title, fontsize=10)
        return save_figure(figure, stem)


def describe_heads(heads: Sequence[Head]) -> str:
    """The picture in words."""
    words = []
    for head in heads:
        attacks = ", ".join(f"{value:.1f} % under {kind}" for kind, value in head.attacked.items())
        printed = "" if head.printed is None else f" (paper {head.printed:g})"
        words.append(f"{head.name} {np.mean(head.accuracies):.1f} %{printed}, {attacks}")
    return "Accuracy of each head and what attacks leave of it: " + "; ".join(words) + "."


def draw_curves(panels: Mapping[str, Mapping[str, Curve]], stem: Path, title: str) -> list[Path]:
    """Accuracy over the magnitude of FGSM, a panel for each kind of network and a curve for each network."""
    with draw_figure(max(3.1 * len(panels), 4.6), 3.2) as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (panel, curves) in zip(axes, panels.items(), strict=True):
            for k, (label, curve) in enumerate(curves.items()):
                x, y = zip(*curve, strict=True)
                axis.plot(x, y, label=label, color=COLORS[k % 7], marker=MARKERS[k % 7])
            axis.set_xscale("log")
            axis.set(xlabel="magnitude, share of the range", title=panel)
            axis.legend(fontsize=7)
        axes[0].set_ylabel("accuracy, %")
        axes[0].set_ylim(bottom=0)  # of all panels, once all curves are there
        figure.suptitle(title, fontsize=10)
        return save_figure(figure, stem)


def describe_curves(panels: Mapping[str, Mapping[str, Curve]]) -> str:
    """The curves in words: where each begins and ends."""
    words = []
    for panel, curves in panels.items():
        for label, curve in curves.items():
            name = f"{panel}, {label}" if panel else label
            words.append(f"{name} from {curve[0][1]:.0f} % to {curve[-1][1]:.0f} %")
    return "; ".join(words) + "."


def draw_sizes(lines: Mapping[str, Curve], stem: Path, title: str) -> list[Path]:
    """Accuracy over the number of parameters, a line for each kind of head."""
    with draw_figure(5.6, 4.2) as figure:
        axis = figure.subplots()
        for k, (label, line) in enumerate(lines.items()):
            x, y = zip(*line, strict=True)
            axis.plot(x, y, label=label, color=COLORS[k % 7], marker=MARKERS[k % 7])
        axis.set_xscale("log")
        axis.set(xlabel="parameters of the head", ylabel="test accuracy, %")
        axis.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=2, fontsize=7)
        figure.suptitle(title, fontsize=10)
        return save_figure(figure, stem)


Levels = Mapping[str, Sequence[Mapping[str, Any]]]
"""Head -> the numbers of each level of noise, the clean one first."""


def draw_noise(panels: Mapping[str, Levels], stem: Path, title: str) -> list[Path]:
    """The main metric over SNR with bands, a panel for each noise, a curve for each head; clean is a dotted line."""
    metric = find_main(next(rows[0] for curves in panels.values() for rows in curves.values()))
    with draw_figure(4.4 * len(panels), 3.4) as figure:
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axis, (noise, curves) in zip(axes, panels.items(), strict=True):
            for k, (label, rows) in enumerate(curves.items()):
                noisy = sorted((row for row in rows if row["level"] is not None), key=lambda row: row["level"])
                levels = [row["level"] for row in noisy]
                low, high = ([row[end] for row in noisy] for end in ("low", "high"))
                axis.fill_between(levels, low, high, color=COLORS[k], alpha=0.2)
                axis.plot(levels, [row[metric.name] for row in noisy], label=label, color=COLORS[k], marker=MARKERS[k])
                axis.axhline(rows[0][metric.name], color=COLORS[k], linestyle=":", linewidth=0.9)
            levels = sorted({row["level"] for rows in curves.values() for row in rows} - {None})
            if levels:
                axis.set_xscale("log", base=2)
                if metric.unit == "target":
                    axis.set_yscale("log")
                axis.set_xticks(levels, [f"{level:g}" for level in levels])
                axis.yaxis.set_major_formatter("{x:g}")
            axis.set(xlabel="SNR, σ²(signal)/σ²(noise)", title=f"{noise} noise")
        axes[0].set_ylabel(metric.head("years"))
        axes[0].legend(fontsize=7)
        figure.suptitle(title, fontsize=10)
        return save_figure(figure, stem)


Ages = Mapping[str, tuple[np.ndarray, np.ndarray]]
"""Head -> true and predicted ages."""


def draw_ages(panels: Ages, stem: Path, title: str) -> list[Path]:
    """Predicted over true age, a panel for each head; no bars: a spread over masks is no error."""
    ages = np.concatenate([age for age, _ in panels.values()])
    ends = [float(ages.min()) - 3, float(ages.max()) + 3]
    columns = min(4, len(panels))
    rows = -(-len(panels) // columns)
    with draw_figure(2.3 * columns + 0.6, 2.3 * rows + 0.6) as figure:
        axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axis, (head, (age, predicted)) in zip(axes.flat, panels.items(), strict=False):
            axis.plot(ends, ends, color=COLORS[6], linewidth=0.9)
            axis.plot(age, predicted, "o", markersize=2.5, color=COLORS[0])
            axis.set(title=head)
        for axis in axes.flat[len(panels) :]:
            axis.set_axis_off()
        figure.supxlabel("age, years", fontsize=9)
        figure.supylabel("predicted age, years", fontsize=9)
        figure.suptitle(title, fontsize=10)
        return save_figure(figure, stem)


def describe_ages(panels: Ages) -> str:
    """The picture in words."""
    errors = {head: float(np.abs(predicted - age).mean()) for head, (age, predicted) in panels.items()}
    return ", ".join(f"{head} {error:.1f} years off on average" for head, error in errors.items()) + "."


@dataclass(frozen=True)
class Point:
    """One run of a surface.

    Attributes:
        rank: its name.
        ratio: the compression ratio; None: not known, because the run did not end.
        theta: θ.
        accuracy: in %; None: there is none.
        failed: whether that is because the run failed.
    """

    rank: str
    ratio: float | None
    theta: float
    accuracy: float | None
    failed: bool = False


def draw_surface(panels: Mapping[str, Sequence[Point]], stem: Path, title: str) -> list[Path]:
    """Accuracy over compression ratio (in its order) and θ, a panel for each law, as coloured cells with numbers."""
    points = [point for panel in panels.values() for point in panel]
    values = [point.accuracy for point in points if point.accuracy is not None]
    ranks = list(dict.fromkeys(point.rank for point in points))
    ratios = {point.rank: f"{point.ratio:.1f}" for point in points if point.ratio is not None}
    thetas = sorted({point.theta for point in points})
    with draw_figure(4.4 * len(panels), 3.4) as figure:
        axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axis, (panel, runs) in zip(axes, panels.items(), strict=True):
            grid = np.full((len(thetas), len(ranks)), np.nan)
            for point in runs:
                row, column = thetas.index(point.theta), ranks.index(point.rank)
                grid[row, column] = np.nan if point.accuracy is None else point.accuracy
                dark = point.accuracy is not None and point.accuracy <= (min(values) + max(values)) / 2
                text = "failed" if point.failed else "" if point.accuracy is None else f"{point.accuracy:.1f}"
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
            shades = axis.imshow(
                grid, origin="lower", aspect="auto", cmap="viridis", vmin=min(values), vmax=max(values)
            )
            axis.grid(False)
            axis.set_xticks(range(len(ranks)), [ratios.get(rank, "?") for rank in ranks])
            axis.set_yticks(range(len(thetas)), [f"{theta:g}" for theta in thetas])
            axis.set(xlabel="compression ratio", title=panel)
        axes[0].set_ylabel("θ")
        figure.colorbar(shades, ax=list(axes), label="accuracy, %")
        figure.suptitle(title, fontsize=10)
        return save_figure(figure, stem)


def describe_surface(panels: Mapping[str, Sequence[Point]]) -> str:
    """The surface in words: its largest and smallest accuracy, and how many runs failed."""
    words = []
    for panel, points in panels.items():
        done = [(point.accuracy, point) for point in points if point.accuracy is not None]
        ends = [
            f"{accuracy:.1f} % (ratio {point.ratio:.1f}, θ = {point.theta:g})"
            for accuracy, point in (min(done, key=lambda pair: pair[0]), max(done, key=lambda pair: pair[0]))
        ]
        failed = sum(point.failed for point in points)
        words.append(
            f"{panel} from {ends[0]} to {ends[1]}" + (f", {failed} of {len(points)} runs failed" * (failed > 0))
        )
    return "; ".join(words) + "."


# Synthetic data.


def describe_stage(record: dict[str, Any]) -> list[tuple[float, str, str, str, str]]:
    """θ, final losses, gap, and how far the printed formula is off."""
    rows = []
    for theta in record["settings"]["thetas"]:
        mean, spread, _ = gap(record, theta)
        exact, stochastic = (
            curves_of(record, "exact", theta)[0, -1],
            curves_of(record, "stochastic", theta)[:, -1].mean(),
        )
        error = formula_error(record, theta)
        rows.append((theta, f"{exact:.4f}", f"{stochastic:.4f}", f"{mean:+.5f} ± {spread:.5f}", f"{100 * error:.1f} %"))
    return rows


def draw_stage(record: dict[str, Any], stem: Path) -> list[Path]:
    """The five panels."""
    return draw_losses(record, stem)
