"""From a network's predictions to a row of numbers for every example: what outcomes store."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.metrics.outcome_arrays import Task, describe_classes
from tensor_dropout.robustness.answers import Predicted
from tensor_dropout.robustness.outcomes import Arrays


def describe_outcome(predicted: Predicted, y: Tensor, task: Task) -> Arrays:
    """One row per example: everything that is reported can be computed from these.

    Args:
        predicted: class probabilities, or a regression's output and std.
        y: the targets.
        task: "classification" or "regression".

    Returns:
        For classes what :func:`~tensor_dropout.metrics.outcome_arrays.describe_classes` gives, without the target, and,
        over draws, ``disagreement`` and ``doubt``; for numbers ``output`` and ``std``.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
        >>> found = describe_outcome(Predicted(probs, None), torch.tensor([0, 0]), "classification")
        >>> found["predicted"].tolist(), found["top5"].tolist()
        ([0, 1], [True, True])
    """
    if task == "regression":
        found = {"output": predicted.output} | ({} if predicted.std is None else {"std": predicted.std})
        return {name: values.float().cpu().numpy() for name, values in found.items()}
    arrays = describe_classes(_log(predicted).double().cpu().numpy(), y.cpu().numpy())
    if predicted.disagreement is not None and predicted.doubt is not None:
        arrays |= {"disagreement": predicted.disagreement.cpu().numpy(), "doubt": predicted.doubt.cpu().numpy()}
    small = np.int16 if predicted.output.shape[1] < 2**15 else np.int32
    stored = {"predicted": small, "brier": np.float16, "top5": np.bool_}  # brier: only its mean is asked for
    return {name: values.astype(stored.get(name, np.float32)) for name, values in arrays.items() if name != "target"}


def _log(predicted: Predicted) -> Tensor:
    """Without logarithms of its own, a probability of 0 counts as the smallest of float32."""
    if predicted.log_probs is not None:
        return predicted.log_probs
    return predicted.output.double().clamp(min=torch.finfo(torch.float32).tiny).log()
