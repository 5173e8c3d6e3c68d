// Markdown within a block: one pass over the text, with no expression that could go back. Nothing in it becomes markup.

import { h } from "./dom.js";
import { formula } from "./math.js";

const SCHEMES = new Set(["http:", "https:", "mailto:"]);
const ESCAPED = new Set("\\`*_{}[]()#+-.!|~<>$");
const SPECIAL = new Set("\\`$![<h*_~");
const BREAK = ["<br>", "<br/>", "<br />"];
const MAX_OPEN = 40; // marks that may wait for their ends; each of them costs a look at every later one
const MAX_LABEL = 1000;
const MAX_TARGET = 2000;
const MAX_FORMULA = 1000;
const isWord = (sign) => sign !== undefined && /[\p{L}\p{N}_]/u.test(sign);
const isPlainWord = (sign) => sign !== undefined && /\w/.test(sign); // letters of other scripts stand without spaces between them
const isSpace = (sign) => sign === undefined || /\s/.test(sign);

/** The nodes and strings that `text` is shown as. */
export function inline(text) {
  return new Reading(text).read();
}

/** Reads a text from its start to its end. `open` are marks without an end so far, each with what came after it. */
class Reading {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.plain = "";
    this.base = [];
    this.open = [];
    this.ticks = null;
  }

  read() {
    while (this.at < this.text.length) {
      const made = this.special(this.text[this.at]);
      if (made === null) this.skip();
      else if (made !== undefined) this.put(made);
    }
    this.flush();
    while (this.open.length) this.closeFirst();
    return this.base;
  }

  /** Read what begins with `sign`: a node, a string; undefined where it is done, null where it is only a sign. */
  special(sign) {
    switch (sign) {
      case "\\":
        return this.escape();
      case "`":
        return this.code();
      case "$":
        return this.dollars();
      case "!":
        return this.text[this.at + 1] === "[" ? this.link(1) : null;
      case "[":
        return this.link(0);
      case "<":
        return this.angle();
      case "h":
        return isWord(this.text[this.at - 1]) ? null : this.address();
      case "*":
      case "_":
      case "~":
        return this.mark(sign);
      default:
        return null;
    }
  }

  /** Take signs up to the next one that may be special. */
  skip() {
    let end = this.at + 1;
    while (end < this.text.length && !SPECIAL.has(this.text[end])) end += 1;
    this.plain += this.text.slice(this.at, end);
    this.at = end;
  }

  put(node) {
    if (typeof node === "string") {
      this.plain += node;
      return;
    }
    this.flush();
    (this.open.at(-1)?.content ?? this.base).push(node);
  }

  flush() {
    if (this.plain) (this.open.at(-1)?.content ?? this.base).push(this.plain);
    this.plain = "";
  }

  /** Go on at `end`, and return `made`. */
  goOn(end, made) {
    this.at = end;
    return made;
  }

  escape() {
    const next = this.text[this.at + 1];
    const close = { "(": "\\)", "[": "\\]" }[next];
    if (close) {
      const end = this.find(close, this.at + 2, MAX_FORMULA);
      if (end > this.at + 2) return this.goOn(end + 2, formula(this.text.slice(this.at + 2, end), next === "["));
    }
    if (next === "\n") return this.goOn(this.at + 1, "");
    return ESCAPED.has(next) ? this.goOn(this.at + 2, next) : null;
  }

  /** Where `wanted` is next, at most `most` characters on; -1 if it is not. */
  find(wanted, from, most) {
    const found = this.text.slice(from, from + most).indexOf(wanted);
    return found < 0 ? -1 : from + found;
  }

  code() {
    const start = this.at;
    const length = this.run("`");
    this.ticks ??= runs(this.text, "`");
    const ends = this.ticks.get(length);
    while (ends.length && ends.at(-1) <= start) ends.pop();
    if (!ends.length) return this.goOn(start + length, this.text.slice(start, start + length));
    const inner = this.text.slice(start + length, ends.at(-1));
    const shown = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() ? inner.slice(1, -1) : inner;
    return this.goOn(ends.at(-1) + length, h("code", {}, shown));
  }

  /** How many of `sign` follow each other here. */
  run(sign) {
    let end = this.at;
    while (this.text[end] === sign) end += 1;
    return end - this.at;
  }

  /** A formula between dollars; amounts of money are none, since a space or a digit tells them. */
  dollars() {
    const { text, at } = this;
    const length = this.run("$");
    if (length > 2) return this.goOn(at + length, text.slice(at, at + length));
    const from = at + length;
    const end = this.find("$".repeat(length), from, MAX_FORMULA);
    const inner = end > from ? text.slice(from, end) : "";
    const fits = length === 2 || (!isSpace(inner[0]) && !isSpace(inner.at(-1)) && inner.at(-1) !== "\\" && !inner.includes("\n\n") && !isWord(text[end + 1]) && !isWord(text[at - 1]));
    return inner.trim() && fits ? this.goOn(end + length, formula(inner, length === 2)) : this.goOn(from, text.slice(at, from));
  }

  /** `[label](target "title")`; an image becomes a link, too. */
  link(marks) {
    const { text, at } = this;
    const from = at + marks + 1;
    let end = from;
    while (end < text.length && end - from <= MAX_LABEL && text[end] !== "]" && text[end] !== "[") end += text[end] === "\\" ? 2 : 1;
    if (text[end] !== "]" || text[end + 1] !== "(") return this.goOn(from, text.slice(at, from));
    const target = targetAt(text, end + 2);
    if (!target) return this.goOn(from, text.slice(at, from));
    const whole = text.slice(at, target.end);
    return this.goOn(target.end, anchor(target.url, text.slice(from, end) ? inline(text.slice(from, end)) : [target.url], whole));
  }

  angle() {
    const { text, at } = this;
    const line = BREAK.find((each) => text.startsWith(each, at));
    if (line) return this.goOn(at + line.length, h("br"));
    const end = text.startsWith("http", at + 1) ? addressEnd(text, at + 1) : 0;
    return end && text[end] === ">" ? this.goOn(end + 1, anchor(text.slice(at + 1, end), [text.slice(at + 1, end)], text.slice(at, end + 1))) : null;
  }

  address() {
    const { text, at } = this;
    let end = addressEnd(text, at);
    if (!end) return null;
    while (".,;:!?*_~".includes(text[end - 1]) || (text[end - 1] === ")" && !text.slice(at, end).includes("(")) || text[end - 1] === "]") end -= 1;
    return this.goOn(end, anchor(text.slice(at, end), [text.slice(at, end)], text.slice(at, end)));
  }

  /** A mark of emphasis: it ends what is open, or begins, or is only signs. */
  mark(sign) {
    const { text, at } = this;
    const length = this.run(sign);
    const [before, after] = [text[at - 1], text[at + length]];
    const literal = text.slice(at, at + length);
    this.at += length;
    if (length > 3 || (sign === "~" && length !== 2)) return literal;
    let left = length;
    if (!isSpace(before) && !(sign === "_" && isWord(after))) left = this.close(sign, length);
    if (!left) return undefined;
    if (isSpace(after) || (sign === "_" && isWord(before)) || (sign === "*" && length === 1 && isPlainWord(before))) return literal.slice(0, left);
    this.flush();
    this.open.push({ sign, length: left, content: [] });
    if (this.open.length > MAX_OPEN) this.closeFirst();
    return undefined;
  }

  /** End what `length` signs can end; return how many are left. */
  close(sign, length) {
    let left = length;
    while (left) {
      const fits = (one) => one.sign === sign && (one.length === left || one.length === 3 || left === 3);
      const index = this.open.findLastIndex(fits);
      if (index < 0 || (index === this.open.length - 1 && !this.plain && !this.open[index].content.length)) return left;
      this.flush();
      const found = this.open[index];
      for (const inner of this.open.splice(index + 1)) found.content.push(inner.sign.repeat(inner.length), ...inner.content);
      const used = Math.min(found.length, left);
      const node = emphasis(sign, used, found.content);
      found.length -= used;
      left -= used;
      if (found.length) found.content = [node];
      else {
        this.open.pop();
        (this.open.at(-1)?.content ?? this.base).push(node);
      }
    }
    return 0;
  }

  /** The mark that has waited longest is only signs. */
  closeFirst() {
    const first = this.open.shift();
    this.base.push(first.sign.repeat(first.length), ...first.content);
  }
}

function emphasis(sign, length, content) {
  if (sign === "~") return h("s", {}, content);
  if (length === 3) return h("strong", {}, h("em", {}, content));
  return h(length === 2 ? "strong" : "em", {}, content);
}

/** Where runs of a sign begin, by their length, the last ones first. */
function runs(text, sign) {
  const found = new Map();
  for (let at = text.indexOf(sign); at >= 0; ) {
    let end = at;
    while (text[end] === sign) end += 1;
    if (!found.has(end - at)) found.set(end - at, []);
    found.get(end - at).push(at);
    at = text.indexOf(sign, end);
  }
  for (const places of found.values()) places.reverse();
  return found;
}

/** Where the address that begins at `at` ends; 0 if there is none. */
function addressEnd(text, at) {
  const scheme = ["https://", "http://"].find((each) => text.startsWith(each, at));
  if (!scheme) return 0;
  let end = at + scheme.length;
  while (end < text.length && end - at < MAX_TARGET && !isSpace(text[end]) && !"<>\"'`".includes(text[end])) end += 1;
  return end > at + scheme.length ? end : 0;
}

/** The target of a link, from after its parenthesis: {url, end}; null if it does not close. */
function targetAt(text, at) {
  const skip = (from) => {
    let end = from;
    while (end - from < 8 && end < text.length && isSpace(text[end])) end += 1;
    return end;
  };
  let end = skip(at);
  const angle = text[end] === "<";
  if (angle) end += 1;
  const from = end;
  for (let depth = 0; end < text.length && end - from < MAX_TARGET && !isSpace(text[end]) && !"<>".includes(text[end]); end += 1) {
    if (text[end] === "(" && (depth += 1) > 1) return null;
    if (text[end] === ")" && (depth -= 1) < 0) break;
  }
  const url = text.slice(from, end);
  if (angle && text[end] === ">") end += 1;
  end = skip(end);
  if (text[end] === '"') {
    const close = text.slice(end + 1, end + 502).indexOf('"');
    if (close < 0) return null;
    end = skip(end + close + 2);
  }
  return text[end] === ")" ? { url, end: end + 1 } : null;
}

/** A link that opens elsewhere and tells nobody from where; what may not be one stays text. */
function anchor(target, label, source) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return source;
  }
  if (!SCHEMES.has(url.protocol)) return source;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow", title: url.href }, label);
}
