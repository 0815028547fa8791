"""Turns, zooms and contrast of whole batches, drawn anew for every image."""

import copy
import math
import re

import pytest
import torch
from torch.testing import assert_close

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.augment import (
    RandomAffine,
    RandomContrast,
    augment_volumes,
    bend_contrast,
    make_rotations,
    warp_images,
)


def seeded(function, *arguments, seed=3, **options):
    torch.manual_seed(seed)
    return function(*arguments, **options)


PLANES = [(1, 2), (2, 0), (0, 1)]  # that a turn about the first, second, third axis of a volume moves


def centred(size):
    """The pixels' places from the centre, (axes, *size)."""
    lines = [torch.arange(cells) - (cells - 1) / 2 for cells in size]
    return torch.stack(torch.meshgrid(*lines, indexing="ij"))


def draw_blobs(size, centres, width=1.5):
    """One channel per centre, (1, len(centres), *size)."""
    return torch.stack(
        [
            torch.exp(-(centred(size) - torch.tensor(centre).view(-1, *[1] * len(size))).square().sum(0) / 2 / width**2)
            for centre in centres
        ]
    )[None]


def find_blobs(image):
    """The centre of mass of every channel of one image, (channels, axes)."""
    mass = image[0].flatten(1)
    return mass @ centred(image.shape[2:]).flatten(1).T / mass.sum(1, keepdim=True)


@pytest.mark.parametrize("fill", ["zero", "edge"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_quarter_turn_of_a_cube_is_rot90(axis, fill):
    volumes = torch.randn(2, 3, 6, 6, 6)
    angles = torch.zeros(2, 3)
    angles[0, axis] = math.pi / 2  # the second volume stays
    turned = warp_images(volumes, make_rotations(angles), torch.zeros(2, 3), fill)
    first, second = PLANES[axis]
    assert_close(turned[0], volumes[0].rot90(-1, dims=(first + 1, second + 1)), atol=1e-5, rtol=0)
    assert_close(turned[1], volumes[1], atol=1e-6, rtol=0)


def test_a_quarter_turn_of_a_picture_is_rot90():
    pictures = torch.randn(2, 3, 7, 7)
    turned = warp_images(pictures, make_rotations(torch.tensor([[math.pi / 2], [-math.pi / 2]])), torch.zeros(2, 2))
    assert_close(turned[0], pictures[0].rot90(-1, dims=(1, 2)), atol=1e-5, rtol=0)
    assert_close(turned[1], pictures[1].rot90(1, dims=(1, 2)), atol=1e-5, rtol=0)


@pytest.mark.parametrize("angles", [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5), (0.4, -0.3, 0.5)])
def test_a_turn_keeps_distances_where_the_sizes_differ(angles):
    size, centres = (24, 30, 44), [(0.0, 0.0, 0.0), (4.0, 0.0, 0.0), (0.0, 8.0, 0.0), (0.0, 0.0, 14.0)]
    rotation = make_rotations(torch.tensor([angles]))
    found = find_blobs(warp_images(draw_blobs(size, centres), rotation, torch.zeros(1, 3)))
    assert_close(found, torch.tensor(centres) @ rotation[0], atol=0.02, rtol=0)  # out[p] = image[R p]: at Rᵀ c
    assert_close(
        torch.cdist(found, found), torch.cdist(torch.tensor(centres), torch.tensor(centres)), atol=0.02, rtol=0
    )


def test_a_zoom_enlarges_about_the_centre_and_a_shift_is_a_share_of_each_size():
    size, centres = (24, 40), [(0.0, 0.0), (4.0, -6.0)]
    matrix, shift = torch.eye(2)[None] / 1.25, torch.tensor([[0.125, -0.1]])
    found = find_blobs(warp_images(draw_blobs(size, centres), matrix, shift))
    expected = 1.25 * (torch.tensor(centres) - torch.tensor([3.0, -4.0]))
    assert_close(found, expected, atol=0.02, rtol=0)


def test_the_border_is_filled_with_zero_or_with_the_edge():
    volume = torch.randn(1, 1, 8, 8, 8)
    shift = torch.tensor([[0.25, 0.0, 0.0]])  # two voxels: out[i] = volume[i + 2]
    for fill, outside in (("zero", torch.zeros(8, 8)), ("edge", volume[0, 0, -1])):
        moved = warp_images(volume, torch.eye(3)[None], shift, fill)[0, 0]
        assert_close(moved[:6], volume[0, 0, 2:])
        assert_close(moved[6:], outside.expand(2, 8, 8))


@pytest.mark.parametrize("fill", ["zero", "edge"])
@pytest.mark.parametrize("size", [(7, 12), (5, 6, 11)])
def test_nothing_drawn_changes_nothing(size, fill):
    images = torch.rand(3, 2, *size, dtype=torch.float64)
    for change in (RandomAffine(0, 0, 0, fill=fill), RandomContrast(0)):
        assert_close(change(images), images, atol=1e-12, rtol=0)
        assert_close(change(images.float()), images.float(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("axes", [2, 3])
def test_draws_fill_their_ranges_and_no_more(axes):
    matrix, shift = RandomAffine(rotation=10, zoom=0.1, shift=0.05).draw(4000, axes)
    zoom = matrix.det() ** (-1 / axes)
    rotation = matrix * zoom[:, None, None]
    assert_close(rotation @ rotation.mT, torch.eye(axes).expand_as(matrix), atol=1e-5, rtol=0)
    last = torch.atan2(rotation[:, 1, 0], rotation[:, 0, 0]).rad2deg()  # the last turn, about the last axis
    for draws, low, high in ((last, -10, 10), (zoom, 0.9, 1.1), *((column, -0.05, 0.05) for column in shift.T)):
        places = (draws - low) / (high - low)
        assert -1e-5 < places.min() < 0.01
        assert 0.99 < places.max() < 1 + 1e-5
        assert abs(places.mean() - 0.5) < 0.03
        assert abs(places.var() - 1 / 12) < 0.01
    columns = torch.cat([last[:, None], zoom[:, None], shift], 1)
    assert (columns.T.corrcoef() - torch.eye(2 + axes)).abs().max() < 0.1


@pytest.mark.parametrize("exponent", [0.5, 0.8, 1.0, 1.7])
def test_contrast_keeps_the_background_the_order_and_the_typical_brightness(exponent):
    inside = torch.rand(1, 1, 6, 6, 6) + 0.5
    volume = torch.full((1, 1, 12, 12, 12), -0.7)
    volume[..., 3:9, 3:9, 3:9] += inside
    typical = (inside.square().sum() / inside.sum() - 0.7).item()
    volume[..., 3, 3, 3] = typical  # not quite, since it counts itself
    bent = bend_contrast(volume, torch.tensor([exponent]))
    assert torch.equal(bent[volume == -0.7], volume[volume == -0.7])
    assert bent[..., 3, 3, 3].item() == pytest.approx(typical, abs=0.01)
    assert (bent.flatten()[volume.flatten().argsort()].diff() >= 0).all()
    change = (bent - volume).abs().max()
    assert change < 1e-6 if exponent == 1 else change > 0.05
    wider = torch.nn.functional.pad(volume, (4, 4) * 3, value=-0.7)  # more background
    assert_close(bend_contrast(wider, torch.tensor([exponent]))[..., 4:-4, 4:-4, 4:-4], bent)
    louder = bend_contrast(3 * volume + 5, torch.tensor([exponent]))  # any gain and offset
    assert_close(louder, 3 * bent + 5, atol=1e-4, rtol=1e-4)


def test_contrast_draws_exponents_within_their_range_and_both_ways():
    images = torch.tensor([0.0, 1.0, 2.0]).expand(4000, 1, 3)
    bent = RandomContrast(0.25)(images)
    exponents = (bent[:, 0, 2] / bent[:, 0, 1]).log2()  # (2 / c)^γ / (1 / c)^γ = 2^γ
    assert 0.8 - 1e-4 < exponents.min() < 0.81
    assert 1.24 < exponents.max() < 1.25 + 1e-4
    assert abs(exponents.log().mean()) < 0.01


def test_a_constant_image_stays():
    images = torch.full((2, 1, 4, 4, 4), -3.0)
    assert torch.equal(RandomContrast(0.5)(images), images)
    assert_close(RandomAffine(30, 0.2, 0.2, fill="edge")(images), images)


STRONG = {
    "affine": RandomAffine(10, 0.1, 0.05),
    "edge": RandomAffine(10, 0.1, 0.05, fill="edge"),
    "contrast": RandomContrast(0.2),
    "strong": augment_volumes("here", "strong", 2),
}
every_change = pytest.mark.parametrize("change", STRONG.values(), ids=STRONG.keys())
every_size = pytest.mark.parametrize("size", [(9, 12), (6, 8, 10)], ids=["2-D", "3-D"])


@every_size
@every_change
def test_every_image_is_changed_by_its_own_draw_that_a_seed_repeats(change, size):
    images = torch.randn(1, 2, *size).expand(6, 2, *size)
    first = seeded(change, images)
    assert first.shape == images.shape
    assert len(torch.cat([images[:1], first]).unique(dim=0)) == 7
    assert not torch.equal(change(images), first)  # the next draw
    assert torch.equal(seeded(change, images), first)
    resting = copy.deepcopy(change).eval()
    assert resting(images) is images


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@every_change
def test_other_dtypes_are_changed_as_float32_is(change, dtype):
    images = torch.randn(2, 1, 12, 16, 20).to(dtype)
    expected = seeded(change, images.float()).to(dtype)
    found = seeded(change, images)
    assert found.dtype == dtype
    rounding = max(2 * torch.finfo(dtype).eps, 1e-5)  # between the changes, too
    assert_close(found, expected, atol=2 * rounding, rtol=2 * rounding)


@every_size
def test_strong_changes_trace_without_breaks_or_python_numbers(size):
    compiled = torch.compile(STRONG["strong"], backend="eager", fullgraph=True)
    images = torch.randn(3, 1, *size)
    assert_close(seeded(compiled, images), seeded(STRONG["strong"], images), rtol=0, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_strong_changes_are_drawn_anew_in_every_replay_of_a_cuda_graph():
    images = torch.randn(4, 1, 12, 16, 20, device="cuda")
    chain = STRONG["strong"]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        chain(images)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(images)
    graph.replay()
    first = out.clone()
    graph.replay()
    assert not torch.equal(first, out)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rotation": -1}, "rotation must be a number from 0 to 180, not -1"),
        ({"rotation": 181}, "rotation .* not 181"),
        ({"rotation": math.nan}, "rotation .* not nan"),
        ({"rotation": "10"}, "rotation .* not '10'"),
        ({"rotation": True}, "rotation .* not True"),
        ({"zoom": 1}, "zoom must be a number from 0 to 0.9, not 1"),
        ({"zoom": None}, "zoom .* not None"),
        ({"shift": 1.5}, "shift must be a number from 0 to 1, not 1.5"),
        ({"fill": "min"}, "fill must be one of zero, edge, not 'min'"),
    ],
)
def test_bad_turns_are_refused(options, words):
    with pytest.raises(TensorDropoutError, match=f"RandomAffine: {words}"):
        RandomAffine(**{"rotation": 10, "zoom": 0.1, "shift": 0.05, **options})


@pytest.mark.parametrize("strength", [-0.1, 1.1, math.inf, "0.2", None])
def test_bad_contrast_is_refused(strength):
    with pytest.raises(TensorDropoutError, match="RandomContrast: strength must be a number from 0 to 1, not "):
        RandomContrast(strength)


@pytest.mark.parametrize(
    "images", [torch.zeros(2, 1, 5), torch.zeros(2, 1, 4, 4, 4, 4), torch.zeros(2, 1, 4, 4, dtype=torch.uint8)]
)
def test_batches_that_cannot_be_turned_are_refused(images):
    with pytest.raises(
        TensorDropoutError, match=r"\(B, C, D, H, W\) is expected, not torch.* of shape \(2, 1, .*prepare"
    ):
        RandomAffine(10, 0.1, 0.05)(images)


def test_whole_numbers_are_not_bent():
    with pytest.raises(TensorDropoutError, match=r"floating-point images are expected, not torch.uint8; prepare"):
        RandomContrast(0.2)(torch.zeros(2, 1, 4, 4, dtype=torch.uint8))


def test_volumes_have_one_choice_of_changes():
    names = [type(change).__name__ for change in augment_volumes("here", "strong", 2)]
    assert names == ["RandomAffine", "RandomFlip", "RandomContrast"]
    assert repr(augment_volumes("here", "strong", 2)[0]) == (
        "RandomAffine(rotation=10.0, zoom=0.1, shift=0.05, fill='edge')"
    )
    assert augment_volumes("here", False, 2) is None
    small = {"n": 8, "size": (8, 10, 8)}
    assert repr(load_data("phantom", augment="strong", **small).augment) == repr(augment_volumes("here", "strong", 1))
    assert repr(load_data("phantom", **small).augment) == repr(augment_volumes("here", True, 1))
    for choice in ("weak", "", None, 1, 0):
        wanted = f"phantom: the option augment is of type bool | Literal['strong'], got {choice!r}"
        with pytest.raises(TensorDropoutError, match=re.escape(wanted)):
            load_data("phantom", augment=choice, **small)
