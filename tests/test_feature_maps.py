"""``FeatureMaps``: layouts, layers, options, inputs, and what it refuses. Small networks of every kind that matters."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV, cross_val_predict
from sklearn.pipeline import make_pipeline
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from estimators_under_test import assert_one_sentence
from tensor_dropout import TensorDropoutError
from tensor_dropout.features.decoding import decode_picture
from tensor_dropout.features.probe import Place
from tensor_dropout.sklearn import FeatureMaps, TensorRegressor


def convolutions(channels=3):
    """Strides 4, 8 and 16, with batch normalization that has seen data."""
    network = nn.Sequential()
    for name, (before, after, stride) in {"a": (channels, 4, 4), "b": (4, 6, 2), "c": (6, 8, 2)}.items():
        network.add_module(name, nn.Conv2d(before, after, 3, stride, padding=1))
        network.add_module(f"{name}_norm", nn.BatchNorm2d(after))
        network.add_module(f"{name}_relu", nn.ReLU(inplace=True))
    network.train()
    network(torch.randn(8, channels, 32, 32))
    return network


class Tokens(nn.Module):
    """A vision transformer in small: patches, a class token and registers, blocks on (n, T, C)."""

    def __init__(self, patch=8, extra=2, width=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.extra = nn.Parameter(torch.randn(extra, width))
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(width, 2, 16, batch_first=True) for _ in range(2)))
        self.head = nn.Linear(width, 5)

    def forward(self, x):
        tokens = self.patches(x).flatten(2).mT
        tokens = torch.cat([self.extra.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.blocks(tokens)[:, 0])


class ChannelsLast(nn.Module):
    """As in Swin: maps (n, h, w, C)."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 16, 16)
        self.mix = nn.Linear(6, 6)

    def forward(self, x):
        return self.mix(self.patches(x).movedim(1, -1)).mean((1, 2))


def images(n=5, channels=3, size=32, seed=0):
    return torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(seed))


def maps_of(network, layer=None, **settings):
    return FeatureMaps(network, layer, **{"verbose": False, **settings})


@torch.no_grad()
def forward(network, x, until):
    """The network's first layers, run by hand in eval mode."""
    return copy.deepcopy(network).eval()[: until + 1](torch.as_tensor(x).clone()).numpy()


# Layers and layouts.


def test_maps_are_what_the_layer_gives():
    network, x = convolutions(), images(7)
    maps = maps_of(network, "b", batch=3).transform(x)  # the in-place ReLU behind the normalization does not reach it
    assert maps.shape == (7, 6, 4, 4)
    assert maps.dtype == np.float32
    np.testing.assert_allclose(maps, forward(network, x, 3), atol=1e-6)


def test_in_place_operations_behind_a_layer_do_not_change_its_map():
    network, x = convolutions(), images()
    joined = maps_of(network, ["b_norm", "c_relu"]).transform(x)
    expected = F.adaptive_avg_pool2d(torch.from_numpy(forward(network, x, 4)), 2).numpy()
    assert expected.min() < 0  # what ReLU would have removed
    np.testing.assert_allclose(joined[:, :6], expected, atol=1e-6)
    np.testing.assert_allclose(joined[:, 6:], forward(network, x, 8), atol=1e-6)


def test_the_network_runs_only_as_far_as_the_layer():
    network = convolutions()
    network.add_module("broken", nn.Linear(999, 1))
    assert maps_of(network, "c").transform(images()).shape == (5, 8, 2, 2)


@pytest.mark.parametrize(
    ("layers", "size", "picked", "shape"),
    [
        ((4, 2, 2), 64, "2", (4, 4, 4)),  # stride 16
        ((4, 2, 2, 2), 64, "2", (4, 4, 4)),  # not the last map, of stride 32
        ((4, 2), 64, "1", (4, 8, 8)),  # the largest below
        ((32,), 64, "0", (4, 2, 2)),  # the smallest above
        ((1, 32), 64, "1", (4, 2, 2)),  # a map of stride 1 is the last resort
        ((1, 1), 8, "1", (4, 8, 8)),
        ((8, 2, 1), 64, "2", (4, 4, 4)),  # the last of stride 16
        ((8, 2, None), 64, "1", (4, 4, 4)),  # an nn.Identity is no layer
    ],
)
def test_a_layer_is_picked_by_its_stride(layers, size, picked, shape):
    channels = [3, *([4] * len(layers))]
    made = (nn.Conv2d(channels[k], 4, s, s) if s else nn.Identity() for k, s in enumerate(layers))
    network = nn.Sequential(*made, nn.Flatten())
    maps = maps_of(network)
    with pytest.warns(UserWarning, match=f"picked layer='{picked}', maps {'×'.join(map(str, shape))}"):
        assert maps.fit_transform(images(3, size=size)).shape == (3, *shape)
    assert maps.layer_ == picked
    assert maps.map_shape_ == shape
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        maps.transform(images(2, size=size))  # it has said so once


def test_tokens_become_a_grid_without_the_class_token():
    network, x = Tokens().eval(), images(size=32)
    x = torch.cat([x, x], 3)[..., :48]  # patches 4×6: height and width must not be confused
    maps = maps_of(network, "blocks.0").fit(x)
    assert maps.places_ == (Place("blocks.0", grid=(4, 6), skipped=2),)
    with torch.no_grad():
        tokens = torch.cat([network.extra.expand(5, -1, -1), network.patches(x).flatten(2).mT], 1)
        expected = network.blocks[0](tokens)[:, 2:].mT.reshape(5, 8, 4, 6)
    np.testing.assert_allclose(maps.transform(x), expected, atol=1e-5)
    with pytest.warns(UserWarning, match="picked layer='blocks"):
        assert maps_of(network).transform(x).shape == (5, 8, 4, 6)


class Attention(nn.Module):
    """Its softmax (n, heads, T, T) has as many axes as a map."""

    def __init__(self, width=8):
        super().__init__()
        self.values, self.softmax = nn.Linear(width, width), nn.Softmax(-1)

    def forward(self, x):
        values = self.values(x)
        return (self.softmax((x @ x.mT).unsqueeze(1)) @ values.unsqueeze(1)).squeeze(1)


class Merge(nn.Module):
    """Every second token, after a projection of all."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        return self.project(x)[:, ::2]


class Transformer(nn.Module):
    """Tokens that end in the network's own output, a dict."""

    def __init__(self, *blocks):
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 8, 4, 4), nn.Sequential(*blocks)

    def forward(self, x):
        return {"tokens": self.blocks(self.patches(x).flatten(2).mT)}


@pytest.mark.parametrize(
    ("blocks", "picked", "shape"),
    [
        ((Attention(),), "blocks", (8, 4, 4)),  # not the softmax, 1×16×16
        ((Attention(), nn.Sequential(Merge())), "blocks.0", (8, 4, 4)),  # not what is merged next
        ((), "blocks", (8, 4, 4)),
    ],
)
def test_attention_and_tokens_on_their_way_are_not_picked(blocks, picked, shape):
    with pytest.warns(UserWarning, match=f"picked layer='{picked}', maps {'×'.join(map(str, shape))}"):
        assert maps_of(Transformer(*blocks)).transform(images(size=16)).shape == (5, *shape)


def test_a_network_whose_own_output_is_the_only_map():
    class Whole(nn.Module):
        def forward(self, x):
            return F.avg_pool2d(x, 16)

    with pytest.warns(UserWarning, match="picked layer='', maps 3×2×2"):
        assert maps_of(Whole()).transform(images()).shape == (5, 3, 2, 2)


def test_the_grid_of_tokens_can_be_given():
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Linear(3 * 64, 8)

        def forward(self, x):
            return self.embed(F.unfold(x, 8, stride=8).mT)

    x = torch.randn(3, 3, 16, 32)
    assert maps_of(Embedded(), "embed", grid=(2, 4)).transform(x).shape == (3, 8, 2, 4)
    with pytest.raises(TensorDropoutError, match=r"8 tokens fit no earlier map.*say grid=\(h, w\)"):
        maps_of(Embedded(), "embed").transform(x)
    with pytest.raises(TensorDropoutError, match=r"8 tokens are not the grid \(3, 4\)"):
        maps_of(Embedded(), "embed", grid=(3, 4)).transform(x)


def test_channels_last():
    network, x = ChannelsLast(), images(size=64)
    assert maps_of(network, "mix", channel_axis=-1).transform(x).shape == (5, 6, 4, 4)
    with torch.no_grad():
        expected = network.mix(network.patches(x).movedim(1, -1)).movedim(-1, 1)
    np.testing.assert_allclose(maps_of(network, "mix", channel_axis=-1).transform(x), expected, atol=1e-6)
    with pytest.warns(UserWarning, match="'mix' gives .*taken as 4 channels.*set channel_axis=-1"):
        maps_of(network, "mix").transform(x)
    with pytest.warns(UserWarning, match="picked layer='patches'"):  # not the one it would read wrongly
        maps_of(network).transform(x)


def test_a_layer_inside_a_tuple_or_a_dict_and_one_that_runs_twice():
    class Odd(nn.Module):
        class Inner(nn.Module):
            def forward(self, x):
                return {"size": 3, "map": x * 2}

        class Outer(nn.Module):
            def forward(self, x):
                return "text", x + 1

        def __init__(self):
            super().__init__()
            self.inner, self.outer, self.conv = self.Inner(), self.Outer(), nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.conv(self.conv(self.outer(self.inner(x)["map"])[1]))

    network, x = Odd(), images()
    np.testing.assert_allclose(maps_of(network, "inner").transform(x), 2 * x)
    np.testing.assert_allclose(maps_of(network, "outer").transform(x), 2 * x + 1)
    with torch.no_grad():
        np.testing.assert_allclose(maps_of(network, "conv").transform(x), network(x), atol=1e-6)


def test_volumes():
    network = nn.Sequential(nn.Conv3d(1, 4, 3, 2, 1), nn.Conv3d(4, 5, 3, 2, 1))
    x = torch.randn(3, 1, 8, 12, 16)
    np.testing.assert_allclose(maps_of(network, "1").transform(x), network(x).detach(), atol=1e-6)
    assert maps_of(network, "1", pool=(1, 2, 2)).transform(x).shape == (3, 5, 1, 2, 2)


def test_wrapped_networks_keep_their_names():
    network, x = convolutions(), images()
    for wrapped in (nn.DataParallel(network), torch.compile(network)):
        np.testing.assert_array_equal(maps_of(wrapped, "c").transform(x), maps_of(network, "c").transform(x))


# Options.


def test_pool_and_types():
    network, x = convolutions(), images()
    whole = maps_of(network, "a").transform(x)
    expected = F.adaptive_avg_pool2d(torch.from_numpy(whole), (2, 3)).numpy()
    np.testing.assert_allclose(maps_of(network, "a", pool=(2, 3)).transform(x), expected, atol=1e-6)
    half = maps_of(network, "a", dtype="float16").transform(x)
    np.testing.assert_array_equal(half, whole.astype(np.float16))
    assert maps_of(network, "a", dtype="float64").transform(x).dtype == np.float64
    double = maps_of(copy.deepcopy(network).double(), "a", dtype="float64").transform(x.double())
    assert 0 < np.abs(double - whole).max() < 1e-5  # a network in float64 computes in float64


def test_bfloat16_is_close_and_pools_in_float32():
    network, x = convolutions(), images()
    exact, rough = (maps_of(network, "c", precision=precision).transform(x) for precision in ("float32", "bfloat16"))
    assert 1e-5 < np.abs(exact - rough).max() / exact.std() < 0.05
    mean = maps_of(network, "c", precision="bfloat16", pool=1).transform(x)
    np.testing.assert_allclose(mean, rough.mean((2, 3), keepdims=True), atol=1e-6)


def test_the_batch_does_not_matter():
    network, x = convolutions(), images(7)
    whole = maps_of(network, "c", batch=7).transform(x)
    for batch in (1, 2, 100):
        np.testing.assert_allclose(maps_of(network, "c", batch=batch).transform(x), whole, atol=1e-6)


# The network is left as it was.


def test_modes_buffers_hooks_gradients_and_random_numbers_are_as_before():
    network = convolutions()
    network.b_norm.eval()
    network.add_module("drop", nn.Dropout())
    network.a.register_forward_hook(lambda module, inputs, output: output)
    state = copy.deepcopy(network.state_dict())
    modes = [module.training for module in network.modules()]
    hooks = [len(module._forward_hooks) for module in network.modules()]
    generator = torch.get_rng_state()
    maps_of(network, ["a", "drop"]).fit_transform(images())
    assert modes == [module.training for module in network.modules()]
    assert hooks == [len(module._forward_hooks) for module in network.modules()]
    assert torch.equal(generator, torch.get_rng_state())
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    assert all(parameter.requires_grad and parameter.grad is None for parameter in network.parameters())
    network(images()).sum().backward()  # nothing of inference mode has stuck


def test_also_after_an_error():
    network = convolutions()
    hooks = [len(module._forward_hooks) for module in network.modules()]
    x = images(6)
    x[5] = float("nan")
    with pytest.raises(TensorDropoutError, match=r"the maps of X\[5\] are NaN"):
        maps_of(network, "c", batch=2).transform(x)
    assert hooks == [len(module._forward_hooks) for module in network.modules()]
    assert network.training


def test_clones_share_the_network():
    network = convolutions()
    maps = maps_of(network, "c", pool=2, cache="somewhere")
    copied = clone(maps)
    assert copied.model is network
    assert copied.get_params() == maps.get_params()
    pipeline = clone(make_pipeline(maps, TensorRegressor()))
    assert pipeline[0].model is network
    restored = pickle.loads(pickle.dumps(maps_of(network, "c")))
    np.testing.assert_array_equal(restored.transform(images()), maps_of(network, "c").transform(images()))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_pipelines_and_searches(tmp_path):
    network, x = convolutions(), images(24, size=64).numpy()
    y = np.linspace(0, 1, 24).astype(np.float32)
    head = TensorRegressor(rank=2, max_iter=5, tol=0.1, random_state=0)
    pipeline = make_pipeline(maps_of(network, "c", cache=tmp_path), head)
    predicted = pipeline.fit(x, y).predict(x)
    maps = maps_of(network, "c").transform(x)
    np.testing.assert_allclose(predicted, clone(head).fit(maps, y).predict(maps), rtol=1e-4, atol=1e-4)
    assert cross_val_predict(pipeline, x, y, cv=2).shape == (24,)
    search = GridSearchCV(pipeline, {"featuremaps__pool": [None, 1], "tensorregressor__theta": [1, 0.5]}, cv=2)
    search.fit(x, y)
    assert search.best_estimator_[0].model is network
    assert len(list(tmp_path.iterdir())) == 2  # one for each pool


# What goes in.


@pytest.fixture
def folder(tmp_path):
    """Pictures of several kinds and sizes."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(pixels).save(tmp_path / "b.jpg", quality=95)
    Image.fromarray(pixels[:, :, 0]).save(tmp_path / "c.png")  # grey
    Image.fromarray(np.concatenate([pixels, pixels[..., :1]], 2)).save(tmp_path / "d.png")  # with alpha
    Image.fromarray(pixels[:30]).quantize(16).save(tmp_path / "e.png")  # a palette
    return tmp_path


def test_images_are_resized_and_standardized(folder):
    paths = sorted(folder.iterdir())
    network = nn.Sequential(nn.Identity(), nn.Conv2d(3, 2, 8, 8))
    maps = maps_of(network, "0", size=(24, 32)).transform(paths)
    assert maps.shape == (5, 3, 24, 32)
    mean, std = np.reshape([0.485, 0.456, 0.406], (3, 1, 1)), np.reshape([0.229, 0.224, 0.225], (3, 1, 1))
    for path, found in zip(paths, maps, strict=True):
        picture = Image.open(path).convert("RGBA")
        on_white = Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)
        resized = on_white.convert("RGB").resize((32, 24), Image.Resampling.BILINEAR)
        expected = (np.asarray(resized).transpose(2, 0, 1) / 255 - mean) / std
        np.testing.assert_allclose(found, expected, atol=1e-5)
    plain = maps_of(network, "0", size=(24, 32), mean=None, std=0.5).transform([str(path) for path in paths])
    np.testing.assert_allclose(plain, (maps * std + mean) / 0.5, atol=1e-5)


def test_files_are_decoded_as_the_laboratory_does_it(tmp_path):
    """What is transparent lies on white, 16 bits are read, and a picture is turned as its EXIF data say."""
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (8, 6, 4), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    Image.fromarray(257 * pixels[..., 0].astype(np.uint16)).save(tmp_path / "b.png")
    Image.fromarray(pixels[..., :3]).save(tmp_path / "c.tif", exif=exif)
    Image.fromarray(pixels[..., :3]).save(tmp_path / "d.png", exif=exif)
    for path in sorted(tmp_path.iterdir()):
        picture = decode_picture(path)
        maps = maps_of(nn.Sequential(nn.Identity()), "0", size=picture.size[::-1], mean=None, std=None)
        np.testing.assert_allclose(
            maps.transform([path])[0] * 255, np.asarray(picture).transpose(2, 0, 1), atol=1e-4, err_msg=path.name
        )


def test_many_images_keep_their_order(tmp_path):
    paths = [tmp_path / f"{number:03}.png" for number in range(80)]
    for number, path in enumerate(paths):
        Image.new("RGB", (8, 8), (3 * number, 0, 0)).save(path)
    network = nn.Sequential(nn.Identity())
    maps = maps_of(network, "0", size=8, mean=None, std=None, batch=7).transform(np.array(paths[::-1]))
    np.testing.assert_allclose(maps[:, 0, 0, 0] * 255, 3 * np.arange(80)[::-1], atol=1e-3)


def test_nifti_volumes(tmp_path):
    nibabel = pytest.importorskip("nibabel", reason="the extra lab is not installed")
    volume = np.random.default_rng(0).normal(5, 2, (8, 6, 4)).astype(np.float32)
    nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / "a.nii.gz")
    flipped = nibabel.Nifti1Image(np.ascontiguousarray(volume[::-1]), np.diag([-1.0, 1, 1, 1]))
    nibabel.save(flipped, tmp_path / "b.nii")  # the same head, stored from right to left
    paths = [tmp_path / "a.nii.gz", tmp_path / "b.nii"]
    network = nn.Sequential(nn.Identity(), nn.Conv3d(1, 2, 2, 2))
    maps = maps_of(network, "0").transform(paths)
    assert maps.shape == (2, 1, 8, 6, 4)
    np.testing.assert_allclose(maps[0, 0], (volume - volume.mean()) / volume.std(ddof=1), atol=1e-4)
    np.testing.assert_array_equal(maps[0], maps[1])
    assert maps_of(network, "1", size=(4, 4, 4)).transform(paths).shape == (2, 2, 2, 2, 2)
    np.testing.assert_allclose(maps_of(network, "0", mean=None, std=None).transform(paths)[0, 0], volume, atol=1e-6)


def test_arrays_tensors_lists_and_data_sets_give_the_same(tmp_path):
    network, x = convolutions(), images(6)
    expected = maps_of(network, "c").transform(x)
    np.save(tmp_path / "x.npy", x.numpy())
    same = {
        "array": x.numpy(),
        "other byte order": x.numpy().astype(">f4"),
        "memory map": np.load(tmp_path / "x.npy", mmap_mode="r"),
        "backwards in memory": x.numpy()[:, :, ::-1].copy()[:, :, ::-1],
        "list of tensors": list(x),
        "list of arrays": list(x.numpy()),
        "needs gradients": x.clone().requires_grad_(),
        "data set": TensorDataset(x, torch.zeros(6)),
        "float64": x.double(),
    }
    for name, X in same.items():
        np.testing.assert_allclose(maps_of(network, "c").transform(X), expected, atol=1e-6, err_msg=name)


def test_arrays_are_not_changed():
    x = images().numpy()
    before = x.copy()
    maps_of(nn.Sequential(nn.ReLU(inplace=True)), "0").transform(x)
    np.testing.assert_array_equal(x, before)


def test_where_the_time_went(folder):
    maps = maps_of(convolutions(), "c", size=32, cache=folder / "cache")
    maps.transform(sorted(folder.glob("*.*g")))
    assert set(maps.seconds_) == {"reading", "network", "cache"}
    assert all(seconds > 0 for seconds in maps.seconds_.values())


# What is refused: every message says what came, what was expected and what to do.


class Items(Dataset):
    """A Dataset of whatever is in a list."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, number):
        return self.items[number]


class Stream(IterableDataset):
    def __iter__(self):
        return iter([torch.zeros(3, 8, 8)])


BAD_X = {
    "one path": ("folder", r"X is a list of paths; for a folder: sorted\(Path\('folder'\)"),
    "nothing": ([], "X is empty"),
    "missing files": (["nowhere.png", "here/not.jpg"], "nowhere.png, .*not.jpg of 2 files: no such file"),
    "a stream": (Stream(), "a Dataset with a length; got a Stream"),
    "an iterator": (iter([torch.zeros(3, 8, 8)]), "a Dataset with a length"),
    "pixels": (np.zeros((2, 3, 32, 32), np.uint8), "uint8 pixels; scale and standardize"),
    "pixels of a data set": (Items(list(torch.zeros(2, 3, 32, 32, dtype=torch.uint8))), "uint8 pixels"),
    "pictures of a data set": (Items([Image.new("RGB", (8, 8))]), "item 0 is a Image; give the Dataset a transform"),
    "one number": (np.array(5.0), "X is a list of paths, an array, .* got a ndarray of no axis"),
    "pixels behind numbers": ([torch.zeros(3, 32, 32), torch.zeros(3, 32, 32, dtype=torch.uint8)], "uint8 pixels"),
    "pixels behind numbers of a data set": (
        Items([torch.zeros(3, 32, 32), torch.zeros(3, 32, 32, dtype=torch.uint8)]),
        "uint8 pixels",
    ),
    "objects in a list": ([np.full((3, 32, 32), "a")] * 2, "samples hold numbers, but these are <U1"),
    "too few axes": (np.zeros((4, 32, 32)), r"samples are prepared inputs \(channels, height, width.*has \(32, 32\)"),
    "a table": (np.zeros((4, 3)), r"samples are prepared inputs .*has \(3,\)"),
    "other objects": ([{"a": 1}], "X holds paths or numbers, got object"),
    "ragged numbers": ([[1, 2], [3]], "X is a list of paths or an array of numbers"),
    "sizes in a list": (
        [torch.zeros(3, 32, 32), torch.zeros(3, 32, 16)],
        r"several sizes: X\[0\] has \(3, 32, 32\), X\[1\] \(3, 32, 16\); bring them to one size",
    ),
    "sizes in a data set": (
        Items([torch.zeros(3, 32, 32), torch.zeros(3, 64, 64)]),
        r"several sizes: \(3, 32, 32\), and \(3, 64, 64\) for item 1; bring them to one size",
    ),
    "channels": (torch.zeros(2, 1, 32, 32), r"does not run on an input of shape \(2, 1, 32, 32\).*pass inputs"),
}
BAD_SETTINGS = {
    "layer": ({"layer": "c_rellu"}, r"Sequential has no layer 'c_rellu'; the nearest names are \['c_relu', "),
    "layers": ({"layer": ["a", "x.c"]}, "no layer 'x.c'"),
    "no name": ({"layer": 3}, "layer is the name of a layer, or a list of names, got 3"),
    "no names": ({"layer": []}, r"layer is the name of a layer, or a list of names, got \[\]"),
    "pool": ({"layer": "c", "pool": 3}, r"pool is .* at most that of the maps, \(2, 2\); got 3"),
    "axes of pool": ({"layer": "c", "pool": (1, 1, 1)}, "one size or one per axis"),
    "one side of a grid": ({"layer": "c", "grid": 7}, r"grid is the sides of the tokens' grid, 2 numbers .*got 7"),
    "axes of a grid": ({"layer": "c", "grid": (2, 2, 2)}, r"grid is the sides .*got \(2, 2, 2\)"),
    "half a grid": ({"layer": "c", "grid": (2.5, 2)}, "grid is the sides"),
    "cache": ({"cache": 5}, "cache is a folder, or None, got 5"),
    "half pixels": ({"size": 224.0}, "size is one number"),
    "no similar layer": ({"layer": "zzz"}, "no layer 'zzz'; there are a, a_norm, a_relu, b, b_norm and 4 more"),
    "precision": ({"precision": "half"}, "precision is None, 'float32' or 'bfloat16', got 'half'"),
    "dtype": ({"dtype": "int8"}, "dtype is one of float32, float16, float64, got 'int8'"),
    "batch": ({"batch": 0}, "batch"),
    "size": ({"size": 0}, "size is one number"),
    "mean": ({"mean": [1, 2]}, "mean is 'imagenet', None, or one or three numbers"),
    "std": ({"std": 0}, "std is 'imagenet', None, or one or three numbers"),
    "channel_axis": ({"channel_axis": 0}, "channel_axis is the axis"),
    "no such axis": ({"channel_axis": 9}, "channel_axis is the axis .* 1 to 3, or -1 to -3; got 9"),
    "the samples' axis": ({"channel_axis": -4}, "channel_axis is the axis .* got -4"),
    "device": ({"device": "cuda:99", "layer": "c"}, "device='cuda:99' cannot be used here"),
    "no device": ({"device": "toaster", "layer": "c"}, "device='toaster' cannot be used here"),
    "no network": ({"model": "resnet18"}, "expected an nn.Module, got str"),
}


@pytest.mark.parametrize("case", BAD_X)
def test_bad_inputs(case):
    X, words = BAD_X[case]
    with pytest.raises(TensorDropoutError, match=words) as caught:
        maps_of(convolutions(), "c").transform(X)
    message = str(caught.value)
    assert message.startswith("FeatureMaps: ")
    assert "\n" not in message
    assert len(message) < 400


@pytest.mark.parametrize("case", BAD_SETTINGS)
def test_bad_settings(case):
    settings, words = BAD_SETTINGS[case]
    with pytest.raises(TensorDropoutError, match=words) as caught:
        FeatureMaps(**{"model": convolutions(), **settings}).fit(images())
    assert_one_sentence(caught)


def test_layers_that_give_no_map():
    network = nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(), nn.Linear(256, 7), nn.Linear(7, 7))
    network.unused = None
    with pytest.raises(
        TensorDropoutError, match=r"'2' gives no map but the shape \(2, 7\): a map of such inputs has 4"
    ):
        maps_of(network, "2").transform(images())
    network = nn.Sequential(nn.Conv2d(3, 4, 4, 4))
    network.register_module("spare", nn.Identity())
    network.forward = lambda x: network[0](x)
    with pytest.raises(TensorDropoutError, match="'spare' does not run in a forward pass"):
        maps_of(network, "spare").transform(images())
    with pytest.raises(TensorDropoutError, match="no layer of this network gives a map"):
        maps_of(nn.Sequential(nn.Flatten(), nn.Linear(3072, 2))).transform(images())


def test_all_unreadable_images_are_named(folder):
    (folder / "broken.jpg").write_bytes((folder / "b.jpg").read_bytes()[:700])
    (folder / "empty.png").touch()
    (folder / "text.png").write_text("no picture")
    Image.fromarray(np.zeros((8, 8), np.float32)).save(folder / "deep.tif")
    with pytest.raises(TensorDropoutError, match="4 of 9 samples cannot be read") as caught:
        maps_of(convolutions(), "c", size=32).transform(sorted(folder.iterdir()))
    no_picture = "(it is no picture of a known format"
    expected = (
        "broken.jpg (image file is truncated",
        f"empty.png {no_picture}",
        f"text.png {no_picture}",
        "deep.tif (its pixels are floating-point numbers, whose white is unknown; save it with 8 or 16 bits",
    )
    for name in expected:
        assert str(folder / name) in str(caught.value)
    with pytest.raises(TensorDropoutError, match="1 of 1 samples cannot be read"):
        maps_of(convolutions(), "c", size=32).transform([folder / "text.png"])


def test_volumes_of_several_sizes_and_kinds(tmp_path, folder):
    nibabel = pytest.importorskip("nibabel", reason="the extra lab is not installed")
    for name, size in {"a": 8, "b": 8, "c": 6}.items():
        nibabel.save(nibabel.Nifti1Image(np.ones((size, 8, 8), np.float32), np.eye(4)), tmp_path / f"{name}.nii")
    paths = [tmp_path / f"{name}.nii" for name in "abc"]
    network = nn.Sequential(nn.Conv3d(1, 2, 2, 2), nn.AdaptiveAvgPool3d(2))
    for batch in (1, 3):  # within a batch, and between batches whose maps would fit
        with pytest.raises(TensorDropoutError, match=r"c.nii has \(1, 6, 8, 8\), the first one \(1, 8, 8, 8\).*size="):
            maps_of(network, "1", batch=batch).transform(paths)
    assert maps_of(network, "1", size=(8, 8, 8)).transform(paths).shape == (3, 2, 2, 2, 2)
    with pytest.raises(TensorDropoutError, match="both images and NIfTI volumes; transform them apart"):
        maps_of(network, "1").transform([*paths, folder / "a.png"])
    with pytest.raises(TensorDropoutError, match=r"size of images is one number, or .* got \(8, 8, 8\)"):
        maps_of(network, "1", size=(8, 8, 8)).transform([folder / "a.png"])
    with pytest.raises(TensorDropoutError, match=r"mean has 3 numbers, but the volume has 1 channel"):
        maps_of(network, "1", mean=(1, 2, 3)).transform(paths)


def test_numbers_beyond_float16():
    network = nn.Sequential(nn.Conv2d(3, 2, 1))
    x = 1e6 * images()
    with pytest.raises(TensorDropoutError, match=r"numbers above 65504 do not fit into float16: set dtype='float32'"):
        maps_of(network, "0", dtype="float16").transform(x)
    assert np.isfinite(maps_of(network, "0").transform(x)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_and_the_network_comes_back(tmp_path):
    network, x = convolutions(), images(50)
    expected = maps_of(network, "c").transform(x)
    with torch.backends.cudnn.flags(allow_tf32=False):
        for cache in (None, tmp_path):
            maps = maps_of(network, "c", device="cuda", batch=4, cache=cache).transform(x)
            np.testing.assert_allclose(maps, expected, atol=1e-4)
    assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}


def test_no_progress_bar_outside_a_terminal(capsys):
    FeatureMaps(convolutions(), "c").transform(images())
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
