"""A section of the report on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensor_dropout.report.model import Section


def print_section(section: Section, console: Console) -> None:
    """Its tables, notes and verdicts."""
    label = f" ({section.label})" if section.label else ""
    console.print(f"[bold]{escape(section.title + label)}[/bold]\n{escape(section.reference)}", highlight=False)
    for table in section.tables:
        shown = Table(*map(escape, table.columns), title=escape(table.caption))
        for row in table.rows:
            shown.add_row(*(escape(cell.text) for cell in row))
        console.print(shown)
    for name, verdict in section.verdicts:
        console.print(f"{escape(name)}: {escape(verdict)}", highlight=False)
