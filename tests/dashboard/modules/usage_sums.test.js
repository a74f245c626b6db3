import assert from "node:assert/strict";
import { test } from "node:test";

import { daysBetween, seriesOf, sumsBy, total } from "shoal/parts/usage_sums.js";

const row = (day, model, tokens, cost = 0) => ({ day, model, requests: 1, prompt_tokens: tokens, completion_tokens: 0, cost });
const ROWS = [row("2026-02-27", "a", 5), row("2026-02-28", "b", 7, 3), row("2026-03-01", "a", 4), row("2026-03-01", "c", 1)];

test("days pass the ends of months, and leap years", () => {
  assert.deepEqual(daysBetween("2026-02-27", "2026-03-01"), ["2026-02-27", "2026-02-28", "2026-03-01"]);
  assert.equal(daysBetween("2028-02-28", "2028-03-01").length, 3);
  assert.deepEqual(daysBetween("2026-03-02", "2026-03-01"), []);
});

test("sums are sorted by what is shown", () => {
  assert.deepEqual(sumsBy(ROWS, "model").map(({ name, prompt_tokens: tokens }) => [name, tokens]), [["a", 9], ["b", 7], ["c", 1]]);
  assert.deepEqual(sumsBy(ROWS, "model", "cost")[0].name, "b");
  assert.deepEqual(total(ROWS).prompt_tokens, 17);
  assert.deepEqual(total([]).requests, 0);
});

test("a plot has a value for each day, and joins the small ones", () => {
  const days = daysBetween("2026-02-27", "2026-03-01");
  assert.deepEqual(seriesOf(ROWS, "model", "tokens", days, 3), [
    { name: "a", values: [5, 0, 4] }, { name: "b", values: [0, 7, 0] }, { name: "c", values: [0, 0, 1] }]);
  assert.deepEqual(seriesOf(ROWS, "model", "tokens", days, 2), [
    { name: "a", values: [5, 0, 4] }, { name: "2 others", values: [0, 7, 1] }]);
});
