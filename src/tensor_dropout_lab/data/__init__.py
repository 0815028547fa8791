"""Data sets by name: ``load_data("digits")``.

:data:`DATASETS` has an entry for each: where its loader is, a line about it, and the defaults of a training run. The
loader's module is imported when it is asked for. Its keyword arguments are the options, explained by its docstring. To
add a data set to this package, write its file and its entry; one of your own is registered by :func:`register_data`.

Importing this module does not import torch: ``tensor-dropout --help`` lists the names.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, cast, get_args, get_origin

from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:
    from tensor_dropout_lab.data.base import Data as Data
    from tensor_dropout_lab.data.base import FileReader
    from tensor_dropout_lab.data.base import Split as Split
    from tensor_dropout_lab.data.base import StreamSplit as StreamSplit
    from tensor_dropout_lab.data.base import TensorSplit as TensorSplit

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


def __getattr__(name: str) -> Any:
    if name in ("Data", "Split", "StreamSplit", "TensorSplit"):
        return getattr(importlib.import_module(f"{__name__}.base"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class Source:
    """The entry of a data set.

    Attributes:
        module: where its loader is.
        loader: the name of that function.
        summary: one line for ``--help``.
        function: the loader itself, of a registered data set.
        has_files: whether it is read from a folder of the user's, given by ``--root``.
        reader: the name of the class in its module that reads single files for ``tensor-dropout predict``, a
            :class:`~tensor_dropout_lab.data.base.FileReader`; "" if there is none.
        defaults: what a training run uses where nothing else is set: tables of the config with their keys.
    """

    module: str
    loader: str
    summary: str
    function: Callable[..., Data] | None = None
    has_files: bool = False
    reader: str = ""
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def import_loader(self) -> Callable[..., Data]:
        """The function that loads it."""
        if self.function is not None:
            return self.function
        return cast("Callable[..., Data]", getattr(importlib.import_module(self.module), self.loader))

    def import_reader(self) -> type[FileReader]:
        """The class that reads single files."""
        return cast("type[FileReader]", getattr(importlib.import_module(self.module), self.reader))


@dataclass(frozen=True)
class Option:
    """A setting of a data set: its type as written, its default and its meaning."""

    type: str
    default: Any
    meaning: str

    def __str__(self) -> str:
        return f"{self.meaning} ({self.type}; default {self.default!r})"


_SGD = {"name": "sgd", "lr": 0.1, "weight_decay": 5e-4}

DATASETS: dict[str, Source] = {
    "digits": Source(
        "tensor_dropout_lab.data.digits",
        "load_digits",
        "1,797 handwritten digits, 8×8, bundled with scikit-learn",
        defaults={"run": {"epochs": 20}},
    ),
    "cifar10": Source(
        "tensor_dropout_lab.data.cifar",
        "load_cifar10",
        "60,000 colour images, 32×32, 10 classes: the official python files",
        has_files=True,
        defaults={"net": {"name": "resnet18"}, "run": {"epochs": 40, "batch": 128}, "optimizer": _SGD},
    ),
    "cifar100": Source(
        "tensor_dropout_lab.data.cifar",
        "load_cifar100",
        "60,000 colour images, 32×32, 100 classes: the official python files",
        has_files=True,
        defaults={"net": {"name": "resnet18"}, "run": {"epochs": 40, "batch": 128}, "optimizer": _SGD},
    ),
    "imagefolder": Source(
        "tensor_dropout_lab.data.imagefolder",
        "load_imagefolder",
        "pictures in folders named by class (ImageNet's layout)",
        has_files=True,
        reader="PictureReader",
        defaults={
            "net": {"name": "resnet50"},
            "run": {"epochs": 90, "batch": 256, "workers": 8},
            "optimizer": _SGD,
        },
    ),
    "table": Source(
        "tensor_dropout_lab.data.table",
        "load_table",
        "images and a table of their landmarks, boxes, ages or classes (points.csv)",
        has_files=True,
        reader="TableReader",
        defaults={"run": {"epochs": 60, "batch": 32}},
    ),
    "nifti": Source(
        "tensor_dropout_lab.data.nifti",
        "load_nifti",
        "a folder of NIfTI volumes (flat or BIDS) and a table with their targets",
        has_files=True,
        reader="ScanReader",
        defaults={
            "net": {"name": "resnet18"},
            "run": {"epochs": 60, "batch": 8},
            "optimizer": {"name": "adam", "lr": 5e-4, "weight_decay": 5e-4},
        },
    ),
    "phantom": Source(
        "tensor_dropout_lab.data.phantom",
        "load_phantom",
        "SIMULATED heads whose cortex thins and ventricles grow with age",
        defaults={"run": {"epochs": 16, "batch": 16}},
    ),
    "synthetic": Source(
        "tensor_dropout_lab.data.synthetic",
        "load_synthetic",
        "SIMULATED tensor regression: white inputs, a weight of low rank",
        defaults={"run": {"epochs": 20}},
    ),
}
"""Name -> entry of the data set."""

_BUILT_IN = frozenset(DATASETS)

OF_YOUR_OWN = (
    "to add your own, call tensor_dropout_lab.data.register_data in a module and let the command line import it first: "
    "tensor-dropout --import MODULE ..."
)
"""What to do about a data set that is not known."""


def register_data(
    name: str,
    loader: Callable[..., Data],
    summary: str = "",
    *,
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Give a data set of your own a name, so that :func:`load_data` and the command line know it.

    Args:
        name: the name; those of the built-in data sets are taken.
        loader: a function that returns :class:`Data`. Its keyword arguments are the options (``data.options``), checked
            by their annotations and explained by its docstring; if it has ``root`` or ``seed``, it is given them. A
            list comes as a tuple, and a text as a Path, where the annotation says so.
        summary: one line about it.
        defaults: what a training run uses where nothing else is set, such as ``{"run": {"epochs": 20}}``.

    Raises:
        TensorDropoutError: if the name is that of another data set, or ``loader`` cannot be called with keywords.

    Example:
        >>> import torch
        >>> from tensor_dropout_lab.data import Data, TensorSplit
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
    has_files = "root" in inspect.signature(loader).parameters
    source = Source(module, function, summary, loader, has_files, defaults=defaults or {})
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
    from tensor_dropout_lab.data.base import Data, check_data

    known = describe_options(name)
    for option in options:
        if option not in known:
            raise TensorDropoutError(f"{name}: there is no option {option!r}; {_suggest(option, known)}")
    source = _find_source(name)
    loader = source.import_loader()
    parameters = inspect.signature(loader).parameters
    kinds = read_types(name)
    for option, value in options.items():
        if not fits_type(value, kinds[option]):
            raise TensorDropoutError(f"{name}: the option {option} is of type {known[option].type}, got {value!r}")
    if "root" in parameters:
        options["root"] = root
    elif root is not None:
        raise TensorDropoutError(f"{name}: it has no files, so it takes no root; leave root={str(root)!r} out")
    if "seed" in parameters:
        options["seed"] = seed
    data = loader(**{option: _as_annotated(value, kinds[option]) for option, value in options.items()})
    if not isinstance(data, Data):
        raise TensorDropoutError(f"{name}: its loader must return tensor_dropout_lab.data.Data, got {data!r}")
    if source.function is not None:
        check_data(data)
    return data


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
    annotations = {}
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
        annotations[parameter.name] = annotation
    return annotations


def _read_parameters(loader: Callable[..., Data]) -> Mapping[str, inspect.Parameter]:
    """The arguments, with their annotations looked up if all of them can be."""
    try:
        return inspect.signature(loader, eval_str=True).parameters
    except (NameError, AttributeError, TypeError, SyntaxError):  # of one annotation; the others are tried by themselves
        return inspect.signature(loader).parameters


def fits_type(value: Any, annotation: Any) -> bool:
    """Whether a value is of a type as JSON writes it: a list may be a tuple, and a text a path.

    A value or a type that JSON or pydantic does not know is left to the loader.

    Example:
        >>> fits_type([8, 8], tuple[int, int]), fits_type("8", int)
        (True, False)
    """
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        TypeAdapter(annotation).validate_json(json.dumps(value, default=os.fspath), strict=True)
    except ValidationError:
        return False
    except (PydanticUserError, TypeError):
        return True
    return True


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
    meanings: dict[str, str] = {}
    name = ""
    for line in section.split("\n\n")[0].splitlines():
        if line.startswith("    ") and not line.startswith("     "):
            name, _, text = line.strip().partition(": ")
            meanings[name] = text
        elif name:
            meanings[name] += " " + line.strip()
    return {name: text.rstrip(".") for name, text in meanings.items()}
