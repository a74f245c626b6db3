// Ctrl+K: goes to a view, a machine, a model or a job by its name.

import { html, useRef, useState } from "../vendor/preact.js";
import { Icon } from "./icons.js";
import { machinesOf } from "./machines.js";
import { Dialog, Loading } from "./ui.js";

const SHOWN_MAX = 12;

function found(text, views, status) {
  const wanted = text.trim().toLowerCase();
  const items = views.map((each) => ({ icon: each.id, text: each.title, kind: "view", href: `#/${each.id}` }));
  if (status && views.some((each) => each.id === "nodes")) {
    for (const each of machinesOf(status)) {
      items.push({ icon: "nodes", text: each.name, kind: "machine", href: `#/nodes/${encodeURIComponent(each.key)}`, more: each.names.join(" ") });
    }
  }
  for (const each of status?.models || []) {
    items.push({ icon: "models", text: each, kind: "model", href: `#/models?q=${encodeURIComponent(each)}` });
  }
  const hits = items
    .map((each) => ({ ...each, place: `${each.text} ${each.more || ""}`.toLowerCase().indexOf(wanted) }))
    .filter((each) => each.place >= 0)
    .sort((a, b) => (wanted ? a.place - b.place : 0))
    .slice(0, SHOWN_MAX);
  if (/^[0-9a-z-]{8,}$/i.test(wanted)) {
    hits.push({ icon: "jobs", text: wanted, kind: "job", href: `#/jobs/${encodeURIComponent(text.trim())}` });
  }
  return hits;
}

export function Palette({ views, status, onClose }) {
  const [text, setText] = useState("");
  const [place, setPlace] = useState(0);
  const list = useRef(null);
  const hits = found(text, views, status);
  const at = Math.min(place, hits.length - 1);
  const go = (hit) => { if (hit) { location.hash = hit.href; onClose(); } };
  const pressed = (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const next = (at + (event.key === "ArrowDown" ? 1 : -1) + hits.length) % (hits.length || 1);
      setPlace(next);
      list.current?.children[next]?.scrollIntoView({ block: "nearest" });
    } else if (event.key === "Enter") {
      event.preventDefault();
      go(hits[at]);
    }
  };
  return html`<${Dialog} title="Go to" className="palette" onClose=${onClose}>
    <input type="search" autofocus placeholder="A view, machine, model or job id" value=${text}
      role="combobox" aria-expanded="true" aria-controls="palette-list" aria-label="Go to"
      aria-activedescendant=${hits.length ? `palette-${at}` : undefined}
      onInput=${(event) => { setText(event.target.value); setPlace(0); }} onKeyDown=${pressed} />
    <ul id="palette-list" role="listbox" aria-label="Found" ref=${list}>
      ${hits.map((hit, n) => html`<li id=${`palette-${n}`} role="option" aria-selected=${n === at}
        onClick=${() => go(hit)} onMouseMove=${() => n !== at && setPlace(n)}>
        <${Icon} name=${hit.icon} size=${16} /><span>${hit.text}</span><small>${hit.kind}</small></li>`)}
    </ul>
    ${!hits.length && (status ? html`<p class="hint">Nothing found. To open a job, enter its whole id.</p>`
      : html`<${Loading} what="Waiting for the coordinator" />`)}
  <//>`;
}
