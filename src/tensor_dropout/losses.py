"""Losses with the masks integrated out: what stochastic training minimizes on average, without its noise."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.contraction import contract
from tensor_dropout.layers.head_outputs import call_with_head
from tensor_dropout.layers.laws import Bernoulli, precise
from tensor_dropout.layers.moments import Moments
from tensor_dropout.layers.regression import TensorRegression

IGNORED = -100
"""The class number of a row that does not count: torch's ``ignore_index``."""


def expected_mse(model: nn.Module, x: Tensor, y: Tensor, *, regularizer: Literal["exact", "paper"] = "exact") -> Tensor:
    """The mean of ``F.mse_loss(model(x), y)`` over all masks, in closed form.

    ``E‖y - f‖² = ‖y - E f‖² + Σ_o Var f_o``: the deterministic regularized loss of the paper's theorems 1 and 2,
    for every law, format, scaling and output shape. The printed regularizers are not exact
    (``docs/explanation/theory.md``); ``regularizer="paper"`` keeps them, as an approximation, to reproduce the paper's
    figures.

    The call goes through ``model.forward``, so DDP, FSDP2 and ``torch.compile`` see it. In ``train`` mode other
    random layers of the network still draw; the expectation is over the masks of the last layer. Gradient checkpointing
    may be around any part of the network but that layer, here and in :func:`expected_cross_entropy`: computed again in
    ``backward``, it would return its plain output.

    Args:
        model: a tensor regression layer, or a network whose last layer is one.
        x: the input of the model.
        y: the target, of the shape of the output.
        regularizer: "exact", or "paper" for the printed formula (Bernoulli, ``scaling="paper"``, CP or Tucker).

    Raises:
        TensorDropoutError: if shapes do not fit, x or y has a NaN or infinity, or the formula does not apply.

    Example:
        >>> import torch, tensor_dropout as td
        >>> layer = td.CPRegression((8, 4, 4), 1, rank=6, dropout=0.8)
        >>> loss = td.expected_mse(layer, torch.randn(5, 8, 4, 4), torch.randn(5, 1))
        >>> loss.backward()
    """
    functions = {"exact": _exact_moments, "paper": printed_moments}
    if regularizer not in functions:
        raise TensorDropoutError(f"expected_mse: regularizer is 'exact' or 'paper', got {regularizer!r}")
    _check_finite("expected_mse", x=x, y=y)
    mean, variance = call_with_head(model, x, functions[regularizer], Moments, "expected_mse")
    if y.shape != mean.shape:
        hint = "; add an axis: y[:, None]" if mean.shape == (*y.shape, 1) else ""
        raise TensorDropoutError(
            f"expected_mse: y must have the output's shape {tuple(mean.shape)}, got {tuple(y.shape)}{hint}"
        )
    return F.mse_loss(mean, y) + variance.mean()


def _exact_moments(layer: TensorRegression, x: Tensor) -> Moments:
    moments = layer.moments(x)
    assert isinstance(moments, Moments)
    return moments


def printed_moments(layer: TensorRegression, x: Tensor) -> Moments:
    """Mean and "variance" as the paper prints them: an approximation (``docs/explanation/theory.md``).

    CP: ``θ⟨W,x⟩`` and ``θ(1-θ)⟨⟦U0²,..,UN²⟧, x²⟩``. Tucker: ``θ^N⟨W,x⟩`` and
    ``θ^N(1-θ^N)⟨G² ×_0 U0² … ×_N UN², x²⟩`` with N one less than the number of dropped modes, as printed. Here x is
    what meets the weight: the features minus the layer's center.
    """
    dropout = layer.dropout
    exponent = layer.printed_exponent
    if dropout is None or exponent is None or type(dropout.law) is not Bernoulli or dropout.min_rank:
        raise TensorDropoutError(
            "expected_mse: the paper's regularizer is printed for CP and Tucker with plain Bernoulli masks, "
            f"got {type(layer).__name__} with {dropout}; use regularizer='exact'"
        )
    if dropout.scaling != "paper":
        raise TensorDropoutError(
            "expected_mse: the paper's regularizer is printed for unscaled masks; use TensorDropout(scaling='paper') "
            "or regularizer='exact'"
        )
    every = tuple(axis for axis, rank in enumerate(layer._ranks) if rank > 1)
    if layer.dropped_axes != every or not every or exponent < 1:
        raise TensorDropoutError(
            f"expected_mse: the paper's regularizer is printed for masks on all modes, got modes={dropout.modes!r} "
            f"with rank {layer.rank}; use modes='all', or regularizer='exact'"
        )
    x = layer._centered(x)
    keep = precise(dropout.theta) ** exponent  # 0-d: it does not promote the products below
    mean = keep * contract(x, layer.operands(), [], layer._plan)
    squares = contract(x.square(), [operand.square() for operand in layer.operands()], [], layer._plan)
    return Moments(mean if layer.bias is None else mean + layer.bias, keep * (1 - keep) * squares)


class LogitMoments(NamedTuple):
    """Mean of the logits, and ``Σ_o p_o Var f_o - Var[p·f]`` with ``p = softmax(mean)``: (B, O) and (B,)."""

    mean: Tensor
    curvature: Tensor


def expected_cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """An approximation of the mean of ``F.cross_entropy(model(x), y)`` over all masks, usable as a training loss.

    Second order around the mean logits μ, with their exact covariance Σ under the masks and ``p = softmax(μ)``:

        ``E[CE] ≈ CE(μ, y) + ½ (Σ_o p_o Σ_oo - pᵀ Σ p)``

    (times the sum of y, where it holds probabilities that do not sum to 1). The added term is never negative; it
    vanishes at θ = 1. Measured (``benchmarks/cross_entropy.py``, ``benchmarks/README.md``), it is the closest of
    the forms that need no O×O covariance, except under heavy Tucker dropout; Gaussian quadrature with the full
    covariance is closer at moderate spread.

    Args:
        model: a tensor regression layer with one output mode, or a network whose last layer is one.
        x: the input of the model.
        y: class numbers (B,), -100 for a row that does not count, as in torch; or class probabilities (B, O).

    Raises:
        TensorDropoutError: if shapes do not fit, or x or y has a NaN or infinity.

    Example:
        >>> import torch, tensor_dropout as td
        >>> layer = td.TuckerRegression((8, 4, 4), 10, rank=(4, 2, 2, 5), dropout=0.8)
        >>> loss = td.expected_cross_entropy(layer, torch.randn(5, 8, 4, 4), torch.randint(10, (5,)))
        >>> loss.backward()
    """
    _check_finite("expected_cross_entropy", x=x, y=y)
    mean, curvature = call_with_head(model, x, logit_moments, LogitMoments, "expected_cross_entropy")
    classes = y.shape == mean.shape[:1] and not y.is_floating_point()
    if not classes and not (y.shape == mean.shape and y.is_floating_point()):
        raise TensorDropoutError(
            f"expected_cross_entropy: y holds class numbers of shape {tuple(mean.shape[:1])} or probabilities of shape "
            f"{tuple(mean.shape)}, got {y.dtype} of shape {tuple(y.shape)}"
        )
    if classes:
        counted = y != IGNORED
        penalty = torch.where(counted, curvature, 0).sum() / counted.sum()
    else:
        penalty = (y.sum(-1) * curvature).mean()  # torch takes rows of any sum
    return F.cross_entropy(mean, y, ignore_index=IGNORED) + 0.5 * penalty


class Expected(NamedTuple):
    """The mean output over all masks, and what their spread adds to the mean loss: (B, O) and 0-d."""

    output: Tensor
    penalty: Tensor


def expect(model: nn.Module, x: Tensor, task: str, known: Tensor | None = None) -> Expected:
    """What a training loop needs to build :func:`expected_mse` or :func:`expected_cross_entropy` itself.

    Args:
        model: as there.
        x: as there.
        task: "regression" (squared error) or "classification" (cross-entropy, second order).
        known: (B, O) bool, which targets of a regression are there and count; None: all.

    Example:
        >>> import torch, tensor_dropout as td
        >>> layer, x, y = td.CPRegression((8, 4, 4), 10, rank=6, dropout=0.8), torch.randn(5, 8, 4, 4), torch.arange(5)
        >>> output, penalty = expect(layer, x, "classification")
        >>> bool(torch.isclose(F.cross_entropy(output, y) + penalty, td.expected_cross_entropy(layer, x, y)))
        True
    """
    if task == "regression":
        mean, variance = call_with_head(model, x, _exact_moments, Moments, "train")
        if known is None:
            return Expected(mean, variance.mean())
        return Expected(mean, torch.where(known, variance, 0).sum() / known.sum().clamp(min=1))
    mean, curvature = call_with_head(model, x, logit_moments, LogitMoments, "train")
    return Expected(mean, 0.5 * curvature.mean())


def logit_moments(layer: TensorRegression, x: Tensor) -> LogitMoments:
    """The exact moments of the logits that the second-order cross-entropy needs."""
    if len(layer.output_shape) != 1:
        raise TensorDropoutError(
            f"expected_cross_entropy: the logits need one output mode, got output_shape={layer.output_shape}"
        )
    exact = layer.exact_moments(x)
    p = exact.mean.softmax(-1)
    # The bracket is a variance under p; for confident p its two parts are almost equal, and rounding may go below 0.
    return LogitMoments(exact.mean, ((p * exact.variance).sum(-1) - exact.variance_of(p)).clamp(min=0))


def _check_finite(where: str, **tensors: Tensor) -> None:
    # Reading the answer waits for the device; a compiled step skips the check.
    if torch.compiler.is_compiling():
        return
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and not _is_finite(tensor.detach()):
            raise TensorDropoutError(f"{where}: {name} contains NaN or infinity; clean the data first")


def _is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite, in one pass: NaN and infinities reach the smallest or the largest entry."""
    return bool(torch.isfinite(torch.stack(tensor.aminmax())).all())
