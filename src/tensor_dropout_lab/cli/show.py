"""``tensor-dropout show``: one run, or the runs of an experiment."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.cli.failures import report_failure

if TYPE_CHECKING:
    from tensor_dropout_lab.record_store import RecordStore

USUAL = tuple(map(Path, ("results", "out/reproduce/paper", "out/reproduce/quick", "out/runs")))
"""Where records are looked for, in this order."""


def show(
    name: Annotated[str, typer.Argument(metavar="EXPERIMENT[/RUN]", help="A run, or an experiment to list its runs.")],
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--in",
            metavar="FOLDER",
            help="A folder of experiments; may be repeated.",
            show_default=", ".join(map(str, USUAL)),
        ),
    ] = None,
) -> None:
    """Print one run: its settings, result, evaluation, training curve and environment. Or list an experiment's runs.

    Records may be folders or packed, as in results. Of several folders the first counts that has the run.

    For example:

      tensor-dropout show cifar100

      tensor-dropout show cifar100/fc-seed0

      tensor-dropout show digits/fc-seed0 --in out/runs
    """
    with report_failure("show", "nothing was changed"):
        from rich.console import Console

        from tensor_dropout_lab.record_store import RecordStore
        from tensor_dropout_lab.report.show_run import print_run, print_runs

        bases = folders or [folder for folder in USUAL if folder.is_dir()]
        path = Path(name)
        experiment, _, run = name.strip("/").partition("/")
        if len(path.parts) > 2:  # a path to a run, such as results/cifar100/fc-seed0
            bases, experiment, run = [path.parent.parent], path.parent.name, path.name
        stores = [RecordStore(base) for base in bases]
        for store in stores:
            if experiment in store.list_experiments() and (not run or run in store.list_runs(experiment)):
                if run or not store.list_runs(experiment):  # what belongs to no single run is shown as one
                    print_run(store, experiment, run, Console())
                else:
                    print_runs(store, experiment, Console())
                return
        raise TensorDropoutError(_describe_missing(name, experiment, run, stores))


def _describe_missing(name: str, experiment: str, run: str, stores: "list[RecordStore]") -> str:
    """There is no such run: where it was looked for, and what comes near."""
    from tensor_dropout_lab.experiments.recipes import suggest

    places = ", ".join(str(store.base) for store in stores) or "the usual folders, of which none is there"
    known = sorted({known for store in stores for known in store.list_experiments()})
    if not known:
        return f"show: there are no records in {places}; name their folder with --in"
    if run and experiment in known:
        runs = sorted({run for store in stores for run in store.list_runs(experiment)})
        near = suggest(run, runs) if len(runs) < 20 else suggest(run, runs).partition(", known")[0]
        return f"show: {experiment} has no run {run!r} in {places}; {near}"
    return f"show: there is no experiment {experiment!r} in {places}; {suggest(experiment, known)}"
