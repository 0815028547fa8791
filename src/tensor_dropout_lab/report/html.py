"""The report as one HTML page that needs nothing else: no network, no scripts, figures inside."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from tensor_dropout.atomic_files import replacing
from tensor_dropout_lab.report.cells import (
    MEANINGS,
    PROBLEMS,
    add_label,
    check_tables,
    count_states,
    find_numbers,
    missing_word,
    number_details,
)
from tensor_dropout_lab.report.model import Figure, Report

SVG = "{http://www.w3.org/2000/svg}"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
FORBIDDEN = {"script", "foreignObject", "metadata", "style", "title"}
PIXELS = {"pt": 96 / 72, "in": 96.0, "cm": 96 / 2.54, "mm": 96 / 25.4, "px": 1.0, "": 1.0}
WIDE = 600  # pixels: wider figures are scrolled on a phone, down to this share of their size
SHRINK = 0.6
REFERENCE = re.compile(r"url\(#([^)]+)\)")


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
        anchors=make_anchors(section.id for section in report.sections),
        tally=count_states(report),
        meanings=MEANINGS,
        problems=PROBLEMS,
        add_label=add_label,
        missing_word=missing_word,
        number_details=number_details,
        find_numbers=find_numbers,
        inline_figure=inline_figure,
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


def inline_figure(figure: Figure, prefix: str) -> Markup:
    """The figure as an ``svg`` element that can stand in a page beside others.

    Only what the picture needs is kept: ids that are referred to, with a prefix of their own (matplotlib uses the
    same ones in every file); no prolog, metadata, scripts or links to other files.

    Args:
        figure: the file and its text alternative.
        prefix: of the ids, different for every figure of the page.

    Returns:
        The element, or a paragraph that says what is wrong with the file, with the text alternative.
    """
    try:
        root = ElementTree.parse(figure.svg).getroot()
        if root.tag != f"{SVG}svg":
            raise ElementTree.ParseError(f"not an SVG file, its first element is {root.tag!r}")
        style = _take_style(root)
        _strip(root)
    except (OSError, ElementTree.ParseError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        text = '<p class="broken"><strong>damaged</strong>: {} cannot be shown ({}). It would show: {}</p>'
        return Markup(text).format(figure.svg.name, reason, figure.alt)
    _rename_ids(root, prefix)
    _describe(root, figure.alt, prefix)
    root.set("style", ";".join(filter(None, (style, _fit(root)))))
    root.tail = None
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _take_style(root: ElementTree.Element) -> str:
    """Matplotlib's rule for all elements, ``*{…}``, to be set on the picture alone and not on the page."""
    rules = [re.fullmatch(r"\s*\*\s*\{([^{}]*)\}\s*", element.text or "") for element in root.iter(f"{SVG}style")]
    return ";".join(rule[1].strip(" ;") for rule in rules if rule)


def _strip(element: ElementTree.Element) -> None:
    """Plain names instead of namespaces; nothing that is no picture, runs code or reaches outside of the page."""
    element.tag = element.tag.removeprefix(SVG)
    if XLINK_HREF in element.attrib:
        element.set("href", element.attrib.pop(XLINK_HREF))
    for name, value in list(element.attrib.items()):
        foreign = name == "href" and not value.startswith(("#", "data:image/"))
        if foreign or name.startswith(("{", "on")):
            del element.attrib[name]
    for child in list(element):
        name = child.tag.removeprefix(SVG) if isinstance(child.tag, str) else "comment"
        if name in FORBIDDEN or name.startswith(("{", "comment")):
            element.remove(child)
        else:
            _strip(child)


def _rename_ids(root: ElementTree.Element, prefix: str) -> None:
    """Prefix the ids that something refers to, and drop the others and repetitions."""
    used = set()
    for element in root.iter():
        for name, value in element.attrib.items():
            used.update(REFERENCE.findall(value))
            if name == "href" and value.startswith("#"):
                used.add(value[1:])
    for element in root.iter():
        for name, value in list(element.attrib.items()):
            if name == "id":
                del element.attrib[name]
                if value in used:
                    used.remove(value)
                    element.set("id", f"{prefix}-{value}")
            elif name == "href" and value.startswith("#"):
                element.set("href", f"#{prefix}-{value[1:]}")
            else:
                element.set(name, REFERENCE.sub(rf"url(#{prefix}-\1)", value))


def _describe(root: ElementTree.Element, alt: str, prefix: str) -> None:
    title = ElementTree.Element("title", {"id": f"{prefix}-title"})
    title.text = alt
    root.insert(0, title)
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title")


def _fit(root: ElementTree.Element) -> str:
    """The size in pixels as attributes; returned is the least width on a screen, for wide figures."""
    box = [float(number) for number in re.findall(r"-?[\d.]+", root.get("viewBox", ""))]
    sizes = []
    for index, name in enumerate(("width", "height")):
        given = re.fullmatch(r"([\d.]+)(pt|in|cm|mm|px|)", root.get(name, ""))
        root.attrib.pop(name, None)
        if given:
            sizes.append(float(given[1]) * PIXELS[given[2]])
        elif len(box) == 4:
            sizes.append(box[2 + index])
    if len(sizes) != 2:
        return ""
    root.set("width", f"{sizes[0]:.0f}")
    root.set("height", f"{sizes[1]:.0f}")
    if len(box) != 4:
        root.set("viewBox", f"0 0 {sizes[0]:g} {sizes[1]:g}")
    return f"--least:{SHRINK * sizes[0]:.0f}px" if sizes[0] > WIDE else ""
