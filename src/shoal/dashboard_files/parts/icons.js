// Icons, drawn on a grid of 24 with lines of the text's colour.

import { html } from "../vendor/preact.js";

const PATHS = {
  pool: "M3 8c2 0 2-1.5 4.5-1.5S10 8 12 8s2-1.5 4.5-1.5S19 8 21 8M3 13c2 0 2-1.5 4.5-1.5S10 13 12 13s2-1.5 4.5-1.5S19 13 21 13M3 18c2 0 2-1.5 4.5-1.5S10 18 12 18s2-1.5 4.5-1.5S19 18 21 18",
  nodes: "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01",
  models: "M12 3l8 4.5v9L12 21l-8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9",
  playground: "M21 12a8 8 0 0 1-8 8H4l2-3a8 8 0 1 1 15-5z",
  jobs: "M4 6h10M4 12h16M4 18h7M18 4v4M14.5 16v4",
  runs: "M4 19V5M4 19h16M7 8c3 0 4 7 12 8",
  batches: "M4 9l8-5 8 5-8 5zM4 14l8 5 8-5",
  usage: "M5 20v-6M10 20V9M15 20v-9M20 20V4",
  receipts: "M6 3h12v18l-3-2-3 2-3-2-3 2zM9 8h6M9 12h6",
  keys: "M14.5 9.5a4.5 4.5 0 1 0-3.5 4.4L13 16h2v2h2v2h3v-3l-5.7-5.7M8.5 8.5h.01",
  events: "M12 7v5l3 2M12 21a9 9 0 1 0-9-9M3 7v5h5",
  more: "M5 12h.01M12 12h.01M19 12h.01",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2v2M12 20v2M4.9 4.9l1.4 1.4M17.7 17.7l1.4 1.4M2 12h2M20 12h2M4.9 19.1l1.4-1.4M17.7 6.3l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4 8.5 8.5 0 1 0 20 14.5z",
  help: "M9.5 9a2.5 2.5 0 1 1 3.5 2.3c-.7.4-1 .9-1 1.7M12 16.5h.01M12 21a9 9 0 1 0 0-18 9 9 0 0 0 0 18z",
  out: "M15 4h4v16h-4M10 8l-4 4 4 4M6 12h9",
  check: "M5 12.5l4.5 4.5L19 7.5",
  warn: "M12 4l9 16H3zM12 10v4M12 17h.01",
  cross: "M6 6l12 12M18 6L6 18",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  plus: "M12 5v14M5 12h14",
  search: "M10.5 4a6.5 6.5 0 1 0 0 13 6.5 6.5 0 0 0 0-13zM15.5 15.5L20 20",
  pause: "M8 5v14M16 5v14",
  play: "M7 5l12 7-12 7z",
  drain: "M12 3v12M7 10l5 5 5-5M5 20h14",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  lock: "M6 11h12v9H6zM8.5 11V8a3.5 3.5 0 0 1 7 0v3",
  open: "M6 11h12v9H6zM8.5 11V8a3.5 3.5 0 0 1 6.8-1.2",
  heat: "M12 3a2 2 0 0 0-2 2v9a4 4 0 1 0 4 0V5a2 2 0 0 0-2-2zM12 9v8",
  download: "M12 3v12M7 10l5 5 5-5M5 20h14",
  back: "M14 6l-6 6 6 6",
  sliders: "M4 7h9M19 7h1M16 4.5v5M4 17h1M11 17h9M8 14.5v5",
  swap: "M4 8h13M14 5l3 3-3 3M20 16H7M10 13l-3 3 3 3",
  tool: "M14.5 6.5a4 4 0 0 0 5 5L12 19a2.5 2.5 0 0 1-3.5-3.5zM14.5 6.5L17 4",
  code: "M9 7l-5 5 5 5M15 7l5 5-5 5",
  again: "M20 12a8 8 0 1 1-2.5-5.8M20 4v4h-4",
  stop: "M7 7h10v10H7z",
  send: "M5 12h13M12 6l6 6-6 6",
  image: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9h.01",
  shield: "M12 3l7 3v6c0 4-3 7-7 9-4-2-7-5-7-9V6zM9 12l2 2 4-4",
  file: "M6 3h8l4 4v14H6zM14 3v4h4",
};

/** An icon; it says nothing to screen readers, so text or a label stands beside it. */
export function Icon({ name, size = 18 }) {
  return html`<svg class="icon" width=${size} height=${size} viewBox="0 0 24 24" fill="none"
    stroke="currentColor" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round"
    aria-hidden="true" focusable="false"><path d=${PATHS[name] || ""} /></svg>`;
}

/** The mark of Shoal: two fish. */
export function Mark({ size = 28 }) {
  return html`<svg class="mark" width=${size} height=${size} viewBox="0 0 64 64" aria-hidden="true" focusable="false">
    <path d="M8 24c8-11 24-12 34-3l9-6v18l-9-6c-10 9-26 8-34-3z" />
    <path d="M22 47c6-7 17-8 24-1l7-5v13l-7-4c-7 6-18 4-24-3z" opacity=".6" />
  </svg>`;
}
