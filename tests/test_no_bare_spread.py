"""Nothing that a user sees shows the spread over the masks as if it were the error: how it is looked for, and where."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bare_spread import check, find_bare, find_bare_columns, find_bare_headings, find_bare_keys
from tensor_dropout_lab import cli
from tensor_dropout_lab.experiments.cells import FORMAT
from tensor_dropout_lab.experiments.recipes import expand, load_recipes
from tensor_dropout_lab.run_records import write_json

pytest.importorskip("matplotlib")
ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs" / "how-to").glob("*.md")),
    *sorted((ROOT / "docs" / "start").glob("*")),
]


@pytest.mark.parametrize(
    ("text", "is_bare"),
    [
        ("age 29.9 ± 1.4 years", True),
        ("age 29.9 years, 90 % interval 14 to 46; masks 1.4", False),
        ("90 % intervals: age ± 16", False),
        ("| FC | 75.1 ± 0.3 (3) |", False),
        ("| FC | 75.1 ± 0.3 |", True),
        ("predict out/rtrl-cp-seed0  # 29.9 ± 1.4", True),
        ("intervals: mean ± z·std", True),
        ("mean ± half of the 95 % interval over seeds", False),
    ],
)
def test_a_bare_plus_minus_is_found(text, is_bare):
    assert bool(find_bare(text)) == is_bare


def test_a_bare_column_key_or_heading_is_found():
    assert find_bare_columns([{"x": "1", "std": "2"}]) == ["std"]
    assert find_bare_columns([{"x": "1", "x_std": "2"}]) == ["x_std"]
    beside = {"x": "1", "x_low": "0", "x_high": "2"}
    assert find_bare_columns([{**beside, "x_std": "0.01"}]) == ["x_std"]  # no interval is a hundred std wide
    assert find_bare_columns([{**beside, "x_std": "0.6"}]) == []
    assert find_bare_columns([{"x": "1", "x_masks": "2"}]) == []
    assert find_bare_keys({"a": [{"std": 1}], "masks_std": {"x": 1}, "x_std": 1}) == ["x_std", "std"]
    assert find_bare_headings("mae  coverage_95  width_95") == ["coverage_95", "width_95"]
    assert find_bare_headings("spread: 95 % covers  test.width_95 (spread over the masks alone)") == []
    assert find_bare_headings("95 % covers") == ["95 % covers"]


# Of the commands test_calibrate_cli.py and test_fit_cli.py look at what theirs say and write; here the report.


def invoke(*arguments):
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def test_the_report(tmp_path):
    """Of brain ages, whose runs have a spread, and of runs that were calibrated."""
    [recipe] = [recipe for recipe in load_recipes("mri", "paper") if recipe.name == "rtrl-cp"]
    for cell in expand(recipe, "paper"):
        folder = tmp_path / "results" / cell.experiment / cell.slug
        write_json(folder / "cell.json", {"format": FORMAT, "version": "0", "identity": cell.identity()})
        write_json(folder / "result.json", {"test": {"mae": 5.0}, "compression_ratio": None})
        write_json(folder / "run.json", {"environment": {}, "data": {"examples": {}}})
        ages = range(30 + cell.point["data.options.fold"], 70, 5)
        lines = [f"{folder.name}-{age},{age},{age + age % 3},2.5,{90 - age}" for age in ages]
        (folder / "predictions.csv").write_text("name,target,predicted,std,ridge\n" + "\n".join(lines) + "\n")
    invoke("report", "--full", tmp_path / "results", "--out", tmp_path / "report")
    assert check("", tmp_path / "report") == {".md", ".html", ".svg"}


# The pages.


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages(path):
    text = path.read_text("utf-8")
    assert find_bare(text) == []
    headers = [line for line in text.splitlines() if re.fullmatch(r"[\w-]+(,[\w-]+){2,}", line)]
    for header in headers:
        columns = header.split(",")
        bare = [
            name for name in columns if name == "std" or (name.endswith("_std") and name[:-4] + "_low" not in columns)
        ]
        assert bare == [], header
