// Values as people read them.  Pure functions; times are Unix seconds.

const LOCALE = "en";
const whole = new Intl.NumberFormat(LOCALE, { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat(LOCALE, { minimumFractionDigits: 1, maximumFractionDigits: 1 });
const compact = new Intl.NumberFormat(LOCALE, { notation: "compact", maximumFractionDigits: 1 });

export const NONE = "–"; // an unknown or absent value

export const integer = (value) => (value == null ? NONE : whole.format(value));

/** 1234567 → 1.2M; small numbers in full. */
export const short = (value) =>
  value == null ? NONE : Math.abs(value) < 10_000 ? whole.format(value) : compact.format(value);

/** A rate: one decimal below 100. */
export const rate = (value) =>
  value == null ? NONE : value === 0 ? "0" : value < 100 ? tenths.format(value) : short(value);

export const percent = (value) => (value == null ? NONE : `${Math.round(value)} %`);
export const celsius = (value) => (value == null ? NONE : `${Math.round(value)} °C`);

/** Bytes, in the units of 10^3 that the coordinator uses. */
export function bytes(value) {
  if (value == null) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) { value /= 1000; unit += 1; }
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** Micro-dollars as dollars. */
export function dollars(micros) {
  if (micros == null) return NONE;
  const value = Math.abs(micros) / 1e6;
  const digits = value === 0 || value >= 1 ? 2 : value >= 0.01 ? 4 : 6;
  return `${micros < 0 ? "−" : ""}$${value.toLocaleString(LOCALE,
    { minimumFractionDigits: 2, maximumFractionDigits: digits })}`;
}

/** A span of seconds: 0.3 s, 42 s, 5 min 3 s, 2 h 10 min, 3 d 4 h. */
export function duration(seconds) {
  if (seconds == null) return NONE;
  if (seconds < 0.0995) return `${Math.max(0, Math.round(seconds * 1000))} ms`;
  if (seconds < 9.95) return `${seconds.toFixed(1)} s`;
  const s = Math.round(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return pair(Math.floor(s / 60), "min", s % 60, "s");
  const minutes = Math.floor(s / 60);
  if (minutes < 1440) return pair(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.floor(minutes / 60);
  return pair(Math.floor(hours / 24), "d", hours % 24, "h");
}

function pair(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

/** How long ago: now, 5 s ago, 3 min ago, 2 h ago, 4 d ago. */
export function ago(at, now = Date.now() / 1000) {
  if (at == null) return NONE;
  const seconds = now - at;
  if (Math.abs(seconds) < 1) return "now";
  const size = Math.abs(seconds);
  const text = size < 60 ? `${Math.round(size)} s`
    : size < 3600 ? `${Math.floor(size / 60)} min`
    : size < 86400 ? `${Math.floor(size / 3600)} h`
    : `${Math.floor(size / 86400)} d`;
  return seconds < 0 ? `in ${text}` : `${text} ago`;
}

const two = (value) => String(value).padStart(2, "0");

/** The time of day, with milliseconds if wanted. */
export function clock(at, millis = false) {
  const d = new Date(at * 1000);
  const text = `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
  return millis ? `${text}.${String(d.getMilliseconds()).padStart(3, "0")}` : text;
}

/** The day: 2026-11-23. */
export function day(at) {
  const d = new Date(at * 1000);
  return `${d.getFullYear()}-${two(d.getMonth() + 1)}-${two(d.getDate())}`;
}

/** The exact time with its zone, for titles. */
export function exact(at) {
  if (at == null) return "";
  const zone = Intl.DateTimeFormat(LOCALE, { timeZoneName: "short" })
    .formatToParts(new Date(at * 1000)).find((part) => part.type === "timeZoneName")?.value || "";
  return `${day(at)} ${clock(at, true)} ${zone}`;
}

export const plural = (count, noun, nouns = `${noun}s`) =>
  `${integer(count)} ${count === 1 ? noun : nouns}`;

/** The start of a long id, as `shoal` prints it. */
export const shortId = (id, size = 12) => (id.length > size ? `${id.slice(0, size)}…` : id);

/** A worker's name without its wire and its part. */
export const plainName = (id) => id.slice(id.indexOf(":") + 1);

const FEATURES = {
  choices: "several choices", code: "sent functions", continue: "continues answers", fields: "other fields",
  logprobs: "log probabilities", options: "logit bias", schema: "JSON schemas", stop: "stop strings", values: "arrays",
};

/** A feature of a model or a worker in words; the API has its name (docs/api.md#models). */
export const featureName = (name) => FEATURES[name] || name;
