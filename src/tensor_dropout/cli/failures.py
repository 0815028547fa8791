"""What a user sees when a command fails: one sentence, no traceback."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from tensor_dropout.errors import TensorDropoutError


@contextmanager
def report_failure(command: str, advice: str) -> Iterator[None]:
    """Turn the failures that a user can mend into one sentence on stderr and an exit status; SIGTERM is as Ctrl-C.

    Args:
        command: what was running, for the sentence.
        advice: what to do after an interruption.
    """
    try:
        with _terminating_as_interrupting():
            yield
    except KeyboardInterrupt:
        typer.echo(f"{command}: interrupted; {advice}", err=True)
        raise typer.Exit(130) from None
    except TensorDropoutError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"Error: {command}: {error}", err=True)
        raise typer.Exit(1) from None


@contextmanager
def _terminating_as_interrupting() -> Iterator[None]:
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
