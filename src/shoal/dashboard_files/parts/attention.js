// What needs attention: the most urgent first.  A pure function of the status.

import { plural } from "./format.js";
import { NOT_ADMITTED, PENDING } from "./machines.js";

const HOT = new Set(["serious", "critical"]);

/** `[{tone, text, action, href}]`; empty: no action is needed.  `admin`: whether the reader may add machines. */
export function attention(status, machines, admin) {
  const found = [];
  const add = (tone, text, action, href) => found.push({ tone, text, action, href });
  if (!status.ready) add("bad", `No jobs are accepted: ${status.why_not}`, "See events", "#/events");
  if (status.degraded) add("warn", `Jobs are slow: ${status.degraded}`, "See events", "#/events");
  const inState = (state) => machines.filter((each) => each.states.includes(state));
  const pending = inState(PENDING);
  if (pending.length) {
    add("warn", pending.length === 1 ? `${pending[0].name} is waiting for approval`
      : `${plural(pending.length, "machine")} are waiting for approval`, "Review", "#/nodes?state=pending");
  }
  const refused = inState(NOT_ADMITTED);
  if (refused.length) {
    const why = refused.flatMap((each) => each.remarks)[0];
    add("bad", refused.length === 1 ? `${refused[0].name} is not admitted${why ? `: ${why}` : ""}`
      : `${plural(refused.length, "machine")} are not admitted${why ? `, such as: ${why}` : ""}`,
    "Show", "#/nodes?state=not+admitted");
  }
  if (!status.workers.length) {
    add("info", pending.length ? "No machine runs jobs until one is approved"
      : "No machine has joined yet", "Add a machine", admin ? "#/nodes?join" : "");
  } else if (!pending.length && status.workers.every((each) => each.suspension || each.draining || each.unfit)) {
    add("bad", "No machine takes jobs: all are paused, leaving or unfit", "Show", "#/nodes");
  } else if (status.jobs.queued) {
    const full = machines.every((each) => each.running >= each.slots);
    add("info", `${plural(status.jobs.queued, "job")} queued: ${full ? "all slots are busy"
      : "no suitable worker has a free slot"}`, "Show jobs", "#/jobs?state=queued");
  }
  const hot = machines.filter((each) => each.workers.some((worker) => HOT.has(worker.thermal)));
  if (hot.length) {
    add("warn", hot.length === 1 ? `${hot[0].name} is too hot and has slowed down`
      : `${plural(hot.length, "machine")} are too hot and have slowed down`, "Show", "#/nodes?state=hot");
  }
  const excluded = machines.filter((each) => each.workers.some((worker) => worker.points >= 3));
  if (excluded.length) {
    add("warn", `${plural(excluded.length, "machine")} excluded for a day because of penalty points`,
      "Show", "#/nodes");
  }
  const open = status.relays.filter((each) => each.open);
  if (open.length) add("warn", "The relay is open: any node may use it", "Show", "#/nodes");
  for (const [wire, peers] of Object.entries(status.unencrypted)) {
    add("warn", `Not encrypted, if any connect: ${peers} (${wire})`, "", "");
  }
  const urgency = ["bad", "warn", "info"];
  return found.sort((a, b) => urgency.indexOf(a.tone) - urgency.indexOf(b.tone));
}
