"""Experiments by name: what ``tensor-dropout reproduce NAME`` runs.

An experiment is a module with a ``SUMMARY``, some ``PRESETS`` and a function ``run`` (see :class:`Experiment`). It is
imported when it is asked for; one module may serve several names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.experiments.recipes import describe_experiment, list_experiments, suggest

EXPERIMENTS: dict[str, str] = {
    name: f"{__name__}.{'synthetic' if name.startswith('synthetic') else 'paper'}" for name in list_experiments()
} | {"digits": "tensor_dropout_lab.experiments.digits"}
"""Name of the experiment -> the module that runs it; those of the paper in its order, then our own."""


class Experiment(Protocol):
    """What a module in ``EXPERIMENTS`` must offer."""

    SUMMARY: str
    """One line for ``reproduce --help``, of an experiment that is not the paper's."""

    PRESETS: Mapping[str, Any]
    """The settings by name; "quick" and "paper" at least."""

    def run(self, name: str, preset: str, out: Path, seed: int, **options: Any) -> list[Path]:
        """Run the experiment with a progress bar, and return the files that were written.

        Args:
            name: the name under which it was asked for.
            preset: one of ``PRESETS``.
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
    if name in list_experiments():
        return str(describe_experiment(name)["reference"])
    return load_experiment(name).SUMMARY


def load_experiment(name: str) -> Experiment:
    """Import the experiment of this name; a recipe may follow a slash.

    Raises:
        TensorDropoutError: if there is none, with the nearest names.

    Example:
        >>> from tensor_dropout_lab.experiments import load_experiment
        >>> sorted(load_experiment("cifar100/fc").PRESETS)
        ['paper', 'quick']
    """
    experiment = name.partition("/")[0]
    if experiment not in EXPERIMENTS:
        raise TensorDropoutError(f"reproduce: there is no experiment {name!r}; {suggest(experiment, EXPERIMENTS)}")
    return cast(Experiment, importlib.import_module(EXPERIMENTS[experiment]))
