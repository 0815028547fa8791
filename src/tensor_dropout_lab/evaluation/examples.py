"""From data sets to what is attacked: examples in the unit of the radii, and a target that takes them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.progress import show_progress
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab.data.base import Data, Split, TensorSplit
from tensor_dropout_lab.data.batches import naming_the_file


class Examples(NamedTuple):
    """Inputs in [0, 1], or in units of their spread where they have no bounds, with targets and names."""

    x: Tensor
    y: Tensor
    names: list[str]


@dataclass(frozen=True)
class Scale:
    """How stored numbers become inputs of a target: ``(stored - low) / width``.

    With bounds, inputs lie in [0, 1] and a radius is a share of the range. Without, ``width`` is the standard deviation
    of stored training numbers, and a radius is a share of that.
    """

    low: float
    width: float
    bounded: bool


def measure_scale(data: Data) -> Scale:
    """The scale of a data set: its bounds, or else the spread of its first 64 training examples."""
    if data.bounds is not None:
        return Scale(data.bounds[0], data.bounds[1] - data.bounds[0], bounded=True)
    first, _ = _read(data.train, torch.arange(min(64, len(data.train))))
    return Scale(0.0, float(first.std()), bounded=False)


def take_examples(
    split: Split, scale: Scale, *, count: int | None = None, seed: int = 0, device: torch.device | str = "cpu"
) -> Examples:
    """Examples of a split, chosen by the seed alone; fewer, if it is to skip pictures that cannot be read.

    Args:
        split: a part of a data set.
        scale: from :func:`measure_scale`.
        count: how many; None: all.
        seed: of the choice.
        device: where they go.

    Example:
        >>> from tensor_dropout_lab.data import load_data
        >>> data = load_data("digits")
        >>> few = take_examples(data.test, measure_scale(data), count=3)
        >>> few.x.shape, float(few.x.max()), few.names
        (torch.Size([3, 1, 8, 8]), 1.0, ['digit-1372', 'digit-1560', 'digit-1331'])
    """
    rows = torch.arange(len(split))
    if count is not None and count < len(split):
        rows = torch.randperm(len(split), generator=torch.Generator().manual_seed(seed))[:count].sort().values
    x, rows = _read(split, rows)
    x = (x - scale.low) / scale.width
    y = split.targets[rows.to(split.targets.device)]
    return Examples(x.to(device), y.to(device), [split.names[row] for row in rows.tolist()])


def _read(split: Split, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs, and their rows: without those that cannot be read, if the split is to skip them."""
    if isinstance(split, TensorSplit):
        return split.inputs[rows.to(split.inputs.device)].float(), rows
    skip = getattr(split, "skip_unreadable", False)
    with show_progress("reading", len(rows)) as advance, naming_the_file():
        inputs, kept = [], []
        for row in rows.tolist():
            try:
                inputs.append(split.read(row).float())
                kept.append(row)
            except TensorDropoutError as error:
                if not skip or (not kept and row == rows[-1]):
                    raise
                warnings.warn(f"{error} (left out)", stacklevel=3)
            advance(1)
    return torch.stack(inputs), torch.tensor(kept)


def build_target(models: nn.Module | Sequence[nn.Module], data: Data, scale: Scale, **options: Any) -> Target:
    """A target for inputs of :func:`take_examples`: they go back to stored units, and through the data's preparation.

    Args:
        models: a network for prepared inputs, or several for an ensemble.
        data: the data set.
        scale: from :func:`measure_scale`.
        **options: of :class:`Target`: ``mode``, ``n_samples``, ``batch``.
    """
    weight = next((models if isinstance(models, nn.Module) else models[0]).parameters())
    prepare = data.prepare.to(weight.device)
    return Target(
        models,
        bounds=(0.0, 1.0) if scale.bounded else (-math.inf, math.inf),
        prepare=lambda x: prepare(x * scale.width + scale.low).to(weight.dtype),
        task=data.task,
        **options,
    )
