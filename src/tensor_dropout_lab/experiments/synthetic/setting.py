"""The settings of a stage. Without torch: the report compares records with them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """One stage: a data set, an optimizer, and everything that decides its numbers."""

    format: str
    inputs: str
    optimizer: str
    epochs: int
    size: int = 25
    true_rank: int = 10
    rank: int = 15
    n_train: int = 5000
    n_test: int = 1000
    batch: int = 100
    thetas: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7, 0.6)
    mask_seeds: int = 3
    decay_every: int = 200
    rates: tuple[float, ...] = (0.001,)
    tune_epochs: int = 50
    points: int = 50
    seed: int = 0

    @property
    def variants(self) -> list[tuple[str, float]]:
        """(kind, θ) of each variant: the stochastic ones seed by seed, then exact, then printed."""
        kinds = ["stochastic"] * self.mask_seeds + ["exact", "printed"]
        return [(kind, theta) for kind in kinds for theta in self.thetas]

    @property
    def search_epochs(self) -> int:
        """Epochs of the search for a learning rate; none if there is one rate only."""
        return self.tune_epochs if len(self.rates) > 1 else 0

    @property
    def evaluated_epochs(self) -> list[int]:
        """Epochs after which the curves are measured: every one at first, then evenly."""
        step = max(1, self.epochs // self.points)
        return sorted({0, *range(1, min(10, self.epochs) + 1), *range(step, self.epochs + 1, step), self.epochs})
