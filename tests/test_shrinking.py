"""The same network with a smaller head."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab import cli
from tensor_dropout_lab.evaluation.shrinking import shrink
from tensor_dropout_lab.nets import build_net

X = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def make_net(head="fc", **options):
    torch.manual_seed(0)
    return build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head=head, **options).eval()


BOTH, LOW_RANK, RANK = {"low-rank", "pruned"}, {"low-rank"}, {"rank"}


@pytest.mark.parametrize(
    ("head", "options", "kinds"),
    [
        ("fc", {}, BOTH),
        ("fc+dropout", {}, BOTH),
        ("fc+low-rank", {"rank": 6}, LOW_RANK),
        ("trl-cp", {"rank": 12}, RANK),
        ("rtrl-tucker", {"rank": (16, 2, 2, 10), "law": "nested"}, RANK),
        ("rtrl-tt", {}, RANK),
    ],
)
def test_the_largest_is_the_network_and_the_network_stays(head, options, kinds):
    net = make_net(head, **options)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    found = list(shrink(net, 4))
    assert {each.kind for each in found} == kinds | {"whole"}
    *smaller, whole = found
    assert whole.network is net
    for kind in kinds:
        sizes = [each.size for each in smaller if each.kind == kind]
        assert sizes == sorted(set(sizes))
    assert all(each.parameters < whole.parameters for each in smaller)
    assert all(each.network(X).shape == (7, 10) for each in smaller)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_low_rank_is_the_nearest_weight_and_pruning_keeps_the_largest():
    net = make_net()
    weight = net.fc.weight.detach()
    values = torch.linalg.svdvals(weight)
    for each in [each for each in shrink(net, 5) if each.kind != "whole"]:
        head = each.network.fc
        if each.kind == "low-rank":
            error = (head.expand @ head.reduce - weight).norm()
            torch.testing.assert_close(error, values[each.size :].norm(), rtol=1e-3, atol=1e-4)
            assert each.parameters == each.size * (64 + 10) + 10
        else:
            kept = head.weight != 0
            assert int(kept.sum()) == each.size == each.parameters - 10
            assert weight[kept].abs().min() >= (weight[~kept].abs().max() if not kept.all() else 0)
        assert torch.equal(head.bias, net.fc.bias)


def test_a_head_that_is_neither_is_refused():
    net = make_net()
    net.fc = torch.nn.Identity()
    with pytest.raises(TensorDropoutError, match="a tensor regression or linear, got Identity"):
        list(shrink(net, 3))


def test_the_command_writes_and_shows_smaller_heads(tmp_path):
    run, runner = str(tmp_path / "run"), CliRunner()
    options = "train --data digits --head rtrl-cp --epochs 4 --set net.law=nested --set run.threads=1"
    assert runner.invoke(cli.app, [*options.split(), "--out", run]).exit_code == 0
    asked = ["evaluate", run, *["--protocol", "none", "--noise", "none", "--head-sizes", "4", "--mode", "exact"]]
    said = runner.invoke(cli.app, asked)
    assert said.exit_code == 0, said.output
    assert "smaller head, not trained again" in " ".join(said.output.split())
    summary = json.loads((tmp_path / "run/evaluation-exact/evaluation.json").read_text())["summary"]
    *cut, whole = summary["heads"]
    sizes = [row["size"] for row in cut]
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert whole["accuracy"] == pytest.approx(summary["clean"]["accuracy"], abs=3)  # of the mean weight
    assert all(row["low"] <= row["accuracy"] <= row["high"] for row in summary["heads"])
    assert summary["heads"][0]["accuracy"] < summary["heads"][-1]["accuracy"]
    refused = runner.invoke(cli.app, [*asked, "--ensemble", run, "--out", str(tmp_path / "both")])
    assert refused.exit_code == 1
    assert "the head of one network" in refused.output
