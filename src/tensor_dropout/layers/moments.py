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

from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.laws import ExchangeableLaw, Law

PAIRS_UP_TO = 16
"""Tucker: the joint rank of all input modes but one, up to which products of pairs are kept for gradients."""
PLANNED_BATCH = 32
"""The batch that work is counted for while a graph is traced, where it is not known."""
IN_CACHE = 2**18
"""How many numbers a processor holds near: rows that are squared and summed are formed in blocks of so many."""


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
    if not covariance and out.alike is not None:
        form = cheapest_tucker_form(len(P), core.shape, len(V), masks)
        if form == "pairs":
            return _tucker_by_pairs(P, core, V, masks, out)
        if form != "modes":
            return _tucker_by_rows(P, core, V, masks, out, block, outputs_first=form == "outputs")
    weighted = reduce(lambda t, n: multiply_along(t, masks[n].mean, n + 1), range(len(masks)), P)
    mean = ((weighted.flatten(1) @ core.flatten(0, -2)) * out.mean) @ V.mT

    held = prod([core.shape[n] for n in range(len(masks)) if masks[n].dropped]) * core.shape[-1]
    chunk = max(1, block // max(held, V.shape[1] * max(V.shape)))
    variances = [_tucker_by_modes(part, core, V, masks, out, covariance) for part in P.split(chunk)]

    def variance_of(w: Tensor) -> Tensor:
        pairs = zip(P.split(chunk), (w @ V).unsqueeze(1).split(chunk), strict=True)
        return torch.cat([_tucker_by_modes(part, core, row, masks, out, False) for part, row in pairs]).squeeze(1)

    return ExactMoments(mean, torch.cat(variances), variance_of)


TuckerForm = Literal["outputs", "rows", "pairs", "modes"]


def cheapest_tucker_form(batch: int, core: Sequence[int], outputs: int, masks: list[MaskMoments]) -> TuckerForm:
    """Which form of the variances takes the fewest multiply-adds; the output mask is exchangeable.

    With gradients it is "pairs" by its size alone: it is the one that keeps many numbers.

    - "outputs", "rows": where one input mode at most is masked, see :func:`_tucker_by_rows`.
    - "pairs": where the largest one and others are, see :func:`_tucker_by_pairs`.
    - "modes": mode by mode for each sample, whatever the masks are.

    Args:
        batch: the number of samples.
        core: (R_0, .., R_{N-1}, Q).
        outputs: the number of outputs.
        masks: the moments of the masks on the input modes.
    """
    if torch.compiler.is_compiling():
        batch = PLANNED_BATCH
    *sizes, Q = core
    kept = _kept_mode(sizes, masks)
    R, T = sizes[kept], prod(sizes) // sizes[kept]
    rows = prod([size for size, mask in zip(sizes, masks, strict=True) if mask.dropped])
    modes = batch * (R * T * Q + min(rows * Q * outputs, (rows + outputs) * Q * Q))
    if masks[kept].alike is None:
        return "modes"
    if sum([mask.dropped for mask in masks]) > 1:
        if torch.is_grad_enabled():
            return "pairs" if T <= PAIRS_UP_TO else "modes"
        pairs = R * (T * Q * outputs + (batch + 2) * (T * (T + 1) // 2) * (Q + outputs))
        return "pairs" if pairs <= modes else "modes"
    by_rows = batch * R * Q * (T + outputs)
    by_outputs = R * T * (Q * outputs + batch * (Q + outputs))
    if modes < min(by_rows, by_outputs):
        return "modes"
    return "outputs" if by_outputs <= by_rows else "rows"


def _kept_mode(sizes: Sequence[int], masks: list[MaskMoments]) -> int:
    """The largest masked input mode; the largest if none is masked."""
    masked = [size if mask.dropped else 0 for size, mask in zip(sizes, masks, strict=True)]
    return masked.index(max(masked)) if max(masked) else list(sizes).index(max(sizes))


def _tucker_by_modes(
    P: Tensor, core: Tensor, V: Tensor, masks: list[MaskMoments], out: MaskMoments, covariance: bool
) -> Tensor:
    def read_out_last(z: Tensor) -> Pair:
        return read_out(z, V, out, covariance=covariance)

    kept = [n for n in range(len(masks)) if masks[n].dropped]
    fixed = [n for n in range(len(masks)) if not masks[n].dropped]
    if fixed:  # summed at once: (K, B, L) @ (K, L, Q)
        rows = P.permute(*(n + 1 for n in kept), 0, *(n + 1 for n in fixed)).reshape(-1, len(P), _size(core, fixed))
        columns = core.permute(*kept, *fixed, -1).reshape(len(rows), rows.shape[2], -1)
        z = torch.bmm(rows, columns).transpose(0, 1).reshape(len(P), *(core.shape[n] for n in kept), -1)
    else:
        z = P.unsqueeze(-1) * core
    return _over_modes(z.unsqueeze(1), [masks[n] for n in kept], read_out_last)[1]


def _size(tensor: Tensor, dims: list[int]) -> int:
    return prod([tensor.shape[n] for n in dims])


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


def _tucker_by_rows(
    P: Tensor,
    core: Tensor,
    V: Tensor,
    masks: list[MaskMoments],
    out: MaskMoments,
    block: int,
    *,
    outputs_first: bool,
) -> ExactMoments:
    """The same where one input mode r at most is masked, and exchangeable: the other modes t are summed at once.

    With ``y_rq = Σ_t P_rt G_rtq`` and ``f_ro = Σ_q y_rq V_oq`` the form needs ``Σ_r f_ro²`` and ``Σ_r y_rq²`` alone.
    ``f`` is ``y Vᵀ`` for every sample, or with ``outputs_first`` P times ``G Vᵀ``, formed once for all samples.
    """
    kept = _kept_mode(core.shape[:-1], masks)
    alike = masks[kept].alike
    assert alike is not None
    assert out.alike is not None
    (v, e), (out_v, out_e) = alike, out.alike
    m, out_m = masks[kept].mean[0], out.mean[0]
    R, Q = core.shape[kept], core.shape[-1]
    P = P.movedim(kept + 1, 0).reshape(R, len(P), -1)  # (R, B, T)
    G = core.movedim(kept, 0).reshape(R, -1, Q)  # (R, T, Q)
    total = P.transpose(0, 1).flatten(1) @ G.flatten(0, 1)  # Σ_r y_rq: (B, Q)
    total_out = total @ V.mT
    squares, squares_out = torch.zeros_like(total), torch.zeros_like(total_out)
    if masks[kept].dropped:
        for rows, columns in _in_blocks(P, G, max(V.shape) * (max(P.shape[1:]) if outputs_first else len(P[0])), block):
            y = None if outputs_first and not out.dropped else torch.bmm(rows, columns)
            f = torch.bmm(rows, columns @ V.mT) if y is None or outputs_first else y @ V.mT
            squares_out = squares_out + f.square().sum(0)
            if y is not None:
                squares = squares + y.square().sum(0)
    own = out_v * (v * squares + (e + m * m) * total.square())  # the output mask's own part

    def over_output(total: Tensor, squares: Tensor, own: Tensor) -> Tensor:
        second = out_e + out_m * out_m
        return second * v * squares + (second * e + out_e * m * m) * total.square() + own

    def variance_of(w: Tensor) -> Tensor:
        readout = w @ V  # (B, Q)
        z = (P * (G @ readout.mT).mT).sum(2)  # (R, B)
        return over_output(z.sum(0), z.square().sum(0), (own * readout.square()).sum(1))

    variance = over_output(total_out, squares_out, own @ V.square().mT)
    return ExactMoments(out_m * m * total_out, variance, variance_of)


def _in_blocks(P: Tensor, G: Tensor, held: int, block: int) -> list[tuple[Tensor, Tensor]]:
    """(R, B, T) and (R, T, Q) in blocks of R, so that what is formed, ``held`` numbers for each r, stays small."""
    if torch.compiler.is_compiling():
        return [(P, G)]
    step = max(1, (IN_CACHE if P.device.type == "cpu" else block) // held)
    return list(zip(P.split(step), G.split(step), strict=True))


def _tucker_by_pairs(P: Tensor, core: Tensor, V: Tensor, masks: list[MaskMoments], out: MaskMoments) -> ExactMoments:
    """The same with matrix products only: the largest masked mode r exchangeable, the others joined to a small mode p.

    ``Var = v Σ_r Σ_pq S[p,q] z_rp z_rq + Σ_pq (e S + m² C)[p,q] (Σ_r z_rp)(Σ_r z_rq)``; the first sum is one
    product of (P_p P_q) with (H_p H_q) over r and the pairs p ≤ q.
    """
    largest = _kept_mode(core.shape[:-1], masks)
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


# Trains and rings: bonds in a chain. Each is summed, or kept, which squares its entries one by one. Whatever is squared
# ends in sums of products at the last bond; they are added up, and the outputs are formed from them once.


class Weights(NamedTuple):
    """``second · E[f²] + variance · Var[f]`` is to be found; ``variance`` is None for zero."""

    second: Tensor
    variance: Tensor | None

    def over(self, mask: MaskMoments) -> Iterator[tuple[Tensor | Literal["summed", "squared"], Weights]]:
        """The same over one mask: what is left to be found of the later ones.

        Yields:
            What happens to the bond: it is summed, each of its entries is squared, or it is contracted with a matrix
            (J, R) of which each row is squared; and the weights of the pair of the later masks then.
        """
        if not mask.dropped:
            yield "summed", self
            return
        both = self.second if self.variance is None else self.second + self.variance
        if mask.alike is None:
            assert mask.root is not None
            yield mask.mean.unsqueeze(0), self
            yield mask.root, Weights(both, None)
            return
        v, e = mask.alike
        squared_mean = mask.mean[0].square()
        variance = None if self.variance is None else self.variance * squared_mean
        yield "summed", Weights(both * e + self.second * squared_mean, variance)
        yield "squared", Weights(both * v, None)


class Grams(NamedTuple):
    """Sums of products at a bond, (B, .., K, K): those for ``E[f f']`` and those for ``Cov[f, f']``."""

    second: Tensor
    variance: Tensor

    def over(self, mask: MaskMoments, dims: int = 0) -> Grams:
        """The same over one mask, on the last two axes or with ``dims`` axes behind them."""
        own, squared_mean = mask.covariance(), mask.mean[:, None] * mask.mean
        own, squared_mean = (matrix.view(*matrix.shape, *[1] * dims) for matrix in (own, squared_mean))
        return Grams((own + squared_mean) * self.second + own * self.variance, squared_mean * self.variance)

    def over_last(self, masks: list[MaskMoments]) -> Tensor:
        """The variance of what is left, (B, K, K), over the last masks; K is all their bonds together."""
        _, covariance, second = _join(masks, self.second)
        return second * self.second + covariance * self.variance


class Running(NamedTuple):
    """What the features have become after some cores.

    Attributes:
        tensor: (B, rows, D), rows that are squared and summed, or the sums of their products, (B, D, D).
        dims: what D is: the bond, the input modes still to come, and what is carried along.
        doubled: which of the two.
    """

    tensor: Tensor
    dims: tuple[int, ...]
    doubled: bool = False

    def gram(self) -> Tensor:
        """The sums of products, (B, D, D)."""
        return self.tensor if self.doubled else self.tensor.mT @ self.tensor

    def summed(self, core: Tensor, matrix: Tensor | None = None) -> Running:
        """The bond contracted with the core, or first with each row of a matrix (J, R)."""
        R, S, flat, E = self.dims[0], core.shape[2], core.flatten(0, 1), prod(self.dims[2:])
        dims, many = (S, *self.dims[2:]), matrix is not None and len(matrix) > 1
        if not self.doubled and not (many and is_doubled(self.tensor.shape[1], self.dims, S)):
            cores = (core if matrix is None else matrix[:, :, None, None] * core).view(-1, *flat.shape)
            kept = torch.einsum("bkxe,jxs->bkjse", self.tensor.unflatten(2, (-1, E)), cores)
            return Running(kept.flatten(3).flatten(1, 2), dims)
        pairs = self.gram()
        if matrix is not None:
            second = (matrix.mT @ matrix)[:, None, :, None]
            pairs = pairs.unflatten(2, (R, -1)).unflatten(1, (R, -1)) * second
        left = flat.mT @ pairs.reshape(len(pairs), len(flat), -1)  # (B, S, E D)
        both = torch.einsum("bxye,ys->bxse", left.reshape(len(pairs), S * E, -1, E), flat)
        return Running(both.flatten(2), dims, True)

    def squared(self, core: Tensor) -> Running:
        """Each entry of the bond with its slice of the core."""
        (R, n, *_), S = self.dims, core.shape[2]
        dims, E = (S, *self.dims[2:]), prod(self.dims[2:])
        if not self.doubled and not is_doubled(self.tensor.shape[1], self.dims, S):
            kept = torch.einsum("bkrie,ris->bkrse", self.tensor.unflatten(2, (R, n, E)), core)
            return Running(kept.flatten(3).flatten(1, 2), dims)
        if self.doubled:
            pairs = self.tensor.unflatten(2, (R, -1)).unflatten(1, (R, -1)).diagonal(dim1=1, dim2=3).movedim(-1, 1)
        else:
            rows = self.tensor.unflatten(2, (R, -1)).transpose(1, 2)  # (B, R, k, I E)
            pairs = rows.mT @ rows  # (B, R, I E, I E)
        left = core.mT @ pairs.reshape(-1, R, n, E * n * E)  # (B, R, S, E I E)
        both = torch.einsum("brxif,ris->bxsf", left.reshape(-1, R, S * E, n, E), core)
        return Running(both.flatten(2), dims, True)


def is_doubled(rows: int, dims: tuple[int, ...], S: int) -> bool:
    """Whether squaring a bond's entries takes fewer multiply-adds on sums of products than on each row."""
    R, n, E = dims[0], dims[1], prod(dims[2:])
    by_rows = rows * R * S * E * (n + S * E)
    return R * n * E * (rows * n * E + S * n * E + S * S * E) < by_rows


def held_by_bonds(
    dims: tuple[int, ...], cores: list[Tensor], masks: list[MaskMoments], rows: int = 1, doubled: bool = False
) -> int:
    """The most numbers that a sample holds while it absorbs these cores: as :class:`Running` goes, without numbers."""
    D = prod(dims)
    if not cores:
        return max(rows * D, D * D)
    (R, n, *_), E, S = dims, prod(dims[2:]), cores[0].shape[2]
    behind, later = (S, *dims[2:]), (cores[1:], masks[1:])
    if not doubled and not is_doubled(rows, dims, S):
        return max(rows * D, held_by_bonds(behind, *later, rows), held_by_bonds(behind, *later, rows * R))
    whole = max(D * D, D * S * E) if doubled or masks[0].alike is None else rows * D
    squared = max(D * D // R, R * S * E * n * E, held_by_bonds(behind, *later, 1, True))
    return max(whole, squared, 0 if doubled else held_by_bonds(behind, *later, rows))


def bond_grams(y: Tensor, cores: list[Tensor], masks: list[MaskMoments]) -> Grams:
    """The variance over all bonds in front of these cores and over what is behind them, as sums at the last bond.

    Args:
        y: (B, R_1, I_1, .., I_{N-1}, ..), the input after the first core; what follows the modes is carried along.
        cores: the other input cores, (R_n, I_n, R_{n+1}).
        masks: the moments of the masks on the bonds in front of these cores.

    Returns:
        (B, K, K), with K the last bond and what was carried along.
    """
    start = Running(y.flatten(1).unsqueeze(1), tuple(y.shape[1:]))
    ends = list(_over_bonds(start, cores, masks, Weights(y.new_zeros(()), y.new_ones(()))))
    (variance,) = (own * end.gram() for (_, own), end in ends if own is not None)
    sums = [own * end.tensor for (own, _), end in ends if end.doubled]
    rows = [end.tensor for _, end in ends if not end.doubled]
    if rows:  # one product for all
        weighted = [own * end.tensor for (own, _), end in ends if not end.doubled]
        sums.append(torch.cat(weighted, 1).mT @ torch.cat(rows, 1))
    return Grams(reduce(torch.add, sums), variance)


def _over_bonds(
    running: Running, cores: list[Tensor], masks: list[MaskMoments], weights: Weights
) -> Iterator[tuple[Weights, Running]]:
    """What is left at the last bond, each with its weights."""
    if not cores:
        yield weights, running
        return
    for how, left in weights.over(masks[0]):
        if isinstance(how, Tensor):
            after = running.summed(cores[0], how)
        else:
            after = running.squared(cores[0]) if how == "squared" else running.summed(cores[0])
        yield from _over_bonds(after, cores[1:], masks[1:], left)


def double_over_outputs(grams: Grams, cores: list[Tensor], masks: list[MaskMoments], *, covariance: bool) -> Grams:
    """Over the bonds in front of the output cores, each bond doubled.

    Args:
        grams: (B, O, P, R, R, ..), the outputs so far in front; what follows the doubled bond is carried along.
        cores: output cores, (R_n, O_n, R_{n+1}).
        masks: the moments of the masks on the bonds in front of them.
        covariance: whether O and P are all pairs of outputs, or P stays 1.
    """
    equation = "bxyrs...,rot,spu->bxoyptu..." if covariance else "bxyrs...,rot,sou->bxoytu..."
    for core, mask in zip(cores, masks, strict=True):
        doubled = [torch.einsum(equation, t, core, core) for t in grams.over(mask, grams.second.ndim - 5)]
        second, variance = (t.flatten(3, 4) if covariance else t for t in doubled)
        grams = Grams(second.flatten(1, 2), variance.flatten(1, 2))
    return grams
