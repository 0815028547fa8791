"""Fewer training images, wrong labels, unknown classes."""

from __future__ import annotations

import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data import TensorSplit, load_data
from tensor_dropout_lab.data.limits import Parts, limit


def make_parts(n=100, classes=5):
    """Every image holds its own number, so that a row can be traced."""
    images = torch.arange(n, dtype=torch.float32).reshape(n, 1, 1, 1)
    split = TensorSplit(images, torch.arange(n) % classes, [f"image-{k}" for k in range(n)])
    return Parts(split, split, split, [f"class-{k}" for k in range(classes)])


def narrow(parts, **options):
    given = {"train_size": None, "label_noise": 0.0, "unknown_classes": 0, "seed": 0, "what": "example"}
    return limit(parts, **{**given, **options})


def test_without_limits_nothing_changes():
    parts = make_parts()
    assert narrow(parts) == parts
    assert narrow(parts, train_size=1.0) == parts  # as in scikit-learn: all


@pytest.mark.parametrize(("size", "count"), [(0.1, 10), (25, 25), (1, 1)])
def test_a_smaller_training_set_is_balanced_and_made_of_its_images(size, count):
    train = narrow(make_parts(), train_size=size).train
    assert len(train) == count
    counts = train.targets.bincount(minlength=5)
    assert counts.max() - counts.min() <= 1
    numbers = train.inputs.flatten().long()
    assert torch.equal(numbers % 5, train.targets)
    assert train.names == [f"image-{k}" for k in numbers.tolist()]


def test_the_seed_chooses_the_images_and_the_labels():
    def draw(seed):
        train = narrow(make_parts(), train_size=40, label_noise=0.5, seed=seed).train
        return train.names, train.targets.tolist()

    assert draw(0) == draw(0)
    assert draw(0)[0] != draw(1)[0]
    assert draw(0)[1] != draw(1)[1]


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_so_many_labels_are_wrong_and_only_those_of_training(share):
    parts = make_parts(1000)
    changed = narrow(parts, label_noise=share)
    wrong = changed.train.targets != parts.train.targets
    assert int(wrong.sum()) == 1000 * share
    assert set(changed.train.targets[wrong].tolist()) == {0, 1, 2, 3, 4}
    assert torch.equal(changed.test.targets, parts.test.targets)
    assert torch.equal(changed.validation.targets, parts.validation.targets)
    assert torch.equal(parts.train.targets, torch.arange(1000) % 5)  # nothing is changed in place


def test_unknown_classes_are_in_no_other_part():
    parts = narrow(make_parts(), unknown_classes=2)
    assert parts.classes == ["class-0", "class-1", "class-2"]
    for split in (parts.train, parts.validation, parts.test):
        assert len(split) == 60
        assert split.targets.max() == 2
    assert len(parts.unknown) == 40
    assert set((parts.unknown.inputs.flatten().long() % 5).tolist()) == {3, 4}
    assert parts.unknown.targets.unique().tolist() == [-1]


def test_the_limits_come_one_after_another():
    parts = narrow(make_parts(1000), unknown_classes=2, train_size=0.5, label_noise=0.5)
    assert len(parts.train) == 300
    assert parts.train.targets.max() == 2
    assert int((parts.train.targets != parts.train.inputs.flatten().long() % 5).sum()) == 150


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_size": 0}, "train_size=0 leaves no image"),
        ({"train_size": 0.0001}, "train_size=0.0001 leaves no image"),
        ({"train_size": 100}, "train_size: a fraction in .* or a number below 100 is expected, not 100"),
        ({"label_noise": 1.5}, "label_noise is a fraction in .*, not 1.5"),
        ({"label_noise": -0.1}, "label_noise: a fraction"),
        ({"unknown_classes": 4}, "unknown_classes is between 0 and 3, so that two classes stay, not 4"),
        ({"unknown_classes": -1}, "unknown_classes is between 0 and 3"),
    ],
)
def test_mistakes_are_said(options, message):
    with pytest.raises(TensorDropoutError, match=message):
        narrow(make_parts(), **options)


def test_digits_with_limits():
    whole = load_data("digits")
    data = load_data("digits", train_size=70, label_noise=0.1, unknown_classes=3, seed=4)
    assert (data.outputs, len(data.classes), len(data.train)) == (7, 7, 70)
    assert len(data.test) + len(data.unknown) == len(whole.test)
    assert whole.unknown is None
