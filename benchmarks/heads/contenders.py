"""Who is timed: our layers, pooled and flattened linear heads, one hand-written einsum, and TensorLy-Torch."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tensor_dropout as td
from heads.cases import Case

THETA = 0.8
FORMATS = {"tucker": "Tucker", "cp": "CP", "tt": "TT"}
LAYERS = {"tucker": td.TuckerRegression, "cp": td.CPRegression, "tt": td.TTRegression}
GROUPS = ("ours", "rtrl", "plain", "linear", "einsum", "tensorly")


@dataclass(frozen=True)
class Contender:
    """One way to compute a head; ``format`` is the factorization that it shares with one of ours, or None."""

    key: str
    label: str
    group: str
    format: str | None
    make: Callable[[Case], nn.Module]


class NotInstalledError(Exception):
    """A contender whose library is missing."""


class PooledLinear(nn.Module):
    """Average pooling over all modes but the first, then ``nn.Linear``."""

    def __init__(self, case: Case):
        super().__init__()
        self.space = tuple(range(2, 1 + len(case.input_shape)))
        self.linear = nn.Linear(case.input_shape[0], case.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mean(self.space))


class FlatLinear(nn.Module):
    """Flattening, then ``nn.Linear``."""

    def __init__(self, case: Case):
        super().__init__()
        self.linear = nn.Linear(math.prod(case.input_shape), case.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.flatten(1))


def write_indices(format: str, n_modes: int) -> tuple[str, list[str], str]:
    """The einsum indices of the weight's modes, of each of ``layer.operands()``, and of the rank axes."""
    modes, ranks = "abcdefghijklm"[:n_modes], "ABCDEFGHIJKLM"[:n_modes]
    if format == "tucker":
        return modes, [*(m + r for m, r in zip(modes, ranks, strict=True)), ranks], ranks
    if format == "cp":
        return modes, [m + "R" for m in modes], "R"
    bonds = ranks[: n_modes - 1]
    return modes, [bonds[max(0, k - 1) : k] + m + bonds[k : k + 1] for k, m in enumerate(modes)], bonds


class Einsum(nn.Module):
    """The head as one writes it by hand: ``torch.einsum`` of x with one factor after another.

    Channels first, then the other input modes, the core, and the output factor. One expression for all would leave
    the order to opt_einsum, but torch then plans it in every call, which takes milliseconds.
    """

    def __init__(self, format: str, case: Case):
        super().__init__()
        layer = make_ours(format, case)
        modes, indices, _ = write_indices(format, 1 + len(case.input_shape))
        order = list(range(len(indices)))
        if format == "tucker":
            order[-2:] = order[:-3:-1]  # the core before the output factor
        self.operands = nn.ParameterList(layer.operands()[k].detach().clone() for k in order)
        self.bias = nn.Parameter(layer.bias.detach().clone())
        self.equations = write_steps(modes, [indices[k] for k in order])

    def forward(self, x: Tensor) -> Tensor:
        for equation, operand in zip(self.equations, list(self.operands), strict=True):
            x = torch.einsum(equation, x, operand)
        return x + self.bias


def write_steps(modes: str, operands: list[str]) -> list[str]:
    """The einsum of each step: an index goes when no later operand and not the output (the last mode) has it."""
    held, steps = modes[:-1], []
    for k, operand in enumerate(operands):
        needed = "".join(operands[k + 1 :]) + modes[-1]
        left = "".join(index for index in dict.fromkeys(held + operand) if index in needed)
        steps.append(f"z{held},{operand}->z{left}")
        held = left
    return steps


def make_ours(format: str, case: Case, dropout: float | None = None) -> td.TensorRegression:
    """Our layer; ``init="normal"``, so that no gradient is zero when it is checked."""
    return LAYERS[format](case.input_shape, case.outputs, case.ranks[format], dropout=dropout, init="normal")


class PlainPath(nn.Module):
    """Our layer without its fused kernels: what the dispatch on a GPU is decided against."""

    def __init__(self, format: str, case: Case):
        super().__init__()
        self.layer = make_ours(format, case)

    def forward(self, x: Tensor) -> Tensor:
        with td.without_kernels():
            return self.layer(x)


def import_tensorly() -> Any:
    """TensorLy-Torch, without its warnings; None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import tltorch
    except ImportError:
        return None
    return tltorch


def tensorly_version() -> str | None:
    """The version of TensorLy-Torch, or None."""
    return getattr(import_tensorly(), "__version__", None)


def make_tensorly(format: str, case: Case) -> nn.Module:
    """TensorLy-Torch's TRL with the same shape and rank."""
    tltorch = import_tensorly()
    if tltorch is None:
        raise NotInstalledError("not installed")
    rank = case.ranks[format]
    if format == "tt":
        rank = (1, *make_ours(format, case).rank, 1)  # with the bonds at both ends
    layer = tltorch.TRL(case.input_shape, (case.outputs,), factorization=format, rank=rank, bias=True)
    layer.weight.normal_(0, 0.02)
    nn.init.zeros_(layer.bias)
    return layer


def list_contenders(case: Case) -> list[Contender]:
    """Everyone that can compute this case, ours first."""
    formats = [format for format in FORMATS if format in case.ranks]

    def each(group: str, prefix: str, label: str, make: Callable[[str, Case], nn.Module]) -> list[Contender]:
        return [
            Contender(
                prefix + format, label.format(FORMATS[format]), group, format, lambda case, f=format: make(f, case)
            )
            for format in formats
        ]

    return [
        *each("ours", "", "{}", make_ours),
        *each("rtrl", "rtrl-", f"{{}} R-TRL, θ = {THETA}", lambda format, case: make_ours(format, case, THETA)),
        Contender("pooled", "pooled linear", "linear", None, PooledLinear),
        Contender("flat", "flatten + linear", "linear", None, FlatLinear),
        *(each("plain", "plain-", "{} without kernels", PlainPath) if torch.cuda.is_available() else []),
        *each("einsum", "einsum-", "{} by einsum", Einsum),
        *each("tensorly", "tensorly-", "{} of TensorLy-Torch", make_tensorly),
    ]


def list_names() -> list[str]:
    """What ``--contenders`` takes: groups and single ones."""
    singles = [f"{prefix}{format}" for prefix in ("", "rtrl-", "plain-", "einsum-", "tensorly-") for format in FORMATS]
    return [*GROUPS, "pooled", "flat", *singles]


def select_contenders(case: Case, names: list[str] | None) -> list[Contender]:
    """Those of the case whose key or group is named; all of them without names."""
    return [c for c in list_contenders(case) if not names or c.key in names or c.group in names]
