"""Attacks: the paper's, the adaptive ensemble in the next column, and the audit's verdict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.metrics.registry import find_main
from tensor_dropout.robustness.protocol import PAPER
from tensor_dropout_lab.experiments.recipes import Recipe, describe_experiment
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.runs import SIZES, Bases, Runs, find_runs, label_of, open_section, pool

RADII = ("2/255", "8/255", "16/255")
ADAPTIVE = "adaptive ensemble"
ABOUT = (
    "The paper's attacks are FGSM, BIM and PGD with the cross-entropy. The adaptive ensemble at the same radius "
    "(margin and DLR losses, APGD, transfer, Square) is the number to trust: what only the first three leave is not "
    "robustness."
)
_NOTE = (
    "Intervals in the footnotes: one network, over images (Wilson); several seeds, over seeds (t). The audit's verdict "
    "is about the middle radius; where it compares losses, it also looks at the others."
)


def build_attacks(experiment: str, bases: Bases, figures: Path) -> Section:
    """A table for each recipe: what the paper prints, then ours at every point of its grid."""
    tables, pictures, verdicts = [], [], []
    sizes = {preset: find_runs(experiment, bases, preset) for preset in SIZES}
    for together in zip(*sizes.values(), strict=True):
        row = together[0].recipe.row
        networks = {
            ", ".join(filter(None, (SIZES[preset], point))): runs
            for preset, own in zip(SIZES, together, strict=True)
            for point, runs in own.points().items()
        }
        tables.append(tabulate_attacks(networks, f"{row}: accuracy in % under attack", printed=together[0].recipe))
        for preset, own in zip(SIZES, together, strict=True):
            points = {", ".join(filter(None, (row, point))): runs for point, runs in own.points().items()}
            verdicts += list_verdicts(points, SIZES[preset])
    for preset in SIZES:
        panels: dict[str, dict[str, Runs]] = {}
        for own in sizes[preset]:
            for point, runs in own.points().items():
                panels.setdefault(own.recipe.row if point else "", {})[point or own.recipe.row] = runs
        pictures += add_curves(panels, f"{experiment}-{preset}", experiment, preset, figures)
    return open_section(experiment, bases, tables=tables, figures=pictures, verdicts=verdicts, notes=[ABOUT])


def tabulate_attacks(
    networks: Mapping[str, Runs], caption: str, label: str | None = None, *, printed: Recipe | None = None
) -> Table:
    """Three rows for each network, one per radius: the paper's attacks, the adaptive ensemble, the audit.

    Args:
        networks: its runs by the name of each network.
        caption: of the table.
        label: what must be said of its data.
        printed: the recipe whose printed numbers come first.
    """
    rows = []
    if printed is not None and printed.printed:
        for radius in RADII:
            numbers = [Cell(f"{printed.printed[attack][radius]:g}", "paper") for attack in PAPER]
            rows.append([Cell("paper"), Cell(radius), *numbers, Cell(""), Cell("")])
    for name, runs in networks.items():
        rows += [[Cell(name), Cell(radius), *_list_attacked(runs, radius)] for radius in RADII]
    columns = ["network", "ε", *(attack.upper() for attack in PAPER), ADAPTIVE, "audit"]
    return Table(caption, columns, rows, _NOTE, label)


def _list_attacked(runs: Runs, radius: str) -> list[Cell]:
    """FGSM, BIM, PGD, the adaptive ensemble and the audit at one radius."""
    broken = runs.broken()
    summaries = runs.summaries()
    if broken is not None or not summaries:
        return [broken or Cell("not run", "not run")] * (len(PAPER) + 1) + [Cell("")]
    cells = []
    for attack in PAPER:
        wanted = ("paper", attack, radius)
        cells.append(
            _show(
                [
                    row
                    for summary in summaries
                    for row in summary["attacks"]
                    if (row["protocol"], row["attack"], row["budget"]) == wanted
                ]
            )
        )
    worst = [row for summary in summaries for row in summary["worst_case"] if row["budget"] == radius]
    cells.append(_show([row["adaptive"] for row in worst if "adaptive" in row]))
    return [*cells, _show_audit(summaries) if radius == RADII[1] else Cell("")]


def _show(rows: list[Any]) -> Cell:
    if not rows:
        return Cell("not run", "not run")
    metric = find_main(rows[0])
    name, decimals = metric.name, metric.decimals
    pooled = pool(rows, name)
    scores = ", ".join(f"{row[name]:.{decimals}f}" for row in rows)
    over = "images" if len(rows) == 1 else f"{len(rows)} seeds: {scores}"
    detail = f"95 % interval {pooled['low']:.{decimals}f} to {pooled['high']:.{decimals}f} over {over}"
    return Cell(f"{pooled[name]:.{decimals}f}", "ours", detail)


def _show_audit(summaries: list[dict[str, Any]]) -> Cell:
    """How many of the seeds the audit calls masked."""
    audits = [summary["audit"] for summary in summaries if "audit" in summary]
    if not audits:
        return Cell("")
    masked = sum(bool(audit["masked"]) for audit in audits)
    count = f" ({masked} of {len(audits)})" if len(audits) > 1 else ""
    return Cell(("MASKING" if masked else "no sign of masking") + count, "ours", audits[0]["verdict"])


def list_verdicts(networks: Mapping[str, Runs], size: str) -> list[tuple[str, str]]:
    """What the audit says of every attacked network."""
    verdicts = []
    for name, runs in networks.items():
        for cell, found in runs.records:
            if found.state == "done" and found.evaluation and "audit" in found.evaluation["summary"]:
                seed = f", seed {cell.seed}" if len(runs.done()) > 1 else ""
                verdicts.append((f"{name}{seed} ({size})", found.evaluation["summary"]["audit"]["verdict"]))
    return verdicts


def add_curves(
    panels: Mapping[str, Mapping[str, Runs]], name: str, experiment: str, preset: str, figures: Path
) -> list[Figure]:
    """Accuracy over the magnitude of FGSM, if any network was attacked; over seeds, the mean.

    Args:
        panels: panel -> network -> its runs.
        name: of the file.
        experiment: for its title.
        preset: for its label.
        figures: the folder.
    """
    curves = {
        panel: {network: _fgsm_curve(runs.summaries()) for network, runs in networks.items() if runs.summaries()}
        for panel, networks in panels.items()
    }
    curves = {panel: own for panel, own in curves.items() if own}
    if not curves:
        return []
    stem, size = figures / name, SIZES[preset]
    drawings.draw_curves(curves, stem, f"{describe_experiment(experiment)['title']}, {size}")
    alt = "Accuracy over the magnitude of FGSM, one curve per network: " + drawings.describe_curves(curves)
    caption = f"FGSM, the paper's protocol, {size}"
    return [Figure(stem.with_suffix(".svg"), alt, caption, label_of(experiment, preset))]


def _fgsm_curve(summaries: list[dict[str, Any]]) -> list[tuple[float, float]]:
    found: dict[float, list[float]] = {}
    for summary in summaries:
        for row in summary["attacks"]:
            if row["protocol"] == "paper" and row["attack"] == "fgsm" and row["budget"].endswith("e-3"):
                found.setdefault(row["epsilon"], []).append(row["accuracy"])
    return sorted((epsilon, float(np.mean(values))) for epsilon, values in found.items())
