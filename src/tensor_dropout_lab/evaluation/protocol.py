"""Which attacks and which noise an evaluation consists of, as a list of parts that can be run one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, Literal

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task
from tensor_dropout.robustness.apgd import APGD
from tensor_dropout.robustness.audit import ensemble, first_loss
from tensor_dropout.robustness.blackbox import RandomSearch, Square
from tensor_dropout.robustness.iterated import fgsm, paper_attack, pgd
from tensor_dropout.robustness.noise import CORRUPTIONS
from tensor_dropout.robustness.search import Attack

Protocol = Literal["paper", "adaptive", "both", "none"]
PAPER_STRENGTHS = (2, 8, 16)
CURVE_STRENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
UNBOUNDED = "unbounded"


@dataclass(frozen=True)
class Budget:
    """A radius, in shares of the inputs' range, and how it is written: "8/255".

    Example:
        >>> Budget.parse("8/255")
        Budget(label='8/255', epsilon=0.03137254901960784)
    """

    label: str
    epsilon: float

    @staticmethod
    def parse(text: str) -> Budget:
        """From "8/255" or "0.03".

        Raises:
            TensorDropoutError: if it is not a positive number.
        """
        top, slash, bottom = text.partition("/")
        try:
            numbers = [float(top), *([float(bottom)] if slash else [])]
        except ValueError:
            numbers = [-1.0]
        epsilon = numbers[0] / (numbers[1] if len(numbers) > 1 and numbers[1] else 1.0)
        if min(numbers) <= 0 or not 0 < epsilon < float("inf"):
            raise TensorDropoutError(f"evaluate: epsilon is a positive number such as 8/255 or 0.03, got {text!r}")
        return Budget(text, epsilon)


@dataclass(frozen=True)
class AttackPart:
    """One attack at one radius.

    Attributes:
        name: "protocol/attack/radius".
        attack: the attack.
        transferred: whether it is made on a twin, and its result tried on the target.
        averaged: whether gradients are averaged over the randomness of a random network.
        after: parts whose fooled examples need not be attacked again.
        epsilon: the radius.
    """

    name: str
    attack: Attack
    epsilon: float
    averaged: bool = True
    after: tuple[str, ...] = ()
    transferred: bool = False

    def settings(self) -> dict[str, Any]:
        """What the outcome depends on, for records."""
        known: dict[str, Any] = asdict(self.attack) if is_dataclass(self.attack) else {}
        return {"attack": self.name.split("/")[1], **known, "epsilon": self.epsilon, "averaged": self.averaged}


@dataclass(frozen=True)
class NoisePart:
    """One family of noise at one level, drawn once."""

    name: str
    corruption: str
    level: float
    draw: int

    def settings(self) -> dict[str, Any]:
        """What the outcome depends on, for records."""
        return {"corruption": self.corruption, "level": self.level, "draw": self.draw}


Part = AttackPart | NoisePart


def plan_attacks(
    protocol: Protocol,
    task: Task,
    classes: int,
    budgets: Sequence[Budget],
    *,
    main: str,
    norm: str = "linf",
    steps: int = 50,
    queries: int = 1000,
    randomized: bool = False,
    unbounded: float = 1.0,
    seed: int = 0,
) -> list[AttackPart]:
    """The attacks of a protocol, the cheap ones first.

    - paper: FGSM, BIM and PGD at λ/255 for λ 2, 8, 16 and at the other radii asked for (of linf), and the FGSM curve at
      λ·1e-3 for λ 1 to 128, as printed.
    - adaptive: PGD with the cross-entropy and with the margin loss at every radius, then, on those still standing,
      APGD with three losses, a transfer from a twin, Square and random search; and what the audit needs besides.

    Args:
        protocol: "paper", "adaptive", "both" or "none".
        task: what the network does.
        classes: how many classes, or outputs.
        budgets: the radii of the adaptive protocol, from small to large.
        main: the label of the radius at which the audit looks closely.
        norm: "linf" or "l2"; the paper's are linf in any case.
        steps: of PGD and APGD.
        queries: of Square; a tenth of them of the random search.
        randomized: whether the network is random: then attacks with one draw per gradient are added.
        unbounded: a radius from which every input can be reached.
        seed: of random starts.
    """
    parts: list[AttackPart] = []
    loss = "cross_entropy" if task == "classification" else "absolute"
    if protocol in ("paper", "both"):
        parts += _plan_paper(loss, budgets if norm == "linf" else (), seed)
    if protocol not in ("adaptive", "both"):
        return parts
    usual = first_loss(task)
    losses = {"pgd-ce": "cross_entropy", "pgd-margin": "margin"}
    if task == "regression":
        losses = {"pgd-absolute": "absolute", "pgd-increase": "increase", "pgd-decrease": "decrease"}
    for budget in (*budgets, Budget(UNBOUNDED, unbounded)):
        radius = budget.epsilon
        for kind, name in losses.items():
            attack = pgd(radius, steps=steps, norm=norm, loss=name, seed=seed)
            parts.append(AttackPart(f"adaptive/{kind}/{budget.label}", attack, radius))
        if budget.label == main:
            short = pgd(radius, steps=max(steps // 5, 1), norm=norm, loss=loss, seed=seed)
            usually = pgd(radius, steps=steps, norm=norm, loss=loss, seed=seed)
            parts.append(AttackPart(f"adaptive/fgsm/{main}", fgsm(radius, norm=norm, loss=loss), radius))
            if short.steps < steps:
                parts.append(AttackPart(f"adaptive/{usual}-few/{main}", short, radius))
            if randomized:
                parts.append(AttackPart(f"adaptive/{usual}-single/{main}", usually, radius, averaged=False))
    for budget in budgets:
        parts += _plan_ensemble(task, classes, budget, norm, steps, queries, seed)
    return parts


def _plan_paper(loss: str, budgets: Sequence[Budget], seed: int) -> list[AttackPart]:
    parts = []
    for budget in sorted({*map(_paper_budget, PAPER_STRENGTHS), *budgets}, key=lambda budget: budget.epsilon):
        for name in ("fgsm", "bim", "pgd"):
            attack = replace(paper_attack(name, 255 * budget.epsilon, 1 / 255, seed=seed), loss=loss)
            parts.append(AttackPart(f"paper/{name}/{budget.label}", attack, attack.epsilon, averaged=False))
    for strength in CURVE_STRENGTHS:
        attack = replace(paper_attack("fgsm", strength, 1e-3), loss=loss)
        parts.append(AttackPart(f"paper/fgsm/{strength}e-3", attack, attack.epsilon, averaged=False))
    return parts


def _paper_budget(strength: int) -> Budget:
    return Budget.parse(f"{strength}/255")


def _plan_ensemble(
    task: Task, classes: int, budget: Budget, norm: str, steps: int, queries: int, seed: int
) -> list[AttackPart]:
    """The attacks on those still standing, each after all before it."""
    radius = budget.epsilon
    attacks: dict[str, Attack] = {}
    if task == "classification":
        attacks["apgd-ce"] = APGD(radius, steps, norm, "cross_entropy", seed=seed)
        attacks["apgd-dlr"] = APGD(radius, steps, norm, "dlr" if classes >= 3 else "margin", seed=seed)
        towards = "targeted_dlr" if classes >= 4 else "targeted_margin"
        attacks["apgd-targeted"] = APGD(radius, steps, norm, towards, seed=seed)
    else:
        attacks["apgd-absolute"] = APGD(radius, steps, norm, "absolute", seed=seed)
    attacks["transfer"] = pgd(radius, steps=steps, norm=norm, loss=_plain_loss(task), seed=seed)
    if norm == "linf":
        attacks["square"] = Square(radius, queries, seed=seed)
    attacks["random"] = RandomSearch(radius, max(queries // 10, 1), norm, seed=seed)
    planned = [f"adaptive/{kind}/{budget.label}" for kind in attacks]
    before = [name for name in ensemble(task, budget.label) if name not in planned and "/pgd-" in name]
    parts = []
    for kind, attack in attacks.items():
        name = f"adaptive/{kind}/{budget.label}"
        parts.append(AttackPart(name, attack, radius, after=tuple(before), transferred=kind == "transfer"))
        before.append(name)
    return parts


def _plain_loss(task: Task) -> str:
    return "margin" if task == "classification" else "absolute"


def plan_noise(corruptions: Sequence[str], repeats: int) -> list[NoisePart]:
    """Every level of these families, each drawn ``repeats`` times (once if it draws nothing).

    Raises:
        TensorDropoutError: if a family is unknown.
    """
    parts = []
    for name in corruptions:
        if name not in CORRUPTIONS:
            raise TensorDropoutError(f"evaluate: there is no noise {name!r}; known are {', '.join(CORRUPTIONS)}")
        corruption = CORRUPTIONS[name]
        for level in corruption.levels:
            for draw in range(repeats if corruption.random else 1):
                parts.append(NoisePart(f"noise/{name}/{level:g}/{draw}", name, level, draw))
    return parts
