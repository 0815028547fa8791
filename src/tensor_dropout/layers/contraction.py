"""How a plan is run: ``output = ⟨x, W⟩`` as a few matrix products, with the masks on the rank axes.

:func:`contract` follows the steps that :mod:`tensor_dropout.layers.plan` has chosen for the layout of the features.

A head of few outputs (brain age: one) is the exception: its dense weight is no larger than a few feature maps, and
forming it once for the whole batch (:func:`apply_weight`) is several times faster than projecting every sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.plan import Plan, Plans, Step

SMALL = 2**14  # numbers of a parameter that are copied without a thought


def contract(x: Tensor, operands: Sequence[Tensor], masks: Masks, plans: Plans) -> Tensor:
    """Run a plan: ``⟨x, W̃⟩`` with the masks on the rank axes of W.

    Args:
        x: (B, *input_shape).
        operands: the layer's parameters, in the plan's order.
        masks: one entry per rank axis: None, (R,) or (B, R); empty if there are none.
        plans: from :func:`tensor_dropout.layers.plan.plan_contraction`.

    Returns:
        (B, *output_shape), without bias.
    """
    plan = plans.channels_last if is_channels_last(x) else plans.channels_first
    operands = _fold(operands, masks, plan)
    running, sizes = x.permute(plan.start) if plan.start else x, tuple(x.shape[1:])
    for step in plan.steps:
        if step.permute:
            running = running.reshape(-1, *sizes).permute(step.permute)
        running = _absorb(running, _prepare(operands, step), step)
        sizes = step.sizes
        joint = [_align(mask, dim, len(sizes)) for mask, dim in _running_masks(masks, plan, step)]
        if joint:  # one product for all masks: they are small and need no gradient
            running = _multiply_by(running.reshape(-1, *sizes), reduce(torch.mul, joint))
    y = running.reshape(-1, *sizes)
    return y.permute(plan.finish) if plan.finish else y


def apply_weight(x: Tensor, weight: Tensor) -> Tensor:
    """``⟨x, W⟩`` for a weight that was formed: (B, *inputs), (*inputs, *outputs) -> (B, *outputs); x is not copied."""
    n_inputs = x.ndim - 1
    if is_channels_last(x):
        x, weight = x.movedim(1, -1), weight.movedim(0, n_inputs - 1)
    y = x.flatten(1) @ weight.flatten(0, n_inputs - 1).flatten(1)
    return y.unflatten(1, weight.shape[n_inputs:])


def is_channels_last(x: Tensor) -> bool:
    """Whether the second axis, the channels, lies innermost in memory."""
    return x.ndim > 2 and x.stride(1) < x.stride(-1)


def _fold(operands: Sequence[Tensor], masks: Masks, plan: Plan) -> list[Tensor]:
    """The parameters, multiplied by the masks of the whole batch that belong on them."""
    folded = list(operands)
    for mask, fold in zip(masks, plan.folds, strict=len(masks) > 0):
        if mask is not None and mask.ndim == 1 and fold is not None:
            k, dim = fold
            folded[k] = multiply_along(folded[k], mask, dim)
    return folded


def _running_masks(masks: Masks, plan: Plan, step: Step) -> Iterator[tuple[Tensor, int]]:
    """The masks that multiply the result of a step, with their dimensions."""
    for axis, dim in step.masked if masks else ():
        mask = masks[axis]
        if mask is not None and (mask.ndim == 2 or plan.folds[axis] is None):
            yield mask, dim


def _prepare(operands: Sequence[Tensor], step: Step) -> Tensor:
    """The parameter of a step: ordered, and multiplied element by element where there are several."""
    product = _order(operands[step.operands[0]], step.orders[0], step.shapes[0])
    for k, order, shape in zip(step.operands[1:], step.orders[1:], step.shapes[1:], strict=True):
        product = product * _order(operands[k], order, shape)
    return product if product.shape == step.shape else product.reshape(step.shape)


def _order(operand: Tensor, order: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
    operand = operand.permute(order) if order else operand
    return operand if operand.shape == shape else operand.reshape(shape)


def _absorb(running: Tensor, operand: Tensor, step: Step) -> Tensor:
    running = running.reshape(-1, *step.view)
    if step.kind == "right":
        return running @ operand
    if step.kind != "multiply":
        return multiply_batched(running.mT if step.kind == "turned" else running, operand, step.n_last)
    product = running * operand
    return (product.sum(step.summed) if step.summed else product).to(running.dtype)


def multiply_batched(x: Tensor, matrix: Tensor, n_last: bool) -> Tensor:
    """``Σ_k x[p,k,q] matrix[k,n]`` without moving x: (P, k, q), (k, n) -> (P, q, n), or (P, n, q) if not n_last."""
    if torch.compiler.is_compiling():  # the compiler arranges the copies itself, and an exported graph stays plain
        y = x.mT @ matrix
        return y if n_last else y.mT
    if not x.is_meta and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(x.device.type)
        x, matrix = x.to(dtype), matrix.to(dtype)
    if not (torch.is_grad_enabled() and (x.requires_grad or matrix.requires_grad)):
        return _share(x, matrix, n_last)
    result: Tensor = _BatchedProduct.apply(x, matrix, n_last)
    return result


def _share(x: Tensor, matrix: Tensor, n_last: bool) -> Tensor:
    if matrix.numel() <= SMALL:
        matrix = matrix.contiguous()  # a transposed one takes twice as long
    shared = matrix.expand(x.shape[0], *matrix.shape)
    return torch.bmm(x.mT, shared) if n_last else torch.bmm(shared.mT, x)


class _BatchedProduct(torch.autograd.Function):
    """A batched product with one shared matrix.

    autograd's own derivatives would hold the matrix's gradient for every row before summing them, P times the
    matrix, and return the gradient of x in whatever layout falls out.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, matrix: Tensor, n_last: bool) -> Tensor:
        return _share(x, matrix, n_last)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        x, matrix, ctx.n_last = inputs
        ctx.save_for_backward(x, matrix)
        ctx.save_for_forward(x, matrix)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, matrix = ctx.saved_tensors
        gradient = gradient if ctx.n_last else gradient.mT  # (P, q, n)
        for_x = for_matrix = None
        if ctx.needs_input_grad[0]:  # (P, k, q), its layout that of x
            turned = x.stride(1) < x.stride(2)
            for_x = _share(gradient.mT, matrix.mT, turned)
            for_x = for_x.mT if turned else for_x
        if ctx.needs_input_grad[1]:
            for_matrix = _sum_products(x, gradient)
        return for_x, for_matrix, None

    @staticmethod
    def jvp(ctx: Any, x_tangent: Tensor, matrix_tangent: Tensor, _: None) -> Tensor:
        x, matrix = ctx.saved_tensors
        return _share(x_tangent, matrix, ctx.n_last) + _share(x, matrix_tangent, ctx.n_last)


def _sum_products(x: Tensor, y: Tensor) -> Tensor:
    """``Σ_p x[p] @ y[p]``: (P, k, q), (P, q, n) -> (k, n)."""
    if y.shape[2] <= x.shape[2]:  # n <= q: what is summed is no larger than x
        return torch.bmm(y.mT, x.mT).sum(0).mT  # a few rows rather than a few columns: half the time
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        # Sums as it goes; on a GPU that is P small kernels, and in half precision P roundings.
        return torch.addbmm(x.new_zeros(()), x, y, beta=0)
    return torch.einsum("pkq,pqn->kn", x, y)


def _align(mask: Tensor, dim: int, ndim: int) -> Tensor:
    """A mask (R,) or (B, R) as (1 or B, 1, .., R, .., 1) over a tensor of a batch and ndim more axes."""
    shape = [1] * (1 + ndim)
    shape[dim] = mask.shape[-1]
    shape[0] = mask.shape[0] if mask.ndim == 2 else 1
    return mask.view(shape)


def _multiply_by(tensor: Tensor, mask: Tensor) -> Tensor:
    return (tensor * mask).to(tensor.dtype)  # masks stay in float32 next to half precision


def multiply_along(tensor: Tensor, mask: Tensor, dim: int) -> Tensor:
    """``tensor * mask`` with the mask's last axis on ``dim`` (and its first, if any, on the batch)."""
    shape = [1] * tensor.ndim
    shape[dim] = mask.shape[-1]
    if mask.ndim == 2:
        shape[0] = mask.shape[0]
    return _multiply_by(tensor, mask.view(shape))
