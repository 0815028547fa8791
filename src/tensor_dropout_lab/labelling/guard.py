"""Who may ask: the page itself, at the loopback address, with the token of the address that the command prints.

Another web page in the same browser can send requests to the loopback address. It does not know the token; and it
shows itself by its ``Origin``, or by a ``Host`` of its own name that was made to mean 127.0.0.1 (DNS rebinding).
"""

from __future__ import annotations

import secrets
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
NEEDS_TOKEN = ("/api/", "/pictures/", "/thumbnails/")
TOKEN_IN_ADDRESS = ("/api/events", "/pictures/", "/thumbnails/")
"""What the browser asks for without headers of ours."""


class Guard:
    """Lets requests through that come from the page.

    Args:
        app: what answers them.
        port: of the server.
        token: what requests for data must carry.
    """

    def __init__(self, app: ASGIApp, *, port: int, token: str) -> None:
        self.app, self.token = app, token.encode()
        self.hosts = [f"{host}:{port}" for host in ("127.0.0.1", "localhost")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse with 403."""
        if scope["type"] != "http":
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._find_refusal(scope)
        if refusal:
            await JSONResponse({"error": refusal}, 403)(scope, receive, send_guarded)
        else:
            await self.app(scope, receive, send_guarded)

    def _find_refusal(self, scope: Scope) -> str:
        """Why a request is refused; "" if it is not."""
        headers = [(name.lower(), value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return f"the page is at http://{self.hosts[0]}, not at another name"
        if any(value != f"http://{hosts[0]}" for name, value in headers if name == b"origin"):
            return "another page may not ask for this"
        path = scope["path"]
        if path.startswith(NEEDS_TOKEN) and not self._has_token(scope, path, headers):
            return "the token is missing or wrong; open the address that tensor-dropout label has printed"
        return ""

    def _has_token(self, scope: Scope, path: str, headers: list[tuple[bytes, str]]) -> bool:
        given = [value.encode("latin-1") for name, value in headers if name == b"x-token"]
        if not given and path.startswith(TOKEN_IN_ADDRESS):
            query = parse_qs(scope["query_string"].decode("latin-1"), encoding="latin-1")
            given = [value.encode("latin-1") for value in query.get("token", [])]
        return len(given) == 1 and secrets.compare_digest(given[0], self.token)
