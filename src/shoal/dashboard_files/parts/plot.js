// A plot of series over time, or over steps, by uPlot.

import uPlot from "../vendor/uplot.js";
import { html, useEffect, useRef } from "../vendor/preact.js";
import { clock } from "./format.js";

const SPAN_MIN = 60; // seconds that a plot over time shows at least

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/**
 * A plot.  `data`: uPlot's columns, x first (Unix seconds, unless `steps`); `series`:
 * [{label, colour: "--accent", fill, value(v)}].  Pass a new `data` array to redraw, and
 * describe it in `label` for those who do not see it.
 */
export function Plot({ data, series, label, height = 160, steps = false, min }) {
  const box = useRef(null);
  const plot = useRef(null);
  const latest = useRef(data);
  latest.current = data;
  const format = (value) => value;
  useEffect(() => {
    const build = () => {
      plot.current?.destroy();
      const line = colour("--line");
      const text = colour("--faint");
      const font = "11px system-ui, sans-serif";
      const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { show: false }, font };
      plot.current = new uPlot({
        width: box.current.clientWidth || 300,
        height,
        padding: [8, 8, 0, 0],
        cursor: { y: false, points: { size: 6 } },
        legend: { show: series.length > 1, live: true },
        scales: { x: { time: !steps, range: (_, low, high) => (steps ? [low, high] : [Math.min(low, high - SPAN_MIN), high]) }, y: { range: (_, low, high) => [min ?? Math.min(0, low), top(high)] } },
        axes: [{ ...axis, space: 90, size: 28, ...(steps ? {} : { values: (_, ticks) => ticks.map((each) => clock(each)) }) }, { ...axis, size: 46, space: 34,
          values: (_, ticks) => ticks.map((each) => axisValue(each)) }],
        series: [steps ? { label: "Step" } : { label: "Time", value: (_, at) => (at == null ? "–" : clock(at)) }, ...series.map((each) => ({
          label: each.label,
          stroke: colour(each.colour || "--accent"),
          fill: each.fill ? `${colour(each.colour || "--accent")}22` : undefined,
          width: 1.5,
          points: { show: false },
          value: (_, value) => (value == null ? "–" : (each.value || format)(value)),
        }))],
      }, latest.current, box.current);
    };
    build();
    const resized = new ResizeObserver(() => {
      const width = box.current?.clientWidth;
      if (width && plot.current && width !== plot.current.width) plot.current.setSize({ width, height });
    });
    resized.observe(box.current);
    const themed = new MutationObserver(build);
    themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    return () => { resized.disconnect(); themed.disconnect(); plot.current.destroy(); plot.current = null; };
  }, [series, height, steps]);
  useEffect(() => { plot.current?.setData(data); }, [data]);
  return html`<div class="plot" ref=${box} role="img" aria-label=${label}></div>`;
}

/** A little above the highest value, so that a flat line is not glued to the frame. */
const top = (high) => (high > 0 ? high * 1.15 : 1);

const axisValue = (value) =>
  Math.abs(value) >= 10_000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toPrecision(4)}`;

/** A line of the last values, small enough for a tile. */
export function Sparkline({ values, width = 120, height = 26 }) {
  if (values.length < 2) values = [0, 0];
  const highest = Math.max(...values, 1e-9);
  const step = width / (values.length - 1);
  const points = values.map((each, place) =>
    `${(place * step).toFixed(1)},${(height - 2 - (each / highest) * (height - 4)).toFixed(1)}`);
  return html`<svg class="spark" viewBox=${`0 0 ${width} ${height}`} preserveAspectRatio="none" aria-hidden="true">
    <polygon points=${`0,${height} ${points.join(" ")} ${width},${height}`} />
    <polyline points=${points.join(" ")} />
  </svg>`;
}
