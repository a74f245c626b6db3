// The dashboard's shell: the session, the router, the navigation and the shortcuts.

import { html, render, useEffect, useErrorBoundary, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact.js";
import { api, beginSession, signOut, whenSignedOut } from "./parts/api.js";
import { escapeDirections } from "./parts/directions.js";
import * as liveData from "./parts/live.js";
import { useLive } from "./parts/live.js";
import { Icon, Mark } from "./parts/icons.js";
import { Dialog, ErrorNote, Loading, Time, toast, Toasts } from "./parts/ui.js";
import { Login } from "./parts/login.js";
import { Palette } from "./parts/palette.js";
import { routeOf } from "./parts/route.js";
import { READERS, readsAll, SUBMITTERS } from "./parts/scopes.js";

const ALL = ["read", "use", "monitor", "admin"];
/** The views: their address, title, group, key after `g`, and the scopes that see them. */
export const VIEWS = [
  { id: "pool", title: "Pool", group: "Pool", key: "p", scopes: READERS },
  { id: "nodes", title: "Nodes", group: "Pool", key: "n", scopes: READERS },
  { id: "models", title: "Models", group: "Pool", key: "m", scopes: ALL },
  { id: "events", title: "Events", group: "Pool", key: "e", scopes: READERS },
  { id: "playground", title: "Playground", group: "Work", key: "c", scopes: SUBMITTERS },
  { id: "jobs", title: "Jobs", group: "Work", key: "j", scopes: ALL },
  { id: "runs", title: "Runs", group: "Work", key: "r", scopes: ALL },
  { id: "batches", title: "Batches", group: "Work", key: "b", scopes: ALL },
  { id: "usage", title: "Usage", group: "Accounting", key: "u", scopes: ALL },
  { id: "receipts", title: "Receipts", group: "Accounting", key: "x", scopes: ALL },
  { id: "keys", title: "Keys", group: "Accounting", key: "k", scopes: ["admin"] },
];
const TABS = { reader: ["pool", "nodes", "playground", "jobs"], other: ["playground", "jobs", "models", "usage"] };

const SHORTCUTS = [
  ["?", "Show these shortcuts"],
  ["Ctrl K", "Go to a view, machine, model or job"],
  ["/", "Search or filter in this view"],
  ["t", "Dark or light"],
  ["Esc", "Close what is open"],
];

const PRELOAD = 2000; // ms until the views that are not open are fetched
const loaded = new Map(); // views by id, once imported

function useRoute() {
  const [route, setRoute] = useState(routeOf(location.hash));
  useEffect(() => {
    const changed = () => setRoute(routeOf(location.hash));
    addEventListener("hashchange", changed);
    changed(); // it may have changed since the first rendering
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

export function toggleTheme() {
  const root = document.documentElement;
  const theme = root.dataset.theme === "dark" ? "light" : "dark";
  root.dataset.theme = theme;
  try { localStorage.setItem("shoal-theme", theme); } catch { /* for this page only, then */ }
}

const fetchView = async (id) => {
  const found = (await import(`./views/${id}.js`)).default;
  loaded.set(id, found);
  return found;
};

/** One view: imported when it is first opened; its errors leave the shell standing. */
function Outlet({ view, session, route }) {
  const live = useLive();
  const [module, setModule] = useState(() => loaded.get(view.id));
  const [failure, setFailure] = useState(null);
  const [crash, reset] = useErrorBoundary((error) => console.error(error));
  useEffect(() => {
    if (!module) fetchView(view.id).then((found) => setModule(() => found), setFailure);
  }, []);
  // A module that could not be fetched stays missing until the page is loaded again.
  const away = useRef(false);
  useEffect(() => {
    if (live.lost_at) away.current = true;
    else if (live.connected && failure && away.current) location.reload();
  }, [live.connected, live.lost_at, failure]);
  useEffect(() => { document.title = `${view.title} · Shoal`; }, [view]);
  if (crash) {
    return html`<${ErrorNote} error=${{ message: `This view failed: ${crash.message}` }} retry=${reset} />`;
  }
  if (failure) return html`<${ErrorNote} error=${{ message: `This view could not be loaded: ${failure.message}. Is the coordinator still running?` }} retry=${() => location.reload()} />`;
  if (!module) return html`<${Loading} />`;
  return html`<${module} api=${api} live=${live} session=${session} route=${route} />`;
}

function Connection({ live }) {
  if (live.connected) {
    return html`<span class="connection ok" title="The page follows the coordinator live"><i></i>Live</span>`;
  }
  return html`<span class="connection warn"><i></i>${live.status ? "Reconnecting" : "Connecting"}</span>`;
}

function AwayNote({ live }) {
  if (live.connected || !live.lost_at) return null;
  const what = live.refusal ? "The coordinator refuses this page" : "The coordinator does not answer";
  const why = live.refusal ? `: ${live.refusal.message.replace(/\.$/, "")}` : "";
  return html`<div class="away" role="status"><${Icon} name="warn" />
    <p><strong>${what}</strong> (since <${Time} at=${live.lost_at} />)${why}${". The page shows the state of that time and reconnects by itself."}</p>
    <button type="button" onClick=${liveData.retryNow}>Try now</button></div>`;
}

function Shortcuts({ views, onClose }) {
  return html`<${Dialog} title="Shortcuts" onClose=${onClose}>
    <dl class="keys">
      ${SHORTCUTS.map(([key, what]) => html`<div><dt><kbd>${key}</kbd></dt><dd>${what}</dd></div>`)}
      ${views.map((each) => html`<div><dt><kbd>g</kbd> <kbd>${each.key}</kbd></dt><dd>${each.title}</dd></div>`)}
    </dl>
  <//>`;
}

const typing = (target) => target.closest?.("input,textarea,select,[contenteditable]");

/** Shortcuts of one key, `g` and a key, and Ctrl+K; none while somebody types or a dialog is open. */
function useShortcuts(views, actions) {
  const before = useRef(0); // when `g` was pressed
  useLayoutEffect(() => { // from the moment at which the page is there
    const pressed = (event) => {
      if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
        event.preventDefault();
        actions.current.palette();
        return;
      }
      if (event.ctrlKey || event.metaKey || event.altKey || typing(event.target)) return;
      if (document.querySelector("dialog[open]")) return;
      if (Date.now() - before.current < 1500) {
        before.current = 0;
        const view = views.find((each) => each.key === event.key);
        if (view) { event.preventDefault(); location.hash = `#/${view.id}`; return; }
      }
      if (event.key === "g") before.current = Date.now();
      else if (event.key === "?") actions.current.help();
      else if (event.key === "t") toggleTheme();
      else if (event.key === "/") {
        const search = document.querySelector("main [data-search]");
        if (search) { event.preventDefault(); search.focus(); }
      }
    };
    addEventListener("keydown", pressed);
    return () => removeEventListener("keydown", pressed);
  }, [views]);
}

function Account({ session, onSignOut }) {
  return html`<div class="account">
    <span title=${`signed in with the key ${session.name}`}><b>${session.name}</b> <small>${session.scope}</small></span>
    <button type="button" class="quiet square" aria-label="Sign out" title="Sign out" onClick=${onSignOut}>
      <${Icon} name="out" /></button>
  </div>`;
}

function Shell({ session, onSignOut }) {
  const live = useLive();
  const route = useRoute();
  const [open, setOpen] = useState(null); // help, palette or more
  const views = useMemo(() => VIEWS.filter((each) => each.scopes.includes(session.scope)), [session.scope]);
  const view = views.find((each) => each.id === route.id) || views[0];
  const actions = useRef(null);
  actions.current = { help: () => setOpen("help"), palette: () => setOpen("palette") };
  useShortcuts(views, actions);
  useEffect(() => {
    if (!live.connected) return undefined;
    // Fetch the other views while the page is idle, so that each opens at once.
    const timer = setTimeout(() => views.forEach((each) => loaded.has(each.id) || fetchView(each.id).catch(() => {})), PRELOAD);
    return () => clearTimeout(timer);
  }, [live.connected]);
  const main = useRef(null);
  const shownBefore = useRef(view.id);
  useLayoutEffect(() => { // together with the view: later, it would take the focus from a field in it
    if (shownBefore.current === view.id) return;
    shownBefore.current = view.id;
    scrollTo(0, 0);
    main.current.focus({ preventScroll: true });
    setOpen(null);
  }, [view.id]);

  const link = (each) => html`<a href=${`#/${each.id}`} aria-current=${each.id === view.id ? "page" : undefined}>
    <${Icon} name=${each.id} /><span>${each.title}</span></a>`;
  const groups = [...new Set(views.map((each) => each.group))];
  const tabs = (readsAll(session) ? TABS.reader : TABS.other)
    .map((id) => views.find((each) => each.id === id)).filter(Boolean);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); main.current.focus(); }}>Skip to the content</a>
    <header class="top">
      <a class="brand" href="#/"><${Mark} /><span>Shoal</span></a>
      <${Connection} live=${live} />
      <span class="grow"></span>
      <button type="button" class="quiet find" title="Go to …" aria-keyshortcuts="Control+K" onClick=${() => setOpen("palette")}>
        <${Icon} name="search" size=${16} /><span>Go to …</span><kbd>Ctrl K</kbd></button>
      <button type="button" class="quiet square" aria-label="Shortcuts" title="Shortcuts (?)" onClick=${() => setOpen("help")}>
        <${Icon} name="help" /></button>
      <button type="button" class="quiet square theme" aria-label="Dark or light" title="Dark or light (t)" onClick=${toggleTheme}>
        <span class="in-dark"><${Icon} name="sun" /></span><span class="in-light"><${Icon} name="moon" /></span></button>
      <${Account} session=${session} onSignOut=${onSignOut} />
    </header>
    <nav class="side" aria-label="Views">
      ${groups.map((group) => html`<p id=${`group-${group}`}>${group}</p>
        <ul aria-labelledby=${`group-${group}`}>${views.filter((each) => each.group === group)
          .map((each) => html`<li>${link(each)}</li>`)}</ul>`)}
      ${live.status && html`<p class="version">Shoal ${live.status.version}<br />started <${Time} at=${live.status.started_at} /></p>`}
    </nav>
    <nav class="tabs" aria-label="Main views">
      ${tabs.map(link)}
      <button type="button" onClick=${() => setOpen("more")} aria-haspopup="dialog"
        class=${tabs.includes(view) ? undefined : "current"}><${Icon} name="more" /><span>More</span></button>
    </nav>
    <main id="main" ref=${main} tabindex="-1">
      <${AwayNote} live=${live} />
      <${Outlet} key=${view.id} view=${view} session=${session} route=${route} />
    </main>
    ${open === "help" && html`<${Shortcuts} views=${views} onClose=${() => setOpen(null)} />`}
    ${open === "palette" && html`<${Palette} views=${views} status=${live.status} onClose=${() => setOpen(null)} />`}
    ${open === "more" && html`<${Dialog} title="All views" className="sheet" onClose=${() => setOpen(null)}>
      <div class="sheet-links" onClick=${(event) => event.target.closest("a") && setOpen(null)}>
        ${views.map(link)}</div>
      <${Account} session=${session} onSignOut=${onSignOut} />
    <//>`}
    <${Toasts} />`;
}

/** The code of a one-time link, which leaves the address and the history at once. */
function takeCode() {
  const match = /^#signin=(.+)$/.exec(location.hash);
  if (!match) return null;
  history.replaceState(null, "", location.pathname + location.search);
  return decodeURIComponent(match[1]);
}

const SIGNED_OUT = "shoal-signed-out"; // in this tab, for the next loading of the page

/** Whether somebody just signed out, so that the page asks for a key even where none is needed. */
function takeSignedOut() {
  try {
    const found = sessionStorage.getItem(SIGNED_OUT);
    sessionStorage.removeItem(SIGNED_OUT);
    return found !== null;
  } catch { return false; }
}

function App() {
  const [session, setSession] = useState(undefined); // null: signed out
  const [reason, setReason] = useState(null);
  const [firstCode] = useState(takeCode);
  const signedIn = (found) => { beginSession(); liveData.start(found); setReason(null); setSession(found); };
  const begin = async (code) => {
    setSession(undefined);
    setReason(null);
    if (takeSignedOut() && !code) { setSession(null); return; }
    try {
      if (code) {
        try { signedIn(await api.post("/dashboard/session", { code })); return; } catch (error) { setReason(error); }
      }
      signedIn(await api.get("/dashboard/session"));
    } catch (error) {
      if (error.status !== 401) setReason(error);
      setSession(null);
    }
  };
  useEffect(() => {
    begin(firstCode);
    const linked = () => location.hash.startsWith("#signin=") && begin(takeCode());
    addEventListener("hashchange", linked);
    whenSignedOut(() => {
      liveData.stop();
      setReason({ message: "The session has ended: its key was revoked, or it expired. Sign in again." });
      setSession(null);
    });
    return () => removeEventListener("hashchange", linked);
  }, []);
  const leave = async () => {
    try {
      await signOut();
    } catch (error) {
      toast(`Not signed out: ${error.message}`, "bad");
      return;
    }
    liveData.stop();
    try { sessionStorage.setItem(SIGNED_OUT, "1"); } catch { /* then the page looks for a session first */ }
    location.reload(); // forgets all that the page has of this session
  };
  if (session === undefined) return html`<${Loading} what="Opening the dashboard" />`;
  if (session === null) return html`<${Login} reason=${reason} onSignedIn=${signedIn} />`;
  return html`<${Shell} session=${session} onSignOut=${leave} />`;
}

escapeDirections();
render(html`<${App} />`, document.getElementById("app"));
