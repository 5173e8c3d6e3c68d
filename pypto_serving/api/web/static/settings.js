// The panel of settings. What is left empty is the server's to decide.

import { h } from "./dom.js";
import { CHOICES, FORMATS, NUMBERS, problemOf } from "./request.js";

const TOOL = [
  {
    type: "function",
    function: {
      name: "calculate",
      description: "Compute an arithmetic expression.",
      parameters: { type: "object", properties: { expression: { type: "string" } }, required: ["expression"] },
    },
  },
];
const SCHEMA = { type: "object", properties: { answer: { type: "string" } }, required: ["answer"], additionalProperties: false };

/** Fill the panel in for `settings`, and change them as the user does; call `changed` then. */
export function showSettings(panel, settings, models, changed) {
  const set = (name, value) => {
    settings[name] = value;
    changed();
  };
  const defaults = models.find((model) => model.id === settings.model)?.default_sampling ?? models[0]?.default_sampling ?? {};
  panel.replaceChildren(
    h("h2", {}, "Settings"),
    choice("Model", settings.model ?? "", Object.fromEntries(models.map((model) => [model.id, model.id])), (value) => set("model", value)),
    area("System prompt", settings.system, (value) => set("system", value), { rows: 3 }),
    section("Sampling", settings, ["stop", ...NUMBERS.map(({ name }) => name)], [
      h("div", { class: "pairs" }, NUMBERS.map((number) => numeric(number, settings, defaults, set))),
      area("Stop strings, one a line", settings.stop, (value) => set("stop", value), { rows: 2 }),
    ]),
    section("Tools", settings, ["tools"], [
      json("Tools", "tools", settings, set, TOOL),
      choice("Calls", settings.tool_choice ?? "auto", CHOICES, (value) => set("tool_choice", value)),
    ]),
    formatSection(settings, set),
    section("More", settings, ["logprobs", "more"], [
      check("Probabilities of tokens", settings.logprobs, (value) => set("logprobs", value)),
      json("Further fields of the request", "more", settings, set, { ignore_eos: false }),
    ]),
  );
}

/** A section that is open if one of its settings is set. */
function section(title, settings, names, content) {
  return h("details", { open: names.some((name) => settings[name] !== undefined && settings[name] !== "") }, h("summary", {}, title), h("div", { class: "stack" }, content));
}

function formatSection(settings, set) {
  const schema = json("Schema", "schema", settings, set, SCHEMA);
  const show = (format) => {
    schema.hidden = format !== "json_schema";
  };
  show(settings.format);
  const pick = choice("Answers are", settings.format ?? "text", FORMATS, (value) => {
    set("format", value === "text" ? undefined : value);
    show(value);
  });
  return section("Format", settings, ["format"], [pick, schema]);
}

function field(label, input, ...more) {
  return h("label", { class: "field" }, h("span", {}, label), input, ...more);
}

function choice(label, value, options, pick) {
  const select = h("select", {}, Object.entries(options).map(([name, text]) => h("option", { value: name, selected: name === value }, text)));
  select.addEventListener("change", () => pick(select.value));
  return field(label, select);
}

function area(label, value, write, attributes) {
  const input = h("textarea", attributes);
  input.value = value ?? "";
  input.addEventListener("input", () => write(input.value));
  return field(label, input);
}

function numeric({ name, label, min, max, step }, settings, defaults, set) {
  const given = defaults[name];
  const { input, whole } = checked(name, label, "input", { name, inputmode: min < 0 ? "text" : "decimal", autocomplete: "off", placeholder: given === undefined ? "–" : String(given) }, settings, set);
  input.addEventListener("keydown", (event) => {
    const by = { ArrowUp: step, ArrowDown: -step }[event.key];
    if (!by) return;
    event.preventDefault();
    const next = (Number(input.value || given || 0) || 0) + by;
    input.value = String(Number(Math.min(max, Math.max(min, next)).toFixed(6)));
    input.dispatchEvent(new Event("input"));
  });
  return whole;
}

/** A field that keeps whatever is typed, and says what is wrong with it. */
function checked(name, label, kind, attributes, settings, set) {
  const id = `setting-${name}`;
  const input = h(kind, { id, "aria-describedby": `${id}-wrong`, ...attributes });
  const wrong = h("span", { id: `${id}-wrong`, class: "wrong", role: "status" });
  const look = () => {
    wrong.textContent = problemOf(name, input.value);
    input.setAttribute("aria-invalid", String(Boolean(wrong.textContent)));
  };
  input.value = settings[name] ?? "";
  input.addEventListener("input", () => {
    set(name, input.value);
    look();
  });
  look();
  return { input, whole: h("div", { class: "field" }, h("label", { for: id }, label), input, wrong) };
}

/** Bring the field of a setting into view and give it the focus. */
export function showSetting(name) {
  const input = document.getElementById(`setting-${name}`);
  input.closest("details").open = true;
  input.focus();
}

function check(label, value, write) {
  const input = h("input", { type: "checkbox", checked: Boolean(value) });
  input.addEventListener("change", () => write(input.checked));
  return h("label", { class: "check" }, input, label);
}

/** A field of JSON that offers an example while it is empty. */
function json(label, name, settings, set, example) {
  const { input, whole } = checked(name, label, "textarea", { class: "code", rows: 5, spellcheck: "false" }, settings, set);
  const insert = h("button", { type: "button", class: "button small" }, "Insert an example");
  const look = () => {
    insert.hidden = Boolean(input.value.trim());
  };
  input.addEventListener("input", look);
  insert.addEventListener("click", () => {
    input.value = JSON.stringify(example, null, 2);
    input.dispatchEvent(new Event("input"));
    input.focus();
    input.setSelectionRange(0, 0);
    input.scrollTop = 0;
  });
  look();
  whole.append(insert);
  return whole;
}
