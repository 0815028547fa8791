"""The kernels that meet the features, for Tucker: ``Y[b, t, c] = mask[b, t] Σ_s S[s, t] X[b, c, s]`` and its gradients.

s runs over the spatial positions and t over the spatial ranks, both joint: ``S = U1 ⊗ U2 ⊗ U3`` (Kronecker), formed in
registers from the small factors. Channels first and channels last differ in strides alone.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tensor_dropout.kernels.dispatch import MAX_SPATIAL_MODES
from tensor_dropout.kernels.products import mask_stride, multiply, next_power, precision, weight_gradient


class Space(NamedTuple):
    """The spatial factors and their masks, filled up to three modes (None, size 1).

    Attributes:
        factors: (P_n, T_n) each, contiguous.
        masks: (T_n,), (B, T_n) or None each.
        sizes: P_1, P_2, P_3.
        ranks: T_1, T_2, T_3.
    """

    factors: tuple[Tensor | None, ...]
    masks: tuple[Tensor | None, ...]
    sizes: tuple[int, ...]
    ranks: tuple[int, ...]

    @property
    def constants(self) -> dict[str, int]:
        """What the kernels are compiled for."""
        (P1, P2, P3), (T1, T2, T3) = self.sizes, self.ranks
        blocks = {"PB": next_power(P1 * P2 * P3), "TB": next_power(T1 * T2 * T3)}
        return {"P1": P1, "P2": P2, "P3": P3, "T1": T1, "T2": T2, "T3": T3, **blocks}


def fill_space(factors: list[Tensor], masks: list[Tensor | None]) -> Space:
    """One to three spatial factors, (P_n, T_n), with their masks."""
    missing = MAX_SPATIAL_MODES - len(factors)
    return Space(
        (*factors, *[None] * missing),
        (*masks, *[None] * missing),
        tuple(factor.shape[0] for factor in factors) + (1,) * missing,
        tuple(factor.shape[1] for factor in factors) + (1,) * missing,
    )


@triton.jit
def entry(f, p, t, T, inside):
    """``f[p, t]`` for a factor of T columns; 1 where there is none."""
    if f is not None:
        value = tl.load(f + p * T + t, mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.where(inside, 1.0, 0.0)
    return value


@triton.jit
def joint_entry(
    f1, f2, f3, s, t, inside,
    P2: tl.constexpr, P3: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
):  # fmt: skip
    """``S[s, t]``, zero outside."""
    value = entry(f1, s // (P2 * P3), t // (T2 * T3), T1, inside)
    value *= entry(f2, (s // P3) % P2, (t // T3) % T2, T2, inside)
    return value * entry(f3, s % P3, t % T3, T3, inside)


@triton.jit
def mode_mask(m, b, stride, t, inside):
    """The mask of sample b on one mode; 1 where there is none."""
    if m is not None:  # noqa: SIM108 (Triton compiles one branch only)
        value = tl.load(m + b * stride + t, mask=inside, other=0.0)
    else:
        value = tl.where(inside, 1.0, 0.0)
    return value


@triton.jit
def joint_mask(m1, m2, m3, b, stride1, stride2, stride3, t, inside, T2: tl.constexpr, T3: tl.constexpr):
    """The mask of sample b on the joint ranks t."""
    value = mode_mask(m1, b, stride1, t // (T2 * T3), inside)
    value *= mode_mask(m2, b, stride2, (t // T3) % T2, inside)
    return value * mode_mask(m3, b, stride3, t % T3, inside)


@triton.jit
def lay_out_kernel(
    x, y, C, P, x_batch, x_channel, x_space, y_batch, y_channel, y_space, BC: tl.constexpr, PB: tl.constexpr
):  # fmt: skip
    """``y = x`` for one sample and a block of channels, from one layout to another."""
    b = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BC + tl.arange(0, BC)
    s = tl.arange(0, PB)
    inside = (s < P)[:, None] & (c < C)[None, :]
    X = tl.load(x + b * x_batch + s[:, None] * x_space + c[None, :] * x_channel, mask=inside, other=0.0)
    tl.store(y + b * y_batch + s[:, None] * y_space + c[None, :] * y_channel, X, mask=inside)


@triton.jit
def project_kernel(
    x, y, f1, f2, f3, m1, m2, m3, C, x_batch, x_channel, x_space, stride1, stride2, stride3,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    PB: tl.constexpr, TB: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One sample, every n-th block of channels: (T, P) times (P, BC)."""
    b = tl.program_id(1)
    s, t = tl.arange(0, PB), tl.arange(0, TB)
    P: tl.constexpr = P1 * P2 * P3
    T: tl.constexpr = T1 * T2 * T3
    S = joint_entry(f1, f2, f3, s[None, :], t[:, None], (s < P)[None, :] & (t < T)[:, None], P2, P3, T1, T2, T3)
    kept = joint_mask(m1, m2, m3, b, stride1, stride2, stride3, t, t < T, T2, T3)
    for start in range(tl.program_id(0) * BC, C, tl.num_programs(0) * BC):
        c = start + tl.arange(0, BC)
        where = b.to(tl.int64) * x_batch + s[:, None] * x_space + c[None, :] * x_channel
        X = tl.load(x + where, mask=(s < P)[:, None] & (c < C)[None, :], other=0.0)
        Y = multiply(S.to(X.dtype), X, tl.zeros((TB, BC), tl.float32), PRECISION) * kept[:, None]
        target = (b * T + t).to(tl.int64)[:, None] * C + c[None, :]
        tl.store(y + target, Y.to(y.dtype.element_ty), mask=(t < T)[:, None] & (c < C)[None, :])


@triton.jit
def load_gradient(
    dy, m1, m2, m3, b, c, t, C, stride1, stride2, stride3, T: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr
):  # fmt: skip
    """``mask ⊙ dY`` of sample b: (T, channels)."""
    source = (b * T + t).to(tl.int64)[:, None] * C + c[None, :]
    dY = tl.load(dy + source, mask=(t < T)[:, None] & (c < C)[None, :], other=0.0)
    kept = joint_mask(m1, m2, m3, b, stride1, stride2, stride3, t, t < T, T2, T3)
    return (dY * kept[:, None]).to(dY.dtype)


@triton.jit
def sum_kernel(
    dy, x, dS, m1, m2, m3, y, dz, dU0, B, C, R, tiles, parts, x_batch, x_channel, x_space, stride1, stride2, stride3,
    P: tl.constexpr, T: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    PB: tl.constexpr, TB: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    UC: tl.constexpr, UR: tl.constexpr, UM: tl.constexpr,
):  # fmt: skip
    """Side by side: ``dS = Σ X (mask ⊙ dY)ᵀ`` in the first ``parts`` programs, in the others ``dU0 = Yᵀ dZ``."""
    program = tl.program_id(0)
    if program < parts:
        s, t = tl.arange(0, PB), tl.arange(0, TB)
        part = tl.zeros((PB, TB), tl.float32)
        across = tl.cdiv(C, BC)
        for tile in range(program, tiles, parts):
            b = tile // across
            c = (tile % across) * BC + tl.arange(0, BC)
            dY = load_gradient(dy, m1, m2, m3, b, c, t, C, stride1, stride2, stride3, T, T2, T3)
            where = b.to(tl.int64) * x_batch + s[:, None] * x_space + c[None, :] * x_channel
            X = tl.load(x + where, mask=(s < P)[:, None] & (c < C)[None, :], other=0.0)
            part = multiply(X, tl.trans(dY), part, PRECISION)
        target = program * (P * T) + s[:, None] * T + t[None, :]
        tl.store(dS + target, part, mask=(s < P)[:, None] & (t < T)[None, :])
    else:
        weight_gradient(dz, y, dU0, None, program - parts, B * T, R, C, 0, R, 1, 0, PRECISION, UC, UR, UM)


@triton.jit
def spread_kernel(
    dy, dx, dS, f1, f2, f3, d1, d2, d3, m1, m2, m3,
    C, parts, rows, x_batch, x_channel, x_space, stride1, stride2, stride3,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    PB: tl.constexpr, TB: tl.constexpr, BC: tl.constexpr, PRECISION: tl.constexpr,
    NB: tl.constexpr, E1: tl.constexpr, E2: tl.constexpr, E3: tl.constexpr,
):  # fmt: skip
    """Side by side: the first ``rows`` programs each make a row of a factor's gradient, the others write ``dX``."""
    program = tl.program_id(0)
    if program < rows:
        if program < P1:
            _factor_row(dS, f1, f2, f3, d1, parts, program, 1, P1, P2, P3, T1, T2, T3, P2 * P3, T1, E1, NB)
        elif program < P1 + P2:
            if d2 is not None:
                _factor_row(dS, f1, f2, f3, d2, parts, program - P1, 2, P1, P2, P3, T1, T2, T3, P1 * P3, T2, E2, NB)
        elif d3 is not None:
            _factor_row(dS, f1, f2, f3, d3, parts, program - P1 - P2, 3, P1, P2, P3, T1, T2, T3, P1 * P2, T3, E3, NB)
    elif dx is not None:
        P: tl.constexpr = P1 * P2 * P3
        T: tl.constexpr = T1 * T2 * T3
        s, t = tl.arange(0, PB), tl.arange(0, TB)
        across = tl.cdiv(C, BC)
        b = (program - rows) // across
        c = ((program - rows) % across) * BC + tl.arange(0, BC)
        S = joint_entry(f1, f2, f3, s[:, None], t[None, :], (s < P)[:, None] & (t < T)[None, :], P2, P3, T1, T2, T3)
        dY = load_gradient(dy, m1, m2, m3, b, c, t, C, stride1, stride2, stride3, T, T2, T3)
        dX = multiply(S.to(dY.dtype), dY, tl.zeros((PB, BC), tl.float32), PRECISION)
        where = b.to(tl.int64) * x_batch + s[:, None] * x_space + c[None, :] * x_channel
        tl.store(dx + where, dX.to(dx.dtype.element_ty), mask=(s < P)[:, None] & (c < C)[None, :])


@triton.jit
def _factor_row(
    dS, f1, f2, f3, d, parts, row, MODE: tl.constexpr,
    P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, T1: tl.constexpr, T2: tl.constexpr, T3: tl.constexpr,
    OTHERS: tl.constexpr, RANK: tl.constexpr, E: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    T: tl.constexpr = T1 * T2 * T3
    e = tl.arange(0, E)  # (position among the other modes, joint rank)
    other, t = e // T, e % T
    inside = e < OTHERS * T
    if MODE == 1:
        s = row * (P2 * P3) + other
        weight = entry(f2, (s // P3) % P2, (t // T3) % T2, T2, inside) * entry(f3, s % P3, t % T3, T3, inside)
        mine = t // (T2 * T3)
    elif MODE == 2:
        s = (other // P3) * (P2 * P3) + row * P3 + other % P3
        weight = entry(f1, s // (P2 * P3), t // (T2 * T3), T1, inside) * entry(f3, s % P3, t % T3, T3, inside)
        mine = (t // T3) % T2
    else:
        s = other * P3 + row
        weight = entry(f1, s // (P2 * P3), t // (T2 * T3), T1, inside)
        weight *= entry(f2, (s // P3) % P2, (t // T3) % T2, T2, inside)
        mine = t % T3
    total = tl.zeros((NB, E), tl.float32)
    for start in range(0, parts, NB):
        n = start + tl.arange(0, NB)
        where = n[:, None] * (P1 * P2 * P3 * T) + (s * T + t)[None, :]
        total += tl.load(dS + where, mask=(n < parts)[:, None] & inside[None, :], other=0.0)
    value = tl.sum(total, 0) * weight
    for r in tl.static_range(RANK):
        gradient = tl.sum(tl.where(mine == r, value, 0.0), 0)
        tl.store(d + row * RANK + r, gradient.to(d.dtype.element_ty))


class Pace(NamedTuple):
    """How the kernels that meet the features are launched; the fastest of a sweep on an H200."""

    block: int
    warps: int
    stages: int


PROJECT = {True: Pace(64, 4, 3), False: Pace(128, 4, 2)}
SUM = {True: Pace(64, 4, 4), False: Pace(128, 4, 1)}
SPREAD = {True: Pace(128, 4, 1), False: Pace(64, 4, 1)}
"""For channels last (True) and first (False)."""
SPLITS = {True: 8, False: 32}
"""Programs for each sample that share its channels."""
PARTS = 2
"""Programs for each multiprocessor that sum dS."""
SUM_TILE = (64, 64, 64)
"""Channels, ranks and rows of a tile of dU0."""


def channels_last(x: Tensor) -> bool:
    """Whether the channels of (B, C, P) lie side by side."""
    return x.stride(1) == 1


def lay_out(x: Tensor, *, last: bool) -> Tensor:
    """Features (B, C, P) with the channels last, or first, side by side; torch's own copy is several times slower."""
    if channels_last(x) == last:
        return x
    B, C, P = x.shape
    y = x.new_empty(B, P, C).mT if last else x.new_empty(B, C, P)
    BC = min(64, next_power(C))
    lay_out_kernel[(triton.cdiv(C, BC), B)](x, y, C, P, *x.stride(), *y.stride(), BC=BC, PB=next_power(P))
    return y


def project(x: Tensor, space: Space) -> Tensor:
    """``Y`` (B, T, C) from features (B, C, P) of any strides."""
    B, C, _ = x.shape
    y = x.new_empty(B, prod(space.ranks), C)
    pace = PROJECT[channels_last(x)]
    BC = min(pace.block, next_power(C))
    project_kernel[(min(SPLITS[channels_last(x)], triton.cdiv(C, BC)), B)](
        x, y, *space.factors, *space.masks, C, *x.stride(), *map(mask_stride, space.masks),
        **space.constants, BC=BC, PRECISION=precision(), num_warps=pace.warps, num_stages=pace.stages,
    )  # fmt: skip
    return y


def sum_features(dy: Tensor, x: Tensor, space: Space, y: Tensor, dz: Tensor, U0: Tensor) -> tuple[Tensor, Tensor]:
    """``dS`` in parts (n, P, T), and ``dU0 = Yᵀ dZ`` in the dtype of U0."""
    (B, C, P), R, T = x.shape, U0.shape[1], prod(space.ranks)
    pace = SUM[channels_last(x)]
    BC = min(pace.block, next_power(C))
    UC, UR, UM = map(min, SUM_TILE, (next_power(C), next_power(R), next_power(B * T)))
    tiles = B * triton.cdiv(C, BC)
    parts = min(PARTS * processors(x), tiles)
    dS, dU0 = dy.new_empty(parts, P, T, dtype=torch.float32), torch.empty_like(U0)
    sum_kernel[(parts + triton.cdiv(C, UC) * triton.cdiv(R, UR),)](
        dy, x, dS, *space.masks, y, dz, dU0, B, C, R, tiles, parts, *x.stride(), *map(mask_stride, space.masks),
        P=P, T=T, T2=space.ranks[1], T3=space.ranks[2], PB=next_power(P), TB=next_power(T), BC=BC,
        PRECISION=precision(), UC=UC, UR=UR, UM=UM, num_warps=pace.warps, num_stages=pace.stages,
    )  # fmt: skip
    return dS, dU0


def spread(dy: Tensor, x: Tensor, dx: Tensor | None, dS: Tensor, space: Space) -> list[Tensor]:
    """The gradients of the spatial factors; fills ``dx``, laid out as x, if it is wanted."""
    B, C, _ = x.shape
    pace = SPREAD[channels_last(x)]
    BC = min(pace.block, next_power(C))
    present = [factor for factor in space.factors if factor is not None]
    gradients = [torch.empty_like(factor) for factor in present]
    rows = sum(len(factor) for factor in present)
    lengths = [next_power(dS[0].numel() // size) for size in space.sizes]
    spread_kernel[(rows + (0 if dx is None else B * triton.cdiv(C, BC)),)](
        dy, dx, dS, *space.factors, *gradients, *[None] * (MAX_SPATIAL_MODES - len(gradients)), *space.masks,
        C, len(dS), rows, *(x if dx is None else dx).stride(), *map(mask_stride, space.masks),
        **space.constants, BC=BC, PRECISION=precision(), NB=max(1, 8192 // max(lengths)),
        E1=lengths[0], E2=lengths[1], E3=lengths[2], num_warps=pace.warps, num_stages=pace.stages,
    )  # fmt: skip
    return gradients


def processors(x: Tensor) -> int:
    """The multiprocessors of the tensor's GPU."""
    if not x.is_cuda:
        return 2  # Triton's interpreter
    return torch.cuda.get_device_properties(x.device).multi_processor_count
