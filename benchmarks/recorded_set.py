"""What two versions of the service are compared on: a data folder, and the requests that are sent.

The old version makes the data folder once; each version gets a copy. The same seed gives the same
requests in the same order.
"""

from __future__ import annotations

import json
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import httpx2

from ncr_core.data.synthetic import synthetic_catalogue

ENDED = ("succeeded", "failed", "cancelled", "rejected")
JOB_SECONDS = 900
TRAININGS: tuple[dict[str, Any], ...] = (
    {"model": "neupr", "factors": 8, "epochs": 3, "force": True},
    {"model": "nbpr", "factors": 16, "epochs": 3, "force": True},
    {"model": "nbpr", "factors": 8, "users": "history", "epochs": 2, "force": True},
    {"model": "neupr", "factors": 8, "epochs": 4, "seed": 1, "force": True},
)
JSON, NDJSON = "application/json", "application/x-ndjson"
BASE_TIME = 1_790_000_000  # of the events that are posted, in seconds since 1970
NEW_ITEMS = [f"after-the-training-{n}" for n in range(6)]
NEW_ITEM_USERS = 12
NEWCOMERS = [f"newcomer {n}/ü" for n in range(30)]
STRANGERS = [f"nobody-{n}" for n in range(100)]


@dataclass(frozen=True)
class Origin:
    """The contents of a data folder; versions and jobs newest first, the first version active."""

    folder: Path
    users: list[str]
    items: list[str]
    versions: list[str]
    jobs: list[str]
    categories: list[str]

    @classmethod
    def read(cls, folder: Path) -> Origin:
        with closing(sqlite3.connect(folder / "ncr.db")) as connection:

            def column(query: str) -> list[str]:
                return [str(row[0]) for row in connection.execute(query)]

            return cls(
                folder,
                users=column("SELECT external_id FROM users ORDER BY id"),
                items=column("SELECT external_id FROM items ORDER BY id"),
                versions=column("SELECT version FROM models ORDER BY created_at DESC"),
                jobs=column("SELECT job_id FROM jobs ORDER BY created_at DESC"),
                categories=sorted(
                    set(column("SELECT value FROM items, json_each(items.categories)"))
                ),
            )


def fill(client: httpx2.Client, *, imported: bool) -> None:
    """Adds feedback, models and an ended trial, and a synthetic catalogue if nothing is imported.

    The feedback holds dislikes, other types of event, preferences, a hidden item, and deletions.
    """
    if imported:
        items = _json(client.get("/items", params={"n": 1000}))["items"]
        if not any(item["categories"] for item in items):
            for index, item in enumerate(items):
                item["categories"] = [f"shelf {index % 7}"]
            rows = [{key: item[key] for key in ("id", "title", "categories")} for item in items]
            _json(client.post("/items", json=rows))
    else:
        catalogue = synthetic_catalogue()
        rows = [{"id": i.id, "title": i.title, "categories": [i.genre]} for i in catalogue.items]
        _json(client.post("/items", json=rows))
        events: list[dict[str, Any]] = [
            {"event_id": f"{user}-{item}", "user": user, "item": item, "timestamp": 1_000_000 + n}
            for user, item, n in catalogue.interactions
        ]
        for begin in range(0, len(events), 10_000):
            _json(client.post("/events", json=events[begin : begin + 10_000]))
    _add_feedback(client)
    for order in TRAININGS:
        train(client, order)
    models = _json(client.get("/admin/models"))["items"]
    trial = client.post("/admin/trials", json={"kind": "shadow", "version": models[1]["version"]})
    if trial.status_code == 201:
        _json(client.post(f"/admin/trials/{trial.json()['trial_id']}/stop"))
    else:
        print(f"no trial: {trial.text}")


def _add_feedback(client: httpx2.Client) -> None:
    rng = random.Random(1)
    items = [item["id"] for item in _json(client.get("/items", params={"n": 300}))["items"]]
    names = [f"{prefix}{n}" for prefix in ("", "user-") for n in range(1, 300)]
    users = [u for u in names if client.get(f"/users/{u}/events?n=1").status_code == 200]
    users = users or names[299:]
    events = [
        {
            "event_id": f"feedback-{n}",
            "user": rng.choice(users),
            "item": rng.choice(items),
            "type": rng.choice(["dislike", "view", "purchase", "rating"]),
            "value": rng.choice([None, 1, 3.5, 5]),
            "timestamp": 2_000_000 + n,
        }
        for n in range(600)
    ]
    _json(client.post("/events", json=events))
    pairs = [
        {"user": rng.choice(users), "winner": winner, "loser": loser}
        for winner, loser in (rng.sample(items, 2) for _ in range(300))
    ]
    _json(client.post("/preferences", json=pairs))
    for n in range(20):
        client.delete(f"/events/feedback-{n}").raise_for_status()
    _json(client.patch(f"/items/{items[0]}", json={"hidden": True}))
    client.delete(f"/items/{items[1]}").raise_for_status()


def train(client: httpx2.Client, order: dict[str, Any]) -> dict[str, Any]:
    """Trains through the queue and waits; the ended job."""
    job_id = _json(client.post("/admin/train", json=order))["job_id"]
    until = time.monotonic() + JOB_SECONDS
    while time.monotonic() < until:
        job: dict[str, Any] = client.get(f"/admin/jobs/{job_id}").json()
        if job["status"] in ENDED:
            return job
        time.sleep(0.2)
    raise SystemExit(f"a training did not end within {JOB_SECONDS} s: {order}")


def _json(response: httpx2.Response) -> dict[str, Any]:
    if response.status_code >= 300:
        raise SystemExit(f"{response.request.method} {response.request.url}: {response.text}")
    document: dict[str, Any] = response.json()
    return document


@dataclass(frozen=True)
class Request:
    """One request of the recorded set."""

    kind: str
    method: str
    path: str
    body: bytes = b""
    content_type: str = JSON


class RecordedSet:
    """The requests on a data folder; a third of the users post events between two lists."""

    def __init__(self, origin: Origin, n_users: int, seed: int = 0) -> None:
        self.origin = origin
        self._rng = random.Random(seed)
        self.users = self._rng.sample(origin.users, min(n_users, len(origin.users)))
        self.active = self.users[: len(self.users) // 3]

    def reads(self, when: str, n_users: int | None = None) -> Iterator[Request]:
        """Requests that change nothing; ``when`` becomes part of the names of their kinds."""
        users = self.users[:n_users]
        parts = self._lists(users), self._item_requests(users), self._history(), self._admin()
        for part in parts:
            for request in part:
                yield replace(request, kind=f"{when}: {request.kind}")

    def _lists(self, users: list[str]) -> Iterator[Request]:
        rng, items, categories = self._rng, self.origin.items, self.origin.categories
        queries: list[tuple[str, dict[str, Any]]] = [
            ("n=10", {}),
            ("n=10, again", {}),
            ("n=50, explain=pairwise", {"n": 50, "explain": "pairwise"}),
            ("exclude_seen=false", {"exclude_seen": "false", "n": 20}),
            ("diversity=0.5", {"diversity": 0.5}),
            ("n=1000", {"n": 1000}),
        ]
        for name, query in queries:
            some = users if query.get("n", 0) < 1000 else users[:20]
            yield from (_list(f"list, {name}", user, query) for user in some)
        combined = {"explain": "pairwise", "diversity": 0.2, "exclude_seen": "false", "n": 7}
        for user in users:
            category = {"category": rng.sample(categories, min(2, len(categories)))}
            yield _list("list, category", user, category)
            yield _list("list, exclude", user, {"exclude": rng.sample(items, 30), "n": 15})
            yield _list("list, all together", user, {**category, **combined})
        for version in self.origin.versions:
            yield from (_list("list, model", u, {"model": version}) for u in users[:50])
        yield from (_list("list, newcomer", u, {"explain": "pairwise"}) for u in NEWCOMERS)
        yield from (_list("list, unknown user", u, {}) for u in STRANGERS)
        for begin in range(0, len(users), 100):
            some = [*users[begin : begin + 100], STRANGERS[0], "", NEWCOMERS[0]]
            yield _post("batch", "/recommend/batch", {"users": some, "n": 20})
            explained = {"users": some, "explain": "pairwise", "category": categories[:1]}
            yield _post("batch", "/recommend/batch", explained)

    def _item_requests(self, users: list[str]) -> Iterator[Request]:
        rng, items = self._rng, self.origin.items
        for user in [*users[:100], *NEWCOMERS[:10], *STRANGERS[:10]]:
            some = rng.sample(items, min(40, len(items)))
            yield _post("rerank", "/rerank", {"user": user, "items": [*some, "no such item"]})
            yield _post("compare", "/compare", {"user": user, "items": some[:6]})
        for user in [*users[:12], *NEWCOMERS[:2], *STRANGERS[:2]]:  # a second each
            yield Request("questions", "GET", f"/users/{_id(user)}/questions?n=5")
        for item in [*rng.sample(items, min(200, len(items))), *NEW_ITEMS]:
            yield Request("similar", "GET", f"/items/{_id(item)}/similar?n=20")
            yield Request("item", "GET", f"/items/{_id(item)}")

    def _history(self) -> Iterator[Request]:
        for user in [*self.users[:200], *NEWCOMERS]:
            yield Request("events of a user", "GET", f"/users/{_id(user)}/events?n=50")
        yield Request("items", "GET", "/items?n=1000")
        for category in self.origin.categories[:5]:
            yield Request("items", "GET", f"/items?{urlencode({'n': 20, 'category': category})}")

    def _admin(self) -> Iterator[Request]:
        paths = ["models", "models?n=2", "activations", "jobs", "jobs?n=2", "trials"]
        paths += [f"models/{version}" for version in self.origin.versions]
        paths += [f"jobs/{job}" for job in self.origin.jobs]
        yield from (Request("health", "GET", f"/health/{name}") for name in ("live", "ready"))
        yield from (Request("admin", "GET", f"/admin/{path}") for path in paths)

    def writes(self) -> Iterator[Request]:
        """Events in every form, preferences, deletions and changes of the catalogue."""
        rng, items, kind = self._rng, self.origin.items, "events posted"
        for n, user in enumerate(self.active):
            rows = [self._event(f"w-{n}-{i}", user, rng.choice(items)) for i in range(3)]
            yield _post(kind, "/events", rows)
            if n % 5 == 0:
                yield _post(kind, "/events", rows)  # once more: duplicates
                yield _post(kind, "/events", {**rows[0], "item": rows[1]["item"], "value": 2})
        for n, user in enumerate(NEWCOMERS):
            rows = [self._event(f"n-{n}-{i}", user, rng.choice(items)) for i in range(1 + n % 5)]
            lines = b"\n".join(json.dumps(row).encode() for row in rows) + b"\n{bad\n\n"
            yield Request("events as NDJSON", "POST", "/events", lines, NDJSON)
        bad: list[Any] = [
            {}, 5, {"user": "", "item": "x"}, {"user": "u"}, {"user": "u", "item": "x" * 257},
            {"user": "u", "item": "x", "value": "much"}, {"user": "u", "item": "x", "more": 1},
            {"user": "u", "item": "x", "timestamp": "yesterday"}, {"user": "u\0", "item": "x"},
            {"user": "u", "item": "x", "timestamp": -5}, {"user": 1, "item": "x"},
        ]  # fmt: skip
        for path in ("/events", "/preferences", "/items"):
            yield _post("events, bad rows", path, bad)
        new = [
            self._event(f"fresh-{item}-{user}", user, item)
            for item in NEW_ITEMS
            for user in rng.sample(self.users, min(NEW_ITEM_USERS, len(self.users)))
        ]
        yield _post("events on new items", "/events", new)
        for user in self.active[:40]:
            winner, loser = rng.sample(items, 2)
            row = {"user": user, "winner": winner, "loser": loser, "timestamp": BASE_TIME}
            yield _post("preferences", "/preferences", row)
        paths = [f"/events/w-{n}-1" for n in range(0, len(self.active), 3)]
        paths += [f"/users/{_id(user)}" for user in self.active[-5:]]
        yield from (Request("deletions", "DELETE", path) for path in paths)
        title = {"title": "Another title", "categories": self.origin.categories[:1]}
        yield _post("catalogue", f"/items/{_id(items[5])}", title, "PUT")
        yield _post("catalogue", "/items/brand%2Fnew", title, "PUT")
        yield _post("catalogue", f"/items/{_id(items[6])}", {"hidden": True}, "PATCH")
        yield Request("catalogue", "DELETE", f"/items/{_id(items[7])}")
        rows = [{"id": items[8], "title": "T", "attributes": {"a": [1, None]}}, {"id": "new one"}]
        yield _post("catalogue", "/items", rows)

    def _event(self, event_id: str, user: str, item: str) -> dict[str, Any]:
        types = ["interaction", "interaction", "dislike", "view", "rating"]
        return {
            "event_id": event_id,
            "user": user,
            "item": item,
            "type": self._rng.choice(types),
            "value": self._rng.choice([None, 2, 4.5]),
            "timestamp": BASE_TIME + self._rng.randrange(1_000_000),
            "recommendation_id": self._rng.choice([None, "some.18c2a3b4c5d.0123456789ab"]),
        }

    def errors(self) -> Iterator[Request]:
        """Requests that are refused."""
        user, item = self.users[0], _id(self.origin.items[0])
        queries = [
            "n=0", "n=1001", "n=ten", "exclude_seen=perhaps", "explain=all", "min_seq=-1",
            "diversity=2", "model=none", "model=", "diversity=nan", "min_seq=9999999999",
            "exclude=", "category=", "n=5&unknown=1", "exclude=%00", "category=" + "x" * 300,
            "&".join(["category=a"] * 65),
        ]  # fmt: skip
        paths = [
            *(f"/recommend/{_id(user)}?{query}" for query in queries),
            "/recommend/", "/recommend/a/b", "/recommend/%00", "/recommend/%ff", "/nowhere",
            f"/recommend/{'x' * 257}", "/items/none", "/items/none/similar",
            f"/items/{item}/similar?n=0", "/items?cursor=rubbish", "/items?n=0",
            "/users/nobody/events", "/admin/jobs/none", f"/users/{_id(user)}/events?cursor=%21",
            f"/users/{_id(user)}/questions?n=0", "/admin/models/none", "/admin/trials/none",
            "/admin/jobs?cursor=x", "/events", "/recommend", "/admin/train",
        ]  # fmt: skip
        yield from (Request("errors, GET", "GET", path) for path in paths)
        bodies: list[Any] = [
            {}, [], 5, None, "x", {"user": user}, {"user": 1, "items": []},
            {"user": user, "items": ["a"] * 1001}, {"users": ["a"] * 1001},
            {"user": user, "items": ["none", "such"]}, {"users": ["a"], "n": 0},
            {"users": ["a"], "more": 1}, {"users": ["a"], "diversity": "x"},
            {"user": "", "items": ["a"]}, {"model": "svd"}, {"factors": 0}, {"epochs": 1.5},
            {"start": "hot"}, {"force": "yes"}, {"kind": "other", "version": "x"},
            {"kind": "shadow", "version": "none"},
        ]  # fmt: skip
        paths = ["/recommend/batch", "/rerank", "/compare", "/admin/trials", "/admin/train"]
        for path in paths:
            for body in bodies:
                if path != "/admin/train" or body not in ({}, None):
                    yield _post(f"errors, POST {path}", path, body)
        for path in (*paths, "/events", "/items", "/preferences"):
            for content in (b"{", b"\xff\xfe", b"[" * 5000):
                yield Request("errors, body", "POST", path, content)
        too_many = [{"user": "u", "item": "i"}] * 10_001
        yield from (_post("errors, body", path, too_many) for path in ("/events", "/items"))
        cancelled = f"jobs/{self.origin.jobs[-1]}/cancel"
        for path in (cancelled, "jobs/none/cancel", "models/none/activate", "trials/x/stop"):
            yield _post("errors, admin", f"/admin/{path}", {})
        for method, path in (
            ("DELETE", "/events/none"), ("DELETE", "/users/nobody"), ("DELETE", "/items/none"),
            ("PATCH", "/items/none"), ("PUT", f"/recommend/{_id(user)}"),
            ("DELETE", "/health/live"), ("DELETE", "/admin/models/pin"),
            ("POST", f"/admin/models/{self.origin.versions[0]}/pin?x=1"), ("OPTIONS", "/events"),
            ("HEAD", f"/recommend/{_id(user)}"),
        ):  # fmt: skip
            yield Request("errors, method or name", method, path)

    def activations(self) -> Iterator[Request]:
        """Another version is activated and pinned, and the one before it activated again."""
        model = f"/admin/models/{self.origin.versions[1]}"
        for method, path in (
            ("POST", f"{model}/activate"), ("POST", f"{model}/pin"),
            ("DELETE", "/admin/models/pin"), ("POST", "/admin/models/rollback"),
            ("GET", "/admin/models"),
        ):  # fmt: skip
            yield Request("admin changes", method, path)


def _list(kind: str, user: str, query: dict[str, Any]) -> Request:
    return Request(kind, "GET", f"/recommend/{_id(user)}?{urlencode(query, doseq=True)}")


def _post(kind: str, path: str, body: Any, method: str = "POST") -> Request:
    return Request(kind, method, path, json.dumps(body).encode())


def _id(name: str) -> str:
    return quote(name, safe="")
