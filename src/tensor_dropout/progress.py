"""Long work: progress bars, where ``rich`` is installed and someone is watching; ending by a signal."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class Advance:
    """Advances a bar by so many steps when called; :meth:`describe` says what is being done now."""

    def __init__(self, step: Callable[[int], None], name: Callable[[str], None]) -> None:
        self._step, self._name = step, name

    def __call__(self, steps: int) -> None:
        """Advance the bar."""
        self._step(steps)

    def describe(self, what: str) -> None:
        """Show what is being done."""
        self._name(what)


@contextmanager
def show_progress(description: str, total: int) -> Iterator[Advance]:
    """A bar on stderr that goes away at the end; without a terminal, or without rich, nothing is shown.

    Args:
        description: what is being counted.
        total: how many steps there are.

    Yields:
        A function that advances the bar by so many steps.
    """
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield Advance(lambda steps: None, lambda what: None)
        return
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield Advance(lambda steps: progress.advance(task, steps), lambda what: progress.update(task, description=what))


@contextmanager
def terminating_as_interrupting() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, so that a batch system's message is heard as Ctrl-C is.

    Not in a process of torchrun's: one that waits for the others in a collective would not hear it, and not end.
    """
    if threading.current_thread() is not threading.main_thread() or "RANK" in os.environ:
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
