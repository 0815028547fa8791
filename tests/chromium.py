"""A headless Chromium, driven through a pipe by the DevTools protocol: no driver, no port, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The browser reads commands from descriptor 3 and answers on 4; both are moved there just before it starts.
START = "import os, sys; _, read, write, *command = sys.argv; "
START += "os.dup2(int(read), 3); os.dup2(int(write), 4); os.execv(command[0], command)"


def find_chromium() -> str | None:
    """The browser's path, or None if none of the usual names is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one tab; use it as a context manager.

    Args:
        program: the browser's path.
        profile: a folder for its files.
    """

    def __init__(self, program: str, profile: Path):
        self.console: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[str] = []
        self._count = 0
        self._rest = b""
        self._session: str | None = None
        read, self._commands = os.pipe()
        self._replies, write = os.pipe()
        # Far above 3 and 4, so that moving one there does not overwrite the other.
        ends = [os.dup2(end, 100 + end) for end in (read, write)]
        options = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-sandbox"]
        options += ["--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
        command = [sys.executable, "-c", START, *map(str, ends), program, *options]
        self._log = (profile.parent / f"{profile.name}.log").open("wb")
        self._process = subprocess.Popen(command, pass_fds=ends, stdout=self._log, stderr=self._log)
        for end in (read, write, *ends):
            os.close(end)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._commands)  # the browser ends when its pipe does
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._replies)
        self._log.close()

    def call(self, method: str, timeout: float = 60, **parameters: Any) -> dict[str, Any]:
        """Give a command of the protocol and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while self._count not in self._answers:
            self._receive(deadline, method)
        answer = self._answers.pop(self._count)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, page: Path, width: int, height: int, scheme: str = "light") -> None:
        """Load a page in a window of this size under a colour scheme; ``console`` then holds what went wrong."""
        self.console.clear()
        phone = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=page.resolve().as_uri())
        deadline = time.monotonic() + 60
        while "Page.loadEventFired" not in self._events:
            self._receive(deadline, f"loading {page}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def photograph(self, path: Path, whole: bool = True) -> None:
        """Save a PNG of the whole page, or of the window."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def print(self, path: Path) -> None:
        """Save a PDF of the page on A4."""
        answer = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, preferCSSPageSize=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _receive(self, deadline: float, purpose: str) -> None:
        left = deadline - time.monotonic()
        ready, _, _ = select.select([self._replies], [], [], max(left, 0))
        chunk = os.read(self._replies, 1 << 20) if ready else b""
        if not chunk:
            reason = "ended" if ready else "did not answer in time"
            raise AssertionError(f"chromium {reason}: {purpose}; its output is in {self._log.name}")
        *messages, self._rest = (self._rest + chunk).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        self._events.append(event)
        if event == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.console.append(str(parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("file:", "data:")):
            self.console.append(f"request: {parameters['request']['url']}")
