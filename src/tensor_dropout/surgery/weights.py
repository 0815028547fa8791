"""What a tensor regression's weight is as a whole, in float64 and from its factors."""

from __future__ import annotations

import opt_einsum
import torch
from torch import Tensor

from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.regression import TensorRegression

Network = tuple[str, list[str], list[Tensor]]
"""Indices of the whole weight, indices of every operand, and the operands (with the masks of test time)."""


@torch.no_grad()
def as_network(regression: TensorRegression) -> Network:
    """The weight at test time as operands with indices, in float64."""
    inputs, indices, outputs, ranks = regression._indices()
    operands = [_double(operand) for operand in regression.operands()]
    for axis, mask in enumerate(regression.mean_masks()):
        if mask is not None:  # into an operand, not beside them: every operand more makes planning dearer
            n = next(n for n, index in enumerate(indices) if ranks[axis] in index)
            operands[n] = multiply_along(operands[n], _double(mask), indices[n].index(ranks[axis]))
    return inputs + outputs, indices, operands


def _double(tensor: Tensor) -> Tensor:
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()  # no float64 there


@torch.no_grad()
def whole_weight(regression: TensorRegression) -> Tensor:
    """``dense_weight()`` in float64: (*input_shape, *output_shape)."""
    whole, indices, operands = as_network(regression)
    return torch.einsum(",".join(indices) + "->" + whole, *operands)


@torch.no_grad()
def averaged_weight(regression: TensorRegression) -> Tensor:
    """The weight on the averaged map, (C, *output_shape): W summed over its spatial modes, without forming it."""
    whole, indices, operands = as_network(regression)
    space = whole[1 : len(regression.input_shape)]
    summed = []
    for operand, index in zip(operands, indices, strict=True):
        axes = [index.index(mode) for mode in space if mode in index]
        summed.append(operand.sum(axes, keepdim=True) if axes else operand)
    return torch.einsum(",".join(indices) + "->" + whole[:1] + whole[1 + len(space) :], *summed)


@torch.no_grad()
def is_average(regression: TensorRegression) -> bool:
    """Whether W is constant over the spatial modes, up to the rounding of the layer's dtype.

    Mode by mode ``‖W ×_n (I - 11ᵀ/H)‖`` is computed from the factors; there is nothing to cancel.
    """
    whole, indices, operands = as_network(regression)
    if len(regression.input_shape) == 1:
        return False
    tolerance = 8 * torch.finfo(next(regression.parameters()).dtype).eps
    norm = inner((whole, indices, operands), (whole, indices, operands)) ** 0.5
    for mode in whole[1 : len(regression.input_shape)]:
        centred = [
            operand - operand.mean(index.index(mode), keepdim=True) if mode in index else operand
            for operand, index in zip(operands, indices, strict=True)
        ]
        if inner((whole, indices, centred), (whole, indices, centred)) ** 0.5 > tolerance * norm:
            return False
    return True


@torch.no_grad()
def inner(left: Network, right: Network) -> float:
    """``⟨V, W⟩`` of two weights in factors, without forming them."""
    whole, indices, operands = left
    _, others, more = right
    ranks = sorted({letter for index in (*indices, *others) for letter in index} - set(whole))
    fresh = dict(zip(ranks, _spare(whole + "".join(ranks), len(ranks)), strict=True))
    renamed = ["".join(fresh.get(letter, letter) for letter in index) for index in others]
    equation = ",".join([*indices, *renamed]) + "->"
    # torch.einsum's own plan builds a tensor of 49 million entries for an ImageNet-sized CP head.
    return float(opt_einsum.contract(equation, *operands, *more, optimize="dp"))


def _spare(used: str, count: int) -> list[str]:
    letters = (chr(code) for start in ("a", "A") for code in range(ord(start), ord(start) + 26))
    return [letter for letter in letters if letter not in used][:count]


@torch.no_grad()
def relative_error(matrix: Tensor, regression: TensorRegression, *, averaged: bool) -> float:
    """``‖W - Ŵ‖ / ‖W‖`` of what the layer holds; behind an average, of the matrix on the averaged features."""
    found = averaged_weight(regression) if averaged else whole_weight(regression)
    found = found.reshape(matrix.shape).to(matrix.device)
    norm = matrix.norm()
    return float((matrix - found).norm() / norm) if norm > 0 else float(found.norm())
