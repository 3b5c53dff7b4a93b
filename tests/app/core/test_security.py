"""API keys, rate limits, and the protection of a service without keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
import structlog
from fastapi import FastAPI

from app.core.access import Role
from app.core.errors import SettingsError
from app.core.http_protocol import BoundedProtocol
from app.core.redis import RedisClient
from app.core.security import (
    MAX_WRONG_KEYS,
    LocalTokenBuckets,
    RateLimiter,
    RefusalLog,
    Strangers,
    TokenGrant,
    WrongKeys,
    ensure_bindable,
    is_loopback,
    sender,
)
from app.core.settings import Settings, load_settings
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import client_of, listening, until
from tests.app.core.conftest import KEY, check_problem

pytestmark = pytest.mark.anyio


async def test_with_a_key_all_paths_but_health_require_it(keyed: FastAPI) -> None:
    async with client_of(keyed) as client:
        for path in ("/items", "/docs", "/openapi.json", "/metrics", "/nowhere", "/health", "/"):
            body = await client.get(path)
            check_problem(body, 401, "unauthorized")
            assert body.headers["www-authenticate"]
            wrong = await client.get(path, headers={"X-API-Key": KEY[:-1]})
            assert wrong.status_code == 401
        post = await client.post("/events", json={"user": "u", "item": "i"})
        assert post.status_code == 401
        for path in ("/health/live", "/health/ready"):
            assert (await client.get(path)).status_code == 200
        # The key says who it is; from which page is then no matter.
        headers = {"Host": "example.com", "Origin": "https://example.com", "X-API-Key": KEY}
        post = await client.post("/events", json={"user": "u", "item": "i"}, headers=headers)
        assert post.status_code == 200


async def test_without_a_key_only_loopback_hosts_and_origins_are_permitted(
    open_app: FastAPI,
) -> None:
    async with client_of(open_app) as client:
        for host in ("localhost:8000", "127.0.0.1", "127.0.0.1:80", "[::1]:8000", "LOCALHOST"):
            assert (await client.get("/items", headers={"Host": host})).status_code == 200, host
        for host in ("evil.example", "127.0.0.1.evil.example", "evil.example:8000", "[::2]", "a@b"):
            response = await client.get("/items", headers={"Host": host})
            check_problem(response, 403, "forbidden")
        event = {"user": "u", "item": "i"}
        for origin in ("https://evil.example", "null", "http://localhost.evil.example", "", "x:["):
            response = await client.post("/events", json=event, headers={"Origin": origin})
            check_problem(response, 403, "forbidden")
        for origin in ("http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]"):
            response = await client.post("/events", json=event, headers={"Origin": origin})
            assert response.status_code == 200, origin


@pytest.mark.parametrize(
    "headers",
    [
        {"Forwarded": "for=1.2.3.4"},
        {"Via": "1.1 proxy"},
        {"X-Real-IP": "1.2.3.4"},
        {"X-Forwarded-For": ""},
        {"x-forwarded-proto": "https", "Host": "127.0.0.1:8000"},
    ],
)
async def test_without_a_key_requests_through_a_proxy_are_refused(
    data_dir: Path, headers: dict[str, str]
) -> None:
    """What nginx forwards on one machine has a loopback Host, and comes from the internet."""
    for given, status in (
        ({}, 403),
        ({"admin_key": KEY}, 200),
        ({"open_to_the_network": True}, 200),
    ):
        app = create_app(load_settings(data_dir=data_dir, **given))
        async with app.router.lifespan_context(app), client_of(app) as client:
            key = {"X-API-Key": KEY}
            answer = await client.get("/items", headers=headers | key)
            assert answer.status_code == status, given
            if status == 403:
                detail = check_problem(answer, 403, "proxy_without_key")["detail"]
                assert "ncr keys create" in detail
                assert "NCR_ADMIN_KEY" in detail
            assert (await client.get("/health/live", headers=headers)).status_code == 200
            assert (await client.get("/items", headers=key)).status_code == 200


async def test_without_a_key_http_1_0_is_refused_as_by_a_proxy(data_dir: Path) -> None:
    """`proxy_pass` alone makes nginx send it, without a header that names the proxy."""
    app = create_app(load_settings(data_dir=data_dir))
    async with listening(app, BoundedProtocol) as port:
        for version, status in (("1.0", 403), ("1.1", 200)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            head = (
                f"GET /items HTTP/{version}\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode())
            assert (await reader.readline()).split()[1] == str(status).encode()
            writer.close()


async def test_the_host_name_of_test_clients_is_like_any_other(open_app: FastAPI) -> None:
    async with client_of(open_app, host="testserver") as client:
        assert (await client.get("/items")).status_code == 403


@pytest.mark.slow
async def test_guesses_at_a_key_are_slowed_down_by_address(
    services: Services, settings: Settings
) -> None:
    _, key = await services.keys.create("reader", [Role.READ])
    app = create_app(load_settings(**settings.model_dump() | {"admin_key": KEY}))

    def client_at(address: str) -> httpx2.AsyncClient:
        transport = httpx2.ASGITransport(app, client=(address, 1))
        return httpx2.AsyncClient(transport=transport, base_url="http://localhost")

    async with (
        app.router.lifespan_context(app),
        client_at("10.0.0.1") as here,
        client_at("10.0.0.2") as elsewhere,
    ):

        async def status(client: httpx2.AsyncClient, key: str | None) -> int:
            headers = {} if key is None else {"X-API-Key": key}
            return (await client.get("/items", headers=headers)).status_code

        assert [await status(here, None) for _ in range(MAX_WRONG_KEYS + 1)][-1] == 401
        assert await status(here, KEY) == 200
        guessed = [await status(here, f"guess {n}") for n in range(MAX_WRONG_KEYS + 5)]
        assert guessed[: MAX_WRONG_KEYS - 1] == [401] * (MAX_WRONG_KEYS - 1)
        assert guessed[-1] == 429
        # A right guess is not told from a wrong one; keys that nobody guesses still count.
        refused = await here.get("/items", headers={"X-API-Key": KEY})
        check_problem(refused, 429, "too_many_wrong_keys")
        assert refused.headers["Retry-After"] == "1"
        assert await status(here, key) == 200
        assert await status(elsewhere, KEY) == 200
        assert (
            'ncr_http_refused_total{code="too_many_wrong_keys"}'
            in (await elsewhere.get("/metrics", headers={"X-API-Key": KEY})).text
        )


async def test_an_address_may_guess_again_after_a_second() -> None:
    clock = Clock()
    wrong = WrongKeys(clock)
    for _ in range(MAX_WRONG_KEYS):
        assert wrong.wait("a") == 0
        await wrong.count("a")
    assert wrong.wait("a") == pytest.approx(1)
    assert wrong.wait("b") == 0
    clock.now += 1.01
    assert wrong.wait("a") == 0
    await wrong.count("a")
    assert wrong.wait("a") == pytest.approx(0.99)


async def test_refused_keys_are_logged_by_address_and_seldom() -> None:
    clock = Clock()
    refusals = RefusalLog(clock)

    async def lines(*addresses: str) -> list[tuple[str, str]]:
        with structlog.testing.capture_logs() as logs:
            for address in addresses:
                await refusals.add(address, "unauthorized")
        return [(line["address"], line["code"]) for line in logs]

    assert await lines("a", "a", "b", "a") == [("a", "unauthorized"), ("b", "unauthorized")]
    clock.now += 61
    assert await lines("a", "a") == [("a", "unauthorized")]
    clock.now += 61
    assert len(await lines(*map(str, range(100)))) == 60


@pytest.mark.parametrize(
    ("address", "counted_as"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2:ffff::1", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("::1", "::1"),
        ("", ""),
        ("a:socket", "a:socket"),
    ],
)
def test_senders_are_counted_by_what_they_cannot_change(address: str, counted_as: str) -> None:
    assert sender(address) == counted_as


async def test_another_address_of_the_same_network_does_not_get_more_guesses(
    keyed: FastAPI,
) -> None:
    async def status(address: str, key: str) -> int:
        transport = httpx2.ASGITransport(keyed, client=(address, 1))
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/items", headers={"X-API-Key": key})).status_code

    guessed = [await status(f"2001:db8::{n:x}", f"guess {n}") for n in range(MAX_WRONG_KEYS + 5)]
    assert guessed[-1] == 429
    assert await status("2001:db8:0:1::1", KEY) == 200


async def test_requests_without_a_key_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for readiness without a pause gets 100 answers a second."""
    clock, waits = Clock(), []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    strangers = Strangers(clock)

    for _ in range(100):
        await strangers.wait("192.0.2.1")
    assert sum(waits) < 1e-6  # those of a second come at once
    waits.clear()
    for _ in range(200):
        await strangers.wait("192.0.2.1")
    assert waits[:50] == pytest.approx([n / 100 for n in range(1, 51)])
    assert waits[50:] == pytest.approx([0.5] * 150)  # and nobody waits for longer
    waits.clear()
    await strangers.wait("192.0.2.2")  # another address has turns of its own
    assert not waits
    clock.now += 0.3
    await strangers.wait("192.0.2.1")
    assert waits == pytest.approx([0.21])
    clock.now += 10
    waits.clear()
    await strangers.wait("192.0.2.1")
    assert not waits


@pytest.mark.parametrize("path", ["/health/ready", "/health/live", "/recommend/a", "/nothing"])
async def test_public_and_refused_requests_wait_and_hold_up_nobody_with_a_key(
    data_dir: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(load_settings(data_dir=data_dir, admin_key=KEY, max_concurrency=1))
    waiting, turn = asyncio.Event(), asyncio.Event()

    async def wait(strangers: Strangers, address: str) -> None:
        waiting.set()
        await turn.wait()

    monkeypatch.setattr(Strangers, "wait", wait)
    async with app.router.lifespan_context(app), client_of(app) as client:
        asked = asyncio.create_task(client.get(path))
        await asyncio.wait_for(waiting.wait(), 10)
        # The stranger has no place among the lists in progress, of which there is one.
        keyed = await client.get("/recommend/a", headers={"X-API-Key": KEY})
        assert keyed.status_code == 200
        assert not asked.done()
        turn.set()
        assert (await asked).status_code == (200 if path.startswith("/health") else 401)


async def test_the_log_names_no_refused_key(keyed: FastAPI) -> None:
    async with client_of(keyed) as client:
        with structlog.testing.capture_logs() as logs:
            for _ in range(3):
                await client.get("/users/ann/events", headers={"X-API-Key": "a wrong key"})
    (line,) = (line for line in logs if line["event"] == "request refused")
    assert (line["log_level"], line["code"]) == ("warning", "unauthorized")
    assert line["address"]
    assert "wrong key" not in str(logs)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"])
def test_loopback_hosts_need_no_key(host: str) -> None:
    assert is_loopback(host)
    ensure_bindable(host, load_settings(data_dir=Path("x")))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "example.com", "10.0.0.1", "127.0.0.1.nip.io"]
)
def test_other_hosts_need_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(SettingsError, match="the server binds only loopback"):
        ensure_bindable(host, load_settings())
    ensure_bindable(host, load_settings(admin_key=KEY))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_local_bucket_begins_where_the_shared_one_ended() -> None:
    """Otherwise each time that Redis goes away would permit a whole burst more."""

    class Shared:
        grant: TokenGrant | None = TokenGrant(True, 1, 1.0, 0.0)

        async def take(self, caller: str, rate: float, burst: int) -> TokenGrant | None:
            return self.grant

    shared = Shared()
    limiter = RateLimiter(0.001, 100, shared)
    await limiter.take("a", 0.001, 100)
    shared.grant = None
    assert [(await limiter.take("a", 0.001, 100)).allowed for _ in range(2)] == [True, False]


async def test_a_local_token_bucket_by_hand() -> None:
    clock = Clock()
    buckets = LocalTokenBuckets(clock)
    seen = [await buckets.take("a", 2.0, 3) for _ in range(4)]
    assert [t.allowed for t in seen] == [True, True, True, False]
    assert [t.remaining for t in seen] == [2, 1, 0, 0]
    assert seen[3].retry == pytest.approx(0.5)
    assert seen[3].reset == pytest.approx(1.5)
    assert (await buckets.take("b", 2.0, 3)).allowed  # another's is full
    clock.now += 0.4
    assert not (await buckets.take("a", 2.0, 3)).allowed
    clock.now += 0.1
    assert (await buckets.take("a", 2.0, 3)).allowed
    clock.now += 1000
    assert [(await buckets.take("a", 2.0, 3)).allowed for _ in range(4)] == [True] * 3 + [False]


async def test_servers_share_a_token_bucket_in_redis(
    redis: RedisClient, redis_url: str, redis_prefix: str
) -> None:
    other = RedisClient(redis_url, redis_prefix)
    other.start()
    await until(lambda: other.available)
    try:
        two = [RateLimiter(0.01, 5, one) for one in (redis, other)]
        seen = [await two[n % 2].take("caller", 0.01, 5) for n in range(7)]
        assert [t.allowed for t in seen] == [True] * 5 + [False] * 2
        assert [t.remaining for t in seen] == [4, 3, 2, 1, 0, 0, 0]
        assert 0 < seen[6].retry <= 100
    finally:
        await other.close()


async def test_without_redis_each_server_uses_its_own_buckets(redis_prefix: str) -> None:
    nowhere = RedisClient("redis://127.0.0.1:1/0", redis_prefix)
    limiter = RateLimiter(0.01, 2, nowhere)
    assert [(await limiter.take("x", 0.01, 2)).allowed for _ in range(3)] == [True, True, False]
    await nowhere.close()


async def test_rate_limit_headers_and_429(services: Services, settings: Settings) -> None:
    _, slow = await services.keys.create("slow", [Role.READ], rate=0.01, burst=2)
    _, free = await services.keys.create("free", [Role.READ])
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        answers = [await client.get("/items", headers={"X-API-Key": slow}) for _ in range(3)]
        assert [a.status_code for a in answers] == [200, 200, 429]
        assert [a.headers["RateLimit-Remaining"] for a in answers] == ["1", "0", "0"]
        assert {a.headers["RateLimit-Limit"] for a in answers} == {"2"}
        refused = answers[2]
        assert refused.headers["Content-Type"] == "application/problem+json"
        assert refused.json()["code"] == "rate_limited"
        assert 1 <= int(refused.headers["Retry-After"]) <= 100
        assert 100 <= int(refused.headers["RateLimit-Reset"]) <= 200
        other = await client.get("/items", headers={"X-API-Key": free})
        assert other.status_code == 200
        assert "RateLimit-Limit" not in other.headers
        assert (await client.get("/health/live")).status_code == 200


def test_rate_and_burst_of_a_key_override_the_settings() -> None:
    limiter = RateLimiter(100.0, 1000)
    assert limiter.bounds(None, None) == (100.0, 1000)
    assert limiter.bounds(3.0, None) == (3.0, 6)  # of two seconds, and not the service's
    assert limiter.bounds(3.0, 50) == (3.0, 50)
    assert RateLimiter(0.0, 0).bounds(None, None)[0] == 0
    assert RateLimiter(2.5, 0).bounds(None, None) == (2.5, 5)


async def test_the_rate_limit_setting_applies_to_keys_and_to_an_open_service(
    settings: Settings,
) -> None:
    app = create_app(settings.model_copy(update={"rate_limit": 0.01, "rate_burst": 3}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        codes = [(await client.get("/items")).status_code for _ in range(5)]
        assert codes == [200] * 3 + [429] * 2
