// What a browser says of a log that it has seen before: grown, rolled back, forked, forged.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { beforeEach, test } from "node:test";

import { remember, remembered, trust, verifyGrowth } from "shoal/parts/trusted_log.js";

const { key, notes, growths, forked, alien } = JSON.parse(readFileSync(join(process.env.SHOAL_CASES, "logs.json"), "utf8"));
const stored = new Map();
globalThis.localStorage = {
  getItem: (name) => stored.get(name) ?? null,
  setItem: (name, value) => stored.set(name, value),
};

/** A coordinator with these proofs; one that it does not have is not found. */
const having = (proofs) => ({
  async fetch(path) {
    const { searchParams } = new URL(path, "http://coordinator");
    const proof = proofs[`${searchParams.get("since")} ${searchParams.get("to")}`];
    if (proof === undefined) throw Object.assign(new Error("no such checkpoint"), { status: 404 });
    return new Response(proof);
  },
});
const check = (checkpoint, proofs = growths) => verifyGrowth(having(proofs), { checkpoint }, remembered());
/** The failed step, and why; nothing is remembered then. */
async function failure(checkpoint, proofs) {
  const before = remembered().note;
  const { results } = await check(checkpoint, proofs);
  assert.equal(remembered().note, before);
  const { step, problem } = results.at(-1);
  return [step, problem];
}

beforeEach(() => {
  stored.clear();
  trust(key, false);
});

test("the first checkpoint is remembered, and then each that grew from it", async () => {
  assert.equal(await check(null), null);
  assert.equal(await check(notes[3]), null);
  for (const size of [3, 5, 7]) {
    const { results } = await check(notes[size]);
    assert.deepEqual(results.map(({ problem }) => problem), [null, null, null, null]);
    assert.equal(remembered().note, notes[size]);
  }
});

test("a log that was rolled back fails", async () => {
  remember({ note: notes[5] });
  assert.deepEqual(await failure(notes[3]), ["GROWN", "the log has 3 receipts, and this browser has seen 5"]);
  assert.deepEqual(await failure(null), ["GROWN", "the log has 0 receipts, and this browser has seen 5"]);
});

test("a fork fails, with its own proof and without one", async () => {
  remember({ note: notes[5] });
  assert.match((await failure(forked.notes[7], forked.growths))[1], /another log than it showed before/);
  assert.match((await failure(forked.notes[5], forked.growths))[1], /another log than it showed before/);
  assert.match((await failure(forked.notes[7], growths))[1], /another log/);
  assert.deepEqual(await failure(forked.notes[7], {}), ["GROWN", "the coordinator cannot prove it: no such checkpoint"]);
});

test("a forged checkpoint fails, also the first", async () => {
  const later = notes[7].replace("\nat 20", "\nat 21");
  for (const note of [null, notes[5]]) {
    remember({ note });
    assert.deepEqual(await failure(later), ["LATER", "the checkpoint's signature is wrong"]);
    assert.match((await failure(alien))[1], /the checkpoint is of /);
    assert.match((await failure("x"))[1], /not in the form/);
  }
});

test("a coordinator that is away says nothing of its log", async () => {
  remember({ note: notes[5] });
  const away = { fetch: async () => { throw Object.assign(new Error("away"), { status: 0 }); } };
  await assert.rejects(verifyGrowth(away, { checkpoint: notes[7] }, remembered()), /away/);
});
