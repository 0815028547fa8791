"""What a user sees when a command fails: one sentence, no traceback."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.signals import interrupt_on_sigterm


@contextmanager
def report_failure(command: str, advice: str) -> Iterator[None]:
    """Turn the failures that a user can mend into one sentence on stderr and an exit status; SIGTERM is as Ctrl-C.

    Args:
        command: what was running, for the sentence.
        advice: what to do after an interruption.
    """
    try:
        with interrupt_on_sigterm():
            yield
    except KeyboardInterrupt:
        typer.echo(f"{command}: interrupted; {advice}", err=True)
        raise typer.Exit(130) from None
    except TensorDropoutError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from None
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("tensor_dropout"):
            raise
        extra = "label" if command == "label" else "lab"
        typer.echo(
            f"Error: {command}: {package} is not installed; install it with: pip install 'tensor-dropout[{extra}]'",
            err=True,
        )
        raise typer.Exit(1) from None
    except OSError as error:
        typer.echo(f"Error: {command}: {error}", err=True)
        raise typer.Exit(1) from None
