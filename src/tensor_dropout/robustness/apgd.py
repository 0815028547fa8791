"""APGD: projected gradient ascent with momentum that halves its own steps (Croce & Hein, 2020)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tensor_dropout.robustness.attack_loop import Search, check_count, check_radius, check_start, seeded
from tensor_dropout.robustness.losses import Loss, find_loss
from tensor_dropout.robustness.norms import Norm, find_norm
from tensor_dropout.robustness.target import Target

MOMENTUM = 0.75
"""α: the share of the new direction."""
PROGRESS = 0.75
"""ρ: steps are halved where the loss rose in no more than this share of them."""


@dataclass
class _State:
    """One row per example: where it is, where it was, the best point so far, and what decides its step."""

    z: Tensor
    previous: Tensor
    gradient: Tensor
    loss: Tensor
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    step: Tensor
    rises: Tensor
    best_at_check: Tensor
    halved: Tensor

    def keep(self, chosen: Tensor) -> _State:
        return _State(*(getattr(self, field.name)[chosen] for field in fields(self)))


@dataclass(frozen=True)
class APGD:
    """Steps of 2ε, halved where they no longer help; then from the best point again.

    With ``z' = P(z + η · normalize(g))`` the next point is ``P(z + α (z' - z) + (1 - α) (z - z_before))``. At
    checkpoints, the first after 22 % of the steps and then ever closer down to 6 %, an example's η is halved if its
    loss rose in at most 75 % of the steps since, or if nothing better was found and η was not halved last time.

    Attributes:
        epsilon: the radius of the ball.
        steps: how many.
        norm: "linf" or "l2".
        loss: "cross_entropy", "dlr" and "margin" are usual; "targeted_dlr" tries the ``goals`` most likely wrong
            classes one after another.
        restarts: from so many random points.
        goals: the number of classes of a targeted loss.
        seed: of the starts.

    Example:
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 5))
        >>> x, y = torch.rand(5, 1, 4, 4), torch.tensor([0, 1, 2, 3, 4])
        >>> APGD(0.1, steps=10, loss="targeted_dlr").name, APGD(0.1, steps=10)(Target(net), x, y).shape
        ('apgd-targeted_dlr', torch.Size([5, 1, 4, 4]))
    """

    epsilon: float
    steps: int = 50
    norm: str = "linf"
    loss: str | Loss = "cross_entropy"
    restarts: int = 1
    goals: int = 9
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_radius(self.epsilon)
        for name in ("steps", "restarts", "goals"):
            check_count(name, getattr(self, name))
        find_norm(self.norm)

    @property
    def name(self) -> str:
        """For records: "apgd-cross_entropy"."""
        return f"apgd-{find_loss(self.loss).name}"

    def __call__(self, target: Target, x: Tensor, y: Tensor, *, start: Tensor | None = None) -> Tensor:
        """The worst inputs found.

        Args:
            target: what is attacked.
            x: (B, C, *size) within the target's bounds.
            y: classes (B,), or numbers (B,) or (B, T).
            start: where to begin, instead of a random point on the surface of the ball.
        """
        check_start(start, x, find_norm(self.norm), self.epsilon, target)
        generator = seeded(x, self.seed)
        if find_loss(self.loss).targeted:
            return self._lead(target, x, y, generator, start)
        search = Search(target, x, y, self.loss, self.epsilon)
        search.begin()
        for _ in range(self.restarts):
            self._climb(search, generator, start)
        return search.worst

    def _lead(self, target: Target, x: Tensor, y: Tensor, generator: torch.Generator, start: Tensor | None) -> Tensor:
        """Towards each of the most likely wrong classes; the margin says which result is the worst."""
        overall = Search(target, x, y, "margin", self.epsilon)
        overall.begin()
        for goal in _likely_wrong(target, x, y, self.goals):
            case = overall.standing()
            if len(case.x) == 0:
                break
            search = Search(target, case.x, case.y, self.loss, self.epsilon, goal=goal[case.rows])
            for _ in range(self.restarts):
                self._climb(search, generator, None if start is None else start[case.rows])
            overall.note(case, search.worst, overall.score(case, search.worst))
        return overall.worst

    def _climb(self, search: Search, generator: torch.Generator, start: Tensor | None) -> None:
        norm, clip = find_norm(self.norm), search.target.clip
        case = search.standing()
        if len(case.x) == 0:
            return
        z = clip(norm.draw_far(case.x, self.epsilon, generator)) if start is None else start[case.rows]
        found = search.ascend(case, z)
        standing = search.note(case, z, found)
        state = _begin(z, found.gradient, found.loss, 2 * self.epsilon)
        window, shortest, shrink = _checkpoints(self.steps)
        since = 0
        for k in range(self.steps):
            if not bool(standing.all()):
                case, state = case.keep(standing), state.keep(standing)
            if len(case.x) == 0:
                return
            centre = case.x
            z = _advance(
                state,
                MOMENTUM if k else 1.0,
                norm,
                lambda z: clip(norm.project(z, centre, self.epsilon)),  # noqa: B023
            )
            found = search.ascend(case, z)
            standing = search.note(case, z, found)
            _update(state, z, found.gradient, found.loss)
            since += 1
            if since == window:
                _halve(state, window)
                since, window = 0, max(window - shrink, shortest)


def _likely_wrong(target: Target, x: Tensor, y: Tensor, goals: int) -> tuple[Tensor, ...]:
    """The most likely classes but the right one, on the clean inputs: ``goals`` tensors (B,)."""
    logits = target.mean_outputs(x).scatter(1, y.long()[:, None], -torch.inf)
    return logits.topk(min(goals, logits.shape[1] - 1), dim=1).indices.unbind(1)


def _checkpoints(steps: int) -> tuple[int, int, int]:
    """The first window, the shortest one, and by how much a window is shorter than the one before."""
    return max(int(0.22 * steps), 1), max(int(0.06 * steps), 1), max(int(0.03 * steps), 1)


def _begin(z: Tensor, gradient: Tensor, loss: Tensor, step: float) -> _State:
    return _State(
        z=z,
        previous=z,
        gradient=gradient,
        loss=loss,
        best=z,
        best_gradient=gradient,
        best_loss=loss,
        step=torch.full((len(z), *[1] * (z.ndim - 1)), step, dtype=z.dtype, device=z.device),
        rises=torch.zeros_like(loss),
        best_at_check=loss,
        halved=torch.ones_like(loss, dtype=torch.bool),
    )


def _advance(state: _State, share: float, norm: Norm, project: Callable[[Tensor], Tensor]) -> Tensor:
    """The next point of every example: a step up the gradient, mixed with the last movement."""
    moved = state.z - state.previous
    climbed = project(state.z + state.step * norm.normalize(state.gradient))
    state.previous = state.z
    return project(state.z + (climbed - state.z) * share + moved * (1 - share))


def _update(state: _State, z: Tensor, gradient: Tensor, loss: Tensor) -> None:
    """Go there, and remember the best point."""
    state.rises = state.rises + (loss > state.loss).to(loss.dtype)
    state.z, state.gradient, state.loss = z, gradient, loss
    better = loss > state.best_loss
    rows = better.reshape(-1, *[1] * (z.ndim - 1))
    state.best = torch.where(rows, z, state.best)
    state.best_gradient = torch.where(rows, gradient, state.best_gradient)
    state.best_loss = torch.where(better, loss, state.best_loss)


def _halve(state: _State, window: int) -> None:
    """At a checkpoint: halve the steps that no longer help, and go back to the best point."""
    stuck = ~state.halved & (state.best_at_check >= state.best_loss)
    halve = (state.rises <= PROGRESS * window) | stuck
    rows = halve.reshape(-1, *[1] * (state.z.ndim - 1))
    state.step = torch.where(rows, state.step / 2, state.step)
    state.z = torch.where(rows, state.best, state.z)
    state.gradient = torch.where(rows, state.best_gradient, state.gradient)
    state.halved, state.best_at_check = halve, state.best_loss
    state.rises = torch.zeros_like(state.rises)
