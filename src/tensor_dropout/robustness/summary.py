"""From the outcomes of single examples to the numbers of a record: accuracies, uncertainty, worst cases, verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tensor_dropout.metrics.detection import detect
from tensor_dropout.metrics.measures import score_images, split_targets, widen
from tensor_dropout.metrics.registry import main_metric, summarize
from tensor_dropout.robustness.attacks import ensemble
from tensor_dropout.robustness.audit import Audit, Evidence, audit
from tensor_dropout.robustness.noise import CORRUPTIONS
from tensor_dropout.robustness.outcomes import Arrays, Outcomes
from tensor_dropout.robustness.protocol import PAPER

Interval = Callable[..., tuple[float, float]]
"""From outcomes that differ in their draws to the ends of an interval for the main metric."""

WIDENED = ("nll", "coverage_50", "coverage_80", "coverage_90", "coverage_95", "width_95")
"""What a regression's residual variance changes."""


def summarize_evaluation(
    outcomes: Outcomes,
    planned: Sequence[str],
    task: str,
    budgets: Sequence[str],
    main: str,
    *,
    norm: str = "linf",
    declared_random: bool = False,
    randomized: bool = False,
    targets: Sequence[str] = (),
    interval: Interval | None = None,
) -> dict[str, Any]:
    """Everything that is reported, from stored outcomes alone.

    Args:
        outcomes: the parts that are done.
        planned: the parts that were asked for; others in the file are left out.
        task: "classification" or "regression".
        budgets: the labels of the radii, from small to large.
        main: the label that the verdict is about.
        norm: of the adaptive protocol; the paper's is linf, and only beside an adaptive one of linf.
        declared_random: whether the prediction mode says that the network is random.
        randomized: whether it is.
        targets: the names of a regression's targets; without them they are numbered from 0 on.
        interval: adds ``low`` and ``high``, the ends of an interval, to every main metric; None: without.

    Returns:
        ``clean``, ``attacks``, ``worst_case``, ``noise``; where they were asked for also ``audit`` (of the adaptive
        protocol), ``unknown`` (inputs of unknown classes) and ``heads`` (of smaller sizes). Clean and under noise,
        several targets of a regression stand one by one in ``targets``, each in its own unit, beside their mean.
    """
    record: dict[str, Any] = {
        "task": task,
        "examples": len(outcomes.examples["target"]),
        "clean": _measure(outcomes, ["clean"], targets, interval),
        "attacks": [
            _describe_attack(outcomes, name, task, interval)
            for name in planned
            if name.startswith(("paper/", "adaptive/"))
        ],
        "worst_case": [
            row for budget in budgets if (row := _worst_case(outcomes, planned, task, budget, norm, interval))
        ],
        "noise": _describe_noise(outcomes, [name for name in planned if name.startswith("noise/")], targets, interval),
    }
    if "unknown" in planned:
        signals = detect(outcomes["clean"], outcomes["unknown"])
        record["unknown"] = {"examples": len(outcomes["unknown"]["target"]), "signals": signals}
    if heads := [name for name in planned if name.startswith("head/")]:
        record["heads"] = [
            {
                **_pick(outcomes.settings(name), ("kind", "size", "parameters")),
                **_measure_attack(outcomes[name], task, interval),
            }
            for name in heads
        ]
    if "gradients" in planned:
        found = make_audit(outcomes, planned, task, budgets, main, norm, declared_random, randomized)
        record["audit"] = found.as_record()
    return record


def _pick(settings: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: settings[key] for key in keys}


def make_audit(
    outcomes: Outcomes,
    planned: Sequence[str],
    task: str,
    budgets: Sequence[str],
    main: str,
    norm: str,
    declared_random: bool,
    randomized: bool,
) -> Audit:
    """The audit of stored outcomes."""
    beside = norm == "linf"
    others = ("validation", "unknown", "head/", *(() if beside else ("paper/",)))
    kept = [name for name in planned if not name.startswith(others)]
    parts = {name: outcomes[name] for name in kept}
    return audit(Evidence(task, parts, tuple(budgets), main, declared_random, randomized))


def describe_uncertainty(outcomes: Outcomes, interval: Interval | None = None) -> dict[str, dict[str, Any]]:
    """Clean and under every noise: metric, likelihood, calibration; by condition, such as "gaussian 4 SNR".

    A noise of which the decisions alone were kept is left out.
    """
    clean = {"corruption": "none", "level": None, "unit": "", **_measure(outcomes, ["clean"], (), interval)}
    known = [name for name in outcomes.names("noise/") if {"nll", "output"} & outcomes[name].keys()]
    rows = [clean, *_describe_noise(outcomes, known, (), interval)]
    return {" ".join(str(row[key]) for key in ("corruption", "level", "unit")): row for row in rows}


def _measure(outcomes: Outcomes, names: list[str], targets: Sequence[str], interval: Interval | None) -> dict[str, Any]:
    """The metrics averaged over parts that differ in their draws, and the main one's interval."""
    found = [outcomes[name] for name in names]
    extra = outcomes["validation"]["extra_variance"] if "validation" in outcomes else None
    measured: dict[str, Any] = {**_measure_draws(found, extra, interval), "draws": len(names)}
    if "output" in found[0] and len(columns := list(zip(*map(split_targets, found), strict=True))) > 1:
        known = targets if len(targets) == len(columns) else [str(t) for t in range(len(columns))]
        extras = [None] * len(columns) if extra is None else np.broadcast_to(extra, len(columns))
        measured["targets"] = {
            name: _measure_draws(column, own, interval)
            for name, column, own in zip(known, columns, extras, strict=True)
        }
    return measured


def _measure_draws(found: Sequence[Arrays], extra: Any, interval: Interval | None) -> dict[str, float | None]:
    numbers = [summarize(outcome) for outcome in found]
    mean = {key: float(np.mean([each[key] for each in numbers])) for key in numbers[0]}
    measured: dict[str, float | None] = {**mean, **_find_ends(interval, *found)}
    if extra is not None and "std" in found[0]:
        wide = [summarize(widen(outcome, extra)) for outcome in found]
        measured |= {f"{key}_widened": float(np.mean([each[key] for each in wide])) for key in WIDENED}
    return {key: value if value is not None and math.isfinite(value) else None for key, value in measured.items()}


def _find_ends(interval: Interval | None, *found: Arrays) -> dict[str, float | None]:
    """The interval of the main metric; None of a single number, which has none."""
    if interval is None:
        return {}
    ends = zip(("low", "high"), interval(*found), strict=True)
    return {name: end if math.isfinite(end) else None for name, end in ends}


def _describe_attack(outcomes: Outcomes, name: str, task: str, interval: Interval | None) -> dict[str, Any]:
    protocol, attack, budget = name.split("/", 2)
    settings = outcomes.settings(name)
    return {
        "protocol": protocol,
        "attack": attack,
        "budget": budget,
        "epsilon": settings["epsilon"],
        "norm": settings.get("norm", "linf"),  # Square has none: it is for linf
        "steps": settings.get("steps"),
        "loss": settings.get("loss"),
        "eot": settings["eot"],
        "cumulative": bool(settings["after"]) and task == "classification",
        "seconds": settings["seconds"],
        **_measure_attack(outcomes[name], task, interval),
    }


def _measure_attack(outcome: Arrays, task: str, interval: Interval | None) -> dict[str, float | None]:
    measured = {main_metric(task).name: float(score_images(outcome).mean()), **_find_ends(interval, outcome)}
    return measured | (
        {"confidence": 100 * float(outcome["confidence"].mean(dtype=np.float64))} if task == "classification" else {}
    )


def _worst_case(
    outcomes: Outcomes, planned: Sequence[str], task: str, budget: str, norm: str, interval: Interval | None
) -> dict[str, Any] | None:
    """Per example the worst of the paper's attacks, and of the adaptive ensemble, at one radius."""
    row: dict[str, Any] = {"budget": budget}
    paper = [f"paper/{name}/{budget}" for name in PAPER] if norm == "linf" else []
    for protocol, names in (("paper", paper), ("adaptive", ensemble(task, budget))):
        done = [outcomes[name] for name in names if name in planned]
        if done:
            row[protocol] = _measure_attack(worst_outcome(done, task), task, interval)
    return row if len(row) > 1 else None


def worst_outcome(outcomes: Sequence[Arrays], task: str) -> Arrays:
    """Row by row the worst of several outcomes of the same examples."""
    scores = np.stack([score_images(outcome) for outcome in outcomes])  # (parts, N)
    chosen = scores.argmin(0) if task == "classification" else scores.argmax(0)
    rows = np.arange(scores.shape[1])
    shared = [key for key in outcomes[0] if all(key in outcome for outcome in outcomes)]
    return {key: np.stack([outcome[key] for outcome in outcomes])[chosen, rows] for key in shared}


def _describe_noise(
    outcomes: Outcomes, names: Sequence[str], targets: Sequence[str], interval: Interval | None
) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float], list[str]] = {}
    for name in names:
        settings = outcomes.settings(name)
        groups.setdefault((settings["corruption"], settings["level"]), []).append(name)
    return [
        {
            "corruption": corruption,
            "level": level,
            "unit": CORRUPTIONS[corruption].unit,
            **_measure(outcomes, names, targets, interval),
        }
        for (corruption, level), names in groups.items()
    ]
