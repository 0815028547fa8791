"""What an evaluation measures."""

from __future__ import annotations

from dataclasses import dataclass

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.norms import find_norm
from tensor_dropout.robustness.protocol import Budget, Protocol


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        protocol: "paper", "adaptive", "both" or "none".
        budgets: the radii of both protocols, such as "8/255" or 0.1: shares of the inputs' range, or in their own unit
            if they have no bounds.
        main: the label of the radius that the audit looks at closely; None: the middle one.
        norm: of the adaptive protocol: "linf" or "l2".
        noise: families of noise; ("all",): those that suit the inputs.
        repeats: draws of each noise.
        steps: of PGD and APGD.
        queries: of Square.
        seed: of everything random.

    Raises:
        TensorDropoutError: if a setting is not one of these.

    Example:
        >>> settings = Settings(budgets=("8/255", 0.1), noise=("all",))
        >>> [budget.label for budget in settings.ordered()], settings.main_label()
        (['8/255', '0.1'], '0.1')
    """

    protocol: Protocol = "both"
    budgets: tuple[Budget | str | float, ...] = (
        Budget("2/255", 2 / 255),
        Budget("8/255", 8 / 255),
        Budget("16/255", 16 / 255),
    )
    main: str | None = None
    norm: str = "linf"
    noise: tuple[str, ...] = ("gaussian",)
    repeats: int = 5
    steps: int = 50
    queries: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the radii."""
        if self.protocol not in ("paper", "adaptive", "both", "none"):
            raise TensorDropoutError(
                f"evaluate: protocol is 'paper', 'adaptive', 'both' or 'none', got {self.protocol!r}"
            )
        find_norm(self.norm)
        ordered = self.ordered()
        labels = [budget.label for budget in ordered]
        if not labels or len({budget.epsilon for budget in ordered}) != len(labels):
            raise TensorDropoutError(f"evaluate: different radii are expected, got {', '.join(labels) or 'none'}")
        if self.main is not None and self.main not in labels:
            raise TensorDropoutError(f"evaluate: the main radius is one of {', '.join(labels)}, got {self.main!r}")

    def ordered(self) -> tuple[Budget, ...]:
        """The radii from small to large."""
        budgets = (each if isinstance(each, Budget) else Budget.parse(str(each)) for each in self.budgets)
        return tuple(sorted(budgets, key=lambda budget: budget.epsilon))

    def main_label(self) -> str:
        """The label of the main radius."""
        ordered = self.ordered()
        return self.main or ordered[len(ordered) // 2].label
