"""``attach_head``: a backbone and a fitted head as one network that predicts as the estimator does, and trains on."""

from __future__ import annotations

import copy
import json
import os
import pickle
import warnings
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.pipeline import make_pipeline
from torch import nn

import tensor_dropout as td
from estimators_under_test import SMALL, assert_one_sentence, fit_quietly
from tensor_dropout.exporting import export_onnx, export_program
from tensor_dropout.features.cut import HookedBackbone
from tensor_dropout.sklearn import FeatureMaps, TensorClassifier, TensorClassifierCV, TensorRegressor, TensorRegressorCV

QUICK = {"max_iter": 5, "random_state": 0}
SEARCH = {"thetas": (0.8,), "alphas": (1e-3,), "cv": 2, **QUICK}


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride=2)

    def forward(self, x):
        return torch.relu_(self.norm(self.conv(x)) + self.skip(x))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Dropout2d(0.2))
        self.blocks = nn.Sequential(Block(6, 8), Block(8, 10))
        self.fc = nn.Linear(10, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class BranchesOnShape(ConvNet):
    def forward(self, x):
        if x.shape[-1] < 16:
            raise ValueError("too small")
        return super().forward(x)


class FreezesStem(ConvNet):
    def forward(self, x):
        with torch.no_grad():
            x = self.stem(x)
        return self.fc(self.blocks(x).mean((2, 3)))


class AsksForMode(ConvNet):
    def forward(self, x):
        x = nn.functional.dropout(self.stem(x), 0.5, self.training)
        return self.fc(self.blocks(x).mean((2, 3)))


class Tokens(nn.Module):
    """A vision transformer with a class token."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 8, stride=8)
        self.class_token = nn.Parameter(torch.randn(1, 1, 8))
        self.register_buffer("positions", torch.randn(1, 17, 8))
        self.blocks = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True) for _ in range(2)))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat([self.class_token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.fc(self.blocks(x)[:, 0])


class ChannelsLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 4, stride=8)
        self.mix = nn.Linear(6, 10)

    def forward(self, x):
        return {"maps": self.mix(self.conv(x).permute(0, 2, 3, 1))}


def ours():
    from tensor_dropout_lab.nets import build_net

    return build_net("resnet-mini", outputs=4, input_shape=(3, 32, 32))


def monai_3d():
    pytest.importorskip("monai", reason="needs MONAI")
    from monai.networks.nets import resnet10

    return resnet10(spatial_dims=3, n_input_channels=1, num_classes=2, widen_factor=0.125)


# The network, the options of FeatureMaps, the shape of an input, and whether it can be cut.
NETWORKS = {
    "a block": (ConvNet, {"layer": "blocks.0"}, (3, 32, 32), True),
    "within a block, before an operation in place": (ConvNet, {"layer": "blocks.1.norm"}, (3, 32, 32), True),
    "layers joined and pooled": (ConvNet, {"layer": ["stem.0", "blocks.0"], "pool": 3}, (3, 32, 32), True),
    "a layer picked": (ConvNet, {}, (3, 32, 32), True),
    "tokens": (Tokens, {"layer": "blocks.1"}, (3, 32, 32), True),
    "tokens with their grid": (Tokens, {"layer": "blocks.0", "grid": (4, 4)}, (3, 32, 32), True),
    "channels last": (ChannelsLast, {"layer": "mix", "channel_axis": -1}, (3, 32, 32), True),
    "the whole network, a dict": (ChannelsLast, {"layer": "", "channel_axis": -1}, (3, 32, 32), True),
    "one of ours": (ours, {"layer": "layer2"}, (3, 32, 32), True),
    "MONAI, volumes": (monai_3d, {"layer": "layer3"}, (1, 32, 32, 32), True),
    "branches on a shape": (BranchesOnShape, {"layer": "blocks.0"}, (3, 32, 32), False),
    "asks for its mode": (AsksForMode, {"layer": "blocks.0"}, (3, 32, 32), False),
    "freezes its stem": (FreezesStem, {"layer": "blocks.0"}, (3, 32, 32), False),
}


def make_network(make=ConvNet):
    """In ``eval`` mode, with statistics of batch norm that matter."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make().eval()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d):
                module.running_mean.uniform_(-0.5, 0.5)
                module.running_var.uniform_(0.5, 2)
    return network


def make_inputs(shape=(3, 32, 32), n=24):
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(1))


def get_maps(network, x, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FeatureMaps: picked")
        return FeatureMaps(network, verbose=False, **options).fit(x)


def draw_targets(n, *shape):
    return np.random.default_rng(0).normal(size=(n, *shape)).astype(np.float32)


@cache
def fitted():
    """An estimator on the maps of a layer; tests copy the network if they change it."""
    network, x = make_network(), make_inputs()
    maps = get_maps(network, x, layer="blocks.0")
    features, y = maps.transform(x), draw_targets(len(x), 2)
    model = fit_quietly(TensorRegressor(**SMALL), features, y)
    return SimpleNamespace(network=network, x=x, maps=maps, features=features, y=torch.from_numpy(y), model=model)


@cache
def many():
    """More maps, so that a search can tell one estimator from another."""
    network, x = make_network(), make_inputs(n=400)
    maps = get_maps(network, x, layer="blocks.1")
    return SimpleNamespace(x=x, maps=maps, features=maps.transform(x))


def attach(make=ConvNet, layer="blocks.0"):
    """A fresh network with the fitted head."""
    return td.attach_head(make_network(make), fitted().model, layer, example_input=fitted().x)


def is_close(outputs, expected):
    """Equal to 1e-5 of the largest."""
    outputs, expected = (torch.as_tensor(each).detach() for each in (outputs, expected))
    assert outputs.shape == expected.shape
    return bool((outputs - expected).abs().max() <= 1e-5 * expected.abs().max())


# The same predictions.


@pytest.mark.parametrize("name", NETWORKS)
def test_predicts_as_the_estimator_does(name):
    make, options, shape, can_be_cut = NETWORKS[name]
    network, x = make_network(make), make_inputs(shape)
    maps = get_maps(network, x, **options)
    features = maps.transform(x)
    model = fit_quietly(TensorRegressor(**SMALL), features, draw_targets(len(x), 2))
    expected = model.predict(features)
    headed = td.attach_head(maps, model)
    assert is_close(headed(x), expected)
    assert is_close(headed(x[:1]), expected[:1])
    assert headed.is_cut is can_be_cut
    again = td.attach_head(network, model, example_input=x[:1], **{"layer": maps.layer_, **options})
    assert torch.equal(again(x), headed(x))


def standardize(features):
    """The channels that vary, which are most of them behind a ReLU."""
    varying = features[:, features.std((0, 2, 3)) > 0]
    return (varying - varying.mean((0, 2, 3), keepdims=True)) / varying.std((0, 2, 3), keepdims=True)


def of_channels(features):
    means = standardize(features).mean((2, 3))
    return means @ draw_targets(means.shape[1], 2) + 0.01 * draw_targets(len(features), 2)


def of_positions(features):
    """Of differences between neighbours, which pooling does not see."""
    steps = np.diff(standardize(features), axis=3)
    return np.tensordot(steps, draw_targets(*steps.shape[1:], 2), 3)


def of_a_row(features):
    """Of one row of one channel, with noise: of rank one."""
    return standardize(features)[:, 1, 2].sum(1) + 0.7 * draw_targets(len(features))


def class_names(features):
    return np.array(["kite", "ant", "bee"])[standardize(features).mean((2, 3))[:, :3].argmax(1)]


# The estimator, its targets, and what it should be after the fit.
ESTIMATORS = {
    "y of one axis": (TensorRegressor(**SMALL), lambda features: draw_targets(len(features)), "cp"),
    "y of three axes": (TensorRegressor("tt", **QUICK), lambda features: draw_targets(len(features), 2, 3), "tt"),
    "channel_axis": (TensorRegressor("tucker", channel_axis=2, **QUICK), of_channels, "tucker"),
    "classes": (TensorClassifier(**QUICK), class_names, "cp"),
    "CV, cp": (TensorRegressorCV(**SEARCH), of_a_row, "cp"),
    "CV, pooled ridge": (TensorRegressorCV(**SEARCH), of_channels, "pooled ridge"),
    "CV, flattened ridge": (TensorRegressorCV(**SEARCH), of_positions, "flattened ridge"),
    "CV, channel_axis, ridge": (TensorRegressorCV(channel_axis=-1, **SEARCH), of_positions, "flattened ridge"),
    "CV, classes": (TensorClassifierCV(**SEARCH), class_names, None),
}


@cache
def fit_estimator(name):
    """A fitted estimator, with its predictions."""
    estimator, make_targets, method = ESTIMATORS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = estimator.fit(many().features, make_targets(many().features))
    assert method in (None, model.method_)
    return model


@pytest.mark.parametrize("name", ESTIMATORS)
def test_takes_every_estimator(name):
    model = fit_estimator(name)
    headed = td.attach_head(many().maps, model)
    outputs = headed(many().x).detach()
    predicted = model.predict(many().features)
    if hasattr(model, "classes_"):
        assert (model.classes_[outputs.argmax(1)] == predicted).all()
        assert is_close(outputs, model.layer_(torch.from_numpy(many().features)))
    else:
        assert is_close(outputs, predicted.reshape(outputs.shape))
        assert outputs.shape == (400, *model.output_shape_)


def test_a_head_in_float64_takes_the_maps_as_such():
    features = fitted().features.astype(np.float64)
    model = fit_quietly(TensorRegressor(**SMALL), features, fitted().y.double())
    outputs = td.attach_head(fitted().network, model, "blocks.0", example_input=fitted().x)(fitted().x)
    assert outputs.dtype == torch.float64
    assert is_close(outputs, model.predict(features))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("make", [ConvNet, BranchesOnShape])
def test_may_be_cast(make, dtype):
    headed = attach(make)
    expected = headed(fitted().x).detach()
    outputs = headed.to(dtype)(fitted().x.to(dtype)).detach()
    assert outputs.dtype == dtype
    assert float((outputs - expected).abs().max() / expected.abs().max()) < (1e-4 if dtype == torch.float64 else 0.2)


def test_takes_a_layer_and_a_wrapped_network():
    layer = td.CPRegression((8, 8, 8), 2, rank=3)
    headed = td.attach_head(nn.DataParallel(fitted().network), layer, "blocks.0", example_input=fitted().x)
    assert is_close(headed(fitted().x), layer(torch.from_numpy(fitted().features)))


@pytest.mark.parametrize("size", [32, (32, 32)])
def test_takes_feature_maps_that_were_not_used_yet(size):
    headed = td.attach_head(FeatureMaps(fitted().network, "blocks.0", size=size), fitted().model)
    assert is_close(headed(fitted().x), fitted().model.predict(fitted().features))


def test_a_network_with_a_member_named_transform_is_a_network():
    network = make_network()
    network.transform = nn.Identity()  # as torchvision's detectors have
    assert td.attach_head(network, fitted().model, "blocks.0", example_input=fitted().x).is_cut


# What it leaves as it was.


@pytest.mark.parametrize("make", [ConvNet, BranchesOnShape])
@pytest.mark.parametrize("training", [True, False])
def test_has_the_mode_of_the_network_and_changes_nothing_in_it(make, training):
    network = make_network(make).train(training)
    network.blocks[0].norm.eval()
    network.blocks[0].norm.weight.requires_grad_(False)
    modes = {name: module.training for name, module in network.named_modules()}
    state, random = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    headed = td.attach_head(network, fitted().model, "blocks.0", example_input=fitted().x)
    assert {name: module.training for name, module in network.named_modules()} == modes
    assert all(torch.equal(state[key], value) for key, value in network.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not network.blocks[0].norm.weight.requires_grad
    frozen = set(network.blocks[0].norm.modules())
    assert {module.training for module in headed.modules() if module not in frozen} == {training}
    assert {module.training for module in headed.train().modules()} == {True}


def test_what_is_behind_the_layer_is_gone():
    names = {name.removeprefix("backbone.network.") for name, _ in attach().named_parameters()}
    assert not {name for name in names if name.startswith(("fc", "blocks.1"))}
    assert {"stem.0.weight", "blocks.0.skip.bias", "head.bias"} <= names


def test_the_head_is_a_copy_and_the_backbone_is_shared():
    model = copy.deepcopy(fitted().model)
    model.layer_.requires_grad_(False)
    network = make_network()
    headed = td.attach_head(network, model, "blocks.0", example_input=fitted().x)
    assert all(parameter.requires_grad for parameter in headed.head.parameters())
    assert not {*headed.parameters()} & {*model.layer_.parameters()}
    before = model.predict(fitted().features)
    with torch.no_grad():
        for parameter in headed.parameters():
            parameter.zero_()
    assert np.array_equal(model.predict(fitted().features), before)
    assert float(network.stem[0].weight.detach().abs().max()) == 0


# Training.


@pytest.mark.parametrize("make", [ConvNet, BranchesOnShape])
def test_gradients_reach_the_backbone_and_the_head(make):
    headed = attach(make).train()
    nn.functional.mse_loss(headed(fitted().x), fitted().y).backward()
    used = {name for name, parameter in headed.named_parameters() if parameter.grad is not None}
    behind = {name for name, _ in headed.named_parameters() if ".fc." in name or ".blocks.1." in name}
    assert used == {name for name, _ in headed.named_parameters()} - behind
    assert bool(behind) == (make is BranchesOnShape)
    assert all(bool(parameter.grad.any()) for name, parameter in headed.named_parameters() if name in used)


def test_a_stem_that_the_network_freezes_stays_frozen():
    headed = attach(FreezesStem)
    headed(fitted().x).sum().backward()
    network = headed.backbone.network
    assert network.stem[0].weight.grad is None
    assert network.blocks[0].conv.weight.grad is not None


def test_dropout_of_a_network_that_asks_for_its_mode_is_drawn():
    headed = attach(AsksForMode)
    headed.head.dropout = None
    assert torch.equal(headed(fitted().x), headed(fitted().x))
    headed.train()
    for module in headed.modules():
        if isinstance(module, nn.BatchNorm2d | nn.Dropout2d):
            module.eval()
    assert not torch.equal(headed(fitted().x), headed(fitted().x))


def test_train_mode_draws_masks():
    headed = attach()
    headed.head.train()
    assert not torch.equal(headed(fitted().x), headed(fitted().x))
    with td.fixed_masks(headed):
        assert torch.equal(headed(fitted().x), headed(fitted().x))


@pytest.mark.parametrize("make", [ConvNet, BranchesOnShape])
def test_closed_forms_go_through_it(make):
    headed, features = attach(make), torch.from_numpy(fitted().features)
    loss = td.expected_mse(headed, fitted().x, fitted().y)
    assert is_close(loss, td.expected_mse(fitted().model.layer_, features, fitted().y))
    loss.backward()
    assert bool(headed.get_parameter("backbone.network.stem.0.weight").grad.any())
    moments = fitted().model.layer_.moments(features)
    predicted = td.predict(headed, fitted().x, mode="exact")
    assert is_close(predicted.mean, moments.mean)
    assert is_close(predicted.std, moments.variance.sqrt())
    assert bool((predicted.std > 0).all())


def test_the_expected_loss_is_the_mean_over_the_masks():
    headed = attach()
    headed.head.train()
    torch.manual_seed(0)
    with torch.no_grad():
        drawn = torch.stack([nn.functional.mse_loss(headed(fitted().x), fitted().y) for _ in range(2000)])
        exact = td.expected_mse(headed, fitted().x, fitted().y)
    assert abs(float(drawn.mean() - exact)) < 4 * float(drawn.std()) / len(drawn) ** 0.5


def test_fine_tuning_lowers_the_expected_loss():
    headed = attach()
    groups = td.param_groups(headed, lr=1e-2)
    assert [group["lr"] for group in groups] == [1e-2, 1e-2 / len(headed.head.operands())]
    assert sum(len(group["params"]) for group in groups) == len(list(headed.parameters()))
    optimizer = torch.optim.SGD(groups)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = td.expected_mse(headed, fitted().x, fitted().y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


# Copies and files.


@pytest.mark.parametrize("make", [ConvNet, BranchesOnShape, Tokens])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_are_the_same_and_apart(make, copied):
    shape = (8, 4, 4) if make is Tokens else (8, 8, 8)
    layer = "blocks.0" if make is not Tokens else "blocks.1"
    head = td.CPRegression(shape, 2, rank=3, dropout=0.5)
    headed = td.attach_head(make_network(make), head, layer, example_input=fitted().x)
    before = headed(fitted().x)
    again = copied(headed)
    assert torch.equal(again(fitted().x), before)
    assert not {*again.parameters()} & {*headed.parameters()}
    with torch.no_grad():
        for parameter in again.parameters():
            parameter.zero_()
    assert torch.equal(headed(fitted().x), before)


def other_network(make=ConvNet):
    """Of the same structure, with other weights."""
    torch.manual_seed(5)
    return make().eval()


def train_a_step(headed):
    """So that neither backbone nor head are those of before."""
    optimizer = torch.optim.SGD(headed.parameters(), lr=1e-2)
    headed.train()(fitted().x).sum().backward()
    optimizer.step()
    return headed.eval()


@pytest.mark.parametrize("make", [ConvNet, BranchesOnShape])
def test_a_file_comes_back_into_a_plain_network(make, tmp_path):
    headed = train_a_step(attach(make))
    td.save(headed, tmp_path / "headed.safetensors")
    network = other_network(make)
    again = td.load(tmp_path / "headed.safetensors", network)
    assert torch.equal(again(fitted().x), headed(fitted().x))
    assert again.is_cut is headed.is_cut
    assert again.head.dropout.config() == headed.head.dropout.config()
    assert torch.equal(network.stem[0].weight, headed.get_parameter("backbone.network.stem.0.weight"))
    assert network.stem[0].weight in set(again.parameters())
    assert not again.training
    assert td.load(tmp_path / "headed.safetensors", other_network(make).train()).training


@pytest.mark.parametrize("wrap", [lambda headed: headed, nn.DataParallel])
def test_a_file_comes_back_in_place(wrap, tmp_path):
    headed = train_a_step(attach())
    td.save(headed, tmp_path / "headed.safetensors")
    present = wrap(attach())
    assert not torch.equal(present(fitted().x), headed(fitted().x))
    assert td.load(tmp_path / "headed.safetensors", present) is present
    assert torch.equal(present(fitted().x), headed(fitted().x))


@pytest.mark.parametrize("name", ["channel_axis", "CV, pooled ridge", "CV, channel_axis, ridge", "CV, classes"])
def test_every_head_comes_back(name, tmp_path):
    headed = td.attach_head(many().maps, fit_estimator(name))
    td.save(headed, tmp_path / "headed.safetensors")
    again = td.load(tmp_path / "headed.safetensors", other_network())
    assert torch.equal(again(many().x), headed(many().x))


def test_joined_layers_and_tokens_come_back(tmp_path):
    for make, options in [NETWORKS["layers joined and pooled"][:2], NETWORKS["tokens"][:2]]:
        maps = get_maps(make_network(make), fitted().x, **options)
        headed = td.attach_head(maps, td.TuckerRegression(maps.map_shape_, 3, rank=2).double())
        td.save(headed, tmp_path / "headed.safetensors")
        again = td.load(tmp_path / "headed.safetensors", other_network(make))
        assert torch.equal(again(fitted().x), headed(fitted().x))
        assert again(fitted().x).dtype == torch.float64


class Renamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = ConvNet()

    def forward(self, x):
        return self.features(x)


class Wider(ConvNet):
    def __init__(self):
        super().__init__()
        self.stem[0] = nn.Conv2d(1, 6, 3, stride=2, padding=1)


# A network that the file is not for, and what the message says.
WRONG = {
    "other names": (Renamed, r"was attached at 'blocks.0', a layer that Renamed has not"),
    "other shapes": (Wider, r"has another shape of \['backbone.network.stem.0.weight'\]"),
    "cannot be cut": (BranchesOnShape, r"BranchesOnShape cannot be cut at 'blocks.0' as it was"),
    "none": (lambda: None, r"holds a network with an attached head; pass model="),
    "head at another layer": (
        lambda: attach(layer="blocks.0.norm"),
        r"attached with \{'places': .*'blocks.0'.*the model has one with \{'places': .*'blocks.0.norm'",
    ),
    "another head": (
        lambda: td.attach_head(
            make_network(), td.CPRegression((8, 8, 8), 3, rank=2), "blocks.0", example_input=fitted().x
        ),
        r"layer 'head' of .* has output_shape=\[2\], the model's has \[3\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_file_for_another_network_is_refused(case, tmp_path):
    make, words = WRONG[case]
    td.save(attach(), tmp_path / "headed.safetensors")
    network = make()
    state = {} if network is None else copy.deepcopy(network.state_dict())
    with pytest.raises(td.TensorDropoutError, match=words) as caught:
        td.load(tmp_path / "headed.safetensors", network)
    assert "\n" not in str(caught.value)
    assert network is None or all(torch.equal(state[key], value) for key, value in network.state_dict().items())


def rewrite(path, change):
    """Change the config in the header of a file."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    config = json.loads(header["tensor_dropout"])
    change(config)
    save_file(load_file(path), path, metadata={"tensor_dropout": json.dumps(config)})


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["attached"].update(dtype="load"),
        lambda config: config["attached"].update(places=[]),
        lambda config: config["attached"].update(head={"type": "os.system", "command": "touch here"}),
        lambda config: config["attached"]["places"][0].update(key=["__import__('os').mkdir('here')"]),
        lambda config: config["attached"]["places"][0].update(key="x', __import__('os').mkdir('here'), '"),
        lambda config: config["attached"]["places"][0].update(grid="__import__('os').mkdir('here')", skipped=1),
        lambda config: config["attached"]["places"][0].update(calls="1"),
        lambda config: config["layers"]["head"].update(type="Linear"),
    ],
)
def test_a_damaged_file_is_refused_and_runs_nothing(change, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    td.save(attach(), "headed.safetensors")
    rewrite("headed.safetensors", change)
    try:
        headed = td.load("headed.safetensors", other_network())
    except td.TensorDropoutError as error:
        assert "headed.safetensors" in str(error)  # noqa: PT017 - one of them loads, and then does not run
    else:
        with pytest.raises((TypeError, IndexError, RuntimeError)):
            headed(fitted().x)
    assert os.listdir() == ["headed.safetensors"]


def test_a_head_of_your_own_is_loaded_in_place_only(tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.regression = td.CPRegression((8, 8, 8), 2, rank=3)

        def forward(self, x):
            return self.regression(x / 2)

    headed = td.attach_head(make_network(), Scaled(), "blocks.0", example_input=fitted().x)
    td.save(headed, tmp_path / "headed.safetensors")
    present = td.attach_head(make_network(), Scaled(), "blocks.0", example_input=fitted().x)
    assert torch.equal(td.load(tmp_path / "headed.safetensors", present)(fitted().x), headed(fitted().x))
    with pytest.raises(td.TensorDropoutError, match="tensor regression layers at"):
        td.load(tmp_path / "headed.safetensors", other_network())


# Deployment.


@pytest.mark.parametrize("name", ["a block", "layers joined and pooled", "tokens", "MONAI, volumes"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_exports(name, tmp_path):
    make, options, shape, _ = NETWORKS[name]
    network, x = make_network(make), make_inputs(shape, n=3)
    maps = get_maps(network, x, **options)
    headed = td.attach_head(maps, td.CPRegression(maps.map_shape_, 2, rank=3, dropout=0.5))
    assert export_program(headed, x, tmp_path / "headed.pt2") < 1e-5
    program = torch.export.load(tmp_path / "headed.pt2").module()
    assert is_close(program(torch.cat([x, x])), headed(torch.cat([x, x])))
    if name != "MONAI, volumes":  # the others need onnxruntime for a second each
        pytest.importorskip("onnxscript", reason="needs the extra onnx")
        assert export_onnx(headed, x, tmp_path / "headed.onnx") < 1e-5


@pytest.mark.parametrize("export", [export_program, export_onnx])
def test_a_network_that_a_hook_ends_is_not_exported(export, tmp_path):
    with pytest.raises(td.TensorDropoutError, match=r"BranchesOnShape cannot be exported up to 'blocks.0'") as caught:
        export(attach(BranchesOnShape), fitted().x, tmp_path / "headed")
    assert "does not branch on tensors, their shapes or self.training can be cut" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["y of three axes", "channel_axis"])
def test_merges_to_plain_torch(name, tmp_path):
    headed = td.attach_head(many().maps, fit_estimator(name))
    expected = headed(many().x)
    td.merge_(headed)
    assert is_close(headed(many().x), expected)
    plain = {type(module).__module__.partition(".")[0] for module in headed.head.modules()}
    assert plain == {"torch"} | ({"tensor_dropout"} if name == "channel_axis" else set())  # it moves channels
    td.save(headed, tmp_path / "merged.safetensors")
    again = td.load(tmp_path / "merged.safetensors", other_network())
    assert torch.equal(again(many().x), headed(many().x))


# Bad input.

BAD = {
    "not fitted": (
        lambda: td.attach_head(ConvNet(), TensorRegressor(), "blocks.0"),
        "TensorRegressor is not fitted yet",
    ),
    "a pipeline": (
        lambda: td.attach_head(ConvNet(), make_pipeline(TensorRegressor()), "blocks.0"),
        "got a Pipeline; of a pipeline or a search, pass the estimator in it",
    ),
    "arguments swapped": (lambda: td.attach_head(fitted().model, fitted().maps, "blocks.0"), "got a FeatureMaps"),
    "no network": (lambda: td.attach_head(fitted().model, fitted().model, "blocks.0"), "expected an nn.Module"),
    "no layer": (lambda: td.attach_head(ConvNet(), fitted().model), "name the layer, or pass the FeatureMaps"),
    "a layer that does not exist": (
        lambda: td.attach_head(ConvNet(), fitted().model, "block.0"),
        "ConvNet has no layer 'block.0'; the nearest names are ['blocks.0'",
    ),
    "layer twice": (lambda: td.attach_head(fitted().maps, fitted().model, "blocks.0"), "the FeatureMaps says layer"),
    "nothing picked": (
        lambda: td.attach_head(FeatureMaps(ConvNet()), fitted().model),
        "has not picked a layer yet; call its fit or transform",
    ),
    "another size": (
        lambda: td.attach_head(ConvNet(), fitted().model, "blocks.0"),
        "the head takes maps of shape (8, 8, 8), but the layer 'blocks.0' gives (8, 56, 56); name the layer that",
    ),
    "another layer": (
        lambda: td.attach_head(ConvNet(), fitted().model, "blocks.1", example_input=fitted().x),
        "the head takes maps of shape (8, 8, 8), but the layer 'blocks.1' gives (10, 4, 4)",
    ),
    "another pool": (
        lambda: td.attach_head(ConvNet(), fitted().model, "blocks.0", example_input=fitted().x, pool=2),
        "gives (8, 2, 2)",
    ),
    "channel_axis on the other side": (
        lambda: td.attach_head(fitted().maps, TensorRegressor.from_layer(td.CPRegression((8, 2, 3), 1, rank=2))),
        "takes maps of shape (8, 2, 3)",
    ),
    "no map": (lambda: td.attach_head(ConvNet(), fitted().model, "fc"), "the layer 'fc' gives no map but the shape"),
    "an example that is none": (
        lambda: td.attach_head(ConvNet(), fitted().model, "blocks.0", example_input=(3, 32, 32)),
        "example_input is a tensor (n, C, H, W[, D]), as the network takes it; got tuple",
    ),
    "an example without samples' axis": (
        lambda: td.attach_head(ConvNet(), fitted().model, "blocks.0", example_input=fitted().x[0]),
        "got (3, 32, 32)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_told_in_one_sentence(case):
    call, words = BAD[case]
    with pytest.raises(td.TensorDropoutError) as caught:
        call()
    assert str(caught.value).startswith("attach_head: ")
    assert words in str(caught.value)
    assert_one_sentence(caught)


def test_an_example_that_the_network_does_not_take_is_told():
    with pytest.raises(td.TensorDropoutError, match=r"does not run on .* \(2, 3, 224, 224\).*; pass an example_input"):
        td.attach_head(Wider(), fitted().model, "blocks.0")


def test_says_where_it_is_attached():
    assert "'stem.0', 'blocks.0', pool=(3, 3)" in repr(
        td.attach_head(
            make_network(),
            td.CPRegression((14, 3, 3), 1, rank=2),
            ["stem.0", "blocks.0"],
            pool=3,
            example_input=fitted().x,
        )
    )
    assert isinstance(attach(BranchesOnShape).backbone, HookedBackbone)
