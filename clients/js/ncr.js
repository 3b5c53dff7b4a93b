// @ts-check
/**
 * A client of the neural collaborative ranking service for pages and Node 20, without dependencies.
 *
 * A page sends a token that was signed for its user. Lists are awaited; events are queued, sent in
 * the background in batches, and kept in `localStorage` until the service has confirmed them.
 *
 * `navigator.sendBeacon` sends no `Authorization` header, so it cannot carry the token, and it tells
 * nobody whether the events were stored. `fetch` with `keepalive` does both and outlives the page,
 * too. Where a browser does not know `keepalive`, or cuts the request off, the events are still in
 * the queue and go out with the next page. Each has an id of its own: sent twice, it counts once.
 */

/** @typedef {import("./api.d.ts").Recommendation} Recommendation */
/** @typedef {import("./api.d.ts").RecommendedItem} RecommendedItem */
/** @typedef {import("./api.d.ts").SimilarItems} SimilarItems */
/** @typedef {import("./api.d.ts").EventsAnswer} EventsAnswer */
/** @typedef {import("./api.d.ts").RejectedRow} RejectedRow */
/** @typedef {import("./api.d.ts").TokenOut} TokenOut */

/**
 * @typedef {object} Event An event of the user's.
 * @property {string} item
 * @property {string} [type]
 * @property {number} [value]
 * @property {string} [recommendation_id] Of the list that the item was taken from.
 * @property {string} [timestamp] ISO 8601; now by default.
 * @property {string} [event_id] A new one by default.
 */

/** @typedef {Event & {user: string, event_id: string, timestamp: string}} QueuedEvent */

/**
 * @typedef {object} Store Where the queue is kept: `localStorage`, or whatever has its methods.
 * @property {(key: string) => string | null} getItem
 * @property {(key: string, value: string) => void} setItem
 * @property {(key: string) => void} removeItem
 */

/**
 * @typedef {object} Options
 * @property {() => Promise<string | Pick<TokenOut, "token" | "expires_at">>} [getToken] Asks your
 *   server for a token of the user. Called when there is none, before it expires, and once after
 *   the service has refused it.
 * @property {string} [key] A key in place of a token. Only on servers: a page shows it to everyone.
 * @property {number} [timeoutMs] Of one request; 10,000 by default.
 * @property {number} [retries] How often a list is asked for again after 429 or 503, and an event's
 *   batch after 401; 2 by default.
 * @property {number} [flushMs] How long an event waits for others; 2,000 by default.
 * @property {number} [maxQueue] Events in the queue; beyond it the oldest are dropped. 1,000 by
 *   default.
 * @property {number} [maxAgeMs] Age at which queued events are dropped; 7 days by default.
 * @property {Store | null} [store] `localStorage` by default; null: the queue lives with the page.
 * @property {(rejected: RejectedRow[], events: QueuedEvent[]) => void} [onRejected] Told of events
 *   that the service has refused.
 * @property {(error: unknown) => void} [onError] Told why events wait.
 */

/**
 * @typedef {object} ListOptions
 * @property {number} [n]
 * @property {string | string[]} [category] Items in any of them.
 * @property {string | string[]} [exclude] Items to leave out.
 * @property {boolean} [exclude_seen]
 * @property {string} [seen] For how long an event keeps its item out, as JSON: `{"purchase":"14d"}`.
 * @property {string | number} [hide_shown] For how long what was shown and not taken is left out:
 *   `6h`, or seconds.
 * @property {number} [min_seq]
 * @property {number} [diversity]
 * @property {"none" | "pairwise"} [explain]
 * @property {AbortSignal} [signal]
 */

const MAX_BATCH_EVENTS = 100;
/** Browsers allow 64 KiB of bodies with `keepalive` at a time. */
const MAX_BATCH_BYTES = 60_000;
const FIRST_PAUSE_MS = 1_000;
const MAX_PAUSE_MS = 60_000;
const MAX_WAIT_MS = 5_000;
/** A token that ends so soon is fetched anew. */
const TOKEN_MARGIN_MS = 10_000;

/** A response that is an error. */
export class NcrError extends Error {
  /**
   * @param {number} status
   * @param {string} code A stable name of the error.
   * @param {string} detail
   * @param {number | null} retryAfterMs How long the service asks to wait.
   */
  constructor(status, code, detail, retryAfterMs = null) {
    super(`${status} ${code}: ${detail}`);
    this.name = "NcrError";
    this.status = status;
    this.code = code;
    this.detail = detail;
    this.retryAfterMs = retryAfterMs;
  }
}

/** Lists and events of one user. */
export class Client {
  /** @type {string} */ #base;
  /** @type {Options} */ #options;
  /** @type {string | null} */ #token = null;
  #tokenEnds = Infinity;
  /** @type {Promise<string> | null} */ #fetchingToken = null;
  /** @type {EventQueue} */ #queue;
  /** @type {ReturnType<typeof setTimeout> | null} */ #timer = null;
  /** @type {Promise<void> | null} */ #flushing = null;
  #pauseMs = 0;
  #closed = false;

  /**
   * @param {string} base The service's URL.
   * @param {string} user The id of the user.
   * @param {Options} [options]
   */
  constructor(base, user, options = {}) {
    this.#base = base.replace(/\/+$/, "");
    this.user = user;
    this.#options = options;
    this.#queue = new EventQueue(
      `ncr-events ${this.#base} ${user}`,
      options.store === undefined ? pageStore() : options.store,
      options.maxQueue ?? 1_000,
      options.maxAgeMs ?? 7 * 86_400_000,
    );
    if (typeof document !== "undefined") {
      document.addEventListener("visibilitychange", this.#onHidden);
      addEventListener("pagehide", this.#onHidden);
    }
    if (this.#queue.length > 0) this.#schedule(0); // left by an earlier page
  }

  /** How many events wait. */
  get pending() {
    return this.#queue.length;
  }

  /** How many events were dropped, as the queue was full or they were too old. */
  get dropped() {
    return this.#queue.dropped;
  }

  /**
   * The user's list.
   *
   * @param {ListOptions} [options]
   * @returns {Promise<Recommendation>}
   */
  recommend(options = {}) {
    const { signal, ...query } = options;
    return this.#get(`/recommend/${encodeURIComponent(this.user)}`, query, signal);
  }

  /**
   * Items like an item. A token does not open it: it needs a key, or a service without keys.
   *
   * @param {string} item
   * @param {{n?: number, signal?: AbortSignal}} [options]
   * @returns {Promise<SimilarItems>}
   */
  similar(item, options = {}) {
    const { signal, ...query } = options;
    return this.#get(`/items/${encodeURIComponent(item)}/similar`, query, signal);
  }

  /**
   * Queues an event and returns at once.
   *
   * @param {Event} event
   * @returns {string} The event's id.
   */
  track(event) {
    const event_id = event.event_id ?? newId();
    const timestamp = event.timestamp ?? new Date().toISOString();
    this.#queue.add({ ...event, user: this.user, event_id, timestamp });
    this.#schedule(
      this.#queue.length >= MAX_BATCH_EVENTS ? 0 : (this.#options.flushMs ?? 2_000),
    );
    return event_id;
  }

  /** Sends what is queued now. It resolves when all is confirmed, and rejects where it waits on. */
  async flush() {
    if (this.#flushing === null) {
      this.#flushing = this.#sendAll().finally(() => {
        this.#flushing = null;
        // Events wait after an error, or came in at the very end.
        if (this.#queue.length > 0) this.#schedule(this.#options.flushMs ?? 2_000);
      });
    }
    await this.#flushing;
  }

  /** Ends timers and listeners. Events that wait stay in the store. */
  close() {
    this.#closed = true;
    if (this.#timer !== null) clearTimeout(this.#timer);
    this.#timer = null;
    if (typeof document !== "undefined") {
      document.removeEventListener("visibilitychange", this.#onHidden);
      removeEventListener("pagehide", this.#onHidden);
    }
  }

  #onHidden = () => {
    if (typeof document !== "undefined" && document.visibilityState !== "hidden") return;
    const batch = this.#queue.batch();
    // Nothing may be awaited before the request: the page may end any moment.
    if (batch.length > 0 && (this.#tokenAtHand() !== null || !this.#options.getToken)) {
      this.#sendBatch(batch).catch((error) => this.#options.onError?.(error));
    }
  };

  /** @param {number} ms */
  #schedule(ms) {
    if (this.#closed || this.#flushing !== null) return;
    if (this.#timer !== null) {
      if (ms > 0) return;
      clearTimeout(this.#timer);
    }
    const wait = Math.max(ms, this.#pauseMs);
    this.#timer = setTimeout(() => {
      this.#timer = null;
      this.flush().catch((error) => this.#options.onError?.(error));
    }, wait);
    // Node need not stay alive for it.
    /** @type {any} */ (this.#timer).unref?.();
  }

  async #sendAll() {
    try {
      for (let batch = this.#queue.batch(); batch.length > 0; batch = this.#queue.batch()) {
        await this.#sendBatch(batch);
      }
      this.#pauseMs = 0;
    } catch (error) {
      const asked = error instanceof NcrError ? (error.retryAfterMs ?? 0) : 0;
      const pause = Math.min(Math.max(2 * this.#pauseMs, FIRST_PAUSE_MS), MAX_PAUSE_MS);
      this.#pauseMs = Math.max(asked, pause * (0.8 + 0.4 * Math.random()));
      throw error;
    }
  }

  /**
   * Sends events and takes out of the queue what needs no other try.
   *
   * @param {QueuedEvent[]} batch
   */
  async #sendBatch(batch) {
    try {
      const answer = /** @type {EventsAnswer} */ (
        await this.#request("/events", {
          method: "POST",
          body: JSON.stringify(batch),
          keepalive: true,
        })
      );
      this.#queue.remove(batch);
      if (answer.rejected.length > 0) this.#options.onRejected?.(answer.rejected, batch);
    } catch (error) {
      if (error instanceof NcrError && isFinal(error.status)) {
        // The same batch would be refused for ever: one that is too large is tried in parts.
        if (error.status === 413 && batch.length > 1) {
          const half = batch.length >> 1;
          await this.#sendBatch(batch.slice(0, half));
          await this.#sendBatch(batch.slice(half));
          return;
        }
        this.#queue.remove(batch);
        this.#options.onError?.(error);
        return;
      }
      throw error;
    }
  }

  /**
   * @param {string} path
   * @param {Record<string, any>} query
   * @param {AbortSignal} [signal]
   * @returns {Promise<any>}
   */
  async #get(path, query, signal) {
    const search = new URLSearchParams();
    for (const [name, value] of Object.entries(query)) {
      for (const one of Array.isArray(value) ? value : [value]) {
        if (one !== undefined && one !== null) search.append(name, String(one));
      }
    }
    const url = search.size > 0 ? `${path}?${search}` : path;
    for (let tries = 0; ; tries++) {
      try {
        return await this.#request(url, { signal });
      } catch (error) {
        const again = error instanceof NcrError && [429, 503].includes(error.status);
        if (!again || tries >= (this.#options.retries ?? 2)) throw error;
        await pause(Math.min(error.retryAfterMs ?? FIRST_PAUSE_MS, MAX_WAIT_MS), signal);
      }
    }
  }

  /**
   * One request, repeated once with a new token where the token is refused.
   *
   * @param {string} path
   * @param {RequestInit} init
   * @returns {Promise<unknown>}
   */
  async #request(path, init) {
    let token = this.#tokenAtHand();
    if (token === null && this.#options.getToken) token = await this.#newToken();
    try {
      return await this.#fetch(path, init, token);
    } catch (error) {
      const refused = error instanceof NcrError && error.status === 401;
      if (!refused || !this.#options.getToken) throw error;
      if (this.#token === token) this.#token = null;
      return await this.#fetch(path, init, this.#tokenAtHand() ?? (await this.#newToken()));
    }
  }

  /**
   * @param {string} path
   * @param {RequestInit} init
   * @param {string | null} token
   */
  async #fetch(path, init, token) {
    /** @type {Record<string, string>} */
    const headers = {};
    const secret = token ?? this.#options.key;
    if (secret) headers["Authorization"] = `Bearer ${secret}`;
    if (init.body) headers["Content-Type"] = "application/json";
    const limit = AbortSignal.timeout(this.#options.timeoutMs ?? 10_000);
    const signals = init.signal ? [init.signal, limit] : [limit];
    const signal = signals.length === 1 ? limit : any(signals);
    const response = await fetch(this.#base + path, {
      ...init,
      headers,
      signal,
      credentials: "omit",
    });
    if (!response.ok) throw await errorOf(response);
    return await response.json();
  }

  /** @returns {string | null} */
  #tokenAtHand() {
    return this.#token !== null && Date.now() < this.#tokenEnds - TOKEN_MARGIN_MS
      ? this.#token
      : null;
  }

  /** One call of `getToken` for all that wait. @returns {Promise<string>} */
  #newToken() {
    this.#fetchingToken ??= this.#callGetToken().finally(() => {
      this.#fetchingToken = null;
    });
    return this.#fetchingToken;
  }

  async #callGetToken() {
    const getToken = this.#options.getToken;
    if (!getToken) throw new TypeError("there is no getToken");
    const answer = await getToken();
    this.#token = typeof answer === "string" ? answer : answer.token;
    this.#tokenEnds = typeof answer === "string" ? Infinity : Date.parse(answer.expires_at);
    return this.#token;
  }
}

/** Events in order, in a store that pages of one origin share. */
class EventQueue {
  /** @type {QueuedEvent[]} */ #memory = [];
  /** @type {Store | null} */ #store;
  #key;
  #max;
  #maxAgeMs;
  dropped = 0;

  /**
   * @param {string} key
   * @param {Store | null} store
   * @param {number} max
   * @param {number} maxAgeMs
   */
  constructor(key, store, max, maxAgeMs) {
    this.#key = key;
    this.#store = store;
    this.#max = max;
    this.#maxAgeMs = maxAgeMs;
    const events = this.#load();
    const kept = events.filter((event) => Date.now() - Date.parse(event.timestamp) < maxAgeMs);
    this.dropped += events.length - kept.length;
    if (kept.length < events.length) this.#save(kept);
  }

  get length() {
    return this.#load().length;
  }

  /** @param {QueuedEvent} event */
  add(event) {
    // Read anew each time: another page of the same user may have changed it.
    const events = [...this.#load(), event];
    const extra = Math.max(0, events.length - this.#max);
    this.dropped += extra;
    this.#save(events.slice(extra));
  }

  /** The oldest events that one request takes. @returns {QueuedEvent[]} */
  batch() {
    const events = this.#load();
    let bytes = 2;
    let end = 0;
    while (end < events.length && end < MAX_BATCH_EVENTS) {
      bytes += new TextEncoder().encode(JSON.stringify(events[end])).length + 1;
      if (bytes > MAX_BATCH_BYTES && end > 0) break;
      end++;
    }
    return events.slice(0, end);
  }

  /** @param {QueuedEvent[]} sent */
  remove(sent) {
    const ids = new Set(sent.map((event) => event.event_id));
    this.#save(this.#load().filter((event) => !ids.has(event.event_id)));
  }

  /** @returns {QueuedEvent[]} */
  #load() {
    if (this.#store === null) return this.#memory;
    try {
      const events = JSON.parse(this.#store.getItem(this.#key) ?? "[]");
      return Array.isArray(events) ? events.filter(isQueued) : [];
    } catch (error) {
      if (error instanceof SyntaxError) return [];
      return this.#fallBack(this.#memory); // the store may not be read any more
    }
  }

  /** @param {QueuedEvent[]} events */
  #save(events) {
    if (this.#store === null) {
      this.#memory = events;
      return;
    }
    try {
      if (events.length > 0) this.#store.setItem(this.#key, JSON.stringify(events));
      else this.#store.removeItem(this.#key);
    } catch {
      this.#fallBack(events); // full, or forbidden: the queue lives with the page
    }
  }

  /** @param {QueuedEvent[]} events */
  #fallBack(events) {
    try {
      this.#store?.removeItem(this.#key); // or they would be sent again by the next page
    } catch {
      // It cannot be written at all.
    }
    this.#store = null;
    this.#memory = events;
    return events;
  }
}

/** @param {any} event @returns {event is QueuedEvent} */
function isQueued(event) {
  return (
    typeof event === "object" &&
    event !== null &&
    typeof event.event_id === "string" &&
    typeof event.timestamp === "string"
  );
}

/** Whether another try of the same request is useless. @param {number} status */
function isFinal(status) {
  return status >= 400 && status < 500 && ![401, 403, 408, 429].includes(status);
}

/** `localStorage`, where there is one that may be used. @returns {Store | null} */
function pageStore() {
  try {
    return typeof document !== "undefined" ? localStorage : null;
  } catch {
    return null;
  }
}

/** A random id. `crypto.randomUUID` is there in secure contexts only. @returns {string} */
export function newId() {
  if (typeof crypto.randomUUID === "function") return crypto.randomUUID();
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** @param {Response} response */
async function errorOf(response) {
  const after = Number(response.headers.get("Retry-After") ?? NaN);
  const retryAfterMs = Number.isFinite(after) ? 1000 * after : null;
  try {
    const problem = await response.json();
    const { code = "unknown", detail = "" } = problem;
    return new NcrError(response.status, String(code), String(detail), retryAfterMs);
  } catch {
    return new NcrError(response.status, "unknown", response.statusText, retryAfterMs);
  }
}

/** `AbortSignal.any`, which older browsers lack. @param {AbortSignal[]} signals */
function any(signals) {
  if (typeof AbortSignal.any === "function") return AbortSignal.any(signals);
  const controller = new AbortController();
  for (const signal of signals) {
    if (signal.aborted) controller.abort(signal.reason);
    signal.addEventListener("abort", () => controller.abort(signal.reason), { once: true });
  }
  return controller.signal;
}

/**
 * @param {number} ms
 * @param {AbortSignal} [signal]
 * @returns {Promise<void>}
 */
function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener(
      "abort",
      () => {
        clearTimeout(timer);
        reject(signal.reason);
      },
      { once: true },
    );
  });
}
