"""Whether single predictions have intervals that hold: of runs that were calibrated before they were evaluated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from tensor_dropout_lab.report.model import Cell, Section, Table
from tensor_dropout_lab.report.sections.runs import Part, Runs

COVERAGE = 0.9
"""Of the intervals and sets that are shown."""
UNCALIBRATED = (
    "Intervals of single predictions: none, since no run here was calibrated before it was evaluated (tensor-dropout "
    "calibrate RUN, then evaluate)."
)
_NUMBERS = (f"inside {100 * COVERAGE:g} % intervals, %", "mean width", "masks, mean std")
_CLASSES = (
    "temperature",
    "NLL before",
    "NLL after",
    f"{100 * COVERAGE:g} % sets that hold the class, %",
    "classes in a set",
)
_NOTE = (
    "On clean test examples, means over the runs that were calibrated, their number in brackets. The intervals come "
    "from errors of held-out examples; the spread over the masks is a part of them, and no error."
)


def add_calibration(section: Section, part: Part) -> Section:
    """The section with a table of its calibrated runs; or, if its runs were evaluated, with a note that there are none.

    Records of before say nothing of it.
    """
    rows = {runs.recipe.row: runs for runs in part.runs() if any(found.evaluation for found in runs.done())}
    found = {row: _list_calibrations(runs) for row, runs in rows.items()}
    if not rows:
        return section
    if not any(found.values()):
        return replace(section, notes=[*section.notes, UNCALIBRATED])
    return replace(section, tables=[*section.tables, tabulate_calibrations(found)])


def _list_calibrations(runs: Runs) -> list[dict[str, Any]]:
    records = [(found.evaluation or {}).get("calibration") or {} for found in runs.done()]
    return [record for record in records if "levels" in record]


def tabulate_calibrations(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """A row for each network: of numbers the intervals and the masks, of classes the temperature and the sets.

    Args:
        rows: by name what the evaluations of its calibrated runs say; none where none was.
    """
    classes = next(each for found in rows.values() for each in found)["task"] == "classification"
    columns = _CLASSES if classes else _NUMBERS
    cells = []
    for name, found in rows.items():
        numbers = [_read_classes(each) if classes else _read_numbers(each) for each in found]
        shown = [Cell("not calibrated")] * len(columns)
        if numbers:
            shown = [_show_mean([each[k] for each in numbers]) for k in range(len(columns))]
        cells.append([Cell(name), *shown])
    return Table("Calibrated on held-out examples", ["", *columns], cells, _NOTE)


def _read_numbers(record: Mapping[str, Any]) -> list[float | None]:
    """Inside, width and masks, each the mean over the targets."""
    levels = _at_coverage(record)
    masks = list((record["masks"] or {}).values())
    return [_mean([row["inside"] for row in levels]), _mean([row["width"] for row in levels]), _mean(masks)]


def _read_classes(record: Mapping[str, Any]) -> list[float | None]:
    levels = _at_coverage(record)
    likelihoods = [record[when]["nll"] for when in ("before", "after")]
    sets = [_mean([row[key] for row in levels]) for key in ("inside", "size")]
    return [record["temperature"], *likelihoods, *sets]


def _at_coverage(record: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in record["levels"] if row["coverage"] == COVERAGE]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _show_mean(values: Sequence[float | None]) -> Cell:
    mean = _mean(values)
    if mean is None:
        return Cell("")
    detail = ", ".join(f"{value:.3g}" for value in values if value is not None)
    return Cell(f"{mean:.3g} ({len(values)})", "ours", f"by run: {detail}")
