/** A magnifier in a corner of the image, on the side where the hand is not. */

const SIZE = 176;
const TIMES = 3;

export class Loupe {
  #canvas;

  /** @param {HTMLCanvasElement} canvas */
  constructor(canvas) {
    this.#canvas = canvas;
  }

  hide() {
    this.#canvas.hidden = true;
  }

  /**
   * @param {import("./pictures.js").Picture} picture
   * @param {{x: number, y: number}} place in pixels of the original
   * @param {number} scale of the view
   * @param {{x: number, y: number, width: number, height: number}} hand where the pointer is, in a stage of this size
   */
  show(picture, place, scale, hand) {
    const canvas = this.#canvas;
    const ratio = devicePixelRatio;
    canvas.hidden = false;
    canvas.classList.toggle("at-right", hand.x < hand.width / 2);
    canvas.width = canvas.height = SIZE * ratio;
    const context = canvas.getContext("2d");
    const zoom = Math.min(Math.max(scale * TIMES, 3), 48);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.imageSmoothingEnabled = false;
    this.#drawPart(context, picture, place, zoom);
    this.#drawCross(context, place);
  }

  #drawPart(context, picture, place, zoom) {
    const half = SIZE / zoom / 2;
    const left = Math.max(place.x - half, 0);
    const top = Math.max(place.y - half, 0);
    const wide = Math.min(place.x + half, picture.width) - left;
    const high = Math.min(place.y + half, picture.height) - top;
    if (wide <= 0 || high <= 0) return;
    const at = [(left - place.x + half) * zoom, (top - place.y + half) * zoom];
    context.drawImage(picture.whole, left, top, wide, high, ...at, wide * zoom, high * zoom);
  }

  #drawCross(context, place) {
    const middle = SIZE / 2;
    for (const [color, width] of [["rgb(0 0 0 / 0.5)", 3.4], ["#fff", 1.4]]) {
      context.strokeStyle = color;
      context.lineWidth = width;
      context.beginPath();
      for (const [from, to] of [[0, middle - 7], [middle + 7, SIZE]]) {
        context.moveTo(from, middle);
        context.lineTo(to, middle);
        context.moveTo(middle, from);
        context.lineTo(middle, to);
      }
      context.stroke();
    }
    context.fillStyle = "rgb(0 0 0 / 0.7)";
    context.fillRect(0, SIZE - 22, SIZE, 22);
    context.fillStyle = "#fff";
    context.font = "12px system-ui, sans-serif";
    context.textAlign = "center";
    context.fillText(`${place.x.toFixed(1)}, ${place.y.toFixed(1)}`, middle, SIZE - 7);
  }
}
