"""The search that both estimators with a CV in their name share: its grid, its folds, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any, ClassVar

import numpy as np
from joblib import Parallel, delayed, effective_n_jobs
from scipy.stats import rankdata
from sklearn.model_selection import GroupKFold, KFold, StratifiedGroupKFold, StratifiedKFold
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.objective import Task
from tensor_dropout.progress import Advance, show_progress
from tensor_dropout.sklearn.base import TensorEstimator
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
from tensor_dropout.sklearn.defaults import auto_alpha, build_layer, check_number, is_auto, is_matrix_of_rank_one
from tensor_dropout.sklearn.inputs import check_classes, check_counts, check_folds, check_groups, check_pair
from tensor_dropout.sklearn.scoring import average_folds, choose_by_other_folds

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
        self,
        candidates: list[Candidate],
        scores: np.ndarray,
        splits: list[tuple[np.ndarray, np.ndarray]],
        n: int,
        predict: Callable[[Candidate, int], np.ndarray],
    ) -> None:
        """Set what every method predicted for samples it had not seen, and in which fold that was.

        Args:
            candidates: with their held-out outputs.
            scores: (candidates, folds).
            splits: of the folds.
            n: the number of samples.
            predict: what a candidate says of the samples that a fold held out, as the class predicts.
        """
        self.held_out_ = {
            method: average_folds([predict(candidates[k], fold) for fold, k in enumerate(chosen)], splits, n)
            for method, chosen in choose_by_other_folds([each.method for each in candidates], scores).items()
        }
        self.held_out_fold_ = np.full(n, -1)
        for fold, (_, test) in enumerate(splits):
            self.held_out_fold_[test] = fold

    def plot(self, path: Any = None) -> Any:
        """Draw the held-out error over θ and α, and over the rank, beside both ridges.

        Args:
            path: where to write a picture; None only returns the figure.

        Returns:
            The matplotlib figure.
        """
        from tensor_dropout.sklearn.picture import draw_search

        return draw_search(self, path)
