"""The database by itself: nothing is lost, whatever runs side by side."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import OperationalError

from app.all_tables import metadata
from app.core.bulk import insert_many, one_of
from app.core.database import Database
from app.core.tables import CATALOG_SEQ, EVENT_SEQ, counters, next_values
from tests.conftest import ON_POSTGRESQL

pytestmark = pytest.mark.anyio

users = metadata.tables["users"]
items = metadata.tables["items"]


async def _value(database: Database, name: str) -> int:
    rows = await database.fetch(sa.select(counters.c.value).where(counters.c.name == name))
    return int(rows[0][0])


async def test_concurrent_read_then_write_loses_nothing(database: Database) -> None:
    async def increment() -> None:
        for _ in range(25):
            async with database.write() as conn:
                # Read, think, write: the pattern that loses updates unless a lock comes first.
                query = sa.select(counters.c.value).where(counters.c.name == CATALOG_SEQ)
                value = (await conn.execute(query.with_for_update())).scalar_one()
                await asyncio.sleep(0)
                await conn.execute(
                    counters.update().where(counters.c.name == CATALOG_SEQ).values(value=value + 1)
                )

    await asyncio.gather(*(increment() for _ in range(10)))
    assert await _value(database, CATALOG_SEQ) == 250


async def test_writers_of_two_connections_take_turns(database: Database) -> None:
    other = Database(database.url.render_as_string(hide_password=False))

    async def take(db: Database) -> list[int]:
        taken = []
        for _ in range(20):
            async with db.write() as conn:
                taken.append(await next_values(conn, EVENT_SEQ, 3))
        return taken

    first, second = await asyncio.gather(take(database), take(other))
    await other.close()
    assert sorted(first + second) == list(range(1, 121, 3))


async def test_an_error_rolls_back(database: Database) -> None:
    async def fail() -> None:
        async with database.write() as conn:
            await next_values(conn, EVENT_SEQ, 5)
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        await fail()
    assert await _value(database, EVENT_SEQ) == 0


async def test_cancellation_rolls_back_and_frees_the_writer(database: Database) -> None:
    started = asyncio.Event()

    async def hang() -> None:
        async with database.write() as conn:
            await next_values(conn, EVENT_SEQ, 5)
            started.set()
            await asyncio.sleep(60)

    task = asyncio.create_task(hang())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5), database.write() as conn:
        assert await next_values(conn, EVENT_SEQ) == 1


async def test_next_values_of_0_take_no_number(database: Database) -> None:
    async with database.write() as conn:
        assert await next_values(conn, EVENT_SEQ, 0) == 1
        assert await next_values(conn, EVENT_SEQ, 2) == 1
        assert await next_values(conn, EVENT_SEQ, 0) == 3


async def test_one_of_compares_many_values_unchanged(database: Database) -> None:
    names = [f"n{i}" for i in range(5000)] + ['"', "\\", "'", "%s", "?", "😀", "é", "e\u0301", "A"]
    async with database.write() as conn:
        await insert_many(conn, users, ("external_id", "created_at"), [(name, 1) for name in names])
        found = await conn.execute(
            sa.select(users.c.external_id).where(
                one_of(users.c.external_id, [*names, "a", "absent"], database.dialect)
            )
        )
        # Byte by byte: neither case nor the form of an accent makes two ids one.
        assert sorted(found.scalars()) == sorted(names)
        none = await conn.execute(
            sa.select(users.c.id).where(one_of(users.c.id, [], database.dialect))
        )
        assert none.all() == []


async def test_json_is_read_as_it_was_written(database: Database) -> None:
    async with database.write() as conn:
        await conn.execute(
            items.insert().values(
                external_id="i",
                categories=["a", "ü"],
                attributes={"k": [1, None, "😀"]},
                seq=1,
                created_at=1,
                updated_at=1,
            )
        )
    row = (await database.fetch(sa.select(items.c.categories, items.c.attributes)))[0]
    assert tuple(row) == (["a", "ü"], {"k": [1, None, "😀"]})


async def test_foreign_keys_are_enforced(database: Database) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        async with database.write() as conn:
            await conn.execute(
                metadata.tables["events"]
                .insert()
                .values(
                    seq=1, event_id="e", user_id=9, item_id=9, type="t", timestamp=1, created_at=1
                )
            )


async def test_the_schema_permits_one_running_training(database: Database) -> None:
    jobs = metadata.tables["jobs"]

    async def add(job_id: str, kind: str, status: str) -> None:
        async with database.write() as conn:
            await conn.execute(
                jobs.insert().values(job_id=job_id, kind=kind, status=status, created_at=1)
            )

    await add("1", "train", "running")
    await add("2", "train", "queued")
    await add("3", "other", "running")
    await add("4", "other", "running")
    with pytest.raises(sa.exc.IntegrityError):
        await add("5", "train", "running")
    with pytest.raises(sa.exc.IntegrityError):
        await add("6", "train", "no such status")


@ON_POSTGRESQL
async def test_heavy_reads_leave_connections_for_the_others(database: Database) -> None:
    slow = sa.select(sa.func.pg_sleep(0.5))
    heavy = [asyncio.create_task(database.fetch_heavy(slow, 10.0)) for _ in range(30)]
    await asyncio.sleep(0.1)  # they have what they can get of the connections
    await database.ping()
    assert not any(task.done() for task in heavy)
    for task in heavy:
        task.cancel()
    await asyncio.wait(heavy)


@ON_POSTGRESQL
async def test_a_heavy_read_ends_when_its_time_is_over(database: Database) -> None:
    with pytest.raises(OperationalError):
        await database.fetch_heavy(sa.select(sa.func.pg_sleep(30)), 0.05)
    # The connection is as before: the next one may take longer.
    assert await database.fetch_heavy(sa.select(sa.func.pg_sleep(0.1)), 30.0)
