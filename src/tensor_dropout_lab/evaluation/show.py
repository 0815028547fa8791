"""Tables and figures of evaluations, drawn from records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from tensor_dropout.metrics.detection import SIGNALS
from tensor_dropout.metrics.measures import reliability, risk_coverage, score_images
from tensor_dropout.metrics.outcome_arrays import read_numbers
from tensor_dropout.metrics.registry import compute_coverage, find_main, main_metric
from tensor_dropout.robustness.attacks import ATTACKS
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout.robustness.protocol import CURVE_STRENGTHS, UNBOUNDED
from tensor_dropout_lab.evaluation.show_calibration import name_spread, print_calibration, read_levels
from tensor_dropout_lab.figures import draw_figure, save_figure

PAPER_COLOR, ADAPTIVE_COLOR, CLEAN_COLOR, CALIBRATED_COLOR = "#0072B2", "#D55E00", "#666666", "#009E73"


def print_evaluation(record: Mapping[str, Any], console: Console) -> None:
    """The record as tables: attacks side by side, noise, and the audit with its verdict."""
    summary = record["summary"]
    main = main_metric(summary["task"])
    metric, unit = main.name, " %" if main.unit == "%" else ""
    clean = "; ".join(f"{name} {_with_interval(row, metric)}".lstrip() for name, row in _by_target(summary["clean"]))
    console.print(f"{escape(record['title'])}: {summary['examples']} {record['split']} examples", highlight=False)
    console.print(f"clean {metric} {escape(clean)}{unit}", highlight=False)
    print_calibration(record.get("calibration"), record["split"], console)
    if "targets" in summary["clean"]:
        console.print(_tabulate_targets(summary["clean"]["targets"], metric))
    if summary["attacks"]:
        console.print(_tabulate_attacks(summary, metric, "paper"))
        console.print(_tabulate_attacks(summary, metric, "adaptive"))
    if summary["worst_case"]:
        table = Table("ε", f"{metric}: the paper's attacks", "adaptive ensemble", title="worst case per example")
        for row in summary["worst_case"]:
            cells = (_with_interval(row[key], metric) if key in row else "not run" for key in ("paper", "adaptive"))
            table.add_row(row["budget"], *cells)
        console.print(table)
    if summary["noise"]:
        console.print(_tabulate_noise(summary, metric))
    if "unknown" in summary:
        console.print(_tabulate_unknown(summary["unknown"]))
    if "heads" in summary:
        console.print(_tabulate_heads(summary["heads"], metric))
    if "audit" in summary:
        print_audit(summary["audit"], console)
    elif summary["attacks"]:
        console.print(
            "No audit: the paper's attacks alone cannot tell robustness from gradient masking; add --protocol both.",
            highlight=False,
            style="bold",
        )


def _tabulate_attacks(summary: Mapping[str, Any], metric: str, protocol: str) -> Table | str:
    """Attacks down, radii across."""
    rows = [row for row in summary["attacks"] if row["protocol"] == protocol]
    if not rows:
        return ""
    radii = {row["budget"]: row["epsilon"] for row in rows}
    asked = {row["budget"] for row in summary["worst_case"]}
    curve = {f"{strength}e-3" for strength in CURVE_STRENGTHS} - asked
    shown = sorted((budget for budget in radii if budget not in curve), key=lambda budget: radii[budget])
    found = {(row["attack"], row["budget"]): row for row in rows}
    title = f"{protocol} protocol: {metric} at ε" + (" (* on those standing after the rows above)" * any_after(rows))
    table = Table("attack", "steps", *shown, "seconds", title=title)
    for attack in dict.fromkeys(row["attack"] for row in rows):
        own = [row for row in rows if row["attack"] == attack and row["budget"] in shown]
        cells = (found.get((attack, budget)) for budget in shown)
        steps = dict.fromkeys(str(row["steps"]) for row in own if row["steps"] is not None)
        table.add_row(
            attack + ("*" if any_after(own) else ""),
            ", ".join(steps),
            *("" if cell is None else f"{cell[metric]:.2f}" for cell in cells),
            f"{sum(row['seconds'] for row in own):.1f}",
        )
    return table


def _tabulate_targets(targets: Mapping[str, Any], metric: str) -> Table:
    """Several targets of a regression, clean: each has a unit of its own."""
    keys = [key for key in INTERVALS if any(key in row for row in targets.values())]
    title = f"each target in its own unit; below, attacks have their mean{SPREAD if keys else ''}"
    table = Table("target", metric, *map(name_spread, keys), title=title)
    for name, row in targets.items():
        table.add_row(escape(name), _with_interval(row, metric), *_show(row, keys))
    return table


def any_after(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether an attack met only those that others had left."""
    return any(row["cumulative"] for row in rows)


def print_audit(audit: Mapping[str, Any], console: Console) -> None:
    """Every rule with what was seen, then the verdict."""
    table = Table("", "rule", "seen", title="audit")
    marks = {True: "holds", False: "BROKEN", None: "not tried"}
    for check in audit["checks"]:
        table.add_row(
            marks[check["passed"]], f"{check['rule']} ({check['publication'].split(':')[0]})", check["finding"]
        )
    console.print(table)
    console.print(audit["verdict"], highlight=False, style="bold")


def _tabulate_noise(summary: Mapping[str, Any], metric: str) -> Table:
    keys = [key for key in UNCERTAINTY if key in summary["clean"]]
    several = ["target"] if "targets" in summary["clean"] else []
    heads = [_name_key(key, summary["clean"]) for key in keys]
    title = "noise: metric with 95 % interval over draws and images" + SPREAD * (heads != keys)
    table = Table("noise", "level", *several, metric, *heads, title=title)
    for row in [{"corruption": "none", "unit": "", **summary["clean"]}, *summary["noise"]]:
        for name, own in _by_target(row):
            shown = [escape(name)] if several else []
            table.add_row(*_name_noise(row), *shown, _with_interval(own, metric), *_show(own, keys))
    return table


def _tabulate_unknown(found: Mapping[str, Any]) -> Table:
    title = f"{found['examples']} examples of unknown classes told from the known"
    table = Table("signal", "AUROC, %", "let through at 95 % of the known, %", title=title)
    for name, row in found["signals"].items():
        table.add_row(SIGNALS[name], f"{row['auroc']:.1f}", f"{row['fpr95']:.1f}")
    return table


def print_detection(rows: Sequence[Mapping[str, Any]], names: Sequence[str], console: Console) -> None:
    """AUROC of every signal, evaluations side by side."""
    signals = list(dict.fromkeys(signal for row in rows for signal in row))
    table = Table("signal", *names, title="unknown classes told from the known: AUROC in %")
    for signal in signals:
        table.add_row(SIGNALS[signal], *(f"{row[signal]['auroc']:.1f}" if signal in row else "" for row in rows))
    console.print(table)


def _tabulate_heads(rows: Sequence[Mapping[str, Any]], metric: str) -> Table:
    table = Table("cut", "size", "parameters", metric, title="the same network with a smaller head, not trained again")
    for row in rows:
        table.add_row(row["kind"], str(row["size"]), f"{row['parameters']:,}", _with_interval(row, metric))
    return table


UNCERTAINTY = ("nll", "ece", "brier", "aurc", "coverage_95", "coverage_95_widened")
INTERVALS = ("coverage_95", "width_95", "coverage_95_widened", "width_95_widened")


SPREAD = "\nspread: over masks, draws or members alone, no error; widened: by one variance of held-out errors"


def _name_key(key: str, clean: Mapping[str, Any]) -> str:
    """The head of a column: of a regression's numbers it says that they are of the spread alone."""
    return key if find_main(clean).task == "classification" else name_spread(key)


def _by_target(row: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The numbers of every target with its name; of one target, or of classes, the row as it is."""
    return list(row["targets"].items()) if "targets" in row else [("", row)]


def _name_noise(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["corruption"], f"{row['level']:g} {row['unit']}" if row["unit"] else ""


def _show(row: Mapping[str, Any], keys: Sequence[str]) -> list[str]:
    return ["" if row.get(key) is None else f"{row[key]:.3g}" for key in keys]


def _with_interval(row: Mapping[str, Any], metric: str) -> str:
    """Without the interval where there is none, of a single example."""
    if row["low"] is None:
        return f"{row[metric]:.2f}"
    return f"{row[metric]:.2f} [{row['low']:.2f}, {row['high']:.2f}]"


def _ends(rows: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """(2, rows): the lower and upper ends, NaN where there are none."""
    return np.array([[row["low"] for row in rows], [row["high"] for row in rows]], dtype=np.float64)


# Figures.


def draw_evaluation(record: Mapping[str, Any], outcomes: Outcomes, folder: Path) -> list[Path]:
    """``attacks``, ``noise`` and ``uncertainty`` as PNG and SVG, as far as there is something to draw."""
    summary, paths = record["summary"], []
    if any(row["budget"] != UNBOUNDED for row in summary["attacks"]):
        paths += _draw_attacks(summary, folder / "attacks", record["title"])
    if summary["noise"]:
        paths += _draw_noise(summary, folder / "noise", record["title"])
    paths += _draw_uncertainty(record, outcomes, folder / "uncertainty")
    return paths


def _draw_attacks(summary: Mapping[str, Any], stem: Path, title: str) -> list[Path]:
    main = main_metric(summary["task"])
    metric = main.name
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in summary["attacks"]:
        if row["budget"] != UNBOUNDED and not row["cumulative"] and not _is_check(row):
            curves.setdefault((row["protocol"], row["attack"]), []).append((row["epsilon"], row[metric]))
    with draw_figure(6.0, 3.8) as figure:
        axes = figure.subplots()
        axes.axhline(summary["clean"][metric], color=CLEAN_COLOR, linestyle="--", linewidth=1, label="clean")
        for ((protocol, attack), points), marker in zip(curves.items(), itertools.cycle(_MARKERS), strict=False):
            line = "-" if protocol == "paper" else ":"
            color = PAPER_COLOR if protocol == "paper" else ADAPTIVE_COLOR
            axes.plot(
                *zip(*sorted(set(points)), strict=True), line, marker=marker, color=color, label=f"{protocol}: {attack}"
            )
        worst = [(row["budget"], row["adaptive"]) for row in summary["worst_case"] if "adaptive" in row]
        radii = {row["budget"]: row["epsilon"] for row in summary["attacks"]}
        if worst:
            values = [cell[metric] for _, cell in worst]
            axes.errorbar(
                [radii[budget] for budget, _ in worst],
                values,
                yerr=np.abs(_ends([cell for _, cell in worst]) - values),
                color=ADAPTIVE_COLOR,
                marker="D",
                linewidth=2.2,
                capsize=3,
                label="adaptive: worst case",
            )
        axes.set_xscale("log")
        axes.set(xlabel="ε, share of the input range", ylabel=main.describe(), title=title)
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)
        return save_figure(figure, stem)


_MARKERS = "os^vPDX*<>"


def _is_check(row: Mapping[str, Any]) -> bool:
    """Whether an attack is there for the audit alone."""
    return row["protocol"] == "adaptive" and row["attack"] in ATTACKS and ATTACKS[row["attack"]].role == "check"


def _draw_noise(summary: Mapping[str, Any], stem: Path, title: str) -> list[Path]:
    main = main_metric(summary["task"])
    metric = main.name
    names = list(dict.fromkeys(row["corruption"] for row in summary["noise"]))
    columns = min(len(names), 4)
    lines = -(-len(names) // columns)
    with draw_figure(max(3.0 * columns, 4.2), 2.8 * lines) as figure:
        panels = figure.subplots(lines, columns, squeeze=False)
        for panel in panels.flat[len(names) :]:
            panel.axis("off")
        for panel, name in zip(panels.flat, names, strict=False):
            rows = [row for row in summary["noise"] if row["corruption"] == name]
            x = np.arange(len(rows))
            panel.fill_between(x, *_ends(rows), alpha=0.25, color=PAPER_COLOR)
            panel.plot(x, [row[metric] for row in rows], marker="o", color=PAPER_COLOR)
            panel.axhline(summary["clean"][metric], color=CLEAN_COLOR, linestyle="--", linewidth=1)
            panel.set_xticks(x, [f"{row['level']:g}" for row in rows])
            panel.set(title=name, xlabel=rows[0]["unit"], ylabel=main.describe())
        figure.suptitle(title, fontsize=9)
        return save_figure(figure, stem)


def _draw_uncertainty(record: Mapping[str, Any], outcomes: Outcomes, stem: Path) -> list[Path]:
    """Classes: reliability and risk–coverage. Numbers with a std: risk–coverage and the intervals' coverage."""
    summary, title = record["summary"], record["title"]
    parts = {"clean": "clean"}
    for row in summary["noise"]:  # the last level of each family
        parts[f"{row['corruption']} {row['level']:g}"] = f"noise/{row['corruption']}/{row['level']:g}/0"
    chosen = {"clean": "clean", **dict(list(parts.items())[-1:])}
    clean = outcomes["clean"]
    if summary["task"] == "regression" and "std" not in clean:
        return []
    with draw_figure(7.0, 3.1) as figure:
        left, right = figure.subplots(1, 2)
        for (label, part), color in zip(chosen.items(), (PAPER_COLOR, ADAPTIVE_COLOR), strict=False):
            outcome = outcomes[part]
            if summary["task"] == "classification":
                correct = outcome["predicted"] == outcome["target"]
                bins = reliability(outcome["confidence"], correct)
                enough = bins.examples >= 5
                left.plot(bins.confidence[enough], bins.accuracy[enough], marker="o", color=color, label=label)
                curve = risk_coverage(outcome["confidence"], 100.0 * ~correct)
            else:
                levels = list(range(10, 100, 10))
                numbers = read_numbers("draw_evaluation", outcome)
                covered = [compute_coverage(numbers, level) for level in levels]
                left.plot(levels, covered, marker="o", color=color, label=f"spread alone, {label}")
                curve = risk_coverage(-outcome["std"].mean(1), score_images(outcome))
            right.plot(100 * curve.coverage, curve.risk, color=color, label=label)
        top = 1 if summary["task"] == "classification" else 100
        left.plot([0, top], [0, top], color=CLEAN_COLOR, linestyle="--", linewidth=1)
        if summary["task"] == "classification":
            left.set(xlabel="confidence (bins of 5 and more)", ylabel="accuracy", title="reliability")
        else:
            asked, held = read_levels(record.get("calibration"))
            if asked:
                left.plot(asked, held, marker="D", color=CALIBRATED_COLOR, label="calibrated, clean")
            left.set(xlabel="asked for, %", ylabel="targets inside, %", title="what intervals hold")
        right.set(xlabel="coverage, %", ylabel="error, %" if top == 1 else "MAE", title="risk–coverage")
        left.legend(fontsize=7)
        figure.suptitle(title, fontsize=9)
        return save_figure(figure, stem)


def print_uncertainty(tables: Sequence[Sequence[Mapping[str, Any]]], names: Sequence[str], console: Console) -> None:
    """What several evaluations say about their own errors, condition by condition."""
    metric = find_main(tables[0][0]).name
    keys = [key for key in UNCERTAINTY if any(key in row for rows in tables for row in rows)]
    letters = [chr(ord("A") + k) for k in range(len(names))]
    title = "uncertainty, clean and under noise\n" + "\n".join(
        f"{letter} = {escape(name)}" for letter, name in zip(letters, names, strict=True)
    )
    heads = [_name_key(key, tables[0][0]) for key in keys]
    title += SPREAD * (heads != keys)
    table = Table("noise", "level", "", metric, *heads, title=title)
    for rows in zip(*tables, strict=True):
        for letter, row in zip(letters, rows, strict=True):
            for name, own in _by_target(row):
                shown = f"{letter} {escape(name)}".rstrip()
                table.add_row(*_name_noise(row), shown, _with_interval(own, metric), *_show(own, keys))
        table.add_section()
    console.print(table)


def print_comparison(rows: Sequence[Mapping[str, Any]], names: tuple[str, str], console: Console) -> None:
    """Two evaluations of the same examples, part by part; their names are A and B in the table."""
    title = f"A = {escape(names[0])}\nB = {escape(names[1])}\npaired, example by example"
    table = Table(Column("part", overflow="fold", min_width=24), "A", "B", "A − B", "95 % interval", "p", title=title)
    for row in rows:
        table.add_row(
            row["part"] + (f" ({row['draws']} draws)" if row["draws"] > 1 else ""),
            f"{row['a']:.2f}",
            f"{row['b']:.2f}",
            f"{row['difference']:+.2f}",
            "" if math.isnan(row["low"]) else f"[{row['low']:+.2f}, {row['high']:+.2f}]",
            "" if row["p_value"] is None else f"{row['p_value']:.3g}",
        )
    console.print(table)
    console.print(
        "Accuracy in %, of numbers the absolute error. all: for every example the worst of a protocol's attacks. p: "
        "McNemar's exact test, or a sign-flip test for numbers; not adjusted for the number of rows. One network each: "
        "other seeds may differ by more. Several draws of a noise have an interval only. Parts that one of the two "
        "lacks, or has with other settings, are left out.",
        highlight=False,
    )
