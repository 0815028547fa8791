"""The benchmark of fine-tuning: its loss, rates, random heads and tables, on a tiny network. Nothing is timed."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tensor_dropout as td

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from finetuning import methods, running, tables, training
from finetuning.data import Group, Part

SETTING = training.Setting(1e-2, 1e-1)


@pytest.fixture
def part():
    """A bright square in noise, and where its centre is."""
    rng = np.random.default_rng(0)
    images, places = rng.integers(0, 40, size=(40, 3, 16, 16)), rng.integers(3, 13, size=(40, 2))
    for image, (x, y) in zip(images, places, strict=True):
        image[:, y - 2 : y + 2, x - 2 : x + 2] = 250
    y = torch.from_numpy(places / 16).float()
    return Part(torch.from_numpy(images).to(torch.uint8), y, np.arange(40))


@pytest.fixture
def network():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    head = td.CPRegression((8, 8, 8), 2, rank=8, dropout=td.TensorDropout(0.5, per_sample=True), init="normal")
    return td.attach_head(backbone.eval(), head, "2", example_input=torch.zeros(1, 3, 16, 16))


def train(network, part, **options):
    settings = {"expected": True, "train_statistics": False, "steps": 30, "seed": 0, **options}
    run = training.Training([network], [SETTING], part, execution=training.Execution(), **settings)
    run.run()
    return run


def test_the_loss_is_the_expected_one_and_leaves_out_missing_points(network, part):
    x, y = training.prepare(part.images[:5]), part.y[:5].clone()
    torch.testing.assert_close(training.compute_loss(network, x, y, True), td.expected_mse(network, x, y))
    y[0] = torch.nan
    torch.testing.assert_close(
        training.compute_loss(network, x, y, True), td.expected_mse(network, x[1:], y[1:]), rtol=1e-4, atol=1e-6
    )
    network.eval()
    expected = nn.functional.mse_loss(network(x[1:]), y[1:])
    torch.testing.assert_close(training.compute_loss(network, x, y, False), expected)


@pytest.mark.parametrize("expected", [True, False])
def test_training_lowers_the_error_and_leaves_the_statistics_alone(network, part, expected):
    norm = next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d))
    before, mean = training.measure(network, part), norm.running_mean.clone()
    train(network, part, expected=expected)
    assert training.measure(network, part) < 0.6 * before
    assert torch.equal(norm.running_mean, mean)
    assert not network.training


def test_settings_are_trained_on_the_same_batches_as_alone(network, part):
    others = [copy.deepcopy(network) for _ in range(2)]
    settings = [SETTING, training.Setting(1e-3, 1e-3)]
    options = {"expected": True, "train_statistics": False, "steps": 4, "seed": 0, "execution": training.Execution()}
    training.Training(others, settings, part, **options).run()
    train(network, part, steps=4)
    x = training.prepare(part.images)
    torch.testing.assert_close(others[0](x), network(x))
    assert not torch.allclose(others[1](x), network(x), atol=1e-3)


def test_from_scratch_the_statistics_are_those_of_the_batches(network, part):
    norm = next(module for module in network.modules() if isinstance(module, nn.BatchNorm2d))
    mean = norm.running_mean.clone()
    train(network, part, train_statistics=True, steps=2)
    assert not torch.equal(norm.running_mean, mean)


def test_rates_rise_and_fall_to_zero():
    factors = training.rate_factors(100)
    assert len(factors) == 100
    assert factors.index(max(factors)) in (9, 10)
    assert factors[0] == pytest.approx(0.1)
    assert factors[-1] < 1e-3


def test_every_image_comes_once_before_any_comes_again():
    order = training.order_batches(40, 5, 0)
    assert order.shape == (5, 32)
    assert sorted(order.flatten()[:40].tolist()) == list(range(40))
    assert training.order_batches(20, 3, 0).shape == (3, 20)


def test_the_weight_of_a_linear_head_moves_by_its_step(network):
    network.head = nn.Sequential(nn.Flatten(), nn.Linear(512, 2))
    rest, weight = training.group_parameters(network, SETTING)
    assert weight["lr"] == pytest.approx(0.1 * float(network.head[1].weight.detach().square().mean().sqrt()))
    assert any(p is network.head[1].bias for p in rest["params"])
    assert len(rest["params"]) + 1 == len(list(network.parameters()))


def test_a_random_head_starts_at_the_scale_of_the_targets(network, part):
    maps = torch.randn(40, 8, 8, 8)
    head = methods.redraw(network.head, maps, part.y, 0)
    outputs = head.eval()(maps)
    torch.testing.assert_close(outputs.mean(0), part.y.mean(0), rtol=0, atol=1e-3)
    torch.testing.assert_close(outputs.var(0).mean(), part.y.var(0).mean(), rtol=1e-2, atol=0)


def test_a_convolutional_head_learns_maps_and_targets_as_they_came():
    torch.manual_seed(0)
    maps, places = torch.randn(60, 4, 6, 6), torch.randint(6, (60, 2))
    for row, (x, y) in zip(maps, places, strict=True):
        row[0, y, x] += 10
    maps, y = 100 + 50 * maps, 3 + 1e-3 * places.float()
    head = methods.fit_convolutional(maps, y, 0, steps=80)
    assert (head(maps) - y).abs().mean() < 0.5 * (y - y.mean(0)).abs().mean()
    assert not head.training
    groups = training.group_parameters(SimpleHeaded(head), SETTING)
    assert len(groups) == 4  # the rest, two convolutions, the linear layer


class SimpleHeaded(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.backbone, self.head = nn.Linear(1, 1), head


def test_disturbed_images_are_noisier_or_smoother_and_the_same_for_all(network, part):
    train(network, part, steps=60)
    errors = training.measure_disturbed(network, part)
    assert errors == training.measure_disturbed(network, part)
    assert set(errors) == set(training.DISTURBANCES)
    assert errors["noise 0.1"] != errors["noise 0.05"] != training.measure(network, part)
    constant = Part(torch.full_like(part.images, 90), part.y, part.groups)
    assert training.measure_disturbed(network, constant)["blur 2"] == training.measure(network, constant)


def test_all_methods_have_as_many_settings():
    assert {len(set(method.grid)) for method in methods.METHODS.values()} == {4}
    assert {*methods.FROZEN.values(), *methods.METHODS} == set(tables.METHODS)
    assert sorted(running.ORDER) == sorted(tables.METHODS)


def test_a_run_that_is_cut_off_has_all_splits_of_few_images():
    groups = running.list_groups()
    assert len(groups) == len(set(groups)) == 12
    assert {(group.set, group.n, group.split) for group in groups[:6]} == {
        (name, 100, split) for name in ("wings", "faces") for split in range(3)
    }


def test_a_method_that_fails_does_not_stop_the_others(monkeypatch, network, part, tmp_path, capsys):
    def run_method(method, *_):
        if method is methods.METHODS[tables.EXACT]:
            raise ValueError("out of luck")
        return {"error": 1.0}

    network.head = methods.Keep()
    monkeypatch.setattr(running, "load_group", lambda *_: (part, part))
    monkeypatch.setattr(running, "build_network", lambda *_: copy.deepcopy(network))
    monkeypatch.setattr(running, "run_method", run_method)
    path = tmp_path / "record.jsonl"
    plan = running.Plan(tmp_path, tmp_path, path, 16, 8, {100: 1}, None, "cpu", training.Execution())
    asked = ("frozen, pooled ridge", tables.EXACT, tables.MASKS)
    with pytest.raises(SystemExit):
        running.run_group(Group("wings", 100, 0), plan, asked)
    assert "wings n = 100 split 0, tensor head, exact loss: failed" in (said := capsys.readouterr().err)
    assert "out of luck" in said
    assert [cell.method for cell in tables.read_record(path)] == [asked[0], asked[2]]


def test_the_table_of_disturbed_images_has_errors_and_their_growth():
    record = {
        tables.Cell("wings", 100, split, tables.EXACT): {"error": 2.0, "disturbed": {"blur 1": 3.0 + 2 * split}}
        for split in range(2)
    }
    record[tables.Cell("wings", 100, 0, tables.MASKS)] = {"error": 2.0}  # run before this was measured
    line = tables.render("disturbed", record).splitlines()[-1]
    assert line == "| wings | 100 | tensor head, exact loss | 4.000 (2.00×) |"


@pytest.fixture
def record(tmp_path):
    """Two splits of two methods, one of a third, a run that diverged, and half a line."""
    rows = [
        {"set": "wings", "n": 100, "split": split, "method": method, "error": error, "environment": {}}
        for method, errors in (
            (tables.FROZEN, (2, 4)),
            (tables.EXACT, (1, 3)),
            ("pooled linear", (4,)),
            (tables.MASKS, (2,)),
        )
        for split, error in enumerate(errors)
    ]
    rows.append({"set": "wings", "n": 100, "split": 0, "method": "from scratch", "error": None, "environment": {}})
    path = tmp_path / "record.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + '\n{"set": "win', encoding="utf-8")
    return tables.read_record(path)


def test_tables_compare_the_splits_that_both_methods_have(record, capsys):
    assert len(record) == 7
    header, _, line = (row.strip("| ").split(" | ") for row in tables.render("errors", record).splitlines())
    assert line[:3] == ["wings", "100", "2"]
    shown = dict(zip(header[3:], line[3:], strict=True))
    assert (shown[tables.FROZEN], shown[tables.EXACT], shown["pooled linear"]) == ("3.000", "**2.000**", "4.000 (1)")
    assert shown["from scratch"] == "diverged (1)"
    assert "flattened linear" not in shown  # of no cell
    header, _, line = (row.strip("| ").split(" | ") for row in tables.render("differences", record).splitlines())
    shown = dict(zip(header[2:], line[2:], strict=True))
    assert shown[f"{tables.EXACT} to {tables.FROZEN}"] == "−37.5 [−196.3, +121.3]"  # −50 and −25 %
    assert shown[f"{tables.EXACT} to pooled linear"] == "−75.0"
    assert shown[f"from scratch to {tables.MASKS}"] == "diverged"
