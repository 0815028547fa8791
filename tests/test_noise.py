"""Corruptions: the noise that was asked for, against known moments and SciPy, and what every family must keep."""

from __future__ import annotations

import inspect
import itertools
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness import noise
from tensor_dropout.robustness.noise import (
    CORRUPTIONS,
    UNBOUNDED,
    add_bias_field,
    add_gaussian,
    add_rician,
    add_shot,
    add_speckle,
    blur,
    change_brightness,
    change_contrast,
    measure_snr,
    occlude,
    pixelate,
    salt_and_pepper,
    suitable,
)
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.data.base import StandardizeImages

BYTES = (0.0, 255.0)
SIZES = {1: (200,), 2: (24, 20), 3: (12, 10, 14)}
FAMILIES = list(CORRUPTIONS.values())
BY_NAME = {"ids": lambda value: getattr(value, "name", None)}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw_images(rank, batch=32, channels=2, dtype=torch.float32, bounds=BYTES):
    """Smooth random images that fill their bounds: (batch, channels, *size)."""
    size = SIZES[rank]
    mode = ("linear", "bilinear", "trilinear")[rank - 1]
    coarse = torch.rand(batch, channels, *[max(2, cells // 4) for cells in size], generator=seeded(5))
    images = F.interpolate(coarse, size=size, mode=mode, align_corners=True).double()
    low, high = images.amin(), images.amax()
    unit = (images - low) / (high - low)
    return (bounds[0] + (bounds[1] - bounds[0]) * unit).clamp(*bounds).to(dtype)


# Gaussian noise and the ratio of variances.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(40_000,), (200, 200), (34, 34, 35)])
@pytest.mark.parametrize("snr", [0.25, 1, 10.0, 64.0])
def test_gaussian_has_the_snr_that_was_asked_for(snr, size, dtype):
    scales = torch.tensor([0.5, 1.0, 2.0, 2.0]).view(-1, 1, *[1] * len(size))
    x = (scales * (torch.randn(4, 3, *size) + 0.5)).to(dtype)
    noisy = add_gaussian(x, snr, seeded())
    assert noisy.dtype == dtype
    assert measure_snr(x, noisy) == pytest.approx(snr, rel=0.01)
    for clean, changed in zip(x.double(), noisy.double(), strict=True):  # each by its own variance, not the batch's
        added = changed - clean
        assert float(clean.var() / added.var()) == pytest.approx(snr, rel=0.025)
        assert abs(float(added.mean())) < 0.02 * float(added.std())


def test_gaussian_is_white_and_normal():
    places = torch.arange(200, dtype=torch.float64)
    x = (((places[:, None] + places) % 2) * 2 - 1).expand(1, 3, 200, 200)  # of 1 and -1
    added = (add_gaussian(x, 4.0, seeded()) - x).squeeze(0)
    standard = added / added.std()
    assert float(standard.pow(4).mean()) == pytest.approx(3, abs=0.1)
    assert abs(float((standard[:, 1:] * standard[:, :-1]).mean())) < 0.01
    assert abs(float((standard[:, :, 1:] * standard[:, :, :-1]).mean())) < 0.01
    assert abs(float((standard[1:] * standard[:-1]).mean())) < 0.02


def test_gaussian_is_the_papers_after_standardization():
    """On inputs of variance 1 the noise has variance 1 / SNR, whatever the stored gain."""
    x = StandardizeImages()(draw_images(2))
    added = add_gaussian(x, 4.0, seeded()) - x
    expected = torch.randn(x.shape, generator=seeded()) / 4.0**0.5
    torch.testing.assert_close(added, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [0.1, 1 / 3, 200.7, -7.77e3])
@pytest.mark.parametrize("size", [(7,), (33, 57), (11, 16, 21)])
def test_a_constant_example_has_no_signal_and_gets_no_noise(value, size):
    x = torch.full((3, 3, *size), value)
    assert torch.equal(add_gaussian(x, 1.0, seeded()), x)
    torch.testing.assert_close(add_rician(x, 1.0, seeded(), low=min(value, 0.0)), x)


def test_measured_snr_is_a_ratio_of_averages_over_examples():
    clean = torch.tensor([[[-1.0, 1.0]], [[-3.0, 3.0]], [[5.0, 5.0]]])  # variances 1, 9, 0
    noisy = clean + torch.tensor([[[0.0, 0.0]], [[2.0, -2.0]], [[1.0, 1.0]]])  # powers 0, 4, 1
    assert measure_snr(clean, noisy) == pytest.approx(10 / 5)
    assert measure_snr(clean, clean) == math.inf
    assert measure_snr(clean.half(), noisy.half()) == pytest.approx(10 / 5)
    with pytest.raises(TensorDropoutError, match=r"measure_snr: .* same shape, not \(3, 1, 2\) and \(1, 1, 2\)"):
        measure_snr(clean, noisy[:1])


# Rician noise.


@pytest.mark.parametrize("low", [0.0, -5.0, 100.0])
@pytest.mark.parametrize("snr", [0.5, 2.0, 16.0])
def test_rician_has_its_known_moments(snr, low):
    amplitude = torch.tensor([0.0, 40.0]).repeat_interleave(100_000).view(1, 1, -1).double()
    std = (400.0 / snr) ** 0.5  # the variance of 0 and 40 in equal parts is 400
    magnitude = add_rician(low + amplitude, snr, seeded(), low) - low
    dark, bright = magnitude.view(2, -1)
    assert float(magnitude.min()) >= 0
    assert float(dark.square().mean()) == pytest.approx(2 * std**2, rel=0.01)
    assert float(bright.square().mean()) == pytest.approx(40**2 + 2 * std**2, rel=0.01)
    assert float(dark.mean()) == pytest.approx(std * math.sqrt(math.pi / 2), rel=0.01)
    assert float(dark.var()) == pytest.approx((2 - math.pi / 2) * std**2, rel=0.015)


def test_rician_is_nearly_gaussian_where_the_signal_is_strong():
    x = (1000 + torch.randn(1, 1, 200_000)).double()
    added = add_rician(x, 0.1, seeded()) - x
    assert float(added.var()) == pytest.approx(10, rel=0.01)
    assert abs(float(added.mean())) < 0.02


def test_rician_follows_its_distribution():
    stats = pytest.importorskip("scipy.stats")
    x = torch.tensor([0.0, 4.0]).repeat_interleave(20_000).view(1, 1, -1).double()  # variance 4
    bright = add_rician(x, 1.0, seeded()).view(2, -1)[1]
    assert stats.kstest(bright.numpy(), stats.rice(b=4 / 2, scale=2).cdf).pvalue > 0.01


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_rician_takes_scans_without_bounds(tmp_path, dtype):
    """They are kept at mean 0 and variance 1; the noise must be that of their intensities, whose 0 is no signal."""
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    random = np.random.default_rng(0)
    volumes = {}
    for k in range(4):
        volume = np.zeros((10, 12, 10))
        volume[2:8, 2:10, 3:9] = random.uniform(300, 900, (6, 8, 6))
        volumes[f"sub-{k}_T1w"] = volume.astype(dtype)
        nibabel.save(nibabel.Nifti1Image(volume.astype(dtype), np.eye(4)), tmp_path / f"sub-{k}_T1w.nii.gz")
    (tmp_path / "participants.tsv").write_text("participant_id\tage\n" + "".join(f"sub-{k}\t{k}\n" for k in range(4)))
    data = load_data("nifti", root=tmp_path, test=0, validation=0)
    assert (data.train.inputs.dtype, data.bounds) == (torch.float16, None)
    assert "rician" in suitable(3, bounded=False)
    noisy = CORRUPTIONS["rician"].apply(data.train.inputs.float(), 2.0, seeded(), UNBOUNDED)
    stored = torch.stack([torch.from_numpy(volumes[name]) for name in data.train.names]).unsqueeze(1).double()
    measured = CORRUPTIONS["rician"].apply(stored.float(), 2.0, seeded(), (0.0, math.inf)).double()
    over = {"dim": (1, 2, 3, 4), "keepdim": True}
    expected = (measured - stored.mean(**over)) / stored.std(**over, correction=0)
    torch.testing.assert_close(noisy.double(), expected, atol=5e-3, rtol=0)
    assert bool((noisy.amin((1, 2, 3, 4)) >= data.train.inputs.float().amin((1, 2, 3, 4))).all())


# The other families, each against its own formula.


@pytest.mark.parametrize("amount", [0.0, 0.01, 0.2, 1.0])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_salt_and_pepper_hit_the_share_in_equal_parts_and_all_channels(amount, rank):
    size = {1: (60_000,), 2: (250, 240), 3: (40, 50, 30)}[rank]
    x = torch.rand(2, 3, *size) * 0.5 + 0.25
    noisy = salt_and_pepper(x, amount, seeded(), (0.0, 1.0))
    low, high = (noisy == 0).float(), (noisy == 1).float()
    for hit in (low, high):
        assert float(hit.mean()) == pytest.approx(amount / 2, abs=3 * (amount / 120_000) ** 0.5)
        assert torch.equal(hit.amin(1), hit.amax(1))
    untouched = (low + high) == 0
    assert torch.equal(noisy[untouched], x[untouched])


def test_shot_noise_keeps_the_mean_and_has_the_variance_of_counts():
    x = torch.tensor([10.0, 60.0, 110.0]).repeat_interleave(100_000).view(1, 1, -1).double()
    noisy = add_shot(x, 20, seeded(), (10.0, 110.0)).view(3, -1)
    assert torch.equal(noisy[0], x.view(3, -1)[0])
    for share, got in ((0.5, noisy[1]), (1.0, noisy[2])):
        assert float(got.mean()) == pytest.approx(10 + 100 * share, rel=0.005)
        assert float(got.var()) == pytest.approx(100**2 * share / 20, rel=0.02)


def test_speckle_has_the_same_relative_std_everywhere():
    x = torch.tensor([3.0, 5.0, 103.0]).repeat_interleave(100_000).view(1, 1, -1).double()
    noisy = add_speckle(x, 0.3, seeded(), low=3.0).view(3, -1)
    assert torch.equal(noisy[0], x.view(3, -1)[0])
    for amplitude, got in ((2, noisy[1]), (100, noisy[2])):
        assert float(got.mean() - 3) == pytest.approx(amplitude, rel=0.01)
        assert float(got.std()) == pytest.approx(0.3 * amplitude, rel=0.01)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("sigma", [0.1, 0.5, 1.0, 2.3, 9.0])
def test_blur_is_scipys(rank, sigma):
    ndimage = pytest.importorskip("scipy.ndimage")
    x = torch.rand(2, 3, *SIZES[rank], dtype=torch.float64)
    expected = ndimage.gaussian_filter(x.numpy(), (0, 0, *[sigma] * rank), mode="nearest", truncate=4.0)
    torch.testing.assert_close(blur(x, sigma), torch.from_numpy(expected))
    torch.testing.assert_close(blur(x.float(), sigma), torch.from_numpy(expected).float())
    strided = x.transpose(2, -1).contiguous().transpose(2, -1)
    torch.testing.assert_close(blur(strided, sigma), torch.from_numpy(expected))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_blur_keeps_constants_exactly(rank, dtype):
    x = torch.tensor([0.1, 200.7]).view(1, 2, *[1] * rank).expand(2, 2, *SIZES[rank]).to(dtype)
    assert torch.equal(blur(x, 1.7), x)


@pytest.mark.parametrize("size", [(41,), (41, 43), (21, 23, 25)])
def test_blur_keeps_the_mass_of_the_interior_in_its_place(size):
    x = torch.zeros(1, 2, *size, dtype=torch.float64)
    x[(0, 1, *[cells // 2 for cells in size])] = 7.0
    blurred = blur(x, 1.5)
    assert float(blurred[0, 0].abs().max()) == 0  # no channel leaks into another
    assert float(blurred.sum()) == pytest.approx(7)
    for axis, cells in enumerate(size, start=2):
        offsets = torch.arange(cells).view([-1 if i == axis else 1 for i in range(x.ndim)]) - cells // 2
        assert float((blurred * offsets).sum()) == pytest.approx(0, abs=1e-9)
        assert float((blurred * offsets**2).sum() / 7) == pytest.approx(1.5**2, rel=0.01)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 3, 4.0, 1000])
def test_pixelate_takes_the_mean_of_every_block(rank, block):
    x = torch.rand(2, 3, *SIZES[rank], dtype=torch.float64)
    expected = x
    for axis, cells in enumerate(x.shape[2:], start=2):
        parts = [part.mean(axis, keepdim=True).expand_as(part) for part in expected.split(int(block), axis)]
        expected = torch.cat(parts, axis)
        assert expected.shape[axis] == cells
    torch.testing.assert_close(pixelate(x, block), expected)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5, 1.0])
def test_occlusion_is_one_box_at_a_random_place(rank, share):
    size = SIZES[rank]
    x = torch.rand(64, 2, *size) + 1
    covered = occlude(x, share, seeded(), low=-3.0) == -3
    assert torch.equal(covered[:, 0], covered[:, 1])
    edges = [max(1, round(cells * share ** (1 / rank))) for cells in size]
    assert bool((covered[:, 0].flatten(1).sum(1) == math.prod(edges)).all())
    for axis, edge in enumerate(edges, start=1):
        shadow = covered.movedim(axis + 1, -1).flatten(1, -2).any(1)  # (64, cells): where the box is on this axis
        assert bool((shadow.sum(1) == edge).all())
        starts = shadow.int().argmax(1)
        rows = starts[:, None] + torch.arange(edge)
        assert bool(shadow.gather(1, rows).all())  # in one piece
        assert len(starts.unique()) > 1 or edge == size[axis - 1]


def test_occlusion_reaches_every_place():
    covered = occlude(torch.ones(500, 1, 4, 4), 0.25, seeded()) == 0
    assert bool(covered.any(0).all())


def test_brightness_and_contrast_follow_their_formulas():
    x = torch.tensor([[[0.0, 1.0], [2.0, 5.0]], [[1.0, 1.0], [1.0, 1.0]]])
    assert torch.equal(change_brightness(x, -0.25, (0.0, 8.0)), x - 2)
    assert torch.equal(change_contrast(x, 0.5)[0], torch.tensor([[1.0, 1.5], [2.0, 3.5]]))
    assert torch.equal(change_contrast(x, 0.5)[1], x[1])
    assert torch.equal(change_contrast(x, 0.0), x.mean((1, 2), keepdim=True).expand_as(x))


def test_standardization_undoes_contrast():
    """What the registry's documentation says, so that nobody reads it as robustness of the network."""
    x, standardize = draw_images(2), StandardizeImages()
    changed = CORRUPTIONS["contrast"].apply(x, 0.3, seeded(), BYTES)
    torch.testing.assert_close(standardize(changed), standardize(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_bias_field_is_smooth_one_per_example_and_as_strong_as_asked(rank):
    gain = add_bias_field(torch.ones(16, 2, *SIZES[rank], dtype=torch.float64), 0.4, seeded()).log()
    torch.testing.assert_close(gain[:, 0], gain[:, 1])
    torch.testing.assert_close(gain.flatten(1).abs().amax(1), torch.full((16,), 0.4, dtype=torch.float64))
    torch.testing.assert_close(gain.flatten(1).mean(1), torch.zeros(16, dtype=torch.float64))
    assert float((gain[0] - gain[1]).abs().max()) > 0.05
    for axis in range(2, gain.ndim):
        spectrum = torch.fft.rfft(torch.cat([gain, gain.flip(axis)], axis), dim=axis).abs()  # even: cosines only
        assert float(spectrum.narrow(axis, 3, spectrum.shape[axis] - 3).max()) < 1e-9
    dark = add_bias_field(torch.full((2, 1, *SIZES[rank]), 9.0), 0.4, seeded(), low=9.0)
    assert torch.equal(dark, torch.full_like(dark, 9.0))
    assert torch.equal(add_bias_field(torch.ones(2, 1, *[1] * rank), 0.4, seeded()), torch.ones(2, 1, *[1] * rank))


# What every corruption must keep.


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_every_level_keeps_the_contract(corruption, rank):
    for bounds in (BYTES, (-1.0, 1.0)):
        x = draw_images(rank, batch=4, bounds=bounds)
        before = x.clone()
        for level in corruption.levels:
            generator = seeded(3)
            y = corruption.apply(x, level, generator, bounds)
            assert torch.equal(x, before)
            assert y.data_ptr() != x.data_ptr()
            assert (y.shape, y.dtype, y.device) == (x.shape, x.dtype, x.device)
            assert bool(y.isfinite().all())
            assert not torch.equal(y, x)
            assert torch.equal(y, corruption.apply(x, level, seeded(3), bounds))
            assert torch.equal(y, corruption.apply(x, level, seeded(4), bounds)) != corruption.random
            assert torch.equal(generator.get_state(), seeded(3).get_state()) != corruption.random
            if corruption.space == "stored":
                assert float(y.min()) >= bounds[0]
                assert float(y.max()) <= bounds[1]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_every_family_takes_other_precisions(corruption, dtype):
    x = draw_images(3, batch=3, dtype=dtype)
    for level in corruption.levels:
        y = corruption.apply(x, level, seeded(), BYTES)
        assert (y.shape, y.dtype) == (x.shape, dtype)
        assert bool(y.isfinite().all())
        if dtype != torch.float64:
            single = corruption.apply(x.float(), level, seeded(), BYTES)
            torch.testing.assert_close(y, single.to(dtype))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_severity_grows_with_the_level(corruption, rank):
    x = draw_images(rank)
    changes = [float((corruption.apply(x, level, seeded(), BYTES) - x).square().mean()) for level in corruption.levels]
    assert changes[0] > 0
    assert all(milder < severer for milder, severer in itertools.pairwise(changes)), changes


@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_no_corruption_touches_the_default_generator(corruption):
    x = draw_images(2, batch=2)
    before = torch.get_rng_state()
    corruption.apply(x, corruption.levels[0], seeded(), BYTES)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_small_and_odd_sizes_pass(corruption):
    for shape in ((1, 1, 1), (2, 3, 1, 5), (1, 1, 2, 1, 3)):
        x = torch.rand(shape) * 255
        for level in corruption.levels:
            y = corruption.apply(x, level, seeded(), BYTES)
            assert y.shape == shape
            assert bool(y.isfinite().all())


@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_entries_describe_themselves(corruption):
    assert CORRUPTIONS[corruption.name] is corruption
    assert len(corruption.levels) == 5
    assert corruption.unit
    assert "\n" not in corruption.summary
    assert 10 < len(corruption.summary) < 100
    assert corruption.space in ("input", "stored")
    assert set(corruption.axes) <= {1, 2, 3}
    assert "change" not in repr(corruption)


def test_gaussian_takes_every_snr_of_a_curve_and_ignores_bounds():
    x = torch.randn(2, 1, 100, 100)
    for snr in (0.25, 10, 100.0):
        y = CORRUPTIONS["gaussian"].apply(x, snr, seeded(), (0.0, 1.0))
        assert torch.equal(y, add_gaussian(x, snr, seeded()))
        assert measure_snr(x, y) == pytest.approx(snr, rel=0.03)


def test_suitable_knows_axes_and_bounds():
    assert suitable(3, bounded=True) == list(CORRUPTIONS)
    assert set(CORRUPTIONS) - set(suitable(2, bounded=True)) == {"rician", "bias_field"}
    for rank in (1, 2, 3):
        for name in suitable(rank, bounded=False):
            corruption = CORRUPTIONS[name]
            corruption.apply(draw_images(rank, batch=2), corruption.levels[2], seeded(), UNBOUNDED)
    for rank in (0, 4, "2"):
        with pytest.raises(TensorDropoutError, match="suitable: spatial_rank must be 1, 2 or 3"):
            suitable(rank, bounded=True)


# Bad input.


@pytest.mark.parametrize("name", [c.name for c in FAMILIES if c.needs_bounds])
def test_families_that_need_bounds_say_so(name):
    with pytest.raises(TensorDropoutError, match=r"bound.*e\.g\. (0|\(0, 255\)).*|finite bounds"):
        CORRUPTIONS[name].apply(draw_images(2, batch=1), CORRUPTIONS[name].levels[0], seeded(), UNBOUNDED)


@pytest.mark.parametrize("name", ["rician", "speckle", "occlusion", "bias_field"])
def test_a_lower_bound_is_enough_for_some(name):
    y = CORRUPTIONS[name].apply(draw_images(3, batch=1), CORRUPTIONS[name].levels[-1], seeded(), (0.0, math.inf))
    assert float(y.min()) >= 0


BAD_LEVELS = {
    "gaussian": ("snr", [0, -1.0, math.inf, math.nan, None, "4", True]),
    "rician": ("snr", [0, -1.0, math.inf, math.nan, None]),
    "salt_and_pepper": ("amount", [-0.1, 1.1, math.nan, None]),
    "shot": ("photons", [0, -3, math.inf, math.nan, "many"]),
    "speckle": ("std", [-0.1, math.inf, math.nan, None]),
    "blur": ("sigma", [0, -1.0, math.inf, math.nan, None]),
    "pixelate": ("block", [0, -2, 1.5, math.inf, math.nan, None]),
    "occlusion": ("share", [0, -0.1, 1.1, math.nan, None]),
    "brightness": ("shift", [-1.1, 1.1, math.nan, None]),
    "contrast": ("factor", [-0.1, math.inf, math.nan, None]),
    "bias_field": ("strength", [-0.1, math.inf, math.nan, None]),
}


@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_bad_levels_are_refused(corruption):
    parameter, values = BAD_LEVELS[corruption.name]
    for value in values:
        with pytest.raises(TensorDropoutError) as caught:
            corruption.apply(draw_images(2, batch=1), value, seeded(), BYTES)
        message = str(caught.value)
        assert f": {parameter} must be " in message
        assert "e.g. " in message
        assert message.endswith(f", not {value!r}")


@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_bad_batches_are_refused(corruption):
    level = corruption.levels[0]
    for x in (torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(4, 4), torch.zeros(1, 1, 2, 2, 2, 2)):
        with pytest.raises(TensorDropoutError, match=rf"{corruption.name}: a float batch .* not torch\."):
            corruption.apply(x, level, seeded(), BYTES)
    for value in (math.nan, math.inf):
        with pytest.raises(TensorDropoutError, match=f"{corruption.name}: finite values"):
            corruption.apply(torch.full((1, 1, 4, 4), value), level, seeded(), BYTES)
    if corruption.space == "stored":
        for value in (-1.0, 256.0):
            with pytest.raises(TensorDropoutError, match=rf"within the bounds \(0\.0, 255\.0\).*not {value:g} to"):
                corruption.apply(torch.full((1, 1, 4, 4), value), level, seeded(), BYTES)
        for bounds in ((1.0, 0.0), (math.nan, 1.0), (0.0, 0.0)):
            with pytest.raises(TensorDropoutError, match="low < high"):
                corruption.apply(torch.zeros(1, 1, 4, 4), level, seeded(), bounds)


def test_functions_refuse_bad_batches_and_bounds_by_themselves():
    arguments = {"generator": seeded(), "bounds": BYTES}
    functions = [add_gaussian, add_rician, salt_and_pepper, add_shot, add_speckle, blur, pixelate, occlude]
    functions += [change_brightness, change_contrast, add_bias_field]
    for function in functions:
        names = list(inspect.signature(function).parameters)
        others = {name: arguments[name] for name in names[2:] if name in arguments}
        with pytest.raises(TensorDropoutError, match=f"{function.__name__}: a float batch"):
            function(torch.zeros(4, 4), 1, **others)
        if "low" in names:
            with pytest.raises(TensorDropoutError, match=f"{function.__name__}: low, the lower bound, must be finite"):
                function(torch.zeros(1, 1, 4), 1, low=-math.inf, **others)
        if "bounds" in names:
            with pytest.raises(TensorDropoutError, match=f"{function.__name__}: finite bounds"):
                function(torch.zeros(1, 1, 4), 1, **(others | {"bounds": (5.0, 5.0)}))
    with pytest.raises(TensorDropoutError, match="add_shot: finite values within"):
        add_shot(torch.full((1, 1, 4), -1.0), 10, seeded(), BYTES)


def test_every_public_function_is_documented_with_an_example():
    functions = {name: getattr(noise, name) for name in noise.__all__ if inspect.isfunction(getattr(noise, name))}
    assert len(functions) == 14
    for name, function in functions.items():
        assert ">>> " in inspect.getdoc(function), name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("corruption", FAMILIES, **BY_NAME)
def test_a_cpu_generator_gives_the_same_corruption_on_a_gpu(corruption):
    for rank in (1, 2, 3):
        x = draw_images(rank, batch=4)
        for level in corruption.levels:
            expected = corruption.apply(x, level, seeded(), BYTES)
            got = corruption.apply(x.cuda(), level, seeded(), BYTES)
            assert got.is_cuda
            torch.testing.assert_close(got.cpu(), expected, atol=1e-3, rtol=1e-5)
            there = torch.Generator(device="cuda").manual_seed(1)
            assert corruption.apply(x.cuda(), level, there, BYTES).is_cuda
