"""A labelling session: folder, journal, labels and the last suggestions, as pages ask for them and change them.

It knows no HTTP and no process. Requests come from several threads: one lock lets them in one by one.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.checks import list_checks
from tensor_dropout_lab.labelling.folder import PictureFolder
from tensor_dropout_lab.labelling.journal import Action, Journal, find_fault
from tensor_dropout_lab.labelling.labels import Labels
from tensor_dropout_lab.labelling.messages import Suggestions
from tensor_dropout_lab.labelling.points_file import PointsFile
from tensor_dropout_lab.labelling.rounds_file import read_rounds, write_rounds
from tensor_dropout_lab.run_records import write_json

JOURNAL, POINTS, PROJECT, HEAD_FOLDER = "journal.jsonl", "points.csv", "project.json", "head"
ROUNDS = "rounds.jsonl"
PROJECT_VERSION = 1
MOST_POINTS = 1000
COMMAND = "00000000"
"""The client of what the command line does itself."""
Publish = Callable[[dict[str, Any]], None]


class Session:
    """What is known, and what changes it.

    Args:
        folder: the pictures.
        out: where the journal, the table and the project are.
        settings: what pages are told of how features are computed.
        publish: is given the news.
        port: where the page was at the last start, if that is known.
        kept: the settings that the project keeps until the network has given features; None: these settings.

    Attributes:
        curve_is_damaged: the rounds of before could not be read.

    Raises:
        TensorDropoutError: if the journal cannot be used.
    """

    def __init__(
        self,
        folder: PictureFolder,
        out: Path,
        settings: dict[str, Any],
        publish: Publish,
        port: int | None = None,
        kept: dict[str, Any] | None = None,
    ) -> None:
        self.folder, self.out, self.settings, self.port = folder, out, settings, port
        self.publish, self._kept = publish, settings if kept is None else kept
        self.lock = threading.RLock()
        self.labels = Labels()
        self.rounds: list[dict[str, Any]] = []
        self.suggestions: Suggestions | None = None
        self.features = {"done": 0, "total": sum(picture.problem is None for picture in folder.pictures)}
        self.fit: dict[str, Any] = {"state": "waiting", "message": None}
        self.problem: str | None = None
        self._problems = {n: picture.problem for n, picture in enumerate(folder.pictures) if picture.problem}
        self._numbers = {name: number for number, name in enumerate(folder.names)}
        self._file = PointsFile(out / POINTS, folder)
        self._targets = np.empty((len(folder), 0, 2))  # (n, P, 2), NaN where open or absent
        self._counts = [0] * len(folder)  # known points of each picture
        self._worked_on: int | None = None
        self.journal = Journal(out / JOURNAL)
        for action in self.journal.take_actions():
            self._replay(action)
        rounds = read_rounds(out / ROUNDS)
        self.curve_is_damaged = rounds is None
        self.rounds = rounds or [] if self.labels.seq else []  # of a journal that is gone they say nothing
        self._write_all()

    def _replay(self, action: Action) -> None:
        try:
            self.labels.check(action)
        except TensorDropoutError as error:
            line = action["seq"] + 1
            raise TensorDropoutError(f"{self.journal.path} is damaged: line {line}: {error}") from error
        self.labels.apply(action)

    # Reading.

    @property
    def lost_images(self) -> list[str]:
        """Those that have labels and are no longer in the folder."""
        return [image for image in self.labels.images() if image not in self._numbers]

    def describe(self) -> dict[str, Any]:
        """All that a page needs at its start."""
        with self.lock:
            return {
                "folder": str(self.folder.path),
                "out": str(self.out.resolve()),
                "names": self.labels.names,
                "images": self.summarize(range(len(self.folder))),
                "seq": self.labels.seq,
                "progress": {
                    "features": self.features,
                    "fit": self.fit,
                    "round": self.suggestions.number if self.suggestions else None,
                    "problem": self.problem,
                },
                "settings": self.settings,
            }

    def summarize(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """A line of the list of images, for each."""
        return [self._summarize(number) for number in numbers]

    def _summarize(self, number: int) -> dict[str, Any]:
        picture = self.folder.pictures[number]
        state = self._state(number)
        return {
            "id": number,
            "name": picture.name,
            "width": picture.width,
            "height": picture.height,
            "state": state,
            "check": state == "labelled" and self._is_suspect(number),
            "doubt": self._doubt(number) if state in ("predicted", "doubtful", "started") else None,
            "group": picture.group,
            "problem": self._problems.get(number),
            "confirmed": self._counts[number],
        }

    def _state(self, number: int) -> str:
        if number in self._problems:
            return "unreadable"
        if self._counts[number]:
            return "labelled" if self._counts[number] == len(self.labels.names) else "started"
        news = self.suggestions
        if news is None or np.isnan(news.points[number]).all():
            return "open"
        return "doubtful" if news.doubtful[number] else "predicted"

    def _is_suspect(self, number: int) -> bool:
        return bool(self._list_checks(number))

    def _list_checks(self, number: int) -> list[int]:
        return list_checks(self.suggestions, number, self.folder.pictures[number].name, self.labels)

    def _doubt(self, number: int) -> float | None:
        std = None if self.suggestions is None else self.suggestions.std[number]
        return None if std is None or np.isnan(std).all() else float(np.nanmean(std))

    def show_image(self, number: int) -> dict[str, Any]:
        """The points and suggestions of a picture."""
        with self.lock:
            known = self.labels.of(self.folder.pictures[number].name)
            points = range(len(self.labels.names))
            return {
                "id": number,
                "points": [known[point].as_json() if point in known else None for point in points],
                "suggestions": [self._suggest(number, point) for point in points],
                "round": self.suggestions.number if self.suggestions else None,
                "checks": self._list_checks(number) if self._state(number) == "labelled" else [],
            }

    def _suggest(self, number: int, point: int) -> dict[str, Any] | None:
        news = self.suggestions
        if news is None or point >= news.points.shape[1] or np.isnan(news.points[number, point]).any():
            return None
        x, y = (float(value) for value in news.points[number, point])
        ellipse = news.ellipses[number, point]
        return {"x": x, "y": y, "ellipse": None if np.isnan(ellipse).any() else ellipse.tolist()}

    def copy_targets(self, *, whole: bool = False) -> tuple[int, np.ndarray]:
        """The last action, and the labels of all pictures, (n, P, 2), NaN where open or absent.

        Args:
            whole: also those of a picture that is begun, where somebody is at work.
        """
        with self.lock:
            targets = self._targets.copy()
            if not whole and self._worked_on is not None and self._state(self._worked_on) == "started":
                targets[self._worked_on] = np.nan
            return self.labels.seq, targets

    def find_next(self, after: int | None, order: str) -> int | None:
        """The picture to label next; None if all are labelled.

        Args:
            after: the one that is shown now, which comes last.
            order: "gain": where a label brings most; "folder": the next in the list.
        """
        with self.lock:
            total = len(self.folder)
            start = 0 if after is None else after + 1
            waiting = [(start + step) % total for step in range(total)]
            waiting = [number for number in waiting if self._state(number) not in ("labelled", "unreadable")]
            if order == "gain" and self.suggestions is not None:
                gain = self.suggestions.gain
                waiting.sort(key=lambda number: -gain[number])  # those of equal gain stay in the folder's order
            return next((number for number in waiting if number != after), None)

    def count(self) -> dict[str, Any]:
        """How the points of the folder's pictures came about, and the errors of all fits."""
        with self.lock:
            images = [image for image in self.labels.images() if image in self._numbers]
            by = [value.by for image in images for value in self.labels.of(image).values()]
            complete = sum(self.labels.is_complete(image) for image in images)
            counts = {kind: by.count(kind) for kind in ("accepted", "moved", "hand", "absent")}
            saved = self.labels.seconds_saved()
            return {"rounds": self.rounds, **counts, "seconds_saved": saved, "labelled_images": complete}

    # Changing.

    def find_number(self, image: Any) -> int:
        """The number of a picture that a client names by number.

        Raises:
            TensorDropoutError: if there is none.
        """
        if type(image) is not int or not 0 <= image < len(self.folder):
            raise TensorDropoutError(f"there is no such image; they are numbered from 0 to {len(self.folder) - 1}")
        return image

    def act(self, client: Any, actions: Any) -> dict[str, Any]:
        """Do what a client asks; all of it or nothing.

        Raises:
            TensorDropoutError: if one of the actions cannot be done.
        """
        if not isinstance(actions, list) or not 1 <= len(actions) <= MOST_POINTS:
            raise TensorDropoutError(f"actions is a list of 1 to {MOST_POINTS} actions")
        with self.lock:
            prepared = [self._prepare(client, action) for action in actions]
            images = [self.find_number(action["image"]) for action in actions]
            self._do(self.labels.leave_out_known(prepared))
            self._worked_on = images[-1] if client != COMMAND else None
            return {"seq": self.labels.seq, "images": self._tell(client, images)}

    def _prepare(self, client: Any, given: Any) -> Action:
        """An action for the journal."""
        if not isinstance(given, dict) or given.get("kind") not in ("place", "absent", "clear", "keep"):
            raise TensorDropoutError("an action is an object whose kind is place, absent, clear or keep")
        image = self.folder.pictures[self.find_number(given.get("image"))].name
        kept = ("key", "kind", "points", "seconds") if given["kind"] != "keep" else ("key", "kind", "seconds")
        action = {"client": client, "image": image, **{key: given[key] for key in kept if given.get(key) is not None}}
        self._refuse(action)
        if action["kind"] == "place":  # nothing else of what came is written
            action["points"] = [{key: place[key] for key in ("point", "x", "y", "by")} for place in action["points"]]
        return action

    def _refuse(self, action: Action) -> None:
        fault = find_fault(action)
        if fault:
            raise TensorDropoutError(fault)
        self.labels.check(action)

    def undo(self, client: Any, key: Any = None) -> dict[str, Any]:
        """Undo the last action of a client that can be undone."""
        with self.lock:
            action: Action = {"client": client, "kind": "undo", "of": 0} | ({} if key is None else {"key": key})
            fault = find_fault(action)
            if fault:
                raise TensorDropoutError(fault)
            done = self.labels.keys.get(action.get("key", ""))
            if done is not None and done["kind"] != "undo":
                raise TensorDropoutError(f"the key {key} belongs to another action")
            target = self.labels.find_undoable(client) if done is None else self.labels.find_action(done["of"])
            if target is None:
                return {"undone": None, "image": None, "images": [], "seq": self.labels.seq}
            number = self._numbers.get(target["image"])
            if done is None:
                self._do([{**action, "of": target["seq"], "image": target["image"]}])
            images = [] if number is None else self._tell(client, [number])
            return {"undone": {**target, "image": number}, "image": number, "images": images, "seq": self.labels.seq}

    def rename(self, client: Any, names: Any) -> dict[str, Any]:
        """Other names of the points, in order; new ones at the end."""
        with self.lock:
            action = {"client": client, "kind": "names", "names": names}
            self._refuse(action)
            if names != self.labels.names:
                self._do([action])
                self.publish({"type": "names", "names": names, "client": client, "seq": self.labels.seq})
            return {"seq": self.labels.seq, "names": names}

    def _do(self, actions: Sequence[Action]) -> None:
        """Write actions to the journal, then take them over."""
        if not actions:
            return
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        seq = self.labels.seq
        lines = [{"seq": seq + number, "time": time, **action} for number, action in enumerate(actions, start=1)]
        self.journal.append(lines)
        for action in lines:
            self.labels.apply(action)
        if any(action["kind"] == "names" for action in lines):
            self._write_all()
        else:
            self._write({action["image"] for action in lines})

    def _write_all(self) -> None:
        """Write the table and the project anew."""
        self._file.rename(self.labels.names)
        self._targets = np.full((len(self.folder), len(self.labels.names), 2), np.nan)
        self._write(self.folder.names)
        self._write_project()

    def remember_port(self, port: int) -> None:
        """Where the page is now, for the next start."""
        with self.lock:
            self.port = port
            self._write_project()

    def remember_network(self) -> None:
        """The network has given features: the next start takes it as well."""
        with self.lock:
            if self._kept != self.settings:
                self._kept = self.settings
                with suppress(OSError):  # it is named again at the next start
                    self._write_project()

    def _write_project(self) -> None:
        about = {"names": self.labels.names, "settings": self._kept, "port": self.port}
        write_json(self.out / PROJECT, {"version": PROJECT_VERSION, **about})

    def _write(self, images: Iterable[str]) -> None:
        for image in images:
            self._note(image)
        try:
            self._file.write()
            self.problem = None
        except OSError as error:  # the journal has the action: it is done
            self.problem = f"{POINTS} could not be written ({error.strerror or error}); the journal has everything"
            self.publish({"type": "problem", "message": self.problem})

    def _note(self, image: str) -> None:
        """Take over the points of a picture into what is read often."""
        number = self._numbers.get(image)
        if number is None:  # no longer in the folder
            return
        values = self.labels.of(image)
        self._counts[number] = len(values)
        self._targets[number] = np.nan
        for point, value in values.items():
            self._targets[number, point] = value.x, value.y
        self._file.set(image, values)

    def _tell(self, client: str, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Tell all pages of pictures that have changed; returns their summaries."""
        images = self.summarize(sorted(set(numbers)))
        self.publish({"type": "labels", "images": images, "client": client, "seq": self.labels.seq})
        return images

    # News of the fits.

    def take_suggestions(self, news: Suggestions, record: dict[str, Any]) -> None:
        """What a fit has found."""
        with self.lock:
            before = self.summarize(range(len(self.folder)))
            self.suggestions = news
            self.rounds.append(record)
            with suppress(OSError):  # labels tell of a full disk; the curve of this session goes on
                write_rounds(self.out / ROUNDS, self.rounds)
            after = self.summarize(range(len(self.folder)))
            changed = [new for old, new in zip(before, after, strict=True) if new != old]
            self.publish({"type": "suggestions", "round": news.number, "images": changed})

    def take_progress(self, done: int) -> None:
        """How many pictures have features."""
        with self.lock:
            self.features = {**self.features, "done": done}
            self.publish({"type": "progress", "what": "features", **self.features})

    def take_fit_state(self, state: str, message: str | None = None) -> None:
        """Whether a fit runs: "waiting" for labels or features, "running", "idle" or "failed"."""
        with self.lock:
            self.fit = {"state": state, "message": message}
            self.publish({"type": "fit", **self.fit})

    def take_problem(self, number: int, problem: str) -> None:
        """A picture whose header is sound cannot be read."""
        with self.lock:
            self._problems[number] = problem
            self.publish(
                {"type": "labels", "images": self.summarize([number]), "client": COMMAND, "seq": self.labels.seq}
            )

    def close(self) -> None:
        """Close the journal."""
        with self.lock:
            self.journal.close()
