/** What is asked of the server by a button: files to take along, the head, a fit; and the order of the images. */

import { announce } from "./announce.js";
import { byId, make } from "./dom.js";

const FORMATS = { csv: "CSV table", tps: "TPS", coco: "COCO", deeplabcut: "DeepLabCut" };
const ORDERS = { gain: ["Where it learns most", "unsure images first"], folder: ["As in the folder", "one after the other"] };

/**
 * Buttons for files.
 * @param {import("./api.js").Api} api
 * @param {import("./state.js").State} state
 * @param {(text: string, kind?: string) => void} tell
 */
export function addOutput(api, state, tell) {
  const buttons = Object.entries(FORMATS).map(([format, word]) => make("button", { type: "button", text: word, onclick: () => save(api, format, tell) }));
  const head = make("button", { type: "button", class: "wide", text: "Save the fitted head", onclick: () => saveHead(api, tell) });
  const where = make("p", { class: "muted small" });
  state.addEventListener("project", () => (where.textContent = `Every point is already in ${state.out}/points.csv.`));
  const exports = make("div", { class: "exports", role: "group", "aria-label": "Export the points" }, ...buttons);
  byId("output").append(exports, head, where);
}

/** Ask for a fit at once. @param {import("./api.js").Api} api @param {(text: string) => void} tell */
export function addFit(api, tell) {
  byId("fit-now").addEventListener("click", async () => {
    try {
      await api.fit();
      announce("It learns now.");
    } catch (error) {
      tell(`It cannot learn now: ${error.message || "the server does not answer"}`);
    }
  });
}

async function save(api, format, tell) {
  try {
    const { blob, name } = await api.export(format);
    const link = make("a", { href: URL.createObjectURL(blob), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
    announce(`${name} saved.`);
  } catch (error) {
    tell(`Not exported: ${error.message || "the server does not answer"}`);
  }
}

async function saveHead(api, tell) {
  try {
    const { path } = await api.saveHead();
    tell(`The head is in ${path}. Use it with: tensor-dropout predict NEW --model ${path}`, "good");
  } catch (error) {
    tell(`Not saved: ${error.message || "the server does not answer"}`);
  }
}

/** Which image comes next. @param {import("./state.js").State} state */
export function addOrder(state) {
  state.order = localStorage.getItem("order") === "folder" ? "folder" : "gain";
  const choose = (order) => {
    state.order = order;
    localStorage.setItem("order", order);
  };
  const choices = Object.entries(ORDERS).map(([order, [word, about]]) =>
    make(
      "label",
      { class: "choice" },
      make("input", { type: "radio", name: "order", value: order, checked: order === state.order, onchange: () => choose(order) }),
      make("span", {}, make("span", { text: word }), make("span", { class: "muted small", text: about })),
    ),
  );
  byId("order").append(...choices);
}
