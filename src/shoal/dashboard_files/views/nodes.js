// The machines as a table, with what may be ordered about them, and how others join.

import { html, useMemo, useState } from "../vendor/preact.js";
import { celsius, NONE, percent, plural, rate } from "../parts/format.js";
import { JoinDialog, JoinPanel } from "../parts/join.js";
import { MachineDialog, Orders, ordersFor } from "../parts/machine.js";
import { activityOf, hardwareOf, machinesOf, offeredBy, protectionOf } from "../parts/machines.js";
import { routeOf } from "../parts/route.js";
import { Table } from "../parts/table.js";
import { Empty, Head, Icon, Loading, Meter, State, Time } from "../parts/ui.js";

const HOT = new Set(["serious", "critical"]);
const isHot = (machine) => machine.workers.some((each) => HOT.has(each.thermal));

function matches(machine, text, state) {
  if (state === "hot" ? !isHot(machine) : state && !machine.states.includes(state)) return false;
  if (!text) return true;
  const words = [machine.name, ...machine.names, ...machine.models, ...machine.functions, hardwareOf(machine), ...machine.states];
  return words.join("\n").toLowerCase().includes(text.toLowerCase());
}

const COLUMNS = (live) => [
  { key: "name", title: "Machine", cell: (each) => each.name, sort: (each) => each.name.toLowerCase() },
  { key: "state", title: "State", sort: (each) => each.states.join(), cell: (each) => html`<span class="badges">
    ${each.states.map((state) => html`<${State} state=${state} title=${each.remarks.join("; ")} />`)}</span>` },
  { key: "busy", title: "Slots", sort: (each) => (each.slots ? each.running / each.slots : null), cell: (each) => (each.slots
    ? html`<span class="nowrap"><${Meter} value=${each.running / each.slots} tone="" label=${`${each.running} of ${each.slots} slots busy`} /> ${each.running}/${each.slots}</span>` : NONE) },
  { key: "rate", title: "Tokens/s", align: "end", hide: "phone", sort: (each) => activityOf(each, live.activity).tokens,
    cell: (each) => rate(activityOf(each, live.activity).tokens) },
  { key: "models", title: "Offers", hide: "phone", fill: true, sort: (each) => each.models.length,
    cell: (each) => html`<span title=${offeredBy(each).join(", ")}>${offeredBy(each).join(", ") || NONE}</span>` },
  { key: "cpu", title: "CPU", align: "end", hide: "narrow", sort: (each) => each.cpu, cell: (each) => percent(each.cpu) },
  { key: "memory", title: "Memory", align: "end", hide: "medium", sort: (each) => each.memory, cell: (each) => percent(each.memory) },
  { key: "temperature", title: "Temp", align: "end", hide: "narrow", sort: (each) => each.temperature,
    cell: (each) => html`<span class=${isHot(each) ? "warm" : undefined}>${celsius(each.temperature)}</span>` },
  { key: "wires", title: "Wires", hide: "medium", sort: (each) => each.wires.join(),
    cell: (each) => each.wires.map((wire) => html`<span class="wire" title=${protectionOf(each, wire)}>${wire}</span> `) },
  { key: "since", title: "Since", align: "end", hide: "phone", sort: (each) => each.since, cell: (each) => html`<${Time} at=${each.since} />` },
];

/** What waits for a decision, above all others. */
function Waiting({ machines }) {
  const waiting = machines.filter((each) => ordersFor(each).includes("approve"));
  if (!waiting.length) return null;
  return html`<section class="card waiting" aria-labelledby="waiting"><h2 id="waiting">${plural(waiting.length, "machine")} ${waiting.length === 1 ? "waits" : "wait"} for approval</h2>
    <ul>${waiting.map((each) => html`<li key=${each.key}><p><b>${each.name}</b> <span class="dim">${[hardwareOf(each), each.names.join(", ")].filter(Boolean).join(" · ")}</span></p>
      <${Orders} machine=${each} /></li>`)}</ul></section>`;
}

export default function Nodes({ live, session, route }) {
  const [text, setText] = useState("");
  const state = route.query.get("state") || "";
  const joining = route.query.has("join");
  const { status } = live;
  const admin = session.scope === "admin";
  const machines = useMemo(() => (status ? machinesOf(status) : []), [status]);
  const columns = useMemo(() => COLUMNS(live), [live.activity]);
  if (!status) return html`<${Head} title="Nodes" /><${Loading} what="Waiting for the coordinator" />`;
  const hot = machines.some(isHot) ? ["hot"] : [];
  const states = [...new Set([...machines.flatMap((each) => each.states).sort(), ...hot, ...(state ? [state] : [])])];
  const listed = machines.filter((each) => matches(each, text, state));
  const opened = route.path[0] && machines.find((each) => each.key === route.path[0] || each.names.includes(route.path[0]));
  const go = (machine, wanted, join) => {
    const query = [wanted && new URLSearchParams({ state: wanted }), join && "join"].filter(Boolean).join("&");
    location.hash = `#/nodes${machine && `/${encodeURIComponent(machine)}`}${query && `?${query}`}`;
  };
  const open = (machine) => go(machine.key, state);
  // A dialog says that it is closed a moment later, when another view may have been asked for.
  const close = () => { if (routeOf(location.hash).id === route.id) go("", state); };
  const all = admin ? [...columns, { key: "orders", title: html`<span class="unseen">Actions</span>`, align: "end", hide: "phone",
    cell: (each) => html`<button type="button" class="quiet square" aria-label=${`Actions for ${each.name}`} title="Pause, drain, remove …" onClick=${() => open(each)}><${Icon} name="more" /></button>` }] : columns;
  return html`
    <${Head} title="Nodes" hint=${`${plural(listed.length, "machine")}${listed.length < machines.length ? ` of ${machines.length}` : ""}`}>
      <input type="search" data-search placeholder="Name, model or hardware" aria-label="Filter machines" value=${text} onInput=${(event) => setText(event.target.value)} />
      <select aria-label="State" value=${state} onChange=${(event) => go("", event.target.value)}>
        <option value="">all states</option>${states.map((each) => html`<option value=${each}>${each}</option>`)}</select>
      ${admin && html`<button type="button" class="primary" onClick=${() => go("", state, true)}><${Icon} name="plus" size=${16} />Add a machine</button>`}
    <//>
    <div class="stack">
      ${route.path[0] && !opened && html`<div class="note"><${Icon} name="events" /><p><code>${route.path[0]}</code> is not in the pool now.
        <a href=${`#/events?worker=${encodeURIComponent(route.path[0])}`}>Its events</a></p></div>`}
      ${admin && html`<${Waiting} machines=${machines} />`}
      <${Table} caption="Machines of the pool" columns=${all} rows=${listed} id=${(each) => each.key} label=${(each) => each.name}
        open=${open}
        empty=${machines.length ? html`<${Empty} title="No machine matches"><button type="button" onClick=${() => { setText(""); go("", ""); }}>Show all</button><//>`
          : html`<${Empty} title="No machine has joined yet"><p>Run this on any machine of your network:</p>${admin ? html`<${JoinPanel} bare />` : ""}<//>`} />
      ${status.relays.filter((each) => each.open || each.strangers).map((relay) => html`<div class=${`note ${relay.open ? "warn" : ""}`}><${Icon} name=${relay.open ? "warn" : "nodes"} />
        <p>Relay (${relay.wire}), ${relay.open ? "for any node" : "closed"}: ${relay.guests} nodes${relay.strangers ? `, ${relay.strangers} not registered` : ""}.</p></div>`)}
    </div>
    ${opened && html`<${MachineDialog} key=${opened.key} machine=${opened} live=${live} session=${session} onClose=${close} />`}
    ${joining && admin && html`<${JoinDialog} onClose=${close} />`}`;
}
