"""The table of attacks: an entry for every attack of the adaptive protocol.

An entry says what makes the attack, for which task and norm it is, and its place. Protocol, audit, tables and figures
read :data:`ATTACKS`. To add an attack, write its file and its entry; one of your own is registered by
:func:`register_attack`.

Importing this module does not import torch: reports are written from records alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, get_args

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task

if TYPE_CHECKING:
    from tensor_dropout.robustness.attack_loop import Attack

Role = Literal["gradient", "transfer", "black box", "check"]


@dataclass(frozen=True)
class AttackEntry:
    """An attack of the adaptive protocol.

    Attributes:
        name: in records and tables.
        factory: what makes it: a function or class, or "module.name" of one beside this file. It takes the radius, and
            as arguments of these names what it needs of ``norm``, ``loss``, ``steps``, ``queries`` and ``seed``.
        role: "gradient": it follows the network's gradient. "transfer": it is made on a twin. "black box": it uses no
            gradient. "check": the audit compares it with others at one radius; it is not part of the ensemble.
        losses: what it maximises: the first of these that suits the task and the number of classes.
        tasks: of the networks it is for.
        norms: of the balls it is for.
        on_all: whether it attacks every example at every radius; else only those that the attacks before it left.
        divisor: of the numbers of steps and queries.
        averaged: whether gradients are averaged over the randomness of a random network; one that is not is of no use
            against others, and left out there.
    """

    name: str
    factory: str | Callable[..., Attack] = field(repr=False)
    role: Role
    losses: tuple[str, ...] = ()
    tasks: tuple[Task, ...] = get_args(Task)
    norms: tuple[str, ...] = ("linf", "l2")
    on_all: bool = False
    divisor: int = 1
    averaged: bool = True

    def make(
        self, epsilon: float, *, task: Task, classes: int, norm: str, steps: int, queries: int, seed: int
    ) -> Attack:
        """The attack at a radius."""
        if callable(self.factory):
            factory = self.factory
        else:
            module, _, name = self.factory.rpartition(".")
            factory = getattr(import_module(f"{__package__}.{module}"), name)
        wanted = inspect.signature(factory).parameters
        given: dict[str, Any] = {
            "norm": norm,
            "steps": max(steps // self.divisor, 1),
            "queries": max(queries // self.divisor, 1),
            "seed": seed,
        }
        if self.losses:
            given["loss"] = self._choose_loss(task, classes)
        attack: Attack = factory(epsilon, **{name: value for name, value in given.items() if name in wanted})
        return attack

    def _choose_loss(self, task: Task, classes: int) -> str:
        from tensor_dropout.robustness.losses import find_loss

        for name in self.losses:
            loss = find_loss(name)
            if loss.task == task and (task == "regression" or loss.classes <= classes):
                return name
        raise TensorDropoutError(
            f"attack: {self.name} has no loss for a {task} with {classes} outputs; it has {', '.join(self.losses)}"
        )


_CLASSES: tuple[Task, ...] = ("classification",)
_NUMBERS: tuple[Task, ...] = ("regression",)

ATTACKS: dict[str, AttackEntry] = {
    entry.name: entry
    for entry in (
        AttackEntry("pgd-ce", "gradient_attacks.pgd", "gradient", ("cross_entropy",), _CLASSES, on_all=True),
        AttackEntry("pgd-margin", "gradient_attacks.pgd", "gradient", ("margin",), _CLASSES, on_all=True),
        AttackEntry("pgd-absolute", "gradient_attacks.pgd", "gradient", ("absolute",), _NUMBERS, on_all=True),
        AttackEntry("pgd-increase", "gradient_attacks.pgd", "gradient", ("increase",), _NUMBERS, on_all=True),
        AttackEntry("pgd-decrease", "gradient_attacks.pgd", "gradient", ("decrease",), _NUMBERS, on_all=True),
        AttackEntry("fgsm", "gradient_attacks.fgsm", "check", ("cross_entropy", "absolute")),
        AttackEntry("pgd-ce-few", "gradient_attacks.pgd", "check", ("cross_entropy",), _CLASSES, divisor=5),
        AttackEntry("pgd-absolute-few", "gradient_attacks.pgd", "check", ("absolute",), _NUMBERS, divisor=5),
        AttackEntry("pgd-ce-single", "gradient_attacks.pgd", "check", ("cross_entropy",), _CLASSES, averaged=False),
        AttackEntry("pgd-absolute-single", "gradient_attacks.pgd", "check", ("absolute",), _NUMBERS, averaged=False),
        AttackEntry("apgd-ce", "apgd.APGD", "gradient", ("cross_entropy",), _CLASSES),
        AttackEntry("apgd-dlr", "apgd.APGD", "gradient", ("dlr", "margin"), _CLASSES),
        AttackEntry("apgd-targeted", "apgd.APGD", "gradient", ("targeted_dlr", "targeted_margin"), _CLASSES),
        AttackEntry("apgd-absolute", "apgd.APGD", "gradient", ("absolute",), _NUMBERS),
        AttackEntry("transfer", "gradient_attacks.pgd", "transfer", ("margin", "absolute")),
        AttackEntry("square", "blackbox.Square", "black box", norms=("linf",)),
        AttackEntry("random", "blackbox.RandomSearch", "black box", divisor=10),
    )
}
"""Name -> attack of the adaptive protocol. Those on the examples that are left run in this order."""


def register_attack(entry: AttackEntry) -> None:
    """Add an attack of your own to the adaptive protocol: it then counts for the worst case and for the audit.

    Raises:
        TensorDropoutError: if the name is that of another attack.

    Example:
        >>> from tensor_dropout.robustness import bim
        >>> register_attack(AttackEntry("bim-margin", bim, "gradient", ("margin",), ("classification",)))
        >>> ensemble("classification", "8/255")[-4:]
        ['adaptive/bim-margin/8/255', 'adaptive/transfer/8/255', 'adaptive/square/8/255', 'adaptive/random/8/255']
        >>> del ATTACKS["bim-margin"]  # this page does not need it any longer
    """
    if ATTACKS.get(entry.name, entry) != entry:
        raise TensorDropoutError(
            f"register_attack: the name {entry.name!r} is taken by another attack; choose another one"
        )
    ATTACKS[entry.name] = entry


def list_attacks(task: str, *roles: Role) -> list[AttackEntry]:
    """The attacks for a task, of these roles."""
    return [entry for entry in ATTACKS.values() if task in entry.tasks and entry.role in roles]


def first_loss(task: str) -> str:
    """The attack that stands for the usual one by gradient."""
    return list_attacks(task, "gradient")[0].name


def name_parts(task: str, budget: str, *roles: Role) -> list[str]:
    """The parts of the adaptive protocol at a radius, of these roles."""
    return [f"adaptive/{entry.name}/{budget}" for role in roles for entry in list_attacks(task, role)]


def ensemble(task: str, budget: str) -> list[str]:
    """All attacks of the adaptive ensemble at a radius."""
    return name_parts(task, budget, "gradient", "transfer", "black box")
