"""A harder task from the same images: fewer of them, wrong labels, classes that training never sees."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.base import TensorSplit, count_share, hold_out, split_tensors


class Parts(NamedTuple):
    """The splits of a classification, and the names of the classes that the network knows.

    Attributes:
        train: to learn from.
        validation: to choose by, or None.
        test: to report on.
        classes: of these three.
        unknown: test images of classes that are in none of them, or None; their targets are -1.
    """

    train: TensorSplit
    validation: TensorSplit | None
    test: TensorSplit
    classes: list[str]
    unknown: TensorSplit | None = None


def limit(
    parts: Parts, *, train_size: float | None, label_noise: float, unknown_classes: int, seed: int, what: str
) -> Parts:
    """Leave out classes, then training images, then replace training labels; each choice follows from the seed.

    Args:
        parts: as loaded.
        train_size: a fraction, or a number, of training images that stay, the same share of every class; 1.0 or None:
            all.
        label_noise: the fraction of training labels that become another class, any with equal probability.
        unknown_classes: how many of the last classes are left out; their test images become ``unknown``.
        seed: of the choices.
        what: the data set's name, for messages.

    Returns:
        The limited parts. Labels of validation and test images stay as they are.

    Raises:
        TensorDropoutError: if a number is out of its range.

    Example:
        >>> images = TensorSplit(torch.zeros(6, 1, 8, 8), torch.tensor([0, 0, 1, 1, 2, 2]), list("abcdef"))
        >>> parts = Parts(images, None, images, ["cat", "dog", "elk"])
        >>> some = limit(parts, train_size=2, label_noise=0.0, unknown_classes=1, seed=0, what="example")
        >>> some.train.targets.tolist(), some.classes, some.unknown.names
        ([0, 1], ['cat', 'dog'], ['e', 'f'])
    """
    if unknown_classes:
        parts = _leave_out(parts, unknown_classes, what)
    train = parts.train
    if train_size is not None and not (isinstance(train_size, float) and train_size == 1):
        _, chosen = hold_out(train.targets, train_size, seed, f"{what}: train_size")
        if len(chosen) == 0:
            raise TensorDropoutError(
                f"{what}: train_size={train_size!r} leaves no image to learn from; leave it out to take all"
            )
        train = split_tensors(train, chosen)[0]
    if label_noise:
        count = count_share(label_noise, len(train), f"{what}: label_noise") if label_noise < 1 else -1
        if count < 0:
            raise TensorDropoutError(f"{what}: label_noise is a fraction in [0, 1), not {label_noise!r}")
        train = TensorSplit(train.inputs, _mislabel(train.targets, count, len(parts.classes), seed), train.names)
    return parts._replace(train=train)


def _leave_out(parts: Parts, count: int, what: str) -> Parts:
    known = len(parts.classes) - count
    if count < 0 or known < 2:
        raise TensorDropoutError(
            f"{what}: unknown_classes is between 0 and {len(parts.classes) - 2}, so that two classes stay, not {count}"
        )

    def rows(split: TensorSplit, wanted: bool) -> Tensor:
        return ((split.targets < known) == wanted).nonzero().flatten()

    train, test = (split_tensors(split, rows(split, True))[0] for split in (parts.train, parts.test))
    validation = parts.validation and split_tensors(parts.validation, rows(parts.validation, True))[0]
    others = split_tensors(parts.test, rows(parts.test, False))[0]
    unknown = TensorSplit(others.inputs, torch.full_like(others.targets, -1), others.names)
    return Parts(train, validation, test, parts.classes[:known], unknown)


def _mislabel(targets: Tensor, count: int, classes: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 1)  # other numbers than those that chose the images
    rows = torch.randperm(len(targets), generator=generator)[:count]
    shift = torch.randint(1, classes, (count,), generator=generator)
    wrong = targets.clone()
    wrong[rows] = (targets[rows] + shift) % classes
    return wrong
