"""docs/how-to/brain-age.md in miniature: from a BIDS folder of SIMULATED heads to ages with uncertainty."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tensor_dropout_lab import cli
from tensor_dropout_lab.training.config import resolve_config

pytest.importorskip("nibabel")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
PEOPLE, FOLDS = 30, 2


def invoke(*arguments):
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def read_table(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t" if path.suffix == ".tsv" else ","))


@pytest.fixture(scope="module")
def scans(tmp_path_factory):
    from make_bids import make_bids

    folder = tmp_path_factory.mktemp("brain-age") / "scans"
    assert len(make_bids(folder, people=PEOPLE, size=(12, 16, 12))) == PEOPLE
    return folder


@pytest.fixture(scope="module")
def runs(scans):
    """The folds, as the page trains them, in the folder that the page's commands are typed in."""
    folders = [scans.parent / "out" / "brain-age" / f"fold{fold}" for fold in range(FOLDS)]
    small = ["--net", "resnet-mini", "--epochs", 2, "--batch", 4, "--device", "cpu", "--set", "run.threads=1"]
    for fold, folder in enumerate(folders):
        folds = ["--set", f"data.options.folds={FOLDS}", "--set", f"data.options.fold={fold}"]
        root = ["--data", "nifti", "--root", scans, "--target", "age", "--head", "rtrl-cp"]
        output = invoke("train", *root, *small, *folds, "--out", folder)
        assert "SIMULATED" in output
    return folders


def test_the_folder_is_bids_and_says_that_it_is_simulated(scans):
    people = read_table(scans / "participants.tsv")
    assert list(people[0]) == ["participant_id", "age", "sex"]
    assert [row["participant_id"] for row in people] == [f"sub-{number:03d}" for number in range(1, PEOPLE + 1)]
    assert all(20 <= float(row["age"]) <= 80 and row["sex"] in "FM" for row in people)
    assert all((scans / row["participant_id"] / "anat").is_dir() for row in people)
    assert json.loads((scans / "dataset_description.json").read_text("utf-8"))["Name"].startswith("SIMULATED")


def test_everybody_is_predicted_once_beside_the_baselines(scans, runs):
    rows = [row for run in runs for row in read_table(run / "predictions.csv")]
    assert list(rows[0]) == ["name", "target", "predicted", "masks", "ridge"]
    assert all(float(row["masks"]) > 0 for row in rows)
    ages = {row["participant_id"]: float(row["age"]) for row in read_table(scans / "participants.tsv")}
    assert {row["name"].split("/")[0]: float(row["target"]) for row in rows} == pytest.approx(ages)
    assert len(rows) == PEOPLE
    for run in runs:
        result = json.loads((run / "result.json").read_text("utf-8"))
        assert {name: found["mae"] > 0 for name, found in result["baselines"].items()} == {"mean": True, "ridge": True}


def test_one_scan_gets_a_picture_and_a_record(scans, runs, tmp_path):
    output = invoke("predict", scans / "sub-001" / "anat" / "sub-001_T1w.nii.gz", "--model", runs[0], "-o", tmp_path)
    record = json.loads((tmp_path / "sub-001_T1w.json").read_text("utf-8"))
    assert record["masks_std"]["age"] > 0
    assert record["unit"] == {"age": "years"}
    assert re.search(r"age \d+\.\d+ years, no interval \(masks \d+(\.\d+)?\)", output)
    assert (tmp_path / "sub-001_T1w.png").read_bytes().startswith(b"\x89PNG")
    (map_,) = record["explanation"]
    assert np.sum(map_["contributions"]) + map_["bias"] == pytest.approx(record["prediction"]["age"], abs=1e-3)


def test_a_folder_becomes_a_table(scans, runs, tmp_path):
    invoke("predict", scans, "--model", runs[0], "-o", tmp_path / "ages.csv")
    rows = read_table(tmp_path / "ages.csv")
    assert list(rows[0]) == ["file", "age", "age_masks"]
    assert len(rows) == PEOPLE
    assert all(float(row["age_masks"]) > 0 for row in rows)
    tested = {row["name"]: row for row in read_table(runs[0] / "predictions.csv")}
    for row in rows:
        name = Path(row["file"]).relative_to(scans).as_posix().removesuffix(".nii.gz")
        if name in tested:
            assert float(row["age"]) == pytest.approx(float(tested[name]["predicted"]), abs=1e-2)


@pytest.mark.parametrize("out", ["ages.csv", "results"])
def test_one_bad_scan_does_not_cost_the_table(scans, runs, tmp_path, out):
    folder = shutil.copytree(scans / "sub-001" / "anat", tmp_path / "new")
    for number in (2, 3):
        shutil.copy(scans / f"sub-00{number}" / "anat" / f"sub-00{number}_T1w.nii.gz", folder)
    bad = folder / "sub-002_T1w.nii.gz"
    bad.write_bytes(bad.read_bytes()[:200])
    arguments = ["--model", str(runs[0]), "--no-picture", "-o", str(tmp_path / out)]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["predict", str(folder), *arguments])
    assert result.exit_code == 1
    (line,) = [line for line in result.stderr.splitlines() if line]
    table = tmp_path / out if out.endswith(".csv") else tmp_path / out / "predictions.csv"
    assert line.startswith(
        f"Error: predict: 1 of 3 files could not be predicted: {bad}; the first because nifti: {bad}"
    )
    assert line.endswith(f"in the column error of {table}")
    rows = read_table(table)
    records = ["record"] if out == "results" else []
    assert list(rows[0]) == ["file", *records, "age", "age_masks", "error"]
    assert [Path(row["file"]).name for row in rows] == [f"sub-00{number}_T1w.nii.gz" for number in (1, 2, 3)]
    assert [bool(row["age"]) for row in rows] == [True, False, True]
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert f"{bad} cannot be read" in rows[1]["error"]
    if out == "results":
        assert {path.name for path in table.parent.glob("*.json")} == {"sub-001_T1w.json", "sub-003_T1w.json"}
    alone = CliRunner(env={"COLUMNS": "300"}).invoke(
        cli.app, ["predict", str(bad), *arguments[:-1], str(tmp_path / "one.csv")]
    )
    assert alone.exit_code == 1
    assert alone.stderr.startswith(f"Error: nifti: {bad} cannot be read")
    assert not (tmp_path / "one.csv").exists()


def test_a_table_without_one_answer_is_written_too(scans, runs, tmp_path):
    for name in ("a.nii.gz", "b.nii.gz", "c.nii.gz", "d.nii.gz"):
        (tmp_path / name).write_bytes(b"no scan")
    files = [str(path) for path in sorted(tmp_path.glob("*.gz"))]
    arguments = ["predict", *files, "--model", str(runs[0]), "-o", str(tmp_path / "ages.csv")]
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, arguments)
    assert result.exit_code == 1
    assert f"4 of 4 files could not be predicted: {', '.join(files[:3])}, …; the first because" in result.stderr
    assert [list(row) for row in read_table(tmp_path / "ages.csv")] == [["file", "error"]] * 4


def test_the_code_of_the_page_makes_the_brain_age_table(runs, monkeypatch, capsys):
    text = (ROOT / "docs" / "how-to" / "brain-age-table.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(runs[0].parents[2])
    exec(compile(code, "docs/how-to/brain-age-table.md", "exec"), {"__name__": "brain_age"})
    rows = read_table(runs[0].parent / "brain-age.csv")
    assert len(rows) == PEOPLE
    assert all(float(row["std_whole"]) >= float(row["masks"]) > 0 for row in rows)
    printed = capsys.readouterr().out
    assert re.search(r"^network +MAE \d+\.\d\d \[.*slope of the gap [+-]", printed, re.MULTILINE)
    assert "network − ridge" in printed


def test_the_settings_for_uk_biobank_are_the_paper_s():
    config = resolve_config(ROOT / "docs" / "how-to" / "ukbiobank.toml", {"data.root": "FOLDER"})
    assert (config.net.name, config.net.head, config.net.rank) == ("resnet18", "rtrl-cp", 82)
    assert (config.optimizer.name, config.optimizer.lr, config.optimizer.weight_decay) == ("adam", 1e-4, 5e-4)
    assert (config.schedule.name, config.schedule.milestones, config.schedule.factor) == ("step", [25, 50, 75], 0.1)
    assert (config.run.epochs, config.run.batch) == (100, 8)
    people = 11_500 + config.data.options["validation"] + config.data.options["test"]
    assert people == 19_100


def test_the_exercise_of_that_recipe_projects_the_whole(tmp_path, monkeypatch, capsys):
    import exercise_ukb

    tiny = ["--volumes", "4", "--links", "5", "--size", "12", "14", "12", "--net", "resnet-mini", "--heads", "rtrl-cp"]
    monkeypatch.setattr(sys, "argv", ["exercise_ukb.py", str(tmp_path), *tiny, "--workers", "0", "--device", "cpu"])
    exercise_ukb.main()
    record = json.loads((tmp_path / "exercise.json").read_text("utf-8"))
    assert record["data"].startswith("SIMULATED")
    assert record["data"] in capsys.readouterr().out
    assert record["cache"]["bytes_per_volume"] == pytest.approx(12 * 14 * 12, rel=0.01)
    assert [(run["head"], run["reader"]) for run in record["runs"]] == [("rtrl-cp", "stream"), ("rtrl-cp", "memory")]
    for run in record["runs"]:
        hours = 100 * 11_500 / run["volumes_per_second"] / 3600
        assert run["projection"]["hours_1_gpu"] == pytest.approx(hours)
        assert run["projection"]["hours_8_gpus_if_perfect"] == pytest.approx(hours / 8)


def test_of_a_folder_predict_takes_what_training_would(scans, runs, tmp_path):
    folder = tmp_path / "people"
    for place, name in (("sub-001/anat", "sub-001_T1w"), ("derivatives/sub-001/anat", "sub-001_T1w")):
        (folder / place).mkdir(parents=True)
        shutil.copy(scans / "sub-001" / "anat" / "sub-001_T1w.nii.gz", folder / place / f"{name}.nii.gz")
    table = tmp_path / "ages.csv"
    invoke("predict", folder, "--model", runs[0], "-o", table)
    assert [row["file"] for row in read_table(table)] == [str(folder / "sub-001" / "anat" / "sub-001_T1w.nii.gz")]
    shutil.copy(folder / "sub-001" / "anat" / "sub-001_T1w.nii.gz", folder / "sub-001" / "anat" / "sub-001_T2w.nii.gz")
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, ["predict", str(folder), "--model", str(runs[0])])
    assert result.exit_code == 1
    assert "has several kinds of scan (T1w, T2w); name the files instead" in result.output


def test_a_scan_with_other_voxels_than_those_trained_on_is_refused(scans, runs, tmp_path):
    import nibabel

    known = nibabel.load(scans / "sub-001" / "anat" / "sub-001_T1w.nii.gz")
    edges = known.header.get_zooms()
    path, table = tmp_path / "other.nii.gz", tmp_path / "ages.csv"
    arguments = ["predict", str(path), "--model", str(runs[0]), "-o", str(table)]

    def write(*factors):
        affine = np.diag([*(edge * factor for edge, factor in zip(edges, factors, strict=True)), 1.0])
        nibabel.save(nibabel.Nifti1Image(np.asarray(known.dataobj), affine), path)

    write(1, 1, 0.8)
    result = CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, arguments)
    assert result.exit_code == 1
    own, expected = (
        "×".join(f"{edge * f:.4g}" for edge, f in zip(edges, factors, strict=True))
        for factors in ((1, 1, 0.8), (1, 1, 1))
    )
    assert f"has voxels of {own} mm, the network was trained on {expected} mm; resample it first" in result.output
    assert not table.exists()
    write(1, 1.05, 0.95)
    invoke(*arguments)
    write(1, 1, 0.8)
    record = json.loads((runs[0] / "run.json").read_text("utf-8"))
    assert record["data"].pop("voxel") == pytest.approx(edges, rel=1e-3)  # an older run has none
    for key, value in (("data.options.resample", edges[0]), ("data.root", str(tmp_path / "gone"))):
        run = shutil.copytree(runs[0], tmp_path / key)
        settings = record["settings"] | {key: float(value) if key.endswith("resample") else value}
        settings |= {"data.options.size": [12, 16, 12]}  # what is resampled has another shape
        (run / "run.json").write_text(json.dumps(record | {"settings": settings}), encoding="utf-8")
        invoke("predict", path, "--model", run, "-o", table)


def test_records_are_json_that_any_parser_reads(runs):
    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    for path in runs[0].rglob("*.json"):
        json.loads(path.read_text("utf-8"), parse_constant=refuse)
