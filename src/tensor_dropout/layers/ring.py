"""Tensor-ring regression: ``W[i_0,..,i_N] = trace(C_0[i_0] C_1[i_1] … C_N[i_N])``, a train whose ends are joined."""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.layers.decomposition import Ranks, left_singular
from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.initialize import target_norm
from tensor_dropout.layers.moments import (
    ExactMoments,
    Grams,
    MaskMoments,
    bond_grams,
    double_over_outputs,
    held_by_bonds,
    quadratic,
)
from tensor_dropout.layers.ranks import Rank
from tensor_dropout.layers.regression import TensorRegression, index_letters
from tensor_dropout.layers.tt import TTDecomposition, TTRegression, orthonormal_core


class TensorRingRegression(TensorRegression):
    """Tensor regression with a tensor-ring weight: the paper's idea on one more format.

    ``W[i_0,..,i_N] = trace(C_0[i_0] · C_1[i_1] ⋯ C_N[i_N])`` with cores ``C_n: (R_n, size_n, R_{n+1})`` and
    ``R_{N+1} = R_0``: bond n lies in front of core n, and bond 0 closes the ring. Tensor dropout draws one mask per
    bond, independently. With ``R_0 = 1`` it is a tensor train.

    While x is contracted, two bonds are open: a sample's running tensor has ``R_n R_m`` entries in the place of the
    modes between them. It is no larger than the features where ``R_0 R_1`` is at most the number of channels.

    Args:
        input_shape: the sizes of the input modes, without the batch; channels first.
        output_shape: the sizes of the output modes; an int is one mode.
        rank: one rank per bond (N+1 of them for N+1 modes); an int for all; a float in (0, 1], the fraction of the
            dense parameter count; or "full": 1 for bond 0 and the full ranks of a tensor train for the others. No rank
            may be larger than the largest of those.
        dropout: a :class:`TensorDropout`, whose ``modes`` are bond numbers 0..N; a number θ is short for
            ``TensorDropout(θ)``.
        bias: whether to add a bias of ``output_shape``.
        init: "pool": spatial cores start as average pooling, extra bonds orthogonal to it; "normal": random directions.
            Either way the output has, on average, the variance of pooling + nn.Linear.
        device: where the parameters live.
        dtype: their type.

    Raises:
        TensorDropoutError: if a shape, rank or setting is not possible.

    Example:
        >>> import torch, tensor_dropout as td
        >>> head = td.TensorRingRegression((512, 4, 4), 100, rank=16, dropout=0.8)
        >>> head(torch.randn(2, 512, 4, 4)).shape
        torch.Size([2, 100])
        >>> head.rank, round(head.compression_ratio, 2)
        ((16, 16, 16, 16), 5.16)
    """

    @classmethod
    def full_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """1 for bond 0, and the full ranks of a tensor train."""
        return (1, *TTRegression.full_ranks(shape))

    @classmethod
    def largest_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The largest full rank, for every bond: a ring may be opened anywhere."""
        return (max(TTRegression.full_ranks(shape)),) * len(shape)

    @classmethod
    def default_rank(cls, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Rank:
        """The same for all bonds: the product of two is at most half the channels."""
        largest = cls.largest_ranks(input_shape + output_shape)
        return tuple(min(max(1, isqrt(input_shape[0] // 2)), most) for most in largest)

    def _count(self, ranks: tuple[int, ...]) -> int:
        bonds = (*ranks, ranks[0])
        return sum(bonds[n] * size * bonds[n + 1] for n, size in enumerate(self.weight_shape))

    def _make_parameters(self, **factory: Any) -> None:
        bonds = (*self._ranks, self._ranks[0])
        self.cores = nn.ParameterList(
            torch.empty(bonds[n], size, bonds[n + 1], **factory) for n, size in enumerate(self.weight_shape)
        )

    def _fill(self) -> None:
        # W is a sum of outer products, one for each choice of the bonds. Their vectors have unit length and independent
        # directions, so that on average their squared norms add up to the number of those that are not zero.
        n_in = len(self.input_shape)
        pooled = min(self._ranks[1 : n_in + 1])  # bonds that carry a pooled channel all the way through
        cores = []
        for mode, core in enumerate(self.cores):
            filled = torch.randn(core.shape, device=core.device, dtype=torch.float32)
            filled = nn.functional.normalize(filled, dim=1)
            if self.init != "normal" and 0 < mode < n_in:
                filled = orthonormal_core(filled, pool=True)
            elif self.init != "normal" and mode == n_in:
                filled[pooled:] = 0.0
            cores.append(filled)
        terms = prod(self._ranks)
        if self.init != "normal":
            terms = self._ranks[0] * pooled * prod(self._ranks[n_in + 1 :])
        scale = target_norm(self.input_shape, self.output_shape) / terms**0.5
        for core, filled in zip(self.cores, cores, strict=True):
            core.copy_(filled * scale ** (1 / len(cores)))

    def _indices(self) -> tuple[str, list[str], str, str]:
        n_in, n_out = len(self.input_shape), len(self.output_shape)
        inputs, outputs, bonds = index_letters(n_in, n_out, n_in + n_out)
        closed = bonds + bonds[0]
        cores = [closed[n] + mode + closed[n + 1] for n, mode in enumerate(inputs + outputs)]
        return inputs, [inputs[0] + closed[:2], *cores[1:]], outputs, bonds

    def _projection(self) -> tuple[int, str]:
        inputs, _, _, bonds = self._indices()
        return 1, bonds[1] + inputs[1:] + bonds[0]

    channel_parameter = ("cores.0", 1)

    def finish_projection(self, first: Tensor) -> Tensor:
        """(R_0 R_1, B, *space) -> (B, R_1, *space, R_0)."""
        return first.unflatten(0, (self._ranks[0], self._ranks[1])).movedim(2, 0).movedim(1, -1)

    def _exact_moments(self, x: Tensor, masks: list[MaskMoments], block: int, covariance: bool) -> ExactMoments:
        # x: (B, R_1, I_1, .., I_{N-1}, R_0); bond 0 is carried along until the last core closes the ring.
        n_in = len(self.input_shape)
        cores = [core.to(x.dtype) for core in self.cores]
        inner, outer = cores[1:n_in], cores[n_in:]
        before, behind = masks[1:n_in], [*masks[n_in:], masks[0]]
        held = held_by_bonds(tuple(x.shape[1:]), inner, before)
        first, ranks = self._ranks[0], self._ranks[1:]
        doubled = max((R * first) ** 2 for R in ranks[n_in - 1 :]) * prod(self.output_shape[:-1])
        chunk = max(1, block // max(held, doubled * (prod(self.output_shape) if covariance else 1)))

        def variance(covariance: bool) -> Tensor:
            grams = (bond_grams(part, inner, before) for part in x.split(chunk))
            return torch.cat([_close(part, outer, behind, covariance=covariance) for part in grams])

        mean = x
        for core, mask in zip(inner, before, strict=True):
            mean = torch.einsum("bri...,ris->bs...", mean, core * mask.mean[:, None, None])
        weight = outer[0] * behind[0].mean[:, None, None]
        for core, mask in zip(outer[1:], behind[1:-1], strict=True):
            weight = torch.einsum("ros,spt->ropt", weight, core * mask.mean[:, None, None]).flatten(1, 2)
        mean = torch.einsum("brt,rot->bo", mean, weight * masks[0].mean)

        def variance_of(w: Tensor) -> Tensor:
            if len(outer) > 1:
                return quadratic(variance(True), w)

            pairs = zip(x.split(chunk), w.split(chunk), strict=True)
            grams = ((bond_grams(part, inner, before), row) for part, row in pairs)
            return torch.cat([_close(part, outer, behind, weights=row) for part, row in grams]).squeeze(1)

        return ExactMoments(mean, variance(covariance), variance_of)

    def operands(self) -> list[Tensor]:
        """The cores; the first with its channels in front, (I_0, R_0, R_1)."""
        cores = list(self.cores)
        return [cores[0].movedim(1, 0), *cores[1:]]

    @property
    def mode_numbers(self) -> tuple[int, ...]:
        """Bond numbers, 0 to N."""
        return tuple(range(len(self.weight_shape)))

    def reference_weight(self, masks: Masks) -> Tensor:
        """The product of the masked cores, and its trace."""
        weight = None
        for core, mask in zip(self.cores, masks, strict=True):
            masked = core if mask is None else core * mask[:, None, None]
            weight = masked if weight is None else torch.tensordot(weight, masked, dims=1)
        assert weight is not None
        return weight.diagonal(dim1=0, dim2=-1).sum(-1)


def _close(
    grams: Grams,
    cores: list[Tensor],
    masks: list[MaskMoments],
    *,
    covariance: bool = False,
    weights: Tensor | None = None,
) -> Tensor:
    """The variance over the bonds at the output cores and over bond 0, each of them doubled.

    Args:
        grams: sums of products in front of the output cores, (B, R R_0, R R_0).
        cores: the output cores, (R_n, O_n, R_{n+1}); the last ends in R_0.
        masks: the moments of the masks on the bonds in front of these cores, and then on bond 0.
        covariance: whether to return (B, O, O) instead of (B, O).
        weights: (B, O): return that of ``weights·f``, (B, 1), instead; for one output core.
    """
    if len(cores) == 1:
        whole = grams.over_last(masks)[:, None, None]
    else:
        first = len(masks[-1].mean)
        # (B, R, R_0, R, R_0) -> (B, O, P, R, R, R_0, R_0)
        opened = (t.unflatten(2, (-1, first)).unflatten(1, (-1, first)).transpose(2, 3)[:, None, None] for t in grams)
        grams = Grams(*opened).over(masks[-1])
        grams = double_over_outputs(grams, cores[:-1], masks[:-2], covariance=covariance)
        whole = grams.over(masks[-2], 2).second.transpose(4, 5).flatten(5).flatten(3, 4)  # (B, O, P, R R_0, R R_0)
    V = cores[-1].transpose(0, 1).flatten(1)  # (O, R R_0)
    if weights is not None:
        V = (weights @ V)[:, None, None, None]  # (B, 1, 1, 1, R R_0)
    if covariance:
        return (V @ whole @ V.mT).transpose(2, 3).flatten(3).flatten(1, 2)
    return ((V @ whole) * V).sum(-1).flatten(1)


class RingDecomposition(TTDecomposition):
    """``W[i_0,..,i_N] ≈ trace(C_0[i_0] ⋯ C_N[i_N])`` by successive SVDs, the first of which is split over two bonds.

    A search for the rank keeps bond 0 at 1, where every weight can be written exactly.
    """

    @property
    def exact_rank(self) -> Ranks:
        """See :class:`Decomposition`."""
        return (1, *super().exact_rank)

    @property
    def path(self) -> list[Ranks]:
        """See :class:`Decomposition`."""
        return [(1, *ranks) for ranks in super().path]

    def at(self, ranks: Ranks) -> list[Tensor]:
        """See :class:`Decomposition`."""
        first, *others = ranks
        basis = self._splits[0][0]
        if not self.grid:
            return tensor_ring(self.weight, first, tuple(others), basis)
        R = min(others[: len(self.grid) + 1])  # a pooled channel passes through all bonds up to the output
        opened, *rest = tensor_ring(self.weight, first, (R, *others[len(self.grid) + 1 :]), basis)
        return [opened * prod(self.grid) ** -0.5, *self._pass_on(opened.shape[-1]), *rest]


def tensor_ring(weight: Tensor, first: int, ranks: Ranks, first_basis: Tensor) -> list[Tensor]:
    """TR-SVD: the singular vectors of the first cut are split over bonds 0 and 1; a train of what is left.

    Args:
        weight: (*modes).
        first: the rank of bond 0.
        ranks: the most that each of the other bonds may have.
        first_basis: the left singular vectors of W as a matrix, cut behind its first mode.

    Returns:
        The cores; the first as (I_0, R_0, R_1).
    """
    kept = first_basis[:, : first * ranks[0]]
    R = ranks[0] if first > 1 else kept.shape[1]
    rest = kept.T @ weight.flatten(1)
    missing = first * R - kept.shape[1]
    if missing:  # directions that the weight does not use: they are ranks for the training to come
        generator = torch.Generator().manual_seed(first)
        drawn = torch.randn(len(kept), missing, generator=generator, dtype=weight.dtype).to(weight.device)
        kept = torch.cat([kept, nn.functional.normalize(drawn, dim=0)], 1)
        rest = torch.cat([rest, rest.new_zeros(missing, rest.shape[1])])
    cores = [kept.reshape(-1, first, R)]
    # (R_0 R_1, everything) -> (R_1, I_1, .., I_N, R_0)
    rest = rest.reshape(first, R, *weight.shape[1:]).movedim(0, -1)
    for n, most in enumerate(ranks[1:], 1):
        matrix = rest.reshape(cores[-1].shape[-1] * weight.shape[n], -1)
        U = left_singular(matrix)[0][:, :most]
        cores.append(U.reshape(-1, weight.shape[n], U.shape[1]))
        rest = U.T @ matrix
    return [*cores, rest.reshape(-1, weight.shape[-1], first)]
