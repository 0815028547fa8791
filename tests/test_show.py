"""``tensor-dropout show``: one run, or the runs of an experiment, packed or live."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from tensor_dropout_lab.cli import app
from tensor_dropout_lab.record_store import RecordStore
from tensor_dropout_lab.run_records import write_json


@pytest.fixture(params=["live", "packed"])
def base(request, tmp_path):
    """A run that is done, one that failed and one that was cut off."""
    trial = tmp_path / "live" / "trial"
    environment = {"command": "tensor-dropout reproduce trial", "torch": "2.13.0"}
    write_json(trial / "fc-seed0" / "run.json", {"settings": {"net.head": "fc"}, "environment": environment})
    write_json(
        trial / "fc-seed0" / "result.json",
        {"task": "classification", "seconds": 12.4, "test": {"accuracy": 75.88, "nll": 1.25}, "classes": ["a"] * 100},
    )
    lines = [f'{{"epoch": {epoch}, "loss": {1 / epoch}}}\n' for epoch in range(1, 31)]
    (trial / "fc-seed0" / "metrics.jsonl").write_text("".join(lines), "utf-8")
    traceback = "Traceback (most recent call last):\n  File \"x.py\", line 3, in f\nKeyError: 'rank'\n"
    write_json(trial / "trl-seed0" / "cell.json", {"format": 1, "identity": {"config": {"net.head": "trl"}}})
    write_json(trial / "trl-seed0" / "failed.json", {"error": "KeyError: 'rank'", "traceback": traceback})
    write_json(trial / "trl-seed1" / "cell.json", {"format": 1, "identity": {"config": {}}})
    write_json(tmp_path / "live" / "other" / "stage.json", {"final": 0.25, "losses": list(range(99))})
    if request.param == "live":
        return tmp_path / "live"
    live, packed = RecordStore(tmp_path / "live"), RecordStore(tmp_path / "packed")
    for experiment in live.list_experiments():
        names = ("", *live.list_runs(experiment))
        packed.pack(experiment, {name: live.run(experiment, name).read_all() for name in names})
    return packed.base


def show(*words, status=0):
    result = CliRunner().invoke(app, ["show", *map(str, words)], env={"COLUMNS": "200"})
    assert result.exit_code == status, result.output
    return re.sub(r"[ \n]+", " ", result.output + (result.stderr if status else ""))


def test_a_run_is_printed_with_everything_that_is_kept(base):
    text = show("trial/fc-seed0", "--in", base)
    for words in (
        "trial/fc-seed0",
        "net.head fc",
        "test.accuracy 75.88",
        "test.nll 1.25",
        "classes 100 values",
        "command tensor-dropout reproduce trial",
        "training, 30 lines kept",
        "│ 30 │ 0.033333 │",
    ):
        assert words in text
    assert text == show(base / "trial" / "fc-seed0")


def test_a_failed_run_says_where(base):
    text = show("trial/trl-seed0", "--in", base)
    assert "KeyError: 'rank' Traceback (most recent call last): File \"x.py\", line 3, in f" in text
    assert "net.head trl" in text


def test_the_runs_of_an_experiment_are_listed(base):
    text = show("trial", "--in", base)
    assert "trial, 3 runs in" in text
    for row in ("│ fc-seed0 │ done │ accuracy 75.88 │ 12 │", "│ trl-seed0 │ failed: KeyError: 'rank' │", "cut off"):
        assert row in text


def test_what_belongs_to_no_single_run_is_shown_by_the_name_of_the_experiment(base):
    text = show("other", "--in", base)
    assert "final 0.25" in text
    assert "losses 99 values" in text


def test_a_run_that_is_not_there_is_one_sentence_with_the_nearest_names(base, tmp_path):
    for name, sentence in {
        "trial/fc-sed0": "trial has no run 'fc-sed0' in .*; did you mean fc-seed0",
        "trail": "there is no experiment 'trail' in .*; did you mean trial",
        "trial/xyz": "trial has no run 'xyz' in .*; known are fc-seed0, trl-seed0, trl-seed1",
    }.items():
        text = show(name, "--in", base, status=1)
        assert re.search(rf"Error: show: {sentence}", text), text
        assert "Traceback" not in text
    assert "there are no records in" in show("trial", "--in", tmp_path / "nowhere", status=1)


@pytest.mark.parametrize(
    "content", [b'{"test": {"accu', b"[1, 2]", b"\xff\xfe"], ids=["cut off", "no record", "no text"]
)
@pytest.mark.parametrize("name", ["result.json", "run.json", "more.json"])
def test_a_damaged_record_is_one_sentence_that_names_its_file(tmp_path, name, content):
    folder = tmp_path / "trial" / "fc-seed0"
    write_json(folder / "cell.json", {"format": 1})
    (folder / name).write_bytes(content)
    text = show("trial/fc-seed0", "--in", tmp_path, status=1).replace(" ", "")
    assert f"Error:show:{folder / name}isdamaged" in text
    assert "Traceback" not in text
