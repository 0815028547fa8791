"""Images, volumes, arrays and data sets as tensors, one sample at a time.

A file that cannot be read is no exception here but an item with a problem, so that all of them can be named at once.
"""

from __future__ import annotations

import hashlib
import io
import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import decode_picture, describe_failure, read_volume

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
VOLUMES = (".nii", ".nii.gz")
NUMBERS = "biuf"
"""The kinds of numbers in NumPy that can be samples."""
NAMED = 5
"""How many samples are named in a message."""


class Item(NamedTuple):
    """One sample: its tensor (None if it was not needed, or cannot be read), the hash of its content, the problem."""

    x: Tensor | None
    digest: str = ""
    problem: str = ""


class Source:
    """Samples that can be read one by one."""

    in_threads = False
    """Whether several may be read at once."""
    description: dict[str, Any]
    """How they are prepared, as JSON types."""

    def __len__(self) -> int:
        """How many samples."""
        raise NotImplementedError

    def read(self, number: int, is_known: Callable[[str], bool] | None) -> Item:
        """One sample.

        Args:
            number: which one.
            is_known: whether the sample with this hash need not be decoded; None computes no hash.
        """
        raise NotImplementedError

    def name(self, number: int) -> str:
        """What to call a sample in messages."""
        return f"X[{number}]"


@dataclass(frozen=True)
class Preparation:
    """How files become inputs; see ``FeatureMaps``."""

    size: int | tuple[int, ...] = 224
    mean: Any = "imagenet"
    std: Any = "imagenet"

    def checked(self, where: str) -> Preparation:
        """With plain values.

        Raises:
            TensorDropoutError: for sizes that are none.
        """
        sizes = (self.size,) if isinstance(self.size, int) else tuple(self.size) if np.iterable(self.size) else ()
        if not 1 <= len(sizes) <= 3 or not all(type(size) is int and size > 0 for size in sizes):
            raise TensorDropoutError(
                f"{where}: size is one number, (height, width), or three numbers for volumes; got {self.size!r}"
            )
        return Preparation(
            sizes if len(sizes) > 1 else sizes[0], _numbers("mean", self.mean, where), _numbers("std", self.std, where)
        )


def _numbers(which: str, values: Any, where: str) -> Any:
    if values is None or (isinstance(values, str) and values == "imagenet"):
        return values
    try:
        numbers = tuple(float(value) for value in np.atleast_1d(values))
    except (TypeError, ValueError):
        numbers = ()
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)) or (which == "std" and min(numbers) <= 0):
        raise TensorDropoutError(f"{where}: {which} is 'imagenet', None, or one or three numbers, got {values!r}")
    return numbers


class Files(Source):
    """Image files and NIfTI volumes."""

    in_threads = True

    def __init__(self, paths: Sequence[Any], preparation: Preparation, where: str) -> None:
        self.paths = [Path(path) for path in paths]
        missing = [str(path) for path in self.paths if not path.is_file()]
        if missing:
            raise TensorDropoutError(f"{where}: {name_some(missing)} of {len(paths)} files: no such file")
        self.preparation, self.where = preparation.checked(where), where
        kinds = {is_volume(path) for path in self.paths}
        if len(kinds) > 1:
            raise TensorDropoutError(f"{where}: X has both images and NIfTI volumes; transform them apart")
        self.volumes = kinds.pop()
        size = self.preparation.size
        if not self.volumes and not isinstance(size, int) and len(size) == 3:
            raise TensorDropoutError(f"{where}: size of images is one number, or (height, width); got {size}")
        self.description = {"files": "volumes" if self.volumes else "images", **vars(self.preparation)}
        _import_reader(self.volumes, where)

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, number: int) -> str:
        """The path."""
        return str(self.paths[number])

    def read(self, number: int, is_known: Callable[[str], bool] | None) -> Item:
        """Read and prepare one file."""
        digest, path = "", self.paths[number]
        try:
            data = path.read_bytes()
            if is_known is not None and is_known(digest := hashlib.sha256(data).hexdigest()):
                return Item(None, digest)
            prepare = prepare_volume if self.volumes else prepare_image
            return Item(prepare(io.BytesIO(data), self.preparation), digest)
        except Exception as error:  # PIL and nibabel raise many kinds for damaged files
            return Item(None, digest, describe_failure(error).replace(str(path), "it"))


class Arrays(Source):
    """Samples (C, H, W[, D]) that are prepared: an array, a tensor, or a list of them."""

    def __init__(self, arrays: Any, where: str) -> None:
        self.arrays, self.description = arrays, {"files": "none"}
        first = tuple(arrays[0].shape)
        for array in arrays if isinstance(arrays, list) else arrays[:1]:
            check_sample(array, where)
        if isinstance(arrays, np.ndarray) and arrays.flags.c_contiguous and arrays.dtype.isnative:
            self.arrays = _share(arrays)
        if isinstance(arrays, list):
            wrong = [n for n, array in enumerate(arrays) if tuple(array.shape) != first]
            if wrong:
                raise TensorDropoutError(
                    f"{where}: the samples have several sizes: X[0] has {first}, X[{wrong[0]}] "
                    f"{tuple(arrays[wrong[0]].shape)}; bring them to one size"
                )

    def __len__(self) -> int:
        return len(self.arrays)

    def read(self, number: int, is_known: Callable[[str], bool] | None) -> Item:
        """One row."""
        return _hashed(as_sample(self.arrays[number]), is_known)


def check_sample(sample: Any, where: str) -> None:
    """Refuse what is no prepared input.

    Raises:
        TensorDropoutError: for other axes than (channels, height, width[, depth]), and for pixels up to 255.
    """
    shape = tuple(sample.shape)
    if len(shape) not in (3, 4) or 0 in shape:
        raise TensorDropoutError(
            f"{where}: samples are prepared inputs (channels, height, width[, depth]), but here one has {shape}; "
            "an array of them is (n, channels, height, width[, depth])"
        )
    if isinstance(sample, np.ndarray) and sample.dtype.kind not in NUMBERS:
        raise TensorDropoutError(f"{where}: samples hold numbers, but these are {sample.dtype}")
    if str(sample.dtype).removeprefix("torch.") == "uint8":
        raise TensorDropoutError(
            f"{where}: samples are taken as the network takes them, but these are uint8 pixels; scale and standardize "
            "them first (or convert them to float32, if the network takes numbers up to 255)"
        )


class Samples(Source):
    """A torch ``Dataset`` whose items are tensors, or tuples that begin with one."""

    def __init__(self, dataset: Any, where: str) -> None:
        self.dataset, self.where, self.description = dataset, where, {"files": "none"}
        self.first: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int, is_known: Callable[[str], bool] | None) -> Item:
        """One item."""
        item = self.dataset[number]
        sample = item[0] if isinstance(item, tuple | list) else item
        if not isinstance(sample, Tensor | np.ndarray):
            raise TensorDropoutError(
                f"{self.where}: an item of the Dataset is a tensor, or a tuple that begins with one; item {number} is "
                f"a {type(sample).__name__}; give the Dataset a transform that makes tensors"
            )
        check_sample(sample, self.where)
        self.first = self.first or tuple(sample.shape)
        if tuple(sample.shape) != self.first:
            raise TensorDropoutError(
                f"{self.where}: the samples have several sizes: {self.first}, and {tuple(sample.shape)} for item "
                f"{number}; bring them to one size"
            )
        return _hashed(as_sample(sample), is_known)


def open_source(X: Any, preparation: Preparation, where: str) -> Source:
    """The samples of X.

    Raises:
        TensorDropoutError: for what holds no samples.
    """
    if isinstance(X, str | os.PathLike):
        raise TensorDropoutError(f"{where}: X is a list of paths; for a folder: sorted(Path({str(X)!r}).glob('*.jpg'))")
    if isinstance(X, IterableDataset) or not hasattr(X, "__len__") or getattr(X, "ndim", 1) == 0:
        what = f"{type(X).__name__}{' of no axis' if hasattr(X, 'ndim') else ''}"
        raise TensorDropoutError(
            f"{where}: X is a list of paths, an array, a tensor, or a Dataset with a length; got a {what}"
        )
    if len(X) == 0:
        raise TensorDropoutError(f"{where}: X is empty: 0 samples")
    if isinstance(X, Dataset):
        return Samples(X, where)
    if isinstance(X, list | tuple) and all(isinstance(each, Tensor | np.ndarray) and each.ndim > 1 for each in X):
        return Arrays(list(X), where)
    if isinstance(X, Tensor):
        return Arrays(X.detach(), where)
    array = X if isinstance(X, np.ndarray) else _as_array(X, where)
    if array.dtype.kind in "OU" and array.ndim == 1 and all(isinstance(each, str | os.PathLike) for each in array):
        return Files(array.tolist(), preparation, where)
    if array.dtype.kind not in NUMBERS:
        raise TensorDropoutError(f"{where}: X holds paths or numbers, got {array.dtype} of shape {array.shape}")
    return Arrays(array, where)


def _as_array(X: Any, where: str) -> np.ndarray:
    try:
        if isinstance(X, list | tuple) and any(isinstance(each, os.PathLike) for each in X):
            return np.array([str(each) if isinstance(each, os.PathLike) else each for each in X], dtype=object)
        return np.asarray(X)
    except (TypeError, ValueError) as error:
        raise TensorDropoutError(f"{where}: X is a list of paths or an array of numbers: {error}") from None


def as_sample(values: Any) -> Tensor:
    """A tensor on the CPU; it may share the numbers, which nobody writes to."""
    if isinstance(values, Tensor):
        return values.detach().cpu()
    array = np.asarray(values)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _share(array: np.ndarray) -> Tensor:
    """A tensor on the same memory, be it read-only: nobody writes to it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        return torch.from_numpy(array)


def _hashed(x: Tensor, is_known: Callable[[str], bool] | None) -> Item:
    if is_known is None:
        return Item(x)
    content = hashlib.sha256(f"{x.dtype}{tuple(x.shape)}".encode())
    content.update(x.contiguous().view(torch.uint8).numpy().data)
    digest = content.hexdigest()
    return Item(None if is_known(digest) else x, digest)


def is_volume(path: Path) -> bool:
    """Whether a file is NIfTI, by its ending."""
    return path.name.lower().endswith(VOLUMES)


def _import_reader(volumes: bool, where: str) -> None:
    try:
        if volumes:
            import nibabel  # noqa: F401
        else:
            import PIL.Image  # noqa: F401
    except ModuleNotFoundError as error:
        package = "nibabel" if volumes else "pillow"
        raise TensorDropoutError(
            f"{where}: {package} is not installed, which reads these files; install it with: pip install {package}"
        ) from error


def prepare_image(stream: BinaryIO, preparation: Preparation) -> Tensor:
    """A picture, upright, as RGB, resized (bilinear, with antialias) and standardized: (3, h, w)."""
    from PIL.Image import Resampling

    size = preparation.size
    height, width = (size, size) if isinstance(size, int) else size
    resized = decode_picture(stream).resize((width, height), Resampling.BILINEAR)
    pixels = np.asarray(resized).transpose(2, 0, 1).astype(np.float32, order="C")
    mean, std = (
        np.reshape(IMAGENET[which] if value == "imagenet" else neutral if value is None else value, (-1, 1, 1))
        for which, value, neutral in (("mean", preparation.mean, 0.0), ("std", preparation.std, 1.0))
    )
    pixels /= np.float32(255)  # in NumPy: each of the reading threads would start torch's own threads
    pixels -= mean.astype(np.float32)
    pixels /= std.astype(np.float32)
    return torch.from_numpy(pixels)


def prepare_volume(stream: BinaryIO, preparation: Preparation) -> Tensor:
    """A NIfTI volume, its axes in the order RAS: (channels, x, y, z).

    Standardized by its own mean and standard deviation, or by the numbers given; resized (trilinear) only if the size
    has three numbers.
    """
    volume = read_volume(stream)
    if not isinstance(preparation.size, int) and len(preparation.size) == 3:
        volume = torch.nn.functional.interpolate(volume[None], preparation.size, mode="trilinear")[0]
    for which, value in (("mean", preparation.mean), ("std", preparation.std)):
        if isinstance(value, tuple) and len(value) not in (1, len(volume)):
            raise ValueError(f"{which} has {len(value)} numbers, but the volume has {len(volume)} channel(s)")
    own = {"mean": float(volume.mean()), "std": max(float(volume.std()), 1e-12)}
    mean, std = (
        torch.tensor(own[which] if value == "imagenet" else neutral if value is None else value).reshape(-1, 1, 1, 1)
        for which, value, neutral in (("mean", preparation.mean, 0.0), ("std", preparation.std, 1.0))
    )
    return ((volume - mean) / std).contiguous()


def name_some(names: Sequence[str]) -> str:
    """The first few, and how many more.

    Example:
        >>> name_some(["a", "b"]), name_some("abcdefg")
        ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
