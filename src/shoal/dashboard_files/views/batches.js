// Batches: files of requests that the pool runs when it is idle.

import { html, useEffect, useState } from "../vendor/preact.js";
import { duration, exact, integer, plural, shortId } from "../parts/format.js";
import { coordinatorNow } from "../parts/live.js";
import { withFirstPage } from "../parts/pages.js";
import { readsAll, submits } from "../parts/scopes.js";
import { Table } from "../parts/table.js";
import { Confirm, Empty, ErrorNote, Head, Icon, Loading, Meter, State, Time, toast, usePolled } from "../parts/ui.js";

const PAGE = 50;
const REFRESHED_MAX = 1000; // batches that are read again at once: the coordinator lists no more
const OPEN = new Set(["validating", "in_progress", "finalizing", "cancelling"]);

const isOpen = ({ status }) => OPEN.has(status);

export default function Batches({ api, session, route }) {
  const [id] = route.path;
  return id ? html`<${Batch} key=${id} api=${api} id=${id} session=${session} />` : html`<${List} api=${api} session=${session} />`;
}

function Progress({ batch }) {
  const { total, completed, failed } = batch.request_counts;
  const done = completed + failed;
  const label = `${integer(done)} of ${integer(total)}`;
  return html`<span class="progress"><${Meter} value=${total ? done / total : 0} label=${label} tone=${failed ? "hot" : ""} />
    <span>${label}${failed ? html` <span class="problem">${integer(failed)} failed</span>` : ""}</span></span>`;
}

function List({ api, session }) {
  const [list, setList] = useState({ rows: [], next: null });
  const { rows, next } = list;
  const limit = Math.min(REFRESHED_MAX, Math.max(PAGE, rows.length));
  const [first, error, reload] = usePolled(() => api.get(`/admin/batches?limit=${limit}`), [], () => true);
  useEffect(() => { if (first) setList((old) => withFirstPage(old, first)); }, [first]);
  const head = html`<${Head} title="Batches" hint="Files of requests that run when the pool is idle" />`;
  if (error && !first) return html`${head}<${ErrorNote} error=${error} retry=${reload} />`;
  if (!first) return html`${head}<${Loading} />`;
  const more = async () => {
    const page = await api.get(`/admin/batches?limit=${PAGE}&before=${encodeURIComponent(next)}`);
    // The list may end elsewhere meanwhile.
    setList((old) => (old.next === next ? { rows: [...old.rows, ...page.data], next: page.next } : old));
  };
  const all = readsAll(session);
  const columns = [
    { key: "id", title: "Batch", cell: (batch) => html`<span class="mono long-id">${batch.id.replace("batch_", "")}</span>` },
    { key: "status", title: "State", cell: (batch) => html`<${State} state=${batch.status} />`, sort: (batch) => batch.status },
    { key: "progress", title: "Done", cell: (batch) => html`<${Progress} batch=${batch} />` },
    { key: "model", title: "Model", cell: (batch) => batch.model ?? "–", sort: (batch) => batch.model, hide: "phone" },
    ...(all ? [{ key: "owner", title: "Key", cell: (batch) => batch.owner, sort: (batch) => batch.owner, hide: "phone" }] : []),
    { key: "created", title: "Created", cell: (batch) => html`<${Time} at=${batch.created_at} />`, sort: (batch) => batch.created_at, hide: "phone" },
    { key: "expires", title: "Until", hide: "narrow", cell: (batch) => (isOpen(batch) ? html`<${Time} at=${batch.expires_at} />` : "–") },
  ];
  return html`${head}<${Table} caption="Batches, newest first" columns=${columns} rows=${rows.length ? rows : first.data} id=${(batch) => batch.id}
    open=${(batch) => { location.hash = `#/batches/${encodeURIComponent(batch.id)}`; }} label=${(batch) => `Batch ${batch.id}`}
    next=${next != null} more=${more}
    empty=${html`<${Empty} title="No batches">
      <p>A batch is a file of requests, one per line, that runs at low priority. OpenAI's library sends it:
        <code>client.files.create(…, purpose="batch")</code>, then <code>client.batches.create(…)</code>.</p><//>`} />`;
}

const TIMES = [
  ["created_at", "created"], ["in_progress_at", "begun"], ["finalizing_at", "all requests done"],
  ["cancelling_at", "cancelled by its owner"], ["completed_at", "completed"], ["failed_at", "failed"],
  ["expired_at", "expired"], ["cancelled_at", "ended"],
];

function Batch({ api, id, session }) {
  const [batch, error, reload] = usePolled(() => api.get(`/v1/batches/${encodeURIComponent(id)}`), [id], isOpen);
  const [asking, setAsking] = useState(false);
  const back = html`<a class="button" href="#/batches"><${Icon} name="back" size=${16} />All batches</a>`;
  if (error && !batch) return html`<${Head} title="Batch">${back}<//><${ErrorNote} error=${error} retry=${reload} />`;
  if (!batch) return html`<${Head} title="Batch" /><${Loading} />`;
  const { total, completed, failed } = batch.request_counts;
  const began = batch.in_progress_at ?? batch.created_at;
  const done = completed + failed;
  const spent = Math.max(0, coordinatorNow() - began);
  const left = batch.status === "in_progress" && done > 0 ? (spent / done) * (total - done) : null;
  const times = TIMES.filter(([name]) => batch[name] != null).sort((a, b) => batch[a[0]] - batch[b[0]]);
  const may = submits(session);
  const file = (name, id_, what) => id_ && html`<a class="button" href=${`/v1/files/${encodeURIComponent(id_)}/content`}
    download=${`${batch.id}-${name}.jsonl`}><${Icon} name="download" size=${16} />${what}</a>`;
  return html`<div class="stack">
    <${Head} title=${`Batch ${shortId(batch.id.replace("batch_", ""), 12)}`}>
      ${back}
      ${may && isOpen(batch) && batch.status !== "cancelling" && html`<button type="button" class="danger" onClick=${() => setAsking(true)}>Cancel</button>`}
    <//>
    <section class="card batch" aria-label="Progress">
      <div class="batch-state"><${State} state=${batch.status} /><b>${integer(done)} of ${plural(total, "request")}</b>
        ${left !== null && html`<span class="dim">about ${duration(left)} left</span>`}</div>
      <div class="batch-bar" role="img" aria-label=${`${completed} completed, ${failed} failed, of ${total}`}>
        <span class="ok" style=${{ flexGrow: completed }}></span><span class="bad" style=${{ flexGrow: failed }}></span>
        <span style=${{ flexGrow: Math.max(total - done, total ? 0 : 1) }}></span></div>
      <p class="batch-legend"><span><i class="ok"></i>${integer(completed)} completed</span><span><i class="bad"></i>${integer(failed)} failed</span>
        <span><i></i>${integer(total - done)} to do</span></p>
      <div class="controls">
        ${file("results", batch.output_file_id, "Results")}
        ${file("errors", batch.error_file_id, "Errors")}
        ${file("input", batch.input_file_id, "Input")}
      </div>
    </section>
    ${batch.errors && html`<section class="card" aria-label="Errors of the file"><h2>The file has errors</h2>
      <ul class="batch-errors">${batch.errors.data.map((each) => html`<li>${each.line != null && html`<b>Line ${each.line}</b> `}${each.message} <code>${each.code}</code></li>`)}</ul></section>`}
    <div class="grid two">
      <section class="card" aria-label="The batch"><h2>The batch</h2><dl class="facts">
        <dt>Id</dt><dd><code>${batch.id}</code></dd>
        <dt>Endpoint</dt><dd><code>${batch.endpoint}</code></dd>
        <dt>Model</dt><dd>${batch.model ?? "not known yet"}</dd>
        <dt>Time limit</dt><dd>${batch.completion_window}, until ${exact(batch.expires_at)}</dd>
        ${Object.entries(batch.metadata ?? {}).map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}
      </dl></section>
      <section class="card" aria-label="Timeline"><h2>Timeline</h2><ol class="batch-course">${times.map(([name, title], place) => html`<li>
        <span>${title}</span><span class="dim">${place ? `after ${duration(batch[name] - batch[times[place - 1][0]]).replace("0 ms", "less than 1 s")}` : ""}</span><${Time} at=${batch[name]} /></li>`)}</ol></section>
    </div>
    ${asking && html`<${Confirm} title="Cancel this batch?" action="Cancel the batch" danger onClose=${() => setAsking(false)}
      onYes=${async () => { await api.post(`/v1/batches/${encodeURIComponent(batch.id)}/cancel`); toast("The batch is being cancelled"); await reload(); }}>
      <p>Running requests are cancelled; results so far are kept in its files.</p><//>`}
  </div>`;
}
