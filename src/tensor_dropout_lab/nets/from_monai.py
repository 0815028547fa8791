"""MONAI's networks by name: ``monai:DenseNet121``; classes and functions of ``monai.networks.nets``."""

from __future__ import annotations

import inspect
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
    nets = import_package("monai.networks.nets", f"monai:{name}")
    choose("monai", name, _list_names(nets))
    function = getattr(nets, name)
    try:
        network: nn.Module = function(**fill_arguments(function, f"monai:{name}", input_shape, outputs, options))
    except TensorDropoutError:
        raise
    except Exception as error:  # MONAI's own checks raise what they like
        raise TensorDropoutError(f"net monai:{name}: {describe_error(error)}") from error
    return network


def _list_names(nets: Any) -> list[str]:
    """Its network classes, and the functions that make ResNets."""
    public = {name: value for name, value in vars(nets).items() if not name.startswith("_")}
    classes = [name for name, value in public.items() if inspect.isclass(value) and issubclass(value, nn.Module)]
    functions = [
        name
        for name, value in public.items()
        if inspect.isfunction(value) and str(inspect.signature(value).return_annotation).strip("'") in public
    ]
    return sorted(classes + functions)
