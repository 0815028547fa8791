"""What a target did with every example, part by part; kept in a file, if asked for, that survives interruptions."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError

if TYPE_CHECKING:  # the report reads outcomes without torch
    from torch import Tensor

Arrays = dict[str, np.ndarray]


def slim(arrays: Arrays) -> Arrays:
    """What is kept of an attack: decisions, and how sure they were; a regression keeps its outputs.

    Example:
        >>> sorted(slim({"predicted": np.zeros(3), "confidence": np.ones(3), "nll": np.ones(3)}))
        ['confidence', 'predicted']
    """
    if "predicted" not in arrays:
        return arrays
    return {"predicted": arrays["predicted"], "confidence": arrays["confidence"].astype(np.float16)}


FILE = "outcomes.npz"
"""The file in the folder of an evaluation."""


class Outcomes:
    """The parts of an evaluation that are done; or restored from a packed record, to be read only.

    Args:
        path: a file ``.npz`` that every part is written to once it is done; it need not exist. None: in memory alone.
        identity: what the outcomes belong to (network, examples, mode). A file of another identity is refused.

    Raises:
        TensorDropoutError: if the file belongs to something else, or cannot be read.
    """

    def __init__(self, path: Path | None = None, identity: Mapping[str, Any] | None = None) -> None:
        self.path, self.identity = path, json.loads(json.dumps(identity or {}))
        self._packed = False
        self._identity = self.identity
        self.examples: Arrays = {}
        self._parts: dict[str, Arrays] = {}
        self._settings: dict[str, Any] = {}
        if path is not None and path.is_file():
            self._read(path)
            for key in self.identity:
                if self._identity.get(key) != self.identity[key]:
                    raise TensorDropoutError(
                        f"evaluate: {path.parent} holds an evaluation with {key}={self._identity.get(key)!r}, this one "
                        f"has {self.identity[key]!r}; choose another folder with --out, or delete that one"
                    )

    def _read(self, path: Path) -> None:
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            self._fill(json.loads(str(arrays.pop("header"))), arrays)
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            raise TensorDropoutError(f"evaluate: {path} cannot be read ({error}); delete it") from error

    def _fill(self, header: Mapping[str, Any], arrays: Arrays) -> None:
        self._identity, self._settings = header["identity"], dict(header["parts"])
        for name, array in arrays.items():
            part, _, key = name.rpartition("/")
            (self._parts.setdefault(part, {}) if part else self.examples)[key] = array

    @classmethod
    def restore(cls, path: Path, header: Mapping[str, Any], arrays: Arrays) -> Outcomes:
        """Outcomes from their :meth:`header` and :meth:`arrays`, to be read only.

        Args:
            path: what messages call them; no file is read.
            header: identity and settings.
            arrays: by name, PART/KEY, or KEY of the examples.
        """
        outcomes = cls(None, header["identity"])
        outcomes.path, outcomes._packed = path, True
        outcomes._fill(header, arrays)
        outcomes._parts = {part: outcomes._parts[part] for part in header["parts"] if part in outcomes._parts}
        return outcomes

    def claim(self, fingerprint: str) -> None:
        """Say what outcomes without an identity belong to.

        Raises:
            TensorDropoutError: if they belong to something else, or there are some and nothing says to what.
        """
        known = self._identity.get("fingerprint")
        if known != fingerprint and (known is not None or self._parts):
            raise TensorDropoutError(
                f"evaluate: {self.path or 'outcomes'} may hold results of another network, other inputs or another "
                "mode; name another file for this one"
            )
        self._identity = {**self._identity, "fingerprint": fingerprint}

    def header(self) -> dict[str, Any]:
        """What the outcomes belong to, and the settings and seconds of every part."""
        return {"identity": self._identity, "parts": self._settings}

    def arrays(self) -> Arrays:
        """All arrays: KEY of the examples, PART/KEY of the parts."""
        return self.examples | {
            f"{part}/{key}": array for part, arrays in self._parts.items() for key, array in arrays.items()
        }

    def set_examples(self, y: Tensor, names: list[str]) -> None:
        """Say which examples the rows are."""
        self.examples = {"target": y.cpu().numpy(), "name": np.array(names)}

    def has(self, part: str, settings: Mapping[str, Any]) -> bool:
        """Whether this part is done, with exactly these settings."""
        known = self._settings.get(part)
        return known is not None and known["settings"] == json.loads(json.dumps(settings))

    def add(self, part: str, settings: Mapping[str, Any], arrays: Arrays, seconds: float) -> None:
        """Keep a part that is done, and write the file anew, if there is one."""
        if self._packed:
            raise TensorDropoutError(f"evaluate: {self.path} is packed; nothing is added to it")
        self._parts[part] = arrays
        self._settings[part] = {"settings": json.loads(json.dumps(settings)), "seconds": round(seconds, 3)}
        if self.path is None:
            return
        header = json.dumps(self.header(), ensure_ascii=False)
        with replacing(self.path) as temporary:
            np.savez_compressed(temporary, header=np.array(header), **self.arrays())  # type: ignore[arg-type]

    def settings(self, part: str) -> dict[str, Any]:
        """Of a part that is done: its settings and its seconds."""
        return {**self._settings[part]["settings"], "seconds": self._settings[part]["seconds"]}

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def __getitem__(self, part: str) -> Arrays:
        """The arrays of a part, with the targets."""
        return {"target": self.examples["target"], **self._parts[part]}

    def names(self, prefix: str = "") -> list[str]:
        """The parts that are done, in the order in which they were."""
        return [part for part in self._parts if part.startswith(prefix)]
