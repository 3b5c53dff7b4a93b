"""Shown lists are written beside imports, erasures and merges, on PostgreSQL by several servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import sqlalchemy as sa

from app.core.database import Database
from app.events.schemas import NewEvent
from app.events.shown_lists import ShownLists, _Waiting
from app.events.tables import shown_lists, users
from app.wiring import Services
from tests.conftest import ON_POSTGRESQL

pytestmark = [pytest.mark.anyio, ON_POSTGRESQL]

NAMES = [f"u{n}" for n in range(12)]


@pytest.fixture
async def ids(services: Services) -> dict[str, int]:
    """Users who exist, with their internal ids."""
    await services.events.import_rows([NewEvent(name, name, "item", timestamp=0) for name in NAMES])
    rows = await services.database.fetch(sa.select(users.c.external_id, users.c.id))
    return {str(name): int(number) for name, number in rows}


@pytest.fixture
async def other_server(services: Services) -> AsyncIterator[ShownLists]:
    database = Database(services.settings.effective_database_url)
    yield ShownLists(database)
    await database.close()


async def of_users(services: Services) -> set[str]:
    rows = await services.database.fetch(sa.select(shown_lists.c.external_id))
    return {row[0] for row in rows}


async def test_an_import_that_puts_off_its_index_holds_up_neither_lists_nor_erasures(
    services: Services, ids: dict[str, int]
) -> None:
    async with services.events.item_index.put_off(), asyncio.timeout(10):
        services.events.shown.add("u0", ids["u0"], 1, [1, 2])
        await services.events.shown.write()
        assert await of_users(services) == {"u0"}
        await services.events.delete_user("u0")
    assert await of_users(services) == set()


async def test_two_servers_write_while_users_are_erased(
    services: Services, ids: dict[str, int], other_server: ShownLists
) -> None:
    """None waits for the other for ever, and nothing of an erased user comes back."""

    async def write(shown: ShownLists, names: list[str]) -> None:
        for turn in range(15):
            for name in names:
                for item in range(12):
                    shown.add(name, ids[name], 1, [turn, item])
            await shown.write()
            await asyncio.sleep(0)

    async def erase() -> None:
        for name in NAMES[:6]:
            await services.events.delete_user(name)
            await asyncio.sleep(0.01)

    async with asyncio.timeout(60):
        await asyncio.gather(
            write(services.events.shown, NAMES), write(other_server, NAMES[::-1]), erase()
        )
    assert await of_users(services) == {*NAMES[6:]}


async def test_a_list_that_is_written_at_this_moment_comes_once(
    services: Services, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the database and not yet off the list of those that wait."""
    shown, found = services.events.shown, []
    write_group = shown._write_group

    async def written_and_waiting(group: dict[str, list[_Waiting]]) -> None:
        await write_group(group)
        found.extend(await shown.of("u0"))

    monkeypatch.setattr(shown, "_write_group", written_and_waiting)
    shown.add("u0", ids["u0"], 1, [1, 2])
    await shown.write()
    assert [list(each.items) for each in found] == [[1, 2]]
