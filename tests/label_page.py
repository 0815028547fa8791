"""``tensor-dropout label`` as a person meets it: the server a process, its page in a browser by real input events."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from chromium import Chromium

TOKEN = "a-token-of-the-tests-which-is-no-secret-at-all"
NAMES = ["tip", "fork", "base"]
MARGIN = 24
"""Pixels that the page leaves free around a picture that is fitted into its stage (canvas/view.js)."""

#: Servers that begin within a tenth of a second: the parent has imported everything, each child is a server. They have
#: no learner, whose process would take longer to begin than such a server lives.
FORK = """
import contextlib, json, os, sys
from pathlib import Path
from tensor_dropout_lab.labelling.application import LabelOptions, label_pictures
import tensor_dropout_lab.labelling.exporting, tensor_dropout_lab.labelling.fit_loop as fit_loop, uvicorn
import uvicorn.protocols.http.auto, uvicorn.lifespan.on, uvicorn.loops.auto
from tensor_dropout_lab.labelling.session import Session
fit_loop.FitLoop.running = contextlib.nullcontext
print("ready", flush=True)
for line in sys.stdin:
    folder, port, os.environ["TENSOR_DROPOUT_LABEL_TOKEN"], suspect = json.loads(line)
    child = os.fork()
    if child == 0:
        if suspect:  # what a learner would say of a label that is far off
            Session._is_suspect = lambda self, number: not self.labels.is_kept(self.folder.pictures[number].name)
            show = Session.show_image
            def show_suspect(self, number):
                shown = show(self, number)
                suggestions = [{"x": 0.2, "y": 0.2, "ellipse": None} if point else None for point in shown["points"]]
                return {**shown, "suggestions": suggestions, "checks": [1] if all(shown["points"]) else []}
            Session.show_image = show_suspect
        options = LabelOptions(Path(folder), backbone="small_backbone:build", browser=False, port=port)
        label_pictures(options, lambda text: print(text, flush=True))
        os._exit(0)
    print(f"child {child}", flush=True)
    os.waitpid(child, 0)
    print(f"ended {child}", flush=True)
"""


def draw_pictures(folder: Path, count: int, size: tuple[int, int] = (120, 90)) -> list[list[tuple[float, float]]]:
    """Grey pictures with three marks each; returns where they are, in fractions."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    width, height = size
    places = []
    for number in range(count):
        shift = rng.uniform(-0.1, 0.1, 2).tolist()
        points = [(0.3 + shift[0], 0.3 + shift[1]), (0.6 + shift[0], 0.4 + shift[1]), (0.45 + shift[0], 0.7 + shift[1])]
        picture = Image.new("RGB", size, (118, 124, 130))
        draw = ImageDraw.Draw(picture)
        for (x, y), color in zip(points, ("white", "black", "firebrick"), strict=True):
            draw.ellipse([x * width - 4, y * height - 4, x * width + 4, y * height + 4], fill=color)
        picture.save(folder / f"{number:04d}.png")
        places.append(points)
    return places


def make_environment() -> dict[str, str]:
    """Variables of a server's process: a known token, the modules of the tests, one thread."""
    tests = str(Path(__file__).parent)
    return {**os.environ, "TENSOR_DROPOUT_LABEL_TOKEN": TOKEN, "PYTHONPATH": tests, "OMP_NUM_THREADS": "1"}


class LabelServer:
    """``tensor-dropout label`` on a folder; use it as a context manager.

    Args:
        folder: of pictures.
        options: further ones of the command.
        port: 0 for any; a server that is started again keeps the port of its first start.
    """

    def __init__(self, folder: Path, *options: str, port: int = 0) -> None:
        self.folder, self.options, self.port, self.token = folder, options, port, TOKEN
        self.log = folder.parent / f"{folder.name}.log"
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def __enter__(self) -> LabelServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def base(self) -> str:
        """The beginning of all its addresses."""
        return f"http://127.0.0.1:{self.port}/"

    @property
    def address(self) -> str:
        """What the command tells to open."""
        return f"{self.base}?token={self.token}"

    def start(self) -> None:
        """Start the command and wait until it listens."""
        command = [sys.executable, "-m", "tensor_dropout_lab", *self._imports(), "label", str(self.folder)]
        command += ["--no-browser", "--port", str(self.port), *self.options]
        with self.log.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, text=True, env=make_environment())
        self.port = int(self._wait_for(r"http://127\.0\.0\.1:(\d+)/"))

    def _imports(self) -> list[str]:
        return ["--import", "small_backbone"] if any("small_backbone" in option for option in self.options) else []

    def _wait_for(self, pattern: str) -> str:
        deadline = time.monotonic() + 60
        while not (match := re.search(pattern, self.log.read_text(encoding="utf-8"))):
            assert self.process is not None
            assert self.process.poll() is None, self.log.read_text(encoding="utf-8")
            assert time.monotonic() < deadline, self.log.read_text(encoding="utf-8")
            time.sleep(0.03)
        return match.group(1)

    def kill(self) -> None:
        """End it as a power cut would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> None:
        """End it at once; Ctrl-C would write the head first."""
        self.kill()


class Forks:
    """A process that has imported everything, whose children are servers; use it as a context manager."""

    def __init__(self, log: Path) -> None:
        self._log = log.open("w", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=make_environment(),
        )
        self.read_until("ready")

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(20)
        self._log.close()

    def begin(self, folder: Path, port: int, token: str, suspect: bool) -> int:
        """Start a server and wait until it listens; returns its number."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([str(folder), port, token, suspect]) + "\n")
        self.process.stdin.flush()
        child = int(self.read_until("child ").split()[1])
        self.read_until(f"127.0.0.1:{port}", unless=f"ended {child}")
        return child

    def read_until(self, part: str, unless: str = "") -> str:
        """The next line with this in it; fails at a line with ``unless``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if part in line:
                return line
            if unless and unless in line:
                break
        raise AssertionError(f"it ended; its output is in {self._log.name}")


class ForkedServer(LabelServer):
    """A server that starts again within a fraction of a second; without a learner.

    Args:
        folder: of pictures.
        forks: what starts it.
        suspect: every labelled image is one to check.
    """

    def __init__(self, folder: Path, forks: Forks, suspect: bool = False) -> None:
        self.forks, self.suspect = forks, suspect
        super().__init__(folder, port=find_port())

    def start(self) -> None:
        """Start it and wait until it listens."""
        self.child = self.forks.begin(self.folder, self.port, self.token, self.suspect)

    def kill(self) -> None:
        """End it as a power cut would."""
        os.kill(self.child, signal.SIGKILL)


def find_port() -> int:
    """A port that is free now."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class LabelPage:
    """The page in a browser. Places are fractions of the picture, or pixels of the window where it is said."""

    def __init__(self, browser: Chromium, server: LabelServer) -> None:
        self.browser, self.server = browser, server
        browser.allowed = (server.base, "file:", "data:", "blob:")

    def open(self, width: int = 1280, height: int = 860, scheme: str = "light", hint: bool = False) -> None:
        """Open the address that the command tells; the hint of the first visit is put away, if it is not asked for."""
        self.browser.open("about:blank", width, height)  # a page of before has no more to say
        self.browser.open(self.server.address, width, height, scheme)
        self.wait_until_shown()
        if not hint:
            self.put_hint_away()

    def put_hint_away(self) -> None:
        """Close the hint of the first visit, if it is there."""
        if self.browser.evaluate("!document.querySelector('#hint').hidden"):
            self.browser.evaluate("document.querySelector('#hint button').click()")

    def wait_until_shown(self) -> None:
        """Wait for the open image and its points."""
        self.browser.wait_for(
            "document.querySelector('#image-facts').textContent.startsWith('Image') && "
            "!document.querySelector('#stage').classList.contains('is-loading')"
        )
        self.settle()

    def settle(self) -> None:
        """Two frames: what was drawn is drawn."""
        self.browser.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    @property
    def image(self) -> str:
        """The name of the open image."""
        return str(self.browser.evaluate("document.querySelector('#image-name').textContent"))

    def stage(self) -> dict[str, float]:
        """Where the stage is in the window."""
        box: dict[str, float] = self.browser.evaluate(
            "document.querySelector('#stage').getBoundingClientRect().toJSON()"
        )
        return box

    def picture_size(self) -> tuple[int, int]:
        """Pixels of the open picture."""
        text = self.browser.evaluate("document.querySelector('#image-facts').textContent")
        width, height = re.search(r"(\d+) × (\d+)", text).groups()  # type: ignore[union-attr]
        return int(width), int(height)

    def locate(self, x: float, y: float) -> tuple[float, float]:
        """Where a place of the fitted picture is in the window."""
        box, (width, height) = self.stage(), self.picture_size()
        scale = min((box["width"] - 2 * MARGIN) / width, (box["height"] - 2 * MARGIN) / height)
        left = box["x"] + (box["width"] - scale * width) / 2
        top = box["y"] + (box["height"] - scale * height) / 2
        return left + x * scale * width, top + y * scale * height

    def click(self, x: float, y: float) -> None:
        """Click on the fitted picture."""
        self.browser.click(*self.locate(x, y))
        self.settle()

    def label(self, points: list[tuple[float, float]]) -> None:
        """Place the points of the open image, one click each."""
        for index, (x, y) in enumerate(points):
            self.click(x, y)
            self.browser.wait_for(
                f"document.querySelector('#points > :nth-child({index + 1})').dataset.word === 'placed'"
            )

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drag on the fitted picture."""
        (x0, y0), (x1, y1) = self.locate(*start), self.locate(*end)
        middle = [(x0 + (x1 - x0) * step / 4, y0 + (y1 - y0) * step / 4) for step in range(5)]
        self.browser.drag(middle)
        self.settle()

    def marks(self) -> dict[int, tuple[str, float, float]]:
        """The marks on the picture: number -> kind, and where it is in the window."""
        found = self.browser.evaluate(
            "[...document.querySelectorAll('.mark')].map(m => [+m.dataset.point, m.classList[1], "
            "...m.getAttribute('transform').match(/-?[\\d.]+/g).map(Number)])"
        )
        box = self.stage()
        return {index: (kind, x + box["x"], y + box["y"]) for index, kind, x, y in found}

    def states(self) -> list[str]:
        """The states of the points, as the panel tells them."""
        found: list[str] = self.browser.evaluate(
            "[...document.querySelectorAll('.point')].map(row => row.dataset.word)"
        )
        return found

    def wait_for_states(self, *states: str) -> None:
        """Wait until the panel tells these states."""
        wanted = json.dumps(list(states))
        found = "JSON.stringify([...document.querySelectorAll('.point')].map(row => row.dataset.word))"
        self.browser.wait_for(f"{found} === JSON.stringify({wanted})")

    def wait_until_stored(self, timeout: float = 10) -> None:
        """Wait until the server has everything."""
        self.browser.wait_for("document.querySelector('#saved').textContent === 'All stored'", timeout)

    def toast(self) -> str:
        """What is shown over the image now, "" if nothing is."""
        return str(
            self.browser.evaluate("(t => t.checkVisibility() ? t.textContent : '')(document.querySelector('#toast'))")
        )

    def prompt(self) -> str:
        """What the line below the image says."""
        self.settle()
        return str(self.browser.evaluate("document.querySelector('#prompt').textContent"))

    def said(self) -> str:
        """What was announced last."""
        return str(self.browser.evaluate("document.querySelector('#announce').textContent")).strip()

    def go_to(self, name: str) -> None:
        """Open an image by its name in the address."""
        self.browser.evaluate(f"location.hash = {json.dumps(name)}")
        self.browser.wait_for(f"document.querySelector('#image-name').textContent === {json.dumps(name)}")
        self.wait_until_shown()

    def table(self) -> dict[str, list[tuple[float, float] | None]]:
        """points.csv, by file."""
        with (self.server.folder / "labels" / "points.csv").open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        names = [column[:-2] for column in (rows[0] if rows else {}) if column.endswith("_x")]
        read = {}
        for row in rows:
            pairs = [(row[f"{name}_x"], row[f"{name}_y"]) for name in names]
            read[row["file"]] = [(float(x), float(y)) if x else None for x, y in pairs]
        return read

    def journal(self) -> list[dict[str, Any]]:
        """The journal's actions."""
        text = (self.server.folder / "labels" / "journal.jsonl").read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()[1:]]  # after its header
