"""Recipes: every one validates, says what the paper says, and takes a step."""

from __future__ import annotations

import inspect
import math
import re
import tomllib
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

import tensor_dropout as td
import tensor_dropout_lab
from tensor_dropout_lab.data.base import Data, StandardizeImages, TensorSplit
from tensor_dropout_lab.evaluation.runs import RunSettings
from tensor_dropout_lab.experiments import EXPERIMENTS, describe, load_experiment, synthetic
from tensor_dropout_lab.experiments.cells import RunContext, complete, evaluate_cell, find_cell, run_cell
from tensor_dropout_lab.experiments.recipes import (
    ROOT,
    describe_experiment,
    expand,
    flatten,
    list_experiments,
    load_recipes,
)
from tensor_dropout_lab.experiments.synthetic.setting import Setting
from tensor_dropout_lab.experiments.synthetic.training import train_stage
from tensor_dropout_lab.nets import build_net
from tensor_dropout_lab.nets.heads import build_head
from tensor_dropout_lab.nets.resnet import DESIGNS, ResNet
from tensor_dropout_lab.training.config import resolve_config
from tensor_dropout_lab.training.schedule import rate_at
from tensor_dropout_lab.training.show import Reporter
from training_runs import ALONE, RunFolder, Trainer

PRESETS = ("quick", "paper")
ROWS = [f"{name}/{row}" for name in list_experiments() for row in describe_experiment(name)["rows"]]
every_recipe = pytest.mark.parametrize(("name", "preset"), list(product(ROWS, PRESETS)))

# The paper's tables, from tensor_dropout.tex: the rows in its order.

IMAGENET = {
    "ResNet": {"accuracy": 77.1, "top5": 93.4},
    "TRL, θ = 1": {"accuracy": 77.1, "top5": 93.5},
    "R-TRL, θ = 0.9": {"accuracy": 77.7, "top5": 93.7},
    "R-TRL, θ = 0.8": {"accuracy": 77.7, "top5": 93.7},
    "R-TRL, θ = 0.7": {"accuracy": 77.4, "top5": 93.6},
    "R-TRL, θ = 0.6": {"accuracy": 78.0, "top5": 93.8},
}
ATTACKED = ("Baseline", "R-TRL, θ = 0.8", "R-TRL, θ = 0.7", "R-TRL, θ = 0.6")
ATTACKS = {  # attack, λ/255: the four columns
    ("fgsm", "2/255"): (26.1, 26.0, 35.3, 47.4),
    ("fgsm", "8/255"): (11.1, 15.4, 26.0, 41.6),
    ("fgsm", "16/255"): (8.5, 14.1, 24.0, 39.5),
    ("bim", "2/255"): (26.1, 26.0, 35.3, 47.3),
    ("bim", "8/255"): (1.0, 4.0, 9.9, 26.1),
    ("bim", "16/255"): (0.1, 1.0, 2.8, 13.2),
    ("pgd", "2/255"): (26.0, 26.0, 35.6, 47.1),
    ("pgd", "8/255"): (0.8, 4.5, 11.3, 27.9),
    ("pgd", "16/255"): (0.0, 1.4, 3.8, 13.5),
}
MRI = {"FC": {"mae": 2.96}, "Tucker": {"mae": 2.70}, "Randomized Tucker": {"mae": 2.65}, "Randomized CP": {"mae": 2.58}}
CIFAR = {
    "FC": {"accuracy": 75.88},
    "FC + dropout": {"accuracy": 75.84},
    "Tucker": {"accuracy": 76.02},
    "CP": {"accuracy": 75.77},
    "Randomized Tucker": {"accuracy": 76.05},
    "Randomized CP": {"accuracy": 76.19},
}
TABLES = {"imagenet": IMAGENET, "mri": MRI | {"FC + dropout": {}, "FC, flattened": {}}, "cifar100": CIFAR}
LAPTOP = ["FC", "FC + dropout", "FC, flattened", "Randomized CP", "Randomized Tucker"]
SIX = ["FC", "FC + dropout", "FC, flattened", "CP", "Randomized CP", "Randomized Tucker"]
FIGURES = {
    "synthetic-cp": ["white inputs, SGD", "correlated inputs, SGD", "white inputs, Adam"],
    "synthetic-tucker": ["white inputs, SGD", "correlated inputs, SGD", "white inputs, Adam"],
    "imagenet-attacks": list(ATTACKED),
    "mri-noise": [*MRI, "FC, flattened"],
    "mri-uncertainty": [
        "FC, one variance for everybody",
        "FC + dropout, 32 draws",
        "FC, ensemble of all seeds",
        "Randomized CP, 32 draws",
        "Randomized CP, exact, one pass",
        "Randomized Tucker, exact, one pass",
    ],
    "mri-tuning": [*MRI, "FC + dropout", "FC, flattened"],
    "mri-small": ["FC", "FC + dropout", "FC, flattened", "Tucker", "CP", "Randomized Tucker", "Randomized CP"],
    "cifar100-surface": [
        "Bernoulli R-TRL",
        "R-TRL with replacement",
        "Bernoulli R-TRL, channel and output modes",
        "R-TRL with replacement, channel and output modes",
    ],
    "cifar100-attacks": ["Tucker R-TRL", "CP R-TRL", "Tucker TRL with dropout on the weight"],
    "cifar100-tuning": ["Randomized CP", "FC + dropout"],
    "beyond-search": ["FC", "FC + dropout", "Randomized CP", "Randomized Tucker"],
    "beyond-best": ["FC", "FC + dropout", "Randomized CP", "Randomized Tucker"],
    "beyond-laptop-search": LAPTOP,
    "beyond-laptop": LAPTOP,
    "beyond-laptop-settings": ["Randomized CP", "Randomized Tucker"],
    "beyond-defaults": ["Randomized CP", "Randomized Tucker"],
    "beyond-small": SIX,
    "beyond-labels": SIX,
    "beyond-unknown": [
        "FC",
        "FC + dropout, 32 draws",
        "Randomized CP, exact",
        "Randomized Tucker, exact",
    ],
    "beyond-sizes": [
        "FC, cut afterwards",
        "FC as a product of two matrices",
        "CP",
        "Randomized CP, cut afterwards",
        "Nested CP, cut afterwards",
    ],
    "beyond-attacks": [
        "FC",
        "FC + dropout",
        "Randomized CP",
        "Randomized CP, masks at test time",
        "Randomized CP, exact expected loss",
        "Randomized Tucker",
    ],
    "digits": ["FC", "FC, flattened", "Tucker", "Randomized Tucker"],
}
WHERE = {
    "synthetic-cp": "Figure 2",
    "synthetic-tucker": "Figure 3",
    "imagenet": "Table 1",
    "imagenet-attacks": "Table 2",
    "mri": "Table 3",
    "mri-noise": "Figure 5",
    "mri-uncertainty": "Table 3",
    "mri-tuning": "Table 3",
    "mri-small": "Table 3",
    "cifar100": "Table 4",
    "cifar100-surface": "Figure 7",
    "cifar100-attacks": "Figure 6",
    "cifar100-tuning": "Table 4",
    **dict.fromkeys((name for name in FIGURES if name.startswith("beyond")), "Beyond the paper"),
    "digits": "Not in the paper",
}
"""Counted in tensor_dropout.tex: Figure 1 is the diagram, Figure 4 the curve of imagenet-attacks."""


def find(name, preset):
    """The recipe of this name, or None if it is not one of the preset."""
    experiment, _, own = name.partition("/")
    return next((recipe for recipe in load_recipes(experiment, preset) if recipe.name == own), None)


def read(name):
    experiment, _, row = name.partition("/")
    return tomllib.loads((ROOT / f"{experiment}.toml").read_text(encoding="utf-8"))["rows"][row]


def header(name):
    """The comment above the row."""
    experiment, _, row = name.partition("/")
    text = (ROOT / f"{experiment}.toml").read_text(encoding="utf-8")
    key = f'"{row}"' if "." in row else row
    return re.search(rf"((?:^#.*\n)+)\[rows\.{re.escape(key)}\]\n", text, re.MULTILINE)[1]


def only_of_the_other_preset(name, preset):
    """Whether the recipe says itself that it is not for this preset."""
    return preset not in read(name).get("presets", PRESETS)


# What there is.


def test_every_table_and_figure_has_its_recipes_in_the_papers_order():
    assert list_experiments() == list(WHERE)
    assert {path.name for path in ROOT.iterdir()} == {f"{name}.toml" for name in WHERE}
    for experiment in WHERE:
        rows = [recipe.row for recipe in load_recipes(experiment, "paper")]
        assert rows == list(TABLES.get(experiment, FIGURES.get(experiment)))


@pytest.mark.parametrize("experiment", WHERE)
def test_an_experiment_says_where_it_is_in_the_paper_and_what_its_miniature_is(experiment):
    about = describe_experiment(experiment)
    assert about["reference"].startswith(WHERE[experiment] + ":")
    assert describe(experiment) == about["reference"]
    assert set(EXPERIMENTS[experiment].presets) == set(PRESETS)
    assert callable(load_experiment(experiment).run)
    for recipe in load_recipes(experiment, "quick"):
        assert recipe.settings["label"].startswith("miniature: ")
        simulated = experiment.startswith(("synthetic", "mri"))
        assert ("SIMULATED" in recipe.settings["label"]) == simulated


@pytest.mark.parametrize("experiment", TABLES)
@pytest.mark.parametrize("preset", PRESETS)
def test_printed_numbers_are_those_of_the_papers_table(experiment, preset):
    found = {recipe.row: recipe.printed for recipe in load_recipes(experiment, preset)}
    full_size = [recipe.row for recipe in load_recipes(experiment, "paper") if recipe.row not in found]
    assert found | {row: {} for row in full_size} == TABLES[experiment]  # without a miniature: not in the paper
    assert describe_experiment(experiment)["metrics"] == list(next(iter(TABLES[experiment].values())))


@pytest.mark.parametrize("preset", PRESETS)
def test_printed_attacks_are_those_of_the_papers_table(preset):
    for column, recipe in enumerate(load_recipes("imagenet-attacks", preset)):
        assert recipe.row == ATTACKED[column]
        found = {(attack, radius): v for attack, row in recipe.printed.items() for radius, v in row.items()}
        assert found == {key: numbers[column] for key, numbers in ATTACKS.items()}


def test_figures_have_no_printed_numbers():
    for experiment in FIGURES:
        if experiment != "imagenet-attacks":
            assert [recipe.printed for recipe in load_recipes(experiment, "paper")] == [{}] * len(FIGURES[experiment])


def test_the_search_is_equally_long_for_every_head_and_looks_at_held_out_images():
    for search, trials, held_out, epochs in (("beyond-search", 8, 5000, 20), ("beyond-laptop-search", 6, 1000, 40)):
        for recipe in load_recipes(search, "paper"):
            cells = expand(recipe, "paper")
            assert {cell.config["data.options.validation"] for cell in cells} == {held_out}
            assert {cell.config["run.epochs"] for cell in cells} == {epochs}
            assert len({repr(cell.config) for cell in cells}) == trials == len(cells)  # none is another one again


def test_each_seed_draws_its_own_data_where_a_recipe_says_so():
    for experiment, seeds in (("beyond-laptop", 3), ("beyond-laptop-settings", 3), ("beyond-labels", 2)):
        for recipe in load_recipes(experiment, "paper"):
            cells = expand(recipe, "paper")
            assert all(cell.config["data.seed"] == cell.seed for cell in cells)
            assert {cell.seed for cell in cells} == set(range(seeds))
    assert all(
        "data.seed" not in cell.config
        for recipe in load_recipes("cifar100", "paper")
        for cell in expand(recipe, "paper")
    )


def list_tuned():
    return load_recipes("mri-tuning", "paper")


def test_the_full_size_is_the_papers():
    """Section 5 of the paper, where it says anything."""
    steps = {"schedule.name": "step", "schedule.factor": 0.1}
    mri = {"optimizer.name": "adam", "optimizer.lr": 1e-4, "optimizer.weight_decay": 5e-4, "run.epochs": 100}
    cifar = {"optimizer.name": "sgd", "optimizer.momentum": 0.9, "optimizer.lr": 0.01, "run.epochs": 400}
    said = {
        "imagenet": {"net.name": "resnet101", "data.name": "imagefolder"},
        "mri": {**mri, **steps, "schedule.milestones": [25, 50, 75], "run.batch": 8, "net.name": "resnet18"},
        "cifar100": {
            **cifar,
            **steps,
            "schedule.milestones": [150, 250, 350],
            "run.batch": 128,
            "optimizer.weight_decay": 1e-4,
            "net.name": "resnet18",
            "data.name": "cifar100",
            "data.options.validation": 0,  # all 50,000 to train on
        },
    }
    shorter = {"run.epochs": 40, "schedule.milestones": [15, 25, 35]}  # tenfold, as the recipes' label says
    said["cifar100-attacks"] = said["cifar100"] | shorter
    chosen = {"run.epochs": 16, "schedule.milestones": [6, 10, 14], "data.options.validation": 5000}
    said["cifar100-surface"] = said["cifar100-tuning"] = said["cifar100"] | chosen
    for experiment, settings in said.items():
        for recipe in load_recipes(experiment, "paper"):
            for cell in expand(recipe, "paper"):
                kept = settings
                if cell.point.get("variant", "paper") != "paper":  # chosen in a search: another optimizer and schedule
                    kept = {key: value for key, value in settings.items() if key.startswith(("run.", "net.", "data."))}
                assert {key: cell.config[key] for key in kept} == kept
    for experiment in ("imagenet-attacks", "cifar100-attacks", "cifar100"):
        assert {recipe.settings["evaluation"]["images"] for recipe in load_recipes(experiment, "paper")} == {1000}
    for recipe in load_recipes("mri-noise", "paper"):
        assert recipe.settings["evaluation"] == {"protocol": "none", "noise": ["gaussian", "rician"], "repeats": 5}
    seeds = {recipe.name: len(expand(recipe, "paper")) for recipe in load_recipes("cifar100", "paper")}
    assert seeds == {"fc": 3, "fc-dropout": 1, "trl-tucker": 1, "trl-cp": 1, "rtrl-tucker": 3, "rtrl-cp": 3}
    for recipe in load_recipes("mri", "paper"):  # every fold with at least two seeds, trained on all who are not tested
        cells = expand(recipe, "paper")
        assert len(cells) == 5 * (5 if recipe.name == "fc" else 2)
        assert {cell.config["data.options.fold"] for cell in cells} == set(range(5))
        assert {cell.config["data.options.validation"] for cell in cells} == {0}
    trials = [sorted(cell.slug.partition("fold")[2] for cell in expand(recipe, "paper")) for recipe in list_tuned()]
    assert all(own == trials[0] for own in trials)  # the same trials for every head
    assert len(trials[0]) == 20
    for name in ("synthetic-cp", "synthetic-tucker"):
        white = Setting(format=name[10:], **synthetic.read_stages(name, "paper")["white"])
        assert (white.size, white.true_rank, white.rank) == (25, 10, 15)
        assert (white.n_train, white.n_test, white.batch, white.epochs) == (5000, 1000, 100, 500)
        assert (white.thetas, white.decay_every) == ((1.0, 0.9, 0.8, 0.7, 0.6), 200)


# Headers and what is shared.


@pytest.mark.parametrize("name", ROWS)
def test_a_header_names_table_number_ours_command_seeds_hardware_and_time(name):
    text, experiment = header(name), name.partition("/")[0]
    root = "" if experiment == "digits" else " --root FOLDER"
    command = f"tensor-dropout reproduce {name} --preset paper{root}"
    if experiment.startswith("synthetic"):
        command = f"tensor-dropout reproduce {experiment} --preset paper"  # one training for all stages' θ
    assert f"# Command: {command}" in text.splitlines()
    assert text.startswith(f"# {WHERE[experiment]}")
    for word in ("Paper:", "Ours", "Seeds", "ardware", "Time:"):
        assert word in text
    recipe = find(name, "paper")
    if not experiment.startswith("synthetic"):
        assert f'"{recipe.row}"' in text
    if experiment in TABLES:
        for number in recipe.printed.values():
            assert re.search(rf"Paper:.*\b{number}", text)
    seeds = re.search(r"Seeds: ([\d, ]+)\.", text)
    if seeds and not experiment.startswith("synthetic"):
        assert seeds[1] == ", ".join(str(seed) for seed in sorted({cell.seed for cell in expand(recipe, "paper")}))


@pytest.mark.parametrize("experiment", WHERE)
def test_what_all_rows_share_is_said_once(experiment):
    own = [name for name in ROWS if name.startswith(f"{experiment}/")]
    for layer in ("both", *PRESETS):
        of_layer = [name for name in own if layer == "both" or not only_of_the_other_preset(name, layer)]
        said = [flatten(read(name).get(layer, {})) for name in of_layer]
        shared = [key for key in said[0] if all(key in other and other[key] == said[0][key] for other in said)]
        assert shared == [], f"{experiment}: every recipe says {shared} in [{layer}]"


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_says_nothing_twice(name):
    """Neither in both presets, nor again what all rows share."""
    said = {layer: flatten(read(name).get(layer, {})) for layer in ("both", *PRESETS)}
    twice = [key for key, value in said["paper"].items() if said["quick"].get(key, ...) == value]
    assert twice == [], f"{name}: {twice} belong into [both]"
    shared = describe_experiment(name.partition("/")[0])
    for layer, keys in said.items():
        defaults = flatten(shared.get(layer, {}))
        assert [key for key in keys if key in defaults and defaults[key] == keys[key]] == []


# Validation.


def find_settings(cell, monkeypatch):
    """The settings that an evaluation of this cell would be run with."""
    asked = {}

    def note(run, settings, *, out, images, root, device, **prediction):
        asked.update(settings=settings, images=images, root=root)

    monkeypatch.setattr("tensor_dropout_lab.evaluation.runs.evaluate_run", note)
    evaluate_cell(cell, Path("run"), Path("out"), RunContext(Path("base"), {"cifar100": "/data"}))
    return asked


@every_recipe
def test_every_recipe_validates(name, preset, monkeypatch):
    recipe = find(name, preset)
    experiment = name.partition("/")[0]
    if recipe is None:
        assert only_of_the_other_preset(name, preset)
        return
    if experiment.startswith("synthetic"):
        setting = Setting(format=experiment[10:], **synthetic.read_stages(experiment, preset)[recipe.name])
        assert (setting.inputs, setting.optimizer) == (recipe.settings["inputs"], recipe.settings["optimizer"])
        assert synthetic.PRESETS[preset] == synthetic.read_stages(experiment, preset)
        return
    cells = expand(recipe, preset)
    grid = recipe.settings.get("grid", {})
    if "of" not in recipe.settings:
        points = len(recipe.settings["points"]) if "points" in recipe.settings else math.prod(map(len, grid.values()))
        assert len(cells) == recipe.settings["seeds"] * points
    assert len({cell.slug for cell in cells}) == len(cells)
    known = {"label", "seeds", "resample", "grid", "points", "variants", "evaluation", "of"}
    assert set(recipe.settings) <= known | {"data", "net", "optimizer", "schedule", "run"}
    for cell in cells:
        config = resolve_config(overrides=complete(cell.of or cell, RunContext(Path("base"), {})))
        assert config.run.seed == (cell.of or cell).seed == cell.seed
        trained = (cell.of or cell).config
        for key, value in cell.point.items():
            if key != "variant":
                assert trained[key] == value
                table, _, field = key.partition(".")
                found = getattr(config, table)
                name = field.removeprefix("options.")
                assert (found.options[name] if field.startswith("options.") else getattr(found, field)) == value
        if cell.of is not None:
            assert cell.evaluation is not None
            assert f"{cell.of.experiment}/{cell.of.recipe}" == recipe.settings["of"]
        if cell.evaluation is not None:
            asked = find_settings(cell, monkeypatch)
            assert isinstance(asked["settings"], RunSettings)
            assert asked["images"] == cell.evaluation.get("images")
            assert asked["settings"].noise == (tuple(cell.evaluation["noise"]) or ("none",))
            trained_on = (cell.of or cell).config["data.name"]
            assert asked["root"] == (Path("/data") if trained_on == "cifar100" else None)


def test_both_formats_of_the_synthetic_experiment_have_the_same_stages():
    for preset in PRESETS:
        assert synthetic.read_stages("synthetic-cp", preset) == synthetic.read_stages("synthetic-tucker", preset)


def test_seeds_begin_where_they_are_told_to():
    cells = expand(find("cifar100/fc", "quick"), "quick", first_seed=5)
    assert [cell.slug for cell in cells] == ["fc-seed5", "fc-seed6"]
    assert [cell.config["run.seed"] for cell in cells] == [5, 6]
    evaluated = expand(find("imagenet-attacks/fc", "quick"), "quick", first_seed=5)
    assert [cell.of.slug for cell in evaluated] == [cell.slug for cell in evaluated] == ["fc-seed5"]


def test_a_variant_is_settings_that_change_together(tmp_path):
    defaults = """
        [quick]
        run.epochs = 3
        grid."data.options.fold" = [0, 1]
        grid.variant = ["slow", "fast"]
        [quick.variants.slow]
        optimizer = { name = "sgd", lr = 0.1 }
        [quick.variants.fast]
        optimizer = { name = "adam", lr = 1.0 }
        schedule.name = "cosine"
    """
    chosen = """
        row = "B"
        [quick]
        points = [{ data.options.fold = 0, variant = "fast" }, { data.options.fold = 1, variant = "slow" }]
    """
    root = write_recipes(tmp_path, defaults, a='row = "A"', b=chosen)
    everything, own = (expand(recipe, "quick", root=root) for recipe in load_recipes("trial", "quick", root))
    assert [cell.slug for cell in everything] == [
        "a-fold0-slow-seed0",
        "a-fold0-fast-seed0",
        "a-fold1-slow-seed0",
        "a-fold1-fast-seed0",
    ]
    assert [cell.slug for cell in own] == ["b-fold0-fast-seed0", "b-fold1-slow-seed0"]
    assert own[0].config == everything[1].config | {"data.options.fold": 0}
    assert own[0].config["optimizer.name"] == "adam"
    assert own[0].config["schedule.name"] == "cosine"
    assert "schedule.name" not in own[1].config
    assert "variant" not in own[0].config
    wrong = write_recipes(tmp_path / "wrong", defaults, a='row = "A"', b=chosen.replace('"fast"', '"fats"'))
    with pytest.raises(td.TensorDropoutError, match=r"trial/b has no variant 'fats'; did you mean fast"):
        expand(load_recipes("trial", "quick", wrong)[1], "quick", root=wrong)


def test_an_ensemble_is_one_cell_of_all_seeds_for_each_point():
    cells = expand(find("mri-uncertainty/fc-ensemble", "paper"), "paper")
    assert [cell.point["data.options.fold"] for cell in cells] == [0, 1, 2, 3, 4]
    for cell in cells:
        assert [cell.of.seed, *(other.seed for other in cell.others)] == [0, 1, 2, 3, 4]
        assert {str(other.point) for other in cell.others} == {str(cell.point)}
        assert "ensemble" not in cell.evaluation
    single = expand(find("mri-uncertainty/cp-exact", "paper"), "paper")
    assert len(single) == 10
    assert not any(cell.others for cell in single)
    assert cells[0].identity() != replace(cells[0], others=cells[0].others[:1]).identity()


# What a recipe may not be.


def write_recipes(root, shared, **rows):
    """An experiment "trial" with these rows."""
    root.mkdir(parents=True, exist_ok=True)
    for name, text in rows.items():
        shared += f"\n[rows.{name}]\n" + re.sub(r"^( *)\[(\w+)", rf"\1[rows.{name}.\2", text, flags=re.MULTILINE)
    (root / "trial.toml").write_text(shared, encoding="utf-8")
    return root


def test_later_layers_win_key_by_key(tmp_path):
    defaults = """
        [both]
        run = { epochs = 1, batch = 1, seed = 1, workers = 1 }
        [quick]
        run = { epochs = 2, batch = 2, seed = 2 }
    """
    recipe = """
        row = "A"
        [both]
        run = { epochs = 3, batch = 3 }
        [quick]
        run.epochs = 4
    """
    root = write_recipes(tmp_path / "recipes", defaults, a=recipe)
    quick, paper = (load_recipes("trial", preset, root)[0].settings["run"] for preset in PRESETS)
    assert quick == {"epochs": 4, "batch": 3, "seed": 2, "workers": 1}
    assert paper == {"epochs": 3, "batch": 3, "seed": 1, "workers": 1}


@pytest.mark.parametrize(
    ("recipes", "message"),
    [
        ({"a": 'row = "A"\nprintd = 3'}, r"trial.toml, rows.a has the key 'printd'; it may have .*printed"),
        ({"a": "printed = { mae = 3 }"}, r"trial.toml, rows.a has no row"),
        ({"a": "row = "}, r"trial.toml is not TOML"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path, recipes, message):
    root = write_recipes(tmp_path / "recipes", "", **recipes)
    with pytest.raises(td.TensorDropoutError, match=message):
        load_recipes("trial", "quick", root)


def test_an_evaluation_of_a_recipe_that_does_not_exist(tmp_path):
    root = write_recipes(tmp_path / "recipes", "", a='row = "A"\n[both]\nof = "trial/b"')
    with pytest.raises(td.TensorDropoutError, match="trial/a is of 'trial/b', which is none"):
        expand(load_recipes("trial", "quick", root)[0], "quick", root=root)


def test_an_unknown_experiment_offers_the_nearest():
    with pytest.raises(td.TensorDropoutError, match=r"no experiment 'cifar10'; did you mean .*cifar100"):
        load_recipes("cifar10", "quick")
    with pytest.raises(td.TensorDropoutError, match="known are synthetic-cp"):
        load_recipes("zzz", "quick")


def test_recipes_are_in_the_package():
    """They are data of the package, beside its modules."""
    assert Path(tensor_dropout_lab.__file__).parent / "recipes" == ROOT


# One step at full size.

SHAPES = {"cifar100": (3, 32, 32), "imagefolder": (3, 224, 224), "nifti": (1, 80, 100, 100)}  # IXI's, cut to the brain
SMALLEST = {"cifar100": (3, 32, 32), "imagefolder": (3, 193, 193), "nifti": (1, 65, 97, 97)}  # of equal features
FEATURES = {"cifar100": (512, 4, 4), "imagefolder": (2048, 7, 7), "nifti": (512, 3, 4, 4)}
OUTPUTS = {"cifar100": 100, "imagefolder": 1000, "nifti": 1}
WHOLE = ("imagenet/theta-0.6", "mri/rtrl-tucker", "cifar100/rtrl-cp")
"""One for each backbone: with the other heads it is the same."""
TRAINED = [
    name
    for name in ROWS
    if name.partition("/")[0] in (*TABLES, "cifar100-surface", "cifar100-attacks", "cifar100-tuning")
]


def make_data(name, shape):
    """Four examples of noise."""
    numbers = name == "nifti"
    split = TensorSplit(
        torch.randint(0, 256, (4, *shape), dtype=torch.uint8),
        torch.tensor([20.0, 40.0, 50.0, 70.0]) if numbers else torch.tensor([0, 5, 50, 99]),
        list("abcd"),
    )
    task = "regression" if numbers else "classification"
    named = {"classes": None, "target": "age"} if numbers else {"classes": [str(k) for k in range(100)], "target": None}
    return Data(
        name,
        task,
        split,
        None,
        split,
        shape,
        OUTPUTS[name],
        **named,
        prepare=StandardizeImages(),
        augment=None,
        simulated=True,
        provenance="noise",
    )


def take_step(cell, network, data, folder):
    """One update as the recipe's config has it, in a batch of two; which parameters it changed."""
    config = resolve_config(overrides={**cell.config, "run.device": "cpu", "run.batch": 2})
    trainer = Trainer(config, data, network, RunFolder(folder), ALONE, Reporter(config, data, False))
    before = {key: value.clone() for key, value in network.named_parameters()}
    trainer.step.set_rate(rate_at(config.schedule, 1, trainer.steps, trainer.sampler.steps_per_epoch))
    trainer.step(*next(trainer.feed.starts(0, 0)))
    assert trainer.step.sums.isfinite().all()
    assert float(trainer.step.sums[0]) > 0
    assert all(value.isfinite().all() for value in network.state_dict().values())
    assert {"sgd": "SGD", "adam": "Adam", "adamw": "AdamW"}[config.optimizer.name] == type(trainer.optimizer).__name__
    return [key for key, value in network.named_parameters() if not torch.equal(value, before[key])]


@pytest.mark.parametrize("name", WHOLE)
def test_one_step_of_the_whole_network_at_full_size(name, tmp_path):
    cell = expand(find(name, "paper"), "paper")[0]
    config = resolve_config(overrides=cell.config)
    data = make_data(config.data.name, SMALLEST[config.data.name])
    settings = config.net.settings()
    design = settings.pop("name")
    network = build_net(design, outputs=data.outputs, input_shape=data.input_shape, **settings)
    with torch.device("meta"):
        assert ResNet(DESIGNS[design], SHAPES[data.name]).feature_shape == FEATURES[data.name] == network.feature_shape
    changed = take_step(cell, network, data, tmp_path)
    assert "conv1.weight" in changed
    assert any(key.startswith("fc.") for key in changed)


@pytest.mark.parametrize("name", TRAINED)
def test_one_step_of_the_head_at_every_point(name, tmp_path):
    ratios = {}
    for cell in expand_differing(name):
        config = resolve_config(overrides=cell.config)
        settings = {key: value for key, value in config.net.settings().items() if key in HEAD_SETTINGS}
        data = make_data(config.data.name, FEATURES[config.data.name])
        head = build_head(config.net.head, data.input_shape, data.outputs, **settings)
        if "net.theta" in cell.config:
            theta = head.theta if name.endswith("weight-dropout") else head.dropout.theta
            assert float(theta) == pytest.approx(cell.config["net.theta"])
        assert take_step(cell, nn.Sequential(head), data, tmp_path)
        if "net.rank" in cell.point:
            ratios.setdefault(str(cell.point["net.rank"]), set()).add(head.compression_ratio)
    if "surface" in name:  # the ranks spread the logarithmic axis, and θ does not move along it
        values = [ratio for (ratio,) in ratios.values()]
        assert values == sorted(values)
        assert values[-1] / values[0] > 10


HEAD_SETTINGS = {key for key in inspect.signature(build_head).parameters if key != "name"}


def expand_differing(name):
    """The cells of a recipe at full size whose networks or updates differ: not those of other seeds and folds."""
    cells = expand(find(name, "paper"), "paper")
    ways = {
        repr([(key, value) for key, value in cell.config.items() if not key.startswith(("data.", "run."))]): cell
        for cell in reversed(cells)
    }
    return reversed(ways.values())


@pytest.mark.parametrize("name", [name for name in ROWS if name.startswith("synthetic")])
@pytest.mark.parametrize("preset", PRESETS)
def test_one_step_of_the_synthetic_stages(name, preset, tmp_path):
    if only_of_the_other_preset(name, preset):
        return
    experiment, _, stage = name.partition("/")
    setting = Setting(format=experiment[10:], **synthetic.read_stages(experiment, preset)[stage])
    small = replace(setting, n_train=setting.batch, n_test=10, epochs=1, tune_epochs=1)
    if preset == "paper":
        small = replace(small, rates=setting.rates[:1], batch=4, n_train=4)  # Tucker of 25³ takes its time
    record = train_stage(small, tmp_path / "stage.safetensors", lambda done: None)
    assert record["epochs"] == [0, 1]
    assert len(record["variants"]) == 5 * 5
    assert all(math.isfinite(variant["exact_objective"][-1]) for variant in record["variants"])


# Miniatures, really run: tests/test_reproduction.py runs all of them, and makes them smaller still.


@pytest.mark.parametrize("name", WHOLE)
def test_the_miniature_trains(name, tmp_path):
    cell = expand(find(name, "quick"), "quick")[-1]
    cell = replace(cell, config={**cell.config, "run.epochs": 1, "run.evaluate_every": 1}, evaluation=None)
    assert run_cell(cell, RunContext(tmp_path, {}, "cpu")) == "done", find_cell(cell, tmp_path).detail
    found = find_cell(cell, tmp_path)
    assert found.state == "done"
    assert found.record["data"]["simulated"] == (cell.config["data.name"] == "phantom")
    for metric in describe_experiment(cell.experiment).get("metrics", ["accuracy"]):
        assert math.isfinite(found.result["test"][metric])
    assert not list(found.run.folder.glob("*.pt"))  # checkpoints are gone
