// One message of a conversation.

import { h, html, useMemo, useState } from "../vendor/preact.js";
import { renderMarkdown } from "../parts/markdown.js";
import { duration, integer, rate } from "../parts/format.js";
import { Badge, CopyField, Dialog, ErrorNote, Icon, memo, toast } from "../parts/ui.js";
import { isOpen, markedText, openCalls, statsOf } from "./answers.js";
import { curlSnippet, pythonSnippet } from "./snippets.js";

/** A worker's machine: `wire:beagle/qwen3` is on `beagle`. */
export const machineOf = (worker) => {
  const name = worker.split("/")[0];
  return name.slice(name.indexOf(":") + 1) || worker;
};

/** The elements of Markdown, with a button to copy each block of code. */
const element = (tag, props, ...children) =>
  (tag === "pre" ? h(CodeBlock, { language: props["data-language"] }, children) : h(tag, props, ...children));

function CodeBlock({ language, children }) {
  const [box, setBox] = useState(null);
  return html`<div class="code-block">
    <div class="code-head"><span>${language || "text"}</span>
      <button type="button" class="quiet small" onClick=${() => copyText(box.textContent)}>
        <${Icon} name="copy" size=${14} />Copy</button></div>
    <pre ref=${setBox} tabindex="0">${children}</pre>
  </div>`;
}

export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Pages that came over http from another machine have no clipboard.
    const area = document.createElement("textarea");
    area.value = text;
    area.className = "unseen";
    document.body.append(area);
    area.select();
    const copied = document.execCommand("copy");
    area.remove();
    if (!copied) return toast("This browser does not allow copying here.", "bad");
  }
  return toast("Copied");
}

const Takeover = ({ from, worker, attempts }) => html`<span class="takeover"
  title=${`${from} stopped here; ${worker} continued the answer (attempt ${attempts})`}>
  <${Icon} name="swap" size=${13} />${machineOf(worker)} went on</span>`;

const AnswerText = memo(({ text, takeovers }) => {
  const nodes = useMemo(() => {
    const left = takeovers.map((each) => html`<${Takeover} ...${each} />`);
    return renderMarkdown(markedText({ text, takeovers }), element, () => left.shift() ?? "");
  }, [text, takeovers]);
  return html`<div class="md">${nodes}</div>`;
});

export function UserMessage({ message }) {
  return html`<article class="said user" aria-label="You">
    ${message.images.length > 0 && html`<div class="said-images">
      ${message.images.map((each, place) => html`<img src=${each} alt=${`Image ${place + 1} of the question`} />`)}</div>`}
    ${message.text && html`<p class="pre">${message.text}</p>`}
  </article>`;
}

export const ToolMessage = ({ message }) => html`<article class="said tool" aria-label=${`Result of ${message.name}`}>
  <p class="faint">Result of <code>${message.name}</code></p><pre>${message.text}</pre></article>`;

export const Answer = memo(function Answer({ answer, fact, last, onRetry, onResults }) {
  const [code, setCode] = useState(false);
  const open = isOpen(answer);
  const thinking = open && answer.reasoning && !answer.text;
  const numbers = statsOf(answer, answer.last);
  const lost = open && fact?.fact === "JobRequeued";
  return html`<article class="said answer" aria-label=${`Answer of ${answer.body.model}`} aria-busy=${open}>
    ${answer.takeovers.map((each) => html`<p class="takeover-line"><${Icon} name="swap" size=${15} />
      <span>${each.from === each.worker
        ? html`<b>${machineOf(each.from)}</b> was disconnected in the middle of this answer, and continued it.`
        : html`<b>${machineOf(each.from)}</b> stopped in the middle of this answer: <b>${machineOf(each.worker)}</b> took over.`}
        ${answer.state === "done" ? " Nothing is repeated or left out." : ""}</span></p>`)}
    ${answer.reasoning && html`<details class="reasoning">
      <summary>${thinking ? "Thinking …" : "Reasoning"} <span class="faint">${integer(answer.reasoning.length)} characters</span></summary>
      <p class="pre">${answer.reasoning}</p></details>`}
    ${answer.text && html`<${AnswerText} text=${answer.text} takeovers=${answer.takeovers} />`}
    ${answer.calls.map((call) => html`<div class="call"><p><${Icon} name="tool" size=${15} /> calls <code>${call.name}</code></p>
      <pre tabindex="0">${pretty(call.arguments)}</pre></div>`)}
    ${last && answer.state === "done" && answer.calls.length > 0 && html`<${CallResults} calls=${openCalls([answer])} onSend=${onResults} />`}
    ${open && html`<p class="working" role="status"><span class="spinner" aria-hidden="true"></span>
      ${lost ? "Its worker stopped: waiting for another one" : answer.state === "waiting" ? "Waiting for the first token" : "Writing"}
      ${answer.worker && !lost && html` on <b>${machineOf(answer.worker)}</b>`}</p>`}
    ${answer.state === "failed" && html`<${ErrorNote} error=${answer.error} />`}
    ${(answer.state === "stopped" || answer.finish === "length" || answer.finish === "content_filter") && html`<p class="cut">
      ${answer.state === "stopped" ? "Stopped: the job was cancelled."
        : answer.finish === "length" ? "Cut off at the token limit." : "Blocked: it matches the moderation list."}</p>`}
    <footer>
      <${Stats} answer=${answer} numbers=${numbers} />
      ${!open && html`<div class="said-actions">
        ${answer.text && html`<button type="button" class="quiet small" onClick=${() => copyText(answer.text)}><${Icon} name="copy" size=${14} />Copy</button>`}
        <button type="button" class="quiet small" onClick=${() => setCode(true)}><${Icon} name="code" size=${14} />Code</button>
        ${last && html`<button type="button" class="quiet small" onClick=${onRetry}><${Icon} name="again" size=${14} />Again</button>`}
        ${answer.job && html`<a class="small-link" href=${`#/jobs/${encodeURIComponent(answer.job)}`}>Timeline</a>`}
        ${answer.job && answer.state === "done" && html`<a class="small-link" href=${`#/receipts/${encodeURIComponent(answer.job)}`}>Receipt</a>`}
      </div>`}
    </footer>
    ${code && html`<${Snippets} body=${answer.body} onClose=${() => setCode(false)} />`}
  </article>`;
});

function Stats({ answer, numbers }) {
  const { tokens, exact, perSecond, firstAfter, prompt } = numbers;
  return html`<dl class="said-stats">
    ${tokens !== null && html`<div title=${exact ? `${integer(prompt)} tokens in the prompt` : "estimated from the parts received"}>
      <dt>${tokens === 1 ? "token" : "tokens"}</dt><dd data-stat="tokens">${exact ? "" : "≈ "}${integer(tokens)}</dd></div>`}
    ${perSecond !== null && html`<div title="after the first token"><dt>tokens/s</dt><dd data-stat="rate">${exact ? "" : "≈ "}${rate(perSecond)}</dd></div>`}
    ${firstAfter !== null && html`<div title="time to the first token"><dt>time to first token</dt><dd data-stat="first">${duration(firstAfter)}</dd></div>`}
    ${answer.worker && html`<div title=${`worker ${answer.worker}`}><dt>on</dt><dd data-stat="worker">${machineOf(answer.worker)}</dd></div>`}
    ${answer.attempts > 1 && html`<div title="attempts so far, each on a worker"><dt class="unseen">attempts</dt><dd><${Badge} tone="warn">attempt ${answer.attempts}<//></dd></div>`}
  </dl>`;
}

/** Fields for the results of the tools that the model called. */
function CallResults({ calls, onSend }) {
  const [texts, setTexts] = useState(calls.map(() => ""));
  const send = (event) => {
    event.preventDefault();
    onSend(calls.map(({ id, name }, place) => ({ id, name, text: texts[place] })));
  };
  return html`<form class="results" onSubmit=${send}>
    ${calls.map((call, place) => html`<label class="field">Result of ${call.name}
      <textarea rows="2" placeholder='What the tool returns, such as {"celsius": 21}' value=${texts[place]}
        onInput=${(event) => setTexts(texts.map((text, at) => (at === place ? event.target.value : text)))}></textarea></label>`)}
    <button type="submit" class="primary small">Send ${calls.length > 1 ? "the results" : "the result"}</button>
  </form>`;
}

const IMAGE_SHOWN = 20_000; // characters of an image in a snippet

function Snippets({ body, onClose }) {
  const [language, setLanguage] = useState("curl");
  const shown = JSON.parse(JSON.stringify(body, (_, value) =>
    (typeof value === "string" && value.startsWith("data:") && value.length > IMAGE_SHOWN ? `${value.slice(0, 40)}…` : value)));
  const snippet = (language === "curl" ? curlSnippet : pythonSnippet)(location.origin, shown);
  return html`<${Dialog} title="This request as code" wide onClose=${onClose}>
    <div class="segments">${["curl", "Python"].map((each) => html`<button type="button"
      aria-pressed=${each === language} onClick=${() => setLanguage(each)}>${each}</button>`)}</div>
    <p class="hint">Put one of your keys into the variable <code>SHOAL_API_KEY</code> first.</p>
    <div class="snippet"><${CopyField} text=${snippet} key=${language} /></div>
  <//>`;
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}
