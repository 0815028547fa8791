"""The calibration of a network: held-out examples say how far its predictions are off."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.calibration.classification import ClassCalibration, calibrate_classes
from tensor_dropout.calibration.conformal import Quantile, groups_needed
from tensor_dropout.calibration.leverage import Leverage
from tensor_dropout.calibration.regression import Calibration, calibrate_errors
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.head_outputs import find_head, unwrap
from tensor_dropout.layers.randomized import randomized_layers
from tensor_dropout.prediction import Prediction, predict

LEAST = groups_needed(0.9)
"""With fewer groups not even a 90 % interval is finite."""
BATCH = 256

Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class ModelCalibration:
    """What held-out examples said of a network.

    A network carries its calibration under the name ``calibration``: :func:`td.attach_head` puts that of the estimator
    there, and ``model.calibration = td.calibrate(model, x, y)`` does. :func:`td.predict` then takes it, and
    :func:`td.save` and :func:`td.load` keep it.

    Attributes:
        task: "classification" or "regression".
        errors: of numbers a :class:`Calibration`, of classes a :class:`ClassCalibration`.
        model: the fingerprint of the network; another one is refused.
        uses_masks: whether the std of an error depends on the spread over the masks.
        about: plain values for the record, such as the name of the data.
    """

    task: Task
    errors: Calibration | ClassCalibration
    model: str
    uses_masks: bool
    about: dict[str, Any]

    @property
    def leverage(self) -> Leverage | None:
        """What the std of an error grows with, if it is the leverage of a sample in the last layer."""
        return self.errors.leverage if isinstance(self.errors, Calibration) and self.errors.share > 0 else None

    def check(self, model: nn.Module, operation: str, advice: str = "calibrate again with td.calibrate") -> None:
        """Refuse another network than the one that was calibrated: also one that was trained or converted since.

        Args:
            model: the network.
            operation: what refuses, to begin the message.
            advice: what to do, to end it.

        Raises:
            TensorDropoutError: if its weights are not those.
        """
        if fingerprint(model) != self.model:
            raise TensorDropoutError(
                f"{operation}: this calibration was made for other weights: of another network, or "
                f"{type(model).__name__} was trained or converted since; {advice}"
            )

    def check_input(self, x: Tensor, operation: str) -> None:
        """Refuse inputs of another shape than those that were held out, as far as that is known.

        Raises:
            TensorDropoutError: with both shapes.
        """
        shape = self.about.get("input_shape")
        if shape is not None and tuple(x.shape[1:]) != tuple(shape):
            raise TensorDropoutError(
                f"{operation}: this calibration was made on other data, inputs of shape {tuple(shape)}, and these are "
                f"{tuple(x.shape[1:])}; bring them to that shape, or calibrate on such inputs with td.calibrate"
            )

    @contextmanager
    def measuring(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """Collect the leverages of the samples that pass through a network inside, if its errors grow with them."""
        leverages: list[Tensor] = []
        leverage = self.leverage
        if leverage is None:
            yield leverages
            return

        def measure(layer: Any, inputs: tuple[Tensor, ...]) -> None:
            if not leverages:  # passes with other masks have the same
                leverages.append(leverage.measure(layer, inputs[0]))

        head = find_head(getattr(model, "head", model), "predict")  # of td.attach_head, whatever is in the backbone
        handle = head.register_forward_pre_hook(measure)
        try:
            yield leverages
        finally:
            handle.remove()

    def complete(self, found: Prediction, coverage: float | None, leverage: Tensor | None = None) -> Prediction:
        """The prediction with its intervals or sets, and with calibrated probabilities.

        Args:
            found: without them.
            coverage: of intervals or sets; None: without.
            leverage: of the samples, where errors grow with it.
        """
        if isinstance(self.errors, ClassCalibration):
            logits = self.errors.logits(found.mean)
            probs = self.errors.probabilities(logits)
            found = found._replace(probs=probs, entropy=torch.special.entr(probs).sum(-1))
            if coverage is None:
                return found
            sets, quantile = self.errors.sets(logits, coverage)
            self.check_reached(quantile, coverage, "predict")
            return found._replace(sets=sets)
        if coverage is None:
            return found
        quantile = _quantile(self.errors, coverage)
        self.check_reached(quantile, coverage, "predict")
        h = found.std.square() if self.uses_masks and found.std is not None else leverage
        half = (quantile.value * self.errors.std(h, len(found.mean))).to(found.mean)
        return found._replace(low=found.mean - half, high=found.mean + half)

    def check_reached(self, quantile: Quantile, coverage: float, operation: str) -> None:
        """Refuse a coverage that takes more groups than there were.

        Raises:
            TensorDropoutError: with the number that is needed.
        """
        if not bool(quantile.reached.all()):
            raise TensorDropoutError(
                f"{operation}: coverage={coverage:g} takes {groups_needed(coverage)} held-out groups, the calibration "
                f"has {int(quantile.groups.min())}; lower coverage, or calibrate on more"
            )


_QUANTILES: WeakKeyDictionary[Calibration, dict[float, Quantile]] = WeakKeyDictionary()


def _quantile(errors: Calibration, coverage: float) -> Quantile:
    """Found once for each coverage: it sorts the held-out scores of every output."""
    known = _QUANTILES.setdefault(errors, {})
    if coverage not in known:
        known[coverage] = errors.quantile(coverage)
    return known[coverage]


def calibrate(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    *,
    groups: Any = None,
    task: Task | None = None,
    batch: int = BATCH,
    about: dict[str, Any] | None = None,
) -> ModelCalibration:
    """Measure the errors of a network on examples that it was not trained on.

    Of numbers: the variance of an error, and by how much it grows with the exact spread over the masks, if it does. Of
    classes: the temperature. Both give ``td.predict(..., coverage=0.9)`` what it needs. If the examples, or their
    groups, and new ones are exchangeable, about 90 % of new targets lie inside 90 % intervals: at least so many in
    expectation, but for the few numbers that are fitted to the same examples. New cameras, hospitals or species are not
    covered.

    Args:
        model: a network, or a layer; it is put in ``eval`` mode for the call.
        x: (n, ...), its inputs.
        y: (n, *outputs) numbers, NaN where not known; or (n,) whole numbers, classes, for a network of several outputs.
        groups: (n,), what belongs together, such as the person on a picture; None where each example is its own.
        task: None takes whole numbers beside several outputs for classes.
        batch: how many examples pass through at once.
        about: plain values to keep.

    Raises:
        TensorDropoutError: if something does not fit, or there are too few examples: at least nine, or groups.

    Example:
        >>> import torch, tensor_dropout as td
        >>> layer = td.CPRegression((8, 4, 4), 2, rank=6, dropout=0.8)
        >>> x = torch.randn(50, 8, 4, 4)
        >>> calibration = td.calibrate(layer, x[:40], torch.randn(40, 2))
        >>> found = td.predict(layer, x[40:], mode="exact", coverage=0.9, calibration=calibration)
        >>> bool((found.low < found.mean).all() and (found.mean < found.high).all())
        True
    """
    _check(model, x, y, task, batch)
    numbers = torch.arange(len(x)) if groups is None else _number(groups, len(x))
    count = len(numbers.unique())
    if count < LEAST:
        raise TensorDropoutError(
            f"calibrate: {count} held-out {'examples' if groups is None else 'groups'} are too few; a 90 % interval "
            f"takes at least {LEAST}; hold out more"
        )
    exact = len(randomized_layers(model)) == 1
    like = next(model.parameters(), None)
    means, variances = [], []
    for part in x.split(batch):
        part = part if like is None else part.to(like.device)
        found = predict(model, part, mode="exact" if exact else "mean", task="regression")
        means.append(found.mean.cpu())
        variances.append(None if found.std is None else found.std.square().cpu())
    mean = torch.cat(means)
    if not bool(mean.isfinite().all()):
        rows = (~mean.isfinite()).flatten(1).any(1).nonzero()[:, 0]
        raise TensorDropoutError(
            f"calibrate: the network gives NaN or infinity for {len(rows)} of {len(x)} examples, the first is number "
            f"{int(rows[0])}; look at its input"
        )
    whole = not y.is_floating_point()
    if task is None and whole and y.ndim == 2 and y.shape == mean.shape and mean.shape[1] > 1:
        raise TensorDropoutError(
            "calibrate: y has whole numbers, one for each output: give classes as (n,), or say task='regression'"
        )
    kind = task or ("classification" if whole and mean.ndim == 2 > y.ndim and mean.shape[1] > 1 else "regression")
    known = {"input_shape": list(x.shape[1:]), **(about or {})}
    if kind == "classification":
        classes = calibrate_classes(mean, y.cpu(), numbers)
        return ModelCalibration(kind, classes, fingerprint(model), False, known)
    if bool(y.isinf().any()):
        raise TensorDropoutError("calibrate: y has an infinite number; leave it out, or NaN where it is not known")
    if y.numel() != mean.numel():
        raise TensorDropoutError(f"calibrate: y is {tuple(y.shape)}, the network gives {tuple(mean.shape)}")
    spread = None if variances[0] is None else torch.cat([each for each in variances if each is not None])
    errors = calibrate_errors(y.cpu().view(mean.shape) - mean, spread, numbers, None)
    return ModelCalibration(kind, errors, fingerprint(model), spread is not None and errors.share > 0, known)


def _check(model: Any, x: Any, y: Any, task: Any, batch: Any) -> None:
    """Refuse what calibrate does not take."""
    if not isinstance(model, nn.Module):
        raise TensorDropoutError(f"calibrate: model is a torch module, got a {type(model).__name__}")
    for name, given in (("x", x), ("y", y)):
        if not isinstance(given, Tensor):
            raise TensorDropoutError(
                f"calibrate: {name} is a tensor of all held-out examples, got a {type(given).__name__}; use "
                "torch.as_tensor for arrays, and torch.cat for the batches of a loader"
            )
    if len(x) != len(y):
        raise TensorDropoutError(f"calibrate: x has {len(x)} examples, y has {len(y)}")
    if task not in (None, "classification", "regression"):
        raise TensorDropoutError(f"calibrate: task is 'classification', 'regression' or None, got {task!r}")
    if type(batch) is not int or batch < 1:
        raise TensorDropoutError(f"calibrate: batch is a number of at least 1, got {batch!r}")


def _number(groups: Any, n: int) -> Tensor:
    values = groups.tolist() if isinstance(groups, Tensor | np.ndarray) else list(groups)
    if any(value is None or value != value for value in values):
        raise TensorDropoutError("calibrate: a group is missing (None or NaN); give each example one")
    if len(values) != n:
        raise TensorDropoutError(f"calibrate: groups has one entry per example, {n}, got {len(values)}")
    known = {value: number for number, value in enumerate(dict.fromkeys(values))}
    return torch.tensor([known[value] for value in values])


# Which network it is of.


def carry_calibration(estimator: Any, network: nn.Module) -> ModelCalibration | None:
    """The calibration of a fitted estimator of ``tensor_dropout.sklearn``, for a network that ends in its layer.

    None where it was fitted without. Intervals are those of ``predict_interval``; where few samples were held out,
    which is a warning there, :func:`td.predict` refuses the coverage.
    """
    errors = getattr(estimator, "calibration_", None)
    if errors is None:
        return None
    about = {"estimator": type(estimator).__name__, "examples": len(errors.scores)}
    if isinstance(errors, ClassCalibration):
        errors = replace(errors, of_shares="ridge" in estimator.method_)
        return ModelCalibration("classification", errors, fingerprint(network), False, about)
    return ModelCalibration("regression", errors, fingerprint(network), False, about)


def carried_calibration(model: nn.Module) -> ModelCalibration | None:
    """The calibration that a network carries; DDP and ``torch.compile`` wrappers are looked through."""
    found = getattr(unwrap(model), "calibration", None)
    return found if isinstance(found, ModelCalibration) else None


_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def fingerprint(model: nn.Module) -> str:
    """Of all weights and buffers; computed again only after one was written to."""
    model = unwrap(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}
    now = tuple((tensor.data_ptr(), tensor._version, tensor.dtype) for tensor in state.values())
    before = _KNOWN.get(model)
    if before is not None and before[0] == now:
        return before[1]
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    found = digest.hexdigest()[:16]
    _KNOWN[model] = now, found
    return found
