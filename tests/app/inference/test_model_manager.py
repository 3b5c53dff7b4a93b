"""`model=`: any version for a trial, loaded once for all who ask, and a bounded number of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import sqlalchemy as sa
from fastapi import FastAPI

from app.core.settings import Settings
from app.inference import model_manager as module
from app.inference.model_manager import ModelManager
from app.main import create_app
from app.registry.tables import models
from app.wiring import Services
from tests.app.conftest import client_of, publish_model, until
from tests.app.recommend.conftest import ITEMS, ask, ids, post
from tests.conftest import ON_SQLITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def versions(app: FastAPI, filled: Services) -> list[str]:
    """Four of them; the last one is served."""
    found = [await publish_model(filled, seed=seed, epochs=3) for seed in range(4)]
    await app.state.recommend.models.refresh()
    return found


@pytest.fixture
def loads(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The versions that are loaded from here on, one after the other."""
    host: ModelManager = app.state.recommend.models
    loaded: list[str] = []
    honest = host.versions._load

    async def counted(row: Any) -> Any:
        loaded.append(row.version)
        return await honest(row)

    monkeypatch.setattr(host.versions, "_load", counted)
    return loaded


async def status_of(client: httpx2.AsyncClient, version: str) -> tuple[int, str | None]:
    response = await client.get("/recommend/user-1", params={"model": version})
    return response.status_code, response.json().get("code")


async def test_any_version_answers_with_its_own_list(
    client: httpx2.AsyncClient, versions: list[str], loads: list[str]
) -> None:
    current = await ask(client, "user-1")
    assert current["model_version"] == versions[-1]
    lists = set()
    for version in versions[:2]:
        answer = await ask(client, "user-1", model=version)
        assert answer["model_version"] == version
        assert answer["recommendation_id"].startswith(version)
        assert ids(await ask(client, "user-1", model=version)) == ids(answer)
        lists.add(tuple(ids(answer)))
    assert len(lists | {tuple(ids(current))}) == 3
    assert loads == versions[:2]
    assert (await ask(client, "user-1", model=versions[-1]))["items"] == current["items"]
    assert (await ask(client, "user-1"))["items"] == current["items"]
    assert loads == versions[:2]  # the active one is there anyway
    compared = await post(client, "/compare", user="user-1", items=ITEMS[:3], model=versions[0])
    assert compared["model_version"] == versions[0]


async def test_the_one_that_was_not_asked_for_the_longest_makes_place(
    client: httpx2.AsyncClient, versions: list[str], loads: list[str]
) -> None:
    one, two, three, _ = versions
    for version in (one, two, one, three, one, three):
        await ask(client, "user-1", model=version)
    assert loads == [one, two, three]
    await ask(client, "user-1", model=two)
    assert loads == [one, two, three, two]


async def test_many_who_ask_at_once_load_it_once(
    client: httpx2.AsyncClient, versions: list[str], loads: list[str]
) -> None:
    answers = await asyncio.gather(
        *(ask(client, f"user-{n}", model=versions[0]) for n in range(1, 9))
    )
    assert {answer["model_version"] for answer in answers} == {versions[0]}
    assert loads == [versions[0]]


async def test_who_gives_up_waiting_stops_nothing(
    client: httpx2.AsyncClient,
    versions: list[str],
    loads: list[str],
    app: FastAPI,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others, go = app.state.recommend.models.versions, asyncio.Event()
    honest = others._load

    async def slow(row: Any) -> Any:
        await go.wait()
        return await honest(row)

    monkeypatch.setattr(others, "_load", slow)
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    assert await status_of(client, versions[0]) == (503, "model_loading")
    assert (await ask(client, "user-1"))["model_version"] == versions[-1]
    assert await status_of(client, versions[1]) == (503, "model_loading")
    assert await status_of(client, versions[2]) == (503, "model_loading")  # no third in the queue
    go.set()
    monkeypatch.setattr(module, "WAIT_SECONDS", 10.0)
    assert (await ask(client, "user-1", model=versions[0]))["model_version"] == versions[0]
    assert loads[0] == versions[0]
    assert loads.count(versions[0]) == 1


async def test_rejected_and_deleted_versions(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str], loads: list[str]
) -> None:
    rejected, deleted, *_ = versions
    assert (await ask(client, "user-1", model=deleted))["model_version"] == deleted
    async with app.state.services.database.write() as conn:
        for version, status in ((rejected, "rejected"), (deleted, "deleted")):
            of = models.c.version == version
            await conn.execute(sa.update(models).where(of).values(status=status))
    assert (await ask(client, "user-1", model=rejected))["model_version"] == rejected
    assert await status_of(client, deleted) == (409, "deleted_model")  # though it is still loaded
    assert await status_of(client, "nope") == (404, "unknown_model")
    assert await status_of(client, "x" * 257) == (422, "invalid_request")


async def test_a_damaged_version_is_refused_and_the_others_go_on(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str]
) -> None:
    folder = app.state.services.models.folder(versions[0])
    (folder / "model.safetensors").write_bytes(b"nonsense")
    assert await status_of(client, versions[0]) == (409, "checkpoint_damaged")
    assert await status_of(client, versions[1]) == (200, None)
    host: ModelManager = app.state.recommend.models
    assert host.refused is None
    # Nobody asked in so many words: it is not tried again and again.
    assert host.versions.at_hand(versions[0]) is None
    assert not host.versions._loading


async def test_what_is_activated_need_not_be_loaded_again(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str], loads: list[str]
) -> None:
    tried = await ask(client, "user-1", model=versions[0])
    host: ModelManager = app.state.recommend.models
    loaded = await host.get(versions[0])
    await app.state.services.models.activate(versions[0])
    await host.refresh()
    assert host.current is loaded
    assert (await ask(client, "user-1"))["items"] == tried["items"]
    assert loads == [versions[0]]


@pytest.fixture
def gate(loads: list[str], app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """What loads of other versions wait for, after they have begun."""
    others, go = app.state.recommend.models.versions, asyncio.Event()
    honest = others._load

    async def slow(row: Any) -> Any:
        loaded = await honest(row)
        await go.wait()
        return loaded

    monkeypatch.setattr(others, "_load", slow)
    return go


async def test_what_is_activated_while_it_is_loaded_is_loaded_once(
    app: FastAPI,
    client: httpx2.AsyncClient,
    versions: list[str],
    loads: list[str],
    gate: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host: ModelManager = app.state.recommend.models
    monkeypatch.setattr(host, "_load", host.versions._load)  # counted, too
    asked = asyncio.create_task(ask(client, "user-1", model=versions[0]))
    await until(lambda: loads == [versions[0]])
    await app.state.services.models.activate(versions[0])
    refreshed = asyncio.create_task(host.refresh())
    await asyncio.wait({refreshed}, timeout=0.1)
    gate.set()
    await refreshed
    assert (await asked)["model_version"] == versions[0]
    assert host.current is not None
    assert host.current.version == versions[0]
    assert loads == [versions[0]]
    assert not host.versions._loaded


@pytest.mark.parametrize("first", ["activation", "request"])
async def test_what_is_asked_for_while_it_is_activated_is_kept_once(
    app: FastAPI,
    client: httpx2.AsyncClient,
    versions: list[str],
    loads: list[str],
    gate: asyncio.Event,
    monkeypatch: pytest.MonkeyPatch,
    first: str,
) -> None:
    host: ModelManager = app.state.recommend.models
    begun, go = asyncio.Event(), asyncio.Event()
    honest = host._load

    async def slow(row: Any) -> Any:
        begun.set()
        await go.wait()
        return await honest(row)

    monkeypatch.setattr(host, "_load", slow)
    await app.state.services.models.activate(versions[0])
    refreshed = asyncio.create_task(host.refresh())
    await begun.wait()
    asked = asyncio.create_task(ask(client, "user-1", model=versions[0]))
    await until(lambda: loads == [versions[0]])
    ends = [(go, refreshed), (gate, asked)]
    for end, task in ends if first == "activation" else reversed(ends):
        end.set()
        await task
    assert (await asked)["model_version"] == versions[0]
    assert not host.versions._loaded


@pytest.fixture
async def without(settings: Settings, versions: list[str]) -> AsyncIterator[httpx2.AsyncClient]:
    """A server that keeps no other version."""
    app = create_app(settings.model_copy(update={"trial_models": 0}))
    async with app.router.lifespan_context(app), client_of(app) as client:
        yield client


async def test_a_server_may_keep_to_the_active_version(
    without: httpx2.AsyncClient, versions: list[str]
) -> None:
    assert await status_of(without, versions[-1]) == (200, None)
    assert await status_of(without, versions[0]) == (422, "model_not_served")
    assert await status_of(without, "nope") == (404, "unknown_model")


@ON_SQLITE
async def test_kernels_are_compiled_before_the_first_model_is_there(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a quarter of a minute; a server takes a new model up within 5 s."""
    compiled = []
    monkeypatch.setattr("app.inference.model_manager.compile_kernels", lambda: compiled.append(1))
    app = create_app(settings.model_copy(update={"device": "cpu"}))
    async with app.router.lifespan_context(app):
        assert app.state.recommend.models.current is None
        assert compiled == [1]


@ON_SQLITE
async def test_two_servers_with_shared_tables_answer_as_one_with_its_own(
    app: FastAPI, client: httpx2.AsyncClient, versions: list[str], settings: Settings
) -> None:
    expected = await ask(client, "user-1", n=10)
    sharing = settings.model_copy(update={"share_tables": True})
    written = set()
    for _ in range(2):
        server = create_app(sharing)
        async with server.router.lifespan_context(server), client_of(server) as other:
            assert (await ask(other, "user-1", n=10))["items"] == expected["items"]
        written.add(tuple(sorted(path.name for path in (settings.data_dir / "tables").iterdir())))
    assert len(written) == 1  # the second found what the first wrote
    assert len(written.pop()) == 1
