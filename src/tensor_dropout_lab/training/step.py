"""One update: rows or a batch -> network input -> loss -> gradients -> parameters, eagerly or as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.head_outputs import unwrap
from tensor_dropout.losses import expect
from tensor_dropout_lab.data.base import Data, JointAugment
from tensor_dropout_lab.training.adversarial import attack, find_room
from tensor_dropout_lab.training.config import Config
from tensor_dropout_lab.training.execution import autocast, choose_dtype, choose_memory_format

Fetch = Callable[..., tuple[Tensor, Tensor]]


class TaskLoss(nn.Module):
    """The loss of a task and what is counted beside it.

    Classification: cross-entropy, and how many are right. A target may also be class probabilities (B, K), of which the
    largest counts as right. Regression: mean squared error of the standardized target, and the sum of absolute errors
    in its own unit. Targets that are NaN are missing and do not count, if there may be such.

    Args:
        task: "classification" or "regression".
        mean: of the regression targets of the training examples.
        std: of them.
        label_smoothing: of the cross-entropy.
        may_miss: whether targets of a regression may be missing.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self, task: str, mean: Tensor, std: Tensor, label_smoothing: float = 0.0, may_miss: bool = False
    ) -> None:
        super().__init__()
        self.task, self.label_smoothing, self.may_miss = task, label_smoothing, may_miss
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)

    def forward(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(B, outputs), targets -> mean loss, and the sum over the batch of what is counted."""
        if self.task == "classification":
            loss = F.cross_entropy(outputs, y, label_smoothing=self.label_smoothing)
            return loss, (outputs.argmax(1) == (y if y.ndim == 1 else y.argmax(1))).sum()
        y, known = y.reshape(outputs.shape), self.find_known(y)
        if known is not None:
            return self._measure_known(outputs, y, known)
        loss = F.mse_loss(outputs, ((y - self.mean) / self.std).to(outputs.dtype))
        return loss, (self.std * outputs + self.mean - y).abs().mean(1).sum()

    def find_known(self, y: Tensor) -> Tensor | None:
        """Which targets are there, (B, outputs); None if none can be missing."""
        return ~y.reshape(len(y), -1).isnan() if self.may_miss else None

    def _measure_known(self, outputs: Tensor, y: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        """As ``forward``, over the targets that are there; no shape depends on how many."""
        standardized = ((y - self.mean) / self.std).to(outputs.dtype)
        errors = torch.where(known, outputs - standardized, 0)
        loss = errors.square().sum() / known.sum().clamp(min=1)
        counted = (self.std * errors).abs().sum(1) / known.sum(1).clamp(min=1)
        return loss, counted.sum()


def make_task_loss(data: Data, config: Config) -> TaskLoss:
    """The loss for a data set; a regression target is standardized by the training examples."""
    targets = data.train.targets.double()
    if data.task == "classification":
        return TaskLoss(data.task, torch.zeros(1), torch.ones(1), config.run.label_smoothing)
    columns = targets.reshape(len(targets), -1)
    mean, std = columns.mean(0), columns.std(0, correction=0)
    missing = bool(columns.isnan().any())
    if missing:
        mean = columns.nanmean(0)
        std = (columns - mean).square().nanmean(0).sqrt()
    std = torch.where(std > 0, std, 1.0)
    return TaskLoss(data.task, mean.float(), std.float(), may_miss=missing or isinstance(data.augment, JointAugment))


class Step:
    """One update of a network.

    Args:
        network: what is trained; wrapped (DDP, FSDP) if need be.
        optimizer: of its parameters.
        fetch: from what a step starts from to a stored batch.
        data: the way from a stored batch to network inputs.
        task_loss: the loss.
        config: precision, clipping, averaging.
        device: where everything is.
        speed: "eager"; on a GPU also "graph" (the whole step as one CUDA graph) or "compile" (compiled, then captured).
    """

    def __init__(
        self,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        fetch: Fetch,
        data: Data,
        task_loss: TaskLoss,
        config: Config,
        device: torch.device,
        speed: str = "eager",
    ) -> None:
        self.network, self.optimizer, self.fetch = network, optimizer, fetch
        self.prepare = data.prepare.to(device)
        self.augment = None if data.augment is None else data.augment.to(device).train()
        self.task_loss = task_loss.to(device)
        self.config, self.device = config, device
        self.dtype = choose_dtype(config, device)
        self.memory_format = choose_memory_format(config, data)
        self.average = Average(unwrap(network), config.run.ema) if config.run.ema is not None else None
        self.radius, self.bounds = find_radius(config, data), data.bounds or (0.0, 0.0)
        self.sums = torch.zeros(2, dtype=torch.float64 if device.type == "cpu" else torch.float32, device=device)
        """Sums since they were last set to zero: of the mean losses, and of what is counted."""
        self._update: Callable[..., None] = self.update
        self._eager_steps = _WARM_UP if speed in ("graph", "compile") and device.type == "cuda" else None
        if speed == "compile":
            torch.compiler.reset()  # of runs before it in this process: from the ninth on torch would not compile
            self.run_batch = torch.compile(self.run_batch)  # type: ignore[method-assign]

    def __call__(self, *start: Tensor) -> None:
        """Update the network once."""
        if self._eager_steps is None:
            self.update(*start)
        elif self._eager_steps > 0:
            self._eager_steps -= 1
            _on_side_stream(self.update, *start)
        else:
            if self._update == self.update:
                self._update = Graph(self.update, start, self.optimizer)
            self._update(*start)

    def set_rate(self, factor: float) -> None:
        """Multiply the initial learning rate of every group."""
        for group in self.optimizer.param_groups:
            rate = group["initial_lr"] * factor
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate

    def update(self, *start: Tensor) -> None:
        """Gradients, clipping, the optimizer and the average."""
        self.optimizer.zero_grad(set_to_none=True)
        loss, counted = self.run_batch(*start)
        loss.backward()
        if self.config.optimizer.clip is not None:
            nn.utils.clip_grad_norm_(self.network.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        with torch.no_grad():
            self.sums += torch.stack([loss.detach(), counted.detach()]).to(self.sums.dtype)
            if self.average is not None:
                self.average.update()

    def run_batch(self, *start: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of one batch, and what is counted."""
        with torch.no_grad():
            stored, y = self.fetch(*start)
            x = self.prepare(stored)
            room = None if self.radius is None else find_room(stored, self.prepare, self.radius, self.bounds)
            if isinstance(self.augment, JointAugment):
                x, y = self.augment(x, y)
            elif self.augment is not None:
                x = self.augment(x)
        x = x.to(self.dtype if self.dtype == torch.float64 else torch.float32, memory_format=self.memory_format)
        if room is not None:
            x = attack(x, room, lambda moved: self.compute_loss(unwrap(self.network), moved, y)[0])
        return self.compute_loss(self.network, x, y)

    def compute_loss(self, network: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss of prepared inputs, of one draw of the masks or over all of them, and what is counted."""
        penalty = None
        with autocast(self.device, self.dtype):
            if self.config.run.loss == "expected":
                outputs, penalty = expect(network, x, self.task_loss.task, self.task_loss.find_known(y))
            else:
                outputs = network(x)
        loss, counted = self.task_loss(outputs if self.dtype == torch.float64 else outputs.float(), y)
        return loss if penalty is None else loss + penalty.to(loss.dtype), counted


_WARM_UP = 3  # eager steps before capture, on a side stream, as CUDA graphs ask for; they are steps of the run


def _on_side_stream(function: Callable[..., None], *arguments: Tensor) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(*arguments)
    torch.cuda.current_stream().wait_stream(stream)


class Graph:
    """A function captured as one CUDA graph, with inputs that are copied into its place."""

    def __init__(
        self, function: Callable[..., None], inputs: tuple[Tensor, ...], optimizer: torch.optim.Optimizer
    ) -> None:
        self.inputs = [tensor.clone() for tensor in inputs]
        optimizer.zero_grad(set_to_none=True)
        self.graph = torch.cuda.CUDAGraph()
        # Readers pin memory in other threads meanwhile, which the default mode takes for an error of the capture.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            function(*self.inputs)

    def __call__(self, *inputs: Tensor) -> None:
        """Replay."""
        for place, tensor in zip(self.inputs, inputs, strict=True):
            place.copy_(tensor, non_blocking=True)
        self.graph.replay()


class Average:
    """An exponential moving average of parameters and buffers, for evaluation.

    torch's ``AveragedModel`` asks the device for its counter in every update, which a CUDA graph cannot do.

    Args:
        network: what is averaged.
        decay: how much of the average stays in every step; less in the first ones, ``(1 + t) / (10 + t)``.
    """

    def __init__(self, network: nn.Module, decay: float) -> None:
        self.network, self.decay = network, decay
        self.state = {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}
        first = next(network.parameters())
        self.updates = torch.zeros((), device=first.device)

    @torch.no_grad()
    def update(self) -> None:
        """Take the network's present state into the average."""
        self.updates += 1
        kept = torch.clamp((1 + self.updates) / (10 + self.updates), max=self.decay)
        now = self.network.state_dict()
        for name, tensor in self.state.items():
            if tensor.is_floating_point():
                tensor.lerp_(now[name].detach(), (1 - kept).to(tensor.dtype))
            else:
                tensor.copy_(now[name])


def check_task(config: Config, data: Data) -> None:
    """Refuse what would be ignored.

    Raises:
        TensorDropoutError: if labels are to be smoothed and there are none.
    """
    if data.task == "regression" and config.run.label_smoothing:
        raise TensorDropoutError(f"train: run.label_smoothing is for classes, and {data.name} has none; leave it out")


def find_radius(config: Config, data: Data) -> float | None:
    """The radius of adversarial training in stored units, if it is asked for.

    Raises:
        TensorDropoutError: if the data has no range to take a share of, or its preparation does not say its scale.
    """
    share = config.run.adversarial
    if share is None:
        return None
    if data.bounds is None:
        raise TensorDropoutError(
            f"train: run.adversarial is a share of the inputs' range, and {data.name} has none; leave it out"
        )
    if not hasattr(data.prepare, "measure"):
        raise TensorDropoutError(
            f"train: run.adversarial needs to know how {data.name} scales its inputs, and its preparation "
            f"{type(data.prepare).__name__} has no method measure; use StandardizeImages or StandardizeChannels"
        )
    return share * (data.bounds[1] - data.bounds[0])
