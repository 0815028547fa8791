"""The smallest network: its shapes, its file, and what it refuses."""

from __future__ import annotations

import pytest
import torch

import tensor_dropout as td
from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout_lab.nets import HEADS, build_net
from tensor_dropout_lab.nets.digits_cnn import DigitsCNN


@pytest.mark.parametrize(("shape", "features"), [((1, 8, 8), (32, 4, 4)), ((3, 9, 7), (32, 5, 4))])
def test_the_declared_shape_of_the_features_is_the_real_one(shape, features):
    backbone = DigitsCNN(shape)
    assert backbone.feature_shape == features
    assert backbone(torch.randn(2, *shape)).shape == (2, *features)


@pytest.mark.parametrize("head", HEADS)
def test_it_takes_every_head(head):
    net = build_net("digits-cnn", outputs=10, input_shape=(1, 8, 8), head=head)
    net(torch.randn(4, 1, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in net.parameters())
    assert count_parameters(net) - count_parameters(net.head) == 7_184


def test_a_saved_network_loads(tmp_path):
    net = build_net("digits-cnn", outputs=10, input_shape=(1, 8, 8), head="rtrl-tucker", rank=(16, 3, 3, 10)).eval()
    td.save(net, tmp_path / "net.safetensors")
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(td.load(tmp_path / "net.safetensors").eval()(x), net(x))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"input_shape": (1, 8, 8, 8)}, r"it takes pictures \(channels, height, width\), got \(1, 8, 8, 8\)"),
        ({"input_shape": (1, 8, 8), "stem": "small"}, "digits-cnn: it has no options, got stem"),
    ],
)
def test_what_it_refuses(settings, message):
    with pytest.raises(td.TensorDropoutError, match=message):
        build_net("digits-cnn", outputs=10, **settings)
