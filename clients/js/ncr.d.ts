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
     * The id of the list that showed the item.
     */
    recommendation_id?: string;
    /**
     * The time in ISO 8601. The default is now.
     */
    timestamp?: string;
    /**
     * The id of the event. The default is a new id.
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
     * server for a token of the user. The client calls it before the first request, before a token
     * expires, and once after the service refuses a token.
     */
    getToken?: () => Promise<string | Pick<TokenOut, "token" | "expires_at">>;
    /**
     * A key in place of a token. Use a key only on servers: a page shows its
     * key to everyone.
     */
    key?: string;
    /**
     * The timeout of one request, in ms. The default is 10,000 ms.
     */
    timeoutMs?: number;
    /**
     * The number of further requests for a list after 429 or 503. The
     * default is 2.
     */
    retries?: number;
    /**
     * The time that an event waits for other events, in ms. The default is
     * 2,000 ms.
     */
    flushMs?: number;
    /**
     * The maximum number of events in the queue. Beyond it the client
     * drops the oldest events. The default is 1,000.
     */
    maxQueue?: number;
    /**
     * The age at which the client drops queued events, in ms. The default
     * is 7 days.
     */
    maxAgeMs?: number;
    /**
     * The store of the queue. The default is `localStorage`. With null
     * the queue ends with the page.
     */
    store?: Store | null;
    /**
     * Receives the
     * events that the service rejects.
     */
    onRejected?: (rejected: RejectedRow[], events: QueuedEvent[]) => void;
    /**
     * Receives the error that delays or ends the sending
     * of events.
     */
    onError?: (error: unknown) => void;
};
export type ListOptions = {
    n?: number;
    /**
     * The list has only items of these categories.
     */
    category?: string | string[];
    /**
     * The list leaves out these items.
     */
    exclude?: string | string[];
    exclude_seen?: boolean;
    /**
     * The time for which an event of a type keeps its item out of the list, as
     * JSON: `{"purchase":"14d"}`.
     */
    seen?: string;
    /**
     * The time for which a shown item that the user did not take
     * stays out of the list: `6h`, or seconds.
     */
    hide_shown?: string | number;
    min_seq?: number;
    diversity?: number;
    explain?: "none" | "pairwise";
    signal?: AbortSignal;
};
/** An error that the service answers. */
export declare class NcrError extends Error {
    status: number;
    code: string;
    detail: string;
    retryAfterMs: number | null;
    /**
     * @param {number} status
     * @param {string} code The stable name of the error.
     * @param {string} detail
     * @param {number | null} retryAfterMs The time that the service asks the client to wait, in ms.
     */
    constructor(status: number, code: string, detail: string, retryAfterMs?: number | null);
}
/** A client for the lists and events of one user. */
export declare class Client {
    #private;
    user: string;
    /**
     * @param {string} base The URL of the service.
     * @param {string} user The id of the user.
     * @param {Options} [options]
     */
    constructor(base: string, user: string, options?: Options);
    /** The number of queued events. */
    get pending(): number;
    /** The number of events that the client dropped because the queue was full or they were old. */
    get dropped(): number;
    /**
     * Requests the list of the user.
     *
     * @param {ListOptions} [options]
     * @returns {Promise<Recommendation>}
     */
    recommend(options?: ListOptions): Promise<Recommendation>;
    /**
     * Requests items that are similar to an item. This route refuses tokens. It needs a key or a
     * service without keys.
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
     * @returns {string} The id of the event.
     */
    track(event: Event): string;
    /**
     * Sends the queued events now. The promise resolves when the service has confirmed all events. The
     * promise rejects if events stay in the queue.
     */
    flush(): Promise<void>;
    /** Ends timers and listeners. Queued events stay in the store. */
    close(): void;
}
/** Makes a random id. Only secure contexts have `crypto.randomUUID`. @returns {string} */
export declare function newId(): string;
