"""Tensor regression as an estimator."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.model_selection import GroupKFold, KFold
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.fit import MAX_ITER, TOL
from tensor_dropout.fitting.statistics import target_scale
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn.base import MoveChannels, TensorEstimator, all_or_nothing, moments_of
from tensor_dropout.sklearn.defaults import check_number
from tensor_dropout.sklearn.inputs import (
    as_targets,
    check_counts,
    check_folds,
    check_groups,
    check_targets,
    check_varies,
    check_weights,
)

HARDLY = 0.01
"""Below this std of a scaled output a warning says that it hardly counts."""


class RegressionMixin(RegressorMixin, MultiOutputMixin):
    """Prediction, intervals and scores of the regressors."""

    noise_variance_: np.ndarray | None
    residuals_: np.ndarray | None

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict.

        Args:
            X: (n, *input_shape), NumPy or torch.
            return_std: also return the standard deviation: over the masks (exact) and, where the estimator was
                calibrated, of the noise that held-out folds showed.

        Returns:
            Predictions shaped like y was; with ``return_std`` a pair. Tensors for a tensor, else NumPy arrays.
        """
        mean, variance = self._moments(X, variance=return_std)
        mean = self._shape_like_y(mean)
        if variance is None:
            return self._like_input(mean, X)
        return self._like_input(mean, X), self._like_input(self._shape_like_y(self._total_std(variance)), X)

    def predict_interval(self, X: Any, coverage: float = 0.9) -> tuple[Any, Any]:
        """Lower and upper ends of an interval for each output.

        Its width is the std times a quantile of held-out residuals over their std, per output. If new samples are like
        the training samples, about ``coverage`` of them fall inside; this is not guaranteed.

        Args:
            X: (n, *input_shape).
            coverage: the share that is to fall inside, in (0, 1).

        Raises:
            TensorDropoutError: if the estimator was fitted without held-out residuals.
        """
        check_is_fitted(self, "layer_")
        name = type(self).__name__
        if isinstance(coverage, bool) or not isinstance(coverage, float | np.floating) or not 0 < coverage < 1:
            raise TensorDropoutError(f"{name}: coverage is a number between 0 and 1, got {coverage!r}")
        if self.residuals_ is None:
            raise TensorDropoutError(
                f"{name}.predict_interval: there are no held-out residuals; fit with calibrate=5, or use {name}CV"
                if not name.endswith("CV")
                else f"{name}.predict_interval: there are no held-out residuals in this estimator"
            )
        mean, variance = self._moments(X, variance=True)
        assert variance is not None
        half = torch.from_numpy(self._widths(float(coverage))).to(mean) * self._total_std(variance)
        return (
            self._like_input(self._shape_like_y(mean - half), X),
            self._like_input(self._shape_like_y(mean + half), X),
        )

    def _widths(self, coverage: float) -> np.ndarray:
        """The quantile of the scaled residuals of each output, (*output_shape); infinite without any."""
        assert self.residuals_ is not None
        scores = np.abs(self.residuals_)
        counts = (~np.isnan(scores)).sum(0)
        widths = np.full(counts.shape, np.inf)
        for count in np.unique(counts[counts > 0]):
            level = min(1.0, math.ceil((count + 1) * coverage) / count)
            widths[counts == count] = np.nanquantile(scores[:, counts == count], level, axis=0, method="higher")
        least = int(counts.min())
        if math.ceil((least + 1) * coverage) > least:
            needed = math.ceil(coverage / (1 - coverage) * (1 - 1e-12))
            warnings.warn(
                f"{type(self).__name__}: {least} held-out residuals are too few for coverage={coverage:g}, which needs "
                f"{needed}; the largest of them is taken, and fewer samples than asked may fall inside",
                UserWarning,
                stacklevel=3,
            )
        return widths

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R², averaged over all outputs, each over the rows whose target is known; for y of any number of modes.

        scikit-learn's own metrics, such as ``scoring="r2"``, take y of shape (n,) or (n, k) only, without NaN.
        """
        name, predicted = type(self).__name__, self.predict(X)
        predicted = np.asarray(predicted.cpu() if isinstance(predicted, Tensor) else predicted)
        targets = as_targets(name, y).cpu().numpy()
        if targets.shape != predicted.shape and targets.shape != (*predicted.shape, 1):
            raise TensorDropoutError(
                f"{name}.score: y has the shape {targets.shape}, the predictions {predicted.shape}"
            )
        targets, predicted = (each.reshape(len(each), -1) for each in (targets, predicted))
        known = ~np.isnan(targets)
        if known.all():
            return float(r2_score(targets, predicted, sample_weight=sample_weight))
        weights = np.ones(len(targets)) if sample_weight is None else np.asarray(sample_weight)
        each = [
            r2_score(targets[rows, k], predicted[rows, k], sample_weight=weights[rows])
            for k, rows in enumerate(known.T)
            if rows.sum() > 1
        ]
        if not each:
            raise TensorDropoutError(f"{name}.score: no output has two known targets in y; give more rows")
        return float(np.mean(each))

    def _total_std(self, variance: Tensor) -> Tensor:
        if self.noise_variance_ is None:
            warnings.warn(
                f"{type(self).__name__}: this std is the spread over the masks alone, far smaller than the error; fit "
                "with calibrate=5 to add what held-out folds show",
                UserWarning,
                stacklevel=3,
            )
            return variance.sqrt()
        return (variance + torch.from_numpy(self.noise_variance_).to(variance)).sqrt()

    def _keep_residuals(self, y: Tensor, mean: Tensor, variance: Tensor, weights: Tensor | None) -> None:
        """From held-out predictions (n, *output_shape): the noise beside the masks' spread, and scaled residuals.

        Rows of weight 0 do not count.
        """
        w = y.new_ones(len(y)) if weights is None else weights.to(y)
        errors, variance, w = (y - mean)[w > 0], variance[w > 0], w[w > 0]
        known = w.view(-1, *[1] * (y.ndim - 1)) * ~errors.isnan()
        noise = (known * (errors.square() - variance).nan_to_num()).sum(0) / known.sum(0).clamp(min=1e-30)
        noise = noise.clamp(min=0)
        std = (variance + noise).sqrt()
        self.noise_variance_ = noise.cpu().numpy()
        self.residuals_ = (errors / torch.where(std > 0, std, 1.0)).cpu().numpy()

    def _checked_targets(self, y: Any, x: Tensor, sample_weight: Any) -> tuple[Tensor, Tensor | None]:
        """(n, *output_shape) on the device of x, one output for a vector; and the weights of the samples."""
        name = type(self).__name__
        targets = check_targets(name, y, len(x)).to(x.device)
        weights = check_weights(name, sample_weight, x)
        check_varies(name, targets, weights)
        self.flat_target_ = targets.ndim == 1
        targets = targets.unsqueeze(1) if self.flat_target_ else targets
        self.output_shape_ = tuple(targets.shape[1:])
        self._warn_of_scales(targets)
        return targets, weights

    def _warn_of_scales(self, y: Tensor) -> None:
        """Where an output hardly counts beside the others, since no scales of the output modes make them alike."""
        if y.ndim == 2:
            return
        left = target_scale(y, y.new_full((len(y),), 1 / len(y))).left.nan_to_num(nan=1.0)
        if float(left.min()) < HARDLY:
            place = ", ".join(str(int(k)) for k in torch.unravel_index(left.argmin(), left.shape))
            warnings.warn(
                f"{type(self).__name__}: scaled by its modes y[:, {place}] has a std of {float(left.min()):.1g} where "
                f"others have 1, so it hardly counts; reshape y to (n, {left.numel()}), where each output has its own "
                "scale",
                UserWarning,
                stacklevel=4,
            )


class TensorRegressor(RegressionMixin, TensorEstimator):
    """Tensor regression with tensor dropout, fitted by minimizing the exact expected loss: no masks, no learning rate.

    ``y ≈ ⟨X, W⟩ + b`` with W in factors. It minimizes ``E‖y − ŷ‖² + α Σ‖factors‖²`` over all masks in closed form, on
    standardized channels and targets.

    Args:
        factorization: "cp", "tucker", "tt", "ring", or a registered format.
        rank: "auto" (generous: CP 128, cut at the full rank), or what the layer takes.
        theta: the keep probability θ; 1 for no dropout.
        alpha: the weight of the squared norms of the factors; "auto" is 0.04 over the sum of the sample weights.
        modes: "auto" (CP's one mask; else the rank axis of the channels, if it is large), or what
            :class:`td.TensorDropout` takes.
        law: how masks are drawn; any law with second moments.
        solver: "auto" solves for the output factor where that is possible; "lbfgs" searches all parameters.
        max_iter: the most iterations.
        tol: the fit ends where the loss falls by less than this share of itself in ten iterations.
        batch_size: how many samples are held in working precision at once. The features are then read anew in each
            iteration, for example from a memory-mapped file larger than memory; the fit is the same. None holds all
            samples where that takes no more than a quarter of the machine's memory.
        channel_axis: the axis of X that holds the channels, each of which is standardized.
        calibrate: the number of folds whose held-out residuals ``return_std`` and ``predict_interval`` use; None fits
            once, without them.
        random_state: of the start, and of the folds.
        device: where to fit, such as "cuda"; None is where X is, the CPU for NumPy.
        verbose: show a progress bar on a terminal.

    Attributes:
        layer_: the fitted module: ``layer_(X)`` on features as they came is ``predict(X)``. A tensor regression layer,
            or ``nn.Linear`` where X is a vector and y a number: there is no rank then, and the fit is plain ridge.
        coef_: the dense weight, (*input_shape, *output_shape); without the last for y of shape (n,).
        intercept_: the bias.
        method_: "cp", "tucker", .. or "ridge".
        rank_, theta_: as used; None for ridge.
        alpha_: as used.
        input_shape_, output_shape_: of a sample and of its target; (1,) for y of shape (n,).
        n_features_in_: the size of axis 1 of X, as scikit-learn has it.
        n_iter_: the number of iterations.
        loss_curve_: the objective after each of them.
        noise_variance_: variance of held-out residuals beside that of the masks, per output; None without calibration.
        residuals_: held-out residuals over their std; None without calibration.

    Example:
        >>> import numpy as np
        >>> from tensor_dropout.sklearn import TensorRegressor
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(60, 8, 5, 5)).astype("float32")
        >>> y = X[:, 0].mean(axis=2) @ np.arange(5) + X[:, 1, 2, 2]
        >>> model = TensorRegressor(random_state=0).fit(X[:50], y[:50])
        >>> model.predict(X[50:]).shape, model.score(X[50:], y[50:]) > 0.5
        ((10,), True)
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
        self.calibrate = calibrate
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None, *, groups: Any = None) -> TensorRegressor:
        """Fit.

        Args:
            X: (n, *input_shape), NumPy or torch, channels in ``channel_axis``.
            y: (n,), (n, k) or (n, *output_shape); NaN for a coordinate that is missing.
            sample_weight: (n,), not negative.
            groups: (n,), what the folds of ``calibrate`` must not split, such as the person on a picture.
        """
        with all_or_nothing(self):
            self._check_settings()
            self._check_theta_alpha()
            x = self._features(X, fitting=True)
            targets, weights = self._checked_targets(y, x, sample_weight)
            seed = self._seed()
            settings = self._fit_settings(weights, len(x))
            self.noise_variance_ = self.residuals_ = None
            groups = check_groups(type(self).__name__, groups, len(x))
            if self.calibrate is not None:
                self._calibrate(x, targets, weights, settings, seed, groups)
            module, ended = self._fit_module(x, targets, weights, settings, "regression", seed)
            self._keep(module, settings, x)
            self._say_how_it_ended(ended)
        return self

    def _calibrate(
        self,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
        settings: dict[str, Any],
        seed: int,
        groups: np.ndarray | None,
    ) -> None:
        name = type(self).__name__
        check_number(name, "calibrate", self.calibrate, 2, float("inf"), kind="int")
        n_folds = int(self.calibrate or 0)
        check_folds(name, "calibrate", n_folds, len(x), groups)
        mean, variance = torch.zeros_like(y), torch.zeros_like(y)
        kind = KFold if groups is None else GroupKFold
        splitter = kind(n_folds, shuffle=True, random_state=seed % 2**31)
        folds = list(splitter.split(np.empty(len(x)), groups=groups))
        check_counts(name, "calibrate", weights, [(train, train) for train, _ in folds])
        for train, test in folds:
            part = None if weights is None else weights[train]
            module, ended = self._fit_module(x[train], y[train], part, dict(settings), "regression", seed)
            if ended is not None and ended.interrupted:
                raise KeyboardInterrupt
            held_out = moments_of(module, x[test].to(next(module.parameters())))
            mean[test], variance[test] = (each.to(y.dtype) for each in held_out)
        self._keep_residuals(y, mean, variance, weights)

    @classmethod
    def from_layer(cls, layer: TensorRegression, **settings: Any) -> TensorRegressor:
        """A fitted estimator around a layer that was trained elsewhere.

        Args:
            layer: a tensor regression layer; it is used as it is, not copied.
            settings: of the estimator, for a later ``fit``.
        """
        if not isinstance(layer, TensorRegression):
            raise TensorDropoutError(
                f"{cls.__name__}.from_layer: takes a tensor regression layer, got {type(layer).__name__}"
            )
        estimator = cls(**settings)
        estimator._check_settings()
        estimator._take_layer(layer.eval())
        return estimator

    def _take_layer(self, layer: TensorRegression) -> None:
        """Be fitted with a layer, whose channels come first."""
        channels, *space = layer.input_shape
        if not -len(layer.input_shape) <= self.channel_axis <= len(layer.input_shape):
            raise TensorDropoutError(
                f"{type(self).__name__}.from_layer: channel_axis={self.channel_axis}, but X has the axes 0 to "
                f"{len(layer.input_shape)}"
            )
        position = self.channel_axis % (len(space) + 2) - 1
        self.input_shape_ = (*space[:position], channels, *space[position:])
        self.n_features_in_ = self.input_shape_[0]
        self.output_shape_, self.flat_target_ = layer.output_shape, layer.output_shape == (1,)
        self.layer_ = nn.Sequential(MoveChannels(self.channel_axis), layer).eval() if position else layer
        names = {format.layer: name for name, format in FORMATS.items()}
        self.method_ = next((names[kind] for kind in type(layer).__mro__ if kind in names), type(layer).__name__)
        self.rank_ = layer.rank
        self.theta_ = 1.0 if layer.dropout is None else float(layer.dropout.theta)
        self.alpha_ = None
        self.n_iter_, self.loss_curve_ = 0, []
        self.noise_variance_ = self.residuals_ = None
