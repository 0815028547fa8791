"""Handwritten digits: 1,797 real images of 8×8 pixels that scikit-learn brings with it."""

from __future__ import annotations

import torch

from tensor_dropout.data.augment import RandomShift
from tensor_dropout.data.base import Data, StandardizeImages, TensorSplit, import_extra, split_tensors


def load_digits(*, augment: bool = True) -> Data:
    """The digits, split once 60/20/20 with the same share of each class: the split of ``reproduce digits``.

    Args:
        augment: shift by at most one pixel, in training.

    Returns:
        Images (n, 1, 8, 8) in uint8 (0..16); ``prepare`` gives each mean 0 and variance 1.

    Raises:
        TensorDropoutError: if scikit-learn is missing.

    Example:
        >>> data = load_digits()
        >>> [len(part) for part in (data.train, data.validation, data.test)]
        [1077, 360, 360]
    """
    datasets = import_extra("sklearn.datasets", "digits", "digits")
    selection = import_extra("sklearn.model_selection", "digits", "digits")
    pixels, labels = datasets.load_digits(return_X_y=True)
    names = [f"digit-{i:04d}" for i in range(len(labels))]
    whole = TensorSplit(torch.tensor(pixels).to(torch.uint8).view(-1, 1, 8, 8), torch.tensor(labels).long(), names)
    rest, test = selection.train_test_split(range(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, validation = selection.train_test_split(rest, test_size=0.25, stratify=labels[rest], random_state=0)
    parts = split_tensors(whole, *(torch.tensor(rows) for rows in (train, validation, test)))
    return Data(
        name="digits",
        task="classification",
        train=parts[0],
        validation=parts[1],
        test=parts[2],
        input_shape=(1, 8, 8),
        outputs=10,
        classes=[str(digit) for digit in range(10)],
        target=None,
        prepare=StandardizeImages(),
        augment=RandomShift(1, fill="min") if augment else None,
        simulated=False,
        provenance="Optical Recognition of Handwritten Digits (Alpaydin, Kaynak; UCI, CC BY 4.0), from scikit-learn.",
        bounds=(0.0, 16.0),
    )
