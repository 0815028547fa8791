"""Why a network cannot be used, in one sentence with the options of ``tensor-dropout label``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensor_dropout.errors import TensorDropoutError


def describe(error: BaseException) -> str:
    """An error in one sentence."""
    if isinstance(error, TensorDropoutError):
        return str(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def explain(error: BaseException, settings: dict[str, Any]) -> str:
    """Why no features can be computed.

    Args:
        error: what was raised when the network was made or tried.
        settings: of the project.
    """
    spec, words = settings["backbone"], describe(error)
    module = spec.partition(":")[0].partition(".")[0]
    for cause in _causes(error):
        if isinstance(cause, ModuleNotFoundError) and ":" in spec and cause.name == module:
            return (
                f"--backbone {spec}: there is no module {module} in the current folder, {Path.cwd()}, nor is it "
                f"installed; start label in the folder that {module}.py is in, or correct --backbone"
            )
    tried = re.search(r"does not run on an input of shape \(\d+, \d+, (\d+), (\d+)\): (.*); ", words)
    if tried is not None:
        height, width, why = tried.groups()
        return (
            f"--backbone {spec} does not run on pictures of {width} × {height} pixels; choose a larger --size, such as "
            f"224, or another --backbone ({why})"
        )
    if settings["layer"] and " has no layer " in words:
        return f"--layer: {words.removeprefix('FeatureMaps: ')}; correct --layer"
    return words


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
