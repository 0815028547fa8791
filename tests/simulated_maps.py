"""Maps with a bump of its own channel at each point, for tests of what learns from labels."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F


def simulate(n: int, seed: int = 0, n_points: int = 4, noise: float = 0.1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Coarse maps (n, C, 12, 12), fine maps (n, C, 24, 24) and points (n, P, 2) as fractions."""
    rng = np.random.default_rng(seed)
    base = np.array([[0.3, 0.3], [0.7, 0.3], [0.3, 0.7], [0.7, 0.7]])[:n_points]
    points = base + rng.normal(0, 0.05, (n, 1, 2)) + rng.normal(0, 0.03, (n, n_points, 2))
    fine = noise * rng.normal(size=(n, n_points + 2, 24, 24))
    cells = (np.arange(24) + 0.5) / 24
    for point in range(n_points):
        x, y = (np.exp(-(((cells - points[:, point, axis, None]) / 0.06) ** 2)) for axis in (0, 1))
        fine[:, point] += y[:, :, None] * x[:, None, :]
    coarse = F.avg_pool2d(torch.from_numpy(fine), 2).numpy()
    return coarse.astype(np.float16), fine.astype(np.float16), points
