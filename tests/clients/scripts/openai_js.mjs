// OpenAI's SDK for JavaScript: chat, streams and their helpers, tools, structured answers, responses, embeddings.
import assert from "node:assert/strict";
import OpenAI from "openai";

const { CHAIRLIFT_URL, SCRIPTED_URL } = process.env;
const MODEL = "SmolLM2-135M-Instruct";
const EMBEDDINGS = "all-MiniLM-L6-v2";
const messages = [{ role: "user", content: "What is the capital of France?" }];
const CITY = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, country: { type: "string", maxLength: 20 } },
  required: ["name", "country"],
  additionalProperties: false,
};
const PARAMETERS = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
};
const ADDED =
  'Go on. @@<tool_call>\n{"name": "add", "arguments": {"a": 19, "b": 23}}\n</tool_call>@@It is {result}.@@';

async function plain(path, body) {
  const headers = { "content-type": "application/json" };
  const response = await fetch(CHAIRLIFT_URL + path, { method: "POST", headers, body: JSON.stringify(body) });
  return response.json();
}

async function chat(client, text) {
  const ask = { model: MODEL, messages, temperature: 0 };
  const answer = await client.chat.completions.create(ask);
  assert.equal(answer.choices[0].message.content, text);
  assert.equal(answer.choices[0].finish_reason, "stop");
  assert.equal(answer._request_id, answer.id);

  let streamed = "";
  let usage;
  const stream = await client.chat.completions.create({
    ...ask,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    streamed += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(streamed, text);
  assert.deepEqual(usage.completion_tokens, answer.usage.completion_tokens);

  assert.equal(await client.chat.completions.stream(ask).finalContent(), text);

  const response_format = { type: "json_schema", json_schema: { name: "city", strict: true, schema: CITY } };
  const city = await client.chat.completions.parse({ ...ask, response_format });
  assert.deepEqual(Object.keys(JSON.parse(city.choices[0].message.content)), ["name", "country"]);

  const left = await client.chat.completions.create({ ...ask, stream: true, ignore_eos: true });
  for await (const _ of left) break; // closes the connection
  await assert.rejects(client.chat.completions.create({ ...ask, temperature: 9 }), OpenAI.BadRequestError);
}

async function responses(client, text) {
  const ask = { model: MODEL, input: messages[0].content, temperature: 0 };
  const answer = await client.responses.create(ask);
  assert.equal(answer.output_text, text);
  assert.equal((await client.responses.retrieve(answer.id)).output_text, text);

  let streamed = "";
  for await (const event of await client.responses.create({ ...ask, stream: true })) {
    if (event.type === "response.output_text.delta") streamed += event.delta;
  }
  assert.equal(streamed, text);
  const helped = await client.responses.stream(ask).finalResponse();
  assert.equal(helped.output_text, text);

  const more = await client.responses.create({
    model: MODEL,
    input: "And of Italy?",
    previous_response_id: answer.id,
    temperature: 0,
    max_output_tokens: 16,
  });
  const conversation = [...messages, { role: "assistant", content: text }, { role: "user", content: "And of Italy?" }];
  const expected = await plain("/v1/chat/completions", {
    model: MODEL,
    messages: conversation,
    temperature: 0,
    max_tokens: 16,
  });
  assert.equal(more.output_text, expected.choices[0].message.content);
}

async function embeddings(client) {
  const input = ["A lift.", "A chair."];
  const { data } = await client.embeddings.create({ model: EMBEDDINGS, input }); // asks for base64
  const expected = await plain("/v1/embeddings", { model: EMBEDDINGS, input });
  assert.equal(data.length, 2);
  for (const [at, { embedding }] of data.entries()) {
    assert.equal(embedding.length, expected.data[at].embedding.length);
    for (const [i, value] of embedding.entries()) {
      assert.ok(Math.abs(value - expected.data[at].embedding[i]) < 1e-6);
    }
  }
}

async function tools(client) {
  const said = { model: "scripted", messages: [{ role: "user", content: ADDED }] };
  const calls = [];
  const add = {
    name: "add",
    description: "Add two numbers.",
    parameters: PARAMETERS,
    parse: JSON.parse,
    function: ({ a, b }) => {
      calls.push([a, b]);
      return String(a + b);
    },
  };
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ ...said, stream, tools: [{ type: "function", function: add }] });
    assert.equal(await runner.finalContent(), "It is 42.");
  }
  assert.deepEqual(calls, [[19, 23], [19, 23]]);

  const tool = { type: "function", name: "add", parameters: PARAMETERS, strict: true };
  const asked = { model: "scripted", input: ADDED, tools: [tool] };
  const first = await client.responses.create(asked);
  const call = first.output.find((item) => item.type === "function_call");
  assert.deepEqual([call.name, JSON.parse(call.arguments)], ["add", { a: 19, b: 23 }]);
  const second = await client.responses.create({
    ...asked,
    previous_response_id: first.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output: "42" }],
  });
  assert.equal(second.output_text, "It is 42.");
}

const client = new OpenAI({ baseURL: `${CHAIRLIFT_URL}/v1`, apiKey: "none", maxRetries: 0 });
const scripted = new OpenAI({ baseURL: `${SCRIPTED_URL}/v1`, apiKey: "none", maxRetries: 0 });
const asked = { model: MODEL, messages, temperature: 0 };
const text = (await plain("/v1/chat/completions", asked)).choices[0].message.content;
const models = [];
for await (const { id } of client.models.list()) models.push(id);
assert.deepEqual(models, [MODEL, EMBEDDINGS]);
await chat(client, text);
await responses(client, text);
await embeddings(client);
await tools(scripted);
