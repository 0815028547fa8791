"""Prediction: the mean network, Monte-Carlo tensor dropout, or the exact moments in one pass."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.dropout import find_dropouts
from tensor_dropout.layers.head_outputs import call_with_head, unwrap
from tensor_dropout.layers.moments import Moments
from tensor_dropout.layers.randomized import in_full_precision, randomized_layers
from tensor_dropout.layers.regression import TensorRegression

if TYPE_CHECKING:
    from tensor_dropout.calibration.model import ModelCalibration


class Prediction(NamedTuple):
    """What :func:`predict` returns; entries that a mode or task does not give are None.

    Attributes:
        mean: the mean output: logits, or the regression's output in its own units.
        std: the standard deviation of the output over the masks, in the same units.
        probs: the softmax averaged over the masks (classification).
        entropy: the entropy of ``probs`` in nats: total uncertainty.
        mutual_information: ``entropy`` minus the mean entropy of single draws: what the masks disagree about.
        low, high: the ends of calibrated intervals of a regression's outputs, with ``coverage``.
        sets: (B, classes), which classes are in the calibrated set of each input, with ``coverage``.
    """

    mean: Tensor
    std: Tensor | None = None
    probs: Tensor | None = None
    entropy: Tensor | None = None
    mutual_information: Tensor | None = None
    low: Tensor | None = None
    high: Tensor | None = None
    sets: Tensor | None = None


def predict(
    model: nn.Module,
    x: Tensor,
    *,
    mode: Literal["mean", "sample", "exact"] = "mean",
    n_samples: int = 32,
    task: Literal["classification", "regression"] | None = None,
    coverage: float | None = None,
    calibration: ModelCalibration | None = None,
) -> Prediction:
    """Predict with uncertainty; the network is put in ``eval`` mode for the call, without gradients.

    - "mean": the deterministic network with the mean weight. No std.
    - "sample": ``n_samples`` passes of the whole network with fresh masks (Monte-Carlo tensor dropout). The randomized
      layers compute in at least float32, also under autocast; where a later layer in half precision does not take that,
      the std has the rounding of the network's output.
    - "exact": mean and std in closed form, in ONE pass. The averaged softmax has no closed form: ``probs``,
      ``entropy`` and ``mutual_information`` average ``n_samples`` draws of the last layer alone, on the same features.

    Calls on one model from several threads take turns. Its settings are changed for the call and put back after it:
    do not run the model itself in another thread meanwhile; give that thread a copy.

    Args:
        model: a tensor regression layer, or a network; for "exact" its last layer must be one.
        x: the input of the model.
        mode: see above.
        n_samples: the number of draws.
        task: "classification" or "regression"; None takes outputs (B, O) with O > 1 for logits.
        coverage: with a calibration: the share of new targets that ``low`` to ``high``, or ``sets``, are to hold. The
            std stays that of the masks, which is no error.
        calibration: of this network, from :func:`td.calibrate`; for classes ``probs`` have its temperature, too. None:
            with ``coverage`` the one that the network carries as ``model.calibration``, such as after
            :func:`td.attach_head`.

    Raises:
        TensorDropoutError: if nothing is random or the masks are fixed, for "exact" if the randomness is not only in
            the last layer, or if there is no calibration, or one that was made for other weights.

    Example:
        >>> import torch, tensor_dropout as td
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), td.CPRegression((8, 4, 4), 1, rank=6, dropout=0.8))
        >>> age = td.predict(net, torch.randn(2, 3, 6, 6), mode="exact")
        >>> age.mean.shape, age.std.shape
        (torch.Size([2, 1]), torch.Size([2, 1]))
    """
    if mode not in ("mean", "sample", "exact"):
        raise TensorDropoutError(f"predict: mode is 'mean', 'sample' or 'exact', got {mode!r}")
    if task not in (None, "classification", "regression"):
        raise TensorDropoutError(f"predict: task is 'classification', 'regression' or None, got {task!r}")
    if type(n_samples) is not int or n_samples < 2:
        raise TensorDropoutError(f"predict: n_samples is an integer of at least 2, got {n_samples!r}")
    if mode != "mean" and not randomized_layers(model):
        raise TensorDropoutError(
            f"predict: {type(model).__name__} has no tensor regression layer with dropout, so mode={mode!r} has "
            "nothing to average; use mode='mean'"
        )
    if mode != "mean" and any(layer._fixed_masks is not None for layer in randomized_layers(model)):
        raise TensorDropoutError(
            f"predict: mode={mode!r} is about all masks, but those of {type(model).__name__} are fixed; call it "
            "outside td.fixed_masks, or use mode='mean'"
        )
    if coverage is not None or calibration is not None:
        return _predict_calibrated(model, x, mode, n_samples, coverage, calibration)
    with _turn(model), torch.no_grad(), evaluating(model):
        if mode == "exact":
            return _predict_exact(model, x, n_samples, task)
        if mode == "sample":
            with at_test(model, "sample"):
                draws = _draw(model, x, n_samples)
            return _describe(draws.mean(0), draws.std(0), draws, task)
        with at_test(model, "mean"):
            output = _run(model, x)
        return _describe(output, None, output.unsqueeze(0), task)


def _predict_calibrated(
    model: nn.Module,
    x: Tensor,
    mode: Literal["mean", "sample", "exact"],
    n_samples: int,
    coverage: float | None,
    calibration: ModelCalibration | None,
) -> Prediction:
    from tensor_dropout.calibration.model import ModelCalibration, carried_calibration  # which import this module

    calibration = carried_calibration(model) if calibration is None else calibration
    if calibration is None:
        raise TensorDropoutError(
            f"predict: coverage={coverage!r} needs a calibration, and there is none; make one with td.calibrate(model, "
            "x, y) on examples that the network was not trained on"
        )
    if coverage is not None and not (isinstance(coverage, float) and 0 < coverage < 1):
        raise TensorDropoutError(f"predict: coverage is a number between 0 and 1, such as 0.9, got {coverage!r}")
    if not isinstance(calibration, ModelCalibration):
        raise TensorDropoutError(
            "predict: calibration is what td.calibrate or td.load_calibration gives, got a "
            f"{type(calibration).__name__}"
        )
    calibration.check(model, "predict")
    calibration.check_input(x, "predict")
    mode = "exact" if calibration.uses_masks else mode
    model = model if calibration.leverage is None else unwrap(model)  # a compiled network would not call the hook
    with _turn(model), calibration.measuring(model) as leverages:
        found = predict(model, x, mode=mode, n_samples=n_samples, task=calibration.task)
    return calibration.complete(found, coverage, leverages[0] if leverages else None)


_TURNS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_ASKING = threading.Lock()


def _turn(model: nn.Module) -> threading.RLock:
    """The lock of a model."""
    with _ASKING:
        return _TURNS.setdefault(model, threading.RLock())


def _draw(model: nn.Module, x: Tensor, n_samples: int) -> Tensor:
    """(n_samples, B, *output_shape), in at least float32 where the network lets it through."""
    try:
        with in_full_precision(model):
            return torch.stack([_run(model, x) for _ in range(n_samples)])
    except (RuntimeError, TensorDropoutError):
        pass  # a later layer in half precision does not take float32; any other failure comes again
    return torch.stack([_run(model, x) for _ in range(n_samples)])


def _run(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    if not isinstance(output, Tensor):
        raise TensorDropoutError(
            f"predict: {type(model).__name__} returns a {type(output).__name__}, not one tensor; wrap it in a module "
            "that returns the output to predict"
        )
    return output


class _Draws(NamedTuple):
    moments: Moments
    draws: Tensor


def _predict_exact(model: nn.Module, x: Tensor, n_samples: int, task: str | None) -> Prediction:
    before = _random_state(x)

    def describe_head(layer: TensorRegression, features: Tensor) -> Moments | _Draws:
        if not torch.equal(before, _random_state(x)):
            raise TensorDropoutError(
                f"predict: {type(model).__name__} draws random numbers before its last layer, so the exact moments "
                "of that layer are not the whole uncertainty; use mode='sample'"
            )
        moments = layer.moments(features)
        assert isinstance(moments, Moments)
        if not _is_classification(moments.mean, task):
            return moments
        masks = (layer.draw_masks(len(features)) for _ in range(n_samples))
        return _Draws(moments, torch.stack([layer.regress_precisely(features, mask) for mask in masks]))

    # Eager and unwrapped: each call brings a function of its own, for which a compiled network would recompile.
    result = call_with_head(unwrap(model), x, describe_head, (Moments, _Draws), "predict")
    (mean, variance), draws = result if isinstance(result, _Draws) else (result, None)
    return _describe(mean, variance.sqrt(), draws, task)


def _describe(mean: Tensor, std: Tensor | None, draws: Tensor | None, task: str | None) -> Prediction:
    if draws is None or not _is_classification(mean, task):
        return Prediction(mean, std)
    log_probs = draws.log_softmax(-1)  # (n, B, O)
    probs = log_probs.exp().mean(0)
    entropy = torch.special.entr(probs).sum(-1)
    if std is None:
        return Prediction(mean, None, probs, entropy)
    single = -(log_probs.exp() * log_probs).sum(-1).mean(0)
    return Prediction(mean, std, probs, entropy, (entropy - single).clamp(min=0))


def _is_classification(output: Tensor, task: str | None) -> bool:
    return task == "classification" or (task is None and output.ndim == 2 and output.shape[1] > 1)


def _random_state(x: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model in ``eval`` mode inside the block; every module's own mode comes back after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def at_test(model: nn.Module, setting: Literal["mean", "sample"]) -> Iterator[None]:
    """Every tensor dropout takes its mean, or goes on drawing, in ``eval`` mode inside the block."""
    dropouts = find_dropouts(model)
    before = [dropout.at_test for dropout in dropouts]
    for dropout in dropouts:
        dropout.at_test = setting
    try:
        yield
    finally:
        for dropout, old in zip(dropouts, before, strict=True):
            dropout.at_test = old
