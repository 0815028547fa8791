"""The slow, obvious truth: the dense weight, and every mask enumerated with its probability.

Every fast path of the library is compared with these functions, in float64. Nothing here is planned or clever:
sums of outer products, and loops over all masks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import reduce

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.cp import CPRegression
from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.layers.tt import TTRegression
from tensor_dropout.layers.tucker import TuckerRegression


def dense_weight(layer: TensorRegression, masks: Masks) -> Tensor:
    """W̃ of shape (*input_shape, *output_shape) under given masks, one per rank axis: None or (R,)."""
    if isinstance(layer, TuckerRegression):
        return _tucker_weight(layer, masks)
    if isinstance(layer, CPRegression):
        return _cp_weight(layer, masks[0])
    assert isinstance(layer, TTRegression)
    return _train_weight(layer, masks)


def _tucker_weight(layer: TuckerRegression, masks: Masks) -> Tensor:
    weight = layer.core
    for mode, (factor, mask) in enumerate(zip(layer.factors, masks, strict=True)):
        masked = factor if mask is None else factor * mask
        weight = torch.tensordot(masked, weight, dims=([1], [mode])).movedim(0, mode)
    return weight


def _cp_weight(layer: CPRegression, mask: Tensor | None) -> Tensor:
    weight = torch.zeros(layer.weight_shape, dtype=layer.factors[0].dtype)
    for r in range(layer.rank):
        columns = [factor[:, r] for factor in layer.factors]
        term = reduce(lambda a, b: a.unsqueeze(-1) * b, columns)
        weight = weight + (term if mask is None else mask[r] * term)
    return weight


def _train_weight(layer: TTRegression, masks: Masks) -> Tensor:
    weight = layer.cores[0]
    for core, mask in zip(layer.cores[1:], masks, strict=True):
        weight = torch.tensordot(weight if mask is None else weight * mask, core, dims=1)
    return weight.squeeze(0).squeeze(-1)


def regress(layer: TensorRegression, x: Tensor, masks: Masks) -> Tensor:
    """``⟨x, W̃⟩ + b`` with the dense weight."""
    y = torch.tensordot(x, dense_weight(layer, masks), dims=len(layer.input_shape))
    return y if layer.bias is None else y + layer.bias


def all_masks(layer: TensorRegression) -> Iterator[tuple[Tensor, Masks]]:
    """Every combination of masks that training can draw, scaled as the layer says, with its probability."""
    if layer.dropout is None:
        yield torch.ones((), dtype=torch.float64), [None] * len(layer._ranks)
        return
    dropout, axes = layer.dropout, layer.dropped_axes
    supports = []
    for axis in axes:
        support = dropout.law.support(layer._ranks[axis], dropout.theta)
        if support is None:
            raise TensorDropoutError(f"reference: the law {dropout.law!r} cannot list its masks")
        supports.append(list(zip(*support, strict=True)))
    for choice in itertools.product(*supports):
        masks: Masks = [None] * len(layer._ranks)
        probability = torch.ones((), dtype=torch.float64)
        for axis, (mask, chance) in zip(axes, choice, strict=True):
            masks[axis] = dropout.scale(mask)
            probability = probability * chance
        yield probability, masks


def mean_weight(layer: TensorRegression) -> Tensor:
    """``E[W̃]`` over all masks."""
    return sum((chance * dense_weight(layer, masks) for chance, masks in all_masks(layer)), torch.zeros(()))


def mean_and_covariance(layer: TensorRegression, x: Tensor) -> tuple[Tensor, Tensor]:
    """``E[f]`` of shape (B, O) and ``Cov[f]`` of shape (B, O, O) over all masks, the outputs flattened to O."""
    chances, outputs = [], []
    for chance, masks in all_masks(layer):
        chances.append(chance)
        outputs.append(regress(layer, x, masks).flatten(1))
    weights, values = torch.stack(chances), torch.stack(outputs)  # (M,), (M, B, O)
    mean = torch.einsum("m,mbo->bo", weights, values)
    return mean, torch.einsum("m,mbo,mbp->bop", weights, values - mean, values - mean)


def expected_mse(layer: TensorRegression, x: Tensor, y: Tensor) -> Tensor:
    """The mean over all masks of ``F.mse_loss(layer(x), y)``."""
    losses = (chance * (regress(layer, x, masks) - y).square().mean() for chance, masks in all_masks(layer))
    return sum(losses, torch.zeros(()))
