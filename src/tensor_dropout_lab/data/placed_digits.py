"""Where is the digit? Real digits of scikit-learn at **simulated** places, among pieces of others.

The target is a position, and labels are made for nothing: the smallest problem on which heads that keep positions
differ from heads that average them away.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

SIDE, DIGIT, PIECE = 32, 8, 4
N_PIECES = 6


def place_digits(n: int, seed: int = 0, n_pieces: int = N_PIECES) -> tuple[np.ndarray, np.ndarray]:
    """Pictures with one whole digit and pieces of others, and where the whole one is.

    Args:
        n: how many.
        seed: of all that is drawn.
        n_pieces: how many pieces of others.

    Returns:
        images: (n, 1, 32, 32), from 0 to about 2.
        places: (n, 2), row and column of the upper left pixel, simulated.
    """
    from sklearn.datasets import load_digits

    digits, rng = load_digits().images.astype(np.float32) / 16, np.random.default_rng(seed)
    images = np.zeros((n, 1, SIDE, SIDE), dtype=np.float32)
    places = rng.integers(0, SIDE - DIGIT + 1, size=(n, 2))
    for image, (top, left) in zip(images[:, 0], places, strict=True):
        for _ in range(n_pieces):
            row, column = rng.integers(0, SIDE - PIECE + 1, size=2)
            a, b = rng.integers(0, DIGIT - PIECE + 1, size=2)
            piece = digits[rng.integers(len(digits))][a : a + PIECE, b : b + PIECE]
            image[row : row + PIECE, column : column + PIECE] += piece
        image[top : top + DIGIT, left : left + DIGIT] += digits[rng.integers(len(digits))]
    return images, places.astype(np.float32)


def build_network() -> nn.Sequential:
    """A small network with random weights, the same in every call: (n, 1, 32, 32) -> (n, 64, 8, 8)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
            nn.AvgPool2d(2),
        )  # fmt: skip


@torch.no_grad()
def make_maps(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Feature maps of such pictures from a small frozen network with random weights, and the places.

    Returns:
        maps: (n, 64, 8, 8).
        places: (n, 2), in pixels.

    Example:
        >>> maps, places = make_maps(5)
        >>> maps.shape, places.shape
        ((5, 64, 8, 8), (5, 2))
    """
    images, places = place_digits(n, seed)
    return build_network()(torch.from_numpy(images)).numpy(), places
