// Markdown to elements, for text that nobody may trust: nothing in it becomes markup, an image, or a request.
//
// HTML stays text. Images become links. Links have one of SCHEMES. Text may end anywhere, since it is still coming.

import { copyFrom, h, icon } from "./dom.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const MAX_DEPTH = 12;
const MAX_BLANK = 20; // empty lines within an item of a list
// No expression has two repeats beside each other that match the same characters: each takes linear time.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/s;
const HEADING = /^ {0,3}(#{1,6})(?=\s)(.*)$/s;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?(.*)$/s;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/s;
const TABLE_SIDE = /^:?-+:?$/;

/** Show `text` in `host`. Elements of blocks that did not change stay, so selections in them do too. */
export function showMarkdown(host, text) {
  const wanted = blocks(text.replaceAll("\r\n", "\n").split("\n"));
  const before = host.shownBlocks ?? [];
  let same = 0;
  while (same < wanted.length && same < before.length && wanted[same].source === before[same].source) same += 1;
  while (host.childNodes.length > same) host.lastChild.remove();
  host.append(...wanted.slice(same).map((block) => render(block, 0)));
  host.shownBlocks = wanted;
}

/** Split lines into blocks: {kind, lines, source, ...}. */
function blocks(lines) {
  const found = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const start = at;
    const block = fence(lines, at) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at) ?? list(lines, at) ?? table(lines, at) ?? paragraph(lines, at);
    at = block.end;
    found.push({ ...block, source: lines.slice(start, at).join("\n") });
  }
  return found;
}

function fence(lines, at) {
  const match = FENCE.exec(lines[at]);
  if (!match) return null;
  const [, mark, language] = match;
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().slice(mark.length).replaceAll(mark[0], "").trim();
  let end = at + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  return { kind: "code", language: language.trim().split(/\s/, 1)[0], text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

function heading(lines, at) {
  const match = HEADING.exec(lines[at]);
  return match && { kind: "heading", level: match[1].length, text: withoutMarks(match[2].trim()), end: at + 1 };
}

/** The text of a heading without the marks that close it. */
function withoutMarks(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return text.slice(0, end).trimEnd();
}

function rule(lines, at) {
  return RULE.test(lines[at]) ? { kind: "rule", end: at + 1 } : null;
}

function quote(lines, at) {
  let end = at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (end > at && lines[end].trim() && !starts(lines[end])))) end += 1;
  if (end === at || !QUOTE.test(lines[at])) return null;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => QUOTE.exec(line)?.[1] ?? line), end };
}

function list(lines, at) {
  const first = ITEM.exec(lines[at]);
  if (!first) return null;
  const ordered = /\d/.test(first[2]);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const match = ITEM.exec(lines[end]);
    if (!match || /\d/.test(match[2]) !== ordered || RULE.test(lines[end])) break;
    const indent = match[1].length + match[2].length + Math.max(1, Math.min(match[3].length, 4));
    const item = [match[4]];
    end += 1;
    while (end < lines.length && belongs(lines, end, indent)) {
      item.push(lines[end].slice(Math.min(indent, lines[end].search(/\S|$/))));
      end += 1;
    }
    items.push(item);
  }
  return { kind: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1, items, end };
}

/** Whether a line goes on with an item whose text begins at column `indent`. */
function belongs(lines, at, indent) {
  const line = lines[at];
  if (!line.trim()) {
    let next = at + 1;
    while (next < lines.length && !lines[next].trim() && next < at + MAX_BLANK) next += 1;
    return next < lines.length && Boolean(lines[next].trim()) && lines[next].search(/\S/) >= indent;
  }
  return line.search(/\S/) >= Math.min(indent, 2) || (!starts(line) && Boolean(lines[at - 1].trim()));
}

function table(lines, at) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (!marks.every((mark) => TABLE_SIDE.test(mark))) return null;
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : "start"));
  if (sides.length !== head.length) return null;
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { kind: "table", head, sides, rows: lines.slice(at + 2, end).map(cells), end };
}

const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));

function paragraph(lines, at) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

/** Whether a line begins a block other than a paragraph. */
const starts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line));

function render(block, depth) {
  switch (block.kind) {
    case "code":
      return code(block.text, block.language);
    case "heading":
      return h(`h${Math.min(6, block.level + 2)}`, {}, inline(block.text));
    case "rule":
      return h("hr");
    case "quote":
      return h("blockquote", {}, nested(block.lines, depth));
    case "list":
      return h(block.ordered ? "ol" : "ul", { start: block.start === 1 ? null : block.start }, block.items.map((item) => listItem(item, depth)));
    case "table":
      return h("div", { class: "scrolled", tabindex: 0, role: "region", "aria-label": "Table" }, tableElement(block));
    default:
      return h("p", {}, inline(block.text));
  }
}

/** Text that is nested too deeply stays text. */
function nested(lines, depth) {
  return depth < MAX_DEPTH ? blocks(lines).map((block) => render(block, depth + 1)) : [lines.join("\n")];
}

function listItem(lines, depth) {
  const task = /^\[([ xX])\] (.*)$/s.exec(lines[0]);
  const shown = nested(task ? [task[2], ...lines.slice(1)] : lines, depth);
  const content = shown[0]?.tagName === "P" && shown.length <= 2 ? [...shown[0].childNodes, ...shown.slice(1)] : shown;
  if (!task) return h("li", {}, content);
  return h("li", { class: "task" }, h("input", { type: "checkbox", disabled: true, checked: task[1] !== " ", "aria-label": "Task" }), content);
}

function tableElement({ head, sides, rows }) {
  const line = (name, row) => h("tr", {}, head.map((_, i) => h(name, { class: sides[i], scope: name === "th" ? "col" : null }, inline(row[i] ?? ""))));
  return h("table", {}, h("thead", {}, line("th", head)), h("tbody", {}, rows.map((row) => line("td", row))));
}

/** A block of code with its language and a button that copies it. */
export function code(text, language = "") {
  const copy = h("button", { type: "button", class: "icon-button", "aria-label": "Copy code", title: "Copy code", click: () => copyFrom(copy, text) }, icon("copy"));
  const head = h("div", { class: "code-head" }, h("span", {}, language || "text"), copy);
  return h("div", { class: "code-block" }, head, h("pre", { tabindex: 0 }, h("code", {}, text)));
}

// Text within a block. The first match of INLINE is shown, then what follows it.

const INLINE = new RegExp(
  [
    String.raw`\\(?<escaped>[\\\x60*_{}\[\]()#+\-.!|~<>])`,
    String.raw`(?<ticks>\x60+)(?<code>[^\x60]|[^\x60][\s\S]*?[^\x60])\k<ticks>(?!\x60)`,
    String.raw`!?\[(?<label>(?:[^\[\]\\]|\\.){0,1000})\]\(\s{0,8}<?(?<target>[^\s()<>]{0,2000}(?:\([^\s()<>]{0,500}\)[^\s()<>]{0,500})?)>?(?:\s{1,8}"[^"]{0,500}")?\s{0,8}\)`,
    String.raw`(?<bare>https?:\/\/[^\s<>"'\x60]{1,2000}[^\s<>"'\x60.,;:!?)\]*_~])`,
    String.raw`\*\*(?=\S)(?<strong>[\s\S]{1,4000}?\S|\S)\*\*(?!\*)`,
    String.raw`(?<![\w*])\*(?=[^\s*])(?<em>[^*]{0,4000}[^\s*]|[^\s*])\*(?!\*)`,
    String.raw`(?<![\w_])__(?=\S)(?<strong2>[\s\S]{1,4000}?\S|\S)__(?![\w_])`,
    String.raw`(?<![\w_])_(?=[^\s_])(?<em2>[^_]{0,4000}[^\s_]|[^\s_])_(?![\w_])`,
    String.raw`~~(?=\S)(?<gone>[^~]{0,4000}[^\s~]|[^\s~])~~`,
    String.raw`(?<break>(?<! ) {2,}\n|\\\n)`,
  ].join("|"),
  "u",
);

function inline(text, depth = 0) {
  const found = [];
  let rest = text;
  for (;;) {
    const match = depth < MAX_DEPTH ? INLINE.exec(rest) : null;
    if (!match) return [...found, rest];
    if (match.index) found.push(rest.slice(0, match.index));
    found.push(mark(match, depth));
    rest = rest.slice(match.index + match[0].length);
  }
}

function mark(match, depth) {
  const { escaped, code: snippet, label, target, bare, strong, strong2, em, em2, gone } = match.groups;
  if (escaped !== undefined) return escaped;
  if (snippet !== undefined) return h("code", {}, /^ .* $/s.test(snippet) ? snippet.slice(1, -1) : snippet);
  if (target !== undefined) return link(target, inline(label || target, depth + 1), match[0]);
  if (bare !== undefined) return link(bare, [bare], bare);
  if (strong ?? strong2) return h("strong", {}, inline(strong ?? strong2, depth + 1));
  if (em ?? em2) return h("em", {}, inline(em ?? em2, depth + 1));
  if (gone) return h("s", {}, inline(gone, depth + 1));
  return h("br");
}

/** A link that opens elsewhere and tells nobody from where; what may not be one stays text. */
function link(target, label, source) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return source;
  }
  if (!SCHEMES.has(url.protocol)) return source;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, label);
}
