"""Images and a table of their targets: landmarks, boxes, ages and other numbers, or classes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import measure_volume
from tensor_dropout_lab.data.augment_points import MovePoints, mirror_columns, read_pairs
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
from tensor_dropout_lab.data.image_files import ImageFiles
from tensor_dropout_lab.data.imagefolder import build_prepare
from tensor_dropout_lab.data.points_table import Table, find_lone_columns, match_files, read_table
from tensor_dropout_lab.data.table_reader import TableReader as TableReader
from tensor_dropout_lab.data.table_reader import decode_image
from tensor_dropout_lab.extras import import_extra

LAYOUT = (
    "Expected: ROOT/points.csv with the columns file, group (if any) and the targets, and the images in "
    "ROOT/images.tar, ROOT/images or ROOT; set table and images if yours are elsewhere"
)


def load_table(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    target: str | Sequence[str] | None = None,
    table: str | Path | None = None,
    images: str | Path | None = None,
    units: Literal["fractions", "pixels"] = "fractions",
    task: Literal["regression", "classification"] | None = None,
    missing: Literal["error", "skip"] = "error",
    size: int | Sequence[int] | None = None,
    normalize: Literal["channel", "image"] = "channel",
    folds: int | None = None,
    fold: int = 0,
    test: float = 0.2,
    validation: float = 0.25,
    augment: bool = True,
    shift: float = 0.05,
    zoom: float = 0.05,
    rotation: float = 5.0,
    flip: bool = False,
    mirrored: list[list[str]] | Path | None = None,
    memory: float = 2.0,
    simulated: bool = False,
    provenance: str | None = None,
) -> Data:
    """Pictures or NIfTI volumes with what a ``points.csv`` says of them: columns of numbers, or one of class names.

    Two columns whose names differ in x and y, such as x0 and y0, are a point. Points are fractions of width and height.
    All images of a group fall into the same part. Rows of which a target is missing are trained on, without it;
    to validate and to test, only whole rows are taken.

    Args:
        root: the folder with the table and the images.
        seed: of the split.
        target: column of the table, or several; None takes all but file and group.
        table: a .csv file; by default ROOT/points.csv, or the only .csv file in ROOT.
        images: a folder or a tar file; by default ROOT/images.tar, ROOT/images, or ROOT itself.
        units: of the points in the table: "fractions", or "pixels", which are divided by the size of each picture.
        task: "classification" takes a column of numbers for class names; None decides by what is written.
        missing: "skip" leaves out rows without image, images without row and rows without any target; "error" stops.
        size: pixels per side, or (height, width), to which pictures are resized (three numbers for volumes); None
            keeps their size, which must be the same for all.
        normalize: of pictures, "channel" (ImageNet's means and deviations) or "image" (each by its own); volumes are
            normalised by their own.
        folds: number of folds for cross-validation; None splits by the fractions.
        fold: which fold is tested, 0 to folds - 1.
        test: fraction (or number) of the groups to test on; not used with folds.
        validation: fraction (or number) of the groups that are not tested, held out for choosing.
        augment: change images at random in training, points with them, as the next options say.
        shift: the largest shift, as a share of width and height.
        zoom: the largest change of scale.
        rotation: the largest angle in degrees.
        flip: mirror half of the images, left to right.
        mirrored: which columns change places in a mirrored image: pairs such as [["x0", "x16"], ["y0", "y16"]], or
            shorter [["*0", "*16"]]; or a file with a pair in every line.
        memory: the most gigabytes of images to hold in memory; of larger sets every image is decoded when it is needed.
        simulated: whether the images were made up.
        provenance: one sentence with source and licence, shown with every result.

    Returns:
        Pictures (n, 3, height, width) in uint8, or volumes (n, C, *size) in float32, and their targets.

    Raises:
        TensorDropoutError: if the table or an image is damaged, they do not belong together, or sizes differ.
    """
    choose("table", "normalize", normalize, ("channel", "image"))
    base = _find_root(root)
    whole = read_table(_find_table(base, table), task=task, target=target)
    matched, found = match_files(whole, _find_images(base, images), units=units, missing=missing)
    if matched.left_out:
        warnings.warn(f"table: {matched.left_out}", stacklevel=2)
    if found.are_volumes:
        import_extra("nibabel", "table")
    else:
        import_extra("PIL.Image", "table")
    shape = _find_shape(found, size)
    changes = _build_augment(matched, base, len(shape) - 1, shift, zoom, rotation, flip, mirrored) if augment else None
    targets = _list_targets(matched)
    parts = _split(matched, targets, folds=folds, fold=fold, test=test, validation=validation, seed=seed)
    in_memory = math.prod(shape) * len(found) * (4 if found.are_volumes else 1) <= memory * 1e9
    train, validated, tested = (_build_split(found, targets, rows, shape, in_memory) for rows in parts)
    assert train is not None
    regression = matched.task == "regression"
    return Data(
        name="table",
        task=matched.task,
        train=train,
        validation=validated,
        test=tested,
        input_shape=shape,
        outputs=len(matched.columns) if regression else len(matched.classes),
        classes=None if regression else matched.classes,
        target=", ".join(matched.columns) if regression else None,
        prepare=StandardizeImages() if found.are_volumes else build_prepare(normalize),
        augment=changes,
        simulated=simulated,
        provenance=provenance or _describe_source(base, matched, found),
        bounds=None if found.are_volumes else (0.0, 255.0),
        points=matched.points,
        groups=None if matched.groups is None else dict(zip(found.names, matched.groups, strict=True)),
    )


# Where things are.


def _find_root(root: str | Path | None) -> Path:
    if root is None:
        raise TensorDropoutError(f"table: no folder given; set root. {LAYOUT}")
    base = Path(root).expanduser()
    if not base.is_dir():
        raise TensorDropoutError(f"table: there is no folder {base}. {LAYOUT}")
    return base


def _find_table(root: Path, table: str | Path | None) -> Path:
    if table is not None:
        return _find_given(root, "table", table)
    if (root / "points.csv").is_file():
        return root / "points.csv"
    tables = sorted(root.glob("*.csv"))
    if len(tables) != 1:
        raise TensorDropoutError(f"table: {root} has {len(tables) or 'no'} .csv files; set table. {LAYOUT}")
    return tables[0]


def _find_images(root: Path, images: str | Path | None) -> Path:
    if images is not None:
        return _find_given(root, "images", images)
    return next((path for path in (root / "images.tar", root / "images") if path.exists()), root)


def _find_given(root: Path, option: str, given: str | Path) -> Path:
    path = Path(given).expanduser()
    for place in (root / path, path):
        if place.exists():
            return place
    raise TensorDropoutError(f"table: {option} is {path}, and neither {root / path} nor {path} is there")


def _describe_source(root: Path, table: Table, images: ImageFiles) -> str:
    kind = "NIfTI volumes" if images.are_volumes else "pictures"
    groups = "" if table.groups is None else f" of {len(set(table.groups))} groups"
    return f"{root.resolve().name}: {len(table)} {kind}{groups}; source and licence are those of its owner."


# Targets.


def _list_targets(table: Table) -> Tensor:
    """(n,) int64 classes; (n,) or (n, T) float32, NaN where missing."""
    if table.labels is not None:
        if len(table.classes) < 2:
            raise TensorDropoutError(
                f"{table.path}: all rows are of the class {table.classes[0]!r}; there must be at least two classes"
            )
        number = {name: i for i, name in enumerate(table.classes)}
        return torch.tensor([number[label] for label in table.labels])
    values = torch.from_numpy(table.values).float()
    _require_values(table, values)
    return values[:, 0] if values.shape[1] == 1 else values


def _split(table: Table, targets: Tensor, **settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The rows to train on, validate on and test on; rows with a missing target are only trained on."""
    columns = targets.reshape(len(targets), -1).double()
    noun = "rows" if table.groups is None else "groups"
    train, validated, tested = split_groups(
        table.groups or table.files, columns[:, 0], what="table", noun=noun, **settings
    )
    _require_values(table, columns[train], "of the training part")
    missing = columns.isnan().any(1)
    return train, _leave_out(validated, missing, table, "validate"), _leave_out(tested, missing, table, "test")


def _leave_out(rows: Tensor, missing: Tensor, table: Table, verb: str) -> Tensor:
    """The rows of which no target is missing; warns of the others."""
    kept = rows[~missing[rows]]
    if len(kept) == len(rows):
        return rows
    if not len(kept):
        raise TensorDropoutError(
            f"{table.path}: every row to {verb} on lacks a target; fill them, or choose whole columns as target"
        )
    lost = len(rows) - len(kept)
    warnings.warn(f"table: {lost} of {len(rows)} rows to {verb} on lack a target and are left out", stacklevel=5)
    return kept


def _require_values(table: Table, columns: Tensor, where: str = "") -> None:
    unknown = columns.isnan().all(0)
    if unknown.any():
        column = table.columns[int(unknown.int().argmax())]
        raise TensorDropoutError(
            f"{table.path}: the column {column!r} is empty in all rows {where}".rstrip()
            + "; fill it, or choose other columns as target"
        )


def _build_augment(
    table: Table,
    root: Path,
    axes: int,
    shift: float,
    zoom: float,
    rotation: float,
    flip: bool,
    mirrored: list[list[str]] | Path | None,
) -> nn.Module | None:
    lone = find_lone_columns(table.columns) if table.labels is None else []
    if lone and max(shift, zoom, rotation, flip) > 0:
        raise TensorDropoutError(
            f"{table.path}: {lone[0]!r} looks like a coordinate or a side of a box, which would have to move with the "
            "pixels; name points by pairs such as x0 and y0, a box by two corners; or set augment to false"
        )
    if mirrored is not None and not flip:
        raise TensorDropoutError("table: mirrored is for mirrored images; set flip to true too")
    order = None
    if flip:
        if mirrored is None and len(table.points) > 1:
            names = ", ".join(table.columns[point[0]] for point in table.points[:4])
            raise TensorDropoutError(
                f"table: in a mirrored image some points change places ({names}, …: the left eye is a right one then); "
                'set mirrored to pairs such as [["*0", "*1"]], of a box to [["xmin", "xmax"]], or to [] if none does'
            )
        pairs = read_pairs(_find_given(root, "mirrored", mirrored)) if isinstance(mirrored, Path) else mirrored or []
        order = mirror_columns(table.columns, table.points, pairs)
    return MovePoints(axes, table.points, rotation=rotation, zoom=zoom, shift=shift, mirrored=order)


# Images.


def _find_shape(images: ImageFiles, size: int | Sequence[int] | None) -> tuple[int, ...]:
    """(C, *size) of all."""
    axes = 3 if images.are_volumes else 2
    given = None if size is None else check_size("table", [size] * axes if isinstance(size, int) else size, axes)
    if images.are_volumes:
        shapes = images.decode_all(lambda _, stream: measure_volume(stream))
    else:
        shapes = [(3, int(height), int(width)) for width, height in images.measure()]
    different = [shape if given is None else shape[:1] for shape in shapes]
    if len(set(different)) > 1:
        other = next(number for number, shape in enumerate(different) if shape != different[0])
        words = "channels×x×y×z" if images.are_volumes else "channels×height×width"
        raise TensorDropoutError(
            f"table: the images in {images.where} have {len(set(different))} sizes ({words}): {images.names[0]} has "
            f"{_format(shapes[0])}, {images.names[other]} {_format(shapes[other])}; "
            + ("set size, such as size=128, and all are resized" if given is None else "convert them to one")
        )
    return shapes[0] if given is None else (shapes[0][0], *given)


def _format(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape))


class TableStream(StreamSplit):
    """Images that are decoded when they are asked for.

    Args:
        images: their files.
        targets: one for each.
        shape: (C, *size) to which they are resized.
    """

    def __init__(self, images: ImageFiles, targets: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(images.names, targets)
        self.images, self.shape = images, shape

    def read(self, index: int) -> Tensor:
        """(C, *size), uint8 or float32.

        Raises:
            TensorDropoutError: if it cannot be read.
        """
        return self.images.decode_as(index, self._decode)

    def read_all(self) -> Tensor:
        """(n, C, *size), decoded on every core.

        Raises:
            TensorDropoutError: if some cannot be read, with their names.
        """
        stored = torch.empty(len(self), *self.shape, dtype=torch.float32 if self.images.are_volumes else torch.uint8)

        def fill(number: int, stream: BinaryIO) -> None:
            stored[number] = self._decode(stream)

        self.images.decode_all(fill, "reading images")
        return stored

    def check(self) -> None:
        """Decode every image once.

        Raises:
            TensorDropoutError: if some cannot be read, with their names.
        """
        self.images.check()

    def _decode(self, stream: BinaryIO) -> Tensor:
        return decode_image(stream, self.shape)


def _build_split(
    images: ImageFiles, targets: Tensor, rows: Tensor, shape: tuple[int, ...], in_memory: bool
) -> Split | None:
    if not len(rows):
        return None
    stream = TableStream(images.take(rows.tolist()), targets[rows], shape)
    return TensorSplit(stream.read_all(), stream.targets, stream.names) if in_memory else stream
