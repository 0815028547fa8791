"""The calibration of a network: held-out examples say how far its predictions are off."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tensor_dropout.atomic_files import replacing
from tensor_dropout.calibration.classification import ClassCalibration, calibrate_classes
from tensor_dropout.calibration.conformal import Quantile, groups_needed
from tensor_dropout.calibration.regression import Calibration, calibrate_errors
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.layers.randomized import randomized_layers
from tensor_dropout.prediction import Prediction, predict

FORMAT_VERSION = 1
_HEADER = "tensor_dropout_calibration"
LEAST = groups_needed(0.9)
"""With fewer groups not even a 90 % interval is finite."""
BATCH = 256

Task = Literal["classification", "regression"]


@dataclass(frozen=True, eq=False)
class ModelCalibration:
    """What held-out examples said of a network.

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

    def check(self, model: nn.Module, operation: str) -> None:
        """Refuse another network than the one that was calibrated.

        Raises:
            TensorDropoutError: if its weights are not those.
        """
        if fingerprint(model) != self.model:
            raise TensorDropoutError(
                f"{operation}: this calibration is of another network, or {type(model).__name__} was changed since; "
                "calibrate it anew"
            )

    def complete(self, found: Prediction, coverage: float | None) -> Prediction:
        """The prediction with its intervals or sets, and with calibrated probabilities."""
        if isinstance(self.errors, ClassCalibration):
            probs = self.errors.probabilities(found.mean)
            found = found._replace(probs=probs, entropy=torch.special.entr(probs).sum(-1))
            if coverage is None:
                return found
            sets, quantile = self.errors.sets(found.mean, coverage)
            self.check_reached(quantile, coverage, "predict")
            return found._replace(sets=sets)
        if coverage is None:
            return found
        quantile = self.errors.quantile(coverage)
        self.check_reached(quantile, coverage, "predict")
        h = found.std.square() if self.uses_masks and found.std is not None else None
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
    known = about or {}
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

_KNOWN: WeakKeyDictionary[nn.Module, tuple[Any, str]] = WeakKeyDictionary()


def fingerprint(model: nn.Module) -> str:
    """Of all weights and buffers; computed again only after one was written to."""
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


# In files.


def save_calibration(calibration: ModelCalibration, path: str | os.PathLike[str]) -> None:
    """Write a calibration to a file of its own, beside the weights. It appears whole or not at all.

    Args:
        calibration: it.
        path: where; ``calibration.safetensors`` is the customary name.
    """
    tensors, plain = {}, {}
    for name, value in calibration.errors.as_dict().items():
        if isinstance(value, Tensor):
            tensors[name] = value.contiguous()
        else:
            plain[name] = value
    config = {
        "version": FORMAT_VERSION, "task": calibration.task, "model": calibration.model,
        "uses_masks": calibration.uses_masks, "about": calibration.about, "errors": plain,
    }  # fmt: skip
    target = Path(path)
    if not target.parent.is_dir():
        raise TensorDropoutError(f"save_calibration: the folder {target.parent} does not exist; make it first")
    with replacing(target) as temporary:
        save_file(tensors, str(temporary), metadata={_HEADER: json.dumps(config)})


def load_calibration(path: str | os.PathLike[str]) -> ModelCalibration:
    """Read what :func:`save_calibration` wrote; nothing in it can execute code.

    Raises:
        TensorDropoutError: if the file is not such a one, is damaged, or of a newer version.
    """
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(_HEADER)
        if header is None:
            raise TensorDropoutError(f"load_calibration: {path} is no calibration; td.load reads models")
        config = json.loads(header)
        if config["version"] != FORMAT_VERSION:
            raise TensorDropoutError(
                f"load_calibration: {path} has version {config['version']}, this library reads {FORMAT_VERSION}; "
                "upgrade it"
            )
        values = {**config["errors"], **load_file(path)}
        kind = ClassCalibration if config["task"] == "classification" else Calibration
        errors = kind.from_dict(values)
        return ModelCalibration(config["task"], errors, config["model"], config["uses_masks"], config["about"])
    except OSError as error:
        raise TensorDropoutError(f"load_calibration: {path} cannot be read: {error}") from error
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, TensorDropoutError):
            raise
        raise TensorDropoutError(f"load_calibration: {path} is damaged: {error}") from error
