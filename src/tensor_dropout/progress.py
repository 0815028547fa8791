"""Progress bars, where ``rich`` (extra ``cli``) is installed and someone is watching."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(description: str, total: int) -> Iterator[Callable[[int], None]]:
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
        yield lambda steps: None
        return
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield lambda steps: progress.advance(task, steps)
