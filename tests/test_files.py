"""Saving and loading: round trips, files that must be refused, and files that must survive."""

from __future__ import annotations

import json
import math
import os
import pickle
import stat
import struct
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrize, prune

import tensor_dropout as td
from layers_under_test import every_format, make_input, make_layer
from tensor_dropout import files
from tensor_dropout.layers import laws

LAWS = [{"law": law} for law in ("bernoulli", "replacement", "gaussian", "nested")]
LAWS += [{"law": "bernoulli", "min_rank": 2}, {"law": "nested", "min_rank": 2}]
every_law = pytest.mark.parametrize("law", LAWS, ids=lambda law: "-".join(map(str, law.values())))


class HalfOfThem:
    """A law of the user's own: c = 1/2 or 3/2."""

    def draw(self, shape, theta, *, device):
        return (torch.rand(shape, device=device) < theta).float() + 0.5

    def mean(self, R, theta):
        return (theta + 0.5).expand(R)

    def second_moment(self, R, theta):
        return None

    def support(self, R, theta):
        return None


class Network(nn.Module):
    """A backbone and a head, as users have them."""

    def __init__(self, channels=6, head="tucker", **options):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU())
        self.head = make_layer(head, input_shape=(channels, 6, 6), output_shape=4, rank=3, **options)

    def forward(self, x):
        return self.head(self.backbone(x))


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(laws, "_REGISTERED", {})


def assert_same_function(one, two, x):
    """In eval, and in training under the same seed."""
    assert one.training == two.training
    training, outputs = one.training, []
    for model in (one, two):
        torch.manual_seed(5)
        outputs.append((model.train()(x), model.eval()(x)))
        model.train(training)
    for ours, theirs in zip(*outputs, strict=True):
        assert torch.equal(ours, theirs)


@contextmanager
def refused(message, model, error=td.TensorDropoutError):
    """The block raises, and leaves every tensor, module and mode of the model as it was."""
    modules, words = dict(model.named_modules(remove_duplicate=False)), repr(model)
    modes, state = [module.training for module in modules.values()], model.state_dict(keep_vars=True)
    values = [tensor.detach().clone() for tensor in state.values()]
    with pytest.raises(error, match=message):
        yield
    assert list(dict(model.named_modules(remove_duplicate=False)).items()) == list(modules.items())
    assert [module.training for module in modules.values()] == modes
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(state)
    for key, value in zip(state, values, strict=True):
        assert now[key] is state[key]
        assert torch.equal(now[key], value), key
    assert repr(model) == words


# Round trips.


@every_format
@every_law
def test_round_trip_of_a_layer(path, format, law):
    layer = make_layer(format, **law)
    td.save(layer, path)
    loaded = td.load(path)
    assert type(loaded) is type(layer)
    assert loaded.config() == layer.config()
    assert repr(loaded) == repr(layer)
    assert_same_function(loaded, layer, make_input(layer))


@every_format
@pytest.mark.parametrize(
    "options",
    [
        {"theta": None},
        {"theta": None, "bias": False},
        {"scaling": "paper", "at_test": "sample", "per_sample": True},
        {"init": "pool"},
        {"input_shape": (4,), "output_shape": (3, 2), "rank": 2},
        {"dtype": torch.float64},
    ],
    ids=str,
)
def test_round_trip_of_every_setting(path, format, options):
    layer = make_layer(format, **options)
    td.save(layer, path)
    loaded = td.load(path)
    assert loaded.config() == layer.config()
    assert_same_function(loaded, layer, make_input(layer))


@pytest.mark.parametrize(("format", "modes"), [("tucker", (0, 3)), ("tt", (2,)), ("tucker", "outer")])
def test_round_trip_of_chosen_modes(path, format, modes):
    layer = make_layer(format, modes=modes)
    td.save(layer, path)
    assert td.load(path).dropped_axes == layer.dropped_axes


@pytest.mark.parametrize("theta", [0.3, 1 / 3, 0.999999, 1e-4, 1e-9])
def test_round_trip_of_a_theta_that_was_changed(path, theta):
    layer = make_layer("cp", theta=0.9)
    layer.dropout.theta = theta
    td.save(layer, path)
    assert torch.equal(td.load(path).dropout.theta, torch.tensor(theta))


@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_round_trip_of_half_precision_keeps_theta_in_float32(path, format, dtype):
    layer = make_layer(format, theta=0.9, small=True).to(dtype)
    td.save(layer, path)
    loaded = td.load(path)
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
    assert torch.equal(loaded.dropout.theta, torch.tensor(0.9))
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in layer.state_dict().items())


def test_round_trip_of_a_registered_law(path, registry):
    law = HalfOfThem()
    td.register_law("half-of-them", law)
    layer = make_layer("cp", law=law)
    td.save(layer, path)
    loaded = td.load(path)
    assert loaded.dropout.law is law
    assert_same_function(loaded, layer, make_input(layer))


def test_an_unregistered_law_is_not_saved(path, registry):
    with pytest.raises(td.TensorDropoutError, match=r"HalfOfThem .* has no name to save; .* td\.register_law"):
        td.save(make_layer("cp", law=HalfOfThem()), path)
    assert not path.exists()


def test_a_law_that_is_not_registered_here_is_not_loaded(path, monkeypatch):
    monkeypatch.setattr(laws, "_REGISTERED", {"half-of-them": HalfOfThem()})
    td.save(make_layer("cp", law="half-of-them"), path)
    monkeypatch.setattr(laws, "_REGISTERED", {})
    with pytest.raises(td.TensorDropoutError, match="unknown law 'half-of-them'"):
        td.load(path)


@every_format
def test_round_trip_of_a_model_with_a_layer_inside(path, format):
    trained = Network(head=format, theta=0.5, law="nested", scaling="paper")
    trained(IMAGES)  # moves the batch norm's statistics
    td.save(trained, path)
    fresh = Network(head=format, theta=0.9, seed=3)
    assert td.load(path, fresh) is fresh
    assert repr(fresh) == repr(trained)
    assert_same_function(fresh, trained, IMAGES)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_keeps_its_mode(path, training):
    td.save(Network(theta=0.5), path)
    model = Network(theta=0.9).train(training)
    td.load(path, model)
    assert {module.training for module in model.modules()} == {training}


@pytest.mark.parametrize(("saved", "present"), [(None, 0.5), (0.5, None)])
def test_the_dropout_is_that_of_the_file(path, saved, present):
    td.save(make_layer("cp", theta=saved), path)
    model = make_layer("cp", theta=present)
    td.load(path, model)
    assert (model.dropout is None) == (saved is None)


def test_a_model_of_several_layers(path):
    def make(seed):
        return nn.Sequential(
            make_layer("tucker", seed=seed), nn.ReLU(), make_layer("cp", input_shape=10, rank=4, seed=seed)
        )

    saved, model = make(0), make(1)
    td.save(saved, path)
    td.load(path, model)
    assert_same_function(model, saved, make_input(saved[0]))


@every_format
def test_state_dict_alone_loads_into_an_equal_layer(tmp_path, format):
    layer, other = make_layer(format, theta=0.6), make_layer(format, theta=0.9, seed=1)
    torch.save(layer.state_dict(), tmp_path / "state.pt")
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert_same_function(other, layer, make_input(layer))


def test_compiled_models_are_looked_through(path):
    trained, fresh = Network(theta=0.5), Network(theta=0.9, seed=3)
    td.save(torch.compile(trained), path)
    compiled = torch.compile(fresh)
    assert td.load(path, compiled) is compiled
    assert_same_function(fresh, trained, IMAGES)
    layer = make_layer("cp")
    td.save(torch.compile(layer), path)
    assert_same_function(td.load(path), layer, make_input(layer))


def test_file_can_be_given_as_a_string(path):
    layer = make_layer("cp")
    td.save(layer, str(path))
    assert_same_function(td.load(str(path)), layer, make_input(layer))


class Head(td.CPRegression):
    """A user's own subclass."""


def test_a_subclass_of_a_layer_can_be_filled_but_not_built(path):
    head = Head((4, 3), 2, rank=2)
    td.save(head, path)
    model = td.load(path, Head((4, 3), 2, rank=2))
    assert_same_function(model, head, make_input(head))
    with pytest.raises(td.TensorDropoutError, match="unknown type 'Head'"):
        td.load(path)


def test_nothing_is_unpickled(path, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("unpickled")

    layer = make_layer("tucker")
    td.save(layer, path)
    for module, names in ((pickle, ("load", "loads", "Unpickler")), (torch, ("load",))):
        for name in names:
            monkeypatch.setattr(module, name, refuse)
    loaded, model = td.load(path), td.load(path, make_layer("tucker", seed=1))
    monkeypatch.undo()
    for each in (loaded, model):
        assert_same_function(each, layer, make_input(layer))


# Layers, dropouts and weights that a model has twice are stored once.


class Aliased(Network):
    """The head under two names; files have the weights under the first in the alphabet."""

    def __init__(self, **options):
        super().__init__(**options)
        self.classifier = self.head


class Twins(nn.Module):
    """Two heads with one dropout, which the network may own as well."""

    def __init__(self, theta=0.5, owned="", seed=0, **options):
        super().__init__()
        dropout = td.TensorDropout(theta, **options)
        if owned:
            self.add_module(owned, dropout)
        self.mean = make_layer("cp", seed=seed, theta=None)
        self.scale = make_layer("tucker", seed=seed, theta=None)
        self.mean.dropout = self.scale.dropout = dropout

    def forward(self, x):
        return self.mean(x) + self.scale(x)


class Tied(nn.Module):
    """A head, and weights that are one another's, whole and in part."""

    def __init__(self, seed=0):
        super().__init__()
        self.head = make_layer("cp", seed=seed)
        self.one, self.two = (nn.Linear(4, 4, bias=False) for _ in range(2))
        self.two.weight = self.one.weight
        self.register_buffer("part", self.one.weight.detach()[1:3])


def test_a_head_under_two_names(path):
    trained = Aliased(theta=0.5, law="nested")
    trained(IMAGES)
    td.save(trained, path)
    fresh = Aliased(theta=0.9, seed=3)
    td.load(path, fresh)
    assert fresh.classifier is fresh.head
    assert repr(fresh) == repr(trained)
    assert_same_function(fresh, trained, IMAGES)


@pytest.mark.parametrize("owned", ["", "a_dropout", "the_dropout"])
def test_a_dropout_that_layers_share(path, owned):
    trained, fresh = Twins(0.3, owned, law="nested", scaling="paper"), Twins(0.9, owned, seed=3)
    td.save(trained, path)
    td.load(path, fresh)
    assert fresh.mean.dropout is fresh.scale.dropout
    assert not owned or fresh.get_submodule(owned) is fresh.mean.dropout
    assert fresh.mean.config() == trained.mean.config()
    assert_same_function(fresh, trained, make_input(trained.mean))
    fresh.mean.dropout.theta = 0.7
    assert float(fresh.scale.dropout.theta) == pytest.approx(0.7)


def test_a_shared_dropout_into_layers_with_their_own_and_back(path):
    trained, fresh = Twins(0.3), Twins(0.9, seed=3)
    fresh.scale.dropout = td.TensorDropout(0.8)
    td.save(trained, path)
    td.load(path, fresh)
    assert fresh.mean.dropout is not fresh.scale.dropout
    assert_same_function(fresh, trained, make_input(trained.mean))
    fresh.scale.dropout.theta = 0.6
    td.save(fresh, path)
    td.load(path, trained)
    assert [float(layer.dropout.theta) for layer in (trained.mean, trained.scale)] == pytest.approx([0.3, 0.6])


def test_weights_that_share_memory(path):
    trained, fresh = Tied(), Tied(seed=3)
    td.save(trained, path)
    td.load(path, fresh)
    assert all(torch.equal(fresh.state_dict()[name], value) for name, value in trained.state_dict().items())
    assert fresh.two.weight is fresh.one.weight
    fresh.two = nn.Linear(4, 4, bias=False)
    with refused(r"lacks \['two\.weight'\]", fresh):
        td.load(path, fresh)


# What does not fit.

BASE = {"input_shape": (8, 6, 5), "output_shape": 10, "rank": 4}


@pytest.mark.parametrize(
    ("format", "change", "message"),
    [
        ("tucker", {"rank": 3}, r"layer '' of .* has rank=\[4, 4, 4, 4\], the model's has \[3, 3, 3, 3\]"),
        ("tucker", {"input_shape": (8, 5, 6)}, r"has input_shape=\[8, 6, 5\], the model's has \[8, 5, 6\]"),
        ("tucker", {"output_shape": 9}, r"has output_shape=\[10\], the model's has \[9\]"),
        ("tucker", {"bias": False}, "has bias=True, the model's has False"),
        ("cp", {}, "has type=TuckerRegression, the model's has CPRegression"),
    ],
)
def test_a_model_of_another_structure_is_refused_and_left_alone(path, format, change, message):
    td.save(make_layer("tucker", **BASE), path)
    model = make_layer(format, theta=0.9, seed=1, **{**BASE, **change})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(td.TensorDropoutError, match=message):
        td.load(path, model)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    td.load(path, make_layer("tucker", **BASE))


def test_other_weights_of_the_model_must_fit_too(path):
    model = Network(theta=0.5)
    td.save(model, path)
    other = Network(theta=0.5)
    other.backbone[0] = nn.Conv2d(3, 6, 5)
    with pytest.raises(td.TensorDropoutError, match=r"do not fit the model[\s\S]*backbone\.0\.weight"):
        td.load(path, other)
    other.backbone[0] = nn.Identity()
    with pytest.raises(td.TensorDropoutError, match=r"do not fit the model[\s\S]*backbone\.0\.weight"):
        td.load(path, other)


def test_a_model_whose_other_weights_do_not_fit_keeps_its_dropout(path):
    td.save(Network(theta=0.5, law="nested"), path)
    other = Network(theta=0.9)
    other.backbone[0] = nn.Conv2d(3, 6, 5)
    with pytest.raises(td.TensorDropoutError, match="do not fit the model"):
        td.load(path, other)
    assert "theta=0.9, law='bernoulli'" in repr(other.head)


@pytest.mark.parametrize("build", [Network, Aliased, Twins], ids=lambda build: build.__name__)
def test_another_shape_in_the_last_tensor_leaves_the_model_as_it_was(path, build):
    saved, model = build(theta=0.5, law="nested"), build(theta=0.9, seed=3)
    for each, size in ((saved, 5), (model, 6)):
        each.register_buffer("zzz", torch.full((size,), float(size)))
    td.save(saved, path)
    assert list(load_file(path))[-1] == "zzz"
    with refused(r"has another shape of \['zzz'\]", model):
        td.load(path, model)


class Fussy(Network):
    """Its own hook refuses the weights when they are all in place."""

    def __init__(self, error, **options):
        super().__init__(**options)
        self.error = error
        self.register_load_state_dict_post_hook(self.refuse)

    @staticmethod
    def refuse(module, keys):
        raise module.error


@pytest.mark.parametrize(("theta", "present"), [(0.5, 0.9), (0.5, None), (None, 0.9)])
@pytest.mark.parametrize("error", [RuntimeError("not\nthese"), KeyError("these"), KeyboardInterrupt()], ids=repr)
def test_a_model_that_refuses_the_weights_itself_is_as_it_was(path, error, theta, present):
    td.save(Network(theta=theta), path)
    model = Fussy(error, theta=present, seed=3)
    wanted = td.TensorDropoutError if isinstance(error, RuntimeError) else type(error)
    with refused("Fussy did not take .* not these" if wanted is td.TensorDropoutError else None, model, wanted):
        td.load(path, model)


@pytest.mark.parametrize("theta", [2.0, float("nan"), [0.5, 0.5]], ids=str)
def test_a_damaged_theta_among_the_weights_is_refused(path, theta):
    td.save(make_layer("cp"), path)
    model = make_layer("cp", theta=0.9, seed=3)
    config = json.dumps({"version": 1, "layers": {"": make_layer("cp").config()}})
    save_file(load_file(path) | {"dropout.theta": torch.tensor(theta)}, path, metadata={"tensor_dropout": config})
    with refused("theta is the KEEP probability", model):
        td.load(path, model)


def test_a_network_needs_a_model_to_fill(path):
    td.save(Network(), path)
    with pytest.raises(td.TensorDropoutError, match=r"holds a network with the layers \['head'\]; pass model="):
        td.load(path)


def test_a_bare_layer_does_not_fill_a_network(path):
    td.save(make_layer("cp"), path)
    with pytest.raises(
        td.TensorDropoutError, match=r"has a bare layer, the model tensor regression layers at \['head'\]"
    ):
        td.load(path, Network())


def test_settings_of_a_models_own_are_left_alone(path):
    model = torch.nn.Sequential(td.CPRegression((4, 3, 3), 2, rank=2))
    model.settings = {"width": 4}
    td.save(model, path)
    assert not files.builds_itself(path)
    td.load(path, torch.nn.Sequential(td.CPRegression((4, 3, 3), 2, rank=2)))


def test_a_model_without_tensor_layers_is_not_saved(path):
    with pytest.raises(td.TensorDropoutError, match="Linear has no tensor regression layer; use safetensors itself"):
        td.save(nn.Linear(2, 2), path)
    assert not path.exists()


# Files that are not ours, or not whole.


def write_header(path, header):
    """A real file of ours, with another text in the place of its config."""
    layer = make_layer("cp")
    save_file(layer.state_dict(), path, metadata=None if header is None else {"tensor_dropout": header})


def good_config(**changes):
    layer = make_layer("cp").config()
    return {"version": 1, "library": "0.1.0", "layers": {"": {**layer, **changes}}}


def test_a_header_written_by_hand_is_read(path):
    write_header(path, json.dumps(good_config()))
    assert td.load(path).config() == make_layer("cp").config()


DAMAGED = "config in the header of .* is damaged"
LACKING = {key: value for key, value in good_config()["layers"][""].items() if key != "rank"}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        pytest.param(None, r"was not written by td\.save; load plain weights with load_state_dict", id="foreign"),
        pytest.param("", DAMAGED, id="empty"),
        pytest.param('{"version": 1, "lay', DAMAGED, id="cut off"),
        pytest.param("{}", DAMAGED, id="no version"),
        pytest.param("null", DAMAGED, id="null"),
        pytest.param("[1, 2]", DAMAGED, id="a list"),
        pytest.param('{"version": 1}', DAMAGED, id="no layers"),
        pytest.param('{"version": 3, "layers": {}}', "format version 3, .* reads version 1 and 2", id="newer"),
        pytest.param('{"version": "1", "layers": {}}', "format version 1", id="version as text"),
        pytest.param(json.dumps(good_config(type="Evil")), "unknown type 'Evil'", id="unknown type"),
    ],
)
def test_headers_that_are_refused(path, header, message):
    write_header(path, header)
    with pytest.raises(td.TensorDropoutError, match=message):
        td.load(path)


@pytest.mark.parametrize("with_model", [False, True], ids=["bare", "into a model"])
@pytest.mark.parametrize(
    "config",
    [
        pytest.param({"version": 1, "layers": []}, id="layers are a list"),
        pytest.param({"version": 1, "layers": None}, id="layers are null"),
        pytest.param({"version": 1, "layers": {"": []}}, id="a layer is a list"),
        pytest.param({"version": 1, "layers": {"": {}}}, id="a layer is empty"),
        pytest.param({"version": 1, "layers": {"": LACKING}}, id="a layer lacks its rank"),
        pytest.param(good_config(rank=None), id="rank is null"),
        pytest.param(good_config(dropout={"theta": 0.5, "colour": "red"}), id="unknown dropout setting"),
        pytest.param(good_config(dropout=[0.5]), id="dropout is a list"),
        pytest.param(good_config(dropout={}), id="dropout lacks theta"),
        pytest.param(good_config(dropout={"theta": 2.0}), id="theta out of range"),
        pytest.param(good_config(dropout={"theta": 0.5, "min_rank": 100}), id="min_rank above the rank"),
        pytest.param(good_config(dropout={"theta": 0.5, "modes": [7]}), id="modes that the layer lacks"),
    ],
)
def test_damaged_configs_raise_our_exception(path, config, with_model):
    write_header(path, json.dumps(config))
    with pytest.raises(td.TensorDropoutError):
        td.load(path, make_layer("cp") if with_model else None)


def test_a_file_that_is_not_safetensors_is_refused(path):
    path.write_bytes(pickle.dumps({"weights": [1, 2, 3]}))
    with pytest.raises(td.TensorDropoutError, match="is not a safetensors file"):
        td.load(path)


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 0.999])
def test_a_truncated_file_is_refused(path, keep):
    td.save(make_layer("cp"), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole))])
    with pytest.raises(td.TensorDropoutError, match="is not a safetensors file"):
        td.load(path)


def test_a_header_length_beyond_the_file_is_refused(path):
    td.save(make_layer("cp"), path)
    path.write_bytes(struct.pack("<Q", 2**40) + path.read_bytes()[8:])
    with pytest.raises(td.TensorDropoutError, match="is not a safetensors file"):
        td.load(path)


def test_weights_missing_from_the_file_are_named(path):
    layer = make_layer("cp")
    state = {name: value for name, value in layer.state_dict().items() if name != "factors.1"}
    save_file(state, path, metadata={"tensor_dropout": json.dumps(good_config())})
    with pytest.raises(td.TensorDropoutError, match=r"do not fit the model[\s\S]*factors\.1"):
        td.load(path)


def test_a_missing_file_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(td.TensorDropoutError, match=r"there is no file .*nowhere\.safetensors"):
        td.load(tmp_path / "nowhere.safetensors")
    with pytest.raises(td.TensorDropoutError, match="is a folder, not a file"):
        td.load(tmp_path)
    with pytest.raises(td.TensorDropoutError, match=r"the folder .*nowhere does not exist; make it first"):
        td.save(make_layer("cp"), tmp_path / "nowhere" / "model.safetensors")
    with pytest.raises(td.TensorDropoutError, match="is a folder"):
        td.save(make_layer("cp"), tmp_path)
    assert list(tmp_path.iterdir()) == []


# A file appears whole or not at all.


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=["disk full", "ctrl-c"])
@pytest.mark.parametrize("there_before", [False, True])
def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(path, monkeypatch, error, there_before):
    old = make_layer("cp", seed=1)
    if there_before:
        td.save(old, path)

    def interrupted(model, filename, metadata=None):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise error

    monkeypatch.setattr(files, "save_model", interrupted)
    with pytest.raises(type(error)):
        td.save(make_layer("cp"), path)
    assert list(path.parent.iterdir()) == ([path] if there_before else [])
    if there_before:
        assert_same_function(td.load(path), old, make_input(old))


def test_a_save_replaces_the_old_file(path):
    old, new = make_layer("cp"), make_layer("tt", seed=1)
    td.save(old, path)
    whole = path.read_bytes()
    with path.open("rb") as reader:  # another process, in the midst of reading
        td.save(new, path)
        assert reader.read() == whole
    assert list(path.parent.iterdir()) == [path]
    assert_same_function(td.load(path), new, make_input(new))


class KeepFirst(HalfOfThem):
    """A law of the user with a number of its own."""

    def __init__(self, kept):
        self.kept = kept

    def draw(self, shape, theta, *, device):
        return (torch.arange(shape[-1], device=device) < self.kept).float().expand(shape)

    def mean(self, R, theta):
        return (torch.arange(R) < self.kept).double() + 1e-3


@pytest.mark.parametrize("other", [KeepFirst(3), HalfOfThem()], ids=["another number", "another class"])
def test_another_law_under_the_name_of_the_file_is_refused(path, monkeypatch, other):
    monkeypatch.setattr(laws, "_REGISTERED", {"mine": KeepFirst(2)})
    layer = make_layer("cp", law="mine")
    td.save(layer, path)
    monkeypatch.setattr(laws, "_REGISTERED", {"mine": other})
    target = make_layer("cp", seed=4)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    for model in (None, target):
        with pytest.raises(td.TensorDropoutError, match=r"law 'mine'.*KeepFirst.* td\.register_law"):
            td.load(path, model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    monkeypatch.setattr(laws, "_REGISTERED", {"mine": KeepFirst(2)})
    assert_same_function(td.load(path), layer, make_input(layer))


def test_a_law_of_a_file_that_does_not_identify_it_is_taken_by_its_name(path, monkeypatch):
    """As in files of version 0.1.0."""
    monkeypatch.setattr(laws, "_REGISTERED", {"mine": KeepFirst(2)})
    td.save(make_layer("cp", law="mine"), path)
    with safe_open(path, framework="pt") as file:
        config = json.loads(file.metadata()["tensor_dropout"])
    assert set(config.pop("laws")) == {"mine"}
    save_file(load_file(path), path, metadata={"tensor_dropout": json.dumps(config)})
    monkeypatch.setattr(laws, "_REGISTERED", {"mine": KeepFirst(3)})
    assert td.load(path).dropout.law.kept == 3


@pytest.mark.skipif(os.name != "posix", reason="permissions as on Unix")
def test_a_saved_file_has_the_permissions_of_any_new_file(path):
    plain = path.with_name("plain")
    plain.touch()
    td.save(make_layer("cp"), path)
    assert stat.filemode(path.stat().st_mode) == stat.filemode(plain.stat().st_mode)


def test_a_registered_law_with_a_min_rank_of_its_own_round_trips(path, registry):
    td.register_law("at-least-two", laws.Bernoulli(2))
    layer = td.CPRegression((4, 3), 2, rank=3, dropout=td.TensorDropout(0.5, law="at-least-two"))
    td.save(layer, path)
    assert td.load(path).dropout.min_rank == 2


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def parametrized(model):
    parametrize.register_parametrization(model[0], "core", Doubled())
    parametrize.register_parametrization(model[0].factors, "1", Doubled())
    return model


def pruned(model):
    return prune.l1_unstructured(model[0], "core", 0.5) and model


@pytest.mark.parametrize("prepare", [parametrized, pruned])
def test_a_prepared_model_loads_into_one_that_was_prepared_alike(path, prepare):
    saved, other = (prepare(nn.Sequential(td.TuckerRegression((4, 3), 5, rank=(3, 2, 4)))).eval() for _ in range(2))
    td.save(saved, path)
    x = make_input(saved[0])
    assert not torch.equal(other(x), saved(x))
    td.load(path, other)
    assert torch.equal(other(x), saved(x))
    with pytest.raises(td.TensorDropoutError, match="load: "):
        td.load(path, nn.Sequential(td.TuckerRegression((4, 3), 5, rank=(3, 2, 4))))


def test_pruned_factors_are_not_saved(path):
    """Nothing would apply their masks after loading: a list of parameters is never called."""
    model = nn.Sequential(make_layer("tucker"))
    prune.l1_unstructured(model[0].factors, "0", 0.5)
    with pytest.raises(td.TensorDropoutError, match=r"save: '0\.factors' is pruned.*prune\.remove"):
        td.save(model, path)
    assert not path.exists()
    prune.remove(model[0].factors, "0")
    td.save(model, path)
    again = td.load(path, nn.Sequential(make_layer("tucker")))
    assert_same_function(again[0], model[0], make_input(model[0]))


def test_data_parallel_is_looked_through(path):
    model = nn.Sequential(make_layer("cp"))
    td.save(nn.DataParallel(model), path)
    for fresh in (nn.Sequential(make_layer("cp")), nn.DataParallel(nn.Sequential(make_layer("cp")))):
        again = td.load(path, fresh)
        assert again is fresh
        inner = again.module if isinstance(again, nn.DataParallel) else again
        assert_same_function(inner[0], model[0], make_input(model[0]))


def test_a_weight_tied_to_its_transpose_is_refused_by_name(path):
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), td.CPRegression((5,), 3, rank=2))
    model[1].weight = nn.Parameter(model[0].weight.data.T)
    with pytest.raises(td.TensorDropoutError, match=r"save: \['1\.weight'\] share memory.*untie"):
        td.save(model, path)
    assert not path.exists()


class Versioned(nn.Linear):
    """Reads its weights by the version that wrote them, as torchvision's MNASNet does."""

    _version = 2

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
        if local_metadata.get("version") != 2:
            raise ValueError(f"version 2 is expected, got {local_metadata.get('version')}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)


def test_modules_that_ask_for_their_version_load(tmp_path):
    def build():
        return nn.Sequential(Versioned(6, 4), td.CPRegression(4, 3, rank=2))

    net, other = build(), build()
    td.save(net, tmp_path / "net.safetensors")
    td.load(tmp_path / "net.safetensors", other)
    assert torch.equal(other[0].weight, net[0].weight)


SAVED = Path(__file__).with_name("saved_by_0_1_0")
"""Files that version 0.1.0 wrote, and what its layers answered."""


@pytest.mark.parametrize("name", ["cp", "tucker", "tt", "converted"])
def test_a_file_that_0_1_0_wrote_answers_as_it_did_then(name):
    model, shape = None, (2, 4, 3, 3)
    if name == "converted":
        layers = [nn.Conv2d(1, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
        model, shape = nn.Sequential(*layers), (2, 1, 5, 5)
    model = td.load(SAVED / f"{name}.safetensors", model).eval()
    x = torch.linspace(-1, 1, math.prod(shape)).reshape(shape)
    expected = json.loads((SAVED / "outputs.json").read_text("utf-8"))[name]
    torch.testing.assert_close(model(x), torch.tensor(expected))
