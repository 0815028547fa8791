"""The command line: ``tensor-dropout COMMAND``.

Exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted. A user's mistake shows as one sentence, without a
traceback.
"""

from typing import Annotated

import typer

from tensor_dropout.cli.convert import convert
from tensor_dropout.cli.evaluate import compare, evaluate
from tensor_dropout.cli.export import export
from tensor_dropout.cli.predict import predict
from tensor_dropout.cli.reproduce import report, reproduce
from tensor_dropout.cli.train import ls, train
from tensor_dropout.version import __version__

app = typer.Typer(
    name="tensor-dropout",
    help="Tensor regression layers with tensor dropout: train, attack, convert, export and reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(train)
app.command()(evaluate)
app.command()(compare)
app.command()(predict)
app.command()(ls)
app.command()(convert)
app.command()(export)
app.command(add_help_option=False)(reproduce)
app.command()(report)


def main() -> None:
    """Run the command line; ``tensor_dropout.__main__`` calls this once typer and rich are known to be there."""
    app(prog_name="tensor-dropout")


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"tensor-dropout {__version__}")
        raise typer.Exit


@app.callback()
def describe(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Tensor regression layers with tensor dropout: train, attack, convert, export and reproduce."""
