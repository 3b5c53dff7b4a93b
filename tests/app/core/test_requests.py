"""Ids in paths, large bodies, and cursors of pages."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

import httpx2
import orjson
import pytest
from fastapi import FastAPI

from app.core import requests as module
from app.core.errors import AppError
from app.core.requests import (
    Steps,
    at_once,
    encode_cursor,
    in_turn,
    loads_lenient,
    parse_json,
    text_problem,
    text_schema,
)
from app.core.settings import load_settings
from app.main import create_app
from tests.app.conftest import client_of
from tests.app.core.conftest import check_problem, raw_request

pytestmark = pytest.mark.anyio


IDS = [
    "plain",
    "a/b",
    "/",
    "a b",
    "100%",
    "%2F",
    "..",
    ".",
    "😀/é",
    "?#&=+;",
    "a\tb\n",
    "x" * 256,
    "é" * 128,
    "live",
]


async def test_any_encoded_id_is_one_path_segment(client: httpx2.AsyncClient) -> None:
    for name in IDS:
        encoded = quote(name, safe="").replace(".", "%2E")
        put = await client.put(f"/items/{encoded}", json={"title": "t"})
        assert (put.status_code, put.json()["id"]) == (201, name)
        posted = await client.post("/events", json={"user": name, "item": name, "event_id": name})
        assert posted.json()["accepted"] == 1
        history = await client.get(f"/users/{encoded}/events?n=1")
        assert [event["item"] for event in history.json()["items"]] == [name]
        assert (await client.delete(f"/events/{encoded}")).status_code == 204
    assert len((await client.get("/items?n=1000")).json()["items"]) == len(IDS)


async def test_invalid_ids_in_paths_are_422(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for bad in (
            "%FF",
            "%C3",
            "%00",
            "a%00b",
            "%ED%A0%80",
            "x" * 257,
            "x" * 10_000,
            "%C3%A9" * 129,
        ):
            check_problem(await client.get(f"/items/{bad}"), 422, "invalid_id")


async def _raw(app: FastAPI, raw_path: bytes | None, path: str) -> tuple[int, bytes]:
    return await raw_request(app, path=path, **({"raw_path": raw_path} if raw_path else {}))


async def test_unencoded_and_missing_raw_paths_are_routed(open_app: FastAPI) -> None:
    async with client_of(open_app) as client:
        for name in ("%C3%A9", "a%25b"):
            assert (await client.put(f"/items/{name}", json={})).status_code == 201
    # UTF-8 that is not encoded; a query left in; no raw path at all; a broken escape.
    assert (await _raw(open_app, "/items/é".encode(), "/items/é"))[0] == 200
    assert (await _raw(open_app, b"/items/%C3%A9?n=1", "/items/é"))[0] == 200
    assert (await _raw(open_app, None, "/items/é"))[0] == 200
    assert (await _raw(open_app, None, "/items/a%b"))[0] == 200
    status, body = await _raw(open_app, b"/items/%zz", "/items/%zz")
    assert (status, b"invalid_id" in body) == (422, True)
    assert (await _raw(open_app, b"/items/%", "/items/%"))[0] == 422
    assert (await _raw(open_app, b"*", "*"))[0] == 404


def test_the_json_schema_of_ids_agrees_with_their_check() -> None:
    schema = text_schema(64)
    for text in ("", "a", "a" * 64, "a" * 65, "a\0", "\0", "a\nb", "é"):
        fits = schema["minLength"] <= len(text) <= schema["maxLength"]
        assert (fits and bool(re.search(schema["pattern"], text))) is not bool(
            text_problem(text, 64)
        ), repr(text)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/items", ""),
        ("/admin/activations", ""),
        ("/admin/jobs", ":key-0b0e"),
        ("/admin/models", ":20260101-000000-0b0e"),
        ("/admin/trials", ":trial-20260101-000000-0b0e0b0e"),
    ],
)
async def test_a_cursor_beyond_the_end_is_an_empty_page(
    client: httpx2.AsyncClient, path: str, name: str
) -> None:
    cursor = encode_cursor(10**18 - 1, name)
    assert (await client.get(path, params={"cursor": cursor})).status_code == 200
    if name:  # earlier versions gave cursors without an id
        answer = await client.get(path, params={"cursor": encode_cursor(10**18 - 1)})
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_cursor")


async def test_unknown_query_parameters_are_refused(shared_client: httpx2.AsyncClient) -> None:
    for path, nearest in (
        ("/recommend/u?categroy=x", "category"),
        ("/recommend/u?n=3&categroy=x", "category"),
        ("/recommend/u?n=3&n=4&Category=x", "category"),
        ("/items?curser=x", "cursor"),
        ("/users/u/events?m=1", None),
        ("/items/i?=x", None),
        ("/items/i?%FF=x", None),
        ("/items/i?" + "x" * 2000 + "=1", None),
        ("/admin/jobs?cursr=", "cursor"),
    ):
        for _ in range(2):  # neither the first nor a later one
            body = check_problem(await shared_client.get(path), 422, "unknown_parameter")
            assert (f"; did you mean {nearest}?" in body["detail"]) == (nearest is not None), path
            assert len(body["detail"]) < 200
    forced = await shared_client.post("/admin/models/v/activate?forced=true")
    check_problem(forced, 422, "unknown_parameter")  # the parameter of what the route depends on
    forced = await shared_client.post("/admin/models/v/activate?force=true")
    check_problem(forced, 404, "unknown_model")
    for path in ("/recommend/u?n=3", "/recommend/u?", "/items?n=1&category=a&category=b"):
        assert (await shared_client.get(path)).status_code == 200
    for path in ("/metrics?name[]=x", "/health/live?t=1"):
        assert (await shared_client.get(path)).status_code == 200


# Large bodies


def _random_value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return "".join(draw.choices('ab,[]{}"\\\n\té😀', k=draw.randrange(9)))
    if kind == 1:
        return draw.choice([None, True, False, 0, -1.5e9])
    if kind < 4:
        return draw.randrange(1000)
    values = [_random_value(draw, depth + 1) for _ in range(draw.randrange(5))]
    return values if kind < 6 else {str(n): value for n, value in enumerate(values)}


@pytest.mark.slow
@pytest.mark.parametrize("block_bytes", [1, 5, 1_000])
@pytest.mark.parametrize("loads", [orjson.loads, loads_lenient])
async def test_large_bodies_are_read_as_small_ones_are(
    loads: Any, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are malformed, wherever they are cut into parts."""

    async def outcome(body: bytes) -> Any:
        try:
            return repr(await parse_json(body, loads))
        except ValueError:
            return "malformed"

    draw = random.Random(3)
    bodies = [b"", b" ", b"[", b"]", b"[]", b"[ ]", b"[,]", b"[1,]", b"[,1]", b"[1]]", b"[1],[2]"]
    bodies += [
        b'["\\"]',
        b'["\\\\",1]',
        b'["\\",1]',
        b'[1,"]',
        b"[1 2]",
        b'{"a":[1,2]}',
        b'"[1,2]"',
    ]
    for _ in range(300):
        values = [_random_value(draw) for _ in range(draw.randrange(1, 9))]
        text = json.dumps(values, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, 1]))
        body = bytearray(text.encode())
        bodies.append(bytes(body))
        body[draw.randrange(len(body))] = draw.choice(b'[]{},"\\1 ')
        bodies.append(bytes(body))
    expected = [await outcome(body) for body in bodies]
    assert 50 < expected.count("malformed") < 500
    monkeypatch.setattr(module, "LARGE_BODY_BYTES", -1)
    monkeypatch.setattr(module, "PART_BYTES", 3)
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    assert [await outcome(body) for body in bodies] == expected


async def test_the_loop_takes_turns_while_a_large_body_is_parsed() -> None:
    rows = [{"user": f"u{n}", "item": "i", "x": list(range(150))} for n in range(6_000)]
    parsed = asyncio.create_task(parse_json(orjson.dumps(rows), orjson.loads))
    turns = 0
    while not parsed.done():
        await asyncio.sleep(0)
        turns += 1
    assert await parsed == rows
    assert turns > 10


async def test_works_on_large_bodies_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends one large body waits for a part of each of the others, and not for their ends."""
    monkeypatch.setattr(module, "STEP_SECONDS", 0.0)
    done: list[str] = []

    def work(name: str, steps: int) -> Steps[str]:
        for _ in range(steps):
            done.append(name)
            yield
        return name

    works = [work("long", 50), work("short", 5), work("none", 0)]
    assert await asyncio.gather(*map(in_turn, works)) == ["long", "short", "none"]
    assert done[:10].count("short") == 5
    assert done[10:] == ["long"] * 45
    with pytest.raises(ZeroDivisionError):
        await in_turn(1 / 0 for _ in range(3))  # type: ignore[arg-type]
    assert at_once(work("all", 3)) == "all"


async def test_large_bodies_are_read_at_a_bounded_rate(
    data_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    sleep = asyncio.sleep

    async def no_longer(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    chunk = b'{"id":"a"},' + b" " * (2**17 - 11)

    async def chunks(n: int) -> AsyncIterator[bytes]:
        yield b"["
        for _ in range(n):
            yield chunk
        yield b"{}]"

    app = create_app(load_settings(data_dir=data_dir))
    async with app.router.lifespan_context(app), client_of(app) as client:
        monkeypatch.setattr(module.asyncio, "sleep", no_longer)
        json_type = {"Content-Type": "application/json"}

        async def seconds_of(*sizes: int) -> float:
            slept.clear()
            posts = (client.post("/items", content=chunks(n), headers=json_type) for n in sizes)
            answers = await asyncio.gather(*posts)
            assert [answer.json()["accepted"] for answer in answers] == list(sizes)
            return sum(seconds for seconds in slept if seconds < 0.05)

        small = await seconds_of(1)
        one, two = await seconds_of(34), await seconds_of(34, 34)
    # The first chunks are not large yet, and the last few may be owed.
    assert small == 0
    assert one == pytest.approx(34 * len(chunk) / module.LARGE_BYTES_PER_SECOND, rel=0.2)
    assert two == pytest.approx(2 * one, rel=0.2)


@pytest.mark.parametrize(
    ("path", "good", "bad"),
    [
        ("/events", {"user": "u", "item": "i"}, {"user": "u", "item": 7}),
        ("/preferences", {"user": "u", "winner": "i", "loser": "j"}, {"user": "u", "winner": "i"}),
        ("/items", {"id": "i", "title": "t"}, {"id": "i", "title": 7}),
        ("/users", {"id": "u", "attributes": {"a": 1}}, {"id": "u", "attributes": 7}),
    ],
)
async def test_long_lists_are_answered_as_short_ones_are(
    client: httpx2.AsyncClient, path: str, good: Any, bad: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    await client.post("/items", json=[{"id": "i"}, {"id": "j"}])
    rows = [bad if n % 3 else good for n in range(250)]
    short = await client.post(path, json=rows)
    for name in ("app.core.requests", "app.events.service", "app.events.user_service"):
        monkeypatch.setattr(f"{name}.MAX_ROWS_AT_ONCE", 99)
    monkeypatch.setattr("app.catalog.service.MAX_ROWS_AT_ONCE", 99)
    long = await client.post(path, json=rows)
    assert short.status_code == long.status_code == 200
    outcome = short.json()
    assert outcome["accepted"] == 84
    assert [row["index"] for row in outcome["rejected"]] == [n for n in range(250) if n % 3]
    expected = [{"index", "code", "detail"}] * 166
    assert [set(row) for row in outcome["rejected"]] == expected
    assert list(outcome) == list(long.json())
    assert long.json() | {"last_seq": 0} == outcome | {"last_seq": 0}
    assert len(long.content) == int(long.headers["content-length"])


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"[" + b"{}," * 1_000_001 + b"1]", "too_many_values"),
        (b'{"users":[' + b"[]," * 100_001 + b"1]}", "too_many_values"),
        (b'["' + b"x" * 400_000 + b'",1]', "row_too_large"),
    ],
)
async def test_large_bodies_of_a_shape_that_no_route_takes_are_413(body: bytes, code: str) -> None:
    with pytest.raises(AppError) as refused:
        await parse_json(body, orjson.loads)
    assert (refused.value.status, refused.value.code) == (413, code)


async def test_bodies_that_are_announced_or_come_slowly_hold_up_no_others(
    data_dir: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()
    app = create_app(load_settings(data_dir=data_dir))
    headers = {"Content-Type": "application/json"}
    large = b'[{"id":"a"}' + b" " * 300_000 + b"]"

    async def late() -> AsyncIterator[bytes]:
        await go.wait()
        yield b"[]"

    async with app.router.lifespan_context(app), client_of(app) as client:
        announced = headers | {"Content-Length": "8000000"}
        held = [
            asyncio.create_task(client.post("/items", content=late(), headers=announced))
            for _ in range(8)
        ]
        await asyncio.sleep(0.2)
        assert (await client.post("/items", content=large, headers=headers)).status_code == 200
        go.set()
        await asyncio.gather(*held)
        monkeypatch.setattr(module, "MAX_BODY_SECONDS", -1.0)
        slow = await client.post("/items", content=large, headers=headers)
        check_problem(slow, 400, "body_too_slow")
        assert (await client.post("/items", json=[{"id": "a"}])).status_code == 200


@pytest.mark.slow
async def test_large_bodies_are_bounded_in_number_and_small_ones_are_not(data_dir: Any) -> None:
    go = asyncio.Event()
    body = b"[" + b",".join([b'{"id":"a"}' + b" " * 81_900] * 100) + b"]"
    half = len(body) // 2

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:half]
        await go.wait()
        yield body[half:]

    app = create_app(load_settings(data_dir=data_dir))
    headers = {"Content-Type": "application/json"}
    known = headers | {"Content-Length": str(len(body))}

    async with app.router.lifespan_context(app), client_of(app) as client:

        async def post(headers: dict[str, str]) -> httpx2.Response:
            return await client.post("/items", content=slowly(), headers=headers)

        # Of one the size is known, the others are counted as they arrive.
        held = [asyncio.create_task(post(h)) for h in (known, headers, headers, headers)]
        held += [asyncio.create_task(post(headers)) for _ in range(3)]
        await asyncio.sleep(0.2)
        refused = await post(known)
        check_problem(refused, 503, "overloaded")
        assert refused.headers["Retry-After"] == "1"
        assert (await client.post("/items", json=[{"id": "a"}])).status_code == 200
        go.set()
        statuses = [response.status_code for response in await asyncio.gather(*held)]
        assert statuses.count(503) >= 2
        assert statuses.count(200) >= 3
        assert (await post(known)).status_code == 200
