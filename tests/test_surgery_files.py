"""Saving converted networks and our own, and loading them into plain ones; files that must be refused."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import tensor_dropout as td
from surgery_models import (
    BY_NAME,
    Residual,
    Snapshot,
    every_case,
    every_factorization,
    flat,
    make,
    make_batch,
    plain,
    refused,
)
from tensor_dropout.surgery.head import TensorHead
from tensor_dropout_lab.nets import HEADS, build_net


def fresh(case, dtype=torch.float32):
    """The same network, with other weights."""
    return make(case, dtype, seed=99)


def shake(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "net.safetensors"


def read_header(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["tensor_dropout"])


def write_header(path, config):
    text = config if isinstance(config, str) else json.dumps(config)
    save_file(load_file(path), path, metadata={"tensor_dropout": text})


# Converted networks into plain ones.


@every_case
def test_a_converted_network_loads_into_a_plain_one(case, path):
    model, x = make(case), make_batch(case)
    td.tensorize_(model, x, dropout=td.TensorDropout(0.7, scaling="paper"))
    shake(model.get_submodule(case.head))
    td.save(model, path)
    other = fresh(case)
    assert td.load(path, other) is other
    head, wanted = other.get_submodule(case.head), model.get_submodule(case.head)
    assert isinstance(head, TensorHead)
    assert head.config() == wanted.config()
    assert head.regression.config() == wanted.regression.config()
    assert torch.equal(other(x), model(x))
    assert list(other.state_dict()) == list(model.state_dict())
    other.train()
    assert head.regression.dropout.training
    td.merge_(other)
    td.merge_(model)
    assert torch.equal(other.eval()(x), model(x))
    assert list(other.state_dict()) == list(model.state_dict())


@every_factorization
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_format_and_dtype(factorization, dtype, path):
    model = plain().to(dtype).eval()
    x = torch.randn(2, 3, 8, 8).to(dtype)
    td.tensorize_(model, x, factorization=factorization, rank=3)
    td.save(model, path)
    other = td.load(path, plain().to(dtype).eval())
    assert torch.equal(other(x), model(x))
    assert {p.dtype for p in other.parameters()} == {dtype}


def test_the_surgery_is_repeated_exactly_when_merged_again(path):
    case = BY_NAME["resnet-2d"]
    model, x = make(case), make_batch(case)
    keys, y = list(model.state_dict()), model(x)
    td.tensorize_(model, x)
    td.save(model, path)
    other = fresh(case)
    pooling = other.avgpool
    td.load(path, other)
    assert other.avgpool.output_size == (4, 4)
    td.merge_(other)
    assert other.avgpool is pooling
    assert list(other.state_dict()) == keys
    torch.testing.assert_close(other(x), y)


def test_a_truncated_network_loads(path):
    model, x = plain().eval(), torch.randn(2, 3, 8, 8)
    td.tensorize_(model, x)
    td.truncate_(model, 2)
    td.save(model, path)
    other = td.load(path, plain().eval())
    assert other[4].regression.rank == (2, 1, 1, 2)
    assert torch.equal(other(x), model(x))


def test_a_converted_network_loads_into_a_converted_one(path):
    model, other, x = plain().eval(), plain().eval(), torch.randn(2, 3, 8, 8)
    td.tensorize_(model, x, rank=3, dropout=0.6)
    td.tensorize_(other, x, rank=3)
    td.save(model, path)
    td.load(path, other)
    assert torch.equal(other(x), model(x))
    assert float(other[4].regression.dropout.theta) == pytest.approx(0.6)


def test_modes_are_those_of_the_model_that_is_filled(path):
    model, x = plain(), torch.randn(2, 3, 8, 8)
    td.tensorize_(model.eval(), x, dropout=0.5)
    td.save(model, path)
    other = plain().train()
    other[2].eval()
    td.load(path, other)
    assert other[4].regression.dropout.training
    assert other.training
    assert not other[2].training


def test_two_converted_heads(path):
    def build():
        model = nn.Module()
        model.body, model.pool = nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1)
        model.one, model.two = nn.Linear(6, 4), nn.Linear(6, 3)
        model.forward = lambda x: (lambda f: (model.one(f), model.two(f)))(model.pool(model.body(x)).flatten(1))
        return model.eval()

    model, other, x = build(), build(), torch.randn(2, 3, 8, 8)
    td.tensorize_(model, x, heads=["one", "two"])
    td.save(model, path)
    td.load(path, other)
    assert all(torch.equal(left, right) for left, right in zip(other(x), model(x), strict=True))


def test_a_converted_head_under_two_names(path):
    def build():
        model = nn.Sequential(*plain())
        model.add_module("classifier", nn.Sequential(model[4]))
        model.forward = lambda x: nn.Sequential.forward(model[:5], x)
        return model.eval()

    model, other, x = build(), build(), torch.randn(2, 3, 8, 8)
    td.tensorize_(model, x, rank=3, dropout=0.6)
    td.save(model, path)
    td.load(path, other)
    assert isinstance(other[4], TensorHead)
    assert other.classifier[0] is other[4]
    assert torch.equal(other(x), model(x))


WRONG = {
    "another width": (lambda: plain(width=7), "."),
    "other outputs": (lambda: plain(outputs=6), "."),
    "no such layer": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()), "has a module '4'"),
    "no weight there": (lambda: plain(head=nn.Identity()), "converted head at '4'.*Identity"),
    "no such pooling": (Residual, "has a module '4'"),
    "no bias": (lambda: plain(head=nn.Linear(8, 5, bias=False)), "."),
    "another layer behind it": (lambda: plain().append(nn.Linear(5, 5)), "lacks|weights"),
    "another head": (lambda: nn.Sequential(*plain()[:4], td.CPRegression((8, 1, 1), 5, 4)), "."),
    "a merged one": (flat, "."),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_model_that_does_not_fit_is_left_as_it_was(what, path):
    model = plain().eval()
    td.tensorize_(model, torch.randn(2, 3, 8, 8), dropout=0.7)
    td.save(model, path)
    build, match = WRONG[what]
    other = build().train()
    state = torch.get_rng_state()
    before = Snapshot(other)
    with pytest.raises(td.TensorDropoutError, match=match):
        td.load(path, other)
    torch.set_rng_state(state)  # the layers that were tried drew their parameters
    before.check()


def test_a_head_that_was_linear_elsewhere_is_not_filled_by_a_convolution(path):
    """A Linear where a 1×1 convolution was: the head's reshapes do not fit, so the function would be another."""
    case = BY_NAME["pool-then-convolution"]
    model = make(case)
    td.tensorize_(model, make_batch(case))
    td.save(model, path)
    other = fresh(case)
    other.fc = nn.Linear(6, 5)
    with pytest.raises(td.TensorDropoutError):
        td.load(path, other)


def test_without_a_model_a_converted_foreign_network_cannot_be_rebuilt(path):
    model = plain().eval()
    td.tensorize_(model, torch.randn(2, 3, 8, 8))
    td.save(model, path)
    with pytest.raises(td.TensorDropoutError, match=r"4\.regression.*pass model="):
        td.load(path)


# Our own networks.

X = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def own(head="fc", **settings):
    net = build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8), head=head, **settings)
    shake(net)
    return net.eval()


@pytest.mark.parametrize("head", HEADS)
def test_our_own_networks_are_rebuilt(head, path):
    net = own(head)
    td.save(net, path)
    again = td.load(path)
    assert type(again) is type(net)
    assert again.settings == net.settings
    assert torch.equal(again.eval()(X), net(X))
    assert list(again.state_dict()) == list(net.state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"head": "rtrl-tucker", "theta": 0.6, "law": "nested", "min_rank": 1, "scaling": "paper", "rank": (7, 2, 2, 5)},
        {"head": "rtrl-cp", "theta": 0.6, "law": "gaussian", "per_sample": True, "rank": 9},
        {"head": "rtrl-tt", "modes": (1, 3), "init": "normal", "rank": 0.5},
        {"head": "trl-tucker+weight-dropout", "theta": 0.55},
        {"head": "fc+dropout", "drop_rate": 0.25},
    ],
    ids=lambda settings: settings["head"],
)
def test_all_settings_come_back(settings, path):
    net = own(**settings)
    td.save(net, path)
    again = td.load(path)
    assert again.settings == net.settings
    assert repr(again.eval()) == repr(net)
    torch.manual_seed(5)
    random = net.train()(X)
    torch.manual_seed(5)
    assert torch.equal(again.train()(X), random)


def test_a_changed_theta_comes_back(path):
    net = own("rtrl-tucker", theta=0.6)
    net.fc.dropout.theta = 0.9
    td.save(net, path)
    assert float(td.load(path).fc.dropout.theta) == pytest.approx(0.9)
    net = own("trl-tucker+weight-dropout", theta=0.6)
    net.fc.theta = 0.9
    td.save(net, path)
    assert td.load(path).fc.theta == 0.9


def test_three_dimensions_and_double_precision(path):
    net = build_net("resnet-mini", outputs=2, input_shape=(1, 8, 8, 8), head="rtrl-cp").double().eval()
    td.save(net, path)
    x = torch.randn(2, 1, 8, 8, 8, dtype=torch.float64)
    assert torch.equal(td.load(path).eval()(x), net(x))


@every_factorization
def test_a_converted_network_of_ours_is_rebuilt(factorization, path):
    net = own()
    y = net(X)
    td.tensorize_(net, X, factorization=factorization, dropout=0.8)
    td.save(net, path)
    again = td.load(path).eval()
    assert torch.equal(again(X), net(X))
    assert isinstance(again.fc, TensorHead)
    td.merge_(again)
    torch.testing.assert_close(again(X), y, rtol=1e-4, atol=1e-5)
    td.load(path, own())


def shaken(net):
    net = copy.deepcopy(net)
    shake(net)
    return net


def truncated():
    net = own("rtrl-tucker")
    td.truncate_(net, 3)
    return net


def merged():
    net = own("rtrl-tucker")
    td.merge_(net)
    return net


def converted_and_merged():
    net = own()
    td.tensorize_(net, X, rank=3)
    td.merge_(net)
    return net


def grown_and_merged():
    net = own()
    td.tensorize_(net, X, rank=(5, 2, 2, 5))
    shake(net.fc)
    td.merge_(net)
    return net


def with_a_head_of_ones_own():
    net = own()
    net.fc = nn.Linear(64, 7)
    return net


@pytest.mark.parametrize(
    "build",
    [truncated, merged, converted_and_merged, grown_and_merged, with_a_head_of_ones_own],
    ids=lambda f: f.__name__,
)
def test_a_network_of_ours_that_was_changed_is_rebuilt_or_refused_with_advice(build, path):
    net = build()
    try:
        td.save(net, path)
    except td.TensorDropoutError:
        assert not path.exists()
        return
    words = ""
    try:
        again = td.load(path)
    except td.TensorDropoutError as error:
        words, again = str(error), td.load(path, shaken(net))
    assert not words or "pass model=" in words
    assert torch.equal(again.eval()(X), net.eval()(X))


def with_another_pooling(net):
    net.maxpool = nn.AvgPool2d(3, stride=2, padding=1)


def with_a_smooth_block(net):
    net.layer2[0].relu = nn.SiLU()


def with_circular_padding(net):
    net.layer1[0].conv1.padding_mode = "circular"


def with_another_norm(net):
    net.bn1.eps = 0.1


@pytest.mark.parametrize("convert", [False, True], ids=["as built", "converted"])
@pytest.mark.parametrize(
    "change",
    [with_another_pooling, with_a_smooth_block, with_circular_padding, with_another_norm],
    ids=lambda f: f.__name__,
)
def test_a_network_of_ours_with_another_function_is_not_built_anew(change, convert, path):
    def build():
        head = "fc" if convert else "rtrl-cp"
        net = build_net("resnet18", outputs=3, input_shape=(3, 32, 32), stem="large", head=head).eval()
        change(net)
        if convert:
            td.tensorize_(net, x, rank=2)
        return net

    x = torch.randn(2, 3, 32, 32)
    net = build()
    td.save(net, path)
    with pytest.raises(td.TensorDropoutError, match="pass model="):
        td.load(path)
    assert torch.equal(td.load(path, build())(x), net(x))


def test_a_plain_network_of_ours_with_another_function_is_not_saved(path):
    net = own()
    net.relu = nn.SiLU()
    with pytest.raises(td.TensorDropoutError, match="was changed since build_net made it; use safetensors itself"):
        td.save(net, path)
    assert not path.exists()


def test_a_pooling_that_was_another_one_before_surgery_is_not_built_anew(path):
    """``merge_`` would put the pooling of ``build_net`` back."""
    net = own()
    net.avgpool = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(1))
    td.tensorize_(net, X)
    td.save(net, path)
    with pytest.raises(td.TensorDropoutError, match="pass model="):
        td.load(path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head", HEADS)
def test_our_own_networks_are_rebuilt_in_any_precision_and_mode(head, dtype, path):
    net = own(head).to(dtype).train()
    net.layer1.eval()
    td.save(net, path)
    again = td.load(path)
    assert {parameter.dtype for parameter in again.parameters()} == {dtype}
    assert torch.equal(again.eval()(X.to(dtype)), net.eval()(X.to(dtype)))


def test_a_network_of_ours_with_another_dropout_is_rebuilt(path):
    net = own("rtrl-tucker", theta=0.6)
    net.fc.dropout = td.TensorDropout(0.7, law="nested", scaling="paper")
    td.save(net, path)
    assert td.load(path).fc.config() == net.fc.config()


def test_our_own_network_into_another_one(path):
    net = own("rtrl-cp")
    td.save(net, path)
    for head in ("rtrl-tucker", "fc"):
        other = own(head)
        with refused(".", other):
            td.load(path, other)
    other = own("rtrl-cp")
    td.load(path, other)
    assert torch.equal(other(X), net(X))


# Damaged headers.


def damage(config, *keys, to=None):
    """Put something else at a place of the config; ``to=None`` removes it."""
    config = copy.deepcopy(config)
    inner = config
    for key in keys[:-1]:
        inner = inner[key]
    if to is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return config


DAMAGED_SURGERY = [
    (("surgery",), 5),
    (("surgery",), []),
    (("surgery",), ["4"]),
    (("surgery",), {"4": None}),
    (("surgery",), {"4": {}}),
    (("surgery", "4"), None),
    (("surgery", "4", "kind"), None),
    (("surgery", "4", "kind"), "magic"),
    (("surgery", "4", "kind"), 7),
    (("surgery", "4", "kind"), "conv-pool"),
    (("surgery", "4", "axes"), None),
    (("surgery", "4", "axes"), "two"),
    (("surgery", "4", "axes"), -3),
    (("surgery", "4", "axes"), 2),
    (("surgery", "4", "flattens"), None),
    (("surgery", "4", "pooling"), None),
    (("surgery", "4", "pooling"), "9"),
    (("surgery", "4", "pooling"), 9),
    (("surgery", "4", "pooling"), ["2"]),
    (("surgery", "4", "pooling"), ""),
    (("layers", "4.regression"), None),
    (("layers", "4.regression"), 5),
    (("layers", "4.regression", "rank"), [5, 1, 1]),
    (("layers", "4.regression", "rank"), "full"),
    (("layers", "4.regression", "rank"), []),
    (("layers", "4.regression", "input_shape"), [8, 6, 6, 6, 6]),
    (("layers", "4.regression", "input_shape"), [8]),
    (("layers", "4.regression", "input_shape"), []),
    (("layers", "4.regression", "input_shape"), [8, 0, 8]),
    (("layers", "4.regression", "output_shape"), [-5]),
    (("layers", "4.regression", "type"), "Linear"),
    (("layers", "4.regression", "type"), ["CPRegression"]),
    (("layers", "4.regression", "dropout"), {"theta": 5}),
    (("layers", "4.regression", "dropout"), {"theta": 0.5, "laws": "x"}),
    (("layers",), []),
    (("layers",), None),
    (("version",), 99),
    (("version",), None),
]


@pytest.mark.parametrize(("keys", "to"), DAMAGED_SURGERY, ids=str)
def test_damaged_surgery_is_refused_and_the_model_is_left_as_it_was(keys, to, path):
    model = plain().eval()
    td.tensorize_(model, torch.randn(2, 3, 8, 8), dropout=0.7)
    td.save(model, path)
    write_header(path, damage(read_header(path), *keys, to=to))
    other = plain().eval()
    state = torch.get_rng_state()
    before = Snapshot(other)
    with pytest.raises(td.TensorDropoutError):
        td.load(path, other)
    torch.set_rng_state(state)
    before.check()


DAMAGED_NET = [
    (("net",), 5),
    (("net",), []),
    (("net",), {}),
    (("net", "name"), "resnet-maxi"),
    (("net", "name"), 5),
    (("net", "name"), None),
    (("net", "outputs"), "many"),
    (("net", "outputs"), 7),
    (("net", "outputs"), -1),
    (("net", "input_shape"), 8),
    (("net", "input_shape"), [1, 8]),
    (("net", "input_shape"), None),
    (("net", "input_shape"), [3, 8, 8]),
    (("net", "head"), "fc"),
    (("net", "head"), "rtrl-magic"),
    (("net", "law"), "unheard-of"),
    (("net", "law"), {"bernoulli": 1}),
    (("net", "modes"), "some"),
    (("net", "scaling"), 3),
    (("net", "rank"), "much"),
    (("net", "rank"), [[1], 2]),
    (("net", "stem"), "huge"),
    (("net", "surprise"), True),
    (("layers", "fc"), None),
    (("layers", "fc", "dropout"), {"theta": "high"}),
]


@pytest.mark.parametrize(("keys", "to"), DAMAGED_NET, ids=str)
def test_damaged_settings_of_our_own_networks_are_refused(keys, to, path):
    td.save(own("rtrl-tucker", theta=0.7), path)
    write_header(path, damage(read_header(path), *keys, to=to))
    with pytest.raises(td.TensorDropoutError):
        td.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "null", '"net"', "{}", '{"version": 1}'])
def test_headers_that_are_no_config(text, path):
    td.save(own("rtrl-tucker"), path)
    write_header(path, text)
    with pytest.raises(td.TensorDropoutError):
        td.load(path)


@pytest.mark.parametrize("theta", [5, "x", None, 0])
def test_a_damaged_theta_of_weight_dropout(theta, path):
    td.save(own("trl-tucker+weight-dropout"), path)
    config = read_header(path)
    config["layers"]["fc"]["theta"] = theta
    write_header(path, config)
    with pytest.raises(td.TensorDropoutError):
        td.load(path)
    other = own("trl-tucker+weight-dropout", theta=0.3)
    before = Snapshot(other)
    with pytest.raises(td.TensorDropoutError):
        td.load(path, other)
    before.check()
    assert other.fc.theta == 0.3


def test_a_cut_file_is_refused(path):
    td.save(own("rtrl-tucker"), path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(td.TensorDropoutError):
        td.load(path)


@pytest.mark.parametrize("head", ["fc", "rtrl-cp", "converted"])
@pytest.mark.parametrize(("backbone", "fc"), [("bfloat16", "float32"), ("float32", "float64"), ("half", "double")])
def test_mixed_precision_comes_back_as_it_was(head, backbone, fc, path):
    net = own("fc" if head == "converted" else head).eval()
    if head == "converted":
        td.tensorize_(net, torch.randn(2, 1, 8, 8), dropout=0.8)
    dtypes = {"half": torch.float16, "double": torch.float64}
    net.to(dtypes.get(backbone) or getattr(torch, backbone))
    net.fc.to(dtypes.get(fc) or getattr(torch, fc))
    td.save(net, path)
    state, again = net.state_dict(), td.load(path).state_dict()
    assert list(again) == list(state)
    for name, tensor in state.items():
        assert again[name].dtype == tensor.dtype, name
        assert torch.equal(again[name], tensor), name
