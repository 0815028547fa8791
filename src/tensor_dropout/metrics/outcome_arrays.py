"""The outcome of an evaluation, read and checked: what the measures and the intervals are computed from.

An outcome is a dict of arrays with a row per example (N rows), as an evaluation stores it:

- classification: ``target`` (N,), ``predicted`` (N,), ``confidence`` (N,) the probability of the predicted class,
  ``nll`` (N,), ``brier`` (N,) ``Σ_k (p_k − 1[k = y])²``, ``entropy`` (N,), ``top5`` (N,) whether the target is among
  the five most probable classes;
- regression: ``target`` (N, T), ``output`` (N, T), and the predictive standard deviation ``std`` (N, T), if there is
  one.

Only numpy and the standard library: the report reads records without torch. Everything is computed in float64. An
empty outcome, and one with a NaN or an infinity anywhere, is refused: no number is better than a wrong one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensor_dropout.errors import TensorDropoutError

Task: TypeAlias = Literal["classification", "regression"]
Outcome: TypeAlias = Mapping[str, Any]
Array: TypeAlias = NDArray[Any]

CLASSES = ("target", "predicted", "confidence", "nll", "brier", "entropy", "top5")
NUMBERS = ("target", "output", "std")


def find_task(what: str, outcome: Outcome) -> str:
    """Whether an outcome is of a "classification" or of a "regression"; ``what`` begins an error, here and below."""
    classes, numbers = "predicted" in outcome, "output" in outcome
    if classes == numbers:
        raise TensorDropoutError(
            f"{what}: an outcome has either 'predicted' (classification) or 'output' (regression), not "
            f"{'both' if classes else 'neither'}; it has {', '.join(map(repr, outcome)) or 'nothing'}"
        )
    return "classification" if classes else "regression"


def read_classes(what: str, outcome: Outcome) -> dict[str, Array]:
    """The arrays of a classification, (N,) each, checked."""
    found = _read_known(what, outcome, CLASSES, CLASSES[:2])
    rows = read_row(what, **found)
    found = dict(zip(found, rows, strict=True))
    for name in ("target", "predicted"):
        if (found[name] != np.floor(found[name])).any():
            raise TensorDropoutError(f"{what}: {name} must be numbers of classes; it has fractions")
    if "confidence" in found:
        require_probabilities(what, found["confidence"])
    return found


def describe_classes(log_probs: Array, target: Array) -> dict[str, Array]:
    """The outcome of a classification from the logarithms of its class probabilities, in float64.

    Args:
        log_probs: (N, K).
        target: (N,), the classes; -1 for an example of no known class.

    Returns:
        ``target``, ``predicted``, ``confidence``, ``rest`` (the probability of all other classes) and ``entropy``; if
        all classes are known, also ``nll``, ``brier`` and ``top5``. Among equal probabilities the first class counts
        as the larger.

    Example:
        >>> found = describe_classes(np.log([[0.9, 0.1], [0.4, 0.6]]), np.array([0, 0]))
        >>> found["predicted"].tolist(), found["brier"].round(2).tolist()
        ([0, 1], [0.02, 0.72])
    """
    target = np.asarray(target, np.int64)
    known = bool((target >= 0).all())
    rows = max(1, _BLOCK // max(1, log_probs.shape[1]))
    blocks = [
        _describe_block(np.asarray(log_probs[first : first + rows], np.float64), target[first : first + rows], known)
        for first in range(0, max(1, len(target)), rows)
    ]
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


_BLOCK = 2**22  # probabilities at once: 50,000 examples of 1,000 classes would take gigabytes


def _describe_block(log_probs: Array, target: Array, known: bool) -> dict[str, Array]:
    probs, rows = np.exp(log_probs), np.arange(len(log_probs))
    predicted = log_probs.argmax(1)
    others = probs.copy()
    others[rows, predicted] = 0.0
    found = {
        "target": target,
        "predicted": predicted,
        "confidence": probs[rows, predicted],
        "rest": others.sum(1),  # 1 − confidence, where that would be rounded to 0
        "entropy": -(probs * np.where(probs > 0, log_probs, 0.0)).sum(1),
    }
    if known:
        true = log_probs[rows, target]
        found["nll"] = -true
        found["brier"] = np.square(probs).sum(1) - 2 * np.exp(true) + 1
        before = np.arange(log_probs.shape[1]) < target[:, None]
        larger = (log_probs > true[:, None]) | ((log_probs == true[:, None]) & before)
        found["top5"] = larger.sum(1) < 5
    return found


def read_numbers(what: str, outcome: Outcome) -> dict[str, Array]:
    """The arrays of a regression, (N, T) each, checked."""
    if find_task(what, outcome) != "regression":
        raise TensorDropoutError(f"{what}: the outcome of a regression is expected; this one is of a classification")
    found = _read_known(what, outcome, NUMBERS, NUMBERS[:2])
    found = {name: values[:, None] if values.ndim == 1 else values for name, values in found.items()}
    shapes = {name: values.shape for name, values in found.items()}
    if len(set(shapes.values())) > 1 or len(shapes["output"]) != 2:
        raise TensorDropoutError(f"{what}: arrays of one shape (N, T) are expected, not {_list_shapes(shapes)}")
    if "std" in found and (found["std"] < 0).any():
        raise TensorDropoutError(f"{what}: std must be 0 or more; its smallest is {found['std'].min():g}")
    return found


def _read_known(what: str, outcome: Outcome, known: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Array]:
    missing = [name for name in required if name not in outcome]
    if missing:
        raise TensorDropoutError(f"{what}: the outcome lacks {', '.join(missing)}; it has {', '.join(outcome)}")
    return {name: read_array(what, name, outcome[name]) for name in known if name in outcome}


def read_row(what: str, **arrays: ArrayLike) -> list[Array]:
    """The arrays, checked: of one shape (N,)."""
    found = {name: read_array(what, name, values) for name, values in arrays.items()}
    shapes = {name: values.shape for name, values in found.items()}
    if any(len(shape) != 1 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise TensorDropoutError(f"{what}: one number per row is expected, (N,), not {_list_shapes(shapes)}")
    return list(found.values())


def read_array(what: str, name: str, values: ArrayLike) -> Array:
    """The values in float64, checked: some, and finite."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TensorDropoutError(f"{what}: {name} must be an array of numbers ({error})") from error
    if array.size == 0:
        raise TensorDropoutError(f"{what}: {name} is empty; nothing was measured")
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise TensorDropoutError(
            f"{what}: {name} has NaN or infinity in {bad} of {array.size} places; no number is given"
        )
    return array


def _list_shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


# Checks.


def require_probabilities(what: str, confidence: Array) -> None:
    """Refuse a confidence outside of [0, 1]."""
    if confidence.min() < 0 or confidence.max() > 1 + 1e-6:  # a sum of float32 may round above 1
        raise TensorDropoutError(
            f"{what}: confidence must be a probability; it ranges from {confidence.min():g} to {confidence.max():g}"
        )


def require_binary(what: str, right: Array) -> None:
    """Refuse all but 0 and 1."""
    if not np.isin(right, (0, 1)).all():
        raise TensorDropoutError(f"{what}: right or wrong is expected as 1 or 0 for each image")


def require_level(what: str, level: float) -> None:
    """Refuse a level that is no probability between 0 and 1."""
    if not 0 < level < 1:
        raise TensorDropoutError(f"{what}: level is a probability between 0 and 1, such as 0.95, not {level!r}")


def require_count(what: str, name: str, value: int) -> None:
    """Refuse all but whole numbers from 1 on."""
    if not isinstance(value, int | np.integer) or value < 1:
        raise TensorDropoutError(f"{what}: {name} must be a positive whole number, not {value!r}")
