"""Experiments by name: what ``tensor-dropout reproduce NAME`` runs.

An experiment is a module with a ``SUMMARY``, some ``PRESETS`` and a function ``run`` (see :class:`Experiment`). It
is imported when it is asked for; one module may serve several names.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from tensor_dropout.errors import TensorDropoutError

EXPERIMENTS: dict[str, str] = {
    "digits": "tensor_dropout.experiments.digits",
    "synthetic-cp": "tensor_dropout.experiments.synthetic",
    "synthetic-tucker": "tensor_dropout.experiments.synthetic",
}
"""Name of the experiment -> the module that runs it."""


class Experiment(Protocol):
    """What a module in ``EXPERIMENTS`` must offer."""

    SUMMARY: str
    """One line for ``tensor-dropout reproduce --help``."""

    PRESETS: Mapping[str, Any]
    """The settings by name; "quick" and "paper" at least."""

    def run(self, name: str, preset: str, out: Path, seed: int) -> list[Path]:
        """Run the experiment with a progress bar, and return the files that were written.

        Args:
            name: the name under which it was asked for.
            preset: one of ``PRESETS``.
            out: the folder for the results; runs that are already there with equal settings are not repeated.
            seed: the first seed.
        """
        ...


def load_experiment(name: str) -> Experiment:
    """Import the experiment of this name.

    Raises:
        TensorDropoutError: if there is none.

    Example:
        >>> from tensor_dropout.experiments import load_experiment
        >>> sorted(load_experiment("digits").PRESETS)
        ['paper', 'quick']
    """
    if name not in EXPERIMENTS:
        raise TensorDropoutError(f"reproduce: there is no experiment {name!r}; known are {', '.join(EXPERIMENTS)}")
    return cast(Experiment, importlib.import_module(EXPERIMENTS[name]))
