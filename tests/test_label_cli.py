"""``tensor-dropout label`` as a user types it: mistakes, files of other programs, and sessions that end in any way."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from label_project import CLIENT, TOKEN, Asking, draw_spots, place
from tensor_dropout_lab import cli
from tensor_dropout_lab.labelling.application import choose_port, find_last_port
from tensor_dropout_lab.labelling.server import bind

NETWORK = ["--backbone", "small_backbone:build", "--size", "16"]


def invoke(*arguments):
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(argument) for argument in arguments])


def label(*arguments):
    result = invoke("label", *NETWORK, *arguments)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def fail(*arguments, status=1):
    """The one sentence of a command that fails."""
    result = invoke("label", *arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == status
    assert "Traceback" not in result.output
    return " ".join(result.output.split()) if status == 2 else result.output.splitlines()[-1]


@pytest.fixture
def folder(tmp_path):
    draw_spots(tmp_path / "spots", 6)
    return tmp_path / "spots"


def write(path, text):
    path.write_text(text)
    return path


# Mistakes.


def test_folders_that_cannot_be_used(folder, tmp_path):
    assert "does not exist" in fail(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    assert "there are no pictures in" in fail(tmp_path / "empty")
    assert "cannot be made" in fail(folder, "--out", folder / "0.png" / "labels")
    write(tmp_path / "empty" / "a.png", "no picture")
    assert fail(tmp_path / "empty") == f"Error: label: none of the 1 pictures in {tmp_path / 'empty'} can be read"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("", "it has no names"),
        ("\n \n", "it has no names"),
        ("a\nb\na\n", "two points are named 'a'"),
        ("x_tip", "misread"),
    ],
)
def test_files_of_names_that_cannot_be_used(folder, tmp_path, names, said):
    assert said in fail(folder, *NETWORK, "--points", write(tmp_path / "names.txt", names))


def test_options_that_cannot_be_used(folder, tmp_path):
    assert "names.txt cannot be read" in fail(folder, *NETWORK, "--points", tmp_path / "names.txt")
    assert "there is no file" in fail(folder, *NETWORK, "--weights", tmp_path / "w.safetensors")
    assert "unknown net 'resnet'" in fail(folder, "--backbone", "resnet")
    assert "choose one" in fail(folder, *NETWORK, "--groups", tmp_path / "g.csv", "--group-pattern", "a")
    assert "does not match 6 of 6 names" in fail(folder, *NETWORK, "--group-pattern", "fly")
    assert "--units is for a points.csv" in fail(folder, *NETWORK, "--units", "pixels")
    assert "--size is" in fail(folder, *NETWORK[:2], "--size", "large")
    assert "is not one of gain, folder" in fail(folder, "--order", "any", status=2)
    assert "less than or equal to 65535" in fail(folder, "--port", "70000", status=2)


def test_a_journal_that_is_damaged_is_named(folder):
    (folder / "labels").mkdir()
    write(folder / "labels" / "journal.jsonl", "something\n")
    assert "journal.jsonl is damaged: line 1" in fail(folder, *NETWORK)
    write(folder / "labels" / "journal.jsonl", "")
    write(folder / "labels" / "project.json", "{")
    assert "project.json is damaged" in fail(folder, *NETWORK)


def test_without_the_server_it_says_what_to_install(folder, monkeypatch):
    for module in ("starlette", "uvicorn"):
        for name in [name for name in sys.modules if name.partition(".")[0] == module]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)
    for name in ("server", "guard"):
        monkeypatch.delitem(sys.modules, f"tensor_dropout_lab.labelling.{name}", raising=False)
    assert "is not installed; install it with: pip install 'tensor-dropout[label]'" in fail(folder, *NETWORK)


# Files of other programs, and what a project remembers.


def test_labels_are_taken_over_and_written(folder, tmp_path):
    names = write(tmp_path / "names.txt", "nose\n\ntail\n")
    table = write(tmp_path / "old.csv", "file,nose_x,nose_y,tail_x,tail_y\n1.png,8,16,24,32\n3.png,16,8,,\n")
    options = ["--points", names, "--read", table, "--units", "pixels", "--write", tmp_path / "new.tps"]
    said = label(folder, *options)
    assert "Took over the labels of 2 images" in said
    assert "Wrote the labels of 2 images" in said
    assert "IMAGE=3.png" in (tmp_path / "new.tps").read_text()
    points = (folder / "labels" / "points.csv").read_text().splitlines()
    assert points == ["file,nose_x,nose_y,tail_x,tail_y", "1.png,0.25,0.5,0.75,1", "3.png,0.5,0.25,,"]
    kinds = [json.loads(line).get("kind") for line in (folder / "labels" / "journal.jsonl").read_text().splitlines()]
    assert kinds == [None, "names", "place", "place", "absent"]
    table.write_text(table.read_text().replace("8,16,24,32", "0,0,0,0") + "4.png,16,16,16,16\n")
    said = label(folder, *options)
    assert "Took over the labels of 1 images" in said
    assert "2 points were placed elsewhere in the project before, and stay there" in said
    assert (folder / "labels" / "points.csv").read_text().splitlines() == [*points, "4.png,0.5,0.5,0.5,0.5"]
    other = tmp_path / "copy"
    said = label(folder, "--out", other, "--read", tmp_path / "new.tps", "--write", tmp_path / "again.csv")
    assert (tmp_path / "again.csv").read_text().startswith("file,1_x,1_y,2_x,2_y")
    label(folder, "--out", other, "--write", tmp_path / "a.csv", "--format", "deeplabcut")
    assert (tmp_path / "a.csv").read_text().startswith("scorer,")
    assert "the project nose, tail" in fail(folder, *NETWORK, "--read", write(table, "file,a_x,a_y\n1.png,0.5,0.5\n"))


def test_a_project_remembers_its_network_and_its_groups(folder, tmp_path):
    table = write(tmp_path / "old.csv", "file,nose_x,nose_y\n1.png,0.5,0.5\n2.png,0.5,0.5\n")
    label(folder, "--group-pattern", "[0-2]|.*", "--read", table, "--write", tmp_path / "a.csv")
    result = invoke("label", folder, "--write", tmp_path / "b.csv")
    assert result.exit_code == 0, result.output
    assert "2 of 6 images are labelled already" in result.output
    assert (tmp_path / "b.csv").read_text().startswith("file,group,nose_x,nose_y\n1.png,1,")
    settings = json.loads((folder / "labels" / "project.json").read_text())["settings"]
    assert (settings["backbone"], settings["size"]) == ("small_backbone:build", [16])
    names = write(tmp_path / "names.txt", "nose\ntail\n")
    label(folder, "--points", names, "--write", tmp_path / "c.csv")
    assert (folder / "labels" / "points.csv").read_text().startswith("file,group,nose_x,nose_y,tail_x,tail_y")
    assert "begins with head" in fail(folder, *NETWORK, "--points", write(names, "head\n"))
    (folder / "1.png").unlink()
    assert "1 images with labels are not in the folder any more, such as 1.png" in label(
        folder, "--write", tmp_path / "d.csv"
    )


def test_the_port_of_before_is_taken_if_it_is_free(tmp_path):
    for content in ("", "{", "[]", '{"port": "80"}', '{"port": 80}', '{"port": true}'):
        write(tmp_path / "project.json", content)
        assert find_last_port(tmp_path) is None
    with bind(0) as listener:
        port = listener.getsockname()[1]
        write(tmp_path / "project.json", json.dumps({"port": port}))
        assert find_last_port(tmp_path) == port
        listener.listen(1)
        with choose_port(None, port, bind) as other:
            assert other.getsockname()[1] != port
    with choose_port(None, port, bind) as again:
        assert again.getsockname()[1] == port


# Sessions.


@contextmanager
def started(folder, *options, port=0):
    """The command in a process of its own; yields it with its address."""
    environment = os.environ | {"TENSOR_DROPOUT_LABEL_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tensor_dropout_lab", "label", folder, *NETWORK, "--no-browser", "--port", port]
    with subprocess.Popen(
        [*map(str, command), *map(str, options)],
        env=environment, cwd=Path(__file__).parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            for line in process.stdout:
                if "http://127.0.0.1:" in line:
                    yield process, Asking(int(line.split(":")[2].partition("/")[0]))
                    break
            else:
                pytest.fail(process.stderr.read())
        finally:
            process.kill()


def is_alive(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def children(pid):
    lists = Path(f"/proc/{pid}/task").glob("*/children")  # a process belongs to the thread that started it
    return [int(child) for children in lists for child in children.read_text().split()]


def test_killed_and_started_again_the_page_goes_on_and_ends_with_a_head(folder, tmp_path, monkeypatch):
    """One process is killed at a random moment; this one goes on, at the same address, until Ctrl-C."""
    places = draw_spots(folder, 12)
    cache = ["--cache", tmp_path / "cache"]
    random, confirmed = np.random.default_rng(), []
    with started(folder, *cache) as (process, ask):
        ask("/api/names", {"client": CLIENT, "names": ["spot"]})
        assert "another tensor-dropout label is open for" in fail(folder, *NETWORK, "--no-browser")
        draw_spots(tmp_path / "others", 1)
        taken = fail(tmp_path / "others", *NETWORK, "--no-browser", "--port", ask.port)
        assert f"port {ask.port} cannot be used" in taken
        workers = children(process.pid)
        end = time.monotonic() + random.uniform(0.1, 0.5)
        while time.monotonic() < end:
            image, x = int(random.integers(8, 12)), float(random.uniform())
            ask("/api/actions", {"client": CLIENT, "actions": [place(image, (0, x, 0.5))]})
            confirmed.append((image, x))
        process.send_signal(signal.SIGKILL)
    opened = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    monkeypatch.setenv("TENSOR_DROPOUT_LABEL_TOKEN", TOKEN)
    with ThreadPoolExecutor(1) as pool:
        person = pool.submit(go_on, ask, confirmed, places)
        said = label(folder, *cache)  # at the port of before
        rounds = person.result()
    assert opened == [f"http://127.0.0.1:{ask.port}/?token={TOKEN}"]
    assert rounds[-1]["labelled"] >= 6
    assert f"The head is {folder / 'labels' / 'head'}" in said
    assert said.splitlines()[-1] == f"The table is {folder / 'labels' / 'points.csv'}"
    assert workers
    assert not any(map(is_alive, workers))  # of the server that was killed
    head = folder / "labels" / "head"
    predicted = invoke(
        "predict", folder, "--model", head, "--backbone", "small_backbone:build", "-o", tmp_path / "p.csv"
    )
    assert predicted.exit_code == 0, predicted.output
    with (tmp_path / "p.csv").open() as stream:
        rows = {Path(row["file"]).name: row for row in csv.DictReader(stream)}
    assert len(rows) == 12
    assert -0.5 < float(rows["3.png"]["spot_x"]) < 1.5


def go_on(ask, confirmed, places):
    """What a person does: looks what is there, labels until suggestions come, ends with Ctrl-C."""
    try:
        wait_for(lambda: ask("/api/project")[0] == 200)
        for image, x in dict(confirmed).items():
            assert ask(f"/api/image/{image}")[1]["points"] == [{"x": x, "y": 0.5, "by": "hand"}]
        assert ask("/api/project")[1]["seq"] == 1 + len(confirmed)
        for image, (x, y) in enumerate(places[:6]):
            ask("/api/actions", {"client": CLIENT, "actions": [place(image, (0, x, y))]})
        wait_for(lambda: None not in ask("/api/image/7")[1]["suggestions"])
        return ask("/api/statistics")[1]["rounds"]
    finally:
        os.kill(os.getpid(), signal.SIGINT)


def wait_for(is_so, seconds=200):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            if is_so():
                return
        time.sleep(0.1)
    pytest.fail(f"nothing within {seconds} seconds")
