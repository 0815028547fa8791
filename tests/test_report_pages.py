"""The report's pages: well-formed, complete, nothing overflows, everything has a text alternative."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from base64 import b64encode
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

from chromium import Chromium, find_chromium
from tensor_dropout_lab.figures import draw_figure, save_figure
from tensor_dropout_lab.report.characters import escape_latex
from tensor_dropout_lab.report.html import embed_figure, write_html
from tensor_dropout_lab.report.model import Cell, Figure, Report, Section, Table
from tensor_dropout_lab.report.text import escape_markdown, write_latex, write_markdown

SCREENSHOTS = Path(__file__).parents[1] / "out" / "report-screenshots"
NASTY = """<script>alert("x")</script> & 'single' | pipe \\ back $5 #1 {x} ~ ^ θ ε ∞ ≥ ± ² 中 Gödel [a](b) *c* `d`"""
LONG = "results/cifar100-attacks/" + "tucker_randomized_theta_0.6_" * 4 + "seed-0/record.json"
WORDS = ("not run", "failed", "stale", "damaged")
VOID = {"area", "base", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}


# ---- a report with everything in it ----


def draw_panels(folder: Path) -> Path:
    """Five panels of loss curves, as in the paper."""
    with draw_figure(12.0, 2.8) as figure:
        for index, (axes, theta) in enumerate(
            zip(figure.subplots(1, 5, sharey=True), (1, 0.9, 0.8, 0.7, 0.6), strict=True)
        ):
            epochs = range(0, 500, 20)
            for name, shift in (("TRL", 0.0), ("R-TRL", 0.02)):
                losses = [math.exp(-epoch / 120) + (1 - theta) / 2 + shift for epoch in epochs]
                axes.plot(epochs, losses, label=name)
            axes.set_title(f"θ = {theta}")
            axes.set_xlabel("epoch")
            if index == 0:
                axes.set_ylabel("expected loss")
                axes.legend()
        return save_figure(figure, folder / "five panels")[1]


def draw_surface(folder: Path) -> Path:
    """A map of colours, which matplotlib stores as a picture inside the SVG."""
    with draw_figure() as figure:
        axes = figure.subplots()
        values = [[70 + theta - abs(ratio - 3) for ratio in range(8)] for theta in range(5)]
        figure.colorbar(axes.imshow(values, aspect="auto", origin="lower"), label="accuracy in %")
        axes.set(xlabel="compression ratio", ylabel="θ")
        return save_figure(figure, folder / "surface")[1]


def build_table() -> Table:
    details = ["95 % interval 75.6-76.2 over seeds 0, 1, 2 (Student's t)", f"record {LONG}"]
    rows = [
        [Cell("FC, pooled"), Cell("75.88", "paper"), Cell("75.1 ± 0.3 (3)", "ours", details[0])],
        [Cell("FC + dropout 0.5"), Cell("75.84", "paper"), Cell("74.7 ± 0.2 (3)", "ours", details[0])],
        [Cell("Tucker"), Cell("76.02", "paper"), Cell("not run", "not run")],
        [Cell("CP"), Cell("75.77", "paper"), Cell("", "failed", "loss was NaN in epoch 12; seeds 0 and 2")],
        [Cell("randomized Tucker, θ = 0.8"), Cell("76.05", "paper"), Cell("73.9 (1)", "stale", details[1])],
        [
            Cell("randomized CP, θ = 0.9"),
            Cell("76.19", "paper"),
            Cell("damaged record", "damaged", f"{NASTY} in {LONG}"),
        ],
    ]
    return Table("CIFAR-100, top-1 accuracy in %", ["head", "paper", "ours"], rows, "± is a 95 % interval; (n) seeds.")


def build_wide_table() -> Table:
    columns = ["head", "clean, paper", "clean, ours"]
    columns += [
        f"{name} λ={size}, {whose}" for name in ("FGSM", "PGD") for size in (2, 8) for whose in ("paper", "ours")
    ]
    rows = []
    for index, head in enumerate(["ResNet-101", "TRL", "R-TRL θ=0.8", "R-TRL θ=0.6"]):
        row = [Cell(head)]
        for column in range(len(columns) - 1):
            mine = Cell(f"{40.1 + index - column} ± 0.4 (3)", "ours", f"seeds 0-2; record {head}/{column}")
            row.append(Cell(f"{77.1 + index - column:.1f}", "paper") if column % 2 == 0 else mine)
        rows.append(row)
    return Table("Attacks: the paper's protocol beside the adaptive one", columns, rows)


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    folder = tmp_path_factory.mktemp("figures")
    panels, surface = draw_panels(folder), draw_surface(folder)
    masked = "GRADIENT MASKING: 3 of 8 rules are broken (budget, margin, unbounded). At ε = 8/255 the paper's attacks "
    masked += "leave 22.0 % accuracy, the adaptive ensemble 2.1 %: the difference of 19.9 points is not robustness."
    clean = "No sign of gradient masking: all 8 rules that were tried hold. At ε = 8/255 nothing is left."
    curves = "Five panels, θ from 1 to 0.6: in each, the stochastic loss and its deterministic form fall together."
    sections = [
        Section(
            "synthetic-cp",
            "Stochastic loss and its deterministic form, CP",
            "Section 4.1, Figure 3",
            "simulated",
            figures=[
                Figure(panels, curves, "Loss against epochs: the two curves lie on each other."),
                Figure(panels, curves + " Again.", "The same file once more, with Adam."),
            ],
            notes=["5,000 samples of W ∈ ℝ²⁵ˣ²⁵ˣ²⁵, CP rank 10; see https://arxiv.org/abs/1902.10758 for the setting."],
        ),
        Section(
            "cifar100",
            "CIFAR-100: accuracy",
            "Section 4.4, Table 4",
            "miniature on scikit-learn's digits",
            tables=[build_table()],
            figures=[
                Figure(surface, "A wide plateau of accuracy at θ above 0.7.", "Accuracy over compression ratio and θ."),
                Figure(folder / "lost.svg", "Curves & <more> that were never drawn.", "A figure whose file is lost."),
            ],
        ),
        Section(
            "cifar100-attacks",
            "CIFAR-100: attacks",
            "Section 4.4, Figure 7",
            tables=[build_wide_table()],
            verdicts=[("R-TRL θ = 0.6", masked), ("FC, pooled", clean), (NASTY, NASTY)],
        ),
        Section("cifar100 attacks", NASTY, NASTY, NASTY, notes=[NASTY, LONG * 3, "# no heading", "1. no list"]),
        Section("empty", "Brain age", "Table 3", "miniature on a phantom", tables=[Table("No rows", ["a", "b"], [])]),
    ]
    summary = [
        "Every table and figure of the paper, with our numbers beside the paper's.",
        "Most of the robustness that gradient-sign attacks show is not there: an adaptive attack removes it.",
    ]
    environment = [
        ("GPU", "NVIDIA H200"),
        ("torch", "2.13.0"),
        ("command", f"tensor-dropout reproduce {LONG}"),
        ("x", NASTY),
    ]
    return Report("Tensor dropout: the paper, rerun", summary, sections, environment, "2025-01-02 03:04 UTC")


@pytest.fixture(scope="module")
def page(report, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(report, path)
    return path


# ---- the page as text ----


class Reader(HTMLParser):
    """Collects elements, and checks that each is closed in its turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        assert len(dict(attrs)) == len(attrs), f"<{tag}> has an attribute twice: {attrs}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID, f"<{tag}/> does not end itself in HTML"
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag, f"</{tag}> is out of turn at line {self.getpos()}"

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("style", "title"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]


def read(path: Path) -> Reader:
    reader = Reader()
    reader.feed(path.read_text(encoding="utf-8"))
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def parsed(page) -> Reader:
    return read(page)


def test_ids_are_unique_and_every_reference_resolves(page, parsed):
    ids = Counter(attributes["id"] for _, attributes in parsed.elements if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    wanted = {attributes["href"][1:] for _, attributes in parsed.elements if attributes.get("href", "").startswith("#")}
    assert wanted - set(ids) == set()
    assert len(wanted) > 50


def test_contents_name_every_section(report, parsed):
    links = [attributes["href"] for attributes in parsed.all("a")]
    sections = [f"#{attributes['id']}" for attributes in parsed.all("section")]
    assert len(sections) == len(report.sections) + 1
    assert set(sections) <= set(links)


def test_page_needs_nothing_else(page, parsed):
    for tag, attributes in parsed.elements:
        outside = [attributes.get(name) or "" for name in ("src", "href", "srcset", "data", "poster")]
        if tag != "a":
            assert all(re.match(r"$|#|data:", address) for address in outside), (tag, attributes)
    text = page.read_text(encoding="utf-8")
    assert "@import" not in text
    assert not re.search(r"url\((?!#)", text)
    assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in parsed.elements}


def test_every_figure_has_a_text_alternative(report, parsed):
    pictures = parsed.all("img")
    assert len(pictures) == 3
    alternatives = {figure.alt for section in report.sections for figure in section.figures}
    assert {picture["alt"] for picture in pictures} <= alternatives


def test_lost_figure_says_so_and_what_it_would_show(parsed):
    assert "lost.svg cannot be shown (No such file or directory)" in parsed.text
    assert "Curves & <more> that were never drawn." in parsed.text


def test_states_are_written_out(report, parsed):
    for word in WORDS:
        assert parsed.text.count(word) >= 2, word  # in the table and in the count at the top
    for section in report.sections:
        for expected in (section.title, section.reference, section.label, *sum(section.verdicts, ())):
            assert expected in parsed.text


def test_captions_carry_the_label(report, parsed, tmp_path):
    caption = "CIFAR-100, top-1 accuracy in % (miniature on scikit-learn's digits)"
    write_markdown(report, tmp_path / "report.md")
    write_latex(report, tmp_path / "report.tex")
    assert caption in parsed.text
    assert "Accuracy over compression ratio and θ. (miniature on scikit-learn's digits)" in parsed.text
    assert f"**{caption}**" in (tmp_path / "report.md").read_text(encoding="utf-8")
    assert escape_latex(caption) in (tmp_path / "report.tex").read_text(encoding="utf-8")


def test_details_are_footnotes_as_well_as_titles(report, parsed):
    titles = {attributes.get("title") for attributes in parsed.all("td")}
    for section in report.sections:
        for detail in (cell.detail for table in section.tables for row in table.rows for cell in row if cell.detail):
            assert detail in titles
            assert detail in parsed.text


def test_cells_of_the_head_and_of_labels_have_a_scope(report, parsed):
    scopes = Counter(attributes["scope"] for attributes in parsed.all("th"))
    tables = [table for section in report.sections for table in section.tables]
    assert scopes == {
        "col": sum(len(table.columns) for table in tables),
        "row": sum(len(table.rows) for table in tables),
    }
    assert len(parsed.all("caption")) == len(tables)


def test_text_is_never_markup(page, parsed):
    assert "<script" not in page.read_text(encoding="utf-8")
    assert parsed.text.count(NASTY) >= 6


def test_empty_report_is_a_page(tmp_path):
    write_html(Report("Nothing", [], [], []), tmp_path / "empty.html")
    assert "Nothing" in read(tmp_path / "empty.html").text


def test_uneven_table_is_refused_and_the_old_page_kept(tmp_path):
    broken = Table("Accuracy", ["head", "paper"], [[Cell("FC")]])
    report = Report("", [], [Section("cifar100", "", "", tables=[broken])], [])
    for write in (write_html, write_markdown, write_latex):
        path = tmp_path / write.__name__
        path.write_text("old")
        with pytest.raises(ValueError, match="'cifar100', table 'Accuracy': row 0 has 1 cells, the head 2"):
            write(report, path)
        assert [file.read_text() for file in tmp_path.glob(f"*{write.__name__}*")] == ["old"]


def test_pictures_are_embedded_as_files(tmp_path):
    content = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 90"><script>alert(1)</script></svg>'
    (tmp_path / "wide.svg").write_text(content)
    image = embed_figure(Figure(tmp_path / "wide.svg", 'a < "b"', ""))
    source = b64encode(content.encode()).decode()
    assert image == (
        f'<img src="data:image/svg+xml;base64,{source}" alt="a &lt; &#34;b&#34;" width="1200" height="120" '
        'style="--least:720px">'
    )


@pytest.mark.parametrize(
    ("content", "reason"), [("<svg", "unclosed token"), ("<html/>", "not an SVG file"), ("", "no")]
)
def test_damaged_picture_is_named(tmp_path, content, reason):
    (tmp_path / "half.svg").write_text(content)
    text = embed_figure(Figure(tmp_path / "half.svg", "Curves.", ""))
    assert "damaged" in text
    assert f"half.svg cannot be shown ({reason}" in text


# ---- Markdown ----


def test_markdown_tables_have_equal_columns(report, tmp_path):
    write_markdown(report, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    tables = re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)
    assert len(tables) == sum(len(section.tables) for section in report.sections)
    for table in tables:
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(columns) == 1, table
    assert "*damaged record* <sup>4</sup> |" in text
    assert "*failed* <sup>2</sup>" in text
    assert "*73.9 (1) · stale* <sup>3</sup>" in text
    assert "**75.1 ± 0.3 (3)** <sup>1</sup>" in text
    assert "<script" not in text


def test_markdown_pictures_are_relative_and_exist(report, tmp_path):
    write_markdown(report, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    links = re.findall(r"^!\[.+\]\((.+)\)$", text, re.MULTILINE)
    assert len(links) == 4
    assert links[0].endswith("five%20panels.svg")
    assert [(tmp_path / link.replace("%20", " ")).exists() for link in links] == [True, True, True, False]


def test_markdown_paragraphs_are_not_read_as_lists_or_headings(report, tmp_path):
    write_markdown(report, tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "\n\\# no heading\n" in text
    assert "\n1\\. no list\n" in text
    assert escape_markdown("a\n| b") == "a \\| b"


# ---- LaTeX ----


def test_latex_is_balanced_ascii(report, tmp_path):
    write_latex(report, tmp_path / "report.tex")
    text = (tmp_path / "report.tex").read_text(encoding="ascii")
    plain = re.sub(r"\\[\\{}%&$#_]", "", text)
    assert plain.count("{") == plain.count("}")
    assert "$" not in plain
    assert "#" not in plain
    assert "^" not in plain
    assert plain.count("%") == 1  # the comment at the top
    begun = re.findall(r"\\(begin|end)\{(\w+)\}", text)
    stack: list[str] = []
    for what, name in begun:
        if what == "begin":
            stack.append(name)
        else:
            assert stack.pop() == name
    assert stack == []
    assert (
        text.count(r"\toprule") == text.count(r"\bottomrule") == sum(len(section.tables) for section in report.sections)
    )
    assert r"\textit{73.9 (1) \textperiodcentered{} stale}\textsuperscript{3}" in text
    assert r"\textit{failed}" in text


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("50 % & a_b", r"50 \% \& a\_b"),
        ("±θε", r"\ensuremath{\pm}\ensuremath{\theta}\ensuremath{\varepsilon}"),
        ("∞²≥", r"\ensuremath{\infty}\textsuperscript{2}\ensuremath{\geq}"),
        ("--preset", "-{}-preset"),
        ("1,000\u00a0images", "1,000~images"),
        ("ΛΩλ", r"\ensuremath{\Lambda}\ensuremath{\Omega}\ensuremath{\lambda}"),
        ("x⁻¹ é", r"x\textsuperscript{\ensuremath{-}}\textsuperscript{1} \'{e}"),
        ("[3]*", "{[}3{]}{*}"),
    ],
)
def test_characters_in_latex(text, latex):
    assert escape_latex(text) == latex


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_latex_compiles(report, tmp_path):
    write_latex(report, tmp_path / "report.tex")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "report.tex"]
    for _ in range(2):  # the second time with the widths of columns that the first has found
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stdout[-3000:]
    assert (tmp_path / "report.pdf").exists()


# ---- the page in a browser ----

#: Elements that reach beyond the window and are not inside a frame of their own that scrolls.
OVERFLOWING = """[...document.body.querySelectorAll("*")]
    .filter(e => !e.closest(".scroll > *, .picture > *, .skip") && e.getBoundingClientRect().right > innerWidth + 0.5)
    .map(e => e.tagName + "." + e.className)"""
#: Texts whose contrast with what is behind them is below WCAG's level AA.
PALE = """(() => {
    const channels = color => { const [r, g, b, a = 1] = color.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
    const light = c => { const [r, g, b] = c.slice(0, 3).map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    const behind = e => { for (; e; e = e.parentElement) {
        const c = channels(getComputedStyle(e).backgroundColor); if (c[3] === 1) return c; } };
    const pale = [];
    for (const e of document.body.querySelectorAll("*")) {
        if (![...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
        const style = getComputedStyle(e), [x, y] = [light(channels(style.color)), light(behind(e))];
        const contrast = (Math.max(x, y) + 0.05) / (Math.min(x, y) + 0.05);
        if (contrast < 4.5) pale.push([e.tagName, e.className, contrast.toFixed(2), e.textContent.slice(0, 30)]);
    }
    return pale;
})()"""
FITS = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
WINDOWS = [(375, 812), (1280, 900)]


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no browser: install Debian's package chromium")
    with Chromium(program, tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), WINDOWS)
def test_page_in_a_browser(chromium, page, width, height, scheme, capsys):
    chromium.open(page, width, height, scheme)
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture = SCREENSHOTS / f"report-{width}-{scheme}.png"
    chromium.photograph(picture)
    with capsys.disabled():
        print(f"\nscreenshot: {picture}")
    assert chromium.evaluate("innerWidth") == width
    assert chromium.evaluate(FITS)
    assert chromium.evaluate(OVERFLOWING) == []
    assert chromium.evaluate(PALE) == []
    assert chromium.console == []
    sizes = chromium.evaluate(
        "[...document.querySelectorAll('.picture img')].map(e => [e.clientWidth, e.clientHeight, "
        "e.naturalWidth / e.naturalHeight])"
    )
    assert len(sizes) == 3
    for wide, high, ratio in sizes:
        assert wide > 250
        assert wide / high == pytest.approx(ratio, rel=0.02)
    dark = chromium.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(22, 25, 29)"
    assert dark == (scheme == "dark")


def test_page_on_paper(chromium, page, capsys):
    chromium.open(page, 1280, 900, "dark")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    chromium.print(SCREENSHOTS / "report.pdf")
    with capsys.disabled():
        print(f"\non paper: {SCREENSHOTS / 'report.pdf'}")
    assert (SCREENSHOTS / "report.pdf").read_bytes().startswith(b"%PDF")
    chromium.call("Emulation.setEmulatedMedia", media="print")
    assert chromium.evaluate("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert chromium.evaluate(PALE) == []
    chromium.call("Emulation.setEmulatedMedia", media="")


def test_link_to_a_folded_note_opens_it(chromium, page):
    chromium.open(page, 375, 812)
    folded = "document.querySelector('details:not([open])')"
    note = chromium.evaluate(f"{folded}.querySelector('li').id")
    chromium.evaluate(f"document.querySelector('a[href=\"#{note}\"]').click()")
    assert chromium.evaluate(f"document.getElementById('{note}').closest('details').open")


def test_browser_notices_what_is_wrong(chromium, page, tmp_path):
    """The checks above can fail: a page that is too wide, too pale, in error and asks for a picture."""
    wrong = '<div style="width: 2000px; color: #eee; background: #fff">pale</div><img src="http://127.0.0.1:9/a.png">'
    (tmp_path / "wrong.html").write_text(
        page.read_text(encoding="utf-8").replace("<main", f"{wrong}<main"), encoding="utf-8"
    )
    chromium.open(tmp_path / "wrong.html", 375, 812)
    assert not chromium.evaluate(FITS)
    assert "DIV." in chromium.evaluate(OVERFLOWING)
    assert len(chromium.evaluate(PALE)) == 1
    assert any("Content Security Policy" in message for message in chromium.console)
