"""Exchanging modules in a network, and parameters in an optimizer, so that all of it can be undone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensor_dropout.errors import TensorDropoutError


class Exchange:
    """Module exchanges in one network that can be undone, the last ones first."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._log: list[tuple[str, nn.Module, nn.Module]] = []

    def put(self, old: nn.Module, new: nn.Module) -> None:
        """Put ``new`` wherever ``old`` is registered; a module under two names is exchanged under both."""
        for name in names_of(self.model, old):
            self.model.set_submodule(name, new)
            self._log.append((name, old, new))

    def undo(self, keep: int = 0) -> None:
        """Put the old modules back, but for the first ``keep`` exchanges."""
        while len(self._log) > keep:
            name, old, _ = self._log.pop()
            self.model.set_submodule(name, old)

    def __len__(self) -> int:
        return len(self._log)

    @property
    def modules(self) -> dict[str, tuple[nn.Module, nn.Module]]:
        """What was exchanged, by name: (old, new)."""
        return {name: (old, new) for name, old, new in self._log}


@contextmanager
def undone_on_failure(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[Exchange]:
    """An exchange that is undone, in the optimizer as well, if the block fails or is interrupted."""
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise TensorDropoutError(f"optimizer= is a torch optimizer, got {type(optimizer).__name__}")
    exchange = Exchange(model)
    before = None if optimizer is None else _remember(optimizer)
    try:
        with torch.inference_mode(False):  # parameters made in inference mode could never be trained
            yield exchange
    except BaseException:
        exchange.undo()
        if optimizer is not None and before is not None:
            _restore(optimizer, *before)
        raise


def names_of(model: nn.Module, module: nn.Module) -> list[str]:
    """All names under which a module is registered."""
    return [name for name, each in model.named_modules(remove_duplicate=False) if each is module]


def exchange_parameters(
    optimizer: torch.optim.Optimizer,
    old: Sequence[nn.Parameter],
    new: Sequence[tuple[str, nn.Parameter]],
    where: str,
    renamed: Sequence[tuple[str, nn.Parameter]] = (),
) -> None:
    """Put new parameters into an optimizer where old ones were; the state of all others stays.

    Args:
        optimizer: any optimizer that keeps its state by parameter.
        old: the parameters to take out.
        new: names and parameters to put into the group of the first of them, at its place.
        where: the caller's name, for messages.
        renamed: parameters that stay, and their names now; for optimizers that keep names.

    Raises:
        TensorDropoutError: if the optimizer does not hold all of ``old``, or keeps no state by parameter (L-BFGS).
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise TensorDropoutError(f"{where}: L-BFGS keeps one state for all parameters; make a new optimizer afterwards")
    held = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    if missing := [parameter for parameter in old if parameter not in held]:
        raise TensorDropoutError(
            f"{where}: the optimizer does not hold {len(missing)} of the {len(old)} parameters that are replaced, so "
            "the new ones would not be trained; pass the optimizer of this model, or None and add them yourself"
        )
    home = held[old[0]]
    place = next(k for k, parameter in enumerate(home["params"]) if parameter is old[0])
    gone = {id(parameter) for parameter in old}
    for group in optimizer.param_groups:
        kept = [k for k, parameter in enumerate(group["params"]) if id(parameter) not in gone]
        if group is home:
            place = sum(k < place for k in kept)
        group["params"][:] = [group["params"][k] for k in kept]
        if "param_names" in group:
            group["param_names"] = [group["param_names"][k] for k in kept]
    home["params"][place:place] = [parameter for _, parameter in new]
    if "param_names" in home:
        home["param_names"][place:place] = [name for name, _ in new]
    for parameter in old:
        optimizer.state.pop(parameter, None)
    names = {id(parameter): name for name, parameter in renamed}
    for group in optimizer.param_groups:
        if "param_names" in group:
            pairs = zip(group["params"], group["param_names"], strict=True)
            group["param_names"] = [names.get(id(parameter), name) for parameter, name in pairs]


def _remember(optimizer: torch.optim.Optimizer) -> tuple[list[dict[str, Any]], dict[Any, Any]]:
    groups = [
        {key: list(value) if key in ("params", "param_names") else value for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    return groups, dict(optimizer.state)


def _restore(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group["params"][:] = before["params"]
        if "param_names" in before:
            group["param_names"] = before["param_names"]
    optimizer.state.clear()
    optimizer.state.update(state)
