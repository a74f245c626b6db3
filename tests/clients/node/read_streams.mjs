// Reads streamed answers with the helpers of each client.
// node read_streams.mjs URL KEY QUESTIONS: the questions as a JSON list.
// Prints what each client has read of each answer, as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import Anthropic from "@anthropic-ai/sdk";
import { jsonSchema, streamText, tool } from "ai";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [url, apiKey, questions] = process.argv.slice(2);
const model = "m1";
const parameters = { type: "object", properties: {} };
const functionTool = { name: "f", parameters };
const asked = (question) => [{ role: "user", content: question }];

const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey, maxRetries: 0 });
const ollama = new Ollama({ host: `${url}/ollama`, headers: { Authorization: `Bearer ${apiKey}` } });

async function openaiChat(question) {
  const tools = [{ type: "function", function: functionTool }];
  const stream = openai.chat.completions.stream({ model, messages: asked(question), tools });
  let thoughts = "";
  stream.on("chunk", (chunk) => (thoughts += chunk.choices[0]?.delta.reasoning_content ?? ""));
  const { message } = (await stream.finalChatCompletion()).choices[0];
  const calls = (message.tool_calls ?? []).map((call) => [call.function.name, JSON.parse(call.function.arguments)]);
  return { text: message.content ?? "", thoughts, calls };
}

async function openaiResponses(question) {
  const tools = [{ type: "function", ...functionTool, strict: false }];
  const response = await openai.responses.stream({ model, input: question, tools }).finalResponse();
  if (response.status === "failed") throw new Error(response.error.message);
  const items = (type) => response.output.filter((item) => item.type === type);
  return {
    text: response.output_text,
    thoughts: items("reasoning").flatMap((item) => item.content).map((part) => part.text).join(""),
    calls: items("function_call").map((call) => [call.name, JSON.parse(call.arguments)]),
  };
}

async function anthropicMessages(question) {
  const message = await anthropic.messages
    .stream({
      model,
      max_tokens: 99,
      messages: asked(question),
      thinking: { type: "enabled", budget_tokens: 50 },
      tools: [{ name: "f", input_schema: parameters }],
    })
    .finalMessage();
  const blocks = (type) => message.content.filter((block) => block.type === type);
  return {
    text: blocks("text").map((block) => block.text).join(""),
    thoughts: blocks("thinking").map((block) => block.thinking).join(""),
    calls: blocks("tool_use").map((block) => [block.name, block.input]),
  };
}

async function ollamaChat(question) {
  const tools = [{ type: "function", function: functionTool }];
  const found = { text: "", thoughts: "", calls: [] };
  for await (const { message } of await ollama.chat({ model, messages: asked(question), tools, think: true, stream: true })) {
    found.text += message.content;
    found.thoughts += message.thinking ?? "";
    for (const call of message.tool_calls ?? []) found.calls.push([call.function.name, call.function.arguments]);
  }
  return found;
}

const summaries = { openai: { reasoningSummary: "auto", forceReasoning: true } };
const thinking = { anthropic: { thinking: { type: "enabled", budgetTokens: 50 } } };

const ai = (provided, options = {}) => async (question) => {
  const errors = [];
  const result = streamText({
    model: provided,
    messages: asked(question),
    tools: { f: tool({ inputSchema: jsonSchema(parameters) }) },
    maxRetries: 0,
    onError: ({ error }) => errors.push(error),
    ...options,
  });
  const found = { text: "", thoughts: "", calls: [] };
  for await (const part of result.fullStream) {
    if (part.type === "text-delta") found.text += part.text;
    if (part.type === "reasoning-delta") found.thoughts += part.text;
    if (part.type === "tool-call") found.calls.push([part.toolName, part.input]);
  }
  if (errors.length) throw errors[0];
  return found;
};

const openaiProvider = createOpenAI({ baseURL: `${url}/v1`, apiKey });
const clients = {
  "openai, chat": openaiChat,
  "openai, responses": openaiResponses,
  anthropic: anthropicMessages,
  ollama: ollamaChat,
  "ai, compatible": ai(createOpenAICompatible({ name: "shoal", baseURL: `${url}/v1`, apiKey })(model)),
  "ai, openai chat": ai(openaiProvider.chat(model)),
  "ai, openai responses": ai(openaiProvider.responses(model), { providerOptions: summaries }),
  "ai, anthropic": ai(createAnthropic({ baseURL: `${url}/v1`, apiKey })(model), { providerOptions: thinking, maxOutputTokens: 99 }),
};

const read = {};
for (const [name, client] of Object.entries(clients)) {
  read[name] = {};
  for (const question of JSON.parse(questions)) {
    try {
      read[name][question] = { error: "", ...(await client(question)) };
    } catch (error) {
      read[name][question] = { text: "", thoughts: "", calls: [], error: String(error.message ?? JSON.stringify(error)) };
    }
  }
}
console.log(JSON.stringify(read));
