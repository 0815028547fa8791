/** Suggestions of the open image stay where they were shown: nobody accepts places that were not looked at. */

/** @typedef {import("./api.js").Detail} Detail */
/** @typedef {import("./api.js").Suggestion} Suggestion */

const SAME = 1e-6; // fractions of the picture: nobody sees less

/**
 * What the server says now, with the suggestions that were shown; points without one get the new one.
 * @param {Detail} detail
 * @param {Suggestion[]} shown
 */
export function freeze(detail, shown) {
  const latest = detail.suggestions;
  const suggestions = Array.from({ length: Math.max(latest.length, shown.length) }, (_, index) => {
    const [old, now] = [shown[index] ?? null, latest[index] ?? null];
    return old && !(now && isSame(old, now)) ? old : now; // at the same place an ellipse may be new
  });
  return { ...detail, suggestions, latest };
}

/** The newest suggestions; those that are gone stay as they were shown. */
export function thaw(detail) {
  const { latest, ...rest } = detail;
  return latest ? { ...rest, suggestions: rest.suggestions.map((old, index) => latest[index] ?? old) } : detail;
}

/**
 * Is an open point suggested elsewhere by now?
 * @param {(Detail & {latest?: Suggestion[]})|undefined} detail
 * @param {import("./api.js").Point[]} points
 */
export function hasNewer(detail, points) {
  return Boolean(detail?.latest) && points.some((point, index) => {
    const [old, now] = [detail.suggestions[index], detail.latest[index]];
    return !point && old && now && !isSame(old, now);
  });
}

function isSame(one, other) {
  return Math.abs(one.x - other.x) < SAME && Math.abs(one.y - other.y) < SAME;
}
