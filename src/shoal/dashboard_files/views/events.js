// The event log: what happened in the pool, newest first, and live.

import { html, useEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { clock, day, exact } from "../parts/format.js";
import { useFacts } from "../parts/live.js";
import { peerOf } from "../parts/machines.js";
import { Table } from "../parts/table.js";
import { Badge, Empty, ErrorNote, Head, Icon, Loading } from "../parts/ui.js";

const PAGE = 200;
const KEPT_MAX = 20_000; // events in the page

const TONES = {
  JobCompleted: "ok", WorkerJoined: "ok", WorkerApproved: "ok", WorkerResumed: "ok", JobFailed: "bad", JobExpired: "bad", WorkerLeft: "bad",
  WorkerMarked: "bad", JobCancelled: "warn", JobRequeued: "warn", WorkerDraining: "warn", WorkerSuspended: "warn", WorkerDismissed: "warn", LateResult: "warn",
  JobStarted: "busy", JobLeased: "busy",
};
const TOPICS = [["", "all events"], ["Job", "jobs"], ["Worker", "machines"], ["Account", "accounts"]];

/** JobRequeued → job requeued. */
const words = (fact) => fact.replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();

/** Events with newer ones before them, as many as a page keeps. */
function joined({ events, next }, newer) {
  const newest = events[0]?.number ?? -1;
  const all = [...newer.filter((each) => each.number > newest), ...events];
  if (all.length <= KEPT_MAX) return { events: all, next };
  const kept = all.slice(0, KEPT_MAX);
  return { events: kept, next: kept.at(-1).number };
}

export default function Events(props) {
  const job = props.route.query.get("job") || "";
  const worker = props.route.query.get("worker") || "";
  return html`<${EventList} key=${`${job} ${worker}`} ...${props} job=${job} worker=${worker} />`;
}

function EventList({ api, live, job, worker }) {
  const [state, setState] = useState({ events: [], next: null, error: null, loaded: false });
  const [topic, setTopic] = useState("");
  const [text, setText] = useState("");
  const [paused, setPaused] = useState(false);
  const stopped = useRef(false);
  stopped.current = paused;
  const held = useRef([]); // while paused, oldest first
  const missed = useRef(false); // there are events that only a request can bring
  const loading = useRef(false);
  const latest = useRef(null); // the number of the last event that came live
  const turn = useRef(0);
  const path = (before) => {
    const query = new URLSearchParams({ limit: PAGE });
    if (job) query.set("job", job);
    if (worker) query.set("worker", worker);
    if (before != null) query.set("before", before);
    return `/admin/events?${query}`;
  };
  // With `after`, what is listed already stays, if the newest page reaches it.
  const load = async (after = false) => {
    const mine = ++turn.current;
    loading.current = true;
    missed.current = false;
    try {
      const { data, next } = await api.get(path());
      if (mine !== turn.current) return;
      setState((old) => {
        const reaches = after && old.events.length > 0 && data.length > 0 && data.at(-1).number <= old.events[0].number;
        return { ...(reaches ? joined(old, data) : { events: data, next }), error: null, loaded: true };
      });
      loading.current = false;
      if (missed.current && !stopped.current) load(true);
    } catch (error) {
      if (mine !== turn.current) return;
      loading.current = false;
      missed.current = true;
      setState((old) => ({ ...old, error, loaded: true }));
    }
  };
  const more = async () => {
    const mine = turn.current;
    try {
      const page = await api.get(path(state.next));
      if (mine === turn.current) setState((old) => ({ ...old, events: [...old.events, ...page.data], next: page.next }));
    } catch (error) {
      if (mine === turn.current) throw error;
    }
  };
  // Also after the coordinator was away: what happened meanwhile is in its log only.
  useEffect(() => {
    if (!live.connected) return;
    if (paused) missed.current = true;
    else load(true);
  }, [live.connected]);
  const add = (facts) => setState((old) => ({ ...old, ...joined(old, facts.slice().reverse()) }));
  useFacts((facts) => {
    // The feed leaves events out when there are too many; their numbers are consecutive.
    // The first that come may be after some that are not in the first page either.
    const gap = latest.current === null || facts[0].number > latest.current + 1;
    latest.current = facts.at(-1).number;
    const wanted = facts.filter((each) => (!job || each.job === job)
      && (!worker || (each.worker && (each.worker === worker || peerOf(each.worker) === worker))));
    if (!gap && !wanted.length) return;
    // A job's events are numbered from 1 in its history, so that live ones do not fit in.
    if (gap || job || loading.current || held.current.length + wanted.length > KEPT_MAX) missed.current = true;
    if (missed.current) {
      held.current = [];
      if (!paused && !loading.current) load(true);
    } else if (paused) held.current.push(...wanted);
    else add(wanted);
  }, [job, worker, paused]);
  const resume = () => {
    if (missed.current) load(true);
    else add(held.current);
    held.current = [];
    setPaused(false);
  };
  const shown = useMemo(() => state.events.filter((each) => each.fact.startsWith(topic)
    && (!text || `${each.text} ${each.fact} ${each.job} ${each.worker}`.toLowerCase().includes(text.toLowerCase()))), [state.events, topic, text]);
  const today = day(Date.now() / 1000);
  const columns = [
    { key: "at", title: "Time", cell: (each) => html`<time title=${exact(each.at)}>${day(each.at) === today ? clock(each.at, true) : `${day(each.at)} ${clock(each.at)}`}</time>` },
    { key: "fact", title: "Event", hide: "phone", cell: (each) => html`<${Badge} tone=${TONES[each.fact] || ""}>${words(each.fact)}<//>` },
    { key: "text", title: "What happened", fill: true, cell: (each) => html`<span title=${each.text}>${each.text}</span>` },
    { key: "job", title: "Job", hide: "narrow", cell: (each) => each.job && html`<a href=${`#/jobs/${encodeURIComponent(each.job)}`}><code>${each.job.slice(0, 16)}</code></a>` },
  ];
  return html`
    <${Head} title="Events" hint=${job ? html`of the job <code>${job}</code>: <a href="#/events">all events</a>` : worker ? html`of <code>${worker}</code>: <a href="#/events">all events</a>` : null}>
      <input type="search" data-search placeholder="Filter events" aria-label="Filter events" value=${text} onInput=${(event) => setText(event.target.value)} />
      <select aria-label="Topic" value=${topic} onChange=${(event) => setTopic(event.target.value)}>
        ${TOPICS.map(([value, title]) => html`<option value=${value}>${title}</option>`)}</select>
      <button type="button" aria-pressed=${paused} onClick=${() => (paused ? resume() : setPaused(true))}><${Icon} name=${paused ? "play" : "pause"} size=${15} />${paused ? "Resume" : "Pause"}</button>
    <//>
    ${state.error && html`<${ErrorNote} error=${state.error} retry=${() => load()} />`}
    ${!state.loaded && html`<${Loading} />`}
    ${(state.events.length > 0 || (state.loaded && !state.error)) && html`<${Table} caption="Events, newest first" columns=${columns} rows=${shown} id=${(each) => each.number} next=${state.next} more=${more}
      empty=${html`<${Empty} title=${state.events.length ? "No event matches" : "Nothing has happened yet"}><p>${state.events.length ? "Change the filter above." : "Machines that join and jobs that run appear here at once."}</p><//>`} />`}`;
}
