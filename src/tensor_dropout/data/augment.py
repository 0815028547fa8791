"""Random changes of whole batches, on their device: no loop over samples, no data-dependent shape, no sync.

They draw from the default generator of the device, so that ``torch.manual_seed`` repeats them and CUDA graphs advance
them. In ``eval()`` they do nothing.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from tensor_dropout.data.base import choose, require_positive


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
