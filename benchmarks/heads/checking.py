"""Before a head of ours is timed: its output and gradients against those of its dense weight in float64."""

import copy

import torch
from torch import Tensor

import tensor_dropout as td
from heads.contenders import write_indices

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest error of an output or gradient over its largest entry."""


def measure_error(layer: td.TensorRegression, format: str, x: Tensor, upstream: Tensor) -> float:
    """The largest relative error of the output and of the gradients of x and every parameter.

    With dropout, one draw of the masks is given to both sides.

    Args:
        layer: the head as it is timed.
        format: its factorization.
        x: (B, *input_shape), with ``requires_grad``.
        upstream: the gradient of the output, (B, O).
    """
    masks = layer.draw_masks() if layer.dropped_axes else None
    y = layer(x) if masks is None else layer.regress(x, masks)
    found = [y, *torch.autograd.grad(y, (x, *layer.parameters()), upstream)]
    exact = copy.deepcopy(layer).double()
    features = x.detach().double().requires_grad_()
    weight = exact.dense_weight() if masks is None else masked_weight(exact, format, masks)
    true_y = torch.tensordot(features, weight, dims=x.ndim - 1) + exact.bias
    truth = [true_y, *torch.autograd.grad(true_y, (features, *exact.parameters()), upstream.double())]
    return max(_relative(f.detach(), t.detach()) for f, t in zip(found, truth, strict=True))


def masked_weight(layer: td.TensorRegression, format: str, masks: list[Tensor | None]) -> Tensor:
    """The dense weight under given masks, one per rank axis: (R,) or None."""
    modes, indices, ranks = write_indices(format, len(layer.weight_shape))
    used = [(r, mask.double()) for r, mask in zip(ranks, masks, strict=True) if mask is not None]
    equation = ",".join([*indices, *(r for r, _ in used)]) + "->" + modes
    return torch.einsum(equation, *layer.operands(), *(mask for _, mask in used))


def _relative(found: Tensor, truth: Tensor) -> float:
    return ((found.double() - truth).abs().max() / truth.abs().max().clamp(min=1e-300)).item()
