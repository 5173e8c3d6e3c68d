// Markdown to elements, for text that nobody may trust: nothing in it becomes markup, an image, or a request.
//
// HTML stays text. Images become links. The text may still be coming: what came before its last block is read and shown
// once, and of long blocks only what is new, so that an answer takes time in proportion to its length.

import { cells, read } from "./blocks.js";
import { CodeBlock } from "./code.js";
import { h } from "./dom.js";
import { inline } from "./inline.js";
import { formula } from "./math.js";

const MAX_DEPTH = 12;
const PIECE = 2000; // characters of a paragraph that are read at once

/** Show `text` in `host`. If it goes on from what is shown there, elements of what did not change stay. */
export function showMarkdown(host, text) {
  const before = host.growing?.text;
  if (before === undefined || text.slice(0, before.length) !== before) host.growing = new Growing(host);
  host.growing.show(text);
}

/** A text that grows, and its lines: all but the last are complete. */
class Growing {
  constructor(host) {
    host.replaceChildren();
    this.text = "";
    this.start = 0;
    this.blocks = new Blocks(host, 0);
  }

  show(text) {
    const { lines } = this.blocks;
    const fresh = text.slice(this.start).split("\n").map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line));
    lines.length = Math.max(0, lines.length - 1);
    for (const line of fresh) lines.push(line);
    this.text = text;
    this.start = text.lastIndexOf("\n") + 1;
    this.blocks.show(lines.length - 1);
  }
}

/** Lines shown as blocks in an element. The blocks in `open` may change; those before them do not. */
class Blocks {
  constructor(host, depth, lines = []) {
    Object.assign(this, { host, depth, lines, open: [] });
  }

  /** Show the lines; those before `sure` will stay as they are. */
  show(sure) {
    if (this.depth > MAX_DEPTH) return this.host.replaceChildren(this.lines.join("\n"));
    const before = this.open;
    const found = [];
    let from = 0;
    for (let at = before[0]?.start ?? 0; at < this.lines.length; at = found.at(-1).end) {
      while (at < this.lines.length && !this.lines[at].trim()) at += 1;
      if (at >= this.lines.length) break;
      while (from < before.length && before[from].start < at) from += 1;
      found.push({ start: at, ...read(this.lines, at, sure, before[from]?.start === at ? before[from] : null) });
    }
    this.place(before, found);
    for (const block of found) block.view.show(block, sure);
    const last = found.findLastIndex(({ start }) => start < sure);
    this.open = found.slice(Math.max(0, last));
    return undefined;
  }

  /** Keep the views of blocks that stay; make and put in those of the others. */
  place(before, found) {
    let same = 0;
    const stays = (one, other) => one && other && one.start === other.start && one.key === other.key;
    while (stays(before[same], found[same])) same += 1;
    for (const { view } of before.slice(same).reverse()) drop(view.element);
    for (const [i, block] of found.entries()) {
      if (i < same) {
        block.view = before[i].view;
        continue;
      }
      block.view = new VIEWS[block.kind](block, this.depth);
      if (block.kind === "item") block.view.put(this.host, block, found[i - 1]);
      else this.host.append(block.view.element);
    }
  }
}

/** Take an item or another block away; a list without items goes, too. */
function drop(element) {
  const list = element.parentNode;
  element.remove();
  if (element.tagName === "LI" && !list.children.length) list.remove();
}

// How blocks are shown. Each view has an element, and shows its block as it is now.

class CodeView {
  constructor({ language }) {
    this.block = new CodeBlock(language);
    this.element = this.block.element;
  }

  show({ lines, start, to }, sure) {
    this.block.show(lines, sure, start + 1, to);
  }
}

/** Text in an element, in pieces: all but the last are read once. */
class TextView {
  constructor({ kind, level }) {
    this.element = h(kind === "heading" ? `h${Math.min(6, level + 1)}` : "p");
    this.done = 0;
    this.tail = [];
    this.text = null;
  }

  show({ text }) {
    if (text === this.text) return;
    this.text = text;
    if (text.length < this.done) {
      this.done = 0;
      this.element.replaceChildren();
    }
    for (const node of this.tail) node.remove();
    for (let cut = cutAfter(text, this.done); cut; cut = cutAfter(text, this.done)) {
      this.element.append(...inline(text.slice(this.done, cut)));
      this.done = cut;
    }
    this.tail = inline(text.slice(this.done)).map((each) => (typeof each === "string" ? document.createTextNode(each) : each));
    this.element.append(...this.tail);
  }
}

/** Where a piece of `text` ends that begins at `from`; 0 while it is still coming. */
function cutAfter(text, from) {
  if (text.length <= from + PIECE) return 0;
  const found = text.slice(from + PIECE, from + 2 * PIECE).search(/\s/);
  return found >= 0 ? from + PIECE + found : text.length > from + 2 * PIECE ? from + 2 * PIECE : 0;
}

class RuleView {
  element = h("hr");

  show() {}
}

class FormulaView {
  constructor({ source }) {
    this.element = h("div", { class: "display" }, formula(source, true));
  }

  show() {}
}

class QuoteView {
  constructor({ inner }, depth) {
    this.element = h("blockquote");
    this.blocks = new Blocks(this.element, depth + 1, inner);
  }

  show({ start }, sure) {
    this.blocks.show(sure - start);
  }
}

class ItemView {
  constructor({ inner, done }, depth) {
    const box = done === null ? null : h("input", { type: "checkbox", disabled: true, checked: done, "aria-label": "Task" });
    const content = h("div");
    this.element = h("li", { class: box ? "task" : null }, box, box ? content : null);
    this.blocks = new Blocks(box ? content : this.element, depth + 1, inner);
  }

  /** Join the list of the item before, or begin one. */
  put(host, { list, ordered, number }, before) {
    const joins = before?.kind === "item" && before.list === list;
    this.list = joins ? before.view.list : h(ordered ? "ol" : "ul", { start: number === 1 ? null : number });
    this.list.append(this.element);
    if (!joins) host.append(this.list);
  }

  show({ start, sure: last }) {
    this.blocks.show(Math.max(0, last - start));
  }
}

class TableView {
  constructor({ head, sides }) {
    this.sides = sides;
    this.done = 0;
    this.rows = h("tbody");
    this.tail = [];
    const table = h("table", {}, h("thead", {}, this.row("th", head)), this.rows);
    this.element = h("div", { class: "scrolled", tabindex: 0, role: "region", "aria-label": "Table" }, table);
  }

  row(name, found) {
    return h("tr", {}, this.sides.map((side, i) => h(name, { class: side, scope: name === "th" ? "col" : null }, inline(found[i] ?? ""))));
  }

  show({ lines, start, sure, end }) {
    for (const row of this.tail) row.remove();
    for (; this.done < sure - start - 2; this.done += 1) this.rows.append(this.row("td", cells(lines[start + 2 + this.done])));
    this.tail = lines.slice(start + 2 + this.done, end).map((line) => this.row("td", cells(line)));
    this.rows.append(...this.tail);
  }
}

const VIEWS = { code: CodeView, coming: TextView, heading: TextView, paragraph: TextView, rule: RuleView, formula: FormulaView, quote: QuoteView, item: ItemView, table: TableView };
