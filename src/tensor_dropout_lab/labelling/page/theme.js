/** Light, dark, or as the computer has it. */

import { byId } from "./dom.js";
import { dress } from "./icons.js";

const TURN = { auto: "light", light: "dark", dark: "auto" };
const FACES = { auto: ["auto", "Colours: as the computer has them"], light: ["sun", "Colours: light"], dark: ["moon", "Colours: dark"] };

export function addTheme() {
  const button = byId("theme");
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    dress(button, ...FACES[theme]);
  };
  let theme = localStorage.getItem("theme");
  if (!(theme in TURN)) theme = "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = TURN[theme];
    localStorage.setItem("theme", theme);
    show(theme);
  });
}
