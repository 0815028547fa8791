"""One cell of a table: its folder, its state, and how it is run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.version import __version__
from tensor_dropout_lab.experiments.recipes import Cell
from tensor_dropout_lab.locks import FolderInUseError
from tensor_dropout_lab.records import write_json

FORMAT = 1
"""Of ``cell.json``; a record of another format is not read."""

CellState = Literal["done", "missing", "failed", "stale", "damaged"]


@dataclass(frozen=True)
class Found:
    """What is known of a cell.

    Attributes:
        state: "done"; "missing" (not run, or cut off); "failed"; "stale" (the recipe has changed since); "damaged".
        detail: why.
        result: the run's ``result.json``, if it is there.
        evaluation: its ``evaluation.json``, if it is there.
        record: its ``run.json`` or the evaluation's environment.
        folder: where.
    """

    state: CellState
    detail: str
    folder: Path
    result: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    record: dict[str, Any] | None = None


def find_cell(cell: Cell, base: Path) -> Found:
    """What there is of a cell under a folder of results."""
    folder = base / cell.experiment / cell.slug
    if not (folder / "cell.json").is_file():
        return Found("missing", "not run", folder)
    try:
        said = _read(folder / "cell.json")
        if said is None or said.get("format") != FORMAT:
            return Found(
                "damaged", f"its record has format {said and said.get('format')}, this version reads {FORMAT}", folder
            )
        failed, result = _read(folder / "failed.json"), _read(folder / "result.json")
        place = folder if cell.of is not None else folder / "evaluation"
        evaluation, record = _read(place / "evaluation.json"), _read(folder / "run.json")
    except ValueError as error:
        return Found("damaged", f"a record cannot be read: {error}", folder)
    found = {"result": result, "evaluation": evaluation, "record": record}
    if failed is not None:
        return Found("failed", failed.get("error", "no reason was written down"), folder)
    if not _is_of(said, cell):
        return Found("stale", "the recipe was changed after this run", folder, **found)
    trained = cell.of is not None or result is not None
    evaluated = cell.evaluation is None or evaluation is not None
    if not (trained and evaluated):
        return Found("missing", "cut off; the same command goes on", folder, **found)
    return Found("done", "", folder, **found)


def _is_of(said: dict[str, Any], cell: Cell) -> bool:
    """Whether a ``cell.json`` was written for the cell as its recipe is now."""
    return said.get("identity") == json.loads(json.dumps(cell.identity()))  # tuples become lists, as in the file


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    read = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise ValueError(f"{path.name} holds no record")
    return read


@dataclass(frozen=True)
class Place:
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


def run_cell(cell: Cell, place: Place) -> str:
    """Run what is missing of a cell; a failure is written down, not raised.

    Returns:
        "done", "failed", "stale" if it was left alone, or "missing" if another process is at it.
    """
    folder = place.base / cell.experiment / cell.slug
    found = find_cell(cell, place.base)
    if found.state == "done" or (found.state == "stale" and not place.rerun_stale):
        return found.state
    _make_room(cell, found, place.base)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "failed.json").unlink(missing_ok=True)
    write_json(folder / "cell.json", {"format": FORMAT, "version": __version__, "identity": cell.identity()})
    try:
        if cell.of is None:
            train_cell(cell, folder, place)
            run, out = folder, folder / "evaluation"
        else:
            run, out = place.base / cell.of.experiment / cell.of.slug, folder
            for source in (cell.of, *cell.others):
                if find_cell(source, place.base).state != "done":
                    raise TensorDropoutError(
                        f"the run that it evaluates, {source.experiment}/{source.slug}, is not done"
                    )
        if cell.evaluation is not None:
            evaluate_cell(cell, run, out, place)
    except FolderInUseError:  # it will be done
        return "missing"
    except Exception as error:  # any failure of one cell must leave the others alone, and must be seen in the report
        message = str(error) if isinstance(error, TensorDropoutError | OSError) else f"{type(error).__name__}: {error}"
        write_json(folder / "failed.json", {"error": message})
        return "failed"
    return "done"


def _make_room(cell: Cell, found: Found, base: Path) -> None:
    """Set aside what cannot be gone on with: nothing that was computed is deleted."""
    folder = found.folder
    if found.state == "damaged":
        for path in (*folder.glob("*.json"), *folder.glob("evaluation/*.json")):
            try:
                _read(path)
            except ValueError:
                path.replace(path.with_name(f"{path.name}.damaged"))
        said = _read(folder / "cell.json")
        whole = said is not None and said.get("format") == FORMAT
    else:
        whole = found.state == "missing" or _is_of(_read(folder / "cell.json") or {}, cell)
    if not whole and folder.is_dir():
        aside = base / ".set-aside" / cell.experiment
        aside.mkdir(parents=True, exist_ok=True)
        folder.replace(aside / f"{cell.slug}-{len(list(aside.iterdir()))}")


def train_cell(cell: Cell, folder: Path, place: Place) -> None:
    """Train, or go on training; checkpoints are removed once the result is there."""
    from tensor_dropout_lab.training.checkpoint import list_checkpoints
    from tensor_dropout_lab.training.config import resolve_config
    from tensor_dropout_lab.training.loop import train

    config = resolve_config(overrides=complete(cell, place))
    train(config, folder, show=False)
    for path in list_checkpoints(folder):
        path.unlink()


def complete(cell: Cell, place: Place) -> dict[str, Any]:
    """The cell's config with what belongs to this machine: the data's folder and the device."""
    own = {**cell.config, "run.device": place.device}
    root = place.roots.get(cell.config["data.name"])
    return own | ({} if root is None else {"data.root": root})


def evaluate_cell(cell: Cell, run: Path, out: Path, place: Place) -> None:
    """Evaluate a run that is done, or go on evaluating it; with its table's figures."""
    from tensor_dropout_lab.evaluation.evaluate import Settings
    from tensor_dropout_lab.evaluation.runs import evaluate_run

    assert cell.evaluation is not None
    options = dict(cell.evaluation)
    prediction = {key: options.pop(key) for key in ("images", "mode", "samples") if key in options}
    options["noise"] = tuple(options.pop("noise", ())) or ("none",)
    name = (cell.of or cell).config["data.name"]
    root = place.roots.get(name)
    evaluate_run(
        run,
        Settings(**options),
        out=out,
        **{"images": None, **prediction},
        ensemble=[place.base / other.experiment / other.slug for other in cell.others],
        root=None if root is None else Path(root),
        device=place.device,
    )
