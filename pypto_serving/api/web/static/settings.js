// The panel of settings. What is left empty is the server's to decide.

import { h } from "./dom.js";
import { CHOICES, FORMATS, NUMBERS, parsed } from "./request.js";

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
  const input = h("input", { type: "number", name, min, max, step, placeholder: given === undefined ? "–" : String(given) });
  input.value = settings[name] ?? "";
  input.addEventListener("input", () => {
    const ok = input.checkValidity();
    input.setAttribute("aria-invalid", String(!ok));
    if (ok) set(name, input.value);
  });
  return field(label, input);
}

function check(label, value, write) {
  const input = h("input", { type: "checkbox", checked: Boolean(value) });
  input.addEventListener("change", () => write(input.checked));
  return h("label", { class: "check" }, input, label);
}

/** A field of JSON that says what is wrong with it, and offers an example while it is empty. */
function json(label, name, settings, set, example) {
  const id = `setting-${name}`;
  const input = h("textarea", { id, class: "code", rows: 5, spellcheck: "false", "aria-describedby": `${id}-wrong` });
  const wrong = h("span", { id: `${id}-wrong`, class: "wrong", role: "status" });
  const insert = h("button", { type: "button", class: "button small" }, "Insert an example");
  const look = () => {
    insert.hidden = Boolean(input.value.trim());
    wrong.textContent = "";
    try {
      parsed(input.value);
    } catch (error) {
      wrong.textContent = error.message;
    }
    input.setAttribute("aria-invalid", String(Boolean(wrong.textContent)));
  };
  const write = (text) => {
    input.value = text;
    set(name, text);
    look();
  };
  input.value = settings[name] ?? "";
  input.addEventListener("input", () => write(input.value));
  insert.addEventListener("click", () => {
    write(JSON.stringify(example, null, 2));
    input.focus();
    input.setSelectionRange(0, 0);
    input.scrollTop = 0;
  });
  look();
  return h("div", { class: "field" }, h("label", { for: id }, label), input, wrong, insert);
}
