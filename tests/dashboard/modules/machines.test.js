import assert from "node:assert/strict";
import { test } from "node:test";

import { attention } from "shoal/parts/attention.js";
import { machinesOf, offeredBy } from "shoal/parts/machines.js";

const worker = (id, changes = {}) => ({
  id, models: ["m"], tasks: [], kinds: ["chat"], busy: 0, slots: 4, queued: 0, speed: 1, throttle: 100,
  thermal: "nominal", suspension: null, draining: null, unfit: "", points: 0, remark: "", ...changes,
});
const machines = (...workers) => machinesOf({ workers, peers: [], refused: [], orders: [], nodes: [] });

test("jobs that a machine has from this pool are not those of others", () => {
  const own = [worker("wire:one/a", { busy: 2, queued: 1 }), worker("wire:one/b", { busy: 1, queued: 2 })];
  assert.deepEqual(machines(...own)[0].remarks, []);
  const more = [worker("wire:two/a", { busy: 2, queued: 4 }), worker("wire:two/b", { busy: 1, queued: 5 })];
  assert.deepEqual(machines(...more)[0].remarks, ["jobs of other coordinators: 3"]);
  assert.deepEqual(machines(worker("wire:three", { queued: 2 }))[0].remarks, ["jobs of other coordinators: 2"]);
});

test("a machine offers models, functions, or any function", () => {
  assert.deepEqual(machines(worker("wire:a")).map(offeredBy), [["m"]]);
  assert.deepEqual(machines(worker("wire:b", { models: [], kinds: ["call"], tasks: ["f"] })).map(offeredBy), [["f()"]]);
  assert.deepEqual(machines(worker("wire:c", { models: [], kinds: ["call"] })).map(offeredBy), [["any function"]]);
});

test("an engine has its slots once, and a queue is named with its reason", () => {
  const models = ["a", "b", "c"].map((name) => worker(`wire:e/${name}`, { busy: 1, slots: 3, engine: "x" }));
  const [machine] = machines(...models);
  assert.equal(machine.slots, 3);
  const status = { ready: true, workers: models, relays: [], unencrypted: {}, jobs: { queued: 24 } };
  const texts = (...found) => attention(status, found, true).map((each) => each.text);
  assert.deepEqual(texts(machine), ["24 jobs queued: all slots are busy"]);
  const idle = machines(...models, worker("wire:f"))[1];
  assert.deepEqual(texts(machine, idle), ["24 jobs queued: no suitable worker has a free slot"]);
});
