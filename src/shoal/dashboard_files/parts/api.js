// Requests to the coordinator.  The session's cookie authorizes them.

import { sseEvents } from "./sse.js";

const PAGE = { "x-shoal-page": "1" }; // what only a page of this coordinator can send

/** An error of a request; `status` is 0 if the coordinator did not answer. */
export class ApiError extends Error {
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

const SESSION = "/dashboard/session";

let onSignedOut = () => {};
let sessions = 0;
let requests = new AbortController(); // of all requests of the session

/** Calls `handler` when a request fails because the session has ended: once for each session. */
export function whenSignedOut(handler) {
  onSignedOut = handler;
}

/** A session has begun: late answers to requests of those before it no longer end one. */
export function beginSession() {
  sessions += 1;
}

export function endSession() {
  sessions += 1;
  onSignedOut();
}

/**
 * Ends the session, and its requests before it: the coordinator would refuse them.  Callers that wait for
 * one of those wait until the page is loaded again.
 */
export async function signOut() {
  requests.abort();
  try {
    await api.delete(SESSION);
  } catch (error) {
    if (error.status) return; // the session had ended already
    requests = new AbortController();
    throw error;
  }
}

async function send(method, path, body, { signal, headers } = {}) {
  const unsafe = method !== "GET";
  const ends = path.startsWith(SESSION) ? [] : [requests.signal];
  const session = sessions;
  const json = body !== undefined && !(body instanceof FormData || body instanceof Blob);
  let response;
  try {
    response = await fetch(path, {
      method,
      signal: AbortSignal.any(signal ? [...ends, signal] : ends),
      credentials: "same-origin",
      headers: {
        ...(unsafe ? PAGE : {}),
        ...(json ? { "content-type": "application/json" } : {}),
        ...headers,
      },
      body: json ? JSON.stringify(body) : body,
    });
  } catch (error) {
    if (ends.some((each) => each.aborted)) return new Promise(() => {});
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable",
      "The coordinator does not answer. Check that `shoal serve` runs and that this device reaches it.");
  }
  if (response.ok) return response;
  const error = await errorOf(response);
  if (error.status === 401 && session === sessions && !path.startsWith(SESSION)) endSession();
  throw error;
}

async function errorOf(response) {
  let detail = {};
  try {
    const body = await response.json();
    detail = typeof body.error === "string" ? { message: body.error } : body.error || {};
  } catch { /* not JSON: the status has to do */ }
  return new ApiError(response.status, detail.code || "",
    detail.message || `The request failed with status ${response.status}.`);
}

async function parsed(response) {
  if (response.status === 204) return null;
  const type = response.headers.get("content-type") || "";
  return type.includes("json") ? response.json() : response.text();
}

export const api = {
  get: async (path, options) => parsed(await send("GET", path, undefined, options)),
  post: async (path, body, options) => parsed(await send("POST", path, body, options)),
  put: async (path, body, options) => parsed(await send("PUT", path, body, options)),
  delete: async (path, options) => parsed(await send("DELETE", path, undefined, options)),

  /** The response itself, for its bytes. */
  fetch: (path, options) => send("GET", path, undefined, options),

  /**
   * Posts a body and yields the parsed data of each server-sent event, until `[DONE]` or the end.
   * `onResponse` gets the response before the first event, for its headers; `onComment` gets comments.
   */
  async *stream(path, body, { signal, headers, onResponse, onComment } = {}) {
    const response = await send("POST", path, body, { signal, headers });
    onResponse?.(response);
    for await (const { data, comment } of sseEvents(response.body)) {
      if (data === null) onComment?.(comment);
      else if (data === "[DONE]") return;
      else yield JSON.parse(data);
    }
  },
};
