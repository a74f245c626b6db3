// Usage and cost by day, and by model, key or machine.

import { html, useMemo, useState } from "../vendor/preact.js";
import { dollars, integer, plainName, short } from "../parts/format.js";
import { Bars, COLOURS } from "../parts/bars.js";
import { readsAll } from "../parts/scopes.js";
import { Table } from "../parts/table.js";
import { Empty, ErrorNote, Head, Icon, Loading, useLoaded } from "../parts/ui.js";
import { dayOf, daysBetween, seriesOf, sumsBy, total } from "../parts/usage_sums.js";

const DAY = 86_400_000; // ms
const DAYS_MAX = 400; // for which the coordinator keeps usage
const PRESETS = [["7 days", 7], ["30 days", 30], ["90 days", 90]];
const SPLITS = { model: "Model", key: "Key", node: "Machine" };
const METRICS = { tokens: "Tokens", requests: "Requests", cost: "Cost" };
const TEXT = { tokens: integer, requests: integer, cost: dollars };
const TICK = { tokens: short, requests: short, cost: dollars };
const NAMELESS = { model: "functions and tasks", key: "no key", node: "unknown machine" };

/** What a row is called; of a machine, without the wire that it is connected by. */
const nameOf = (row, split) =>
  (split === "node" ? plainName(row.node ?? "") : row[split]) || NAMELESS[split];

/** The rows of all pages. */
async function allRows(api, query) {
  const rows = [];
  for (let after = ""; after !== null;) {
    const { data, next } = await api.get(`/admin/usage?${query}&after=${after}`);
    rows.push(...data);
    after = next;
  }
  return rows;
}

const today = () => dayOf(Date.now());
const since = (days) => dayOf(Date.now() - (days - 1) * DAY);

export default function Usage({ api, session }) {
  const [range, setRange] = useState([since(30), today()]);
  const [split, setSplit] = useState("model");
  const [metric, setMetric] = useState("tokens");
  const days = useMemo(() => daysBetween(...range), [range]);
  const wrong = !days.length ? "The first day is after the last." : days.length > DAYS_MAX ? `At most ${DAYS_MAX} days: usage is not kept for longer.` : "";
  const query = `since=${range[0]}&until=${range[1]}`;
  const [found, error, reload] = useLoaded(
    () => (wrong ? Promise.resolve({ data: [] }) : allRows(api, `${query}&by=day,${split}`).then((data) => ({ data, split }))),
    [query, split]);
  const all = readsAll(session);
  const rows = found?.data ?? [];
  const costs = rows.some(({ cost }) => cost > 0);
  const shown = costs || metric !== "cost" ? metric : "tokens";
  const segment = (label, names, chosen, choose) => html`<div class="segments" role="group" aria-label=${label}>
    ${Object.entries(names).map(([name, title]) => html`<button type="button" aria-pressed=${chosen === name} onClick=${() => choose(name)}>${title}</button>`)}</div>`;
  const { cost: _, ...withoutCost } = METRICS;
  const { key: __, ...ownSplits } = SPLITS;
  return html`<div class="stack usage">
    <${Head} title="Usage" hint=${all ? "Usage of the pool, by day (UTC)" : "Usage of your key, by day (UTC)"}>
      <a class="button" href=${`/admin/usage?${query}&by=day,key,model,node&format=csv`} download=${`shoal-usage-${range[0]}-${range[1]}.csv`}>
        <${Icon} name="download" size=${16} />CSV</a>
    <//>
    <div class="filters">
      <div class="segments" role="group" aria-label="Time">${PRESETS.map(([title, count]) => html`<button type="button"
        aria-pressed=${range[0] === since(count) && range[1] === today()} onClick=${() => setRange([since(count), today()])}>${title}</button>`)}</div>
      <div class="range"><input type="date" aria-label="From" value=${range[0]} max=${range[1]} onChange=${({ target }) => target.value && setRange([target.value, range[1]])} />
        <span aria-hidden="true">–</span>
        <input type="date" aria-label="To" value=${range[1]} min=${range[0]} onChange=${({ target }) => target.value && setRange([range[0], target.value])} /></div>
      ${segment("By", all ? SPLITS : ownSplits, split, setSplit)}
      ${segment("Show", costs ? METRICS : withoutCost, shown, setMetric)}
    </div>
    ${wrong ? html`<${ErrorNote} error=${{ message: wrong }} />`
      : error ? html`<${ErrorNote} error=${error} retry=${reload} />`
      : !found || found.split !== split ? html`<${Loading} />`
      : !rows.length ? html`<${Empty} title="No usage in this period"><p>Each completed request counts, with its tokens${" "}
          and its cost if the pool has prices.</p><//>`
      : html`<${Sums} rows=${rows} days=${days} split=${split} metric=${shown} costs=${costs} />`}
  </div>`;
}

function Sums({ rows, days, split, metric, costs }) {
  const named = useMemo(() => rows.map((row) => ({ ...row, [split]: nameOf(row, split) })), [rows, split]);
  const sums = useMemo(() => sumsBy(named, split, metric), [named, split, metric]);
  const series = useMemo(() => seriesOf(named, split, metric, days, COLOURS), [named, split, metric, days]);
  const all = total(rows);
  const colour = new Map(series.map(({ name }, place) => [name, place + 1]));
  const tile = (title, value) => html`<div class="card sum"><b>${value}</b><span>${title}</span></div>`;
  const number = (key, title, write, hide) => ({ key, title, align: "end", hide, cell: (row) => write(row[key]), sort: (row) => row[key] });
  return html`
    <div class="sums">
      ${tile("requests", integer(all.requests))}
      ${tile("tokens read", short(all.prompt_tokens))}
      ${tile("tokens written", short(all.completion_tokens))}
      ${costs && tile("cost", dollars(all.cost))}
    </div>
    <section class="card" aria-label=${`${METRICS[metric]} by day`}>
      <h2>${METRICS[metric]} by day</h2>
      <${Bars} days=${days} series=${series} format=${TEXT[metric]} tick=${TICK[metric]}
        label=${`${METRICS[metric]} of ${days.length} days by ${SPLITS[split].toLowerCase()}; the table below has the sums`} />
    </section>
    <${Table} caption=${`Usage by ${SPLITS[split].toLowerCase()}`} rows=${sums} id=${(row) => row.name} columns=${[
      { key: "name", title: SPLITS[split], sort: (row) => row.name, fill: true,
        cell: (row) => html`<i class=${`swatch series-${colour.get(row.name) ?? COLOURS}`}></i>${row.name}` },
      number("requests", "Requests", integer),
      number("prompt_tokens", "Read", short, "phone"),
      number("completion_tokens", "Written", short),
      ...(costs ? [number("cost", "Cost", dollars)] : []),
    ]} />`;
}
