/** Where the picture is on the screen: a scale and a shift, pure arithmetic. */

/** @typedef {{scale: number, x: number, y: number}} View screen = image · scale + (x, y) */
/** @typedef {{width: number, height: number}} Size */

const MARGIN = 24;
const MOST = 64;

/** The whole picture in the middle. @param {Size} image @param {Size} screen @returns {View} */
export function fit(image, screen) {
  const room = { width: Math.max(screen.width - 2 * MARGIN, 32), height: Math.max(screen.height - 2 * MARGIN, 32) };
  const scale = Math.min(room.width / image.width, room.height / image.height);
  return { scale, x: (screen.width - scale * image.width) / 2, y: (screen.height - scale * image.height) / 2 };
}

/** Larger by a factor; the point under (x, y) of the screen stays there. @param {View} view @returns {View} */
export function zoom(view, factor, x, y, image, screen) {
  const least = Math.min(fit(image, screen).scale / 2, 1);
  const most = Math.max(MOST, fit(image, screen).scale * 8);
  const scale = Math.min(Math.max(view.scale * factor, least), most);
  const ratio = scale / view.scale;
  return hold({ scale, x: x - ratio * (x - view.x), y: y - ratio * (y - view.y) }, image, screen);
}

/** @param {View} view @returns {View} */
export function pan(view, dx, dy, image, screen) {
  return hold({ ...view, x: view.x + dx, y: view.y + dy }, image, screen);
}

/** A part of the picture always stays in sight. */
function hold(view, image, screen) {
  const keep = Math.min(80, screen.width / 3, screen.height / 3);
  const clamp = (value, size, room) => Math.min(Math.max(value, keep - view.scale * size), room - keep);
  return { ...view, x: clamp(view.x, image.width, screen.width), y: clamp(view.y, image.height, screen.height) };
}

/** Move the view so that this place of the screen is not at the rim. */
export function reveal(view, x, y, image, screen) {
  const rim = Math.min(60, screen.width / 5, screen.height / 5);
  const push = (value, room) => (value < rim ? rim - value : value > room - rim ? room - rim - value : 0);
  return pan(view, push(x, screen.width), push(y, screen.height), image, screen);
}

export function toScreen(view, x, y) {
  return { x: x * view.scale + view.x, y: y * view.scale + view.y };
}

export function toImage(view, x, y) {
  return { x: (x - view.x) / view.scale, y: (y - view.y) / view.scale };
}
