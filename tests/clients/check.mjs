// The npm client against a gateway that answers "Hello, world!": `node check.mjs BASE_URL MODEL`.
// Prints the names of the checks that held; the first that does not ends the process with 1.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0, timeout: 20_000 });
const messages = [{ role: "user", content: "hi" }];
const HELLO = "Hello, world!";

const checks = {
  async "whole chat"() {
    const made = await client.chat.completions.create({ model, messages, temperature: 0 });
    assert.equal(made.object, "chat.completion");
    assert.equal(made.choices[0].message.content, HELLO);
    assert.equal(made.choices[0].finish_reason, "stop");
    assert.equal(made.usage.completion_tokens, HELLO.length + 1);
    assert.ok(made._request_id);
  },

  async "every parameter"() {
    const made = await client.chat.completions.create({
      model, n: 2, temperature: 0.5, top_p: 0.9, seed: 7, max_completion_tokens: 5,
      presence_penalty: 0.5, frequency_penalty: -0.5, logit_bias: { 65: -100 },
      stop: ["zzz"], logprobs: true, top_logprobs: 2, user: "ada", metadata: { team: "a" },
      service_tier: "auto", tool_choice: "auto", parallel_tool_calls: true,
      response_format: { type: "text" },
      tools: [{ type: "function", function: { name: "look", parameters: {} } }],
      messages: [
        { role: "developer", content: "be brief" },
        { role: "user", content: [{ type: "text", text: "a" }, { type: "text", text: "b" }] },
        { role: "assistant", content: null,
          tool_calls: [{ id: "1", type: "function", function: { name: "look", arguments: "{}" } }] },
        { role: "tool", tool_call_id: "1", content: "seen" },
      ],
    });
    assert.equal(made.choices.length, 2);
    assert.equal(made.choices[1].message.content, HELLO.slice(0, 5));
    assert.equal(made.choices[0].finish_reason, "length");
    assert.equal(made.choices[0].logprobs.content[0].top_logprobs.length, 2);
    assert.equal(made.service_tier, "default");
  },

  async "stream"() {
    const stream = await client.chat.completions.create({
      model, messages, stream: true, stream_options: { include_usage: true },
    });
    let text = "", usage = null, reasons = [];
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta.content ?? "";
      if (chunk.choices[0]?.finish_reason) reasons.push(chunk.choices[0].finish_reason);
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, HELLO);
    assert.deepEqual(reasons, ["stop"]);
    assert.equal(usage.completion_tokens, HELLO.length + 1);
  },

  async "stream helper"() {
    const deltas = [];
    const runner = client.chat.completions
      .stream({ model, messages, stream_options: { include_usage: true } })
      .on("content", (delta) => deltas.push(delta));
    assert.equal(await runner.finalContent(), HELLO);
    assert.equal(deltas.join(""), HELLO);
    assert.equal((await runner.totalUsage()).completion_tokens, HELLO.length + 1);
  },

  async "stream that the client leaves"() {
    const stream = await client.chat.completions.create({ model, messages, stream: true });
    for await (const _ of stream) break;
    assert.ok(stream.controller.signal.aborted);
  },

  async "completions"() {
    const made = await client.completions.create({
      model, prompt: "ab", echo: true, logprobs: 1, max_tokens: 2,
    });
    assert.equal(made.choices[0].text, "abHe");
    assert.deepEqual(made.choices[0].logprobs.token_logprobs, [null, -0.5, -0.5, -0.5]);
    const ids = await client.completions.create({ model, prompt: [[104], [105]], max_tokens: 1 });
    assert.deepEqual(ids.choices.map((choice) => choice.text), ["H", "H"]);
  },

  async "models"() {
    const names = [];
    for await (const one of client.models.list()) names.push(one.id);
    assert.deepEqual(names, [model]);
    assert.equal((await client.models.retrieve(model)).owned_by, "pdmesh");
  },

  async "errors by class"() {
    const ask = (more) => client.chat.completions.create({ model, messages, ...more });
    await assert.rejects(ask({ temperature: 3 }), (error) =>
      error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(ask({ response_format: { type: "json_object" } }), (error) =>
      error instanceof OpenAI.BadRequestError && error.code === "unsupported_parameter");
    await assert.rejects(ask({ model: "nothing" }), (error) =>
      error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
  },

  async "retries"() {
    // The first try of this name finds the mesh full; the test makes sure of that.
    const made = await client.chat.completions.create(
      { model, messages: [{ role: "user", content: "once full" }] }, { maxRetries: 2 });
    assert.equal(made.choices[0].message.content, HELLO);
  },

  async "rate limits"() {
    await assert.rejects(
      client.chat.completions.create({
        model, messages: [{ role: "user", content: "always full" }] }),
      (error) => error instanceof OpenAI.RateLimitError && error.headers.has("retry-after"));
  },

  async "failure in a stream"() {
    const stream = await client.chat.completions.create({
      model, messages: [{ role: "user", content: "breaks" }], stream: true });
    await assert.rejects(async () => { for await (const _ of stream); }, OpenAI.APIError);
  },
};

for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(name);
}
