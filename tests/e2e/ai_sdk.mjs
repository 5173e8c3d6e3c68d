// Talks to a server with Vercel's AI SDK: node ai_sdk.mjs URL ENDPOINT TOOLS, with OpenAI's form of tools
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import assert from "node:assert/strict";

const [url, endpoint, described] = process.argv.slice(2);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const model = {
  chat: () => openai.chat("bundled"),
  responses: () => openai.responses("bundled"),
  messages: () => createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("bundled"),
}[endpoint]();
const settings = { model, temperature: 0, maxOutputTokens: 100, maxRetries: 0 };

const sum = await generateText({ ...settings, prompt: "What is 3+4?" });
assert.equal(sum.text, "3 + 4 = 7");
assert.equal(sum.finishReason, "stop");
assert.ok(sum.usage.inputTokens > 0 && sum.usage.outputTokens > 0);

const streamed = streamText({ ...settings, prompt: "What is 3+4?" });
const pieces = [];
for await (const piece of streamed.textStream) pieces.push(piece);
assert.equal(pieces.join(""), sum.text);
assert.ok(pieces.length > 1);
assert.equal((await streamed.usage).outputTokens, sum.usage.outputTokens);

const asked = [];
const execute = {
  get_time: (input) => (asked.push(input), "14:05"),
  calculate: () => assert.fail("nobody asked for a sum"),
};
const tools = Object.fromEntries(
  JSON.parse(described).map(({ function: { name, description, parameters } }) => [
    name,
    tool({ description, inputSchema: jsonSchema(parameters), execute: execute[name] }),
  ]),
);
const question = { ...settings, tools, stopWhen: isStepCount(3), prompt: "What time is it in Paris?" };
const told = await generateText(question);
assert.deepEqual(asked, [{ city: "Paris" }]);
assert.equal(told.steps.length, 2);
assert.equal(told.text, "It is 14:05 in Paris.");

const stream = streamText(question);
assert.equal(await stream.text, told.text);
assert.deepEqual(asked, [{ city: "Paris" }, { city: "Paris" }]);

const whole = { type: "integer" };
const schema = jsonSchema({
  type: "object",
  properties: { a: whole, b: whole, result: whole },
  required: ["a", "b", "result"],
  additionalProperties: false,
});
const made = await generateText({
  ...settings,
  output: Output.object({ schema }),
  prompt: "What is 12+30? Answer in JSON.",
});
assert.deepEqual(made.output, { a: 12, b: 30, result: 42 });

await assert.rejects(generateText({ ...settings, maxOutputTokens: 0x7fffffff + 1, prompt: "a" }), { statusCode: 400 });
console.log("ok");
