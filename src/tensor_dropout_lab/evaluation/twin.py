"""A substitute that imitates a target's answers, for attacks by way of another network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tensor_dropout.progress import show_progress
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab.nets import build_net


def fit_twin(
    target: Target, x: Tensor, *, epochs: int = 20, noise: float = 0.05, net: str = "resnet-mini", seed: int = 0
) -> Target:
    """Train a substitute that imitates the target's answers, without its gradients (Papernot et al., 2017).

    Args:
        target: what is imitated.
        x: (N, C, *size) within the bounds; no true labels are used.
        epochs: passes over x; the learning rate follows one cycle.
        noise: uniform noise on x, as a share of the range (of the spread of x if there are no bounds).
        net: the architecture; its head is pooled and fully connected.
        seed: of everything random.
    """
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        torch.manual_seed(seed)
        answers = target.predict(x).output.float()
        centre, spread = answers.mean(0), answers.std(0).clamp(min=1e-6)
        twin = build_net(net, outputs=answers.shape[1], input_shape=tuple(x.shape[1:])).to(x.device)
        optimizer = torch.optim.AdamW(twin.parameters(), lr=3e-3, weight_decay=1e-3)
        batches = -(-len(x) // 64)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=epochs * batches)
        width = noise * _width(target, x)
        twin.train()
        with show_progress("training a twin", epochs) as advance:
            for _ in range(epochs):
                for rows in torch.randperm(len(x), device=x.device).chunk(batches):
                    z = target.clip(x[rows] + width * (2 * torch.rand_like(x[rows]) - 1))
                    outputs = twin(target.prepare(z).float())
                    if target.task == "classification":
                        loss = F.cross_entropy(outputs, answers[rows])
                    else:
                        loss = F.mse_loss(outputs, (answers[rows] - centre) / spread)
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
                advance(1)
    model: nn.Module = twin if target.task == "classification" else nn.Sequential(twin, _Rescale(centre, spread))
    return Target(
        model.eval(),
        bounds=target.bounds,
        prepare=lambda z: target.prepare(z).float(),
        task=target.task,
        batch=target.batch,
    )


class _Rescale(nn.Module):
    centre: Tensor
    spread: Tensor

    def __init__(self, centre: Tensor, spread: Tensor) -> None:
        super().__init__()
        self.register_buffer("centre", centre)
        self.register_buffer("spread", spread)

    def forward(self, outputs: Tensor) -> Tensor:
        return outputs * self.spread + self.centre


def _width(target: Target, x: Tensor) -> float:
    low, high = target.bounds
    return high - low if high - low < float("inf") else float(x.std())
