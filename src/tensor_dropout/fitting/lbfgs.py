"""L-BFGS for many problems at once, with a line search for each of them.

PyTorch's L-BFGS runs one problem. Here every problem has its own memory, step length and end, and only those that
still search are evaluated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

HISTORY = 10
"""How many steps are remembered."""
TRIALS = 8
"""How many step lengths are tried in one iteration."""
SUFFICIENT, FLAT = 1e-4, 0.5
"""A step is taken where the objective fell by this share of what its slope promised, and the slope by that share."""
PATIENCE = 10
"""The decrease is judged over so many iterations."""


class Problems(Protocol):
    """P problems of N parameters each."""

    def evaluate(self, z: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """Objectives (p,), in float64, and gradients (p, N) at z (p, N), of the problems with the numbers ``which``."""


@dataclass(frozen=True)
class Minimum:
    """Where :func:`minimize` ended.

    Attributes:
        z: the parameters, (P, N).
        curve: the objectives after each iteration, (iterations + 1, P).
        n_iter: how many iterations each problem took, (P,).
        converged: whether each problem met the tolerance, (P,).
        interrupted: whether the user stopped it; ``z`` is then the best so far.
    """

    z: Tensor
    curve: Tensor
    n_iter: Tensor
    converged: Tensor
    interrupted: bool = False


class _Memory:
    """The last steps and changes of the gradient, and all their inner products.

    The two loops of L-BFGS run on the inner products alone, so that the long vectors are read twice in an iteration:
    once to extend the products, once to combine the direction.
    """

    def __init__(self, like: Tensor, history: int) -> None:
        P, N = like.shape
        self.history = history
        self.vectors = like.new_zeros(P, 2 * history + 1, N)  # steps, changes of the gradient, the gradient
        self.products = torch.zeros(P, 2 * history + 1, 2 * history + 1, dtype=torch.float64, device=like.device)
        self.used = torch.zeros(P, history, dtype=torch.bool, device=like.device)
        self.order: list[int] = []

    def set_gradient(self, g: Tensor) -> None:
        self._set(2 * self.history, g)

    def remember(self, step: Tensor, change: Tensor, usable: Tensor) -> None:
        """Store a step and the change of the gradient over it; where not usable, that problem skips this slot."""
        slot = len(self.order) if len(self.order) < self.history else self.order.pop(0)
        self.order.append(slot)
        self.used[:, slot] = usable
        self._set(slot, step)
        self._set(self.history + slot, change)

    def forget(self, which: Tensor) -> None:
        """Drop the history of some problems: their next direction is steepest descent."""
        self.used[which] = False

    def direction(self) -> Tensor:
        """``-H g`` for each problem."""
        m, products = self.history, self.products
        weights = torch.zeros(products.shape[:2], dtype=torch.float64, device=products.device)
        weights[:, -1] = -1.0
        rhos, alphas = {}, {}
        for slot in reversed(self.order):
            curvature = products[:, slot, m + slot]
            rhos[slot] = torch.where(self.used[:, slot] & (curvature > 0), 1 / curvature, 0.0)
            alphas[slot] = rhos[slot] * (weights * products[:, slot]).sum(-1)
            weights[:, m + slot] -= alphas[slot]
        scale = torch.ones_like(weights[:, 0])
        for slot in self.order:  # the last usable pair decides
            ratio = products[:, slot, m + slot] / products[:, m + slot, m + slot]
            scale = torch.where(rhos[slot] > 0, ratio, scale)
        weights *= scale[:, None]
        for slot in self.order:
            beta = rhos[slot] * (weights * products[:, m + slot]).sum(-1)
            weights[:, slot] += alphas[slot] - beta
        return torch.einsum("pk,pkn->pn", weights.to(self.vectors.dtype), self.vectors)

    def _set(self, place: int, vector: Tensor) -> None:
        self.vectors[:, place] = vector
        row = torch.einsum("pkn,pn->pk", self.vectors, vector).double()
        self.products[:, place], self.products[:, :, place] = row, row


def minimize(
    problems: Problems,
    start: Tensor,
    *,
    max_iter: int,
    tol: float,
    history: int = HISTORY,
    report: Callable[[int, Tensor, Tensor], None] | None = None,
) -> Minimum:
    """Minimize every problem until it stands still.

    A problem has converged when its objective fell by less than ``tol`` of itself over the last ten iterations.

    Args:
        problems: the objectives.
        start: where to begin, (P, N).
        max_iter: the most iterations.
        tol: the relative decrease over ten iterations at which a problem is done.
        history: how many steps are remembered.
        report: called after each iteration with its number, the objectives, and where they were found.

    Returns:
        The minimum; interrupted by the user, the best point so far.
    """
    z = start.clone()
    f, g = problems.evaluate(z, torch.arange(len(z), device=z.device))
    curve = [f]
    memory = _Memory(z, history)
    active = torch.ones_like(f, dtype=torch.bool)
    converged, stuck = torch.zeros_like(active), torch.zeros_like(active)
    n_iter = torch.zeros_like(f, dtype=torch.long)
    interrupted = False
    try:
        for iteration in range(1, max_iter + 1):
            memory.set_gradient(g)
            d = memory.direction()
            slope = (d * g).sum(-1).double()
            uphill = ~(slope < 0)
            if bool(uphill.any()):
                memory.forget(uphill)
                d = torch.where(uphill[:, None], -g, d)
                slope = torch.where(uphill, -g.square().sum(-1).double(), slope)
            first = ~memory.used.any(-1)
            t = torch.where(first, 0.1 * (z.norm(dim=-1) / d.norm(dim=-1).clamp(min=1e-30)).double(), 1.0)
            t, f, g_new = _search(problems, z, d, f, g, slope, t, active)
            moved = active & (t > 0)
            step = torch.where(moved[:, None], t[:, None].to(d.dtype) * d, 0.0)
            z += step
            change = g_new - g
            g = g_new
            memory.remember(step, change, moved & ((step * change).sum(-1) > 0))
            memory.forget(active & ~moved)
            gave_up = active & ~moved & stuck  # twice in a row, the second time along steepest descent
            stuck = active & ~moved
            curve.append(f)
            n_iter += active
            if iteration >= PATIENCE:
                done = active & (curve[-1 - PATIENCE] - f <= tol * f.abs())
                converged |= done
                active = active & ~done
            converged |= gave_up
            active = active & ~gave_up
            if report is not None:
                report(iteration, f, z)
            if not bool(active.any()):
                break
    except KeyboardInterrupt:
        interrupted = True
    return Minimum(z, torch.stack(curve), n_iter, converged, interrupted)


def _search(
    problems: Problems, z: Tensor, d: Tensor, f0: Tensor, g0: Tensor, slope0: Tensor, t: Tensor, active: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A step length for each problem: bracket the minimum along the line, then close in by secants of the slope.

    Returns:
        The lengths (P,), 0 for a problem that found none; the objectives and the gradients there.
    """
    low, low_slope = torch.zeros_like(t), slope0.clone()
    high, high_slope = torch.full_like(t, float("inf")), torch.zeros_like(t)
    best_t, best_f, best_g = torch.zeros_like(t), f0, g0
    searching = active
    for _ in range(TRIALS):
        which = searching.nonzero().squeeze(1)
        there = torch.addcmul(z[which], t[which, None].to(z.dtype), d[which])
        f_there, g_there = problems.evaluate(there, which)
        f, slope = torch.full_like(f0, float("inf")), torch.full_like(slope0, float("inf"))
        f[which] = torch.where(f_there.isfinite(), f_there, float("inf"))
        slope_there = (g_there * d[which]).sum(-1).double()
        slope[which] = torch.where(slope_there.isfinite(), slope_there, float("inf"))
        falls = f <= f0 + SUFFICIENT * t * slope0
        better = searching & falls & (f <= best_f)
        best_t, best_f = torch.where(better, t, best_t), torch.where(better, f, best_f)
        if bool(better.all()):
            best_g = g_there
        elif bool(better.any()):
            best_g = best_g.clone()
            best_g[better] = g_there[better[which]]
        searching = searching & ~(better & (slope.abs() <= FLAT * slope0.abs()))
        if not bool(searching.any()):
            break
        beyond = ~falls | (slope >= 0)
        high, high_slope = torch.where(beyond, t, high), torch.where(beyond, slope, high_slope)
        low, low_slope = torch.where(beyond, low, t), torch.where(beyond, low_slope, slope)
        t = torch.where(searching, _next_trial(low, low_slope, high, high_slope, slope0), t)
    return best_t, best_f, best_g


def _next_trial(low: Tensor, low_slope: Tensor, high: Tensor, high_slope: Tensor, slope0: Tensor) -> Tensor:
    """Between two ends the secant of the slopes, kept inside; without an upper end, further out."""
    width = torch.where(high.isinf(), 0.0, high - low)
    secant = low - low_slope * width / (high_slope - low_slope)
    usable = secant.isfinite() & (high_slope > 0) & high_slope.isfinite()
    inside = torch.where(usable, torch.clamp(secant, low + 0.1 * width, high - 0.1 * width), low + 0.5 * width)
    reach = (slope0 / (slope0 - low_slope)).nan_to_num(4.0, 4.0, 4.0)  # of the quadratic through both slopes
    outwards = low * torch.where(reach > 0, reach, 4.0).clamp(1.5, 4.0)
    return torch.where(high.isinf(), outwards, inside)
