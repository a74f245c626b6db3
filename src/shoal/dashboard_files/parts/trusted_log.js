// What this browser remembers of the coordinator's log: its key, which it trusts since
// its first use, and the newest checkpoint that it has seen.

import { fromHex, holds, ProofError, readCheckpoint, STEPS, verifyFile } from "../receipt_proof.js";

const NAME = "shoal-log";

/** {key, since, pinned, note}; null before the first use, or without storage. */
export function remembered() {
  try {
    return JSON.parse(localStorage.getItem(NAME));
  } catch {
    return null;
  }
}

export function remember(changes) {
  const next = { ...remembered(), ...changes };
  try { localStorage.setItem(NAME, JSON.stringify(next)); } catch { /* for this visit only */ }
  return next;
}

/** Trusts a key from now on; `pinned` if a person gave it. */
export const trust = (key, pinned) =>
  remember({ key: key.toLowerCase(), since: Date.now() / 1000, pinned, note: null });

/**
 * Checks that the log only grew since the checkpoint that was seen last, and remembers the
 * newest. Returns {from, to, results}, with what is not so as a failed step; null if there
 * is nothing to compare with yet. Throws if the coordinator cannot say.
 */
export async function verifyGrowth(api, log, trusted) {
  if (!log.checkpoint && !trusted.note) return null;
  const key = fromHex(trusted.key);
  const before = trusted.note ? await readCheckpoint(trusted.note, key) : null;
  const failed = (step, problem) => ({ from: before, to: null, results: [{ step, statement: STEPS[step], problem }] });
  const smaller = (size) =>
    failed("GROWN", `the log has ${size} receipts, and this browser has seen ${before.size}`);
  if (!log.checkpoint) return smaller(0);
  let now;
  try {
    now = await readCheckpoint(log.checkpoint, key);
  } catch (error) {
    if (error instanceof ProofError) return failed("LATER", error.message);
    throw error;
  }
  if (!before) {
    remember({ note: log.checkpoint });
    return null;
  }
  if (now.size < before.size) return smaller(now.size);
  let data;
  try {
    const response = await api.fetch(`/v1/log/growth?since=${before.size}&to=${now.size}`);
    data = new Uint8Array(await response.arrayBuffer());
  } catch (error) {
    // It has no checkpoint of a size of which this browser has seen one.
    if (error.status === 404) return failed("GROWN", `the coordinator cannot prove it: ${error.message}`);
    throw error;
  }
  const results = await verifyFile(data, trusted.key);
  if (holds(results)) {
    // The proof has to begin with the very checkpoint that was seen: there is one for each size.
    const { first, second } = JSON.parse(new TextDecoder().decode(data));
    const same = async (note, seen) => {
      const { size, root } = await readCheckpoint(note, key);
      return size === seen.size && String(root) === String(seen.root);
    };
    if (!first || !(await same(first, before)) || !(await same(second, now))) {
      results.at(-1).problem = `for the size ${before.size} the coordinator shows another log than it showed before`;
    } else {
      remember({ note: log.checkpoint });
    }
  }
  return { from: before, to: now, results };
}
