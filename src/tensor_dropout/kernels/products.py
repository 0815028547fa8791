"""Products of activations with a parameter, masked as they are written; both gradients of one in one launch.

``y = (x W + bias) ⊙ mask`` with x (M, K) and y (M, N) contiguous. The rows of W may lie in two strides, k =
(k // INNER, k % INNER): so a core is read and its gradient written where it lies, without a permuted copy.
"""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


class Matrix(NamedTuple):
    """A parameter as the matrix W (K, N): where entry (k, n) lies.

    Attributes:
        data: the parameter.
        rows: K.
        columns: N.
        inner: 0 if the rows lie in one stride, else how many rows share an outer step.
        outer: the stride of ``k // inner``.
        row: the stride of ``k % inner``, or of k.
        column: the stride of n.
    """

    data: Tensor
    rows: int
    columns: int
    inner: int
    outer: int
    row: int
    column: int


def plain(W: Tensor) -> Matrix:
    """A matrix (K, N) as it lies."""
    (rows, columns), (row, column) = W.shape, W.stride()
    return Matrix(W, rows, columns, 0, 0, row, column)


def precision() -> str:
    """How float32 is multiplied: as torch's own matrix products are told to."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def next_power(n: int, least: int = 16) -> int:
    """The power of two from n on; at least 16, the smallest side of a tensor-core product."""
    return max(least, triton.next_power_of_2(n))


@triton.jit
def multiply(left, right, total, PRECISION: tl.constexpr):
    """``total + left right``, accumulated in float32."""
    if INTERPRETED:  # Triton's interpreter multiplies the bits of bfloat16 as integers
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, total, input_precision=PRECISION)


@triton.jit
def row_offsets(k, INNER: tl.constexpr, outer, row):
    """Where row k lies."""
    if INNER == 0:  # noqa: SIM108 (Triton compiles one branch only)
        offsets = k * row
    else:
        offsets = (k // INNER) * outer + (k % INNER) * row
    return offsets


@triton.jit
def masked(total, mask, m, n, inside, stride, ROWS: tl.constexpr, PERIOD: tl.constexpr):
    """``total ⊙ mask``: row m belongs to sample ``m // ROWS``, column n to entry ``n % PERIOD`` of its mask."""
    if mask is not None:
        where = (m // ROWS)[:, None] * stride + (n % PERIOD)[None, :]
        total *= tl.load(mask + where, mask=inside, other=0.0)
    return total


@triton.jit
def linear_kernel(
    x, W, bias, mask, y, M, N, K, outer, row, column, mask_stride,
    INNER: tl.constexpr, ROWS: tl.constexpr, PERIOD: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile (BM, BN) of ``y = (x W + bias) ⊙ mask``."""
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        left = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        where = row_offsets(k, INNER, outer, row)[:, None] + n[None, :] * column
        right = tl.load(W + where, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
        total = multiply(left, right.to(left.dtype), total, PRECISION)
    inside = (m < M)[:, None] & (n < N)[None, :]
    if bias is not None:
        total += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    total = masked(total, mask, m, n, inside, mask_stride, ROWS, PERIOD)
    tl.store(y + m[:, None] * N + n[None, :], total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def input_gradient(
    g, W, mask, dx, tile, M, N, K, outer, row, column, mask_stride,
    INNER: tl.constexpr, PERIOD: tl.constexpr, PRECISION: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """One tile (BM, BK) of ``dx = (g Wᵀ) ⊙ mask``, one row per sample."""
    across = tl.cdiv(K, BK)
    m = (tile // across) * BM + tl.arange(0, BM)
    k = (tile % across) * BK + tl.arange(0, BK)
    total = tl.zeros((BM, BK), tl.float32)
    for start in range(0, N, BN):
        n = start + tl.arange(0, BN)
        left = tl.load(g + m[:, None] * N + n[None, :], mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        where = row_offsets(k, INNER, outer, row)[None, :] + n[:, None] * column
        right = tl.load(W + where, mask=(k < K)[None, :] & (n < N)[:, None], other=0.0)
        total = multiply(left, right.to(left.dtype), total, PRECISION)
    inside = (m < M)[:, None] & (k < K)[None, :]
    total = masked(total, mask, m, k, inside, mask_stride, 1, PERIOD)
    tl.store(dx + m[:, None] * K + k[None, :], total.to(dx.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient(
    g, x, dW, dbias, tile, M, N, K, outer, row, column, INNER: tl.constexpr, PRECISION: tl.constexpr,
    BK: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """One tile (BK, BN) of ``dW = xᵀ g``; the tiles of the first row sum ``dbias = Σ_m g`` too."""
    across = tl.cdiv(N, BN)
    k = (tile // across) * BK + tl.arange(0, BK)
    n = (tile % across) * BN + tl.arange(0, BN)
    total = tl.zeros((BK, BN), tl.float32)
    sums = tl.zeros((BN,), tl.float32)
    for start in range(0, M, BM):
        m = start + tl.arange(0, BM)
        left = tl.load(x + m[None, :] * K + k[:, None], mask=(m < M)[None, :] & (k < K)[:, None], other=0.0)
        right = tl.load(g + m[:, None] * N + n[None, :], mask=(m < M)[:, None] & (n < N)[None, :], other=0.0)
        total = multiply(left, right, total, PRECISION)
        if dbias is not None:
            sums += tl.sum(right.to(tl.float32), 0)
    where = row_offsets(k, INNER, outer, row)[:, None] + n[None, :] * column
    tl.store(dW + where, total.to(dW.dtype.element_ty), mask=(k < K)[:, None] & (n < N)[None, :])
    if dbias is not None:  # noqa: SIM102 (known when compiled; the next is not)
        if tile < across:
            tl.store(dbias + n, sums.to(dbias.dtype.element_ty), mask=n < N)


@triton.jit
def linear_backward_kernel(
    g, x, W, mask, dx, dW, dbias, M, N, K, outer, row, column, mask_stride, x_tiles,
    INNER: tl.constexpr, PERIOD: tl.constexpr, PRECISION: tl.constexpr,
    XM: tl.constexpr, XK: tl.constexpr, XN: tl.constexpr, WK: tl.constexpr, WN: tl.constexpr, WM: tl.constexpr,
):  # fmt: skip
    """Both gradients side by side: the first ``x_tiles`` programs make dx, the others dW."""
    tile = tl.program_id(0)
    if tile < x_tiles:
        input_gradient(
            g, W, mask, dx, tile, M, N, K, outer, row, column, mask_stride, INNER, PERIOD, PRECISION, XM, XK, XN
        )
    else:
        weight_gradient(
            g, x, dW, dbias, tile - x_tiles, M, N, K, outer, row, column, INNER, PRECISION, WK, WN, WM
        )  # fmt: skip


def linear(x: Tensor, W: Matrix, bias: Tensor | None, mask: Tensor | None, rows: int = 1) -> Tensor:
    """``(x W + bias) ⊙ mask``.

    Args:
        x: (M, K), contiguous.
        W: (K, N).
        bias: (N,).
        mask: (R,), or (M / rows, R), one for each sample; entry ``n % R`` multiplies column n.
        rows: how many rows of x belong to a sample.
    """
    M, K, N = len(x), W.rows, W.columns
    y = x.new_empty(M, N)
    BM, BN, BK, warps, stages = forward_tile(M, N, K, x.dtype)
    linear_kernel[(triton.cdiv(M, BM), triton.cdiv(N, BN))](
        x, W.data, bias, mask, y, M, N, K, W.outer, W.row, W.column, mask_stride(mask),
        INNER=W.inner, ROWS=rows, PERIOD=period(mask), PRECISION=precision(),
        BM=BM, BN=BN, BK=BK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def linear_backward(
    g: Tensor, x: Tensor, W: Matrix, dbias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x W`` in one launch: ``dx = (g Wᵀ) ⊙ mask`` and ``dW = xᵀ g``, in the parameter's dtype.

    ``mask`` is the one that x was multiplied by, so dx is the gradient before it; ``dbias`` is filled if given.
    """
    (M, N), K = g.shape, W.rows
    dx, dW = torch.empty_like(x), torch.empty_like(W.data)
    XM, XK, XN, WK, WN, WM, warps, stages = backward_tiles(M, N, K, x.dtype)
    x_tiles = triton.cdiv(M, XM) * triton.cdiv(K, XK)
    linear_backward_kernel[(x_tiles + triton.cdiv(K, WK) * triton.cdiv(N, WN),)](
        g, x, W.data, mask, dx, dW, dbias, M, N, K, W.outer, W.row, W.column, mask_stride(mask), x_tiles,
        INNER=W.inner, PERIOD=period(mask), PRECISION=precision(),
        XM=XM, XK=XK, XN=XN, WK=WK, WN=WN, WM=WM, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dx, dW


def period(mask: Tensor | None) -> int:
    """The length of a mask."""
    return 1 if mask is None else mask.shape[-1]


def mask_stride(mask: Tensor | None) -> int:
    """From one sample's mask to the next: 0 where all share one."""
    return 0 if mask is None or mask.ndim == 1 else mask.stride(0)


def forward_tile(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Tile and pipeline of a forward product; the fastest of a sweep on an H200."""
    deep = 64 if dtype == torch.float32 else 128
    if M <= 512:
        BM, BN, warps = 64, (16 if M * N <= 2**16 else 32), 4
    elif M * N <= 2**19:
        BM, BN, warps = 64, 64, 8
    else:
        BM, BN, warps = 64, 128, 4
    return min(BM, next_power(M)), min(BN, next_power(N)), min(deep, next_power(K)), warps, 3


def backward_tiles(M: int, N: int, K: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Tiles of dx (XM, XK, XN) and of dW (WK, WN, WM), and the pipeline; the fastest of a sweep on an H200."""
    half = 2 if dtype == torch.float32 else 1
    if M * K <= 2**17:  # few numbers out of long sums
        tiles = (16, 32, 256 // half, 64, 64, 128 // half)
    else:
        tiles = (64, 64, 64 // half, 128, 128, 64 // half)
    least = [next_power(size) for size in (M, K, N, K, N, M)]
    return *map(min, tiles, least), 4, 3
