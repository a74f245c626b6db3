// Sums of usage, for a plot and a table. Pure; a day is a text such as 2026-11-23.

const DAY = 86_400_000; // ms

/** The day of Unix milliseconds, in UTC as the coordinator counts. */
export const dayOf = (millis) => new Date(millis).toISOString().slice(0, 10);

/** All days from one to another, both included. */
export function daysBetween(since, until) {
  const days = [];
  for (let at = Date.parse(since); at <= Date.parse(until); at += DAY) days.push(dayOf(at));
  return days;
}

const FIELDS = ["requests", "prompt_tokens", "completion_tokens", "cost"];

/** What a metric is of a row. */
export const METRICS = {
  tokens: (row) => row.prompt_tokens + row.completion_tokens,
  requests: (row) => row.requests,
  cost: (row) => row.cost,
};

/** Rows with the same value of `field` added up; the largest first. */
export function sumsBy(rows, field, metric = "tokens") {
  const sums = new Map();
  for (const row of rows) {
    const name = row[field] ?? "";
    const sum = sums.get(name) ?? { name, requests: 0, prompt_tokens: 0, completion_tokens: 0, cost: 0 };
    for (const each of FIELDS) sum[each] += row[each];
    sums.set(name, sum);
  }
  return [...sums.values()].sort((a, b) => METRICS[metric](b) - METRICS[metric](a));
}

export const total = (rows) => sumsBy(rows.map((row) => ({ ...row, all: "all" })), "all")[0]
  ?? { requests: 0, prompt_tokens: 0, completion_tokens: 0, cost: 0 };

/** The series of a plot: the largest by name, and `others` for those beyond `most`. */
export function seriesOf(rows, field, metric, days, most) {
  const value = METRICS[metric];
  const place = new Map(days.map((day, at) => [day, at]));
  const names = sumsBy(rows, field, metric).filter((sum) => value(sum) > 0).map(({ name }) => name);
  const kept = names.length > most ? names.slice(0, most - 1) : names;
  const series = kept.map((name) => ({ name, values: days.map(() => 0) }));
  const others = { name: `${names.length - kept.length} others`, values: days.map(() => 0) };
  if (kept.length < names.length) series.push(others);
  const byName = new Map(series.map((each) => [each.name, each]));
  for (const row of rows) {
    const at = place.get(row.day);
    if (at !== undefined) (byName.get(row[field] ?? "") ?? others).values[at] += value(row);
  }
  return series;
}
