/** The image on the stage: picture, points, cursor and magnifier under one view. */

import { byId, setText } from "../dom.js";
import { drawCursor, drawMarks, listMarks } from "./marks.js";
import { Loupe } from "./loupe.js";
import { fit, pan, reveal, toImage, toScreen, zoom } from "./view.js";

/** @typedef {{x: number, y: number}} Place in pixels of the original */

/** Below this scale neighbouring pixels are blended; above it each one is a crisp square. */
const CRISP = 1.5;

export class Viewer extends EventTarget {
  stage = byId("stage");
  /** @type {import("./pictures.js").Picture|null} */
  picture = null;
  view = { scale: 1, x: 0, y: 0 };
  /** @type {Place|null} where a key would place a point */
  cursor = null;
  /** @type {{index: number, x: number, y: number}|null} a point in the hand, not yet let go */
  held = null;
  /** @type {{low: number, high: number}|null} */
  window = null;
  marksShown = true;
  loupeOn = true;
  #canvas = byId("picture");
  #svg = byId("marks");
  #loupe = new Loupe(byId("loupe"));
  #message = byId("stage-message");
  #state;
  #pictures;
  #drawn = 0;
  #fitted = true;
  #shape = ""; // size of the last picture: pictures of one size keep the view

  /**
   * @param {import("../state.js").State} state
   * @param {import("./pictures.js").Pictures} pictures
   */
  constructor(state, pictures) {
    super();
    this.#state = state;
    this.#pictures = pictures;
    state.addEventListener("open", () => this.show());
    for (const name of ["points", "project", "images"]) state.addEventListener(name, () => this.redraw());
    new ResizeObserver(() => this.#resize()).observe(this.stage);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  /** Width and height of the stage. */
  get screen() {
    return { width: this.stage.clientWidth, height: this.stage.clientHeight };
  }

  /** Width and height of the picture. */
  get image() {
    const { width, height } = this.picture ?? this.#state.summary ?? { width: 1, height: 1 };
    return { width, height };
  }

  /** Load the open image; the old one stays until the new one is there. */
  async show() {
    const id = this.#state.current;
    const problem = this.#state.summary?.problem;
    this.held = this.cursor = null;
    this.hideLoupe();
    this.stage.classList.add("is-loading");
    if (problem) return this.#nothing(`This picture cannot be read: ${problem}`);
    try {
      const picture = await this.#pictures.get(id, this.window);
      if (id === this.#state.current) this.#take(picture);
    } catch (error) {
      if (id === this.#state.current) this.#nothing(`This picture could not be loaded: ${error.message}`);
    }
  }

  /** Have a picture at hand before it is asked for. */
  async prefetch(id) {
    try {
      await this.#pictures.get(id, this.window);
    } catch {
      // It is loaded, or its problem shown, when it is opened.
    }
  }

  /** Was loading in vain? */
  get failed() {
    return !this.#message.hidden && !this.#state.summary?.problem;
  }

  #take(picture) {
    const shape = `${picture.width} ${picture.height}`;
    if (shape !== this.#shape) this.#fitted = true;
    this.#shape = shape;
    this.picture = picture;
    this.#message.hidden = true;
    if (this.#fitted) this.view = fit(this.image, this.screen);
    this.redraw();
    this.stage.classList.remove("is-loading");
    this.dispatchEvent(new Event("shown"));
  }

  #nothing(text) {
    this.picture = null;
    this.#message.hidden = false;
    setText(this.#message, text);
    this.stage.classList.remove("is-loading");
    this.redraw();
  }

  fit() {
    this.#fitted = true;
    this.view = fit(this.image, this.screen);
    this.redraw();
  }

  /** @param {number} factor around a place of the screen, or the middle, or the chosen point */
  zoom(factor, x, y) {
    const middle = this.#focus();
    this.#set(zoom(this.view, factor, x ?? middle.x, y ?? middle.y, this.image, this.screen));
  }

  pan(dx, dy) {
    this.#set(pan(this.view, dx, dy, this.image, this.screen));
  }

  /** Bring a place of the picture into sight. */
  reveal({ x, y }) {
    const at = toScreen(this.view, x, y);
    const view = reveal(this.view, at.x, at.y, this.image, this.screen);
    if (view.x !== this.view.x || view.y !== this.view.y) this.#set(view);
  }

  #set(view) {
    this.#fitted = false;
    this.view = view;
    this.redraw();
  }

  #focus() {
    const place = this.cursor ?? this.placeOfActive();
    const { width, height } = this.screen;
    if (!place) return { x: width / 2, y: height / 2 };
    const at = toScreen(this.view, place.x, place.y);
    return { x: Math.min(Math.max(at.x, 0), width), y: Math.min(Math.max(at.y, 0), height) };
  }

  /** Where the chosen point is, in pixels of the original. @returns {Place|null} */
  placeOfActive() {
    const { active } = this.#state;
    const place = active === null ? null : this.#state.placeOf(active);
    return place ? this.toPixels(place) : null;
  }

  /** From the screen to pixels of the original, inside the picture. @returns {Place} */
  locate(x, y) {
    return this.clamp(toImage(this.view, x, y));
  }

  /** Is this place of the screen on the picture? */
  isOn(x, y) {
    const place = toImage(this.view, x, y);
    const slack = 12 / this.view.scale;
    return place.x > -slack && place.y > -slack && place.x < this.image.width + slack && place.y < this.image.height + slack;
  }

  clamp({ x, y }) {
    const { width, height } = this.image;
    return { x: Math.min(Math.max(x, 0), width), y: Math.min(Math.max(y, 0), height) };
  }

  toPixels({ x, y }) {
    return { x: x * this.image.width, y: y * this.image.height };
  }

  toFractions({ x, y }) {
    return { x: x / this.image.width, y: y / this.image.height };
  }

  /** The mark under a place of the screen, the nearest within reach. @param {number} reach in pixels of the screen */
  markAt(x, y, reach) {
    if (!this.marksShown || !this.picture) return null;
    let nearest = null;
    for (const mark of listMarks(this.#state)) {
      const at = toScreen(this.view, mark.x * this.image.width, mark.y * this.image.height);
      const distance = Math.hypot(at.x - x, at.y - y);
      if (distance <= reach && (!nearest || distance < nearest.distance)) nearest = { ...mark, distance, at };
    }
    return nearest;
  }

  /** Show the magnifier for a place of the picture. @param {Place} place */
  magnify(place) {
    if (!this.picture || !this.loupeOn) return this.hideLoupe();
    const hand = toScreen(this.view, place.x, place.y);
    this.#loupe.show(this.picture, place, this.view.scale, { ...hand, ...this.screen });
  }

  hideLoupe() {
    this.#loupe.hide();
  }

  /** Draw with the next frame. */
  redraw() {
    cancelAnimationFrame(this.#drawn);
    this.#drawn = requestAnimationFrame(() => this.#draw());
  }

  #resize() {
    if (this.#fitted && this.picture) this.view = fit(this.image, this.screen);
    this.redraw();
  }

  #draw() {
    const { width, height } = this.screen;
    const ratio = devicePixelRatio;
    const canvas = this.#canvas;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const context = canvas.getContext("2d");
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, canvas.width, canvas.height);
    this.#svg.setAttribute("viewBox", `0 0 ${Math.max(width, 1)} ${Math.max(height, 1)}`);
    if (this.picture) this.#drawPicture(context, ratio);
    this.#drawMarks();
  }

  #drawPicture(context, ratio) {
    const { whole, small, width, height } = this.picture;
    const { scale, x, y } = this.view;
    const source = small && scale * ratio * width < small.width ? small : whole;
    const share = source.width / width;
    const left = Math.max(-x / scale, 0);
    const top = Math.max(-y / scale, 0);
    const wide = Math.min(width, (this.screen.width - x) / scale) - left;
    const high = Math.min(height, (this.screen.height - y) / scale) - top;
    if (wide <= 0 || high <= 0) return;
    context.setTransform(ratio * scale, 0, 0, ratio * scale, ratio * x, ratio * y);
    context.imageSmoothingEnabled = scale * ratio < CRISP;
    context.imageSmoothingQuality = "high";
    context.drawImage(source, left * share, top * share, wide * share, high * share, left, top, wide, high);
  }

  #drawMarks() {
    const state = this.#state;
    const shown = this.picture && this.marksShown ? listMarks(state) : [];
    const marks = shown.filter((mark) => mark.index !== this.held?.index);
    if (this.held && this.picture) marks.push({ ...this.toFractions(this.held), index: this.held.index, kind: "confirmed" });
    const active = this.held?.index ?? state.active;
    drawMarks(this.#svg, marks, { view: this.view, image: this.image, active, names: state.names });
    if (!this.cursor || !this.picture) return;
    const at = toScreen(this.view, this.cursor.x, this.cursor.y);
    drawCursor(this.#svg, at.x, at.y);
  }
}
