"""What servers share through Redis: faster with it, never wrong or broken without it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import FastAPI
from redis import Redis

from app.core.redis import RedisClient
from app.core.settings import Settings, load_settings
from app.main import create_app
from app.recommend.response import RankedList
from app.wiring import Services, build_services
from tests.app.conftest import add_small_data, client_of, publish_model, until
from tests.cluster.servers import RedisServer
from tests.conftest import skip_or_fail

pytestmark = pytest.mark.anyio


async def test_values_are_read_until_they_are_flushed(
    redis: RedisClient, redis_url: str, redis_prefix: str
) -> None:
    assert await redis.get("k") is None
    redis.put("k", b"\0v\xff")
    await until(lambda: redis.calls["stored"] == 1)
    assert await redis.get("k") == b"\0v\xff"
    with Redis.from_url(redis_url) as client:
        assert 0 < client.ttl(f"{redis_prefix}:k") <= 3600
        client.delete(f"{redis_prefix}:k")
        client.lpush(f"{redis_prefix}:k", "not a string")
    assert await redis.get("k") is None  # of another kind: as if it were not there
    assert redis.available
    assert redis.calls["failed"] == 1


async def test_hints_reach_all_servers_and_are_combined(
    redis: RedisClient, redis_url: str, redis_prefix: str
) -> None:
    other = RedisClient(redis_url, redis_prefix)
    heard = {"events": 0, "model": 0}

    def count(kind: str) -> None:
        heard[kind] += 1

    for kind in heard:
        other.on_hint(kind, lambda kind=kind: count(kind))
    other.start()
    try:
        # Once when it is there and once when it listens: there may be news.
        await until(lambda: heard == {"events": 2, "model": 2})
        for _ in range(1000):
            redis.hint("events")
        await until(lambda: heard["events"] >= 3)
        before = heard["events"]
        redis.hint("events")  # after those: heard by itself
        await until(lambda: heard["events"] > before)
        assert heard["events"] < 100
        assert heard["model"] == 2
    finally:
        await other.close()


@pytest.fixture
def own_redis(tmp_path: Path) -> Iterator[RedisServer]:
    """A server of the test's own, to be killed."""
    if not RedisServer.available():
        skip_or_fail("there is no redis-server")
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.mark.slow
async def test_the_client_survives_a_killed_paused_and_restarted_redis(
    own_redis: RedisServer,
) -> None:
    redis = RedisClient(own_redis.url, "test")
    redis.start()
    heard: list[int] = []
    redis.on_hint("model", lambda: heard.append(1))
    try:
        await until(lambda: redis.available)
        for stop, start in (
            (own_redis.kill, own_redis.start),
            (own_redis.pause, own_redis.resume),
        ):
            redis.put("k", b"v")
            await until(lambda: redis.calls["stored"] >= 1)
            heard.clear()
            stop()
            # A few calls find out; from then on none waits.
            await until(lambda: _asked_and_gone(redis))
            redis.hint("model")
            assert await redis.take("x", 1.0, 1) is None
            start()
            await until(lambda: redis.available)
            await until(lambda: bool(heard))  # what was said meanwhile may be news
            redis.calls["stored"] = 0
    finally:
        await redis.close()


async def _asked_and_gone(redis: RedisClient) -> bool:
    assert await redis.get("k") is None
    return not redis.available


async def test_many_concurrent_calls_do_not_mark_redis_unavailable(redis: RedisClient) -> None:
    redis.put("k", b"v")
    await until(lambda: redis.calls["stored"] == 1)

    async def ask() -> None:
        for _ in range(20):
            assert await redis.get("k") in (b"v", None)

    await asyncio.gather(*(ask() for _ in range(64)))
    await asyncio.gather(*(redis.get("k") for _ in range(400)))
    assert redis.available
    assert redis.calls["hit"] > 1000


async def test_a_slow_redis_is_left_alone_and_nobody_waits_for_a_turn_for_long(
    redis: RedisClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call is in time, but 64 at once would wait for eight turns one after another."""
    begun = 0

    async def slow_take(keys: list[str], args: list[float]) -> list[Any]:
        nonlocal begun
        begun += 1
        await asyncio.sleep(0.04)
        return [1, b"3"]

    monkeypatch.setattr(redis, "_take", slow_take)
    grants = await asyncio.gather(*(redis.take("x", 1.0, 4) for _ in range(64)))
    assert 8 <= begun <= 24
    assert 64 - begun <= grants.count(None) < 64
    assert not redis.available
    assert redis.calls["failed"] >= 32
    assert await redis.take("x", 1.0, 4) is None
    assert begun <= 24
    await until(lambda: redis.available)


async def test_a_full_redis_is_read_and_not_written(own_redis: RedisServer) -> None:
    with Redis.from_url(own_redis.url) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
    redis = RedisClient(own_redis.url, "test")
    redis.start()
    try:
        await until(lambda: redis.available)
        redis.put("k", b"v" * 1000)
        await until(lambda: redis.calls["failed"] == 1)
        assert await redis.get("k") is None
        assert await redis.take("x", 1.0, 1) is None  # then each counts by itself
        assert redis.available
    finally:
        await redis.close()


# Two servers on one database


@dataclasses.dataclass
class Pair:
    """Two servers that share a database and a Redis."""

    one: FastAPI
    two: FastAPI
    older: str
    """A version that is not active."""


@pytest.fixture
async def pair(
    database_url: str, tmp_path: Path, redis_url: str, redis_prefix: str
) -> AsyncIterator[Pair]:
    settings = load_settings(
        data_dir=tmp_path,
        database_url=database_url,
        event_group_ms=1,
        precompute_users=0,
        model_poll_seconds=600,
        redis_url=redis_url,
        redis_prefix=redis_prefix,
    )
    first = await build_services(settings)
    await add_small_data(first)
    older, _ = [await publish_model(first, seed=seed) for seed in (1, 2)]
    await first.close()
    one, two = create_app(settings), create_app(settings)
    async with one.router.lifespan_context(one), two.router.lifespan_context(two):
        for app in (one, two):
            await until(lambda app=app: app.state.services.redis.available)
        yield Pair(one, two, older)


async def ask(app: FastAPI, user: str, **params: Any) -> dict[str, Any]:
    async with client_of(app) as client:
        response = await client.get(f"/recommend/{user}", params=params)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.slow
async def test_servers_share_cached_lists(pair: Pair) -> None:
    first = await ask(pair.one, "user-1")
    await until(lambda: pair.one.state.services.redis.calls["stored"] == 1)
    second = await ask(pair.two, "user-1")
    assert second["items"] == first["items"]
    assert pair.two.state.services.redis.calls["hit"] == 1
    async with client_of(pair.two) as client:
        figures = (await client.get("/metrics")).text
    assert 'ncr_cache_requests_total{cache="lists",result="hit",tier="redis"} 1.0' in figures
    assert "ncr_rank_batch_size_count 0.0" in figures  # nothing was ranked here
    # Another question, another list.
    third = await ask(pair.two, "user-1", exclude=first["items"][0]["id"])
    assert first["items"][0]["id"] not in [item["id"] for item in third["items"]]


async def test_hints_of_events_and_models_reach_the_other_server(pair: Pair) -> None:
    first = await ask(pair.two, "user-2")
    taken = first["items"][0]["id"]
    async with client_of(pair.one) as client:
        await client.post("/events", json={"user": "user-2", "item": taken})

    async def gone() -> bool:
        return taken not in [i["id"] for i in (await ask(pair.two, "user-2"))["items"]]

    await until(gone)
    # A model that is activated on one server is loaded by the other long before it would look.
    assert first["model_version"] != pair.older
    await pair.one.state.services.models.activate(pair.older)

    async def swapped() -> bool:
        return bool((await ask(pair.two, "user-2"))["model_version"] == pair.older)

    await until(swapped)


async def test_invalid_cached_values_are_ignored(
    pair: Pair, redis_url: str, redis_prefix: str
) -> None:
    right = await ask(pair.one, "user-3")
    await until(lambda: pair.one.state.services.redis.calls["stored"] == 1)
    with Redis.from_url(redis_url) as client:
        (name,) = client.scan_iter(match=f"{redis_prefix}:*:list:*")
        value = client.get(name)
        assert isinstance(value, bytes)
        for odd in (b"", b"x", b"[]", b"{}", value[:-5], b'{"ids":[1],"items":[{"id":"no"}]}'):
            client.set(name, odd)
            pair.two.state.recommend.lists.cache.clear()
            assert (await ask(pair.two, "user-3"))["items"] == right["items"]


async def test_a_cached_list_is_decoded_unchanged(pair: Pair) -> None:
    services: Services = pair.one.state.services
    catalogue = await services.catalog.catalogue()
    item = {"id": catalogue.external_ids[1], "score": 0.123456, "title": "Ünï"}
    found = RankedList(orjson.dumps(item), (1,))
    again = RankedList.from_bytes(found.to_bytes(), catalogue)
    assert again is not None
    assert (again.json, again.ids) == (found.json, found.ids)
    assert RankedList.from_bytes(None, catalogue) is None
    empty = RankedList.from_bytes(RankedList(b"", ()).to_bytes(), catalogue)
    assert empty is not None
    assert (empty.json, empty.ids) == (b"", ())


async def test_two_databases_do_not_share_keys_in_one_redis(
    settings: Settings, tmp_path: Path, redis_url: str, redis_prefix: str
) -> None:
    more = {"redis_url": redis_url, "redis_prefix": redis_prefix}
    one = await build_services(settings.model_copy(update=more))
    other = load_settings(data_dir=tmp_path / "other", **more)
    two = await build_services(other)
    try:
        assert one.redis is not None
        assert two.redis is not None
        for redis in (one.redis, two.redis):
            await until(lambda redis=redis: redis.available)
        one.redis.put("k", b"v")
        await until(lambda: one.redis is not None and one.redis.calls["stored"] == 1)
        assert await one.redis.get("k") == b"v"
        assert await two.redis.get("k") is None
    finally:
        await one.close()
        await two.close()
