"""Draw the walk through ``tensor-dropout label`` and the screenshots of its how-to.

    python tools/draw_label_walk.py PICTURES POINTS.csv

The clicks are real ones in Chromium, made by a script at the places of a table of true points, so that it needs
pictures whose points are known: ``file[,group],x0,y0,…`` in fractions. Waiting is cut out, and a frame stands for as
long as a reader needs. Written: docs/images/label-walk.webp, label-place.png, label-suggest.png, label-panel.png.
"""

from __future__ import annotations

import argparse
import csv
import io
import shutil
import sys
import tempfile
import time
from base64 import b64decode
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from shrink_png import shrink_png

from tensor_dropout.atomic_files import replacing

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
SIZE, SHOWN = (1280, 800), (880, 550)
CAPTION = 40
NAMES = ["L1 tip", "a-cv front", "L2-L3 fork", "base a", "base b", "base c", "L3 tip", "L4 tip", "p-cv front", "base d"]
NAMES += ["L2 tip", "L5 tip", "base e", "a-cv back", "p-cv back"]
"""Our names of the table's points, as far as we can tell from the pictures: veins L1 to L5, cross-veins, the base."""
WRONG = 0.012
"""A suggestion that is further off than this share of the side is dragged to its place."""
POINTER = [(0, 0), (0, 17), (4, 13), (7, 20), (10, 19), (7, 12), (12, 12)]

Table = dict[str, list[tuple[float, float]]]


class Film:
    """Frames with a caption and the mouse drawn in, each for a time."""

    def __init__(self) -> None:
        self.frames: list[Image.Image] = []
        self.times: list[int] = []
        self.caption = ""

    def add(self, picture: Image.Image, mouse: tuple[float, float] | None, seconds: float) -> None:
        """Another frame, from a screenshot of the window."""
        scale = SHOWN[0] / picture.width
        frame = Image.new("RGB", (SHOWN[0], SHOWN[1] + CAPTION), "#10141a")
        frame.paste(picture.resize(SHOWN, Image.Resampling.LANCZOS), (0, CAPTION))
        draw = ImageDraw.Draw(frame)
        draw.text((16, CAPTION / 2), self.caption, "white", ImageFont.load_default(18), anchor="lm")
        if mouse is not None:
            x, y = mouse[0] * scale, mouse[1] * scale + CAPTION
            draw.polygon([(x + u, y + v) for u, v in POINTER], fill="black", outline="white", width=1)
        self.frames.append(frame)
        self.times.append(round(1000 * seconds))

    def save(self, path: Path) -> None:
        """Write the animation."""
        first, *others = self.frames
        with replacing(path) as temporary:
            first.save(
                temporary,
                "webp",
                save_all=True,
                append_images=others,
                duration=self.times,
                loop=0,
                quality=38,
                method=4,
            )


class Walk:
    """A person at the page: clicks at the true places, looks, corrects.

    Args:
        page: of a session that has just begun.
        table: where the points are.
        film: what is seen.
    """

    def __init__(self, page, table: Table, film: Film) -> None:  # type: ignore[no-untyped-def]  # LabelPage, of tests
        self.page, self.table, self.film = page, table, film
        self.mouse: tuple[float, float] | None = None

    def look(self, seconds: float) -> Image.Image:
        """A frame of the window as it is."""
        self.page.settle()
        content = b64decode(self.page.browser.call("Page.captureScreenshot")["data"])
        picture = Image.open(io.BytesIO(content)).convert("RGB")
        self.film.add(picture, self.mouse, seconds)
        return picture

    def place_all(self, every: int, seconds: float) -> None:
        """Click all points of the open image; a frame for every so many."""
        for index, (x, y) in enumerate(self.table[self.page.image]):
            self.mouse = self.page.locate(x, y)
            self.page.browser.move_mouse(*self.mouse)
            if index % every == 0:
                picture = self.look(seconds)
                if index == 9 and every == 1:
                    keep(picture, "label-place.png")
            self.page.click(x, y)
        self.page.wait_until_stored()

    def press(self, selector: str) -> None:
        """Click a button."""
        box = self.page.browser.evaluate(f"document.querySelector('{selector}').getBoundingClientRect().toJSON()")
        self.mouse = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        self.page.browser.click(*self.mouse)

    def go_on(self) -> None:
        """The next image, in the tool's order."""
        before = self.page.image
        self.press("#next")
        self.page.browser.wait_for(f"document.querySelector('#image-name').textContent !== {before!r}")
        self.page.wait_until_shown()

    def wait_for_fit(self) -> None:
        """Until the learner rests."""
        time.sleep(1)
        self.page.browser.wait_for("document.querySelector('#fit-chip').textContent.startsWith('Error')", 120)
        self.page.browser.wait_for("document.querySelectorAll('.mark.suggested').length > 0", 60)

    def correct(self, seconds: float, slowly: bool) -> int:
        """Drag what is too far off; returns how many."""
        moved = 0
        for index, place in enumerate(self.table[self.page.image]):
            (kind, x, y), (u, v) = self.page.marks()[index], self.page.locate(*place)
            left, right = self.page.locate(0, 0)[0], self.page.locate(1, 0)[0]
            if kind != "suggested" or ((x - u) ** 2 + (y - v) ** 2) ** 0.5 < WRONG * (right - left):
                continue
            moved += 1
            self.drag((x, y), (u, v), seconds if slowly else 0)
        return moved

    def drag(self, start: tuple[float, float], end: tuple[float, float], seconds: float) -> None:
        """Drag from one place of the window to another, seen on the way if there is time."""
        send = self.page.browser.call
        self.page.browser.move_mouse(*start)
        held = {"button": "left", "clickCount": 1}
        send("Input.dispatchMouseEvent", type="mousePressed", x=start[0], y=start[1], buttons=1, **held)
        for share in (0.5, 1.0):
            self.mouse = start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])
            if abs(self.mouse[0] - start[0]) + abs(self.mouse[1] - start[1]) < 8:
                away = {"x": start[0] + 12, "y": start[1]}  # far enough to be a drag
                send("Input.dispatchMouseEvent", type="mouseMoved", buttons=1, **away, **held)
            send("Input.dispatchMouseEvent", type="mouseMoved", x=self.mouse[0], y=self.mouse[1], buttons=1, **held)
            if seconds:
                self.look(seconds)
        send("Input.dispatchMouseEvent", type="mouseReleased", x=end[0], y=end[1], **held)
        self.page.settle()


def keep(picture: Image.Image, name: str) -> None:
    """Write a screenshot of the how-to, small."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        picture.save(path)
        shrink_png(path, IMAGES / name, 200)


def read_table(path: Path) -> Table:
    """The true points, by file."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    count = sum(column.startswith("x") for column in rows[0])
    return {row["file"]: [(float(row[f"x{n}"]), float(row[f"y{n}"])) for n in range(count)] for row in rows}


def play(walk: Walk) -> None:
    """The story: five images by hand, then corrections, then the result."""
    begin(walk)
    first_suggestions(walk)
    for number in range(7, 21):
        correct_next(walk, number)
    walk.page.wait_until_stored()
    walk.go_on()
    walk.wait_for_fit()
    show_panel(walk)


def begin(walk: Walk) -> None:
    """Five images by hand."""
    film = walk.film
    film.caption = "A folder of 60 fly wings, 15 points each. Nothing is known yet."
    walk.look(3)
    walk.press("#hint button")
    film.caption = "Click the points in the order of their names. The magnifier helps."
    walk.place_all(1, 0.5)
    walk.look(1)
    for number in range(2, 6):
        walk.go_on()
        film.caption = f"Image {number} of the five that it begins with."
        walk.place_all(6, 0.35)
    walk.go_on()


def first_suggestions(walk: Walk) -> None:
    """What it says after five images, corrected slowly."""
    film = walk.film
    film.caption = "It has learnt from five images: diamonds are its suggestions."
    walk.wait_for_fit()
    walk.look(4)
    film.caption = "Drag what is wrong …"
    walk.correct(0.45, slowly=True)
    film.caption = "… and accept the rest with one key: Enter."
    walk.look(1.5)
    walk.page.browser.press("Enter")
    walk.look(1.5)


def correct_next(walk: Walk, number: int) -> None:
    """An image with suggestions: what is wrong is dragged, the rest accepted."""
    film = walk.film
    walk.page.wait_until_stored()
    walk.go_on()
    walk.wait_for_fit()
    if number in (7, 12, 18):
        film.caption = f"Image {number}: the one that it would learn most from."
        picture = walk.look(2.2)
        if number == 12:
            keep(picture, "label-suggest.png")
    moved = walk.correct(0.45, slowly=number == 12)
    walk.page.browser.press("Enter")
    walk.page.settle()
    film.caption = f"Image {number}: {moved or 'none'} of 15 dragged, the others accepted with Enter."
    walk.look(1.1)


def show_panel(walk: Walk) -> None:
    """What was learnt, what was done, and what to take along."""
    scroll = "document.querySelector('#panel').scrollTop"
    walk.page.browser.evaluate(f"{scroll} = document.querySelector('#learner').offsetTop - 90")
    walk.film.caption = "The error on images that the fit had not seen; what was accepted, moved, placed."
    keep(walk.look(5), "label-panel.png")
    walk.page.browser.evaluate(f"{scroll} = 9999")
    walk.film.caption = "Take it along: CSV, TPS, COCO, DeepLabCut, and a head that predicts new folders."
    walk.look(5)


def main() -> None:
    """Draw all pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("points", type=Path)
    parser.add_argument("--n", type=int, default=60, help="how many pictures of the folder")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    from chromium import Chromium, find_chromium
    from label_page import LabelPage, LabelServer

    program = find_chromium()
    if program is None:
        parser.error("no browser: install Debian's package chromium")
    table = read_table(options.points)
    film = Film()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "wings"
        folder.mkdir()
        for path in sorted(options.pictures.iterdir())[: options.n]:
            shutil.copyfile(path, folder / path.name)
        names = Path(place) / "names.txt"
        names.write_text("\n".join(NAMES), encoding="utf-8")
        with (
            LabelServer(folder, "--points", str(names), "--cache", str(Path(place) / "cache")) as server,
            Chromium(program, Path(place) / "profile") as browser,
        ):
            page = LabelPage(browser, server)
            page.open(*SIZE, hint=True)
            play(Walk(page, table, film))
            moves = page.browser.evaluate("document.querySelector('#work').innerText")
    film.save(IMAGES / "label-walk.webp")
    size = (IMAGES / "label-walk.webp").stat().st_size
    print(f"{len(film.frames)} frames, {sum(film.times) / 1000:.0f} s, {size:,} bytes")
    print(moves)


if __name__ == "__main__":
    main()
