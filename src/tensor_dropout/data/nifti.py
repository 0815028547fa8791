"""A folder of NIfTI volumes and a table of targets: brain age, or any other number per person.

Flat (``ROOT/sub-01_T1w.nii.gz``) or BIDS (``ROOT/sub-01/ses-1/anat/sub-01_ses-1_T1w.nii.gz``). Axes are reordered to
RAS (left to right, back to front, bottom to top); nothing is rotated. The prepared volumes are kept in one ``.npy``
file, so that the second start is fast.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.data.augment import augment_volumes
from tensor_dropout.data.base import (
    Data,
    Split,
    StandardizeImages,
    StreamSplit,
    TensorSplit,
    bin_targets,
    check_size,
    choose,
    deal_folds,
    hold_out,
    import_extra,
)
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.writing import one_at_a_time, replacing

LAYOUT = (
    "Expected: ROOT/participants.tsv (columns participant_id and the target) with ROOT/sub-01_T1w.nii.gz, ... "
    "or ROOT/sub-01/anat/sub-01_T1w.nii.gz, ...; set table, subject, target and images if yours differ"
)
_CACHE_VERSION = 1
_READERS = min(8, os.cpu_count() or 1)
_NO_VALUE = ("", "n/a", "na", "nan", "none", "null")

Box = tuple[tuple[int, int], ...]
"""First and one past the last voxel along each axis."""


@dataclass(frozen=True)
class Recipe:
    """How a file becomes a stored volume; a cached volume is reused only if all of it is equal."""

    resample: float | None
    crop: str | None
    size: tuple[int, int, int] | None
    dtype: str


@dataclass(frozen=True)
class Image:
    """A file, whose it is, and its targets."""

    path: Path
    name: str
    subject: str
    targets: tuple[float, ...]


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
    float16 of mean 0 and variance 1. Splits are by subject: sessions and runs of one person stay together.

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
        folds: number of folds for cross-validation; None splits by the fractions.
        fold: which fold is tested, 0 to folds - 1.
        test: fraction (or number) of the subjects to test on; not used with folds.
        validation: fraction (or number) of the subjects that are not tested, held out for choosing.
        augment: flip left and right and shift by at most two voxels, in training; "strong" flips, turns by at most 10
            degrees about every axis, zooms by 10 %, moves by 5 % and bends the contrast: for small sets.
        memory: the most gigabytes of volumes to hold in memory; larger sets stream from the cache.
        cache: folder for the prepared volumes; by default ROOT/.cache, or the user's cache folder if that is read-only.
        provenance: one sentence with source and licence, shown with every result.

    Returns:
        Volumes (n, 1, *size) and targets (n,) or (n, T) float32.

    Raises:
        TensorDropoutError: if files, rows or targets are missing or damaged, or volumes differ in shape.
    """
    import_extra("nibabel", "nifti", "nifti")
    choose("nifti", "missing", missing, ("error", "skip"))
    choose("nifti", "crop", crop, ("brain", "common", None))
    changes = augment_volumes("nifti", augment, pixels=2)
    base = find_root(root)
    columns = [target] if isinstance(target, str) else list(target)
    found = match_images(base, read_table(base, table, subject, columns), images, missing)
    headers = [read_header(image.path) for image in found]
    dtype = "uint8" if all(header.is_uint8 for header in headers) else "float16"
    recipe = Recipe(_check_resample(resample), crop, _check_size(size), dtype)
    path = prepare_cache(base, found, headers, recipe, cache)
    parts = split_subjects(found, folds=folds, fold=fold, test=test, validation=validation, seed=seed)
    shape = np.load(path, mmap_mode="r").shape
    gigabytes = path.stat().st_size / 1e9
    train, validated, tests = (build_split(path, found, rows, in_memory=gigabytes <= memory) for rows in parts)
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
        provenance=provenance or describe_source(base, found),
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


def describe_source(root: Path, images: list[Image]) -> str:
    """One sentence; name and licence are read from BIDS' ``dataset_description.json`` where there is one."""
    name, licence = root.resolve().name, "licence as stated by its owner"
    description = root / "dataset_description.json"
    if description.is_file():
        try:
            stated = json.loads(description.read_text(encoding="utf-8"))
            name, licence = str(stated.get("Name", name)), str(stated.get("License", licence))
        except (ValueError, AttributeError, OSError):
            warnings.warn(f"nifti: {description} is no readable JSON object; not used", stacklevel=2)
    people = len({image.subject for image in images})
    return f"{name}: {len(images)} NIfTI volumes of {people} people; {licence}."


# The table.

Row = tuple[str, str]
"""Subject and session; the session is empty if the table has no column for it."""


def find_root(root: str | Path | None) -> Path:
    """The folder, if it is one.

    Raises:
        TensorDropoutError: if it is not, with the layout that is expected.
    """
    if root is None:
        raise TensorDropoutError(f"nifti: no folder given; set root. {LAYOUT}")
    base = Path(root).expanduser()
    if not base.is_dir():
        raise TensorDropoutError(f"nifti: there is no folder {base}. {LAYOUT}")
    return base


def find_table(root: Path, table: str | Path | None) -> Path:
    """The given table, or ROOT/participants.tsv, or the only table in ROOT.

    Raises:
        TensorDropoutError: if there is none, or more than one.
    """
    if table is not None:
        given = Path(table).expanduser()
        for path in (given, root / given):
            if path.is_file():
                return path
        raise TensorDropoutError(f"nifti: there is no table {given}, nor {root / given}")
    if (root / "participants.tsv").is_file():
        return root / "participants.tsv"
    tables = sorted(path for path in root.iterdir() if path.suffix in (".tsv", ".csv"))
    if len(tables) != 1:
        raise TensorDropoutError(f"nifti: {root} has {len(tables) or 'no'} tables; set table. {LAYOUT}")
    return tables[0]


def read_table(
    root: Path, table: str | Path | None, subject: str, targets: list[str]
) -> dict[Row, tuple[float, ...] | None]:
    """The targets of every row: (subject, session) -> numbers, or None where one is missing.

    Raises:
        TensorDropoutError: if a column is missing, a row is there twice, or a target is not a number.
    """
    path = find_table(root, table)
    with path.open(encoding="utf-8-sig", newline="") as stream:
        lines = csv.DictReader(stream, delimiter="\t" if path.suffix == ".tsv" else ",")
        columns = list(lines.fieldnames or [])
        for column in (subject, *targets):
            if column not in columns:
                raise TensorDropoutError(
                    f"nifti: {path} has no {column!r} column, only {', '.join(columns)}; set target or subject"
                )
        rows: dict[Row, tuple[float, ...] | None] = {}
        for line in lines:
            key = _strip("sub-", line[subject]), _strip("ses-", line.get("session_id"))
            if key in rows:
                raise TensorDropoutError(f"nifti: {path} has two rows of subject {key[0]!r} {key[1]}; keep one")
            values = [_read_number(line[column], column, key[0], path) for column in targets]
            rows[key] = None if None in values else tuple(value for value in values if value is not None)
    return rows


def _strip(prefix: str, text: str | None) -> str:
    return (text or "").strip().removeprefix(prefix)


def _read_number(text: str | None, column: str, subject: str, path: Path) -> float | None:
    text = (text or "").strip()
    if text.lower() in _NO_VALUE:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.inf
    if not math.isfinite(value):
        raise TensorDropoutError(
            f"nifti: {path}: {column} of subject {subject!r} is {text!r}, not a number, and only numbers can be "
            "predicted; correct it, name another column, or write n/a there and set missing='skip'"
        )
    return value


# Files and rows.


def list_files(root: Path, pattern: str) -> list[Path]:
    """The NIfTI files that match, as :func:`find_files` finds them.

    Raises:
        TensorDropoutError: if there are none, or of several kinds.
    """
    files = find_files(root, pattern)
    if not files:
        raise TensorDropoutError(f"nifti: {root} has no file that matches {pattern!r}. {LAYOUT}")
    kinds = list_kinds(files)
    if len(kinds) > 1:
        raise TensorDropoutError(
            f"nifti: {root} has several kinds of image ({', '.join(kinds[:5])}); choose one, e.g. "
            f"images='**/*_{kinds[0]}.nii*'"
        )
    return files


def find_files(root: Path, pattern: str) -> list[Path]:
    """The NIfTI files that match, without hidden folders, and without ``derivatives`` unless the pattern names it."""
    files = []
    for path in sorted(root.glob(pattern)):
        parts = path.relative_to(root).parts
        hidden = any(part.startswith(".") for part in parts) or (
            "derivatives" in parts and "derivatives" not in pattern
        )
        if path.name.endswith((".nii", ".nii.gz")) and path.is_file() and not hidden:
            files.append(path)
    return files


def list_kinds(files: Sequence[Path]) -> list[str]:
    """What BIDS names say the images are: "T1w", "T2w", ..."""
    return sorted(
        {_stem(path).rpartition("_")[2] for path in files if path.name.startswith("sub-") and "_" in path.name}
    )


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".nii")


def match_images(root: Path, rows: dict[Row, tuple[float, ...] | None], pattern: str, missing: str) -> list[Image]:
    """Every image with its subject and targets.

    Raises:
        TensorDropoutError: if an image has no row, a row has no image or a subject has no target, unless skipped.
    """
    images, strangers, valueless, seen = [], [], [], set()
    for path in list_files(root, pattern):
        row = find_row(path.relative_to(root), rows)
        if row is None:
            strangers.append(path.relative_to(root).as_posix())
            continue
        seen.add(row)
        targets = rows[row]
        if targets is None:
            valueless.append(" ".join(row).strip())
        else:
            name = path.relative_to(root).with_name(_stem(path)).as_posix()
            images.append(Image(path, name, row[0], targets))
    alone = [" ".join(row).strip() for row in rows if row not in seen and rows[row] is not None]
    if missing == "error":
        _refuse("images without a row in the table", strangers)
        _refuse("subjects without an image", alone)
        _refuse("subjects without a target", valueless)
    if not images:
        raise TensorDropoutError(f"nifti: no image in {root} has a row with a target in the table. {LAYOUT}")
    return images


def find_row(path: Path, rows: dict[Row, Any]) -> Row | None:
    """The row that a file belongs to: by its name, the first part of its name, or the folders that it is in.

    Example:
        >>> find_row(Path("sub-07/ses-2/anat/sub-07_ses-2_T1w.nii.gz"), {("07", "1"): 60.0, ("07", "2"): 61.0})
        ('07', '2')
    """
    words = [_stem(path), *_stem(path).split("_"), *path.parts[:-1]]
    sessions = [_strip("ses-", word) for word in words if word.startswith("ses-")]
    for word in words:
        for session in (*sessions[:1], ""):
            row = (_strip("sub-", word), session)
            if row in rows:
                return row
    return None


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise TensorDropoutError(
            f"nifti: {len(names)} {what}: {', '.join(names[:5])}{more}; complete the folder or the table, or set "
            "missing='skip'"
        )


# Volumes.


@dataclass(frozen=True)
class Header:
    """What is known of a volume before it is read: shape and voxel edges in mm, in RAS order, and how it is stored."""

    shape: tuple[int, ...]
    voxel: tuple[float, ...]
    is_uint8: bool


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        TensorDropoutError: if it cannot be read, or is not one three-dimensional volume.
    """
    import nibabel

    image = _open_image(path)
    order = nibabel.io_orientation(image.affine)[:, 0].astype(int).argsort()  # RAS axis -> stored axis
    zooms = image.header.get_zooms()
    is_uint8 = image.get_data_dtype() == np.uint8 and (image.dataobj.slope, image.dataobj.inter) == (1, 0)
    return Header(tuple(image.shape[i] for i in order), tuple(float(zooms[i]) for i in order), is_uint8)


def _open_image(path: Path) -> Any:
    import nibabel

    try:
        image: Any = nibabel.load(path)
    except Exception as error:  # a damaged file can raise anything
        raise TensorDropoutError(f"nifti: {path} cannot be read ({error}); replace it") from error
    if len(image.shape) != 3 and not (len(image.shape) == 4 and image.shape[3] == 1):
        raise TensorDropoutError(f"nifti: {path} has shape {image.shape}; one three-dimensional volume is expected")
    return image


def read_volume(path: Path, resample: float | None) -> np.ndarray:
    """The volume in RAS order, (X, Y, Z) float32, resampled if asked.

    Raises:
        TensorDropoutError: if it cannot be read, or has values that are no numbers.
    """
    import nibabel

    image = _open_image(path)
    try:
        values = np.asarray(nibabel.as_closest_canonical(image).dataobj, dtype=np.float32)
    except Exception as error:
        raise TensorDropoutError(f"nifti: {path} cannot be read ({error}); replace it") from error
    values = values.reshape(values.shape[:3])
    bad = values.size - int(np.isfinite(values).sum())
    if bad:
        raise TensorDropoutError(
            f"nifti: {path} has {bad} voxels that are NaN or infinite; repair or remove it (a mask often leaves them: "
            "write 0 outside)"
        )
    if values.min() == values.max():
        raise TensorDropoutError(f"nifti: {path} has the same value in all voxels; repair or remove it")
    return values if resample is None else resample_volume(values, read_header(path).voxel, resample)


def resample_shape(shape: Sequence[int], voxel: Sequence[float], edge: float) -> tuple[int, ...]:
    """How many cubic voxels cover the same field of view."""
    return tuple(max(1, round(cells * step / edge)) for cells, step in zip(shape, voxel, strict=True))


def resample_volume(values: np.ndarray, voxel: Sequence[float], edge: float) -> np.ndarray:
    """The volume on cubic voxels, axis by axis: averages where it shrinks, linear interpolation where it grows.

    Example:
        >>> resample_volume(np.arange(8, dtype=np.float32).reshape(8, 1, 1), (1, 2, 2), 2.0).ravel()
        array([0.5, 2.5, 4.5, 6.5], dtype=float32)
    """
    volume = torch.from_numpy(np.ascontiguousarray(values))[None, None]
    for axis, cells in enumerate(resample_shape(values.shape, voxel, edge)):
        size = list(volume.shape[2:])
        if cells != size[axis]:
            mode = "area" if cells < size[axis] else "trilinear"
            size[axis] = cells
            volume = F.interpolate(volume, size=size, mode=mode)
    return volume[0, 0].numpy()


def find_box(values: np.ndarray) -> Box:
    """The smallest box around all voxels that are not 0.

    Example:
        >>> volume = np.zeros((4, 4, 4))
        >>> volume[1, 2:4, 3] = 1
        >>> find_box(volume)
        ((1, 2), (2, 4), (3, 4))
    """
    spans = []
    for axis in range(3):
        others = tuple(i for i in range(3) if i != axis)
        rows = np.flatnonzero((values != 0).any(axis=others))
        spans.append((int(rows[0]), int(rows[-1]) + 1))
    return tuple(spans)


def fit_size(values: np.ndarray, size: Sequence[int]) -> np.ndarray:
    """The volume padded with its smallest value, or cut, evenly on both sides of each axis.

    Example:
        >>> fit_size(np.array([[[1, 2, 3]]]), (1, 1, 5)).ravel(), fit_size(np.array([[[1, 2, 3]]]), (1, 1, 1)).ravel()
        (array([1, 1, 2, 3, 1]), array([2]))
    """
    background = values.min()
    for axis, cells in enumerate(size):
        extra = cells - values.shape[axis]
        if extra < 0:
            start = -extra // 2
            values = np.take(values, range(start, start + cells), axis=axis)
    margins = [
        ((cells - own) // 2, cells - own - (cells - own) // 2) for cells, own in zip(size, values.shape, strict=True)
    ]
    return np.pad(values, margins, constant_values=background)


def read_input(path: Path, input_shape: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """One scan as a network that was trained on such a folder takes it.

    Args:
        path: a NIfTI file.
        input_shape: (1, *size) of the network.
        options: those that the network's data was loaded with.

    Returns:
        (1, *size), of mean 0 and variance 1.

    Raises:
        TensorDropoutError: if it cannot be read, or its shape does not fit and nothing says how to make it fit.
    """
    import_extra("nibabel", "nifti", "nifti")
    crop = options.get("crop")
    if crop == "common":
        raise TensorDropoutError(
            'nifti: the network was trained with crop="common", a box of its whole folder that one scan does not know; '
            'train with crop="brain" or size to predict from files'
        )
    values = _cut(read_volume(path, options.get("resample")), crop, None)
    if crop is None and options.get("size") is None and values.shape != input_shape[1:]:
        raise TensorDropoutError(
            f"nifti: {path} has {values.shape} voxels, the network takes {input_shape[1:]}; resample it"
        )
    volume = torch.from_numpy(np.ascontiguousarray(fit_size(values, input_shape[1:])))
    return StandardizeImages()(volume[None, None].float())[0]


# The cache of prepared volumes.


def prepare_cache(
    root: Path, images: list[Image], headers: list[Header], recipe: Recipe, cache: str | Path | None
) -> Path:
    """The path of the prepared volumes (n, *size), made if it is not there with the same files and settings.

    Raises:
        TensorDropoutError: if a volume is damaged, or they differ in shape and no crop or size is set.
    """
    path = choose_cache(root, cache) / f"nifti-{fingerprint(root, images, recipe)}.npy"
    if _is_whole(path, len(images), recipe.dtype):
        return path
    with one_at_a_time(
        path
    ):  # the processes of one training, or trainings of several folds: one prepares, the others wait
        if not _is_whole(path, len(images), recipe.dtype):
            _write_cache(path, images, headers, recipe)
    return path


def _write_cache(path: Path, images: list[Image], headers: list[Header], recipe: Recipe) -> None:
    size, common = survey_volumes(images, headers, recipe)
    with replacing(path) as temporary:
        store = np.lib.format.open_memmap(
            temporary, mode="w+", dtype=np.dtype(recipe.dtype), shape=(len(images), *size)
        )
        for row, volume in enumerate(_read_all(images, recipe.resample)):
            store[row] = _encode(fit_size(_cut(volume, recipe.crop, common), size), recipe.dtype)
        store.flush()
        del store


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
    boxes = [find_box(volume) for volume in _read_all(images, recipe.resample)]
    spans = list(zip(*boxes, strict=True))  # per axis: (first, last) of every volume
    if recipe.crop == "brain":
        return tuple(max(last - first for first, last in axis) for axis in spans), None
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


def _read_all(images: list[Image], resample: float | None) -> Iterator[np.ndarray]:
    """The volumes in order, some read ahead in threads."""
    left = iter(images)
    with ThreadPoolExecutor(_READERS) as pool:
        while batch := list(islice(left, 4 * _READERS)):
            yield from pool.map(lambda image: read_volume(image.path, resample), batch)


def _cut(values: np.ndarray, crop: str | None, common: Box | None) -> np.ndarray:
    box = common if crop == "common" else find_box(values) if crop == "brain" else None
    return values if box is None else values[tuple(slice(*span) for span in box)]


def _encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """uint8 as it is (rounded after resampling); float16 of mean 0 and variance 1, which ``prepare`` gives anyway."""
    if dtype == "uint8":
        return values.round().clip(0, 255).astype(np.uint8)
    values = values.astype(np.float64)
    standard = (values - values.mean()) / max(float(values.std()), 1e-12)
    return standard.clip(-60000, 60000).astype(np.float16)


# Splits.


def split_subjects(
    images: list[Image], *, folds: int | None, fold: int, test: float, validation: float, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows to train on, validate on and test on; all images of one subject fall into the same part.

    Subjects are dealt out evenly over the quantiles of their (first) target.

    Raises:
        TensorDropoutError: if the numbers do not fit.
    """
    subjects = sorted({image.subject for image in images})
    number = {subject: i for i, subject in enumerate(subjects)}
    owner = torch.tensor([number[image.subject] for image in images])
    values = torch.tensor([image.targets[0] for image in images], dtype=torch.float64)
    means = torch.zeros(len(subjects), dtype=torch.float64).index_add(0, owner, values) / owner.bincount()
    if folds is None:
        rest, tested = hold_out(bin_targets(means), test, seed, "nifti: test")
    else:
        _check_folds(folds, fold, len(subjects))
        dealt = deal_folds(bin_targets(means, max(1, len(subjects) // folds)), folds, seed)
        rest, tested = (dealt != fold).nonzero().flatten(), (dealt == fold).nonzero().flatten()
    kept, held = hold_out(bin_targets(means[rest]), validation, seed, "nifti: validation")
    train, validated, tests = (torch.isin(owner, part).nonzero().flatten() for part in (rest[kept], rest[held], tested))
    return train, validated, tests


def _check_folds(folds: Any, fold: Any, subjects: int) -> None:
    if not isinstance(folds, int) or not 2 <= folds <= subjects:
        raise TensorDropoutError(f"nifti: folds must be 2 to {subjects}, the number of subjects, not {folds!r}")
    if not isinstance(fold, int) or not 0 <= fold < folds:
        raise TensorDropoutError(f"nifti: fold must be 0 to {folds - 1}, not {fold!r}")


def build_split(path: Path, images: list[Image], rows: Tensor, *, in_memory: bool) -> Split | None:
    """The rows of the prepared volumes as a split; None if there are none."""
    if not len(rows):
        return None
    own = [images[i] for i in rows.tolist()]
    targets = torch.tensor([image.targets for image in own], dtype=torch.float32)
    targets = targets[:, 0] if targets.shape[1] == 1 else targets
    names = [image.name for image in own]
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

    def read(self, index: int) -> Tensor:
        """(1, *size) as stored."""
        if self._store is None:
            self._store = np.load(self.path, mmap_mode="r")
        return torch.from_numpy(np.array(self._store[self.rows[index]])).unsqueeze(0)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}
