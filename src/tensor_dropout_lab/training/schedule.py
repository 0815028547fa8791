"""The learning rate as a plain function of the step: nothing to save, nothing to restore."""

from __future__ import annotations

import math

from tensor_dropout_lab.training.config import ScheduleConfig


def rate_at(schedule: ScheduleConfig, step: int, steps: int, steps_per_epoch: int) -> float:
    """What the learning rate of every group is multiplied by in this step.

    - constant: 1.
    - step: divided at the milestones (epochs).
    - cosine: from 1 to 0.
    - one-cycle: up from 1/25 over the warm-up, then down to 0, both along a cosine.

    Args:
        schedule: the settings.
        step: 0 is the first.
        steps: in the whole run.
        steps_per_epoch: for the milestones.

    Example:
        >>> step = ScheduleConfig(name="step", milestones=[2, 3], factor=0.1)
        >>> [round(rate_at(step, epoch * 10, 40, 10), 3) for epoch in range(4)]
        [1.0, 1.0, 0.1, 0.01]
    """
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "step":
        return schedule.factor ** sum(step >= milestone * steps_per_epoch for milestone in schedule.milestones)
    if schedule.name == "cosine":
        return 0.5 * (1 + math.cos(math.pi * step / steps))
    rising = max(1.0, schedule.warmup * steps)
    if step < rising:
        return 1 / 25 + (1 - 1 / 25) * 0.5 * (1 - math.cos(math.pi * step / rising))
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1.0, steps - rising)))
