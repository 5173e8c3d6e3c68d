// Tokens coloured by how probable they were; the pointer or the arrow keys show what else was likely.

import { h } from "./dom.js";
import { percent } from "./format.js";

const STEPS = [0.95, 0.75, 0.4, 0.1];

/** Make the view of an answer's tokens: [{token, logprob, top: [{token, logprob}]}]. */
export function tokensView(tokens) {
  const detail = h("div", { class: "token-detail", role: "status" });
  const spans = tokens.map(({ token, logprob }) => h("span", { class: `token p${step(Math.exp(logprob))}` }, token));
  const text = h("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Tokens by probability; arrow keys move" }, spans);
  let at = -1;
  const select = (index) => {
    spans[at]?.classList.remove("selected");
    at = Math.max(0, Math.min(index, spans.length - 1));
    spans[at].classList.add("selected");
    detail.replaceChildren(...alternatives(tokens[at]));
  };
  text.addEventListener("pointerover", (event) => {
    if (spans.includes(event.target)) select(spans.indexOf(event.target));
  });
  text.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!by) return;
    event.preventDefault();
    select(at + by);
  });
  if (tokens.length) select(0);
  return h("div", { class: "tokens-view" }, text, detail);
}

const step = (probability) => STEPS.filter((bound) => probability < bound).length;

/** What else the position might have been, best first. */
function alternatives({ token, logprob, top }) {
  const rows = top.some((each) => each.token === token) ? top : [{ token, logprob }, ...top];
  return rows.map((each) => {
    const bar = h("span", { class: "share" });
    bar.style.inlineSize = `${100 * Math.exp(each.logprob)}%`;
    const share = h("span", { class: "figures" }, percent(Math.exp(each.logprob)));
    return h("div", { class: each.token === token ? "alternative chosen" : "alternative" }, h("code", {}, JSON.stringify(each.token).slice(1, -1)), h("span", { class: "track" }, bar), share);
  });
}
