"""The client beside a real server: what HTTP libraries do to a path on its way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import uvicorn
from ncr_client import AsyncClient

from app.core.http_protocol import BoundedProtocol
from app.core.settings import load_settings
from app.main import create_app
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, ON_SQLITE]


@pytest.fixture
async def ncr(tmp_path: Path, database_url: str) -> AsyncIterator[AsyncClient]:
    app = create_app(
        load_settings(data_dir=tmp_path, database_url=database_url, precompute_users=0)
    )
    config = uvicorn.Config(
        app, port=0, http=BoundedProtocol, log_config=None, access_log=False, lifespan="off"
    )
    server = uvicorn.Server(config)
    async with app.router.lifespan_context(app):
        task = asyncio.create_task(server.serve())
        while not server.started:  # noqa: ASYNC110 - it has no event for it
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        async with AsyncClient(f"http://127.0.0.1:{port}") as client:
            yield client
        server.should_exit = True
        await asyncio.wait_for(task, 20)


async def test_any_id_is_one_segment_of_the_path(ncr: AsyncClient) -> None:
    """`.` and `..` too, which are steps in a path unless they are encoded."""
    for name in (".", "..", "...", "a/..", "./a", "%2E", "{}", "é ?#"):
        assert (await ncr.put_item(name, title="t"))["id"] == name
        assert (await ncr.get_item(name))["id"] == name
        await ncr.post_event(name, name)
        assert [event["item"] async for event in ncr.events_of(name)] == [name]
        assert (await ncr.recommend(name))["user"] == name
        await ncr.delete_user(name)
        assert [item["id"] async for item in ncr.items()] == [name]
        await ncr.patch_item(name, hidden=True, attributes={"of": "a shelf"})
        patched = await ncr.patch_item(name, title=None)
        assert (patched["title"], patched["hidden"]) == (None, True)
        await ncr.delete_item(name)
