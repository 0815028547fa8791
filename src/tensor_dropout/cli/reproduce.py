"""``tensor-dropout reproduce``: the experiments."""

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from tensor_dropout.cli.failures import report_failure
from tensor_dropout.experiments import EXPERIMENTS, load_experiment


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
