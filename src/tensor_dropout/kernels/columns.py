"""What CP needs besides large products: ``a[b, r] = Σ_s K[s, r] A[b, s, r]`` and its gradients.

``A[b, s, r] = Σ_c X[b, c, s] U0[c, r]`` is one product over all positions s. Column r of ``K`` is the product of
column r of the spatial factors (Khatri–Rao), formed in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_dropout.kernels.dispatch import MAX_SPATIAL_MODES
from tensor_dropout.kernels.products import mask_stride, next_power
from tensor_dropout.kernels.spatial import Space, entry

BLOCK = 64
"""Ranks of a program."""
PARTS = 32
"""Over how many programs the samples are split when the gradients of the spatial factors are summed."""


@triton.jit
def column_entry(f1, f2, f3, s, r, inside, R, P2: tl.constexpr, P3: tl.constexpr):
    """``K[s, r]``, zero outside."""
    value = entry(f1, s // (P2 * P3), r, R, inside)
    value *= entry(f2, (s // P3) % P2, r, R, inside)
    return value * entry(f3, s % P3, r, R, inside)


@triton.jit
def collect_kernel(
    A, f1, f2, f3, mask, a, R, stride,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PB: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """``a`` of one sample and a block of ranks."""
    P: tl.constexpr = P1 * P2 * P3
    b = tl.program_id(1)
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    s = tl.arange(0, PB)
    inside = (s < P)[:, None] & (r < R)[None, :]
    held = tl.load(A + (b.to(tl.int64) * P + s)[:, None] * R + r[None, :], mask=inside, other=0.0).to(tl.float32)
    held *= column_entry(f1, f2, f3, s[:, None], r[None, :], inside, R, P2, P3)
    total = tl.sum(held, 0)
    if mask is not None:
        total *= tl.load(mask + b * stride + r, mask=r < R, other=0.0)
    tl.store(a + b.to(tl.int64) * R + r, total.to(a.dtype.element_ty), mask=r < R)


@triton.jit
def distribute_kernel(
    da, A, f1, f2, f3, dA, dK, B, R,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, PB: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """``dA[b, s, r] = da[b, r] K[s, r]``, and this program's part of ``dK[s, r] = Σ_b A[b, s, r] da[b, r]``."""
    P: tl.constexpr = P1 * P2 * P3
    r = tl.program_id(0) * BR + tl.arange(0, BR)
    s = tl.arange(0, PB)
    inside = (s < P)[:, None] & (r < R)[None, :]
    K = column_entry(f1, f2, f3, s[:, None], r[None, :], inside, R, P2, P3)
    total = tl.zeros((PB, BR), tl.float32)
    for b in range(tl.program_id(1), B, tl.num_programs(1)):
        d = tl.load(da + b * R + r, mask=r < R, other=0.0).to(tl.float32)[None, :]
        where = (tl.cast(b, tl.int64) * P + s)[:, None] * R + r[None, :]
        total += tl.load(A + where, mask=inside, other=0.0).to(tl.float32) * d
        tl.store(dA + where, (K * d).to(dA.dtype.element_ty), mask=inside)
    tl.store(dK + (tl.program_id(1) * P + s)[:, None] * R + r[None, :], total, mask=inside)


@triton.jit
def column_factor_kernel(
    dK, f1, f2, f3, d1, d2, d3, parts, R,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    O1: tl.constexpr, O2: tl.constexpr, O3: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """The gradient of one row of one factor: dK summed over the parts, times the other factors, summed."""
    row = tl.program_id(0)
    if row < P1:
        _column_row(dK, f1, f2, f3, d1, parts, R, row, 1, P1, P2, P3, P2 * P3, O1, NB, BR)
    elif row < P1 + P2:
        if d2 is not None:
            _column_row(dK, f1, f2, f3, d2, parts, R, row - P1, 2, P1, P2, P3, P1 * P3, O2, NB, BR)
    elif d3 is not None:
        _column_row(dK, f1, f2, f3, d3, parts, R, row - P1 - P2, 3, P1, P2, P3, P1 * P2, O3, NB, BR)


@triton.jit
def _column_row(
    dK, f1, f2, f3, d, parts, R, row, MODE: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr,
    OTHERS: tl.constexpr, OB: tl.constexpr, NB: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    i = tl.arange(0, NB * OB)  # (part, position among the other modes)
    other = i % OB
    r = tl.program_id(1) * BR + tl.arange(0, BR)
    within = (other < OTHERS)[:, None] & (r < R)[None, :]
    if MODE == 1:
        s = row * (P2 * P3) + other
        weight = entry(f2, (s // P3)[:, None] % P2, r[None, :], R, within)
        weight *= entry(f3, s[:, None] % P3, r[None, :], R, within)
    elif MODE == 2:
        s = (other // P3) * (P2 * P3) + row * P3 + other % P3
        weight = entry(f1, (s // (P2 * P3))[:, None], r[None, :], R, within)
        weight *= entry(f3, s[:, None] % P3, r[None, :], R, within)
    else:
        s = other * P3 + row
        weight = entry(f1, (s // (P2 * P3))[:, None], r[None, :], R, within)
        weight *= entry(f2, (s // P3)[:, None] % P2, r[None, :], R, within)
    total = tl.zeros((NB * OB, BR), tl.float32)
    for start in range(0, parts, NB):
        n = start + i // OB
        where = (n * (P1 * P2 * P3) + s)[:, None] * R + r[None, :]
        total += tl.load(dK + where, mask=within & (n < parts)[:, None], other=0.0)
    gradient = tl.sum(total * weight, 0)
    tl.store(d + row * R + r, gradient.to(d.dtype.element_ty), mask=r < R)


def collect(A: Tensor, space: Space, mask: Tensor | None) -> Tensor:
    """``a`` (B, R), masked, from ``A`` (B, P, R)."""
    B, P, R = A.shape
    a = A.new_empty(B, R)
    BR = min(128, next_power(R))
    collect_kernel[(triton.cdiv(R, BR), B)](
        A, *space.factors, mask, a, R, mask_stride(mask), **sizes(space), PB=next_power(P), BR=BR
    )
    return a


def distribute(da: Tensor, A: Tensor, space: Space) -> tuple[Tensor, list[Tensor]]:
    """``dA`` (B, P, R), and the gradients of the spatial factors."""
    B, P, R = A.shape
    dA = torch.empty_like(A)
    BR = min(BLOCK, next_power(R))
    parts = min(PARTS, B)
    dK = A.new_empty(parts, P, R, dtype=torch.float32)
    distribute_kernel[(triton.cdiv(R, BR), parts)](
        da, A, *space.factors, dA, dK, B, R, **sizes(space), PB=next_power(P), BR=BR
    )
    present = [factor for factor in space.factors if factor is not None]
    gradients = [torch.empty_like(factor) for factor in present]
    others = [next_power(P // size, 1) for size in space.sizes]
    BR = min(32, next_power(R))
    column_factor_kernel[(sum(len(factor) for factor in present), triton.cdiv(R, BR))](
        dK, *space.factors, *gradients, *[None] * (MAX_SPATIAL_MODES - len(gradients)), parts, R, **sizes(space),
        O1=others[0], O2=others[1], O3=others[2], NB=max(1, 256 // max(others)), BR=BR,
    )  # fmt: skip
    return dA, gradients


def sizes(space: Space) -> dict[str, int]:
    """P1, P2 and P3 as the kernels' constants."""
    return {f"P{n + 1}": size for n, size in enumerate(space.sizes)}
