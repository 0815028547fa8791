/** Everything a person can do, once: keys, buttons and gestures call these. */

import { isAbsent, isPlaced } from "./actions.js";
import { announce } from "./announce.js";
import { count } from "./dom.js";

const PAUSE = 400;

export class Commands {
  #state;
  #viewer;
  #nudged = null;
  #timer = 0;
  goOn = false;

  /**
   * @param {import("./state.js").State} state
   * @param {import("./canvas/viewer.js").Viewer} viewer
   */
  constructor(state, viewer) {
    this.#state = state;
    this.#viewer = viewer;
    state.addEventListener("undone", ({ detail }) => announce(detail.action ? `Undone: ${this.#tellAction(detail.action)}.` : "Nothing to undo."));
  }

  /** How many points there are. */
  get size() {
    return this.#state.names.length;
  }

  /** "Point 3, tip". @param {number} index */
  title(index) {
    const name = this.#state.names[index];
    return name && name !== String(index + 1) ? `Point ${index + 1}, ${name}` : `Point ${index + 1}`;
  }

  /** The point that a click or the space bar places: open, or a suggestion that was chosen. */
  target() {
    const { active, points, suggestions, chosen } = this.#state;
    if (active === null || points[active]) return null;
    return suggestions[active] && !chosen ? null : active;
  }

  /** @param {number} index @param {{x: number, y: number}} place in pixels of the original */
  put(index, place) {
    this.flush();
    const { x, y } = this.#viewer.toFractions(place);
    const moved = isPlaced(this.#state.points[index]) || this.#state.suggestions[index];
    this.#state.put(index, x, y);
    this.#say(`${this.title(index)}, ${moved ? "moved" : "placed"} at ${Math.round(place.x)}, ${Math.round(place.y)}.`);
    this.#afterwards();
  }

  /** A click on a mark: a suggestion is taken as it is, a confirmed point becomes the chosen one. */
  tap(index) {
    this.flush();
    if (this.#state.points[index]) return this.choose(index);
    this.#state.accept([index]);
    this.#say(`${this.title(index)}, accepted.`);
    this.#afterwards();
  }

  miss() {
    const { names, points } = this.#state;
    if (!names.length) return announce("Name the points first.");
    announce(points.every(Boolean) ? "All points are placed. Drag one to correct it." : "Choose a point first, or drag one.");
  }

  /** @param {number} index */
  choose(index) {
    this.flush();
    if (index < 0 || index >= this.#state.names.length) return;
    this.#state.choose(index);
    const place = this.#state.placeOf(index);
    if (place) this.#viewer.reveal(this.#viewer.toPixels(place));
    this.#viewer.cursor = null;
    announce(`${this.title(index)}: ${this.tellPoint(index)}.`);
  }

  /** @param {1|-1} step */
  step(step) {
    const { active, names } = this.#state;
    const from = active ?? (step > 0 ? -1 : 0);
    if (names.length) this.choose((from + step + names.length) % names.length);
  }

  /** Arrow keys: a placed or suggested point moves, otherwise the cursor does. In pixels of the original. */
  nudge(dx, dy) {
    const viewer = this.#viewer;
    if (!viewer.picture) return;
    const index = this.#state.active;
    const place = viewer.held ?? (viewer.cursor ? null : viewer.placeOfActive());
    if (place) {
      const moved = viewer.clamp({ x: place.x + dx, y: place.y + dy });
      viewer.held = this.#nudged = { index, ...moved };
      clearTimeout(this.#timer);
      this.#timer = setTimeout(() => this.flush(), PAUSE);
      this.#follow(moved);
      return;
    }
    const { width, height } = viewer.image;
    const from = viewer.cursor ?? this.#middle();
    viewer.cursor = viewer.cursor ? viewer.clamp({ x: from.x + dx, y: from.y + dy }) : from;
    this.#follow(viewer.cursor);
    announce(`Cursor ${Math.round(viewer.cursor.x)}, ${Math.round(viewer.cursor.y)} of ${width}, ${height}.`);
  }

  /** Moves by keys become one action when the keys rest. */
  flush() {
    clearTimeout(this.#timer);
    const moved = this.#nudged;
    if (!moved) return;
    this.#nudged = this.#viewer.held = null;
    this.#viewer.hideLoupe();
    const { x, y } = this.#viewer.toFractions(moved);
    this.#state.move(moved.index, x, y);
    announce(`${this.title(moved.index)}, moved to ${moved.x.toFixed(1)}, ${moved.y.toFixed(1)}.`);
  }

  /** Space: place the point at the cursor, or take the chosen suggestion. */
  confirm() {
    this.flush();
    const { active, points, suggestions } = this.#state;
    const cursor = this.#viewer.cursor;
    if (active !== null && !points[active] && suggestions[active] && !cursor) return this.tap(active);
    const index = this.target();
    if (index === null) return this.miss();
    if (!cursor) return this.nudge(0, 0); // the cursor appears; the next press places
    this.put(index, cursor);
  }

  /** Enter: place at the cursor if it is out, else accept all, else go on. */
  enter() {
    this.flush();
    if (this.#viewer.cursor && this.target() !== null) this.put(this.target(), this.#viewer.cursor);
    else if (this.#state.waiting.length) this.acceptAll();
    else if (this.#state.points.length && this.#state.points.every(Boolean)) this.next();
    else this.confirm();
  }

  acceptAll() {
    this.flush();
    const waiting = this.#state.waiting;
    if (!waiting.length) return announce("There is no suggestion to accept.");
    this.#state.accept(waiting);
    this.#viewer.cursor = null;
    this.#say(`${count(waiting.length, "suggestion")} accepted.`);
    this.#afterwards();
  }

  /** The chosen point cannot be seen in this image. */
  absent() {
    this.#markActive("absent", "cannot be seen");
  }

  clear() {
    this.#markActive("clear", "cleared");
  }

  #markActive(kind, word) {
    this.flush();
    const index = this.#state.active;
    if (index === null) return announce("Choose a point first.");
    if (kind === "clear" && !this.#state.points[index]) return announce(`${this.title(index)} is not placed.`);
    this.#state.mark(kind, index);
    this.#viewer.cursor = null;
    this.#say(`${this.title(index)}: ${word}.`);
    if (kind === "absent") this.#afterwards();
  }

  undo() {
    this.flush();
    this.#state.undo();
  }

  keep() {
    this.#state.keep();
    announce("Kept: the label is right.");
  }

  async next() {
    this.flush();
    const id = await this.#state.next();
    if (id === null) announce("All images are labelled.");
    else this.#state.open(id);
    return id;
  }

  /** @param {1|-1} step in the order of the folder */
  turn(step) {
    this.flush();
    const ids = [...this.#state.images.keys()];
    const at = ids.indexOf(this.#state.current) + step;
    if (at < 0 || at >= ids.length) return announce(at < 0 ? "This is the first image." : "This is the last image.");
    this.#state.open(ids[at]);
  }

  open(id) {
    this.flush();
    this.#state.open(id);
  }

  /** The state of a point in words. @param {number} index */
  tellPoint(index) {
    const point = this.#state.points[index];
    if (isPlaced(point)) return "placed";
    if (isAbsent(point)) return "cannot be seen";
    return this.#state.suggestions[index] ? "suggested" : "open";
  }

  #tellAction(action) {
    const points = (action.points ?? []).map((point) => point.point ?? point);
    const what = { place: "placed", absent: "cannot be seen", clear: "cleared", keep: "looks right", names: "names" }[action.kind];
    if (points.length === 1) return `${this.title(points[0])}, ${what}`;
    return points.length ? `${count(points.length, "point")}, ${what}` : what;
  }

  #middle() {
    const { width, height } = this.#viewer.screen;
    return this.#viewer.locate(width / 2, height / 2);
  }

  #follow(place) {
    this.#viewer.reveal(place);
    this.#viewer.magnify(place);
    this.#viewer.redraw();
  }

  /** What was done, and what is next. */
  #say(text) {
    const { active, points } = this.#state;
    if (points.every(Boolean)) announce(`${text} This image is done. Enter: next image.`);
    else announce(active === null ? text : `${text} Next: ${this.title(active)}.`);
  }

  #afterwards() {
    if (!this.#viewer.cursor) this.#viewer.hideLoupe();
    if (this.#state.points.every(Boolean)) {
      this.#viewer.cursor = null;
      this.#viewer.hideLoupe();
      if (this.goOn) this.next();
    }
  }
}
