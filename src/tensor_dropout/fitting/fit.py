"""Fit a tensor regression to data by minimizing its exact expected loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tensor_dropout.fitting.lbfgs import minimize
from tensor_dropout.fitting.objective import ExpectedLoss, Projection, Task
from tensor_dropout.fitting.statistics import Axes, Scale, channel_scale, principal_axes, target_scale, to_axes
from tensor_dropout.layers.regression import TensorRegression

MAX_ITER = 150
TOL = 5e-3


@dataclass(frozen=True)
class Fit:
    """How a fit ended.

    Attributes:
        loss_curve: the objective after each iteration, of standardized targets.
        n_iter: the number of iterations.
        converged: whether the objective stood still.
        interrupted: whether the user stopped it.
    """

    loss_curve: list[float]
    n_iter: int
    converged: bool
    interrupted: bool


class Prepared:
    """Features and targets as the solver wants them; made once, used for any number of settings.

    Args:
        x: (n, C, *space), of the working precision.
        y: (n, *output_shape), NaN where missing; for classification class probabilities (n, O).
        weights: (n,), not negative; None for equal ones.
        task: "regression" or "classification".
    """

    def __init__(self, x: Tensor, y: Tensor, weights: Tensor | None, task: Task) -> None:
        n = len(x)
        self.task: Task = task
        self.weights = x.new_full((n,), 1 / n) if weights is None else weights.to(x) / weights.sum()
        flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
        self.scale: Scale = channel_scale(flat, self.weights)
        self.axes: Axes | None = principal_axes(flat, self.scale, self.weights)
        turned = to_axes(flat, self.scale, self.axes)
        self.projection = Projection(turned.view(len(turned), n, *x.shape[2:]))
        self.target = target_scale(y, self.weights) if task == "regression" else None
        self.y = y if self.target is None else (y - self.target.mean) / self.target.std


def fit(
    layer: TensorRegression,
    prepared: Prepared,
    *,
    alpha: float,
    start: Tensor | None = None,
    max_iter: int = MAX_ITER,
    tol: float = TOL,
    seed: int | None = None,
    report: Callable[[int, float], None] | None = None,
) -> tuple[Fit, Tensor]:
    """Minimize ``expected loss + α Σ ‖factors‖²`` and fill the layer, so that it takes features as they came.

    Args:
        layer: filled in place; its dropout says θ, the law and the modes.
        prepared: the data.
        alpha: the weight of the squared norms, in units of the standardized targets.
        start: where to begin, from an earlier fit of the same data and format; None draws a start.
        max_iter: the most iterations.
        tol: the relative decrease over ten iterations at which the fit ends.
        seed: of the start; None takes torch's generator.
        report: called after each iteration with its number and the objective.

    Returns:
        How it ended, and where: a start for other settings.
    """
    theta = None if layer.dropout is None else layer.dropout.theta.detach().to(prepared.weights.device).reshape(1)
    device = prepared.weights.device
    loss = ExpectedLoss(
        layer,
        prepared.projection,
        prepared.y,
        prepared.weights.unsqueeze(0),
        torch.tensor([alpha], dtype=torch.float64, device=device),
        theta,
        None if prepared.axes is None else prepared.axes.stretch.unsqueeze(0),
        prepared.task,
    )
    if start is None:
        start = draw_start(layer, loss, [prepared.axes], [prepared.scale], [seed])
    listen = None if report is None else lambda iteration, f: report(iteration, float(f[0]))
    ended = minimize(loss, start, max_iter=max_iter, tol=tol, report=listen)
    fill(layer, loss.parameters(ended.z)[0], prepared.scale, prepared.axes, prepared.target)
    result = Fit(ended.curve[:, 0].tolist(), int(ended.n_iter[0]), bool(ended.converged[0]), ended.interrupted)
    return result, ended.z


def draw_start(
    layer: TensorRegression,
    loss: ExpectedLoss,
    axes: list[Axes | None],
    scales: list[Scale],
    seeds: list[int | None],
) -> Tensor:
    """Random parameters for each problem, the same for equal seeds, in the coordinates of its features."""
    starts = []
    for own_axes, scale, seed in zip(axes, scales, seeds, strict=True):
        fresh = copy.deepcopy(layer)
        fresh.init = "normal"
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            fresh.to("cpu").reset_parameters()
        fresh.to(scale.std)
        parameters = dict(fresh.named_parameters())
        name, axis = layer.channel_parameter
        U = parameters[name].detach().movedim(axis, 0).flatten(1)
        if own_axes is not None:
            basis = own_axes.basis * scale.std[:, None]  # (C, r), of standardized channels
            U = (basis.mT @ U) / own_axes.stretch.square()[:, None]
        starts.append(loss.pack(U.unsqueeze(0), {n: parameters[n].detach().unsqueeze(0) for n in loss.others}))
    return torch.cat(starts)


@torch.no_grad()
def fill(
    layer: TensorRegression, found: dict[str, Tensor], scale: Scale, axes: Axes | None, target: Scale | None
) -> None:
    """Write what was found for standardized data into a layer that takes and gives data as they came."""
    channels, channel_axis = layer.channel_parameter
    found = dict(found)
    across = [-1 if n == channel_axis else 1 for n in range(layer.get_parameter(channels).ndim)]
    if axes is None:
        found[channels] = found[channels] / scale.std.view(across)
    else:
        found[channels] = torch.tensordot(axes.basis, found[channels], dims=([1], [channel_axis])).movedim(
            0, channel_axis
        )
    for name, parameter in layer.named_parameters():
        parameter.copy_(found[name])
    layer.set_center(scale.mean)
    if target is not None:
        layer.scale_outputs_(target.std)
        if layer.bias is not None:
            layer.bias.mul_(target.std).add_(target.mean)
