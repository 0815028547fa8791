"""Reproducing the paper: what runs, what is skipped, what goes on, and what the report says of it."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from typer.testing import CliRunner

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import DATASETS
from tensor_dropout_lab.data.cifar import DATA_VARIABLE
from tensor_dropout_lab.evaluation import runs as evaluation_runs
from tensor_dropout_lab.evaluation.intervals import (
    bootstrap_interval,
    difference_interval,
    metric_interval,
    proportion_interval,
    seed_interval,
)
from tensor_dropout_lab.experiments import PAPER, paper, recipes, sweep, synthetic
from tensor_dropout_lab.experiments.cells import FORMAT, RunContext, find_cell, run_cell
from tensor_dropout_lab.experiments.recipes import VARIANT, Cell, expand, list_experiments, load_recipes
from tensor_dropout_lab.locks import lock_folder
from tensor_dropout_lab.nets.heads import build_head
from tensor_dropout_lab.report.characters import escape_latex
from tensor_dropout_lab.report.collect import build_section, collect
from tensor_dropout_lab.report.model import Section
from tensor_dropout_lab.report.sections.calibration import UNCALIBRATED, add_calibration, tabulate_calibrations
from tensor_dropout_lab.report.sections.runs import Part, find_runs, pool, show_number
from tensor_dropout_lab.run_records import describe_command, write_json
from tensor_dropout_lab.training import loop
from tensor_dropout_lab.training.step import Step

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from choose_variants import split_row

runner = CliRunner()
ROOT = recipes.ROOT
OURS = "ours"
SHRUNK = {  # of the recipes: the same experiments in seconds
    r"run = \{ epochs = \d+, evaluate_every = \d+, threads = 1 \}": "run = { epochs = 1, batch = 256, threads = 1 }",
    r"run = \{ epochs = 10, batch = 8, evaluate_every = 10, threads = 1 \}": "run = { epochs = 1, threads = 1 }",
    r"seeds = 5\nrun": "seeds = 1\nrun",
    r"n = 240": "n = 40",
    r"steps = \d+, queries = \d+, twin_epochs = \d+": "steps = 1, queries = 1, twin_epochs = 1",
    r"images = 1[02]0,": "images = 5,",
    r"\[\[48, 2, 2, 10\].*": "[[24, 2, 2, 10], [6, 1, 1, 6]]",
    r"\[1\.0, 0\.8, 0\.6\]": "[1.0, 0.6]",
    r'grid."net.theta" = \[0\.9, 0\.7\]': 'grid."net.theta" = [0.7]',
    r"tune_epochs = 40": "tune_epochs = 1",
}


def use_recipes(patch, root):
    """From here on recipes are read from this folder."""
    for function in (recipes.list_experiments, recipes.describe_experiment, recipes.load_recipes):
        patch.setattr(function, "__defaults__", (root,))
    patch.setattr(recipes.expand, "__defaults__", (0, root))


@pytest.fixture(scope="module", autouse=True)
def tiny(tmp_path_factory):
    """The recipes, shrunk; the whole module reads them."""
    root = tmp_path_factory.mktemp("tiny") / "recipes"
    shutil.copytree(ROOT, root)
    counts = Counter()
    for path in root.glob("*.toml"):
        text = path.read_text(encoding="utf-8")
        for pattern, small in SHRUNK.items():
            text, number = re.subn(pattern, small, text)
            counts[pattern] += number
        path.write_text(text, encoding="utf-8")
    assert all(counts[pattern] for pattern in SHRUNK), counts
    for path in root.glob("synthetic-*.toml"):
        path.write_text(re.sub(r"epochs = (120|60)\b", "epochs = 2", path.read_text(encoding="utf-8")), "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        use_recipes(patch, root)
        yield root


@pytest.fixture
def edit(tiny, tmp_path, monkeypatch):
    """Edit recipes: a function (recipe, old text, new text); recipes are then read from a copy."""
    root = tmp_path / "recipes"

    def change(name, old, new):
        if not root.exists():
            shutil.copytree(tiny, root)
            use_recipes(monkeypatch, root)
        experiment, _, row = name.partition("/")
        row = f'"{row}"' if "." in row else row
        path = root / f"{experiment}.toml"
        before, text, after = split_row(path.read_text(encoding="utf-8"), row)
        text = text.replace(f"[rows.{row}.", "[")  # as if the row were a file of its own
        assert old in text
        text = re.sub(r"^\[(both|paper|quick)", rf"[rows.{row}.\1", text.replace(old, new), flags=re.MULTILINE)
        path.write_text(before + text + after, encoding="utf-8")
        recipes._read.cache_clear()

    yield change
    recipes._read.cache_clear()


@pytest.fixture(scope="module")
def everything(tiny, tmp_path_factory):
    """``reproduce all`` from nothing: its folder and what it said."""
    base = tmp_path_factory.mktemp("everything") / "results"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("draw_curves", "draw_formula"):  # tests/test_synthetic.py draws them
            patch.setattr(synthetic, name, lambda *_: [])
        result = runner.invoke(cli.app, ["reproduce", "all", "--out", str(base), "--device", "cpu"])
        others = [name for name in list_experiments() if name not in PAPER]
        beyond = runner.invoke(cli.app, ["reproduce", *others, "--out", str(base), "--device", "cpu"])
    assert (result.exit_code, beyond.exit_code) == (0, 0), result.output + beyond.output
    return SimpleNamespace(base=base, output=result.output)


@pytest.fixture
def copied(everything, tmp_path):
    """A function that copies results of some experiments into a folder that a test may change."""

    def copy(*names):
        for name in names:
            shutil.copytree(everything.base / name, tmp_path / "results" / name)
        return tmp_path / "results"

    return copy


@pytest.fixture
def started(monkeypatch):
    """What was really computed: ("train", EXPERIMENT/SLUG) and ("evaluate", EXPERIMENT/SLUG)."""
    calls = []
    run, evaluate = loop.Trainer.run, evaluation_runs.evaluate_run

    def note_training(self):
        calls.append(("train", "/".join(self.folder.path.parts[-2:])))
        return run(self)

    def note_evaluation(folder, settings, **options):
        out = options["out"]
        own = out.parent if out.name == "evaluation" else out
        calls.append(("evaluate", "/".join(own.parts[-2:])))
        return evaluate(folder, settings, **options)

    monkeypatch.setattr(loop.Trainer, "run", note_training)
    monkeypatch.setattr("tensor_dropout_lab.evaluation.runs.evaluate_run", note_evaluation)
    return calls


def list_cells(*names):
    return [cell for name in names for cell in paper.list_cells(name, "quick")]


def reproduce(base, *names, **options):
    """Run what is missing of the miniatures; what was said."""
    console = Console(file=io.StringIO(), width=1000)
    place = RunContext(base, {}, "cpu", options.pop("rerun_stale", False))
    paper.run_cells(list_cells(*names), place, console=console, **options)
    return console.file.getvalue()


def states(base, *names):
    return {f"{cell.experiment}/{cell.slug}": find_cell(cell, base).state for cell in list_cells(*names)}


def one(name, **config):
    """The first cell of a recipe, with some of its config changed: ``run__epochs=2``."""
    cell = list_cells(name)[0]
    return replace(cell, config={**cell.config, **{key.replace("__", "."): value for key, value in config.items()}})


def section_of(name, base, folder, preset="quick"):
    return build_section(name, preset, base, folder)


def cell_at(section, row, column, table=0):
    """The cell of a row, by its name, in the column whose head ends with these words."""
    found = section.tables[table]
    [index] = [k for k, head in enumerate(found.columns) if head.endswith(column)]
    [cells] = [cells for cells in found.rows if cells[0].text == row]
    return cells[index]


def forge(cell, base, result=None, evaluation=None, environment=None, examples=None):
    """The records of a cell that is done, with numbers of one's own."""
    folder = base / cell.experiment / cell.slug
    write_json(folder / "cell.json", {"format": FORMAT, "version": "0", "identity": cell.identity()})
    if result is not None:
        write_json(folder / "result.json", result)
        write_json(
            folder / "run.json",
            {"environment": environment or {}, "data": {"examples": {"test": examples} if examples else {}}},
        )
    if evaluation is not None:
        write_json((folder if cell.of else folder / "evaluation") / "evaluation.json", evaluation)
    return folder


# Everything, once.


def test_reproduce_all_ends_with_the_page(everything):
    assert set(states(everything.base, *NETWORKS).values()) == {"done"}
    lines = everything.output.splitlines()
    assert lines[-1].strip() == str(everything.base / "report" / "report.html")
    assert len(PAPER) == 9
    assert "beyond-" not in everything.output
    count = len(list_cells(*(name for name in PAPER if name in NETWORKS)))
    assert f"{count} of {count} runs are to do, on " in everything.output
    assert everything.output.count("done: ") == count  # a line for each, since no terminal shows a bar
    assert f"{count} of {count} runs were to do; now {count} done." in everything.output
    assert not list(everything.base.rglob("*.pt"))


NETWORKS = [name for name in list_experiments() if not name.startswith("synthetic")]


DRAWN = {
    **dict.fromkeys(
        ("imagenet", "mri", "mri-small", "mri-uncertainty", "mri-tuning", "cifar100", "cifar100-tuning"), 0
    ),
    **dict.fromkeys(("beyond-search", "beyond-best", "beyond-small", "beyond-labels", "beyond-unknown"), 0),
    **dict.fromkeys(("beyond-laptop-search", "beyond-laptop", "beyond-laptop-settings", "beyond-defaults"), 0),
    "beyond-attacks": 2,
}
"""Pictures of a section of miniatures, if it is not one."""


def test_the_report_of_the_miniatures_shows_everything(everything, tmp_path):
    report = collect({"quick": everything.base}, tmp_path)
    assert report.sections == []
    assert report.claims == []  # nothing of the full size is there to judge
    assert [section.id for section in report.miniatures] == [f"{name}-miniature" for name in list_experiments()]
    for section in report.miniatures:
        assert section.label.startswith("miniature: ")
        for table in section.tables:
            for row in table.rows:
                assert len(row) == len(table.columns)
                assert {cell.state for cell in row} <= {"text", "ours"}, section.id  # nothing of the paper beside them
        assert len(section.figures) == DRAWN.get(section.id.removesuffix("-miniature"), 1), section.id
        assert all(figure.svg.stat().st_size > 1000 and figure.alt for figure in section.figures)
    verdicts = {section.id: [name for name, _ in section.verdicts] for section in report.miniatures if section.verdicts}
    assert verdicts == {
        "imagenet-attacks-miniature": [recipe.row for recipe in load_recipes("imagenet-attacks", "quick")],
        "cifar100-attacks-miniature": [
            f"{recipe.row}, θ = 0.7" for recipe in load_recipes("cifar100-attacks", "quick")
        ],
        "beyond-attacks-miniature": [recipe.row for recipe in load_recipes("beyond-attacks", "quick")],
    }


def test_the_page_has_every_section_and_says_what_it_is(everything):
    folder = everything.base / "report"
    page, markdown, latex = ((folder / f"report.{ending}").read_text("utf-8") for ending in ("html", "md", "tex"))
    for name in PAPER:
        assert f'id="{name}-miniature"' in page
        title = recipes.describe_experiment(name)["title"]
        assert f"## {title}" in markdown
        assert escape_latex(title) in latex
    for text in (page, markdown, latex):
        assert "Miniatures" in text
        assert "SIMULATED" in text
        assert "76.19" not in text  # the paper's number, for other data


def test_again_nothing_is_computed(everything, started, monkeypatch):
    said = reproduce(everything.base, *NETWORKS)
    count = len(list_cells(*NETWORKS))
    assert said == f"0 of {count} runs were to do; now {count} done.\n"
    assert started == []
    monkeypatch.setattr(
        "tensor_dropout_lab.experiments.synthetic.training.train_stage", None
    )  # would fail if anything were trained
    for name in ("draw_curves", "draw_formula"):
        monkeypatch.setattr(synthetic, name, lambda *_: [])
    for name in ("synthetic-cp", "synthetic-tucker"):
        synthetic.run(name, "quick", everything.base, 0)


def test_one_experiment_is_drawn_from_its_records(copied, started):
    base = copied("cifar100")
    shutil.rmtree(base / "cifar100" / "rtrl-cp-seed1")
    result = runner.invoke(cli.app, ["reproduce", "cifar100/fc", "--out", str(base), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert started == []
    assert "0 of 2 runs were to do; now 2 done." in result.output
    table = (base / "cifar100" / "table.md").read_text("utf-8")
    assert str(base / "cifar100" / "table.md") in result.output.replace("\n", "")
    assert "76.19" not in table  # the paper's number, for other data
    assert "miniature" in table
    assert not (base / "cifar100" / "rtrl-cp-seed1").exists()  # another recipe: not asked for


# Cells.


def test_several_rows_are_run_in_one_sweep_and_each_table_is_written(tmp_path, started):
    names = ["cifar100/fc", "imagenet/fc", "cifar100/fc"]
    result = runner.invoke(cli.app, ["reproduce", *names, "--out", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert sorted(started) == [
        ("train", "cifar100/fc-seed0"),
        ("train", "cifar100/fc-seed1"),
        ("train", "imagenet/fc-seed0"),
    ]
    assert "3 of 3 runs were to do; now 3 done." in result.output
    for name in ("cifar100", "imagenet"):  # rows that were run, and how many were not
        table = (tmp_path / name / "table.md").read_text("utf-8")
        rows = [recipe.row in table for recipe in load_recipes(name, "quick")]
        assert (rows[0], rows[-1]) == (True, False)
        assert len(re.findall(r"\b\d+ rows of its tables not run\.", table)) == table.count("not run") == 1


@pytest.mark.parametrize("alone", ["all", "synthetic-cp"])
def test_what_is_run_alone_says_so(nowhere, alone):
    result = runner.invoke(cli.app, ["reproduce", "cifar100/fc", alone])
    assert result.exit_code == 2
    assert f"{alone} is run alone" in " ".join(result.output.replace("│", " ").split())


def test_a_deleted_record_makes_exactly_that_run_execute_again(copied, started):
    base = copied(*NETWORKS)
    before = (base / "cifar100" / "fc-seed1" / "model.safetensors").read_bytes()
    (base / "cifar100" / "fc-seed1" / "result.json").unlink()
    (base / "imagenet-attacks" / "fc-seed0" / "evaluation.json").unlink()
    (base / "cifar100-attacks" / "cp-theta0.7-seed0" / "evaluation" / "evaluation.json").unlink()
    shutil.rmtree(base / "mri-noise" / "rtrl-cp-seed0")
    assert Counter(states(base, *NETWORKS).values())["missing"] == 4
    said = reproduce(base, *NETWORKS)
    assert sorted(started) == [
        ("evaluate", "cifar100-attacks/cp-theta0.7-seed0"),
        ("evaluate", "imagenet-attacks/fc-seed0"),
        ("evaluate", "mri-noise/rtrl-cp-seed0"),
        ("train", "cifar100/fc-seed1"),
    ]
    assert said.startswith("4 of ")
    assert set(states(base, *NETWORKS).values()) == {"done"}
    assert (base / "cifar100" / "fc-seed1" / "model.safetensors").read_bytes() == before  # equal seeds, equal weights


def test_a_failed_run_is_shown_and_the_others_go_on(edit, tmp_path, started):
    edit("cifar100/trl-tucker", "net.rank = [32, 2, 2, 10]", "net.rank = [99, 2, 2, 10]")
    said = reproduce(tmp_path, "cifar100/trl-tucker", "cifar100/fc")
    assert "now 2 failed, 2 done" in said
    assert said.count("failed: ") == 2
    assert "rank" in said
    assert set(states(tmp_path, "cifar100/fc").values()) == {"done"}
    section = section_of("cifar100", tmp_path, tmp_path)
    shown = cell_at(section, "Tucker", OURS)
    assert (shown.text, shown.state) == ("failed", "failed")
    assert shown.detail.startswith("2 of 2 runs: ")
    assert "99" in shown.detail
    result = runner.invoke(cli.app, ["reproduce", "cifar100/trl-tucker", "--out", str(tmp_path), "--device", "cpu"])
    assert result.exit_code == 1  # for make, SLURM and CI; the table is written all the same
    assert "now 2 failed." in result.output
    assert str(tmp_path / "cifar100" / "table.md") in result.output.replace("\n", "")
    assert cell_at(section, "FC", OURS).state == "ours"
    assert cell_at(section, "CP", OURS).state == "not run"
    started.clear()
    reproduce(tmp_path, "cifar100/trl-tucker")  # a failure is tried again, and said again
    assert set(states(tmp_path, "cifar100/trl-tucker").values()) == {"failed"}
    assert started == []
    edit("cifar100/trl-tucker", "net.rank = [99, 2, 2, 10]", "net.rank = [32, 2, 2, 10]")
    assert "now 2 done" in reproduce(tmp_path, "cifar100/trl-tucker")


def test_a_run_that_failed_in_the_middle_begins_anew_once_its_recipe_is_mended(edit, tmp_path):
    edit("cifar100/fc", '[both]\nnet.head = "fc"', '[both]\nnet.head = "fc"\noptimizer.lr = 1e30')
    assert "not finite" in reproduce(tmp_path, "cifar100/fc")
    assert (tmp_path / "cifar100" / "fc-seed0" / "run.json").is_file()  # it had begun
    edit("cifar100/fc", "optimizer.lr = 1e30", "optimizer.lr = 1e-3")
    assert "now 2 done" in reproduce(tmp_path, "cifar100/fc")


def test_a_failed_seed_is_never_averaged_in(copied, tmp_path):
    base = copied("cifar100")
    cell = list_cells("cifar100/trl-cp")[1]
    write_json(base / "cifar100" / cell.slug / "failed.json", {"error": "train: the loss is not finite"})
    assert find_cell(cell, base).state == "failed"
    section = section_of("cifar100", base, tmp_path)
    shown = cell_at(section, "CP", OURS)
    assert (shown.text, shown.state) == ("failed", "failed")
    assert shown.detail == "1 of 2 runs: train: the loss is not finite"
    assert cell_at(section, "Tucker", OURS).state == "ours"


def test_a_failure_that_nobody_foresaw_keeps_its_traceback(tmp_path, monkeypatch):
    monkeypatch.setattr("tensor_dropout_lab.experiments.cells.complete", lambda cell, place: {}["rank"])
    cell = one("cifar100/fc")
    assert run_cell(cell, RunContext(tmp_path, {}, "cpu")) == "failed"
    record = find_cell(cell, tmp_path).run.read("failed.json")
    assert record["error"] == "KeyError: 'rank'"
    assert "in train_cell" in record["traceback"]
    assert record["traceback"].endswith("KeyError: 'rank'\n")


def test_an_edited_recipe_makes_its_records_stale(copied, edit, tmp_path, started):
    base = copied("cifar100")
    edit("cifar100/rtrl-cp", "net.theta = 0.9", "net.theta = 0.5")
    assert states(base, "cifar100") == {
        name: "stale" if "rtrl-cp" in name else "done" for name in states(base, "cifar100")
    }
    section = section_of("cifar100", base, tmp_path)
    shown = cell_at(section, "Randomized CP", OURS)
    assert (shown.text, shown.state) == ("stale", "stale")
    assert "changed" in shown.detail
    said = reproduce(base, "cifar100")
    assert "0 of 12 runs were to do; now 10 done, 2 stale." in said
    assert "2 records are stale" in said
    assert "--rerun-stale" in said
    assert started == []
    said = reproduce(base, "cifar100", rerun_stale=True)
    assert started == [("train", f"cifar100/rtrl-cp-seed{seed}") for seed in range(2)]
    assert "2 of 12 runs were to do; now 12 done." in said
    record = json.loads((base / "cifar100" / "rtrl-cp-seed0" / "run.json").read_text("utf-8"))
    assert record["settings"]["net.theta"] == 0.5


def test_a_header_or_a_printed_number_does_not_make_records_stale(copied, edit):
    base = copied("cifar100")
    edit("cifar100/fc", "# Table 4", "# A better header. Table 4")
    edit("cifar100/fc", "75.88 }", "75.89 }")
    assert set(states(base, "cifar100/fc").values()) == {"done"}


def test_evaluations_of_an_edited_recipe_are_stale_too(copied, edit, started):
    base = copied("imagenet", "imagenet-attacks")
    edit("imagenet/theta-0.6", "net.theta = 0.6", "net.theta = 0.55")
    found = states(base, "imagenet", "imagenet-attacks")
    assert [name for name, state in found.items() if state == "stale"] == [
        "imagenet/theta-0.6-seed0",
        "imagenet-attacks/theta-0.6-seed0",
    ]
    reproduce(base, "imagenet", "imagenet-attacks", rerun_stale=True)
    assert started == [("train", "imagenet/theta-0.6-seed0"), ("evaluate", "imagenet-attacks/theta-0.6-seed0")]


@pytest.mark.parametrize("name", ["cell.json", "result.json", "run.json", "failed.json"])
def test_a_half_written_record_is_damaged_and_run_again(copied, tmp_path, started, name):
    base = copied("cifar100")
    folder = base / "cifar100" / "fc-dropout-seed0"
    text = (folder / name).read_text("utf-8") if name != "failed.json" else '{"error": "x"}'
    (folder / name).write_text(text[: len(text) // 2], "utf-8")
    found = find_cell(list_cells("cifar100/fc-dropout")[0], base)
    assert found.state == "damaged"
    assert "cannot be read" in found.detail
    section = section_of("cifar100", base, tmp_path)
    shown = cell_at(section, "FC + dropout", OURS)
    assert (shown.text, shown.state) == ("damaged", "damaged")
    assert shown.detail.startswith("1 of 2 runs: a record cannot be read")
    assert "now 12 done" in reproduce(base, "cifar100")
    again = [] if name in ("run.json", "failed.json") else [("train", "cifar100/fc-dropout-seed0")]
    assert started == again  # what the result does not need is set aside
    assert name == "cell.json" or (folder / f"{name}.damaged").is_file()


def test_a_half_written_evaluation_is_damaged(copied, tmp_path, started):
    base = copied("imagenet", "imagenet-attacks")
    path = base / "imagenet-attacks" / "theta-0.7-seed0" / "evaluation.json"
    path.write_text(path.read_text("utf-8")[:1000], "utf-8")
    assert states(base, "imagenet-attacks/theta-0.7") == {"imagenet-attacks/theta-0.7-seed0": "damaged"}
    section = section_of("imagenet-attacks", base, tmp_path)
    rows = section.tables[2].rows  # of θ = 0.7
    assert [row[2].state for row in rows] == ["damaged"] * 3
    assert "R-TRL, θ = 0.7" not in section.figures[0].alt  # no curve of it
    reproduce(base, "imagenet-attacks")
    assert started == [("evaluate", "imagenet-attacks/theta-0.7-seed0")]


@pytest.mark.parametrize("content", ["[]", "3", '"text"', "null", "\x00", ""])
def test_a_record_that_is_none_is_damaged(copied, content):
    base = copied("cifar100")
    (base / "cifar100" / "fc-seed0" / "cell.json").write_text(content, "utf-8")
    assert find_cell(list_cells("cifar100/fc")[0], base).state == "damaged"


@pytest.mark.parametrize("record", [{"format": FORMAT + 1}, {"format": None}, {}, {"format": "1"}])
def test_a_record_of_another_format_is_damaged_and_says_so(copied, record, tmp_path):
    base = copied("cifar100")
    path = base / "cifar100" / "fc-seed0" / "cell.json"
    said = json.loads(path.read_text("utf-8"))
    said.pop("format")
    write_json(path, said | record)
    found = find_cell(list_cells("cifar100/fc")[0], base)
    assert found.state == "damaged"
    assert found.detail == f"its record has format {record.get('format')}, this version reads {FORMAT}"
    shown = cell_at(section_of("cifar100", base, tmp_path), "FC", OURS)
    assert shown.state == "damaged"
    assert "this version reads" in shown.detail


@pytest.mark.parametrize("damage", ["null", "NaN", "gone", "no accuracy", "text"])
def test_one_bad_number_leaves_the_others(copied, tmp_path, damage):
    base = copied("cifar100")
    path = base / "cifar100" / "fc-dropout-seed0" / "result.json"
    result = json.loads(path.read_text("utf-8"))
    if damage == "gone":
        del result["test"]
    elif damage == "no accuracy":
        del result["test"]["accuracy"]
    else:
        result["test"]["accuracy"] = {"null": None, "NaN": float("nan"), "text": "high"}[damage]
    path.write_text(json.dumps(result), "utf-8")
    section = section_of("cifar100", base, tmp_path)
    shown = cell_at(section, "FC + dropout", OURS)
    assert (shown.text, shown.state) == ("damaged", "damaged")
    assert shown.detail.startswith("1 of 2 runs: fc-dropout-seed0: result.json has n")
    assert "delete result.json, and reproduce it again" in shown.detail
    assert cell_at(section, "FC", OURS).state == "ours"


@pytest.mark.parametrize("damage", ["null", "no summary", "no clean"])
def test_one_bad_number_of_an_evaluation_leaves_the_others(copied, tmp_path, damage):
    base = copied("imagenet", "imagenet-attacks")
    path = base / "imagenet-attacks" / "theta-0.7-seed0" / "evaluation.json"
    record = json.loads(path.read_text("utf-8"))
    if damage == "null":
        record["summary"]["attacks"][0]["accuracy"] = None
    else:
        del (record if damage == "no summary" else record["summary"])[damage.removeprefix("no ")]
    path.write_text(json.dumps(record), "utf-8")
    section = section_of("imagenet-attacks", base, tmp_path)
    states = [{row[2].state for row in table.rows} for table in section.tables]
    assert states == [{"ours"}, {"ours"}, {"damaged"}, {"ours"}]
    assert "theta-0.7-seed0: evaluation.json has no " in section.tables[2].rows[-1][2].detail


def test_records_without_what_they_should_hold(copied):
    base = copied("cifar100")
    first, second = list_cells("cifar100/fc")
    write_json(base / "cifar100" / first.slug / "cell.json", {"format": FORMAT})
    assert find_cell(first, base).state == "stale"
    write_json(base / "cifar100" / second.slug / "failed.json", {})
    assert find_cell(second, base).state == "failed"


def test_an_interrupted_run_goes_on_from_its_checkpoint(tmp_path, monkeypatch, started):
    cell = one("cifar100/rtrl-tucker", run__epochs=3)
    whole, cut = RunContext(tmp_path / "whole", {}, "cpu"), RunContext(tmp_path / "cut", {}, "cpu")
    assert run_cell(cell, whole) == "done"
    steps, update = [], Step.__call__

    def interrupt(self, *start):
        steps.append(len(steps))
        if len(steps) == 6:  # four steps an epoch: in the middle of the second
            raise KeyboardInterrupt
        return update(self, *start)

    monkeypatch.setattr(Step, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, cut)
    found = find_cell(cell, cut.base)
    assert (found.state, found.detail) == ("missing", "cut off; the same command goes on")
    assert list(found.run.folder.glob("checkpoint-*.pt"))
    assert not (found.run.folder / "failed.json").exists()
    assert run_cell(cell, cut) == "done"
    assert len(steps) == 6 + 8  # the second and the third epoch, not the first
    folder = Path(cell.experiment, cell.slug)
    ours, theirs = (load_file(place.base / folder / "model.safetensors") for place in (cut, whole))
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert not list(cut.base.rglob("*.pt"))


def test_an_interrupted_evaluation_goes_on(copied, monkeypatch):
    base = copied("imagenet", "imagenet-attacks")
    [cell] = list_cells("imagenet-attacks/theta-0.8")
    shutil.rmtree(base / "imagenet-attacks" / cell.slug)
    add, names = Outcomes.add, []

    def interrupt(self, name, *rest):
        names.append(name)
        if len(names) == 10:
            raise KeyboardInterrupt
        add(self, name, *rest)

    monkeypatch.setattr(Outcomes, "add", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_cell(cell, RunContext(base, {}, "cpu"))
    assert find_cell(cell, base).state == "missing"
    assert run_cell(cell, RunContext(base, {}, "cpu")) == "done"
    assert Counter(names).most_common(1)[0] == (names[9], 2)  # only what was cut off was done twice


# Evaluations of other experiments' runs.


def test_a_run_comes_before_its_evaluation_and_both_are_skipped_when_done(tmp_path, started):
    reproduce(tmp_path, "imagenet-attacks/fc")
    expected = [("train", "imagenet/fc-seed0"), ("evaluate", "imagenet-attacks/fc-seed0")]
    assert started == expected
    assert states(tmp_path, "imagenet/fc") == {"imagenet/fc-seed0": "done"}
    reproduce(tmp_path, "imagenet-attacks/fc", "imagenet/fc")
    assert started == expected


def test_a_missing_source_is_said(tmp_path):
    [cell] = list_cells("mri-noise/rtrl-cp")
    assert run_cell(cell, RunContext(tmp_path, {}, "cpu")) == "failed"
    assert find_cell(cell, tmp_path).detail == "the run that it evaluates, mri/rtrl-cp-seed0, is not done"
    assert not (tmp_path / "mri").exists()


def test_an_evaluation_of_a_failed_run_says_so_and_recovers(edit, tmp_path, started):
    edit("imagenet/trl", "net.rank = [32, 2, 2, 10]", "net.rank = [99, 2, 2, 10]")
    edit("imagenet-attacks/fc", 'of = "imagenet/fc"', 'of = "imagenet/trl"')
    said = reproduce(tmp_path, "imagenet-attacks/fc")
    assert "the run that it evaluates, imagenet/trl-seed0, is not done" in said
    assert started == []
    edit("imagenet/trl", "net.rank = [99, 2, 2, 10]", "net.rank = [32, 2, 2, 10]")
    assert "now 1 done" in reproduce(tmp_path, "imagenet-attacks/fc")


def test_a_stale_run_is_not_trained_again_for_its_evaluation_unless_asked(copied, edit, started):
    base = copied("imagenet")
    edit("imagenet/fc", '[both]\nnet.head = "fc"', '[both]\nnet.head = "fc"\noptimizer.lr = 1e-3')
    reproduce(base, "imagenet", "imagenet-attacks/fc")
    assert ("train", "imagenet/fc-seed0") not in started


# Sweeps.


def make_cell(experiment, recipe, seed=0, *, epochs=1, data="digits", **fields):
    config = {} if "of" in fields else {"run.epochs": epochs, "data.name": data}
    return Cell(experiment, recipe, recipe, seed, config=config, **fields)


def test_a_unit_is_a_run_and_its_evaluations_in_this_order():
    run, other = make_cell("imagenet", "fc"), make_cell("mri", "fc")
    first, second = (make_cell(name, "fc", of=run, evaluation={}) for name in ("imagenet-attacks", "more-attacks"))
    assert sweep.group_cells([run, other, first, second]) == [[run, first, second], [other]]
    assert sweep.group_cells([first, other, second, run]) == [[run, first, second], [other]]
    assert sweep.group_cells([first]) == [[run, first]]
    assert sweep.group_cells([run, run]) == [[run]]
    assert sweep.group_cells([]) == []
    cells = list_cells(*NETWORKS)
    units = sweep.group_cells(cells)
    assert sorted(cell.experiment + cell.slug for unit in units for cell in unit) == sorted(
        cell.experiment + cell.slug for cell in cells
    )
    for unit in units:
        for cell in unit:
            assert cell.of is None or unit.index(cell.of) < unit.index(cell)


@pytest.mark.parametrize("workers", [1, 2, 3, 100])
def test_units_are_dealt_in_equal_shares(workers):
    units = sweep.group_cells(list_cells(*NETWORKS))
    shares = sweep.deal(units, workers)
    assert len(shares) == min(workers, len(units))
    assert sorted(map(id, (unit for share in shares for unit in share))) == sorted(map(id, units))
    loads = [sum(map(sweep._cost, share)) for share in shares]
    assert max(loads) - min(loads) <= max(map(sweep._cost, units))


def test_volumes_and_evaluations_are_dearer():
    run = make_cell("imagenet", "fc", epochs=4)
    volume, attack = make_cell("mri", "fc", epochs=4, data="phantom"), make_cell("a", "fc", of=run, evaluation={})
    assert sweep._cost([run]) < sweep._cost([volume])
    assert sweep._cost([run]) < sweep._cost([run, attack])
    assert sweep.deal([[run], [volume], [run]], 2) == [[[volume]], [[run], [run]]]


def test_two_workers_of_submitit_really_run(tmp_path):
    pytest.importorskip("submitit")
    said = reproduce(tmp_path, "cifar100/fc", workers=2)
    assert "2 of 2 runs were to do; now 2 done." in said, [path.read_text() for path in tmp_path.rglob("*_log.err")]
    jobs = tmp_path / ".jobs"
    assert len(list(jobs.glob("*_result.pkl"))) == 2
    commands = {
        json.loads((tmp_path / "cifar100" / f"fc-seed{seed}" / "run.json").read_text("utf-8"))["environment"]["command"]
        for seed in range(2)
    }
    assert commands == {describe_command()}  # what was typed, not how submitit starts a job


class Job:
    """A job of submitit that never does anything."""

    def __init__(self, *, done):
        self.is_done, self.cancelled, self.error = done, 0, None
        self.job_id = "0"  # a local job's is its process

    def exception(self):
        return self.error

    def done(self):
        return self.is_done

    def cancel(self):
        self.cancelled += 1


@pytest.fixture
def engine(monkeypatch):
    """Stands in for submitit: what it was told, and its jobs, which are done at once without a result."""
    told = SimpleNamespace(jobs=[], shares=[], gpus=[], parameters={}, done=True, error=None)

    class Executor:
        def __init__(self, folder, cluster):
            told.folder, told.cluster = folder, cluster

        def update_parameters(self, **parameters):
            told.parameters |= parameters

        def submit(self, function, share, place, gpu):
            told.shares.append(share)
            told.gpus.append(gpu)
            told.jobs.append(Job(done=told.done))
            told.jobs[-1].error = told.error
            return told.jobs[-1]

    monkeypatch.setattr(sweep, "import_extra", lambda *_: SimpleNamespace(AutoExecutor=Executor))
    return told


def test_an_interruption_cancels_the_jobs(tmp_path, engine, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    engine.done = False
    monkeypatch.setattr(sweep.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        reproduce(tmp_path, "cifar100", workers=3, cluster="slurm")
    assert [job.cancelled for job in engine.jobs] == [1, 1, 1]
    assert sum(len(unit) for share in engine.shares for unit in share) == 12


def test_a_signal_ends_the_workers_too(tmp_path):
    """In the background of a script, where SIGINT is ignored, and so are submitit's."""
    pytest.importorskip("submitit")
    command = [sys.executable, "-m", "tensor_dropout_lab", "reproduce", "cifar100", "--workers", "2", "--device", "cpu"]
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(
        [*command, "--out", str(tmp_path)], preexec_fn=ignore, stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("cifar100/*/metrics.jsonl")) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in errors
    for path in tmp_path.glob(".jobs/*_submitted.pkl"):
        number = int(path.name.partition("_")[0])
        deadline = time.monotonic() + 30
        while Path(f"/proc/{number}").exists() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not Path(f"/proc/{number}").exists()
    assert len(list(tmp_path.glob("cifar100/*/result.json"))) < 12


def test_a_run_that_another_process_is_at_is_not_called_failed(tmp_path):
    [cell] = list_cells("imagenet/fc")
    folder = tmp_path / cell.experiment / cell.slug
    with lock_folder(folder):
        assert run_cell(cell, RunContext(tmp_path, {}, "cpu")) == "missing"
    assert not (folder / "failed.json").exists()
    with lock_folder(folder):
        assert "1 are missing: another process is at them" in reproduce(tmp_path, "imagenet/fc")
    assert run_cell(cell, RunContext(tmp_path, {}, "cpu")) == "done"


@pytest.mark.parametrize(
    ("visible", "device", "expected"),
    [
        (None, "auto", ["0", "1", "0"]),
        (None, "cuda", ["0", "1", "0"]),
        (None, "cuda:1", ["1", "1", "1"]),
        ("3,GPU-5a", "auto", ["3", "GPU-5a", "3"]),
        ("3,5", "cuda:1", ["5", "5", "5"]),
        (None, "cpu", [None, None, None]),
    ],
)
def test_workers_take_turns_on_the_gpus(tmp_path, engine, monkeypatch, visible, device, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # no GPU runs here: only who would get which
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    sweep.run_sweep(sweep.group_cells(list_cells("cifar100")), RunContext(tmp_path, {}, device), workers=3)
    assert engine.gpus == expected


def test_a_worker_sees_its_gpu_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as submitit sets it; and put back after the test
    seen = []
    monkeypatch.setattr(
        sweep, "run_cell", lambda cell, place: seen.append((os.environ["CUDA_VISIBLE_DEVICES"], place.device))
    )
    sweep.run_units(sweep.group_cells(list_cells("cifar100/fc")), RunContext(tmp_path, {}, "cuda:1"), "1")
    assert set(seen) == {("1", "auto")}


def test_slurm_is_asked_for_by_a_flag(tmp_path, engine):
    arguments = ["reproduce", "cifar100/fc", "--slurm", "gpu", "--out", str(tmp_path), "--workers", "2"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert engine.cluster == "slurm"
    assert engine.parameters["slurm_partition"] == "gpu"
    assert engine.parameters["timeout_min"] >= 24 * 60  # submitit's own limit is 5 minutes
    assert len(engine.jobs) == 2


def test_one_worker_needs_no_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "import_extra", None)  # would fail if it were asked for
    reproduce(tmp_path, "cifar100/fc", workers=1)
    [cell] = list_cells("imagenet/fc")
    sweep.run_sweep([[cell]], RunContext(tmp_path, {}, "cpu"), workers=2)  # one unit: nothing to share
    assert find_cell(cell, tmp_path).state == "done"


def test_jobs_that_died_are_said(tmp_path, engine):
    engine.error = MemoryError()
    with pytest.raises(TensorDropoutError, match=r"2 of 2 jobs died; what they printed is in .*\.jobs"):
        reproduce(tmp_path, "cifar100/fc", workers=2)


# The command line.


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """An empty current folder, and no data."""
    folder = tmp_path / "nowhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    return folder


def fails(arguments, code=1):
    """The one sentence of a command that fails without a traceback."""
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    if code == 1:
        assert result.output.count("\n") == 1
        assert result.output.startswith("Error: ")
    return " ".join(re.sub(r"[│╭╮╰╯─]", " ", result.output).split())


@pytest.mark.parametrize(
    ("name", "near"),
    [("cifar-100", "cifar100"), ("imagenet-atacks", "imagenet-attacks"), ("synthetic", "synthetic-cp"), ("al", "all")],
)
def test_an_unknown_experiment_offers_the_nearest(nowhere, name, near):
    message = fails(["reproduce", name], 2)
    assert f"there is no experiment '{name}'" in message
    assert near in message.partition("did you mean")[2]
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cifar100/rtrl-tuker", "cifar100 has no recipe 'rtrl-tuker'; did you mean rtrl-tucker"),
        ("imagenet/theta-0.65", "imagenet has no recipe 'theta-0.65'; did you mean theta-0.6"),
        ("mri/zzzz", "mri has no recipe 'zzzz'; known are fc, trl-tucker, rtrl-tucker, rtrl-cp"),
        ("cifar100/fc/extra", "cifar100 has no recipe 'fc/extra'"),
    ],
)
def test_an_unknown_recipe_offers_the_nearest(nowhere, name, message):
    assert message in fails(["reproduce", name])
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize("name", ["synthetic-cp/white", "synthetic-cp/nothing"])
def test_a_slash_where_there_are_no_recipes_to_choose(nowhere, name):
    result = runner.invoke(cli.app, ["reproduce", name])
    assert result.exit_code == 2
    assert "is run as a whole" in result.output


LAYOUTS = {
    "cifar100": "Expected: ROOT/cifar-100-python/{train,test,meta}, the files of https",
    "cifar100-attacks/cp": "Expected: ROOT/cifar-100-python/{train,test,meta}, the files of https",
    "imagenet": "Expected: ROOT/train/",
    "imagenet-attacks/fc": "Expected: ROOT/train/",
    "mri": "Expected: ROOT/participants.tsv",
    "mri-noise": "Expected: ROOT/participants.tsv",
}


@pytest.mark.parametrize(("name", "layout"), LAYOUTS.items())
def test_missing_data_is_said_at_once_with_its_layout(nowhere, name, layout):
    message = fails(["reproduce", name, "--preset", "paper"])
    assert "no folder given; set root" in message
    assert layout in message
    assert not list(nowhere.iterdir())  # nothing was started
    (nowhere / "empty").mkdir()
    message = fails(["reproduce", name, "--preset", "paper", "--root", "empty"])
    assert "empty" in message
    assert layout in message
    assert [path.name for path in nowhere.iterdir()] == ["empty"]


def test_missing_data_is_said_before_anything_of_all_starts(nowhere, monkeypatch):
    ran = []
    monkeypatch.setattr(synthetic, "run", lambda name, *_, **__: ran.append(name) or [])
    fails(["reproduce", "all", "--preset", "paper"])
    assert ran == []


def test_a_root_of_unknown_data(nowhere):
    message = fails(["reproduce", "cifar100", "--root", "x=y"])
    assert "got 'x=y'" in message
    assert all(name in message for name in DATASETS)
    assert not list(nowhere.iterdir())


def test_a_report_without_results(nowhere):
    assert "tensor-dropout reproduce all" in fails(["report"])
    assert not list(nowhere.iterdir())


@pytest.mark.parametrize("option", ["--full", "--quick"])
def test_a_report_of_a_folder_that_is_not_there(nowhere, option):
    assert "there is no folder missing-folder" in fails(["report", option, "missing-folder"])
    assert not list(nowhere.iterdir())


@pytest.fixture(scope="module")
def in_all_states(everything, tmp_path_factory):
    """Results with a run in every state, and the report of them."""
    base, out = tmp_path_factory.mktemp("states") / "results", tmp_path_factory.mktemp("states-report")
    shutil.copytree(everything.base, base, ignore=shutil.ignore_patterns("report", "*.safetensors", "*.png"))
    write_json(base / "cifar100" / "trl-cp-seed0" / "failed.json", {"error": "train: the loss <b>is</b> not finite"})
    said = json.loads((base / "cifar100" / "rtrl-cp-seed1" / "cell.json").read_text("utf-8"))
    said["identity"]["config"]["net.theta"] = 0.123
    write_json(base / "cifar100" / "rtrl-cp-seed1" / "cell.json", said)
    (base / "cifar100" / "fc-dropout-seed0" / "result.json").write_text('{"task": "class', "utf-8")
    for seed in range(2):
        shutil.rmtree(base / "cifar100" / f"trl-tucker-seed{seed}")
    write_json(base / "imagenet-attacks" / "theta-0.6-seed0" / "failed.json", {"error": "the GPU's memory is full"})
    (base / "mri-noise" / "fc-seed0" / "evaluation.json").write_text("{", "utf-8")
    shutil.rmtree(base / "cifar100-surface" / "bernoulli-rank6x1x1x6-theta0.6-seed0")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)  # no results of the full size lie here
        result = runner.invoke(cli.app, ["report", "--quick", str(base), "--out", str(out)])
    assert result.exit_code == 0, result.output
    return SimpleNamespace(base=base, out=out, output=result.output)


def test_a_report_of_all_states(in_all_states, tmp_path):
    texts = {ending: (in_all_states.out / f"report.{ending}").read_text("utf-8") for ending in ("html", "md", "tex")}
    for ending, text in texts.items():
        assert str(in_all_states.out / f"report.{ending}") in in_all_states.output.replace("\n", "")
        for word in ("not run", "failed", "stale", "damaged"):
            assert word in text
    assert all(f'id="{name}-miniature"' in texts["html"] for name in PAPER)
    assert "the loss &lt;b&gt;is&lt;/b&gt; not finite" in texts["html"]
    shown = {
        row: cell_at(section_of("cifar100", in_all_states.base, tmp_path), row, OURS)
        for row in ("FC", "FC + dropout", "Tucker", "CP", "Randomized Tucker", "Randomized CP")
    }
    assert [cell.state for cell in shown.values()] == ["ours", "damaged", "not run", "failed", "ours", "stale"]


def test_one_broken_curve_leaves_the_others(in_all_states, tmp_path):
    section = section_of("mri-noise", in_all_states.base, tmp_path)
    rows = {row[0].text: {cell.state for cell in row[1:]} for row in section.tables[0].rows}
    assert rows == {
        "FC": {"damaged"},
        "Tucker": {"ours"},
        "Randomized Tucker": {"ours"},
        "Randomized CP": {"ours"},
    }
    assert "for Tucker, Randomized Tucker, Randomized CP" in section.figures[0].alt
    attacks = section_of("imagenet-attacks", in_all_states.base, tmp_path)
    failed = [cell for cell in attacks.tables[3].rows[-1] if cell.state == "failed"]
    assert [cell.detail for cell in failed] == ["1 of 1 runs: the GPU's memory is full"] * 4
    assert len(attacks.verdicts) == 3
    surface = section_of("cifar100-surface", in_all_states.base, tmp_path)
    own = next(table for table in surface.tables if table.caption == "Bernoulli R-TRL: accuracy in %")
    assert [[cell.state for cell in row[2:]] for row in own.rows] == [["ours", "ours"], ["ours", "not run"]]


def test_a_synthetic_record_of_an_edited_recipe_is_stale(copied, edit, tmp_path):
    base = copied("synthetic-cp")
    edit("synthetic-cp/white", 'inputs = "white"', 'inputs = "white"\nbatch = 25')
    section = section_of("synthetic-cp", base, tmp_path)
    assert "stale" in {cell.state for row in section.tables[0].rows for cell in row}


def test_a_damaged_synthetic_record_is_shown_as_such(copied, tmp_path):
    base = copied("synthetic-cp")
    (base / "synthetic-cp" / "white.json").write_text("{", "utf-8")
    section = section_of("synthetic-cp", base, tmp_path)
    assert "damaged" in {cell.state for row in section.tables[0].rows for cell in row}


def test_records_of_another_version_are_not_lost(copied):
    base = copied("cifar100")
    folder = base / "cifar100" / "fc-seed0"
    said = json.loads((folder / "cell.json").read_text("utf-8"))
    write_json(folder / "cell.json", said | {"format": FORMAT + 1})
    (folder / "made-by-the-other-version").write_text("dear")
    reproduce(base, "cifar100/fc")
    assert list(base.rglob("made-by-the-other-version"))


def test_the_table_is_that_of_the_seeds_that_were_run(tmp_path):
    result = runner.invoke(
        cli.app, ["reproduce", "cifar100/fc", "--seed", "5", "--out", str(tmp_path), "--device", "cpu"]
    )
    assert "now 2 done" in result.output
    table = (tmp_path / "cifar100" / "table.md").read_text("utf-8")
    row = next(line for line in table.splitlines() if line.startswith("| FC "))
    assert row.count("not run") == 0


# From records to numbers.


def test_several_seeds_have_students_interval(everything, tmp_path):
    section = section_of("cifar100", everything.base, tmp_path)
    for recipe in load_recipes("cifar100", "quick"):
        cells = expand(recipe, "quick")
        values = [find_cell(cell, everything.base).result["test"]["accuracy"] for cell in cells]
        low, high = seed_interval(values)
        shown = cell_at(section, recipe.row, OURS)
        assert shown.text == f"{sum(values) / 2:.2f} ({values[0]:.2f}, {values[1]:.2f})"
        assert f"95 % interval {low:.2f} to {high:.2f}" in shown.detail
        assert f"95 % interval {low:.2f} to {high:.2f}" in shown.detail
        assert f"2 seeds: {values[0]:.2f}, {values[1]:.2f}" in shown.detail


def test_only_seeds_that_are_there_are_counted(tmp_path):
    cells = expand(load_recipes("cifar100", "paper")[0], "paper")
    for cell, accuracy in zip(cells[:2], (75.0, 77.0), strict=True):
        forge(cell, tmp_path, make_result(accuracy), make_evaluation(), examples=10_000)
    forge(cells[2], tmp_path, make_result(90.0), examples=10_000)  # trained, but not yet attacked
    section = section_of("cifar100", tmp_path, tmp_path, "paper")
    assert cell_at(section, "FC", OURS).text == "76.00 (75.00, 77.00)"
    forge(cells[2], tmp_path, make_result(76.0), make_evaluation(), examples=10_000)
    section = section_of("cifar100", tmp_path, tmp_path, "paper")
    assert cell_at(section, "FC", OURS).text == "76.00 ± 2.48 (3)"
    assert section.label == "full size: CIFAR-100, 400 epochs, as printed"


def make_result(accuracy):
    test = {"accuracy": accuracy, "nll": 1.25, "ece": 8.5}
    return {"test": test, "parameters": 11_220_132, "compression_ratio": None, "seconds": 600.0}


def make_evaluation(fgsm=15.0, adaptive=2.0, masked=True):
    """An evaluation in which every attack of the paper leaves ``fgsm``, the ensemble ``adaptive``."""
    ends = {"low": 0.0, "high": 99.0}
    radii = ("2/255", "8/255", "16/255")
    attacks = [
        {"protocol": "paper", "attack": attack, "budget": radius, "epsilon": k, "accuracy": fgsm, **ends}
        for attack in ("fgsm", "bim", "pgd")
        for k, radius in enumerate((*radii, "1e-3", "8e-3"))
    ]
    worst = [
        {"budget": radius, "paper": {"accuracy": fgsm, **ends}, "adaptive": {"accuracy": adaptive, **ends}}
        for radius in radii
    ]
    noise = [{"corruption": "gaussian", "level": 16.0, "accuracy": fgsm + 20, **ends}]
    audit = {"masked": masked, "verdict": "GRADIENT MASKING: as forged" if masked else "No sign"}
    clean = {"accuracy": 76.0, **ends}
    return {"summary": {"clean": clean, "attacks": attacks, "worst_case": worst, "noise": noise, "audit": audit}}


def test_networks_that_were_attacked_have_both_protocols_noise_and_calibration_in_their_table(tmp_path):
    forged = {"fc": (5.0, 1.0), "rtrl-cp": (30.0, 3.0)}
    for recipe in load_recipes("cifar100", "paper"):
        for cell in expand(recipe, "paper"):
            if recipe.name in forged:
                fgsm, adaptive = forged[recipe.name]
                evaluation = make_evaluation(fgsm + cell.seed, adaptive + cell.seed, masked=cell.seed > 0)
                forge(cell, tmp_path, make_result(76.0 + cell.seed), evaluation, examples=10_000)
    section = section_of("cifar100", tmp_path, tmp_path / "figures", "paper")
    _, sizes, attacks, noise = section.tables
    rows = [row for row in attacks.rows if row[0].text == "Randomized CP"]
    assert [row[1].text for row in rows] == ["2/255", "8/255", "16/255"]
    assert [[cell.text for cell in row[2:6]] for row in rows] == [["31.0", "31.0", "31.0", "4.0"]] * 3
    low, high = seed_interval([30.0, 31.0, 32.0])
    assert rows[0][2].detail == f"95 % interval {low:.1f} to {high:.1f} over 3 seeds: 30.0, 31.0, 32.0"
    assert [row[6].text for row in rows] == ["", "MASKING (2 of 3)", ""]
    assert {cell.state for row in attacks.rows if row[0].text == "Tucker" for cell in row[2:6]} == {"not run"}
    shown = {row[0].text: [cell.text for cell in row[1:]] for row in noise.rows}
    assert noise.columns == ["head", "clean", "SNR 16"]
    assert shown["FC"] == ["76.0", "26.0"]
    assert shown["CP"] == ["not run", "not run"]
    shared = ["1.25 ± 0.00 (3)", "8.50 ± 0.00 (3)", "10.0"]
    assert [cell.text for cell in sizes.rows[0][1:]] == ["", "", "11,220,132", "", *shared]
    low, high = difference_interval([76.0, 77.0, 78.0], [76.0, 77.0, 78.0])
    assert sizes.rows[5][1].text == f"+0.00 [−{-low:.2f}, +{high:.2f}]"
    assert sizes.rows[5][2].text == ""  # CP without dropout was not run
    assert {cell.state for cell in sizes.rows[2][1:]} == {"not run"}
    assert len(section.verdicts) == 6
    assert section.verdicts[0] == ("FC, seed 0", "No sign")
    heads, curves = section.figures
    assert "Randomized CP 77.0 % (paper 76.19), 31.0 % under FGSM, 8/255, 4.0 % under adaptive, 2/255" in heads.alt
    assert "FC from 6 % to 6 %" in curves.alt


def test_one_seed_has_wilsons_interval(everything, tmp_path):
    section = section_of("imagenet", everything.base, tmp_path)
    for recipe in load_recipes("imagenet", "quick"):
        [cell] = expand(recipe, "quick")
        found = find_cell(cell, everything.base)
        for metric, head in (("accuracy", "accuracy, %"), ("top5", "top-5, %")):
            value = found.result["test"][metric]
            low, high = (100 * end for end in proportion_interval(round(value / 100 * 360), 360))
            shown = cell_at(section, recipe.row, f"{head}, {OURS}")
            assert shown.text == f"{value:.2f} [{low:.1f}, {high:.1f}]"
            assert "one seed, 360 test images" in shown.detail


def test_one_seed_without_a_count_and_an_error_have_none():
    assert show_number([2.5], "mae", 30).text == "2.50 (1)"
    assert show_number([75.0], "accuracy", None).text == "75.00 (1)"
    assert show_number([100.0], "accuracy", 10).text == "100.00 [72.2, 100.0]"


def test_rows_and_columns_are_those_of_the_paper(tmp_path):
    for name in ("imagenet", "mri", "cifar100"):
        table = section_of(name, tmp_path, tmp_path, "paper").tables[0]
        listed = load_recipes(name, "paper")
        assert [row[0].text for row in table.rows] == [recipe.row for recipe in listed]
        for row, recipe in zip(table.rows, listed, strict=True):
            assert [float(cell.text) for cell in row if cell.state == "paper"] == list(recipe.printed.values())
        for group in range(1, len(table.columns), 2):
            assert [head.rpartition(", ")[2] for head in table.columns[group : group + 2]] == ["paper", "ours"]
    assert [row[0].text for row in table.rows] == [
        "FC",
        "FC + dropout",
        "Tucker",
        "CP",
        "Randomized Tucker",
        "Randomized CP",
    ]


def test_attacks_carry_both_protocols_and_the_intervals_of_the_outcomes(everything, tmp_path):
    section = section_of("imagenet-attacks", everything.base, tmp_path)
    for table, cell in zip(section.tables, list_cells("imagenet-attacks"), strict=True):
        found = find_cell(cell, everything.base)
        outcomes = Outcomes(found.run.folder / "outcomes.npz", found.evaluation["identity"])
        assert table.columns == ["network", "ε", "FGSM", "BIM", "PGD", "adaptive ensemble", "audit"]
        ours = {row[1].text: row[2:] for row in table.rows}
        assert list(ours) == ["2/255", "8/255", "16/255"]
        for radius, numbers in ours.items():
            for shown, attack in zip(numbers, ("fgsm", "bim", "pgd"), strict=False):
                outcome = outcomes[f"paper/{attack}/{radius}"]
                low, high = metric_interval(outcome)
                right = (outcome["predicted"] == outcome["target"]).mean()
                assert shown.text == f"{100 * right:.1f}"
                assert shown.detail == f"95 % interval {low:.1f} to {high:.1f} over images"
            worst = next(row for row in found.evaluation["summary"]["worst_case"] if row["budget"] == radius)
            assert numbers[3].text == f"{worst['adaptive']['accuracy']:.1f}"
        audit = found.evaluation["summary"]["audit"]
        shown = ours["8/255"][4]
        assert shown.text == ("MASKING" if audit["masked"] else "no sign of masking")
        assert shown.detail == audit["verdict"]
        assert ours["2/255"][4].text == ours["16/255"][4].text == ""
    for table in section_of("imagenet-attacks", tmp_path, tmp_path, "paper").tables:
        printed = [row for row in table.rows if row[0].text == "paper"]
        assert [row[1].text for row in printed] == ["2/255", "8/255", "16/255"]
        assert all(cell.state == "paper" for row in printed for cell in row[2:5])


def test_noise_of_one_run_has_the_records_interval_of_several_students(everything, tmp_path):
    section = section_of("mri-noise", everything.base, tmp_path)
    for (table, family), (row, cell) in product(
        zip(section.tables, ("gaussian", "rician"), strict=True), enumerate(list_cells("mri-noise"))
    ):
        row = table.rows[row]
        summary = find_cell(cell, everything.base).evaluation["summary"]
        measured = [summary["clean"], *(each for each in summary["noise"] if each["corruption"] == family)]
        assert len(measured) == 6
        assert [shown.text for shown in row[1:]] == [f"{each['mae']:.2f}" for each in measured]
        for shown, each in zip(row[1:], measured, strict=True):
            assert shown.detail == f"95 % interval {each['low']:.2f} to {each['high']:.2f}, 1 run"
    cells = expand(load_recipes("mri-noise", "paper")[0], "paper")
    values = ((3.0, 6.0), (4.0, 7.0), (5.0, 11.0))
    for cell, (clean, noisy) in zip(cells[:3], values, strict=True):
        ends = {"low": 0.0, "high": 1.0}
        row = {"corruption": "gaussian", "level": 4.0, "mae": noisy, **ends}
        other = {"corruption": "rician", "level": 4.0, "mae": 99.0, **ends}
        forge(cell, tmp_path, evaluation={"summary": {"clean": {"mae": clean, **ends}, "noise": [row, other]}})
    table = section_of("mri-noise", tmp_path, tmp_path / "figures", "paper").tables[0]
    assert table.columns == ["head", "clean", "SNR 4"]
    shown = table.rows[0]
    assert [cell.text for cell in shown] == ["FC", "4.00", "8.00"]
    for cell, column in zip(shown[1:], zip(*values, strict=True), strict=True):
        low, high = np.exp(seed_interval(np.log(column))) * np.mean(column) / np.exp(np.mean(np.log(column)))
        assert cell.detail == f"95 % interval {low:.2f} to {high:.2f}, 3 runs"


def forge_noise(cell, base, **errors):
    """An evaluation with these errors at each level, "rician8" or "gaussian4"."""
    ends = {"low": 0.0, "high": 1.0}
    rows = [
        {"corruption": key.rstrip("0123456789"), "level": float(re.sub(r"\D", "", key)), "mae": value, **ends}
        for key, value in errors.items()
    ]
    forge(cell, base, evaluation={"summary": {"clean": {"mae": 1.0, **ends}, "noise": rows}})


def test_errors_under_noise_by_how_folds_were_trained(tmp_path):
    """Means over folds at the middle level that all runs have; a head that failed says so, one not run as well."""
    ways = {}
    for cell in expand(load_recipe("mri-noise", "fc"), "paper"):
        ways.setdefault(cell.point[VARIANT], {}).setdefault(cell.point["data.options.fold"], []).append(cell)
    fast, paper = ways["fast-cycle"], ways["paper"]
    first, second = (seeds for seeds in list(fast.values())[:2])
    forge_noise(first[0], tmp_path, rician8=9.0, rician4=10.0, rician2=5.0, gaussian4=1.0)
    forge_noise(first[1], tmp_path, rician8=9.0, rician4=20.0, rician2=5.0)
    forge_noise(second[0], tmp_path, rician8=9.0, rician4=45.0, rician2=5.0, rician1=99.0)
    forge_noise(next(iter(paper.values()))[0], tmp_path, gaussian4=7.0)  # no Rician noise at all
    tables = section_of("mri-noise", tmp_path, tmp_path / "figures", "paper").tables
    (table,) = (each for each in tables if "Rician" in each.caption and "by training" in each.caption)
    assert table.caption.endswith("SNR 4")
    rows = {row[0].text: dict(zip(table.columns[1:], row[1:], strict=True)) for row in table.rows}
    assert list(rows) == [recipe.row for recipe in load_recipes("mri-noise", "paper")]
    assert rows["FC"]["fast-cycle"].text == "30.0 (3)"
    assert rows["FC"]["paper"].state == rows["Tucker"]["cycle"].state == "not run"
    assert rows["FC"]["cycle"].text == ""


def test_nothing_is_shown_by_training_where_all_folds_were_trained_alike(everything, tmp_path):
    assert not [
        each for each in section_of("mri-noise", everything.base, tmp_path).tables if "by training" in each.caption
    ]


def forge_people(base, recipe, make):
    """Predictions of every fold and seed of a recipe of "mri" at full size; ``make(age, seed)`` predicts."""
    ages = np.linspace(20, 80, 50)
    found = {}
    for cell in expand(load_recipe("mri", recipe), "paper"):
        fold = cell.point["data.options.fold"]
        folder = forge(cell, base, {"test": {"mae": 1.0}, "compression_ratio": None})
        age = ages[fold::5]
        predicted = make(age, cell.seed)
        lines = [
            f"p{fold}-{k},{a},{p},{2 + k % 2},{a + 9}" for k, (a, p) in enumerate(zip(age, predicted, strict=True))
        ]
        (folder / "predictions.csv").write_text("name,target,predicted,std,ridge\n" + "\n".join(lines) + "\n", "utf-8")
        found.setdefault(cell.seed, []).append(predicted - age)
    return np.abs([np.concatenate(each) for each in found.values()])


def load_recipe(experiment, name, preset="paper"):
    return next(recipe for recipe in load_recipes(experiment, preset) if recipe.name == name)


def test_folds_are_put_together_person_by_person(tmp_path):
    noise = np.random.default_rng(0).normal(0, 3, 10)
    fc = forge_people(tmp_path, "fc", lambda age, seed: 25 + 0.5 * age + noise)
    cp = forge_people(tmp_path, "rtrl-cp", lambda age, seed: age + 2 + seed)
    section = section_of("mri", tmp_path, tmp_path / "figures", "paper")
    low, high = bootstrap_interval(fc)
    shown = cell_at(section, "FC", OURS)
    assert shown.text == f"{fc.mean():.2f} [{low:.2f}, {high:.2f}]"
    assert shown.detail == "5 seeds × 5 folds, 50 people; bootstrap over people and seeds"
    assert cell_at(section, "Randomized CP", OURS).text == "2.50 [2.00, 3.00]"
    assert cell_at(section, "Tucker", OURS).state == "not run"
    assert cell_at(section, "Randomized CP", "paper").text == "2.58"
    assert cell_at(section, "FC + dropout", "paper").text == ""
    people = {row[0].text: [cell.text for cell in row[1:]] for row in section.tables[1].rows}
    mean, difference, _, _, slope, corrected = people["FC"]
    assert (mean, difference) == (shown.text, "")
    assert float(slope) == pytest.approx(-0.5, abs=0.1)
    assert float(corrected) < fc.mean()  # regression towards the mean was most of the error
    assert people["Randomized CP"][1].startswith(f"{(fc.mean(0) - cp.mean(0)).mean():.2f} [")
    assert people["Randomized CP"][2:5] == ["1.00", "0.98", "0.00"]
    assert people["ridge regression on the voxels"][0] == "9.00 [9.00, 9.00]"
    assert people["the mean of the training ages"][2] == ""
    assert float(people["the mean of the training ages"][0].split()[0]) == pytest.approx(15.3, abs=0.3)
    assert set(people["Tucker"]) == {"not run"}
    assert "Randomized CP 2.0 years off on average" in section.figures[0].alt


@pytest.mark.parametrize(
    "content", [None, "", "name,target,predicted\n", "name,target\na,2\n", "name,target,predicted\na,2,old\n"]
)
def test_one_damaged_table_of_predictions_leaves_the_others(tmp_path, content):
    for recipe in ("fc", "rtrl-cp"):
        forge_people(tmp_path, recipe, lambda age, seed: age + 2)
    path = min((tmp_path / "mri").glob("rtrl-cp-*")) / "predictions.csv"
    path.unlink() if content is None else path.write_text(content, "utf-8")
    section = section_of("mri", tmp_path, tmp_path / "figures", "paper")
    assert cell_at(section, "FC", OURS).state == "ours"
    shown = cell_at(section, "Randomized CP", OURS)
    assert shown.state == "damaged"
    assert f"{path.parent.name}: predictions.csv " in shown.detail
    [people] = [row[1] for row in section.tables[1].rows if row[0].text == "Randomized CP"]
    assert people.detail.startswith("1 seed × 5 folds")  # the one that is whole


def test_uncertainty_is_widened_by_what_other_folds_leave_over(tmp_path):
    rng = np.random.default_rng(0)
    errors = {}
    for cell in expand(load_recipe("mri-uncertainty", "cp-exact"), "paper"):
        folder = forge(cell, tmp_path, evaluation={"summary": {"clean": {"mae": 1.0}}})
        outcomes = Outcomes(folder / "outcomes.npz", {})
        outcomes.set_examples(torch.zeros(200), [str(k) for k in range(200)])
        error = rng.normal(0, 5, (200, 1))
        errors.setdefault(cell.seed, []).append(error)
        outcomes.add("clean", {}, {"output": error, "std": np.full((200, 1), 3.0)}, 0.25)
    rows = section_of("mri-uncertainty", tmp_path, tmp_path, "paper").tables[0].rows
    shown = next([cell.text for cell in row[1:]] for row in rows if row[0].text == "Randomized CP, exact, one pass")
    error = np.abs(np.concatenate([each for own in errors.values() for each in own]))
    assert shown[0] == f"{error.mean():.2f}"
    assert shown[1] == "3.00"
    assert shown[2] == f"{100 * (error < 1.96 * 3).mean():.0f} %"
    assert float(shown[3].rstrip(" %")) == pytest.approx(95, abs=1.5)  # 3² + 4² is the variance that there is
    assert float(shown[4]) == pytest.approx(math.log(5) + 0.5 * math.log(2 * math.pi) + 0.5, abs=0.03)
    assert shown[6] == "1.25"  # five folds of a quarter of a second
    assert {cell.state for cell in rows[0][1:]} == {"not run"}
    for damage in (lambda path: path.write_bytes(b"PK"), Path.unlink):
        damage(folder / "outcomes.npz")
        rows = section_of("mri-uncertainty", tmp_path, tmp_path, "paper").tables[0].rows
        assert {cell.state for row in rows for cell in row[1:]} == {"not run", "damaged"}


MEASURED = {
    "rtrl-cp": {
        "task": "classification",
        "temperature": 1.5,
        "before": {"nll": 0.9},
        "after": {"nll": 0.7},
        "levels": [{"coverage": level, "inside": 100 * level + 1, "size": 10 * level} for level in (0.5, 0.9)],
    },
    "numbers": {
        "task": "regression",
        "masks": {"age": 1.0, "size": 3.0},
        "levels": [
            {"coverage": level, "target": name, "inside": 100 * level + more, "width": 10 * more}
            for level in (0.9, 0.95)
            for name, more in (("age", 1.0), ("size", 2.0))
        ],
    },
}
"""What evaluations say of calibrated runs."""


def test_what_calibrated_runs_hold_has_a_table_and_others_say_that_there_is_none(tmp_path):
    clean = {
        "summary": {"clean": {"accuracy": 70.0, "nll": 1.0, "low": 60.0, "high": 80.0}, "attacks": [], "noise": []}
    }
    clean["summary"] |= {"worst_case": [], "task": "classification"}
    recipe = load_recipe("beyond-unknown", "rtrl-cp")
    for cell in expand(recipe, "paper"):
        forge(cell, tmp_path, {"test": clean["summary"]["clean"], "compression_ratio": 2.0}, evaluation=clean)
    part = Part("beyond-unknown", "paper", tmp_path, tmp_path / "figures")
    plain = Section("beyond-unknown", "", "", notes=["before"])
    assert add_calibration(plain, part).notes == ["before", UNCALIBRATED]
    (cell,) = expand(recipe, "paper")[:1]
    forge(cell, tmp_path, evaluation={**clean, "calibration": {"missing": "nobody measured"}})
    assert add_calibration(plain, part).notes == ["before", UNCALIBRATED]
    forge(cell, tmp_path, evaluation={**clean, "calibration": MEASURED["rtrl-cp"]})
    found = add_calibration(plain, part)
    assert found.notes == ["before"]
    (table,) = found.tables
    (row,) = [row for row in table.rows if row[0].text == recipe.row]
    assert [cell.text for cell in row[1:]] == ["1.5 (1)", "0.9 (1)", "0.7 (1)", "91 (1)", "9 (1)"]
    empty = add_calibration(plain, Part("beyond-unknown", "paper", tmp_path / "none", tmp_path))
    assert (empty.notes, empty.tables) == (["before"], [])  # not run: the section says so itself


def test_calibrated_numbers_are_means_over_targets_and_runs():
    table = tabulate_calibrations({"CP": [MEASURED["numbers"]] * 2, "FC": []})
    assert [cell.text for cell in table.rows[0]] == ["CP", "91.5 (2)", "15 (2)", "2 (2)"]
    assert [cell.text for cell in table.rows[1]] == ["FC", *["not calibrated"] * 3]
    assert table.columns[-1] == "masks, mean std"


def test_an_ensemble_is_evaluated_after_all_its_members(edit, tmp_path, started):
    edit("mri-uncertainty/fc-ensemble", 'presets = ["paper"]', "")
    edit("mri/fc", "[both]", "[quick]\nseeds = 2\n\n[both]")
    said = reproduce(tmp_path, "mri-uncertainty/fc-ensemble", "mri-noise/fc")
    assert "3 of 3 runs were to do; now 3 done." in said
    assert sorted(started[:-1]) == [
        ("evaluate", "mri-noise/fc-seed0"),
        ("evaluate", "mri-noise/fc-seed1"),
        ("train", "mri/fc-seed0"),
        ("train", "mri/fc-seed1"),
    ]
    assert started[-1] == ("evaluate", "mri-uncertainty/fc-ensemble-seed0")
    record = json.loads((tmp_path / "mri-uncertainty" / "fc-ensemble-seed0" / "evaluation.json").read_text("utf-8"))
    assert len(record["identity"]["networks"]) == 2
    assert record["summary"]["clean"]["width_95"] > 0


def test_the_surfaces_ratios_are_those_of_the_layers(everything, tmp_path):
    section = section_of("cifar100-surface", everything.base, tmp_path)
    for table, recipe in zip(section.tables, load_recipes("cifar100-surface", "quick"), strict=True):
        assert table.caption.startswith(recipe.row)
        assert table.columns == ["rank", "compression ratio", "θ = 1", "θ = 0.6"]
        shown = {row[0].text: row[1].text for row in table.rows}
        for cell in expand(recipe, "quick"):
            rank = cell.point["net.rank"]
            head = build_head("rtrl-tucker", (64, 2, 2), 10, rank=rank)
            size = sum(p.numel() for name, p in head.named_parameters() if name != "bias")
            assert head.compression_ratio == pytest.approx(64 * 2 * 2 * 10 / size)
            assert find_cell(cell, everything.base).result["compression_ratio"] == head.compression_ratio
            assert shown["×".join(map(str, rank))] == f"{head.compression_ratio:.1f}"
    full = section_of("cifar100-surface", tmp_path, tmp_path, "paper").tables
    assert ["held-out" in table.caption for table in full] == [False, True] * 4
    assert [len(table.rows) for table in full] == [5] * 8
    assert {cell.state for table in full for row in table.rows for cell in row[2:]} == {"not run"}


def test_each_environment_is_listed_once(everything, tmp_path):
    cells = expand(load_recipes("cifar100", "paper")[0], "paper")
    versions = {"tensor_dropout": "1.0", "torch": "2.9", "python": "3.12", "cpu_count": 16, "command": "x"}
    machines = [versions | {"gpu": "H200"}, versions | {"gpu": "H200", "command": "y"}, versions]
    for cell, environment in zip(cells, machines, strict=True):
        forge(cell, tmp_path, make_result(75.0), make_evaluation())
        path = tmp_path / cell.experiment / cell.slug / "run.json"
        write_json(path, {"environment": environment, "data": {}})
    (tmp_path / "cifar100" / "fc-seed9").mkdir()
    (tmp_path / "cifar100" / "fc-seed9" / "run.json").write_text("{", "utf-8")  # damaged: left out
    report = collect({"paper": tmp_path}, tmp_path / "figures")
    said = "tensor-dropout 1.0, torch 2.9, Python 3.12"
    assert report.environment == [("full size", f"H200; {said}"), ("full size", f"16 CPU cores; {said}")]
    page = (everything.base / "report" / "report.md").read_text("utf-8")
    [own] = [line for line in page.splitlines() if line.startswith("- miniatures: ")]
    assert f"torch {torch.__version__}" in own


# Beyond the paper.


def test_a_condition_has_the_mean_over_seeds_of_each_metric(tmp_path):
    for cell in list_cells("beyond-labels"):
        score = {"accuracy": 50.0 + 2 * cell.seed, "nll": 1.0 + cell.seed, "ece": 3.0}
        forge(cell, tmp_path, result={"test": score})
    section = section_of("beyond-labels", tmp_path, tmp_path / "figures")
    mini = section.tables
    assert [table.columns for table in mini] == [["", "label noise = 0.4"]] * 3
    for table, values in zip(mini, ([50.0, 52.0], [1.0, 2.0], [3.0, 3.0]), strict=True):
        assert [row[0].text for row in table.rows] == ["FC", "Randomized CP"]
        assert {row[1].text for row in table.rows} == {show_number(values, "", None).text}
    full = section_of("beyond-labels", tmp_path, tmp_path / "figures", "paper").tables[0]
    assert full.columns == ["", "weight decay = 0.0005", "weight decay = 0.002"]
    assert {cell.state for row in full.rows for cell in row[1:]} == {"not run"}


def test_the_change_by_a_setting_is_that_on_equal_seeds(tmp_path):
    cells = [cell for cell in list_cells("beyond-laptop-settings") if cell.recipe == "rtrl-cp"]
    for cell in cells:
        changed = cell.point["variant"] != "plain"
        score = 50.0 + 9 * cell.seed + (changed and 2 + 0.1 * cell.seed)  # seeds differ far more than the settings
        forge(cell, tmp_path, result={"validation": {"accuracy": score}, "test": {"accuracy": 0.0}})

    def read_table():
        section = section_of("beyond-laptop-settings", tmp_path, tmp_path / "figures")
        [table] = [table for table in section.tables if table.caption == "Randomized CP: one setting changed"]
        return [[cell.text for cell in row] for row in table.rows]

    plain, changed = read_table()
    assert plain == ["plain", show_number([50.0, 59.0], "", None).text, ""]
    assert changed[1:] == [show_number([52.0, 61.1], "", None).text, "+2.05 (+2.00, +2.10)"]
    cells += [replace(cell, seed=2) for cell in cells if cell.seed == 1]
    for cell, score in zip(cells[-2:], (70.0, 72.4), strict=True):
        scores = {"validation": {"accuracy": score}, "test": {"accuracy": 0.0}}
        forge(replace(cell, config=cell.config | {"data.seed": 2, "run.seed": 2}), tmp_path, result=scores)
    low, high = seed_interval([2.0, 2.1, 2.4])
    assert read_table()[1][2] == f"+2.17 [{low:+.2f}, {high:+.2f}]"
    write_json(tmp_path / cells[-1].experiment / cells[-1].slug / "failed.json", {"error": "not finite"})
    assert read_table()[1][1:] == ["failed", ""]


def test_signals_of_unknown_classes_are_those_of_the_records(tmp_path):
    for cell in list_cells("beyond-unknown"):
        known = ("rest", "entropy", *(("disagreement", "doubt") if cell.recipe == "rtrl-cp" else ()))
        signals = {name: {"auroc": 80.0 + 2 * cell.seed + k, "fpr95": 50.0} for k, name in enumerate(known)}
        summary = {"clean": {"accuracy": 97.0, "nll": 0.1}, "unknown": {"examples": 9, "signals": signals}}
        forge(cell, tmp_path, result={"test": {"accuracy": 97.0}}, evaluation={"summary": summary})
    table = section_of("beyond-unknown", tmp_path, tmp_path / "figures").tables[0]
    fc, cp = table.rows
    assert fc[3].text == cp[3].text == show_number([80.0, 82.0], "", None).text
    assert cp[6].text == show_number([83.0, 85.0], "", None).text
    assert [cell.text for cell in fc[5:]] == ["", ""]  # an FC head has no draws to disagree
    signals["rest"]["auroc"] = None
    forge(cell, tmp_path, evaluation={"summary": summary})
    fc, cp = section_of("beyond-unknown", tmp_path, tmp_path / "figures").tables[0].rows
    assert ({each.state for each in fc[1:5]}, {each.state for each in cp[1:]}) == ({"ours"}, {"damaged"})


def test_sizes_come_from_what_was_trained_and_what_was_cut(tmp_path):
    for cell in list_cells("beyond-sizes"):
        rank = cell.point.get("net.rank")
        result = {"test": {"accuracy": 90.0 + (rank or 0)}, "head_parameters": 10 * (rank or 100)}
        heads = [
            {
                "kind": "rank" if cell.recipe == "nested" else kind,
                "size": size,
                "parameters": 7 * size,
                "accuracy": size,
            }
            for size in (1, 5)
            for kind in (("rank",) if cell.recipe == "nested" else ("low-rank", "pruned"))
        ] + [{"kind": "whole", "size": 0, "parameters": 99, "accuracy": 9}]
        evaluation = None if cell.evaluation is None else {"summary": {"clean": {"accuracy": 9}, "heads": heads}}
        forge(cell, tmp_path, result=result, evaluation=evaluation)
    section = section_of("beyond-sizes", tmp_path, tmp_path / "figures")
    rows = [tuple(cell.text for cell in row) for row in section.tables[0].rows]
    assert ("CP", "40", "94.00") in rows
    assert ("CP", "160", "106.00") in rows
    assert ("FC, cut afterwards: pruned", "35", "5.00") in rows
    assert ("Nested CP, cut afterwards: leading ranks", "7", "1.00") in rows
    assert ("FC, cut afterwards: pruned", "99", "9.00") in rows  # every line ends in the whole head
    assert len(rows) == 2 + 2 * 3 + 3
    assert section.figures[0].svg.is_file()


def test_the_cost_of_a_search_counts_failed_trials(tmp_path):
    first, second = [cell for cell in list_cells("beyond-search") if cell.recipe == "fc"]
    scores = {"validation": {"accuracy": 50.0}, "test": {"accuracy": 40.0}}
    forge(first, tmp_path, result={**scores, "seconds": 12.4, "compression_ratio": None})
    write_json(forge(second, tmp_path) / "failed.json", {"error": "not finite"})
    *trials, table = section_of("beyond-search", tmp_path, tmp_path / "figures").tables
    [own] = [each for each in trials if each.caption.startswith("FC: ")]
    said = show_number([50.0], "accuracy", None).text
    assert [[cell.text for cell in row] for row in own.rows] == [["plain", said, "12"], ["smooth", "failed", ""]]
    assert table.caption == "What the search cost"
    assert [[cell.text for cell in row] for row in table.rows] == [
        ["FC", "2", "12"],
        ["Randomized CP", "not run", "not run"],
    ]


def test_a_row_of_another_rows_networks_has_its_clean_accuracy_and_no_size(tmp_path):
    """Such networks are asked in another way, and have no training of their own."""
    rows = ("rtrl-cp", "rtrl-cp-sample")
    for cell in [cell for name in rows for cell in paper.list_cells(f"beyond-attacks/{name}", "paper")]:
        evaluation = make_evaluation(5.0, 1.0, masked=False)
        evaluation["summary"]["clean"] |= {"accuracy": 66.0, "nll": 0.5, "ece": 4.0}
        forge(cell, tmp_path, None if cell.of else make_result(76.0), evaluation, examples=10_000)
    section = section_of("beyond-attacks", tmp_path, tmp_path / "figures", preset="paper")
    assert cell_at(section, "Randomized CP", OURS).text.startswith("76.00")
    assert cell_at(section, "Randomized CP, masks at test time", OURS).text == "66.00 (1)"
    sizes = {row[0].text: [cell.text for cell in row[1:]] for row in section.tables[1].rows}
    assert sizes["Randomized CP, masks at test time"] == ["", "", "", "", "0.50 (1)", "4.00 (1)", ""]


def test_an_ensemble_by_itself_is_not_stale(tmp_path):
    cells = paper.list_cells("mri-uncertainty/fc-ensemble", "paper")
    for cell in cells:
        forge(cell, tmp_path, evaluation={"summary": {"clean": {"mae": 1.0}}})
    [runs] = [runs for runs in find_runs("mri-uncertainty", "paper", tmp_path) if "ensemble" in runs.recipe.name]
    assert {found.state for _, found in runs.records} == {"done"}


def test_an_interval_over_folds_does_not_count_seeds_as_people():
    rows = [{"mae": value} for value in (5.0, 5.2, 7.0, 7.4, 6.0, 6.0)]
    pooled = pool(rows, "mae", [0, 0, 1, 1, 2, 2])
    folds = [5.1, 7.2, 6.0]
    low, high = np.exp(seed_interval(np.log(folds))) * np.mean(folds) / np.exp(np.mean(np.log(folds)))
    assert (pooled["low"], pooled["high"], pooled["runs"]) == (pytest.approx(low), pytest.approx(high), 6)
    without = pool(rows, "mae")
    assert without["high"] - without["low"] < pooled["high"] - pooled["low"]
