// Reads answers as clients do that check them by schemas, or assemble their streams.
// node strict_answers.mjs ANSWERS: a JSON file with the answers in all dialects.
// Prints what a client found wrong, as JSON.
import { readFileSync } from "node:fs";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const JSON_TYPE = { "content-type": "application/json" };
const SSE_TYPE = { "content-type": "text/event-stream" };
const NDJSON_TYPE = { "content-type": "application/x-ndjson" };
const KEY = "sk-test";
const hi = [{ role: "user", content: "hi" }];
const prompt = [{ role: "user", content: [{ type: "text", text: "hi" }] }];

// Answers every request with one body.
const answering = (body, headers) => async () => new Response(body, { headers });

// Models of the AI SDK, by the dialect that their provider speaks.
const models = {
  chat: [
    (fetch) => createOpenAI({ apiKey: KEY, fetch }).chat("m1"),
    (fetch) => createOpenAICompatible({ name: "shoal", baseURL: "http://h/v1", fetch })("m1"),
  ],
  completion: [(fetch) => createOpenAI({ apiKey: KEY, fetch }).completion("m1")],
  responses: [(fetch) => createOpenAI({ apiKey: KEY, fetch }).responses("m1")],
  messages: [(fetch) => createAnthropic({ apiKey: KEY, fetch })("m1")],
};

async function generated(model) {
  const { content } = await model.doGenerate({ prompt });
  return content.filter((part) => part.type === "text").map((part) => part.text).join("");
}

async function streamed(model) {
  const { stream } = await model.doStream({ prompt });
  let text = "";
  const errors = [];
  for await (const part of stream) {
    if (part.type === "text-delta") text += part.delta;
    if (part.type === "error") errors.push(part.error);
  }
  return { text, errors };
}

// The official clients' own helpers, which return the text of a stream.
const helpers = {
  chat: async (fetch) => {
    const client = new OpenAI({ apiKey: KEY, fetch, maxRetries: 0 });
    const stream = client.chat.completions.stream({ model: "m1", messages: hi });
    const { content, refusal } = (await stream.finalChatCompletion()).choices[0].message;
    return (content ?? "") + (refusal ?? "");
  },
  completion: async (fetch) => {
    const client = new OpenAI({ apiKey: KEY, fetch, maxRetries: 0 });
    let text = "";
    for await (const chunk of await client.completions.create({ model: "m1", prompt: "hi", stream: true })) {
      for (const choice of chunk.choices) if (choice.index === 0) text += choice.text;
    }
    return text;
  },
  responses: async (fetch) => {
    const client = new OpenAI({ apiKey: KEY, fetch, maxRetries: 0 });
    const response = await client.responses.stream({ model: "m1", input: "hi" }).finalResponse();
    if (response.status === "failed") throw new Error(response.error.message);
    const parts = response.output.flatMap((item) => (item.type === "message" ? item.content : []));
    return parts.map((part) => part.text ?? part.refusal).join("");
  },
  messages: async (fetch) => {
    const client = new Anthropic({ apiKey: KEY, fetch, maxRetries: 0 });
    const message = await client.messages.stream({ model: "m1", max_tokens: 9, messages: hi }).finalMessage();
    return message.content.filter((block) => block.type === "text").map((block) => block.text).join("");
  },
  "ollama chat": async (fetch) => {
    let text = "";
    for await (const part of await new Ollama({ fetch }).chat({ model: "m1", messages: hi, stream: true })) {
      text += part.message.content;
    }
    return text;
  },
  "ollama generate": async (fetch) => {
    let text = "";
    for await (const part of await new Ollama({ fetch }).generate({ model: "m1", prompt: "hi", stream: true })) {
      text += part.response;
    }
    return text;
  },
};

const problems = [];
let read = 0;

async function expectText(answer, client, expected, reading) {
  read += 1;
  try {
    const text = await reading();
    if (expected !== undefined && text !== expected) {
      problems.push([answer.dialect, answer.name, client, `${JSON.stringify(text)}, expected ${JSON.stringify(expected)}`]);
    }
    return text;
  } catch (error) {
    problems.push([answer.dialect, answer.name, client, String(error.cause ?? error).slice(0, 500)]);
    return undefined;
  }
}

async function expectError(answer, client, reading) {
  read += 1;
  try {
    await reading();
    problems.push([answer.dialect, answer.name, client, "a broken stream looks whole"]);
  } catch (error) {
    if (!/gone|out/.test(String(error.message))) {
      problems.push([answer.dialect, answer.name, client, `another error: ${String(error).slice(0, 500)}`]);
    }
  }
}

for (const answer of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  const streamType = answer.dialect.startsWith("ollama") ? NDJSON_TYPE : SSE_TYPE;
  const helper = helpers[answer.dialect];
  const text = await expectText(answer, "helper", undefined, () => helper(answering(answer.stream, streamType)));
  await expectError(answer, "helper", () => helper(answering(answer.broken, streamType)));
  // The AI SDK asks for no more than one choice, and would join several.
  if (answer.name === "several") continue;
  for (const [index, model] of (models[answer.dialect] ?? []).entries()) {
    const client = `ai ${index}`;
    await expectText(answer, client, text, () => generated(model(answering(answer.whole, JSON_TYPE))));
    await expectText(answer, `${client}, stream`, text, async () => {
      const { text, errors } = await streamed(model(answering(answer.stream, SSE_TYPE)));
      if (errors.length) throw errors[0];
      return text;
    });
    await expectError(answer, `${client}, stream`, async () => {
      const { errors } = await streamed(model(answering(answer.broken, SSE_TYPE)));
      if (errors.length) throw errors[0].message === undefined ? new Error(JSON.stringify(errors[0])) : errors[0];
    });
  }
}
console.log(JSON.stringify({ read, problems }));
