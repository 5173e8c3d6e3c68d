// Conversations as files: written as JSON, and read again from whatever somebody has.

import { add, newChat, newId } from "./tree.js";

const FORMAT = "pypto-serving conversations";
const ROLES = new Set(["user", "assistant", "tool"]);
const TEXTS = ["content", "reasoning", "call_id", "name", "model", "finish", "error"];

/** Write conversations as the text of a file. */
export const writeChats = (chats) => JSON.stringify({ format: FORMAT, chats }, (name, value) => (name === "tokens" ? undefined : value), 1);

/** Read conversations from the text of a file: ours, or a list of OpenAI's messages. Throw Error that says what is wrong. */
export function readChats(text) {
  let found;
  try {
    found = JSON.parse(text);
  } catch {
    throw new Error("it is not JSON");
  }
  const messages = Array.isArray(found) ? found : found?.messages;
  if (Array.isArray(messages)) return [fromMessages(messages)];
  if (!Array.isArray(found?.chats)) throw new Error("it holds no conversations");
  return found.chats.map(known);
}

/** Take over what is known of a conversation, under new names; throw Error where it is not one. */
function known(chat) {
  const wrong = new Error("a conversation in it is damaged");
  const old = Object.entries(chat?.nodes ?? {});
  const ids = new Map([["", ""], ...old.map(([id]) => [id, newId()])]);
  const made = { ...newChat(plain(chat?.settings)), title: String(chat?.title ?? "").slice(0, 200), updated: Number(chat?.updated) || Date.now() };
  for (const [id, node] of old) {
    if (!ROLES.has(node?.role) || typeof node.content !== "string" || !ids.has(node.parent)) throw wrong;
    const kept = { id: ids.get(id), parent: ids.get(node.parent), role: node.role };
    for (const name of TEXTS) if (typeof node[name] === "string") kept[name] = node[name];
    if (node.role === "assistant") Object.assign(kept, { calls: calls(node.calls), reasoning: kept.reasoning ?? "", tokens: [] });
    if (Array.isArray(node.files)) kept.files = node.files.map((file) => ({ name: String(file?.name), text: String(file?.text) }));
    made.nodes[kept.id] = kept;
  }
  for (const node of Object.values(made.nodes)) if (!reachesRoot(made, node)) throw wrong;
  for (const [parent, child] of Object.entries(chat?.chosen ?? {})) {
    const chosen = made.nodes[ids.get(child)];
    if (chosen && chosen.parent === ids.get(parent)) made.chosen[chosen.parent] = chosen.id;
  }
  return made;
}

/** Whether the messages before `node` end: none comes before itself. */
function reachesRoot(chat, node) {
  let steps = Object.keys(chat.nodes).length;
  for (let at = node; at; at = chat.nodes[at.parent]) if (steps-- <= 0) return false;
  return true;
}

function fromMessages(messages) {
  const made = newChat({});
  let last = "";
  for (const { role, content, tool_calls: tools, tool_call_id: id } of messages.map(Object)) {
    const text = Array.isArray(content) ? content.map((part) => part?.text ?? "").join("") : String(content ?? "");
    if (role === "system" || role === "developer") made.settings.system = [made.settings.system, text].filter(Boolean).join("\n\n");
    else if (!ROLES.has(role)) throw new Error(`a message in it has the role ${JSON.stringify(role)}`);
    else {
      const more = { user: {}, tool: { call_id: String(id ?? ""), name: "function" }, assistant: { reasoning: "", tokens: [], calls: calls(tools?.map?.((call) => ({ id: call?.id, ...call?.function }))) } };
      last = add(made, last, { role, content: text, ...more[role] }).id;
      if (role === "user") made.title ||= text.trim().slice(0, 60);
    }
  }
  if (!last) throw new Error("it holds no messages");
  return made;
}

const calls = (list) => (Array.isArray(list) ? list.map((call) => ({ id: String(call?.id ?? ""), name: String(call?.name ?? ""), arguments: String(call?.arguments ?? "") })) : []);

/** The settings that are texts or flags. */
const plain = (settings) => Object.fromEntries(Object.entries(settings ?? {}).filter(([, value]) => ["string", "boolean"].includes(typeof value)));
