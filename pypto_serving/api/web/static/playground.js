// The playground: conversations on the left, the thread in the middle, settings on the right.

import { emptyAnswer, generate } from "./answer.js";
import { ask } from "./api.js";
import { ChatList } from "./chats.js";
import { furnish } from "./chrome.js";
import { code } from "./code.js";
import { Composer } from "./composer.js";
import { download, h, icon, notify, openDialog, say } from "./dom.js";
import { MessageView } from "./message.js";
import { asCurl, asPython, problems, requestBody } from "./request.js";
import { showSetting, showSettings } from "./settings.js";
import { listChats, loadChat, loadSettings, saveChat, saveSettings } from "./store.js";
import { writeChats } from "./transfer.js";
import { add, addBeside, newChat, path, pathTo, remove, siblings, turn } from "./tree.js";

const NARROW = matchMedia("(max-width: 900px)");
const NEAR_END = 80;
const SIDES = { chats: "panel", settings: "sliders" };
const at = (id) => document.getElementById(id);
const thread = at("thread");

let chat = startingChat();
let models = [];
const runs = new Map(); // {chat, nodes, stop} of the answers that come, by id of their chat
const unread = new Set(); // ids of the chats whose answer came while another was open
let views = new Map();

const composer = new Composer(at("composer"), { send, stop: () => runs.get(chat.id)?.stop() });
const chats = new ChatList(
  at("chats"),
  {
    open: (id) => open(runs.get(id)?.chat ?? loadChat(id) ?? newChat({ ...chat.settings })),
    fresh: () => open(newChat({ ...chat.settings })),
    dropped(id) {
      const own = runs.get(id)?.chat ?? (id === chat.id ? chat : null);
      runs.get(id)?.stop();
      if (id === chat.id) show(newChat({ ...chat.settings }));
      return own;
    },
    restored: (restored) => open(restored),
    renamed(id, title) {
      const own = runs.get(id)?.chat ?? (id === chat.id ? chat : loadChat(id));
      own.title = title;
      saveChat(own);
    },
  },
  (id) => ({ current: id === chat.id, busy: runs.has(id), unread: unread.has(id) }),
);

function startingChat() {
  const newest = listChats()[0];
  return (newest && loadChat(newest.id)) ?? newChat(loadSettings() ?? {});
}

// What the buttons of messages do. Those that ask the model return false if a setting is wrong, and change nothing then.

const does = {
  edit(node, text) {
    const { role, call_id, name, files } = node;
    if (role !== "assistant" && !isReady()) return false;
    const kept = role === "assistant" ? { calls: node.calls, reasoning: node.reasoning, model: node.model } : { call_id, name, files };
    const version = add(chat, node.parent, { role, content: text, ...kept });
    if (role !== "assistant") answer(version);
    else keep();
    return true;
  },
  regenerate: (node) => isReady() && answer(chat.nodes[node.parent]),
  remove(node) {
    const own = chat;
    const before = structuredClone({ nodes: own.nodes, chosen: own.chosen });
    if (runs.get(own.id)?.nodes.some((each) => pathTo(own, each).includes(node))) runs.get(own.id).stop();
    remove(own, node);
    keep();
    redraw();
    notify("Deleted the message and what followed it", "Undo", () => {
      Object.assign(own, before);
      saveChat(own);
      if (own === chat) show(own);
    });
  },
  turn(node, step) {
    turn(chat, node, step);
    keep();
    redraw();
  },
  answerCalls(node, results) {
    if (!isReady()) return;
    let last = node;
    node.calls.forEach((call, i) => {
      last = add(chat, last.id, { role: "tool", call_id: call.id, name: call.name, content: results[i] });
    });
    answer(last);
  },
  redraw: () => redraw(),
};

/** Whether a request can be made of the settings; show what is wrong otherwise. */
function isReady() {
  const [wrong] = problems(chat.settings);
  if (!wrong) return true;
  toggle("settings", true);
  notify(`Not sent, since a setting is wrong. ${wrong.label}: ${wrong.problem[0].toLowerCase()}${wrong.problem.slice(1)}`);
  showSetting(wrong.name);
  return false;
}

/** Generate an answer to the messages up to `node`; it goes on while another conversation is open. */
async function answer(node) {
  const own = chat;
  runs.get(own.id)?.stop();
  const body = requestBody(own.settings, pathTo(own, node));
  const control = new AbortController();
  const parent = node?.id ?? "";
  const nodes = [add(own, parent, emptyAnswer(own.settings.model))];
  const run = { chat: own, nodes, stop: () => control.abort() };
  runs.set(own.id, run);
  keep();
  composer.showRunning(true);
  redraw();
  thread.scrollTop = thread.scrollHeight;
  say("Answering");
  const due = new Set();
  const changed = (reply) => {
    if (due.has(reply)) return;
    due.add(reply);
    requestAnimationFrame(() => {
      due.delete(reply);
      if (own === chat && runs.get(own.id) === run) showOne(reply);
    });
  };
  await generate(nodes, () => addBeside(own, parent, emptyAnswer(own.settings.model)), body, control.signal, changed);
  if (runs.get(own.id) === run) runs.delete(own.id);
  if (own === chat || loadChat(own.id)) {
    own.updated = Date.now();
    saveChat(own);
    if (own !== chat) unread.add(own.id);
    const [first] = nodes;
    say(first.error ? `Failed: ${first.error}` : `Answer complete, ${first.usage?.completion_tokens ?? "some"} tokens`);
  }
  chats.show();
  if (own !== chat) return;
  composer.showRunning(runs.has(own.id));
  redraw();
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
  const streaming = Boolean(runs.get(chat.id)?.nodes.includes(node));
  view.show({ streaming, place: all.indexOf(node), count: all.length, last: !chat.chosen[node.id] });
  if (atEnd) thread.scrollTop = thread.scrollHeight;
}

function welcome() {
  const suggestions = ["What is 37 + 45?", "Spell the word planet.", "Which day comes after Monday?"];
  const buttons = suggestions.map((text) => h("button", { type: "button", class: "button", click: () => send(text, []) }, text));
  return h("div", { class: "welcome" }, h("h2", {}, "Ask the model something"), h("p", { class: "muted" }, "Conversations stay in this browser."), h("div", { class: "suggestions" }, buttons));
}

function send(text, files) {
  if (!isReady()) return false;
  const last = path(chat).at(-1);
  chat.title ||= (text.trim() || files[0].name).replace(/\s+/g, " ").slice(0, 60);
  answer(add(chat, last?.id ?? "", { role: "user", content: text, ...(files.length ? { files } : {}) }));
  return true;
}

// Conversations.

function open(next) {
  show(next);
  if (NARROW.matches) toggle("chats", false);
  composer.input.focus();
}

function show(next) {
  chat = next;
  unread.delete(chat.id);
  views.clear();
  useServedModel();
  showPanel();
  composer.showRunning(runs.has(chat.id));
  chats.show();
  redraw();
  thread.scrollTop = thread.scrollHeight;
}

function keep() {
  chat.updated = Date.now();
  saveChat(chat);
  chats.show();
}

// Settings and export.

function showPanel() {
  const own = chat;
  showSettings(at("settings"), own.settings, models, () => {
    saveSettings(own.settings);
    if (Object.keys(own.nodes).length) saveChat(own);
  });
}

function showExport() {
  const messages = path(chat);
  while (messages.at(-1)?.role === "assistant") messages.pop();
  const base = new URL("v1", document.baseURI).href;
  const hasKey = !at("key").hidden;
  const content = h("div", { class: "stack" });
  const wrong = problems(chat.settings);
  if (wrong.length) content.append(h("p", { class: "error" }, wrong.map(({ label, problem }) => `${label}: ${problem}`).join("; ")));
  else {
    const body = requestBody(chat.settings, messages.length ? messages : [{ role: "user", content: "Hello" }]);
    content.append(code(asCurl(body, base, hasKey), "curl"), code(asPython(body, base, hasKey), "python"));
  }
  const save = h("button", { type: "button", class: "button", click: () => download("conversation.json", writeChats([chat])) }, icon("download"), "Save this conversation as a file");
  content.append(h("div", { class: "row end" }, save));
  openDialog("Export the next request", content, { wide: true });
}

/** Show or hide a side; a narrow window has room for one. */
function toggle(id, open) {
  if (open && NARROW.matches) toggle(id === "chats" ? "settings" : "chats", false);
  at(id).hidden = !open;
  at(`show-${id}`).setAttribute("aria-expanded", String(open));
}

function furnishSides() {
  for (const [id, name] of Object.entries(SIDES)) {
    const button = at(`show-${id}`);
    button.append(icon(name));
    button.title = button.getAttribute("aria-label");
    button.addEventListener("click", () => toggle(id, at(id).hidden));
    toggle(id, !NARROW.matches);
    NARROW.addEventListener("change", () => toggle(id, !NARROW.matches));
  }
  at("export").append(icon("code"));
  at("export").title = "Export";
  at("export").addEventListener("click", showExport);
  document.querySelector("main").addEventListener("pointerdown", () => NARROW.matches && Object.keys(SIDES).forEach((id) => toggle(id, false)));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    const shown = NARROW.matches && Object.keys(SIDES).find((id) => !at(id).hidden);
    if (!shown) return runs.get(chat.id)?.stop();
    toggle(shown, false);
    at(`show-${shown}`).focus();
  });
}

/** Another server may serve other models than the one that the conversation was with. */
function useServedModel() {
  if (models.length && !models.some(({ id }) => id === chat.settings.model)) chat.settings.model = models[0].id;
}

async function loadModels() {
  const notice = at("notice");
  notice.hidden = true;
  try {
    models = (await (await ask("v1/models")).json()).data;
    useServedModel();
    showPanel();
  } catch (error) {
    notice.replaceChildren(h("span", {}, error.message), h("button", { type: "button", class: "button small", click: loadModels }, "Try again"));
    notice.hidden = false;
  }
}

/** Keep what came so far of answers that the browser is about to end. */
addEventListener("pagehide", () => {
  for (const { chat: own, nodes } of runs.values()) {
    for (const node of nodes) node.finish ??= "stopped";
    saveChat(own);
  }
});

furnish();
furnishSides();
chats.show();
showPanel();
redraw();
await loadModels();
