"""Experiments by name: what ``tensor-dropout reproduce NAME`` runs.

:data:`EXPERIMENTS` has an entry for each. The module that runs it is imported when it is asked for; one module may run
several experiments.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.experiments.recipes import describe_experiment, list_experiments, suggest


@dataclass(frozen=True)
class Entry:
    """An experiment.

    Attributes:
        module: what runs it, an :class:`Experiment`.
        summary: one line for ``reproduce --help``; of an experiment with recipes these say it.
        presets: the names of its settings.
        has_recipes: whether single recipes of it can be run, also beside those of others.
    """

    module: str
    summary: str = ""
    presets: tuple[str, ...] = ("quick", "paper")
    has_recipes: bool = False


def _enter(name: str) -> Entry:
    if name.startswith("synthetic"):
        return Entry(f"{__name__}.synthetic")
    return Entry(f"{__name__}.paper", has_recipes=True)


EXPERIMENTS: dict[str, Entry] = {name: _enter(name) for name in list_experiments()}
"""Name -> entry of the experiment; those of the paper in its order, then our own."""


PAPER = (
    "synthetic-cp",
    "synthetic-tucker",
    "imagenet",
    "imagenet-attacks",
    "mri",
    "mri-noise",
    "cifar100",
    "cifar100-surface",
    "cifar100-attacks",
)
"""The paper's own experiments: what ``reproduce all`` and ``make demo`` run. The others ask our own questions."""


class Experiment(Protocol):
    """What the module of an entry must offer."""

    def run(self, name: str, preset: str, out: Path, seed: int, **options: Any) -> list[Path]:
        """Run the experiment with a progress bar, and return the files that were written.

        Args:
            name: the name under which it was asked for.
            preset: one of its presets.
            out: the folder of all experiments of this preset; this one's is a folder in it. Runs that are already
                there with equal settings are not repeated.
            seed: the first seed.
            **options: where and how to run; an experiment takes those that it knows.
        """
        ...


def describe(name: str) -> str:
    """One line about an experiment, for ``reproduce --help``.

    Example:
        >>> describe("cifar100")
        'Table 4: ResNet-18 with six heads'
    """
    return EXPERIMENTS[name].summary or str(describe_experiment(name)["reference"])


def load_experiment(name: str) -> Experiment:
    """Import the experiment of this name; a recipe may follow a slash.

    Raises:
        TensorDropoutError: if there is none, with the nearest names.

    Example:
        >>> from tensor_dropout_lab.experiments import load_experiment
        >>> load_experiment("cifar100/fc").__name__
        'tensor_dropout_lab.experiments.paper'
    """
    experiment = name.partition("/")[0]
    if experiment not in EXPERIMENTS:
        raise TensorDropoutError(f"reproduce: there is no experiment {name!r}; {suggest(experiment, EXPERIMENTS)}")
    return cast(Experiment, importlib.import_module(EXPERIMENTS[experiment].module))
