"""Tensor regression on made-up data: the paper's synthetic experiment as a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import (
    Data,
    TensorSplit,
    check_size,
    choose,
    hold_out,
    require_positive,
    split_tensors,
)


def load_synthetic(
    *,
    seed: int = 0,
    shape: Sequence[int] = (25, 25, 25),
    rank: int = 10,
    format: Literal["cp", "tucker"] = "cp",
    n: int = 6000,
    noise: float = 0.0,
    validation: float = 0.1,
    test: float = 0.2,
) -> Data:
    """``y = ⟨X, W⟩ + noise``: white X, a weight W of low rank, y scaled to variance 1 (before noise).

    Args:
        seed: of the weight, the inputs, the noise and the split.
        shape: of X and W.
        rank: of W, the same in every mode for Tucker (but never above its size).
        format: of W: "cp" or "tucker", with Gaussian factors.
        n: how many examples; the paper has 6,000.
        noise: standard deviation of what is added to y, in units of its own.
        validation: fraction (or number) of the examples that are not tested, held out for choosing.
        test: fraction (or number) of the examples, held out for testing.

    Returns:
        Inputs (n, *shape) and targets (n,), float32, ``simulated=True``.

    Raises:
        TensorDropoutError: if an option is out of range.

    Example:
        >>> data = load_synthetic(shape=(5, 4), rank=2, n=100)
        >>> data.train.inputs.shape, data.outputs, data.simulated
        (torch.Size([72, 5, 4]), 1, True)
    """
    shape = check_size("synthetic: shape", shape)
    require_positive("synthetic", "rank", rank)
    require_positive("synthetic", "n", n)
    choose("synthetic", "format", format, ("cp", "tucker"))
    if not 0 <= noise < math.inf:
        raise TensorDropoutError(f"synthetic: noise must be 0 or more, not {noise!r}")
    generator = torch.Generator().manual_seed(seed)
    weight = draw_weight(shape, rank, format, generator)
    inputs = torch.randn(n, *shape, generator=generator)
    targets = inputs.flatten(1) @ weight.flatten() + noise * torch.randn(n, generator=generator)
    whole = TensorSplit(inputs, targets, [f"synthetic-{i:05d}" for i in range(n)])
    rest, tested = hold_out(torch.zeros(n), test, seed, "synthetic: test")
    kept, held = hold_out(torch.zeros(len(rest)), validation, seed, "synthetic: validation")
    train, validated, tests = split_tensors(whole, rest[kept], rest[held], tested)
    return Data(
        name="synthetic",
        task="regression",
        train=train,
        validation=validated,
        test=tests,
        input_shape=shape,
        outputs=1,
        classes=None,
        target="y",
        prepare=nn.Identity(),
        augment=None,
        simulated=True,
        provenance=f"SIMULATED: white inputs, a {format} weight of rank {rank}, drawn by tensor-dropout, seed {seed}.",
    )


def draw_weight(shape: Sequence[int], rank: int, format: str, generator: torch.Generator) -> Tensor:
    """A weight with Gaussian factors (and core), scaled to norm 1: then ⟨X, W⟩ has variance 1 for white X.

    Example:
        >>> weight = draw_weight((3, 4, 5), 2, "tucker", torch.Generator().manual_seed(0))
        >>> weight.shape, torch.linalg.matrix_rank(weight.flatten(1)).item()
        (torch.Size([3, 4, 5]), 2)
    """
    if format == "cp":
        weight = torch.randn(shape[0], rank, generator=generator)
        for size in shape[1:]:  # (..., R) -> (..., size, R)
            weight = weight.unsqueeze(-2) * torch.randn(size, rank, generator=generator)
        weight = weight.sum(-1)
    else:
        weight = torch.randn([min(rank, size) for size in shape], generator=generator)
        for size in shape:  # contract the first mode, append the new one: after all of them, the order is back
            factor = torch.randn(size, weight.shape[0], generator=generator)
            weight = torch.tensordot(weight, factor, dims=([0], [1]))
    return weight / weight.norm()
