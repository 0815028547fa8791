"""Tensor regression as an estimator."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import torch
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from tensor_dropout.calibration.conformal import Quantile, conformal_quantile, groups_needed
from tensor_dropout.calibration.leverage import Leverage
from tensor_dropout.calibration.regression import Calibration, calibrate_errors
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.fit import MAX_ITER, TOL
from tensor_dropout.fitting.statistics import target_scale
from tensor_dropout.layers.formats import FORMATS
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.sklearn.base import MoveChannels, TensorEstimator, all_or_nothing
from tensor_dropout.sklearn.held_out import (
    CrossFit,
    calibration_folds,
    hold_out,
    leverage_of,
    mean_count,
    measure_leverage,
)
from tensor_dropout.sklearn.inputs import (
    as_targets,
    check_coverage,
    check_features,
    check_groups,
    check_points,
    check_targets,
    check_varies,
    check_weights,
)

CROSSED_AT_ONCE = 2**24
"""How many ends of cross-conformal intervals are held at once."""
HARDLY = 0.01
"""Below this std of a scaled output a warning says that it hardly counts."""


class RegressionMixin(RegressorMixin, MultiOutputMixin):
    """Prediction, intervals and scores of the regressors."""

    calibration_: Calibration | None
    cross_fits_: list[CrossFit] | None

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Predict.

        Args:
            X: (n, *input_shape), NumPy or torch.
            return_std: also return the standard deviation of the error, as held-out samples showed it; without
                calibration that over the masks (exact), with a warning that it is no error.

        Returns:
            Predictions shaped like y was; with ``return_std`` a pair. Tensors for a tensor, else NumPy arrays.
        """
        if return_std and getattr(self, "calibration_", None) is None:
            mean, variance = self._moments(X, variance=True)
            assert variance is not None
            warnings.warn(
                f"{type(self).__name__}: this std is the spread over the masks alone, far smaller than the error; fit "
                "with calibrate=5 to have the error that held-out folds show",
                UserWarning,
                stacklevel=2,
            )
            return self._give(mean, X), self._give(variance.sqrt(), X)
        mean, _ = self._moments(X, variance=False)
        return (self._give(mean, X), self._give(self._std(X, mean), X)) if return_std else self._give(mean, X)

    def predict_interval(self, X: Any, coverage: float = 0.9, *, method: str = "held-out") -> tuple[Any, Any]:
        """Lower and upper ends of an interval for each output.

        Args:
            X: (n, *input_shape).
            coverage: the share of new samples that is to fall inside, in (0, 1).
            method: "held-out": the prediction, plus and minus its std times a quantile of held-out errors over their
                std. If new samples, or groups, are like those of the fit, about ``coverage`` of them fall inside; no
                theorem says so. "cross": every held-out error around the prediction of the fit that had not seen it
                (CV+). At least about ``2 · coverage - 1`` fall inside, for samples that are exchangeable, and usually
                ``coverage``; it is wider and takes as many predictions as there are folds.

        Raises:
            TensorDropoutError: if the estimator was fitted without held-out errors.
        """
        calibration = self._checked_calibration("predict_interval", coverage)
        if method == "cross":
            return self._cross_interval(X, coverage, calibration)
        if method != "held-out":
            raise TensorDropoutError(
                f"{type(self).__name__}.predict_interval: method is 'held-out' or 'cross', got {method!r}"
            )
        mean, _ = self._moments(X, variance=False)
        quantile = calibration.quantile(coverage)
        self._warn_of_few(quantile, coverage)
        half = quantile.value.to(mean) * self._std(X, mean)
        return self._give(mean - half, X), self._give(mean + half, X)

    def predict_region(self, X: Any, coverage: float = 0.9, *, points: Any = None) -> tuple[Any, Any]:
        """Ellipses that hold points of the plane or of space, all coordinates of a point at once.

        Args:
            X: (n, *input_shape).
            coverage: the share of new samples whose point is to fall inside, for each point by itself.
            points: the outputs that are the coordinates of each point, two or three; None takes 0 and 1, 2 and 3, ….

        Returns:
            Centers (n, points, 2) and matrices M (n, points, 2, 2): a point p is inside where
            ``(p - center)ᵀ M⁻¹ (p - center) ≤ 1``. As for ``predict_interval``, no theorem guarantees the coverage.

        Raises:
            TensorDropoutError: if the outputs are no such points, or there are no held-out errors.
        """
        name = f"{type(self).__name__}.predict_region"
        calibration = self._checked_calibration("predict_region", coverage)
        outputs = math.prod(self.output_shape_)
        pairs = check_points(name, points, outputs)
        mean, _ = self._moments(X, variance=False)
        region, quantile = calibration.regions(mean.flatten(1), self._std(X, mean).flatten(1), pairs, coverage)
        self._warn_of_few(quantile, coverage)
        return self._like_input(region.center, X), self._like_input(region.matrix, X)

    def _checked_calibration(self, method: str, coverage: Any) -> Calibration:
        check_is_fitted(self, "layer_")
        name = type(self).__name__
        check_coverage(name, coverage)
        calibration = getattr(self, "calibration_", None)  # a file may be older than it
        if calibration is None:
            raise TensorDropoutError(
                f"{name}.{method}: there are no held-out errors; fit with calibrate=5, or use {name}CV"
                if not name.endswith("CV")
                else f"{name}.{method}: there are no held-out errors in this estimator"
            )
        return calibration

    def _std(self, X: Any, mean: Tensor) -> Tensor:
        """The std of the error of each prediction, (n, *output_shape)."""
        calibration = self.calibration_
        assert calibration is not None
        h = None
        if calibration.leverage is not None and calibration.share > 0:
            h = measure_leverage(self.layer_, calibration.leverage, check_features(self, X, fitting=False))
        return calibration.std(h, len(mean)).to(mean)

    def _give(self, values: Tensor, X: Any) -> Any:
        return self._like_input(self._shape_like_y(values), X)

    def _cross_interval(self, X: Any, coverage: float, calibration: Calibration) -> tuple[Any, Any]:
        """CV+ (Barber et al., 2021) with the std of each fold's fit as the scale."""
        name = type(self).__name__
        if not self.cross_fits_:
            raise TensorDropoutError(
                f"{name}.predict_interval: method='cross' predicts with the fit of each fold, which only "
                "TensorRegressor(calibrate=...) keeps"
            )
        x = check_features(self, X, fitting=False)
        found = [fit.predict(calibration, x) for fit in self.cross_fits_]
        scores, ends = calibration.scores.abs(), []
        owner = torch.zeros(len(scores), dtype=torch.long)
        for fold, fit in enumerate(self.cross_fits_):
            owner[fit.rows] = fold
        means, stds = (torch.stack(parts).double().cpu() for parts in zip(*found, strict=True))  # (folds, n, *outputs)
        rows = max(1, CROSSED_AT_ONCE // max(1, scores.numel()))
        for mean, std in zip(means.split(rows, dim=1), stds.split(rows, dim=1), strict=True):
            reach = scores[:, None] * std[owner]  # (held out, b, *outputs)
            quantiles = [
                conformal_quantile(sign * mean[owner] + reach, calibration.groups, coverage) for sign in (-1, 1)
            ]
            self._warn_of_few(quantiles[0], coverage, 4)
            ends.append((-quantiles[0].value, quantiles[1].value))
        lower, upper = (torch.cat(parts) for parts in zip(*ends, strict=True))
        like = next(self.layer_.parameters())
        return self._give(lower.to(like), X), self._give(upper.to(like), X)

    def _warn_of_few(self, quantile: Quantile, coverage: float, stacklevel: int = 3) -> None:
        if bool(quantile.reached.all()):
            return
        warnings.warn(
            f"{type(self).__name__}: {int(quantile.groups.min())} held-out residuals are too few for "
            f"coverage={coverage:g}, which needs {groups_needed(coverage)}; the largest of them is taken, and fewer "
            "samples than asked may fall inside",
            UserWarning,
            stacklevel=stacklevel,
        )

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

    def _keep_calibration(
        self, errors: Tensor, h: Tensor | None, groups: Any, weights: Tensor | None, leverage: Leverage | None
    ) -> None:
        """From the errors of held-out predictions (n, *output_shape); rows of weight 0 do not count."""
        numbers = np.arange(len(errors)) if groups is None else np.unique(groups, return_inverse=True)[1]
        groups = torch.from_numpy(numbers)
        if weights is not None:
            kept = (weights > 0).cpu()
            errors, groups = errors[kept.to(errors.device)], groups[kept]
            h = None if h is None else h[kept.to(h.device)]
        self.calibration_ = calibrate_errors(errors, h, groups, leverage)

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
        calibration_: what held-out folds showed of the errors, a
            :class:`tensor_dropout.calibration.regression.Calibration`; None without ``calibrate``.

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
            self.calibration_ = self.cross_fits_ = None
            groups = check_groups(type(self).__name__, groups, len(x))
            held_out = None
            if self.calibrate is not None:
                held_out = self._hold_out(x, targets, weights, settings, seed, groups)
            module, ended = self._fit_module(x, targets, weights, settings, "regression", seed)
            if held_out is not None:
                errors, h, count = held_out
                leverage = leverage_of(module, x, targets, weights, settings["alpha"], count)
                self._keep_calibration(errors, h, groups, weights, leverage)
            self._keep(module, settings, x)
            self._say_how_it_ended(ended)
        return self

    def _hold_out(
        self,
        x: Tensor,
        y: Tensor,
        weights: Tensor | None,
        settings: dict[str, Any],
        seed: int,
        groups: np.ndarray | None,
    ) -> tuple[Tensor, Tensor | None, float]:
        """Errors and leverages of all samples, each by a fit that had not seen it; keeps those fits.

        The third is how many samples such a fit has.
        """
        name = type(self).__name__
        folds = calibration_folds(name, self.calibrate, seed, groups, weights, np.empty(len(x)), classes=False)
        errors, leverages, fits = y.clone(), torch.zeros_like(y), []
        for train, test in folds:
            part, own = None if weights is None else weights[train], dict(settings)
            module, ended = self._fit_module(x[train], y[train], part, own, "regression", seed)
            if ended is not None and ended.interrupted:
                raise KeyboardInterrupt
            leverage = leverage_of(module, x[train], y[train], part, own["alpha"])
            mean, h = hold_out(module, leverage, x[test])
            errors[test] -= mean.to(y.dtype)
            if h is not None:
                leverages[test] = h.to(y.dtype)
            counted = np.arange(len(test)) if weights is None else np.flatnonzero((weights[test] > 0).cpu().numpy())
            fits.append(CrossFit(module, leverage, test[counted]))
        kept = np.arange(len(x)) if weights is None else np.flatnonzero((weights > 0).cpu().numpy())
        moved = self.channel_axis % x.ndim != 1
        for fit in fits:  # among the rows that count
            fit.rows = torch.from_numpy(np.searchsorted(kept, fit.rows))
            fit.module = nn.Sequential(MoveChannels(self.channel_axis), fit.module) if moved else fit.module
        self.cross_fits_ = fits
        count = mean_count([train for train, _ in folds], weights)
        return errors, None if any(fit.leverage is None for fit in fits) else leverages, count

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
        self.calibration_ = self.cross_fits_ = None
