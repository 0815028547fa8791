/** A small line chart: error over the number of labelled images. */

import { draw } from "./dom.js";

const WIDE = 264;
const HIGH = 150;
const EDGE = { left: 34, right: 10, top: 14, bottom: 30 };

/**
 * @param {{labelled: number, error_pixels: number}[]} rounds
 * @returns {SVGElement}
 */
export function drawChart(rounds) {
  const points = rounds.filter((round) => Number.isFinite(round.error_pixels));
  const label = `Held-out error in pixels over labelled images: ${points.map((round) => `${round.labelled} images, ${round.error_pixels.toFixed(2)}`).join("; ")}`;
  const svg = draw("svg", { viewBox: `0 0 ${WIDE} ${HIGH}`, class: "chart", role: "img", "aria-label": label });
  const most = niceCeiling(Math.max(...points.map((round) => round.error_pixels)));
  const [least, last] = [Math.min(...points.map((round) => round.labelled)), Math.max(...points.map((round) => round.labelled))];
  const x = (labelled) => EDGE.left + ((labelled - least) / Math.max(last - least, 1)) * (WIDE - EDGE.left - EDGE.right);
  const y = (error) => HIGH - EDGE.bottom - (error / most) * (HIGH - EDGE.top - EDGE.bottom);
  svg.append(...drawGrid(most, y), ...drawFeet(least, last, x));
  const path = points.map((round, index) => `${index ? "L" : "M"}${x(round.labelled).toFixed(1)} ${y(round.error_pixels).toFixed(1)}`).join("");
  svg.append(draw("path", { d: path, class: "line" }));
  for (const round of points) svg.append(draw("circle", { cx: x(round.labelled), cy: y(round.error_pixels), r: 2.4, class: "knot" }));
  return svg;
}

function drawGrid(most, y) {
  return [0, most / 2, most].flatMap((value) => [
    draw("path", { d: `M${EDGE.left} ${y(value)}H${WIDE - EDGE.right}`, class: "grid" }),
    draw("text", { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end", text: Number(value.toPrecision(3)) }),
  ]);
}

function drawFeet(least, last, x) {
  const foot = (value, anchor) => draw("text", { x: x(value), y: HIGH - EDGE.bottom + 14, "text-anchor": anchor, text: value });
  const feet = least === last ? [foot(least, "middle")] : [foot(least, "start"), foot(last, "end")];
  return [...feet, draw("text", { x: (EDGE.left + WIDE - EDGE.right) / 2, y: HIGH - 3, "text-anchor": "middle", text: "labelled images" })];
}

/** The next of 1, 2, 5 times a power of ten. */
export function niceCeiling(value) {
  if (!(value > 0) || !Number.isFinite(value)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value) ?? 10 * power;
}
