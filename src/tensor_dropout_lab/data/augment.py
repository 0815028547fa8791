"""Random changes of whole batches, on their device: no loop over samples, no data-dependent shape, no sync.

They draw from the default generator of the device, so that ``torch.manual_seed`` repeats them and CUDA graphs advance
them. In ``eval()`` they do nothing. Written here: torchvision draws once for a whole batch,
MONAI works image by image.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import choose, require_positive


class RandomShift(nn.Module):
    """Move every image by whole pixels along every spatial axis: the random crop of a padded image.

    Args:
        pixels: the largest shift p; each axis of each image draws one of −p..p.
        fill: what comes in at the border: "zero" (the mean of a standardized image), "edge" (its outermost pixels,
            right for volumes on an even background) or "min" (its smallest value, right for dark backgrounds).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> RandomShift(1)(torch.ones(4, 3, 8, 8)).shape
        torch.Size([4, 3, 8, 8])
    """

    def __init__(self, pixels: int, fill: Literal["zero", "edge", "min"] = "zero") -> None:
        super().__init__()
        require_positive("RandomShift", "pixels", pixels)
        self.pixels = pixels
        self.fill = choose("RandomShift", "fill", fill, ("zero", "edge", "min"))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *size) -> the same shape."""
        if not self.training:
            return images
        batch, axes = images.shape[0], images.ndim - 2
        draws = torch.rand(batch, axes, device=images.device) * (2 * self.pixels + 1)
        offsets = draws.floor().long() - self.pixels  # (B, axes)
        return shift_images(images, offsets, self.fill)

    def extra_repr(self) -> str:
        """For ``repr``."""
        return f"{self.pixels}, fill={self.fill!r}"


def shift_images(images: Tensor, offsets: Tensor, fill: str = "zero") -> Tensor:
    """``out[b, c, i, j] = images[b, c, i + offsets[b, 0], j + offsets[b, 1]]``, filled where that is outside.

    Args:
        images: (B, C, *size).
        offsets: (B, number of spatial axes) whole numbers.
        fill: as in :class:`RandomShift`.

    Example:
        >>> row = torch.tensor([[[1, 2, 3]]])
        >>> shift_images(row, torch.tensor([[1]])), shift_images(row, torch.tensor([[1]]), "edge")
        (tensor([[[2, 3, 0]]]), tensor([[[2, 3, 3]]]))
    """
    smallest = images.amin(dim=tuple(range(1, images.ndim)), keepdim=True) if fill == "min" else 0
    for axis, cells in enumerate(images.shape[2:]):
        wanted = torch.arange(cells, device=images.device) + offsets[:, axis, None]  # (B, cells)
        shape = [-1 if i == 0 else cells if i == axis + 2 else 1 for i in range(images.ndim)]
        source = wanted.clamp(0, cells - 1)
        images = images.gather(axis + 2, source.view(shape).expand_as(images))
        if fill != "edge":
            images = torch.where((source == wanted).view(shape), images, smallest)
    return images


class RandomFlip(nn.Module):
    """Mirror every image along one axis with probability one half.

    Args:
        axis: of the batch (B, C, *size): −1 mirrors the columns of pictures, 2 left and right of RAS volumes.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> RandomFlip(-1)(torch.tensor([[[[0, 1]]]] * 4)).flatten(1).tolist()
        [[1, 0], [0, 1], [1, 0], [1, 0]]
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *size) -> the same shape."""
        if not self.training:
            return images
        flipped = torch.rand(images.shape[0], device=images.device) < 0.5
        shape = (-1,) + (1,) * (images.ndim - 1)
        return torch.where(flipped.view(shape), images.flip(self.axis), images)

    def extra_repr(self) -> str:
        """For ``repr``."""
        return str(self.axis)


_PADDING = {"zero": "zeros", "edge": "border"}  # our word -> grid_sample's


class RandomAffine(nn.Module):
    """Turn, zoom and move every picture or volume, by linear interpolation between its pixels.

    A turn is a true rotation of the grid of pixels, also where the sizes differ; it is one in millimetres too if the
    voxels are cubic. The result is in the dtype that came in; half precision is computed in float32.

    Args:
        rotation: the largest angle in degrees; each image draws one up to it either way, a volume one about every axis.
        zoom: the largest change z of scale; each image draws one factor between 1 − z and 1 + z for all its axes.
        shift: the largest shift as a share of the size; each axis of each image draws one up to it either way.
        fill: what comes in at the border: "zero" (the mean of a standardized image) or "edge" (its outermost pixels,
            right for volumes on an even background, which is below 0 once they are standardized).

    Example:
        >>> _ = torch.manual_seed(0)
        >>> RandomAffine(rotation=10, zoom=0.1, shift=0.05, fill="edge")(torch.ones(4, 1, 8, 10, 8)).shape
        torch.Size([4, 1, 8, 10, 8])
    """

    def __init__(self, rotation: float, zoom: float, shift: float, fill: Literal["zero", "edge"] = "zero") -> None:
        super().__init__()
        self.rotation = _check_amount("RandomAffine", "rotation", rotation, 180)
        self.zoom = _check_amount("RandomAffine", "zoom", zoom, 0.9)
        self.shift = _check_amount("RandomAffine", "shift", shift, 1)
        self.fill = choose("RandomAffine", "fill", fill, tuple(_PADDING))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, H, W) or (B, C, D, H, W) -> the same shape."""
        if not self.training:
            return images
        _check_images("RandomAffine", images)
        matrix, shift = self.draw(images.shape[0], images.ndim - 2, images.device)
        return warp_images(images, matrix, shift, self.fill)

    def draw(self, batch: int, axes: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The matrices (batch, axes, axes) and shifts (batch, axes) of one batch: see :func:`warp_images`."""
        turns = axes * (axes - 1) // 2
        draws = 2 * torch.rand(batch, turns + 1 + axes, device=device) - 1
        angles, zooms, shifts = draws.split([turns, 1, axes], dim=1)
        matrix = make_rotations(math.radians(self.rotation) * angles)
        return matrix / (1 + self.zoom * zooms[:, :, None]), self.shift * shifts

    def extra_repr(self) -> str:
        """For ``repr``."""
        return f"rotation={self.rotation}, zoom={self.zoom}, shift={self.shift}, fill={self.fill!r}"


def make_rotations(angles: Tensor) -> Tensor:
    """Rotation matrices: (B, 1) radians -> (B, 2, 2), in the plane; (B, 3) -> (B, 3, 3), about each axis in turn.

    Example:
        >>> make_rotations(torch.tensor([[torch.pi / 6]]))
        tensor([[[ 0.8660, -0.5000],
                 [ 0.5000,  0.8660]]])
    """
    planes = {1: [(0, 1)], 3: [(1, 2), (2, 0), (0, 1)]}[angles.shape[1]]
    unit = torch.eye(2 if len(planes) == 1 else 3, dtype=angles.dtype, device=angles.device)
    rows = list(unit.expand(len(angles), -1, -1).unbind(1))
    for angle, (i, j) in zip(angles.split(1, dim=1), planes, strict=True):
        cos, sin = angle.cos(), angle.sin()
        rows[i], rows[j] = cos * rows[i] - sin * rows[j], sin * rows[i] + cos * rows[j]
    return torch.stack(rows, dim=1)


def warp_images(images: Tensor, matrix: Tensor, shift: Tensor, fill: str = "zero") -> Tensor:
    """``out[b, c, p] = images[b, c, matrix[b] @ p + shift[b] * size]``, p in pixels from the centre of the image.

    Args:
        images: (B, C, H, W) or (B, C, D, H, W), floating point.
        matrix: (B, axes, axes), with the axes in the order of the images.
        shift: (B, axes), as a share of each size.
        fill: as in :class:`RandomAffine`.

    Raises:
        TensorDropoutError: if the images have other axes, or whole numbers.

    Example:
        >>> picture = torch.tensor([[[[1.0, 2], [3, 4]]]])
        >>> warp_images(picture, make_rotations(torch.tensor([[torch.pi / 2]])), torch.zeros(1, 2)).round()
        tensor([[[[3., 1.],
                  [4., 2.]]]])
    """
    _check_images("warp_images", images)
    dtype = torch.promote_types(images.dtype, torch.float32)
    matrix, shift = matrix.to(dtype), shift.to(dtype)
    size = torch.cat([matrix.new_full((1,), cells) for cells in images.shape[2:]])  # no copy from the host: capturable
    # affine_grid counts the axes from the last one, and from −1 to 1 along each whatever its size.
    scaled = (matrix * size / size[:, None]).flip(1, 2)
    affine = torch.cat([scaled, 2 * shift.flip(1)[:, :, None]], dim=2)  # (B, axes, axes + 1)
    grid = F.affine_grid(affine, list(images.shape), align_corners=False)
    warped = F.grid_sample(images.to(dtype), grid, mode="bilinear", padding_mode=_PADDING[fill], align_corners=False)
    return warped.to(images.dtype)


class RandomContrast(nn.Module):
    """Bend the brightness of every image: its darkest value stays, brighter ones spread out or draw together.

    Scanners and sequences differ in the contrast between tissues. A gain and an offset would be of little use: every
    image is standardized, at test time too, which undoes both. A bent scale it does not undo.

    Args:
        strength: each image draws an exponent between 1 / (1 + strength) and 1 + strength, uniform in its logarithm.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> RandomContrast(0.2)(torch.tensor([[[[-1.0, 0, 1]]]] * 2)).flatten(1).round(decimals=2)
        tensor([[-1.0000,  0.0000,  1.0000],
                [-1.0000, -0.0500,  1.0400]])
    """

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = _check_amount("RandomContrast", "strength", strength, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *size) -> the same shape."""
        if not self.training:
            return images
        draws = 2 * torch.rand(images.shape[0], device=images.device) - 1
        return bend_contrast(images, torch.exp(math.log1p(self.strength) * draws))

    def extra_repr(self) -> str:
        """For ``repr``."""
        return str(self.strength)


def bend_contrast(images: Tensor, exponent: Tensor) -> Tensor:
    """``out = low + c ((images − low) / c) ** exponent``, with the smallest value ``low`` of each image.

    The other value that stays is ``low + c``, the mean of the image weighted by its own brightness:
    ``c = Σ(images − low)² / Σ(images − low)``. However much dark background there is, it does not count.

    Args:
        images: (B, C, *size), floating point; half precision is computed in float32.
        exponent: (B,), above 0; 1 changes nothing.

    Raises:
        TensorDropoutError: if the images have whole numbers.

    Example:
        >>> bend_contrast(torch.tensor([[[0.0, 1, 3, 4]]]), torch.tensor([2.0]))  # c = 26 / 8
        tensor([[[0.0000, 0.3077, 2.7692, 4.9231]]])
    """
    if not images.is_floating_point():
        raise TensorDropoutError(
            f"bend_contrast: floating-point images are expected, not {images.dtype}; prepare the images first"
        )
    axes = tuple(range(1, images.ndim))
    bright = images.to(torch.promote_types(images.dtype, torch.float32))
    low = bright.amin(dim=axes, keepdim=True)
    bright = bright - low
    c = (bright.square().sum(axes, keepdim=True) + 1e-8) / (bright.sum(axes, keepdim=True) + 1e-8)  # 1 if all are equal
    exponent = exponent.view((-1,) + (1,) * (images.ndim - 1))
    return (low + c * (bright / c) ** exponent).to(images.dtype)


def augment_volumes(what: str, choice: Any, pixels: int) -> nn.Module | None:
    """The random changes of volumes in RAS order, of which the first axis is left to right.

    Args:
        what: the data set, for the message.
        choice: True (flip, and shift by whole voxels), "strong" (flip, turn, zoom, move and bend the contrast) or
            False (nothing).
        pixels: the largest shift if the choice is True.

    Raises:
        TensorDropoutError: if it is none of these.

    Example:
        >>> augment_volumes("nifti", True, 2)
        Sequential(
          (0): RandomShift(2, fill='edge')
          (1): RandomFlip(2)
        )
    """
    if choice is False:
        return None
    if choice is True:
        return nn.Sequential(RandomShift(pixels, fill="edge"), RandomFlip(2))
    if choice == "strong":
        affine = RandomAffine(rotation=10, zoom=0.1, shift=0.05, fill="edge")
        return nn.Sequential(affine, RandomFlip(2), RandomContrast(0.2))
    raise TensorDropoutError(f"{what}: augment must be True, False or 'strong', not {choice!r}")


def _check_amount(what: str, name: str, value: Any, largest: float) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= largest:
        raise TensorDropoutError(f"{what}: {name} must be a number from 0 to {largest}, not {value!r}")
    return float(value)


def _check_images(what: str, images: Tensor) -> None:
    if images.ndim not in (4, 5) or not images.is_floating_point():
        raise TensorDropoutError(
            f"{what}: a floating-point batch of pictures (B, C, H, W) or volumes (B, C, D, H, W) is expected, not "
            f"{images.dtype} of shape {tuple(images.shape)}; prepare the images first"
        )
