"""The folder of a run: what it was, what happened in it, and what came out."""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.metrics.registry import main_metric
from tensor_dropout_lab.data.base import Data, Split
from tensor_dropout_lab.locks import is_in_use
from tensor_dropout_lab.nets.heads import LowRankLinear
from tensor_dropout_lab.run_records import describe_environment, write_json
from tensor_dropout_lab.training.checkpoint import list_checkpoints
from tensor_dropout_lab.training.config import Config, write_toml
from tensor_dropout_lab.training.evaluation import Outcome, describe_outputs

_FREE = {
    "run.device",
    "run.speed",
    "run.workers",
    "run.threads",
    "run.checkpoint_every",
    "run.checkpoint_seconds",
    "run.checkpoint_epochs",
}
_FREE |= {"data.root", "run.tensorboard", "run.evaluate_every", "run.sharding"}
"""Keys that may change when a run goes on: they do not say what is computed."""

_SKIP = "data.options.skip_unreadable"
"""May change, too, so that a run which an unreadable file stopped can go on; the record then says so."""


class RunFolder:
    """``config.toml``, ``run.json``, ``metrics.jsonl``, ``result.json``, ``predictions.csv``, model and checkpoints.

    Args:
        path: the folder; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics_path = path / "metrics.jsonl"
        self.model_path = path / "model.safetensors"

    def open(self, config: Config, data: Data, head: dict[str, Any]) -> None:
        """Begin a run here, or go on with it.

        Args:
            config: of the run.
            data: as loaded now.
            head: from :func:`describe_head`, for the record.

        Raises:
            TensorDropoutError: if the folder holds a run with other settings, on other examples, with a head of other
                defaults, or a damaged record.
        """
        record_path = self.path / "run.json"
        settings = flatten(config.model_dump(mode="json"))
        if record_path.is_file():
            new = flatten(Config().model_dump(mode="json"))  # keys that the version which wrote the record had not
            record = _read_record(record_path, _BEGUN, "settings", "data")
            before = new | record["settings"]
            changed = [
                key
                for key in settings.keys() | before.keys()
                if settings.get(key) != before.get(key) and key not in _FREE | {_SKIP}
            ]
            if changed:
                key = sorted(changed)[0]
                was, now = (repr(each[key]) if key in each else "its default" for each in (before, settings))
                raise TensorDropoutError(
                    f"train: {self.path} holds a run with {key}={was}, this one has {now}; choose another folder with "
                    "--out, or delete that one"
                )
            _require_same_head(self.path, record.get("head"), head)
            require_same_examples("train", self.path, record, splits(data))
            if settings.get(_SKIP) != before.get(_SKIP) and self.result() is None:
                record["settings"] |= {_SKIP: settings.get(_SKIP, False)}
                self._write_record(config, record | {"data": describe_data(data)})
            return
        self.path.mkdir(parents=True, exist_ok=True)
        record = {"settings": settings, "head": head, "data": describe_data(data)}
        self._write_record(config, record | {"environment": describe_environment()})

    def _write_record(self, config: Config, record: dict[str, Any]) -> None:
        with replacing(self.path / "config.toml") as temporary:
            temporary.write_text(write_toml(config), encoding="utf-8")
        write_json(self.path / "run.json", record)

    def result(self) -> dict[str, Any] | None:
        """What came out, if the run is done.

        Raises:
            TensorDropoutError: if the record is damaged.
        """
        path = self.path / "result.json"
        return _read_record(path, _ENDED, "task") if path.is_file() else None

    def finish(self, result: dict[str, Any]) -> None:
        """Say that the run is done."""
        write_json(self.path / "result.json", result)

    def note(self, line: dict[str, Any]) -> None:
        """Add the metrics of an epoch."""
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def metrics(self) -> list[dict[str, Any]]:
        """The metrics of the epochs so far; a line that was cut off is left out."""
        lines = []
        if self.metrics_path.is_file():
            for line in self.metrics_path.read_bytes().splitlines():
                try:
                    lines.append(json.loads(line))
                except ValueError:  # also of bytes that are no text
                    break
        return lines

    def rewind(self, epochs: int) -> None:
        """Forget the metrics after so many epochs: those epochs will be run again."""
        kept = [line for line in self.metrics() if line["epoch"] <= epochs]
        with replacing(self.metrics_path) as temporary:
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")

    def clean(self) -> None:
        """Remove what a killed process left half-written."""
        for path in self.path.glob(".*"):
            if path.is_file() and path.suffix in (".pt", ".json", ".toml", ".csv", ".safetensors", ".jsonl"):
                path.unlink(missing_ok=True)

    def write_predictions(self, outcome: Outcome, split: Split, data: Data, ridge: Tensor | None = None) -> Path:
        """One line per example: its name, its target, what the network said and, if it is given, the ridge.

        Of several targets, the columns have their names: ``target_age``, ``predicted_age``.
        """
        path = self.path / "predictions.csv"
        with replacing(path) as temporary, open(temporary, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if data.task == "classification":
                arrays = describe_outputs(outcome, data.task)
                columns = ("target", "predicted", "confidence", "nll")
                writer.writerow(["name", *columns])
                for name, y, best, confidence, nll in zip(split.names, *(arrays[key] for key in columns), strict=True):
                    writer.writerow([name, y, best, f"{confidence:.6f}", f"{nll:.6f}"])
            else:
                endings = [""] if data.outputs == 1 else [f"_{name}" for name in data.target_names]
                extras = {"masks": outcome.std, "ridge": ridge}
                given = {name: values for name, values in extras.items() if values is not None}
                kinds = ("target", "predicted", *given)
                writer.writerow(["name", *(kind + ending for kind in kinds for ending in endings)])
                targets = outcome.targets.reshape(outcome.outputs.shape)
                parts = [targets, outcome.outputs, *given.values()]
                for k, name in enumerate(split.names):
                    writer.writerow([name, *(f"{value:.6g}" for part in parts for value in part[k].tolist())])
        return path


def describe_head(config: Config, network: Any) -> dict[str, Any]:
    """The head as it was built, with every default: its rank, init, θ, law, modes and so on, as far as it has them.

    Args:
        config: of the run.
        network: of ``build_net``, before training.

    Example:
        >>> from tensor_dropout_lab.nets import build_net
        >>> from tensor_dropout_lab.training.config import resolve_config
        >>> network = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="trl-cp")
        >>> describe_head(resolve_config(overrides={"net.head": "trl-cp"}), network)
        {'name': 'trl-cp', 'rank': 32, 'init': 'pool'}
    """
    name, layer = config.net.head, network.head
    if isinstance(layer, TensorRegression):
        built = layer.config()
        own = {key: built[key] for key in ("init", "theta") if key in built}
        return {"name": name, "rank": layer.rank, **own, **(built["dropout"] or {})}
    if isinstance(layer, LowRankLinear):
        return {"name": name, "rank": len(layer.reduce)}
    return {"name": name} | ({"drop_rate": network.settings["drop_rate"]} if name == "fc+dropout" else {})


def _require_same_head(path: Path, before: Any, head: dict[str, Any]) -> None:
    """A run must not go on as another network because a default has changed since it began."""
    if not isinstance(before, dict):
        return
    now = json.loads(json.dumps(head))
    for key in sorted(now.keys() & before.keys()):
        if now[key] != before[key]:
            raise TensorDropoutError(
                f"train: {path} holds a run whose head was built with {key}={before[key]!r}, by default it is now "
                f"{now[key]!r}; choose another folder with --out, or delete that one"
            )


def describe_data(data: Data) -> dict[str, Any]:
    """What the data of a run are, as in ``run.json``."""
    parts = splits(data)
    return {
        "name": data.name,
        "simulated": data.simulated,
        "provenance": data.provenance,
        **({} if data.voxel is None else {"voxel": data.voxel}),
        "examples": {name: len(part) for name, part in parts.items()},
        "fingerprints": {name: fingerprint(part) for name, part in parts.items()},
    }


def fingerprint(part: Split) -> str:
    """The names and targets of a part in 16 digits: any other example, order or target gives others.

    Example:
        >>> import torch
        >>> from tensor_dropout_lab.data.base import TensorSplit
        >>> fingerprint(TensorSplit(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1]), ["a", "b"]))
        'bd6e2729536dcc88'
    """
    digest = hashlib.sha256("\n".join(part.names).encode())
    digest.update(part.targets.double().numpy().tobytes())
    return digest.hexdigest()[:16]


def require_same_examples(what: str, folder: Path, record: dict[str, Any], parts: dict[str, Split]) -> None:
    """Refuse data that changed since a run began: parts are drawn anew, and what tests it may have trained it.

    Args:
        what: the command, for the message.
        folder: that of the run.
        record: its ``run.json``; one of an earlier version does not know its examples.
        parts: what is to be used now, by name.

    Raises:
        TensorDropoutError: if a part is not what it was.
    """
    known = record["data"].get("fingerprints", {})
    for name, part in parts.items():
        whole = getattr(part, "whole", None) or part  # the run may have begun before any were left out
        if name in known and known[name] not in (fingerprint(part), fingerprint(whole)):
            before = record["data"]["examples"][name]
            now = f"{len(part)} instead of {before}" if len(part) != before else "other names or targets"
            raise TensorDropoutError(
                f"{what}: the data changed since the run in {folder} began: the {name} part has {now}, and some of it "
                "may have been trained on; restore the data, or train anew into another folder"
            )


def read_finished_run(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a finished run was (``run.json``) and what came out of it (``result.json``).

    Raises:
        TensorDropoutError: if the folder is not that of a finished run.
    """
    for name in ("run.json", "result.json", "model.safetensors"):
        if not (folder / name).is_file():
            kept = name == "model.safetensors"  # records alone, as a repository keeps them
            why = "it has records, but no weights (model.safetensors): train it again" if kept else f"it has no {name}"
            raise TensorDropoutError(f"{folder} is not the folder of a finished run: {why}")
    record, result = (_read_record(folder / name, _ANEW) for name in ("run.json", "result.json"))
    if not isinstance(record.get("settings"), dict) or "data.name" not in record["settings"] or "task" not in result:
        raise TensorDropoutError(f"{folder} is not the folder of a finished run: run.json or result.json is incomplete")
    return record, result


_ANEW = "train again into another folder"
_BEGUN = "delete it and give the settings of this run again, which then goes on; or delete the folder"
_ENDED = "delete it and give the same command again, which then ends from the last checkpoint"
"""What to do about a damaged record."""


def _read_record(path: Path, advice: str, *keys: str) -> dict[str, Any]:
    """A record that is whole, with these keys in it."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TensorDropoutError(f"{path} is damaged ({error}); {advice}") from error
    missing = [key for key in keys if key not in record] if isinstance(record, dict) else ["record"]
    if missing:
        raise TensorDropoutError(f"{path} is damaged: it holds no {missing[0]}; {advice}")
    return cast(dict[str, Any], record)


def data_options(settings: dict[str, Any]) -> dict[str, Any]:
    """The options of the data set among the settings of a run.

    Example:
        >>> data_options({"data.name": "digits", "data.options.augment": False})
        {'augment': False}
    """
    prefix = "data.options."
    return {key.removeprefix(prefix): value for key, value in settings.items() if key.startswith(prefix)}


def flatten(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"run": {"epochs": 3}}`` -> ``{"run.epochs": 3}``; unset keys are left out."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = value
    return flat


def splits(data: Data) -> dict[str, Split]:
    """The parts of a data set that there are."""
    named = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: part for name, part in named.items() if part is not None}


def list_runs(root: Path) -> list[dict[str, Any]]:
    """What every readable run under a folder is and how far it came, for ``tensor-dropout ls``."""
    rows = []
    for record_path in sorted(root.rglob("run.json")):
        try:
            rows.append(_describe_run(RunFolder(record_path.parent)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return rows


def _describe_run(folder: RunFolder) -> dict[str, Any]:
    record = json.loads((folder.path / "run.json").read_text(encoding="utf-8"))
    settings, data = record["settings"], record["data"]
    lines, result = folder.metrics(), folder.result()
    points = result.get("points", []) if result else []
    metric = "distance" if points else main_metric(result["task"]).name if result else None
    return {
        "folder": str(folder.path),
        "data": data["name"] + (" (simulated)" if data["simulated"] else ""),
        "net": settings["net.name"],
        "head": settings["net.head"],
        "seed": settings["run.seed"],
        "epochs": f"{lines[-1]['epoch'] if lines else 0}/{settings['run.epochs']}",
        "state": "done" if result else _find_state(folder.path),
        "metric": metric,
        "test": [] if result is None else _list_scores(split_targets(result.get("test", {}), points), metric),
    }


def _find_state(folder: Path) -> str:
    return "running" if is_in_use(folder) else "interrupted" if list_checkpoints(folder) else "begun"


def _list_scores(found: dict[str, Any], metric: str | None) -> list[float]:
    """The main number of a part, or that of each target; what is no number, in a damaged record, is left out."""
    numbers = [each.get(metric) for each in found.values()]
    return [number for number in numbers if isinstance(number, int | float)]


def split_targets(found: dict[str, Any], points: Sequence[Sequence[str]] = ()) -> dict[str, dict[str, Any]]:
    """The numbers of each of several targets by its name; of points those of all of them; else all, under no name.

    Args:
        found: the numbers of a part.
        points: the names of the coordinates of each point, as the result has them.

    Example:
        >>> ages = {"mae": 3.0, "targets": {"age": {"mae": 5.0}, "x": {"mae": 0.1}, "y": {"mae": 0.1}}, "distance": 2.5}
        >>> split_targets(ages, [["x", "y"]])
        {'1 point': {'distance': 2.5}, 'age': {'mae': 5.0}}
        >>> split_targets({"mae": 3.0})
        {'': {'mae': 3.0}}
    """
    targets: dict[str, dict[str, Any]] = found.get("targets", {"": found})
    if not points:
        return targets
    coordinates = {name for point in points for name in point}
    name = f"{len(points)} point{'s' if len(points) > 1 else ''}"
    located = {name: {"distance": found["distance"]}} if "distance" in found else {}
    return located | {name: numbers for name, numbers in targets.items() if name not in coordinates}
