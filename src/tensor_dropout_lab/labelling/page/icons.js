/** The icons: strokes on a grid of 24, drawn for this page. */

import { draw, make } from "./dom.js";

const PATHS = {
  list: ["M4 6h16M4 12h16M4 18h16"],
  panel: ["M4 5h16v14H4zM14 5v14"],
  previous: ["M15 5l-7 7 7 7"],
  following: ["M9 5l7 7-7 7"],
  next: ["M4 12h15M13 6l6 6-6 6"],
  undo: ["M8 5L4 9l4 4", "M4 9h10a5 5 0 0 1 0 10h-4"],
  clear: ["M6 6l12 12M18 6L6 18"],
  absent: ["M3 12s3.5-6 9-6 9 6 9 6-3.5 6-9 6-9-6-9-6z", "M4 20L20 4"],
  accept: ["M4 12.5l5 5L20 6.5"],
  keep: ["M5 21V4h12l-2.5 4L17 12H5"],
  plus: ["M12 5v14M5 12h14"],
  minus: ["M5 12h14"],
  fit: ["M4 9V4h5M15 4h5v5M20 15v5h-5M9 20H4v-5"],
  eye: ["M3 12s3.5-6 9-6 9 6 9 6-3.5 6-9 6-9-6-9-6z", "M12 9.5a2.5 2.5 0 1 0 0 5 2.5 2.5 0 0 0 0-5z"],
  loupe: ["M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13z", "M15.5 15.5L21 21", "M10.5 8v5M8 10.5h5"],
  window: ["M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16z", "M12 4v16M12 8h6M12 12h8M12 16h6"],
  sun: ["M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8z", "M12 2v3M12 19v3M2 12h3M19 12h3M5 5l2 2M17 17l2 2M19 5l-2 2M7 17l-2 2"],
  moon: ["M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z"],
  auto: ["M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16z", "M12 4v16", "M12 6a6 6 0 0 1 0 12z"],
  help: ["M9 9a3 3 0 1 1 4.5 2.6c-1 .6-1.5 1.2-1.5 2.4", "M12 17.6v.3"],
  close: ["M6 6l12 12M18 6L6 18"],
  renew: ["M19 12a7 7 0 1 1-2.2-5.1M19 3v5h-5"],
  pencil: ["M5 19l1-4L16 5l3 3L9 18z"],
};

/** States of images and of points: a shape each, so that colour is never alone. */
const STATES = {
  labelled: () => [disc("shape-fill"), draw("path", { d: "M7.5 12.3l3 3 6-6.4", class: "shape-cut" })],
  started: () => [ring(), draw("path", { d: "M12 4a8 8 0 0 1 0 16z", class: "shape-fill" })],
  predicted: () => [diamond("shape-line dashed")],
  doubtful: () => [diamond("shape-line"), draw("path", { d: "M10 10.2a2 2 0 1 1 3 1.8c-.7.4-1 .8-1 1.6M12 16v.2", class: "shape-line thin" })],
  check: () => [draw("path", { d: "M12 3.5L21.5 20h-19z", class: "shape-fill" }), draw("path", { d: "M12 9.5v5M12 17.2v.3", class: "shape-cut" })],
  open: () => [ring("shape-line thin")],
  unreadable: () => [draw("path", { d: "M5 5l14 14M19 5L5 19", class: "shape-line" })],
  confirmed: () => [draw("circle", { cx: 12, cy: 12, r: 7, class: "shape-fill" })],
  suggested: () => [diamond("shape-line dashed")],
  absent: () => [draw("path", { d: "M4 12s3-5.5 8-5.5 8 5.5 8 5.5-3 5.5-8 5.5-8-5.5-8-5.5z", class: "shape-line thin" }), draw("path", { d: "M5 19L19 5", class: "shape-line" })],
};

function disc(kind) {
  return draw("circle", { cx: 12, cy: 12, r: 9, class: kind });
}

function ring(kind = "shape-line") {
  return draw("circle", { cx: 12, cy: 12, r: 8, class: kind });
}

function diamond(kind) {
  return draw("path", { d: "M12 2.5L21.5 12 12 21.5 2.5 12z", class: kind });
}

/**
 * An icon of a verb.
 * @param {string} name
 */
export function icon(name) {
  const paths = PATHS[name].map((d) => draw("path", { d }));
  return draw("svg", { viewBox: "0 0 24 24", class: "icon", "aria-hidden": "true", focusable: "false" }, ...paths);
}

/**
 * An icon of a state; the word stands beside it.
 * @param {string} state
 */
export function stateIcon(state) {
  const shapes = (STATES[state] ?? STATES.open)();
  return draw("svg", { viewBox: "0 0 24 24", class: `state-icon is-${state}`, "aria-hidden": "true", focusable: "false" }, ...shapes);
}

/**
 * Give a button its icon, a label and the key that does the same.
 * @param {HTMLElement} button
 * @param {string} name of the icon
 * @param {string} label
 * @param {{key?: string, text?: boolean, about?: string}} [options] text: the label is shown, not only spoken
 */
export function dress(button, name, label, { key, text = false, about = label } = {}) {
  const shown = text ? [make("span", { class: "label", text: label })] : [];
  if (text && key) shown.push(make("kbd", { "aria-hidden": "true", text: key }));
  button.replaceChildren(icon(name), ...shown);
  if (!text) button.setAttribute("aria-label", label);
  button.title = key ? `${about} (${key})` : about;
}
