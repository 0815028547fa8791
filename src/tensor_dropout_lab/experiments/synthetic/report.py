"""What the synthetic records say: gaps, figures and a paragraph. Reads records only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from tensor_dropout_lab.figures import draw_figure, save_figure

STOCHASTIC, EXACT, PRINTED = "#D55E00", "#0072B2", "#009E73"
NAMES = {"cp": "CP", "tucker": "Tucker", "sgd": "SGD", "adam": "Adam"}
Record = dict[str, Any]


Curves = NDArray[np.float64]


def curves_of(record: Record, kind: str, theta: float, measured: str = "exact_objective") -> Curves:
    """The curves (seeds, epochs) of all variants of a kind at one θ; NaN where training diverged."""
    found = [v[measured] for v in record["variants"] if v["kind"] == kind and v["theta"] == theta]
    return np.array(found, dtype=np.float64)


def gap(record: Record, theta: float) -> tuple[float, float, float]:
    """How far the stochastic curves are from the deterministic one.

    Returns:
        The mean over mask seeds of the curve's mean distance (stochastic minus exact, averaged over the measured
        epochs), its standard deviation over mask seeds, and the largest distance of the seeds' mean curve relative
        to the deterministic curve.
    """
    exact = curves_of(record, "exact", theta)
    seeds = curves_of(record, "stochastic", theta)
    distances = (seeds - exact).mean(1)
    largest = np.abs(seeds.mean(0) - exact[0]) / exact[0]
    return float(distances.mean()), float(distances.std(ddof=1)), float(largest.max())


def formula_error(record: Record, theta: float) -> float:
    """The largest relative error of the printed objective along the exactly trained path."""
    exact = curves_of(record, "exact", theta)
    return float(np.abs(curves_of(record, "exact", theta, "printed_objective") / exact - 1).max())


def draw_curves(record: Record, stem: Path) -> list[Path]:
    """One panel per θ: the exact expected objective along stochastic, exact and printed-formula training."""
    setting, epochs = record["settings"], record["epochs"]
    with draw_figure(2.3 * len(setting["thetas"]), 2.8) as figure:
        axes = figure.subplots(1, len(setting["thetas"]), sharey=True)
        for axis, theta in zip(axes, setting["thetas"], strict=True):
            seeds = curves_of(record, "stochastic", theta)
            axis.fill_between(epochs, seeds.min(0), seeds.max(0), color=STOCHASTIC, alpha=0.3, lw=0)
            axis.plot(epochs, seeds.mean(0), color=STOCHASTIC, label=f"stochastic, {len(seeds)} mask seeds")
            axis.plot(epochs, curves_of(record, "exact", theta)[0], color=EXACT, ls="--", label="deterministic, exact")
            printed = curves_of(record, "printed", theta)[0]
            axis.plot(epochs, printed, color=PRINTED, ls=":", label="trained on the printed formula")
            axis.set(title=f"θ = {theta:g}", xlabel="epoch", yscale="log")
        axes[0].set_ylabel("exact expected loss")
        axes[-1].legend(fontsize=7, loc="lower left")
        figure.suptitle(
            f"{NAMES[setting['format']]} R-TRL, simulated {setting['inputs']} inputs, {NAMES[setting['optimizer']]}",
            fontsize=10,
        )
        return save_figure(figure, stem)


def draw_formula(records: dict[str, Record], stem: Path) -> list[Path]:
    """The printed formula over the exact value, at the same parameters: 1 where the theorem holds."""
    with draw_figure(3.6 * len(records), 3.0) as figure:
        from matplotlib import colormaps

        shades = colormaps["viridis"]
        axes = figure.subplots(1, len(records), sharey=True)
        for axis, record in zip(axes, records.values(), strict=True):
            axis.axhline(1.0, color="#888888", lw=0.8)
            thetas = record["settings"]["thetas"]
            for theta, shade in zip(thetas, np.linspace(0.85, 0.0, len(thetas)), strict=True):
                exact = curves_of(record, "exact", theta)[0]
                printed = curves_of(record, "exact", theta, "printed_objective")[0]
                axis.plot(record["epochs"], printed / exact, color=shades(shade), label=f"θ = {theta:g}")
            axis.set(title=f"simulated {record['settings']['inputs']} inputs", xlabel="epoch")
        axes[0].set_ylabel("printed formula / exact expected loss")
        axes[-1].legend(fontsize=7)
        return save_figure(figure, stem)


def table(name: str, record: Record) -> Table:
    """The gaps of the main stage, θ by θ."""
    grid = Table(title=f"{name}: exact expected loss (simulated data), stochastic minus deterministic")
    for heading in (
        "θ",
        "final, deterministic",
        "final, stochastic",
        "mean gap ± std over mask seeds",
        "printed off by",
    ):
        grid.add_column(heading, justify="right")
    for theta in record["settings"]["thetas"]:
        mean, spread, _ = gap(record, theta)
        exact = curves_of(record, "exact", theta)[0, -1]
        final = curves_of(record, "stochastic", theta)[:, -1].mean()
        error = formula_error(record, theta)
        grid.add_row(f"{theta:g}", f"{exact:.4f}", f"{final:.4f}", f"{mean:+.5f} ± {spread:.5f}", f"{error:.1%}")
    return grid


def summarize(name: str, records: dict[str, Record]) -> str:
    """A paragraph with the figures that matter."""
    lines = [f"{name} (simulated data)."]
    for stage, record in records.items():
        thetas = [theta for theta in record["settings"]["thetas"] if theta < 1]
        gaps = {theta: gap(record, theta) for theta in thetas}
        worst = max(thetas, key=lambda theta: gaps[theta][2])
        within = [theta for theta in thetas if abs(gaps[theta][0]) <= 2 * gaps[theta][1]]
        formula = max(thetas, key=lambda theta: formula_error(record, theta))
        setting = record["settings"]
        lines.append(
            f"{stage} ({setting['epochs']} epochs, {NAMES[setting['optimizer']]}, rate {record['rate']:g}, "
            f"{record['seconds']:.0f} s on {record['device']}): the mean gap between the stochastic and the exact "
            f"deterministic curve is within two standard deviations over mask seeds for {len(within)} of the "
            f"{len(thetas)} θ below 1; the largest relative distance between the two curves at any epoch is "
            f"{gaps[worst][2]:.1%} (θ = {worst:g}); at the same parameters the printed formula is off by up to "
            f"{formula_error(record, formula):.1%} (θ = {formula:g})."
        )
    return "\n".join(lines)
