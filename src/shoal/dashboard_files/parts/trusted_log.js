// What this browser remembers of the coordinator's log: its key, which it trusts since
// its first use, and the newest checkpoint that it has seen.

import { fromHex, holds, readCheckpoint, verifyFile } from "../receipt_proof.js";

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
 * newest. Returns {from, to, results}; null if there is nothing to compare with yet.
 */
export async function verifyGrowth(api, log, trusted) {
  if (!log.checkpoint) return null;
  const now = await readCheckpoint(log.checkpoint, fromHex(trusted.key));
  if (!trusted.note) {
    remember({ note: log.checkpoint });
    return null;
  }
  const before = await readCheckpoint(trusted.note, fromHex(trusted.key));
  const file = await (await api.fetch(`/v1/log/growth?since=${before.size}&to=${now.size}`)).arrayBuffer();
  const data = new Uint8Array(file);
  const results = await verifyFile(data, trusted.key);
  if (holds(results)) {
    // The proof has to begin with the very checkpoint that was seen: there is one for each size.
    const { first, second } = JSON.parse(new TextDecoder().decode(data));
    const same = async (note, seen) => {
      const { size, root } = await readCheckpoint(note, fromHex(trusted.key));
      return size === seen.size && String(root) === String(seen.root);
    };
    if (!(await same(first, before)) || !(await same(second, now))) {
      results.at(-1).problem = `for the size ${before.size} the coordinator shows another log than it showed before`;
    } else {
      remember({ note: log.checkpoint });
    }
  }
  return { from: before, to: now, results };
}
