"""Synthetic data: the stochastic loss and its exact deterministic form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensor_dropout_lab.experiments.synthetic import is_stage_of
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, State, Table
from tensor_dropout_lab.report.sections.runs import Part


def read_stage(experiment: str, preset: str, base: Path | None) -> tuple[State, dict[str, Any] | None]:
    """The state of the stage that is shown, and its record if it can be used."""
    if base is None:
        return "not run", None
    try:
        record = RecordStore(base).run(experiment).read_record("white.json")
    except ValueError:
        return "damaged", None
    if record is None:
        return "not run", None
    if "variants" not in record:
        return "damaged", None
    return ("ours", record) if is_stage_of(record, experiment, preset) else ("stale", None)


def build_synthetic(part: Part) -> Section:
    """A table of the losses at each θ, and the curves."""
    state, record = read_stage(part.experiment, part.preset, part.base)
    columns = [
        "θ",
        "final loss, deterministic",
        "final loss, stochastic",
        "mean gap ± std over mask seeds",
        "printed formula off by",
    ]
    pictures = []
    if record is None:
        rows = [[Cell("all θ"), *(Cell(state, state) for _ in columns[1:])]]
    else:
        losses = drawings.describe_stage(record)
        rows = [[Cell(f"{row[0]:g}"), *(Cell(text, "ours") for text in row[1:])] for row in losses]
        drawings.draw_stage(record, part.stem())
        alt = (
            "Five panels, one per θ: the stochastic loss and its exact deterministic form over the epochs; a third "
            "curve is training on the printed formula."
        )
        pictures.append(Figure(part.stem().with_suffix(".svg"), alt, "Loss over epochs, simulated white inputs"))
    table = Table("Exact expected loss, simulated white inputs", columns, rows)
    notes = ["The paper shows these curves and calls them identical; it prints no numbers."]
    return part.section(tables=[table], figures=pictures, notes=notes)
