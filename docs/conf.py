"""The documentation site: ``make docs`` turns the Markdown pages of this folder into ``out/docs/html``.

The pages stay plain Markdown that reads well in a repository browser. What only the site has is made here when it is
built: the API from the docstrings, the command line from its own ``--help``, and the formulas as MathML.
"""

from __future__ import annotations

import posixpath
import re
from html import escape
from pathlib import Path
from types import GenericAlias
from typing import TYPE_CHECKING, Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.logging import getLogger
from typer.testing import CliRunner

from tensor_dropout import __version__
from tensor_dropout_lab.cli import app as command_line

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.writers.html5 import HTML5Translator

project = "tensor-dropout"
author = "The tensor-dropout founders"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
highlight_language = "none"  # an indented block is a formula or an output; code says its language

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 80  # longer ones have an argument to a line
autodoc_preserve_defaults = True
napoleon_use_ivar = True
napoleon_use_rtype = False
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "a11y-dark"
html_title = f"tensor-dropout {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#00609c", "color-brand-content": "#00609c"},
    "dark_css_variables": {"color-brand-primary": "#6cc0f5", "color-brand-content": "#6cc0f5"},
}

# Formulas: MathJax comes from a network or as megabytes of scripts, images follow neither the font size nor the dark
# mode. Browsers have drawn MathML by themselves since 2023, and docutils, which Sphinx needs anyway, can write it: so
# formulas are part of the page, without scripts, network or a further dependency.
html_math_renderer = "mathml"

HELP_MARK = "<!-- the commands, from their own help -->"
"""Where ``cli.md`` gets the help of all commands."""

ROOT = Path(__file__).parents[1]
ELSEWHERE = {"reference/results": "results/README.md", "reference/benchmarks": "benchmarks/README.md"}
"""Pages whose text is elsewhere in the repository."""

LINK = re.compile(r"(\]\()([^)\s]+)(?=\))")
DOCTEST = (">>>", "...")
QUOTED = re.compile(r"(``.+?``|`[^`]+`)")


def convert_formula(node: nodes.Element, *, as_block: bool = False) -> str:
    """A formula as MathML; one that docutils cannot read is a warning, and so stops ``make docs``."""
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        getLogger(__name__).warning("the formula %s cannot be read: %s", node.astext(), error, location=node)
        return f"<code>{escape(node.astext())}</code>"


def write_formula(translator: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line."""
    translator.body.append(convert_formula(node))
    raise nodes.SkipNode


def write_displayed_formula(translator: HTML5Translator, node: nodes.math_block) -> None:
    """A formula on lines of its own; a wide one scrolls by itself on a narrow screen."""
    translator.body.append(f'<div class="formula">{convert_formula(node, as_block=True)}</div>')
    raise nodes.SkipNode


def show_help(*arguments: str) -> str:
    """What ``tensor-dropout ARGUMENTS --help`` prints on a terminal of 80 columns."""
    settings = {"COLUMNS": "80", "NO_COLOR": "1"}
    shown = CliRunner().invoke(command_line, [*arguments, "--help"], prog_name="tensor-dropout", env=settings)
    if shown.exit_code != 0:
        raise RuntimeError(f"tensor-dropout {' '.join(arguments)} --help failed: {shown.exception!r}\n{shown.output}")
    return "\n".join(line.rstrip() for line in shown.output.strip().splitlines())


def describe_commands() -> str:
    """A section for every command, in Markdown."""
    names = [command.name or command.callback.__name__ for command in command_line.registered_commands]
    sections = [("All commands", show_help()), *((f"tensor-dropout {name}", show_help(name)) for name in names)]
    return "\n\n".join(f"## {title}\n\n```text\n{text}\n```" for title, text in sections)


def complete_page(app: Sphinx, page: str, source: list[str]) -> None:
    """Put in what only the site has: the help of all commands, and pages whose text is elsewhere in the repository."""
    if page == "reference/cli":
        if HELP_MARK not in source[0]:
            raise RuntimeError(f"cli.md lacks the line {HELP_MARK}")
        source[0] = source[0].replace(HELP_MARK, describe_commands())
    home = posixpath.dirname(f"docs/{page}")
    folder = home
    if page in ELSEWHERE:
        app.env.note_dependency(str(ROOT / ELSEWHERE[page]))
        source[0] = (ROOT / ELSEWHERE[page]).read_text(encoding="utf-8")
        folder = posixpath.dirname(ELSEWHERE[page])
    source[0] = LINK.sub(lambda link: f"{link[1]}{place_target(link[2], folder, home)}", source[0])


def place_target(target: str, folder: str, home: str) -> str:
    """The target of a link as the site has it.

    Args:
        target: as written.
        folder: of the file that it is written in, from the root of the repository.
        home: of the page that shows it.
    """
    path, mark, anchor = target.partition("#")
    if not path or ":" in path:
        return target
    path = posixpath.normpath(posixpath.join(folder, path))
    shown = {there: here for here, there in ELSEWHERE.items()}
    if path in shown:
        return f"/{shown[path]}.md{mark}{anchor}"
    if path.endswith(".md") and not path.startswith("docs/"):
        return f"path:{posixpath.relpath(path, home)}"  # no page of the site: the file itself
    return target if folder == home else f"{posixpath.relpath(path, home)}{mark}{anchor}"


def tidy_docstring(app: Sphinx, what: str, name: str, item: Any, options: Any, lines: list[str]) -> None:
    """Make of a docstring, which is written to be read in a terminal, what reStructuredText takes.

    ``(B, *size)`` and ``tensorize_`` would begin emphasis and name a link; ``td.`` is short for the package.
    """
    for number, line in enumerate(lines):
        if not line.lstrip().startswith(DOCTEST):
            parts = QUOTED.split(line)
            parts[::2] = [re.sub(r"\*|(?<=\w)_(?=\W|$)", r"\\\g<0>", part) for part in parts[::2]]
            parts[1::2] = [re.sub(r"^`(td\.(\w+))`$", r"`\1 <tensor_dropout.\2>`", part) for part in parts[1::2]]
            lines[number] = "".join(parts)


def skip_member(app: Sphinx, what: str, name: str, item: Any, skip: bool, options: Any) -> bool | None:
    """Leave out names of types, fields of named tuples (their class explains them), and what scikit-learn adds."""
    added = re.fullmatch(r"set_\w+_request", name)
    return True if added or isinstance(item, GenericAlias) or type(item).__name__ == "_tuplegetter" else None


def drop_ways_back(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Leave out the links from the source code to the API: they miss names that are documented in another package."""
    if page.startswith("_modules/"):
        context["body"] = re.sub(r'<a class="viewcode-back".*?</a>', "", context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """What Sphinx calls."""
    app.add_html_math_renderer("mathml", (write_formula, None), (write_displayed_formula, None))
    app.connect("source-read", complete_page)
    app.connect("autodoc-process-docstring", tidy_docstring, priority=100)  # before napoleon
    app.connect("autodoc-skip-member", skip_member)
    app.connect("html-page-context", drop_ways_back)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
