/** On narrow windows the list and the panel are drawers: one at a time, closed by Esc or a tap beside them. */

import { byId } from "./dom.js";

const SIDES = { "toggle-list": "images", "toggle-panel": "panel" };

/** @returns {() => void} closes whatever is open */
export function addDrawers() {
  const show = (which) => {
    for (const [button, side] of Object.entries(SIDES)) {
      byId(side).classList.toggle("is-out", button === which);
      byId(button).setAttribute("aria-expanded", String(button === which));
    }
    byId("shade").hidden = which === null;
  };
  const isOut = () => !byId("shade").hidden;
  for (const [button, side] of Object.entries(SIDES)) {
    byId(button).addEventListener("click", () => {
      const out = byId(side).classList.contains("is-out");
      show(out ? null : button);
      if (!out) byId(side).querySelector("button, select, input")?.focus();
    });
  }
  byId("shade").addEventListener("click", () => show(null));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !isOut()) return;
    const button = Object.keys(SIDES).find((name) => byId(name).getAttribute("aria-expanded") === "true");
    show(null);
    if (button) byId(button).focus();
  });
  return () => isOut() && show(null);
}
