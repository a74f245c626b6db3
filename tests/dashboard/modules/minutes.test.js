import assert from "node:assert/strict";
import { test } from "node:test";

import { beforePage } from "shoal/parts/minutes.js";

const MINUTES = [
  { at: 600, jobs: 6, tokens: 120, running: 1, queued: 0 },
  { at: 720, jobs: 0, tokens: 60, running: 4, queued: 9 },
];

test("minutes before the page are rates, also those without a job", () => {
  assert.deepEqual(beforePage(MINUTES, 800, 180), [[630, 690, 750], [2, 0, 1], [0.1, 0, 0], [1, 0, 4], [0, 0, 9]]);
});

test("the page's own minute, and what is too old, are left out", () => {
  assert.deepEqual(beforePage(MINUTES, 779, 180), [[630, 690], [2, 0], [0.1, 0], [1, 0], [0, 0]]);
  assert.deepEqual(beforePage(MINUTES, 780, 1), [[750], [1], [0], [4], [9]]);
  assert.deepEqual(beforePage([], 800, 180), [[], [], [], [], []]);
});
