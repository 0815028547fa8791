"""The maintainers' tools that decide what a recipe says."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tensor_dropout.experiments.cells import FORMAT
from tensor_dropout.experiments.recipes import ROOT as RECIPES
from tensor_dropout.experiments.recipes import expand, load_recipes
from tensor_dropout.records import write_json

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from choose_variants import FOLD, choose, write_points


@pytest.fixture
def tuned(tmp_path):
    """Trials of every head; fold k prefers the k-th variant, the test people always the first."""
    for recipe in load_recipes("mri-tuning", "paper"):
        cells = expand(recipe, "paper")
        variants = list(dict.fromkeys(cell.point["variant"] for cell in cells))
        for cell in cells:
            place = variants.index(cell.point["variant"])
            folder = tmp_path / cell.experiment / cell.slug
            write_json(folder / "cell.json", {"format": FORMAT, "version": "0", "identity": cell.identity()})
            error = 9.0 + (place - cell.point[FOLD] % len(variants)) ** 2
            write_json(folder / "result.json", {"validation": {"mae": error}, "test": {"mae": float(place)}})
            write_json(folder / "run.json", {"environment": {}, "data": {"examples": {}}})
    return tmp_path


def test_each_fold_chooses_its_own_variant_by_people_that_were_held_out(tuned):
    variants = ["paper", "strong", "cycle", "fast-cycle", "paper"]  # of folds 0 to 4
    chosen = choose(tuned)
    assert list(chosen) == [recipe.name for recipe in load_recipes("mri", "paper")]
    assert set(map(str, chosen.values())) == {str(dict(enumerate(variants)))}


def test_budgets_that_differ_choose_nothing(tuned):
    shutil.rmtree(next((tuned / "mri-tuning").glob("rtrl-cp-fold3-*")))
    with pytest.raises(SystemExit, match=r"rtrl-cp-fold3-.* is missing; run: tensor-dropout reproduce mri-tuning"):
        choose(tuned)


@pytest.mark.parametrize("head", ["fc", "rtrl-cp", "fc-flatten"])
def test_what_was_chosen_is_what_the_recipe_runs(tmp_path, head):
    root = tmp_path / "recipes"
    shutil.copytree(RECIPES, root)
    path = root / "mri" / f"{head}.toml"
    before = expand(next(each for each in load_recipes("mri", "paper") if each.name == head), "paper")
    once = write_points(path.read_text("utf-8"), dict.fromkeys(range(5), "strong"))
    path.write_text(write_points(once, {0: "paper", 1: "cycle", 2: "cycle", 3: "strong", 4: "paper"}), "utf-8")
    after = expand(next(each for each in load_recipes("mri", "paper", root) if each.name == head), "paper", root=root)
    assert [cell.point["variant"] for cell in after if cell.seed == 0] == ["paper", "cycle", "cycle", "strong", "paper"]
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        assert (old.seed, old.point[FOLD]) == (new.seed, new.point[FOLD])
        changed = {key for key in new.config if new.config[key] != old.config.get(key)}
        assert bool(changed) == (new.point["variant"] != "paper")
        assert not any(key.startswith(("net.", "data.name")) for key in changed)
