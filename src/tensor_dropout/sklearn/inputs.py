"""What users pass, checked and as tensors: one clear sentence for what cannot be fitted."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import scipy.sparse
import torch
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError

BLOCK = 2**20
"""How many numbers are checked at once, so that a memory-mapped array is not read whole."""


def check_features(estimator: Any, X: Any, *, fitting: bool) -> Tensor:
    """X as a tensor (n, *shape) of float32 or float64 (float16 stays: it is converted block by block).

    Args:
        estimator: for messages, and for what its fit has seen.
        X: NumPy array, nested lists, a data frame, or a torch tensor.
        fitting: whether this is ``fit``; else X must be as it was there.

    Raises:
        TensorDropoutError: if it cannot be used.
    """
    name = type(estimator).__name__
    if scipy.sparse.issparse(X):
        raise TensorDropoutError(f"{name}: sparse input is not supported, got {type(X).__name__}; call X.toarray()")
    if isinstance(X, Tensor) and X.layout != torch.strided:
        raise TensorDropoutError(
            f"{name}: sparse input is not supported, got a tensor of {X.layout}; call X.to_dense()"
        )
    if not isinstance(X, Tensor) and not hasattr(X, "iloc"):  # a data frame keeps its names
        kind, X = type(X).__name__, as_array(X, "X", name)
        if X.ndim == 0:
            raise TensorDropoutError(
                f"{name}: X is an array, (n, features) or (n, channels, *space), got {kind} instead of rows"
            )
    if not isinstance(X, Tensor) and X.ndim <= 2:
        small = validate_data(estimator, X, reset=fitting, dtype=None, ensure_all_finite=False, ensure_min_samples=1)
        X = numeric(small, "X", name)
    elif not isinstance(X, Tensor):
        X = numeric(X, "X", name)
    x = as_tensor(X)
    if x.is_complex():
        raise TensorDropoutError(f"{name}: Complex data not supported, got X of {x.dtype}; pass its real parts")
    if x.ndim < 2:
        raise TensorDropoutError(
            f"{name}: X has one sample per row, (n, features) or (n, channels, *space); got the shape {tuple(x.shape)}"
        )
    if 0 in x.shape:
        raise TensorDropoutError(f"{name}: X is empty: {tuple(x.shape)}")
    if not x.is_floating_point():
        x = x.float()
    _check_finite(x, "X", name)
    if fitting:
        estimator.n_features_in_ = x.shape[1]
        estimator.input_shape_ = tuple(x.shape[1:])
        if x.ndim > 2 or isinstance(X, Tensor):
            vars(estimator).pop("feature_names_in_", None)  # of an earlier fit
    elif tuple(x.shape[1:]) != estimator.input_shape_:
        if x.ndim == 2 and len(estimator.input_shape_) == 1:
            raise TensorDropoutError(
                f"X has {x.shape[1]} features, but {name} is expecting {estimator.input_shape_[0]} features as input"
            )
        raise TensorDropoutError(
            f"{name}: fitted to samples of shape {estimator.input_shape_}, got {tuple(x.shape[1:])}"
        )
    return x


def as_array(values: Any, what: str, name: str) -> np.ndarray:
    """Nested lists, or what else NumPy takes, as an array; masked entries and rows of unequal length are refused."""
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        raise TensorDropoutError(
            f"{name}: {int(np.ma.getmaskarray(values).sum())} entries of {what} are masked; fill them, or leave those "
            "rows out"
        )
    try:
        return np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TensorDropoutError(
            f"{name}: {what} must be an array of numbers, its rows of equal shape: {error}"
        ) from None


def numeric(array: np.ndarray, what: str, name: str) -> np.ndarray:
    """An array of numbers; strings, dates, records and objects that are no numbers are refused."""
    if array.dtype.kind in "mMV":
        raise TensorDropoutError(f"{name}: {what} must hold numbers, got dtype {array.dtype}; convert it first")
    if array.dtype.kind in "OUS":
        try:
            return np.asarray(array, dtype=np.float64)
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else TensorDropoutError  # as scikit-learn's checks expect
            raise kind(
                f"{name}: {what} must hold numbers, got dtype {array.dtype}: {error}; convert it first"
            ) from None
    return array


def as_tensor(array: Any) -> Tensor:
    """A tensor that shares memory where it can; read-only memory, such as a memory map, is only read."""
    if isinstance(array, Tensor):
        return array.detach()
    array = np.asarray(array)
    if array.dtype.kind in "biu" and array.dtype not in (np.uint8, np.int8, np.int16, np.int32, np.int64, np.bool_):
        array = array.astype(np.int64)
    if any(stride < 0 for stride in array.strides) or array.dtype.byteorder == ">" or array.dtype == np.longdouble:
        array = np.ascontiguousarray(array, dtype=np.float64)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        return torch.from_numpy(array)


def refuse_sparse(name: str, y: Any) -> None:
    """Sparse targets, of SciPy or of PyTorch."""
    if scipy.sparse.issparse(y):
        raise TensorDropoutError(f"{name}: sparse targets are not supported, got {type(y).__name__}; call y.toarray()")
    if isinstance(y, Tensor) and y.layout != torch.strided:
        raise TensorDropoutError(
            f"{name}: sparse targets are not supported, got a tensor of {y.layout}; call y.to_dense()"
        )


def as_targets(name: str, y: Any) -> Tensor:
    """Numbers as a tensor; NaN where an array is masked."""
    if y is None:
        raise TensorDropoutError(f"{name} requires y to be passed, but the target y is None")
    refuse_sparse(name, y)
    if isinstance(y, np.ma.MaskedArray) and np.ma.is_masked(y):
        y = numeric(y, "y", name)
        y = np.ma.filled(y.astype(np.result_type(y, np.float32)), np.nan)
    if not isinstance(y, Tensor):
        y = numeric(as_array(y, "y", name), "y", name)
    y = as_tensor(y)
    if y.is_complex():
        raise TensorDropoutError(f"{name}: Complex data not supported, got y of {y.dtype}")
    return y


def check_targets(name: str, y: Any, n: int) -> Tensor:
    """Targets (n, *output_shape) as a tensor; NaN marks what is missing.

    Raises:
        TensorDropoutError: if they do not fit X, are no numbers, or hold nothing to learn.
    """
    y = as_targets(name, y)
    if y.ndim == 0 or len(y) != n:
        rows = "a single number" if y.ndim == 0 else f"{len(y)} rows"
        raise TensorDropoutError(
            f"{name}: Found input variables with inconsistent numbers of samples: X has {n} rows, y has {rows}"
        )
    if 0 in y.shape:
        raise TensorDropoutError(f"{name}: y is empty: {tuple(y.shape)}")
    y = y if y.dtype in (torch.float32, torch.float64) else y.double()
    if bool(y.isinf().any()):
        raise TensorDropoutError(f"{name}: y contains infinity; clean the targets, or write NaN for a missing one")
    empty = y.isnan().flatten(1).all(1) if y.ndim > 1 else y.isnan()
    if bool(empty.any()):
        rows = empty.nonzero().flatten().tolist()
        raise TensorDropoutError(
            f"{name}: Input y contains NaN: no target at all in {len(rows)} rows of y (the first are {rows[:5]}); "
            "leave those rows out of X and y"
        )
    missing = y.isnan().all(0).flatten()
    if bool(missing.any()):
        raise TensorDropoutError(
            f"{name}: column {int(missing.nonzero()[0])} of y has no target at all, only NaN; leave it out"
        )
    return y


def check_varies(name: str, y: Tensor, weights: Tensor | None = None) -> None:
    """Refuse targets that are all constant where they count: there is nothing to fit."""
    if len(y) < 2:
        raise TensorDropoutError(f"{name}: needs at least 2 samples to fit, got n_samples = {len(y)} (1 sample)")
    where = "" if weights is None else " in all rows of positive weight"
    y = y if weights is None else y[weights > 0]
    spread = y.nan_to_num(nan=float("-inf")).amax(0) - y.nan_to_num(nan=float("inf")).amin(0)
    if not bool((spread > 0).any()):
        raise TensorDropoutError(f"{name}: the target is constant{where}, there is nothing to fit; look at y")


def check_weights(name: str, weights: Any, x: Tensor) -> Tensor | None:
    """Sample weights (n,), not negative; None for none."""
    if weights is None:
        return None
    if not isinstance(weights, Tensor):
        weights = numeric(as_array(weights, "sample_weight", name), "sample_weight", name)
        weights = np.full(len(x), float(weights)) if weights.ndim == 0 else weights
        weights = column_or_1d(weights) if weights.ndim == 2 and weights.shape[1] == 1 else weights
    w = as_tensor(weights).to(x.device).double()
    if w.ndim != 1 or len(w) != len(x):
        raise TensorDropoutError(
            f"{name}: sample_weight has one number per row of X, ({len(x)},), got {tuple(w.shape)}"
        )
    if not bool(w.isfinite().all()) or bool((w < 0).any()) or not bool((w > 0).any()):
        raise TensorDropoutError(f"{name}: sample_weight must be finite, not negative, and not all zero")
    if int((w > 0).sum()) < 2:
        raise TensorDropoutError(f"{name}: sample_weight is positive in 1 row, and a fit needs at least 2")
    return w


def check_labels(name: str, what: str, labels: np.ndarray) -> None:
    """Refuse classes or groups that are missing or of several types, which have no order."""
    if labels.dtype.kind not in "Of":
        return
    missing = [label for label in labels.tolist() if is_missing(label)]
    if missing:
        raise TensorDropoutError(f"{name}: {what} holds {missing[0]}; leave out such rows")
    kinds = sorted({type(label).__name__ for label in labels.tolist()})
    if len(kinds) > 1:
        every = "classes" if what == "y" else what
        raise TensorDropoutError(f"{name}: {what} mixes {', '.join(kinds)}; give all {every} names, or all numbers")


def check_groups(name: str, groups: Any, n: int) -> np.ndarray | None:
    """What must not be split, one entry per row; None for none."""
    if groups is None:
        return None
    groups = as_array(groups.cpu() if isinstance(groups, Tensor) else groups, "groups", name)
    if groups.ndim != 1 or len(groups) != n:
        raise TensorDropoutError(f"{name}: groups has one entry per row of X, ({n},), got {groups.shape}")
    check_labels(name, "groups", groups)
    return groups


def check_folds(name: str, setting: str, n_folds: int, n: int, groups: np.ndarray | None) -> None:
    """Refuse more folds than there are rows or groups to deal out."""
    units = n if groups is None else len(np.unique(groups))
    if n_folds > units:
        what = "rows" if groups is None else "groups"
        raise TensorDropoutError(
            f"{name}: {setting}={n_folds} folds need as many {what}, got {units} (n_samples={n}); lower {setting}"
        )


def check_classes(name: str, setting: str, n_folds: int, classes: np.ndarray, groups: np.ndarray | None) -> None:
    """Refuse more folds than the smallest class has samples; where groups are dealt out, than the largest has."""
    counts = np.unique(classes, return_counts=True)[1]
    which, most = ("smallest", int(counts.min())) if groups is None else ("largest", int(counts.max()))
    if n_folds > most:
        raise TensorDropoutError(
            f"{name}: {setting}={n_folds} folds need as many samples of {'every' if groups is None else 'a'} class, "
            f"the {which} class has {most}; lower {setting}, or merge classes"
        )


def check_coverage(name: str, coverage: Any) -> None:
    """Refuse what is no share between 0 and 1."""
    if isinstance(coverage, bool) or not isinstance(coverage, float | np.floating) or not 0 < coverage < 1:
        raise TensorDropoutError(f"{name}: coverage is a number between 0 and 1, got {coverage!r}")


def check_points(name: str, points: Any, outputs: int) -> list[tuple[int, ...]]:
    """Which outputs are the coordinates of each point, two or three; None for 0 and 1, 2 and 3, …."""
    pairs: list[Any] = [(k, k + 1) for k in range(0, outputs, 2)]
    if points is not None:
        given = points.tolist() if isinstance(points, np.ndarray | Tensor) else points
        rows = given if isinstance(given, list | tuple) else [given]
        pairs = [tuple(row) if isinstance(row, list | tuple) else () for row in rows]
    numbers = all(isinstance(k, int | np.integer) and 0 <= k < outputs for pair in pairs for k in pair)
    apart = all(len(set(pair)) == len(pair) for pair in pairs)
    if {len(pair) for pair in pairs} not in ({2}, {3}) or not numbers or not apart:
        raise TensorDropoutError(
            f"{name}: points are pairs, or triples, of the outputs 0 to {outputs - 1}, got "
            f"{f'{outputs} outputs' if points is None else repr(points)}"
        )
    return pairs


def is_missing(value: Any) -> bool:
    """Whether it is None, NaN, or what pandas has in their place."""
    return (
        value is None or type(value).__name__ in ("NAType", "NaTType") or (isinstance(value, float) and value != value)
    )


def check_pair(name: str, fold: int, pair: Any, n: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows of one fold, given as numbers or as masks."""
    wanted = f"{name}: cv holds pairs of row numbers, (train, test)"
    try:
        train, test = (np.asarray(rows) for rows in pair)
    except (TypeError, ValueError):
        raise TensorDropoutError(f"{wanted}, got {type(pair).__name__} as fold {fold}") from None
    numbers = []
    for rows in (train, test):
        if rows.dtype == bool and rows.shape != (n,):
            raise TensorDropoutError(f"{name}: fold {fold} of cv is a mask of {rows.shape}, but X has {n} rows")
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        if rows.ndim != 1 or (rows.dtype.kind not in "iu" and rows.size):
            raise TensorDropoutError(f"{wanted}, got {rows.dtype} of shape {rows.shape} in fold {fold}")
        unknown = rows[(rows < 0) | (rows >= n)]
        if unknown.size:
            raise TensorDropoutError(
                f"{name}: fold {fold} of cv names row {unknown[0]}, but X has the rows 0 to {n - 1}"
            )
        numbers.append(rows.astype(np.int64))
    return numbers[0], numbers[1]


def check_counts(name: str, setting: str, weights: Tensor | None, splits: list[tuple[np.ndarray, np.ndarray]]) -> None:
    """Refuse folds without two rows of positive weight to fit on, or without one to judge on."""
    if weights is None:
        return
    for split in splits:
        train, test = (int((weights[rows] > 0).sum()) for rows in split)
        if train < 2 or test == 0:
            raise TensorDropoutError(
                f"{name}: sample_weight is 0 in all rows of a fold, or in all but one of the others; leave such rows "
                f"out, or lower {setting}"
            )


def _check_finite(x: Tensor, what: str, name: str) -> None:
    start = 0
    for rows in x.split(max(1, BLOCK // max(1, x[0].numel()))):
        wrong = ~rows.flatten(1).isfinite().all(1)
        if bool(wrong.any()):
            row = start + int(wrong.nonzero()[0])
            kind = "NaN" if bool(x[row].isnan().any()) else "infinity"
            raise TensorDropoutError(
                f"{name}: Input {what} contains {kind}, first in row {row}; leave such rows out of X and y, or fill "
                "them"
            )
        start += len(rows)
