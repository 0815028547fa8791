"""``merge_`` gives plain layers with the function of ``eval``; ``truncate_`` keeps the leading ranks."""

from __future__ import annotations

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.testing import assert_close

import tensor_dropout as td
from layers_under_test import every_format, every_law, make_layer
from surgery_models import (
    BY_NAME,
    CASES,
    FACTORIZATIONS,
    Snapshot,
    count,
    every_factorization,
    flat,
    make,
    make_batch,
    plain,
    refused,
    relative_change,
    rotate,
)
from tensor_dropout.surgery.head import TensorHead
from tensor_dropout.surgery.weights import as_network
from tensor_dropout_lab.nets import WeightDropoutTucker, build_net

MERGED = {torch.float32: 1e-5, torch.float64: 1e-12}
both_dtypes = pytest.mark.parametrize("dtype", MERGED, ids=["float32", "float64"])
SMALLER = {"input_shape": (6, 5), "output_shape": 7}
SMALLER_RANKS = {"tucker": (6, 5, 6), "cp": 12, "tt": (6, 6), "ring": (3, 6, 6)}


def make_smaller(format, **options):
    """A layer of :func:`make_layer` with one spatial mode."""
    return make_layer(format, rank=SMALLER_RANKS[format], dtype=torch.float64, **SMALLER, **options)


both_scalings = pytest.mark.parametrize("scaling", ["inverted", "paper"])


def shake(module, scale=0.3, seed=5):
    """Random changes of all parameters, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            parameter.add_(scale * parameter.std(correction=0).clamp(min=0.05) * noise)


def has_ours(model):
    return any(type(module).__module__.startswith("tensor_dropout.") for module in model.modules())


# Round trips.


@pytest.mark.parametrize(("case", "factorization"), rotate(CASES, FACTORIZATIONS))
def test_a_round_trip_returns_the_network(case, factorization):
    model = make(case)
    x = make_batch(case)
    before = copy.deepcopy(model.state_dict())
    modules = dict(model.named_modules())
    y = model(x)
    td.tensorize_(model, x, factorization=factorization, dropout=0.9)
    report = td.merge_(model)
    after = model.state_dict()
    assert list(after) == list(before)
    for key, value in before.items():
        assert after[key].shape == value.shape
        assert_close(after[key], value, rtol=0, atol=1e-6)
    assert relative_change(model(x), y) < 1e-5
    merged = dict(model.named_modules())
    assert list(merged) == list(modules)
    for name, module in modules.items():
        assert merged[name] is module or name == case.head  # the very pooling module, for one
    assert type(merged[case.head]) is type(modules[case.head])
    assert repr(merged[case.head]) == repr(modules[case.head])
    assert report.parameters_after == count(model)
    assert report.replacements[0].name == case.head


def test_the_bias_is_the_same_parameter_all_along():
    model = plain()
    bias = model[4].bias
    td.tensorize_(model, make_batch(BY_NAME["resnet-2d"]))
    td.merge_(model)
    assert model[4].bias is bias


@pytest.mark.parametrize(("case", "dtype"), rotate(CASES, MERGED))
def test_a_fine_tuned_head_merges_into_its_eval_function(case, dtype):
    model = make(case, dtype)
    x = make_batch(case, dtype=dtype)
    td.tensorize_(model, x, dropout=td.TensorDropout(0.7, scaling="paper"))
    shake(model.get_submodule(case.head))
    before = model(x)
    report = td.merge_(model)
    assert relative_change(model(x), before) <= MERGED[dtype]
    assert report.replacements[0].relative_error <= {torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    assert not has_ours(model) or case.name.startswith("own")
    assert not any(isinstance(module, td.TensorRegression | TensorHead) for module in model.modules())


GROWN = [case for case in CASES if case.kind in ("pool", "conv-pool")]


@pytest.mark.parametrize(("case", "factorization"), rotate(GROWN, FACTORIZATIONS))
def test_a_head_that_grew_into_space_merges_into_a_layer_on_the_map(case, factorization):
    model = make(case, torch.float64)
    x = make_batch(case, dtype=torch.float64)
    sizes = case.features[1:]
    outputs = model.get_submodule(case.head).weight.shape[0]
    own = min(case.features[0], outputs)
    rank = {
        "tucker": (own, *(min(2, size) for size in sizes), own),
        "cp": own if outputs == 1 else own + 2,
        "tt": (own,) * (1 + len(sizes)),
        "ring": (1, *(own,) * (1 + len(sizes))),
    }[factorization]
    td.tensorize_(model, x, rank=rank, factorization=factorization)
    shake(model.get_submodule(case.head), seed=3)
    before = model(x)
    report = td.merge_(model)
    assert report.replacements[0].kind == "flatten"
    assert relative_change(model(x), before) < 1e-12
    assert not any(isinstance(module, TensorHead) for module in model.modules())


def test_training_mode_is_kept():
    model = plain().train()
    td.tensorize_(model, make_batch(BY_NAME["resnet-2d"]))
    model[2].eval()
    td.merge_(model)
    assert model[4].training
    assert not model[2].training


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("name", ["resnet-2d", "resnet-3d", "flatten", "mobilenet-v3", "own-mini-2d"])
def test_copies_of_a_converted_network_merge_on_their_own(duplicate, name):
    case = BY_NAME[name]
    model, x = make(case), make_batch(case)
    keys, y = list(model.state_dict()), model(x)
    td.tensorize_(model, x, dropout=0.8)
    twin = duplicate(model)
    td.merge_(twin)
    assert list(twin.state_dict()) == keys
    assert relative_change(twin(x), y) < 1e-5
    assert isinstance(model.get_submodule(case.head), TensorHead)  # the original is still converted
    td.merge_(model)
    assert list(model.state_dict()) == keys
    assert relative_change(model(x), y) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_round_trips(dtype):
    model = plain().to(dtype).eval()
    weight = model[4].weight.detach().clone()
    td.tensorize_(model, torch.randn(2, 3, 8, 8).to(dtype))
    td.merge_(model)
    assert model[4].weight.dtype == dtype
    assert_close(model[4].weight, weight, rtol=0, atol=4 * torch.finfo(dtype).eps * float(weight.abs().max()))


# Bare layers.

BARE = {
    "1-D": ((6,), 4),
    "one space": ((6, 5), 4),
    "two spaces": ((4, 3, 5), 4),
    "three spaces": ((4, 3, 2, 3), 4),
    "four spaces": ((3, 2, 3, 2, 2), 4),
    "scalar": ((4, 3, 3), 1),
    "two outputs": ((4, 3, 3), (2, 3)),
    "two outputs of features": ((6,), (2, 3)),
}


@pytest.mark.parametrize("shapes", BARE)
@every_format
@both_dtypes
def test_bare_layers_merge(shapes, format, dtype):
    input_shape, output_shape = BARE[shapes]
    for bias in (True, False):
        rank = "full" if output_shape == 1 else 2
        layer = make_layer(
            format, input_shape=input_shape, output_shape=output_shape, rank=rank, bias=bias, dtype=dtype
        )  # fmt: skip
        model = nn.Sequential(nn.Identity(), layer).eval()
        x = torch.randn(3, *input_shape, dtype=dtype)
        before = model(x)
        report = td.merge_(model)
        assert relative_change(model(x), before) <= MERGED[dtype]
        assert not has_ours(model)
        (replaced,) = report.replacements
        outputs = int(np.prod(output_shape))
        assert (
            replaced.parameters_after == int(np.prod(input_shape)) * outputs + (outputs if bias else 0) == count(model)
        )
        assert replaced.parameters_before == count(layer)
        assert replaced.rank == layer._ranks


@every_format
@pytest.mark.parametrize("shapes", BARE)
def test_means_add_nothing_to_the_network_that_is_contracted(format, shapes):
    """The plan of a contraction takes time exponential in the number of operands: minutes at 22 of them."""
    input_shape, output_shape = BARE[shapes]
    rank = "full" if output_shape == 1 else 2
    layer = make_layer(
        format, input_shape=input_shape, output_shape=output_shape, rank=rank, dtype=torch.float64, scaling="paper"
    )
    assert len(as_network(layer)[2]) == len(layer.operands())
    model = nn.Sequential(layer).eval()
    x = torch.randn(3, *input_shape, dtype=torch.float64)
    before = model(x)
    td.merge_(model)
    assert relative_change(model(x), before) <= 1e-12


@every_format
@pytest.mark.parametrize("space", [(5,), (3, 4), (2, 3, 2)])
def test_a_fresh_pooled_layer_merges_into_pooling_and_linear(format, space):
    layer = make_layer(format, input_shape=(4, *space), output_shape=4, rank=4, init="pool", theta=None)
    model = nn.Sequential(layer).eval()
    x = torch.randn(3, 4, *space)
    before = model(x)
    report = td.merge_(model)
    assert report.replacements[0].kind == "pool"
    assert [type(step).__name__ for step in model[0]] == [f"AdaptiveAvgPool{len(space)}d", "Flatten", "Linear"]
    assert model[0][2].weight.shape == (4, 4)
    assert relative_change(model(x), before) < 1e-5


@every_format
@every_law
@both_scalings
def test_the_mean_weight_is_merged_under_every_law(format, law, scaling):
    layer = make_smaller(format, law=law, scaling=scaling)
    model = nn.Sequential(layer).eval()
    x = torch.randn(3, *layer.input_shape, dtype=torch.float64)
    before, weight = model(x), layer.dense_weight()
    td.merge_(model)
    assert relative_change(model(x), before) < 1e-12
    linear = next(module for module in model.modules() if isinstance(module, nn.Linear))
    assert_close(linear.weight.T.reshape(weight.shape), weight)


def test_the_dropout_is_gone_and_the_report_says_so():
    model = nn.Sequential(make_layer("tucker")).train()
    report = td.merge_(model)
    x = torch.randn(2, 8, 6, 5)
    assert torch.equal(model(x), model(x))
    assert any("dropout" in note for note in report.replacements[0].notes)


@pytest.mark.parametrize("dims", [2, 3])
def test_a_network_that_never_pooled_is_not_told_of_pooling(dims):
    """Flattening + Linear comes back as it was: its weights fit."""
    convolution = (nn.Conv2d, nn.Conv3d)[dims - 2](1, 4, 3, padding=1)
    model = nn.Sequential(convolution, nn.Flatten(), nn.Linear(4 * 4**dims, 3)).eval()
    state = copy.deepcopy(model.state_dict())
    td.tensorize_(model, torch.randn(2, 1, *(4,) * dims))
    report = td.merge_(model)
    assert report.replacements[0].notes == ()
    for name, tensor in model.state_dict().items():
        assert_close(tensor, state[name], rtol=0, atol=1e-5)


def test_a_bare_layer_is_not_told_of_tensorize():
    report = td.merge_(nn.Sequential(make_layer("tucker", theta=None)))
    assert report.replacements[0].kind == "flatten"
    assert report.replacements[0].notes == ()


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


@pytest.mark.parametrize("name", ["core", "factors.1", "bias"])
@pytest.mark.parametrize("operation", [td.merge_, lambda model: td.truncate_(model, 2)], ids=["merge", "truncate"])
def test_parametrizations_are_merged_or_refused_by_name(operation, name):
    layer = td.TuckerRegression((4, 3, 3), 5, rank=(3, 2, 2, 4))
    place, _, parameter = name.rpartition(".")
    parametrize.register_parametrization(layer.get_submodule(place), parameter, Doubled())
    model, x = nn.Sequential(layer).eval(), torch.randn(2, 4, 3, 3)
    before = model(x)
    if operation is td.merge_ and name != "bias":
        operation(model)
        assert_close(model(x), before)
        return
    with pytest.raises(td.TensorDropoutError, match=rf"'0' has a parametrization of \['{name}'\].*remove_param"):
        operation(model)
    assert model[0] is layer
    parametrize.remove_parametrizations(layer.get_submodule(place), parameter)
    operation(model)


def test_plain_dropout_on_the_weight_merges():
    layer = WeightDropoutTucker((4, 3, 3), 5, rank=(3, 2, 2, 4), theta=0.7, init="normal", dtype=torch.float64)
    model = nn.Sequential(layer).eval()
    x = torch.randn(3, 4, 3, 3, dtype=torch.float64)
    before = model(x)
    td.merge_(model)
    assert relative_change(model(x), before) < 1e-12
    assert not has_ours(model)


def test_several_layers_merge_at_once():
    model = nn.Sequential(
        make_layer("tucker", input_shape=(4, 3, 3), output_shape=(4, 3), rank=2), nn.Tanh(),
        make_layer("tt", input_shape=(4, 3), output_shape=5, rank=2),
    ).eval()  # fmt: skip
    x = torch.randn(2, 4, 3, 3)
    before = model(x)
    report = td.merge_(model)
    assert [each.name for each in report.replacements] == ["0", "2"]
    assert set(report.modules) == {"0", "2"}
    assert relative_change(model(x), before) < 1e-5
    assert report.parameters_after == count(model)


@pytest.mark.parametrize("head", ["trl-tucker", "rtrl-cp", "rtrl-tt", "trl-tucker+weight-dropout"])
def test_our_own_networks_merge(head):
    net = build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8), head=head).eval()
    x = torch.randn(2, 1, 8, 8)
    before = net(x)
    td.merge_(net)
    assert relative_change(net(x), before) < 1e-5


def test_a_shared_layer_stays_shared():
    layer = make_layer("cp", input_shape=(4, 3), output_shape=(4, 3), rank=2)
    model = nn.Sequential(layer, nn.Tanh(), layer).eval()
    x = torch.randn(2, 4, 3)
    before = model(x)
    td.merge_(model)
    assert model[0] is model[2]
    assert relative_change(model(x), before) < 1e-5


def test_the_random_state_is_left_alone():
    model = nn.Sequential(make_layer("tucker"))
    state = torch.get_rng_state()
    td.merge_(model)
    assert torch.equal(torch.get_rng_state(), state)


# Optimizers.


@pytest.mark.parametrize("outputs", [4, (2, 2)], ids=["one output mode", "two"])
@pytest.mark.parametrize("operation", ["merge_", "truncate_"])
@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_the_optimizer_is_patched(outputs, operation, kind):
    layer = make_layer("tucker", input_shape=(4, 3, 3), output_shape=outputs, rank=3 if outputs == 4 else 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), layer)
    x = torch.randn(2, 3, 5, 5)
    optimizer = (
        torch.optim.Adam(model.parameters(), 0.01) if kind == "adam" else torch.optim.SGD(model.parameters(), 0.01, 0.9)
    )
    model(x).square().sum().backward()
    optimizer.step()
    kept = {p: optimizer.state[p] for p in model[0].parameters()}
    if operation == "merge_":
        td.merge_(model, optimizer=optimizer)
    else:
        td.truncate_(model, 2, optimizer=optimizer)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    assert all(optimizer.state[p] is state for p, state in kept.items())
    assert all(any(p is each for each in held) for p in optimizer.state)
    before = [p.detach().clone() for p in model[1].parameters()]
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(p, value) for p, value in zip(model[1].parameters(), before, strict=True))


@pytest.mark.parametrize(
    "operation", [td.merge_, lambda model, **o: td.truncate_(model, 2, **o)], ids=["merge", "truncate"]
)
def test_an_optimizer_of_something_else_is_refused(operation):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), make_layer("tucker"))
    for optimizer in (torch.optim.Adam(model[0].parameters()), torch.optim.LBFGS(model.parameters())):
        with refused("optimizer|L-BFGS", model, optimizer):
            operation(model, optimizer=optimizer)


# Truncation.


def zero_later_ranks(layer, ranks):
    """A copy whose later ranks are set to zero by hand."""
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        if isinstance(layer, td.TuckerRegression):
            kept = torch.zeros_like(layer.core)
            kept[tuple(slice(R) for R in ranks)] = 1
            layer.core.mul_(kept)
        elif isinstance(layer, td.CPRegression):
            for factor in layer.factors:
                factor[:, ranks[0] :] = 0
        else:
            behind = [*ranks[1:], ranks[0]] if isinstance(layer, td.TensorRingRegression) else ranks
            for core, R in zip(layer.cores, behind, strict=False):
                core[:, :, R:] = 0
    return layer


@every_format
@every_law
@both_scalings
@pytest.mark.parametrize("rank", [4, 3, 1])
@pytest.mark.filterwarnings("ignore:.*nothing to drop")
def test_truncation_is_the_layer_with_its_later_ranks_at_zero(format, law, scaling, rank):
    if law == "nested-min3" and rank < 3:
        pytest.skip("min_rank is above the rank: refused, see below")
    layer = make_smaller(format, law=law, scaling=scaling)
    ranks = tuple(min(rank, R) for R in layer._ranks)
    wanted = zero_later_ranks(layer, ranks).dense_weight()
    before = layer.dense_weight()
    model = nn.Sequential(layer).eval()
    report = td.truncate_(model, rank)
    short = model[0]
    assert type(short) is type(layer)
    assert short._ranks == ranks
    assert short.bias is layer.bias
    assert_close(short.dense_weight(), wanted)
    (replaced,) = report.replacements
    assert replaced.relative_error == pytest.approx(float((before - wanted).norm() / before.norm()), rel=1e-6)
    assert (replaced.parameters_before, replaced.parameters_after) == (count(layer), count(short))
    assert (replaced.rank, report.parameters_after) == (ranks, count(model))


@pytest.mark.parametrize(
    ("format", "ranks"),
    [("tucker", (2, 5, 3)), ("tucker", (6, 1, 2)), ("cp", (5,)), ("tt", (3, 1)), ("ring", (1, 5, 2))],
)
@both_scalings
def test_one_rank_per_axis(format, ranks, scaling):
    layer = make_smaller(format, scaling=scaling)
    model = nn.Sequential(layer).eval()
    td.truncate_(model, ranks)
    assert model[0]._ranks == ranks
    assert_close(model[0].dense_weight(), zero_later_ranks(layer, ranks).dense_weight())


def test_named_modes_of_rank_one_are_still_masked():
    layer = make_smaller("tucker", modes=(0, 2), scaling="paper")
    model = nn.Sequential(layer).eval()
    td.truncate_(model, 1)
    assert_close(model[0].dense_weight(), zero_later_ranks(layer, (1, 1, 1)).dense_weight())


def test_truncation_keeps_dropout_mode_and_dtype():
    layer = make_layer("tucker", law="nested", theta=0.6, dtype=torch.float64)
    model = nn.Sequential(layer).train()
    td.truncate_(model, 3)
    assert model[0].training
    assert model[0].dropout.training
    assert model[0].dropout.config() == layer.dropout.config()
    assert float(model[0].dropout.theta) == pytest.approx(0.6)
    assert {p.dtype for p in model[0].parameters()} == {torch.float64}
    x = torch.randn(2, *layer.input_shape, dtype=torch.float64)
    assert len({float(model(x).sum()) for _ in range(20)}) > 1


@pytest.mark.parametrize("mode", [True, False])
def test_truncation_leaves_a_dropout_in_its_own_mode(mode):
    model = nn.Sequential(make_layer("tucker")).train(not mode)
    model[0].dropout.train(mode)
    td.truncate_(model, 2)
    assert model[0].dropout.training is mode
    assert {module.training for module in model[0].modules()} == {True, False}


@every_factorization
def test_a_converted_head_is_truncated_to_its_largest_directions(factorization):
    model = plain().double().eval()
    matrix = model[4].weight.detach().clone()
    td.tensorize_(model, torch.randn(2, 3, 8, 8).double(), factorization=factorization)
    report = td.truncate_(model, 2)
    spectrum = torch.linalg.svdvals(matrix)
    best = float(spectrum[2:].norm() / spectrum.norm())
    assert report.replacements[0].relative_error == pytest.approx(best, rel=1e-6)
    td.merge_(model)
    assert float((model[4].weight - matrix).norm() / matrix.norm()) == pytest.approx(best, rel=1e-6)


def test_truncating_a_weight_dropout_layer():
    layer = WeightDropoutTucker((4, 3, 3), 5, rank=(3, 2, 2, 4), theta=0.7, init="normal", dtype=torch.float64)
    model = nn.Sequential(layer)
    td.truncate_(model, (2, 2, 1, 3))
    assert isinstance(model[0], WeightDropoutTucker)
    assert model[0].theta == 0.7
    assert_close(model[0].dense_weight(), zero_later_ranks(layer, (2, 2, 1, 3)).dense_weight())


def test_no_graph_is_built_and_nothing_is_warned_of():
    for operation in (td.merge_, lambda model: td.truncate_(model, 2)):
        model = nn.Sequential(make_smaller("tucker"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            operation(model)
        assert all(p.is_leaf and p.requires_grad for p in model.parameters())


@every_format
@pytest.mark.parametrize("outputs", [4, (2, 2)], ids=["one output mode", "two"])
@pytest.mark.parametrize("trained", ["nothing", "one operand", "bias"])
def test_what_is_frozen_stays_frozen(format, outputs, trained):
    def make():
        layer = make_layer(format, input_shape=(4, 3, 3), output_shape=outputs, rank=2).requires_grad_(False)
        chosen = {
            "nothing": [],
            "one operand": [next(p for p in layer.parameters() if p is not layer.bias)],
            "bias": [layer.bias],
        }[trained]
        for parameter in chosen:
            parameter.requires_grad_(True)
        return nn.Sequential(layer)

    model = make()
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    td.truncate_(model, 1)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    model = make()
    td.merge_(model)
    linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
    assert (linear.weight.requires_grad, linear.bias.requires_grad) == (trained == "one operand", trained == "bias")


def test_several_layers_take_one_int():
    model = nn.Sequential(make_layer("tucker"), make_layer("cp", input_shape=(10,), rank=7))
    report = td.truncate_(model, 3)
    assert [each.rank for each in report.replacements] == [(3, 3, 3, 3), (3,)]
    with refused("2 tensor regressions.*one int", model):
        td.truncate_(model, (2, 2, 2, 2))


@pytest.mark.parametrize(
    "rank", [0, -1, (3, 3, 3), (9, 3, 3, 3), (3, 0, 3, 3), (3.0, 3, 3, 3), "full", "1234", True, 2.5, None, [], {}],
    ids=repr,
)  # fmt: skip
def test_ranks_that_cannot_be_kept(rank):
    model = nn.Sequential(make_layer("tucker"))
    optimizer = torch.optim.Adam(model.parameters())
    with refused("truncate_: rank is between 1 and", model, optimizer):
        td.truncate_(model, rank, optimizer=optimizer)


def test_a_rank_below_min_rank_is_refused():
    model = nn.Sequential(make_layer("tucker"), make_layer("cp", law="nested-min3", input_shape=(10,), rank=7))
    with refused("min_rank=3", model):
        td.truncate_(model, 2)


# Refusals that both share.

OPERATIONS = {"merge_": td.merge_, "truncate_": lambda model: td.truncate_(model, 2)}
both_operations = pytest.mark.parametrize("operation", OPERATIONS)


@both_operations
def test_nothing_to_do_is_refused(operation):
    model = plain()
    with refused(f"{operation}: Sequential has no tensor regression", model):
        OPERATIONS[operation](model)


@both_operations
def test_a_layer_that_is_the_model_is_refused(operation):
    layer = make_layer("tucker")
    with refused(f"{operation}.*nn.Sequential", layer):
        OPERATIONS[operation](layer)


@both_operations
def test_wrapped_models_are_refused(operation):
    for wrapped, match in (
        (nn.DataParallel(nn.Sequential(make_layer("tucker"))), "model.module"),
        (torch.compile(nn.Sequential(make_layer("tucker")), backend="eager"), "_orig_mod"),
    ):
        with refused(f"{operation}.*{match}", wrapped):
            OPERATIONS[operation](wrapped)
    with pytest.raises(td.TensorDropoutError, match=f"{operation}: expected an nn.Module"):
        OPERATIONS[operation](5)


HOOKED = {
    "forward": lambda layer: layer.register_forward_hook(lambda *_: None),
    "pre": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "parameter": lambda layer: next(layer.parameters()).register_hook(lambda grad: grad),
}


@both_operations
@pytest.mark.parametrize("hook", HOOKED)
@pytest.mark.parametrize("converted", [False, True], ids=["bare", "converted"])
def test_hooks_are_never_dropped_silently(operation, hook, converted):
    if converted:
        model = flat()
        td.tensorize_(model, torch.randn(2, 3, 8, 8))
        layer = model[3].regression
    else:
        model = nn.Sequential(make_layer("tucker"))
        layer = model[0]
    HOOKED[hook](layer)
    with refused("hooks", model):
        OPERATIONS[operation](model)


@both_operations
def test_tied_factors_are_refused(operation):
    model = nn.Sequential(
        make_layer("tucker", input_shape=(8, 4, 4), rank=4), make_layer("tucker", input_shape=(10,), rank=(4, 4))
    )
    model[0].factors[1] = model[0].factors[2]  # inside one layer: allowed
    model.other = nn.Module()
    model.other.borrowed = model[0].core
    with refused("shares", model):
        OPERATIONS[operation](model)


def test_a_failure_in_the_second_layer_undoes_the_first():
    model = nn.Sequential(make_layer("tucker"), make_layer("tucker", input_shape=(10,), rank=(4, 4)))
    optimizer = torch.optim.Adam(model[0].parameters())
    before = Snapshot(model, optimizer)
    with pytest.raises(td.TensorDropoutError, match="does not hold"):
        td.truncate_(model, 2, optimizer=optimizer)
    before.check()
