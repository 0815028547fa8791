"""The folder that ``tensor-dropout fit`` leaves: a head, and all that is needed to predict with it again.

``head.safetensors`` is the estimator (``td.save``). ``fit.json`` says which network and layer its features come from,
how images are prepared, and what its outputs are; it names the head's hash, so that two fits never mix.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    import torch

    from tensor_dropout.sklearn import FeatureMaps

HEAD, RECORD = "head.safetensors", "fit.json"
VERSION = 1
KEYS = ("task", "columns", "points", "units", "backbone", "maps")
"""What a record needs beside its version and the head's hash."""
MAP_SETTINGS = ("layer", "size", "mean", "std", "pool", "grid", "channel_axis")
"""The settings of ``FeatureMaps`` that are kept."""


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
        return FeatureMaps(opened.network, device=device, **settings)


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def scale_points(values: np.ndarray, points: Sequence[Sequence[int]], sizes: np.ndarray | None) -> np.ndarray:
    """Columns (n, k) whose points are fractions, with points in pixels; also of standard deviations."""
    scaled = values.copy()
    for point in points if sizes is not None else ():
        scaled[:, point] *= sizes
    return scaled


def find_fitted(path: Path) -> Path | None:
    """The folder of a fit that a path names: the folder, or a file in it; None if it is something else."""
    folder = path if path.is_dir() else path.parent
    return folder if path.exists() and (folder / RECORD).is_file() else None


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
    return FittedHead(folder, load(folder / HEAD), record)


def hash_file(path: Path) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


@contextmanager
def new_results(folder: Path, last: str) -> Iterator[Path]:
    """A hidden folder to write results to; they move into ``folder`` when the block ends without an error.

    Args:
        folder: where they go.
        last: the file that moves last: what refers to the others.
    """
    folder.mkdir(parents=True, exist_ok=True)
    staging = folder / f".new-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for path in sorted(staging.iterdir(), key=lambda path: path.name == last):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
