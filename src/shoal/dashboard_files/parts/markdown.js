// Renders the Markdown that models write as elements, never as HTML: what is not known
// here stays text, and links lead to http and https only.

// Each of these takes linear time: a worker writes the text, of any length in a line.
const FENCE = /^ {0,3}(`{3,}(?!`)|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s([^]*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(?:\s([^]*)|)$/;
const QUOTE = /^ {0,3}> ?/;
const RULE_CELL = /^:?-+:?$/;
const LINK = /^https?:\/\/[^\s]+$/i;
const DEPTH_MAX = 20; // lists and quotes in each other

/** The character that stands for a mark in the text: see `renderMarkdown`. */
export const MARK = "\uE000";

/**
 * The elements of a text, made by `h(tag, props, ...children)`. Each `MARK` in the text
 * becomes the next of the elements that `mark()` returns.
 */
export function renderMarkdown(text, h, mark = () => "") {
  const context = { h, mark };
  return blocks(context, text.replace(/\r\n?/g, "\n").split("\n"), 0);
}

function blocks(context, lines, depth) {
  const { h } = context;
  const found = [];
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    let match;
    if (!line.trim()) {
      at += 1;
    } else if ((match = FENCE.exec(line))) {
      const [, fence, information] = match;
      const [language] = information.trim().split(/\s/, 1);
      const end = closing(lines, at + 1, fence);
      const code = lines.slice(at + 1, end).join("\n");
      found.push(h("pre", language ? { "data-language": language } : {},
        h("code", {}, ...marked(context, code))));
      at = end + 1;
    } else if ((match = HEADING.exec(line))) {
      // The page has its own h1 and h2.
      found.push(h(`h${Math.min(6, match[1].length + 2)}`, {}, ...inline(context, titleOf(match[2]))));
      at += 1;
    } else if (RULE.test(line)) {
      found.push(h("hr", {}));
      at += 1;
    } else if (QUOTE.test(line) && depth < DEPTH_MAX) {
      const end = until(lines, at, (each) => QUOTE.test(each));
      const inner = lines.slice(at, end).map((each) => each.replace(QUOTE, ""));
      found.push(h("blockquote", {}, ...blocks(context, inner, depth + 1)));
      at = end;
    } else if (ITEM.test(line) && depth < DEPTH_MAX) {
      const [list, end] = listOf(context, lines, at, depth);
      found.push(list);
      at = end;
    } else if (line.includes("|") && isTableRule(lines[at + 1] ?? "")) {
      const end = until(lines, at, (each) => each.includes("|"));
      found.push(tableOf(context, lines.slice(at, end)));
      at = end;
    } else {
      const end = until(lines, at + 1, (each, place) => !begins(each, lines[place + 1]));
      found.push(h("p", {}, ...inline(context, lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return found;
}

/** Whether a line ends the paragraph before it. */
const begins = (line, next = "") =>
  !line.trim() || FENCE.test(line) || HEADING.test(line) || QUOTE.test(line) || ITEM.test(line)
  || RULE.test(line) || (line.includes("|") && isTableRule(next));

const isTableRule = (line) =>
  line.includes("|") && cellsOf(line).every((cell) => RULE_CELL.test(cell));

/** The text of a heading, without the marks that may close it. */
function titleOf(text) {
  const title = text.trim();
  let end = title.length;
  while (title[end - 1] === "#") end -= 1;
  return title.slice(0, end).trimEnd();
}

function until(lines, at, belongs) {
  let end = at;
  while (end < lines.length && belongs(lines[end], end)) end += 1;
  return end;
}

/** Where a block of code ends; one that is still being written ends with the text. */
function closing(lines, at, fence) {
  const end = lines.findIndex((line, place) =>
    place >= at && line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], ""));
  return end < 0 ? lines.length : end;
}

function listOf(context, lines, at, depth) {
  const { h } = context;
  const ordered = (bullet) => /\d/.test(bullet);
  const [, indent, first] = ITEM.exec(lines[at]);
  const items = [];
  let loose = false;
  while (at < lines.length) {
    const match = ITEM.exec(lines[at]);
    if (!match || match[1].length > indent.length + 1 || ordered(match[2]) !== ordered(first)
      || match[1].length < indent.length || RULE.test(lines[at])) break;
    const inside = indent.length + match[2].length + 1;
    const content = [(match[3] ?? "").trimStart()];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const deep = line.search(/\S/);
      if (deep < 0) {
        const next = until(lines, at, (each) => !each.trim());
        if ((lines[next] ?? "").search(/\S/) < Math.min(inside, indent.length + 2)) break;
        content.push("");
      } else if (deep >= Math.min(inside, indent.length + 2)) {
        content.push(line.slice(Math.min(inside, deep)));
      } else if (ITEM.test(line) || begins(line, lines[at + 1])) {
        break;
      } else {
        content.push(line.trim());
      }
      at += 1;
    }
    const inner = blocks(context, content, depth + 1);
    // A text alone stands in the item itself, without the space around a paragraph.
    items.push(h("li", {}, ...inner.flatMap((each, place) =>
      place === 0 && each.type === "p" ? childrenOf(each) : [each])));
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) {
      loose = true;
      at += 1;
    }
  }
  const number = Number.parseInt(first, 10);
  const props = { ...(loose ? { class: "loose" } : {}), ...(number > 1 ? { start: number } : {}) };
  return [h(ordered(first) ? "ol" : "ul", props, ...items), at];
}

/** The children of an element of Preact, or of the tests'. */
const childrenOf = (element) => [element.props.children ?? []].flat();

/** The cells of a table's line. */
const cellsOf = (line) =>
  line.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim());

function tableOf(context, lines) {
  const { h } = context;
  const [head, rule, ...rows] = lines.map(cellsOf);
  // No more cells than are written: a wide head over many short rows would be too many.
  const cells = (tag, row) => h("tr", {}, ...row.slice(0, head.length).map((cell, place) =>
    h(tag, (rule[place] ?? "").endsWith(":") ? { class: "end" } : {},
      ...inline(context, cell.replaceAll("\\|", "|")))));
  return h("div", { class: "md-table" }, h("table", {},
    h("thead", {}, cells("th", head)), h("tbody", {}, ...rows.map((row) => cells("td", row)))));
}

// In this order; the lengths are bounded so that no text takes quadratic time.
const INLINE = new RegExp([
  "\\\\([\\\\`*_{}\\[\\]()#+.!|~>-])",
  "(?<ticks>`{1,3})(?!`)(?<code>[^]{1,2000}?)(?<!`)\\k<ticks>(?!`)",
  "\\*\\*(?=\\S)(?<strong>[^]{0,2000}?\\S)\\*\\*",
  "(?<!\\w)__(?=\\S)(?<strong2>[^]{0,2000}?\\S)__(?!\\w)",
  "~~(?=\\S)(?<struck>[^]{0,2000}?\\S)~~",
  "\\*(?=[^\\s*])(?<em>[^*]{1,2000}?)(?<![\\s*])\\*(?!\\*)",
  "(?<!\\w)_(?=\\S)(?<em2>[^_]{1,2000}?)(?<!\\s)_(?!\\w)",
  "!?\\[(?<label>[^\\]\\n]{1,500})\\]\\((?<target>[^\\s()]{1,2000}(?:\\([^\\s()]{0,200}\\)[^\\s()]{0,200})?)(?:\\s+\"[^\"\\n]{0,200}\")?\\)",
  "<(?<angled>https?:\\/\\/[^\\s<>]{1,2000})>",
  "(?<bare>https?:\\/\\/[^\\s<>()\\[\\]*`\"]{1,2000}[^\\s<>()\\[\\]*`\".,:;!?'])",
  "(?<end>\\n)",
].join("|"), "gi");

function inline(context, text, depth = 0) {
  const { h } = context;
  const found = [];
  let before = 0;
  for (const match of text.matchAll(INLINE)) {
    const { code, strong, strong2, struck, em, em2, label, target, angled, bare, end } = match.groups;
    const inner = (part) => (depth < 6 ? inline(context, part, depth + 1) : [part]);
    found.push(...marked(context, text.slice(before, match.index)));
    before = match.index + match[0].length;
    if (match[1]) found.push(match[1]);
    else if (code !== undefined) found.push(h("code", {}, ...marked(context, code)));
    else if (strong ?? strong2) found.push(h("strong", {}, ...inner(strong ?? strong2)));
    else if (struck) found.push(h("del", {}, ...inner(struck)));
    else if (em ?? em2) found.push(h("em", {}, ...inner(em ?? em2)));
    else if (label) found.push(...link(context, target, inner(label), match[0]));
    else if (angled ?? bare) found.push(...link(context, angled ?? bare, [angled ?? bare], match[0]));
    else if (end) found.push(h("br", {}));
  }
  found.push(...marked(context, text.slice(before)));
  return found;
}

function link({ h }, target, children, source) {
  if (!LINK.test(target)) return [source]; // javascript:, data: and the like stay text
  return [h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, ...children)];
}

/** A text in which each MARK is replaced. */
function marked({ mark }, text) {
  const parts = text.split(MARK);
  const found = parts[0] ? [parts[0]] : [];
  for (const part of parts.slice(1)) found.push(mark(), ...(part ? [part] : []));
  return found;
}
