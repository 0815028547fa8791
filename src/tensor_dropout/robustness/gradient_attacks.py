"""FGSM, BIM and PGD: start, step, project, written once for both norms and all losses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.attack_loop import Search, check_count, check_radius, check_start, seeded
from tensor_dropout.robustness.losses import Loss
from tensor_dropout.robustness.norms import find_norm
from tensor_dropout.robustness.target import Target


@dataclass(frozen=True)
class Iterated:
    """Repeated steps of fixed length up the gradient, projected back into the ball and the bounds.

    ``z ← clip(project(z + step · normalize(∇ loss(z))))``

    Attributes:
        name: for records and tables.
        epsilon: the radius of the ball, in the unit of the inputs.
        step: the length of a step.
        steps: how many.
        norm: "linf" or "l2".
        loss: what is maximised; see ``LOSSES``.
        start: "centre", the clean input, or "random", a point of the ball.
        restarts: how often, each time from a new random point, for those still standing.
        keep: "best", the worst input met on the way, and fooled examples leave the batch (against a random target, the
            worst of the ends of all restarts); "last", where the last step ends, as Foolbox and the paper have it.
        seed: of the random starts.

    Raises:
        TensorDropoutError: if a number is not positive, or several restarts would all begin at the centre.

    Example:
        >>> from tensor_dropout.robustness import Target, pgd
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> x, y = torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 2, 0, 1])
        >>> worst = pgd(0.1, steps=10)(Target(net), x, y)
        >>> bool((worst - x).abs().max() <= 0.1 + 1e-6)
        True
    """

    name: str
    epsilon: float
    step: float
    steps: int
    norm: str = "linf"
    loss: str | Loss = "cross_entropy"
    start: Literal["centre", "random"] = "centre"
    restarts: int = 1
    keep: Literal["best", "last"] = "best"
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_radius(self.epsilon)
        if not (isinstance(self.step, int | float) and 0 < self.step < math.inf):
            raise TensorDropoutError(f"{self.name}: step is a positive number, got {self.step!r}")
        check_count("steps", self.steps)
        check_count("restarts", self.restarts)
        find_norm(self.norm)
        if self.start not in ("centre", "random") or self.keep not in ("best", "last"):
            raise TensorDropoutError(
                f"{self.name}: start is 'centre' or 'random', and keep is 'best' or 'last'; got {self.start!r} and "
                f"{self.keep!r}"
            )
        if self.restarts > 1 and (self.start == "centre" or self.keep == "last"):
            raise TensorDropoutError(f"{self.name}: {self.restarts} restarts need start='random' and keep='best'")

    def __call__(
        self, target: Target, x: Tensor, y: Tensor, *, goal: Tensor | None = None, start: Tensor | None = None
    ) -> Tensor:
        """The worst inputs found.

        Args:
            target: what is attacked.
            x: (B, C, *size) within the target's bounds.
            y: classes (B,), or numbers (B,) or (B, T).
            goal: the classes that a targeted loss leads to, (B,).
            start: where to begin, instead of ``self.start``.
        """
        check_start(start, x, find_norm(self.norm), self.epsilon, target)
        leave = self.keep == "best"
        search = Search(target, x, y, self.loss, self.epsilon, goal=goal, leave=leave)
        generator = seeded(x, self.seed)
        if leave and (start is not None or self.start == "random" or not search.certain):  # else the first step does
            search.begin()
        for _ in range(self.restarts):
            last = self._climb(search, generator, start)
        return last if self.keep == "last" else search.worst

    def _climb(self, search: Search, generator: torch.Generator, start: Tensor | None) -> Tensor:
        norm, clip = find_norm(self.norm), search.target.clip
        case = search.standing()
        if start is not None:
            z = start[case.rows]
        else:
            z = case.x if self.start == "centre" else clip(norm.draw(case.x, self.epsilon, generator))
        for _ in range(self.steps):
            if len(z) == 0:
                return z
            found = search.ascend(case, z)
            gradient = found.gradient
            if self.keep == "best" and search.certain:
                standing = search.note(case, z, found)
                if not bool(standing.all()):
                    case, z, gradient = case.keep(standing), z[standing], gradient[standing]
            z = clip(norm.project(z + self.step * norm.normalize(gradient), case.x, self.epsilon))
        if self.keep == "best" and len(z):
            search.note(case, z, search.score(case, z))
        return z


def fgsm(epsilon: float, *, norm: str = "linf", loss: str | Loss = "cross_entropy") -> Iterated:
    """One step of the whole radius from the clean input (Goodfellow, Shlens, Szegedy, 2015).

    Args:
        epsilon: the radius.
        norm: "linf" or "l2".
        loss: see ``LOSSES``.
    """
    return Iterated("fgsm", epsilon, epsilon, 1, norm, loss, keep="last")


def bim(
    epsilon: float,
    *,
    steps: int = 10,
    step: float | None = None,
    norm: str = "linf",
    loss: str | Loss = "cross_entropy",
    keep: Literal["best", "last"] = "last",
) -> Iterated:
    """Steps from the clean input (Kurakin, Goodfellow, Bengio, 2017).

    Args:
        epsilon: the radius.
        steps: how many.
        step: their length; None: a fifth of the radius, or more where so many steps would not reach its end.
        norm: "linf" or "l2".
        loss: see ``LOSSES``.
        keep: "last", where the last step ends, or "best".
    """
    check_count("steps", steps)
    step = step if step is not None else max(0.2 * epsilon, epsilon / steps)
    return Iterated("bim", epsilon, step, steps, norm, loss, keep=keep)


def pgd(
    epsilon: float,
    *,
    steps: int = 50,
    step: float | None = None,
    restarts: int = 1,
    norm: str = "linf",
    loss: str | Loss = "cross_entropy",
    keep: Literal["best", "last"] = "best",
    seed: int = 0,
) -> Iterated:
    """Steps from a random point of the ball (Madry et al., 2018).

    Args:
        epsilon: the radius.
        steps: how many.
        step: their length; None: 2.5 · epsilon / steps, so that every point of the ball can be reached.
        restarts: from so many random points.
        norm: "linf" or "l2".
        loss: see ``LOSSES``.
        keep: "best", the worst input met on the way, or "last".
        seed: of the starts.
    """
    check_count("steps", steps)
    step = step if step is not None else 2.5 * epsilon / steps
    return Iterated("pgd", epsilon, step, steps, norm, loss, "random", restarts, keep, seed)


def paper_attack(name: Literal["fgsm", "bim", "pgd"], strength: float, unit: float, *, seed: int = 0) -> Iterated:
    """The paper's attack at λ = ``strength``: ε = λ · unit, steps of one unit, ``ceil(min(λ + 4, 1.25 λ))`` of them.

    The paper's λ is in 1/255 of the range for ImageNet, and in 1e-3 for CIFAR-100: both readings are offered.

    Args:
        name: "fgsm", "bim" or "pgd".
        strength: λ.
        unit: 1/255 or 1e-3, times the range of the inputs.
        seed: of PGD's start.

    Example:
        >>> attack = paper_attack("bim", 8, 1 / 255)
        >>> attack.steps, round(attack.epsilon * 255), round(attack.step * 255)
        (10, 8, 1)
    """
    steps = math.ceil(min(strength + 4, 1.25 * strength) - 1e-9)  # 8/255 · 255 is 8, but for rounding
    epsilon = strength * unit
    if name == "fgsm":
        return fgsm(epsilon)
    if name == "bim":
        return bim(epsilon, steps=steps, step=unit)
    if name == "pgd":
        return pgd(epsilon, steps=steps, step=unit, keep="last", seed=seed)
    raise TensorDropoutError(f"attack: the paper has fgsm, bim and pgd, got {name!r}")
