"""Evaluations of the same examples beside each other, from stored outcomes alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.detection import detect
from tensor_dropout.metrics.measures import score_images
from tensor_dropout.robustness.attacks import ensemble
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout.robustness.protocol import PAPER
from tensor_dropout.robustness.summary import describe_uncertainty, worst_outcome
from tensor_dropout_lab.evaluation.intervals import bootstrap_interval, compare, metric_interval


def compare_outcomes(first: Outcomes, second: Outcomes) -> list[dict[str, Any]]:
    """The difference, its interval and its p-value for every part that both have, with the same settings.

    Args:
        first: outcomes of one network.
        second: of another, on the same examples.

    Raises:
        TensorDropoutError: if the examples differ, or no part is shared.
    """
    if not np.array_equal(first.examples["name"], second.examples["name"]):
        raise TensorDropoutError(
            "compare: the two evaluations are not of the same examples; evaluate both with the same --images, --split "
            "and --seed, of runs with the same data options"
        )
    shared = [
        name
        for name in first.names()
        if name in second
        and name not in ("gradients", "validation", "unknown")
        and _setting(first, name) == _setting(second, name)
    ]
    if not shared:
        raise TensorDropoutError("compare: the two evaluations share no part; evaluate both with the same options")
    draws: dict[str, list[str]] = {}
    for name in shared:
        draws.setdefault(name.rpartition("/")[0] if name.startswith("noise/") else name, []).append(name)
    rows = [_compare_draws(part, first, second, names) for part, names in draws.items()]
    return rows + _compare_worst(first, second, shared)


def _compare_worst(first: Outcomes, second: Outcomes, shared: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each protocol and radius: for every example the worst of the attacks that both were shown."""
    attacks = [name for name in shared if name.startswith(("paper/", "adaptive/"))]
    rows = []
    for budget in dict.fromkeys(name.split("/", 2)[2] for name in attacks):
        task = "classification" if "predicted" in first[attacks[0]] else "regression"
        paper = [f"paper/{name}/{budget}" for name in PAPER]
        for protocol, names in (("paper", paper), ("adaptive", ensemble(task, budget))):
            own = [name for name in names if name in attacks]
            if len(own) > 1:
                a, b = (worst_outcome([each[name] for name in own], task) for each in (first, second))
                means = {"a": float(score_images(a).mean()), "b": float(score_images(b).mean())}
                rows.append({"part": f"{protocol}/all/{budget}", "draws": 1, **means, **compare(a, b)._asdict()})
    return rows


def _setting(outcomes: Outcomes, part: str) -> dict[str, Any]:
    """What must be equal for two parts to be compared; how a network's randomness was met may differ."""
    free = ("seconds", "eot", "standing", "parameters")
    return {key: value for key, value in outcomes.settings(part).items() if key not in free}


def _compare_draws(part: str, first: Outcomes, second: Outcomes, names: list[str]) -> dict[str, Any]:
    """One row; several draws of a noise are resampled together with the examples, and have no p-value."""
    a, b = (np.stack([score_images(outcomes[name]) for name in names]) for outcomes in (first, second))  # (draws, N)
    row: dict[str, Any] = {"part": part, "draws": len(names), "a": float(a.mean()), "b": float(b.mean())}
    if len(names) == 1:
        return row | compare(first[names[0]], second[names[0]])._asdict()
    low, high = bootstrap_interval(a - b)
    return row | {"difference": float((a - b).mean()), "low": low, "high": high, "p_value": None}


def tabulate_detection(evaluations: Sequence[Outcomes]) -> list[dict[str, Any]] | None:
    """How well each evaluation tells unknown classes from known ones; None unless all were shown some."""
    if not all("unknown" in outcomes for outcomes in evaluations):
        return None
    return [detect(outcomes["clean"], outcomes["unknown"]) for outcomes in evaluations]


def tabulate_uncertainty(evaluations: Sequence[Outcomes]) -> list[list[dict[str, Any]]]:
    """Clean and under noise, what each evaluation says about its own errors: one list of rows per evaluation.

    Only conditions that all of them have.
    """
    tables = [describe_uncertainty(outcomes, metric_interval) for outcomes in evaluations]
    shared = [key for key in tables[0] if all(key in table for table in tables)]
    return [[table[key] for key in shared] for table in tables]
