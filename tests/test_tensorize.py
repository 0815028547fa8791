"""``tensorize_``: the same function at full rank, the ranks that were asked for, and what it refuses."""

from __future__ import annotations

import copy
import importlib
import json
import warnings
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import tensor_dropout as td
from surgery_models import (
    BY_NAME,
    CASES,
    IMAGE,
    TOLERANCES,
    Backbone,
    Mobile,
    Residual,
    Snapshot,
    SqueezeDense,
    SqueezePointwise,
    as_numpy,
    count,
    dense,
    every_factorization,
    flat,
    make,
    make_batch,
    plain,
    refused,
    relative_change,
)
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.surgery.head import TensorHead

LAYERS = {name: format.layer for name, format in FORMATS.items()}


def image(batch=3, dtype=torch.float32, shape=IMAGE, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)


def get_linear(model, name):
    return model.get_submodule(name)


# Exactness at full rank.


# Each case in every other factorization, once in each dtype: weights are decomposed in float64 whatever the network's.
EXACT = [
    pytest.param(case, factorization, list(TOLERANCES)[(k + n) // 2 % 2], id=f"{case.name}-{factorization}")
    for (k, case), (n, factorization) in product(enumerate(CASES), enumerate(LAYERS))
    if (k + n) % 2 == 0
]


@pytest.mark.parametrize(("case", "factorization", "dtype"), EXACT)
def test_full_rank_does_not_change_the_function(case, factorization, dtype):
    model = make(case, dtype)
    x, other = make_batch(case, dtype=dtype), make_batch(case, batch=5, dtype=dtype, seed=2)
    old = model.get_submodule(case.head)
    with torch.no_grad():
        before, elsewhere = model(x), model(other)
        report = td.tensorize_(model, x, factorization=factorization)
        after = model(x)
        assert relative_change(after, before) <= TOLERANCES[dtype]
        assert relative_change(model(other), elsewhere) <= TOLERANCES[dtype]
    (replaced,) = report.replacements
    assert (replaced.name, replaced.kind, replaced.input_shape) == (case.head, case.kind, case.features)
    assert replaced.output_shape == (old.weight.shape[0],)
    assert report.output_difference == relative_change(after, before)
    assert replaced.relative_error <= {torch.float32: 1e-6, torch.float64: 1e-13}[dtype]
    assert (
        any(case.note in note for note in replaced.notes) if case.note else not replaced.notes or case.kind != "flatten"
    )
    head = model.get_submodule(case.head)
    assert isinstance(head, TensorHead)
    assert type(head.regression) is LAYERS[factorization]
    assert head.regression.bias is old.bias  # the same parameter
    assert {p.dtype for p in head.parameters()} == {dtype}
    assert not any(module.training for module in model.modules())


def test_the_report_notes_nothing_where_nothing_is_to_be_noted():
    for name in ("flatten", "mlp", "vit-class-token"):
        case = BY_NAME[name]
        report = td.tensorize_(make(case), make_batch(case))
        assert report.replacements[0].notes == ()


@every_factorization
def test_a_head_of_zeros_and_one_of_rank_one(factorization):
    for weight in (torch.zeros(5, 64), torch.outer(torch.randn(5).double(), torch.randn(64).double())):
        model = flat().eval().double()
        with torch.no_grad():
            model[3].weight.copy_(weight)
            x = image(dtype=torch.float64)
            before = model(x)
            report = td.tensorize_(model, x, factorization=factorization)
            assert_close(model(x), before)
        assert report.replacements[0].relative_error <= 1e-6
        limit = {"tucker": (4, 4, 4, 1), "cp": (16,), "tt": (4, 4, 1), "ring": (1, 4, 4, 1)}[factorization]
        assert all(most >= R for R, most in zip(report.replacements[0].rank, limit, strict=True))


@pytest.mark.parametrize(
    "name", ["resnet-1d", "resnet-2d", "resnet-3d", "AvgPool2d", "flattening-pool", "efficientnet"]
)
def test_other_input_sizes_still_run(name):
    case = BY_NAME[name]
    model = make(case)
    td.tensorize_(model, make_batch(case))
    larger = torch.randn(2, case.input_shape[0], *(size + 5 for size in case.input_shape[1:]))
    assert model(larger).shape == (2, 5)


@pytest.mark.parametrize(
    "name", ["pool-then-convolution", "convolution-then-pool", "convolution-then-mean", "view-to-batch"]
)
def test_a_map_of_a_multiple_of_the_size_gives_what_it_gave(name):
    case = BY_NAME[name]
    model = make(case, torch.float64)
    larger = torch.randn(2, 3, 16, 24, dtype=torch.float64)
    with torch.no_grad():
        before = model(larger)
        td.tensorize_(model, make_batch(case, dtype=torch.float64))
        assert_close(model(larger), before)


def test_pooling_is_widened_and_is_never_the_identity():
    model = make(BY_NAME["resnet-2d"])
    old = model.avgpool
    report = td.tensorize_(model, make_batch(BY_NAME["resnet-2d"]))
    assert type(model.avgpool) is nn.AdaptiveAvgPool2d
    assert model.avgpool.output_size == (4, 4)
    assert report.modules["avgpool"] == (old, model.avgpool)
    assert report.modules["fc"][1] is model.fc


def test_a_module_under_two_names_is_exchanged_under_both():
    model = make(BY_NAME["resnet-2d"])
    model.classifier = model.fc
    report = td.tensorize_(model, image())
    assert model.classifier is model.fc
    assert isinstance(model.fc, TensorHead)
    assert set(report.modules) == {"fc", "classifier", "avgpool"}
    assert report.parameters_after == count(model)


# Real libraries.

MONAI = {
    "resnet18-3d": (
        lambda nets: nets.resnet18(spatial_dims=3, n_input_channels=1, num_classes=3, conv1_t_stride=1),
        (1, 24, 20, 24),
        ("fc", "pool"),
    ),
    "resnet18-2d": (
        lambda nets: nets.resnet18(spatial_dims=2, n_input_channels=1, num_classes=3),
        (1, 64, 64),
        ("fc", "pool"),
    ),
    "DenseNet121": (
        lambda nets: nets.DenseNet121(spatial_dims=2, in_channels=1, out_channels=3),
        (1, 64, 64),
        ("class_layers.out", "pool"),
    ),
    "DenseNet-3d": (
        lambda nets: nets.DenseNet(3, 1, 3, init_features=8, growth_rate=4, block_config=(2, 2)),
        (1, 16, 16, 16),
        ("class_layers.out", "pool"),
    ),
    "EfficientNetBN": (
        lambda nets: nets.EfficientNetBN("efficientnet-b0", pretrained=False, in_channels=1, num_classes=3),
        (1, 64, 64),
        ("_fc", "pool"),
    ),
    "SEResNet50": (
        lambda nets: nets.SEResNet50(spatial_dims=2, in_channels=1, num_classes=3),
        (1, 64, 64),
        ("last_linear", "pool"),
    ),
    "Classifier": (
        lambda nets: nets.Classifier((1, 16, 16), 3, (4, 8), (2, 2)),
        (1, 16, 16),
        ("final.1", "flatten"),
    ),
    "ViT": (
        lambda nets: nets.ViT(
            1, (16, 16), (8, 8), hidden_size=24, mlp_dim=32, num_layers=2, num_heads=3, classification=True,
            num_classes=3, spatial_dims=2,
        ),
        (1, 16, 16),
        ("classification_head.0", "features"),
    ),
}  # fmt: skip


def check_exact(model, x, dtype, factorization="tucker"):
    """Convert at full rank and compare; the replacement."""
    model, x = model.to(dtype).eval(), x.to(dtype)
    with torch.no_grad():
        before = model(x)
        before = before[0] if isinstance(before, tuple | list) else before
        report = td.tensorize_(model, x, factorization=factorization)
        after = model(x)
        after = after[0] if isinstance(after, tuple | list) else after
    assert relative_change(after, before) <= TOLERANCES[dtype]
    (replaced,) = report.replacements
    return replaced


@pytest.mark.parametrize("name", MONAI)
def test_monai_networks_convert_exactly(name):
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    from monai.utils import OptionalImportError

    build, shape, expected = MONAI[name]
    try:
        model = build(nets)
    except OptionalImportError as error:
        pytest.skip(f"MONAI lacks an optional package of its own: {str(error).splitlines()[0]}")
    replaced = check_exact(model, torch.randn(2, *shape), torch.float32)
    assert (replaced.name, replaced.kind) == expected


@pytest.mark.parametrize("factorization", ["cp", "tt", "ring"])
def test_monai_resnet_converts_in_every_format(factorization):
    nets = pytest.importorskip("monai.networks.nets", reason="MONAI is not installed")
    build, shape, _ = MONAI["resnet18-3d"]
    check_exact(build(nets), torch.randn(2, *shape), torch.float32, factorization)


def import_or_skip(name):
    """A package that may be missing, or present and broken."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, RuntimeError, AttributeError, OSError) as error:
            pytest.skip(f"{name} does not import here: {error}")


def small_vgg(models):
    """vgg11 with a classifier of a size that a test can decompose."""
    model = models.vgg11(weights=None, num_classes=5)
    model.avgpool = nn.AdaptiveAvgPool2d((2, 2))
    model.classifier[0], model.classifier[3] = nn.Linear(512 * 4, 48), nn.Linear(48, 48)
    model.classifier[6] = nn.Linear(48, 5)
    return model


def small_vit(models):
    model = models.VisionTransformer(32, 16, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=48, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # torchvision starts it at zero
    return model


TORCHVISION = {
    "resnet18": (lambda models: models.resnet18(weights=None, num_classes=5), "fc"),
    "resnet50": (lambda models: models.resnet50(weights=None, num_classes=5), "fc"),
    "vgg11": (small_vgg, "classifier.0"),
    "mobilenet_v2": (lambda models: models.mobilenet_v2(weights=None, num_classes=5), "classifier.1"),
    "mobilenet_v3_small": (lambda models: models.mobilenet_v3_small(weights=None, num_classes=5), "classifier.0"),
    "efficientnet_b0": (lambda models: models.efficientnet_b0(weights=None, num_classes=5), "classifier.1"),
    "densenet121": (lambda models: models.densenet121(weights=None, num_classes=5), "classifier"),
    "vit": (small_vit, "heads.head"),
    "convnext_tiny": (lambda models: models.convnext_tiny(weights=None, num_classes=5), "classifier.2"),
    "swin_t": (lambda models: models.swin_t(weights=None, num_classes=5), "head"),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", TORCHVISION)
def test_torchvision_networks_convert_exactly(name, dtype):
    models = import_or_skip("torchvision.models")
    build, head = TORCHVISION[name]
    size = 32 if name == "vit" else 64
    assert check_exact(build(models), torch.randn(2, 3, size, size), dtype).name == head


def test_torchvision_squeezenet_is_refused():
    models = import_or_skip("torchvision.models")
    model = models.squeezenet1_0(weights=None, num_classes=5).eval()
    x = torch.randn(2, 3, 64, 64)
    with refused("found no head", model):
        td.tensorize_(model, x)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=["float32", "float64"])
@pytest.mark.parametrize(
    "name",
    ["resnet18", "mobilenetv3_small_050", "efficientnet_b0", "vit_tiny_patch16_224", "convnext_atto", "regnetx_002"],
)
def test_timm_networks_convert_exactly(name, dtype):
    timm = import_or_skip("timm")
    size = {"img_size": 32} if name.startswith("vit") else {}
    try:
        model = timm.create_model(name, pretrained=False, num_classes=5, **size)
    except RuntimeError as error:
        pytest.skip(f"this timm has no {name}: {error}")
    check_exact(model, torch.randn(2, 3, 32 if size else 64, 32 if size else 64), dtype)


# What must not be taken for an average, or for a linear head.


def assert_exact_or_refused(model, x, others, **options):
    """Either the function is unchanged on all inputs, or nothing is."""
    model.eval()
    before = [model(each) for each in others]
    try:
        report = td.tensorize_(model, x, **options)
    except td.TensorDropoutError:
        return None
    for each, y in zip(others, before, strict=True):
        assert relative_change(model(each), y) <= 1e-4
    return report


@pytest.mark.parametrize("inplace", [False, True], ids=["copying", "inplace"])
@pytest.mark.parametrize("heads", [None, "2"], ids=["found", "named"])
def test_a_convolution_with_relu_before_the_pooling_is_no_linear_head(inplace, heads):
    """SqueezeNet: the mean of ReLUs is not the ReLU of a mean."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout(), nn.Conv2d(8, 5, 1), nn.ReLU(inplace), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).eval()
    with refused("head|position|ReLU", model):
        td.tensorize_(model, image(), heads=heads)


@pytest.mark.parametrize("inplace", [False, True], ids=["copying", "inplace"])
def test_relu_between_pooling_and_head_is_not_moved(inplace):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.ReLU(inplace), nn.Flatten(), nn.Linear(8, 5))
    assert_exact_or_refused(model, image(), [image(), image(seed=5)])


def test_a_bound_between_pooling_and_head_that_the_example_does_not_reach():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.ReLU6(), nn.Flatten(), nn.Linear(8, 5)
    )
    assert_exact_or_refused(model, image(), [image(), 30 * image(seed=5)])


@pytest.mark.parametrize("example", [torch.zeros, torch.ones])
def test_max_pooling_is_no_average_also_where_the_example_is_constant(example):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    assert_exact_or_refused(model, example(2, *IMAGE), [image()])


@pytest.mark.parametrize("example", [torch.zeros, torch.ones])
def test_a_constant_example_converts_a_pooled_head_exactly(example):
    assert assert_exact_or_refused(make(BY_NAME["resnet-2d"]), example(2, *IMAGE), [image()]) is not None


def test_a_strided_convolution_before_the_pooling_sees_some_positions_only():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    assert_exact_or_refused(model, image(), [image(), image(seed=5)])


class PooledTwice(nn.Module):
    """The pooled features go into the head and elsewhere."""

    def __init__(self, elsewhere):
        super().__init__()
        self.conv, self.pool, self.fc = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)
        self.elsewhere = elsewhere

    def forward(self, x):
        features = self.pool(self.conv(x)).flatten(1)
        return self.fc(features), self.elsewhere(features)


@pytest.mark.parametrize(
    "elsewhere", [lambda f: f, lambda f: f.square().sum(1), lambda f: f.amax(1)], ids=["features", "norm", "largest"]
)
def test_pooled_features_that_are_used_elsewhere_keep_their_values(elsewhere):
    model = PooledTwice(elsewhere).eval()
    before = model(image())
    td.tensorize_(model, image())
    for after, wanted in zip(model(image()), before, strict=True):
        assert_close(after, wanted, rtol=1e-4, atol=1e-5)


def test_two_heads_on_one_pooling():
    model = PooledTwice(lambda f: f).eval()
    model.second = nn.Linear(8, 3)
    model.elsewhere = model.second
    with refused("2 heads.*'fc'.*'second'", model):
        td.tensorize_(model, image())
    before = model(image())
    report = td.tensorize_(model, image(), heads=["fc", "second"])
    assert [each.name for each in report.replacements] == ["fc", "second"]
    for after, wanted in zip(model(image()), before, strict=True):
        assert_close(after, wanted, rtol=1e-4, atol=1e-5)


# Ranks and goals, on a trained network.


@dataclass
class Trained:
    model: nn.Module
    x: torch.Tensor
    y: torch.Tensor
    head: str
    averaged: bool

    def copy(self):
        return copy.deepcopy(self.model)

    @property
    def weight(self):
        """(*features, O) for the flattened map, (C, O) behind the pooling."""
        matrix = as_numpy(self.model.get_submodule(self.head).weight).T
        return matrix if self.averaged else matrix.reshape(8, 4, 4, 10)

    @property
    def decompose(self):
        weight = torch.from_numpy(self.weight.copy())
        return lambda factorization: FORMATS[factorization].decomposition(weight, (4, 4) if self.averaged else ())

    @property
    def loader(self):
        return list(zip(self.x.split(400), self.y.split(400), strict=True))


def train(pooled):
    from sklearn.datasets import load_digits

    data = load_digits()
    x, y = torch.from_numpy(data.images).float()[:, None] / 16, torch.from_numpy(data.target)
    torch.manual_seed(0)
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)] if pooled else [nn.Flatten(), nn.Linear(128, 10)]
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), *end
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(6):
        for batch in torch.randperm(len(x)).split(100):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    model.zero_grad()
    return Trained(model.eval(), x[:800], y[:800], "7" if pooled else "6", pooled)


@pytest.fixture(scope="module")
def trained_flat():
    return train(pooled=False)


@pytest.fixture(scope="module")
def trained_pooled():
    return train(pooled=True)


@pytest.fixture(params=["flat", "pooled"])
def trained(request):
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    return request.getfixturevalue(f"trained_{request.param}")


def accuracy(model, x, y):
    with torch.no_grad():
        return float((model(x).argmax(1) == y).double().mean())


def measured_error(trained, regression):
    """``‖W - Ŵ‖/‖W‖`` by numpy: behind the pooling, of the matrix on the averaged features."""
    found, wanted = dense(regression), trained.weight
    if trained.averaged:
        found = found.sum((1, 2))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def count_weights(factorization, sizes, rank):
    """How many numbers the factors have, from their definition."""
    if factorization == "tucker":
        return int(np.prod(rank)) + sum(size * R for size, R in zip(sizes, rank, strict=True))
    if factorization == "cp":
        return rank[0] * sum(sizes)
    bonds = (*rank, rank[0]) if factorization == "ring" else (1, *rank, 1)
    return sum(left * size * right for left, size, right in zip(bonds[:-1], sizes, bonds[1:], strict=True))


def some_of(path, most=8):
    """At most so many of the ranks on a path, the ends among them."""
    return [path[round(k)] for k in np.linspace(0, len(path) - 1, min(most, len(path)))]


def test_the_network_is_trained(trained):
    assert accuracy(trained.model, trained.x, trained.y) > 0.85


@every_factorization
def test_the_error_falls_with_the_rank_and_every_number_of_the_report_is_right(trained, factorization):
    path = trained.decompose(factorization).path
    errors = []
    for rank in some_of(path, 4 if factorization == "cp" and not trained.averaged else 8):
        model, before = trained.copy(), trained.model(trained.x)
        report = td.tensorize_(model, trained.x, factorization=factorization, rank=rank)
        (replaced,) = report.replacements
        regression = model.get_submodule(trained.head).regression
        shape = (8, 4, 4)
        assert (replaced.rank, replaced.input_shape, replaced.output_shape) == (rank, shape, (10,))
        assert (replaced.name, replaced.after) == (trained.head, LAYERS[factorization].__name__)
        assert replaced.kind == ("pool" if trained.averaged else "flatten")
        weights = count_weights(factorization, (*shape, 10), rank)
        plain_count = 10 * (8 if trained.averaged else 128) + 10
        assert (replaced.parameters_before, replaced.parameters_after) == (plain_count, weights + 10)
        assert replaced.compression_ratio == plain_count / (weights + 10)
        assert (report.parameters_before, report.parameters_after) == (count(trained.model), count(model))
        assert report.parameters_after - report.parameters_before == weights + 10 - plain_count
        assert replaced.relative_error == pytest.approx(measured_error(trained, regression), rel=1e-4, abs=1e-7)
        assert report.output_difference == pytest.approx(relative_change(model(trained.x), before), rel=1e-9)
        errors.append(replaced.relative_error)
    assert all(later < earlier for earlier, later in pairwise(errors))
    assert errors[0] > 0.1
    assert errors[-1] < 1e-6


@every_factorization
def test_a_budget_is_met_and_used_up(trained, factorization):
    decomposition = trained.decompose(factorization)
    path = decomposition.path
    counted = partial(count_weights, factorization, (8, 4, 4, 10))
    for budget in (counted(path[0]) + 10, 120, 333, 10**6):
        model = trained.copy()
        replaced = td.tensorize_(model, trained.x[:4], factorization=factorization, max_parameters=budget).replacements[
            0
        ]
        assert replaced.parameters_after == count(model.get_submodule(trained.head)) <= budget
        place = path.index(replaced.rank)
        if place + 1 < len(path):
            assert counted(path[place + 1]) + 10 > budget
    assert replaced.rank == decomposition.exact_rank


@every_factorization
def test_a_fraction_is_of_the_replaced_weights(trained, factorization):
    path = trained.decompose(factorization).path
    counted = partial(count_weights, factorization, (8, 4, 4, 10))
    whole = trained.weight.size
    for fraction in (0.6, 1.0):
        if counted(path[0]) > fraction * whole:
            continue
        rank = (
            td.tensorize_(trained.copy(), trained.x[:4], factorization=factorization, rank=fraction)
            .replacements[0]
            .rank
        )
        assert counted(rank) <= fraction * whole
        place = path.index(rank)
        assert place + 1 == len(path) or counted(path[place + 1]) > fraction * whole


@every_factorization
@pytest.mark.parametrize("limit", [0.5, 0.1, 1e-4, 0])
def test_the_error_asked_for_is_met_by_the_smallest_rank(trained, factorization, limit):
    if factorization == "cp" and not trained.averaged and limit < 0.1:
        pytest.skip("the least squares of CP take long near the exact rank")
    model = trained.copy()
    replaced = td.tensorize_(model, trained.x[:4], factorization=factorization, max_error=limit).replacements[0]
    regression = model.get_submodule(trained.head).regression
    assert measured_error(trained, regression) <= max(limit, 1e-6)
    path = trained.decompose(factorization).path
    place = path.index(replaced.rank)
    if place > 0:
        smaller = trained.copy()
        error = td.tensorize_(smaller, trained.x[:4], factorization=factorization, rank=path[place - 1])
        assert error.replacements[0].relative_error > limit
    for trial in replaced.trials:
        assert trial.parameters == count_weights(factorization, (8, 4, 4, 10), trial.rank) + 10
        assert (trial.relative_error <= limit) == (path.index(trial.rank) >= place)


@pytest.mark.parametrize("factorization", ["tucker", "tt"])
@pytest.mark.parametrize("loss", [0.0, 0.02, 0.3])
def test_the_accuracy_asked_for_is_met_on_the_loader(trained, factorization, loss):
    model = trained.copy()
    replaced = td.tensorize_(
        model, trained.x[:4], factorization=factorization, max_accuracy_loss=loss, loader=trained.loader
    ).replacements[0]
    before = accuracy(trained.model, trained.x, trained.y)
    assert accuracy(model, trained.x, trained.y) >= before - loss - 1e-6
    assert replaced.trials
    for trial in replaced.trials:
        tried = trained.copy()
        report = td.tensorize_(tried, trained.x[:4], factorization=factorization, rank=trial.rank)
        assert trial.accuracy == pytest.approx(accuracy(tried, trained.x, trained.y), abs=1e-9)
        assert trial.relative_error == pytest.approx(report.replacements[0].relative_error, rel=1e-6)
        assert trial.parameters == report.replacements[0].parameters_after
    if loss == 0.3:
        assert replaced.rank != trained.decompose(factorization).exact_rank


def test_a_search_leaves_no_trace(trained):
    model = trained.copy().train()
    state = torch.get_rng_state()
    td.tensorize_(model, trained.x[:4], max_accuracy_loss=0.02, loader=trained.loader)
    assert torch.equal(state, torch.get_rng_state())
    assert all(module.training for module in model.modules())
    assert torch.equal(model[3].running_mean, trained.model[3].running_mean)
    assert len([module for module in model.modules() if isinstance(module, TensorHead)]) == 1


def test_one_int_is_cut_at_the_exact_rank(trained_pooled):
    report = td.tensorize_(trained_pooled.copy(), trained_pooled.x[:4], rank=3)
    assert report.replacements[0].rank == (3, 1, 1, 3)
    report = td.tensorize_(trained_pooled.copy(), trained_pooled.x[:4], rank=3, factorization="tt")
    assert report.replacements[0].rank == (3, 3, 3)
    report = td.tensorize_(trained_pooled.copy(), trained_pooled.x[:4], rank=3, factorization="ring")
    assert report.replacements[0].rank == (1, 3, 3, 3)


def test_the_report_can_be_printed_and_written_as_json(trained_flat):
    report = td.tensorize_(trained_flat.copy(), trained_flat.x[:4], max_error=0.3)
    record = json.loads(json.dumps(report.as_dict()))
    (replaced,) = report.replacements
    assert record["replacements"][0]["rank"] == list(replaced.rank)
    assert record["replacements"][0]["compression_ratio"] == replaced.compression_ratio
    assert record["replacements"][0]["trials"]
    assert record["output_difference"] == report.output_difference
    for part in ("6: Linear(128 -> 10)", "8×4×4 -> 10", "×".join(map(str, replaced.rank)), "network"):
        assert part in str(report)


# Ranks above the weight's own.

HIGHER = {"tucker": (8, 3, 3, 5), "cp": 12, "tt": (8, 9, 5), "ring": (2, 8, 9, 5)}
HIGHER_FLAT = {"tucker": (4, 4, 4, 5), "cp": 64, "tt": (4, 16, 5), "ring": (2, 4, 16, 5)}


@every_factorization
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@pytest.mark.parametrize("kind", ["pool", "conv-pool", "flatten"])
def test_ranks_above_the_weights_own_change_nothing_and_can_be_grown_into(factorization, scaling, kind):
    torch.manual_seed(3)
    x = image(6, torch.float64)
    if kind == "pool":
        model, at, exact = plain().double(), 4, (5, 1, 1, 5)
    elif kind == "conv-pool":
        model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        model, at, exact = model.double(), 1, (5, 1, 1, 5)
    else:
        model, at, exact = flat().double(), 3, (3, 4, 4, 3)
        with torch.no_grad():  # rank 3 at the channels and at the output
            parts = (torch.randn(*shape).double() for shape in ((4, 3), (3, 4, 4, 3), (3, 5)))
            weight = torch.einsum("cr,rhws,so->ochw", *parts)
            model[3].weight.copy_(weight.flatten(1))
    rank = (HIGHER_FLAT if kind == "flatten" else HIGHER)[factorization]
    tt_exact = (3, 12, 3) if kind == "flatten" else (5, 5, 5)
    dropout = td.TensorDropout(0.6, scaling=scaling)
    before = model.eval()(x).detach()
    report = td.tensorize_(model, x, factorization=factorization, rank=rank, dropout=dropout)
    wanted = (rank,) if factorization == "cp" else rank
    assert report.replacements[0].rank == wanted
    assert relative_change(model(x), before) < 1e-12
    assert report.replacements[0].relative_error < 1e-12
    # What training can reach: the gradient of a loss in every new rank.
    regression = model[at].regression
    target = torch.randn_like(before)
    (model(x) - target).square().sum().backward()
    if factorization == "tucker":
        fresh = torch.ones_like(regression.core, dtype=torch.bool)
        fresh[tuple(slice(R) for R in exact)] = False
        reached = [regression.core.grad[fresh]]
        assert (regression.core[fresh] == 0).all()
    elif factorization == "cp":
        last = regression.factors[-1]
        empty = (last == 0).all(0)
        assert int(empty.sum()) == rank - (48 if kind == "flatten" else 5)
        reached = list(last.grad[:, empty].abs().sum(0))
    else:
        reached = []
        if factorization == "ring":  # all of the weight goes through the first rank of bond 0
            assert kind == "flatten" or (regression.cores[-1][:, :, 1] == 0).all()
            reached.append(regression.cores[-1].grad[:, :, 1])
            wanted = wanted[1:]
        for core, bond, own in zip(list(regression.cores)[1:], wanted, tt_exact, strict=True):
            lengths = core.detach().flatten(1).norm(dim=1)
            empty = lengths < 1e-10 * lengths.max()
            # TT-SVD fills the ranks of a flattened weight beyond its own with rounding errors, not with zeros.
            assert kind == "flatten" or int(empty.sum()) == bond - own
            reached += list(core.grad[empty].flatten(1).abs().sum(1))
        assert reached
    assert torch.stack([each.abs().sum() for each in reached]).min() > 1e-8
    # One step of gradient descent uses them: W leaves the space that it was in.
    optimizer = torch.optim.SGD(model[at].parameters(), 1e-3)
    optimizer.step()
    moved = dense(regression)
    if kind != "flatten":
        assert np.linalg.norm(moved - moved.mean((1, 2), keepdims=True)) > 1e-6 * np.linalg.norm(moved)
    else:
        spectrum = np.linalg.svd(moved.reshape(4, -1), compute_uv=False)
        assert spectrum[3] > 1e-7 * spectrum[0]
    assert (model(x) - before).abs().max() > 1e-6


@pytest.mark.parametrize("law", ["bernoulli", "replacement", "gaussian", "nested"])
@pytest.mark.parametrize("scaling", ["inverted", "paper"])
@every_factorization
def test_the_function_is_the_same_under_every_law_and_scaling(law, scaling, factorization):
    for model, at in ((plain().double().eval(), 4), (flat().double().eval(), 3)):
        x = image(4, torch.float64)
        before = model(x)
        dropout = td.TensorDropout(0.7, law=law, scaling=scaling)
        td.tensorize_(model, x, factorization=factorization, dropout=dropout)
        assert relative_change(model(x), before) < 1e-12
        regression = model[at].regression
        assert regression.dropout is not dropout
        assert regression.dropout.config() == dropout.config()
        model.train()
        first, *others = [model(x) for _ in range(8)]
        assert any(not torch.equal(first, other) for other in others)


def test_a_number_is_the_keep_probability():
    model = plain().eval()
    td.tensorize_(model, image(), dropout=0.9)
    assert float(model[4].regression.dropout.theta) == pytest.approx(0.9)


def test_sampling_at_test_time_is_compared_at_the_mean():
    model = plain().eval()
    report = td.tensorize_(model, image(), dropout=td.TensorDropout(0.5, at_test="sample"))
    assert report.output_difference < 1e-5
    assert any("sample" in note for note in report.replacements[0].notes)
    assert model[4].regression._fixed_masks is None
    assert not torch.equal(model(image()), model(image()))


# Optimizers.


def fill_state(model, optimizer, x):
    for _ in range(2):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


OPTIMIZERS = {
    "adam": lambda model: torch.optim.Adam(model.parameters(), 0.01),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), 0.01, momentum=0.9),
    "adamw-foreach": lambda model: torch.optim.AdamW(model.parameters(), 0.01, foreach=True),
    "groups": lambda model: torch.optim.Adam(
        [{"params": model[0].parameters(), "lr": 0.001}, {"params": model[4].parameters(), "lr": 0.1}]
    ),
    "weights-and-biases": lambda model: torch.optim.SGD(
        [
            {"params": [model[0].weight, model[4].weight], "weight_decay": 0.1},
            {"params": [model[4].bias, model[0].bias], "lr": 0.1},
        ],
        0.01,
        momentum=0.9,
    ),
    "named": lambda model: torch.optim.Adam(model.named_parameters(), 0.01),
}
every_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)


def check_names(model, optimizer):
    """Where an optimizer has names, they are those of the model."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        if "param_names" in group:
            assert group["param_names"] == [names[parameter] for parameter in group["params"]]


@every_optimizer
@every_factorization
def test_the_optimizer_gets_the_new_parameters_and_keeps_all_other_state(name, factorization):
    model = plain()
    optimizer = OPTIMIZERS[name](model)
    fill_state(model, optimizer, image())
    weight, bias = model[4].weight, model[4].bias
    home = next(k for k, group in enumerate(optimizer.param_groups) if any(p is weight for p in group["params"]))
    others = {p: state for p, state in optimizer.state.items() if p is not weight}
    settings = [{k: v for k, v in group.items() if "param" not in k} for group in optimizer.param_groups]
    td.tensorize_(model, image(), factorization=factorization, optimizer=optimizer)
    new = [p for p in model[4].regression.parameters() if p is not bias]
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert sorted(map(id, held)) == sorted(map(id, model.parameters()))
    assert {id(p) for p in new} <= {id(p) for p in optimizer.param_groups[home]["params"]}
    assert [{k: v for k, v in group.items() if "param" not in k} for group in optimizer.param_groups] == settings
    assert optimizer.state.keys() == others.keys()
    assert all(optimizer.state[p] is state for p, state in others.items())
    values = [p.detach().clone() for p in new]
    optimizer.zero_grad()
    model(image()).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, value) for p, value in zip(new, values, strict=True))
    assert all(p in optimizer.state for p in new)
    copy.deepcopy(optimizer.state_dict())


def test_the_names_in_an_optimizer_follow_the_model():
    model = plain()
    optimizer = OPTIMIZERS["named"](model)
    td.tensorize_(model, image(), optimizer=optimizer)
    check_names(model, optimizer)
    td.truncate_(model, 3, optimizer=optimizer)
    check_names(model, optimizer)
    td.merge_(model, optimizer=optimizer)
    check_names(model, optimizer)


def test_an_optimizer_without_the_head_is_refused():
    model = plain()
    optimizer = torch.optim.Adam(model[0].parameters())
    fill_state(model, optimizer, image())
    model.zero_grad()
    with refused("optimizer does not hold", model, optimizer):
        td.tensorize_(model, image(), optimizer=optimizer)


def test_an_optimizer_of_one_of_two_heads_is_refused_as_a_whole():
    model = PooledTwice(nn.Identity()).eval()
    model.elsewhere = nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*model.conv.parameters(), *model.fc.parameters()], 0.1, momentum=0.9)
    with refused("optimizer does not hold", model, optimizer):
        td.tensorize_(model, image(), heads=["fc", "elsewhere"], optimizer=optimizer)


def test_lbfgs_is_refused():
    model = plain()
    optimizer = torch.optim.LBFGS(model.parameters())
    with refused("L-BFGS", model, optimizer):
        td.tensorize_(model, image(), optimizer=optimizer)


def test_a_bias_outside_the_optimizer_stays_outside():
    model = plain()
    optimizer = torch.optim.SGD([model[4].weight], 0.1)
    td.tensorize_(model, image(), optimizer=optimizer)
    assert all(p is not model[4].regression.bias for p in optimizer.param_groups[0]["params"])
    assert len(optimizer.param_groups[0]["params"]) == 5


# Refusals.


def two_heads():
    class TwoHeads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.pool = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)
            self.species, self.age = nn.Linear(8, 5), nn.Linear(8, 1)

        def forward(self, x):
            x = self.pool(self.body(x)).flatten(1)
            return self.species(x), self.age(x)

    return TwoHeads()


def without_linear():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def unused_head():
    model = plain()
    model[0].register_module("spare", nn.Linear(8, 5))
    return model


REFUSED = {
    "no linear layer": (
        without_linear,
        {},
        "found no head in Sequential.*no linear layer; last ran.*AdaptiveAvgPool2d",
    ),
    "segmentation": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1)),
        {},
        r"found no head in Sequential.*'2' \(Conv2d\(8 -> 5\)",
    ),
    "two heads": (two_heads, {}, "TwoHeads has 2 heads.*'species'.*'age'.*heads="),
    "unknown name": (plain, {"heads": "fc"}, r"\['fc'\].*linear layers are \['4'\]"),
    "one unknown name": (plain, {"heads": ["4", "fc"]}, r"\['fc'\]"),
    "a name that is no linear layer": (plain, {"heads": "0"}, r"\['0'\]"),
    "no names": (plain, {"heads": []}, "heads"),
    "heads of another type": (plain, {"heads": 4}, "heads"),
    "did not run": (unused_head, {"heads": "0.spare"}, "'0.spare' did not run.*'4'"),
    "filter accepts nothing": (plain, {"filter_fn": lambda module, name: False}, "filter_fn accepted no layer.*'4'"),
    "heads and filter": (plain, {"heads": "4", "filter_fn": lambda module, name: True}, "not both"),
    "unknown factorization": (plain, {"factorization": "tucka"}, "factorization is one of.*'tucka'"),
    "rank zero": (plain, {"rank": 0}, "rank is between 1 and 5"),
    "rank above the exact": (plain, {"rank": 6}, "rank is between 1 and 5.*6"),
    "negative rank": (plain, {"rank": -1}, "rank is between"),
    "too few ranks": (plain, {"rank": (5, 1, 5)}, "rank needs 4 numbers"),
    "too many ranks": (plain, {"rank": (5, 1, 1, 5, 5)}, "rank needs 4 numbers"),
    "a rank above the size": (plain, {"rank": (9, 1, 1, 5)}, "rank 9"),
    "a rank of zero among them": (plain, {"rank": (5, 0, 1, 5)}, "rank 0"),
    "rank of another type": (plain, {"rank": "half"}, "'half'"),
    "rank true": (plain, {"rank": True}, "True"),
    "float ranks": (plain, {"rank": (5.0, 1, 1, 5)}, "5.0"),
    "fraction above one": (plain, {"rank": 1.5}, "fraction"),
    "fraction zero": (plain, {"rank": 0.0}, "fraction"),
    "fraction nan": (plain, {"rank": float("nan")}, "fraction"),
    "fraction too small": (plain, {"rank": 0.01}, "is too little"),
    "cp: ranks of another format": (plain, {"factorization": "cp", "rank": (5, 1, 1, 5)}, "rank"),
    "cp: no rank": (plain, {"factorization": "cp", "rank": ()}, "rank"),
    "cp: rank too large": (plain, {"factorization": "cp", "rank": 10**6}, "rank"),
    "tt: too few ranks": (plain, {"factorization": "tt", "rank": (5, 5)}, "rank needs 3"),
    "tt: rank too large": (plain, {"factorization": "tt", "rank": (9, 5, 5)}, "rank 9"),
    "two goals": (plain, {"rank": 2, "max_error": 0.1}, "one thing decides the rank, got rank, max_error"),
    "budget too small": (plain, {"max_parameters": 10}, "is too little"),
    "budget of zero": (plain, {"max_parameters": 0}, "positive integer"),
    "budget of another type": (plain, {"max_parameters": 100.0}, "positive integer"),
    "error too large": (plain, {"max_error": 1.0}, r"max_error is a number in \[0, 1\)"),
    "negative error": (plain, {"max_error": -0.1}, "max_error"),
    "error of another type": (plain, {"max_error": "small"}, "max_error"),
    "accuracy without loader": (plain, {"max_accuracy_loss": 0.1}, "belong together"),
    "loader without accuracy": (plain, {"loader": [1]}, "belong together"),
    "empty loader": (plain, {"max_accuracy_loss": 0.1, "loader": []}, "no samples"),
    "loader without labels": (plain, {"max_accuracy_loss": 0.1, "loader": [torch.zeros(2, *IMAGE)]}, "pairs"),
    "loader of another shape": (
        plain,
        {"max_accuracy_loss": 0.1, "loader": [(torch.zeros(2, 7, 8, 8), torch.zeros(2).long())]},
        "loader|run",
    ),
    "dropout above one": (plain, {"dropout": 1.5}, "theta"),
    "dropout on a missing mode": (plain, {"dropout": td.TensorDropout(0.5, modes=(7,))}, "7"),
    "survivors above the rank": (plain, {"dropout": td.TensorDropout(0.5, min_rank=6), "rank": 3}, "min_rank"),
    "not an optimizer": (plain, {"optimizer": "adam"}, "optimizer"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_a_request_that_cannot_be_carried_out(what, training):
    build, options, match = REFUSED[what]
    model = build().train(training)
    optimizer = None
    if "optimizer" not in options:
        optimizer = torch.optim.Adam(model.parameters())
        options = {**options, "optimizer": optimizer}
    with refused(match, model, optimizer):
        td.tensorize_(model, image(), **options)


EXAMPLES = {
    "wrong channels": (torch.zeros(2, 4, 8, 8), r"does not run on example_input of shape \[\(2, 4, 8, 8\)\].*channels"),
    "wrong axes": (torch.zeros(2, 3), "does not run"),
    "wrong dtype": (torch.zeros(2, *IMAGE, dtype=torch.float64), "does not run"),
    "too small for nothing": (torch.zeros(0, *IMAGE), r"no samples: \(0, 3, 8, 8\)"),
    "a number": (5, "got int"),
    "None": (None, "got NoneType"),
    "an array": (np.zeros((2, 3, 8, 8), dtype=np.float32), "got ndarray"),
    "an empty tuple": ((), "got tuple"),
    "a scalar": (torch.tensor(1.0), "no samples"),
    "two arguments": ((torch.zeros(2, *IMAGE), torch.zeros(2)), "does not run"),
    "unknown keyword": ({"pixels": torch.zeros(2, *IMAGE)}, "does not run"),
}


@pytest.mark.parametrize("what", EXAMPLES)
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_an_example_that_does_not_fit(what, training):
    example, match = EXAMPLES[what]
    model = Residual().train(training)
    optimizer = torch.optim.Adam(model.parameters())
    with refused(match, model, optimizer):
        td.tensorize_(model, example, optimizer=optimizer)


def test_a_flattened_head_with_an_example_of_another_size():
    model = flat().train()
    with refused("does not run", model):
        td.tensorize_(model, torch.zeros(2, 3, 10, 10))


def test_training_mode_with_batch_norm_and_one_sample_is_refused():
    model = Residual().train()
    with refused("batch normalisation.*model.eval", model):
        td.tensorize_(model, image(1))
    model.eval()
    assert td.tensorize_(model, image(1)).output_difference < 1e-5


def test_training_mode_is_kept_and_batch_norm_learns_nothing():
    model = Residual().train()
    model.block.eval()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    td.tensorize_(model, image(), dropout=0.8)
    assert model.fc.training
    assert model.fc.regression.dropout.training
    assert model.avgpool.training
    assert model.training
    assert not model.block.training
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers() if name in statistics)
    assert not torch.equal(model(image()), model(image()))


def frozen(model):
    model[4].weight.requires_grad_(False)


def tie(model):
    model[0].register_parameter("also", model[4].weight)


def tie_bias(model):
    model[0].register_parameter("also", model[4].bias)


def to_nan(model):
    with torch.no_grad():
        model[4].weight[2, 3] = float("nan")


def to_infinity(model):
    with torch.no_grad():
        model[4].weight[2, 3] = float("inf")


def own_forward(model):
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model[4] = Scaled(8, 5)


LAYER_FAULTS = {
    "frozen": (frozen, "'4'.*frozen.*requires_grad_"),
    "weight_norm": (lambda m: nn.utils.parametrizations.weight_norm(m[4]), "'4'.*parametriz"),
    "spectral_norm": (lambda m: nn.utils.parametrizations.spectral_norm(m[4]), "'4'.*parametriz"),
    "old weight_norm": (lambda m: nn.utils.weight_norm(m[4]), "'4'"),
    "pruned": (lambda m: prune.l1_unstructured(m[4], "weight", 0.3), "'4'"),
    "forward of its own": (own_forward, "'4'.*Scaled"),
    "tied weight": (tie, "'4'.*shares its parameters with '0'"),
    "tied bias": (tie_bias, "'4'.*shares its parameters with '0'"),
    "NaN": (to_nan, "weight of '4' has NaN"),
    "infinite": (to_infinity, "weight of '4' has NaN or infinite"),
    "forward hook": (lambda m: m[4].register_forward_hook(lambda *_: None), "'4'.*hooks.*Linear"),
    "forward pre-hook": (lambda m: m[4].register_forward_pre_hook(lambda *_: None), "'4'.*hooks"),
    "backward hook": (lambda m: m[4].register_full_backward_hook(lambda *_: None), "'4'.*hooks"),
    "state dict hook": (lambda m: m[4].register_state_dict_post_hook(lambda *_: None), "'4'.*hooks"),
    "load hook": (lambda m: m[4].register_load_state_dict_post_hook(lambda *_: None), "'4'.*hooks"),
    "hook on the weight": (lambda m: m[4].weight.register_hook(lambda grad: grad), "'4'.*hooks on its parameters"),
    "hook after the gradient of the weight": (
        lambda m: m[4].weight.register_post_accumulate_grad_hook(lambda weight: None),
        "'4'.*hooks on its parameters",
    ),
    "hook on the pooling": (lambda m: m[2].register_forward_hook(lambda *_: None), "'4'.*hooks.*AdaptiveAvgPool2d"),
}


@pytest.mark.parametrize("what", LAYER_FAULTS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_layer_that_cannot_be_replaced_without_losing_something(what):
    damage, match = LAYER_FAULTS[what]
    model = plain().eval()
    damage(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with refused(match, model, optimizer):
        td.tensorize_(model, image(), optimizer=optimizer)


def test_hooks_elsewhere_are_kept():
    model = plain().eval()
    called = []
    model.register_forward_hook(lambda *_: called.append("model"))
    model[0].register_forward_hook(lambda *_: called.append("convolution"))
    td.tensorize_(model, image())
    called.clear()
    model(image())
    assert sorted(called) == ["convolution", "model"]


def test_a_head_used_twice_is_refused():
    model = Backbone(
        lambda m, x: m.fc(m.pool(x).flatten(1)) + m.fc(m.pool(-x).flatten(1)),
        pool=nn.AdaptiveAvgPool2d(1),
        fc=nn.Linear(6, 5),
    ).eval()
    with refused("'fc' is used 2 times", model):
        td.tensorize_(model, image())


def test_a_head_that_is_called_by_another_reference_is_refused():
    model = Backbone(lambda m, x: m.hidden[0](m.pool(x).flatten(1)), pool=nn.AdaptiveAvgPool2d(1), fc=nn.Linear(6, 5))
    model.hidden = (model.fc,)  # a tuple: not registered
    with refused("'fc' cannot be replaced.*not registered", model.eval()):
        td.tensorize_(model, image())


def test_a_head_on_every_position_is_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)).eval()
    with refused("found no head", model):
        td.tensorize_(model, torch.zeros(2, 7, 6))
    with refused("'2' gets inputs of shape.*one output for each position", model):
        td.tensorize_(model, torch.zeros(2, 7, 6), heads="2")


@pytest.mark.parametrize("layer", [nn.Linear(8, 5), nn.Conv2d(8, 5, 1)], ids=["Linear", "Conv2d"])
def test_a_model_that_is_the_layer_itself_is_refused(layer):
    x = torch.randn(2, 8) if isinstance(layer, nn.Linear) else torch.randn(2, 8, 1, 1)
    with refused("nn.Sequential", layer):
        td.tensorize_(layer, x)


def test_a_quantized_head_is_refused():
    quantize = pytest.importorskip("torch.ao.quantization", reason="this torch has no torch.ao.quantization")
    engines = [engine for engine in torch.backends.quantized.supported_engines if engine != "none"]
    if not engines:
        pytest.skip("this torch has no engine for quantized layers")
    torch.backends.quantized.engine = engines[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = quantize.quantize_dynamic(plain().eval(), {nn.Linear}, dtype=torch.qint8)
        try:
            model(image())
        except RuntimeError as error:
            pytest.skip(f"a quantized layer does not run here: {error}")
        with refused("'4' is quantized", model):
            td.tensorize_(model, image())


def test_what_is_not_a_module_is_refused():
    with pytest.raises(td.TensorDropoutError, match=r"nn\.Module, got function"):
        td.tensorize_(lambda x: x, image())


def test_data_parallel_is_refused():
    model = nn.DataParallel(plain())
    with refused("DataParallel.*model.module", model):
        td.tensorize_(model, image())


@pytest.fixture
def process_group(tmp_path):
    if not torch.distributed.is_available() or torch.distributed.is_initialized():
        pytest.skip("torch.distributed is not available, or in use")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("operation", ["tensorize_", "merge_", "truncate_"])
def test_distributed_models_are_refused(process_group, operation):
    model = nn.Sequential(plain()) if operation == "tensorize_" else nn.Sequential(td.CPRegression((3, 8, 8), 5, 4))
    call = {
        "tensorize_": lambda wrapped: td.tensorize_(wrapped, image()),
        "merge_": td.merge_,
        "truncate_": lambda wrapped: td.truncate_(wrapped, 2),
    }[operation]
    wrapped = nn.parallel.DistributedDataParallel(model)
    with refused(f"{operation}.*DistributedDataParallel.*model.module", wrapped):
        call(wrapped)


def test_sharded_models_are_refused(process_group):
    fsdp = pytest.importorskip("torch.distributed.fsdp", reason="this torch has no FSDP")
    from torch.distributed.device_mesh import init_device_mesh

    model = plain()
    fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(td.TensorDropoutError, match=r"FSDP.*before fully_shard"):
        td.tensorize_(model, image())
    assert isinstance(model[4], nn.Linear)


def test_compiled_models_are_refused():
    model = torch.compile(plain(), backend="eager")
    with refused("compiled.*_orig_mod", model):
        td.tensorize_(model, image())


def test_a_model_compiled_in_place_is_refused_or_computes_the_new_function():
    model = plain().eval()
    model.compile(backend="eager")
    before = model(image())
    try:
        report = td.tensorize_(model, image(), rank=1)
    except td.TensorDropoutError:
        assert isinstance(model[4], nn.Linear)
        return
    assert report.output_difference == pytest.approx(relative_change(model(image()), before), rel=1e-3)


def test_scripted_models_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.jit.script(plain())
    with pytest.raises(td.TensorDropoutError, match="TorchScript"):
        td.tensorize_(model, image())


def test_a_scripted_part_is_refused_or_left_alone():
    model = plain().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model[1] = torch.jit.script(model[1])
    before, y = Snapshot(model), model(image())
    try:
        td.tensorize_(model, image())
    except td.TensorDropoutError:
        before.check()
    else:
        assert relative_change(model(image()), y) < 1e-4


def test_models_on_the_meta_device_are_refused():
    model = plain().to("meta")
    with refused("meta device", model):
        td.tensorize_(model, image())


def test_lazy_models_are_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(5))
    with refused("lazy.*run it once", model):
        td.tensorize_(model, image())
    model(image())
    assert td.tensorize_(model, image()).replacements[0].kind == "flatten"


def test_a_failure_in_the_middle_of_the_second_head_undoes_the_first():
    model = two_heads().eval()
    with torch.no_grad():
        model.age.weight[0, 0] = float("nan")
    optimizer = torch.optim.Adam(model.parameters())
    with refused("weight of 'age'", model, optimizer):
        td.tensorize_(model, image(), heads=["species", "age"], optimizer=optimizer)


def test_an_interrupt_undoes_everything():
    model = plain().train()
    optimizer = torch.optim.Adam(model.parameters())

    class Interrupting:
        def __iter__(self):
            yield image(), torch.zeros(3).long()
            raise KeyboardInterrupt

    before = Snapshot(model, optimizer)
    with pytest.raises(KeyboardInterrupt):
        td.tensorize_(model, image(), max_accuracy_loss=0.5, loader=Interrupting(), optimizer=optimizer)
    before.check()


class Counting(nn.Module):
    """Counts its forward passes in a buffer, by assignment."""

    def __init__(self):
        super().__init__()
        self.net = plain()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes = self.passes + 1
        return self.net(x)


def test_buffers_that_forward_assigns_are_put_back():
    model = Counting().eval()
    td.tensorize_(model, image())
    assert float(model.passes) == 0
    fresh = Counting()
    with refused("rank is between", fresh):
        td.tensorize_(fresh, image(), rank=99)


def test_converting_twice_says_that_there_is_no_head_left():
    model = plain().eval()
    td.tensorize_(model, image())
    with refused("found no head", model):
        td.tensorize_(model, image())


# Dtypes, devices and how models are called.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@every_factorization
def test_half_precision(dtype, factorization):
    for model, at in ((plain().eval().to(dtype), 4), (flat().eval().to(dtype), 3)):
        x = image(4, dtype)
        with torch.no_grad():
            before = model(x)
            report = td.tensorize_(model, x, factorization=factorization, dropout=0.8)
            assert {p.dtype for p in model[at].parameters()} == {dtype}
            eps = torch.finfo(dtype).eps
            assert relative_change(model(x), before) < 10 * eps
        assert report.replacements[0].relative_error < 4 * eps
        assert model[at].regression.dropout.theta.dtype == torch.float32


@pytest.mark.parametrize("gate", [SqueezePointwise, SqueezeDense])
def test_a_frozen_backbone_with_gates(gate):
    model = Mobile(gate).eval()
    model.features.requires_grad_(False)
    before = model(image())
    report = td.tensorize_(model, image())
    assert (report.replacements[0].name, report.replacements[0].kind) == ("classifier.1", "pool")
    assert relative_change(model(image()), before) < 1e-4
    assert not any(p.requires_grad for p in model.features.parameters())
    assert all(p.requires_grad for p in model.classifier.parameters())


def test_a_backbone_that_runs_without_gradients():
    class Still(Mobile):
        def forward(self, x):
            with torch.no_grad():
                x = self.features(x)
            return self.classifier(torch.flatten(self.avgpool(x), 1))

    model = Still().eval()
    before = model(image())
    assert td.tensorize_(model, image()).replacements[0].name == "classifier.1"
    assert relative_change(model(image()), before) < 1e-4


def test_inside_no_grad():
    model = Mobile().eval()
    with torch.no_grad():
        assert td.tensorize_(model, image()).replacements[0].name == "classifier.1"
    assert all(p.requires_grad for p in model.parameters())


def test_inside_inference_mode_the_new_layer_can_be_trained_or_it_is_refused():
    model = plain().eval()
    try:
        with torch.inference_mode():
            td.tensorize_(model, image())
    except td.TensorDropoutError:
        return
    model(image()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


class Answering(nn.Module):
    """Returns what ``answer`` makes of the logits and the map; takes two arguments."""

    def __init__(self, answer):
        super().__init__()
        self.body, self.pool, self.fc = nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 5)
        self.answer = answer

    def forward(self, pixels, scale=None):
        maps = self.body(pixels if scale is None else pixels * scale)
        return self.answer(self.fc(self.pool(maps).flatten(1)), maps)


@dataclass
class Output:
    logits: torch.Tensor


ANSWERS = {
    "dict": lambda logits, maps: {"logits": logits, "maps": maps, "name": "x"},
    "tuple": lambda logits, maps: (logits, None, [maps]),
    "list": lambda logits, maps: [logits, maps],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_models_that_return_more_than_a_tensor(answer):
    model = Answering(ANSWERS[answer]).eval()
    x = image()
    report = td.tensorize_(model, x, rank=2)
    assert report.replacements[0].kind == "pool"
    assert report.output_difference > 1e-3


def test_the_difference_is_over_all_outputs():
    model = Answering(ANSWERS["tuple"]).eval()
    x = image()
    with torch.no_grad():
        before = model(x)
        report = td.tensorize_(model, x, rank=2)
        after = model(x)
    change = max(float((after[0] - before[0]).abs().max()), float((after[2][0] - before[2][0]).abs().max()))
    scale = max(float(before[0].abs().max()), float(before[2][0].abs().max()))
    assert report.output_difference == pytest.approx(change / scale, rel=1e-6)


def test_an_output_that_cannot_be_looked_into_is_not_called_unchanged():
    model = Answering(lambda logits, maps: Output(logits)).eval()
    report = td.tensorize_(model, image(), rank=1)
    assert report.output_difference is None or report.output_difference > 1e-3


@pytest.mark.parametrize(
    "example",
    [
        lambda: (image(), torch.tensor(2.0)),
        lambda: {"pixels": image(), "scale": torch.tensor(2.0)},
        lambda: {"scale": torch.tensor(2.0), "pixels": image()},
        lambda: {"pixels": image(), "scale": 2.0},
        lambda: (image(),),
    ],
    ids=["tuple", "dict", "dict, number first", "dict with a float", "tuple of one"],
)
def test_examples_of_several_arguments(example):
    model = Answering(lambda logits, maps: logits).eval()
    report = td.tensorize_(model, example())
    assert report.replacements[0].kind == "pool"
    assert report.output_difference < 1e-5


def test_a_traced_graph_converts():
    model = torch.fx.symbolic_trace(Residual().eval())
    before = model(image())
    td.tensorize_(model, image())
    assert relative_change(model(image()), before) < 1e-4


def test_channels_last():
    model = Residual().eval().to(memory_format=torch.channels_last)
    x = image().to(memory_format=torch.channels_last)
    before = model(x)
    assert td.tensorize_(model, x).replacements[0].kind == "pool"
    assert relative_change(model(x), before) < 1e-4


# Size.


class LargestTensor(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for each in output if isinstance(output, tuple | list) else [output]:
            if isinstance(each, torch.Tensor) and each.device.type != "meta":
                self.largest = max(self.largest, each.untyped_storage().nbytes() // each.element_size())
        return output


@every_factorization
def test_the_dense_weight_behind_an_average_is_never_formed(factorization):
    """2048 channels of 7×7 to 1000 classes: 100 million entries, of which 2 million are needed."""
    channels, outputs = 2048, 1000
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, outputs)).eval()
    with torch.no_grad():  # the rank is low, which makes it fast and changes no size
        model[2].weight.copy_(torch.randn(outputs, 40) @ torch.randn(40, channels))
    x = torch.randn(2, channels, 7, 7)
    before = model(x)
    with LargestTensor() as watched:
        report = td.tensorize_(model, x, factorization=factorization, rank=30)
        td.merge_(model)
    assert watched.largest <= 4 * channels * outputs
    assert 0 < report.output_difference < 1
    assert model(x).shape == before.shape


def with_dropout(between, before=()):
    steps = [nn.Conv2d(1, 16, 1), *before, nn.AdaptiveAvgPool2d(1), *between, nn.Linear(16, 3)]
    return nn.Sequential(*steps).eval()


@pytest.mark.parametrize(
    ("between", "before", "noted"),
    [
        ([nn.Dropout(0.5), nn.Flatten()], [], "'2' dropped single averages"),
        ([nn.Flatten(), nn.Dropout(0.2)], [], "'3' dropped single averages"),
        ([nn.Flatten(), nn.AlphaDropout(0.2)], [], "'3' dropped single averages"),
        ([nn.Dropout2d(0.5), nn.Flatten()], [], ""),  # drops whole channels, as before
        ([nn.Flatten(), nn.Dropout(0.0)], [], ""),
        ([nn.Flatten()], [nn.Dropout(0.5)], ""),
    ],
    ids=["before flattening", "after it", "alpha", "channels", "of rate 0", "on the map"],
)
def test_a_dropout_that_changes_its_strength_is_noted(between, before, noted):
    """Dropping C averages is not dropping C·H·W entries; the output in eval says nothing about it."""
    model = with_dropout(between, before)
    notes = td.tensorize_(model, torch.randn(2, 1, 4, 4)).replacements[0].notes
    found = [note for note in notes if "dropped" in note]
    assert len(found) == bool(noted)
    assert all(noted in note and "up to √16 times smaller" in note and "nn.Dropout2d" in note for note in found)


def test_the_noise_of_a_dropout_is_what_the_note_says():
    """On a constant map exactly √16 times smaller, and with nn.Dropout2d on the map what it was."""

    @torch.no_grad()
    def spread(model):
        model.train()
        return float(torch.stack([model(x) for _ in range(4000)]).std(0).mean())

    torch.manual_seed(0)
    x = torch.ones(1, 1, 4, 4)
    model = with_dropout([nn.Flatten(), nn.Dropout(0.5)])
    channels = copy.deepcopy(nn.Sequential(model[0], nn.Dropout2d(0.5), *model[1:3], model[4])).eval()
    before = spread(model)
    td.tensorize_(model.eval(), x)
    td.tensorize_(channels, x)
    assert spread(model) == pytest.approx(before / 4, rel=0.1)
    assert spread(channels) == pytest.approx(before, rel=0.1)


class DroppedByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.features, self.pool, self.fc = nn.Conv2d(1, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Linear(8, 3)

    def forward(self, x):
        return self.fc(F.dropout(self.pool(self.features(x)).flatten(1), 0.3, self.training))


def test_a_dropout_function_is_noted_too():
    notes = td.tensorize_(DroppedByFunction().eval(), torch.randn(2, 1, 6, 6)).replacements[0].notes
    assert any("a dropout function inside forward dropped single averages" in note for note in notes)


def test_a_dropout_between_a_convolution_and_its_average_gets_stronger():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.Conv2d(8, 3, 1), nn.Dropout(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    notes = td.tensorize_(model.eval(), torch.randn(2, 1, 6, 6)).replacements[0].notes
    assert any("'2' dropped single entries of the map" in note and "√16 times larger" in note for note in notes)


class FeaturesInTraining(nn.Module):
    """Logits and features in training, as for a loss on both; logits alone in eval."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 3)

    def forward(self, x):
        features = self.pool(self.features(x)).flatten(1)
        logits = self.fc(features)
        return (logits, features) if self.training else logits


@pytest.mark.parametrize("training", [True, False])
def test_features_that_are_returned_in_training_alone_keep_their_shape(training):
    model, x = FeaturesInTraining().train(training), torch.randn(2, 1, 6, 6)
    state = copy.deepcopy(model.features.state_dict())
    report = td.tensorize_(model, x)
    assert report.replacements[0].kind == "features"
    assert "in training mode it returns another shape" in report.replacements[0].notes[0]
    assert model.training is training
    for name, tensor in model.features.state_dict().items():  # the batch norm saw nothing
        assert torch.equal(tensor, state[name]), name
    assert [tensor.shape for tensor in model.train()(x)] == [(2, 3), (2, 8)]
