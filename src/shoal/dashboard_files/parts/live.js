// What the pool is doing now: one event stream for all views, or polling without the scope for it.

import { useEffect, useState } from "../vendor/preact.js";
import { api, endSession } from "./api.js";
import { readsAll } from "./scopes.js";

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
  lost_at: null, // Unix seconds since which the coordinator is away; null, too, while a hidden page does not listen
  refusal: null, // the error with which the coordinator refuses its state, if it answers
  at: null,
};

let state = EMPTY;
let source = null;
let timer = null;
let sampler = null;
let hiding = null;
let failures = 0;
let session = null;
let running = false;
let turn = 0; // what began in an earlier one changes nothing any more
const listeners = new Set();

/**
 * Samples of each second since the page was opened: Unix seconds, tokens/s, jobs/s, running, queued;
 * null where the page did not follow the coordinator.
 */
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

export function start(begun) {
  stop();
  running = true;
  session = begun;
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
  turn += 1;
  clearTimeout(timer);
  clearTimeout(hiding);
  source?.close();
  source = null;
}

function onVisibility() {
  clearTimeout(hiding);
  if (document.hidden) hiding = setTimeout(rest, HIDDEN);
  else if (!source && running) connect();
}

function rest() {
  disconnect();
  set({ connected: false });
}

/** Connects at once instead of waiting for the next try. */
export function retryNow() {
  if (running && !state.connected) connect();
}

function connect() {
  disconnect();
  if (!readsAll(session)) return poll();
  source = new EventSource("/admin/live");
  source.addEventListener("snapshot", (event) => {
    const { at, status, activity, rate } = JSON.parse(event.data);
    failures = 0;
    heard(at);
    set({ at, status, activity, rate, connected: true, lost_at: null, refusal: null });
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
  const refused = source?.readyState === EventSource.CLOSED; // else, the connection failed
  source?.close();
  source = null;
  clearTimeout(timer);
  const mine = turn;
  set({ connected: false, lost_at: state.lost_at ?? coordinatorNow() });
  const refusal = refused ? await refusalOfStream() : null;
  if (mine !== turn) return;
  set({ refusal });
  const wait = RETRY[Math.min(failures, RETRY.length - 1)];
  failures += 1;
  timer = setTimeout(async () => {
    await checkSession(mine);
    if (mine === turn) connect();
  }, wait);
}

/** An event stream does not say why it was refused; a request does. */
async function refusalOfStream() {
  const reading = new AbortController();
  try {
    await api.fetch("/admin/live", { signal: reading.signal });
    reading.abort();
    return null;
  } catch (error) {
    return error.status ? error : null;
  }
}

/** Ends the session of the page if its cookie's has ended, or if requests now count as another key's. */
async function checkSession(mine) {
  let changed;
  try {
    const { name, scope } = await api.get("/dashboard/session");
    changed = name !== session.name || scope !== session.scope;
  } catch (error) {
    changed = error.status === 401;
  }
  if (changed && mine === turn) endSession();
}

async function poll() {
  const mine = turn;
  try {
    const response = await api.fetch("/admin/status");
    const status = await response.json();
    if (mine !== turn) return;
    heardDate(response.headers.get("date"));
    set({ status, at: coordinatorNow(), connected: true, lost_at: null, refusal: null });
  } catch (error) {
    if (mine !== turn) return;
    set({ connected: false, lost_at: state.lost_at ?? coordinatorNow(), refusal: error.status ? error : null });
  }
  if (!document.hidden) timer = setTimeout(poll, POLL);
}

function sample() {
  if (!state.status) return;
  const { jobs } = state.status;
  const values = [Date.now() / 1000, ...(state.connected ? [state.rate?.tokens_per_second ?? 0,
    state.rate?.jobs_per_second ?? 0, jobs.running, jobs.queued] : [null, null, null, null])];
  history.forEach((each, place) => {
    each.push(values[place]);
    if (each.length > HISTORY_MAX) each.shift();
  });
}
