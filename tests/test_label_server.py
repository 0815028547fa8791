"""The server of the labelling page, asked over HTTP as the page does, and as others should not."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from label_project import CLIENT, OTHER, TOKEN, draw_spots, labelling, open_session, place
from tensor_dropout_lab.labelling.events import Events
from tensor_dropout_lab.labelling.messages import Suggestions
from tensor_dropout_lab.labelling.server import LARGEST_BODY, PAGE, make_server

N = 6


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A folder with two points, and its server; tests use different pictures."""
    folder = tmp_path_factory.mktemp("served")
    draw_spots(folder, N)
    (folder / "bad.png").write_text("no picture")
    (folder / "secret.txt").write_text("secret")
    Image.fromarray(np.arange(4096, dtype=np.uint16).reshape(64, 64)).save(folder / "deep.tif")
    with labelling(folder) as (session, ask):
        ask("/api/names", {"client": CLIENT, "names": ["nose", "tail"]})
        yield session, ask


def act(ask, *actions, client=CLIENT):
    return ask("/api/actions", {"client": client, "actions": list(actions)})


# What the page asks.


def test_the_project(served):
    _, ask = served
    status, project = ask("/api/project")
    assert status == 200
    assert project["names"] == ["nose", "tail"]
    assert [image["name"] for image in project["images"]] == [*(f"{n}.png" for n in range(N)), "bad.png", "deep.tif"]
    image = project["images"][5]
    del image["state"]
    assert image == {
        "id": 5, "name": "5.png", "width": 32, "height": 32, "check": False, "doubt": None, "group": None,
        "problem": None, "confirmed": 0,
    }  # fmt: skip
    assert project["images"][N]["state"] == "unreadable"
    assert project["images"][N]["problem"]
    assert project["progress"] == {
        "features": {"done": 0, "total": N + 1}, "fit": {"state": "waiting", "message": None}, "round": None,
        "problem": None,
    }  # fmt: skip


def test_points_are_placed_and_taken_back(served):
    _, ask = served
    status, answer = act(ask, place(0, (0, 0.25, 0.5)))
    assert status == 200
    assert [(image["id"], image["state"], image["confirmed"]) for image in answer["images"]] == [(0, "started", 1)]
    act(ask, {"kind": "absent", "image": 0, "points": [1]})
    shown = ask("/api/image/0")[1]
    assert shown["points"] == [{"x": 0.25, "y": 0.5, "by": "hand"}, {"absent": True}]
    assert shown["suggestions"] == [None, None]
    assert ask("/api/project")[1]["images"][0]["state"] == "labelled"
    undone = ask("/api/undo", {"client": CLIENT})[1]
    assert undone["undone"]["kind"] == "absent"
    assert undone["image"] == undone["undone"]["image"] == undone["images"][0]["id"] == 0
    assert ask("/api/undo", {"client": OTHER})[1]["undone"] is None
    counts = ask("/api/statistics")[1]
    assert counts["hand"] >= 1
    assert counts["rounds"] == []


def test_the_next_picture(served):
    _, ask = served
    act(ask, place(2, (0, 0.5, 0.5), (1, 0.5, 0.5)))
    assert ask("/api/next?after=1&order=folder") == (200, {"id": 3})
    assert ask("/api/next?after=5")[1] == {"id": 7}  # the unreadable one is passed over
    assert ask("/api/next?after=7")[1]["id"] in (0, 1)


def test_pictures_and_thumbnails(served):
    session, ask = served
    status, headers, content = ask.raw("GET", f"/pictures/3?token={TOKEN}")
    assert (status, headers["content-type"]) == (200, "image/png")
    assert content == (session.folder.path / "3.png").read_bytes()
    status, headers, content = ask.raw("GET", f"/thumbnails/3?token={TOKEN}")
    assert (status, headers["content-type"], content[:2]) == (200, "image/jpeg", b"\xff\xd8")
    assert ask("/pictures/6")[0] == 400
    assert "error" in ask("/pictures/6")[1]


def test_a_picture_of_16_bits_has_a_window(served):
    _, ask = served
    assert ask("/api/image/3")[1]["window"] is None
    window = ask("/api/image/7")[1]["window"]
    assert (window["min"], window["max"]) == (0, 4095)
    shown = [ask.raw("GET", f"/pictures/7?low={low}&high={low + 100}&token={TOKEN}")[2] for low in (0, 2000)]
    assert shown[0].startswith(b"\x89PNG")
    assert shown[0] != shown[1]
    for query in ("low=1", "low=2&high=1", "low=nan&high=3", "low=a&high=b"):
        assert ask(f"/pictures/7?{query}")[0] == 400


def test_the_page_and_its_files(served):
    _, ask = served
    status, headers, content = ask.raw("GET", "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert content == (PAGE / "index.html").read_bytes()
    status, headers, _ = ask.raw("GET", "/page/main.js")
    assert (status, headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    assert headers["cache-control"] == "no-cache"
    assert headers["content-security-policy"].startswith("default-src 'self'; img-src 'self' blob: data:;")
    assert headers["x-content-type-options"] == "nosniff"
    assert ask.raw("HEAD", "/")[0] == 200


def test_labels_as_files_of_other_programs(served):
    _, ask = served
    act(ask, place(4, (0, 0.5, 0.5), (1, 0.25, 0.25)))
    for name, beginning, file in (
        ("tps", "LM=2", "labels.tps"), ("csv", "file,nose_x", "points.csv"), ("coco", "{", "labels-coco.json"),
        ("deeplabcut", "scorer,", "CollectedData_labels.csv"),
    ):  # fmt: skip
        body = json.dumps({"format": name}).encode()
        status, headers, content = ask.raw("POST", "/api/export", body, {"X-Token": TOKEN})
        assert status == 200
        assert content.decode().startswith(beginning)
        assert headers["content-disposition"] == f'attachment; filename="{file}"'
    assert ask("/api/export", {"format": "docx"})[0] == 400


def test_what_is_not_ready_is_said_so(served):
    _, ask = served
    assert ask("/api/fit", {})[0] == 409
    status, answer = ask("/api/head", {})
    assert status == 409
    assert "5 labelled images are needed" in answer["error"]


def read_event(stream):
    """The next message of a stream of events."""
    while True:
        line = stream.readline()
        if line.startswith(b"data: "):
            return json.loads(line[6:])


def test_one_page_hears_of_the_others(served):
    session, ask = served
    connection = http.client.HTTPConnection("127.0.0.1", ask.port, timeout=10)
    connection.request("GET", f"/api/events?token={TOKEN}")
    answer = connection.getresponse()
    assert answer.getheader("content-type").startswith("text/event-stream")
    assert answer.readline() == b": hello\n"
    act(ask, place(3, (0, 0.5, 0.5)), client=OTHER)
    news = read_event(answer)
    assert (news["type"], news["client"], news["images"][0]["id"]) == ("labels", OTHER, 3)
    session.take_progress(3)
    assert read_event(answer) == {"type": "progress", "what": "features", "done": 3, "total": N + 1}
    session.take_problem(3, "its pixels are damaged")
    assert read_event(answer)["images"][0]["state"] == "unreadable"
    ask("/api/names", {"client": OTHER, "names": ["nose", "tail", "wing"]})
    assert read_event(answer)["names"] == ["nose", "tail", "wing"]
    ask("/api/names", {"client": OTHER, "names": ["nose", "tail"]})
    connection.close()


# Who may not ask.


@pytest.mark.parametrize("path", ["/api/project", "/api/events", "/pictures/0", "/thumbnails/0", "/api/nothing"])
def test_without_the_token_nothing_is_told(served, path):
    _, ask = served
    for headers in ({}, {"X-Token": ""}, {"X-Token": TOKEN[:-1]}, {"X-Token": f"{TOKEN}x"}, {"X-Token": "\xe4"}):
        assert ask.raw("GET", path, headers=headers)[0] == 403
    assert ask.raw("GET", f"{path}?token={TOKEN[:-1]}")[0] == 403
    assert ask.raw("GET", f"{path}?token={TOKEN}&token={TOKEN}")[0] == 403
    assert ask.raw("POST", "/api/actions", b"{}")[0] == 403
    assert ask.raw("GET", f"/api/project?token={TOKEN}")[0] == 403  # it has a header for it


def test_other_hosts_and_other_pages_are_refused(served):
    _, ask = served
    right = {"X-Token": TOKEN}
    for host in ("evil.example", f"evil.example:{ask.port}", "127.0.0.1", f"127.0.0.1:{ask.port + 1}", ""):
        assert ask.raw("GET", "/", headers={"Host": host})[0] == 403
        assert ask.raw("GET", "/api/project", headers={**right, "Host": host})[0] == 403
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{ask.port}", f"http://localhost:{ask.port}"):
        assert ask.raw("POST", "/api/undo", b'{"client": "aaaaaaaa"}', {**right, "Origin": origin})[0] == 403
    assert ask("/api/project", Origin=f"http://127.0.0.1:{ask.port}")[0] == 200
    host = f"localhost:{ask.port}"
    assert ask("/api/project", Host=host, Origin=f"http://{host}")[0] == 200


def test_it_listens_on_this_machine_alone(served):
    _, ask = served
    others = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}
    for address in others - {"127.0.0.1"}:
        with pytest.raises(ConnectionError), socket.create_connection((address, ask.port), timeout=2):
            pass
    with pytest.raises(ConnectionError), socket.create_connection(("127.0.0.2", ask.port), timeout=2):
        pass


@pytest.mark.parametrize(
    "path",
    [
        "/pictures/99", "/pictures/-1", "/pictures/0/..", "/pictures/secret.txt", "/pictures/..%2fsecret.txt",
        "/pictures/%2e%2e/secret.txt", "/pictures/" + "9" * 5000, "/pictures/%D9%A1", "/pictures/1.0",
        "/page/..%2fserver.py", "/page/../server.py", "/page//etc/passwd", "/page/%00", "/page/", "/api/image/x",
        "/api/next?after=x", "//etc/passwd", "/secret.txt",
    ],
)  # fmt: skip
def test_no_path_leads_out(served, path):
    _, ask = served
    status, answer = ask(path)
    assert status == 404
    assert set(answer) == {"error"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 10_000, "not JSON"),
        (b'{"a": NaN}', "NaN is no number"),
        (b"[]", "a JSON object"),
        (b"{}", "actions is a list"),
        (b'{"actions": []}', "actions is a list"),
        (b'{"actions": [3]}', "an action is an object"),
        (b'{"actions": [{"kind": "names"}]}', "an action is an object"),
        (b'{"actions": [{"kind": "keep"}]}', "no such image"),
        (b'{"actions": [{"kind": "keep", "image": "../secret.txt"}]}', "no such image"),
        (b'{"actions": [{"kind": "keep", "image": 99}]}', "no such image"),
        (b'{"actions": [{"kind": "keep", "image": true}]}', "no such image"),
        (b'{"actions": [{"kind": "keep", "image": 1}]}', "client is 8 digits"),
        (b'{"client": "aaaaaaaa", "actions": [{"kind": "clear", "image": 1, "points": [2]}]}', "there is no point 2"),
    ],
)
def test_requests_that_cannot_be_meant(served, body, said):
    session, ask = served
    before = session.labels.seq
    status, answer = ask("/api/actions", body)
    assert status == 400
    assert said in answer["error"]
    assert session.labels.seq == before


@pytest.mark.parametrize("value", ["Infinity", "-1e999", "1e999", "1.3", "null", '"0.5"', "true", "[]"])
def test_coordinates_that_are_none(served, value):
    _, ask = served
    points = f'[{{"point": 0, "x": 0.5, "y": {value}, "by": "hand"}}]'
    action = f'{{"kind": "place", "image": 1, "points": {points}}}'
    assert ask("/api/actions", f'{{"client": "{CLIENT}", "actions": [{action}]}}'.encode())[0] == 400
    assert ask("/api/image/1")[1]["points"] == [None, None]


def test_too_large_requests_and_wrong_methods(served):
    _, ask = served
    assert ask("/api/actions", b" " * (LARGEST_BODY + 1))[0] == 413
    assert ask("/api/actions")[0] == 405
    assert ask("/api/project", {})[0] == 405
    assert ask("/api/project", method="DELETE")[0] == 405
    assert ask("/api/undo", {"client": 3})[0] == 400
    assert ask("/api/names", {"client": CLIENT, "names": "nose"})[0] == 400


def test_what_is_no_http_is_answered_shortly(served):
    _, ask = served
    for garbage in (b"\x16\x03\x01\x02\x00\x01", b"GET\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", ask.port), timeout=5) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1000).split(b"\r\n")[0] in (
                b"",
                b"HTTP/1.1 400 Bad Request",
                b"HTTP/1.1 403 Forbidden",
            )
    assert ask("/api/project")[0] == 200


def test_a_first_signal_ends_in_order_and_a_second_at_once(monkeypatch):
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(os, "write", lambda file, text: ended.append(text.decode()))
    server = make_server(lambda *_: None, Events())
    server.handle_exit(signal.SIGINT, None)
    assert server.should_exit
    assert not server.terminated
    server.handle_exit(signal.SIGTERM, None)  # timeout sends its signal twice: that is one
    assert server.terminated
    assert ended == []
    server._asked -= 1
    server.handle_exit(signal.SIGTERM, None)
    assert ended[1:] == [130]
    assert "without a new head" in ended[0]


# What fits say, and how quickly it is told.


def make_suggestions(number, seq, n, n_points, **changes):
    arrays = {
        "points": np.full((n, n_points, 2), 0.5), "ellipses": np.tile(np.eye(2) * 0.01, (n, n_points, 1, 1)),
        "std": np.full((n, n_points), 0.02), "gain": np.zeros(n), "doubtful": np.zeros(n, bool),
        "far": np.zeros((n, n_points)),
    }  # fmt: skip
    return Suggestions(number, seq, **(arrays | changes))


def test_suggestions_doubts_and_slips(tmp_path):
    draw_spots(tmp_path, 4)
    news = []
    session = open_session(tmp_path, news.append)
    session.rename(CLIENT, ["nose"])
    session.act(CLIENT, [place(0, (0, 0.9, 0.9))])
    points = np.full((4, 1, 2), 0.5)
    points[3] = np.nan
    doubtful, far = np.array([True, True, False, True]), np.zeros((4, 1))
    far[0] = 0.1
    gain = np.array([-np.inf, 1.0, 2.0, 0.5])
    ellipses = np.full((4, 1, 2, 2), np.nan)
    changes = {"points": points, "doubtful": doubtful, "far": far, "gain": gain, "ellipses": ellipses}
    session.take_suggestions(make_suggestions(1, session.labels.seq, 4, 1, **changes), {"labelled": 1})
    images = session.describe()["images"]
    assert [image["state"] for image in images] == ["labelled", "doubtful", "predicted", "open"]
    assert [image["check"] for image in images] == [True, False, False, False]
    assert [image["id"] for image in news[-1]["images"]] == [0, 1, 2]
    assert [session.show_image(image)["checks"] for image in (0, 1)] == [[0], []]
    assert session.show_image(1)["suggestions"] == [{"x": 0.5, "y": 0.5, "ellipse": None}]
    assert session.show_image(3)["suggestions"] == [None]
    assert [session.find_next(after, "gain") for after in (None, 2)] == [2, 1]
    assert session.find_next(2, "folder") == 3
    session.act(CLIENT, [place(0, (0, 0.5, 0.5), by="moved")])  # the slip is mended
    assert not session.summarize([0])[0]["check"]
    assert session.show_image(0)["checks"] == []
    session.undo(CLIENT)
    assert session.summarize([0])[0]["check"]
    assert session.show_image(0)["checks"] == [0]
    session.act(CLIENT, [{"kind": "keep", "image": 0}])
    assert not session.summarize([0])[0]["check"]
    assert session.show_image(0)["checks"] == []
    session.rename(CLIENT, ["nose", "tail"])  # the fit knows nothing of the new point
    assert session.show_image(1)["suggestions"][1] is None
    assert session.count()["rounds"] == [{"labelled": 1}]


def test_the_points_to_check_are_named_and_small_errors_are_none(tmp_path):
    draw_spots(tmp_path, 2)
    session = open_session(tmp_path)
    session.rename(CLIENT, ["a", "b", "c"])
    session.act(CLIENT, [place(image, *((point, 0.5, 0.5) for point in range(3))) for image in (0, 1)])
    far = np.array([[0.2, 0.012, 0.02], [0.012, 0.0, 0.0]])  # of a picture with 800 pixels, 0.012 is ten
    session.take_suggestions(make_suggestions(1, session.labels.seq, 2, 3, far=far), {"labelled": 2})
    assert [session.show_image(image)["checks"] for image in (0, 1)] == [[0, 2], []]
    assert [image["check"] for image in session.describe()["images"]] == [True, False]
    session.close()


def test_the_curve_of_errors_is_there_after_a_restart(tmp_path):
    draw_spots(tmp_path, 2)
    rounds = [{"labelled": 5, "error_pixels": 2.5, "error_percent": None}, {"labelled": 6, "error_pixels": 2.25}]
    session = open_session(tmp_path)
    session.rename(CLIENT, ["nose"])
    for number, record in enumerate(rounds, start=1):
        session.take_suggestions(make_suggestions(number, 1, 2, 1), record)
    session.close()
    again = open_session(tmp_path)
    assert again.count()["rounds"] == rounds
    assert not again.curve_is_damaged
    again.close()
    path = tmp_path / "labels" / "rounds.jsonl"
    for damage in (
        path.read_text()[:-5],
        "[]\n",
        '{"labelled": 5, "error_pixels": NaN}\n',
        '{"labelled": "5"}\n',
        "\0",
    ):
        path.write_text(damage)
        with closing(open_session(tmp_path)) as damaged:
            assert damaged.curve_is_damaged
            assert damaged.count()["rounds"] == []
    damaged.take_suggestions(make_suggestions(1, 1, 2, 1), rounds[0])
    with closing(open_session(tmp_path)) as anew:
        assert anew.count()["rounds"] == rounds[:1]
    (tmp_path / "labels" / "journal.jsonl").unlink()
    with closing(open_session(tmp_path)) as empty:
        assert empty.count()["rounds"] == []  # they are of labels that are gone


def test_pictures_that_were_deleted_do_not_count(tmp_path):
    draw_spots(tmp_path, 3)
    with closing(open_session(tmp_path)) as session:
        session.rename(CLIENT, ["nose"])
        session.act(CLIENT, [place(image, (0, 0.5, 0.5)) for image in range(3)])
    (tmp_path / "1.png").unlink()
    with closing(open_session(tmp_path)) as session:
        counts = session.count()
    assert (counts["labelled_images"], counts["hand"]) == (2, 2)


def test_the_picture_that_is_worked_on_waits_until_it_is_complete(tmp_path):
    draw_spots(tmp_path, 3)
    session = open_session(tmp_path)
    session.rename(CLIENT, ["nose", "tail"])
    session.act(CLIENT, [place(0, (0, 0.1, 0.1))])
    assert np.isnan(session.copy_targets()[1]).all()
    assert not np.isnan(session.copy_targets(whole=True)[1]).all()
    session.act(CLIENT, [place(1, (0, 0.2, 0.2), (1, 0.3, 0.3))])
    seq, targets = session.copy_targets()
    assert seq == 3
    np.testing.assert_array_equal(targets[:2], [[[0.1, 0.1], [np.nan, np.nan]], [[0.2, 0.2], [0.3, 0.3]]])


def test_a_thousand_pictures_of_68_points_are_answered_at_once(tmp_path):
    """The journal, the table of 1 MB and the answer; the bar of the issue is 100 ms."""
    draw_spots(tmp_path, 1)
    for number in range(1, 1000):
        (tmp_path / f"{number}.png").hardlink_to(tmp_path / "0.png")
    session = open_session(tmp_path)
    session.rename(CLIENT, [f"p{point}" for point in range(68)])
    for start in range(0, 1000, 500):
        labels = [place(image, *((point, 0.123456, 0.5) for point in range(68))) for image in range(start, start + 500)]
        session.act(CLIENT, labels)
    times = []
    for image in range(20):
        began = time.perf_counter()
        session.act(CLIENT, [place(image, (image, 0.5, 0.5))])
        times.append(time.perf_counter() - began)
    assert (tmp_path / "labels" / "points.csv").stat().st_size > 500_000
    assert np.median(times) < 0.1
