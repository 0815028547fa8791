"""Optimizers by name. To add one, write an entry in :data:`OPTIMIZERS`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tensor_dropout_lab.training.config import OptimizerConfig


@dataclass(frozen=True)
class Optimizer:
    """An optimizer.

    Attributes:
        build: ``build(groups, settings, on_gpu)``: ``groups`` are parameter groups with their rates and decays,
            ``settings`` is the table ``[optimizer]`` of the config. On a GPU rates are tensors, which a captured graph
            reads.
        uses: the keys of that table that only some optimizers use.
    """

    build: Callable[[list[dict[str, Any]], OptimizerConfig, bool], torch.optim.Optimizer]
    uses: tuple[str, ...] = ()


def _build_sgd(groups: list[dict[str, Any]], settings: OptimizerConfig, on_gpu: bool) -> torch.optim.Optimizer:
    import torch

    return torch.optim.SGD(groups, momentum=settings.momentum, nesterov=settings.nesterov, fused=on_gpu or None)


def _build_adam(groups: list[dict[str, Any]], settings: OptimizerConfig, on_gpu: bool) -> torch.optim.Optimizer:
    import torch

    return torch.optim.Adam(groups, fused=on_gpu or None, capturable=on_gpu)


def _build_adamw(groups: list[dict[str, Any]], settings: OptimizerConfig, on_gpu: bool) -> torch.optim.Optimizer:
    import torch

    return torch.optim.AdamW(groups, fused=on_gpu or None, capturable=on_gpu)


OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": Optimizer(_build_sgd, uses=("nesterov",)),
    "adam": Optimizer(_build_adam),
    "adamw": Optimizer(_build_adamw),
}
"""Name -> optimizer."""


def register_optimizer(name: str, optimizer: Optimizer) -> None:
    """Give an optimizer of your own a name, so that ``optimizer.name`` may be it.

    Raises:
        TensorDropoutError: if the name is that of another optimizer.

    Example:
        >>> import torch
        >>> register_optimizer("adagrad", Optimizer(lambda groups, settings, on_gpu: torch.optim.Adagrad(groups)))
        >>> del OPTIMIZERS["adagrad"]  # this page does not need it any longer
    """
    if OPTIMIZERS.get(name, optimizer) != optimizer:
        raise TensorDropoutError(
            f"register_optimizer: the name {name!r} is taken by another optimizer; choose another one"
        )
    OPTIMIZERS[name] = optimizer


def make_optimizer(network: nn.Module, settings: OptimizerConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the config over the parameter groups of a network."""
    import torch

    from tensor_dropout.optimizer_groups import param_groups

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "param_groups: .* frozen")  # on purpose: what is behind the feature map
        groups = param_groups(
            network,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            factor_lr=settings.factor_lr,
            factor_decay=settings.factor_decay,
        )
    on_gpu = device.type == "cuda"
    for group in groups:
        group["initial_lr"] = group["lr"]
        if on_gpu:
            group["lr"] = torch.tensor(group["lr"], device=device)
    return OPTIMIZERS[settings.name].build(groups, settings, on_gpu)
