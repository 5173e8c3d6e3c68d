// Read TeX and put MathML together.

import { between, m, named, operator, row } from "./mathml.js";
import { ACCENTS, ALPHABETS, FENCES, FUNCTIONS, INTEGRALS, LARGE, LETTERS, LIMITS, OPERATORS, SPACES, UNDER, WIDE, formed } from "./symbols.js";

const MAX_DEPTH = 40;
const SIZES = new Set(["big", "Big", "bigg", "Bigg"].flatMap((size) => ["", "l", "r", "m"].map((side) => size + side)));
const IGNORED = new Set("displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits nonumber notag hline centering normalsize small allowbreak relax".split(" "));
const SKIPPED = new Set("label tag color vspace hspace".split(" ")); // with their argument
const TEXTS = new Set("text textrm textnormal mbox textup".split(" "));
const UPRIGHT = new Set("mathrm operatorname rm mathop mathbin mathrel mathord".split(" "));
const AROUND = { pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖", cases: "{ ", rcases: " }" };
const ALIGNED = new Set("align aligned alignat split eqnarray alignedat".split(" "));
const isUpright = (sign) => /[^a-zA-Zα-ωϑϕϖϱϵ]/u.test(sign);

/** Text keeps its spaces at both ends. */
const spaced = (text) => text.replace(/^ | $/g, "\u00a0").replaceAll("\\ ", " ").replaceAll("~", "\u00a0");

/** Room before the name of a function that is not the first part, nor after an operator. */
function spaceBefore(part) {
  const name = part?.localName === "mo" ? part : part?.firstElementChild;
  if (name?.classList.contains("name")) name.setAttribute("lspace", "0.1667em");
}

/** Reads TeX from its start to its end; throws where it cannot. */
export class Tex {
  constructor(source) {
    this.source = source;
    this.at = 0;
    this.form = null;
    this.depth = 0;
  }

  whole() {
    const parts = this.list([]);
    if (this.at < this.source.length) throw new Error("unbalanced");
    return parts;
  }

  peek() {
    while (this.at < this.source.length) {
      if (this.source[this.at] === "%") this.at = this.source.indexOf("\n", this.at) + 1 || this.source.length;
      else if (" \n\t\r".includes(this.source[this.at])) this.at += 1;
      else break;
    }
    if (this.source[this.at] !== "\\") return this.source[this.at] ?? "";
    let end = this.at + 1;
    while (/[a-zA-Z]/.test(this.source[end] ?? "")) end += 1;
    return this.source.slice(this.at, Math.max(end, this.at + 2));
  }

  next() {
    const token = this.peek();
    this.at += token.length;
    return token;
  }

  expect(token) {
    if (this.next() !== token) throw new Error(`no ${token}`);
  }

  /** Parts up to one of `ends`, which stays, or to the end of the source. */
  list(ends) {
    if ((this.depth += 1) > MAX_DEPTH) throw new Error("too deep");
    const parts = [];
    const form = this.form;
    for (let token = this.peek(); token && !ends.includes(token); token = this.peek()) {
      if (["}", "&", "\\\\", "\\end", "\\right", "\\cr"].includes(token)) break;
      if (token === "\\over") {
        this.next();
        parts.splice(0, parts.length, m("mfrac", {}, row([...parts]), row(this.list(ends))));
      } else {
        const made = this.scripted();
        if (parts.length && parts.at(-1).localName !== "mo") spaceBefore(made[0]);
        parts.push(...made);
      }
    }
    this.form = form;
    this.depth -= 1;
    return parts;
  }

  /** One part with what is written above and below it; nothing for commands that only change others. */
  scripted() {
    const base = "^_'".includes(this.peek()) ? m("mrow", {}) : this.atom();
    let below = null;
    const raised = [];
    let powers = 0;
    for (;;) {
      const token = this.peek();
      if (token === "^") {
        this.next();
        if ((powers += 1) > 1) throw new Error("two powers");
        raised.push(this.argument());
      } else if (token === "_") {
        this.next();
        if (below) throw new Error("two indices");
        below = this.argument();
      } else if (token === "'") {
        this.next();
        raised.push(operator("′"));
      } else if (token === "\\limits" || token === "\\nolimits") this.next();
      else break;
    }
    const above = raised.length ? row(raised) : null;
    if (!above && !below) return base ? [base] : [];
    const stacked = base?.dataset.limits;
    const name = stacked ? (below ? (above ? "munderover" : "munder") : "mover") : below ? (above ? "msubsup" : "msub") : "msup";
    return [m(name, {}, ...[base ?? m("mrow", {}), below, above].filter(Boolean))];
  }

  /** What a command or a script refers to: a group, or one part. */
  argument() {
    if ((this.depth += 1) > MAX_DEPTH) throw new Error("too deep");
    const token = this.peek();
    if (!token || "}&".includes(token)) throw new Error("an argument is missing");
    const made = token === "{" ? row(this.group()) : /\d/.test(token) ? m("mn", {}, this.next()) : this.atom();
    this.depth -= 1;
    return made ?? m("mrow", {});
  }

  group() {
    this.expect("{");
    const parts = this.list(["}"]);
    this.expect("}");
    return parts;
  }

  /** The text between braces as it is. */
  raw() {
    if (this.peek() !== "{") return this.next();
    const from = this.at + 1;
    let depth = 0;
    for (; this.at < this.source.length; this.at += 1) {
      if (this.source[this.at] === "{") depth += 1;
      if (this.source[this.at] === "}" && (depth -= 1) === 0) {
        this.at += 1;
        return this.source.slice(from, this.at - 1);
      }
    }
    throw new Error("unbalanced");
  }

  optional() {
    if (this.peek() !== "[") return null;
    this.next();
    const parts = this.list(["]"]);
    this.expect("]");
    return row(parts);
  }

  /** One part without scripts; null for commands that show nothing. */
  atom() {
    const token = this.peek();
    if (token === "{") return m("mrow", {}, ...this.group());
    if (token.length > 1) return this.command(this.next().slice(1));
    if (/[\d.]/.test(token) && (token !== "." || /\d/.test(this.source[this.at + 1] ?? ""))) return this.number();
    this.next();
    if (/\p{L}/u.test(token)) return this.letter(token);
    if (token === "~") return m("mspace", { width: SPACES[" "] });
    if ("()[]|".includes(token)) return operator(token, { stretchy: "false" });
    return operator({ "-": "−", "*": "∗", "/": "/" }[token] ?? token);
  }

  number() {
    let end = this.at;
    while (/[\d.,]/.test(this.source[end] ?? "") && (/\d/.test(this.source[end]) || /\d/.test(this.source[end + 1] ?? ""))) end += 1;
    const text = this.source.slice(this.at, end);
    this.at = end;
    return m("mn", {}, this.form ? [...text].map((sign) => formed(sign, this.form)).join("") : text);
  }

  letter(sign) {
    if (this.form && this.form !== "rm") return m("mi", { mathvariant: "normal" }, formed(sign, this.form));
    return m("mi", this.form === "rm" || isUpright(sign) ? { mathvariant: "normal" } : {}, sign);
  }

  command(name) {
    if (LARGE[name]) return this.large(LARGE[name]);
    if (FENCES[name] && !OPERATORS[name]) return operator(FENCES[name], { stretchy: "false" });
    if (Object.hasOwn(OPERATORS, name)) return operator(OPERATORS[name]);
    if (Object.hasOwn(LETTERS, name)) return this.letter(LETTERS[name]);
    if (Object.hasOwn(SPACES, name)) return m("mspace", { width: SPACES[name] });
    if (FUNCTIONS.has(name)) return named(name.replace(/^lim(?=sup|inf)|^arg(?=max|min)/, "$& "), LIMITS.has(name));
    if (Object.hasOwn(ACCENTS, name)) return this.accented("mover", { accent: "true" }, ACCENTS[name], name);
    if (Object.hasOwn(UNDER, name)) return this.accented("munder", {}, UNDER[name], name);
    if (Object.hasOwn(ALPHABETS, name)) return this.styled(ALPHABETS[name], name);
    if (SIZES.has(name)) return operator(this.fence(), { stretchy: "true", minsize: /^[bB]ig[lrm]?$/.test(name) ? "1.2em" : "1.8em" });
    if (IGNORED.has(name)) return null;
    if (SKIPPED.has(name)) return void this.raw() ?? null;
    if (TEXTS.has(name)) return m("mtext", {}, spaced(this.raw()));
    if (UPRIGHT.has(name)) return this.upright(name);
    return this.built(name);
  }

  /** Commands that put their arguments together. */
  built(name) {
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return m("mfrac", {}, this.argument(), this.argument());
      case "binom":
      case "dbinom":
      case "tbinom":
        return m("mrow", {}, operator("("), m("mfrac", { linethickness: "0" }, this.argument(), this.argument()), operator(")"));
      case "sqrt": {
        const index = this.optional();
        return index ? m("mroot", {}, this.argument(), index) : m("msqrt", {}, this.argument());
      }
      case "overset":
      case "stackrel": {
        const above = this.argument();
        return m("mover", {}, this.argument(), above);
      }
      case "underset": {
        const below = this.argument();
        return m("munder", {}, this.argument(), below);
      }
      case "xrightarrow":
      case "xleftarrow": {
        const below = this.optional();
        const arrow = operator(name === "xrightarrow" ? "→" : "←", { stretchy: "true" });
        return below ? m("munderover", {}, arrow, below, this.argument()) : m("mover", {}, arrow, this.argument());
      }
      case "left":
        return this.fenced();
      case "middle":
        return operator(this.fence(), { stretchy: "true" });
      case "begin":
        return this.environment();
      case "substack":
        this.expect("{");
        return this.table("substack", ["}"], () => this.expect("}"));
      case "boxed":
      case "fbox":
        return m("mrow", { class: "boxed" }, this.argument());
      case "phantom":
      case "hphantom":
      case "vphantom":
        return m("mphantom", {}, this.argument());
      case "not":
        return m("mo", {}, `${this.argument().textContent}\u0338`);
      case "bmod":
      case "mod":
        return m("mrow", {}, operator("mod", { lspace: "0.3em", rspace: "0.3em" }));
      case "pmod":
        return m("mrow", {}, m("mspace", { width: "0.5em" }), operator("("), m("mi", {}, "mod"), m("mspace", { width: "0.3em" }), this.argument(), operator(")"));
      case "textcolor":
        this.raw();
        return this.argument();
      default:
        throw new Error(`unknown: ${name}`);
    }
  }

  large(sign) {
    const made = operator(sign, { largeop: "true", movablelimits: "true" });
    if (!INTEGRALS.has(sign)) made.dataset.limits = "yes";
    return made;
  }

  accented(name, attributes, mark, command) {
    const base = this.argument();
    const made = m(name, attributes, base, operator(mark, { stretchy: String(WIDE.has(command)) }));
    if (command.endsWith("brace")) made.dataset.limits = "yes";
    return made;
  }

  /** Letters in another form; a command without braces changes the rest of its group in old TeX. */
  styled(form, name) {
    if (name.startsWith("text")) return m("mtext", {}, [...spaced(this.raw())].map((sign) => formed(sign, form)).join(""));
    const before = this.form;
    this.form = form;
    const made = this.argument();
    this.form = before;
    return made;
  }

  upright(name) {
    if (name === "operatorname") {
      const limits = this.peek() === "*" && Boolean(this.next());
      return named(spaced(this.raw()).replace(/\\[,;: ]|[{}]/g, ""), limits);
    }
    if (name === "mathrm" && /^\{[a-zA-Z]{2,40}\}/.test(this.source.slice(this.at, this.at + 42).trimStart())) return m("mi", {}, this.raw());
    return this.styled("rm", name);
  }

  /** The sign after \left, \right, \middle or \big; "" for a dot. */
  fence() {
    const token = this.next();
    if (token === ".") return "";
    const sign = token.length > 1 ? FENCES[token.slice(1)] : { "<": "⟨", ">": "⟩" }[token] ?? token;
    if (!sign || !"()[]{}|/‖⟨⟩⌈⌉⌊⌋⟮⟯⟦⟧⌜⌝⌞⌟↑↓↕⇑⇓\\".includes(sign)) throw new Error("no fence");
    return sign;
  }

  fenced() {
    const left = this.fence();
    const parts = this.list([]);
    this.expect("\\right");
    const right = this.fence();
    return between(left, parts, right);
  }

  environment() {
    const name = this.raw().replace("*", "");
    if (name === "array" || name === "alignedat" || name === "alignat") this.raw();
    const close = () => {
      this.expect("\\end");
      if (this.raw().replace("*", "") !== name) throw new Error("unbalanced");
    };
    const table = this.table(name, [], close);
    const [left, right] = AROUND[name] ?? "  ";
    return AROUND[name] ? between(left.trim(), [table], right.trim()) : table;
  }

  /** Rows and cells up to what `close` reads. */
  table(name, ends, close) {
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.list(ends));
      const token = this.peek();
      if (token === "&") this.next();
      else if (token === "\\\\" || token === "\\cr") {
        this.next();
        if (this.source[this.at] === "[") this.optional();
        rows.push([]);
      } else break;
    }
    close();
    if (rows.length > 1 && rows.at(-1).every((cell) => !cell.length)) rows.pop();
    const side = (i) => (ALIGNED.has(name) ? (i % 2 ? "left" : "right") : name.endsWith("cases") ? "left" : "center");
    const line = (cells) => m("mtr", {}, ...cells.map((cell, i) => m("mtd", { class: side(i) }, ...cell)));
    return m("mtable", ALIGNED.has(name) ? { displaystyle: "true", class: "aligned" } : {}, ...rows.map(line));
  }
}
