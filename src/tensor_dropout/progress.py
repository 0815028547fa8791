"""Progress bars: shown where ``rich`` is installed and stderr is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Advance:
    """Moves a progress bar forward when called with a number of steps."""

    def __init__(self, advance: Callable[[int], None], describe: Callable[[str], None]) -> None:
        self._advance, self._describe = advance, describe

    def __call__(self, steps: int) -> None:
        """Move the bar forward."""
        self._advance(steps)

    def describe(self, description: str) -> None:
        """Replace the text beside the bar."""
        self._describe(description)


@contextmanager
def show_progress(description: str, total: int, *, shown: bool = True) -> Iterator[Advance]:
    """Show a bar on stderr, which is removed at the end of the block.

    Args:
        description: the text beside the bar.
        total: the number of steps.
        shown: False shows none.

    Yields:
        A function that moves the bar forward by a number of steps.

    Example:
        >>> with show_progress("ranks", total=2) as advance:
        ...     for rank in (1, 2):
        ...         advance(1)
    """
    if not shown:
        yield Advance(lambda steps: None, lambda description: None)
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield Advance(lambda steps: None, lambda description: None)
        return
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(description, total=total)
        yield Advance(
            lambda steps: progress.advance(task, steps),
            lambda description: progress.update(task, description=description),
        )
