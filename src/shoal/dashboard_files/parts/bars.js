// Stacked bars, one for each day.

import { html, useEffect, useRef, useState } from "../vendor/preact.js";

const HEIGHT = 220; // px
const LEFT = 52;
const BOTTOM = 24;
export const COLOURS = 7; // `--series-1` to `--series-7`; what is beyond shares the last

/** A round number at or above a value, for the top of an axis. */
export function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= value);
}

/**
 * `days`: their names, in order. `series`: [{name, values}], from the bottom; a value for
 * each day. `format` writes a value, `tick` one of the axis.
 */
export function Bars({ days, series, format, tick, label }) {
  const box = useRef(null);
  const [width, setWidth] = useState(600);
  const [at, setAt] = useState(null); // the day under the pointer, or chosen by keys
  useEffect(() => {
    const resized = new ResizeObserver(() => setWidth(box.current.clientWidth || 600));
    resized.observe(box.current);
    return () => resized.disconnect();
  }, []);
  const sums = days.map((_, day) => series.reduce((sum, { values }) => sum + values[day], 0));
  const top = ceiling(Math.max(...sums, 0));
  const plot = { width: width - LEFT - 4, height: HEIGHT - BOTTOM - 8 };
  const step = plot.width / Math.max(1, days.length);
  const bar = Math.max(1, Math.min(40, step * 0.72));
  const y = (value) => 8 + plot.height * (1 - value / top);
  const every = Math.ceil(days.length / Math.max(1, Math.floor(plot.width / 64)));
  const find = (event) => {
    const place = Math.floor((event.clientX - box.current.getBoundingClientRect().left - LEFT) / step);
    setAt(place >= 0 && place < days.length ? place : null);
  };
  const pressed = (event) => {
    const moved = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!moved) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(days.length - 1, at === null ? days.length - 1 : at + moved)));
  };
  const tip = at !== null && at < days.length;
  return html`<div class="day-bars" ref=${box} role="img" aria-label=${label} tabindex="0" onKeyDown=${pressed} onBlur=${() => setAt(null)}
    onPointerMove=${find} onPointerDown=${find} onPointerLeave=${() => setAt(null)}>
    <svg width=${width} height=${HEIGHT} aria-hidden="true" focusable="false">
      ${[0, 0.25, 0.5, 0.75, 1].map((share) => html`<g>
        <line x1=${LEFT} x2=${width} y1=${y(top * share)} y2=${y(top * share)} />
        <text x=${LEFT - 8} y=${y(top * share) + 4} text-anchor="end">${tick(top * share)}</text></g>`)}
      ${days.map((day, place) => {
        let below = 0;
        const x = LEFT + step * place + (step - bar) / 2;
        return html`<g key=${day} class=${tip && at !== place ? "aside" : undefined}>
          ${series.map(({ values }, number) => {
            const value = values[place];
            if (!value) return null;
            below += value;
            const height = Math.max(1, (plot.height * value) / top);
            return html`<rect class=${`series-${Math.min(number + 1, COLOURS)}`} x=${x} y=${y(below)} width=${bar} height=${height} />`;
          })}
          ${place % every === 0 && html`<text x=${x + bar / 2} y=${HEIGHT - 6} text-anchor="middle">${day.slice(5)}</text>`}
        </g>`;
      })}
    </svg>
    ${tip && html`<div class=${`day-tip ${at > days.length / 2 ? "left" : ""}`} style=${{ left: `${LEFT + step * (at + 0.5)}px` }}>
      <b>${days[at]}</b> ${format(sums[at])}
      <ul>${series.map(({ name, values }, number) => [name, values[at], number]).filter(([, value]) => value).reverse().map(([name, value, number]) =>
        html`<li><i class=${`series-${Math.min(number + 1, COLOURS)}`}></i><span>${name}</span><b>${format(value)}</b></li>`)}</ul>
    </div>`}
  </div>`;
}
