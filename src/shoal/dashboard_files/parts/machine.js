// One machine: what may be ordered about it, and a dialog with all that is known of it.

import { html, useState } from "../vendor/preact.js";
import { api } from "./api.js";
import { celsius, featureName, integer, NONE, percent, plural, rate } from "./format.js";
import { activityOf, hardwareOf, NOT_ADMITTED, PENDING, protectionOf } from "./machines.js";
import { Confirm, CopyField, Dialog, ErrorNote, Icon, State, Time, toast, useOrderError } from "./ui.js";

const ORDERS = {
  approve: { title: "Approve", icon: "check", done: "approved" },
  resume: { title: "Resume", icon: "play", done: "resumed" },
  pause: { title: "Pause", icon: "pause", done: "paused" },
  drain: { title: "Drain", icon: "drain", done: "draining" },
  remove: { title: "Remove", icon: "remove", done: "removed", danger: true },
};

/** The orders that make sense for a machine as it is. */
export function ordersFor(machine) {
  const { states } = machine;
  if (states.includes(NOT_ADMITTED)) return [];
  if (machine.nodes.length && machine.away) return [];
  const found = [];
  if (states.includes(PENDING)) found.push("approve");
  if (machine.orders.length) found.push("resume");
  if (!machine.away) {
    const pending = states.includes(PENDING);
    if (!machine.orders.length && !pending) found.push("pause");
    if (!pending && !machine.ordered.some((each) => each.state !== "paused")) found.push("drain");
    found.push("remove");
  }
  return found;
}

/** Gives an order about each of a machine's names, as `shoal nodes` does. */
export async function give(machine, order, within) {
  const names = order === "resume" && machine.orders.length ? machine.orders : machine.names;
  const query = within ? `?within=${within}` : "";
  for (const name of names) await api.post(`/admin/workers/${encodeURIComponent(name)}/${order}${query}`);
  // Shoal's workers end when they are removed; a service starts them again.
  const again = order === "resume" && machine.away ? ". If the worker ran in a terminal, start it again there" : "";
  toast(`${machine.name}: ${ORDERS[order].done}${again}`);
}

/** The buttons of a machine's orders; those that disturb running jobs ask first. */
export function Orders({ machine, small }) {
  const [asked, setAsked] = useState(null);
  const [error, setError] = useOrderError(); // beside the buttons: a dialog is above messages at the edge
  const order = async (name) => {
    setError(null);
    if (name === "drain" || name === "remove") { setAsked(name); return; }
    try { await give(machine, name); } catch (failure) { setError(failure); }
  };
  return html`<span class="controls">
    ${/* keyed: what is under the pointer must not become another order */
      ordersFor(machine).map((name) => html`<button key=${name} type="button" class=${small ? "small" : name === "approve" ? "primary" : undefined}
      aria-label=${`${ORDERS[name].title} ${machine.name}`} onClick=${() => order(name)}>
      <${Icon} name=${ORDERS[name].icon} size=${15} />${ORDERS[name].title}</button>`)}
    ${asked === "drain" && html`<${DrainDialog} machine=${machine} onClose=${() => setAsked(null)} />`}
    ${asked === "remove" && html`<${Confirm} title=${`Remove ${machine.name}?`} action="Remove" danger
      onYes=${() => give(machine, "remove")} onClose=${() => setAsked(null)}>
      <p>It is disconnected at once, and cannot join again until someone resumes it.
        ${machine.running ? ` Its ${plural(machine.running, "running job")} start again on other machines.` : ""}</p>
    <//>`}
  </span>${error && html`<${ErrorNote} error=${error} />`}`;
}

function DrainDialog({ machine, onClose }) {
  const [within, setWithin] = useState("");
  return html`<${Confirm} title=${`Drain ${machine.name}?`} action="Drain" onYes=${() => give(machine, "drain", within)} onClose=${onClose}>
    <p>It gets no new jobs, finishes ${machine.running ? `its ${plural(machine.running, "running job")}` : "its running jobs"},
      and stays connected.  When it is drained, it can be switched off; <b>Resume</b> gives it jobs again.</p>
    <div class="field"><label for="drain-within">Give jobs that still run to other machines</label>
      <select id="drain-within" value=${within} onChange=${(event) => setWithin(event.target.value)}>
        <option value="">never: wait until they finish</option>
        <option value="60">after 1 minute</option>
        <option value="600">after 10 minutes</option>
        <option value="3600">after 1 hour</option>
      </select></div>
  <//>`;
}

/** All that is known of a machine. */
export function MachineDialog({ machine, live, session, onClose }) {
  const { jobs, tokens } = activityOf(machine, live.activity);
  const { hardware } = machine;
  const fact = (name, value) => value && value !== NONE && html`<dt>${name}</dt><dd>${value}</dd>`;
  return html`<${Dialog} title=${machine.name} wide onClose=${onClose}>
    <div class="machine-states"><span class="badges">${machine.states.map((each) => html`<${State} state=${each} />`)}</span>
      ${session.scope === "admin" && html`<${Orders} machine=${machine} />`}</div>
    ${machine.states.includes(NOT_ADMITTED)
      ? html`<${ErrorNote} error=${{ message: `Not admitted: ${machine.remarks.join("; ")}` }} />`
      : machine.remarks.map((each) => html`<div class="note warn"><${Icon} name="warn" /><p>${each}</p></div>`)}
    <div class="tiles-of-numbers">
      <p><b>${machine.slots ? `${machine.running} of ${machine.slots}` : NONE}</b>slots busy</p>
      <p><b>${rate(tokens)}</b>tokens/s now</p>
      <p><b>${rate(machine.pace)}</b>tokens/s per answer</p>
      <p><b>${percent(machine.cpu)}</b>processor</p>
      <p><b>${percent(machine.memory)}</b>memory</p>
      <p><b>${celsius(machine.temperature)}</b>hottest part</p>
    </div>
    ${jobs.length > 0 && html`<section><h3>Runs now</h3><ul class="chips">${jobs.map((id) =>
      html`<li class="chip"><a href=${`#/jobs/${encodeURIComponent(id)}`}><code>${id}</code></a></li>`)}</ul></section>`}
    <dl class="facts">
      ${fact("Hardware", hardwareOf(machine))}
      ${fact("Platform", hardware?.platform)}
      ${fact("Names", machine.names.map((each) => html`<code class="block">${each}</code>`))}
      ${fact("Connections", machine.wires.map((wire) => `${wire}${protectionOf(machine, wire) ? ` (${protectionOf(machine, wire)})` : ""}`).join(", "))}
      ${fact("Release", machine.release && `Shoal ${machine.release}`)}
      ${fact("Since", machine.since != null && html`<${Time} at=${machine.since} />`)}
      ${machine.ordered.map((each) => fact("Order", html`${each.name}: ${each.state} by ${each.by || NONE}, <${Time} at=${each.since} />`))}
      ${fact("Large models", machine.shared)}
      ${fact("Functions", machine.functions.join(", "))}
      ${machine.nodes.map((each) => fact("Address", `${each.address}${each.remark ? ` (${each.remark})` : ""}`))}
    </dl>
    ${machine.workers.length > 0 && html`<section class="scroll"><h3>Workers</h3>
      <table class="plain"><thead><tr><th scope="col">Models</th><th scope="col" class="end">Busy</th>
        <th scope="col" class="end">Context</th><th scope="col">Does</th><th scope="col">Price</th></tr></thead>
      <tbody>${machine.workers.map((worker) => html`<tr>
        <td class="wrap">${worker.models.join(", ") || worker.tasks.join(", ") || "any function"}</td>
        <td class="end">${worker.busy}/${worker.slots}</td>
        <td class="end">${worker.context ? integer(worker.context) : NONE}</td>
        <td class="wrap">${[...worker.kinds, ...worker.features.map(featureName)].join(", ")}</td>
        <td>${worker.price || "the pool’s"}</td></tr>`)}</tbody></table></section>`}
    ${machine.states.includes(PENDING) && session.scope === "admin" && html`<section><h3>On the command line</h3>
      <${CopyField} text=${`shoal nodes approve ${machine.argument}`} /></section>`}
    <footer>${machine.names.map((name) => html`<a class="button" href=${`#/events?worker=${encodeURIComponent(name)}`}>
      <${Icon} name="events" size=${15} />Its events${machine.names.length > 1 && html` as <code>${name}</code>`}</a>`)}</footer>
  <//>`;
}
