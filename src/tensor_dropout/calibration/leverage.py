"""How far a sample is from those that a layer was fitted on, as the last linear solve of the fit sees it."""

from __future__ import annotations

import copy
import math
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tensor_dropout.fitting.statistics import target_scale
from tensor_dropout.layers.regression import TensorRegression

BLOCK = 2**22
"""How many numbers of the features are projected at once."""


class Leverage(NamedTuple):
    """The variance of the output parameter's posterior, in units of the noise.

    The output is ``f = z V + b``, with z the random features of the layer and V its output parameter. Squared errors
    and ``α ‖V‖²`` make the posterior of V Gaussian, for given other factors. Its precision in units of the noise is
    ``n A`` with ``A = Σ w E[z zᵀ] - z̄ᵀ z̄ + α O I``. So V adds ``h = (z - z̄)ᵀ A⁻¹ (z - z̄) / n`` noise variances: the
    leverage.

    Attributes:
        center: (M, K), the mean z̄, with M the product of the output modes but the last.
        root: (K, K), with ``h = ‖(z / scale - z̄) root‖²``.
        scale: (M,), the units of the output modes but the last, which the fit did not see.
    """

    center: Tensor
    root: Tensor
    scale: Tensor

    def measure(self, layer: TensorRegression, x: Tensor) -> Tensor:
        """The leverage of each sample and output: (n, *output_shape).

        Args:
            layer: the one that it was made for.
            x: (n, *input_shape).
        """
        like = next(layer.parameters())
        center, root, scale = (part.to(like.device) for part in self)
        found = []
        for rows in x.split(_rows(x)):
            z = mean_output_features(layer, rows.to(like))
            found.append(((z / scale[:, None] - center) @ root).square().sum(-1))  # (b, M)
        h = torch.cat(found).view(len(x), *layer.output_shape[:-1], 1)
        return h.expand(len(x), *layer.output_shape)


@torch.no_grad()
def fit_leverage(
    layer: TensorRegression,
    x: Tensor,
    weights: Tensor | None,
    alpha: float,
    y: Tensor | None = None,
    n: float | None = None,
) -> Leverage | None:
    """The leverage of a layer that was fitted on these samples.

    Args:
        layer: fitted; its dropout says how random z is.
        x: (n, *input_shape), what it was fitted on.
        weights: (n,), not negative; None for equal ones.
        alpha: the weight of the squared factors, as it was fitted with.
        y: (n, *output_shape), the targets: their units are those of the layer, and α is not. Needed for several output
            modes; the unit of the last one does not matter.
        n: how many samples the leverage is for; None: those that count.

    Returns:
        None for a layer without a parameter that holds its outputs alone, such as a ring.
    """
    if layer.output_parameter is None:
        return None
    like = next(layer.parameters())
    layer, scale = _without_units(layer, y, weights)
    w = x.new_ones(len(x), dtype=torch.float64) if weights is None else weights.double()
    n = float((w > 0).sum()) if n is None else n
    w = (w / w.sum()).to(like.device)
    second, center = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    size = _rows(x)
    for rows, share in zip(x.split(size), w.split(size), strict=True):
        z, squares = output_features(layer, rows.to(like), share)
        second, center = second.to(like.device) + squares, center.to(like.device) + share.sqrt() @ z.transpose(0, 1)
    A = second - center.mT @ center + alpha * math.prod(layer.output_shape) * torch.eye(len(second)).to(second)
    spectrum, vectors = torch.linalg.eigh(A)
    floor = 1e-12 * float(spectrum[-1].clamp(min=1e-30))
    return Leverage(center.cpu(), (vectors * (n * spectrum.clamp(min=floor)).rsqrt()).cpu(), scale.double().cpu())


def _without_units(
    layer: TensorRegression, y: Tensor | None, weights: Tensor | None
) -> tuple[TensorRegression, Tensor]:
    """The layer as it was fitted, for targets without units; and those of the output modes but the last, (M,)."""
    if len(layer.output_shape) == 1 or y is None:
        return layer, torch.ones(math.prod(layer.output_shape[:-1]))
    share = y.new_ones(len(y)) if weights is None else weights.to(y)
    modes = target_scale(y, share / share.sum()).modes[:-1]
    layer = copy.deepcopy(layer)
    layer.scale_outputs_(*(1 / mode for mode in modes), torch.ones_like(y[0].flatten()[: layer.output_shape[-1]]))
    return layer, reduce(lambda product, mode: (product[:, None] * mode).flatten(), modes)


@torch.no_grad()
def mean_output_features(layer: TensorRegression, x: Tensor) -> Tensor:
    """``E[z]`` (n, M, K) in float64."""
    projected = layer.project(x).double()
    return layer.mean_output_features(projected, layer.mask_moments(projected))


@torch.no_grad()
def output_features(layer: TensorRegression, x: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``E[z]`` (n, M, K) and ``Σ E[z zᵀ]`` (K, K) in float64; with weights each row times the root of its own."""
    projected = layer.project(x).double()
    if weights is not None:
        projected = projected * weights.sqrt().view(-1, *[1] * (projected.ndim - 1))
    found: tuple[Any, Any] = layer.output_features(projected, layer.mask_moments(projected))
    return found


def _rows(x: Tensor) -> int:
    return max(1, BLOCK // max(1, x[0].numel()))
