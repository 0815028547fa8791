"""Which attacks and which noise an evaluation consists of: plans whose parts run one by one.

Importing this module does not import torch: reports are written from records alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task
from tensor_dropout.robustness.attacks import AttackEntry, Role, list_attacks
from tensor_dropout.robustness.noise import CORRUPTIONS, suitable

if TYPE_CHECKING:
    from tensor_dropout.robustness.attack_loop import Attack

Protocol = Literal["paper", "adaptive", "both", "none"]
PAPER: tuple[Literal["fgsm", "bim", "pgd"], ...] = ("fgsm", "bim", "pgd")
"""The paper's attacks; see :func:`~tensor_dropout.robustness.paper_attack`."""
PAPER_STRENGTHS = (2, 8, 16)
CURVE_STRENGTHS = (1, 2, 4, 8, 16, 32, 64, 128)
UNBOUNDED = "unbounded"
"""The label of a radius from which every input can be reached."""


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
    unit: float = 1.0,
    seed: int = 0,
) -> list[AttackPart]:
    """The attacks of a protocol, the cheap ones first.

    - paper: FGSM, BIM and PGD at λ/255 for λ 2, 8, 16 and at the other radii asked for (of linf), and the FGSM curve at
      λ·1e-3 for λ 1 to 128, as printed.
    - adaptive: PGD with the cross-entropy and with the margin loss at every radius, then, on those still standing,
      APGD with three losses, a transfer from a twin, Square and random search; and what the audit needs besides:
      all of :data:`~tensor_dropout.robustness.attacks.ATTACKS` that suits the task and the norm.

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
        unit: of the radii: the range of the inputs.
        seed: of random starts.
    """
    parts: list[AttackPart] = []
    if protocol in ("paper", "both"):
        parts += _plan_paper(_usual_loss(task), budgets if norm == "linf" else (), unit, seed)
    if protocol not in ("adaptive", "both"):
        return parts
    suitable = [entry for entry in list_attacks(task, *get_args(Role)) if norm in entry.norms]
    wide = [entry for entry in suitable if entry.on_all]
    checks = [entry for entry in suitable if entry.role == "check" and (entry.averaged or randomized)]
    settings: dict[str, Any] = {
        "task": task,
        "classes": classes,
        "norm": norm,
        "steps": steps,
        "queries": queries,
        "seed": seed,
    }

    def plan(entries: Sequence[AttackEntry], budget: Budget) -> Iterator[AttackPart]:
        for entry in entries:
            attack = entry.make(unit * budget.epsilon, **settings)
            yield AttackPart(f"adaptive/{entry.name}/{budget.label}", attack, budget.epsilon, entry.averaged)

    for budget in (*budgets, Budget(UNBOUNDED, unbounded)):
        parts += plan(wide, budget)
        if budget.label == main:
            parts += plan([entry for entry in checks if steps > 1 or entry.divisor == 1], budget)
    for budget in budgets:
        before = [f"adaptive/{entry.name}/{budget.label}" for entry in wide]
        others = [entry for entry in suitable if not entry.on_all and entry.role != "check"]
        others.sort(key=lambda entry: get_args(Role).index(entry.role))
        for entry, part in zip(others, plan(others, budget), strict=True):
            parts.append(replace(part, after=tuple(before), transferred=entry.role == "transfer"))
            before.append(part.name)
    return parts


def _usual_loss(task: Task) -> str:
    return "cross_entropy" if task == "classification" else "absolute"


def _plan_paper(loss: str, budgets: Sequence[Budget], unit: float, seed: int) -> list[AttackPart]:
    from tensor_dropout.robustness.gradient_attacks import paper_attack

    parts = []
    for budget in sorted({*map(_paper_budget, PAPER_STRENGTHS), *budgets}, key=lambda budget: budget.epsilon):
        for name in PAPER:
            attack = replace(paper_attack(name, 255 * budget.epsilon, unit / 255, seed=seed), loss=loss)
            parts.append(AttackPart(f"paper/{name}/{budget.label}", attack, attack.epsilon / unit, averaged=False))
    for strength in CURVE_STRENGTHS:
        attack = replace(paper_attack("fgsm", strength, unit * 1e-3), loss=loss)
        parts.append(AttackPart(f"paper/fgsm/{strength}e-3", attack, attack.epsilon / unit, averaged=False))
    return parts


def _paper_budget(strength: int) -> Budget:
    return Budget.parse(f"{strength}/255")


def choose_noise(noise: Sequence[str], spatial_rank: int, bounded: bool) -> tuple[str, ...]:
    """The families of noise that were asked for: names, or "all" that suit the inputs, or "none".

    Args:
        noise: as asked for.
        spatial_rank: the number of spatial axes of the inputs.
        bounded: whether they have bounds.

    Raises:
        TensorDropoutError: if a name is unknown, or a family needs bounds that the inputs do not have.

    Example:
        >>> choose_noise(["none"], 2, True), choose_noise(["all"], 2, False)
        ((), ('gaussian', 'blur', 'pixelate', 'contrast'))
    """
    if list(noise) == ["none"]:
        return ()
    if list(noise) == ["all"]:
        return tuple(suitable(spatial_rank, bounded))
    for name in noise:
        if name not in CORRUPTIONS:
            raise TensorDropoutError(
                f"evaluate: there is no noise {name!r}; known are {', '.join(CORRUPTIONS)}, all and none"
            )
        if CORRUPTIONS[name].needs_bounds and not bounded:
            raise TensorDropoutError(f"evaluate: the noise {name!r} needs inputs with bounds, and these have none")
    return tuple(noise)


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
