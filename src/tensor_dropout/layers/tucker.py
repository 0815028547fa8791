"""Tucker regression: ``W = G ×_0 U0 ×_1 U1 … ×_N UN``."""

from __future__ import annotations

from functools import cached_property, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.decomposition import (
    Decomposition,
    Ranks,
    left_singular,
    numerical_rank,
    threshold_path,
    unfold,
)
from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.initialize import fill_orthonormal_, fill_pooling_, random_directions, target_norm
from tensor_dropout.layers.moments import (
    ExactMoments,
    MaskMoments,
    joint_mask,
    summed_second_moment,
    tucker_moments,
)
from tensor_dropout.layers.ranks import Rank
from tensor_dropout.layers.regression import TensorRegression, index_letters


class TuckerRegression(TensorRegression):
    """Tensor regression with a Tucker weight (paper, equation 1), randomized as in equation 4.

    ``W = G ×_0 U0 … ×_N UN`` with one factor ``Un: (size_n, R_n)`` per input and output mode and a core
    ``G: (R_0, .., R_N)``. The input is projected mode by mode, ``P = x ×_n Unᵀ``, contracted with the core, and
    expanded by the output factors. Tensor dropout draws one mask per mode, independently.

    Args:
        input_shape: the sizes of the input modes, without the batch; channels first.
        output_shape: the sizes of the output modes; an int is one mode.
        rank: one rank per mode (at most its size); an int for all, cut at each mode's size; a float in (0, 1], the
            fraction of the dense parameter count; or "full".
        dropout: a :class:`TensorDropout`; a number θ is short for ``TensorDropout(θ)``.
        bias: whether to add a bias of ``output_shape``.
        init: "pool": spatial factors start as average pooling, extra spatial columns orthogonal to it with a zero
            slab of the core; "normal": Gaussian. Either way the output has the variance of pooling + nn.Linear.
        device: where the parameters live.
        dtype: their type.

    Raises:
        TensorDropoutError: if a shape, rank or setting is not possible.

    Example:
        >>> import torch, tensor_dropout as td
        >>> head = td.TuckerRegression((512, 4, 4), 100, rank=(256, 3, 3, 96), dropout=0.8)
        >>> head(torch.randn(2, 512, 4, 4)).shape
        torch.Size([2, 100])
        >>> round(head.compression_ratio, 2)
        2.26
    """

    _kernel = "tucker"
    default_modes = "outer"

    core: nn.Parameter

    @classmethod
    def full_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the modes."""
        return shape

    @classmethod
    def default_rank(cls, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Rank:
        """Half the channels, every other mode in full."""
        return (max(1, input_shape[0] // 2), *input_shape[1:], *output_shape)

    def _count(self, ranks: tuple[int, ...]) -> int:
        return prod(ranks) + sum(size * R for size, R in zip(self.weight_shape, ranks, strict=True))

    def _make_parameters(self, **factory: Any) -> None:
        self.core = nn.Parameter(torch.empty(self._ranks, **factory))
        self.factors = nn.ParameterList(
            torch.empty(size, R, **factory) for size, R in zip(self.weight_shape, self._ranks, strict=True)
        )

    def _fill(self) -> None:
        core = torch.randn(self._ranks, device=self.core.device, dtype=torch.float32)
        space = range(1, len(self.input_shape))
        for mode, factor in enumerate(self.factors):
            if self.init == "normal":
                factor.copy_(random_directions(factor))
            elif mode in space:
                fill_pooling_(factor)
                core.narrow(mode, 1, self._ranks[mode] - 1).zero_()
            else:
                fill_orthonormal_(factor)
        self.core.copy_(core * (target_norm(self.input_shape, self.output_shape) / core.norm()))

    def _indices(self) -> tuple[str, list[str], str, str]:
        n_in, n_out = len(self.input_shape), len(self.output_shape)
        inputs, outputs, ranks = index_letters(n_in, n_out, n_in + n_out)
        return (
            inputs,
            [mode + r for mode, r in zip(inputs + outputs, ranks, strict=True)] + [ranks],
            outputs,
            ranks,
        )

    def _projection(self) -> tuple[int, str]:
        n_in = len(self.input_shape)
        return n_in, self._indices()[3][:n_in]

    def finish_projection(self, first: Tensor) -> Tensor:
        """Contract the space with its factors: (R_0, B, *space) -> (B, R_0, .., R_{N-1})."""
        for factor in list(self.factors)[1 : len(self.input_shape)]:
            first = torch.tensordot(first, factor, dims=([2], [0]))
        return first.movedim(0, 1)

    def output_features(self, x: Tensor, masks: list[MaskMoments]) -> tuple[Tensor, Tensor]:
        """``z_q = c_q Σ P[r] c[r] G[r, q]`` for each of the other outputs; see the base class."""
        kept = [n for n in range(len(masks) - 1) if masks[n].dropped]
        rows = self._output_rows(x, kept)
        second = summed_second_moment(rows.flatten(0, 1), [masks[n] for n in kept], masks[-1])
        return self._mean_over(rows, kept, masks), second

    def mean_output_features(self, x: Tensor, masks: list[MaskMoments]) -> Tensor:
        """With the means of the inputs' masks taken first, so that their ranks are summed at once."""
        n_in = len(self.input_shape)
        for n in range(n_in):
            x = multiply_along(x, masks[n].mean, n + 1)
        kept = [n for n in range(n_in, len(masks) - 1) if masks[n].dropped]
        return self._mean_over(self._output_rows(x, kept), kept, masks)

    def _output_rows(self, x: Tensor, kept: list[int]) -> Tensor:
        """(B, M, kept ranks.., Q): all other ranks are summed, and the output modes but the last become rows."""
        inputs, _, outputs, ranks = self._indices()
        n_in, factors = len(inputs), [factor.to(x.dtype) for factor in self.factors]
        others = range(n_in, len(ranks) - 1)
        operands = [x, self.core.to(x.dtype), *(factors[n] for n in others)]
        terms = ["Z" + ranks[:n_in], ranks, *(outputs[n - n_in] + ranks[n] for n in others)]
        left = "".join(ranks[n] for n in kept) + ranks[-1]
        rows = torch.einsum(f"{','.join(terms)}->Z{outputs[:-1]}{left}", *operands)
        return rows.flatten(1, len(outputs) - 1) if len(outputs) > 1 else rows.unsqueeze(1)

    @staticmethod
    def _mean_over(rows: Tensor, kept: list[int], masks: list[MaskMoments]) -> Tensor:
        """The mean of (B, M, kept ranks.., Q) over the masks of these ranks and of the last one, (B, M, Q)."""
        for n in reversed(kept):
            rows = torch.einsum("bm...rq,r->bm...q", rows, masks[n].mean)
        return rows * masks[-1].mean

    def _exact_moments(self, x: Tensor, masks: list[MaskMoments], block: int, covariance: bool) -> ExactMoments:
        n_in = len(self.input_shape)
        core = self.core.to(x.dtype).flatten(n_in)
        V = reduce(torch.kron, [factor.to(x.dtype) for factor in list(self.factors)[n_in:]])
        out = joint_mask(masks[n_in:], x)
        return tucker_moments(x, core, V, masks[:n_in], out, block, covariance=covariance)

    def operands(self) -> list[Tensor]:
        """The factors, then the core."""
        factors = list(self.factors)  # torch 2.11 traces no unpacking or slicing of a ParameterList
        return [*factors, self.core]

    @property
    def mode_numbers(self) -> tuple[int, ...]:
        """The axes of ``dense_weight()``."""
        return tuple(range(len(self.weight_shape)))

    @property
    def output_parameter(self) -> tuple[str, int]:
        """The factor of the last mode, (O, R)."""
        return f"factors.{len(self.factors) - 1}", 0

    @property
    def printed_exponent(self) -> int:
        """One less than the number of dropped modes, as printed in theorem 2."""
        return len(self.dropped_axes) - 1

    def reference_weight(self, masks: Masks) -> Tensor:
        """The core times each factor, mode by mode, the mask on the factor's columns."""
        weight: Tensor = self.core
        for mode, (factor, mask) in enumerate(zip(self.factors, masks, strict=True)):
            masked = factor if mask is None else factor * mask
            weight = torch.tensordot(masked, weight, dims=([1], [mode])).movedim(0, mode)
        return weight


class TuckerDecomposition(Decomposition):
    """``W ≈ G ×_0 U0 … ×_N UN`` with orthonormal factors."""

    zero_padded = frozenset({-1})

    @cached_property
    def _bases(self) -> list[tuple[Tensor, Tensor]]:
        if self.weight.ndim == 2:  # one SVD has both sides
            left, spectrum, right = torch.linalg.svd(self.weight, full_matrices=False)
            return [(left, spectrum), (right.T, spectrum)]
        return [left_singular(unfold(self.weight, mode)) for mode in range(self.weight.ndim)]

    @property
    def exact_rank(self) -> Ranks:
        """See :class:`Decomposition`."""
        return self._in_layer(tuple(numerical_rank(spectrum) for _, spectrum in self._bases))

    @cached_property
    def path(self) -> list[Ranks]:
        """See :class:`Decomposition`."""
        spectra = [spectrum for _, spectrum in self._bases]
        if len(spectra) == 2:  # the two sides of a matrix have one spectrum
            return [self._in_layer((R, R)) for R in range(1, numerical_rank(spectra[0]) + 1)]
        return [self._in_layer(ranks) for ranks in threshold_path(spectra)]

    def at(self, ranks: Ranks) -> list[Tensor]:
        """See :class:`Decomposition`."""
        wanted = (ranks[0], *ranks[1 + len(self.grid) :])
        exact = [numerical_rank(spectrum) for _, spectrum in self._bases]
        kept = [min(R, most) for R, most in zip(wanted, exact, strict=True)]
        factors = [basis[:, :R] for (basis, _), R in zip(self._bases, kept, strict=True)]
        if kept != exact and self.weight.ndim > 2:  # a truncated SVD is the best there is
            factors = improve_tucker(self.weight, factors)
        core = project(self.weight, factors)
        for size in reversed(self.grid):
            factors.insert(1, self._spatial_column(size))
            core = core.unsqueeze(1) * size**-0.5
        return [*factors, core]

    def _in_layer(self, ranks: Ranks) -> Ranks:
        return (ranks[0], *[1 for _ in self.grid], *ranks[1:])


def project(tensor: Tensor, factors: list[Tensor], skip: int | None = None) -> Tensor:
    """``tensor ×_n Unᵀ`` over all modes but ``skip``, those first that shrink it most."""
    order = sorted(range(tensor.ndim), key=lambda n: factors[n].shape[1] / factors[n].shape[0])
    for mode in order:
        if mode != skip:
            tensor = torch.tensordot(tensor, factors[mode], dims=([mode], [0])).movedim(-1, mode)
    return tensor


def improve_tucker(weight: Tensor, factors: list[Tensor], sweeps: int = 20, tolerance: float = 1e-6) -> list[Tensor]:
    """HOOI: each factor in turn becomes the best one for the others, until the captured energy stands still."""
    factors, captured = list(factors), 0.0
    for _ in range(sweeps):
        for mode, factor in enumerate(factors):
            if factor.shape[1] < factor.shape[0]:
                left, _ = left_singular(unfold(project(weight, factors, skip=mode), mode))
                factors[mode] = left[:, : factor.shape[1]]
        before, captured = captured, float(project(weight, factors).norm())
        if captured - before <= tolerance * captured:
            break
    return factors
