// Colour code line by line, so that a line which is complete is never looked at again.
//
// A line becomes parts [kind, text]; `kind` is "" for what has no colour. What goes on in the next line, such as a
// comment, is the state that the next line begins with.

const WORD = /[\p{L}_$][\p{L}\p{N}_$]*/uy;
const DASHED = /[\p{L}_$][\p{L}\p{N}_$-]*/uy;
const NUMBER = /\d[\w.]*/y;
const OTHER = /[^\p{L}\p{N}_$"'`#@/*<>&!=:;-]+/uy; // nothing that could begin anything else; strings and comments are looked for first

const match = (pattern, line, at) => {
  pattern.lastIndex = at;
  return pattern.exec(line)?.[0] ?? "";
};

/** Read a line: {parts, state}. */
export function highlightLine(line, language, state) {
  if (language.diff) return { parts: [[diffKind(line), line]], state: null };
  const reading = new Line(line, language);
  const left = language.markup ? reading.markup(state) : reading.code(state);
  return { parts: reading.parts, state: left };
}

function diffKind(line) {
  if (line.startsWith("+++") || line.startsWith("---") || line.startsWith("@@") || line.startsWith("diff ")) return "meta";
  return { "+": "added", "-": "removed" }[line[0]] ?? "";
}

class Line {
  constructor(text, language) {
    this.text = text;
    this.language = language;
    this.parts = [];
    this.at = 0;
  }

  /** Take the text up to `end` as one part; neighbours of a kind become one. */
  take(kind, end) {
    const text = this.text.slice(this.at, end);
    this.at = end;
    if (!text) return;
    const last = this.parts.at(-1);
    if (last?.[0] === kind) last[1] += text;
    else this.parts.push([kind, text]);
  }

  /** Take what ends with `close`; return the state if it does not end in this line. */
  takeTo(kind, close, from, escapes) {
    let end = from;
    for (; end < this.text.length; end += escapes && this.text[end] === "\\" ? 2 : 1) {
      if (!this.text.startsWith(close, end)) continue;
      this.take(kind, end + close.length);
      return null;
    }
    this.take(kind, this.text.length);
    return { kind, close, escapes, tag: false };
  }

  code(state) {
    if (state) state = this.takeTo(state.kind, state.close, 0, state.escapes);
    while (!state && this.at < this.text.length) state = this.one();
    return state;
  }

  /** Take one part; return the state if it goes on in the next line. */
  one() {
    const { text, at, language } = this;
    const sign = text[at];
    if (language.directive === sign && !text.slice(0, at).trim()) return this.directive();
    if (language.sections && sign === "[" && !text.slice(0, at).trim()) return this.take("meta", text.length) ?? null;
    const [open, close] = language.block ?? [];
    if (open && text.startsWith(open, at)) return this.takeTo("comment", close, at + open.length, false);
    if (language.line?.some((mark) => text.startsWith(mark, at)) && this.mayComment()) return this.take("comment", text.length) ?? null;
    const long = language.long?.find((mark) => text.startsWith(mark, at));
    if (long) return this.takeTo("string", long, at + long.length, true);
    if (language.quotes.includes(sign)) return this.quoted(sign);
    if (language.ticks && sign === "'") return this.tick();
    if (sign === "@" && language.decorator) return this.take("meta", at + 1 + match(WORD, text, at + 1).length) ?? null;
    if (sign === "$" && language.variables) return this.variable();
    if (language.hex && sign === "#") return this.take("number", at + 1 + match(/\w+/y, text, at + 1).length) ?? null;
    const number = match(NUMBER, text, at);
    if (number) return this.take("number", at + number.length) ?? null;
    const word = match(language.dashes ? DASHED : WORD, text, at);
    if (word) return this.take(this.kindOf(word, at + word.length), at + word.length) ?? null;
    return this.take("", at + (match(OTHER, text, at).length || 1)) ?? null;
  }

  /** In some languages a comment begins only after a space. */
  mayComment() {
    return !this.language.spaced || this.at === 0 || /\s/.test(this.text[this.at - 1]);
  }

  directive() {
    this.take("meta", this.at + 1 + match(WORD, this.text, this.at + 1).length);
    return null;
  }

  /** A string within the line. Where words need no quotes, as in a shell, one that does not end is an apostrophe. */
  quoted(sign) {
    let end = this.at + 1;
    while (end < this.text.length && this.text[end] !== sign) end += this.text[end] === "\\" ? 2 : 1;
    if (end >= this.text.length && this.language.spaced) return this.take("", this.at + 1) ?? null;
    end = Math.min(end + 1, this.text.length);
    const isKey = this.language.keys && /^\s*[:=]/.test(this.text.slice(end, end + 20));
    this.take(isKey ? "meta" : "string", end);
    return null;
  }

  /** A character of Rust, or the mark of a lifetime. */
  tick() {
    const end = this.text[this.at + 1] === "\\" ? this.at + 3 : this.at + 2;
    if (this.text[end] === "'") this.take("string", end + 1);
    else this.take("meta", this.at + 1 + match(WORD, this.text, this.at + 1).length);
    return null;
  }

  variable() {
    const { text, at } = this;
    const brace = "{(".includes(text[at + 1] ?? " ");
    const name = match(WORD, text, brace ? at + 2 : at + 1);
    const end = at + 1 + (brace ? 1 : 0) + (name.length || 1);
    this.take("meta", Math.min(text.length, brace && "})".includes(text[end] ?? " ") ? end + 1 : brace ? at + 2 : end));
    return null;
  }

  kindOf(word, end) {
    const { language, text } = this;
    if (language.words.has(language.caseless ? word.toLowerCase() : word)) return "keyword";
    if (language.keys && /^\s*[:=]/.test(text.slice(end, end + 20))) return "meta";
    if (text[end] === "(" || (text[end] === "!" && text[end + 1] === "(")) return "call";
    return /^\p{Lu}/u.test(word) && /\p{Ll}/u.test(word) ? "type" : "";
  }

  /** HTML and XML. */
  markup(state) {
    while (this.at < this.text.length) {
      if (state?.close) state = this.within(state);
      else if (state?.tag) state = this.inTag();
      else state = this.inText();
    }
    return state;
  }

  /** Go on with a comment, or with a string in a tag. */
  within({ kind, close, tag }) {
    const left = this.takeTo(kind, close, this.at, false);
    return left ? { ...left, tag } : tag ? { tag } : null;
  }

  inText() {
    const { text, at } = this;
    if (text.startsWith("<!--", at)) return this.takeTo("comment", "-->", at + 4, false);
    if (text[at] === "<" && /[\w!?/]/.test(text[at + 1] ?? "")) {
      const from = at + ("/!?".includes(text[at + 1]) ? 2 : 1);
      this.take("keyword", from + match(/[\w:.-]*/y, text, from).length);
      return { tag: true };
    }
    const next = text.indexOf("<", at + 1);
    this.take("", next < 0 ? text.length : next);
    return null;
  }

  inTag() {
    const { text, at } = this;
    if (text[at] === ">" || text.startsWith("/>", at) || text.startsWith("?>", at)) {
      this.take("keyword", at + (text[at] === ">" ? 1 : 2));
      return null;
    }
    if ("\"'".includes(text[at])) {
      const left = this.takeTo("string", text[at], at + 1, false);
      return left ? { ...left, tag: true } : { tag: true };
    }
    const word = match(/[\w:.@-]+/y, text, at);
    if (word) this.take("meta", at + word.length);
    else this.take("", at + 1);
    return { tag: true };
  }
}
