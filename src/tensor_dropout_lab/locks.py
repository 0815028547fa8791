"""Locks between processes (filelock), which the operating system releases if their holder dies.

The empty lock files stay: deleting one would let two processes lock two files of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from tensor_dropout.errors import TensorDropoutError

_PATIENCE = 1.0  # seconds: is_in_use holds the lock for a moment


class FolderInUseError(TensorDropoutError):
    """Another process writes into the folder."""


@contextmanager
def lock_folder(folder: Path, doing: str = "training") -> Iterator[None]:
    """Be the only process that writes into a folder.

    Args:
        folder: the folder; it is made if there is none.
        doing: what is done there, for the message to others.

    Raises:
        FolderInUseError: if another process is in such a block for the same folder.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with lock_folder(folder):
        ...     is_in_use(folder)
        True
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(timeout=_PATIENCE)
    except Timeout:
        raise FolderInUseError(
            f"another process is {doing} in {folder}; wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def is_in_use(folder: Path) -> bool:
    """Whether a process is in a block of :func:`lock_folder` for this folder.

    Example:
        >>> import tempfile
        >>> is_in_use(Path(tempfile.mkdtemp()))
        False
    """
    path = folder / ".lock"
    if not path.exists():
        return False
    try:
        with FileLock(path, blocking=False):
            return False
    except Timeout:
        return True
    except OSError:  # of another user
        return False


@contextmanager
def lock_file(path: Path) -> Iterator[None]:
    """Be the only process that makes a file; others wait. Look inside the block whether it was made meanwhile.

    Example:
        >>> import tempfile
        >>> with lock_file(Path(tempfile.mkdtemp()) / "cache.npy"):
        ...     pass
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(name_lock(path)):
        yield


def name_lock(path: Path) -> Path:
    """The lock of a file.

    Example:
        >>> name_lock(Path("cache.npy")).name
        '.cache.npy.lock'
    """
    return path.with_name(f".{path.name}.lock")
