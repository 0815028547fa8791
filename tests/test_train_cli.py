"""``tensor-dropout train``, ``ls`` and ``predict`` as a user types them."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tensor_dropout as td
from tensor_dropout_lab import cli
from tensor_dropout_lab.data import load_data
from tensor_dropout_lab.locks import lock_folder
from tensor_dropout_lab.prediction_table import format_uncertain
from tensor_dropout_lab.run_records import write_json
from tensor_dropout_lab.training.config import resolve_config
from tensor_dropout_lab.training.runs import RunFolder, data_options, list_runs
from tensor_dropout_lab.training.sampling import Feed, Sampler
from training_runs import read_metrics, read_weights, run_forked

QUIET = ["--device", "cpu", "--set", "run.threads=1"]
FILES = ["config.toml", "metrics.jsonl", "model.safetensors", "predictions.csv", "result.json", "run.json"]


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])


def train(folder, *arguments):
    result = invoke("train", *QUIET, *arguments, "--out", folder)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def fail(*arguments):
    """The one sentence of a command that fails."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    line = result.output.splitlines()[-1]
    assert line.startswith("Error: ")
    return line


def fail_forked(capfd, *arguments):
    """As ``fail``, in a process of its own: what is left of a loader that failed ends with it."""
    assert run_forked(cli.app, [str(argument) for argument in arguments]) == 1
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    line = errors.splitlines()[-1]
    assert line.startswith("Error: ")
    return line


def read_predictions(folder):
    with (folder / "predictions.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_result(folder):
    return json.loads((folder / "result.json").read_text(encoding="utf-8"))


# Digits and phantoms: the two runs in a smaller form.


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "digits"
    return folder, train(folder, "--data", "digits", "--head", "rtrl-cp", "--epochs", 6)


@pytest.fixture(scope="module")
def phantom(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "phantom"
    size = ["--set", "data.options.n=240", "--set", "data.options.size=16,20,16"]
    return folder, train(folder, "--data", "phantom", "--epochs", 12, "--batch", 12, *size)


def test_digits_are_learned(digits):
    folder, output = digits
    result = read_result(folder)
    assert result["test"]["accuracy"] >= 90
    assert f"test: accuracy {result['test']['accuracy']:.4g}" in output
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith((".", "checkpoint-"))) == FILES
    assert all(str(folder / name) in output for name in FILES)


def test_phantoms_are_learned(phantom):
    folder, output = phantom
    result = read_result(folder)["test"]
    assert result["r2"] > 0.3
    assert "SIMULATED" in output


def test_every_test_example_is_in_the_predictions(digits):
    folder, _ = digits
    rows, data = read_predictions(folder), load_data("digits")
    assert [row["name"] for row in rows] == data.test.names
    assert [int(row["target"]) for row in rows] == data.test.targets.tolist()
    accuracy = 100 * np.mean([row["target"] == row["predicted"] for row in rows])
    result = read_result(folder)["test"]
    assert accuracy == pytest.approx(result["accuracy"])
    assert np.mean([float(row["nll"]) for row in rows]) == pytest.approx(result["nll"], abs=1e-5)


def test_the_model_gives_the_predictions(digits):
    folder, _ = digits
    data, network = load_data("digits"), td.load(folder / "model.safetensors").eval()
    with torch.no_grad():
        logits = network(data.prepare(data.test.inputs))
    assert logits.argmax(1).tolist() == [int(row["predicted"]) for row in read_predictions(folder)]
    confidence = logits.softmax(1).amax(1)
    found = torch.tensor([float(row["confidence"]) for row in read_predictions(folder)])
    torch.testing.assert_close(found, confidence, rtol=0, atol=1e-5)


def test_predicted_ages_and_their_deviation(phantom):
    folder, _ = phantom
    rows = read_predictions(folder)
    error = np.mean([abs(float(row["target"]) - float(row["predicted"])) for row in rows])
    assert error == pytest.approx(read_result(folder)["test"]["mae"], rel=1e-4)
    assert all(0 < float(row["masks"]) < 60 for row in rows)


def test_metrics_have_a_line_per_epoch(digits):
    folder, _ = digits
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["validation"] == pytest.approx(read_result(folder)["validation"])
    assert all(0 <= line["accuracy"] <= 100 and line["seconds"] > 0 and line["lr"] > 0 for line in lines)


def test_the_record_says_what_made_it(digits):
    folder, _ = digits
    record = json.loads((folder / "run.json").read_text())
    assert record["settings"]["run.epochs"] == 6
    assert record["data"]["examples"] == {"train": 1077, "validation": 360, "test": 360}
    assert "UCI" in record["data"]["provenance"]
    assert record["environment"]["torch"] == torch.__version__
    assert record["environment"]["tensor_dropout"] == td.__version__
    if (Path(td.__file__).parents[2] / ".git").exists():
        assert len(record["environment"]["commit"]) == 40
        assert isinstance(record["environment"]["dirty"], bool)


DROPPED = {
    "law": "bernoulli",
    "modes": "all",
    "per_sample": False,
    "scaling": "inverted",
    "min_rank": 0,
    "at_test": "mean",
}


@pytest.mark.parametrize(
    ("head", "built"),
    {
        "fc": {},
        "fc+dropout": {"drop_rate": 0.5},
        "fc+low-rank": {"rank": 5},
        "trl-tt": {"rank": [32, 20, 10], "init": "pool"},
        "rtrl-tucker": {"rank": [32, 2, 2, 10], "init": "pool", "theta": 0.9, **DROPPED, "modes": "outer"},
        "rtrl-cp": {"rank": 32, "init": "pool", "theta": 0.9, **DROPPED},
        "trl-tucker+weight-dropout": {"rank": [32, 2, 2, 10], "init": "pool", "theta": 0.9},
    }.items(),
)
def test_the_record_has_the_head_as_it_was_built(tmp_path, head, built):
    train(tmp_path, "--head", head, "--epochs", 1, "--set", "data.options.train_size=64")
    record = json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))
    assert record["head"] == {"name": head, **built}
    assert "net.theta" not in record["settings"]  # what was said identifies a run, not what it came to


def test_the_written_config_is_the_run(digits, phantom, tmp_path):
    for folder, _ in (digits, phantom):
        config = resolve_config(folder / "config.toml")
        settings = json.loads((folder / "run.json").read_text())["settings"]
        assert config.run.epochs == settings["run.epochs"]
        assert config.data.options.get("size") == settings.get("data.options.size")
        (tmp_path / "again.toml").write_text((folder / "config.toml").read_text())
        assert resolve_config(tmp_path / "again.toml") == config
        output = train(folder, folder / "config.toml")  # the same settings: the run is done, nothing is repeated
        assert "test: " in output
        assert "epoch 1/" not in output


def test_a_run_from_the_written_config_is_the_same_run(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train(first, "--epochs", 1, "--head", "rtrl-tucker", "--rank", "8,2,2,5", "--theta", 0.7, "--lr", 0.01)
    train(second, first / "config.toml")
    ours, theirs = read_weights(first), read_weights(second)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_metrics(first) == read_metrics(second)


def test_other_settings_need_another_folder(digits):
    folder, _ = digits
    line = fail("train", "--data", "digits", "--epochs", 7, *QUIET, "--out", folder)
    assert "run.epochs=6" in line
    assert "7" in line
    assert "--out" in line


def test_ls_shows_the_runs(digits, phantom, tmp_path):
    output = invoke("ls", digits[0].parent.parent).output
    accuracy = f"accuracy {read_result(digits[0])['test']['accuracy']:.2f}"
    error = f"mae {read_result(phantom[0])['test']['mae']:.2f}"
    for text in ("digits", "phantom (simulated)", "resnet-mini", "rtrl-cp", "6/6", "12/12", "done", accuracy, error):
        assert text in output
    assert "no runs" in invoke("ls", tmp_path).output
    assert invoke("ls", tmp_path / "nowhere").exit_code == 2


def test_ls_tells_a_run_that_goes_on_from_one_that_was_interrupted(digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(digits[0], folder)
    (folder / "result.json").unlink()
    with lock_folder(folder):
        assert "running" in invoke("ls", tmp_path).output
    assert "running" not in invoke("ls", tmp_path).output


def test_ls_lists_a_record_whose_number_is_none(digits, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(digits[0], folder)
    write_json(folder / "result.json", read_result(folder) | {"test": {"accuracy": "high"}})
    assert "done" in invoke("ls", tmp_path).output


def test_ls_cuts_nothing_off_in_80_columns(tmp_path):
    for data, head in (("imagefolder", "trl-tucker+weight-dropout"), ("phantom", "rtrl-cp")):
        folder = tmp_path / "runs" / data / f"{head}-seed0"
        folder.mkdir(parents=True)
        settings = {"net.name": "resnet101", "net.head": head, "run.seed": 0, "run.epochs": 90}
        record = {"settings": settings, "data": {"name": data, "simulated": data == "phantom"}}
        (folder / "run.json").write_text(json.dumps(record))
        task, metric = ("regression", "mae") if data == "phantom" else ("classification", "accuracy")
        (folder / "result.json").write_text(json.dumps({"task": task, "test": {metric: 12.345}}))
    output = CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, ["ls", str(tmp_path)]).output
    assert "…" not in output
    assert {len(line) for line in output.splitlines()} == {80}
    words = output.replace("│", " ").split()
    for text in (
        "imagefolder,",
        "resnet101,",
        "trl-tucker+weight-dropout,",
        "accuracy",
        "12.35",
        "(simulated),",
        "mae",
    ):
        assert text in words


def test_ls_shows_runs_that_are_not_done(tmp_path):
    train(tmp_path / "run", "--epochs", 1)
    (tmp_path / "run" / "result.json").unlink()
    assert "interrupted" in invoke("ls", tmp_path).output
    for path in (tmp_path / "run").glob("checkpoint-*"):
        path.unlink()
    assert "begun" in invoke("ls", tmp_path).output
    (tmp_path / "run" / "run.json").write_text("{}")
    assert "no runs" in invoke("ls", tmp_path).output


def test_the_default_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("train", *QUIET, "--epochs", 1, "--head", "fc", "--seed", 3).exit_code == 0
    assert (tmp_path / "out" / "runs" / "digits" / "fc-seed3" / "result.json").is_file()
    assert "fc" in invoke("ls").output


def test_synthetic_regression_trains(tmp_path):
    options = ["--set", "data.options.shape=8,8,8", "--set", "data.options.n=120", "--set", "data.options.rank=2"]
    train(tmp_path, "--data", "synthetic", "--epochs", 1, "--batch", 20, *options)
    assert read_result(tmp_path)["task"] == "regression"


def test_terminated_in_a_real_process_the_command_goes_on(tmp_path):
    """The whole command in its own process: SIGTERM, status 130, one sentence, and the same command again."""
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "tensor_dropout_lab", "train", *QUIET, "--epochs", "100", "--out", str(folder)]
    listen = partial(signal.signal, signal.SIGTERM, signal.SIG_DFL)
    process = subprocess.Popen(command, preexec_fn=listen, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoint-*.pt")) and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "train: interrupted; the same command goes on from the last checkpoint" in errors
    assert "Traceback" not in errors
    assert 0 < len(read_metrics(folder)) < 100


# Pictures, read in worker processes.


@pytest.fixture
def pictures(tmp_path):
    """Two classes, of two colours: 12 pictures each to train on and 4 to test on."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    root, random = tmp_path / "pictures", np.random.default_rng(0)
    for part, n in (("train", 12), ("val", 4)):
        for label, colour in (("dark", 60), ("light", 190)):
            (root / part / label).mkdir(parents=True)
            for k in range(n):
                pixels = np.clip(colour + random.normal(0, 30, (24, 30, 3)), 0, 255).astype(np.uint8)
                image.fromarray(pixels).save(root / part / label / f"{label}{k}.JPEG")
    return root


def picture_command(root, *arguments, workers=2):
    options = {"size": 16, "resize": 20, "validation": 0}
    settings = [part for key, value in options.items() for part in ("--set", f"data.options.{key}={value}")]
    settings += ["--set", f"run.workers={workers}", "--net", "resnet-mini", "--epochs", 2, "--batch", 6]
    return ["--data", "imagefolder", "--root", root, *settings, *arguments]


def test_pictures_train_and_are_predicted(pictures, tmp_path):
    folder = tmp_path / "run"
    train(folder, *picture_command(pictures))
    rows = read_predictions(folder)
    assert len(rows) == 8
    output = invoke("predict", pictures / "val", "--model", folder, "-o", tmp_path / "out.csv")
    assert output.exit_code == 0, output.output
    with (tmp_path / "out.csv").open() as file:
        predicted = list(csv.DictReader(file))
    for row, again in zip(rows, predicted, strict=True):
        assert again["file"].endswith(row["name"].removeprefix("val/"))
        assert again["class"] == ["dark", "light"][int(row["predicted"])]
        assert float(again["probability"]) == pytest.approx(float(row["confidence"]), abs=1e-4)


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".JPG", ".bmp", ".webp", ".png"])
def test_a_folder_of_any_kind_of_picture_is_predicted(pictures, tmp_path, suffix):
    from PIL import Image

    train(tmp_path / "run", *picture_command(pictures, workers=0))
    (tmp_path / "more").mkdir()
    Image.new("RGB", (30, 30), (200, 10, 10)).save(tmp_path / "more" / f"one{suffix}")
    result = invoke("predict", tmp_path / "more", "--model", tmp_path / "run", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"one{suffix}" in result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"one.json", "one.png"}


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_picture_in_the_middle_of_an_epoch_is_named(pictures, tmp_path, workers, capfd):
    bad = pictures / "train" / "light" / "light5.JPEG"
    bad.write_bytes(bad.read_bytes()[:200])
    command = picture_command(pictures, *QUIET, workers=workers)
    line = fail_forked(capfd, "train", *command, "--out", tmp_path / "run")
    assert str(bad) in line
    assert "skip_unreadable=true" in line
    assert "remove" not in line  # which a run that has begun refuses
    with pytest.warns(UserWarning, match="the next readable picture stands in") if not workers else nullcontext():
        train(tmp_path / "run", *command, "--set", "data.options.skip_unreadable=true")  # the run goes on
    assert len(read_predictions(tmp_path / "run")) == 8
    assert list_options(tmp_path / "run")["skip_unreadable"] is True


def list_options(folder):
    return data_options(json.loads((folder / "run.json").read_text(encoding="utf-8"))["settings"])


@pytest.mark.parametrize("part", ["val", "train"])
def test_an_unreadable_picture_that_is_held_out_is_named_before_anything_is_trained(pictures, tmp_path, part):
    command = [*picture_command(pictures, *QUIET, workers=0), "--set", "data.options.validation=0.5"]
    options = {"size": 16, "resize": 20, "validation": 0.5}
    data = load_data("imagefolder", root=pictures, **options)
    bad = pictures / (data.test if part == "val" else data.validation).names[1]
    bad.write_bytes(bad.read_bytes()[: bad.stat().st_size // 2])  # its header is whole
    line = fail("train", *command, "--out", tmp_path / "run")
    assert str(bad) in line
    assert "data.options.skip_unreadable=true" in line
    assert not (tmp_path / "run" / "run.json").exists()
    with pytest.warns(UserWarning, match="cannot be read and are left out"):
        train(tmp_path / "run", *command, "--set", "data.options.skip_unreadable=true")
    assert len(read_predictions(tmp_path / "run")) == (7 if part == "val" else 8)
    bad.unlink()
    train(tmp_path / "other", *command)


def test_a_run_goes_on_without_a_test_picture_that_broke_meanwhile(pictures, tmp_path):
    command = picture_command(pictures, workers=0)
    train(tmp_path / "run", *command)
    (tmp_path / "run" / "result.json").unlink()  # as if it had been killed before it was tested
    checkpoints = sorted((tmp_path / "run").glob("checkpoint-*"))
    bad = pictures / "val" / "dark" / "dark1.JPEG"
    bad.write_bytes(b"no picture")
    assert str(bad) in fail("train", *QUIET, *command, "--out", tmp_path / "run")
    with pytest.warns(UserWarning, match="1 of 8 pictures cannot be read and are left out"):
        train(tmp_path / "run", *command, "--set", "data.options.skip_unreadable=true")
    assert len(read_predictions(tmp_path / "run")) == 7
    assert sorted((tmp_path / "run").glob("checkpoint-*")) == checkpoints  # nothing was trained again
    record = json.loads((tmp_path / "run" / "run.json").read_text(encoding="utf-8"))
    assert record["data"]["examples"]["test"] == 7
    bad.unlink()
    (tmp_path / "run" / "result.json").unlink()
    train(tmp_path / "run", *command, "--set", "data.options.skip_unreadable=true")


def test_the_table_of_files_of_one_name_says_which_record_is_whose(pictures, tmp_path):
    train(tmp_path / "run", *picture_command(pictures, workers=0))
    files = [pictures / "val" / label / "0.JPEG" for label in ("dark", "light")]
    for path in files:
        next(path.parent.iterdir()).rename(path)
    bad = pictures / "train" / "dark" / "0.JPEG"
    bad.write_bytes(b"no picture")
    command = ["predict", files[0], bad, files[1], "--model", tmp_path / "run"]
    invoke(*command, "--no-picture", "-o", tmp_path / "out")
    with (tmp_path / "out" / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["record"]) for row in rows] == [
        (str(files[0]), "0.json"),
        (str(bad), ""),
        (str(files[1]), "0-3.json"),
    ]
    assert json.loads((tmp_path / "out" / "0-3.json").read_text())["file"] == str(files[1])
    invoke(*command, "-o", tmp_path / "table.csv")
    assert "record" not in (tmp_path / "table.csv").read_text().splitlines()[0]  # there are none


def test_predict_does_not_advise_an_option_that_it_lacks(pictures, tmp_path):
    train(tmp_path / "run", *picture_command(pictures, workers=0))
    bad = pictures / "val" / "dark" / "dark1.JPEG"
    bad.write_bytes(b"no picture")
    line = fail("predict", bad, "--model", tmp_path / "run", "-o", tmp_path / "out", "--no-picture")
    assert "cannot be read" in line
    assert "skip_unreadable" not in line


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_pictures_that_is_cut_off_ends_bit_identical(pictures, tmp_path, workers):
    """Random crops are drawn by the workers: they must not depend on where a run was cut off."""
    command = picture_command(pictures, "--set", "run.checkpoint_every=1", workers=workers)
    train(tmp_path / "whole", *command)
    train(tmp_path / "cut", *command)
    assert read_metrics(tmp_path / "whole") == read_metrics(tmp_path / "cut")
    for name in ("result.json", max(path.name for path in (tmp_path / "cut").glob("checkpoint-*"))):
        (tmp_path / "cut" / name).unlink()  # as if it had been killed in its last step
    train(tmp_path / "cut", *command)
    ours, theirs = read_weights(tmp_path / "cut"), read_weights(tmp_path / "whole")
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def test_crops_differ_between_runs_and_between_processes(pictures):
    """All pictures are the same one, so that equal crops are equal draws."""
    same = (pictures / "train" / "dark" / "dark0.JPEG").read_bytes()
    for path in (pictures / "train").rglob("*.JPEG"):
        path.write_bytes(same)
    data = load_data("imagefolder", root=pictures, size=16, resize=20, validation=0)

    def crops(seed, rank):
        feed = Feed(data.train, Sampler(len(data.train), 12, seed, rank, 2), torch.device("cpu"), 1)
        return torch.cat([x for x, _ in feed.starts(0, 0)])

    first = crops(seed=0, rank=0)
    assert torch.equal(first, crops(seed=0, rank=0))
    assert len(first.flatten(1).unique(dim=0)) == len(first)
    assert not torch.equal(first, crops(seed=1, rank=0))
    assert not torch.equal(first, crops(seed=0, rank=1))


# Scans.


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    """Forty people in BIDS' folders; the brighter a box inside, the older. Numbers with fractions, as most scans."""
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    root, random = tmp_path_factory.mktemp("scans"), np.random.default_rng(0)
    lines = ["participant_id\tage\theight"]
    for i in range(40):
        age = 20 + 1.5 * i
        volume = random.normal(100, 10, (16, 18, 16)).astype(np.float32)
        volume[2:14, 3:9, 3:13] += 3 * age
        volume[2:14, 9:15, 3:13] += 150
        name = f"sub-{i:02d}"
        (root / name / "anat").mkdir(parents=True)
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([2.0, 2, 2, 1])), root / name / "anat" / f"{name}_T1w.nii.gz")
        lines.append(f"{name}\t{age}\t{150 + i}")
    (root / "participants.tsv").write_text("\n".join(lines) + "\n")
    return root


SCANS = ["--target", "age", "--net", "resnet-mini", "--head", "rtrl-tucker", "--epochs", 12, "--batch", 6]


@pytest.fixture(scope="module")
def scanned(scans, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "scans"
    train(folder, "--data", "nifti", "--root", scans, *SCANS, "--lr", 0.003)
    return folder


def test_a_folder_of_scans_trains(scanned):
    result = read_result(scanned)
    assert result["target"] == "age"
    assert result["test"]["mae"] < 0.6 * result["baselines"]["mean"]["mae"]


def test_data_that_changed_since_is_neither_tested_nor_trained_on(scans, scanned, tmp_path):
    """Parts are drawn anew: with one person more, most of those who would test the network have trained it."""
    root = tmp_path / "scans"
    shutil.copytree(scans, root)
    moved = ["--root", root, "--protocol", "none", "--noise", "none", "--out", tmp_path / "evaluation"]
    assert invoke("evaluate", scanned, *moved).exit_code == 0  # it only lies elsewhere
    shutil.copytree(root / "sub-00", root / "sub-99")
    (root / "sub-99/anat/sub-00_T1w.nii.gz").rename(root / "sub-99/anat/sub-99_T1w.nii.gz")
    table = (root / "participants.tsv").read_text()
    (root / "participants.tsv").write_text(table + "sub-99\t33\t160\n")
    shutil.rmtree(tmp_path / "evaluation")
    assert "evaluate: the data changed since" in fail("evaluate", scanned, *moved)
    assert not (tmp_path / "evaluation").exists()
    again = ["--data", "nifti", "--root", root, *SCANS, "--lr", 0.003, "--out", scanned]
    line = fail("train", *QUIET, *again)
    assert "train: the data changed since" in line
    assert "may have been trained on; restore the data, or train anew into another folder" in line
    (root / "participants.tsv").write_text(table.replace("sub-07\t30.5", "sub-07\t31.5"))
    shutil.rmtree(root / "sub-99")
    assert "part has other names or targets" in fail("train", *QUIET, *again)


def test_a_folder_in_which_another_process_trains_is_left_alone(tmp_path):
    with lock_folder(tmp_path / "run"):
        line = fail("train", *QUIET, "--data", "digits", "--head", "fc", "--epochs", 1, "--out", tmp_path / "run")
    assert "another process is training in" in line
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]
    train(tmp_path / "run", "--data", "digits", "--head", "fc", "--epochs", 1)


def test_a_scan_is_predicted_as_in_the_run(scans, scanned, tmp_path):
    rows = read_predictions(scanned)
    files = [scans / f"{row['name']}.nii.gz" for row in rows]
    result = invoke("predict", *files, "--model", scanned, "-o", tmp_path / "new" / "ages.csv")
    assert result.exit_code == 0, result.output
    with (tmp_path / "new" / "ages.csv").open() as file:
        predicted = list(csv.DictReader(file))
    assert [row["file"] for row in predicted] == [str(path) for path in files]
    for row, again in zip(rows, predicted, strict=True):
        # The run's volumes are stored in float16.
        assert float(again["age"]) == pytest.approx(float(row["predicted"]), abs=0.05)
        assert float(again["age_masks"]) == pytest.approx(float(row["masks"]), rel=0.01)
    age, std = (float(predicted[0][key]) for key in ("age", "age_masks"))
    assert f"{files[0]}: age {format_uncertain(age, std)} years, no interval (masks {std:.2g})\n" in result.output


def test_a_whole_folder_is_predicted(scans, scanned, tmp_path):
    result = invoke("predict", scanned, scans, "-o", tmp_path, "--no-picture")  # the short form, without --model
    assert result.exit_code == 0
    assert result.output.count("_T1w.nii.gz") == 40
    assert len(list(tmp_path.glob("sub-*_T1w.json"))) == 40


def test_several_targets_are_all_predicted(scans, tmp_path):
    config = tmp_path / "two.toml"
    config.write_text('[data]\nname = "nifti"\n[data.options]\ntarget = ["age", "height"]\n')
    command = ["--root", scans, "--net", "resnet-mini", "--epochs", 1, "--batch", 6]
    output = train(tmp_path / "run", config, *command)
    found = read_result(tmp_path / "run")
    rows = read_predictions(tmp_path / "run")
    for name in ("age", "height"):
        error = np.mean([abs(float(row[f"target_{name}"]) - float(row[f"predicted_{name}"])) for row in rows])
        assert found["test"]["targets"][name]["mae"] == pytest.approx(error, rel=1e-4)
        assert found["baselines"]["ridge"]["targets"][name].keys() == {"mae", "rmse", "r2", "correlation"}
        for text in (f"validation, {name}: mae ", f"test, {name}: mae ", f"mae of {name} on the same test examples: "):
            assert text in output
    assert "test: mae" not in output  # an average of years and centimetres
    errors = [found["test"]["targets"][name]["mae"] for name in ("age", "height")]
    assert "mae " + ", ".join(f"{error:.2f}" for error in errors) in invoke("ls", tmp_path).output
    row = rows[0]
    predicted = predict_scan(tmp_path, scans / f"{row['name']}.nii.gz")
    assert float(predicted["age"]) == pytest.approx(float(row["predicted_age"]), abs=0.1)
    assert float(predicted["height"]) == pytest.approx(float(row["predicted_height"]), abs=0.1)
    assert "name each column once" in fail("train", "--data", "nifti", "--target", "age,age", *command)


def predict_scan(folder, scan):
    """The line of one scan in the table of ``predict``, by the run in a folder."""
    result = invoke("predict", scan, "--model", folder / "run", "-o", folder / "out.csv")
    assert result.exit_code == 0, result.output
    with (folder / "out.csv").open() as file:
        (line,) = csv.DictReader(file)
    return line


def test_a_column_with_a_comma_in_its_name_is_predicted(scans, tmp_path):
    table = (scans / "participants.tsv").read_text().replace("height", "age, years")
    (scans / "commas.tsv").write_text(table)
    options = ["--set", 'data.options.target=["age, years"]', "--set", "data.options.table=commas.tsv"]
    command = ["--data", "nifti", "--root", scans, "--net", "resnet-mini", "--epochs", 1, "--batch", 6]
    train(tmp_path / "run", *command, *options)
    row = read_predictions(tmp_path / "run")[0]
    predicted = predict_scan(tmp_path, scans / f"{row['name']}.nii.gz")
    assert float(predicted["age, years"]) == pytest.approx(float(row["predicted"]), abs=0.1)


def test_a_network_in_float64_is_asked_too(scans, tmp_path):
    train(tmp_path / "run", "--data", "nifti", "--root", scans, *SCANS, "--epochs", 1, "--set", "run.precision=float64")
    row = read_predictions(tmp_path / "run")[0]
    scan = scans / f"{row['name']}.nii.gz"
    result = invoke("predict", scan, "--model", tmp_path / "run", "-o", tmp_path / "out")
    assert result.exit_code == 0, repr(result.exception)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("no folder", ["there is no folder", "participants.tsv"]),
        ("no table", ["tables", "participants.tsv"]),
        ("no column", ["no 'iq' column", "age"]),
        ("no scan", ["no file that matches"]),
        ("NaN", ["sub-00_T1w.nii.gz", "NaN"]),
        ("shape", ["differ in shape", "crop='brain'"]),
        ("missing", ["without a target", "missing='skip'"]),
    ],
)
def test_scans_that_cannot_be_used_are_named(tmp_path, change, parts):
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel")
    root = tmp_path / "root"
    if change != "no folder":
        root.mkdir()
        ages = ["n/a" if change == "missing" and i == 2 else str(30 + i) for i in range(6)]
        if change != "no table":
            lines = ["participant_id\tage", *(f"sub-{i:02d}\t{age}" for i, age in enumerate(ages))]
            (root / "participants.tsv").write_text("\n".join(lines) + "\n")
        for i in range(0 if change == "no scan" else 6):
            volume = np.random.rand(8, 8, 9 if change == "shape" and i == 3 else 8)
            volume[0, 0, 0] = np.nan if change == "NaN" and i == 0 else 1
            nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), root / f"sub-{i:02d}_T1w.nii.gz")
    target = "iq" if change == "no column" else "age"
    line = fail("train", "--data", "nifti", "--root", root, "--target", target, "--out", tmp_path / "run")
    assert [part for part in parts if part not in line] == [], line
    assert not (tmp_path / "run").exists()


def test_ixi_trains_and_predicts(tmp_path):
    """Real scans, through the command that their owner would type."""
    root = Path(os.environ.get("TENSOR_DROPOUT_DATA", "nowhere")) / "ixi"
    if not root.is_dir():
        pytest.skip("needs the environment variable TENSOR_DROPOUT_DATA, a folder with ixi in it")
    pytest.importorskip("nibabel", reason="needs nibabel")
    cache = ["--set", f"data.options.cache={tmp_path / 'cache'}", "--set", "data.options.resample=6"]
    command = ["--data", "nifti", "--root", root, "--net", "resnet-mini", "--epochs", 1, "--batch", 16]
    train(tmp_path / "run", *command, *cache)
    row = read_predictions(tmp_path / "run")[0]
    (scan,) = root.rglob(f"{Path(row['name']).name}.nii*")
    result = invoke("predict", scan, "--model", tmp_path / "run", "-o", tmp_path / "age.csv")
    assert result.exit_code == 0, result.output
    with (tmp_path / "age.csv").open() as file:
        (predicted,) = csv.DictReader(file)
    assert float(predicted["age"]) == pytest.approx(float(row["predicted"]), abs=0.2)
    assert float(predicted["age_masks"]) > 0


def test_ls_leaves_out_what_cannot_be_read(digits, tmp_path):
    for name, text in {"cut": '{"settings": {', "empty": "{}", "list": "[]"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(text, "utf-8")
    (tmp_path / "whole").mkdir()
    for name in ("run.json", "result.json"):
        (tmp_path / "whole" / name).write_bytes((digits[0] / name).read_bytes())
    assert [row["folder"] for row in list_runs(tmp_path)] == [str(tmp_path / "whole")]
    (tmp_path / "whole" / "result.json").write_text('{"task"', "utf-8")
    assert list_runs(tmp_path) == []


@pytest.mark.parametrize("content", ["", '{"settings"', "[]", "{}"])
@pytest.mark.parametrize(
    ("name", "advice"),
    [("run.json", "delete it and give the settings of this run again"), ("result.json", "delete it and give the same")],
)
def test_a_damaged_record_says_what_to_delete(tmp_path, name, advice, content):
    command = ["train", *QUIET, "--data", "digits", "--head", "fc", "--epochs", 1, "--out", tmp_path]
    assert invoke(*command).exit_code == 0
    before = read_result(tmp_path)
    (tmp_path / name).write_text(content)
    line = fail(*command)
    assert line.startswith(f"Error: {tmp_path / name} is damaged")
    assert advice in line
    (tmp_path / name).unlink()
    assert invoke(*command).exit_code == 0
    assert read_result(tmp_path)["test"] == before["test"]


def test_metrics_that_end_in_bytes_of_no_text_are_cut_there(digits, tmp_path):
    folder = RunFolder(tmp_path)
    folder.metrics_path.write_bytes(b'{"epoch": 1}\n{"epoch": 2}\n\xff\xfe\x00')
    assert folder.metrics() == [{"epoch": 1}, {"epoch": 2}]
    folder.rewind(1)
    assert folder.metrics_path.read_text() == '{"epoch": 1}\n'


def test_a_file_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    done = []
    fsync = "tensor_dropout.atomic_files.fsync"
    monkeypatch.setattr(fsync, lambda number: done.append(("fsync", os.fstat(number).st_size)))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    write_json(tmp_path / "record.json", {"a": 1})
    assert done == [("fsync", len((tmp_path / "record.json").read_bytes())), "replace"]


def test_folds_have_folders_of_their_own():
    from tensor_dropout_lab.cli.train import _name_folder
    from tensor_dropout_lab.training.config import resolve_config

    plain = resolve_config(overrides={"data.name": "digits", "net.head": "fc", "run.seed": 3})
    folded = resolve_config(overrides={"data.name": "nifti", "net.head": "fc", "data.options": {"folds": 5, "fold": 2}})
    assert _name_folder(plain) == Path("out/runs/digits/fc-seed3")
    assert _name_folder(folded) == Path("out/runs/nifti/fc-fold2-seed0")


# Data sets and laws of one's own.

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "your-data.md"
LAW = """
import torch, tensor_dropout as td

class Half(td.ExchangeableLaw):
    def draw(self, shape, theta, *, device):
        return (torch.rand(shape, device=device) < 0.5).float()
    def pair_moments(self, R, theta):
        half = torch.full((), 0.5, dtype=torch.float64, device=theta.device)
        return half, half, half * half

td.register_law("half", Half())
"""


COMMANDS = """
import json, sys
from typer.testing import CliRunner
from tensor_dropout_lab import cli

done = [CliRunner().invoke(cli.app, command) for command in json.loads(sys.argv[1])]
print(json.dumps([{"status": one.exit_code, "out": one.stdout, "errors": one.stderr} for one in done]))
"""


def run_in(folder, *commands):
    """Commands one after another in a process of their own, in which nothing is registered yet; their results."""
    given = json.dumps([[str(argument) for argument in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS, given], cwd=folder, capture_output=True, text=True, timeout=300, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_the_data_set_of_the_guide_trains_by_its_name(tmp_path):
    (block,) = re.findall(r"```python\n(# spots.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "spots.py").write_text(block, encoding="utf-8")
    (tmp_path / "laws_of_mine.py").write_text(LAW, encoding="utf-8")
    data, known = ["--import", "spots"], ["--import", "spots", "--import", "laws_of_mine"]
    own = ["--data", "spots", "--law", "half", "--epochs", 2, "--set", "data.options.n=200", *QUIET]
    shown, failed, done = run_in(
        tmp_path,
        [*data, "train", "--data", "spots", "--keys"],
        [*data, "train", *own, "--out", tmp_path / "other"],  # the law is not known
        [*known, "train", *own],
    )
    assert "noise: standard deviation of what is added to each pixel (float; default 0.1)" in shown["out"]
    assert failed["status"] == 1
    assert failed["errors"].startswith("Error: ")
    assert "tensor-dropout --import MODULE" in failed["errors"]
    assert done["status"] == 0, done
    assert "test, row: mae" in done["out"]
    folder = tmp_path / "out/runs/spots/rtrl-cp-seed0"
    assert read_result(folder)["test"]["targets"].keys() == {"row", "column"}
    assert {"predicted_row", "masks_column"} <= read_predictions(folder)[0].keys()
    assert json.loads((folder / "run.json").read_text())["head"]["law"] == "half"
    evaluate = ["evaluate", folder, "--protocol", "none", "--noise", "none", "--mode", "exact", "--device", "cpu"]
    (done,) = run_in(tmp_path, [*known, *evaluate])
    assert done["status"] == 0, done


def test_the_format_of_the_guide_trains_by_its_name(tmp_path):
    guide = PAGE.with_name("write-a-format.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(# matrix_format.py\n.*?)```", guide, re.DOTALL)
    (tmp_path / "matrix_format.py").write_text(block, encoding="utf-8")
    known, folder = ["--import", "matrix_format"], tmp_path / "out/runs/digits/rtrl-matrix-seed0"
    evaluate = ["evaluate", folder, "--protocol", "none", "--noise", "none", "--mode", "exact", "--device", "cpu"]
    trained, evaluated = run_in(
        tmp_path,
        [*known, "train", "--data", "digits", "--head", "rtrl-matrix", "--epochs", 1, *QUIET],
        [*known, *evaluate],
    )
    assert trained["status"] == 0, trained
    assert json.loads((folder / "run.json").read_text())["settings"]["net.head"] == "rtrl-matrix"
    assert evaluated["status"] == 0, evaluated


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "No module named 'mine'"),
        ("x = 1\ny = 1 / 0\n", "mine.py, line 2"),
        ("import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    if text is not None:
        (tmp_path / "mine.py").write_text(text)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    line = fail("--import", "mine", "ls", tmp_path)
    assert line.startswith("Error: --import mine: ")
    assert message in line
