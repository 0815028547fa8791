"""The paper's claims, each with a verdict that the records of the full size give by a rule.

A claim is a statement, where the paper makes it, and one or more measures with 95 % intervals. No verdict is written by
hand: it follows from where the intervals lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

import numpy as np

from tensor_dropout_lab.evaluation.intervals import bootstrap_interval, difference_interval, seed_interval
from tensor_dropout_lab.experiments.synthetic.report import curves_of, formula_error, gap
from tensor_dropout_lab.report.model import Claim, Measure
from tensor_dropout_lab.report.sections.ages import read_seeds
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
            mean, spread, _ = (100 * part / curves_of(record, "exact", theta).mean() for part in gap(record, theta))
            measures.append(Measure(f"{name}, θ = {theta:g}", mean, mean - 2 * spread, mean + 2 * spread))
    return Claim(
        "Training on random masks minimizes a deterministic, regularized loss: the two curves are the same",
        "Figures 2 and 3",
        "synthetic-tucker",
        "mean distance of the two curves, % of the loss; ± two standard deviations over mask seeds",
        measures,
        "Simulated data, learning rate 0.003. Measured against the exact loss, not the printed one.",
        side="at",
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
    rows = _load(base, "cifar100-attacks")
    measures = []
    if {"tucker", "weight-dropout"} <= rows.keys():
        ours, theirs = rows["tucker"].points(), rows["weight-dropout"].points()
        for left, attack in ((_left_fgsm, "FGSM, 8/255"), (_left_adaptive, "adaptive, 2/255")):
            shared = [(left(ours[point]), left(theirs[point])) for point in ours if point in theirs]
            differences = [a[0] - b[0] for a, b in shared if a and b]
            if len(differences) > 1:
                low, high = seed_interval(differences)
                measures.append(Measure(attack, fmean(differences), low, high))
    return Claim(
        "Tensor dropout is far more robust than plain dropout on the weight",
        "Figure 6",
        "cifar100-attacks",
        "points of accuracy above dropout on the weight; interval over the values of θ",
        measures,
        "One network for each θ.",
    )


def _judge_surface(base: Path | None) -> Claim:
    measures = []
    for name, runs in _load(base, "cifar100-surface").items():
        if name in ("bernoulli", "replacement"):
            scores = _accuracies(runs)
            near = 100 * sum(score > max(scores) - 1 for score in scores) / len(runs.records)
            label = f"{runs.recipe.row}, {len(runs.records) - len(scores)} of {len(runs.records)} not finite"
            measures.append(Measure(label, near, near, near))
    return Claim(
        "Accuracy stays the same over a large region of compression ratio and θ",
        "Figure 7",
        "cifar100-surface",
        "share of the grid within one point of its best, %",
        measures,
        "The claim counts as right for more than half of the grid. One run of 16 epochs at each point.",
        reference=50.0,
    )


# Brain age.


def _judge_ages(base: Path | None) -> Claim:
    rows, measures = _load(base, "mri"), []
    reference = read_seeds(rows["fc"]) if "fc" in rows else []
    for label, name in (("randomized Tucker", "rtrl-tucker"), ("randomized CP", "rtrl-cp")):
        people = read_seeds(rows[name]) if name in rows and reference else []
        if people:
            gained = [
                a.error[np.argsort(a.name)] - b.error[np.argsort(b.name)]
                for a, b in zip(reference, people, strict=False)
            ]
            low, high = bootstrap_interval(np.stack(gained))
            printed = rows["fc"].recipe.printed["mae"] - rows[name].recipe.printed["mae"]
            measures.append(Measure(label, float(np.mean(gained)), low, high, printed))
    return Claim(
        "It predicts brain age far better than a fully connected head",
        "Table 3",
        "mri",
        "years of mean absolute error less than FC",
        measures,
        "145 adults of IXI, not the 19,100 people of UK Biobank; the training of every head was tuned alike.",
    )


def _judge_noise(base: Path | None) -> Claim:
    rows, measures = _load(base, "mri-noise"), []
    for label, name in (("randomized Tucker", "rtrl-tucker"), ("randomized CP", "rtrl-cp")):
        if {name, "fc"} <= rows.keys():
            ours, theirs = _noisy_errors(rows[name]), _noisy_errors(rows["fc"])
            folds = [theirs[fold] - ours[fold] for fold in sorted(ours.keys() & theirs.keys())]
            if len(folds) > 1:
                low, high = seed_interval(folds)
                measures.append(Measure(label, fmean(folds), low, high))
    return Claim(
        "It is significantly more robust to noise in the scans",
        "Figure 5",
        "mri-noise",
        "years of mean absolute error less than FC under white Gaussian noise, mean over SNR below 10",
        measures,
        "Intervals over five folds. Each fold chose how it is trained, augmentation included, so heads and ways of "
        "training are mixed.",
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
