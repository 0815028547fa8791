"""Inputs of unknown classes: the areas, the signals, and a network from end to end."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout.metrics.detection import SIGNALS, detect, rank_area
from tensor_dropout.robustness.describe import describe_outcome
from tensor_dropout.robustness.target import Target
from tensor_dropout_lab import cli
from tensor_dropout_lab.nets import build_net


@pytest.mark.parametrize("seed", range(5))
def test_areas_are_those_of_scikit_learn_with_ties(seed):
    random = np.random.default_rng(seed)
    known, unknown = random.integers(0, 10, 200) / 10, random.integers(3, 13, 80) / 10
    labels = np.r_[np.zeros(200), np.ones(80)]
    assert rank_area(known, unknown) == pytest.approx(roc_auc_score(labels, np.r_[known, unknown]))


def test_what_is_let_through_is_that_of_scikit_learn():
    random = np.random.default_rng(0)
    known, unknown = random.normal(0, 1, 2000), random.normal(2, 1, 1000)
    found = detect({"entropy": known}, {"entropy": unknown})["entropy"]
    let, caught, _ = roc_curve(np.r_[np.ones(2000), np.zeros(1000)], -np.r_[known, unknown])  # known is "positive"
    assert found["fpr95"] == pytest.approx(100 * np.interp(0.95, caught, let), abs=0.5)
    assert found["auroc"] == pytest.approx(100 * rank_area(known, unknown))


def test_low_confidence_means_unknown():
    found = detect({"rest": [0.1, 0.2]}, {"rest": [0.9, 0.8], "entropy": [1.0, 1.0]})
    assert found == {"rest": {"auroc": 100.0, "fpr95": 0.0}}


@pytest.mark.parametrize(("known", "unknown"), [([0.1, math.nan], [0.2]), ([0.1], [math.nan]), ([], [0.2])])
def test_signals_that_are_no_numbers_are_refused(known, unknown):
    with pytest.raises(TensorDropoutError, match=r"detect: rest of the (known|unknown) inputs has"):
        detect({"rest": known}, {"rest": unknown})


def test_a_very_sure_network_is_still_ranked():
    """Where 1 - confidence is 0 in float32, the probability of the other classes is not."""
    logits = torch.tensor([[60.0, 0.0, 0.0], [30.0, 0.0, 0.0], [20.0, 0.0, 0.0], [25.0, 0.0, 0.0]])
    target = Target(torch.nn.Identity(), bounds=(-math.inf, math.inf), task="classification")
    found = describe_outcome(target.predict(logits), torch.zeros(4, dtype=torch.int64), "classification")
    assert (found["confidence"] == 1).sum() >= 3
    assert np.argsort(found["rest"]).tolist() == [0, 1, 3, 2]
    assert np.argsort(found["entropy"]).tolist() == [0, 1, 3, 2]


def make_net(theta=0.7):
    torch.manual_seed(0)
    return build_net("resnet-mini", outputs=4, input_shape=(1, 8, 8), head="rtrl-cp", rank=8, theta=theta).eval()


def test_exact_and_sampled_doubt_are_those_of_the_moments():
    net, x = make_net(), torch.rand(6, 1, 8, 8)
    mean, variance = net.fc.moments(net.forward_features(x))
    best, where = mean.topk(2, dim=1)
    doubt = variance.sqrt().gather(1, where[:, :1])[:, 0] / (best[:, 0] - best[:, 1])
    exact = Target(net, bounds=(0.0, 1.0), mode="exact", task="classification").predict(x)
    torch.testing.assert_close(exact.doubt, doubt.detach(), rtol=1e-4, atol=1e-5)
    sampled = Target(net, bounds=(0.0, 1.0), mode="sample", n_samples=6000, task="classification").predict(x)
    clear = doubt < 2  # where the lead is not a matter of rounding
    assert clear.any()
    torch.testing.assert_close(sampled.doubt[clear], doubt.detach()[clear], rtol=0.15, atol=0)


def test_disagreement_is_that_of_predict_and_none_without_draws():
    net, x = make_net(), torch.rand(6, 1, 8, 8)
    said = td.predict(net, x, mode="sample", n_samples=1500)
    target = Target(net, bounds=(0.0, 1.0), mode="sample", n_samples=1500, task="classification")
    torch.testing.assert_close(target.predict(x).disagreement, said.mutual_information, rtol=0.2, atol=2e-3)
    exact = Target(net, bounds=(0.0, 1.0), mode="exact", n_samples=1500, task="classification").predict(x)
    torch.testing.assert_close(exact.disagreement, said.mutual_information, rtol=0.2, atol=2e-3)
    plain = Target(net, bounds=(0.0, 1.0), task="classification").predict(x)
    assert plain.disagreement is None
    assert plain.doubt is None


def test_outcomes_of_unknown_classes_have_no_likelihood():
    net, x = make_net(), torch.rand(5, 1, 8, 8)
    predicted = Target(net, bounds=(0.0, 1.0), mode="exact", task="classification").predict(x)
    found = describe_outcome(predicted, torch.full((5,), -1), "classification")
    assert set(found) == {"predicted", "confidence", *SIGNALS}


def test_a_run_with_unknown_classes_is_evaluated_on_them(tmp_path):
    run, runner = str(tmp_path / "run"), CliRunner()
    options = "train --data digits --head rtrl-cp --epochs 4 --set data.options.unknown_classes=3 --set run.threads=1"
    assert runner.invoke(cli.app, [*options.split(), "--out", run]).exit_code == 0
    said = runner.invoke(cli.app, ["evaluate", run, *["--protocol", "none", "--noise", "none", "--mode", "exact"]])
    assert said.exit_code == 0, said.output
    assert "107 examples of unknown classes told from the known" in said.output
    record = json.loads((tmp_path / "run/evaluation-exact/evaluation.json").read_text())["summary"]
    assert record["examples"] == 253
    assert record["unknown"]["examples"] == 107
    assert set(record["unknown"]["signals"]) == set(SIGNALS)
    assert record["unknown"]["signals"]["rest"]["auroc"] > 80


def test_comparing_two_runs_with_unknown_classes_shows_their_areas_and_no_accuracy_on_them(tmp_path):
    runner, runs = CliRunner(), []
    for seed in ("0", "1"):
        runs.append(str(tmp_path / seed))
        options = "train --data digits --head fc --epochs 2 --set data.options.unknown_classes=3 --set run.threads=1"
        assert runner.invoke(cli.app, [*options.split(), "--seed", seed, "--out", runs[-1]]).exit_code == 0
        asked = ["evaluate", runs[-1], *["--protocol", "none", "--noise", "none", "--head-sizes", "3"]]
        assert runner.invoke(cli.app, asked).exit_code == 0
    said = runner.invoke(cli.app, ["compare", *runs, "--out", str(tmp_path / "c.json")])
    assert said.exit_code == 0, said.output
    record = json.loads((tmp_path / "c.json").read_text())
    parts = [row["part"] for row in record["pairs"][0]["parts"]]
    assert "unknown" not in parts
    assert "head/whole/0" in parts
    assert any(part.startswith("head/low-rank/") for part in parts)
    assert {len(signals) for signals in record["unknown"].values()} == {2}
    assert "AUROC" in said.output
