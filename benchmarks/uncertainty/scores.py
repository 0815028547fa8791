"""What is measured of predictions with a std, of intervals, and of probabilities of classes."""

from __future__ import annotations

import numpy as np
import torch
from intervals import measure_ends, two_sided
from scipy.stats import spearmanr
from torch import Tensor

from tensor_dropout.metrics.detection import rank_area
from tensor_dropout.metrics.measures import normal_crps, reliability, risk_coverage

LEVELS = (0.5, 0.9, 0.95)
LARGE = 0.1
Ends = dict[float, tuple[Tensor, Tensor]]


def normal_ends(mean: Tensor, std: Tensor) -> Ends:
    """Intervals of a normal distribution."""
    return {level: (mean - two_sided(level) * std, mean + two_sided(level) * std) for level in LEVELS}


def score_numbers(mean: Tensor, std: Tensor, ends: Ends, target: Tensor) -> dict[str, float]:
    """Every score of a regression: (n, O) each."""
    return measure_ends(ends, target) | score_std(mean, std, target)


def score_std(mean: Tensor, std: Tensor, target: Tensor) -> dict[str, float]:
    """NLL and CRPS of normal predictions; how well the std tells errors, both averaged over the outputs of a sample."""
    std = std.clamp(min=1e-12)
    error, size = (target - mean).abs().mean(1).numpy(), std.mean(1).numpy()
    varies = size.max() - size.min() > 1e-9 * size.max()
    size = size if varies else np.ones_like(size)
    return {
        "mae": float(error.mean()),
        "nll": -float(torch.distributions.Normal(mean, std).log_prob(target).mean()),
        "crps": normal_crps(mean.numpy(), std.numpy(), target.numpy()),
        "rank_correlation": float(spearmanr(error, size).statistic) if varies else 0.0,
        "risk_area": float(risk_coverage(-size, error).risk.mean() / error.mean()),
        "large_errors": find_large(error, size),
    }


def find_large(error: np.ndarray, size: np.ndarray, share: float = LARGE) -> float:
    """AUROC of telling the share of samples with the largest errors by their std; 0.5 says nothing."""
    n = max(1, round(share * len(error)))
    order = np.argsort(error, kind="stable")
    return rank_area(size[order[:-n]], size[order[-n:]])


def score_classes(probs: Tensor, target: Tensor, unknown: Tensor) -> dict[str, float]:
    """Every score of probabilities (n, K): of known classes, and of images of unknown ones."""
    confidence, predicted = probs.max(1)
    right = (predicted == target).double()
    bins = reliability(confidence.numpy(), right.numpy())
    gaps = np.nan_to_num(np.abs(bins.accuracy - bins.confidence)) * bins.examples
    entropies = [torch.special.entr(each).sum(1).numpy() for each in (probs, unknown)]
    return {
        "accuracy": float(right.mean()),
        "nll": -float(probs.gather(1, target[:, None]).clamp(min=1e-12).log().mean()),
        "ece": float(gaps.sum() / len(right)),
        "risk_area": float(risk_coverage(confidence.numpy(), 1 - right.numpy()).risk.mean()),
        "unknown": rank_area(1 - confidence.numpy(), 1 - unknown.max(1).values.numpy()),
        "unknown_entropy": rank_area(*entropies),
    }


def score_sets(sets: Tensor, target: Tensor, level: float) -> dict[str, float]:
    """Mean size of sets of classes (n, K), and how many hold the right one."""
    percent = f"{100 * level:g}"
    return {
        f"set_size_{percent}": float(sets.double().sum(1).mean()),
        f"set_coverage_{percent}": float(sets.gather(1, target[:, None]).double().mean()),
    }


def pinball(quantiles: Tensor, levels: Tensor, target: Tensor) -> float:
    """Mean pinball loss of quantiles (Q, n, O) at levels (Q,)."""
    error = target - quantiles
    tau = levels.view(-1, 1, 1)
    return float(torch.maximum(tau * error, (tau - 1) * error).mean())
