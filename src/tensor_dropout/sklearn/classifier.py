"""Tensor regression of the logits, as a classifier."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import ClassifierMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d
from torch import Tensor

from tensor_dropout.calibration.classification import ClassCalibration, calibrate_classes, shares_as_probabilities
from tensor_dropout.calibration.conformal import groups_needed
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.fit import MAX_ITER, TOL
from tensor_dropout.sklearn.base import TensorEstimator, all_or_nothing
from tensor_dropout.sklearn.held_out import calibration_folds, hold_out
from tensor_dropout.sklearn.inputs import (
    as_array,
    check_coverage,
    check_groups,
    check_labels,
    check_weights,
    refuse_sparse,
)


class ClassificationMixin(ClassifierMixin):
    """Prediction and targets of the classifiers."""

    classes_: np.ndarray
    calibration_: ClassCalibration | None

    def decision_function(self, X: Any) -> Any:
        """The mean logits, (n, classes); for two classes the difference, (n,)."""
        logits, _ = self._moments(X, variance=False)
        logits = logits[:, 1] - logits[:, 0] if len(self.classes_) == 2 else logits
        return self._like_input(logits, X)

    def predict_proba(self, X: Any) -> Any:
        """The softmax of the mean logits, at the temperature of the held-out folds where there are some: (n, classes).

        Where ridge won, its outputs are clipped and made to sum to 1 first, and their logarithms are the logits.
        """
        outputs, _ = self._moments(X, variance=False)
        return self._like_input(self._calibrated_logits(outputs).softmax(-1), X)

    def predict_set(self, X: Any, coverage: float = 0.9) -> Any:
        """Which classes are in a set that holds the right one, (n, classes).

        If new samples, or groups, are like those of the fit, about ``coverage`` of the sets hold the right class.

        Args:
            X: (n, *input_shape).
            coverage: in (0, 1).

        Raises:
            TensorDropoutError: if the estimator was fitted without held-out folds.
        """
        check_is_fitted(self, "layer_")
        name = type(self).__name__
        check_coverage(name, coverage)
        calibration = getattr(self, "calibration_", None)  # a file may be older than it
        if calibration is None:
            raise TensorDropoutError(
                f"{name}.predict_set: there are no held-out probabilities; fit with calibrate=5, or use "
                "TensorClassifierCV"
            )
        outputs, _ = self._moments(X, variance=False)
        sets, quantile = calibration.sets(self._logits(outputs, self.method_), float(coverage))
        if not bool(quantile.reached.all()):
            warnings.warn(
                f"{name}: {int(quantile.groups.min())} held-out samples are too few for coverage={coverage:g}, which "
                f"needs {groups_needed(coverage)}; the sets hold all classes",
                UserWarning,
                stacklevel=2,
            )
        return self._like_input(sets, X)

    def _calibrated_logits(self, outputs: Tensor) -> Tensor:
        logits = self._logits(outputs, self.method_)
        calibration = getattr(self, "calibration_", None)  # a file may be older than it
        return logits if calibration is None else logits / calibration.temperature

    @classmethod
    def _logits(cls, outputs: Tensor, method: str) -> Tensor:
        return cls._probabilities(outputs, method).log() if "ridge" in method else outputs

    def _keep_calibration(
        self, logits: Tensor, numbers: np.ndarray, groups: np.ndarray | None, weights: Tensor | None
    ) -> None:
        """From held-out logits (n, classes); rows of weight 0 do not count."""
        kept = np.arange(len(numbers)) if weights is None else np.flatnonzero((weights > 0).cpu().numpy())
        known = np.arange(len(numbers)) if groups is None else np.unique(groups, return_inverse=True)[1]
        target, belongs = torch.from_numpy(numbers[kept]), torch.from_numpy(known[kept])
        self.calibration_ = calibrate_classes(logits[torch.from_numpy(kept).to(logits.device)], target, belongs)

    @staticmethod
    def _probabilities(outputs: Tensor, method: str) -> Tensor:
        return shares_as_probabilities(outputs) if "ridge" in method else outputs.softmax(-1)

    def predict_log_proba(self, X: Any) -> Any:
        """The logarithm of :meth:`predict_proba`, finite where a probability is too small for a number."""
        outputs, _ = self._moments(X, variance=False)
        return self._like_input(self._calibrated_logits(outputs).log_softmax(-1), X)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each sample."""
        logits, _ = self._moments(X, variance=False)
        return self.classes_[logits.argmax(-1).cpu().numpy()]

    def _checked_classes(self, y: Any, n: int) -> np.ndarray:
        """Class numbers (n,); sets ``classes_``."""
        name = type(self).__name__
        if y is None:
            raise TensorDropoutError(f"{name} requires y to be passed, but the target y is None")
        refuse_sparse(name, y)
        values = column_or_1d(y.cpu().numpy() if isinstance(y, Tensor) else as_array(y, "y", name), warn=True)
        if len(values) != n:
            raise TensorDropoutError(
                f"{name}: Found input variables with inconsistent numbers of samples: X has {n} rows, y has "
                f"{len(values)}"
            )
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise TensorDropoutError(f"{name}: Input y contains NaN or infinity; leave those rows out of X and y")
        check_labels(name, "y", values)
        check_classification_targets(values)
        self.classes_, numbers = np.unique(values, return_inverse=True)
        if len(self.classes_) < 2:
            raise TensorDropoutError(
                f"{name}: needs samples of at least 2 classes in y, got one class only: {self.classes_[0]!r}"
            )
        self.output_shape_ = (len(self.classes_),)
        return numbers

    def _weights(self, sample_weight: Any, numbers: np.ndarray, x: Tensor) -> Tensor | None:
        """Those of the samples times those of their classes; None for none."""
        name = type(self).__name__
        weights = check_weights(name, sample_weight, x)
        if self.class_weight is not None:
            balance = torch.from_numpy(compute_sample_weight(self.class_weight, self.classes_[numbers])).to(x.device)
            weights = check_weights(name, balance if weights is None else weights * balance, x)
        counted = numbers if weights is None else numbers[(weights > 0).cpu().numpy()]
        if len(np.unique(counted)) < 2:
            raise TensorDropoutError(
                f"{name}: needs samples of at least 2 classes, but only those of class {self.classes_[counted[0]]!r} "
                "have a positive weight"
            )
        return weights


def one_hot(numbers: np.ndarray, classes: int, like: Tensor) -> Tensor:
    """Class probabilities (n, classes)."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.nn.functional.one_hot(torch.from_numpy(numbers), classes).to(like.device, dtype)


class TensorClassifier(ClassificationMixin, TensorEstimator):
    """Tensor regression of the logits, fitted on the second-order expected cross-entropy, without masks.

    See :class:`TensorRegressor` for the settings that they share.

    Args:
        factorization: the format.
        rank: "auto", or what the layer takes.
        theta: the keep probability θ.
        alpha: the weight of the squared norms of the factors; "auto" is 0.64 over the sum of the sample weights.
        modes: "auto", or what :class:`td.TensorDropout` takes.
        law: how masks are drawn.
        solver: "auto" or "lbfgs"; for classes they are the same.
        max_iter: the most iterations.
        tol: the fit ends where the loss falls by less than this share of itself in ten iterations.
        batch_size: how many samples are held in working precision at once. The features are then read anew in each
            iteration, for example from a memory-mapped file larger than memory; the fit is the same. None holds all
            samples where that takes no more than a quarter of the machine's memory.
        channel_axis: the axis of X that holds the channels.
        class_weight: None, "balanced", or weights by class.
        calibrate: the number of folds whose held-out logits set the temperature of the probabilities, and make sets;
            None fits once, without them.
        random_state: of the start, and of the folds.
        device: where to fit.
        verbose: show a progress bar on a terminal.

    Attributes:
        classes_: the classes, in the order of the outputs.
        layer_: the fitted layer; ``layer_(X)`` are the logits.
        calibration_: what held-out folds showed, a
            :class:`tensor_dropout.calibration.classification.ClassCalibration`; None without ``calibrate``.

    Example:
        >>> import numpy as np
        >>> from tensor_dropout.sklearn import TensorClassifier
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(80, 6, 4, 4)).astype("float32")
        >>> y = np.where(X[:, 0, 0].sum(-1) > X[:, 0, 3].sum(-1), "up", "down")
        >>> model = TensorClassifier(random_state=0).fit(X[:60], y[:60])
        >>> model.score(X[60:], y[60:]) > 0.6
        True
    """

    def __init__(
        self,
        factorization: str = "cp",
        *,
        rank: Any = "auto",
        theta: float = 0.5,
        alpha: Any = "auto",
        modes: Any = "auto",
        law: Any = "bernoulli",
        solver: str = "auto",
        max_iter: int = MAX_ITER,
        tol: float = TOL,
        batch_size: int | None = None,
        channel_axis: int = 1,
        class_weight: Any = None,
        calibrate: int | None = None,
        random_state: Any = None,
        device: Any = None,
        verbose: bool = False,
    ) -> None:
        self.factorization = factorization
        self.rank = rank
        self.theta = theta
        self.alpha = alpha
        self.modes = modes
        self.law = law
        self.solver = solver
        self.max_iter = max_iter
        self.tol = tol
        self.batch_size = batch_size
        self.channel_axis = channel_axis
        self.class_weight = class_weight
        self.calibrate = calibrate
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> TensorClassifier:
        """Fit.

        Args:
            X: (n, *input_shape), NumPy or torch.
            y: (n,), class numbers or names.
            sample_weight: (n,), not negative.
            groups: (n,), what the folds of ``calibrate`` must not split, such as the person on a picture.
        """
        with all_or_nothing(self):
            self._check_settings()
            self._check_theta_alpha()
            x = self._features(X, fitting=True)
            numbers = self._checked_classes(y, len(x))
            weights = self._weights(sample_weight, numbers, x)
            settings = self._fit_settings(weights, len(x), "classification")
            targets = one_hot(numbers, len(self.classes_), x)
            self.calibration_, seed = None, self._seed()
            groups = check_groups(type(self).__name__, groups, len(x))
            if self.calibrate is not None:
                logits = self._hold_out(x, targets, numbers, weights, settings, seed, groups)
                self._keep_calibration(logits, numbers, groups, weights)
            module, ended = self._fit_module(x, targets, weights, settings, "classification", seed)
            self._keep(module, settings, x)
            self._say_how_it_ended(ended)
        return self

    def _hold_out(
        self,
        x: Tensor,
        y: Tensor,
        numbers: np.ndarray,
        weights: Tensor | None,
        settings: dict[str, Any],
        seed: int,
        groups: np.ndarray | None,
    ) -> Tensor:
        """The logits of all samples, each by a fit that had not seen it."""
        name, logits = type(self).__name__, torch.zeros_like(y)
        for train, test in calibration_folds(name, self.calibrate, seed, groups, weights, numbers, classes=True):
            part = None if weights is None else weights[train]
            counted = train if part is None else train[(part > 0).cpu().numpy()]
            if len(np.unique(numbers[counted])) < 2:
                raise TensorDropoutError(
                    f"{name}: calibrate={self.calibrate} leaves one class alone to fit on, "
                    f"{self.classes_[numbers[counted[0]]]!r}, where the others are held out; give more samples, or "
                    "groups, of the other classes"
                )
            module, ended = self._fit_module(x[train], y[train], part, dict(settings), "classification", seed)
            if ended is not None and ended.interrupted:
                raise KeyboardInterrupt
            logits[test] = hold_out(module, None, x[test])[0].to(y.dtype)
        return logits
