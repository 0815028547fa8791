"""The committed records, and what README and docs say of them."""

from __future__ import annotations

import json
import lzma
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tensor_dropout.metrics.registry import main_metric, summarize
from tensor_dropout_lab import cli
from tensor_dropout_lab.evaluation.intervals import seed_interval
from tensor_dropout_lab.experiments.cells import find_cell
from tensor_dropout_lab.experiments.paper import list_cells
from tensor_dropout_lab.experiments.recipes import ROOT as RECIPES
from tensor_dropout_lab.experiments.recipes import expand, list_experiments, load_recipes
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.training.runs import flatten

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
sys.path.append(str(ROOT / "tools"))
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "<!-- table" in page.read_text(encoding="utf-8"))
STORE = RecordStore(RESULTS)
NETWORKS = [
    name for name in list_experiments() if not name.startswith("synthetic") and STORE.list_runs(name)
]  # of the recipes


def list_evaluations(experiment):
    """(run, the folder of an evaluation in it) for every evaluation of an experiment."""
    names = (("evaluation/evaluation.json", "evaluation"), ("evaluation.json", ""))
    runs = [STORE.run(experiment, name) for name in STORE.list_runs(experiment)]
    return [(run, folder) for run in runs for name, folder in names if run.has(name)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_what_the_records_say(page):
    from write_tables import update

    text = page.read_text(encoding="utf-8")
    assert "| *stale* |" not in text
    assert text == update(text), f"{page} is stale; run: make tables"


def test_there_are_pages_with_tables():
    assert {"cifar100", "equal-trials", "brain-age"} <= {page.stem for page in PAGES}


def test_the_differences_on_the_digits_page_are_those_of_the_records():
    scores = {}
    for name in STORE.list_runs("digits"):
        summary = STORE.run("digits", name).read("evaluation/evaluation.json")["summary"]
        head, _, seed = name.rpartition("-seed")
        levels = {"clean": summary["clean"]} | {f"SNR {row['level']:g}": row for row in summary["noise"]}
        scores.setdefault(head, {})[seed] = {level: row["accuracy"] for level, row in levels.items()}
    text = (DOCS / "explanation" / "digits.md").read_text(encoding="utf-8")
    names = {recipe.name: recipe.row for recipe in load_recipes("digits", "paper")}
    ours = scores.pop("rtrl-tucker")
    assert len(ours) == 20
    for rival, theirs in scores.items():
        cells = []
        for level in ("clean", "SNR 4", "SNR 1"):
            changes = [ours[seed][level] - theirs[seed][level] for seed in ours]
            low, high = seed_interval(changes)
            cells.append(f"{np.mean(changes):+.2f} \\[{low:+.2f}, {high:+.2f}\\]".replace("-", "−"))
        assert f"| {names[rival]} | {' | '.join(cells)} |" in text


SAID = ["README.md", *(f"docs/explanation/{name}.md" for name in ("when-to-use", "evidence", "paper-rerun"))]


@pytest.mark.parametrize("page", SAID)
def test_accuracies_with_intervals_are_those_of_the_tables(page):
    from write_tables import render

    table = render("headline 0") + render("beyond-best 0")
    for number in re.findall(r"7\d\.\d\d(?: ± 0\.\d\d)?(?= %)", (ROOT / page).read_text(encoding="utf-8")):
        assert number in table, f"{page}: {number} %"


def test_kept_evaluations_can_be_compared(tmp_path):
    """What docs/how-to/attack-and-audit.md shows of compare works on records of which decisions alone were kept."""
    folders = [str(RESULTS / "cifar100" / name) for name in ("fc-seed0", "rtrl-cp-seed0")]
    done = CliRunner().invoke(cli.app, ["compare", *folders, "--out", str(tmp_path / "record.json")])
    assert done.exit_code == 0, done.output
    record = json.loads((tmp_path / "record.json").read_text(encoding="utf-8"))
    rows = {row["part"]: row for row in record["pairs"][0]["parts"]}
    assert "adaptive/pgd-ce/8/255" in rows
    for folder in folders:
        measured = STORE.run("cifar100", Path(folder).name).read("evaluation/evaluation.json")
        for worst in measured["summary"]["worst_case"]:
            for protocol in ("paper", "adaptive"):
                row = rows[f"{protocol}/all/{worst['budget']}"]
                assert row["a" if folder == folders[0] else "b"] == pytest.approx(worst[protocol]["accuracy"])
        (clean,) = record["uncertainty"][folder]
        assert clean["nll"] == pytest.approx(measured["summary"]["clean"]["nll"], rel=1e-3)


def test_the_command_of_the_guide_is_the_one_that_made_the_record():
    """The command of docs/explanation/brain-age.md is said to make one run of the table: its settings must agree."""
    text = (DOCS / "explanation" / "brain-age.md").read_text(encoding="utf-8")
    (block,) = (each for each in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if "rtrl-cp-fold1" in each)
    typed = shlex.split(block.replace("\\\n", " "))
    listed = CliRunner().invoke(cli.app, [*typed[1:], "--keys"])
    settings = flatten(tomllib.loads(listed.stdout))
    made = STORE.run("mri", "rtrl-cp-fold1-paper-seed0").read("run.json")["settings"]
    # The folder, the default written out, and when to look and to save: nothing that changes the network.
    free = {"data.root", "data.options.augment", "run.evaluate_every", "run.checkpoint_epochs"}
    assert made["data.options.augment"] is True
    assert {key: settings[key] for key in made if key not in free} == {
        key: value for key, value in made.items() if key not in free
    }


def test_errors_by_training_are_those_of_the_evaluations():
    from write_tables import load_section

    (table,) = (
        each for each in load_section("mri-noise").tables if "Rician" in each.caption and "by train" in each.caption
    )
    assert table.caption.endswith("SNR 4")
    for row in table.rows:
        (name,) = (recipe.name for recipe in load_recipes("mri-noise", "paper") if recipe.row == row[0].text)
        for way, cell in zip(table.columns[1:], row[1:], strict=True):
            pattern = rf"{name}-fold\d-{way}-seed\d"
            runs = [name for name in STORE.list_runs("mri-noise") if re.fullmatch(pattern, name)]
            errors = [
                noise["mae"]
                for run in runs
                for noise in STORE.run("mri-noise", run).read("evaluation.json")["summary"]["noise"]
                if (noise["corruption"], noise["level"]) == ("rician", 4)
            ]  # as many seeds in every fold
            assert cell.text == (f"{np.mean(errors):.1f} ({len(runs)})" if runs else "")


def is_ensemble(recipe):
    return recipe.settings.get("evaluation", {}).get("ensemble", False)


@pytest.mark.parametrize("experiment", NETWORKS)
def test_committed_runs_are_whole_and_of_their_recipes(experiment):
    cells = {
        cell.slug: cell
        for recipe in load_recipes(experiment, "paper")
        for cell in expand(recipe, "paper", seeds=None if is_ensemble(recipe) else range(20))
    }
    for name in STORE.list_runs(experiment):
        cell, run = cells[name], STORE.run(experiment, name)
        assert run.packed
        assert find_cell(cell, RESULTS).state in ("done", "failed"), name
        record = run.read("run.json" if cell.of is None else "evaluation.json")
        assert not record["data"]["simulated"], name
        assert len(record["environment"]["commit"]) == 40, name
        assert not record["environment"]["dirty"], name


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl.xz")), ids=lambda path: path.name.partition(".")[0])
def test_no_record_names_a_folder_of_the_machine_that_ran_it(path):
    text = lzma.decompress(path.read_bytes()).decode()
    for machine in ("/root", "/tmp", "/dev/shm", "/work"):
        assert machine not in text


@pytest.mark.parametrize("experiment", [name for name in STORE.list_experiments() if list_evaluations(name)])
def test_reported_numbers_are_those_of_the_stored_outcomes(experiment):
    for run, folder in list_evaluations(experiment):
        check_evaluation(run, folder)


def check_evaluation(run, folder):
    from keep_records import MOST

    record = run.read(f"{folder}/evaluation.json".removeprefix("/"))
    summary = record["summary"]
    if summary["examples"] > MOST:  # not kept, for their size
        assert not [name for name in run.names() if name.endswith(".npz")]
        return
    outcomes = run.read_outcomes(folder)
    metric = main_metric(summary["task"]).name
    conditions = {"clean": summary["clean"]}
    conditions |= {f"noise/{row['corruption']}/{row['level']:g}/": row for row in summary["noise"]}
    for prefix, row in conditions.items():
        draws = [summarize(outcomes[name]) for name in outcomes.names(prefix)]
        assert len(draws) == row["draws"]
        for key in draws[0].keys() & {key for key, value in row.items() if value is not None} | {metric}:
            assert np.mean([numbers[key] for numbers in draws]) == pytest.approx(row[key], rel=1e-9), (prefix, key)
    if summary["task"] == "regression":
        return

    def is_right(part):
        return outcomes[part]["predicted"] == outcomes[part]["target"]

    attacks = [row for row in summary["attacks"] if not row["cumulative"]]
    assert len(attacks) > 15 or record["settings"]["protocol"] == "none"
    for row in attacks:
        part = f"{row['protocol']}/{row['attack']}/{row['budget']}"
        assert 100 * is_right(part).mean() == pytest.approx(row["accuracy"]), part
    for row in summary["worst_case"]:
        parts = [name for name in outcomes.names("adaptive/") if name.endswith(f"/{row['budget']}")]
        survived = np.all([is_right(part) for part in parts], axis=0).mean()
        assert row["adaptive"]["accuracy"] <= 100 * survived + 1e-9


@pytest.mark.parametrize("experiment", [name for name in list_experiments() if not name.startswith("synthetic")])
def test_a_recipe_says_that_it_was_not_run_only_if_it_was_not(experiment):
    text = (RECIPES / f"{experiment}.toml").read_text("utf-8")
    comments = re.findall(r"((?:^#.*\n)+)\[rows\.\"?([^\]\"]+)\"?\]\n", text, re.MULTILINE)
    recipes = {recipe.name: recipe for recipe in load_recipes(experiment, "paper")}
    kept = set(STORE.list_runs(experiment))
    for comment, name in comments:
        slugs = {cell.slug for cell in expand(recipes[name], "paper")} if name in recipes else set()
        assert ("Ours: not run" in comment) == (not slugs & kept), name
    assert {name for _, name in comments} >= recipes.keys()


README = (RESULTS / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    {command for command in re.findall(r"`([^`\n]+)`", README) if command.startswith(("tensor-dropout ", "python "))}
    | {line.partition("#")[0].strip() for line in README.splitlines() if line.startswith("tensor-dropout ")}
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_is_one(command):
    """Its options are parsed and its experiments looked up; nothing runs."""
    program, *words = shlex.split(command)
    if program == "python":
        assert (ROOT / words[0]).is_file()
        options = {word for word in words if word.startswith("--")}
        source = "".join(path.read_text("utf-8") for path in (ROOT / words[0]).parent.rglob("*.py"))
        assert all(f'"{option}"' in source for option in options)
        return
    name, *words = words
    context = typer.main.get_command(cli.app).commands[name].make_context(name, words)
    if name == "reproduce":
        for experiment in context.params["names"]:
            assert experiment == "NAME" or list_cells_of(experiment), experiment


def list_cells_of(name):
    if name.startswith("synthetic"):
        return [name] if name in list_experiments() else []
    return list_cells(name, "paper")


def test_the_page_lists_every_record_and_no_other():
    table = "".join(line.split("|")[1] for line in README.splitlines() if line.startswith("| `"))
    listed = re.findall(r"`([^`]+)`", table)
    assert [
        name
        for name in listed
        if not (RESULTS / name).exists() and not STORE.run(name).names() and not STORE.list_runs(name)
    ] == []
    there = {path.name.partition(".")[0] for path in RESULTS.glob("*.jsonl.xz")}
    there |= {path.name for path in RESULTS.iterdir() if path.suffix in (".json", ".jsonl")}
    assert there | {f"speed/{path.name}" for path in (RESULTS / "speed").iterdir()} <= set(listed)


def test_no_weights_are_committed():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip("not a git repository")
    weights = [name for name in listed.stdout.decode().split("\0") if name.endswith((".safetensors", ".pt"))]
    assert [name for name in weights if not name.startswith("tests/saved_by_0_1_0/")] == []
    assert all((ROOT / name).stat().st_size < 4096 for name in weights)
