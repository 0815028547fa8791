"""Pictures as a browser can show them: what it knows as it is stored, the rest as 8-bit PNG or JPEG, upright.

What is shown is what the network sees, with one exception: grey pictures of 16 bits are shown through a window, by
default from 0.5 to 99.5 percent of their pixels, and the network sees all of their numbers (divided by 257). A window
is for the eye alone. Of a DICOM picture both see the window that the file names, or those percentiles.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import (
    check_white,
    decode_picture,
    describe_failure,
    read_greys,
    read_orientation,
    read_size,
)
from tensor_dropout.features.dicom import is_dicom
from tensor_dropout.features.greys import Window

if TYPE_CHECKING:
    from PIL.Image import Image

_AS_STORED = {
    "PNG": "image/png", "JPEG": "image/jpeg", "MPO": "image/jpeg", "WEBP": "image/webp", "BMP": "image/bmp"
}  # fmt: skip
"""What every browser shows; MPO is what some cameras make, a JPEG with more behind it."""
_QUALITY = 95
_REMEMBERED = 10_000

Result = TypeVar("Result")


def show_picture(path: Path, window: Window | None = None) -> tuple[bytes, str]:
    """A picture for a browser, and its media type.

    PNG, JPEG, WebP and BMP are given as they are if they are upright, opaque, and have 8 bits. A JPEG that is stored
    lying is turned and packed anew as JPEG, everything else as PNG.

    Args:
        path: the file.
        window: of a grey picture of 16 bits, or in DICOM: the numbers that become black and white; None chooses.

    Raises:
        TensorDropoutError: if it cannot be read.
    """
    return _try(_show, path, window)


def _show(path: Path, window: Window | None) -> tuple[bytes, str]:
    greys = read_greys(path)
    if greys is not None:
        return _pack(greys.show(window), "PNG")
    stored = _find_stored_type(path)
    if stored is not None:
        return path.read_bytes(), stored
    return _pack(decode_picture(path), "JPEG" if _is_jpeg(path) else "PNG")


def _find_stored_type(path: Path) -> str | None:
    """The media type of a file that is sound and that a browser shows as we do; None for others."""
    from PIL import Image

    with path.open("rb") as stream:
        if is_dicom(stream):
            return None
        with Image.open(stream) as picture:
            check_white(picture)
            kind = picture.format or ""
            plain = kind in _AS_STORED and picture.mode in ("1", "L", "P", "RGB") and not picture.has_transparency_data
            moves = kind != "MPO" and getattr(picture, "is_animated", False)
            if not plain or moves or read_orientation(picture, stream) in range(2, 9):
                return None
    _check_whole(path)
    return _AS_STORED[kind]


def _check_whole(path: Path) -> None:
    """Raise what a decoder raises if a file is cut off or damaged."""
    from PIL import Image

    with Image.open(path) as picture:
        if picture.format == "PNG":
            picture.verify()  # its checksums: quicker than to decode it
        else:
            picture.draft(None, (picture.width // 8, picture.height // 8))  # a JPEG is decoded only so far
            picture.load()


def _is_jpeg(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(3) == b"\xff\xd8\xff"


def _pack(picture: Image, kind: str) -> tuple[bytes, str]:
    stream = io.BytesIO()
    if kind == "JPEG":
        picture.save(stream, kind, quality=_QUALITY, subsampling=0)
    else:
        picture.save(stream, kind, compress_level=0)  # it travels within this machine: quick rather than small
    return stream.getvalue(), _AS_STORED[kind]


def make_thumbnail(path: Path, side: int = 160) -> bytes:
    """A JPEG whose longer side has at most so many pixels.

    Raises:
        TensorDropoutError: if the picture cannot be read.
    """

    def shrink(path: Path) -> bytes:
        greys = read_greys(path)
        if greys is None:
            picture = decode_picture(path, side=2 * side)
        else:
            every = max(1, min(greys.numbers.shape) // (2 * side))
            picture = replace(greys, numbers=greys.numbers[::every, ::every]).show()
        picture.thumbnail((side, side))
        stream = io.BytesIO()
        picture.save(stream, "JPEG", quality=85)
        return stream.getvalue()

    return _try(shrink, path)


def measure_picture(path: Path) -> tuple[int, int]:
    """Width and height, upright; from the header alone.

    Raises:
        TensorDropoutError: if it cannot be read.
    """
    return _try(_measure, path)


def _measure(path: Path) -> tuple[int, int]:
    from PIL import Image

    with path.open("rb") as stream:
        if not is_dicom(stream):
            with Image.open(stream) as picture:
                check_white(picture)
    return read_size(path)


def has_further_pages(path: Path) -> bool:
    """Whether a TIFF has pages behind the first, the only one that is read; false for what cannot be read."""
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return bool(getattr(picture, "is_animated", False))
    except Exception:  # decoders raise many kinds; why it cannot be read is said where its size is asked for
        return False


def describe_numbers(path: Path) -> dict[str, float]:
    """What numbers a picture has, for a choice of the window.

    Returns:
        ``bits``; ``lowest`` and ``highest``, the numbers that are there; ``low`` and ``high``, the window that
        :func:`show_picture` takes by itself. Of pictures of 8 bits no number is looked at: 0 and 255.

    Raises:
        TensorDropoutError: if it cannot be read.
    """

    def describe(path: Path) -> dict[str, float]:
        status = path.stat()
        return dict(_describe(path, status.st_mtime_ns, status.st_size))

    return _try(describe, path)


@lru_cache(_REMEMBERED)
def _describe(path: Path, changed: int, size: int) -> tuple[tuple[str, float], ...]:
    """As ``describe_numbers``, remembered as long as the file does not change."""
    greys = read_greys(path)
    if greys is None:
        return (("bits", 8), ("lowest", 0), ("highest", 255), ("low", 0), ("high", 255))
    low, high = greys.choose_window()
    lowest, highest = (float(number) for number in (greys.numbers.min(), greys.numbers.max()))
    return (("bits", greys.bits), ("lowest", lowest), ("highest", highest), ("low", low), ("high", high))


def _try(work: Callable[..., Result], path: Path, *more: Any) -> Result:
    """What a function makes of a file.

    Raises:
        TensorDropoutError: why not, if it raises any exception, as decoders do on damaged files.
    """
    try:
        return work(path, *more)
    except Exception as error:  # decoders raise many kinds
        raise TensorDropoutError(_explain(error).replace(str(path), "it")) from error


def _explain(error: Exception) -> str:
    from PIL import Image

    if isinstance(error, PermissionError):
        return "it may not be read"
    size = re.search(r"\d+", str(error)) if isinstance(error, Image.DecompressionBombError) else None
    if size is not None:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        return f"it has {int(size[0]):,} pixels, more than the {most:,} that are read; make it smaller"
    return describe_failure(error)
