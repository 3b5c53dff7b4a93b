"""Tokens: what they open, for whom and how long, and those that nobody signed."""

from __future__ import annotations

import time
from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

import httpx2
import orjson
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from app.core.access import Role, declared_access
from app.core.requests import text_problem
from app.core.settings import Settings, load_settings
from app.core.tables import instance
from app.keys.service import KeyService
from app.keys.tables import api_keys
from app.keys.tokens import (
    CLOCK_SKEW_SECONDS,
    MAX_TOKEN_SECONDS,
    TOKEN_ROLES,
    TokenClaims,
    issuer_of,
    read_token,
    signed_token,
    signing_key,
)
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import client_of

KEY_ID = "0123456789ab"
SIGNING_KEY = signing_key("a secret", "a digest")
ANN = {"user": "ann", "item": "tea"}
BEN = {"user": "ben", "item": "tea"}

users = st.text(min_size=1, max_size=256).filter(lambda user: text_problem(user) is None)
claims = st.builds(
    TokenClaims,
    users,
    st.frozensets(st.sampled_from(sorted(TOKEN_ROLES))),
    st.integers(1_000, 10**10),
)


@dataclass
class Shop:
    """A shop's server, which has a key, and browsers, which have tokens."""

    client: httpx2.AsyncClient
    services: Services
    key_id: str
    key: str

    async def token(self, user: str, **body: Any) -> str:
        answer = await self.client.post(
            "/tokens", json={"user": user, **body}, headers={"X-API-Key": self.key}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["token"])

    async def forged(self, claims: TokenClaims, key_id: str | None = None) -> str:
        """A token that this database's servers would sign, were they asked to."""
        secret = (await self.services.database.fetch(sa.select(instance.c.token_secret)))[0][0]
        query = sa.select(api_keys.c.digest).where(api_keys.c.key_id == self.key_id)
        digest = (await self.services.database.fetch(query))[0][0]
        return signed_token(claims, key_id or self.key_id, signing_key(secret, digest))

    async def send(
        self, token: str | bytes, method: str = "GET", path: str = "/recommend/ann", **more: Any
    ) -> httpx2.Response:
        encoded = token.encode() if isinstance(token, str) else token
        headers = {"Authorization": b"Bearer " + encoded, **more.pop("headers", {})}
        return await self.client.request(method, path, headers=headers, **more)

    async def refused(self, token: str | bytes, *call: str, code: str, **more: Any) -> None:
        """Checks that the token does not open a route, and why."""
        answer = await self.send(token, *call, **more)
        status = 401 if code in ("invalid_token", "unauthorized") else 403
        assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text

    async def stored(self) -> int:
        return await self.services.events.last_seq()


@pytest.fixture
async def shop(app: FastAPI) -> AsyncIterator[Shop]:
    services: Services = app.state.services
    row, key = await services.keys.create("shop", [Role.RECOMMEND, Role.EVENTS, Role.TOKENS])
    await services.catalog.upsert_rows([{"id": "tea"}])
    async with client_of(app) as client:
        yield Shop(client, services, row.key_id, key)


@pytest.mark.anyio
async def test_a_token_opens_the_lists_and_the_events_of_its_user(shop: Shop) -> None:
    token = await shop.token("ann")
    assert (await shop.send(token)).json()["user"] == "ann"
    for body in (ANN, [ANN, ANN], []):
        assert (await shop.send(token, "POST", "/events", json=body)).status_code == 200
    odd = "ann/é %2F\x01"
    answer = await shop.send(await shop.token(odd), path=f"/recommend/{quote(odd, safe='')}")
    assert answer.json()["user"] == odd


@pytest.mark.anyio
async def test_a_token_makes_no_items(shop: Shop) -> None:
    rows = [{"user": "ann", "item": "visit evil.example"}, ANN, {"user": "ann"}, ANN]
    answer = (await shop.send(await shop.token("ann"), "POST", "/events", json=rows)).json()
    assert answer["accepted"] == 2
    assert {(r["index"], r["code"]) for r in answer["rejected"]} >= {(0, "unknown_item")}
    assert [r["index"] for r in answer["rejected"]] == [0, 2]
    assert await shop.services.catalog.ids_of(["visit evil.example"]) == {}


@pytest.mark.anyio
async def test_a_token_opens_nothing_of_another_user(shop: Shop) -> None:
    token = await shop.token("ann")
    # The second request with a query string takes the short way, past FastAPI.
    for query in ("?n=3", "?n=3", "", "?n=3&explain=none"):
        await shop.refused(token, "GET", f"/recommend/ben{query}", code="other_user")
        assert (await shop.send(token, path=f"/recommend/ann{query}")).status_code == 200
        await shop.refused(token, "GET", f"/recommend/ben{query}", code="other_user")
    for path in ("/recommend/Ann", "/recommend/ann%20"):
        await shop.refused(token, "GET", path, code="other_user")
    for rows in (BEN, [BEN], [ANN, BEN], [ANN, {"item": "tea"}], [ANN, "ann"], [[ANN]]):
        await shop.refused(token, "POST", "/events", json=rows, code="other_user")
    stream = {"Content-Type": "application/x-ndjson"}
    lines = orjson.dumps(ANN) + b"\n"
    await shop.refused(
        token, "POST", "/events", content=lines, headers=stream, code="token_not_enough"
    )
    assert await shop.stored() == 0


@pytest.mark.anyio
async def test_a_token_opens_no_other_route(app: FastAPI, shop: Shop) -> None:
    token = await shop.token("ann")
    opened = set()
    for route in app.routes:
        rules = declared_access(route)
        if not isinstance(route, APIRoute) or rules is None or rules.role is None:
            continue
        for method in route.methods:
            body = {"user": "ben", "item": "tea"} if method == "POST" else None
            path = route.path.replace("{user}", "ben").replace("{", "").replace("}", "")
            answer = await shop.send(token, method, path, json=body)
            assert answer.status_code == 403, path
            if rules.page:  # its errors are for people
                continue
            if answer.json()["code"] == "other_user":
                opened.add(f"{method} {route.path}")
    assert opened == {"GET /recommend/{user}", "POST /recommend", "POST /events"}
    for path in ("/docs", "/openapi.json", "/nowhere"):
        await shop.refused(token, "GET", path, code="token_not_enough")


@pytest.mark.anyio
async def test_a_token_has_no_role_that_it_or_its_key_lacks(shop: Shop) -> None:
    reader = await shop.token("ann", roles=["recommend"])
    assert (await shop.send(reader)).status_code == 200
    await shop.refused(reader, "POST", "/events", json=ANN, code="role_missing")
    keys = shop.services.keys
    _, lists_only = await keys.create("lists", [Role.RECOMMEND, Role.TOKENS])
    _, signer = await keys.create("signer", [Role.TOKENS, Role.METRICS])
    _, reading = await keys.create("read", [Role.READ, Role.INGEST])
    for key, body, status in (
        (lists_only, {"user": "ann", "roles": ["events"]}, 403),
        (lists_only, {"user": "ann", "roles": ["recommend", "events"]}, 403),
        (lists_only, {"user": "ann"}, 200),
        (signer, {"user": "ann"}, 403),
        (reading, {"user": "ann"}, 403),
    ):
        answer = await shop.client.post("/tokens", json=body, headers={"X-API-Key": key})
        assert answer.status_code == status, answer.text
        if status == 403:
            assert answer.json()["code"] == "role_missing"
    shop.key = lists_only
    token = await shop.token("ann")
    assert (await shop.send(token)).status_code == 200
    await shop.refused(token, "POST", "/events", json=ANN, code="role_missing")
    # Signed when the key had more roles than now.
    wide = TokenClaims("ann", frozenset(Role), int(time.time()) + 60)
    await shop.refused(await shop.forged(wide), "GET", "/admin/jobs", code="role_missing")


@pytest.mark.anyio
async def test_requests_for_tokens_that_make_no_sense_are_422(shop: Shop) -> None:
    bodies: list[Any] = [
        {}, {"user": ""}, {"user": "x" * 257}, {"user": "a\0"}, {"user": 1}, [],
        {"user": "ann", "x": 1},
        {"user": "ann", "ttl_s": 0}, {"user": "ann", "ttl_s": 3601}, {"user": "ann", "ttl_s": "60"},
        {"user": "ann", "roles": []}, {"user": "ann", "roles": ["admin"]},
        {"user": "ann", "roles": ["tokens"]}, {"user": "ann", "roles": "recommend"},
    ]  # fmt: skip
    for body in bodies:
        answer = await shop.client.post("/tokens", json=body, headers={"X-API-Key": shop.key})
        assert answer.status_code == 422, (body, answer.text)


@pytest.mark.anyio
async def test_a_token_expires(shop: Shop) -> None:
    now = time.time()
    answer = await shop.client.post(
        "/tokens", json={"user": "ann", "ttl_s": 60}, headers={"X-API-Key": shop.key}
    )
    expires_at = datetime.fromisoformat(answer.json()["expires_at"]).timestamp()
    assert now + 60 <= expires_at <= time.time() + 61
    for left, accepted in (
        (60, True),
        (3 - CLOCK_SKEW_SECONDS, True),  # by a server whose clock is a little behind
        (-CLOCK_SKEW_SECONDS - 1, False),
        (-10_000, False),
        (MAX_TOKEN_SECONDS, True),
        (MAX_TOKEN_SECONDS + 60, False),  # by a server whose clock is far ahead
    ):
        token = await shop.forged(TokenClaims("ann", TOKEN_ROLES, int(time.time()) + left))
        if accepted:
            assert (await shop.send(token)).status_code == 200, left
        else:
            await shop.refused(token, code="invalid_token")


@pytest.mark.anyio
async def test_a_token_ends_with_the_key_that_it_was_signed_for(
    shop: Shop, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await shop.token("ann")
    other = KeyService(shop.services.database)  # of another server
    assert await other.identify_token(token.encode()) is not None
    await shop.services.keys.revoke(shop.key_id)
    await shop.refused(token, code="invalid_token")
    monkeypatch.setattr("app.keys.service.REFRESH_SECONDS", 0.0)
    assert await other.identify_token(token.encode()) is None


@pytest.mark.anyio
async def test_keys_and_tokens_are_checked_in_memory(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = (await shop.token("ann")).encode()
    monkeypatch.setattr("app.keys.service.REFRESH_SECONDS", 3600.0)
    fetch, reads = shop.services.database.fetch, []

    async def counted(statement: sa.Select[Any]) -> Any:
        reads.append(statement)
        return await fetch(statement)

    monkeypatch.setattr(shop.services.database, "fetch", counted)
    keys = shop.services.keys
    for _ in range(50):
        assert await keys.identify(shop.key.encode()) is not None
        assert await keys.identify_token(token) is not None
    assert reads == []
    await keys.rows()
    assert len(reads) == 1


@pytest.mark.anyio
async def test_a_token_that_no_server_of_this_database_signed_is_refused(shop: Shop) -> None:
    token = await shop.token("ann")
    row, _ = await shop.services.keys.create("other", [Role.ADMIN])
    later = TokenClaims("ann", TOKEN_ROLES, int(time.time()) + 60)
    digest = (await shop.services.database.fetch(sa.select(api_keys.c.digest)))[0][0]
    for false in (
        token.replace(shop.key_id, row.key_id),  # of another key
        token.replace(shop.key_id, "0" * 12),
        await shop.forged(later, row.key_id),
        signed_token(later, shop.key_id, signing_key("guessed", digest)),
        token[:-1], token + "A", token + "=", token + " x", token.upper(), "", "x", "ncrt_", "..",
        "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhbm4ifQ.", "ncrt_" + "a" * 20_000, "A" * 20_000,
        f"ncrt_{shop.key_id}.{'A' * 20_000}.{'A' * 43}",
    ):  # fmt: skip
        await shop.refused(false, code="invalid_token")
    for false in (b"\xff\xfe", token.encode() + b"\xe9", (token[:-1] + "é").encode()):
        await shop.refused(false, code="invalid_token")
    answer = await shop.send("x")
    assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'


@pytest.mark.anyio
async def test_how_a_token_is_sent(shop: Shop) -> None:
    token = await shop.token("ann")
    for value, status in (
        (f"bearer {token}", 200),
        (f"Bearer   {token} ", 200),
        (token, 401),
        (f"Basic {token}", 401),
        ("Bearer", 401),
        (f"Bearer {shop.key}", 200),  # a key may be sent like that, too
        (f"Bearer {shop.key[:-1]}", 401),
    ):
        answer = await shop.client.get("/recommend/ann", headers={"Authorization": value})
        assert answer.status_code == status, value
    # A key says more than a token, and decides alone.
    for key, status in ((shop.key, 200), ("wrong", 401)):
        headers = {"X-API-Key": key, "Authorization": f"Bearer {token}"}
        answer = await shop.client.get("/recommend/ben", headers=headers)
        assert answer.status_code == status


@pytest.mark.anyio
async def test_without_a_key_in_the_database_nobody_signs(settings: Settings) -> None:
    admin_key = "an-admin-key-of-enough-characters"
    for key in (None, admin_key):
        app = create_app(load_settings(**settings.model_dump() | {"admin_key": key}))
        headers = {} if key is None else {"X-API-Key": key}
        async with app.router.lifespan_context(app), client_of(app, **headers) as client:
            answer = await client.post("/tokens", json={"user": "ann"})
            assert (answer.status_code, answer.json()["code"]) == (409, "key_not_stored")
            assert "ncr keys create" in answer.json()["detail"]


@pytest.mark.anyio
async def test_each_user_has_a_rate_limit_of_their_own(shop: Shop) -> None:
    _, key = await shop.services.keys.create(
        "slow", [Role.RECOMMEND, Role.TOKENS], rate=0.01, burst=3
    )
    shop.key = key
    ann, ben = await shop.token("ann"), await shop.token("ben")
    assert [(await shop.send(ann)).status_code for _ in range(4)] == [200, 200, 200, 429]
    assert (await shop.send(ben, path="/recommend/ben")).status_code == 200
    again = await shop.client.get("/recommend/ann", headers={"X-API-Key": key})
    assert again.status_code == 200  # the third of the key: it signed two tokens


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_page_of_another_origin_may_send_a_token_and_read_the_limits(
    settings: Settings,
) -> None:
    wanted = settings.model_copy(update={"cors_origins": "https://shop.example"})
    app = create_app(wanted)

    @app.get("/recommend/fail/fail")
    async def fail() -> None:
        raise RuntimeError

    origin = {"Origin": "https://shop.example"}
    async with app.router.lifespan_context(app), client_of(app) as client:
        services: Services = app.state.services
        _, key = await services.keys.create("shop", [Role.RECOMMEND, Role.TOKENS], rate=5, burst=9)
        asked = {"Access-Control-Request-Method": "GET",
                 "Access-Control-Request-Headers": "authorization"}  # fmt: skip
        allowed = await client.options("/recommend/ann", headers=origin | asked)
        assert allowed.status_code == 200
        assert "authorization" in allowed.headers["Access-Control-Allow-Headers"].lower()
        body = {"user": "ann"}
        token = (await client.post("/tokens", json=body, headers={"X-API-Key": key})).json()
        headers = origin | {"Authorization": f"Bearer {token['token']}"}
        answer = await client.get("/recommend/ann", headers=headers)
        assert answer.headers["Access-Control-Allow-Origin"] == "https://shop.example"
        exposed = answer.headers["Access-Control-Expose-Headers"].split(", ")
        limits = {name for name in answer.headers if name.lower().startswith("ratelimit-")}
        assert len(limits) == 3
        assert {name.lower() for name in limits} <= {name.lower() for name in exposed}
        failed = await client.get("/recommend/fail/fail", headers=origin | {"X-API-Key": key})
        assert (failed.status_code, failed.json()["code"]) == (500, "internal_error")
        assert failed.headers["Access-Control-Allow-Origin"] == "https://shop.example"


@given(claims)
def test_what_was_signed_is_read(claims: TokenClaims) -> None:
    token = signed_token(claims, KEY_ID, SIGNING_KEY).encode()
    assert issuer_of(token) == KEY_ID
    assert read_token(token, SIGNING_KEY, claims.expires_at - 10) == claims
    assert read_token(token, signing_key("a secret", "another"), claims.expires_at - 10) is None
    assert read_token(token, SIGNING_KEY, claims.expires_at + CLOCK_SKEW_SECONDS) is None


def test_the_longest_user_id_has_a_token() -> None:
    longest = TokenClaims("\x01" * 256, TOKEN_ROLES, 10**10)
    token = signed_token(longest, KEY_ID, SIGNING_KEY).encode()
    assert len(token) < 2_300
    assert read_token(token, SIGNING_KEY, 10**10 - 1) == longest


@given(claims, st.data())
def test_a_token_that_was_changed_is_not_read(claims: TokenClaims, data: st.DataObject) -> None:
    token = signed_token(claims, KEY_ID, SIGNING_KEY).encode()
    position = data.draw(st.integers(0, len(token) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda byte: byte != token[position]))
    changed = token[:position] + bytes((other,)) + token[position + 1 :]
    assert read_token(changed, SIGNING_KEY, claims.expires_at - 10) is None


def test_a_signature_has_one_spelling() -> None:
    token = signed_token(TokenClaims("ann", TOKEN_ROLES, 2_000), KEY_ID, SIGNING_KEY)
    # The last character holds two bits that Base64 ignores.
    same = [
        changed
        for last in "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
        if urlsafe_b64decode((changed := token[:-1] + last)[-43:] + "=")
        == urlsafe_b64decode(token[-43:] + "=")
    ]
    assert len(same) == 4
    read = [text for text in same if read_token(text.encode(), SIGNING_KEY, 1_990) is not None]
    assert read == [token]


@given(st.binary(max_size=300) | st.from_regex(r"ncrt_[0-9a-f]{12}\.[\w-]{1,40}\.[\w-]{43}").map(
    lambda text: text.encode()
))  # fmt: skip
def test_what_is_no_token_is_not_read(content: bytes) -> None:
    assert read_token(content, SIGNING_KEY, time.time()) is None
    assert issuer_of(content) is None or content.startswith(b"ncrt_")
