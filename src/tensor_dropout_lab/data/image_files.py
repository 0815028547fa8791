"""Pictures or NIfTI volumes in a folder or a tar file: which there are, and their bytes."""

from __future__ import annotations

import gzip
import io
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.data.imagefolder import decode_picture
from tensor_dropout_lab.extras import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm")
VOLUMES = (".nii", ".nii.gz")
_NAMED = 5
_HEADER = 540  # bytes, of NIfTI-2; of NIfTI-1 348
_GZIP = b"\x1f\x8b"
_NIFTI_2 = (b"\x1c\x02\0\0", b"\0\0\x02\x1c")  # the size of its header, 540, in either order of bytes

Result = TypeVar("Result")


@dataclass(frozen=True)
class Span:
    """Where the bytes of a file are in a tar file that is not compressed."""

    start: int
    length: int


@dataclass(frozen=True, repr=False)
class ImageFiles:
    """Pictures or volumes that can be read one by one, in any order, by several threads and processes.

    Attributes:
        where: the folder or the tar file.
        names: their paths in it.
        content: of a tar file, where every one is, or its bytes if it is compressed; None for a folder.
    """

    where: Path
    names: list[str]
    content: list[Span | bytes] | None = None

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        return f"ImageFiles({len(self)} {'volumes' if self.are_volumes else 'pictures'} in {self.where})"

    @property
    def are_volumes(self) -> bool:
        """Whether they are NIfTI volumes."""
        return bool(self.names) and self.names[0].lower().endswith(VOLUMES)

    def take(self, rows: Sequence[int]) -> ImageFiles:
        """These images only, in this order."""
        content = None if self.content is None else [self.content[row] for row in rows]
        return replace(self, names=[self.names[row] for row in rows], content=content)

    def without_folder(self, name: str) -> str:
        """The path without the outermost folder, if all files of a tar file are in one."""
        outermost = {PurePosixPath(other).parts[0] for other in self.names}
        nested = all("/" in other for other in self.names)
        return name.partition("/")[2] if self.content is not None and nested and len(outermost) == 1 else name

    def read(self, number: int) -> bytes:
        """The file as it is stored.

        Raises:
            TensorDropoutError: if it is gone.
        """
        try:
            if self.content is None:
                return (self.where / self.names[number]).read_bytes()
            content = self.content[number]
            if isinstance(content, bytes):
                return content
            with self.where.open("rb") as stream:
                stream.seek(content.start)
                return stream.read(content.length)
        except OSError as error:
            raise TensorDropoutError(f"{self.where}: {self.names[number]} cannot be read ({error})") from error

    def decode(self, number: int) -> Image:
        """A picture as 8-bit RGB, upright.

        Raises:
            TensorDropoutError: if it cannot be read.
        """
        return self.decode_as(number, decode_picture)

    def paths(self, folder: Path) -> list[Path]:
        """The files on disk; those of a tar file are unpacked into the folder.

        Raises:
            TensorDropoutError: if a name in the tar file leads out of the folder.
        """
        if self.content is None:
            return [self.where / name for name in self.names]
        paths = [folder / name for name in self.names]
        for number, path in enumerate(paths):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(number))
        return paths

    def measure(self) -> np.ndarray:
        """(n, 2) float64: width and height of every picture as it is shown, upright; from the headers.

        Raises:
            TensorDropoutError: if some cannot be read, with their names.
        """
        return np.array(self.decode_all(lambda _, stream: read_size(stream)), dtype=np.float64)

    def check(self) -> None:
        """Decode every image once.

        Raises:
            TensorDropoutError: if some cannot be read, with their names.
        """

        def decode(_: int, stream: BinaryIO) -> None:
            read_volume(stream) if self.are_volumes else decode_picture(stream)

        self.decode_all(decode)

    def decode_as(self, number: int, decode: Callable[[BinaryIO], Result]) -> Result:
        """What a function makes of one file.

        Raises:
            TensorDropoutError: if it raises any exception, as decoders do on damaged files.
        """
        data = self.read(number)
        try:
            return decode(io.BytesIO(data))
        except Exception as error:
            raise TensorDropoutError(
                f"{self.where}: {self.names[number]} cannot be read ({describe_failure(error)}); replace it, or delete "
                "it and its row"
            ) from error

    def decode_all(self, decode: Callable[[int, BinaryIO], Result], task: str = "checking images") -> list[Result]:
        """What a function makes of the number and the content of every file; on every core, with a progress bar.

        Raises:
            TensorDropoutError: if it raises an exception for some, with their names.
        """
        if self.are_volumes:
            import_extra("nibabel", "volumes")
        else:
            import_extra("PIL.Image", "pictures")
        errors: dict[str, str] = {}
        results: list[Result] = []

        def try_one(number: int) -> Result | None:
            try:
                return decode(number, io.BytesIO(self.read(number)))
            except Exception as error:  # decoders raise anything on damaged files
                errors[self.names[number]] = describe_failure(error)
                return None

        with show_progress(task, len(self)) as advance, ThreadPoolExecutor(os.cpu_count()) as pool:
            for result in pool.map(try_one, range(len(self))):
                results.append(cast("Result", result))
                advance(1)
        if errors:
            bad = [name for name in self.names if name in errors]
            raise TensorDropoutError(
                f"{self.where}: {len(bad)} of {len(self)} images cannot be read: {name_some(bad)} (the first: "
                f"{errors[bad[0]]}); replace them, or delete them and their rows"
            )
        return results


def read_volume(stream: BinaryIO) -> Tensor:
    """A NIfTI volume in RAS order from the content of its file: (C, X, Y, Z) float32.

    Raises:
        ValueError: if it has other axes, or numbers that are not finite; nibabel raises other errors too.
    """
    import nibabel

    data = stream.read()
    data = gzip.decompress(data) if data.startswith(_GZIP) else data
    kind: Any = nibabel.Nifti2Image if data.startswith(_NIFTI_2) else nibabel.Nifti1Image
    image: Any = nibabel.as_closest_canonical(kind.from_bytes(data))
    volume = torch.from_numpy(np.ascontiguousarray(image.dataobj, dtype=np.float32))
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


def describe_failure(error: Exception) -> str:
    """Why a decoder failed, in a few words."""
    words = (str(error).strip().splitlines() or [""])[0]
    return "it is no picture of a known format" if "cannot identify image" in words else words or type(error).__name__


def read_size(stream: BinaryIO) -> tuple[int, int]:
    """Width and height of a picture as it is shown, upright; from its header."""
    from PIL import ExifTags, Image

    with Image.open(stream) as picture:
        width, height = picture.size
        try:
            turned = picture.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
        except Exception:  # damaged: the pixels may be sound
            turned = False
    return (height, width) if turned else (width, height)


def find_images(where: str | Path) -> ImageFiles:
    """All pictures, or all NIfTI volumes, in a folder or a tar file; hidden ones left out.

    Raises:
        TensorDropoutError: if there are none, or both.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        images = ImageFiles(path, sorted(_list_folder(path)))
    elif path.is_file():
        images = _list_tar(path)
    else:
        raise TensorDropoutError(f"{path}: there is no such folder or tar file of images")
    endings = f"({', '.join(PICTURES + VOLUMES)})"
    if not images.names:
        raise TensorDropoutError(f"{path} has no images {endings}")
    volumes = [name for name in images.names if name.lower().endswith(VOLUMES)]
    if volumes and len(volumes) < len(images):
        picture = next(name for name in images.names if name not in volumes)
        raise TensorDropoutError(
            f"{path} has both pictures and volumes, such as {picture} and {volumes[0]}; keep them apart"
        )
    return images


def _is_image(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return name.lower().endswith(PICTURES + VOLUMES) and not any(part.startswith(".") for part in parts)


def _list_folder(folder: Path) -> list[str]:
    names = []
    for place, _, files in os.walk(folder, followlinks=True):
        inside = Path(place).relative_to(folder)
        names += [(inside / file).as_posix() for file in files]
    return [name for name in names if _is_image(name)]


def _list_tar(path: Path) -> ImageFiles:
    """The images of a tar file: their places if it can be read in any order, else their bytes."""
    found: dict[str, Span | bytes] = {}
    try:
        with tarfile.open(path) as archive:
            plain = tarfile.is_tarfile(path) and _is_plain(path)
            for member in archive:
                name = member.name.removeprefix("./")
                if not member.isfile() or not _is_image(name) or ".." in PurePosixPath(name).parts:
                    continue
                stream = None if plain else archive.extractfile(member)
                found[name] = Span(member.offset_data, member.size) if stream is None else stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise TensorDropoutError(
            f"{path} is no folder and no tar file of images that can be read ({error}); pack it anew: "
            "tar cf images.tar -C FOLDER ."
        ) from error
    names = sorted(found)
    return ImageFiles(path, names, [found[name] for name in names])


def _is_plain(path: Path) -> bool:
    """Whether a tar file is not compressed, so that its files have a place in it."""
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.TarError:
        return False


def name_some(names: Sequence[str]) -> str:
    """The first few, and how many more.

    Example:
        >>> name_some(["a", "b"]), name_some("abcdefg")
        ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
