"""tensor-dropout calibrate: a run learns how far off it is, and predict says so."""

from __future__ import annotations

import csv
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from typer.testing import CliRunner

import tensor_dropout as td
from bare_spread import check
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.evaluation.calibrating import FILE
from tensor_dropout_lab.training.runs import data_options

pytest.importorskip("matplotlib")
SMALL = ["--epochs", 2, "--batch", 16, "--device", "cpu", "--set", "run.threads=1"]


def invoke(*arguments, code=0):
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.output} {result.exception!r}"
    return result.output if code == 0 else result.stderr


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on classes, calibrated on its validation part."""
    run = tmp_path_factory.mktemp("digits") / "run"
    invoke("train", "--data", "digits", "--head", "rtrl-cp", "--net", "resnet-mini", *SMALL, "--out", run)
    return run, invoke("calibrate", run)


@pytest.fixture(scope="module")
def spots(tmp_path_factory):
    """Pictures with a bright spot, several of each animal; a run on where it is, with a number beside it."""
    root = tmp_path_factory.mktemp("spots")
    (root / "images").mkdir()
    rng = np.random.default_rng(0)
    rows = [["file", "group", "x0", "y0", "age"]]
    for number in range(96):
        x, y = rng.integers(2, 14, 2)
        image = rng.integers(0, 40, (16, 16, 3), dtype=np.uint8)
        image[y - 2 : y + 2, x - 2 : x + 2] = 220
        Image.fromarray(image).save(root / "images" / f"{number:02d}.png")
        rows.append([f"{number:02d}.png", f"animal{number // 3}", x / 16, y / 16, 20 + x])
    (root / "points.csv").write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    run = root / "run"
    net = ["--net", "resnet-mini", "--head", "rtrl-cp", "--set", "data.options.validation=0.4"]
    invoke("train", "--data", "table", "--root", root, *net, *SMALL, "--out", run)
    return root, run


def test_classes_get_a_temperature_and_sets(digits):
    run, said = digits
    assert re.search(r"Calibrated on \d+ validation examples of digits", said)
    assert re.search(r"Temperature \d", said)
    assert str(run / FILE) in said
    calibration = td.load_calibration(run / FILE)
    assert calibration.task == "classification"
    assert calibration.about["examples"] == len(calibration.errors.scores) > 50


def test_numbers_get_intervals_by_group(spots, tmp_path):
    root, run = spots[0], shutil.copytree(spots[1], tmp_path / "run")
    picture = root / "images" / "03.png"
    before = invoke("predict", picture, "--model", run, "-o", tmp_path / "before")
    assert "No calibration: nobody measured how far off these are; tensor-dropout calibrate does" in before
    assert before.count(", no interval (masks ") == 3
    assert list(json.loads((tmp_path / "before" / "03.json").read_text())["prediction"]) == ["x0", "y0", "age"]
    said = invoke("calibrate", run)
    groups = int(re.search(r"examples in (\d+) groups of table", said)[1])
    assert 9 <= groups <= 16
    assert "90 % intervals: x0 ± " in said
    after = invoke("predict", picture, "--model", run, "-o", tmp_path / "after")
    assert "±" not in after
    assert after.count(", 90 % interval ") == 3
    assert "90 % intervals and sets: as " in after
    record = json.loads((tmp_path / "after" / "03.json").read_text())
    for name, (low, high) in record["interval"].items():
        assert low < record["prediction"][name] < high
        assert record["masks_std"][name] < (high - low) / 2
    narrow = tmp_path / "narrow.csv"
    invoke("predict", root / "images", "--model", run, "-o", narrow, "--coverage", "0.5")
    with narrow.open() as file:
        rows = list(csv.DictReader(file))
    names = ("x0", "y0", "age")
    assert list(rows[0]) == ["file", *(f"{name}{end}" for end in ("", "_low", "_high", "_masks") for name in names)]
    low, high = record["interval"]["age"]
    assert float(rows[3]["age_high"]) - float(rows[3]["age_low"]) < high - low
    assert check("\n".join([before, said, after]), tmp_path) == {".csv", ".json"}
    copied = shutil.copytree(run, tmp_path / "copy")
    (copied / FILE).write_bytes(b"damaged")
    refused = invoke("predict", picture, "--model", copied, "-o", tmp_path / "no", code=1)
    assert "is damaged" in refused
    assert "calibrate the run anew (tensor-dropout calibrate RUN), or remove the file" in refused
    assert "99 held-out groups, the calibration has" in invoke(
        "predict", picture, "--model", run, "-o", tmp_path / "no", "--coverage", "0.99", code=1
    )


def test_intervals_are_those_of_the_library(spots, tmp_path):
    """What predict makes of the file follows from what the file holds."""
    run = shutil.copytree(spots[1], tmp_path / "run")
    invoke("calibrate", run)
    calibration = td.load_calibration(run / FILE)
    network = td.load(run / "model.safetensors").eval()
    x = torch.rand(4, 3, 16, 16)
    found = td.predict(network, x, mode="exact", coverage=0.9, calibration=calibration, task="regression")
    assert bool((found.low < found.high).all())
    half = calibration.errors.quantile(0.9).value
    std = calibration.errors.std(found.std.square() if calibration.uses_masks else None, 4)
    torch.testing.assert_close(((found.high - found.low) / 2).double(), half * std, rtol=1e-4, atol=1e-6)


def test_a_calibration_of_another_network_is_refused(digits, spots, tmp_path):
    root, run = spots
    copied = shutil.copytree(run, tmp_path / "run")
    shutil.copy(digits[0] / FILE, copied / FILE)
    refused = invoke("predict", root / "images" / "03.png", "--model", copied, "-o", tmp_path / "out", code=1)
    assert "this calibration was made for other weights: of another network" in refused
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_calibrated_is_said(digits, spots, tmp_path):
    assert "--split is test or validation, got 'train'" in invoke("calibrate", digits[0], "--split", "train", code=1)
    assert "Error: " in invoke("calibrate", tmp_path / "none", code=1)
    few = tmp_path / "few"
    net = ["--net", "resnet-mini", "--head", "fc", "--set", "data.options.validation=0.1"]
    invoke("train", "--data", "table", "--root", spots[0], *net, *SMALL, "--out", few)
    said = invoke("calibrate", few, code=1)
    assert re.search(r"\d held-out groups are too few; a 90 % interval takes at least 9 in the validation part", said)
    assert "train with a larger part, --set data.options.validation=0.3" in said
    assert not (few / FILE).exists()


def test_the_command_says_what_it_is_for():
    text = invoke("calibrate", "--help")
    assert "RUN/calibration.safetensors" in text
    assert Path(FILE).name in text


# What evaluate says of it.

CLEAN = ["--protocol", "none", "--noise", "none", "--device", "cpu"]


def evaluate(run, out, *options):
    """What is printed, and the part of the record that is about the calibration."""
    said = invoke("evaluate", run, *CLEAN, *options, "--out", out)
    return said, json.loads((out / "evaluation.json").read_text())["calibration"]


def test_evaluate_tells_what_sets_hold(digits, tmp_path):
    run = digits[0]
    said, found = evaluate(run, tmp_path / "out")
    data = load_data("digits")
    network, calibration = td.load(run / "model.safetensors").eval(), td.load_calibration(run / FILE)
    x, y = data.prepare(data.test.inputs), data.test.targets
    for row in found["levels"]:
        sets = td.predict(network, x, coverage=row["coverage"], calibration=calibration).sets
        assert row["inside"] == pytest.approx(100 * float(sets.gather(1, y[:, None]).double().mean()))
        assert row["size"] == pytest.approx(float(sets.sum(1).double().mean()))
        assert row["low"] < row["inside"] < row["high"]
    assert [row["coverage"] for row in found["levels"]] == [0.5, 0.8, 0.9, 0.95]
    with torch.no_grad():
        losses = [float(F.cross_entropy(network(x) / T, y)) for T in (1.0, calibration.errors.temperature)]
    assert [found[when]["nll"] for when in ("before", "after")] == pytest.approx(losses, rel=1e-4)
    assert found["held_out"] is True
    assert said.index("Calibrated on 360 validation examples of digits") < said.index("calibrated sets")
    assert re.search(r"Temperature [\d.]+: NLL [\d.]+ before, [\d.]+ after; ECE", said)
    shown = invoke("show", tmp_path / "out")
    assert shown.count("calibrated sets") == 1  # from the record alone
    check(said + shown, tmp_path / "out")
    path = tmp_path / "out" / "evaluation.json"
    record = json.loads(path.read_text())
    del record["calibration"]
    path.write_text(json.dumps(record))
    shown = invoke("show", tmp_path / "out")  # a record of before
    assert "No calibration: this record says nothing of it; evaluate the run again." in shown
    assert "clean accuracy" in shown


def test_evaluate_tells_what_intervals_hold_and_the_masks_as_their_part(spots, tmp_path):
    run = shutil.copytree(spots[1], tmp_path / "run")
    said, found = evaluate(run, tmp_path / "before", "--mode", "exact")
    assert found == {"missing": "nobody measured how far off single predictions are; tensor-dropout calibrate RUN does"}
    assert "No calibration: nobody measured how far off single predictions are; tensor-dropout calibrate RUN" in said
    invoke("calibrate", run)
    said, found = evaluate(run, tmp_path / "after", "--mode", "exact", "--noise", "gaussian", "--repeats", 1)
    both = invoke("compare", tmp_path / "after", tmp_path / "before")
    shown = [invoke("show", place) for place in (run, tmp_path / "after")]
    assert "test.width_95 (spread over the masks alone)" in shown[0]
    assert "spread: over masks, draws or members alone, no error" in both
    assert check("\n".join([said, both, *shown]), run, tmp_path / "after") == {".csv", ".json", ".svg"}
    network, calibration = td.load(run / "model.safetensors").eval(), td.load_calibration(run / FILE)
    settings = json.loads((run / "run.json").read_text())["settings"]
    data = load_data("table", root=spots[0], seed=settings["data.seed"], **data_options(settings))
    x = data.prepare(data.test.inputs.float())
    y = data.test.targets
    names = ["x0", "y0", "age"]
    rows = {(row["coverage"], row["target"]): row for row in found["levels"]}
    assert set(rows) >= {(level, name) for level in (0.5, 0.8, 0.9) for name in names}
    for level in (0.5, 0.8, 0.9):
        told = td.predict(network, x, mode="exact", coverage=level, calibration=calibration, task="regression")
        for column, name in enumerate(names):
            inside = (told.low[:, column] <= y[:, column]) & (y[:, column] <= told.high[:, column])
            assert rows[level, name]["inside"] == pytest.approx(100 * float(inside.double().mean()))
            assert rows[level, name]["width"] == pytest.approx(
                float((told.high - told.low)[:, column].mean()), rel=1e-4
            )
    masks = td.predict(network, x, mode="exact", task="regression").std.mean(0)
    assert list(found["masks"].values()) == pytest.approx(masks.tolist(), rel=1e-4)
    places = [
        said.index(text) for text in ("Calibrated on", "calibrated intervals; the masks are their part", "masks,")
    ]
    assert places == sorted(places)
    assert "this very part" not in said
    said, found = evaluate(run, tmp_path / "same", "--split", "validation")
    assert found["held_out"] is False
    assert (
        "They were made on this very part: what they cover of it says nothing of new examples; evaluate on test" in said
    )
    said, found = evaluate(run, tmp_path / "ensemble", "--ensemble", spots[1])
    assert found["missing"].startswith("an ensemble has none")


# One that was made on other data.


def change(path, **about):
    """A calibration that says other things of itself."""
    calibration = td.load_calibration(path)
    td.save_calibration(replace(calibration, about={**calibration.about, **about}), path)


OTHER_DATA = {
    "another data set": ({"data": "faces"}, "data 'faces', the run has 'table'"),
    "other examples": ({"fingerprint": "0123456789abcdef"}, "other examples"),
    "other targets": ({"targets": "x0,y0,weight"}, "targets 'x0,y0,weight', the run has 'x0"),
}


def test_a_calibration_made_on_other_data_is_refused(spots, tmp_path):
    root, run = spots[0], shutil.copytree(spots[1], tmp_path / "run")
    invoke("calibrate", run)
    whole = (run / FILE).read_bytes()
    for about, said in OTHER_DATA.values():
        (run / FILE).write_bytes(whole)
        change(run / FILE, **about)
        for command in (("predict", root / "images" / "03.png", "--model", run), ("evaluate", run, *CLEAN)):
            refused = invoke(*command, "--out", tmp_path / "out", code=1)
            assert f"this calibration was made on other data than those of the run: {said}" in refused
            assert "calibrate the run anew (tensor-dropout calibrate RUN), or remove the file" in refused
            assert not (tmp_path / "out").exists()
    change(run / FILE, data="table", fingerprint=None, targets=None)  # as versions before wrote it
    invoke("predict", root / "images" / "03.png", "--model", run, "--out", tmp_path / "out")


def test_calibrate_refuses_data_of_another_kind(digits, spots, tmp_path):
    root, run = spots
    other = shutil.copytree(root, tmp_path / "other", ignore=shutil.ignore_patterns("run"))
    table = (other / "points.csv").read_text().splitlines()
    (other / "points.csv").write_text("\n".join([table[0], *(f"{row}9" for row in table[1:])]) + "\n")
    refused = invoke("calibrate", run, "--data", other, code=1)
    assert "the data changed since the run in" in refused
    assert "the validation part has other names or targets" in refused
    assert not (run / FILE).exists()
