/** What happened: said to those who do not see it, and shown where it would otherwise look as if nothing did. */

import { byId } from "./dom.js";

const SHORT = 5000;
const LONG = 12000;
let timer = 0;

/** @param {string} text the last word of a burst is enough: the region is polite */
export function announce(text) {
  const region = byId("announce");
  region.textContent = region.textContent === text ? `${text}\u00a0` : text; // the same again is news, too
  byId("toast").hidden = true; // what it said is over
}

/** The same, and for all to see over the image. @param {string} text @param {boolean} [long] there is much to read */
export function notify(text, long = false) {
  announce(text);
  const toast = byId("toast");
  toast.textContent = text;
  toast.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (toast.hidden = true), long ? LONG : SHORT);
}
