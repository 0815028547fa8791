"""Data sets by name, splits, normalisation, augmentation, and the two smallest sets: digits and synthetic."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import DATASETS, Data, StreamSplit, TensorSplit, describe_options, load_data, register_data
from tensor_dropout_lab.data.augment import RandomFlip, RandomShift, shift_images
from tensor_dropout_lab.data.base import (
    StandardizeChannels,
    StandardizeImages,
    bin_targets,
    deal_folds,
    hold_out,
    name_targets,
)
from tensor_dropout_lab.data.synthetic import draw_weight
from tensor_dropout_lab.extras import import_extra
from tensor_dropout_lab.training.config import resolve_config

if TYPE_CHECKING:
    from collections.abc import Sequence as Known  # what is not there when the options are read

# By name.


def test_every_data_set_has_a_loader_a_summary_and_documented_options():
    for name, source in DATASETS.items():
        assert callable(source.import_loader())
        assert 20 < len(source.summary) < 90
        for option, description in describe_options(name).items():
            assert description.meaning, f"{name}: {option} is not documented"
            assert repr(description.default) in str(description)


def test_simulated_data_sets_say_so_in_their_summary():
    built_in = {name: source for name, source in DATASETS.items() if source.function is None}
    assert [name for name, source in built_in.items() if "SIMULATED" in source.summary] == ["phantom", "synthetic"]


def load_ones(*, root=None, seed: int = 0, n: int = 3) -> Data:
    """Ones.

    Args:
        root: not used.
        seed: not used.
        n: how many.
    """
    part = TensorSplit(torch.ones(n, 1, 2, 2), torch.zeros(n, 2), [str(i) for i in range(n)])
    return Data("ones", "regression", part, None, None, (1, 2, 2), outputs=2, target="a, b")


def test_a_data_set_of_one_s_own_has_a_name(monkeypatch):
    monkeypatch.setattr("tensor_dropout_lab.data.DATASETS", dict(DATASETS))
    register_data("ones", load_ones)
    data = load_data("ones", root="anywhere", seed=3, n=5)
    assert (len(data.train), data.target_names, data.simulated) == (5, ["a", "b"], False)
    assert str(describe_options("ones")["n"]) == "how many (int; default 3)"
    register_data("ones", load_ones)  # a cell of a notebook, run again
    with pytest.raises(TensorDropoutError, match="'ones' is taken by another data set"):
        register_data("ones", lambda: load_ones())
    register_data("none", lambda: None)
    with pytest.raises(TensorDropoutError, match=r"its loader must return tensor_dropout_lab\.data\.Data, got None"):
        load_data("none")


@pytest.mark.parametrize(
    ("name", "loader", "message"),
    [
        ("digits", load_ones, "'digits' is taken"),
        ("", load_ones, "not empty"),
        ("mine", "load_ones", "needs a function that returns Data"),
        ("mine", lambda **options: None, r"options with names, got \*\*options"),
    ],
)
def test_what_is_no_data_set_is_refused(name, loader, message):
    with pytest.raises(TensorDropoutError, match=message):
        register_data(name, loader)
    assert "mine" not in DATASETS


def test_only_the_same_definition_takes_a_name_again(monkeypatch):
    monkeypatch.setattr("tensor_dropout_lab.data.DATASETS", dict(DATASETS))
    first = partial(load_ones, n=4)
    for name, loader, other in (("part", first, partial(load_ones, n=5)), ("short", lambda: 1, lambda: 2)):
        register_data(name, loader)
        register_data(name, loader)  # the very same
        with pytest.raises(TensorDropoutError, match=f"{name!r} is taken by another data set"):
            register_data(name, other)
    assert len(load_data("part").train) == 4


def make_data(task="classification", outputs=3, part="train", **changes):
    """Six examples in each part, right but for the changes in one of them."""
    right = torch.arange(6) % 3 if task == "classification" else torch.zeros(6, outputs)
    whole = TensorSplit(torch.ones(6, 1, 2, 2), right, [str(i) for i in range(6)])
    parts = {"train": whole, "validation": None, "test": whole}
    parts[part] = dataclasses.replace(
        whole, **{k: v for k, v in changes.items() if k in ("inputs", "targets", "names")}
    )
    rest = {k: v for k, v in changes.items() if k not in ("inputs", "targets", "names")}
    return Data("mine", task, **parts, input_shape=(1, 2, 2), outputs=outputs, **rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": ["a", "b"]}, "the train part has 2 names, 6 targets, 6 inputs; each"),
        ({"part": "test", "inputs": torch.ones(5, 1, 2, 2)}, "the test part has 6 names, 6 targets, 5 inputs"),
        ({"targets": torch.arange(6)}, "classes from 0 to 5; with outputs=3 they go from 0 to 2"),
        ({"targets": torch.arange(6) - 1}, "classes from -1 to 4"),
        ({"targets": torch.arange(6).int() % 3}, "targets of (6,), torch.int32; classes are (N,) of torch.int64"),
        ({"targets": torch.zeros(6, 1).long()}, "targets of (6, 1), torch.int64"),
        ({"inputs": torch.ones(6, 1, 2, 3)}, "inputs of (1, 2, 3) after prepare, and input_shape is (1, 2, 2)"),
        ({"part": "validation", "targets": torch.zeros(6)}, "the validation part has targets of (6,), torch.float32"),
        ({"task": "regression", "targets": torch.zeros(6, 2)}, "targets of (6, 2), torch.float32; of a regression"),
        ({"task": "regression", "outputs": 1, "targets": torch.zeros(6).long()}, "they are (N,) of torch.float32"),
        (
            {"task": "regression", "part": "test", "targets": torch.tensor([[0.0] * 3, [0, 0, torch.nan]] * 3)},
            "the test part has targets that are not finite in 3 of 6 rows, the first in row 1",
        ),
        ({"task": "regression", "target": "age, height, age"}, "the targets are age, height, age; give each a name"),
        ({"task": "both"}, "task must be one of classification, regression, not 'both'"),
        ({"outputs": 0}, "outputs must be a positive whole number, not 0"),
        (
            {"part": "validation", "unknown": [1, 2]},
            "the unknown part must be a TensorSplit or a StreamSplit, not list",
        ),
    ],
)
def test_data_of_one_s_own_that_does_not_fit_together_is_refused(monkeypatch, changes, message):
    monkeypatch.setattr("tensor_dropout_lab.data.DATASETS", dict(DATASETS))
    register_data("mine", lambda: make_data(**changes))
    with pytest.raises(TensorDropoutError, match="^mine: .*" + re.escape(message)):
        load_data("mine")


@pytest.mark.parametrize(("task", "outputs"), [("classification", 3), ("regression", 1), ("regression", 2)])
def test_data_of_one_s_own_that_fits_together_is_taken(monkeypatch, task, outputs):
    monkeypatch.setattr("tensor_dropout_lab.data.DATASETS", dict(DATASETS))
    strange = TensorSplit(torch.ones(2, 1, 2, 2), torch.tensor([-1, -1]), ["x", "y"])
    register_data("mine", lambda: make_data(task, outputs, unknown=strange))
    assert load_data("mine").outputs == outputs
    register_data("row", lambda: make_data("regression", 1, targets=torch.zeros(6)))
    assert load_data("row").train.targets.shape == (6,)


def load_typed(*, shape: tuple[int, int] = (1, 1), folder: Path | None = None, n: int = 3, sizes: Known[int] = ()):
    """What came in, as names."""
    part = TensorSplit(torch.ones(n, 1, 2, 2), torch.zeros(n), [f"{shape} {folder!r} {sizes}"] * n)
    return Data("typed", "regression", part, None, None, (1, 2, 2), outputs=1)


def test_options_come_as_the_types_that_a_loader_asks_for(monkeypatch):
    """TOML, JSON and the command line have no tuples and no paths; one annotation only type checkers know."""
    known = dict(DATASETS)
    monkeypatch.setattr("tensor_dropout_lab.data.DATASETS", known)
    monkeypatch.setattr("tensor_dropout_lab.training.config.DATASETS", known)
    register_data("typed", load_typed)
    options = {"shape": [8, 8], "folder": "here", "sizes": ["any"], "n": 2}
    resolved = resolve_config(overrides={"data.name": "typed", "data.options": options}).data.options
    assert load_data("typed", **resolved).train.names[0] == f"(8, 8) {Path('here')!r} ['any']"
    for option, value in {"shape": [8, "8"], "folder": 3, "n": "2"}.items():
        with pytest.raises(TensorDropoutError, match=rf"data\.options\.{option} is of type .*, got "):
            resolve_config(overrides={"data.name": "typed", "data.options": {option: value}})


def test_targets_without_names_are_numbered():
    part = TensorSplit(torch.ones(1, 1, 2, 2), torch.zeros(1, 2), ["a"])
    assert Data("x", "regression", part, None, None, (1, 2, 2), outputs=2).target_names == ["0", "1"]
    assert name_targets("age, years", 1) == ["age, years"]  # one column, which has a comma in its name
    assert name_targets("age, years, height", 2) == ["0", "1"]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("cifar", {}, "no data set 'cifar'; did you mean 'cifar10'"),
        ("mnist", {}, "known are digits, cifar10"),
        ("digits", {"augmnt": True}, "no option 'augmnt'; did you mean 'augment'"),
        ("digits", {"shape": 3}, "known are augment"),
        ("digits", {"root": "folder"}, "takes no root"),
        ("synthetic", {"shape": "25"}, "the option shape is of type Sequence[int], got '25'"),
        ("synthetic", {"shape": (4, 0)}, "positive whole numbers"),
        ("synthetic", {"rank": 0}, "rank must be a positive"),
        ("synthetic", {"n": 2.5}, "the option n is of type int, got 2.5"),
        ("synthetic", {"noise": -1.0}, "noise must be 0 or more"),
        ("synthetic", {"format": "tt"}, "of type Literal['cp', 'tucker'], got 'tt'"),
        ("synthetic", {"shape": (3, 3), "n": 20, "test": 20}, "number below 20"),
        ("synthetic", {"shape": (3, 3), "n": 20, "validation": -0.1}, "synthetic: validation"),
        ("synthetic", {"shape": (3, 3), "n": 20, "validation": True}, "option validation is of type float"),
        ("synthetic", {"shape": (3, 3), "n": 20, "validation": "half"}, "of type float, got 'half'"),
    ],
)
def test_bad_names_and_options_are_refused(name, options, message):
    with pytest.raises(TensorDropoutError, match=re.escape(message)):
        load_data(name, **options)


def test_a_mistake_inside_of_a_loader_is_not_called_a_mistake_of_the_options(monkeypatch):
    def fail(*_, **__):
        raise TypeError("a bug of ours")

    monkeypatch.setattr("tensor_dropout_lab.data.synthetic.draw_weight", fail)
    with pytest.raises(TypeError, match="a bug of ours"):
        load_data("synthetic", shape=(3, 3), n=20)


def test_importing_the_package_pulls_in_none_of_the_extras():
    code = (
        "import sys, tensor_dropout_lab.data as d\n"
        "[d.describe_options(name) for name in d.DATASETS]\n"
        "print([m for m in ('sklearn', 'nibabel', 'PIL', 'scipy', 'matplotlib', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_names_the_extra():
    with pytest.raises(TensorDropoutError, match=r"nifti: none_such is not .* pip install 'tensor-dropout\[lab\]'"):
        import_extra("none_such.part", "nifti")


# Splits.


def test_hold_out_takes_the_same_share_of_every_class():
    classes = torch.arange(10).repeat_interleave(50)[torch.randperm(500)]
    kept, held = hold_out(classes, 0.1, 0, "test")
    assert classes[held].bincount().tolist() == [5] * 10
    assert sorted([*kept.tolist(), *held.tolist()]) == list(range(500))


@pytest.mark.parametrize(("share", "count"), [(0, 0), (0.0, 0), (0.25, 5), (7, 7), (1, 1), (19, 19)])
def test_hold_out_takes_fractions_and_numbers(share, count):
    kept, held = hold_out(torch.zeros(20), share, 0, "test")
    assert (len(kept), len(held)) == (20 - count, count)


@pytest.mark.parametrize("share", [-1, 20, 21, 1.5, float("nan"), None, "x", True])
def test_hold_out_refuses_other_shares(share):
    with pytest.raises(TensorDropoutError, match="somewhere: a fraction in"):
        hold_out(torch.zeros(20), share, 0, "somewhere")


def test_hold_out_depends_on_the_seed_and_on_nothing_else():
    classes = torch.arange(4).repeat(25)
    first = hold_out(classes, 0.2, 1, "test")[1]
    torch.manual_seed(99)
    assert torch.equal(first, hold_out(classes, 0.2, 1, "test")[1])
    assert not torch.equal(first, hold_out(classes, 0.2, 2, "test")[1])


def test_folds_are_disjoint_of_equal_size_and_balanced_in_the_target():
    ages = 20 + 60 * torch.rand(103)
    fold = deal_folds(bin_targets(ages, 20), 5, seed=0)
    assert sorted(fold.bincount().tolist()) == [20, 20, 21, 21, 21]
    means = torch.stack([ages[fold == i].mean() for i in range(5)])
    assert (means - ages.mean()).abs().max() < 2


def test_bins_hold_equal_numbers_also_for_equal_targets():
    assert bin_targets(torch.ones(30), 3).bincount().tolist() == [10, 10, 10]


def test_a_stream_reads_by_index():
    class Squares(StreamSplit):
        def read(self, index):
            return torch.full((1, 2), index**2)

    stream = Squares(["a", "b", "c"], torch.tensor([5, 6, 7]))
    images, targets = next(iter(torch.utils.data.DataLoader(stream, batch_size=3)))
    assert (len(stream), images[:, 0, 0].tolist(), targets.tolist()) == (3, [0, 1, 4], [5, 6, 7])


# Normalisation.


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [(8, 8), (6, 5, 4)])
def test_standardized_images_have_mean_0_and_variance_1_each(dtype, size):
    images = (255 * torch.rand(5, 3, *size)).to(dtype)
    out = StandardizeImages()(images)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.flatten(1).mean(1), torch.zeros(5), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.flatten(1).var(1, correction=0), torch.ones(5), atol=1e-4, rtol=0)


def test_standardized_images_do_not_depend_on_gain_offset_or_batch():
    images = torch.rand(4, 1, 8, 8)
    out = StandardizeImages()(images)
    torch.testing.assert_close(StandardizeImages()(3 * images + 7), out, atol=1e-4, rtol=0)
    torch.testing.assert_close(StandardizeImages()(images[2:3]), out[2:3])


@pytest.mark.parametrize("gain", [1e-15, 1e-5, 1e-3, 1.0, 1e15])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_standardized_images_do_not_depend_on_the_unit(gain, offset):
    """A contrast of 1e-5 came out with a deviation of 0.1: 1e-8 was added to every variance."""
    images = torch.rand(4, 1, 8, 8) + offset
    out = StandardizeImages()(images)
    torch.testing.assert_close(out.std(dim=(1, 2, 3), correction=0), torch.ones(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(StandardizeImages()(gain * images), out, atol=1e-4 * (1 + offset), rtol=0)


@pytest.mark.parametrize("value", [0.0, 7.0, 0.1, 1 / 3, 1e-20, -1e20])
def test_an_image_that_is_constant_up_to_rounding_becomes_0(value):
    images = torch.full((1, 1, 50, 50), value)
    assert not StandardizeImages()(images).any()
    rounded = torch.nextafter(images, torch.zeros(())).where(torch.rand(1, 1, 50, 50) < 0.5, images)
    assert not StandardizeImages()(rounded).any()


def test_preparation_is_differentiable_also_at_a_constant_image():
    images = torch.zeros(1, 1, 4, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(StandardizeImages()(images).square().sum(), images)
    assert gradient.isfinite().all()


def test_standardized_channels_use_fixed_numbers_in_buffers():
    prepare = StandardizeChannels([1.0, 2.0], [2.0, 4.0])
    out = prepare(torch.tensor([3, 6], dtype=torch.uint8).view(1, 2, 1, 1).expand(3, 2, 5, 4))
    torch.testing.assert_close(out, torch.ones(3, 2, 5, 4))
    assert set(prepare.state_dict()) == {"mean", "scale"}


# Augmentation.


@pytest.mark.parametrize("fill", ["zero", "edge", "min"])
@pytest.mark.parametrize("size", [(9, 7), (6, 5, 4)])
def test_shifts_are_crops_of_the_padded_image(fill, size):
    images = torch.randn(6, 2, *size)
    offsets = torch.randint(-3, 4, (6, len(size)))
    shifted = shift_images(images, offsets, fill)
    for image, offset, result in zip(images, offsets.tolist(), shifted, strict=True):
        pads = [3, 3] * len(size)
        if fill == "edge":
            padded = torch.nn.functional.pad(image[None], pads, mode="replicate")[0]
        else:
            padded = torch.nn.functional.pad(image, pads, value=0.0 if fill == "zero" else float(image.min()))
        window = tuple(slice(3 + o, 3 + o + cells) for o, cells in zip(offset, size, strict=True))
        assert torch.equal(result, padded[(slice(None), *window)])


def test_every_shift_occurs_equally_often_and_images_move_independently():
    images = torch.zeros(9000, 1, 5, 5)
    images[:, :, 2, 2] = 1
    places = RandomShift(1)(images).flatten(1).argmax(1).bincount(minlength=25).view(5, 5)
    assert places.sum() == places[1:4, 1:4].sum() == 9000
    assert (places[1:4, 1:4] - 1000).abs().max() < 150


def test_flips_mirror_half_of_the_images():
    images = torch.randn(2000, 2, 3, 4)
    flipped = RandomFlip(-1)(images)
    same = (flipped == images).flatten(1).all(1)
    mirrored = (flipped == images.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 900 < int(same.sum()) < 1100


@pytest.mark.parametrize(
    "module", [RandomShift(2), RandomShift(2, fill="edge"), RandomShift(2, fill="min"), RandomFlip(2)]
)
def test_augmentation_repeats_under_a_seed_and_rests_in_eval(module):
    images = torch.randn(16, 1, 6, 6, 6)
    torch.manual_seed(3)
    first = module(images)
    second = module(images)
    torch.manual_seed(3)
    assert torch.equal(module(images), first)
    assert not torch.equal(second, first)
    assert first.shape == images.shape
    module.eval()
    assert module(images) is images
    module.train()


def test_preparation_and_augmentation_trace_without_breaks_or_python_numbers():
    chain = torch.nn.Sequential(StandardizeImages(), RandomShift(2, fill="min"), RandomFlip(-1))
    compiled = torch.compile(chain, backend="eager", fullgraph=True)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    torch.manual_seed(0)
    expected = chain(images)
    torch.manual_seed(0)
    assert torch.equal(compiled(images), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_augmentation_draws_anew_in_every_replay_of_a_cuda_graph():
    chain = torch.nn.Sequential(StandardizeImages(), RandomShift(2), RandomFlip(-1))
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8, device="cuda")
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


@pytest.mark.parametrize(("pixels", "fill"), [(0, "zero"), (-1, "zero"), (1.5, "zero"), (1, "mirror")])
def test_bad_shifts_are_refused(pixels, fill):
    with pytest.raises(TensorDropoutError, match="RandomShift"):
        RandomShift(pixels, fill=fill)


# Digits.


def check_parts(data: Data) -> None:
    """What holds for every data set in memory: fitting lengths, disjoint parts, and inputs as announced."""
    parts = [part for part in (data.train, data.validation, data.test) if part is not None]
    names = [name for part in parts for name in part.names]
    assert len(set(names)) == len(names)
    for part in parts:
        assert isinstance(part, TensorSplit)
        assert len(part) == len(part.inputs) == len(part.targets) == len(part.names)
    prepared = data.prepare(data.train.inputs[:4])
    assert prepared.dtype == torch.float32
    assert prepared.shape[1:] == data.input_shape
    if data.augment is not None:
        assert data.augment(prepared).shape == prepared.shape
    assert len(data.provenance) > 20
    assert data.simulated == ("SIMULATED" in data.provenance)


def test_digits_are_scikit_learns_each_in_one_part():
    datasets = pytest.importorskip("sklearn.datasets")
    pixels, labels = (torch.tensor(numbers) for numbers in datasets.load_digits(return_X_y=True))
    data = load_data("digits")
    check_parts(data)
    parts = (data.train, data.validation, data.test)
    assert [len(part) for part in parts] == [1077, 360, 360]
    rows = [torch.tensor([int(name.removeprefix("digit-")) for name in part.names]) for part in parts]
    assert torch.cat(rows).unique().numel() == len(pixels)
    for part, own in zip(parts, rows, strict=True):
        assert torch.equal(part.inputs.flatten(1), pixels[own].to(torch.uint8))
        assert torch.equal(part.targets, labels[own])
        counts = torch.bincount(part.targets)
        assert counts.max() - counts.min() <= 0.1 * counts.max()  # the same share of each class
    assert (data.task, data.outputs, len(data.classes), data.target) == ("classification", 10, 10, None)
    assert load_data("digits", augment=False).augment is None


# Synthetic.


@pytest.mark.parametrize("format", ["cp", "tucker"])
def test_synthetic_targets_are_a_low_rank_regression_of_variance_1(format):
    data = load_data("synthetic", shape=(6, 5, 4), rank=2, n=4000, format=format, test=400, validation=400)
    check_parts(data)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [3200, 400, 400]
    inputs, targets = data.train.inputs.flatten(1).double(), data.train.targets.double()
    weight = torch.linalg.lstsq(inputs, targets[:, None]).solution
    torch.testing.assert_close(inputs @ weight, targets[:, None], atol=1e-4, rtol=0)
    for mode in range(3):
        unfolded = weight.view(6, 5, 4).movedim(mode, 0).flatten(1)
        assert torch.linalg.matrix_rank(unfolded, rtol=1e-4) == 2
    assert abs(float(targets.var()) - 1) < 0.1


def test_synthetic_noise_has_the_given_deviation():
    clean = load_data("synthetic", shape=(4, 4), rank=1, n=5000)
    noisy = load_data("synthetic", shape=(4, 4), rank=1, n=5000, noise=0.5)
    assert torch.equal(clean.train.inputs, noisy.train.inputs)
    assert abs(float((noisy.train.targets - clean.train.targets).std()) - 0.5) < 0.02


def test_synthetic_data_depend_on_the_seed_only():
    first = load_data("synthetic", shape=(3, 3), rank=1, n=30, seed=4)
    torch.manual_seed(123)
    again = load_data("synthetic", shape=(3, 3), rank=1, n=30, seed=4)
    other = load_data("synthetic", shape=(3, 3), rank=1, n=30, seed=5)
    assert torch.equal(first.test.inputs, again.test.inputs)
    assert first.test.names == again.test.names
    assert not torch.equal(first.test.inputs, other.test.inputs)


def test_weights_of_a_size_below_the_rank_are_full():
    weight = draw_weight((2, 5), 3, "tucker", torch.Generator())
    assert torch.linalg.matrix_rank(weight) == 2
    torch.testing.assert_close(weight.norm(), torch.tensor(1.0))


def test_a_data_set_is_shown_in_a_line():
    data = load_data("digits", unknown_classes=3)
    parts = {name: len(getattr(data, name)) for name in ("train", "validation", "test", "unknown")}
    counts = ", ".join(f"{name}: {number}" for name, number in parts.items())
    assert repr(data) == f"Data('digits', classification, 1×8×8 → 7, {counts})"
    assert "validation" not in repr(dataclasses.replace(data, validation=None))
