/** The server's addresses, each as a function. */

/** @typedef {{x: number, y: number, by: string} | {absent: true} | null} Point */
/** @typedef {{x: number, y: number, ellipse: number[][] | null} | null} Suggestion */
/** @typedef {{low: number, high: number, min: number, max: number}} GreyWindow */
/** @typedef {{id: number, points: Point[], suggestions: Suggestion[], round: number|null, window: GreyWindow|null,
 *   checks?: number[]}} Detail checks: indices of points to look at again */
/** @typedef {{id: number, name: string, width: number, height: number, state: string, check: boolean, doubt: number|null,
 *   group: string|null, problem: string|null, confirmed: number}} Summary */

const PATIENCE = 20000;
const FILES = { csv: "points.csv", tps: "points.tps", coco: "keypoints.json", deeplabcut: "CollectedData_labels.csv" };

/** What the server said no to. */
export class Refused extends Error {
  /**
   * @param {number} status
   * @param {string} message
   */
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The server does not answer, or answers that it is in trouble (then with its sentence): what was asked is asked again. */
export class Unreachable extends Error {
  /** @param {string} [message] the server's own */
  constructor(message = "") {
    super(message);
  }
}

export class Api {
  /** @param {string} token */
  constructor(token) {
    this.token = token;
  }

  project() {
    return this.#json("/api/project");
  }

  /** @param {number} id @returns {Promise<Detail>} */
  image(id) {
    return this.#json(`/api/image/${id}`);
  }

  statistics() {
    return this.#json("/api/statistics");
  }

  /** @param {number} after @param {string} order @returns {Promise<{id: number|null}>} */
  next(after, order) {
    return this.#json(`/api/next?after=${after}&order=${order}`);
  }

  actions(client, actions) {
    return this.#json("/api/actions", { client, actions });
  }

  undo(client, key) {
    return this.#json("/api/undo", { client, key });
  }

  names(client, names, key) {
    return this.#json("/api/names", { client, names, key });
  }

  fit() {
    return this.#json("/api/fit", {});
  }

  saveHead() {
    return this.#json("/api/head", {});
  }

  /** @param {string} format @returns {Promise<{blob: Blob, name: string}>} */
  async export(format) {
    const answer = await this.#ask("/api/export", { format });
    const said = /filename="?([^";]+)"?/.exec(answer.headers.get("Content-Disposition") ?? "");
    return { blob: await answer.blob(), name: said ? said[1] : FILES[format] };
  }

  /** @param {number} id @param {{low: number, high: number}|null} window @param {AbortSignal} [signal] */
  async picture(id, window, signal) {
    const query = window ? `?low=${window.low}&high=${window.high}` : "";
    return (await this.#ask(`/pictures/${id}${query}`, undefined, signal)).blob();
  }

  /** @param {number} id */
  thumbnail(id) {
    return `/thumbnails/${id}?token=${encodeURIComponent(this.token)}`;
  }

  events() {
    return new EventSource(`/api/events?token=${encodeURIComponent(this.token)}`);
  }

  async #json(path, body) {
    const answer = await this.#ask(path, body);
    return answer.json();
  }

  /** @returns {Promise<Response>} */
  async #ask(path, body, signal) {
    const request = { headers: { "X-Token": this.token }, cache: "no-store", signal: signal ?? AbortSignal.timeout(PATIENCE) };
    if (body !== undefined) {
      request.method = "POST";
      request.headers["Content-Type"] = "application/json";
      request.body = JSON.stringify(body);
    }
    let answer;
    try {
      answer = await fetch(path, request);
    } catch (error) {
      if (signal?.aborted) throw error;
      throw new Unreachable();
    }
    if (answer.ok) return answer;
    const message = await readError(answer);
    throw answer.status >= 500 ? new Unreachable(message) : new Refused(answer.status, message);
  }
}

/** @param {Response} answer */
async function readError(answer) {
  try {
    return (await answer.json()).error ?? answer.statusText;
  } catch {
    return answer.statusText || `status ${answer.status}`; // not JSON: a proxy's page, or the server died while writing
  }
}
