// The playground: conversations on the left, the thread in the middle, settings on the right.

import { emptyAnswer, generate } from "./answer.js";
import { ask } from "./api.js";
import { furnish } from "./chrome.js";
import { h, icon, iconButton, openDialog, say } from "./dom.js";
import { ago } from "./format.js";
import { code } from "./markdown.js";
import { MessageView } from "./message.js";
import { asCurl, asPython, requestBody } from "./request.js";
import { showSettings } from "./settings.js";
import { listChats, loadChat, loadSettings, removeChat, saveChat, saveSettings } from "./store.js";
import { add, newChat, path, pathTo, remove, siblings, turn } from "./tree.js";

const NARROW = matchMedia("(max-width: 900px)");
const NEAR_END = 80;
const at = (id) => document.getElementById(id);
const thread = at("thread");
const composer = at("composer");

let chat = startingChat();
let models = [];
let running = null; // {node, stop} of the answer that comes
let views = new Map();

function startingChat() {
  const newest = listChats()[0];
  return (newest && loadChat(newest.id)) ?? newChat(loadSettings() ?? {});
}

// What the buttons of messages do.

const does = {
  edit(node, text) {
    const { role, call_id, name } = node;
    const kept = node.role === "assistant" ? { calls: node.calls, reasoning: node.reasoning, model: node.model } : { call_id, name };
    const version = add(chat, node.parent, { role, content: text, ...kept });
    redraw();
    if (role !== "assistant") answer(version);
    else keep();
  },
  regenerate: (node) => answer(chat.nodes[node.parent]),
  remove(node) {
    remove(chat, node);
    keep();
    redraw();
  },
  turn(node, step) {
    turn(chat, node, step);
    keep();
    redraw();
  },
  answerCalls(node, results) {
    let last = node;
    node.calls.forEach((call, i) => {
      last = add(chat, last.id, { role: "tool", call_id: call.id, name: call.name, content: results[i] });
    });
    answer(last);
  },
  redraw: () => redraw(),
};

/** Generate an answer to the messages up to `node`. */
async function answer(node) {
  running?.stop();
  let body;
  try {
    body = requestBody(chat.settings, pathTo(chat, node));
  } catch (error) {
    say(`A setting is no JSON: ${error.message}`);
    return openDialog("A setting is no JSON", h("p", {}, error.message));
  }
  const control = new AbortController();
  const reply = add(chat, node?.id ?? "", emptyAnswer(chat.settings.model));
  const own = chat;
  running = { node: reply, stop: () => control.abort() };
  showRunning();
  redraw();
  thread.scrollTop = thread.scrollHeight;
  say("Answering");
  let due = false;
  await generate(reply, body, control.signal, () => {
    if (due) return;
    due = true;
    requestAnimationFrame(() => {
      due = false;
      if (own === chat && running?.node === reply) showOne(reply);
    });
  });
  if (running?.node === reply) running = null;
  showRunning();
  if (own === chat || loadChat(own.id)) {
    own.updated = Date.now();
    saveChat(own);
  }
  showChats();
  if (own === chat) redraw();
  say(reply.error ? `Failed: ${reply.error}` : `Answer complete, ${reply.usage?.completion_tokens ?? "some"} tokens`);
}

// Thread.

function redraw() {
  const shown = path(chat);
  views = new Map(shown.map((node) => [node.id, views.get(node.id) ?? new MessageView(node, does)]));
  const elements = shown.map((node) => views.get(node.id).element);
  if (!elements.length) thread.replaceChildren(welcome());
  else if (elements.some((element, i) => element !== thread.children[i]) || elements.length !== thread.children.length) thread.replaceChildren(...elements);
  for (const node of shown) showOne(node);
}

function showOne(node) {
  const view = views.get(node.id);
  if (!view) return;
  const atEnd = thread.scrollHeight - thread.scrollTop - thread.clientHeight < NEAR_END;
  const all = siblings(chat, node);
  view.show({ streaming: running?.node === node, place: all.indexOf(node), count: all.length, last: !chat.chosen[node.id] });
  if (atEnd) thread.scrollTop = thread.scrollHeight;
}

function welcome() {
  const suggestions = ["What is 37 + 45?", "Spell the word planet.", "Which day comes after Monday?"];
  const buttons = suggestions.map((text) => h("button", { type: "button", class: "button", click: () => send(text) }, text));
  return h("div", { class: "welcome" }, h("h2", {}, "Ask the model something"), h("p", { class: "muted" }, "Conversations stay in this browser."), h("div", { class: "suggestions" }, buttons));
}

// Composer.

const input = h("textarea", { rows: 1, placeholder: "Message", "aria-label": "Message", autofocus: true });
const submit = h("button", { class: "icon-button send", "aria-label": "Send", title: "Send" }, icon("send"));

function furnishComposer() {
  composer.append(h("div", { class: "box" }, input, submit), h("p", { class: "hint" }, h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift Enter"), " breaks the line, ", h("kbd", {}, "Esc"), " stops"));
  composer.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) running.stop();
    else if (input.value.trim()) {
      send(input.value);
      input.value = "";
    }
  });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) composer.requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) running.stop();
  });
}

function send(text) {
  const last = path(chat).at(-1);
  chat.title ||= text.trim().replace(/\s+/g, " ").slice(0, 60);
  const node = add(chat, last?.id ?? "", { role: "user", content: text });
  keep();
  answer(node);
}

function showRunning() {
  const label = running ? "Stop" : "Send";
  submit.replaceChildren(icon(running ? "stop" : "send"));
  submit.setAttribute("aria-label", label);
  submit.title = label;
}

// Conversations.

function open(next) {
  running?.stop();
  chat = next;
  views.clear();
  useServedModel();
  showPanel();
  showChats();
  redraw();
  thread.scrollTop = thread.scrollHeight;
  if (NARROW.matches) toggle("chats", false);
  input.focus();
}

function keep() {
  chat.updated = Date.now();
  saveChat(chat);
  showChats();
}

function showChats() {
  const fresh = h("button", { type: "button", class: "button", click: () => open(newChat({ ...chat.settings })) }, icon("plus"), "New chat");
  const list = listChats().map(({ id, title, updated }) => {
    const pick = h("button", { type: "button", class: "pick", "aria-current": id === chat.id ? "true" : null, click: () => open(loadChat(id)) }, h("span", {}, title || "Untitled"), h("time", { class: "muted figures" }, ago(updated)));
    const drop = iconButton("trash", `Delete ${title || "Untitled"}`, () => {
      removeChat(id);
      if (id === chat.id) open(newChat({ ...chat.settings }));
      else showChats();
    });
    return h("li", {}, pick, drop);
  });
  at("chats").replaceChildren(fresh, h("ul", { class: "list" }, list));
}

// Settings and export.

function showPanel() {
  showSettings(at("settings"), chat.settings, models, () => {
    saveSettings(chat.settings);
    if (Object.keys(chat.nodes).length) saveChat(chat);
  });
}

function showExport() {
  const messages = path(chat);
  while (messages.at(-1)?.role === "assistant") messages.pop();
  const base = new URL("v1", document.baseURI).href;
  const hasKey = !at("key").hidden;
  const content = h("div", { class: "stack" });
  try {
    const body = requestBody(chat.settings, messages.length ? messages : [{ role: "user", content: "Hello" }]);
    content.append(code(asCurl(body, base, hasKey), "curl"), code(asPython(body, base, hasKey), "python"));
  } catch (error) {
    content.append(h("p", { class: "error" }, `A setting is no JSON: ${error.message}`));
  }
  openDialog("Export", content, { wide: true });
}

/** Show or hide a side; a narrow window has room for one. */
function toggle(id, open) {
  if (open && NARROW.matches) toggle(id === "chats" ? "settings" : "chats", false);
  at(id).hidden = !open;
  at(`show-${id}`).setAttribute("aria-expanded", String(open));
}

function furnishSides() {
  for (const [id, name] of [["chats", "panel"], ["settings", "sliders"]]) {
    const button = at(`show-${id}`);
    button.append(icon(name));
    button.title = button.getAttribute("aria-label");
    button.addEventListener("click", () => toggle(id, at(id).hidden));
    toggle(id, !NARROW.matches);
    NARROW.addEventListener("change", () => toggle(id, !NARROW.matches));
  }
  at("export").addEventListener("click", showExport);
}

/** Another server may serve other models than the one that the conversation was with. */
function useServedModel() {
  if (models.length && !models.some(({ id }) => id === chat.settings.model)) chat.settings.model = models[0].id;
}

async function loadModels() {
  try {
    models = (await (await ask("v1/models")).json()).data;
    useServedModel();
    showPanel();
  } catch (error) {
    say(`The models cannot be listed: ${error.message}`);
  }
}

furnish();
furnishSides();
furnishComposer();
showChats();
showPanel();
redraw();
await loadModels();
