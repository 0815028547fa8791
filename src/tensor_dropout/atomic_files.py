"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import fsync
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Of all processes that come here for this path, one at a time goes on; one that dies lets the next go on.

    Made to spare work, not to keep it safe: look again inside whether it is done. Windows has no such lock.

    Example:
        >>> import tempfile
        >>> with one_at_a_time(Path(tempfile.mkdtemp()) / "cache.npy"):
        ...     pass
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with open(lock, "w") as file:
        if fcntl is not None:
            with suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Whether no other process is in such a block of the same folder; one that dies leaves it.

    Where there are no locks (Windows, some network file systems) the answer is always yes.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with alone_in(folder) as first, alone_in(folder) as second:
        ...     print(first, second)
        True False
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / ".lock"
    with open(lock, "a") as file:
        alone = True
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
            except OSError:
                pass
        try:
            yield alone
        finally:
            if alone:
                lock.unlink(missing_ok=True)


def is_in_use(folder: Path) -> bool:
    """Whether a process is in a block of :func:`alone_in` of this folder; no, where there are no locks.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with alone_in(folder):
        ...     is_in_use(folder)
        True
        >>> is_in_use(folder)
        False
    """
    if fcntl is None:
        return False
    try:
        with open(folder / ".lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place at the end of the block, unless the block fails.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "a.txt"
        >>> with replacing(target) as temporary:
        ...     _ = temporary.write_text("whole")
        >>> target.read_text()
        'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # some writers make private files
        with open(temporary, "rb+") as file:
            fsync(file.fileno())  # or the new name may reach the disk before what it names
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
