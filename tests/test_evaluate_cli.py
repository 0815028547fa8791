"""``tensor-dropout evaluate`` and ``compare`` as a user types them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from tensor_dropout.robustness import apgd, blackbox, gradient_attacks, transfer
from tensor_dropout.robustness.attacks import ensemble
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import DATASETS, Data, Source, TensorSplit, load_data
from tensor_dropout_lab.evaluation import intervals, show
from tensor_dropout_lab.record_store import read_outcomes
from training_runs import fork, run, wait

SMALL = ["--images", 60, "--steps", 5, "--queries", 20, "--twin-epochs", 1, "--repeats", 2]
TINY = ["--images", 12, "--steps", 2, "--queries", 4, "--twin-epochs", 0, "--noise", "none", "--epsilon", 0.1]
CLEAN = [*TINY, "--protocol", "none"]
FIGURES = [f"{name}.{kind}" for name in ("attacks", "noise", "uncertainty") for kind in ("png", "svg")]
SYNTHETIC = {
    "data__name": "synthetic",
    "data__options": {"shape": [1, 8, 8], "n": 120, "rank": 2},
    "run__batch": 20,
}


def invoke(*arguments, figures=False):
    """Run a command; figures take most of the time, and are drawn where they are looked at."""
    with patch.object(show, "draw_evaluation", show.draw_evaluation if figures else lambda *_: []):
        return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])


def evaluate(folder, out, *arguments, figures=False):
    """Evaluate a run into a folder; what is printed."""
    result = invoke("evaluate", folder, "--device", "cpu", *arguments, "--out", out, figures=figures)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def fail(*arguments):
    """The one sentence of a command that fails."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1, result.output
    assert "Traceback" not in result.output
    line = re.sub(r"^Going on: .*\n", "", result.output).rstrip("\n")
    assert "\n" not in line
    assert line.startswith("Error: ")
    return line


def read_record(folder):
    """``evaluation.json``; a NaN or an infinity in it is an error."""

    def refuse(literal):
        raise AssertionError(f"evaluation.json holds {literal}")

    return json.loads((folder / "evaluation.json").read_text(encoding="utf-8"), parse_constant=refuse)


def read_summary(folder):
    """What was measured, without what a clock says."""
    summary = read_record(folder)["summary"]
    for row in summary["attacks"]:
        del row["seconds"]
    return summary


def read_arrays(folder):
    """All arrays of ``outcomes.npz``, without the header."""
    with np.load(folder / "outcomes.npz") as file:
        return {name: file[name] for name in file.files if name != "header"}


def assert_equal_evaluations(found, expected):
    ours, theirs = read_arrays(found), read_arrays(expected)
    assert list(ours) == list(theirs)
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []
    assert [name for name in ours if ours[name].dtype != theirs[name].dtype] == []
    assert read_summary(found) == read_summary(expected)


def find_leftovers(folder):
    """Temporary files: everything that is not known by name."""
    known = {"outcomes.npz", "evaluation.json", *FIGURES}
    return [str(path) for path in folder.rglob("*") if path.name not in known] if folder.exists() else []


@contextmanager
def watch_attacks(interrupt_at=None):
    """Count the calls of every attack; at the given one Ctrl-C is pressed."""
    calls = []
    kinds = [gradient_attacks.Iterated, apgd.APGD, blackbox.Square, blackbox.RandomSearch, transfer.Transfer]

    def watch(kind):
        attack = kind.__call__

        def call(self, *arguments, **options):
            calls.append((type(self).__name__, self.name, self.epsilon))
            if len(calls) == interrupt_at:
                raise KeyboardInterrupt
            return attack(self, *arguments, **options)

        return patch.object(kind, "__call__", call)

    patches = [watch(kind) for kind in kinds]
    for each in patches:
        each.start()
    try:
        yield calls
    finally:
        for each in patches:
            each.stop()


# Runs and their evaluations.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Small finished runs: two of digits and two of numbers, on inputs of the same shape."""
    root = tmp_path_factory.mktemp("runs")
    run(root / "cp", net__head="rtrl-cp")
    run(root / "fc", net__head="fc")
    run(root / "numbers", net__head="rtrl-cp", **SYNTHETIC)
    run(root / "numbers-fc", net__head="fc", run__epochs=1, **SYNTHETIC)
    return root


def make_scans(root):
    """30 small volumes of noise, with a table of ages and volumes."""
    nibabel = pytest.importorskip("nibabel")
    random, rows = np.random.default_rng(0), ["participant_id\tage\tvolume_mm3"]
    for k in range(30):
        folder = root / f"sub-{k:03d}" / "anat"
        folder.mkdir(parents=True)
        brightness = random.uniform(50, 200, (8, 10, 8)).astype(np.float32)
        nibabel.save(nibabel.Nifti1Image(brightness, np.eye(4)), folder / f"sub-{k:03d}_T1w.nii.gz")
        rows.append(f"sub-{k:03d}\t{random.uniform(20, 80):.1f}\t{random.uniform(1e6, 2e6):.0f}")
    (root / "participants.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")


@pytest.fixture(scope="module")
def evaluated(runs):
    """Both classifiers in their default folders, one at two radii and one at the main one; what was printed."""
    printed = {}
    for name, radii in (
        ("cp", ["--epsilon", "16/255", "--epsilon", "8/255", "--main", "8/255"]),
        ("fc", ["--epsilon", "8/255"]),
    ):
        result = invoke("evaluate", runs / name, *SMALL, *radii, "--device", "cpu", figures=name == "cp")
        assert result.exit_code == 0, f"{result.output} {result.exception!r}"
        printed[name] = result.output
    return printed


def test_an_evaluation_writes_its_files_and_prints_a_verdict(runs, evaluated):
    folder = runs / "cp" / "evaluation"
    assert sorted(path.name for path in folder.iterdir()) == sorted(["outcomes.npz", "evaluation.json", *FIGURES])
    for name in ("outcomes.npz", "evaluation.json", *FIGURES):
        assert str(folder / name) in evaluated["cp"]
        assert (folder / name).stat().st_size > 1000
    record = read_record(folder)
    verdict = record["summary"]["audit"]["verdict"]
    assert verdict.startswith(("GRADIENT MASKING", "No sign of gradient masking"))
    for text in (verdict, "digits, resnet-mini, rtrl-cp: 60 test examples", "worst case per example", "unbounded"):
        assert text in evaluated["cp"]
    accuracy = record["summary"]["clean"]["accuracy"]
    assert f"clean accuracy {accuracy:.2f}" in evaluated["cp"]


def test_the_record_says_what_was_measured(runs, evaluated):
    record = read_record(runs / "cp" / "evaluation")
    assert (record["run"], record["split"], record["settings"]["images"]) == ("cp", "test", 60)
    assert record["settings"]["main"] == "8/255"
    assert record["training"]["net.head"] == "rtrl-cp"
    assert "UCI" in record["data"]["provenance"]
    assert record["environment"]["torch"] == torch.__version__
    summary = record["summary"]
    assert (summary["task"], summary["examples"]) == ("classification", 60)
    rows = Counter((row["protocol"], row["budget"]) for row in summary["attacks"])
    assert [rows["paper", f"{strength}/255"] for strength in (2, 8, 16)] == [3, 3, 3]
    assert [rows["adaptive", f"{strength}/255"] for strength in (2, 8, 16)] == [0, 8 + 2, 8]
    assert rows["adaptive", "unbounded"] == 2
    assert sum(rows.values()) == 9 + 8 + 2 * 8 + 2 + 2
    assert [row["budget"] for row in summary["worst_case"]] == ["8/255", "16/255"]
    assert [(row["level"], row["draws"]) for row in summary["noise"]] == [(level, 2) for level in (16, 8, 4, 2, 1)]
    assert len(summary["audit"]["checks"]) == 9


def test_the_clean_accuracy_is_that_of_the_run_on_the_same_images(runs, evaluated):
    outcomes = read_outcomes(runs / "fc" / "evaluation")
    lines = (runs / "fc" / "predictions.csv").read_text().splitlines()
    keys = lines[0].split(",")
    rows = {row["name"]: row for row in (dict(zip(keys, line.split(","), strict=True)) for line in lines[1:])}
    for k, name in enumerate(outcomes.examples["name"]):
        assert outcomes["clean"]["predicted"][k] == int(rows[name]["predicted"])
        assert outcomes["clean"]["confidence"][k] == pytest.approx(float(rows[name]["confidence"]), abs=1e-4)
        assert outcomes.examples["target"][k] == int(rows[name]["target"])


def test_the_same_command_again_runs_nothing(runs, evaluated):
    folder = runs / "fc" / "evaluation"
    before = (folder / "outcomes.npz").read_bytes()
    with watch_attacks() as calls:
        result = invoke("evaluate", runs / "fc", *SMALL, "--epsilon", "8/255", "--device", "cpu")
    assert calls == []
    assert (folder / "outcomes.npz").read_bytes() == before
    first, again = (text.partition("Wrote:")[0] for text in (evaluated["fc"], result.output))
    assert again == first


def test_more_repeats_run_only_the_new_draws(runs, evaluated, tmp_path):
    shutil.copytree(runs / "fc" / "evaluation", tmp_path / "more")
    before = read_arrays(tmp_path / "more")
    with watch_attacks() as calls:
        evaluate(runs / "fc", tmp_path / "more", *SMALL, "--epsilon", "8/255", "--repeats", 3)
    assert calls == []
    after = read_arrays(tmp_path / "more")
    assert all(np.array_equal(after[name], before[name]) for name in before)
    new = {name.rpartition("/")[0] for name in after if name not in before}
    assert new == {f"noise/gaussian/{level}/2" for level in (16, 8, 4, 2, 1)}


def test_numbers_with_exact_deviations(runs, tmp_path):
    radii = ["--epsilon", 0.05, "--epsilon", 0.1, "--main", 0.1]
    output = evaluate(runs / "numbers", tmp_path / "out", *SMALL, "--mode", "exact", *radii, figures=True)
    record = read_record(tmp_path / "out")
    summary = record["summary"]
    assert (summary["task"], summary["examples"]) == ("regression", 24)
    assert [row["budget"] for row in summary["worst_case"]] == ["0.05", "0.1"]
    kinds = {row["attack"] for row in summary["attacks"] if row["protocol"] == "adaptive"}
    assert {"pgd-absolute", "pgd-increase", "pgd-decrease", "apgd-absolute", "transfer", "square", "random"} <= kinds
    assert not any("ce" in kind.split("-") or "margin" in kind for kind in kinds)
    assert summary["clean"]["coverage_95"] is not None
    assert summary["clean"]["coverage_95_widened"] >= summary["clean"]["coverage_95"]
    assert not any(row["cumulative"] for row in summary["attacks"])
    assert "At ε = 0.1" in summary["audit"]["verdict"]
    assert summary["audit"]["verdict"] in output
    assert "clean mae" in output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        ["outcomes.npz", "evaluation.json", *FIGURES]
    )


def test_several_targets_are_told_one_by_one(tmp_path):
    """Years and cubic millimetres have no common error, and no common residual variance."""
    make_scans(tmp_path / "scans")
    options = {"target": ["age", "volume_mm3"], "validation": 6, "test": 8}
    settings = {"data__name": "nifti", "data__root": str(tmp_path / "scans"), "data__options": options}
    run(tmp_path / "run", net__head="rtrl-cp", run__epochs=1, run__batch=6, **settings)
    noise = ["--noise", "gaussian", "--repeats", 1]
    output = evaluate(tmp_path / "run", tmp_path / "out", *CLEAN, *noise, "--mode", "exact", figures=True)
    summary = read_record(tmp_path / "out")["summary"]
    variances = read_outcomes(tmp_path / "out")["validation"]["extra_variance"]
    assert variances.shape == (2,)
    assert variances[1] > 1e4 * variances[0]
    for row in (summary["clean"], *summary["noise"]):
        age, volume = row["targets"].values()
        assert list(row["targets"]) == ["age", "volume_mm3"]
        assert row["mae"] == pytest.approx((age["mae"] + volume["mae"]) / 2)
        assert age["low"] < age["mae"] < age["high"]
        assert age["width_95_widened"] < 300
        assert age["width_95_widened"] < 1e-2 * volume["width_95_widened"]
    assert re.search(r"clean mae age [\d.]+ \[.*\]; volume_mm3", output)
    assert "widened: by one variance of held-out errors" in output
    assert "No calibration: nobody measured how far off single predictions are; tensor-dropout calibrate RUN" in output
    table = invoke("compare", tmp_path / "out", tmp_path / "out")
    assert "A 0" in table.output
    assert "B 1" in table.output


@pytest.mark.parametrize(("target", "names"), [(None, ["0", "1"]), ("a, b", ["a", "b"])])
def test_a_target_has_one_name_in_all_records(tmp_path, monkeypatch, target, names):
    def load_pairs() -> Data:
        x = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        part = TensorSplit(x, torch.stack([x.mean((1, 2, 3)), x[:, 0, 0, 0]], 1), [str(i) for i in range(40)])
        return Data("pairs", "regression", part, None, part, (1, 8, 8), outputs=2, target=target)

    monkeypatch.setitem(DATASETS, "pairs", Source(__name__, "load_pairs", "", load_pairs))
    run(tmp_path / "run", data__name="pairs", net__head="rtrl-cp", run__epochs=1, run__batch=20)
    evaluate(tmp_path / "run", tmp_path / "out", *CLEAN, "--noise", "none")
    trained = json.loads((tmp_path / "run" / "result.json").read_text("utf-8"))["test"]
    assert list(trained["targets"]) == list(read_record(tmp_path / "out")["summary"]["clean"]["targets"]) == names


def test_one_example_of_a_regression_has_no_interval(runs, tmp_path):
    options = ["--images", 1, "--protocol", "adaptive", "--noise", "gaussian", "--repeats", 2]
    output = evaluate(runs / "numbers", tmp_path / "out", *TINY, *options, "--mode", "exact", figures=True)
    summary = read_record(tmp_path / "out")["summary"]
    for row in (summary["clean"], *summary["attacks"], *summary["noise"], summary["worst_case"][0]["adaptive"]):
        assert (row["low"], row["high"]) == (None, None)
    assert re.search(r"clean mae [\d.]+\n", output)
    assert "nan" not in invoke("compare", tmp_path / "out", tmp_path / "out").output


def test_volumes_of_a_bounded_regression(tmp_path):
    options = {"n": 30, "size": [8, 10, 8], "validation": 6, "test": 6}
    run(tmp_path / "run", data__name="phantom", data__options=options, run__epochs=1, run__batch=6)
    options = ["--noise", "rician,bias_field", "--repeats", 1, "--protocol", "adaptive"]
    evaluate(tmp_path / "run", tmp_path / "out", *TINY, *options)
    summary = read_record(tmp_path / "out")["summary"]
    assert {row["corruption"] for row in summary["noise"]} == {"rician", "bias_field"}
    assert summary["worst_case"][0]["adaptive"]["mae"] >= summary["clean"]["mae"] - 1e-4
    assert "coverage_95" not in summary["clean"]  # the mean network has no std


def test_pictures_that_are_read_one_by_one(tmp_path):
    """Two classes: the losses that need three or four are not used."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    random = np.random.default_rng(0)
    for part, n in (("train", 12), ("val", 4)):
        for label, colour in (("dark", 60), ("light", 190)):
            (tmp_path / "pictures" / part / label).mkdir(parents=True)
            for k in range(n):
                pixels = np.clip(colour + random.normal(0, 30, (20, 20, 3)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(tmp_path / "pictures" / part / label / f"{label}{k}.png")
    options = {"size": 16, "resize": 16, "validation": 0}
    settings = {"data__name": "imagefolder", "data__root": str(tmp_path / "pictures"), "data__options": options}
    run(tmp_path / "run", **settings, net__name="resnet-mini", run__epochs=1, run__batch=6)
    evaluate(tmp_path / "run", tmp_path / "out", *TINY, "--twin-epochs", 1)
    summary = read_record(tmp_path / "out")["summary"]
    losses = {row["attack"]: row["loss"] for row in summary["attacks"] if row["protocol"] == "adaptive"}
    assert (losses["apgd-dlr"], losses["apgd-targeted"]) == ("margin", "targeted_margin")
    assert "transfer" in losses
    assert summary["examples"] == 8
    line = fail("evaluate", tmp_path / "run", *TINY, "--split", "validation", "--out", tmp_path / "other")
    assert "no validation part" in line


def test_a_run_in_float64_is_evaluated_with_a_twin(runs, tmp_path):
    run(tmp_path / "run", net__head="rtrl-cp", run__epochs=1, run__precision="float64")
    options = ["--protocol", "adaptive", "--twin-epochs", 1]
    evaluate(tmp_path / "run", tmp_path / "out", *TINY, *options)
    assert read_record(tmp_path / "out")["summary"]["audit"]["verdict"]


# Options.


def test_the_paper_alone_gives_no_verdict(runs, tmp_path):
    output = evaluate(runs / "cp", tmp_path, *TINY, "--protocol", "paper")
    summary = read_record(tmp_path)["summary"]
    assert {row["protocol"] for row in summary["attacks"]} == {"paper"}
    assert "audit" not in summary
    assert "adaptive" not in summary["worst_case"][0]
    assert "No audit: the paper's attacks alone cannot tell robustness from gradient masking" in output


def test_the_adaptive_protocol_alone(runs, tmp_path):
    output = evaluate(runs / "cp", tmp_path, *TINY, "--protocol", "adaptive")
    summary = read_record(tmp_path)["summary"]
    assert {row["protocol"] for row in summary["attacks"]} == {"adaptive"}
    assert "paper" not in summary["worst_case"][0]
    assert "adaptive ensemble leaves" in summary["audit"]["verdict"]
    assert "not run" in output


def test_no_protocol_and_no_noise_leave_the_clean_images(runs, tmp_path):
    output = evaluate(runs / "cp", tmp_path, *CLEAN, figures=True)
    summary = read_record(tmp_path)["summary"]
    assert (summary["attacks"], summary["worst_case"], summary["noise"]) == ([], [], [])
    assert read_outcomes(tmp_path).names() == ["clean"]
    assert "audit" not in output.lower()
    assert {path.name for path in tmp_path.iterdir()} == {
        "outcomes.npz",
        "evaluation.json",
        "uncertainty.png",
        "uncertainty.svg",
    }


def test_monte_carlo_prediction(runs, tmp_path):
    evaluate(runs / "cp", tmp_path, *TINY, "--protocol", "adaptive", "--mode", "sample", "--samples", 4)
    record = read_record(tmp_path)
    assert record["identity"]["samples"] == 4
    rows = {row["attack"]: row for row in record["summary"]["attacks"] if row["budget"] == "0.1"}
    assert rows["pgd-ce"]["eot"] == 16
    assert rows["pgd-ce-single"]["eot"] == 1
    (check,) = [check for check in record["summary"]["audit"]["checks"] if check["name"] == "randomness"]
    assert "two passes differ" in check["finding"]


def test_masks_that_mostly_keep_everything_are_met_with_an_average(tmp_path):
    """Of "nested" at θ = 0.9 two masks are alike four times of five, whatever --mode is."""
    run(tmp_path / "run", net__head="rtrl-cp", net__law="nested", net__theta=0.9, run__epochs=1)
    for mode in ("sample", "exact"):
        options = ["--mode", mode, "--samples", 4, "--protocol", "adaptive"]
        evaluate(tmp_path / "run", tmp_path / mode, *TINY, *options)
        rows = {row["attack"]: row for row in read_record(tmp_path / mode)["summary"]["attacks"]}
        assert (rows["pgd-ce"]["eot"], rows["pgd-ce-single"]["eot"]) == (16, 1)


def test_exact_prediction_of_classes(runs, tmp_path):
    evaluate(runs / "cp", tmp_path, *CLEAN, "--mode", "exact", "--noise", "gaussian", "--repeats", 1)
    assert read_record(tmp_path)["title"].endswith("prediction: exact")


def test_modes_and_ensembles_have_default_folders_of_their_own(runs, tmp_path):
    for name in ("cp", "fc"):
        shutil.copytree(runs / name, tmp_path / name, ignore=shutil.ignore_patterns("evaluation*"))
    commands = {
        "evaluation": [],
        "evaluation-sample": ["--mode", "sample"],
        "evaluation-ensemble": ["--ensemble", tmp_path / "fc"],
        "evaluation-exact-ensemble": ["--mode", "exact", "--ensemble", runs / "cp"],
    }
    for folder, options in commands.items():
        assert invoke("evaluate", tmp_path / "cp", *CLEAN, *options).exit_code == 0
        assert (tmp_path / "cp" / folder / "evaluation.json").is_file()
    found = [path.name for path in (tmp_path / "cp").glob("evaluation*")]
    assert sorted(found) == sorted(commands)


def test_an_ensemble_averages_probabilities(runs, tmp_path):
    evaluate(runs / "cp", tmp_path / "both", *CLEAN, "--ensemble", runs / "fc")
    assert len(read_record(tmp_path / "both")["identity"]["networks"]) == 2
    assert "ensemble of 2" in read_record(tmp_path / "both")["title"]
    for name in ("cp", "fc"):
        evaluate(runs / name, tmp_path / name, *CLEAN)
    both, cp, fc = (read_arrays(tmp_path / name) for name in ("both", "cp", "fc"))
    mean = (np.exp(-cp["clean/nll"].astype(float)) + np.exp(-fc["clean/nll"].astype(float))) / 2
    np.testing.assert_allclose(np.exp(-both["clean/nll"].astype(float)), mean, atol=1e-6)


def test_a_twin_that_is_given_is_used(runs, tmp_path):
    options = ["--protocol", "adaptive", "--twin", runs / "fc"]
    with watch_attacks() as calls:
        evaluate(runs / "cp", tmp_path, *TINY, *options)
    assert ("Transfer", "transfer-pgd", 0.1) in calls
    assert read_record(tmp_path)["identity"]["twin"] != read_record(tmp_path)["identity"]["networks"][0]


def test_noise_by_name_and_all_of_it(runs, tmp_path):
    evaluate(runs / "cp", tmp_path / "two", *CLEAN, "--noise", "gaussian, blur", "--repeats", 2)
    rows = read_record(tmp_path / "two")["summary"]["noise"]
    draws = {row["corruption"]: row["draws"] for row in rows}
    assert draws == {"gaussian": 2, "blur": 1}  # a blur draws nothing
    output = evaluate(runs / "cp", tmp_path / "all", *CLEAN, "--noise", "all", "--repeats", 1)
    found = list(dict.fromkeys(row["corruption"] for row in read_record(tmp_path / "all")["summary"]["noise"]))
    assert "salt_and_pepper" in found
    assert not {"rician", "bias_field"} & set(found)
    assert all(name in output for name in found)
    numbers = [*CLEAN, "--noise", "all", "--repeats", 1]
    evaluate(runs / "numbers", tmp_path / "numbers", *numbers)
    found = {row["corruption"] for row in read_record(tmp_path / "numbers")["summary"]["noise"]}
    assert found == {"gaussian", "blur", "pixelate", "contrast"}  # without bounds


def test_radii_and_the_main_one(runs, tmp_path):
    options = ["--epsilon", 0.2, "--epsilon", 0.05, "--main", 0.2, "--protocol", "adaptive"]
    evaluate(runs / "cp", tmp_path, *(part for part in TINY if part not in ("--epsilon", 0.1)), *options)
    record = read_record(tmp_path)
    assert record["settings"]["main"] == "0.2"
    assert [row["budget"] for row in record["summary"]["worst_case"]] == ["0.05", "0.2"]
    assert "At ε = 0.2" in record["summary"]["audit"]["verdict"]
    assert [row["budget"] for row in record["summary"]["attacks"] if row["attack"] == "fgsm"] == ["0.2"]


def test_euclidean_balls(runs, tmp_path):
    evaluate(runs / "cp", tmp_path, *TINY, "--norm", "l2", "--protocol", "adaptive", "--twin", runs / "fc")
    rows = {row["attack"]: row for row in read_record(tmp_path)["summary"]["attacks"]}
    assert "square" not in rows
    assert {name: row["norm"] for name, row in rows.items()} == dict.fromkeys(rows, "l2")
    assert rows["pgd-ce"]["epsilon"] == pytest.approx(8)  # without a bound: the diagonal of 64 pixels in [0, 1]


def test_a_verdict_does_not_set_two_norms_side_by_side(runs, tmp_path):
    """The paper's balls are of the maximum norm: at the same number, a Euclidean ball is far smaller."""
    evaluate(runs / "cp", tmp_path, *TINY, "--norm", "l2")
    assert "the paper's attacks leave" not in read_record(tmp_path)["summary"]["audit"]["verdict"]


def test_the_validation_part(runs, tmp_path):
    output = evaluate(runs / "cp", tmp_path, *CLEAN, "--split", "validation")
    assert "12 validation examples" in output
    names = read_outcomes(tmp_path).examples["name"].tolist()
    assert set(names) <= set(load_data("digits").validation.names)
    evaluate(runs / "numbers", tmp_path / "numbers", *CLEAN, "--split", "validation", "--mode", "exact")
    assert "validation" not in read_outcomes(tmp_path / "numbers")  # a residual is not fitted on what is reported


def test_help_has_an_example():
    for command in ("evaluate", "compare"):
        output = invoke(command, "--help").output
        assert "For example" in output
        assert f"tensor-dropout {command} out/runs/digits/rtrl-cp-seed0" in output


# Interruptions.

CUT = ["--images", 12, "--steps", 2, "--queries", 4, "--twin-epochs", 1, "--noise", "gaussian", "--repeats", 1]
CUT += ["--epsilon", 0.1, "--epsilon", 0.2, "--protocol", "adaptive"]


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    """An evaluation without an interruption, and the attacks that it called."""
    folder = tmp_path_factory.mktemp("whole")
    with watch_attacks() as calls:
        evaluate(runs / "cp", folder, *CUT)
    return folder, calls


@pytest.mark.parametrize("place", ["third", "transfer", "after the twin"])
def test_an_interrupted_evaluation_goes_on(runs, whole, tmp_path, place):
    expected, every = whole
    kinds = [kind for kind, _, _ in every]
    first = kinds.index("Transfer") + 1
    at = {"third": 3, "transfer": first, "after the twin": kinds.index("Square") + 1}[place]
    command = ["evaluate", runs / "cp", "--device", "cpu", *CUT, "--out", tmp_path / "out"]
    with watch_attacks(interrupt_at=at) as calls:
        result = invoke(*command)
    assert result.exit_code == 130
    assert result.output.splitlines() == ["evaluate: interrupted; finished parts are kept; the same command goes on"]
    assert calls == every[:at]
    assert find_leftovers(tmp_path) == [str(tmp_path / "out")]
    assert not (tmp_path / "out" / "evaluation.json").exists()
    kept = read_arrays(tmp_path / "out")
    theirs = read_arrays(expected)
    assert 0 < len(kept) < len(theirs)
    assert [name for name in kept if not np.array_equal(kept[name], theirs[name])] == []
    with watch_attacks() as calls:
        assert invoke(*command).exit_code == 0
    assert calls == every[at - 1 :]
    assert_equal_evaluations(tmp_path / "out", expected)


def test_interrupted_twice_in_the_noise(runs, whole, tmp_path):
    from tensor_dropout.robustness.noise import CORRUPTIONS, add_gaussian

    expected, every = whole
    command = ["evaluate", runs / "cp", "--device", "cpu", *CUT, "--out", tmp_path / "out"]
    drawn = []

    def interrupt(x, snr, generator):
        drawn.append(snr)
        if len(drawn) in (2, 5):
            raise KeyboardInterrupt
        return add_gaussian(x, snr, generator)

    family = replace(CORRUPTIONS["gaussian"], function=interrupt)
    with watch_attacks() as calls, patch.dict(CORRUPTIONS, gaussian=family):
        assert [invoke(*command).exit_code for _ in range(3)] == [130, 130, 0]
    assert calls == every
    assert len(drawn) == 5 + 2
    assert_equal_evaluations(tmp_path / "out", expected)


def test_a_signal_in_a_process_of_its_own(runs, tmp_path, capfd):
    out = tmp_path / "out"
    options = ["--images", 200, "--steps", 200, "--queries", 5000, "--twin-epochs", 50, "--device", "cpu"]
    child = fork(cli.app, [str(part) for part in ("evaluate", runs / "fc", *options, "--out", out)])
    deadline = time.monotonic() + 60
    while not (out / "outcomes.npz").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(child, signal.SIGINT)
    assert wait(child) == 130
    errors = capfd.readouterr().err
    assert "evaluate: interrupted; finished parts are kept; the same command goes on" in errors
    assert "Traceback" not in errors
    assert find_leftovers(out) == []
    assert "clean" in read_outcomes(out)
    assert not (out / "evaluation.json").exists()


def test_a_disk_that_is_full_leaves_what_was_there(runs, tmp_path):
    """The part that could not be written is lost, those before it are whole, and nothing half-written stays."""
    evaluate(runs / "cp", tmp_path / "out", *CLEAN)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def fill(file, **arrays):
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with patch.object(np, "savez_compressed", fill):
        line = fail("evaluate", runs / "cp", *CLEAN, "--noise", "blur", "--out", tmp_path / "out")
    assert "No space left on device" in line
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


# A folder that is used again.


def test_the_folder_of_another_network_is_refused(runs, tmp_path):
    evaluate(runs / "cp", tmp_path, *CLEAN)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for other in (
        [runs / "fc"],
        [runs / "cp", "--mode", "exact"],
        [runs / "cp", "--images", 11],
        [runs / "cp", "--seed", 1],
        [runs / "cp", "--split", "validation"],
        [runs / "cp", "--ensemble", runs / "fc"],
    ):
        line = fail("evaluate", other[0], *CLEAN, *other[1:], "--out", tmp_path)
        assert f"{tmp_path} holds an evaluation with" in line
        assert "--out" in line
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def damage(path, how):
    whole = path.read_bytes()
    if how == "header":
        arrays = read_arrays(path.parent)
        np.savez_compressed(path, header=np.array("{"), **arrays)
    elif how == "no header":
        np.savez_compressed(path, **read_arrays(path.parent))
    elif how == "another JSON":
        np.savez_compressed(path, header=np.array("[]"), **read_arrays(path.parent))
    else:
        middle = len(whole) // 2
        flipped = bytearray(whole)
        for k in range(40):
            flipped[middle + k] ^= 255
        files = {"empty": b"", "text": b"no archive", "cut": whole[:middle], "flipped": bytes(flipped)}
        path.write_bytes(files[how])


@pytest.mark.parametrize("how", ["empty", "text", "cut", "flipped", "header", "no header", "another JSON"])
def test_damaged_outcomes_are_refused(runs, evaluated, tmp_path, how):
    shutil.copytree(runs / "cp" / "evaluation", tmp_path / "out")
    damage(tmp_path / "out" / "outcomes.npz", how)
    before = (tmp_path / "out" / "outcomes.npz").read_bytes()
    for command in (
        ["evaluate", runs / "cp", *SMALL, "--out", tmp_path / "out"],
        ["compare", tmp_path / "out", runs / "fc"],
    ):
        line = fail(*command)
        assert str(tmp_path / "out" / "outcomes.npz") in line
        assert "cannot be read" in line
    assert (tmp_path / "out" / "outcomes.npz").read_bytes() == before
    assert find_leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (["--norm", "linf"], ["--norm", "l2"]),
        (["--steps", 1], ["--steps", 4]),
        (["--twin", "cp"], ["--twin", "fc"]),
        (["--queries", 2], ["--queries", 40]),
    ],
    ids=["norm", "steps", "twin", "queries"],
)
def test_other_options_in_the_same_folder_are_refused(runs, tmp_path, first, second):
    """Outcomes of other options must not be mixed into a record."""
    first, second = ([runs / part if part in ("cp", "fc") else part for part in own] for own in (first, second))
    options = [*TINY, "--images", 24, "--protocol", "adaptive", "--twin", runs / "fc"]
    evaluate(runs / "cp", tmp_path, *options, *first)
    before = (tmp_path / "outcomes.npz").read_bytes()
    message = fail("evaluate", runs / "cp", *options, *second, "--out", tmp_path)
    assert f"holds an evaluation with {first[0].removeprefix('--')}=" in message
    assert "choose another folder with --out" in message
    assert (tmp_path / "outcomes.npz").read_bytes() == before


def test_no_verdict_on_a_radius_that_was_not_attacked(runs, tmp_path):
    evaluate(runs / "cp", tmp_path, *TINY, "--protocol", "adaptive")
    output = evaluate(runs / "cp", tmp_path, *CLEAN, "--epsilon", 0.3, "--main", 0.3, "--noise", "blur")
    assert "No sign of gradient masking" not in output


def test_a_radius_written_as_on_the_papers_curve(runs, tmp_path):
    """8e-3 is also a point of the FGSM curve: nothing runs twice, and its columns are shown."""
    options = [*(part for part in TINY if part not in ("--epsilon", 0.1)), "--epsilon", "8e-3"]
    evaluate(runs / "cp", tmp_path, *options)
    with watch_attacks() as calls:
        output = evaluate(runs / "cp", tmp_path, *options)
    assert calls == []
    heads = [line for line in output.splitlines() if line.startswith("┃ attack")]
    assert len(heads) == 2
    assert all("8e-3" in head for head in heads)
    assert not any(" 16e-3" in head for head in heads)


# Bad input.


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--protocol", "strong"], ["protocol", "'paper', 'adaptive', 'both' or 'none'", "'strong'"]),
        (["--norm", "l3"], ["norm", "linf", "l2", "'l3'"]),
        (["--norm", "l3", "--protocol", "paper"], ["norm", "linf", "l2", "'l3'"]),
        (["--noise", "rain"], ["no noise 'rain'", "gaussian", "all and none"]),
        (["--noise", "gaussian,rain"], ["no noise 'rain'"]),
        (["--noise", ""], ["no noise ''"]),
        (["--mode", "median"], ["'mean', 'sample' or 'exact'", "'median'"]),
        (["--split", "train"], ["test or validation", "'train'"]),
        (["--epsilon", "-0.1"], ["positive number", "8/255", "'-0.1'"]),
        (["--epsilon", "0"], ["positive number", "'0'"]),
        (["--epsilon", "0/255"], ["positive number", "'0/255'"]),
        (["--epsilon", "8/0"], ["positive number", "'8/0'"]),
        (["--epsilon", "big"], ["positive number", "'big'"]),
        (["--epsilon", "nan"], ["positive number", "'nan'"]),
        (["--epsilon", "inf"], ["positive number", "'inf'"]),
        (["--epsilon", "0.2", "--epsilon", "0.2"], ["different radii", "0.2, 0.2"]),
        (["--epsilon", "0.2", "--epsilon", "1/5"], ["different radii"]),
        (["--main", "0.3"], ["main radius", "0.1", "'0.3'"]),
        (["--main", "big"], ["main radius", "'big'"]),
        (["--device", "tpu"], ["tpu"]),
    ],
)
def test_bad_options_are_one_sentence(runs, tmp_path, options, parts):
    line = fail("evaluate", runs / "cp", *TINY, *options, "--out", tmp_path / "out")
    assert [part for part in parts if part not in line] == [], line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--images", "--steps", "--queries", "--repeats", "--samples", "--batch"])
def test_numbers_below_1_are_bad_usage(runs, tmp_path, option):
    assert invoke("evaluate", runs / "cp", *TINY, option, 0, "--out", tmp_path / "out").exit_code == 2
    assert not (tmp_path / "out").exists()


def test_runs_that_cannot_be_evaluated(runs, tmp_path):
    assert "no run.json" in fail("evaluate", tmp_path / "nowhere", *TINY)
    shutil.copytree(runs / "cp", tmp_path / "cut", ignore=shutil.ignore_patterns("evaluation*"))
    (tmp_path / "cut" / "result.json").unlink()
    assert "not the folder of a finished run: it has no result.json" in fail("evaluate", tmp_path / "cut", *TINY)
    for option in ("--ensemble", "--twin"):
        line = fail("evaluate", runs / "cp", *TINY, option, tmp_path / "cut", "--out", tmp_path / "out")
        assert f"{tmp_path / 'cut'} is not the folder of a finished run" in line
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cut" / "evaluation").exists()


@pytest.mark.parametrize("name", ["run.json", "result.json", "model.safetensors"])
@pytest.mark.parametrize("content", ["", "{", "{}"])
def test_a_damaged_run_is_named(runs, tmp_path, name, content):
    shutil.copytree(runs / "cp", tmp_path / "run", ignore=shutil.ignore_patterns("evaluation*"))
    (tmp_path / "run" / name).write_text(content)
    if (name, content) == ("result.json", "{}"):
        return  # nothing of it is needed
    line = fail("evaluate", tmp_path / "run", *TINY)
    assert str(tmp_path / "run") in line
    assert not (tmp_path / "run" / "evaluation").exists()


def test_a_network_without_masks_has_no_exact_moments(runs, tmp_path):
    line = fail("evaluate", runs / "fc", *TINY, "--mode", "exact", "--out", tmp_path / "out")
    assert "no tensor regression layer with dropout" in line
    assert "exact" in line
    assert not (tmp_path / "out").exists()


def test_noise_that_the_data_cannot_have_is_refused_at_once(runs, tmp_path):
    with watch_attacks() as calls:
        line = fail("evaluate", runs / "numbers", *TINY, "--noise", "salt_and_pepper", "--out", tmp_path / "out")
    assert "salt_and_pepper" in line
    assert "bounds" in line
    assert calls == []
    assert not (tmp_path / "out").exists()


def test_a_twin_or_member_for_other_inputs(runs, tmp_path):
    options = {"shape": [2, 8, 8], "n": 60, "rank": 2}
    run(tmp_path / "other", data__name="synthetic", data__options=options, run__epochs=1, run__batch=20)
    for option in ("--twin", "--ensemble"):
        line = fail("evaluate", runs / "cp", *TINY, option, tmp_path / "other", "--out", tmp_path / "out")
        for part in (str(tmp_path / "other"), "(2, 8, 8)", "(1, 8, 8)"):
            assert part in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--twin", "--ensemble"])
def test_a_twin_or_member_with_other_outputs(runs, tmp_path, option):
    """Ten classes and one number, on inputs of the same shape: refused by name before anything is attacked."""
    with watch_attacks() as calls:
        line = fail("evaluate", runs / "cp", *TINY, option, runs / "numbers", "--out", tmp_path / "out")
    assert str(runs / "numbers") in line
    assert calls == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("which", ["all", "one"])
def test_a_network_of_nan_gives_no_number(runs, tmp_path, which):
    shutil.copytree(runs / "fc", tmp_path / "run", ignore=shutil.ignore_patterns("evaluation*"))
    path = tmp_path / "run" / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    weights = load_file(path)
    for name, values in weights.items():
        if values.is_floating_point() and (which == "all" or name == list(weights)[-1]):
            weights[name] = torch.full_like(values, math.nan)
    save_file(weights, path, metadata)
    result = invoke("evaluate", tmp_path / "run", *TINY, "--noise", "gaussian")
    assert result.exit_code == 1
    assert "NaN" in result.output
    assert "accuracy" not in result.output
    assert len(result.output.splitlines()) == 1
    assert not (tmp_path / "run" / "evaluation").exists()


# Comparison.


@pytest.fixture
def stored(runs, evaluated, tmp_path):
    """The two runs without their networks: only what was stored."""
    for name in ("cp", "fc"):
        shutil.copytree(runs / name, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()
    return tmp_path


def read_pairs(path):
    """Pairs of a comparison: the rows of each; a NaN or an infinity is an error."""
    record = json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)
    return [pair["parts"] for pair in record["pairs"]]


def test_two_runs_are_compared_from_stored_files(stored):
    with watch_attacks() as calls:
        result = invoke("compare", stored / "cp", stored / "fc", "-o", stored / "new" / "compared.json")
    assert result.exit_code == 0, repr(result.exception)
    assert calls == []
    assert str(stored / "new" / "compared.json") in result.output
    ((pair,), uncertainty) = json.loads((stored / "new" / "compared.json").read_text()).values()
    assert (pair["a"], pair["b"]) == (str(stored / "cp"), str(stored / "fc"))
    ours, theirs = (read_outcomes(stored / name / "evaluation") for name in ("cp", "fc"))
    single = {name: [name] for name in ours.names() if name in theirs and name.startswith(("paper", "adaptive"))}
    drawn = {f"noise/gaussian/{k}": [f"noise/gaussian/{k}/{draw}" for draw in (0, 1)] for k in (16, 8, 4, 2, 1)}
    rows = [row for row in pair["parts"] if "/all/" not in row["part"]]
    assert [row["part"] for row in rows] == ["clean", *single, *drawn]
    assert {"paper/pgd/16/255", "adaptive/transfer/8/255"} <= set(single)
    worst = [row for row in pair["parts"] if "/all/" in row["part"]]
    assert {"paper/all/8/255", "adaptive/all/8/255"} <= {row["part"] for row in worst}
    for row in worst:
        protocol, _, budget = row["part"].split("/", 2)
        planned = ensemble("classification", budget) + [f"paper/{name}/{budget}" for name in ("fgsm", "bim", "pgd")]
        names = [name for name in planned if name in single and name.startswith(protocol)]
        for key, part in (("a", ours), ("b", theirs)):
            right = np.all([part[name]["predicted"] == part[name]["target"] for name in names], 0)
            assert row[key] == pytest.approx(100 * right.mean())
    for row in rows:
        names = drawn.get(row["part"], [row["part"]])
        right, other = (
            np.stack([part[name]["predicted"] == part[name]["target"] for name in names]) for part in (ours, theirs)
        )
        assert (row["a"], row["b"]) == pytest.approx((100 * right.mean(), 100 * other.mean()))
        assert row["difference"] == pytest.approx(row["a"] - row["b"])
        assert row["low"] <= row["difference"] <= row["high"]
        assert row["draws"] == len(names)
        assert f"{row['difference']:+.2f}" in result.output
        if len(names) > 1:
            low, high = intervals.bootstrap_interval(100.0 * right - 100.0 * other)
            assert (row["low"], row["high"], row["p_value"]) == (low, high, None)
            continue
        assert (row["only_a"], row["only_b"]) == (int((right & ~other).sum()), int((other & ~right).sum()))
        assert row["p_value"] == pytest.approx(toss_coins(row["only_a"], row["only_b"]))
        found = intervals.compare(ours[row["part"]], theirs[row["part"]])
        assert found._asdict() == {key: row[key] for key in found._fields}
    for name in ("cp", "fc"):
        summary = read_record(stored / name / "evaluation")["summary"]
        rows = uncertainty[str(stored / name)]
        assert [row["corruption"] for row in rows] == ["none", *["gaussian"] * 5]
        for row, expected in zip(rows, [summary["clean"], *summary["noise"]], strict=True):
            assert {key: row[key] for key in expected} == expected


def test_several_evaluations_are_compared_with_the_first(runs, tmp_path):
    folders = [tmp_path / name for name in ("mean", "exact", "ensemble")]
    for folder, options in zip(folders, ([], ["--mode", "exact"], ["--ensemble", runs / "fc"]), strict=True):
        evaluate(runs / "cp", folder, *CLEAN, *options)
    result = invoke("compare", *folders, "-o", tmp_path / "c.json")
    assert result.exit_code == 0, repr(result.exception)
    record = json.loads((tmp_path / "c.json").read_text())
    assert [(pair["a"], pair["b"]) for pair in record["pairs"]] == [
        (str(folders[0]), str(folders[1])),
        (str(folders[0]), str(folders[2])),
    ]
    assert list(record["uncertainty"]) == [str(folder) for folder in folders]


def toss_coins(a, b):
    """McNemar's exact two-sided p-value, from whole numbers."""
    n = a + b
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(min(a, b) + 1)) / 2**n)


def test_the_interval_is_that_of_a_paired_bootstrap(stored):
    invoke("compare", stored / "cp", stored / "fc", "-o", stored / "c.json")
    row = read_pairs(stored / "c.json")[0][0]
    ours, theirs = (read_outcomes(stored / name / "evaluation")["clean"] for name in ("cp", "fc"))
    differences = 100.0 * (ours["predicted"] == ours["target"]) - 100.0 * (theirs["predicted"] == theirs["target"])
    random = np.random.default_rng(5)
    means = [random.choice(differences, len(differences)).mean() for _ in range(4000)]
    assert (row["low"], row["high"]) == pytest.approx(np.quantile(means, (0.025, 0.975)), abs=2.1)


def test_the_order_turns_the_sign(stored):
    rows = []
    for first, second in (("cp", "fc"), ("fc", "cp")):
        invoke("compare", stored / first / "evaluation", stored / second / "evaluation", "-o", stored / "c.json")
        rows += read_pairs(stored / "c.json")
    for ours, theirs in zip(*rows, strict=True):
        assert ours["difference"] == pytest.approx(-theirs["difference"])
        assert ours["p_value"] == theirs["p_value"]
        assert (ours.get("only_a"), ours.get("only_b")) == (theirs.get("only_b"), theirs.get("only_a"))


def test_numbers_are_compared_by_their_errors(runs, tmp_path):
    for name in ("numbers", "numbers-fc"):
        evaluate(runs / name, tmp_path / name, *TINY, "--protocol", "paper")
    result = invoke("compare", tmp_path / "numbers", tmp_path / "numbers-fc", "-o", tmp_path / "c.json")
    assert result.exit_code == 0, repr(result.exception)
    (rows,) = read_pairs(tmp_path / "c.json")
    assert "validation" not in [row["part"] for row in rows]
    ours, theirs = (read_arrays(tmp_path / name) for name in ("numbers", "numbers-fc"))
    for row in rows:
        protocol, attack, budget = f"{row['part']}//".split("/", 2)
        attacks = ("fgsm", "bim", "pgd") if attack == "all" else (attack,)
        names = ["clean"] if protocol == "clean" else [f"{protocol}/{each}/{budget.rstrip('/')}" for each in attacks]
        names = [row["part"]] if protocol == "noise" else names
        errors = [
            np.max([np.abs(part[f"{name}/output"][:, 0].astype(float) - ours["target"]) for name in names], 0).mean()
            for part in (ours, theirs)
        ]
        assert (row["a"], row["b"]) == pytest.approx(errors)
        assert row["difference"] == pytest.approx(errors[0] - errors[1])
        assert 0 < row["p_value"] <= 1


def test_folders_with_brackets_are_shown_as_they_are(stored, monkeypatch):
    (stored / "cp").rename(stored / "cp[old]")
    monkeypatch.chdir(stored)
    assert "cp[old]" in invoke("compare", "cp[old]", "fc").output


def test_what_cannot_be_compared(runs, stored):
    evaluate(runs / "fc", stored / "others", *CLEAN, "--images", 60, "--seed", 1)
    line = fail("compare", stored / "cp", stored / "others", "-o", stored / "c.json")
    for part in ("not of the same examples", "--images", "--split", "--seed"):
        assert part in line
    assert "tensor-dropout evaluate" in fail("compare", stored / "cp", stored / "nowhere")
    shutil.rmtree(stored / "fc" / "evaluation")
    assert "holds no evaluation" in fail("compare", stored / "fc", stored / "cp")
    assert "two evaluations at least" in fail("compare", stored / "cp")
    assert invoke("compare").exit_code == 2
    assert not (stored / "c.json").exists()


def test_attacks_of_different_strength_are_not_compared(runs, tmp_path):
    """One step against one network and ten against another say nothing about the networks."""
    for name, steps in (("cp", 1), ("fc", 10)):
        evaluate(runs / name, tmp_path / name, *TINY, "--protocol", "adaptive", "--steps", steps)
    result = invoke("compare", tmp_path / "cp", tmp_path / "fc", "-o", tmp_path / "c.json")
    if result.exit_code == 0:
        parts = [row["part"] for row in read_pairs(tmp_path / "c.json")[0]]
        assert "clean" in parts
        assert "adaptive/pgd-ce/0.1" not in parts
