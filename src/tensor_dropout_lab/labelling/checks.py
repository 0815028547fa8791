"""Which labels are shown as possible slips of the hand."""

from __future__ import annotations

import numpy as np

from tensor_dropout_lab.labelling.labels import Labels
from tensor_dropout_lab.labelling.messages import Suggestions

LEAST = 0.0125
"""What is shown is farther from its held-out prediction, in shares of the longer side. A picture has some 800 pixels on
the page, and the mark of a point about ten: nearer than this, label and prediction lie under one mark, and nobody could
say which is right. The learner's own rule counts in what is usual; where most labels are accepted suggestions, that is
so little that four times as much is nothing that a person could see."""


def list_checks(news: Suggestions | None, number: int, name: str, labels: Labels) -> list[int]:
    """The points of a picture whose labels the last fit doubted; none if they changed, or somebody kept them.

    Args:
        news: what the last fit said.
        number: of the picture.
        name: of the picture.
        labels: of all.
    """
    if news is None or labels.is_kept(name) or not (news.far[number] > LEAST).any():
        return []
    known = labels.of(name)
    if any(value.seq > news.seq for value in known.values()):
        return []
    return [point for point in np.flatnonzero(news.far[number] > LEAST).tolist() if point in known]
