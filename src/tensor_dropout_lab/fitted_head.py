"""The folder that ``tensor-dropout fit`` leaves: a head, and all that is needed to predict with it again.

``head.safetensors`` is the estimator (``td.save``). ``fit.json`` says which network and layer its features come from,
how images are prepared, and what its outputs are; it names the head's hash, so that two fits never mix.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.run_records import write_json

if TYPE_CHECKING:
    import torch
    from torch import nn

    from tensor_dropout.sklearn import FeatureMaps
    from tensor_dropout_lab.backbones import Backbone

HEAD, RECORD = "head.safetensors", "fit.json"
VERSION = 1
BACKBONE = ("spec", "weights", "arguments", "input_shape", "hash")
"""What it says of the network."""
KEYS = ("task", "columns", "points", "units", "backbone", "maps")
"""What a record needs beside its version and the head's hash."""
MAP_SETTINGS = ("layer", "size", "mean", "std", "pool", "grid", "channel_axis")
"""The settings of ``FeatureMaps`` that are kept."""
LIKE = 0.1
"""How far what a network gives for fixed inputs may be from what it gave: more than the rounding of a GPU."""


@dataclass(frozen=True)
class FittedHead:
    """A fitted head with its record.

    Attributes:
        folder: where it is.
        estimator: what was fitted.
        record: what ``fit.json`` says.
    """

    folder: Path
    estimator: Any
    record: dict[str, Any]

    @property
    def columns(self) -> list[str]:
        """The names of the targets."""
        return list(self.record["columns"])

    @property
    def points(self) -> list[tuple[int, ...]]:
        """Which columns are points."""
        return [tuple(point) for point in self.record["points"]]

    @property
    def in_pixels(self) -> bool:
        """Whether points are given in pixels."""
        return bool(self.record["units"] == "pixels")

    def feature_maps(
        self,
        backbone: str | None = None,
        weights: str | os.PathLike[str] | None = None,
        device: str | torch.device | None = None,
    ) -> FeatureMaps:
        """The maps that it was fitted on, of other images.

        Args:
            backbone: the network, if the file must not decide, or its place has changed; None: as it was named.
            weights: the file of its weights, where that has another place now.
            device: where to run.

        Raises:
            TensorDropoutError: if it is not the network that the head was fitted on.
        """
        from tensor_dropout.sklearn import FeatureMaps
        from tensor_dropout_lab.backbones import open_backbone

        recipe = self.record["backbone"]
        opened = open_backbone(
            backbone or recipe["spec"],
            weights or recipe["weights"],
            recipe["arguments"],
            input_shape=_as_tuple(recipe["input_shape"]),
            named_by_user=backbone is not None,
        )
        if opened.hash_weights() != recipe["hash"]:
            raise TensorDropoutError(
                f"the weights of {opened.recipe['spec']} are not those that the head was fitted on; name the same "
                "network with --backbone and --weights, or fit again"
            )
        settings = {key: _as_tuple(self.record["maps"][key]) for key in MAP_SETTINGS}
        settings["layer"] = self.record["maps"]["layer"]
        maps = FeatureMaps(opened.network, device=device, **settings)
        maps.fit(np.zeros((1, *self.record["maps"]["input_shape"]), np.float32))
        expected = tuple(self.estimator.input_shape_)
        if maps.map_shape_ != expected or not self._gave(maps.sketch_):
            shapes = "" if maps.map_shape_ == expected else f" (maps of shape {maps.map_shape_}, not {expected})"
            raise TensorDropoutError(
                f"{opened.recipe['spec']} has the weights that the head was fitted on, but gives other maps than when "
                f"the head was fitted{shapes}: its code or {self.folder / RECORD} has changed; undo that, or fit again"
            )
        return maps

    def _gave(self, sketch: tuple[float, ...]) -> bool:
        """Whether the network gave the same for fixed inputs when the head was fitted, as far as is known."""
        length, *projections = sketch
        known, *others = self.record["maps"].get("sketch", sketch)  # older folders do not say it
        return math.isclose(length, known, rel_tol=LIKE) and bool(np.allclose(projections, others, rtol=0, atol=LIKE))


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def scale_points(values: np.ndarray, points: Sequence[Sequence[int]], sizes: np.ndarray | None) -> np.ndarray:
    """Columns (n, k) whose points are fractions, with points in pixels; also of standard deviations."""
    scaled = values.copy()
    for point in points if sizes is not None else ():
        scaled[:, point] *= sizes
    return scaled


def find_fitted(path: Path) -> Path | None:
    """The folder of a fit that a path names: the folder, or a file in it; None if it is something else.

    Raises:
        TensorDropoutError: if its record is gone.
    """
    folder = path if path.is_dir() else path.parent
    if not path.exists() or (folder / RECORD).is_file():
        return folder if path.exists() else None
    if (folder / HEAD).is_file():
        raise TensorDropoutError(f"{folder} has a head, {HEAD}, but {RECORD} is missing, its record; fit again")
    if (folder / "head" / RECORD).is_file():  # the folder of tensor-dropout label
        raise TensorDropoutError(f"{folder} is a folder of labels; did you mean {folder / 'head'}?")
    return None


def join_fitted(folder: Path, backbone: str | None = None) -> tuple[nn.Module, tuple[int, ...]]:
    """The network with the fitted head behind its layer, and the shape of an input: (channels, *size).

    Args:
        folder: of the fit.
        backbone: the network, if the file must not decide; None: as it was named.

    Raises:
        TensorDropoutError: if the folder is damaged, its network is another one, or it cannot be cut there.
    """
    from tensor_dropout.features.attach import attach_head

    head = open_fitted(folder)
    return attach_head(head.feature_maps(backbone), head.estimator).eval(), tuple(head.record["maps"]["input_shape"])


def open_fitted(folder: Path) -> FittedHead:
    """Read the folder of a fit.

    Raises:
        TensorDropoutError: if it is damaged, or its files belong to different fits.
    """
    from tensor_dropout.files import load

    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        version, expected = record["version"], record["head_hash"]
        lacking = [key for key in KEYS if key not in record] if version == VERSION else []
        if lacking:
            raise KeyError(*lacking)
    except (ValueError, KeyError, TypeError) as error:
        raise TensorDropoutError(f"{folder / RECORD} is damaged or no record of a fit ({error}); fit again") from error
    if version != VERSION:
        raise TensorDropoutError(
            f"{folder / RECORD} is of version {version}, and this is {VERSION}; update, or fit again"
        )
    if not (folder / HEAD).is_file() or hash_file(folder / HEAD) != expected:
        raise TensorDropoutError(f"{folder / HEAD} is not the head that {RECORD} describes; fit again")
    estimator = load(folder / HEAD)
    fault = _find_fault(record, estimator)
    if fault is not None:
        raise TensorDropoutError(f"{folder / RECORD} is damaged: its entry {fault} is not what a fit writes; fit again")
    return FittedHead(folder, estimator, record)


def _find_fault(record: dict[str, Any], estimator: Any) -> str | None:
    """The first entry of a record that no fit of this estimator has written."""
    columns, points, backbone, maps = (record[key] for key in ("columns", "points", "backbone", "maps"))
    is_classifier = hasattr(estimator, "classes_")
    n_columns = 1 if is_classifier else math.prod(getattr(estimator, "output_shape_", ()))
    sound: dict[str, Callable[[], bool]] = {  # each may rely on those before it
        "task": lambda: record["task"] == ("classification" if is_classifier else "regression"),
        "units": lambda: record["units"] in ("fractions", "pixels"),
        "columns": lambda: _is_list(columns, str) and len(columns) == n_columns,
        "points": lambda: _is_list(points, list) and all(_is_point(point, n_columns) for point in points),
        "backbone": lambda: isinstance(backbone, dict) and {*BACKBONE} <= {*backbone},
        "backbone.spec": lambda: isinstance(backbone["spec"], str),
        "backbone.arguments": lambda: isinstance(backbone["arguments"], str),
        "backbone.weights": lambda: isinstance(backbone["weights"], str | None),
        "backbone.input_shape": lambda: backbone["input_shape"] is None or _is_shape(backbone["input_shape"]),
        "maps": lambda: isinstance(maps, dict) and {*MAP_SETTINGS, "input_shape"} <= {*maps},
        "maps.input_shape": lambda: _is_shape(maps["input_shape"]),
        "maps.layer": lambda: isinstance(maps["layer"], str) or (_is_list(maps["layer"], str) and bool(maps["layer"])),
        "maps.sketch": lambda: "sketch" not in maps or (_is_list(maps["sketch"], float) and len(maps["sketch"]) == 17),
    }
    return next((entry for entry, is_sound in sound.items() if not is_sound()), None)


def _is_list(values: Any, kind: type) -> bool:
    return isinstance(values, list) and all(type(value) is kind for value in values)


def _is_shape(values: Any) -> bool:
    return _is_list(values, int) and len(values) in (3, 4) and min(values) > 0


def _is_point(point: list[Any], n_columns: int) -> bool:
    return _is_list(point, int) and len(point) in (2, 3) and all(0 <= column < n_columns for column in point)


# Writing.


def describe_head(
    task: str,
    columns: Sequence[str],
    points: Sequence[Sequence[int]],
    *,
    units: str,
    backbone: Backbone,
    maps: FeatureMaps,
) -> dict[str, Any]:
    """What the record must say, so that the head can predict again.

    Args:
        task: "regression" or "classification".
        columns: the names of the targets.
        points: which columns are points.
        units: of the points.
        backbone: the network.
        maps: what made the maps; it was used once.
    """
    return {
        "version": VERSION,
        "task": task,
        "columns": columns,
        "points": points,
        "units": units,
        "backbone": {**backbone.recipe, "hash": backbone.hash_weights()},
        "maps": {
            **{key: getattr(maps, key) for key in MAP_SETTINGS},
            "layer": maps.layer_,
            "shape": maps.map_shape_,
            "input_shape": maps.input_shape_,
            "sketch": maps.sketch_,
        },
    }


def write_head(folder: Path, estimator: Any, record: dict[str, Any]) -> None:
    """Write the estimator, and the record with its hash; in a folder of :func:`new_results`."""
    from tensor_dropout.files import save

    save(estimator, folder / HEAD)
    write_json(folder / RECORD, {**record, "head_hash": hash_file(folder / HEAD)})


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_folder(folder: Path, command: str) -> None:
    """Refuse at once what would only show when results are written.

    Raises:
        TensorDropoutError: if there can be no such folder.
    """
    place = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        what = "may not be written to" if place.is_dir() else "is a file"
        raise TensorDropoutError(f"{command}: --out is a folder, and {place} {what}; name another")


def describe_old_fit(folder: Path) -> str:
    """The fit that is in a folder already, in a few words; "" if there is none."""
    try:
        images = json.loads((folder / RECORD).read_text(encoding="utf-8"))["images"]
    except OSError:
        return ""
    except (ValueError, KeyError, TypeError):
        return "a damaged fit"
    return f"the fit of {images} images"


@contextmanager
def new_results(folder: Path, last: str, stale: Sequence[str] = ()) -> Iterator[Path]:
    """A hidden folder to write results to; they move into ``folder`` when the block ends without an error.

    Args:
        folder: where they go.
        last: the file that moves last: what refers to the others.
        stale: files of earlier results that go if there is no new one of that name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".new-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for name in stale if (folder / last).exists() else ():
            (folder / name).unlink(missing_ok=True)
        for path in sorted(staging.iterdir(), key=lambda path: path.name == last):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
