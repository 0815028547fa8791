"""Parameter groups: every parameter once, and the operands of tensor layers at a rate of their own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensor_dropout as td
from layers_under_test import every_format, make_layer
from tensor_dropout_lab.nets import HEADS, build_net
from tensor_dropout_lab.training.config import OptimizerConfig
from tensor_dropout_lab.training.optimizers import make_optimizer

OPERANDS = {"tucker": 5, "cp": 4, "tt": 4, "ring": 4}  # of a layer (8, 6, 5) -> 10: the core counts


def make_net(format="cp", **options):
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), make_layer(format, **options))


def groups_of(model, **options):
    return td.param_groups(model, **{"lr": 0.1, "weight_decay": 5e-4, **options})


@every_format
def test_by_default_operands_learn_at_the_rate_over_their_number(format):
    rest, factors = groups_of(make_net(format))
    assert (rest["lr"], rest["weight_decay"]) == (0.1, 5e-4)
    assert factors["lr"] == pytest.approx(0.1 / OPERANDS[format])
    assert factors["weight_decay"] == 5e-4
    assert len(factors["params"]) == OPERANDS[format]
    assert "2.bias" in rest["param_names"]


@every_format
def test_the_weight_moves_as_a_linear_layers_would(format):
    """What the default is for: relative steps of 1/K on K operands move W by about one such step."""
    layer = make_layer(format, theta=None, dtype=torch.float64)
    before = layer.dense_weight().detach()
    with torch.no_grad():
        for operand in layer.operands():
            operand.mul_(1 + 1e-4 / len(layer.operands()))
    moved = (layer.dense_weight().detach() - before) / before
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-4), rtol=1e-3, atol=0)


@pytest.mark.parametrize("head", HEADS)
def test_every_parameter_is_in_exactly_one_group(head):
    net = build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head=head)
    groups = groups_of(net)
    names = [name for group in groups for name in group["param_names"]]
    assert sorted(names) == sorted(name for name, _ in net.named_parameters())
    for group in groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            assert net.get_parameter(name) is parameter
    assert len(groups) == (1 if head.startswith("fc") else 2)


def test_given_rates_and_decays():
    rest, factors = groups_of(make_net(), factor_lr=0.7, factor_decay=0.0)
    assert (rest["lr"], rest["weight_decay"], factors["lr"], factors["weight_decay"]) == (0.1, 5e-4, 0.7, 0.0)


def test_a_bare_layer_and_a_plain_network():
    layer = make_layer("cp")
    rest, factors = groups_of(layer)
    assert rest["param_names"] == ["bias"]
    assert len(factors["params"]) == 4
    (only,) = groups_of(nn.Linear(3, 2))
    assert only["param_names"] == ["weight", "bias"]


def test_several_layers_have_a_group_each_and_a_shared_one_counts_once():
    net = nn.ModuleList([make_layer("cp"), make_layer("tucker", seed=1)])
    assert [group["lr"] for group in groups_of(net)] == pytest.approx([0.1, 0.1 / 4, 0.1 / 5])
    net.append(net[0])
    assert [len(group["params"]) for group in groups_of(net)] == [2, 4, 5]


def test_frozen_parameters_are_left_out():
    net = make_net()
    net[0].requires_grad_(False)
    net[2].operands()[0].requires_grad_(False)
    with pytest.warns(UserWarning, match=r"3 of 9 .* frozen .*call model\.requires_grad_\(True\)") as caught:
        rest, factors = groups_of(net)
    assert caught[0].filename == __file__
    assert rest["param_names"] == ["1.weight", "1.bias", "2.bias"]
    assert len(factors["params"]) == 3
    net[2].requires_grad_(False)
    with pytest.warns(UserWarning, match="7 of 9 parameters are frozen"):
        assert len(groups_of(net)) == 1


@pytest.mark.filterwarnings("error")
def test_nothing_is_said_where_nothing_is_frozen():
    assert len(groups_of(make_net())) == 2


@pytest.mark.filterwarnings("error")
def test_the_trainer_knows_what_it_has_frozen():
    net = make_net()
    net[0].requires_grad_(False)
    assert make_optimizer(net, OptimizerConfig(), torch.device("cpu")).param_groups[0]["params"][0] is net[1].weight


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
)
def test_torch_optimizers_take_them_and_move_every_parameter(make):
    net = make_net(theta=None)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    optimizer = make(groups_of(net))
    net(torch.randn(4, 3, 6, 5)).square().sum().backward()
    optimizer.step()
    assert all(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    names = optimizer.state_dict()["param_groups"]
    assert [name for group in names for name in group["param_names"]] == [
        "0.weight", "0.bias", "1.weight", "1.bias", "2.bias", *groups_of(net)[1]["param_names"],
    ]  # fmt: skip
    again = make(groups_of(net))
    again.load_state_dict(optimizer.state_dict())
    torch.optim.lr_scheduler.CosineAnnealingLR(again, 10)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch with gloo")
def test_a_wrapped_network_gives_the_groups_of_the_plain_one(tmp_path):
    net = make_net()
    plain = groups_of(net)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'rendezvous'}", rank=0, world_size=1)
    try:
        wrapped = groups_of(DistributedDataParallel(net))
    finally:
        dist.destroy_process_group()
    assert [group["param_names"] for group in wrapped] == [group["param_names"] for group in plain]
    for ours, theirs in zip(wrapped, plain, strict=True):
        assert all(a is b for a, b in zip(ours["params"], theirs["params"], strict=True))
    compiled = groups_of(torch.compile(net))
    assert [group["param_names"] for group in compiled] == [group["param_names"] for group in plain]


@every_format
def test_a_step_of_adam_moves_each_factor_by_its_share_of_itself(format):
    """That K such steps move W by about the whole share is the test above."""
    net = make_net(format, theta=None, dtype=torch.float64)
    layer = net[2]
    with torch.no_grad():
        next(iter(layer.operands())).mul_(1e-3)  # sizes as different as those of a fitted head
    groups = groups_of(net, factor_step=1e-3, weight_decay=0.0)
    sizes = [float(operand.detach().square().mean().sqrt()) for operand in layer.operands()]
    assert sorted(group["lr"] for group in groups[1:]) == pytest.approx(
        sorted(1e-3 * size / OPERANDS[format] for size in sizes)
    )
    before = [operand.detach().clone() for operand in layer.operands()]
    layer.dense_weight().square().sum().backward()
    torch.optim.Adam(groups[1:], eps=0).step()
    for old, new in zip(before, layer.operands(), strict=True):
        assert float((new.detach() - old).norm() / old.norm()) == pytest.approx(1e-3 / OPERANDS[format])


def test_factor_step_refuses_a_second_rate_and_factors_of_zeros():
    net = make_net()
    with pytest.raises(td.TensorDropoutError, match=r"factor_lr=0.1 and factor_step=0.01 .* leave one out"):
        groups_of(net, factor_lr=0.1, factor_step=0.01)
    nn.init.zeros_(net[2].factors[1])
    with pytest.raises(td.TensorDropoutError, match=r"2\.factors\.1 has the size 0\.0; use factor_lr"):
        groups_of(net, factor_step=0.01)
