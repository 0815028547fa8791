/** Points over the picture: filled circles where a person has placed them, dashed diamonds where they are suggested. */

import { draw } from "../dom.js";
import { isPlaced } from "../actions.js";
import { toScreen } from "./view.js";

/** @typedef {{x: number, y: number, index: number, kind: "confirmed"|"suggested", ellipse?: number[][]|null,
 *   check?: boolean, expected?: {x: number, y: number}|null}} Mark check: it is far from where it is expected */

/** What is shown of an image. @param {import("../state.js").State} state @returns {Mark[]} */
export function listMarks(state) {
  const suggestions = state.suggestions;
  const checks = state.checks;
  return state.points.flatMap((point, index) => {
    const check = checks.includes(index);
    if (isPlaced(point)) return [{ x: point.x, y: point.y, index, kind: "confirmed", check, expected: check ? state.expectedAt(index) : null }];
    const suggestion = suggestions[index];
    return point || !suggestion ? [] : [{ ...suggestion, index, kind: "suggested" }];
  });
}

/**
 * Half axes and angle of the ellipse dᵀ M⁻¹ d = 1, with M in fractions of the picture.
 * @param {number[][]} matrix
 * @param {{width: number, height: number}} image
 */
export function measureEllipse(matrix, image) {
  const a = matrix[0][0] * image.width ** 2;
  const b = matrix[0][1] * image.width * image.height;
  const c = matrix[1][1] * image.height ** 2;
  const middle = (a + c) / 2;
  const spread = Math.hypot((a - c) / 2, b);
  const angle = (Math.atan2(b, (a - c) / 2) / 2) * (180 / Math.PI);
  return { long: Math.sqrt(middle + spread), short: Math.sqrt(Math.max(middle - spread, 0)), angle };
}

/**
 * Draw all marks anew: at most some dozens, so that nothing needs to be kept in step.
 * @param {SVGElement} svg
 * @param {Mark[]} marks
 * @param {{view: import("./view.js").View, image: {width: number, height: number}, active: number|null, names: string[]}} scene
 */
export function drawMarks(svg, marks, scene) {
  const ellipses = marks.filter((mark) => mark.ellipse).map((mark) => drawEllipse(mark, scene));
  const last = [...marks].sort((one, other) => (one.index === scene.active) - (other.index === scene.active));
  const expected = marks.filter((mark) => mark.expected).map((mark) => drawExpected(mark, scene));
  svg.replaceChildren(...ellipses, ...expected, ...last.map((mark) => drawMark(mark, scene)));
}

function drawEllipse(mark, { view, image }) {
  const { x, y } = toScreen(view, mark.x * image.width, mark.y * image.height);
  const { long, short, angle } = measureEllipse(mark.ellipse, image);
  const size = { rx: long * view.scale, ry: short * view.scale, transform: `translate(${x} ${y}) rotate(${angle})` };
  return draw("g", { class: "ellipse" }, draw("ellipse", { ...size, class: "under" }), draw("ellipse", { ...size, class: "over" }));
}

/** Where the fit has a point, and a line to where it was placed; it cannot be clicked. */
function drawExpected(mark, { view, image }) {
  const from = toScreen(view, mark.x * image.width, mark.y * image.height);
  const to = toScreen(view, mark.expected.x * image.width, mark.expected.y * image.height);
  const diamond = `M${to.x} ${to.y - 8}L${to.x + 8} ${to.y} ${to.x} ${to.y + 8} ${to.x - 8} ${to.y}Z`;
  const d = `M${from.x} ${from.y}L${to.x} ${to.y}${diamond}`;
  return draw("g", { class: "expected", "data-point": mark.index }, draw("path", { d, class: "under" }), draw("path", { d, class: "over" }));
}

function drawMark(mark, { view, image, active, names }) {
  const { x, y } = toScreen(view, mark.x * image.width, mark.y * image.height);
  const isActive = mark.index === active;
  const group = draw("g", {
    class: `mark ${mark.kind}${isActive ? " active" : ""}${mark.check ? " check" : ""}`,
    transform: `translate(${x} ${y})`,
    "data-point": mark.index,
  });
  if (isActive) group.append(draw("circle", { r: 15, class: "halo-under" }), draw("circle", { r: 15, class: "halo" }));
  if (mark.check) group.append(draw("circle", { r: 11, class: "ring-under" }), draw("circle", { r: 11, class: "ring" }));
  group.append(...(mark.kind === "confirmed" ? drawDisc() : drawDiamond()));
  group.append(draw("text", { x: 12, y: -9, text: `${mark.index + 1}${mark.check ? "?" : ""}${isActive ? ` ${names[mark.index] ?? ""}` : ""}` }));
  return group;
}

function drawDisc() {
  return [draw("circle", { r: 6.5, class: "rim" }), draw("circle", { r: 5, class: "disc" }), draw("circle", { r: 1, class: "dot" })];
}

function drawDiamond() {
  const d = "M0 -10L10 0 0 10 -10 0Z";
  return [draw("path", { d, class: "under" }), draw("path", { d, class: "over" }), draw("circle", { r: 1.2, class: "dot" })];
}

/** A cross: where a key would place the point. */
export function drawCursor(svg, x, y) {
  const d = "M-22 0H-5M5 0H22M0 -22V-5M0 5V22";
  svg.append(draw("g", { class: "cursor", transform: `translate(${x} ${y})` }, draw("path", { d, class: "under" }), draw("path", { d, class: "over" })));
}
