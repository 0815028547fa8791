"""Telling inputs of unknown classes from known ones, by how sure the network is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from tensor_dropout.errors import TensorDropoutError

SIGNALS = {
    "rest": "1 − confidence",
    "entropy": "entropy",
    "disagreement": "disagreement of the draws",
    "doubt": "std of the first logit ÷ its lead",
}
"""What an outcome may hold that is larger for inputs that the network does not know, and what it is in words."""


def detect(known: Mapping[str, Any], unknown: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """How well each signal of two outcomes tells them apart.

    Args:
        known: the outcome of inputs of known classes.
        unknown: that of inputs of other classes.

    Returns:
        By signal, in percent: ``auroc`` (50 is a coin) and ``fpr95``, the unknown inputs that are let through when 95 %
        of the known ones are.

    Raises:
        TensorDropoutError: if a signal has no numbers, or NaN.

    Example:
        >>> detect({"rest": [0.1, 0.2, 0.3, 0.4]}, {"rest": [0.25, 0.7]})
        {'rest': {'auroc': 75.0, 'fpr95': 50.0}}
    """
    found = {}
    for name in SIGNALS:
        if name in known and name in unknown:
            low, high = (np.asarray(part[name], np.float64) for part in (known, unknown))
            for part, values in (("known", low), ("unknown", high)):
                if not len(values) or np.isnan(values).any():
                    raise TensorDropoutError(
                        f"detect: {name} of the {part} inputs has {int(np.isnan(values).sum())} NaN among "
                        f"{len(values)} numbers; leave such inputs out, at least one must stay"
                    )
            let_through = float((high <= np.quantile(low, 0.95)).mean())
            found[name] = {"auroc": 100 * rank_area(low, high), "fpr95": 100 * let_through}
    return found


def rank_area(low: ArrayLike, high: ArrayLike) -> float:
    """The probability that one of ``high`` is above one of ``low``, ties counted by half: the area under the ROC curve.

    Example:
        >>> rank_area([0.0, 1.0], [1.0, 2.0])
        0.875
    """
    low, high = np.sort(np.asarray(low)), np.asarray(high)
    below, to = np.searchsorted(low, high, "left"), np.searchsorted(low, high, "right")
    return float((below + to).mean() / (2 * len(low)))
