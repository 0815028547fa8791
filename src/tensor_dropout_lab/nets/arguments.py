"""The arguments of a function that makes networks: the usual ones filled in by their names."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from tensor_dropout.errors import TensorDropoutError

_WEIGHTS = ("pretrained", "weights", "weights_backbone", "checkpoint_path", "pretrained_cfg")
"""Options that fetch weights: a network is built again from its file without the internet, so they are refused."""


def fill_arguments(
    function: Callable[..., Any], what: str, input_shape: tuple[int, ...], outputs: int, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The options, and beside them what the function takes of the input's shape and the number of outputs.

    Args:
        function: makes the network.
        what: the name of the network, for messages.
        input_shape: (channels, *size).
        outputs: the number of classes or targets.
        options: the user's own arguments; they go before what is filled in.

    Raises:
        TensorDropoutError: if an option is not an argument of the function, would fetch weights, or one is missing.

    Example:
        >>> def build(in_channels, num_classes, width=8): ...
        >>> fill_arguments(build, "mine", (3, 32, 32), 10, {"width": 4})
        {'in_channels': 3, 'num_classes': 10, 'width': 4}
    """
    refuse_weights(what, options)
    parameters, takes_any = _find_parameters(function)
    if not takes_any and (unknown := [name for name in options if name not in parameters]):
        raise TensorDropoutError(f"net {what}: there is no option {unknown[0]!r}; there are {', '.join(parameters)}")
    usual = _usual_arguments(input_shape, outputs)
    filled = {name: usual[name] for name in parameters if name in usual} | dict(options)
    if missing := [name for name, is_required in parameters.items() if is_required and name not in filled]:
        raise TensorDropoutError(f"net {what}: it needs {', '.join(missing)}; give --set net.options.NAME=VALUE")
    return filled


def refuse_weights(what: str, options: Mapping[str, Any]) -> None:
    """Refuse options that fetch weights."""
    for name in _WEIGHTS:
        if options.get(name):
            raise TensorDropoutError(
                f"net {what}: the option {name!r} would fetch weights each time the network is built; leave it out and "
                "give a file with --weights (net.weights)"
            )


def _usual_arguments(input_shape: tuple[int, ...], outputs: int) -> dict[str, Any]:
    """What arguments of these names always mean."""
    channels, *sizes = input_shape
    return {
        **dict.fromkeys(("in_channels", "n_input_channels", "in_chans", "input_channels"), channels),
        **dict.fromkeys(("num_classes", "out_channels", "n_classes", "classes", "outputs", "num_outputs"), outputs),
        **dict.fromkeys(("spatial_dims", "n_dims"), len(sizes)),
        **dict.fromkeys(("in_shape", "input_shape"), tuple(input_shape)),
        **dict.fromkeys(("pretrained", "progress"), False),
        "out_shape": (outputs,),
        "img_size": tuple(sizes),
    }


def _find_parameters(function: Callable[..., Any]) -> tuple[dict[str, bool], bool]:
    """The names of the parameters of a function or class, each with whether it is required; and if it takes any others.

    Behind ``**kwargs`` are those of the base classes or, of a function, those of the class that it says it returns.
    """
    parameters: dict[str, bool] = {}
    for number, source in enumerate(_list_sources(function)):
        signature = [each for each in inspect.signature(source).parameters.values() if each.name != "self"]
        for parameter in signature:
            if parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                is_required = number == 0 and parameter.default is parameter.empty
                parameters.setdefault(parameter.name, is_required)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature):
            return parameters, False
    return parameters, True


def _list_sources(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """What arguments may go to: the function and the class that it returns, or a class and its bases."""
    if inspect.isclass(function):
        return [vars(base)["__init__"] for base in function.__mro__[:-1] if "__init__" in vars(base)]
    try:
        returned = get_type_hints(function).get("return")
    except Exception:  # annotations may name what cannot be imported
        returned = None
    return [function, *(_list_sources(returned) if inspect.isclass(returned) else [])]
