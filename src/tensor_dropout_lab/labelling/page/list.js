/** The list of images. Only the rows in sight exist, so that thousands of images stay quick. */

import { byId, count, make, setText } from "./dom.js";
import { stateIcon } from "./icons.js";

const ROW = 60;
const SPARE = 4;

/** What the states are called, in the order of the filter. */
export const STATES = {
  labelled: "labelled",
  started: "started",
  predicted: "predicted",
  doubtful: "doubtful",
  check: "to check",
  open: "open",
  unreadable: "unreadable",
};

/** The state that a row shows: a flag goes before all others. @param {import("./api.js").Summary} image */
export function stateOfRow(image) {
  return image.check ? "check" : image.state;
}

export class List {
  #state;
  #thumbnail;
  #open;
  #box = byId("list");
  #spacer = make("div", { class: "list-spacer", role: "presentation" });
  #filter = byId("filter");
  #find = byId("find");
  /** @type {number[]} ids that the filter lets through */
  #ids = [];
  #marked = 0; // place in #ids of the row that the keys are on
  /** @type {Map<number, HTMLElement>} */
  #rows = new Map();

  /**
   * @param {import("./state.js").State} state
   * @param {(id: number) => string} thumbnail
   * @param {(id: number) => void} open
   */
  constructor(state, thumbnail, open) {
    this.#state = state;
    this.#thumbnail = thumbnail;
    this.#open = open;
    this.#box.append(this.#spacer);
    this.#box.addEventListener("scroll", () => this.#render(), { passive: true });
    this.#box.addEventListener("keydown", (event) => this.#key(event));
    this.#box.addEventListener("click", (event) => this.#click(event));
    this.#filter.addEventListener("change", () => this.#sift());
    this.#find.addEventListener("input", () => this.#sift());
    new ResizeObserver(() => this.#render()).observe(this.#box);
    state.addEventListener("project", () => this.#refresh());
    state.addEventListener("images", () => this.#later());
    state.addEventListener("open", () => this.#follow());
  }

  /** Ids of the images that the filter lets through, in their order. */
  get ids() {
    return this.#ids;
  }

  /** Changes come in bursts: drawn once a frame. */
  #later() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#refresh());
  }

  #refresh() {
    this.#count();
    this.#sift();
  }

  #count() {
    const tally = Object.fromEntries(Object.keys(STATES).map((name) => [name, 0]));
    let labelled = 0;
    for (const image of this.#state.images.values()) {
      tally[stateOfRow(image)] += 1;
      if (image.state === "labelled") labelled += 1;
    }
    const total = this.#state.images.size;
    setText(byId("tally"), `${labelled.toLocaleString("en")} of ${count(total, "image")} labelled`);
    byId("tally-bar").value = total ? labelled / total : 0;
    this.#fillFilter(tally, total);
  }

  #fillFilter(tally, total) {
    const chosen = this.#filter.value || "all";
    const lines = [["all", `all (${total})`], ["todo", `not labelled (${total - tally.labelled - tally.check - tally.unreadable})`]];
    for (const [name, word] of Object.entries(STATES)) if (tally[name]) lines.push([name, `${word} (${tally[name]})`]);
    if (!lines.some(([value]) => value === chosen)) lines.push([chosen, `${STATES[chosen]} (0)`]);
    const same = lines.map(([, text]) => text).join() === [...this.#filter.options].map((option) => option.text).join();
    if (same) return;
    this.#filter.replaceChildren(...lines.map(([value, text]) => make("option", { value, text })));
    this.#filter.value = chosen;
  }

  #sift() {
    const wanted = this.#filter.value || "all";
    const part = this.#find.value.trim().toLowerCase();
    const fits = (image) => {
      const state = stateOfRow(image);
      const open = !["labelled", "check", "unreadable"].includes(state);
      return (wanted === "all" || wanted === state || (wanted === "todo" && open)) && image.name.toLowerCase().includes(part);
    };
    this.#ids = [...this.#state.images.values()].filter(fits).map((image) => image.id);
    this.#marked = Math.max(this.#ids.indexOf(this.#state.current), 0);
    this.#spacer.style.height = `${this.#ids.length * ROW}px`;
    byId("list-empty").hidden = this.#ids.length > 0;
    this.#render();
  }

  #render() {
    const first = Math.max(Math.floor(this.#box.scrollTop / ROW) - SPARE, 0);
    const last = Math.min(Math.ceil((this.#box.scrollTop + this.#box.clientHeight) / ROW) + SPARE, this.#ids.length);
    const shown = new Set();
    for (let place = first; place < last; place += 1) {
      const id = this.#ids[place];
      shown.add(id);
      this.#renderRow(id, place);
    }
    for (const [id, row] of this.#rows) {
      if (shown.has(id)) continue;
      row.remove();
      this.#rows.delete(id);
    }
    const marked = this.#ids[this.#marked];
    if (shown.has(marked)) this.#box.setAttribute("aria-activedescendant", `row-${marked}`);
    else this.#box.removeAttribute("aria-activedescendant");
  }

  #renderRow(id, place) {
    const row = this.#rows.get(id) ?? this.#makeRow(id);
    const image = this.#state.images.get(id);
    const state = stateOfRow(image);
    row.style.transform = `translateY(${place * ROW}px)`;
    row.setAttribute("aria-posinset", String(place + 1));
    row.setAttribute("aria-setsize", String(this.#ids.length));
    row.setAttribute("aria-selected", String(id === this.#state.current));
    row.classList.toggle("marked", place === this.#marked);
    const facts = this.#tell(image, state);
    if (row.dataset.facts === `${state} ${facts}`) return;
    row.dataset.facts = `${state} ${facts}`;
    row.querySelector(".row-state").replaceChildren(stateIcon(state), make("span", { text: facts }));
  }

  #tell(image, state) {
    const points = this.#state.names.length;
    return state === "started" && points ? `${STATES[state]}, ${image.confirmed} of ${points}` : STATES[state] ?? state;
  }

  #makeRow(id) {
    const image = this.#state.images.get(id);
    const picture = image.problem
      ? make("span", { class: "thumbnail none" }, stateIcon("unreadable"))
      : make("img", { class: "thumbnail", src: this.#thumbnail(id), alt: "", loading: "lazy", decoding: "async", width: 48, height: 48 });
    const text = make("span", { class: "row-text" });
    text.append(make("span", { class: "row-name", text: image.name, title: image.name }), make("span", { class: "row-state" }));
    const row = make("div", { class: "row", role: "option", id: `row-${id}` }, picture, text);
    row.dataset.id = String(id);
    this.#rows.set(id, row);
    this.#spacer.append(row);
    return row;
  }

  #click(event) {
    const row = event.target.closest(".row");
    if (row) this.#open(Number(row.dataset.id));
  }

  #key(event) {
    const page = Math.max(Math.floor(this.#box.clientHeight / ROW) - 1, 1);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (event.key in steps) this.#mark(this.#marked + steps[event.key]);
    else if (["Enter", " "].includes(event.key) && this.#ids.length) this.#open(this.#ids[this.#marked]);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  #mark(place) {
    this.#marked = Math.min(Math.max(place, 0), Math.max(this.#ids.length - 1, 0));
    this.#reveal();
    this.#render();
  }

  #follow() {
    const place = this.#ids.indexOf(this.#state.current);
    if (place >= 0) this.#mark(place);
    else this.#render();
  }

  #reveal() {
    const top = this.#marked * ROW;
    if (top < this.#box.scrollTop) this.#box.scrollTop = top;
    else if (top + ROW > this.#box.scrollTop + this.#box.clientHeight) this.#box.scrollTop = top + ROW - this.#box.clientHeight;
  }
}
