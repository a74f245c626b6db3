import assert from "node:assert/strict";
import { test } from "node:test";

import { MARK, renderMarkdown } from "shoal/parts/markdown.js";

const h = (type, props, ...children) => ({ type, props: { ...props, children } });

/** Elements in a short form: [tag, props, ...children]. */
function short(node) {
  if (typeof node === "string") return node;
  const { children, ...props } = node.props;
  const inner = children.flat(Infinity).map(short);
  return Object.keys(props).length ? [node.type, props, ...inner] : [node.type, ...inner];
}
const rendered = (text, mark) => renderMarkdown(text, h, mark).map(short);
const paragraph = (text) => rendered(text)[0].slice(1);

const OUT = { target: "_blank", rel: "noopener noreferrer" };

test("blocks", () => {
  assert.deepEqual(rendered("# Title\n\none\ntwo\n\n---\n> said\n> so"), [
    ["h3", "Title"], ["p", "one", ["br"], "two"], ["hr"], ["blockquote", ["p", "said", ["br"], "so"]],
  ]);
  assert.deepEqual(rendered("```py\na < b\n\n**x**\n```\nafter"), [
    ["pre", { "data-language": "py" }, ["code", "a < b\n\n**x**"]], ["p", "after"],
  ]);
  assert.deepEqual(rendered("~~~\nnot yet closed"), [["pre", ["code", "not yet closed"]]]);
  assert.deepEqual(rendered("| a | b |\n|---|--:|\n| 1 | **2** |"), [["div", { class: "md-table" }, ["table",
    ["thead", ["tr", ["th", "a"], ["th", { class: "end" }, "b"]]],
    ["tbody", ["tr", ["td", "1"], ["td", { class: "end" }, ["strong", "2"]]]]]]]);
});

test("a heading may be closed, a fence has a language, and a row has what is written", () => {
  assert.deepEqual(rendered("## a # b ##\n#\n# #"), [["h4", "a # b"], ["p", "#"], ["h3"]]);
  assert.deepEqual(rendered("````js {1}\n```\n````"), [["pre", { "data-language": "js" }, ["code", "```"]]]);
  assert.deepEqual(rendered("- \n-   b\n-c"), [["ul", ["li"], ["li", "b", ["br"], "-c"]]]);
  const [[, , [, , [, ...body]]]] = rendered("a | b | c\n:-: | - | --\n1\\|2|3\n|||||");
  assert.deepEqual(body, [["tr", ["td", { class: "end" }, "1|2"], ["td", "3"]], ["tr", ["td", { class: "end" }], ["td"], ["td"]]]);
});

test("a line under bars is no table without bars of its own", () => {
  assert.deepEqual(rendered("a|b\n---"), [["p", "a|b"], ["hr"]]);
});

test("lists", () => {
  assert.deepEqual(rendered("- a\n- b\n  - c\n    - d\n- e"), [["ul", ["li", "a"],
    ["li", "b", ["ul", ["li", "c", ["ul", ["li", "d"]]]]], ["li", "e"]]]);
  assert.deepEqual(rendered("3. x\n4. y"), [["ol", { start: 3 }, ["li", "x"], ["li", "y"]]]);
  assert.deepEqual(rendered("1. x\n\n2. y\n\nend"), [["ol", { class: "loose" }, ["li", "x"], ["li", "y"]], ["p", "end"]]);
  assert.deepEqual(rendered("- a\n\n  ```\n  code\n  ```"), [["ul", ["li", "a", ["pre", ["code", "code"]]]]]);
  assert.deepEqual(rendered("* one\n1. two"), [["ul", ["li", "one"]], ["ol", ["li", "two"]]]);
});

test("emphasis and code in a line", () => {
  assert.deepEqual(paragraph("a **b _c_** `d **e**` ~~f~~"),
    ["a ", ["strong", "b ", ["em", "c"]], " ", ["code", "d **e**"], " ", ["del", "f"]]);
  assert.deepEqual(paragraph("2 * 3 * 4 and snake_case_name and **open"), ["2 * 3 * 4 and snake_case_name and **open"]);
  assert.deepEqual(paragraph("\\*not\\*"), ["*", "not", "*"]);
});

test("links lead to http and https only", () => {
  assert.deepEqual(paragraph("[a](https://b.example/c_(d)) <http://e.example>"),
    [["a", { href: "https://b.example/c_(d)", ...OUT }, "a"], " ", ["a", { href: "http://e.example", ...OUT }, "http://e.example"]]);
  assert.deepEqual(paragraph("see https://a.example/b."), ["see ", ["a", { href: "https://a.example/b", ...OUT }, "https://a.example/b"], "."]);
  for (const text of ["[a](javascript:alert(1))", "[a](data:text/html,x)", "[a](/etc)", "[a](vbscript:x)", "<script>alert(1)</script>",
    "![x](javascript:alert(1))", "<img src=x onerror=alert(1)>"]) {
    assert.deepEqual(JSON.stringify(rendered(text)).match(/"href"|"script"|"img"/), null, text);
    assert.equal(paragraph(text).join(""), text);
  }
  // An image is a link: the page loads nothing from elsewhere.
  assert.deepEqual(paragraph("![fish](https://a.example/f.png)"), [["a", { href: "https://a.example/f.png", ...OUT }, "fish"]]);
});

test("marks are replaced wherever they are", () => {
  let count = 0;
  const mark = () => `<${++count}>`;
  assert.deepEqual(rendered(`a **b${MARK}c**\n\n\`\`\`\nd${MARK}e\n\`\`\``, mark),
    [["p", "a ", ["strong", "b", "<1>", "c"]], ["pre", ["code", "d", "<2>", "e"]]]);
});

test("no text is quadratic", () => {
  for (const piece of ["*", "**a", "`", "[", "[a](", "_a ", "~~x", "<http://", "> ", "- ", "|a|", "#", "\n\n", "``` ", "1. a\n", "  - a\n ", "- a\n\n", "|a|\n|-|\n"]) {
    assert.ok(rendered(`x\n\n${piece.repeat(20_000)}`).length > 0); // or it takes minutes
  }
  const long = (piece) => piece.repeat(100_000);
  for (const line of [`# x${long(" ")}x`, `# ${long("#")}x`, `\`\`\`${long("x")}\``, `${long("~")}\``, `${long("`")}x\``, long(" "),
    `-${long(" ")}x\u2028`, `-${long(" ")}`, `${long("- ")}x`, `${long(" ")}x`, `${long(" ")}|x`]) {
    for (const text of [line, `text\n${line}`, `a|b\n${line}`, `a|b\n|-|-|\n${line}|`, `- x\n  ${line}`]) rendered(text); // or it takes minutes
  }
  rendered(`${long("|")}\n|-|\n${"|\n".repeat(20_000)}`); // or it has no memory
});
