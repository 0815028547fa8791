"""``FeatureMaps`` and ``attach_head`` on other people's networks, and on ours."""

from __future__ import annotations

import warnings
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import NETWORKS
from sklearn.exceptions import ConvergenceWarning
from torch import nn

import tensor_dropout as td
from tensor_dropout.exporting import export_onnx, export_program
from tensor_dropout.sklearn import FeatureMaps, TensorRegressor

SAMPLES = 12
every_network = pytest.mark.parametrize("name", NETWORKS)
every_cut = pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if case.is_cut])
every_hook = pytest.mark.parametrize("name", [name for name, case in NETWORKS.items() if not case.is_cut])
pytestmark = pytest.mark.filterwarnings("ignore:FeatureMaps. picked")


def make_network(name, seed=0):
    """In ``eval`` mode, with statistics of batch normalization that matter."""
    torch.manual_seed(seed)
    network = NETWORKS[name].make().eval()
    if name != "EfficientNet-Lite0":  # which has weights, and statistics, of its own
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 2)
    return network


@cache
def fitted(name):
    """A network, samples, their maps and a head that was fitted on them; nobody changes these."""
    network = make_network(name)
    x = torch.randn(SAMPLES, *NETWORKS[name].input_shape, generator=torch.Generator().manual_seed(1))
    maps = FeatureMaps(network, batch=5, verbose=False, **NETWORKS[name].options)
    features = maps.fit_transform(x)
    y = np.random.default_rng(0).normal(size=(SAMPLES, 2)).astype(np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model = TensorRegressor(rank=3, max_iter=30, random_state=0).fit(features, y)
    return SimpleNamespace(network=network, x=x, maps=maps, features=features, y=y, model=model)


def attach(name):
    """A head on a network that a test may change."""
    case, before = NETWORKS[name], fitted(name)
    return td.attach_head(
        make_network(name), before.model, example_input=before.x[:1], **{"layer": case.layer, **case.options}
    ).eval()


@every_network
def test_a_layer_of_stride_16_is_picked(name):
    assert fitted(name).maps.layer_ == NETWORKS[name].layer
    assert fitted(name).maps.map_shape_ == NETWORKS[name].map_shape


@every_network
def test_maps_are_those_of_the_network_computed_piece_by_piece(name):
    with torch.no_grad():
        expected = NETWORKS[name].compute_map(fitted(name).network, fitted(name).x).numpy()
    assert expected.shape == (SAMPLES, *NETWORKS[name].map_shape)
    assert expected.std() > 0
    np.testing.assert_allclose(fitted(name).features, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


@every_network
def test_a_place_in_the_map_is_that_place_in_the_image(name):
    """What is changed in a corner of the input changes that corner of the map most."""
    x, maps = fitted(name).x[:1].clone(), fitted(name).maps
    sizes, grid = x.shape[2:], NETWORKS[name].map_shape[1:]
    steps = [size // cells for size, cells in zip(sizes, grid, strict=True)]
    places = [0] * len(grid), [cells - 1 for cells in grid], [0] * (len(grid) - 1) + [grid[-1] - 1]
    before = maps.transform(x)[0]
    for place in places:
        changed = x.clone()
        cell = tuple(slice(step * at, step * (at + 1)) for step, at in zip(steps, place, strict=True))
        changed[(slice(None), slice(None), *cell)] += 1
        change = np.abs(maps.transform(changed)[0] - before).sum(0)
        largest = np.unravel_index(change.argmax(), change.shape)
        assert max(abs(int(at) - wanted) for at, wanted in zip(largest, place, strict=True)) <= 1, (place, largest)


@every_network
def test_a_head_attached_predicts_as_the_estimator_does(name):
    before = fitted(name)
    headed = td.attach_head(before.maps, before.model)
    expected = before.model.predict(before.features)
    with torch.no_grad():
        predicted = headed(before.x).numpy()
    assert headed.is_cut is NETWORKS[name].is_cut
    assert np.abs(predicted - expected).max() <= 1e-5 * before.y.std()


@every_network
def test_gradients_reach_the_whole_backbone(name):
    headed = attach(name)
    td.expected_mse(headed, fitted(name).x[:2], torch.from_numpy(fitted(name).y[:2])).backward()
    for parameter in (next(headed.backbone.parameters()), *headed.head.parameters()):
        assert parameter.grad is not None
        assert bool(parameter.grad.any())
    if headed.is_cut:  # else what is behind the layer is still there, and not used
        idle = [name for name, parameter in headed.named_parameters() if parameter.grad is None]
        assert not [name for name in idle if "mask_token" not in name]  # which DINOv2 has for its training


@every_network
def test_a_file_comes_back_into_another_network(name, tmp_path):
    headed = attach(name)
    td.save(headed, tmp_path / "headed.safetensors")
    network = make_network(name, seed=5)
    again = td.load(tmp_path / "headed.safetensors", network)
    with torch.no_grad():
        assert torch.equal(again(fitted(name).x[:3]), headed(fitted(name).x[:3]))
    assert again.is_cut is headed.is_cut


@every_network
def test_the_head_merges_into_plain_torch(name):
    headed, x = attach(name), fitted(name).x[:3]
    with torch.no_grad():
        expected = headed(x)
        td.merge_(headed)
        assert not any(isinstance(module, td.CPRegression) for module in headed.modules())
        torch.testing.assert_close(headed(x), expected, rtol=1e-4, atol=1e-4)


@every_cut
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_exports(name, tmp_path):
    headed, x = attach(name), fitted(name).x[:3]
    assert export_program(headed, x, tmp_path / "headed.pt2") < 1e-4
    assert export_onnx(headed, x, tmp_path / "headed.onnx") < 1e-4


@every_hook
@pytest.mark.parametrize("export", [export_program, export_onnx])
def test_what_only_a_hook_ends_is_not_exported(name, export, tmp_path):
    headed = attach(name)
    words = f"{type(fitted(name).network).__name__} cannot be exported up to '{NETWORKS[name].layer}'"
    with pytest.raises(td.TensorDropoutError, match=words):
        export(headed, fitted(name).x[:3], tmp_path / "headed")
    assert not list(tmp_path.iterdir())
