"""What surgery did, in numbers that it measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Trial:
    """One step of a search for the rank."""

    rank: tuple[int, ...]
    parameters: int
    relative_error: float
    accuracy: float | None = None

    def describe(self) -> str:
        """A line of the report."""
        accuracy = "" if self.accuracy is None else f", accuracy {100 * self.accuracy:.2f} %"
        return f"rank {_shape(self.rank)}, {self.parameters:,} parameters, error {self.relative_error:.2g}{accuracy}"


@dataclass(frozen=True)
class Replacement:
    """One layer that was replaced."""

    name: str
    kind: str
    """What fed it: "pool", "flatten", "features", "conv-pool"; for a merge, what it is fed now."""
    before: str
    after: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    rank: tuple[int, ...]
    parameters_before: int
    parameters_after: int
    relative_error: float
    """``‖W - Ŵ‖ / ‖W‖`` of the weights, in the layer's own precision."""
    notes: tuple[str, ...] = ()
    trials: tuple[Trial, ...] = ()

    @property
    def compression_ratio(self) -> float:
        """Parameters before over parameters after, of the replaced layer itself."""
        return self.parameters_before / self.parameters_after


@dataclass(frozen=True)
class ConversionReport:
    """What was replaced, and how much the network changed by it.

    ``print(report)`` shows it; ``report.as_dict()`` is for JSON.
    """

    replacements: tuple[Replacement, ...]
    parameters_before: int
    """Of the whole network."""
    parameters_after: int
    output_difference: float | None = None
    """``max |after - before| / max |before|`` of the outputs for the example input, in ``eval`` mode."""
    modules: Mapping[str, tuple[nn.Module, nn.Module]] = field(default_factory=dict, repr=False, compare=False)
    """Every exchanged module by name, pooling included: (old, new)."""

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types, without the modules."""
        record = {
            "replacements": [
                {**asdict(each), "compression_ratio": each.compression_ratio} for each in self.replacements
            ],
            "parameters_before": self.parameters_before,
            "parameters_after": self.parameters_after,
        }
        return record if self.output_difference is None else record | {"output_difference": self.output_difference}

    def __str__(self) -> str:
        lines = []
        for each in self.replacements:
            lines += [
                f"{each.name}: {each.before} -> {each.after}",
                f"  {_shape(each.input_shape)} -> {_shape(each.output_shape)}, rank {_shape(each.rank)}; parameters "
                f"{each.parameters_before:,} -> {each.parameters_after:,} ({each.compression_ratio:.3g}×); relative "
                f"error of the weight {each.relative_error:.2g}",
            ]
            lines += [f"  note: {note}" for note in each.notes]
            lines += [f"  tried: {trial.describe()}" for trial in each.trials]
        lines.append(f"network: {self.parameters_before:,} -> {self.parameters_after:,} parameters")
        if self.output_difference is not None:
            lines[-1] += f"; output changed by {self.output_difference:.2g} (relative, on the example input)"
        return "\n".join(lines)


def _shape(sizes: tuple[int, ...]) -> str:
    return "×".join(map(str, sizes)) or "none"
