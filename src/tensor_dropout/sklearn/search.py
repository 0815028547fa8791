"""Estimators that choose θ, α, rank and format by cross-validation, with ridge among the candidates."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import numpy as np
import torch
from joblib import Parallel, delayed, effective_n_jobs
from scipy.stats import rankdata
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.fit import MAX_ITER, TOL
from tensor_dropout.fitting.objective import Task
from tensor_dropout.progress import Advance, show_progress
from tensor_dropout.sklearn.base import TensorEstimator, all_or_nothing
from tensor_dropout.sklearn.candidates import (
    RIDGES,
    Candidate,
    Search,
    fit_fold,
    fit_ridge,
    grouped,
    masks_ranks,
    search_in_one_program,
    search_ridges,
)
from tensor_dropout.sklearn.classifier import ClassificationMixin, one_hot
from tensor_dropout.sklearn.defaults import auto_alpha, build_layer, check_number, is_auto, is_matrix_of_rank_one
from tensor_dropout.sklearn.held_out import leverage_of, mean_count
from tensor_dropout.sklearn.inputs import check_classes, check_counts, check_folds, check_groups, check_pair
from tensor_dropout.sklearn.regressor import RegressionMixin
from tensor_dropout.sklearn.scoring import choose_by_other_folds, skills, weighted_mean

ALPHAS = (0.25, 1.0, 4.0)
"""``alphas="auto"``: multiples of what a single fit takes."""


class SearchMixin(TensorEstimator):
    """The search of both classes."""

    _task: ClassVar[Task]

    def _check_search(self) -> None:
        self._check_settings()
        name = type(self).__name__
        for theta in self._listed("thetas", self.thetas):
            check_number(name, "each of thetas", theta, 1e-6, 1, kind="float")
        for alpha in self._alphas():
            check_number(name, "each of alphas", alpha, 0, float("inf"), kind="float")
        for one in self._factorizations():
            if not isinstance(one, str):
                raise TensorDropoutError(f"{name}: factorization is a name, or several, got {self.factorization!r}")

    def _listed(self, setting: str, values: Any) -> list[Any]:
        if isinstance(values, str) or not np.iterable(values) or len(list(values)) == 0:
            raise TensorDropoutError(
                f"{type(self).__name__}: {setting} is a sequence of at least one value, got {values!r}"
            )
        return values.tolist() if isinstance(values, np.ndarray) else list(values)

    def _alphas(self, usual: float = 1.0) -> list[float]:
        """The weights to try; ``usual`` is that of a single fit."""
        return [share * usual for share in ALPHAS] if is_auto(self.alphas) else self._listed("alphas", self.alphas)

    def _factorizations(self) -> list[str]:
        one = isinstance(self.factorization, str)
        return [self.factorization] if one else self._listed("factorization", self.factorization)

    def _ranks(self) -> list[Any]:
        return ["auto"] if is_auto(self.ranks) else self._listed("ranks", self.ranks)

    def _splits(
        self, X: Any, y: np.ndarray, weights: Tensor | None, groups: Any
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Row numbers to fit on and to judge on, one pair a fold.

        Args:
            X: the features as they were given.
            y: the targets in their shape, or the classes.
            weights: of the samples.
            groups: of the samples, or None.
        """
        name, n = type(self).__name__, len(y)
        groups = check_groups(name, groups, n)
        splitter = self.cv
        usable = isinstance(splitter, int | np.integer) or np.iterable(splitter) or hasattr(splitter, "split")
        if isinstance(splitter, bool | str) or not usable:
            raise TensorDropoutError(f"{name}: cv is a number of folds or a splitter, got {splitter!r}")
        if isinstance(splitter, int | np.integer):
            check_number(name, "cv", splitter, 2, float("inf"), kind="int")
            check_folds(name, "cv", int(splitter), n, groups)
            if self._task == "classification":
                check_classes(name, "cv", int(splitter), y, groups)
                kind = StratifiedKFold if groups is None else StratifiedGroupKFold
            else:
                kind = KFold if groups is None else GroupKFold
            splitter = kind(int(splitter), shuffle=True, random_state=self._seed() % 2**31)
        if hasattr(splitter, "split"):
            splitter = splitter.split(X, y, groups)
        splits = [check_pair(name, fold, pair, n) for fold, pair in enumerate(splitter)]
        if not splits or any(len(train) < 2 or len(test) == 0 for train, test in splits):
            raise TensorDropoutError(f"{name}: cv={self.cv!r} leaves a fold empty for {n} rows; lower cv")
        check_counts(name, "cv", weights, splits)
        return splits

    def _grid(
        self, input_shape: tuple[int, ...], output_shape: tuple[int, ...], usual_alpha: float
    ) -> list[dict[str, Any]]:
        """All tensor candidates, each once; none where there is no rank to choose."""
        if self._task == "regression" and is_matrix_of_rank_one(input_shape, output_shape):
            return []
        thetas = [float(theta) for theta in self._listed("thetas", self.thetas)]
        alphas = [float(alpha) for alpha in self._alphas(usual_alpha)]
        grid: dict[Any, dict[str, Any]] = {}
        for factorization, rank in product(self._factorizations(), self._ranks()):
            # θ = 1, and any other where no rank is masked, are one setting.
            masked = min(thetas) < 1 and masks_ranks(
                build_layer(
                    factorization, input_shape, output_shape, rank, min(thetas), self.modes, self.law,
                    where=type(self).__name__,
                )
            )  # fmt: skip
            for theta, alpha in product(thetas if masked else [1.0], alphas):
                params = {"method": factorization, "rank": rank, "theta": theta, "alpha": alpha}
                grid.setdefault(str(params), params)
        return list(grid.values())

    def _search(
        self, x: Tensor, y: Tensor, weights: Tensor | None, splits: list[tuple[np.ndarray, np.ndarray]], seed: int
    ) -> list[Candidate]:
        """Held-out predictions of every candidate."""
        eliminate, batch_size = self.solver == "auto", self._batch_size(x)
        shared = Search(self._task, seed, self.max_iter, self.tol, eliminate, self.modes, self.law, batch_size)
        grid = self._grid(tuple(x.shape[1:]), tuple(y.shape[1:]), auto_alpha(weights, len(x), self._task))
        candidates = [Candidate(params) for params in grid]
        with show_progress(type(self).__name__, len(grid) * len(splits), shown=bool(self.verbose)) as advance:
            if x.device.type == "cpu" or batch_size is not None:
                self._search_in_processes(candidates, x, y, weights, splits, shared, advance)
            else:
                search_in_one_program(candidates, x, y, weights, splits, shared, advance)
        if not bool(y.isnan().any()):
            candidates += search_ridges(x, y, weights, splits, batch_size)
        if not candidates:
            raise TensorDropoutError(
                f"{type(self).__name__}: a vector and a number leave ridge alone, which takes no missing targets; "
                "leave those rows out"
            )
        return candidates

    def _search_in_processes(
        self,
        candidates: list[Candidate],
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
        splits: list[tuple[np.ndarray, np.ndarray]],
        shared: Search,
        advance: Advance,
    ) -> None:
        """On a CPU: a task for each fold and each θ of a format; with several jobs, one thread in each process."""
        n_jobs = self.n_jobs if shared.batch_size is None else 1  # other processes would get a copy of the features
        alone = effective_n_jobs(n_jobs) == 1
        tasks = [(fold, group) for group in grouped(candidates) for fold in range(len(splits))]
        run = delayed(fit_fold)
        results = Parallel(n_jobs=n_jobs, return_as="generator")(
            run(x, y, weights, splits[fold], [candidates[k].params for k in group], shared, one_thread=not alone)
            for fold, group in tasks
        )
        for (fold, group), held_out in zip(tasks, results, strict=True):
            for k, (mean, h, seconds) in zip(group, held_out, strict=True):
                candidates[k].held_out[fold] = mean.to(y.dtype), h
                candidates[k].seconds.append(seconds)
            advance(len(group))

    def _finish(
        self,
        candidates: list[Candidate],
        scores: np.ndarray,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
        seed: int,
    ) -> Candidate:
        """Choose the best, fit it on everything, and set what is public; ``scores`` is (candidates, folds)."""
        mean = np.where(np.isfinite(scores).all(1), scores.mean(1), -np.inf)
        best = int(mean.argmax())
        chosen = candidates[best]
        self.cv_results_ = {
            "params": [candidate.params for candidate in candidates],
            "mean_test_score": mean,
            "std_test_score": scores.std(1),
            "rank_test_score": rankdata(-mean, method="min").astype(np.int32),
            "mean_fit_time": np.array([np.mean(candidate.seconds) for candidate in candidates]),
            "std_fit_time": np.array([np.std(candidate.seconds) for candidate in candidates]),
        }
        for key in ("method", "rank", "theta", "alpha"):
            self.cv_results_[f"param_{key}"] = np.array(
                [candidate.params.get(key) for candidate in candidates], dtype=object
            )
        self.cv_results_ |= {f"split{fold}_test_score": scores[:, fold] for fold in range(scores.shape[1])}
        self.best_index_, self.best_score_, self.best_params_ = best, float(mean[best]), dict(chosen.params)
        if chosen.method in RIDGES:
            module: nn.Module = fit_ridge(x, y, weights, chosen, self._batch_size(x))
            ended = None
        else:
            settings = {**chosen.params, "factorization": chosen.method}
            module, ended = self._fit_module(x, y, weights, settings, self._task, seed)
        self._keep(module, {**chosen.params, "factorization": chosen.method}, x)
        self._say_how_it_ended(ended)
        return chosen

    def _keep_held_out(
        self, candidates: list[Candidate], scores: np.ndarray, splits: list[tuple[np.ndarray, np.ndarray]], n: int
    ) -> None:
        """Set what every method predicted for samples it had not seen, and in which fold that was.

        Of a row that several folds held out that is the mean, and the last fold.
        """
        methods = [candidate.method for candidate in candidates]
        self.held_out_ = {}
        for method, chosen in choose_by_other_folds(methods, scores).items():
            total, times = np.zeros(()), np.zeros(n)
            for fold, (k, (_, test)) in enumerate(zip(chosen, splits, strict=True)):
                predicted = self._as_predictions(candidates[k].held_out[fold][0], method)
                total = np.zeros((n, *predicted.shape[1:]), predicted.dtype) if fold == 0 else total
                total[test] += predicted
                times[test] += 1
            times[times == 0] = np.nan
            self.held_out_[method] = total / times.astype(total.dtype).reshape(-1, *[1] * (total.ndim - 1))
        self.held_out_fold_ = np.full(n, -1)
        for fold, (_, test) in enumerate(splits):
            self.held_out_fold_[test] = fold

    def _as_predictions(self, outputs: Tensor, method: str) -> np.ndarray:
        """What a candidate gave, as the class predicts: shaped like y, or probabilities."""
        raise NotImplementedError

    def plot(self, path: Any = None) -> Any:
        """Draw the held-out error over θ and α, and over the rank, beside both ridges.

        Args:
            path: where to write a picture; None only returns the figure.

        Returns:
            The matplotlib figure.
        """
        from tensor_dropout.sklearn.picture import draw_search

        return draw_search(self, path)


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
            self._keep_held_out(candidates, scores, splits, len(x))
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

    def _as_predictions(self, outputs: Tensor, method: str) -> np.ndarray:
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
        cv_results_: a row for each candidate; scores are one minus the Brier score.
        best_params_, best_score_, best_index_: the row that won.
        held_out_: as in :class:`TensorRegressorCV`: probabilities, (n, classes).
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
            self._keep_held_out(candidates, scores, splits, len(x))
            rows = np.concatenate([test for _, test in splits])
            outputs = torch.cat([chosen.held_out[fold][0] for fold in range(len(splits))])
            groups = np.arange(len(x)) if groups is None else check_groups(type(self).__name__, groups, len(x))
            own = None if weights is None else weights[rows]
            self._keep_calibration(self._logits(outputs, chosen.method), numbers[rows], groups[rows], own)
        return self

    def _as_predictions(self, outputs: Tensor, method: str) -> np.ndarray:
        probabilities: np.ndarray = self._probabilities(outputs, method).cpu().numpy()
        return probabilities

    def _brier(self, y: Tensor, candidate: Candidate, fold: int, test: np.ndarray, weights: Tensor | None) -> float:
        probabilities = self._probabilities(candidate.held_out[fold][0], candidate.method)
        errors = (probabilities - y[test]).square().sum(-1)
        score = float(1 - weighted_mean(errors, None if weights is None else weights[test]))
        return score if np.isfinite(score) else float("-inf")
