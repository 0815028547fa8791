"""Grey pictures of more than 8 bits, and the window of their numbers that is shown as black to white."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Window = tuple[float, float]
_SHARES = (0.5, 99.5)
_ENOUGH = 1_000_000
"""Of how many pixels the percentiles are taken."""
_TABLE = 1 << 17


@dataclass(frozen=True, eq=False)
class Greys:
    """The numbers of a grey picture.

    Attributes:
        numbers: (H, W), upright.
        bits: how many bits the file has for each.
        window: which numbers the file says are to be black and white; None if it says nothing.
        inverted: whether large numbers are dark, as in some X-rays.
    """

    numbers: np.ndarray
    bits: int
    window: Window | None = None
    inverted: bool = False

    def choose_window(self) -> Window:
        """The window of the file, else from 0.5 to 99.5 percent of the pixels."""
        if self.window is not None:
            return self.window
        every = max(1, self.numbers.size // _ENOUGH)
        low, high = (float(number) for number in np.percentile(self.numbers.ravel()[::every], _SHARES))
        return (low, high) if high > low else (low, low + 1)

    def show(self, window: Window | None = None) -> Image:
        """An 8-bit picture: what is at the low end of the window or below is black; at the high end or above white."""
        from PIL import Image

        pixels = self._scale(*(self.choose_window() if window is None else window))
        return Image.fromarray(255 - pixels if self.inverted else pixels)

    def _scale(self, low: float, high: float) -> np.ndarray:
        """(H, W) uint8."""
        if self.numbers.dtype.kind not in "iu":
            return _scale(self.numbers, low, high)
        least, most = int(self.numbers.min()), int(self.numbers.max())
        if most - least > _TABLE:
            return _scale(self.numbers, low, high)
        return _scale(np.arange(least, most + 1), low, high)[self.numbers - least]  # each number once: faster


def _scale(numbers: np.ndarray, low: float, high: float) -> np.ndarray:
    shares = (numbers.astype(np.float32) - np.float32(low)) / np.float32(max(high - low, 1e-6))
    return np.rint(255 * np.clip(shares, 0, 1)).astype(np.uint8)
