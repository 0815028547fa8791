"""What was done, one line for each action, in a file that only grows: the truth from which all else can be made anew.

The first line says what the file is and its version. A line is on the disk before anybody is told that the action is
done. A process that is killed can leave a torn last line, of an action that nobody was told of: it is cut off.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from tensor_dropout.errors import TensorDropoutError

VERSION = 1
KINDS = ("place", "absent", "clear", "keep", "undo", "names")
_HEADER = {"journal": "tensor-dropout label", "version": VERSION}
Action = dict[str, Any]


class JournalWriteError(TensorDropoutError):
    """The disk is full, or gone."""


class Journal:
    """The file of the actions.

    Args:
        path: where it is; it is made if there is none.

    Attributes:
        torn: whether its last line was cut off.

    Raises:
        TensorDropoutError: if it is damaged, or of a newer version; it is left as it is then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._actions, length, size = _read(path)
        self.torn = length < size
        self._broken = False
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed in close
        if self.torn:
            self._file.truncate(length)
        if not length:
            self._write([_HEADER])
            _sync_folder(path.parent)

    def take_actions(self) -> list[Action]:
        """The actions that it had when it was opened; once, since nobody needs them twice."""
        actions, self._actions = self._actions, []
        return actions

    def append(self, actions: Sequence[Action]) -> None:
        """Write actions; they are on the disk when this returns.

        Raises:
            JournalWriteError: if the disk is full, or gone. The file is as it was then.
        """
        self._write(actions)

    def _write(self, entries: Sequence[Action]) -> None:
        data = b"".join(json.dumps(entry, allow_nan=False).encode() + b"\n" for entry in entries)
        status = os.fstat(self._file.fileno())
        if status.st_nlink == 0 or self._broken:
            why = "ends in half a line" if self._broken else "was deleted"
            raise JournalWriteError(
                f"the journal {self.path} {why}, so nothing was changed; end the program and start it again"
            )
        try:
            written = self._file.write(data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
            os.fsync(self._file.fileno())
        except OSError as error:
            self._broken = True  # unless half a line can be taken back
            os.ftruncate(self._file.fileno(), status.st_size)
            self._broken = False
            raise JournalWriteError(
                f"the journal {self.path} could not be written ({error.strerror or error}); nothing was changed"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _sync_folder(folder: Path) -> None:
    """Force the name of a new file to the disk."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read(path: Path) -> tuple[list[Action], int, int]:
    """The actions, the length of what is whole, and the length of the file."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return [], 0, 0
    length = data.rfind(b"\n") + 1
    lines = data[:length].splitlines()
    if not lines:
        if data and not json.dumps(_HEADER).encode().startswith(data.rstrip(b"\0")):
            raise _damaged(path, 1, "it is no journal of tensor-dropout label")
        return [], 0, len(data)
    _check_header(path, lines[0])
    return [_check_line(path, number, line) for number, line in enumerate(lines[1:], start=2)], length, len(data)


def _check_header(path: Path, line: bytes) -> None:
    header = _parse(line)
    if header is None or header.get("journal") != _HEADER["journal"] or type(header.get("version")) is not int:
        raise _damaged(path, 1, "it is no journal of tensor-dropout label")
    if header["version"] > VERSION:
        raise TensorDropoutError(
            f"{path} was written by a newer tensor-dropout (version {header['version']} of the journal, this one knows "
            f"{VERSION}); update with: pip install -U tensor-dropout"
        )


def _check_line(path: Path, number: int, line: bytes) -> Action:
    """An action that this program could have written."""
    action = _parse(line)
    if action is None:
        raise _damaged(path, number, "it is no JSON object")
    if action.get("kind") not in KINDS:
        raise TensorDropoutError(
            f"{path}: line {number} has an action of the kind {action.get('kind')!r}, which this tensor-dropout does "
            f"not know ({', '.join(KINDS)}); update it, or correct the line"
        )
    if action.get("seq") != number - 1:
        raise _damaged(path, number, f"seq {number - 1} is expected there, and it says {action.get('seq')!r}")
    fault = find_fault(action)
    if fault:
        raise _damaged(path, number, fault)
    return action


def _parse(line: bytes) -> Action | None:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _damaged(path: Path, line: int, why: str) -> TensorDropoutError:
    return TensorDropoutError(f"{path} is damaged: line {line}: {why}; restore it from a copy, or choose another --out")


# What an action must look like, in the journal and in requests.

_CLIENT, _KEY = re.compile("[0-9a-f]{8}"), re.compile("[0-9a-f]{16}")
PLACED_BY = ("hand", "moved", "accepted")
MOST_NAMES = 1000
MOST_NAMES = 1000
MARGIN = 0.25
"""How far outside of its picture a point may lie, in widths and heights: as in ``points_table``."""


def find_fault(action: Action) -> str:
    """What is wrong with an action, in one sentence; "" if nothing is.

    Example:
        >>> find_fault({"kind": "absent", "client": "0" * 8, "image": "1.jpg", "points": [0]})
        ''
        >>> find_fault({"kind": "absent", "client": "0" * 8, "image": "1.jpg", "points": [-1]})
        'absent: points are numbers from 0 up, got -1'
    """
    kind = action.get("kind")
    if not isinstance(kind, str) or kind not in KINDS:
        return f"kind is one of {', '.join(KINDS)}, got {_show(kind)}"
    if not isinstance(action.get("client"), str) or not _CLIENT.fullmatch(action["client"]):
        return f"client is 8 digits from 0 to f, got {_show(action.get('client'))}"
    if "key" in action and not (isinstance(action["key"], str) and _KEY.fullmatch(action["key"])):
        return f"key is 16 digits from 0 to f, got {_show(action['key'])}"
    seconds = action.get("seconds")
    if seconds is not None and not (_is_number(seconds) and 0 <= seconds <= 86400):
        return f"{kind}: seconds is a number from 0 to 86400, got {_show(seconds)}"
    if kind == "names":
        return find_fault_in_names(action.get("names"))
    if kind == "undo":
        return (
            "" if type(action.get("of")) is int else f"undo: of is the seq of an action, got {_show(action.get('of'))}"
        )
    if not isinstance(action.get("image"), str):
        return f"{kind}: image is a name, got {_show(action.get('image'))}"
    return "" if kind == "keep" else _find_fault_in_points(kind, action.get("points"))


def _find_fault_in_points(kind: str, points: Any) -> str:
    if not isinstance(points, list) or not points:
        return f"{kind}: points is a list with at least one, got {_show(points)}"
    check: Callable[[Any], str] = _find_fault_in_place if kind == "place" else _find_fault_in_number
    faults = [fault for fault in map(check, points) if fault]
    if faults:
        return f"{kind}: {faults[0]}"
    numbers = [point["point"] if kind == "place" else point for point in points]
    return "" if len(set(numbers)) == len(numbers) else f"{kind}: a point is named twice"


def _find_fault_in_number(number: Any) -> str:
    return "" if type(number) is int and number >= 0 else f"points are numbers from 0 up, got {_show(number)}"


def _find_fault_in_place(place: Any) -> str:
    if not isinstance(place, dict):
        return f"a point is an object with point, x and y, got {_show(place)}"
    fault = _find_fault_in_number(place.get("point"))
    if fault:
        return fault
    for axis in ("x", "y"):
        value = place.get(axis)
        if not _is_number(value) or not -MARGIN <= value <= 1 + MARGIN:
            return f"{axis} is a fraction from {-MARGIN} to {1 + MARGIN}, got {_show(value)}"
    by = place.get("by")
    return "" if by in PLACED_BY else f"by is one of {', '.join(PLACED_BY)}, got {_show(by)}"


def find_fault_in_names(names: Any) -> str:
    """What is wrong with the names of points, in one sentence; "" if nothing is."""
    from tensor_dropout_lab.labelling.points_file import find_unclear_name

    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return f"names is a list of texts, got {_show(names)}"
    if len(names) > MOST_NAMES:
        return f"there can be {MOST_NAMES} points at most, got {len(names)}"
    if len(names) > MOST_NAMES:
        return f"there can be {MOST_NAMES} points at most, got {len(names)}"
    for name in names:
        if not name.strip() or name != name.strip() or len(name) > 100 or not name.isprintable():
            return f"the name of a point is 1 to 100 letters without spaces around them, got {_show(name)}"
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        return f"two points are named {twice[0]!r}; give each a name of its own"
    unclear = find_unclear_name(names)
    return (
        f"the name {unclear!r} has an x of its own and would be misread in points.csv; choose another"
        if unclear
        else ""
    )


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float)


def _show(value: Any) -> str:
    """A value as JSON, cut."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
