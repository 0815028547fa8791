"""What an attack maximises: one number per example, larger is worse for the network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task


@dataclass(frozen=True)
class Loss:
    """A loss of an attack.

    Attributes:
        name: the name it is asked for by.
        task: the networks that it is for.
        function: outputs (B, O), targets (B,) or (B, O), goals (B,) or None -> (B,).
        classes: the least number of classes.
        targeted: whether it leads to a given wrong class, the goal.
    """

    name: str
    task: Task
    function: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    classes: int = 2
    targeted: bool = False

    def __call__(self, outputs: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
        """The loss of every example."""
        return self.function(outputs, y, goal)


def _take(logits: Tensor, classes: Tensor | None) -> Tensor:
    assert classes is not None
    return logits.gather(1, classes[:, None])[:, 0]


def _best_other(logits: Tensor, y: Tensor) -> Tensor:
    # scatter, not a comparison with the maximum: a tie is a loss of exactly 0
    return logits.scatter(1, y[:, None], -torch.inf).amax(1)


def cross_entropy(logits: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``-log softmax(z)_y``. It saturates: for large margins its gradient underflows (Carlini & Wagner, 2017).

    Example:
        >>> bool(cross_entropy(torch.tensor([[200.0, 0.0]]), torch.tensor([0])) == 0)
        True
    """
    return F.cross_entropy(logits, y, reduction="none")


def margin(logits: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``max_{j≠y} z_j - z_y``, positive when the example is misclassified (Carlini & Wagner, 2017).

    Example:
        >>> margin(torch.tensor([[200.0, 0.0]]), torch.tensor([0]))
        tensor([-200.])
    """
    return _best_other(logits, y) - _take(logits, y)


def dlr(logits: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """Difference of logits ratio ``-(z_y - max_{j≠y} z_j) / (z_π1 - z_π3)``: no scale can hide it (Croce & Hein, 2020).

    Example:
        >>> z, y = torch.tensor([[3.0, 1.0, 0.0]]), torch.tensor([0])
        >>> dlr(z, y), dlr(1000 * z, y)
        (tensor([-0.6667]), tensor([-0.6667]))
    """
    top = logits.topk(3, dim=1).values
    return margin(logits, y) / (top[:, 0] - top[:, 2] + 1e-12)


def targeted_dlr(logits: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``-(z_y - z_goal) / (z_π1 - (z_π3 + z_π4) / 2)`` (Croce & Hein, 2020)."""
    top = logits.topk(4, dim=1).values
    return -(_take(logits, y) - _take(logits, goal)) / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)


def targeted_cross_entropy(logits: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``log softmax(z)_goal``."""
    assert goal is not None
    return -F.cross_entropy(logits, goal, reduction="none")


def targeted_margin(logits: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``z_goal - z_y``."""
    return _take(logits, goal) - _take(logits, y)


def absolute(outputs: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``Σ_t |f_t - y_t|``: the error of a regression, whichever way it goes.

    Example:
        >>> absolute(torch.tensor([[40.0]]), torch.tensor([43.0]))
        tensor([3.])
    """
    return (outputs - y.reshape(outputs.shape)).abs().flatten(1).sum(1)


def increase(outputs: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``Σ_t f_t - y_t``: make the prediction too large."""
    return (outputs - y.reshape(outputs.shape)).flatten(1).sum(1)


def decrease(outputs: Tensor, y: Tensor, goal: Tensor | None = None) -> Tensor:
    """``Σ_t y_t - f_t``: make the prediction too small."""
    return -increase(outputs, y)


LOSSES: dict[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss("cross_entropy", "classification", cross_entropy),
        Loss("margin", "classification", margin),
        Loss("dlr", "classification", dlr, classes=3),
        Loss("targeted_dlr", "classification", targeted_dlr, classes=4, targeted=True),
        Loss("targeted_cross_entropy", "classification", targeted_cross_entropy, targeted=True),
        Loss("targeted_margin", "classification", targeted_margin, targeted=True),
        Loss("absolute", "regression", absolute),
        Loss("increase", "regression", increase),
        Loss("decrease", "regression", decrease),
    )
}
"""Name -> loss."""


def find_loss(loss: str | Loss) -> Loss:
    """The loss of that name; a loss of your own is passed through.

    Raises:
        TensorDropoutError: if there is none.
    """
    if isinstance(loss, Loss):
        return loss
    if loss not in LOSSES:
        raise TensorDropoutError(f"attack: there is no loss {loss!r}; known are {', '.join(LOSSES)}")
    return LOSSES[loss]
