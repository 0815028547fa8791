"""The attack of adversarial training: inputs moved to a higher loss, by one step within their room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensor_dropout_lab.data.base import StandardizeImages


class Room(NamedTuple):
    """How far an input may be moved, in the unit of prepared inputs, each (B, C, 1, …), or 1 for B or C.

    Attributes:
        radius: from where it is.
        low: what the darkest stored value would be.
        high: what the brightest would be.
    """

    radius: Tensor
    low: Tensor
    high: Tensor


def find_room(stored: Tensor, prepare: Any, radius: float, bounds: tuple[float, float]) -> Room:
    """A radius and bounds of stored inputs, as prepared ones have them.

    An input that is scaled by its own contrast is not moved if that is below a tenth of the radius: it would be blown
    up beyond all others.

    Args:
        stored: (B, C, …) of any dtype.
        prepare: a module with ``measure``, such as :class:`~tensor_dropout_lab.data.base.StandardizeImages`.
        radius: in stored units.
        bounds: the smallest and the largest stored value.

    Example:
        >>> room = find_room(torch.tensor([[[0, 4]]]), StandardizeImages(), 1.0, (0.0, 16.0))
        >>> [each.item() for each in room]
        [0.5, -1.0, 7.0]
    """
    mean, scale = prepare.measure(stored)
    low, high = ((bound - mean) * scale for bound in bounds)
    reach = radius * scale
    return Room(torch.where(reach > 10, 0.0, reach) if isinstance(prepare, StandardizeImages) else reach, low, high)


def attack(x: Tensor, room: Room, lose: Callable[[Tensor], Tensor]) -> Tensor:
    """Inputs moved to a higher loss within their room, by one signed step of 1.25 radii from a random start.

    This is the one-step attack of fast adversarial training (Wong et al., 2020): it doubles the cost of a step.

    Args:
        x: (B, …) prepared inputs.
        room: in their unit; an input that is outside its bounds may stay where it is.
        lose: from inputs to a mean loss.
    """
    radius = room.radius
    low, high = torch.minimum(x, room.low), torch.maximum(x, room.high)
    start = ((2 * torch.rand_like(x) - 1) * radius + x).clamp(low, high).requires_grad_(True)
    gradient = torch.autograd.grad(lose(start), start)[0]
    moved = (start + 1.25 * radius * gradient.sign()).detach()
    return moved.clamp(x - radius, x + radius).clamp(low, high)
