"""What a report consists of, before it becomes HTML, Markdown or LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["text", "paper", "ours", "not run", "failed", "stale", "damaged"]


@dataclass(frozen=True)
class Cell:
    """One cell of a table.

    Attributes:
        text: what is shown, e.g. "76.19" or "75.9 ± 0.3 (3)".
        state: "paper" for a number of the paper, "ours" for a measured one; "not run", "failed", "stale" (the recipe
            was changed after the run) and "damaged" (the record cannot be read) are shown as such; "text" for labels.
        detail: a longer explanation: interval, seeds, record; shown on hover and in a footnote.
    """

    text: str
    state: State = "text"
    detail: str = ""


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: what it shows.
        columns: the head.
        rows: cells, as many as columns in each row.
        note: what a reader must know, e.g. how intervals were made.
        label: what must be said of its data; None: the section's.
    """

    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    label: str | None = None


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        svg: the file, made by matplotlib; it is put into the page itself.
        alt: a text alternative that says what is to be seen.
        caption: below the picture.
        label: what must be said of its data; None: the section's.
    """

    svg: Path
    alt: str
    caption: str
    label: str | None = None


@dataclass(frozen=True)
class Section:
    """One table or figure of the paper, and what we have for it.

    Attributes:
        id: the experiment, e.g. "cifar100-attacks".
        title: e.g. "CIFAR-100: accuracy".
        reference: where it is in the paper.
        label: what must be said of the data: "simulated", "miniature on scikit-learn's digits"; "" for the full size.
        tables: tables.
        figures: pictures.
        notes: paragraphs of plain text.
        verdicts: (network, sentence) of audits.
    """

    id: str
    title: str
    reference: str
    label: str = ""
    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdicts: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Report:
    """The whole.

    Attributes:
        title: of the page.
        summary: sentences at its top.
        sections: in the order of the paper.
        environment: (name, value): hardware and versions of the records.
        made: when, as text; "" in tests.
    """

    title: str
    summary: list[str]
    sections: list[Section]
    environment: list[tuple[str, str]]
    made: str = ""
