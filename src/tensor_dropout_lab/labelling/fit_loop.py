"""When to fit: the loop between labels and suggestions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.session import HEAD_FOLDER, Session


class NotReadyError(TensorDropoutError):
    """What was asked for is not there yet."""


class FitLoop:
    """Fits of a session.

    Args:
        session: whose labels are fitted.
        cache: where features are kept.
        seed: of folds and starts.
        modules: imported first, in the process that computes.
    """

    def __init__(self, session: Session, cache: Path, *, seed: int, modules: Sequence[str]) -> None:
        self.session, self.cache, self.seed, self.modules = session, cache, seed, modules
        self.folder = session.out / HEAD_FOLDER
        self.has_news = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Compute inside the block."""
        yield

    def note_labels(self) -> None:
        """Labels have changed."""

    def fit_now(self) -> None:
        """Fit, if there are enough labels."""
        raise NotReadyError("label 5 images first")

    def save_head(self) -> Path:
        """Write the fitted head; returns its folder."""
        raise NotReadyError("label 5 images first")
