"""The module that surgery puts in the place of a linear layer."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from tensor_dropout.layers.regression import TensorRegression

POOLINGS: dict[int, type[nn.Module]] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}
"""Average pooling by the number of spatial modes."""


def pool_to(size: tuple[int, ...]) -> nn.Module:
    """Average pooling to a grid of this size, whatever the size of the map."""
    return POOLINGS[len(size)](size)


@dataclass(frozen=True)
class Pooled:
    """The pooling that belongs to a head: what it is now (to the head's grid), and what it was (to one position).

    Not a module, so that the head does not own what stands elsewhere in the network. Copies of the network hold
    copies of both.
    """

    now: nn.Module
    before: nn.Module


class TensorHead(nn.Sequential):
    """A tensor regression with the reshapes that let it stand where a linear layer or a 1×1 convolution stood.

    Args:
        regression: (B, *features) -> (B, O).
        kind: what fed the layer: "pool", "flatten", "features" or "conv-pool" (see ``trace.Kind``).
        axes: the spatial axes of the layer's input: 0 for a linear layer, 2 for a ``Conv2d``.
        pooled: the pooling that was widened to feed it, or None.
    """

    regression: TensorRegression

    def __init__(
        self, regression: TensorRegression, kind: str = "features", axes: int = 0, pooled: Pooled | None = None
    ) -> None:
        features = regression.input_shape
        before: nn.Module | None = None
        if kind == "conv-pool":
            before = pool_to(features[1:])
        elif axes and len(features) == 1:
            before = nn.Flatten(1)
        elif not axes and len(features) > 1:
            before = nn.Unflatten(1, features)
        after = nn.Unflatten(1, (prod(regression.output_shape), *(1 for _ in range(axes)))) if axes else None
        steps = {"before": before, "regression": regression, "after": after}
        super().__init__(OrderedDict((name, step) for name, step in steps.items() if step is not None))
        self.kind, self.axes, self.pooled = kind, axes, pooled

    def config(self) -> dict[str, Any]:
        """What makes an equal head around the regression, as JSON types."""
        flattens = self.pooled is not None and isinstance(self.pooled.now, nn.Sequential)
        return {"kind": self.kind, "axes": self.axes, "flattens": flattens}


def widen(pooling: nn.Module, kind: str, grid: tuple[int, ...], flattens: bool) -> Pooled:
    """The pooling that a head needs in the place of another one.

    Args:
        pooling: what averages the map now.
        kind: "pool": it gets the size of the map. "conv-pool": the head averages, it has one position left.
        grid: the size of the map.
        flattens: whether the pooling removes the axes of its one position; it goes on doing so.
    """
    wide = pool_to(grid if kind == "pool" else tuple(1 for _ in grid))
    return Pooled(nn.Sequential(wide, nn.Flatten(1)) if flattens else wide, pooling)


def tensor_heads(model: nn.Module) -> dict[str, TensorHead]:
    """The heads that surgery put into a model, by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorHead)}
