"""The command line: ``tensor-dropout COMMAND``.

Exit status: 0 done, 1 failed, 2 bad usage, 130 interrupted. A user's mistake shows as one sentence, without a
traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.experiments import EXPERIMENTS, load_experiment
from tensor_dropout.version import __version__

app = typer.Typer(
    name="tensor-dropout",
    help="Tensor regression layers with tensor dropout: the experiments, from the command line.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command line; ``tensor_dropout.__main__`` calls this once typer and rich are known to be there."""
    app(prog_name="tensor-dropout")


@contextmanager
def report_failure(command: str, advice: str) -> Iterator[None]:
    """Turn the failures that a user can mend into one sentence on stderr and an exit status.

    Args:
        command: what was running, for the sentence.
        advice: what to do after an interruption.
    """
    try:
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
    """Tensor regression layers with tensor dropout: the experiments, from the command line."""


def _show_reproduce_help(context: typer.Context, asked: bool) -> None:
    """The ordinary help, and the experiments, which are imported only here and when they run."""
    if not asked:
        return
    typer.echo(context.get_help())
    table = Table("experiment", "what it does", "presets", title="Experiments", title_justify="left")
    for name in EXPERIMENTS:
        experiment = load_experiment(name)
        table.add_row(name, experiment.SUMMARY, ", ".join(experiment.PRESETS))
    console = Console()
    console.print(table)
    console.print("Example: tensor-dropout reproduce digits --preset quick --out out/digits", highlight=False)
    raise typer.Exit


@app.command(add_help_option=False)
def reproduce(
    name: Annotated[str, typer.Argument(help="The experiment; see the list below.")],
    preset: Annotated[str, typer.Option(help="The settings: quick, or paper for the full ones.")] = "quick",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="The folder for the results.", show_default="./out/NAME")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    help_: Annotated[
        bool,
        typer.Option("--help", help="Show this message and exit.", callback=_show_reproduce_help, is_eager=True),
    ] = False,
) -> None:
    """Run an experiment, and write its numbers and figures.

    Runs that are already in the folder with the same settings are not repeated.
    """
    if name not in EXPERIMENTS:
        near = get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are: {', '.join(EXPERIMENTS)}."
        raise typer.BadParameter(f"there is no experiment {name!r}; {hint}", param_hint="NAME")
    experiment = load_experiment(name)
    if preset not in experiment.PRESETS:
        known = ", ".join(experiment.PRESETS)
        raise typer.BadParameter(f"{name} has no preset {preset!r}; it has: {known}.", param_hint="--preset")
    folder = Path("out") / name if out is None else out
    with report_failure(f"reproduce {name}", f"what is done is kept in {folder}, the same command goes on from there"):
        written = experiment.run(name, preset, folder, seed)
    typer.echo("Wrote:")
    for path in written:
        typer.echo(f"  {path}")
