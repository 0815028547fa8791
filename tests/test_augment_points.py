"""Points move with the pixels: SIMULATED images with a bright spot at every point, one channel for each."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tensor_dropout as td
from tensor_dropout_lab.data.augment import make_rotations, warp_images
from tensor_dropout_lab.data.augment_points import MovePoints, mirror_columns, move_points, read_pairs

SIZES = {2: (48, 64), 3: (24, 20, 28)}
EYES = [(0, 1), (2, 3)]


def draw_spots(points: Tensor, size: tuple[int, ...]) -> Tensor:
    """(B, P, axes) fractions, in the order of the image's axes -> (B, P, *size), a spot on 0 for each."""
    grids = torch.meshgrid(*[(torch.arange(cells) + 0.5) / cells for cells in size], indexing="ij")
    offsets = (torch.stack(grids, -1) - points.view(*points.shape[:2], *[1] * len(size), -1)) * torch.tensor(size)
    return torch.exp(-offsets.square().sum(-1) / 4)


def find_spots(images: Tensor) -> Tensor:
    """The centre of the brightness of every channel: (B, P, axes) fractions."""
    axes = range(images.ndim - 2)
    total = images.flatten(2).sum(2)
    centres = []
    for axis in axes:
        cells = images.shape[2 + axis]
        profile = images.sum([2 + other for other in axes if other != axis])  # (B, P, cells)
        centres.append((profile * (torch.arange(cells) + 0.5) / cells).sum(2) / total)
    return torch.stack(centres, -1)


def make_targets(points: Tensor) -> Tensor:
    """(B, P, axes) in the order of the image -> (B, P * axes) columns x, y or x, y, z."""
    return (points.flip(-1) if points.shape[-1] == 2 else points).flatten(1)


def read_targets(y: Tensor, axes: int) -> Tensor:
    """The inverse of :func:`make_targets`."""
    points = y.view(len(y), -1, axes)
    return points.flip(-1) if axes == 2 else points


def list_columns(count: int, axes: int) -> list[tuple[int, ...]]:
    return [tuple(range(axes * k, axes * k + axes)) for k in range(count)]


@pytest.mark.parametrize("axes", [2, 3])
def test_after_every_change_the_spots_are_where_the_points_say(axes: int) -> None:
    torch.manual_seed(0)
    points = 0.35 + 0.3 * torch.rand(16, 3, axes)
    mirrored = list(range(3 * axes))
    move = MovePoints(axes, list_columns(3, axes), rotation=25, zoom=0.2, shift=0.1, mirrored=mirrored)
    images, y = move(draw_spots(points, SIZES[axes]), make_targets(points))
    moved = read_targets(y, axes)
    pixels = (moved - find_spots(images)) * torch.tensor(SIZES[axes])
    assert pixels.abs().max() < 0.2
    assert ((moved - points) * torch.tensor(SIZES[axes])).abs().amax((1, 2)).min() > 0.5  # all were changed


@pytest.mark.parametrize("axes", [2, 3])
def test_flips_exchange_left_and_right_and_twice_is_the_identity(axes: int) -> None:
    torch.manual_seed(1)
    points = 0.2 + 0.6 * torch.rand(4, 2, axes)  # away from the edges, which would cut spots off
    columns = [f"{letter}{k}" for k in range(2) for letter in "xyz"[:axes]]
    order = mirror_columns(columns, list_columns(2, axes), [["*0", "*1"]])
    move = MovePoints(axes, list_columns(2, axes), rotation=0, zoom=0, shift=0, mirrored=order)
    images, y = draw_spots(points, SIZES[axes]), make_targets(points)
    mirrored, there = move.mirror(images, y)
    swapped = find_spots(mirrored).flip(1)  # the spot of point 0 is now what is called point 1
    torch.testing.assert_close(read_targets(there, axes), swapped, atol=5e-3, rtol=0)
    assert not torch.allclose(there, y)
    back, again = move.mirror(mirrored, there)
    assert torch.equal(back, images)
    torch.testing.assert_close(again, y)


def test_half_of_the_images_are_flipped_and_each_with_its_points() -> None:
    torch.manual_seed(2)
    points = torch.tensor([[[0.5, 0.2]]]).expand(64, 1, 2)
    move = MovePoints(2, [(0, 1)], rotation=0, zoom=0, shift=0, mirrored=[0, 1])
    images, y = move(draw_spots(points, (16, 32)), make_targets(points))
    flipped = y[:, 0] > 0.5
    assert 16 < int(flipped.sum()) < 48
    assert torch.equal(find_spots(images)[:, 0, 1] > 0.5, flipped)


def test_a_turn_by_a_right_angle_of_a_picture_that_is_no_square() -> None:
    matrix, shift = make_rotations(torch.tensor([[math.pi / 2]])), torch.zeros(1, 2)
    points = torch.tensor([[[0.5, 0.5], [0.5, 0.6], [0.25, 0.5]]])
    turned = warp_images(draw_spots(points, (40, 80)), matrix, shift)
    torch.testing.assert_close(move_points(points, matrix, shift, (40, 80)), find_spots(turned), atol=2e-3, rtol=0)


def test_points_that_leave_are_missing_and_those_outside_before_stay() -> None:
    move = MovePoints(2, EYES, rotation=0, zoom=0, shift=0)
    right = torch.tensor([[0.0, -0.25]])  # the image moves by a quarter to the right
    y = torch.tensor([[0.9, 0.5, 1.1, 0.5, 7.0], [0.5, 0.5, torch.nan, 0.5, 7.0]])
    _, moved = move.warp(torch.zeros(2, 1, 8, 8), y, torch.eye(2).expand(2, 2, 2), right.expand(2, 2))
    assert moved[0, :2].isnan().all()  # it left
    torch.testing.assert_close(moved[0, 2:], torch.tensor([1.35, 0.5, 7.0]))  # outside before; and no coordinate
    torch.testing.assert_close(moved[1, :2], torch.tensor([0.75, 0.5]))
    assert moved[1, 2:4].isnan().all()  # half a point is none
    assert moved[1, 4] == 7


def test_classes_and_single_numbers_stay() -> None:
    torch.manual_seed(3)
    move = MovePoints(2, [], rotation=10, zoom=0.1, shift=0.1, mirrored=[0])
    images = torch.rand(8, 3, 16, 16)
    for y in (torch.arange(8), torch.rand(8), torch.rand(8, 1)):
        moved, same = move(images, y)
        assert torch.equal(same, y)
        assert not torch.equal(moved, images)


def test_nothing_moves_in_evaluation() -> None:
    move = MovePoints(2, EYES, rotation=10, zoom=0.1, shift=0.1, mirrored=[2, 3, 0, 1]).eval()
    images, y = torch.rand(2, 3, 8, 8), torch.rand(2, 4)
    moved, same = move(images, y)
    assert torch.equal(moved, images)
    assert torch.equal(same, y)


def test_the_same_seed_repeats_the_changes() -> None:
    move = MovePoints(2, EYES, rotation=10, zoom=0.1, shift=0.1, mirrored=[2, 3, 0, 1])
    images, y = torch.rand(4, 3, 8, 8), torch.rand(4, 4)
    results = []
    for _ in range(2):
        torch.manual_seed(5)
        results.append(move(images, y))
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)


# Which columns change places.


def test_a_box_keeps_its_left_side_on_the_left() -> None:
    columns, points = ["xmin", "ymin", "xmax", "ymax"], EYES
    move = MovePoints(
        2, points, rotation=0, zoom=0, shift=0, mirrored=mirror_columns(columns, points, [["xmin", "xmax"]])
    )
    _, box = move.mirror(torch.zeros(1, 3, 8, 8), torch.tensor([[0.1, 0.2, 0.4, 0.6]]))
    torch.testing.assert_close(box, torch.tensor([[0.6, 0.2, 0.9, 0.6]]))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([["x0", "y1"]], "'x0' and 'y1' are on different axes"),
        ([["x0", "age"]], "'x0' and 'age' are on different axes"),
        ([["x0", "x9"]], "no column 'x9'"),
        ([["*0", "*9"]], "no column 'x9'"),
        ([["x0", "x1"], ["x1", "x0"]], "'x1' is in two pairs"),
        ([["x0", "x0"]], "'x0' is in two pairs"),
        ([["x0"]], "a pair is two names"),
        (["x0,x1"], "a pair is two names"),
    ],
)
def test_pairs_that_do_not_fit(pairs: list[list[str]], message: str) -> None:
    with pytest.raises(td.TensorDropoutError, match=message):
        mirror_columns(["x0", "y0", "x1", "y1", "age"], EYES, pairs)


def test_pairs_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text("\ufeff*0, *1\n\nx2,x3\n", encoding="utf-8")
    assert read_pairs(path) == [["*0", "*1"], ["x2", "x3"]]
    path.write_text("x0;x1\n", encoding="utf-8")
    with pytest.raises(td.TensorDropoutError, match=r"line 1 is 'x0;x1'; two names are expected"):
        read_pairs(path)
    with pytest.raises(td.TensorDropoutError, match="cannot be read"):
        read_pairs(tmp_path / "none.csv")
