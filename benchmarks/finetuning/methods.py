"""The methods: with which head a network begins, and how it is trained."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from features import load_backbone
from position import Data, fit_flattened, fit_pooled, make_folds
from torch import Tensor, nn

import tensor_dropout as td
from finetuning.data import Part, prepare
from finetuning.training import Setting, predict
from tensor_dropout.features.attach import HeadedNetwork
from tensor_dropout.fitting.statistics import channel_scale
from tensor_dropout.sklearn import TensorRegressor
from tensor_dropout.sklearn.ridge import Kind, RidgePath

LAYER = "_blocks.10"
FROZEN = {
    "tensor": "frozen, TensorRegressor()",
    "flattened": "frozen, flattened ridge",
    "pooled": "frozen, pooled ridge",
}
"""What is done with the maps of the frozen network, by head."""
RATES = (1e-3, 3e-3)
NEAR, FAR = (3e-3, 3e-2), (3e-2, 1e-1)
"""Steps of a fitted head, and of a random one."""
PLAIN_ALPHA = 0.64
"""Without dropout the norms must do more: 16 times the usual α, over n."""


def make_grid(rates: tuple[float, ...], head_steps: tuple[float, ...]) -> tuple[Setting, ...]:
    """All pairs."""
    return tuple(Setting(rate, head_step) for rate in rates for head_step in head_steps)


@dataclass(frozen=True)
class Method:
    """A way to train a network with a head.

    Attributes:
        head: with which it begins: "tensor", "plain" (without dropout), "flattened", "pooled" or "convolutional" (as
            fitted), or "random" (a tensor head).
        grid: the settings to choose from, as many for every method.
        expected: the loss: its mean over all masks, or of one mask for each sample.
        pretrained: whether the backbone has its ImageNet weights.
    """

    head: str
    grid: tuple[Setting, ...] = make_grid(RATES, NEAR)
    expected: bool = False
    pretrained: bool = True


METHODS = {
    "tensor head, masks per sample": Method("tensor"),
    "tensor head, exact loss": Method("tensor", expected=True),
    "flattened linear": Method("flattened"),
    "pooled linear": Method("pooled"),
    "tensor head, no dropout": Method("plain"),
    "convolutional head": Method("convolutional"),
    "random tensor head": Method("random", make_grid(RATES, FAR)),
    "from scratch": Method("random", make_grid(RATES, FAR), pretrained=False),
}


class Keep(nn.Module):
    """A head that gives the maps themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(()), requires_grad=False)  # attach_head asks a head for its dtype

    def forward(self, x: Tensor) -> Tensor:
        return x


class ConvolutionalHead(nn.Module):
    """Two 3×3 convolutions of 64 channels, dropout, and a linear layer, on maps and for targets as they came.

    Args:
        maps: the training maps, (n, C, H, W): for the means and stds of the channels.
        y: (n, outputs), likewise.
    """

    WIDTH, KEEP = 64, 0.5

    def __init__(self, maps: Tensor, y: Tensor) -> None:
        super().__init__()
        scale = channel_scale(maps.flatten(2), maps.new_full((len(maps),), 1 / len(maps)))
        self.register_buffer("center", scale.mean[:, None, None])
        self.register_buffer("spread", scale.std[:, None, None])
        self.register_buffer("mean", y.mean(0))
        self.register_buffer("std", y.std(0))
        self.layers = nn.Sequential(
            nn.Conv2d(maps.shape[1], self.WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(self.WIDTH, self.WIDTH, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(1 - self.KEEP),
            nn.Linear(self.WIDTH * maps[0, 0].numel(), y.shape[1]),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x - self.center) / self.spread) * self.std + self.mean


def fit_convolutional(maps: Tensor, y: Tensor, seed: int, steps: int = 300) -> ConvolutionalHead:
    """Trained on the frozen maps by AdamW, rates falling to 0: what comes before the network is trained."""
    torch.manual_seed(seed)
    head = ConvolutionalHead(maps, y).to(maps.device).train()
    optimizer = torch.optim.AdamW(head.parameters(), 1e-3)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randperm(len(maps), device=maps.device)[:32]
        optimizer.zero_grad()
        ((head(maps[rows]) - y[rows]) / head.std).square().mean().backward()
        optimizer.step()
        falling.step()
    return head.eval()


def build_network(pretrained: bool, side: int, pool: int, device: torch.device) -> HeadedNetwork:
    """EfficientNet-Lite0 up to the layer, whose maps are averaged to a grid; the head is still to come."""
    backbone = load_backbone().requires_grad_(True)
    if not pretrained:
        backbone = type(backbone).from_name("efficientnet-lite0")
    for module in backbone.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.1  # of the 0.01 that it comes with little is left of 100 steps
    return td.attach_head(
        backbone.eval().to(device), Keep(), LAYER, pool=pool, example_input=torch.zeros(1, 3, side, side)
    )


@torch.no_grad()
def settle(network: HeadedNetwork, part: Part) -> None:
    """Give BatchNorm of a random network the statistics of a batch."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    network.train()(prepare(part.images[:64]))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
    network.eval()


def fit_heads(maps: Tensor, part: Part, seed: int, device: torch.device) -> dict[str, nn.Module]:
    """The heads fitted on frozen maps: tensor regression with its defaults, and both ridges, tuned on five folds."""
    x, y = maps.cpu().numpy(), part.y.cpu().numpy()
    tensors = {"tensor": TensorRegressor(), "plain": TensorRegressor(theta=1, alpha=PLAIN_ALPHA / len(x))}
    heads: dict[str, nn.Module] = {
        name: model.set_params(random_state=seed, device=device).fit(x, y).layer_.to(device)
        for name, model in tensors.items()
    }
    heads["convolutional"] = fit_convolutional(maps, part.y, seed)
    data = Data(x, y, x[:1], y[:1], make_folds(part.groups, seed), seed)
    weights = torch.full((len(x),), 1 / len(x))
    kinds: dict[str, tuple[Kind, Callable]] = {
        "flattened": ("flattened ridge", fit_flattened),
        "pooled": ("pooled ridge", fit_pooled),
    }
    for name, (kind, tune) in kinds.items():
        path = RidgePath(torch.from_numpy(x), torch.from_numpy(y), weights, kind)
        heads[name] = path.module(tune(data)["alpha"], tuple(y.shape[1:])).to(device)
    return heads


def redraw(head: nn.Module, maps: Tensor, y: Tensor, seed: int) -> nn.Module:
    """A tensor head like a fitted one with random factors, whose outputs have the mean and the std of the targets."""
    head = copy.deepcopy(head).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for factor in head.factors:
            factor.normal_()
        head.bias.zero_()
        outputs = head(maps)
        size = float((y.var(0).mean() / outputs.var(0).mean()) ** (0.5 / len(head.factors)))
        for factor in head.factors:
            factor.mul_(size)
        head.bias.copy_(y.mean(0) - head(maps).mean(0))
    return head


class Starts:
    """Networks to begin with, for one part of the training images.

    Args:
        part: what the heads are fitted on.
        networks: the backbone with its ImageNet weights and the random one, by ``Method.pretrained``.
        seed: of the fits and the random factors.
    """

    def __init__(self, part: Part, networks: dict[bool, HeadedNetwork], seed: int) -> None:
        self.part, self.networks, self.seed = part, networks, seed
        maps = predict(networks[True], part.images)
        self.heads = fit_heads(maps, part, seed, part.y.device)
        self.maps = {True: maps}

    def begin(self, head: str, pretrained: bool = True) -> HeadedNetwork:
        """A copy of the backbone with a copy of the head."""
        network = copy.deepcopy(self.networks[pretrained])
        if head == "random":
            if pretrained not in self.maps:
                self.maps[pretrained] = predict(network, self.part.images)
            network.head = redraw(self.heads["tensor"], self.maps[pretrained], self.part.y, self.seed)
        else:
            network.head = copy.deepcopy(self.heads[head])
        if isinstance(network.head, td.CPRegression) and network.head.dropout is not None:
            network.head.dropout.per_sample = True
        return network
