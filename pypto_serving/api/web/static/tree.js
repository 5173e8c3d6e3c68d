// A conversation is a tree of messages. A path leads from the root through the chosen child of each message.
//
//   chat.nodes    message by id: {id, parent, role, content, ...}
//   chat.chosen   id of the chosen child by id of the parent; "" is the root

export const newId = () => crypto.getRandomValues(new Uint32Array(2)).join("-");

export function newChat(settings) {
  return { id: newId(), title: "", updated: Date.now(), settings, nodes: {}, chosen: {} };
}

/** Add a message after `parent` and choose it. */
export function add(chat, parent, message) {
  const node = addBeside(chat, parent, message);
  chat.chosen[parent] = node.id;
  return node;
}

/** Add a message after `parent` as another version than the chosen one. */
export function addBeside(chat, parent, message) {
  const node = { id: newId(), parent, ...message };
  chat.nodes[node.id] = node;
  return node;
}

/** The messages from the first to the last chosen one. */
export function path(chat) {
  const found = [];
  for (let id = chat.chosen[""]; id; id = chat.chosen[id]) found.push(chat.nodes[id]);
  return found;
}

/** The messages that lead to `node`, and it. */
export function pathTo(chat, node) {
  const found = [];
  for (let at = node; at; at = chat.nodes[at.parent]) found.unshift(at);
  return found;
}

/** The alternatives to a message, itself among them, oldest first. */
export const siblings = (chat, node) => Object.values(chat.nodes).filter((other) => other.parent === node.parent);

/** Choose the alternative `step` further on; those at the ends have none. */
export function turn(chat, node, step) {
  const all = siblings(chat, node);
  const next = all[all.indexOf(node) + step];
  if (next) chat.chosen[node.parent] = next.id;
  return next;
}

/** Forget a message with all that follows it; choose the alternative before it, if there is one. */
export function remove(chat, node) {
  const left = siblings(chat, node).filter((other) => other !== node);
  const doomed = [node];
  for (const each of doomed) doomed.push(...Object.values(chat.nodes).filter((other) => other.parent === each.id));
  for (const each of doomed) {
    delete chat.nodes[each.id];
    delete chat.chosen[each.id];
  }
  if (left.length) chat.chosen[node.parent] = left.at(-1).id;
  else delete chat.chosen[node.parent];
}
