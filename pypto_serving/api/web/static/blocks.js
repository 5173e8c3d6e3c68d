// Lines of Markdown to blocks. A block may still grow: lines before its `sure` are in it for good, and are not read again.

const MAX_BLANK = 20; // empty lines within an item of a list
const MAX_FORMULA = 60; // lines
// No expression has two repeats beside each other that match the same characters: each takes linear time.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})(.*)$/s;
const HEADING = /^ {0,3}(#{1,6})(?=\s)(.*)$/s;
const RULE = /^ {0,3}([-*_])(?: *\1){2,} *$/;
const QUOTE = /^ {0,3}> ?(.*)$/s;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])( +|$)(.*)$/s;
const TASK = /^\[([ xX])\] (.*)$/s;
const TABLE_SIDE = /^:?-+:?$/;
const FORMULA = /^ {0,3}(\$\$|\\\[|\\begin\{([a-z]{1,20}\*?)\})/;
const ENVIRONMENTS = new Set("equation align alignat gather multline eqnarray matrix pmatrix bmatrix vmatrix cases array split aligned".split(" "));

/** The block that begins at a line: {kind, key, end, ...}. `old` is what was read there before, of which lines before its `sure` hold. */
export const read = (lines, at, sure, old) => fence(lines, at, old, sure) ?? heading(lines, at) ?? rule(lines, at) ?? quote(lines, at, old, sure) ?? item(lines, at, old, sure) ?? display(lines, at) ?? table(lines, at, old, sure) ?? paragraph(lines, at, old, sure);

/** Where to go on reading a block that was read before. */
const resumed = (old, kind, from) => (old?.kind === kind ? Math.max(from, old.sure) : from);

function fence(lines, at, old, sure) {
  const match = FENCE.exec(lines[at]);
  if (!match) return null;
  const [, mark, rest] = match;
  const language = rest.trim().split(/\s/, 1)[0];
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().slice(mark.length).replaceAll(mark[0], "").trim();
  let end = resumed(old, "code", at + 1);
  while (end < lines.length && !closes(lines[end])) end += 1;
  return { kind: "code", key: `code ${language}`, language, lines, to: end, sure: Math.min(end, sure), end: Math.min(end + 1, lines.length) };
}

function heading(lines, at) {
  const match = HEADING.exec(lines[at]);
  return match && { kind: "heading", key: `heading ${match[1].length}`, level: match[1].length, text: withoutMarks(match[2].trim()), end: at + 1 };
}

/** The text of a heading without the marks that close it. */
function withoutMarks(text) {
  let end = text.length;
  while (text[end - 1] === "#") end -= 1;
  return text.slice(0, end).trimEnd();
}

const rule = (lines, at) => (RULE.test(lines[at]) ? { kind: "rule", key: "rule", end: at + 1 } : null);

function quote(lines, at, old, sure) {
  if (!QUOTE.test(lines[at])) return null;
  let end = resumed(old, "quote", at);
  const inner = old?.kind === "quote" ? old.inner : [];
  inner.length = end - at;
  while (end < lines.length && (QUOTE.test(lines[end]) || (lines[end].trim() && !starts(lines[end])))) {
    inner.push(QUOTE.exec(lines[end])?.[1] ?? lines[end]);
    end += 1;
  }
  return { kind: "quote", key: "quote", inner, sure: Math.min(end, sure), end };
}

/** One item of a list; items that follow each other are put into one. */
function item(lines, at, old, sure) {
  const match = ITEM.exec(lines[at]);
  if (!match) return null;
  const [, space, mark, gap, text] = match;
  const indent = space.length + mark.length + Math.max(1, Math.min(gap.length, 4));
  const task = TASK.exec(text);
  let end = resumed(old, "item", at);
  const inner = old?.kind === "item" ? old.inner : [];
  inner.length = end - at;
  if (end === at) inner.push(task ? task[2] : text);
  end = Math.max(end, at + 1);
  while (end < lines.length && belongs(lines, end, indent)) {
    inner.push(lines[end].slice(Math.min(indent, lines[end].search(/\S|$/))));
    end += 1;
  }
  let last = Math.min(end, sure);
  while (last > at && !lines[last - 1].trim()) last -= 1;
  const ordered = mark.length > 1;
  const number = ordered ? Number.parseInt(mark, 10) : 1;
  return { kind: "item", key: `item ${mark.at(-1)} ${task?.[1]}`, list: mark.at(-1), ordered, number, done: task && task[1] !== " ", inner, sure: last, end };
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

/** A formula on lines of its own, once it is complete. */
function display(lines, at) {
  const match = FORMULA.exec(lines[at]);
  if (!match || (match[2] && !ENVIRONMENTS.has(match[2].replace("*", "")))) return null;
  const close = match[2] ? `\\end{${match[2]}}` : match[1] === "$$" ? "$$" : "\\]";
  let text = match[2] ? lines[at].trim() : lines[at].trim().slice(2);
  for (let end = at + 1; ; end += 1) {
    const trimmed = text.trimEnd();
    const closes = trimmed.endsWith(close);
    if (closes || trimmed.includes(close)) {
      const source = match[2] ? trimmed : trimmed.slice(0, -close.length);
      return closes && source.trim() && !source.includes(close === "$$" ? "$" : "\\]") ? { kind: "formula", key: `formula ${source}`, source, end } : null;
    }
    if (end >= lines.length || (end === lines.length - 1 && !lines[end].trim())) return { kind: "coming", key: "coming", text: lines.slice(at).join("\n"), end: lines.length };
    if (end > at + MAX_FORMULA || !lines[end].trim()) return null;
    text += `\n${lines[end]}`;
  }
}

function table(lines, at, old, sure) {
  if (!lines[at].includes("|") || at + 1 >= lines.length || !lines[at + 1].includes("-")) return null;
  const head = cells(lines[at]);
  const marks = cells(lines[at + 1]);
  if (marks.length !== head.length || !marks.every((mark) => TABLE_SIDE.test(mark))) return null;
  const sides = marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "end") : "start"));
  let end = resumed(old, "table", at + 2);
  while (end < lines.length && lines[end].includes("|")) end += 1;
  return { kind: "table", key: `table ${sides} ${lines[at]}`, head, sides, lines, sure: Math.min(end, sure), end };
}

/** The cells of a row; a bar that is escaped, or stands in code, is no border. */
export function cells(line) {
  const text = line.trim();
  const found = [""];
  let inCode = false;
  for (let i = text.startsWith("|") ? 1 : 0; i < text.length; i += 1) {
    const isEscape = text[i] === "\\" && text[i + 1] === "|";
    if (isEscape) i += 1;
    else if (text[i] === "`") inCode = !inCode && text.includes("`", i + 1);
    if (text[i] === "|" && !isEscape && !inCode) found.push("");
    else found[found.length - 1] += text[i];
  }
  if (text.endsWith("|") && found.length > 1 && !found.at(-1)) found.pop();
  return found.map((cell) => cell.trim());
}

function paragraph(lines, at, old, sure) {
  let end = resumed(old, "paragraph", at + 1);
  while (end < lines.length && lines[end].trim() && !starts(lines[end])) end += 1;
  return { kind: "paragraph", key: "paragraph", text: lines.slice(at, end).join("\n"), sure: Math.min(end, sure), end };
}

/** Whether a line begins a block other than a paragraph. */
const starts = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || line.trimStart().startsWith("$$") || line.trimStart().startsWith("\\[");
