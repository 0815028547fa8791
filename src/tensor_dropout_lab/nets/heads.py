"""Heads by name: what turns a feature map (B, C, *space) into outputs (B, outputs)."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.contraction import multiply_along
from tensor_dropout.layers.dropout import Masks, Modes, TensorDropout, check_theta
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.layers.head_outputs import count_parameters
from tensor_dropout.layers.initialize import Init
from tensor_dropout.layers.laws import Law
from tensor_dropout.layers.moments import ExactMoments, Moments, SampledMoments
from tensor_dropout.layers.ranks import Rank, resolve_shape
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.layers.tucker import TuckerRegression
from tensor_dropout_lab.nets.head_table import DEFAULT_THETA, HEADS, check_name, refuse_unused
from tensor_dropout_lab.nets.network import Network

_AVERAGES: dict[int, type[nn.AdaptiveAvgPool2d] | type[nn.AdaptiveAvgPool3d]] = {
    2: nn.AdaptiveAvgPool2d,
    3: nn.AdaptiveAvgPool3d,
}


def build_head(
    name: str,
    feature_shape: tuple[int, ...],
    outputs: int,
    *,
    rank: Rank | None = None,
    theta: float | None = None,
    law: str | Law = "bernoulli",
    modes: Modes | None = None,
    per_sample: bool = False,
    scaling: Literal["inverted", "paper"] = "inverted",
    min_rank: int = 0,
    drop_rate: float = 0.5,
    init: Init = "pool",
) -> nn.Module:
    """Make the head of that name.

    - ``fc``: average pooling + ``nn.Linear``; ``fc+dropout``: with ``nn.Dropout`` between them; ``fc+low-rank``: with a
      weight that is a product of two matrices, the plain way to a compact head; ``fc+flatten``: flattening instead of
      pooling, the plain way to keep positions.
    - ``trl-tucker``, ``trl-cp``, … (one for each format): a tensor regression layer; ``rtrl-…``: with tensor dropout.
    - ``trl-tucker+weight-dropout``: plain dropout on the entries of the Tucker weight, the paper's comparison.

    Args:
        name: one of ``HEADS``.
        feature_shape: (C, *space) with 2 or 3 sizes.
        outputs: the number of classes or targets.
        rank: of a tensor head, as its layer takes it; None: half the channels (see the layer's ``default_rank``).
        theta: θ, the KEEP probability of a random tensor head; None: 0.9.
        law: of ``rtrl`` heads, as the five that follow; see :class:`td.TensorDropout`.
        modes: which modes are dropped; None: "outer" for Tucker, the channels and the outputs (the paper's are "all").
        per_sample: one mask for each sample.
        scaling: "inverted" or "paper".
        min_rank: how many ranks survive every draw.
        drop_rate: of ``fc+dropout``: the DROP probability, as in ``nn.Dropout``.
        init: of a tensor head: "pool", "smooth" or "normal".

    Returns:
        The tensor layer itself, or ``nn.Sequential`` of pooling and ``nn.Linear``.

    Raises:
        TensorDropoutError: if the name is unknown, a setting is not one of this head's, or its value is not possible.

    Example:
        >>> import torch
        >>> head = build_head("rtrl-tucker", (64, 2, 2), 10, theta=0.9)
        >>> head.rank, head(torch.randn(4, 64, 2, 2)).shape
        ((32, 2, 2, 10), torch.Size([4, 10]))
    """
    check_name("head", name, HEADS)
    feature_shape = _check_shapes(feature_shape, outputs)
    masks = {"law": law, "modes": modes, "per_sample": per_sample, "scaling": scaling, "min_rank": min_rank}
    refuse_unused(name, {"rank": rank, "init": init, "theta": theta, "drop_rate": drop_rate, **masks})
    if name == "fc+flatten":
        return nn.Sequential(nn.Flatten(), nn.Linear(prod(feature_shape), outputs))
    if name == "fc+low-rank":
        return nn.Sequential(_build_pooling(feature_shape), LowRankLinear(feature_shape[0], outputs, rank))
    if name in ("fc", "fc+dropout"):
        return _build_linear(feature_shape, outputs, drop_rate if name == "fc+dropout" else None)
    kind, format = name.removesuffix("+weight-dropout").split("-")
    layer = FORMATS[format].layer
    rank = layer.default_rank(feature_shape, (outputs,)) if rank is None else rank
    theta = DEFAULT_THETA if theta is None else theta
    if name == "trl-tucker+weight-dropout":
        return WeightDropoutTucker(feature_shape, outputs, rank, theta=theta, init=init)
    masks["modes"] = layer.default_modes if modes is None else modes
    dropout = TensorDropout(theta, **masks) if kind == "rtrl" else None  # type: ignore[arg-type]
    return layer(feature_shape, outputs, rank, dropout=dropout, init=init)


class WeightDropoutTucker(TuckerRegression):
    """Tucker regression with plain dropout on the entries of its weight: the paper's comparison with tensor dropout.

    In training ``⟨x, W ∘ M / θ⟩ + b`` with independent ``M ~ Bernoulli(θ)``, one draw for the whole batch; the dense
    weight W is formed. In ``eval`` it is the Tucker layer itself. Parameters are named as there. It has no tensor
    dropout, so ``td.predict`` can only take its mean, and the exact moments are refused.

    Args:
        input_shape: as in :class:`TuckerRegression`.
        output_shape: as there.
        rank: as there.
        theta: θ, the KEEP probability of each entry.
        bias: as there.
        init: as there.
        device: as there.
        dtype: as there.

    Raises:
        TensorDropoutError: if a shape, rank or θ is not possible.

    Example:
        >>> import torch
        >>> layer = WeightDropoutTucker((8, 4, 4), 10, rank=(4, 2, 2, 5), theta=0.8)
        >>> x = torch.randn(2, 8, 4, 4)
        >>> bool((layer(x) == layer(x)).all()), bool((layer.eval()(x) == layer(x)).all())
        (False, True)
    """

    drops_entries = True

    def __init__(
        self,
        input_shape: int | Sequence[int],
        output_shape: int | Sequence[int],
        rank: Rank,
        *,
        theta: float,
        bias: bool = True,
        init: Init = "pool",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_shape, output_shape, rank, bias=bias, init=init, device=device, dtype=dtype)
        self.theta = check_theta(theta)

    def regress(self, x: Tensor, masks: Masks) -> Tensor:
        """``⟨x, W ∘ M / θ⟩ + b`` in training, ``⟨x, W⟩ + b`` in ``eval``."""
        if not self.training:
            return super().regress(x, masks)
        weight = F.dropout(self.dense_weight(), 1 - self.theta)  # (*input_shape, *output_shape)
        y = x.flatten(1) @ weight.reshape(prod(self.input_shape), prod(self.output_shape))
        y = y.unflatten(1, self.output_shape)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def moments(self, x: Tensor, *, covariance: bool = False, n_samples: int | None = None) -> Moments | SampledMoments:
        """Refused: they would describe tensor dropout, which this layer has not."""
        raise _no_moments()

    def exact_moments(self, x: Tensor, *, covariance: bool = False) -> ExactMoments:
        """Refused, as :meth:`moments`."""
        raise _no_moments()

    def with_rank(self, ranks: tuple[int, ...]) -> WeightDropoutTucker:
        """A layer that differs in its rank alone; its parameters are not filled."""
        like = self.core
        shape = (self.input_shape, self.output_shape, ranks)
        layer = WeightDropoutTucker(
            *shape, theta=self.theta, bias=self.bias is not None, init=self.init, device="meta", dtype=like.dtype
        )
        return layer.to_empty(device=like.device).train(self.training)

    def config(self) -> dict[str, Any]:
        """The arguments that make an equal layer, as JSON types."""
        return {**super().config(), "theta": self.theta}

    def extra_repr(self) -> str:
        """As of the Tucker layer, and θ."""
        return f"{super().extra_repr()}, theta={self.theta:g}"


class LowRankLinear(nn.Module):
    """``nn.Linear`` whose weight is a product of two matrices of rank R: what a compact head is compared with.

    A fresh one has the output variance of ``nn.Linear``: the first matrix has orthonormal rows.

    Args:
        inputs: the number of input features.
        outputs: the number of outputs.
        rank: R; None: half of the smaller of the two numbers.

    Raises:
        TensorDropoutError: if R is not a whole number from 1 to the smaller of the two.

    Example:
        >>> layer = LowRankLinear(64, 10, 4)
        >>> layer(torch.randn(2, 64)).shape, round(layer.compression_ratio, 2)
        (torch.Size([2, 10]), 2.12)
    """

    def __init__(self, inputs: int, outputs: int, rank: Rank | None = None) -> None:
        super().__init__()
        most = min(inputs, outputs)
        rank = max(1, most // 2) if rank is None else rank
        if type(rank) is not int or not 1 <= rank <= most:
            raise TensorDropoutError(
                f"build_head: the rank of 'fc+low-rank' is a whole number from 1 to {most}, got {rank!r}"
            )
        last = nn.Linear(rank, outputs)
        self.reduce = nn.Parameter(nn.init.orthogonal_(torch.empty(rank, inputs)))
        self.expand = nn.Parameter(last.weight.detach())
        self.bias = nn.Parameter(last.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) -> (B, outputs)."""
        return F.linear(F.linear(x, self.reduce), self.expand, self.bias)

    @property
    def weight(self) -> Tensor:
        """The product: (outputs, inputs), as that of ``nn.Linear``."""
        return self.expand @ self.reduce

    @property
    def compression_ratio(self) -> float:
        """Parameters of ``nn.Linear`` of this size, by these."""
        outputs, inputs = self.weight.shape
        return (inputs + 1) * outputs / count_parameters(self)

    def extra_repr(self) -> str:
        """Its size."""
        rank, inputs = self.reduce.shape
        return f"{inputs}, {len(self.expand)}, rank={rank}"


@torch.no_grad()
def rescale_(net: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Put ``scale · output + shift`` into the last layer of a network, in place.

    A regression is trained on a standardized target; with its mean and standard deviation in the head, the network
    answers in the target's own unit, and so do its exact moments.

    Args:
        net: a network of ``build_net``, or its last layer itself.
        scale: (outputs,).
        shift: (outputs,).
    """
    head: Any = net.head if isinstance(net, Network) else net
    if isinstance(head, TensorRegression):
        _, indices, outputs, _ = head._indices()
        last = max(n for n, index in enumerate(indices) if outputs[-1] in index)
        weight, axis = head.operands()[last], indices[last].index(outputs[-1])
    else:
        weight, axis = head.expand if isinstance(head, LowRankLinear) else head.weight, 0
    weight.copy_(multiply_along(weight, scale.to(weight), axis))
    head.bias.copy_(head.bias * scale.to(weight) + shift.to(weight))


def _check_shapes(feature_shape: tuple[int, ...], outputs: int) -> tuple[int, ...]:
    if type(outputs) is not int or outputs < 1:
        raise TensorDropoutError(f"build_head: outputs is a positive integer, got {outputs!r}")
    shape = resolve_shape(feature_shape, "feature_shape", "build_head")
    if len(shape) not in (3, 4):
        raise TensorDropoutError(f"build_head: feature_shape is (channels, *space) with 2 or 3 sizes, got {shape}")
    return shape


def _build_pooling(feature_shape: tuple[int, ...]) -> nn.Sequential:
    return nn.Sequential(_AVERAGES[len(feature_shape) - 1](1), nn.Flatten())


def _build_linear(feature_shape: tuple[int, ...], outputs: int, drop_rate: float | None) -> nn.Sequential:
    """``nn.Sequential`` of two: pooling (with dropout behind it), and ``nn.Linear``."""
    pool = _build_pooling(feature_shape)
    if drop_rate is not None:
        if not isinstance(drop_rate, int | float) or not 0 <= drop_rate < 1:
            raise TensorDropoutError(
                f"build_head: drop_rate is the DROP probability, a number in [0, 1), got {drop_rate!r}"
            )
        pool.append(nn.Dropout(drop_rate))
    return nn.Sequential(pool, nn.Linear(feature_shape[0], outputs))


def _no_moments() -> TensorDropoutError:
    return TensorDropoutError(
        "WeightDropoutTucker: the exact averages over masks are those of tensor dropout; use head='rtrl-tucker', or "
        "average training passes of this one"
    )
