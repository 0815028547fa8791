"""The paper's claims, each with a verdict that the records of the full size give by a rule.

A claim is a statement, where the paper makes it, and one or more measures with 95 % intervals. No verdict is written by
hand: it follows from where the intervals lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from tensor_dropout_lab.evaluation.intervals import bootstrap_interval, difference_interval, seed_interval
from tensor_dropout_lab.experiments.synthetic.report import curves_of, formula_error
from tensor_dropout_lab.report.model import Claim, Measure
from tensor_dropout_lab.report.sections.ages import People, check_predictions, read_seeds
from tensor_dropout_lab.report.sections.noise import read_levels
from tensor_dropout_lab.report.sections.runs import FOLD, Runs, find_runs
from tensor_dropout_lab.report.sections.synthetic import read_stage


def judge_claims(base: Path | None) -> list[Claim]:
    """All claims, in the order of the paper.

    Args:
        base: the folder with results of the full size; None if there is none: then all are "not run".
    """
    return [judge(base) for judge in _JUDGES]


def _load(base: Path | None, experiment: str) -> dict[str, Runs]:
    """The rows of an experiment at full size that were run."""
    runs = {runs.recipe.name: runs for runs in find_runs(experiment, "paper", base)}
    return {name: rows for name, rows in runs.items() if rows.done()}


# Simulated data.


def _judge_equal_curves(base: Path | None) -> Claim:
    measures = []
    for experiment, name in (("synthetic-cp", "CP"), ("synthetic-tucker", "Tucker")):
        record = read_stage(experiment, "paper", base)[1]
        if record is None:
            continue
        for theta in (theta for theta in record["settings"]["thetas"] if theta < 1):
            exact, seeds = curves_of(record, "exact", theta), curves_of(record, "stochastic", theta)
            distances = 100 * (seeds - exact).mean(1) / exact.mean()
            low, high = seed_interval(distances) if len(distances) > 1 else (-np.inf, np.inf)
            measures.append(Measure(f"{name}, θ = {theta:g}", float(distances.mean()), low, high))
    return Claim(
        "Training on random masks minimizes a deterministic, regularized loss: the two curves are the same",
        "Figures 2 and 3",
        "synthetic-tucker",
        "mean distance of the two curves, % of the loss, 95 % intervals over mask seeds",
        measures,
        "Simulated data, learning rate 0.003, against the exact loss. “The same” means within 2 %, a margin chosen "
        "after these runs.",
        reference=2.0,
        side="within",
    )


def _judge_printed_formula(base: Path | None) -> Claim:
    measures = []
    for experiment, name in (("synthetic-cp", "CP"), ("synthetic-tucker", "Tucker")):
        record = read_stage(experiment, "paper", base)[1]
        if record:
            worst = 100 * max(formula_error(record, theta) for theta in record["settings"]["thetas"])
            measures.append(Measure(name, worst, worst, worst))
    return Claim(
        "That loss is the formula printed in the theorem",
        "Theorems on CP and Tucker",
        "synthetic-tucker",
        "largest error of the printed formula along the run, % of the exact loss",
        measures,
        "Simulated white inputs. The claim counts as right where the error stays below 1 %.",
        reference=1.0,
        side="below",
    )


# Classification.


def _accuracies(runs: Runs) -> list[float]:
    return [score["accuracy"] for score in runs.scores()]


def _compare_accuracies(base: Path | None, experiment: str, pairs: Sequence[tuple[str, str, str]]) -> list[Measure]:
    """The differences of rows to other rows, where there are three runs or more in all."""
    rows, measures = _load(base, experiment), []
    for label, name, other in pairs:
        if name not in rows or other not in rows:
            continue
        ours, theirs = _accuracies(rows[name]), _accuracies(rows[other])
        if len(ours) + len(theirs) < 3:
            continue
        low, high = difference_interval(ours, theirs)
        printed = [rows[row].recipe.printed["accuracy"] for row in (name, other) if rows[row].recipe.printed]
        paper = printed[0] - printed[1] if len(printed) == 2 else None
        measures.append(Measure(label, fmean(ours) - fmean(theirs), low, high, paper))
    return measures


def _judge_imagenet(base: Path | None) -> Claim:
    pairs = [(f"θ = {theta} to ResNet", f"theta-{theta}", "fc") for theta in (0.9, 0.8, 0.7, 0.6)]
    return Claim(
        "Randomized tensor regression classifies ImageNet better than a fully connected head",
        "Table 1",
        "imagenet",
        "points of top-1 accuracy",
        _compare_accuracies(base, "imagenet", pairs),
    )


def _judge_imagenet_attacks(base: Path | None) -> Claim:
    pairs = [(f"θ = {theta}", f"theta-{theta}", "fc") for theta in (0.8, 0.7, 0.6)]
    return Claim(
        "It makes an ImageNet network far more robust to attacks",
        "Table 2, Figure 4",
        "imagenet-attacks",
        "points of accuracy left by attacks that adapt, 2/255",
        _compare_attacked(base, "imagenet-attacks", pairs, _left_adaptive),
    )


def _judge_cifar(base: Path | None) -> Claim:
    heads = [("randomized Tucker", "rtrl-tucker", "fc"), ("randomized CP", "rtrl-cp", "fc")]
    tuned = _compare_accuracies(base, "beyond-best", heads)
    note = "By the printed recipe, in which FC was not tuned."
    if tuned:
        note += " With eight trials for every head: " + "; ".join(measure.show() for measure in tuned) + "."
    return Claim(
        "It classifies CIFAR-100 better than a fully connected head",
        "Table 4",
        "cifar100",
        "points of accuracy above FC",
        _compare_accuracies(base, "cifar100", heads),
        note,
    )


def _judge_dropout(base: Path | None) -> Claim:
    return Claim(
        "Tensor dropout makes the same tensor head better",
        "Table 4",
        "cifar100",
        "points of accuracy above the head without it",
        _compare_accuracies(base, "cifar100", [("Tucker", "rtrl-tucker", "trl-tucker"), ("CP", "rtrl-cp", "trl-cp")]),
        "The heads without tensor dropout have one seed.",
    )


# Attacks.


def _left_adaptive(runs: Runs) -> list[float]:
    """What the adaptive ensemble leaves at 2/255, of each network."""
    worst = [row for summary in runs.summaries() for row in summary["worst_case"] if row["budget"] == "2/255"]
    return [row["adaptive"]["accuracy"] for row in worst if "adaptive" in row]


def _left_fgsm(runs: Runs) -> list[float]:
    """What FGSM leaves at 8/255, of each network."""
    wanted = ("paper", "fgsm", "8/255")
    rows = [row for summary in runs.summaries() for row in summary["attacks"]]
    return [row["accuracy"] for row in rows if (row["protocol"], row["attack"], row["budget"]) == wanted]


def _compare_attacked(
    base: Path | None, experiment: str, pairs: Sequence[tuple[str, str, str]], left: Callable[[Runs], list[float]]
) -> list[Measure]:
    rows, measures = _load(base, experiment), []
    for label, name, other in pairs:
        ours, theirs = (left(rows[row]) if row in rows else [] for row in (name, other))
        if ours and theirs and len(ours) + len(theirs) >= 3:
            low, high = difference_interval(ours, theirs)
            measures.append(Measure(label, fmean(ours) - fmean(theirs), low, high))
    return measures


def _judge_attacks(base: Path | None) -> Claim:
    heads = [("randomized Tucker", "rtrl-tucker", "fc"), ("randomized CP", "rtrl-cp", "fc")]
    first = _compare_attacked(base, "cifar100", heads, _left_fgsm)
    note = ""
    if first:
        note = (
            "Under the paper's first attack alone (FGSM, 8/255) it looks so: "
            + "; ".join(measure.show() for measure in first)
            + "."
        )
    return Claim(
        "It makes the network significantly more robust to attacks, without training on them",
        "Contributions, Figure 6",
        "cifar100",
        "points of accuracy above FC that attacks which adapt leave, 2/255",
        _compare_attacked(base, "cifar100", heads, _left_adaptive),
        note,
    )


def _judge_weight_dropout(base: Path | None) -> Claim:
    rows, measures, note = _load(base, "cifar100-attacks"), [], "One network for each θ, 1,000 test images."
    if {"tucker", "weight-dropout"} <= rows.keys():
        ours, theirs = rows["tucker"].points(), rows["weight-dropout"].points()
        for point in ours:
            scores = [_left_adaptive(points[point])[:1] for points in (ours, theirs) if point in points]
            images = [summary["examples"] for summary in ours[point].summaries()]
            if len(scores) == 2 and all(scores) and images:
                (a,), (b,) = scores
                half = 1.96 * ((a * (100 - a) + b * (100 - b)) / images[0]) ** 0.5
                measures.append(Measure(point, a - b, a - b - half, a - b + half))
        note += _describe_missing(rows["tucker"], rows["weight-dropout"])
    return Claim(
        "Tensor dropout is far more robust than plain dropout on the weight",
        "Figure 6",
        "cifar100-attacks",
        "points of accuracy above dropout on the weight that attacks which adapt leave, 2/255, intervals over images",
        measures,
        note,
    )


def _describe_missing(*rows: Runs) -> str:
    """What must be said of runs that no verdict counts."""
    states = [record.state for runs in rows for _, record in runs.records if record.state != "done"]
    counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(states)]
    return f" Left out: {', '.join(counts)}." if counts else ""


def _judge_surface(base: Path | None) -> Claim:
    measures, note = [], "The claim counts as right for more than half of the grid. One run of 16 epochs at each point."
    for name, runs in _load(base, "cifar100-surface").items():
        states = {record.state for _, record in runs.records}
        if name in ("bernoulli", "replacement") and states <= {"done", "failed"}:  # no verdict from half a grid
            scores = _accuracies(runs)
            near = 100 * sum(score > max(scores) - 1 for score in scores) / len(runs.records)
            failed = len(runs.records) - len(scores)
            measures.append(Measure(f"{runs.recipe.row}, {failed} of {len(runs.records)} failed", near, near, near))
    return Claim(
        "Accuracy stays the same over a large region of compression ratio and θ",
        "Figure 7",
        "cifar100-surface",
        "share of the grid within one point of its best, %",
        measures,
        note,
        reference=50.0,
    )


# Brain age.


def _judge_ages(base: Path | None) -> Claim:
    rows, measures = _load(base, "mri"), []
    rows = {name: check_predictions(runs) for name, runs in rows.items()}
    reference = read_seeds(rows["fc"]) if "fc" in rows else []
    for label, name in (("randomized Tucker", "rtrl-tucker"), ("randomized CP", "rtrl-cp")):
        people = read_seeds(rows[name]) if name in rows and reference else []
        if people:
            pairs = [(_sort(a), _sort(b)) for a, b in zip(reference, people, strict=False)]
            gained = [a.error - b.error for a, b in pairs if np.array_equal(a.name, b.name)]
            low, high = bootstrap_interval(np.stack(gained))
            printed = rows["fc"].recipe.printed["mae"] - rows[name].recipe.printed["mae"]
            measures.append(Measure(label, float(np.mean(gained)), low, high, printed))
    return Claim(
        "It predicts brain age far better than a fully connected head",
        "Table 3",
        "mri",
        "years of mean absolute error less than FC",
        measures,
        "145 adults of IXI, not the 19,100 people of UK Biobank; the training of every head was tuned alike. Two "
        "seeds: the bootstrap over people and seeds sees little of the spread between trainings.",
    )


def _sort(people: People) -> People:
    """By name, so that two heads are compared person by person."""
    order = np.argsort(people.name)
    return People(people.name[order], people.fold[order], people.target[order], people.predicted[order])


def _judge_noise(base: Path | None) -> Claim:
    rows, measures = _load(base, "mri-noise"), []
    for label, name in (("randomized Tucker", "rtrl-tucker"), ("randomized CP", "rtrl-cp")):
        if {name, "fc"} <= rows.keys():
            ours, theirs = _noisy_errors(rows[name]), _noisy_errors(rows["fc"])
            folds = [math.log(ours[fold] / theirs[fold]) for fold in sorted(ours.keys() & theirs.keys())]
            if len(folds) > 1:
                low, high = seed_interval(folds)
                measures.append(Measure(label, math.exp(fmean(folds)), math.exp(low), math.exp(high)))
    return Claim(
        "It is significantly more robust to noise in the scans",
        "Figure 5",
        "mri-noise",
        "error in shares of FC's, under white Gaussian noise with an SNR below 10, 95 % intervals over five folds",
        measures,
        "Each fold chose how it is trained, augmentation included, so heads and ways of training are mixed.",
        reference=1.0,
        side="below",
    )


def _noisy_errors(runs: Runs) -> dict[int, float]:
    """The mean error of each fold over the levels of white noise below an SNR of 10."""
    folds: dict[int, list[float]] = {}
    for cell, record in runs.records:
        levels = read_levels(record, "gaussian")
        folds.setdefault(cell.point[FOLD], []).extend(error for level, error in levels.items() if level < 10)
    return {fold: fmean(errors) for fold, errors in folds.items() if errors}


_JUDGES: Iterable[Callable[[Path | None], Claim]] = (
    _judge_equal_curves,
    _judge_printed_formula,
    _judge_imagenet,
    _judge_imagenet_attacks,
    _judge_ages,
    _judge_noise,
    _judge_cifar,
    _judge_dropout,
    _judge_attacks,
    _judge_weight_dropout,
    _judge_surface,
)
