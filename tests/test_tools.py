"""The maintainers' tools that decide what a recipe says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.evaluation.outcomes import Outcomes, open_outcomes, read_outcomes
from tensor_dropout_lab.experiments.cells import FORMAT
from tensor_dropout_lab.experiments.recipes import ROOT as RECIPES
from tensor_dropout_lab.experiments.recipes import expand, load_recipes
from tensor_dropout_lab.records import write_json

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
    path = root / experiment / f"{head}.toml"
    once = write_points(path.read_text("utf-8"), [dict.fromkeys(point, "wrong") for point in points])
    path.write_text(write_points(once, points), "utf-8")
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
    keep_decisions(made.path, tmp_path / "kept" / "outcomes.npz.xz")
    assert not (tmp_path / "kept").exists()


def test_packed_outcomes_keep_decisions_and_what_is_clean(tmp_path):
    made = Outcomes(tmp_path / "run" / "outcomes.npz", {"networks": ["abc"]})
    made.set_examples(torch.tensor([0, 1, 1]), ["a", "b", "c"])
    sure = {"predicted": np.array([0, 1, 0], np.int16), "confidence": np.array([0.5, 0.6, 0.7], np.float16)}
    for part in ("clean", "adaptive/pgd-ce/8/255"):
        made.add(part, {"epsilon": 0.1}, sure, 2.0)
    packed = tmp_path / "kept" / "outcomes.npz.xz"
    keep_decisions(made.path, packed)
    kept = read_outcomes(packed.parent)
    assert kept.names() == made.names()
    assert kept.settings("clean") == made.settings("clean")
    assert kept.examples["name"].tolist() == ["a", "b", "c"]
    assert {part: sorted(kept[part]) for part in kept.names()} == {
        "clean": ["confidence", "predicted", "target"],
        "adaptive/pgd-ce/8/255": ["predicted", "target"],
    }
    for key, values in sure.items():
        assert kept["clean"][key].dtype == values.dtype
        assert np.array_equal(kept["clean"][key], values)
    with pytest.raises(TensorDropoutError, match="nothing is added"):
        kept.add("noise", {}, sure, 0.0)
    with pytest.raises(TensorDropoutError, match=r"holds a record that is kept .* choose another folder with --out"):
        open_outcomes(packed.parent, {"networks": ["other"]})
    shutil.copyfile(made.path, packed.parent / "outcomes.npz")
    with pytest.raises(TensorDropoutError, match="holds two evaluations"):
        read_outcomes(packed.parent)
    (packed.parent / "outcomes.npz").unlink()
    assert [path.name for path in packed.parent.iterdir()] == ["outcomes.npz.xz"]
    whole = packed.read_bytes()
    for damaged in (b"", b"no archive", whole[: len(whole) // 2]):
        packed.write_bytes(damaged)
        with pytest.raises(TensorDropoutError, match=r"outcomes\.npz\.xz cannot be read"):
            read_outcomes(packed.parent)
