// The playground: one question to one or several models, side by side.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { api as pageApi } from "../parts/api.js";
import { featureName, integer, plural } from "../parts/format.js";
import { Empty, ErrorNote, Head, Icon, Loading, toast, useLoaded } from "../parts/ui.js";
import { isOpen, openCalls, readTools, TOOLS_EXAMPLE } from "../playground/answers.js";
import { Answer, ToolMessage, UserMessage } from "../playground/answer.js";
import { COLUMNS_MAX, createStore, NO_SETTINGS } from "../playground/store.js";

const IMAGES_MAX = 12 * 2 ** 20; // characters of all images of a message: a body has 16 MiB

// One for the page: answers go on while other views are open.
const store = createStore(
  pageApi,
  () => performance.now() / 1000,
  (show) => (document.hidden ? setTimeout(show, 200) : requestAnimationFrame(show)),
  (seconds) => new Promise((done) => { setTimeout(done, seconds * 1000); }),
);

const SAID = { // to screen readers, at the end of an answer
  done: (model) => `${model} has answered`,
  failed: (model) => `The answer of ${model} failed`,
  stopped: (model) => `The answer of ${model} was stopped`,
};

function useStore(owner) {
  store.belongTo(owner);
  const [state, setState] = useState(store.state);
  useEffect(() => {
    setState(store.state);
    return store.subscribe(setState);
  }, []);
  return state;
}

export default function Playground({ api, live, session, route }) {
  const { columns, settings } = useStore(session.name);
  const [openSettings, setOpenSettings] = useState(false);
  const offered = live.status?.models?.length ?? 0;
  const [listed, error, reload] = useLoaded(() => api.get("/v1/models"), [offered]);
  const models = listed?.data.filter(({ kinds }) => kinds.includes("chat"));

  // A column without a model gets one: that of the address first.
  useEffect(() => {
    if (!models?.length) return;
    const wanted = models.find(({ id }) => id === route.query.get("model"));
    if (wanted && columns.length === 1 && !columns[0].messages.length) store.setModel(columns[0].id, wanted.id);
    for (const { id, model } of columns) if (!model) store.setModel(id, (wanted ?? models[0]).id);
  }, [listed, route.query.get("model"), columns.length]);

  if (error && !listed) return html`<${Head} title="Playground" /><${ErrorNote} error=${error} retry=${reload} />`;
  if (!listed) return html`<${Head} title="Playground" /><${Loading} what="Asking for the models" />`;
  const used = columns.some(({ messages }) => messages.length);
  if (!models.length && !used) {
    return html`<${Head} title="Playground" /><${Empty} title="No chat model yet">
      <p>The pool has no worker with such a model. Start one on this machine with <code>shoal join</code>, or add another
        machine: <a href="#/nodes">Nodes</a> shows the command.</p>
      <p><button type="button" onClick=${reload}>Look again</button></p><//>`;
  }
  const set = Object.keys(NO_SETTINGS).filter((name) => name !== "tools" && settings[name] !== "").length;
  const next = models.find(({ id }) => columns.every((each) => each.model !== id)) ?? models[0];
  return html`<div class="playground">
    <${Head} title="Playground">
      <button type="button" aria-expanded=${openSettings} aria-controls="chat-settings" onClick=${() => setOpenSettings(!openSettings)}>
        <${Icon} name="sliders" size=${16} />Settings${set > 0 && html` <span class="count">${set}</span>`}</button>
      <button type="button" disabled=${columns.length >= COLUMNS_MAX || !next} onClick=${() => store.addColumn(next.id)}
        title="Ask another model, too"><${Icon} name="plus" size=${16} />Add a model</button>
      <button type="button" disabled=${!used} onClick=${store.clear}><${Icon} name="remove" size=${16} />Clear</button>
    <//>
    ${openSettings && html`<${Settings} settings=${settings} models=${models} columns=${columns} />`}
    <div class="columns" data-columns=${columns.length}>
      ${columns.map((column) => html`<${Column} key=${column.id} column=${column} models=${models}
        facts=${live.facts} alone=${columns.length === 1} />`)}
    </div>
    <${Composer} columns=${columns} models=${models} />
  </div>`;
}

function Column({ column, models, facts, alone }) {
  const { id, model, messages } = column;
  const box = useRef(null);
  const follows = useRef(true); // whether its end is in sight
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current;
    follows.current = scrollHeight - scrollTop - clientHeight < 40;
  };
  useLayoutEffect(() => {
    if (messages.at(-1)?.role === "user" || messages.at(-1)?.state === "waiting") follows.current = true;
    if (follows.current) box.current.scrollTop = box.current.scrollHeight;
  }, [messages]);
  useEffect(() => {
    const resized = new ResizeObserver(() => {
      if (follows.current && box.current) box.current.scrollTop = box.current.scrollHeight;
    });
    resized.observe(box.current);
    return () => resized.disconnect();
  }, []);
  const found = models.find((each) => each.id === model);
  const answer = messages.at(-1);
  const open = answer?.role === "assistant" && isOpen(answer);
  const fact = open && answer.job ? facts.find((each) => each.job === answer.job) : null;
  return html`<section class="column card" aria-label=${model}>
    <header>
      <select aria-label="Model" value=${model} disabled=${open} onChange=${(event) => store.setModel(id, event.target.value)}>
        ${!found && html`<option value=${model}>${model ? `${model} (gone)` : "…"}</option>`}
        ${models.map((each) => html`<option value=${each.id}>${each.id}${each.slots ? "" : " (paused)"}</option>`)}
      </select>
      ${open && html`<button type="button" class="quiet square" aria-label=${`Stop ${model}`} title="Stop" onClick=${() => store.stop(id)}>
        <${Icon} name="stop" size=${16} /></button>`}
      ${!alone && html`<button type="button" class="quiet square" aria-label=${`Remove ${model}`} title="Remove" onClick=${() => store.removeColumn(id)}>
        <${Icon} name="cross" size=${16} /></button>`}
    </header>
    <div class="messages" ref=${box} role="log" aria-live="off" aria-label=${`Conversation with ${model}`} tabindex="0" onScroll=${scrolled}>
      ${messages.length === 0 && html`<${Introduction} model=${found} />`}
      ${messages.map((each, place) => (each.role === "user" ? html`<${UserMessage} key=${place} message=${each} />`
        : each.role === "tool" ? html`<${ToolMessage} key=${place} message=${each} />`
        : html`<${Answer} key=${place} answer=${each} last=${each === answer} fact=${each === answer ? fact : null}
            onRetry=${() => store.retry(id)} onResults=${(results) => store.answerCalls(id, results)} />`))}
    </div>
    <p class="unseen" role="status">${SAID[answer?.state]?.(model) ?? ""}</p>
  </section>`;
}

/** What a model is, before the first question. */
function Introduction({ model }) {
  if (!model) return null;
  const { id, context_window: context, features, workers, slots } = model;
  return html`<div class="introduction">
    <p class="empty-title">${id}</p>
    <p>${slots ? html`${plural(workers, "worker")}, ${plural(slots, "answer")} at a time` : "All its workers are paused or draining"}${context
      ? html` · ${integer(context)} tokens of context` : ""}</p>
    ${features.length > 0 && html`<p class="chips">${features.map((each) => html`<span class="chip" title=${each}>${featureName(each)}</span>`)}</p>`}
  </div>`;
}

function Settings({ settings, models, columns }) {
  const [problem, setProblem] = useState("");
  const chosen = models.filter(({ id }) => columns.some(({ model }) => model === id));
  const without = chosen.filter(({ features }) => !features.includes("tools"));
  const number = (name, label, attributes) => html`<label class="field">${label}
    <input type="number" inputmode="decimal" placeholder="the model's" value=${settings[name]} ...${attributes}
      onInput=${(event) => store.setSettings({ [name]: event.target.value })} /></label>`;
  const setTools = (toolsText) => {
    try {
      store.setSettings({ toolsText, tools: readTools(toolsText) });
      setProblem("");
    } catch (error) {
      store.setSettings({ toolsText, tools: [] });
      setProblem(error.message);
    }
  };
  return html`<section class="card settings" id="chat-settings" aria-label="Settings">
    <label class="field wide">System prompt
      <textarea rows="3" placeholder="How the model should answer" value=${settings.system}
        onInput=${(event) => store.setSettings({ system: event.target.value })}></textarea></label>
    <div class="settings-numbers">
      ${number("temperature", "Temperature", { min: 0, max: 2, step: 0.1 })}
      ${number("max_tokens", "Maximum tokens", { min: 1, step: 1 })}
      ${number("seed", "Seed", { step: 1 })}
    </div>
    <div class="field wide">
      <label for="chat-tools">Tools, as JSON</label>
      <textarea id="chat-tools" rows="3" class="mono" spellcheck="false" placeholder="None" value=${settings.toolsText}
        aria-invalid=${problem !== ""} aria-describedby="tools-note" onInput=${(event) => setTools(event.target.value)}></textarea>
      <p id="tools-note" class=${problem ? "problem" : "hint"}>${problem
        || (without.length && settings.tools.length ? `Without tools: ${without.map(({ id }) => id).join(", ")}. Their requests will fail.` : "")
        || (settings.tools.length ? plural(settings.tools.length, "tool") : "Each tool call waits for a result from you.")}</p>
      ${!settings.toolsText && html`<button type="button" class="small" onClick=${() => setTools(TOOLS_EXAMPLE)}>Insert an example</button>`}
    </div>
  </section>`;
}

function Composer({ columns, models }) {
  const [text, setText] = useState(store.draft.text);
  const [images, setImages] = useState(store.draft.images);
  const area = useRef(null);
  const running = store.isRunning();
  const chosen = models.filter(({ id }) => columns.some(({ model }) => model === id));
  const sees = chosen.some(({ features }) => features.includes("images"));
  const waits = columns.some(({ messages }) => openCalls(messages).length > 0);
  useEffect(() => area.current.focus({ preventScroll: true }), []);
  useLayoutEffect(() => { store.draft = { text, images }; }, [text, images]);
  useLayoutEffect(() => {
    area.current.style.height = "auto";
    area.current.style.height = `${Math.min(area.current.scrollHeight + 2, 220)}px`;
  }, [text]);

  const attach = async (files) => {
    const found = [...files].filter(({ type }) => type.startsWith("image/"));
    if (!found.length) return false;
    if (!sees) {
      toast("No chosen model reads images.", "bad");
      return true;
    }
    const urls = await Promise.all(found.map(dataUrl));
    setImages((before) => {
      const all = [...before, ...urls];
      if (all.reduce((size, each) => size + each.length, 0) <= IMAGES_MAX) return all;
      toast("These images are too large together: at most 9 MB.", "bad");
      return before;
    });
    return true;
  };
  const send = (event) => {
    event?.preventDefault();
    if (running || waits || (!text.trim() && !images.length)) return;
    store.send(text.trim(), images);
    setText("");
    setImages([]);
  };
  const pressed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && matchMedia("(min-width: 861px)").matches) send(event);
    if (event.key === "Escape" && running) store.stopAll();
  };
  return html`<form class="composer" onSubmit=${send}
    onDragOver=${(event) => event.preventDefault()}
    onDrop=${(event) => { event.preventDefault(); attach(event.dataTransfer.files); }}>
    ${images.length > 0 && html`<ul class="attached">${images.map((each, place) => html`<li>
      <img src=${each} alt=${`Image ${place + 1}`} />
      <button type="button" class="small square" aria-label=${`Remove image ${place + 1}`}
        onClick=${() => setImages(images.filter((_, at) => at !== place))}><${Icon} name="cross" size=${14} /></button></li>`)}</ul>`}
    <div class="composer-line">
      ${sees && html`<label class="button quiet square attach" title="Attach an image (or paste one)">
        <${Icon} name="image" /><input type="file" accept="image/*" multiple class="unseen" aria-label="Attach images"
          onChange=${(event) => { attach(event.target.files); event.target.value = ""; }} /></label>`}
      <textarea ref=${area} rows="1" aria-label="Message" data-search value=${text}
        placeholder=${waits ? "First enter the results of the tools" : columns.length > 1 ? `Ask ${columns.length} models the same` : "Ask something"}
        onInput=${(event) => setText(event.target.value)} onKeyDown=${pressed}
        onPaste=${(event) => event.clipboardData.files.length && attach(event.clipboardData.files)}></textarea>
      ${running
        ? html`<button type="button" class="danger" onClick=${store.stopAll}><${Icon} name="stop" size=${16} />Stop</button>`
        : html`<button type="submit" class="primary" disabled=${waits || (!text.trim() && !images.length)}><${Icon} name="send" size=${16} />Send</button>`}
    </div>
    <p class="composer-hint"><kbd>Enter</kbd> sends, <kbd>Shift</kbd> <kbd>Enter</kbd> starts a new line, <kbd>Esc</kbd> stops. Conversations stay in this page until you clear or reload it.</p>
  </form>`;
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
