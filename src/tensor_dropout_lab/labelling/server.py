"""The page's server: what is asked over HTTP, and what of the session answers it.

Pictures and page files are known at the start and named by number or by their exact name; a path of a request never
becomes a path on disk. Everything that touches the disk runs in a thread: a slow disk delays one request, not all.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.events import Events
from tensor_dropout_lab.labelling.exchange import FORMATS, write_labels
from tensor_dropout_lab.labelling.exporting import collect_labels
from tensor_dropout_lab.labelling.fit_loop import FitLoop, NotReadyError
from tensor_dropout_lab.labelling.guard import Guard
from tensor_dropout_lab.labelling.journal import JournalWriteError
from tensor_dropout_lab.labelling.pictures import describe_numbers, make_thumbnail, show_picture
from tensor_dropout_lab.labelling.session import Session

PAGE = Path(__file__).parent / "page"
LARGEST_BODY = 1_000_000
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
}
DOWNLOADS = {
    "csv": "points.csv", "tps": "labels.tps", "coco": "labels-coco.json", "deeplabcut": "CollectedData_labels.csv",
}  # fmt: skip
"""What a browser calls the files of the formats; DeepLabCut's are called CollectedData_SCORER.csv."""
AT_ONCE = 0.5
"""Seconds within which two signals are one: ``timeout`` and others send theirs twice."""
Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True)
class Api:
    """The answers.

    Attributes:
        session: what is known.
        events: news for the pages.
        fits: the loop that fits.
    """

    session: Session
    events: Events
    fits: FitLoop

    def routes(self) -> list[Route]:
        """What can be asked."""
        files = {path.relative_to(PAGE).as_posix(): path for path in sorted(PAGE.rglob("*")) if path.is_file()}
        gets: dict[str, Handler] = {
            "/": lambda request: _send_file(files.get("index.html")),
            "/page/{path:path}": lambda request: _send_file(files.get(request.path_params["path"])),
            "/api/project": self._get_project,
            "/api/image/{number}": self._get_image,
            "/api/next": self._get_next,
            "/api/statistics": self._get_statistics,
            "/api/events": self._get_events,
            "/pictures/{number}": self._get_picture,
            "/thumbnails/{number}": self._get_thumbnail,
        }
        posts: dict[str, Handler] = {
            "/api/actions": self._post_actions,
            "/api/undo": self._post_undo,
            "/api/names": self._post_names,
            "/api/fit": self._post_fit,
            "/api/head": self._post_head,
            "/api/export": self._post_export,
        }
        return [Route(path, _as_endpoint(handler), methods=["GET"]) for path, handler in gets.items()] + [
            Route(path, _as_endpoint(handler), methods=["POST"]) for path, handler in posts.items()
        ]

    # What is known.

    async def _get_project(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self.session.describe))

    async def _get_image(self, request: Request) -> Response:
        number = self._number(request.path_params["number"])
        return JSONResponse(await run_in_threadpool(self._show_image, number))

    def _show_image(self, number: int) -> dict[str, Any]:
        try:
            window = describe_window(self.session.folder.find(number))
        except TensorDropoutError:  # the picture cannot be read; the request for it says why
            window = None
        return {**self.session.show_image(number), "window": window}

    async def _get_next(self, request: Request) -> Response:
        order = request.query_params.get("order", "gain")
        if order not in ("gain", "folder"):
            raise TensorDropoutError("order is gain or folder")
        text = request.query_params.get("after")
        after = None if text in (None, "", "null") else self._number(text)
        return JSONResponse({"id": await run_in_threadpool(self.session.find_next, after, order)})

    async def _get_statistics(self, request: Request) -> Response:
        return JSONResponse(await run_in_threadpool(self.session.count))

    async def _get_events(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self.events.stream(), media_type="text/event-stream")

    async def _get_picture(self, request: Request) -> Response:
        window = _read_window(request)
        path = await run_in_threadpool(self._find_picture, request)
        content, media_type = await run_in_threadpool(show_picture, path, window)
        return Response(content, media_type=media_type, headers={"Cache-Control": "private, max-age=3600"})

    async def _get_thumbnail(self, request: Request) -> Response:
        path = await run_in_threadpool(self._find_picture, request)
        content = await run_in_threadpool(make_thumbnail, path)
        return Response(content, media_type="image/jpeg", headers={"Cache-Control": "private, max-age=3600"})

    def _find_picture(self, request: Request) -> Path:
        return self.session.folder.find(self._number(request.path_params["number"]))

    def _number(self, text: str | None) -> int:
        """The number of a picture in an address."""
        known = text is not None and text.isascii() and text.isdigit() and len(text) < 10
        if not known or int(text or 0) >= len(self.session.folder):
            raise HTTPException(404, f"there is no such image; they are numbered 0 to {len(self.session.folder) - 1}")
        return int(text or 0)

    # What changes it.

    async def _post_actions(self, request: Request) -> Response:
        body = await _read_body(request)
        return await self._change(self.session.act, body.get("client"), body.get("actions"))

    async def _post_undo(self, request: Request) -> Response:
        body = await _read_body(request)
        return await self._change(self.session.undo, body.get("client"), body.get("key"))

    async def _post_names(self, request: Request) -> Response:
        body = await _read_body(request)
        return await self._change(self.session.rename, body.get("client"), body.get("names"))

    async def _change(self, change: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
        """Change the labels; a fit may follow, which the answer does not wait for."""
        answer = await run_in_threadpool(change, *arguments)
        background = BackgroundTask(self.fits.note_labels)  # not a coroutine: it runs in a thread
        return JSONResponse(answer, background=background)

    async def _post_fit(self, request: Request) -> Response:
        await run_in_threadpool(self.fits.fit_now)
        return JSONResponse({}, 202)

    async def _post_head(self, request: Request) -> Response:
        return JSONResponse({"path": str(await run_in_threadpool(self.fits.save_head))})

    async def _post_export(self, request: Request) -> Response:
        name = (await _read_body(request)).get("format")
        if not isinstance(name, str) or name not in FORMATS:
            raise TensorDropoutError(f"format is one of {', '.join(FORMATS)}")
        content = await run_in_threadpool(self._export, name)
        headers = {"Content-Disposition": f'attachment; filename="{DOWNLOADS[name]}"'}
        return Response(content, media_type=FORMATS[name].media_type, headers=headers)

    def _export(self, name: str) -> bytes:
        with tempfile.TemporaryDirectory(prefix="tensor-dropout-") as folder:
            path = Path(folder) / f"labels{FORMATS[name].ending}"
            write_labels(path, collect_labels(self.session), name)
            return path.read_bytes()


def _as_endpoint(handler: Handler) -> Handler:
    """A coroutine function, which Starlette calls in its loop."""

    async def answer(request: Request) -> Response:
        return await handler(request)

    return answer


async def _send_file(path: Path | None) -> Response:
    """A file of the page."""
    if path is None:
        raise HTTPException(404, "there is no such file of the page")
    content = await run_in_threadpool(path.read_bytes)
    media_type = MEDIA_TYPES.get(path.suffix, "application/octet-stream")
    return Response(content, media_type=media_type, headers={"Cache-Control": "no-cache"})


def describe_window(path: Path) -> dict[str, float] | None:
    """How the numbers of a 16-bit picture are shown, and their range; None for others."""
    numbers = describe_numbers(path)
    if numbers["bits"] <= 8:
        return None
    return {"low": numbers["low"], "high": numbers["high"], "min": numbers["lowest"], "max": numbers["highest"]}


def _read_window(request: Request) -> tuple[float, float] | None:
    texts = [request.query_params.get(side) for side in ("low", "high")]
    if texts == [None, None]:
        return None
    try:
        low, high = (float(text or "") for text in texts)
    except ValueError:
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise TensorDropoutError("low and high are numbers of the picture, low the smaller one")
    return low, high


async def _read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request.

    Raises:
        HTTPException: if it is too large.
        TensorDropoutError: if it is something else.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > LARGEST_BODY:
            raise HTTPException(413, f"a request has at most {LARGEST_BODY:,} bytes")
    try:
        content = json.loads(body.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise TensorDropoutError(f"the request is not JSON ({str(error)[:100]})") from None
    if not isinstance(content, dict):
        raise TensorDropoutError("the request is a JSON object")
    return content


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


# Failures.


async def _answer_ours(request: Request, error: Exception) -> Response:
    status = 507 if isinstance(error, JournalWriteError) else 409 if isinstance(error, NotReadyError) else 400
    return JSONResponse({"error": str(error)}, status)


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    known = {404: "there is nothing at this address", 405: f"{request.method} cannot be asked here"}
    message = error.detail if error.detail not in ("Not Found", "Method Not Allowed") else known[error.status_code]
    return JSONResponse({"error": message}, error.status_code, headers=error.headers)


async def _answer_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _answer_disk(request: Request, error: Exception) -> Response:
    assert isinstance(error, OSError)
    return JSONResponse({"error": f"the disk: {error.strerror or error}"}, 500)


def make_app(api: Api, *, port: int, token: str) -> ASGIApp:
    """The application."""
    handlers: Any = {
        TensorDropoutError: _answer_ours,
        HTTPException: _answer_http,
        ClientDisconnect: _answer_gone,
        OSError: _answer_disk,
    }
    answering = Starlette(routes=api.routes(), exception_handlers=handlers)
    answering.router.redirect_slashes = False  # an address with a slash too many is wrong
    return Guard(answering, port=port, token=token)


class Server(uvicorn.Server):
    """Ends the streams of news first, which would never end by themselves.

    Attributes:
        terminated: it was ended by SIGTERM, whose sender does not wait long.
    """

    def __init__(self, config: uvicorn.Config, events: Events, on_end: Callable[[], None]) -> None:
        super().__init__(config)
        self.events, self.on_end = events, on_end
        self.terminated = False
        self._asked: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in order at the first signal, at once at the second."""
        if self._asked is not None and time.monotonic() > self._asked + AT_ONCE:
            os.write(
                2, b"label: ended at once, without a new head; everything that the page has confirmed is written\n"
            )
            os._exit(130)  # the process that computes ends with this one
        self._asked = self._asked or time.monotonic()
        self.terminated = self.terminated or sig == signal.SIGTERM
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End what would wait for something."""
        self.events.close()
        self.on_end()
        await super().shutdown(sockets)


def bind(port: int) -> socket.socket:
    """A socket at the loopback address.

    Args:
        port: 0 for any that is free.

    Raises:
        TensorDropoutError: if the port is taken.
    """
    protocol = socket.IPPROTO_TCP  # named, or asyncio would leave small packets to wait for each other, 40 ms
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    if os.name == "posix":  # elsewhere it would take over a port that is in use
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
    except OSError as error:
        listener.close()
        raise TensorDropoutError(
            f"label: port {port} cannot be used ({error.strerror}); name another with --port, or leave it out"
        ) from error
    return listener


def make_server(app: ASGIApp, events: Events, on_end: Callable[[], None] = lambda: None) -> Server:
    """What serves the application; its ``run`` takes the sockets and returns after SIGINT or SIGTERM.

    Args:
        app: the application.
        events: the news, whose streams end with it.
        on_end: called when it ends, before requests are waited for.
    """
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", lifespan="off", log_level="error", access_log=False,
        server_header=False, timeout_graceful_shutdown=2, timeout_keep_alive=60,
    )  # fmt: skip
    return Server(config, events, on_end)
