"""What a trained network does on a split: outputs, and the numbers that are reported."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.layers.randomized import randomized_layers
from tensor_dropout.metrics.outcome_arrays import Task, describe_classes
from tensor_dropout.metrics.registry import list_metrics, summarize
from tensor_dropout.prediction import evaluating, predict
from tensor_dropout_lab.data.base import Data, Split
from tensor_dropout_lab.data.batches import Batches
from tensor_dropout_lab.training.execution import autocast


@dataclass(frozen=True)
class Outcome:
    """The outputs of a network on a split, on the CPU.

    Attributes:
        outputs: (N, outputs): logits, or the prediction in the target's unit.
        targets: (N,) or (N, T).
        std: (N, T): the exact standard deviation over the masks, for a randomized regression; else None.
    """

    outputs: Tensor
    targets: Tensor
    std: Tensor | None = None


@torch.no_grad()
def evaluate(
    network: nn.Module,
    data: Data,
    split: Split,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    batch: int = 256,
    workers: int = 0,
    mean: Tensor | None = None,
    std: Tensor | None = None,
    uncertainty: bool = False,
) -> Outcome:
    """Run a network in ``eval`` mode over a split.

    Args:
        network: takes prepared batches; the mode of each of its modules is put back.
        data: the data set.
        split: one of its splits.
        device: where it runs.
        dtype: of the arithmetic.
        batch: samples at once.
        workers: processes that read a split which is not in memory.
        mean: what a regression's outputs were standardized by; None: they are in the target's unit.
        std: as ``mean``.
        uncertainty: also the exact standard deviation over the masks, if the network has tensor dropout.
    """
    device = torch.device(device)
    exact = uncertainty and data.task == "regression" and len(randomized_layers(network)) == 1
    outputs, targets, stds = [], [], []
    kind = torch.float64 if dtype == torch.float64 else torch.float32
    with evaluating(network):
        for x, y in Batches(data, split, batch, device, workers):
            x = x.to(kind)
            if exact:
                prediction = predict(network, x, mode="exact", task="regression")
                assert prediction.std is not None
                outputs.append(prediction.mean.float().cpu())
                stds.append(prediction.std.float().cpu())
            else:
                with autocast(device, dtype):
                    outputs.append(network(x).float().cpu())
            targets.append(y.cpu())
    found, spread = torch.cat(outputs), torch.cat(stds) if stds else None
    if data.task == "regression" and mean is not None and std is not None:
        found = found * std.cpu() + mean.cpu()
        spread = None if spread is None else spread * std.cpu()
    return Outcome(found, torch.cat(targets), spread)


def describe_outputs(outcome: Outcome, task: Task) -> dict[str, np.ndarray]:
    """The outputs as arrays with a row per example, in float64 (:mod:`tensor_dropout.metrics.outcome_arrays`)."""
    if task == "classification":
        return describe_classes(outcome.outputs.double().log_softmax(1).numpy(), outcome.targets.numpy())
    target = outcome.targets.reshape(outcome.outputs.shape)
    arrays = {"target": target, "output": outcome.outputs}
    if outcome.std is not None:
        arrays["std"] = outcome.std
    return {name: values.double().numpy() for name, values in arrays.items()}


def summarize_outputs(
    outcome: Outcome, task: Task, names: Sequence[str] = (), points: Sequence[Sequence[int]] = ()
) -> dict[str, Any]:
    """The metrics of an outcome, by :func:`tensor_dropout.metrics.registry.summarize`; NaN if an output is not finite.

    Args:
        outcome: of :func:`evaluate`.
        task: of the data.
        names: of the targets of a regression; of several, those over all of them say little unless they share a unit,
            and those of each are under "targets".
        points: the targets that are the coordinates of a point, as fractions of the image's size; their mean distance,
            in percent of its side, is under "distance".

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
        >>> round(summarize_outputs(Outcome(logits, torch.tensor([0, 1, 1, 0])), "classification")["accuracy"], 1)
        75.0
    """
    arrays = describe_outputs(outcome, task)
    summary: dict[str, Any] = _summarize_finite(arrays, task)
    if len(names) > 1:
        columns = {name: {key: values[:, t : t + 1] for key, values in arrays.items()} for t, name in enumerate(names)}
        summary["targets"] = {name: _summarize_finite(column, task) for name, column in columns.items()}
    if points:
        errors = arrays["output"] - arrays["target"]
        distances = [np.linalg.norm(errors[:, list(point)], axis=1) for point in points]
        summary["distance"] = 100 * float(np.mean(distances))
    return summary


def _summarize_finite(arrays: dict[str, np.ndarray], task: Task) -> dict[str, float]:
    if all(np.isfinite(values).all() for values in arrays.values()):
        return summarize(arrays)
    return {metric.name: math.nan for metric in list_metrics(task) if metric.fits(arrays)}


def choose_evaluation_batch(batch: int, input_shape: tuple[int, ...]) -> int:
    """At least that of training; up to 32 if they are small enough, about 32 pictures of 512×512.

    Example:
        >>> choose_evaluation_batch(8, (3, 32, 32)), choose_evaluation_batch(8, (1, 182, 218, 182))
        (32, 8)
    """
    return max(batch, min(32, 2**25 // math.prod(input_shape) or 1))


def warn_not_finite(part: str, names: list[str], outputs: Tensor) -> None:
    """Say that a part has no numbers to report, since some outputs are none."""
    bad = (~torch.isfinite(outputs)).any(1)
    if bad.any():
        warnings.warn(
            f"train: the outputs for {int(bad.sum())} of {len(names)} examples of the {part} part are not finite, the "
            f"first for {names[int(bad.int().argmax())]!r}, so its metrics mean nothing; look at these inputs",
            stacklevel=2,
        )
