"""Where the fused heads are used: on CUDA, for the shapes they are made for, where the benchmark says that they win.

Everything else takes the plain path. This module imports no Triton: the operators are imported on first use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

HAS_TRITON = importlib.util.find_spec("triton") is not None
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_SPATIAL_MODES = 3
MAX_JOINT_RANK = 32
"""Joint spatial rank of a Tucker head that one program holds."""
MEASURED = ((9, 0),)
"""The compute capabilities on which the kernels were measured, and are used: Hopper. Elsewhere the plain path runs."""


class Wins(NamedTuple):
    """Where the fused head is faster than the plain path, forward + backward.

    Attributes:
        positions: up to so many spatial positions; one program holds them all.
        exact_float32: whether it also wins in float32 without TF32, where the matrix units are not used.
    """

    positions: int
    exact_float32: bool


# Measured on an H200 in bfloat16, batch 128 and 256 (docs/explanation/speed.md); smaller batches and exact float32
# were not. CP at 196 positions takes twice as long as the plain path.
WINS = {
    "tucker": Wins(positions=256, exact_float32=False),
    "cp": Wins(positions=64, exact_float32=False),
}

_enabled = True


@contextmanager
def without_kernels() -> Iterator[None]:
    """Take the plain path inside, also where a fused kernel would be used: to compare, or to look for a mistake.

    Example:
        >>> import torch, tensor_dropout as td
        >>> layer, x = td.CPRegression((8, 4, 4), 10, rank=6), torch.randn(2, 8, 4, 4)
        >>> with td.without_kernels():
        ...     y = layer(x)
    """
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def fused_head(
    kind: str | None,
    x: Tensor,
    operands: Sequence[Tensor],
    bias: Tensor | None,
    masks: Sequence[Tensor | None],
) -> Tensor | None:
    """The output of a head by its fused kernels, or None where the plain path is to be taken.

    Args:
        kind: "tucker", "cp", or None for a format without kernels.
        x: (B, C, *spatial).
        operands: the factors of the channels, of each spatial mode and of the output, then a Tucker head's core.
        bias: (O,).
        masks: one entry per rank axis.
    """
    if kind is None or not _enabled or not HAS_TRITON or not x.is_cuda:
        return None
    dense = [operand.contiguous() for operand in operands]
    factors = dense[:-1] if kind == "tucker" else dense
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    if not (_has_shape(kind, x, factors) and _is_plain_autograd(x, masks) and _wins(kind, dtype, x.device.index)):
        return None
    features = x.to(dtype).flatten(2)
    if not (features.is_contiguous() or features.mT.is_contiguous()):
        features = features.contiguous()
    rows = [mask if mask is None or mask.stride(-1) == 1 else mask.contiguous() for mask in masks]
    if kind == "tucker":
        from tensor_dropout.kernels.tucker import tucker_head

        return tucker_head(features, factors, dense[-1], bias, rows)[0]
    from tensor_dropout.kernels.cp import cp_head

    return cp_head(features, factors, bias, rows[0])[0]


def _has_shape(kind: str, x: Tensor, factors: Sequence[Tensor]) -> bool:
    """Features of one to three spatial modes, one output mode, and what one program can hold."""
    held = x.shape[2:].numel() <= WINS[kind].positions
    if not (3 <= x.ndim <= 2 + MAX_SPATIAL_MODES and len(factors) == x.ndim and held):
        return False
    joint = 1
    for factor in factors[1:-1]:
        joint *= factor.shape[1]
    return (kind == "cp" or joint <= MAX_JOINT_RANK) and x.numel() < 2**31


def _settled_when_compiled(function: Callable[P, R]) -> Callable[P, R]:
    """Let ``torch.compile`` call a function once, while tracing, and keep its result.

    This sets the mark that ``torch.compiler.assume_constant_result`` sets. Calling that function here would import the
    compiler, with Triton and sympy: a second and a half, also for those who never compile.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_settled_when_compiled
def _wins(kind: str, dtype: torch.dtype, index: int) -> bool:
    """Whether the fused head is the faster one on this GPU; settled when a network is compiled."""
    if dtype not in DTYPES or torch.version.cuda is None:
        return False
    exact = dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return torch.cuda.get_device_capability(index) in MEASURED and (WINS[kind].exact_float32 or not exact)


@_settled_when_compiled
def _is_exporting() -> bool:
    """Asked while tracing: torch 2.11's compiler itself answers that it always is."""
    return torch.compiler.is_exporting()


def _is_plain_autograd(x: Tensor, masks: Sequence[Tensor | None]) -> bool:
    """No functorch transform, forward-mode derivative, export or learned mask: the operators know none of them."""
    if _is_exporting() or any(mask is not None and mask.requires_grad for mask in masks):
        return False
    if torch.compiler.is_compiling():
        return True
    return torch._C._functorch.peek_interpreter_stack() is None and torch.autograd.forward_ad._current_level < 0
