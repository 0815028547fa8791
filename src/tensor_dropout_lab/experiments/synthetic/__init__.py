"""The paper's experiment on synthetic data: the stochastic loss against its deterministic form, and against the truth.

Three stages for each format: white inputs with SGD (the paper's figure), correlated inputs with a non-zero mean (where
the printed formula and the exact one separate), and white inputs with Adam (where mask noise changes the path).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tensor_dropout_lab.experiments.recipes import load_recipes
from tensor_dropout_lab.experiments.synthetic.report import draw_curves, draw_formula, summarize, table
from tensor_dropout_lab.experiments.synthetic.setting import Setting
from tensor_dropout_lab.figures import require_matplotlib
from tensor_dropout_lab.run_records import describe_environment, read_finished, write_json

STAGES = ("white", "correlated", "adam")


def read_stages(name: str, preset: str) -> dict[str, dict[str, Any]]:
    """The settings of every stage of a preset, from the recipes."""
    found = {recipe.name: recipe.settings for recipe in load_recipes(name, preset)}
    return {
        stage: {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in found[stage].items()
            if key != "label"
        }
        for stage in STAGES
        if stage in found
    }


def is_stage_of(record: dict[str, Any], name: str, preset: str, stage: str = "white") -> bool:
    """Whether a record was made with the settings that the recipe has now, whatever its seed."""
    said = record["settings"]
    setting = Setting(format=name.removeprefix("synthetic-"), seed=said["seed"], **read_stages(name, preset)[stage])
    return bool(json.loads(json.dumps(asdict(setting))) == said)


PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    preset: read_stages("synthetic-cp", preset) for preset in ("quick", "paper")
}
"""The stages of each preset, the same for both formats."""


def run(name: str, preset: str, out: Path, seed: int, **_: Any) -> list[Path]:
    """Run the stages that are missing, then draw the figures and write the summary.

    Args:
        name: "synthetic-cp" or "synthetic-tucker".
        preset: one of ``PRESETS``.
        out: the folder of all experiments; a cut-off stage goes on from its checkpoint in it.
        seed: of the data, the start and the masks.
    """
    from tensor_dropout_lab.experiments.synthetic.training import train_stage  # the report reads this without torch

    require_matplotlib()
    out = out / name
    console = Console()
    kind = name.removeprefix("synthetic-")
    records = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for stage, arguments in read_stages(name, preset).items():
            setting = Setting(format=kind, seed=seed, **arguments)
            total = setting.search_epochs + setting.epochs
            unit = "epochs, rate search included" if setting.search_epochs else "epochs"
            bar = progress.add_task(f"{name} {stage} ({unit})", total=total)
            path = out / f"{stage}.json"
            record = read_finished(path, asdict(setting))
            if record is None and path.is_file():  # of another recipe, or damaged: not lost
                path.replace(path.with_suffix(".json.old"))
            if record is None:
                checkpoint = out / f"{stage}.safetensors"
                result = train_stage(setting, checkpoint, partial(progress.advance, bar))
                record = {"settings": asdict(setting), "environment": describe_environment(), **result}
                write_json(path, record)
                checkpoint.unlink(missing_ok=True)
            progress.update(bar, completed=total)
            records[stage] = record
    paths = [out / f"{stage}.json" for stage in records]
    for stage, record in records.items():
        paths += draw_curves(record, out / f"{name}-{stage}")
    paths += draw_formula({stage: records[stage] for stage in ("white", "correlated")}, out / f"{name}-formula")
    text = summarize(name, records)
    (out / "summary.md").write_text(text + "\n", encoding="utf-8")
    console.print(table(name, records["white"]))
    console.print(text)
    return [*paths, out / "summary.md"]
