"""torchvision's networks by name: ``torchvision:resnet50``; those of ``torchvision.models.list_models()``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets.arguments import fill_arguments
from tensor_dropout_lab.nets.families import choose, describe_error, import_package


def build(
    name: str, *, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any], trusted: bool
) -> nn.Module:
    """The network of that name, with fresh weights."""
    models = import_package("torchvision.models", f"torchvision:{name}")
    choose("torchvision", name, models.list_models())
    if len(input_shape) == 3 and input_shape[0] != 3:
        raise TensorDropoutError(
            f"net torchvision:{name}: it takes pictures of 3 channels, got {input_shape[0]}; timm:NAME and monai:NAME "
            "take any number"
        )
    arguments = fill_arguments(models.get_model_builder(name), f"torchvision:{name}", input_shape, outputs, options)
    try:
        network: nn.Module = models.get_model(name, **{**arguments, "weights": None})
    except Exception as error:  # torchvision's own checks raise what they like
        raise TensorDropoutError(f"net torchvision:{name}: {describe_error(error)}") from error
    return network
