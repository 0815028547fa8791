"""The randomized layers of a whole model: finding them, keeping their masks, and their precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.regression import TensorRegression


def tensor_layers(model: nn.Module) -> dict[str, TensorRegression]:
    """The tensor regression layers of a model by name; a bare layer has the name ''."""
    return {name: module for name, module in model.named_modules() if isinstance(module, TensorRegression)}


def randomized_layers(model: nn.Module) -> list[TensorRegression]:
    """The tensor regression layers in a model that have a dropout with something to drop."""
    return [layer for layer in tensor_layers(model).values() if layer.dropped_axes]


@contextmanager
def in_full_precision(model: nn.Module) -> Iterator[None]:
    """The randomized layers compute in at least float32 inside the block, whatever the precision of the network."""
    layers = randomized_layers(model)
    for layer in layers:
        layer._precise = True
    try:
        yield
    finally:
        for layer in layers:
            layer._precise = False


@contextmanager
def fixed_masks(model: nn.Module) -> Iterator[nn.Module]:
    """Keep one thinned network over many batches: masks are drawn once, on entry.

    Inside, every randomized layer uses its one mask for all samples, in ``train`` and ``eval`` mode alike (so that
    a thinned network can be evaluated with batch norm at rest). A later block draws a new network. Copies and pickles
    do not keep the masks. Under gradient checkpointing ``backward`` must run inside the block too: it computes the
    layers again.

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
    before, drawn = [layer._fixed_masks for layer in layers], [layer.draw_masks() for layer in layers]
    for layer, masks in zip(layers, drawn, strict=True):
        layer._fixed_masks = masks
    try:
        yield model
    finally:
        for layer, previous in zip(layers, before, strict=True):
            layer._fixed_masks = previous
