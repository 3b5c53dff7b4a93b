"""Bodies for `POST /events`, by hypothesis: nearly right, wild, or no JSON at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import httpx2
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

JSON = "application/json"
NDJSON = "application/x-ndjson"
DOCUMENTED = {200, 400, 413, 415, 422, 503}


class Body(NamedTuple):
    """What is sent. ``rows``: how many it has, where that can be said of it at all."""

    content_type: str
    content: bytes
    rows: int | None


# Lone surrogates and NUL included: JSON can spell both.
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=300)
numbers = (
    st.integers()
    | st.floats()
    | st.sampled_from([2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**400, -(10**4000), 1e308])
)
scalars = st.none() | st.booleans() | numbers | texts
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)
ids = st.sampled_from(["user-1", "film-1", "a/b", "é", "x" * 256]) | texts | anything
times = (
    st.datetimes().map(str)
    | st.datetimes().map(lambda moment: moment.isoformat() + "Z")
    | st.sampled_from(["", "0000-00-00", "9999-12-31T23:59:59+23:59", "2026-02-30", "1e999"])
    | anything
)
events = st.fixed_dictionaries(
    {"user": ids, "item": ids},
    optional={
        "event_id": ids,
        "type": st.sampled_from(["click", "", "t" * 65]) | anything,
        "value": numbers | anything,
        "timestamp": times,
        "recommendation_id": ids,
    },
)
rows = (
    events
    | st.tuples(events, st.dictionaries(texts, anything, max_size=2)).map(lambda p: p[0] | p[1])
    | st.dictionaries(st.sampled_from(["user", "item", "value", "x"]), anything)
    | anything
)


def _dump(value: Any) -> bytes:
    return json.dumps(value).encode()


@st.composite
def lists(draw: st.DrawFn) -> Body:
    """JSON that is a list of rows, or one object."""
    if draw(st.booleans()):
        many = draw(st.lists(rows, max_size=6)) * draw(st.integers(1, 3))
        return Body(JSON, _dump(many), len(many))
    return Body(JSON, _dump(draw(events)), 1)


# A line is a row if anything but white space is in it.
lines = (
    rows.map(_dump)
    | st.binary(max_size=40)
    | st.sampled_from(
        [b"", b" \t", b"\r", b"{" * 200, b'"' + b"x" * 70_000 + b'"', b"\xef\xbb\xbf{}"]
    )
)


@st.composite
def streams(draw: st.DrawFn) -> Body:
    """NDJSON with lines of all kinds, with and without an end of the last one."""
    ending = draw(st.sampled_from([b"\n", b"\r\n"]))
    content = ending.join(draw(st.lists(lines, max_size=8))) + draw(st.sampled_from([b"", ending]))
    return Body(NDJSON, content, sum(1 for line in content.split(b"\n") if line.strip()))


@st.composite
def broken(draw: st.DrawFn) -> Body:
    """Bytes that came from elsewhere, or lost their end, under either name."""
    content = draw(st.binary(max_size=200) | anything.map(_dump) | lists().map(lambda b: b.content))
    content = content[: draw(st.integers(0, len(content)))]
    content_type = draw(st.sampled_from([JSON, NDJSON, f"{JSON}; charset=utf-16", "text/plain"]))
    return Body(content_type, content, None)


bodies = lists() | streams() | broken()


def for_each_body(count: int, use: Callable[[Body], None]) -> None:
    """Calls ``use`` with so many bodies, the same ones in every run; one that fails is made as
    small as it can be.
    """
    chosen = settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )

    @chosen
    @given(bodies)
    def each(body: Body) -> None:
        use(body)

    each()


def post(client: httpx2.Client, body: Body) -> httpx2.Response:
    """What the service says to it."""
    headers = {"Content-Type": body.content_type}
    return client.post("/events", content=body.content, headers=headers)


def check_answer(body: Body, response: httpx2.Response) -> None:
    """What holds of every answer."""
    summary = (response.status_code, response.text[:500])
    assert response.status_code in DOCUMENTED, summary
    if response.status_code != 200:
        assert response.headers["content-type"] == "application/problem+json", summary
        assert response.json()["status"] == response.status_code, summary
        assert body.rows is None, summary  # what is wrong with rows is said row by row
        return
    answer = response.json()
    assert answer.keys() == {"accepted", "duplicates", "rejected", "last_seq"}, summary
    assert min(answer["accepted"], answer["duplicates"], answer["last_seq"]) >= 0, summary
    indices = [row["index"] for row in answer["rejected"]]
    assert indices == sorted(set(indices)), summary
    assert all(row["code"] and row["detail"] for row in answer["rejected"]), summary
    if body.rows is not None:
        counted = answer["accepted"] + answer["duplicates"] + len(indices)
        assert counted == body.rows, summary
        assert not indices or indices[-1] < body.rows, summary
