"""What a target answers, and how the draws of a random network become one answer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Ascent(NamedTuple):
    """What an attack learns about a batch.

    Attributes:
        loss: (B,): averaged over the draws.
        gradient: of the loss with respect to the input, like x; zeros where the network has none.
        scores: (B, O): logits (of several draws: the log of the averaged softmax), or the mean output of a regression.
    """

    loss: Tensor
    gradient: Tensor
    scores: Tensor


class Predicted(NamedTuple):
    """What a target says about a batch.

    Attributes:
        output: (B, O): class probabilities, or a regression's output.
        std: (B, O): a regression's standard deviation over masks, draws or members; None without any.
        disagreement: (B,): of classes, the mutual information of class and draw in nats; None without draws.
        doubt: (B,): of classes, the standard deviation of the largest logit, divided by its lead on the second; None
            without draws.
        log_probs: (B, O): of classes, the logarithm of ``output``, finite where a probability is too small for float32;
            None for a regression.
    """

    output: Tensor
    std: Tensor | None
    disagreement: Tensor | None = None
    doubt: Tensor | None = None
    log_probs: Tensor | None = None


class Nature(NamedTuple):
    """What :meth:`Target.examine` found out.

    Attributes:
        randomized: see :meth:`Target.is_randomized`.
        differentiable: autograd reaches the input, with a gradient that is not 0 for all examples.
        zero_gradients: the share of examples whose gradient is 0 everywhere, or too small for float32.
    """

    randomized: bool
    differentiable: bool
    zero_gradients: float


def average(draws: Tensor, mean: Tensor, std: Tensor | None) -> Predicted:
    """What draws of logits (n, B, O) say together; ``mean`` and ``std`` are those of a logit over the draws."""
    log_probs, singles = log_average(draws), draws.softmax(-1)
    probs = singles.mean(0)
    if std is None:
        return Predicted(probs, None, log_probs=log_probs)
    return Predicted(probs, None, _disagree(probs, _entropy(singles).mean(0)), _doubt(mean, std), log_probs)


def log_average(draws: Tensor) -> Tensor:
    """``log mean softmax`` over draws of logits (n, B, O): (B, O), in logarithms, where a softmax may round to 0."""
    return draws.log_softmax(-1).logsumexp(0) - math.log(len(draws))


def _entropy(probs: Tensor) -> Tensor:
    return torch.special.entr(probs).sum(-1)


def _disagree(probs: Tensor, within: Tensor) -> Tensor:
    """The entropy of the averaged probabilities that is more than that of single draws."""
    return (_entropy(probs) - within).clamp(min=0)


def _doubt(logits: Tensor, std: Tensor) -> Tensor:
    """Where every logit grows with the input's, so does its spread: only beside the lead does it say how sure it is."""
    best, where = logits.topk(2, dim=1)
    return std.gather(1, where[:, :1])[:, 0] / (best[:, 0] - best[:, 1]).clamp(min=1e-6)
