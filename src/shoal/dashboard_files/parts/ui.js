// Components that all views share.

import { html, useEffect, useRef, useState, useLayoutEffect, Component } from "../vendor/preact.js";
import { ago, exact, NONE } from "./format.js";
import { Icon } from "./icons.js";
import { coordinatorNow } from "./live.js";

export { Icon };

const names = (...classes) => classes.filter(Boolean).join(" ");

const RENEWED = 5000; // ms between renewals of the time
let ticks = new Set();
let ticking = null;

/** The coordinator's Unix time, renewed every few seconds: one timer for the page. */
export function useNow() {
  const [now, setNow] = useState(coordinatorNow());
  useEffect(() => {
    ticks.add(setNow);
    ticking ??= setInterval(() => ticks.forEach((each) => each(coordinatorNow())), RENEWED);
    return () => {
      ticks.delete(setNow);
      if (!ticks.size) { clearInterval(ticking); ticking = null; }
    };
  }, []);
  return now;
}

/** How long ago something was; what has just happened is not in the future of a time that is not renewed yet. */
export const age = (at, now) => ago(at, at - now < (2 * RENEWED) / 1000 ? Math.max(now, at) : now);

/** How long ago something was, or in what time it will be; its title has the exact time. */
export function Time({ at }) {
  const now = useNow();
  if (at == null) return html`<span class="faint">${NONE}</span>`;
  return html`<time datetime=${new Date(at * 1000).toISOString()} title=${exact(at)}>${age(at, now)}</time>`;
}

/** A state as a small word.  `tone`: ok, busy, warn, bad or none. */
export const Badge = ({ tone = "", children, title }) =>
  html`<span class=${names("badge", tone)} title=${title}>${children}</span>`;

const TONES = {
  active: "ok", done: "ok", completed: "ok", running: "busy", streaming: "busy", leased: "busy",
  in_progress: "busy", queued: "", pending: "warn", paused: "warn", draining: "warn", leaving: "warn",
  unfit: "warn", drained: "warn", "not admitted": "bad", removed: "bad", failed: "bad", expired: "bad",
  cancelled: "", cancelling: "warn", lost: "bad",
};

/** The badge of a machine's, job's, run's or batch's state. */
export const State = ({ state, title }) =>
  html`<${Badge} tone=${TONES[state] ?? ""} title=${title}>${state.replaceAll("_", " ")}<//>`;

/** What a list shows when it is empty: what that means, and what to do next. */
export const Empty = ({ title, children }) =>
  html`<div class="empty"><p class="empty-title">${title}</p>${children}</div>`;

/** An error with its cause and, if there is one, a way on. */
export const ErrorNote = ({ error, retry }) => html`<div class="note bad" role="alert">
  <${Icon} name="warn" /><p>${error.message}${error.code ? html` <code>${error.code}</code>` : ""}</p>
  ${retry && html`<button type="button" onClick=${retry}>Try again</button>`}
</div>`;

export const Loading = ({ what = "Loading" }) =>
  html`<p class="loading" role="status"><span class="spinner" aria-hidden="true"></span>${what} …</p>`;

/** A view's heading; `children` are its controls. */
export const Head = ({ title, hint, children }) => html`<header class="view-head">
  <div><h1 tabindex="-1">${title}</h1>${hint && html`<p class="hint">${hint}</p>`}</div>
  ${children && html`<div class="controls">${children}</div>`}
</header>`;

/** A text that can be copied, such as a command or a secret. */
export function CopyField({ text, label = "Copy" }) {
  const [done, setDone] = useState("");
  const code = useRef(null);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      setDone("Copied");
    } catch {
      // Without TLS there is no clipboard: select it, so that one keystroke copies.
      getSelection().selectAllChildren(code.current);
      setDone(document.execCommand?.("copy") ? "Copied" : "Selected");
    }
    setTimeout(() => setDone(""), 2000);
  };
  return html`<div class="copy">
    <code ref=${code} tabindex="0">${text}</code>
    <button type="button" class="quiet" onClick=${copy} aria-label=${`${label}: ${text.slice(0, 60)}`}>
      <${Icon} name=${done ? "check" : "copy"} size=${16} /><span aria-live="polite">${done || label}</span>
    </button>
  </div>`;
}

/** A modal dialog; Escape, the cross and a click beside it close it. */
export function Dialog({ title, onClose, children, wide, className }) {
  const dialog = useRef(null);
  const close = useRef(onClose);
  close.current = onClose;
  useLayoutEffect(() => {
    const element = dialog.current;
    element.showModal();
    return () => {
      close.current = () => {}; // its event comes later, when the page may show something else
      if (element.open) element.close();
    };
  }, []);
  // A press that began inside (selecting text) and ended outside is no click beside it.
  const pressed = useRef(null);
  return html`<dialog ref=${dialog} class=${names(wide && "wide", className)} aria-label=${title}
    onClose=${() => close.current()}
    onMouseDown=${(event) => { pressed.current = event.target; }}
    onClick=${(event) => event.target === dialog.current && pressed.current === dialog.current && dialog.current.close()}>
    <div class="dialog-body">
      <header><h2>${title}</h2>
        <button type="button" class="quiet square" aria-label="Close" onClick=${() => dialog.current.close()}>
          <${Icon} name="cross" /></button></header>
      ${children}
    </div>
  </dialog>`;
}

/** The error of an order: shown beside it while that is in the page, else at the edge. `[error, setError]`. */
export function useOrderError() {
  const [error, setError] = useState(null);
  const gone = useRef(false);
  useEffect(() => () => { gone.current = true; }, []);
  return [error, (found) => (gone.current && found ? toast(found.message, "bad") : setError(found))];
}

/** Asks before something that cannot simply be undone.  `onYes` may return a promise; its error is shown. */
export function Confirm({ title, action, danger, onYes, onClose, children }) {
  const [error, setError] = useOrderError();
  const [busy, setBusy] = useState(false);
  const yes = async () => {
    setBusy(true);
    try { await onYes(); onClose(); } catch (failure) { setError(failure); setBusy(false); }
  };
  return html`<${Dialog} title=${title} onClose=${onClose}>
    ${children}
    ${error && html`<${ErrorNote} error=${error} />`}
    <footer>
      <button type="button" onClick=${onClose}>Cancel</button>
      <button type="button" class=${danger ? "danger" : "primary"} disabled=${busy} onClick=${yes}>${action}</button>
    </footer>
  <//>`;
}

/** A share of something as a thin bar; `value` from 0 to 1. */
export function Meter({ value, label, tone }) {
  const share = Math.max(0, Math.min(1, value || 0));
  return html`<span class=${names("meter", tone ?? (share > 0.9 ? "hot" : ""))} role="img" aria-label=${label}
    title=${label}><span style=${{ width: `${share * 100}%` }}></span></span>`;
}

/** Renders again only when a prop is another object or value. */
export function memo(View) {
  return class extends Component {
    shouldComponentUpdate(next) {
      for (const name in next) if (next[name] !== this.props[name]) return true;
      for (const name in this.props) if (!(name in next)) return true;
      return false;
    }

    render(props) {
      return html`<${View} ...${props} />`;
    }
  };
}

/** Loads something and keeps it: `[value, error, reload]`; loads again when an input changes. */
export function useLoaded(load, inputs) {
  const [result, setResult] = useState({ value: null, error: null });
  const last = useRef(0);
  const run = () => {
    const turn = ++last.current;
    return load().then(
      (value) => turn === last.current && setResult({ value, error: null }),
      (error) => turn === last.current && setResult((old) => ({ value: old.value, error })),
    );
  };
  useEffect(() => { run(); return () => { last.current += 1; }; }, inputs);
  return [result.value, result.error, run];
}

const POLLED = 3000; // ms between reads of what goes on

/** As `useLoaded`, and loads again and again while `goesOn(value)` and the page is in sight. */
export function usePolled(load, inputs, goesOn) {
  const loaded = useLoaded(load, inputs);
  const [value, , reload] = loaded;
  const latest = useRef(reload);
  latest.current = reload;
  const on = value === null || goesOn(value);
  useEffect(() => {
    if (!on) return undefined;
    const timer = setInterval(() => !document.hidden && latest.current(), POLLED);
    return () => clearInterval(timer);
  }, [on, ...inputs]);
  return loaded;
}

let messages = [];
const outlets = new Set();

/** Shows a short message at the edge of the page. */
export function toast(text, tone = "") {
  const message = { text, tone, id: Math.random() };
  messages = [...messages, message];
  const show = () => outlets.forEach((each) => each(messages));
  show();
  setTimeout(() => { messages = messages.filter((each) => each !== message); show(); }, tone === "bad" ? 9000 : 4000);
}

export function Toasts() {
  const [shown, setShown] = useState(messages);
  useEffect(() => { outlets.add(setShown); return () => outlets.delete(setShown); }, []);
  return html`<div class="toasts" role="status" aria-live="polite">
    ${shown.map((each) => html`<p key=${each.id} class=${names("toast", each.tone)}>${each.text}</p>`)}
  </div>`;
}
