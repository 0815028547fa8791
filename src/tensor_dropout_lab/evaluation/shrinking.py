"""The same network with a smaller head: what is left of it, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.surgery.merge import truncate_
from tensor_dropout_lab.nets.heads import LowRankLinear
from tensor_dropout_lab.nets.network import Network


class Shrunk(NamedTuple):
    """A copy of a network with a smaller head.

    Attributes:
        kind: "whole" (as it is), "rank" (leading ranks of a tensor layer), "low-rank" (nearest product of two matrices)
            or "pruned" (the largest weights of a linear layer).
        size: the rank, or the number of weights that are left; 0 of the whole.
        parameters: of the head with its bias; of a pruned one those that are not 0 (where they are is not counted).
        network: the copy.
    """

    kind: str
    size: int
    parameters: int
    network: nn.Module


def shrink(network: nn.Module, points: int) -> Iterator[Shrunk]:
    """Copies with smaller heads, none trained again, and the network itself; sizes evenly on a logarithmic scale.

    A tensor head keeps its leading ranks, which means most after training with ``law="nested"``. A linear head becomes
    a product of two matrices, and is pruned.

    Args:
        network: of ``build_net``.
        points: about how many sizes of each kind.

    Raises:
        TensorDropoutError: if the head is neither a tensor regression nor linear.

    Example:
        >>> from tensor_dropout_lab.nets import build_net
        >>> net = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="rtrl-cp", rank=16)
        >>> [(each.kind, each.size, each.parameters) for each in shrink(net, 3)]
        [('rank', 1, 88), ('rank', 4, 322), ('rank', 15, 1180), ('whole', 0, 1258)]
    """
    if not isinstance(network, Network):
        raise TensorDropoutError(f"evaluate: {type(network).__name__} has no head that could be cut down")
    head = network.head
    if isinstance(head, TensorRegression):
        for rank in _space(1, max(head._ranks) - 1, points):
            smaller = copy.deepcopy(network).eval()
            truncate_(smaller, rank)
            yield Shrunk("rank", rank, count_parameters(smaller.head), smaller)
    elif isinstance(head, nn.Linear | LowRankLinear):
        yield from _factorize(network, head, points)
        if isinstance(head, nn.Linear):
            yield from _prune(network, head, points)
    else:
        raise TensorDropoutError(
            f"evaluate: a head is cut down if it is a tensor regression or linear, got {type(head).__name__}"
        )
    yield Shrunk("whole", 0, count_parameters(head), network)


@torch.no_grad()
def _factorize(network: Network, head: nn.Linear | LowRankLinear, points: int) -> Iterator[Shrunk]:
    """The nearest weights of lower rank."""
    weight = head.weight
    left, values, right = torch.linalg.svd(weight.double(), full_matrices=False)
    per_rank, bias = sum(weight.shape), len(weight)
    most = (count_parameters(head) - bias - 1) // per_rank  # the largest that is smaller than the head
    for rank in _space(1, min(most, len(values)), points):
        layer = LowRankLinear(weight.shape[1], weight.shape[0], rank).to(weight)
        layer.reduce.copy_(right[:rank])
        layer.expand.copy_(left[:, :rank] * values[:rank])
        layer.bias.copy_(head.bias)
        yield Shrunk("low-rank", rank, count_parameters(layer), _with_head(network, layer))


@torch.no_grad()
def _prune(network: Network, head: nn.Linear, points: int) -> Iterator[Shrunk]:
    """The largest weights alone."""
    sizes = head.weight.abs()
    for count in _space(len(sizes), sizes.numel() - 1, points):
        pruned = copy.deepcopy(head)
        pruned.weight.mul_(sizes >= sizes.flatten().kthvalue(sizes.numel() - count + 1).values)
        yield Shrunk("pruned", count, count + len(sizes), _with_head(network, pruned))


def _with_head(network: Network, head: nn.Module) -> nn.Module:
    changed = copy.deepcopy(network).eval()
    changed.replace_head(head)
    return changed


def _space(low: int, high: int, points: int) -> list[int]:
    """Whole numbers from low to high, evenly on a logarithmic scale; none if high is below low."""
    if high < low:
        return []
    return sorted({round(low * (high / low) ** (k / max(1, points - 1))) for k in range(points)})
