// Talks to a server with Anthropic's client for Node: node anthropic_client.mjs URL TOOLS, with OpenAI's form of tools
import Anthropic from "@anthropic-ai/sdk";
import { betaTool } from "@anthropic-ai/sdk/helpers/beta/json-schema";
import assert from "node:assert/strict";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const asked = { model: "bundled", max_tokens: 30, temperature: 0, messages: [{ role: "user", content: "What is 3+4?" }] };

const message = await client.messages.create(asked);
assert.equal(message.content[0].text, "3 + 4 = 7");
assert.equal(message.stop_reason, "end_turn");

const stream = client.messages.stream(asked);
const kinds = [];
for await (const event of stream) kinds.push(event.type);
const streamed = await stream.finalMessage();
assert.deepEqual(streamed.content, message.content);
assert.equal(kinds[0], "message_start");
assert.equal(kinds.at(-1), "message_stop");

const { max_tokens, temperature, ...conversation } = asked;
const counted = await client.messages.countTokens(conversation);
assert.equal(counted.input_tokens, message.usage.input_tokens + message.usage.cache_read_input_tokens);

await assert.rejects(client.messages.create({ ...asked, model: "claude" }), Anthropic.NotFoundError);
const cities = [];
const run = {
  get_time: ({ city }) => (cities.push(city), "14:05"),
  calculate: () => assert.fail("nobody asked for a sum"),
};
const tools = JSON.parse(process.argv[3]).map(({ function: { name, description, parameters } }) =>
  betaTool({ name, description, inputSchema: parameters, run: run[name] }),
);
const question = { ...asked, max_tokens: 100, tools, max_iterations: 3, messages: [{ role: "user", content: "What time is it in Paris?" }] };
const told = await client.beta.messages.toolRunner(question);
assert.equal(told.content[0].text, "It is 14:05 in Paris.");

const reasons = [];
for await (const turn of client.beta.messages.toolRunner({ ...question, stream: true })) {
  const inputs = [];
  turn.on("inputJson", (_, input) => inputs.push(input));
  const { content, stop_reason } = await turn.finalMessage();
  reasons.push(stop_reason);
  if (stop_reason === "tool_use") assert.deepEqual(inputs.at(-1), content.at(-1).input);
  else assert.deepEqual(content, told.content);
}
assert.deepEqual(reasons, ["tool_use", "end_turn"]);
assert.deepEqual(cities, ["Paris", "Paris"]);
console.log("ok");
