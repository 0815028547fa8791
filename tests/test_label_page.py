"""The page of ``tensor-dropout label`` in a real browser, by real input events, against the real server."""

from __future__ import annotations

import math
import random
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from chromium import Chromium, find_chromium
from label_page import NAMES, ForkedServer, Forks, LabelPage, LabelServer, draw_pictures
from test_report_pages import PALE

SCREENSHOTS = Path(__file__).parents[1] / "out" / "label-screenshots"
WINDOWS = [(1280, 860, "light"), (1280, 860, "dark"), (820, 1180, "light"), (375, 812, "dark")]
BACKBONE = ("--backbone", "small_backbone:build", "--size", "16")
#: Elements that reach beyond the window, and are not in a drawer that is shut.
OVERFLOWING = """[...document.body.querySelectorAll("*")]
    .filter(e => e.checkVisibility({visibilityProperty: true}) && !e.closest(".skip-link, .for-readers, svg"))
    .filter(e => e.getBoundingClientRect().right > innerWidth + 0.5 || e.getBoundingClientRect().left < -0.5)
    .map(e => e.tagName + "." + e.className)"""
#: Buttons and fields that are in sight and smaller than a fingertip.
SMALL = """[...document.querySelectorAll("button, select, input, [role=option]")]
    .filter(e => e.checkVisibility({visibilityProperty: true}) && !e.closest("label"))
    .map(e => [e.id || e.textContent, e.getBoundingClientRect()])
    .filter(([, box]) => box.width < 40 || box.height < 40).map(([name, box]) => [name, box.width, box.height])"""
#: Texts below the image that do not show whole.
CUT = """[...document.querySelectorAll(".prompt, .actions button")]
    .filter(e => e.checkVisibility() && (e.scrollWidth > e.clientWidth + 1 || e.scrollHeight > e.clientHeight + 1))
    .map(e => e.textContent)"""
ROLES = ("button", "textbox", "searchbox", "combobox", "listbox", "radio", "checkbox", "slider", "application", "img")
ROLES += ("option", "progressbar", "meter", "link", "group", "radiogroup", "navigation", "complementary", "dialog")


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    program = find_chromium()
    if program is None:
        pytest.skip("no browser: install Debian's package chromium")
    with Chromium(program, tmp_path_factory.mktemp("browser") / "profile") as browser:
        yield browser


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("names") / "names.txt"
    path.write_text("\n".join(NAMES) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """Where the marks of the pictures are."""
    return draw_pictures(tmp_path_factory.mktemp("pictures") / "small", 24)


@pytest.fixture(scope="module")
def server(chromium, names, tmp_path_factory):
    """The command on 24 pictures, one of 16 bits and one that is none; with a small network."""
    folder = tmp_path_factory.mktemp("label") / "pictures"
    draw_pictures(folder, 24)
    ramp = np.linspace(1000, 9000, 120 * 90).reshape(90, 120).astype(np.uint16)
    Image.fromarray(ramp).save(folder / "deep.png")
    (folder / "torn.png").write_bytes((folder / "0000.png").read_bytes()[:20])
    cache = tmp_path_factory.mktemp("cache")
    with LabelServer(folder, "--points", str(names), "--cache", str(cache), *BACKBONE) as server:
        yield server


@pytest.fixture(scope="module")
def forks(chromium, tmp_path_factory):
    """Starts servers quickly."""
    with Forks(tmp_path_factory.mktemp("forks") / "log.txt") as forks:
        yield forks


@pytest.fixture
def page(chromium, server) -> LabelPage:
    page = LabelPage(chromium, server)
    page.open()
    return page


def near(found, expected, pixels: float = 0.6) -> bool:
    """Do two places of a picture of 120×90 agree within less than a pixel?"""
    return all(
        math.hypot((x - u) * 120, (y - v) * 90) <= pixels for (x, y), (u, v) in zip(found, expected, strict=True)
    )


# ---- with the mouse ----


def test_points_are_placed_in_the_order_of_the_names(page, places):
    page.go_to("0000.png")
    assert page.states() == ["open"] * 3
    assert page.browser.evaluate("document.querySelector('#prompt').textContent") == "Place 1 tip"
    page.label(places[0])
    assert (
        page.said()
        == "Point 3, base, placed at "
        + ", ".join(str(round(value)) for value in np.multiply(places[0][2], (120, 90)))
        + ". This image is done. Enter: next image."
    )
    page.wait_until_stored()
    assert near(page.table()["0000.png"], places[0])
    page.browser.wait_for("document.querySelector('#row-0 .row-state').textContent === 'labelled'")
    assert [place["by"] for action in page.journal()[-3:] for place in action["points"]] == ["hand"] * 3
    page.browser.click(*middle(page, "#next"))
    page.browser.wait_for("document.querySelector('#image-name').textContent !== '0000.png'")
    assert page.browser.console == []


def middle(page: LabelPage, selector: str) -> tuple[float, float]:
    """The middle of a button, in the window; it is scrolled into sight first."""
    box = page.browser.evaluate(
        f"(e => {{ e.scrollIntoView({{block: 'nearest'}}); return e.getBoundingClientRect().toJSON(); }})"
        f"(document.querySelector({selector!r}))"
    )
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def test_a_point_is_dragged_and_the_drag_undone(page, places):
    page.go_to("0001.png")
    page.label(places[1])
    page.drag(places[1][0], (0.8, 0.8))
    page.wait_until_stored()
    assert near(page.table()["0001.png"], [(0.8, 0.8), *places[1][1:]])
    kind, x, y = page.marks()[0]
    assert kind == "confirmed"
    assert (x, y) == pytest.approx(page.locate(0.8, 0.8), abs=1)
    page.browser.press("Control+z")
    page.browser.wait_for("document.querySelector('#announce').textContent.startsWith('Undone')")
    page.wait_until_stored()
    assert near(page.table()["0001.png"], places[1])


def test_a_drag_is_dropped_with_escape(page, places):
    page.go_to("0001.png")
    before = page.marks()
    x, y = page.locate(*places[1][0])
    page.browser.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1, clickCount=1)
    page.browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 60, y=y, button="left", buttons=1)
    page.settle()
    assert page.browser.evaluate("!document.querySelector('#loupe').hidden")
    page.browser.press("Escape")
    page.browser.call("Input.dispatchMouseEvent", type="mouseReleased", x=x + 60, y=y, button="left", clickCount=1)
    page.settle()
    assert page.marks() == before


def test_skip_clear_and_the_choice_of_another_point(page, places):
    page.go_to("0002.png")
    page.browser.press("2")
    page.click(*places[2][1])
    page.wait_for_states("open", "placed", "open")
    page.browser.click(*middle(page, "#points > :nth-child(3) button"))
    page.browser.click(*middle(page, "#absent"))
    page.wait_for_states("open", "placed", "cannot be seen")
    page.browser.press("2", "Delete")
    page.wait_for_states("open", "open", "cannot be seen")
    page.wait_until_stored()
    assert "0002.png" not in page.table() or page.table()["0002.png"] == [None, None, None]
    assert [action["kind"] for action in page.journal()[-3:]] == ["place", "absent", "clear"]


def test_reload_keeps_the_image_and_every_point(page, places):
    page.go_to("0003.png")
    page.click(*places[3][0])
    page.wait_until_stored()
    page.browser.reload()
    page.wait_until_shown()
    assert page.image == "0003.png"
    page.wait_for_states("placed", "open", "open")
    assert "token" not in page.browser.evaluate("location.href")
    page.browser.press("Control+z")  # a person is the same person after a reload
    page.wait_for_states("open", "open", "open")
    assert page.browser.console == []


def test_zoom_pan_and_double_click(page, places):
    page.go_to("0004.png")
    x, y = page.locate(0.25, 0.25)
    page.click(*places[4][0])
    _, u, v = page.marks()[0]
    page.browser.turn_wheel(u, v, -300)
    page.browser.wait_for("document.querySelector('.mark')")
    page.settle()
    assert page.marks()[0][1:] == pytest.approx((u, v), abs=1)  # what is under the mouse stays there
    page.browser.drag([(x, y), (x + 30, y + 10), (x + 80, y + 20)], button="middle")
    page.settle()
    assert page.marks()[0][1:] == pytest.approx((u + 80, v + 20), abs=1)
    page.browser.key_down("Space")
    page.browser.drag([(x, y), (x + 10, y), (x + 20, y)])
    page.browser.key_up("Space")
    page.settle()
    assert page.marks()[0][1:] == pytest.approx((u + 100, v + 20), abs=1)
    time.sleep(0.45)
    page.browser.click(*page.locate(0.5, 0.9), count=2)
    page.settle()
    page.wait_for_states("placed", "open", "open")  # the first click of a double click places nothing that stays
    assert page.marks()[0][1:] == pytest.approx((u, v), abs=1)


# ---- suggestions ----


def test_suggestions_are_accepted_moved_and_counted(page, places):
    """The real learner on five labelled pictures; what it says is not the point here, but what one can do with it."""
    teach(page, places)
    page.go_to("0012.png")
    page.browser.wait_for("document.querySelectorAll('.mark.suggested').length === 3", timeout=60)
    page.wait_for_states("suggested", "suggested", "suggested")
    assert (
        page.browser.evaluate("getComputedStyle(document.querySelector('.mark.suggested .over')).strokeDasharray")
        != "none"
    )
    page.click(0.05, 0.95)
    assert page.states() == ["suggested"] * 3  # nobody has said which point goes there
    page.browser.click(*page.marks()[1][1:])
    page.wait_for_states("suggested", "placed", "suggested")
    page.browser.move_mouse(5, 5)
    start = page.marks()[0][1:]
    page.browser.drag([start, (start[0] + 10, start[1]), (start[0] + 40, start[1] + 30)])
    page.wait_for_states("placed", "placed", "suggested")
    page.browser.press("Enter")
    page.wait_for_states("placed", "placed", "placed")
    page.wait_until_stored()
    assert [place["by"] for action in page.journal()[-3:] for place in action["points"]] == [
        "accepted",
        "moved",
        "accepted",
    ]
    page.browser.press("Control+z")
    page.wait_for_states("placed", "placed", "suggested")
    page.go_to("0013.png")
    page.wait_for_states("suggested", "suggested", "suggested")
    page.browser.press("a")
    page.wait_for_states("placed", "placed", "placed")
    page.wait_until_stored()
    assert len(page.journal()[-1]["points"]) == 3  # one action
    page.browser.press("Control+z")
    page.wait_for_states("suggested", "suggested", "suggested")
    page.browser.wait_for("document.querySelector('#learner .chart')")
    assert "Held-out error" in page.browser.evaluate(
        "document.querySelector('#learner .chart').getAttribute('aria-label')"
    )
    assert "accepted without a move" in page.browser.evaluate("document.querySelector('#work').textContent")
    assert page.browser.console == []


def teach(page: LabelPage, places: list[list[tuple[float, float]]]) -> None:
    """Label enough for suggestions, if that was not done."""
    for number in range(5, 11):
        page.go_to(f"{number:04d}.png")
        if "open" in page.states():
            page.label(places[number])
    page.wait_until_stored()


def test_suggestions_stay_where_they_were_judged(page, places):
    """A fit that arrives moves nothing on the open image; what it says comes when it is asked for."""
    teach(page, places)
    browser, first = page.browser, page.browser.tab
    page.go_to("0014.png")
    browser.wait_for("document.querySelectorAll('.mark.suggested').length === 3", timeout=60)
    browser.wait_for("document.querySelector('#fit-chip').textContent.startsWith('Error')", timeout=60)
    before = page.marks()
    browser.add_tab()
    other = LabelPage(browser, page.server)
    other.open()
    other.go_to("0021.png")
    for index, (x, y) in enumerate(places[21]):
        browser.press(str(index + 1))
        other.click(x, min(y + 0.1, 1))  # elsewhere than the fit of before would say
    other.wait_until_stored()
    browser.call("Page.close")
    browser.turn_to(first)
    browser.wait_for("!document.querySelector('#newer').hidden", timeout=60)
    page.settle()
    assert page.said().startswith("Newer suggestions: press R")
    assert page.marks() == before
    assert browser.evaluate(PALE) == []
    assert unnamed(browser) == []
    browser.click(*before[1][1:])
    page.wait_for_states("suggested", "placed", "suggested")
    page.wait_until_stored()
    assert page.locate(*page.table()["0014.png"][1]) == pytest.approx(before[1][1:], abs=0.1)
    browser.press("r")
    browser.wait_for("document.querySelector('#newer').hidden")
    page.settle()
    after = page.marks()
    assert after[1] == ("confirmed", *before[1][1:])
    assert after[0][1:] != pytest.approx(before[0][1:], abs=0.01)
    x, y = after[0][1:]
    browser.drag([(x, y), (x + 2, y), (x + 3, y)])  # small, and still a drag
    page.wait_for_states("placed", "placed", "suggested")
    x, y = after[2][1:]
    browser.click(x + 6, y - 2)  # on the diamond, beside its middle
    page.wait_for_states("placed", "placed", "placed")
    page.wait_until_stored()
    assert [place["by"] for action in page.journal()[-2:] for place in action["points"]] == ["moved", "accepted"]
    assert page.marks()[0][1] == pytest.approx(after[0][1] + 3, abs=0.3)
    assert page.marks()[2][1:] == pytest.approx((x, y), abs=0.1)
    assert browser.console == []


def test_an_image_is_labelled_without_its_suggestions(page, places):
    """What one cannot see is not accepted, and what is placed then is placed by hand."""
    teach(page, places)
    page.go_to("0015.png")
    page.browser.wait_for("document.querySelectorAll('.mark.suggested').length === 3", timeout=60)
    page.browser.press("h")
    page.wait_for_states("open", "open", "open")
    assert page.marks() == {}
    page.browser.press("a")
    assert page.toast() == "There is no suggestion to accept."
    page.label(places[15])
    assert sorted(page.marks()) == [0, 1, 2]
    page.wait_until_stored()
    assert near(page.table()["0015.png"], places[15])
    assert [place["by"] for action in page.journal()[-3:] for place in action["points"]] == ["hand"] * 3
    page.browser.press("h")
    page.settle()
    assert page.marks() == {}
    assert page.browser.evaluate(PALE) == []
    page.browser.press("h", "Control+z")
    page.wait_for_states("placed", "placed", "suggested")
    assert page.browser.console == []


def test_the_error_says_when_it_is_measured_against_accepted_suggestions(page):
    told = page.browser.evaluate(
        """import("/page/progress.js").then(({ Progress }) => {
            const rounds = [{ labelled: 20, error_pixels: 0.5, error_percent: 0.3, seconds: 1 }];
            const statistics = accepted => ({ accepted, moved: 10, hand: 7, absent: 40, seconds_saved: null, rounds });
            const state = Object.assign(new EventTarget(), { images: new Map(), progress: { fit: {}, features: {} } });
            new Progress(state);
            const frames = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
            const tell = async accepted => {
                state.statistics = statistics(accepted);
                state.dispatchEvent(new Event("statistics"));
                await frames();
                return document.querySelector("#learner .bias")?.textContent ?? "";
            };
            return tell(17).then(async few => [few, await tell(83)]);
        })"""
    )
    assert told == ["", "Most labels (83 %) are accepted suggestions: the true error is larger."]
    assert page.browser.evaluate(PALE) == []


# ---- without the mouse ----


def test_an_image_is_labelled_with_the_keyboard_alone(page, places):
    """From the top of the page: the list, an image of it, three points, a correction, the next image."""
    browser = page.browser
    browser.evaluate("document.activeElement.blur()")
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.id") == "skip-link"
    for _ in range(20):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.id") == "list":
            break
    browser.press("Home", *["ArrowDown"] * 20, "Enter")
    browser.wait_for("document.querySelector('#image-name').textContent === '0020.png'")
    page.wait_until_shown()
    browser.press("Shift+Tab", "Tab", "Tab")
    assert browser.evaluate("document.activeElement.id") == "stage"
    assert browser.evaluate("getComputedStyle(document.querySelector('#stage')).outlineStyle") == "solid"
    for index, (x, y) in enumerate(places[20]):
        browser.press(str(index + 1))
        walk(page, (x * 120, y * 90))
        browser.press("Space")
        page.wait_for_states(*["placed"] * (index + 1), *page.states()[index + 1 :])
    page.wait_until_stored()
    assert near(page.table()["0020.png"], places[20], 0.8)
    browser.press("1", "ArrowRight", "ArrowRight", "Shift+ArrowDown")
    page.browser.wait_for("document.querySelector('#announce').textContent.includes('moved to')")
    page.wait_until_stored()
    x, y = places[20][0]
    assert near(page.table()["0020.png"][:1], [(x + 2 / 120, y + 10 / 90)], 0.8)
    browser.press("n")
    browser.wait_for("document.querySelector('#image-name').textContent !== '0020.png'")


def walk(page: LabelPage, end: tuple[float, float]) -> None:
    """Move the cursor by arrow keys to a pixel: steps of ten and of one."""
    browser = page.browser
    browser.press("ArrowRight")  # the cursor, or the suggestion, answers with where it is
    for axis, keys in enumerate((("ArrowLeft", "ArrowRight"), ("ArrowUp", "ArrowDown"))):
        for step, held in ((10, "Shift+"), (1, "")):
            while True:
                here = where(page)
                left = end[axis] - here[axis]
                if abs(left) < max(step / 2, 0.55):
                    break
                browser.press(held + keys[left > 0])


def where(page: LabelPage) -> tuple[float, float]:
    """The cursor, or the point in the hand, in pixels of the picture."""
    page.settle()
    x, y = page.browser.evaluate(
        "(document.querySelector('.cursor') ?? document.querySelector('.mark.active'))"
        ".getAttribute('transform').match(/-?[\\d.]+/g).map(Number)"
    )
    box = page.stage()
    left, top = page.locate(0, 0)
    right, bottom = page.locate(1, 1)
    return (x + box["x"] - left) / (right - left) * 120, (y + box["y"] - top) / (bottom - top) * 90


def test_help_and_names_by_keys(page):
    browser = page.browser
    browser.press("?")
    browser.wait_for("document.querySelector('dialog[open] .keys')")
    assert unnamed(browser) == []
    assert browser.evaluate(PALE) == []
    browser.press("Escape")
    browser.wait_for("!document.querySelector('dialog')")
    browser.evaluate("document.querySelector('#edit-names').focus()")
    browser.press("Enter")
    browser.wait_for("document.querySelector('dialog[open] .name-list')")
    assert browser.evaluate("[...document.querySelectorAll('.name-list input')].map(i => i.value)") == NAMES
    assert browser.evaluate("document.activeElement.value") == NAMES[0]
    browser.press("End", *"-z", "Control+Enter")
    browser.wait_for("document.querySelector('.point-name').textContent === 'tip-z'")
    page.wait_until_stored()
    assert page.journal()[-1]["names"] == ["tip-z", *NAMES[1:]]
    assert browser.console == []


# ---- fingers ----


def test_tap_drag_and_pinch(page, places):
    browser = page.browser
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    try:
        page.go_to("0016.png")
        for index in range(3):
            if page.states()[index] == "suggested":
                browser.press(str(index + 1))
            browser.touch([page.locate(*places[16][index])])
            time.sleep(0.45)
        page.wait_for_states("placed", "placed", "placed")
        page.wait_until_stored()
        assert near(page.table()["0016.png"], places[16])
        x, y = page.locate(*places[16][2])
        browser.touch([(x, y)], [(x - 30, y)], [(x - 60, y - 20)])
        page.settle()
        assert page.marks()[2][1:] == pytest.approx((x - 60, y - 20), abs=1)
        u, v = page.locate(*places[16][0])
        browser.touch([(u - 50, v), (u + 50, v)], [(u - 75, v), (u + 75, v)], [(u - 100, v), (u + 100, v)])
        page.settle()
        left, right = page.marks()[0], page.marks()[1]
        u2, _ = page.locate(*places[16][1])
        assert left[1:] == pytest.approx((u, v), abs=2)
        assert right[1] - left[1] == pytest.approx(2 * (u2 - u), rel=0.02)
    finally:
        browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


# ---- how it looks ----


def unnamed(browser: Chromium) -> list[tuple[str, str]]:
    """Controls and pictures that a screen reader could not name."""
    nodes = browser.call("Accessibility.getFullAXTree")["nodes"]
    found = []
    for node in nodes:
        role = node.get("role", {}).get("value", "")
        if not node.get("ignored") and role in ROLES and not node.get("name", {}).get("value", "").strip():
            found.append((role, str(node.get("nodeId"))))
    return found


@pytest.mark.parametrize(("width", "height", "scheme"), WINDOWS)
def test_page_fits_reads_and_names_everything(chromium, server, places, width, height, scheme, capsys):
    page = LabelPage(chromium, server)
    page.open(width, height, scheme, hint=True)
    page.go_to("0000.png")
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    picture = SCREENSHOTS / f"label-{width}-{scheme}.png"
    chromium.photograph(picture, whole=False)
    with capsys.disabled():
        print(f"\nscreenshot: {picture}")
    for drawer in ("", "#toggle-list", "#toggle-panel"):
        if drawer and not chromium.evaluate(f"document.querySelector('{drawer}').checkVisibility()"):
            continue
        if drawer:
            chromium.evaluate(f"document.querySelector('{drawer}').click()")
            time.sleep(0.25)
            chromium.photograph(SCREENSHOTS / f"label-{width}-{scheme}{drawer.replace('#toggle', '')}.png", whole=False)
        assert chromium.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert chromium.evaluate(OVERFLOWING) == []
        assert chromium.evaluate(SMALL) == []
        assert chromium.evaluate(CUT) == []
        assert chromium.evaluate(PALE) == []
        assert unnamed(chromium) == []
        if drawer:
            chromium.press("Escape")
    assert chromium.evaluate("document.querySelector('#stage').getAttribute('aria-label')").startswith(
        "Image 0000.png, 120 by 90"
    )
    dark = chromium.evaluate("getComputedStyle(document.querySelector('#panel')).backgroundColor") == "rgb(23, 28, 35)"
    assert dark == (scheme == "dark")
    assert chromium.console == []


def test_the_switch_of_colours(page):
    background = "getComputedStyle(document.querySelector('#panel')).backgroundColor"
    seen = []
    for _ in range(3):
        page.browser.click(*middle(page, "#theme"))
        seen.append(page.browser.evaluate(background))
        assert page.browser.evaluate(PALE) == []
    assert seen == ["rgb(255, 255, 255)", "rgb(23, 28, 35)", "rgb(255, 255, 255)"]


def test_a_picture_of_sixteen_bits_has_a_window(page):
    page.go_to("deep.png")
    grey = """(() => { const shown = document.querySelector("#picture");
        const pixel = new OffscreenCanvas(1, 1).getContext("2d");
        pixel.drawImage(shown, shown.width / 2, shown.height / 2, 1, 1, 0, 0, 1, 1);
        return pixel.getImageData(0, 0, 1, 1).data[0]; })()"""
    page.browser.wait_for("!document.querySelector('#open-window').hidden")
    before = page.browser.evaluate(grey)
    page.browser.click(*middle(page, "#open-window"))
    page.browser.evaluate("document.querySelector('#low').focus()")
    page.browser.press("End")  # all but the lightest is black
    page.browser.wait_for(f"{grey} < 20")
    assert before > 80
    page.browser.click(*middle(page, "#window-auto"))
    page.browser.wait_for(f"{grey} === {before}")
    page.go_to("0000.png")
    assert page.browser.evaluate("document.querySelector('#open-window').hidden")
    assert page.browser.console == []


def test_a_picture_that_cannot_be_read_is_listed(page):
    page.go_to("torn.png")
    assert "cannot be read" in page.browser.evaluate("document.querySelector('#stage-message').textContent")
    page.browser.evaluate(
        "(f => { f.value = 'unreadable'; f.dispatchEvent(new Event('change')); })(document.querySelector('#filter'))"
    )
    assert page.browser.evaluate("[...document.querySelectorAll('.row-name')].map(e => e.textContent)") == ["torn.png"]
    assert page.browser.console == []


def test_the_token_is_asked_for(chromium, server):
    page = LabelPage(chromium, server)
    chromium.open(server.base + "?token=wrong", 1280, 860)
    chromium.wait_for("document.querySelector('#banner').textContent.includes('whole address')")
    page.open()
    assert chromium.evaluate("document.querySelector('#banner').hidden")


def test_the_table_is_exported(page, places, tmp_path):
    page.go_to("0019.png")
    page.browser.press("1")
    page.click(*places[19][0])
    page.wait_until_stored()
    page.browser.download_to(tmp_path)
    page.browser.click(*middle(page, "#output .exports button:nth-child(2)"))
    deadline = time.monotonic() + 10
    while not (files := [path for path in tmp_path.iterdir() if path.suffix == ".tps"]):
        assert time.monotonic() < deadline, page.browser.evaluate("document.querySelector('#banner').textContent")
        time.sleep(0.05)
    assert "LM=" in files[0].read_text(encoding="utf-8")


# ---- two tabs, and a server that goes away ----


def test_two_tabs_keep_in_step(page, places):
    browser, first = page.browser, page.browser.tab
    page.go_to("0017.png")
    second = browser.add_tab()
    other = LabelPage(browser, page.server)
    other.open()
    other.go_to("0017.png")
    if "suggested" in other.states():
        browser.press("1")
    other.click(*places[17][0])
    other.wait_until_stored()
    browser.turn_to(first)
    browser.wait_for("document.querySelector('.point').dataset.word === 'placed'")
    browser.press("2")
    page.click(*places[17][1])
    page.wait_until_stored()
    browser.turn_to(second)
    browser.wait_for("document.querySelectorAll('.point')[1].dataset.word === 'placed'")
    browser.press("Control+z")  # undoes what this tab did, not the other
    browser.wait_for("document.querySelectorAll('.point')[0].dataset.word !== 'placed'")
    other.wait_until_stored()
    assert near(page.table()["0017.png"][1:2], places[17][1:2])
    assert page.table()["0017.png"][0] is None
    assert browser.console == []
    browser.call("Page.close")
    browser.turn_to(first)


def test_no_click_is_lost_when_the_server_is_killed_at_random_moments(chromium, forks, tmp_path):
    """Twenty kills. A click counts as confirmed when the page says "All stored"; the others wait and arrive later."""
    folder = tmp_path / "killed"
    draw_pictures(folder, 4)
    rng = random.Random(0)
    with ForkedServer(folder, forks) as server:
        page = LabelPage(chromium, server)
        page.open()
        name_points(page, 40)
        page.wait_until_stored()
        placed = [(0.08 + 0.12 * (n % 8), 0.1 + 0.2 * (n // 8)) for n in range(40)]  # no two are near
        for kill in range(20):
            page.browser.click(*page.locate(*placed[2 * kill]))
            time.sleep(rng.uniform(0, 0.03))
            server.kill()
            told = page.browser.evaluate("document.querySelector('#saved').textContent") == "All stored"
            before = len([place for place in page.table().get(page.image, []) if place])
            assert before >= 2 * kill + told
            page.browser.click(*page.locate(*placed[2 * kill + 1]))
            if kill % 7 == 3:
                page.browser.wait_for("!document.querySelector('#banner').hidden")
                assert "does not answer" in page.browser.evaluate("document.querySelector('#banner').textContent")
            server.start()
            page.wait_until_stored()
        assert near(page.table()[page.image], placed, 0.7)
        assert len([action for action in page.journal() if action["kind"] == "place"]) == 40  # and nothing twice
        assert page.browser.evaluate("document.querySelector('#banner').hidden")


def name_points(page: LabelPage, count: int) -> None:
    """Name the points of a project that has none, as a list that is pasted into the first field."""
    page.browser.wait_for("document.querySelector('dialog[open] .name-list')")
    names = "\\n".join(f"p{number}" for number in range(1, count + 1))
    page.browser.evaluate(
        "(field => { const data = new DataTransfer(); data.setData('text', '" + names + "');"
        "field.dispatchEvent(new ClipboardEvent('paste', {clipboardData: data, cancelable: true})); })"
        "(document.querySelector('.name-list input'))"
    )
    page.browser.evaluate("document.querySelector('.name-list input').focus()")
    page.browser.press("Control+Enter")
    page.browser.wait_for(f"document.querySelectorAll('.point').length === {count}")
    page.put_hint_away()


def values(page: LabelPage) -> list[str]:
    """What stands in the window of names."""
    return page.browser.evaluate("[...document.querySelectorAll('.name-list input')].map(i => i.value)")


def test_names_are_typed_as_a_list(chromium, forks, tmp_path):
    """Enter goes on; the buttons stay in sight; a mended name is no duplicate; what is typed on is no shortcut."""
    folder = tmp_path / "named"
    draw_pictures(folder, 1)
    with ForkedServer(folder, forks) as server:
        page = LabelPage(chromium, server)
        page.open(1280, 800)
        chromium.wait_for("document.querySelector('dialog[open] .name-list')")
        typed = ["wrist", "elbow", *(f"p{number}" for number in range(12))]
        for name in typed:
            chromium.press(*name, "Enter")
        assert values(page) == [*typed, ""]
        chromium.press("Enter")
        assert values(page) == [*typed, ""]  # no second empty one
        chromium.press(*"wrist")
        box = chromium.evaluate("document.querySelector('dialog [type=submit]').getBoundingClientRect().toJSON()")
        assert box["bottom"] < 800
        assert chromium.evaluate(PALE) == []
        assert unnamed(chromium) == []
        chromium.press("Control+Enter")
        last = "document.querySelector('.name-list li:last-child input')"
        assert chromium.evaluate(f"{last}.validationMessage") == "Another point has this name."
        assert page.browser.evaluate("document.querySelector('dialog').open")
        chromium.click(*middle(page, ".name-list li:first-child input"))
        chromium.press("End", "2")  # the other of the two is mended
        assert chromium.evaluate(f"{last}.validationMessage") == ""
        chromium.press("Control+Enter", "s", "u", "Delete", "Space", "Enter")
        chromium.wait_for("document.querySelectorAll('.point').length === 15")
        assert chromium.evaluate("document.activeElement.id") == "stage"
        assert page.states() == ["open"] * 15
        assert not chromium.evaluate("document.querySelector('#hint').hidden")  # how it goes, after the names
        page.wait_until_stored()
        assert [action["kind"] for action in page.journal()] == ["names"]
        assert page.journal()[0]["names"] == ["wrist2", *typed[1:], "wrist"]
        page.put_hint_away()
        time.sleep(0.75)
        chromium.press("s")
        page.wait_for_states("cannot be seen", *["open"] * 14)
        assert chromium.console == []


def test_what_does_nothing_says_why(chromium, forks, tmp_path):
    folder = tmp_path / "told"
    draw_pictures(folder, 3)
    with ForkedServer(folder, forks, suspect=True) as server:
        page = LabelPage(chromium, server)
        page.open(1280, 800)
        name_points(page, 2)
        page.wait_until_stored()
        time.sleep(0.75)
        page.click(0.3, 0.5)
        page.wait_for_states("placed", "open")
        time.sleep(0.45)  # no double click
        page.click(0.3, 0.5)
        page.click(0.7, 0.2)
        page.wait_for_states("placed", "open")
        assert page.toast() == "Point 1, p1 is placed: drag it, or choose another. Esc: back to the next open point."
        assert chromium.evaluate(PALE) == []
        chromium.press("Escape")
        assert page.prompt() == "Place 2 p2"
        page.click(0.6, 0.5)
        page.wait_for_states("placed", "placed")
        page.wait_until_stored()
        page.click(0.9, 0.9)
        assert page.toast() == "All points are placed. Drag one to correct it."
        for _ in range(3):
            chromium.press("Control+z")
            page.wait_until_stored()
        assert page.toast() == "Nothing to undo."
        for number in range(3):
            page.go_to(f"{number:04d}.png")
            page.click(0.3, 0.5)
            page.click(0.6, 0.5)
            page.wait_for_states("placed", "placed")
            page.wait_until_stored()
        chromium.wait_for("document.querySelector('#tally').textContent.startsWith('3 of')")
        chromium.press("Enter")
        chromium.wait_for("!document.querySelector('#toast').hidden")
        told = page.toast()
        assert told.startswith("All 3 images are labelled, 3 to check: choose “to check” at “Show”. The table is ")
        assert str(Path("labels") / "points.csv") in told
        page.open(1280, 800, hint=True)
        assert chromium.evaluate("document.querySelector('#hint').hidden")  # nothing is left to label
        assert chromium.console == []


def test_what_could_not_be_sent_survives_the_tab(chromium, forks, tmp_path):
    folder = tmp_path / "offline"
    draw_pictures(folder, 2)
    with ForkedServer(folder, forks) as server:
        page = LabelPage(chromium, server)
        page.open()
        name_points(page, 2)
        page.wait_until_stored()
        server.kill()
        page.click(0.3, 0.3)
        page.click(0.7, 0.6)
        page.browser.wait_for("document.querySelector('#saved').textContent === '2 not yet stored'")
        page.browser.press("u")  # what has not left can be taken back at once
        page.wait_for_states("placed", "open")
        page.browser.call("Page.navigate", url="about:blank")
        server.start()
        page.open()
        page.wait_until_stored()
        assert near(page.table()["0000.png"][:1], [(0.3, 0.3)])
        assert page.table()["0000.png"][1] is None


def test_a_page_of_before_goes_on_with_the_token_of_a_new_tab(chromium, forks, tmp_path):
    folder = tmp_path / "restarted"
    draw_pictures(folder, 2)
    with ForkedServer(folder, forks) as server:
        page = LabelPage(chromium, server)
        page.open()
        name_points(page, 2)
        page.wait_until_stored()
        server.kill()
        page.click(0.3, 0.3)
        server.token = server.token[::-1]
        server.start()
        banner = "document.querySelector('#banner')"
        chromium.wait_for(f"{banner}.textContent.includes('earlier start')")
        first, second = chromium.tab, chromium.add_tab()
        LabelPage(chromium, server).open()
        assert chromium.tab == second
        chromium.call("Page.close")
        chromium.turn_to(first)
        page.wait_until_stored()
        chromium.wait_for(f"{banner}.hidden")
        assert near(page.table()["0000.png"][:1], [(0.3, 0.3)])
        page.click(0.7, 0.6)
        page.wait_until_stored()
        assert None not in page.table()["0000.png"]


def test_a_label_to_check_is_said_to_be_right(chromium, forks, tmp_path):
    folder = tmp_path / "checked"
    draw_pictures(folder, 4)
    with ForkedServer(folder, forks, suspect=True) as server:
        page = LabelPage(chromium, server)
        page.open()
        name_points(page, 2)
        page.click(0.3, 0.5)
        page.click(0.6, 0.5)
        page.wait_until_stored()
        row = "document.querySelector('#row-0 .row-state').textContent"
        chromium.wait_for(f"{row} === 'to check'")
        for number in (2, 3):
            page.go_to(f"{number:04d}.png")
            page.click(0.3, 0.5)
            page.click(0.6, 0.5)
            page.wait_until_stored()
        chromium.resize(1280, 800)
        page.go_to("0000.png")
        chromium.wait_for("document.querySelector('.mark.check')")
        shown = "[...document.querySelectorAll('.mark.check, .expected')].map(m => m.dataset.point).join()"
        assert chromium.evaluate(shown) in ("1,1", "1")
        assert chromium.evaluate("document.querySelector('.expected') !== null")  # and where it should be
        assert chromium.evaluate("document.querySelectorAll('.point')[1].textContent").endswith("to check")
        assert page.prompt() == "To check: 2 p2. Drag what is wrong, or say that it looks right."
        assert chromium.evaluate(CUT) == []
        assert chromium.evaluate(PALE) == []
        chromium.evaluate(
            "(f => { f.value = 'check'; f.dispatchEvent(new Event('change')); })(document.querySelector('#filter'))"
        )
        chromium.click(*middle(page, "#following"))  # not 0001.png, which is not in the list that is shown
        chromium.wait_for("document.querySelector('#image-name').textContent === '0002.png'")
        chromium.click(*middle(page, "#previous"))
        chromium.wait_for("document.querySelector('#image-name').textContent === '0000.png'")
        page.wait_until_shown()
        chromium.click(*middle(page, "#keep"))
        chromium.wait_for("document.querySelector('#keep').hidden && !document.querySelector('.mark.check')")
        page.wait_until_stored()
        assert page.journal()[-1]["kind"] == "keep"
        assert page.said() == "Kept: the label is right."
        chromium.click(*middle(page, "#following"))  # from an image that the list shows no more
        chromium.wait_for("document.querySelector('#image-name').textContent === '0002.png'")
        page.wait_until_shown()
        page.drag((0.6, 0.5), (0.25, 0.25))
        chromium.wait_for("!document.querySelector('.mark.check')")
        assert chromium.console == []


def test_a_thousand_images_stay_quick(chromium, forks, tmp_path):
    folder = tmp_path / "many"
    draw_pictures(folder, 1, (64, 48))
    content = (folder / "0000.png").read_bytes()
    for number in range(1, 1000):
        (folder / f"{number:04d}.png").write_bytes(content)
    with ForkedServer(folder, forks) as server:
        page = LabelPage(chromium, server)
        page.open()
        name_points(page, 3)
        assert chromium.evaluate("document.querySelectorAll('.row').length") < 40
        chromium.evaluate("document.querySelector('#list').focus()")
        began = time.monotonic()
        chromium.press("End", "Enter")
        chromium.wait_for("document.querySelector('#image-name').textContent === '0999.png'")
        assert time.monotonic() - began < 2
        assert chromium.evaluate("document.querySelectorAll('.row').length") < 40
        assert chromium.evaluate("document.querySelector('[aria-selected=true]').ariaPosInSet") == "1000"
