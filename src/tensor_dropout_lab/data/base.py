"""What a data set is: splits, the way from stored numbers to network inputs, and where it came from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.outcome_arrays import Task

if TYPE_CHECKING:
    import numpy as np

    from tensor_dropout_lab.explanation_figures import View
    from tensor_dropout_lab.point_pictures import Panel


@dataclass(frozen=True, repr=False)
class TensorSplit:
    """Examples that lie in memory, or on the device, as a whole.

    Attributes:
        inputs: (N, C, *size) as stored, e.g. uint8.
        targets: (N,) int64 classes, or (N,) or (N, T) float32.
        names: one per example, for records.

    Example:
        >>> split = TensorSplit(torch.zeros(3, 1, 8, 8), torch.tensor([0, 1, 1]), ["a", "b", "c"])
        >>> len(split), split.to("cpu").names[2]
        (3, 'c')
        >>> split
        TensorSplit(3 examples, 1×8×8 float32)
    """

    inputs: Tensor
    targets: Tensor
    names: list[str]

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        shape, dtype = "×".join(map(str, self.inputs.shape[1:])), str(self.inputs.dtype).removeprefix("torch.")
        return f"TensorSplit({len(self)} examples, {shape} {dtype})"

    def to(self, device: torch.device | str) -> TensorSplit:
        """The same split with its tensors on the device."""
        return TensorSplit(self.inputs.to(device), self.targets.to(device), self.names)


class StreamSplit(Dataset[tuple[Tensor, Tensor]]):
    """Examples that are read one by one, in worker processes; subclasses say how in :meth:`read`.

    Args:
        names: one per example, for records.
        targets: (N,) int64 classes, or (N,) or (N, T) float32.
    """

    def __init__(self, names: list[str], targets: Tensor) -> None:
        self.names = names
        self.targets = targets
        self.draw = (0, 0)
        self.whole: StreamSplit | None = None  # this split before examples that cannot be read were left out

    def set_epoch(self, epoch: int, seed: int) -> None:
        """What random changes of an example depend on, beside its number: so that a run can go on in an epoch."""
        self.draw = (seed, epoch)

    def generator(self, index: int) -> torch.Generator:
        """The random numbers of one example in this epoch of this run."""
        seed, epoch = self.draw
        return torch.Generator().manual_seed(((seed * 1_000_003 + epoch) * 1_000_033 + index) % 2**63)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read(index), self.targets[index]

    def read(self, index: int) -> Tensor:
        """The input of this example, as stored: (C, *size)."""
        raise NotImplementedError

    def check(self) -> None:
        """Read every example once, before a training whose end needs them all; here nothing is expected to fail.

        Raises:
            TensorDropoutError: if one cannot be read.
        """


Split = TensorSplit | StreamSplit


@dataclass(frozen=True, repr=False)
class Data:
    """A data set, ready for a training loop.

    A batch goes through ``prepare`` (always) and ``augment`` (in training only), both on the device.

    Attributes:
        name: the name it is loaded by.
        task: "classification" or "regression".
        train: the examples to learn from.
        validation: the examples to choose by, or None.
        test: the examples to report on, or None.
        input_shape: (C, *size) after ``prepare``.
        outputs: the number of classes, or of targets.
        classes: their names, or None.
        target: the name of the regression target, or None; several are joined by ", ", in the order of the outputs.
        prepare: a stored batch (B, C, *size) of any dtype -> float32 network input. Differentiable for a float
            batch in stored units, so that attacks can go through it. By default it changes nothing.
        augment: a prepared batch -> a changed one of the same shape, or None. A :class:`JointAugment` takes the
            targets too, and changes both.
        simulated: whether the inputs were made up; must be said wherever results are shown.
        provenance: one sentence with source and licence, shown with every result.
        voxel: edges of a voxel in mm, if the inputs are scans that are not resampled; else None.
        bounds: the smallest and largest stored value that an input can have, or None.
        unknown: test examples of classes that the network was not trained for, or None.
        points: which outputs are the coordinates of a point, as fractions of the image's size: (x, y) or (x, y, z).
        groups: what each example belongs to, such as a person, by its name; None where each is its own.
    """

    name: str
    task: Task
    train: Split
    validation: Split | None
    test: Split | None
    input_shape: tuple[int, ...]
    outputs: int
    classes: list[str] | None = None
    target: str | None = None
    prepare: nn.Module = field(default_factory=nn.Identity)
    augment: nn.Module | None = None
    simulated: bool = False
    provenance: str = "Source and licence are those of its owner."
    voxel: tuple[float, ...] | None = None
    bounds: tuple[float, float] | None = None
    unknown: Split | None = None
    points: Sequence[tuple[int, ...]] = ()
    groups: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        parts = {"train": self.train, "validation": self.validation, "test": self.test, "unknown": self.unknown}
        counts = ", ".join(f"{name}: {len(split)}" for name, split in parts.items() if split is not None)
        shape = "×".join(map(str, self.input_shape))
        return f"Data({self.name!r}, {self.task}, {shape} → {self.outputs}, {counts})"

    @property
    def target_names(self) -> list[str]:
        """The name of each output of a regression."""
        return name_targets(self.target, self.outputs)

    @property
    def point_names(self) -> list[list[str]]:
        """The names of the coordinates of each point."""
        return [[self.target_names[column] for column in point] for point in self.points]


def name_targets(target: str | None, outputs: int) -> list[str]:
    """The name of each output of a regression; numbers, from 0 on, where ``target`` does not name them all.

    Args:
        target: as in :class:`Data`; one output has all of it as its name.
        outputs: their number.

    Example:
        >>> name_targets("age, height", 2), name_targets("age, years", 1), name_targets(None, 2)
        (['age', 'height'], ['age, years'], ['0', '1'])
    """
    names = [target or "target"] if outputs == 1 else (target or "").split(", ")
    return names if len(names) == outputs else [str(k) for k in range(outputs)]


class FileReader(Protocol):
    """Reads single files for a network that was trained on a data set of files: ``tensor-dropout predict`` asks it.

    Args:
        input_shape: of the network.
        options: those that the network's data was loaded with.
        root: the folder of that data.
        described: what the run says about its data.
    """

    endings: tuple[str, ...]
    """Of the files it reads."""

    def __init__(
        self, input_shape: tuple[int, ...], options: dict[str, Any], root: str | None, described: dict[str, Any]
    ) -> None: ...

    def find(self, folder: Path) -> list[Path]:
        """The files to predict in a folder."""
        ...

    def read(self, path: Path) -> Tensor:
        """The network's input, (C, *size), prepared as in training."""
        ...

    def view(self, path: Path, x: Tensor, grid: Tensor) -> list[View]:
        """The input x (1, C, *size) as it is drawn, under the contributions (*grid) of its positions."""
        ...

    def find_units(self, targets: Sequence[str]) -> dict[str, str]:
        """The units of those targets that have a known one."""
        ...


@runtime_checkable
class PointReader(FileReader, Protocol):
    """A reader of files for a network some of whose targets are points, as fractions of the image's size."""

    def find_points(self, targets: Sequence[str]) -> list[tuple[int, ...]]:
        """Which targets are the coordinates of each point: (x, y) or (x, y, z)."""
        ...

    def measure(self, path: Path) -> tuple[float, ...]:
        """What a fraction of each axis is multiplied by to be in its unit."""
        ...

    def show(self, path: Path, predicted: np.ndarray, ellipses: np.ndarray | None) -> list[Panel]:
        """The file with points (P, axes) on it, as fractions, and matrices (P, axes, axes) of ellipses around them."""
        ...


# From stored numbers to network inputs.


class StandardizeImages(nn.Module):
    """Centre and scale every image by its own mean and standard deviation, over all channels and positions.

    This is the paper's normalisation. It undoes any gain and offset of a stored image. An image that is constant up to
    the rounding of float32 becomes 0.

    Example:
        >>> images = StandardizeImages()(torch.tensor([[[[0, 255]]], [[[7, 7]]]], dtype=torch.uint8))
        >>> images.flatten(1)
        tensor([[-1.,  1.],
                [ 0.,  0.]])
    """

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *size) of any dtype -> float32 of mean 0 and variance 1 per image."""
        mean, scale = self.measure(images)
        return (images.float() - mean) * scale

    def measure(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What is subtracted, and what the rest is multiplied by: (B, 1, 1, …) each."""
        variance, mean = torch.var_mean(images.float(), dim=tuple(range(1, images.ndim)), correction=0, keepdim=True)
        rounding = (16 * torch.finfo(torch.float32).eps * mean) ** 2
        varies = variance > rounding
        return mean, torch.where(varies, torch.rsqrt(torch.where(varies, variance, 1.0)), 0.0)


class StandardizeChannels(nn.Module):
    """Centre and scale every channel by fixed numbers, in stored units.

    Args:
        mean: one per channel.
        std: one per channel.

    Example:
        >>> StandardizeChannels([10.0], [2.0])(torch.tensor([[[[10, 14]]]], dtype=torch.uint8)).flatten()
        tensor([0., 2.])
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean, dtype=torch.float32))
        self.register_buffer("scale", 1 / torch.tensor(std, dtype=torch.float32))

    def forward(self, images: Tensor) -> Tensor:
        """(B, C, *size) of any dtype -> float32."""
        mean, scale = self.measure(images)
        return (images.float() - mean) * scale

    def measure(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """What is subtracted, and what the rest is multiplied by: (1, C, 1, …) each."""
        shape = (1, -1) + (1,) * (images.ndim - 2)
        return self.mean.view(shape), self.scale.view(shape)


class JointAugment(nn.Module, ABC):
    """Random changes of inputs and of their targets, such as points that move with the pixels."""

    @abstractmethod
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """(B, C, *size), (B,) or (B, T) -> the same shapes. A target that becomes NaN does not count in this step."""


# Splits.


def hold_out(strata: Tensor, share: float, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """Rows to keep and rows to hold out, with the same share of every stratum as far as numbers allow.

    Args:
        strata: (n,) integers: classes, or bins of a target.
        share: a fraction below 1, or a number of rows.
        seed: of the choice within the strata.
        what: for the message, e.g. "cifar10: validation".

    Returns:
        Both as sorted int64 rows.

    Raises:
        TensorDropoutError: if the share is negative or leaves no row.

    Example:
        >>> kept, held = hold_out(torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]), 0.25, 0, "example")
        >>> len(kept), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])[held].tolist()
        (6, [0, 1])
    """
    n = len(strata)
    count = count_share(share, n, what)
    steps = torch.arange(n + 1) * count // n
    chosen = torch.zeros(n, dtype=torch.bool)
    chosen[_order_by_stratum(strata, seed)] = steps.diff() == 1
    rows = torch.arange(n)
    return rows[~chosen], rows[chosen]


def deal_folds(strata: Tensor, folds: int, seed: int) -> Tensor:
    """The fold of every row, (n,) in 0..folds-1: equal numbers of every stratum in every fold, as far as they allow.

    Example:
        >>> strata = torch.tensor([0, 0, 1, 1])
        >>> sorted(strata[deal_folds(strata, 2, seed=0) == 0].tolist())
        [0, 1]
    """
    fold = torch.empty(len(strata), dtype=torch.int64)
    fold[_order_by_stratum(strata, seed)] = torch.arange(len(strata)) % folds
    return fold


def _order_by_stratum(strata: Tensor, seed: int) -> Tensor:
    """Rows in the order of their strata, shuffled within each."""
    shuffled = torch.randperm(len(strata), generator=torch.Generator().manual_seed(seed))
    return shuffled[strata[shuffled].argsort(stable=True)]


def bin_targets(targets: Tensor, bins: int = 10) -> Tensor:
    """Quantile bins of a continuous target, (n,) int64: strata for a split that is balanced in it.

    Example:
        >>> bin_targets(torch.tensor([30.0, 20.0, 80.0, 50.0]), bins=2).tolist()
        [0, 0, 1, 1]
    """
    ranks = targets.argsort(stable=True).argsort()
    return ranks * bins // max(len(targets), 1)


def count_share(share: float, n: int, what: str) -> int:
    """How many of n a fraction below 1, or a number, stands for; at least one stays."""
    number = isinstance(share, int | float) and not isinstance(share, bool)
    fits = number and 0 <= share < n and (share < 1 or share == int(share))
    count = 0 if not fits else round(share * n) if share < 1 else int(share)
    if not fits or count >= n:
        raise TensorDropoutError(f"{what}: a fraction in [0, 1) or a number below {n} is expected, not {share!r}")
    return count


def split_groups(
    groups: Sequence[str],
    values: Tensor,
    *,
    folds: int | None,
    fold: int,
    test: float,
    validation: float,
    seed: int,
    what: str,
    noun: str = "groups",
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows to train on, validate on and test on; all rows of one group fall into the same part.

    Groups are dealt out evenly over the quantiles of their mean value.

    Args:
        groups: (n) the group of every row.
        values: (n,) float64, what the parts are balanced in; NaN does not count.
        folds: the number of folds; None splits by the fractions.
        fold: the one that is tested.
        test: fraction (or number) of the groups to test on; not used with folds.
        validation: fraction (or number) of the groups that are not tested.
        seed: of the choice.
        what: the data set, for messages.
        noun: what a group is, for messages.

    Raises:
        TensorDropoutError: if the numbers do not fit.

    Example:
        >>> ages = torch.tensor([30.0, 31, 50, 70, 71], dtype=torch.float64)
        >>> settings = dict(folds=None, fold=0, test=1, validation=1, seed=0, what="example")
        >>> [part.tolist() for part in split_groups(["a", "a", "b", "c", "c"], ages, **settings)]
        [[0, 1], [2], [3, 4]]
    """
    names = sorted(set(groups))
    number = {name: i for i, name in enumerate(names)}
    owner = torch.tensor([number[name] for name in groups])
    known = values.isfinite()
    sums = torch.zeros(len(names), dtype=torch.float64).index_add(0, owner[known], values[known])
    means = sums / owner[known].bincount(minlength=len(names)).clamp(min=1)
    if folds is None:
        if fold != 0:
            raise TensorDropoutError(f"{what}: fold={fold!r} needs folds, their number; such as folds=5")
        rest, tested = hold_out(bin_targets(means), test, seed, f"{what}: test")
    else:
        _check_folds(folds, fold, len(names), what, noun)
        dealt = deal_folds(bin_targets(means, max(1, len(names) // folds)), folds, seed)
        rest, tested = (dealt != fold).nonzero().flatten(), (dealt == fold).nonzero().flatten()
    kept, held = hold_out(bin_targets(means[rest]), validation, seed, f"{what}: validation")
    train, validated, tests = (torch.isin(owner, part).nonzero().flatten() for part in (rest[kept], rest[held], tested))
    return train, validated, tests


def _check_folds(folds: Any, fold: Any, count: int, what: str, noun: str) -> None:
    if not isinstance(folds, int) or not 2 <= folds <= count:
        raise TensorDropoutError(f"{what}: folds must be 2 to {count}, the number of {noun}, not {folds!r}")
    if not isinstance(fold, int) or not 0 <= fold < folds:
        raise TensorDropoutError(f"{what}: fold must be 0 to {folds - 1}, not {fold!r}")


def split_tensors(whole: TensorSplit, *rows: Tensor) -> list[Any]:
    """One split per tensor of rows; None where there are no rows."""
    return [
        TensorSplit(whole.inputs[part], whole.targets[part], [whole.names[i] for i in part.tolist()])
        if len(part)
        else None
        for part in rows
    ]


# A data set of the user's.


def check_data(data: Data) -> None:
    """Refuse parts that do not fit together, and targets that no loss can take; of the inputs, one is prepared.

    Raises:
        TensorDropoutError: with the name of the data set and of the part.
    """
    if data.task not in get_args(Task):
        raise TensorDropoutError(f"{data.name}: task must be one of {', '.join(get_args(Task))}, not {data.task!r}")
    require_positive(data.name, "outputs", data.outputs)
    if data.task == "regression" and len(set(data.target_names)) < data.outputs:
        raise TensorDropoutError(f"{data.name}: the targets are {data.target}; give each a name of its own")
    parts = {"train": data.train, "validation": data.validation, "test": data.test, "unknown": data.unknown}
    for name, part in parts.items():
        if part is None and name != "train":
            continue
        what = f"{data.name}: the {name} part"
        if not isinstance(part, TensorSplit | StreamSplit):
            raise TensorDropoutError(f"{what} must be a TensorSplit or a StreamSplit, not {type(part).__name__}")
        _check_rows(what, part)
        if name != "unknown":  # of classes that there are no outputs for
            _check_targets(what, part.targets, data)
        if isinstance(part, TensorSplit) and len(part):
            _check_shape(what, part, data)


def _check_rows(what: str, part: Split) -> None:
    """As many names as targets and inputs."""
    counts = {"names": len(part.names), "targets": len(part.targets)}
    if isinstance(part, TensorSplit):
        counts["inputs"] = len(part.inputs)
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        raise TensorDropoutError(f"{what} has {listed}; each example needs one of each")


def _check_targets(what: str, targets: Tensor, data: Data) -> None:
    """Classes that there are outputs for, or finite numbers."""
    shape = tuple(targets.shape)
    if data.task == "classification":
        if targets.dtype != torch.int64 or targets.ndim != 1:
            raise TensorDropoutError(f"{what} has targets of {shape}, {targets.dtype}; classes are (N,) of torch.int64")
        if len(targets) and (targets.min() < 0 or targets.max() >= data.outputs):
            raise TensorDropoutError(
                f"{what} has classes from {int(targets.min())} to {int(targets.max())}; with outputs={data.outputs} "
                f"they go from 0 to {data.outputs - 1}"
            )
        return
    if not targets.is_floating_point() or math.prod(shape[1:]) != data.outputs or targets.ndim > 2:
        raise TensorDropoutError(
            f"{what} has targets of {shape}, {targets.dtype}; of a regression with outputs={data.outputs} they are "
            f"{'(N,)' if data.outputs == 1 else f'(N, {data.outputs})'} of torch.float32"
        )
    bad = (~torch.isfinite(targets)).reshape(len(targets), -1).any(1)
    if bad.any():
        raise TensorDropoutError(
            f"{what} has targets that are not finite in {int(bad.sum())} of {len(bad)} rows, the first in row "
            f"{int(bad.int().argmax())}; leave these examples out"
        )


def _check_shape(what: str, part: TensorSplit, data: Data) -> None:
    """That of the first input, prepared."""
    with torch.no_grad():
        shape = tuple(data.prepare(part.inputs[:1]).shape[1:])
    if shape != tuple(data.input_shape):
        raise TensorDropoutError(
            f"{what} has inputs of {shape} after prepare, and input_shape is {tuple(data.input_shape)}; make them equal"
        )


# Checks that several data sets share.


def check_size(what: str, size: Any, axes: int | None = None) -> tuple[Any, ...]:
    """A size as a tuple of positive ints."""
    known = isinstance(size, Sequence) and not isinstance(size, str)
    if not known or not size or any(not isinstance(cells, int) or cells < 1 for cells in size):
        raise TensorDropoutError(f"{what}: a size is a list of positive whole numbers, not {size!r}")
    if axes is not None and len(size) != axes:
        raise TensorDropoutError(f"{what}: a size of {axes} numbers is expected, not {tuple(size)}")
    return tuple(size)


def require_positive(what: str, name: str, value: Any) -> None:
    """Refuse anything but a positive whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise TensorDropoutError(f"{what}: {name} must be a positive whole number, not {value!r}")


def choose(what: str, name: str, value: Any, known: Sequence[str | None]) -> str:
    """The value, if it is a known one."""
    if value not in known:
        raise TensorDropoutError(f"{what}: {name} must be one of {', '.join(map(str, known))}, not {value!r}")
    return cast(str, value)
