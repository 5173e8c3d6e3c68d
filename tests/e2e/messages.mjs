// Talks to a server with Anthropic's client for Node: node messages.mjs URL
import Anthropic from "@anthropic-ai/sdk";
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
console.log("ok");
