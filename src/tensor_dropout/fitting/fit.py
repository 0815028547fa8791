"""Fit a tensor regression to data by minimizing its exact expected loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tensor_dropout.fitting.lbfgs import minimize
from tensor_dropout.fitting.objective import ExpectedLoss, Projection, Task
from tensor_dropout.fitting.statistics import (
    Axes,
    Scale,
    StoredBlocks,
    TargetScale,
    channel_scale,
    identity_axes,
    pad_axes,
    principal_axes,
    rounded,
    target_scale,
    to_axes,
)
from tensor_dropout.layers.regression import TensorRegression

MAX_ITER = 150
TOL = 5e-3
MADE_AT_ONCE = 2**28
"""How many numbers many problems make of a block of features."""


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
        x: (n, C, *space); half precision and memory-mapped features are converted block by block.
        y: (n, *output_shape), NaN where missing; for classification class probabilities (n, O).
        weights: (n,), not negative; None for equal ones.
        task: "regression" or "classification".
        batch_size: how many samples are held in working precision; the features are then read anew in each iteration,
            and may be larger than memory. None holds all of them.
    """

    def __init__(self, x: Tensor, y: Tensor, weights: Tensor | None, task: Task, batch_size: int | None = None) -> None:
        n = len(x)
        self.task: Task = task
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        equal = torch.full((n,), 1 / n, dtype=dtype, device=x.device)
        self.weights = equal if weights is None else (weights.double() / weights.double().sum()).to(equal)
        flat = x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)
        self.scale: Scale = channel_scale(flat, self.weights, own_units=x.ndim == 2)
        self.axes: Axes | None = principal_axes(flat, self.scale, self.weights)
        if batch_size is None:
            blocks = to_axes(flat, self.scale, self.axes)
            self.projection = Projection([block.view(*block.shape[:2], *x.shape[2:]) for block in blocks])
        else:
            basis = (self.axes or identity_axes(self.scale)).basis
            self.projection = Projection(StoredBlocks(x, batch_size, dtype), basis[None], self.scale.mean[None])
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
    eliminate: bool = True,
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
        eliminate: solve for the output parameter where that is possible, instead of searching it.
        report: called after each iteration with its number and the objective.

    Returns:
        How it ended, and where: a start for other settings.
    """
    theta = None if layer.dropout is None else layer.dropout.theta.detach().to(prepared.weights.device).reshape(1)
    device = prepared.weights.device
    loss = ExpectedLoss(
        layer,
        prepared.projection,
        prepared.y.unsqueeze(0),
        prepared.weights.unsqueeze(0),
        torch.tensor([alpha], dtype=torch.float64, device=device),
        theta,
        None if prepared.axes is None else prepared.axes.stretch.unsqueeze(0),
        prepared.task,
        eliminate,
    )
    if start is None:
        start = draw_start(layer, loss, [prepared.axes], [prepared.scale], [seed])
    listen = None if report is None else lambda iteration, f, z: report(iteration, float(f[0]))
    ended = minimize(loss, start, max_iter=max_iter, tol=tol, report=listen)
    found, folded = loss.parameters(ended.z)[0], prepared.projection.basis is not None
    fill(layer, found, prepared.scale, None if folded else prepared.axes, prepared.target, folded=folded)
    result = Fit(ended.curve[:, 0].tolist(), int(ended.n_iter[0]), bool(ended.converged[0]), ended.interrupted)
    return result, ended.z


@dataclass(frozen=True)
class Setting:
    """One problem of :func:`fit_many`: which samples it sees, and its two numbers."""

    weights: Tensor
    theta: float
    alpha: float
    seed: int


def fit_many(
    layer: TensorRegression,
    x: Tensor,
    y: Tensor,
    settings: list[Setting],
    task: Task,
    *,
    max_iter: int = MAX_ITER,
    tol: float = TOL,
    eliminate: bool = True,
    report: Callable[[int], None] | None = None,
) -> list[tuple[TensorRegression, Fit]]:
    """Many fits of one format and rank in one program that reads the features once: for a GPU.

    Each problem has its own samples, standardization, θ and α. As many run side by side as memory holds.

    Args:
        layer: with a dropout, also for θ = 1; it is copied for every problem.
        x: (n, C, *space), on the GPU.
        y: (n, *output_shape).
        settings: the problems; those of equal ``weights`` (the same object) share a standardization.
        task: "regression" or "classification".
        max_iter: the most iterations.
        tol: as in :func:`fit`.
        eliminate: as in :func:`fit`.
        report: called with the number of problems that were finished.

    Returns:
        A filled layer and how its fit ended, for each problem.
    """
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    flat = (x.flatten(2) if x.ndim > 2 else x.unsqueeze(-1)).to(dtype)
    known: dict[int, tuple[Scale, Axes, TargetScale | None]] = {}
    for setting in settings:
        if id(setting.weights) not in known:
            weights = setting.weights.to(flat)
            scale = channel_scale(flat, weights, own_units=x.ndim == 2)
            axes = principal_axes(flat, scale, weights) or identity_axes(scale)
            known[id(setting.weights)] = (scale, axes, target_scale(y, weights) if task == "regression" else None)
    done: list[tuple[TensorRegression, Fit]] = []
    made = first_width(layer) * flat[0, 0].numel()  # of one sample, by one problem
    side_by_side = min(len(settings), _side_by_side(layer, made * len(x), x.device))
    rows = flat.split(max(1, MADE_AT_ONCE // (side_by_side * made)))
    blocks = [part.movedim(1, 0).contiguous().view(-1, len(part), *x.shape[2:]) for part in rows]
    for start in range(0, len(settings), side_by_side):
        group = settings[start : start + side_by_side]
        done += _fit_group(layer, blocks, rounded(y, dtype), group, known, task, max_iter, tol, eliminate)
        if report is not None:
            report(len(group))
    return done


def first_width(layer: TensorRegression) -> int:
    """K, how many numbers the channels' parameter makes of each position."""
    name, axis = layer.channel_parameter
    parameter = layer.get_parameter(name)
    return parameter.numel() // parameter.shape[axis]


def _side_by_side(layer: TensorRegression, made: int, device: torch.device) -> int:
    """How many problems fit into half of the free memory; ``made`` numbers are kept of the features by each."""
    if device.type != "cuda":
        return 64
    searched = sum(each.numel() for each in layer.parameters())
    return max(1, int(torch.cuda.mem_get_info(device)[0] / 2 / (4 * (2 * made + 40 * searched))))


def _fit_group(
    layer: TensorRegression,
    blocks: list[Tensor],
    y: Tensor,
    group: list[Setting],
    known: dict[int, tuple[Scale, Axes, TargetScale | None]],
    task: Task,
    max_iter: int,
    tol: float,
    eliminate: bool,
) -> list[tuple[TensorRegression, Fit]]:
    own = [known[id(setting.weights)] for setting in group]
    r = max(axes.stretch.numel() for _, axes, _ in own)
    axes: list[Axes] = [pad_axes(each, r) for _, each, _ in own]
    projection = Projection(
        blocks,
        torch.stack([each.basis for each in axes]),
        torch.stack([scale.mean for scale, _, _ in own]),
    )
    targets = y.unsqueeze(0)
    if task == "regression":
        targets = torch.stack([(y - target.mean) / target.std for _, _, target in own if target is not None])
    as_column = lambda values: torch.tensor(values, dtype=torch.float64, device=y.device)  # noqa: E731
    loss = ExpectedLoss(
        layer,
        projection,
        targets,
        torch.stack([setting.weights.to(blocks[0]) for setting in group]),
        as_column([setting.alpha for setting in group]),
        as_column([setting.theta for setting in group]).float(),
        torch.stack([each.stretch for each in axes]),
        task,
        eliminate,
    )
    start = draw_start(layer, loss, list(axes), [scale for scale, _, _ in own], [setting.seed for setting in group])
    ended = minimize(loss, start, max_iter=max_iter, tol=tol)
    if ended.interrupted:
        raise KeyboardInterrupt
    fits = []
    for p, found in enumerate(loss.parameters(ended.z)):
        filled = copy.deepcopy(layer)
        fill(filled, found, own[p][0], None, own[p][2], folded=True)
        if filled.dropout is not None:
            filled.dropout.theta.fill_(group[p].theta)
        curve = ended.curve[: int(ended.n_iter[p]) + 1, p].tolist()
        fits.append((filled, Fit(curve, int(ended.n_iter[p]), bool(ended.converged[p]), False)))
    return fits


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
    layer: TensorRegression,
    found: dict[str, Tensor],
    scale: Scale,
    axes: Axes | None,
    target: TargetScale | None,
    *,
    folded: bool = False,
) -> None:
    """Write what was found for standardized data into a layer that takes and gives data as they came.

    ``folded``: the channels' parameter is one of centred features already.
    """
    channels, channel_axis = layer.channel_parameter
    found = dict(found)
    across = [-1 if n == channel_axis else 1 for n in range(layer.get_parameter(channels).ndim)]
    if axes is not None:
        found[channels] = torch.tensordot(axes.basis, found[channels], dims=([1], [channel_axis])).movedim(
            0, channel_axis
        )
    elif not folded:
        found[channels] = found[channels] / scale.std.view(across)
    for name, parameter in layer.named_parameters():
        parameter.copy_(found[name])
    layer.set_center(scale.mean)
    if target is not None:
        layer.scale_outputs_(*target.modes)
        if layer.bias is not None:
            layer.bias.mul_(target.std).add_(target.mean)
