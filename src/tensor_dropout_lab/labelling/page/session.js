/** Who this tab is: the token of the address it was opened with, and a name for undo. */

/** @typedef {{token: string, client: string}} Session */

const HEX = "0123456789abcdef";

/** @param {number} length */
export function randomHex(length) {
  const numbers = crypto.getRandomValues(new Uint8Array(length));
  return Array.from(numbers, (number) => HEX[number % 16]).join("");
}

/** Take the token out of the address bar; it stays in this tab only. */
function takeToken() {
  const address = new URL(location.href);
  const given = address.searchParams.get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    address.searchParams.delete("token");
    history.replaceState(null, "", address);
  }
  return sessionStorage.getItem("token") ?? "";
}

/**
 * Hold a name as long as this tab lives; false if another tab holds it.
 * @param {string} name
 * @returns {Promise<boolean>}
 */
export function hold(name) {
  return new Promise((answer) => {
    const keep = (lock) => {
      answer(lock !== null);
      return lock === null ? undefined : new Promise(() => {});
    };
    navigator.locks.request(name, { ifAvailable: true }, keep);
  });
}

/** A tab that is doubled has its sessionStorage doubled, too: the second tab takes a name of its own. */
async function takeClient() {
  let client = sessionStorage.getItem("client");
  if (!client || !(await hold(`client-${client}`))) {
    client = randomHex(8);
    await hold(`client-${client}`);
  }
  sessionStorage.setItem("client", client);
  return client;
}

/** @returns {Promise<Session>} */
export async function startSession() {
  return { token: takeToken(), client: await takeClient() };
}

/**
 * Tabs of one folder share a new token: after a restart of the server it is enough to open its new address once.
 * @param {string} token
 * @param {string} out the folder of the labels: a server of another folder may have the same port
 * @param {(token: string) => void} take called with the token of another tab
 */
export function shareToken(token, out, take) {
  const channel = new BroadcastChannel("token");
  channel.addEventListener("message", ({ data }) => {
    if (data.out !== out || data.token === sessionStorage.getItem("token")) return;
    sessionStorage.setItem("token", data.token);
    take(data.token);
  });
  channel.postMessage({ token, out });
}
