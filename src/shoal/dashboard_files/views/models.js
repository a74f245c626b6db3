// The models of the pool: where each is, where it could be loaded, and where it would fit.

import { html, useLayoutEffect, useMemo, useState } from "../vendor/preact.js";
import { bytes, featureName, integer, NONE, plural } from "../parts/format.js";
import { machinesOf, peerOf } from "../parts/machines.js";
import { readsAll, submits } from "../parts/scopes.js";
import { CopyField, Dialog, Empty, ErrorNote, Head, Icon, Loading, Meter, toast, useLoaded, useOrderError, usePolled } from "../parts/ui.js";

const SHOWN_MAX = 8; // machines of a card

/** A model's workers as one entry for each machine; `machines`: each peer's machine. */
function places(model, machines) {
  const found = new Map();
  for (const { id, name, busy, slots } of model.workers) {
    const peer = peerOf(id);
    const key = machines.get(peer)?.key || peer;
    const known = found.get(key) || { peer, name: name || peer.slice(peer.indexOf(":") + 1), busy: 0, slots: 0 };
    known.busy += busy;
    known.slots += slots;
    found.set(key, known);
  }
  return [...found.values()];
}

/** What a model needs, in a line. */
const traits = (model) => [
  model.kinds.join(", "),
  model.size ? `${model.estimated ? "≈ " : ""}${bytes(model.size)}` : "",
  model.context ? `context ${integer(model.context)}` : "",
].filter(Boolean).join(" · ");

const nameOf = (place) => place.name || place.node.slice(place.node.indexOf(":") + 1);

/** Those of these machines that do not have a model loaded, nor are about to. */
const without = (model, places) => places.filter((each) => !model.replicas.some(({ node }) => node === each.node));

/** The machines that have a model's file and do not have it loaded, nor are about to. */
const idle = (model) => without(model, model.stored);

/** What a repository's model is called in the pool. */
const shortName = (repository) => repository.trim().replace(/:[\w.-]*$/, "").replace(/.*\//, "").replace(/-gguf$/i, "").toLowerCase();

/** Whether a machine is loading or unloading the model, or is about to. */
const moves = (model) => model.replicas.some((each) => each.state !== "loaded") || (model.deployed && !model.replicas.length);

/** How far a load is, and which machines run a model with this one, in a line. */
function progress({ state, step, bytes: done, size, seconds, parts }) {
  const others = parts.slice(0, -1).map((each) => `${nameOf(each)} (${plural(each.layers, "layer")}, ${bytes(each.bytes)})`);
  const share = done !== null && size ? `${Math.round((100 * done) / size)} %` : "";
  const left = seconds === null ? "" : `about ${Math.ceil(seconds)} s left`;
  return [state, share, step, left, others.length ? `with ${others.join(", ")}` : ""].filter(Boolean).join(" · ");
}

/** What a card says of where a model is loaded, or could be. */
function Where({ model, at, busy, slots }) {
  if (at.length) {
    return html`<p class="model-slots"><${Meter} value=${slots ? busy / slots : 0} tone="" label=${`${busy} of ${slots} slots busy`} /> ${busy} of ${slots} slots busy on ${plural(at.length, "machine")}</p>`;
  }
  const loading = model.replicas.find((each) => each.state === "loading");
  return html`<p class="model-slots">${loading ? `${nameOf(loading)}: ${progress(loading)}` : "Not loaded: the first request has it loaded"}</p>`;
}

function Card({ model, machines, open, playable }) {
  const at = places(model, machines);
  const busy = at.reduce((sum, each) => sum + each.busy, 0);
  const slots = at.reduce((sum, each) => sum + each.slots, 0);
  const fits = model.fits.filter((each) => each.fits).length;
  return html`<article class="card model">
    <header><h2><button type="button" class="tile-open" onClick=${() => open(model)}>${model.id}</button></h2>
      ${playable && model.kinds.includes("chat") && html`<a class="button small" href=${`#/playground?model=${encodeURIComponent(model.id)}`} aria-label=${`Chat with ${model.id}`}>Chat</a>`}</header>
    <p class="dim">${traits(model)}</p>
    ${model.features.length > 0 && html`<p class="chips">${model.features.map((each) => html`<span class="chip" title=${each}>${featureName(each)}</span>`)}</p>`}
    <${Where} model=${model} at=${at} busy=${busy} slots=${slots} />
    <p class="chips">${at.slice(0, SHOWN_MAX).map((each) => html`<span class=${`chip ${each.busy ? "on" : ""}`}>${each.name}</span>`)}
      ${at.length > SHOWN_MAX && html`<span class="chip">+${at.length - SHOWN_MAX}</span>`}
      ${idle(model).slice(0, SHOWN_MAX).map((each) => html`<span class="chip off" title="has the file">${nameOf(each)}</span>`)}</p>
    ${model.fits.length > 0 && html`<p class="hint">${fits ? `Would fit on ${plural(fits, "more machine")}` : "Fits on no other machine"}</p>`}
  </article>`;
}

/**
 * What machines can load, and are loading.  A load is a deployment on one more machine: undone, the model is
 * unloaded once it is idle.
 */
function Loads({ model, copying, api, admin, reload }) {
  const [error, setError] = useState(null);
  const [asked, setAsked] = useState("");
  const path = `/admin/deployments/${encodeURIComponent(model.id)}`;
  const order = async (key, send, said) => {
    setAsked(key);
    setError(null);
    try { await send(); toast(said); } catch (failure) { setError(failure); }
    setAsked("");
    reload();
  };
  const load = (place) => order(place.node, async () => {
    const { data } = await api.get("/admin/deployments");
    const known = data.find((each) => each.name === model.id);
    const loaded = model.replicas.map((each) => each.node);
    const on = [...new Set([...(known ? known.on : []), ...loaded, place.node])];
    const { pinned = false, idle: after = null, context = null, slots = null, exclusive_group = "", schedule = [], hub = null } = known || {};
    await api.put(path, { replicas: on.length, on, pinned, idle: after, context, slots, exclusive_group, schedule, hub });
  }, `${nameOf(place)} loads ${model.id}`);
  const others = without(model, copying).filter((each) => !model.stored.some(({ node }) => node === each.node));
  const undo = () => order("undo", () => api.delete(path), `${model.id} is unloaded once it is idle`);
  return html`<section><h3>Where it can be loaded</h3>
    ${error && html`<${ErrorNote} error=${error} />`}
    <ul class="rows">${model.replicas.map((each) => html`<li key=${each.node}>${nameOf(each)}
        <span class="dim">${each.state === "loading" && each.size ? html`<${Meter} value=${each.bytes / each.size} tone="" label=${progress(each)} /> ` : ""}${progress(each)}</span></li>`)}
      ${idle(model).concat(others).map((each) => html`<li key=${each.node}><span>${nameOf(each)} <span class="dim">${[each.size ? bytes(each.size) : "", each.memory ? `needs ${bytes(each.memory)} of memory` : "", "memory" in each ? "" : "copies it first"].filter(Boolean).join(", ")}</span></span>
        ${admin && html`<button type="button" class="small" disabled=${Boolean(asked)} onClick=${() => load(each)}>Load on ${nameOf(each)}</button>`}</li>`)}</ul>
    ${model.deployed && html`<p class="hint">Deployed: it is loaded again after a restart. ${admin && html`<button type="button" class="small" disabled=${Boolean(asked)} onClick=${undo}>Undo</button>`}</p>`}
  </section>`;
}

/** Deploys a model of the hub, which machines that copy models download. */
function FromHub({ api, copying, onClose, onDone }) {
  const [error, setError] = useOrderError();
  const [busy, setBusy] = useState(false);
  const [hub, setHub] = useState("");
  const submit = async (event) => {
    event.preventDefault();
    if (busy) return;
    const form = new FormData(event.target);
    const name = form.get("name").trim() || shortName(hub);
    const on = form.get("machine") ? [form.get("machine")] : [];
    setBusy(true);
    try {
      await api.put(`/admin/deployments/${encodeURIComponent(name)}`, { on, hub: hub.trim() });
      toast(`${name} is downloaded and loaded`);
      onDone(name);
    } catch (failure) { setError(failure); setBusy(false); }
  };
  return html`<${Dialog} title="Model from the hub" onClose=${onClose}><form class="stack" onSubmit=${submit}>
    <div class="field"><label for="hub-model">Repository on Hugging Face</label><input id="hub-model" required autofocus value=${hub} placeholder="unsloth/Qwen3-8B-GGUF:Q4_K_M" aria-describedby="hub-model-hint" onInput=${(event) => setHub(event.target.value)} />
      <p class="hint" id="hub-model-hint">With GGUF files. Without a quantization after the colon, one of about four bits is chosen.</p></div>
    <div class="fields">
      <div class="field"><label for="hub-name">Name in the pool</label><input id="hub-name" name="name" maxlength="256" placeholder=${shortName(hub) || "qwen3-8b"} /></div>
      <div class="field"><label for="hub-machine">Machine</label><select id="hub-machine" name="machine"><option value="">any with room</option>
        ${copying.map((each) => html`<option value=${each.node}>${nameOf(each)}</option>`)}</select></div>
    </div>
    ${error && html`<${ErrorNote} error=${error} />`}
    <footer><button type="button" onClick=${onClose}>Cancel</button><button type="submit" class="primary" disabled=${busy}>Load</button></footer>
  </form><//>`;
}

function Details({ model, copying, machines, onClose, reader, admin, api, reload }) {
  const at = places(model, machines);
  return html`<${Dialog} title=${model.id} wide onClose=${onClose}>
    <p class="dim">${traits(model)}${model.features.length ? ` · ${model.features.map(featureName).join(", ")}` : ""}</p>
    <section><h3>Where it is</h3>
      ${at.length ? html`<ul class="rows">${at.map((each) => html`<li>${reader ? html`<a href=${`#/nodes/${encodeURIComponent(each.peer)}`}>${each.name}</a>` : each.name}
        <span><${Meter} value=${each.slots ? each.busy / each.slots : 0} tone="" label=${`${each.busy} of ${each.slots} slots busy`} /> ${each.busy}/${each.slots}</span></li>`)}</ul>`
        : html`<p class="hint">No connected machine offers it now.</p>`}</section>
    ${(model.stored.length > 0 || model.deployed) && html`<${Loads} model=${model} copying=${copying} api=${api} admin=${admin} reload=${reload} />`}
    ${model.fits.length > 0 && html`<section><h3>Where else it would fit</h3>
      <ul class="rows">${[...model.fits].sort((a, b) => b.fits - a.fits).map((each) => html`<li><span><${Icon} name=${each.fits ? "check" : "cross"} size=${15} /><span class="unseen">${each.fits ? "fits:" : "does not fit:"}</span> ${machines.get(each.node)?.name ?? each.node}</span>
        <span class="dim">${each.why || (each.fits ? "fits" : NONE)}</span></li>`)}</ul></section>`}
    <section><h3>On another machine</h3><${CopyField} text=${`shoal join --model ${model.id}`} />
      <p class="hint">Where an engine has it; for a file, <code>--model NAME=FILE.gguf</code>. Other machines than the
        coordinator’s need the address and the token as well${admin ? html`: <a href="#/nodes?join">Add a machine</a>` : ""}.</p></section>
  <//>`;
}

export default function Models({ api, live, session, route }) {
  const [text, setText] = useState(route.query.get("q") || "");
  const [opened, setOpened] = useState(null);
  const [fetching, setFetching] = useState(false);
  useLayoutEffect(() => setText(route.query.get("q") || ""), [route]); // later, it would replace what is typed
  // What runs where changes by the second: again only when models or machines did.
  const offered = live.status ? live.status.workers.map((each) => `${each.id} ${each.models}`).join() : "";
  const [listed, error, reload] = usePolled(() => api.get("/admin/models"), [offered], (found) => found.data.some(moves));
  const [aliases, aliasError, reloadAliases] = useLoaded(() => api.get("/admin/aliases"), [offered]);
  // The busy slots are known live.
  const models = useMemo(() => {
    const workers = new Map((live.status?.workers || []).map((each) => [each.id, each]));
    return (listed?.data || []).map((model) => ({ ...model, workers: model.workers.map((each) => ({ ...each, ...pick(workers.get(each.id)) })) }));
  }, [listed, live.status]);
  const machines = useMemo(() => new Map(live.status ? machinesOf(live.status).flatMap((each) => each.names.map((name) => [name, each])) : []), [live.status]);
  const shown = models.filter((each) => each.id.toLowerCase().includes(text.trim().toLowerCase()));
  const model = opened && models.find((each) => each.id === opened);
  const reader = readsAll(session);
  const admin = session.scope === "admin";
  const copying = listed?.copying || [];
  return html`
    <${Head} title="Models" hint=${listed && plural(models.length, "model")}>
      <input type="search" data-search placeholder="Filter models" aria-label="Filter models" value=${text} onInput=${(event) => setText(event.target.value)} />
      ${admin && copying.length > 0 && html`<button type="button" onClick=${() => setFetching(true)}><${Icon} name="plus" size=${16} />From the hub</button>`}
    <//>
    ${error && html`<${ErrorNote} error=${error} retry=${reload} />`}
    ${!listed && !error && html`<${Loading} />`}
    ${listed && !shown.length && (models.length ? html`<${Empty} title="No model matches"><button type="button" onClick=${() => setText("")}>Show all</button><//>`
      : html`<${Empty} title="No machine offers a model yet"><p>A worker offers the models of each engine that it finds on its machine. This one downloads a model and offers it:</p>
        <div class="narrow"><${CopyField} text="shoal join --model unsloth/Qwen3-8B-GGUF" /></div>
        ${admin && html`<p>Machines other than the coordinator’s also need the address and the token: <a href="#/nodes?join">Add a machine</a>.</p>`}<//>`)}
    <div class="models">${shown.map((each) => html`<${Card} key=${each.id} model=${each} machines=${machines} open=${() => setOpened(each.id)} playable=${submits(session)} />`)}</div>
    ${aliasError && html`<${ErrorNote} error=${aliasError} retry=${reloadAliases} />`}
    ${aliases?.data.length > 0 && html`<section class="card aliases"><h2>Aliases</h2>
      <ul class="rows">${aliases.data.map((each) => html`<li key=${each.name}><code>${each.name}</code>
        <span class="dim">${each.models.join(", ")} · ${each.serves ? `now ${each.serves}` : "none served now"}</span></li>`)}</ul></section>`}
    ${fetching && html`<${FromHub} api=${api} copying=${copying} onClose=${() => setFetching(false)} onDone=${(name) => { setFetching(false); setOpened(name); reload(); }} />`}
    ${model && html`<${Details} model=${model} copying=${copying} machines=${machines} reader=${reader} admin=${admin} api=${api} reload=${reload} onClose=${() => setOpened(null)} />`}`;
}

const pick = (worker) => worker && { busy: worker.busy, slots: worker.slots };
