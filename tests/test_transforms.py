"""Copies, pickles, torch.func transforms and derivatives of the layers; turns, zooms and contrast of batches."""

import copy
import io
import math
import pickle
import re

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import count_distinct, every_format, every_pair, make_input, make_layer
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers import laws
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


def pickle_copy(layer):
    return pickle.loads(pickle.dumps(layer))


def torch_save_copy(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": pickle_copy, "torch.save": torch_save_copy}
every_copy = pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES.keys())


@every_copy
@every_pair
def test_a_copy_is_equal_and_independent(make_copy, format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, scaling="paper")
    x = make_input(layer)
    layer(x).sum().backward()
    twin = make_copy(layer)
    assert repr(twin) == repr(layer)
    assert twin.training
    expected = seeded(layer, x)
    assert_close(seeded(twin, x), expected, rtol=0, atol=0)
    assert_close(twin.eval()(x), layer.eval()(x), rtol=0, atol=0)

    twin.dropout.theta = 0.1
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert layer.dropout.theta == torch.tensor(0.7)
    assert_close(seeded(layer.train(), x), expected, rtol=0, atol=0)


class KeepFirst:
    """A law of one's own: always the first rank alone."""

    def draw(self, shape, theta, *, device):
        return (torch.arange(shape[-1], device=device) == 0).float().expand(shape)

    def mean(self, R, theta):
        return torch.ones(R, dtype=torch.float64, device=theta.device)

    def second_moment(self, R, theta):
        return None

    def support(self, R, theta):
        return None


@every_copy
@every_format
def test_a_copy_keeps_a_law_of_ones_own(make_copy, format):
    layer = make_layer(format, law=KeepFirst())
    x = make_input(layer)
    assert_close(make_copy(layer)(x), layer(x))
    assert not torch.allclose(layer(x), layer.eval()(x))


@every_copy
def test_a_copy_with_a_registered_law_can_be_saved(make_copy, tmp_path, monkeypatch):
    monkeypatch.setattr(laws, "_REGISTERED", {})
    td.register_law("keep-first", KeepFirst())
    layer = make_layer("cp", law="keep-first")
    td.save(make_copy(layer), tmp_path / "copy.safetensors")
    assert repr(td.load(tmp_path / "copy.safetensors")) == repr(layer)


# torch.func


def one_sample(layer):
    """The layer as a function of its parameters and a single sample."""
    return lambda parameters, x: functional_call(layer, parameters, (x.unsqueeze(0),)).squeeze(0)


def detached_parameters(layer):
    return {name: parameter.detach() for name, parameter in layer.named_parameters()}


def sample_loss(layer):
    function = one_sample(layer)
    return lambda parameters, x: function(parameters, x).square().sum()


@every_pair
def test_vmap_draws_a_mask_for_each_sample_or_one_for_all(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5)
    x = make_input(layer, batch=1).expand(30, *layer.input_shape)
    function, parameters = one_sample(layer), detached_parameters(layer)
    different = vmap(function, in_dims=(None, 0), randomness="different")(parameters, x)
    assert count_distinct(different) > 1
    same = seeded(vmap(function, in_dims=(None, 0), randomness="same"), parameters, x)
    assert_close(same, seeded(function, parameters, x[0]).expand_as(same))


@every_pair
def test_vmap_over_samples_has_the_mean_of_eval(format, law, per_sample):
    shape = {"input_shape": (4, 4), "output_shape": 4, "rank": 4}
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.6, **shape)
    x = make_input(layer, batch=1)
    function, parameters = one_sample(layer), detached_parameters(layer)
    draws = vmap(function, in_dims=(None, 0), randomness="different")(parameters, x.expand(5000, *layer.input_shape))
    expected = layer.eval()(x)[0].detach()
    assert ((draws.mean(dim=0) - expected).abs() < 5 * draws.std(dim=0) / len(draws) ** 0.5).all()


@every_pair
def test_vmap_over_an_ensemble_gives_each_member_its_theta(format, law, per_sample):
    thetas = (0.3, 0.6, 1.0)
    layers = [
        make_layer(format, law=law, per_sample=per_sample, theta=theta, scaling="paper", seed=seed).eval()
        for seed, theta in enumerate(thetas)
    ]
    x = make_input(layers[0])
    state = stack_module_state(layers)
    outputs = vmap(lambda *state: functional_call(layers[0], state, (x,)))(*state)
    assert_close(outputs, torch.stack([layer(x) for layer in layers]))


@every_pair
def test_per_sample_gradients_agree_with_a_loop(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=torch.float64)
    x = make_input(layer)
    loss, parameters = sample_loss(layer), detached_parameters(layer)
    gradients = seeded(vmap(grad(loss), in_dims=(None, 0), randomness="same"), parameters, x)
    for k, sample in enumerate(x):
        layer.zero_grad()
        seeded(layer, sample.unsqueeze(0)).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert_close(gradients[name][k], parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@every_pair
def test_per_sample_gradients_differ_where_the_masks_do(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5)
    x = make_input(layer, batch=1).expand(30, *layer.input_shape)
    loss, parameters = sample_loss(layer), detached_parameters(layer)
    gradients = vmap(grad(loss), in_dims=(None, 0), randomness="different")(parameters, x)
    assert all(count_distinct(gradient) > 1 for gradient in gradients.values())


# Derivatives


class UnderMasks(nn.Module):
    """A layer under given masks."""

    def __init__(self, layer, masks):
        super().__init__()
        self.layer, self.masks = layer, masks

    def forward(self, x):
        return self.layer.regress(x, self.masks)


@every_pair
def test_first_and_second_derivatives_under_fixed_masks(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=torch.float64, small=True)
    thinned = UnderMasks(layer, layer.draw_masks(batch=2 if per_sample else None))
    names, parameters = zip(*thinned.named_parameters(), strict=True)
    inputs = (make_input(layer, batch=2).requires_grad_(), *parameters)

    def function(x, *parameters):
        return functional_call(thinned, dict(zip(names, parameters, strict=True)), (x,))

    assert gradcheck(function, inputs, fast_mode=True)
    assert gradgradcheck(function, inputs, fast_mode=True)


@every_format
def test_every_entry_of_the_jacobian_under_fixed_masks(format):
    layer = make_layer(format, dtype=torch.float64, small=True)
    x = make_input(layer, batch=2).requires_grad_()
    with td.fixed_masks(layer):
        assert gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


# Augmentation: turns, zooms and contrast of whole batches


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
