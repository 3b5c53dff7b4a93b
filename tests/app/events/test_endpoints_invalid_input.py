"""Invalid input to `POST /events`: a rejection by row or a 4xx, never a 5xx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.settings import load_settings
from app.events.service import EventService
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import until

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
NDJSON = {"content-type": "application/x-ndjson"}
GOOD = {"user": "u", "item": "i"}


BAD_ROWS = [
    ('{"item": "i"}', "missing_user"),
    ('{"user": "u"}', "missing_item"),
    ('{"user": null, "item": "i"}', "missing_user"),
    ('{"user": 1, "item": "i"}', "invalid_user"),
    ('{"user": true, "item": "i"}', "invalid_user"),
    ('{"user": "", "item": "i"}', "invalid_user"),
    ('{"user": "u", "item": ["i"]}', "invalid_item"),
    ('{"user": "u", "item": "a\\u0000b"}', "invalid_item"),
    ('{"user": "\\ud800", "item": "i"}', "invalid_user"),
    ('{"user": "%s", "item": "i"}' % ("é" * 129), "invalid_user"),
    ('{"user": "%s", "item": "i"}' % ("x" * 10_000), "invalid_user"),
    ('{"user": "u", "item": "i", "event_id": 7}', "invalid_event_id"),
    ('{"user": "u", "item": "i", "event_id": ""}', "invalid_event_id"),
    ('{"user": "u", "item": "i", "type": "%s"}' % ("x" * 65), "invalid_type"),
    ('{"user": "u", "item": "i", "recommendation_id": {}}', "invalid_recommendation_id"),
    ('{"user": "u", "item": "i", "value": true}', "invalid_value"),
    ('{"user": "u", "item": "i", "value": "1"}', "invalid_value"),
    ('{"user": "u", "item": "i", "value": NaN}', "invalid_value"),
    ('{"user": "u", "item": "i", "value": -Infinity}', "invalid_value"),
    ('{"user": "u", "item": "i", "value": 1e999}', "invalid_value"),
    ('{"user": "u", "item": "i", "value": 1%s}' % ("0" * 399), "invalid_value"),
    ('{"user": "u", "item": "i", "value": 1%s}' % ("0" * 9999), "invalid_value"),
    ('{"user": "u", "item": "i", "timestamp": "99999-01-01"}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": "3000-01-01"}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": "1969-12-31T23:59:59Z"}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": "0001-01-01T00:00+23:59"}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": "yesterday"}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": ""}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": -1}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": NaN}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": 1e308}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": 1%s}' % ("0" * 399), "invalid_timestamp"),
    ('{"user": "u", "item": "i", "timestamp": false}', "invalid_timestamp"),
    ('{"user": "u", "item": "i", "tiemstamp": 1}', "unknown_field"),
    ('{"user": "u", "item": "i", "\\ud800": 1}', "unknown_field"),
    ("[]", "invalid_event"),
    ("null", "invalid_event"),
]


async def test_each_bad_row_is_rejected_and_affects_no_other(client: httpx2.AsyncClient) -> None:
    good = json.dumps(GOOD)
    body = ", ".join(f"{good}, {row}" for row, _ in BAD_ROWS)
    response = await client.post("/events", content=f"[{body}]".encode(), headers=JSON)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["accepted"] == len(BAD_ROWS)
    rejected = {bad["index"]: bad["code"] for bad in answer["rejected"]}
    assert rejected == {2 * k + 1: code for k, (_, code) in enumerate(BAD_ROWS)}
    assert len((await client.get("/users/u/events")).json()["items"]) == len(BAD_ROWS)


GOOD_ROWS: list[dict[str, Any]] = [
    {"user": "x" * 256, "item": "é" * 128, "event_id": "😀" * 64},
    {"user": "a b/c%2F?#\n\t", "item": ".."},
    {"user": "u", "item": "i", "event_id": None, "type": None, "value": None},
    {"user": "u", "item": "i", "value": -0.0, "timestamp": "2999-12-31T23:59:59Z"},
    {"user": "u", "item": "i", "value": 2**64, "timestamp": 1e9},
    {"user": "u", "item": "i", "value": 1.7976931348623157e308, "timestamp": "20200101"},
]


async def test_extreme_but_valid_rows_come_back_unchanged(client: httpx2.AsyncClient) -> None:
    response = await client.post("/events", json=GOOD_ROWS)
    assert response.json()["rejected"] == []
    for row in GOOD_ROWS:
        history = await client.get(f"/users/{quote(row['user'], safe='')}/events")
        stored = history.json()["items"]
        assert (row["item"], row["user"]) in [(event["item"], event["user"]) for event in stored]
        if row.get("value") is not None:
            assert row["value"] in [event["value"] for event in stored]


BAD_BODIES = [
    (b"", 400, "malformed_json"),
    (b" ", 400, "malformed_json"),
    (b"{", 400, "malformed_json"),
    (b'{"user": "u", "item": "i"},', 400, "malformed_json"),
    (b"\xff\xfe[\x00]\x00", 400, "malformed_json"),
    (b'{"user": "\xff", "item": "i"}', 400, "malformed_json"),
    (b"\xef\xbb\xbf[]", 400, "malformed_json"),
    (b"[" * 100_000, 400, "malformed_json"),
    (b"[" * 100_000 + b"]" * 100_000, 400, "malformed_json"),
    (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, 400, "malformed_json"),
    (b"7", 422, "invalid_request"),
    (b'"event"', 422, "invalid_request"),
    (b"null", 422, "invalid_request"),
    (b"NaN", 422, "invalid_request"),
]


async def test_a_bad_body_is_a_problem_document(client: httpx2.AsyncClient) -> None:
    for body, status, code in BAD_BODIES:
        response = await client.post("/events", content=body, headers=JSON)
        assert (response.status_code, response.json()["code"]) == (status, code), body[:40]
        assert response.headers["content-type"] == "application/problem+json"


async def test_ndjson_lines_have_outcomes_by_row(client: httpx2.AsyncClient) -> None:
    lines = [json.dumps({"user": "u", "item": f"i{k}", "event_id": f"e{k}"}) for k in range(1200)]
    lines[3] = "{broken"
    lines[700] = json.dumps({"user": "u"})
    lines[900] = json.dumps({"user": "u", "item": "x" * 70_000})
    lines[1100] = json.dumps({"user": "u", "item": "x" * 200_000})
    lines.insert(10, "  ")
    response = await client.post("/events", content="\n".join(lines).encode(), headers=NDJSON)
    answer = response.json()
    assert (response.status_code, answer["accepted"]) == (200, 1196)
    # Empty lines are not rows; the index counts the rows.
    assert [(bad["index"], bad["code"]) for bad in answer["rejected"]] == [
        (3, "malformed_json"),
        (700, "missing_item"),
        (900, "line_too_long"),
        (1100, "line_too_long"),
    ]
    again = await client.post("/events", content="\r\n".join([*lines, ""]).encode(), headers=NDJSON)
    assert again.json()["duplicates"] == 1196
    assert again.json()["last_seq"] == 1196


async def test_ndjson_lines_may_be_split_across_chunks(client: httpx2.AsyncClient) -> None:
    for size in (1, 7, 1000):
        long = b"x" * (10 if size == 1 else 66_000)
        body = b'{"user":"\xc3\xa9","item":"a"}\n' + long + b'\n{"user":"\xc3\xa9","item":"b"}'

        async def pieces(body: bytes = body, size: int = size) -> AsyncIterator[bytes]:
            for start in range(0, len(body), size):
                yield body[start : start + size]

        response = await client.post("/events", content=pieces(), headers=NDJSON)
        answer = response.json()
        assert answer["accepted"] == 2
        assert [bad["index"] for bad in answer["rejected"]] == [1]


@pytest.mark.slow
async def test_lines_of_a_stream_that_goes_on_are_stored_soon(client: httpx2.AsyncClient) -> None:
    async def stored(n: int) -> bool:
        answer = (await client.get("/users/u/events")).json()
        return len(answer.get("items", ())) == n

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"user": "u", "item": "a"}\n{"user": "u", "it'
        await until(lambda: stored(1))
        yield b'em": "b"}\n'
        await until(lambda: stored(2))
        for _ in range(15):  # lines that keep coming delay none before them
            yield b'{"user": "v", "item": "c"}\n'
            await asyncio.sleep(0.02)
        assert (await client.get("/users/v/events")).status_code == 200

    response = await client.post("/events", content=pieces(), headers=NDJSON)
    assert response.json()["accepted"] == 17


async def test_the_loop_takes_turns_while_a_long_list_is_validated(services: Services) -> None:
    validated = asyncio.create_task(services.events.add_rows([{"user": "u"}] * 50_000, 0))
    turns = 0
    while not validated.done():
        await asyncio.sleep(0)
        turns += 1
    assert len((await validated).rejected) == 50_000
    assert turns > 100


async def test_long_lines_are_stored_before_they_fill_the_memory(
    client: httpx2.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[int] = []
    add_rows = EventService.add_rows

    async def count(self: EventService, rows: list[Any], *more: Any, **named: Any) -> Any:
        groups.append(len(rows))
        return await add_rows(self, rows, *more, **named)

    monkeypatch.setattr(EventService, "add_rows", count)
    line = b'{"user": "u", "item": "a", "x": "' + b"x" * 60_000 + b'"}\n'
    response = await client.post("/events", content=line * 100, headers=NDJSON)
    assert len(response.json()["rejected"]) == 100
    assert max(groups) <= 18


async def test_ndjson_is_not_bound_by_the_limits_on_lists(client: httpx2.AsyncClient) -> None:
    line = json.dumps({"user": "u", "item": "i", "recommendation_id": "r" * 250}) + "\n"
    response = await client.post("/events", content=(line * 10_500).encode(), headers=NDJSON)
    assert response.json()["accepted"] == 10_500


async def test_ndjson_stops_after_too_many_rejections(client: httpx2.AsyncClient) -> None:
    response = await client.post("/events", content=b"x\n" * 50_000, headers=NDJSON)
    rejected = response.json()["rejected"]
    assert rejected[-1]["code"] == "too_many_rejected"
    assert len(rejected) == 10_001


_scalars = (
    st.none()
    | st.booleans()
    | st.integers(min_value=-(10**30), max_value=10**30)
    | st.floats()
    | st.text(max_size=20)
)
_anything = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
_events = st.fixed_dictionaries(
    {},
    optional={
        name: _anything | st.text(min_size=1, max_size=5)
        for name in ("event_id", "user", "item", "type", "value", "timestamp", "recommendation_id")
    },
)


@pytest.mark.slow
def test_no_body_is_ever_a_server_error(tmp_path: Path, sqlite_template: Path) -> None:
    """On one running service: hypothesis would otherwise start one for each example."""
    app: FastAPI = create_app(load_settings(data_dir=tmp_path, event_group_ms=0))
    with asyncio.Runner() as runner:
        lifespan = app.router.lifespan_context(app)
        runner.run(lifespan.__aenter__())
        client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://localhost"
        )

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(_anything | _events | st.lists(_events | _anything, max_size=5))
        def check(body: Any) -> None:
            # As json.dumps writes it: with NaN, huge integers and lone surrogates.
            content = json.dumps(body).encode()
            for headers in (JSON, NDJSON):
                response = runner.run(client.post("/events", content=content, headers=headers))
                assert response.status_code in (200, 422), response.text
                if response.status_code == 200:
                    answer = response.json()
                    rows = len(body) if isinstance(body, list) and headers is JSON else 1
                    outcomes = answer["accepted"] + answer["duplicates"] + len(answer["rejected"])
                    assert outcomes == rows

        check()
        runner.run(client.aclose())
        runner.run(lifespan.__aexit__(None, None, None))
