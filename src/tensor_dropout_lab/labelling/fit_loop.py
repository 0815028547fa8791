"""The loop between labels and suggestions: when to fit, and the process that does it.

A fit is asked for when the labels have changed since the last one was asked for, and none is running. A picture on
which somebody is working counts when it is complete, or when another one is worked on.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.fitted_head import RECORD
from tensor_dropout_lab.labelling.messages import (
    BadPicture,
    Failed,
    FeaturesDone,
    FitRequest,
    Fitted,
    HeadRequest,
    HeadWritten,
    Suggestions,
    Task,
)
from tensor_dropout_lab.labelling.session import HEAD_FOLDER, Session
from tensor_dropout_lab.labelling.worker import run_worker

FEWEST = 5
"""Labelled images of the first fit: each is held out once in five folds."""
RESTART_AFTER = 60.0
"""Seconds between two starts of the worker."""
HEAD_WITHIN = 120.0
"""Seconds within which the head is written, or the page is told that it was not."""


class NotReadyError(TensorDropoutError):
    """What was asked for is not there yet."""


class FitLoop:
    """Fits of a session.

    Args:
        session: whose labels are fitted.
        cache: where features are kept.
        seed: of folds and starts.
        modules: imported first, in the process that computes.
        say: told what concerns the whole session, such as a network that cannot be used.
        remembered: which options come from the last start, for what is said of the network.
    """

    def __init__(
        self,
        session: Session,
        cache: Path,
        *,
        seed: int = 0,
        modules: Sequence[str] = (),
        say: Callable[[str], None],
        remembered: str = "",
    ) -> None:
        self.session, self.say, self.remembered = session, say, remembered
        self.folder = session.out / HEAD_FOLDER
        groups = [picture.group for picture in session.folder.pictures]
        sizes = [(picture.width, picture.height) for picture in session.folder.pictures]
        self.task = Task(
            session.folder.path,
            session.folder.names,
            np.array(sizes, dtype=np.float64),
            None if None in groups else [str(group) for group in groups],
            session.settings,
            cache,
            seed,
            modules,
        )
        self.worker: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._asked: FitRequest | None = None
        """The fit that runs."""
        self._known: np.ndarray | None = None
        """The targets of the last fit that was asked for."""
        self._rounds = 0
        self._bad = 0
        """Pictures that this worker could not read."""
        self._stopping = threading.Event()
        self._heads: queue.Queue[HeadWritten] = queue.Queue()

    # The process.

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compute inside the block."""
        reader = threading.Thread(target=self._keep_going, daemon=True)
        reader.start()
        try:
            yield
        finally:
            self._stopping.set()
            self._send(None)
            reader.join(1.0)
            if self.worker is not None:
                self.worker.kill()  # what it has not written, it can compute again
                self.worker.join()
            reader.join(5.0)

    def _keep_going(self) -> None:
        """Start the worker and take what it says; start it again if it has died."""
        while not self._stopping.is_set():
            began = time.monotonic()
            connection = self._start()
            self._fit_if_changed()
            for_good = self._listen(connection)
            with self._lock:
                self._connection = None
                self._asked = self._known = None
            if for_good or self._stopping.is_set():
                return
            delay = max(0.0, began + RESTART_AFTER - time.monotonic())
            self._heads.put(HeadWritten(self.folder, "the process that fits has ended; try again in a minute"))
            text = f"the process that fits has ended unexpectedly; it starts again in {delay:.0f} seconds"
            self.say(f"Note: {text}")
            self.session.take_fit_state("failed", text)
            self._stopping.wait(delay)

    def _start(self) -> Connection:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(target=run_worker, args=(theirs, self.task), daemon=True)
        with _few_threads():
            process.start()
        theirs.close()
        with self._lock:
            self.worker, self._connection = process, ours
        self._bad = 0
        return ours

    def _listen(self, connection: Connection) -> bool:
        """Take messages until the worker ends; whether it will never succeed."""
        while True:
            try:
                message = connection.recv()
            except (EOFError, OSError):
                return False
            if isinstance(message, Failed) and message.for_good:
                self._give_up(message.message)
                return True
            self._take(message)

    def _give_up(self, why: str) -> None:
        why = f"{why}{self.remembered}"
        with self._lock:
            self._connection = self._asked = None
        self.say(f"There will be no suggestions: {why}")
        self.session.take_fit_state("failed", why)

    def _take(self, message: Any) -> None:
        if isinstance(message, FeaturesDone):
            self.session.take_progress(message.count)
            if message.count > self._bad:
                self.session.remember_network()
            if message.count == self.session.features["total"] and self._rounds:
                self._fit_if_changed(force=True)  # with suggestions for those that had no features
        elif isinstance(message, BadPicture):
            self._bad += 1
            self.session.take_problem(message.number, message.problem)
        elif isinstance(message, HeadWritten):
            self._heads.put(message)
        elif isinstance(message, Fitted):
            self._rounds += 1
            self.session.take_suggestions(Suggestions(self._rounds, message.seq, **message.arrays), message.record)
            self._end_fit("idle")
        elif isinstance(message, Failed):
            self._end_fit("failed", message.message)

    def _end_fit(self, state: str, text: str | None = None) -> None:
        with self._lock:
            self._asked = None
        self.session.take_fit_state(state, text)
        self._fit_if_changed()

    def _send(self, request: Any) -> None:
        """Ask the worker; nobody hears it if it has died, and then all is asked anew."""
        with self._lock:
            if self._connection is not None:
                with suppress(OSError):
                    self._connection.send(request)

    # When to fit.

    def note_labels(self) -> None:
        """Labels have changed."""
        self._fit_if_changed()

    def _fit_if_changed(self, *, force: bool = False, whole: bool = False) -> bool:
        """Ask for a fit, if there is reason to; whether it was asked for.

        Args:
            force: even if nothing has changed.
            whole: with the picture that is being worked on.
        """
        seq, targets = self.session.copy_targets(whole=whole)
        with self._lock:
            if self._connection is None or (self._asked is not None and not whole):
                return False
            if count_labelled(targets) < FEWEST:
                return False
            same = self._known is not None and np.array_equal(self._known, targets, equal_nan=True)
            if same and not force:
                return False
            self._asked, self._known = FitRequest(seq, targets), targets
            try:
                self._connection.send(self._asked)
            except OSError:  # it has died; whoever starts it anew asks again
                return False
        self.session.take_fit_state("running")
        return True

    def fit_now(self) -> None:
        """Fit, also if nothing has changed.

        Raises:
            NotReadyError: if there are too few labels, or nothing that could fit.
        """
        self._check_ready()
        self._fit_if_changed(force=True)

    def _check_ready(self) -> None:
        labelled = count_labelled(self.session.copy_targets(whole=True)[1])
        if labelled < FEWEST:
            raise NotReadyError(f"{FEWEST} labelled images are needed, and there are {labelled}; label more")
        if self._connection is None:
            raise NotReadyError(self.session.fit["message"] or "the process that fits is starting; wait a moment")

    # The head.

    @property
    def has_news(self) -> bool:
        """Whether there is a fit, or could be one, of labels that the head on disk does not know."""
        known = self._connection is not None and self.session.suggestions is not None
        return known and self._seq_on_disk() != self.session.labels.seq

    def _seq_on_disk(self) -> int | None:
        try:
            return int(json.loads((self.folder / RECORD).read_text(encoding="utf-8"))["seq"])
        except (OSError, ValueError, KeyError, TypeError):  # there is none, or it is damaged
            return None

    def save_head(self, within: float = HEAD_WITHIN) -> Path:
        """Write the head, fitted on all labels; returns its folder.

        Args:
            within: seconds that are waited for it.

        Raises:
            NotReadyError: if there are too few labels, or nothing that could fit.
            TensorDropoutError: if it could not be written.
        """
        self._check_ready()
        with self._saving:
            while not self._heads.empty():  # of a request that was given up
                self._heads.get_nowait()
            self._fit_if_changed(whole=True)
            self._send(HeadRequest(self.folder, self.session.labels.names))
            try:
                answer = self._heads.get(timeout=within)
            except queue.Empty:
                raise NotReadyError(f"the head was not written within {within:.0f} seconds; try again") from None
        if answer.problem is not None:
            raise NotReadyError(answer.problem)
        return answer.folder

    def stop_waiting(self) -> None:
        """The server ends: a page that waits for the head has its answer now."""
        if self._saving.locked():
            self._heads.put(HeadWritten(self.folder, "the server ends; it writes the head then"))


def count_labelled(targets: np.ndarray) -> int:
    """How many images have a point."""
    return int((~np.isnan(targets)).any(axis=(1, 2)).sum())


@contextmanager
def _few_threads() -> Iterator[None]:
    """What is started inside uses all cores but one: the server needs its turn while a fit runs."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name, value in before.items():
        asked = int(value) if value is not None and value.isdigit() else cores
        os.environ[name] = str(max(1, min(asked, cores - 1)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
