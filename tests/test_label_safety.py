"""A thousand malformed requests to a real server, as ``tensor-dropout label`` starts it. The pictures are SIMULATED.

Beside the folder of pictures lie files with a secret, which links in the folder point to. No answer may have it.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image, PngImagePlugin

from label_project import TOKEN, draw_spots, place

SECRET = b"the-secret-beside-the-folder"
NAMES = ["tip", "base"]
CLIENT = "0123abcd"
MANY = [f"n{number}" for number in range(50_000)]
REQUESTS = 1000


def plant(base: Path) -> Path:
    """A folder of pictures, with links out of it, and secrets around it."""
    folder, outside = base / "pictures", base / "outside"
    draw_spots(folder, 4)
    outside.mkdir()
    info = PngImagePlugin.PngInfo()
    info.add_text("secret", SECRET.decode())
    for path in (base / "secret.png", outside / "secret.png", folder / ".hidden.png"):
        Image.new("RGB", (8, 8), "red").save(path, pnginfo=info)
    for path in (base / "secret.txt", outside / "secret.txt", folder / "secret.txt", folder / "secret.json"):
        path.write_bytes(SECRET)
    (folder / "link.png").symlink_to(base / "secret.png")
    (folder / "linked").symlink_to(outside)
    (folder / "text.png").symlink_to(base / "secret.txt")
    (folder / "broken.png").write_text("no picture")
    (base / "names.txt").write_text("\n".join(NAMES))
    return folder


@dataclass
class Server:
    """The process, and a way to send it bytes."""

    process: subprocess.Popen
    port: int
    folder: Path
    errors: Path

    def send(self, request: bytes, timeout: float = 20) -> bytes:
        """The whole answer to what is sent on a connection of its own."""
        parts = []
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            try:
                connection.sendall(request)
                while part := connection.recv(1 << 16):
                    parts.append(part)
            except (ConnectionResetError, BrokenPipeError):
                pass  # refused before all was sent
        return b"".join(parts)

    def ask(self, path: str, body: object = None) -> tuple[int, bytes]:
        """The status and the content of an answer to a sound request."""
        data = None if body is None else json.dumps(body).encode()
        answer = self.send(make_request("GET" if data is None else "POST", path, self.port, body=data))
        head, _, content = answer.partition(b"\r\n\r\n")
        return int(head.split()[1]), content


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    base = tmp_path_factory.mktemp("safety")
    folder = plant(base)
    command = [sys.executable, "-m", "tensor_dropout_lab", "label", str(folder), "--points", str(base / "names.txt")]
    command += ["--backbone", "small_backbone:build", "--size", "16", "--no-browser", "--cache", str(base / "cache")]
    environment = {**os.environ, "TENSOR_DROPOUT_LABEL_TOKEN": TOKEN, "PYTHONPATH": str(Path(__file__).parent)}
    with (base / "errors.txt").open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment, cwd=base)
    try:
        yield Server(process, read_port(process), folder, base / "errors.txt")
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def read_port(process: subprocess.Popen) -> int:
    """What the command says of its address."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        found = re.search(rb"127\.0\.0\.1:(\d+)/\?token=", line)
        if found:
            return int(found[1])
    raise AssertionError(b"".join(lines))


# Requests.


def make_request(method, path, port, *, headers=None, body=None, host=None, target=None):
    head = {"Host": host or f"127.0.0.1:{port}", "X-Token": TOKEN, "Connection": "close"}
    head |= {} if body is None else {"Content-Length": str(len(body)), "Content-Type": "application/json"}
    head |= headers or {}
    lines = [f"{method} {path if target is None else target} HTTP/1.1"]
    lines += [f"{key}: {value}" for key, value in head.items() if value is not None]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")


def choose_path(draw: random.Random) -> str:
    """No address that has an answer."""
    parts = (
        "..",
        "%2e%2e",
        "%2E.",
        "..%2f..",
        "..%5c..",
        "..\\..",
        "....//",
        "%252e%252e",
        "%c0%ae%c0%ae",
        "%uff0e",
        ".",
        "%00",
        "0%00.png",
        "secret.txt",
        "secret.png",
        "secret.json",
        "link.png",
        "linked/secret.png",
        ".hidden.png",
        "0.png",
        "labels/journal.jsonl",
        "labels",
        "etc/passwd",
        "/etc/passwd",
        "C:\\secret.txt",
        "file:///etc/passwd",
        "-1",
        "1e0",
        "0x1",
        "+1",
        "1_0",
        "%D9%A3",
        "%B2",
        "999",
        "9" * 30,
        "a" * 5000,
        "0;0",
        "0/../1",
        "server.py",
        "__init__.py",
        "~root",
        "%",
        "%zz",
        "%ff%fe",
        "nul",
        "index.html%00.png",
        "app.js/..",
        "http://x/",
    )
    start = draw.choice(("/", "/page/", "/pictures/", "/thumbnails/", "/api/image/", "/api/", "/page/../", "//"))
    chosen = draw.choices(parts, k=draw.randint(1, 5))
    return start + draw.choice(("/", "/", "%2f", "\\")).join(chosen) + draw.choice(("", "", "/", "?", "?low=1&high=2"))


def make_path_request(draw, port):
    path = choose_path(draw)
    target = draw.choice((None, None, None, f"http://127.0.0.1:{port}{path}"))
    return make_request("GET", path, port, target=target)


def make_token_request(draw, port):
    wrong = draw.choice(
        (
            None,
            "",
            TOKEN[:-1],
            TOKEN[:8],
            TOKEN + "0",
            TOKEN.upper(),
            TOKEN[::-1],
            "null",
            "*",
            "\xe9" * 32,
            "0" * 32,
            f"Bearer {TOKEN}",
            f"{TOKEN}, {TOKEN}",
            "x" * 5000,
            f"{TOKEN}\x0b",
        )
    )
    path = draw.choice(("/api/project", "/api/image/0", "/pictures/0", "/thumbnails/1", "/api/events", "/api/next"))
    if draw.random() < 0.4:  # in the address; not for all addresses is that the right place
        token = draw.choice((TOKEN[:-1], "", "%00", f"{TOKEN}&token={TOKEN}", f"{TOKEN}%20", "a" * 3000))
        return make_request("GET", f"{path}?token={token}", port, headers={"X-Token": None})
    if draw.random() < 0.2:
        return make_request("POST", f"/api/actions?token={TOKEN}", port, headers={"X-Token": None}, body=b"{}")
    return make_request("GET", path, port, headers={"X-Token": wrong})


def make_method_request(draw, port):
    method = draw.choice(
        ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "FOO", "get", "G\x00T", "", "PROPFIND")
    )
    path = draw.choice(("/", "/api/project", "/api/actions", "/pictures/0", "/page/app.js", "*", "/api/export"))
    if draw.random() < 0.3:
        method, path = draw.choice(
            (("GET", "/api/actions"), ("GET", "/api/undo"), ("POST", "/"), ("POST", "/pictures/0"))
        )
    return make_request(method, path, port, body=b"" if method == "POST" else None)


def make_action(**changes):
    return {"client": CLIENT, "actions": [{**place(0, (0, 0.5, 0.5)), **changes}]}


def choose_body(draw):
    """An address, and what it must refuse."""
    junk = (
        None,
        True,
        -1,
        1.5,
        1e308,
        10**400,
        "",
        "0",
        "\ud800",
        "\x00",
        [],
        {},
        [[]],
        [None],
        {"a": [1]},
        "a" * 9999,
    )
    wrong = draw.choice(junk)
    points = draw.choice(
        (
            junk[2],
            [],
            [wrong],
            [{"point": wrong, "x": 0.5, "y": 0.5, "by": "hand"}],
            [{}],
            [{"point": 0, "x": draw.choice((None, "0", 7, -3, 10**400, [])), "y": 0.5, "by": "hand"}],
            [{"point": 0, "x": 0.5, "y": True, "by": "hand"}],
            [{"point": 99, "x": 0.5, "y": 0.5, "by": "hand"}],
            [{"point": 0, "x": 0.5, "y": 0.5, "by": wrong}],
            place(0, (0, 0.5, 0.5), (0, 0.1, 0.1))["points"],
        )
    )
    return draw.choice(
        (
            ("/api/actions", make_action(points=points)),
            ("/api/actions", make_action(image=draw.choice((None, True, -1, 4.5, 10**400, "0", [0], 99, {})))),
            ("/api/actions", make_action(kind=draw.choice((None, "undo", "names", "PLACE", 3, [], {}, "\ud800")))),
            ("/api/actions", make_action(seconds=draw.choice((-1, True, "3", [], 1e308, 10**400)))),
            ("/api/actions", make_action(key=draw.choice(("", 3, "g" * 16, [], "\ud800")))),
            (
                "/api/actions",
                {**make_action(), "client": draw.choice((None, 3, "", "0123ABCD", "0123abcde", [], "\ud800"))},
            ),
            ("/api/actions", {"client": CLIENT, "actions": draw.choice((None, 3, "a", {}, [], [wrong], [[]] * 2000))}),
            ("/api/undo", {"client": draw.choice((None, 3, "", [], {}, "\x00"))}),
            ("/api/undo", {"client": CLIENT, "key": draw.choice((3, "", [], "x" * 16))}),
            (
                "/api/names",
                {
                    "client": CLIENT,
                    "names": draw.choice((None, 3, "ab", {}, ["tip"], [1, 2], ["tip", "tip"], [], wrong)),
                },
            ),
            (
                "/api/names",
                {
                    "client": CLIENT,
                    "names": [*NAMES, draw.choice(("", " ", "\ud800", "\x00", "a\nb", "a" * 999, None))],
                },
            ),
            ("/api/names", {"client": CLIENT, "names": MANY}),
            ("/api/export", {"format": draw.choice((None, 3, "", "TPS", "../csv", "xlsx", [], {}))}),
        )
    )


def make_body_request(draw, port):
    path, body = choose_body(draw)
    data = json.dumps(body).encode()
    spoilt = draw.choice(
        (None,) * 12
        + (
            data[: len(data) // 2],
            b"\xff\xfe" + data,
            b"[" * 60_000,
            b'{"a":' * 60_000,
            b"",
            b"null",
            b"[]",
            b"3",
            b'"a"',
            data.replace(b"0.5", b"NaN") + b",",
            b'{"client": NaN}',
            b'{"client": -Infinity}',
            b" " * 1_000_001,
            b"\0" * 99,
            draw.randbytes(200),
            b'{"client": "0123abcd", "actions": ' + b"9" * 100_000 + b"}",
            data + data,
        )
    )
    return make_request("POST", path, port, body=data if spoilt is None else spoilt)


def make_origin_request(draw, port):
    hosts = (
        "evil.example",
        f"evil.example:{port}",
        "127.0.0.1",
        "localhost",
        f"127.0.0.1:{port + 1}",
        "",
        f"[::1]:{port}",
        f"127.0.0.1:{port}@evil",
        f"127.0.0.1:{port}.evil.example",
        f"0.0.0.0:{port}",
        f"127.1:{port}",
        "\xe9",
    )
    origins = (
        "http://evil.example",
        "null",
        f"https://127.0.0.1:{port}",
        f"http://127.0.0.1:{port + 1}",
        "*",
        f"http://localhost:{port}",
        f"http://127.0.0.1:{port}/",
        f"http://evil.example:{port}",
        "file://",
    )
    path = draw.choice(("/", "/api/project", "/pictures/0", "/page/app.js", "/api/events"))
    if draw.random() < 0.5:
        host = draw.choice(hosts)
        return make_request("GET", path, port, headers={"Host": host})
    return make_request("GET", path, port, headers={"Origin": draw.choice(origins)})


def make_broken_request(draw, port):
    """What is not HTTP, or lies about its length."""
    sound = make_request("GET", "/api/project", port)
    return draw.choice(
        (
            draw.randbytes(300) + b"\r\n\r\n",
            b"\r\n\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/9.9\r\nConnection: close\r\n\r\n",
            sound.replace(b"HTTP/1.1", b"HTTP/1.1 x"),
            sound.replace(b"\r\n\r\n", b"\r\nX: " + b"a" * 200_000 + b"\r\n\r\n"),
            sound.replace(b"\r\nHost", b"\r\n Host"),
            sound.replace(b"\r\n\r\n", f"\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode()),
            sound.replace(b"Host:", b"Hosts:"),
            sound.replace(b"\r\n\r\n", b"\r\nContent-Length: -5\r\n\r\n"),
            sound.replace(b"\r\n\r\n", b"\r\nContent-Length: 1x\r\n\r\n"),
            sound.replace(b"\r\n\r\n", b"\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc"),
            make_request("POST", "/api/actions", port).replace(
                b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n"
            ),
            make_request("POST", "/api/actions", port).replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: gzip\r\n\r\n{}"),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(100) + b"\r\n\r\n",
        )
    )


KINDS = {
    make_path_request: 340,
    make_token_request: 140,
    make_method_request: 90,
    make_body_request: 280,
    make_origin_request: 100,
    make_broken_request: 50,
}


def test_a_thousand_malformed_requests(server):
    """Some at once; none is answered with anything but a refusal, nothing is changed, nothing is written to stderr."""
    assert sum(KINDS.values()) == REQUESTS
    assert server.ask("/api/actions", make_action(points=place(0, (1, 0.25, 0.75))["points"]))[0] == 200
    before = [server.ask(path) for path in ("/api/image/0", "/api/statistics")]
    seq = json.loads(server.ask("/api/project")[1])["seq"]
    draw = random.Random(0)
    requests = [make(draw, server.port) for make, count in KINDS.items() for _ in range(count)]
    draw.shuffle(requests)
    waiting = [socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(20)]  # half-open all the time
    for number, connection in enumerate(waiting):
        connection.sendall(
            make_request("POST", "/api/actions", server.port, headers={"Content-Length": "99"})[: 7 * number]
        )
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(server.send, requests))
    for request, answer in zip(requests, answers, strict=True):
        said = (request[:300], answer[:300])
        assert SECRET not in answer, said
        assert b"Traceback" not in answer, said
        assert b'File "' not in answer, said
        assert re.match(rb"HTTP/1\.1 4\d\d ", answer), said
    for connection in waiting:
        connection.close()
    assert server.process.poll() is None
    assert server.errors.read_bytes() == b""
    assert before == [server.ask(path) for path in ("/api/image/0", "/api/statistics")]
    assert json.loads(server.ask("/api/project")[1])["seq"] == seq
    assert server.ask("/api/actions", make_action())[0] == 200


def test_a_refusal_is_one_sentence(server):
    for path, body in (
        ("/api/actions", make_action(image=99)),
        ("/api/names", {"client": CLIENT}),
        ("/api/nothing", None),
    ):
        status, content = server.ask(path, body)
        assert 400 <= status < 500
        message = json.loads(content)["error"]
        assert list(json.loads(content)) == ["error"]
        assert message
        assert "\n" not in message


def test_links_out_of_the_folder_are_listed_and_not_served(server):
    images = json.loads(server.ask("/api/project")[1])["images"]
    problems = {image["name"]: image["problem"] for image in images}
    assert list(problems) == ["0.png", "1.png", "2.png", "3.png", "broken.png", "link.png", "text.png"]
    assert [name for name, problem in problems.items() if problem is None] == ["0.png", "1.png", "2.png", "3.png"]
    for image in images:
        for kind in ("pictures", "thumbnails"):
            status, content = server.ask(f"/{kind}/{image['id']}")
            assert status == 200 if image["problem"] is None else 400 <= status < 500
            assert SECRET not in content


def test_a_picture_that_becomes_a_link_is_not_served_any_more(server):
    picture = server.folder / "3.png"
    assert server.ask("/pictures/3")[0] == 200
    picture.unlink()
    picture.symlink_to(server.folder.parent / "secret.png")
    for path in ("/pictures/3", "/thumbnails/3"):
        status, content = server.ask(path)
        assert 400 <= status < 500
        assert SECRET not in content
    picture.unlink()
    (server.folder / "linked").rename(server.folder / "3.png")  # and one that becomes a folder
    assert 400 <= server.ask("/pictures/3")[0] < 500


def test_what_is_asked_at_once_is_answered_in_order(server):
    """Of actions from several pages none is lost."""
    before = json.loads(server.ask("/api/project")[1])["seq"]

    def act(number):
        return server.ask("/api/actions", {**make_action(), "client": f"{number:08x}"})

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(act, range(40)))
    assert {status for status, _ in answers} == {200}
    assert sorted(json.loads(content)["seq"] for _, content in answers) == list(range(before + 1, before + 41))
    lines = (server.folder / "labels" / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines[1:]] == list(range(1, before + 41))


def test_a_client_that_goes_away_while_it_is_answered_does_no_harm(server):
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closed by a reset
            connection.sendall(make_request("GET", "/pictures/0", server.port))
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(make_request("GET", "/api/events", server.port))
        assert b"200 OK" in connection.recv(1000)
    time.sleep(0.2)
    assert server.ask("/api/project")[0] == 200
    assert server.errors.read_bytes() == b""


def test_it_listens_at_the_loopback_address_alone(server):
    for address in {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)}:
        if not address.startswith("127."):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, server.port), 5)
    with pytest.raises(OSError, match=r"."):
        socket.create_connection(("127.0.0.2", server.port), 5)
