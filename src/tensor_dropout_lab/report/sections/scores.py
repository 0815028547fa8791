"""Tables of one number per run; where the networks were attacked too, what was left of them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

from tensor_dropout.metrics.registry import find_metric
from tensor_dropout_lab.evaluation.intervals import difference_interval
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, Table
from tensor_dropout_lab.report.sections.attacks import ABOUT, draw_fgsm, list_verdicts, tabulate_attacks
from tensor_dropout_lab.report.sections.noise import NOISES, draw_levels, tabulate_noise
from tensor_dropout_lab.report.sections.runs import (
    Part,
    Runs,
    show_difference,
    show_score,
)

_NOTE = (
    "Several seeds: mean ± half of the 95 % interval (Student's t), and the number of seeds in brackets; of two, both. "
    "One seed: the 95 % interval over test images (Wilson), for accuracies. Miniatures are of other data: compare "
    "their rows with each other, never with the paper's."
)


def build_scores(
    part: Part,
    show: Callable[[Runs, str], Cell] = show_score,
    note: str = _NOTE,
) -> Section:
    """Ours, at full size beside the paper's, a row for each recipe; then what else these runs say.

    Args:
        part: the experiment.
        show: the number of the runs of a row, for a metric.
        note: how its intervals were made.
    """
    recipes, metrics = part.runs(), part.description["metrics"]
    with_printed = part.preset == "paper" and any(runs.recipe.printed for runs in recipes)
    heads = [find_metric(metric).head("years") for metric in metrics]
    columns = ["", *(f"{head}, {source}" for head in heads for source in ["paper"] * with_printed + ["ours"])]
    rows = []
    for runs in recipes:
        row = [Cell(runs.recipe.row)]
        for metric in metrics:
            if with_printed:
                printed = runs.recipe.printed.get(metric)
                row.append(Cell("") if printed is None else Cell(f"{printed:g}", "paper"))
            row.append(show(runs, metric))
        rows.append(row)
    tables, pictures, verdicts = [Table(part.description["title"], columns, rows, note)], [], []
    networks = {runs.recipe.row: runs for runs in recipes}
    attacked = any(_is_attacked(runs) for runs in recipes)
    if attacked or metrics == ["accuracy"]:
        tables.append(_tabulate_sizes(recipes))
    if attacked:
        tables.append(tabulate_attacks(networks, "Accuracy in % under attack"))
        verdicts = list_verdicts(networks)
    noisy = any("gaussian" in runs.recipe.settings.get("evaluation", {}).get("noise", []) for runs in recipes)
    if noisy and (attacked or metrics == ["accuracy"]):
        table, curves = tabulate_noise(networks, "Accuracy in % under white Gaussian noise")
        tables.append(table)
        pictures += [] if attacked else draw_levels(part, {NOISES["gaussian"]: curves})
    if attacked and any(runs.done() for runs in recipes):
        bars = [_summarize_row(runs) for runs in recipes if runs.summaries()]
        drawings.draw_heads(bars, part.stem(), part.title)
        pictures.append(Figure(part.stem().with_suffix(".svg"), drawings.describe_heads(bars), _CAPTION))
        pictures += draw_fgsm(part, {"": networks}, "fgsm")
    return part.section(tables=tables, figures=pictures, verdicts=verdicts, notes=[ABOUT] if attacked else [])


def _is_attacked(runs: Runs) -> bool:
    evaluation = runs.recipe.settings.get("evaluation")
    return evaluation is not None and evaluation.get("protocol") != "none"


_CAPTION = (
    "Left: test accuracy, the paper's (hollow) and ours (filled, 95 % intervals). Right: what the paper's first attack "
    "leaves at 8/255, and what the adaptive ensemble leaves at a quarter of that radius and at the same."
)


_PLAIN = {"fc-dropout": "fc", "rtrl-tucker": "trl-tucker", "rtrl-cp": "trl-cp"}
"""A recipe with dropout -> the one without."""


def _tabulate_sizes(own: list[Runs]) -> Table:
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
    return Table("Difference to FC, size and calibration", columns, rows, note)


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
