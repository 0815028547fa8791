"""Heads that are trained by Adam: many problems of one head side by side, each with its own images and setting.

All parameters have the problems as their first axis. Adam is written here because its rate, decay and penalty are
numbers of each problem.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tensor_dropout as td
from position_heads.data import Fold, Images, held_out_error, test_error
from tensor_dropout.fitting.statistics import channel_scale
from tensor_dropout.sklearn.defaults import auto_alpha, auto_rank

BATCH, STEPS, STOPS = 32, 1500, 6
"""A run may end at any of so many moments, equally far apart: which, the held-out images say."""
WARM_UP = 0.05
WIDTH = 64
"""The channels of the convolutional head."""
SIDE_BY_SIDE = 240
"""How many problems at once."""

Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """What is tuned.

    Attributes:
        rate: of Adam.
        decay: of the weights, decoupled from the gradient: they shrink by ``rate · decay`` of themselves in a step.
        keep: the keep probability of a head with dropout.
        penalty: a factor of the usual α of the squared factors.
    """

    rate: float
    decay: float = 0.0
    keep: float = 1.0
    penalty: float = 0.0


@dataclass(frozen=True)
class Draw:
    """What a pass of training needs beside the parameters.

    Attributes:
        keep: (P, 1, 1), the keep probabilities.
        on: whether anything is dropped.
    """

    keep: Tensor
    on: bool

    def scale(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """x times a mask of this shape, over the keep probability; x itself at test time."""
        if not self.on:
            return x
        return x * (torch.rand(tuple(shape), device=x.device) < self.keep) / self.keep


Forward = Callable[[Parameters, Tensor, Draw], Tensor]


@dataclass(frozen=True)
class Head:
    """A head for maps.

    Attributes:
        draw: (problems, (C, H, W), outputs) -> the parameters to begin with.
        forward: (parameters, x (P, B, C, H, W), draw) -> (P, B, outputs).
        settings: to choose from.
        factors: parameters whose squares are penalized.
    """

    draw: Callable[[int, tuple[int, ...], int], Parameters]
    forward: Forward
    settings: tuple[Setting, ...]
    factors: tuple[str, ...] = ()


def grid(rates: Sequence[float], **others: Sequence[float]) -> tuple[Setting, ...]:
    """All pairs of a rate with a value of the one other setting."""
    ((name, values),) = others.items()
    return tuple(Setting(rate, **{name: value}) for rate in rates for value in values)


def normal(*shape: int, std: float) -> Tensor:
    return std * torch.randn(shape)


# The heads. Coordinates run from -1 to 1, x first, as those of the points do.


def positions(shape: tuple[int, ...]) -> Tensor:
    """(H W, 2)."""
    y, x = (torch.linspace(-1, 1, size) for size in shape[1:])
    return torch.stack([x.expand(len(y), -1), y[:, None].expand(-1, len(x))], -1).flatten(0, 1)


def draw_flattened(problems: int, shape: tuple[int, ...], outputs: int) -> Parameters:
    return {"W": torch.zeros(problems, math.prod(shape), outputs), "b": torch.zeros(problems, 1, outputs)}


def flattened(p: Parameters, x: Tensor, draw: Draw) -> Tensor:
    x = x.flatten(2)
    return torch.baddbmm(p["b"], draw.scale(x, x.shape), p["W"])


def draw_attention(problems: int, shape: tuple[int, ...], outputs: int) -> Parameters:
    points, channels = outputs // 2, shape[0]
    return {
        "query": normal(problems, points, channels, std=channels**-0.5),
        "place": torch.zeros(problems, points, shape[1] * shape[2]),
        "W": torch.zeros(problems, points, channels + 2, 2),
        "b": torch.zeros(problems, points, 1, 2),
    }


def attention(p: Parameters, x: Tensor, draw: Draw) -> Tensor:
    """Each point pools the map by an attention of its own, coordinates beside the channels, and reads that linearly."""
    shape, x = x.shape[2:], x.flatten(3)  # (P, B, C, S)
    scores = torch.einsum("pkc,pbcs->pbks", p["query"], x) + p["place"][:, None]
    share = scores.softmax(-1)
    read = torch.einsum("pbks,pbcs->pbkc", share, x)
    where = share @ positions(tuple(shape)).to(x)
    seen = torch.cat([read, where], -1).transpose(1, 2)  # (P, K, B, C + 2)
    return (seen @ p["W"] + p["b"]).transpose(1, 2).flatten(2)


def draw_soft_argmax(problems: int, shape: tuple[int, ...], outputs: int) -> Parameters:
    points = outputs // 2
    return {
        "conv": normal(problems, points, shape[0], std=shape[0] ** -0.5),
        "place": torch.zeros(problems, points, shape[1] * shape[2]),
        "W": torch.eye(2).expand(problems, points, 2, 2).clone(),
        "b": torch.zeros(problems, points, 1, 2),
    }


def soft_argmax(p: Parameters, x: Tensor, draw: Draw) -> Tensor:
    """A 1×1 convolution gives a heat map for each point; the point is the heat's mean place, shifted and scaled."""
    shape, x = x.shape[2:], x.flatten(3)
    heat = torch.einsum("pkc,pbcs->pbks", p["conv"], x)
    where = (heat + p["place"][:, None]).softmax(-1) @ positions(tuple(shape)).to(x)
    return (where.transpose(1, 2) @ p["W"] + p["b"]).transpose(1, 2).flatten(2)


def draw_convolutions(problems: int, shape: tuple[int, ...], outputs: int) -> Parameters:
    channels, places = shape[0], shape[1] * shape[2]
    return {
        "first": normal(problems, WIDTH, channels * 9, std=(2 / (channels * 9)) ** 0.5),
        "c": torch.zeros(problems, WIDTH, 1),
        "second": normal(problems, WIDTH, WIDTH * 9, std=(2 / (WIDTH * 9)) ** 0.5),
        "d": torch.zeros(problems, WIDTH, 1),
        "W": normal(problems, WIDTH * places, outputs, std=0.1 * (WIDTH * places) ** -0.5),
        "b": torch.zeros(problems, 1, outputs),
    }


def convolutions(p: Parameters, x: Tensor, draw: Draw) -> Tensor:
    """Two 3×3 convolutions with ReLU, dropout, and a linear layer on the flattened map."""
    n, shape = x.shape[:2], x.shape[3:]
    for weight, bias in (("first", "c"), ("second", "d")):
        patches = torch.nn.functional.unfold(x.flatten(0, 1), 3, padding=1).unflatten(0, n)  # (P, B, C 9, S)
        x = torch.einsum("pok,pbks->pbos", p[weight], patches) + p[bias][:, None]
        x = x.relu().unflatten(-1, shape)
    x = x.flatten(2)
    return torch.baddbmm(p["b"], draw.scale(x, x.shape), p["W"])


def draw_cp(problems: int, shape: tuple[int, ...], outputs: int) -> Parameters:
    """As fits begin."""
    layer = td.CPRegression(shape, outputs, auto_rank("cp", shape, (outputs,)), init="normal")
    drawn = []
    for _ in range(problems):
        layer.reset_parameters()
        drawn.append([factor.detach().clone() for factor in layer.factors])
    stacked = {f"U{k}": torch.stack(factors) for k, factors in enumerate(zip(*drawn, strict=True))}
    return {**stacked, "b": torch.zeros(problems, 1, outputs)}


def cp(per_sample: bool) -> Forward:
    """Randomized CP: a mask of the ranks for each batch or for each sample."""

    def forward(p: Parameters, x: Tensor, draw: Draw) -> Tensor:
        z = torch.einsum("pbchw,pcr->pbhwr", x, p["U0"])
        z = torch.einsum("pbhwr,phr,pwr->pbr", z, p["U1"], p["U2"])
        z = draw.scale(z, (len(z), z.shape[1] if per_sample else 1, z.shape[2]))
        return torch.baddbmm(p["b"], z, p["U3"].mT)

    return forward


FACTORS = ("U0", "U1", "U2", "U3")
MASKED = tuple(
    Setting(rate, keep=keep, penalty=penalty)
    for rate in (3e-3, 1e-2)
    for keep, penalty in ((0.7, 1.0), (0.5, 1.0), (0.5, 4.0))
)
CONVOLUTIONAL = tuple(
    Setting(rate, decay=decay, keep=keep)
    for rate in (3e-4, 3e-3)
    for decay, keep in ((0.0, 1.0), (1.0, 1.0), (0.0, 0.5))
)
HEADS = {
    "flattened linear, dropout": Head(draw_flattened, flattened, grid((1e-4, 1e-3), keep=(0.8, 0.5, 0.2))),
    "attention pooling": Head(draw_attention, attention, grid((3e-3, 1e-2), decay=(1.0, 5.0, 10.0))),
    "soft-argmax": Head(draw_soft_argmax, soft_argmax, grid((3e-2, 1e-1), decay=(1e-2, 1e-1, 0.5))),
    "convolutional": Head(draw_convolutions, convolutions, CONVOLUTIONAL),
    "CP, masks per batch": Head(draw_cp, cp(per_sample=False), MASKED, FACTORS),
    "CP, masks per sample": Head(draw_cp, cp(per_sample=True), MASKED, FACTORS),
}


# Training.


@dataclass
class Problem:
    """Rows to train on, a setting, and the rows to predict at every stop."""

    rows: np.ndarray
    new: np.ndarray
    setting: Setting
    predicted: list[np.ndarray] = field(default_factory=list)


class Adam:
    """Adam with numbers of each problem, decay apart from the gradient."""

    def __init__(self, parameters: Parameters, rate: Tensor, decay: Tensor) -> None:
        self.parameters, self.rate, self.decay, self.steps = parameters, rate, decay, 0
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor], factor: float) -> None:
        """One step at this share of the rates."""
        self.steps += 1
        unbias = math.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        for (name, p), g in zip(self.parameters.items(), gradients, strict=True):
            m, v = self.first[name].lerp_(g, 0.1), self.second[name].mul_(0.999).addcmul_(g, g, value=0.001)
            rate = (factor * self.rate).view(-1, *[1] * (p.ndim - 1))
            decay = rate * self.decay.view(rate.shape) if name not in ("b", "c", "d") else 0
            p.sub_(rate * unbias * m / (v.sqrt() + 1e-8) + decay * p)


def rate_factor(step: int, steps: int) -> float:
    """What the rates are multiplied with: they rise, then fall to 0 along a cosine."""
    rising = max(1, round(WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


def train(head: Head, x: Tensor, y: Tensor, problems: Sequence[Problem], *, steps: int, seed: int) -> None:
    """Train all problems, which have equally many rows, and append what each predicts at every stop.

    Args:
        head: of all problems.
        x: (N, C, H, W), on the device.
        y: (N, outputs).
        problems: their rows are those of x.
        steps: how many.
        seed: of the start, the batches and the masks.
    """
    torch.manual_seed(seed)
    device, count = x.device, len(problems)
    rows = torch.from_numpy(np.stack([problem.rows for problem in problems])).to(device)  # (P, n)
    scales = [channel_scale(x[own].flatten(2), x.new_full((len(own),), 1 / len(own))) for own in rows]
    center = torch.stack([scale.mean for scale in scales])[:, None, :, None, None]
    spread = torch.stack([scale.std for scale in scales])[:, None, :, None, None]
    targets = y[rows]  # (P, n, O)
    mean, std = targets.mean(1, keepdim=True), targets.std(1, keepdim=True, unbiased=False)
    std = torch.where(std > 0, std, 1.0)
    targets = (targets - mean) / std

    def numbers(name: str) -> Tensor:
        return torch.tensor([getattr(problem.setting, name) for problem in problems], device=device)

    alpha = numbers("penalty") * auto_alpha(None, rows.shape[1])
    parameters = {
        name: p.to(device).requires_grad_() for name, p in head.draw(count, tuple(x.shape[1:]), y.shape[1]).items()
    }
    optimizer = Adam(parameters, numbers("rate"), numbers("decay"))
    draw = Draw(numbers("keep")[:, None, None], on=True)
    across = torch.arange(count, device=device)[:, None]
    batch = min(BATCH, rows.shape[1])
    stops = {round(steps * (k + 1) / STOPS) - 1 for k in range(STOPS)}
    for step in range(steps):
        picked = torch.rand(rows.shape, device=device).argsort(1)[:, :batch] if batch < rows.shape[1] else None
        chosen = rows if picked is None else rows.gather(1, picked)
        wanted = targets if picked is None else targets[across, picked]
        output = head.forward(parameters, (x[chosen] - center) / spread, draw)
        loss = (output - wanted).square().mean((1, 2))
        for name in head.factors:
            loss = loss + alpha * parameters[name].square().flatten(1).sum(1)
        gradients = torch.autograd.grad(loss.sum(), list(parameters.values()))
        optimizer.step(gradients, rate_factor(step, steps))
        if step in stops:
            _predict(head, parameters, x, problems, (center, spread, mean, std))


@torch.no_grad()
def _predict(
    head: Head, parameters: Parameters, x: Tensor, problems: Sequence[Problem], scales: tuple[Tensor, ...]
) -> None:
    still = Draw(x.new_ones(1), on=False)
    for k, problem in enumerate(problems):
        center, spread, mean, std = (each[k : k + 1] for each in scales)
        own = {name: p[k : k + 1] for name, p in parameters.items()}
        new = (x[torch.from_numpy(problem.new).to(x.device)][None] - center) / spread
        problem.predicted.append((head.forward(own, new, still) * std + mean)[0].double().cpu().numpy())


def run_folds(
    head: Head, images: Images, folds: Sequence[Fold], device: str, *, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Of every fold: settings and the stop chosen on held-out training images, then the error on test images."""
    x, y = torch.from_numpy(images.x).to(device), torch.from_numpy(images.y).to(device)
    trials = [Problem(fold.inner, fold.held, setting) for fold in folds for setting in head.settings]
    _train_all(head, x, y, trials, steps)
    finals, rows = [], []
    for k, fold in enumerate(folds):
        own = trials[k * len(head.settings) : (k + 1) * len(head.settings)]
        errors = [[held_out_error(each, images.y, fold) for each in trial.predicted] for trial in own]
        best, stop = divmod(int(np.argmin(errors)), STOPS)
        finals.append(Problem(fold.train, fold.test, head.settings[best]))
        chosen = vars(head.settings[best]) | {"stop": (stop + 1) / STOPS}
        rows.append({"held_out": float(np.min(errors)), "chosen": chosen, "tried": STOPS * len(own)})
    _train_all(head, x, y, finals, steps)
    for row, problem, fold in zip(rows, finals, folds, strict=True):
        predicted = problem.predicted[round(row["chosen"]["stop"] * STOPS) - 1]
        row["error"] = test_error(predicted, images.y[fold.test])
    return rows


def _train_all(head: Head, x: Tensor, y: Tensor, problems: Sequence[Problem], steps: int) -> None:
    for start in range(0, len(problems), SIDE_BY_SIDE):
        train(head, x, y, problems[start : start + SIDE_BY_SIDE], steps=steps, seed=start)
