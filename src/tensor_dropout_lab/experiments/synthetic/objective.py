"""Losses of many small tensor regressions at once: all variants share each batch of X.

A variant is one choice of θ, loss and mask seed. Their parameters are stacked along a leading axis V, so that a batch
X of shape (B, I³) meets all of them in one matrix product. Scalar output, masks unscaled as in the paper's theorems
("paper" scaling): CP has factors (V, 3, I, R); Tucker also a core (V, R, R, R). The tests compare every function
here with the library's own layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Parameters = list[Tensor]
"""CP: [factors]; Tucker: [factors, core]."""


def dense_weights(parameters: Parameters, masks: Tensor | None = None) -> Tensor:
    """The weights (V, I³) under masks (V, 3, R); CP uses the first of the three, since it has one."""
    factors = parameters[0]
    if len(parameters) == 1:
        first = factors[:, 0] if masks is None else factors[:, 0] * masks[:, :1]
        return torch.einsum("vir,vjr,vkr->vijk", first, factors[:, 1], factors[:, 2]).flatten(1)
    masked = factors if masks is None else factors * masks.unsqueeze(2)
    weight = torch.einsum("vrst,vkt->vrsk", parameters[1], masked[:, 2])
    weight = torch.einsum("vrsk,vjs->vrjk", weight, masked[:, 1])
    return torch.einsum("vrjk,vir->vijk", weight, masked[:, 0]).flatten(1)


def stochastic_loss(parameters: Parameters, x: Tensor, y: Tensor, masks: Tensor) -> Tensor:
    """``mean (y - ⟨x, W̃⟩)²`` of each variant under its masks: (V,)."""
    outputs = x @ dense_weights(parameters, masks).mT  # (B, V)
    return (y[:, None] - outputs).square().mean(0)


def exact_loss(parameters: Parameters, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """The mean of :func:`stochastic_loss` over all masks, exactly: (V,)."""
    form = cp_moments if len(parameters) == 1 else tucker_moments
    mean, variance = form(parameters, x, theta)  # (V, B) each
    return ((y - mean).square() + variance).mean(1)


def printed_loss(parameters: Parameters, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """The deterministic loss as the paper prints it (theorems 1 and 2): (V,)."""
    keep = theta if len(parameters) == 1 else theta**2  # the paper's θ^N with modes 0..N = 0..2
    mean = keep * (x @ dense_weights(parameters).mT)
    squares = x.square() @ dense_weights([p.square() for p in parameters]).mT
    return ((y[:, None] - mean).square() + keep * (1 - keep) * squares).mean(0)


def cp_moments(parameters: Parameters, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """``θ Σ_r a_r`` and ``θ(1-θ) Σ_r a_r²`` with ``a_r = ⟨x, u0_r ∘ u1_r ∘ u2_r⟩``: (V, B) each."""
    factors = parameters[0]
    variants, _, _, rank = factors.shape
    u0, u1, u2 = factors.permute(1, 2, 0, 3).flatten(2)  # (I, V R) each
    columns = (u0[:, None] * u1).flatten(0, 1)[:, None] * u2  # (I², I, V R)
    a = (x @ columns.flatten(0, 1)).unflatten(1, (variants, rank)).movedim(0, 1)
    theta = theta[:, None]
    return theta * a.sum(2), theta * (1 - theta) * a.square().sum(2)


def tucker_moments(parameters: Parameters, x: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """``θ³ Σ z``, and the sum of squares that mask correlations leave, with ``z = G ⊙ P`` on the rank axes.

    ``Var f = Σ_A θ^(6-|A|) (1-θ)^|A| Σ_{r in A} (Σ_{r not in A} z)²`` over the non-empty sets A of modes.
    """
    factors, core = parameters
    variants, _, size, rank = factors.shape
    u0, u1, u2 = factors.mT.unbind(1)  # (V, R, I) each
    # The batch comes last, so that sums over a rank axis run along it: (I, I, I, B) -> (V, R, R, R, B)
    P = (u0.reshape(variants * rank, size) @ x.mT.reshape(size, -1)).view(variants, rank, size, -1)
    P = (u1.unsqueeze(1) @ P).view(variants, rank, rank, size, len(x))
    P = u2[:, None, None] @ P
    z = P * core.unsqueeze(-1)
    pairs = z.sum(3), z.sum(2), z.sum(1)  # modes (0, 1), (0, 2) and (1, 2) left
    singles = pairs[0].sum(2), pairs[0].sum(1), pairs[1].sum(1)
    theta = theta[:, None]
    ones, twos = (sum(t.square().flatten(1, -2).sum(1) for t in sums) for sums in (singles, pairs))
    threes = z.square().flatten(1, 3).sum(1)
    variance = theta**5 * (1 - theta) * ones + theta**4 * (1 - theta) ** 2 * twos + theta**3 * (1 - theta) ** 3 * threes
    return theta**3 * singles[0].sum(1), variance


def over_samples(loss: Callable[..., Tensor], parameters: Parameters, x: Tensor, y: Tensor, theta: Tensor) -> Tensor:
    """A loss over a whole data set, in blocks, without gradients: (V,)."""
    with torch.no_grad():
        blocks = zip(x.split(250), y.split(250), strict=True)
        totals: Sequence[Tensor] = [loss(parameters, bx, by, theta) * len(bx) for bx, by in blocks]
        return torch.stack(list(totals)).sum(0) / len(x)
