import assert from "node:assert/strict";
import { test } from "node:test";

import { MARK } from "shoal/parts/markdown.js";
import {
  bodyOf, markedText, newAnswer, openCalls, readTools, statsOf, withChunk, withComment, withEnd, withError, withHeaders, withStop,
} from "shoal/playground/answers.js";
import { curlSnippet, pythonSnippet } from "shoal/playground/snippets.js";
import { createStore, NO_SETTINGS } from "shoal/playground/store.js";

const HEADERS = new Headers({ "x-shoal-job": "j1", "x-shoal-worker": "grandsage:one/m", "x-shoal-attempts": "1" });
const text = (content) => ({ choices: [{ index: 0, delta: { content }, finish_reason: null }] });
const started = () => withHeaders(newAnswer({ model: "m" }, 10), HEADERS);

test("an answer is assembled and measured", () => {
  let answer = started();
  assert.deepEqual(statsOf(answer, 10.5), { exact: false, tokens: null, prompt: null, perSecond: null, firstAfter: null, seconds: 0.5 });
  answer = withChunk(answer, { choices: [{ index: 0, delta: { role: "assistant", content: "" } }] }, 10.2);
  assert.equal(answer.state, "waiting");
  answer = withChunk(answer, text("a"), 11);
  answer = withChunk(answer, text("b"), 12);
  assert.deepEqual(statsOf(answer, 13), { exact: false, tokens: 2, prompt: null, perSecond: 0.5, firstAfter: 1, seconds: 3 });
  answer = withChunk(answer, { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] }, 12.1);
  answer = withEnd(withChunk(answer, { choices: [], usage: { prompt_tokens: 7, completion_tokens: 5 } }, 12.2), 12.3);
  assert.deepEqual([answer.text, answer.state, answer.finish, answer.job, answer.worker], ["ab", "done", "stop", "j1", "grandsage:one/m"]);
  assert.deepEqual(statsOf(answer, 99), { exact: true, tokens: 5, prompt: 7, perSecond: 4, firstAfter: 1, seconds: 2 });
});

test("a takeover has its place in the text", () => {
  let answer = withChunk(started(), text("one "), 11);
  for (const comment of ["keep-alive", "x-shoal-worker: grandsage:two/m", "x-shoal-attempts: 2"]) answer = withComment(answer, comment);
  answer = withChunk(answer, text(`two${MARK}`), 12);
  assert.deepEqual(answer.takeovers, [{ at: 4, from: "grandsage:one/m", worker: "grandsage:two/m", attempts: 2 }]);
  assert.equal(answer.attempts, 2);
  assert.equal(markedText(answer), `one ${MARK}two\uFFFD`);
  // A worker that is named only later took nothing over.
  const late = withComment(newAnswer({}, 0), "x-shoal-worker: w");
  assert.deepEqual([late.worker, late.takeovers], ["w", []]);
});

test("reasoning and calls of tools come in parts", () => {
  let answer = withChunk(started(), { choices: [{ index: 0, delta: { reasoning_content: "hm" } }] }, 11);
  const part = (index, id, name, more) => ({ choices: [{ index: 0, delta: { tool_calls: [{ index, id, function: { name, arguments: more } }] } }] });
  for (const each of [part(0, "c1", "f", '{"a'), part(0, undefined, undefined, '":1}'), part(1, "c2", "g", "{}")]) answer = withChunk(answer, each, 12);
  answer = withEnd({ ...answer, finish: "tool_calls" }, 13);
  assert.equal(answer.reasoning, "hm");
  assert.deepEqual(openCalls([answer]), [{ id: "c1", name: "f", arguments: '{"a":1}' }, { id: "c2", name: "g", arguments: "{}" }]);
  assert.deepEqual(openCalls([answer, { role: "tool" }]), []);
});

test("an answer that failed or was stopped stays so", () => {
  const failed = withChunk(started(), { error: { message: "lost", code: "worker_lost" } }, 11);
  assert.deepEqual([withEnd(failed, 12).state, failed.error.code], ["failed", "worker_lost"]);
  assert.equal(withStop(started(), 11).state, "stopped");
  assert.equal(withError(started(), { message: "x" }, 11).state, "failed");
});

test("a request has the whole conversation and only what is set", () => {
  const call = { id: "c1", name: "f", arguments: "{}" };
  const messages = [
    { role: "user", text: "look", images: ["data:image/png;base64,AA"] },
    { role: "assistant", text: "", calls: [call] },
    { role: "tool", id: "c1", name: "f", text: "1" },
    { role: "assistant", text: "", calls: [] },
    { role: "user", text: "and?", images: [] },
  ];
  assert.deepEqual(bodyOf("m", messages, { ...NO_SETTINGS, system: "be brief", temperature: "0", seed: "7" }), {
    model: "m",
    messages: [
      { role: "system", content: "be brief" },
      { role: "user", content: [{ type: "text", text: "look" }, { type: "image_url", image_url: { url: "data:image/png;base64,AA" } }] },
      { role: "assistant", content: null, tool_calls: [{ id: "c1", type: "function", function: { name: "f", arguments: "{}" } }] },
      { role: "tool", tool_call_id: "c1", content: "1" },
      { role: "user", content: "and?" },
    ],
    temperature: 0, seed: 7, stream: true, stream_options: { include_usage: true },
  });
});

test("tools are read with or without OpenAI's frame", () => {
  const framed = { type: "function", function: { name: "f" } };
  assert.deepEqual(readTools('{"name": "f"}'), [framed]);
  assert.deepEqual(readTools(JSON.stringify([framed])), [framed]);
  assert.deepEqual(readTools(" "), []);
  assert.throws(() => readTools("[{"), /Not JSON/);
  assert.throws(() => readTools("[{}]"), /needs a name/);
  assert.throws(() => readTools("[null]"), /needs a name/);
});

test("snippets quote what a shell and Python would read otherwise", () => {
  const body = { model: "m", messages: [{ role: "user", content: "it's \"so\"\n" }], logprobs: true, seed: null, stream: true, stream_options: {} };
  assert.ok(curlSnippet("http://h", body).includes("it'\\''s \\\"so\\\"\\n"));
  const python = pythonSnippet("http://h", body);
  assert.ok(python.includes('messages=[{"role": "user", "content": "it\'s \\"so\\"\\n"}],'));
  assert.ok(python.includes("logprobs=True,") && python.includes("seed=None,"));
  assert.ok(!python.includes("stream_options"));
});

/** A store whose streams the test writes; it shows at once. */
function store(fetched = [[404]]) {
  const asked = [];
  const api = {
    async *stream(path, body, { signal, onResponse }) {
      const stream = { body, signal };
      asked.push(stream);
      const pieces = await new Promise((resolve, reject) => {
        stream.answer = resolve;
        signal.addEventListener("abort", () => reject(new DOMException("stopped", "AbortError")));
      });
      onResponse({ headers: HEADERS });
      yield* pieces;
    },
    async get(path) {
      const [status, found] = fetched.shift();
      if (found) return { path, ...found };
      throw Object.assign(new Error("no answer"), { status });
    },
  };
  return { store: createStore(api, () => 0, (show) => show(), async () => {}), asked };
}
const settled = () => new Promise((resolve) => setImmediate(resolve));
const END = { choices: [{ index: 0, delta: {}, finish_reason: "stop" }] };

test("one question goes to every model, and each keeps its own conversation", async () => {
  const { store: kept, asked } = store();
  const [{ id }] = kept.state.columns;
  kept.setModel(id, "a");
  kept.addColumn("b");
  kept.send("hi", []);
  assert.deepEqual(asked.map(({ body }) => body.model), ["a", "b"]);
  asked[0].answer([text("A"), END]);
  await settled();
  assert.ok(kept.isRunning());
  kept.send("more", []); // only to the one that is not writing
  assert.equal(asked.length, 3);
  assert.deepEqual(asked[2].body.messages.map(({ content }) => content), ["hi", "A", "more"]);
});

test("nothing of one owner is left for the next", async () => {
  const { store: kept, asked } = store();
  kept.belongTo("marie");
  const [{ id }] = kept.state.columns;
  kept.setModel(id, "a");
  kept.setSettings({ system: "secret" });
  kept.send("hi", []);
  kept.belongTo("marie");
  assert.equal(kept.state.columns[0].messages.length, 2);
  kept.belongTo("pierre");
  await settled();
  assert.ok(asked[0].signal.aborted);
  assert.deepEqual(kept.state.columns.map(({ model, messages }) => [model, messages]), [["", []]]);
  assert.deepEqual(kept.state.settings, NO_SETTINGS);
});

test("an answer that breaks off is fetched by its job", async () => {
  const message = { role: "assistant", content: "A whole one" };
  const whole = { choices: [{ message, finish_reason: "stop" }], usage: { completion_tokens: 3 } };
  const { store: kept, asked } = store([[0], [503], [200, whole]]);
  const [{ id }] = kept.state.columns;
  kept.setModel(id, "a");
  kept.send("one", []);
  asked[0].answer([text("A wh")]);
  await settled();
  await settled();
  const { state, text: shown, finish, usage } = kept.state.columns[0].messages.at(-1);
  assert.deepEqual([state, shown, finish, usage], ["done", "A whole one", "stop", { completion_tokens: 3 }]);
});

test("stop, an end without an end, and clear", async () => {
  const { store: kept, asked } = store();
  const [{ id }] = kept.state.columns;
  const last = () => kept.state.columns[0].messages.at(-1);
  kept.setModel(id, "a");
  kept.send("one", []);
  kept.stopAll();
  await settled();
  assert.equal(last().state, "stopped");
  kept.retry(id);
  asked[1].answer([text("A")]);
  await settled();
  assert.match(last().error.message, /ended before the answer/);
  kept.retry(id);
  kept.clear();
  asked[2].answer([text("late"), END]);
  await settled();
  assert.deepEqual(kept.state.columns[0].messages, []);
});
