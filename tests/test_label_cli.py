"""``tensor-dropout label`` as a user types it: mistakes, files of other programs, and sessions that end in any way."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
import warnings
import webbrowser
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from label_project import CLIENT, TOKEN, Asking, draw_spots, place
from tensor_dropout_lab import cli
from tensor_dropout_lab.labelling.application import choose_port, find_last_port
from tensor_dropout_lab.labelling.fit_loop import FitLoop
from tensor_dropout_lab.labelling.folder import list_pictures
from tensor_dropout_lab.labelling.messages import BadPicture, FeaturesDone
from tensor_dropout_lab.labelling.server import bind
from tensor_dropout_lab.labelling.session import Session
from tensor_dropout_lab.labelling.settings import choose_settings

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
    assert "does not exist" in fail(tmp_path / "nowhere", *NETWORK)
    assert not (tmp_path / "nowhere").exists()
    (tmp_path / "empty").mkdir()
    assert "there are no pictures in" in fail(tmp_path / "empty", *NETWORK)
    assert "cannot be made" in fail(folder, *NETWORK, "--out", folder / "0.png" / "labels")
    write(tmp_path / "empty" / "a.png", "no picture")
    assert (
        fail(tmp_path / "empty", *NETWORK) == f"Error: label: the only picture in {tmp_path / 'empty'} cannot be read"
    )
    assert "is an archive; unpack it: label takes a folder" in fail(write(tmp_path / "images.tar", ""), *NETWORK)
    write(tmp_path / "empty" / "b.GIF", "")
    (tmp_path / "empty" / "a.png").unlink()
    assert "1 file was passed over by ending (.gif)" in fail(tmp_path / "empty", *NETWORK)


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
    table = write(tmp_path / "old.csv", "file,nose_x,nose_y\n1.png,80,60\n2.png,5,6\n")
    assert fail(folder, *NETWORK, "--read", table).endswith("are expected; add --units pixels")
    assert not (folder / "labels").exists()  # a start that failed leaves nothing behind
    table = write(tmp_path / "old.csv", "file,nose_x,nose_y\n1.png,0.5,0.5\n")
    said = fail(folder, *NETWORK, "--read", table, "--write", tmp_path / "labels.txt")
    assert "choose one of .tps, .json, .csv, or name it with --format: tps, coco, deeplabcut, csv" in said


def test_what_is_not_shown_is_said(folder, tmp_path, monkeypatch):
    write(folder / "moving.gif", "")
    picture = Image.open(folder / "0.png")
    picture.save(folder / "stack.tif", save_all=True, append_images=[picture])
    picture.save(folder / "single.tif")
    picture.resize((64, 64)).save(folder / "large.png")
    picture.resize((32, 64)).save(folder / "half.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1500)
    (folder / "hidden.png").touch()
    allowed = Path.open
    refuse = PermissionError(13, "Permission denied", str(folder / "hidden.png"))

    def open_(path, *arguments, **more):
        if path.name == "hidden.png":
            raise refuse
        return allowed(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", open_)
    table = write(tmp_path / "old.csv", "file,nose_x,nose_y\n1.png,0.5,0.5\n")
    with warnings.catch_warnings(record=True) as warned:
        said = label(folder, "--read", table, "--write", tmp_path / "new.tps").splitlines()
    assert warned == []  # of half.png, which is read
    assert "1 file was passed over by ending (.gif): save as PNG, JPEG or TIFF what is to be labelled" in said
    assert "1 picture has several pages, such as stack.tif; only the first is shown" in said
    large = "it has 4,096 pixels, more than the 3,000 that are read; make it smaller"
    assert f"Cannot be read: large.png ({large})" in said
    assert "Cannot be read: hidden.png (it may not be read)" in said


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
    said = fail(folder, *NETWORK)
    assert "is not installed; install it with: pip install 'tensor-dropout[label]'" in said
    assert "in a clone: pip install -c constraints.txt -e '.[label]'" in said
    assert not (folder / "labels").exists()


def test_with_the_bare_library_it_says_which_extra(tmp_path):
    program = (
        "import sys; sys.modules['typer'] = None; sys.argv[1:] = ['label', 'wings']\n"
        "from tensor_dropout_lab.__main__ import main\n"
        "main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 1
    assert "pip install 'tensor-dropout[label]'" in result.stderr


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
    assert "Took over the labels of 1 image from" in said
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
    names = write(tmp_path / "names.txt", "nose\ntail\n")
    label(folder, "--points", names, "--write", tmp_path / "c.csv")
    assert (folder / "labels" / "points.csv").read_text().startswith("file,group,nose_x,nose_y,tail_x,tail_y")
    assert "begins with head" in fail(folder, *NETWORK, "--points", write(names, "head\n"))
    (folder / "1.png").unlink()
    said = label(folder, "--write", tmp_path / "d.csv")
    assert "1 image with labels is not in the folder any more, such as 1.png" in said
    assert "labelled already" not in said  # one more point was named: none is complete
    assert "Wrote the labels of 1 image:" in said


def test_options_of_the_network_are_remembered_when_it_has_given_features(folder, tmp_path):
    project = folder / "labels" / "project.json"
    wrong = {"backbone": "my_nets:build", "size": (8,), "group_pattern": "[0-9]"}
    for expected in ("my_nets:build", "efficientnet-lite0"):  # it was not remembered
        settings = choose_settings(wrong, project, needs_network=bool(wrong))
        assert (settings.chosen["backbone"], settings.chosen["size"]) == (expected, wrong.get("size") and [8])
        assert settings.remembered == ""
        pictures = list_pictures(folder, project.parent)
        project.parent.mkdir(exist_ok=True)
        with closing(Session(pictures, project.parent, settings.chosen, print, kept=settings.kept)) as session:
            assert json.loads(project.read_text())["settings"].get("backbone") is None
            wrong = {}
    assert settings.chosen["group_pattern"] == "[0-9]"  # it fitted the names
    with closing(Session(pictures, project.parent, settings.chosen | {"size": [8]}, print, kept={})) as session:
        fits = FitLoop(session, tmp_path, say=print)
        fits._take(BadPicture(0, "damaged"))
        fits._take(FeaturesDone(1))
        assert json.loads(project.read_text())["settings"] == {}
        fits._take(FeaturesDone(2))
    settings = choose_settings({}, project, needs_network=False)
    assert settings.chosen["size"] == [8]
    assert settings.remembered == " (--size 8 from the last start; --size 224 changes it)"
    assert choose_settings({"size": (224,)}, project, needs_network=False).remembered == ""
    assert choose_settings({"backbone": "small_backbone:build"}, project).chosen["size"] is None
    write(project, project.read_text().replace('"weights": null', '"weights": "gone.pt"'))
    said = fail(folder)
    assert "there is no file gone.pt of weights; correct --weights (--weights gone.pt from the last start; " in said


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
        said = fail(folder, *NETWORK, "--no-browser")
        assert "another tensor-dropout label is open for" in said
        assert f"its page is at http://127.0.0.1:{ask.port} in the browser that opened it" in said
        assert TOKEN not in said
        draw_spots(tmp_path / "others", 1)
        taken = fail(tmp_path / "others", *NETWORK, "--no-browser", "--port", ask.port)
        assert f"port {ask.port} cannot be used" in taken
        assert not (tmp_path / "others" / "labels").exists()
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


def test_sigterm_ends_a_session_within_seconds(folder, monkeypatch):
    monkeypatch.setenv("TENSOR_DROPOUT_LABEL_TOKEN", TOKEN)
    with bind(0) as listener:
        ask = Asking(listener.getsockname()[1])

    asked = []

    def end():
        try:
            wait_for(lambda: ask("/api/project")[0] == 200)
        finally:
            asked.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as pool:
        person = pool.submit(end)
        said = label(folder, "--no-browser", "--port", ask.port)
        person.result()
    assert time.monotonic() - asked[0] < 10
    assert said.splitlines()[-1] == f"The table is {folder / 'labels' / 'points.csv'}"


def test_the_folder_of_labels_is_not_that_of_its_head(folder, tmp_path):
    (folder / "labels" / "head").mkdir(parents=True)
    write(folder / "labels" / "head" / "fit.json", "{}")
    said = invoke("predict", folder, "--model", folder / "labels", "-o", tmp_path / "p.csv").output
    assert f"did you mean {folder / 'labels' / 'head'}?" in said


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
