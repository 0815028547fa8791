"""Single files as the network sees them, for the data set ``table``: decoding, and what ``predict`` needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import decode_picture, describe_failure, read_size, read_volume
from tensor_dropout_lab.data.base import StandardizeImages
from tensor_dropout_lab.data.image_files import PICTURES, VOLUMES, list_folder
from tensor_dropout_lab.data.imagefolder import build_prepare
from tensor_dropout_lab.data.points_table import find_points
from tensor_dropout_lab.extras import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

    from tensor_dropout_lab.explanation_figures import View
    from tensor_dropout_lab.point_pictures import Panel

Result = TypeVar("Result")


def resize_picture(picture: Image, shape: Sequence[int]) -> Tensor:
    """(3, height, width) in uint8: bilinear, with antialias; width and height may be scaled differently."""
    from PIL.Image import Resampling

    height, width = shape[1:]
    resized = picture if picture.size == (width, height) else picture.resize((width, height), Resampling.BILINEAR)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).contiguous()


def resize_volume(volume: Tensor, shape: Sequence[int]) -> Tensor:
    """(C, X, Y, Z) by trilinear interpolation."""
    size = list(shape[1:])
    if list(volume.shape[1:]) == size:
        return volume
    return F.interpolate(volume[None], size, mode="trilinear", align_corners=False)[0]


def decode_image(stream: BinaryIO, shape: Sequence[int]) -> Tensor:
    """A picture or a volume as it is stored in a split: (C, *size)."""
    if len(shape) == 4:
        return resize_volume(read_volume(stream), shape)
    return resize_picture(decode_picture(stream), shape)


class TableReader:
    """Pictures or volumes for a network that was trained on such a table: a :class:`FileReader`.

    Args:
        input_shape: of the network.
        options: those that its data was loaded with.
        root: not used.
        described: not used.
    """

    def __init__(
        self, input_shape: tuple[int, ...], options: dict[str, Any], root: str | None, described: dict[str, Any]
    ) -> None:
        self.shape, self.are_volumes = tuple(input_shape), len(input_shape) == 4
        self.endings: tuple[str, ...] = VOLUMES if self.are_volumes else PICTURES
        self.in_pixels = options.get("units") == "pixels"
        import_extra("nibabel" if self.are_volumes else "PIL.Image", "table")
        self.prepare = StandardizeImages() if self.are_volumes else build_prepare(options.get("normalize", "channel"))

    def find(self, folder: Path) -> list[Path]:
        """The images in a folder and in those inside it, hidden ones left out."""
        return [folder / name for name in list_folder(folder, self.endings)]

    def read(self, path: Path) -> Tensor:
        """(C, *size), resized and normalised.

        Raises:
            TensorDropoutError: if it cannot be read, or has another number of channels.
        """
        return self.prepare(self._decode(path)[None])[0]

    def view(self, path: Path, x: Tensor, grid: Tensor) -> list[View]:
        """The pixels that the network sees, or three slices of a volume."""
        from tensor_dropout_lab.explanation_figures import slice_volume, view_picture

        return slice_volume(x[0, 0].double(), grid) if self.are_volumes else view_picture(self._decode(path), grid)

    def find_units(self, targets: Sequence[str]) -> dict[str, str]:
        """Of the coordinates of points: pixels, or fractions of what."""
        sides = ("width", "depth", "height") if self.are_volumes else ("width", "height")
        units = ["pixels"] * 2 if self.in_pixels else [f"of the {side}" for side in sides]
        points = find_points(targets)
        return {targets[column]: unit for point in points for column, unit in zip(point, units, strict=False)}

    def find_points(self, targets: Sequence[str]) -> list[tuple[int, ...]]:
        """Which targets are the coordinates of each point."""
        return [point[: len(self.shape) - 1] for point in find_points(targets)]

    def measure(self, path: Path) -> tuple[float, ...]:
        """Width and height of the picture in pixels, if points were given in pixels; else ones."""
        if not self.in_pixels:
            return (1.0,) * (len(self.shape) - 1)
        width, height = self._open(path, read_size)
        return float(width), float(height)

    def show(self, path: Path, predicted: np.ndarray, ellipses: np.ndarray | None) -> list[Panel]:
        """The whole picture, upright, with points on it; or three slices of a volume through their centre."""
        from tensor_dropout_lab.point_pictures import Panel, shrink

        if self.are_volumes:
            return slice_at_points(self._open(path, read_volume)[0], predicted, ellipses)
        return [Panel(shrink(self._open(path, decode_picture)), path.name, predicted, ellipses=ellipses)]

    def _decode(self, path: Path) -> Tensor:
        image = self._open(path, lambda stream: decode_image(stream, self.shape))
        if image.shape[0] != self.shape[0]:
            raise TensorDropoutError(
                f"{path} has {image.shape[0]} channels, the network was trained on {self.shape[0]}; convert it"
            )
        return image

    def _open(self, path: Path, decode: Callable[[BinaryIO], Result]) -> Result:
        try:
            with path.open("rb") as stream:
                return decode(stream)
        except Exception as error:  # decoders raise anything on damaged files
            kind = "volume" if self.are_volumes else "picture"
            raise TensorDropoutError(
                f"{path} cannot be read as a {kind} ({describe_failure(error)}); this network takes "
                f"{', '.join(self.endings)}"
            ) from error


def slice_at_points(volume: Tensor, predicted: np.ndarray, ellipses: np.ndarray | None) -> list[Panel]:
    """Three slices of a volume (X, Y, Z) through the centre of points (P, 3), with all points on each.

    Ellipsoids (P, 3, 3) are drawn as their shadows on the slice.
    """
    from tensor_dropout_lab.point_pictures import Panel

    low, high = np.quantile(volume.numpy(), (0.01, 0.995))
    shades = ((volume.numpy() - low) / max(high - low, 1e-12)).clip(0, 1)
    centre = predicted.mean(0).clip(0, 1)
    panels = []
    for name, fixed, across, up in (("axial", 2, 0, 1), ("coronal", 1, 0, 2), ("sagittal", 0, 1, 2)):
        cells = volume.shape[fixed]
        place = min(int(centre[fixed] * cells), cells - 1)
        # (across, up) -> rows from the top, columns from the left
        rows = np.flip(shades.take(place, axis=fixed).T, 0)
        image = np.repeat((255 * rows).astype(np.uint8)[..., None], 3, axis=2)
        points = np.stack([predicted[:, across], 1 - predicted[:, up]], axis=1)
        title = f"{name}, {'xyz'[fixed]} = {place} of {cells}"
        shadows = None
        if ellipses is not None:
            turned = np.array([1.0, -1.0])  # up is down in a picture
            shadows = ellipses[:, [across, up]][:, :, [across, up]] * np.outer(turned, turned)
        panels.append(Panel(image, title, points, ellipses=shadows))
    return panels
