"""The cache of prepared volumes: one ``.npy`` file for every choice of scans and settings."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.nifti.scans import Image
from tensor_dropout_lab.data.nifti.volumes import (
    Box,
    Header,
    cover_box,
    cut_volume,
    encode,
    find_box,
    fit_size,
    read_volume,
    resample_shape,
)
from tensor_dropout_lab.locks import lock_file, name_lock

_CACHE_VERSION = 2
_KEPT = 30 * 24 * 3600
"""Seconds that prepared volumes are kept after they were last used."""
_READERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Recipe:
    """How a file becomes a stored volume; a cached volume is reused only if all of it is equal."""

    resample: float | None
    crop: str | None
    size: tuple[int, int, int] | None
    dtype: str


def prepare_cache(
    root: Path, images: list[Image], headers: list[Header], recipe: Recipe, cache: str | Path | None
) -> Path:
    """The path of the prepared volumes (n, *size), made if it is not there with the same files and settings.

    Raises:
        TensorDropoutError: if a volume is damaged, or they differ in shape and no crop or size is set.
    """
    path = choose_cache(root, cache) / f"nifti-{fingerprint(root, images, recipe)}.npy"
    mark_used(path)
    if _is_whole(path, len(images), recipe.dtype):
        return path
    with lock_file(path):  # the processes of one training, or several trainings: one prepares, the others wait
        if not _is_whole(path, len(images), recipe.dtype):
            for leftover in path.parent.glob(f".{path.stem}.*{path.suffix}"):  # of a process that was killed
                leftover.unlink(missing_ok=True)
            _write_cache(path, images, headers, recipe)
            _remove_unused(path.parent)
    return path


def mark_used(path: Path) -> None:
    """Note by the file's time that it is used now: so it stays."""
    with suppress(OSError):  # not there yet, or another user's
        os.utime(path)


def _remove_unused(folder: Path) -> None:
    """Delete the prepared volumes in a folder that were not used for 30 days, and their locks."""
    for path in folder.glob(f"nifti-{20 * '[0-9a-f]'}.npy"):
        with suppress(OSError):  # another process was faster, or it is another user's
            if time.time() - path.stat().st_mtime > _KEPT:
                path.unlink()
                name_lock(path).unlink(missing_ok=True)


def _write_cache(path: Path, images: list[Image], headers: list[Header], recipe: Recipe) -> None:
    size, common = survey_volumes(images, headers, recipe)
    with replacing(path) as temporary:
        store = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=np.dtype(recipe.dtype), shape=(len(images), *size)
        )
        extents = []
        for row, (volume, extent) in enumerate(_read_all(images, recipe.resample, recipe.crop, size)):
            cropped = volume if common is None else cut_volume(volume, common)
            store[row] = encode(fit_size(cropped, size), recipe.dtype)
            extents.append(extent)
        store.flush()
        del store
    if recipe.crop == "brain":
        _warn_of_cuts(images, extents, size)


def _warn_of_cuts(images: list[Image], extents: list[tuple[int, ...]], size: tuple[int, ...]) -> None:
    """Say how many brains the size cuts, the worst of them, and which size would cut none."""
    lost = [sum(max(0, needed - cells) for needed, cells in zip(extent, size, strict=True)) for extent in extents]
    if not any(lost):
        return
    worst = lost.index(max(lost))
    whole = tuple(map(max, zip(size, *extents, strict=True)))
    warnings.warn(
        f"nifti: size {size} cuts {sum(map(bool, lost))} of {len(images)} brains, {images[worst].name} of "
        f"{extents[worst]} voxels most; size {whole} would cut none (a brain is all that is not 0)",
        stacklevel=2,
    )


def choose_cache(root: Path, cache: str | Path | None) -> Path:
    """The folder to keep prepared volumes in: the given one, ROOT/.cache, or the user's cache folder.

    Raises:
        TensorDropoutError: if none can be written to.
    """
    tried = [Path(cache).expanduser()] if cache is not None else [root / ".cache", _user_cache() / "tensor-dropout"]
    if cache is None and not root.stat().st_mode & 0o222:  # marked read-only: respected even where root could write
        tried = tried[1:]
    for folder in tried:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe.{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError:
            continue
        return folder
    raise TensorDropoutError(f"nifti: cannot write to {' nor '.join(map(str, tried))}; set cache to a folder that can")


def _user_cache() -> Path:
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def fingerprint(root: Path, images: list[Image], recipe: Recipe) -> str:
    """A name for these files with these settings: any changed size or time of a file gives another."""
    files = [
        (image.path.relative_to(root).as_posix(), image.path.stat().st_size, image.path.stat().st_mtime_ns)
        for image in images
    ]
    content = json.dumps([_CACHE_VERSION, asdict(recipe), files])
    return hashlib.sha256(content.encode()).hexdigest()[:20]


def _is_whole(path: Path, n: int, dtype: str) -> bool:
    try:
        store = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError):
        return False
    return store.ndim == 4 and len(store) == n and store.dtype == np.dtype(dtype)


def survey_volumes(images: list[Image], headers: list[Header], recipe: Recipe) -> tuple[tuple[int, ...], Box | None]:
    """The common size of the stored volumes, and the box that all are cut to first ("common" only).

    Raises:
        TensorDropoutError: if shapes differ and the settings do not make them equal.
    """
    shapes = _list_shapes(images, headers, recipe.resample)
    if recipe.crop != "brain" and (recipe.crop == "common" or recipe.size is None):
        _require_equal(shapes, images)
    if recipe.crop is None:
        return recipe.size or shapes[0], None
    if recipe.crop == "brain" and recipe.size is not None:
        return recipe.size, None
    if recipe.crop == "brain":
        boxes = [find_box(volume) for volume, _ in _read_all(images)]
        sizes = [
            cover_box(box, header.voxel, recipe.resample)
            if recipe.resample
            else tuple(last - first for first, last in box)
            for box, header in zip(boxes, headers, strict=True)
        ]
        return tuple(map(max, zip(*sizes, strict=True))), None
    boxes = [find_box(volume) for volume, _ in _read_all(images, recipe.resample)]
    spans = list(zip(*boxes, strict=True))  # per axis: (first, last) of every volume
    common = tuple((min(first for first, _ in axis), max(last for _, last in axis)) for axis in spans)
    return recipe.size or tuple(last - first for first, last in common), common


def _list_shapes(images: list[Image], headers: list[Header], resample: float | None) -> list[tuple[int, ...]]:
    """The shapes as they will be after resampling; warns if the voxels differ without it."""
    if resample is not None:
        return [resample_shape(header.shape, header.voxel, resample) for header in headers]
    for image, header in zip(images, headers, strict=True):
        if not np.allclose(header.voxel, headers[0].voxel, atol=0.02):
            warnings.warn(
                f"nifti: voxels differ: {headers[0].voxel} mm in {images[0].name}, {header.voxel} mm in {image.name}; "
                "set resample",
                stacklevel=2,
            )
            break
    return [header.shape for header in headers]


def _require_equal(shapes: list[tuple[int, ...]], images: list[Image]) -> None:
    for shape, image in zip(shapes, images, strict=True):
        if shape != shapes[0]:
            raise TensorDropoutError(
                f"nifti: volumes differ in shape: {images[0].path} is {shapes[0]}, {image.path} is {shape}; "
                "set crop='brain' or size=(X, Y, Z), and resample if their voxels differ"
            )


def _read_all(images: list[Image], *settings: Any) -> Iterator[tuple[np.ndarray, tuple[int, ...]]]:
    """The volumes and their extents in order, some read ahead in threads; settings are those of ``read_volume``."""
    remaining = iter(images)
    with ThreadPoolExecutor(_READERS) as pool:
        while batch := list(islice(remaining, 4 * _READERS)):
            yield from pool.map(lambda image: read_volume(image.path, *settings), batch)
