"""Fine-tuning: several settings of one method side by side, on the same batches.

On a GPU a step of this small network is bound by the launches of its kernels, and no kernel of it fills a large GPU. So
the step of all settings is captured as one CUDA graph, with a stream for each setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import tensor_dropout as td
from finetuning.data import Part, points_of, prepare
from tensor_dropout.features.attach import HeadedNetwork
from tensor_dropout.losses import expect
from tensor_dropout.robustness.noise.detail import blur
from tensor_dropout_lab.data.augment_points import MovePoints

BATCH = 32
WARM_UP = 0.1
"""The share of the steps in which the rates rise; then they fall to 0 along a cosine."""
MOVES = {"rotation": 5.0, "zoom": 0.05, "shift": 0.03}
EAGER_STEPS = 3
"""Before the capture, on a side stream, as CUDA graphs ask for; they are steps of the run."""


@dataclass(frozen=True)
class Setting:
    """What is tuned.

    Attributes:
        rate: the learning rate of the backbone and of all biases.
        head_step: the share of itself by which the head's weight moves in a step: see ``td.param_groups``.
    """

    rate: float
    head_step: float


@dataclass(frozen=True)
class Execution:
    """How steps are computed.

    Attributes:
        dtype: of the backbone's arithmetic in training; heads are in float32, predictions in float32 altogether.
        channels_last: the layout of images.
        graph: one CUDA graph for the step of all settings, or eagerly.
        streams: how many settings run side by side.
    """

    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    graph: bool = False
    streams: int = 1


class InTraining(nn.Module):
    """A network that trains under autocast and predicts in float32.

    Args:
        network: any.
        dtype: of the arithmetic in training.
    """

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = network, dtype

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.network(x)
        # A cache of cast weights would outlive a captured graph.
        with torch.autocast(x.device.type, torch.bfloat16, self.dtype == torch.bfloat16, cache_enabled=False):
            return self.network(x)


def group_parameters(network: HeadedNetwork, setting: Setting) -> list[dict]:
    """Groups for Adam: the backbone with the head's bias, and each weight of the head at a rate of its own size."""
    weights = [module.weight for module in network.head.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    if not weights:
        return td.param_groups(network, lr=setting.rate, factor_step=setting.head_step)
    rest = [p for p in network.parameters() if p.requires_grad and not any(p is weight for weight in weights)]
    steps = [setting.head_step * float(weight.detach().square().mean().sqrt()) for weight in weights]
    return [
        {"params": rest, "lr": setting.rate},
        *({"params": [weight], "lr": step} for weight, step in zip(weights, steps, strict=True)),
    ]


def rate_factors(steps: int) -> list[float]:
    """What the rates are multiplied with in every step."""
    rising = max(1, round(WARM_UP * steps))
    return [
        (k + 1) / rising if k < rising else 0.5 * (1 + math.cos(math.pi * (k - rising) / max(1, steps - rising)))
        for k in range(steps)
    ]


def compute_loss(network: nn.Module, x: Tensor, y: Tensor, expected: bool) -> Tensor:
    """Mean squared error over the points that are in the picture, of one draw of masks or its mean over all masks.

    Where no point has left the picture the second is ``td.expected_mse``.
    """
    known = ~y.isnan()
    output, penalty = expect(network, x, "regression", known) if expected else (network(x), 0.0)
    error = torch.where(known, output - y.nan_to_num(), 0)
    return error.square().sum() / known.sum().clamp(min=1) + penalty


class Training:
    """Networks that are trained on the same batches.

    Args:
        networks: each on the device, with a head that is to be trained.
        settings: one for each.
        part: the training images.
        expected: whether the loss is the mean over all masks.
        train_statistics: whether BatchNorm takes the statistics of the batch; else they stay, as in ``eval`` mode.
        steps: how many.
        seed: of the order of the images, of how they are moved, and of the masks.
        execution: how steps are computed.
    """

    def __init__(
        self,
        networks: Sequence[HeadedNetwork],
        settings: Sequence[Setting],
        part: Part,
        *,
        expected: bool,
        train_statistics: bool,
        steps: int,
        seed: int,
        execution: Execution,
    ) -> None:
        self.networks, self.part, self.expected, self.steps = networks, part, expected, steps
        self.device = part.y.device
        self.layout = torch.channels_last if execution.channels_last else torch.contiguous_format
        groups = []
        for network, setting in zip(networks, settings, strict=True):
            network.train()
            network.backbone.train(train_statistics)
            network.backbone = InTraining(network.backbone.to(memory_format=self.layout), execution.dtype)
            groups += group_parameters(network, setting)
        on_gpu = self.device.type == "cuda"
        self.first_rates = torch.tensor([group["lr"] for group in groups], device=self.device)
        self.rates = torch.zeros_like(self.first_rates)
        for group, rate in zip(groups, self.rates.unbind(), strict=True):
            group["lr"] = rate  # a view: one kernel sets them all
        self.optimizer = torch.optim.Adam(groups, fused=True, capturable=on_gpu)
        self.scale = float(part.y.var(0).mean())
        self.move = MovePoints(2, points_of(part.y), **MOVES).to(self.device).train()
        self.graph = execution.graph and on_gpu
        self.streams = [torch.cuda.Stream() for _ in range(min(execution.streams, len(networks)))] if on_gpu else []
        self.seed = seed

    def run(self) -> None:
        """All steps."""
        torch.manual_seed(self.seed)
        order = order_batches(len(self.part), self.steps, self.seed).to(self.device)
        step: Callable[[Tensor, Tensor], None] = self.update
        for k, factor in enumerate(rate_factors(self.steps)):
            torch.mul(self.first_rates, factor, out=self.rates)
            x, y = self.move(prepare(self.part.images[order[k]]), self.part.y[order[k]])
            x = x.contiguous(memory_format=self.layout)
            if self.graph and k == EAGER_STEPS:
                step = self.capture(x, y)
            if self.graph and k < EAGER_STEPS:
                with self._beside([torch.cuda.Stream()], 0):
                    step(x, y)
            else:
                step(x, y)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        for network in self.networks:
            network.backbone = network.backbone.network
            network.eval()

    def update(self, x: Tensor, y: Tensor) -> None:
        """One step of every network."""
        self.optimizer.zero_grad(set_to_none=True)
        for k, network in enumerate(self.networks):
            with self._beside(self.streams, k, join=False):
                (compute_loss(network, x, y, self.expected) / self.scale).backward()
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)
        self.optimizer.step()

    def capture(self, x: Tensor, y: Tensor) -> Callable[[Tensor, Tensor], None]:
        """The step as one CUDA graph; nothing is computed yet."""
        places = x.clone(), y.clone()
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self.update(*places)

        def replay(*batch: Tensor) -> None:
            for place, tensor in zip(places, batch, strict=True):
                place.copy_(tensor)
            graph.replay()

        return replay

    @contextmanager
    def _beside(self, streams: Sequence, k: int, join: bool = True) -> Iterator[None]:
        """On one of the streams, after what was launched before; on a CPU at once."""
        if not streams:
            yield
            return
        stream = streams[k % len(streams)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        if join:
            torch.cuda.current_stream().wait_stream(stream)


def order_batches(n: int, steps: int, seed: int) -> Tensor:
    """(steps, batch) rows; every image once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    batch = min(BATCH, n)
    epochs = -(-steps * batch // n)
    rows = torch.cat([torch.randperm(n, generator=generator) for _ in range(epochs)])
    return rows[: steps * batch].view(steps, batch)


@torch.no_grad()
def predict(network: nn.Module, images: Tensor, batch: int = 128) -> Tensor:
    """Predictions in float32, ``eval`` mode."""
    network.eval()
    return torch.cat([network(prepare(part)) for part in images.split(batch)])


def mean_distance(predicted: Tensor, true: Tensor) -> float:
    """Mean distance between predicted and true points in % of the image side."""
    difference = (predicted - true).double().view(len(true), -1, 2)
    return 100 * float(difference.norm(dim=-1).mean())


def measure(network: nn.Module, part: Part) -> float:
    """The error on a part."""
    return mean_distance(predict(network, part.images), part.y)


DISTURBANCES: dict[str, Callable[[Tensor], Tensor]] = {
    "noise 0.05": lambda x: add_noise(x, 0.05),
    "noise 0.1": lambda x: add_noise(x, 0.1),
    "blur 1": lambda x: blur(x, 1.0),
    "blur 2": lambda x: blur(x, 2.0),
}
"""Of images in [0, 1]: Gaussian noise of this standard deviation, Gaussian blur of so many pixels."""


def add_noise(x: Tensor, std: float) -> Tensor:
    """The same noise for every method."""
    generator = torch.Generator(x.device).manual_seed(0)
    return x + std * torch.randn(x.shape, generator=generator, device=x.device)


def measure_disturbed(network: nn.Module, part: Part) -> dict[str, float]:
    """The errors on a part whose images are noisy or blurred; they are bytes again before the network sees them."""
    errors = {}
    for name, disturb in DISTURBANCES.items():
        predicted = [
            predict(network, (disturb(rows / 255).clamp(0, 1) * 255).round().to(torch.uint8))
            for rows in part.images.split(128)
        ]
        errors[name] = mean_distance(torch.cat(predicted), part.y)
    return errors
