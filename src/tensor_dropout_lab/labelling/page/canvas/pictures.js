/** Pictures as the canvas draws them: a few kept at hand, a smaller copy of large ones for quick drawing. */

const KEPT = 3;
const SMALL = 2048;

/** @typedef {{whole: ImageBitmap, small: ImageBitmap|null, width: number, height: number}} Picture */

export class Pictures {
  #api;
  /** @type {Map<string, Promise<Picture>>} */
  #kept = new Map();

  /** @param {import("../api.js").Api} api */
  constructor(api) {
    this.#api = api;
  }

  /**
   * @param {number} id
   * @param {{low: number, high: number}|null} window
   * @returns {Promise<Picture>}
   */
  get(id, window) {
    const key = `${id} ${window ? `${window.low} ${window.high}` : ""}`;
    const known = this.#kept.get(key);
    this.#kept.delete(key);
    const picture = known ?? this.#load(id, window);
    this.#kept.set(key, picture); // the newest at the end
    if (!known) picture.catch(() => this.#kept.delete(key));
    for (const old of [...this.#kept.keys()].slice(0, -KEPT)) this.#kept.delete(old);
    return picture;
  }

  async #load(id, window) {
    const blob = await this.#api.picture(id, window);
    const whole = await createImageBitmap(blob);
    const longer = Math.max(whole.width, whole.height);
    const share = SMALL / longer;
    const size = { resizeWidth: Math.round(whole.width * share), resizeHeight: Math.round(whole.height * share) };
    const small = longer > 1.5 * SMALL ? await createImageBitmap(whole, { ...size, resizeQuality: "high" }) : null;
    return { whole, small, width: whole.width, height: whole.height };
  }
}
