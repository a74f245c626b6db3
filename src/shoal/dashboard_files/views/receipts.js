// Receipts: the log, each receipt, and its verification in this browser.

import { html, useEffect, useState } from "../vendor/preact.js";
import { dollars, exact, integer, NONE, plural } from "../parts/format.js";
import { submits } from "../parts/scopes.js";
import { remembered, trust, verifyGrowth } from "../parts/trusted_log.js";
import { Table } from "../parts/table.js";
import {
  Badge, CopyField, Dialog, Empty, ErrorNote, Head, Icon, Loading, Time, useLoaded,
} from "../parts/ui.js";
import { holds, STEPS, verifyFile, whyNot } from "../receipt_proof.js";

const PAGE = 100;
const SHOWN_MAX = 20_000; // characters of an output that are shown

/** What the verdicts say of the worker's own receipt. */
const VERDICTS = {
  valid: ["ok", "the worker signed this output of this job"],
  unsigned: ["", "the worker's protocol carries no receipts"],
  missing: ["warn", "the worker sent no receipt"],
  malformed: ["bad", "the worker's receipt cannot be read"],
  wrong_job: ["bad", "the worker's receipt is for another job"],
  wrong_worker: ["bad", "the worker's receipt names the key of another worker"],
  wrong_output: ["bad", "the worker's receipt is for another output"],
  bad_signature: ["bad", "the signature is not the worker's"],
};

const Verdict = ({ verdict }) => {
  const [tone, title] = VERDICTS[verdict] ?? ["", verdict];
  return html`<${Badge} tone=${tone} title=${title}>${verdict.replaceAll("_", " ")}<//>`;
};

export default function Receipts({ api, session, route }) {
  const [log, error, reload] = useLoaded(() => api.get("/v1/log"), []);
  const [trusted, setTrusted] = useState(remembered());
  const [file, setFile] = useState(null); // of this device: {name, data}
  const drop = useDrop(async (dropped) => setFile({ name: dropped.name, data: await bytesOf(dropped) }));
  // Trust on first use: the first key that is seen here.
  useEffect(() => {
    if (log && !trusted?.key) setTrusted(trust(log.public_key, false));
  }, [log]);
  if (error && !log) return html`<${Head} title="Receipts" /><${ErrorNote} error=${error} retry=${reload} />`;
  if (!log || !trusted?.key) return html`<${Head} title="Receipts" /><${Loading} />`;
  const [job] = route.path;
  const open = async ({ target }) => {
    const [chosen] = target.files;
    if (chosen) setFile({ name: chosen.name, data: await bytesOf(chosen) });
    target.value = "";
  };
  return html`<div class="stack receipts" ...${drop}>
    <${Head} title=${job ? "Receipt" : "Receipts"} hint=${job ? null : "Proof of what each job did: signed, in a log that can only grow"}>
      ${job && html`<a class="button" href="#/receipts"><${Icon} name="back" size=${16} />All receipts</a>`}
      <label class="button open-file"><${Icon} name="file" size=${16} />Verify a file<input type="file" class="unseen"
        accept=".json,application/json" onChange=${open} /></label>
    <//>
    ${job
      ? html`<${Receipt} key=${job} api=${api} job=${job} trusted=${trusted} />`
      : html`<${LogCard} api=${api} log=${log} trusted=${trusted} onTrusted=${setTrusted} />
        <${ReceiptList} api=${api} session=${session} />`}
    ${file && html`<${Dialog} title=${file.name} wide onClose=${() => setFile(null)}>
      <${Verification} data=${file.data} trusted=${trusted} atOnce /><//>`}
  </div>`;
}

const bytesOf = async (blob) => new Uint8Array(await blob.arrayBuffer());

/** Properties of an element on which a file can be dropped. */
function useDrop(onFile) {
  const [over, setOver] = useState(false);
  const has = (event) => event.dataTransfer?.types.includes("Files");
  return {
    "data-over": over || undefined,
    onDragOver: (event) => { if (has(event)) { event.preventDefault(); setOver(true); } },
    onDragLeave: (event) => event.currentTarget.contains(event.relatedTarget) || setOver(false),
    onDrop: (event) => {
      if (!has(event)) return;
      event.preventDefault();
      setOver(false);
      onFile(event.dataTransfer.files[0]);
    },
  };
}

// The log and its key.

function LogCard({ api, log, trusted, onTrusted }) {
  const [changing, setChanging] = useState(false);
  const [growth, setGrowth] = useState(undefined); // until it is known
  const [problem, setProblem] = useState(null);
  const differs = log.public_key !== trusted.key;
  useEffect(() => {
    let here = true;
    setGrowth(undefined);
    setProblem(null);
    whyNot().then(async (reason) => {
      if (reason || differs) return here && setProblem(reason);
      try {
        const found = await verifyGrowth(api, log, trusted);
        return here && setGrowth(found);
      } catch (error) {
        return here && setProblem(error.message);
      }
    });
    return () => { here = false; };
  }, [log, trusted.key]);
  const failed = growth?.results.find((each) => each.problem !== null);
  return html`<section class="card log" aria-label="The log">
    <div class="log-size"><b>${integer(log.size)}</b><span>${log.size === 1 ? "receipt" : "receipts"} in the log</span></div>
    <dl class="facts">
      <dt>Key</dt><dd><code title=${trusted.key}>${trusted.key.slice(0, 16)}…</code>
        ${" "}<span class="dim">${trusted.pinned ? "pinned by you" : html`trusted since first seen here, <${Time} at=${trusted.since} />`}</span>
        ${" "}<button type="button" class="quiet small" onClick=${() => setChanging(true)}>Compare or change</button></dd>
      <dt>History</dt><dd>${differs ? "not checked: the key differs"
        : failed ? html`<span class="problem">${failed.problem}</span>`
        : problem ? html`<span class="dim">${problem}</span>`
        : growth === undefined ? "being checked …"
        : growth ? html`<${Icon} name="check" size=${16} /> ${growth.from.size === growth.to.size
            ? `unchanged since this browser last saw it (${exact(Date.parse(growth.from.at) / 1000)})`
            : `only grew since this browser last saw it: from ${integer(growth.from.size)} to ${integer(growth.to.size)}`}`
        : log.checkpoint ? "remembered from now on: each visit checks that nothing earlier has changed" : "empty: each completed job adds a receipt"}</dd>
    </dl>
    ${failed && html`<${ErrorNote} error=${{ message: "The log was rewritten, or this is another log. Keep this browser's data, and ask the operator." }} />`}
    ${differs && html`<div class="note bad" role="alert"><${Icon} name="warn" />
      <p>The key of the coordinator (<code>${log.public_key.slice(0, 16)}…</code>) is not the trusted one. Unless the coordinator
        was reinstalled, this may be an impostor.</p>
      <button type="button" onClick=${() => setChanging(true)}>Compare</button></div>`}
    ${changing && html`<${KeyDialog} log=${log} trusted=${trusted} onTrusted=${onTrusted} onClose=${() => setChanging(false)} />`}
  </section>`;
}

function KeyDialog({ log, trusted, onTrusted, onClose }) {
  const [key, setKey] = useState("");
  const given = key.trim().toLowerCase();
  const valid = /^[0-9a-f]{64}$/.test(given);
  const save = (event) => {
    event.preventDefault();
    onTrusted(trust(given, true));
    onClose();
  };
  return html`<${Dialog} title="The coordinator's key" onClose=${onClose}>
    <p>A verified receipt proves what the owner of this key said. A page cannot prove its own key: compare it with what the
      operator gave you, or with what <code>shoal receipts key</code> prints on the coordinator's machine.</p>
    <h3>Trusted in this browser</h3>
    <${CopyField} text=${trusted.key} label="Copy the key" />
    ${log.public_key !== trusted.key && html`<h3>The coordinator's now</h3><${CopyField} text=${log.public_key} />`}
    <form class="stack" onSubmit=${save}>
      <label class="field">Trust this key instead
        <input class="mono" value=${key} placeholder="64 hexadecimal digits" spellcheck="false" autocomplete="off"
          onInput=${(event) => setKey(event.target.value)} aria-invalid=${key !== "" && !valid} /></label>
      <footer><button type="submit" class="primary" disabled=${!valid}>Pin this key</button></footer>
    </form>
  <//>`;
}

// The list.

function ReceiptList({ api, session }) {
  const [pages, setPages] = useState([]);
  const [first, error, reload] = useLoaded(() => api.get(`/v1/receipts?limit=${PAGE}`), []);
  useEffect(() => { if (first) setPages((all) => (all.length > 1 ? all : [first])); }, [first]);
  if (error && !first) return html`<${ErrorNote} error=${error} retry=${reload} />`;
  if (!first) return html`<${Loading} />`;
  const rows = pages.flatMap(({ data }) => data);
  const next = pages.at(-1)?.next;
  const more = async () => {
    const page = await api.get(`/v1/receipts?limit=${PAGE}&before=${next}`);
    setPages((all) => [...all, page]);
  };
  const asks = submits(session);
  const paid = rows.some(({ price }) => price > 0);
  const columns = [
    { key: "job", title: "Job", cell: (row) => html`<span class="mono long-id">${row.job_id}</span>` },
    { key: "at", title: "When", cell: (row) => html`<${Time} at=${row.at} />`, sort: (row) => row.at },
    { key: "verdict", title: "Verdict", cell: (row) => html`<${Verdict} verdict=${row.verdict} />`, sort: (row) => row.verdict },
    { key: "worker", title: "Worker", cell: (row) => row.worker, sort: (row) => row.worker, hide: "phone" },
    { key: "tokens", title: "Tokens", align: "end", hide: "phone", sort: (row) => row.completion_tokens,
      cell: (row) => (row.completion_tokens === null ? NONE : `${integer(row.prompt_tokens)} → ${integer(row.completion_tokens)}`) },
    ...(paid ? [{ key: "price", title: "Price", align: "end", cell: (row) => dollars(row.price), sort: (row) => row.price }] : []),
    { key: "index", title: "Leaf", align: "end", hide: "narrow", cell: (row) => integer(row.index), sort: (row) => row.index },
  ];
  return html`<${Table} caption="Receipts, newest first" columns=${columns} rows=${rows} id=${(row) => row.index}
    open=${(row) => { location.hash = `#/receipts/${encodeURIComponent(row.job_id)}`; }} label=${(row) => `Receipt of job ${row.job_id}`}
    next=${next !== null && next !== undefined} more=${more}
    empty=${html`<${Empty} title="No receipts yet"><p>Each completed job gets one.${asks && html` <a href="#/playground">Ask a model something</a>, and its receipt is here.`}</p><//>`} />`;
}

// One receipt.

function Receipt({ api, job, trusted }) {
  const [data, error, reload] = useLoaded(
    async () => new Uint8Array(await (await api.fetch(`/v1/receipts/${encodeURIComponent(job)}`)).arrayBuffer()), [job]);
  if (error) return html`<${ErrorNote} error=${error} retry=${reload} />`;
  if (!data) return html`<${Loading} />`;
  return html`<div class="stack">
    <${Verification} data=${data} trusted=${trusted}>
      <a class="button" href=${`/v1/receipts/${encodeURIComponent(job)}`} download=${`receipt-${job}.json`}>
        <${Icon} name="download" size=${16} />Export</a>
      <a class="button" href=${`#/jobs/${encodeURIComponent(job)}`}>Timeline</a>
    <//>
  </div>`;
}

/** Reads a file for display; null if it cannot be read. Only the steps say what is true of it. */
function read(data) {
  try {
    const file = JSON.parse(new TextDecoder().decode(data));
    return file.type === "shoal/bundle" ? { file, receipt: JSON.parse(file.receipt) } : { file, receipt: null };
  } catch {
    return null;
  }
}

/** A file, its verification step by step, and what it says. */
function Verification({ data, trusted, atOnce, children }) {
  const [reason, setReason] = useState(null); // why this browser cannot verify
  const [results, setResults] = useState(null);
  const [busy, setBusy] = useState(false);
  const shown = read(data);
  const verify = async () => {
    setBusy(true);
    const cannot = await whyNot();
    setReason(cannot);
    if (!cannot) setResults(await verifyFile(data, trusted.key));
    setBusy(false);
  };
  useEffect(() => { setResults(null); if (atOnce) verify(); }, [data, trusted.key]);
  const ok = results && holds(results);
  return html`<div class="verification">
    <section class="card proof" aria-label="Verification">
      <div class="proof-head">
        <button type="button" class="primary" onClick=${verify} disabled=${busy}>
          <${Icon} name="shield" size=${16} />${results ? "Verify again" : "Verify"}</button>
        ${children}
      </div>
      <p class="hint">Verified in this browser, with the key <code title=${trusted.key}>${trusted.key.slice(0, 16)}…</code>${" "}
        ${trusted.pinned ? "that you pinned" : "that it has trusted since its first use"}. No server is involved.</p>
      ${reason && html`<div class="note warn" role="alert"><${Icon} name="warn" /><p>${reason}</p></div>`}
      <div aria-live="polite">
        ${results && html`<p class=${`outcome ${ok ? "ok" : "bad"}`}><${Icon} name=${ok ? "shield" : "warn"} size=${22} />
          ${ok ? "Verified" : "Not verified"}</p>`}
      </div>
      <${Steps} results=${results} file=${shown?.file} />
    </section>
    ${shown?.receipt && html`<${Claims} shown=${shown} />`}
  </div>`;
}

function Steps({ results, file }) {
  const growth = file?.type === "shoal/growth";
  const names = growth ? ["FORM", "EARLIER", "LATER", "GROWN"]
    : ["FORM", "KEY", "SIGNATURE", "RECEIPT", "CHECKPOINT", "LOGGED", "OUTPUT",
      ...(file?.request?.text ? ["REQUEST"] : []), "WORKER"];
  const found = new Map((results ?? []).map((each) => [each.step, each]));
  const failed = results && !holds(results);
  return html`<ol class="steps">${names.map((step) => {
    const result = found.get(step);
    const skipped = !result && results && (failed ? "not reached" : "skipped: the file has no output");
    const state = result ? (result.problem === null ? "ok" : "bad") : "";
    return html`<li class=${state} data-step=${step}>
      <span class="step-mark"><${Icon} name=${state === "bad" ? "cross" : state === "ok" ? "check" : "more"} size=${14} /></span>
      <div><span>${STEPS[step]}</span>
        ${result?.problem && html`<p class="problem">${result.problem}</p>`}
        ${skipped && html`<p class="faint">${skipped}</p>`}
        <span class="unseen">${state === "ok" ? "succeeded" : state === "bad" ? "failed" : "not checked"}</span></div>
      <code class="faint">${step}</code></li>`;
  })}</ol>`;
}

function Claims({ shown: { file, receipt } }) {
  const [, verdict] = VERDICTS[receipt.verdict] ?? ["", receipt.verdict];
  const row = (name, value) => html`<dt>${name}</dt><dd>${value}</dd>`;
  return html`<div class="stack">
    <section class="card" aria-label="What the receipt says">
      <h2>What the receipt says</h2>
      <dl class="facts">
        ${row("Job", html`<code>${receipt.job_id}</code>`)}
        ${row("At", exact(Date.parse(receipt.at) / 1000))}
        ${row("Worker", receipt.worker)}
        ${row("Worker's key", receipt.worker_key ? html`<code>${receipt.worker_key}</code>` : "its protocol has none")}
        ${row("Worker's receipt", html`<${Verdict} verdict=${receipt.verdict} /> ${verdict}`)}
        ${row("Tokens", receipt.completion_tokens === null ? "not counted"
          : `${integer(receipt.prompt_tokens)} in the prompt, ${integer(receipt.completion_tokens)} in the answer`)}
        ${receipt.price > 0 && row("Price", `${dollars(receipt.price)}, of which ${dollars(receipt.fee)} for the pool`)}
        ${receipt.payment_ref && row("Payment", html`<code>${receipt.payment_ref}</code>`)}
        ${row("Request's hash", receipt.request_hash ? html`<code>${receipt.request_hash}</code>` : "none in earlier versions")}
        ${row("Output's hash", html`<code>${receipt.output_hash}</code>`)}
        ${row("In the log", `leaf ${integer(file.index)}, proved by ${plural(file.path.length, "hash", "hashes")}`)}
      </dl>
    </section>
    <section class="card" aria-label="The output">
      <h2>The output</h2>
      ${file.output === null ? html`<p class="dim">Not in this file: its job was deleted, or has none.</p>`
        : html`<pre class="output" tabindex="0">${pretty(file.output)}</pre>`}
    </section>
    <section class="card" aria-label="The checkpoint">
      <h2>The checkpoint</h2>
      <pre tabindex="0">${file.checkpoint}</pre>
    </section>
  </div>`;
}

function pretty(output) {
  let text = output;
  try { text = JSON.stringify(JSON.parse(output), null, 2); } catch { /* a text, then */ }
  return text.length > SHOWN_MAX ? `${text.slice(0, SHOWN_MAX)}…` : text;
}
