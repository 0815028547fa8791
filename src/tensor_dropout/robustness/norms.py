"""The two balls that an attack may move in: where it starts, which way is steepest, and how it comes back."""

from __future__ import annotations

import math
from typing import Protocol

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError

_TINY = 1e-12


class Norm(Protocol):
    """What an attack asks of a norm; all for batches, example by example."""

    name: str

    def draw(self, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """A point drawn uniformly from the ball around x."""
        ...

    def draw_far(self, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """A random point on the surface of the ball around x."""
        ...

    def normalize(self, gradient: Tensor) -> Tensor:
        """The direction of steepest ascent, of norm 1 (0 where the gradient is 0)."""
        ...

    def project(self, z: Tensor, x: Tensor, epsilon: float) -> Tensor:
        """The point of the ball around x that is nearest to z."""
        ...

    def measure(self, difference: Tensor) -> Tensor:
        """The norm of every example, (B,)."""
        ...


class Linf:
    """The largest change of any number.

    Example:
        >>> Linf().project(torch.tensor([[0.9, 0.1]]), torch.tensor([[0.5, 0.0]]), 0.2)
        tensor([[0.7000, 0.1000]])
    """

    name = "linf"

    def draw(self, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Uniform in the cube."""
        return x + epsilon * _uniform(x, generator)

    def draw_far(self, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Uniform in the cube, stretched until it touches a face."""
        direction = _uniform(x, generator)
        return x + epsilon * direction / _column(direction.flatten(1).abs().amax(1), x)

    def normalize(self, gradient: Tensor) -> Tensor:
        """The signs."""
        return gradient.sign()

    def project(self, z: Tensor, x: Tensor, epsilon: float) -> Tensor:
        """Clip every number."""
        return x + (z - x).clamp(-epsilon, epsilon)

    def measure(self, difference: Tensor) -> Tensor:
        """The largest magnitude."""
        return difference.flatten(1).abs().amax(1)


class L2:
    """The Euclidean length of the change of an example, over all its numbers.

    Example:
        >>> L2().project(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), 1.0)
        tensor([[0.6000, 0.8000]])
    """

    name = "l2"

    def draw(self, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Uniform in the ball: a random direction, and a radius with density r^(n-1)."""
        radius = torch.rand(len(x), generator=generator, device=x.device, dtype=x.dtype) ** (1 / math.prod(x.shape[1:]))
        return x + (self.draw_far(x, epsilon, generator) - x) * _column(radius, x)

    def draw_far(self, x: Tensor, epsilon: float, generator: torch.Generator) -> Tensor:
        """Uniform on the sphere."""
        return x + epsilon * self.normalize(torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype))

    def normalize(self, gradient: Tensor) -> Tensor:
        """The gradient divided by its length; a tiny one is scaled up first, or its squares would underflow."""
        largest = gradient.flatten(1).abs().amax(1)
        scale = torch.where((largest < _TINY) & (largest > 0), largest, torch.ones_like(largest))
        gradient = gradient / _column(scale, gradient)
        return gradient * _column(1 / self.measure(gradient).clamp(min=_TINY), gradient)

    def project(self, z: Tensor, x: Tensor, epsilon: float) -> Tensor:
        """Shorten what is too long."""
        difference = z - x
        return x + difference * _column((epsilon / self.measure(difference).clamp(min=_TINY)).clamp(max=1), z)

    def measure(self, difference: Tensor) -> Tensor:
        """The Euclidean length."""
        return difference.flatten(1).square().sum(1).sqrt()


NORMS: dict[str, Norm] = {"linf": Linf(), "l2": L2()}
"""Name -> norm."""


def find_norm(name: str) -> Norm:
    """The norm of that name.

    Raises:
        TensorDropoutError: if there is none.
    """
    if name not in NORMS:
        raise TensorDropoutError(f"attack: norm is one of {', '.join(NORMS)}, got {name!r}")
    return NORMS[name]


def _uniform(x: Tensor, generator: torch.Generator) -> Tensor:
    return 2 * torch.rand(x.shape, generator=generator, device=x.device, dtype=x.dtype) - 1


def _column(values: Tensor, x: Tensor) -> Tensor:
    """(B,) -> (B, 1, …, 1), to multiply a batch like x."""
    return values.reshape(-1, *[1] * (x.ndim - 1))
