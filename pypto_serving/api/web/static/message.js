// One message of the thread, and what can be done with it.

import { CodeBlock, code } from "./code.js";
import { copyFrom, h, icon, iconButton } from "./dom.js";
import { percent, short, time } from "./format.js";
import { showMarkdown } from "./markdown.js";
import { tokensView } from "./tokens.js";

const NAMES = { user: "You", assistant: "Model", tool: "Tool result" };

/** A view of `node`. `does` has what its buttons do: edit, regenerate, remove, turn, answerCalls. */
export class MessageView {
  constructor(node, does) {
    this.node = node;
    this.does = does;
    this.asTokens = false;
    this.cards = [];
    this.body = h("div", { class: "body" });
    this.foot = h("div", { class: "foot" });
    this.element = h("article", { class: `message ${node.role}`, "aria-label": NAMES[node.role] }, this.body, this.foot);
  }

  /** Show the message as it is now; `place` says which alternative of how many it is. */
  show({ streaming, place, count, last }) {
    if (this.editing) return;
    this.element.setAttribute("aria-busy", String(streaming));
    this.element.classList.toggle("streaming", streaming);
    this.showBody(streaming, last);
    this.foot.replaceChildren(...(streaming ? [] : [this.buttons(place, count), this.stats()].filter(Boolean)));
  }

  showBody(streaming, last) {
    const { node } = this;
    if (this.asTokens) {
      this.body.replaceChildren(tokensView(node.tokens));
      return;
    }
    this.text ??= h("div", { class: "prose" });
    const shown = [this.text];
    if (node.role === "tool") shown[0] = code(node.content, `result of ${node.name}`);
    else if (node.role === "user") {
      this.text.textContent = node.content;
      shown.push(...this.files());
    } else showMarkdown(this.text, node.content);
    if (node.reasoning) shown.unshift(this.reasoning(streaming));
    if (node.calls?.length) shown.push(...node.calls.map((call, i) => (this.cards[i] ??= new CallCard(call.name)).show(call.arguments, streaming)));
    if (node.calls?.length && last && !streaming && !node.error) shown.push(this.resultsForm());
    if (node.error) shown.push(this.failure());
    if (streaming && !node.content && !node.reasoning && !node.calls.length) shown.push(h("p", { class: "waiting" }, "Waiting for the first token"));
    const keep = shown.length === this.body.children.length && shown.every((each, i) => each === this.body.children[i]);
    if (!keep) this.body.replaceChildren(...shown);
  }

  /** What went wrong, with a button that tries again. */
  failure() {
    const { node } = this;
    if (this.failed?.firstChild.textContent === node.error) return this.failed;
    const again = h("button", { type: "button", class: "button small", click: () => this.does.regenerate(node) }, "Try again");
    this.failed = h("div", { class: "error", role: "alert" }, h("p", {}, node.error), again);
    return this.failed;
  }

  /** The attached files, folded. */
  files() {
    this.attached ??= (this.node.files ?? []).map(({ name, text }) => h("details", { class: "file" }, h("summary", {}, icon("attach"), h("span", { class: "title" }, name)), code(text, name)));
    return this.attached;
  }

  /** The reasoning, folded once the answer begins. */
  reasoning(streaming) {
    const { node } = this;
    if (!this.thought) {
      this.thoughtText = h("div", { class: "prose" });
      this.thought = h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), this.thoughtText);
    }
    showMarkdown(this.thoughtText, node.reasoning);
    const thinks = streaming && !node.content && !node.calls.length;
    if (thinks !== this.thinks) this.thought.open = thinks;
    this.thinks = thinks;
    return this.thought;
  }

  buttons(place, count) {
    const { node, does } = this;
    const found = [];
    if (count > 1) {
      found.push(
        h(
          "span",
          { class: "versions figures" },
          iconButton("left", "Earlier version", () => does.turn(node, -1), { disabled: place === 0 }),
          h("span", { "aria-label": `Version ${place + 1} of ${count}` }, `${place + 1} / ${count}`),
          iconButton("right", "Later version", () => does.turn(node, 1), { disabled: place === count - 1 }),
        ),
      );
    }
    const copy = iconButton("copy", "Copy", () => copyFrom(copy, node.content));
    if (node.content) found.push(copy);
    found.push(iconButton("edit", "Edit", () => this.edit()));
    if (node.role === "assistant") found.push(iconButton("undo", "Regenerate", () => does.regenerate(node)));
    if (node.tokens?.length) {
      found.push(
        iconButton("tokens", "Probabilities of tokens", () => {
          this.asTokens = !this.asTokens;
          does.redraw();
        }, { "aria-pressed": String(this.asTokens) }),
      );
    }
    found.push(iconButton("trash", "Delete", () => does.remove(node)));
    return h("div", { class: "row buttons" }, found);
  }

  stats() {
    const found = statsOf(this.node);
    return found.length ? h("ul", { class: "stats figures", "aria-label": "Statistics" }, found.map(([text, title]) => h("li", { title }, text))) : null;
  }

  /** Replace the text by a field; saving makes another version. */
  edit() {
    const { node } = this;
    const field = h("textarea", { "aria-label": "Message", rows: Math.min(16, node.content.split("\n").length + 1) });
    field.value = node.content;
    const done = (save) => {
      if (save && this.does.edit(node, field.value) === false) return;
      this.editing = false;
      this.does.redraw();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        done(false);
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) done(true);
    });
    const save = h("button", { type: "button", class: "button primary", click: () => done(true) }, node.role === "user" ? "Save and send" : "Save");
    const cancel = h("button", { type: "button", class: "button", click: () => done(false) }, "Cancel");
    this.editing = true;
    this.body.replaceChildren(h("div", { class: "stack editor" }, field, h("div", { class: "row end" }, cancel, save)));
    this.foot.replaceChildren();
    field.focus();
  }

  /** Fields for the results of the calls; sending them goes on. Enter goes to the next empty field, and sends in the end. */
  resultsForm() {
    if (this.results) return this.results;
    const { node } = this;
    const fields = node.calls.map((call) => h("textarea", { class: "code", rows: 2, "aria-label": `Result of ${call.name}`, placeholder: `What ${call.name} returns` }));
    const send = h("button", { class: "button primary" }, fields.length > 1 ? "Send results" : "Send result");
    this.results = h("form", { class: "stack results" }, fields, h("div", { class: "row end" }, send));
    this.results.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.target === send) return;
      event.preventDefault();
      const next = event.ctrlKey || event.metaKey ? null : fields.find((field) => field !== event.target && !field.value.trim());
      if (next) next.focus();
      else this.results.requestSubmit();
    });
    this.results.addEventListener("submit", (event) => {
      event.preventDefault();
      this.does.answerCalls(node, fields.map((field) => field.value));
    });
    return this.results;
  }
}

/** A call as it comes, and in order once it is complete. */
class CallCard {
  constructor(name) {
    this.pre = h("pre", { tabindex: 0 });
    this.element = h("section", { class: "call", "aria-label": `Call of ${name}` }, h("div", { class: "row" }, icon("tool"), h("strong", {}, name)), this.pre);
  }

  show(text, streaming) {
    if (this.complete) return this.element;
    if (!this.block || !streaming) {
      this.block = new CodeBlock("json");
      this.pre.replaceChildren(this.block.shown);
    }
    this.complete = !streaming;
    const lines = (streaming ? text : inOrder(text)).split("\n");
    this.block.show(lines, lines.length - 1);
    return this.element;
  }
}

/** JSON with its lines indented; anything else as it is. */
function inOrder(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** What was measured of an answer, as pairs of text and explanation. */
function statsOf({ usage, rate, ttft_s: ttft, finish }) {
  const found = [];
  if (usage) found.push([`${short(usage.completion_tokens)} tokens`, "Output tokens"]);
  if (rate) found.push([`${short(rate)} tok/s`, "Output tokens per second after the first"]);
  if (ttft !== undefined) found.push([`TTFT ${time(ttft)}`, "Time to the first token"]);
  if (usage) found.push(cached(usage));
  const drafts = usage?.completion_tokens_details;
  const drafted = drafts ? drafts.accepted_prediction_tokens + drafts.rejected_prediction_tokens : 0;
  if (drafted) found.push([`${percent(drafts.accepted_prediction_tokens / drafted)} of drafts`, "Drafts that were accepted"]);
  if (finish && finish !== "stop") found.push([finish.replace("_", " "), "Why it ended"]);
  return found;
}

function cached({ prompt_tokens: all, prompt_tokens_details: details }) {
  const tiers = Object.entries(details?.cached_tokens_by_tier ?? {}).filter(([, count]) => count);
  const where = tiers.map(([tier, count]) => `${short(count)} ${tier}`).join(", ");
  return [`${short(all)} prompt tokens${where ? `, cached: ${where}` : ""}`, "Tokens of the prompt, and where those came from that were cached"];
}
