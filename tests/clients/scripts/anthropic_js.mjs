// Anthropic's SDK for JavaScript: messages, streams, tools and the count of tokens.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const { CHAIRLIFT_URL, SCRIPTED_URL } = process.env;
const MODEL = "SmolLM2-135M-Instruct";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const ask = { model: MODEL, messages, temperature: 0 };
const ADD = {
  name: "add",
  description: "Add two numbers.",
  input_schema: {
    type: "object",
    properties: { a: { type: "integer" }, b: { type: "integer" } },
    required: ["a", "b"],
  },
};
const ADDED =
  'Go on. @@<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>@@It is {result}.@@';

async function plain() {
  const headers = { "content-type": "application/json" };
  const url = `${CHAIRLIFT_URL}/v1/chat/completions`;
  const answer = await (await fetch(url, { method: "POST", headers, body: JSON.stringify(ask) })).json();
  return [answer.choices[0].message.content, answer.usage];
}

const client = new Anthropic({ baseURL: CHAIRLIFT_URL, apiKey: "none", maxRetries: 0 });
const [text, usage] = await plain();
const answer = await client.messages.create({ ...ask, max_tokens: 100 });
assert.deepEqual([answer.content[0].text, answer.stop_reason], [text, "end_turn"]);
assert.equal(answer.usage.output_tokens, usage.completion_tokens);
assert.equal(await client.messages.stream({ ...ask, max_tokens: 100 }).finalText(), text);
const count = await client.messages.countTokens({ model: MODEL, messages });
assert.equal(count.input_tokens, usage.prompt_tokens);
await assert.rejects(client.messages.create({ ...ask, max_tokens: 0 }), Anthropic.BadRequestError);

const scripted = new Anthropic({ baseURL: SCRIPTED_URL, apiKey: "none", maxRetries: 0 });
const turn = { model: "scripted", max_tokens: 1000, tools: [ADD] };
const asked = { role: "user", content: ADDED };
const called = await scripted.messages.stream({ ...turn, messages: [asked] }).finalMessage();
assert.equal(called.stop_reason, "tool_use");
const use = called.content.find((block) => block.type === "tool_use");
assert.deepEqual([use.name, use.input], ["add", { a: 19, b: 23 }]);
const result = { type: "tool_result", tool_use_id: use.id, content: "42" };
const told = await scripted.messages.create({
  ...turn,
  messages: [asked, { role: "assistant", content: called.content }, { role: "user", content: [result] }],
});
assert.equal(told.content[0].text, "It is 42.");
