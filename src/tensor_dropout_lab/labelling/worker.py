"""The process that computes: features of all pictures, and fits when it is asked, in between.

It is told what to do over a pipe and answers over it. It runs with few threads and low priority, so that the page's
server has its turn at once, and ends when the server's process is gone, however that ended.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from math import prod
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.messages import (
    BadPicture,
    Failed,
    FeaturesDone,
    FitRequest,
    Fitted,
    HeadRequest,
    HeadWritten,
    Task,
)
from tensor_dropout_lab.labelling.network_failures import describe, explain

if TYPE_CHECKING:
    from tensor_dropout.sklearn import FeatureMaps
    from tensor_dropout_lab.labelling.learner import Round

FINE_STRIDE = 4
CHUNK = 32
"""How many pictures go through the network before the pipe is looked at."""


def run_worker(connection: Connection, task: Task) -> None:
    """The whole life of the process."""
    _settle()
    try:
        computer = Computer(task)
    except Exception as error:  # a network of the user's may raise anything
        connection.send(Failed(explain(error, task.settings), for_good=True))
        return
    try:
        _serve(connection, computer)
    except (EOFError, BrokenPipeError):  # the server has ended
        return


def _serve(connection: Connection, computer: Computer) -> None:
    while True:
        requests = _receive(connection, patient=not computer.waiting)
        if None in requests:
            return
        fits = [request for request in requests if isinstance(request, FitRequest)]
        if fits:  # the newest knows all that the others knew
            for answer in computer.fit(fits[-1]):
                connection.send(answer)
        for request in requests:
            if isinstance(request, HeadRequest):
                connection.send(computer.write_head(request))
        # Also after a fit, or a person who labels without a pause would stop the features.
        chunk = computer.take_chunk()
        for answer in computer.compute(chunk) if chunk else ():
            connection.send(answer)


def _receive(connection: Connection, patient: bool) -> list[Any]:
    """What has come since; waits for something if there is nothing else to do."""
    requests = [connection.recv()] if patient else []
    while connection.poll():
        requests.append(connection.recv())
    return requests


def _settle() -> None:
    """Stand back behind the server, and never outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which asks for the head and then ends us
    if hasattr(os, "nice"):
        os.nice(10)
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _import_modules(modules: Sequence[str]) -> None:
    """What ``--import`` names, as the command itself does."""
    from tensor_dropout_lab.nets import trust

    if "" not in sys.path:
        sys.path.insert(0, "")  # a module of the user's in the current folder
    for module in modules:
        importlib.import_module(module)
        trust(module)


class Computer:
    """The network, the features, and what learns from them.

    Args:
        task: what to work on.

    Attributes:
        waiting: the pictures that have no features yet.
    """

    def __init__(self, task: Task) -> None:
        _import_modules(task.modules)
        from tensor_dropout_lab.data.image_files import ImageFiles
        from tensor_dropout_lab.head_search import FitOptions, make_feature_maps, open_network
        from tensor_dropout_lab.labelling.learner import Learner

        settings = task.settings
        options = FitOptions(
            images=task.folder,
            targets=task.folder,
            backbone=settings["backbone"],
            weights=None if settings["weights"] is None else Path(settings["weights"]),
            arguments=settings["arguments"],
            layer=tuple(settings["layer"] or ()),
            size=tuple(settings["size"]) if settings["size"] else None,
            cache=task.cache,
            seed=task.seed,
        )
        self.task = task
        self.backbone = open_network(options, ImageFiles(task.folder, list(task.names)))
        self.maps = make_feature_maps(options, self.backbone).set_params(verbose=False)
        self.fine: FeatureMaps | None = self._make_fine()
        self.learner = Learner(task.sizes, task.groups, seed=task.seed)
        self.waiting = deque(int(number) for number in np.flatnonzero(task.sizes.min(axis=1) > 0))
        self.round: Round | None = None
        self._handled, self._seq = 0, 0

    # Features.

    def _make_fine(self) -> FeatureMaps | None:
        """Maps of an early layer, where points can be seen sharply; None if there is no earlier one."""
        from sklearn.base import clone

        from tensor_dropout.features.probe import fixed_input, pick_layer

        height, width = (self.maps.size, self.maps.size) if isinstance(self.maps.size, int) else self.maps.size
        x = fixed_input(self.backbone.network, (3, height, width))
        layer = pick_layer(self.backbone.network, x, FINE_STRIDE, "label")
        fine: FeatureMaps = clone(self.maps).set_params(layer=layer, dtype="float16")
        shapes = [self._fit_quietly(maps).map_shape_[1:] for maps in (self.maps, fine)]
        return fine if prod(shapes[1]) > prod(shapes[0]) else None

    def _fit_quietly(self, maps: FeatureMaps) -> FeatureMaps:
        """Find the layer; which one was picked is no news."""
        size = (maps.size, maps.size) if isinstance(maps.size, int) else maps.size
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted: FeatureMaps = maps.fit(np.zeros((1, 3, *size), np.float32))
        return fitted

    def take_chunk(self) -> list[int]:
        """The next pictures."""
        return [self.waiting.popleft() for _ in range(min(CHUNK, len(self.waiting)))]

    def compute(self, numbers: Sequence[int]) -> list[FeaturesDone | BadPicture]:
        """Give pictures their features; says which cannot be read."""
        problems: dict[int, str] = {}
        paths = {number: path for number in numbers if (path := self._find(number, problems)) is not None}
        if paths and not self._add_maps(paths, {}):  # one of them is damaged: find out which
            for number, path in paths.items():
                self._add_maps({number: path}, problems)
        self._handled += len(numbers)
        bad = [BadPicture(number, problem) for number, problem in problems.items()]
        return [*bad, FeaturesDone(self._handled)]

    def _find(self, number: int, problems: dict[int, str]) -> Path | None:
        from tensor_dropout_lab.labelling.folder import find_inside

        try:
            return find_inside(self.task.folder, self.task.names[number])
        except TensorDropoutError as error:
            problems[number] = str(error)
            return None

    def _add_maps(self, paths: dict[int, Path], problems: dict[int, str]) -> bool:
        """Give pictures their maps; if one cannot be read, none gets any, and the first is given the problem."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another process may use the cache: it is waited for
                maps = self.maps.transform(list(paths.values()))
                fine = None if self.fine is None else self.fine.transform(list(paths.values()))
        except TensorDropoutError as error:
            number, path = next(iter(paths.items()))
            problems[number] = _shorten(str(error), path)
            return False
        self.learner.set_maps(list(paths), maps, fine)
        return True

    # Fits.

    def fit(self, request: FitRequest) -> Iterator[FeaturesDone | BadPicture | Fitted | Failed]:
        """Fit, after pictures with labels that have no features have got them."""
        labelled = set(np.flatnonzero(~np.isnan(request.targets).all(axis=(1, 2))).tolist())
        first = [number for number in self.waiting if number in labelled]
        self.waiting = deque(number for number in self.waiting if number not in labelled)
        for start in range(0, len(first), CHUNK):
            yield from self.compute(first[start : start + CHUNK])
        began, cpu = time.perf_counter(), time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.round = self.learner.fit(request.targets)
        except Exception as error:  # whatever goes wrong in a fit: the next one may succeed
            yield Failed(describe(error))
            return
        self._seq = request.seq
        seconds = {"seconds": time.perf_counter() - began, "cpu_seconds": time.process_time() - cpu}
        yield Fitted(request.seq, _arrays(self.round), self._record(len(labelled), seconds))

    def _record(self, labelled: int, seconds: dict[str, float]) -> dict[str, Any]:
        assert self.round is not None
        error = {key: _finite(getattr(self.round, key)) for key in ("error_pixels", "error_percent")}
        return {"labelled": labelled, **error, **_plain(seconds), **_plain(self.round.settings)}

    def write_head(self, request: HeadRequest) -> HeadWritten:
        """Write the head of the last fit as ``tensor-dropout fit`` does."""
        if self.round is None:
            return HeadWritten(request.folder, "there is no fit yet; label 5 images first")
        try:
            self._write_head(request, self.round)
        except (OSError, TensorDropoutError) as error:
            return HeadWritten(request.folder, f"the head could not be written ({describe(error)})")
        return HeadWritten(request.folder)

    def _write_head(self, request: HeadRequest, fitted: Round) -> None:
        from tensor_dropout_lab.fitted_head import RECORD, describe_head, new_results, write_head
        from tensor_dropout_lab.labelling.points_file import name_columns
        from tensor_dropout_lab.run_records import describe_environment

        columns = name_columns([name for name, known in zip(request.names, fitted.fitted, strict=False) if known])
        points = [[column, column + 1] for column in range(0, len(columns), 2)]
        maps = self._maps_of(fitted)
        head = describe_head("regression", columns, points, units="fractions", backbone=self.backbone, maps=maps)
        record = {
            **head,
            "images": int(np.isneginf(fitted.gain).sum()),
            "groups": None if self.task.groups is None else len(set(self.task.groups)),
            "seed": self.task.seed,
            "seq": self._seq,
            "settings": _plain(fitted.settings),
            "errors": {key: _finite(getattr(fitted, key)) for key in ("error_pixels", "error_percent")},
            "environment": describe_environment(),
        }
        with new_results(request.folder, RECORD) as staging:
            write_head(staging, fitted.estimator, record)

    def _maps_of(self, fitted: Round) -> FeatureMaps:
        """What gives the maps that the head takes: the learner may have averaged ours to a smaller grid."""
        from sklearn.base import clone

        grid = tuple(fitted.estimator.input_shape_[1:])
        if grid == tuple(self.maps.map_shape_[1:]):
            return self.maps
        return self._fit_quietly(clone(self.maps).set_params(pool=grid, layer=self.maps.layer_))


def _arrays(fitted: Round) -> dict[str, np.ndarray]:
    names = ("points", "ellipses", "std", "gain", "doubtful", "far")
    return {name: np.asarray(getattr(fitted, name)) for name in names}


def _finite(value: float) -> float | None:
    """JSON has no NaN."""
    return float(value) if np.isfinite(value) else None


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """As JSON types."""
    plain = {key: value.item() if isinstance(value, np.generic) else value for key, value in settings.items()}
    return {key: _finite(value) if isinstance(value, float) else value for key, value in plain.items()}


def _shorten(message: str, path: Path) -> str:
    """Why a single file cannot be read, without what was said around it."""
    start, end = message.find(f"{path} ("), message.rfind("); ")
    return message[start + len(f"{path} (") : end] if 0 <= start < end else message
