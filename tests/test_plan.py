"""The plans: every way to contract gives the same result, the planned one is the cheapest, and x is never copied."""

from __future__ import annotations

import random
from math import prod

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import tensor_dropout as td
from layers_under_test import FORMATS, every_format, make_input
from tensor_dropout import reference
from tensor_dropout.layers import plan
from tensor_dropout.layers.contraction import contract, multiply_batched
from tensor_dropout.layers.plan import Network, Plans
from tensor_dropout.layers.regression import unwarned

NETWORKS = {
    "vector": ((7,), 3, 2),
    "long vector": ((200,), 150, 3),
    "wide image": ((30, 3, 3), 2, 3),
    "narrow image": ((2, 9, 9), 4, 2),
    "volume": ((6, 3, 2, 4), 3, 2),
    "many outputs": ((4, 3), 60, 3),
    "rank one": ((5, 4), 3, 1),
    "full rank": ((5, 2, 2), 4, "full"),
    "two output modes": ((5, 4), (3, 6), 2),
}
HEADS = {
    "tucker, small image": (td.TuckerRegression, (512, 4, 4), 100, (256, 3, 3, 96)),
    "cp, small image": (td.CPRegression, (512, 4, 4), 100, 200),
    "tt, small image": (td.TTRegression, (512, 4, 4), 100, 64),
    "tucker, image": (td.TuckerRegression, (2048, 7, 7), 1000, (256, 3, 3, 256)),
    "cp, image": (td.CPRegression, (2048, 7, 7), 1000, 200),
    "tucker, volume": (td.TuckerRegression, (512, 6, 7, 6), 1, (128, 6, 7, 6, 1)),
    "cp, volume": (td.CPRegression, (512, 6, 7, 6), 1, 48),
    "tucker, video": (td.TuckerRegression, (512, 4, 7, 7), 400, (256, 2, 3, 3, 128)),
    "cp, video": (td.CPRegression, (512, 4, 7, 7), 400, 200),
}
every_network = pytest.mark.parametrize("network", NETWORKS)
every_head = pytest.mark.parametrize("head", HEADS)
every_layout = pytest.mark.parametrize("layout", Plans._fields)


def make(format, network, **options):
    input_shape, output_shape, rank = NETWORKS[network]
    with unwarned():  # nothing to drop at rank one
        return FORMATS[format](input_shape, output_shape, rank, init="normal", dtype=torch.float64, **options)


def make_head(head, **options):
    layer, input_shape, output_shape, rank = HEADS[head]
    return layer(input_shape, output_shape, rank, **options)


def arrange(x, layout):
    """The same numbers, channels first or channels last in memory."""
    return x.contiguous() if layout == "channels_first" else x.movedim(1, -1).contiguous().movedim(-1, 1)


def network_of(layer):
    inputs, operands, outputs, ranks = layer._indices()
    sizes = dict(zip(inputs + outputs + ranks, (*layer.weight_shape, *layer._ranks), strict=True))
    return Network(inputs, tuple(operands), outputs, ranks, sizes)


def wander(network, layout, choice):
    """A plan made of steps chosen at random, whatever they cost."""
    order = network.inputs if layout == "channels_first" else network.inputs[1:] + network.inputs[:1]
    absorbed, held, steps, cost = 0, order, [], 0.0
    while absorbed != (1 << len(network.operands)) - 1:
        groups = list(plan._groups(network, absorbed))
        ways = [way for group in groups for way in plan._ways(network, absorbed, held, group)]
        own, step = choice(ways)
        absorbed |= sum(1 << k for k in step.operands)
        held, steps, cost = step.result, [*steps, step], cost + own
    return plan._place_masks(network, order, tuple(steps), cost)


def some_plans(layer, layout, n):
    choice = random.Random(0).choice
    return [wander(network_of(layer), layout, choice) for _ in range(n)]


@every_format
@every_network
@every_layout
def test_no_way_is_cheaper_than_the_planned_one(format, network, layout):
    layer = make(format, network)
    planned = getattr(layer._plan, layout)
    others = some_plans(layer, layout, 100)
    assert planned.cost <= min(other.cost for other in others)
    assert planned.cost < max(other.cost for other in others)


@every_format
@every_network
@every_layout
@pytest.mark.parametrize("per_sample", [False, True])
@torch.no_grad()
def test_every_way_gives_the_reference(format, network, layout, per_sample):
    layer = make(format, network, dropout=td.TensorDropout(0.5, law="gaussian"))
    x = make_input(layer, 3)
    masks = layer.draw_masks(3 if per_sample else None)
    own = [masks] * 3 if not per_sample else [[None if m is None else m[b] for m in masks] for b in range(3)]
    expected = torch.cat([reference.regress(layer, x[b : b + 1], own[b]) for b in range(3)])
    x = arrange(x, layout)
    for way in (getattr(layer._plan, layout), *some_plans(layer, layout, 30)):
        y = contract(x, layer.operands(), masks, Plans(way, way)) + layer.bias
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


def test_the_wanderer_meets_every_kind_of_step():
    layers = [make(format, network) for format in FORMATS for network in NETWORKS]
    plans = [way for layer in layers for layout in Plans._fields for way in some_plans(layer, layout, 30)]
    steps = [step for way in plans for step in way.steps]
    assert {step.kind for step in steps} == {"right", "batched", "turned", "multiply"}
    assert {bool(step.permute) for step in steps} == {True, False}
    assert {len(step.operands) for step in steps} >= {1, 2, 3}
    assert {fold is None for way in plans for fold in way.folds} == {True, False}


@every_format
@every_network
@every_layout
def test_a_plan_absorbs_every_operand_once_and_masks_every_rank_once(format, network, layout):
    layer = make(format, network)
    steps = getattr(layer._plan, layout).steps
    assert sorted(k for step in steps for k in step.operands) == list(range(len(layer.operands())))
    assert sorted(axis for step in steps for axis, _ in step.masked) == list(range(len(layer._ranks)))


@every_layout
@pytest.mark.parametrize("head", ["tucker, small image", "tucker, image", "tucker, video"])
def test_tucker_reads_the_features_once_with_all_of_space_merged(head, layout):
    layer = make_head(head, device="meta")
    n_in = len(layer.input_shape)
    space, channels, core, output = [step.operands for step in getattr(layer._plan, layout).steps]
    assert (space, channels, core, output) == (tuple(range(1, n_in)), (0,), (n_in + 1,), (n_in,))


@every_layout
@pytest.mark.parametrize("head", ["cp, small image", "cp, image", "cp, volume", "cp, video"])
def test_cp_projects_channels_then_all_of_space_at_once(head, layout):
    layer = make_head(head, device="meta")
    n_in = len(layer.input_shape)
    assert [step.operands for step in getattr(layer._plan, layout).steps] == [(0,), tuple(range(1, n_in)), (n_in,)]


@every_head
@every_layout
def test_nothing_larger_than_the_features_or_the_factors_is_built(head, layout):
    layer = make_head(head, device="meta")
    largest = max(prod(layer.input_shape), *(operand.numel() for operand in layer.operands()))
    for step in getattr(layer._plan, layout).steps:
        assert prod(step.sizes) <= prod(layer.input_shape)
        assert prod(step.shape) <= largest


@pytest.mark.parametrize("n_inputs", [1, 6])
@every_format
def test_layers_of_many_modes_are_planned(format, n_inputs):
    layer = FORMATS[format]((2,) * n_inputs, 2, 2, init="normal", dtype=torch.float64)
    x = make_input(layer, 2)
    torch.testing.assert_close(layer(x), reference.regress(layer, x, layer.mean_masks()))


# Layouts


class FreshStorages(TorchDispatchMode):
    """Counts the results of operations that lie in new memory and have as many numbers as the features."""

    def __init__(self, x):
        super().__init__()
        self.numel, self.known, self.found = x.numel(), {x.untyped_storage().data_ptr()}, []
        self.alive = []  # so that no address is used twice

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.known.add(tensor.untyped_storage().data_ptr())
                self.alive.append(tensor)
                if tensor.untyped_storage().nbytes() == self.numel * tensor.itemsize:
                    self.found.append(function)
        return result


def test_a_copy_of_the_features_is_noticed():
    x = torch.randn(2, 3, 4)
    with FreshStorages(x) as fresh:
        x.mT.reshape(-1, 3)
    assert len(fresh.found) == 1


@every_head
@every_layout
@pytest.mark.parametrize("per_sample", [False, True])
def test_the_features_are_not_copied_and_their_gradient_has_their_layout(head, layout, per_sample):
    layer = make_head(head, dropout=td.TensorDropout(0.8, per_sample=per_sample))
    x = arrange(torch.randn(3, *layer.input_shape), layout).requires_grad_()
    with FreshStorages(x) as fresh:
        y = layer(x)
        assert fresh.found == []
        gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    assert len(fresh.found) == 1  # the gradient itself
    assert gradients[0].stride() == x.stride()


@every_format
@every_network
@pytest.mark.parametrize("per_sample", [False, True])
def test_layouts_agree_in_outputs_and_gradients(format, network, per_sample):
    layer = make(format, network, dropout=td.TensorDropout(0.7, per_sample=per_sample))
    masks = layer.draw_masks(3 if per_sample else None)
    found = {}
    for layout in Plans._fields:
        x = arrange(make_input(layer, 3), layout).requires_grad_()
        y = layer.regress(x, masks)
        found[layout] = [y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    torch.testing.assert_close(found["channels_first"], found["channels_last"])


@every_format
def test_features_in_any_other_layout_are_accepted(format):
    layer = make(format, "wide image")
    x = make_input(layer, 6)
    expected = layer(x)
    strided = torch.stack([x, -x], -1)[..., 0]
    torch.testing.assert_close(layer(strided), expected)
    torch.testing.assert_close(layer(x.transpose(2, 3).contiguous().transpose(2, 3)), expected)
    torch.testing.assert_close(layer(x[:1].expand_as(x)), expected[:1].expand_as(expected))


# The batched product


def batched_examples():
    """(P, k, q) contiguous or turned, (k, n) with n below and above q."""
    for n in (2, 6):
        for turned in (False, True):
            x = torch.randn(3, 4, 5, dtype=torch.float64).mT
            x = x if turned else x.contiguous()
            yield pytest.param(x, torch.randn(5, n, dtype=torch.float64), id=f"n={n}, turned={turned}")


@pytest.mark.parametrize("n_last", [True, False])
@pytest.mark.parametrize(("x", "matrix"), list(batched_examples()))
def test_all_derivatives_of_the_batched_product(x, matrix, n_last):
    x, matrix = (tensor.clone(memory_format=torch.preserve_format).requires_grad_() for tensor in (x, matrix))
    expected = torch.einsum("pkq,kn->pqn" if n_last else "pkq,kn->pnq", x, matrix)
    torch.testing.assert_close(multiply_batched(x, matrix, n_last), expected)

    def function(x, matrix):
        return multiply_batched(x, matrix, n_last)

    assert gradcheck(function, (x, matrix), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(function, (x, matrix))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [2, 6])
def test_the_batched_product_in_half_precision(dtype, n):
    x, matrix = torch.randn(3, 5, 4).to(dtype).requires_grad_(), torch.randn(5, n).to(dtype).requires_grad_()
    found = torch.autograd.grad(multiply_batched(x, matrix, True).float().square().sum(), (x, matrix))
    exact_x, exact_matrix = (tensor.detach().double().requires_grad_() for tensor in (x, matrix))
    exact = torch.autograd.grad((exact_x.mT @ exact_matrix).square().sum(), (exact_x, exact_matrix))
    for tensor, truth in zip(found, exact, strict=True):
        assert tensor.dtype == dtype
        assert (tensor.double() - truth).abs().max() < 0.02 * truth.abs().max()


def test_vmap_over_the_batched_product_and_its_gradient():
    x, matrix = torch.randn(7, 3, 5, 4, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)

    def loss(matrix, x):
        return multiply_batched(x, matrix, True).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(matrix, x)
    expected = torch.stack([torch.func.grad(loss)(matrix, sample) for sample in x])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("n_last", [True, False])
def test_forward_over_reverse_is_reverse_over_reverse(n_last):
    x, matrix = torch.randn(3, 4, 5, dtype=torch.float64), torch.randn(4, 2, dtype=torch.float64)

    def loss(x, matrix):
        return multiply_batched(x, matrix, n_last).pow(3).sum()

    found = torch.func.hessian(loss, argnums=(0, 1))(x, matrix)
    expected = torch.func.jacrev(torch.func.jacrev(loss, argnums=(0, 1)), argnums=(0, 1))(x, matrix)
    torch.testing.assert_close(found, expected)


# Few outputs: the weight is formed.


@every_format
@every_layout
@pytest.mark.parametrize("outputs", [1, 2])
def test_a_head_of_few_outputs_forms_its_weight(format, outputs, layout):
    layer = FORMATS[format]((6, 4, 3), outputs, 2, dropout=0.6, init="normal", dtype=torch.float64)
    assert layer._weight_plan is not None
    x = arrange(torch.randn(7, 6, 4, 3, dtype=torch.float64), layout)
    for masks in (layer.draw_masks(), layer.mean_masks()):
        projected = contract(x, layer.operands(), masks, layer._plan) + layer.bias
        torch.testing.assert_close(layer.regress(x, masks), projected, rtol=1e-12, atol=1e-12)
    masks = layer.draw_masks(7)  # per sample: every sample has its own weight
    rows = [layer.regress(x[k : k + 1], [None if mask is None else mask[k] for mask in masks]) for k in range(7)]
    torch.testing.assert_close(layer.regress(x, masks), torch.cat(rows), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("head", [head for head in HEADS if "volume" in head])
def test_a_formed_weight_takes_fewer_multiply_adds_than_projecting_every_sample(head):
    layer = make_head(head, device="meta")
    x = torch.empty(64, *layer.input_shape, device="meta")
    with FlopCounterMode(display=False) as formed:
        layer.regress(x, [None] * len(layer._ranks))
    with FlopCounterMode(display=False) as projected:
        contract(x, layer.operands(), [], layer._plan)
    assert 3 * formed.get_total_flops() < projected.get_total_flops()
