"""From maps and labels to suggestions: where points are, how sure that is, and which image to label next.

Two stages: a tensor regression on coarse maps of the whole image, then a look at finer maps around each point
(:mod:`tensor_dropout_lab.labelling.refinement`). What is said of errors comes from held-out folds alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.calibration.leverage import output_features
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn import TensorRegressor
from tensor_dropout_lab.labelling.choosing import expected_gain, find_doubtful, find_slips
from tensor_dropout_lab.labelling.cross_fit import (
    CrossFits,
    FittedLayer,
    Folds,
    Settings,
    cross_fit,
    fit_layer,
    split_folds,
    varies,
)
from tensor_dropout_lab.labelling.known_errors import KnownErrors, held_out_nothing, know_errors
from tensor_dropout_lab.labelling.map_store import MapStore
from tensor_dropout_lab.labelling.refinement import ROUNDS, Refinement, fit_refinement, mean_distance

FEWEST = 2
"""Labelled images that a fit needs, and each point in it."""
SEARCH_EVERY = 20
"""Labels between two looks at other settings."""
SEARCH_FOLDS = 2
WORTH = 0.02
"""Other settings are taken if the held-out error falls by this share."""
ALPHAS, THETAS = (0.25, 4.0), (0.3, 0.7)
"""What is tried: multiples of the weight of the norms, and keep probabilities."""
CHUNK = 128
"""Images that are predicted at once."""


@dataclass(frozen=True)
class Round:
    """What a fit says of all images; n images, P points.

    Attributes:
        points: (n, P, 2), suggested, fractions of width and height; NaN where an image has no maps, or a point has too
            few labels.
        ellipses: (n, P, 2, 2), M with ``dᵀ M⁻¹ d = 1``, which hold 90 %; NaN with fewer than nine groups.
        std: (n, P), root mean square of the std of x and y, in fractions of the longer side; NaN if not known.
        gain: (n,), what labelling it next would bring, larger first; -inf for labelled ones and those without maps.
        doubtful: (n,), predicted, and less sure than others.
        suspect: (n,), labelled, and far from its held-out prediction.
        far: (n, P), how far the labels are from it that are the reason, in shares of the longer side; 0 for all others.
        error_pixels: mean distance of held-out predictions, in pixels of the original pictures; NaN without any.
        error_percent: the same in % of the longer side.
        settings: theta, alpha, rank, refined (rounds of the second stage), pool (the grid that the first stage sees).
        seconds: of the fit.
        estimator: the first stage, fitted on all labels; its outputs are x and y of the points of ``fitted``.
        fitted: (P,), which points have enough labels.
    """

    points: np.ndarray
    ellipses: np.ndarray
    std: np.ndarray
    gain: np.ndarray
    doubtful: np.ndarray
    suspect: np.ndarray
    far: np.ndarray
    error_pixels: float
    error_percent: float
    settings: dict[str, Any]
    seconds: float
    estimator: TensorRegressor
    fitted: np.ndarray


@dataclass(frozen=True)
class Labels:
    """What a fit sees: the labelled images that have maps, and the points with enough labels.

    Attributes:
        rows: (m,), numbers of the images.
        x: (m, C, H, W), what the first stage sees of them.
        truth: (m, Q, 2), fractions; NaN where unknown.
        folds: (m,).
        groups: (m,), numbers.
        fitted: (P,), which points.
    """

    rows: np.ndarray
    x: Tensor
    truth: Tensor
    folds: np.ndarray
    groups: Tensor
    fitted: np.ndarray


class Learner:
    """Learns where points are, from few labels; no process, no file.

    Args:
        sizes: (n, 2), width and height of all images.
        groups: of all images, such as the specimen; None: each image is its own.
        seed: of all that is random.
        rounds: how many rounds of the second stage at most; 0 for none.
        search: whether other settings are tried now and then.
        first_stage: what fits the first stage; the benchmark puts ridge here.
    """

    def __init__(
        self,
        sizes: np.ndarray,
        groups: Sequence[str] | None = None,
        *,
        seed: int = 0,
        rounds: int = ROUNDS,
        search: bool = True,
        first_stage: Callable[..., CrossFits] = cross_fit,
    ) -> None:
        self.sizes = np.asarray(sizes, dtype=np.float64)
        n = len(self.sizes)
        if self.sizes.shape != (n, 2) or (groups is not None and len(groups) != n):
            raise TensorDropoutError(
                f"Learner: sizes are (n, 2) and groups (n,), got {self.sizes.shape} and "
                f"{'None' if groups is None else len(groups)}"
            )
        self.seed, self.rounds, self.search, self.first_stage = seed, rounds, search, first_stage
        self.maps = MapStore(n, seed)
        self.settings = Settings()
        self._groups = np.arange(n) if groups is None else np.unique(np.asarray(groups), return_inverse=True)[1]
        self._folds = Folds(self._groups.tolist())
        self._searched, self._searches = 0, 0

    def set_maps(self, rows: Sequence[int], maps: np.ndarray, fine: np.ndarray | None = None) -> None:
        """Maps of some images; may come in parts.

        Args:
            rows: which images.
            maps: (len(rows), C, H, W), of a middle layer, such as 112×14×14.
            fine: (len(rows), C', H', W'), of an early layer, such as 24×56×56. None: the second stage looks at ``maps``
                alone. All parts have them, or none.
        """
        self.maps.add(np.asarray(rows, dtype=int), maps, fine)

    def fit(self, targets: np.ndarray) -> Round:
        """Fit the labels and predict all images.

        Args:
            targets: (n, P, 2), fractions of width and height; NaN where open or absent. Images with any number count.

        Raises:
            TensorDropoutError: if there are too few labels.
        """
        began = time.perf_counter()
        targets = np.asarray(targets, dtype=np.float64)
        labels = self._labels(targets)
        known = self._search(labels)
        fits = self.first_stage(labels.x, labels.truth.flatten(1), labels.folds, self.settings, self.seed, known)
        refinement = self._refine(labels, fits)
        calibration = know_errors(labels.truth, labels.groups, fits, refinement.held)
        said = self._say_all(labels, fits, refinement, calibration, targets)
        errors = self._in_pixels(refinement.held - labels.truth, labels.rows)  # (m, Q)
        shares = errors / self.sizes[labels.rows].max(axis=1, keepdims=True)
        far = np.zeros(targets.shape[:2])
        far[np.ix_(labels.rows, np.flatnonzero(labels.fitted))] = np.where(find_slips(shares), shares, 0.0)
        suspect = np.asarray((far > 0).any(axis=1))
        return Round(
            **said,
            suspect=suspect,
            far=far,
            error_pixels=_mean(errors),
            error_percent=100 * _mean(shares),
            settings=self._describe(fits, refinement),
            seconds=time.perf_counter() - began,
            estimator=self._estimator(fits, labels),
            fitted=labels.fitted,
        )

    # Steps.

    def _labels(self, targets: np.ndarray) -> Labels:
        n = len(self.sizes)
        if targets.ndim != 3 or targets.shape[0] != n or targets.shape[2] != 2:
            raise TensorDropoutError(f"Learner.fit: targets are ({n}, points, 2), got {targets.shape}")
        known = ~np.isnan(targets).any(axis=2)  # (n, P)
        enough = known & self.maps.known[:, None]
        fitted = enough.sum(axis=0) >= FEWEST
        rows = np.flatnonzero(enough[:, fitted].any(axis=1))
        truth = torch.from_numpy(np.where(known[..., None], targets, np.nan)[rows][:, fitted]).float()
        if len(rows) < FEWEST or not bool(varies(truth.flatten(1)).any()):
            raise TensorDropoutError(
                f"Learner.fit: {FEWEST} labelled images with features, whose points differ, are needed; there are "
                f"{int(enough.any(axis=1).sum())}; label more, or wait for the features"
            )
        self.maps.settle()
        folds, groups = self._folds.assign(rows), torch.from_numpy(self._groups[rows])
        return Labels(rows, self.maps.take(rows), truth, folds, groups, fitted)

    def _search(self, labels: Labels) -> list[FittedLayer]:
        """Now and then, try other settings on two of the folds: the weight of the norms, next time θ.

        Returns:
            The fits of these folds at the settings that are taken; none where nothing was tried.
        """
        splits = split_folds(labels.truth.flatten(1), labels.folds)[:SEARCH_FOLDS]
        due = self.search and len(labels.rows) >= self._searched + SEARCH_EVERY
        if not due or len(splits) < SEARCH_FOLDS:
            return []
        self._searched, self._searches = len(labels.rows), self._searches + 1
        now = self.settings
        others = [replace(now, alpha=now.alpha * share) for share in ALPHAS]
        if self._searches % 2 == 0:
            others = [replace(now, theta=theta) for theta in {0.5, *THETAS} if theta != now.theta]
        tried = {settings: self._try(labels, splits, settings) for settings in (now, *others)}
        best = min(tried, key=lambda settings: tried[settings][0])
        if tried[best][0] < (1 - WORTH) * tried[now][0]:
            self.settings = best
        return tried[self.settings][1]

    def _try(
        self, labels: Labels, splits: list[tuple[Tensor, Tensor]], settings: Settings
    ) -> tuple[float, list[FittedLayer]]:
        """The held-out error of these settings, and the fits."""
        errors, fits = [], []
        for train, test in splits:
            fits.append(fit_layer(labels.x[train], labels.truth[train].flatten(1), settings, self.seed))
            with torch.no_grad():
                predicted = fits[-1][0](labels.x[test]).view_as(labels.truth[test])
            errors.append(mean_distance(predicted, labels.truth[test]))
        return float(np.mean(errors)), fits

    def _refine(self, labels: Labels, fits: CrossFits) -> Refinement:
        held = fits.held.view_as(labels.truth)
        there = np.flatnonzero(~held.isnan().any(-1).any(-1).numpy())
        if self.rounds == 0 or len(there) == 0:
            return Refinement((), held)
        found = fit_refinement(
            self.maps.read,
            labels.rows[there],
            labels.truth[there],
            held[there],
            labels.folds[there],
            most=self.rounds,
            seed=self.seed,
        )
        refined = held.clone()
        refined[there] = found.held
        return Refinement(found.rounds, refined)

    @torch.no_grad()
    def _say_all(
        self,
        labels: Labels,
        fits: CrossFits,
        refinement: Refinement,
        calibration: KnownErrors | None,
        targets: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """What a round says of all images, by name."""
        n, P = targets.shape[:2]
        rows, fitted = self.maps.rows, labels.fitted
        parts = [self._predict(fits, refinement, part) for part in np.split(rows, range(CHUNK, len(rows), CHUNK))]
        points, z = (torch.cat(part) for part in zip(*parts, strict=True))
        shapes: dict[str, tuple[int, ...]] = {"points": (2,), "ellipses": (2, 2), "std": ()}
        said = {name: np.full((n, P, *shape), np.nan) for name, shape in shapes.items()}
        place = np.ix_(rows, np.flatnonzero(fitted))
        said["points"][place] = points.numpy()
        labelled = (~np.isnan(targets)).any(axis=(1, 2))
        said["gain"] = np.full(n, -np.inf)
        said["gain"][rows] = expected_gain(z, ~labelled[rows]) if z.shape[1] else np.where(labelled[rows], -np.inf, 0.0)
        usual = np.nan
        if calibration is not None:
            known = calibration.points
            h = z.square().sum(1, keepdim=True) if fits.h is not None else None
            std = calibration.std(h, len(rows))
            place = np.ix_(rows, np.flatnonzero(fitted)[known])
            said["std"][place] = self._in_sides(std, rows)
            said["ellipses"][place] = calibration.ellipses(points[:, known], std)
            held_std = calibration.std(None if fits.h is None else fits.h[:, :1], len(labels.rows))
            usual = float(self._in_sides(held_std, labels.rows)[~held_out_nothing(fits)].mean())
        said["doubtful"] = find_doubtful(said["std"][:, fitted], usual) & ~labelled
        return said

    def _predict(self, fits: CrossFits, refinement: Refinement, rows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Points (m, Q, 2), and features (m, K) whose squared length is the leverage; K is 0 where there is none."""
        x = self.maps.take(rows)
        points = refinement.refine(self.maps.read, rows, fits.module(x).unflatten(1, (-1, 2)))
        if fits.leverage is None:
            return points, torch.zeros(len(rows), 0)
        assert isinstance(fits.module, TensorRegression)
        z, _ = output_features(fits.module, x)
        return points, (z[:, 0] - fits.leverage.center[0]) @ fits.leverage.root

    def _in_pixels(self, errors: Tensor, rows: np.ndarray) -> np.ndarray:
        """Lengths (m, Q) of errors (m, Q, 2) that are fractions."""
        lengths: np.ndarray = np.linalg.norm(errors.numpy() * self.sizes[rows][:, None], axis=-1)
        return lengths

    def _in_sides(self, std: Tensor, rows: np.ndarray) -> np.ndarray:
        """(m, Q) from the std of all coordinates (m, 2Q), in shares of the longer side."""
        sizes = self.sizes[rows]
        scaled = std.unflatten(1, (-1, 2)).numpy() * (sizes / sizes.max(axis=1, keepdims=True))[:, None]
        mean: np.ndarray = np.sqrt(np.square(scaled).mean(axis=-1))
        return mean

    def _describe(self, fits: CrossFits, refinement: Refinement) -> dict[str, Any]:
        assert self.maps.first is not None
        rank = fits.module.rank if isinstance(fits.module, TensorRegression) else None
        pool = list(self.maps.first.shape[2:])
        used = {"theta": self.settings.theta, "alpha": fits.alpha, "rank": rank}
        return {**used, "refined": len(refinement.rounds), "pool": pool}

    def _estimator(self, fits: CrossFits, labels: Labels) -> TensorRegressor:
        """The first stage by itself, with its own held-out errors."""
        settings: dict[str, Any] = {"theta": self.settings.theta, "alpha": fits.alpha, "calibrate": 5}
        settings["random_state"] = self.seed
        if not isinstance(fits.module, TensorRegression):
            return TensorRegressor(**settings)
        estimator = TensorRegressor.from_layer(fits.module, **settings)
        estimator.alpha_ = fits.alpha
        known = know_errors(labels.truth, labels.groups, fits, fits.held.view_as(labels.truth))
        if known is not None and known.points.all():
            estimator.calibration_ = known.calibration
        return estimator


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")
