"""Estimators that choose θ, α, rank and format by cross-validation, with ridge among the candidates."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.calibration.classification import fit_temperature
from tensor_dropout.fitting.fit import MAX_ITER, TOL
from tensor_dropout.sklearn.base import all_or_nothing
from tensor_dropout.sklearn.candidates import Candidate
from tensor_dropout.sklearn.classifier import ClassificationMixin, one_hot
from tensor_dropout.sklearn.held_out import leverage_of, mean_count
from tensor_dropout.sklearn.inputs import check_groups
from tensor_dropout.sklearn.regressor import RegressionMixin
from tensor_dropout.sklearn.scoring import rows_of_other_folds, skills, weighted_mean
from tensor_dropout.sklearn.search_mixin import SearchMixin


class TensorRegressorCV(RegressionMixin, SearchMixin):
    """Tensor regression whose θ, α, rank and format are chosen by (grouped) cross-validation.

    Flattened ridge and pooled ridge are among the candidates: ``cv_results_`` says which won. The folds' held-out
    residuals calibrate ``return_std`` and ``predict_interval``.

    Args:
        factorization: a format, or several.
        ranks: "auto", or the ranks to try.
        thetas: the keep probabilities to try.
        alphas: "auto", or the weights of the squared norms to try.
        cv: the number of folds, a splitter, or pairs of row numbers or masks. With ``groups`` no group is on both
            sides.
        modes: as in :class:`TensorRegressor`.
        law: as in :class:`TensorRegressor`.
        solver: as in :class:`TensorRegressor`.
        max_iter: as in :class:`TensorRegressor`.
        tol: as in :class:`TensorRegressor`.
        batch_size: as in :class:`TensorRegressor`; in batches, flattened ridge is no candidate, and n_jobs is 1.
        channel_axis: as in :class:`TensorRegressor`.
        n_jobs: the number of processes on a CPU, one thread in each; None runs in this one, with torch's threads. On a
            GPU all fits are one program.
        random_state: of the folds and of the starts.
        device: where to fit.
        verbose: show a progress bar on a terminal.

    Attributes:
        cv_results_: a row for each candidate, as scikit-learn's searches have it. The score is 1 − the held-out error
            over that of the mean target, where the error of a sample is the root of its mean squared error over the
            outputs, each over its std, and samples are averaged: few outliers do not decide, as they would with R².
        best_params_, best_score_, best_index_: the row that won.
        held_out_: by method ("cp", "flattened ridge", ..) its predictions for samples it had not seen, shaped like y.
            The settings for each fold are those that were best in the other folds, so that errors of these predictions
            are not made small by the choice.
        held_out_fold_: (n,), the fold in which a sample was held out; -1 if in none. Of several folds it is the last,
            and ``held_out_`` the mean of their predictions; ``calibration_`` has an error for each of them.
        layer_, coef_, method_, ..: as in :class:`TensorRegressor`, fitted on all samples.

    Example:
        >>> import numpy as np
        >>> from tensor_dropout.sklearn import TensorRegressorCV
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(60, 6, 4, 4)).astype("float32")
        >>> y = np.stack([X[:, 0].mean(2) @ np.arange(4), X[:, 1].mean(1) @ np.arange(4)], axis=1)
        >>> model = TensorRegressorCV(thetas=(1, 0.7), alphas=(1e-3,), cv=3, random_state=0).fit(X, y)
        >>> model.best_params_["method"], len(model.cv_results_["params"])
        ('cp', 44)
    """

    _task = "regression"

    def __init__(
        self,
        factorization: Any = "cp",
        *,
        ranks: Any = "auto",
        thetas: Any = (1.0, 0.7, 0.5),
        alphas: Any = "auto",
        cv: Any = 5,
        modes: Any = "auto",
        law: Any = "bernoulli",
        solver: str = "auto",
        max_iter: int = MAX_ITER,
        tol: float = TOL,
        batch_size: int | None = None,
        channel_axis: int = 1,
        n_jobs: int | None = None,
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ) -> None:
        self.factorization = factorization
        self.ranks = ranks
        self.thetas = thetas
        self.alphas = alphas
        self.cv = cv
        self.modes = modes
        self.law = law
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.channel_axis = channel_axis
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> TensorRegressorCV:
        """Search, then fit the best on everything.

        Args:
            X: (n, *input_shape), NumPy or torch.
            y: (n,), (n, k) or (n, *output_shape); NaN for a coordinate that is missing (ridge is then left out).
            sample_weight: (n,), not negative.
            groups: (n,), what must not be split, such as the person on a picture.
        """
        with all_or_nothing(self):
            self._check_search()
            x = self._features(X, fitting=True)
            targets, weights = self._checked_targets(y, x, sample_weight)
            seed = self._seed()
            splits = self._splits(X, self._shape_like_y(targets).cpu().numpy(), weights, groups)
            candidates = self._search(x, targets, weights, splits, seed)
            scores = skills(targets, candidates, splits, weights)
            chosen = self._finish(candidates, scores, x, targets, weights, seed)
            self._keep_held_out(
                candidates, scores, splits, len(x), lambda each, fold: self._as_predictions(each.held_out[fold][0])
            )
            rows = np.concatenate([test for _, test in splits])
            means, leverages = zip(*(chosen.held_out[fold] for fold in range(len(splits))), strict=True)
            h = None if leverages[0] is None else torch.cat(leverages)
            layer = self._regression()
            count = mean_count([train for train, _ in splits], weights)
            leverage = None
            if layer is not None:
                leverage = leverage_of(layer, x, targets, weights, float(self.alpha_ or 0), count)
            groups = np.arange(len(x)) if groups is None else check_groups(type(self).__name__, groups, len(x))
            self.cross_fits_ = None
            self._keep_calibration(
                targets[rows] - torch.cat(means), h, groups[rows], None if weights is None else weights[rows], leverage
            )
        return self

    def _as_predictions(self, outputs: Tensor) -> np.ndarray:
        predictions: np.ndarray = self._shape_like_y(outputs).cpu().numpy()
        return predictions


class TensorClassifierCV(ClassificationMixin, SearchMixin):
    """A classifier whose θ, α, rank and format are chosen by (stratified, grouped) cross-validation.

    Ridge on one-hot classes, flattened and pooled, is among the candidates. The score is one minus the Brier score,
    which judges probabilities; those of ridge are its outputs clipped to [0, 1], so that they sum to 1.

    Args:
        factorization: a format, or several.
        ranks: as in :class:`TensorRegressorCV`.
        thetas: the keep probabilities to try.
        alphas: "auto", or the weights of the squared norms to try.
        cv: the number of folds, a splitter, or pairs of row numbers or masks.
        modes: as in :class:`TensorClassifier`.
        law: as in :class:`TensorClassifier`.
        solver: as in :class:`TensorClassifier`.
        max_iter: as in :class:`TensorClassifier`.
        tol: as in :class:`TensorClassifier`.
        batch_size: as in :class:`TensorClassifier`; in batches, flattened ridge is no candidate, and n_jobs is 1.
        channel_axis: as in :class:`TensorClassifier`.
        class_weight: as in :class:`TensorClassifier`.
        n_jobs: the number of processes on a CPU.
        random_state: of the folds and of the starts.
        device: where to fit.
        verbose: show a progress bar on a terminal.

    Attributes:
        cv_results_: a row for each candidate; scores are one minus the Brier score of probabilities at temperature 1.
        best_params_, best_score_, best_index_: the row that won.
        held_out_: as in :class:`TensorRegressorCV`: probabilities, (n, classes), at a temperature that the other folds'
            held-out samples gave, as those of ``predict_proba`` are at that of all folds; of a single fold at 1.
        held_out_fold_: as in :class:`TensorRegressorCV`.
        calibration_: as in :class:`TensorClassifier`, from the folds.
    """

    _task = "classification"

    def __init__(
        self,
        factorization: Any = "cp",
        *,
        ranks: Any = "auto",
        thetas: Any = (1.0, 0.7, 0.5),
        alphas: Any = "auto",
        cv: Any = 5,
        modes: Any = "auto",
        law: Any = "bernoulli",
        solver: str = "auto",
        max_iter: int = MAX_ITER,
        tol: float = TOL,
        batch_size: int | None = None,
        channel_axis: int = 1,
        class_weight: Any = None,
        n_jobs: int | None = None,
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ) -> None:
        self.factorization = factorization
        self.ranks = ranks
        self.thetas = thetas
        self.alphas = alphas
        self.cv = cv
        self.modes = modes
        self.law = law
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.channel_axis = channel_axis
        self.class_weight = class_weight
        self.n_jobs = n_jobs
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> TensorClassifierCV:
        """Search, then fit the best on everything.

        Args:
            X: (n, *input_shape), NumPy or torch.
            y: (n,), class numbers or names.
            sample_weight: (n,), not negative.
            groups: (n,), what must not be split.
        """
        with all_or_nothing(self):
            self._check_search()
            x = self._features(X, fitting=True)
            numbers = self._checked_classes(y, len(x))
            weights = self._weights(sample_weight, numbers, x)
            seed = self._seed()
            splits = self._splits(X, self.classes_[numbers], weights, groups)
            targets = one_hot(numbers, len(self.classes_), x)
            candidates = self._search(x, targets, weights, splits, seed)
            scores = np.array(
                [
                    [self._brier(targets, each, fold, test, weights) for fold, (_, test) in enumerate(splits)]
                    for each in candidates
                ]
            )
            chosen = self._finish(candidates, scores, x, targets, weights, seed)
            self._keep_held_out(
                candidates,
                scores,
                splits,
                len(x),
                lambda each, fold: self._temper_fold(each, fold, splits, numbers, weights),
            )
            rows = np.concatenate([test for _, test in splits])
            outputs = torch.cat([chosen.held_out[fold][0] for fold in range(len(splits))])
            groups = np.arange(len(x)) if groups is None else check_groups(type(self).__name__, groups, len(x))
            own = None if weights is None else weights[rows]
            self._keep_calibration(self._logits(outputs, chosen.method), numbers[rows], groups[rows], own)
        return self

    def _temper_fold(
        self,
        candidate: Candidate,
        fold: int,
        splits: list[tuple[np.ndarray, np.ndarray]],
        numbers: np.ndarray,
        weights: Tensor | None,
    ) -> np.ndarray:
        """Probabilities of the samples that a fold held out, at the temperature of those that the others did."""
        logits = [self._logits(candidate.held_out[k][0], candidate.method) for k in range(len(splits))]
        others = rows_of_other_folds(splits, fold, weights)
        kept = torch.cat([logits[k][places] for k, places in others.items()] or [logits[fold][:0]]).double().cpu()
        right = np.concatenate([numbers[splits[k][1][places]] for k, places in others.items()] or [numbers[:0]])
        temperature = fit_temperature(kept, torch.from_numpy(right))
        probabilities: np.ndarray = (logits[fold] / temperature).softmax(-1).cpu().numpy()
        return probabilities

    def _brier(self, y: Tensor, candidate: Candidate, fold: int, test: np.ndarray, weights: Tensor | None) -> float:
        probabilities = self._probabilities(candidate.held_out[fold][0], candidate.method)
        errors = (probabilities - y[test]).square().sum(-1)
        score = float(1 - weighted_mean(errors, None if weights is None else weights[test]))
        return score if np.isfinite(score) else float("-inf")
