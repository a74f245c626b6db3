// The page for who is not signed in.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";
import { api } from "./api.js";
import { Icon, Mark } from "./icons.js";
import { CopyField, ErrorNote } from "./ui.js";

export function Login({ reason, onSignedIn }) {
  const [error, setError] = useState(reason);
  const [busy, setBusy] = useState(false);
  const [seen, setSeen] = useState(false);
  const field = useRef(null);
  useEffect(() => { document.title = "Sign in · Shoal"; field.current.focus(); }, []);
  const submit = async (event) => {
    event.preventDefault();
    const key = field.current.value.trim();
    if (!key) { setError({ message: "Paste an API key first." }); return; }
    setBusy(true);
    setError(null);
    try {
      onSignedIn(await api.post("/dashboard/session", { api_key: key }));
    } catch (failure) {
      setBusy(false);
      setError(failure.status === 401
        ? { message: `${failure.message} The first key is in the file \`api-key\` of the data folder; \`shoal keys create NAME\` creates another.` }
        : failure);
      field.current.select();
    }
  };
  return html`<main class="login">
    <div class="login-card">
      <div class="login-brand"><${Mark} size=${56} /><h1>Shoal</h1>
        <p>One pool for AI work, of the computers you already have.</p></div>
      ${error && html`<${ErrorNote} error=${error} />`}
      <section aria-labelledby="by-link">
        <h2 id="by-link">With a link</h2>
        <p>On the coordinator’s machine, this opens the page, signed in:</p>
        <${CopyField} text="shoal dashboard" />
      </section>
      <form onSubmit=${submit} aria-labelledby="by-key">
        <h2 id="by-key">With an API key</h2>
        <label for="api-key">API key</label>
        <div class="field-row">
          <input id="api-key" ref=${field} type=${seen ? "text" : "password"} autocomplete="current-password"
            spellcheck="false" autocapitalize="off" placeholder="sk-…" aria-describedby="key-hint" />
          <button type="button" aria-pressed=${seen} onClick=${() => setSeen(!seen)}>${seen ? "Hide" : "Show"}</button>
        </div>
        <p id="key-hint" class="hint"><code>shoal serve</code> prints the first key. The page keeps a cookie, not the key.</p>
        <button type="submit" class="primary" disabled=${busy}>
          <${Icon} name="keys" size=${16} />${busy ? "Signing in …" : "Sign in"}</button>
      </form>
    </div>
  </main>`;
}
