"""CP regression: ``W = Σ_r u0_r ∘ u1_r ∘ … ∘ uN_r``."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.layers.initialize import fill_orthonormal_, fill_pooling_parts_, random_directions, target_norm
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
            of it; "normal": Gaussian. Either way the output has the variance of pooling + nn.Linear.
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

    def _full_ranks(self) -> tuple[int, ...]:
        return (prod(self.weight_shape) // max(self.weight_shape),)

    def _count(self, ranks: tuple[int, ...]) -> int:
        return ranks[0] * sum(self.weight_shape)

    def _make_parameters(self, **factory: Any) -> None:
        self.factors = nn.ParameterList(torch.empty(size, self.rank, **factory) for size in self.weight_shape)

    def _fill(self) -> None:
        if self.init == "pool" and self.rank > 1 and self.input_shape[0] * prod(self.output_shape) == 1:
            self._fill_parts()
            return
        # With columns of unit length in random directions the squared norms of the R terms add up to ‖W‖².
        each = (target_norm(self.input_shape, self.output_shape) / self.rank**0.5) ** (1 / len(self.weight_shape))
        space = range(1, len(self.input_shape))
        for mode, factor in enumerate(self.factors):
            if self.init == "normal":
                factor.copy_(random_directions(factor))
            elif mode in space:
                factor.fill_(factor.shape[0] ** -0.5)
            else:
                fill_orthonormal_(factor)
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
