"""CIFAR-10 and CIFAR-100 from the official python files.

The files are pickles. They are read only if their MD5 is the official one, and even then by an unpickler that knows
arrays, lists, dictionaries, strings and numbers and nothing else.
"""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.atomic_files import replacing
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.augment import RandomFlip, RandomShift
from tensor_dropout_lab.data.base import (
    Data,
    StandardizeChannels,
    StandardizeImages,
    TensorSplit,
    choose,
    hold_out,
    split_tensors,
)
from tensor_dropout_lab.data.limits import Parts, limit

DATA_VARIABLE = "TENSOR_DROPOUT_DATA"
"""The environment variable that names the folder when ``root`` is not given."""


@dataclass(frozen=True)
class Official:
    """One of the two data sets as published: the files, their MD5s and the keys in them."""

    title: str
    folder: str
    url: str
    archive_md5: str
    train: dict[str, str]
    test: dict[str, str]
    meta: dict[str, str]
    labels: bytes
    label_names: bytes


OFFICIAL: dict[str, Official] = {
    "cifar10": Official(
        title="CIFAR-10",
        folder="cifar-10-batches-py",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        archive_md5="c58f30108f718f92721af3b95e74349a",
        train={
            "data_batch_1": "c99cafc152244af753f735de768cd75f",
            "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
            "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
            "data_batch_4": "634d18415352ddfa80567beed471001a",
            "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
        },
        test={"test_batch": "40351d587109b95175f43aff81a1287e"},
        meta={"batches.meta": "5ff9c542aee3614f3951f8cda6e48888"},
        labels=b"labels",
        label_names=b"label_names",
    ),
    "cifar100": Official(
        title="CIFAR-100",
        folder="cifar-100-python",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        archive_md5="eb9058c3a382ffc7106e4002c42a8d85",
        train={"train": "16019d7e3df5f24257cddd939b257f8d"},
        test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
        meta={"meta": "7973b15100ade9c7d40fb424638fde48"},
        labels=b"fine_labels",
        label_names=b"fine_label_names",
    ),
}


def load_cifar10(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    validation: float = 0.1,
    normalize: Literal["image", "channel"] = "image",
    augment: bool = True,
    train_size: float | None = None,
    label_noise: float = 0.0,
    unknown_classes: int = 0,
    download: bool = False,
) -> Data:
    """CIFAR-10: see :func:`load_cifar`.

    Args:
        root: the folder ``cifar-10-batches-py`` or the one that holds it; by default $TENSOR_DROPOUT_DATA.
        seed: of the choice of validation images, and of the three limits below.
        validation: fraction (or number) of the training images held out for choosing; 0 trains on all.
        normalize: "image" (the paper's: each image by its own mean and variance) or "channel".
        augment: crop 32×32 at random from the image with 4 pixels around it, and flip, in training.
        train_size: fraction (or number) of training images that are used, the same share of each class; None takes all.
        label_noise: fraction of the training labels that become another class.
        unknown_classes: so many of the last classes are left out; their test images are to be told from the others.
        download: fetch the official archive (170 MB) if the files are not there.
    """
    limits = {"train_size": train_size, "label_noise": label_noise, "unknown_classes": unknown_classes}
    return load_cifar("cifar10", root, seed, validation, normalize, augment, download, limits)


def load_cifar100(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    validation: float = 0.1,
    normalize: Literal["image", "channel"] = "image",
    augment: bool = True,
    train_size: float | None = None,
    label_noise: float = 0.0,
    unknown_classes: int = 0,
    download: bool = False,
) -> Data:
    """CIFAR-100 with its 100 fine classes: see :func:`load_cifar`.

    Args:
        root: the folder ``cifar-100-python`` or the one that holds it; by default $TENSOR_DROPOUT_DATA.
        seed: of the choice of validation images, and of the three limits below.
        validation: fraction (or number) of the training images held out for choosing; 0 trains on all.
        normalize: "image" (the paper's: each image by its own mean and variance) or "channel".
        augment: crop 32×32 at random from the image with 4 pixels around it, and flip, in training.
        train_size: fraction (or number) of training images that are used, the same share of each class; None takes all.
        label_noise: fraction of the training labels that become another class.
        unknown_classes: so many of the last classes are left out; their test images are to be told from the others.
        download: fetch the official archive (169 MB) if the files are not there.
    """
    limits = {"train_size": train_size, "label_noise": label_noise, "unknown_classes": unknown_classes}
    return load_cifar("cifar100", root, seed, validation, normalize, augment, download, limits)


def load_cifar(
    name: str,
    root: str | Path | None,
    seed: int,
    validation: float,
    normalize: Literal["image", "channel"],
    augment: bool,
    download: bool,
    limits: dict[str, Any],
) -> Data:
    """Read the official files, check them, and hold out the validation images, the same share of every class.

    Raises:
        TensorDropoutError: if a file is missing, is not the official one, or contains more than plain data.
    """
    choose(name, "normalize", normalize, ("image", "channel"))
    official = OFFICIAL[name]
    folder = find_folder(name, root, download)
    classes = [label.decode() for label in read_file(folder, official.meta)[0][official.label_names]]
    whole = merge_batches(read_file(folder, official.train), official.labels)
    kept, held = hold_out(whole.targets, validation, seed, f"{name}: validation")
    train, validated = split_tensors(whole, kept, held)
    test = merge_batches(read_file(folder, official.test), official.labels)
    parts = limit(Parts(train, validated, test, classes), **limits, seed=seed, what=name)
    by_channel = normalize == "channel"
    return Data(
        name=name,
        task="classification",
        train=parts.train,
        validation=parts.validation,
        test=parts.test,
        input_shape=(3, 32, 32),
        outputs=len(parts.classes),
        classes=parts.classes,
        target=None,
        prepare=StandardizeChannels(*measure_channels(parts.train.inputs)) if by_channel else StandardizeImages(),
        augment=nn.Sequential(RandomShift(4), RandomFlip(-1)) if augment else None,
        simulated=False,
        provenance=f"{official.title} (Krizhevsky, 2009); no licence stated, research use.",
        bounds=(0.0, 255.0),
        unknown=parts.unknown,
    )


def measure_channels(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of (n, C, H, W) images of dtype uint8."""
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in images.unbind(1)]).double()
    values = torch.arange(256, dtype=torch.float64)
    share = counts / counts.sum(1, keepdim=True)
    mean = share @ values
    variance = share @ values.square() - mean.square()
    return mean.tolist(), variance.sqrt().tolist()


# Files.


def find_folder(name: str, root: str | Path | None, download: bool) -> Path:
    """The folder with the official files: ``root`` itself or in it; downloaded only when asked.

    Raises:
        TensorDropoutError: if it is not there, with the layout that is expected.
    """
    official = OFFICIAL[name]
    given = root if root is not None else os.environ.get(DATA_VARIABLE)
    if given is None:
        raise TensorDropoutError(
            f"{name}: no folder given; set root (or ${DATA_VARIABLE}). {_describe_layout(official)}"
        )
    first = next(iter(official.train))
    base = Path(given).expanduser()
    inner = base / official.folder
    for folder in (inner, base):
        if (folder / first).is_file():
            return folder
    if download:
        download_files(name, base)
        return inner
    raise TensorDropoutError(f"{name}: {base} has no {official.folder}/{first}. {_describe_layout(official)}")


def _describe_layout(official: Official) -> str:
    files = ",".join([*official.train, *official.test, *official.meta])
    return (
        f"Expected: ROOT/{official.folder}/{{{files}}}, the files of {official.url}; "
        "unpack them there, or set download=true"
    )


def read_file(folder: Path, wanted: dict[str, str]) -> list[dict[Any, Any]]:
    """The contents of some official files: name -> MD5.

    Raises:
        TensorDropoutError: if one is missing, has another MD5, or is not plain data.
    """
    contents = []
    for name, md5 in wanted.items():
        path = folder / name
        if not path.is_file():
            raise TensorDropoutError(f"cifar: {path} is missing; the folder needs {', '.join(wanted)}")
        content = path.read_bytes()
        check_md5(content, md5, str(path))
        contents.append(unpickle_plain(content, str(path)))
    return contents


def check_md5(content: bytes, expected: str, path: str) -> None:
    """Refuse a file that is not the official one.

    Raises:
        TensorDropoutError: if the MD5 differs.
    """
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != expected:
        raise TensorDropoutError(
            f"cifar: {path} has MD5 {digest}, the official file has {expected}: it is damaged or another version; "
            "remove it and unpack the official archive again (or set download=true)"
        )


def merge_batches(batches: list[dict[Any, Any]], labels: bytes) -> TensorSplit:
    """One split (n, 3, 32, 32) from the contents of some files."""
    images = np.concatenate([batch[b"data"].build() for batch in batches]).reshape(-1, 3, 32, 32)
    targets = torch.tensor([label for batch in batches for label in batch[labels]], dtype=torch.int64)
    names = [name.decode() for batch in batches for name in batch[b"filenames"]]
    return TensorSplit(torch.from_numpy(images), targets, names)


def download_files(name: str, root: Path) -> None:
    """Fetch the official archive and write the files that are needed, each checked, under ``root``.

    Raises:
        TensorDropoutError: if it cannot be fetched, or anything in it has another MD5 than the official one.
    """
    official = OFFICIAL[name]
    try:
        with urllib.request.urlopen(official.url, timeout=60) as answer:
            archive = answer.read()
    except OSError as error:
        raise TensorDropoutError(f"{name}: {official.url} cannot be fetched: {error}") from error
    check_md5(archive, official.archive_md5, official.url)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for file, md5 in {**official.train, **official.test, **official.meta}.items():
            member = tar.extractfile(f"{official.folder}/{file}")
            assert member is not None
            content = member.read()
            check_md5(content, md5, f"{official.url}: {file}")
            with replacing(root / official.folder / file) as temporary:
                temporary.write_bytes(content)


# The restricted unpickler.


class PickledDtype:
    """Stands in for ``numpy.dtype`` while a pickle is read: numbers only."""

    def __init__(self, code: bytes | str, *_: Any) -> None:
        self.dtype = np.dtype(code.decode() if isinstance(code, bytes) else code)
        if self.dtype.kind not in "biuf":
            raise pickle.UnpicklingError(f"an array of {self.dtype}; only numbers are read")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order: Any = state[1].decode() if isinstance(state[1], bytes) else state[1]
        self.dtype = self.dtype.newbyteorder(order)


class PickledArray:
    """Stands in for ``numpy.ndarray`` while a pickle is read: its bytes, which :meth:`build` turns into an array."""

    def __init__(self, *_: Any) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state

    def build(self) -> np.ndarray:
        """The array."""
        _, shape, dtype, fortran, content = self.state
        array = np.frombuffer(content, dtype.dtype)
        return array.reshape(shape, order="F" if fortran else "C")


_STAND_INS = {
    ("numpy.core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy", "ndarray"): PickledArray,
    ("numpy", "dtype"): PickledDtype,
}


class PlainUnpickler(pickle.Unpickler):
    """Reads arrays, lists, dictionaries, strings and numbers; nothing in a pickle can name any other code.

    Even for arrays it runs none of numpy's own reconstruction: stand-ins take the bytes.
    """

    def find_class(self, module: str, name: str) -> Any:
        """The stand-in for a name in the pickle.

        Raises:
            pickle.UnpicklingError: for every name but those of numpy arrays.
        """
        if (module, name) not in _STAND_INS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}")
        return _STAND_INS[module, name]


def unpickle_plain(content: bytes, path: str) -> dict[Any, Any]:
    """The dictionary in a pickle of plain data; its arrays are :class:`PickledArray`.

    Raises:
        TensorDropoutError: if it contains anything else, or is damaged. Nothing in it was executed.

    Example:
        >>> unpickle_plain(pickle.dumps({"labels": [1, 2]}), "file")
        {'labels': [1, 2]}
    """
    try:
        batch = PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:  # a damaged pickle can raise anything
        raise TensorDropoutError(
            f"cifar: {path} is refused: {error}; only arrays, lists, dictionaries, strings and numbers are read"
        ) from error
    if not isinstance(batch, dict):
        raise TensorDropoutError(f"cifar: {path} is refused: a dictionary is expected, not {type(batch).__name__}")
    return batch
