"""Calling a whole network whose head returns something else than its output, such as its moments.

The call goes through the network's own ``forward``: calling the head directly would bypass DDP, FSDP2 and
``torch.compile``, and gradients would stay unsynchronised. For one call the head returns a NamedTuple in place of its
output, and the network passes it on as its result.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.randomized import randomized_layers, tensor_layers
from tensor_dropout.layers.regression import TensorRegression

Result = TypeVar("Result", bound=tuple[Any, ...])
Kinds = type[Result] | tuple[type[Result], ...]


def unwrap(model: nn.Module) -> nn.Module:
    """The module inside DDP and ``torch.compile`` wrappers."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
            model = inner
        else:
            return model


def find_head(model: nn.Module, where: str) -> TensorRegression:
    """The one tensor regression layer of a model; of several, the one that is randomized."""
    layers = list(tensor_layers(model).values())
    if not layers:
        raise TensorDropoutError(f"{where}: {type(model).__name__} has no tensor regression layer")
    randomized = randomized_layers(model)
    chosen = layers if len(layers) == 1 else randomized
    if len(chosen) != 1:
        raise TensorDropoutError(
            f"{where}: the randomness must be in one last layer, but {type(model).__name__} has {len(layers)} tensor "
            f"regression layers, {len(randomized)} of them with dropout; use td.predict(mode='sample') instead"
        )
    return chosen[0]


def call_with_head(
    model: nn.Module,
    x: Tensor,
    function: Callable[[TensorRegression, Tensor], Result],
    kinds: Kinds,
    where: str,
) -> Result:
    """Run ``model(x)`` with its head returning ``function(head, features)``.

    Args:
        model: a layer, or a network whose last layer is one.
        x: the network's input.
        function: what the head returns.
        kinds: the type, or types, that it returns.
        where: the caller's name, for messages.

    Raises:
        TensorDropoutError: if the head is not the network's last step.
    """
    head = find_head(model, where)
    trailing = (
        f"{where}: {type(model).__name__} does not return its tensor regression layer's output as it is; that layer "
        "must be the last step (use output_shape instead of a later reshape), or use td.predict(mode='sample')"
    )
    head._instead_of_forward = function
    try:
        result = model(x)
    except (TypeError, AttributeError, ValueError, LookupError) as error:  # TensorDropoutError is a ValueError
        if any(frame.f_locals.get("self") is head for frame, _ in traceback.walk_tb(error.__traceback__)):
            raise  # from within the head
        head._instead_of_forward = None
        with torch.no_grad():
            model(x)  # raises again if the mistake is the model's own
        raise TensorDropoutError(trailing) from error
    finally:
        head._instead_of_forward = None
    if not isinstance(result, kinds):
        raise TensorDropoutError(trailing)
    return result


def count_parameters(module: nn.Module) -> int:
    """The number of parameters of a module and all in it.

    Example:
        >>> count_parameters(nn.Linear(3, 2))
        8
    """
    return sum(parameter.numel() for parameter in module.parameters())
