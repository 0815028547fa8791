/** The page of `tensor-dropout label`: puts its parts together. */

import { Api, Refused } from "./api.js";
import { Clock } from "./clock.js";
import { Commands } from "./commands.js";
import { Connection } from "./connection.js";
import { addDrawers } from "./drawers.js";
import { addGreyWindow } from "./grey.js";
import { addFit, addOrder, addOutput } from "./output.js";
import { addTheme } from "./theme.js";
import { byId, make } from "./dom.js";
import { dress } from "./icons.js";
import { editNames, showHelp, showHint } from "./dialogs.js";
import { Gestures } from "./canvas/gestures.js";
import { List } from "./list.js";
import { listen } from "./keys.js";
import { Outbox } from "./outbox.js";
import { Pictures } from "./canvas/pictures.js";
import { Points } from "./points.js";
import { Progress } from "./progress.js";
import { shareToken, startSession } from "./session.js";
import { State } from "./state.js";
import { Viewer } from "./canvas/viewer.js";

const RETRY = 1500;

async function start() {
  addTheme();
  const { token, client } = await startSession();
  const api = new Api(token);
  const state = new State(api, new Clock());
  const viewer = new Viewer(state, new Pictures(api));
  const commands = new Commands(state, viewer);
  const closeDrawers = addDrawers();
  const open = (id) => {
    closeDrawers();
    commands.open(id);
  };
  const list = new List(state, (id) => api.thumbnail(id), open);
  commands.listed = () => list.ids;
  new Points(state, commands);
  new Progress(state);
  addOrder(state);
  addGreyWindow(state, viewer);
  const gestures = new Gestures(viewer, hands(commands));
  const controls = addButtons(state, viewer, commands);
  listen(commands, viewer, gestures, controls);
  const say = { tell: () => {} };
  addOutput(api, state, (...words) => say.tell(...words));
  addFit(api, (text) => say.tell(text));
  await firstLoad(state);
  const outbox = new Outbox(api, client, state.out);
  outbox.check = async () => {
    if ((await api.project()).out !== state.out) throw new Refused(403, "this server is for another folder");
  };
  state.connect(outbox);
  const connection = new Connection(api, state, outbox, client, () => comeBack(state, viewer));
  say.tell = (...words) => connection.tell(...words);
  shareToken(token, state.out, (newer) => {
    api.token = newer;
    connection.retry();
  });
  await outbox.recover();
  guardLeaving(commands, outbox);
  followAddress(state, viewer, commands);
  if (state.names.length) showHint(state);
  else editNames(state, () => showHint(state));
}

/** Wait for the server; a wrong token is said once and for all. */
async function firstLoad(state) {
  for (;;) {
    try {
      return await state.load();
    } catch (error) {
      const text = error.status === 403 ? "Open the whole address that “tensor-dropout label” shows in the terminal: it holds the key to this page." : "The server does not answer yet; trying again.";
      byId("banner").replaceChildren(make("p", { text }));
      byId("banner").hidden = false;
      if (error.status === 403) await new Promise(() => {});
      await new Promise((go) => setTimeout(go, RETRY));
    }
  }
}

async function comeBack(state, viewer) {
  try {
    await state.load();
    await state.refresh();
    if (viewer.failed) viewer.show();
  } catch (error) {
    state.dispatchEvent(new CustomEvent("trouble", { detail: { error } }));
  }
}

function hands(commands) {
  return {
    begin: () => commands.flush(),
    target: () => commands.target(),
    put: (index, place) => commands.put(index, place),
    tap: (index) => commands.tap(index),
    miss: () => commands.miss(),
    unput: () => commands.undo(),
  };
}

function addButtons(state, viewer, commands) {
  const useLoupe = () => {
    viewer.loupeOn = !viewer.loupeOn;
    byId("use-loupe").setAttribute("aria-pressed", String(viewer.loupeOn));
    viewer.hideLoupe();
    viewer.redraw();
  };
  const controls = { help: showHelp, hideMarks: () => commands.hide(), useLoupe };
  const buttons = {
    "toggle-list": ["list", "Images", {}],
    "toggle-panel": ["panel", "Points and progress", {}],
    previous: ["previous", "Image before", { key: "Page ↑" }, () => commands.turn(-1)],
    following: ["following", "Image after", { key: "Page ↓" }, () => commands.turn(1)],
    help: ["help", "Help: keys, mouse, fingers", { key: "?" }, controls.help],
    "zoom-in": ["plus", "Zoom in", { key: "+" }, () => viewer.zoom(1.4)],
    "zoom-out": ["minus", "Zoom out", { key: "−" }, () => viewer.zoom(1 / 1.4)],
    "zoom-fit": ["fit", "Whole image", { key: "0" }, () => viewer.fit()],
    "hide-marks": ["eye", "Hide suggestions, then all points", { key: "H" }, controls.hideMarks],
    "use-loupe": ["loupe", "Magnifier", { key: "M" }, controls.useLoupe],
    "open-window": ["window", "Black and white of this picture", {}],
    newer: ["renew", "Newer suggestions", { key: "R", text: true, about: "Newer suggestions are there: show them" }, () => commands.renew()],
    keep: ["keep", "Looks right", { key: "L", text: true }, () => commands.keep()],
    undo: ["undo", "Undo", { key: "Ctrl Z", text: true }, () => commands.undo()],
    clear: ["clear", "Clear", { key: "Del", text: true }, () => commands.clear()],
    absent: ["absent", "Skip", { key: "S", text: true, about: "Skip: it cannot be seen in this image" }, () => commands.absent()],
    accept: ["accept", "Accept all", { key: "Enter", text: true }, () => commands.acceptAll()],
    next: ["next", "Next", { key: "N", text: true }, () => commands.next()],
  };
  for (const [id, [name, label, options, act]] of Object.entries(buttons)) {
    dress(byId(id), name, label, options);
    if (act) byId(id).addEventListener("click", (event) => press(event, act));
  }
  byId("edit-names").addEventListener("click", () => editNames(state, () => showHint(state)));
  byId("skip-link").addEventListener("click", (event) => press(event, () => byId("stage").focus()));
  rememberGoOn(commands);
  return controls;
}

/** After a click with the mouse the keys go on working on the image; after a key the focus stays. */
function press(event, act) {
  event.preventDefault();
  act();
  const byMouse = event.detail > 0;
  if (byMouse && !document.querySelector("dialog[open]")) byId("stage").focus({ preventScroll: true });
}

function rememberGoOn(commands) {
  const box = byId("go-on");
  box.checked = commands.goOn = localStorage.getItem("go on") === "yes";
  box.addEventListener("change", () => {
    commands.goOn = box.checked;
    localStorage.setItem("go on", box.checked ? "yes" : "no");
  });
}

/** A move by keys that is not yet sent is sent; a browser that could not keep the rest asks before it leaves. */
function guardLeaving(commands, outbox) {
  addEventListener("pagehide", () => commands.flush());
  addEventListener("blur", () => commands.flush());
  addEventListener("beforeunload", (event) => {
    commands.flush();
    if (outbox.items.length && !outbox.isKept) event.preventDefault();
  });
}

/** The open image is in the address, after "#", so that a reload and the buttons of the browser find it. */
function followAddress(state, viewer, commands) {
  const named = () => {
    const name = decodeURIComponent(location.hash.slice(1));
    return [...state.images.values()].find((image) => image.name === name);
  };
  state.addEventListener("open", () => {
    const hash = `#${encodeURIComponent(state.summary.name)}`;
    if (location.hash !== hash) history.replaceState(null, "", hash);
    closeToHand(state, viewer, commands);
  });
  addEventListener("hashchange", () => named() && named().id !== state.current && state.open(named().id));
  const first = named() ?? [...state.images.values()].find((image) => !["labelled", "unreadable"].includes(image.state));
  const id = (first ?? [...state.images.values()][0])?.id;
  if (id !== undefined) state.open(id);
}

/** Load the likely next image when this one is there. */
function closeToHand(state, viewer, commands) {
  const from = state.current;
  viewer.addEventListener(
    "shown",
    () => {
      const ids = commands.listed();
      const next = ids[ids.indexOf(from) + 1];
      if (next === undefined || state.current !== from || state.images.get(next).problem) return;
      viewer.prefetch(next);
      state.prefetch(next);
    },
    { once: true },
  );
}

start();
