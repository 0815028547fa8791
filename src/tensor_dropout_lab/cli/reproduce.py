"""``tensor-dropout reproduce`` and ``report``: the paper's tables and figures."""

from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.cli.failures import report_failure
from tensor_dropout_lab.data import DATASETS
from tensor_dropout_lab.experiments import EXPERIMENTS, PAPER, describe, load_experiment

ALL = "all"


def _show_reproduce_help(context: typer.Context, asked: bool) -> None:
    """The ordinary help, and the experiments."""
    if not asked:
        return
    from rich.console import Console
    from rich.table import Table

    typer.echo(context.get_help())
    table = Table("experiment", "what it is", "presets", title="Experiments", title_justify="left")
    for name, entry in EXPERIMENTS.items():
        table.add_row(name, describe(name), ", ".join(entry.presets))
    table.add_row(ALL, f"the {len(PAPER)} experiments of the paper, then the report", "quick, paper")
    console = Console()
    console.print(table)
    for example in (
        "digits --preset quick --out out/reproduce/quick",
        "cifar100/rtrl-cp --preset paper --root FOLDER",
        "mri mri-noise --preset paper --root FOLDER --workers 4",
    ):
        console.print(f"Example: tensor-dropout reproduce {example}", highlight=False)
    raise typer.Exit


def reproduce(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="The experiment; see the list below. EXPERIMENT/RECIPE runs one row. Or several."
        ),
    ],
    preset: Annotated[str, typer.Option(help="The settings: quick, or paper for the full ones.")] = "quick",
    out: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="The folder of all experiments; results go to OUT/NAME.",
            show_default="./out/reproduce/PRESET",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    root: Annotated[
        list[str] | None,
        typer.Option(help="The folder of the data; or DATA=FOLDER, such as cifar100=/data, may be repeated."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    workers: Annotated[
        int, typer.Option(min=1, help="Runs at the same time, in turn on the GPUs; several may share one.")
    ] = 1,
    slurm: Annotated[
        str | None, typer.Option(metavar="PARTITION", help="Run on SLURM instead, in this partition, as WORKERS jobs.")
    ] = None,
    rerun_stale: Annotated[
        bool, typer.Option("--rerun-stale", help="Run again what was run before its recipe was changed.")
    ] = False,
    help_: Annotated[
        bool,
        typer.Option("--help", help="Show this message and exit.", callback=_show_reproduce_help, is_eager=True),
    ] = False,
) -> None:
    """Run what is missing of an experiment, and write its numbers, tables and figures.

    Runs that are already in the folder with the same settings are not repeated; what was cut off goes on.
    """
    for name in names:
        _check_name(name, preset)
    if len(names) > 1 and (alone := [name for name in names if not _has_recipes(name)]):
        raise typer.BadParameter(f"{alone[0]} is run alone: give one name, or only rows and tables", param_hint="NAME")
    base = out or Path("out", "reproduce", preset)
    name = names[0]
    after = f"what is done is kept in {base}, the same command goes on from there"
    with report_failure(f"reproduce {' '.join(names)}", after):
        options: dict[str, Any] = {
            "roots": _read_roots(root or []),
            "device": device,
            "workers": workers,
            "rerun_stale": rerun_stale,
        }
        if slurm is not None:
            options |= {"cluster": "slurm", "slurm_partition": slurm}
        failed = 0
        if name == ALL:
            written, failed = _run_all(preset, base, seed, options)
        elif _has_recipes(name):
            from tensor_dropout_lab.experiments.paper import run_several

            written, failed = run_several(names, preset, base, seed, **options)
        else:
            written = _run_one(name, preset, base, seed, options)
    typer.echo("Wrote:")
    for path in written:
        typer.echo(f"  {path}")
    if failed:
        raise typer.Exit(1)


def _check_name(name: str, preset: str) -> None:
    experiment, _, recipe = name.partition("/")
    if name != ALL and experiment not in EXPERIMENTS:
        near = get_close_matches(experiment, [*EXPERIMENTS, ALL], n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known are: {', '.join(EXPERIMENTS)}, {ALL}."
        raise typer.BadParameter(f"there is no experiment {name!r}; {hint}", param_hint="NAME")
    if recipe and not EXPERIMENTS[experiment].has_recipes:
        raise typer.BadParameter(f"{experiment} is run as a whole: leave {recipe!r} out", param_hint="NAME")
    presets = ("quick", "paper") if name == ALL else EXPERIMENTS[experiment].presets
    if preset not in presets:
        raise typer.BadParameter(
            f"{name} has no preset {preset!r}; it has: {', '.join(presets)}.", param_hint="--preset"
        )


def _has_recipes(name: str) -> bool:
    return name != ALL and EXPERIMENTS[name.partition("/")[0]].has_recipes


def _run_one(name: str, preset: str, base: Path, seed: int, options: dict[str, Any]) -> list[Path]:
    return load_experiment(name).run(name, preset, base, seed, **options)


def _run_all(preset: str, base: Path, seed: int, options: dict[str, Any]) -> tuple[list[Path], int]:
    """The paper's experiments, all networks in one sweep, then the report."""
    from rich.console import Console

    from tensor_dropout_lab.experiments.paper import check_data, list_cells, make_context, run_cells

    context = make_context(base, options)
    cells = [cell for name in PAPER if _has_recipes(name) for cell in list_cells(name, preset, seed)]
    check_data(cells, context)
    for name in PAPER:
        if not _has_recipes(name):
            _run_one(name, preset, base, seed, {})
    failed = run_cells(cells, context, console=Console(), **options)
    return write_report({preset: base}, base / "report"), failed


_WITH_FILES = [name for name, source in DATASETS.items() if source.has_files]


def _read_roots(given: list[str]) -> dict[str, str]:
    roots: dict[str, str] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not equals or Path(text).is_dir():
            roots |= dict.fromkeys(_WITH_FILES, text)
        elif name not in DATASETS:
            raise TensorDropoutError(
                f"--root is FOLDER or DATA=FOLDER with DATA one of {', '.join(DATASETS)}; got {text!r}"
            )
        else:
            roots[name] = folder
    return roots


def report(
    quick: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Results of --preset quick.", show_default="./out/reproduce/quick"),
    ] = None,
    full: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Results of --preset paper.", show_default="./out/reproduce/paper"),
    ] = None,
    out: Annotated[Path, typer.Option(file_okay=False, help="The folder for the report.")] = Path("out", "report"),
) -> None:
    """Write the report: one HTML page, Markdown and LaTeX tables, from records alone.

    The paper's numbers beside ours with intervals, attacks in both protocols, the audit's verdicts, what was not run.

    For example:

      tensor-dropout report

      tensor-dropout report --full results --out out/report
    """
    with report_failure("report", "nothing was written"):
        bases = {}
        for preset, given in (("paper", full), ("quick", quick)):
            folder = given or Path("out", "reproduce", preset)
            if folder.is_dir():
                bases[preset] = folder
            elif given is not None:
                raise TensorDropoutError(f"report: there is no folder {folder}")
        if not bases:
            raise TensorDropoutError(
                "report: there are no results under out/reproduce; make some with: tensor-dropout reproduce all, or "
                "take the records of a clone: tensor-dropout report --full results"
            )
        paths = write_report(bases, out)
    typer.echo("Wrote:")
    for path in paths:
        typer.echo(f"  {path}")


def write_report(bases: dict[str, Path], out: Path) -> list[Path]:
    """The page last: it is what people open."""
    from dataclasses import replace

    from tensor_dropout_lab.report.collect import collect
    from tensor_dropout_lab.report.html import write_html
    from tensor_dropout_lab.report.text import write_latex, write_markdown

    found = replace(collect(bases, out / "figures"), made=datetime.now().strftime("%d %B %Y, %H:%M"))
    paths = [out / name for name in ("report.md", "report.tex", "report.html")]
    for path, write in zip(paths, (write_markdown, write_latex, write_html), strict=True):
        write(found, path)
    return paths
