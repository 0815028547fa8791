"""What every rendering of a table shares: the words for states, the numbers of notes, the columns of numbers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from tensor_dropout_lab.report.model import Cell, Figure, Report, State, Table

#: What a state means, in the order in which states are counted.
MEANINGS: dict[State, str] = {
    "paper": "from the paper",
    "ours": "measured here, in bold",
    "not run": "no record yet",
    "failed": "the run ended without a result; never averaged in",
    "stale": "the recipe was changed after the run",
    "damaged": "the record cannot be read",
}
#: What must be said above the miniatures.
MINIATURES = (
    "Small runs on data that comes with the library. They show that each experiment runs, not what it finds at full "
    "size: compare their rows with each other, never with the paper's."
)
#: States that a reader must not overlook.
PROBLEMS: tuple[State, ...] = ("failed", "stale", "damaged")
SHORT = 24  # characters: longer texts are read as sentences, not compared as numbers


@dataclass(frozen=True)
class Footnote:
    """A note under a table.

    Attributes:
        number: counted from 1.
        row: the first row that refers to it, counted from 0.
        column: the column there, counted from 0.
    """

    number: int
    row: int
    column: int


def missing_word(cell: Cell) -> str:
    """The state's word, where it must be said and the cell's text does not say it already.

    Example:
        >>> missing_word(Cell("75.9 ± 0.3 (3)", "stale"))
        'stale'
        >>> missing_word(Cell("not run", "not run")), missing_word(Cell("76.19", "paper"))
        ('', '')
    """
    if cell.state in ("text", "paper", "ours") or re.search(rf"\b{cell.state}\b", cell.text, re.IGNORECASE):
        return ""
    return cell.state


def add_label(item: Table | Figure, section_label: str) -> str:
    """A caption that carries its label, or the section's, so that a table cut out of the report does not lose it.

    Example:
        >>> add_label(Table("Accuracy in %", [], []), "miniature on scikit-learn's digits")
        "Accuracy in % (miniature on scikit-learn's digits)"
    """
    label = section_label if item.label is None else item.label
    return item.caption if label in item.caption else f"{item.caption} ({label})"


def number_details(table: Table) -> dict[str, Footnote]:
    """The footnotes of a table by their text, in reading order; equal details share one.

    Example:
        >>> cells = [Cell("1", "ours", "seeds 0-2"), Cell("2", "ours", "seed 0"), Cell("3", "ours", "seeds 0-2")]
        >>> [(text, note.number) for text, note in number_details(Table("", ["a", "b", "c"], [cells])).items()]
        [('seeds 0-2', 1), ('seed 0', 2)]
    """
    notes: dict[str, Footnote] = {}
    for row, cells in enumerate(table.rows):
        for column, cell in enumerate(cells):
            if cell.detail and cell.detail not in notes:
                notes[cell.detail] = Footnote(len(notes) + 1, row, column)
    return notes


def find_numbers(table: Table) -> list[bool]:
    """For each column, whether it holds numbers (short texts that are no labels), which are set to the right."""
    columns = [[row[index] for row in table.rows] for index in range(len(table.columns))]
    return [
        any(cell.state != "text" for cell in cells) and all(len(cell.text) <= SHORT for cell in cells)
        for cells in columns
    ]


def tabulate_claims(report: Report) -> Table:
    """The claims of the paper with their verdicts, as a table."""
    rows = []
    for judged in report.claims:
        claim = judged.claim
        numbers = "; ".join(claim.show_measures())
        state: State = "ours" if claim.measures else "not run"
        verdict = Cell(claim.verdict, state, claim.note)
        rows.append([Cell(claim.statement), Cell(claim.place), verdict, Cell(numbers), Cell(claim.unit)])
    return Table("The paper's claims", ["claim", "where", "verdict", "ours, with intervals", "unit"], rows)


def count_states(report: Report) -> dict[State, int]:
    """How many cells are in each state that occurs, labels not counted.

    Example:
        >>> from tensor_dropout_lab.report.model import Section
        >>> table = Table("", ["a", "b"], [[Cell("2.96", "paper"), Cell("not run", "not run")]])
        >>> count_states(Report("", [], [Section("mri", "MRI", "Table 3", tables=[table])], []))
        {'paper': 1, 'not run': 1}
    """
    found = Counter(
        cell.state for section in report.all_sections for table in section.tables for row in table.rows for cell in row
    )
    return {state: found[state] for state in MEANINGS if found[state]}


def check_tables(report: Report) -> None:
    """Refuse tables with holes: every row must have one cell per column.

    Raises:
        ValueError: naming the section, the table and the row.
    """
    for section in report.all_sections:
        for table in section.tables:
            for index, row in enumerate(table.rows):
                if len(row) != len(table.columns):
                    raise ValueError(
                        f"report: section {section.id!r}, table {table.caption!r}: row {index} has {len(row)} cells, "
                        f"the head {len(table.columns)}: {[cell.text for cell in row]} under {table.columns}"
                    )
