"""What a target did with every single example, part by part, in one compressed file that survives interruptions."""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task, describe_classes
from tensor_dropout.robustness.target import Predicted

Arrays = dict[str, np.ndarray]


def describe_outcome(predicted: Predicted, y: Tensor, task: Task) -> Arrays:
    """One row per example: everything that is reported can be computed from these.

    Args:
        predicted: class probabilities, or a regression's output and std.
        y: the targets.
        task: "classification" or "regression".

    Returns:
        For classes what :func:`~tensor_dropout.metrics.outcome_arrays.describe_classes` gives, without the target, and,
        over draws, ``disagreement`` and ``doubt``; for numbers ``output`` and ``std``.

    Example:
        >>> probs = torch.tensor([[0.9, 0.1], [0.4, 0.6]])
        >>> found = describe_outcome(Predicted(probs, None), torch.tensor([0, 0]), "classification")
        >>> found["predicted"].tolist(), found["top5"].tolist()
        ([0, 1], [True, True])
    """
    if task == "regression":
        found = {"output": predicted.output} | ({} if predicted.std is None else {"std": predicted.std})
        return {name: values.float().cpu().numpy() for name, values in found.items()}
    arrays = describe_classes(_log(predicted).double().cpu().numpy(), y.cpu().numpy())
    if predicted.disagreement is not None and predicted.doubt is not None:
        arrays |= {"disagreement": predicted.disagreement.cpu().numpy(), "doubt": predicted.doubt.cpu().numpy()}
    small = np.int16 if predicted.output.shape[1] < 2**15 else np.int32
    stored = {"predicted": small, "brier": np.float16, "top5": np.bool_}  # brier: only its mean is asked for
    return {name: values.astype(stored.get(name, np.float32)) for name, values in arrays.items() if name != "target"}


def _log(predicted: Predicted) -> Tensor:
    """Without logarithms of its own, a probability of 0 counts as the smallest of float32."""
    if predicted.log_probs is not None:
        return predicted.log_probs
    return predicted.output.double().clamp(min=torch.finfo(torch.float32).tiny).log()


def slim(arrays: Arrays) -> Arrays:
    """What is kept of an attack: decisions, and how sure they were; a regression keeps its outputs.

    Example:
        >>> sorted(slim({"predicted": np.zeros(3), "confidence": np.ones(3), "nll": np.ones(3)}))
        ['confidence', 'predicted']
    """
    if "predicted" not in arrays:
        return arrays
    return {"predicted": arrays["predicted"], "confidence": arrays["confidence"].astype(np.float16)}


PLAIN, PACKED = "outcomes.npz", "outcomes.npz.xz"
"""The file of an evaluation; one that is kept is packed: attacks often end in the same decisions, which zip misses."""


class Outcomes:
    """The parts of an evaluation that are done, in ``outcomes.npz``, or ``outcomes.npz.xz`` to be read only.

    Args:
        path: the file; it need not exist.
        identity: what the outcomes belong to (network, examples, mode). A file of another identity is refused.

    Raises:
        TensorDropoutError: if the file belongs to something else, or cannot be read.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path, self.identity = path, json.loads(json.dumps(identity))
        self.examples: Arrays = {}
        self._parts: dict[str, Arrays] = {}
        self._settings: dict[str, Any] = {}
        if path.is_file():
            self._read()
            for key in self.identity:
                if self._identity.get(key) != self.identity[key]:
                    raise TensorDropoutError(
                        f"evaluate: {path.parent} holds an evaluation with {key}={self._identity.get(key)!r}, this one "
                        f"has {self.identity[key]!r}; choose another folder with --out, or delete that one"
                    )

    def _read(self) -> None:
        try:
            with np.load(_open(self.path), allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            header = json.loads(str(arrays.pop("header")))
            self._identity, self._settings = header["identity"], header["parts"]
        except (OSError, ValueError, KeyError, EOFError, TypeError, zipfile.BadZipFile, zlib.error) as error:
            advice = "restore it" if self.path.suffix == ".xz" else "delete it"
            raise TensorDropoutError(f"evaluate: {self.path} cannot be read ({error}); {advice}") from error
        for name, array in arrays.items():
            part, _, key = name.rpartition("/")
            (self._parts.setdefault(part, {}) if part else self.examples)[key] = array

    def set_examples(self, y: Tensor, names: list[str]) -> None:
        """Say which examples the rows are."""
        self.examples = {"target": y.cpu().numpy(), "name": np.array(names)}

    def has(self, part: str, settings: Mapping[str, Any]) -> bool:
        """Whether this part is done, with exactly these settings."""
        known = self._settings.get(part)
        return known is not None and known["settings"] == json.loads(json.dumps(settings))

    def add(self, part: str, settings: Mapping[str, Any], arrays: Arrays, seconds: float) -> None:
        """Keep a part that is done, and write the file anew."""
        if self.path.suffix == ".xz":
            raise TensorDropoutError(f"evaluate: {self.path} is packed; nothing is added to it")
        self._parts[part] = arrays
        self._settings[part] = {"settings": json.loads(json.dumps(settings)), "seconds": round(seconds, 3)}
        header = json.dumps({"identity": self.identity, "parts": self._settings}, ensure_ascii=False)
        flat = {f"{part}/{key}": array for part, arrays in self._parts.items() for key, array in arrays.items()}
        with replacing(self.path) as temporary:
            np.savez_compressed(temporary, header=np.array(header), **self.examples, **flat)  # type: ignore[arg-type]

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


def open_outcomes(folder: Path, identity: Mapping[str, Any]) -> Outcomes:
    """The outcomes in a folder, to go on with, or to begin.

    Raises:
        TensorDropoutError: if the folder holds those of something else, or packed ones.
    """
    if (folder / PACKED).is_file():
        raise TensorDropoutError(
            f"evaluate: {folder} holds a record that is kept ({PACKED}), to which nothing is added; choose another "
            "folder with --out"
        )
    return Outcomes(folder / PLAIN, identity)


def read_outcomes(folder: Path) -> Outcomes:
    """The outcomes of a finished or unfinished evaluation, packed or not.

    Raises:
        TensorDropoutError: if there are none, or both.
    """
    found = [path for path in (folder / PLAIN, folder / PACKED) if path.is_file()]
    if not found:
        raise TensorDropoutError(
            f"{folder} holds no evaluation (no {PLAIN}, no {PACKED}); make one with: tensor-dropout evaluate"
        )
    if len(found) > 1:
        raise TensorDropoutError(f"{folder} holds two evaluations, {PLAIN} and {PACKED}; move one of them elsewhere")
    return Outcomes(found[0], {})


def _open(path: Path) -> Path | io.BytesIO:
    if path.suffix != ".xz":
        return path
    import lzma  # which some builds of Python lack

    try:
        return io.BytesIO(lzma.decompress(path.read_bytes()))
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from error
