/** The learner and the work so far, in the panel. */

import { byId, count, make, setText } from "./dom.js";
import { drawChart } from "./chart.js";

const FIRST_FIT = 5;

export class Progress {
  #state;

  /** @param {import("./state.js").State} state */
  constructor(state) {
    this.#state = state;
    for (const name of ["statistics", "progress", "images"]) state.addEventListener(name, () => this.#later());
  }

  #later() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => {
      byId("learner").replaceChildren(...this.#tellLearner());
      byId("work").replaceChildren(...this.#tellWork());
      this.#showChip();
    });
  }

  /** The learner in three words, for the top of the page. */
  #showChip() {
    const { fit, features } = this.#state.progress;
    const last = this.#rounds().at(-1);
    const error = last ? `Error ${round(last.error_pixels)} px` : "";
    const share = features?.total && features.done < features.total ? `Looking at images ${Math.floor((100 * features.done) / features.total)} %` : "";
    setText(byId("fit-chip"), fit?.state === "running" ? "Learning …" : error || share);
    byId("fit-chip").hidden = !byId("fit-chip").textContent;
  }

  #rounds() {
    return (this.#state.statistics?.rounds ?? []).filter((round) => Number.isFinite(round.error_pixels));
  }

  #tellLearner() {
    const { features, fit } = this.#state.progress;
    const rounds = this.#rounds();
    const parts = [...tellFeatures(features), this.#tellFit(fit, features)];
    if (!rounds.length) return parts;
    const last = rounds.at(-1);
    const percent = Number.isFinite(last.error_percent) ? ` (${round(last.error_percent)} % of the longer side)` : "";
    parts.push(make("p", { class: "figure-line" }, make("strong", { class: "figure", text: `${round(last.error_pixels)} px` }), ` mean distance${percent}`));
    parts.push(drawChart(rounds));
    const about = "Measured on labelled images that the fit had not seen, in pixels of the original.";
    return [...parts, make("p", { class: "muted small", text: about }), this.#tellBias()].filter(Boolean);
  }

  /** A fit that is checked against what it has suggested looks better than it is. */
  #tellBias() {
    const { accepted = 0, moved = 0, hand = 0 } = this.#state.statistics;
    const share = accepted / Math.max(accepted + moved + hand, 1);
    if (share <= 0.5) return null;
    const text = `Most labels (${Math.round(100 * share)} %) are accepted suggestions: the true error is larger.`;
    return make("p", { class: "bias small", text });
  }

  #tellFit(fit, features) {
    const labelled = [...this.#state.images.values()].filter((image) => image.state === "labelled").length;
    const rounds = this.#state.statistics?.rounds ?? [];
    if (fit?.state === "failed") return tell("The fit failed", fit.message ?? "");
    if (fit?.state === "running") return tell("Learning …", `from ${count(labelled, "labelled image")}; go on meanwhile`, "busy");
    if (labelled < FIRST_FIT && !rounds.length) {
      const left = FIRST_FIT - labelled;
      return tell("Suggestions come soon", `after ${FIRST_FIT} labelled images: ${left === 1 ? "one" : left} to go`);
    }
    if (!rounds.length) return tell("Waiting", features.done < features.total ? "for the features of the images" : "for the first fit");
    const last = rounds.at(-1);
    const seconds = Number.isFinite(last.seconds) ? ` in ${last.seconds.toFixed(1)} s` : "";
    return tell("Up to date", `learnt from ${count(last.labelled, "image")}${seconds}`);
  }

  #tellWork() {
    const said = this.#state.statistics;
    if (!said) return [make("p", { class: "muted", text: "Nothing yet." })];
    const kinds = [["accepted", "accepted without a move", said.accepted], ["moved", "moved", said.moved], ["hand", "placed by hand", said.hand], ["absent", "cannot be seen", said.absent]];
    const total = kinds.reduce((sum, [, , number]) => sum + (number ?? 0), 0);
    const lines = kinds.map(([kind, word, number]) => tellKind(kind, word, number ?? 0, total));
    return [make("dl", { class: "kinds" }, ...lines), tellTime(said.accepted + said.moved > 0 ? said.seconds_saved : null)];
  }
}

function tellKind(kind, word, number, total) {
  const share = total ? Math.round((100 * number) / total) : 0;
  const bar = make("meter", { class: `bar ${kind}`, min: 0, max: Math.max(total, 1), value: number, "aria-label": `${word}: ${share} %` });
  return make("div", {}, make("dt", { text: word }), make("dd", { text: number.toLocaleString("en") }), make("dd", { class: "bar-cell" }, bar));
}

function tellTime(seconds) {
  if (!Number.isFinite(seconds)) return make("p", { class: "muted small", text: "Time saved: known when some points were placed by hand and some were suggested." });
  const text = seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`;
  if (seconds <= 0) return make("p", { class: "muted small", text: "No time saved yet, by an estimate from your own pace." });
  const about = "An estimate: what the accepted and moved points would have taken at your own pace by hand, less what they took.";
  return make("div", {}, make("p", { class: "figure-line" }, make("strong", { class: "figure", text }), " saved, about"), make("p", { class: "muted small", text: about }));
}

function tellFeatures(features) {
  if (!features?.total || features.done >= features.total) return [];
  const label = `Looking at the images: ${features.done} of ${features.total}`;
  return [make("p", { class: "small", text: label }), make("progress", { max: features.total, value: features.done, "aria-label": label })];
}

function tell(title, rest, kind = "") {
  return make("p", { class: `fit-line ${kind}` }, make("strong", { text: title }), rest ? ` ${rest}` : "");
}

function round(value) {
  return Number(value.toPrecision(3));
}
