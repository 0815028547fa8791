"""What a trained network does on a split: outputs, and the numbers that are reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.layers.regression import randomized_layers
from tensor_dropout.prediction import evaluating, predict
from tensor_dropout_lab.data.base import Data, Split
from tensor_dropout_lab.data.batches import Batches
from tensor_dropout_lab.training.step import autocast

MAIN_METRIC = {"classification": "accuracy", "regression": "mae"}


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


def summarize(outcome: Outcome, task: str, names: Sequence[str] = ()) -> dict[str, Any]:
    """The numbers of an outcome.

    Classification: accuracy and top-5 accuracy in percent, negative log-likelihood, expected calibration error in
    percent (15 bins). Regression: mean absolute error, root mean squared error, R² and the correlation; of several
    targets those over all of them, which say little unless they share a unit, and under "targets" those of each.

    Args:
        outcome: of :func:`evaluate`.
        task: of the data.
        names: of the targets of a regression.

    Example:
        >>> logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [3.0, 0.0], [1.0, 0.0]])
        >>> round(summarize(Outcome(logits, torch.tensor([0, 1, 1, 0])), "classification")["accuracy"], 1)
        75.0
    """
    if task == "classification":
        return _summarize_classes(outcome.outputs.double(), outcome.targets)
    outputs, y = outcome.outputs.double(), outcome.targets.double().reshape(outcome.outputs.shape)
    found: dict[str, Any] = {**_summarize_numbers(outputs, y)}
    if len(names) > 1:
        columns = zip(names, outputs.split(1, dim=1), y.split(1, dim=1), strict=True)
        found["targets"] = {name: _summarize_numbers(own, true) for name, own, true in columns}
    return found


def _summarize_classes(logits: Tensor, y: Tensor) -> dict[str, float]:
    confidence, guess = logits.softmax(1).max(1)
    right = (guess == y).double()
    top = logits.topk(min(5, logits.shape[1]), dim=1).indices
    return {
        "accuracy": 100 * float(right.mean()),
        "top5": 100 * float((top == y[:, None]).any(1).double().mean()),
        "nll": float(F.cross_entropy(logits, y)),
        "ece": 100 * calibration_error(confidence, right),
    }


def calibration_error(confidence: Tensor, right: Tensor, bins: int = 15) -> float:
    """``Σ_b |accuracy_b - confidence_b| · n_b / n`` over equally wide bins of the confidence; NaN if one is NaN."""
    bin_of = (confidence.nan_to_num() * bins).long().clamp(max=bins - 1)
    gap = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, (right - confidence).double())
    return float(gap.abs().sum() / len(right))


def _summarize_numbers(outputs: Tensor, y: Tensor) -> dict[str, float]:
    error = outputs - y
    centred = y - y.mean(0)
    spread = float(centred.square().sum())
    guess = outputs - outputs.mean(0)
    norms = float((guess.square().sum() * centred.square().sum()).sqrt())
    return {
        "mae": float(error.abs().mean()),
        "rmse": float(error.square().mean().sqrt()),
        "r2": 1 - float(error.square().sum()) / spread if spread > 0 else float("nan"),
        "correlation": float((guess * centred).sum()) / norms if norms > 0 else float("nan"),
    }
