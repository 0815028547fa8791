"""The maintainers' tools that decide what a recipe says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tensor_dropout.robustness.outcomes import Outcomes
from tensor_dropout_lab.experiments.cells import FORMAT
from tensor_dropout_lab.experiments.recipes import ROOT as RECIPES
from tensor_dropout_lab.experiments.recipes import expand, load_recipes
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.run_records import write_json

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from choose_variants import FOLD, choose, write_points
from keep_records import keep_decisions


def forge_trials(base, search, score):
    """Records of all trials; ``score(cell, place)`` gives those of held-out and of test examples."""
    for recipe in load_recipes(search, "paper"):
        for place, cell in enumerate(expand(recipe, "paper")):
            folder = base / cell.experiment / cell.slug
            write_json(folder / "cell.json", {"format": FORMAT, "version": "0", "identity": cell.identity()})
            held_out, test = score(cell, place)
            write_json(folder / "result.json", {"validation": held_out, "test": test})
            write_json(folder / "run.json", {"environment": {}, "data": {"examples": {}}})


@pytest.fixture
def tuned(tmp_path):
    """Trials of every head; fold k prefers the k-th variant, the test people always the first."""
    variants = ["paper", "strong", "cycle", "fast-cycle"]

    def score(cell, place):
        own = variants.index(cell.point["variant"])
        return {"mae": 9.0 + (own - cell.point[FOLD] % 4) ** 2}, {"mae": float(own)}

    forge_trials(tmp_path, "mri-tuning", score)
    return tmp_path


def test_each_fold_chooses_its_own_variant_by_people_that_were_held_out(tuned):
    chosen = choose("mri-tuning", tuned)
    assert list(chosen) == [recipe.name for recipe in load_recipes("mri", "paper")]
    for points in chosen.values():
        assert [point[FOLD] for point in points] == [0, 1, 2, 3, 4]
        assert [point["variant"] for point in points] == ["paper", "strong", "cycle", "fast-cycle", "paper"]


def test_budgets_that_differ_choose_nothing(tuned):
    shutil.rmtree(next((tuned / "mri-tuning").glob("rtrl-cp-fold3-*")))
    with pytest.raises(SystemExit, match=r"rtrl-cp-fold3-.* is missing; run: tensor-dropout reproduce mri-tuning"):
        choose("mri-tuning", tuned)


def test_the_most_accurate_trial_of_a_search_is_chosen_and_a_failed_one_has_lost(tmp_path):
    forge_trials(
        tmp_path, "beyond-search", lambda cell, place: ({"accuracy": 60.0 + place}, {"accuracy": 90.0 - place})
    )
    last = {recipe.name: expand(recipe, "paper") for recipe in load_recipes("beyond-search", "paper")}
    assert choose("beyond-search", tmp_path) == {name: [cells[-1].point] for name, cells in last.items()}
    folder = tmp_path / "beyond-search" / last["fc"][-1].slug
    for name in ("result.json", "run.json"):
        (folder / name).unlink()
    write_json(folder / "failed.json", {"error": "not finite"})
    assert choose("beyond-search", tmp_path)["fc"] == [last["fc"][-2].point]


FOLDS = [
    {FOLD: fold, "variant": variant} for fold, variant in enumerate(["paper", "cycle", "cycle", "strong", "paper"])
]
CHOSEN = [("mri", "fc", FOLDS), ("mri", "rtrl-cp", FOLDS), ("mri", "fc-flatten", FOLDS)]
CHOSEN += [("beyond-best", "fc-dropout", [{"net.drop_rate": 0.3, "variant": "plain"}])]
CHOSEN += [("beyond-best", "rtrl-tucker", [{"variant": "all-modes"}])]


@pytest.mark.parametrize(("experiment", "head", "points"), CHOSEN, ids=[f"{each[0]}/{each[1]}" for each in CHOSEN])
def test_what_was_chosen_is_what_the_recipe_runs(tmp_path, experiment, head, points):
    root = tmp_path / "recipes"
    shutil.copytree(RECIPES, root)
    path = root / f"{experiment}.toml"
    text = path.read_text("utf-8")
    once = write_points(text, head, [dict.fromkeys(point, "wrong") for point in points])
    path.write_text(write_points(once, head, points), "utf-8")
    comments = [re.findall("^#.*", each, re.MULTILINE) for each in (text, path.read_text("utf-8"))]
    assert comments[0] == comments[1]
    for recipe in load_recipes(experiment, "paper"):  # of other rows nothing changes
        if recipe.name != head:
            (other,) = (each for each in load_recipes(experiment, "paper", root) if each.name == recipe.name)
            assert other == recipe
    before, after = (
        expand(next(each for each in load_recipes(experiment, "paper", base) if each.name == head), "paper", root=base)
        for base in (RECIPES, root)
    )
    assert len(after) == len(before)
    assert [cell.point for cell in after if cell.seed == 0] == points
    found = next(cell for cell in after if cell.seed == 1 and cell.point == points[-1]).config
    if experiment == "mri":
        assert found["optimizer.lr"] == 1e-4  # of the paper
    elif head == "fc-dropout":
        assert found["net.drop_rate"] == 0.3
        assert "run.label_smoothing" not in found
    else:
        assert (found["net.modes"], found["net.theta"], found["run.label_smoothing"]) == ("all", 0.9, 0.1)


def test_outcomes_of_very_many_examples_are_not_kept(tmp_path):
    made = Outcomes(tmp_path / "run" / "outcomes.npz", {"networks": ["abc"]})
    made.set_examples(torch.zeros(2001, dtype=torch.long), [str(k) for k in range(2001)])
    made.add("clean", {}, {"predicted": np.zeros(2001, np.int16)}, 2.0)
    assert keep_decisions(made) is None


COMMIT = "0123456789" * 4


def make_run(folder, commit=None):
    """The records of a finished run, with an evaluation."""
    environment = {"torch": "2.13.0", "command": "tensor-dropout reproduce trial --root /data/of/a/machine"}
    environment |= {} if commit is None else {"commit": commit, "dirty": True}
    write_json(folder / "cell.json", {"format": FORMAT, "version": "0", "identity": {}})
    write_json(folder / "run.json", {"settings": {"data.root": "/data/of/a/machine"}, "environment": environment})
    write_json(folder / "result.json", {"task": "regression", "test": {"mae": 0.1 + 0.2}})
    lines = [{"epoch": epoch, "loss": 1 / epoch} for epoch in range(1, 21)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    (folder / "predictions.csv").write_text("name,target\nä,1.50\n", "utf-8")
    (folder / "model.safetensors").write_bytes(b"weights")
    made = Outcomes(folder / "evaluation" / "outcomes.npz", {"networks": ["abc"]})
    made.set_examples(torch.tensor([0, 1, 1]), ["a", "b", "c"])
    sure = {"predicted": np.array([0, 1, 0], np.int16), "confidence": np.array([0.5, 0.6, 0.7], np.float16)}
    for part in ("clean", "adaptive/pgd-ce/8/255"):
        made.add(part, {"epsilon": 0.1}, sure, 2.0)


def keep(source, target, *options):
    tool = Path(__file__).parents[1] / "tools" / "keep_records.py"
    command = [sys.executable, str(tool), str(source), str(target), "--commit", COMMIT, *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_finished_runs_are_packed_with_what_a_repository_keeps(tmp_path):
    make_run(tmp_path / "live" / "trial" / "fc-seed0")
    write_json(tmp_path / "live" / "trial" / "cut-off-seed0" / "cell.json", {"format": FORMAT})
    made = keep(tmp_path / "live", tmp_path / "kept", "--word", "/data/of/a/machine=FOLDER")
    assert made.stdout == "trial: fc-seed0\n", made.stderr
    store = RecordStore(tmp_path / "kept")
    assert store.list_runs("trial") == ["fc-seed0"]
    run = store.run("trial", "fc-seed0")
    record = run.read("run.json")
    assert record["settings"] == {"data.root": "FOLDER"}
    assert record["environment"]["command"] == "tensor-dropout reproduce trial --root FOLDER"
    assert (record["environment"]["commit"], record["environment"]["dirty"]) == (COMMIT, False)
    assert run.read("result.json")["test"]["mae"] == 0.1 + 0.2
    assert [line["epoch"] for line in run.read_metrics()] == [10, 20]
    assert run.read_predictions() == [{"name": "ä", "target": "1.50"}]
    assert "model.safetensors" not in run.names()
    outcomes = run.read_outcomes("evaluation")
    assert {part: sorted(outcomes[part]) for part in outcomes.names()} == {
        "clean": ["confidence", "predicted", "target"],
        "adaptive/pgd-ce/8/255": ["predicted", "target"],
    }
    shutil.rmtree(tmp_path / "live" / "trial")
    make_run(tmp_path / "live" / "trial" / "trl-seed0")
    assert keep(tmp_path / "live", tmp_path / "kept").returncode == 0
    assert store.list_runs("trial") == ["fc-seed0", "trl-seed0"]  # what was packed stays
    assert store.run("trial", "fc-seed0").read("run.json") == record


def test_a_commit_that_does_not_agree_is_refused_unless_it_is_the_clones(tmp_path):
    other = "9876543210" * 4
    make_run(tmp_path / "live" / "trial" / "fc-seed0", commit=other)
    refused = keep(tmp_path / "live", tmp_path / "kept")
    assert refused.returncode == 1
    assert f"was made by {other}, not by {COMMIT}" in refused.stderr
    assert not list(tmp_path.glob("kept/*"))
    assert keep(tmp_path / "live", tmp_path / "kept", "--clone", other).returncode == 0
    environment = RecordStore(tmp_path / "kept").run("trial", "fc-seed0").read("run.json")["environment"]
    assert (environment["commit"], environment["clone"], environment["clone_dirty"]) == (COMMIT, other, True)
