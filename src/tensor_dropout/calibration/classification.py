"""Probabilities of classes that held-out samples confirm, and sets of classes that hold the right one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tensor_dropout.calibration.conformal import Quantile, conformal_quantile
from tensor_dropout.errors import TensorDropoutError

COLDEST, HOTTEST = 1e-2, 1e2
"""Temperatures lie between them."""


@dataclass(frozen=True, eq=False)
class ClassCalibration:
    """A temperature, and how improbable the right class was.

    Attributes:
        temperature: T of ``softmax(logits / T)``, of the highest likelihood of the held-out classes.
        scores: (n,), one minus the probability of the right class of each held-out sample.
        groups: (n,), numbers of what belongs together.
        of_shares: whether the model gives shares of the classes, as ridge does, and no logits.
    """

    temperature: float
    scores: Tensor
    groups: Tensor
    of_shares: bool = False

    def logits(self, outputs: Tensor) -> Tensor:
        """Those of a model's outputs."""
        return shares_as_probabilities(outputs).log() if self.of_shares else outputs

    def probabilities(self, logits: Tensor) -> Tensor:
        """``softmax(logits / T)``, (n, K)."""
        return (logits / self.temperature).softmax(-1)

    def sets(self, logits: Tensor, coverage: float) -> tuple[Tensor, Quantile]:
        """Classes whose probability is at least one minus the quantile of the scores; (n, K), and the quantile.

        If the held-out groups and new ones are exchangeable, the set of a new sample holds its class with a probability
        of at least ``coverage``, for a temperature that was fixed before. It is fitted to the same samples, one number,
        which the guarantee does not cover. Where there are too few groups the set holds all classes.
        """
        quantile = conformal_quantile(self.scores[:, None], self.groups, coverage)
        level = quantile.value if bool(quantile.reached.all()) else torch.ones_like(quantile.value)
        scores = 1 - self.probabilities(logits.double())  # compared as scores: 1 - (1 - p) is not p in floats
        return scores <= level.to(logits.device), quantile

    def as_dict(self) -> dict[str, Any]:
        """Plain values and tensors, for a file."""
        return {
            "temperature": self.temperature, "scores": self.scores, "groups": self.groups, "of_shares": self.of_shares,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ClassCalibration:
        """The inverse of :meth:`as_dict`."""
        return cls(**values)


def shares_as_probabilities(shares: Tensor) -> Tensor:
    """Outputs of ridge, clipped and made to sum to 1."""
    clipped = shares.clamp(min=1e-6, max=1)
    return clipped / clipped.sum(-1, keepdim=True)


def calibrate_classes(logits: Tensor, target: Tensor, groups: Tensor | None = None) -> ClassCalibration:
    """From the logits of samples that the model, or models like it, had not seen.

    Args:
        logits: (n, K).
        target: (n,), the right classes.
        groups: (n,), what belongs together; None where each sample is its own.

    Raises:
        TensorDropoutError: if there are no samples, a logit is not finite, or a class is none of the K.
    """
    logits, target = logits.detach().double().cpu(), target.detach().cpu()
    shapes = [tuple(logits.shape), tuple(target.shape), *([] if groups is None else [tuple(groups.shape)])]
    if logits.ndim != 2 or logits.shape[1] == 0 or set(shapes[1:]) != {(len(logits),)}:
        raise TensorDropoutError(
            f"calibrate: logits are (n, classes), targets and groups one for each of {len(logits)} samples, got "
            f"{', '.join(map(str, shapes))}"
        )
    if not len(logits) or not bool(logits.isfinite().all()):
        what = "a logit is not finite" if len(logits) else "there are no samples"
        raise TensorDropoutError(f"calibrate: {what}; give samples whose logits are numbers")
    if not bool(((target == target.long()) & (target >= 0) & (target < logits.shape[1])).all()):
        raise TensorDropoutError(
            f"calibrate: targets are classes 0 to {logits.shape[1] - 1}, got {float(target.min()):g} to "
            f"{float(target.max()):g}"
        )
    target = target.long()
    temperature = fit_temperature(logits, target)
    right = (logits / temperature).softmax(-1).gather(1, target[:, None])[:, 0]
    numbers = torch.arange(len(logits)) if groups is None else groups.unique(return_inverse=True)[1].cpu()
    return ClassCalibration(temperature, 1 - right, numbers)


def fit_temperature(logits: Tensor, target: Tensor) -> float:
    """The temperature of the highest likelihood: the loss is convex in 1/T, so its slope is bisected.

    Where every sample is right there is none, and it is 1.
    """
    if bool((logits.argmax(1) == target).all()):
        return 1.0
    right = logits.gather(1, target[:, None])[:, 0]

    def slope(inverse: float) -> float:
        mean = ((inverse * logits).softmax(-1) * logits).sum(-1)
        return float((mean - right).mean())

    low, high = 1 / HOTTEST, 1 / COLDEST
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / (low * high) ** 0.5
