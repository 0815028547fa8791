"""Linear last layers over fixed features, and the variances that others give them.

All take features (n, K) and targets (n, O) that are standardized, in float64, and predict for others.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUANTILES = (0.025, 0.05, 0.25, 0.5, 0.75, 0.95, 0.975)


@dataclass(frozen=True)
class Predicted:
    """Of new samples, (n, O): mean, variance of the mean, and noise; or quantiles (Q, n, O)."""

    mean: Tensor
    variance: Tensor
    noise: Tensor
    quantiles: Tensor | None = None

    @property
    def total(self) -> Tensor:
        return self.variance + self.noise

    def scaled(self, center: Tensor, scale: Tensor) -> Predicted:
        """In the units of the targets."""
        quantiles = None if self.quantiles is None else center + scale * self.quantiles
        return Predicted(
            center + scale * self.mean, scale.square() * self.variance, scale.square() * self.noise, quantiles
        )


def solve_ridge(z: Tensor, y: Tensor, penalty: float) -> Tensor:
    """(K, O): ``(zᵀz + n λ)⁻¹ zᵀy``."""
    return torch.linalg.solve(z.mT @ z + len(z) * penalty * torch.eye(z.shape[1]).to(z), z.mT @ y)


# laplace-torch.


def linear_model(weight: Tensor) -> nn.Module:
    """A network whose last layer is linear, without a step before it."""
    layer = nn.Linear(*weight.shape, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(weight.mT)
        layer.bias.zero_()
    return nn.Sequential(nn.Identity(), layer)


def make_laplace(
    model: nn.Module, task: str, structure: str, z: Tensor, y: Tensor, batch: int | None = None, **settings: Any
) -> Any:
    """A last-layer Laplace approximation, fitted; the diagonal takes batch · outputs · parameters numbers."""
    from laplace import Laplace

    found = Laplace(model, task, subset_of_weights="last_layer", hessian_structure=structure, **settings)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):  # a bar for each fit
        found.fit(DataLoader(TensorDataset(z, y), batch_size=batch or len(z)))
    return found


def tune_laplace(laplace: Any, steps: int = 100) -> tuple[Tensor, Tensor]:
    """Prior precision and noise of the highest marginal likelihood, as laplace-torch's example of a regression does."""
    prior, sigma = (torch.zeros(1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([prior, sigma], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (-laplace.log_marginal_likelihood(prior.exp(), sigma.exp())).backward()
        optimizer.step()
    return prior.detach().exp(), sigma.detach().exp()


def fit_laplace(z: Tensor, y: Tensor, z_new: Tensor, penalty: float) -> dict[str, Predicted]:
    """By structure. One noise for all outputs, so their variances are alike, and are those of one output."""
    weight = solve_ridge(z, y, penalty)
    prior, sigma = tune_laplace(make_laplace(linear_model(weight), "regression", "kron", z, y))
    mean, found = z_new @ weight, {}
    for structure in ("full", "kron", "diag"):
        one = make_laplace(
            linear_model(weight[:, :1]), "regression", structure, z, y[:, :1], sigma_noise=float(sigma),
            prior_precision=float(prior),
        )  # fmt: skip
        variance = one(z_new)[1].detach().view(-1, 1)
        found[structure] = Predicted(mean, variance.expand_as(mean), sigma.square().expand_as(mean))
    return found


# VBLL.


def turn(z: Tensor) -> Tensor:
    """The principal axes of features, (K, k); in them the best dense covariance of a linear layer is diagonal."""
    _, lengths, axes = torch.linalg.svd(z, full_matrices=False)
    return axes[lengths > 1e-6 * lengths[0]].mT


def fit_vbll(z: Tensor, y: Tensor, z_new: Tensor, weight: float, steps: int, penalty: float = 0.1) -> Predicted:
    """vbll's regression, begun at ridge, its leave-one-out errors and the covariance that is best for these.

    Each output has the loss that vbll gives it alone: vbll's own of several outputs multiplies the variance of each by
    the precisions of all.

    Args:
        z: (n, K).
        y: (n, O).
        z_new: (m, K).
        weight: over n, that of its regularizer.
        steps: of Adam, on all samples at once; few are early stopping.
        penalty: of ridge.
    """
    from vbll.layers.regression import Regression

    torch.manual_seed(0)
    axes = turn(z)
    z, z_new, y = (z @ axes).float(), (z_new @ axes).float(), y.float()
    layer = Regression(z.shape[1], y.shape[1], weight / len(z), parameterization="diagonal")
    begin(layer, z, y, penalty)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.03)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        optimizer.zero_grad()
        output_losses(layer, z, y).sum().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = layer.predictive(z_new)
        noise = layer.noise_logdiag.exp().square().expand_as(found.mean).double()
        return Predicted(found.mean.double(), (found.var.double() - noise).clamp(min=0), noise)


@torch.no_grad()
def begin(layer: Any, z: Tensor, y: Tensor, penalty: float) -> None:
    """Where the training of vbll's layer starts."""
    W = solve_ridge(z, y, penalty)
    seen = (z * solve_ridge(z, torch.eye(len(z)).to(z), penalty).mT).sum(1)  # (n,), the diagonal of the hat matrix
    left = (y - z @ W) / (1 - seen - 1 / len(z)).clamp(min=0.01)[:, None]
    noise = left.square().mean(0).clamp(min=1e-6)  # (O,)
    pull = layer.regularization_weight
    variance = pull / (z.square().mean(0) / noise[:, None] + pull / layer.prior_scale)  # (O, K)
    layer.W_mean.copy_(W.mT)
    layer.W_logdiag.copy_(0.5 * variance.log())
    layer.noise_logdiag.copy_(0.5 * noise.log())


def output_losses(layer: Any, z: Tensor, y: Tensor) -> Tensor:
    """(O,): ``layer(z).train_loss_fn(y)`` of a layer with this output alone."""
    W, noise = layer.W(), layer.noise()
    precision = noise.scale.pow(-2)
    fit = noise.scale.log() + 0.5 * precision * ((y - z @ W.mean.mT).square() + z.square() @ W.var.mT)
    divergence = (W.mean.square() + W.var).sum(1) / layer.prior_scale - W.var.log().sum(1)
    divergence = divergence + z.shape[1] * math.log(layer.prior_scale)
    wishart = 1.5 * precision.log() - 0.5 * layer.wishart_scale * precision
    return (fit + 0.5 * math.log(2 * math.pi)).mean(0) + layer.regularization_weight * (0.5 * divergence - wishart)


# Quantiles.


def fit_quantiles(z: Tensor, y: Tensor, z_new: Tensor, penalty: float, steps: int = 300) -> Predicted:
    """Linear quantiles: ``mean ρ_τ(y − b − z w) + λ/2 ‖w‖²`` for each output and level, by ADMM."""
    levels = torch.tensor(QUANTILES, dtype=z.dtype)
    wide = torch.cat([torch.ones_like(z[:, :1]), z], 1)
    new = torch.cat([torch.ones_like(z_new[:, :1]), z_new], 1)
    coefficients = solve_quantiles(wide, y, levels, penalty, steps)
    found = torch.stack([new @ each for each in coefficients]).sort(0).values
    reach = (found[QUANTILES.index(0.95)] - found[QUANTILES.index(0.05)]) / (2 * 1.6448536)
    return Predicted(found[QUANTILES.index(0.5)], reach.square(), torch.zeros_like(reach), found)


def solve_quantiles(z: Tensor, y: Tensor, levels: Tensor, penalty: float, steps: int) -> Tensor:
    """Coefficients (Q, K, O); the first column of z is constant and has no penalty."""
    n, K = z.shape
    step = 1.0 / n
    ridge = torch.full((K,), penalty / step, dtype=z.dtype)
    ridge[0] = 1e-9
    solve = torch.cholesky_inverse(torch.linalg.cholesky(z.mT @ z + torch.diag(ridge))) @ z.mT
    tau = levels.view(-1, 1, 1)
    up, down = tau / (n * step), (1 - tau) / (n * step)
    residual = torch.zeros(len(levels), *y.shape, dtype=z.dtype)
    dual = torch.zeros_like(residual)
    for _ in range(steps):
        coefficients = solve @ (y - residual + dual)
        gap = y - z @ coefficients + dual
        residual = (gap - up).clamp(min=0) - (-gap - down).clamp(min=0)
        dual = gap - residual
    return coefficients
