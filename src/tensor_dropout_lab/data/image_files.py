"""Pictures or NIfTI volumes in a folder or a tar file: which there are, and their bytes."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, BinaryIO, TypeVar, cast

import numpy as np

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.features.decoding import decode_picture, describe_failure, read_size, read_volume
from tensor_dropout.features.inputs import name_some
from tensor_dropout.progress import show_progress
from tensor_dropout_lab.extras import import_extra

if TYPE_CHECKING:
    from PIL.Image import Image

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".ppm", ".dcm")
VOLUMES = (".nii", ".nii.gz")

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

    @cached_property
    def short_names(self) -> list[str]:
        """The paths without the outermost folder, if all files of a tar file are in one; else as they are."""
        parts = [name.partition("/") for name in self.names]
        in_one = len({first for first, _, _ in parts}) == 1 and all(rest for _, _, rest in parts)
        return [rest for _, _, rest in parts] if self.content is not None and in_one else self.names

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

    def _open(self, number: int) -> BinaryIO:
        """Of a folder, the file itself: of many, only the header is wanted."""
        return (self.where / self.names[number]).open("rb") if self.content is None else io.BytesIO(self.read(number))

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
        for path in paths:
            if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
                raise TensorDropoutError(f"{self.where}: {path} leads out of the folder that it is unpacked to")
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
        try:
            with self._open(number) as stream:
                return decode(stream)
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
                with self._open(number) as stream:
                    return decode(number, stream)
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


def find_images(where: str | Path) -> ImageFiles:
    """All pictures, or all NIfTI volumes, in a folder or a tar file; hidden ones left out.

    Raises:
        TensorDropoutError: if there are none, or both.
    """
    path = Path(where).expanduser()
    if path.is_dir():
        images = ImageFiles(path, list_folder(path))
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


def list_folder(folder: Path, endings: tuple[str, ...] = PICTURES + VOLUMES) -> list[str]:
    """The files with these endings in a folder and in those inside it, relative to it and sorted; hidden ones left out.

    Linked folders are looked into, but for those that lead back up.
    """
    names = []
    for place, folders, files in os.walk(folder, followlinks=True):
        inside = Path(place).relative_to(folder)
        above = {os.path.realpath(folder / each) for each in (inside, *inside.parents)}
        folders[:] = [each for each in folders if os.path.realpath(Path(place, each)) not in above]
        names += [(inside / file).as_posix() for file in files]
    return sorted(name for name in names if _is_wanted(name, endings))


def _is_wanted(name: str, endings: tuple[str, ...]) -> bool:
    hidden = any(part.startswith(".") for part in name.split("/") if part not in (".", ".."))
    return name.lower().endswith(endings) and not hidden


def _list_tar(path: Path) -> ImageFiles:
    """The images of a tar file: their places if it can be read in any order, else their bytes."""
    found: dict[str, Span | bytes] = {}
    try:
        with tarfile.open(path) as archive:
            plain = tarfile.is_tarfile(path) and _is_plain(path)
            for member in archive:
                name = member.name.removeprefix("./")
                if member.isdir() or not _is_wanted(name, PICTURES + VOLUMES):
                    continue
                _refuse_member(path, member, name)
                stream = None if plain else archive.extractfile(member)
                found[name] = Span(member.offset_data, member.size) if stream is None else stream.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise TensorDropoutError(
            f"{path} is no folder and no tar file of images that can be read ({error}); pack it anew: "
            "tar cf images.tar -C FOLDER ."
        ) from error
    names = sorted(found)
    return ImageFiles(path, names, [found[name] for name in names])


def _refuse_member(path: Path, member: tarfile.TarInfo, name: str) -> None:
    """Refuse what would be unpacked to another place, and what has no content of its own."""
    as_windows = PureWindowsPath(name)  # it takes both slashes, and knows the letters of drives
    if as_windows.anchor or ".." in as_windows.parts:
        raise TensorDropoutError(
            f"{path}: the name {member.name} in this tar file leads out of it; pack it anew: "
            "tar cf images.tar -C FOLDER ."
        )
    if not member.isfile():
        kind = "a link" if member.issym() or member.islnk() else "no plain file"
        raise TensorDropoutError(
            f"{path}: {member.name} is {kind}, and its pixels are not there; pack it anew: "
            "tar cf images.tar --dereference --hard-dereference -C FOLDER ."
        )


def _is_plain(path: Path) -> bool:
    """Whether a tar file is not compressed, so that its files have a place in it."""
    try:
        with tarfile.open(path, "r:"):
            return True
    except tarfile.TarError:
        return False
