/** Is the server there? What is stored, what waits, and the server's messages. */

import { byId, count, make, setText } from "./dom.js";

const WAITS = [200, 300, 600, 1200, 2500];
const SHORT = 8000;

export class Connection {
  #api;
  #state;
  #outbox;
  #client;
  #gone = false;
  #tries = 0;
  #timer = 0;
  #note = 0;
  #back;

  /**
   * @param {import("./api.js").Api} api
   * @param {import("./state.js").State} state
   * @param {import("./outbox.js").Outbox} outbox
   * @param {string} client
   * @param {() => void} back the server is there again
   */
  constructor(api, state, outbox, client, back) {
    this.#api = api;
    this.#state = state;
    this.#outbox = outbox;
    this.#client = client;
    this.#back = back;
    outbox.addEventListener("change", () => this.#show());
    state.addEventListener("trouble", ({ detail }) => this.#trouble(detail));
    this.#show();
    this.#listen();
  }

  /** A sentence for a while. @param {string} text @param {string} [kind] "good" or "bad" */
  tell(text, kind = "bad") {
    clearTimeout(this.#note);
    this.#put(kind, text);
    this.#note = setTimeout(() => this.#show(), SHORT);
  }

  /** Try again now. */
  retry() {
    clearTimeout(this.#timer);
    this.#outbox.wake();
    if (this.#gone) this.#listen();
  }

  #listen() {
    const events = this.#api.events();
    events.onopen = () => this.#returned();
    events.onmessage = ({ data }) => this.#state.hear(JSON.parse(data), this.#client);
    events.onerror = () => {
      events.close();
      this.#lost();
      this.#timer = setTimeout(() => this.#listen(), WAITS[Math.min(this.#tries++, WAITS.length - 1)]);
    };
    addEventListener("pagehide", () => events.close(), { once: true });
  }

  #lost() {
    this.#gone = true;
    this.#show();
  }

  async #returned() {
    this.#tries = 0;
    if (!this.#gone) return;
    this.#gone = false;
    this.#show();
    this.#outbox.wake();
    this.#back();
  }

  #trouble({ message, error }) {
    if (message) return this.tell(message);
    if (error?.status === 403) this.#outbox.state = "locked";
    this.#show();
  }

  #show() {
    clearTimeout(this.#note);
    const waiting = this.#outbox.items.length;
    const kept = waiting ? ` ${count(waiting, "action")} ${waiting === 1 ? "is" : "are"} kept here and sent when it is back.` : " You can go on; what you do is kept here and sent when it is back.";
    if (this.#outbox.state === "locked") this.#put("bad", `This page belongs to an earlier start of the server. Open the address that the terminal shows now.${waiting ? ` ${count(waiting, "action")} will be taken along.` : ""}`);
    else if (waiting && this.#outbox.problem) this.#put("bad", `Not stored yet: ${this.#outbox.problem}.${kept}`);
    else if (this.#gone || this.#outbox.state === "gone") this.#put("bad", `The server does not answer.${kept} Is “tensor-dropout label” still running in the terminal?`);
    else byId("banner").hidden = true;
    this.#showSaved(waiting);
  }

  #showSaved(waiting) {
    const saved = byId("saved");
    const away = this.#gone || ["gone", "locked"].includes(this.#outbox.state);
    saved.dataset.kind = waiting ? (away ? "waits" : "sending") : away ? "away" : "stored";
    setText(saved, waiting ? (away ? `${waiting} not yet stored` : "Storing …") : away ? "No server" : "All stored");
  }

  #put(kind, text) {
    const banner = byId("banner");
    const close = make("button", { type: "button", text: "OK", onclick: () => (banner.hidden = true) });
    if (!banner.hidden && banner.dataset.text === text) return;
    banner.dataset.text = text;
    banner.dataset.kind = kind;
    banner.replaceChildren(make("p", { text }), close);
    banner.hidden = false;
  }
}
