// @ts-check
/**
 * A client of the neural collaborative ranking service for pages and Node 20, without dependencies.
 *
 * A page sends a token that is signed for its user. `recommend` returns a promise of a list. The
 * client queues events, sends them in batches in the background, and keeps them in `localStorage`
 * until the service confirms them.
 *
 * The client sends events by `fetch` with `keepalive`, which outlives the page. The function
 * `navigator.sendBeacon` can neither send the token nor report whether the service stored the
 * events. If a browser ends the request early or does not know `keepalive`, the events stay in the
 * queue. The next page sends them. Each event has its own id, so the service counts a repeated
 * event once.
 */

/** @typedef {import("./api.d.ts").Recommendation} Recommendation */
/** @typedef {import("./api.d.ts").RecommendedItem} RecommendedItem */
/** @typedef {import("./api.d.ts").SimilarItems} SimilarItems */
/** @typedef {import("./api.d.ts").EventsAnswer} EventsAnswer */
/** @typedef {import("./api.d.ts").RejectedRow} RejectedRow */
/** @typedef {import("./api.d.ts").TokenOut} TokenOut */

/**
 * @typedef {object} Event One act of the user.
 * @property {string} item
 * @property {string} [type]
 * @property {number} [value]
 * @property {string} [recommendation_id] The id of the list that showed the item.
 * @property {string} [timestamp] The time in ISO 8601. The default is now.
 * @property {string} [event_id] The id of the event. The default is a new id.
 */

/** @typedef {Event & {user: string, event_id: string, timestamp: string}} QueuedEvent */

/**
 * @typedef {object} Store The store of the queue: `localStorage`, or an object with its methods.
 * @property {(key: string) => string | null} getItem
 * @property {(key: string, value: string) => void} setItem
 * @property {(key: string) => void} removeItem
 */

/**
 * @typedef {object} Options
 * @property {() => Promise<string | Pick<TokenOut, "token" | "expires_at">>} [getToken] Asks your
 *   server for a token of the user. The client calls it before the first request, before a token
 *   expires, and once after the service refuses a token.
 * @property {string} [key] A key in place of a token. Use a key only on servers: a page shows its
 *   key to everyone.
 * @property {number} [timeoutMs] The timeout of one request, in ms. The default is 10,000 ms.
 * @property {number} [retries] The number of further requests for a list after 429 or 503. The
 *   default is 2.
 * @property {number} [flushMs] The time that an event waits for other events, in ms. The default is
 *   2,000 ms.
 * @property {number} [maxQueue] The maximum number of events in the queue. Beyond it the client
 *   drops the oldest events. The default is 1,000.
 * @property {number} [maxAgeMs] The age at which the client drops queued events, in ms. The default
 *   is 7 days.
 * @property {Store | null} [store] The store of the queue. The default is `localStorage`. With null
 *   the queue ends with the page.
 * @property {(rejected: RejectedRow[], events: QueuedEvent[]) => void} [onRejected] Receives the
 *   events that the service rejects.
 * @property {(error: unknown) => void} [onError] Receives the error that delays or ends the sending
 *   of events.
 */

/**
 * @typedef {object} ListOptions
 * @property {number} [n]
 * @property {string | string[]} [category] The list has only items of these categories.
 * @property {string | string[]} [exclude] The list leaves out these items.
 * @property {boolean} [exclude_seen]
 * @property {string} [seen] The time for which an event of a type keeps its item out of the list, as
 *   JSON: `{"purchase":"14d"}`.
 * @property {string | number} [hide_shown] The time for which a shown item that the user did not take
 *   stays out of the list: `6h`, or seconds.
 * @property {number} [min_seq]
 * @property {number} [diversity]
 * @property {"none" | "pairwise"} [explain]
 * @property {AbortSignal} [signal]
 */

const MAX_BATCH_EVENTS = 100;
/** Browsers allow 64 KiB of request bodies with `keepalive` at a time. */
const MAX_BATCH_BYTES = 60_000;
const FIRST_PAUSE_MS = 1_000;
const MAX_PAUSE_MS = 60_000;
const MAX_WAIT_MS = 5_000;
/** The client replaces a token that expires within this time. */
const TOKEN_MARGIN_MS = 10_000;

/** An error that the service answers. */
export class NcrError extends Error {
  /**
   * @param {number} status
   * @param {string} code The stable name of the error.
   * @param {string} detail
   * @param {number | null} retryAfterMs The time that the service asks the client to wait, in ms.
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

/** A client for the lists and events of one user. */
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
   * @param {string} base The URL of the service.
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
    if (this.#queue.length > 0) this.#schedule(0); // events of an earlier page
  }

  /** The number of queued events. */
  get pending() {
    return this.#queue.length;
  }

  /** The number of events that the client dropped because the queue was full or they were old. */
  get dropped() {
    return this.#queue.dropped;
  }

  /**
   * Requests the list of the user.
   *
   * @param {ListOptions} [options]
   * @returns {Promise<Recommendation>}
   */
  recommend(options = {}) {
    const { signal, ...query } = options;
    return this.#get(`/recommend/${encodeURIComponent(this.user)}`, query, signal);
  }

  /**
   * Requests items that are similar to an item. This route refuses tokens. It needs a key or a
   * service without keys.
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
   * @returns {string} The id of the event.
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

  /**
   * Sends the queued events now. The promise resolves when the service has confirmed all events. The
   * promise rejects if events stay in the queue.
   */
  async flush() {
    if (this.#flushing === null) {
      this.#flushing = this.#sendAll().finally(() => {
        this.#flushing = null;
        // Events remain after an error, or arrive while the last batch is sent.
        if (this.#queue.length > 0) this.#schedule(this.#options.flushMs ?? 2_000);
      });
    }
    await this.#flushing;
  }

  /** Ends timers and listeners. Queued events stay in the store. */
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
    // The page may end at any moment, so nothing is awaited before the request.
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
    // The timer does not keep Node alive.
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
   * Sends events, and removes from the queue the events that need no further request.
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
        // The service would refuse the same batch again. A batch that is too large goes in halves.
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
   * Sends one request, and repeats it once with a new token if the service refuses the token.
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

  /** Calls `getToken` once for all waiting requests. @returns {Promise<string>} */
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

/** A queue of events in order, in a store that the pages of one origin share. */
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
    // Another page of the same user may have changed the queue, so each call reads it.
    const events = [...this.#load(), event];
    const extra = Math.max(0, events.length - this.#max);
    this.dropped += extra;
    this.#save(events.slice(extra));
  }

  /** Returns the oldest events, as many as fit into one request. @returns {QueuedEvent[]} */
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
      return this.#fallBack(this.#memory); // the store is no longer readable
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
      this.#fallBack(events); // the store is full or forbidden, so the queue ends with the page
    }
  }

  /** @param {QueuedEvent[]} events */
  #fallBack(events) {
    try {
      this.#store?.removeItem(this.#key); // else the next page would send the events again
    } catch {
      // The store accepts no change at all.
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

/** Tells whether a repeated request would fail again. @param {number} status */
function isFinal(status) {
  return status >= 400 && status < 500 && ![401, 403, 408, 429].includes(status);
}

/** Returns `localStorage`, or null if the page may not use it. @returns {Store | null} */
function pageStore() {
  try {
    return typeof document !== "undefined" ? localStorage : null;
  } catch {
    return null;
  }
}

/** Makes a random id. Only secure contexts have `crypto.randomUUID`. @returns {string} */
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

/** Does the same as `AbortSignal.any`, which older browsers lack. @param {AbortSignal[]} signals */
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
