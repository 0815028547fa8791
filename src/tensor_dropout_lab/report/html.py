"""The report as one HTML page that needs nothing else: no network, no scripts, figures inside."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.report.cells import (
    MEANINGS,
    MINIATURES,
    PROBLEMS,
    add_label,
    check_tables,
    count_states,
    find_numbers,
    missing_word,
    number_details,
)
from tensor_dropout_lab.report.model import VERDICTS, Figure, Report

WIDE = 600  # pixels: wider figures are scrolled on a phone, down to this share of their size
SHRINK = 0.6


def write_html(report: Report, path: Path) -> None:
    """Write the report as one page, figures included.

    Args:
        report: what to show.
        path: the file; replaced as a whole.

    Raises:
        ValueError: if a table has rows of different lengths.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "report.html"
        >>> write_html(Report("Tensor dropout", ["Nothing was run yet."], [], []), path)
        >>> "<h1>Tensor dropout</h1>" in path.read_text(encoding="utf-8")
        True
    """
    check_tables(report)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja").render(
        report=report,
        anchors=make_anchors(section.id for section in report.all_sections),
        tally=count_states(report),
        meanings=MEANINGS,
        problems=PROBLEMS,
        add_label=add_label,
        missing_word=missing_word,
        number_details=number_details,
        find_numbers=find_numbers,
        embed_figure=embed_figure,
        miniatures=MINIATURES,
        verdicts=VERDICTS,
    )
    with replacing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")


def make_anchors(names: Iterable[str]) -> list[str]:
    """Names as anchors: lower case, words joined by single hyphens, no two alike.

    Ids made from an anchor carry a double hyphen, so that they never meet another anchor.

    Example:
        >>> make_anchors(["cifar100-attacks", "MRI noise", "MRI: noise", "θ"])
        ['cifar100-attacks', 'mri-noise', 'mri-noise-2', 'section']
    """
    anchors: list[str] = []
    for name in names:
        plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "section"
        anchor, count = plain, 1
        while anchor in anchors:
            count += 1
            anchor = f"{plain}-{count}"
        anchors.append(anchor)
    return anchors


def embed_figure(figure: Figure) -> Markup:
    """The figure as an ``img`` element whose source is the file itself, as a data URI.

    A browser runs no code and loads no other file from there, so the file needs no cleaning.

    Args:
        figure: the file, drawn by matplotlib, and its text alternative.

    Returns:
        The element, or a paragraph that says what is wrong with the file, with the text alternative.
    """
    try:
        content = figure.svg.read_bytes()
        width, height = read_size(content)
    except (OSError, ElementTree.ParseError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        text = '<p class="broken"><strong>damaged</strong>: {} cannot be shown ({}). It would show: {}</p>'
        return Markup(text).format(figure.svg.name, reason, figure.alt)
    least = f' style="--least:{SHRINK * width:.0f}px"' if width > WIDE else ""
    source = b64encode(content).decode("ascii")
    return Markup(
        '<img src="data:image/svg+xml;base64,{}" alt="{}" width="{:.0f}" height="{:.0f}"' + least + ">"
    ).format(source, figure.alt, width, height)


def read_size(content: bytes) -> tuple[float, float]:
    """Width and height in pixels of an SVG file of matplotlib's, whose view box is in points.

    Raises:
        ElementTree.ParseError: if it is not a whole SVG file.

    Example:
        >>> read_size(b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 72 36"/>')
        (96.0, 48.0)
    """
    root = ElementTree.fromstring(content)
    box = [float(number) for number in root.get("viewBox", "").split()]
    if root.tag != "{http://www.w3.org/2000/svg}svg" or len(box) != 4:
        raise ElementTree.ParseError(f"not an SVG file of matplotlib's, its first element is {root.tag!r}")
    return box[2] * 96 / 72, box[3] * 96 / 72
