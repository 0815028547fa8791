"""timm's networks by name: ``timm:convnext_tiny``; those of ``timm.list_models()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets.arguments import refuse_weights
from tensor_dropout_lab.nets.families import choose, describe_error, import_package


def build(
    name: str, *, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any], trusted: bool
) -> nn.Module:
    """The network of that name, with fresh weights; timm makes the first layer for any number of channels."""
    timm = import_package("timm", f"timm:{name}")
    choose("timm", name, timm.list_models())
    refuse_weights(f"timm:{name}", options)
    arguments = {"in_chans": input_shape[0], "num_classes": outputs, **options}
    try:
        network: nn.Module = timm.create_model(name, **{**arguments, "pretrained": False})
    except Exception as error:  # timm's own checks raise what they like
        raise TensorDropoutError(f"net timm:{name}: {describe_error(error)}") from error
    return network
