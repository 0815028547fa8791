"""Records of experiments: JSON files that appear whole or not at all, and say what made them."""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

from tensor_dropout.atomic_files import replacing
from tensor_dropout.version import __version__

_COMMAND_VARIABLE = "TENSOR_DROPOUT_COMMAND"


def describe_command() -> str:
    """What was typed: here, or where this process was started from."""
    return os.environ.get(_COMMAND_VARIABLE) or shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])


@contextmanager
def handing_on_the_command() -> Iterator[None]:
    """Records of processes that are started inside name this command, not their own."""
    before = os.environ.get(_COMMAND_VARIABLE)
    os.environ[_COMMAND_VARIABLE] = describe_command()
    try:
        yield
    finally:
        os.environ.pop(_COMMAND_VARIABLE)
        if before is not None:
            os.environ[_COMMAND_VARIABLE] = before


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a record, atomically; numbers that are not finite, which JSON does not have, become null."""
    text = json.dumps(_only_finite(record), indent=2, ensure_ascii=False, allow_nan=False)
    with replacing(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")


def _only_finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _only_finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_only_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_finished(path: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The record at ``path`` if it is whole and was made with exactly these settings, else None."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    wanted = json.loads(json.dumps(settings))  # tuples become lists, as they did in the file
    return record if isinstance(record, dict) and record.get("settings") == wanted else None


def describe_environment(*packages: str) -> dict[str, Any]:
    """What a reader needs to repeat a result: versions, machine, threads and the command.

    Args:
        *packages: further distributions whose versions matter.
    """
    return {
        "command": describe_command(),
        "tensor_dropout": __version__,
        "python": platform.python_version(),
        "torch": _torch_version(),
        **{package: metadata.version(package) for package in packages},
        "machine": f"{platform.system()} {platform.machine()}",
        **_describe_gpu(),
        **describe_commit(Path(__file__).parent),
        "cpu_count": os.cpu_count(),
        **_count_threads(),
    }


def _describe_gpu() -> dict[str, str]:
    """Of a process that computes; one that reads records has not imported torch, and must not for this."""
    torch = sys.modules.get("torch")
    return {"gpu": torch.cuda.get_device_name()} if torch is not None and torch.cuda.is_available() else {}


def _torch_version() -> str:
    """With its build, such as ``+cu130``, where torch is loaded."""
    torch = sys.modules.get("torch")
    return metadata.version("torch") if torch is None else str(torch.__version__)


def _count_threads() -> dict[str, int]:
    torch = sys.modules.get("torch")
    return {} if torch is None else {"threads": torch.get_num_threads()}


def describe_commit(folder: Path) -> dict[str, Any]:
    """The commit that the package's folder is at, and whether it was changed since.

    Nothing outside a clone, nor where the folder only lies in a repository that does not track it: a virtual
    environment in a user's own project.
    """

    def ask(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10).stdout.strip()

    try:
        if not ask("ls-files", "--", "."):
            return {}
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--", "."))}
    except (OSError, subprocess.SubprocessError):
        return {}
