/** The window of pictures with 16 bits: which number is black, which is white. */

import { byId, setText } from "./dom.js";

/**
 * @param {import("./state.js").State} state
 * @param {import("./canvas/viewer.js").Viewer} viewer
 */
export function addGreyWindow(state, viewer) {
  const [low, high, form, button] = ["low", "high", "window", "open-window"].map(byId);
  let timer = 0;
  const show = () => {
    const range = state.detail?.window;
    button.hidden = !range;
    if (!range) return close();
    for (const slider of [low, high]) Object.assign(slider, { min: range.min, max: range.max, step: Math.max((range.max - range.min) / 500, 1e-6) });
    low.value = viewer.window?.low ?? range.low;
    high.value = viewer.window?.high ?? range.high;
    tell();
  };
  const tell = () => {
    setText(byId("low-value"), String(Math.round(low.value)));
    setText(byId("high-value"), String(Math.round(high.value)));
  };
  const close = () => {
    form.hidden = true;
    button.setAttribute("aria-expanded", "false");
  };
  const change = (moved) => {
    const gap = (Number(low.max) - Number(low.min)) / 250;
    if (Number(high.value) - Number(low.value) < gap) {
      if (moved === low) low.value = Number(high.value) - gap;
      else high.value = Number(low.value) + gap;
    }
    tell();
    clearTimeout(timer);
    timer = setTimeout(() => {
      viewer.window = { low: Number(low.value), high: Number(high.value) };
      viewer.show();
    }, 150);
  };
  for (const slider of [low, high]) slider.addEventListener("input", () => change(slider));
  form.addEventListener("submit", (event) => event.preventDefault());
  byId("window-auto").addEventListener("click", () => {
    viewer.window = null;
    show();
    viewer.show();
  });
  button.addEventListener("click", () => {
    form.hidden = !form.hidden;
    button.setAttribute("aria-expanded", String(!form.hidden));
  });
  state.addEventListener("open", show);
  state.addEventListener("points", show);
}
