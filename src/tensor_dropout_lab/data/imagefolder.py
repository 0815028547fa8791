"""Pictures in folders named by class, as ImageNet is unpacked: decoded one by one, in worker processes."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import decode_picture
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.data.base import (
    Data,
    StandardizeChannels,
    StandardizeImages,
    StreamSplit,
    choose,
    hold_out,
    require_positive,
)
from tensor_dropout_lab.data.image_files import PICTURES, list_folder
from tensor_dropout_lab.extras import import_extra

if TYPE_CHECKING:
    from tensor_dropout_lab.explanation_figures import View

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".webp")
LAYOUT = "Expected: ROOT/train/CLASS/*.JPEG and ROOT/val/CLASS/*.JPEG (or .jpg, .png, .bmp, .webp), as ImageNet"

_IMAGENET_MEAN = (123.675, 116.28, 103.53)  # of the channels of ImageNet, on 0..255
_IMAGENET_STD = (58.395, 57.12, 57.375)

_LARGEST_RATIO = 4 / 3  # of the sides of a random crop
_TRIES = 10

Box = tuple[float, float, float, float]


def load_imagefolder(
    *,
    root: str | Path | None = None,
    seed: int = 0,
    size: int = 224,
    resize: int = 256,
    validation: float = 0.02,
    normalize: Literal["channel", "image"] = "channel",
    augment: bool = True,
    skip_unreadable: bool = False,
) -> Data:
    """Pictures of any size: ``train`` to learn from, ``val`` to test on.

    Pictures in folders inside of a class's belong to that class; hidden files and folders are left out. A picture is
    turned as its EXIF orientation says, and what is transparent lies on white.

    Args:
        root: the folder that holds ``train`` and ``val``.
        seed: of the choice of validation images.
        size: the side of the square that the network sees.
        resize: the shorter side of a picture for evaluation, before its centre is cropped.
        validation: fraction (or number) of the training images held out for choosing; 0 trains on all.
        normalize: "channel" (ImageNet's means and deviations) or "image" (each by its own).
        augment: crop a random part of random size and shape, and flip, in training; in the worker processes.
        skip_unreadable: warn of pictures that cannot be read instead of stopping. Those to validate and test on are all
            decoded at the start (ImageNet's take about 2 ms each, on every core) and the unreadable left out, so that
            results have the names of what was seen. Of those to train on, which may be millions, none is read before
            it is needed; the next readable picture then stands in. A run that stopped at one goes on with it.

    Returns:
        Streams of uint8 pictures (3, size, size).

    Raises:
        TensorDropoutError: if the folder has another layout, or Pillow is missing.
    """
    import_extra("PIL.Image", "imagefolder")
    require_positive("imagefolder", "size", size)
    require_positive("imagefolder", "resize", resize)
    choose("imagefolder", "normalize", normalize, ("channel", "image"))
    if resize < size:
        raise TensorDropoutError(f"imagefolder: resize ({resize}) must not be below size ({size})")
    base = find_root(root)
    classes = list_classes(base / "train")
    files, labels = list_pictures(base / "train", classes)
    kept, held = hold_out(labels, validation, seed, "imagefolder: validation")
    settings: dict[str, Any] = {"root": base, "size": size, "resize": resize}

    def choose_rows(rows: Tensor) -> tuple[list[str], Tensor]:
        return [files[i] for i in rows.tolist()], labels[rows]

    def stream(names: list[str], targets: Tensor) -> PictureStream:
        whole = PictureStream(names, targets, **settings)
        if not skip_unreadable:
            return whole
        kept = PictureStream(*keep_readable(base, names, targets), **settings)
        kept.whole = whole
        return kept

    return Data(
        name="imagefolder",
        task="classification",
        train=PictureStream(*choose_rows(kept), crop_randomly=augment, skip_unreadable=skip_unreadable, **settings),
        validation=stream(*choose_rows(held)) if len(held) else None,
        test=stream(*list_pictures(base / "val", classes)),
        input_shape=(3, size, size),
        outputs=len(classes),
        classes=classes,
        target=None,
        prepare=build_prepare(normalize),
        augment=None,
        simulated=False,
        provenance=f"Pictures of the folder {base.resolve().name}; source and licence are those of its owner.",
        bounds=(0.0, 255.0),
    )


def build_prepare(normalize: str) -> nn.Module:
    """Of pictures in 0..255: "channel" (ImageNet's means and deviations) or "image" (each by its own)."""
    return StandardizeImages() if normalize == "image" else StandardizeChannels(_IMAGENET_MEAN, _IMAGENET_STD)


# Listing.


def find_root(root: str | Path | None) -> Path:
    """The folder, if it has the layout.

    Raises:
        TensorDropoutError: if it has not.
    """
    if root is None:
        raise TensorDropoutError(f"imagefolder: no folder given; set root. {LAYOUT}")
    base = Path(root).expanduser()
    for part in (base, base / "train", base / "val"):
        if not part.is_dir():
            raise TensorDropoutError(f"imagefolder: there is no folder {part}. {LAYOUT}")
    return base


def list_classes(folder: Path) -> list[str]:
    """The names of the folders in it, sorted: class 0 is the first.

    Raises:
        TensorDropoutError: if there are fewer than two.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise TensorDropoutError(f"imagefolder: {folder} has {len(classes)} class folders, at least 2 needed. {LAYOUT}")
    return classes


def list_pictures(folder: Path, classes: list[str]) -> tuple[list[str], Tensor]:
    """Paths relative to the root, sorted within each class, and the classes as (n,) int64.

    Raises:
        TensorDropoutError: if the folders are not those of the classes, or a class has no picture.
    """
    folders = list_classes(folder)
    for verb, names in (
        ("has folders that train has not", set(folders) - set(classes)),
        ("lacks", set(classes) - set(folders)),
    ):
        if names:
            raise TensorDropoutError(f"imagefolder: {folder} {verb}: {', '.join(sorted(names)[:5])}. {LAYOUT}")
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        pictures = list_folder(folder / name, SUFFIXES)
        if not pictures:
            raise TensorDropoutError(f"imagefolder: {folder / name} has no picture ({', '.join(SUFFIXES)}). {LAYOUT}")
        files += [f"{folder.name}/{name}/{file}" for file in pictures]
        labels += [label] * len(pictures)
    return files, torch.tensor(labels)


def keep_readable(root: Path, files: list[str], targets: Tensor) -> tuple[list[str], Tensor]:
    """The files that can be decoded, and their targets; warns of the others.

    Raises:
        TensorDropoutError: if there is none.
    """
    errors = find_unreadable(root, files)
    if not errors:
        return files, targets
    file, error = next(iter(errors.items()))
    reason = f"the first is {root / file} ({error})"
    if len(errors) == len(files):
        raise TensorDropoutError(f"imagefolder: not one of {len(files)} pictures can be read; {reason}; replace them")
    warnings.warn(
        f"imagefolder: {len(errors)} of {len(files)} pictures cannot be read and are left out; {reason}", stacklevel=4
    )
    kept = [row for row, file in enumerate(files) if file not in errors]
    return [files[row] for row in kept], targets[kept]


def find_unreadable(root: Path, files: list[str]) -> dict[str, str]:
    """Which files cannot be decoded, and why; on every core, because a header does not tell of a truncated file."""

    def find_error(file: str) -> str | None:
        try:
            decode_picture(root / file)
        except Exception as error:  # decoders raise anything on damaged files
            return str(error) or type(error).__name__
        return None

    errors = {}
    with show_progress("checking pictures", len(files)) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
        for file, error in zip(files, pool.map(find_error, files), strict=True):
            if error is not None:
                errors[file] = error
            advance(1)
    return errors


# Reading.


class PictureStream(StreamSplit):
    """Pictures that are decoded when they are asked for.

    Args:
        files: paths relative to the root; also the names.
        targets: (n,) int64.
        root: the folder they are in.
        size: the side of the result.
        resize: the shorter side before the centre is cropped; not used with ``crop_randomly``.
        crop_randomly: a random part and a random flip instead of the centre.
        skip_unreadable: in training, go on to the next picture if one cannot be read. Its target then counts, not the
            first one's; the name stays, so this is not for examples that are recorded by name.
    """

    def __init__(
        self,
        files: list[str],
        targets: Tensor,
        *,
        root: Path,
        size: int,
        resize: int,
        crop_randomly: bool = False,
        skip_unreadable: bool = False,
    ) -> None:
        super().__init__(files, targets)
        self.root, self.size, self.resize = root, size, resize
        self.crop_randomly, self.skip_unreadable = crop_randomly, skip_unreadable
        self._warned: set[str] = set()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        for step in range(len(self)):
            row = (index + step) % len(self)
            try:
                return self.read(row), self.targets[row]
            except TensorDropoutError as error:
                if not self.skip_unreadable:
                    raise TensorDropoutError(f"{error}, or set data.options.skip_unreadable=true") from error
                self._warn(self.names[row], error)
        raise TensorDropoutError(f"imagefolder: not one of the {len(self)} pictures can be read")

    def read(self, index: int) -> Tensor:
        """The picture as (3, size, size) uint8.

        Raises:
            TensorDropoutError: if it cannot be read.
        """
        path = self.root / self.names[index]
        try:
            return self._decode(path, self.generator(index))
        except Exception as error:  # decoders raise anything on damaged files
            raise TensorDropoutError(f"imagefolder: {path} cannot be read ({error}); replace it") from error

    def check(self) -> None:
        """Decode every picture once; not those of which the unreadable were left out, which were all decoded for that.

        Raises:
            TensorDropoutError: if one cannot be read.
        """
        errors = {} if self.whole is not None else find_unreadable(self.root, self.names)
        if errors:
            file, error = next(iter(errors.items()))
            raise TensorDropoutError(
                f"imagefolder: {len(errors)} of {len(self)} pictures to validate or test on cannot be read; the first "
                f"is {self.root / file} ({error}); replace them, or leave them out with "
                "data.options.skip_unreadable=true"
            )

    def _decode(self, path: Path, generator: torch.Generator) -> Tensor:
        from PIL import Image

        picture = decode_picture(path)
        box = draw_box(*picture.size, generator) if self.crop_randomly else self._centre(*picture.size)
        cropped = picture.resize((self.size, self.size), Image.Resampling.BILINEAR, box=box)
        pixels = torch.from_numpy(np.array(cropped)).permute(2, 0, 1)
        flipped = self.crop_randomly and bool(torch.rand((), generator=generator) < 0.5)
        return (pixels.flip(2) if flipped else pixels).contiguous()

    def _centre(self, width: int, height: int) -> Box:
        """The middle square that is ``size`` wide once the shorter side is ``resize``."""
        side = min(width, height) * self.size / self.resize
        left, top = (width - side) / 2, (height - side) / 2
        return left, top, left + side, top + side

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{error} (skipped: the next readable picture stands in)", stacklevel=3)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_warned": set()}


class PictureReader:
    """Pictures for a network that was trained on such a folder: a :class:`FileReader`.

    Args:
        input_shape: (3, size, size) of the network.
        options: those that its data was loaded with.
        root: not used.
        described: not used.
    """

    endings = PICTURES

    def __init__(
        self, input_shape: tuple[int, ...], options: dict[str, Any], root: str | None, described: dict[str, Any]
    ) -> None:
        import_extra("PIL.Image", "imagefolder")
        self.size, self.resize = input_shape[1], options.get("resize", 256)
        self.prepare = build_prepare(options.get("normalize", "channel"))

    def find(self, folder: Path) -> list[Path]:
        """The pictures in a folder and in those inside it, hidden ones left out."""
        return [folder / name for name in list_folder(folder, self.endings)]

    def read(self, path: Path) -> Tensor:
        """(3, size, size), normalised."""
        return self.prepare(self._decode(path)[None])[0]

    def view(self, path: Path, x: Tensor, grid: Tensor) -> list[View]:
        """The pixels that the network sees."""
        from tensor_dropout_lab.explanation_figures import view_picture

        return view_picture(self._decode(path), grid)

    def find_units(self, targets: Sequence[str]) -> dict[str, str]:
        """None: pictures have classes."""
        return {}

    def _decode(self, path: Path) -> Tensor:
        label = torch.zeros(1, dtype=torch.int64)
        return PictureStream([path.name], label, root=path.parent, size=self.size, resize=self.resize).read(0)


def draw_box(width: int, height: int, generator: torch.Generator) -> Box:
    """A random part: 8 to 100 % of the area, sides in a ratio of 3:4 to 4:3; (left, top, right, bottom).

    The algorithm of torchvision's ``RandomResizedCrop``, without rounding to whole pixels: area and logarithm of the
    ratio are drawn uniformly, up to ten times, until they fit into the picture. If none fits, the largest part with
    such a ratio is taken from the centre. Written here because torchvision brings the CUDA build of torch along.

    Example:
        >>> left, top, right, bottom = draw_box(400, 300, torch.Generator().manual_seed(0))
        >>> 0 <= left < right <= 400, 0 <= top < bottom <= 300
        (True, True)
    """
    for share, ratio, x, y in torch.rand(_TRIES, 4, generator=generator).tolist():
        area = (0.08 + 0.92 * share) * width * height
        stretch = math.exp((ratio - 0.5) * math.log(_LARGEST_RATIO))  # the square root of the ratio
        box_width, box_height = math.sqrt(area) * stretch, math.sqrt(area) / stretch
        if box_width <= width and box_height <= height:
            left, top = x * (width - box_width), y * (height - box_height)
            return left, top, min(left + box_width, width), min(top + box_height, height)
    box_width, box_height = min(width, height * _LARGEST_RATIO), min(height, width * _LARGEST_RATIO)
    left, top = (width - box_width) / 2, (height - box_height) / 2
    return left, top, min(left + box_width, width), min(top + box_height, height)
