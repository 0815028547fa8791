"""The documentation site: it builds without a warning, is complete, and needs no network to be read."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest
from filelock import FileLock

import tensor_dropout as td

for needed in ("furo", "myst_parser", "sphinx", "typer"):  # furo first: a folder named sphinx is not Sphinx
    pytest.importorskip(needed, reason=f"the site needs {needed}: pip install -e '.[docs]'")

ROOT = Path(__file__).parents[1]
PACKAGES = ("tensor_dropout", "tensor_dropout.robustness", "tensor_dropout_lab.nets", "tensor_dropout_lab.data")
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}


@dataclass
class Page(HTMLParser):
    """What a page of the site has and asks for."""

    path: Path
    ids: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    pictures: list[dict[str, str | None]] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)

    def __post_init__(self):
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.add(tag)
        self.ids |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if found.get(LOADED.get(tag)):
            self.loaded.append(found[LOADED[tag]])
        if tag == "img":
            self.pictures.append(found)


@dataclass
class Site:
    """The built site, and what the build said."""

    folder: Path
    log: str
    pages: dict[Path, Page]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Site:
    """Built once, by whichever of the parallel workers comes first."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    base = tmp_path_factory.getbasetemp().parent if is_worker else tmp_path_factory.mktemp("docs")
    folder, log = base / "site", base / "site.log"
    with FileLock(base / "site.lock"):
        if not log.is_file():
            build = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-d", base / "doctrees"]
            result = subprocess.run(
                [*build, "-b", "html", ROOT / "docs", folder],
                capture_output=True,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                timeout=300,
            )
            log.write_text(f"{result.returncode}\n{result.stdout}{result.stderr}", encoding="utf-8")
    pages = {path: Page(path) for path in sorted(folder.rglob("*.html"))}
    return Site(folder, log.read_text(encoding="utf-8"), pages)


def test_builds_without_a_warning(site):
    assert site.log.strip() == "0"


def test_has_a_page_for_every_markdown_file(site):
    sources = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {Path("index.html"), Path("start/tutorial.html"), Path("reference/api/layers.html")} <= sources
    assert sources <= {path.relative_to(site.folder) for path in site.pages}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_api_has_every_public_name(site, package):
    documented = set().union(*(page.ids for path, page in site.pages.items() if path.parent.name == "api"))
    names = importlib.import_module(package).__all__
    assert [name for name in names if f"{package}.{name}" not in documented] == []


def test_the_command_line_page_is_the_help(site):
    from tensor_dropout_lab.cli import app

    text = (site.folder / "reference" / "cli.html").read_text(encoding="utf-8")
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    assert len(names) >= 8
    for name in names:
        assert f"Usage: tensor-dropout {name} " in text
    assert "--max-accuracy-loss" in text
    assert "synthetic-tucker" in text  # the list that reproduce --help adds


def test_internal_links_resolve(site):
    broken = []
    for path, page in site.pages.items():
        for link in [*page.links, *page.loaded]:
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (path.parent / unquote(name.partition("?")[0])).resolve() if name else path
            known = site.pages[target].ids if target in site.pages else None
            if not target.is_file() or (anchor and known is not None and unquote(anchor) not in known):
                broken.append((path.name, link))
    assert broken == []


def test_nothing_is_loaded_from_a_network(site):
    external = [(path.name, url) for path, page in site.pages.items() for url in page.loaded if "//" in url]
    assert external == []
    for sheet in site.folder.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", sheet.read_text(encoding="utf-8")), sheet


def test_formulas_are_part_of_the_page(site):
    layers = site.pages[site.folder / "reference" / "api" / "layers.html"]
    assert {"math", "mtext", "munderover"} <= layers.tags
    for path, page in site.pages.items():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"<script[^>]*(mathjax|katex)", text, re.IGNORECASE), path
        if path.parent.name != "_modules" and "math" in page.tags:
            assert "$$" not in text, path


def test_pictures_have_a_text_alternative(site):
    pictures = [(path.name, found) for path, page in site.pages.items() for found in page.pictures]
    assert pictures
    assert [name for name, found in pictures if not (found.get("alt") or "").strip()] == []


def test_a_formula_that_cannot_be_read_is_reported(tmp_path):
    """An unknown LaTeX command must stop the build, not show as an empty line."""
    (tmp_path / "conf.py").write_text((ROOT / "docs" / "conf.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "_static").mkdir()
    (tmp_path / "index.md").write_text("# Page\n\n$\\nosuchcommand x$\n", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "-b", "html", tmp_path, tmp_path / "html"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode != 0
    assert "nosuchcommand" in result.stderr
    assert "index.md:3" in result.stderr


def test_the_version_is_the_package_s(site):
    assert f"tensor-dropout {td.__version__}" in (site.folder / "index.html").read_text(encoding="utf-8")
