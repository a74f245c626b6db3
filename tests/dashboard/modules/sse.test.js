import assert from "node:assert/strict";
import { test } from "node:test";

import { sseEvents } from "shoal/parts/sse.js";

const TEXT =
  ": keep-alive\n\nevent: facts\ndata: [1]\ndata: [2]\n\ndata:{\"é\":1}\r\n\r\ndata: lost";

async function read(pieces) {
  const stream = new ReadableStream({
    start(controller) {
      pieces.forEach((piece) => controller.enqueue(piece));
      controller.close();
    },
  });
  const found = [];
  for await (const each of sseEvents(stream)) {
    found.push(each);
  }
  return found;
}

test("events are the same whatever pieces they come in", async () => {
  const data = new TextEncoder().encode(TEXT);
  for (const size of [1, 2, 3, 7, data.length]) {
    const pieces = [];
    for (let at = 0; at < data.length; at += size) {
      pieces.push(data.slice(at, at + size));
    }
    assert.deepEqual(await read(pieces), [
      { event: "", data: null, comment: "keep-alive" },
      { event: "facts", data: "[1]\n[2]", comment: null },
      { event: "message", data: '{"é":1}', comment: null },
    ]);
  }
});

test("a consumer that stops closes the connection", async () => {
  let cancelled = false;
  const stream = new ReadableStream({
    pull: (controller) => controller.enqueue(new TextEncoder().encode("data: 1\n\n")),
    cancel: () => {
      cancelled = true;
    },
  });
  for await (const each of sseEvents(stream)) {
    assert.equal(each.data, "1");
    break;
  }
  assert.ok(cancelled);
});
