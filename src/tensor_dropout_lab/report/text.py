"""The report's tables as GitHub Markdown and as LaTeX."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.report.cells import (
    MINIATURES,
    add_label,
    check_tables,
    count_states,
    find_numbers,
    missing_word,
    number_details,
    tabulate_claims,
)
from tensor_dropout_lab.report.characters import escape_latex
from tensor_dropout_lab.report.model import VERDICTS, Cell, Figure, Report, Section, Table

# ---- Markdown ----


def write_markdown(report: Report, path: Path) -> None:
    """Write the report as GitHub Markdown; figures are linked by their paths relative to the file.

    Args:
        report: what to show.
        path: the file; replaced as a whole.

    Raises:
        ValueError: if a table has rows of different lengths.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "report.md"
        >>> cells = [Cell("Tucker, θ = 0.8"), Cell("76.05", "paper"), Cell("75.9 ± 0.3 (3)", "ours")]
        >>> table = Table("Accuracy", ["head", "paper", "ours"], [cells])
        >>> section = Section("cifar100", "CIFAR-100", "Table 4", tables=[table])
        >>> write_markdown(Report("Report", [], [section], []), path)
        >>> print(path.read_text(encoding="utf-8").split("**Accuracy**")[1].strip())
        | head            | paper |               ours |
        | --------------- | ----: | -----------------: |
        | Tucker, θ = 0.8 | 76.05 | **75.9 ± 0.3 (3)** |
    """
    check_tables(report)
    blocks = [f"# {escape_markdown(report.title)}", *map(_paragraph, report.summary)]
    if report.made:
        blocks.append(f"Made {escape_markdown(report.made)}")
    if tally := _tally(report):
        blocks.append(escape_markdown(tally))
    if report.claims:
        meanings = "; ".join(f"{verdict}: {meaning}" for verdict, meaning in VERDICTS.items())
        blocks += ["## Verdicts", _paragraph(f"{meanings}."), *_table_in_markdown(tabulate_claims(report), "")]
        blocks += [_figure_in_markdown(judged.figure, path.parent) for judged in report.claims if judged.figure]
    for section in report.sections:
        blocks += _section_in_markdown(section, path.parent)
    if report.miniatures:
        blocks += ["# Miniatures", _paragraph(MINIATURES)]
    for section in report.miniatures:
        blocks += _section_in_markdown(section, path.parent)
    if report.environment:
        lines = [f"- {escape_markdown(name)}: {escape_markdown(value)}" for name, value in report.environment]
        blocks += ["## Hardware and versions", "\n".join(lines)]
    with replacing(path) as temporary:
        temporary.write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def escape_markdown(text: str) -> str:
    r"""The text in one line, with every character that Markdown or HTML would read as markup made plain.

    Example:
        >>> escape_markdown("a|b <i> 5 * x_1")
        'a\\|b &lt;i&gt; 5 \\* x\\_1'
    """
    text = re.sub(r"[ \t\n\r\f\v]+", " ", text.strip())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|~$])", r"\\\1", text)


def _paragraph(text: str) -> str:
    """A paragraph that does not begin like a heading, a list or a rule."""
    text = escape_markdown(text)
    return re.sub(r"^(\d*)([#+=.)-])", r"\1\\\2", text)


def _section_in_markdown(section: Section, folder: Path) -> list[str]:
    about = [f"**{escape_markdown(section.label)}**"] if section.label else []
    about += [escape_markdown(section.reference)] if section.reference else []
    blocks = [f"## {escape_markdown(section.title)}"]
    blocks += [" · ".join(about)] if about else []
    blocks += map(_paragraph, section.notes)
    if section.verdicts:
        verdicts = [f"- **{escape_markdown(name)}**: {escape_markdown(said)}" for name, said in section.verdicts]
        blocks += ["### Audit", "\n".join(verdicts)]
    for table in section.tables:
        blocks += _table_in_markdown(table, section.label)
    for figure in section.figures:
        blocks += [_figure_in_markdown(figure, folder), _paragraph(add_label(figure, section.label))]
    return blocks


def _figure_in_markdown(figure: Figure, folder: Path) -> str:
    link = quote(Path(os.path.relpath(figure.svg, folder)).as_posix())
    return f"![{escape_markdown(figure.alt)}]({link})"


def _table_in_markdown(table: Table, label: str) -> list[str]:
    footnotes = number_details(table)
    numbers = find_numbers(table)
    head = [escape_markdown(name) for name in table.columns]
    body = [
        [_cell_in_markdown(cell, footnotes[cell.detail].number if cell.detail else 0) for cell in row]
        for row in table.rows
    ]
    widths = [max(3, *(len(line[index]) for line in [head, *body])) for index in range(len(head))]

    def line(cells: list[str]) -> str:
        padded = zip(cells, widths, numbers, strict=True)
        return (
            "| "
            + " | ".join(text.rjust(width) if number else text.ljust(width) for text, width, number in padded)
            + " |"
        )

    rule = ["-" * (width - 1) + (":" if number else "-") for width, number in zip(widths, numbers, strict=True)]
    blocks = [f"**{escape_markdown(add_label(table, label))}**", "\n".join(map(line, [head, rule, *body]))]
    if table.note:
        blocks.append(_paragraph(table.note))
    if footnotes:
        blocks.append("\n".join(f"{note.number}. {_paragraph(detail)}" for detail, note in footnotes.items()))
    return blocks


def _cell_in_markdown(cell: Cell, note: int) -> str:
    text = escape_markdown(_spell(cell))
    if text and cell.state == "ours":
        text = f"**{text}**"
    elif text and cell.state not in ("text", "paper"):
        text = f"*{text}*"
    return f"{text} <sup>{note}</sup>" if note else text


def _spell(cell: Cell) -> str:
    """The text of a cell, with the word for its state."""
    return " · ".join(part for part in (cell.text, missing_word(cell)) if part)


def _tally(report: Report) -> str:
    counts = [f"{count} {state}" for state, count in count_states(report).items()]
    return f"Cells: {', '.join(counts)}." if counts else ""


# ---- LaTeX ----

PREAMBLE = r"""% Made by tensor-dropout. Compile twice with pdflatex, or copy the tables; longtable needs two runs.
\documentclass[a4paper]{article}
\usepackage[T1]{fontenc}
\usepackage{textcomp}
\usepackage{amssymb}
\usepackage[margin=2cm]{geometry}
\usepackage{array}
\usepackage{booktabs}
\usepackage{longtable}
\setlength{\parindent}{0pt}
\setlength{\parskip}{.5em}
\setlength{\emergencystretch}{3em}
\begin{document}"""
SIZES = {r"\small": 88, r"\scriptsize": 112}  # and how many characters fit on a line of the page, roughly


def write_latex(report: Report, path: Path) -> None:
    r"""Write the report's tables as a LaTeX document in plain ASCII, with booktabs' rules.

    Args:
        report: what to show; figures are left out.
        path: the file; replaced as a whole.

    Raises:
        ValueError: if a table has rows of different lengths.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "report.tex"
        >>> cells = [Cell("Tucker, θ = 0.8"), Cell("76.05", "paper"), Cell("75.9 ± 0.3", "ours")]
        >>> table = Table("Accuracy", ["head", "paper", "ours"], [cells])
        >>> section = Section("cifar100", "CIFAR-100", "Table 4", tables=[table])
        >>> write_latex(Report("Report", [], [section], []), path)
        >>> print(path.read_text().splitlines()[-5])
        Tucker, \ensuremath{\theta} = 0.8 & 76.05 & \textbf{75.9~\ensuremath{\pm}~0.3} \\
    """
    check_tables(report)
    blocks = [PREAMBLE, rf"\section*{{{escape_latex(report.title)}}}", *map(escape_latex, report.summary)]
    if report.made:
        blocks.append(f"Made {escape_latex(report.made)}")
    if tally := _tally(report):
        blocks.append(escape_latex(tally))
    if report.claims:
        blocks += [r"\subsection*{Verdicts}", _table_in_latex(tabulate_claims(report), "")]
    for section in report.sections:
        blocks += _section_in_latex(section)
    if report.miniatures:
        blocks += [r"\section*{Miniatures}", escape_latex(MINIATURES)]
    for section in report.miniatures:
        blocks += _section_in_latex(section)
    if report.environment:
        lines = [rf"{escape_latex(name)}: {escape_latex(value)}\par" for name, value in report.environment]
        blocks += [r"\subsection*{Hardware and versions}", "\n".join(lines)]
    with replacing(path) as temporary:
        temporary.write_text("\n\n".join([*blocks, r"\end{document}"]) + "\n", encoding="ascii")


def _section_in_latex(section: Section) -> list[str]:
    about = [rf"\textbf{{{escape_latex(section.label)}}}"] if section.label else []
    about += [escape_latex(section.reference)] if section.reference else []
    blocks = [rf"\subsection*{{{escape_latex(section.title)}}}"]
    blocks += [r" \textperiodcentered{} ".join(about)] if about else []
    blocks += map(escape_latex, section.notes)
    blocks += [rf"\textbf{{{escape_latex(name)}}}: {escape_latex(said)}" for name, said in section.verdicts]
    for table in section.tables:
        blocks.append(_table_in_latex(table, section.label))
    return blocks


def _table_in_latex(table: Table, label: str) -> str:
    footnotes = number_details(table)
    size, columns = _lay_out_in_latex(table)
    lines = [
        rf"\begingroup{size}",
        rf"\begin{{longtable}}{{@{{}}{columns}@{{}}}}",
        rf"\caption{{{escape_latex(add_label(table, label))}}}\\",
        r"\toprule",
        " & ".join(escape_latex(name) for name in table.columns) + r" \\",
        r"\midrule",
        r"\endhead",
        r"\bottomrule",
        r"\endfoot",
    ]
    for row in table.rows:
        cells = [_cell_in_latex(cell, footnotes[cell.detail].number if cell.detail else 0) for cell in row]
        lines.append(" & ".join(cells) + r" \\")
    lines.append(r"\end{longtable}")
    lines += [rf"{escape_latex(table.note)}\par"] if table.note else []
    lines += [
        rf"{{\footnotesize\textsuperscript{{{note.number}}}~{escape_latex(detail)}\par}}"
        for detail, note in footnotes.items()
    ]
    return "\n".join([*lines, r"\endgroup"])


def _lay_out_in_latex(table: Table) -> tuple[str, str]:
    """Size and columns: as wide as their texts where these fit on the page, else paragraphs that share its width."""
    columns = [[_spell(row[index]) for row in table.rows] for index in range(len(table.columns))]
    longest = [max(map(len, [name, *texts])) + 3 for name, texts in zip(table.columns, columns, strict=True)]
    for size, line in SIZES.items():
        if sum(longest) <= line:
            return size, "".join("r" if number else "l" for number in find_numbers(table))
    words = [max(map(len, name.split()), default=1) for name in table.columns]  # a head may take several lines
    wanted = [
        max(4, word, min(40, max(map(len, texts), default=0))) + 3 for word, texts in zip(words, columns, strict=True)
    ]
    shares = [f"{length / sum(wanted):.3f}" for length in wanted]
    kind = r">{\raggedright\arraybackslash}p{\dimexpr SHARE\linewidth-2\tabcolsep\relax}"
    return size + r"\setlength{\tabcolsep}{3pt}", "".join(kind.replace("SHARE", share) for share in shares)


def _cell_in_latex(cell: Cell, note: int) -> str:
    text = escape_latex(_spell(cell).replace(" ± ", "\u00a0±\u00a0"))
    if text and cell.state == "ours":
        text = rf"\textbf{{{text}}}"
    elif text and cell.state not in ("text", "paper"):
        text = rf"\textit{{{text}}}"
    return rf"{text}\textsuperscript{{{note}}}" if note else text
