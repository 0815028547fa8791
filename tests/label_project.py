"""A folder of small pictures to label. All pictures are SIMULATED: a bright spot, which is the point."""

from __future__ import annotations

import http.client
import json
import threading
from contextlib import closing, contextmanager

import numpy as np
from PIL import Image

from tensor_dropout_lab.labelling.events import Events
from tensor_dropout_lab.labelling.fit_loop import FitLoop
from tensor_dropout_lab.labelling.folder import list_pictures
from tensor_dropout_lab.labelling.server import Api, bind, make_app, make_server
from tensor_dropout_lab.labelling.session import Session
from tensor_dropout_lab.labelling.settings import DEFAULTS, KEPT

CLIENT, OTHER = "aaaaaaaa", "bbbbbbbb"
TOKEN = "0123456789abcdef" * 2
SETTINGS = dict.fromkeys(KEPT) | DEFAULTS | {"backbone": "small_backbone:build", "size": [16]}


def draw_spots(folder, count, side=32):
    """Pictures 0.png, 1.png, ..; returns the places of their spots, (count, 2) fractions."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    places = random.uniform(0.2, 0.8, (count, 2))
    rows, columns = (np.mgrid[:side, :side] + 0.5) / side
    for number, (x, y) in enumerate(places):
        spot = np.exp(-((columns - x) ** 2 + (rows - y) ** 2) / 0.02)
        pixels = 40 + 180 * spot + random.normal(0, 4, (side, side))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert("RGB").save(folder / f"{number}.png")
    return places


def open_session(folder, publish=lambda message: None, out=None, groups=None):
    out = folder / "labels" if out is None else out
    out.mkdir(exist_ok=True)
    pictures = list_pictures(folder, out)
    return Session(pictures if groups is None else pictures.with_groups(groups), out, SETTINGS, publish)


def place(image, *points, by="hand", **more):
    """An action: points are (number, x, y)."""
    listed = [{"point": point, "x": x, "y": y, "by": by} for point, x, y in points]
    return {"kind": "place", "image": image, "points": listed, **more}


class Asking:
    """Asks a server as the page does."""

    def __init__(self, port, token=TOKEN):
        self.port, self.token = port, token

    def raw(self, method, path, body=None, headers=None):
        """Status, headers and bytes of an answer, with these headers only."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)) as connection:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read()

    def __call__(self, path, body=None, method=None, **headers):
        """The status and the JSON of an answer."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        method = method or ("GET" if data is None else "POST")
        status, _, content = self.raw(method, path, data, {"X-Token": self.token, **headers})
        return status, json.loads(content)


@contextmanager
def serving(session, events):
    """A real server of a session in a thread; its fits do not run."""
    fits = FitLoop(session, session.out / "cache", say=print)
    with bind(0) as listener:
        port = listener.getsockname()[1]
        server = make_server(make_app(Api(session, events, fits), port=port, token=TOKEN), events)
        listener.listen(16)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield Asking(port)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def labelling(folder):
    """A session with its server."""
    events = Events()
    session = open_session(folder, events.publish)
    with closing(session), serving(session, events) as ask:
        yield session, ask
