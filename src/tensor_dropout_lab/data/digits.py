"""Handwritten digits: 1,797 real images of 8×8 pixels that scikit-learn brings with it."""

from __future__ import annotations

import torch

from tensor_dropout_lab.data.augment import RandomShift
from tensor_dropout_lab.data.base import Data, StandardizeImages, TensorSplit, split_tensors
from tensor_dropout_lab.data.limits import Parts, limit
from tensor_dropout_lab.extras import import_extra


def load_digits(
    *,
    seed: int = 0,
    augment: bool = True,
    train_size: float | None = None,
    label_noise: float = 0.0,
    unknown_classes: int = 0,
) -> Data:
    """The digits, split once 60/20/20 with the same share of each class: the split of ``reproduce digits``.

    Args:
        seed: of the three limits below; the split itself is fixed.
        augment: shift by at most one pixel, in training.
        train_size: fraction (or number) of training images that are used, the same share of each class; None takes all.
        label_noise: fraction of the training labels that become another class.
        unknown_classes: so many of the last classes are left out; their test images are to be told from the others.

    Returns:
        Images (n, 1, 8, 8) in uint8 (0..16); ``prepare`` gives each mean 0 and variance 1.

    Raises:
        TensorDropoutError: if scikit-learn is missing, or a limit is out of its range.

    Example:
        >>> data = load_digits()
        >>> [len(part) for part in (data.train, data.validation, data.test)]
        [1077, 360, 360]
    """
    datasets = import_extra("sklearn.datasets", "digits")
    selection = import_extra("sklearn.model_selection", "digits")
    pixels, labels = datasets.load_digits(return_X_y=True)
    names = [f"digit-{i:04d}" for i in range(len(labels))]
    whole = TensorSplit(torch.tensor(pixels).to(torch.uint8).view(-1, 1, 8, 8), torch.tensor(labels).long(), names)
    rest, test = selection.train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, validation = selection.train_test_split(rest, test_size=0.25, stratify=labels[rest], random_state=0)
    learned, chosen_by, reported = split_tensors(whole, *(torch.tensor(rows) for rows in (train, validation, test)))
    parts = limit(
        Parts(learned, chosen_by, reported, [str(digit) for digit in range(10)]),
        train_size=train_size,
        label_noise=label_noise,
        unknown_classes=unknown_classes,
        seed=seed,
        what="digits",
    )
    return Data(
        name="digits",
        task="classification",
        train=parts.train,
        validation=parts.validation,
        test=parts.test,
        input_shape=(1, 8, 8),
        outputs=len(parts.classes),
        classes=parts.classes,
        target=None,
        prepare=StandardizeImages(),
        augment=RandomShift(1, fill="min") if augment else None,
        simulated=False,
        provenance="Optical Recognition of Handwritten Digits (Alpaydin, Kaynak; UCI, CC BY 4.0), from scikit-learn.",
        bounds=(0.0, 16.0),
        unknown=parts.unknown,
    )
