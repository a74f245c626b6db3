import assert from "node:assert/strict";
import { test } from "node:test";

import { escapeDirections } from "shoal/parts/directions.js";
import { h, options } from "shoal/vendor/preact.js";

test("text and tooltips have no characters that reorder letters", () => {
  escapeDirections();
  const text = { type: null, props: "gnp\u202eexe.\u2066m\u2069 \u05d0\u200f!" }; // as Preact makes it
  options.vnode(text);
  assert.equal(text.props, "gnp\\u202eexe.\\u2066m\\u2069 \u05d0\u200f!");
  assert.equal(h("b", { title: "a\u202eb" }).props.title, "a\\u202eb");
  const component = () => null;
  assert.equal(h(component, { name: "a\u202eb" }).props.name, "a\u202eb", "orders name what there is");
});
