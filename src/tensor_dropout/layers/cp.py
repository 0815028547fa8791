"""CP regression: ``W = Σ_r u0_r ∘ u1_r ∘ … ∘ uN_r``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.layers.decomposition import Decomposition, Ranks, left_singular, numerical_rank, unfold
from tensor_dropout.layers.dropout import Masks
from tensor_dropout.layers.initialize import (
    fill_bent_,
    fill_orthonormal_,
    fill_pooling_parts_,
    random_directions,
    target_norm,
)
from tensor_dropout.layers.moments import ExactMoments, MaskMoments, cp_moments
from tensor_dropout.layers.regression import TensorRegression, index_letters


class CPRegression(TensorRegression):
    """Tensor regression with a CP (Kruskal) weight, randomized as in the paper's equations 6 and 7.

    ``W = Σ_r u0_r ∘ … ∘ uN_r`` with one factor ``Un: (size_n, R)`` per input and output mode and one shared rank
    R. Tensor dropout draws ONE mask ``c`` of R entries: ``W̃ = Σ_r c_r u0_r ∘ … ∘ uN_r``.

    Args:
        input_shape: the sizes of the input modes, without the batch; channels first.
        output_shape: the sizes of the output modes; an int is one mode.
        rank: an int; a float in (0, 1], the fraction of the dense parameter count; or "full", the smallest product
            of all sizes but one.
        dropout: a :class:`TensorDropout`; a number θ is short for ``TensorDropout(θ)``.
        bias: whether to add a bias of ``output_shape``.
        init: "pool": spatial columns start as average pooling, with one channel and one output as R different parts
            of it; "smooth": each of them bent by a wave of low frequency, so that the ranks soon look at different
            places; "normal": Gaussian. Each way the output has the variance of pooling + nn.Linear.
        device: where the parameters live.
        dtype: their type.

    Raises:
        TensorDropoutError: if a shape, rank or setting is not possible.

    Example:
        >>> import torch, tensor_dropout as td
        >>> head = td.CPRegression((512, 4, 4), 100, rank=200, dropout=0.8)
        >>> head(torch.randn(2, 512, 4, 4)).shape
        torch.Size([2, 100])
        >>> head.rank, round(head.compression_ratio, 2)
        (200, 6.61)
    """

    _kernel = "cp"

    @property
    def rank(self) -> int:
        """The one shared rank."""
        return self._ranks[0]

    @classmethod
    def full_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The smallest product of all sizes but one."""
        return (prod(shape) // max(shape),)

    def _count(self, ranks: tuple[int, ...]) -> int:
        return ranks[0] * sum(self.weight_shape)

    def _make_parameters(self, **factory: Any) -> None:
        self.factors = nn.ParameterList(torch.empty(size, self.rank, **factory) for size in self.weight_shape)

    def _fill(self) -> None:
        if self.init != "normal" and self.rank > 1 and self.input_shape[0] * prod(self.output_shape) == 1:
            self._fill_parts()
            return
        # With columns of unit length in random directions the squared norms of the R terms add up to ‖W‖².
        each = (target_norm(self.input_shape, self.output_shape) / self.rank**0.5) ** (1 / len(self.weight_shape))
        space = range(1, len(self.input_shape))
        for mode, factor in enumerate(self.factors):
            if self.init == "normal":
                factor.copy_(random_directions(factor))
            elif mode not in space:
                fill_orthonormal_(factor)
            elif self.init == "smooth":
                fill_bent_(factor)
            else:
                factor.fill_(factor.shape[0] ** -0.5)
            factor.mul_(each)

    def _fill_parts(self) -> None:
        """Average pooling in R parts: with one channel and one output equal spatial columns would stay equal forever.

        ``Σ_r (p + a_r) ∘ p ∘ … ∘ p = R p ∘ … ∘ p`` for ``Σ_r a_r = 0``: the columns differ along the longest mode.
        """
        each = (target_norm(self.input_shape, self.output_shape) / self.rank) ** (1 / len(self.weight_shape))
        space = range(1, len(self.input_shape))
        longest = max(space, key=lambda mode: self.weight_shape[mode], default=None)
        for mode, factor in enumerate(self.factors):
            if mode == longest:
                fill_pooling_parts_(factor)
            elif mode in space:
                factor.fill_(factor.shape[0] ** -0.5)
            else:
                factor.copy_(torch.randn(1, 1, device=factor.device, dtype=torch.float32).sign())
            factor.mul_(each)

    def _indices(self) -> tuple[str, list[str], str, str]:
        inputs, outputs, rank = index_letters(len(self.input_shape), len(self.output_shape), 1)
        return inputs, [mode + rank for mode in inputs + outputs], outputs, rank

    def _projection(self) -> tuple[int, str]:
        return len(self.input_shape), self._indices()[3]

    def finish_projection(self, first: Tensor) -> Tensor:
        """Contract each of the R maps with its own spatial column: (R, B, *space) -> (B, R)."""
        space = list(self.factors)[1 : len(self.input_shape)]
        if not space:
            return first.mT
        columns = reduce(lambda left, right: (left[:, None] * right).flatten(0, 1), space)  # (S, R)
        return _Meet.apply(first.flatten(2), columns.mT).mT

    def output_features(self, x: Tensor, masks: list[MaskMoments]) -> tuple[Tensor, Tensor]:
        """``z_r = c_r a_r`` times the other output columns; see the base class."""
        rows, gram = x.unsqueeze(1), x.mT @ x
        for factor in [factor.to(x.dtype) for factor in self.factors][len(self.input_shape) : -1]:
            rows = (rows.unsqueeze(2) * factor).flatten(1, 2)
            gram = gram * (factor.mT @ factor)
        return rows * masks[0].mean, masks[0].second() * gram

    def _exact_moments(self, x: Tensor, masks: list[MaskMoments], block: int, covariance: bool) -> ExactMoments:
        outputs = [factor.to(x.dtype) for factor in list(self.factors)[len(self.input_shape) :]]
        V = reduce(lambda left, right: (left[:, None] * right).flatten(0, 1), outputs)
        return cp_moments(x, V, masks[0], block, covariance=covariance)

    def operands(self) -> list[Tensor]:
        """The factors."""
        return list(self.factors)

    @property
    def mode_numbers(self) -> tuple[int, ...]:
        """None: the one mask is shared by all modes."""
        return ()

    @property
    def output_parameter(self) -> tuple[str, int]:
        """The factor of the last mode, (O, R)."""
        return f"factors.{len(self.factors) - 1}", 0

    @property
    def printed_exponent(self) -> int:
        """1, as printed in theorem 1."""
        return 1

    def reference_weight(self, masks: Masks) -> Tensor:
        """The sum of outer products, term by term."""
        weight, mask = torch.zeros(self.weight_shape, dtype=self.factors[0].dtype), masks[0]
        for r in range(self.rank):
            columns = [factor[:, r] for factor in self.factors]
            term = reduce(lambda a, b: a.unsqueeze(-1) * b, columns)
            weight = weight + (term if mask is None else mask[r] * term)
        return weight


class _Meet(torch.autograd.Function):
    """R maps (R, B, S), each with its column (R, S): (R, B). R products of matrix and vector take ten times as long."""

    generate_vmap_rule = True

    @staticmethod
    def forward(maps: Tensor, columns: Tensor) -> Tensor:
        return (maps * columns.unsqueeze(1)).sum(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        maps, columns = ctx.saved_tensors
        return grad.unsqueeze(-1) * columns.unsqueeze(1), (grad.unsqueeze(1) @ maps).squeeze(1)


class CPDecomposition(Decomposition):
    """``W ≈ Σ_r u0_r ∘ … ∘ uN_r`` with the length of each term shared equally by its vectors.

    Exact from the singular vectors of the slices along the two largest modes; below that rank by alternating least
    squares from several starts, the best of which is kept. A matrix needs its SVD only.

    Args:
        weight: as in :class:`Decomposition`.
        grid: as in :class:`Decomposition`.
        restarts: how many random starts are tried beside the two that the SVDs give.
        sweeps: the most sweeps over the factors from each start.
    """

    zero_padded = frozenset({-1})

    def __init__(self, weight: Tensor, grid: Sequence[int] = (), restarts: int = 2, sweeps: int = 100) -> None:
        super().__init__(weight, grid)
        self.restarts = restarts
        self.sweeps = sweeps

    @cached_property
    def _slices(self) -> tuple[list[Tensor], Tensor]:
        return slice_terms(self.weight)

    @property
    def exact_rank(self) -> Ranks:
        """See :class:`Decomposition`."""
        return (max(1, self._slices[1].numel()),)

    @cached_property
    def path(self) -> list[Ranks]:
        """See :class:`Decomposition`."""
        return [(R,) for R in range(1, self.exact_rank[0] + 1)]

    def at(self, ranks: Ranks) -> list[Tensor]:
        """See :class:`Decomposition`."""
        factors, lengths = self._slices
        R = min(ranks[0], self.exact_rank[0])
        start = [factor[:, :R] for factor in factors]
        start[0] = start[0] * lengths[:R]
        if self.weight.ndim > 2 and lengths.numel() > R:
            starts = [start, leading_columns(self.weight, R)]
            starts += [random_columns(self.weight, R, seed) for seed in range(self.restarts)]
            fits = [alternate_least_squares(self.weight, each, self.sweeps) for each in starts]
            start = min(fits, key=lambda fit: cp_misfit(self.weight, fit))
            longest = torch.stack([factor.norm(dim=0) for factor in start]).prod(0).argsort(descending=True)
            start = [factor[:, longest] for factor in start]
        for size in reversed(self.grid):
            start.insert(1, self._spatial_column(size).expand(-1, R) * size**-0.5)
        return balance(start)


def slice_terms(weight: Tensor) -> tuple[list[Tensor], Tensor]:
    """An exact CP, longest terms first: the SVD of every slice along the two largest modes.

    Returns:
        Factors with columns of unit length, and the lengths of the terms (those that are not rounding errors).
    """
    rows, columns = sorted(sorted(range(weight.ndim), key=lambda n: weight.shape[n])[-2:])
    rest = [n for n in range(weight.ndim) if n not in (rows, columns)]
    slices = weight.permute(*rest, rows, columns).flatten(0, len(rest) - 1) if rest else weight.unsqueeze(0)
    left, spectrum, right = torch.linalg.svd(slices, full_matrices=False)  # (S, m, k), (S, k), (S, k, n)
    lengths, order = spectrum.flatten().sort(descending=True)
    order = order[: numerical_rank(lengths)]
    where = torch.unravel_index(order // spectrum.shape[1], [weight.shape[n] for n in rest] or [1])
    factors: list[Tensor] = [weight] * weight.ndim
    for n, index in zip(rest, where, strict=False):
        factors[n] = torch.eye(weight.shape[n], dtype=weight.dtype, device=weight.device)[:, index]
    factors[rows] = left.movedim(2, 1).flatten(0, 1)[order].T
    factors[columns] = right.flatten(0, 1)[order].T
    return factors, lengths[: len(order)]


def leading_columns(weight: Tensor, R: int) -> list[Tensor]:
    """A start for ALS: leading singular vectors of every mode, and random columns where a mode has too few."""
    start = random_columns(weight, R, seed=-1)
    for mode, columns in enumerate(start):
        left, _ = left_singular(unfold(weight, mode))
        k = min(R, left.shape[1])
        columns[:, :k] = left[:, :k]
    return start


def random_columns(weight: Tensor, R: int, seed: int) -> list[Tensor]:
    """A start for ALS: Gaussian columns of unit length; the global generator is not touched."""
    generator = torch.Generator().manual_seed(2**31 + seed)
    drawn = (torch.randn(size, R, generator=generator, dtype=weight.dtype) for size in weight.shape)
    return [torch.nn.functional.normalize(columns, dim=0).to(weight.device) for columns in drawn]


def alternate_least_squares(
    weight: Tensor, factors: list[Tensor], sweeps: int, tolerance: float = 1e-5
) -> list[Tensor]:
    """Solve for one factor after the other until the misfit stands still.

    A small pull towards the last value, ``(Γ + μI) Uᵀ = MTTKRPᵀ + μ U_oldᵀ``, keeps singular Γ solvable, and the
    misfit still never grows.
    """
    factors, misfit = list(factors), float("inf")
    for _ in range(sweeps):
        for mode, old in enumerate(factors):
            others = [factor for n, factor in enumerate(factors) if n != mode]
            gram = torch.stack([factor.T @ factor for factor in others]).prod(0)
            pull = 1e-9 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
            target = unfold(weight, mode) @ khatri_rao(others)
            factors[mode] = torch.linalg.solve(gram + pull, (target + old @ pull).T).T
        factors = balance(factors)
        before, misfit = misfit, cp_misfit(weight, factors)
        if before - misfit <= tolerance * misfit:
            break
    return factors


def khatri_rao(factors: list[Tensor]) -> Tensor:
    """Column-wise Kronecker product: (sizes.., R) with the sizes flattened in order."""
    product = factors[0]
    for factor in factors[1:]:
        product = (product[:, None] * factor).flatten(0, 1)
    return product


def cp_misfit(weight: Tensor, factors: list[Tensor]) -> float:
    """``‖W - Σ_r u0_r ∘ … ∘ uN_r‖``."""
    return float((unfold(weight, 0) - factors[0] @ khatri_rao(factors[1:]).T).norm())


def balance(factors: list[Tensor]) -> list[Tensor]:
    """The same tensor with equally long vectors in each of its terms."""
    lengths = torch.stack([factor.norm(dim=0) for factor in factors])
    mean = lengths.clamp(min=torch.finfo(lengths.dtype).tiny).log().mean(0).exp()
    mean = torch.where((lengths == 0).any(0), 0.0, mean)
    return [factor * (mean / torch.where(own == 0, 1.0, own)) for factor, own in zip(factors, lengths, strict=True)]
