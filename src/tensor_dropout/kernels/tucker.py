"""A Tucker head as one operator: ``tensor_dropout::tucker_head``.

``Y = m_s ⊙ (X ×_s S)``, ``Z = m_0 ⊙ (Y U0)``, ``h = m_N ⊙ (Z G)``, ``out = h Vᵀ + b``: four launches forward, five
backward. Saved for backward: Y (B, T, C) and the rank-space Z (B·T, R0) and h (B, Q).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tensor_dropout.kernels.products import Matrix, linear, linear_backward, plain
from tensor_dropout.kernels.spatial import fill_space, project, spread, sum_features
from tensor_dropout.layers.contraction import multiply_along


def core_matrix(core: Tensor) -> Matrix:
    """The core (R0, T.., Q) as a matrix of rows (t, r) and columns q, where it lies."""
    R0, Q = core.shape[0], core.shape[-1]
    T = core[0].numel() // Q
    return Matrix(core, T * R0, Q, R0, Q, T * Q, 1)


@torch.library.custom_op("tensor_dropout::tucker_head", mutates_args=())
def tucker_head(
    x: Tensor,
    factors: Sequence[Tensor],
    core: Tensor,
    bias: Tensor | None,
    masks: Sequence[Tensor | None],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``⟨x, W̃⟩ + b``.

    Args:
        x: (B, C, P): features, spatial modes joint; contiguous, or channels last.
        factors: U0 (C, R0), the spatial factors (P_n, R_n), V (O, Q); like the core contiguous.
        core: (R0, R_1, .., Q).
        bias: (O,).
        masks: for each rank axis None, (R,) or (B, R), in float32.

    Returns:
        The output (B, O), and what backward needs: Y (B, T, C), Z (B·T, R0), h (B, Q).
    """
    U0, V = factors[0], factors[-1]
    with torch.cuda.device_of(x):
        Y = project(x, fill_space(list(factors[1:-1]), list(masks[1:-1])))
        B, T, C = Y.shape
        Z = linear(Y.view(B * T, C), plain(U0), None, masks[0], rows=T)
        h = linear(Z.view(B, -1), core_matrix(core), None, masks[-1])
        return linear(h, plain(V.mT), bias, None), Y, Z, h


@tucker_head.register_fake
def _(x: Tensor, factors: Any, core: Tensor, bias: Any, masks: Any) -> tuple[Tensor, ...]:
    T = core[0].numel() // core.shape[-1]
    B, C, _ = x.shape
    out = x.new_empty(B, factors[-1].shape[0])
    return out, x.new_empty(B, T, C), x.new_empty(B * T, core.shape[0]), x.new_empty(B, core.shape[-1])


@torch.library.custom_op("tensor_dropout::tucker_head_backward", mutates_args=())
def tucker_head_backward(
    g: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    core: Tensor,
    bias: Tensor | None,
    masks: Sequence[Tensor | None],
    Y: Tensor,
    Z: Tensor,
    h: Tensor,
    wants_x: bool,
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """The gradients of x (empty if not wanted), the factors, the core and the bias (empty if there is none)."""
    U0, V = factors[0], factors[-1]
    B, T, _ = Y.shape
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    dx = torch.empty_like(x) if wants_x else x.new_empty(0)
    space = fill_space(list(factors[1:-1]), list(masks[1:-1]))
    with torch.cuda.device_of(x):
        dh, dV = linear_backward(g, h, plain(V.mT), None if bias is None else dbias, masks[-1])
        dZ, dcore = linear_backward(dh, Z.view(B, -1), core_matrix(core), None, masks[0])
        dY = dZ.view(B * T, -1) @ U0.to(x.dtype).mT  # large and plain: cuBLAS
        dS, dU0 = sum_features(dY, x, space, Y, dZ, U0)
        small = spread(dY, x, dx if wants_x else None, dS, space)
    return dx, [dU0, *small, dV.mT], dcore, dbias


@tucker_head_backward.register_fake
def _(
    g: Tensor, x: Tensor, factors: Any, core: Tensor, bias: Any, masks: Any, Y: Any, Z: Any, h: Any, wants_x: bool
) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    dx = torch.empty_like(x) if wants_x else x.new_empty(0)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    return dx, [torch.empty_like(factor) for factor in factors], torch.empty_like(core), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, factors, core, bias, masks = inputs
    ctx.n_factors = len(factors)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, core, bias, *output[1:], *factors, *masks)


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, core, bias, Y, Z, h, *rest = ctx.saved_tensors
    factors, masks = rest[: ctx.n_factors], rest[ctx.n_factors :]
    # torch takes a list with None in it for one argument, not for a list of tensors.
    nothing = None if any(mask is None for mask in masks) else [None] * len(masks)
    if g is None:
        return None, [None] * len(factors), None, None, nothing
    if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated again
        dx, *dfactors, dcore, dbias = differentiate(
            lambda x, *p: composed_head(x, p[:-2], p[-2], p[-1], masks), g, [x, *factors, core, bias]
        )
        return dx, dfactors, dcore, dbias, nothing
    dx, dfactors, dcore, dbias = tucker_head_backward(
        g.contiguous(), x, factors, core, bias, masks, Y, Z, h, ctx.needs_input_grad[0]
    )
    return (dx if ctx.needs_input_grad[0] else None), dfactors, dcore, (None if bias is None else dbias), nothing


tucker_head.register_autograd(_backward, setup_context=_save)


def composed_head(
    x: Tensor, factors: Sequence[Tensor], core: Tensor, bias: Tensor | None, masks: Sequence[Tensor | None]
) -> Tensor:
    """The same head in torch's own operations: what is differentiated when gradients of gradients are asked for."""
    y = x.unflatten(2, [factor.shape[0] for factor in factors[1:-1]])
    for mode, factor in enumerate(factors[:-1]):
        y = multiply_mode(y, factor.to(x.dtype), masks[mode], 1 + mode)
    h = y.flatten(1) @ core.flatten(0, -2).to(x.dtype)
    h = h if masks[-1] is None else (h * masks[-1]).to(h.dtype)
    out = h @ factors[-1].mT.to(x.dtype)
    return out if bias is None else out + bias.to(out.dtype)


def multiply_mode(y: Tensor, factor: Tensor, mask: Tensor | None, dim: int) -> Tensor:
    """``y ×_dim factorᵀ``, masked."""
    y = torch.movedim(torch.movedim(y, dim, -1) @ factor, -1, dim)
    return y if mask is None else multiply_along(y, mask, dim)


def differentiate(function: Any, g: Tensor, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of ``⟨g, function(*inputs)⟩``, themselves differentiable; None where none is wanted."""
    sources = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
    gradients = iter(torch.autograd.grad(function(*inputs), sources, g, create_graph=True))
    return [next(gradients) if tensor is not None and tensor.requires_grad else None for tensor in inputs]
