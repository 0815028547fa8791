/** Keys: single ones on the page, never while a text is typed; they can be switched off in the help. */

/** @typedef {{keys: string, does: string}} Line of the help */

/** @type {Line[]} */
export const HELP = [
  { keys: "← ↑ → ↓", does: "Move the chosen point, or the cursor, by 1 pixel of the original (Shift: 10, Ctrl: 100)" },
  { keys: "Space", does: "Place the point at the cursor; accept the chosen suggestion" },
  { keys: "Enter", does: "Accept all suggestions; on a finished image: next image" },
  { keys: "A", does: "Accept all suggestions" },
  { keys: "1 … 99", does: "Choose a point by its number" },
  { keys: "J, K", does: "Point before, point after" },
  { keys: "S", does: "Skip: the point cannot be seen in this image" },
  { keys: "Delete", does: "Clear the chosen point" },
  { keys: "Ctrl Z, U", does: "Undo" },
  { keys: "L", does: "A label marked “to check” looks right" },
  { keys: "R", does: "Show newer suggestions for this image" },
  { keys: "N", does: "Next image, in the order chosen on the right" },
  { keys: "Page ↑, Page ↓", does: "Image before, image after in the list as it is shown" },
  { keys: "+, −, 0", does: "Zoom in, zoom out, whole image" },
  { keys: "H", does: "Hide the suggestions; again: all points; again: show all" },
  { keys: "M", does: "Magnifier on or off" },
  { keys: "Esc", does: "Let go of a point, back to the next open one; close a window" },
  { keys: "?", does: "This help" },
];

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const DIGITS = 800; // ms for the second digit of a number
const TYPING = 700; // ms without a key after which a person no longer types into the window that closed

/**
 * @param {import("./commands.js").Commands} commands
 * @param {import("./canvas/viewer.js").Viewer} viewer
 * @param {import("./canvas/gestures.js").Gestures} gestures
 * @param {Record<string, () => void>} controls what only buttons do: help, hideMarks, useLoupe
 */
export function listen(commands, viewer, gestures, controls) {
  const digits = new Digits(commands);
  const plain = {
    Enter: () => commands.enter(),
    a: () => commands.acceptAll(),
    s: () => commands.absent(),
    u: () => commands.undo(),
    j: () => commands.step(-1),
    k: () => commands.step(1),
    l: () => commands.keep(),
    r: () => commands.renew(),
    n: () => commands.next(),
    h: controls.hideMarks,
    m: controls.useLoupe,
    "?": controls.help,
    "+": () => viewer.zoom(1.4),
    "=": () => viewer.zoom(1.4),
    "-": () => viewer.zoom(1 / 1.4),
    0: () => viewer.fit(),
    Delete: () => commands.clear(),
    Backspace: () => commands.clear(),
    PageDown: () => commands.turn(1),
    PageUp: () => commands.turn(-1),
    Escape: () => gestures.drop() || commands.letGo(),
  };
  const typed = new Typed();
  document.addEventListener("keydown", (event) => {
    if (typed.isGoingOn(event)) return;
    if (isTyping(event.target) || document.querySelector("dialog[open]")) return;
    if (isUndo(event)) return run(event, () => commands.undo());
    if (event.key in ARROWS) return isFree(event.target) && run(event, () => arrow(commands, event));
    if (event.ctrlKey || event.metaKey || event.altKey || !isAllowed(event)) return;
    if (["Enter", " "].includes(event.key) && isControl(event.target)) return;
    if (event.key === " ") return event.preventDefault(); // it acts when it is let go: held down it pans
    if (/^[1-9]$/.test(event.key) || (event.key === "0" && digits.waiting)) return run(event, () => digits.add(event.key));
    const act = plain[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (act) run(event, act);
  });
  document.addEventListener("keyup", (event) => {
    const mine = event.key === " " && !isTyping(event.target) && !isControl(event.target) && !document.querySelector("dialog[open]");
    if (mine && !gestures.panned && !typed.isRecent && isAllowed(event)) commands.confirm();
  });
}

/** The rest of what was typed into a window of names when it closed: no shortcuts, until a pause or a click. */
class Typed {
  #last = -Infinity;

  constructor() {
    document.addEventListener("pointerdown", () => (this.#last = -Infinity), { capture: true });
  }

  get isRecent() {
    return performance.now() - this.#last < TYPING;
  }

  /** Notes keys that are typed there; true for one that is still meant for it. @param {KeyboardEvent} event */
  isGoingOn(event) {
    const inside = event.target instanceof Element && event.target.closest("dialog .names");
    const goesOn = !inside && this.isRecent && event.key !== "Tab";
    if (inside || goesOn) this.#last = performance.now();
    if (goesOn && !event.ctrlKey && !event.metaKey) event.preventDefault();
    return goesOn;
  }
}

/** Numbers of two digits: the second counts when it comes at once and there is such a point. */
class Digits {
  #before = "";
  #timer = 0;
  #commands;

  constructor(commands) {
    this.#commands = commands;
  }

  get waiting() {
    return this.#before !== "";
  }

  add(digit) {
    const both = this.#before + digit;
    const number = Number(both) <= this.#commands.size ? both : digit;
    this.#before = number.length === 1 ? number : "";
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => (this.#before = ""), DIGITS);
    this.#commands.choose(Number(number) - 1);
  }
}

function run(event, act) {
  event.preventDefault();
  act();
}

function arrow(commands, event) {
  const [x, y] = ARROWS[event.key];
  const far = event.shiftKey ? 10 : event.ctrlKey || event.metaKey ? 100 : 1;
  commands.nudge(x * far, y * far);
}

function isUndo(event) {
  return (event.ctrlKey || event.metaKey) && !event.shiftKey && event.key.toLowerCase() === "z";
}

/** Letters and digits can be switched off, for people who speak to their computer. */
function isAllowed(event) {
  return event.key.length > 1 || event.key === "?" || event.key === " " || localStorage.getItem("keys") !== "off";
}

function isTyping(element) {
  return element instanceof Element && element.matches("textarea, select, input:not([type=checkbox], [type=radio], [type=range])");
}

function isControl(element) {
  return element instanceof Element && element.matches("button, a, input, summary, [role=listbox]");
}

/** May arrow keys move the point? Not where they have another meaning. */
function isFree(element) {
  return !(element instanceof Element && element.matches("input, [role=listbox]"));
}
