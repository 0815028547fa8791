"""Exact mean and variance of a randomized layer's output, without sampling.

The output is linear in each mask, so its second moment is a quadratic form whose matrix is the Kronecker product of
the masks' second moments ``S_n = E[c_n c_nᵀ]``. The forms used here are derived in
``docs/explanation/theory.md``. Two rules run through this file:

- The mean² part is cancelled in the formulas (``⊗S_n - ⊗m_n m_nᵀ`` mode by mode), never by subtracting numbers:
  ``E[f²] - (E f)²`` would lose every digit of a small variance.
- Without gradients nothing of size (batch × full core) is held: modes are summed or squared one after another, in
  blocks. (With gradients autograd keeps what it needs.)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.laws import ExchangeableLaw, Law

PAIRS_UP_TO = 16
"""Tucker: the joint rank of all input modes but the largest, up to which products of pairs are formed."""


class Moments(NamedTuple):
    """Mean and variance of the output of a randomized layer, for one draw of its masks.

    ``variance`` has the shape of the output, or (B, *output_shape, *output_shape) if the covariance was asked for.
    The methods let a network's forward end in ``head(x).squeeze(-1)`` and the like.
    """

    mean: Tensor
    variance: Tensor

    def squeeze(self, *dim: int) -> Moments:
        """Both squeezed."""
        return Moments(self.mean.squeeze(*dim), self.variance.squeeze(*dim))

    def flatten(self, *dims: int) -> Moments:
        """Both flattened."""
        return Moments(self.mean.flatten(*dims), self.variance.flatten(*dims))

    def reshape(self, *shape: int) -> Moments:
        """Both reshaped."""
        return Moments(self.mean.reshape(*shape), self.variance.reshape(*shape))


class SampledMoments(NamedTuple):
    """A Monte-Carlo estimate of :class:`Moments`, with the standard error of each of its entries."""

    mean: Tensor
    variance: Tensor
    standard_error: Moments


def sampled_moments(draws: Tensor, n_output_modes: int, *, covariance: bool) -> SampledMoments:
    """Mean and (co)variance of draws (n, B, *output_shape), each with its standard error."""
    n = len(draws)
    mean = draws.mean(0)
    spread = draws - mean
    if covariance:
        shape = draws.shape + (1,) * n_output_modes
        products = spread.view(shape) * spread.unflatten(1, (-1, *(1,) * n_output_modes))
    else:
        products = spread.square()
    variance = products.sum(0) / (n - 1)
    error = Moments((draws.var(0) / n).sqrt(), (products.var(0) / n).sqrt())
    return SampledMoments(mean, variance, error)


class ExactMoments(NamedTuple):
    """What a format computes: mean and variance (B, O), and the variance (B,) of ``w·f`` for weights w (B, O)."""

    mean: Tensor
    variance: Tensor
    variance_of: Callable[[Tensor], Tensor]


class MaskMoments(NamedTuple):
    """Mean and covariance of one scaled mask ``c`` of R entries.

    Attributes:
        mean: ``E[c]``, (R,).
        alike: ``(v, e)`` with ``Cov[c] = v I + e 11ᵀ``, for exchangeable laws.
        root: ``L`` (J, R) with ``Cov[c] = LᵀL``, for the others.
        dropped: False for a rank axis without a mask: ``c = 1``.
    """

    mean: Tensor
    alike: tuple[Tensor, Tensor] | None
    root: Tensor | None
    dropped: bool = True

    def covariance(self) -> Tensor:
        """``Cov[c]``, (R, R)."""
        if self.alike is not None:
            v, e = self.alike
            return v * torch.eye(len(self.mean), dtype=v.dtype, device=v.device) + e
        assert self.root is not None
        return self.root.mT @ self.root

    def second(self) -> Tensor:
        """``E[c cᵀ]``, (R, R)."""
        return self.covariance() + self.mean[:, None] * self.mean

    def to(self, like: Tensor) -> MaskMoments:
        """In the dtype of the data; formed in float64."""
        cast: Callable[[Tensor], Tensor] = lambda t: t.to(dtype=like.dtype, device=like.device)  # noqa: E731
        alike = None if self.alike is None else (cast(self.alike[0]), cast(self.alike[1]))
        return MaskMoments(cast(self.mean), alike, None if self.root is None else cast(self.root), self.dropped)


def mask_moments(law: Law, R: int, theta: Tensor, *, inverted: bool) -> MaskMoments | None:
    """The moments of the mask on a rank axis of size R as training scales it; None if the law has none."""
    if isinstance(law, ExchangeableLaw):
        mean, square, product = law.pair_moments(R, theta)
        squared_mean = mean * mean
        if not inverted:
            return MaskMoments(mean.expand(R), (square - product, product - squared_mean), None)
        alike = (square - product) / squared_mean, product / squared_mean - 1
        return MaskMoments(torch.ones_like(mean).expand(R), alike, None)
    mean = law.mean(R, theta)
    root = covariance_root(law, R, theta)
    if root is None:
        return None
    return MaskMoments(torch.ones_like(mean), None, root / mean) if inverted else MaskMoments(mean, None, root)


def covariance_root(law: Law, R: int, theta: Tensor) -> Tensor | None:
    """``L`` with ``Cov[c] = LᵀL``: the law's own if it offers one, else from its second moments."""
    own = getattr(law, "covariance_root", None)
    if own is not None:
        root: Tensor = own(R, theta)
        return root
    second = law.second_moment(R, theta)
    if second is None:
        return None
    mean = law.mean(R, theta)
    values, vectors = torch.linalg.eigh(second - mean[:, None] * mean[None, :])
    return vectors.mT * values.clamp(min=0).sqrt()[:, None]


def fixed_mask(R: int, like: Tensor) -> MaskMoments:
    """The moments of a rank axis that is not dropped: 1, without variance."""
    zero = like.new_zeros(())
    return MaskMoments(like.new_ones(R), (zero, zero), None, dropped=False)


# A rank axis that leads to the output: f_o = Σ_q c_q y_q V[o, q], for rows of y that are squared and summed.


def read_out(y: Tensor, V: Tensor, mask: MaskMoments, *, covariance: bool) -> tuple[Tensor, Tensor]:
    """Second moment and variance over the last mask, summed over rows.

    Args:
        y: (B, rows, Q), the running tensor.
        V: (O, Q), the output factor, or (B, O, Q), one for each sample.
        mask: the moments of the mask on Q.
        covariance: whether to return (B, O, O) instead of (B, O).

    Returns:
        ``Σ_rows E[f²]`` and ``Σ_rows Var[f]``.
    """
    rows, (outputs, Q) = y.shape[1], V.shape[-2:]
    if mask.alike is None or covariance or V.ndim == 3 or rows * outputs > (rows + outputs) * Q:
        return _read_out_gram(y, V, mask, covariance=covariance)
    v, e = mask.alike
    m = mask.mean[0]
    # y Vᵀ squared and summed over rows: (B, rows, Q) -> (B, O)
    squared_sums = (y @ V.mT).square().sum(1)
    sums_of_squares = y.square().sum(1) @ V.square().mT
    variance = v * sums_of_squares + e * squared_sums
    return variance + m * m * squared_sums, variance


def _read_out_gram(y: Tensor, V: Tensor, mask: MaskMoments, *, covariance: bool) -> tuple[Tensor, Tensor]:
    gram = y.mT @ y  # (B, Q, Q)
    spread = mask.covariance() * gram
    whole = spread + mask.mean[:, None] * mask.mean * gram
    if covariance:
        return V @ whole @ V.mT, V @ spread @ V.mT
    return ((V @ whole) * V).sum(-1), ((V @ spread) * V).sum(-1)


# CP: one rank axis, and it is the one that leads to the output.


def cp_moments(a: Tensor, V: Tensor, mask: MaskMoments, block: int, *, covariance: bool) -> ExactMoments:
    """CP: ``Var f_o = v Σ_r (a_r V[o,r])² + e (Σ_r a_r V[o,r])²``; for independent masks e = 0.

    Args:
        a: (B, R), ``a_r(x) = ⟨x, u0_r ∘ … ∘ u(N-1)_r⟩``.
        V: (O, R), the output factor.
        mask: the moments of the one mask.
        block: how many numbers may be held at once.
        covariance: whether to return the covariance between the outputs.
    """

    def variance_of(w: Tensor) -> Tensor:
        folded = a * (w @ V)
        return cp_moments(folded, V.new_ones(1, V.shape[1]), mask, block, covariance=False).variance.squeeze(1)

    if mask.alike is None or covariance:
        chunk = max(1, block // (V.shape[1] * max(V.shape)))
        parts = [_read_out_gram(rows, V, mask, covariance=covariance)[1] for rows in a.unsqueeze(1).split(chunk)]
        return ExactMoments((a * mask.mean) @ V.mT, torch.cat(parts), variance_of)
    v, e = mask.alike
    total = a @ V.mT
    variance = v * (a.square() @ V.square().mT) + e * total.square()
    return ExactMoments(mask.mean[0] * total, variance, variance_of)


# Tucker.


def tucker_moments(
    P: Tensor, core: Tensor, V: Tensor, masks: list[MaskMoments], out: MaskMoments, block: int, *, covariance: bool
) -> ExactMoments:
    """Tucker: the quadratic form of ``z = P ⊙ G`` with ``S_0 ⊗ … ⊗ S_N``, the mean² taken out.

    Args:
        P: (B, R_0, .., R_{N-1}), the projected input.
        core: (R_0, .., R_{N-1}, Q), the output ranks flattened to Q.
        V: (O, Q), the output factor.
        masks: the moments of the masks on the input modes.
        out: of the mask on Q.
        block: how many numbers may be held at once.
        covariance: whether to return the covariance between the outputs.
    """
    sizes = core.shape[:-1]
    largest = max(range(len(masks)), key=lambda n: sizes[n])
    joint = sizes.numel() // sizes[largest]
    paired = joint <= PAIRS_UP_TO and masks[largest].alike is not None and out.alike is not None
    if paired and not covariance:
        return _tucker_by_pairs(P, core, V, masks, out, largest)
    weighted = reduce(lambda t, n: multiply_along(t, masks[n].mean, n + 1), range(len(masks)), P)
    mean = ((weighted.flatten(1) @ core.flatten(0, -2)) * out.mean) @ V.mT

    chunk = max(1, block // max(core.numel(), V.shape[1] * max(V.shape)))
    variances = [_tucker_by_modes(part, core, V, masks, out, covariance) for part in P.split(chunk)]

    def variance_of(w: Tensor) -> Tensor:
        pairs = zip(P.split(chunk), (w @ V).unsqueeze(1).split(chunk), strict=True)
        return torch.cat([_tucker_by_modes(part, core, row, masks, out, False) for part, row in pairs]).squeeze(1)

    return ExactMoments(mean, torch.cat(variances), variance_of)


def _tucker_by_modes(
    P: Tensor, core: Tensor, V: Tensor, masks: list[MaskMoments], out: MaskMoments, covariance: bool
) -> Tensor:
    def read_out_last(z: Tensor) -> Pair:
        return read_out(z, V, out, covariance=covariance)

    return _over_modes((P.unsqueeze(-1) * core).unsqueeze(1), masks, read_out_last)[1]


def _over_modes(z: Tensor, masks: list[MaskMoments], read_out_last: Callable[[Tensor], Pair]) -> Pair:
    """E[f²] and Var[f] over these masks and the last; z: (B, rows, R_n, .., Q), rows squared and summed."""
    if not masks:
        return read_out_last(z)
    later = masks[1:]
    return over_mask(
        masks[0],
        lambda: _over_modes(z.sum(2), later, read_out_last),
        lambda: _over_modes(z.flatten(1, 2), later, read_out_last),
        lambda weights: _over_modes(torch.einsum("jr,bkr...->bkj...", weights, z).flatten(1, 2), later, read_out_last),
    )


def quadratic(covariance: Tensor, w: Tensor) -> Tensor:
    """``wᵀ C w`` for each sample: (B, O, O), (B, O) -> (B,)."""
    return torch.einsum("bo,bop,bp->b", w, covariance, w)


Pair = tuple[Tensor, Tensor]


def over_mask(
    mask: MaskMoments,
    summed: Callable[[], Pair],
    kept: Callable[[], Pair],
    combined: Callable[[Tensor], Pair],
) -> Pair:
    """Second moment and variance over one mask and all later ones.

    From ``S⊗S' - mmᵀ⊗m'm'ᵀ = mmᵀ⊗C' + C⊗S'`` with ``C = v I + e 11ᵀ`` (exchangeable) or ``C = LᵀL``.

    Args:
        mask: the moments of this mask.
        summed: the pair of the later masks, this rank axis summed.
        kept: the same with this rank axis kept as rows that are squared and summed.
        combined: the same with this rank axis contracted with each row of a matrix.
    """
    if not mask.dropped:
        return summed()
    if mask.alike is None:
        assert mask.root is not None
        second, variance = combined(mask.mean.unsqueeze(0))
        spread, _ = combined(mask.root)
        return second + spread, variance + spread
    v, e = mask.alike
    m = mask.mean[0]
    second, variance = summed()
    squares = v * kept()[0]
    return (e + m * m) * second + squares, m * m * variance + e * second + squares


def summed_second_moment(rows: Tensor, masks: list[MaskMoments], out: MaskMoments) -> Tensor:
    """``Σ_rows E[z zᵀ]`` of ``z_q = c_q Σ_k Π_n c_n[k_n] rows[k_0, .., q]``.

    Args:
        rows: (rows, R_0, .., Q), the rank axes that are masked and the last one.
        masks: the moments of the masks on R_0, ..
        out: of the mask on Q.

    Returns:
        (Q, Q).
    """
    if not masks:
        return out.second() * (rows.mT @ rows)
    mask, later = masks[0], masks[1:]
    if mask.alike is None:
        assert mask.root is not None
        factor = torch.cat([mask.root, mask.mean.unsqueeze(0)])  # AᵀA = E[c cᵀ]
        return summed_second_moment(torch.einsum("jr,br...->bj...", factor, rows).flatten(0, 1), later, out)
    v, e = mask.alike
    m = mask.mean[0]
    squares = v * summed_second_moment(rows.flatten(0, 1), later, out)
    return squares + (e + m * m) * summed_second_moment(rows.sum(1), later, out)


def _tucker_by_pairs(
    P: Tensor, core: Tensor, V: Tensor, masks: list[MaskMoments], out: MaskMoments, largest: int
) -> ExactMoments:
    """The same with matrix products only: the largest mode r exchangeable, the others joined to one small mode p.

    ``Var = v Σ_r Σ_pq S[p,q] z_rp z_rq + Σ_pq (e S + m² C)[p,q] (Σ_r z_rp)(Σ_r z_rq)``; the first sum is one
    product of (P_p P_q) with (H_p H_q) over r and the pairs p ≤ q.
    """
    largest_alike = masks[largest].alike
    assert largest_alike is not None
    assert out.alike is not None
    others = [n for n in range(len(masks)) if n != largest]
    # (B, R_0, ..) -> (T, B, R) and (R_0, .., Q) -> (T, R, Q), T the joint size of the other modes
    P = P.permute(*(n + 1 for n in others), 0, largest + 1).flatten(0, len(others) - 1) if others else P.unsqueeze(0)
    G = core.permute(*others, largest, -1).flatten(0, len(others) - 1) if others else core.unsqueeze(0)
    m_joint, C_joint, S_joint = _join([masks[n] for n in others], P)
    v, e = largest_alike
    m = masks[largest].mean[0]
    spread = e * S_joint + m * m * C_joint
    pairs = [(p, q) for p in range(len(P)) for q in range(p, len(P))]
    p, q = torch.triu_indices(len(P), len(P), device=P.device)
    weights = torch.where(p == q, 1.0, 2.0).to(P.dtype) * S_joint[p, q] * v

    def over_inputs(H: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance over the input masks of Σ P H, for each column of H: (T, R, K) -> (B, K)."""
        sums = P @ H  # (T, B, K)
        mean = m * torch.einsum("t,tbk->bk", m_joint, sums)
        variance = (torch.einsum("ts,sbk->tbk", spread, sums) * sums).sum(0)
        if not masks[largest].dropped:
            return mean, variance
        rows, columns = P.unbind(), H.unbind()  # indexing instead would scatter the gradient, number by number
        for (p, q), weight in zip(pairs, weights.unbind(), strict=True):
            variance = variance + (rows[p] * rows[q] * weight) @ (columns[p] * columns[q])
        return mean, variance

    mean, variance = over_inputs(G @ V.mT)
    out_v, out_e = out.alike
    out_m = out.mean[0]
    own = torch.zeros_like(mean[:, :1]).expand(len(mean), G.shape[2])  # E[(Σ_r z_rq)²], the output mask's own part
    if out.dropped:
        core_mean, core_variance = over_inputs(G)
        own = out_v * (core_variance + core_mean.square())

    def over_output(mean: Tensor, variance: Tensor, squares: Tensor) -> Tensor:
        return (out_e + out_m * out_m) * variance + out_e * mean.square() + squares

    def variance_of(w: Tensor) -> Tensor:
        readout = w @ V  # (B, Q)
        z = P * torch.einsum("trq,bq->tbr", G, readout)  # (T, B, R)
        sums = z.sum(2)
        one_mean = m * (m_joint @ sums)
        one_variance = ((spread @ sums) * sums).sum(0) + v * torch.einsum("ts,tbr,sbr->b", S_joint, z, z)
        return over_output(one_mean, one_variance, (own * readout.square()).sum(1))

    return ExactMoments(out_m * mean, over_output(mean, variance, own @ V.square().mT), variance_of)


def _join(masks: list[MaskMoments], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, covariance and second moment of a Kronecker product of independent masks."""
    mean, covariance, second = like.new_ones(1), like.new_zeros(1, 1), like.new_ones(1, 1)
    for mask in masks:
        own = mask.covariance()
        squared_mean = mask.mean[:, None] * mask.mean
        covariance = torch.kron(mean[:, None] * mean, own) + torch.kron(covariance, own + squared_mean)
        second = torch.kron(second, own + squared_mean)
        mean = torch.kron(mean, mask.mean)
    return mean, covariance, second


def joint_mask(masks: list[MaskMoments], like: Tensor) -> MaskMoments:
    """The mask of several output modes flattened to one."""
    if len(masks) == 1:
        return masks[0]
    if not any(mask.dropped for mask in masks):
        return fixed_mask(prod(len(mask.mean) for mask in masks), like)
    mean, covariance, _ = _join(masks, like)
    values, vectors = torch.linalg.eigh(covariance)
    return MaskMoments(mean, None, vectors.mT * values.clamp(min=0).sqrt()[:, None])


# Trains and rings: bonds in a chain; each one is summed or kept while its core is absorbed.


def train_variance(
    y: Tensor, cores: list[Tensor], masks: list[MaskMoments], read_out_last: Callable[[Tensor], Pair]
) -> Tensor:
    """The variance over all bonds, bond by bond.

    Args:
        y: (B, R_1, I_1, .., I_{N-1}, ..), the input after the first core; what follows the modes is carried along.
        cores: the other input cores, (R_n, I_n, R_{n+1}).
        masks: the moments of the masks on the bonds in front of these cores.
        read_out_last: second moment and variance over what is left, from (B, rows, R_N, ..), summed over rows.
    """
    return _over_bonds(y.unsqueeze(1), cores, masks, read_out_last)[1]


def _over_bonds(
    y: Tensor, cores: list[Tensor], masks: list[MaskMoments], read_out_last: Callable[[Tensor], Pair]
) -> Pair:
    """E[f²] and Var[f] over the masks on these bonds and the last; y: (B, rows, R, I, ..)."""
    if not cores:
        return read_out_last(y)
    core, later = cores[0], (cores[1:], masks[1:], read_out_last)

    def kept() -> Tensor:  # (B, rows, R, I, ..) -> (B, rows, R, R', ..)
        return torch.einsum("bkri...,ris->bkrs...", y, core)

    return over_mask(
        masks[0],
        lambda: _over_bonds(torch.einsum("bkri...,ris->bks...", y, core), *later),
        lambda: _over_bonds(kept().flatten(1, 2), *later),
        lambda weights: _over_bonds(torch.einsum("jr,bkr...->bkj...", weights, kept()).flatten(1, 2), *later),
    )


def double_over_outputs(
    second: Tensor, variance: Tensor, cores: list[Tensor], masks: list[MaskMoments], *, covariance: bool
) -> Pair:
    """Second moment and variance over the bonds in front of the output cores, each bond doubled.

    Args:
        second: (B, O, P, R, R, ..), second moments of the running tensor, the outputs so far in front; what follows the
            doubled bond is carried along.
        variance: of the same shape.
        cores: output cores, (R_n, O_n, R_{n+1}).
        masks: the moments of the masks on the bonds in front of them.
        covariance: whether O and P are all pairs of outputs, or P stays 1.
    """
    for core, mask in zip(cores, masks, strict=True):
        own, squared_mean = mask.covariance(), mask.mean[:, None] * mask.mean
        own, squared_mean = (matrix.view(*matrix.shape, *[1] * (second.ndim - 5)) for matrix in (own, squared_mean))
        second, variance = (own + squared_mean) * second, squared_mean * variance + own * second
        if covariance:
            equation = "bxyrs...,rot,spu->bxoyptu..."
            second, variance = (
                torch.einsum(equation, t, core, core).flatten(3, 4).flatten(1, 2) for t in (second, variance)
            )
        else:
            equation = "bxyrs...,rot,sou->bxoytu..."
            second, variance = (torch.einsum(equation, t, core, core).flatten(1, 2) for t in (second, variance))
    return second, variance
