"""Do the intervals of a calibrated run hold on the examples of an evaluation, and what do the masks add?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.calibration.classification import ClassCalibration
from tensor_dropout.calibration.model import ModelCalibration
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.randomized import randomized_layers
from tensor_dropout.metrics.outcome_arrays import describe_classes
from tensor_dropout.metrics.registry import summarize
from tensor_dropout.prediction import Prediction, predict
from tensor_dropout_lab.evaluation.examples import Examples
from tensor_dropout_lab.evaluation.intervals import Interval, group_interval, proportion_interval

LEVELS = (0.5, 0.8, 0.9, 0.95)
"""Coverages that are measured, as far as there were enough held-out groups for them."""
UNCALIBRATED = "nobody measured how far off single predictions are; tensor-dropout calibrate RUN does"
JUDGED = ("nll", "ece", "brier")
"""What is told of probabilities before and after."""


def measure_calibration(
    network: nn.Module,
    calibration: ModelCalibration,
    examples: Examples,
    prepare: Callable[[Tensor], Tensor],
    *,
    split: str,
    batch: int,
    targets: Sequence[str] = (),
    groups: Sequence[str] | None = None,
) -> dict[str, Any]:
    """What the intervals, or the sets, of a calibrated network are worth on clean examples, as JSON takes it.

    Args:
        network: the one that was calibrated.
        calibration: its own.
        examples: clean inputs with their targets.
        prepare: from these inputs to those of the network.
        split: the part that they are from.
        batch: examples that pass through the network at once.
        targets: the names of a regression's targets.
        groups: (n,), what belongs together among the examples.

    Returns:
        ``task``, ``about`` the calibration, ``held_out`` (whether other examples made it), and ``levels``: for each
        coverage the share ``inside``, in percent with its 95 % interval, and the mean ``width`` or ``size``. Of several
        targets of a regression ``levels`` has a row each. Of numbers also ``masks``, the mean std over the masks by
        target; of classes ``temperature``, and ``before`` and ``after`` it NLL, ECE and Brier score.
    """
    found = _predict(network, calibration, examples.x, prepare, batch)
    kept = ("data", "split", "examples", "groups", "targets")
    about = {key: calibration.about[key] for key in kept if calibration.about.get(key) is not None}
    record = {"task": calibration.task, "about": about, "held_out": about.get("split") != split}
    if isinstance(calibration.errors, ClassCalibration):
        return record | _measure_classes(calibration, found, examples.y.cpu(), groups)
    return record | _measure_numbers(calibration, found, examples.y.cpu(), list(targets), groups)


def _predict(
    network: nn.Module, calibration: ModelCalibration, x: Tensor, prepare: Callable[[Tensor], Tensor], batch: int
) -> Prediction:
    """Mean and std over the masks of all examples, on the CPU."""
    exact = len(randomized_layers(network)) == 1 and calibration.task == "regression"
    mode: Any = "exact" if exact else "mean"
    with torch.no_grad():
        parts = [predict(network, prepare(rows), mode=mode, task=calibration.task) for rows in x.split(batch)]
    std = torch.cat([part.std.cpu() for part in parts if part.std is not None]) if exact else None
    return Prediction(torch.cat([part.mean.cpu() for part in parts]), std)


def _complete(calibration: ModelCalibration, found: Prediction) -> list[tuple[float, Prediction]]:
    """The predictions with intervals or sets, for each coverage that there were enough groups for."""
    completed = []
    for level in LEVELS:
        try:
            completed.append((level, calibration.complete(found, level)))
        except TensorDropoutError:  # it takes more groups
            break
    return completed


def _measure_classes(
    calibration: ModelCalibration, found: Prediction, y: Tensor, groups: Sequence[str] | None
) -> dict[str, Any]:
    assert isinstance(calibration.errors, ClassCalibration)
    levels = []
    for level, completed in _complete(calibration, found):
        assert completed.sets is not None
        inside = completed.sets.gather(1, y[:, None])[:, 0].double().numpy()
        size = float(completed.sets.sum(1).double().mean())
        levels.append({"coverage": level, **_share(inside, groups), "size": size})
    temperature = calibration.errors.temperature
    judged = {
        name: summarize(describe_classes(logits.double().log_softmax(1).numpy(), y.numpy()), JUDGED)
        for name, logits in (("before", found.mean), ("after", found.mean / temperature))
    }
    return {"levels": levels, "temperature": temperature, **judged}


def _measure_numbers(
    calibration: ModelCalibration,
    found: Prediction,
    y: Tensor,
    targets: list[str],
    groups: Sequence[str] | None,
) -> dict[str, Any]:
    y = y.reshape(found.mean.shape).to(found.mean)
    names = targets if len(targets) == y[0].numel() else [str(number) for number in range(y[0].numel())]
    levels = []
    for level, completed in _complete(calibration, found):
        assert completed.low is not None
        assert completed.high is not None
        held = ((completed.low <= y) & (y <= completed.high)).double()
        inside = torch.where(y.isnan(), torch.nan, held).flatten(1).numpy()
        widths = (completed.high - completed.low).double().flatten(1).mean(0).tolist()
        levels += [
            {"coverage": level, "target": name, **_share(inside[:, number], groups), "width": widths[number]}
            for number, name in enumerate(names)
        ]
    spread = None if found.std is None else found.std.double().flatten(1).mean(0).tolist()
    return {"levels": levels, "masks": None if spread is None else dict(zip(names, spread, strict=True))}


def _share(inside: np.ndarray, groups: Sequence[str] | None) -> dict[str, float | None]:
    """The share of ones in percent, NaN left out, with its 95 % interval; over groups, where there are some."""
    known = inside[~np.isnan(inside)]
    if not len(known):
        return {"inside": None, "low": None, "high": None}
    if groups is None:
        ends = proportion_interval(int(known.sum()), len(known))
    else:
        ends = group_interval(inside, np.asarray(groups))
    low, high = (None if np.isnan(end) else 100 * end for end in Interval(*ends))
    return {"inside": 100 * float(known.mean()), "low": low, "high": high}
