"""Ranks: from what the user asks (numbers, a fraction, "full") to one number per rank axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from tensor_dropout.errors import TensorDropoutError

Rank = int | float | Sequence[int] | Literal["full"]
"""Exact ranks, a fraction in (0, 1] of the dense parameter count, or "full"."""


def resolve_rank(
    rank: Any,
    full: tuple[int, ...],
    largest: tuple[int, ...],
    count: Callable[[tuple[int, ...]], int],
    dense: int,
    where: str,
) -> tuple[int, ...]:
    """One rank per axis.

    Args:
        rank: what the user asked: "full"; a sequence with one rank per axis; one integer for all axes, cut at the
            largest rank of each; or a float, the largest ranks with at most that fraction of the dense parameters.
        full: what "full" means: the ranks at which any weight can be written.
        largest: the largest rank that each axis accepts; for most formats ``full``.
        count: the number of parameters at given ranks.
        dense: the number of entries of the dense weight.
        where: the layer's name, for messages.

    Raises:
        TensorDropoutError: if the ranks are of the wrong kind, number or size.
    """
    if isinstance(rank, str) and rank == "full":
        return full
    rank = plain_numbers(rank)
    if type(rank) is int:
        if not 1 <= rank <= max(largest):
            raise TensorDropoutError(f"{where}: rank is between 1 and {max(largest)} (full rank {full}), got {rank}")
        return tuple(min(rank, most) for most in largest)
    if isinstance(rank, float):
        return fraction_rank(rank, largest, count, dense, where)
    if isinstance(rank, Sequence) and not isinstance(rank, str) and all(type(r) is int for r in rank):
        if len(rank) != len(full):
            raise TensorDropoutError(f"{where}: rank needs {len(full)} numbers, got {len(rank)}: {tuple(rank)}")
        for axis, (r, most) in enumerate(zip(rank, largest, strict=True)):
            if not 1 <= r <= most:
                raise TensorDropoutError(
                    f"{where}: rank {r} at position {axis} of {tuple(rank)} is not between 1 and the "
                    f"{'full' if largest == full else 'largest'} rank {most} (full rank {full})"
                )
        return tuple(rank)
    raise TensorDropoutError(
        f"{where}: rank is 'full', an integer, a sequence of integers, or a float in (0, 1] (the fraction of the "
        f"dense parameters), got {rank!r}"
    )


def plain_numbers(value: Any) -> Any:
    """Numbers of NumPy, alone, in an array or in a sequence, as Python's; anything else as it is."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = [plain_numbers(each) for each in value]
        return plain if isinstance(value, list) else tuple(plain)
    return value.tolist() if type(value).__module__ == "numpy" else value


def fraction_rank(
    fraction: float, largest: tuple[int, ...], count: Callable[[tuple[int, ...]], int], dense: int, where: str
) -> tuple[int, ...]:
    """The ranks in proportion to the largest ones with at most ``fraction * dense`` parameters."""
    if not 0 < fraction <= 1:
        raise TensorDropoutError(
            f"{where}: a float rank is a fraction of the dense parameters in (0, 1], got {fraction}; "
            "write an integer for an exact rank"
        )
    budget = math.floor(fraction * dense * (1 + 1e-9))  # n / dense, as a float, must allow n parameters
    ones = (1,) * len(largest)
    if count(ones) > budget:
        least = math.ceil(count(ones) / dense * 10_000) / 10_000
        advice = f"ask for a fraction of at least {least:g}" if least <= 1 else "write rank=1"
        raise TensorDropoutError(
            f"{where}: rank={fraction:g} allows {budget} parameters, but rank 1 already has {count(ones)}; {advice}"
        )
    low, high = 0, max(largest)  # how far along the way from 1 to full, in steps of the largest mode

    def at(step: int) -> tuple[int, ...]:
        return tuple(max(1, most * step // max(largest)) for most in largest)

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if count(at(middle)) <= budget else (low, middle - 1)
    return at(low)


def resolve_shape(shape: Any, name: str, where: str) -> tuple[int, ...]:
    """A shape given as an int or a sequence of ints, as a tuple of at least one positive size."""
    shape = plain_numbers(shape)
    sizes = (shape,) if type(shape) is int else shape
    valid = isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) > 0
    if not valid or not all(type(size) is int and size > 0 for size in sizes):
        raise TensorDropoutError(
            f"{where}: {name} is a positive integer (1 for a scalar) or a tuple of them, got {shape!r}"
        )
    return tuple(sizes)
