"""Checkpoints that appear whole or not at all, and are checked when they are read.

One file holds everything needed to go on. Its name ends in the first digits of its SHA-256, so a damaged file is known
by its name; the one before it is kept for that case. It is read by torch's restricted unpickler: tensors, numbers,
strings, lists and dicts, nothing else.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import re
import warnings
from pathlib import Path
from typing import Any, cast

import torch

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError

FORMAT_VERSION = 1
_NAME = re.compile(r"checkpoint-(\d{9})-([0-9a-f]{16})\.pt")
KEPT = 2


def write_checkpoint(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint and remove those before the last but one.

    Raises:
        TensorDropoutError: if the disk is full; earlier checkpoints are kept.
    """
    buffer = io.BytesIO()
    torch.save({"format": FORMAT_VERSION, "step": step, **state}, buffer)
    content = buffer.getvalue()
    path = folder / f"checkpoint-{step:09d}-{hashlib.sha256(content).hexdigest()[:16]}.pt"
    try:
        with replacing(path) as temporary, open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise TensorDropoutError(
            f"train: the checkpoint {path} could not be written: {error.strerror}; the earlier ones in {folder} are "
            "kept: make room and run the same command again"
        ) from error
    for old in list_checkpoints(folder)[KEPT:]:
        old.unlink(missing_ok=True)
    return path


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, the latest first."""
    found = [path for path in folder.glob("checkpoint-*.pt") if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: path.name, reverse=True)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The content of one checkpoint.

    Raises:
        TensorDropoutError: if it is truncated or damaged, or of another format.
    """
    named = _NAME.fullmatch(path.name)
    content = path.read_bytes()
    if named is None or hashlib.sha256(content).hexdigest()[:16] != named[2]:
        raise TensorDropoutError(f"the checkpoint {path} is truncated or damaged: its content does not fit its name")
    try:
        state: Any = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise TensorDropoutError(f"the checkpoint {path} cannot be read: {str(error).splitlines()[0]}") from error
    version = state.get("format") if isinstance(state, dict) else None
    if version != FORMAT_VERSION:
        raise TensorDropoutError(f"the checkpoint {path} has format {version}, not {FORMAT_VERSION}")
    return cast(dict[str, Any], state)


def read_latest(folder: Path) -> dict[str, Any] | None:
    """The latest whole checkpoint; a damaged one is named in a warning, and the one before it is taken."""
    for path in list_checkpoints(folder):
        try:
            return read_checkpoint(path)
        except TensorDropoutError as error:
            path.replace(path.with_name(f"{path.name}.damaged"))  # it must not take the place of a good one
            earlier = "the one before it is used" if list_checkpoints(folder) else "the run begins anew"
            warnings.warn(f"train: {error}; {earlier}", stacklevel=2)
    return None
