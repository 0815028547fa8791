"""DICOM pictures, such as X-rays: their first frame. They need pydicom, which is imported when one comes."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Any

import numpy as np

from tensor_dropout.features.greys import Greys, Window

if TYPE_CHECKING:
    from PIL.Image import Image

_MARK = b"DICM"
_PREAMBLE = 128
"""Bytes before the mark, in which anything may stand."""


def is_dicom(stream: IO[bytes]) -> bool:
    """Whether a file is DICOM; the stream is where it was."""
    start = stream.tell()
    head = stream.read(_PREAMBLE + len(_MARK))
    stream.seek(start)
    return head[_PREAMBLE:] == _MARK


def read_dicom_size(stream: IO[bytes]) -> tuple[int, int]:
    """Width and height, from the header alone.

    Raises:
        ValueError: if there is no pydicom, or no picture in the file; pydicom raises other errors too.
    """
    data = _import_pydicom().dcmread(stream, stop_before_pixels=True)
    width, height = (int(data.get(side) or 0) for side in ("Columns", "Rows"))
    _check_size(width, height)
    return width, height


def read_dicom(stream: IO[bytes]) -> Greys | Image:
    """The first frame: numbers of a grey one, with slope and intercept; a coloured one as 8-bit RGB.

    Raises:
        ValueError: as above.
    """
    from PIL import Image

    pydicom = _import_pydicom()
    from pydicom import pixels

    data = pydicom.dcmread(stream)
    _check_size(int(data.get("Columns") or 0), int(data.get("Rows") or 0))
    array = pixels.pixel_array(data, index=0)  # RGB where the file has YBR
    kind, bits = str(data.PhotometricInterpretation), int(data.BitsStored)
    if kind == "PALETTE COLOR":
        array = pixels.apply_color_lut(array, data)
        bits = 8 * array.itemsize
    if array.ndim == 3:
        colours = array[..., :3] if bits <= 8 else array[..., :3] / (2**bits - 1) * 255
        return Image.fromarray(np.rint(colours).astype(np.uint8))
    numbers = np.asarray(pixels.apply_modality_lut(array, data))
    return Greys(numbers, bits, _read_window(data), kind == "MONOCHROME1")


def _read_window(data: Any) -> Window | None:
    """The first window that the file names, as DICOM defines its ends."""
    centres, widths = (np.atleast_1d(data.get(key) or []) for key in ("WindowCenter", "WindowWidth"))
    if not len(centres) or not len(widths):
        return None
    centre, width = float(centres[0]), float(widths[0])
    if data.get("VOILUTFunction", "LINEAR") == "LINEAR":
        centre, width = centre - 0.5, width - 1
    return (centre - width / 2, centre + width / 2) if width > 0 else (centre, centre + 1)


def _check_size(width: int, height: int) -> None:
    from PIL import Image

    if width <= 0 or height <= 0:
        raise ValueError("it is DICOM without a picture")
    if Image.MAX_IMAGE_PIXELS is not None and width * height > 2 * Image.MAX_IMAGE_PIXELS:  # as Pillow does
        raise ValueError(f"it says that it has {width} × {height} pixels, too many for a picture")


def _import_pydicom() -> Any:
    try:
        import pydicom
    except ModuleNotFoundError as error:
        raise ValueError("it is DICOM, which pydicom reads; install it with: pip install pydicom") from error
    return pydicom
