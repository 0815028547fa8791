"""What a report consists of, before it becomes HTML, Markdown or LaTeX."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

State = Literal["text", "paper", "ours", "not run", "failed", "stale", "damaged"]
Verdict = Literal["holds", "holds in part", "mixed", "not shown", "does not hold", "not run"]
Side = Literal["above", "below", "within"]
VERDICTS: dict[Verdict, str] = {
    "holds": "every interval is on the claim's side",
    "holds in part": "some intervals are on the claim's side, the others leave it open; one may be there by chance",
    "mixed": "some intervals are on the claim's side, some on the other",
    "not shown": "the intervals leave it open",
    "does not hold": "no interval is on the claim's side, and at least one is on the other",
    "not run": "no record of the full size",
}


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
class Measure:
    """A measured number with its interval.

    Attributes:
        label: what was measured.
        value: the number.
        low: lower end of its interval, of 95 % if the unit does not say another; the number itself where it has none.
        high: upper end.
        printed: the paper's number; None if it prints none.
    """

    label: str
    value: float
    low: float
    high: float
    printed: float | None = None

    def show(self, *, signed: bool = True) -> str:
        """In words.

        Example:
            >>> Measure("CP", 0.47, 0.04, 0.91, 0.31).show()
            'CP: +0.47 [+0.04, +0.91] (paper +0.31)'
        """
        style = "+.2f" if signed else ".2f"
        numbers = f"{self.value:{style}}"
        numbers += f" [{self.low:{style}}, {self.high:{style}}]" if self.low < self.high else ""
        numbers += "" if self.printed is None else f" (paper {self.printed:{style}})"
        return f"{self.label}: {numbers.replace('-', '−')}"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and what our records say of it.

    Attributes:
        statement: the claim.
        place: where the paper makes it.
        section: the experiment whose section of the report has the details.
        unit: of the measures.
        measures: the numbers that decide.
        note: what else a reader must know, in one or two sentences.
        reference: the number that the intervals are compared with.
        side: where an interval must lie for the claim to be right: "above" or "below" the reference, or "within" ± it.
    """

    statement: str
    place: str
    section: str
    unit: str
    measures: list[Measure] = field(default_factory=list)
    note: str = ""
    reference: float = 0.0
    side: Side = "above"

    def show_measures(self) -> list[str]:
        """Each measure in words; differences have a sign."""
        return [measure.show(signed=self.reference == 0 or self.side == "within") for measure in self.measures]

    @property
    def verdict(self) -> Verdict:
        """What the intervals say.

        Example:
            >>> right, open, wrong = Measure("", 1, 0.5, 1.5), Measure("", 1, -1, 3), Measure("", -1, -2, -0.1)
            >>> [Claim("", "", "", "", found).verdict for found in ([right], [right, open], [open], [open, wrong], [])]
            ['holds', 'holds in part', 'not shown', 'does not hold', 'not run']
        """
        if not self.measures:
            return "not run"
        above = [measure.low > self.reference for measure in self.measures]
        below = [measure.high < self.reference for measure in self.measures]
        inside = [-self.reference < measure.low and measure.high < self.reference for measure in self.measures]
        outside = [measure.low > self.reference or measure.high < -self.reference for measure in self.measures]
        right, wrong = {
            "above": (above, below),
            "below": (below, above),
            "within": (inside, outside),
        }[self.side]
        if any(right):
            return "holds" if all(right) else "mixed" if any(wrong) else "holds in part"
        return "does not hold" if any(wrong) else "not shown"


@dataclass(frozen=True)
class Judged:
    """A claim of the paper with the picture of its measures, if there are any."""

    claim: Claim
    figure: Figure | None = None


@dataclass(frozen=True)
class Report:
    """The whole.

    Attributes:
        title: of the page.
        summary: sentences at its top.
        sections: of the full size, in the order of the paper.
        environment: (name, value): hardware and versions of the records.
        made: when, as text; "" in tests.
        claims: of the paper, with verdicts: what the page opens with.
        miniatures: sections of small runs on other data, in a part of their own.
    """

    title: str
    summary: list[str]
    sections: list[Section]
    environment: list[tuple[str, str]]
    made: str = ""
    claims: list[Judged] = field(default_factory=list)
    miniatures: list[Section] = field(default_factory=list)

    @property
    def all_sections(self) -> list[Section]:
        """Those of the full size, then the miniatures."""
        return [*self.sections, *self.miniatures]
