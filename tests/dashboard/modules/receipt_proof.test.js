// The browser's verifier against what Shoal's own says of the same files, which
// ../test_modules.py writes, and against every altered byte of good ones.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";

import { holds, verifyFile, whyNot } from "shoal/receipt_proof.js";

const files = JSON.parse(readFileSync(join(process.env.SHOAL_CASES, "proofs.json"), "utf8"));
const decode = (file) => Uint8Array.from(Buffer.from(file.data, "base64"));

for (const file of files) {
  test(`${file.name}: the same steps fail`, async () => {
    const results = await verifyFile(decode(file), file.key);

    const found = results.map(({ step, problem }) => [step, problem === null]);
    assert.deepEqual(found, file.steps, JSON.stringify(results.at(-1)));
  });
}

const ALTERED = ["with its request", "receipt 0 of 7", "worker's receipt: missing", "growth from 3 to 7"];

for (const file of files.filter(({ name }) => ALTERED.includes(name))) {
  test(`${file.name}: each altered byte fails`, async () => {
    const data = decode(file);
    assert.ok(holds(await verifyFile(data, file.key)));
    for (let at = 0; at < data.length; at += 1) {
      for (const bit of [at % 8, (at + 3) % 8]) {
        const altered = data.slice();
        altered[at] ^= 1 << bit;
        const results = await verifyFile(altered, file.key);
        assert.ok(!holds(results), `byte ${at}, bit ${bit}`);
      }
      const shorter = Uint8Array.from([...data.slice(0, at), ...data.slice(at + 1)]);
      assert.ok(!holds(await verifyFile(shorter, file.key)), `without byte ${at}`);
    }
  });
}

test("a browser that cannot verify says why", async () => {
  assert.equal(await whyNot(), null);
  assert.match(await whyNot({}), /https or from this machine/);
  const subtle = {
    importKey: async () => {
      throw Object.assign(new Error("no"), { name: "NotSupportedError" });
    },
  };
  assert.match(await whyNot({ subtle }), /no Ed25519/);
});
