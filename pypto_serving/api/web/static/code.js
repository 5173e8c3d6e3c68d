// Blocks of code: their language, colours, and a button that copies them. They may grow; lines that are complete stay.

import { copyFrom, h, icon } from "./dom.js";
import { highlightLine } from "./highlight.js";
import { languageOf } from "./languages.js";

const MAX_LINE = 1000; // longer lines have no colours
const MAX_LINES = 5000;

/** Make a block of code that is complete. */
export function code(text, language = "") {
  const block = new CodeBlock(language);
  block.show(text.split("\n"), Number.MAX_SAFE_INTEGER);
  return block.element;
}

/** A block of code. */
export class CodeBlock {
  constructor(language) {
    this.language = languageOf(language);
    this.lines = [];
    this.from = 0;
    this.done = 0; // lines that are shown for good
    this.state = null;
    this.tail = [];
    this.last = ""; // the line that is still coming, if it is long
    this.shown = h("code");
    const copy = h("button", { type: "button", class: "icon-button", "aria-label": "Copy code", title: "Copy code", click: () => copyFrom(copy, this.lines.slice(this.from, this.to).join("\n")) }, icon("copy"));
    const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copy);
    this.element = h("div", { class: "code-block" }, head, h("pre", { tabindex: 0 }, this.shown));
  }

  /** Show the lines [from, to); those before `sure` will not change. */
  show(lines, sure, from = 0, to = lines.length) {
    Object.assign(this, { lines, from, to });
    const final = Math.max(0, Math.min(sure, to) - from);
    if (final === this.done && this.grows(lines[to - 1])) return;
    for (const node of this.tail) node.remove();
    this.tail = [];
    for (; this.done < final; this.done += 1) {
      const { nodes, state } = this.read(lines[from + this.done], this.done, this.state);
      this.shown.append(...nodes);
      this.state = state;
    }
    let state = this.state;
    for (let i = this.done; i < to - from; i += 1) {
      const made = this.read(lines[from + i], i, state);
      state = made.state;
      this.tail.push(...made.nodes);
    }
    this.shown.append(...this.tail);
    const isLong = to - from === this.done + 1 && lines[to - 1].length > MAX_LINE;
    this.last = isLong ? lines[to - 1] : "";
  }

  /** A long line that goes on takes in what is new. */
  grows(line) {
    const before = this.last;
    if (!before || line.slice(0, before.length) !== before) return false;
    this.tail.at(-1).appendData(line.slice(before.length));
    this.last = line;
    return true;
  }

  /** The nodes of a line, and the state that the next one begins with. */
  read(line, index, before) {
    const plain = !this.language || line.length > MAX_LINE || index > MAX_LINES;
    const { parts, state } = plain ? { parts: [["", line]], state: null } : highlightLine(line, this.language, before);
    const nodes = parts.map(([kind, text]) => (kind ? h("span", { class: `hl-${kind}` }, text) : document.createTextNode(text)));
    return { nodes: index ? [document.createTextNode("\n"), ...nodes] : nodes, state };
  }
}
