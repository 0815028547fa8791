/** Windows over the page: names of the points, help; and the hint of the first visit. */

import { byId, make } from "./dom.js";
import { dress, icon, stateIcon } from "./icons.js";
import { HELP } from "./keys.js";

/** A window with a title, closed by Esc, its button or a click beside it. */
function openDialog(title, ...content) {
  const close = make("button", { type: "button", class: "icon-button" });
  dress(close, "close", "Close");
  const head = make("div", { class: "dialog-head" }, make("h2", { id: "dialog-title", text: title }), close);
  const dialog = make("dialog", { "aria-labelledby": "dialog-title" }, head, ...content);
  close.addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

export function showHelp() {
  const lines = HELP.map(({ keys, does }) => make("tr", {}, make("th", { scope: "row" }, make("kbd", { text: keys })), make("td", { text: does })));
  const table = make("table", { class: "keys" }, make("caption", { class: "for-readers", text: "Keys" }), make("tbody", {}, ...lines));
  const box = make("input", { type: "checkbox", checked: localStorage.getItem("keys") !== "off" });
  box.addEventListener("change", () => localStorage.setItem("keys", box.checked ? "on" : "off"));
  const toggle = make("label", { class: "check" }, box, make("span", { text: "Single letters and digits are keys" }));
  openDialog("Keys, mouse and fingers", make("ul", { class: "legend" }, ...legend()), ...mouse(), table, toggle);
}

function legend() {
  const lines = [["confirmed", "confirmed: a person has said so"], ["suggested", "suggested; the ellipse holds the point in about 90 % of cases, once enough images are labelled"], ["absent", "cannot be seen in this image"]];
  return lines.map(([state, word]) => make("li", {}, stateIcon(state), make("span", { text: word })));
}

function mouse() {
  return [
    "Mouse: click places the next point or accepts a suggestion, drag moves a point. Wheel zooms; drag with the space bar or the middle button shifts; a double click shows the whole image.",
    "Fingers: tap places, a finger that rests aims with the magnifier, two fingers zoom and shift.",
  ].map((text) => make("p", { text }));
}

/**
 * Names of the points: change them, add new ones at the end.
 * @param {import("./state.js").State} state
 * @param {() => void} [closed] called when the window is gone
 */
export function editNames(state, closed = () => {}) {
  const list = make("ol", { class: "name-list" });
  const add = (name = "") => {
    list.append(makeName(list, name, add));
    return list.lastChild.querySelector("input");
  };
  for (const name of state.names) add(name);
  if (!state.names.length) add();
  const refresh = () => findFault(list);
  const more = make("button", { type: "button", text: "Add a point", onclick: () => add().focus() });
  const save = make("button", { type: "submit", class: "primary", text: "Save names" });
  const note = make("p", { class: "muted small", text: "Points are placed in this order. Enter: next field; Ctrl Enter: save. A list pasted into a field fills the fields below it." });
  const form = make("form", { class: "names", novalidate: true }, note, list, make("div", { class: "form-buttons" }, more, save));
  const dialog = openDialog("Names of the points", form);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const names = readNames(list, state.names.length);
    if (!names) return;
    dialog.close();
    if (names.join("\n") !== state.names.join("\n")) state.rename(names);
  });
  form.addEventListener("input", refresh);
  form.addEventListener("keydown", (event) => pressEnter(event, list, form, add));
  dialog.addEventListener("close", () => {
    byId("stage").focus({ preventScroll: true });
    closed();
  });
  list.querySelector("input").focus();
}

/** Enter goes on to the next field, and never saves by itself: whoever types a list does not look at the page. */
function pressEnter(event, list, form, add) {
  if (event.key !== "Enter" || event.isComposing || !(event.target instanceof HTMLInputElement)) return;
  event.preventDefault();
  if (event.ctrlKey || event.metaKey) return form.requestSubmit();
  const fields = [...list.querySelectorAll("input")];
  const next = fields[fields.indexOf(event.target) + 1];
  if (next) next.select();
  (next ?? (event.target.value.trim() ? add() : event.target)).focus();
}

function makeName(list, name, add) {
  const number = list.children.length + 1;
  const input = make("input", { type: "text", value: name, maxlength: 80, "aria-label": `Name of point ${number}`, autocomplete: "off", spellcheck: "false" });
  input.addEventListener("paste", (event) => {
    const lines = event.clipboardData.getData("text").split(/\r?\n/).map((line) => line.trim()).filter(Boolean);
    if (lines.length < 2) return;
    event.preventDefault();
    const fields = [...list.querySelectorAll("input")].slice(number - 1);
    lines.forEach((line, index) => ((fields[index] ?? add()).value = line));
    findFault(list);
  });
  return make("li", {}, input);
}

/** The names, or null when one is missing or there twice; empty fields at the end are left out. */
function readNames(list, known) {
  const inputs = [...list.querySelectorAll("input")];
  const names = inputs.map((input) => input.value.trim());
  while (names.length > Math.max(known, 1) && !names.at(-1)) names.pop();
  const wrong = findFault(list, names.length);
  if (!wrong) return names;
  wrong.reportValidity();
  return null;
}

/**
 * Say of each field anew what is wrong with it, and nothing where that is mended.
 * @param {HTMLElement} list
 * @param {number} [needed] so many of the first fields must be filled
 * @returns {HTMLInputElement|undefined} the first that is wrong
 */
function findFault(list, needed = 0) {
  const inputs = [...list.querySelectorAll("input")];
  const names = inputs.map((input) => input.value.trim());
  inputs.forEach((input, index) => {
    const again = names[index] && names.indexOf(names[index]) !== index;
    const fault = again ? "Another point has this name." : !names[index] && index < needed ? "A point needs a name." : "";
    input.setCustomValidity(fault);
    input.setAttribute("aria-invalid", String(Boolean(fault)));
  });
  return inputs.find((input) => !input.validity.valid);
}

/** Three lines for the first visit, as long as there is something to label. @param {import("./state.js").State} state */
export function showHint(state) {
  const hint = byId("hint");
  if (localStorage.getItem("hint") === "seen" || !state.names.length || !state.remaining.open) return;
  const close = make("button", { type: "button", class: "primary", text: "Start" });
  const steps = ["Click where the point is whose name stands below; then the next.", "After 5 images it suggests the points. Drag what is wrong, press Enter to accept the rest.", "Everything is stored at once. Press ? for all keys."];
  const list = make("ol", {}, ...steps.map((text) => make("li", { text })));
  hint.replaceChildren(icon("accept"), make("h2", { id: "hint-title", text: "How it goes" }), list, close);
  hint.hidden = false;
  close.addEventListener("click", () => {
    hint.hidden = true;
    localStorage.setItem("hint", "seen");
    byId("stage").focus();
  });
}
