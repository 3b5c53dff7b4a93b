"""API keys, and the protection of a service without keys."""

from __future__ import annotations

from pathlib import Path

import pytest
from fastapi import FastAPI

from app.core.errors import SettingsError
from app.core.security import ensure_bindable, is_loopback
from app.core.settings import load_settings
from tests.app.conftest import client_of
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


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.1", "::1", "[::1]"])
def test_loopback_hosts_need_no_key(host: str) -> None:
    assert is_loopback(host)
    ensure_bindable(host, load_settings(data_dir=Path("x")))


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "example.com", "10.0.0.1", "127.0.0.1.nip.io"]
)
def test_other_hosts_need_a_key(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(SettingsError, match="without a key only loopback is bound"):
        ensure_bindable(host, load_settings())
    ensure_bindable(host, load_settings(admin_key=KEY))
