// A conversation with one model: what is sent, and what comes back. Pure: times are
// passed in, in seconds of one clock.

import { MARK } from "../parts/markdown.js";

/** An answer that was asked for with `body` at `now`. */
export const newAnswer = (body, now) => ({
  role: "assistant",
  state: "waiting", // then writing; in the end done, stopped or failed
  body,
  text: "",
  reasoning: "",
  calls: [], // of tools: {id, name, arguments}
  finish: null,
  usage: null,
  error: null,
  job: null,
  worker: null,
  attempts: 1,
  takeovers: [], // {at: characters of the text before it, worker, attempts}
  pieces: 0, // deltas so far: about the number of tokens
  began: now,
  first: null, // when the first piece came
  last: now,
});

/** What the response's headers say of an answer. */
export function withHeaders(answer, headers) {
  return {
    ...answer,
    job: headers.get("x-shoal-job"),
    worker: headers.get("x-shoal-worker"),
    attempts: Number(headers.get("x-shoal-attempts") ?? 1),
  };
}

const COMMENT = /^x-shoal-(worker|attempts): (.*)$/;

/** What a comment of the stream says: another worker goes on. */
export function withComment(answer, comment) {
  const found = COMMENT.exec(comment);
  if (!found) return answer;
  const [, name, value] = found;
  if (name === "worker") {
    const before = answer.worker;
    if (before === null) return { ...answer, worker: value };
    const takeover = { at: answer.text.length, from: before, worker: value, attempts: answer.attempts };
    return { ...answer, worker: value, takeovers: [...answer.takeovers, takeover] };
  }
  const attempts = Number(value);
  const takeovers = answer.takeovers.map((each, place, all) =>
    place === all.length - 1 ? { ...each, attempts } : each);
  return { ...answer, attempts, takeovers };
}

/** What a chunk of the stream adds. */
export function withChunk(answer, chunk, now) {
  if (chunk.error) return withError(answer, chunk.error, now);
  const changed = { ...answer, usage: chunk.usage ?? answer.usage };
  for (const { index, delta = {}, finish_reason: finish } of chunk.choices ?? []) {
    if (index !== 0) continue;
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    if (delta.content || reasoning || delta.tool_calls) {
      changed.state = "writing";
      changed.first ??= now;
      changed.last = now;
      changed.pieces += 1;
    }
    changed.text += delta.content ?? "";
    changed.reasoning += reasoning;
    if (delta.tool_calls) changed.calls = withCalls(changed.calls, delta.tool_calls);
    changed.finish = finish ?? changed.finish;
  }
  return changed;
}

/** The calls of tools come in parts, which `index` tells apart. */
function withCalls(calls, parts) {
  const joined = [...calls];
  for (const { index = joined.length, id, function: called = {} } of parts) {
    const before = joined[index] ?? { id: "", name: "", arguments: "" };
    joined[index] = {
      id: id || before.id,
      name: before.name + (called.name ?? ""),
      arguments: before.arguments + (called.arguments ?? ""),
    };
  }
  return Array.from(joined, (each) => each ?? { id: "", name: "", arguments: "" });
}

/** The whole answer in place of what came of it. */
export function withWhole(answer, { choices: [{ message, finish_reason: finish }], usage }, now) {
  const whole = { ...answer, text: "", reasoning: "", calls: [], usage };
  const delta = { ...message, tool_calls: message.tool_calls ?? undefined };
  return withEnd(withChunk(whole, { choices: [{ index: 0, delta, finish_reason: finish }] }, now), now);
}

export const withEnd = (answer, now) =>
  (answer.state === "failed" ? answer : { ...answer, state: "done", last: answer.first ? answer.last : now });

export const withStop = (answer, now) => ({ ...answer, state: "stopped", last: now });

export const withError = (answer, { message, code }, now) =>
  ({ ...answer, state: "failed", error: { message, code }, last: now });

export const isOpen = (answer) => answer.state === "waiting" || answer.state === "writing";

/** Numbers of an answer; null where they are not known. `exact`: the tokens were counted. */
export function statsOf(answer, now) {
  const { first, last, began, usage, pieces } = answer;
  const exact = usage !== null;
  const tokens = exact ? usage.completion_tokens : pieces;
  const until = answer.state === "writing" ? now : last;
  const seconds = first === null ? 0 : until - first;
  return {
    exact,
    tokens: first === null && !exact ? null : tokens,
    prompt: usage?.prompt_tokens ?? null,
    // The first token is not written in that time: it was waited for.
    perSecond: tokens > 1 && seconds > 0 ? (tokens - 1) / seconds : null,
    firstAfter: first === null ? null : first - began,
    seconds: (isOpen(answer) ? now : last) - began,
  };
}

/** The text with a MARK where another worker went on. */
export function markedText(answer) {
  let text = "";
  let before = 0;
  const clean = (part) => part.replaceAll(MARK, "\uFFFD");
  for (const { at } of answer.takeovers) {
    text += clean(answer.text.slice(before, at)) + MARK;
    before = at;
  }
  return text + clean(answer.text.slice(before));
}

/** The calls that wait for a result: those of the last answer. */
export function openCalls(messages) {
  const last = messages.at(-1);
  return last?.role === "assistant" && !isOpen(last) && last.state === "done" ? last.calls : [];
}

// The request.

/** The body of the next request of a conversation. */
export function bodyOf(model, messages, settings) {
  const body = { model, messages: [] };
  if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
  for (const each of messages) {
    const message = sent(each);
    if (message) body.messages.push(message);
  }
  for (const name of ["temperature", "max_tokens", "seed"]) {
    if (settings[name] !== "") body[name] = Number(settings[name]);
  }
  if (settings.tools.length) body.tools = settings.tools;
  return { ...body, stream: true, stream_options: { include_usage: true } };
}

function sent(message) {
  switch (message.role) {
    case "user":
      if (!message.images.length) return { role: "user", content: message.text };
      return { role: "user", content: [
        ...(message.text ? [{ type: "text", text: message.text }] : []),
        ...message.images.map((url) => ({ type: "image_url", image_url: { url } })),
      ] };
    case "tool":
      return { role: "tool", tool_call_id: message.id, content: message.text };
    default: {
      // An answer without content, such as one that failed, is no turn of the model's.
      if (!message.text && !message.calls.length) return null;
      const turn = { role: "assistant", content: message.text };
      if (!message.calls.length) return turn;
      return { ...turn, content: message.text || null, tool_calls: message.calls.map((each) => ({
        id: each.id, type: "function", function: { name: each.name, arguments: each.arguments },
      })) };
    }
  }
}

/** The tools of the editor's text; throws an Error that says what is wrong with it. */
export function readTools(text) {
  if (!text.trim()) return [];
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new Error(`Not JSON: ${error.message}`);
  }
  const tools = (Array.isArray(value) ? value : [value]).map((each) =>
    (each?.function ? each : { type: "function", function: each }));
  for (const { function: described } of tools) {
    if (typeof described?.name !== "string" || !described.name) {
      throw new Error('Each tool needs a name: {"name": "…", "description": "…", "parameters": {…}}');
    }
  }
  return tools;
}

export const TOOLS_EXAMPLE = JSON.stringify([{
  name: "get_weather",
  description: "The weather of a city now",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
}], null, 2);
