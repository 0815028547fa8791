"""Parameter groups: the factors of tensor layers may learn and decay at their own rate."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.head_outputs import unwrap
from tensor_dropout.layers.regression import TensorRegression


def param_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.0,
    factor_lr: float | None = None,
    factor_decay: float | None = None,
    factor_step: float | None = None,
) -> list[dict[str, Any]]:
    """Groups for any torch optimizer: the rest of the network, and the factors of each tensor regression.

    W is a product of K operands (CP on images: 4 factors; Tucker: 4 factors and the core). When each moves by a
    relative step η, W moves by about Kη. So by default the operands learn at ``lr / K``: W then moves as a linear
    layer's weight would at ``lr``. Biases stay with the rest of the network. Frozen parameters are left out, with a
    warning.

    Args:
        model: a network with tensor regressions, or without any.
        lr: of everything else.
        weight_decay: of everything else.
        factor_lr: of the factors; None: ``lr / K``.
        factor_decay: of the factors; None: ``weight_decay``.
        factor_step: in place of ``factor_lr``, for Adam and its kin and for heads that are fitted already: the share of
            itself by which W is to move in a step. Each factor gets a group, and the rate that is this share of its
            root mean square, over K. Adam moves every number by about its rate, however small the number is, so that
            an ordinary rate replaces a fitted head in a few steps.

    Returns:
        Groups with their parameters' names (``param_names``), "lr" and "weight_decay"; empty ones are left out.

    Raises:
        TensorDropoutError: for both ``factor_lr`` and ``factor_step``, or a factor of zeros, which has no such rate.

    Example:
        >>> import torch, tensor_dropout as td
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), td.CPRegression((8, 6, 6), 10, rank=4))
        >>> optimizer = torch.optim.SGD(td.param_groups(net, lr=0.1, weight_decay=5e-4), momentum=0.9)
        >>> [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
        [(0.1, 3), (0.025, 4)]
    """
    if factor_lr is not None and factor_step is not None:
        raise TensorDropoutError(
            f"param_groups: factor_lr={factor_lr} and factor_step={factor_step} both set the rate of the factors; "
            "leave one out"
        )
    _warn_of_frozen(model)
    groups = []
    taken: set[int] = set()
    for name, layer in unwrap(model).named_modules():
        if not isinstance(layer, TensorRegression):
            continue
        prefix = f"{name}." if name else ""
        own = [(prefix + key, p) for key, p in layer.named_parameters() if key != "bias" and id(p) not in taken]
        taken |= {id(parameter) for _, parameter in own}
        decay, K = weight_decay if factor_decay is None else factor_decay, len(layer.operands())
        if factor_step is None:
            groups.append(_group(own, lr / K if factor_lr is None else factor_lr, decay))
        else:
            groups += [_group([item], factor_step * _size(*item) / K, decay) for item in own]
    rest = [(name, p) for name, p in unwrap(model).named_parameters() if id(p) not in taken]
    return [group for group in (_group(rest, lr, weight_decay), *groups) if group["params"]]


def _warn_of_frozen(model: nn.Module) -> None:
    parameters = list(model.parameters())
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    if frozen:
        warnings.warn(
            f"param_groups: {frozen} of {len(parameters)} parameters are frozen (requires_grad=False) and will not be "
            "trained; call model.requires_grad_(True) to train them",
            stacklevel=3,
        )


def _size(name: str, factor: nn.Parameter) -> float:
    """The root mean square."""
    size = float(factor.detach().double().square().mean().sqrt())
    if not size > 0:
        raise TensorDropoutError(
            f"param_groups: factor_step is a share of a factor's size, and {name} has the size {size}; use factor_lr"
        )
    return size


def _group(named: list[tuple[str, nn.Parameter]], lr: float, weight_decay: float) -> dict[str, Any]:
    trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    return {
        "params": [parameter for _, parameter in trained],
        "param_names": [name for name, _ in trained],
        "lr": lr,
        "weight_decay": weight_decay,
    }
