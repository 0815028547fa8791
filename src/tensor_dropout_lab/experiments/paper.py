"""The paper's tables and figures on networks: recipes, run as far as they are missing, then drawn."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.experiments.cells import RunContext, complete, find_cell
from tensor_dropout_lab.experiments.recipes import Cell, expand, load_recipes, suggest
from tensor_dropout_lab.experiments.sweep import group_cells, run_sweep
from tensor_dropout_lab.figures import require_matplotlib
from tensor_dropout_lab.training.processes import choose_device


def list_cells(name: str, preset: str, seed: int = 0) -> list[Cell]:
    """The cells of an experiment, or of one recipe of it ("cifar100/fc").

    Raises:
        TensorDropoutError: if there is no such recipe, with the nearest names.
    """
    experiment, _, only = name.partition("/")
    recipes = load_recipes(experiment, preset)
    if only:
        names = [recipe.name for recipe in recipes]
        if only not in names:
            raise TensorDropoutError(f"reproduce: {experiment} has no recipe {only!r}; {suggest(only, names)}")
        recipes = [recipe for recipe in recipes if recipe.name == only]
    return [cell for recipe in recipes for cell in expand(recipe, preset, seed)]


def run_cells(
    cells: list[Cell],
    context: RunContext,
    *,
    workers: int = 1,
    cluster: str = "local",
    console: Console,
    **resources: Any,
) -> int:
    """Run what is missing of these cells, and say what was left out and what failed.

    Args:
        cells: from :func:`list_cells`.
        context: where results go.
        workers: processes or jobs.
        cluster: "local" or "slurm".
        console: where to say it.
        **resources: of submitit's executor.

    Returns:
        How many have no result that can be used: they failed, or their records are damaged.
    """
    require_matplotlib()
    states = {(cell.experiment, cell.slug): find_cell(cell, context.base).state for cell in cells}
    wanted = {"missing", "failed", "damaged", *(["stale"] if context.rerun_stale else [])}
    pending = [cell for cell in cells if states[cell.experiment, cell.slug] in wanted]
    check_data(pending, context)
    if pending:
        where = "SLURM" if cluster == "slurm" else choose_device(context.device).type
        print(f"{len(pending)} of {len(cells)} runs are to do, on {where}.", file=sys.stderr, flush=True)
    ensembles = [cell for cell in pending if cell.others]  # after all their members, which several processes train
    members = [source for cell in ensembles for source in (cell.of, *cell.others) if source is not None]
    for wave in (_list_once([*members, *(cell for cell in pending if not cell.others)]), ensembles):
        if wave:
            run_sweep(group_cells(wave), context, workers=workers, cluster=cluster, **resources)
    found = [find_cell(cell, context.base) for cell in cells]
    count = Counter(each.state for each in found)
    now = ", ".join(f"{number} {state}" for state, number in count.items())
    console.print(f"{len(pending)} of {len(cells)} runs were to do; now {now}.", highlight=False)
    for each in found:
        if each.state in ("failed", "damaged"):
            console.print(f"  {each.state}: {each.run.folder}: {each.detail}", highlight=False, markup=False)
    if count["stale"]:
        console.print(
            f"  {count['stale']} records are stale: their recipes were changed since; --rerun-stale runs them again",
            highlight=False,
        )
    if count["missing"]:
        console.print(
            f"  {count['missing']} are missing: another process is at them; the same command looks again",
            highlight=False,
        )
    return count["failed"] + count["damaged"]


def _list_once(cells: list[Cell]) -> list[Cell]:
    return list({(cell.experiment, cell.slug): cell for cell in cells}.values())


def check_data(cells: list[Cell], context: RunContext) -> None:
    """Load every data set once before anything starts: a missing folder is said at once, with its layout."""
    from tensor_dropout_lab.data import load_data
    from tensor_dropout_lab.training.config import resolve_config

    seen = set()
    for cell in cells:
        config = resolve_config(overrides=complete(cell.of or cell, context)).data
        key = repr(config)
        if key not in seen:
            seen.add(key)
            load_data(config.name, root=config.root, seed=config.seed, **config.options)


def make_context(out: Path, options: dict[str, Any]) -> RunContext:
    """Where to run; its settings are taken out of the options."""
    return RunContext(out, options.pop("roots", {}), options.pop("device", "auto"), options.pop("rerun_stale", False))


def run(name: str, preset: str, out: Path, seed: int, **options: Any) -> list[Path]:
    """Run what is missing of an experiment, draw it, and write its table: :func:`run_several` of one."""
    return run_several([name], preset, out, seed, **options)[0]


def run_several(names: list[str], preset: str, out: Path, seed: int, **options: Any) -> tuple[list[Path], int]:
    """Run what is missing of some experiments in one sweep, draw them, and write their tables.

    Args:
        names: experiments, or "EXPERIMENT/RECIPE".
        preset: "quick" or "paper".
        out: the folder of all experiments of this preset.
        seed: the first seed.
        **options: of :func:`run_cells`, and ``roots`` and ``device``.

    Returns:
        What was written, and how many runs failed.
    """
    from tensor_dropout_lab.report.collect import build_section
    from tensor_dropout_lab.report.model import Report
    from tensor_dropout_lab.report.show import keep_what_was_run, print_section
    from tensor_dropout_lab.report.text import write_markdown

    console = Console()
    context = make_context(out, options)
    cells = [cell for name in names for cell in list_cells(name, preset, seed)]
    failed = run_cells(_list_once(cells), context, console=console, **options)
    written = []
    for experiment in dict.fromkeys(name.partition("/")[0] for name in names):
        section = build_section(experiment, preset, out, out / experiment)
        print_section(section, console)
        page = out / experiment / "table.md"
        write_markdown(Report(section.title, [], [keep_what_was_run(section)], []), page)
        written += [page, *(figure.svg for figure in section.figures)]
    return written, failed
