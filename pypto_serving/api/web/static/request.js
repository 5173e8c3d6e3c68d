// The body of a request, from settings and messages; and the same request as code.

export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: -1, max: 2 ** 31 - 1, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", min: 1, max: 2 ** 31 - 1, step: 1 },
  { name: "seed", label: "Seed", min: Number.MIN_SAFE_INTEGER, max: Number.MAX_SAFE_INTEGER, step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.01, max: 100, step: 0.05 },
];
const JSONS = {
  tools: { label: "Tools", fits: Array.isArray, form: "a list: [ … ]" },
  schema: { label: "Schema", fits: isObject, form: "an object: { … }" },
  more: { label: "Further fields of the request", fits: isObject, form: "an object: { … }" },
};
export const FORMATS = { text: "Text", json_object: "Any JSON object", json_schema: "JSON by a schema" };
export const CHOICES = { auto: "The model decides", required: "At least one call", none: "No calls" };
export const TOP_LOGPROBS = 5;

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

/** What is wrong with the text of a setting, in words; "" if nothing is. */
export function problemOf(name, text) {
  if (typeof text !== "string" || !text.trim()) return "";
  if (JSONS[name]) return jsonProblem(JSONS[name], text);
  const number = NUMBERS.find((each) => each.name === name);
  if (!number) return "";
  const { min, max, step } = number;
  const value = Number(text);
  if (!Number.isFinite(value)) return "Must be a number";
  if (step === 1 && !Number.isInteger(value)) return "Must be a whole number";
  if (value < min) return max > 100 ? `Must be at least ${min}` : `Must be from ${min} to ${max}`;
  return value > max ? `Must be from ${min} to ${max}` : "";
}

function jsonProblem({ fits, form }, text) {
  try {
    return fits(JSON.parse(text)) ? "" : `Must be ${form}`;
  } catch (error) {
    return `Is not JSON: ${error.message}`;
  }
}

/** The settings that are wrong: [{name, label, problem}]. */
export function problems(settings) {
  const known = [...NUMBERS, ...Object.entries(JSONS).map(([name, { label }]) => ({ name, label }))];
  const used = known.filter(({ name }) => name !== "schema" || settings.format === "json_schema");
  return used.map(({ name, label }) => ({ name, label, problem: problemOf(name, settings[name]) })).filter(({ problem }) => problem);
}

const parsed = (text) => (text?.trim() ? JSON.parse(text) : undefined);

/** Make the body from settings that have no problems. */
export function requestBody(settings, messages) {
  const body = { model: settings.model, messages: [] };
  if (settings.system?.trim()) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...messages.map(sent));
  for (const { name } of NUMBERS) if (settings[name]?.trim()) body[name] = Number(settings[name]);
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  const tools = parsed(settings.tools);
  if (tools?.length) {
    body.tools = tools;
    if (settings.tool_choice && settings.tool_choice !== "auto") body.tool_choice = settings.tool_choice;
  }
  if (settings.format === "json_object") body.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(settings.schema) ?? {} } };
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP_LOGPROBS });
  return Object.assign(body, parsed(settings.more));
}

/** A message as the API takes it. */
function sent(node) {
  if (node.role === "tool") return { role: "tool", tool_call_id: node.call_id, content: node.content };
  const message = { role: node.role, content: [node.content, ...(node.files ?? []).map(quoted)].filter(Boolean).join("\n\n") };
  if (node.calls?.length) {
    message.content ||= null;
    message.tool_calls = node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return message;
}

/** A file as the model reads it: its name, and its text between fences longer than any in it. */
function quoted({ name, text }) {
  let fence = "```";
  while (text.includes(fence)) fence += "`";
  return `${name}:\n${fence}\n${text.trimEnd()}\n${fence}`;
}

/** The body as it is exported: not as a stream. */
function exported(body) {
  const { stream, stream_options: options, ...rest } = body;
  return rest;
}

/** The request as a command for a shell; the body is its input, so it may be long and hold any sign. */
export function asCurl(body, base, hasKey) {
  const lines = [`curl '${base}/chat/completions'`, `-H 'Content-Type: application/json'`];
  if (hasKey) lines.push(`-H "Authorization: Bearer $API_KEY"`);
  lines.push("--data-binary @- <<'END'");
  return `${lines.join(" \\\n  ")}\n${JSON.stringify(exported(body), null, 2)}\nEND`;
}

/** What the method of the package openai takes by name in all its versions; the rest goes into extra_body. */
const OPENAI = new Set(
  ["messages", "model", "frequency_penalty", "logit_bias", "logprobs", "max_tokens", "n", "presence_penalty", "response_format"].concat(
    ["seed", "stop", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user"],
  ),
);

/** The request in Python, for the package openai. */
export function asPython(body, base, hasKey) {
  const fields = Object.entries(exported(body));
  const lines = fields.filter(([name]) => OPENAI.has(name)).map(([name, value]) => `    ${name}=${python(value, 1)},`);
  const extra = fields.filter(([name]) => !OPENAI.has(name));
  if (extra.length) lines.push(`    extra_body=${python(Object.fromEntries(extra), 1)},`);
  const key = hasKey ? 'os.environ["API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(base)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "for choice in answer.choices:",
    "    print(choice.message.content or choice.message.tool_calls)",
    "",
  ].join("\n");
}

/** Write a JSON value as Python. */
function python(value, depth = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const array = Array.isArray(value);
  const parts = array ? value.map((each) => python(each, depth + 1)) : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${python(each, depth + 1)}`);
  const [open, close] = array ? "[]" : "{}";
  const line = `${open}${parts.join(", ")}${close}`;
  if (line.length <= 88 && !line.includes("\n")) return line;
  const pad = "    ".repeat(depth + 1);
  return `${open}\n${parts.map((part) => `${pad}${part},\n`).join("")}${"    ".repeat(depth)}${close}`;
}
