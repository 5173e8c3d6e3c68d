// The body of a request, from settings and messages; and the same request as code.

export const NUMBERS = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.1 },
  { name: "top_p", label: "Top p", min: 0, max: 1, step: 0.05 },
  { name: "top_k", label: "Top k", min: 0, max: 1000, step: 1 },
  { name: "min_p", label: "Min p", min: 0, max: 1, step: 0.01 },
  { name: "max_tokens", label: "Max tokens", min: 1, step: 1 },
  { name: "seed", label: "Seed", step: 1 },
  { name: "presence_penalty", label: "Presence penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", label: "Frequency penalty", min: -2, max: 2, step: 0.1 },
  { name: "repetition_penalty", label: "Repetition penalty", min: 0.1, max: 2, step: 0.05 },
];
export const FORMATS = { text: "Text", json_object: "Any JSON object", json_schema: "JSON by a schema" };
export const CHOICES = { auto: "The model decides", required: "At least one call", none: "No calls" };
export const TOP_LOGPROBS = 5;

/** Return what a setting of JSON holds, or undefined if it is empty. Throw SyntaxError. */
export function parsed(text) {
  return text?.trim() ? JSON.parse(text) : undefined;
}

/** Make the body. Throw SyntaxError for a setting that is no JSON. */
export function requestBody(settings, messages) {
  const body = { model: settings.model, messages: [] };
  if (settings.system?.trim()) body.messages.push({ role: "system", content: settings.system });
  body.messages.push(...messages.map(sent));
  for (const { name } of NUMBERS) if (settings[name] !== undefined && settings[name] !== "") body[name] = Number(settings[name]);
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
  const message = { role: node.role, content: node.content };
  if (node.calls?.length) {
    message.content ||= null;
    message.tool_calls = node.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
  }
  return message;
}

/** The request as a command for a shell. */
export function asCurl(body, base, hasKey) {
  const lines = [`curl ${base}/chat/completions`, `-H 'Content-Type: application/json'`];
  if (hasKey) lines.push(`-H "Authorization: Bearer $API_KEY"`);
  lines.push(`-d '${JSON.stringify(body, null, 2).replaceAll("'", `'\\''`)}'`);
  return lines.join(" \\\n  ");
}

/** The request in Python, for the package openai. */
export function asPython(body, base, hasKey) {
  const ours = new Set(["top_k", "min_p", "repetition_penalty"]);
  const known = Object.entries(body).filter(([name]) => !ours.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => ours.has(name)));
  const lines = known.map(([name, value]) => `    ${name}=${python(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${python(extra, 1)},`);
  const key = hasKey ? 'os.environ["API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${python(base)}, api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message.content)",
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
