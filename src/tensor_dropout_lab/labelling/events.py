"""News for open pages, as server-sent events. Any thread may publish; each page has a queue in the server's loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

HEARTBEAT = 10.0
"""Seconds without news after which a comment is sent, so that both sides notice a broken connection."""
_WAITING = 1000
"""How many messages a page may be behind before it is disconnected; it connects and reads everything anew."""


class Events:
    """Messages to all pages."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[str | None]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def publish(self, message: dict[str, Any]) -> None:
        """Send a message to every open page; to be called from any thread."""
        if self._loop is not None and self._queues:
            self._loop.call_soon_threadsafe(self._put, f"data: {json.dumps(message)}\n\n")

    def close(self) -> None:
        """End all streams; to be called in the server's loop."""
        self._closed = True
        self._put(None)

    def _put(self, text: str | None) -> None:
        for queue in list(self._queues):
            if queue.qsize() >= _WAITING:
                self._queues.discard(queue)
                text = None
            queue.put_nowait(text)

    async def stream(self) -> AsyncIterator[str]:
        """What one page gets, until it or the server ends."""
        self._loop = asyncio.get_running_loop()
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            yield ": hello\n\n"
            while not self._closed:
                try:
                    text = await asyncio.wait_for(queue.get(), HEARTBEAT)
                except TimeoutError:
                    text = ": still here\n\n"
                if text is None:
                    return
                yield text
        finally:
            self._queues.discard(queue)
