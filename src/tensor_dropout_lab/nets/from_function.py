"""Networks of any importable function or class: ``my_nets:build``."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from torch import nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.nets.arguments import fill_arguments
from tensor_dropout_lab.nets.families import describe_error, describe_families, is_trusted, trust


def build(
    name: str, *, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any], trusted: bool
) -> nn.Module:
    """The network that the function makes.

    Raises:
        TensorDropoutError: if only a file names the function. A file must not decide what code is run.
    """
    if not trusted and not is_trusted(name):
        module = name.partition(":")[0]
        raise TensorDropoutError(
            f"the file holds a network made by {name}, and a file must not decide what code is run; if the module is "
            f"yours, name it: tensor-dropout --import {module} ..., or tensor_dropout_lab.nets.trust({module!r})"
        )
    function = import_function(name)
    if not trusted and not (is_trusted(name, exactly=True) or _is_defined_there(function, name)):
        raise TensorDropoutError(
            f"the file holds a network made by {name}, which that module only imports, and a file must not decide what "
            f"code is run; if you know it, say so: tensor_dropout_lab.nets.trust({name!r})"
        )
    network = call(function, name, fill_arguments(function, name, input_shape, outputs, options))
    trust(name)
    return network


def _is_defined_there(function: Any, name: str) -> bool:
    """Whether a trusted module itself defines the function: ``my_nets:os.system`` is not one of its networks."""
    module, _, place = name.partition(":")
    return "." not in place and getattr(function, "__module__", None) == module


def import_function(name: str) -> Any:
    """The function or class ``package.module:function``; the current folder is searched as well."""
    module, _, place = name.partition(":")
    if not module or not place:
        raise TensorDropoutError(f"a network of yours is package.module:function, got {name!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a user's own file in the current folder, as for python -m
    try:
        function: Any = importlib.import_module(module)
        for part in place.split("."):
            function = getattr(function, part)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        raise TensorDropoutError(f"net {name}: {_describe(error)}; networks are {describe_families()}") from error
    if not callable(function):
        raise TensorDropoutError(f"net {name}: that is a {type(function).__name__}, not a function or a class")
    return function


def call(function: Any, name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """What the function makes, which must be a network."""
    try:
        network = function(**arguments)
    except Exception as error:  # a user's function may raise anything
        raise TensorDropoutError(f"net {name}: {_describe(error)}") from error
    if not isinstance(network, nn.Module):
        raise TensorDropoutError(f"net {name}: it made a {type(network).__name__}, not an nn.Module")
    return network


def _describe(error: BaseException) -> str:
    """The error, and where in the user's code it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_own = place.filename not in (__file__, importlib.__file__) and not place.filename.startswith("<")
    return describe_error(error) + (f" ({place.filename}, line {place.lineno})" if is_own else "")
