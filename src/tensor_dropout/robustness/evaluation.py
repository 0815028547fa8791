"""Evaluate any network: both attack protocols, noise and the audit, every outcome kept, resumable.

``print(evaluate(Target(network, bounds=(0, 1), prepare=normalize), x, y))`` shows the numbers and the verdict.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tensor_dropout.metrics.registry import main_metric
from tensor_dropout.robustness.audit import Audit
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout.robustness.runner import Pair, Runner, Variant, seeded_inside
from tensor_dropout.robustness.settings import Settings
from tensor_dropout.robustness.summary import Interval, make_audit, summarize_evaluation
from tensor_dropout.robustness.target import Target


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found; print it, or take its :meth:`summary`.

    Attributes:
        outcomes: what happened to every example, part by part.
        parts: those that were asked for; ``outcomes`` may hold others.
        settings: what was measured.
        task: "classification" or "regression".
        declared_random: whether the target's mode says that the network is random.
        randomized: whether it is.
    """

    outcomes: Outcomes
    parts: list[str]
    settings: Settings
    task: str
    declared_random: bool
    randomized: bool

    def summary(self, *, targets: Sequence[str] = (), interval: Interval | None = None) -> dict[str, Any]:
        """Every number as JSON takes it: see :func:`~tensor_dropout.robustness.summary.summarize_evaluation`.

        Args:
            targets: the names of a regression's targets.
            interval: from outcomes to the ends of an interval for the main metric; None: without intervals.
        """
        return summarize_evaluation(*self._stored(), targets=targets, interval=interval, **self._about())

    def audit(self) -> Audit | None:
        """Whether the robustness is real; None without the adaptive protocol."""
        return make_audit(*self._stored(), **self._about()) if "gradients" in self.parts else None

    def _stored(self) -> tuple[Outcomes, list[str], str, list[str], str]:
        labels = [budget.label for budget in self.settings.ordered()]
        return self.outcomes, self.parts, self.task, labels, self.settings.main_label()

    def _about(self) -> dict[str, Any]:
        return {
            "norm": self.settings.norm,
            "declared_random": self.declared_random,
            "randomized": self.randomized,
        }

    def __str__(self) -> str:
        found, audit = self.summary(), self.audit()
        metric = main_metric(self.task)
        rows = [("clean", found["clean"][metric.name])]
        for row in found["worst_case"]:
            rows += [
                (f"worst of the {name} attacks at {row['budget']}", row[name][metric.name])
                for name in ("paper", "adaptive")
                if name in row
            ]
        rows += [
            (f"noise {row['corruption']} {row['level']:g} {row['unit']}", row[metric.name]) for row in found["noise"]
        ]
        width = max(len(name) for name, _ in rows)
        lines = [f"{metric.describe()}, {found['examples']} examples"]
        lines += [f"  {name:<{width}}  {value:8.{metric.decimals}f}" for name, value in rows]
        return "\n".join([*lines, audit.verdict] if audit is not None else lines)


def evaluate(
    target: Target,
    x: Tensor,
    y: Tensor,
    settings: Settings | None = None,
    *,
    names: Sequence[str] | None = None,
    outcomes: Outcomes | None = None,
    twin: Target | Callable[[], Target] | None = None,
    validation: Callable[[], Pair] | None = None,
    unknown: Callable[[], Pair] | None = None,
    variants: Mapping[str, Variant] | None = None,
) -> Evaluation:
    """Attack a network by the paper's and by an adaptive protocol, add noise, and audit what its robustness is worth.

    Args:
        target: what is evaluated.
        x: inputs (B, C, *size) within the target's bounds.
        y: classes (B,), or numbers (B,) or (B, T).
        settings: what is measured; None: the defaults.
        names: of the examples, for comparing with other evaluations; None: their numbers.
        outcomes: where results go; parts that are there with the same settings are not run again. Made without an
            identity, they are kept with a fingerprint of networks, inputs, targets and mode. None: in memory.
        twin: another network for the same inputs to transfer attacks from, or a function that makes one when it is
            needed; None: no transfer.
        validation: gives examples to fit a regression's residual variance on.
        unknown: gives examples of classes that the network was not trained for, to be told from the others.
        variants: other forms of the network, by the names of their parts.

    Returns:
        The outcomes, and what follows from them.

    Raises:
        TensorDropoutError: if inputs, targets and network do not fit, or the network returns NaN, or ``outcomes`` are
            of another network, other inputs or another mode.

    Example:
        >>> import torch
        >>> _ = torch.manual_seed(0)
        >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(16, 3))
        >>> target, x = Target(net), torch.rand(20, 1, 4, 4)
        >>> few = Settings("paper", budgets=("8/255",), noise=("blur",))
        >>> report = evaluate(target, x, target.predict(x).output.argmax(1), few)
        >>> print(report)
        accuracy in %, 20 examples
          clean                                   100.0
          worst of the paper attacks at 8/255 ...
          noise blur 0.5 pixels ...
    """
    settings = settings or Settings()
    outcomes = Outcomes() if outcomes is None else outcomes
    with seeded_inside(settings.seed, x):
        running = Runner(target, x, y, names or [str(k) for k in range(len(x))], outcomes, settings, twin)
        parts = running.run(validation, unknown, variants or {})
    return Evaluation(outcomes, parts, settings, target.task, target.mode != "mean", running.randomized)
