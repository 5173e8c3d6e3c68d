// Conversations in localStorage, within bounds: the oldest leave when there are too many, or too large ones.

import { notify } from "./dom.js";

const PREFIX = "pypto.chat.";
const SETTINGS = "pypto.settings";
const MAX_CHATS = 100;
const MAX_CHARS = 3_000_000;

/** Titles and times of the conversations that have `wanted` in a title or a message, the newest first. */
export function listChats(wanted = "") {
  const sought = wanted.trim().toLowerCase();
  const has = ({ title, nodes }) => [title, ...Object.values(nodes).map(({ content }) => content)].some((text) => text?.toLowerCase().includes(sought));
  return (sought ? chats().filter(has) : chats()).map(({ id, title, updated }) => ({ id, title, updated }));
}

/** All conversations whole, the newest first. */
export const allChats = () => chats();

export function loadChat(id) {
  return read(PREFIX + id);
}

/** Keep a conversation; log-probabilities are not kept, since they are large. */
export function saveChat(chat) {
  write(PREFIX + chat.id, JSON.stringify(chat, (name, value) => (name === "tokens" ? undefined : value)));
}

export function removeChat(id) {
  localStorage.removeItem(PREFIX + id);
}

/** The settings of the last conversation, for the next one. */
export const loadSettings = () => read(SETTINGS);

export const saveSettings = (settings) => write(SETTINGS, JSON.stringify(settings));

function chats() {
  const keys = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX));
  return keys.map(read).filter(Boolean).sort((one, other) => other.updated - one.updated);
}

function read(key) {
  try {
    return JSON.parse(localStorage.getItem(key));
  } catch {
    return null;
  }
}

/** Write, and let the oldest conversations go for it. What the browser does not take is not kept; the page goes on. */
function write(key, text) {
  const kept = chats().filter((chat) => PREFIX + chat.id !== key);
  let size = text.length + kept.reduce((sum, chat) => sum + localStorage.getItem(PREFIX + chat.id).length, 0);
  const drop = () => {
    const oldest = kept.pop();
    size -= localStorage.getItem(PREFIX + oldest.id).length;
    removeChat(oldest.id);
  };
  while (kept.length && (kept.length >= MAX_CHATS || size > MAX_CHARS)) drop();
  for (;;) {
    try {
      return localStorage.setItem(key, text);
    } catch {
      if (!kept.length) return notify("The browser has no room to keep this conversation");
      drop();
    }
  }
}
