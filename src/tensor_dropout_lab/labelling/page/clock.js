/** How long a person worked: pauses and hidden tabs do not count. */

const PAUSE = 15000;

export class Clock {
  #seconds = 0;
  #last = performance.now();

  constructor() {
    for (const kind of ["pointerdown", "pointermove", "keydown", "wheel"]) {
      addEventListener(kind, () => this.#tick(), { passive: true, capture: true });
    }
    document.addEventListener("visibilitychange", () => (this.#last = performance.now()));
  }

  /** Seconds since the last time this was asked. */
  take() {
    this.#tick();
    const seconds = Math.round(this.#seconds * 10) / 10;
    this.#seconds = 0;
    return seconds;
  }

  #tick() {
    const now = performance.now();
    if (now - this.#last < PAUSE) this.#seconds += (now - this.#last) / 1000;
    this.#last = now;
  }
}
