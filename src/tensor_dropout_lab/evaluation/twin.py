"""A substitute that imitates a target's answers, for attacks by way of another network."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.progress import show_progress
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab.data.base import Data, TensorSplit
from tensor_dropout_lab.training.config import Config, NetConfig, OptimizerConfig, RunConfig, ScheduleConfig
from tensor_dropout_lab.training.loop import Trainer, build_network
from tensor_dropout_lab.training.processes import Process
from tensor_dropout_lab.training.runs import RunFolder
from tensor_dropout_lab.training.show import Reporter

_BATCH = 64


def fit_twin(
    target: Target, x: Tensor, *, epochs: int = 20, noise: float = 0.05, net: str = "resnet-mini", seed: int = 0
) -> Target:
    """Train a substitute that imitates the target's answers, without its gradients (Papernot et al., 2017).

    It is an ordinary training run (AdamW, one cycle of the learning rate) whose targets are the target's answers: class
    probabilities, or numbers.

    Args:
        target: what is imitated.
        x: (N, C, *size) within the bounds; no true labels are used.
        epochs: passes over x.
        noise: uniform noise on x, as a share of the range (of the spread of x if there are no bounds).
        net: the architecture; its head is pooled and fully connected.
        seed: of everything random.
    """
    batches = math.ceil(len(x) / _BATCH)
    config = Config(
        net=NetConfig(name=net, head="fc"),
        optimizer=OptimizerConfig(name="adamw", lr=3e-3, weight_decay=1e-3),
        schedule=ScheduleConfig(name="one-cycle"),
        run=RunConfig(
            epochs=epochs,
            batch=len(x) // batches,
            seed=seed,
            precision="float32",
            speed="eager",
            checkpoint_epochs=epochs,
        ),
    )
    with (
        torch.random.fork_rng(devices=[x.device] if x.is_cuda else []),
        tempfile.TemporaryDirectory() as folder,
        show_progress("training a twin", epochs) as advance,
    ):
        torch.manual_seed(seed)
        answers = target.predict(x).output.float()
        data = Data(
            name="twin",
            task=target.task,
            train=TensorSplit(x, answers, [str(k) for k in range(len(x))]),
            validation=None,
            test=None,
            input_shape=tuple(x.shape[1:]),
            outputs=answers.shape[1],
            augment=_Disturb(target, noise * _find_width(target, x)),
        )
        process = Process(0, 1, x.device)
        reporter = _Epochs(config, data, lambda: advance(1))
        trainer = Trainer(config, data, build_network(config, data), RunFolder(Path(folder)), process, reporter)
        trainer.fit()
    return Target(
        trainer.finished_network().eval(),
        bounds=target.bounds,
        prepare=lambda z: target.prepare(z).float(),
        task=target.task,
        batch=target.batch,
    )


class _Disturb(nn.Module):
    """Uniform noise on inputs, which stay within the target's bounds and are then prepared as it prepares them."""

    def __init__(self, target: Target, width: float) -> None:
        super().__init__()
        self.target, self.width = target, width

    def forward(self, x: Tensor) -> Tensor:
        noisy = x + self.width * (2 * torch.rand_like(x) - 1)
        return self.target.prepare(self.target.clip(noisy)).float()


class _Epochs(Reporter):
    """Shows nothing but that an epoch is done."""

    def __init__(self, config: Config, data: Data, advance: Callable[[], None]) -> None:
        super().__init__(config, data, show=False)
        self._advance = advance

    def finish_epoch(self, line: dict[str, Any]) -> None:
        self._advance()


def _find_width(target: Target, x: Tensor) -> float:
    low, high = target.bounds
    return high - low if high - low < math.inf else float(x.std())
