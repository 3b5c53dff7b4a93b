"""Keys: what they open, for whom, and what is kept of them."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
import sqlalchemy as sa

from app.core.access import BUNDLES, Role
from app.core.errors import NotFound, SettingsError
from app.core.security import ensure_bindable
from app.core.settings import Settings, load_settings
from app.keys.service import KeyService
from app.keys.tables import api_keys
from app.main import create_app
from app.wiring import Services
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio

ADMIN_KEY = "an-admin-key-of-enough-characters"

READS = ["/recommend/u", "/items", "/metrics", "/docs", "/openapi.json", "/no/such/route"]
WRITES = [("POST", "/events"), ("PUT", "/items/i"), ("POST", "/items"), ("DELETE", "/events/e")]
ADMINS = [
    ("GET", "/admin/jobs"),
    ("POST", "/admin/train"),
    ("POST", "/admin/models/rollback"),
    ("DELETE", "/users/u"),
]


BY_ROLE = {
    Role.RECOMMEND: [
        ("GET", "/recommend/u"),
        ("POST", "/rerank"),
        ("GET", "/items"),
        ("GET", "/docs"),
    ],
    Role.HISTORY: [("GET", "/users/u/events"), ("GET", "/users"), ("GET", "/users/u")],
    Role.METRICS: [("GET", "/metrics")],
    Role.EVENTS: [("POST", "/events"), ("POST", "/preferences"), ("PUT", "/users/u")],
    Role.DELETE: [("DELETE", "/events/e")],
    Role.CATALOG: [("PUT", "/items/i"), ("DELETE", "/items/i")],
    Role.ERASE: [("DELETE", "/users/u")],
}


async def status(client: httpx2.AsyncClient, method: str, path: str, key: str | None) -> int:
    headers = {} if key is None else {"X-API-Key": key}
    json = {} if method in ("POST", "PUT") else None
    return (await client.request(method, path, headers=headers, json=json)).status_code


async def test_roles_open_what_is_theirs(services: Services, settings: Settings) -> None:
    keys = {role: (await services.keys.create(role, [role]))[1] for role in Role}
    both = (await services.keys.create("both", [Role.READ, Role.INGEST]))[1]
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        for path in READS:
            for key in (keys[Role.READ], keys[Role.ADMIN], both):
                assert await status(client, "GET", path, key) not in (401, 403), path
            assert await status(client, "GET", path, keys[Role.INGEST]) == 403, path
        for method, path in WRITES:
            for key in (keys[Role.INGEST], keys[Role.ADMIN], both):
                assert await status(client, method, path, key) not in (401, 403), path
            assert await status(client, method, path, keys[Role.READ]) == 403, path
        for method, path in ADMINS:
            for role in (Role.READ, Role.INGEST):
                assert await status(client, method, path, keys[role]) == 403, path
            assert await status(client, method, path, both) == 403, path
            assert await status(client, method, path, keys[Role.ADMIN]) not in (401, 403), path
        for path in (*READS, "/admin/jobs"):
            assert await status(client, "GET", path, None) == 401
            assert await status(client, "GET", path, keys[Role.READ][:-1] + "!") == 401
            assert await status(client, "GET", path, "ncr_" + "0" * 12 + "_" + "x" * 43) == 401
        assert (await client.get("/health/live")).status_code == 200
        figures = (await client.get("/metrics", headers={"X-API-Key": keys[Role.READ]})).text
        assert 'ncr_http_refused_total{code="unauthorized"}' in figures
        assert 'ncr_http_refused_total{code="role_missing"}' in figures
        assert not any(key in figures for key in keys.values())


async def test_a_role_that_is_no_bundle_opens_nothing_else(
    services: Services, settings: Settings
) -> None:
    keys = {role: (await services.keys.create(role, [role]))[1] for role in BY_ROLE}
    some = (await services.keys.create("some", [Role.RECOMMEND, Role.EVENTS]))[1]
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        for role, requests in BY_ROLE.items():
            for method, path in requests:
                opened = {of for of in keys if await status(client, method, path, keys[of]) != 403}
                assert opened == {role}, path
                permitted = await status(client, method, path, some) != 403
                assert permitted == (role in (Role.RECOMMEND, Role.EVENTS)), path
        for method, path in [("GET", "/admin/jobs"), ("POST", "/admin/train")]:
            assert {await status(client, method, path, key) for key in keys.values()} == {403}, path


async def test_a_key_that_an_earlier_version_made_keeps_its_roles(services: Services) -> None:
    row, key = await services.keys.create("old", [Role.READ])
    for stored, opened in (
        ("read", BUNDLES[Role.READ]),
        ("ingest,read", BUNDLES[Role.READ] | BUNDLES[Role.INGEST]),
        ("admin", frozenset(Role)),
    ):
        async with services.database.write() as conn:
            await conn.execute(api_keys.update().values(roles=stored))
        caller = await KeyService(services.database).identify(key.encode())
        assert caller is not None
        assert (caller.key_id, caller.roles) == (row.key_id, opened)


async def test_a_revoked_key_opens_nothing_and_the_door_stays_shut(
    services: Services, settings: Settings
) -> None:
    row, key = await services.keys.create("one", [Role.ADMIN])
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert await status(client, "GET", "/items", key) == 200
        await app.state.services.keys.revoke(row.key_id)
        assert await status(client, "GET", "/items", key) == 401
        assert await status(client, "GET", "/items", None) == 401
        with pytest.raises(NotFound):
            await services.keys.revoke(row.key_id)
        with pytest.raises(NotFound):
            await services.keys.revoke("no such key")


async def test_a_key_made_elsewhere_works_at_once_and_one_revoked_elsewhere_soon_not(
    services: Services, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = create_app(settings.model_copy(update={"admin_key": None}))
    monkeypatch.setattr("app.keys.service.UNKNOWN_KEY_REFRESH_SECONDS", 0.0)
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert await status(client, "GET", "/items", None) == 200  # nobody has a key yet
        row, key = await services.keys.create("two", [Role.READ])
        assert await status(client, "GET", "/items", key) == 200
        monkeypatch.setattr("app.keys.service.REFRESH_SECONDS", 0.0)
        await services.keys.revoke(row.key_id)
        assert await status(client, "GET", "/items", key) == 401


async def test_the_admin_key_of_the_settings_goes_beside_the_others(
    services: Services, settings: Settings
) -> None:
    _, key = await services.keys.create("reader", [Role.READ])
    app = create_app(load_settings(**settings.model_dump() | {"admin_key": ADMIN_KEY}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert await status(client, "GET", "/admin/jobs", ADMIN_KEY) == 200
        assert await status(client, "GET", "/items", key) == 200
        assert await status(client, "GET", "/admin/jobs", key) == 403


async def test_nothing_that_opens_is_kept(services: Services) -> None:
    row, key = await services.keys.create("Ünï", [Role.INGEST, Role.READ], rate=5, burst=9)
    assert key.startswith(f"ncr_{row.key_id}_")
    stored = (await services.database.fetch(sa.select(api_keys)))[0]
    assert key.removeprefix(f"ncr_{row.key_id}_") not in repr(tuple(stored))
    assert (stored.name, stored.roles, stored.rate, stored.burst) == ("Ünï", "ingest,read", 5, 9)
    assert await services.keys.identify(key.encode()) is not None
    assert await services.keys.identify(stored.digest.encode()) is None


@pytest.mark.parametrize(
    ("name", "roles", "rate", "burst"),
    [
        ("", [Role.READ], None, None),
        ("x" * 300, [Role.READ], None, None),
        ("x", [], None, None),
        ("x", [Role.READ], 0.0, None),
        ("x", [Role.READ], -1.0, None),
        ("x", [Role.READ], 1.0, 0),
        ("x", [Role.READ], None, 5),
    ],
)
async def test_keys_that_make_no_sense(
    services: Services, name: str, roles: list[Role], rate: float | None, burst: int | None
) -> None:
    with pytest.raises(SettingsError):
        await services.keys.create(name, roles, rate, burst)
    assert await services.keys.rows() == []


def test_beyond_loopback_only_with_a_key_or_by_a_setting_that_says_so(tmp_path: Path) -> None:
    plain = load_settings(data_dir=tmp_path)
    with pytest.raises(SettingsError, match="ncr keys create"):
        ensure_bindable("0.0.0.0", plain)
    ensure_bindable("0.0.0.0", plain, has_keys=True)
    ensure_bindable("0.0.0.0", load_settings(data_dir=tmp_path, open_to_the_network=True))


async def test_open_to_the_network_answers_any_host(settings: Settings) -> None:
    for allowed in (False, True):
        app = create_app(settings.model_copy(update={"open_to_the_network": allowed}))
        async with app.router.lifespan_context(app), client_of(app, host="shop.example") as client:
            answer = await client.get("/items")
            assert answer.status_code == (200 if allowed else 403)
