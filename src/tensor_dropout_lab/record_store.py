"""The records of experiments, read through one interface, whether their runs are folders or packed.

A live run is a folder, ``BASE/EXPERIMENT/RUN``, as training and evaluation write it. A packed experiment is two files:

- ``BASE/EXPERIMENT.jsonl.xz``: first a line with the environments that occur; then a line for each run with its files,
  JSON as it is and other text as strings. A record names its environment by its number.
- ``BASE/EXPERIMENT.npz.xz``: the arrays of its evaluations, if there are any. Equal columns of all runs lie side by
  side, which packs a third smaller than a file for each run.

Not a bit of a number changes by packing. Files that belong to no single run are those of the run "".
"""

from __future__ import annotations

import csv
import io
import json
import lzma
import re
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.outcomes import FILE as OUTCOMES
from tensor_dropout.robustness.outcomes import Arrays, Outcomes
from tensor_dropout_lab.locks import lock_file

FORMAT = 1
"""Of a packed file."""
_READABLE = (".json", ".jsonl", ".csv", ".md", ".txt", ".npz")
_BEGIN = re.compile(rb'\{"run": ("(?:[^"\\]|\\.)*"), ')

Files = Mapping[str, Any]
"""Name in the run's folder -> a JSON value, a list of them (.jsonl), :class:`Outcomes` (.npz) or text."""


class Run(ABC):
    """The files of one run.

    Attributes:
        folder: where it is, or would be if it were not packed.
        packed: whether it is: then it has no weights, and nothing is added to it.
    """

    packed = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def names(self) -> list[str]:
        """The files that can be read, sorted."""

    @abstractmethod
    def read(self, name: str) -> Any:
        """The content of a file by its kind, see :data:`Files`.

        Raises:
            ValueError: if it is damaged; of outcomes, a TensorDropoutError, which is one.
        """

    def has(self, name: str) -> bool:
        """Whether there is this file."""
        return name in self.names()

    def read_record(self, name: str) -> dict[str, Any] | None:
        """A JSON record; None if there is none.

        Raises:
            ValueError: if it is damaged.
        """
        if not self.has(name):
            return None
        record = self.read(name)
        if not isinstance(record, dict):
            raise ValueError(f"{name} holds no record")
        return record

    def read_metrics(self) -> list[dict[str, Any]]:
        """The lines of the training; a line that was cut off, and what follows it, is left out."""
        return list(self.read("metrics.jsonl")) if self.has("metrics.jsonl") else []

    def read_predictions(self) -> list[dict[str, str]]:
        """The rows of ``predictions.csv``.

        Raises:
            FileNotFoundError: if there are none.
        """
        if not self.has("predictions.csv"):
            raise FileNotFoundError(f"{self.folder} has no predictions.csv")
        return list(csv.DictReader(io.StringIO(self.read("predictions.csv"), newline="")))

    def read_outcomes(self, folder: str = "") -> Outcomes:
        """What an evaluation found on every example.

        Args:
            folder: that of the evaluation, in the run's.

        Raises:
            TensorDropoutError: if there are none, or they are damaged.
        """
        name = f"{folder}/{OUTCOMES}" if folder else OUTCOMES
        if not self.has(name):
            raise TensorDropoutError(
                f"{self.folder / folder} holds no evaluation (no {OUTCOMES}); make one with: tensor-dropout evaluate"
            )
        outcomes: Outcomes = self.read(name)
        return outcomes

    def read_all(self) -> dict[str, Any]:
        """All files, for packing."""
        return {name: self.read(name) for name in self.names()}


class LiveRun(Run):
    """A run in a folder."""

    def names(self) -> list[str]:
        """The files that can be read, sorted; those of an evaluation with their folder."""
        paths = (*self.folder.glob("*"), *self.folder.glob("evaluation*/*"))
        return sorted(
            path.relative_to(self.folder).as_posix()
            for path in paths
            if path.suffix in _READABLE and not path.name.startswith(".") and path.is_file()
        )

    def has(self, name: str) -> bool:
        """Whether there is this file."""
        return (self.folder / name).is_file()

    def read(self, name: str) -> Any:
        """The content of a file by its kind, see :data:`Files`."""
        path = self.folder / name
        if path.suffix == ".npz":
            return Outcomes(path, {})
        if path.suffix == ".jsonl":
            return list(_read_lines(path.read_bytes()))
        with path.open(encoding="utf-8", newline="") as stream:
            text = stream.read()
        return json.loads(text) if path.suffix == ".json" else text


class PackedRun(Run):
    """A run of a packed experiment."""

    packed = True

    def __init__(self, folder: Path, name: str, experiment: _PackedExperiment) -> None:
        super().__init__(folder)
        self._name, self._experiment = name, experiment

    @cached_property
    def _files(self) -> dict[str, Any]:
        return self._experiment.read_files(self._name)

    def names(self) -> list[str]:
        """The files that were kept, sorted."""
        return sorted(self._files)

    def has(self, name: str) -> bool:
        """Whether this file was kept."""
        return name in self._files

    def read(self, name: str) -> Any:
        """The content of a file by its kind, see :data:`Files`."""
        content = self._files[name]
        if name.endswith(".npz"):
            return Outcomes.restore(
                self.folder / name, content, self._experiment.read_arrays(f"{self._name}/{name}", content)
            )
        if name.endswith(".json") and isinstance(content, dict) and isinstance(content.get("environment"), int):
            return content | {"environment": self._experiment.environments[content["environment"]]}
        return content


class RecordStore:
    """The experiments under a folder, live or packed. Of a run that is both, the live one counts.

    Args:
        base: the folder.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     store = RecordStore(Path(folder))
        ...     store.pack("trial", {"fc-seed0": {"result.json": {"test": {"accuracy": 75.5}}}})
        ...     store.list_runs("trial"), store.run("trial", "fc-seed0").read("result.json")
        (['fc-seed0'], {'test': {'accuracy': 75.5}})
    """

    def __init__(self, base: Path) -> None:
        self.base = Path(base)

    def list_experiments(self) -> list[str]:
        """The experiments of which there is anything, sorted."""
        packed = {path.name.removesuffix(".jsonl.xz") for path in self.base.glob("*.jsonl.xz")}
        live = {
            path.parts[len(self.base.parts)] for path in (*self.base.glob("*/*.json"), *self.base.glob("*/*/*.json"))
        }
        return sorted(name for name in packed | live if not name.startswith("."))

    def list_runs(self, experiment: str) -> list[str]:
        """The runs of an experiment, sorted; without "", which has what belongs to no single run."""
        live = {path.parent.name for path in (self.base / experiment).glob("*/*.json")}
        return sorted((live | self._packed(experiment).lines.keys()) - {""})

    def run(self, experiment: str, name: str = "") -> Run:
        """One run; it need not exist."""
        folder = self.base / experiment / name
        if any(folder.glob("*.json")) or name not in (packed := self._packed(experiment)).lines:
            return LiveRun(folder)
        return PackedRun(folder, name, packed)

    def list_environments(self) -> list[dict[str, Any]]:
        """The environments of all records, each once; damaged records have none."""
        environments: dict[str, dict[str, Any]] = {}
        for experiment in self.list_experiments():
            for environment in self._packed(experiment).environments:
                environments.setdefault(repr(environment), environment)
        patterns = ("*/*.json", "*/*/run.json", "*/*/evaluation.json", "*/*/evaluation/evaluation.json")
        for path in sorted(path for pattern in patterns for path in self.base.glob(pattern)):
            try:
                environment = json.loads(path.read_text(encoding="utf-8")).get("environment")
            except (ValueError, AttributeError):
                continue
            if isinstance(environment, dict):
                environments.setdefault(repr(environment), environment)
        return list(environments.values())

    def pack(self, experiment: str, runs: Mapping[str, Files]) -> None:
        """Put runs into the packed files of an experiment, beside those that are there; of equal names the new ones.

        Of the run "", which is several stages, it is the files that are put beside those that are there. Others who
        pack the same experiment wait.

        Args:
            experiment: its name.
            runs: the files of each run by its name; "" has what belongs to no single run.
        """
        path = self._path(experiment)
        with lock_file(path):
            before = _PackedExperiment(path if path.exists() else None)
            kept = {name: PackedRun(self.base / experiment / name, name, before) for name in before.lines}
            all_runs = {name: kept[name].read_all() for name in kept if name not in runs} | dict(runs)
            if "" in kept and "" in runs:
                all_runs[""] = kept[""].read_all() | dict(runs[""])
            lines, arrays = _encode({name: all_runs[name] for name in sorted(all_runs)})
            if arrays:  # before the lines: those that name arrays must never be there without them
                plain = io.BytesIO()
                np.savez(plain, **arrays)  # type: ignore[arg-type]
                _write_compressed(path.with_name(f"{experiment}.npz.xz"), plain.getvalue())
            _write_compressed(path, "".join(f"{line}\n" for line in lines).encode())

    def _path(self, experiment: str) -> Path:
        return self.base / f"{experiment}.jsonl.xz"

    def _packed(self, experiment: str) -> _PackedExperiment:
        path = self._path(experiment)
        try:
            state = path.stat()
        except FileNotFoundError:
            return _PackedExperiment(None)
        return _load_packed(path, state.st_mtime_ns, state.st_size)


def open_run(path: Path) -> Run:
    """The run at BASE/EXPERIMENT/RUN, live or packed."""
    path = Path(path)
    return LiveRun(path) if path.is_dir() else RecordStore(path.parent.parent).run(path.parent.name, path.name)


def read_outcomes(path: Path) -> Outcomes:
    """What an evaluation found on every example.

    Args:
        path: its folder, or that of a run which has one, BASE/EXPERIMENT/RUN; live or packed.

    Raises:
        TensorDropoutError: if there are none.
    """
    path = Path(path)
    for run, folder in ((open_run(path), "evaluation"), (open_run(path), ""), (open_run(path.parent), path.name)):
        if run.has(f"{folder}/{OUTCOMES}" if folder else OUTCOMES):
            return run.read_outcomes(folder)
    return open_run(path).read_outcomes()


# The packed files.


class _PackedExperiment:
    """A packed experiment; a line is parsed when it is asked for."""

    def __init__(self, path: Path | None) -> None:
        self.environments: list[dict[str, Any]] = []
        self.lines: dict[str, bytes] = {}
        self._path = path
        if path is None:
            return
        try:
            first, *lines = lzma.decompress(path.read_bytes()).splitlines()
            header = json.loads(first)
            if header["format"] != FORMAT:
                raise TensorDropoutError(
                    f"{path} has format {header['format']!r}, this version reads {FORMAT}: it is of a later version"
                )
            self.environments = header["environments"]
            for line in lines:
                begin = _BEGIN.match(line)
                if begin is None:
                    raise ValueError(f"a line begins with {line[:20]!r}, not with its run")
                self.lines[json.loads(begin[1])] = line
        except (lzma.LZMAError, EOFError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, TensorDropoutError):
                raise
            raise TensorDropoutError(f"{path} cannot be read ({error}); restore it") from error

    def read_files(self, name: str) -> dict[str, Any]:
        """The files of a run, environments and arrays left out."""
        try:
            files: dict[str, Any] = json.loads(self.lines[name])["files"]
        except (ValueError, KeyError) as error:
            raise TensorDropoutError(f"{self._path}: run {name!r} cannot be read ({error}); restore it") from error
        return files

    def read_arrays(self, file: str, header: Mapping[str, Any]) -> Arrays:
        """The arrays of RUN/FILE, whose header says whether there should be any."""
        arrays = self._arrays.get(file, {})
        if header["parts"] and not arrays:
            raise TensorDropoutError(
                f"{self._path_of_arrays} has no arrays of {file}; restore it, or pack the run again"
            )
        return arrays

    @property
    def _path_of_arrays(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name.replace(".jsonl.xz", ".npz.xz"))

    @cached_property
    def _arrays(self) -> dict[str, Arrays]:
        """RUN/FILE -> name -> array."""
        path = self._path_of_arrays
        by_file: dict[str, Arrays] = {}
        try:
            with np.load(io.BytesIO(lzma.decompress(path.read_bytes())), allow_pickle=False) as stored:
                for name in stored.files:
                    file, _, array = name.partition(f"{OUTCOMES}/")
                    by_file.setdefault(f"{file}{OUTCOMES}", {})[array] = stored[name]
        except (OSError, ValueError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise TensorDropoutError(f"{path} cannot be read ({error}); restore it") from error
        return by_file


@lru_cache(maxsize=32)
def _load_packed(path: Path, changed: int, size: int) -> _PackedExperiment:
    """The experiment as long as its file is the same."""
    return _PackedExperiment(path)


def _encode(runs: Mapping[str, Files]) -> tuple[list[str], Arrays]:
    """The lines of a packed file, and the arrays of all runs, equal columns side by side."""
    environments: dict[str, int] = {}
    columns: dict[str, Arrays] = {}
    lines = []
    for name, files in runs.items():
        content: dict[str, Any] = {}
        for file, value in sorted(files.items()):
            if isinstance(value, Outcomes):
                content[file] = value.header()
                for array, values in value.arrays().items():
                    columns.setdefault(array, {})[f"{name}/{file}/{array}"] = values
            elif file.endswith(".json") and isinstance(value, dict) and isinstance(value.get("environment"), dict):
                number = environments.setdefault(json.dumps(value["environment"]), len(environments))
                content[file] = value | {"environment": number}
            else:
                content[file] = value
        lines.append(json.dumps({"run": name, "files": content}, ensure_ascii=False))
    head = json.dumps({"format": FORMAT, "environments": [json.loads(text) for text in environments]})
    return [head, *lines], {name: values for column in columns.values() for name, values in column.items()}


def _write_compressed(path: Path, content: bytes) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))


def _read_lines(content: bytes) -> Iterator[Any]:
    for line in content.splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # also of bytes that are no text
            return
