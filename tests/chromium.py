"""A headless Chromium, driven through a pipe by the DevTools protocol: no driver, no port, no further package.

Mouse, keys and fingers are real input events of the browser, not events that a script makes up.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# The browser reads commands from descriptor 3 and answers on 4; both are moved there just before it starts.
START = "import os, sys; _, read, write, *command = sys.argv; "
START += "os.dup2(int(read), 3); os.dup2(int(write), 4); os.execv(command[0], command)"

MODIFIERS = {"Alt": 1, "Control": 2, "Meta": 4, "Shift": 8}
#: Keys that write no character of their own: code and number.
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9, "Backspace": 8, "Delete": 46, "Home": 36, "End": 35}
KEYS |= {"PageUp": 33, "PageDown": 34, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def describe_key(name: str) -> dict[str, Any]:
    """What the protocol wants to know of a key, such as ``a``, ``Space``, ``Enter`` or ``Control+z``."""
    *held, key = name.split("+") if len(name) > 1 else [name]
    modifiers = sum(MODIFIERS[modifier] for modifier in held)
    if key in KEYS:
        text = {"text": "\r"} if key == "Enter" else {}
        return {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": modifiers, **text}
    letter = " " if key == "Space" else key
    code = (
        "Space" if key == "Space" else f"Key{key.upper()}" if key.isalpha() else f"Digit{key}" if key.isdigit() else ""
    )
    event = {"key": letter, "code": code, "windowsVirtualKeyCode": ord(letter.upper()), "modifiers": modifiers}
    return event if held and held != ["Shift"] else {**event, "text": letter}


def find_chromium() -> str | None:
    """The browser's path, or None if none of the usual names is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Chromium:
    """A browser with one tab at first; use it as a context manager.

    Args:
        program: the browser's path.
        profile: a folder for its files.

    Attributes:
        console: what went wrong since the last page was opened, in all tabs.
        allowed: beginnings of addresses that pages may ask for; others are noted in ``console``.
        tab: the tab that commands go to.
    """

    def __init__(self, program: str, profile: Path):
        self.console: list[str] = []
        self.allowed: tuple[str, ...] = ("file:", "data:")
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[str] = []
        self._count = 0
        self._rest = b""
        self.tab: str | None = None
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
        self.add_tab()

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

    def add_tab(self) -> str:
        """Open another tab and turn to it; returns its name, for ``tab``."""
        self.tab = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.tab = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self.tab

    def turn_to(self, tab: str) -> None:
        """Go on in another tab, which comes to the front."""
        self.tab = tab
        self.call("Page.bringToFront")

    def call(self, method: str, timeout: float = 60, **parameters: Any) -> dict[str, Any]:
        """Give a command of the protocol and return its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self.tab:
            message["sessionId"] = self.tab
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + timeout
        while self._count not in self._answers:
            self._receive(deadline, method)
        answer = self._answers.pop(self._count)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, page: Path | str, width: int, height: int, scheme: str = "light") -> None:
        """Load a file or an address in a window of this size under a colour scheme.

        ``console`` then holds what went wrong.
        """
        self.console.clear()
        self.resize(width, height)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self._events.clear()
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self._wait_for_load(f"loading {page}")

    def resize(self, width: int, height: int) -> None:
        """Another size of the window."""
        phone = width < 500
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)

    def download_to(self, folder: Path) -> None:
        """Where files go that pages hand out."""
        tab, self.tab = self.tab, None
        self.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
        self.tab = tab

    def reload(self) -> None:
        """Load the page again."""
        self._events.clear()
        self.call("Page.reload")
        self._wait_for_load("loading again")

    def _wait_for_load(self, purpose: str) -> None:
        deadline = time.monotonic() + 60
        while "Page.loadEventFired" not in self._events:
            self._receive(deadline, purpose)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, x: float, y: float, button: str = "left", count: int = 1) -> None:
        """Press and release a button of the mouse."""
        for number in range(1, count + 1):
            self.drag([(x, y)], button, number)

    def drag(self, path: Sequence[tuple[float, float]], button: str = "left", number: int = 1) -> None:
        """Press at the first place, move over the others, release at the last."""
        self.move_mouse(*path[0])
        held = {"left": 1, "right": 2, "middle": 4}[button]
        self._mouse("mousePressed", *path[0], button=button, buttons=held, clickCount=number)
        for x, y in path[1:]:
            self._mouse("mouseMoved", x, y, button=button, buttons=held)
        self._mouse("mouseReleased", *path[-1], button=button, clickCount=number)

    def move_mouse(self, x: float, y: float) -> None:
        """Move the mouse with no button down."""
        self._mouse("mouseMoved", x, y)

    def turn_wheel(self, x: float, y: float, turn: float) -> None:
        """Turn the wheel of the mouse; negative is away from the person."""
        self._mouse("mouseWheel", x, y, deltaX=0, deltaY=turn)

    def _mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, pointerType="mouse", **more)

    def press(self, *keys: str) -> None:
        """Press keys one after the other: ``a``, ``Enter``, ``Shift+ArrowLeft``, ``Control+z``."""
        for name in keys:
            self.key_down(name)
            self.key_up(name)

    def key_down(self, name: str) -> None:
        """Press a key and hold it; a modifier in its name counts for this event."""
        event = describe_key(name)
        self.call("Input.dispatchKeyEvent", type="keyDown" if "text" in event else "rawKeyDown", **event)

    def key_up(self, name: str) -> None:
        """Let go of a key."""
        event = describe_key(name)
        event.pop("text", None)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def touch(self, *moments: Sequence[tuple[float, float]], rest: float = 0) -> None:
        """Put fingers down at the places of the first moment, move them to the next ones, lift them.

        Args:
            moments: the places of all fingers, moment for moment.
            rest: seconds between putting down and the first move.
        """
        for index, places in enumerate(moments):
            points = [{"x": x, "y": y, "id": finger} for finger, (x, y) in enumerate(places)]
            self.call("Input.dispatchTouchEvent", type="touchMove" if index else "touchStart", touchPoints=points)
            time.sleep(0 if index else rest)
        self.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])

    def wait_for(self, expression: str, timeout: float = 10) -> None:
        """Wait until an expression of JavaScript is true.

        Raises:
            AssertionError: if it does not become so.
        """
        deadline = time.monotonic() + timeout
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"not in {timeout} s: {expression}"
            time.sleep(0.03)

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
                if message.get("sessionId") == self.tab:
                    self._events.append(message["method"])
                self._note(message["method"], message["params"])

    def _note(self, event: str, parameters: dict[str, Any]) -> None:
        if event == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.console.append(str(parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.console.append(parameters["entry"]["text"])
        elif event == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(self.allowed):
            self.console.append(f"request: {parameters['request']['url']}")
