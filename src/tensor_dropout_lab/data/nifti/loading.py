"""The loader: from a folder of scans and a table to the parts of a data set."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.augment import augment_volumes
from tensor_dropout_lab.data.base import (
    Data,
    Split,
    StandardizeImages,
    StreamSplit,
    TensorSplit,
    check_size,
    choose,
    split_groups,
)
from tensor_dropout_lab.data.nifti.cache import Recipe, mark_used, prepare_cache
from tensor_dropout_lab.data.nifti.scans import Image, describe_source, find_root, match_images, read_table
from tensor_dropout_lab.data.nifti.volumes import Header, format_voxel, is_near, read_header, typical_voxel
from tensor_dropout_lab.extras import import_extra


def load_nifti(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    target: str | Sequence[str] = "age",
    table: str | Path | None = None,
    subject: str = "participant_id",
    images: str = "**/*.nii*",
    missing: Literal["error", "skip"] = "error",
    resample: float | None = None,
    crop: Literal["brain", "common"] | None = None,
    size: Sequence[int] | None = None,
    folds: int | None = None,
    fold: int = 0,
    test: float = 0.2,
    validation: float = 0.25,
    augment: bool | Literal["strong"] = True,
    memory: float = 2.0,
    cache: str | Path | None = None,
    provenance: str | None = None,
) -> Data:
    """Volumes with one or more numbers to predict; ``prepare`` gives each volume mean 0 and variance 1.

    Mean and variance are over all voxels, background included. Volumes are stored as uint8 if all files are, else as
    float16 of mean 0 and variance 1. Splits are by subject: sessions and runs of one person stay together. Whose a
    file is says the word with "sub-" in its name or folders; without one, its first word, or a folder.

    Args:
        root: the folder with the volumes.
        seed: of the split.
        target: column of the table, or several.
        table: a .tsv or .csv file; by default ROOT/participants.tsv, or the only table in ROOT.
        subject: column of the table that names the subject; a column session_id is used too if there is one.
        images: which files, as a pattern below ROOT, e.g. "**/*_T1w.nii.gz".
        missing: "skip" leaves out rows without image, images without row and rows without target; "error" stops.
        resample: edge of a cubic voxel in mm; None keeps the voxels.
        crop: "brain" cuts each volume to its non-zero box and centres it; "common" cuts all to one box, which
            keeps volumes aligned that were registered to a template; None keeps all.
        size: voxels per axis, by padding or cutting around the centre; None takes the largest volume after a crop.
            Brains that it cuts are warned of when the volumes are prepared.
        folds: number of folds for cross-validation; None splits by the fractions.
        fold: which fold is tested, 0 to folds - 1.
        test: fraction (or number) of the subjects to test on; not used with folds.
        validation: fraction (or number) of the subjects that are not tested, held out for choosing.
        augment: flip left and right and shift by at most two voxels, in training; "strong" flips, turns by at most 10
            degrees about every axis, zooms by 10 %, moves by 5 % and bends the contrast; it blurs.
        memory: the most gigabytes of volumes to hold in memory; larger sets stream from the cache.
        cache: folder for the prepared volumes; by default ROOT/.cache, or the user's cache folder if that is read-only.
            Those that were not used for 30 days are deleted there when others are prepared.
        provenance: one sentence with source and licence, shown with every result.

    Returns:
        Volumes (n, 1, *size) and targets (n,) or (n, T) float32.

    Raises:
        TensorDropoutError: if files, rows or targets are missing or damaged, a file states two voxel sizes, or
            volumes differ in shape, or in their voxels by more than 10 % and are not resampled.
    """
    import_extra("nibabel", "nifti")
    choose("nifti", "missing", missing, ("error", "skip"))
    choose("nifti", "crop", crop, ("brain", "common", None))
    changes = augment_volumes("nifti", augment, pixels=2)
    base = find_root(root)
    columns = [target] if isinstance(target, str) else list(target)
    if len(set(columns)) < len(columns):
        raise TensorDropoutError(f"nifti: the targets are {', '.join(columns)}; name each column once")
    scans = match_images(base, read_table(base, table, subject, columns), images, missing)
    headers = [read_header(image.path) for image in scans]
    dtype = "uint8" if all(header.is_uint8 for header in headers) else "float16"
    recipe = Recipe(_check_resample(resample), crop, _check_size(size), dtype)
    voxel = _agree_on_voxel(scans, headers) if recipe.resample is None else None
    path = prepare_cache(base, scans, headers, recipe, cache)
    parts = split_subjects(scans, folds=folds, fold=fold, test=test, validation=validation, seed=seed)
    shape = np.load(path, mmap_mode="r").shape
    gigabytes = path.stat().st_size / 1e9
    train, validated, tests = (build_split(path, scans, rows, in_memory=gigabytes <= memory) for rows in parts)
    assert train is not None
    return Data(
        name="nifti",
        task="regression",
        train=train,
        validation=validated,
        test=tests,
        input_shape=(1, *shape[1:]),
        outputs=len(columns),
        classes=None,
        target=", ".join(columns),
        prepare=StandardizeImages(),
        augment=changes,
        simulated=False,
        provenance=provenance or describe_source(base, scans),
        voxel=voxel,
        bounds=(0.0, 255.0) if recipe.dtype == "uint8" else None,
    )


def _check_resample(resample: Any) -> float | None:
    number = isinstance(resample, int | float) and not isinstance(resample, bool)
    if resample is not None and not (number and 0 < resample < math.inf):
        raise TensorDropoutError(f"nifti: resample is the edge of a voxel in mm, above 0, or None; not {resample!r}")
    return None if resample is None else float(resample)


def _check_size(size: Any) -> tuple[int, int, int] | None:
    if size is None:
        return None
    x, y, z = check_size("nifti", size, axes=3)
    return x, y, z


def _agree_on_voxel(images: list[Image], headers: list[Header]) -> tuple[float, ...]:
    expected = typical_voxel(headers)
    for image, header in zip(images, headers, strict=True):
        if not is_near(header.voxel, expected):
            raise TensorDropoutError(
                f"nifti: {image.path} has voxels of {format_voxel(header.voxel)}, other scans of the folder have "
                f"{format_voxel(expected)}; set resample to one edge for all, in mm, or leave that scan out"
            )
    return expected


# Splits.


def split_subjects(
    images: list[Image], *, folds: int | None, fold: int, test: float, validation: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows to train on, validate on and test on; all images of one subject fall into the same part.

    Subjects are dealt out evenly over the quantiles of their (first) target.

    Raises:
        TensorDropoutError: if the numbers do not fit.
    """
    return split_groups(
        [image.subject for image in images],
        torch.tensor([image.targets[0] for image in images], dtype=torch.float64),
        folds=folds,
        fold=fold,
        test=test,
        validation=validation,
        seed=seed,
        what="nifti",
        noun="subjects",
    )


def build_split(path: Path, images: list[Image], rows: Tensor, *, in_memory: bool) -> Split | None:
    """The rows of the prepared volumes as a split; None if there are none."""
    if not len(rows):
        return None
    chosen = [images[i] for i in rows.tolist()]
    targets = torch.tensor([image.targets for image in chosen], dtype=torch.float32)
    targets = targets[:, 0] if targets.shape[1] == 1 else targets
    names = [image.name for image in chosen]
    if in_memory:
        volumes = np.load(path, mmap_mode="r")[rows.numpy()]
        return TensorSplit(torch.from_numpy(volumes).unsqueeze(1), targets, names)
    return VolumeStream(path, rows, names, targets)


class VolumeStream(StreamSplit):
    """Volumes that are read from the memory-mapped cache when they are asked for.

    Args:
        path: the ``.npy`` file (n, *size).
        rows: (m,) which of its volumes.
        names: one for each of them.
        targets: one for each of them.
    """

    def __init__(self, path: Path, rows: Tensor, names: list[str], targets: Tensor) -> None:
        super().__init__(names, targets)
        self.path, self.rows = path, rows.tolist()
        self._store: np.ndarray | None = None

    def set_epoch(self, epoch: int, seed: int) -> None:
        """As of any stream; the file counts as used in every epoch."""
        super().set_epoch(epoch, seed)
        mark_used(self.path)

    def read(self, index: int) -> Tensor:
        """(1, *size) as stored."""
        if self._store is None:
            self._store = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(np.array(self._store[self.rows[index]])).unsqueeze(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}
