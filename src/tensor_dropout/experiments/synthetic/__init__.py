"""The paper's experiment on synthetic data: the stochastic loss against its deterministic form, and against the truth.

Three stages for each format: white inputs with SGD (the paper's figure), correlated inputs with a non-zero mean (where
the printed formula and the exact one separate), and white inputs with Adam (where mask noise changes the path).
"""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tensor_dropout.experiments.synthetic.report import draw_curves, draw_formula, summarize, table
from tensor_dropout.experiments.synthetic.training import Setting, train_stage
from tensor_dropout.figures import require_matplotlib
from tensor_dropout.records import describe_environment, read_finished, write_json

SUMMARY = (
    "stochastic loss against its deterministic form, printed and exact (simulated data; paper, section 5.1); "
    "preset paper takes 11 minutes for CP and 24 for Tucker on two cores"
)

_RATES = (0.001, 0.003, 0.01, 0.03)
_SMALL: dict[str, Any] = {
    "size": 8,
    "true_rank": 3,
    "rank": 5,
    "n_train": 500,
    "n_test": 200,
    "batch": 50,
    "decay_every": 48,
    "rates": (0.01, 0.03, 0.1),
    "tune_epochs": 40,
    "points": 30,
}

PRESETS: dict[str, dict[str, dict[str, Any]]] = {
    "quick": {
        "white": {"inputs": "white", "optimizer": "sgd", "epochs": 120, **_SMALL},
        "correlated": {"inputs": "correlated", "optimizer": "sgd", "epochs": 60, **_SMALL},
    },
    "paper": {
        "white": {"inputs": "white", "optimizer": "sgd", "epochs": 500, "rates": _RATES, "tune_epochs": 200},
        "correlated": {"inputs": "correlated", "optimizer": "sgd", "epochs": 100, "rates": _RATES, "tune_epochs": 100},
        "adam": {"inputs": "white", "optimizer": "adam", "epochs": 100, "rates": (0.001,)},
    },
}
"""The stages of each preset. 500 epochs are the paper's; the stages that it does not have are shorter."""


def run(name: str, preset: str, out: Path, seed: int) -> list[Path]:
    """Run the stages that are missing, then draw the figures and write the summary.

    Args:
        name: "synthetic-cp" or "synthetic-tucker".
        preset: one of ``PRESETS``.
        out: the folder for results; a cut-off stage goes on from its checkpoint there.
        seed: of the data, the start and the masks.
    """
    require_matplotlib()
    console = Console()
    kind = name.removeprefix("synthetic-")
    records = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        for stage, arguments in PRESETS[preset].items():
            setting = Setting(format=kind, seed=seed, **arguments)
            total = setting.search_epochs + setting.epochs
            unit = "epochs, rate search included" if setting.search_epochs else "epochs"
            bar = progress.add_task(f"{name} {stage} ({unit})", total=total)
            path = out / f"{stage}.json"
            record = read_finished(path, asdict(setting))
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
