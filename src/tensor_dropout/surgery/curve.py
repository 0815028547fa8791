"""Accuracy over rank, from one trained network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tensor_dropout.layers.randomized import tensor_layers
from tensor_dropout.progress import show_progress
from tensor_dropout.surgery.merge import truncate_
from tensor_dropout.surgery.report import ConversionReport, Trial
from tensor_dropout.surgery.tensorize import tensorize_


def rank_curve(
    model: nn.Module,
    example_input: Any,
    score: Callable[[nn.Module], float],
    *,
    factorization: str = "tucker",
    points: int = 12,
) -> list[Trial]:
    """Score a network at ranks from 1 to its own, in copies.

    A network with a tensor regression keeps its leading ranks (:func:`truncate_`); any other is converted at every
    rank (:func:`tensorize_`).

    Args:
        model: the trained network; it is left as it was.
        example_input: as ``tensorize_`` takes it.
        score: higher is better, such as the accuracy on validation data.
        factorization: of the conversion.
        points: about how many ranks are tried, evenly on a logarithmic scale.

    Returns:
        Rank, parameters of the head, relative error of its weight, and the score.
    """
    layers = list(tensor_layers(model).values())

    def cut(rank: int) -> tuple[nn.Module, ConversionReport]:
        changed = copy.deepcopy(model).eval()
        if layers:
            return changed, truncate_(changed, rank)
        return changed, tensorize_(changed, example_input, factorization=factorization, rank=rank)

    if layers:
        most = max(max(layer._ranks) for layer in layers)
    else:
        whole = tensorize_(copy.deepcopy(model).eval(), example_input, factorization=factorization)
        most = max(whole.replacements[0].rank)
    ranks = sorted({round(most ** (k / max(1, points - 1))) for k in range(points)})
    trials = []
    with show_progress("ranks", total=len(ranks)) as advance, torch.no_grad():
        for rank in ranks:
            changed, report = cut(rank)
            each = report.replacements[0]
            trials.append(Trial(each.rank, each.parameters_after, each.relative_error, score(changed)))
            advance(1)
    return trials
