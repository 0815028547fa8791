"""The benchmark of heads on frozen maps: its folds, heads, training and verdicts, on tiny maps. Nothing is timed."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge

import tensor_dropout as td

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from position_heads import closed_form, data, gradient, running, second_order, surface, tables
from position_heads.command import main
from position_heads.data import Group, Images
from position_heads.gradient import Draw, Problem

STILL = Draw(torch.ones(1), on=False)
SHAPE, OUTPUTS = (5, 4, 6), 4


@pytest.fixture(scope="module")
def images():
    """A bright spot in noise, seen by three channels, and where it is; groups of two images."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 3, 6, 6)).astype(np.float32)
    places = rng.integers(0, 6, size=(120, 2))
    for k, (row, column) in enumerate(places):
        x[k, 0, row, column] += 8
        x[k, 1, row, column] -= 8
    y = np.concatenate([places[:, ::-1], places[:, ::-1] + 1], 1).astype(np.float32) / 6
    return Images(x, y, data.make_folds(np.repeat(np.arange(60), 2), 80))


@pytest.fixture(scope="module")
def features(images, tmp_path_factory):
    """A folder of maps as features.py makes it; the benchmark averages them in pairs."""
    folder = tmp_path_factory.mktemp("features")
    (folder / "retina").mkdir()
    doubled = images.x.repeat(2, axis=2).repeat(2, axis=3)
    for name, array in (("block10", doubled), ("targets", images.y), ("groups", np.repeat(np.arange(60), 2))):
        np.save(folder / "retina" / f"{name}.npy", array)
    return folder


# The folds.


def test_every_image_is_tested_once_and_groups_stay_together():
    groups = np.random.default_rng(0).integers(0, 40, 200)
    folds = data.make_folds(groups, 50)
    assert sorted(np.concatenate([fold.test for fold in folds])) == list(range(200))
    for fold in folds:
        assert len(fold.train) == 50
        assert len(fold.inner) == len(folds[0].inner) > 25
        assert not set(groups[fold.train]) & set(groups[fold.test])
        assert not set(groups[fold.inner]) & set(groups[fold.held])
        assert set(fold.inner) | set(fold.held) <= set(fold.train)


def test_more_training_images_include_the_fewer():
    groups = np.arange(200)
    few, many, whole = (data.make_folds(groups, n) for n in (20, 100, data.FINALIST_SIZES[1]))
    for a, b, c in zip(few, many, whole, strict=True):
        assert set(a.train) < set(b.train) < set(c.train)
        assert len(c.train) == 180
    with pytest.raises(ValueError, match="180"):
        data.make_folds(groups, 181)


def test_the_maps_of_a_group_are_those_of_its_images(features, images):
    group = Group("retina", "efficientnet", 80)
    loaded = data.load_images(features, group)
    for own, other in zip(loaded.folds, images.folds, strict=True):
        np.testing.assert_allclose(loaded.x[own.train], images.x[other.train], atol=1e-6)
        np.testing.assert_array_equal(loaded.y[own.test], images.y[other.test])
    assert data.load_images(features, Group("retina", "efficientnet", 400)) is None


# Closed forms, against scikit-learn.


def standardized(x, rows):
    mean, std = x[rows].mean(0), x[rows].std((0, 2, 3), keepdims=True)[0]
    return ((x - mean) / std).reshape(len(x), -1).astype(np.float64)


def find(head, images, fold, **wanted):
    for settings, predicted in closed_form._predictions(
        closed_form.HEADS[head], images.x, images.y, fold.train, fold.test
    ):
        if all(settings[key] == pytest.approx(value) for key, value in wanted.items()):
            return predicted
    raise AssertionError("not tried")


def test_ridge_is_that_of_scikit_learn(images):
    fold = images.folds[0]
    x = standardized(images.x, fold.train)
    weight = 1e-3
    ridge = Ridge(weight * np.square(x[fold.train]).sum()).fit(x[fold.train], images.y[fold.train])
    np.testing.assert_allclose(
        find("flattened ridge", images, fold, alpha=weight), ridge.predict(x[fold.test]), atol=1e-5
    )
    full = find("reduced-rank ridge", images, fold, alpha=closed_form.FEW_WEIGHTS[2], rank=4)
    np.testing.assert_allclose(full, find("flattened ridge", images, fold, alpha=closed_form.FEW_WEIGHTS[2]), atol=1e-6)


def test_reduced_rank_ridge_has_that_rank(images):
    fold = images.folds[0]
    predicted = find("reduced-rank ridge", images, fold, alpha=closed_form.FEW_WEIGHTS[2], rank=2)
    std, mean = images.y[fold.train].std(0), images.y[fold.train].mean(0)
    assert np.linalg.matrix_rank((predicted - mean) / std, tol=1e-6) == 2


def test_kernel_ridge_is_that_of_scikit_learn(images):
    fold = images.folds[0]
    x = standardized(images.x, fold.train)
    train, test = x[fold.train], x[fold.test]
    distances = np.square(train[:, None] - train).sum(-1)
    weight = closed_form.WEIGHTS[8]
    model = KernelRidge(alpha=weight * len(train), kernel="rbf", gamma=0.3 / distances.mean())
    mean = images.y[fold.train].mean(0)
    model.fit(train, images.y[fold.train] - mean)
    found = find("kernel ridge", images, fold, gamma=0.3, alpha=weight)
    np.testing.assert_allclose(found, model.predict(test) + mean, atol=1e-5)


@pytest.mark.parametrize("head", closed_form.HEADS)
def test_a_closed_form_is_chosen_by_held_out_images_alone(images, head):
    fold = images.folds[0]
    row = closed_form.run_fold(closed_form.HEADS[head], images, fold)
    y = images.y.copy()
    y[fold.test] += 7
    again = closed_form.run_fold(closed_form.HEADS[head], Images(images.x, y, images.folds), fold)
    assert (again["chosen"], again["held_out"]) == (row["chosen"], row["held_out"])
    assert again["error"] > row["error"] + 100


# Heads that are trained by gradient.


def parameters_of(head, problems=2):
    torch.manual_seed(0)
    drawn = gradient.HEADS[head].draw(problems, SHAPE, OUTPUTS)
    return {name: p + 0.3 * torch.randn_like(p) for name, p in drawn.items()}


@pytest.mark.parametrize("head", gradient.HEADS)
def test_a_head_gives_each_problem_what_it_gives_alone(head):
    p, x = parameters_of(head), torch.randn(2, 3, *SHAPE)
    forward = gradient.HEADS[head].forward
    together = forward(p, x, STILL)
    assert together.shape == (2, 3, OUTPUTS)
    for k in range(2):
        alone = forward({name: each[k : k + 1] for name, each in p.items()}, x[k : k + 1], STILL)
        torch.testing.assert_close(alone[0], together[k], rtol=1e-4, atol=1e-5)


def test_cp_is_the_layer_of_the_library():
    p, x = parameters_of("CP, masks per sample", 1), torch.randn(1, 7, *SHAPE)
    layer = td.CPRegression(SHAPE, OUTPUTS, p["U0"].shape[-1]).eval()
    with torch.no_grad():
        for k, factor in enumerate(layer.factors):
            factor.copy_(p[f"U{k}"][0])
        layer.bias.copy_(p["b"][0, 0])
    made = gradient.HEADS["CP, masks per sample"].forward(p, x, STILL)[0]
    torch.testing.assert_close(made, layer(x[0]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("head", "alike"), [("CP, masks per batch", True), ("CP, masks per sample", False)])
def test_masks_are_those_of_a_batch_or_of_a_sample(head, alike):
    p = parameters_of(head, 1)
    x = torch.randn(1, 1, *SHAPE).expand(1, 9, *SHAPE)
    torch.manual_seed(1)
    made = gradient.HEADS[head].forward(p, x, Draw(torch.full((1, 1, 1), 0.5), on=True))[0]
    assert torch.allclose(made[0], made[1:], atol=1e-5) == alike
    torch.manual_seed(2)
    draws = [gradient.HEADS[head].forward(p, x, Draw(torch.full((1, 1, 1), 0.5), on=True)) for _ in range(800)]
    mean, spread = torch.cat(draws).mean((0, 1)), torch.cat(draws)[:, 0].std(0)
    still = gradient.HEADS[head].forward(p, x, STILL)[0, 0]
    assert ((mean - still).abs() < 5 * spread / 800**0.5).all()


def test_convolutions_are_convolutions():
    p, x = parameters_of("convolutional", 1), torch.randn(1, 3, *SHAPE)
    first = torch.nn.functional.conv2d(x[0], p["first"][0].view(-1, SHAPE[0], 3, 3), p["c"][0, :, 0], padding=1).relu()
    second = torch.nn.functional.conv2d(
        first, p["second"][0].view(-1, gradient.WIDTH, 3, 3), p["d"][0, :, 0], padding=1
    )
    wanted = second.relu().flatten(1) @ p["W"][0] + p["b"][0]
    torch.testing.assert_close(gradient.convolutions(p, x, STILL)[0], wanted, rtol=1e-4, atol=1e-4)


def test_soft_argmax_reads_the_place_of_the_heat():
    p = gradient.draw_soft_argmax(1, (1, 5, 9), 2)
    p["conv"].fill_(100.0)
    x = torch.zeros(1, 1, 1, 5, 9)
    x[..., 1, 6] = 1
    torch.testing.assert_close(gradient.soft_argmax(p, x, STILL)[0, 0], torch.tensor([0.5, -0.5]))


def test_attention_may_read_one_place():
    p = gradient.draw_attention(1, (2, 3, 3), 2)
    p["place"][..., 4] = 100.0
    p["W"].normal_()
    x = torch.randn(1, 4, 2, 3, 3)
    seen = torch.cat([x[0, :, :, 1, 1], torch.zeros(4, 2)], 1)
    torch.testing.assert_close(gradient.attention(p, x, STILL)[0], seen @ p["W"][0, 0])


def test_steps_are_those_of_adamw():
    torch.manual_seed(0)
    start, wanted = torch.randn(2, 6), torch.randn(2, 6)
    ours = {"W": start.clone().requires_grad_()}
    adam = gradient.Adam(ours, torch.tensor([0.1, 0.01]), torch.tensor([0.3, 0.0]))
    theirs = [row.clone().requires_grad_() for row in start]
    torchs = [
        torch.optim.AdamW([theirs[0]], 0.1, weight_decay=0.3),
        torch.optim.AdamW([theirs[1]], 0.01, weight_decay=0),
    ]
    for _ in range(5):
        adam.step(torch.autograd.grad((ours["W"] - wanted).square().sum(), list(ours.values())), 1.0)
        for row, target, optimizer in zip(theirs, wanted, torchs, strict=True):
            optimizer.zero_grad()
            (row - target).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(ours["W"].detach(), torch.stack(theirs).detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", gradient.HEADS)
def test_training_lowers_the_error(images, head):
    fold = images.folds[0]
    setting = max(gradient.HEADS[head].settings, key=lambda each: (each.keep, -each.decay))
    problem = Problem(fold.train, fold.test, replace(setting, rate=1e-2))
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y)
    gradient.train(gradient.HEADS[head], x, y, [problem], steps=120, seed=0)
    errors = [data.test_error(each, images.y[fold.test]) for each in problem.predicted]
    assert len(errors) == gradient.STOPS
    assert errors[-1] < 0.9 * data.test_error(images.y[fold.train].mean(0), images.y[fold.test])


def test_what_is_dropped_is_made_up_for():
    torch.manual_seed(0)
    draw = Draw(torch.tensor([0.25, 1.0])[:, None, None], on=True)
    x = torch.ones(2, 100, 200)
    made = draw.scale(x, x.shape)
    assert made[0].mean() == pytest.approx(1, abs=0.05)
    assert set(made[0].unique().tolist()) == {0.0, 4.0}
    assert torch.equal(made[1], x[1])


# Tensor regressions.


def test_folds_side_by_side_are_those_that_take_turns(images):
    """On a GPU all folds are one program; here it is run on the CPU."""
    head = second_order.Head("cp", (second_order.Tuned(0.5, 1.0),), rank=4)
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y)
    problems = [second_order.Problem(fold.train, fold.test, head.settings[0]) for fold in images.folds[:3]]
    fits = (fit(head, x, y, problems, 0) for fit in (second_order.fit_problems, second_order.fit_side_by_side))
    for problem, (in_turn, _), (beside, _) in zip(problems, *fits, strict=True):
        errors = [data.test_error(each, images.y[problem.new]) for each in (in_turn, beside)]
        assert errors[0] == pytest.approx(errors[1], rel=0.05)


def test_a_matrix_sees_flattened_maps_and_dropout_is_on(images):
    head = second_order.Head("cp", (second_order.Tuned(0.5, 1.0),), flat=True)
    x, y = torch.from_numpy(images.x), torch.from_numpy(images.y)
    fold = images.folds[0]
    ((_, layer),) = second_order.fit_problems(
        head, x, y, [second_order.Problem(fold.train, fold.test, head.settings[0])], 0
    )
    assert layer.input_shape == (3 * 6 * 6,)
    assert float(layer.dropout.theta) == 0.5


# Runs and tables.


def row_of(error, held_out):
    return [{"error": e, "held_out": held_out, "chosen": {}, "tried": 6} for e in error]


def record_of(**errors):
    """A record of one group whose heads have these errors in ten folds; others are bad."""
    noise = 1 + 0.01 * np.random.default_rng(0).normal(size=10)
    rows = {}
    for head in running.HEADS:
        level, held_out = errors.get(head.replace(", ", "_").replace(" ", "_"), (9.0, 9.0))
        row = {"folds": row_of(level * noise[np.random.default_rng(len(head)).permutation(10)], held_out), "fits": 7}
        row |= {"seconds": 1.0, "environment": {"device": "cpu", "torch": "2", "scikit-learn": "1", "command": "x"}}
        rows[running.Task(Group("wings", "efficientnet", 100), head)] = row
    return rows


def test_verdicts_choose_by_held_out_errors_and_name_the_best_of_the_test_too():
    record = record_of(CP_dropout=(1.0, 0.1), Tucker_dropout=(0.5, 0.2), flattened_ridge=(1.2, 0.3), PLS=(0.8, 0.4))
    ((verdict,),) = (tables.list_verdicts(tables.group_rows(record)),)
    assert (verdict["ours"], verdict["usual"], verdict["oracle"]) == ("CP, dropout", "flattened ridge", "PLS")
    assert [tables.judge(verdict[key]) for key in ("to usual", "to oracle", "to plain")] == [
        "better",
        "worse",
        "better",
    ]
    assert "| 50 to 800 | 1 | 1 / 0 / 0 | 0 / 0 / 1 | 1 / 0 / 0 |" in tables.render("verdict", record)


def test_heads_that_are_alike_are_level():
    record = record_of(CP_dropout=(1.0, 0.1), flattened_ridge=(1.0, 0.3))
    (verdict,) = tables.list_verdicts(tables.group_rows(record))
    assert tables.judge(verdict["to usual"]) == "level"


def test_every_head_has_a_part_in_the_claim():
    parts = [*running.RANDOMIZED, *running.PLAIN, *running.ABLATIONS, *running.BASELINES]
    assert sorted(parts) == sorted(running.HEADS)
    assert len(running.RANDOMIZED) == len(running.PLAIN) == 4
    settings = {len(head.settings) for head in (*gradient.HEADS.values(), *second_order.HEADS.values())}
    assert settings == {6}


def test_tasks_count_as_the_plan_says():
    tasks = running.list_tasks()
    assert tasks[0].group.n == 100
    assert len(tasks) == len(set(tasks)) == 15 * (len(running.HEADS) + len(running.ON_SECOND_BACKBONE))


def test_the_command_runs_goes_on_and_reports(features, tmp_path, capsys):
    arguments = ["--quick", "--features", str(features), "--out", str(tmp_path), "--heads", "flattened ridge"]
    assert main(arguments) == 0
    record = tmp_path / "position-heads.jsonl"
    first = record.read_text()
    arguments += ["soft-argmax", "CP, dropout", "CP, θ = 1"]
    assert main(arguments) == 0
    assert record.read_text().startswith(first)
    assert len(record.read_text().splitlines()) == 4
    assert (tmp_path / "position-heads.png").stat().st_size > 1000
    capsys.readouterr()
    assert main([*arguments, "--report"]) == 0
    assert "| retina | efficientnet | 50 | CP, dropout |" in capsys.readouterr().out
    assert json.loads(first)["folds"][0]["tried"] == len(closed_form.WEIGHTS)


def test_missing_maps_are_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--features", str(tmp_path), "--record", str(tmp_path / "record.jsonl")])
    assert "block10.npy" in capsys.readouterr().err
    assert not (tmp_path / "record.jsonl").exists()


# Rank, θ and α.


def test_the_surface_runs_and_goes_on(features, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(surface, "SHARES", (1.0, 64.0))
    monkeypatch.setattr(surface, "THETAS", (1.0, 0.5))
    arguments = ["--surface", "--quick", "--features", str(features), "--out", str(tmp_path)]
    assert main(arguments) == 0
    rows = surface.read_record(tmp_path / "position-surface.jsonl")
    assert [(row["rank"], row["fold"]) for row in rows] == [(4, 0), (4, 1), (128, 0), (128, 1)]
    assert (tmp_path / "position-surface.png").stat().st_size > 1000
    assert main(arguments) == 0
    assert surface.read_record(tmp_path / "position-surface.jsonl") == rows
    assert "| retina | rank and α, θ = 1 | 4 |" in capsys.readouterr().out


def test_a_strategy_chooses_by_held_out_errors_among_what_it_looks_at():
    cells = [
        (4, {"theta": 1.0, "share": 1.0, "held_out": 0.5, "error": 9}),
        (128, {"theta": 1.0, "share": 1.0, "held_out": 0.6, "error": 1}),
        (128, {"theta": 0.5, "share": 1.0, "held_out": 0.1, "error": 5}),
    ]
    errors = {strategy.name: surface.choose(strategy, cells)[0]["error"] for strategy in surface.STRATEGIES}
    assert list(errors.values()) == [9, 1, 5, 5, 5]


def test_component_norms_are_those_of_rank_one_terms():
    layer = td.CPRegression((3, 4), 2, 3)
    terms = [torch.einsum("i,j,k->ijk", *(factor[:, r] for factor in layer.factors)).norm() for r in range(3)]
    np.testing.assert_allclose(surface.component_norms(layer), sorted(map(float, terms), reverse=True), rtol=1e-5)
    assert surface.effective_rank(np.ones(7)) == pytest.approx(7)
