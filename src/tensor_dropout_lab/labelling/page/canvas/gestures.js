/** Mouse, pen and fingers on the stage. Only one gesture is under way at a time. */

const REACH = { mouse: 14, pen: 16, touch: 26 };
const EXACT = { mouse: 3, pen: 4, touch: 10 }; // closer than this, a click means the mark and not the place beside it
const DIAMOND = { mouse: 10, pen: 10, touch: 14 }; // the size of a suggestion: a click on it accepts it
const STILL = { mouse: 2, pen: 4, touch: 10 }; // pixels of the screen: more is a drag
const LONG = 350; // ms that a finger rests before it aims
const DOUBLE = 400;

/**
 * @typedef {object} Hands what gestures do
 * @property {() => void} begin something is about to happen: finish what the keys had begun
 * @property {() => number|null} target the point that a click places
 * @property {(index: number, place: {x: number, y: number}) => void} put
 * @property {(index: number) => void} tap a mark was clicked, not moved
 * @property {() => void} miss a click with no point to place
 * @property {() => void} unput take back the last click, which began a double click
 */

export class Gestures {
  #viewer;
  #hands;
  /** @type {Map<number, {x: number, y: number}>} */
  #fingers = new Map();
  /** @type {any} */
  #now = null;
  #spaceDown = false;
  #lastClick = { time: -Infinity, x: 0, y: 0, placed: false };

  /**
   * @param {import("./viewer.js").Viewer} viewer
   * @param {Hands} hands
   */
  constructor(viewer, hands) {
    this.#viewer = viewer;
    this.#hands = hands;
    const stage = viewer.stage;
    stage.addEventListener("pointerdown", (event) => this.#down(event));
    stage.addEventListener("pointermove", (event) => this.#move(event));
    stage.addEventListener("pointerup", (event) => this.#up(event));
    stage.addEventListener("pointercancel", (event) => this.#cancel(event));
    stage.addEventListener("pointerleave", () => !this.#now && viewer.hideLoupe());
    stage.addEventListener("wheel", (event) => this.#wheel(event), { passive: false });
    stage.addEventListener("contextmenu", (event) => event.preventDefault());
    stage.addEventListener("auxclick", (event) => event.preventDefault());
    document.addEventListener("keydown", (event) => event.code === "Space" && this.#space(true));
    document.addEventListener("keyup", (event) => event.code === "Space" && this.#space(false));
  }

  /** Did the space bar serve to pan since it went down? Then it places nothing. */
  panned = false;

  /** Let go of what is in the hand; true if there was something. */
  drop() {
    const was = this.#now !== null;
    this.#end();
    return was;
  }

  #space(down) {
    if (down && !this.#spaceDown) this.panned = false;
    this.#spaceDown = down;
    this.#viewer.stage.classList.toggle("can-pan", down);
  }

  #at(event) {
    const box = this.#viewer.stage.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  }

  #down(event) {
    const at = this.#at(event);
    this.#fingers.set(event.pointerId, at);
    this.#capture(event);
    if (event.pointerType === "touch" && this.#fingers.size === 2) return this.#beginPinch();
    if (this.#fingers.size > 1 || this.#now) return;
    this.#hands.begin();
    this.#viewer.cursor = null;
    if (event.button === 1 || (event.button === 0 && this.#spaceDown)) return this.#begin("pan", at, event);
    if (event.button === 0) this.#press(at, event);
  }

  /** The pointer stays ours when it leaves the stage; a made-up or lost pointer cannot be captured, and need not. */
  #capture(event) {
    this.#viewer.stage.focus({ preventScroll: true });
    event.preventDefault();
    if (event.target.isConnected) this.#viewer.stage.setPointerCapture(event.pointerId);
  }

  #press(at, event) {
    const touch = event.pointerType === "touch";
    const mark = this.#viewer.markAt(at.x, at.y, REACH[event.pointerType] ?? REACH.mouse);
    if (mark && !this.#isSecond(at)) {
      const sizes = mark.kind === "suggested" && mark.index !== this.#hands.target() ? DIAMOND : EXACT;
      const isExact = mark.distance <= (sizes[event.pointerType] ?? sizes.mouse);
      this.#begin("mark", at, event, { index: mark.index, isExact, dx: mark.at.x - at.x, dy: mark.at.y - at.y });
    } else if (touch) {
      this.#begin("touch", at, event);
      this.#now.timer = setTimeout(() => this.#rest(), LONG);
    } else if (this.#canAim(at)) {
      this.#begin("aim", at, event, { index: this.#hands.target() });
      this.#hold(at);
    } else {
      this.#begin("pan", at, event);
    }
  }

  #begin(kind, at, event, more = {}) {
    this.#now = { kind, id: event?.pointerId, start: at, last: at, moved: false, dx: 0, dy: 0, ...more };
    if (kind === "pan") {
      this.panned = true;
      this.#viewer.stage.classList.add("is-panning");
    }
  }

  #canAim(at) {
    return this.#hands.target() !== null && this.#viewer.picture !== null && this.#viewer.isOn(at.x, at.y) && !this.#isSecond(at);
  }

  #isSecond(at) {
    const { time, x, y } = this.#lastClick;
    return performance.now() - time < DOUBLE && Math.hypot(at.x - x, at.y - y) < 8;
  }

  /** A finger that rests begins to aim with the magnifier. */
  #rest() {
    const now = this.#now;
    if (now?.kind !== "touch" || now.moved || !this.#canAim(now.start)) return;
    Object.assign(now, { kind: "aim", index: this.#hands.target() });
    this.#hold(now.start);
  }

  #move(event) {
    const at = this.#at(event);
    if (!this.#fingers.has(event.pointerId)) return this.#hover(at, event);
    this.#fingers.set(event.pointerId, at);
    const now = this.#now;
    if (now?.kind === "pinch") return this.#pinch();
    if (!now || event.pointerId !== now.id) return;
    now.moved ||= Math.hypot(at.x - now.start.x, at.y - now.start.y) > (STILL[event.pointerType] ?? STILL.mouse);
    if (now.kind === "touch" && now.moved) this.#begin("pan", at, event, { id: now.id, moved: true, timer: clearTimeout(now.timer) });
    else if (now.kind === "pan") this.#viewer.pan(at.x - now.last.x, at.y - now.last.y);
    else if (now.kind === "aim" || (now.kind === "mark" && now.moved)) this.#hold(at);
    this.#now.last = at;
  }

  /** While a point waits for its place, the magnifier follows the mouse. */
  #hover(at, event) {
    if (event.pointerType === "touch") return;
    const mark = this.#viewer.markAt(at.x, at.y, REACH.mouse);
    const aims = this.#hands.target() !== null && this.#viewer.isOn(at.x, at.y);
    this.#viewer.stage.classList.toggle("over-mark", Boolean(mark));
    this.#viewer.stage.classList.toggle("can-aim", aims);
    if (aims || mark) this.#viewer.magnify(this.#viewer.locate(at.x, at.y));
    else this.#viewer.hideLoupe();
  }

  #hold(at) {
    const place = this.#viewer.locate(at.x + this.#now.dx, at.y + this.#now.dy);
    this.#viewer.held = { index: this.#now.index, ...place };
    this.#viewer.magnify(place);
    this.#viewer.redraw();
  }

  #up(event) {
    const at = this.#at(event);
    this.#fingers.delete(event.pointerId);
    const now = this.#now;
    if (!now || (now.kind !== "pinch" && event.pointerId !== now.id)) return;
    if (now.kind === "pinch") {
      if (!this.#fingers.size) this.#end();
      return;
    }
    const held = this.#viewer.held;
    this.#end();
    this.#finish(now, at, held);
  }

  #finish(now, at, held) {
    const click = !now.moved && ["pan", "touch", "aim", "mark"].includes(now.kind);
    if (click && this.#isSecond(now.start)) return this.#doubleClick();
    const index = this.#choosePoint(now, at, click);
    if (click) this.#lastClick = { time: performance.now(), ...now.start, placed: index !== null };
    if (index !== null) this.#hands.put(index, held ?? this.#viewer.locate(at.x, at.y));
    else if (now.kind === "mark") this.#hands.tap(now.index);
    else if (click && !this.#spaceDown && this.#viewer.isOn(at.x, at.y)) this.#hands.miss();
  }

  /** Which point this gesture puts somewhere, if any. */
  #choosePoint(now, at, click) {
    if (now.kind === "aim" || (now.kind === "mark" && now.moved)) return now.index;
    const places = click && (now.kind === "touch" || (now.kind === "mark" && !now.isExact));
    return places && this.#canAim(at) ? this.#hands.target() : null;
  }

  #doubleClick() {
    if (this.#lastClick.placed) this.#hands.unput();
    this.#lastClick = { time: -Infinity, x: 0, y: 0, placed: false };
    this.#viewer.fit();
  }

  #cancel(event) {
    this.#fingers.delete(event.pointerId);
    this.#end();
  }

  #end() {
    clearTimeout(this.#now?.timer);
    this.#now = null;
    this.#viewer.held = null;
    this.#viewer.hideLoupe();
    this.#viewer.stage.classList.remove("is-panning");
    this.#viewer.redraw();
  }

  #beginPinch() {
    this.#end();
    this.#now = { kind: "pinch", ...this.#span() };
  }

  #span() {
    const [one, other] = [...this.#fingers.values()];
    return { x: (one.x + other.x) / 2, y: (one.y + other.y) / 2, wide: Math.hypot(one.x - other.x, one.y - other.y) || 1 };
  }

  #pinch() {
    if (this.#fingers.size < 2) return;
    const span = this.#span();
    this.#viewer.pan(span.x - this.#now.x, span.y - this.#now.y);
    this.#viewer.zoom(span.wide / this.#now.wide, span.x, span.y);
    Object.assign(this.#now, span);
  }

  #wheel(event) {
    event.preventDefault();
    const at = this.#at(event);
    const lines = event.deltaMode === WheelEvent.DOM_DELTA_LINE ? 33 : 1;
    const turn = Math.max(-240, Math.min(240, event.deltaY * lines));
    if (event.shiftKey) this.#viewer.pan(-(event.deltaX || turn), 0);
    else this.#viewer.zoom(Math.exp(-turn * (event.ctrlKey ? 0.01 : 0.0022)), at.x, at.y);
  }
}
