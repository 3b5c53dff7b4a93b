"""What every answer carries, what browsers are allowed, and what the log says of a request."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from app.core.logging import configure_logging, get_logger
from app.core.settings import Settings, load_settings
from app.main import create_app
from tests.app.conftest import client_of

pytestmark = pytest.mark.anyio

SECRET = "a-secret-key-of-enough-characters"


async def test_headers_of_every_answer(settings: Settings) -> None:
    app = create_app(settings)
    async with app.router.lifespan_context(app), client_of(app) as client:
        for path in ("/recommend/u", "/nothing", "/docs", "/health/live", "/recommend/u?n=0"):
            headers = (await client.get(path)).headers
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["Referrer-Policy"] == "no-referrer"
            assert headers["Cache-Control"] == "no-store"
            assert "Server" not in headers


async def test_other_origins_are_let_in_by_setting_only(settings: Settings) -> None:
    shop = {"Origin": "https://shop.example"}
    ask = shop | {"Access-Control-Request-Method": "POST"}
    plain = create_app(settings)
    async with plain.router.lifespan_context(plain), client_of(plain) as client:
        assert (
            "Access-Control-Allow-Origin" not in (await client.get("/items", headers=shop)).headers
        )
        assert (await client.options("/events", headers=ask)).status_code == 405
    wanted = load_settings(
        **settings.model_dump()
        | {"admin_key": SECRET, "cors_origins": "https://shop.example, https://b.example"}
    )
    app = create_app(wanted)
    async with app.router.lifespan_context(app), client_of(app) as client:
        allowed = await client.options("/events", headers=ask)  # a browser sends no key with it
        assert allowed.status_code == 200
        assert allowed.headers["Access-Control-Allow-Origin"] == "https://shop.example"
        refused = await client.options("/events", headers=ask | {"Origin": "https://c.example"})
        assert "Access-Control-Allow-Origin" not in refused.headers
        refusal = await client.get("/items", headers=shop)
        assert refusal.status_code == 401
        assert refusal.headers["Access-Control-Allow-Origin"] == "https://shop.example"


@pytest.fixture
def logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


async def test_the_log_names_the_request_and_no_secret(
    settings: Settings,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    logging_as_it_was: None,
) -> None:
    wanted = load_settings(
        **settings.model_dump() | {"admin_key": SECRET, "log_format": "json", "log_level": "debug"}
    )
    app = create_app(wanted)
    async with app.router.lifespan_context(app), client_of(app) as client:
        configure_logging(wanted)

        async def fail(*_: object) -> None:
            get_logger("test").warning("on the way")
            raise RuntimeError("broken inside")

        monkeypatch.setattr(app.state.services.catalog, "get", fail)
        headers = {"X-API-Key": SECRET, "X-Request-ID": "r-42"}
        answer = await client.get("/items/x", headers=headers)
        await client.get("/items/x", headers={"X-API-Key": "wrong-" + SECRET})
    assert answer.status_code == 500
    assert "broken inside" not in answer.text
    assert answer.json()["request_id"] == "r-42"
    text = capsys.readouterr().err
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    mine = [line for line in lines if line.get("request_id") == "r-42"]
    of_mine = [line["event"] for line in mine if "HTTP Request" not in line["event"]]
    assert of_mine == ["on the way", "request failed", "request"]
    assert SECRET not in text
