"""Initialisation: a fresh tensor regression has the output variance of average pooling + ``nn.Linear``.

``nn.Linear`` on C pooled channels has weights ``F`` of variance 1/(3C). As a regression on the unpooled map that
is ``W[c,h,w,o] = F[o,c]/(H·W)``, of expected squared norm ``‖W‖² = O / (3·H·W)``. Every format is filled with
random directions of unit length first (in float32, whatever the default dtype: QR has no half precision) and then
scaled to this norm (exactly for TT and for Tucker "pool", on average otherwise), so that the variance is right at every
rank, also at rank 1, where a product of Gaussians has heavy tails. Mode 0 is read as the channels, the rest as space.
"""

from __future__ import annotations

import math
from math import prod
from typing import Literal

import torch
from torch import Tensor

Init = Literal["pool", "smooth", "normal"]
"""How a layer starts."""
WAVES, BEND = 2, 2.0
"""Of ``init="smooth"``: how many frequencies, and the length of the wave beside that of the pooling."""


def target_norm(input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> float:
    """``‖W‖`` of a pooled ``nn.Linear``: ``sqrt(O / (3·H·W))``."""
    return math.sqrt(prod(output_shape) / (3 * prod(input_shape[1:])))


def bias_bound(input_shape: tuple[int, ...]) -> float:
    """The bound of ``nn.Linear``'s uniform bias on pooled channels: ``1/sqrt(C)``."""
    return 1 / math.sqrt(input_shape[0])


def random_directions(matrix: Tensor) -> Tensor:
    """(size, R) with independent Gaussian columns of unit length."""
    return torch.nn.functional.normalize(torch.randn(matrix.shape, device=matrix.device, dtype=torch.float32), dim=0)


def fill_orthonormal_(matrix: Tensor) -> None:
    """Fill (size, R) with orthonormal columns; with more columns than rows, with columns of unit length."""
    directions = torch.empty(matrix.shape, device=matrix.device, dtype=torch.float32)
    torch.nn.init.orthogonal_(directions)
    matrix.copy_(directions / directions.norm(dim=0, keepdim=True))


def fill_pooling_parts_(matrix: Tensor) -> None:
    """Fill (size, R) with columns that differ and whose mean is average pooling, scaled to unit length.

    What each has beside the pooling is orthogonal to it and of unit length in the mean square.
    """
    size, rank = matrix.shape
    parts = torch.randn(size, rank, device=matrix.device, dtype=torch.float32)
    parts -= parts.mean(0)
    parts -= parts.mean(1, keepdim=True)
    length = parts.norm().clamp(min=torch.finfo(parts.dtype).tiny)  # 0 where the size is 1: nothing is orthogonal
    matrix.copy_(size**-0.5 + parts * (rank**0.5 / length))


def fill_bent_(matrix: Tensor) -> None:
    """Fill (size, R) with columns of unit length: average pooling, and a random wave of low frequency twice as long."""
    size, rank = matrix.shape
    places = torch.arange(size, device=matrix.device, dtype=torch.float32) + 0.5
    waves = [torch.cos(math.pi * k / size * places) for k in range(1, min(WAVES, size - 1) + 1)]
    columns = torch.ones(size, rank, device=matrix.device, dtype=torch.float32)
    if waves:
        basis = torch.nn.functional.normalize(torch.stack(waves, 1), dim=0)  # orthogonal to each other and to pooling
        parts = random_directions(torch.empty(len(waves), rank, device=matrix.device))
        columns = size**-0.5 + BEND * basis @ parts
    matrix.copy_(torch.nn.functional.normalize(columns, dim=0))


def fill_pooling_(matrix: Tensor) -> None:
    """Fill (size, R): the first column is average pooling, scaled to unit length, the others orthogonal to it."""
    size, rank = matrix.shape
    directions = torch.randn(size, rank, device=matrix.device, dtype=torch.float32)
    directions[:, 0] = 1.0
    orthonormal, triangle = torch.linalg.qr(directions)
    matrix.copy_(orthonormal * triangle.diagonal().sign())
