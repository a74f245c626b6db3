// Training runs: their loss, their pace, and their ranks.

import { html, useMemo, useState } from "../vendor/preact.js";
import { duration, integer, plural, shortId } from "../parts/format.js";
import { Plot } from "../parts/plot.js";
import { readsAll, submits } from "../parts/scopes.js";
import { Table } from "../parts/table.js";
import { Badge, Confirm, Empty, ErrorNote, Head, Icon, Loading, State, Time, toast, useNow, usePolled } from "../parts/ui.js";

const LOSS = [{ label: "Loss", colour: "--accent", value: (value) => value.toPrecision(5) }];
const SECONDS = [{ label: "Seconds", colour: "--busy", fill: true, value: (value) => `${value.toPrecision(3)} s` }];

const lossOf = (loss) => (loss == null ? "–" : loss.toPrecision(5));

const ended = (run) => run.ended_at != null;

export default function Runs({ api, session, route }) {
  const [id] = route.path;
  return id ? html`<${Run} key=${id} api=${api} id=${id} session=${session} />` : html`<${List} api=${api} session=${session} />`;
}

function List({ api, session }) {
  const [found, error, reload] = usePolled(() => api.get("/admin/runs"), [], () => true);
  const head = html`<${Head} title="Runs" hint="Training on several machines" />`;
  if (error && !found) return html`${head}<${ErrorNote} error=${error} retry=${reload} />`;
  if (!found) return html`${head}<${Loading} />`;
  const all = readsAll(session);
  const columns = [
    { key: "id", title: "Run", cell: (run) => html`<span class="mono long-id">${run.id}</span>` },
    { key: "state", title: "State", cell: (run) => html`<${State} state=${run.state} />`, sort: (run) => run.state },
    ...(all ? [{ key: "owner", title: "Key", cell: (run) => run.owner, sort: (run) => run.owner, hide: "phone" }] : []),
    { key: "size", title: "Ranks", align: "end", cell: (run) => integer(run.size), sort: (run) => run.size, hide: "phone" },
    { key: "step", title: "Step", align: "end", cell: (run) => integer(run.step), sort: (run) => run.step },
    { key: "loss", title: "Loss", align: "end", cell: (run) => lossOf(run.loss), sort: (run) => run.loss },
    { key: "started", title: "Started", cell: (run) => html`<${Time} at=${run.started_at} />`, sort: (run) => run.started_at, hide: "phone" },
    { key: "took", title: "Took", align: "end", hide: "narrow",
      cell: (run) => (ended(run) && run.started_at != null ? duration(run.ended_at - run.started_at) : "–") },
  ];
  return html`${head}<${Table} caption="Training runs, newest first" columns=${columns} rows=${found.data} id=${(run) => run.id}
    open=${(run) => { location.hash = `#/runs/${encodeURIComponent(run.id)}`; }} label=${(run) => `Run ${run.id}`}
    empty=${html`<${Empty} title="No training runs">
      <p><code>shoal train --nodes 3 train.py</code> runs a script on three machines, as <code>torchrun</code> does. Its loss,
        its pace and its ranks are then here, also while it goes on without a machine that was lost.</p><//>`} />`;
}

function Run({ api, id, session }) {
  const [run, error, reload] = usePolled(() => api.get(`/admin/runs/${encodeURIComponent(id)}`), [id], (found) => !ended(found));
  const [asking, setAsking] = useState(false);
  const now = useNow();
  const points = run?.points ?? [];
  const last = points.at(-1)?.step;
  // New columns only when there is something new: the plots are drawn again then.
  const loss = useMemo(() => [points.map(({ step }) => step), points.map((each) => each.loss)], [points.length, last]);
  const pace = useMemo(() => [points.map(({ step }) => step), points.map(({ seconds }) => seconds)], [points.length, last]);
  if (error && !run) {
    return html`<${Head} title="Run"><a class="button" href="#/runs"><${Icon} name="back" size=${16} />All runs</a><//><${ErrorNote} error=${error} retry=${reload} />`;
  }
  if (!run) return html`<${Head} title="Run" /><${Loading} />`;
  const took = run.started_at == null ? null : (run.ended_at ?? Math.max(now, run.started_at)) - run.started_at;
  const losses = points.map((each) => each.loss).filter((each) => each != null);
  const seconds = points.slice(-50).map((each) => each.seconds).filter((each) => each != null);
  const tile = (title, value, note) => html`<div class="card sum"><b>${value}</b><span>${title}</span>${note && html`<small class="faint">${note}</small>`}</div>`;
  const may = submits(session);
  return html`<div class="stack">
    <${Head} title=${`Run ${shortId(run.id, 16)}`}>
      <a class="button" href="#/runs"><${Icon} name="back" size=${16} />All runs</a>
      ${may && !ended(run) && html`<button type="button" class="danger" onClick=${() => setAsking(true)}>Cancel</button>`}
    <//>
    <div class="sums">
      <div class="card sum"><b><${State} state=${run.state} /></b><span>${plural(run.size, "rank")} · ${run.owner}</span></div>
      ${tile("steps", integer(run.step))}
      ${tile("loss", lossOf(run.loss), losses.length > 1 && `from ${lossOf(losses[0])}`)}
      ${tile("seconds per step", seconds.length ? duration(seconds.reduce((a, b) => a + b) / seconds.length) : "–")}
      ${tile(ended(run) ? "in all" : "so far", duration(took), run.started_at != null && html`began <${Time} at=${run.started_at} />`)}
    </div>
    ${points.length > 1 ? html`<div class="grid two">
      <section class="card" aria-label="Loss"><h2>Loss by step</h2>
        <${Plot} data=${loss} series=${LOSS} steps height=${240}
          label=${`Loss over ${plural(points.length, "point")}, from ${lossOf(losses[0])} to ${lossOf(losses.at(-1))}`} /></section>
      <section class="card" aria-label="Time of a step"><h2>Seconds per step</h2>
        <${Plot} data=${pace} series=${SECONDS} steps height=${240} min=${0}
          label=${`Seconds per step, ${seconds.length ? `lately ${duration(seconds.at(-1))}` : "unknown"}`} /></section>
    </div>` : html`<p class="dim">${ended(run) ? "It reported no steps."
      : run.state === "queued" ? html`It waits until enough machines are free: <a href=${`#/jobs/${encodeURIComponent(run.id)}`}>what it waits for</a>.`
      : "The plots begin with the second step."}</p>`}
    <${Ranks} ranks=${run.ranks} />
    ${asking && html`<${Confirm} title="Cancel this run?" action="Cancel the run" danger onClose=${() => setAsking(false)}
      onYes=${async () => { await api.delete(`/admin/jobs/${encodeURIComponent(run.id)}`); toast("Cancelled"); await reload(); }}>
      <p>All ranks end. Its checkpoints stay on the machines, so that a later run can continue.</p><//>`}
  </div>`;
}

/** Whether all ranks have the same parameters: their hashes say so. */
export function agreementOf(ranks) {
  const hashes = ranks.filter(({ hash }) => hash);
  if (hashes.length < 2) return null;
  const same = hashes.every(({ hash }) => hash === hashes[0].hash);
  const sameStep = hashes.every(({ step }) => step === hashes[0].step);
  return same ? "equal" : sameStep ? "different" : "unknown"; // ranks of other steps do not compare
}

function Ranks({ ranks }) {
  const agreement = agreementOf(ranks);
  const slowest = Math.max(...ranks.map((rank) => rank.step_seconds ?? 0));
  const equal = new Map();
  for (const { hash } of ranks) if (hash) equal.set(hash, (equal.get(hash) ?? 0) + 1);
  return html`<section class="stack" aria-label="Ranks">
    <div class="view-head ranks-head"><h2>Ranks</h2>
      ${agreement === "equal" && html`<${Badge} tone="ok" title="All ranks that reported a hash have the same parameters">all hashes are equal<//>`}
      ${agreement === "different" && html`<${Badge} tone="bad" title="At the same step, ranks have different parameters">hashes differ<//>`}
    </div>
    <${Table} caption="Ranks" rows=${ranks} id=${(rank) => rank.rank} columns=${[
      { key: "rank", title: "Rank", cell: (rank) => rank.rank, sort: (rank) => rank.rank },
      { key: "worker", title: "Worker", cell: (rank) => rank.worker ?? "–", sort: (rank) => rank.worker },
      { key: "state", title: "State", cell: (rank) => html`<${State} state=${rank.state} />`, sort: (rank) => rank.state },
      { key: "step", title: "Step", align: "end", cell: (rank) => integer(rank.step), sort: (rank) => rank.step },
      { key: "seconds", title: "Per step", align: "end", sort: (rank) => rank.step_seconds,
        cell: (rank) => (rank.step_seconds == null ? "–" : html`<span class="pace"><span class="pace-bar" style=${{ width: `${(60 * rank.step_seconds) / (slowest || 1)}px` }}></span>${duration(rank.step_seconds)}</span>`) },
      ...(equal.size ? [{ key: "hash", title: "Hash of the parameters", hide: "phone",
        cell: (rank) => (rank.hash ? html`<code title=${rank.hash} class=${ranks.length > 1 && equal.get(rank.hash) > 1 ? "equal" : undefined}>${rank.hash.slice(0, 16)}</code>` : "–") }] : []),
    ]} empty=${html`<p class="dim">No rank has started yet.</p>`} />
  </section>`;
}
