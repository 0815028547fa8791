"""Families of networks by name: one line here and one file each. Nothing is imported before it is asked for.

``resnet18`` names one of our own networks, ``monai:DenseNet121`` one of an installed package, and ``my_nets:build`` a
function of the user's.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from tensor_dropout.errors import TensorDropoutError

Build = Callable[..., Any]
"""``build(name, *, input_shape, outputs, options, trusted)`` -> the network without our head, with fresh weights."""

_FUNCTION = "function"


@dataclass(frozen=True)
class Family:
    """Networks that are made in the same way.

    Attributes:
        form: how a name of this family looks, for messages: ``monai:NAME``.
        module: the module here that holds its function ``build``.
        names: all of its names, if there is a fixed list; they have no prefix.
        function: ``build`` itself, of a family that was registered.
    """

    form: str
    module: str = ""
    names: tuple[str, ...] = ()
    function: Build | None = None

    def load(self) -> Build:
        """The function ``build`` of this family."""
        if self.function is not None:
            return self.function
        build: Build = importlib.import_module(f"tensor_dropout_lab.nets.{self.module}").build
        return build


FAMILIES: dict[str, Family] = {
    "resnet": Family("resnet", "resnet", ("resnet-mini", "resnet18", "resnet34", "resnet50", "resnet101")),
    "digits-cnn": Family("digits-cnn", "digits_cnn", ("digits-cnn",)),
    "torchvision": Family("torchvision:NAME", "from_torchvision"),
    "timm": Family("timm:NAME", "from_timm"),
    "monai": Family("monai:NAME", "from_monai"),
    _FUNCTION: Family("package.module:function", "from_function"),
}
"""The prefix of a network's name -> its family; our own networks have no prefix."""


def register_family(prefix: str, build: Build) -> None:
    """Let ``build_net``, ``--net`` and ``td.load`` make networks of a family of your own, named ``prefix:NAME``.

    Args:
        prefix: what stands before the colon.
        build: ``build(name, *, input_shape, outputs, options, trusted)`` returns the plain network with fresh weights:
            any ``nn.Module`` with a head of its own, or one that returns its feature map. ``name`` comes without the
            prefix. ``trusted`` is false where the name was read from a file: then nothing may be imported or run that
            the file alone asks for.

    Raises:
        TensorDropoutError: if the prefix is taken by a built-in family.

    Example:
        >>> register_family("mine", lambda name, **settings: ...)
        >>> find_family("mine:tiny")[1]
        'tiny'
        >>> del FAMILIES["mine"]  # this page does not need it any longer
    """
    if prefix in _BUILT_IN:
        raise TensorDropoutError(f"register_family: {prefix!r} is a family already; choose another name")
    FAMILIES[prefix] = Family(f"{prefix}:NAME", function=build)


_BUILT_IN = frozenset(FAMILIES)


def find_family(name: str) -> tuple[Family, str]:
    """The family that a network belongs to, and its name there, without a prefix.

    Raises:
        TensorDropoutError: if there is none; the message lists all of them.

    Example:
        >>> [(find_family(name)[0].form, find_family(name)[1]) for name in ("resnet18", "monai:ViT", "my_nets:build")]
        [('resnet', 'resnet18'), ('monai:NAME', 'ViT'), ('package.module:function', 'my_nets:build')]
    """
    for family in FAMILIES.values():
        if name in family.names:
            return family, name
    prefix, _, rest = str(name).partition(":")
    if prefix in FAMILIES and rest and not FAMILIES[prefix].names:
        return FAMILIES[prefix], rest
    if prefix and rest:
        return FAMILIES[_FUNCTION], name
    raise TensorDropoutError(f"unknown net {name!r}, did you mean {_nearest(name)!r}? There are: {describe_families()}")


def _nearest(name: Any) -> str:
    known = [known for family in FAMILIES.values() for known in family.names]
    return get_close_matches(str(name), known, n=1, cutoff=0.0)[0]


def describe_families() -> str:
    """All names and forms of names, for help and messages."""
    forms = [form for family in FAMILIES.values() for form in (family.names or (family.form,))]
    return ", ".join(forms)


# What the user named, and may therefore be imported again when a file names it.

_TRUSTED: set[str] = set()


def trust(name: str) -> None:
    """Note that the user named this module, or ``module:function``: files that name it may build networks with it."""
    _TRUSTED.add(name)


def is_trusted(name: str, *, exactly: bool = False) -> bool:
    """Whether the user named this ``module:function`` in this process, or, if not ``exactly``, its module."""
    return name in _TRUSTED or (not exactly and name.partition(":")[0] in _TRUSTED)


def import_package(module: str, what: str) -> Any:
    """Import a package that only some networks need.

    Args:
        module: such as ``"monai.networks.nets"``.
        what: the name of the network, for the message.

    Raises:
        TensorDropoutError: if it is not installed, or does not import.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]  # the package itself, or one that it needs
        raise TensorDropoutError(
            f"net {what}: {missing} is not installed; install it with: pip install {package}"
        ) from error
    except Exception as error:  # a broken installation may raise anything
        raise TensorDropoutError(
            f"net {what}: {package} is installed but does not import ({describe_error(error)}); install the "
            f"version that fits your torch: pip install --upgrade {package}"
        ) from error


def describe_error(error: BaseException) -> str:
    """The type of an error and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def choose(package: str, name: str, names: Sequence[str]) -> None:
    """Refuse a name that a package does not have, with near ones."""
    if name in names:
        return
    near = get_close_matches(name, names, n=3, cutoff=0.4)
    advice = f"did you mean {', '.join(near)}? " if near else ""
    raise TensorDropoutError(f"net {package}:{name}: {package} has no such network; {advice}it has {len(names)} names")
