// The pool as a living picture: what needs attention, the machines, and what they do now.

import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "../vendor/preact.js";
import { attention } from "../parts/attention.js";
import { Currents } from "../parts/currents.js";
import { clock, exact, integer, plural, rate, short } from "../parts/format.js";
import { Mark } from "../parts/icons.js";
import { JoinPanel } from "../parts/join.js";
import { api } from "../parts/api.js";
import { coordinatorNow, history, useFacts } from "../parts/live.js";
import { beforePage } from "../parts/minutes.js";
import { readsAll } from "../parts/scopes.js";
import { MachineDialog } from "../parts/machine.js";
import { machinesOf, peerOf, toneOf } from "../parts/machines.js";
import { Plot, Sparkline } from "../parts/plot.js";
import { Tile } from "../parts/tile.js";
import { Head, Icon, Loading, Meter } from "../parts/ui.js";

const TILES_MAX = 60; // machines above this are drawn as a grid of cells
const TRAIL = 60; // samples in a tile's line
const GAP = 26; // px between tiles, where the currents flow; as in style.css

/** What each machine does, as the same object while nothing of it changed. */
function useDoings(machines, activity) {
  const known = useRef(new Map());
  return useMemo(() => {
    const next = new Map();
    for (const machine of machines) {
      const parts = machine.workers.map((each) => activity[each.id]);
      const old = known.current.get(machine.key);
      if (old && old.parts.length === parts.length && old.parts.every((each, n) => each === parts[n])) {
        next.set(machine.key, old);
        continue;
      }
      const busy = parts.filter(Boolean);
      const jobs = busy.flatMap((each) => each.jobs);
      const tokens = busy.reduce((sum, each) => sum + each.tokens_per_second, 0);
      next.set(machine.key, { parts, jobs, tokens });
    }
    known.current = next;
    return next;
  }, [machines, activity]);
}

/** The last tokens per second of each machine: a new list only where something flows. */
function useTrails(doings) {
  const trails = useRef(new Map());
  const latest = useRef(doings);
  latest.current = doings;
  const [, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => {
      for (const [key, { tokens }] of latest.current) {
        const old = trails.current.get(key) || [];
        if (!tokens && !old.some(Boolean)) continue;
        trails.current.set(key, [...old.slice(1 - TRAIL), tokens]);
      }
      for (const key of trails.current.keys()) if (!latest.current.has(key)) trails.current.delete(key);
      tick((n) => n + 1);
    }, 1000);
    return () => clearInterval(timer);
  }, []);
  return trails.current;
}

function Attention({ status, machines, admin }) {
  const [all, setAll] = useState(false);
  const found = attention(status, machines, admin);
  if (!found.length) {
    return html`<p class="attention calm"><${Icon} name="check" /><span><b>No action needed.</b>
      ${` ${plural(machines.length, "machine")}, ${plural(status.models.length, "model")}, ready for jobs.`}</span></p>`;
  }
  const line = (each) => html`<${Icon} name=${each.tone === "info" ? "events" : "warn"} /><span>${each.text}</span>
    ${each.href && html`<a href=${each.href}>${each.action}<span class="unseen">: ${each.text}</span></a>`}`;
  const [first, ...others] = found;
  return html`<div class=${`attention ${first.tone}`} role="group" aria-label="What needs your attention">
    <div class="attention-line">${line(first)}<span class="grow"></span>
      ${others.length > 0 && html`<button type="button" class="small" aria-expanded=${all} onClick=${() => setAll(!all)}>
        ${all ? "Less" : `${others.length} more`}</button>`}</div>
    ${all && html`<ul>${others.map((each) => html`<li class=${`attention-line ${each.tone}`} key=${each.text}>${line(each)}</li>`)}</ul>`}
  </div>`;
}

function Numbers({ live, machines }) {
  const { jobs } = live.status;
  const slots = machines.reduce((sum, each) => sum + each.slots, 0);
  const busy = machines.reduce((sum, each) => sum + each.running, 0);
  const here = machines.filter((each) => !each.away).length;
  return html`<ul class="numbers">
    <li class="flows"><b>${rate(live.rate?.tokens_per_second ?? 0)}</b><span>tokens/s</span><${Sparkline} values=${history[1].slice(-TRAIL)} /></li>
    <li><b>${integer(jobs.running)}</b><span>${jobs.running === 1 ? "job" : "jobs"} running</span></li>
    <li><b>${integer(jobs.queued)}</b><span>queued</span></li>
    <li><b>${integer(busy)}<small> / ${integer(slots)}</small></b><span>slots busy</span><${Meter} value=${slots ? busy / slots : 0} tone="" label=${`${busy} of ${slots} slots busy`} /></li>
    <li><b>${integer(here)}</b><span>${here === 1 ? "machine" : "machines"}</span></li>
    <li><b>${integer(live.status.models.length)}</b><span>${live.status.models.length === 1 ? "model" : "models"}</span></li>
  </ul>`;
}

/** Where machines' tokens go: the coordinator, at the top of the picture. */
function Hub({ live }) {
  const { jobs } = live.status;
  return html`<div class="hub" data-hub>
    <${Mark} size=${30} />
    <p><b>${rate(live.rate?.tokens_per_second ?? 0)}</b> tokens/s
      <small>${plural(jobs.running, "job")} running, ${integer(jobs.queued)} queued</small></p>
  </div>`;
}

/** Draws the currents behind `children`; `routes(box)` returns each machine's corners. */
function Picture({ live, machines, doings, lines, routes, children, label }) {
  const box = useRef(null);
  const canvas = useRef(null);
  const currents = useRef(null);
  const find = useRef(routes);
  find.current = routes;
  useLayoutEffect(() => {
    currents.current = new Currents(canvas.current, { lines });
    const lay = () => {
      const { width, height } = box.current.getBoundingClientRect();
      currents.current.layout(width, height, find.current(box.current));
    };
    const resized = new ResizeObserver(lay);
    resized.observe(box.current);
    box.current.lay = lay;
    return () => { resized.disconnect(); currents.current.close(); };
  }, [lines]);
  const order = machines.map((each) => each.key).join("\n");
  useLayoutEffect(() => box.current.lay(), [order]);
  useEffect(() => {
    currents.current.flow(new Map([...doings].map(([key, each]) => [key, live.connected ? each.tokens : 0])));
  }, [doings, live.connected, order]);
  const keys = useMemo(() => new Map(machines.flatMap((each) => each.names.map((name) => [name, each.key]))), [order]);
  useFacts((facts) => {
    for (const { fact, worker } of facts) {
      if (fact === "JobLeased" && worker) currents.current.sink(keys.get(peerOf(worker)));
    }
  }, [keys]);
  return html`<section class="picture" ref=${box} aria-label=${label}>
    <canvas ref=${canvas} aria-hidden="true"></canvas>
    <${Hub} live=${live} />
    ${children}
  </section>`;
}

/** From the top of each tile through the gaps between tiles up to the coordinator. */
function routesOfTiles(box) {
  const frame = box.getBoundingClientRect();
  const hub = box.querySelector("[data-hub]").getBoundingClientRect();
  const end = [hub.left + hub.width / 2 - frame.left, hub.bottom - frame.top];
  const tiles = [...box.querySelectorAll("[data-key]")].map((tile) => {
    const at = tile.getBoundingClientRect();
    return { key: tile.dataset.key, left: at.left - frame.left, top: at.top - frame.top, width: at.width };
  });
  if (!tiles.length) return [];
  const first = Math.min(...tiles.map((each) => each.top));
  const trunk = first - GAP / 2;
  return tiles.map(({ key, left, top, width }) => {
    const middle = left + width / 2;
    const corners = [[middle, top], [middle, top - GAP / 2]];
    if (top > first + 1) {
      // The gap beside the tile that is nearer to the coordinator.
      const [before, after] = [left - GAP / 2, left + width + GAP / 2];
      const lane = Math.abs(before - end[0]) < Math.abs(after - end[0]) ? before : after;
      corners.push([lane, top - GAP / 2], [lane, trunk]);
    }
    corners.push([end[0], trunk], end);
    return [key, corners];
  });
}

function Tiles({ live, machines, doings, open }) {
  const trails = useTrails(doings);
  return html`<${Picture} live=${live} machines=${machines} doings=${doings} lines routes=${routesOfTiles} label="The machines of the pool">
    <div class="tiles">${machines.map((each) => html`<${Tile} key=${each.key} machine=${each}
      activity=${doings.get(each.key)} trail=${trails.get(each.key)} open=${open} />`)}</div>
  <//>`;
}

const TONES = [
  ["busy", "busy"], ["ok", "idle"], ["warn", "paused, pending or unfit"], ["bad", "not admitted or removed"], ["off", "away"],
];
const CELL = 24; // px, with its gap; as in style.css

/** Many machines: a cell each, with the one in focus shown beside. */
function Cells({ live, machines, doings, open }) {
  const [at, setAt] = useState(0);
  const [only, setOnly] = useState(null);
  const list = useRef(null);
  const tones = useMemo(() => machines.map(toneOf), [machines]);
  const counts = useMemo(() => {
    const found = {};
    for (const each of tones) found[each] = (found[each] || 0) + 1;
    return found;
  }, [tones]);
  const place = Math.min(at, machines.length - 1);
  const shown = machines[place];
  const pressed = (event) => {
    const columns = Math.max(1, Math.floor(list.current.clientWidth / CELL));
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns, Home: -place, End: machines.length - 1 - place }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const next = Math.max(0, Math.min(machines.length - 1, place + step));
    setAt(next);
    list.current.children[next].focus();
  };
  const over = (event) => {
    const n = event.target.dataset?.n;
    if (n !== undefined) setAt(+n);
  };
  const routes = (box) => {
    const hub = box.querySelector("[data-hub]");
    const cells = list.current;
    const end = [hub.offsetLeft + hub.offsetWidth / 2, hub.offsetTop + hub.offsetHeight];
    const columns = Math.max(1, Math.floor(cells.clientWidth / CELL));
    return machines.map((each, n) => {
      const x = cells.offsetLeft + (n % columns) * CELL + CELL / 2;
      const y = cells.offsetTop + Math.floor(n / columns) * CELL + CELL / 2;
      return [each.key, [[x, y], [x + (end[0] - x) * 0.15, y - (y - end[1]) * 0.6], end]];
    });
  };
  return html`<div class="many">
    <${Picture} live=${live} machines=${machines} doings=${doings} lines=${false} routes=${routes} label="The machines of the pool">
      <div class=${`cells ${only ? `only-${only}` : ""}`} ref=${list} role="group" aria-label=${`${plural(machines.length, "machine")}; arrow keys move`}
        onKeyDown=${pressed} onMouseOver=${over} onFocusIn=${over} onClick=${(event) => {
          const n = event.target.dataset?.n;
          if (n !== undefined) open(machines[n]);
        }}>
        ${machines.map((each, n) => {
          const load = each.slots ? Math.ceil((each.running / each.slots) * 4) : 0;
          return html`<button type="button" key=${each.key} data-n=${n} tabindex=${n === place ? 0 : -1}
            class=${`cell ${tones[n]} load-${load}${n === place ? " current" : ""}`} aria-label=${`${each.name}, ${each.states.join(", ")}, ${each.running} of ${each.slots} slots busy`}></button>`;
        })}
      </div>
    <//>
    <div class="beside">
      <div class="legend" role="group" aria-label="Show only">
        ${TONES.filter(([tone]) => counts[tone]).map(([tone, text]) => html`<button key=${tone} type="button" class="small"
          aria-pressed=${only === tone} onClick=${() => setOnly(only === tone ? null : tone)}>
          <i class=${`cell ${tone}`} aria-hidden="true"></i>${integer(counts[tone])} ${text}</button>`)}
      </div>
      ${shown && html`<${Tile} key=${shown.key} machine=${shown} activity=${doings.get(shown.key)} open=${open} />`}</div>
  </div>`;
}

const TOKENS = [{ label: "tokens/s", colour: "--accent", fill: true, value: rate }];
const JOBS = [{ label: "jobs/s", colour: "--busy", fill: true, value: rate }];
const LOAD = [{ label: "running", colour: "--busy", value: short }, { label: "queued", colour: "--warn", value: short }];

const HOURS = 3; // that the plots show
const MINUTES_AGAIN = 60_000; // ms between looks for what the page did not see

/** The usage of the last hours, from the coordinator. */
function useMinutes(session) {
  const [minutes, setMinutes] = useState([]);
  useEffect(() => {
    if (!readsAll(session)) return undefined;
    const read = async () => {
      if (document.hidden) return;
      try {
        setMinutes((await api.get(`/admin/usage/minutes?hours=${HOURS}`)).data);
      } catch { /* the page says that the coordinator is away */ }
    };
    read();
    const timer = setInterval(read, MINUTES_AGAIN);
    return () => clearInterval(timer);
  }, []);
  return minutes;
}

function Plots({ live, session }) {
  const minutes = useMinutes(session);
  // New arrays from time to time, so that the plots draw again.
  const [at, tick] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => !document.hidden && tick((n) => n + 1), 2000);
    return () => clearInterval(timer);
  }, []);
  const columns = useMemo(() => {
    const before = beforePage(minutes, history[0][0] ?? coordinatorNow(), HOURS * 60);
    const [times, tokens, jobs, running, queued] = before.map((each, n) => [...each, ...history[n]]);
    return [[times, tokens], [times, jobs], [times, running, queued]];
  }, [at, minutes]);
  const now = live.rate || { tokens_per_second: 0, jobs_per_second: 0 };
  return html`<div class="grid plots">
    <section class="card"><h2>Tokens per second</h2><${Plot} data=${columns[0]} series=${TOKENS} label=${`Tokens per second in the last ${HOURS} hours; now ${rate(now.tokens_per_second)}`} /></section>
    <section class="card"><h2>Jobs per second</h2><${Plot} data=${columns[1]} series=${JOBS} label=${`Jobs done per second in the last ${HOURS} hours; now ${rate(now.jobs_per_second)}`} /></section>
    <section class="card"><h2>Jobs running and queued</h2><${Plot} data=${columns[2]} series=${LOAD} height=${136} label=${`Jobs running and queued in the last ${HOURS} hours; now ${live.status.jobs.running} and ${live.status.jobs.queued}`} /></section>
  </div>`;
}

function Latest({ facts }) {
  return html`<section class="card latest"><h2>Latest events</h2>
    ${facts.length ? html`<ol>${facts.slice(0, 12).map((each) => html`<li key=${each.number}><time title=${exact(each.at)}>${clock(each.at)}</time>
      <span class="clip" title=${each.text}>${each.job ? html`<a href=${`#/jobs/${encodeURIComponent(each.job)}`}>${each.text}</a>` : each.text}</span></li>`)}</ol>`
      : html`<p class="hint">Nothing has happened since you opened the page.</p>`}
    <p><a href="#/events">All events</a></p></section>`;
}

export default function Pool({ live, session }) {
  const [opened, setOpened] = useState(null); // a machine's key
  const { status } = live;
  const machines = useMemo(() => (status ? machinesOf(status) : []), [status]);
  const doings = useDoings(machines, live.activity);
  const open = useRef((machine) => setOpened(machine.key)).current;
  if (!status) return html`<${Head} title="Pool" /><${Loading} what="Waiting for the coordinator" />`;
  const machine = machines.find((each) => each.key === opened);
  const Shown = machines.length > TILES_MAX ? Cells : Tiles;
  return html`
    <${Head} title="Pool">${session.scope === "admin" && html`<a class="button" href="#/nodes?join"><${Icon} name="plus" size=${16} />Add a machine</a>`}<//>
    <div class="stack">
      <${Attention} status=${status} machines=${machines} admin=${session.scope === "admin"} />
      ${machines.length ? html`
        <${Numbers} live=${live} machines=${machines} />
        <${Shown} live=${live} machines=${machines} doings=${doings} open=${open} />`
        : html`<div class="empty first"><${Mark} size=${64} /><p class="empty-title">Your pool is ready for its first machine</p>
            ${session.scope === "admin" ? html`<p>Run this on any machine of your network: it offers the models that it has.</p><${JoinPanel} key=${String(live.connected)} bare />`
              : html`<p>An operator can add one with <code>shoal join-line</code>.</p>`}</div>`}
      <${Plots} live=${live} session=${session} />
      <${Latest} facts=${live.facts} />
    </div>
    ${machine && html`<${MachineDialog} machine=${machine} live=${live} session=${session} onClose=${() => setOpened(null)} />`}`;
}
