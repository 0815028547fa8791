"""Choosing the rank of a conversion: given, by a budget, by an error, or by the accuracy on a loader."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.decomposition import Decomposition, Ranks
from tensor_dropout.layers.ranks import Rank
from tensor_dropout.progress import show_progress
from tensor_dropout.surgery.report import Trial

Count = Callable[[Ranks], int]
Evaluate = Callable[[Ranks | None, Callable[[nn.Module], float]], float]


@dataclass(frozen=True)
class Goal:
    """What decides the rank; exactly one thing does."""

    kind: Literal["rank", "parameters", "error", "accuracy"]
    value: Any
    loader: Iterable[Any] | None = None

    @classmethod
    def of(
        cls,
        rank: Rank | None,
        max_parameters: int | None,
        max_error: float | None,
        max_accuracy_loss: float | None,
        loader: Iterable[Any] | None,
    ) -> Goal:
        """The goal behind the arguments of ``tensorize_``.

        Raises:
            TensorDropoutError: if more than one is given, or one is out of its range.
        """
        asked = {
            "rank": rank,
            "max_parameters": max_parameters,
            "max_error": max_error,
            "max_accuracy_loss": max_accuracy_loss,
        }
        given = {name: value for name, value in asked.items() if value is not None}
        if len(given) > 1:
            raise TensorDropoutError(
                f"tensorize_: one thing decides the rank, got {', '.join(given)}; keep one of them"
            )
        if (loader is None) != (max_accuracy_loss is None):
            raise TensorDropoutError("tensorize_: max_accuracy_loss= and loader= belong together; pass both or neither")
        if max_parameters is not None and (type(max_parameters) is not int or max_parameters < 1):
            raise TensorDropoutError(f"tensorize_: max_parameters is a positive integer, got {max_parameters!r}")
        for name, value in (("max_error", max_error), ("max_accuracy_loss", max_accuracy_loss)):
            if value is not None and not (isinstance(value, int | float) and 0 <= value < 1):
                raise TensorDropoutError(f"tensorize_: {name} is a number in [0, 1), got {value!r}")
        if max_parameters is not None:
            return cls("parameters", max_parameters)
        if max_error is not None:
            return cls("error", float(max_error))
        if max_accuracy_loss is not None:
            return cls("accuracy", float(max_accuracy_loss), loader)
        return cls("rank", "full" if rank is None else rank)


def choose_ranks(
    goal: Goal,
    decomposition: Decomposition,
    count: Count,
    error: Callable[[Ranks], float],
    evaluate: Evaluate,
    weights: int,
    bias: Tensor | None,
) -> tuple[Rank, tuple[Trial, ...], str]:
    """The rank that the goal asks for, what was tried, and a note on it for the report.

    Args:
        goal: what decides.
        decomposition: of the weight; its ``path`` is where the rank is sought.
        count: parameters at given ranks, without the bias.
        error: relative error of the weight at given ranks.
        evaluate: a score of the network at given ranks; None is the network as it was.
        weights: the number of weights of the layer that is replaced.
        bias: its bias.
    """
    biases = 0 if bias is None else bias.numel()
    if goal.kind == "rank":
        if isinstance(goal.value, float):
            return _within_budget(decomposition, count, _fraction_of(goal.value, weights), goal.value), (), ""
        return _resolve(goal.value, decomposition.exact_rank), (), ""
    if goal.kind == "parameters":
        return _within_budget(decomposition, count, goal.value - biases, goal.value), (), ""
    trials: list[Trial] = []
    if goal.kind == "error":

        def small(ranks: Ranks) -> bool:
            trials.append(Trial(ranks, count(ranks) + biases, error(ranks)))
            return trials[-1].relative_error <= goal.value

        # The last rank is exact up to rounding, which no rank can mend.
        return _first(decomposition.path, small, "ranks tried"), tuple(trials), ""

    def score(model: nn.Module) -> float:
        return measure_accuracy(model, goal.loader or ())

    unchanged = evaluate(None, score)
    target = unchanged - goal.value

    def accurate(ranks: Ranks) -> bool:
        trials.append(Trial(ranks, count(ranks) + biases, error(ranks), evaluate(ranks, score)))
        return (trials[-1].accuracy or 0.0) >= target - 1e-9

    found = _first(decomposition.path, accurate, "ranks tried on the loader")
    if all(trial.rank != found for trial in trials):  # the last rank of the path is taken as it is: measure it, too
        accurate(found)
    reached = next(trial.accuracy or 0.0 for trial in trials if trial.rank == found)
    note = f"accuracy on the loader: {100 * unchanged:.2f} % before, {100 * reached:.2f} % now"
    return found, tuple(trials), note


def _fraction_of(fraction: float, weights: int) -> int:
    if not 0 < fraction <= 1:
        raise TensorDropoutError(
            f"tensorize_: a float rank is a fraction of the layer's weights in (0, 1], got {fraction}; write an "
            "integer for an exact rank"
        )
    return int(fraction * weights * (1 + 1e-9))


def _within_budget(decomposition: Decomposition, count: Count, budget: int, asked: float) -> Ranks:
    """The last rank of the path with at most ``budget`` parameters."""
    path = decomposition.path
    if count(path[0]) > budget:
        raise TensorDropoutError(
            f"tensorize_: {asked} is too little: the smallest head, of rank {path[0]}, has {count(path[0]):,} weights "
            "beside its bias; allow more"
        )
    low, high = 0, len(path) - 1
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(path[middle]) <= budget else (low, middle - 1)
    return path[low]


def _first(path: list[Ranks], holds: Callable[[Ranks], bool], what: str) -> Ranks:
    """The first rank of the path for which something holds, by bisection; the last one is taken as it is."""
    low, high = 0, len(path) - 1
    with show_progress(what, total=max(1, high.bit_length())) as advance:
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(path[middle]) else (middle + 1, high)
            advance(1)
    return path[low]


def _resolve(rank: Any, exact: Ranks) -> Rank:
    """Exact ranks as they are; "full" and one int in terms of the weight's own rank."""
    if isinstance(rank, str) and rank == "full":
        return exact
    if type(rank) is int and len(exact) > 1:
        if not 1 <= rank <= max(exact):
            raise TensorDropoutError(
                f"tensorize_: rank is between 1 and {max(exact)}, the weight's own rank {exact}, got {rank}; a "
                "sequence of ranks may ask for more"
            )
        return tuple(min(rank, own) for own in exact)
    return tuple(rank) if isinstance(rank, Sequence) and not isinstance(rank, str) else rank  # the layer checks it


@torch.no_grad()
def measure_accuracy(model: nn.Module, loader: Iterable[Any]) -> float:
    """The fraction of a loader's samples whose largest output is at the label's place.

    Raises:
        TensorDropoutError: if the loader is empty or does not give ``(x, y)``.
    """
    parameter = next(model.parameters())
    right = total = 0
    for batch in loader:
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise TensorDropoutError(f"tensorize_: loader gives pairs (x, y), got {type(batch).__name__}")
        try:
            x, y = (part.to(parameter.device) for part in batch)
            outputs = model(x)
            if y.is_floating_point() or not isinstance(outputs, Tensor) or outputs.ndim != 2 or y.shape != x.shape[:1]:
                raise TensorDropoutError(
                    "tensorize_: max_accuracy_loss is for classifiers: outputs (B, classes), class numbers (B,)"
                )
            right += int((outputs.argmax(1) == y).sum())
        except (RuntimeError, AttributeError, IndexError) as error:
            words = str(error).strip().splitlines()[0]
            raise TensorDropoutError(f"tensorize_: the model does not run on the loader's batches: {words}") from error
        total += len(y)
    if total == 0:
        raise TensorDropoutError("tensorize_: the loader gave no samples (an iterator can be used up only once)")
    return right / total
