"""The synthetic experiment: its batched losses are the library's, and it resumes where it stopped."""

import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch

import tensor_dropout as td
from tensor_dropout import reference
from tensor_dropout_lab.experiments import EXPERIMENTS, load_experiment, synthetic
from tensor_dropout_lab.experiments.synthetic import objective, report, training

TINY = training.Setting(
    format="cp", inputs="white", optimizer="sgd", epochs=3, size=4, true_rank=2, rank=3, n_train=40, n_test=10, batch=10
)
FORMATS = ("cp", "tucker")
THETAS = torch.tensor([0.7, 0.9, 1.0], dtype=torch.float64)


def make_variants(format):
    shapes = [(3, 3, 4, 3)] + ([(3, 3, 3, 3)] if format == "tucker" else [])
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def make_layer(format, parameters, v):
    cls, rank = (td.CPRegression, 3) if format == "cp" else (td.TuckerRegression, (3, 3, 3, 1))
    dropout = td.TensorDropout(float(THETAS[v]), scaling="paper")
    layer = cls((4, 4, 4), 1, rank, bias=False, dtype=torch.float64, dropout=dropout)
    with torch.no_grad():
        for n in range(3):
            layer.factors[n].copy_(parameters[0][v, n])
        layer.factors[3].fill_(1.0)
        if format == "tucker":
            layer.core.copy_(parameters[1][v].unsqueeze(-1))
    return layer


@pytest.mark.parametrize("format", FORMATS)
def test_batched_losses_are_those_of_the_layers(format):
    parameters = make_variants(format)
    x, y = torch.randn(6, 4, 4, 4, dtype=torch.float64) + 0.3, torch.randn(6, dtype=torch.float64)
    theta = THETAS.float().double()  # as the layers' float32 buffers round it
    exact = objective.exact_loss(parameters, x.flatten(1), y, theta)
    printed = objective.printed_loss(parameters, x.flatten(1), y, theta)
    for v in range(len(THETAS)):
        layer = make_layer(format, parameters, v)
        torch.testing.assert_close(exact[v], td.expected_mse(layer, x, y[:, None]))
        torch.testing.assert_close(printed[v], td.expected_mse(layer, x, y[:, None], regularizer="paper"))


@pytest.mark.parametrize("format", FORMATS)
def test_the_stochastic_loss_averages_to_the_exact_one(format):
    parameters = make_variants(format)
    x, y = torch.randn(6, 64, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    layers = [make_layer(format, parameters, v) for v in range(2)]
    averages = torch.zeros(2, dtype=torch.float64)
    for v, layer in enumerate(layers):
        for chance, masks in reference.all_masks(layer):
            drawn = torch.stack([mask for mask in masks if mask is not None]).expand(3, 3)
            one = [p[v : v + 1] for p in parameters]
            averages[v] += chance * objective.stochastic_loss(one, x, y, drawn[None])[0]
    theta = THETAS[:2].float().double()
    torch.testing.assert_close(averages, objective.exact_loss([p[:2] for p in parameters], x, y, theta))


@pytest.mark.parametrize("inputs", ["white", "correlated"])
def test_data_are_what_they_are_called(inputs):
    setting = replace(TINY, inputs=inputs, n_train=20_000)
    data = training.make_data(setting, torch.device("cpu"))
    x = data.x.view(-1, 4, 4, 4)
    assert data.y.std().item() == pytest.approx(1, abs=1e-3)
    assert x.mean().item() == pytest.approx(0.3 if inputs == "correlated" else 0, abs=0.02)
    neighbours = torch.corrcoef(torch.stack([x[:, 0, 0, 0], x[:, 0, 0, 1]]))[0, 1]
    assert neighbours.item() == pytest.approx(0.5 if inputs == "correlated" else 0, abs=0.03)


@pytest.mark.parametrize(("format", "optimizer"), list(product(FORMATS, ("sgd", "adam"))))
def test_an_interrupted_stage_ends_like_an_uninterrupted_one(tmp_path, format, optimizer, monkeypatch):
    setting = replace(TINY, format=format, optimizer=optimizer, rates=(0.01, 0.1), tune_epochs=1)
    whole = training.train_stage(setting, tmp_path / "whole.safetensors", lambda done: None)
    epochs = []
    real = training._train_epoch

    def stop_at_second(setting, epoch, *arguments):
        epochs.append(epoch)
        if epoch == 2 and epochs.count(2) == 1:
            raise KeyboardInterrupt
        real(setting, epoch, *arguments)

    monkeypatch.setattr(training, "_train_epoch", stop_at_second)
    path = tmp_path / "cut.safetensors"
    with pytest.raises(KeyboardInterrupt):
        training.train_stage(setting, path, lambda done: None)
    resumed = training.train_stage(setting, path, lambda done: None)
    assert epochs == [0, 1, 2, 2]
    for key in ("rate", "rate_search", "variants"):
        assert resumed[key] == whole[key]


def test_progress_counts_the_search_and_a_search_is_not_repeated(tmp_path, monkeypatch):
    setting = replace(TINY, rates=(0.01, 0.1), tune_epochs=2)
    path, steps = tmp_path / "stage.safetensors", []
    monkeypatch.setattr(training, "_train_epoch", None)  # fails right after the search
    with pytest.raises(TypeError):
        training.train_stage(setting, path, steps.append)
    assert sum(steps) == 2
    monkeypatch.undo()
    monkeypatch.setattr(training, "choose_rate", None)  # would fail if the search ran again
    steps.clear()
    training.train_stage(setting, path, steps.append)
    assert sum(steps) == setting.search_epochs + setting.epochs


def test_a_checkpoint_of_another_setting_or_a_damaged_one_is_not_used(tmp_path):
    path = tmp_path / "stage.safetensors"
    training.train_stage(TINY, path, lambda done: None)
    other = replace(TINY, seed=1)
    fresh = training.train_stage(other, tmp_path / "fresh.safetensors", lambda done: None)
    assert training.train_stage(other, path, lambda done: None)["variants"] == fresh["variants"]
    path.write_bytes(b"cut off")
    assert training.train_stage(other, path, lambda done: None)["variants"] == fresh["variants"]


def test_seeds_share_data_and_start_but_not_masks():
    theta = torch.tensor([theta for _, theta in TINY.variants])
    masks = training.draw_masks(TINY, 0, 50, theta)
    first, second, third = masks.chunk(3, dim=1)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)
    kept = masks.mean((0, 2, 3)).view(3, -1).mean(0)
    torch.testing.assert_close(kept, theta[: len(TINY.thetas)], atol=0.05, rtol=0)
    parameters = training.initial_parameters(TINY, 25, training.make_data(TINY, torch.device("cpu")))
    assert all(torch.equal(p[0], p[v]) for p in parameters for v in range(25))


def test_the_rate_is_the_smallest_that_learns_and_a_diverging_one_is_recorded():
    setting = replace(TINY, n_train=200, rates=(1e-4, 0.05, 0.1, 1e4), tune_epochs=40)
    rate, search = training.choose_rate(setting, training.make_data(setting, torch.device("cpu")), lambda done: None)
    assert rate == 0.05
    assert [trial["rate"] for trial in search] == list(setting.rates)
    assert search[0]["loss"] > 0.25 > search[1]["loss"]
    assert search[3]["loss"] is None


@pytest.mark.parametrize("name", ["synthetic-cp", "synthetic-tucker"])
def test_run_writes_records_figures_and_summary_and_does_not_repeat_itself(tmp_path, name, monkeypatch):
    stage = {k: v for k, v in asdict(TINY).items() if k not in ("format", "seed")}
    stages = {"white": stage, "correlated": {**stage, "inputs": "correlated"}}
    monkeypatch.setattr(synthetic, "read_stages", lambda name, preset: stages)
    paths = load_experiment(name).run(name, "quick", tmp_path, 0)
    assert all(path.stat().st_size > 0 for path in paths)
    assert {path.name for path in paths} >= {"white.json", f"{name}-white.png", f"{name}-formula.svg", "summary.md"}
    assert not list(tmp_path.rglob("*.safetensors"))
    record = json.loads((tmp_path / name / "white.json").read_text())
    assert len(record["variants"]) == 5 * 5
    assert "simulated" in (tmp_path / name / "summary.md").read_text()
    monkeypatch.setattr(
        "tensor_dropout_lab.experiments.synthetic.training.train_stage", None
    )  # would fail if anything were trained again
    load_experiment(name).run(name, "quick", tmp_path, 0)
    assert EXPERIMENTS[name].module.endswith("synthetic")


def test_the_gap_is_that_of_the_curves():
    def variant(kind, curve, printed=(1.0, 1.0)):
        return {"kind": kind, "theta": 0.7, "exact_objective": list(curve), "printed_objective": list(printed)}

    stochastic = [variant("stochastic", (2.0 + k, 1.0)) for k in range(3)]
    record = {"variants": [*stochastic, variant("exact", (2.0, 1.0), printed=(3.0, 1.0))]}
    mean, spread, largest = report.gap(record, 0.7)
    assert (mean, spread, largest) == pytest.approx((0.5, 0.5, 0.5))
    assert report.formula_error(record, 0.7) == pytest.approx(0.5)
    diverged = {"variants": [*stochastic, variant("exact", (None, 1.0))]}
    assert report.gap(diverged, 0.7)[0] != report.gap(diverged, 0.7)[0]
