"""Training all variants of one stage together, with checkpoints.

Not by the ordinary trainer: one core takes 0.7 s for an epoch of all 25 variants of CP at full size and 2.6 s for
Tucker; one run after another of that trainer take 6.5 s and 8.1 s (in the miniature 8 and 14 times as long).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tensor_dropout.atomic_files import replacing
from tensor_dropout.layers.laws import Bernoulli
from tensor_dropout_lab.experiments.synthetic.objective import (
    Parameters,
    dense_weights,
    exact_loss,
    over_samples,
    printed_loss,
    stochastic_loss,
)
from tensor_dropout_lab.experiments.synthetic.setting import Setting


@dataclass
class Data:
    """Inputs (n, I³) and targets (n,) of unit variance."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def make_data(setting: Setting, device: torch.device) -> Data:
    """``y = ⟨x, W⟩`` with W of CP rank 10 and Gaussian factors, y scaled to unit variance.

    "white" inputs are N(0, 1), as in the paper; "correlated" ones have neighbours correlated by 0.5 along every mode
    and a mean of 0.3.
    """
    generator = torch.Generator().manual_seed(setting.seed)
    size, n = setting.size, setting.n_train + setting.n_test
    factors = torch.randn(1, 3, size, setting.true_rank, generator=generator)
    x = torch.randn(n, size, size, size, generator=generator)
    if setting.inputs == "correlated":
        position = torch.arange(size)
        root = torch.linalg.cholesky(0.5 ** (position[:, None] - position).abs().float())
        x = torch.einsum("nabc,ia,jb,kc->nijk", x, root, root, root) + 0.3
    x = x.flatten(1)
    y = x @ dense_weights([factors])[0]
    y = y / y[: setting.n_train].std()
    x, y = x.to(device), y.to(device)
    return Data(x[: setting.n_train], y[: setting.n_train], x[setting.n_train :], y[setting.n_train :])


def initial_parameters(setting: Setting, variants: int, data: Data) -> Parameters:
    """The same Gaussian start for every variant, scaled so that the mean output at θ = 1 has unit variance."""
    generator = torch.Generator().manual_seed(setting.seed + 1)
    shapes = [(3, setting.size, setting.rank)]
    shapes += [(setting.rank,) * 3] if setting.format == "tucker" else []
    parameters = [torch.randn(1, *shape, generator=generator).to(data.x) for shape in shapes]
    norm = (data.x[:500] @ dense_weights(parameters)[0]).std()
    each = norm ** (-1 / (2 + len(parameters)))  # one share for each of the three factors, and one for the core
    return [(p * each).repeat(variants, *[1] * (p.ndim - 1)) for p in parameters]


def train_stage(setting: Setting, checkpoint: Path, advance: Callable[[int], None]) -> dict[str, Any]:
    """Train all variants of a stage; goes on from ``checkpoint`` if it was made with the same setting.

    Args:
        setting: the stage.
        checkpoint: where the state is kept after every measured epoch.
        advance: called with the number of epochs done since the last call, those of the rate search included.

    Returns:
        A record: the rate that was chosen and why, and for each variant its curves.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = make_data(setting, device)
    kinds = [kind for kind, _ in setting.variants]
    theta = torch.tensor([theta for _, theta in setting.variants], device=device)
    parameters = [p.requires_grad_() for p in initial_parameters(setting, len(kinds), data)]
    state = _resume(setting, checkpoint, device)

    def save() -> None:
        meta = {"setting": asdict(setting), "done": done, "seconds": seconds, "rate": rate, "search": search}
        _save(checkpoint, meta, parameters, optimizer, curves)

    if state is None:
        began = time.perf_counter()
        rate, search = choose_rate(setting, data, advance)
        curves = measure(parameters, data, theta)[None]
        done, seconds = 0, time.perf_counter() - began
        optimizer = make_optimizer(setting, parameters, rate)
        save()
    else:
        done, seconds, rate, search = (state["meta"][key] for key in ("done", "seconds", "rate", "search"))
        curves = state["tensors"]["curves"]
        with torch.no_grad():
            for k, parameter in enumerate(parameters):
                parameter.copy_(state["tensors"][f"parameter.{k}"])
        optimizer = make_optimizer(setting, parameters, rate)
        _restore(optimizer, parameters, state["tensors"])
        advance(setting.search_epochs + done)
    for target in [epoch for epoch in setting.evaluated_epochs if epoch > done]:
        began = time.perf_counter()
        for epoch in range(done, target):
            optimizer.param_groups[0]["lr"] = rate * 0.1 ** (epoch // setting.decay_every)
            _train_epoch(setting, epoch, parameters, optimizer, data, theta)
        curves = torch.cat([curves, measure(parameters, data, theta)[None]])
        seconds += time.perf_counter() - began
        advance(target - done)
        done = target
        save()
    return {
        "epochs": setting.evaluated_epochs,
        "rate": rate,
        "rate_search": search,
        "seconds": round(seconds, 1),
        "device": device.type if device.type == "cpu" else torch.cuda.get_device_name(),
        "variants": [
            {"kind": kind, "theta": t, **{name: finite(curves[:, k, v]) for k, name in enumerate(MEASURED)}}
            for v, (kind, t) in enumerate(setting.variants)
        ],
    }


MEASURED = ("exact_objective", "printed_objective", "test_mse")


def measure(parameters: Parameters, data: Data, theta: Tensor) -> Tensor:
    """For every variant: exact and printed objective on 1,000 training samples, and the test error of the mean."""
    detached = [p.detach() for p in parameters]
    x, y = data.x[:1000], data.y[:1000]
    exact = over_samples(exact_loss, detached, x, y, theta)
    printed = over_samples(printed_loss, detached, x, y, theta)
    scale = theta if len(parameters) == 1 else theta**3
    test = (data.y_test[:, None] - scale * (data.x_test @ dense_weights(detached).mT)).square().mean(0)
    return torch.stack([exact, printed, test])


def choose_rate(
    setting: Setting, data: Data, advance: Callable[[int], None]
) -> tuple[float, list[dict[str, float | None]]]:
    """The smallest learning rate that explains three quarters of y's variance at θ = 1 in ``tune_epochs``.

    The theorem is about the loss at given parameters. Along a path of SGD the mask noise adds an error that grows with
    the rate, so the smallest rate that still learns shows it best. All rates run together; if none gets there, the one
    with the lowest loss is taken.
    """
    rates = setting.rates
    if len(rates) == 1:
        return rates[0], []
    parameters = [p.requires_grad_() for p in initial_parameters(setting, len(rates), data)]
    ones = torch.ones(len(rates), 3, setting.rank, device=data.x.device)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    weights = torch.tensor(rates, device=data.x.device)
    for epoch in range(setting.tune_epochs):
        for rows in batches(setting, epoch, len(data.x)):
            optimizer.zero_grad()
            losses = weights * stochastic_loss(parameters, data.x[rows], data.y[rows], ones)
            losses.nan_to_num(0, 0, 0).sum().backward()
            optimizer.step()
        advance(1)
    theta = torch.ones(len(rates), device=data.x.device)
    losses = over_samples(printed_loss, [p.detach() for p in parameters], data.x, data.y, theta)
    search = [{"rate": rate, "loss": loss} for rate, loss in zip(rates, finite(losses), strict=True)]
    fitting = [rate for rate, loss in zip(rates, losses.tolist(), strict=True) if loss < 0.25]
    best = rates[int(losses.nan_to_num(torch.inf, torch.inf).argmin())]
    return min(fitting, default=best), search


def finite(values: Tensor) -> list[float | None]:
    """As JSON numbers, None where training diverged."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def batches(setting: Setting, epoch: int, n: int) -> tuple[Tensor, ...]:
    """The batches of an epoch: the same for every variant, and the same after an interruption."""
    generator = torch.Generator().manual_seed(1_000_003 * (setting.seed + 1) + epoch)
    return torch.randperm(n, generator=generator).split(setting.batch)


def make_optimizer(setting: Setting, parameters: Parameters, rate: float) -> torch.optim.Optimizer:
    """Both work entry by entry, so variants do not mix."""
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[setting.optimizer](parameters, lr=rate)


def draw_masks(setting: Setting, epoch: int, steps: int, theta: Tensor) -> Tensor:
    """Bernoulli masks (steps, V, 3, R) of an epoch's stochastic variants: each mask seed has a stream of its own."""
    law, per_seed = Bernoulli(), len(setting.thetas)
    streams = []
    for stream in range(setting.mask_seeds):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7_919 * (stream + 1) + 1_000_003 * (setting.seed + 1) + epoch)
            shape = (steps, per_seed, 3, setting.rank)
            streams.append(law.draw(shape, theta[:per_seed, None, None].cpu(), device=torch.device("cpu")))
    return torch.cat(streams, 1).to(theta.device)


def _train_epoch(
    setting: Setting, epoch: int, parameters: Parameters, optimizer: torch.optim.Optimizer, data: Data, theta: Tensor
) -> None:
    # At θ = 1 all three losses are the plain one: no variance to compute.
    variants = list(enumerate(setting.variants))
    exact = [v for v, (kind, t) in variants if kind == "exact" and t < 1]
    printed = [v for v, (kind, t) in variants if kind == "printed" and t < 1]
    sampled = [v for v, _ in variants if v not in exact and v not in printed]
    all_rows = batches(setting, epoch, len(data.x))
    masks = draw_masks(setting, epoch, len(all_rows), theta)
    unmasked = masks.new_ones(len(all_rows), len(sampled) - masks.shape[1], 3, setting.rank)
    masks = torch.cat([masks, unmasked], 1)
    for step, rows in enumerate(all_rows):
        x, y = data.x[rows], data.y[rows]
        optimizer.zero_grad()
        loss = stochastic_loss([p[sampled] for p in parameters], x, y, masks[step]).sum()
        loss = loss + exact_loss([p[exact] for p in parameters], x, y, theta[exact]).sum()
        loss = loss + printed_loss([p[printed] for p in parameters], x, y, theta[printed]).sum()
        loss.backward()
        optimizer.step()


def _save(
    path: Path, meta: dict[str, Any], parameters: Parameters, optimizer: torch.optim.Optimizer, curves: Tensor
) -> None:
    tensors = {f"parameter.{k}": p.detach() for k, p in enumerate(parameters)} | {"curves": curves}
    for k, parameter in enumerate(parameters):
        tensors |= {f"state.{k}.{key}": value for key, value in optimizer.state[parameter].items() if value is not None}
    with replacing(path) as temporary:
        save_file({key: value.contiguous() for key, value in tensors.items()}, temporary, {"meta": json.dumps(meta)})


def _resume(setting: Setting, path: Path, device: torch.device) -> dict[str, Any] | None:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            meta = json.loads(file.metadata()["meta"])
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    return {"meta": meta, "tensors": tensors} if meta["setting"] == json.loads(json.dumps(asdict(setting))) else None


def _restore(optimizer: torch.optim.Optimizer, parameters: Parameters, tensors: dict[str, Tensor]) -> None:
    for k, parameter in enumerate(parameters):
        prefix = f"state.{k}."
        saved = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
        if saved:
            optimizer.state[parameter] = saved
