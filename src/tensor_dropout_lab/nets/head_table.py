"""Which heads there are, and which settings each takes. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterator, KeysView, Mapping
from difflib import get_close_matches
from typing import Any

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.formats import FORMATS

DEFAULT_THETA = 0.9
"""θ, the KEEP probability, of a random head when none is given."""

_WEIGHT = ("rank", "init")
_MASKS = ("theta", "law", "modes", "per_sample", "scaling", "min_rank")


class _HeadSettings(Mapping[str, tuple[str, ...]]):
    """The settings of each head, two heads for every format that is registered at the time."""

    def _list(self) -> dict[str, tuple[str, ...]]:
        return {
            "fc": (),
            "fc+flatten": (),
            "fc+dropout": ("drop_rate",),
            "fc+low-rank": ("rank",),
            **{f"trl-{format}": _WEIGHT for format in FORMATS},
            **{f"rtrl-{format}": (*_WEIGHT, *_MASKS) for format in FORMATS},
            "trl-tucker+weight-dropout": (*_WEIGHT, "theta"),
        }

    def __getitem__(self, head: str) -> tuple[str, ...]:
        return self._list()[head]

    def __iter__(self) -> Iterator[str]:
        return iter(self._list())

    def __len__(self) -> int:
        return len(self._list())


SETTINGS = _HeadSettings()

DEFAULTS: dict[str, Any] = {
    "rank": None,
    "init": "pool",
    "theta": None,
    "law": "bernoulli",
    "modes": None,
    "per_sample": False,
    "scaling": "inverted",
    "min_rank": 0,
    "drop_rate": 0.5,
}
"""What a setting is where nothing else is said."""

HEADS: KeysView[str] = SETTINGS.keys()
"""The names that ``build_head`` knows."""


def check_name(what: str, name: Any, names: Collection[str]) -> None:
    """Refuse an unknown name and offer the nearest one.

    Example:
        >>> check_name("net", "resnet81", ("resnet18", "resnet34"))
        Traceback (most recent call last):
        ...
        tensor_dropout.errors.TensorDropoutError: unknown net 'resnet81', did you mean 'resnet18'? There are:
        resnet18, resnet34
    """
    if name in names:
        return
    nearest = get_close_matches(str(name), names, n=1, cutoff=0.0)[0]
    raise TensorDropoutError(f"unknown {what} {name!r}, did you mean {nearest!r}? There are: {', '.join(names)}")


def leave_out_unused(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings without those that are for other heads than this one.

    Example:
        >>> leave_out_unused("fc+dropout", {"outputs": 10, "drop_rate": 0.2, "modes": "all"})
        {'outputs': 10, 'drop_rate': 0.2}
    """
    others = DEFAULTS.keys() - set(SETTINGS[name])
    return {key: value for key, value in settings.items() if key not in others}


def refuse_unused(name: str, settings: dict[str, Any]) -> None:
    """A setting that the head would silently ignore is a mistake."""
    for setting, value in settings.items():
        if setting in SETTINGS[name] or value == DEFAULTS[setting]:
            continue
        if name == "fc+dropout" and setting == "theta":
            advice = "give drop_rate, which is 1 - theta"
        elif setting == "drop_rate" and "theta" in SETTINGS[name]:
            advice = "give theta, the KEEP probability, which is 1 - drop_rate"
        else:
            advice = "that is for " + ", ".join(head for head in HEADS if setting in SETTINGS[head])
        raise TensorDropoutError(f"build_head: the head {name!r} takes no {setting}, got {value!r}; {advice}")
