"""Pictures and NIfTI volumes from the bytes of their files: the one place where they are decoded and turned upright."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_HEADER = 540  # bytes, of NIfTI-2; of NIfTI-1 348
_GZIP = b"\x1f\x8b"
_NIFTI_2 = (b"\x1c\x02\0\0", b"\0\0\x02\x1c")  # the size of its header, 540, in either order of bytes


# Pictures.


def decode_picture(path: Path | IO[bytes]) -> Image:
    """A picture as 8-bit RGB, turned as its EXIF orientation says; what is transparent lies on white.

    One of 16 bits is divided by 257, so that its white, 65,535, becomes 255.

    Raises:
        ValueError: if its numbers have no known white.
        OSError: if it is damaged; decoders raise other errors too.
    """
    from PIL import Image
    from PIL.Image import Transpose

    with Image.open(path) as file:
        if file.mode in ("I", "F") and not _has_16_bits(file):
            kind = "32-bit whole" if file.mode == "I" else "floating-point"
            raise ValueError(f"its pixels are {kind} numbers, whose white is unknown; save it with 8 or 16 bits")
        picture = _convert(file)
        turns = {
            2: Transpose.FLIP_LEFT_RIGHT,
            3: Transpose.ROTATE_180,
            4: Transpose.FLIP_TOP_BOTTOM,
            5: Transpose.TRANSPOSE,
            6: Transpose.ROTATE_270,
            7: Transpose.TRANSVERSE,
            8: Transpose.ROTATE_90,
        }
        turn = turns.get(read_orientation(file))  # of a TIFF, Pillow has taken it out: it has turned it
        return picture if turn is None else picture.transpose(turn)


def read_size(path: Path | IO[bytes]) -> tuple[int, int]:
    """Width and height of what :func:`decode_picture` gives, from the header alone."""
    from PIL import ExifTags, Image, TiffImagePlugin

    with Image.open(path) as picture:
        width, height = picture.size
        if isinstance(picture, TiffImagePlugin.TiffImageFile):  # Pillow gives its size turned already
            width, height = (picture.tag_v2[tag] for tag in (ExifTags.Base.ImageWidth, ExifTags.Base.ImageLength))
        turned = read_orientation(picture) in (5, 6, 7, 8)
    return (height, width) if turned else (width, height)


def read_orientation(picture: Image) -> int:
    """How a picture is to be turned, by its EXIF data, 1 to 8; 1, upright, where they are damaged.

    ``ImageOps.exif_transpose`` would fail where the rest of these data is damaged.
    """
    from PIL import ExifTags

    try:
        return int(picture.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:  # damaged: the pixels may be sound
        return 1


def _has_16_bits(file: Image) -> bool:
    return file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM"))


def _convert(file: Image) -> Image:
    """As 8-bit RGB; ``convert("RGB")`` alone would show the colour that transparent pixels have stored."""
    from PIL import Image

    if _has_16_bits(file):
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
