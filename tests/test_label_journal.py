"""The journal, the labels that follow from it, and the table: nothing that was confirmed is ever lost."""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import time

import numpy as np
import pytest
from PIL import Image

from label_project import CLIENT, OTHER, draw_spots, open_session, place
from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.data.points_table import match_files, read_table
from tensor_dropout_lab.labelling.journal import Journal, JournalWriteError, find_fault
from tensor_dropout_lab.labelling.labels import Labels


@pytest.fixture
def folder(tmp_path):
    draw_spots(tmp_path / "spots", 4)
    return tmp_path / "spots"


def read_lines(folder):
    return (folder / "labels" / "journal.jsonl").read_text().splitlines()


def read_points(folder):
    return (folder / "labels" / "points.csv").read_text().splitlines()


def values(session, image):
    return {point: (value.by, value.x, value.y) for point, value in session.labels.of(image).items()}


# The file.


def test_what_was_done_is_there_at_the_next_start(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["nose", "tail"])
    session.act(CLIENT, [place(2, (0, 0.25, 0.5), (1, 0.5, 1.0)), {"kind": "absent", "image": 0, "points": [1]}])
    session.close()
    again = open_session(folder)
    assert again.labels.names == ["nose", "tail"]
    assert values(again, "2.png") == {0: ("hand", 0.25, 0.5), 1: ("hand", 0.5, 1.0)}
    assert again.labels.absent(["0.png"]).tolist() == [[False, True]]
    assert again.labels.seq == 3
    assert read_points(folder) == ["file,nose_x,nose_y,tail_x,tail_y", "2.png,0.25,0.5,0.5,1"]
    again.close()


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_torn_last_line_is_cut_off(folder, cut):
    session = open_session(folder)
    session.rename(CLIENT, ["nose"])
    session.act(CLIENT, [place(1, (0, 0.25, 0.5))])
    session.act(CLIENT, [place(1, (0, 0.75, 0.5))])
    session.close()
    path = folder / "labels" / "journal.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    again = open_session(folder)
    assert again.journal.torn
    assert values(again, "1.png") == {0: ("hand", 0.25, 0.5)}
    again.act(CLIENT, [place(0, (0, 0.1, 0.1))])
    again.close()
    assert [json.loads(line).get("seq") for line in read_lines(folder)] == [None, 1, 2, 3]
    assert not open_session(folder).journal.torn


def test_a_header_that_was_torn_is_written_anew(tmp_path):
    (tmp_path / "journal.jsonl").write_bytes(b'{"journal": "tens')
    Journal(tmp_path / "journal.jsonl").close()
    assert json.loads((tmp_path / "journal.jsonl").read_text()) == {"journal": "tensor-dropout label", "version": 1}


HEADER = '{"journal": "tensor-dropout label", "version": 1}\n'
NAMES = '{"seq": 1, "client": "aaaaaaaa", "kind": "names", "names": ["a"]}\n'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a table,\nof something\n", "line 1: it is no journal"),
        ("something else", "line 1: it is no journal"),
        (HEADER.replace("1", "2"), "written by a newer tensor-dropout"),
        (HEADER + "{\n" + NAMES, "line 2: it is no JSON object"),
        (HEADER + NAMES.replace("names", "flip", 1), "line 2 has an action of the kind 'flip'"),
        (HEADER + NAMES + NAMES, "line 3: seq 2 is expected there, and it says 1"),
        (HEADER + NAMES.replace('["a"]', "3"), "line 2: names is a list of texts"),
        (
            HEADER + '{"seq": 1, "client": "aaaaaaaa", "kind": "absent", "image": "a", "points": [0]}\n',
            "line 2: there is",
        ),
    ],
)
def test_a_journal_that_is_not_understood_is_refused_and_kept(folder, content, said):
    (folder / "labels").mkdir()
    path = folder / "labels" / "journal.jsonl"
    path.write_text(content)
    with pytest.raises(TensorDropoutError, match=said):
        open_session(folder)
    assert path.read_text() == content


def test_a_full_disk_changes_nothing(folder):
    """A limit on the size of files stands for the full disk: the write stops in the middle of the line."""
    session = open_session(folder)
    session.rename(CLIENT, ["nose"])
    before = read_lines(folder)
    size = (folder / "labels" / "journal.jsonl").stat().st_size
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 40, limits[1]))
    try:
        with pytest.raises(JournalWriteError, match="nothing was changed"):
            session.act(CLIENT, [place(0, (0, 0.5, 0.5))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert read_lines(folder) == before
    assert values(session, "0.png") == {}
    session.act(CLIENT, [place(0, (0, 0.5, 0.5))])
    assert len(read_lines(folder)) == len(before) + 1


def test_a_table_that_cannot_be_written_is_a_problem_and_no_loss(folder):
    news = []
    session = open_session(folder, news.append)
    session.rename(CLIENT, ["nose"])
    table = folder / "labels" / "points.csv"
    table.unlink()
    table.mkdir()
    session.act(CLIENT, [place(0, (0, 0.5, 0.5))])
    assert "points.csv could not be written" in session.describe()["progress"]["problem"]
    assert [message["type"] for message in news[-2:]] == ["problem", "labels"]
    table.rmdir()
    session.act(CLIENT, [place(1, (0, 0.5, 0.5))])
    assert session.describe()["progress"]["problem"] is None
    assert len(read_points(folder)) == 3


def label_until_killed(folder, pipe):
    session = open_session(folder)
    random = np.random.default_rng(os.getpid())
    while True:
        x = float(random.uniform())
        session.act(CLIENT, [place(int(random.integers(4)), (int(random.integers(2)), x, 0.5))])
        os.write(pipe, f"{session.labels.seq} {x!r}\n".encode())


def test_killed_at_any_moment_it_loses_nothing_that_was_confirmed(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["nose", "tail"])
    session.close()
    random = np.random.default_rng(1)
    confirmed = {}
    for number in range(20):
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                label_until_killed(folder, theirs)
            finally:
                os._exit(1)
        os.close(theirs)
        if number % 2:  # else it may be killed while it opens the journal
            select.select([ours], [], [], 20)
        time.sleep(random.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with os.fdopen(ours) as pipe:
            lines = [line.split() for line in pipe if line.endswith("\n")]
        confirmed |= {int(seq): float(x) for seq, x in lines}
        again = open_session(folder)
        again.close()
        written = {action["seq"]: action for action in map(json.loads, read_lines(folder)[2:])}
        assert {seq: written[seq]["points"][0]["x"] for seq in confirmed} == confirmed
        shown = {line.split(",")[0] for line in read_points(folder)[1:]}
        assert shown == set(again.labels.images())
    assert len(confirmed) > 20


# The labels.


def test_the_last_action_wins_by_point_and_undo_gives_back_what_was_there(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["nose", "tail"])
    session.act(CLIENT, [place(0, (0, 0.1, 0.1), (1, 0.2, 0.2), by="accepted")])
    session.act(OTHER, [place(0, (1, 0.9, 0.9), by="moved")])
    assert values(session, "0.png") == {0: ("accepted", 0.1, 0.1), 1: ("moved", 0.9, 0.9)}
    answer = session.undo(CLIENT)  # the other's point stays
    assert answer["undone"]["seq"] == 2
    assert answer["image"] == 0
    assert values(session, "0.png") == {1: ("moved", 0.9, 0.9)}
    session.undo(OTHER)  # it had moved the point that the first one has taken back meanwhile
    assert values(session, "0.png") == {1: ("accepted", 0.2, 0.2)}
    assert session.undo(OTHER)["undone"] is None
    session.close()
    assert values(open_session(folder), "0.png") == {1: ("accepted", 0.2, 0.2)}


def test_undo_goes_back_step_by_step(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["nose"])
    session.act(CLIENT, [place(0, (0, 0.1, 0.1))])
    session.act(CLIENT, [place(0, (0, 0.2, 0.2))])
    session.act(CLIENT, [{"kind": "clear", "image": 0, "points": [0]}])
    seen = []
    for _ in range(4):
        seen.append(values(session, "0.png"))
        session.undo(CLIENT)
    assert seen == [{}, {0: ("hand", 0.2, 0.2)}, {0: ("hand", 0.1, 0.1)}, {}]
    assert json.loads(read_lines(folder)[-1])["of"] == 2


def test_what_is_sent_again_is_done_once(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["nose"])
    action = place(0, (0, 0.1, 0.1), key="0" * 16)
    first = session.act(CLIENT, [action, action])
    assert session.act(CLIENT, [action]) == first
    session.act(CLIENT, [place(0, (0, 0.2, 0.2), key="1" * 16)])
    undone = session.undo(CLIENT, "2" * 16)
    assert session.undo(CLIENT, "2" * 16) == undone
    assert values(session, "0.png") == {0: ("hand", 0.1, 0.1)}
    assert len(read_lines(folder)) == 5
    with pytest.raises(TensorDropoutError, match="belongs to another action"):
        session.undo(CLIENT, "1" * 16)
    session.close()
    again = open_session(folder)
    assert again.undo(CLIENT, "2" * 16)["undone"] == undone["undone"]


def test_actions_come_together_or_not_at_all(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["nose"])
    with pytest.raises(TensorDropoutError, match="there is no point 1"):
        session.act(CLIENT, [place(0, (0, 0.1, 0.1)), place(0, (1, 0.1, 0.1))])
    assert values(session, "0.png") == {}
    assert len(read_lines(folder)) == 2


def test_names_can_be_added_and_changed_but_no_point_with_labels_goes(folder):
    session = open_session(folder)
    session.rename(CLIENT, ["a", "b", "c"])
    session.act(CLIENT, [place(0, (1, 0.1, 0.1))])
    session.rename(CLIENT, ["one", "two"])
    assert read_points(folder)[0] == "file,one_x,one_y,two_x,two_y"
    with pytest.raises(TensorDropoutError, match="the point 'two' has labels"):
        session.rename(CLIENT, ["one"])
    assert session.summarize([0])[0]["state"] == "started"
    session.act(CLIENT, [{"kind": "absent", "image": 0, "points": [0]}])
    assert session.summarize([0])[0]["state"] == "labelled"
    session.rename(CLIENT, ["one", "two", "three"])
    assert session.summarize([0])[0]["state"] == "started"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("nose", "names is a list of texts"),
        (["nose", 3], "names is a list of texts"),
        (["nose", ""], "1 to 100 letters"),
        ([" nose"], "1 to 100 letters"),
        (["no\nse"], "1 to 100 letters"),
        (["\ud800"], "1 to 100 letters"),
        (["n" * 101], "1 to 100 letters"),
        (["nose", "nose"], "two points are named 'nose'"),
        (["x_tip"], "has an x of its own"),
    ],
)
def test_names_that_the_table_cannot_have(names, said):
    fault = find_fault({"kind": "names", "client": CLIENT, "names": names})
    assert said in fault


@pytest.mark.parametrize(
    ("action", "said"),
    [
        ({"kind": "flip"}, "kind is one of"),
        ({"kind": []}, "kind is one of"),
        ({"kind": "keep", "client": "me"}, "client is 8 digits"),
        ({"kind": "keep", "client": CLIENT, "key": 3}, "key is 16 digits"),
        ({"kind": "keep", "client": CLIENT, "seconds": -1}, "seconds is a number"),
        ({"kind": "keep", "client": CLIENT, "seconds": True}, "seconds is a number"),
        ({"kind": "keep", "client": CLIENT, "image": 3}, "image is a name"),
        ({"kind": "undo", "client": CLIENT, "of": "3"}, "of is the seq"),
        ({"kind": "clear", "client": CLIENT, "image": "a", "points": []}, "a list with at least one"),
        ({"kind": "clear", "client": CLIENT, "image": "a", "points": {}}, "a list with at least one"),
        ({"kind": "clear", "client": CLIENT, "image": "a", "points": [True]}, "numbers from 0 up"),
        ({"kind": "clear", "client": CLIENT, "image": "a", "points": [0, 0]}, "named twice"),
        ({"kind": "place", "client": CLIENT, "image": "a", "points": [0]}, "an object with point, x and y"),
        (place("a", (0, 1.26, 0), client=CLIENT), "x is a fraction from -0.25 to 1.25"),
        (place("a", (0, 0, float("nan")), client=CLIENT), "y is a fraction"),
        (place("a", (0, 0, "0.5"), client=CLIENT), "y is a fraction"),
        (place("a", (0, 0, 0), by="eye", client=CLIENT), "by is one of"),
        (place("a", (0, 0, 0), by=[], client=CLIENT), "by is one of"),
    ],
)
def test_actions_that_nobody_can_have_meant(action, said):
    assert said in find_fault(action)


def test_the_time_that_suggestions_save():
    labels = Labels(["nose", "tail"])
    start = {"client": CLIENT, "image": "a"}
    for seq in range(1, 6):
        labels.apply({**start, **place("a", (0, 0.1, 0.1), (1, 0.1, 0.1), seconds=8), "seq": seq})
    accepted = place("b", (0, 0.1, 0.1), (1, 0.1, 0.1), by="accepted", seconds=3)
    labels.apply({**start, **accepted, "image": "b", "seq": 6})
    assert labels.seconds_saved() == 2 * 4 - 3
    assert Labels().seconds_saved() is None


# The table.


def test_fit_reads_the_table_with_groups_and_missing_points(tmp_path):
    draw_spots(tmp_path, 4)
    (tmp_path / "sub, one").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "sub, one" / "ä.png")
    session = open_session(tmp_path, groups=["fly", "fly", "bee", "bee", "owl"])
    session.rename(CLIENT, ["nose", "apex 2", "max"])
    session.act(CLIENT, [place(4, (0, 0.123456789, 1.0)), place(1, (1, -0.1, 1e-9), (2, 0.5, 0.5))])
    session.act(CLIENT, [{"kind": "absent", "image": 0, "points": [0, 1, 2]}])
    table = read_table(tmp_path / "labels" / "points.csv")
    assert (table.files, table.groups) == (["1.png", "sub, one/ä.png"], ["fly", "owl"])
    with pytest.warns(UserWarning, match="outside of the picture"):
        matched, images = match_files(table, tmp_path, missing="skip")
    assert matched.points == [(0, 1), (2, 3), (4, 5)]
    expected = [[np.nan, np.nan, -0.1, 1e-9, 0.5, 0.5], [0.1234568, 1.0, *[np.nan] * 4]]
    np.testing.assert_array_equal(matched.values, expected)
    assert images.names == table.files
