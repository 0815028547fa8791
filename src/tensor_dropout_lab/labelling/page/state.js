/** What the page knows: the project, the open image, its points as this person sees them. */

import { apply, isPlaced, stateOf } from "./actions.js";
import { Refused } from "./api.js";
import { freeze, hasNewer, thaw } from "./frozen.js";

/** @typedef {import("./api.js").Detail} Detail */
/** @typedef {import("./api.js").Summary} Summary */
/** @typedef {import("./actions.js").Action} Action */

/**
 * Events: "project" (names, images), "images" (states of some), "open" (another image), "points" (points, suggestions or
 * the chosen point), "newer" (other suggestions than those shown are there), "statistics", "progress", "trouble" {message}.
 */
export class State extends EventTarget {
  /** @type {string[]} */
  names = [];
  /** @type {Map<number, Summary>} */
  images = new Map();
  folder = "";
  out = "";
  progress = { features: { done: 0, total: 0 }, fit: { state: "idle", message: null } };
  statistics = null;
  /** @type {number|null} the open image */
  current = null;
  /** @type {number|null} the point that a click places and that keys move */
  active = null;
  /** Was it chosen by the person, not only the next in turn? */
  chosen = false;
  order = "gain";
  /** Are the suggestions put away? Then they cannot be accepted, and what is placed is placed by hand. */
  blind = false;
  #api;
  #outbox;
  #clock;
  /** @type {Map<number, Detail>} */
  #details = new Map();
  #stored = 0; // counts what the server has taken, to notice answers that are older

  /**
   * @param {import("./api.js").Api} api
   * @param {import("./clock.js").Clock} clock
   */
  constructor(api, clock) {
    super();
    this.#api = api;
    this.#clock = clock;
  }

  /** @param {import("./outbox.js").Outbox} outbox */
  connect(outbox) {
    this.#outbox = outbox;
    outbox.addEventListener("sent", ({ detail }) => this.#sent(detail));
    outbox.addEventListener("refused", ({ detail }) => this.#refused(detail));
  }

  /** Ask for everything anew: at the start, and when the server is back. */
  async load() {
    const project = await this.#api.project();
    if (this.out && project.out !== this.out) throw new Refused(403, "this server is for another folder");
    this.folder = project.folder;
    this.out = project.out;
    this.names = project.names;
    this.images = new Map(project.images.map((image) => [image.id, image]));
    this.progress = { ...this.progress, ...project.progress };
    this.#tell("project");
    this.#tell("progress");
    if (project.progress?.problem) this.#trouble(project.progress.problem);
    this.refreshStatistics();
  }

  get summary() {
    return this.images.get(this.current);
  }

  get detail() {
    return this.#details.get(this.current);
  }

  /** Points of the open image: what the server has, and what is on its way there. */
  get points() {
    return this.pointsOf(this.current);
  }

  /** @param {number|null} id */
  pointsOf(id) {
    const known = this.#details.get(id)?.points ?? [];
    let points = this.names.map((_, index) => known[index] ?? null);
    for (const action of this.#outbox?.waitingFor(id) ?? []) points = apply(points, action);
    return points;
  }

  /** Suggestions as they are shown: none to a person who has put them away. @returns {import("./api.js").Suggestion[]} */
  get suggestions() {
    const suggested = this.blind ? [] : this.detail?.suggestions ?? [];
    return this.names.map((_, index) => suggested[index] ?? null);
  }

  /** Are there newer suggestions for open points than those that are shown? */
  get hasNewer() {
    return !this.blind && hasNewer(this.detail, this.points);
  }

  /** Show them. */
  takeNewer() {
    if (!this.hasNewer) return;
    this.#details.set(this.current, thaw(this.detail));
    this.#tell("points");
  }

  /** Placed points that are far from where the other images say, as far as the server names them. */
  get checks() {
    const { points, detail, summary } = this;
    return summary?.check ? (detail?.checks ?? []).filter((index) => isPlaced(points[index])) : [];
  }

  /** Where the last fit, which has seen the label, has a placed point. @param {number} index */
  expectedAt(index) {
    return (this.detail?.latest ?? this.detail?.suggestions)?.[index] ?? null;
  }

  /** What is left to do; unreadable images do not count. */
  get remaining() {
    const images = [...this.images.values()].filter((image) => image.state !== "unreadable");
    const open = images.filter((image) => image.state !== "labelled").length;
    return { images: images.length, open, checks: images.filter((image) => image.check).length };
  }

  /** Where a point is shown: placed, suggested, or nowhere. */
  placeOf(index) {
    const point = this.points[index];
    return isPlaced(point) ? point : point ? null : this.suggestions[index];
  }

  /** Points that are open and have a suggestion. */
  get waiting() {
    const points = this.points;
    return this.suggestions.flatMap((suggestion, index) => (suggestion && !points[index] ? [index] : []));
  }

  /** @param {number} id */
  async open(id) {
    if (!this.images.has(id)) return;
    for (const known of [this.current, id]) if (this.#details.has(known)) this.#details.set(known, thaw(this.#details.get(known)));
    this.current = id;
    this.active = null;
    this.chosen = false;
    this.#tell("open");
    this.#chooseNext();
    if (!this.images.get(id).problem) await this.refresh(id);
  }

  /** Ask for the points and suggestions of an image; older answers never hide what was stored meanwhile. */
  async refresh(id = this.current) {
    if (id === null) return;
    const first = !this.#details.has(id);
    const before = this.#stored;
    const detail = await this.#quietly(this.#api.image(id));
    if (!detail) return;
    if (before !== this.#stored) return this.refresh(id);
    if (id !== this.current) {
      this.#details.set(id, detail);
      return;
    }
    const had = this.suggestions;
    const hadNewer = this.hasNewer;
    this.#details.set(id, freeze(detail, this.detail?.suggestions ?? []));
    if (this.hasNewer && !hadNewer) this.#tell("newer");
    if (first || (!this.chosen && this.active === null)) this.#chooseNext();
    else this.#keepChoice(had);
    this.#tell("points");
  }

  /** Suggestions have come while a person places points: the next click still places the point that was announced. */
  #keepChoice(had) {
    const { active, points, suggestions } = this;
    if (active === null || points[active] || had[active] || !suggestions[active]) return;
    if (points.some(Boolean)) this.chosen = true;
    else this.#chooseNext();
  }

  /** Have the next image's points at hand. @param {number} id */
  async prefetch(id) {
    if (!this.#details.has(id) && this.images.has(id) && !this.images.get(id).problem) await this.refresh(id);
  }

  async refreshStatistics() {
    const statistics = await this.#quietly(this.#api.statistics());
    if (statistics) this.statistics = statistics;
    this.#tell("statistics");
  }

  /** @param {boolean} yes */
  setBlind(yes) {
    this.blind = yes;
    if (!this.chosen) this.#chooseNext();
    this.#tell("points");
  }

  /** Back to the next open point in turn. */
  chooseInTurn() {
    this.#chooseNext();
  }

  /** @param {number|null} index */
  choose(index) {
    this.active = index;
    this.chosen = index !== null;
    this.#tell("points");
  }

  /**
   * Place points of the open image.
   * @param {{point: number, x: number, y: number, by: string}[]} points
   */
  place(points) {
    this.#act({ kind: "place", points });
    if (points.some(({ point }) => point === this.active)) this.#chooseNext(this.active);
    this.#tell("points");
  }

  /** Move a point that stays the chosen one. */
  move(index, x, y) {
    const by = this.#howPlaced(index);
    this.active = index;
    this.chosen = true;
    this.#act({ kind: "place", points: [{ point: index, x, y, by }] });
    this.#tell("points");
  }

  /** A point put at a place by hand or by moving its suggestion. */
  put(index, x, y) {
    this.place([{ point: index, x, y, by: this.#howPlaced(index) }]);
  }

  /** Take suggestions as they are. @param {number[]} indices */
  accept(indices) {
    const points = indices.map((point) => ({ point, x: this.suggestions[point].x, y: this.suggestions[point].y, by: "accepted" }));
    if (points.length) this.place(points);
  }

  /** @param {"absent"|"clear"} kind @param {number} index */
  mark(kind, index) {
    this.#act({ kind, points: [index] });
    if (kind === "absent") this.#chooseNext(index);
    else this.choose(index);
    this.#tell("points");
  }

  keep() {
    this.#act({ kind: "keep" });
  }

  /** Take back this person's last action; true if that could be done without the server. */
  undo() {
    const action = this.#outbox.takeBack();
    if (!action) {
      this.#outbox.add({ type: "undo" });
      return;
    }
    this.#undone(action.image, action);
    this.#guess(action.image);
  }

  /** @param {string[]} names */
  rename(names) {
    this.names = names;
    this.#outbox.add({ type: "names", names });
    this.#tell("project");
    this.#chooseNext(this.active ?? undefined);
    this.#tell("points");
  }

  /** The next image to work on, or null when all are done. */
  async next() {
    await this.#outbox.settled(1500);
    const answer = await this.#quietly(this.#api.next(this.current ?? 0, this.order));
    if (answer && answer.id !== this.current) return answer.id;
    return this.#nextHere();
  }

  /** A message of the server's. @param {any} event */
  hear(event, client) {
    if (event.type === "labels") {
      this.#update(event.images ?? []);
      if (event.client !== client) this.#forget(event.images ?? []);
      this.#later();
    } else if (event.type === "suggestions") {
      this.#update(event.images ?? []);
      this.#forget([...this.images.values()]);
      this.refreshStatistics();
    } else if (event.type === "progress") {
      this.progress = { ...this.progress, [event.what]: { done: event.done, total: event.total } };
      this.#tell("progress");
    } else if (event.type === "fit") {
      this.progress = { ...this.progress, fit: { state: event.state, message: event.message ?? null } };
      this.#tell("progress");
    } else if (event.type === "problem") {
      this.#trouble(event.message);
    } else if (event.type === "names" && event.client !== client) {
      this.names = event.names ?? this.names;
      this.#tell("project");
      this.#tell("points");
    }
  }

  #howPlaced(index) {
    const before = this.points[index];
    if (isPlaced(before)) return before.by === "hand" ? "hand" : "moved";
    return this.suggestions[index] ? "moved" : "hand";
  }

  #act(action) {
    if (this.current === null) return;
    const seconds = this.#clock.take();
    const touched = (action.points ?? []).map((point) => point.point ?? point);
    if (this.detail?.checks) this.detail.checks = this.detail.checks.filter((index) => !touched.includes(index));
    this.#outbox.add({ type: "action", action: { ...action, image: this.current, seconds } });
    this.#guess(this.current, action.kind === "keep");
  }

  /** The list shows at once what the server will say. */
  #guess(id, kept = false) {
    const summary = this.images.get(id);
    const points = this.pointsOf(id);
    const predicted = Boolean(this.#details.get(id)?.suggestions.some(Boolean));
    const state = stateOf(points, predicted, summary.state === "doubtful");
    this.#update([{ ...summary, state, check: summary.check && !kept, confirmed: points.filter(isPlaced).length }]);
  }

  /** @param {Summary[]} images */
  #update(images) {
    for (const image of images) this.images.set(image.id, { ...this.images.get(image.id), ...image });
    if (images.length) this.#tell("images");
  }

  /** What is known of these images is old: ask again for the open one, for others when they are opened. */
  #forget(images) {
    for (const { id } of images) if (id !== this.current) this.#details.delete(id);
    if (images.some(({ id }) => id === this.current)) this.refresh();
  }

  #sent({ items, answer }) {
    this.#stored += 1;
    for (const item of items) {
      const detail = item.type === "action" && this.#details.get(item.action.image);
      if (!detail) continue;
      detail.points = apply(this.names.map((_, index) => detail.points[index] ?? null), item.action);
    }
    const waiting = new Set(this.#outbox.items.flatMap((item) => (item.type === "action" ? [item.action.image] : [])));
    this.#update((answer.images ?? []).filter((image) => !waiting.has(image.id)));
    if (items[0].type === "undo") this.#undone(answer.undone ? answer.image : null, answer.undone);
    this.#later();
  }

  #undone(image, action) {
    this.dispatchEvent(new CustomEvent("undone", { detail: { image, action } }));
    if (image === null || image === undefined) return;
    this.#forget([{ id: image }]);
    const point = action.points?.length === 1 ? (action.points[0].point ?? action.points[0]) : null;
    if (image === this.current) {
      this.active = point;
      this.chosen = point !== null;
      if (point === null) this.#chooseNext();
      this.#tell("points");
    } else {
      this.open(image);
    }
  }

  #refused({ items, message }) {
    this.#trouble(`Not stored: ${message}`);
    const image = items[0].type === "action" ? items[0].action.image : this.current;
    this.#forget([{ id: image }]);
    if (items[0].type === "names") this.#quietly(this.load());
  }

  /** Counts change with every action; a burst asks once. */
  #later() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.refreshStatistics(), 300);
  }

  /** The next open point without a suggestion, from here on and round. */
  #chooseNext(after = -1) {
    const points = this.points;
    const suggestions = this.suggestions;
    const turn = points.map((_, step) => (after + 1 + step) % points.length);
    this.active = turn.find((index) => !points[index] && !suggestions[index]) ?? null;
    this.chosen = false;
    this.#tell("points");
  }

  #nextHere() {
    const ids = [...this.images.keys()];
    const start = ids.indexOf(this.current);
    const turn = ids.map((_, step) => ids[(start + 1 + step) % ids.length]);
    return turn.find((id) => id !== this.current && !["labelled", "unreadable"].includes(this.images.get(id).state)) ?? null;
  }

  async #quietly(promise) {
    try {
      return await promise;
    } catch (error) {
      this.dispatchEvent(new CustomEvent("trouble", { detail: { error } }));
      return null;
    }
  }

  #trouble(message) {
    this.dispatchEvent(new CustomEvent("trouble", { detail: { message } }));
  }

  #tell(name) {
    this.dispatchEvent(new Event(name));
  }
}
