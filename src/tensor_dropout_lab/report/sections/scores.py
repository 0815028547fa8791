"""Tables of one number per run; where the networks were attacked too, what was left of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from tensor_dropout.metrics.registry import find_metric
from tensor_dropout_lab.evaluation.intervals import difference_interval
from tensor_dropout_lab.experiments.recipes import describe_experiment
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.attacks import ABOUT, add_curves, list_verdicts, tabulate_attacks
from tensor_dropout_lab.report.sections.noise import NOISES, draw_levels, tabulate_noise
from tensor_dropout_lab.report.sections.runs import (
    SIZES,
    Bases,
    Runs,
    find_runs,
    label_of,
    open_section,
    show_difference,
    show_score,
)

_NOTE = (
    "Several seeds: mean ± half of the 95 % interval (Student's t), and the number of seeds in brackets; of two, both. "
    "One seed: the 95 % interval over test images (Wilson), for accuracies. Miniatures are of other data: compare "
    "their rows with each other, never with the paper's."
)


def build_scores(
    experiment: str,
    bases: Bases,
    figures: Path,
    show: Callable[[Runs, str], Cell] = show_score,
    note: str = _NOTE,
) -> Section:
    """The paper's number, ours, and the miniature's, a row for each recipe; then what else these runs say.

    Args:
        experiment: its name.
        bases: preset -> the folder of its results.
        figures: the folder for its pictures.
        show: the number of the runs of a row, for a metric.
        note: how its intervals were made.
    """
    said = describe_experiment(experiment)
    sizes = {preset: find_runs(experiment, bases, preset) for preset in SIZES}
    printed_any = any(runs.recipe.printed for runs in sizes["paper"])
    sources = [*(["paper"] if printed_any else []), *SIZES.values()]
    heads = [find_metric(metric).head("years") for metric in said["metrics"]]
    columns = ["", *(f"{head}, {source}" for head in heads for source in sources)]
    miniatures = {runs.recipe.name: runs for runs in sizes["quick"]}
    rows = []
    for runs in sizes["paper"]:
        row = [Cell(runs.recipe.row)]
        for metric in said["metrics"]:
            printed = runs.recipe.printed.get(metric)
            if printed_any:
                row.append(Cell("") if printed is None else Cell(f"{printed:g}", "paper"))
            small = miniatures.get(runs.recipe.name)
            row += [show(runs, metric), Cell("") if small is None else show(small, metric)]
        rows.append(row)
    tables, pictures, verdicts = [Table(said["title"], columns, rows, note)], [], []
    attacked = [preset for preset in SIZES if any(_is_attacked(runs) for runs in sizes[preset])]
    for preset in SIZES if said["metrics"] == ["accuracy"] else attacked:
        own, size, label = sizes[preset], SIZES[preset], label_of(experiment, preset)
        networks = {runs.recipe.row: runs for runs in own}
        tables.append(_tabulate_sizes(own, f"Difference to FC, size and calibration, {size}", label))
        if preset in attacked:
            tables.append(tabulate_attacks(networks, f"Accuracy in % under attack, {size}", label))
        if any("gaussian" in runs.recipe.settings.get("evaluation", {}).get("noise", []) for runs in own):
            table, curves = tabulate_noise(networks, f"Accuracy in % under white Gaussian noise, {size}", label)
            tables.append(table)
            if preset not in attacked:
                pictures += draw_levels({NOISES["gaussian"]: curves}, experiment, preset, figures)
        if preset not in attacked:
            continue
        verdicts += list_verdicts(networks, size)
        if any(runs.done() for runs in own):
            stem = figures / f"{experiment}-{preset}"
            bars = [_summarize_row(runs) for runs in own if runs.summaries()]
            drawings.draw_heads(bars, stem, f"{said['title']}, {size}")
            pictures.append(Figure(stem.with_suffix(".svg"), drawings.describe_heads(bars), _CAPTION, label))
            pictures += add_curves({"": networks}, f"{experiment}-fgsm-{preset}", experiment, preset, figures)
    notes = [ABOUT] if attacked else []
    return open_section(experiment, bases, tables=tables, figures=pictures, verdicts=verdicts, notes=notes)


def _is_attacked(runs: Runs) -> bool:
    evaluation = runs.recipe.settings.get("evaluation")
    return evaluation is not None and evaluation.get("protocol") != "none"


_CAPTION = (
    "Left: test accuracy, the paper's (hollow) and ours (filled, 95 % intervals). Right: what the paper's first attack "
    "leaves at 8/255, and what the adaptive ensemble leaves at a quarter of that radius and at the same."
)


_PLAIN = {"fc-dropout": "fc", "rtrl-tucker": "trl-tucker", "rtrl-cp": "trl-cp"}
"""A recipe with dropout -> the one without."""


def _tabulate_sizes(own: list[Runs], caption: str, label: str) -> Table:
    columns = [
        "",
        "accuracy, difference to FC",
        "to the head without dropout",
        "parameters of the network",
        "compression ratio of the head",
        "NLL",
        "ECE, %",
        "minutes of a run",
    ]
    rows = []
    named = {runs.recipe.name: runs for runs in own}
    for runs in own:
        broken = runs.broken()
        if broken is not None:
            rows.append([Cell(runs.recipe.row), *([broken] * (len(columns) - 1))])
            continue
        results = runs.results()
        calibration = [show_score(runs, name) for name in ("nll", "ece")]
        differences = [_compare(runs, named.get("fc")), _compare(runs, named.get(_PLAIN.get(runs.recipe.name, "")))]
        if not results:  # another row's networks, asked in another way
            rows.append([Cell(runs.recipe.row), *differences, Cell(""), Cell(""), *calibration, Cell("")])
            continue
        ratio = results[0]["compression_ratio"]
        rows.append(
            [
                Cell(runs.recipe.row),
                *differences,
                Cell(f"{results[0]['parameters']:,}", "ours"),
                Cell("" if ratio is None else f"{ratio:.1f}", "text" if ratio is None else "ours"),
                *calibration,
                Cell(f"{sum(each['seconds'] for each in results) / len(results) / 60:.1f}", "ours"),
            ]
        )
    note = (
        "Difference: points, with its 95 % interval over seeds (Student's t, one variance for both rows). NLL and ECE "
        "(15 equal bins) on the test images. Minutes: training alone, beside other runs on the same machine."
    )
    return Table(caption, columns, rows, note, label)


def _compare(runs: Runs, baseline: Runs | None) -> Cell:
    """The difference of a row's accuracy to that of another."""
    if baseline is None or runs is baseline:
        return Cell("")
    own, other = ([score["accuracy"] for score in each.scores()] for each in (runs, baseline))
    if not other or len(own) + len(other) < 3:
        return Cell("")
    seeds = f"{len(own)} and {len(other)} seeds"
    return show_difference(fmean(own) - fmean(other), difference_interval(own, other), seeds)


def _summarize_row(runs: Runs) -> drawings.Head:
    """What the picture of a table shows of a row."""
    accuracies = [score["accuracy"] for score in runs.scores()]
    summaries = runs.summaries()
    fgsm = [
        row["accuracy"]
        for summary in summaries
        for row in summary["attacks"]
        if (row["protocol"], row["attack"], row["budget"]) == ("paper", "fgsm", "8/255")
    ]
    worst = [{row["budget"]: row["adaptive"]["accuracy"] for row in summary["worst_case"]} for summary in summaries]

    return drawings.Head(
        runs.recipe.row,
        runs.recipe.printed.get("accuracy"),
        accuracies,
        {
            "FGSM, 8/255": fmean(fgsm),
            "adaptive, 2/255": fmean(each["2/255"] for each in worst),
            "adaptive, 8/255": fmean(each["8/255"] for each in worst),
        },
    )
