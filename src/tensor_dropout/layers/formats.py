"""The table of formats: one entry for each way to keep a weight in factors.

To add a format, write one file with its layer and its decomposition (``tt.py`` is the shortest) and add one entry here.
``tensorize_``, ``td.load``, heads by name (``trl-NAME``, ``rtrl-NAME``) and the command line read this table. What a
format does differently elsewhere (default rank, sharding, the paper's printed loss) is said by its layer's class.

This module imports no torch: the command line lists the formats without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    from tensor_dropout.layers.cp import CPRegression as CPRegression
    from tensor_dropout.layers.decomposition import Decomposition
    from tensor_dropout.layers.regression import TensorRegression
    from tensor_dropout.layers.ring import TensorRingRegression as TensorRingRegression
    from tensor_dropout.layers.tt import TTRegression as TTRegression
    from tensor_dropout.layers.tucker import TuckerRegression as TuckerRegression


@dataclass(frozen=True)
class Format:
    """A way to keep a weight in factors; its classes are imported when they are asked for.

    Attributes:
        name: what ``tensorize_(factorization=...)``, the heads and the command line call it.
        module: the module that defines both classes.
        layer_name: the layer's class, a :class:`TensorRegression`; also the layer's type in files.
        decomposition_name: the class that decomposes a trained weight, or None: ``tensorize_`` then refuses the format.
    """

    name: str
    module: str
    layer_name: str
    decomposition_name: str | None = None

    @property
    def layer(self) -> type[TensorRegression]:
        """The layer's class."""
        layer: type[TensorRegression] = getattr(import_module(self.module), self.layer_name)
        return layer

    @property
    def decomposition(self) -> type[Decomposition]:
        """The class that decomposes a trained weight.

        Raises:
            TensorDropoutError: if the format has none.
        """
        if self.decomposition_name is None:
            raise TensorDropoutError(
                f"tensorize_: the format {self.name!r} has no decomposition of a trained weight; choose another "
                f"factorization, or train a fresh {self.layer_name}"
            )
        decomposition: type[Decomposition] = getattr(import_module(self.module), self.decomposition_name)
        return decomposition


_FORMATS: dict[str, Format] = {}
FORMATS: Mapping[str, Format] = MappingProxyType(_FORMATS)
"""All formats by name."""


def register_format(format: Format) -> None:
    """Add a format to the table.

    Args:
        format: its entry. A format of the same classes may be registered again.

    Raises:
        TensorDropoutError: if the name of the format or of its layer is taken by another one.

    Example: a layer of your own that is a CP layer by another name.

        >>> from tensor_dropout.layers.cp import CPRegression
        >>> class MyRegression(CPRegression):
        ...     pass
        >>> register_format(Format("mine", __name__, "MyRegression"))
        >>> get_format("mine").name
        'mine'
        >>> del _FORMATS["mine"]
    """
    for other in FORMATS.values():
        if other != format and (other.name == format.name or other.layer_name == format.layer_name):
            raise TensorDropoutError(
                f"register_format: {format.name!r} with the layer {format.layer_name} clashes with the format "
                f"{other.name!r} of {other.module}.{other.layer_name}; choose another name"
            )
    _FORMATS[format.name] = format


def get_format(name: str, where: str = "format", setting: str = "format") -> Format:
    """The format of a name.

    Args:
        name: the name.
        where: the caller, for the message.
        setting: what the caller's argument is called.

    Raises:
        TensorDropoutError: if there is no such format.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise TensorDropoutError(f"{where}: {setting} is one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]


def find_layer(layer_name: str) -> type[TensorRegression] | None:
    """The layer's class by its name, as files have it; None if no format has it."""
    return next((format.layer for format in FORMATS.values() if format.layer_name == layer_name), None)


register_format(Format("tucker", "tensor_dropout.layers.tucker", "TuckerRegression", "TuckerDecomposition"))
register_format(Format("cp", "tensor_dropout.layers.cp", "CPRegression", "CPDecomposition"))
register_format(Format("tt", "tensor_dropout.layers.tt", "TTRegression", "TTDecomposition"))
register_format(Format("ring", "tensor_dropout.layers.ring", "TensorRingRegression", "RingDecomposition"))
