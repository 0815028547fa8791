"""Write the measured tables into the docs, from the records in ``results`` alone: ``make tables``.

A table stands between the comments ``<!-- table NAME:start -->`` and ``<!-- table NAME:end -->``; tests/test_results.py
fails if one is not what the records say. Intervals of single cells and the rest are in ``tensor-dropout report``.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from shrink_png import shrink_png

from tensor_dropout_lab.report.collect import build_section
from tensor_dropout_lab.report.model import Cell, Section, Table
from tensor_dropout_lab.report.text import escape_markdown

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "<!-- table" in page.read_text(encoding="utf-8"))
PICTURES = {
    "digits-paper.png": "docs/images/digits.png",
    "cifar100-paper.png": "docs/images/cifar100.png",
    "cifar100-surface-paper.png": "docs/images/cifar100-surface.png",
    "cifar100-attacks-paper.png": "docs/images/cifar100-attacks.png",
    "beyond-sizes-paper.png": "docs/images/beyond-sizes.png",
    "mri-paper.png": "docs/images/mri.png",
    "mri-noise-paper.png": "docs/images/mri-noise.png",
    "mri-small-paper.png": "docs/images/mri-small.png",
}


@cache
def load_section(experiment: str) -> Section:
    """A section of the report, of the full size."""
    return build_section(experiment, "paper", ROOT / "results", _figures())


@cache
def _figures() -> Path:
    return Path(tempfile.mkdtemp())


def render(name: str) -> str:
    """The Markdown of a table: "headline K", "BENCHMARK PART", or "EXPERIMENT K", the K-th of an experiment, from 0.

    Raises:
        KeyError: if there is none.
    """
    experiment, _, number = name.partition(" ")
    if experiment in BENCHMARKS:
        return BENCHMARKS[experiment](number)
    tables = make_headlines() if experiment == "headline" else load_section(experiment).tables
    return render_table(tables[int(number)])


def load_benchmark(name: str) -> Any:
    """A module of benchmarks/estimators."""
    sys.path.append(str(ROOT / "benchmarks" / "estimators"))
    return import_module(name)


@cache
def render_position(part: str) -> str:
    """A part of the report of benchmarks/estimators/position.py."""
    position = load_benchmark("position")
    return position.render(part, position.read_record(ROOT / position.RECORD))


@cache
def render_others(part: str) -> str:
    """The errors, or the table of a data set, of benchmarks/estimators/against_others.py."""
    others = load_benchmark("against_others")
    return others.render(part, others.read_record(ROOT / others.RECORD))


@cache
def render_fits(part: str) -> str:
    """A part of the report of benchmarks/estimators/fits.py; "cuda PART" is that of the GPU."""
    fits = load_benchmark("fits")
    device, _, rest = part.partition(" ")
    path = ROOT / fits.RECORDS["cuda" if device == "cuda" else "cpu"]
    return fits.render(rest if device == "cuda" else part, json.loads(path.read_text(encoding="utf-8")))


@cache
def render_solvers(part: str) -> str:
    """The summary of benchmarks/estimators/solvers.py, or one of its cells, such as "cp 100"."""
    solvers = load_benchmark("solvers")
    return solvers.render(part, json.loads((ROOT / solvers.RECORD).read_text(encoding="utf-8")))


@cache
def render_finetuning(part: str) -> str:
    """A part of the report of benchmarks/finetuning.py."""
    sys.path.append(str(ROOT / "benchmarks"))
    tables = import_module("finetuning.tables")
    return tables.render(part, tables.read_record(ROOT / tables.RECORD))


@cache
def render_position_heads(part: str) -> str:
    """A part of the report of benchmarks/position_heads.py."""
    sys.path.append(str(ROOT / "benchmarks"))
    tables, running = (import_module(f"position_heads.{name}") for name in ("tables", "running"))
    return tables.render(part, running.read_record(ROOT / tables.RECORD))


@cache
def render_surface(part: str) -> str:
    """A part of the report of ``benchmarks/position_heads.py --surface``."""
    sys.path.append(str(ROOT / "benchmarks"))
    surface = import_module("position_heads.surface")
    return surface.render(part, surface.read_record(ROOT / surface.RECORD))


@cache
def render_brain_age_frozen(part: str) -> str:
    """The table of examples/brain_age_frozen.py."""
    sys.path.append(str(ROOT / "examples"))
    example = import_module("brain_age_frozen")
    return example.render(part, example.read_record(example.RECORD))


@cache
def render_intervals(part: str) -> str:
    """A part of the report of benchmarks/intervals.py."""
    sys.path.append(str(ROOT / "benchmarks"))
    intervals = import_module("intervals")
    return intervals.render(part, intervals.read_record(ROOT / intervals.RECORD))


@cache
def render_uncertainty(part: str) -> str:
    """A part of the report of benchmarks/uncertainty.py."""
    load_benchmark("position")
    sys.path.append(str(ROOT / "benchmarks"))
    rendered: str = import_module("uncertainty.tables").render(part, ROOT)
    return rendered


@cache
def render_labelling(part: str) -> str:
    """A part of the report of benchmarks/labelling.py."""
    sys.path.append(str(ROOT / "benchmarks"))
    tables, running = (import_module(f"labelling.{name}") for name in ("tables", "running"))
    return tables.render(part, running.read_record(ROOT / tables.RECORD))


BENCHMARKS = {
    "position": render_position,
    "others": render_others,
    "fits": render_fits,
    "solvers": render_solvers,
    "finetuning": render_finetuning,
    "position-heads": render_position_heads,
    "surface": render_surface,
    "intervals": render_intervals,
    "labelling": render_labelling,
    "uncertainty": render_uncertainty,
    "brain-age-frozen": render_brain_age_frozen,
}


def make_headlines() -> tuple[Table, Table]:
    """One line for each head: the paper's accuracy and ours; and what attacks leave."""
    accuracy, sizes, attacks, _ = load_section("cifar100").tables
    left = {(row[0].text, row[1].text): row[2:] for row in attacks.rows}
    measured, attacked = [], []
    for row, size in zip(accuracy.rows, sizes.rows, strict=True):
        middle, small = left[row[0].text, "8/255"], left[row[0].text, "2/255"]
        measured.append([*row[:3], *size[1:3], *size[5:7]])
        attacked.append([row[0], middle[0], middle[2], small[3], middle[3], middle[4]])
    scores = ["accuracy, paper", "accuracy, ours", "difference to FC", "to the head without dropout", "NLL", "ECE, %"]
    left_by = ["FGSM 8/255", "PGD 8/255", "adaptive 2/255", "adaptive 8/255", "audit"]
    return Table("", ["head", *scores], measured), Table("", ["head", *left_by], attacked)


def render_table(table: Table) -> str:
    """A table without footnotes."""
    head = [escape_markdown(column).removesuffix(", ours, full size") for column in table.columns]
    lines = [head, ["---"] * len(head), *([_write(cell) for cell in row] for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write(cell: Cell) -> str:
    text = escape_markdown(cell.text).replace("ours, full size, ", "").replace("ours, full size", "ours")
    return f"*{text}*" if cell.state not in ("text", "paper", "ours") else text


def update(text: str) -> str:
    """A page with all its tables as the records have them."""
    return re.sub(
        r"(<!-- table ([\w -]+):start -->\n).*?(<!-- table \2:end -->)",
        lambda found: f"{found[1]}\n{render(found[2])}\n\n{found[3]}",
        text,
        flags=re.DOTALL,
    )


def main() -> None:
    """Rewrite the pages and the pictures."""
    for path in PAGES:
        path.write_text(update(path.read_text(encoding="utf-8")), encoding="utf-8")
    for experiment in ("cifar100", "cifar100-surface", "cifar100-attacks", "beyond-sizes"):
        load_section(experiment)
    position = load_benchmark("position")
    position.draw(position.read_record(ROOT / position.RECORD), ROOT / position.PICTURE)
    shrink_png(ROOT / position.PICTURE, ROOT / position.PICTURE)
    for name, target in PICTURES.items():
        if (_figures() / name).is_file():
            shrink_png(_figures() / name, ROOT / target)


if __name__ == "__main__":
    sys.exit(main())
