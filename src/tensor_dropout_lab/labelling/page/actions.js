/** What an action does to the points of an image: the same rules as the server's. */

/** @typedef {import("./api.js").Point} Point */
/** @typedef {{image: number, kind: "place"|"absent"|"clear"|"keep", points?: any[], seconds?: number, key: string}} Action */

/**
 * The points after an action; the given ones are left as they are.
 * @param {Point[]} points
 * @param {Action} action
 * @returns {Point[]}
 */
export function apply(points, action) {
  const after = points.slice();
  if (action.kind === "place") for (const { point, x, y, by } of action.points) after[point] = { x, y, by };
  if (action.kind === "absent") for (const point of action.points) after[point] = { absent: true };
  if (action.kind === "clear") for (const point of action.points) after[point] = null;
  return after;
}

/** @param {Point|undefined} point */
export function isPlaced(point) {
  return Boolean(point && !("absent" in point));
}

/** @param {Point|undefined} point */
export function isAbsent(point) {
  return Boolean(point && "absent" in point);
}

/**
 * The state of an image, seen from its points.
 * @param {Point[]} points
 * @param {boolean} predicted are there suggestions?
 * @param {boolean} doubtful
 */
export function stateOf(points, predicted, doubtful) {
  const done = points.filter(Boolean).length;
  if (done && done === points.length) return "labelled";
  if (done) return "started";
  if (doubtful) return "doubtful";
  return predicted ? "predicted" : "open";
}
