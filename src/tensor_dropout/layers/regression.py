"""What all tensor regression layers share: ``output = ⟨x, W⟩ + b`` with W kept in factors."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.dropout import Masks, TensorDropout, as_dropout
from tensor_dropout.layers.initialize import bias_bound
from tensor_dropout.layers.plan import INDICES, MAX_MODES, contract, plan_contraction
from tensor_dropout.layers.ranks import Rank, resolve_rank, resolve_shape


class TensorRegression(nn.Module):
    """A linear map from tensors to tensors whose weight W is never formed (paper, equation 1).

    Not used directly: :class:`TuckerRegression`, :class:`CPRegression` and :class:`TTRegression` say how W is
    factored, by its index structure, and this class contracts, masks, checks and describes.

    Args:
        input_shape: the sizes of the input modes, without the batch; channels first.
        output_shape: the sizes of the output modes; an int is one mode.
        rank: exact ranks, a float in (0, 1] (the fraction of the dense parameter count), or "full".
        dropout: a :class:`TensorDropout`; a number θ is short for ``TensorDropout(θ)``; None is the plain layer.
        bias: whether to add a bias of ``output_shape``.
        init: "pool" starts as average pooling + ``nn.Linear``; "normal" with Gaussian factors.
        device: where the parameters live.
        dtype: their type.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        input_shape: int | Sequence[int],
        output_shape: int | Sequence[int],
        rank: Rank,
        *,
        dropout: TensorDropout | float | None = None,
        bias: bool = True,
        init: Literal["pool", "normal"] = "pool",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.input_shape = resolve_shape(input_shape, "input_shape", where)
        self.output_shape = resolve_shape(output_shape, "output_shape", where)
        if len(self.weight_shape) > MAX_MODES:
            raise TensorDropoutError(f"{where}: at most {MAX_MODES} modes in all, got {self.weight_shape}")
        if init not in ("pool", "normal"):
            raise TensorDropoutError(f"{where}: init is 'pool' or 'normal', got {init!r}")
        if dtype is not None and not dtype.is_floating_point:
            raise TensorDropoutError(f"{where}: dtype must be a floating-point type, got {dtype}")
        self.init = init
        dense = prod(self.weight_shape)
        self._ranks = resolve_rank(rank, self._full_ranks(), self._count, dense, where)
        self._make_parameters(device=device, dtype=dtype)
        shape = torch.empty(self.output_shape, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if shape is None else nn.Parameter(shape))
        self.dropout = as_dropout(dropout)
        if self.dropout is not None and device is not None and torch.device(device).type != "meta":
            self.dropout.to(device)
        if self.dropout is not None and not self.dropped_axes:
            warnings.warn(
                f"{where}: the dropout has nothing to drop, since modes='all' skips modes of rank 1 (rank "
                f"{self.rank}); raise the rank or name the modes",
                stacklevel=3,
            )
        self._fixed_masks: Masks | None = None
        inputs, operands, outputs, ranks = self._indices()
        sizes = dict(zip(inputs + outputs + ranks, (*self.weight_shape, *self._ranks), strict=True))
        self._plan = plan_contraction(inputs, operands, outputs, ranks, sizes)
        self.reset_parameters()

    # What a format defines.

    @abstractmethod
    def _full_ranks(self) -> tuple[int, ...]:
        """The largest rank of each rank axis."""

    @abstractmethod
    def _count(self, ranks: tuple[int, ...]) -> int:
        """The number of parameters at given ranks, without the bias."""

    @abstractmethod
    def _make_parameters(self, **factory: Any) -> None:
        """Make the parameters, empty."""

    @abstractmethod
    def _fill(self) -> None:
        """Fill the parameters as ``self.init`` says."""

    @abstractmethod
    def _indices(self) -> tuple[str, list[str], str, str]:
        """The index structure: of x, of each operand, of the output, and of each rank axis."""

    @abstractmethod
    def operands(self) -> list[Tensor]:
        """The parameters in the order of the index structure."""

    @property
    @abstractmethod
    def mode_numbers(self) -> tuple[int, ...]:
        """What ``TensorDropout(modes=...)`` calls each rank axis; empty for CP, which has one."""

    # What every format can do.

    @property
    def rank(self) -> Any:
        """The rank: one number per rank axis."""
        return self._ranks

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape of the dense weight: ``(*input_shape, *output_shape)``."""
        return self.input_shape + self.output_shape

    @property
    def compression_ratio(self) -> float:
        """The paper's: size of the full tensor over size of factors and core."""
        return prod(self.weight_shape) / self._count(self._ranks)

    @property
    def dropped_axes(self) -> tuple[int, ...]:
        """Which of the rank axes the dropout masks."""
        if self.dropout is None:
            return ()
        return self.dropout.dropped_axes(self._ranks, self.mode_numbers)

    def reset_parameters(self) -> None:
        """Draw fresh parameters, as ``init`` says."""
        with torch.no_grad():
            self._fill()
            if self.bias is not None:
                bound = bias_bound(self.input_shape)
                self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """``⟨x, W̃⟩ + b``: (B, *input_shape) -> (B, *output_shape)."""
        self._check_input(x)
        return self.regress(x, self._masks(x.shape[0]))

    def regress(self, x: Tensor, masks: Masks) -> Tensor:
        """``⟨x, W̃⟩ + b`` under given masks, one entry per rank axis: None, (R,), or (B, R) per sample."""
        y = contract(x, self.operands(), masks, self._plan)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def dense_weight(self) -> Tensor:
        """The weight at test time, of shape (*input_shape, *output_shape): for tests and export, not for speed."""
        inputs, indices, outputs, ranks = self._indices()
        masks = self.mean_masks()
        for axis, mask in enumerate(masks):
            if mask is not None:
                indices, masks[axis] = [*indices, ranks[axis]], mask.to(self.operands()[0].dtype)
        equation = ",".join(indices) + "->" + inputs + outputs
        return torch.einsum(equation, *self.operands(), *(mask for mask in masks if mask is not None))

    def mean_masks(self) -> Masks:
        """The masks of test time: ``E[c]`` on the dropped axes under the paper's scaling, else None."""
        if self.dropout is None or self.dropout.scaling == "inverted":
            return [None] * len(self._ranks)
        return self.dropout.means(self._ranks, self.dropped_axes, self.operands()[0])

    def draw_masks(self, batch: int | None = None) -> Masks:
        """Draw masks now, in ``train`` and ``eval`` mode alike: (R,) each, or (batch, R)."""
        if self.dropout is None:
            return [None] * len(self._ranks)
        return self.dropout.draw(self._ranks, self.dropped_axes, batch, self.operands()[0])

    def _masks(self, batch: int) -> Masks:
        if self._fixed_masks is not None:
            return self._fixed_masks
        if self.dropout is None:
            return [None] * len(self._ranks)
        return self.dropout(self._ranks, self.dropped_axes, batch, self.operands()[0])

    def _check_input(self, x: Tensor) -> None:
        where, weight = type(self).__name__, self.operands()[0]
        expected = f"(B, {', '.join(map(str, self.input_shape))})"
        if not isinstance(x, Tensor):
            raise TensorDropoutError(f"{where}: expected a tensor of shape {expected}, got {type(x).__name__}")
        if not x.is_floating_point():
            raise TensorDropoutError(f"{where}: expected a floating-point input, got {x.dtype}; call x.float()")
        if x.ndim != 1 + len(self.input_shape):
            raise TensorDropoutError(
                f"{where}: expected {1 + len(self.input_shape)} axes {expected}, got {x.ndim}: {tuple(x.shape)}"
            )
        if tuple(x.shape[1:]) != self.input_shape:
            raise TensorDropoutError(
                f"{where}: expected an input of shape {expected}, got {tuple(x.shape)}; the backbone's feature "
                "map must have the layer's input_shape"
            )
        if x.shape[0] == 0:
            raise TensorDropoutError(f"{where}: the batch is empty: {tuple(x.shape)}")
        if x.device != weight.device:
            raise TensorDropoutError(
                f"{where}: the input is on {x.device}, the parameters on {weight.device}; move one of them"
            )
        if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TensorDropoutError(
                f"{where}: the input is {x.dtype}, the parameters are {weight.dtype}; cast one of them or use "
                "torch.autocast"
            )

    def config(self) -> dict[str, Any]:
        """The arguments that make an equal layer, as JSON types."""
        return {
            "type": type(self).__name__,
            "input_shape": list(self.input_shape),
            "output_shape": list(self.output_shape),
            "rank": list(self._ranks),
            "bias": self.bias is not None,
            "init": self.init,
            "dropout": None if self.dropout is None else self.dropout.config(),
        }

    def extra_repr(self) -> str:
        """Shapes, rank and how much smaller than dense."""
        shapes = f"{self.input_shape} -> {self.output_shape}, rank={self.rank}, bias={self.bias is not None}"
        return f"{shapes}, compression_ratio={self.compression_ratio:.3g}"


def index_letters(*lengths: int) -> list[str]:
    """Disjoint runs of index letters of the given lengths."""
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return [INDICES[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def randomized_layers(model: nn.Module) -> list[TensorRegression]:
    """The tensor regression layers in a model that have a dropout with something to drop."""
    layers = (module for module in model.modules() if isinstance(module, TensorRegression))
    return [layer for layer in layers if layer.dropped_axes]


@contextmanager
def fixed_masks(model: nn.Module) -> Iterator[nn.Module]:
    """Keep one thinned network over many batches: masks are drawn once, on entry.

    Inside, every randomized layer uses its one mask for all samples, in ``train`` and ``eval`` mode alike (so that
    a thinned network can be evaluated with batch norm at rest). A later block draws a new network.

    Args:
        model: a layer or any module that contains some.

    Raises:
        TensorDropoutError: if the model has no randomized layer.

    Example:
        >>> import torch, tensor_dropout as td
        >>> layer = td.CPRegression((8, 4, 4), 10, rank=6, dropout=0.5)
        >>> x = torch.randn(2, 8, 4, 4)
        >>> with td.fixed_masks(layer):
        ...     bool((layer(x) == layer(x)).all())
        True
    """
    layers = randomized_layers(model)
    if not layers:
        raise TensorDropoutError(
            f"fixed_masks: {type(model).__name__} has no tensor regression layer with dropout; pass dropout= to one"
        )
    before = [layer._fixed_masks for layer in layers]
    for layer in layers:
        layer._fixed_masks = layer.draw_masks()
    try:
        yield model
    finally:
        for layer, masks in zip(layers, before, strict=True):
            layer._fixed_masks = masks
