"""Attacks that need no gradient: nothing that hides gradients can stop them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.attack_loop import Search, check_count, check_radius, seeded
from tensor_dropout.robustness.losses import Loss
from tensor_dropout.robustness.norms import find_norm
from tensor_dropout.robustness.target import Target

_SHRINK_AT = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Queries, of 10,000, after which the windows' share of the image is halved."""


@dataclass(frozen=True)
class Square:
    """Square attack: random windows of ±ε, kept where they make the loss worse (Andriushchenko et al., 2020).

    It begins with stripes of ±ε; a window covers a share of the image that shrinks from ``share`` as published, the
    schedule stretched to ``queries``. Every example draws its own window. Images, signals and volumes alike; only for
    the ℓ∞ ball (for ℓ2 take :class:`RandomSearch`).

    Attributes:
        epsilon: the radius of the ball.
        queries: how many inputs are tried per example.
        share: of the positions, that the first windows cover.
        loss: None takes the margin, or the absolute error of a regression.
        seed: of the windows.

    Example:
        >>> class Rounded(torch.nn.Linear):
        ...     def forward(self, x):  # no gradient comes back
        ...         return super().forward((4 * x).round().flatten(1))
        >>> _ = torch.manual_seed(0)
        >>> target, x = Target(Rounded(16, 3)), torch.rand(20, 1, 4, 4)
        >>> y = target.predict(x).output.argmax(1)
        >>> worst = Square(0.3, queries=100)(target, x, y)
        >>> bool((target.predict(worst).output.argmax(1) != y).any())
        True
    """

    epsilon: float
    queries: int = 1000
    share: float = 0.8
    loss: str | Loss | None = None
    seed: int = 0
    name: str = "square"

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_radius(self.epsilon)
        check_count("queries", self.queries)
        if not 0 < self.share <= 1:
            raise TensorDropoutError(f"square: share is in (0, 1], got {self.share!r}")

    def __call__(self, target: Target, x: Tensor, y: Tensor) -> Tensor:
        """The worst inputs found."""
        search = Search(target, x, y, self.loss or _usual_loss(target), self.epsilon)
        if x.ndim < 3:
            raise TensorDropoutError(f"square: inputs (B, C, *size) are expected, got {tuple(x.shape)}")
        generator, norm = seeded(x, self.seed), find_norm("linf")
        search.begin()
        case = search.standing()
        z = target.clip(case.x + self.epsilon * _signs((len(case.x), *x.shape[1:2], 1, *x.shape[3:]), x, generator))
        for query in range(self.queries):
            if len(z) == 0:
                break
            standing = search.note(case, z, search.score(case, z))
            if not bool(standing.all()):
                case = case.keep(standing)
            side = _window_side(self.share, query / self.queries, x.shape[2:])
            best = search.worst[case.rows]
            change = 2 * self.epsilon * _windows(best, side, generator)
            z = target.clip(norm.project(best + change, case.x, self.epsilon))
        return search.worst


@dataclass(frozen=True)
class RandomSearch:
    """Points drawn uniformly from the ball, the worst kept: what any attack must beat.

    Attributes:
        epsilon: the radius of the ball.
        queries: how many points are tried per example.
        norm: "linf" or "l2".
        loss: None takes the margin, or the absolute error of a regression.
        seed: of the points.
    """

    epsilon: float
    queries: int = 100
    norm: str = "linf"
    loss: str | Loss | None = None
    seed: int = 0
    name: str = "random"

    def __post_init__(self) -> None:
        """Check the numbers."""
        check_radius(self.epsilon)
        check_count("queries", self.queries)
        find_norm(self.norm)

    def __call__(self, target: Target, x: Tensor, y: Tensor) -> Tensor:
        """The worst inputs found."""
        search = Search(target, x, y, self.loss or _usual_loss(target), self.epsilon)
        generator, norm = seeded(x, self.seed), find_norm(self.norm)
        search.begin()
        for query in range(self.queries):
            case = search.standing()
            if len(case.x) == 0:
                break
            draw = norm.draw if query % 2 else norm.draw_far  # inside and at the edge, in turn
            z = target.clip(draw(case.x, self.epsilon, generator))
            search.note(case, z, search.score(case, z))
        return search.worst


def _usual_loss(target: Target) -> str:
    return "margin" if target.task == "classification" else "absolute"


def _window_side(share: float, progress: float, size: torch.Size) -> int:
    """The side of a window that covers the share that is due at this progress, 0 to 1."""
    halvings = sum(10_000 * progress > query for query in _SHRINK_AT)
    volume = share / 2**halvings * math.prod(size)
    return max(min(round(volume ** (1 / len(size))), *size), 1)


def _windows(x: Tensor, side: int, generator: torch.Generator) -> Tensor:
    """(B, C, *size): one window per example, ±1 in it with one sign per channel, 0 outside."""
    windows = _signs((len(x), x.shape[1], *[1] * (x.ndim - 2)), x, generator)
    for axis in range(2, x.ndim):
        cells = x.shape[axis]
        first = torch.randint(cells - side + 1, (len(x), 1), generator=generator, device=x.device)
        position = torch.arange(cells, device=x.device)
        inside = (position >= first) & (position < first + side)  # (B, cells)
        windows = windows * inside.reshape(len(x), *[1] * (axis - 1), cells, *[1] * (x.ndim - axis - 1))
    return windows


def _signs(shape: tuple[int, ...], x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(2, shape, generator=generator, device=x.device).to(x.dtype) * 2 - 1
