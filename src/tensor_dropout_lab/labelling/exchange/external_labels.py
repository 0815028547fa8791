"""Labels as a file of another program has them, and how that program counts coordinates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.inputs import name_some


@dataclass(frozen=True)
class Convention:
    """How a format counts coordinates.

    Ours are fractions of the width and height of the upright picture: 0 is the left edge of the first pixel, 1 the
    right edge of the last one; y runs down.

    Attributes:
        unit: fractions of width and height, or pixels.
        centres: whether whole numbers are the centres of pixels (the first centre is 0). Else they are their edges: the
            first centre is 0.5.
        from_bottom: whether y is counted from the lower edge, upwards.
    """

    unit: Literal["fractions", "pixels"]
    centres: bool = False
    from_bottom: bool = False

    def to_fractions(self, points: np.ndarray, sizes: np.ndarray | None) -> np.ndarray:
        """Points of this convention as ours.

        Args:
            points: (n, P, 2), NaN where missing.
            sizes: (n, 2) width and height of the pictures; fractions need none.
        """
        if self.unit == "fractions":
            return points
        if sizes is None:
            raise TensorDropoutError("labels in pixels need the sizes of their images; give sizes, (n, 2)")
        whole = np.asarray(sizes, dtype=np.float64)[:, None]  # (n, 1, 2)
        from_edge = points + 0.5 if self.centres else points.copy()
        if self.from_bottom:
            from_edge[..., 1] = whole[..., 1] - from_edge[..., 1]
        return from_edge / whole

    def from_fractions(self, points: np.ndarray, sizes: np.ndarray | None) -> np.ndarray:
        """Our points, (n, P, 2), in this convention: the inverse of :meth:`to_fractions`."""
        if self.unit == "fractions":
            return points
        if sizes is None:
            raise TensorDropoutError("labels in pixels need the sizes of their images; give sizes, (n, 2)")
        whole = np.asarray(sizes, dtype=np.float64)[:, None]
        from_edge = points * whole
        if self.from_bottom:
            from_edge[..., 1] = whole[..., 1] - from_edge[..., 1]
        return from_edge - 0.5 if self.centres else from_edge


FRACTIONS = Convention("fractions")


@dataclass(frozen=True, eq=False)
class ExternalLabels:
    """Who is where, in some images.

    Attributes:
        names: of the P points, in order; "1", "2", … where the format has none.
        files: (n) the images, as the file writes them; after :func:`match_labels` as the folder names them.
        points: (n, P, 2) float64, NaN where not there; in the units of ``convention``.
        absent: (n, P) bool: known not to be visible. A point that is neither there nor absent is open.
        sizes: (n, 2) width and height of the upright images, or None.
        groups: (n) the group of each image, or None.
        convention: how ``points`` are counted.
        named: False if ``names`` are only numbers.
        notes: sentences for the user: what was left out, and why.
        source: what to call the labels in messages: the path of the file.
    """

    names: tuple[str, ...]
    files: tuple[str, ...]
    points: np.ndarray
    absent: np.ndarray
    sizes: np.ndarray | None = None
    groups: tuple[str, ...] | None = None
    convention: Convention = FRACTIONS
    named: bool = True
    notes: tuple[str, ...] = ()
    source: str = "labels"

    def __post_init__(self) -> None:
        """Refuse what does not belong together."""
        count = (len(self.files), len(self.names))
        if self.points.shape != (*count, 2) or self.absent.shape != count:
            raise TensorDropoutError(
                f"{self.source}: {count[0]} images and {count[1]} points need points {(*count, 2)} and absent {count}; "
                f"got {self.points.shape} and {self.absent.shape}"
            )
        if self.sizes is not None and self.sizes.shape != (count[0], 2):
            raise TensorDropoutError(f"{self.source}: sizes are {(count[0], 2)}; got {self.sizes.shape}")
        if self.groups is not None and len(self.groups) != count[0]:
            raise TensorDropoutError(f"{self.source}: {count[0]} images, but {len(self.groups)} groups")
        for what, names in (("point", self.names), ("image", self.files)):
            twice = [name for name, times in Counter(names).items() if times > 1]
            if twice:
                raise TensorDropoutError(
                    f"{self.source}: the {what} {name_some(twice)} is there more than once; keep one of each name"
                )
        if np.isinf(self.points).any() or (np.isnan(self.points[..., 0]) != np.isnan(self.points[..., 1])).any():
            row = int((~np.isfinite(self.points)).any(axis=(1, 2)).argmax())
            raise TensorDropoutError(
                f"{self.source}: {self.files[row]} has a point with one coordinate, or an infinite one; a point "
                "has two "
                "finite ones, or none"
            )

    @property
    def there(self) -> np.ndarray:
        """(n, P) bool: which points have a place."""
        return ~np.isnan(self.points[..., 0])

    def take(self, rows: Sequence[int]) -> ExternalLabels:
        """These images only, in this order."""
        chosen = list(rows)
        return ExternalLabels(
            self.names,
            tuple(self.files[row] for row in chosen),
            self.points[chosen],
            self.absent[chosen],
            None if self.sizes is None else self.sizes[chosen],
            None if self.groups is None else tuple(self.groups[row] for row in chosen),
            self.convention,
            self.named,
            self.notes,
            self.source,
        )


def number_names(count: int) -> tuple[str, ...]:
    """Names for points that have none: "1", "2", …."""
    return tuple(str(number) for number in range(1, count + 1))


def find_absent(points: np.ndarray) -> np.ndarray:
    """(n, P): which points are absent in a format that only leaves them out, of points (n, P, 2).

    Whoever labels an image there leaves out what cannot be seen; in an image without any point nothing is known.
    """
    there = ~np.isnan(points[..., 0])
    return ~there & there.any(axis=1, keepdims=True)
