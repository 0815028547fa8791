"""Synthetic data: the stochastic loss and its exact deterministic form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tensor_dropout_lab.experiments.synthetic import is_stage_of
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.report import drawings
from tensor_dropout_lab.report.model import Cell, Figure, Section, State, Table
from tensor_dropout_lab.report.sections.runs import SIZES, Bases, label_of, open_section


def _read_stage(experiment: str, base: Path, preset: str) -> tuple[State, dict[str, Any] | None]:
    """The state of the stage that is shown, and its record if it can be used."""
    try:
        record = RecordStore(base).run(experiment).read_record("white.json")
    except ValueError:
        return "damaged", None
    if record is None:
        return "not run", None
    if "variants" not in record:
        return "damaged", None
    return ("ours", record) if is_stage_of(record, experiment, preset) else ("stale", None)


def build_synthetic(experiment: str, bases: Bases, figures: Path) -> Section:
    """A table and a figure for each size."""
    tables, pictures = [], []
    for preset, size in SIZES.items():
        state, record = _read_stage(experiment, bases[preset], preset) if preset in bases else ("not run", None)
        columns = [
            "θ",
            "final loss, deterministic",
            "final loss, stochastic",
            "mean gap ± std over mask seeds",
            "printed formula off by",
        ]
        if record is None:
            rows = [[Cell("all θ"), *(Cell(state, state) for _ in columns[1:])]]
        else:
            rows = [
                [Cell(f"{row[0]:g}"), *(Cell(text, "ours") for text in row[1:])]
                for row in drawings.describe_stage(record)
            ]
            stem = figures / f"{experiment}-{preset}"
            drawings.draw_stage(record, stem)
            alt = (
                "Five panels, one per θ: the stochastic loss and its exact deterministic form over the epochs; a third "
                "curve is training on the printed formula."
            )
            pictures.append(
                Figure(
                    stem.with_suffix(".svg"),
                    alt,
                    f"Loss over epochs, simulated white inputs, {size}",
                    label_of(experiment, preset),
                )
            )
        caption = f"Exact expected loss, simulated white inputs, {size}"
        tables.append(Table(caption, columns, rows, label=label_of(experiment, preset)))
    notes = ["The paper shows these curves and calls them identical; it prints no numbers."]
    return open_section(experiment, bases, tables=tables, figures=pictures, notes=notes)
