"""One cell of a table: its record, its state, and how it is run."""

from __future__ import annotations

import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.version import __version__
from tensor_dropout_lab.experiments.recipes import Cell
from tensor_dropout_lab.locks import FolderInUseError
from tensor_dropout_lab.record_store import LiveRun, RecordStore, Run
from tensor_dropout_lab.run_records import write_json

FORMAT = 1
"""Of ``cell.json``; a record of another format is not read."""

RunState = Literal["done", "missing", "failed", "stale", "damaged"]


@dataclass(frozen=True)
class RunRecord:
    """What is known of a cell's run.

    Attributes:
        state: "done"; "missing" (not run, or cut off); "failed"; "stale" (the recipe has changed since); "damaged".
        detail: why.
        run: its files.
        result: its ``result.json``, if it is there.
        evaluation: its ``evaluation.json``, if it is there.
        record: its ``run.json``, if it is there.
    """

    state: RunState
    detail: str
    run: Run
    result: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    record: dict[str, Any] | None = None


def find_cell(cell: Cell, base: Path) -> RunRecord:
    """What there is of a cell under a folder of results, live or packed."""
    run = RecordStore(base).run(cell.experiment, cell.slug)
    try:
        header = run.read_record("cell.json")
        if header is None:
            return RunRecord("missing", "not run", run)
        if header.get("format") != FORMAT:
            detail = f"its record has format {header.get('format')}, this version reads {FORMAT}"
            return RunRecord("damaged", detail, run)
        failure, result = run.read_record("failed.json"), run.read_record("result.json")
        evaluation = run.read_record("evaluation.json" if cell.of is not None else "evaluation/evaluation.json")
        settings = run.read_record("run.json")
    except ValueError as error:
        return RunRecord("damaged", f"a record cannot be read: {error}", run)
    if failure is not None:
        return RunRecord("failed", failure.get("error", "no reason was written down"), run)
    if not _is_of(header, cell):
        return RunRecord("stale", "the recipe was changed after this run", run, result, evaluation, settings)
    trained = cell.of is not None or result is not None
    evaluated = cell.evaluation is None or evaluation is not None
    if not (trained and evaluated):
        return RunRecord("missing", "cut off; the same command goes on", run, result, evaluation, settings)
    return RunRecord("done", "", run, result, evaluation, settings)


def _is_of(header: dict[str, Any], cell: Cell) -> bool:
    """Whether a ``cell.json`` was written for the cell as its recipe is now."""
    return header.get("identity") == json.loads(json.dumps(cell.identity()))  # tuples become lists, as in the file


@dataclass(frozen=True)
class RunContext:
    """Where cells run.

    Attributes:
        base: the folder of results; an experiment is a folder in it.
        roots: data set -> the folder with its files.
        device: "auto", "cpu" or "cuda".
        rerun_stale: whether a run whose recipe has changed is run again.
    """

    base: Path
    roots: dict[str, str]
    device: str = "auto"
    rerun_stale: bool = False


def run_cell(cell: Cell, context: RunContext) -> str:
    """Run what is missing of a cell; a failure is written down, not raised.

    Returns:
        "done", "failed", "stale" if it was left alone, or "missing" if another process is at it.
    """
    folder = context.base / cell.experiment / cell.slug
    before = find_cell(cell, context.base)
    if before.state == "done" or (before.state == "stale" and not context.rerun_stale):
        return before.state
    _make_room(cell, before, context.base)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failed.json").unlink(missing_ok=True)
    write_json(folder / "cell.json", {"format": FORMAT, "version": __version__, "identity": cell.identity()})
    try:
        if cell.of is None:
            train_cell(cell, folder, context)
            run, out = folder, folder / "evaluation"
        else:
            run, out = context.base / cell.of.experiment / cell.of.slug, folder
            for source in (cell.of, *cell.others):
                _require_weights(source, context.base)
        if cell.evaluation is not None:
            evaluate_cell(cell, run, out, context)
    except FolderInUseError:  # it will be done
        return "missing"
    except Exception as error:  # any failure of one cell must leave the others alone, and must be seen in the report
        write_json(folder / "failed.json", _describe_failure(error))
        return "failed"
    return "done"


def _require_weights(cell: Cell, base: Path) -> None:
    """Refuse to evaluate a run that is not done, or of which only the records are there."""
    found, name = find_cell(cell, base), f"{cell.experiment}/{cell.slug}"
    if found.state != "done":
        raise TensorDropoutError(f"the run that it evaluates, {name}, is not done")
    if found.run.packed:
        raise TensorDropoutError(
            f"the run that it evaluates, {name}, is a packed record without weights; train it again: reproduce both "
            "into another folder with --out"
        )


def _describe_failure(error: Exception) -> dict[str, Any]:
    """The record of a failure; one that we did not foresee comes with its traceback."""
    if isinstance(error, TensorDropoutError | OSError):
        return {"error": str(error)}
    return {"error": f"{type(error).__name__}: {error}", "traceback": "".join(traceback.format_exception(error))}


def _make_room(cell: Cell, before: RunRecord, base: Path) -> None:
    """Set aside what cannot be gone on with: nothing that was computed is deleted."""
    run = LiveRun(before.run.folder)
    if before.state == "damaged":
        for path in (*run.folder.glob("*.json"), *run.folder.glob("evaluation/*.json")):
            try:
                run.read_record(path.relative_to(run.folder).as_posix())
            except ValueError:
                path.replace(path.with_name(f"{path.name}.damaged"))
        header = run.read_record("cell.json")
        usable = header is not None and header.get("format") == FORMAT
    else:
        usable = before.state == "missing" or _is_of(run.read_record("cell.json") or {}, cell)
    if not usable and run.folder.is_dir():
        aside = base / ".set-aside" / cell.experiment
        aside.mkdir(parents=True, exist_ok=True)
        run.folder.replace(aside / f"{cell.slug}-{len(list(aside.iterdir()))}")


def train_cell(cell: Cell, folder: Path, context: RunContext) -> None:
    """Train, or go on training; checkpoints are removed once the result is there."""
    from tensor_dropout_lab.training.checkpoint import list_checkpoints
    from tensor_dropout_lab.training.config import resolve_config
    from tensor_dropout_lab.training.loop import train

    config = resolve_config(overrides=complete(cell, context))
    train(config, folder, show=False)
    for path in list_checkpoints(folder):
        path.unlink()


def complete(cell: Cell, context: RunContext) -> dict[str, Any]:
    """The cell's config with what belongs to this machine: the data's folder and the device."""
    own = {**cell.config, "run.device": context.device}
    root = context.roots.get(cell.config["data.name"])
    return own | ({} if root is None else {"data.root": root})


def evaluate_cell(cell: Cell, run: Path, out: Path, context: RunContext) -> None:
    """Evaluate a run that is done, or go on evaluating it; with its table's figures."""
    from tensor_dropout_lab.evaluation.runs import RunSettings, evaluate_run

    assert cell.evaluation is not None
    options = dict(cell.evaluation)
    prediction = {key: options.pop(key) for key in ("images", "mode", "samples") if key in options}
    options["noise"] = tuple(options.pop("noise", ())) or ("none",)
    name = (cell.of or cell).config["data.name"]
    root = context.roots.get(name)
    evaluate_run(
        run,
        RunSettings(**options),
        out=out,
        **{"images": None, **prediction},
        ensemble=[context.base / other.experiment / other.slug for other in cell.others],
        root=None if root is None else Path(root),
        device=context.device,
    )
