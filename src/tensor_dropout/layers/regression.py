"""What all tensor regression layers share: ``output = ⟨x, W⟩ + b`` with W kept in factors."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.kernels.dispatch import fused_head
from tensor_dropout.layers.contraction import apply_weight, contract
from tensor_dropout.layers.dropout import Masks, Modes, TensorDropout, as_dropout
from tensor_dropout.layers.initialize import Init, bias_bound
from tensor_dropout.layers.moments import (
    ExactMoments,
    MaskMoments,
    Moments,
    SampledMoments,
    fixed_mask,
    mask_moments,
    sampled_moments,
)
from tensor_dropout.layers.plan import FEW_OUTPUTS, INDICES, MAX_MODES, plan_contraction
from tensor_dropout.layers.ranks import Rank, resolve_rank, resolve_shape


class TensorRegression(nn.Module, ABC):
    """A linear map from tensors to tensors whose weight W is kept in factors (paper, equation 1).

    W is not formed, except for one or two outputs, where it is no larger than the features of two samples.

    Not used directly: a class for each format (``formats.py`` lists them) says how W is factored, by its index
    structure, and this class contracts, masks, checks and describes.

    Args:
        input_shape: the sizes of the input modes, without the batch; channels first.
        output_shape: the sizes of the output modes; an int is one mode.
        rank: exact ranks, a float in (0, 1] (the fraction of the dense parameter count), or "full".
        dropout: a :class:`TensorDropout`; a number θ is short for ``TensorDropout(θ)``; None is the plain layer.
        bias: whether to add a bias of ``output_shape``.
        init: "pool" starts as average pooling + ``nn.Linear``; "smooth" near it, where "pool" would hold equal columns
            together (CP; other formats leave pooling by themselves, and take it for "pool"); "normal" with Gaussian
            factors.
        device: where the parameters live.
        dtype: their type.
    """

    bias: nn.Parameter | None
    center: Tensor | None
    """What is subtracted from each channel of x first, (I_0,); None for nothing. Folded into the bias it would leave
    the mean output as it is and change what the masks do to it."""
    _kernel: Literal["tucker", "cp"] | None = None
    """The fused head that computes this format on a GPU."""
    channel_parameter: ClassVar[tuple[str, int]] = ("factors.0", 0)
    """The name of the parameter that meets the channels (the first input mode), and which of its axes they are; used
    by fits, with :meth:`finish_projection`."""
    default_modes: ClassVar[Modes] = "all"
    """Which modes a head by name drops where the user does not say."""
    _precise = False
    """Whether ``forward`` computes in at least float32, as :func:`in_full_precision` asks."""
    drops_entries = False
    """Whether a subclass drops entries of its weight by itself in ``train`` mode, beside tensor dropout."""

    def __init__(
        self,
        input_shape: int | Sequence[int],
        output_shape: int | Sequence[int],
        rank: Rank,
        *,
        dropout: TensorDropout | float | None = None,
        bias: bool = True,
        init: Init = "pool",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.input_shape = resolve_shape(input_shape, "input_shape", where)
        self.output_shape = resolve_shape(output_shape, "output_shape", where)
        if len(self.weight_shape) > MAX_MODES:
            raise TensorDropoutError(f"{where}: at most {MAX_MODES} modes in all, got {self.weight_shape}")
        if init not in get_args(Init):
            raise TensorDropoutError(f"{where}: init is one of {', '.join(get_args(Init))}, got {init!r}")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TensorDropoutError(f"{where}: dtype must be a floating-point type, got {dtype}")
        self.init = init
        dense = prod(self.weight_shape)
        full, largest = self.full_ranks(self.weight_shape), self.largest_ranks(self.weight_shape)
        self._ranks = resolve_rank(rank, full, largest, self._count, dense, where)
        self._make_parameters(device=device, dtype=dtype)
        shape = torch.empty(self.output_shape, device=device, dtype=dtype) if bias else None
        self.register_parameter("bias", None if shape is None else nn.Parameter(shape))
        self.dropout = as_dropout(dropout)
        place = next(self.parameters()).device
        if self.dropout is not None and place.type != "meta":
            self.dropout.to(place)
        if self.dropout is not None and not self.dropped_axes:
            warnings.warn(
                f"{where}: the dropout has nothing to drop, since modes={self.dropout.modes!r} skips modes of rank 1 "
                f"(rank {self.rank}); raise the rank or name the modes",
                stacklevel=2,
            )
        self._fixed_masks: Masks | None = None
        self._instead_of_forward: Callable[[TensorRegression, Tensor], Any] | None = None
        inputs, operands, outputs, ranks = self._indices()
        sizes = dict(zip(inputs + outputs + ranks, (*self.weight_shape, *self._ranks), strict=True))
        self._plan = plan_contraction(inputs, operands, outputs, ranks, sizes)
        # Few outputs: W is formed, with the channels of the first operand in the place of a batch.
        few = prod(self.output_shape) <= FEW_OUTPUTS
        rest = (operands[0][1:], operands[1:], inputs[1:] + outputs, ranks, sizes, self.input_shape[0])
        self._weight_plan = plan_contraction(*rest) if few else None
        n_projected, projected = self._projection()
        self._projection_plan = plan_contraction(inputs, operands[:n_projected], projected, "", sizes)
        self.register_buffer("center", None)
        self.reset_parameters()

    # What a format defines.

    @classmethod
    @abstractmethod
    def full_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """One rank per rank axis, at which every weight of this shape can be written: what "full" means."""

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
    def _projection(self) -> tuple[int, str]:
        """How x is projected to the rank axes: the number of leading operands absorbed, and the indices left."""

    @abstractmethod
    def _exact_moments(self, x: Tensor, masks: list[MaskMoments], block: int, covariance: bool) -> ExactMoments:
        """Mean and variance (B, O), or covariance (B, O, O), of the flattened output without bias.

        ``x`` is projected already; ``block`` is how many numbers may be held at once.
        """

    @abstractmethod
    def operands(self) -> list[Tensor]:
        """The parameters in the order of the index structure."""

    @property
    @abstractmethod
    def mode_numbers(self) -> tuple[int, ...]:
        """What ``TensorDropout(modes=...)`` calls each rank axis; empty for CP, which has one."""

    @abstractmethod
    def reference_weight(self, masks: Masks) -> Tensor:
        """W̃ (*input_shape, *output_shape) under given masks (None or (R,)) by the formula: slow, for tests."""

    # What a format may define otherwise.

    @classmethod
    def largest_ranks(cls, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The largest rank that each rank axis accepts."""
        return cls.full_ranks(shape)

    @classmethod
    def default_rank(cls, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Rank:
        """The rank of a head by name where the user gives none: half the channels, cut at the full rank."""
        half = max(1, input_shape[0] // 2)
        ranks = tuple(min(half, largest) for largest in cls.largest_ranks(input_shape + output_shape))
        return ranks if len(ranks) > 1 else ranks[0]

    @property
    def output_parameter(self) -> tuple[str, int] | None:
        """The name of the one parameter that holds the outputs, and which of its axes they are.

        ``W`` must be linear in it through the last rank axis alone. None if there is no such parameter: the head then
        cannot be sharded over its classes.
        """
        return None

    def output_features(self, x: Tensor, masks: list[MaskMoments]) -> tuple[Tensor, Tensor]:
        """The random features z that the parameter of the last output mode multiplies, as their moments.

        The output is ``f = z V`` with V the :attr:`output_parameter`, so the best V for given features is the solution
        of one linear system.

        Args:
            x: the input, projected.
            masks: the moments of all masks.

        Returns:
            ``E[z]``, (B, M, K), with M the product of the other output modes; and ``Σ E[z zᵀ]`` over all rows, (K, K).
        """
        raise NotImplementedError(f"{type(self).__name__} has no parameter that holds its outputs alone")

    def mean_output_features(self, x: Tensor, masks: list[MaskMoments]) -> Tensor:
        """``E[z]`` alone, (B, M, K), for the same arguments; formats for which that takes less override it."""
        return self.output_features(x, masks)[0]

    def finish_projection(self, first: Tensor) -> Tensor:
        """What :meth:`_exact_moments` and :meth:`output_features` take, from x that has met the first operand.

        Args:
            first: (K, B, *space), with K the rank axes of the first operand, flattened in their order there.

        Raises:
            TensorDropoutError: where a format does not define it; the estimators cannot fit it then.
        """
        raise TensorDropoutError(
            f"{type(self).__name__} cannot be fitted by minimizing the expected loss: it defines no finish_projection; "
            "train it, or choose one of the built-in formats"
        )

    @property
    def printed_exponent(self) -> int | None:
        """The exponent of θ in the paper's printed regularizer; None if the paper prints none for this format."""
        return None

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
        return self.dropout.dropped_axes(self._ranks, self.mode_numbers, self.largest_input_axis)

    @property
    def largest_input_axis(self) -> int:
        """The largest of the rank axes that the inputs have: of feature maps that of the channels.

        Of bonds it is one that touches an input, the one in front of the outputs among them.
        """
        of_inputs = self._ranks[: len(self.input_shape)]
        return of_inputs.index(max(of_inputs))

    def set_center(self, center: Tensor | None) -> None:
        """Subtract a number from each channel of x (the first input mode) before anything else.

        Args:
            center: (I_0,), or None to subtract nothing.
        """
        if center is not None and tuple(center.shape) != self.input_shape[:1]:
            raise TensorDropoutError(
                f"{type(self).__name__}: center has one number per channel, {self.input_shape[:1]}, got "
                f"{tuple(center.shape)}"
            )
        like = next(self.parameters())
        self.center = None if center is None else center.detach().to(like.device, like.dtype).clone()

    def _centered(self, x: Tensor) -> Tensor:
        if self.center is None:
            return x
        return x - self.center.to(x.dtype).view(-1, *[1] * (len(self.input_shape) - 1))

    @torch.no_grad()
    def scale_outputs_(self, *scales: Tensor) -> None:
        """Multiply W by one number for each entry of an output mode: its parameter takes it in.

        Args:
            scales: (O,) for each of the last output modes.
        """
        _, indices, outputs, _ = self._indices()
        for scale, mode in zip(reversed(scales), reversed(outputs), strict=False):
            for operand, letters in zip(self.operands(), indices, strict=True):
                if mode in letters:
                    across = [-1 if letter == mode else 1 for letter in letters]
                    operand.mul_(scale.to(operand).view(across))

    def reset_parameters(self) -> None:
        """Draw fresh parameters, as ``init`` says."""
        with torch.no_grad():
            self._fill()
            if self.bias is not None:
                bound = bias_bound(self.input_shape)
                self.bias.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Any:
        """``⟨x, W̃⟩ + b``: (B, *input_shape) -> (B, *output_shape)."""
        self._check_input(x)
        if self._instead_of_forward is not None:  # set for one call by head_outputs.call_with_head
            return self._instead_of_forward(self, x)
        regress = self.regress_precisely if self._precise else self.regress
        return regress(x, self._masks(x.shape[0]))

    def regress(self, x: Tensor, masks: Masks) -> Tensor:
        """``⟨x, W̃⟩ + b`` under given masks, one entry per rank axis: None, (R,), or (B, R) per sample."""
        return self._regress(x, self.operands(), self.bias, masks)

    def regress_precisely(self, x: Tensor, masks: Masks) -> Tensor:
        """The same in at least float32, also under autocast: for the spread of draws, finer than a half's rounding.

        Near a bias of 70 numbers in bfloat16 are 0.5 apart.
        """
        if type(self).regress is not TensorRegression.regress:  # sharded: computes in its own way
            return self.regress(x, masks)
        operands, bias = self.operands(), self.bias
        dtype = torch.promote_types(torch.promote_types(x.dtype, operands[0].dtype), torch.float32)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            wide = [operand.to(dtype) for operand in operands]
            return self._regress(x.to(dtype), wide, None if bias is None else bias.to(dtype), masks)

    def _regress(self, x: Tensor, operands: list[Tensor], bias: Tensor | None, masks: Masks) -> Tensor:
        x = self._centered(x)
        if self._weight_plan is not None and not any(mask is not None and mask.ndim == 2 for mask in masks):
            y = apply_weight(x, contract(operands[0], operands[1:], masks, self._weight_plan))
        else:
            fused = fused_head(self._kernel, x, operands, bias, masks)
            if fused is not None:
                return fused
            y = contract(x, operands, masks, self._plan)
        return y if bias is None else y + bias.to(y.dtype)

    def moments(self, x: Tensor, *, covariance: bool = False, n_samples: int | None = None) -> Moments | SampledMoments:
        """Exact mean and variance of every output over the masks, in one pass and differentiable.

        They describe one draw of the masks for one sample: the same for per-sample and per-batch masks, and in
        ``train`` and ``eval`` mode alike. Per sample, with projected input ``P`` of ranks ``R_n`` and O outputs:

        - CP: one forward pass and one more product of (R) with (R, O); for the nested law and laws of your own R²·O.
        - Tucker: with R the masked input rank, T the product of the others and Q the output rank, about ``R Q (T + O)``
          multiply-adds; with several masked modes ``R T²/2 (Q + O)``, or mode by mode. The cheapest is taken, by count.
        - TT: sums over the products of the bonds, at most ``2^bonds`` of them, in chunks of the batch.
        - Ring: as TT, with the first bond carried along: ``(R_0 R_N)²`` numbers a sample.

        Args:
            x: (B, *input_shape).
            covariance: return the covariance between all outputs, (B, *output_shape, *output_shape).
            n_samples: estimate by that many draws instead, with standard errors; needed for a law without second
                moments.

        Returns:
            ``Moments(mean, variance)``, or ``SampledMoments(mean, variance, standard_error)`` with ``n_samples``.

        Raises:
            TensorDropoutError: if the input does not fit, or the law has no second moments and no ``n_samples``.

        Example:
            >>> import torch, tensor_dropout as td
            >>> layer = td.CPRegression((8, 4, 4), 10, rank=6, dropout=0.8)
            >>> mean, variance = layer.moments(torch.randn(2, 8, 4, 4))
            >>> variance.shape, bool((variance >= 0).all())
            (torch.Size([2, 10]), True)
        """
        self._check_input(x)
        if n_samples is not None:
            return self._sample_moments(x, covariance, n_samples)
        exact = self.exact_moments(x, covariance=covariance)
        mean = exact.mean.unflatten(1, self.output_shape)
        if covariance:
            return Moments(mean, exact.variance.unflatten(2, self.output_shape).unflatten(1, self.output_shape))
        return Moments(mean, exact.variance.unflatten(1, self.output_shape))

    def exact_moments(self, x: Tensor, *, covariance: bool = False) -> ExactMoments:
        """The moments of the flattened output, and the variance of any weighted sum of the outputs."""
        projected = self.project(x)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            projected = projected if projected.dtype == torch.float64 else projected.float()
            return self.projected_moments(projected, block=max(2**20, x.numel() // 4), covariance=covariance)

    def project(self, x: Tensor) -> Tensor:
        """What :meth:`projected_moments` and :meth:`output_features` take: the input in rank space."""
        n_projected, _ = self._projection()
        return contract(self._centered(x), self.operands()[:n_projected], [], self._projection_plan)

    def projected_moments(self, projected: Tensor, *, block: int, covariance: bool = False) -> ExactMoments:
        """The same from an input that is projected already; ``block`` is how many numbers may be held at once."""
        mean, variance, variance_of = self._exact_moments(projected, self.mask_moments(projected), block, covariance)
        # A positive semi-definite form; rounding may leave it just below zero.
        variance = variance if covariance else variance.clamp(min=0)
        mean = mean if self.bias is None else mean + self.bias.flatten().to(mean.dtype)
        return ExactMoments(mean, variance, variance_of)

    def mask_moments(self, like: Tensor) -> list[MaskMoments]:
        """The moments of the mask on each rank axis, in the dtype and on the device of a tensor."""
        axes = self.dropped_axes
        masks = []
        for axis, R in enumerate(self._ranks):
            if self.dropout is None or axis not in axes:
                masks.append(fixed_mask(R, like))
                continue
            inverted = self.dropout.scaling == "inverted"
            moments = mask_moments(self.dropout.law, R, self.dropout.theta, inverted=inverted)
            if moments is None:
                raise TensorDropoutError(
                    f"{type(self).__name__}.moments: the law {self.dropout.law!r} has no second moments; pass "
                    "n_samples= to layer.moments for an estimate with its standard error, or use "
                    "td.predict(mode='sample')"
                )
            masks.append(moments.to(like))
        return masks

    def _sample_moments(self, x: Tensor, covariance: bool, n_samples: int) -> SampledMoments:
        if type(n_samples) is not int or n_samples < 3:  # of two, both squared deviations are equal
            raise TensorDropoutError(
                f"{type(self).__name__}.moments: n_samples is an integer of at least 3, got {n_samples!r}"
            )
        draws = torch.stack([self.regress_precisely(x, self.draw_masks(x.shape[0])) for _ in range(n_samples)])
        return sampled_moments(draws, len(self.output_shape), covariance=covariance)

    def dense_weight(self) -> Tensor:
        """The weight at test time, of shape (*input_shape, *output_shape): for tests and export, not for speed.

        It is the weight alone: the layer computes ``⟨x - center, W⟩ + b``.
        """
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
        return self.dropout.means(self._ranks, self.dropped_axes, next(self.parameters()))

    def draw_masks(self, batch: int | None = None) -> Masks:
        """Draw masks now, in ``train`` and ``eval`` mode alike: (R,) each, or (batch, R)."""
        if self.dropout is None:
            return [None] * len(self._ranks)
        # Not operands()[0]: outside forward a sharded core (FSDP2) cannot be reshaped.
        return self.dropout.draw(self._ranks, self.dropped_axes, batch, next(self.parameters()))

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
        autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        if x.dtype != weight.dtype and autocast and torch.float64 in (x.dtype, weight.dtype):
            raise TensorDropoutError(
                f"{where}: the input is {x.dtype}, the parameters are {weight.dtype}; torch.autocast leaves "
                "torch.float64 as it is, so cast one of them"
            )
        if x.dtype != weight.dtype and not autocast:
            raise TensorDropoutError(
                f"{where}: the input is {x.dtype}, the parameters are {weight.dtype}; cast one of them or use "
                "torch.autocast"
            )

    def config(self) -> dict[str, Any]:
        """The arguments that make an equal layer, as JSON types; "center" only says that there is one."""
        config = {
            "type": type(self).__name__,
            "input_shape": list(self.input_shape),
            "output_shape": list(self.output_shape),
            "rank": list(self._ranks),
            "bias": self.bias is not None,
            "init": self.init,
            "dropout": None if self.dropout is None else self.dropout.config(),
        }
        return config if self.center is None else {**config, "center": True}

    def with_rank(self, ranks: tuple[int, ...]) -> TensorRegression:
        """A layer that differs in its rank alone; its parameters are not filled.

        Its dropout is this one, as it is, and its center is equal to this one.
        """
        like = next(self.parameters())
        with unwarned():
            layer = type(self)(
                self.input_shape,
                self.output_shape,
                ranks,
                bias=self.bias is not None,
                dropout=self.dropout,
                init=self.init,
                device="meta",
                dtype=like.dtype,
            )
        layer = layer.to_empty(device=like.device)
        layer.set_center(self.center)
        for module in layer.modules():
            if module is not self.dropout:  # which may be at rest on its own
                module.training = self.training
        return layer

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # A state dict with a center gives one to a layer without; torch itself names one that is missing.
        found = state_dict.get(prefix + "center")
        gains = self.center is None and found is not None
        if gains:
            self.set_center(torch.zeros(self.input_shape[:1]))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if gains and getattr(found, "shape", None) != self.input_shape[:1]:  # torch has said so
            self.set_center(None)

    def __getstate__(self) -> dict[str, Any]:
        # A copy made inside fixed_masks would never leave the block.
        return {**self.__dict__, "_fixed_masks": None}

    def extra_repr(self) -> str:
        """Shapes, rank and how much smaller than dense."""
        shapes = f"{self.input_shape} -> {self.output_shape}, rank={self.rank}, bias={self.bias is not None}"
        return f"{shapes}, compression_ratio={self.compression_ratio:.3g}"


@contextmanager
def unwarned() -> Iterator[None]:
    """Without the warning that a dropout has nothing to drop: for layers that the user did not just write down."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*the dropout has nothing to drop", category=UserWarning)
        yield


def index_letters(*lengths: int) -> list[str]:
    """Disjoint runs of index letters of the given lengths."""
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    return [INDICES[start : start + length] for start, length in zip(starts, lengths, strict=True)]
