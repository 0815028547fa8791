"""The order of contraction: planned once, when a layer is made, and run factor by factor.

``output = ⟨x, W⟩`` with W in factors is a tensor network. It is contracted by letting x absorb one parameter after
another, in the cheapest of all such orders (found exactly, by dynamic programming over the sets of absorbed
parameters). opt_einsum plans more general trees, but those may contract two parameters over a rank before x has
met it; after that the rank can no longer be masked sample by sample, and θ = 1 would no longer run the very
operations of the plain layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from tensor_dropout.layers.dropout import Masks

BATCH = "z"
PLANNED_BATCH = 32
"""The batch that the plan assumes: it weighs the cost of activations against that of the parameters."""
TRAFFIC = 8
"""Multiply-adds that cost as much as moving one number through memory."""
INDICES = "abcdefghijklmnopqrstuvwxyABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_MODES = 12


@dataclass(frozen=True)
class Step:
    """x absorbs one parameter.

    Attributes:
        operand: the position of the parameter among the layer's operands.
        equation: the einsum of the running tensor with it.
        enters: for each rank axis that enters the running tensor here: (rank axis, its dimension in the
            operand, its dimension in the result).
    """

    operand: int
    equation: str
    enters: tuple[tuple[int, int, int], ...]


Plan = tuple[Step, ...]


def plan_contraction(inputs: str, operands: Sequence[str], outputs: str, ranks: str, sizes: dict[str, int]) -> Plan:
    """The cheapest order in which x absorbs its parameters.

    Args:
        inputs: the indices of x, without the batch.
        operands: the indices of each parameter.
        outputs: the indices of the result, without the batch.
        ranks: the index of each rank axis, in the layer's order.
        sizes: the size of each index.
    """
    everything = (1 << len(operands)) - 1
    running = {0: inputs}  # set of absorbed operands (bits) -> indices of the running tensor
    best: dict[int, tuple[float, Plan]] = {0: (0.0, ())}
    for absorbed in range(everything):  # subsets before their supersets
        cost, steps = best[absorbed]
        held = running[absorbed]
        for k, indices in enumerate(operands):
            if absorbed >> k & 1:
                continue
            after = absorbed | 1 << k
            waiting = outputs + "".join(o for j, o in enumerate(operands) if not after >> j & 1)
            left = "".join(i for i in held + "".join(j for j in indices if j not in held) if i in waiting)
            result = left if after != everything else outputs
            total = cost + _cost(held, indices, result, sizes)
            if after not in best or total < best[after][0]:
                enters = tuple(
                    (axis, indices.index(r), 1 + result.index(r))
                    for axis, r in enumerate(ranks)
                    if r in indices and r not in held
                )
                step = Step(k, f"{BATCH}{held},{indices}->{BATCH}{result}", enters)
                best[after] = (total, (*steps, step))
                running[after] = result
    return best[everything][1]


def _cost(held: str, operand: str, result: str, sizes: dict[str, int]) -> float:
    """Multiply-adds plus traffic of one absorption; the backward pass is twice that in every order."""

    def size(indices: str) -> int:
        return prod(sizes[i] for i in set(indices))

    activations = size(held) + size(result)
    return PLANNED_BATCH * (size(held + operand) + TRAFFIC * activations) + TRAFFIC * size(operand)


def contract(x: Tensor, operands: Sequence[Tensor], masks: Masks, plan: Plan) -> Tensor:
    """Run a plan: ``⟨x, W̃⟩`` with the masks on the rank axes of W.

    A mask of the whole batch multiplies the parameter that brings its rank axis in; a mask per sample multiplies
    the running tensor right after.

    Args:
        x: (B, *input_shape).
        operands: the layer's parameters, in the plan's order.
        masks: one entry per rank axis: None, (R,) or (B, R).
        plan: from :func:`plan_contraction`.

    Returns:
        (B, *output_shape), without bias.
    """
    for step in plan:
        operand = operands[step.operand]
        for axis, position, _ in step.enters:
            mask = masks[axis]
            if mask is not None and mask.ndim == 1:
                operand = multiply_along(operand, mask, position)
        x = torch.einsum(step.equation, x, operand)
        for axis, _, position in step.enters:
            mask = masks[axis]
            if mask is not None and mask.ndim == 2:
                x = multiply_along(x, mask, position)
    return x


def multiply_along(tensor: Tensor, mask: Tensor, dim: int) -> Tensor:
    """``tensor * mask`` with the mask's last axis on ``dim`` (and its first, if any, on the batch)."""
    shape = [1] * tensor.ndim
    shape[dim] = mask.shape[-1]
    if mask.ndim == 2:
        shape[0] = mask.shape[0]
    return (tensor * mask.view(shape)).to(tensor.dtype)
