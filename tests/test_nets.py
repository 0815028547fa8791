"""Networks and heads by name: torchvision's keys, feature shapes, every head, and weight dropout."""

import copy
import json
from inspect import signature

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.testing import assert_close

import tensor_dropout as td
from tensor_dropout_lab.nets import HEADS, WeightDropoutTucker, build_head, build_net, load_backbone
from tensor_dropout_lab.nets.families import FAMILIES
from tensor_dropout_lab.nets.head_table import DEFAULTS
from tensor_dropout_lab.nets.resnet import DESIGNS, ResNet

IMAGE, VOLUME = (1, 8, 8), (1, 16, 20, 16)
PUBLISHED = {  # torchvision: parameters, entries of the state dict
    "resnet18": (11_689_512, 122),
    "resnet34": (21_797_672, 218),
    "resnet50": (25_557_032, 320),
    "resnet101": (44_549_160, 626),
}
RANDOM = [head for head in HEADS if head.startswith("rtrl") or "dropout" in head]
TENSOR = [head for head in HEADS if "trl" in head]

every_head = pytest.mark.parametrize("head", HEADS)
every_input = pytest.mark.parametrize("input_shape", [IMAGE, VOLUME], ids=["2d", "3d"])
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# torchvision's convolutions, written out: name, filters, channels, kernel.
CONVOLUTIONS = {
    "resnet18": """
        conv1 64 3 7
        layer1.0.conv1 64 64 3           layer1.0.conv2 64 64 3
        layer1.1.conv1 64 64 3           layer1.1.conv2 64 64 3
        layer2.0.conv1 128 64 3          layer2.0.conv2 128 128 3
        layer2.0.downsample.0 128 64 1
        layer2.1.conv1 128 128 3         layer2.1.conv2 128 128 3
        layer3.0.conv1 256 128 3         layer3.0.conv2 256 256 3
        layer3.0.downsample.0 256 128 1
        layer3.1.conv1 256 256 3         layer3.1.conv2 256 256 3
        layer4.0.conv1 512 256 3         layer4.0.conv2 512 512 3
        layer4.0.downsample.0 512 256 1
        layer4.1.conv1 512 512 3         layer4.1.conv2 512 512 3
    """,
    "resnet50": """
        conv1 64 3 7
        layer1.0.conv1 64 64 1           layer1.0.conv2 64 64 3           layer1.0.conv3 256 64 1
        layer1.0.downsample.0 256 64 1
        layer1.1.conv1 64 256 1          layer1.1.conv2 64 64 3           layer1.1.conv3 256 64 1
        layer1.2.conv1 64 256 1          layer1.2.conv2 64 64 3           layer1.2.conv3 256 64 1
        layer2.0.conv1 128 256 1         layer2.0.conv2 128 128 3         layer2.0.conv3 512 128 1
        layer2.0.downsample.0 512 256 1
        layer2.1.conv1 128 512 1         layer2.1.conv2 128 128 3         layer2.1.conv3 512 128 1
        layer2.2.conv1 128 512 1         layer2.2.conv2 128 128 3         layer2.2.conv3 512 128 1
        layer2.3.conv1 128 512 1         layer2.3.conv2 128 128 3         layer2.3.conv3 512 128 1
        layer3.0.conv1 256 512 1         layer3.0.conv2 256 256 3         layer3.0.conv3 1024 256 1
        layer3.0.downsample.0 1024 512 1
        layer3.1.conv1 256 1024 1        layer3.1.conv2 256 256 3         layer3.1.conv3 1024 256 1
        layer3.2.conv1 256 1024 1        layer3.2.conv2 256 256 3         layer3.2.conv3 1024 256 1
        layer3.3.conv1 256 1024 1        layer3.3.conv2 256 256 3         layer3.3.conv3 1024 256 1
        layer3.4.conv1 256 1024 1        layer3.4.conv2 256 256 3         layer3.4.conv3 1024 256 1
        layer3.5.conv1 256 1024 1        layer3.5.conv2 256 256 3         layer3.5.conv3 1024 256 1
        layer4.0.conv1 512 1024 1        layer4.0.conv2 512 512 3         layer4.0.conv3 2048 512 1
        layer4.0.downsample.0 2048 1024 1
        layer4.1.conv1 512 2048 1        layer4.1.conv2 512 512 3         layer4.1.conv3 2048 512 1
        layer4.2.conv1 512 2048 1        layer4.2.conv2 512 512 3         layer4.2.conv3 2048 512 1
    """,
}


def list_published(name):
    """Every key of torchvision's state dict with its shape."""
    words = CONVOLUTIONS[name].split()
    shapes = {}
    for key, *numbers in zip(*(words[k::4] for k in range(4)), strict=True):
        filters, channels, kernel = map(int, numbers)
        shapes[f"{key}.weight"] = (filters, channels, kernel, kernel)
        norm = key.replace("conv", "bn").replace("downsample.0", "downsample.1")
        for entry in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{norm}.{entry}"] = (filters,)
        shapes[f"{norm}.num_batches_tracked"] = ()
    features = {"resnet18": 512, "resnet50": 2048}[name]
    return {**shapes, "fc.weight": (1000, features), "fc.bias": (1000,)}


def build_on_meta(name, **options):
    with torch.device("meta"):
        return build_net(name, **{"outputs": 1000, "input_shape": (3, 224, 224), **options})


def build_mini(head="fc", input_shape=IMAGE, outputs=3, **options):
    return build_net("resnet-mini", outputs=outputs, input_shape=input_shape, head=head, **options)


def make_batch(net, size=4):
    return torch.randn(size, *net.input_shape)


# Backbones.


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_keys_and_shapes_are_torchvisions(name):
    found = {key: tuple(value.shape) for key, value in build_on_meta(name).state_dict().items()}
    assert found == list_published(name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_torchvisions(name):
    net = build_on_meta(name)
    assert (sum(map(torch.numel, net.parameters())), len(net.state_dict())) == PUBLISHED[name]
    assert isinstance(net.fc, nn.Linear)


@pytest.mark.parametrize("name", PUBLISHED)
def test_torchvision_agrees(name):
    models = pytest.importorskip("torchvision.models", reason="compares with torchvision, which is not installed")
    theirs = getattr(models, name)(num_classes=7).eval()
    ours = build_net(name, outputs=7, input_shape=(3, 96, 96), stem="large").eval()
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 96, 96)
    expected = theirs(x)
    assert_close(ours(x), expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_the_stride_of_a_bottleneck_is_in_its_middle_convolution():
    block = build_on_meta("resnet50").layer2[0]
    assert [conv.stride for conv in (block.conv1, block.conv2, block.conv3)] == [(1, 1), (2, 2), (1, 1)]


def test_convolutions_start_as_torchvisions():
    weight = ResNet(DESIGNS["resnet18"], (3, 32, 32)).layer4[1].conv2.weight  # normal, variance 2 / fan out
    assert_close(weight.std().item(), (2 / (512 * 9)) ** 0.5, rtol=0.01, atol=0)


@pytest.mark.parametrize(
    ("name", "input_shape", "stem", "expected"),
    [
        ("resnet18", (3, 32, 32), "small", (512, 4, 4)),
        ("resnet50", (3, 64, 64), "small", (2048, 8, 8)),
        ("resnet18", (3, 65, 64), "large", (512, 3, 2)),
        ("resnet101", (3, 224, 224), "large", (2048, 7, 7)),
        ("resnet34", (3, 225, 193), "large", (512, 8, 7)),
        ("resnet18", (1, 182, 218, 182), "large", (512, 6, 7, 6)),
        ("resnet-mini", (1, 8, 8), "small", (64, 2, 2)),
        ("resnet-mini", (3, 32, 32), "small", (64, 4, 4)),
        ("resnet-mini", (1, 9, 11, 15), "small", (64, 3, 3, 4)),
        ("resnet-mini", (1, 32, 40, 32), "small", (64, 4, 5, 4)),
        ("resnet-mini", (1, 182, 218, 182), "small", (64, 23, 28, 23)),
    ],
)
def test_declared_feature_shape_is_the_real_one(name, input_shape, stem, expected):
    net = build_on_meta(name, input_shape=input_shape)
    assert (net.stem, net.feature_shape) == (stem, expected)
    features = net.eval().forward_features(torch.empty(2, *input_shape, device="meta"))
    assert tuple(features.shape) == (2, *expected)


@pytest.mark.parametrize(
    ("name", "input_shape"), [*((name, IMAGE) for name in DESIGNS), ("resnet-mini", VOLUME), ("resnet50", (1, 8, 9, 8))]
)
def test_every_net_runs_on_real_numbers(name, input_shape):
    net = build_net(name, outputs=2, input_shape=input_shape, head="rtrl-cp", rank=2)
    x = make_batch(net, 2)
    net(x).square().sum().backward()
    assert tuple(net.forward_features(x).shape[1:]) == net.feature_shape
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


def test_the_same_seed_gives_the_same_backbone_under_every_head():
    nets = []
    for head in HEADS:
        torch.manual_seed(3)
        nets.append(build_mini(head))
    assert all(torch.equal(net.layer3[0].conv2.weight, nets[0].layer3[0].conv2.weight) for net in nets)


# Heads.


@every_head
@every_input
def test_every_head_trains_and_evaluates(head, input_shape):
    net = build_mini(head, input_shape)
    x = make_batch(net)
    y = net(x)
    y.square().sum().backward()
    assert y.shape == (4, 3)
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    assert len(net.fc.state_dict()) == len([key for key in net.state_dict() if key.startswith("fc.")])

    net.eval()
    assert torch.equal(net(x), net(x))
    assert_close(net(x), net.fc(net.avgpool(net.forward_features(x))), rtol=0, atol=0)

    net.fc.train(), net.avgpool.train()  # batch norm at rest: what differs now is the head
    assert any(not torch.equal(net(x), net(x)) for _ in range(20)) == (head in RANDOM)


@pytest.mark.parametrize("head", TENSOR)
def test_a_tensor_head_is_the_last_layer_itself(head):
    net = build_mini(head)
    assert isinstance(net.fc, td.TensorRegression)
    assert isinstance(net.avgpool, nn.Identity)
    assert net.fc.input_shape == net.feature_shape


def test_exact_prediction_and_loss_see_the_head():
    net = build_mini("rtrl-cp")
    x = make_batch(net)
    td.expected_mse(net, x, torch.randn(4, 3)).backward()
    assert net.conv1.weight.grad.abs().sum() > 0
    assert (td.predict(net, x, mode="exact", n_samples=4).std > 0).all()


def test_saved_networks_load(tmp_path):
    for head in TENSOR:
        net, other = build_mini(head).eval(), build_mini(head).eval()
        td.save(net, tmp_path / "net.safetensors")
        td.load(tmp_path / "net.safetensors", model=other)
        x = make_batch(net)
        assert torch.equal(net(x), other(x))


@pytest.mark.parametrize(
    ("head", "shape", "outputs", "rank"),
    [
        ("trl-tucker", (64, 4, 4), 10, (32, 4, 4, 10)),
        ("trl-tucker+weight-dropout", (64, 4, 4), 10, (32, 4, 4, 10)),
        ("rtrl-tucker", (64, 4, 5, 4), 1, (32, 4, 5, 4, 1)),
        ("rtrl-cp", (64, 4, 4), 10, 32),
        ("rtrl-cp", (64, 2, 2), 1, 4),
        ("trl-tt", (64, 4, 4), 10, (32, 32, 10)),
        ("rtrl-tt", (64, 2, 2), 1, (4, 2, 1)),
        ("trl-cp", (1, 4, 4), 1, 1),
    ],
)
def test_the_default_rank_is_half_the_channels(head, shape, outputs, rank):
    assert build_head(head, shape, outputs).rank == rank


@every_head
def test_settings_reach_the_head(head):
    assert build_head(head, (8, 2, 2), 3).training
    if head in TENSOR:
        layer = build_head(head, (8, 2, 2), 3, rank=2, init="normal")
        assert layer.config()["rank"] == [2] * len(layer.config()["rank"])
        assert layer.init == "normal"
    if head.startswith("rtrl"):
        layer = build_head(head, (8, 2, 2), 3, theta=0.6, law="nested", per_sample=True, scaling="paper", min_rank=1)
        found = layer.dropout.config()
        assert found.pop("theta") == pytest.approx(0.6)
        assert found == {
            "law": "nested",
            "modes": "outer" if head == "rtrl-tucker" else "all",
            "per_sample": True,
            "scaling": "paper",
            "min_rank": 1,
            "at_test": "mean",
        }
        assert build_head(head, (8, 2, 2), 3).dropout.theta.item() == pytest.approx(0.9)
    elif head in TENSOR:
        assert build_head(head, (8, 2, 2), 3).dropout is None
    if "weight-dropout" in head:
        assert (build_head(head, (8, 2, 2), 3).theta, build_head(head, (8, 2, 2), 3, theta=0.6).theta) == (0.9, 0.6)


def test_defaults_are_the_same_everywhere():
    for function in (build_head, build_net):
        found = {name: entry.default for name, entry in signature(function).parameters.items() if name in DEFAULTS}
        assert found == DEFAULTS


def test_modes_reach_the_head():
    assert build_mini("rtrl-tucker", modes=(0, 3)).fc.dropout.modes == (0, 3)
    assert build_mini("rtrl-tucker", modes="all").fc.dropped_axes == (0, 1, 2, 3)
    assert build_mini("rtrl-tucker").fc.dropped_axes == (0, 3)
    assert build_head("rtrl-tucker", (8, 2, 2, 2), 1).dropped_axes == (0,)  # one output has nothing to drop


@every_head
def test_a_file_of_version_0_1_0_is_read(head, tmp_path):
    """It names no builder and no options, and early ones have the settings of all heads, which a head would refuse."""
    net, path = build_mini(head).eval(), tmp_path / "net.safetensors"
    td.save(net, path)
    with safe_open(path, "pt") as file:
        config = json.loads(file.metadata()["tensor_dropout"])
    assert "modes" not in config["net"]
    assert config["net"].pop("builder") == "lab"
    config["net"] |= config["net"].pop("options")
    assert config["net"]["stem"] == "small"
    config["net"] |= {"law": "bernoulli", "modes": "all", "per_sample": False, "min_rank": 0}
    save_file(load_file(path), path, metadata={"tensor_dropout": json.dumps(config)})
    x = make_batch(net)
    assert torch.equal(td.load(path).eval()(x), net(x))


def test_fc_with_dropout_has_the_keys_of_fc_and_its_drop_rate():
    plain, dropped = build_mini("fc").eval(), build_mini("fc+dropout", drop_rate=0.3).eval()
    dropped.load_state_dict(plain.state_dict())
    x = make_batch(plain)
    assert torch.equal(plain(x), dropped(x))
    dropped.avgpool.train()
    zeros = (dropped.avgpool(torch.ones(500, *dropped.feature_shape)) == 0).float().mean().item()
    assert zeros == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / 32_000) ** 0.5)


# Weight dropout.


def make_weight_dropout(theta=0.7):
    layer = WeightDropoutTucker((6, 3, 2), 4, rank=(4, 3, 2, 3), theta=theta, init="normal").double()
    return layer, torch.randn(5, 6, 3, 2, dtype=torch.float64)


def test_weight_dropout_at_rest_is_the_tucker_layer():
    layer, x = make_weight_dropout()
    plain = td.TuckerRegression((6, 3, 2), 4, rank=(4, 3, 2, 3)).double()
    assert list(layer.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain(x))


def test_weight_dropout_at_another_rank_has_the_same_settings():
    layer, _ = make_weight_dropout()
    short = layer.with_rank((2, 2, 2, 2))
    assert short.config() == {**layer.config(), "rank": [2, 2, 2, 2]}


def test_weight_dropout_with_theta_one_is_the_tucker_layer():
    layer, x = make_weight_dropout(theta=1.0)
    assert_close(layer.train()(x), layer.eval()(x))


def test_weight_dropout_zeroes_single_entries_of_the_weight():
    layer, _ = make_weight_dropout()
    units = torch.eye(36, dtype=torch.float64).reshape(36, 6, 3, 2)
    weight = layer.dense_weight().reshape(36, 4)
    draws = torch.stack([layer(units) - layer.bias for _ in range(200)]).detach()  # rows of W ∘ M / θ
    kept = draws.abs() > 1e-12
    assert kept.double().mean().item() == pytest.approx(0.7, abs=5 * (0.21 / kept.numel()) ** 0.5)
    assert_close(draws[kept], (weight / 0.7).expand_as(draws)[kept])


def test_weight_dropout_has_the_mean_of_the_tucker_layer_and_the_variance_of_its_entries():
    layer, x = make_weight_dropout()
    n = 1500
    with torch.no_grad():
        draws = torch.stack([layer(x) for _ in range(n)])
        mean = layer.eval()(x)
        variance = torch.einsum("bchw,chwo->bo", x.square(), layer.dense_weight().square()) * 0.3 / 0.7
    assert ((draws.mean(0) - mean).abs() < 5 * (variance / n).sqrt()).all()
    assert_close(draws.var(0), variance, rtol=0.2, atol=0)


def test_weight_dropout_says_its_theta_and_refuses_moments():
    layer, x = make_weight_dropout()
    assert "theta=0.7" in repr(layer)
    assert layer.config()["theta"] == 0.7
    for moments in (layer.moments, layer.exact_moments):
        with pytest.raises(td.TensorDropoutError, match="rtrl-tucker"):
            moments(x)
    with pytest.raises(td.TensorDropoutError, match="rtrl-tucker"):
        td.expected_mse(layer, x, torch.zeros(5, 4, dtype=torch.float64))


# Mistakes.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "resnet81"}, "did you mean 'resnet18'.*resnet-mini, resnet18, resnet34, resnet50, resnet101"),
        ({"name": "mini"}, "did you mean 'resnet-mini'"),
        ({"head": "rtrl-tuker"}, "did you mean 'rtrl-tucker'.*fc, .*trl-tucker.weight-dropout"),
        ({"head": None}, "unknown head None"),
        ({"stem": "huge"}, "stem is 'small', 'large' or None, got 'huge'"),
        ({"stem": "large"}, "resnet-mini has the small stem only"),
        ({"input_shape": (8, 8)}, "input_shape is .channels, height, width."),
        ({"input_shape": (1, 8, 8, 8, 8)}, "input_shape is .channels, height, width."),
        ({"input_shape": (1, 8, 0)}, "input_shape is .channels, height, width."),
        ({"input_shape": 8}, "input_shape is .channels, height, width."),
        ({"input_shape": (1, 7, 8)}, "divides each size by 4 and needs at least 8, got .7, 8."),
        ({"name": "resnet18", "input_shape": (1, 4, 4)}, "divides each size by 8 and needs at least 8"),
        ({"name": "resnet18", "input_shape": (1, 16, 16), "stem": "large"}, "at least 32.*stem='small'"),
        ({"outputs": 0}, "outputs is a positive integer, got 0"),
        ({"outputs": (2, 3)}, "outputs is a positive integer"),
        ({"head": "trl-tucker", "rank": (65, 2, 2, 3)}, "rank 65 at position 0"),
        ({"head": "trl-cp", "rank": 13}, "rank is between 1 and 12"),
        ({"head": "rtrl-tt", "rank": 1.5}, "fraction"),
        ({"head": "rtrl-cp", "theta": 0.0}, "KEEP probability"),
        ({"head": "trl-tucker+weight-dropout", "theta": 1.2}, "KEEP probability"),
        ({"head": "rtrl-cp", "modes": (0,)}, "modes='all'"),
        ({"head": "fc+dropout", "drop_rate": 1.0}, "drop_rate is the DROP probability"),
        ({"head": "fc+dropout", "theta": 0.8}, "takes no theta, got 0.8; give drop_rate, which is 1 - theta"),
        ({"head": "fc", "theta": 0.8}, "'fc' takes no theta, got 0.8; that is for rtrl-tucker"),
        ({"head": "trl-cp", "theta": 0.8}, "'trl-cp' takes no theta"),
        ({"head": "fc", "rank": 3}, "'fc' takes no rank, got 3; that is for fc.low-rank, trl-tucker"),
        ({"head": "rtrl-cp", "drop_rate": 0.2}, "takes no drop_rate, got 0.2; give theta"),
        ({"head": "trl-tucker+weight-dropout", "law": "nested"}, "takes no law, got 'nested'; that is for rtrl"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(td.TensorDropoutError, match=message):
        build_net(**{"name": "resnet-mini", "outputs": 3, "input_shape": IMAGE, **options})


def test_features_without_two_or_three_sizes_are_refused():
    for shape in ((8,), (8, 2), (8, 2, 2, 2, 2)):
        with pytest.raises(td.TensorDropoutError, match="with 2 or 3 sizes"):
            build_head("fc", shape, 3)


# Weights from elsewhere.


def test_load_backbone_fills_all_but_the_head():
    trained = build_mini("fc", outputs=10)
    trained(make_batch(trained))  # moves the running statistics
    net = build_mini("rtrl-tucker")
    head = copy.deepcopy(net.fc.state_dict())
    assert load_backbone(net, trained.state_dict()) is None
    assert_close(dict(net.fc.state_dict()), dict(head), rtol=0, atol=0)
    x = make_batch(net)
    assert torch.equal(net.eval().forward_features(x), trained.eval().forward_features(x))


def test_load_backbone_takes_old_files_without_counters():
    trained, net = build_mini(), build_mini("trl-cp")
    weights = {key: value for key, value in trained.state_dict().items() if "num_batches" not in key}
    load_backbone(net, weights)
    assert torch.equal(net.layer1[0].conv1.weight, trained.layer1[0].conv1.weight)


def test_load_backbone_refuses_what_does_not_fit_and_loads_nothing():
    net = build_mini("trl-cp")
    before = copy.deepcopy(net.state_dict())
    given = build_mini(input_shape=(3, 8, 8)).state_dict()
    del given["bn1.weight"]
    given["layer9.weight"] = torch.zeros(1)
    message = (
        r"missing: bn1\.weight; unknown: layer9\.weight; of another shape: conv1\.weight \(16, 3, 3, 3\) instead of "
        r"\(16, 1, 3, 3\)"
    )
    with pytest.raises(td.TensorDropoutError, match=message):
        load_backbone(net, given)
    with pytest.raises(td.TensorDropoutError, match=r"unknown: state_dict$"):
        load_backbone(net, {**before, "state_dict": {}})
    with pytest.raises(td.TensorDropoutError, match=r"missing: conv1\.weight, bn1\.weight, .* and 39 more"):
        load_backbone(net, {})
    assert_close(dict(net.state_dict()), dict(before), rtol=0, atol=0)


# Compilers, layouts and precision.


@pytest.mark.parametrize("head", ["rtrl-tucker", "trl-tucker+weight-dropout"])
def test_whole_network_compiles_to_one_graph(head):
    torch._dynamo.reset()
    net = build_mini(head)
    compiled = torch.compile(copy.deepcopy(net), backend="aot_eager", fullgraph=True)
    x = make_batch(net)
    for model in (net, compiled):
        torch.manual_seed(5)
        model(x).square().sum().backward()
    for expected, found in zip(net.parameters(), compiled.parameters(), strict=True):
        assert_close(found.grad, expected.grad, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()


@every_head
@every_input
def test_channels_last_changes_nothing(head, input_shape):
    net = build_mini(head, input_shape).eval()
    layout = torch.channels_last if len(input_shape) == 3 else torch.channels_last_3d
    x = make_batch(net)
    assert_close(copy.deepcopy(net).to(memory_format=layout)(x.to(memory_format=layout)), net(x))


@every_head
def test_every_head_runs_under_bf16_autocast(head):
    net = build_mini(head)
    x = make_batch(net)
    with torch.autocast("cpu", torch.bfloat16):
        loss = net(x).float().square().sum()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        low = net.eval()(x)
    assert_close(low.float(), net(x), rtol=0.1, atol=0.1)


@needs_cuda
@every_head
@every_input
def test_cuda_graphs_replay_training_with_fresh_masks(head, input_shape):
    net = build_mini(head, input_shape).cuda()
    x = make_batch(net).cuda()

    def step():
        net.zero_grad(set_to_none=False)
        y = net(x)
        y.square().sum().backward()
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    outputs = []
    for _ in range(20):
        graph.replay()
        outputs.append(y.detach().clone())
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())
    assert any((output - outputs[0]).abs().max() > 1e-3 for output in outputs) == (head in RANDOM)


@needs_cuda
@every_input
def test_cuda_agrees_with_the_cpu_in_channels_last_bf16_and_inductor(input_shape):
    torch._dynamo.reset()
    net = build_mini("rtrl-tucker", input_shape).eval()
    x = make_batch(net)
    layout = torch.channels_last if len(input_shape) == 3 else torch.channels_last_3d
    gpu = copy.deepcopy(net).cuda().to(memory_format=layout)
    x_gpu = x.cuda().to(memory_format=layout)
    expected = net(x)
    assert_close(gpu(x_gpu).cpu(), expected, rtol=1e-2, atol=1e-2)
    compiled = torch.compile(gpu, fullgraph=True)
    with torch.autocast("cuda", torch.bfloat16):
        assert_close(compiled(x_gpu).float().cpu(), expected, rtol=0.1, atol=0.1)
        compiled.train()
        compiled(x_gpu).float().square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in gpu.parameters())
    torch._dynamo.reset()


def test_names_are_listed():
    assert FAMILIES["resnet"].names == tuple(DESIGNS)
    assert set(HEADS) == {
        "fc",
        "fc+dropout",
        "fc+low-rank",
        "fc+flatten",
        "trl-tucker",
        "trl-cp",
        "trl-tt",
        "trl-ring",
        "rtrl-tucker",
        "rtrl-cp",
        "rtrl-tt",
        "rtrl-ring",
        "trl-tucker+weight-dropout",
    }
