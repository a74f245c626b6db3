// What the pool is doing now: one event stream for all views, or polling without the scope for it.

import { useEffect, useState } from "../vendor/preact.js";
import { api } from "./api.js";

const RETRY = [1000, 2000, 4000, 8000, 15000]; // ms
const POLL = 5000; // ms, of keys that may not read the stream
const HIDDEN = 60_000; // ms until a hidden page lets go of the stream
const FACTS_MAX = 500;
const HISTORY_MAX = 900; // samples of a second each

const EMPTY = {
  status: null,
  activity: {},
  rate: null,
  facts: [], // newest first
  connected: false,
  lost_at: null, // Unix seconds since which the coordinator is away
  at: null,
};

let state = EMPTY;
let source = null;
let timer = null;
let sampler = null;
let hiding = null;
let failures = 0;
let monitors = false;
let running = false;
const listeners = new Set();

/** Samples of each second since the page was opened: Unix seconds, tokens/s, jobs/s, running, queued. */
export const history = [[], [], [], [], []];

export const live = () => state;

let ahead = 0; // seconds that the coordinator's clock is ahead of the browser's

/** The Unix time by the coordinator's clock, as its facts and records have it. */
export const coordinatorNow = () => Date.now() / 1000 + ahead;

function heard(at) {
  ahead = at - Date.now() / 1000;
}

/** The clock of a response: its header has whole seconds, so that only a difference beyond them counts. */
function heardDate(header) {
  const before = Date.parse(header) / 1000 - Date.now() / 1000;
  if (!Number.isNaN(before)) ahead = Math.min(Math.max(ahead, before), before + 1);
}

function set(changes) {
  state = { ...state, ...changes };
  for (const listener of listeners) listener(state);
}

/** The live data as of now; renders again when they change. */
export function useLive() {
  const [, changed] = useState(state);
  useEffect(() => {
    listeners.add(changed);
    changed(state);
    return () => listeners.delete(changed);
  }, []);
  return state;
}

/** Calls `handler` with each batch of new facts, while mounted. */
const factHandlers = new Set();
export function useFacts(handler, inputs) {
  useEffect(() => {
    factHandlers.add(handler);
    return () => factHandlers.delete(handler);
  }, inputs);
}

export function start(session) {
  stop();
  running = true;
  monitors = session.scope === "admin" || session.scope === "monitor";
  state = EMPTY;
  for (const each of history) each.length = 0;
  document.addEventListener("visibilitychange", onVisibility);
  sampler = setInterval(sample, 1000);
  connect();
}

export function stop() {
  running = false;
  document.removeEventListener("visibilitychange", onVisibility);
  clearInterval(sampler);
  disconnect();
}

function disconnect() {
  clearTimeout(timer);
  clearTimeout(hiding);
  source?.close();
  source = null;
}

function onVisibility() {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(disconnect, HIDDEN);
  else if (!source && running) connect();
}

/** Connects at once instead of waiting for the next try. */
export function retryNow() {
  if (running && !state.connected) connect();
}

function connect() {
  disconnect();
  if (!monitors) return poll();
  source = new EventSource("/admin/live");
  source.addEventListener("snapshot", (event) => {
    const { at, status, activity, rate } = JSON.parse(event.data);
    failures = 0;
    heard(at);
    set({ at, status, activity, rate, connected: true, lost_at: null });
  });
  source.addEventListener("changes", (event) => change(JSON.parse(event.data)));
  source.addEventListener("facts", (event) => {
    const facts = JSON.parse(event.data);
    set({ facts: [...facts.slice().reverse(), ...state.facts].slice(0, FACTS_MAX) });
    for (const handler of factHandlers) handler(facts);
  });
  source.onerror = () => lost();
  return undefined;
}

function change({ at, status, workers, activity, rate }) {
  heard(at);
  const next = { at, connected: true, lost_at: null };
  if (status || workers) {
    next.status = { ...state.status, ...status };
    if (workers) next.status.workers = merged(state.status.workers, workers);
  }
  if (activity) {
    next.activity = { ...state.activity };
    for (const [id, each] of Object.entries(activity)) {
      if (each) next.activity[id] = each;
      else delete next.activity[id];
    }
  }
  if (rate) next.rate = rate;
  set(next);
}

/** Workers that did not change stay the same objects, so that nothing of them renders again. */
function merged(workers, changes) {
  const left = { ...changes };
  const kept = [];
  for (const worker of workers) {
    if (!(worker.id in left)) kept.push(worker);
    else {
      if (left[worker.id]) kept.push(left[worker.id]);
      delete left[worker.id];
    }
  }
  for (const added of Object.values(left)) if (added) kept.push(added);
  return kept;
}

async function lost() {
  source?.close();
  source = null;
  set({ connected: false, lost_at: state.lost_at ?? coordinatorNow() });
  const wait = RETRY[Math.min(failures, RETRY.length - 1)];
  failures += 1;
  clearTimeout(timer);
  timer = setTimeout(async () => {
    // The stream does not say why it ended; a request does, if the session has.
    try { await api.get("/admin/status"); } catch { /* told by `whenSignedOut` */ }
    if (running && !source) connect();
  }, wait);
}

async function poll() {
  try {
    const response = await api.fetch("/admin/status");
    const status = await response.json();
    heardDate(response.headers.get("date"));
    set({ status, at: coordinatorNow(), connected: true, lost_at: null });
  } catch {
    set({ connected: false, lost_at: state.lost_at ?? coordinatorNow() });
  }
  if (running && !document.hidden) timer = setTimeout(poll, POLL);
}

function sample() {
  if (!state.connected || !state.status) return;
  const { jobs } = state.status;
  const values = [Date.now() / 1000, state.rate?.tokens_per_second ?? 0,
    state.rate?.jobs_per_second ?? 0, jobs.running, jobs.queued];
  history.forEach((each, place) => {
    each.push(values[place]);
    if (each.length > HISTORY_MAX) each.shift();
  });
}
