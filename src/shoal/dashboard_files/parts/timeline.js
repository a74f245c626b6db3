// The course of a job: a bar for each span of time, and what happened when.

import { html, useEffect, useState } from "../vendor/preact.js";
import { clock, duration, exact } from "./format.js";
import { coordinatorNow } from "./live.js";

const TITLES = {
  JobSubmitted: "submitted", JobLeased: "assigned", JobHedged: "also assigned", JobUnhedged: "one attempt ended",
  JobStarted: "first token", JobRequeued: "requeued", JobCompleted: "done", JobFailed: "failed", JobCancelled: "cancelled",
  JobExpired: "expired", LateResult: "late result", ReceiptPresented: "receipt",
};
const TONES = {
  JobStarted: "busy", JobCompleted: "ok", JobFailed: "bad", JobExpired: "bad", JobCancelled: "warn", JobRequeued: "warn", LateResult: "warn",
};
const ENDS = new Set(["JobCompleted", "JobFailed", "JobCancelled", "JobExpired"]);

/** The spans of a job: `{row, kind, from, to}`; row 0 is the queue, then one for each attempt. */
export function spansOf(events, now) {
  const spans = [];
  let waits = null; // the span in the queue
  const attempts = new Map(); // lease → its open span
  const rows = new Map();
  const close = (span, at) => { if (span) span.to = at; };
  for (const { at, fact, lease, worker } of events) {
    if (fact === "JobSubmitted") spans.push((waits = { row: 0, kind: "queued", from: at, to: null, name: "queue" }));
    if (fact === "JobLeased" || fact === "JobHedged") {
      close(waits, at);
      waits = null;
      rows.set(lease, rows.size + 1);
      const span = { row: rows.get(lease), kind: "leased", from: at, to: null, name: worker || "", lease };
      attempts.set(lease, span);
      spans.push(span);
    }
    if (fact === "JobStarted" && attempts.has(lease)) {
      const before = attempts.get(lease);
      close(before, at);
      const span = { ...before, kind: "streaming", from: at, to: null };
      attempts.set(lease, span);
      spans.push(span);
    }
    if (fact === "JobRequeued" || fact === "JobUnhedged") {
      const span = attempts.get(lease);
      close(span, at);
      if (span) span.failed = true;
      attempts.delete(lease);
      if (fact === "JobRequeued" && !attempts.size) spans.push((waits = { row: 0, kind: "queued", from: at, to: null, name: "queue" }));
    }
    if (ENDS.has(fact)) {
      close(waits, at);
      for (const span of attempts.values()) close(span, at);
      attempts.clear();
      waits = null;
    }
  }
  for (const span of spans) span.to ??= now;
  return spans;
}

export function Timeline({ events, running }) {
  const [now, setNow] = useState(coordinatorNow());
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(() => setNow(coordinatorNow()), 500);
    return () => clearInterval(timer);
  }, [running]);
  if (!events.length) return html`<p class="hint">No history of this job is stored.</p>`;
  const start = events[0].at;
  const last = events[events.length - 1].at;
  const end = Math.max(running ? now : last, last, start + 0.001);
  const total = end - start;
  const spans = spansOf(events, end);
  const rows = [...new Map(spans.map((each) => [each.row, each])).values()].sort((a, b) => a.row - b.row);
  const percent = (seconds) => `${((seconds / total) * 100).toFixed(3)}%`;
  return html`<div class="timeline">
    <div class="bars" role="img" aria-label=${spans.map((each) => `${each.kind} ${duration(each.to - each.from)}`).join(", ")}>
      ${rows.map(({ row, name, lease }) => html`<p class="bar-name" title=${name}>${row ? html`<b>${lease}</b> ${name.slice(name.indexOf(":") + 1)}` : "queue"}</p>
        <div class="bar">${spans.filter((each) => each.row === row).map((each) => html`<span class=${`${each.kind} ${each.failed ? "lost" : ""}`}
          style=${{ left: percent(each.from - start), width: percent(each.to - each.from) }} title=${`${each.kind} ${duration(each.to - each.from)}`}></span>`)}</div>`)}
      <p class="bar-name"></p><p class="bar-scale"><span>0 s</span><span>${duration(total / 2)}</span><span>${duration(total)}</span></p>
    </div>
    <p class="bar-legend hint"><i class="queued"></i>queued <i class="leased"></i>assigned, no output yet <i class="streaming"></i>writing <i class="lost"></i>lost or given up</p>
    <ol class="course">${events.map((each) => html`<li class=${TONES[each.fact] || ""}>
      <time title=${exact(each.at)}>${clock(each.at, true)}</time><span class="after">+${duration(each.at - start)}</span>
      <b>${TITLES[each.fact] || each.fact}</b><span>${each.text}</span></li>`)}</ol>
  </div>`;
}
