"""The documentation: every Python block runs, every local link and picture exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tensor_dropout.layers import formats

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The Python code blocks of a page, each with the line it starts on."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in found]


@pytest.fixture
def _formats_as_before():
    """A page may register a format; other tests must not see it."""
    before = dict(formats._FORMATS)
    yield
    for name in formats._FORMATS.keys() - before.keys():
        del formats._FORMATS[name]


@each_page
@pytest.mark.usefixtures("_formats_as_before")
def test_code_blocks_run(page, tmp_path, monkeypatch):
    """In order and in one namespace, as a reader would paste them."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict = {"__name__": page.stem}
    for line, code in python_blocks(page):
        padded = "\n" * (line - 1) + code  # so that a traceback shows the page's own line
        exec(compile(padded, str(page), "exec"), namespace)


@each_page
def test_local_links_exist(page):
    targets = re.findall(r"\]\(([^)#][^)]*)\)", page.read_text(encoding="utf-8"))
    local = [target.split("#")[0] for target in targets if "://" not in target]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing


def test_the_readme_is_short_and_has_code_to_run():
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 180
    assert len(python_blocks(readme)) >= 4


@each_page
def test_pages_are_short(page):
    """At most 1,500 words and short cells, measured tables and code apart; lines of at most 400 characters."""
    text = page.read_text(encoding="utf-8")
    assert max(len(line) for line in text.splitlines()) <= 400
    measured = r"<!-- table ([\w -]+):start -->.*?<!-- table \1:end -->"
    prose = re.sub(rf"{measured}|^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    assert len(prose.split()) <= 1500
    rows = [re.sub(r"\]\([^)]*\)", "]", line) for line in prose.splitlines() if line.startswith("|")]
    assert [cell for row in rows for cell in re.split(r"(?<!\\)\|", row) if len(cell) > 110] == []


def test_no_placeholders():
    for page in PAGES:
        assert not re.search(r"\b(TODO|TBD|FIXME|XXX)\b", page.read_text(encoding="utf-8"))


def test_the_map_of_the_code_names_what_exists():
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    library, laboratory = ROOT / "src" / "tensor_dropout", ROOT / "src" / "tensor_dropout_lab"
    places = ROOT, library, laboratory, library / "layers", laboratory / "nets"
    named = re.findall(r"`([\w./]+(?:\.py|\.toml|/))`", text)
    assert len(named) > 50
    assert [name for name in named if not any((place / name).exists() for place in places)] == []
    rows = re.search(r"\| to add or change .*?\n\n", text, re.DOTALL)[0].splitlines()[2:]
    assert len(rows) >= 15
    folders = {path.name for package in (library, laboratory) for path in package.iterdir() if path.is_dir()}
    mapped = set(re.findall(r"`(\w+)/`", text))
    assert folders - {"__pycache__"} <= mapped
