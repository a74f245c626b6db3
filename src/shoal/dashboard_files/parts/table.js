// Tables of any length: only the rows in sight are in the page.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { memo, toast } from "./ui.js";

const ROW = 41; // px: the height of a row in style.css
const STEP = 20; // rows
const BEYOND = 24; // rows above and below what is in sight

/**
 * A table.  `columns`: [{key, title, cell(row), align: "end", hide: "phone" | "narrow", sort(row)}];
 * `id(row)` is its key; with `open(row)` a row opens on a click or Enter (the first cell holds the
 * button), labelled by `label(row)`.  `more()` loads the next page, if `next`; its error is shown.
 */
export function Table({ caption, columns, rows, id, open, label, next, more, empty, selected }) {
  const body = useRef(null);
  const end = useRef(null);
  const [range, setRange] = useState([0, 60]);
  const [order, setOrder] = useState(null); // [column key, descending]
  const [loading, setLoading] = useState(false);
  const sorter = order && columns.find((each) => each.key === order[0]);
  const listed = sorter ? sorted(rows, sorter.sort, order[1]) : rows;

  const look = () => {
    const box = body.current?.getBoundingClientRect();
    if (!box) return;
    const first = Math.max(0, Math.floor(-box.top / ROW) - BEYOND);
    const last = Math.ceil((innerHeight - box.top) / ROW) + BEYOND;
    // In steps: the browser lays out the whole table when rows of it change.
    const step = [first - (first % STEP), last + (STEP - (last % STEP))];
    setRange((old) => (old[0] === step[0] && old[1] === step[1] ? old : step));
  };
  useLayoutEffect(look, [listed.length]);
  useEffect(() => {
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    return () => { removeEventListener("scroll", look); removeEventListener("resize", look); };
  }, []);

  const loadMore = async () => {
    if (loading) return;
    setLoading(true);
    try { await more(); } catch (error) { toast(error.message, "bad"); } finally { setLoading(false); }
  };
  const latest = useRef(loadMore);
  latest.current = loadMore;
  useEffect(() => {
    if (!next || !end.current) return undefined;
    const observer = new IntersectionObserver(
      (entries) => entries.some((each) => each.isIntersecting) && latest.current(),
      { rootMargin: "400px" });
    observer.observe(end.current);
    return () => observer.disconnect();
  }, [next, listed.length]);

  if (!rows.length && !next) return empty || null;
  const first = Math.min(range[0], Math.max(0, listed.length - 1));
  const shown = listed.slice(first, range[1]);
  const below = Math.max(0, listed.length - first - shown.length);
  const spacer = (count) => count > 0 && html`<tr class="spacer" aria-hidden="true"
    style=${{ height: `${count * ROW}px` }}><td colspan=${columns.length}></td></tr>`;
  return html`<div class="table-box">
    <table aria-rowcount=${listed.length + 1}>
      <caption class="unseen">${caption}</caption>
      <thead><tr>${columns.map((column) => html`<th scope="col" class=${cellClass(column)}
        aria-sort=${order?.[0] === column.key ? (order[1] ? "descending" : "ascending") : undefined}>
        ${column.sort
          ? html`<button type="button" class="sort" onClick=${() => setOrder(turned(order, column.key))}>
              ${column.title}${order?.[0] === column.key && html`<span aria-hidden="true">${order[1] ? "↓" : "↑"}</span>`}</button>`
          : column.title}</th>`)}</tr></thead>
      <tbody ref=${body}>
        ${spacer(first)}
        ${shown.map((row, place) => html`<${Row} key=${id(row)} row=${row} columns=${columns} open=${open} label=${label}
          index=${first + place + 2} selected=${selected === id(row)} />`)}
        ${spacer(below)}
      </tbody>
    </table>
    <div class="table-end" ref=${end}>
      ${next && html`<button type="button" onClick=${loadMore} disabled=${loading}>
        ${loading ? "Loading …" : "Load more"}</button>`}
    </div>
  </div>`;
}

const cellClass = (column) =>
  [column.align === "end" && "end", column.hide && `hide-${column.hide}`, column.fill && "fill"]
    .filter(Boolean).join(" ") || undefined;

/** A row, which scrolling does not render again while it stays in sight. */
const Row = memo(({ row, columns, open, label, index, selected }) => html`<tr aria-rowindex=${index}
  class=${[open && "opens", selected && "selected"].filter(Boolean).join(" ") || undefined}
  onClick=${open && ((event) => !event.target.closest("a,button,input,select,code") && !String(getSelection()) && open(row))}>
  ${columns.map((column, n) => html`<td class=${cellClass(column)}>${n === 0 && open
    ? html`<button type="button" class="row-open" aria-label=${label && label(row)} onClick=${() => open(row)}>${column.cell(row)}</button>`
    : column.cell(row)}</td>`)}
</tr>`);

const turned = (order, key) =>
  order?.[0] !== key ? [key, false] : order[1] ? null : [key, true];

function sorted(rows, value, descending) {
  const sign = descending ? -1 : 1;
  return [...rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x == null || y == null) return (x == null) - (y == null); // unknown ones last
    return (x < y ? -1 : x > y ? 1 : 0) * sign;
  });
}
