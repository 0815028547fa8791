"""θ over training: start gently, end where the method should be."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.dropout import TensorDropout, check_theta, find_dropouts


class ThetaSchedule:
    """Moves θ of every tensor dropout in a model from ``start`` to ``end``; used like a learning-rate scheduler.

    θ lives in a buffer, so a compiled network is not recompiled.

    Args:
        model: a model (or layer) with tensor dropout inside.
        start: θ before and at step ``delay``.
        end: θ from step ``delay + steps`` on.
        steps: over how many calls of :meth:`step` θ moves.
        delay: for how many calls it stays at ``start`` first.
        shape: "linear" or "cosine" (flat at both ends).

    Raises:
        TensorDropoutError: if the model has no tensor dropout, or an argument is out of range.

    Example:
        >>> import tensor_dropout as td
        >>> head = td.CPRegression((8, 4, 4), 10, rank=6, dropout=1.0)
        >>> schedule = td.ThetaSchedule(head, start=1.0, end=0.6, steps=4)
        >>> thetas = []
        >>> for epoch in range(5):
        ...     thetas.append(round(float(head.dropout.theta), 3))
        ...     schedule.step()
        >>> thetas
        [1.0, 0.9, 0.8, 0.7, 0.6]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        start: float,
        end: float,
        steps: int,
        delay: int = 0,
        shape: Literal["linear", "cosine"] = "linear",
    ) -> None:
        self.model = model
        if not self.dropouts:
            raise TensorDropoutError(f"ThetaSchedule: {type(model).__name__} has no TensorDropout to steer")
        self._set(start=start, end=end, steps=steps, delay=delay, shape=shape, last_step=0)

    @property
    def dropouts(self) -> list[TensorDropout]:
        """The dropouts of the model, looked up each time: ``td.load`` puts new ones into it."""
        return find_dropouts(self.model)

    @property
    def theta(self) -> float:
        """θ at the current step."""
        way = min(max((self.last_step - self.delay) / self.steps, 0.0), 1.0)
        if self.shape == "cosine":
            way = (1 - math.cos(math.pi * way)) / 2
        return self.start + way * (self.end - self.start)

    def step(self) -> None:
        """Go one step on and set θ everywhere."""
        self.last_step += 1
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Everything but the model, for a checkpoint."""
        return {key: getattr(self, key) for key in ("start", "end", "steps", "delay", "shape", "last_step")}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, and set θ everywhere.

        Raises:
            TensorDropoutError: if the state lacks an entry or holds one that is out of range; nothing is changed then.
        """
        if lacking := [key for key in self.state_dict() if key not in state]:
            raise TensorDropoutError(f"ThetaSchedule: the state lacks {', '.join(lacking)}")
        self._set(**{key: state[key] for key in self.state_dict()})

    def _set(self, *, start: float, end: float, steps: int, delay: int, shape: str, last_step: int) -> None:
        if type(steps) is not int or steps < 1 or type(delay) is not int or delay < 0:
            raise TensorDropoutError(f"ThetaSchedule: steps is at least 1 and delay 0, got {steps!r} and {delay!r}")
        if shape not in ("linear", "cosine"):
            raise TensorDropoutError(f"ThetaSchedule: shape is 'linear' or 'cosine', got {shape!r}")
        if type(last_step) is not int or last_step < 0:
            raise TensorDropoutError(f"ThetaSchedule: last_step is an integer of at least 0, got {last_step!r}")
        start, end = check_theta(start), check_theta(end)
        self.start, self.end, self.steps, self.delay, self.shape = start, end, steps, delay, shape
        self.last_step = last_step
        self._apply()

    def _apply(self) -> None:
        for dropout in self.dropouts:
            dropout.theta = self.theta  # type: ignore[assignment]  # TensorDropout takes a number and fills its buffer
