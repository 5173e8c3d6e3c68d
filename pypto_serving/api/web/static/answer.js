// Generate one answer: read its events into messages, one for each choice, and measure them.

import { streamChat } from "./api.js";

/** A message that is still empty. */
export const emptyAnswer = (model) => ({ role: "assistant", model, content: "", reasoning: "", calls: [], tokens: [] });

/** Stream the answer to `body` into `nodes`, one for each choice; `another` makes further ones as they begin.
 *
 * Call `changed` with the message after each event. Fill in `error` or `finish`. Every event tells its choice's counts,
 * so that an answer which is stopped keeps them.
 */
export async function generate(nodes, another, body, signal, changed) {
  const started = performance.now();
  const times = new Map();
  try {
    const options = { include_usage: true, continuous_usage_stats: true };
    for await (const event of streamChat({ ...body, stream: true, stream_options: options }, signal)) {
      for (const choice of event.choices) {
        while (nodes.length <= choice.index) nodes.push(another());
        const node = nodes[choice.index];
        const now = performance.now();
        times.set(node, { first: times.get(node)?.first ?? now, last: now });
        if (event.usage) node.usage = event.usage;
        take(node, choice);
        changed(node);
      }
      if (!event.choices.length && event.usage) {
        for (const node of nodes) node.usage = { ...event.usage, completion_tokens: (nodes.length > 1 && node.usage?.completion_tokens) || event.usage.completion_tokens };
      }
    }
  } catch (error) {
    for (const node of nodes) {
      if (error.name === "AbortError") node.finish ??= "stopped";
      else if (!node.finish) node.error = error.message;
    }
  }
  for (const [node, { first, last }] of times) {
    node.ttft_s = (first - started) / 1e3;
    const tokens = node.usage?.completion_tokens;
    if (tokens > 1 && last > first) node.rate = (tokens - 1) / ((last - first) / 1e3);
  }
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
