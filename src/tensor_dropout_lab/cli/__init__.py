"""The command line: ``tensor-dropout COMMAND``.

Exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted. A user's mistake shows as one sentence, without a
traceback.
"""

import importlib
import sys
import traceback
from typing import Annotated

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.version import __version__
from tensor_dropout_lab.cli.calibrate import calibrate
from tensor_dropout_lab.cli.convert import convert
from tensor_dropout_lab.cli.demo import demo
from tensor_dropout_lab.cli.evaluate import compare, evaluate
from tensor_dropout_lab.cli.export import export
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.cli.fit import fit
from tensor_dropout_lab.cli.label import label
from tensor_dropout_lab.cli.predict import predict
from tensor_dropout_lab.cli.reproduce import report, reproduce
from tensor_dropout_lab.cli.show import show
from tensor_dropout_lab.cli.train import ls, train
from tensor_dropout_lab.nets import trust

app = typer.Typer(
    name="tensor-dropout",
    help="Tensor regression layers with tensor dropout: train, attack, convert, export and reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(demo)
app.command()(train)
app.command()(evaluate)
app.command()(compare)
app.command()(calibrate)
app.command()(fit)
app.command()(label)
app.command()(predict)
app.command()(ls)
app.command()(convert)
app.command()(export)
app.command(add_help_option=False)(reproduce)
app.command()(report)
app.command()(show)


def main() -> None:
    """Run the command line; ``tensor_dropout_lab.__main__`` calls this once typer and rich are known to be there."""
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
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module of yours first, which may register data sets and laws, and "
            "whose networks files may ask for; the current folder is "
            "searched. May be repeated.",
        ),
    ] = None,
) -> None:
    """Tensor regression layers with tensor dropout: train, attack, convert, export and reproduce."""
    with report_failure("--import", "nothing was done"):
        for module in modules or []:
            _import(module)


def _import(module: str) -> None:
    """Import a module of the user's, whose networks files may then ask for; a failure is one sentence."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # a file in the current folder, as for python -m
    try:
        importlib.import_module(module)
        trust(module)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = "" if place.filename.startswith("<") else f" ({place.filename}, line {place.lineno})"
        raise TensorDropoutError(f"--import {module}: {type(error).__name__}: {error}{where}") from error
