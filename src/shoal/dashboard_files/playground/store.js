// The playground's conversations, which go on while other views are open. They are kept
// in this page alone: a reload forgets them.

import {
  bodyOf, isOpen, newAnswer, withChunk, withComment, withEnd, withError, withHeaders, withStop, withWhole,
} from "./answers.js";

export const COLUMNS_MAX = 4;
export const NO_SETTINGS = { system: "", temperature: "", max_tokens: "", seed: "", toolsText: "", tools: [] };

const FETCHED_WITHIN = 120; // seconds in which a coordinator that restarts has the answer
const RETRY_DELAY = 1; // seconds

const NO_DRAFT = { text: "", images: [] };

let number = 0;
const newColumn = (model) => ({ id: ++number, model, messages: [] });

/** `seconds()` is a clock, `soon(f)` calls `f` before the next picture, and `pause(s)` waits. */
export function createStore(api, seconds, soon, pause) {
  const fresh = () => ({ columns: [newColumn("")], settings: NO_SETTINGS });
  let state = fresh();
  let owner = null;
  let draft = NO_DRAFT;
  const running = new Map(); // AbortControllers by column
  const listeners = new Set();
  let waits = false;

  const show = () => {
    waits = false;
    for (const each of listeners) each(state);
  };
  const set = (changes) => {
    state = { ...state, ...changes };
    if (!waits) {
      waits = true;
      soon(show);
    }
  };
  const find = (id) => state.columns.find((each) => each.id === id);
  const change = (id, update) =>
    set({ columns: state.columns.map((each) => (each.id === id ? { ...each, ...update(each) } : each)) });
  const changeLast = (id, update) =>
    change(id, ({ messages }) => ({ messages: [...messages.slice(0, -1), update(messages.at(-1))] }));
  const add = (id, ...messages) => change(id, (column) => ({ messages: [...column.messages, ...messages] }));

  async function run(id) {
    const { model, messages } = find(id);
    const body = bodyOf(model, messages, state.settings);
    const controller = new AbortController();
    running.set(id, controller);
    // Only while the answer is this run's: the conversation may be cleared meanwhile.
    const update = (f) => running.get(id) === controller && find(id) && changeLast(id, f);
    add(id, newAnswer(body, seconds()));
    try {
      const chunks = api.stream("/v1/chat/completions", body, {
        signal: controller.signal,
        onResponse: ({ headers }) => update((answer) => withHeaders(answer, headers)),
        onComment: (comment) => update((answer) => withComment(answer, comment)),
      });
      for await (const chunk of chunks) update((answer) => withChunk(answer, chunk, seconds()));
      const { finish, error } = find(id)?.messages.at(-1) ?? {};
      if (!finish && !error) throw new Error("The connection ended before the answer did.");
      update((answer) => withEnd(answer, seconds()));
    } catch (error) {
      const whole = await fetched(update, error, controller.signal);
      update((answer) => (controller.signal.aborted ? withStop(answer, seconds())
        : whole ? withWhole(answer, whole, seconds())
        : withError(answer, { message: error.message, code: error.code ?? "" }, seconds())));
    } finally {
      if (running.get(id) === controller) running.delete(id);
    }
  }

  /** The whole answer of a job whose stream broke off: the coordinator may have restarted. */
  async function fetched(update, { status = 0 }, signal) {
    let job = null;
    update((answer) => {
      ({ job } = answer);
      return answer;
    });
    const until = seconds() + FETCHED_WITHIN;
    while (job && status === 0 && !signal.aborted && seconds() < until) {
      try {
        return await api.get(`/v1/chat/completions/${encodeURIComponent(job)}`, { signal });
      } catch (error) {
        // It still restarts, or the job is not done yet.
        if (error.status && error.status !== 503) return null;
        await pause(RETRY_DELAY);
      }
    }
    return null;
  }

  function endAll() {
    running.forEach((each) => each.abort());
    running.clear();
  }

  function stop(id) {
    running.get(id)?.abort(); // the coordinator sees the client leave, and cancels the job
  }

  return {
    get state() { return state; },
    /** What is written and not sent yet.  The field begins with it; a change renders nothing. */
    get draft() { return draft; },
    set draft(written) { draft = written; },
    subscribe(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
    isRunning: () => state.columns.some(({ messages }) => messages.length && isOpen(messages.at(-1))),
    setSettings: (settings) => set({ settings: { ...state.settings, ...settings } }),
    setModel: (id, model) => change(id, () => ({ model })),
    addColumn: (model) => state.columns.length < COLUMNS_MAX && set({ columns: [...state.columns, newColumn(model)] }),
    removeColumn(id) {
      stop(id);
      set({ columns: state.columns.filter((each) => each.id !== id) });
    },
    /** Asks every model that is not writing. */
    send(text, images) {
      for (const { id, model, messages } of state.columns) {
        if (!model || (messages.length && isOpen(messages.at(-1)))) continue;
        add(id, { role: "user", text, images });
        run(id);
      }
    },
    /** Asks for the last answer once more. */
    retry(id) {
      change(id, ({ messages }) => ({ messages: messages.slice(0, -1) }));
      run(id);
    },
    /** Goes on with the results of the tools that the model called. */
    answerCalls(id, results) {
      add(id, ...results.map(({ id: call, name, text }) => ({ role: "tool", id: call, name, text })));
      run(id);
    },
    stop,
    stopAll: () => running.forEach((each) => each.abort()),
    /** Forgets everything if it is another's, who used this page before. */
    belongTo(name) {
      if (owner !== null && owner !== name) {
        endAll();
        draft = NO_DRAFT;
        set(fresh());
      }
      owner = name;
    },
    clear() {
      endAll();
      set({ columns: state.columns.map((each) => ({ ...each, messages: [] })) });
    },
  };
}
