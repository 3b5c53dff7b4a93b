// Against a real server: NCR_URL, NCR_KEY (recommend, events, tokens, history) and a catalogue with
// the items film-1 to film-9. `tests/client/test_js_client.py` starts one and runs this.
import assert from "node:assert/strict";
import { once } from "node:events";
import { createServer, request } from "node:http";
import { test } from "node:test";

import { Client, NcrError, newId } from "../ncr.js";

const URL_ = process.env.NCR_URL;
const KEY = process.env.NCR_KEY;
let users = 0;
const newUser = () => `visitor ${process.pid}/${++users} ü`;

/** What a page's own server does. */
async function sign(user, ttl_s = 300) {
  const response = await fetch(`${URL_}/tokens`, {
    method: "POST",
    headers: { "X-API-Key": KEY, "Content-Type": "application/json" },
    body: JSON.stringify({ user, ttl_s }),
  });
  assert.equal(response.status, 200);
  return response.json();
}

async function eventsOf(user) {
  const response = await fetch(`${URL_}/users/${encodeURIComponent(user)}/events`, {
    headers: { Authorization: `Bearer ${KEY}` },
  });
  if (response.status === 404) return [];
  assert.equal(response.status, 200);
  return (await response.json()).items;
}

/** As `localStorage`. */
function memoryStore() {
  const values = new Map();
  return {
    values,
    getItem: (key) => values.get(key) ?? null,
    setItem: (key, value) => void values.set(key, value),
    removeItem: (key) => void values.delete(key),
  };
}

/** A proxy before the service, whose `act` may do something else with a request. */
async function proxy(act) {
  const server = createServer((incoming, outgoing) => {
    const forward = (done) => {
      const { pathname, search } = new URL(incoming.url, URL_);
      const onwards = request(
        new URL(pathname + search, URL_),
        { method: incoming.method, headers: incoming.headers },
        done,
      );
      incoming.pipe(onwards);
    };
    act(incoming, outgoing, forward);
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  const close = () => {
    server.closeAllConnections();
    server.close();
  };
  return { url: `http://127.0.0.1:${server.address().port}`, close };
}

const pass = (outgoing) => (answer) => {
  outgoing.writeHead(answer.statusCode, answer.headers);
  answer.pipe(outgoing);
};

test("a page of one user gets lists and posts events with tokens", async () => {
  const user = newUser();
  let tokens = 0;
  const client = new Client(URL_ + "/", user, { getToken: () => (tokens++, sign(user)), store: null });
  const list = await client.recommend({ n: 3, exclude: ["film-1", "film-2"], exclude_seen: false });
  assert.equal(list.user, user);
  assert.equal(list.items.length, 3);
  assert.ok(list.items.every(({ id }) => !["film-1", "film-2"].includes(id)));
  const { id } = list.items[0];
  const event_id = client.track({ item: id, type: "click", recommendation_id: list.recommendation_id });
  client.track({ item: "film-2", value: 3.5, type: "rating" });
  assert.equal(client.pending, 2);
  await client.flush();
  assert.equal(client.pending, 0);
  const [rating, click] = await eventsOf(user);
  assert.deepEqual([click.event_id, click.item, click.type], [event_id, id, "click"]);
  assert.deepEqual([rating.item, rating.value], ["film-2", 3.5]);
  assert.equal(tokens, 1);
  client.close();
});

test("with a key a program gets similar items, and errors have a code", async () => {
  const client = new Client(URL_, newUser(), { key: KEY, store: null });
  assert.equal((await client.similar("film-1", { n: 2 })).items.length, 2);
  await assert.rejects(client.similar("none"), (error) => {
    assert.ok(error instanceof NcrError);
    assert.deepEqual([error.status, error.code], [404, "unknown_item"]);
    return true;
  });
  await assert.rejects(client.recommend({ n: 0 }), { status: 422 });
  await assert.rejects(client.recommend({ signal: AbortSignal.abort() }), { name: "AbortError" });
  client.close();
});

test("a token opens nothing of another user, and no similar items", async () => {
  const other = await sign(newUser());
  const client = new Client(URL_, newUser(), { getToken: async () => other, store: null });
  await assert.rejects(client.recommend(), { status: 403 });
  await assert.rejects(client.similar("film-1"), { status: 403 });
  client.close();
});

test("a refused or expired token is replaced once, by one call for all that wait", async () => {
  const user = newUser();
  const answers = ["ncrt_false", { token: "ncrt_old", expires_at: new Date().toISOString() }];
  let calls = 0;
  const getToken = async () => (calls++, answers.shift() ?? sign(user));
  const client = new Client(URL_, user, { getToken, store: null });
  await assert.rejects(client.recommend(), { status: 401 }); // the second one was false, too
  const lists = await Promise.all([client.recommend(), client.recommend(), client.recommend()]);
  assert.equal(lists.length, 3);
  assert.equal(calls, 3);
  client.close();
});

test("an answer that is lost leads to another try and counts once", async () => {
  const user = newUser();
  let lost = 0;
  const { url, close } = await proxy((incoming, outgoing, forward) => {
    if (incoming.method === "POST" && lost++ === 0) {
      forward((answer) => {
        answer.resume();
        answer.on("end", () => outgoing.destroy()); // stored, and nobody is told
      });
    } else {
      forward(pass(outgoing));
    }
  });
  const errors = [];
  const client = new Client(url, user, {
    key: KEY, store: null, flushMs: 5, onError: (error) => errors.push(error),
  });
  const event_id = client.track({ item: "film-3" });
  while (client.pending > 0) await new Promise((resolve) => setTimeout(resolve, 20));
  assert.equal(errors.length, 1);
  assert.ok(lost >= 2);
  assert.deepEqual((await eventsOf(user)).map((event) => event.event_id), [event_id]);
  client.close();
  close();
});

test("events are kept over page loads, by user, bounded in number and age", async () => {
  const user = newUser();
  const store = memoryStore();
  const options = { key: KEY, store, maxQueue: 3, flushMs: 60_000 };
  const first = new Client(URL_, user, options);
  first.track({ item: "film-1", timestamp: "2020-01-01T00:00:00Z" });
  for (const item of ["film-2", "film-3", "film-4"]) first.track({ item });
  assert.deepEqual([first.pending, first.dropped], [3, 1]);
  first.close(); // the page ends before it has sent anything
  assert.equal(new Client(URL_, newUser(), options).pending, 0);
  const second = new Client(URL_, user, options);
  assert.equal(second.pending, 3);
  await second.flush();
  assert.deepEqual((await eventsOf(user)).map(({ item }) => item), ["film-4", "film-3", "film-2"]);
  assert.equal(store.values.size, 0);
  second.close();
  const old = new Client(URL_, user, options);
  old.track({ item: "film-5", timestamp: "2020-01-01T00:00:00Z" });
  old.close();
  assert.equal(new Client(URL_, user, options).pending, 0);
});

test("two pages of one user share the queue", async () => {
  const user = newUser();
  const store = memoryStore();
  const pages = [1, 2].map(() => new Client(URL_, user, { key: KEY, store, flushMs: 60_000 }));
  pages[0].track({ item: "film-1" });
  pages[1].track({ item: "film-2" });
  assert.equal(pages[0].pending, 2);
  await Promise.all(pages.map((page) => page.flush()));
  assert.equal((await eventsOf(user)).length, 2);
  pages.forEach((page) => page.close());
});

test("a store that is full, forbidden or damaged harms nothing", async () => {
  for (const broken of [
    { ...memoryStore(), setItem: () => { throw new Error("QuotaExceededError"); } },
    { ...memoryStore(), getItem: () => { throw new Error("SecurityError"); } },
    { ...memoryStore(), getItem: () => "{not JSON" },
    { ...memoryStore(), getItem: () => '[1, null, {"event_id": 3}]' },
  ]) {
    const user = newUser();
    const client = new Client(URL_, user, { key: KEY, store: broken });
    client.track({ item: "film-1" });
    await client.flush();
    client.close();
  }
});

test("rejected events are told and not sent again; a batch that no try can save is dropped", async () => {
  const user = newUser();
  const rejected = [];
  const errors = [];
  const client = new Client(URL_, user, {
    getToken: () => sign(user),
    store: null,
    onRejected: (rows) => rejected.push(...rows.map(({ code }) => code)),
    onError: (error) => errors.push(error.code),
  });
  client.track({ item: "not in the catalogue" });
  client.track({ item: "film-1" });
  await client.flush();
  assert.deepEqual(rejected, ["unknown_item"]);
  assert.equal(client.pending, 0);
  assert.equal((await eventsOf(user)).length, 1);
  client.close();
});

test("many events go out in batches that keepalive takes", async () => {
  const user = newUser();
  const sizes = [];
  const { url, close } = await proxy((incoming, outgoing, forward) => {
    sizes.push(Number(incoming.headers["content-length"]));
    forward(pass(outgoing));
  });
  const client = new Client(url, user, { key: KEY, store: null, flushMs: 60_000 });
  for (let n = 0; n < 250; n++) client.track({ item: `film-${1 + (n % 9)}`, type: "x".repeat(50) });
  await client.flush();
  client.close();
  close();
  assert.equal(sizes.length, 3);
  assert.ok(Math.max(...sizes) < 65_536);
});

test("429 and 503 are waited for, as long as they ask", async () => {
  let refused = 0;
  const { url, close } = await proxy((_, outgoing, forward) => {
    if (refused++ > 0) return forward(pass(outgoing));
    outgoing.writeHead(503, { "Retry-After": "0", "Content-Type": "application/problem+json" });
    outgoing.end('{"code":"overloaded","detail":"later"}');
  });
  const client = new Client(url, newUser(), { key: KEY, store: null });
  assert.ok((await client.recommend()).items.length > 0);
  assert.equal(refused, 2);
  const never = new Client(url, newUser(), { key: KEY, store: null, retries: 0 });
  refused = 0;
  await assert.rejects(never.recommend(), { status: 503, code: "overloaded", retryAfterMs: 0 });
  never.close();
  client.close();
  close();
});

test("a page that is hidden sends at once, with keepalive", async () => {
  const user = newUser();
  const page = Object.assign(new EventTarget(), { visibilityState: "visible" });
  globalThis.document = page;
  globalThis.addEventListener = page.addEventListener.bind(page);
  globalThis.removeEventListener = page.removeEventListener.bind(page);
  const real = globalThis.fetch;
  const sent = [];
  globalThis.fetch = (url, init) => {
    sent.push([new URL(url).pathname, init.keepalive ?? false]);
    return real(url, init);
  };
  try {
    const client = new Client(URL_, user, {
      getToken: () => sign(user), store: memoryStore(), flushMs: 60_000,
    });
    await client.recommend();
    client.track({ item: "film-7" });
    page.dispatchEvent(new Event("visibilitychange"));
    assert.equal(client.pending, 1); // it is still visible
    page.visibilityState = "hidden";
    sent.length = 0;
    page.dispatchEvent(new Event("visibilitychange"));
    assert.deepEqual(sent, [["/events", true]]); // before anything was awaited
    while (client.pending > 0) await new Promise((resolve) => setTimeout(resolve, 10));
    assert.equal((await eventsOf(user)).length, 1);
    client.close();
  } finally {
    globalThis.fetch = real;
    delete globalThis.document;
    delete globalThis.addEventListener;
    delete globalThis.removeEventListener;
  }
});

test("ids are random, also without a secure context", () => {
  assert.notEqual(newId(), newId());
  const random = crypto.randomUUID;
  try {
    Object.defineProperty(crypto, "randomUUID", { value: undefined, configurable: true });
    assert.match(newId(), /^[0-9a-f]{32}$/);
  } finally {
    Object.defineProperty(crypto, "randomUUID", { value: random, configurable: true });
  }
});
