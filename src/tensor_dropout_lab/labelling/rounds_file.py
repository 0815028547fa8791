"""``rounds.jsonl``: what the fits of all sessions found, a line each, for the curve of errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from tensor_dropout.atomic_files import replacing

ERRORS = ("error_pixels", "error_percent")


def read_rounds(path: Path) -> list[dict[str, Any]] | None:
    """The records, in order; None if the file is damaged."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rounds = [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        return None
    return rounds if all(map(_is_record, rounds)) else None


def _is_record(found: Any) -> bool:
    if not isinstance(found, dict) or type(found.get("labelled")) is not int:
        return False
    numbers = [value for value in found.values() if isinstance(value, float)]
    errors = [found.get(name) for name in ERRORS]
    known = all(error is None or type(error) in (int, float) for error in errors)
    return known and all(map(math.isfinite, numbers))


def write_rounds(path: Path, rounds: list[dict[str, Any]]) -> None:
    """Write all records; the file appears whole, or not at all.

    Raises:
        OSError: if the disk does not take them.
    """
    text = "".join(f"{json.dumps(record)}\n" for record in rounds)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
