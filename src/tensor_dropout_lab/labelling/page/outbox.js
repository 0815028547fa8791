/** Actions on their way to the server: in order, kept until it has said yes, sent again when it is back. */

import { Refused, Unreachable } from "./api.js";
import { hold, randomHex } from "./session.js";

/** @typedef {{type: "action", key: string, action: import("./actions.js").Action} | {type: "undo", key: string} |
 *   {type: "names", key: string, names: string[]}} Item */

const AT_ONCE = 100;
const WAITS = [150, 150, 300, 600, 1200, 2500];

/**
 * Events: "sent" {items, answer}, "refused" {items, message}, "change" (how many wait, and how it goes: see `state`).
 */
export class Outbox extends EventTarget {
  /** @type {Item[]} */
  items = [];
  /** @type {"stored"|"sending"|"gone"|"locked"} */
  state = "stored";
  /** Is everything also in the browser's storage, so that a reload loses nothing? */
  isKept = true;
  /** What the server said when it could not store; empty when it did not answer. */
  problem = "";
  /** Throws when the server that is back is not the one for which the actions are meant. @type {() => Promise<void>} */
  check = async () => {};
  #api;
  #client;
  #storage;
  #flying = 0;
  #tries = 0;
  #timer = 0;

  /**
   * @param {import("./api.js").Api} api
   * @param {string} client
   * @param {string} project actions of one folder must never reach another that has the same port
   */
  constructor(api, client, project) {
    super();
    this.#api = api;
    this.#client = client;
    this.#storage = `outbox ${client} ${project}`;
  }

  /** Take up what this tab, or one that is gone, could not send. */
  async recover() {
    this.items = read(this.#storage);
    const project = this.#storage.slice(this.#storage.indexOf(" ", 7));
    for (const name of Object.keys(localStorage)) {
      const mine = name.startsWith("outbox ") && name.endsWith(project) && name !== this.#storage;
      if (!mine || !(await hold(`client-${name.slice(7, 15)}`))) continue;
      this.items.push(...read(name));
      localStorage.removeItem(name);
    }
    this.#keep();
    this.#drain();
  }

  /** @param {any} item without its key */
  add(item) {
    this.items.push({ ...item, key: randomHex(16) });
    this.#keep();
    this.#change();
    this.#drain();
  }

  /** Take back the last action if it has not left yet. */
  takeBack() {
    if (this.items.length <= this.#flying || this.items.at(-1).type !== "action") return null;
    const item = this.items.pop();
    this.#keep();
    this.#change();
    return item.action;
  }

  /** @param {number} image */
  waitingFor(image) {
    return this.items.filter((item) => item.type === "action" && item.action.image === image).map((item) => item.action);
  }

  /** Try now: the server has shown that it is there. */
  wake() {
    if (this.#flying) return;
    clearTimeout(this.#timer);
    this.#drain();
  }

  /** Resolves when all is stored, or after this time. */
  settled(milliseconds) {
    if (!this.items.length) return Promise.resolve();
    return new Promise((done) => {
      const check = () => !this.items.length && finish();
      const timer = setTimeout(() => finish(), milliseconds);
      const finish = () => {
        clearTimeout(timer);
        this.removeEventListener("change", check);
        done();
      };
      this.addEventListener("change", check);
    });
  }

  async #drain() {
    if (this.#flying || !this.items.length) return;
    const items = this.#batch();
    this.#flying = items.length;
    try {
      if (this.#tries) await this.check();
      this.#sent(items, await this.#send(items));
    } catch (error) {
      this.#failed(items, error);
    }
  }

  #batch() {
    if (this.items[0].type !== "action") return this.items.slice(0, 1);
    const end = this.items.findIndex((item) => item.type !== "action");
    return this.items.slice(0, Math.min(end < 0 ? this.items.length : end, this.#alone ? 1 : AT_ONCE));
  }

  #alone = false; // after a refusal: one by one, so that only what is wrong is refused

  #send(items) {
    const [first] = items;
    if (first.type === "undo") return this.#api.undo(this.#client, first.key);
    if (first.type === "names") return this.#api.names(this.#client, first.names, first.key);
    return this.#api.actions(this.#client, items.map(({ action, key }) => ({ ...action, key })));
  }

  #sent(items, answer) {
    this.#shift(items);
    this.#tries = 0;
    this.state = "sending";
    this.problem = "";
    this.dispatchEvent(new CustomEvent("sent", { detail: { items, answer } }));
    this.#change();
    this.#drain();
  }

  #shift(items) {
    this.items.splice(0, items.length);
    this.#flying = 0;
    if (!this.items.length) this.#alone = false;
    this.#keep();
  }

  #failed(items, error) {
    this.#flying = 0;
    const wrong = error instanceof Refused && error.status !== 403;
    if (!wrong) {
      if (!(error instanceof Refused || error instanceof Unreachable)) throw error;
      this.problem = error.message;
      this.#change(error instanceof Refused ? "locked" : "gone");
      const wait = WAITS[Math.min(this.#tries++, WAITS.length - 1)];
      this.#timer = setTimeout(() => this.#drain(), wait);
      return;
    }
    if (items.length > 1) {
      this.#alone = true;
    } else {
      this.#shift(items);
      this.dispatchEvent(new CustomEvent("refused", { detail: { items, message: error.message } }));
    }
    this.#change();
    this.#drain();
  }

  #change(state) {
    this.state = state ?? (this.items.length ? (this.state === "stored" ? "sending" : this.state) : "stored");
    this.dispatchEvent(new Event("change"));
  }

  #keep() {
    try {
      if (this.items.length) localStorage.setItem(this.#storage, JSON.stringify(this.items));
      else localStorage.removeItem(this.#storage);
      this.isKept = true;
    } catch {
      this.isKept = false;
      // No room in the browser's storage: the actions are still in memory, and a reload asks first (see main.js).
    }
  }
}

/** @returns {Item[]} */
function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name) ?? "[]");
  } catch {
    return []; // cut off while it was written
  }
}
