"""Points that move with the pixels: shift, scale, rotation, and a flip that exchanges left and right."""

from __future__ import annotations

import csv
from collections.abc import Container, Sequence
from pathlib import Path

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.augment import RandomAffine, warp_images
from tensor_dropout_lab.data.base import JointAugment

Pairs = Sequence[Sequence[str]]


class MovePoints(JointAugment):
    """Turn, zoom, move and flip every picture or volume, and its points with it.

    A point that leaves the image becomes NaN: it does not count in that step. One that was outside to begin with moves
    along and stays. A point of which a coordinate is missing is missing. Targets that are no coordinates stay as they
    are; a flip exchanges those that are mirrored.

    Args:
        axes: 2 of pictures, 3 of volumes.
        points: the columns of every point in the targets: (x, y), or (x, y, z) in volumes. They are fractions of the
            size, from the left and the top edge (in RAS volumes from left, back and bottom).
        rotation: as in :class:`~tensor_dropout_lab.data.augment.RandomAffine`, in degrees.
        zoom: as there.
        shift: as there, a share of the size.
        mirrored: for every target, the column that it becomes in a mirrored image; None: no flips.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> move = MovePoints(2, [(0, 1), (2, 3)], rotation=10, zoom=0.1, shift=0.05, mirrored=[2, 3, 0, 1])
        >>> x, y = move(torch.rand(8, 3, 32, 32), torch.rand(8, 4))
        >>> x.shape, y.shape
        (torch.Size([8, 3, 32, 32]), torch.Size([8, 4]))
    """

    columns: Tensor
    mirrored: Tensor | None

    def __init__(
        self,
        axes: int,
        points: Sequence[Sequence[int]],
        *,
        rotation: float,
        zoom: float,
        shift: float,
        mirrored: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        in_image_order = [list(reversed(point[:2])) if axes == 2 else list(point) for point in points]
        # Buffers: a CUDA graph cannot capture a copy from the host.
        self.register_buffer("columns", torch.tensor(in_image_order).view(-1, axes).long(), persistent=False)
        self.register_buffer("mirrored", None if mirrored is None else torch.tensor(mirrored), persistent=False)
        # What comes in at the border: the mean in pictures; in volumes their background, which is below it.
        self.affine = RandomAffine(rotation, zoom, shift, fill="zero" if axes == 2 else "edge")
        self.x_axis = 1 if axes == 2 else 0
        self.warps = max(rotation, zoom, shift) > 0

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, *size), (B,) or (B, T) -> the same shapes."""
        if not self.training:
            return x, y
        if self.warps:
            matrix, shift = self.affine.draw(x.shape[0], x.ndim - 2, x.device)
            x, y = self.warp(x, y, matrix, shift)
        if self.mirrored is not None:
            flipped = torch.rand(x.shape[0], device=x.device) < 0.5
            mirrored = self.mirror(x, y)
            x, y = (torch.where(_as_rows(flipped, old), new, old) for new, old in zip(mirrored, (x, y), strict=True))
        return x, y

    def warp(self, x: Tensor, y: Tensor, matrix: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets after :func:`~tensor_dropout_lab.data.augment.warp_images`."""
        warped = warp_images(x, matrix, shift, self.affine.fill)
        if not len(self.columns):
            return warped, y
        before = y[:, self.columns]  # (B, points, axes)
        after = move_points(before, matrix, shift, x.shape[2:])
        after = torch.where(is_inside(before) & ~is_inside(after), torch.nan, after)
        return warped, y.index_copy(1, self.columns.flatten(), after.to(y.dtype).flatten(1))

    def mirror(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Images and targets, left and right exchanged. It is its own inverse.

        Example:
            >>> move = MovePoints(2, [(0, 1), (2, 3)], rotation=0, zoom=0, shift=0, mirrored=[2, 3, 0, 1])
            >>> eyes = torch.tensor([[0.25, 0.5, 1.0, 0.75]])  # the left one, the right one
            >>> move.mirror(torch.zeros(1, 3, 8, 8), eyes)[1]
            tensor([[0.0000, 0.7500, 0.7500, 0.5000]])
        """
        assert self.mirrored is not None
        y = y if y.ndim == 1 else y[:, self.mirrored]
        columns = self.columns[:, self.x_axis]
        if len(columns):
            y = y.index_copy(1, columns, 1 - y[:, columns])
        return x.flip(2 + self.x_axis), y

    def extra_repr(self) -> str:
        """For ``repr``."""
        return f"{len(self.columns)} points, flip={self.mirrored is not None}"


def is_inside(points: Tensor) -> Tensor:
    """(…, axes) fractions -> (…, 1): whether a point lies in its image; false if it is missing."""
    return ((points >= 0) & (points <= 1)).all(-1, keepdim=True)


def move_points(points: Tensor, matrix: Tensor, shift: Tensor, size: Sequence[int]) -> Tensor:
    """Where points are after :func:`~tensor_dropout_lab.data.augment.warp_images` with the same matrices and shifts.

    A pixel p (from the centre) of the result is the pixel ``matrix @ p + shift * size`` of the image, so a point q of
    the image comes to ``matrix⁻¹ @ (q − shift * size)``. The matrices are rotations times a scale s, so that
    ``matrix⁻¹ = matrixᵀ / s²``: no solver, which would wait for the GPU.

    Args:
        points: (B, points, axes) fractions of the size, axes in the order of the image.
        matrix: (B, axes, axes).
        shift: (B, axes), as a share of each size.
        size: of the image.

    Example:
        >>> still, right = torch.eye(2)[None], torch.tensor([[0.0, -0.25]])  # the image moves right
        >>> move_points(torch.tensor([[[0.5, 0.5]]]), still, right, (8, 8))
        tensor([[[0.5000, 0.7500]]])
    """
    dtype = torch.promote_types(points.dtype, torch.float32)
    matrix, shift = matrix.to(dtype), shift.to(dtype)
    cells = torch.cat([matrix.new_full((1,), number) for number in size])  # no copy from the host: capturable
    from_centre = (points.to(dtype) - 0.5 - shift[:, None]) * cells
    scale = matrix[:, :1].square().sum(2, keepdim=True)  # s², (B, 1, 1)
    return from_centre @ matrix / scale / cells + 0.5  # rows times matrix: matrixᵀ @ column


def _as_rows(chosen: Tensor, like: Tensor) -> Tensor:
    return chosen.view((-1,) + (1,) * (like.ndim - 1))


# Which targets change places in a mirrored image.


def read_pairs(path: Path) -> list[list[str]]:
    """A file with two names in every line, separated by a comma.

    Raises:
        TensorDropoutError: if it cannot be read, or a line has not two names.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            lines = [(number, [name.strip() for name in line]) for number, line in enumerate(csv.reader(stream), 1)]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TensorDropoutError(f"{path}: the file of mirrored columns cannot be read ({error})") from error
    for number, names in lines:
        if names and (len(names) != 2 or not all(names)):
            raise TensorDropoutError(
                f"{path}: line {number} is {','.join(names)!r}; two names are expected, such as x0,x16"
            )
    return [names for _, names in lines if names]


def mirror_columns(columns: Sequence[str], points: Sequence[Sequence[int]], pairs: Pairs) -> list[int]:
    """The column that every target becomes in a mirrored image.

    Args:
        columns: the names of the targets.
        points: the columns of every point.
        pairs: two names each. ``*`` stands for the axes, so that ``*0,*16`` is ``x0,x16`` and ``y0,y16``. Columns that
            are not named stay in their place: points on the middle line.

    Raises:
        TensorDropoutError: if a name is no column, is named twice, or is on another axis than its partner.

    Example:
        >>> mirror_columns(["x0", "y0", "x1", "y1", "x2", "y2"], [(0, 1), (2, 3), (4, 5)], [["*0", "*1"]])
        [2, 3, 0, 1, 4, 5]
        >>> mirror_columns(["x0", "y0", "x1", "y1"], [(0, 1), (2, 3)], [["x0", "x1"]])  # the corners of a box
        [2, 1, 0, 3]
    """
    place = {name: number for number, name in enumerate(columns)}
    axis = {column: number for point in points for number, column in enumerate(point)}
    mirrored = list(range(len(columns)))
    named: set[str] = set()
    for first, second in (pair for given in pairs for pair in _expand(given, place)):
        for name in (first, second):
            if name not in place:
                raise TensorDropoutError(f"mirrored: there is no column {name!r}, only {', '.join(columns[:8])}")
            if name in named:
                raise TensorDropoutError(f"mirrored: the column {name!r} is in two pairs; name it once")
            named.add(name)
        i, j = place[first], place[second]
        if axis.get(i) != axis.get(j):
            raise TensorDropoutError(
                f"mirrored: {first!r} and {second!r} are on different axes; a pair is two columns of x, or two of y"
            )
        mirrored[i], mirrored[j] = j, i
    return mirrored


def _expand(pair: Sequence[str], known: Container[str]) -> list[tuple[str, str]]:
    """A pair, or the pairs that its ``*`` stand for."""
    if isinstance(pair, str) or len(pair) != 2:
        raise TensorDropoutError(f"mirrored: a pair is two names, such as ['x0', 'x16'], not {pair!r}")
    first, second = pair
    if "*" not in first or "*" not in second:
        return [(first, second)]
    letters = "xyz" if first.replace("*", "x") in known else "XYZ"
    pairs = [(first.replace("*", letter), second.replace("*", letter)) for letter in letters]
    return pairs[:2] + [pair for pair in pairs[2:] if pair[0] in known]
