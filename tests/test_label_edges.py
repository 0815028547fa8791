"""What a labelling session must survive: odd names, files that go away, labels that come from elsewhere. SIMULATED."""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
import time

import numpy as np
import pytest
from PIL import Image

from label_project import CLIENT, OTHER, draw_spots, labelling, open_session, place
from tensor_dropout import TensorDropoutError
from tensor_dropout_lab.labelling.application import LabelOptions, label_pictures
from tensor_dropout_lab.labelling.exchange import read_labels, write_labels
from tensor_dropout_lab.labelling.exporting import collect_labels, take_over
from tensor_dropout_lab.labelling.journal import JournalWriteError
from tensor_dropout_lab.labelling.session import Suggestions


@pytest.fixture
def folder(tmp_path):
    draw_spots(tmp_path / "pictures", 3)
    return tmp_path / "pictures"


def points_of(session, number):
    return session.show_image(number)["points"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are text")
def test_a_name_that_is_no_text_is_listed_and_not_fatal(folder):
    shutil.copy(folder / "0.png", os.fsencode(folder) + b"/caf\xe9.png")
    with labelling(folder) as (_, ask):
        status, project = ask("/api/project")
        assert status == 200
        assert [image["problem"] is None for image in project["images"]] == [True, True, True, False]
        assert "rename it" in project["images"][3]["problem"]
        assert ask("/api/names", {"client": CLIENT, "names": ["tip"]})[0] == 200
        assert ask("/api/actions", {"client": CLIENT, "actions": [place(0, (0, 0.5, 0.5))]})[0] == 200
        assert 400 <= ask("/pictures/3")[0] < 500
    assert (folder / "labels" / "points.csv").read_text() == "file,tip_x,tip_y\n0.png,0.5,0.5\n"


def test_undo_after_a_point_was_removed(folder):
    """Undoing does not bring back a place of a point that does not exist any more, now or at the next start."""
    session = open_session(folder)
    session.rename(CLIENT, ["tip", "base"])
    session.act(CLIENT, [place(0, (0, 0.5, 0.5), (1, 0.25, 0.25))])
    session.act(CLIENT, [{"kind": "clear", "image": 0, "points": [1]}])
    session.rename(CLIENT, ["tip"])
    session.undo(CLIENT)
    assert points_of(session, 0) in ([{"x": 0.5, "y": 0.5, "by": "hand"}], [None])
    session.act(OTHER, [place(1, (0, 0.5, 0.5))])
    session.rename(CLIENT, ["tip", "other"])
    assert points_of(session, 0)[1] is None
    session.close()
    again = open_session(folder)
    assert points_of(again, 0) == points_of(session, 0)
    again.close()


def test_a_journal_that_was_taken_away_is_no_place_to_write_to(folder):
    """What goes into a deleted file would be lost at the end: it is refused."""
    session = open_session(folder)
    session.rename(CLIENT, ["tip"])
    shutil.move(folder / "labels", folder.parent / "kept")
    session.act(CLIENT, [place(0, (0, 0.5, 0.5))])  # moved, and not lost
    assert "0.5" in (folder.parent / "kept" / "journal.jsonl").read_text()
    shutil.rmtree(folder.parent / "kept")
    with pytest.raises(JournalWriteError, match="was deleted"):
        session.act(CLIENT, [place(1, (0, 0.5, 0.5))])
    assert points_of(session, 1) == [None]
    session.close()


def run(folder, **options):
    """The command with a file to write, which ends by itself; returns what it said."""
    said = []
    label_pictures(LabelOptions(folder, backbone="small_backbone:build", size=(16,), **options), said.append)
    return "\n".join(said)


def test_a_table_without_its_journal_is_taken_over_and_not_overwritten(folder, tmp_path):
    """As after a clone of a repository that keeps the table alone."""
    (folder / "labels").mkdir()
    table = "file,tip_x,tip_y\n0.png,0.5,0.25\n2.png,0.125,0.75\n"
    (folder / "labels" / "points.csv").write_text(table)
    said = run(folder, write=tmp_path / "labels.tps")
    assert "2 images" in said
    assert (folder / "labels" / "points.csv").read_text() == table
    assert read_labels(tmp_path / "labels.tps").files == ("0.png", "2.png")
    assert run(folder, write=tmp_path / "labels.tps").count("Took over") == 0  # the journal has them now


def test_a_table_that_is_not_understood_is_not_overwritten_either(folder, tmp_path):
    (folder / "labels").mkdir()
    (folder / "labels" / "points.csv").write_text("something else\n")
    with pytest.raises(TensorDropoutError, match=r"points\.csv"):
        run(folder, write=tmp_path / "labels.tps")
    assert (folder / "labels" / "points.csv").read_text() == "something else\n"


def test_reading_labels_again_adds_nothing_and_takes_no_point_away(folder, tmp_path):
    """A file that lacks a point says nothing against one that was placed here."""
    session = open_session(folder)
    session.rename(CLIENT, ["tip", "base"])
    session.act(CLIENT, [place(0, (0, 0.5, 0.5)), {"kind": "absent", "image": 1, "points": [0, 1]}])
    write_labels(tmp_path / "a.csv", collect_labels(session))
    session.act(CLIENT, [place(0, (1, 0.25, 0.25), by="accepted")])
    session.act(CLIENT, [place(1, (0, 0.75, 0.75))])
    before = (folder / "labels" / "journal.jsonl").read_bytes()
    take_over(session, tmp_path / "a.csv", None, "fractions")
    assert points_of(session, 0)[1] == {"x": 0.25, "y": 0.25, "by": "accepted"}
    assert points_of(session, 1)[0] == {"x": 0.75, "y": 0.75, "by": "hand"}
    assert (folder / "labels" / "journal.jsonl").read_bytes() == before
    session.close()


def test_labels_go_out_and_come_back_in_every_format(folder, tmp_path):
    draw_spots(folder / "more, and more", 2)
    (folder / "more, and more" / "1.png").rename(folder / "more, and more" / "Flügel 1.png")
    session = open_session(folder)
    session.rename(CLIENT, ["tip, left", "中"])
    session.act(CLIENT, [place(0, (0, 0.5, 0.25), (1, 1.0, 0.0)), place(4, (1, 0.125, 0.75))])
    session.act(CLIENT, [{"kind": "absent", "image": 4, "points": [0]}])
    expected = [points_of(session, number) for number in range(5)]
    for name, format in (("a.tps", None), ("a.json", None), ("a.csv", None), ("b.csv", "deeplabcut")):
        write_labels(tmp_path / name, collect_labels(session), format)
    session.close()
    for name in ("a.tps", "a.json", "a.csv", "b.csv"):
        other = open_session(folder, out=tmp_path / f"out {name}")
        take_over(other, tmp_path / name, None, "fractions")
        for number in range(5):
            for one, two in zip(points_of(other, number) or [None] * 2, expected[number], strict=True):
                assert (one is None) == (two is None)
                assert (one or {}).get("absent") == (two or {}).get("absent")
                assert not one or "x" not in one or np.allclose((one["x"], one["y"]), (two["x"], two["y"]), atol=1e-5)
        other.close()


def test_three_thousand_pictures(tmp_path):
    """Listing them, answering and telling what a fit found take no time that a person would notice."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    stream = io.BytesIO()
    Image.new("RGB", (8, 8)).save(stream, "PNG")
    (folder / "0.png").write_bytes(stream.getvalue())
    for number in range(1, 3000):
        os.link(folder / "0.png", folder / f"{number}.png")
    session = open_session(folder)
    session.rename(CLIENT, [f"p{number}" for number in range(20)])
    for number in range(60):
        session.act(CLIENT, [place(number, *((point, 0.5, 0.5) for point in range(20)))])
    shape, times = (3000, 20), {}
    news = Suggestions(
        1, 1, np.full((*shape, 2), 0.5), np.full((*shape, 2, 2), np.nan), np.full(shape, 0.1), np.arange(3000.0),
        np.zeros(3000, bool), np.zeros(shape),
    )  # fmt: skip
    for name, ask in {
        "suggestions": lambda: session.take_suggestions(news, {}),
        "project": lambda: json.dumps(session.describe()),
        "place": lambda: session.act(CLIENT, [place(300, (0, 0.5, 0.5))]),
        "next": lambda: session.find_next(5, "gain"),
        "count": session.count,
    }.items():
        start = time.process_time()
        ask()
        times[name] = time.process_time() - start
    session.close()
    assert times["place"] < 0.1, times
    assert times["next"] < 0.2, times
    assert times["count"] < 0.2, times
    assert times["project"] < 0.3, times
    assert times["suggestions"] < 0.3, times
