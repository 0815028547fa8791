"""Progress bars, where ``rich`` (extra ``cli``) is installed and someone is watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
