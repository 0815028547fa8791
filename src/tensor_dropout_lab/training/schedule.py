"""Schedules of the learning rate, by name: a plain function of the step, so that nothing is saved or restored.

To add one, write its function and its entry in :data:`SCHEDULES`; one of your own is registered by
:func:`register_schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    from tensor_dropout_lab.training.config import ScheduleConfig


@dataclass(frozen=True)
class Schedule:
    """A schedule.

    Attributes:
        rate: what the learning rate is multiplied by, ``rate(settings, step, steps, steps_per_epoch)``: ``settings``
            is the table ``[schedule]`` of the config, step 0 is the first, and ``steps`` are those of the whole run.
        uses: the keys of that table that only some schedules use.
    """

    rate: Callable[[ScheduleConfig, int, int, int], float]
    uses: tuple[str, ...] = ()


def _stay(settings: ScheduleConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    return 1.0


def _divide(settings: ScheduleConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """Divided at the milestones, which are epochs."""
    return settings.factor ** sum(step >= milestone * steps_per_epoch for milestone in settings.milestones)


def _fall(settings: ScheduleConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """From 1 to 0 along a cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _rise_and_fall(settings: ScheduleConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """Up from 1/25 over the warm-up, then down to 0, both along a cosine."""
    rising = max(1.0, settings.warmup * steps)
    if step < rising:
        return 1 / 25 + (1 - 1 / 25) * 0.5 * (1 - math.cos(math.pi * step / rising))
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))


SCHEDULES: dict[str, Schedule] = {
    "constant": Schedule(_stay),
    "step": Schedule(_divide, uses=("milestones",)),
    "cosine": Schedule(_fall),
    "one-cycle": Schedule(_rise_and_fall),
}
"""Name -> schedule of the learning rate."""


def register_schedule(name: str, schedule: Schedule) -> None:
    """Give a schedule of your own a name, so that ``schedule.name`` may be it.

    Raises:
        TensorDropoutError: if the name is that of another schedule.

    Example:
        >>> register_schedule("linear", Schedule(lambda settings, step, steps, steps_per_epoch: 1 - step / steps))
        >>> from tensor_dropout_lab.training.config import ScheduleConfig
        >>> rate_at(ScheduleConfig(name="linear"), 30, 40, 10)
        0.25
        >>> del SCHEDULES["linear"]  # this page does not need it any longer
    """
    if SCHEDULES.get(name, schedule) != schedule:
        raise TensorDropoutError(
            f"register_schedule: the name {name!r} is taken by another schedule; choose another one"
        )
    SCHEDULES[name] = schedule


def rate_at(settings: ScheduleConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """What the learning rate of every group is multiplied by in this step.

    Args:
        settings: the config's table.
        step: 0 is the first.
        steps: in the whole run.
        steps_per_epoch: for the milestones.

    Example:
        >>> from tensor_dropout_lab.training.config import ScheduleConfig
        >>> settings = ScheduleConfig(name="step", milestones=[2, 3], factor=0.1)
        >>> [round(rate_at(settings, epoch * 10, 40, 10), 3) for epoch in range(4)]
        [1.0, 1.0, 0.1, 0.01]
    """
    return SCHEDULES[settings.name].rate(settings, step, steps, steps_per_epoch)
