// Talk to the server: the API key, errors in words, answers as they come.

import { h, openDialog } from "./dom.js";

const KEY = "pypto.key";
const wanted = [];
let asking = null;
let declined = false;

/** Whether this tab has a key, which it keeps until it closes. */
export const needsKey = () => sessionStorage.getItem(KEY) !== null;

/** Call `listener` when the server asks for a key. */
export const onKeyWanted = (listener) => wanted.push(listener);

const UNREACHABLE = "The server cannot be reached. It may have stopped, or the network is down. Check that it runs, then try again.";
const CUT_OFF = "The connection ended before the answer did: the server may have stopped. What came so far is kept. Check that the server runs, then try again.";
const NO_KEY = "The server wants an API key. Enter one with the key button at the top, then try again.";
const WRONG_KEY = "The server refuses this API key. Enter another one with the key button at the top, then try again.";

/** What the server said instead of an answer, or why there is none: status 0. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask for the API key, because the last one was `refused` or for the first time; resolve to whether one was given. */
export function askForKey(refused = false) {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", autocomplete: "off", spellcheck: "false", id: "key-field", required: true, autofocus: true, "aria-invalid": refused ? "true" : null, "aria-describedby": refused ? "key-wrong" : null });
    field.value = sessionStorage.getItem(KEY) ?? "";
    const form = h(
      "form",
      { class: "stack", method: "dialog" },
      refused ? h("p", { class: "error", role: "alert", id: "key-wrong" }, "The server refused this key. Check that it is complete, or ask who runs the server for another one.") : null,
      h("p", { class: "muted" }, "This server asks for a key. It stays in this tab and goes to this server only."),
      h("div", { class: "field" }, h("label", { for: "key-field" }, "API key"), field),
      h("div", { class: "row end" }, h("button", { class: "button primary" }, "Use this key")),
    );
    let given = false;
    form.addEventListener("submit", () => {
      given = true;
      sessionStorage.setItem(KEY, field.value.trim());
    });
    openDialog("API key", form).addEventListener("close", () => {
      asking = null;
      declined = !given;
      resolve(given);
    });
  });
  return asking;
}

/** Fetch from this server. Ask for the key where it is missing or wrong. Throw ServerError for any other refusal.
 *
 * What the page fetches of its own accord is `quiet`: it does not ask again once the user has declined.
 */
export async function ask(path, init = {}, { quiet = false } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...init.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
    const response = await fetched(path, { ...init, headers });
    if (response.ok) return response;
    if (response.status === 401) {
      for (const listener of wanted) listener();
      if (!(quiet && declined) && (await askForKey(Boolean(key)))) continue;
      throw new ServerError(401, key ? WRONG_KEY : NO_KEY);
    }
    throw new ServerError(response.status, await reason(response));
  }
}

/** Fetch; say in words that the server is gone. */
async function fetched(path, init) {
  try {
    return await fetch(path, init);
  } catch (error) {
    throw error.name === "AbortError" ? error : new ServerError(0, UNREACHABLE);
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || `${response.status} ${response.statusText}`;
  }
}

/** Post a chat and yield its events as they come. Throw ServerError if one of them is an error. */
export async function* streamChat(body, signal) {
  const response = await ask("v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const event = JSON.parse(data);
    if (event.error) throw new ServerError(500, event.error.message);
    yield event;
  }
  throw new ServerError(0, CUT_OFF);
}

/** Yield the data of each server-sent event. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read().catch((error) => {
      throw error.name === "AbortError" ? error : new ServerError(0, CUT_OFF);
    });
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
