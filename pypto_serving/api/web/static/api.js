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

/** What the server said instead of an answer. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Ask for the API key; resolve to whether one was given. At most one dialog is open. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const field = h("input", { type: "password", autocomplete: "off", spellcheck: "false", id: "key-field", required: true, autofocus: true });
    field.value = sessionStorage.getItem(KEY) ?? "";
    const form = h(
      "form",
      { class: "stack", method: "dialog" },
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
    const response = await fetch(path, { ...init, headers });
    if (response.ok) return response;
    if (response.status === 401) {
      for (const listener of wanted) listener();
      if (!(quiet && declined) && (await askForKey())) continue;
    }
    throw new ServerError(response.status, await reason(response));
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
}

/** Yield the data of each server-sent event. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}
