"""The documentation: every Python block runs, every local link and picture exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def python_blocks(page: Path) -> list[tuple[int, str]]:
    """The Python code blocks of a page, each with the line it starts on."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in found]


@each_page
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


def test_the_readme_has_code_to_run():
    assert len(python_blocks(ROOT / "README.md")) >= 6


def test_no_placeholders():
    for page in PAGES:
        assert not re.search(r"\b(TODO|TBD|FIXME|XXX)\b", page.read_text(encoding="utf-8"))
