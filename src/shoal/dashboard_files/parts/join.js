// How a machine joins: the command to copy, and its QR code.

import { html, useState } from "../vendor/preact.js";
import { api } from "./api.js";
import { CopyField, Dialog, ErrorNote, Icon, Loading, useLoaded, useOrderError } from "./ui.js";

/** The command that adds a machine; `bare`: without what surrounds it. */
export function JoinPanel({ bare }) {
  const [invitation, error, reload] = useLoaded(() => api.get("/admin/join"), []);
  if (error) return html`<${ErrorNote} error=${error} retry=${reload} />`;
  if (!invitation) return html`<${Loading} what="Fetching the join command" />`;
  return html`<div class="join">
    ${invitation.qr && html`<figure><img src=${`data:image/svg+xml;utf8,${encodeURIComponent(invitation.qr)}`} width="168" height="168"
      alt="QR code of the join command" /><figcaption class="hint">The same command, to copy it with a phone</figcaption></figure>`}
    <div class="join-text">
      ${!bare && html`<p>Install Shoal there first (from a clone: <code>pipx install '.[llm]'</code>), then run this. The machine must reach the coordinator at
        ${invitation.urls.map((each, n) => html`${n ? " or " : " "}<code>${each}</code>`)}.</p>`}
      <${CopyField} text=${invitation.join} label="Copy" />
      ${invitation.loopback_only && html`<div class="note warn"><${Icon} name="warn" /><p>Only this machine can reach the coordinator:
        it listens on the loopback address. For other machines, start <code>shoal serve --host 0.0.0.0 --tls auto</code>.</p></div>`}
      <p class="hint">${invitation.token ? "The command contains a join token. Anyone with it can add a machine while it is valid." : "No token is needed: anyone who reaches the coordinator can join."}</p>
    </div>
  </div>`;
}

export function JoinDialog({ onClose }) {
  const [made, setMade] = useState(null);
  return html`<${Dialog} title="Add a machine" wide onClose=${onClose}>
    <${JoinPanel} />
    <details><summary>A separate token, limited to some machines or a period of time</summary>
      ${made ? html`<p>The token <b>${made.name}</b> is shown only once:</p><${CopyField} text=${made.join || made.token} />`
        : html`<${NewToken} onMade=${setMade} />`}
    </details>
  <//>`;
}

const DAYS = [["", "never"], ["3600", "in 1 hour"], ["86400", "in 1 day"], ["604800", "in 1 week"], ["2592000", "in 30 days"]];

/** A form that creates a join token. */
export function NewToken({ onMade }) {
  const [error, setError] = useOrderError();
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    const form = new FormData(event.target);
    const body = { name: form.get("name").trim() };
    if (form.get("uses")) body.uses = +form.get("uses");
    if (form.get("expires")) body.expires_in = +form.get("expires");
    const models = form.get("models").split(/[\s,]+/).filter(Boolean);
    if (models.length) body.models = models;
    setBusy(true);
    try { onMade(await api.post("/admin/tokens", body)); } catch (failure) { setError(failure); }
    setBusy(false);
  };
  return html`<form class="stack" onSubmit=${submit}>
    <div class="fields">
      <div class="field"><label for="token-name">Name</label><input id="token-name" name="name" required maxlength="64" placeholder="office" /></div>
      <div class="field"><label for="token-uses">Maximum machines</label><input id="token-uses" name="uses" type="number" min="1" max="10000" placeholder="any number" /></div>
      <div class="field"><label for="token-expires">Expires</label><select id="token-expires" name="expires">
        ${DAYS.map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></div>
      <div class="field"><label for="token-models">Model patterns</label><input id="token-models" name="models" placeholder="any, or qwen* llama*" /></div>
    </div>
    ${error && html`<${ErrorNote} error=${error} />`}
    <button type="submit" class="primary" disabled=${busy}>Create the token</button>
  </form>`;
}
