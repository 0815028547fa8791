"""What all attacks share: checks, the worst input found so far, and examples that leave when they are fooled."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.answers import Ascent
from tensor_dropout.robustness.losses import Loss, find_loss
from tensor_dropout.robustness.norms import Norm
from tensor_dropout.robustness.target import Target


class Attack(Protocol):
    """Finds, for every input, a bad one near it."""

    @property
    def name(self) -> str:
        """For records and tables."""
        ...

    @property
    def epsilon(self) -> float:
        """The radius of the ball that it stays in."""
        ...

    def __call__(self, target: Target, x: Tensor, y: Tensor) -> Tensor:
        """The worst inputs found, like x."""
        ...


class Case(NamedTuple):
    """Examples under attack, as far as they are still standing.

    Attributes:
        rows: their numbers among all examples.
        x: the clean inputs.
        y: the targets.
        goal: the classes that a targeted loss leads to, or None.
    """

    rows: Tensor
    x: Tensor
    y: Tensor
    goal: Tensor | None

    def keep(self, chosen: Tensor) -> Case:
        """The chosen ones."""
        return Case(*(None if part is None else part[chosen] for part in self))  # type: ignore[arg-type]


class Search:
    """The worst input found so far for every example, and which examples are still right.

    A misclassified example leaves at once, and the batch shrinks: it cannot become worse. Of a randomized target, a
    single pass proves nothing, so nobody leaves. A regression is never done; its largest loss counts.

    Args:
        target: what is attacked.
        x: clean inputs.
        y: their targets.
        loss: a name or a :class:`Loss`.
        epsilon: the radius, checked here for every attack.
        goal: the classes that a targeted loss leads to.
        leave: whether fooled examples leave early.

    Attributes:
        certain: one pass says all about an input; of a random target, the largest of many losses is partly luck.

    Raises:
        TensorDropoutError: if the loss is for another task or needs more classes, the radius is not positive and
            finite, or inputs and targets do not fit the target.
    """

    def __init__(
        self,
        target: Target,
        x: Tensor,
        y: Tensor,
        loss: str | Loss,
        epsilon: float,
        *,
        goal: Tensor | None = None,
        leave: bool = True,
    ) -> None:
        self.target, self.loss = target, find_loss(loss)
        check_radius(epsilon)
        if self.loss.task != target.task:
            raise TensorDropoutError(
                f"attack: the loss {self.loss.name!r} is for a {self.loss.task}, the target is a {target.task}; "
                f"{'absolute, increase or decrease' if target.task == 'regression' else 'cross_entropy, margin or dlr'}"
                " would fit"
            )
        target.check(x, y)
        if target.task == "classification" and target.count_outputs(x) < self.loss.classes:
            raise TensorDropoutError(
                f"attack: the loss {self.loss.name!r} needs {self.loss.classes} classes, the network has "
                f"{target.count_outputs(x)}; use 'margin'"
            )
        if self.loss.targeted:
            _check_goal(self.loss, goal, len(x), target.count_outputs(x))
        self.certain = not target.is_randomized(x) if leave else True
        self.leave = leave and target.task == "classification" and self.certain and not target.exhaustive
        self.x, self.y, self.goal = x.detach(), y.long() if target.task == "classification" else y, goal
        self.worst = self.x.clone()
        self.value = torch.full((len(x),), -torch.inf, dtype=x.dtype, device=x.device)
        self.fooled = torch.zeros(len(x), dtype=torch.bool, device=x.device)

    def standing(self) -> Case:
        """The examples that are still to be fooled; all, if nobody leaves."""
        everyone = Case(torch.arange(len(self.x), device=self.x.device), self.x, self.y, self.goal)
        return everyone.keep(~self.fooled) if self.leave else everyone

    def begin(self) -> None:
        """Remember the clean inputs: who is wrong without an attack must not be repaired by one."""
        case = self.standing()
        self.note(case, case.x, self.score(case, case.x))

    def ascend(self, case: Case, z: Tensor) -> Ascent:
        """Loss, gradient and scores of these inputs."""
        return self.target.ascend(z, case.y, self.loss, case.goal)

    def score(self, case: Case, z: Tensor) -> Ascent:
        """Loss and scores of these inputs."""
        return self.target.score(z, case.y, self.loss, case.goal)

    def note(self, case: Case, z: Tensor, found: Ascent) -> Tensor:
        """Remember what is worse than before; returns which of the case are to go on, (B,)."""
        fooled = self.target.is_fooled(found.scores, case.y)
        worse = found.loss > self.value[case.rows]
        if self.leave:
            worse = (worse | fooled) & ~self.fooled[case.rows]
            self.fooled[case.rows] |= fooled
        rows = case.rows[worse]
        self.worst[rows] = z[worse]
        self.value[rows] = found.loss[worse].to(self.value.dtype)
        return ~fooled if self.leave else torch.ones_like(fooled)


def _check_goal(loss: Loss, goal: Tensor | None, examples: int, classes: int) -> None:
    fits = isinstance(goal, Tensor) and goal.shape == (examples,) and goal.dtype == torch.int64
    if not fits or not 0 <= int(goal.min()) <= int(goal.max()) < classes:  # type: ignore[union-attr]
        raise TensorDropoutError(
            f"attack: the loss {loss.name!r} needs a goal: classes to lead to, int64 ({examples},) in 0..{classes - 1}"
        )


def check_start(start: Tensor | None, x: Tensor, norm: Norm, epsilon: float, target: Target) -> None:
    """Refuse a start that is not a point of the ball around the inputs, within the bounds.

    Raises:
        TensorDropoutError: if it is not.
    """
    if start is None:
        return
    if start.shape != x.shape:
        raise TensorDropoutError(f"attack: start is like the inputs, {tuple(x.shape)}, got {tuple(start.shape)}")
    farthest = float(norm.measure(start - x).max())
    if not farthest <= epsilon * (1 + 1e-5):
        raise TensorDropoutError(
            f"attack: start lies within epsilon = {epsilon:g} of the inputs; the farthest is {farthest:g} away"
        )
    if not torch.equal(target.clip(start), start):
        raise TensorDropoutError(f"attack: start lies within the bounds {target.bounds}, and this one does not")


def check_radius(epsilon: float) -> None:
    """Refuse a radius that is not a positive number.

    Raises:
        TensorDropoutError: if it is not.
    """
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 < epsilon < math.inf:
        raise TensorDropoutError(f"attack: epsilon is a positive number in the unit of the inputs, got {epsilon!r}")


def check_count(name: str, count: Any) -> None:
    """Refuse a number of steps, restarts or queries that is not positive and whole.

    Raises:
        TensorDropoutError: if it is not.
    """
    if type(count) is not int or count < 1:
        raise TensorDropoutError(f"attack: {name} is a whole number of at least 1, got {count!r}")


def seeded(x: Tensor, seed: int) -> torch.Generator:
    """Random numbers of an attack on the device of x; equal seeds give equal attacks."""
    return torch.Generator(device=x.device).manual_seed(seed)
