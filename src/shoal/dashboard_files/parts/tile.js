// A machine in the picture of the pool.

import { html } from "../vendor/preact.js";
import { celsius, rate, shortId } from "./format.js";
import { hardwareOf, NOT_ADMITTED, offeredBy, protectionOf, toneOf } from "./machines.js";
import { Sparkline } from "./plot.js";
import { Icon, memo, Meter, State } from "./ui.js";

const PIPS_MAX = 16;
const MODELS_MAX = 3;
const WARM = 75; // °C

/** The slots of a machine: one mark each, or a bar for many. */
function Slots({ running, slots }) {
  const label = `${running} of ${slots} slots busy`;
  if (slots > PIPS_MAX) return html`<${Meter} value=${running / slots} label=${label} tone="" />`;
  return html`<span class="pips" role="img" aria-label=${label} title=${label}>
    ${Array.from({ length: slots }, (_, n) => html`<i class=${n < running ? "on" : undefined}></i>`)}</span>`;
}

/** What a machine is doing, in a line. */
function doing(machine, jobs) {
  if (jobs.length) return jobs;
  if (machine.states.includes("pending")) return "waits for approval";
  if (machine.states.includes(NOT_ADMITTED)) return machine.remarks[0] || "not admitted";
  if (machine.away) return "not connected";
  if (!machine.workers.length) return "offers nothing";
  return machine.states.includes("active") ? "idle" : machine.remarks[0] || machine.states[0];
}

function TileView({ machine, activity, trail, open }) {
  const tone = toneOf(machine);
  const jobs = activity?.jobs || [];
  const what = doing(machine, jobs);
  const offered = offeredBy(machine);
  const states = machine.states.filter((each) => each !== "active");
  return html`<article class=${`tile ${tone}`} data-key=${machine.key}>
    <header><i class="dot" aria-hidden="true"></i>
      <h3><button type="button" class="tile-open" onClick=${() => open(machine)}>${machine.name}</button></h3>
      ${states.map((each) => html`<${State} state=${each} />`)}</header>
    <p class="tile-hardware">${hardwareOf(machine) || machine.ids.join(", ")}</p>
    ${machine.slots > 0 && html`<div class="tile-work">
      <${Slots} running=${machine.running} slots=${machine.slots} />
      <span class="tile-rate"><b>${rate(activity?.tokens || 0)}</b> tok/s</span>
      <${Sparkline} values=${trail || []} />
    </div>`}
    ${offered.length > 0 && html`<p class="chips">${offered.slice(0, MODELS_MAX).map((each) => html`<span class="chip" title=${each}>${each}</span>`)}
      ${offered.length > MODELS_MAX && html`<span class="chip">+${offered.length - MODELS_MAX}</span>`}</p>`}
    <p class="tile-doing">${Array.isArray(what)
      ? html`<span class="nowrap">runs </span>${what.slice(0, 2).map((id, n) => html`${n ? ", " : ""}<a href=${`#/jobs/${encodeURIComponent(id)}`}><code>${shortId(id, 14)}</code></a>`)}${what.length > 2 ? ` +${what.length - 2}` : ""}`
      : what}</p>
    <footer>
      ${machine.cpu != null && html`<span title=${`processor ${Math.round(machine.cpu)} %`}>cpu <${Meter} value=${machine.cpu / 100} label=${`processor ${Math.round(machine.cpu)} %`} /></span>`}
      ${machine.memory != null && html`<span title=${`memory ${Math.round(machine.memory)} %`}>mem <${Meter} value=${machine.memory / 100} label=${`memory ${Math.round(machine.memory)} %`} /></span>`}
      ${machine.temperature != null && html`<span class=${machine.temperature >= WARM ? "warm" : undefined} title="its hottest processor or GPU">${celsius(machine.temperature)}</span>`}
      <span class="grow"></span>
      ${machine.wires.map((wire) => {
        const protection = protectionOf(machine, wire);
        const open_ = protection.includes("plaintext");
        return html`<span class=${`wire ${open_ ? "warm" : ""}`} title=${`connected by ${wire}${protection ? `, ${protection}` : ""}`}>
          ${protection && html`<${Icon} name=${open_ ? "open" : "lock"} size=${12} />`}${protection || wire}</span>`;
      })}
    </footer>
  </article>`;
}

export const Tile = memo(TileView);
