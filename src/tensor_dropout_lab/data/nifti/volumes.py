"""From a file to a volume: its header, its voxels in RAS order, resampled, cut and padded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import StandardizeImages
from tensor_dropout_lab.extras import import_extra

Box = tuple[tuple[int, int], ...]
"""First and one past the last voxel along each axis."""


@dataclass(frozen=True)
class Header:
    """What is known of a volume before it is read: shape and voxel edges in mm, in RAS order, and how it is stored."""

    shape: tuple[int, ...]
    voxel: tuple[float, ...]
    is_uint8: bool


def read_header(path: Path) -> Header:
    """The header of a file.

    Raises:
        TensorDropoutError: if it cannot be read, is not one three-dimensional volume, or states two voxel sizes.
    """
    nibabel = import_extra("nibabel", "nifti")
    image = _open_image(path)
    _require_one_voxel(path, image)
    order = nibabel.io_orientation(image.affine)[:, 0].astype(int).argsort()  # RAS axis -> stored axis
    zooms = image.header.get_zooms()
    is_uint8 = image.get_data_dtype() == np.uint8 and (image.dataobj.slope, image.dataobj.inter) == (1, 0)
    return Header(tuple(image.shape[i] for i in order), tuple(float(zooms[i]) for i in order), is_uint8)


def _require_one_voxel(path: Path, image: Any) -> None:
    """Refuse a scan whose voxel edges, by which it is resampled, are not those of its affine, by which it is turned."""
    import nibabel

    stated, placed = image.header.get_zooms()[:3], nibabel.affines.voxel_sizes(image.affine)
    if not all(abs(measured - edge) <= 0.01 * edge for measured, edge in zip(placed, stated, strict=True)):
        raise TensorDropoutError(
            f"nifti: {path} has voxels of {format_voxel(stated)} by its pixdim, but of {format_voxel(placed)} by its "
            "affine (sform or qform), which must agree to 1 %; correct the wrong one in its header"
        )


def typical_voxel(headers: Sequence[Header]) -> tuple[float, ...]:
    """The middle one of their voxel edges along each axis, in mm, to four digits.

    Example:
        >>> typical_voxel([Header((8, 8, 8), (1.0, 1.0, edge), True) for edge in (1.2, 1.0, 1.2)])
        (1.0, 1.0, 1.2)
    """
    axes = zip(*(header.voxel for header in headers), strict=True)
    return tuple(float(f"{median_low(edges):.4g}") for edges in axes)


def is_near(voxel: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether no edge is more than 10 % longer or shorter than expected.

    Example:
        >>> is_near((2.2, 2.0, 2.0), (2.0, 2.0, 2.0)), is_near((2.0, 2.0, 1.0), (2.0, 2.0, 2.0))
        (True, False)
    """
    return all(abs(measured - edge) <= 0.1001 * edge for measured, edge in zip(voxel, expected, strict=True))


def format_voxel(voxel: Sequence[float]) -> str:
    """As it is written in messages: "2×2×1.5 mm"."""
    return "×".join(f"{edge:.4g}" for edge in voxel) + " mm"


def require_voxel(path: Path, expected: Sequence[float]) -> None:
    """Refuse a scan whose voxels a network does not know.

    Raises:
        TensorDropoutError: if an edge is more than 10 % longer or shorter than expected, or the header is damaged.
    """
    voxel = read_header(path).voxel
    if not is_near(voxel, expected):
        raise TensorDropoutError(
            f"nifti: {path} has voxels of {format_voxel(voxel)}, the network was trained on {format_voxel(expected)}; "
            "resample it first"
        )


def _open_image(path: Path) -> Any:
    import nibabel

    try:
        image: Any = nibabel.load(path)
    except Exception as error:  # a damaged file can raise anything
        raise TensorDropoutError(f"nifti: {path} cannot be read ({error}); replace it") from error
    if len(image.shape) != 3 and not (len(image.shape) == 4 and image.shape[3] == 1):
        raise TensorDropoutError(f"nifti: {path} has shape {image.shape}; one three-dimensional volume is expected")
    return image


def read_volume(
    path: Path, resample: float | None = None, crop: str | None = None, size: Sequence[int] | None = None
) -> tuple[np.ndarray, tuple[int, ...]]:
    """The volume in RAS order, (X, Y, Z) float32, and its extent: how many voxels along each axis show all of it.

    Args:
        path: a NIfTI file.
        resample: edge of cubic voxels in mm, if it is to have others than its own.
        crop: "brain": only the box of what is not 0; resampled voxels then lie around the middle of that box.
        size: how many resampled voxels, with that crop, even if the extent is larger; None: as many as cover the box.

    Raises:
        TensorDropoutError: if it cannot be read, or has values that are no numbers.
    """
    values = _read_values(path)
    box = find_box(values) if crop == "brain" else None
    if resample is None:
        values = values if box is None else cut_volume(values, box)
        return values, values.shape
    voxel = read_header(path).voxel
    volume = resample_volume(values, voxel, resample, box, None if box is None else size)
    return volume, volume.shape if box is None else cover_box(box, voxel, resample)


def _read_values(path: Path) -> np.ndarray:
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
    return values


def resample_shape(shape: Sequence[int], voxel: Sequence[float], edge: float) -> tuple[int, ...]:
    """How many cubic voxels have the same field of view, to the nearest number."""
    return tuple(max(1, round(cells * step / edge)) for cells, step in zip(shape, voxel, strict=True))


def cover_box(box: Box, voxel: Sequence[float], edge: float) -> tuple[int, ...]:
    """How many cubic voxels cover a box.

    Example:
        >>> cover_box(((0, 5), (2, 4), (3, 4)), (2.0, 2.0, 2.0), 4.0)
        (3, 1, 1)
    """
    lengths = ((last - first) * step for (first, last), step in zip(box, voxel, strict=True))
    return tuple(max(1, math.ceil(length / edge - 1e-6)) for length in lengths)


def resample_volume(
    values: np.ndarray, voxel: Sequence[float], edge: float, box: Box | None = None, size: Sequence[int] | None = None
) -> np.ndarray:
    """The volume on cubic voxels, axis by axis: averages where it shrinks, linear interpolation where it grows.

    Args:
        values: (X, Y, Z).
        voxel: its edges in mm.
        edge: that of the cubes.
        box: the cubes lie around its middle; None: around that of the volume.
        size: how many cubes along each axis; None: as many as cover the box, or have the volume's field of view.

    Example:
        >>> resample_volume(np.arange(8, dtype=np.float32).reshape(8, 1, 1), (1, 2, 2), 2.0).ravel()
        array([0.5, 2.5, 4.5, 6.5], dtype=float32)
        >>> brain = np.array([0, 0, 0, 4, 8, 4, 0, 0], dtype=np.float32).reshape(8, 1, 1)  # its middle is its own
        >>> resample_volume(brain, (1, 2, 2), 2.0, find_box(brain), (3, 1, 1)).ravel()
        array([1., 6., 1.], dtype=float32)
    """
    around = tuple((0, cells) for cells in values.shape) if box is None else box
    if size is None:
        size = resample_shape(values.shape, voxel, edge) if box is None else cover_box(around, voxel, edge)
    background = values.min()  # what is outside of the volume
    volume = torch.from_numpy(values - background)
    for axis, cells in enumerate(size):
        share = _share_voxels(cells, values.shape[axis], edge / voxel[axis], sum(around[axis]) / 2)
        volume = torch.movedim(torch.tensordot(share, volume, dims=([1], [axis])), 0, axis)
    return np.ascontiguousarray(volume.numpy()) + background


def _share_voxels(cells: int, voxels: int, width: float, middle: float) -> Tensor:
    """(cells, voxels): the share of each voxel in each cell; what is left of a cell is outside of the volume.

    Args:
        cells: how many, in a row around the middle.
        voxels: of the volume.
        width: of a cell, in voxels.
        middle: of the row, in voxels from the volume's edge.
    """
    starts = middle + (torch.arange(cells, dtype=torch.float64)[:, None] - cells / 2) * width
    firsts = torch.arange(voxels, dtype=torch.float64)
    if width >= 1:
        shares = (torch.minimum(starts + width, firsts + 1) - torch.maximum(starts, firsts)).clamp(min=0) / width
    else:
        centres = starts + width / 2
        inside = (centres > 0) & (centres < voxels)
        shares = (1 - ((centres - 0.5).clamp(0, voxels - 1) - firsts).abs()).clamp(min=0) * inside
    return shares.float()


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
        ((cells - length) // 2, cells - length - (cells - length) // 2)
        for cells, length in zip(size, values.shape, strict=True)
    ]
    return np.pad(values, margins, constant_values=background)


def cut_volume(values: np.ndarray, box: Box) -> np.ndarray:
    """What is in the box."""
    return values[tuple(slice(*span) for span in box)]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """uint8 as it is (rounded after resampling); float16 of mean 0 and variance 1, which ``prepare`` gives anyway."""
    if dtype == "uint8":
        return values.round().clip(0, 255).astype(np.uint8)
    values = values.astype(np.float64)
    standard = (values - values.mean()) / max(float(values.std()), 1e-12)
    return standard.clip(-60000, 60000).astype(np.float16)


def read_input(path: Path, input_shape: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """One scan as a network that was trained on such a folder takes it.

    Args:
        path: a NIfTI file.
        input_shape: (1, *size) of the network.
        options: those that the network's data was loaded with.

    Returns:
        (1, *size), of mean 0 and variance 1.

    Raises:
        TensorDropoutError: if it cannot be read, or its shape does not fit and nothing says how to make it fit, or
            its brain is more than 10 % larger than any that was trained on.
    """
    import_extra("nibabel", "nifti")
    crop = options.get("crop")
    if crop == "common":
        raise TensorDropoutError(
            'nifti: the network was trained with crop="common", a box of its whole folder that one scan does not know; '
            'train with crop="brain" or size to predict from files'
        )
    values, extent = read_volume(path, options.get("resample"), crop, input_shape[1:])
    if crop == "brain":
        _check_brain(path, extent, input_shape[1:], cut_in_training=options.get("size") is not None)
    if crop is None and options.get("size") is None and values.shape != input_shape[1:]:
        resampled, advice = "", "resample it"
        if options.get("resample") is not None:
            resampled = f" of {options['resample']:g} mm after resampling"
            advice = "cut or pad its field of view, or train with size or crop"
        raise TensorDropoutError(
            f"nifti: {path} has {values.shape} voxels{resampled}, the network takes {input_shape[1:]}; {advice}"
        )
    stored = encode(fit_size(values, input_shape[1:]), "uint8" if read_header(path).is_uint8 else "float16")
    volume = torch.from_numpy(np.ascontiguousarray(stored))
    return StandardizeImages()(volume[None, None].float())[0]


def _check_brain(path: Path, extent: tuple[int, ...], size: tuple[int, ...], *, cut_in_training: bool) -> None:
    """Warn of a brain that the network's box cuts; refuse one that no training brain was like."""
    if all(needed <= cells for needed, cells in zip(extent, size, strict=True)):
        return
    finding = f"nifti: the brain of {path}, all that is not 0, is {extent} voxels, the network takes {size}"
    if not cut_in_training and any(needed > 1.1 * cells for needed, cells in zip(extent, size, strict=True)):
        raise TensorDropoutError(
            f"{finding}, the largest that it was trained on; remove what is around the brain (write 0 there), or train "
            "with size"
        )
    warnings.warn(f"{finding}; what is outside is cut off", stacklevel=3)
