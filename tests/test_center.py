"""A layer with a center is the layer without one on ``x - center``, wherever a layer is used."""

import copy
import json
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import every_format, make_input, make_layer
from surgery_models import refused
from tensor_dropout import reference
from tensor_dropout.exporting import export_merged, export_onnx, export_program
from tensor_dropout.losses import printed_moments
from tensor_dropout.sharding import OutputParallel
from tensor_dropout_lab.nets import build_net
from test_distributed import WORLD_SIZE, run_on_two_ranks

EXACT = {"rtol": 1e-10, "atol": 1e-10}
ONE_OUTPUT = {"output_shape": 1, "rank": "full"}


def make_center(layer, seed=7):
    """Far from 0: whatever forgets it is far off."""
    return 3 + torch.randn(layer.input_shape[0], generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_pair(format, **options):
    """A layer with a center, and the same one without."""
    plain = make_layer(format, **{"dtype": torch.float64, **options})
    layer = copy.deepcopy(plain)
    layer.set_center(make_center(layer))
    return layer, plain


def minus_center(x, layer):
    """``x - center``, channel by channel."""
    return torch.stack([x[:, k] - float(c) for k, c in enumerate(make_center(layer))], dim=1).to(x.dtype)


def make_inputs(layer):
    """x, and what is left of it without its center."""
    x = make_input(layer)
    return x, minus_center(x, layer)


def seeded(function, *arguments, **options):
    torch.manual_seed(5)
    return function(*arguments, **options)


# The layer itself.


@every_format
@pytest.mark.parametrize("shape", [{}, ONE_OUTPUT, {"input_shape": (6,), "rank": 3}], ids=["map", "scalar", "vector"])
@pytest.mark.parametrize("per_sample", [False, True])
def test_every_output_is_that_of_the_rest_of_x(format, shape, per_sample):
    layer, plain = make_pair(format, per_sample=per_sample, **shape)
    x, rest = make_inputs(layer)
    assert_close(seeded(layer, x), seeded(plain, rest), **EXACT)
    masks = plain.draw_masks(len(x))
    assert_close(layer.regress_precisely(x, masks), plain.regress(rest, masks), **EXACT)
    outputs = []
    for model, features in ((layer, x), (plain, rest)):
        torch.manual_seed(5)
        with td.fixed_masks(model):
            outputs.append(torch.stack([model(features), model.eval()(features)]))
    assert_close(*outputs, **EXACT)
    assert_close(layer.eval()(x), plain.eval()(rest), **EXACT)


@every_format
@pytest.mark.parametrize("mode", ["mean", "exact", "sample"])
def test_every_prediction_is_that_of_the_rest_of_x(format, mode):
    layer, plain = make_pair(format)
    x, rest = make_inputs(layer)
    options = {"mode": mode, "n_samples": 5}
    found, expected = seeded(td.predict, layer, x, **options), seeded(td.predict, plain, rest, **options)
    assert_close([*filter(torch.is_tensor, found)], [*filter(torch.is_tensor, expected)], **EXACT)
    inside = nn.Sequential(nn.Identity(), layer)
    assert_close(seeded(td.predict, inside, x, **options).mean, expected.mean, **EXACT)


@every_format
def test_moments_and_losses_are_those_of_all_masks(format):
    layer, plain = make_pair(format, small=True)
    x, rest = make_inputs(layer)
    y = make_input(layer, seed=4)[:, :, 0, 0]
    mean, covariance = reference.mean_and_covariance(plain, rest)
    assert_close(tuple(layer.moments(x, covariance=True)), (mean, covariance), **EXACT)
    assert_close(layer.moments(x).variance, covariance.diagonal(dim1=1, dim2=2), **EXACT)
    sampled = (seeded(lambda m, f: m.moments(f, n_samples=4), *pair) for pair in ((layer, x), (plain, rest)))
    assert_close(*map(tuple, sampled), **EXACT)
    assert_close(td.expected_mse(layer, x, y), reference.expected_mse(plain, rest, y), **EXACT)
    assert_close(td.expected_cross_entropy(layer, x, y), td.expected_cross_entropy(plain, rest, y), **EXACT)


@pytest.mark.parametrize("format", ["tucker", "cp"])
def test_the_printed_regularizer_is_of_the_rest_of_x(format):
    layer, plain = make_pair(format, scaling="paper")
    x, rest = make_inputs(layer)
    assert_close(tuple(printed_moments(layer, x)), tuple(printed_moments(plain, rest)), **EXACT)
    y = torch.zeros(4, 10, dtype=torch.float64)
    losses = (td.expected_mse(m, f, y, regularizer="paper") for m, f in ((layer, x), (plain, rest)))
    assert_close(*losses, **EXACT)


@every_format
def test_gradients_are_those_of_the_rest_of_x(format):
    layer, plain = make_pair(format, theta=None)
    x, rest = (each.requires_grad_() for each in make_inputs(layer))
    layer(x).square().sum().backward()
    plain(rest).square().sum().backward()
    assert_close(x.grad, rest.grad, **EXACT)
    found, expected = ({n: p.grad for n, p in each.named_parameters()} for each in (layer, plain))
    assert_close(found, expected, **EXACT)
    assert "center" not in found


@every_format
def test_channels_last_and_autocast(format):
    layer, plain = make_pair(format, theta=None, dtype=torch.float32)
    x, rest = make_inputs(layer)
    assert_close(layer(x.to(memory_format=torch.channels_last)), plain(rest), rtol=1e-4, atol=1e-4)
    with torch.autocast("cpu", torch.bfloat16):
        assert_close(layer(x), plain(rest), rtol=0, atol=0)


@every_format
def test_the_dense_weight_is_the_weight_alone(format):
    layer, plain = make_pair(format)
    assert_close(layer.dense_weight(), plain.dense_weight(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(), (8, 1), (7,)], ids=str)
def test_a_center_of_another_shape_is_refused(shape):
    with refused(r"one number per channel, \(8,\), got", layer := make_layer("cp")):
        layer.set_center(torch.ones(shape))


# Copies.


@every_format
def test_truncation_keeps_the_center(format):
    layer, plain = make_pair(format)
    x, rest = make_inputs(layer)
    shorter = layer.with_rank(tuple(min(2, R) for R in layer._ranks))
    assert_close(shorter.center, layer.center, rtol=0, atol=0)
    assert shorter.center is not layer.center
    models = nn.Sequential(layer).eval(), nn.Sequential(plain).eval()
    for model in models:
        td.truncate_(model, 2)
    assert_close(models[0](x), models[1](rest), **EXACT)


DUPLICATES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)),
    "state dict": lambda layer: _load(make_layer("cp", seed=9), layer.state_dict()),
    "over another": lambda layer: _load(make_pair("cp", seed=9)[0], layer.state_dict()),
    "in a network": lambda layer: _load(nn.Sequential(make_layer("cp", seed=9)), nn.Sequential(layer).state_dict())[0],
    "from meta": lambda layer: _load(make_layer("cp", device="meta"), layer.state_dict(), assign=True),
    "not strict": lambda layer: _load(make_layer("cp", seed=9), layer.state_dict(), strict=False),
}


def _load(layer, state, **options):
    layer.load_state_dict({name: tensor.double().clone() for name, tensor in state.items()}, **options)
    return layer.double()


@pytest.mark.parametrize("duplicate", DUPLICATES.values(), ids=DUPLICATES)
def test_copies_have_the_center(duplicate):
    layer, plain = make_pair("cp", dtype=torch.float64)
    x, rest = make_inputs(layer)
    twin = duplicate(layer).eval()
    tolerance = {"rtol": 1e-5, "atol": 1e-5}  # some were float32 in between
    assert_close(twin(x), plain.eval()(rest), **tolerance)
    twin.center.zero_()
    assert_close(layer.eval()(x), plain(rest), **EXACT)


def test_the_center_moves_with_the_layer():
    layer, plain = make_pair("tt", theta=None, dtype=torch.float32)
    assert layer.center.dtype == torch.float32
    x, rest = make_inputs(plain.double())
    assert_close(layer.double()(x), plain(rest), rtol=1e-5, atol=1e-5)
    assert layer.to("meta").center.is_meta
    layer.set_center(None)
    assert "center" not in layer.state_dict()


def test_a_state_dict_that_does_not_fit_is_refused():
    layer, plain = make_pair("tucker")
    with pytest.raises(RuntimeError, match=r"Missing key.*center"):
        layer.load_state_dict(plain.state_dict())
    for wrong, message in ((torch.ones(3), "size mismatch for center"), (5, "center")):
        with pytest.raises(RuntimeError, match=message):
            plain.load_state_dict({**plain.state_dict(), "center": wrong})
        assert plain.center is None


# Files.


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def read_header(path):
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["tensor_dropout"])


@every_format
def test_a_config_says_that_there_is_a_center(path, format):
    layer, plain = make_pair(format)
    assert layer.config() == {**plain.config(), "center": True}
    td.save(plain, path)
    without = path.read_bytes()
    assert "center" not in json.dumps(read_header(path))
    layer.set_center(None)
    td.save(layer, path)
    assert path.read_bytes() == without


@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_bare_layer_round_trips(path, format, dtype):
    layer, _ = make_pair(format, dtype=dtype)
    td.save(layer, path)
    again, x = td.load(path), make_input(layer)
    assert again.center.dtype == dtype
    assert torch.equal(again.eval()(x), layer.eval()(x))
    assert again.config() == layer.config()


@every_format
@pytest.mark.parametrize("saved", [False, True], ids=["file without", "file with"])
@pytest.mark.parametrize("present", [False, True], ids=["model without", "model with"])
def test_the_center_is_that_of_the_file(path, format, saved, present):
    layer = nn.Sequential(nn.Identity(), make_pair(format)[not saved])
    model = nn.Sequential(nn.Identity(), make_pair(format, seed=9)[not present])
    if present:
        model[1].center.zero_()
    x, rest = make_inputs(layer[1])
    td.save(layer, path)
    td.load(path, model)
    assert (model[1].center is not None) == saved
    assert_close(model.eval()(x), make_pair(format)[1].eval()(rest if saved else x), **EXACT)


@pytest.mark.parametrize("saved", [False, True], ids=["file without", "file with"])
@pytest.mark.parametrize("present", [False, True], ids=["model without", "model with"])
@pytest.mark.parametrize("fails", ["before", "within"])
def test_a_load_that_fails_leaves_the_center(path, saved, present, fails):
    def refuse(module, keys):
        raise RuntimeError("not these")

    stored, model = (nn.Sequential(make_pair("cp")[not has]) for has in (saved, present))
    stored.register_buffer("last", torch.zeros(2))
    model.register_buffer("last", torch.ones(3 if fails == "before" else 2))
    if present:
        model[0].center.zero_()
    before = model[0].center
    td.save(stored, path)
    if fails == "within":
        model.register_load_state_dict_post_hook(refuse)
    with refused("has another shape of|not these", model):
        td.load(path, model)
    assert model[0].center is before


def test_a_file_whose_config_and_weights_disagree_is_refused(path):
    layer, plain = make_pair("cp")
    for config, weights, message in ((layer, plain, r"lacks \['center'\]"), (plain, layer, r"model, \['center'\]")):
        td.save(weights, path)
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        own = json.loads(header["__metadata__"]["tensor_dropout"])
        own["layers"][""] = config.config()
        header["__metadata__"]["tensor_dropout"] = json.dumps(own)
        written = json.dumps(header).encode()
        path.write_bytes(len(written).to_bytes(8, "little") + written + content[8 + size :])
        with pytest.raises(td.TensorDropoutError, match=message):
            td.load(path)


def make_network():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
    ).eval()


@every_format
def test_a_converted_network_round_trips(path, format):
    network, images = make_network(), torch.randn(2, 1, 4, 4)
    td.tensorize_(network, images, factorization=format, dropout=0.8)
    head = network[4].regression
    before = network(images)
    head.set_center(make_center(head))
    expected = network(images)
    td.save(network, path)
    again = td.load(path, make_network())
    assert not torch.allclose(expected, before, atol=0.01)
    assert_close(again(images), expected, rtol=0, atol=0)
    td.load(path, network)
    assert_close(network(images), expected, rtol=0, atol=0)


def test_a_network_that_is_built_anew_round_trips(path):
    network = build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8), head="rtrl-cp").eval()
    network.head.set_center(make_center(network.head))
    td.save(network, path)
    images = torch.randn(2, 1, 8, 8)
    assert_close(td.load(path).eval()(images), network(images), rtol=0, atol=0)


def test_a_layer_under_two_names_round_trips(path):
    networks = [nn.ModuleDict({"a": head, "b": head}) for head in make_pair("tt")]
    td.save(networks[0], path)
    found = td.load(path, networks[1])
    assert found["a"] is found["b"]
    assert_close(found["b"].center, networks[0]["a"].center, rtol=0, atol=0)


# Merging.

SHAPES = {
    "vector": ((6,), 4),
    "map": ((4, 3, 3), 4),
    "scalar": ((4, 3, 3), 1),
    "two outputs": ((4, 3), (2, 3)),
    "four spaces": ((3, 2, 2, 2, 2), 3),
}


@every_format
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
def test_bare_layers_merge(format, shapes, bias, scaling):
    layer, plain = make_pair(
        format, input_shape=shapes[0], output_shape=shapes[1], rank="full", bias=bias, scaling=scaling
    )  # fmt: skip
    x, rest = make_inputs(layer)
    model = nn.Sequential(nn.Identity(), layer)
    own = None if layer.bias is None else layer.bias.detach().clone()
    report = td.merge_(model)
    assert_close(model(x), plain.eval()(rest), **EXACT)
    assert not any(isinstance(module, td.TensorRegression) for module in model.modules())
    assert "the center is in the bias" in report.replacements[0].notes
    assert own is None or torch.equal(layer.bias, own)


@every_format
def test_a_layer_that_averages_merges_into_pooling(format):
    layer, plain = make_pair(format, input_shape=(4, 3, 3), output_shape=5, rank=4, init="pool", theta=None)
    x, rest = make_inputs(layer)
    if format in ("cp", "tucker"):  # rank 1 in space would do; here the weight is made constant over it
        for each in (layer, plain):
            with torch.no_grad():
                for factor in each.factors[1:3]:
                    factor.fill_(0.5)
    model = nn.Sequential(layer)
    report = td.merge_(model)
    assert format in ("tt", "ring") or report.replacements[0].kind == "pool"
    assert_close(model(x), plain(rest), **EXACT)


HEADS = {
    "pool": lambda bias: [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5, bias=bias)],
    "conv-pool": lambda bias: [nn.Conv2d(6, 5, 1, bias=bias), nn.AdaptiveAvgPool2d(1), nn.Flatten()],
    "flatten": lambda bias: [nn.Flatten(), nn.Linear(96, 5, bias=bias)],
    "features": lambda bias: [nn.Flatten(), nn.Linear(96, 7), nn.Tanh(), nn.Linear(7, 5, bias=bias)],
}


@every_format
@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shaken", [False, True])
def test_converted_heads_merge(format, kind, bias, shaken):
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Tanh(), *HEADS[kind](bias)).double().eval()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    report = td.tensorize_(model, x, factorization=format, heads="5" if kind == "features" else None)
    assert report.replacements[0].kind == kind
    (head,) = (module for module in model.modules() if isinstance(module, td.TensorRegression))
    if shaken:
        with torch.no_grad():
            for factor in (p for p in head.parameters() if p is not head.bias):
                factor.add_(0.3 * torch.randn_like(factor))
    hook = head.register_forward_pre_hook(lambda module, inputs: (minus_center(inputs[0], module),))
    expected = model(x)
    hook.remove()
    before = model(x)
    head.set_center(make_center(head))
    td.merge_(model)
    assert_close(model(x), expected, **EXACT)
    assert not torch.allclose(before, expected, atol=0.01)
    assert not any(isinstance(module, td.TensorRegression) for module in model.modules())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("outputs", [4, (2, 2)], ids=["one output mode", "two"])
@pytest.mark.parametrize("named", [False, True])
def test_the_optimizer_gets_the_new_bias_in_the_group_of_the_old(bias, outputs, named):
    layer, _ = make_pair("tucker", input_shape=(4, 3), output_shape=outputs, rank=2, bias=bias)
    model = nn.Sequential(nn.Linear(3, 3).double(), layer)
    x = make_input(layer)
    groups = [
        {"params": [(n, p) if named else p for n, p in model.named_parameters() if (n == "1.bias") == own]}
        for own in (False, True)
    ]
    optimizer = torch.optim.Adam([{**groups[0], "weight_decay": 0.1}, *([groups[1]] if bias else [])])
    model(x).square().sum().backward()
    optimizer.step()
    kept = {p: optimizer.state[p] for p in model[0].parameters()}
    old = list(layer.parameters())
    td.merge_(model, optimizer=optimizer)
    merged = next(module for module in model[1].modules() if isinstance(module, nn.Linear))
    assert all(merged.bias is not p for p in old)
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
    first = [*map(id, model[0].parameters()), id(merged.weight)]
    assert held == ([first, [id(merged.bias)]] if bias else [[*first, id(merged.bias)]])
    assert all(optimizer.state[p] is state for p, state in kept.items())
    assert set(optimizer.state) == set(kept)
    if named:
        names = {id(p): name for name, p in model.named_parameters()}
        assert [g["param_names"] for g in optimizer.param_groups] == [[names[p] for p in group] for group in held]
    before = [p.detach().clone() for p in merged.parameters()]
    model(x).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, value) for p, value in zip(merged.parameters(), before, strict=True))


def test_what_was_frozen_stays_frozen():
    layer, _ = make_pair("cp")
    layer.bias.requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), nn.Unflatten(1, layer.input_shape), layer)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad])
    td.merge_(model, optimizer=optimizer)
    _, linear = model[2]
    assert not linear.bias.requires_grad
    assert [p is linear.weight for p in optimizer.param_groups[0]["params"]] == [True]
    bare, _ = make_pair("cp", bias=False)
    model = nn.Sequential(bare.requires_grad_(False))
    td.merge_(model)
    assert not any(p.requires_grad for p in model.parameters())


def test_a_merge_that_fails_leaves_everything_as_it_was():
    layer, _ = make_pair("cp")
    model = nn.Sequential(nn.Identity(), layer)
    optimizer = torch.optim.Adam([layer.bias])
    with refused("optimizer does not hold", model, optimizer):
        td.merge_(model, optimizer=optimizer)


# Compiled, exported, sharded.


@every_format
def test_a_compiled_layer_has_its_center(format):
    layer, plain = make_pair(format, dtype=torch.float32)
    x, rest = make_inputs(layer)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    assert_close(seeded(compiled, x), seeded(plain, rest), rtol=1e-4, atol=1e-4)
    layer.center.zero_()  # no constant of the graph
    assert_close(seeded(compiled, x), seeded(plain, x), rtol=1e-4, atol=1e-4)


@every_format
@pytest.mark.parametrize("export", [export_onnx, export_program, export_merged])
def test_exports_agree_with_the_layer(format, export, tmp_path):
    if export is export_onnx:
        runtime = pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")
    layer, plain = make_pair(format, dtype=torch.float32, scaling="paper")
    x, rest = make_inputs(layer)
    network, path = nn.Sequential(layer).eval(), tmp_path / "exported"
    assert export(network, x[:2], path) < 1e-5
    if export is export_onnx:
        session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        found = torch.as_tensor(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])
    elif export is export_program:
        found = torch.export.load(path).module()(x)
    else:
        with safe_open(path, framework="pt") as file:
            found = F.linear(x.flatten(1), *(file.get_tensor(f"0.1.{name}") for name in ("weight", "bias")))
    assert_close(found, plain.eval()(rest), rtol=1e-4, atol=1e-4)


def check_sharded(rank, format, layout):
    layer, plain = make_pair(format, output_shape=9, theta=None)
    if rank > 0:
        layer.center.zero_()  # that of the first process counts, as for the parameters
    x, rest = make_inputs(layer)
    sharded = parallelize_module(layer, init_device_mesh("cpu", (WORLD_SIZE,)), OutputParallel(input_layouts=layout))
    own = x if layout == Replicate() else x.chunk(WORLD_SIZE)[rank]
    assert_close(sharded(own).full_tensor(), plain(rest), **EXACT)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
def test_a_sharded_head_has_its_center(tmp_path):
    checks = {
        f"{format}, {layout}": (check_sharded, format, layout)
        for format in ("tucker", "cp", "tt")
        for layout in (Replicate(), Shard(0))
    }
    assert run_on_two_ranks(tmp_path, {"sharded": checks}) == {"sharded": []}
