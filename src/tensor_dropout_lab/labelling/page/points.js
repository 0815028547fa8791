/** The names of the points with their states; the open image in words; what to do next. */

import { byId, count, make, setText } from "./dom.js";
import { dress, stateIcon } from "./icons.js";

const WORDS = { placed: "confirmed", suggested: "suggested", "cannot be seen": "absent", open: "open" };

export class Points {
  #state;
  #commands;
  #list = byId("points");

  /**
   * @param {import("./state.js").State} state
   * @param {import("./commands.js").Commands} commands
   */
  constructor(state, commands) {
    this.#state = state;
    this.#commands = commands;
    for (const name of ["project", "open", "points", "images"]) state.addEventListener(name, () => this.#later());
  }

  #later() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.#show());
  }

  #show() {
    this.#showList();
    this.#showPrompt();
    this.#showButtons();
    this.#showImage();
  }

  #showList() {
    const { names, active, checks } = this.#state;
    while (this.#list.children.length > names.length) this.#list.lastChild.remove();
    names.forEach((name, index) => {
      const row = this.#list.children[index] ?? this.#list.appendChild(this.#makeRow(index));
      const word = this.#commands.tellPoint(index);
      const button = row.firstChild;
      const check = checks.includes(index);
      row.className = `point is-${WORDS[word]}${check ? " check" : ""}`;
      button.setAttribute("aria-pressed", String(index === active));
      if (index === active && row.dataset.active !== "yes") reveal(row);
      row.dataset.active = index === active ? "yes" : "";
      setText(button.querySelector(".point-name"), name);
      if (row.dataset.word === word && row.dataset.check === String(check)) return;
      Object.assign(row.dataset, { word, check });
      button.querySelector(".point-state").replaceChildren(stateIcon(check ? "check" : WORDS[word]), make("span", { text: check ? "to check" : word }));
    });
  }

  #makeRow(index) {
    const number = make("span", { class: "point-number", text: index + 1 });
    const name = make("span", { class: "point-name" });
    const choose = () => this.#commands.choose(index);
    const button = make("button", { type: "button", onclick: choose }, number, name, make("span", { class: "point-state" }));
    return make("li", { class: "point" }, button);
  }

  #showPrompt() {
    const { names, active, points, waiting, summary, chosen } = this.#state;
    const prompt = byId("prompt");
    const done = points.length > 0 && points.every(Boolean);
    if (summary?.problem) setText(prompt, "Go on with another image.");
    else if (!names.length) setText(prompt, "Name the points first.");
    else if (summary?.check && !(chosen && active !== null)) setText(prompt, this.#tellChecks());
    else if (active !== null) this.#promptFor(prompt, active);
    else if (done) setText(prompt, this.#tellDone());
    else setText(prompt, "Drag what is wrong, then accept.");
    byId("accept").classList.toggle("primary", waiting.length > 0);
    byId("next").classList.toggle("primary", done);
  }

  /** Which points are far from where they are expected. */
  #tellChecks() {
    const { checks, names } = this.#state;
    const named = checks.slice(0, 3).map((index) => `${index + 1} ${names[index] === String(index + 1) ? "" : names[index]}`.trim());
    const more = checks.length > 3 ? ` and ${checks.length - 3} more` : "";
    if (!checks.length) return "To check: a label here is far from what the other images say.";
    return `To check: ${named.join(", ")}${more}. Drag what is wrong, or say that it looks right.`;
  }

  #tellDone() {
    const { open, images, checks } = this.#state.remaining;
    if (open) return "This image is done.";
    return `All ${count(images, "image")} are labelled${checks ? `, ${checks} to check` : ""}.`;
  }

  #promptFor(prompt, active) {
    const word = this.#commands.tellPoint(active);
    const verbs = { open: "Place", suggested: "Check", placed: "Chosen:", "cannot be seen": "Cannot be seen:" };
    const name = this.#state.names[active];
    const label = name === String(active + 1) ? "" : name;
    const parts = [make("span", { text: `${verbs[word]} ` }), make("span", { class: "badge", text: active + 1 }), make("strong", { text: ` ${label}` })];
    if (prompt.textContent !== `${verbs[word]} ${active + 1} ${label}`) prompt.replaceChildren(...parts);
  }

  #showButtons() {
    const { active, points, waiting, summary, names } = this.#state;
    const ready = Boolean(summary) && !summary.problem && names.length > 0;
    const accept = byId("accept");
    dress(accept, "accept", waiting.length ? `Accept ${waiting.length === 1 ? "1" : `all ${waiting.length}`}` : "Accept all", { key: "Enter", text: true });
    this.#enable(accept, ready && waiting.length > 0);
    this.#enable(byId("absent"), ready && active !== null);
    this.#enable(byId("clear"), ready && active !== null && Boolean(points[active]));
    show(byId("keep"), Boolean(summary?.check));
    show(byId("newer"), this.#state.hasNewer);
  }

  /** Not "disabled": the focus would be lost, and the reason could not be said. */
  #enable(button, yes) {
    button.setAttribute("aria-disabled", String(!yes));
  }

  #showImage() {
    const { summary, points, names, images } = this.#state;
    if (!summary) return;
    const done = points.filter(Boolean).length;
    const place = [...images.keys()].indexOf(summary.id) + 1;
    setText(byId("image-name"), summary.name);
    const size = summary.problem ? "" : ` · ${summary.width} × ${summary.height} pixels`;
    setText(byId("image-facts"), `Image ${place} of ${images.size}${size}${summary.group ? ` · ${summary.group}` : ""}`);
    document.title = `${summary.name} · Label`;
    byId("stage").setAttribute("aria-label", `Image ${summary.name}, ${summary.width} by ${summary.height} pixels, ${done} of ${count(names.length, "point")} done`);
  }
}

/** A button that goes leaves the focus to the image. */
function show(button, yes) {
  if (!yes && document.activeElement === button) byId("stage").focus({ preventScroll: true });
  button.hidden = !yes;
}

/** Scroll the panel, and nothing else, so that a row is in sight. @param {HTMLElement} row */
function reveal(row) {
  const panel = byId("panel");
  const [inner, outer] = [row.getBoundingClientRect(), panel.getBoundingClientRect()];
  if (inner.top < outer.top) panel.scrollTop -= outer.top - inner.top + 8;
  else if (inner.bottom > outer.bottom) panel.scrollTop += inner.bottom - outer.bottom + 8;
}
