"""A section of the report on the terminal: what was run of it."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Shown

from tensor_dropout_lab.report.model import Section, Table


def print_section(section: Section, console: Console) -> None:
    """Its tables, notes and verdicts. What was not run is counted, not listed: the files have the whole tables."""
    label = f" ({section.label})" if section.label else ""
    console.print(f"[bold]{escape(section.title + label)}[/bold]\n{escape(section.reference)}", highlight=False)
    for table in map(trim, section.tables):
        if not table.rows:
            continue
        shown = Shown(*map(escape, table.columns), title=escape(table.caption), caption=escape(table.note) or None)
        for row in table.rows:
            shown.add_row(*(escape(cell.text) for cell in row))
        console.print(shown)
    for name, verdict in section.verdicts:
        console.print(f"{escape(name)}: {escape(verdict)}", highlight=False)


def keep_what_was_run(section: Section) -> Section:
    """The section without the rows, columns and tables in which nothing was run, and how many those are."""
    tables, left_out = [], 0
    for table in section.tables:
        short = trim(table)
        left_out += len(table.rows) - len(short.rows)
        if short.rows:
            tables.append(replace(short, note=table.note, label=table.label))
    missing = [f"{left_out} row{'s' * (left_out > 1)} of its tables not run."] if left_out else []
    return replace(section, tables=tables, notes=[*section.notes, *missing])


def trim(table: Table) -> Table:
    """The table without the rows and columns in which nothing was run; the number of rows left out is its note.

    Example:
        >>> from tensor_dropout_lab.report.model import Cell
        >>> missing = Cell("not run", "not run")
        >>> rows = [
        ...     [Cell("FC"), Cell("75.88", "paper"), Cell("98.3", "ours"), missing],
        ...     [Cell("CP"), Cell("75.77", "paper"), missing, missing],
        ... ]
        >>> small = trim(Table("Accuracy", ["head", "paper", "miniature", "full size"], rows))
        >>> small.columns, [cell.text for cell in small.rows[0]], small.note
        (['head', 'paper', 'miniature'], ['FC', '75.88', '98.3'], '1 row not run')
    """
    rows = [row for row in table.rows if any(cell.state not in ("text", "paper", "not run") for cell in row)]
    kept = [
        index for index in range(len(table.columns)) if not rows or any(row[index].state != "not run" for row in rows)
    ]
    left_out = len(table.rows) - len(rows)
    return Table(
        table.caption,
        [table.columns[index] for index in kept],
        [[row[index] for index in kept] for row in rows],
        f"{left_out} row{'s' if left_out > 1 else ''} not run" if left_out else "",
    )
