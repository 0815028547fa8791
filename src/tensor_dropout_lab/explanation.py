"""Where a network looks: its output as a sum over the positions of the last feature map.

A network that ends in a linear map of its features (C, *space) answers ``⟨features, W⟩ + b``. That inner product is a
sum over positions p, so that each has its exact share of the output; nothing is approximated, and no gradient taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.head_outputs import unwrap
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.prediction import at_test, evaluating
from tensor_dropout_lab.nets.heads import LowRankLinear

_POOLINGS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_NEEDED = (
    "the map of where it looks needs a last layer that is linear in a feature map (channels, *space): a tensor "
    "regression layer, or average pooling or flattening and nn.Linear"
)


class Explanation(NamedTuple):
    """What :func:`explain` returns: ``contributions`` summed over all positions, plus ``bias``, is ``outputs``.

    Attributes:
        contributions: (B, *space, O), of each position of the last feature map to each output.
        bias: (O,).
        outputs: (B, O), those of the network with its mean weight.
    """

    contributions: Tensor
    bias: Tensor
    outputs: Tensor


@torch.no_grad()
def explain(model: nn.Module, x: Tensor) -> Explanation:
    """Split the outputs of a network into the contributions of the positions of its last feature map.

    ``contributions[p, o] = Σ_c features[c, p] W[c, p, o]``, with the merged weight ``W = layer.dense_weight()`` of a
    tensor regression layer, ``W[c, p, o] = weight[o, c] / positions`` of average pooling and ``nn.Linear``, or that
    layer's own weight after flattening. The network is in ``eval`` mode for the call and takes its mean weight. The
    merged weight is formed: it has the size of the features times the number of outputs. The contributions are in at
    least float32, also of a network in half precision or under autocast; their sum is its output up to its rounding.

    Args:
        model: a network, or a tensor regression layer itself.
        x: (B, *input_shape).

    Raises:
        TensorDropoutError: if the last layer is neither, or is not the last step.

    Example:
        >>> import tensor_dropout as td
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), td.CPRegression((8, 4, 4), 10, rank=6, dropout=0.8))
        >>> found = explain(net, torch.randn(2, 3, 6, 6))
        >>> found.contributions.shape
        torch.Size([2, 4, 4, 10])
        >>> torch.allclose(found.contributions.sum((1, 2)) + found.bias, found.outputs, atol=1e-5)
        True
    """
    model = unwrap(model)
    layer, entrance = find_linear_head(model)
    features, outputs = _run(model, entrance, layer, x)
    flattened = isinstance(entrance, nn.Flatten)
    if isinstance(layer, nn.Linear) and flattened and layer.in_features != features[0].numel():
        raise TensorDropoutError(f"explain: {type(model).__name__} has more than flattening before its end; {_NEEDED}")
    dtype = torch.promote_types(torch.promote_types(features.dtype, outputs.dtype), torch.float32)
    space = features.shape[2:]
    with torch.autocast(x.device.type, enabled=False):
        weight, bias = merge_head(layer, tuple(space), flattened=flattened)  # (C, *space, O), (O,)
        # (B, C, P), (C, P, O) -> (B, P, O)
        shares = torch.einsum("bcp,cpo->bpo", features.to(dtype).flatten(2), weight.to(dtype).flatten(1, -2))
    found = Explanation(shares.unflatten(1, space), bias.to(dtype), outputs.to(dtype).flatten(1))
    half = torch.finfo(features.dtype).bits == 16 or torch.finfo(outputs.dtype).bits == 16
    _check_sum(found, model, rough=5e-2 if half else 1e-3)
    return found


def find_linear_head(model: nn.Module) -> tuple[TensorRegression | nn.Linear | LowRankLinear, nn.Module]:
    """The last layer, and the module whose input is the feature map: that layer, or pooling or flattening before it.

    Raises:
        TensorDropoutError: if there is no such layer, or neither of the two before an ``nn.Linear``.
    """
    where = f"explain: {type(model).__name__}"
    layers = [module for module in model.modules() if isinstance(module, TensorRegression | nn.Linear | LowRankLinear)]
    if not layers:
        raise TensorDropoutError(f"{where} has neither a tensor regression layer nor an nn.Linear; {_NEEDED}")
    last = layers[-1]
    if isinstance(last, TensorRegression):
        if len(last.input_shape) not in (2, 3, 4):
            raise TensorDropoutError(f"{where} ends in a layer on {last.input_shape}, without positions; {_NEEDED}")
        return last, last
    poolings = [module for module in model.modules() if isinstance(module, _POOLINGS) and _is_global(module)]
    flattenings = [module for module in model.modules() if isinstance(module, nn.Flatten)]
    if not poolings and not flattenings:
        raise TensorDropoutError(
            f"{where} ends in an nn.Linear without average pooling to one position or nn.Flatten; {_NEEDED}"
        )
    return last, (poolings or flattenings)[-1]


def merge_head(
    layer: TensorRegression | nn.Linear | LowRankLinear, space: tuple[int, ...], *, flattened: bool = False
) -> tuple[Tensor, Tensor]:
    """The weight (C, *space, O) and the bias (O,) that a head has on a feature map.

    A linear one averages the positions first, unless they are flattened.

    Example:
        >>> weight, bias = merge_head(nn.Linear(8, 10), (4, 4))
        >>> weight.shape, bias.shape
        (torch.Size([8, 4, 4, 10]), torch.Size([10]))
    """
    if isinstance(layer, TensorRegression):
        weight = layer.dense_weight().reshape(*layer.input_shape, prod(layer.output_shape))
    elif flattened:
        weight = layer.weight.T.reshape(-1, *space, len(layer.weight))
    else:
        pooled = layer.weight.T / prod(space)  # (C, O)
        weight = pooled.reshape(len(pooled), *(1 for _ in space), -1).expand(-1, *space, -1)
    bias = weight.new_zeros(weight.shape[-1]) if layer.bias is None else layer.bias.flatten()
    return weight.detach(), bias.detach()


def enlarge(grid: Tensor, size: Sequence[int]) -> Tensor:
    """A map (*space) on the grid of an input (*size), linear between the centres of its positions.

    Example:
        >>> enlarge(torch.tensor([0.0, 4.0]), [4])
        tensor([0., 1., 3., 4.])
    """
    return F.interpolate(grid[None, None], size=tuple(size), mode=_LINEAR[grid.ndim], align_corners=False)[0, 0]


def find_peak(grid: Tensor, size: Sequence[int]) -> tuple[int, ...]:
    """Where on the grid of an input (*size) the centre of the position is that contributes most, up or down.

    Example:
        >>> find_peak(torch.tensor([[0.0, 1.0], [-3.0, 2.0]]), (8, 16))
        (6, 4)
    """
    cell = torch.unravel_index(grid.abs().argmax(), grid.shape)
    return tuple(int((int(index) + 0.5) * cells / n) for index, cells, n in zip(cell, size, grid.shape, strict=True))


def _is_global(pooling: Any) -> bool:
    size = pooling.output_size
    return bool(size == 1 or (isinstance(size, tuple | list) and set(size) == {1}))


def _run(model: nn.Module, entrance: nn.Module, layer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The feature map that enters the head, (B, C, *space), and the network's outputs, which are those of the layer."""
    seen: list[Tensor] = []
    made: list[Tensor] = []
    hooks = [
        entrance.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])),
        layer.register_forward_hook(lambda module, inputs, output: made.append(output)),
    ]
    try:
        with evaluating(model), at_test(model, "mean"):
            outputs = model(x)
    finally:
        for hook in hooks:
            hook.remove()
    if len(seen) != 1 or not isinstance(outputs, Tensor) or not 3 <= seen[0].ndim <= 5 or len(seen[0]) != len(x):
        raise _not_last(model)
    own = made[0].flatten(1).to(outputs.dtype) if len(made) == 1 else None
    if own is None or own.shape != outputs.flatten(1).shape:
        raise _not_last(model)
    if not torch.allclose(own, outputs.flatten(1), rtol=0, atol=0, equal_nan=True):
        raise _not_last(model)
    return seen[0], outputs


def _check_sum(found: Explanation, model: nn.Module, rough: float) -> None:
    """The identity that the map stands for: something between the map and the layer would break it.

    ``rough`` is how far apart the two may be, as a share of the sum of all absolute contributions.
    """
    flat = found.contributions.flatten(1, -2)
    total, magnitude = flat.sum(1) + found.bias, flat.abs().sum(1) + found.bias.abs()
    if total.shape != found.outputs.shape or bool(((total - found.outputs).abs() > rough * magnitude + 1e-6).any()):
        raise _not_last(model)


def _not_last(model: nn.Module) -> TensorDropoutError:
    return TensorDropoutError(
        f"explain: {type(model).__name__} does not return the output of its last linear layer as it is; {_NEEDED}"
    )
