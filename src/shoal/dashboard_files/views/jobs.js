// The jobs, newest first, and one job with its timeline.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { coordinatorNow, useFacts } from "../parts/live.js";
import { duration, integer, NONE } from "../parts/format.js";
import { peerOf } from "../parts/machines.js";
import { withFirstPage } from "../parts/pages.js";
import { readsAll, submits } from "../parts/scopes.js";
import { Table } from "../parts/table.js";
import { Timeline } from "../parts/timeline.js";
import { Badge, Confirm, Empty, ErrorNote, Head, Icon, Loading, State, Time, toast, useLoaded, useNow } from "../parts/ui.js";

const PAGE = 200;
const ASKED_MAX = 8; // jobs below the first page that are looked at again each time
const STATES = ["queued", "leased", "streaming", "done", "failed", "cancelled", "expired"];
const ENDED = new Set(["done", "failed", "cancelled", "expired"]);
const REFRESH = 1500; // ms between looks for new jobs, while facts come

export const hasEnded = (job) => ENDED.has(job.state);

/** Pages of jobs that match a filter; new ones are merged in while the page is open. */
function useJobs(api, filter) {
  const [state, setState] = useState({ rows: [], next: null, error: null, loaded: false });
  const latest = useRef(state);
  latest.current = state;
  const turn = useRef(0);
  const query = (before) => {
    const found = new URLSearchParams({ limit: PAGE });
    if (filter.state) found.set("state", filter.state);
    if (filter.owner) found.set("owner", filter.owner);
    if (filter.search) found.set("search", filter.search);
    if (before) found.set("before", before);
    return `/admin/jobs?${found}`;
  };
  const guard = async (load) => {
    const mine = turn.current;
    try {
      const page = await load();
      if (mine === turn.current) return page;
    } catch (error) {
      if (mine === turn.current) setState((old) => ({ ...old, error, loaded: true }));
    }
    return null;
  };
  const first = async () => {
    const page = await guard(() => api.get(query()));
    if (!page) return;
    // A filter by state drops what left that state, so that its list starts again.
    const { kept, ...list } = withFirstPage(filter.state ? { rows: [], next: null } : latest.current, page);
    setState({ ...list, error: null, loaded: true });
    lookAgain(kept.filter((each) => !hasEnded(each)).slice(-ASKED_MAX));
  };
  /** Asks for jobs below the first page, the oldest, which may have ended. */
  const lookAgain = async (open) => {
    const mine = turn.current;
    const found = new Map();
    await Promise.all(open.map(async ({ id }) => {
      try {
        found.set(id, await api.get(`/admin/jobs/${encodeURIComponent(id)}`));
      } catch (error) {
        if (error.status === 404) found.set(id, null); // it was pruned
      }
    }));
    if (mine !== turn.current || !found.size) return;
    setState((old) => ({ ...old, rows: old.rows.map((each) => (found.has(each.id) ? found.get(each.id) : each)).filter(Boolean) }));
  };
  const more = async () => {
    const before = latest.current.next;
    const page = await guard(() => api.get(query(before)));
    // The list may have become shorter meanwhile, and ends elsewhere.
    if (page && before === latest.current.next) setState((old) => ({ ...old, rows: [...old.rows, ...page.data], next: page.next, error: null }));
  };
  useEffect(() => {
    turn.current += 1;
    latest.current = { rows: [], next: null, error: null, loaded: false };
    setState(latest.current);
    first();
    return () => { turn.current += 1; };
  }, [filter.state, filter.owner, filter.search]);
  return { ...state, first, more };
}

function List({ api, live, session, route }) {
  const reader = readsAll(session);
  const plays = submits(session);
  const filter = { state: route.query.get("state") || "", owner: route.query.get("owner") || "", search: route.query.get("search") || "" };
  const [typed, setTyped] = useState(filter.search); // searched for when Enter is pressed
  useLayoutEffect(() => setTyped(filter.search), [filter.search]); // later, it would replace what is typed
  const filtered = Object.values(filter).some(Boolean);
  const { rows: jobs, next, error, loaded, first, more } = useJobs(api, filter);
  const latest = useRef(first); // of the filter that is chosen when the timer ends
  latest.current = first;
  const timer = useRef(null);
  const soon = () => {
    // The list grows at its top only while that is in sight: else, rows would jump.
    timer.current ??= setTimeout(() => {
      timer.current = null;
      if (scrollY < 200) latest.current();
      else soon();
    }, REFRESH);
  };
  useEffect(() => () => { clearTimeout(timer.current); timer.current = null; }, [filter.state, filter.owner, filter.search]);
  useEffect(() => { if (live.connected && loaded) soon(); }, [live.connected]); // facts were missed
  useFacts((facts) => facts.some((each) => each.job) && soon(), [filter.state, filter.owner, filter.search]);
  // Keys without the event stream see their counts change.
  const counts = live.status ? `${live.status.jobs.queued} ${live.status.jobs.running}` : "";
  useEffect(() => { if (loaded) soon(); }, [counts]);
  const now = useNow();
  const owners = useMemo(() => [...new Set(jobs.map((each) => each.owner))].sort(), [jobs]);
  const columns = [
    { key: "id", title: "Job", cell: (job) => html`<code>${job.id}</code>` },
    { key: "state", title: "State", cell: (job) => html`<${State} state=${job.state} title=${job.error} />` },
    { key: "model", title: "For", fill: true, cell: (job) => html`<span title=${job.model}>${job.model}</span>` },
    { key: "kind", title: "Kind", hide: "phone", cell: (job) => job.kind },
    ...(reader ? [{ key: "owner", title: "Key", hide: "phone", cell: (job) => job.owner || NONE }] : []),
    { key: "worker", title: "Machine", hide: "narrow", cell: (job) => (job.worker ? html`<code>${peerOf(job.worker)}</code>` : NONE) },
    { key: "tokens", title: "Tokens", align: "end", hide: "phone", cell: (job) => (job.usage ? html`<span title=${`${integer(job.usage.prompt_tokens)} read, ${integer(job.usage.completion_tokens)} written`}>${integer(job.usage.prompt_tokens + job.usage.completion_tokens)}</span>` : NONE) },
    { key: "attempts", title: "Attempts", align: "end", hide: "narrow", cell: (job) => (job.attempts > 1 ? html`<${Badge} tone="warn">${job.attempts}<//>` : job.attempts) },
    { key: "took", title: "Took", align: "end", hide: "phone", cell: (job) => duration(Math.max(0, (job.ended_at ?? Math.max(now, job.submitted_at)) - job.submitted_at)) },
    { key: "at", title: "Submitted", align: "end", cell: (job) => html`<${Time} at=${job.submitted_at} />` },
  ];
  const choose = (changes) => {
    const chosen = new URLSearchParams(Object.entries({ ...filter, ...changes }).filter(([, value]) => value));
    location.hash = `#/jobs${chosen.size ? `?${chosen}` : ""}`;
  };
  return html`
    <${Head} title="Jobs" hint=${live.status && `${integer(live.status.jobs.running)} running, ${integer(live.status.jobs.queued)} queued`}>
      <form role="search" onSubmit=${(event) => { event.preventDefault(); choose({ search: typed.trim() }); }}>
        <input type="search" data-search value=${typed} maxlength="200"
          placeholder=${reader ? "Search by id, model or key" : "Search by id or model"} aria-label="Search jobs"
          onInput=${(event) => { setTyped(event.target.value); if (!event.target.value && filter.search) choose({ search: "" }); }} /></form>
      <select aria-label="State" value=${filter.state} onChange=${(event) => choose({ state: event.target.value })}>
        <option value="">all states</option>${STATES.map((each) => html`<option value=${each}>${each}</option>`)}</select>
      ${reader && html`<select aria-label="Key" value=${filter.owner} onChange=${(event) => choose({ owner: event.target.value })}>
        <option value="">all keys</option>${[...new Set([...owners, filter.owner].filter(Boolean))].map((each) => html`<option value=${each}>${each}</option>`)}</select>`}
    <//>
    ${error && html`<${ErrorNote} error=${error} retry=${first} />`}
    ${!loaded && html`<${Loading} />`}
    ${(jobs.length > 0 || (loaded && !error)) && html`<${Table} caption="Jobs, newest first" columns=${columns} rows=${jobs} id=${(job) => job.id} label=${(job) => `Job ${job.id}, ${job.state}`}
      open=${(job) => { location.hash = `#/jobs/${encodeURIComponent(job.id)}`; }} next=${next} more=${more}
      empty=${html`<${Empty} title=${filtered ? "No job matches" : "No job was submitted yet"}>${filtered
        ? html`<p><a href="#/jobs">Show all jobs</a></p>` : html`<p>Try one ${plays ? html`in the <a href="#/playground">playground</a>, or ` : ""}with <code>shoal chat</code>.</p>`}<//>`} />`}`;
}

function Job({ api, session, id }) {
  const path = `/admin/jobs/${encodeURIComponent(id)}`;
  const [job, error, reload] = useLoaded(() => api.get(path), [id]);
  const [course, failure, again] = useLoaded(() => api.get(`${path}/explain`), [id]);
  const [asking, setAsking] = useState(false);
  const refresh = () => { reload(); again(); };
  useFacts((facts) => facts.some((each) => each.job === id) && refresh(), [id]);
  const running = job && !hasEnded(job);
  useEffect(() => {
    if (!running) return undefined;
    const timer = setInterval(refresh, 3000);
    return () => clearInterval(timer);
  }, [running, id]);
  const back = html`<p><a class="back" href="#/jobs"><${Icon} name="back" size=${16} />All jobs</a></p>`;
  if (failure && !course) return html`${back}<${Head} title="Job" /><${ErrorNote} error=${error ?? failure} retry=${refresh} />`;
  if (!course || (!job && !error)) return html`${back}<${Loading} />`;
  const mine = job && (session.scope === "admin" || (session.scope === "use" && job.owner === session.name));
  const reader = readsAll(session);
  const outcome = job?.outcome;
  return html`${back}
    <${Head} title=${html`<code>${id}</code>`}>
      ${job && html`<${State} state=${job.state} />`}
      ${mine && running && html`<button type="button" class="danger" onClick=${() => setAsking(true)}><${Icon} name="cross" size=${16} />Cancel</button>`}
    <//>
    <div class="stack">
      ${job?.error && html`<${ErrorNote} error=${{ message: job.error }} />`}
      ${job && html`<dl class="numbers job-numbers">
        <div><dt>For</dt><dd>${job.model}</dd></div>
        <div><dt>Kind</dt><dd>${job.kind}</dd></div>
        <div><dt>Key</dt><dd>${job.owner || NONE}</dd></div>
        <div><dt>Submitted</dt><dd><${Time} at=${job.submitted_at} /></dd></div>
        <div><dt>Took</dt><dd>${job.ended_at ? duration(job.ended_at - job.submitted_at) : html`<${Elapsed} since=${job.submitted_at} />`}</dd></div>
        <div><dt>Attempts</dt><dd>${job.attempts}</dd></div>
        <div><dt>Priority</dt><dd>${job.priority}</dd></div>
        ${outcome?.usage && html`<div><dt>Tokens</dt><dd>${integer(outcome.usage.prompt_tokens)} read, ${integer(outcome.usage.completion_tokens)} written</dd></div>`}
        ${job.worker && html`<div><dt>Worker</dt><dd>${reader ? html`<a href=${`#/nodes/${encodeURIComponent(peerOf(job.worker))}`}><code>${job.worker}</code></a>` : html`<code>${job.worker}</code>`}</dd></div>`}
      </dl>`}
      ${course.events && (job || course.events.length > 0) && html`<section class="card"><h2>Timeline</h2><${Timeline} events=${course.events} running=${running} /></section>`}
      <section class="card"><h2>Explanation</h2><pre tabindex="0">${course.lines.join("\n")}</pre></section>
      ${outcome && (outcome.text || outcome.value != null) && html`<section class="card"><h2>Result${outcome.finish_reason && html` <small class="dim">${outcome.finish_reason}</small>`}</h2>
        <pre tabindex="0">${outcome.text || JSON.stringify(outcome.value, null, 2)}</pre></section>`}
      ${job?.state === "done" && html`<p><a href=${`#/receipts/${encodeURIComponent(id)}`}>Its receipt</a></p>`}
    </div>
    ${asking && html`<${Confirm} title="Cancel this job?" action="Cancel the job" danger onClose=${() => setAsking(false)}
      onYes=${async () => { await api.delete(path); toast("The job is cancelled"); refresh(); }}><p>Its worker stops, and its client gets an error.</p><//>`}`;
}

function Elapsed({ since }) {
  const [now, setNow] = useState(coordinatorNow());
  useEffect(() => {
    const timer = setInterval(() => setNow(coordinatorNow()), 1000);
    return () => clearInterval(timer);
  }, []);
  return html`<span>${duration(Math.max(0, now - since))} so far</span>`;
}

export default function Jobs(props) {
  const [id] = props.route.path;
  return id ? html`<${Job} key=${id} id=${id} ...${props} />` : html`<${List} ...${props} />`;
}
