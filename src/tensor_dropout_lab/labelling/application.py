"""``tensor-dropout label`` from its options to the end of the session: the steps in their order."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import socket
import threading
import warnings
import webbrowser
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.labelling.events import Events
from tensor_dropout_lab.labelling.exchange import ExternalLabels
from tensor_dropout_lab.labelling.exporting import add_labels, read_foreign, read_lone_table, write_out
from tensor_dropout_lab.labelling.folder import (
    PictureFolder,
    describe_passed_over,
    list_pictures,
    match_groups,
    read_groups,
)
from tensor_dropout_lab.labelling.journal import find_fault_in_names
from tensor_dropout_lab.labelling.session import COMMAND, POINTS, PROJECT, ROUNDS, Session
from tensor_dropout_lab.labelling.settings import Settings, choose_settings
from tensor_dropout_lab.labelling.words import count_of
from tensor_dropout_lab.locks import FolderInUseError, lock_folder

if TYPE_CHECKING:
    from tensor_dropout_lab.labelling.fit_loop import FitLoop

Say = Callable[[str], None]
TOKEN = "TENSOR_DROPOUT_LABEL_TOKEN"
"""The variable with a token to use again: an open page then goes on after a restart, with ``--port`` of before."""
TERMINATED_WITHIN = 3.0
"""Seconds that the head may take after SIGTERM, whose sender does not wait long."""


@dataclass(frozen=True)
class LabelOptions:
    """What ``tensor-dropout label`` is told; see its help. None: as in the project, else the default."""

    folder: Path
    points: Path | None = None
    backbone: str | None = None
    weights: str | None = None
    arguments: str | None = None
    layer: tuple[str, ...] | None = None
    size: tuple[int, ...] | None = None
    groups: str | None = None
    group_pattern: str | None = None
    order: str | None = None
    out: Path | None = None
    cache: Path = Path("out/feature-maps")
    read: Path | None = None
    write: Path | None = None
    format: str | None = None
    units: str = "fractions"
    browser: bool = True
    port: int | None = None
    seed: int = 0
    modules: tuple[str, ...] = ()

    @property
    def place(self) -> Path:
        """Where the journal and the table are."""
        return self.out or self.folder / "labels"


def label_pictures(options: LabelOptions, say: Say) -> None:
    """Do what the command was asked for.

    Args:
        options: what was asked for.
        say: called with every line that a user is to see.

    Raises:
        TensorDropoutError: for a user's mistakes; nothing was changed then.
    """
    if options.units != "fractions" and options.read is None:
        raise TensorDropoutError("label: --units is for a points.csv in --read; what is written says its units itself")
    start = prepare(options, say)
    check_place(options.place)
    try:
        with lock_folder(options.place, "labelling"):
            _label(options, start, say)
    except FolderInUseError as error:
        port = find_last_port(options.place)
        where = "" if port is None else f"its page is at http://127.0.0.1:{port} in the browser that opened it; "
        raise FolderInUseError(
            f"another tensor-dropout label is open for {options.place}; {where}use it, or end it first"
        ) from error


@dataclass(frozen=True)
class Start:
    """All that was read before anything is written.

    Attributes:
        folder: the pictures, with their groups.
        settings: how features are computed.
        names: of the points, of a file; None without one.
        foreign: labels of another program; None without any.
    """

    folder: PictureFolder
    settings: Settings
    names: list[str] | None
    foreign: ExternalLabels | None


def prepare(options: LabelOptions, say: Say) -> Start:
    """Read what the session begins with; a mistake in it leaves nothing behind.

    Raises:
        TensorDropoutError: for a user's mistakes.
    """
    # Pillow warns of an attack where a picture has more than half of the pixels that it reads.
    warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
    folder = list_pictures(options.folder, options.place)
    settings = choose_settings(vars(options), options.place / PROJECT, needs_network=options.write is None)
    folder = group_pictures(folder, settings.chosen)
    _tell_pictures(folder, say)
    names = None if options.points is None else read_names(options.points)
    foreign = None
    if options.read is not None:
        foreign = read_foreign(folder, options.read, options.format, options.units)
    if options.write is None:
        check_server(options)
    return Start(folder, settings, names, foreign)


def _label(options: LabelOptions, start: Start, say: Say) -> None:
    events = Events()
    lone = read_lone_table(options.place, start.folder)
    session = Session(
        start.folder,
        options.place,
        start.settings.chosen,
        events.publish,
        port=find_last_port(options.place),
        kept=start.settings.kept,
    )
    with closing(session):
        if lone is not None:
            for line in add_labels(session, lone):
                say(line)
        _tell_journal(session, say)
        if start.names is not None:
            _name_points(session, start.names, options.points)
        if start.foreign is not None:
            for line in add_labels(session, start.foreign):
                say(line)
        if options.write is not None:
            say(write_out(session, options.write, options.format))
        else:
            serve(session, events, options, start.settings.remembered, say)
            say(f"The table is {options.place / POINTS}")


def check_place(out: Path) -> None:
    """Refuse a place that cannot be written to.

    Raises:
        TensorDropoutError: if it is no folder, or may not be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TensorDropoutError(
            f"label: the folder for the labels, {out}, cannot be made ({error.strerror}); name another with --out"
        ) from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise TensorDropoutError(f"label: {out} may not be written to; name another folder with --out")


def group_pictures(folder: PictureFolder, settings: dict[str, Any]) -> PictureFolder:
    """The pictures with their groups, as the settings name them."""
    if settings["groups"] is not None and settings["group_pattern"] is not None:
        raise TensorDropoutError("label: groups come from --groups or from --group-pattern; choose one")
    if settings["groups"] is not None:
        return folder.with_groups(read_groups(Path(settings["groups"]).expanduser(), folder.names))
    if settings["group_pattern"] is not None:
        return folder.with_groups(match_groups(settings["group_pattern"], folder.names))
    return folder


def _tell_pictures(folder: PictureFolder, say: Say) -> None:
    """Say which files are not shown, or not whole."""
    bad = [picture for picture in folder.pictures if picture.problem is not None]
    for picture in bad[:5]:
        say(f"Cannot be read: {picture.name} ({picture.problem})")
    if len(bad) > 5:
        say(f"Cannot be read: {len(bad) - 5} more; the page lists them")
    if folder.passed_over:
        say(describe_passed_over(folder.passed_over))
    longer = [picture.name for picture in folder.pictures if picture.more_pages]
    if longer:
        have = "has" if len(longer) == 1 else "have"
        say(f"{count_of(len(longer), 'picture')} {have} several pages, such as {longer[0]}; only the first is shown")
    if len(bad) == len(folder):
        none = f"none of the {len(bad)} pictures" if len(bad) > 1 else "the only picture"
        can = "can" if len(bad) > 1 else "cannot"
        raise TensorDropoutError(f"label: {none} in {folder.path} {can} be read")


def _tell_journal(session: Session, say: Say) -> None:
    if session.journal.torn:
        say("The journal ended within a line, of an action that was not confirmed; that line was cut off")
    lost = session.lost_images
    if lost:
        are = "is" if len(lost) == 1 else "are"
        say(
            f"{count_of(len(lost), 'image')} with labels {are} not in the folder any more, such as {lost[0]}; the "
            f"journal keeps these labels, {POINTS} leaves them out"
        )
    if session.curve_is_damaged:
        say(f"{session.out / ROUNDS} is damaged; the curve of errors begins anew")
    labelled = session.count()["labelled_images"]
    if labelled:
        are = "is" if labelled == 1 else "are"
        say(f"{labelled} of {count_of(len(session.folder), 'image')} {are} labelled already")


def read_names(path: Path) -> list[str]:
    """The names of points, a line each.

    Raises:
        TensorDropoutError: if the file cannot be read, or names points wrongly.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise TensorDropoutError(f"--points {path} cannot be read ({why}); it has a name in each line") from error
    names = [line.strip() for line in lines if line.strip()]
    fault = find_fault_in_names(names) if names else "it has no names; write one in each line"
    if fault:
        raise TensorDropoutError(f"--points {path}: {fault}")
    return names


def _name_points(session: Session, names: list[str], path: Path | None) -> None:
    """Name the points as a file says; of a project that has names, it may only add some at the end."""
    known = session.labels.names
    if names[: len(known)] != known:
        raise TensorDropoutError(
            f"--points {path} begins with {', '.join(names[:5])}, and the points of {session.out} are "
            f"{', '.join(known[:5])}; rename points on the page, or choose another --out"
        )
    session.rename(COMMAND, names)


# The page.


def check_server(options: LabelOptions) -> None:
    """Refuse to start what cannot serve the page.

    Raises:
        TensorDropoutError: if packages are missing, with the command that installs them; if the token or the port
            cannot be used.
    """
    try:
        server = importlib.import_module("tensor_dropout_lab.labelling.server")
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("tensor_dropout"):
            raise
        raise TensorDropoutError(
            f"label: {package} is not installed; install it with: pip install 'tensor-dropout[label]', in a clone: "
            "pip install -c constraints.txt -e '.[label]'"
        ) from error
    choose_token()
    if options.port and not options.place.exists():  # else the other one that has it may be of this very folder
        server.bind(options.port).close()


def serve(session: Session, events: Events, options: LabelOptions, remembered: str, say: Say) -> None:
    """Serve the page until Ctrl-C or SIGTERM."""
    from tensor_dropout_lab.labelling.fit_loop import HEAD_WITHIN, FitLoop
    from tensor_dropout_lab.labelling.server import Api, bind, make_app, make_server

    token = choose_token()
    with choose_port(options.port, session.port, bind) as listener:
        port = listener.getsockname()[1]
        session.remember_port(port)
        fits = FitLoop(
            session, options.cache, seed=options.seed, modules=options.modules, say=say, remembered=remembered
        )
        app = make_app(Api(session, events, fits), port=port, token=token)
        server = make_server(app, events, on_end=fits.stop_waiting)
        address = f"http://127.0.0.1:{port}/?token={token}"
        listener.listen(128)
        say(f"{count_of(len(session.folder), 'picture')}; the page is at\n  {address}\nEnd with Ctrl-C.")
        if options.browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # some wait for their end
        with fits.running():
            with suppress(KeyboardInterrupt):  # the server has ended in order, and passes on why
                server.run([listener])
            if fits.has_news:
                _save_head(fits, TERMINATED_WITHIN if server.terminated else HEAD_WITHIN, say)


def _save_head(fits: FitLoop, within: float, say: Say) -> None:
    say("Writing the head …")
    try:
        folder = fits.save_head(within)
        say(f"The head is {folder}; use it: tensor-dropout predict PICTURES --model {folder}")
    except TensorDropoutError as error:  # the labels are safe, and the next session writes it
        say(f"There is no new head: {error}")


def find_last_port(out: Path) -> int | None:
    """Where the page was at the last start; None if that is not known.

    A page that is still open there can go on: its origin is the same.
    """
    try:
        port = json.loads((out / PROJECT).read_text(encoding="utf-8"))["port"]
    except (OSError, ValueError, KeyError, TypeError):  # there is none; what is damaged is told elsewhere
        return None
    return port if type(port) is int and 1024 <= port < 65536 else None


def choose_port(asked: int | None, last: int | None, bind: Callable[[int], socket.socket]) -> socket.socket:
    """A socket at the port that was asked for, else at the last one if it is free, else at any."""
    if asked is None and last is not None:
        with suppress(TensorDropoutError):
            return bind(last)
    return bind(asked or 0)


def choose_token() -> str:
    """The token of the address: random, unless a variable has one.

    Raises:
        TensorDropoutError: if the variable's could be guessed, or does not fit into an address.
    """
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(32)
    if re.fullmatch(r"[A-Za-z0-9_-]{32,200}", token) is None:
        raise TensorDropoutError(f"{TOKEN} must have 32 to 200 letters, digits, - or _")
    return token
