// Formulas: TeX, as models write it, to MathML, which browsers draw themselves. What is not understood stays as it was written.

import { h } from "./dom.js";
import { m, row } from "./mathml.js";
import { Tex } from "./tex.js";

const MAX_SOURCE = 5000;

/** The element of a formula; its source where that is no TeX that is known here. */
export function formula(source, display) {
  try {
    if (source.length > MAX_SOURCE) throw new Error("too long");
    const parts = new Tex(source.trim()).whole();
    const math = m("math", display ? { display: "block" } : {}, row(parts));
    return display ? h("span", { class: "formula", tabindex: 0, role: "group", "aria-label": "Formula" }, math) : math;
  } catch {
    return h("code", { class: "tex" }, source);
  }
}
