"""Who is where: the state of all points, by replaying actions in their order.

Every value knows which action gave it. Undoing an action gives back, to each point that still has that action's value,
the value which it had before.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.journal import Action

KEPT = -1
"""In place of a point's number: that a person has looked at a doubted label and said it is right."""
ENOUGH = 10
"""From how many points placed by hand on the time for one is known."""


class Value(NamedTuple):
    """What is known of a point.

    Attributes:
        seq: the action that said so.
        by: "hand", "moved" or "accepted": it was placed; "absent": it cannot be seen; "open": it was cleared.
        x: fraction of the width, of a point that was placed.
        y: likewise, of the height.
    """

    seq: int
    by: str
    x: float = math.nan
    y: float = math.nan

    def as_json(self) -> dict[str, Any]:
        """As the page gets it."""
        return {"absent": True} if self.by == "absent" else {"x": self.x, "y": self.y, "by": self.by}


@dataclass
class _Change:
    """An action on an image that can be undone, once; by point, the value before."""

    action: Action
    before: dict[int, Value | None]
    undone: bool = False


@dataclass
class Labels:
    """The state.

    Attributes:
        names: of the points, in order.
        seq: of the last action.
        keys: random numbers that clients gave their actions, and the action of each.
    """

    names: list[str] = field(default_factory=list)
    seq: int = 0
    keys: dict[str, Action] = field(default_factory=dict)
    _values: dict[str, dict[int, Value]] = field(default_factory=dict)
    _changes: dict[int, _Change] = field(default_factory=dict)
    _times: list[tuple[int, int, float]] = field(default_factory=list)  # points by hand, others, seconds

    # Reading.

    def of(self, image: str) -> dict[int, Value]:
        """The points of an image that are placed or absent, by number."""
        values = self._values.get(image, {})
        return {point: value for point, value in values.items() if point != KEPT and value.by != "open"}

    def is_kept(self, image: str) -> bool:
        """Whether a person has said that its labels are right, and they are still the same."""
        kept = self._values.get(image, {}).get(KEPT)
        return kept is not None and kept.by != "open"

    def is_complete(self, image: str) -> bool:
        """Whether all points are known."""
        return bool(self.names) and len(self.of(image)) == len(self.names)

    def images(self) -> list[str]:
        """Those with a known point."""
        return [image for image in self._values if self.of(image)]

    def positions(self, images: Sequence[str]) -> np.ndarray:
        """(n, P, 2) fractions, NaN where open or absent."""
        found = np.full((len(images), len(self.names), 2), np.nan)
        for row, image in enumerate(images):
            for point, value in self.of(image).items():
                found[row, point] = value.x, value.y
        return found

    def absent(self, images: Sequence[str]) -> np.ndarray:
        """(n, P) bool: whether a person has said that the point cannot be seen."""
        found = np.zeros((len(images), len(self.names)), dtype=bool)
        for row, image in enumerate(images):
            for point, value in self.of(image).items():
                found[row, point] = value.by == "absent"
        return found

    def find_undoable(self, client: str) -> Action | None:
        """The last action of a client of which something can be undone."""
        for seq in reversed(self._changes):
            change = self._changes[seq]
            if change.action["client"] == client and not change.undone and self._restorable(seq):
                return change.action
        return None

    def find_action(self, seq: int) -> Action:
        """An action that can be undone."""
        return self._changes[seq].action

    def leave_out_known(self, actions: Sequence[Action]) -> list[Action]:
        """Without those whose key is in the journal already: the client had no answer, and sends them again."""
        known: set[str] = set()
        new = []
        for action in actions:
            key = action.get("key")
            if key is None or not (key in known or key in self.keys):
                new.append(action)
                known.add(key or "")
        return new

    # Acting.

    def check(self, action: Action) -> None:
        """Refuse what does not fit the state.

        Raises:
            TensorDropoutError: for numbers of points that do not exist, and names that would lose labels.
        """
        if action["kind"] == "names":
            used = max((max(self.of(image)) for image in self.images()), default=-1)
            if len(action["names"]) <= used:
                raise TensorDropoutError(
                    f"the point {self.names[used]!r} has labels; only points at the end without any can be removed"
                )
        elif action["kind"] == "undo":
            if action["of"] not in self._changes:
                raise TensorDropoutError(f"there is no action {action['of']} that could be undone")
        elif action["kind"] != "keep":
            highest = max(_new_values({**action, "seq": 0}))
            if highest >= len(self.names):
                raise TensorDropoutError(f"there is no point {highest}; there are {len(self.names)}, counted from 0")

    def apply(self, action: Action) -> None:
        """Take over an action that was checked, and has a seq."""
        kind, seq = action["kind"], action["seq"]
        if kind == "names":
            self._rename(action["names"])
        elif kind == "undo":
            self._undo(action["of"])
        else:
            values = self._values.setdefault(action["image"], {})
            new = _new_values(action)
            self._changes[seq] = _Change(action, {point: values.get(point) for point in new})
            values.update(new)
            self._note_time(action)
        self.seq = seq
        if "key" in action:
            self.keys[action["key"]] = action

    def _rename(self, names: Sequence[str]) -> None:
        """Take over the names; what is known of points that are gone is not for others that come later."""
        self.names = list(names)
        for values in self._values.values():
            for point in [point for point in values if point >= len(names)]:
                del values[point]

    def _undo(self, seq: int) -> None:
        change = self._changes[seq]
        values = self._values[change.action["image"]]
        for point in self._restorable(seq):
            before = change.before[point]
            if before is None:
                del values[point]
            else:
                values[point] = before
        change.undone = True

    def _restorable(self, seq: int) -> list[int]:
        """The points that still have the value which an action gave them."""
        change = self._changes[seq]
        values = self._values[change.action["image"]]
        points = [point for point in change.before if point in values and values[point].seq == seq]
        return points if points != [KEPT] or change.action["kind"] == "keep" else []  # its points are gone

    def _note_time(self, action: Action) -> None:
        if action["kind"] == "place" and action.get("seconds") is not None:
            by_hand = sum(place["by"] == "hand" for place in action["points"])
            self._times.append((by_hand, len(action["points"]) - by_hand, float(action["seconds"])))

    def seconds_saved(self) -> float | None:
        """How much longer it would have taken to place by hand what was suggested; None if too little is known."""
        by_hand = [seconds / points for points, others, seconds in self._times if points and not others]
        if sum(points for points, others, _ in self._times if not others) < ENOUGH:
            return None
        helped = [(others, seconds) for points, others, seconds in self._times if others and not points]
        each = statistics.median(by_hand)
        return sum(others * each - seconds for others, seconds in helped)


def _new_values(action: Action) -> dict[int, Value]:
    """By point, what an action on an image says."""
    kind, seq = action["kind"], action["seq"]
    if kind == "keep":
        return {KEPT: Value(seq, "keep")}
    changed = {KEPT: Value(seq, "open")}
    if kind == "place":
        return changed | {
            place["point"]: Value(seq, place["by"], float(place["x"]), float(place["y"])) for place in action["points"]
        }
    return changed | {point: Value(seq, "absent" if kind == "absent" else "open") for point in action["points"]}
