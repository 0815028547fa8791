"""``tensorize_`` and ``merge_`` on networks of torchvision and timm: the same there and back, trained between."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import torchvision
from torch import nn

import tensor_dropout as td

NETWORKS = {
    "torchvision": ("resnet18", "mobilenet_v3_small", "densenet121", "efficientnet_b0", "convnext_tiny", "swin_t"),
    "timm": ("resnet18", "convnext_atto", "mobilenetv3_small_050", "efficientnet_lite0", "regnety_002"),
}


def make_network(package, name):
    make = torchvision.models.get_model if package == "torchvision" else timm.create_model
    return make(name, num_classes=5).eval()


@pytest.mark.parametrize(
    ("package", "name"), [(package, name) for package, names in NETWORKS.items() for name in names]
)
def test_converts_trains_and_merges(package, name):
    network, x = make_network(package, name), torch.randn(2, 3, 64, 64)
    kinds = [type(module) for module in network.modules()]
    with torch.no_grad():
        before = network(x)
    report = td.tensorize_(network, x, dropout=0.8)
    assert len(report.replacements) == 1
    assert sum(isinstance(module, td.TuckerRegression) for module in network.modules()) == 1
    with torch.no_grad():
        torch.testing.assert_close(network(x), before, rtol=1e-3, atol=1e-3 * float(before.abs().max()))

    optimizer = torch.optim.SGD(td.param_groups(network, lr=1e-3))
    nn.functional.mse_loss(network(x), torch.randn(2, 5)).backward()  # in eval mode: normalization keeps its statistics
    assert bool(next(network.parameters()).grad.any())
    optimizer.step()
    with torch.no_grad():
        trained = network(x)
        assert not torch.allclose(trained, before)
        td.merge_(network)
        torch.testing.assert_close(network(x), trained, rtol=1e-3, atol=1e-3 * float(trained.abs().max()))
    assert not any(isinstance(module, td.TuckerRegression) for module in network.modules())
    assert {type(module) for module in network.modules()} <= {*kinds, nn.Sequential, nn.Flatten, nn.Linear, nn.Identity}


@pytest.mark.parametrize("package", NETWORKS)
def test_a_converted_network_comes_back(package, tmp_path):
    network, x = make_network(package, "resnet18"), torch.randn(2, 3, 64, 64)
    plain = copy.deepcopy(network)
    td.tensorize_(network, x, factorization="cp", rank=8, dropout=0.8)
    td.save(network, tmp_path / "network.safetensors")
    with torch.no_grad():
        assert torch.equal(td.load(tmp_path / "network.safetensors", plain).eval()(x), network(x))
