"""Pictures and NIfTI volumes from the bytes of their files: the one place where they are decoded and turned upright."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.features.dicom import is_dicom, read_dicom, read_dicom_size
from tensor_dropout.features.greys import Greys, Window

if TYPE_CHECKING:
    from PIL.Image import Image

_HEADER = 540  # bytes, of NIfTI-2; of NIfTI-1 348
_GZIP = b"\x1f\x8b"
_PNG = b"\x89PNG\r\n\x1a\n"
_PNG_EXIF = {"exif", "Raw profile type exif"}
"""What Pillow calls EXIF data of a PNG."""
_NIFTI_2 = (b"\x1c\x02\0\0", b"\0\0\x02\x1c")  # the size of its header, 540, in either order of bytes


# Pictures.


def decode_picture(path: Path | IO[bytes], *, window: Window | None = None, side: int | None = None) -> Image:
    """A picture as 8-bit RGB, turned as its EXIF orientation says; what is transparent lies on white.

    One of 16 bits is divided by 257, so that its white, 65,535, becomes 255. A grey one in DICOM goes from black to
    white in the window that the file names, else from 0.5 to 99.5 percent of its pixels. Of several pages or frames it
    is the first.

    Args:
        path: the file.
        window: of a grey one with more than 8 bits: the numbers that become black and white.
        side: if both sides may be shorter, but not than this: large JPEG files are then decoded faster.

    Raises:
        ValueError: if its numbers have no known white.
        OSError: if it is damaged; decoders raise other errors too.
    """
    with _open(path) as stream:
        if is_dicom(stream):
            found = read_dicom(stream)
            return (found.show(window) if isinstance(found, Greys) else found).convert("RGB")
        return _decode(stream, window, side)


def _decode(stream: IO[bytes], window: Window | None, side: int | None) -> Image:
    from PIL import Image

    with Image.open(stream) as file:
        check_white(file)
        if side is not None:
            file.draft(None, (side, side))
        if window is not None and has_16_bits(file):
            picture = Greys(np.asarray(file), 16).show(window).convert("RGB")
        else:
            picture = _convert(file)
        return _turn(picture, read_orientation(file))  # of a TIFF, Pillow has taken it out: it has turned it


def read_greys(path: Path | IO[bytes]) -> Greys | None:
    """The numbers of a grey picture of 16 bits, or of a grey one in DICOM, upright; None for others.

    Raises:
        OSError: if it is damaged; decoders raise other errors too.
    """
    from PIL import Image

    with _open(path) as stream:
        if is_dicom(stream):
            found = read_dicom(stream)
            return found if isinstance(found, Greys) else None
        with Image.open(stream) as file:
            if not has_16_bits(file):
                return None
            numbers = np.asarray(file).astype(np.int32)
            return Greys(np.asarray(_turn(Image.fromarray(numbers), read_orientation(file))), 16)


def read_size(path: Path | IO[bytes]) -> tuple[int, int]:
    """Width and height of what :func:`decode_picture` gives, from the header alone."""
    from PIL import ExifTags, Image, TiffImagePlugin

    with _open(path) as stream:
        if is_dicom(stream):
            return read_dicom_size(stream)
        with Image.open(stream) as picture:
            width, height = picture.size
            if isinstance(picture, TiffImagePlugin.TiffImageFile):  # Pillow gives its size turned already
                width, height = (picture.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
            turned = read_orientation(picture, stream) in (5, 6, 7, 8)
    return (height, width) if turned else (width, height)


@contextmanager
def _open(path: Path | IO[bytes]) -> Iterator[IO[bytes]]:
    """The file as a stream; one that was given stays open."""
    if not isinstance(path, str | os.PathLike):
        yield path
        return
    with open(path, "rb") as stream:
        yield stream


def _turn(picture: Image, orientation: int) -> Image:
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    turn = turns.get(orientation)
    return picture if turn is None else picture.transpose(turn)


def read_orientation(picture: Image, stream: IO[bytes] | None = None) -> int:
    """How a picture is to be turned, by its EXIF data, 1 to 8; 1, upright, where they are damaged.

    ``ImageOps.exif_transpose`` would fail where the rest of these data is damaged.

    Args:
        picture: the picture.
        stream: what it is read from. With it, a PNG without such data is not decoded, be it that they are behind the
            pixels.
    """
    from PIL import ExifTags

    if stream is not None and picture.format == "PNG" and not (_PNG_EXIF & picture.info.keys() or _has_more(stream)):
        return 1
    try:
        return int(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged: the pixels may be sound
        return 1


def _has_more(stream: IO[bytes]) -> bool:
    """Whether a PNG has EXIF data or texts behind its pixels; the stream is where it was."""
    start = stream.tell()
    stream.seek(len(_PNG))
    behind, kind = False, b""
    while kind != b"IEND" and len(head := stream.read(8)) == 8:
        length, kind = int.from_bytes(head[:4]), head[4:]
        behind = behind or kind == b"IDAT"
        if behind and kind in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
            break
        stream.seek(length + 4, os.SEEK_CUR)  # the content, and its checksum
    stream.seek(start)
    return behind and kind not in (b"IDAT", b"IEND")


def has_16_bits(file: Image) -> bool:
    """Whether it is grey and has 16 bits for each pixel."""
    return file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM"))


def check_white(file: Image) -> None:
    """Refuse numbers whose white is unknown.

    Raises:
        ValueError: for them.
    """
    if file.mode in ("I", "F") and not has_16_bits(file):
        kind = "32-bit whole" if file.mode == "I" else "floating-point"
        raise ValueError(f"its pixels are {kind} numbers, whose white is unknown; save it with 8 or 16 bits")


def _convert(file: Image) -> Image:
    """As 8-bit RGB; ``convert("RGB")`` alone would show the colour that transparent pixels have stored."""
    from PIL import Image

    if has_16_bits(file):
        return Image.fromarray(np.rint(np.asarray(file) / 257).astype(np.uint8)).convert("RGB")
    if not file.has_transparency_data:
        return file.convert("RGB")
    return Image.alpha_composite(Image.new("RGBA", file.size, "white"), file.convert("RGBA")).convert("RGB")


# Volumes.


def read_volume(stream: BinaryIO) -> Tensor:
    """A NIfTI volume in RAS order: (C, X, Y, Z) float32.

    Raises:
        ValueError: if it has other axes, or numbers that are not finite; nibabel raises other errors too.
    """
    import nibabel

    data = stream.read()
    data = gzip.decompress(data) if data.startswith(_GZIP) else data
    kind: Any = nibabel.Nifti2Image if data.startswith(_NIFTI_2) else nibabel.Nifti1Image
    image: Any = nibabel.as_closest_canonical(kind.from_bytes(data))
    volume = torch.from_numpy(np.ascontiguousarray(image.dataobj, dtype=np.float32))  # an axis may run backwards
    volume = volume[..., None] if volume.ndim == 3 else volume
    if volume.ndim != 4 or not bool(volume.isfinite().all()):
        raise ValueError(f"a volume has 3 axes, or 4 with the channels last, all finite; got {tuple(volume.shape)}")
    return volume.movedim(3, 0).contiguous()


def measure_volume(stream: BinaryIO) -> tuple[int, ...]:
    """The shape of :func:`read_volume`, (C, X, Y, Z), from the header alone.

    Raises:
        ValueError: if it has other axes; nibabel raises other errors too.
    """
    import nibabel

    head = stream.read(_HEADER)
    if head.startswith(_GZIP):
        stream.seek(0)
        head = gzip.GzipFile(fileobj=stream).read(_HEADER)
    kind: Any = nibabel.Nifti2Header if head.startswith(_NIFTI_2) else nibabel.Nifti1Header
    header = kind(head[: kind.sizeof_hdr])
    shape = header.get_data_shape()
    if len(shape) not in (3, 4):
        raise ValueError(f"a volume has 3 axes, or 4 with the channels last; got {shape}")
    ordered = [1, *shape[:3]] if len(shape) == 3 else [shape[3], *shape[:3]]
    for axis, (target, _) in enumerate(nibabel.io_orientation(header.get_best_affine())):
        ordered[1 + int(target)] = shape[axis]
    return tuple(int(cells) for cells in ordered)


# Why not.


def describe_failure(error: Exception) -> str:
    """Why a decoder failed, in a few words."""
    words = (str(error).strip().splitlines() or [""])[0]
    return "it is no picture of a known format" if "cannot identify image" in words else words or type(error).__name__
