"""The simulated annotator, the second stage, and slips of the hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from labelling.data import SIDES, TOLERANCES, Images
from tensor_dropout.sklearn.ridge import ALPHAS, ridge_path
from tensor_dropout_lab.labelling.cross_fit import CrossFits, Settings, cross_fit, split_folds
from tensor_dropout_lab.labelling.learner import Learner
from tensor_dropout_lab.labelling.refinement import ROUNDS, mean_distance

SCHEDULE = (5, 10, 20, 30, 50, 80, 120, 200)
"""Labelled images after which the simulated tool fits; the tool itself fits more often."""
OURS, BY_GAIN, ALONE = "two stages", "two stages, by gain", "first stage alone"
RIDGE, RIDGE_ALONE = "ridge, two stages", "ridge alone"
METHODS = (OURS, BY_GAIN, ALONE, RIDGE, RIDGE_ALONE)
SLIPS = 5
"""Labels with a slip among those of a fit."""
MOVED = 0.1
"""A slip of one kind puts a point so far off, as a share of the side."""


class FirstStage:
    """Fits the first stage, and keeps what it found.

    Args:
        fit: as :func:`tensor_dropout_lab.labelling.cross_fit.cross_fit`.
    """

    def __init__(self, fit: Callable[..., CrossFits]) -> None:
        self.fit = fit
        self.last: CrossFits | None = None

    def __call__(self, *arguments: Any) -> CrossFits:
        self.last = self.fit(*arguments)
        return self.last

    @torch.no_grad()
    def predict(self, x: Tensor) -> np.ndarray:
        """(n, P, 2) by the last fit."""
        assert self.last is not None
        points: np.ndarray = self.last.module(x).unflatten(1, (-1, 2)).numpy()
        return points


def cross_fit_ridge(
    x: Tensor, y: Tensor, folds: np.ndarray, settings: Settings, seed: int, known: Any = ()
) -> CrossFits:
    """Ridge on the flattened maps, its weight chosen by the held-out error of the same folds."""
    splits = split_folds(y, folds)
    held = {alpha: torch.full_like(y, torch.nan) for alpha in ALPHAS}
    for train, test in splits:
        path = ridge_path(x[train], y[train], None, "flattened ridge")
        for alpha in ALPHAS:
            held[alpha][test] = path.predict(x[test], alpha).to(y)
    truth = y.unflatten(1, (-1, 2))
    best = min(ALPHAS, key=lambda alpha: mean_distance(held[alpha].view_as(truth), truth))
    module = ridge_path(x, y, None, "flattened ridge").module(best, tuple(y.shape[1:]))
    return CrossFits(module.eval(), best, held[best], None, None)


def make_learner(images: Images, name: str, method: str, seed: int) -> tuple[Learner, FirstStage]:
    """A learner that has all maps."""
    ridge = method in (RIDGE, RIDGE_ALONE)
    first = FirstStage(cross_fit_ridge if ridge else cross_fit)
    sizes = np.full((len(images.truth), 2), SIDES[name])
    rounds = 0 if method in (ALONE, RIDGE_ALONE) else ROUNDS
    learner = Learner(sizes, images.groups.tolist(), seed=seed, rounds=rounds, search=not ridge, first_stage=first)
    learner.set_maps(range(len(sizes)), images.coarse, images.fine)
    return learner, first


# The simulated annotator.


@dataclass(frozen=True)
class Annotated:
    """What an image took.

    Attributes:
        clicks: a click for each point placed or dragged, and one to accept all others.
        label: (P, 2), what is saved: accepted points stay where they were suggested.
    """

    clicks: int
    label: np.ndarray


def annotate(truth: np.ndarray, suggestion: np.ndarray, tolerance: float) -> Annotated:
    """The simulated annotator drags what is off by more than the tolerance, and accepts the rest with one click.

    Args:
        truth: (P, 2), where points are.
        suggestion: (P, 2), NaN where there is none.
        tolerance: in the units of both.
    """
    good = np.linalg.norm(suggestion - truth, axis=-1) <= tolerance
    return Annotated(int((~good).sum() + good.any()), np.where(good[:, None], suggestion, truth))


def run_loop(images: Images, name: str, method: str, seed: int, schedule: tuple[int, ...] = SCHEDULE) -> dict[str, Any]:
    """Label all images, in their order or by gain; one row of the record."""
    began = time.perf_counter()
    learner, _ = make_learner(images, name, method, seed)
    n, P = images.truth.shape[:2]
    labels, suggestions = np.full((2, n, P, 2), np.nan)
    gain, order, clicks, fits = np.zeros(n), [], [], []
    for count in range(n):
        if count in schedule:
            fitted = learner.fit(labels)
            suggestions, gain = fitted.points, fitted.gain
            fits.append([count, round(fitted.error_percent, 4), round(fitted.seconds, 2), fitted.settings["refined"]])
        open_ = np.setdiff1d(np.arange(n), order)
        image = int(open_[gain[open_].argmax()] if method == BY_GAIN else open_[0])
        done = annotate(images.truth[image], suggestions[image], TOLERANCES[name])
        labels[image] = done.label
        order.append(image)
        clicks.append(done.clicks)
    error = 100 * float(np.linalg.norm(labels - images.truth, axis=-1).mean())
    return {
        "clicks": sum(clicks), "by_hand": n * P, "per_image": clicks, "fits": fits, "label_error": error,
        "seconds": time.perf_counter() - began,
    }  # fmt: skip


# The second stage.


def run_stage(images: Images, n: int, name: str, method: str, seed: int) -> dict[str, Any]:
    """Errors on the images behind the first n, with and without the second stage, in % of the side."""
    learner, first = make_learner(images, name, method, seed)
    tested = np.arange(n, len(images.truth))
    tested = tested[~np.isin(images.groups[tested], images.groups[:n])]
    labels = np.full(images.truth.shape, np.nan)
    labels[:n] = images.truth[:n]
    fitted = learner.fit(labels)
    before = first.predict(learner.maps.take(tested))
    found: dict[str, Any] = {"tested": len(tested), "seconds": fitted.seconds, "rounds": fitted.settings["refined"]}
    found["held"] = fitted.error_percent
    for stage, points in (("first", before), ("second", fitted.points[tested])):
        found[stage] = measure(points, images.truth[tested], TOLERANCES[name])
    known = fitted.ellipses[tested]
    if not np.isnan(known).any():
        off = fitted.points[tested] - images.truth[tested]
        lengths = np.einsum("npi,npij,npj->np", off, np.linalg.inv(known), off)
        found["inside"] = 100 * float((lengths <= 1).mean())
    return found


def measure(points: np.ndarray, truth: np.ndarray, tolerance: float) -> dict[str, float]:
    """Mean and median distance in % of the side, and the share of points within the tolerance in %."""
    distance = np.linalg.norm(points - truth, axis=-1)
    return {
        "mean": 100 * float(distance.mean()), "median": 100 * float(np.median(distance)),
        "within": 100 * float((distance <= tolerance).mean()),
    }  # fmt: skip


# Slips.


def run_slips(images: Images, n: int, name: str, seed: int) -> dict[str, Any]:
    """How many simulated slips the held-out errors find, and how many good labels they suspect."""
    rng = np.random.default_rng([seed, 29])
    images = images.take(np.arange(n))
    labels, wrong = images.truth.copy(), rng.choice(n, SLIPS, replace=False)
    for number, image in enumerate(wrong):
        one, other = rng.choice(labels.shape[1], 2, replace=False)
        if number % 2:
            labels[image, [one, other]] = labels[image, [other, one]]
        else:
            angle = rng.uniform(0, 2 * np.pi)
            labels[image, one] += MOVED * np.array([np.cos(angle), np.sin(angle)])
    learner, _ = make_learner(images, name, OURS, seed)
    suspect = learner.fit(labels).suspect
    hit = np.isin(np.arange(n), wrong)
    return {"slips": SLIPS, "found": int(suspect[hit].sum()), "alarms": int(suspect[~hit].sum()), "good": n - SLIPS}
