"""Small networks on the digits, trained in about a second each, for the tests of attacks, noise and the audit.

Every function gives a fresh copy of a network that is trained once per session, in ``eval`` mode; the random numbers
of the test are left as they were. Images are 1×8×8 in [0, 1].
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache

import torch
import torch.nn.functional as F
from torch import nn

import tensor_dropout as td
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.nets import build_net


@cache
def load_digits(part="test"):
    """Images (n, 1, 8, 8) in [0, 1] and labels (n,): 1,077 of "train", 360 of "test"."""
    split = getattr(load_data("digits"), part)
    return split.inputs.float() / 16, split.targets.long()


def train_plain(seed=0):
    """A convolutional network, 98 % right on the test images."""
    return deepcopy(_train("plain", seed))


def train_mlp(seed=0):
    """A fully connected network with a smooth activation."""
    return deepcopy(_train("mlp", seed))


def train_tensor(seed=0):
    """A small residual network with a random CP head: tensor dropout in its last layer alone."""
    return deepcopy(_train("tensor", seed))


def train_dropout(seed=0):
    """A convolutional network with ``nn.Dropout``, for Monte-Carlo dropout."""
    return deepcopy(_train("dropout", seed))


def train_robust(seed=0):
    """The convolutional network, trained on inputs moved by up to 0.15: honest robustness."""
    return deepcopy(_train("robust", seed))


def train_regression(seed=0):
    """A convolutional network with a random CP head that says which digit it sees, as a number (B, 1)."""
    return deepcopy(_train("regression", seed))


class Scaled(nn.Module):
    """The network's logits times a number: the same decisions, a saturated softmax."""

    def __init__(self, net, scale):
        super().__init__()
        self.net, self.scale = net, scale

    def forward(self, x):
        return self.scale * self.net(x)


class Rounded(nn.Module):
    """The network on inputs rounded to so many levels: the gradient is 0 everywhere."""

    def __init__(self, net, levels=8):
        super().__init__()
        self.net, self.levels = net, levels

    def forward(self, x):
        return self.net((x * self.levels).round() / self.levels)


class Detached(nn.Module):
    """The network on inputs cut from the graph: no gradient comes back."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x.detach())


class Noisy(nn.Module):
    """The network on inputs with noise drawn anew at every call."""

    def __init__(self, net, std=0.1):
        super().__init__()
        self.net, self.std = net, std

    def forward(self, x):
        return self.net(x + self.std * torch.randn_like(x))


def find_accuracy(target, x, y):
    """The share of examples that the target classifies as y says."""
    return float((target.predict(x).output.argmax(1) == y).double().mean())


def _build(kind):
    if kind == "mlp":
        return nn.Sequential(
            nn.Flatten(), nn.Linear(64, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 10)
        )
    if kind == "tensor":
        return build_net("resnet-mini", outputs=10, input_shape=(1, 8, 8), head="rtrl-cp", rank=16, theta=0.8)
    if kind == "regression":
        head = td.CPRegression((16, 4, 4), 1, rank=12, init="normal", dropout=0.8)
        return nn.Sequential(_convolve(1, 8), nn.ReLU(), nn.MaxPool2d(2), _convolve(8, 16), nn.ReLU(), head)
    drop = [nn.Dropout(0.3)] if kind == "dropout" else []
    layers = [_convolve(1, 8), nn.ReLU(), nn.MaxPool2d(2), _convolve(8, 16), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, *drop, nn.Linear(256, 10))


def _convolve(channels, width):
    return nn.Conv2d(channels, width, 3, padding=1)


@cache
def _train(kind, seed):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = _build(kind).train()
        return _fit(net, kind, epochs={"robust": 20, "tensor": 4, "regression": 20}.get(kind, 12)).eval()


def _fit(net, kind, epochs):
    x, y = load_digits("train")
    batches = -(-len(x) // 64)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=epochs * batches)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).chunk(batches):
            images = _move(net, x[rows], y[rows], 0.15) if kind == "robust" else x[rows]
            outputs = net(images)
            if kind == "regression":
                loss = F.smooth_l1_loss(outputs[:, 0], y[rows].float())
            else:
                loss = F.cross_entropy(outputs, y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return net


def _move(net, x, y, radius, steps=3):
    """Inputs that are hard for the network, for adversarial training (Madry et al., 2018); not the attacks tested."""
    z = (x + radius * (2 * torch.rand_like(x) - 1)).clamp(0, 1)
    for _ in range(steps):
        z.requires_grad_()
        (gradient,) = torch.autograd.grad(F.cross_entropy(net(z), y), z)
        z = (x + (z.detach() + radius / 2 * gradient.sign() - x).clamp(-radius, radius)).clamp(0, 1)
    return z
