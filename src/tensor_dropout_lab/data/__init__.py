"""Data sets by name: ``load_data("digits")``.

A data set is a function in a module that is imported when it is asked for; its keyword arguments are the options, and
their meaning is read from its docstring. One of your own gets a name by :func:`register_data`.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import Data, Split, StreamSplit, TensorSplit, check_data

__all__ = [
    "DATASETS",
    "Data",
    "Option",
    "Source",
    "Split",
    "StreamSplit",
    "TensorSplit",
    "describe_options",
    "load_data",
    "register_data",
]


@dataclass(frozen=True)
class Source:
    """Where a data set's loader is, and one line for ``--help``; a registered one is the function itself."""

    module: str
    loader: str
    summary: str
    function: Callable[..., Data] | None = None

    @property
    def has_files(self) -> bool:
        """Whether it is read from a folder of the user's."""
        return self.module.rpartition(".")[2] in ("cifar", "imagefolder", "nifti")

    def import_loader(self) -> Callable[..., Data]:
        """The function that loads it."""
        if self.function is not None:
            return self.function
        return cast(Callable[..., Data], getattr(importlib.import_module(self.module), self.loader))


@dataclass(frozen=True)
class Option:
    """A setting of a data set: its type as written, its default and its meaning."""

    type: str
    default: Any
    meaning: str

    def __str__(self) -> str:
        return f"{self.meaning} ({self.type}; default {self.default!r})"


def _source(module: str, loader: str, summary: str) -> Source:
    return Source(f"tensor_dropout_lab.data.{module}", loader, summary)


DATASETS: dict[str, Source] = {
    "digits": _source("digits", "load_digits", "1,797 handwritten digits, 8×8, bundled with scikit-learn"),
    "cifar10": _source("cifar", "load_cifar10", "60,000 colour images, 32×32, 10 classes: the official python files"),
    "cifar100": _source(
        "cifar", "load_cifar100", "60,000 colour images, 32×32, 100 classes: the official python files"
    ),
    "imagefolder": _source("imagefolder", "load_imagefolder", "pictures in folders named by class (ImageNet's layout)"),
    "nifti": _source("nifti", "load_nifti", "a folder of NIfTI volumes (flat or BIDS) and a table with their targets"),
    "phantom": _source("phantom", "load_phantom", "SIMULATED heads whose cortex thins and ventricles grow with age"),
    "synthetic": _source(
        "synthetic", "load_synthetic", "SIMULATED tensor regression: white inputs, a weight of low rank"
    ),
}
"""Name of the data set -> where it is loaded from. Nothing is imported before it is asked for."""

_BUILT_IN = frozenset(DATASETS)

OF_YOUR_OWN = (
    "one of your own is registered by tensor_dropout_lab.data.register_data, in a module that the command line imports "
    "first: tensor-dropout --import MODULE ..."
)
"""What to do about a data set that is not known."""


def register_data(name: str, loader: Callable[..., Data], summary: str = "") -> None:
    """Give a data set of your own a name, so that :func:`load_data` and the command line know it.

    Args:
        name: the name; those of the built-in data sets are taken.
        loader: a function that returns :class:`Data`. Its keyword arguments are the options (``data.options``), checked
            by their annotations and explained by its docstring; if it has ``root`` or ``seed``, it is given them. A
            list comes as a tuple, and a text as a Path, where the annotation says so.
        summary: one line about it.

    Raises:
        TensorDropoutError: if the name is that of another data set, or ``loader`` cannot be called with keywords.

    Example:
        >>> import torch
        >>> def load_noise(*, seed: int = 0, n: int = 20) -> Data:
        ...     inputs = torch.randn(n, 1, 8, 8, generator=torch.Generator().manual_seed(seed))
        ...     part = TensorSplit(inputs, inputs.mean((1, 2, 3)), [f"noise-{i}" for i in range(n)])
        ...     return Data("noise", "regression", part, None, part, (1, 8, 8), outputs=1, target="mean")
        >>> register_data("noise", load_noise)
        >>> len(load_data("noise", n=5).train)
        5
        >>> del DATASETS["noise"]  # this page does not need it any longer
    """
    if not isinstance(name, str) or not name:
        raise TensorDropoutError(f"register_data: a name is a text that is not empty, got {name!r}")
    if not callable(loader):
        raise TensorDropoutError(f"register_data: {name!r} needs a function that returns Data, got {loader!r}")
    for parameter in inspect.signature(loader).parameters.values():
        if parameter.kind not in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            raise TensorDropoutError(
                f"register_data: the arguments of the loader of {name!r} are options with names, got {parameter}"
            )
    module, function = getattr(loader, "__module__", ""), getattr(loader, "__qualname__", type(loader).__qualname__)
    source = Source(module, function, summary, loader)
    if name in _BUILT_IN or not _is_again(source, DATASETS.get(name, source)):
        raise TensorDropoutError(f"register_data: the name {name!r} is taken by another data set; choose another one")
    DATASETS[name] = source


def _is_again(source: Source, before: Source) -> bool:
    """Whether a loader is the one before, or its definition was run again: then it has a name, and the same."""
    named = hasattr(source.function, "__qualname__") and "<lambda>" not in source.loader  # a partial has none
    same = (source.module, source.loader) == (before.module, before.loader)
    return source.function is before.function or (named and same)


def load_data(name: str, *, root: str | Path | None = None, seed: int = 0, **options: Any) -> Data:
    """Load a data set.

    Args:
        name: one of ``DATASETS``.
        root: the folder with the files; data sets without files take none.
        seed: of the split and of simulated data. ``digits`` has one fixed split.
        **options: see :func:`describe_options`.

    Raises:
        TensorDropoutError: if the name or an option is unknown (the message has the nearest one), files are missing or
            damaged, or the parts of a registered data set do not fit together.

    Example:
        >>> data = load_data("synthetic", shape=(4, 4), rank=2, n=50)
        >>> data.task, data.input_shape, len(data.train)
        ('regression', (4, 4), 36)
    """
    known = describe_options(name)
    for option in options:
        if option not in known:
            raise TensorDropoutError(f"{name}: there is no option {option!r}; {_suggest(option, known)}")
    source = _find_source(name)
    loader = source.import_loader()
    parameters = inspect.signature(loader).parameters
    if "root" in parameters:
        options["root"] = root
    elif root is not None:
        raise TensorDropoutError(f"{name}: it has no files, so it takes no root; leave root={str(root)!r} out")
    if "seed" in parameters:
        options["seed"] = seed
    kinds = read_types(name)
    options = {option: _as_annotated(value, kinds[option]) for option, value in options.items()}
    try:
        data = loader(**options)
        if not isinstance(data, Data):
            raise TensorDropoutError(f"{name}: its loader must return tensor_dropout_lab.data.Data, got {data!r}")
        if source.function is not None:
            check_data(data)
        return data
    except TensorDropoutError:
        raise
    except (TypeError, ValueError) as error:
        if source.function is not None:  # of the user, who needs the place
            raise
        given = ", ".join(f"{key}={value!r}" for key, value in options.items() if key not in ("root", "seed"))
        raise TensorDropoutError(f"{name}: an option is not what it should be ({error}); got {given}") from error


def describe_options(name: str) -> dict[str, Option]:
    """The options that a data set takes besides ``root`` and ``seed``.

    Raises:
        TensorDropoutError: if there is no such data set.

    Example:
        >>> print(describe_options("digits")["augment"])
        shift by at most one pixel, in training (bool; default True)
    """
    loader = _find_source(name).import_loader()
    meanings = _read_arguments(inspect.getdoc(loader) or "")
    return {
        parameter.name: Option(_name_type(parameter), parameter.default, meanings.get(parameter.name, ""))
        for parameter in inspect.signature(loader).parameters.values()
        if parameter.name not in ("root", "seed")
    }


def read_types(name: str) -> dict[str, Any]:
    """The annotation of every argument of a data set's loader; Any where there is none that can be looked up.

    Example:
        >>> read_types("digits")["augment"]
        <class 'bool'>
    """
    loader = _find_source(name).import_loader()
    known = getattr(inspect.unwrap(loader), "__globals__", {})
    found = {}
    for parameter in _read_parameters(loader).values():
        annotation = Any if parameter.annotation is parameter.empty else parameter.annotation
        if isinstance(annotation, str):
            try:
                annotation = eval(annotation, known)  # as inspect does, but one that fails leaves the others
            except (
                NameError,
                AttributeError,
                TypeError,
                SyntaxError,
            ):  # a name that only type checkers know, for example
                annotation = Any
        found[parameter.name] = annotation
    return found


def _read_parameters(loader: Callable[..., Data]) -> Mapping[str, inspect.Parameter]:
    """The arguments, with their annotations looked up if all of them can be."""
    try:
        return inspect.signature(loader, eval_str=True).parameters
    except (NameError, AttributeError, TypeError, SyntaxError):  # of one annotation; the others are tried by themselves
        return inspect.signature(loader).parameters


def _as_annotated(value: Any, annotation: Any) -> Any:
    """A list as a tuple, or a text as a path, where the loader asks for that: TOML and JSON have neither."""
    union = get_origin(annotation) in (Union, types.UnionType)
    kinds = {get_origin(part) or part for part in (get_args(annotation) if union else (annotation,))}
    if isinstance(value, list) and tuple in kinds and list not in kinds:
        return tuple(value)
    if isinstance(value, str) and Path in kinds and str not in kinds:
        return Path(value)
    return value


def _name_type(parameter: inspect.Parameter) -> str:
    """The annotation as it is written, or as it would be."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return "anything"
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _find_source(name: str) -> Source:
    if name not in DATASETS:
        raise TensorDropoutError(f"data: there is no data set {name!r}; {_suggest(name, DATASETS)}; {OF_YOUR_OWN}")
    return DATASETS[name]


def _suggest(name: str, known: dict[str, Any]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}known are {', '.join(known) or 'none'}"


def _read_arguments(docstring: str) -> dict[str, str]:
    """The entries of the Args section of a Google docstring: name -> text without its final stop."""
    _, _, section = docstring.partition("Args:\n")
    found: dict[str, str] = {}
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            found[name] = text
        elif name:
            found[name] += " " + line.strip()
    return {name: text.rstrip(".") for name, text in found.items()}
