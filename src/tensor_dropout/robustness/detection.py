"""Telling inputs of unknown classes from known ones, by how sure the network is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

SIGNALS = {"confidence": -1.0, "entropy": 1.0, "disagreement": 1.0, "doubt": 1.0}
"""What an outcome may hold, and the sign that makes it larger for inputs that the network does not know."""


def detect(known: Mapping[str, Any], unknown: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How well each signal of two outcomes tells them apart.

    Args:
        known: the outcome of inputs of known classes.
        unknown: that of inputs of other classes.

    Returns:
        By signal, in percent: ``auroc`` (50 is a coin) and ``fpr95``, the unknown inputs that are let through when 95 %
        of the known ones are.

    Example:
        >>> detect({"confidence": [0.9, 0.8, 0.7]}, {"confidence": [0.75, 0.3]})
        {'confidence': {'auroc': 83.33333333333333, 'fpr95': 50.0}}
    """
    shared = [name for name in SIGNALS if name in known and name in unknown]
    signed = {name: [SIGNALS[name] * np.asarray(part[name], float) for part in (known, unknown)] for name in shared}
    return {
        name: {"auroc": 100 * rank_area(*both), "fpr95": 100 * float((both[1] <= np.quantile(both[0], 0.95)).mean())}
        for name, both in signed.items()
    }


def rank_area(low: ArrayLike, high: ArrayLike) -> float:
    """The probability that one of ``high`` is above one of ``low``, ties counted by half: the area under the ROC curve.

    Example:
        >>> rank_area([0.0, 1.0], [1.0, 2.0])
        0.875
    """
    low, high = np.sort(np.asarray(low)), np.asarray(high)
    below, to = np.searchsorted(low, high, "left"), np.searchsorted(low, high, "right")
    return float((below + to).mean() / (2 * len(low)))
