"""Networks as people write them, for the tests of surgery; and a guard that surgery left one as it was."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tensor_dropout as td
from tensor_dropout_lab.nets import build_net

FACTORIZATIONS = ("tucker", "cp", "tt", "ring")
TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-9}

every_factorization = pytest.mark.parametrize("factorization", FACTORIZATIONS)

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
AVERAGES = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


class Residual(nn.Module):
    """ResNet style: strided stem, one shortcut, pooling module, torch.flatten in forward, ``fc``."""

    def __init__(self, dims=2, channels=3, width=8, outputs=5, bias=True):
        super().__init__()
        convolution, norm = CONVOLUTIONS[dims], NORMS[dims]
        self.stem = nn.Sequential(convolution(channels, width, 3, 2, 1, bias=False), norm(width), nn.ReLU(inplace=True))
        self.block = nn.Sequential(convolution(width, width, 3, 1, 1, bias=False), norm(width))
        self.avgpool = AVERAGES[dims](1)
        self.fc = nn.Linear(width, outputs, bias=bias)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.block(x), inplace=True)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Vgg(nn.Module):
    """VGG style: pooling to a grid, flattened into a classifier with dropout."""

    def __init__(self, bias=True):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2))
        self.avgpool = nn.AdaptiveAvgPool2d((3, 2))
        self.classifier = nn.Sequential(
            nn.Linear(48, 12, bias=bias), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(12, 5)
        )

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


class SqueezePointwise(nn.Module):
    """Squeeze and excitation with 1×1 convolutions (EfficientNet, MobileNetV3)."""

    def __init__(self, channels, pooling=None):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1) if pooling is None else pooling
        self.fc1, self.fc2 = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.fc2(F.relu(self.fc1(self.avgpool(x)))))


class SqueezeDense(nn.Module):
    """Squeeze and excitation with linear layers (SENet)."""

    def __init__(self, channels):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(channels, 4), nn.ReLU(), nn.Linear(4, channels), nn.Sigmoid())

    def forward(self, x):
        return x * self.fc(self.avgpool(x).flatten(1))[:, :, None, None]


class Mobile(nn.Module):
    """Gates inside, pooling and a Sequential classifier: MobileNet and EfficientNet style."""

    def __init__(self, gate=SqueezePointwise, classifier=None, pooling="module"):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), gate(8), nn.Conv2d(8, 6, 1), gate(6)
        )
        self.avgpool = nn.AdaptiveAvgPool2d(1) if pooling == "module" else None
        self.classifier = classifier or nn.Sequential(nn.Dropout(0.2), nn.Linear(6, 5))

    def forward(self, x):
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1)) if self.avgpool is None else self.avgpool(x)
        return self.classifier(torch.flatten(x, 1))


def small_v3_classifier():
    return nn.Sequential(nn.Linear(6, 9), nn.Hardswish(inplace=True), nn.Dropout(0.2, inplace=True), nn.Linear(9, 5))


class Backbone(nn.Module):
    """A convolution that keeps the size; what follows is written in ``end``."""

    def __init__(self, end: Callable, dims=2, channels=3, width=6, **parts):
        super().__init__()
        self.body = nn.Sequential(CONVOLUTIONS[dims](channels, width, 3, padding=1), nn.Tanh())
        for name, part in parts.items():
            self.add_module(name, part)
        self.end = end

    def forward(self, x):
        return self.end(self, self.body(x))


class AverageAndFlatten(nn.Module):
    """A pooling module that also removes the axes (timm's and fastai's do)."""

    def forward(self, x):
        return x.mean((2, 3))


class Tokens(nn.Module):
    """ViT style: patches, a class token, one transformer layer, a head on one token or on their mean."""

    def __init__(self, pool="class", width=12, outputs=5):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(width, 3, 16, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.heads = nn.Sequential()
        self.heads.add_module("head", nn.Linear(width, outputs))
        self.pool = pool

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)  # (B, 4, width)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1) + self.positions
        x = self.norm(self.encoder(x))
        return self.heads(x[:, 0] if self.pool == "class" else x.mean(1))


class Mnist(nn.Module):
    """The classic example of torch's own repository, smaller."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3)
        self.fc1, self.fc2 = nn.Linear(8 * 4 * 4, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.fc1(x.view(-1, 8 * 4 * 4)))
        return F.log_softmax(self.fc2(x), dim=1)


class DenseStyle(nn.Module):
    """DenseNet style: everything behind the features is a function."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6))
        self.classifier = nn.Linear(6, 5)

    def forward(self, x):
        x = F.relu(self.features(x), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class Nested(nn.Module):
    """A head deep inside."""

    def __init__(self):
        super().__init__()
        self.net = nn.ModuleDict({"trunk": nn.ModuleList([nn.Conv2d(3, 6, 3)]), "top": nn.Module()})
        self.net["top"].squash = nn.AdaptiveAvgPool2d(1)
        self.net["top"].linear = nn.Linear(6, 5)

    def forward(self, x):
        x = self.net["trunk"][0](x)
        return self.net["top"].linear(self.net["top"].squash(x).flatten(1))


def plain(pooling=None, head=None, width=8, outputs=5):
    """Convolution, ReLU, pooling, Flatten, Linear."""
    pooling = nn.AdaptiveAvgPool2d(1) if pooling is None else pooling
    head = nn.Linear(width, outputs) if head is None else head
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), pooling, nn.Flatten(), head)


def flat(bias=True):
    """Convolution, Flatten, Linear over an 8×8 input."""
    return nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5, bias=bias))


@dataclass(frozen=True)
class Case:
    """A network, an input, and the head that must be found in it."""

    name: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]
    head: str
    kind: str
    features: tuple[int, ...]
    note: str = ""


IMAGE = (3, 8, 8)
FUNCTION = "is a function inside forward"
UNRUNNABLE = "does not compute the same with its pooling widened"


def _end(name, build_end, kind, features, head="fc", note="", input_shape=IMAGE, **parts):
    """A case made of :class:`Backbone`; its parts are made anew for every network."""
    dims = len(input_shape) - 1

    def build():
        made = {key: part() for key, part in parts.items()}
        return Backbone(build_end, dims, input_shape[0], **made)

    return Case(name, build, input_shape, head, kind, features, note)


def _linear():
    return nn.Linear(6, 5)


CASES = [
    Case(
        "own-resnet18", lambda: build_net("resnet18", outputs=7, input_shape=(3, 16, 16)), (3, 16, 16), "fc", "pool",
        (512, 2, 2),
    ),
    Case(
        "own-mini-2d", lambda: build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8)), (1, 8, 8), "fc", "pool",
        (64, 2, 2),
    ),
    Case(
        "own-mini-3d", lambda: build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8, 8)), (1, 8, 8, 8), "fc",
        "pool", (64, 2, 2, 2),
    ),
    Case(
        "own-mini-dropout",
        lambda: build_net("resnet-mini", outputs=5, input_shape=(1, 8, 8), head="fc+dropout", drop_rate=0.3),
        (1, 8, 8), "fc", "pool", (64, 2, 2),
    ),
    Case("resnet-1d", lambda: Residual(1), (3, 12), "fc", "pool", (8, 6)),
    Case("resnet-2d", lambda: Residual(2), IMAGE, "fc", "pool", (8, 4, 4)),
    Case("resnet-3d", lambda: Residual(3), (3, 6, 8, 4), "fc", "pool", (8, 3, 4, 2)),
    Case("resnet-no-bias", lambda: Residual(2, bias=False), IMAGE, "fc", "pool", (8, 4, 4)),
    Case("resnet-scalar", lambda: Residual(3, outputs=1), (3, 4, 4, 4), "fc", "pool", (8, 2, 2, 2)),
    Case("resnet-wide-output", lambda: Residual(2, outputs=20), IMAGE, "fc", "pool", (8, 4, 4)),
    Case("vgg", Vgg, (3, 12, 8), "classifier.0", "flatten", (8, 3, 2)),
    Case("vgg-no-bias", lambda: Vgg(bias=False), (3, 12, 8), "classifier.0", "flatten", (8, 3, 2)),
    Case("flatten", flat, IMAGE, "3", "flatten", (4, 4, 4)),
    Case("flatten-no-bias", lambda: flat(bias=False), IMAGE, "3", "flatten", (4, 4, 4)),
    Case("efficientnet", Mobile, IMAGE, "classifier.1", "pool", (6, 4, 4)),
    Case("senet", lambda: Mobile(SqueezeDense), IMAGE, "classifier.1", "pool", (6, 4, 4)),
    Case("mobilenet-v2", lambda: Mobile(pooling="function"), IMAGE, "classifier.1", "features", (6,), FUNCTION),
    Case("mobilenet-v3", lambda: Mobile(classifier=small_v3_classifier()), IMAGE, "classifier.0", "pool", (6, 4, 4)),
    Case("densenet", DenseStyle, IMAGE, "classifier", "features", (6,), FUNCTION),
    Case("vit-class-token", Tokens, IMAGE, "heads.head", "features", (12,)),
    Case("vit-mean-token", lambda: Tokens("mean"), IMAGE, "heads.head", "features", (12,)),
    Case("mnist", Mnist, (1, 12, 12), "fc1", "flatten", (8, 4, 4)),
    Case("nested", Nested, IMAGE, "net.top.linear", "pool", (6, 6, 6)),
    Case(
        "mlp", lambda: nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, 5)), (10,), "2", "features", (8,)
    ),
    _end("mean", lambda m, x: m.fc(x.mean((2, 3))), "features", (6,), note=FUNCTION, fc=_linear),
    _end("mean-of-rows", lambda m, x: m.fc(x.flatten(2).mean(-1)), "features", (6,), note=FUNCTION, fc=_linear),
    _end(
        "avg_pool2d", lambda m, x: m.fc(F.avg_pool2d(x, x.shape[2:]).flatten(1)), "features", (6,), note=FUNCTION,
        fc=_linear,
    ),
    _end(
        "mean-3d", lambda m, x: m.fc(x.mean((2, 3, 4))), "features", (6,), note=FUNCTION, input_shape=(3, 4, 4, 4),
        fc=_linear,
    ),
    _end(
        "pool-then-convolution", lambda m, x: m.fc(m.pool(x)).flatten(1), "pool", (6, 8, 8),
        pool=lambda: nn.AdaptiveAvgPool2d(1), fc=lambda: nn.Conv2d(6, 5, 1),
    ),
    _end(
        "pool-then-convolution-3d", lambda m, x: m.fc(m.pool(x)).flatten(1), "pool", (6, 4, 4, 4),
        input_shape=(3, 4, 4, 4), pool=lambda: nn.AdaptiveAvgPool3d(1), fc=lambda: nn.Conv3d(6, 5, 1),
    ),
    _end(
        "mean-then-convolution", lambda m, x: m.fc(x.mean((2, 3), keepdim=True)).flatten(1), "features", (6,),
        note=FUNCTION, fc=lambda: nn.Conv2d(6, 5, 1),
    ),
    _end(
        "convolution-then-pool", lambda m, x: m.pool(m.fc(x)).flatten(1), "conv-pool", (6, 8, 8),
        pool=lambda: nn.AdaptiveAvgPool2d(1), fc=lambda: nn.Conv2d(6, 5, 1),
    ),
    _end(
        "convolution-then-pool-1d", lambda m, x: m.pool(m.fc(x)).flatten(1), "conv-pool", (6, 9),
        input_shape=(3, 9), pool=lambda: nn.AdaptiveAvgPool1d(1), fc=lambda: nn.Conv1d(6, 5, 1, bias=False),
    ),
    _end(
        "convolution-then-flattening-pool", lambda m, x: m.pool(m.fc(x)), "conv-pool", (6, 8, 8),
        pool=AverageAndFlatten, fc=lambda: nn.Conv2d(6, 5, 1),
    ),
    _end(
        "convolution-then-mean", lambda m, x: m.fc(x).mean((2, 3)), "conv-pool", (6, 8, 8),
        fc=lambda: nn.Conv2d(6, 5, 1),
    ),
    _end(
        "flattening-pool", lambda m, x: m.fc(m.pool(x)), "pool", (6, 8, 8), pool=AverageAndFlatten, fc=_linear
    ),
    _end(
        "pool-flatten-sequential", lambda m, x: m.fc(m.pool(x)), "pool", (6, 8, 8),
        pool=lambda: nn.Sequential(nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten()), fc=_linear,
    ),
    _end(
        "AvgPool2d", lambda m, x: m.fc(m.pool(x).flatten(1)), "pool", (6, 8, 8), pool=lambda: nn.AvgPool2d(8),
        fc=_linear,
    ),
    _end(
        "view-to-channels", lambda m, x: m.fc(m.pool(x).view(-1, 6)), "features", (6,), note=UNRUNNABLE,
        pool=lambda: nn.AdaptiveAvgPool2d(1), fc=_linear,
    ),
    _end(
        "view-to-batch", lambda m, x: m.fc(m.pool(x).view(len(x), -1)), "pool", (6, 8, 8),
        pool=lambda: nn.AdaptiveAvgPool2d(1), fc=_linear,
    ),
    _end(
        "indexed-pool", lambda m, x: m.fc(m.pool(x)[:, :, 0, 0]), "features", (6,),
        pool=lambda: nn.AdaptiveAvgPool2d(1), fc=_linear,
    ),
    _end(
        "pool-used-twice", lambda m, x: m.fc(m.pool(m.gate(x)).flatten(1)), "features", (6,), note="is used 2 times",
        pool=lambda: nn.AdaptiveAvgPool2d(1), gate=lambda: SqueezePointwise(6), fc=_linear,
    ),
    _end(
        "layer-norm-between", lambda m, x: m.fc(m.norm(m.pool(x).flatten(1))), "features", (6,),
        pool=lambda: nn.AdaptiveAvgPool2d(1), norm=lambda: nn.LayerNorm(6), fc=_linear,
    ),
    _end(
        "max-pool", lambda m, x: m.fc(m.pool(x).flatten(1)), "features", (6,), pool=lambda: nn.AdaptiveMaxPool2d(1),
        fc=_linear,
    ),
    _end(
        "average-and-max", lambda m, x: m.fc(torch.cat([m.pool(x), x.amax((2, 3), keepdim=True)], 1).flatten(1)),
        "features", (12,), pool=lambda: nn.AdaptiveAvgPool2d(1), fc=lambda: nn.Linear(12, 5),
    ),
    _end(
        "channels-last-map", lambda m, x: m.fc(m.pool(x.permute(0, 2, 3, 1).tanh().permute(0, 3, 1, 2)).flatten(1)),
        "pool", (6, 8, 8), pool=lambda: nn.AdaptiveAvgPool2d(1), fc=_linear,
    ),
]  # fmt: skip


def _share_pooling(case):
    """The pooling of the head is also that of a gate."""

    def build():
        model = case.build()
        model.gate.avgpool = model.pool
        return model

    return Case(case.name, build, case.input_shape, case.head, case.kind, case.features, case.note)


CASES = [_share_pooling(case) if case.name == "pool-used-twice" else case for case in CASES]
BY_NAME = {case.name: case for case in CASES}

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def rotate(cases, values):
    """Each case with one of the values in turn; the turns shift, since cases of 1, 2 and 3 axes take turns too."""
    values = list(values)
    pairs = [(case, values[(k + k // len(values)) % len(values)]) for k, case in enumerate(cases)]
    return [pytest.param(case, value, id=f"{case.name}-{value}") for case, value in pairs]


def make(case, dtype=torch.float32, seed=0):
    """The network of a case in ``eval`` mode, with batch norm statistics that are not those of a fresh one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = case.build().to(dtype)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.normal_(0, 0.2)
                module.running_var.uniform_(0.5, 1.5)
    return model.eval()


def make_batch(case, batch=3, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, *case.input_shape, generator=generator, dtype=torch.float64).to(dtype)


@torch.no_grad()
def relative_change(after, before):
    """``max |after - before| / max |before|``."""
    return float((after.double() - before.double()).abs().max() / before.double().abs().max())


def dense(regression):
    """The weight of a plain regression, by numpy from its parameters alone: (*input_shape, *output_shape)."""
    if isinstance(regression, td.TuckerRegression):
        weight = as_numpy(regression.core)
        for mode, factor in enumerate(regression.factors):
            weight = np.moveaxis(np.tensordot(as_numpy(factor), weight, (1, mode)), 0, mode)
        return weight
    if isinstance(regression, td.CPRegression):
        factors = [as_numpy(factor) for factor in regression.factors]
        letters = "abcdefgh"[: len(factors)]
        return np.einsum(",".join(f"{letter}r" for letter in letters) + "->" + letters, *factors)
    weight = np.eye(regression.cores[0].shape[0])
    for core in regression.cores:
        weight = np.tensordot(weight, as_numpy(core), (-1, 0))
    return np.trace(weight, axis1=0, axis2=-1)


def as_numpy(tensor):
    return tensor.detach().to(torch.float64).numpy()


def count(module):
    return sum(prod(parameter.shape) for parameter in module.parameters())


HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
)


def is_plain(value):
    """Whether a value of a state dict is a tensor of numbers: not lazy, quantized or on the meta device."""
    return type(value) is torch.Tensor and not value.is_meta and not value.is_quantized


class Snapshot:
    """Everything of a model, an optimizer and the random state that surgery must not change when it refuses."""

    def __init__(self, model, optimizer=None):
        self.model, self.optimizer = model, optimizer
        self.state = {key: value.clone() if is_plain(value) else value for key, value in self._state().items()}
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.modes = {name: module.training for name, module in self.modules.items()}
        self.hooks = self._hooks()
        self.parameters = {name: (p, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)}
        self.random = torch.get_rng_state()
        if optimizer is not None:
            self.groups = [
                {key: list(value) if isinstance(value, list) else value for key, value in group.items()}
                for group in optimizer.param_groups
            ]
            self.held = dict(optimizer.state)
            self.values = {parameter: copy.deepcopy(value) for parameter, value in optimizer.state.items()}

    def _state(self):
        return self.model.state_dict()

    def _hooks(self):
        return [
            (name, hook, len(getattr(module, hook, None) or ()))
            for name, module in self.model.named_modules()
            for hook in HOOKS
        ]

    def check(self):
        state = self._state()
        assert list(state) == list(self.state)
        for key, value in self.state.items():
            if is_plain(value):
                assert torch.equal(torch.nan_to_num(state[key]), torch.nan_to_num(value)), key
        modules = dict(self.model.named_modules(remove_duplicate=False))
        assert list(modules) == list(self.modules)
        assert all(modules[name] is module for name, module in self.modules.items())
        assert {name: module.training for name, module in modules.items()} == self.modes
        assert self._hooks() == self.hooks
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        assert list(parameters) == list(self.parameters)
        for name, (parameter, wanted) in self.parameters.items():
            assert parameters[name] is parameter
            assert parameter.requires_grad == wanted
            assert parameter.grad is None
        assert torch.equal(torch.get_rng_state(), self.random)
        if self.optimizer is not None:
            self._check_optimizer()

    def _check_optimizer(self):
        assert len(self.optimizer.param_groups) == len(self.groups)
        for group, before in zip(self.optimizer.param_groups, self.groups, strict=True):
            assert group.keys() == before.keys()
            assert [id(parameter) for parameter in group["params"]] == [id(p) for p in before["params"]]
            assert all(group[key] == before[key] for key in before if key != "params")
        assert list(map(id, self.optimizer.state)) == list(map(id, self.held))
        for parameter, held in self.held.items():
            assert self.optimizer.state[parameter] is held
            for key, value in self.values[parameter].items():
                assert (
                    held[key] is None
                    if value is None
                    else torch.equal(torch.as_tensor(held[key]), torch.as_tensor(value))
                )


@contextmanager
def refused(match, model, optimizer=None):
    """The block raises a TensorDropoutError that says ``match``, and everything is as it was."""
    before = Snapshot(model, optimizer)
    with pytest.raises(td.TensorDropoutError, match=match):
        yield
    before.check()
