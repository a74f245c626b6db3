import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";

import { api, beginSession, whenSignedOut } from "shoal/parts/api.js";
import { coordinatorNow, history, live, start, stop } from "shoal/parts/live.js";
import { age } from "shoal/parts/ui.js";
import { withFirstPage } from "shoal/parts/pages.js";

const NOW = 1_000_000; // the browser's Unix time
const STATUS = { jobs: { running: 1, queued: 2 }, workers: [], models: [] };

/** What the page asks of the coordinator, answered by the test. */
const asked = [];
globalThis.fetch = (path) => new Promise((resolve, reject) => {
  asked.push({
    path,
    answer: (status, body, at = NOW) => resolve(new Response(JSON.stringify(body),
      { status, headers: { "content-type": "application/json", date: new Date(at * 1000).toUTCString() } })),
    fail: () => reject(new TypeError("no answer")),
  });
});
globalThis.document = Object.assign(new EventTarget(), { hidden: false });
const streams = [];
globalThis.EventSource = class extends EventTarget {
  static CLOSED = 2;

  constructor() { super(); this.readyState = 1; streams.push(this); }

  close() { this.readyState = 2; }

  tell(type, data) { this.dispatchEvent(Object.assign(new Event(type), { data: JSON.stringify(data) })); }
};
const settled = () => new Promise((resolve) => setImmediate(resolve));
const hide = (hidden) => { document.hidden = hidden; document.dispatchEvent(new Event("visibilitychange")); };
const last = (list) => list[list.length - 1];

let ended = 0;
whenSignedOut(() => { ended += 1; stop(); });
mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"], now: NOW * 1000 });

beforeEach(() => {
  stop();
  hide(false);
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout", "setInterval", "Date"], now: NOW * 1000 });
  asked.length = streams.length = ended = 0;
  beginSession();
});

const refused = (request) => request.answer(401, { error: { message: "no", code: "unauthorized" } });

test("a session ends once, and not by what an older one asked", async () => {
  const requests = [1, 2, 3].map(() => api.get("/v1/models").catch((error) => error.status));
  refused(asked[0]);
  await settled();
  assert.equal(ended, 1);
  refused(asked[1]);
  await settled();
  assert.equal(ended, 1);
  beginSession();
  refused(asked[2]);
  assert.deepEqual(await Promise.all(requests), [401, 401, 401]);
  assert.equal(ended, 1);
});

test("a page polls once at a time, and nothing after its session", async () => {
  start({ name: "marie", scope: "use" });
  hide(true);
  hide(false);
  assert.equal(asked.length, 2);
  asked[0].answer(200, STATUS);
  await settled();
  assert.equal(live().connected, false); // the answer that counts is the second
  asked[1].answer(200, STATUS);
  await settled();
  assert.equal(live().connected, true);
  mock.timers.tick(5000);
  assert.equal(asked.length, 3);
  stop();
  asked[2].fail();
  await settled();
  assert.equal(live().lost_at, null);
  mock.timers.tick(60_000);
  assert.equal(asked.length, 3);
});

test("the time is the coordinator's", async () => {
  start({ name: "marie", scope: "use" });
  asked[0].answer(200, STATUS, NOW - 90);
  await settled();
  assert.equal(coordinatorNow(), NOW - 89); // the header's second had up to a second to go
  start({ name: "ops", scope: "admin" });
  last(streams).tell("snapshot", { at: NOW + 90.5, status: STATUS, activity: {}, rate: null });
  assert.equal(coordinatorNow(), NOW + 90.5);
});

test("a hidden page rests, and its plots have a gap", () => {
  start({ name: "ops", scope: "monitor" });
  last(streams).tell("snapshot", { at: NOW, status: STATUS, activity: {}, rate: { tokens_per_second: 7, jobs_per_second: 1 } });
  mock.timers.tick(1000);
  hide(true);
  mock.timers.tick(62_000);
  assert.deepEqual([live().connected, live().lost_at, streams[0].readyState], [false, null, 2]);
  assert.deepEqual([history[1][0], last(history[1]), last(history[3])], [7, null, null]);
  hide(false);
  assert.equal(streams.length, 2);
});

test("a stream that is refused says why", async () => {
  start({ name: "ops", scope: "admin" });
  streams[0].readyState = EventSource.CLOSED;
  streams[0].onerror();
  assert.equal(asked[0].path, "/admin/live");
  asked[0].answer(503, { error: { message: "100 clients are listening already", code: "queue_full" } });
  await settled();
  assert.equal(live().refusal.message, "100 clients are listening already");
  mock.timers.tick(1000);
  assert.equal(last(asked).path, "/dashboard/session");
  last(asked).answer(200, { name: "ops", scope: "admin" });
  await settled();
  assert.deepEqual([streams.length, ended], [2, 0]);
  last(streams).tell("snapshot", { at: NOW, status: STATUS, activity: {}, rate: null });
  assert.deepEqual([live().connected, live().refusal], [true, null]);
});

test("a page whose requests count as another key's ends its session", async () => {
  for (const [status, found] of [[200, { name: "loopback", scope: "use" }], [401, { error: { message: "no" } }]]) {
    beginSession();
    start({ name: "ops", scope: "admin" });
    last(streams).onerror(); // the connection was cut
    await settled();
    mock.timers.tick(15_000);
    last(asked).answer(status, found);
    await settled();
  }
  assert.deepEqual([ended, streams.length], [2, 2]);
});

test("what is to come is in the future, what has just happened is not", () => {
  assert.equal(age(NOW + 86_400, NOW), "in 1 d");
  assert.equal(age(NOW + 3, NOW), "now");
  assert.equal(age(NOW - 3, NOW), "3 s ago");
});

test("a list of pages has no holes, and an end", () => {
  const jobs = (from, to) => Array.from({ length: from - to }, (_, n) => ({ id: String(from - n) }));
  const page = { data: jobs(210, 10), next: "11" };
  const ids = (list) => [list.rows.length, list.rows[0].id, list.next];
  assert.deepEqual(ids(withFirstPage({ rows: [], next: null }, page)), [200, "210", "11"]);
  assert.deepEqual(ids(withFirstPage({ rows: jobs(200, 0), next: null }, page)), [210, "210", null]);
  assert.deepEqual(ids(withFirstPage({ rows: jobs(9, 0), next: null }, page)), [200, "210", "11"]); // 10 is missing
  const many = withFirstPage({ rows: jobs(2100, 0), next: null }, { data: jobs(2200, 2000), next: "2001" });
  assert.deepEqual(ids(many), [2000, "2200", "201"]);
  assert.equal(many.rows.at(-1).id, "201");
});
