"""Classes: every method of the plan on a draw of CIFAR-100's maps."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from tensor_dropout.calibration.classification import calibrate_classes
from tensor_dropout.sklearn import TensorClassifier
from uncertainty.fits import Clock
from uncertainty.images import Images
from uncertainty.last_layers import make_laplace
from uncertainty.methods import DRAWS, MEMBERS
from uncertainty.scores import LEVELS, score_classes, score_sets

OURS, DRAWN, ENSEMBLE = "tensor head", "Monte-Carlo, 32 draws", "ensemble of five"
LINEAR, VBLL = "linear head", "VBLL"
LAPLACE = {"kron": "Laplace, Kronecker", "diag": "Laplace, diagonal"}
METHODS = (OURS, DRAWN, ENSEMBLE, LINEAR, *LAPLACE.values(), VBLL)
PENALTIES = (0.0001, 0.001, 0.01, 0.1)
WEIGHTS = (0.3, 1.0, 3.0, 10.0)
PARTS = ("held", "test", "unknown")
BATCH = 32
"""Images at once for laplace-torch's fit, whose Jacobians take classes · parameters numbers each."""

Logits = dict[str, Tensor]
"""Of the held-out images, and of test images of known and of unknown classes: (n, K)."""


@dataclass(frozen=True)
class Pooled:
    """Features (n, C): maps averaged over positions, standardized; float64."""

    x: Tensor
    y: Tensor
    parts: dict[str, Tensor]
    y_held: Tensor

    @property
    def classes(self) -> int:
        return int(self.y.max()) + 1


def pool(images: Images) -> Pooled:
    x, *parts = (
        torch.from_numpy(maps).double().mean((2, 3))
        for maps in (images.x, images.x_held, images.x_test, images.x_unknown)
    )
    mean, std = x.mean(0), x.std(0)
    scaled = {name: (part - mean) / std for name, part in zip(PARTS, parts, strict=True)}
    return Pooled((x - mean) / std, torch.from_numpy(images.y), scaled, torch.from_numpy(images.y_held))


# Tensor heads.


@torch.no_grad()
def fit_tensor(images: Images, clock: Clock) -> dict[str, Logits]:
    """The mean network, draws of its masks, and five seeds."""
    parts = {
        name: torch.from_numpy(maps)
        for name, maps in zip(PARTS, (images.x_held, images.x_test, images.x_unknown), strict=True)
    }
    members = []
    for seed in range(MEMBERS):
        layer: Any = TensorClassifier(random_state=seed).fit(images.x, images.y).layer_
        members.append({name: layer(x).double() for name, x in parts.items()})
        if seed == 0:
            clock.mark(OURS)
            torch.manual_seed(0)
            drawn = {
                name: average([layer.regress(x, layer.draw_masks(len(x))).double() for _ in range(DRAWS)])
                for name, x in parts.items()
            }
            clock.mark(DRAWN)
    clock.mark(ENSEMBLE)
    joined = {name: average([member[name] for member in members]) for name in PARTS}
    return {OURS: members[0], DRAWN: drawn, ENSEMBLE: joined}


def average(logits: Sequence[Tensor]) -> Tensor:
    """The logarithms of mean probabilities."""
    return torch.stack([each.log_softmax(-1) for each in logits]).logsumexp(0) - float(np.log(len(logits)))


# Linear heads.


def fit_linear(data: Pooled) -> tuple[nn.Linear, float]:
    """Softmax with the penalty of the highest likelihood of held-out images, at its best temperature."""
    tried = []
    for penalty in PENALTIES:
        model = LogisticRegression(C=1 / (len(data.x) * penalty), max_iter=300, tol=1e-3)
        model.fit(data.x.numpy(), data.y.numpy())
        layer = nn.Linear(data.x.shape[1], data.classes, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(model.coef_))
            layer.bias.copy_(torch.from_numpy(model.intercept_))
            tried.append((held_nll(layer(data.parts["held"]), data.y_held), penalty, layer))
    _, penalty, layer = min(tried, key=lambda each: each[0])
    return layer, penalty


def held_nll(logits: Tensor, y: Tensor) -> float:
    """At the temperature that is best for them."""
    temperature = calibrate_classes(logits, y).temperature
    return float(nn.functional.cross_entropy(logits / temperature, y))


def ask_laplace(layer: nn.Linear, structure: str, data: Pooled) -> Logits:
    """The probit predictive of a linear head, by the posterior that laplace-torch fits."""
    model = nn.Sequential(nn.Identity(), deepcopy(layer).float())
    found = make_laplace(model, "classification", structure, data.x.float(), data.y, BATCH)
    found.optimize_prior_precision(method="marglik")
    return {
        name: probit(layer(x), output_variance(found, structure, x.float()).double()).clamp(min=1e-30).log()
        for name, x in data.parts.items()
    }


def output_variance(found: Any, structure: str, x: Tensor) -> Tensor:
    """The variance of each logit (n, K): what laplace-torch takes from Jacobians, here from the layer's form.

    Its Jacobians have K · parameters numbers for each image: of 80 classes half an hour for all draws.
    """
    if structure == "diag":
        variance = found.posterior_variance
        classes = len(variance) // (x.shape[1] + 1)
        return x.square() @ variance[:-classes].view(classes, -1).mT + variance[-classes:]
    precision = found.posterior_precision
    (of_outputs, of_inputs), (of_bias,) = precision.eigenvalues
    (outputs, inputs), (bias,) = precision.eigenvectors
    of_weights = 1 / (of_outputs[:, None] * of_inputs + precision.deltas[0])
    weights = (x @ inputs).square() @ of_weights.mT @ outputs.square().mT
    return weights + bias.square() @ (1 / (of_bias + precision.deltas[1]))


@torch.no_grad()
def probit(mean: Tensor, variance: Tensor) -> Tensor:
    """Probabilities of normal logits, as laplace-torch approximates them."""
    return (mean / (1 + torch.pi / 8 * variance).sqrt()).softmax(-1)


def ask_vbll(layer: nn.Linear, data: Pooled, steps: int = 300, batch: int = 400) -> tuple[Logits, float]:
    """vbll's classification with a diagonal covariance, begun at the linear head; its own 20 draws, five times."""
    from vbll.layers.classification import DiscClassification

    x, y = torch.cat([data.x, torch.ones_like(data.x[:, :1])], 1).float(), data.y
    parts = {name: torch.cat([p, torch.ones_like(p[:, :1])], 1).float() for name, p in data.parts.items()}
    tried = []
    for weight in WEIGHTS:
        torch.manual_seed(0)
        head = DiscClassification(x.shape[1], data.classes, weight / len(x), parameterization="diagonal")
        with torch.no_grad():
            head.W_mean.copy_(torch.cat([layer.weight, layer.bias[:, None]], 1))
        optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            rows = torch.randperm(len(x))[:batch]
            optimizer.zero_grad()
            head(x[rows]).train_loss_fn(y[rows]).backward()
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            logits = {name: draw_vbll(head, part) for name, part in parts.items()}
        tried.append((held_nll(logits["held"], data.y_held), weight, logits))
    _, weight, logits = min(tried, key=lambda each: each[0])
    return logits, weight


def draw_vbll(head: Any, x: Tensor, batch: int = 200) -> Tensor:
    """The logarithm of its mean probabilities."""
    rows = [torch.stack([head.predictive(part) for _ in range(5)]).mean(0) for part in x.split(batch)]
    return torch.cat(rows).double().clamp(min=1e-30).log()


# Scores.


def fill(probs: Tensor, level: float) -> Tensor:
    """The most probable classes that together have so much; what a user does who trusts the probabilities."""
    ordered, order = probs.sort(descending=True)
    before = ordered.cumsum(1) - ordered
    return torch.zeros_like(probs, dtype=torch.bool).scatter(1, order, before < level)


def judge(logits: Logits, images: Images) -> dict[str, Any]:
    """Raw: the softmax, and sets that it fills. Calibrated: temperature, and conformal sets."""
    target, held = torch.from_numpy(images.y_test), torch.from_numpy(images.y_held)
    calibration = calibrate_classes(logits["held"], held)
    raw, unknown = (logits[name].softmax(-1) for name in ("test", "unknown"))
    row: dict[str, Any] = {"temperature": calibration.temperature, "raw": score_classes(raw, target, unknown)}
    probs, unknown = (calibration.probabilities(logits[name]) for name in ("test", "unknown"))
    row["calibrated"] = score_classes(probs, target, unknown)
    for level in LEVELS:
        row["raw"] |= score_sets(fill(raw, level), target, level)
        row["calibrated"] |= score_sets(calibration.sets(logits["test"], level)[0], target, level)
    return row


def run_classes(images: Images, *, others: bool = True) -> dict[str, Any]:
    """Every method on a draw: its scores, and the seconds of the processor."""
    clock = Clock()
    found, data = fit_tensor(images, clock), pool(images)
    layer, penalty = fit_linear(data)
    with torch.no_grad():
        found[LINEAR] = {name: layer(x) for name, x in data.parts.items()}
    clock.mark(LINEAR)
    settings: dict[str, Any] = {LINEAR: penalty}
    if others:
        for structure, name in LAPLACE.items():
            found[name] = ask_laplace(layer, structure, data)
            clock.mark(name)
        found[VBLL], settings[VBLL] = ask_vbll(layer, data)
        clock.mark(VBLL)
    rows = {name: judge(found[name], images) for name in METHODS if name in found}
    return {"methods": {name: {**row, "setting": settings.get(name)} for name, row in rows.items()},
            "seconds": clock.seconds}  # fmt: skip
