"""Regression: every method of the plan on the fits of a cell, held out and new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from intervals import Data
from torch import Tensor

from tensor_dropout.calibration.conformal import conformal_quantile
from tensor_dropout.calibration.leverage import output_features
from tensor_dropout.calibration.regression import calibrate_errors
from tensor_dropout.sklearn import TensorRegressor
from uncertainty.fits import Clock, Fits, Found, View, fit_tensor
from uncertainty.last_layers import QUANTILES, Predicted, fit_laplace, fit_quantiles, fit_vbll, solve_ridge
from uncertainty.scores import LEVELS, Ends, normal_ends, pinball, score_numbers

DRAWS, MEMBERS, NOISE_RANK = 32, 5, 16
OURS, CONSTANT, ENSEMBLE, NOISE = "leverage", "constant", "ensemble of five", "noise by the layer"
LAPLACE = {"full": "Laplace, full", "kron": "Laplace, Kronecker", "diag": "Laplace, diagonal"}
QUANTILE, VBLL, LAST = "quantile regression", "VBLL", "last layer, constant"
MASKS, DRAWN = "masks, exact", "Monte-Carlo, 32 draws"
METHODS = (OURS, CONSTANT, MASKS, DRAWN, ENSEMBLE, NOISE, *LAPLACE.values(), VBLL, QUANTILE, LAST)
PENALTIES = (0.01, 0.1, 1.0, 10.0)
HEAD, MAPS = "features of the head", "maps"
SETTINGS = tuple(product((HEAD, MAPS), PENALTIES))
WEIGHTS = ((1.0, 50), (1.0, 300), (3.0, 50), (3.0, 300))
"""Of VBLL: the weight of its regularizer, times the samples, and steps."""
ALPHAS = (1.0, 4.0, 16.0, 64.0)


# Of the tensor head.


def predict_each(fits: Fits, predict: Callable[[View], Predicted]) -> Found:
    """By every fit, without a setting."""
    with torch.no_grad():
        return Found(fits.hold_out([predict(view) for view in fits.folds]), predict(fits.full))


def plain(view: View, variance: Tensor) -> Predicted:
    """The mean network, and a variance."""
    mean = view.layer(view.x_new).detach().double().view(len(view.x_new), -1)
    variance = variance.detach().double().reshape(mean.shape)
    return Predicted(mean, variance, torch.zeros_like(mean))


def by_leverage(view: View) -> Predicted:
    return plain(view, view.leverage.measure(view.layer, view.x_new))


def by_constant(view: View) -> Predicted:
    return plain(view, torch.ones(len(view.x_new), view.y.shape[1]))


def by_masks(view: View) -> Predicted:
    return plain(view, view.layer.moments(view.x_new).variance)


def by_draws(view: View) -> Predicted:
    """Masks of every sample by itself."""
    torch.manual_seed(0)
    x, layer = view.x_new, view.layer
    draws = torch.stack([layer.regress(x, layer.draw_masks(len(x))).double().view(len(x), -1) for _ in range(DRAWS)])
    return Predicted(draws.mean(0), draws.var(0), torch.zeros_like(draws[0]))


def by_members(view: View) -> Predicted:
    """Four more seeds of the same fit."""
    x, y = view.x.numpy(), view.y.float().numpy()
    members = [view.layer(view.x_new).double().view(len(view.x_new), -1)]
    for seed in range(1, MEMBERS):
        found = TensorRegressor(random_state=seed).fit(x, y).predict(view.x_new.numpy())
        members.append(torch.from_numpy(found).double().view(len(view.x_new), -1))
    stacked = torch.stack(members)
    return Predicted(stacked.mean(0), stacked.var(0), torch.zeros_like(stacked[0]))


def fit_noise(fits: Fits, base: Found) -> Found:
    """The log of an image's mean squared held-out error by a second tensor regression, cross-fitted over the folds."""
    errors = fits.y - base.held.mean
    rms = errors.square().mean(0).sqrt()
    target = (errors / rms).square().mean(1).clamp(min=1e-6).log()
    x, best, losses = fits.full.x.numpy(), None, []
    for factor in ALPHAS:
        held = torch.zeros_like(target)
        for view in fits.folds:
            train = np.setdiff1d(np.arange(len(x)), view.rows)
            held[view.rows] = predict_log(x[train], target[train], x[view.rows], factor)
        losses.append(float((held - target).square().mean()))
        if losses[-1] == min(losses):
            best = held, factor
    assert best is not None
    new = predict_log(x, target, fits.full.x_new.numpy(), best[1])
    shift = torch.logsumexp(best[0], 0) - np.log(len(x))  # so that the mean of the variances is that of the errors
    parts = [
        Predicted(base_part.mean, (log - shift).exp()[:, None] * rms.square(), torch.zeros_like(base_part.mean))
        for base_part, log in ((base.held, best[0]), (base.new, new))
    ]
    return Found(*parts, best[1])


def predict_log(x: np.ndarray, y: Tensor, x_new: np.ndarray, factor: float) -> Tensor:
    model = TensorRegressor(rank=NOISE_RANK, alpha=0.04 / len(x) * factor, random_state=0)
    return torch.from_numpy(model.fit(x, y.float().numpy()).predict(x_new)).double()


# Last layers on the features of the tensor head.


@dataclass(frozen=True)
class Inputs:
    """Features and targets of a fit, standardized, and the units of the targets."""

    z: Tensor
    y: Tensor
    z_new: Tensor
    center: Tensor
    scale: Tensor


def read_features(view: View) -> dict[str, Inputs]:
    """Of the head: what its last factor multiplies, in expectation over the masks. Of the maps: all that they span."""
    with torch.no_grad():
        z, z_new = (output_features(view.layer, x)[0][:, 0].double() for x in (view.x, view.x_new))
    mean, std = z.mean(0), z.std(0)
    std = std.clamp(min=1e-6 * float(std.max()))
    center, scale = view.y.mean(0), view.y.std(0).clamp(min=1e-12)
    y = (view.y - center) / scale
    flat, flat_new = span_maps(view.x, view.x_new)
    return {
        HEAD: Inputs((z - mean) / std, y, (z_new - mean) / std, center, scale),
        MAPS: Inputs(flat, y, flat_new, center, scale),
    }


def span_maps(x: Tensor, x_new: Tensor) -> tuple[Tensor, Tensor]:
    """Principal components of flattened maps with standardized channels, all of them; their mean square is 1."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean, std = x.double().mean(axes, keepdim=True), x.double().std(axes, keepdim=True).clamp(min=1e-12)
    flat, flat_new = (((part.double() - mean) / std).flatten(1) for part in (x, x_new))
    flat, flat_new = flat - flat.mean(0), flat_new - flat.mean(0)
    spectrum, vectors = torch.linalg.eigh(flat @ flat.mT)
    kept = spectrum > 1e-9 * spectrum[-1]
    lengths, vectors = spectrum[kept].sqrt(), vectors[:, kept]
    unit = (spectrum[kept].mean() / len(x)).sqrt()
    return vectors * lengths / unit, flat_new @ (flat.mT @ (vectors / lengths)) / unit


Setting = tuple[str, Any]
Fit = Callable[[Inputs, Any], Predicted]
Loss = Callable[[Predicted, Tensor], float]


def choose(fits: Fits, inputs: Sequence[dict[str, Inputs]], fit: Fit, settings: Sequence[Setting], loss: Loss) -> Found:
    """The features and number with the smallest loss of the held-out samples.

    Args:
        fits: of the cell.
        inputs: of the folds, and of the fit on all.
        fit: a last layer.
        settings: what it may choose from.
        loss: of predictions and standardized targets.
    """
    tried = []
    for kind, number in settings:
        parts, total = [], 0.0
        for view, each in zip(fits.folds, inputs, strict=False):
            own = each[kind]
            parts.append(fit(own, number))
            total += len(view.rows) * loss(parts[-1], (fits.y[view.rows] - own.center) / own.scale)
        tried.append((total, (kind, number), parts))
    _, (kind, number), parts = min(tried, key=lambda each: each[0])
    return join_folds(fits, [*parts, fit(inputs[-1][kind], number)], [each[kind] for each in inputs], (kind, number))


def join_folds(fits: Fits, parts: Sequence[Predicted], inputs: Sequence[Inputs], setting: Setting) -> Found:
    """In the units of the targets."""
    *held, new = (part.scaled(own.center, own.scale) for part, own in zip(parts, inputs, strict=True))
    return Found(fits.hold_out(held), new, setting)


def squared(found: Predicted, y: Tensor) -> float:
    return float((found.mean - y).square().mean())


def likelihood(found: Predicted, y: Tensor) -> float:
    return -float(torch.distributions.Normal(found.mean, found.total.sqrt()).log_prob(y).mean())


def pinball_loss(found: Predicted, y: Tensor) -> float:
    assert found.quantiles is not None
    return pinball(found.quantiles, torch.tensor(QUANTILES, dtype=y.dtype), y)


def fit_constant(inputs: Inputs, penalty: float) -> Predicted:
    mean = inputs.z_new @ solve_ridge(inputs.z, inputs.y, penalty)
    return Predicted(mean, torch.ones_like(mean), torch.zeros_like(mean))


def fit_last_layers(fits: Fits, inputs: Sequence[dict[str, Inputs]], clock: Clock, *, others: bool) -> dict[str, Found]:
    """All of them. Laplace and VBLL take the features that ridge chose."""
    found = {LAST: choose(fits, inputs, fit_constant, SETTINGS, squared)}
    clock.mark(LAST)
    found[QUANTILE] = choose(
        fits, inputs, lambda own, p: fit_quantiles(own.z, own.y, own.z_new, p), SETTINGS, pinball_loss
    )
    clock.mark(QUANTILE)
    if not others:
        return found
    kind, penalty = found[LAST].setting
    chosen = [each[kind] for each in inputs]
    parts = [fit_laplace(each.z, each.y, each.z_new, penalty) for each in chosen]
    for structure, name in LAPLACE.items():
        found[name] = join_folds(fits, [part[structure] for part in parts], chosen, (kind, penalty))
    clock.mark("Laplace, three structures")
    found[VBLL] = choose(
        fits, inputs, lambda own, w: fit_vbll(own.z, own.y, own.z_new, *w), [(kind, w) for w in WEIGHTS], likelihood
    )
    clock.mark(VBLL)
    return found


# Three versions of each.


def judge(name: str, found: Found, fits: Fits, target: Tensor) -> dict[str, Any]:
    """Raw, scaled and calibrated; the constant and the leverage are no std by themselves."""
    errors, held, new = fits.y - found.held.mean, found.held, found.new
    row: dict[str, Any] = {} if found.setting is None else {"setting": found.setting}
    if name not in (OURS, CONSTANT, LAST):
        raw, old = new.total.sqrt(), held.total.clamp(min=1e-24).sqrt()
        scaled = raw * (errors / old).square().mean(0).sqrt()
        row["raw"] = score_numbers(new.mean, raw, quantile_ends(new) or normal_ends(new.mean, raw), target)
        ends = conformal_quantiles(found, fits) or scaled_ends(errors / old, fits.groups, new.mean, raw)
        row["scaled"] = score_numbers(new.mean, scaled, ends, target)
    constant = name in (CONSTANT, LAST)
    calibration = calibrate_errors(errors, None if constant else held.variance, fits.groups, None)
    std = calibration.std(None if constant else new.variance, len(new.mean))
    row["calibrated"] = score_numbers(
        new.mean, std, scaled_ends(calibration.scores, fits.groups, new.mean, std), target
    )
    return row | {"share": calibration.share}


def scaled_ends(scores: Tensor, groups: Tensor, mean: Tensor, std: Tensor) -> Ends:
    """Conformal intervals: as many std as held-out scores say."""
    ends = {}
    for level in LEVELS:
        half = conformal_quantile(scores.abs(), groups, level).value * std
        ends[level] = (mean - half, mean + half)
    return ends


def pair(found: Predicted, level: float) -> tuple[Tensor, Tensor]:
    """The quantiles that enclose so much."""
    assert found.quantiles is not None
    low = QUANTILES.index(round((1 - level) / 2, 3))
    return found.quantiles[low], found.quantiles[-1 - low]


def quantile_ends(found: Predicted) -> Ends | None:
    """The quantiles themselves."""
    return None if found.quantiles is None else {level: pair(found, level) for level in LEVELS}


def conformal_quantiles(found: Found, fits: Fits) -> Ends | None:
    """CQR (Romano et al., 2019): the ends move by how far held-out targets were outside."""
    if found.new.quantiles is None:
        return None
    ends = {}
    for level in LEVELS:
        low, high = pair(found.held, level)
        outside = torch.maximum(low - fits.y, fits.y - high)
        move = conformal_quantile(outside, fits.groups, level).value
        low, high = pair(found.new, level)
        middle = (low + high) / 2
        ends[level] = (torch.minimum(low - move, middle), torch.maximum(high + move, middle))
    return ends


def run_regression(data: Data, *, ensemble: bool, noise: bool = True, others: bool = True) -> dict[str, Any]:
    """Every method on a cell: its scores, and the seconds of the processor.

    Args:
        data: what is fitted and tested.
        ensemble: whether the members are fitted, which takes most of the time.
        noise: whether a second tensor regression learns the noise.
        others: whether laplace-torch and vbll are asked.
    """
    clock = Clock()
    fits = fit_tensor(data)
    clock.mark("tensor head with five folds")
    found = {
        name: predict_each(fits, predict)
        for name, predict in ((OURS, by_leverage), (CONSTANT, by_constant), (MASKS, by_masks), (DRAWN, by_draws))
    }
    clock.mark("its predictions")
    if noise:
        found[NOISE] = fit_noise(fits, found[CONSTANT])
        clock.mark(NOISE)
    inputs = [read_features(view) for view in (*fits.folds, fits.full)]
    found |= fit_last_layers(fits, inputs, clock, others=others)
    if ensemble:
        found[ENSEMBLE] = predict_each(fits, by_members)
        clock.mark(ENSEMBLE)
    target = torch.from_numpy(data.y_test).double().view(len(data.y_test), -1)
    return {
        "methods": {name: judge(name, found[name], fits, target) for name in METHODS if name in found},
        "seconds": clock.seconds,
    }
