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
export type Recommendation = import("./api.d.ts").Recommendation;
export type RecommendedItem = import("./api.d.ts").RecommendedItem;
export type SimilarItems = import("./api.d.ts").SimilarItems;
export type EventsAnswer = import("./api.d.ts").EventsAnswer;
export type RejectedRow = import("./api.d.ts").RejectedRow;
export type TokenOut = import("./api.d.ts").TokenOut;
export type Event = {
    item: string;
    type?: string;
    value?: number;
    /**
     * Of the list that the item was taken from.
     */
    recommendation_id?: string;
    /**
     * ISO 8601; now by default.
     */
    timestamp?: string;
    /**
     * A new one by default.
     */
    event_id?: string;
};
export type QueuedEvent = Event & {
    user: string;
    event_id: string;
    timestamp: string;
};
export type Store = {
    getItem: (key: string) => string | null;
    setItem: (key: string, value: string) => void;
    removeItem: (key: string) => void;
};
export type Options = {
    /**
     * Asks your
     * server for a token of the user. Called when there is none, before it expires, and once after
     * the service has refused it.
     */
    getToken?: () => Promise<string | Pick<TokenOut, "token" | "expires_at">>;
    /**
     * A key in place of a token. Only on servers: a page shows it to everyone.
     */
    key?: string;
    /**
     * Of one request; 10,000 by default.
     */
    timeoutMs?: number;
    /**
     * How often a list is asked for again after 429 or 503, and an event's
     * batch after 401; 2 by default.
     */
    retries?: number;
    /**
     * How long an event waits for others; 2,000 by default.
     */
    flushMs?: number;
    /**
     * Events in the queue; beyond it the oldest are dropped. 1,000 by
     * default.
     */
    maxQueue?: number;
    /**
     * Age at which queued events are dropped; 7 days by default.
     */
    maxAgeMs?: number;
    /**
     * `localStorage` by default; null: the queue lives with the page.
     */
    store?: Store | null;
    /**
     * Told of events
     * that the service has refused.
     */
    onRejected?: (rejected: RejectedRow[], events: QueuedEvent[]) => void;
    /**
     * Told why events wait.
     */
    onError?: (error: unknown) => void;
};
export type ListOptions = {
    n?: number;
    /**
     * Items in any of them.
     */
    category?: string | string[];
    /**
     * Items to leave out.
     */
    exclude?: string | string[];
    exclude_seen?: boolean;
    /**
     * For how long an event keeps its item out, as JSON: `{"purchase":"14d"}`.
     */
    seen?: string;
    /**
     * For how long what was shown and not taken is left out:
     * `6h`, or seconds.
     */
    hide_shown?: string | number;
    min_seq?: number;
    diversity?: number;
    explain?: "none" | "pairwise";
    signal?: AbortSignal;
};
/** A response that is an error. */
export declare class NcrError extends Error {
    status: number;
    code: string;
    detail: string;
    retryAfterMs: number | null;
    /**
     * @param {number} status
     * @param {string} code A stable name of the error.
     * @param {string} detail
     * @param {number | null} retryAfterMs How long the service asks to wait.
     */
    constructor(status: number, code: string, detail: string, retryAfterMs?: number | null);
}
/** Lists and events of one user. */
export declare class Client {
    #private;
    user: string;
    /**
     * @param {string} base The service's URL.
     * @param {string} user The id of the user.
     * @param {Options} [options]
     */
    constructor(base: string, user: string, options?: Options);
    /** How many events wait. */
    get pending(): number;
    /** How many events were dropped, as the queue was full or they were too old. */
    get dropped(): number;
    /**
     * The user's list.
     *
     * @param {ListOptions} [options]
     * @returns {Promise<Recommendation>}
     */
    recommend(options?: ListOptions): Promise<Recommendation>;
    /**
     * Items like an item. A token does not open it: it needs a key, or a service without keys.
     *
     * @param {string} item
     * @param {{n?: number, signal?: AbortSignal}} [options]
     * @returns {Promise<SimilarItems>}
     */
    similar(item: string, options?: {
        n?: number;
        signal?: AbortSignal;
    }): Promise<SimilarItems>;
    /**
     * Queues an event and returns at once.
     *
     * @param {Event} event
     * @returns {string} The event's id.
     */
    track(event: Event): string;
    /** Sends what is queued now. It resolves when all is confirmed, and rejects where it waits on. */
    flush(): Promise<void>;
    /** Ends timers and listeners. Events that wait stay in the store. */
    close(): void;
}
/** A random id. `crypto.randomUUID` is there in secure contexts only. @returns {string} */
export declare function newId(): string;
