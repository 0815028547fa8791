"""The layers' fast path against every mask enumerated, against Monte-Carlo, and against TensorLy-Torch."""

from __future__ import annotations

import copy
import pickle
from itertools import product

import pytest
import torch
from torch import nn

import tensor_dropout as td
from layers_under_test import FORMATS, both_masks, every_format, every_pair, make_input, make_layer
from tensor_dropout import reference

EXACT = {"rtol": 0, "atol": 1e-12}

# Small enough to list all masks; each has a rank axis of size 1, which modes="all" leaves alone.
INPUT_SHAPE, OUTPUT_SHAPE = (3, 2, 3), (2,)
RANKS = {"tucker": (2, 1, 3, 2), "tt": (2, 3, 1), "cp": 4, "ring": (2, 1, 3, 2)}
MODES = {
    "tucker": ("all", (0,), (3,), (2, 0), (1,), (0, 1), (0, 1, 2, 3)),
    "tt": ("all", (1,), (2,), (3,), (3, 2), (1, 2, 3)),
    "cp": ("all",),
    "ring": ("all", (0,), (3,), (2, 0), (0, 1, 2, 3)),
}
LAWS = {f"{law}-min{k}": {"law": law, "min_rank": k} for law in ("bernoulli", "nested") for k in (0, 1, 2)}
LAWS |= {"replacement": {"law": "replacement"}, "gaussian": {"law": "gaussian"}}


def some_laws(names):
    return pytest.mark.parametrize("law", [pytest.param(LAWS[name], id=name) for name in names])


every_law = some_laws(LAWS)


def smallest_dropped_rank(format, modes):
    if format == "cp":
        return RANKS["cp"]
    if modes == "all":
        return min(rank for rank in RANKS[format] if rank > 1)
    return min(RANKS[format][mode - 1 if format == "tt" else mode] for mode in modes)


ENUMERATED = [
    pytest.param(format, {"modes": modes, "scaling": scaling, **LAWS[law]}, id=f"{format}-{modes}-{scaling}-{law}")
    for format in FORMATS
    for modes, scaling, law in product(MODES[format], ("inverted", "paper"), LAWS)
    if LAWS[law].get("min_rank", 0) <= smallest_dropped_rank(format, modes)
]


def enumerable_layer(format, theta=0.6, **options):
    shapes = {"input_shape": INPUT_SHAPE, "output_shape": OUTPUT_SHAPE, "rank": RANKS[format]}
    return make_layer(format, theta=theta, dtype=torch.float64, **{**shapes, **options})


def assert_means_agree(layer, x):
    """The mean over all masks is what eval() does, and the fast path equals the dense one under every mask."""
    with torch.no_grad():
        chances, masks = zip(*reference.all_masks(layer), strict=True)
        fast = torch.stack([layer.regress(x, each) for each in masks])
        slow = torch.stack([reference.regress(layer, x, each) for each in masks])
        mean = torch.einsum("m,m...->...", torch.stack(chances), fast)
        torch.testing.assert_close(fast, slow, **EXACT)
        torch.testing.assert_close(mean, layer.eval()(x), **EXACT)
        torch.testing.assert_close(reference.mean_weight(layer), layer.dense_weight(), **EXACT)


@pytest.mark.parametrize(("format", "dropout"), ENUMERATED)
def test_mean_over_all_masks_is_the_deterministic_layer(format, dropout):
    layer = enumerable_layer(format, **dropout)
    assert_means_agree(layer, make_input(layer, 3))


@every_format
@every_law
@pytest.mark.parametrize("theta", [0.1, 1.0])
def test_mean_over_all_masks_at_the_ends_of_theta(format, law, theta):
    layer = enumerable_layer(format, theta=theta, **law)
    assert_means_agree(layer, make_input(layer, 2))


@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@some_laws(name for name in LAWS if not name.endswith("min2"))
@pytest.mark.parametrize(
    ("format", "rank", "modes"), [("tucker", (1, 1, 1, 1), (0, 3)), ("tt", 1, (1, 3)), ("ring", 1, (0, 2))]
)
def test_mean_over_all_masks_at_rank_one(format, rank, modes, law, scaling):
    layer = enumerable_layer(format, rank=rank, modes=modes, scaling=scaling, **law)
    assert len(layer.dropped_axes) == 2
    assert_means_agree(layer, make_input(layer, 3))


@every_format
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
def test_all_modes_of_rank_one_leave_nothing_to_drop(format, scaling):
    with pytest.warns(UserWarning, match="nothing to drop"):
        layer = enumerable_layer(format, rank=1, scaling=scaling)
    x = make_input(layer)
    assert_means_agree(layer, x)
    assert torch.equal(layer.train()(x), layer.eval()(x))


@every_format
def test_mean_gradient_over_all_masks_is_the_deterministic_gradient(format):
    """Of the sum of the outputs: the gradients are linear in each mask, as the outputs are."""
    layer = enumerable_layer(format, law="nested", scaling="paper")
    x = make_input(layer)
    parameters = list(layer.parameters())
    means = [torch.zeros_like(parameter) for parameter in parameters]
    for chance, masks in reference.all_masks(layer):
        gradients = torch.autograd.grad(layer.regress(x, masks).sum(), parameters)
        means = [mean + chance * gradient for mean, gradient in zip(means, gradients, strict=True)]
    torch.testing.assert_close(means, list(torch.autograd.grad(layer.eval()(x).sum(), parameters)), **EXACT)


@every_pair
def test_monte_carlo_mean_at_sizes_too_large_to_enumerate(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample, theta=0.5, dtype=torch.float64)
    x = make_input(layer, 1)
    with torch.no_grad():
        samples, passes = (4000, 1) if per_sample else (1, 500)
        draws = torch.cat([layer(x.expand(samples, *layer.input_shape)) for _ in range(passes)])
        mean = layer.eval()(x)[0]
    standard_error = draws.std(0) / len(draws) ** 0.5
    assert (standard_error > 0).all()
    assert ((draws.mean(0) - mean).abs() < 5 * standard_error).all()


@every_format
@every_law
def test_paper_scaling_is_inverted_scaling_of_a_rescaled_weight(format, law):
    """A paper layer whose weight is W/E[c] on every dropped axis is the inverted layer of W, mask by mask."""
    inverted = enumerable_layer(format, scaling="inverted", **law)
    paper = enumerable_layer(format, scaling="paper", **law)
    means = paper.mean_masks()
    with torch.no_grad():
        if format == "cp":
            paper.factors[0].div_(means[0])
        else:
            for axis in paper.dropped_axes:
                brings_in = paper.factors[axis] if format == "tucker" else paper.cores[axis - (format == "ring")]
                brings_in.div_(means[axis])
    x = make_input(inverted)
    torch.testing.assert_close(paper.dense_weight(), inverted.dense_weight(), **EXACT)
    torch.testing.assert_close(paper.eval()(x), inverted.eval()(x), **EXACT)
    for seed in range(5):
        outputs = []
        for layer in (paper.train(), inverted.train()):
            torch.manual_seed(seed)
            outputs.append(layer(x))
        torch.testing.assert_close(*outputs, **EXACT)


@every_pair
def test_training_is_random_and_eval_is_not(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample)
    x = make_input(layer)
    outputs = [layer(x) for _ in range(6)]
    assert any(not torch.equal(outputs[0], later) for later in outputs[1:])
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@every_pair
def test_every_parameter_gets_a_gradient_in_training(format, law, per_sample):
    layer = make_layer(format, law=law, per_sample=per_sample)
    layer(make_input(layer)).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.count_nonzero() > 0, name


@every_format
@pytest.mark.parametrize("init", ["pool", "normal"])
def test_every_parameter_of_a_fresh_layer_gets_a_gradient(format, init):
    layer = make_layer(format, theta=None, init=init)
    layer(make_input(layer)).square().sum().backward()
    assert all(parameter.grad.count_nonzero() > 0 for parameter in layer.parameters())


@every_format
@both_masks
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@some_laws(name for name in LAWS if name != "replacement")
def test_theta_one_is_the_plain_layer_bit_for_bit(format, law, per_sample, scaling, dtype):
    # Small, because oneDNN's larger bf16 products crash on machines that mask AMX.
    plain = make_layer(format, theta=None, small=True, dtype=dtype)
    dropout = {"theta": 1.0, "per_sample": per_sample, "scaling": scaling, **law}
    randomized = make_layer(format, small=True, dtype=dtype, **dropout)
    x = make_input(plain)
    assert torch.equal(randomized.train()(x), plain(x))
    assert torch.equal(randomized.eval()(x), plain(x))


@every_format
def test_replacement_still_randomizes_at_theta_one(format):
    layer = make_layer(format, law="replacement", theta=1.0)
    x = make_input(layer)
    assert not torch.equal(layer.train()(x), layer.eval()(x))


@every_format
@every_law
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
def test_each_sample_has_its_own_mask(format, law, scaling):
    layer = make_layer(format, per_sample=True, scaling=scaling, dtype=torch.float64, **law)
    x = make_input(layer, 6)
    masks = layer.draw_masks(6)
    y = layer.regress(x, masks)
    for mask in masks:
        assert mask.shape[0] == 6
        assert len(mask.unique(dim=0)) > 1
    for b in range(6):
        own = reference.regress(layer, x[b : b + 1], [mask[b] for mask in masks])
        torch.testing.assert_close(y[b : b + 1], own, **EXACT)


@every_format
@both_masks
def test_forward_draws_one_mask_or_one_for_each_sample(format, per_sample):
    """Equal samples: equal outputs under one mask, different ones under masks of their own."""
    layer = make_layer(format, per_sample=per_sample, dtype=torch.float64)
    x = make_input(layer, 1).expand(8, *layer.input_shape)
    y = layer(x)
    assert torch.allclose(y, y[:1].expand_as(y)) is not per_sample


@every_format
@every_law
@both_masks
def test_one_output_and_a_small_theta_stay_finite(format, law, per_sample):
    rank = {"tucker": (4, 3, 3, 1), "cp": 6, "tt": (4, 3, 1), "ring": (2, 4, 3, 2)}[format]
    layer = make_layer(format, theta=0.1, per_sample=per_sample, output_shape=1, rank=rank, **law)
    x = make_input(layer)
    for _ in range(30):
        layer.zero_grad()
        y = layer(x)
        y.square().sum().backward()
        assert y.isfinite().all()
        assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


@every_format
def test_dropping_every_rank_leaves_the_bias(format):
    layer = make_layer(format, theta=0.5)
    nothing = [torch.zeros_like(mask) for mask in layer.draw_masks()]
    x = make_input(layer)
    assert torch.equal(layer.regress(x, nothing), layer.bias.expand(len(x), -1))


@every_format
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
def test_at_test_sample_goes_on_drawing_in_eval(format, scaling):
    layer = make_layer(format, at_test="sample", scaling=scaling, theta=0.5).eval()
    x = make_input(layer)
    torch.manual_seed(3)
    outputs = [layer(x) for _ in range(4)]
    assert any(not torch.equal(outputs[0], later) for later in outputs[1:])
    torch.manual_seed(3)
    assert torch.equal(layer.train()(x), outputs[0])


# One thinned network over many batches.


@every_pair
@pytest.mark.parametrize("training", [True, False])
def test_fixed_masks_keep_one_network_over_many_batches(format, law, per_sample, training):
    layer = make_layer(format, law=law, per_sample=per_sample, dtype=torch.float64, theta=0.5).train(training)
    x = make_input(layer, 5)
    networks = []
    for _ in range(6):
        with td.fixed_masks(layer) as inside:
            assert inside is layer
            whole = layer(x)
            torch.testing.assert_close(torch.cat([layer(x[:2]), layer(x[2:])]), whole, **EXACT)
            torch.testing.assert_close(layer.train(not training)(x), whole, **EXACT)
            layer.train(training)
        networks.append(whole)
    assert any(not torch.equal(networks[0], other) for other in networks[1:])
    assert torch.equal(layer(x), layer(x)) is not training


def test_fixed_masks_may_be_nested_and_each_block_restores_the_one_around_it():
    layer = make_layer("cp", theta=0.5)
    x = make_input(layer)
    with td.fixed_masks(layer):
        outer = layer(x)
        with td.fixed_masks(layer):
            assert not torch.equal(layer(x), outer)
        assert torch.equal(layer(x), outer)
    assert not torch.equal(layer(x), layer(x))


def test_fixed_masks_end_with_an_exception():
    layer = make_layer("tt", theta=0.5)
    x = make_input(layer)
    with pytest.raises(KeyError), td.fixed_masks(layer):
        raise KeyError
    assert not torch.equal(layer(x), layer(x))


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, copy.copy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "copy", "pickle"],
)
def test_copies_made_inside_fixed_masks_draw_their_own(duplicate):
    layer = make_layer("cp", theta=0.5)
    x = make_input(layer)
    with td.fixed_masks(layer):
        other = duplicate(layer)
        assert torch.equal(layer(x), layer(x))
        assert not torch.equal(other(x), other(x))
    assert torch.equal(other.eval()(x), layer.eval()(x))


class FailingLaw:
    """Cannot draw; the rest of the protocol is there."""

    def draw(self, shape, theta, *, device):
        raise ArithmeticError

    def mean(self, R, theta):
        return theta.expand(R)

    def second_moment(self, R, theta):
        return None

    def support(self, R, theta):
        return None


def test_fixed_masks_free_all_layers_if_one_cannot_draw():
    model = nn.Sequential(make_layer("cp", theta=0.5), make_layer("cp", law=FailingLaw(), input_shape=10, rank=4))
    with pytest.raises(ArithmeticError), td.fixed_masks(model):
        pass
    x = make_input(model[0])
    assert not torch.equal(model[0](x), model[0](x))


def test_fixed_masks_reach_every_layer_of_a_model_and_leave_plain_ones_alone():
    model = nn.Sequential(
        make_layer("tucker", theta=0.5), nn.ReLU(), make_layer("cp", theta=None, input_shape=10, rank=4)
    )
    x = make_input(model[0])
    with td.fixed_masks(model):
        assert torch.equal(model(x), model(x))
    assert not torch.equal(model(x), model(x))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: nn.Linear(3, 2), id="no tensor layer"),
        pytest.param(lambda: make_layer("cp", theta=None), id="plain layer"),
    ],
)
def test_fixed_masks_raise_where_nothing_is_randomized(model):
    with pytest.raises(td.TensorDropoutError, match="no tensor regression layer with dropout"), td.fixed_masks(model()):
        pass


def test_fixed_masks_raise_where_there_is_nothing_to_drop():
    with pytest.warns(UserWarning, match="nothing to drop"):
        layer = make_layer("cp", rank=1)
    with pytest.raises(td.TensorDropoutError, match="no tensor regression layer with dropout"), td.fixed_masks(layer):
        pass


# Shapes, and an oracle.


@pytest.mark.filterwarnings("ignore:.*nothing to drop")
@every_format
@pytest.mark.parametrize("input_shape", [(3,), (3, 2), (3, 2, 4), (2, 3, 2, 2), (2, 3, 2, 1, 2)], ids=str)
@pytest.mark.parametrize("output_shape", [1, 3, (3, 2)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_any_number_of_input_and_output_modes(format, input_shape, output_shape, bias):
    layer = make_layer(
        format, input_shape=input_shape, output_shape=output_shape, rank="full", bias=bias, dtype=torch.float64
    )
    x = make_input(layer)
    outputs = (output_shape,) if isinstance(output_shape, int) else output_shape
    assert layer.dense_weight().shape == (*input_shape, *outputs)
    for masks in (layer.draw_masks(), [None] * len(layer.draw_masks())):
        y = layer.regress(x, masks)
        assert y.shape == (len(x), *outputs)
        torch.testing.assert_close(y, reference.regress(layer, x, masks), **EXACT)
    assert layer(x).shape == (len(x), *outputs)


@every_format
def test_the_bias_is_added_as_it_is(format):
    layer, without = make_layer(format, theta=None), make_layer(format, theta=None, bias=False)
    x = make_input(layer)
    assert without.bias is None
    without.load_state_dict({k: v for k, v in layer.state_dict().items() if k != "bias"})
    assert torch.equal(layer(x), without(x) + layer.bias)


@every_format
@pytest.mark.parametrize("output_shape", [3, (3, 2)], ids=str)
def test_dense_weight_and_output_are_those_of_tensorly(format, output_shape):
    import tensorly
    import tltorch

    tensorly.set_backend("pytorch")
    layer = make_layer(
        format,
        theta=None,
        input_shape=(4, 3, 2),
        output_shape=output_shape,
        rank={"cp": 5}.get(format, 2),
        dtype=torch.float64,
    )
    with torch.no_grad():
        if format == "tucker":
            reconstructed = tensorly.tucker_to_tensor((layer.core, list(layer.factors)))
            factorized = tltorch.TuckerTensor(layer.core, list(layer.factors))
        elif format == "cp":
            weights = torch.ones(5, dtype=torch.float64)
            reconstructed = tensorly.cp_to_tensor((weights, list(layer.factors)))
            factorized = tltorch.CPTensor(weights, list(layer.factors))
        elif format == "ring":
            reconstructed = tensorly.tr_to_tensor(list(layer.cores))
            factorized = None  # TensorLy-Torch has no ring
        else:
            reconstructed = tensorly.tt_to_tensor(list(layer.cores))
            factorized = tltorch.TTTensor(list(layer.cores))
    torch.testing.assert_close(layer.dense_weight(), reconstructed, **EXACT)
    if factorized is not None:
        torch.testing.assert_close(layer.dense_weight(), factorized.to_tensor(), **EXACT)
    x = make_input(layer)
    torch.testing.assert_close(layer(x) - layer.bias, tensorly.tenalg.inner(x, reconstructed, 3), **EXACT)


# Describing itself.


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ("tucker", {"core", "factors.0", "factors.1", "factors.2", "factors.3", "bias"}),
        ("cp", {"factors.0", "factors.1", "factors.2", "factors.3", "bias"}),
        ("ring", {"cores.0", "cores.1", "cores.2", "cores.3", "bias"}),
        ("tt", {"cores.0", "cores.1", "cores.2", "cores.3", "bias"}),
    ],
)
def test_parameter_names_are_those_of_the_documentation(format, names):
    layer = make_layer(format)
    assert set(dict(layer.named_parameters())) == names
    assert set(layer.state_dict()) == names | {"dropout.theta"}


@every_format
def test_repr_names_shapes_rank_and_dropout(format):
    layer = make_layer(format)
    shown = repr(layer)
    assert f"{layer.input_shape} -> {layer.output_shape}, rank={layer.rank}" in shown
    assert "TensorDropout(theta=0.7, law='bernoulli', modes='all', scaling='inverted')" in shown


@every_format
def test_a_layer_can_be_made_on_the_meta_device_and_keeps_its_theta(format):
    layer = make_layer(format, device="meta")
    assert all(parameter.is_meta for parameter in layer.parameters())
    assert layer.dropout.theta.item() == pytest.approx(0.7)
    assert layer(torch.empty(2, *layer.input_shape, device="meta")).shape == (2, 10)
    filled = layer.to_empty(device="cpu")
    filled.reset_parameters()
    assert filled.dropout.theta.item() == pytest.approx(0.7)
    assert filled(make_input(filled)).isfinite().all()
