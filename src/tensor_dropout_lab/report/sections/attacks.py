"""Attacks: the paper's, the adaptive ensemble in the next column, and the audit's verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tensor_dropout.metrics.registry import find_main
from tensor_dropout.robustness.protocol import PAPER
from tensor_dropout_lab.experiments.recipes import Recipe
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.runs import Part, Runs, pool

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


def build_attacks(part: Part) -> Section:
    """A table for each recipe: at full size what the paper prints, then ours at every point of its grid."""
    tables, verdicts = [], []
    panels: dict[str, dict[str, Runs]] = {}
    for runs in part.runs():
        row, points = runs.recipe.row, runs.points()
        printed = runs.recipe if part.preset == "paper" else None
        networks = {point or "ours": own for point, own in points.items()}
        tables.append(tabulate_attacks(networks, f"{row}: accuracy in % under attack", printed=printed))
        verdicts += list_verdicts({", ".join(filter(None, (row, point))): own for point, own in points.items()})
        for point, own in points.items():
            panels.setdefault(row if point else "", {})[point or row] = own
    return part.section(tables=tables, figures=draw_fgsm(part, panels), verdicts=verdicts, notes=[ABOUT])


def tabulate_attacks(networks: Mapping[str, Runs], caption: str, *, printed: Recipe | None = None) -> Table:
    """Three rows for each network, one per radius: the paper's attacks, the adaptive ensemble, the audit.

    Args:
        networks: its runs by the name of each network.
        caption: of the table.
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
    return Table(caption, columns, rows, _NOTE)


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


def list_verdicts(networks: Mapping[str, Runs]) -> list[tuple[str, str]]:
    """What the audit says of every attacked network."""
    verdicts = []
    for name, runs in networks.items():
        for cell, found in runs.records:
            if found.state == "done" and found.evaluation and "audit" in found.evaluation["summary"]:
                seed = f", seed {cell.seed}" if len(runs.done()) > 1 else ""
                verdicts.append((f"{name}{seed}", found.evaluation["summary"]["audit"]["verdict"]))
    return verdicts


def draw_fgsm(part: Part, panels: Mapping[str, Mapping[str, Runs]], what: str = "") -> list[Figure]:
    """Accuracy over the magnitude of FGSM, if any network was attacked; over seeds, the mean.

    Args:
        part: the experiment.
        panels: panel -> network -> its runs.
        what: a word in the name of the file.
    """
    curves = {
        panel: {network: _fgsm_curve(runs.summaries()) for network, runs in networks.items() if runs.summaries()}
        for panel, networks in panels.items()
    }
    curves = {panel: own for panel, own in curves.items() if own}
    if not curves:
        return []
    drawings.draw_curves(curves, part.stem(what), part.title)
    alt = "Accuracy over the magnitude of FGSM, one curve per network: " + drawings.describe_curves(curves)
    return [Figure(part.stem(what).with_suffix(".svg"), alt, "FGSM, the paper's protocol")]


def _fgsm_curve(summaries: list[dict[str, Any]]) -> list[tuple[float, float]]:
    found: dict[float, list[float]] = {}
    for summary in summaries:
        for row in summary["attacks"]:
            if row["protocol"] == "paper" and row["attack"] == "fgsm" and row["budget"].endswith("e-3"):
                found.setdefault(row["epsilon"], []).append(row["accuracy"])
    return sorted((epsilon, float(np.mean(values))) for epsilon, values in found.items())
