"""Two evaluations of the same examples, part by part, from stored outcomes alone."""

from __future__ import annotations

from typing import Any

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.measures import compare, score_images
from tensor_dropout.robustness.outcomes import Outcomes


def compare_outcomes(first: Outcomes, second: Outcomes) -> list[dict[str, Any]]:
    """The difference, its interval and its p-value for every part that both have.

    Args:
        first: outcomes of one network.
        second: of another, on the same examples.

    Raises:
        TensorDropoutError: if the examples differ, or no part is shared.
    """
    if not np.array_equal(first.examples["name"], second.examples["name"]):
        raise TensorDropoutError(
            "compare: the two evaluations are not of the same examples; evaluate both with the same --images, --split "
            "and --seed"
        )
    shared = [name for name in first.names() if name in second and name not in ("gradients", "validation")]
    if not shared:
        raise TensorDropoutError("compare: the two evaluations share no part; evaluate both with the same options")
    rows = []
    for name in shared:
        a, b = first[name], second[name]
        found = compare(a, b)
        rows.append(
            {"part": name, "a": float(score_images(a).mean()), "b": float(score_images(b).mean()), **found._asdict()}
        )
    return rows
