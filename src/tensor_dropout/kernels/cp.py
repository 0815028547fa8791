"""A CP head as one operator: ``tensor_dropout::cp_head``.

``A = X U0`` over all positions, ``a = mask ⊙ Σ_s K ⊙ A``, ``out = a Vᵀ + b``. The products with U0 are large and plain:
cuBLAS makes them. Saved for backward: ``A`` (B, P, R), the features after the channel factor, and a (B, R).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from tensor_dropout.kernels.columns import collect, distribute
from tensor_dropout.kernels.products import linear, linear_backward, plain
from tensor_dropout.kernels.spatial import channels_last, fill_space, lay_out
from tensor_dropout.kernels.tucker import differentiate


@torch.library.custom_op("tensor_dropout::cp_head", mutates_args=())
def cp_head(
    x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``⟨x, W̃⟩ + b``.

    Args:
        x: (B, C, P): features, spatial modes joint; contiguous, or channels last.
        factors: U0 (C, R), the spatial factors (P_n, R), V (O, R); contiguous.
        bias: (O,).
        mask: None, (R,) or (B, R), in float32.

    Returns:
        The output (B, O), and what backward needs: A (B, P, R), a (B, R).
    """
    with torch.cuda.device_of(x):
        A = channel_product(x, factors[0].to(x.dtype))
        a = collect(A, fill_space(list(factors[1:-1]), []), mask)
        return linear(a, plain(factors[-1].mT), bias, None), A, a


@cp_head.register_fake
def _(x: Tensor, factors: Any, bias: Any, mask: Any) -> tuple[Tensor, Tensor, Tensor]:
    (B, _, P), (outputs, R) = x.shape, factors[-1].shape
    return x.new_empty(B, outputs), x.new_empty(B, P, R), x.new_empty(B, R)


@torch.library.custom_op("tensor_dropout::cp_head_backward", mutates_args=())
def cp_head_backward(
    g: Tensor,
    x: Tensor,
    factors: Sequence[Tensor],
    bias: Tensor | None,
    mask: Tensor | None,
    A: Tensor,
    a: Tensor,
    wants_x: bool,
) -> tuple[Tensor, list[Tensor], Tensor]:
    """The gradients of x (empty if not wanted), the factors and the bias (empty if there is none)."""
    U0, V = factors[0], factors[-1]
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    with torch.cuda.device_of(x):
        da, dV = linear_backward(g, a, plain(V.mT), None if bias is None else dbias, mask)
        dA, small = distribute(da, A, fill_space(list(factors[1:-1]), []))
        dU0 = channel_gradient(x, dA).to(U0.dtype)
        dx = spread_channels(dA, U0.to(x.dtype), x) if wants_x else x.new_empty(0)
    return dx, [dU0, *small, dV.mT], dbias


@cp_head_backward.register_fake
def _(
    g: Tensor, x: Tensor, factors: Any, bias: Any, mask: Any, A: Any, a: Any, wants_x: bool
) -> tuple[Tensor, list[Tensor], Tensor]:
    dx = torch.empty_like(x) if wants_x else x.new_empty(0)
    dbias = x.new_empty(0) if bias is None else torch.empty_like(bias)
    return dx, [torch.empty_like(factor) for factor in factors], dbias


def rows_of(x: Tensor) -> Tensor:
    """Features (B, C, P) as a matrix (B·P, C); copied if the channels come first."""
    return lay_out(x, last=True).mT.reshape(-1, x.shape[1])


def channel_product(x: Tensor, U0: Tensor) -> Tensor:
    """``A_b = X_bᵀ U0``: (B, C, P), (C, R) -> (B, P, R)."""
    return (rows_of(x) @ U0).view(len(x), -1, U0.shape[1])


def channel_gradient(x: Tensor, dA: Tensor) -> Tensor:
    """``dU0 = Σ_b X_b dA_b``: (B, C, P), (B, P, R) -> (C, R)."""
    return rows_of(x).mT @ dA.flatten(0, 1)


def spread_channels(dA: Tensor, U0: Tensor, x: Tensor) -> Tensor:
    """``dX_b = U0 dA_bᵀ``, laid out as x."""
    dx = (dA.flatten(0, 1) @ U0.mT).view(len(x), -1, len(U0)).mT
    return lay_out(dx, last=channels_last(x))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, factors, bias, mask = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, bias, mask, *output[1:], *factors)


def _backward(ctx: Any, g: Tensor | None, *_: Any) -> tuple[Any, ...]:
    x, bias, mask, A, a, *factors = ctx.saved_tensors
    if g is None:
        return None, [None] * len(factors), None, None
    if torch.is_grad_enabled():  # create_graph=True: the gradients will be differentiated again
        dx, *dfactors, dbias = differentiate(
            lambda x, *p: composed_head(x, p[:-1], p[-1], mask), g, [x, *factors, bias]
        )
        return dx, dfactors, dbias, None
    wants_x = ctx.needs_input_grad[0]
    dx, dfactors, dbias = cp_head_backward(g.contiguous(), x, factors, bias, mask, A, a, wants_x)
    return (dx if wants_x else None), dfactors, (None if bias is None else dbias), None


cp_head.register_autograd(_backward, setup_context=_save)


def composed_head(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """The same head in torch's own operations: what is differentiated when gradients of gradients are asked for."""
    U0, *space, V = (factor.to(x.dtype) for factor in factors)
    columns = reduce(lambda left, right: (left[:, None] * right).flatten(0, 1), space)  # (P, R)
    a = torch.einsum("bcp,cr,pr->br", x, U0, columns)
    a = a if mask is None else (a * mask).to(a.dtype)
    out = a @ V.mT
    return out if bias is None else out + bias.to(out.dtype)
