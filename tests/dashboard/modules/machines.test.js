import assert from "node:assert/strict";
import { test } from "node:test";

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
