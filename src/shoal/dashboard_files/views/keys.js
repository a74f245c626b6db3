// API keys with their limits and use, join tokens, and the accounts' budgets.

import { html, useState } from "../vendor/preact.js";
import { dollars, integer, plural, short, shortId } from "../parts/format.js";
import { NewToken } from "../parts/join.js";
import { coordinatorNow } from "../parts/live.js";
import { machinesOf } from "../parts/machines.js";
import { Badge, Confirm, CopyField, Dialog, Empty, ErrorNote, Head, Icon, Loading, Meter, Time, toast, useLoaded, useOrderError } from "../parts/ui.js";

const SCOPES = [
  ["use", "submit jobs, and read its own"], ["read", "read models and its own jobs"],
  ["monitor", "read everything, change nothing: for dashboards"], ["admin", "everything"],
];
const EXPIRIES = [["", "never"], ["86400", "in 1 day"], ["604800", "in 1 week"], ["2592000", "in 30 days"], ["31536000", "in 1 year"]];
const LIMITS = [
  ["requests_per_minute", "Requests per minute"], ["tokens_per_minute", "Tokens per minute"],
  ["tokens_per_day", "Tokens per day"], ["budget", "Total tokens"],
];
const MICROS = 1e6;

function NewKey({ api, onMade, onClose }) {
  const [error, setError] = useOrderError();
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    const form = new FormData(event.target);
    const body = { name: form.get("name").trim(), scope: form.get("scope"), priority_max: form.get("priority_max") };
    if (form.get("expires")) body.expires_in = +form.get("expires");
    for (const [limit] of [...LIMITS, ["hosted_after"]]) if (form.get(limit)) body[limit] = +form.get(limit);
    setBusy(true);
    try { onMade(await api.post("/admin/keys", body)); } catch (failure) { setError(failure); setBusy(false); }
  };
  return html`<${Dialog} title="New API key" onClose=${onClose}><form class="stack" onSubmit=${submit}>
    <div class="field"><label for="key-name">Name</label><input id="key-name" name="name" required maxlength="64" pattern="[A-Za-z0-9][A-Za-z0-9._@\\-]*" autofocus placeholder="marie" aria-describedby="key-name-hint" />
      <p class="hint" id="key-name-hint">Jobs and usage are recorded under it.</p></div>
    <fieldset class="choices"><legend>Scope</legend>${SCOPES.map(([scope, what], n) => html`<label><input type="radio" name="scope" value=${scope} checked=${n === 0} /> <b>${scope}</b> <span class="dim">${what}</span></label>`)}</fieldset>
    <div class="fields">
      <div class="field"><label for="key-expires">Expires</label><select id="key-expires" name="expires">${EXPIRIES.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></div>
      <div class="field"><label for="key-priority">Highest priority</label><select id="key-priority" name="priority_max">${["high", "normal", "low"].map((each) => html`<option value=${each}>${each}</option>`)}</select></div>
      ${LIMITS.map(([limit, title]) => html`<div class="field"><label for=${`key-${limit}`}>${title}</label><input id=${`key-${limit}`} name=${limit} type="number" min="1" placeholder="unlimited" /></div>`)}
      <div class="field"><label for="key-hosted">Hosted providers after (seconds)</label><input id="key-hosted" name="hosted_after" type="number" min="0" max="86400" placeholder="never" aria-describedby="key-hosted-hint" />
        <p class="hint" id="key-hosted-hint">They answer what no machine takes in time; the key pays for it.</p></div>
    </div>
    ${error && html`<${ErrorNote} error=${error} />`}
    <footer><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Create the key</button></footer>
  </form><//>`;
}

function Limit({ used, limit, what }) {
  if (limit == null) return html`<span title=${`${integer(used)} ${what}, unlimited`}>${short(used)}</span>`;
  return html`<span class="nowrap" title=${`${integer(used)} of ${integer(limit)} ${what}`}><${Meter} value=${used / limit} label=${`${integer(used)} of ${integer(limit)} ${what}`} /> ${short(used)} / ${short(limit)}</span>`;
}

const stateOf = (each, now = coordinatorNow()) => (each.revoked_at != null ? "revoked" : each.expires_at != null && each.expires_at <= now ? "expired" : "");

function Keys({ api, session, keys, reload }) {
  const [made, setMade] = useState(null);
  const [making, setMaking] = useState(false);
  const [revoking, setRevoking] = useState(null);
  return html`<section aria-labelledby="keys-head" class="section">
    <header class="view-head"><h2 id="keys-head">API keys</h2><button type="button" class="primary" onClick=${() => setMaking(true)}><${Icon} name="plus" size=${16} />New key</button></header>
    ${made && html`<div class="card made" role="status"><h2>The key ${made.name} is shown only once</h2><p>Copy it to where it is used. The coordinator stores only its digest.</p><${CopyField} text=${made.key} />
      ${made.pinned_key && html`<p>For Shoal’s own programs, with the coordinator’s fingerprint:</p><${CopyField} text=${made.pinned_key} />`}
      <p><button type="button" onClick=${() => setMade(null)}>Done</button></p></div>`}
    <div class="table-box scroll"><table class="plain"><thead><tr><th scope="col">Name</th><th scope="col">Scope</th><th scope="col" class="hide-phone">Tokens today</th><th scope="col" class="hide-phone">Total tokens</th>
      <th scope="col" class="end hide-narrow">Requests</th><th scope="col" class="hide-narrow">Per minute</th><th scope="col" class="end hide-phone">Expires</th><th scope="col" class="end"><span class="unseen">Actions</span></th></tr></thead>
    <tbody>${keys.map((each) => {
      const state = stateOf(each);
      const perMinute = [each.requests_per_minute && `${short(each.requests_per_minute)} requests`, each.tokens_per_minute && `${short(each.tokens_per_minute)} tokens`].filter(Boolean).join(", ");
      return html`<tr key=${each.id} class=${state ? "ended" : undefined}><td><b>${each.name}</b> ${each.start && html`<code class="faint hide-phone">${each.start}…</code>`}</td>
        <td>${each.scope} ${each.hosted_after != null && html`<${Badge} title=${`Hosted providers may answer after ${each.hosted_after} s`}>hosted<//>`} ${state && html`<${Badge} tone="bad">${state}<//>`}</td>
        <td class="hide-phone"><${Limit} used=${each.tokens_today} limit=${each.tokens_per_day} what="tokens today" /></td>
        <td class="hide-phone"><${Limit} used=${each.prompt_tokens + each.completion_tokens} limit=${each.budget} what="total tokens" /></td>
        <td class="end hide-narrow">${integer(each.requests)}</td><td class="hide-narrow">${perMinute || html`<span class="faint">unlimited</span>`}</td>
        <td class="end hide-phone">${each.expires_at == null ? html`<span class="faint">never</span>` : html`<${Time} at=${each.expires_at} />`}</td>
        <td class="end">${!state && each.id !== each.name && html`<button type="button" class="small" aria-label=${`Revoke ${each.name}`} onClick=${() => setRevoking(each)}>Revoke</button>`}</td></tr>`;
    })}</tbody></table></div>
    ${making && html`<${NewKey} api=${api} onClose=${() => setMaking(false)} onMade=${(key) => { setMaking(false); setMade(key); reload(); }} />`}
    ${revoking && html`<${Confirm} title=${`Revoke ${revoking.name}?`} action="Revoke" danger onClose=${() => setRevoking(null)}
      onYes=${async () => { await api.delete(`/admin/keys/${encodeURIComponent(revoking.name)}`); toast(`${revoking.name} is revoked`); reload(); }}>
      <p>Its clients get an error from now on; this cannot be undone. ${revoking.name === session.name ? "You are signed in with it: you will be signed out." : ""}</p><//>`}
  </section>`;
}

function Tokens({ api }) {
  const [tokens, error, reload] = useLoaded(() => api.get("/admin/tokens"), []);
  const [making, setMaking] = useState(false);
  const [made, setMade] = useState(null);
  const [revoking, setRevoking] = useState(null);
  return html`<section aria-labelledby="tokens-head" class="section">
    <header class="view-head"><div><h2 id="tokens-head">Join tokens</h2><p class="hint">For machines that join for a limited time, or with certain models only</p></div>
      <button type="button" onClick=${() => setMaking(true)}><${Icon} name="plus" size=${16} />New token</button></header>
    ${error && html`<${ErrorNote} error=${error} retry=${reload} />`}
    ${made && html`<div class="card made" role="status"><h2>The token ${made.name} is shown only once</h2><${CopyField} text=${made.join || made.token} /><p><button type="button" onClick=${() => setMade(null)}>Done</button></p></div>`}
    ${tokens && (tokens.data.length ? html`<div class="table-box scroll"><table class="plain"><thead><tr><th scope="col">Name</th><th scope="col">Machines</th><th scope="col" class="hide-phone">Models</th><th scope="col" class="end hide-phone">Expires</th><th scope="col" class="end"><span class="unseen">Actions</span></th></tr></thead>
      <tbody>${tokens.data.map((each) => {
        const state = stateOf(each);
        return html`<tr key=${each.id} class=${state ? "ended" : undefined}><td><b>${each.name}</b> ${state && html`<${Badge} tone="bad">${state}<//>`}</td>
          <td>${plural(each.present, "connection")}${each.uses == null ? "" : `, ${each.workers.length} of ${each.uses} used`}</td><td class="hide-phone">${each.models.join(", ") || html`<span class="faint">any</span>`}</td>
          <td class="end hide-phone">${each.expires_at == null ? html`<span class="faint">never</span>` : html`<${Time} at=${each.expires_at} />`}</td>
          <td class="end">${!state && html`<button type="button" class="small" aria-label=${`Revoke ${each.name}`} onClick=${() => setRevoking(each)}>Revoke</button>`}</td></tr>`;
      })}</tbody></table></div>` : html`<p class="hint">None: machines join with the coordinator’s own token (<a href="#/nodes?join">Add a machine</a>).</p>`)}
    ${making && html`<${Dialog} title="New join token" onClose=${() => setMaking(false)}><${NewToken} onMade=${(token) => { setMaking(false); setMade(token); reload(); }} /><//>`}
    ${revoking && html`<${Confirm} title=${`Revoke ${revoking.name}?`} action="Revoke" danger onClose=${() => setRevoking(null)}
      onYes=${async () => { await api.delete(`/admin/tokens/${encodeURIComponent(revoking.name)}`); toast(`${revoking.name} is revoked`); reload(); }}>
      <p>Machines that joined with it are disconnected, and cannot come back with it.</p><//>`}
  </section>`;
}

const POOL_ACCOUNTS = { "pool:fees": "the pool’s fees", "pool:held": "held for open jobs" };

/** What an account without a key is called; a worker's has the name of its key. */
function accountTitle({ name, peer }, status) {
  const key = name.replace(/^worker:/, "");
  const known = status && machinesOf(status).find((each) => each.workers.some((worker) => worker.proven && worker.public_key === key));
  return POOL_ACCOUNTS[name] || peer || known?.name || (key === name ? name : `worker ${shortId(key)}`);
}

function Accounts({ api, live }) {
  const [accounts, error, reload] = useLoaded(() => api.get("/admin/accounts"), []);
  const [editing, setEditing] = useState(null);
  const users = (accounts?.data || []).filter((each) => each.name.startsWith("user:"));
  const machines = (accounts?.data || []).filter((each) => !each.name.startsWith("user:") && each.name !== "external");
  return html`<section aria-labelledby="accounts-head" class="section">
    <header class="view-head"><div><h2 id="accounts-head">Accounts and budgets</h2><p class="hint">What keys owe and machines have earned, where jobs have a price</p></div></header>
    ${error && html`<${ErrorNote} error=${error} retry=${reload} />`}
    ${accounts && !users.length && !machines.length && html`<p class="hint">No payments yet: jobs are free unless <code>shoal serve</code> sets prices.</p>`}
    <div class="grid two">
      ${users.length > 0 && html`<div class="table-box scroll"><table class="plain"><thead><tr><th scope="col">Key</th><th scope="col" class="end">Balance</th><th scope="col" class="end">May go below zero</th><th scope="col" class="end"><span class="unseen">Actions</span></th></tr></thead>
        <tbody>${users.map((each) => html`<tr key=${each.name}><td><b>${each.name.slice(5)}</b></td><td class="end">${dollars(each.standing)}</td>
          <td class="end">${each.budget == null ? html`<span class="faint">without limit</span>` : dollars(each.budget)}</td>
          <td class="end"><button type="button" class="small" aria-label=${`Budget of ${each.name.slice(5)}`} onClick=${() => setEditing(each)}>Budget …</button></td></tr>`)}</tbody></table></div>`}
      ${machines.length > 0 && html`<div class="table-box scroll"><table class="plain"><thead><tr><th scope="col">Machine or account</th><th scope="col" class="end">Balance</th></tr></thead>
        <tbody>${machines.map((each) => html`<tr key=${each.name}><td title=${each.name}>${accountTitle(each, live.status)}</td><td class="end">${dollars(each.balance)}</td></tr>`)}</tbody></table></div>`}
    </div>
    ${editing && html`<${Budget} api=${api} account=${editing} onClose=${() => setEditing(null)} onDone=${() => { setEditing(null); reload(); }} />`}
  </section>`;
}

function Budget({ api, account, onClose, onDone }) {
  const name = account.name.slice(5);
  const path = `/admin/accounts/${encodeURIComponent(account.name)}`;
  const [error, setError] = useOrderError();
  const [busy, setBusy] = useState(false);
  const [limited, setLimited] = useState(account.budget != null);
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    setBusy(true); // a second press would credit it twice
    const form = new FormData(event.target);
    const credit = Math.round(+form.get("credit") * MICROS);
    try {
      await api.put(`${path}/budget`, { budget: limited ? Math.round(+form.get("budget") * MICROS) : null });
      if (credit > 0) await api.post(`${path}/credit`, { amount: credit });
      toast(`The account of ${name} is changed`);
      onDone();
    } catch (failure) { setError(failure); setBusy(false); }
  };
  return html`<${Dialog} title=${`Account of ${name}`} onClose=${onClose}><form class="stack" onSubmit=${submit}>
    <p>Its balance is <b>${dollars(account.standing)}</b>.</p>
    <label class="check"><input type="checkbox" checked=${limited} onChange=${(event) => setLimited(event.target.checked)} /> Limit how far it may go below zero</label>
    ${limited && html`<div class="field"><label for="budget">Budget, in dollars</label><input id="budget" name="budget" type="number" min="0" step="any" required value=${(account.budget ?? 0) / MICROS} /></div>`}
    <div class="field"><label for="credit">Credit now, in dollars</label><input id="credit" name="credit" type="number" min="0" step="any" placeholder="nothing" /></div>
    ${error && html`<${ErrorNote} error=${error} />`}
    <footer><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Save</button></footer>
  </form><//>`;
}

export default function KeysView({ api, live, session }) {
  const [keys, error, reload] = useLoaded(() => api.get("/admin/keys"), []);
  const [ended, setEnded] = useState(false);
  const shown = (keys?.data || []).filter((each) => ended || !stateOf(each));
  const hidden = (keys?.data.length || 0) - shown.length;
  return html`<${Head} title="Keys and budgets">
      ${(hidden > 0 || ended) && html`<button type="button" aria-pressed=${ended} onClick=${() => setEnded(!ended)}>${ended ? "Hide ended keys" : `Show ${plural(hidden, "ended key")}`}</button>`}<//>
    ${error && html`<${ErrorNote} error=${error} retry=${reload} />`}
    ${!keys && !error && html`<${Loading} />`}
    ${keys && (shown.length ? html`<${Keys} api=${api} session=${session} keys=${shown} reload=${reload} />` : html`<${Empty} title="There is no key" />`)}
    ${keys && html`<${Tokens} api=${api} /><${Accounts} api=${api} live=${live} />`}`;
}
