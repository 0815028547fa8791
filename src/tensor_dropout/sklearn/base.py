"""What the estimators share: from checked data to a fitted module, and from features to predictions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.fitting.fit import Fit, Prepared, first_width, fit
from tensor_dropout.fitting.objective import Task
from tensor_dropout.fitting.statistics import rounded
from tensor_dropout.fitting.threads import one_thread_if_small
from tensor_dropout.layers.moments import Moments
from tensor_dropout.layers.regression import TensorRegression
from tensor_dropout.progress import show_progress
from tensor_dropout.sklearn.defaults import auto_alpha, build_layer, check_number, is_auto, is_matrix_of_rank_one
from tensor_dropout.sklearn.inputs import check_features
from tensor_dropout.sklearn.ridge import ridge_path

PREDICTED_AT_ONCE = 2**26
"""How many numbers of the features are predicted in one go."""
BATCH = 2**26
"""How many numbers of features that are too large for memory are held at once."""


class MoveChannels(nn.Module):
    """Brings the channels of a sample to the front, where a tensor regression expects them.

    Args:
        axis: where they are in the batch.
    """

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = int(axis)

    def forward(self, x: Tensor) -> Tensor:
        """Move them."""
        return x.movedim(self.axis, 1)

    def extra_repr(self) -> str:
        """The axis."""
        return f"axis={self.axis}"


class TensorEstimator(BaseEstimator):
    """Settings, fitting and prediction of all estimators; not used directly."""

    layer_: nn.Module
    input_shape_: tuple[int, ...]

    # The settings.

    def _check_settings(self) -> None:
        name = type(self).__name__
        check_number(name, "max_iter", self.max_iter, 1, float("inf"), kind="int")
        check_number(name, "tol", self.tol, 0, float("inf"), kind="float")
        if self.batch_size is not None:
            check_number(name, "batch_size", self.batch_size, 1, float("inf"), kind="int")
        if self.solver not in ("auto", "lbfgs"):
            raise TensorDropoutError(
                f"{name}: solver is 'auto' (the output factor is solved for where that is possible) or 'lbfgs' (all "
                f"parameters are searched), got {self.solver!r}"
            )
        axis = self.channel_axis
        if isinstance(axis, bool) or not isinstance(axis, int | np.integer) or axis == 0:
            raise TensorDropoutError(
                f"{name}: channel_axis is the axis of X that holds the channels, an integer that is not 0, got {axis!r}"
            )

    def _check_theta_alpha(self) -> None:
        name = type(self).__name__
        check_number(name, "theta", self.theta, 1e-6, 1, kind="float")
        if not is_auto(self.alpha):
            check_number(name, "alpha", self.alpha, 0, float("inf"), kind="float")

    def _fit_settings(self, weights: Tensor | None, n: int, task: Task = "regression") -> dict[str, Any]:
        """The settings of one fit, with a number for α."""
        alpha = auto_alpha(weights, n, task) if is_auto(self.alpha) else float(self.alpha)
        return {"factorization": self.factorization, "rank": self.rank, "theta": float(self.theta), "alpha": alpha}

    def _device(self, X: Any) -> torch.device:
        if self.device is not None:
            try:
                device = torch.device(self.device)
                torch.empty(0, device=device)
                reason = "it holds no numbers" if device.type == "meta" else ""
            except TypeError:
                reason = 'a device is a name, such as "cuda"'
            except (RuntimeError, AssertionError) as error:
                reason = str(error).splitlines()[0]
            if reason:
                raise TensorDropoutError(
                    f"{type(self).__name__}: device={self.device!r} cannot be used here ({reason})"
                )
            return device
        return X.device if isinstance(X, Tensor) else torch.device("cpu")

    def _channels_first(self, x: Tensor) -> Tensor:
        axis = int(self.channel_axis)
        if not -x.ndim < axis < x.ndim:
            raise TensorDropoutError(
                f"{type(self).__name__}: channel_axis={axis}, but X has the axes 0 to {x.ndim - 1}: {tuple(x.shape)}"
            )
        return x if axis % x.ndim == 1 else x.movedim(axis, 1)

    def _seed(self) -> int:
        return int(check_random_state(self.random_state).randint(2**31 - 1))

    # Fitting.

    def _features(self, X: Any, *, fitting: bool) -> Tensor:
        """X checked, on the device, channels first; memory-mapped or half-precision data are copied by blocks later."""
        x = check_features(self, X, fitting=fitting)
        return self._channels_first(x.to(self._device(X)))

    def _batch_size(self, x: Tensor) -> int | None:
        """How many samples the solver holds at once; None for all."""
        numbers = x[0].numel()
        if self.batch_size is not None or x.device.type != "cpu" or 4 * numbers * len(x) <= quarter_of_memory():
            return None if self.batch_size is None else int(self.batch_size)
        return max(1, BATCH // numbers)

    def _fit_module(
        self, x: Tensor, y: Tensor, weights: Tensor | None, settings: dict[str, Any], task: Any, seed: int
    ) -> tuple[nn.Module, Fit | None]:
        """One fit at given settings: the module that takes features as they came, channels first."""
        name, output_shape = type(self).__name__, tuple(y.shape[1:])
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        complete = task == "regression" and not bool(y.isnan().any())
        if complete and is_matrix_of_rank_one(tuple(x.shape[1:]), output_shape):
            path = ridge_path(x, y, weights, "flattened ridge")
            alpha = path.best_alpha() if is_auto(self.alpha) else settings["alpha"] / max(path.size, 1e-30)
            settings["alpha"] = alpha * path.size
            return path.module(alpha, output_shape), None
        layer = build_layer(
            settings["factorization"],
            tuple(x.shape[1:]),
            output_shape,
            settings["rank"],
            settings["theta"],
            self.modes,
            self.law,
            where=name,
            device=x.device,
            dtype=dtype,
        )
        bar = show_progress(name, self.max_iter, shown=bool(self.verbose))
        with one_thread_if_small(x, first_width(layer)), bar as advance:
            prepared = Prepared(x, rounded(y, dtype), weights, task, self._batch_size(x))
            ended, _ = fit(
                layer,
                prepared,
                alpha=settings["alpha"],
                max_iter=self.max_iter,
                tol=self.tol,
                seed=seed,
                eliminate=self.solver == "auto",
                report=lambda iteration, loss: advance(1),
            )
        return layer.eval(), ended

    def _say_how_it_ended(self, ended: Fit | None) -> None:
        self.n_iter_ = 1 if ended is None else max(1, ended.n_iter)
        self.loss_curve_ = [] if ended is None else ended.loss_curve
        if ended is None or ended.converged:
            return
        if ended.interrupted:
            text = f"interrupted after {ended.n_iter} iterations: the best so far is kept"
        else:
            text = (
                f"not converged after max_iter={self.max_iter} iterations: the loss still falls by more than "
                f"tol={self.tol:g} of itself in ten iterations; raise max_iter or alpha, or lower theta"
            )
        warnings.warn(f"{type(self).__name__}: {text}", ConvergenceWarning, stacklevel=3)

    def _keep(self, module: nn.Module, settings: dict[str, Any], x: Tensor) -> None:
        """Set what is public after a fit."""
        moved = self.channel_axis % x.ndim != 1
        self.layer_ = (nn.Sequential(MoveChannels(self.channel_axis), module) if moved else module).eval()
        layer = self._regression()
        self.method_ = settings.get("method", settings["factorization"] if layer is not None else "ridge")
        self.rank_ = None if layer is None else layer.rank
        self.theta_ = None if layer is None else (1.0 if layer.dropout is None else float(settings["theta"]))
        self.alpha_: float | None = float(settings["alpha"])

    def _regression(self) -> TensorRegression | None:
        """The tensor regression in ``layer_``; None where ridge won."""
        return next((module for module in self.layer_.modules() if isinstance(module, TensorRegression)), None)

    def as_network(self) -> nn.Module:
        """What :func:`td.save` writes: a module with the fitted layer, the arrays of the fit and the settings."""
        from tensor_dropout.sklearn.files import describe

        return describe(self)

    # Prediction.

    @torch.no_grad()
    def _moments(self, X: Any, *, variance: bool) -> tuple[Tensor, Tensor | None]:
        """Mean output and, if asked, its variance over the masks: (n, *output_shape)."""
        check_is_fitted(self, "layer_")
        x = check_features(self, X, fitting=False)
        like = next(self.layer_.parameters())
        rows = max(1, PREDICTED_AT_ONCE // max(1, x[0].numel()))
        if not variance:
            return torch.cat([self.layer_(part.to(like)) for part in x.split(rows)]), None
        parts = [moments_of(self.layer_, part.to(like)) for part in x.split(rows)]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def _like_input(self, values: Tensor, X: Any) -> Any:
        """A tensor for a tensor, else a NumPy array."""
        return values.to(X.device) if isinstance(X, Tensor) else as_numpy(values)

    # What is public after a fit.

    @property
    def coef_(self) -> np.ndarray:
        """The weight W of features as they came: (*input_shape, *output_shape), or (*input_shape,) for y of shape (n,).

        ``np.tensordot(X, coef_, len(input_shape_)) + intercept_`` is the prediction, or the logits.
        """
        check_is_fitted(self, "layer_")
        layer = self._regression()
        if layer is not None:
            weight = layer.dense_weight().detach()
        else:
            weight = plain_weight(self.layer_, self._channels_first_shape(), self.output_shape_)
        weight = weight.movedim(0, self._channel_position())
        return as_numpy(self._shape_like_y(weight, -1))

    @property
    def intercept_(self) -> np.ndarray:
        """The bias b of features as they came, (*output_shape), or () for y of shape (n,): the prediction for zeros."""
        check_is_fitted(self, "layer_")
        like = next(self.layer_.parameters())
        with torch.no_grad():
            at_zero = self.layer_(torch.zeros((1, *self.input_shape_), dtype=like.dtype, device=like.device))[0]
        return as_numpy(self._shape_like_y(at_zero, -1))

    def _shape_like_y(self, values: Tensor, axis: int = 1) -> Tensor:
        """Without the axis of the one output, if y had none."""
        return values.squeeze(axis) if getattr(self, "flat_target_", False) else values

    def _channel_position(self) -> int:
        return self.channel_axis % (len(self.input_shape_) + 1) - 1

    def _channels_first_shape(self) -> tuple[int, ...]:
        sizes = list(self.input_shape_)
        return (sizes.pop(self._channel_position()), *sizes)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.required = True
        tags.input_tags.three_d_array = True
        return tags


def as_numpy(values: Tensor) -> np.ndarray:
    """As an array; NumPy has no bfloat16."""
    array: np.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).cpu().numpy()
    return array


@contextmanager
def all_or_nothing(estimator: BaseEstimator) -> Iterator[None]:
    """Where a fit fails or is interrupted, the estimator is left as it was."""
    before = dict(vars(estimator))
    try:
        yield
    except BaseException:
        vars(estimator).clear()
        vars(estimator).update(before)
        raise


def quarter_of_memory() -> float:
    """In bytes; no limit where the system does not say how much memory it has."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 4
    except (AttributeError, ValueError, OSError):
        return float("inf")


@torch.no_grad()
def moments_of(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and exact variance over the masks of a fitted module: a layer, alone or behind :class:`MoveChannels`."""
    layer = module[-1] if isinstance(module, nn.Sequential) else module
    if not isinstance(layer, TensorRegression) or layer.dropout is None:
        mean = module(x)
        return mean, torch.zeros_like(mean)
    moments = layer.moments(module[:-1](x) if isinstance(module, nn.Sequential) else x)
    assert isinstance(moments, Moments)
    return moments.mean, moments.variance


def plain_weight(module: nn.Module, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Tensor:
    """The weight (*input_shape, *output_shape) of ridge as plain layers."""
    linear = next(each for each in module.modules() if isinstance(each, nn.Linear))
    weight = linear.weight.detach().mT
    positions = 1
    for size in input_shape[1:]:
        positions *= size
    if weight.shape[0] == input_shape[0] and positions > 1:  # pooled
        weight = (weight / positions).repeat_interleave(positions, dim=0)
    return weight.reshape(*input_shape, *output_shape)
