"""Tucker regression: ``W = G ×_0 U0 ×_1 U1 … ×_N UN``."""

from __future__ import annotations

from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from tensor_dropout.layers.initialize import fill_orthonormal_, fill_pooling_, random_directions, target_norm
from tensor_dropout.layers.moments import ExactMoments, MaskMoments, joint_mask, tucker_moments
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

    core: nn.Parameter

    def _full_ranks(self) -> tuple[int, ...]:
        return self.weight_shape

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
