/** Everything a person can do, once: keys, buttons and gestures call these. */

import { isAbsent, isPlaced } from "./actions.js";
import { announce, notify } from "./announce.js";
import { byId, count } from "./dom.js";

const PAUSE = 400;

export class Commands {
  #state;
  #viewer;
  #nudged = null;
  #timer = 0;
  goOn = false;
  /** Ids of the images that the list shows, in its order; the page sets it. @type {() => number[]} */
  listed = () => [...this.#state.images.keys()];

  /**
   * @param {import("./state.js").State} state
   * @param {import("./canvas/viewer.js").Viewer} viewer
   */
  constructor(state, viewer) {
    this.#state = state;
    this.#viewer = viewer;
    state.addEventListener("undone", ({ detail }) => (detail.action ? announce(`Undone: ${this.#tellAction(detail.action)}.`) : notify("Nothing to undo.")));
    state.addEventListener("newer", () => announce("Newer suggestions: press R to see them. The ones shown stay until then."));
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
    const { names, points, active } = this.#state;
    if (!names.length) return notify("Name the points first.");
    if (points.every(Boolean)) return notify("All points are placed. Drag one to correct it.");
    const back = points.some((point, index) => !point && !this.#state.suggestions[index]) ? " Esc: back to the next open point." : "";
    notify(active === null ? "Choose a point first, or drag one." : `${this.title(active)} is ${this.tellPoint(active)}: drag it, or choose another.${back}`);
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
    if (!waiting.length) return notify("There is no suggestion to accept.");
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
    if (index === null) return notify("Choose a point first.");
    if (kind === "clear" && !this.#state.points[index]) return notify(`${this.title(index)} is not placed.`);
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
    if (!this.#state.summary?.check) return notify("This image is not one to check.");
    this.#state.keep();
    announce("Kept: the label is right.");
  }

  /** Hide the suggestions; then all points; then show all. */
  hide() {
    this.flush();
    const viewer = this.#viewer;
    const [blind, shown, text] = !this.#state.blind ? [true, true, "Suggestions are hidden."] : viewer.marksShown ? [true, false, "All points are hidden."] : [false, true, "Points and suggestions are shown."];
    viewer.marksShown = shown;
    viewer.hideLoupe();
    byId("hide-marks").setAttribute("aria-pressed", blind ? (shown ? "mixed" : "true") : "false");
    this.#state.setBlind(blind);
    viewer.redraw();
    notify(text);
  }

  /** Show the newer suggestions of the open image. */
  renew() {
    this.flush();
    if (!this.#state.hasNewer) return notify("There are no newer suggestions for this image.");
    this.#state.takeNewer();
    announce("Newer suggestions are shown.");
  }

  /** Esc: no point is chosen any more; the next open one is in turn. */
  letGo() {
    this.#viewer.cursor = null;
    this.#viewer.hideLoupe();
    this.#state.chooseInTurn();
    const { active } = this.#state;
    if (active !== null) announce(`Next: ${this.title(active)}.`);
  }

  async next() {
    this.flush();
    const id = await this.#state.next();
    if (id === null) this.#tellEnd();
    else this.#state.open(id);
    return id;
  }

  #tellEnd() {
    const { remaining, out } = this.#state;
    if (remaining.open) return notify("This is the only image that is left to label.");
    const checks = remaining.checks ? `, ${remaining.checks} to check: choose “to check” at “Show”` : "";
    notify(`All ${count(remaining.images, "image")} are labelled${checks}. The table is ${out}/points.csv; other formats are at “Take it with you”.`, true);
  }

  /** @param {1|-1} step in the list as it is shown, which need not hold the open image */
  turn(step) {
    this.flush();
    const order = new Map([...this.#state.images.keys()].map((id, place) => [id, place]));
    const here = order.get(this.#state.current) ?? -1;
    const ahead = this.listed().filter((id) => (order.get(id) - here) * step > 0);
    const end = this.listed().length < order.size ? "image of the list that is shown" : "image";
    if (!ahead.length) return notify(`This is the ${step < 0 ? "first" : "last"} ${end}.`);
    this.#state.open(step > 0 ? ahead[0] : ahead.at(-1));
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
