"""The contraction order: any order gives the same result, and the planned one is the cheapest."""

from __future__ import annotations

from itertools import permutations
from math import prod

import pytest
import torch

import tensor_dropout as td
from layers_under_test import FORMATS, every_format, make_input
from tensor_dropout import reference
from tensor_dropout.layers.plan import PLANNED_BATCH, TRAFFIC, Step, contract

NETWORKS = {
    "vector": ((7,), 3, 2),
    "wide image": ((30, 3, 3), 2, 3),
    "narrow image": ((2, 9, 9), 4, 2),
    "many outputs": ((4, 3), 60, 3),
    "rank one": ((5, 4), 3, 1),
    "full rank": ((5, 2, 2), 4, "full"),
    "two output modes": ((5, 4), (3, 6), 2),
}
every_network = pytest.mark.parametrize("network", NETWORKS)


def make(format, network, **options):
    input_shape, output_shape, rank = NETWORKS[network]
    return FORMATS[format](input_shape, output_shape, rank, init="normal", dtype=torch.float64, **options)


def follow(layer, order):
    """The plan that absorbs the operands in a given order, and its cost, both written out."""
    inputs, operands, outputs, ranks = layer._indices()
    sizes = dict(zip(inputs + outputs + ranks, (*layer.weight_shape, *layer._ranks), strict=True))

    def size(indices):
        return prod(sizes[index] for index in set(indices))

    held, steps, cost = inputs, [], 0
    for place, k in enumerate(order):
        later = "".join(operands[j] for j in order[place + 1 :]) + outputs
        joined = held + "".join(index for index in operands[k] if index not in held)
        result = "".join(index for index in joined if index in later) if place + 1 < len(order) else outputs
        enters = tuple(
            (axis, operands[k].index(rank), 1 + result.index(rank))
            for axis, rank in enumerate(ranks)
            if rank in operands[k] and rank not in held
        )
        steps.append(Step(k, f"z{held},{operands[k]}->z{result}", enters))
        cost += PLANNED_BATCH * (size(joined) + TRAFFIC * (size(held) + size(result))) + TRAFFIC * size(operands[k])
        held = result
    return tuple(steps), cost


def all_orders(layer):
    return permutations(range(len(layer.operands())))


def planned_order(layer):
    return [step.operand for step in layer._plan]


@every_format
@every_network
def test_no_order_is_cheaper_than_the_planned_one(format, network):
    layer = make(format, network)
    costs = {order: follow(layer, order)[1] for order in all_orders(layer)}
    assert costs[tuple(planned_order(layer))] == min(costs.values())


@every_format
@pytest.mark.parametrize("network", ["vector", "wide image", "two output modes"])
@pytest.mark.parametrize("per_sample", [False, True])
@torch.no_grad()
def test_every_order_gives_the_reference(format, network, per_sample):
    layer = make(format, network, dropout=td.TensorDropout(0.5, law="gaussian"))
    x = make_input(layer, 3)
    masks = layer.draw_masks(3 if per_sample else None)
    if per_sample:
        each = [reference.regress(layer, x[b : b + 1], [mask[b] for mask in masks]) for b in range(3)]
        expected = torch.cat(each)
    else:
        expected = reference.regress(layer, x, masks)
    for order in list(all_orders(layer))[::3]:
        y = contract(x, layer.operands(), masks, follow(layer, order)[0]) + layer.bias
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@every_format
@every_network
def test_the_plan_absorbs_every_operand_once_and_masks_every_rank_once(format, network):
    layer = make(format, network)
    assert sorted(planned_order(layer)) == list(range(len(layer.operands())))
    assert sorted(axis for step in layer._plan for axis, _, _ in step.enters) == list(range(len(layer._ranks)))


def test_tucker_on_a_large_feature_map_projects_space_before_channels():
    layer = td.TuckerRegression((2048, 7, 7), 1000, (256, 3, 3, 256), device="meta")
    assert set(planned_order(layer)[:2]) == {1, 2}
    assert planned_order(layer)[2:] == [0, 4, 3]


def test_cp_projects_channels_first():
    layer = td.CPRegression((512, 4, 4), 100, rank=200, device="meta")
    assert planned_order(layer)[0] == 0
    assert planned_order(layer)[-1] == 3


def test_nothing_larger_than_the_features_or_the_factors_is_built():
    """The promise of the layers: no intermediate beyond the input, the output, or the projected input."""
    for layer in (
        td.TuckerRegression((2048, 7, 7), 1000, (256, 3, 3, 256), device="meta"),
        td.CPRegression((512, 4, 4), 100, rank=200, device="meta"),
        td.TTRegression((512, 4, 4), 100, rank=64, device="meta"),
    ):
        inputs, _, outputs, ranks = layer._indices()
        sizes = dict(zip(inputs + outputs + ranks, (*layer.weight_shape, *layer._ranks), strict=True))
        for step in layer._plan:
            result = step.equation.split("->z")[1]
            assert prod(sizes[index] for index in result) <= prod(layer.input_shape)
