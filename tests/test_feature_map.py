"""The last feature map of networks that are not ours: the right one is found, and our head on it computes the same."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

from surgery_models import BY_NAME, CASES, make, make_batch
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets import build_head
from tensor_dropout_lab.nets.feature_map import tap
from tensor_dropout_lab.nets.network import HeadedNetwork
from tensor_dropout_lab.nets.tapped import Place, TappedBackbone

OF_IMAGES = [case for case in CASES if len(case.input_shape) in (3, 4)]
BEHIND_A_FUNCTION = {  # tensorize_ averages first; a hook gets the map before the function
    "mobilenet-v2": (6, 4, 4),
    "densenet": (6, 6, 6),
    "mean-3d": (6, 4, 4, 4),
    **dict.fromkeys(("mean", "mean-of-rows", "avg_pool2d", "mean-then-convolution"), (6, 8, 8)),
    **dict.fromkeys(("view-to-channels", "indexed-pool", "pool-used-twice"), (6, 8, 8)),
    **dict.fromkeys(("layer-norm-between", "max-pool", "average-and-max"), (6, 8, 8)),
}
WITHOUT_POSITIONS = {"vit-class-token": (12, 1, 1), "vit-mean-token": (12, 1, 1)}
SAME_FUNCTION = [
    case.name
    for case in OF_IMAGES
    if case.name
    not in {"layer-norm-between", "max-pool", "average-and-max", "mobilenet-v3", "vgg", "vgg-no-bias", "mnist"}
]
"""Those that end in pooling (or flattening) and one linear layer."""


def tap_quietly(network, input_shape):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tap(network, input_shape, "net")


@pytest.mark.parametrize("case", OF_IMAGES, ids=[case.name for case in OF_IMAGES])
def test_the_map_before_the_head_is_found(case):
    network = make(case)
    backbone = tap_quietly(network, case.input_shape)
    expected = BEHIND_A_FUNCTION.get(case.name) or WITHOUT_POSITIONS.get(case.name) or case.features
    assert backbone.feature_shape == expected
    assert backbone(make_batch(case)).shape == (3, *expected)
    assert backbone.deterministic_features
    backbone.train()(make_batch(case)).sum().backward()
    assert [name for name, parameter in backbone.named_parameters() if parameter.grad is None] == []


@pytest.mark.parametrize("name", SAME_FUNCTION)
def test_our_linear_head_with_its_weights_is_the_network_as_it_was(name):
    case = BY_NAME[name]
    network, x = make(case), make_batch(case)
    before, layer = network(x), network.get_submodule(case.head)
    weight, bias = layer.weight.detach().flatten(1), layer.bias
    net = HeadedNetwork(tap_quietly(network, case.input_shape), case.input_shape)
    head = build_head("fc+flatten" if case.kind == "flatten" else "fc", net.feature_shape, len(weight))
    net.attach(head)
    with torch.no_grad():
        net.head.weight.copy_(weight)
        net.head.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)
    assert_close(net.eval()(x), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["densenet", "mobilenet-v2", "vgg", "mnist", "channels-last-map", "vit-class-token"])
def test_the_place_rebuilds_the_same_backbone_and_survives_a_copy(name):
    case = BY_NAME[name]
    backbone, x = tap_quietly(make(case), case.input_shape), make_batch(case)
    place = Place.from_json(backbone.place.as_json())
    assert place == backbone.place
    again = TappedBackbone(make(case), place).eval()
    assert torch.equal(again(x), backbone.eval()(x))
    copied = copy.deepcopy(backbone)
    assert torch.equal(copied(x), backbone(x))
    copied(x)
    assert backbone._map is None


def test_channels_last_features_are_turned():
    class Swin(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.norm, self.pool, self.fc = nn.Conv2d(3, 6, 3), nn.LayerNorm(6), Average(), nn.Linear(6, 5)

        def forward(self, x):
            return self.fc(self.pool(self.norm(self.body(x).permute(0, 2, 3, 1))))

    class Average(nn.Module):
        def forward(self, x):
            return x.mean((1, 2))

    network, x = Swin().eval(), torch.randn(2, 3, 8, 8)
    expected = network.norm(network.body(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    backbone = tap(network, (3, 8, 8), "swin")
    assert backbone.place.layout == "channels-last"
    assert_close(backbone(x), expected)


def test_a_large_input_is_searched_smaller_and_measured_in_full():
    seen = []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv3d(1, 4, 5, stride=4)
            self.pool, self.fc = nn.AdaptiveAvgPool3d(1), nn.Linear(4, 2)

        def forward(self, x):
            if not x.is_meta:
                seen.append(max(x.shape[2:]))
            return self.fc(self.pool(self.body(x)).flatten(1))

    assert tap(Net(), (1, 181, 100, 20), "net").feature_shape == (4, 45, 24, 4)
    assert max(seen) == 96


def test_a_map_of_one_position_on_the_smaller_input_is_searched_again_in_full():
    """As in Inception at 96 pixels."""
    layers = [nn.Conv2d(3, 6, 9, stride=9), nn.Conv2d(6, 6, 9, stride=9), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(6, 5))
    assert tap(network, (3, 224, 224), "net").feature_shape == (6, 2, 2)


def test_modules_that_the_network_needs_for_its_shapes_stay_untrained():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pool, self.fc = nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(6, 5)

        def forward(self, x):
            return self.fc(self.pool(self.body(x)).flatten(1)).view(-1, 5)

    backbone = tap(Net(), (3, 8, 8), "net")
    assert (backbone.place.left_out, backbone.place.removed) == (("fc",), False)
    assert isinstance(backbone.network.fc, nn.Linear)
    assert not any(parameter.requires_grad for parameter in backbone.network.fc.parameters())


def test_what_is_random_in_eval_is_known():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc = nn.Conv2d(3, 6, 3), nn.Linear(6, 5)

        def forward(self, x):
            return self.fc(F.dropout(self.body(x), 0.5).mean((2, 3)))

    assert not tap_quietly(Net(), (3, 8, 8)).deterministic_features


def test_a_network_that_returns_its_map_or_ends_in_a_convolution_for_classes():
    backbone = tap(nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU()), (3, 8, 8), "net")
    assert (backbone.feature_shape, backbone.place.left_out) == ((6, 6, 6), ())
    squeezed = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    backbone = tap(squeezed, (3, 8, 8), "squeezenet")
    assert (backbone.feature_shape, backbone.place.left_out) == ((6, 6, 6), ("2",))


def test_searching_changes_nothing_else():
    network = make(BY_NAME["densenet"]).train()
    network.features[0].weight.requires_grad_(False)
    state = torch.get_rng_state()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items() if "classifier" not in name}
    tap(network, (3, 8, 8), "net")
    assert torch.equal(torch.get_rng_state(), state)
    assert network.training
    assert not network.features[0].weight.requires_grad
    assert all(torch.equal(network.state_dict()[name], tensor) for name, tensor in before.items())


def test_what_a_network_remembers_of_a_run_does_not_stay():
    """As the attention biases of LeViT."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.fc, self.cache = nn.Conv2d(3, 6, 3), nn.Linear(6, 5), {}

        def forward(self, x):
            if not self.training:
                self.cache["weight"] = self.body.weight * 2
            return self.fc(self.body(x).mean((2, 3)))

    backbone = tap(Net(), (3, 8, 8), "net")
    assert backbone.network.cache == {}
    assert backbone.feature_shape == (6, 6, 6)


def test_lazy_networks_are_refused():
    network = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(), nn.LazyLinear(5))
    with pytest.raises(TensorDropoutError, match="net mine: the model has lazy layers that never ran"):
        tap(network, (3, 8, 8), "mine")


def test_no_positions_is_said():
    with pytest.warns(UserWarning, match="12 features without positions"):
        tap(make(BY_NAME["vit-class-token"]), (3, 8, 8), "vit")


class TwoHeads(nn.Module):
    def __init__(self, gate=1.0):
        super().__init__()
        self.gate = gate
        self.body, self.age, self.sex = nn.Conv2d(3, 6, 3), nn.Linear(6, 1), nn.Linear(6, 2)

    def forward(self, x):
        x = self.body(x)
        return self.age(x.mean((2, 3))), self.sex(self.gate * x.mean((2, 3)))


def test_two_heads_on_the_same_features_make_way_for_one():
    backbone = tap(TwoHeads(), (3, 8, 8), "net")
    assert (backbone.feature_shape, backbone.left_out) == ((6, 6, 6), ("age", "sex"))


class Pyramid(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 6, 3)

    def forward(self, x):
        return [self.body(x), x]


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (TwoHeads(2.0), r"net mine: it has 2 heads on different features \(age, sex\), one is expected"),
        (Pyramid(), "net mine: its head was not found"),
        (nn.Sequential(nn.Linear(7, 5)), r"net mine: it does not run on inputs of shape \(3, 8, 8\): RuntimeError"),
    ],
)
def test_mistakes_are_named(network, message):
    with pytest.raises(TensorDropoutError, match=message):
        tap(network, (3, 8, 8), "mine")
