"""What is random in a network: whether its masks differ, its plain dropout, draws of a head on the same features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from tensor_dropout.layers.dropout import TensorDropout
from tensor_dropout.layers.head_outputs import call_with_head, unwrap
from tensor_dropout.layers.randomized import randomized_layers
from tensor_dropout.layers.regression import TensorRegression

MASKS = 1024
"""Masks that are compared, of a law that does not tell its second moments."""


class _Heads(NamedTuple):
    draws: list[Tensor]


def draw_heads(model: nn.Module, x: Tensor, n: int) -> list[Tensor]:
    """So many draws of the last layer on features computed once; none if the features are random themselves."""
    before = _random_states(x)

    def draw(layer: TensorRegression, features: Tensor) -> _Heads:
        if not all(map(torch.equal, before, _random_states(x))):
            return _Heads([])
        masks = (layer.draw_masks(len(features)) for _ in range(n))
        return _Heads([layer.regress(features, mask).flatten(1) for mask in masks])

    return call_with_head(unwrap(model), x, draw, _Heads, "target").draws


def _random_states(x: Tensor) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]


def draws_masks(model: nn.Module) -> bool:
    """Whether a tensor dropout draws masks in the next pass, as it is set now, that are not all alike."""
    return any(
        layer.dropout is not None
        and layer.dropout.is_random
        and layer._fixed_masks is None
        and any(_varies(layer.dropout, layer._ranks[axis]) for axis in layer.dropped_axes)
        for layer in randomized_layers(model)
    )


def _varies(dropout: TensorDropout, R: int) -> bool:
    """Whether masks of R ranks differ: by the variance of the law, or seen in ``MASKS`` draws."""
    law, theta = dropout.law, dropout.theta
    second = law.second_moment(R, theta)
    if second is None:
        variance = law.draw((MASKS, R), theta, device=theta.device).var(0)
    else:
        variance = second.diagonal() - law.mean(R, theta).to(second).square()
    return bool((variance > 1e-9).any())


def is_random_in_its_head_only(model: nn.Module) -> bool:
    """Whether the features need one pass: of networks that say so (``deterministic_features``), and of bare layers."""
    model = unwrap(model)
    known = isinstance(model, TensorRegression) or getattr(model, "deterministic_features", False)
    return known and len(randomized_layers(model)) == 1 and not plain_dropouts(model)


def plain_dropouts(model: nn.Module) -> list[nn.Module]:
    """What draws by itself in ``train`` mode, besides tensor dropout."""
    return [
        module
        for module in model.modules()
        if isinstance(module, _DropoutNd) or (isinstance(module, TensorRegression) and module.drops_entries)
    ]


@contextmanager
def dropping(model: nn.Module) -> Iterator[None]:
    """Plain dropout goes on inside, in a network that is in ``eval`` mode."""
    dropouts = plain_dropouts(model)
    for module in dropouts:
        module.training = True
    try:
        yield
    finally:
        for module in dropouts:
            module.training = False
