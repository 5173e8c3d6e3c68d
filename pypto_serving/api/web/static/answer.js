// Generate one answer: read its events into a message, and measure it.

import { streamChat } from "./api.js";

/** A message that is still empty. */
export const emptyAnswer = (model) => ({ role: "assistant", model, content: "", reasoning: "", calls: [], tokens: [] });

/** Stream the answer to `body` into `node`; call `changed` after each event. Fill in `node.error` or `node.finish`. */
export async function generate(node, body, signal, changed) {
  const started = performance.now();
  let first = null;
  let last = null;
  try {
    for await (const event of streamChat({ ...body, stream: true, stream_options: { include_usage: true } }, signal)) {
      if (event.usage) node.usage = event.usage;
      const choice = event.choices[0];
      if (!choice) continue;
      last = performance.now();
      first ??= last;
      take(node, choice);
      changed();
    }
  } catch (error) {
    if (error.name === "AbortError") node.finish = "stopped";
    else node.error = error.message;
  }
  if (first === null) return;
  node.ttft_s = (first - started) / 1e3;
  const tokens = node.usage?.completion_tokens;
  if (tokens > 1 && last > first) node.rate = (tokens - 1) / ((last - first) / 1e3);
}

function take(node, { delta, logprobs, finish_reason: finish }) {
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning_content ?? "";
  for (const call of delta.tool_calls ?? []) {
    node.calls[call.index] ??= { id: "", name: "", arguments: "" };
    const known = node.calls[call.index];
    known.id ||= call.id ?? "";
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  for (const { token, logprob, top_logprobs: top } of logprobs?.content ?? []) node.tokens.push({ token, logprob, top });
  if (finish) node.finish = finish;
}
