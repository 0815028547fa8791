/** What happened, said to those who do not see it. */

import { byId } from "./dom.js";

/** @param {string} text the last word of a burst is enough: the region is polite */
export function announce(text) {
  const region = byId("announce");
  region.textContent = region.textContent === text ? `${text}\u00a0` : text; // the same again is news, too
}
