"""SIGTERM, which batch systems send before they kill a job, ends a program as Ctrl-C does."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM inside the block.

    Not in a process that torchrun started: while it waits for the others in a collective operation, it would not end.
    """
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
