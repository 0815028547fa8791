"""Packages that only the laboratory needs: the extra ``lab``."""

from __future__ import annotations

import importlib
from types import ModuleType

from tensor_dropout.errors import TensorDropoutError


def import_extra(module: str, what: str) -> ModuleType:
    """Import a module of an optional package, or say how to install it.

    Args:
        module: e.g. ``"sklearn.datasets"``.
        what: who needs it, for the message.

    Raises:
        TensorDropoutError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise TensorDropoutError(
            f"{what}: {package} is not installed; install it with: pip install 'tensor-dropout[lab]'"
        ) from error
