"""Settings that need no tuning: which rank and which modes, for features of any shape."""

from __future__ import annotations

import operator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.objective import Task
from tensor_dropout.layers.dropout import TensorDropout
from tensor_dropout.layers.formats import get_format
from tensor_dropout.layers.regression import TensorRegression, unwarned

MOST = {"cp": 128, "tucker": 64, "tt": 48, "ring": 12}
"""The rank of "auto" for each format, cut at the full rank; for other formats the smallest of them."""
MOST_OUTPUTS = 32
"""Tucker: the rank of "auto" on output modes."""
LARGE = 8
"""A rank axis below this is never masked by "auto": of two outputs or seven positions none can be spared."""

ALPHAS = {"regression": 0.04, "classification": 0.64}
"""``alpha="auto"`` is this over the sum of the sample weights: the norms count less the more samples there are."""


def auto_alpha(weights: Tensor | None, n: int, task: Task = "regression") -> float:
    """The weight of the squared norms for n samples, or for samples of these weights."""
    return ALPHAS[task] / (n if weights is None else float(weights.sum()))


def auto_rank(factorization: str, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Any:
    """The rank of ``rank="auto"``: generous, since θ and α choose the effective one."""
    layer, most = get_format(factorization).layer, MOST.get(factorization, min(MOST.values()))
    largest = list(layer.largest_ranks(input_shape + output_shape))
    ranks = [min(most, each) for each in largest]
    if factorization == "tucker":
        for n in range(len(input_shape), len(ranks)):
            ranks[n] = min(ranks[n], MOST_OUTPUTS)
    return tuple(ranks) if len(ranks) > 1 else ranks[0]


def auto_modes(layer: TensorRegression) -> Any:
    """The modes of ``modes="auto"``: CP has one mask; else the largest rank axis of the inputs, if it is large.

    In a feature map that is the axis of the channels; spatial ranks and ranks of the outputs are few.
    """
    if not layer.mode_numbers:
        return "all"
    ranks, numbers = layer._ranks, layer.mode_numbers
    inner = range(1, len(layer.input_shape) + 1) if len(ranks) < len(layer.weight_shape) else None
    # Bonds touch the inputs up to the one in front of the outputs; Tucker's axes and a ring's bonds are counted from 0.
    of_inputs = [k for k, number in enumerate(numbers) if (number in inner if inner else k < len(layer.input_shape))]
    largest = max(of_inputs, key=lambda k: ranks[k])
    return (numbers[largest],) if ranks[largest] >= LARGE else None


def build_layer(
    factorization: str,
    input_shape: tuple[int, ...],
    output_shape: tuple[int, ...],
    rank: Any,
    theta: float,
    modes: Any,
    law: Any,
    *,
    where: str = "TensorRegressor",
    keep_mask: bool = False,
    **factory: Any,
) -> TensorRegression:
    """A layer with its dropout as the estimator's settings say.

    Args:
        factorization: the format.
        input_shape: of a sample.
        output_shape: of its target.
        rank: "auto", or what the layer takes.
        theta: the keep probability; 1 for no dropout.
        modes: "auto", or what :class:`td.TensorDropout` takes.
        law: of the masks.
        where: the estimator, for messages.
        keep_mask: keep the dropout at θ = 1 too.
        factory: device and dtype.
    """
    layer_class = get_format(factorization, where, "factorization").layer
    rank = auto_rank(factorization, input_shape, output_shape) if is_auto(rank) else rank
    devices = [factory["device"]] if getattr(factory.get("device"), "type", "cpu") == "cuda" else []
    with unwarned(), torch.random.fork_rng(devices=devices):  # the fit draws its own start, from random_state
        layer = layer_class(input_shape, output_shape, rank, init="normal", **factory)
        if theta == 1 and not keep_mask:
            return layer
        chosen = auto_modes(layer) if is_auto(modes) else modes
        if chosen is None:
            return layer
        dropout = TensorDropout(theta, law=law, modes=chosen)
        dropout.dropped_axes(layer._ranks, layer.mode_numbers)
    layer.dropout = dropout.to(next(layer.parameters()).device)
    return layer


def is_auto(value: Any) -> bool:
    """Whether a setting is "auto"."""
    return isinstance(value, str) and value == "auto"


def is_matrix_of_rank_one(input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> bool:
    """Whether the weight has one mode of more than one entry: nothing to factorize, so plain ridge."""
    return sum(size > 1 for size in input_shape + output_shape) <= 1


def check_number(
    name: str, setting: str, value: Any, low: float, high: float, *, kind: Literal["float", "int"]
) -> None:
    """Refuse a setting outside of its range; θ in (0, 1], the others from ``low``."""
    try:
        number = operator.index(value) if kind == "int" else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool | str) or np.ndim(value) > 0 or not low <= number <= high or number == float("inf"):
        span = f"from {low:g} to {high:g}" if high < float("inf") else f"of at least {low:g}"
        raise TensorDropoutError(f"{name}: {setting} is a number {span}, got {value!r}")
