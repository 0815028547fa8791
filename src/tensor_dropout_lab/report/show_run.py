"""One run on the terminal, or the list of an experiment's runs, from records alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.registry import find_main
from tensor_dropout_lab.experiments.recipes import describe_experiment, list_experiments
from tensor_dropout_lab.record_store import RecordStore, Run

MOST_EPOCHS = 12
"""Lines of a training curve that are shown."""


def print_runs(store: RecordStore, experiment: str, console: Console) -> None:
    """A line for each run: its state, its main number on test examples, and how long it took."""
    names = store.list_runs(experiment)
    if experiment in list_experiments():
        description = describe_experiment(experiment)
        console.print(escape(f"{description['title']}. {description['reference']}."), highlight=False)
    table = Table("run", "state", "test", "seconds", title=f"{experiment}, {len(names)} runs in {store.base}")
    for name in names:
        table.add_row(*map(escape, (name, *_describe(store.run(experiment, name)))))
    console.print(table)


def _describe(run: Run) -> tuple[str, str, str]:
    """State, main number and seconds."""
    try:
        failure, result = run.read_record("failed.json"), run.read_record("result.json") or {}
        evaluation = run.read_record("evaluation.json") or run.read_record("evaluation/evaluation.json") or {}
    except ValueError as error:
        return f"damaged: {error}", "", ""
    if failure is not None:
        return f"failed: {failure.get('error', '')}", "", ""
    scores = result.get("test") or evaluation.get("summary", {}).get("clean") or {}
    number = ""
    if {"accuracy", "mae"} & scores.keys():
        main = find_main(scores).name
        number = f"{main} {scores[main]:.2f}" if isinstance(scores[main], int | float) else f"{main} is no number"
    seconds = f"{result['seconds']:.0f}" if "seconds" in result else ""
    return "done" if result or evaluation else "cut off", number, seconds


def print_run(store: RecordStore, experiment: str, name: str, console: Console) -> None:
    """Everything that is kept of a run, in the order in which one asks for it."""
    run = store.run(experiment, name)
    kind = f"packed in {store.base / experiment}.jsonl.xz" if run.packed else f"in {run.folder}"
    console.print(f"[bold]{escape('/'.join(filter(None, (experiment, name))))}[/bold], {escape(kind)}", highlight=False)
    shown = {"run.json", "result.json", "failed.json", "evaluation.json", "evaluation/evaluation.json", "cell.json"}
    records = {name: record for name in sorted(shown) if (record := _read(run, name)) is not None}
    if "failed.json" in records:
        _print(console, "failed", records["failed.json"].get("error"), records["failed.json"].get("traceback"))
    settings = records.get("run.json", {})
    identity = records.get("cell.json", {}).get("identity", {})
    _tabulate(console, "settings", settings.get("settings") or identity.get("config") or identity.get("of", {}))
    _tabulate(console, "data", settings.get("data", {}))
    _tabulate(console, "result", records.get("result.json", {}), name_result)
    for path in ("evaluation.json", "evaluation/evaluation.json"):
        if path in records:
            from tensor_dropout_lab.evaluation.show import print_evaluation  # of attacks: it needs torch

            console.print(f"\n[bold]{path}[/bold]")
            print_evaluation(records[path], console)
    _tabulate_curve(console, run.read_metrics())
    environments = [record["environment"] for record in records.values() if "environment" in record]
    for environment in environments[:1]:
        _tabulate(console, "environment", environment)
    others = [path for path in run.names() if path not in shown]
    if others:
        console.print(f"\nfiles: {escape(', '.join(others))}", highlight=False)
    for path in others:
        if path.endswith(".json"):  # what belongs to no single run: its single numbers
            _tabulate(
                console, path, {key: value for key, value in (_read(run, path) or {}).items() if key != "environment"}
            )


def _read(run: Run, name: str) -> dict[str, Any] | None:
    try:
        return run.read_record(name)
    except ValueError as error:
        if isinstance(error, TensorDropoutError):
            raise
        raise TensorDropoutError(f"show: {run.folder / name} is damaged ({error}); delete or restore it") from error


def _print(console: Console, title: str, *texts: str | None) -> None:
    console.print(f"\n[bold]{title}[/bold]")
    for text in filter(None, texts):
        console.print(escape(text), highlight=False)


def name_result(key: str) -> str:
    """The key of a result, which says so where its number is of the spread over the masks alone.

    Example:
        >>> name_result("test.width_95"), name_result("test.mae")
        ('test.width_95 (spread over the masks alone)', 'test.mae')
    """
    of_spread = re.search(r"(coverage|width)_\d+$", key)
    return f"{key} (spread over the masks alone)" if of_spread else key


def _tabulate(
    console: Console, title: str, record: Mapping[str, Any], name: Callable[[str], str] = lambda key: key
) -> None:
    """Keys, as they are to be named, and values; long lists by their length."""
    rows = _flatten(record)
    if not rows:
        return
    console.print(f"\n[bold]{escape(title)}[/bold]")
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for key, value in rows:
        table.add_row(escape(name(key)), escape(value))
    console.print(table)


def _flatten(record: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in record.items():
        if isinstance(value, Mapping):
            rows += _flatten(value, f"{prefix}{key}.")
        elif isinstance(value, list) and len(value) > 12:
            rows.append((f"{prefix}{key}", f"{len(value)} values"))
        elif value is not None:
            rows.append((f"{prefix}{key}", f"{value:.6g}" if isinstance(value, float) else str(value)))
    return rows


def _tabulate_curve(console: Console, lines: Sequence[Mapping[str, Any]]) -> None:
    """The training curve: lines at about equal distances, the last among them."""
    if not lines:
        return
    step = -(-len(lines) // MOST_EPOCHS)
    chosen = list(lines[::-1][::step][::-1])
    keys = [key for key in lines[-1] if all(isinstance(line.get(key), int | float) for line in chosen)]
    table = Table(*keys, title=f"training, {len(lines)} lines kept", title_justify="left")
    for line in chosen:
        table.add_row(*(f"{line[key]:.5g}" for key in keys))
    console.print()
    console.print(table)
